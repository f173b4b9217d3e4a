"""Rules for shares that are known and wrong where no other rule names the cause."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.analysis import (
    LedgerAnalysis,
    WindowShare,
    is_close,
    modal_length,
)
from accumviz.checks.divisors import separate_tasks
from accumviz.checks.report import Finding

# So many windows at most are counted together, as those of one generation of samples are.
_MOST_COUNTED = 8


def uneven_shares(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find equal elements of one loss that weigh differently in most windows."""
    for parts in analysis.objectives.values():
        windows = [part for part in parts if part.many > 1 and part.judged]
        uneven = [part for part in windows if _uneven(analysis, part)]
        if not uneven or 2 * len(uneven) <= len(windows):
            continue
        part = uneven[0]
        low, high = min(part.each), max(part.each)
        yield analysis.finding_of(
            "uneven-shares",
            "warning",
            part,
            evidence={
                "micro-batches": part.many,
                "shares": list(part.weights),
                "sum of shares": part.total,
            },
            cause=(
                f"The micro-batches of a window do not count alike: an element of one weighs {high / low:.3g} times "
                "an element of another. Divide each loss by the same count."
            ),
            times=len(uneven),
        )


class WindowSum(NamedTuple):
    """What one step read of one loss, from whichever lines: how many micro-batches, and the sum of their shares."""

    first: WindowShare
    many: int
    total: float
    least: float
    most: float
    each: tuple[float, float]


def sums_differ(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find windows of one loss whose shares add up to different sums."""
    for optimizer in {part.optimizer for part in analysis.window_shares}:
        windows = _windows_of_one_loss(analysis, optimizer)
        length = modal_length(window.many for window in windows)
        full = [window for window in windows if window.many == length]
        other = _of_other_lengths(windows, length)
        if _of_different_size(full):
            found = full
        elif len(other) > 1:
            found = full + other
        else:
            continue
        largest = max(found, key=lambda window: window.total)
        low, high = min(window.total for window in found), largest.total
        found.sort(key=lambda window: window.first.step)
        yield analysis.finding_of(
            "sums-differ",
            "warning",
            largest.first,
            evidence={
                "micro-batches": sorted({window.many for window in found}),
                "sums of shares": [window.total for window in found],
            },
            cause=(
                f"The shares of a window add up to {low:.3g} in one step and to {high:.3g} in another. "
                "Divide by what each window holds."
            ),
            times=len(found),
        )


def _windows_of_one_loss(analysis: LedgerAnalysis, optimizer: int) -> list[WindowSum]:
    """The windows of an optimizer that has one loss, all of whose shares are known; none otherwise."""
    objectives = [
        shares for key, shares in analysis.objectives.items() if key[0] == optimizer
    ]
    kinds = {_kind_of_loss(analysis, shares[0]) for shares in objectives}
    every = [share for shares in objectives for share in shares]
    if len(kinds) != 1 or not all(share.judged for share in every):
        return []
    steps = sorted({share.step for share in every})
    return [_window_sum(analysis.shares_of(step, optimizer)) for step in steps]


def _window_sum(shares: list[WindowShare]) -> WindowSum:
    each = [weight for share in shares for weight in share.each]
    weights = [weight for share in shares for weight in share.weights]
    extremes = min(each), max(each)
    return WindowSum(
        shares[0], len(weights), sum(weights), min(weights), max(weights), extremes
    )


def _kind_of_loss(analysis: LedgerAnalysis, share: WindowShare) -> tuple[Any, ...]:
    """What two lines have in common that compute the same loss."""
    event = analysis.ledger[share.backwards[0]]
    return event.label, *(str(term.get("op")) for term in event.terms), share.mean


def _of_different_size(full: list[WindowSum]) -> bool:
    """Whether windows of equal length have different sums, by another count and not by a schedule."""
    totals = [window.total for window in full]
    # A recording may have begun inside the first window.
    later = totals[1:]
    if len(later) < 2 or is_close(min(later), max(later)) or _annealed(totals):
        return False
    lightest = min(window.each[0] for window in full)
    same_elements = is_close(lightest, max(window.each[1] for window in full))
    return not same_elements and (full[0].first.mean or _counted_together(totals))


def _of_other_lengths(windows: list[WindowSum], length: int) -> list[WindowSum]:
    """The windows of other lengths, where all are divided by one number, and none is whole."""
    if not windows or any(is_close(window.total, 1.0) for window in windows):
        return []
    low, high = min(w.least for w in windows), max(w.most for w in windows)
    if not windows[0].first.mean or not is_close(low, high):
        return []
    return [window for window in windows[1:-1] if window.many != length]


def constant_sum(analysis: LedgerAnalysis) -> str:
    """Name the sum to which the shares of every window add up, where that is not 1 and may be meant.

    Empty where a step has several losses, or tasks with parameters of their own.
    """
    for parts in analysis.objectives.values():
        several = [part for part in parts if part.many > 1]
        alike = all(p.even and analysis.alone(p) for p in several)
        if len(several) < 2 or not alike or separate_tasks(analysis, several[0]):
            continue
        total = several[0].total
        if not is_close(total, 1.0) and all(is_close(p.total, total) for p in several):
            return f"a sum of {total:.3g} is meant in every step"
    return ""


def _uneven(analysis: LedgerAnalysis, part: WindowShare) -> bool:
    """Whether equal micro-batches were divided by different counts.

    A loss that is multiplied has a weight that is meant; `.grad` that is multiplied fades on purpose.
    """
    if not part.same_sizes or is_close(part.least, part.most):
        return False
    rows = analysis.shares.of(part.step)
    mine = (rows.objective == part.objective) & ~rows.erased
    constants = np.abs(rows.constant[mine])
    if is_close(constants.min(), constants.max()):
        return False
    terms = [term for b in part.backwards for term in analysis.ledger[b].terms]
    return any("divisor" in term for term in terms)


def _annealed(totals: list[float]) -> bool:
    """Whether sums only fall or only rise, as the weight of a loss does that follows a schedule."""
    falls = all(later <= early * 1.001 for early, later in pairwise(totals))
    rises = all(later >= early * 0.999 for early, later in pairwise(totals))
    return len(totals) > 2 and (falls or rises)


def _counted_together(totals: list[float]) -> bool:
    """Whether the sums of several windows in a row add up to 1: then their elements were counted together."""
    for many in range(2, _MOST_COUNTED + 1):
        for begin in range(many):
            places = range(begin, len(totals) - many + 1, many)
            sums = [sum(totals[i : i + many]) for i in places]
            if len(sums) > 1 and all(is_close(each, 1.0) for each in sums):
                return True
    return False
