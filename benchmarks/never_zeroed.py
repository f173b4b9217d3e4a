"""What it costs to look at a run that never calls zero_grad: nothing is erased, so every window holds all before it."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import accumviz as av
from accumviz.ledger.ledger import CHANGED, CONTRIBUTED, PRESENT, Event, Ledger, Parameter


def never_zeroed(events: int, parameters: int = 4) -> Ledger:
    """A backward and a step by turns, and no zero."""
    rows = tuple(
        Event(
            e,
            ("backward", "step")[e % 2],
            ("loss", "SGD")[e % 2],
            "train.py",
            3 + e % 2,
            time=0.01 * e,
            loss=1.0,
            details={"optimizer": "SGD", "lr": [0.1]} if e % 2 else {},
        )
        for e in range(events)
    )
    born = (np.arange(events) % 2 == 0)[:, None].repeat(parameters, axis=1)
    names = tuple(Parameter(f"w{p}", (64, 64), optimizers=(0,)) for p in range(parameters))
    state = np.where(born, PRESENT | CONTRIBUTED | CHANGED, PRESENT).astype(np.uint8)
    return Ledger(names, rows, np.where(born, 1.0, np.nan), np.ones((events, parameters)), state)


def show(ledger: Ledger) -> str:
    ledger.windows()
    return str(av.play(ledger).to_html())


def spent(action: Callable[[Ledger], Any], events: int, times: int) -> float:
    """The shortest process time of several, each with a new ledger: what a ledger has worked out it keeps."""
    found = []
    for _ in range(times):
        ledger = never_zeroed(events)
        start = time.process_time()
        action(ledger)
        found.append(time.process_time() - start)
    return min(found)


def held(action: Callable[[Ledger], Any], events: int) -> float:
    """The most memory that was taken at once, in MB, beyond the ledger itself."""
    ledger = never_zeroed(events)
    gc.collect()
    tracemalloc.start()
    kept = action(ledger)
    most = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    del kept
    return most


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure; `quick` measures once instead of taking the best of three."""
    events, show_once = 16_000, show(never_zeroed(100))
    assert "av-player" in show_once, "what is imported on first use is no part of the measurement"
    seconds, megabytes = spent(show, events, 1 if quick else 3), held(show, events)
    return [
        row("never zeroed: windows() and play, 16,000 events", seconds, "s", 0.3),
        row("never zeroed: memory of the same at its peak", megabytes, "MB", 100.0),
    ]


def row(name: str, value: float, unit: str, bar: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": f"<= {bar:g}", "holds": value <= bar}
