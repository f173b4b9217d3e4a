"""Rules that look at several processes: who was synchronised, when, and with what weight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from accumviz.checks.evidence import Case, Loop, Part, near
from accumviz.checks.report import Finding
from accumviz.events import PRESENT


def _replicated(case: Case, loop: Loop) -> np.ndarray:
    """For each backward of the loop, whether DDP told of it whether a forward had armed the all-reduce."""
    found: np.ndarray = np.array([case.armed[b] is not None for b in loop.backwards.tolist()], bool)
    return found


def ddp_unsynced_step(case: Case) -> Iterator[Finding]:
    """A step that reads what no rank has shared with the others."""
    syncs = case.at("sync")
    for loop in case.loops:
        if not _replicated(case, loop).any():
            continue
        mine = np.array([e for e in syncs.tolist() if loop.changed_by(e)], int)
        late: list[tuple[int, int, list[int]]] = []
        synced = 0
        for step, backwards in loop.windows.items():
            if not backwards:
                continue
            done = mine[mine < step]
            # Its row comes after the backward that it ran in.
            unshared = [b for b in backwards if not done.size or b > done[-1]]
            # Averaged too early, within the very window, is averaging that was meant.
            synced += not unshared or bool((done > backwards[0]).any())
            # The flag was up when backward ran, and down when its forward did.
            meant = case.armed[backwards[-1]] is False and case.no_sync[backwards[-1]] is False
            if unshared and case.armed[backwards[-1]] is not None:
                late.append((step, int(meant), unshared))
        # A loop that never shares gradients, and never meant to, averages weights (LocalSGD).
        late = [one for one in late if one[1] or synced]
        late = [one for one in late if _differ(case, loop, one[0])]
        if not late:
            continue
        step, flag_late, unshared = late[0]
        b = unshared[-1]
        yield case.finding(
            "ddp-unsynced-step",
            "error",
            b,
            step=step,
            evidence={
                "backwards not averaged": unshared,
                "armed by its forward": bool(case.armed[b]),
                "flag at its backward": not case.no_sync[b],
                "line of the forward": case.ledger[b].details.get("armed_line", 0),
            },
            cause=(
                "The step reads gradients that were not averaged over the ranks: "
                + (
                    "the flag was set after the forward, which is what arms the all-reduce."
                    if flag_late
                    else "the last backward before it ran without synchronisation."
                )
            ),
            times=len(late),
            optimizer=loop.optimizer,
        )


def _differ(case: Case, loop: Loop, step: int) -> bool:
    """Whether the ranks' gradients differ at their steps of the same number; True where only one rank is known."""
    others = [one for one in case.loops if one.rank != loop.rank and one.columns.size == loop.columns.size]
    if not others:
        return True
    order = int(loop.steps.searchsorted(step))
    own = case.ledger.grad[step, loop.columns]
    there = [one for one in others if order < one.steps.size]
    return not there or any(
        not np.allclose(own, case.ledger.grad[int(one.steps[order]), one.columns], rtol=1e-5, equal_nan=True)
        for one in there
    )


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


def uneven_rank_backwards(case: Case) -> Iterator[Finding]:
    """Ranks that synchronise a different number of times, so that one waits for ever."""
    if not case.ledger.meta.get("merged"):
        return
    counts: dict[int, list[int]] = {}
    for b in np.flatnonzero(case.backward).tolist():
        if case.armed[b] is not None:
            counts.setdefault(int(case.ranks[b]), []).extend([b] if case.armed[b] else [])
    if len(counts) < 2 or len({len(found) for found in counts.values()}) == 1:
        return
    most = max(counts, key=lambda rank: len(counts[rank]))
    least = min(counts, key=lambda rank: len(counts[rank]))
    extra = counts[most][len(counts[least])]
    yield case.finding(
        "uneven-rank-backwards",
        "error",
        extra,
        evidence={f"synchronised backwards of rank {rank}": len(found) for rank, found in sorted(counts.items())},
        cause=(
            f"Rank {most} synchronises {len(counts[most])} backwards and rank {least} only {len(counts[least])}: the "
            "one more waits for nobody."
        ),
    )


def rank_token_weight(case: Case) -> Iterator[Finding]:
    """Ranks whose elements weigh differently, because each divides by its own count."""
    if not case.ledger.meta.get("merged"):
        return
    place: dict[int, int] = {}
    ranks: dict[int, int | None] = {}
    for loop in case.loops:
        ranks[loop.optimizer] = loop.rank
        place[loop.optimizer] = sum(rank == loop.rank for rank in ranks.values())
    groups: dict[tuple[int, int, int], list[Part]] = {}
    for part in case.parts:
        if part.known and part.many and part.optimizer in place:
            groups.setdefault((place[part.optimizer], part.order, part.objective), []).append(part)
    several = [parts for parts in groups.values() if len(parts) > 1]
    found = []
    for parts in several:
        even = all(p.each[0] > 0 and near(*p.each) for p in parts)
        low, high = min(p.each[0] for p in parts), max(p.each[1] for p in parts)
        if even and not near(low, high, 1e-2) and len({p.elements for p in parts}) > 1:
            found.append((parts, low, high))
    if not found:
        return
    parts, low, high = found[0]
    yield case.finding(
        "rank-token-weight",
        "warning" if 2 * len(found) >= len(several) else "note",
        parts[0].backwards[0],
        step=parts[0].step,
        evidence={
            "weight per element on each rank": [p.each[0] for p in parts],
            "elements on each rank": [p.elements[0] for p in parts],
        },
        cause=(
            f"Each rank divides by its own count, and the average over ranks treats them alike: an element of one "
            f"rank counts {high / low:.3g} times as much as one of another."
        ),
        times=len(found),
    )
