"""Layers replaced after the optimizer was made: it goes on with the old ones."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 12)):
            model = net() if i == 6 else model  # wrong
            F.cross_entropy(model(x), y).backward()  # finding: parameter-outside-or-twice
            optimizer.step()
            optimizer.zero_grad()
