"""The whole model is in bfloat16, and each step is rounded away."""

import torch
import torch.nn.functional as F

from tests.corpus.common import loader, net


def loop(record):
    model = net().bfloat16()
    # right: model = net()
    for p in model.parameters():
        torch.nn.init.ones_(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    with record(model, optimizer):
        for x, y in loader():
            F.cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
            optimizer.step()  # finding: step-lost-in-rounding
            optimizer.zero_grad()
