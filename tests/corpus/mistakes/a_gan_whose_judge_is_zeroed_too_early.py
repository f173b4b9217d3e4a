"""The generator's loss stays in the judge's gradients until the judge steps."""

import torch
import torch.nn.functional as F
from torch import nn


def loop(record):
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.Adam(each.parameters()) for each in (maker, judge))
    bce, yes, no = F.binary_cross_entropy_with_logits, torch.ones(8, 1), torch.zeros(8, 1)
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for _ in range(4):
            # right: of_judge.zero_grad()
            fake = maker(torch.randn(8, 2))
            loss = bce(judge(torch.randn(8, 4)), yes) + bce(judge(fake.detach()), no)
            loss.backward()
            of_judge.step()
            of_judge.zero_grad()
            of_maker.zero_grad()
            bce(judge(fake), yes).backward()  # finding: gan-gradient-leak
            of_maker.step()
