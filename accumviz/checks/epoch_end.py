"""Rules about the end of an epoch: a last window that is thrown away, carried over, or divided by too much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from accumviz.checks.analysis import (
    LedgerAnalysis,
    OptimizerHistory,
    WindowShare,
    counted,
    is_close,
)
from accumviz.checks.distributed import waits_for_average
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import divided_by_another
from accumviz.checks.windows import Loss, lost_before_steps

# A loss that was left out, because it was not finite, has left no trace.
_FIRST = " It is the first one: the loop's counter begins too late, or a micro-batch was left out."
# A step after the loop would read what each rank has by itself.
_UNAVERAGED = (
    " What was left is not averaged over the ranks: the last micro-batch of an epoch "
    "has to synchronise, and step."
)
_OWN_LENGTH = "micro_batches_in_this_window"


def tail_dropped(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find micro-batches at the end of a loader that no step ever consumed."""
    for optimizer in analysis.optimizers:
        if optimizer.usual < 2 or not optimizer.steps.size:
            continue
        dropped = _thrown_away(analysis, optimizer)
        by_epochs = analysis.has_loaders or _at_even_distances(optimizer, dropped)
        left = _left_at_the_end(analysis, optimizer)
        dropped += [left] if left else []
        # What is thrown away now and then is thrown away on purpose.
        if not dropped or not by_epochs:
            continue
        lost = dropped[0]
        source = "loader" if analysis.has_loaders else "loop"
        local = waits_for_average(analysis, lost[-1])
        advice = " Step once more after it, and divide by their own number."
        yield analysis.finding(
            "tail-dropped",
            "warning",
            lost[0],
            evidence={
                "backwards": lost,
                "usual window": optimizer.usual,
                "lost in all": sum(map(len, dropped)),
            },
            cause=(
                f"The {source} ended after {len(lost)} of {optimizer.usual} micro-batches of a window, and what they "
                f"contributed was thrown away.{_UNAVERAGED if local else advice}"
            ),
            times=len(dropped),
            optimizer=optimizer.optimizer,
        )


def _thrown_away(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> list[list[int]]:
    """Return the backwards that were zeroed at each epoch's end, where they are fewer than a window's."""
    _, tails = lost_before_steps(analysis, optimizer)
    if analysis.has_loaders:
        tails = [loss for loss in tails if _at_loader_end(analysis, optimizer, loss)]
    groups: dict[int, list[int]] = {}
    for loss in tails:
        groups.setdefault(loss.eraser, []).append(loss.backward)
    return [lost for lost in groups.values() if len(lost) < optimizer.usual]


def _at_loader_end(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, loss: Loss
) -> bool:
    return analysis.ended(analysis.epoch(loss.backward, optimizer.rank))


def _at_even_distances(optimizer: OptimizerHistory, tails: list[list[int]]) -> bool:
    """Whether these are alike and as far from each other as epochs' ends: what is thrown away on purpose is not."""
    if not tails:
        return True
    places = [optimizer.backwards.searchsorted(lost[-1]) + 1 for lost in tails]
    gaps = np.diff([0, *places, optimizer.backwards.size]).tolist()
    *epochs, last = gaps
    if len({*map(len, tails)}) > 1 or len({*epochs}) > 1:
        return False
    return bool(last == epochs[0] or (len(tails) > 1 and last < epochs[0]))


def _left_at_the_end(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> list[int]:
    """Return the backwards that are live when everything is over, where a loader or the script has ended."""
    steps = analysis.ledger.outcomes.steps
    read = np.unique(optimizer.read)
    last_read = optimizer.read_step.max(initial=-1)
    after = optimizer.backwards[optimizer.backwards > last_read]
    after = after[~steps[np.ix_(after, optimizer.columns)].any(axis=1)].tolist()
    # A loss that others' parameters learn from is theirs, where this optimizer has losses of its own.
    alone = read[~np.delete(steps[read], optimizer.columns, axis=1).any(axis=1)]
    sites = set(analysis.sites[alone if alone.size else read].tolist())
    unused = [
        b
        for b in after
        if analysis.sites[b] in sites and b not in optimizer.lost and analysis.finite(b)
    ]
    if not unused or optimizer.skipped[optimizer.skipped > unused[-1]].size:
        return []
    at_end = analysis.ended(analysis.epoch(unused[-1], optimizer.rank))
    return unused if at_end or analysis.ran_to_its_end else []


def partial_window_underscaled(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find short windows whose losses were divided by the length of a long one."""
    for shares in analysis.objectives.values():
        whole = whole_window(shares)
        if whole is None:
            continue
        weak = [share for share in shares if _is_weak(analysis, share, whole)]
        if not weak:
            continue
        first = weak[0].order == 0 and (len(weak) == 1 or weak[1].order > 1)
        share = weak[0] if first or weak[0].order else weak[1]
        many = analysis.micro_batches(share)
        if analysis.micro_batches(whole) != whole.many:
            many = share.many
        backward = analysis.ledger[share.backwards[0]]
        # A library that calls backward has divided; in the first window it is not the division that is wrong.
        suggested = not backward.via and not first
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
            cause=(
                f"The window holds {counted(many, 'micro-batch')}, and each was divided by {whole.many}: its step "
                f"reads {share.least * many:.3g} of the mean gradient.{_FIRST if first else ''}"
            ),
            suggestion=divided_by_another(backward, whole.many, _OWN_LENGTH)
            if suggested
            else "",
            times=len(weak),
        )


def _is_weak(analysis: LedgerAnalysis, share: WindowShare, whole: WindowShare) -> bool:
    """Whether a window is shorter than a whole one, and was divided by as much."""
    if share.order == 0 and not _seen_from_its_beginning(analysis, share):
        return False
    shorter = analysis.micro_batches(share) < analysis.micro_batches(whole)
    fewer = share.many < whole.many and shorter
    return (
        fewer and share.even and not share.lost and is_close(share.least, whole.least)
    )


def _seen_from_its_beginning(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Whether a loader began before a first window, and nothing was in `.grad` then."""
    first = share.backwards[0]
    columns = np.flatnonzero(analysis.contributed[first])
    ledger = analysis.ledger
    grad, added = ledger.grad[first, columns], ledger.contribution[first, columns]
    nothing_else = bool(is_close(grad, added).all())
    return nothing_else and any(begins < first for begins, _ in analysis.epochs)


def outgrown(
    analysis: LedgerAnalysis, shares: Sequence[WindowShare]
) -> Iterator[Finding]:
    """Find windows that are longer from some step on, and are divided by the length of those before it."""
    several = [share for share in shares if share.many > 1]
    whole = whole_window(shares)
    if whole is None:
        return
    longer = [share.many > whole.many for share in several]
    since = longer.index(True) if True in longer else 0
    long = several[since:]
    if since < 2 or len(long) < 2 or not all(longer[since:]):
        return
    if not all(_too_long(analysis, share, whole) for share in long):
        return
    share = long[0]
    backward = analysis.ledger[share.backwards[0]]
    yield analysis.finding_of(
        "wrong-divisor",
        "warning",
        share,
        evidence={
            "micro-batches": share.many,
            "divided by": whole.many,
            "sum of shares": share.total,
        },
        cause=(
            f"The windows grow from {whole.many} micro-batches to {share.many}, and each loss is still divided by "
            f"{whole.many}: the shares of a window add up to {share.total:.3g}."
        ),
        suggestion=divided_by_another(backward, whole.many, _OWN_LENGTH),
        times=len(long),
    )


def _too_long(analysis: LedgerAnalysis, share: WindowShare, whole: WindowShare) -> bool:
    """Whether a window is divided by as much as a shorter one, and no epoch began in it."""
    more = analysis.micro_batches(share) > analysis.micro_batches(whole)
    alike = share.even and is_close(share.least, whole.least)
    return more and alike and not analysis.carried(share)


def leftover_carried(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find what one epoch left over, consumed by the first step of the next one on top of its own."""
    for shares in analysis.objectives.values():
        whole = whole_window(shares) or _alike_inside_epochs(analysis, shares)
        over = [
            (share, whole.many)
            for share in shares
            if whole is not None and _too_much(analysis, share, whole, shares)
        ]
        over = over or on_top(analysis, shares)
        if not over:
            continue
        share, many = over[0]
        carried = analysis.carried(share) or share.many - many
        local = waits_for_average(analysis, share.backwards[carried - 1])
        advice = " Step once more at the end of each epoch."
        yield analysis.finding_of(
            "leftover-carried",
            "error",
            share,
            evidence={
                "micro-batches": share.many,
                "in a whole window": many,
                "carried": carried,
                "sum of shares": share.total,
            },
            cause=(
                f"{counted(carried, 'micro-batch')} of the epoch before had no step: the first step of the next one "
                f"reads {share.total:.3g} times a mean gradient.{_UNAVERAGED if local else advice}"
            ),
            times=len(over),
        )


def whole_window(shares: Sequence[WindowShare]) -> WindowShare | None:
    """Return a window that is complete: several equal shares that add up to 1."""
    for share in shares:
        if share.many > 1 and share.even and is_close(share.total, 1.0):
            return share
    return None


def _too_much(
    analysis: LedgerAnalysis,
    share: WindowShare,
    whole: WindowShare,
    shares: Sequence[WindowShare],
) -> bool:
    """Whether a window has more micro-batches than a whole one, and an epoch began inside it."""
    more = share.even and share.many > whole.many
    if not more or not is_close(share.least, whole.least):
        return False
    return _crosses(analysis, share, whole.many, shares)


def on_top(
    analysis: LedgerAnalysis, shares: Sequence[WindowShare]
) -> list[tuple[WindowShare, int]]:
    """Return the windows that end in a whole one, where all others are whole, and how many that one has.

    Each may have a divisor of its own, such as its number of tokens: what tells a whole one is that it adds up to 1.
    """
    several = [share for share in shares if share.many > 1]
    if not all(s.read and not s.again and s.least > 0 for s in several):
        return []
    whole = sorted({s.many for s in several if is_close(s.total, 1.0)})
    rest = [share for share in several if not is_close(share.total, 1.0)]
    pairs = [(share, _whole_at_its_end(share, whole)) for share in rest]
    # The last may have been cut short by the recording's end.
    if any(not many and share is not shares[-1] for share, many in pairs):
        return []
    return [
        (share, many)
        for share, many in pairs
        if many and _crosses(analysis, share, many, shares)
    ]


def _whole_at_its_end(share: WindowShare, lengths: Sequence[int]) -> int:
    """Return how many of the last micro-batches of a window are a whole one; 0 where none are."""
    for many in lengths:
        if many < share.many and is_close(sum(share.weights[-many:]), 1.0):
            return many
    return 0


def _alike_inside_epochs(
    analysis: LedgerAnalysis, shares: Sequence[WindowShare]
) -> WindowShare | None:
    """Return a window as all are that lie inside an epoch, where no shares add up to 1."""
    if not analysis.has_loaders:
        return None
    inside = [s for s in shares if s.many > 1 and s.even and not analysis.carried(s)]
    alike = len(inside) > 1 and len({share.many for share in inside}) == 1
    return inside[0] if alike else None


def _crosses(
    analysis: LedgerAnalysis,
    share: WindowShare,
    whole: int,
    shares: Sequence[WindowShare],
) -> bool:
    """Whether a loader began anew inside a window; where no loader was seen, its length says it.

    Before the first window there is no epoch; and all windows may be longer from some step on.
    """
    if analysis.has_loaders:
        return analysis.carried(share) > 0
    longer = [other.many > whole for other in shares if other.many > 1]
    changes = sum(a != b for a, b in pairwise(longer))
    since = longer.index(True)
    grown = since > 1 and changes == 1 and len(longer) > since + 1
    return share.order > 0 and share.many < 2 * whole and not grown
