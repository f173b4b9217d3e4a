"""A sum that begins anew in each window, of which each backward runs all so far."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        total = 0
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            total = total + F.cross_entropy(model(x), y) / 4  # wrong
            # right: total = F.cross_entropy(model(x), y) / 4
            total.backward(retain_graph=True)  # finding: graph-retained
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                total = 0
