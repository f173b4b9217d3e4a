"""rank-token-weight: framework."""

import contextlib

import torch
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import accelerator, net, texts


def loop(record):
    boss = accelerator()
    model = net()
    model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
    with record(model, optimizer.optimizer):
        for window in texts():
            count = torch.tensor(float(sum(len(y) for _, y in window)))
            # right: count = boss.reduce(count, "mean")
            for x, y in window:
                with boss.no_sync(model) if y is window[0][1] else contextlib.nullcontext():
                    loss = F.cross_entropy(model(x), y, reduction="sum") / count.item()
                    boss.backward(loss)  # finding: rank-token-weight
            optimizer.step()
            optimizer.zero_grad()
