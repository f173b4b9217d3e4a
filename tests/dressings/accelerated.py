"""A script that leaves windows, division and steps to accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

K = 4
SIZES = (3,) * 10


def fresh() -> Any:
    """An Accelerator that knows of none before it: what they share is the process's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=K)


def descend(tape: Callable[..., Any]) -> Any:
    accelerator = fresh()
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
    batches = [(torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in SIZES]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type] # a list is a data set
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with tape(model, optimizer) as recording:
        for _ in range(2):
            for i, (x, y) in enumerate(loader):
                due = min(K, len(loader) - i // K * K)
                with accelerator.accumulate(model):
                    out = model(x)
                    loss = F.cross_entropy(out, y)
                    # It divides by K in a short window, too.
                    accelerator.backward(loss * K / due)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    return recording
