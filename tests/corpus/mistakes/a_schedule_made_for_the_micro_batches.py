"""A schedule that is made for the micro-batches, and steps once a window."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = batches(*[2] * 10)
    steps = 2 * len(data)  # wrong
    # right: steps = 2 * 3
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    with record(model, optimizer):
        for _ in range(2):
            for i, (x, y) in enumerate(data):
                size = 4 if i < 8 else 2
                (F.cross_entropy(model(x), y) / size).backward()
                if i % 4 == 3 or i == 9:
                    optimizer.step()
                    schedule.step()  # finding: schedule-too-long
                    optimizer.zero_grad()
