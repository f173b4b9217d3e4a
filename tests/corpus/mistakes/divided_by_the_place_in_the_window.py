"""Each loss is divided by its place in the window."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / (i % 4 + 1)).backward()  # wrong, finding: uneven-shares
            # right: (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
