"""Rules about one process of several: which gradients it synchronises, and when."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from accumviz.checks.analysis import LedgerAnalysis
from accumviz.checks.report import Finding
from accumviz.ledger.events import PRESENT
from accumviz.ledger.flow import scatters


def no_sync_excludes_forward(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a `no_sync` around the backward alone, which synchronises all the same."""
    for optimizer in analysis.optimizers:
        quiet = [b for b in optimizer.backwards.tolist() if analysis.no_sync[b] is True]
        synced = [b for b in quiet if analysis.armed[b] is True]
        if not synced:
            continue
        cause = (
            "A forward outside `no_sync` armed the all-reduce, and no backward had spent that: this one is "
            "synchronised in `no_sync`. A forward that has no backward belongs in `torch.no_grad`."
        )
        if len(synced) == len(quiet):
            cause = (
                "The forward ran outside `no_sync` and armed the all-reduce, so that each micro-batch is "
                "synchronised: right, but as slow as without `no_sync`."
            )
        yield analysis.finding(
            "no-sync-excludes-forward",
            "warning",
            synced[0],
            evidence={
                "backwards in no_sync": len(quiet),
                "of which synchronised": len(synced),
                "line of the forward": analysis.detail(synced[0], "armed_line") or 0,
            },
            cause=cause,
            times=len(synced),
            optimizer=optimizer.optimizer,
        )


def _unsharded(analysis: LedgerAnalysis) -> list[int]:
    """Return the columns of the whole gradients that FSDP keeps until they are scattered."""
    parameters = enumerate(analysis.ledger.parameters)
    return [p for p, parameter in parameters if parameter.unsharded_of]


def waits_for_average(analysis: LedgerAnalysis, backward: int) -> bool:
    """Whether what a backward left is not averaged over the ranks yet: a step on it would be one rank's own."""
    whole = [p for p in _unsharded(analysis) if analysis.contributed[backward, p]]
    if whole:
        last = _last_inside(analysis, backward)
        return bool((analysis.ledger.state[last, whole] & PRESENT).any())
    return analysis.armed[backward] is False and not analysis.single


def _last_inside(analysis: LedgerAnalysis, backward: int) -> int:
    """Return the last event that ran inside a backward on its rank."""
    here = np.isin(analysis.ranks, (-1, analysis.ranks[backward]))
    later = np.flatnonzero(here)
    later = later[later > backward]
    inside = analysis.events.where("within", "backward")[later]
    stop = int(np.append(inside, False).argmin())
    return int(later[stop - 1]) if stop else backward


def fsdp2_zero_keeps_unsharded(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a zeroing that does not reach the sum that FSDP2 keeps elsewhere."""
    whole = _unsharded(analysis)
    kept = []
    for zero in analysis.at("zero_grad").tolist() if whole else ():
        stay = [p for p in whole if _stays(analysis, zero, p)]
        kept += [(zero, stay)] if stay else []
    if not kept:
        return
    zero, stay = kept[0]
    scattered = scatters(analysis.events).any()
    later = "and enters the next window." if scattered else "and no step reads it."
    yield analysis.finding(
        "fsdp2-zero-keeps-unsharded",
        "error",
        zero,
        evidence={
            "unsharded gradients that stayed": [
                analysis.ledger.parameters[p].name for p in stay[:4]
            ]
        },
        cause=(
            "`zero_grad` does not reach the whole gradients: what the backwards without sync have added to them "
            f"stays, {later}"
        ),
        times=len(kept),
    )


def _stays(analysis: LedgerAnalysis, zero: int, p: int) -> bool:
    """Whether a whole gradient is there before a zeroing, and still there at the next contribution.

    FSDP1 erases its sum in the forward that follows.
    """
    ledger = analysis.ledger
    if ledger[zero].rank not in (None, ledger.parameters[p].rank):
        return False
    if not zero or not ledger.state[zero - 1, p] & PRESENT:
        return False
    reached = analysis.contributed[zero:, p] & analysis.backward[zero:]
    after = np.flatnonzero(reached)
    if not after.size:
        return False
    until = zero + int(after[0])
    return bool((ledger.state[zero:until, p] & PRESENT).all())
