"""A function that trains, and zeroes before."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def train(model, own, x, y):
    own.zero_grad()  # wrong, finding: zero-grad-inside-window
    (F.cross_entropy(model(x), y) / 4).backward()


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            train(model, optimizer, x, y)
            if i % 4 == 3:
                optimizer.step()  # wrong
                # right: optimizer.step(); optimizer.zero_grad()
