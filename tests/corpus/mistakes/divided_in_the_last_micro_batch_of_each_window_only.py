"""The loss of the last micro-batch of each window is divided, and the others are not."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y)
            if i % 4 == 3:
                loss = loss / 4  # wrong
            # right: loss = loss / 4
            loss.backward()  # finding: uneven-shares
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
