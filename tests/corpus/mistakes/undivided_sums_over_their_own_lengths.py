"""Undivided sums over their own lengths."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[6] * 16)):
            loss = F.cross_entropy(model(x), y, reduction="sum") / len(y)  # wrong
            # right: loss = F.cross_entropy(model(x), y, reduction="sum") / (4 * len(y))
            loss.backward()  # finding: loss-not-divided
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
