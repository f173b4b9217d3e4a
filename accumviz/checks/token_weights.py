"""A rule about losses with different numbers of elements: what one element weighs in the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from accumviz.checks.analysis import LedgerAnalysis, WindowShare, is_close
from accumviz.checks.divisors import name_of
from accumviz.checks.epoch_end import on_top
from accumviz.checks.report import Finding

# The most that is misplaced where no element counts more than twice as much as another: with √2 times as many of one.
_MUCH = 3 - 2 * math.sqrt(2)


def token_mean_of_means(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find means over unequal numbers of elements, averaged as if they were equal."""
    for shares in analysis.objectives.values():
        unequal = _unequal(analysis, shares)
        if not unequal:
            continue
        # Only the last micro-batch of a window may have been smaller.
        inside = [share for share in unequal if not _only_the_last_is_smaller(share)]
        worst = max(inside or unequal, key=_ratio)
        smallest = min(worst.sizes)
        event = worst.backwards[worst.sizes.index(max(worst.sizes))]
        weighted = any(t.get("class_weights") for t in analysis.ledger[event].terms)
        clipped = bool((analysis.shares.of(worst.step).clipped < 1).any())
        misplaced = _misplaced(worst)
        severity = "error" if misplaced > _MUCH else "warning"
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
            cause=_cause(worst, smallest, last_only=not inside, weighted=weighted),
            times=len(inside or unequal),
        )


def _cause(
    worst: WindowShare, smallest: float, *, last_only: bool, weighted: bool
) -> str:
    cause = (
        f"Each loss is a mean over its own elements, and these are from {smallest:g} to {max(worst.sizes):g}: "
        f"an element of the smallest counts {_ratio(worst):.3g} times as much as one of the largest."
    )
    if last_only:
        return f"{cause} Only the last micro-batch of a window was smaller."
    if weighted:
        return f"{cause} They are counted with the weights of their classes."
    return f"{cause} Add up sums, and divide by the number of elements in the window."


def _unequal(
    analysis: LedgerAnalysis, shares: Sequence[WindowShare]
) -> list[WindowShare]:
    """Return the windows in which elements weigh differently, because there are more of them in some losses."""
    unequal = [
        share
        for share in shares
        if share.many > 1
        and share.known
        and min(share.each) > 0
        and 0 < min(share.sizes) < max(share.sizes)
        and not is_close(min(share.each), max(share.each))
        and _are_means(share)
        # What an epoch left over may be a smaller batch: that is another mistake.
        and not analysis.carried(share)
    ]
    carried = {share.step for share, _ in on_top(analysis, shares)} if unequal else ()
    return [share for share in unequal if share.step not in carried]


def _ratio(share: WindowShare) -> float:
    return max(share.each) / min(share.each)


def _misplaced(share: WindowShare) -> float:
    """Return how much of a step's weight lies on other elements than in one large batch."""
    many = sum(share.sizes)
    pairs = zip(share.weights, share.sizes, strict=True)
    return sum(abs(w / share.total - n / many) for w, n in pairs) / 2


def _are_means(share: WindowShare) -> bool:
    """Whether these are means, or sums that are each divided by their own number of elements."""
    even = is_close(share.least, share.most)
    return share.mean or bool(even and all(float(n).is_integer() for n in share.sizes))


def _only_the_last_is_smaller(share: WindowShare) -> bool:
    *others, last = share.sizes
    even = bool(is_close(share.least, share.most))
    return len(set(others)) == 1 and last < others[0] and even
