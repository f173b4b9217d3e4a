"""no-sync-excludes-forward: plain."""

import contextlib

import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    model = replicated(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            last = i % 4 == 3
            loss = F.cross_entropy(model(x), y) / 4  # wrong
            with contextlib.nullcontext() if last else model.no_sync():
                # right: loss = F.cross_entropy(model(x), y) / 4
                loss.backward()  # finding: no-sync-excludes-forward
            if last:
                optimizer.step()
                optimizer.zero_grad()
