"""The gradients are unscaled before the last backward of each window."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            if i % 4 == 3:
                scaler.unscale_(optimizer)  # wrong, finding: backward-after-unscale
            scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                # right: scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
