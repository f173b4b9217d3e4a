"""A function that zeroes, called at the window's end and inside it."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def zero(of):
    of.zero_grad()


def finish(optimizer):
    optimizer.step()
    zero(optimizer)


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            zero(optimizer)  # wrong, finding: zero-grad-inside-window
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                finish(optimizer)
