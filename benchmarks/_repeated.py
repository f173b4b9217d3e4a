"""Long ledgers of many ranks, of a short recording of a real loop: its events over and over, with other numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import accumviz as av
from accumviz.ledger.events import CODES, Events
from accumviz.ledger.ledger import Ledger
from benchmarks.record import transformer

_STEPS = 40


def recorded() -> Ledger:
    """Forty steps of the small transformer."""
    model, optimizer, step = transformer(16, 32, (2, 4))
    with av.record(model, optimizer) as recording:
        for _ in range(_STEPS):
            step()
    return recording.ledger


def _of_rank() -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    model, optimizer, step = transformer(16, 32, (2, 4), DistributedDataParallel)
    with av.record(model, optimizer):
        for _ in range(_STEPS):
            step()


def repeated(ledger: Ledger, events: int, seed: int = 0, **meta: Any) -> Ledger:
    """The recording over and over, up to so many events, each time with norms, texts' lengths and rates of its own."""
    random = np.random.default_rng(seed)
    start = int(np.flatnonzero(ledger.events.where("kind", "zero_grad"))[0])
    end = int(np.flatnonzero(ledger.events.where("kind", "zero_grad"))[-1])
    times = -(-events // (end - start))
    where = np.tile(np.arange(start, end), times)[:events]
    codes, numbers = np.array(ledger.events.codes[where]), np.array(ledger.events.numbers[where])
    numbers[:, 0] = 0.0123 * np.arange(events)
    column = list(CODES).index("details")
    known, places = ledger.events.details, dict[str, int]()
    for e, code in enumerate(codes[:, column].tolist()):
        details = json.loads(json.dumps(dict(known[code])))
        for term in details.get("terms", ()):
            if term["elements"]:
                term["elements"] = int(random.integers(term["elements"] // 2, term["elements"] + 1))
        if "lr" in details:
            details["lr"] = [3e-4 * (1 - e / events)]
        text = json.dumps(details)
        codes[e, column] = places.setdefault(text, len(places))
    noise = np.exp(random.normal(0, 0.3, (events, 1))).astype(np.float32)
    arrays = ledger.contribution[where] * noise, ledger.grad[where] * noise, ledger.state[where]
    made = Events(codes, numbers, {**ledger.events.tables, "details": list(places)})
    return Ledger(ledger.parameters, made, *arrays, meta={**ledger.meta, **meta})


def written(folder: Path, ranks: int, events: int) -> list[Path]:
    """The files of so many ranks, made of what two recorded under DDP."""
    both = av.distribute(_of_rank, ranks=2, timeout=300).ledgers
    files = [folder / f"run.rank{rank}.ledger" for rank in range(ranks)]
    for rank, file in enumerate(files):
        repeated(both[rank % 2], events, rank, rank=rank, ranks=ranks).save(file)
    return files
