"""One scaler steps two optimizers, and is updated after each."""

import torch
import torch.nn.functional as F
from torch import nn


def loop(record):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    models = nn.Linear(6, 1), nn.Linear(6, 1)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.01) for model in models)
    with record(*models, one, other):
        for _ in range(8):
            x, y = torch.randn(4, 6), torch.randn(4, 1)
            for model in models:
                scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(one)
            scaler.update()  # wrong
            scaler.step(other)  # finding: scaler-updated-between-steps
            scaler.update()
            one.zero_grad()
            other.zero_grad()
