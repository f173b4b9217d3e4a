"""Functions without a name, in the wrong order."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        zero, step = lambda: optimizer.zero_grad(), lambda: optimizer.step()
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            zero()  # wrong, finding: zero-before-step
            step()
            # right: zero()
