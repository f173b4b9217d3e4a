"""Encode contributions as the colours of a heat map, for the page and for matplotlib."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Codes of a byte: nothing, `.grad` is there, a number that is not finite; then levels, label after label.
PRESENT_ONLY, BROKEN = 1, 2
LEVELS, LABELS = 30, 8
# Levels span so many decades; of norms that are closer than this, all have the highest.
_DECADES, _NARROW = 6.0, 0.01
# How opaque a cell is that only held `.grad`, and one with the weakest contribution: told apart on a dark ground, too.
HELD, _FAINTEST = 0.13, 0.46


class Heat(NamedTuple):
    """Rows × columns of codes, and what they stand for.

    `range` are the logarithms (base 10) of the weakest and the strongest norm that have levels of their own;
    `added` are the norms themselves, parameters × events, -1 where there is none.
    """

    codes: np.ndarray
    held: np.ndarray
    added: np.ndarray
    range: tuple[float, float]

    @property
    def levels(self) -> np.ndarray:
        """How strong a cell is, where there is a contribution."""
        return (self.codes.astype(int) - BROKEN - 1) % LEVELS

    @property
    def labels(self) -> np.ndarray:
        """Whose contribution it is."""
        return (self.codes.astype(int) - BROKEN - 1) // LEVELS

    @property
    def smallest(self) -> float:
        """The smallest norm, 0 where there is none."""
        known = self.added[np.isfinite(self.added) & (self.added > 0)]
        return float(known.min()) if known.size else 0.0


def heat(
    added: np.ndarray,
    held: np.ndarray,
    labels: np.ndarray,
    across: np.ndarray | None = None,
    down: np.ndarray | None = None,
    levels: tuple[float, float] | None = None,
) -> Heat:
    """Code norms (-1: none), parameters × events: of each cell's the largest, so that a single spike survives.

    `held` says where there is a `.grad`, `labels` numbers each event's loss. A cell begins at each event of `across`
    and each parameter of `down` (at every one). `levels` are the logarithms between which levels lie (`decades`).

    >>> held = np.array([[False, True, True, True]])
    >>> heat(np.array([[-1, 1.0, 10.0, np.inf]]), held, np.zeros(4, int)).codes.tolist()
    [[0, 3, 32, 2]]
    """
    down = np.arange(added.shape[0]) if down is None else down
    across = np.arange(added.shape[1]) if across is None else across

    def any_of(cells: np.ndarray) -> np.ndarray:
        rows = np.logical_or.reduceat(cells, across, axis=1)
        return np.logical_or.reduceat(rows, down, axis=0)

    known = np.isfinite(added) & (added > 0)
    logs = np.log10(added, where=known, out=np.full(added.shape, -np.inf))
    low, high = levels or decades(added)
    level = np.zeros(added.shape, np.int64)
    share = np.clip((logs[known] - low) / (high - low), 0, 1)
    level[known] = np.rint(share * (LEVELS - 1)).astype(np.int64)
    # The level decides between a cell's events, the label only colours it.
    ranked = np.where(added >= 0, level * LABELS + labels[None] % LABELS, -1)
    broken = ~np.isfinite(added)
    ranked[broken] = -1
    ranked = np.maximum.reduceat(ranked, across, axis=1)
    most = np.maximum.reduceat(ranked, down, axis=0)
    held = any_of(held)
    codes = np.where(held, PRESENT_ONLY, 0)
    codes = np.where(
        most >= 0, BROKEN + 1 + most % LABELS * LEVELS + most // LABELS, codes
    )
    codes = np.where(any_of(broken), BROKEN, codes).astype(np.uint8)
    return Heat(codes, held, added, (low, high))


def decades(added: np.ndarray) -> tuple[float, float]:
    """Return the logarithms of the smallest and the largest norm that a heat map tells apart.

    >>> decades(np.array([-1.0, 0.01, 100.0])), decades(np.array([1.0]))
    ((-2.0, 2.0), (-1.0, 0.0))
    """
    known = np.log10(added[np.isfinite(added) & (added > 0)])
    if not known.size:
        return -1.0, 0.0
    low, high = float(known.min()), float(known.max())
    return (max(low, high - _DECADES) if high - low > _NARROW else high - 1), high


def opacity(levels: np.ndarray) -> np.ndarray:
    """How opaque a cell of this level is."""
    share: np.ndarray = levels / (LEVELS - 1)
    return 1 - (1 - _FAINTEST) * (1 - share)
