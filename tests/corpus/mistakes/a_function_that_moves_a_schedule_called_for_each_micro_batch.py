"""A function that moves a schedule, called for each micro-batch."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def anneal(schedule):
    schedule.step()


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            anneal(schedule)  # wrong, finding: scheduler-per-micro-batch
            # right: if i % 4 == 3: anneal(schedule)
