"""Undivided sum of two."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            (F.cross_entropy(out, y) + 0.0 * out.square().mean()).backward()  # wrong, finding: loss-not-divided
            # right: (F.cross_entropy(out, y) + 0.0 * out.square().mean()).div(4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
