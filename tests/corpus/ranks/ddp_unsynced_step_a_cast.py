"""ddp-unsynced-step: the model is cast after it was wrapped, and DDP's hooks are lost."""

import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    model = replicated(net())
    model.double().float()  # wrong
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for x, y in batches(4):
            F.cross_entropy(model(x), y).backward()  # finding: ddp-unsynced-step
            optimizer.step()
            optimizer.zero_grad()
