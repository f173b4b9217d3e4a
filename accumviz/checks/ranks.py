"""Rules that look at what a process of several does: what it shares when, and what it keeps for itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from accumviz.checks.cures import replaced
from accumviz.checks.evidence import Case, near, reduces
from accumviz.checks.report import Finding
from accumviz.events import PRESENT
from accumviz.gains import SAME, number


def no_sync_excludes_forward(case: Case) -> Iterator[Finding]:
    """A `no_sync` around the backward alone, which synchronises all the same."""
    for loop in case.loops:
        found = [b for b in loop.backwards.tolist() if case.armed[b] is True and case.no_sync[b] is True]
        if not found:
            continue
        b = found[0]
        quiet = sum(case.no_sync[b] is True for b in loop.backwards.tolist())
        yield case.finding(
            "no-sync-excludes-forward",
            "warning",
            b,
            evidence={
                "backwards in no_sync": quiet,
                "of which synchronised": len(found),
                "line of the forward": case.ledger[b].details.get("armed_line", 0),
            },
            cause=(
                "The forward ran outside `no_sync` and armed the all-reduce, so that each micro-batch is synchronised: "
                "right, but as slow as without `no_sync`."
                if len(found) == quiet
                else "A forward outside `no_sync` armed the all-reduce, and no backward had spent that: this one is "
                "synchronised in `no_sync`. A forward that has no backward belongs in `torch.no_grad`."
            ),
            times=len(found),
            optimizer=loop.optimizer,
        )


def ddp_static_graph_no_sync(case: Case) -> Iterator[Finding]:
    """A backward in `no_sync` that DDP's reducer refuses, which has been told that the graph never changes."""
    errors = case.events.detail("error", None)
    for b in np.flatnonzero(case.backward & (errors != None)).tolist():  # noqa: E711 - element by element
        if case.no_sync[b] is not True or "expect_autograd_hooks_" not in str(errors[b]):
            continue
        yield case.finding(
            "ddp-static-graph-no-sync",
            "error",
            b,
            evidence={
                "the backward that failed": b,
                "line of the forward": case.ledger[b].details.get("armed_line", 0),
            },
            cause=(
                "DDP with `static_graph=True` counts the backwards that it has synchronised, and one in `no_sync` is "
                "none: its reducer stops the script. `static_graph=False` accumulates."
            ),
        )
        return


def fsdp1_local_clip(case: Case) -> Iterator[Finding]:
    """A clip by the norm of what one rank holds, where each has a part of the gradient."""
    ledger = case.ledger
    columns = {p.name: i for i, p in enumerate(ledger.parameters)}
    for loop in case.loops:
        sharded = {ledger.parameters[p].unsharded_of for p in _wholes(case)}
        mine = [columns[name] for name in sharded if columns.get(name) in loop.columns.tolist()]
        found: list[tuple[int, float]] = []
        for clip in case.at("clip").tolist() if mine else ():
            details = ledger[clip].details
            told = number(details.get("total_norm"))
            if clip == 0 or details.get("by") == "value" or reduces(case, loop, clip) > 1 - SAME:
                continue
            there = [p for p in loop.columns.tolist() if not ledger.parameters[p].unsharded_of]
            own = float(np.sqrt(np.nansum(ledger.grad[clip - 1, there].astype(float) ** 2)))
            # A norm over all ranks is larger than what any of them has.
            if own > 0 and near(told, own) and _shared(case, clip, mine):
                found.append((clip, told))
        if len(found) < 2:
            continue
        clip, told = found[0]
        after = loop.steps[loop.steps > clip]
        event = ledger[clip]
        own_call = re.search(r"clip_grad_norm_\(\s*([\w.]+)\.parameters\(\)\s*,\s*(.*)$", event.source)
        name = re.match(r"[\w.]*clip_grad_norm_", event.source)
        yield case.finding(
            "fsdp1-local-clip",
            "error",
            clip,
            step=int(after[0]) if after.size else None,
            evidence={"norm that it clipped by": told, "norm of this rank's shards": told, "clips": len(found)},
            cause=(
                "The clip saw this rank's shards only: each rank has a norm of its own, and shortens its part of the "
                "gradient by another factor."
            ),
            cure=(replaced(event, f"{own_call[1]}.clip_grad_norm_({own_call[2]}") if own_call and name else ""),
            times=len(found),
            optimizer=loop.optimizer,
        )


def _shared(case: Case, clip: int, shards: list[int]) -> bool:
    """Whether other ranks hold parts of these, so that their gradients were scattered to several."""
    ranks = {number(case.ledger[e].details.get("ranks")) for e in case.at("sync").tolist() if e < clip}
    sizes = {p.unsharded_of: p.numel for p in case.ledger.parameters if p.unsharded_of}
    held = sum(case.ledger.parameters[p].numel for p in shards)
    return max(ranks, default=1.0) > 1 and held < sum(sizes.values())


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


def alone(case: Case) -> bool:
    """Whether there is one rank: what averages over all of them changes nothing."""
    return case.ledger.meta.get("ranks") == 1


def of_one_rank(case: Case, backward: int) -> bool:
    """Whether what this backward left waits for its average over the ranks: a step on it would be one rank's own."""
    # FSDP keeps it elsewhere, on one rank, too.
    return unshared(case, backward) and not (alone(case) and case.armed[backward] is not None)


def unshared(case: Case, backward: int) -> bool:
    """Whether this backward ran without the collectives that others have."""
    wholes = [p for p in _wholes(case) if case.contributed[backward, p]]
    if not wholes:
        return case.armed[backward] is False
    inside = _inside(case, backward)
    kept = any(case.ledger.state[inside[-1], p] & PRESENT for p in wholes)
    return kept or _between_groups(case, inside)


def _inside(case: Case, backward: int) -> list[int]:
    """A backward and what ran in it on its rank."""
    later = np.flatnonzero(np.isin(case.ranks[backward + 1 :], (-1, case.ranks[backward]))) + backward + 1
    others = ~case.events.where("within", "backward")[later]
    return [backward, *later[: int(others.argmax()) if others.any() else None].tolist()]


def _between_groups(case: Case, inside: list[int]) -> bool:
    """Whether FSDP averages over groups of ranks in other backwards, and in this one only over those of a group."""
    averaged = case.events.where("within", "backward") & (case.events.detail("op", None) == "all-reduce")
    return bool(averaged.any() and not averaged[inside].any())


def _is_added_to(case: Case, zero: int, p: int) -> bool:
    """Whether what is there after this zeroing is still there at the next contribution.

    FSDP1 with `use_orig_params` erases its sum in the forward that follows.
    """
    after = np.flatnonzero(case.contributed[zero:, p] & case.backward[zero:])
    return len(after) > 0 and bool((case.ledger.state[zero : zero + after[0], p] & PRESENT).all())


def fsdp2_zero_keeps_unsharded(case: Case) -> Iterator[Finding]:
    """A zeroing that does not reach the sum that FSDP2 keeps elsewhere."""
    wholes = _wholes(case)
    found = []
    for zero in case.at("zero_grad").tolist() if wholes else ():
        event = case.ledger[zero]
        mine = [p for p in wholes if event.rank in (None, case.ledger.parameters[p].rank)]
        stay = [p for p in mine if zero and case.ledger.state[zero - 1, p] & PRESENT and _is_added_to(case, zero, p)]
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
            "`zero_grad` does not reach the whole gradients: what the backwards without sync have added to them stays, "
            "and enters the next window."
        ),
        times=len(found),
    )
