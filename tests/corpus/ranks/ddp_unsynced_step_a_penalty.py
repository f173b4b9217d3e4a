"""ddp-unsynced-step: the backward of a penalty, for which no forward through DDP has armed an all-reduce."""

import torch
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    judge = replicated(net(1))
    optimizer = SGD(judge.parameters(), lr=0.1)
    with record(judge, optimizer):
        for x, _ in batches(4):
            loss = F.softplus(-judge(x)).mean()
            loss.backward()  # wrong
            x.requires_grad_()
            (slope,) = torch.autograd.grad(judge.module(x).sum(), x, create_graph=True)
            loss = slope.square().sum(1).mean()
            # right: loss = loss + F.softplus(-judge(x)).mean()
            loss.backward()  # finding: ddp-unsynced-step
            optimizer.step()
            optimizer.zero_grad()
