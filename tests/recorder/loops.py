"""Loops that do to `.grad` what loops do, short: where an event happened is read from the source of its whole file."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumviz as av

Train = Callable[[Callable[..., Any]], list[torch.Tensor]]
OURS = str(Path(av.__file__).parent / "recorder") + os.sep


# The ways in which a loop is recorded.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "graphs": {"graphs": True},
    "memory": {"memory": True},
    "path": {"path": "run.ledger"},
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Refusing(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


def raised_inside(error: type[BaseException]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that fails in a function of ours that one of ours calls; Python then forgets it."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and all(one and one.f_code.co_filename.startswith(OURS) for one in (frame, frame.f_back)):
            raise error

    return profile


def leaf(size: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype).requires_grad_()


def kinds(ledger: Any) -> list[str]:
    return [event.kind for event in ledger]


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def alone(around: Callable[..., Any]) -> list[torch.Tensor]:
    """What a loop does to `.grad`, each thing at least once."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def halve(p: torch.Tensor) -> None:
        if p.grad is not None:
            p.grad.div_(2)

    model[0].weight.register_hook(lambda gradient: gradient / 2)
    model[2].weight.register_post_accumulate_grad_hook(halve)
    optimizer.register_step_pre_hook(lambda *_: halve(model[2].bias))
    with around(model, optimizer):
        for batch in torch.utils.data.DataLoader(torch.randn(3, 4), batch_size=2):
            scores = model(batch)
            scores.register_hook(lambda gradient: gradient / 2)
            masked = nn.functional.cross_entropy(scores, torch.zeros(len(batch)).long(), reduction="none")
            ((masked * torch.ones(len(batch))).sum() / 3 + scores.square().mean()).backward()
        scheduler.step()
        optimizer.zero_grad()
        for step in range(2):
            for _ in range(2):
                loss = model(torch.randn(3, 4)).square().mean() / 2
                scaler.scale(loss * (float("inf") if step else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        model[0].weight.grad = torch.ones(6, 4)
        hidden = checkpoint(model, torch.randn(3, 4), use_reentrant=False)
        (hidden.square().mean() / 2).backward()
        with contextlib.suppress(ValueError):
            Refusing.apply(model(torch.randn(3, 4))).sum().backward()
        optimizer.step()
        model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _in_ranks(model: Any, around: Callable[..., Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with around(model, optimizer):
        for _ in range(2):
            with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
                (model(torch.randn(3, 4)).square().mean() / 2).backward()
            (model(torch.randn(3, 4)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def replicated(around: Callable[..., Any]) -> list[torch.Tensor]:
    return _in_ranks(nn.parallel.DistributedDataParallel(net()), around)


def sharded(around: Callable[..., Any]) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for part in (model[0], model[2], model):
        fully_shard(part)
    return _in_ranks(model, around)
