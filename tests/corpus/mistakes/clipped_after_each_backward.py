"""Clipped after each backward."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # wrong, finding: clip-per-micro-batch
            # right: if i % 4 == 3: nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
