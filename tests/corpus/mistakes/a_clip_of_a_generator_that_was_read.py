"""The optimizer has read the parameters, and the clip finds none."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    # right: parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with record(model, optimizer):
        for x, y in batches(*[8] * 4):
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)  # finding: clip-of-nothing
            optimizer.step()
            optimizer.zero_grad()
