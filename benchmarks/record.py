"""What recording costs a training step, beside what those who watch gradients do instead, inside one run."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accumviz.recorder.recording import record
from benchmarks._plain import recording as plain
from benchmarks._turns import Row, Step, in_turns, quartile, row, spent

Loop = tuple[nn.Module, torch.optim.Optimizer, Step]
# What is opened around a stretch of steps.
Around = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


def run(quick: bool = False) -> list[Row]:
    """Measure, and return rows of name, value, unit, bar and whether the bar holds.

    Ratios are of process time on one thread, between the lower quartiles of rounds in which all variants take turns.
    A recording stays open over a variant's whole stretch, so that what it puts away, freezes and writes is in the
    time; the stretch's first steps, in which it measures the saved bytes of every graph, are not.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _rows(Path(folder), quick)
    finally:
        torch.set_num_threads(threads)


def _rows(folder: Path, quick: bool) -> list[Row]:
    names = iter(range(1_000_000))

    def to_file(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return record(model, optimizer, path=folder / f"{next(names)}.ledger")

    def with_graphs(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return record(model, optimizer, graphs=True)

    others: dict[str, Around] = {
        "cloning every grad": _clones,
        "per-hook .norm().item()": _norms,
        "a histogram per parameter": _histograms,
    }
    ours: dict[str, Around] = {"recording": record, "a plain recorder": plain, "recording to a file": to_file}
    small, large = transformer(128, 576, (8, 32)), transformer(288, 864, (16, 64))
    traced: dict[str, Around] = {"recording with graphs=True": with_graphs}
    rows = _ratios("transformer, 2.6 M weights", small, 1.03, ours | traced | others, 0.6, 14, quick)
    rows += _ratios("transformer, 10 M weights", large, 1.01, {"recording": record}, 1.5, 10, quick)
    for seconds, bar in ((5e-4, 1.15), (2e-4, 1.35)):
        rows += _ratios(f"MLP, {1e3 * seconds:g} ms", mlp(seconds), bar, ours, 0.4, 24, quick)
    return rows


def _ratios(
    name: str, loop: Loop, bar: float, variants: dict[str, Around], seconds: float, rounds: int, quick: bool
) -> list[Row]:
    """Each variant against the bare step, in stretches of so many seconds."""
    model, optimizer, step = loop
    spent(step, 3)
    length = max(2, int((0.2 if quick else seconds) / spent(step, 3)))
    settling = max(5, length // 3)  # the first backwards measure what their graphs save

    def opening(around: Around) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: around(model, optimizer)

    turns = {"bare": nullcontext} | {variant: opening(around) for variant, around in variants.items()}
    times = in_turns(step, turns, rounds=2 if quick else rounds, length=length, settling=settling)
    bare = quartile(times["bare"])
    rows = [row(f"{name}: bare step", 1e3 * bare, "ms")]
    for variant in variants:
        ratio = quartile(times[variant]) / bare
        rows.append(row(f"{name}: {variant}", ratio, "×", bar if variant == "recording" else None))
    return rows


def transformer(
    width: int, inner: int, batch: tuple[int, int], around: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Loop:
    """Twelve layers, 147 parameters, two micro-batches of so many sequences and tokens to a step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, inner, batch_first=True)
    model = around(
        nn.Sequential(
            nn.Embedding(256, width),
            nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
            nn.Linear(width, 256),
        )
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


def mlp(seconds: float) -> Loop:
    """An MLP whose step takes about so long here: the batch is what makes it so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def stepping(batch: int) -> Step:
        x, y = torch.randn(batch, 32), torch.randint(0, 10, (batch,))

        def step() -> None:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        return step

    def off(batch: int) -> float:
        step = stepping(batch)
        return abs(min(spent(step, 30) for _ in range(4)) - seconds)

    return model, optimizer, stepping(min((16 * n for n in range(1, 33)), key=off))


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
