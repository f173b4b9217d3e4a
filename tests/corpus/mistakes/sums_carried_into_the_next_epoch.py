"""Sums carried into the next epoch."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for _ in range(3):
            for i, (x, y) in enumerate(batches(*[2] * 6)):  # wrong
                # right: for i, (x, y) in enumerate(batches(*[2] * 8)):
                loss = F.cross_entropy(model(x), y, reduction="sum") / 8
                loss.backward()  # finding: leftover-carried
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
