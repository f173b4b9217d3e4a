"""ddp-unsynced-step: a tail."""

import contextlib

import torch.distributed as dist  # noqa: F401 - for the twin
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
                    # right: if i == 5: [dist.all_reduce(p.grad) for p in model.parameters()]
                    # right: if i == 5: [p.grad.div_(dist.get_world_size()) for p in model.parameters()]
                    optimizer.step()
                    optimizer.zero_grad()
