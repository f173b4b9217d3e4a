"""LBFGS is zeroed before its step, and not in the closure."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with record(model, optimizer):
        for x, y in batches(*[8] * 4):

            def closure(x=x, y=y):
                # right: optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.zero_grad()
            optimizer.step(closure)  # finding: missing-zero-grad
