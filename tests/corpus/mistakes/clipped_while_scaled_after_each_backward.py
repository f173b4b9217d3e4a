"""Clipped while scaled, after each backward."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        s = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            s.scale(F.cross_entropy(model(x), y) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # wrong, finding: clip-scaled-grads
            # right: if i % 4 == 3: s.unscale_(optimizer); nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if i % 4 == 3:
                s.step(optimizer)
                s.update()
                optimizer.zero_grad()
