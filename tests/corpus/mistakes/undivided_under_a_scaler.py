"""Undivided under a scaler."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()  # wrong, finding: loss-not-divided
            # right: scaler.scale(loss / 4).backward()
            if i % 4 == 3:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
