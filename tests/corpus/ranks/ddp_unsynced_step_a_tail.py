"""ddp-unsynced-step: a tail."""

import contextlib

import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    model = replicated(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for _ in range(2):
            for i, (x, y) in enumerate(batches(6)):
                with model.no_sync() if i % 4 != 3 else contextlib.nullcontext():
                    (F.cross_entropy(model(x), y) / (4 if i < 4 else 2)).backward()  # finding: ddp-unsynced-step
                if i in (3, 5):
                    # right: if i == 5:
                    # right: for p in model.parameters():
                    # right: dist.all_reduce(p.grad)
                    # right: p.grad /= dist.get_world_size()
                    optimizer.step()
                    optimizer.zero_grad()
