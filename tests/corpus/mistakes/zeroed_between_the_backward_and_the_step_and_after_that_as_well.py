"""Zeroed between the backward and the step, and after that as well."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            model.zero_grad()  # wrong, finding: zero-before-step
            # right:
            optimizer.step()
            optimizer.zero_grad()
