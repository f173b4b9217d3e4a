"""The optimizer steps by itself, on scaled gradients."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with record(model, optimizer):
        for x, y in batches(*[2] * 6):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            optimizer.step()  # wrong, finding: bypass-scaler-step
            # right: scaler.step(optimizer)
            # right: scaler.update()
            optimizer.zero_grad()
