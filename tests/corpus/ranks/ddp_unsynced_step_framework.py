"""ddp-unsynced-step: framework."""

import contextlib

import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import accelerator, batches, net


def loop(record):
    boss = accelerator()
    model = net()
    model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
    with record(model, optimizer.optimizer):
        for i, (x, y) in enumerate(batches(8)):
            with boss.no_sync(model) if i % 4 else contextlib.nullcontext():  # wrong
                # right: with boss.no_sync(model) if i % 4 != 3 else contextlib.nullcontext():
                boss.backward(F.cross_entropy(model(x), y) / 4)  # finding: ddp-unsynced-step
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
