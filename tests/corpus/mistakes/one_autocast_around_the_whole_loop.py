"""One autocast spans steps, and keeps the 16-bit copies of the weights from before them."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F

from tests.corpus.common import loader, net


def loop(record):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    around, inside = torch.autocast("cpu", torch.bfloat16), nullcontext()
    # right: around, inside = inside, around
    with record(model, optimizer), around:
        for i, (x, y) in enumerate(loader()):
            with inside:
                loss = F.cross_entropy(model(x), y) / 4
            loss.backward()  # finding: weights-frozen-by-autocast
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
