"""Rules about what losses are divided by: nothing, a count twice, or the wrong count.

A sum that is divided by its own length is a mean, and judged as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from accumviz.checks.analysis import (
    LedgerAnalysis,
    WindowShare,
    is_close,
    modal_length,
    uncancelled,
)
from accumviz.checks.epoch_end import outgrown
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import divided, divided_by_another
from accumviz.ledger.flow import number


def loss_not_divided(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find mean losses that are added up at their full weight."""
    for shares in analysis.objectives.values():
        several = [share for share in shares if share.many > 1]
        if _summed_over_ranks(analysis, shares):
            yield _ranks_not_divided(analysis, shares)
            continue
        undivided = all(_is_undivided(analysis, share) for share in several)
        if several and undivided and not separate_tasks(analysis, several[0]):
            yield _undivided(analysis, several)


def _undivided(
    analysis: LedgerAnalysis,
    several: list[WindowShare],
) -> Finding:
    # Where micro-batches draw one of several losses, all of them are a window's.
    lengths = [analysis.micro_batches(share) for share in several]
    if len(set(lengths)) >= len({share.many for share in several}):
        lengths = [_losses_of_a_kind(analysis, share) for share in several]
    many = modal_length(lengths)
    share = several[lengths.index(many)]
    weight = _mixture(analysis, share)
    # What an epoch cuts short stands alone; what has neighbours of its length was meant to be so long.
    varied = len({one for one, other in pairwise(lengths) if one == other}) > 1
    by = "micro_batches_in_this_window" if varied else str(many)
    grown = f" Windows hold from {min(lengths)} to {max(lengths)}, each its own number."
    backward = analysis.ledger[share.backwards[0]]
    # One of several losses of a line may not be divided alone.
    whole_line = all(
        is_close(other.least, share.least) or len(weight) > 1
        for other in analysis.in_same_step(share)
        if share.backwards[0] in other.backwards
    )
    what = "mean losses" if len(weight) == 1 else "mixtures of losses"
    return analysis.finding_of(
        "loss-not-divided",
        "warning",
        share,
        evidence={
            **name_of(analysis, share),
            "micro-batches": many,
            "sum of shares": many * sum(weight),
            "a share": weight if len(weight) > 1 else weight[0],
        },
        cause=(
            f"{many} {what} are added up without a division: the step reads {many} times the gradient of one large "
            f"batch.{grown if varied else ''}"
        ),
        suggestion=divided(backward, by) if whole_line else "",
        times=len(several),
    )


def name_of(analysis: LedgerAnalysis, share: WindowShare) -> dict[str, str]:
    """Return which of several losses of one backward it is."""
    if len(analysis.ledger[share.backwards[0]].terms) < 2:
        return {}
    return {"the loss": analysis.shares.objectives[share.objective]}


def _losses_of_a_kind(analysis: LedgerAnalysis, share: WindowShare) -> int:
    """Count the losses of a step that are the same: some lines may synchronise, and others of the window not.

    Where two lines have as many each, they are two losses of every micro-batch.
    """
    mine = set(share.backwards)
    event = analysis.ledger[share.backwards[0]]
    kind = event.label, [term.get("op") for term in event.terms]
    many = share.many
    for other in analysis.in_same_step(share):
        if mine & set(other.backwards) or other.many == share.many:
            continue
        its = analysis.ledger[other.backwards[0]]
        alike = kind == (its.label, [term.get("op") for term in its.terms])
        many += other.many if alike and _is_undivided(analysis, other) else 0
    return many


def _is_undivided(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Whether each loss, or each mixture of losses of one backward, has its full weight."""
    if not share.known or share.again or not is_close(share.least, share.most):
        return False
    # A sum over one element is no mean, and a choice.
    a_mean = share.mean or all(n > 1 and float(n).is_integer() for n in share.sizes)
    return a_mean and bool(_mixture(analysis, share))


def _mixture(analysis: LedgerAnalysis, share: WindowShare) -> list[float]:
    """Return the weights of the losses of each backward, if they add up to 1: α of one, 1 - α of the other."""
    if is_close(share.least, 1.0):
        return [share.least]
    parts = [
        other
        for other in analysis.in_same_step(share)
        if other.backwards == share.backwards
    ]
    weights = [part.least for part in parts]
    if len(parts) < 2 or parts[0].objective != share.objective:
        return []  # said once, of the first of them
    if not all(part.even for part in parts) or not is_close(sum(weights), 1.0):
        return []
    for part in parts:
        constants = analysis.constants(part)
        if not constants or any(is_close(c, 1 / share.many) for c in constants):
            return []
    return weights


def separate_tasks(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Whether each backward has parameters of its own: heads that are trained one after the other, and not parts."""
    reached = analysis.contributed[list(share.backwards)]
    alone = reached & (reached.sum(axis=0) == 1)
    return bool(alone.any(axis=1).all())


def _summed_over_ranks(
    analysis: LedgerAnalysis, shares: Sequence[WindowShare]
) -> float:
    """Return over how many ranks gradients are added up, and not averaged, in each window; 0 where they are not."""
    reductions = analysis.events.detail("reduction", None)
    by_hook = is_close(analysis.events.detail("by_comm_hook", np.nan), 1.0)
    by_fsdp = is_close(analysis.events.detail("divisor", np.nan), 1.0)
    if not ((reductions == "sum") | by_hook | by_fsdp).any():
        return 0.0
    ranks = 0.0
    for share in shares:
        rows = analysis.shares.of(share.step)
        mine = (rows.objective == share.objective) & ~rows.erased
        own, averaged = np.abs(rows.constant[mine]), rows.averaged[mine]
        ranks = 1 / float(averaged[-1])
        # What was added up over the ranks weighs as much more by hand.
        summed = is_close(rows.by_hand[mine], ranks).all()
        whole = is_close(float(own.sum()), 1.0) or is_close(own, 1.0).all()
        judged = share.read and share.mean and not share.again
        if not judged or ranks < 1.5 or not summed or not whole:
            return 0.0
    return ranks


def _ranks_not_divided(
    analysis: LedgerAnalysis, shares: Sequence[WindowShare]
) -> Finding:
    share, ranks = shares[0], round(_summed_over_ranks(analysis, shares))
    syncs = analysis.at("sync")
    before = syncs[syncs < share.step]
    return analysis.finding_of(
        "loss-not-divided",
        "warning",
        share,
        event=int(before[-1]),
        evidence={
            "ranks": ranks,
            "shares": list(share.weights),
            "sum of shares": share.total,
        },
        cause=(
            f"Gradients are added up over {ranks} ranks, and nothing is divided by that: the step reads "
            f"{share.total:.3g} times the gradient of one large batch."
        ),
        times=len(shares),
    )


def double_division(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find losses divided by the number of micro-batches twice, or `.grad` after each of them."""
    for shares in analysis.objectives.values():
        yield from _divided_in_turn(analysis, shares)
        several = [share for share in shares if share.many > 1]
        twice = [share for share in several if _divided_twice(analysis, share)]
        # Half a loss is a choice that people make; a sixteenth of one is not. Every whole window has to agree.
        if not twice or twice[0].many < 3:
            continue
        share = twice[0]
        if len(twice) < sum(other.many >= share.many for other in several):
            continue
        many = share.many
        yield analysis.finding_of(
            "double-division",
            "warning",
            share,
            evidence={
                "micro-batches": many,
                "a share": share.least,
                "sum of shares": share.total,
            },
            cause=(
                f"Each of {many} losses weighs 1/{many**2}: it was divided by {many} twice."
                if share.mean
                else f"The losses of a window are sums, divided by its number of elements, and by {many} as well: "
                f"their shares add up to 1/{many}."
            ),
            times=len(twice),
        )


def _divided_twice(analysis: LedgerAnalysis, share: WindowShare) -> bool:
    """Whether one over the square of the number of micro-batches is what a loss weighs."""
    many = share.many
    if not share.mean:
        # Divided by all elements of a window, they add up to 1; then by their number.
        even = share.judged and is_close(min(share.each), max(share.each))
        small = even and is_close(share.total * many, 1.0)
        return bool(small) and _divisions(analysis, share) > 0
    squared = share.even and is_close(share.least * many**2, 1.0)
    # A constant inside a mean may be a part of the loss, as its classes are.
    if not squared or "own" in analysis.term(share):
        return False
    if analysis.alone(share):
        return True
    together = sum(other.least for other in analysis.in_same_step(share))
    # As many losses as there are micro-batches have a mean of which each weighs as little.
    return not is_close(together * many, 1.0) and _divisions(analysis, share) > 1


def _divisions(analysis: LedgerAnalysis, share: WindowShare) -> int:
    """Count how often a loss was divided by the number of micro-batches."""
    constants = analysis.constants(share) or []
    return sum(bool(is_close(one, 1 / share.many)) for one in constants)


def _divided_in_turn(
    analysis: LedgerAnalysis, shares: Sequence[WindowShare]
) -> Iterator[Finding]:
    """Find `.grad` divided by hand after each backward, so that what came early is divided again and again."""
    ratios = analysis.fading(shares)
    by = round(ratios[0]) if ratios else 0
    if by < 2 or not all(is_close(ratio, float(by)) for ratio in ratios):
        return
    share = next(share for share in shares if share.many > 1)
    yield analysis.finding_of(
        "double-division",
        "error",
        share,
        evidence={
            "micro-batches": share.many,
            "shares": list(share.weights),
            "sum of shares": share.total,
        },
        cause=(
            f"`.grad` is divided by {by} after each backward, and with it all that is there already: the first "
            f"of {share.many} micro-batches weighs {share.weights[0]:.3g}, the last one {share.weights[-1]:.3g}."
        ),
        times=sum(share.many > 1 for share in shares),
    )


def wrong_divisor(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find losses divided by a whole number beside that of a window's micro-batches."""
    for shares in analysis.objectives.values():
        yield from outgrown(analysis, shares)
        even = [share for share in shares if share.many > 1 and share.even]
        many = modal_length(share.many for share in even)
        full = [share for share in even if share.many == many]
        if len(full) > 1 and 2 * len(full) >= len(shares):
            by = round(1 / full[0].least)
            if _divided_by_one_off(analysis, full, by):
                yield _one_off(analysis, full, by)


def _divided_by_one_off(
    analysis: LedgerAnalysis, full: Sequence[WindowShare], by: int
) -> bool:
    """Whether windows are divided by one more or less than they have micro-batches, and by nothing else.

    A weight that is meant is multiplied with mostly; what one divides by is a count.
    """
    if by < 3 or abs(by - full[0].many) != 1:
        return False
    return all(
        is_close(share.least * by, 1.0)
        and analysis.alone(share)
        and divisor(analysis, share) == by
        for share in full
    ) and not _counts_otherwise(analysis, full[0], by)


def _one_off(analysis: LedgerAnalysis, full: Sequence[WindowShare], by: int) -> Finding:
    share = full[0]
    late = "late" if by < share.many else "early"
    backward = analysis.ledger[share.backwards[0]]
    return analysis.finding_of(
        "wrong-divisor",
        "warning",
        share,
        evidence={
            "micro-batches": share.many,
            "divided by": by,
            "sum of shares": share.total,
        },
        cause=(
            f"Each window holds {share.many} micro-batches, and each of their losses is divided by {by}: the shares "
            f"add up to {share.total:.3g} in every step. Either that is the wrong number, or the loop steps one "
            f"micro-batch too {late}."
        ),
        suggestion=divided_by_another(backward, by, str(share.many)),
        times=len(full),
    )


def _counts_otherwise(analysis: LedgerAnalysis, share: WindowShare, by: int) -> bool:
    """Whether a number is that of another optimizer's windows, which steps at another pace, or of all ranks'."""
    paces = {s.many for s in analysis.window_shares if s.objective == share.objective}
    ranks = number(analysis.ledger.meta.get("ranks"))
    constants = analysis.constants(share) or []
    divided_as_well = any(is_close(c * share.many, 1.0) for c in constants)
    return by in paces or by == share.many * ranks or divided_as_well


def divisor(analysis: LedgerAnalysis, share: WindowShare) -> int:
    """Return the whole number by which a loss was divided, and by nothing else; or 0."""
    by = round(1 / share.least) if 0 < share.least < 1 else 0
    if not by or not is_close(share.least * by, 1.0):
        return 0
    term = analysis.term(share)
    # By hand: gradients are not multiplied by a weight.
    by_hand = is_close(abs(number(term.get("factor"))), 1.0)
    divided_by = number(term.get("divisor")) / undone(term)
    counted = by_hand or is_close(divided_by, float(by))
    return by if counted and "own" not in term else 0


def undone(term: Mapping[str, Any]) -> float:
    """Return what a loss was multiplied by, to undo a part of what it was divided by."""
    constants = term.get("constants")
    factors = [number(one) for one in constants] if isinstance(constants, list) else []
    left = uncancelled(factors)
    multiplied = math.prod(one for one in factors if one > 1)
    return multiplied / math.prod(one for one in left if one > 1)
