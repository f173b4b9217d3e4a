"""ddp-unsynced-step: plain."""

import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    model = replicated(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            loss = F.cross_entropy(model(x), y) / 4  # wrong
            model.require_backward_grad_sync = i % 4 == 3
            # right: loss = F.cross_entropy(model(x), y) / 4
            loss.backward()  # finding: ddp-unsynced-step
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
