"""A small framework in the manner of Lightning: the loop is its own, a window's last backward is in a closure."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


class Task(nn.Module):
    """What a user derives from: a model, its losses, and hooks to override."""

    optimizer: torch.optim.Optimizer
    scheduler: Any

    def training_step(self, batch: Any, i: int) -> torch.Tensor:
        raise NotImplementedError

    def window(self, i: int, every: int, total: int) -> tuple[int, int]:
        """The first micro-batch of the window to which this one belongs, and how many are in it."""
        first = i // every * every
        return first, min(every, total - first)

    def backward(self, loss: torch.Tensor, i: int) -> None:
        loss.backward()

    def before_step(self, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    def optimizer_step(self, closure: Any, scaler: torch.amp.GradScaler) -> None:
        if not scaler.is_enabled():
            self.optimizer.step(closure)
            return
        closure()
        scaler.step(self.optimizer)
        scaler.update()

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def scheduler_step(self, *, skipped: bool) -> None:
        if not skipped:
            self.scheduler.step()


class Loom:
    def __init__(self, every: int, *, mixed: bool = False, divide: bool = True) -> None:
        self.every, self.divide = every, divide
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=mixed)

    def fit(self, task: Task, loader: Any, epochs: int) -> None:
        for _ in range(epochs):
            for i, batch in enumerate(loader):
                self._run(task, batch, i, len(loader))

    def _run(self, task: Task, batch: Any, i: int, total: int) -> None:
        first, of = task.window(i, self.every, total)
        last = i == first + of - 1
        closure = functools.partial(self._closure, task, batch, i, of, first=i == first, last=last)
        if not last:
            closure()
            return
        scale = self.scaler.get_scale()
        task.optimizer_step(closure, self.scaler)
        task.scheduler_step(skipped=self.scaler.get_scale() < scale)

    def _closure(self, task: Task, batch: Any, i: int, of: int, *, first: bool, last: bool) -> torch.Tensor:
        loss = task.training_step(batch, i)
        if first:
            task.optimizer_zero_grad()
        task.backward(self.scaler.scale(loss / of if self.divide else loss), i)
        if last:
            task.before_step(self.scaler)
        return loss
