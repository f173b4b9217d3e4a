"""uneven-rank-backwards: a forward without gradients."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    model = replicated(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(6 - 2 * dist.get_rank())):  # wrong
            # right: for i, (x, y) in enumerate(batches(4)):
            last = i % 2 == 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x), y) / 2
                if dist.get_rank() == 0:
                    with torch.no_grad():
                        model(x)
                loss.backward()  # finding: uneven-rank-backwards
            if last:
                optimizer.step()
                optimizer.zero_grad()
