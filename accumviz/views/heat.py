"""Encode contributions as the colours of a heat map, for the page and for matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger.ledger import Event, Ledger

# Codes of a byte: nothing, `.grad` is there, a number that is not finite; then levels, label after label.
PRESENT_ONLY = 1
BROKEN = 2
LEVELS = 30
LABELS = 8
# Levels span so many decades; of norms that are closer than this, all have the highest.
_DECADES = 6.0
_NARROW = 0.01
# How opaque a cell is that only held `.grad`, and one with the weakest contribution: told apart on a dark ground, too.
HELD = 0.13
_FAINTEST = 0.46


class Heat(NamedTuple):
    """Rows × columns of codes, and what they stand for.

    `range` are the logarithms (base 10) of the weakest and the strongest norm that have levels of their own,
    `is_clipped` says whether some are weaker, and `broken` counts the contributions that are not finite.
    """

    codes: np.ndarray
    range: tuple[float, float]
    is_clipped: bool
    broken: int


def heat(
    added: np.ndarray,
    held: np.ndarray,
    labels: np.ndarray,
    across: np.ndarray,
    down: np.ndarray | None = None,
    levels: tuple[float, float] | None = None,
) -> Heat:
    """Code norms (-1: none), parameters × events: of each cell's the largest, so that a single spike survives.

    `held` says where there is a `.grad`, `labels` numbers each event's loss. A cell begins at each event of `across`
    and each parameter of `down` (at every one). `levels` are the logarithms between which levels lie (`decades`).

    >>> held = np.array([[False, True, True, True]])
    >>> heat(np.array([[-1, 1.0, 10.0, np.inf]]), held, np.zeros(4, int), np.arange(4)).codes.tolist()
    [[0, 3, 32, 2]]
    """
    starts = np.arange(len(added)) if down is None else down

    def most_of(cells: np.ndarray) -> np.ndarray:
        rows = np.maximum.reduceat(cells, across, axis=1)
        return np.maximum.reduceat(rows, starts, axis=0)

    low, high = levels or decades(added)
    broken = ~np.isfinite(added)
    positive = ~broken & (added > 0)
    logs = np.log10(added[positive]).astype(float)
    share = np.clip((logs - low) / (high - low), 0, 1)
    level = np.zeros(added.shape, np.int64)
    level[positive] = np.rint(share * (LEVELS - 1))
    # The level decides between a cell's events, the label only colours it.
    ranked = level * LABELS + labels % LABELS
    ranked[broken | (added < 0)] = -1
    ranked = most_of(ranked)
    level, label = np.divmod(ranked, LABELS)
    colored = BROKEN + 1 + label * LEVELS + level
    codes = np.where(ranked >= 0, colored, most_of(held) * PRESENT_ONLY)
    codes[most_of(broken)] = BROKEN
    is_clipped = bool((logs < low - 1e-6).any())
    return Heat(codes.astype(np.uint8), (low, high), is_clipped, int(broken.sum()))


def label_places(ledger: Ledger, events: Sequence[Event]) -> np.ndarray:
    """Return the place of each event's loss among the labels of a ledger, 0 where it has none."""
    places = {label: place for place, label in enumerate(ledger.labels)}
    return np.array([places.get(event.label, 0) for event in events], np.int64)


def decades(added: np.ndarray) -> tuple[float, float]:
    """Return the logarithms of the smallest and the largest norm that a heat map tells apart.

    >>> decades(np.array([-1.0, 0.01, 100.0])), decades(np.array([1.0]))
    ((-2.0, 2.0), (-1.0, 0.0))
    """
    logs = np.log10(added[np.isfinite(added) & (added > 0)])
    if not logs.size:
        return -1.0, 0.0
    low = float(logs.min())
    high = float(logs.max())
    if high - low <= _NARROW:
        return high - 1, high
    return max(low, high - _DECADES), high


def opacity(levels: np.ndarray) -> np.ndarray:
    """Return how opaque a cell of this level is."""
    share: np.ndarray = levels / (LEVELS - 1)
    return 1 - (1 - _FAINTEST) * (1 - share)
