"""Recording on a CUDA device: what it costs, that it waits for nothing, changes nothing and tells the truth.

The checks are in `_cuda.py`; tests/recorder/test_cuda.py runs them as tests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
from torch import nn

from accumviz.recorder.recording import record
from benchmarks._cuda import CHECKS, Row, row
from benchmarks.record import transformer


def missing() -> str:
    """What this machine lacks, and what would do; empty where it can be measured."""
    if torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (
        f"no CUDA device was found (torch {torch.__version__} is {built}); needed are an NVIDIA GPU with its driver "
        "and a torch built for CUDA: then `python -m benchmarks cuda` measures"
    )


def run(quick: bool = False) -> list[Row]:
    """Measure, and return rows of name, value, unit, bar and whether the bar holds.

    Raises `RuntimeError` where there is no CUDA device: nothing is made up.
    """
    if missing():
        raise RuntimeError(missing())
    rows = [row for check in CHECKS for row in check()]
    return rows + overhead(quick)


def overhead(quick: bool = False) -> list[Row]:
    """Ratios of a recorded step to a bare one, by CUDA events: medians of neighbours that take turns."""
    rows = []
    for tokens, bar in (((16, 256), 1.02), ((4, 32), None)):
        model, optimizer, step, weights = _large(tokens)
        for _ in range(5):
            step()
        length = max(3, int((0.3 if quick else 1.5) / _seconds(step, 3)))
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(2 if quick else 9):
            for recorded in (False, True):
                with record(model, optimizer) if recorded else nullcontext():
                    _seconds(step, 5)
                    times[recorded].append(_seconds(step, length))
        ratio = median(a / b for a, b in zip(times[True], times[False], strict=True))
        name = f"transformer, {weights / 1e6:.0f} M weights, 2 × {tokens[0] * tokens[1]:,} tokens"
        name += f", {1e3 * median(times[False]):.3g} ms bare on {torch.cuda.get_device_name()}: recording"
        rows.append(row(name, round(ratio, 4), "×", None if bar is None else f"≤ {bar}", bar and ratio <= bar))
        del model, optimizer, step
        torch.cuda.empty_cache()
    return rows


def _large(tokens: tuple[int, int]) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None], int]:
    """The transformer of `benchmarks/record.py`, on the device, with 59 M weights."""
    with torch.device("cuda"):
        model, optimizer, step = transformer(640, 2560, tokens)
    return model, optimizer, step, sum(p.numel() for p in model.parameters())


def _seconds(step: Callable[[], None], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times
