"""Rules about what micro-batches weigh in a step: nothing divided, a wrong divisor, windows of other lengths.

The shares give the verdict: do elements weigh alike, and do the shares of a step add up to 1? Each rule recognises
one cause. What no rule recognises is `uneven-shares` or `sums-differ`, or a condition in the report's first line where
it may be meant.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from accumviz.checks.analysis import (
    Conditions,
    LedgerAnalysis,
    OptimizerHistory,
    WindowShare,
    WindowShares,
    are_close,
    for_each_loss,
    for_each_optimizer,
    is_close,
    modal_length,
)
from accumviz.checks.report import Finding, Findings
from accumviz.checks.suggestions import divided, divided_by_another
from accumviz.ledger.flow import BY_HAND, number

_OWN_LENGTH = "micro_batches_in_this_window"
# The most that is misplaced where no element counts more than twice as much as another: with √2 times as many of one.
_MUCH = 3 - 2 * math.sqrt(2)
# By so much weights and sums differ that are not nearly the same, as by a count that follows a moving average.
_CLEARLY = 1.1
# So much of a count is at least targets, where it counts all tokens of texts.
_MOSTLY = 0.9
# More than 1, and not by rounding.
_ABOVE_ONE = 1.001


def _several(shares: WindowShares) -> WindowShares:
    """Return the windows that hold several micro-batches."""
    return [share for share in shares if share.many > 1]


def _even(shares: WindowShares) -> WindowShares:
    """Return the windows of several means that all have the same share."""
    return [share for share in _several(shares) if share.even]


def _uneven(shares: WindowShares) -> WindowShares:
    """Return the windows in which elements weigh differently, by how much is known."""
    return [share for share in shares if share.judged and not share.alike]


# --- the divisor ------------------------------------------------------------------------------


@for_each_loss
def loss_not_divided(analysis: LedgerAnalysis, shares: WindowShares) -> Findings:
    """Find mean losses that are added up at their full weight."""
    several = _several(shares)
    undivided = several and all(map(_mixture, several))
    if undivided and not _are_separate_tasks(analysis, several[0]):
        yield _undivided(analysis, several)


def _undivided(analysis: LedgerAnalysis, several: WindowShares) -> Finding:
    lengths = [share.many for share in several]
    many = modal_length(lengths)
    share = several[lengths.index(many)]
    weights = _mixture(share)
    # What an epoch cuts short is rare; other windows were meant to be so long.
    usual = max(lengths) == many and 2 * lengths.count(many) > len(lengths)
    by = str(many) if usual else _OWN_LENGTH
    # One division of the line has to be right for all losses of its backward.
    alike = are_close([part.least for part in _parts(share)])
    backward = analysis.ledger[share.backwards[0]]
    return analysis.finding_of(
        "warning",
        share,
        evidence={
            **_name(analysis, share),
            "micro-batches": many,
            "sum of shares": many * sum(weights),
            "a share": weights if len(weights) > 1 else weights[0],
        },
        cause=(
            f"{many} mean losses are added up without a division: the step reads {many} times the gradient of one "
            "large batch."
        ),
        suggestion=divided(backward, by) if alike or len(weights) > 1 else "",
        times=len(several),
    )


def _name(analysis: LedgerAnalysis, share: WindowShare) -> dict[str, str]:
    """Return which of several losses of one backward it is."""
    if len(analysis.ledger[share.backwards[0]].terms) < 2:
        return {}
    return {"the loss": analysis.objective(share)}


def _parts(share: WindowShare) -> WindowShares:
    """Return all losses of a window's backwards, of which this is one."""
    return [other for other in share.beside if other.backwards == share.backwards]


def _mixture(share: WindowShare) -> list[float]:
    """Return the weights of an undivided backward's losses: 1, or several that add up to 1; else none."""
    means = share.known and share.equal and _are_means(share)
    # Of a whole window's samples, K losses are K parts of one gradient.
    if not means or share.compares_samples:
        return []
    return [share.least] if is_close(share.least, 1.0) else _weights_beside(share)


def _weights_beside(share: WindowShare) -> list[float]:
    """Return the weights of a backward's undivided losses, where they add up to 1: once, for the first of them."""
    parts = _parts(share)
    weights = [part.least for part in parts]
    undivided = all(part.even and not _divisions(part) for part in parts)
    first = parts[0] is share
    return weights if first and undivided and is_close(sum(weights), 1.0) else []


def _divisions(share: WindowShare) -> int:
    """Return how often a loss was divided by the number of its window's micro-batches."""
    constants = share.term.get("constants")
    if not isinstance(constants, list):
        constants = [share.term.get("factor")]
    once = 1 / share.many
    return sum(is_close(abs(number(one)), once) for one in constants)


def _are_separate_tasks(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Return whether each backward has parameters of its own: heads that are trained one after the other."""
    reached = analysis.contributed[list(share.backwards)]
    alone = reached & (reached.sum(axis=0) == 1)
    return bool(alone.any(axis=1).all())


@for_each_loss
def double_division(analysis: LedgerAnalysis, shares: WindowShares) -> Findings:
    """Find losses divided by the number of micro-batches twice."""
    twice = list(filter(_is_divided_twice, _several(shares)))
    # Half a loss is a choice that people make; a sixteenth of one is not.
    if not twice or twice[0].many < 3:
        return
    share = twice[0]
    many = share.many
    yield analysis.finding_of(
        "warning",
        share,
        evidence={"a share": share.least, "sum of shares": share.total},
        cause=(
            f"The shares of {many} losses add up to {share.total:.3g}: each was divided by {many} once too often."
        ),
        times=len(twice),
    )


def _is_divided_twice(share: WindowShare) -> bool:
    """Return whether one over the number of micro-batches is what the shares add up to, and not by choice."""
    # A constant inside a mean may be a part of the loss, as its classes are.
    if not is_close(share.total * share.many, 1.0) or "own" in share.term:
        return False
    if not share.even:
        return share.alike and _divisions(share) > 0
    # As many losses as there are micro-batches have a mean of which each weighs as little.
    together = sum(other.least for other in share.beside)
    mean_of_several = is_close(together * share.many, 1.0)
    # One of several losses may weigh as little by choice.
    all_twice = all(_divisions(part) > 1 for part in _parts(share))
    return share.alone or (all_twice and not mean_of_several)


@for_each_loss
def wrong_divisor(analysis: LedgerAnalysis, shares: WindowShares) -> Findings:
    """Find losses divided by less than a window's micro-batches, or by one more."""
    full = _full(shares)
    if not full:
        return
    share = full[0]
    many = share.many
    by = _divisor(share)
    # A weight that is meant is multiplied with mostly; what one divides by is a count.
    if not (1 < by < many or 2 < by == many + 1):
        return
    late = "late" if by < many else "early"
    backward = analysis.ledger[share.backwards[0]]
    yield analysis.finding_of(
        "warning",
        share,
        evidence={"a share": share.least},
        cause=(
            f"Each window holds {many} micro-batches, and each of their losses is divided by {by}: the shares "
            f"add up to {share.total:.3g} in every step. Either that is the wrong number, or the loop steps one "
            f"micro-batch too {late}."
        ),
        suggestion=divided_by_another(backward, by, str(many)),
        times=len(full),
    )


def _full(shares: WindowShares) -> WindowShares:
    """Return the windows of the usual length, where they are most of all and have the same share; else none."""
    even = _even(shares)
    many = modal_length(share.many for share in even)
    full = [share for share in even if share.many == many]
    most = len(full) > max(1, len(shares) / 2)
    return full if most and are_close([share.least for share in full]) else []


def _divisor(share: WindowShare) -> int:
    """Return the whole number by which the only loss was divided, and by nothing else; or 0."""
    by = round(1 / share.least)
    term = share.term
    if not is_close(share.least * by, 1.0) or "own" in term:
        return 0
    # A loss that compares samples may be one of the whole window.
    if not share.alone or share.compares_samples:
        return 0
    # Gradients are not multiplied by a weight.
    by_hand = is_close(abs(number(term.get("factor"))), 1.0)
    return by if by_hand or is_close(number(term.get("divisor")), by) else 0


# --- windows of other lengths -----------------------------------------------------------------


@for_each_loss
def partial_window_underscaled(
    analysis: LedgerAnalysis, shares: WindowShares
) -> Findings:
    """Find short windows whose losses were divided by the length of a long one."""
    even = _even(shares)
    whole = next((share for share in even if is_close(share.total, 1.0)), None)
    if whole is None:
        return
    later = shares[analysis.begins_inside :]
    every = [share for share in later if _is_short(share, whole)]
    short = [s for s in every if (s.step, s.optimizer) not in analysis.lost]
    if short:
        yield _underscaled(analysis, short, whole)


def _underscaled(
    analysis: LedgerAnalysis, short: WindowShares, whole: WindowShare
) -> Finding:
    share = short[0]
    only_loss = whole.micro_batches == whole.many
    many = share.micro_batches if only_loss else share.many
    backward = analysis.ledger[share.backwards[0]]
    suggestion = divided_by_another(backward, whole.many, _OWN_LENGTH)
    return analysis.finding_of(
        "error",
        share,
        evidence={"micro-batches": many, "a share": share.least},
        cause=(
            f"The window holds {many} micro-batch{'es' * (many > 1)}, and each was divided by {whole.many}: its step "
            f"reads {share.least * many:.3g} of the mean gradient."
        ),
        # What a library divides by is not in this line.
        suggestion="" if backward.via else suggestion,
        times=len(short),
    )


def _is_short(share: WindowShare, whole: WindowShare) -> bool:
    """Return whether a window is shorter than a whole one, and was divided by as much."""
    shorter = share.micro_batches < whole.micro_batches and share.many < whole.many
    alike = share.even and is_close(share.least, whole.least)
    return shorter and alike


@for_each_loss
def leftover_carried(analysis: LedgerAnalysis, shares: WindowShares) -> Findings:
    """Find what one epoch left over, consumed by the first step of the next one on top of its own."""
    over = _carried_over(analysis, shares)
    if not over:
        return
    share, whole = over[0]
    carried = analysis.carried(share) or share.many - whole
    yield analysis.finding_of(
        "error",
        share,
        evidence={"micro-batches": share.many, "in a whole window": whole},
        cause=(
            f"{carried} micro-batch{'es' * (carried > 1)} of the epoch before had no step: the first step of the "
            f"next one reads {share.total:.3g} times a mean gradient. Step once more at the end of each epoch, on "
            "averaged gradients where there are several ranks."
        ),
        times=len(over),
    )


def _carried_over(
    analysis: LedgerAnalysis, shares: WindowShares
) -> list[tuple[WindowShare, int]]:
    """Return the windows that begin with what was left over, and how many micro-batches a whole one holds."""
    read = [share for share in _several(shares) if share.read]
    lengths = [share.many for share in read if is_whole(share.weights)]
    over = []
    for share in shares[1:]:
        whole = _whole_at_its_end(share, lengths)
        if whole and _is_left_over(analysis, share, whole, shares):
            over.append((share, whole))
    return over


def _whole_at_its_end(share: WindowShare, lengths: list[int]) -> int:
    """Return how many micro-batches the whole window holds with which one that is not whole ends; else 0."""
    if not share.read or share.again or is_whole(share.weights):
        return 0
    shorter = [length for length in lengths if length < share.many]
    whole = max(shorter, default=0)
    return whole if is_whole(share.weights[-whole:]) else 0


def _is_left_over(
    analysis: LedgerAnalysis,
    share: WindowShare,
    whole: int,
    shares: WindowShares,
) -> bool:
    """Return whether what is more than a whole window is of the epoch before, as far as loaders were seen."""
    if analysis.epochs:
        return analysis.carried(share) > 0
    return share.many < 2 * whole and not _grow(shares, whole)


def _grow(shares: WindowShares, whole: int) -> bool:
    """Return whether windows are all longer from some step on: then nothing is left over."""
    longer = [other.many > whole for other in _several(shares)]
    # Two at least are as long as they were, and two at least are longer.
    several = longer.count(False) > 1 and longer.count(True) > 1
    return several and longer == sorted(longer)


def is_whole(weights: Sequence[float]) -> bool:
    """Return whether these are the shares of a whole window, divided or not."""
    total = sum(weights)
    return is_close(total, 1.0) or is_close(total, len(weights))


# --- elements ---------------------------------------------------------------------------------


@for_each_loss
def token_mean_of_means(analysis: LedgerAnalysis, shares: WindowShares) -> Findings:
    """Find means over unequal numbers of elements, averaged as if they were equal."""
    unequal = _unequal(analysis, shares)
    if not unequal:
        return
    worst = max(unequal, key=_ratio)
    smallest = min(worst.sizes)
    largest = max(worst.sizes)
    severity = "error" if _misplaced(worst) > _MUCH else "warning"
    if all(map(_only_the_last_is_smaller, unequal)):
        severity = "note"
    yield analysis.finding_of(
        severity,
        worst,
        event=worst.backwards[worst.sizes.index(largest)],
        evidence={
            **_name(analysis, worst),
            "elements": list(worst.sizes),
            "weight per element, before any clip": list(worst.each),
            "largest over smallest": _ratio(worst),
            "part of the weight to move for all to weigh the same": _misplaced(worst),
        },
        cause=(
            f"Each loss is a mean over its own elements, here {smallest:g} to {largest:g} of them: an element of the "
            f"smallest micro-batch counts {_ratio(worst):.3g} times as much as one of the largest. Add up sums, and "
            "divide by the number of elements in the window."
        ),
        times=len(unequal),
    )


def _unequal(analysis: LedgerAnalysis, shares: WindowShares) -> WindowShares:
    """Return the windows of unequal means. What an epoch left over may be a smaller batch: that is another mistake."""
    judged = [share for share in _several(shares) if share.judged]
    if not all(share.equal for share in judged):
        # Their weights follow something else, as a penalty's do that is multiplied by another loss's count.
        return []
    over = [share for share, _ in _carried_over(analysis, shares)]
    uneven = filter(_has_unequal_means, _uneven(_several(shares)))
    return [s for s in uneven if s not in over and not analysis.carried(s)]


def _has_unequal_means(share: WindowShare) -> bool:
    """Return whether there are more elements in some of a window's means than in others."""
    # Losses of one backward that weigh differently are a choice: a mean over texts, and not over words. So are classes.
    several = len(set(share.backwards)) == share.many
    several &= not share.term.get("class_weights")
    return several and _are_means(share) and 0 < min(share.sizes) < max(share.sizes)


def _ratio(share: WindowShare) -> float:
    return max(share.each) / min(share.each)


def _misplaced(share: WindowShare) -> float:
    """Return the part of a step's weight that would have to move for all elements to weigh the same."""
    many = sum(share.sizes)
    pairs = zip(share.weights, share.sizes, strict=True)
    return sum(abs(w / share.total - n / many) for w, n in pairs) / 2


def _are_means(share: WindowShare) -> bool:
    """Return whether these are means, or sums that are each divided by their own number of elements."""
    # A sum over one element is no mean, and a choice.
    several = all(n > 1 and float(n).is_integer() for n in share.sizes)
    return share.mean or (share.equal and several)


def _only_the_last_is_smaller(share: WindowShare) -> bool:
    *others, last = share.sizes
    return len(set(others)) == 1 and last < others[0] and share.equal


# --- where no cause is recognised -------------------------------------------------------------


@for_each_loss
def uneven_shares(analysis: LedgerAnalysis, shares: WindowShares) -> Findings:
    """Find losses that weigh differently in most windows, and not by a weight that may be meant."""
    several = _several(shares)
    uneven = [s for s in _uneven(several) if not _is_meant(analysis, s)]
    if 2 * len(uneven) <= sum(share.judged for share in several):
        return
    share = uneven[0]
    why = "Divide each loss by the same count."
    if len(set(share.by_hand)) > 1:
        why = "`.grad` is scaled by hand between backwards, and with it all that is there already."
    yield analysis.finding_of(
        "warning",
        share,
        evidence={"shares": list(share.weights), "sum of shares": share.total},
        cause=(
            "The micro-batches of a window do not count alike: an element of one weighs "
            f"{_ratio(share):.3g} times an element of another. {why}"
        ),
        times=len(uneven),
    )


def _is_meant(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Return whether losses may weigh differently on purpose.

    What a loss is multiplied by is a weight, what it is divided by a count; a `.grad` that keeps the same part each
    time fades on purpose. Means that are alike, of different sizes, are another rule's.
    """
    if share.equal or are_close(share.factors) or _ratio(share) < _CLEARLY:
        return True
    fading = [early / late for early, late in pairwise(share.by_hand)]
    if are_close([*fading, 1.0]):
        divisors = _divisors(analysis, share)
        return len(divisors) == 1 or not all(map(float.is_integer, divisors))
    times = 1 / fading[0]
    return are_close(fading) and not is_close(times, round(times))


def _divisors(analysis: LedgerAnalysis, share: WindowShare) -> set[float]:
    """Return the numbers by which the losses of a window's backwards were divided."""
    terms = [term for b in share.backwards for term in analysis.ledger[b].terms]
    return {number(term.get("divisor", 1.0)) for term in terms}


def _is_counted(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Return whether losses of a window were divided by a count, which no moving average is."""
    divisors = _divisors(analysis, share)
    return divisors != {1.0} and all(map(float.is_integer, divisors))


class _StepSum(NamedTuple):
    """The shares that one step read of all losses but plain sums, and how many micro-batches it consumed."""

    shares: WindowShares
    many: int

    @property
    def total(self) -> float:
        """The sum of the shares."""
        return sum(share.total for share in self.shares)

    @property
    def unclipped(self) -> float:
        """The sum before an edit that shortened the whole window after its last backward."""
        return sum(share.total / share.by_hand[-1] for share in self.shares)


def _sums(optimizer: OptimizerHistory) -> list[_StepSum]:
    """Return the sums of an optimizer's steps, where all shares of all of them are known."""
    plain = _plain_sums(optimizer)
    sums = []
    for step in optimizer.windows:
        shares = optimizer.shares_of(step)
        if not all(share.judged for share in shares):
            return []
        counted = [share for share in shares if share.objective not in plain]
        sums.append(_StepSum(counted, shares[0].micro_batches))
    return sums


def sums_of_shares(optimizer: OptimizerHistory) -> str:
    """Say how many micro-batches an optimizer's steps consumed, and to what their shares add up, if known."""
    many = list(map(len, optimizer.windows.values()))
    if not many:
        return ""
    # Losses of several lines, as two networks have them, and looks of a closure are no parts of one batch.
    one_line = np.unique(optimizer.sites[optimizer.read]).size == 1
    parts = one_line and not optimizer.closures[optimizer.read].any()
    said = f"of {from_to(many)} {'micro-batch' if parts else 'backward'}"
    if optimizer.longest > 1:
        said += "es" if parts else "s"
    sums = _sums(optimizer)
    one_loss = all(len(optimizer.shares_of(step)) == 1 for step in optimizer.windows)
    whole = sums and one_loss and all(window.shares for window in sums)
    ones = optimizer.longest == 1 and are_close([1.0, *_totals(sums)])
    if whole and not (ones or optimizer.world_size > 1):
        said += f" with shares that add up to {from_to(_totals(sums))}"
    return said


def from_to(values: Sequence[float], digits: int = 4) -> str:
    """Write a number, or from which to which several are: "0.25 to 1"."""
    low = f"{min(values):,.{digits}g}"
    high = f"{max(values):,.{digits}g}"
    return low if are_close(values) else f"{low} to {high}"


def _plain_sums(optimizer: OptimizerHistory) -> set[int]:
    """Return the losses that are sums, with one factor for all steps: more elements are more."""
    plain = set()
    for (index, objective), every in optimizer.objectives.items():
        summed = index == optimizer.optimizer and not every[0].mean
        if summed and are_close(_factors(every)):
            plain.add(objective)
    return plain


def _totals(sums: Sequence[_StepSum]) -> list[float]:
    return [window.total for window in sums]


def _shares(sums: Sequence[_StepSum]) -> WindowShares:
    return [share for window in sums for share in window.shares]


def _factors(shares: WindowShares) -> list[float]:
    """Return what each loss was multiplied by."""
    return [factor for share in shares for factor in share.factors]


def _differ(sums: list[_StepSum]) -> bool:
    """Return whether sums differ, and neither by a clip by hand nor by what a count holds beside the targets."""
    totals = _totals(sums)
    # A count of tokens may hold some that are no targets, and then all sums are a little below 1.
    highest = max(totals, default=0.0)
    counted = _MOSTLY * highest < min(totals, default=0.0) and highest < _ABOVE_ONE
    alike = are_close(totals) or are_close([w.unclipped for w in sums])
    return not (counted or alike)


@for_each_optimizer
def sums_differ(optimizer: OptimizerHistory) -> Findings:
    """Find windows whose shares add up to different sums, and not by a weight that follows a schedule."""
    sums = _sums(optimizer)[optimizer.begins_inside :]
    if _are_parts(optimizer, sums) or not _are_wrong(optimizer, sums):
        return
    largest = max(sums, key=lambda window: window.total)
    low = min(_totals(sums))
    advice = "Divide by what each window holds."
    if are_close(_factors(_shares(sums))):
        advice = "All losses have one factor: step where a window ends, or divide by what each window holds."
    yield optimizer.finding_of(
        "warning",
        largest.shares[0],
        evidence={
            "micro-batches": sorted({window.many for window in sums}),
            "sums of shares": _totals(sums),
        },
        cause=(
            f"The shares of a window add up to {low:.3g} in one step and to {largest.total:.3g} in another. {advice}"
        ),
        times=len(sums),
    )


def _are_parts(optimizer: OptimizerHistory, sums: Sequence[_StepSum]) -> bool:
    """Return whether sums of several ranks may be whole together: divided by what all of them hold, which varies."""
    return optimizer.world_size > 1 and not are_close(_factors(_shares(sums)))


def _are_wrong(analysis: LedgerAnalysis, sums: list[_StepSum]) -> bool:
    """Return whether sums differ, and neither by a weight that is meant nor by one window that is longer."""
    usual = modal_length(window.many for window in sums)
    totals = _totals(sums)
    if not _differ(sums) or max(totals) < _CLEARLY * min(totals):
        return False
    if are_close(_factors(_shares(sums))):
        return _outgrow_one_divisor(sums, usual)
    full = [window for window in sums if window.many == usual]
    # Steps for losses of their own have sums of their own.
    of_each = defaultdict(list)
    for share in _shares(full):
        of_each[share.objective].append(share.total)
    if all(map(are_close, of_each.values())):
        return False
    return _differ(full) and not _follow_a_schedule(analysis, full)


def _follow_a_schedule(analysis: LedgerAnalysis, full: list[_StepSum]) -> bool:
    """Return whether sums may follow a weight that is meant: one that only falls or only rises, or of plain sums."""
    totals = _totals(full)
    rising = sorted(totals)
    # What a sum is multiplied by is a weight, what it is divided by a count.
    shares = _shares(full)
    counted = all(share.mean or _is_counted(analysis, share) for share in shares)
    # Of something else than elements, where no window's sums have more of these, and each has one factor.
    if all(share.alike and not share.mean for share in shares):
        counted &= not are_close([sum(share.sizes) for share in shares])
    return totals in (rising, rising[::-1]) or not counted


def _outgrow_one_divisor(sums: list[_StepSum], usual: int) -> bool:
    """Return whether one number divides windows of several lengths. The last one may have been cut short."""
    odd = sum(window.many != usual for window in sums[:-1])
    totals = _totals(sums)
    whole = any(is_close(total, 1.0) for total in totals)
    longer = sum(total > _ABOVE_ONE for total in totals)
    return odd > 1 and (not whole or longer > 1)


# --- what has to be meant ---------------------------------------------------------------------


def conditions(analysis: LedgerAnalysis) -> Conditions:
    """Say what has to be meant for a healthy loop to be so: uneven weights, and sums that differ or are not 1."""
    for shares in analysis.objectives.values():
        worst = max(_uneven(shares), key=_ratio, default=None)
        if worst is not None:
            ratio = f"{_ratio(worst):.3g}"
            said = (
                f"elements that weigh up to {ratio} times as much as others are meant"
            )
            yield said, worst.backwards[0]
    for optimizer in analysis.optimizers:
        yield from _differing_sums(optimizer)
        yield from _unread(optimizer)
        yield from _by_hand(optimizer)
    for shares in analysis.objectives.values():
        yield from _constant_sum(analysis, _several(shares))
        yield from _penalty(_several(shares))
        yield from _stretched(shares)
        yield from _single_factor(analysis, shares)


def _differing_sums(optimizer: OptimizerHistory) -> Conditions:
    """Name the sums of an optimizer's steps, where they differ."""
    sums = _sums(optimizer)
    if not _differ(sums) or _are_parts(optimizer, sums):
        return
    totals = _totals(sums)
    said = f"sums of shares from {min(totals):.3g} to {max(totals):.3g} are meant"
    yield said, sums[0].shares[0].backwards[0]


def excused(optimizer: OptimizerHistory) -> np.ndarray:
    """Mark the shares that are unknown only for what a condition asks, or for a clip that the large batch's has too."""
    shares = optimizer.consumed
    not_read = np.isin(shares.objective, _like_means(optimizer))
    mask: np.ndarray = shares.by_value | not_read | _changed_alone(optimizer)
    return mask


def _changed_alone(optimizer: OptimizerHistory) -> np.ndarray:
    """Mark the shares of micro-batches that are alone in their steps, and whose gradients a hand has changed."""
    shares = optimizer.consumed
    alone = optimizer.longest == 1 and not optimizer.world_size > 1
    mask: np.ndarray = (shares.unknown == BY_HAND) & ~shares.opaque & alone
    return mask


def _like_means(optimizer: OptimizerHistory) -> list[int]:
    """Return the losses that cannot be taken apart, and weigh in every step what a mean would: alone, or together 1."""
    if optimizer.world_size > 1:
        return []  # a rank's part of the whole depends on what its mean is over
    like = []
    for (index, objective), shares in optimizer.objectives.items():
        totals = [share.total for share in shares]
        unread = not any(share.known for share in shares)
        even = are_close(totals) and all(share.even for share in shares)
        divided = is_close(totals[0], 1.0) or all(map(_is_averaged, shares))
        whole = divided or not _several(shares)
        if index == optimizer.optimizer and unread and even and whole:
            like.append(objective)
    return like


def _by_hand(optimizer: OptimizerHistory) -> Conditions:
    """Say of changes by hand that they are meant, where each changes all that a step reads."""
    changed = _changed_alone(optimizer)
    if changed.any():
        said = "what is done to `.grad` by hand before the step, and not by one factor, is meant"
        yield said, int(optimizer.consumed.step[changed][0])


def _unread(optimizer: OptimizerHistory) -> Conditions:
    """Name the losses that weigh what a mean would, as far as it is known, and why no more is."""
    for objective in _like_means(optimizer):
        its = optimizer.consumed.take(optimizer.consumed.objective == objective)
        loss = optimizer.ledger[its.backward[0]].label or "the loss"
        why = its.reasons[its.unknown[0]]
        each = "micro-batch" if optimizer.longest > 1 else "step"
        said = f"{loss}, of which not all is known ({why}), is meant to weigh the same in each {each}"
        yield said, int(its.backward[0])


def _constant_sum(analysis: LedgerAnalysis, shares: WindowShares) -> Conditions:
    """Name the sum of a loss's shares, unless it or the sum of all losses is 1; or say what it compares."""
    if not _have_one_sum(shares):
        return
    share = shares[0]
    is_whole = _adds_up_with_others(share)
    of_loss = "" if share.alone else f" for {analysis.objective(share)}"
    said = f"a sum of {share.total:.3g} is meant in every step{of_loss}"
    if share.compares_samples:
        whose = "micro-batch alone" if is_whole else "whole window"
        said = f"each loss is meant to compare the samples of its {whose}"
    elif is_whole:
        return
    yield said, share.backwards[0]


def _penalty(shares: WindowShares) -> Conditions:
    """Name a penalty on weights that a step reads once for each micro-batch."""
    for share in shares:
        times = sum(weight != 0 for weight in share.weights)
        is_added = share.term.get("of_weights") and not _is_averaged(share)
        if is_added and times > 1:
            said = (
                f"a penalty on weights that is added {times} times in a step is meant"
            )
            yield said, share.backwards[0]
            return


def _stretched(shares: WindowShares) -> Conditions:
    """Name a loss of n × n numbers where n were computed."""
    share = shares[0]
    many = share.term.get("stretched")
    if many:
        said = f"a loss of {many} × {many} numbers, each of {many} samples with each other, is meant"
        yield said, share.backwards[0]


def _single_factor(analysis: LedgerAnalysis, shares: WindowShares) -> Conditions:
    """Name the factor of losses with a step each: the number of ranks, or what they were divided by."""
    if _several(shares) or not _have_one_sum(shares):
        return
    share = shares[0]
    ranks = analysis.world_size
    by = _divisor(share) if share.mean and share.total < 1 else 0
    if ranks > 1 and is_close(share.total, ranks):
        said = f"a loss that is multiplied by {ranks:g}, the number of ranks, is meant"
        yield said, share.backwards[0]
    elif by > 1:
        said = f"a loss that is divided by {by} is meant, with a step for each"
        yield said, share.backwards[0]


def _have_one_sum(shares: WindowShares) -> bool:
    """Return whether there are windows, in each of which the losses weigh alike, with the same sum in all."""
    alike = all(share.even or (share.mean and share.alike) for share in shares)
    # Of a sum that is not read, the factor is not the share.
    alike &= all(
        share.known or "Sum" not in str(share.term.get("op")) for share in shares
    )
    return bool(shares) and alike and are_close([share.total for share in shares])


def _adds_up_with_others(share: WindowShare) -> bool:
    """Return whether the shares of a loss add up to 1, alone or with the others', or are a weight beside another."""
    totals = [other.total for other in share.beside]
    if share.adds_up_to(1.0) or is_close(sum(totals), 1.0):
        return True
    # A loss beside one that is whole is divided as well: what is left is its weight.
    beside_a_whole = any(is_close(total, 1.0) for total in totals)
    return beside_a_whole and _is_averaged(share)


def _is_averaged(share: WindowShare) -> bool:
    """Return whether a loss, or by a hand `.grad`, is divided by the number of its window's micro-batches."""
    by_hand = is_close(share.by_hand[0] * share.many, 1.0)
    return by_hand or _divisions(share) > 0
