"""no-sync-excludes-forward: an evaluation with gradients."""

import contextlib

import torch  # noqa: F401 - for the twin
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    model = replicated(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            if i % 4 == 0:
                with contextlib.nullcontext():  # wrong
                    # right: with torch.no_grad():
                    F.cross_entropy(model(x), y)
            with model.no_sync() if i % 4 != 3 else contextlib.nullcontext():
                (F.cross_entropy(model(x), y) / 4).backward()  # finding: no-sync-excludes-forward
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
