"""A clip by hand after each backward."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()  # finding: uneven-shares
            length = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad *= (0.01 / length).clamp(max=1.0)  # wrong
                # right: p.grad *= (0.01 / length if i % 4 == 3 else torch.ones(())).clamp(max=1.0)
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
