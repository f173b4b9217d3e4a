"""Divided twice."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y) / 4
            (loss / 4).backward()  # wrong, finding: double-division
            # right: loss.backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
