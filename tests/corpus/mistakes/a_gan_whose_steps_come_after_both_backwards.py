"""The judge's loss reaches the maker, which has not stepped yet."""

import torch
import torch.nn.functional as F
from torch import nn


def loop(record):
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.Adam(each.parameters()) for each in (maker, judge))
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for _ in range(4):
            fakes = [maker(torch.randn(8, 2)) for _ in range(2)]
            of_maker.zero_grad()
            for fake in fakes:
                ((F.softplus(-judge(fake)).mean() + fake.square().mean()) / 2).backward(retain_graph=True)
            of_judge.zero_grad()
            for fake in fakes:
                # right: fake = fake.detach()
                real = torch.randn(8, 4)
                (
                    (F.softplus(judge(fake)) + F.softplus(-judge(real))).mean() / 2
                ).backward()  # finding: gan-gradient-leak
            of_maker.step()
            of_judge.step()
