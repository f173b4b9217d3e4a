"""Rules for shares that are known and wrong, and of which no other rule names the cause."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.analysis import Case, Part, near, usual
from accumviz.checks.divisors import separate_tasks
from accumviz.checks.report import Finding

# So many windows at most are counted together, as those of one generation of samples are.
_MOST_COUNTED = 8


def uneven_shares(case: Case) -> Iterator[Finding]:
    """Find equal elements of one loss that weigh differently in most windows."""
    for parts in case.objectives.values():
        windows = [part for part in parts if part.many > 1 and _judged(part)]
        uneven = [part for part in windows if _uneven(case, part)]
        if not uneven or 2 * len(uneven) <= len(windows):
            continue
        part = uneven[0]
        low, high = part.each
        yield case.of_part(
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

    first: Part
    many: int
    total: float
    least: float
    most: float
    each: tuple[float, float]


def sums_differ(case: Case) -> Iterator[Finding]:
    """Find windows of one loss whose shares add up to different sums."""
    for optimizer in {part.optimizer for part in case.parts}:
        windows = _windows_of_one_loss(case, optimizer)
        length = usual(window.many for window in windows)
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
        yield case.of_part(
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


def _windows_of_one_loss(case: Case, optimizer: int) -> list[WindowSum]:
    """The windows of an optimizer that has one loss, all of whose shares are known; none otherwise."""
    steps: dict[int, list[Part]] = {}
    for part in case.parts:
        if part.many and part.optimizer == optimizer:
            steps.setdefault(part.step, []).append(part)
    parts = [part for own in steps.values() for part in own]
    if len({_loss(case, part) for part in parts}) > 1 or not all(map(_judged, parts)):
        return []
    return [
        WindowSum(
            own[0],
            sum(part.many for part in own),
            sum(part.total for part in own),
            min(part.least for part in own),
            max(part.most for part in own),
            (min(part.each[0] for part in own), max(part.each[1] for part in own)),
        )
        for own in steps.values()
    ]


def _loss(case: Case, part: Part) -> tuple[Any, ...]:
    """What two lines have in common that compute the same loss."""
    event = case.ledger[part.backwards[0]]
    return event.label, *(str(term.get("op")) for term in event.terms), part.mean


def _of_different_size(full: list[WindowSum]) -> bool:
    """Whether windows of equal length have different sums, by another count and not by a schedule."""
    totals = [window.total for window in full]
    # A recording may have begun inside the first window.
    later = totals[1:]
    if len(later) < 2 or near(min(later), max(later)) or _annealed(totals):
        return False
    lightest = min(window.each[0] for window in full)
    same_elements = near(lightest, max(window.each[1] for window in full))
    return not same_elements and (full[0].first.mean or _counted_together(totals))


def _of_other_lengths(windows: list[WindowSum], length: int) -> list[WindowSum]:
    """The windows of other lengths, where all are divided by one number, and none is whole."""
    if not windows or any(near(window.total, 1.0) for window in windows):
        return []
    low, high = min(w.least for w in windows), max(w.most for w in windows)
    if not windows[0].first.mean or not near(low, high):
        return []
    return [window for window in windows[1:-1] if window.many != length]


def condition(case: Case) -> str:
    """Name the sum to which the shares of every window add up, where that is not 1 and may be meant.

    Empty where a step has several losses, or tasks with parameters of their own.
    """
    for parts in case.objectives.values():
        several = [part for part in parts if part.many > 1]
        alike = all(p.even and _alone(case, p) for p in several)
        if len(several) < 2 or not alike or separate_tasks(case, several[0]):
            continue
        total = several[0].total
        if not near(total, 1.0) and all(near(p.total, total) for p in several):
            return f"a sum of {total:.3g} is meant in every step"
    return ""


def _judged(part: Part) -> bool:
    """Whether all that a window has of a loss is known, and was used by one step only."""
    return part.known and not part.again and part.each[0] > 0


def _uneven(case: Case, part: Part) -> bool:
    """Whether equal micro-batches were divided by different counts.

    A loss that is multiplied has a weight that is meant; `.grad` that is multiplied fades on purpose.
    """
    rows = case.shares.of(part.step)
    mine = (rows.objective == part.objective) & ~rows.erased
    constants = np.abs(rows.constant[mine])
    same_size = part.elements[0] == part.elements[1]
    if not same_size or near(constants.min(), constants.max()):
        return False
    terms = [term for b in part.backwards for term in case.ledger[b].terms]
    return any("divisor" in term for term in terms)


def _alone(case: Case, part: Part) -> bool:
    """Whether the step of a part read no other loss."""
    others = case.parts_of[part.step]
    return sum(p.many > 0 and p.optimizer == part.optimizer for p in others) == 1


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
            if len(sums) > 1 and all(near(each, 1.0) for each in sums):
                return True
    return False
