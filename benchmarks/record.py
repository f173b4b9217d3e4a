"""What recording costs a training step, beside what those who watch gradients do instead, inside one run."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import nn

from accumviz.instruments.record import record

Step = Callable[[], None]
# What is opened around a stretch of steps.
Around = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure, and return rows of name, value, unit, bar and whether the bar holds.

    Ratios to the bare step are medians over rounds in which all variants take turns. A recording
    stays open over a variant's whole stretch, so that the freezing of its rows is in the time; the
    stretch's first steps, in which it measures the saved bytes of every graph, are not.
    """
    others: dict[str, Around] = {"cloning every grad": _clones, "per-hook .norm().item()": _norms}
    watchers = others | {"a histogram per parameter": _histograms}
    small, large = _transformer(128, 576, (8, 32)), _transformer(288, 864, (16, 64))
    rows = _ratios("transformer, 147 parameters, 2.6 M weights, 256 tokens", *small, 1.03, watchers, 7, quick)
    rows += _ratios("transformer, 10 M weights, 1,024 tokens", *large, 1.01, {}, 5, quick)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as small a step as this gains nothing from more, and varies less
    try:
        rows += _ratios("MLP step", *_mlp(), 1.15, others, 13, quick)
    finally:
        torch.set_num_threads(threads)
    return rows


def _ratios(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    bar: float,
    watchers: dict[str, Around],
    rounds: int,
    quick: bool,
) -> list[dict[str, Any]]:
    variants: dict[str, Around] = {"bare": lambda *_: nullcontext(), "recording": record, **watchers}
    for _ in range(3):
        step()
    # A stretch long enough to time and to freeze rows in, short enough to meet the same machine as its neighbours.
    length = max(2, int((0.3 if quick else 1.0) / _seconds(step, 3)))
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    orders = itertools.cycle([list(variants), list(variants)[::-1]])
    for _ in range(2 if quick else rounds):
        for variant in next(orders):
            with variants[variant](model, optimizer):
                _seconds(step, max(6, length // 4))
                times[variant].append(_seconds(step, length))
    bare = median(times["bare"])
    rows = []
    for variant in list(variants)[1:]:
        # Neighbours in time are compared: what the machine does besides weighs on both.
        ratio = median(watched / plain for watched, plain in zip(times[variant], times["bare"], strict=True))
        limit = bar if variant == "recording" else None
        rows.append(
            {
                "name": f"{name}, {_readable(bare)} bare: {variant}",
                "value": round(ratio, 4),
                "unit": "×",
                "bar": None if limit is None else f"≤ {limit}",
                "holds": None if limit is None else ratio <= limit,
            }
        )
    return rows


def _seconds(step: Step, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - start) / times


def _readable(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 1e-2 else f"{1e3 * seconds:.0f} ms"


def _transformer(width: int, inner: int, batch: tuple[int, int]) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, inner, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(256, width),
        nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
        nn.Linear(width, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(0, 256, batch)  # of one micro-batch

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / 2
            loss.backward()
        optimizer.step()

    return model, optimizer, step


def _mlp() -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """An MLP whose step takes about half a millisecond here: the batch is what makes it so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def stepping(batch: int) -> Step:
        x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))

        def step() -> None:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        return step

    candidates = []
    for batch in range(32, 513, 32):
        step = stepping(batch)
        _seconds(step, 50)
        candidates.append((abs(min(_seconds(step, 50) for _ in range(5)) - 5e-4), batch))
    return model, optimizer, stepping(min(candidates)[1])


@contextmanager
def _hooked(model: nn.Module, hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in model.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _clones(model: nn.Module, _: torch.optim.Optimizer) -> AbstractContextManager[None]:
    kept: dict[int, torch.Tensor] = {}

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        kept[id(parameter)] = parameter.grad.clone()

    return _hooked(model, hook)


def _norms(model: nn.Module, _: torch.optim.Optimizer) -> AbstractContextManager[None]:
    kept: list[float] = []

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        kept.append(parameter.grad.norm().item())

    return _hooked(model, hook)


def _histograms(model: nn.Module, _: torch.optim.Optimizer) -> AbstractContextManager[None]:
    kept: dict[int, torch.Tensor] = {}

    def hook(parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        low, high = grad.min().item(), grad.max().item()
        kept[id(parameter)] = torch.histc(grad, bins=64, min=low, max=high)

    return _hooked(model, hook)


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(json.dumps(row, ensure_ascii=False))
