"""Gradients divided after each backward."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            F.cross_entropy(model(x), y).backward()  # finding: uneven-shares
            for p in model.parameters():
                p.grad /= 4  # wrong
                # right: p.grad /= 4 if i % 4 == 3 else 1
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
