"""A script that trains with the parts of another file, in functions of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.dressings.engine import Engine

K, MIXED = 4, False
SIZES = (3,) * 10


def made() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    batches = [(torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in SIZES]
    return model, DataLoader(batches, batch_size=None)  # type: ignore[arg-type] # a list is a data set


def descend(tape: Callable[..., Any]) -> Any:
    model, loader = made()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), K, MIXED)

    def train(batch: Any, of: int) -> float:
        return engine.backward(engine.loss(batch), of)

    def finish() -> None:
        engine.clip()
        if engine.step():
            engine.schedule()
        engine.zero()

    def epoch() -> None:
        for of, last, batch in engine.windows(loader):
            train(batch, of)
            if last:
                finish()

    with tape(model, engine.optimizer) as recording:
        for _ in range(2):
            epoch()
    return recording
