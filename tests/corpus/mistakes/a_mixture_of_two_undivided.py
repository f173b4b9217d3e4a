"""A mixture of two, undivided."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            loss = 0.7 * F.cross_entropy(out, y) + 0.3 * out.square().mean()  # wrong
            # right: loss = 0.25 * 0.7 * F.cross_entropy(out, y) + 0.25 * 0.3 * out.square().mean()
            loss.backward()  # finding: loss-not-divided
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
