"""Both players are zeroed first, and both losses reach both of them."""

import torch
import torch.nn.functional as F
from torch import nn


def loop(record):
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.Adam(each.parameters()) for each in (maker, judge))
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for _ in range(4):
            of_maker.zero_grad()
            of_judge.zero_grad()
            fake = maker(torch.randn(8, 2))
            score = judge(fake)
            F.softplus(-score).mean().backward(retain_graph=True)
            # right: of_maker.step()
            # right: of_judge.zero_grad()
            # right: score = judge(fake.detach())
            (F.softplus(score) + F.softplus(-judge(torch.randn(8, 4)))).mean().backward()  # finding: gan-gradient-leak
            of_maker.step()  # wrong
            of_judge.step()
