"""A clip alone in its block, after the step."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()  # wrong
            with torch.no_grad():
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # finding: clip-on-the-wrong-side
            optimizer.zero_grad()  # wrong
            # right: optimizer.step(); optimizer.zero_grad()
