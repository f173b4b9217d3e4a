"""A short window, divided before."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 10)):
            loss = F.cross_entropy(model(x), y) / 4  # wrong
            # right: loss = F.cross_entropy(model(x), y) / (4 if i < 8 else 2)
            loss.backward()  # finding: partial-window-underscaled
            if i % 4 == 3 or i == 9:
                optimizer.step()
                optimizer.zero_grad()
