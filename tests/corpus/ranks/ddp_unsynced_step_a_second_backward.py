"""ddp-unsynced-step: a second backward."""

import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    model = replicated(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for x, y in batches(4):
            out = model(x)
            first, second = F.cross_entropy(out, y), out.square().mean()
            first.backward(retain_graph=True)  # wrong
            second.backward()  # wrong, finding: ddp-unsynced-step
            # right: (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()
