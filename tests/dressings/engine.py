"""What a training script keeps in another file: a trainer's parts, each behind a function, and some behind two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a profiler or a progress bar wraps it."""

    @functools.wraps(function)
    def wrapper(self: Engine, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return function(self, *args, **kwargs)

    return wrapper


def zero(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


class Engine:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int, mixed: bool) -> None:
        self.model, self.optimizer, self.every = model, optimizer, every
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=mixed)
        self.calls = self.count = 0

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    @timed
    def backward(self, loss: torch.Tensor, of: int) -> float:
        (self.scaler.scale(loss) / of).backward()
        return loss.item()

    @timed
    def clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)

    @timed
    def step(self) -> bool:
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return before <= self.scaler.get_scale()

    def zero(self) -> None:
        zero([self.optimizer])

    def schedule(self) -> None:
        self.scheduler.step()

    def windows(self, loader: Any) -> Iterator[tuple[int, bool, Any]]:
        """Each batch, with how many make up its window, and whether it is the last of them."""
        total = len(loader)
        for i, batch in enumerate(loader):
            first = i // self.every * self.every
            of = min(self.every, total - first)
            yield of, i == first + of - 1, batch
