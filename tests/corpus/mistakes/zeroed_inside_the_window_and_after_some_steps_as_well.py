"""Zeroed inside the window, and after some steps as well."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            optimizer.zero_grad()  # wrong, finding: zero-grad-inside-window
            # right:
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                if i % 8 == 7:  # wrong
                    # right: if True:
                    model.zero_grad()
