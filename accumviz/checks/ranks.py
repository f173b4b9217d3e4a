"""Rules that look at what a process of several does: what it shares when, and what it keeps for itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from accumviz.checks.evidence import Case
from accumviz.checks.report import Finding
from accumviz.events import PRESENT


def no_sync_excludes_forward(case: Case) -> Iterator[Finding]:
    """A `no_sync` around the backward alone, which synchronises all the same."""
    for loop in case.loops:
        found = [b for b in loop.backwards.tolist() if case.armed[b] is True and case.no_sync[b] is True]
        if not found:
            continue
        b = found[0]
        yield case.finding(
            "no-sync-excludes-forward",
            "warning",
            b,
            evidence={
                "backwards synchronised in no_sync": len(found),
                "line of the forward": case.ledger[b].details.get("armed_line", 0),
            },
            cause=(
                "The forward ran outside `no_sync` and armed the all-reduce, so that each micro-batch is synchronised: "
                "right, but as slow as without `no_sync`."
            ),
            times=len(found),
            optimizer=loop.optimizer,
        )


def fsdp_no_sync_memory(case: Case) -> Iterator[Finding]:
    """Whole gradients that are kept between micro-batches because nobody scatters them."""
    ledger = case.ledger
    kept: list[int] = []
    at = -1
    for p in _wholes(case):
        born = np.flatnonzero(case.contributed[:, p] & case.backward)
        there = (ledger.state[born[1:] - 1, p] & PRESENT).astype(bool)
        if there.any():
            kept.append(p)
            at = int(born[1:][there][0]) if at < 0 else at
    if not kept:
        return
    yield case.finding(
        "fsdp-no-sync-memory",
        "note",
        at,
        evidence={
            "unsharded gradients": len(kept),
            "elements": sum(ledger.parameters[p].numel for p in kept),
        },
        cause=(
            "Without synchronisation, FSDP keeps the whole gradients of all parameters between micro-batches, on every "
            "rank."
        ),
    )


def _wholes(case: Case) -> list[int]:
    return [p for p, parameter in enumerate(case.ledger.parameters) if parameter.unsharded_of]


def fsdp2_zero_keeps_unsharded(case: Case) -> Iterator[Finding]:
    """A zeroing that does not reach the sum that FSDP2 keeps elsewhere."""
    wholes = _wholes(case)
    found = []
    for zero in case.at("zero_grad").tolist() if wholes else ():
        event = case.ledger[zero]
        mine = [p for p in wholes if event.rank in (None, case.ledger.parameters[p].rank)]
        stay = [p for p in mine if zero and (case.ledger.state[zero, p] & case.ledger.state[zero - 1, p] & PRESENT)]
        if stay:
            found.append((zero, stay))
    if not found:
        return
    zero, stay = found[0]
    yield case.finding(
        "fsdp2-zero-keeps-unsharded",
        "error",
        zero,
        evidence={"unsharded gradients that stayed": [case.ledger.parameters[p].name for p in stay[:4]]},
        cause=(
            "`zero_grad` empties the shards; what `no_sync` has gathered in the whole gradients stays, and enters the "
            "next window."
        ),
        times=len(found),
    )
