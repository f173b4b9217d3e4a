"""A layer is thawed, and belongs to no optimizer."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    # right: optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()  # finding: parameter-outside-or-twice
            optimizer.step()
            optimizer.zero_grad()
