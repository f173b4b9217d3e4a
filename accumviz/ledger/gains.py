"""What happened to `.grad` between a backward and a step: clipped, unscaled, changed by hand, averaged over ranks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.events import CHANGED, PRESENT, Arrays

# Two numbers that came the same way, from float32 norms; gradients in half precision are rounded once more.
SAME, SAME_IN_HALF = 1e-3, 2e-2

# Why a factor cannot be read, in the order of the numbers below.
UNREAD = (
    ".grad was changed by hand, and not by one factor for every parameter",
    ".grad was clipped element by element",
    "what it was clipped or divided by was not recorded",
    "gradients were reduced by hand; whether to a sum or a mean was not recorded",
    "a comm hook reduced gradients; whether to a sum or a mean could not be read",
)
HAND, VALUE, UNSEEN, REDUCED, HOOKED = range(1, len(UNREAD) + 1)


class Gains(NamedTuple):
    """What happened to `.grad` so far: events × parameters, the logarithms of factors summed up."""

    events: np.ndarray
    by_hand: np.ndarray
    clipped: np.ndarray
    unscaled: np.ndarray
    averaged: np.ndarray  # the last event so far that averaged it over ranks, -1: none
    ranks: np.ndarray  # over how many
    bad: (
        np.ndarray
    )  # the last event so far of which no factor is known, and which reason
    why: np.ndarray

    def apart(self) -> list[np.ndarray]:
        """Those that are not the same for all parameters."""
        parts = (
            self.by_hand,
            self.clipped,
            self.unscaled,
            self.averaged,
            self.bad,
            self.why,
        )
        return [part for part in parts if (part != part[:, :1]).any()]


def of_events(ledger: Arrays) -> Gains:
    events = ledger.columns
    # A fused optimizer unscales what it reads, and leaves it so.
    inside = (
        events.where("kind", "step")
        & ~events.skipped
        & (events.detail("amp_scale", 0.0) > 0)
    )
    at = np.flatnonzero(
        events.where("kind", "clip", "unscale", "edit", "sync") | inside
    )
    shape = (at.size + 1, len(ledger.parameters))
    changed = (ledger.state[at] & CHANGED).astype(bool)
    before = np.where((at > 0)[:, None], ledger.grad[np.maximum(at - 1, 0)], np.nan)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.where(changed, ledger.grad[at].astype(float) / before, np.nan)
    ratio[~(np.isfinite(ratio) & (ratio > 0))] = np.nan
    logs = {name: np.zeros(shape) for name in ("edit", "clip", "unscale")}
    averaged, bad, why = (
        np.full(shape, -1, np.int64),
        np.full(shape, -1, np.int64),
        np.zeros(shape, np.int8),
    )
    ranks = np.ones(at.size + 1)
    known = events.details
    within = events.where("within", "backward")[at]
    kinds = [
        events.tables["kind"][code].replace("step", "unscale")
        for code in events.column("kind")[at].tolist()
    ]
    codes = events.column("details")[at].tolist()
    half = np.array(
        [p.dtype in ("float16", "bfloat16") for p in ledger.parameters], bool
    )
    # A zero is a zero under any factor: it says nothing of it, and nothing of it is unknown.
    zero = changed & (before == 0) & (ledger.grad[at] == 0)
    nothing = (ledger.grad[at] == 0) | (ledger.state[at] & PRESENT == 0)
    low, high, middle = _spread(ratio)
    touched = np.logical_or.reduce(changed, axis=1)
    summed = np.ones(shape[1])  # over how many ranks each was just now
    for i, (kind, code) in enumerate(zip(kinds, codes, strict=True)):
        here, details = changed[i], known[code]
        if not touched[i]:
            continue
        row = i + 1
        if kind == "sync":
            many = number(details.get("ranks"))
            by = details.get(
                "reduction", "avg" if within[i] else ""
            )  # a library's is a mean
            if not by and _divided_after(many, i, kinds, middle, low, high):
                by = "sum"
            if by in ("sum", "avg") and 1 <= many < math.inf:
                averaged[row, here], ranks[row] = at[i], many
                summed[here] = many if by == "sum" else 1
                # A sum is so many times the mean.
                times = many * number(
                    details.get("by_comm_hook", 1 if by == "sum" else 1 / many)
                )
                if 0 < times < math.inf:
                    logs["edit"][row, here] = math.log(times)
                else:
                    bad[row, here], why[row, here] = at[i], HOOKED
                continue
            bad[row, here], why[row, here] = at[i], REDUCED
            continue
        rough = SAME_IN_HALF if half[here].any() else SAME
        same = high[i] - low[i] <= rough * middle[i]
        factors = np.full(shape[1], middle[i]) if same else ratio[i].copy()
        reason = UNSEEN
        if kind == "unscale":
            scale = number(details.get("amp_scale"))
            if scale > 0 and math.isfinite(scale):
                factors[:] = 1 / scale
        elif kind == "clip":
            if details.get("by") == "value":
                reason = VALUE
                factors[ratio[i] != 1] = np.nan
            else:
                total, most = (
                    number(details.get("total_norm")),
                    number(details.get("max_norm")),
                )
                told = (
                    min(1.0, most / (total + 1e-6))
                    if total >= 0 and math.isfinite(total + most)
                    else math.nan
                )
                if math.isnan(middle[i]) or (
                    same and abs(told - middle[i]) <= SAME_IN_HALF * middle[i]
                ):
                    factors[:] = told if told > 0 else np.nan
        else:
            reason = HAND
            those = here & ~zero[i]
            # No other change makes this norm of one parameter the mean's.
            mean = (summed[those] > 1).all() and (
                np.abs(ratio[i][those] * summed[those] - 1) <= rough
            ).all()
            if not mean and not (
                same and _one_factor(ledger, int(at[i]), those, middle[i], rough)
            ):
                factors[:] = np.nan
            here = here & ~nothing[i]  # of what it has erased no factor is asked
        summed[here] = 1
        lost = here & ~zero[i] & np.isnan(factors)
        bad[row, lost], why[row, lost] = at[i], reason
        kept = here & ~lost & ~np.isnan(factors)
        logs[kind][row, kept] = np.log(factors[kept])
    # In most recordings most kinds of events have none, and what is the same at every event needs no sum.
    for kind in {*logs}.intersection(
        {"sync": "edit"}.get(kind, kind) for kind in kinds
    ):
        logs[kind] = np.cumsum(logs[kind], axis=0)
    if (bad >= 0).any():
        order = np.arange(at.size + 1)[:, None]
        latest = np.maximum.accumulate(np.where(bad >= 0, order, 0), axis=0)
        bad, why = (
            np.take_along_axis(bad, latest, axis=0),
            np.take_along_axis(why, latest, axis=0),
        )
    averaged = np.maximum.accumulate(averaged, axis=0)
    return Gains(
        at, logs["edit"], logs["clip"], logs["unscale"], averaged, ranks, bad, why
    )


def _spread(ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The smallest, the largest and a middle one of each row's numbers; NaN where it has none."""
    if not ratio.size:
        return (np.full(len(ratio), np.nan),) * 3
    some = ~np.isnan(ratio)
    low = np.where(some, ratio, np.inf).min(axis=1)
    high = np.where(some, ratio, -np.inf).max(axis=1)
    none = ~some.any(axis=1)
    low[none] = high[none] = np.nan
    middle = np.where(some, ratio, 0).sum(axis=1) / np.maximum(some.sum(axis=1), 1)
    middle[none] = np.nan
    return low, high, middle


def _divided_after(
    ranks: float,
    at: int,
    kinds: list[str],
    middle: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> bool:
    """Whether a sum over ranks is followed by the division that makes a mean of it, so that it was a sum."""
    for i in range(at + 1, len(kinds)):
        if kinds[i] == "edit":
            return bool(
                high[i] - low[i] <= SAME_IN_HALF * middle[i]
                and abs(middle[i] * ranks - 1) <= SAME_IN_HALF
            )
        if kinds[i] != "sync":
            return False
    return False


def _one_factor(
    ledger: Arrays, event: int, changed: np.ndarray, factor: float, rough: float
) -> bool:
    """Whether a change by hand multiplied every element by this.

    Where elements are kept, they say it; where only norms are, those of several parameters have to agree.
    """
    columns = np.flatnonzero(changed).tolist()
    exact = [p for p in columns if p in ledger.exact]
    for p in exact:
        before, after = ledger.exact[p][1][event - 1], ledger.exact[p][1][event]
        # An element may be lost to rounding where others are large: what is compared is the whole.
        size = np.abs(before * factor).max(initial=0)
        if not np.allclose(after, before * factor, rtol=rough, atol=rough * size):
            return False
    return bool(exact) or len(columns) > 1


def number(value: Any) -> float:
    """A number of an event's details, NaN where it is none."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else math.nan
    )


def uncancelled(factors: list[float]) -> list[float]:
    """Factors, without those pairs of which one undoes the other.

    >>> uncancelled([4.0, 0.2, 0.25]), uncancelled([1.0])
    ([0.2], [1.0])
    """
    left = list(factors)
    for one in factors:
        undone = next(
            (other for other in left if one != other and abs(one * other - 1) <= SAME),
            None,
        )
        if one in left and undone is not None:
            left.remove(one)
            left.remove(undone)
    return left
