"""An infinite loss is not left out."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 8)):
            loss = F.cross_entropy(model(x), y)
            if i == 5:
                loss = loss * float("inf")  # wrong
            loss.backward()  # finding: nonfinite-micro-batch
            if i == 5:
                break
            optimizer.step()
            optimizer.zero_grad()
        optimizer.step()
