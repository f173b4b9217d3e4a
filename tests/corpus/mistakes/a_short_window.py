"""The last window of each epoch is shorter, and divided by the length of a whole one."""

import torch
import torch.nn.functional as F

from tests.corpus.common import loader, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for _ in range(2):
            data = loader(12)
            for i, (x, y) in enumerate(data):
                size = 4  # wrong
                # right: size = 4 if i < 4 else 2
                (F.cross_entropy(model(x), y) / size).backward()  # finding: partial-window-underscaled
                if i % 4 == 3 or i == len(data) - 1:
                    optimizer.step()
                    optimizer.zero_grad()
