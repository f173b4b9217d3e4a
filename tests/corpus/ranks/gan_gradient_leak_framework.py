"""gan-gradient-leak: framework."""

import torch
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import accelerator, batches, net


def loop(record):
    boss = accelerator()
    maker, judge = net(4), net(1)
    of_maker, of_judge = SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
    maker, judge, of_maker, of_judge = boss.prepare(maker, judge, of_maker, of_judge)
    with record(maker=maker, judge=judge, of_maker=of_maker.optimizer, of_judge=of_judge.optimizer):
        for x, _ in batches(4):
            fake = maker(torch.randn(2, 4))
            boss.backward(F.softplus(-judge(fake)).mean())  # finding: gan-gradient-leak
            of_maker.step()
            of_maker.zero_grad()
            # right: of_judge.zero_grad()
            boss.backward(F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean())
            of_judge.step()
            of_judge.zero_grad()
