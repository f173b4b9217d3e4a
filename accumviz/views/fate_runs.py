"""What became of each contribution, as short lists for a page: which it filters, and never works out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accumviz.ledger import CONTRIBUTED, Ledger

# Runs count events from the last contribution in them, so that windows of one form are equal, and compress to nothing.
_NEVER, _HANDED_ON = 0, -1


def fate_runs(
    ledger: Ledger, chosen: np.ndarray, added: np.ndarray, rows: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], list[int]]:
    """Tell when the contributions of each row are erased and first consumed, in positions of the `chosen` events.

    `added` holds rows × chosen events, below 0 where there is no contribution; a row is a range
    of parameters, and what several of them receive is erased with the last and consumed with
    the first of it. Returns lists of runs, and which of them each row has. A run is three
    numbers: how many contributions share a fate, and how many events after the last of them they
    are erased and consumed (0: never; consumed -1: never, but handed on by a collective).
    """
    state, consumed = ledger.state[chosen], _positions(ledger.fates.consumed[chosen], chosen)
    erased, handed = _positions(ledger.fates.erased[chosen], chosen), _handed_on(ledger, chosen)
    told: list[list[int]] = []
    found: dict[bytes, int] = {}
    which = []
    for row, (start, stop) in enumerate(rows):
        born = np.flatnonzero(~(added[row] < 0))
        if stop == start + 1:
            ends, uses, passed = (array[born, start] for array in (erased, consumed, handed))
        else:
            there = (state[born, start:stop] & CONTRIBUTED).astype(bool)
            ends = np.where(there, erased[born, start:stop], -1).max(axis=1, initial=-1)
            uses = np.where(there, consumed[born, start:stop], len(chosen)).min(axis=1, initial=len(chosen))
            passed = np.zeros(born.size, bool)
        key = b"".join(array.tobytes() for array in (born, ends, uses, passed))
        if key not in found:
            found[key] = len(told)
            told.append(_runs(born, ends, uses, passed, len(chosen)))
        which.append(found[key])
    return told, which


def _positions(events: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Where in `chosen` an event has happened; their number, if it never has."""
    return np.where(events < 0, len(chosen), np.searchsorted(chosen, events)).astype(np.int32)


def _handed_on(ledger: Ledger, chosen: np.ndarray) -> np.ndarray:
    """The contributions that no step used because a collective took them elsewhere."""
    erased = ledger.fates.erased[chosen]
    by_sync = np.append(ledger.columns.where("kind", "sync"), False)[erased]  # -1 is the last
    taken: np.ndarray = by_sync & (erased >= 0) & (ledger.fates.steps[chosen] == 0)
    return taken


def _runs(born: np.ndarray, ends: np.ndarray, uses: np.ndarray, passed: np.ndarray, never: int) -> list[int]:
    if not born.size:
        return []
    changes = (np.diff(ends) != 0) | (np.diff(uses) != 0) | (np.diff(passed.astype(np.int8)) != 0)
    last = np.append(np.flatnonzero(changes), born.size - 1)
    counts = np.diff(last, prepend=-1)
    erased = np.where(ends[last] == never, _NEVER, ends[last] - born[last])
    consumed = np.where(uses[last] == never, _NEVER, uses[last] - born[last])
    consumed[passed[last]] = _HANDED_ON
    runs: list[int] = np.stack([counts, erased, consumed], axis=1).ravel().tolist()
    return runs
