"""A step after the first micro-batch."""

import torch
import torch.nn.functional as F

from tests.corpus.common import loader, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(loader()):
            (F.cross_entropy(model(x), y) / 4).backward()  # finding: partial-window-underscaled
            if i % 4 == 0:  # wrong
                # right: if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
