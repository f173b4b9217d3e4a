"""The closure of LBFGS does not zero."""

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

            optimizer.step(closure)  # finding: missing-zero-grad
