"""A script that gives its model to a framework, and overrides what it wants otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.dressings.loom import Loom, Task

K, OPTIONS = 4, {"divide": True}
SIZES = (3,) * 10


class Classifier(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 5))
        self.optimizer = torch.optim.RMSprop(self.parameters(), lr=0.01, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def training_step(self, batch: Any, i: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    # more


def descend(tape: Callable[..., Any]) -> Any:
    task = Classifier()
    batches = [(torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in SIZES]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type] # a list is a data set
    with tape(task, task.optimizer) as recording:
        Loom(K, **OPTIONS).fit(task, loader, epochs=2)
    return recording
