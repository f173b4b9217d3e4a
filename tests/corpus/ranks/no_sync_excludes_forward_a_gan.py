"""no-sync-excludes-forward: a window of one player of a GAN synchronises the other one with each backward."""

import contextlib

import torch
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, replicated


def loop(record):
    maker, judge = replicated(net(4)), replicated(net(1))
    of_maker, of_judge = SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for i, (x, _) in enumerate(batches(8)):
            last = i % 4 == 3
            with maker.no_sync() if not last else contextlib.nullcontext():
                # right: judge.requires_grad_(False)
                fake = maker(torch.randn(2, 4))
                (F.softplus(-judge(fake)).mean() / 4).backward()  # finding: no-sync-excludes-forward
            if last:
                # right: judge.requires_grad_(True)
                of_maker.step()
                of_maker.zero_grad()
                of_judge.zero_grad()
                (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
                of_judge.step()
