"""A step one micro-batch too early."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 17)):
            (F.cross_entropy(model(x), y) / 4).backward()  # finding: wrong-divisor
            if i % 3 == 2:  # wrong
                # right: if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
