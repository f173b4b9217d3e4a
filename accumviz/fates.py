"""What became of each contribution: which event erased it, which steps consumed it; and so the windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from accumviz.ledger import Ledger


class Fates(NamedTuple):
    """What became of each contribution: arrays of events × parameters.

    `erased` is the event that removed it from `.grad`, `consumed` the first step that used it
    (-1: none), `steps` how many steps used it. Entries without a contribution hold -1, -1, 0.
    """

    erased: np.ndarray
    consumed: np.ndarray
    steps: np.ndarray


class Window(NamedTuple):
    """One accumulation window: an optimizer step and the backwards whose contributions it consumed.

    `step` and `backwards` are indices of events, `optimizer` is the name of the one that stepped.
    `scale` is the sum of the scales of the losses.
    """

    step: int
    optimizer: str
    backwards: tuple[int, ...]
    scale: float


def fates(ledger: Ledger) -> Fates:
    """See `Ledger.fates`."""
    from accumviz.ledger import CONTRIBUTED, PRESENT

    shape = ledger.state.shape
    erased, consumed = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    steps = np.zeros(shape, np.int32)
    contributed = (ledger.state & CONTRIBUTED).astype(bool)
    zeroed = {rank: _zeroing(ledger, rank) for rank in {p.rank for p in ledger.parameters}}
    gone = ledger.state & PRESENT == 0
    inside = np.array([event.kind == "backward" and event.within == "step" for event in ledger.events], bool)
    owned: dict[tuple[int, ...], np.ndarray] = {}
    for p, parameter in enumerate(ledger.parameters):
        born = np.flatnonzero(contributed[:, p])
        if not born.size:
            continue
        if parameter.optimizers not in owned:
            owned[parameter.optimizers] = _steps_of(ledger, parameter.optimizers)
        ends = np.flatnonzero(gone[:, p] | (zeroed[parameter.rank] & (ledger.grad[:, p] == 0)))
        mine = owned[parameter.optimizers]
        after = np.searchsorted(ends, born, side="right")
        end = np.where(after < ends.size, np.append(ends, 0)[after], len(ledger))
        erased[born, p] = np.where(end < len(ledger), end, -1)
        first = np.searchsorted(mine, born, side="right")
        # A closure's backward is used by the step around it, even when the closure zeroes again.
        until = np.searchsorted(mine, end, side="left")
        until = np.where(inside[born], np.maximum(until, np.minimum(first + 1, mine.size)), until)
        steps[born, p] = until - first
        consumed[born, p] = np.where(until > first, np.append(mine, -1)[np.minimum(first, mine.size)], -1)
    for sync, births, whole, shard in _scattered(ledger, erased):
        consumed[births, whole], steps[births, whole] = consumed[sync, shard], steps[sync, shard]
    return Fates(erased, consumed, steps)


def _zeroing(ledger: Ledger, rank: int | None) -> np.ndarray:
    kinds = ("zero_grad", "edit")
    return np.array([e.kind in kinds and (e.rank is None or e.rank == rank) for e in ledger.events], bool)


def _scattered(ledger: Ledger, erased: np.ndarray) -> Iterator[tuple[int, np.ndarray, int, int]]:
    """The reduce-scatters: event, the contributions that it took from an unsharded gradient, and the columns."""
    from accumviz.ledger import CONTRIBUTED

    for whole, parameter in enumerate(ledger.parameters):
        if not parameter.unsharded_of:
            continue
        shard = ledger.index(parameter.unsharded_of)
        for sync in np.unique(erased[erased[:, whole] >= 0, whole]).tolist():
            if ledger.events[sync].kind == "sync" and ledger.state[sync, shard] & CONTRIBUTED:
                yield sync, np.flatnonzero(erased[:, whole] == sync), whole, shard


def _steps_of(ledger: Ledger, optimizers: tuple[int, ...]) -> np.ndarray:
    return np.array(
        [
            e.index
            for e in ledger.events
            if e.kind == "step" and not e.skipped and e.details.get("optimizer_index", 0) in optimizers
        ],
        np.int64,
    )


def windows(ledger: Ledger) -> list[Window]:
    """See `Ledger.windows`."""
    from accumviz.ledger import CONTRIBUTED

    contributed = (ledger.state & CONTRIBUTED).astype(bool)
    erased = np.where(ledger.fates.erased < 0, len(ledger), ledger.fates.erased)
    # One column per optimizer, not per parameter and step: the latest end of each backward's contributions.
    ends: dict[int, np.ndarray] = {}
    first: dict[int, dict[int, set[int]]] = {}
    behind: dict[tuple[int, int], set[int]] = {}
    for sync, births, whole, _ in _scattered(ledger, ledger.fates.erased):
        for optimizer in ledger.parameters[whole].optimizers:
            behind.setdefault((optimizer, sync), set()).update(births.tolist())
    result = []
    for event in ledger.of("step"):
        if event.skipped:
            continue
        optimizer = event.details.get("optimizer_index", 0)
        if optimizer not in ends:
            mine = np.array([optimizer in p.optimizers for p in ledger.parameters], bool)
            ends[optimizer] = np.where(contributed[:, mine], erased[:, mine], -1).max(axis=1, initial=-1)
            first[optimizer] = {}
            for b, s in zip(*_consumptions(ledger, mine), strict=True):
                first[optimizer].setdefault(s, set()).add(b)
        here = set(np.flatnonzero(ends[optimizer][: event.index] > event.index).tolist())
        here |= first[optimizer].get(event.index, set())
        backwards = tuple(sorted(set().union(*(behind.get((optimizer, b), {b}) for b in here))))
        scale = float(sum(ledger.events[b].scale for b in backwards))
        result.append(Window(event.index, str(event.details.get("optimizer", "")), backwards, scale))
    return result


def _consumptions(ledger: Ledger, mine: np.ndarray) -> tuple[list[int], list[int]]:
    backwards, columns = np.nonzero((ledger.fates.consumed >= 0) & mine)
    return backwards.tolist(), ledger.fates.consumed[backwards, columns].tolist()
