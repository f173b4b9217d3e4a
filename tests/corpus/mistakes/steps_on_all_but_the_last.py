"""The condition is the wrong way round: it steps on all micro-batches but the last of a window."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()  # finding: sums-differ
            last = i % 4 != 3  # wrong
            # right: last = i % 4 == 3
            if last:
                optimizer.step()
                optimizer.zero_grad()
