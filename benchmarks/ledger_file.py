"""How large a ledger is on disk, what opening it takes, and how fast it is drawn: 150 parameters, many events."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import accumviz as av
from accumviz.ledger.events import CODES, NUMBERS, Events
from accumviz.ledger.ledger import CHANGED, CONTRIBUTED, PRESENT, Event, Ledger, Parameter
from accumviz.views.timeline import timeline

CYCLE = ("zero_grad", "backward", "backward", "backward", "backward", "step")


def random_run(events: int, parameters: int) -> Ledger:
    """A run with norms that wander as those of a transformer do: four backwards to a step, `.grad` set to None."""
    random = np.random.default_rng(0)
    kinds = [CYCLE[e % len(CYCLE)] for e in range(events)]
    born, empty = (np.array([kind == wanted for kind in kinds])[:, None] for wanted in ("backward", "zero_grad"))
    drift = np.cumsum(random.normal(0, 0.02, (events, parameters)), axis=0)
    norm = np.exp(random.normal(-3, 1.5, parameters) + drift + random.normal(0, 0.3, (events, parameters)))
    # Inside a window `.grad` grows as the root of the number of its contributions.
    grown = norm * np.sqrt(np.arange(events) % len(CYCLE) + 1)[:, None]
    state = (born * (CONTRIBUTED | CHANGED) + ~empty * PRESENT).astype(np.uint8).repeat(parameters, axis=1)
    rows = tuple(
        Event(
            e,
            kind,
            label="loss" if kind == "backward" else "",
            file="train.py",
            line=40 + e % len(CYCLE),
            source="scaler.scale(loss / accumulation_steps).backward()",
            time=0.0123 * e,
            loss=float(np.exp(-e / events)) if kind == "backward" else float("nan"),
            details={"optimizer": "AdamW", "optimizer_index": 0, "lr": [3e-4]} if kind == "step" else {},
        )
        for e, kind in enumerate(kinds)
    )
    names = tuple(
        Parameter(f"blocks.{p // 12}.part{p % 12}.weight", (256, 256), optimizers=(0,)) for p in range(parameters)
    )
    return Ledger(names, rows, np.where(born, norm, np.nan), np.where(empty, np.nan, grown), state)


def tiled(ledger: Ledger, times: int) -> Ledger:
    """The run several times over, each step with a learning rate of its own, as a schedule gives it."""
    rows = [event for _ in range(times) for event in ledger]
    fields = {*CODES, *NUMBERS} - {"frames"}  # as text, which an event no longer has
    columns: dict[str, Any] = {name: [getattr(event, name) for event in rows] for name in fields}
    columns["time"] = (0.0123 * np.arange(len(rows))).tolist()
    columns["details"] = [
        {**event.details, "lr": [3e-4 * (1 - e / len(rows))]} if event.kind == "step" else {}
        for e, event in enumerate(rows)
    ]
    arrays = (np.tile(array, (times, 1)) for array in (ledger.contribution, ledger.grad, ledger.state))
    return Ledger(ledger.parameters, Events.of_columns(**columns), *arrays)


# VmHWM and not ru_maxrss, which a process takes over from the one that started it.
_OPEN = """
import re, sys, time, pathlib
import accumviz as av, accumviz.ledger.ledger
most = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before, start = most(), time.process_time()
ledger = av.load(sys.argv[1])
print(time.process_time() - start, (most() - before) / 1000)
"""


def opened(path: Path) -> tuple[float, float]:
    """Seconds of process time, and megabytes at the peak, that opening a file adds to a fresh process (Linux)."""
    done = subprocess.run([sys.executable, "-c", _OPEN, str(path)], capture_output=True, text=True, check=True)
    spent, added = map(float, done.stdout.split())
    return spent, added


def best(action: Callable[[], Any], times: int) -> float:
    """The shortest of several runs, in seconds: what the machine's other work did not disturb."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        spent.append(time.perf_counter() - start)
    return min(spent)


def row(name: str, value: float, unit: str, bar: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "holds": value <= bar}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure; `quick` measures once instead of taking the best of five."""
    times = 1 if quick else 5
    events, parameters, many = 10_000, 150, 100_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ledger"
        random_run(events, parameters).save(path)
        per_cell = path.stat().st_size / (events * parameters)
        opening = best(lambda: av.load(path), times)
        tiled(random_run(events, parameters), many // events).save(path, overwrite=True)
        costs = [opened(path) for _ in range(times)]

    def drawn(count: int) -> float:
        ledgers = iter([random_run(count, parameters) for _ in range(times)])
        # A new ledger each time: what a ledger has worked out once (its windows' fates) it keeps.
        return best(lambda: timeline(next(ledgers)).to_html(), times)

    return [
        row("ledger: bytes per event and parameter on disk", per_cell, "B", 10.0),
        row("ledger: open 10,000 events × 150 parameters", opening, "s", 1.0),
        row("ledger: open 100,000 events × 150 parameters, process time", min(s for s, _ in costs), "s", 2.0),
        row("ledger: memory that it adds, at its peak", max(added for _, added in costs), "MB", 300.0),
        row("timeline: draw 1,000 events × 150 parameters", drawn(1_000), "s", 2.0),
        row("timeline: draw 10,000 events × 150 parameters", drawn(10_000), "s", 5.0),
    ]


if __name__ == "__main__":
    for result in run():
        holds = "holds" if result["holds"] else "FAILS"
        print(f"{result['name']:<50} {result['value']:8.3f} {result['unit']:<2} (at most {result['bar']:g}: {holds})")
