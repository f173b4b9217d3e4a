"""One of two optimizers zeroed between the backward and its step, which the other uses."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        one, two = (torch.optim.SGD(model[n].parameters(), lr=0.01) for n in (0, 2))
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            one.zero_grad()  # wrong, finding: zero-before-step
            one.step()
            # right: one.zero_grad()
            two.step()
            two.zero_grad()
