"""Variants of a loop that take turns inside one run, so that whatever else the machine does weighs on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

Step = Callable[[], None]
Row = dict[str, Any]


def spent(step: Step, times: int) -> float:
    """Seconds of process time that one step takes."""
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start) / times


def in_turns(
    step: Step,
    variants: dict[str, Callable[[], AbstractContextManager[Any]]],
    *,
    rounds: int,
    length: int,
    settling: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of process time a step, a number for each variant and round; the order turns round each time.

    Each variant is open over `settling` steps that are not timed and `length` that are. `before`
    is called ahead of every stretch.
    """
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(rounds):
        for variant in list(variants) if turn % 2 else list(variants)[::-1]:
            before()
            with variants[variant]():
                spent(step, settling)
                times[variant].append(spent(step, length))
    return times


def quartile(times: list[float]) -> float:
    """What a quarter of the rounds took less than: the mean of the undisturbed ones moves less than the minimum."""
    return float(np.quantile(times, 0.25))


def row(name: str, value: float, unit: str, bar: float | None = None) -> Row:
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "bar": None if bar is None else f"<= {bar:g}",
        "holds": None if bar is None else value <= bar,
    }
