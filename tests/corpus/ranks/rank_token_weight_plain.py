"""rank-token-weight: plain."""

import contextlib

import torch
import torch.distributed as dist  # noqa: F401 - for the twin
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import net, replicated, texts


def loop(record):
    model = replicated(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for window in texts():
            count = torch.tensor(float(sum(len(y) for _, y in window)))
            # right: dist.all_reduce(count)
            # right: count /= dist.get_world_size()
            for i, (x, y) in enumerate(window):
                with model.no_sync() if i == 0 else contextlib.nullcontext():
                    loss = F.cross_entropy(model(x), y, reduction="sum") / count.item()
                    loss.backward()  # finding: rank-token-weight
            optimizer.step()
            optimizer.zero_grad()
