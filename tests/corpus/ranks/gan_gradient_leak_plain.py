"""gan-gradient-leak: plain."""

import torch
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    maker, judge = replicated(net(4)), replicated(net(1))
    of_maker, of_judge = SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for x, _ in batches(4):
            fake = maker(torch.randn(2, 4))
            F.softplus(-judge(fake)).mean().backward()  # finding: gan-gradient-leak
            of_maker.step()
            of_maker.zero_grad()
            # right: of_judge.zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            of_judge.step()
            of_judge.zero_grad()
