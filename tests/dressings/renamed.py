"""A training program in which nothing has its usual name, in a functional style: its weights are a dict of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as fn
from torch.utils.data import DataLoader

SPAN, MIXED = 4, False
HEAPS = (3,) * 10
LAPS = 2


def heaps() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in HEAPS]


def descend(tape: Callable[..., Any]) -> Any:
    shape = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    theta = {name: leaf.detach().requires_grad_() for name, leaf in shape.named_parameters()}
    mover = torch.optim.NAdam(list(theta.values()), lr=0.01)
    pace = torch.optim.lr_scheduler.CosineAnnealingLR(mover, 30)
    gauge = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=MIXED)
    feed = DataLoader(heaps(), batch_size=None)  # type: ignore[arg-type] # a list is a data set
    with tape(theta, mover) as reel:
        for _lap in range(LAPS):
            for tick, (rows, kinds) in enumerate(feed):
                if tick % SPAN == 0:
                    mover.zero_grad()
                due = min(SPAN, len(feed) - tick // SPAN * SPAN)
                guess = functional_call(shape, theta, (rows,))
                miss = fn.cross_entropy(guess, kinds)
                torch.autograd.backward(gauge.scale(miss * (1 / due)))
                if tick % SPAN < due - 1:
                    continue
                gauge.unscale_(mover)
                nn.utils.clip_grad_norm_(theta.values(), 0.05)
                was = gauge.get_scale()
                gauge.step(mover)
                gauge.update()
                if gauge.get_scale() >= was:
                    pace.step()
    return reel
