"""What each epoch leaves over is zeroed at the start of the next one."""

import torch
import torch.nn.functional as F

from tests.corpus.common import loader, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            data = loader(12)
            for i, (x, y) in enumerate(data):
                size = 4 if i < 4 else 2
                (F.cross_entropy(model(x), y) / size).backward()  # finding: tail-dropped
                last = i % 4 == 3  # wrong
                # right: last = i % 4 == 3 or i == len(data) - 1
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
