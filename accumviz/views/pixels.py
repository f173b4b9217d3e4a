"""A heat map of contributions as bytes: of each pixel's events the largest norm, so that a single spike survives."""

from __future__ import annotations

import math

import numpy as np

# More pixels than a page is wide tell nobody anything.
MOST = 640
# Codes of a byte: nothing, `.grad` is there, a number that is not finite; then levels, label after label.
HELD, BROKEN, LEVELS = 1, 2, 30
_LABELS, _DECADES = 8, 6.0


def heat(added: np.ndarray, grad: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Code each parameter × pixel of time; `added` and `grad` are parameters × events, -1 where there is none.

    `labels` numbers each event's loss. Levels are logarithmic, over at most six decades.

    >>> heat(np.array([[-1, 1.0, np.inf]]), np.array([[-1, 1.0, 1.0]]), np.array([0, 0, 0])).tolist()
    [[0, 3, 2]]
    """
    events = added.shape[1]
    starts = np.unique(np.arange(min(events, MOST)) * events // max(min(events, MOST), 1))
    known = np.isfinite(added) & (added > 0)
    logs = np.log10(added, where=known, out=np.full(added.shape, -np.inf))
    high = logs[known].max(initial=-math.inf)
    low = max(logs[known].min(initial=math.inf), high - _DECADES)
    level = np.zeros(added.shape, np.int64)
    level[known] = np.rint(np.clip((logs[known] - low) / ((high - low) or 1.0), 0, 1) * (LEVELS - 1)).astype(np.int64)
    # The level decides between a pixel's events, the label only colours it.
    ranked = np.where(added >= 0, level * _LABELS + labels[None] % _LABELS, -1)
    ranked[~np.isfinite(added)] = -1
    most = np.maximum.reduceat(ranked, starts, axis=1)
    codes = np.where(most >= 0, 1 + BROKEN + (most % _LABELS) * LEVELS + most // _LABELS, 0)
    codes[(most < 0) & np.logical_or.reduceat(~(grad < 0), starts, axis=1)] = HELD
    codes[np.logical_or.reduceat(~np.isfinite(added), starts, axis=1)] = BROKEN
    return codes.astype(np.uint8)
