"""Rules about what micro-batches weigh in a step: nothing divided, a wrong divisor, windows of other lengths.

The shares give the verdict; each rule recognises one cause. What no rule recognises is `uneven-shares` or
`sums-differ`, or a condition in the report's first line where it may be meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from accumviz.checks.analysis import (
    LedgerAnalysis,
    WindowShare,
    is_close,
    modal_length,
)
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import divided, divided_by_another
from accumviz.ledger.flow import number

_OWN_LENGTH = "micro_batches_in_this_window"
# The most that is misplaced where no element counts more than twice as much as another: with √2 times as many of one.
_MUCH = 3 - 2 * math.sqrt(2)


# --- the divisor ------------------------------------------------------------------------------


def loss_not_divided(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find mean losses that are added up at their full weight."""
    for shares in analysis.objectives.values():
        several = [share for share in shares if share.many > 1]
        undivided = all(_mixture(analysis, share) for share in several)
        if several and undivided and not separate_tasks(analysis, several[0]):
            yield _undivided(analysis, several)


def _undivided(analysis: LedgerAnalysis, several: list[WindowShare]) -> Finding:
    # Where micro-batches draw one of several losses, all of them are a window's.
    lengths = [analysis.micro_batches(share) for share in several]
    if len(set(lengths)) >= len({share.many for share in several}):
        lengths = [share.many for share in several]
    many = modal_length(lengths)
    share = several[lengths.index(many)]
    weights = _mixture(analysis, share)
    # What an epoch cuts short stands alone; what has neighbours of its length was meant to be so long.
    varied = len({one for one, other in pairwise(lengths) if one == other}) > 1
    by = _OWN_LENGTH if varied else str(many)
    what = "mean losses" if len(weights) == 1 else "mixtures of losses"
    cause = (
        f"{many} {what} are added up without a division: the step reads {many} times the gradient of one large "
        "batch."
    )
    if varied:
        cause += (
            f" Windows hold from {min(lengths)} to {max(lengths)}, each its own number."
        )
    backward = analysis.ledger[share.backwards[0]]
    return analysis.finding_of(
        "loss-not-divided",
        "warning",
        share,
        evidence={
            **name_of(analysis, share),
            "micro-batches": many,
            "sum of shares": many * sum(weights),
            "a share": weights if len(weights) > 1 else weights[0],
        },
        cause=cause,
        suggestion=divided(backward, by) if _one_divisor(analysis, share) else "",
        times=len(several),
    )


def _one_divisor(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Return whether one division of the line is right for all losses of its backward."""
    beside = [
        other
        for other in analysis.in_same_step(share)
        if share.backwards[0] in other.backwards
    ]
    alike = all(is_close(other.least, share.least) for other in beside)
    return alike or len(_mixture(analysis, share)) > 1


def name_of(analysis: LedgerAnalysis, share: WindowShare) -> dict[str, str]:
    """Return which of several losses of one backward it is."""
    if len(analysis.ledger[share.backwards[0]].terms) < 2:
        return {}
    return {"the loss": analysis.shares.objectives[share.objective]}


def _mixture(analysis: LedgerAnalysis, share: WindowShare) -> list[float]:
    """Return the weights of an undivided backward's losses: 1, or several that add up to 1; else none."""
    if not share.known or not share.equal or not _are_means(share):
        return []
    if is_close(share.least, 1.0):
        return [share.least]
    parts = [
        other
        for other in analysis.in_same_step(share)
        if other.backwards == share.backwards
    ]
    weights = [part.least for part in parts]
    if parts[0].objective != share.objective:
        return []  # said once, of the first of them
    if not all(part.even for part in parts) or not is_close(sum(weights), 1.0):
        return []
    undivided = [not _divided(analysis, part) for part in parts]
    return weights if all(undivided) else []


def _divided(analysis: LedgerAnalysis, share: WindowShare) -> int:
    """Return how often a loss was divided by the number of its window's micro-batches."""
    constants = analysis.constants(share)
    return sum(bool(is_close(one, 1 / share.many)) for one in constants)


def separate_tasks(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Return whether each backward has parameters of its own: heads that are trained one after the other."""
    reached = analysis.contributed[list(share.backwards)]
    alone = reached & (reached.sum(axis=0) == 1)
    return bool(alone.any(axis=1).all())


def double_division(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find losses divided by the number of micro-batches twice."""
    for shares in analysis.objectives.values():
        several = [share for share in shares if share.many > 1]
        twice = [share for share in several if _divided_twice(analysis, share)]
        # Half a loss is a choice that people make; a sixteenth of one is not. Every whole window has to agree.
        if not twice or twice[0].many < 3:
            continue
        share, many = twice[0], twice[0].many
        if len(twice) < sum(other.many >= many for other in several):
            continue
        cause = (
            f"The losses of a window are sums, divided by its number of elements, and by {many} as well: their shares "
            f"add up to 1/{many}."
        )
        if share.mean:
            cause = f"Each of {many} losses weighs 1/{many**2}: it was divided by {many} twice."
        yield analysis.finding_of(
            "double-division",
            "warning",
            share,
            evidence={
                "micro-batches": many,
                "a share": share.least,
                "sum of shares": share.total,
            },
            cause=cause,
            times=len(twice),
        )


def _divided_twice(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Return whether one over the number of micro-batches is what the shares add up to, and not by choice."""
    if not is_close(share.total * share.many, 1.0):
        return False
    if not share.mean:
        # Divided by all elements of a window, sums add up to 1; then by the number of micro-batches.
        alike = share.judged and is_close(min(share.each), max(share.each))
        return bool(alike) and _divided(analysis, share) > 0
    # A constant inside a mean may be a part of the loss, as its classes are.
    if not share.even or "own" in analysis.term(share):
        return False
    if analysis.alone(share):
        return True
    together = sum(other.least for other in analysis.in_same_step(share))
    # As many losses as there are micro-batches have a mean of which each weighs as little.
    return not is_close(together * share.many, 1.0) and _divided(analysis, share) > 1


def wrong_divisor(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find losses divided by a whole number beside that of a window's micro-batches."""
    for shares in analysis.objectives.values():
        even = [share for share in shares if share.many > 1 and share.even]
        many = modal_length(share.many for share in even)
        full = [share for share in even if share.many == many]
        if len(full) < 2 or 2 * len(full) < len(shares):
            continue
        share = full[0]
        by = divisor(analysis, share)
        paces = {s.many for s in analysis.window_shares if s.backwards}
        # A weight that is meant is multiplied with mostly; what one divides by is a count.
        if by < 3 or abs(by - many) != 1 or by in paces or not analysis.alone(share):
            continue
        if not all(is_close(one.least, share.least) for one in full):
            continue
        late = "late" if by < many else "early"
        yield analysis.finding_of(
            "wrong-divisor",
            "warning",
            share,
            evidence={
                "micro-batches": many,
                "divided by": by,
                "sum of shares": share.total,
            },
            cause=(
                f"Each window holds {many} micro-batches, and each of their losses is divided by {by}: the shares "
                f"add up to {share.total:.3g} in every step. Either that is the wrong number, or the loop steps one "
                f"micro-batch too {late}."
            ),
            suggestion=divided_by_another(
                analysis.ledger[share.backwards[0]], by, str(many)
            ),
            times=len(full),
        )


def divisor(analysis: LedgerAnalysis, share: WindowShare) -> int:
    """Return the whole number by which a loss was divided, and by nothing else; or 0."""
    by = round(1 / share.least) if 0 < share.least < 1 else 0
    term = analysis.term(share)
    if not by or not is_close(share.least * by, 1.0) or "own" in term:
        return 0
    # Gradients are not multiplied by a weight.
    by_hand = is_close(abs(number(term.get("factor"))), 1.0)
    return by if by_hand or is_close(number(term.get("divisor")), float(by)) else 0


# --- windows of other lengths -----------------------------------------------------------------


def partial_window_underscaled(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find short windows whose losses were divided by the length of a long one."""
    for shares in analysis.objectives.values():
        whole = _whole_window(shares)
        weak = [s for s in shares if whole and _is_short(analysis, s, whole)]
        if not weak or whole is None:
            continue
        share = weak[0]
        many = analysis.micro_batches(share)
        if analysis.micro_batches(whole) != whole.many:
            many = share.many
        held = f"{many} micro-batch{'es' * (many > 1)}"
        cause = (
            f"The window holds {held}, and each was divided by {whole.many}: its step reads "
            f"{share.least * many:.3g} of the mean gradient."
        )
        yield analysis.finding_of(
            "partial-window-underscaled",
            "error",
            share,
            evidence={
                "micro-batches": many,
                "in a whole window": whole.many,
                "shares": [share.least] * many,
                "sum of shares": share.least * many,
            },
            cause=cause,
            suggestion=_by_its_own(analysis, share, whole),
            times=len(weak),
        )


def _whole_window(shares: Sequence[WindowShare]) -> WindowShare | None:
    """Return a window that is complete: several equal shares that add up to 1."""
    for share in shares:
        if share.many > 1 and share.even and is_close(share.total, 1.0):
            return share
    return None


def _by_its_own(
    analysis: LedgerAnalysis, share: WindowShare, whole: WindowShare
) -> str:
    """Suggest to divide by a window's own number, unless a library divides."""
    backward = analysis.ledger[share.backwards[0]]
    if backward.via:
        return ""
    return divided_by_another(backward, whole.many, _OWN_LENGTH)


def _is_short(analysis: LedgerAnalysis, share: WindowShare, whole: WindowShare) -> bool:
    """Return whether a window is shorter than a whole one, and was divided by as much."""
    # A recording may have begun inside the first window.
    if share.order == 0:
        return False
    shorter = analysis.micro_batches(share) < analysis.micro_batches(whole)
    alike = share.even and not share.erased and is_close(share.least, whole.least)
    return shorter and alike and share.many < whole.many


def leftover_carried(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find what one epoch left over, consumed by the first step of the next one on top of its own."""
    for shares in analysis.objectives.values():
        over = [share for share in shares if _carries(analysis, share, shares)]
        if not over:
            continue
        share, whole = over[0], _usual_before(over[0], shares)
        carried = analysis.carried(share) or share.many - whole
        yield analysis.finding_of(
            "leftover-carried",
            "error",
            share,
            evidence={
                "micro-batches": share.many,
                "in a whole window": whole,
                "carried": carried,
                "sum of shares": share.total,
            },
            cause=(
                f"{carried} micro-batch{'es' * (carried > 1)} of the epoch before had no step: the first step of the "
                f"next one reads {share.total:.3g} times a mean gradient. Step once more at the end of each epoch, on "
                "averaged gradients where there are several ranks."
            ),
            times=len(over),
        )


def _usual_before(share: WindowShare, shares: Sequence[WindowShare]) -> int:
    """Return how many of a window's last micro-batches are a whole one."""
    lengths = {s.many for s in shares if s.many < share.many and _is_whole(s)}
    return max(lengths, default=0)


def _is_whole(share: WindowShare) -> bool:
    return share.read and share.many > 1 and _adds_up(share.weights)


def _adds_up(weights: Sequence[float]) -> bool:
    """Return whether these are the shares of a whole window, divided or not."""
    total = sum(weights)
    return bool(is_close(total, 1.0) or is_close(total, float(len(weights))))


def _carries(
    analysis: LedgerAnalysis, share: WindowShare, shares: Sequence[WindowShare]
) -> bool:
    """Return whether a window has a whole one at its end, and more before that from the epoch before."""
    whole = _usual_before(share, shares)
    if not whole or share.again or not share.read or _adds_up(share.weights):
        return False
    if not _adds_up(share.weights[-whole:]):
        return False
    if analysis.has_loaders:
        return analysis.carried(share) > 0
    # Without a loader to ask, a length says it; but windows may all be longer from some step on.
    longer = [other.many > whole for other in shares if other.many > 1]
    since = longer.index(True)
    grown = since > 1 and all(longer[since:]) and len(longer) > since + 1
    return share.order > 0 and share.many < 2 * whole and not grown


# --- elements ---------------------------------------------------------------------------------


def token_mean_of_means(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find means over unequal numbers of elements, averaged as if they were equal."""
    for shares in analysis.objectives.values():
        unequal = [s for s in shares if _is_unequal(analysis, s, shares)]
        if not unequal:
            continue
        # Only the last micro-batch of a window may have been smaller.
        inside = [share for share in unequal if not _only_the_last_is_smaller(share)]
        worst = max(inside or unequal, key=_ratio)
        event = worst.backwards[worst.sizes.index(max(worst.sizes))]
        weighted = any(t.get("class_weights") for t in analysis.ledger[event].terms)
        clipped = bool((analysis.shares.of(worst.step).clipped < 1).any())
        misplaced = _misplaced(worst)
        severity = "error" if misplaced > _MUCH else "warning"
        advice = "Add up sums, and divide by the number of elements in the window."
        if not inside:
            advice = "Only the last micro-batch of a window was smaller."
        elif weighted:
            advice = "They are counted with the weights of their classes."
        yield analysis.finding_of(
            "token-mean-of-means",
            "note" if weighted or not inside else severity,
            worst,
            event=event,
            evidence={
                **name_of(analysis, worst),
                "elements": list(worst.sizes),
                f"weight per element{', before the clip' * clipped}": list(worst.each),
                "largest over smallest": _ratio(worst),
                "weight on the wrong elements": misplaced,
            },
            cause=(
                f"Each loss is a mean over its own elements, and these are from {min(worst.sizes):g} to "
                f"{max(worst.sizes):g}: an element of the smallest counts {_ratio(worst):.3g} times as much as one of "
                f"the largest. {advice}"
            ),
            times=len(inside or unequal),
        )


def _is_unequal(
    analysis: LedgerAnalysis, share: WindowShare, shares: Sequence[WindowShare]
) -> bool:
    """Return whether elements weigh differently, because there are more of them in some losses."""
    if share.many < 2 or not share.judged or not _are_means(share):
        return False
    unlike = not is_close(min(share.each), max(share.each))
    # What an epoch left over may be a smaller batch: that is another mistake.
    carried = analysis.carried(share) or _carries(analysis, share, shares)
    return unlike and 0 < min(share.sizes) < max(share.sizes) and not carried


def _ratio(share: WindowShare) -> float:
    return max(share.each) / min(share.each)


def _misplaced(share: WindowShare) -> float:
    """Return how much of a step's weight lies on other elements than in one large batch."""
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


def uneven_shares(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find equal elements of one loss that weigh differently in most windows."""
    for parts in analysis.objectives.values():
        windows = [part for part in parts if part.many > 1 and part.judged]
        uneven = [part for part in windows if _is_uneven(analysis, part)]
        if not uneven or 2 * len(uneven) <= len(windows):
            continue
        part = uneven[0]
        by_hand = not is_close(min(part.by_hand), max(part.by_hand))
        why = "Divide each loss by the same count."
        if by_hand:
            why = "`.grad` is scaled by hand between backwards, and with it all that is there already."
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
                "The micro-batches of a window do not count alike: an element of one weighs "
                f"{_ratio(part):.3g} times an element of another. {why}"
            ),
            times=len(uneven),
        )


def _is_uneven(analysis: LedgerAnalysis, part: WindowShare) -> bool:
    """Return whether equal micro-batches were divided by different counts, or in `.grad` again and again.

    A loss that is multiplied has a weight that is meant, and a `.grad` that keeps the same part each time fades on
    purpose.
    """
    if len(set(part.sizes)) > 1 or is_close(part.least, max(part.weights)):
        return False
    fading = [early / late for early, late in pairwise(part.by_hand)]
    if not is_close(min(part.by_hand), max(part.by_hand)):
        same = is_close(min(fading), max(fading))
        return not same or bool(is_close(1 / fading[0], float(round(1 / fading[0]))))
    terms = [term for b in part.backwards for term in analysis.ledger[b].terms]
    return any("divisor" in term for term in terms)


class _WindowSum(NamedTuple):
    """What one step read of one loss, from whichever lines: how many micro-batches, and the sum of their shares."""

    first: WindowShare
    many: int
    total: float
    before_the_last_edit: float
    weights: tuple[float, float]
    each: tuple[float, float]


def sums_differ(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find windows of one loss whose shares add up to different sums."""
    for optimizer in {part.optimizer for part in analysis.window_shares}:
        found = _of_different_sums(_windows_of_one_loss(analysis, optimizer))
        if not found:
            continue
        largest = max(found, key=lambda window: window.total)
        low, high = min(window.total for window in found), largest.total
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


def _windows_of_one_loss(analysis: LedgerAnalysis, optimizer: int) -> list[_WindowSum]:
    """Return the windows of an optimizer that has one loss, all of whose shares are known; none otherwise."""
    objectives = [
        shares for key, shares in analysis.objectives.items() if key[0] == optimizer
    ]
    kinds = set()
    for shares in objectives:
        event = analysis.ledger[shares[0].backwards[0]]
        ops = tuple(str(term.get("op")) for term in event.terms)
        kinds.add((event.label, ops, shares[0].mean))
    every = [share for shares in objectives for share in shares]
    if len(kinds) != 1 or not all(share.judged for share in every):
        return []
    steps = sorted({share.step for share in every})
    of_steps = [analysis.shares_of(step, optimizer) for step in steps]
    together = all(_are_together(shares) for shares in of_steps)
    return [_window_sum(shares) for shares in of_steps] if together else []


def _are_together(shares: list[WindowShare]) -> bool:
    """Return whether no loss is one that some micro-batches have and others do not."""
    groups = {share.backwards for share in shares}
    every = {b for backwards in groups for b in backwards}
    return sum(map(len, groups)) == len(every)


def _window_sum(shares: list[WindowShare]) -> _WindowSum:
    each = [weight for share in shares for weight in share.each]
    weights = [weight for share in shares for weight in share.weights]
    return _WindowSum(
        shares[0],
        len(weights),
        sum(weights),
        sum(share.total / share.by_hand[-1] for share in shares),
        (min(weights), max(weights)),
        (min(each), max(each)),
    )


def _of_different_sums(windows: list[_WindowSum]) -> list[_WindowSum]:
    """Return the windows whose sums differ by another count, and not by a schedule; none where there are none."""
    length = modal_length(window.many for window in windows)
    full = [window for window in windows if window.many == length]
    # A recording may have begun inside the first window.
    totals = [window.total for window in full][1:]
    low = min((window.each[0] for window in full), default=0.0)
    same_elements = is_close(low, max((w.each[1] for w in full), default=0.0))
    if _differ(full[1:]) and not same_elements and not _annealed(totals):
        return full if full[0].first.mean else []
    return _of_other_lengths(windows, length)


def _differ(windows: list[_WindowSum]) -> bool:
    """Return whether sums differ, and not by a clip by hand: what shortens a whole window after its last backward."""
    sums = [window.total for window in windows]
    unclipped = [window.before_the_last_edit for window in windows]
    if len(windows) < 2 or is_close(min(sums), max(sums)):
        return False
    return not is_close(min(unclipped), max(unclipped))


def _of_other_lengths(windows: list[_WindowSum], length: int) -> list[_WindowSum]:
    """Return the windows, where several have another length than most, and all are divided by one number.

    One longer window may be meant. Where an epoch ends, one is short; the first and the last may be cut.
    """
    if not windows or not windows[0].first.mean:
        return []
    low, high = min(w.weights[0] for w in windows), max(w.weights[1] for w in windows)
    odd = [window for window in windows[1:-1] if window.many != length]
    whole = [window for window in windows if is_close(window.total, 1.0)]
    longer = [window for window in windows if window.total > 1.001]
    if not is_close(low, high) or len(odd) < 2 or (whole and len(longer) < 2):
        return []
    return windows


def _annealed(totals: list[float]) -> bool:
    """Return whether sums only fall or only rise, as the weight of a loss does that follows a schedule."""
    falls = all(later <= early * 1.001 for early, later in pairwise(totals))
    rises = all(later >= early * 0.999 for early, later in pairwise(totals))
    return len(totals) > 2 and (falls or rises)


# --- what has to be meant ---------------------------------------------------------------------


def conditions(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say what has to be meant for a healthy loop to be so."""
    yield _constant_sum(analysis) or _meant_sums(analysis)
    yield _other_weights(analysis)
    yield _meant_uneven(analysis)


def _constant_sum(analysis: LedgerAnalysis) -> str:
    """Name the sum to which the shares of every window add up, where no loss of a step has 1, nor all together."""
    for parts in analysis.objectives.values():
        several = [part for part in parts if part.many > 1]
        sums = [_sums_of_step(analysis, part) for part in several]
        if len(several) < 2 or not all(part.even for part in several):
            continue
        if separate_tasks(analysis, several[0]):
            continue
        total = several[0].total
        constant = all(is_close(part.total, total) for part in several)
        odd = not any(is_close(one, 1.0) for of_step in sums for one in of_step)
        if (
            constant
            and odd
            and all(1.001 * total >= max(of_step[1:]) for of_step in sums)
        ):
            return f"a sum of {total:.3g} is meant in every step"
    return ""


def _meant_sums(analysis: LedgerAnalysis) -> str:
    """Name the sums to which the shares of windows of one loss add up, where they differ."""
    several_ranks = number(analysis.ledger.meta.get("ranks")) > 1
    for parts in analysis.objectives.values():
        judged = [p for p in parts if p.judged and analysis.alone(p) and not p.erased]
        sums = [_window_sum([part]) for part in judged]
        if not _differ(sums):
            continue
        each = [weight for one in sums for weight in one.each]
        # Where elements weigh alike, sums may be of several lengths; over several ranks they are whole together.
        alike = is_close(min(each), max(each)) or several_ranks
        if judged[0].mean or not alike:
            totals = [part.total for part in judged]
            return (
                f"sums of shares from {min(totals):.3g} to {max(totals):.3g} are meant"
            )
    return ""


def _sums_of_step(analysis: LedgerAnalysis, part: WindowShare) -> list[float]:
    """Return the sum of a step's shares, and the sum of each loss."""
    totals = [other.total for other in analysis.in_same_step(part)]
    return [sum(totals), *totals]


def _other_weights(analysis: LedgerAnalysis) -> str:
    """Name the weight of a loss that is not divided where another one of its backward is."""
    for parts in analysis.objectives.values():
        part = next((part for part in parts if part.many > 1), None)
        if part is None or not part.equal or _is_divided(analysis, part):
            continue
        others = [
            o for o in analysis.in_same_step(part) if o.backwards == part.backwards
        ]
        together = is_close(sum(other.total for other in others), 1.0)
        if together or not any(_is_divided(analysis, other) for other in others):
            continue
        weight = part.total if part.mean else sum(part.each)
        name = analysis.shares.objectives[part.objective]
        return f"a weight of {weight:.3g} in every step is meant for {name}"
    return ""


def _is_divided(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    if is_close(share.total, 1.0) or _divided(analysis, share):
        return True
    return bool(is_close(share.by_hand[0] * share.many, 1.0))


def _meant_uneven(analysis: LedgerAnalysis) -> str:
    """Name how differently equal micro-batches weigh, where a weight or a `.grad` that fades may be meant."""
    for parts in analysis.objectives.values():
        for part in parts:
            alike = part.many < 2 or not part.judged or len(set(part.sizes)) > 1
            if not alike and not is_close(min(part.each), max(part.each)):
                low, high = part.least, max(part.weights)
                return (
                    f"micro-batches that weigh from {low:.3g} to {high:.3g} are meant"
                )
    return ""
