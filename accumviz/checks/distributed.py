"""Rules that look at what a process of several does: what it shares when, and what it keeps for itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from accumviz.checks.analysis import Case, Loop, Part, near, reduces
from accumviz.checks.cures import replaced
from accumviz.checks.report import Finding
from accumviz.ledger.events import PRESENT
from accumviz.ledger.gains import SAME, number
from accumviz.ledger.lifecycle import brought, scatters, shards_of


def no_sync_excludes_forward(case: Case) -> Iterator[Finding]:
    """A `no_sync` around the backward alone, which synchronises all the same."""
    for loop in case.loops:
        found = [
            b
            for b in loop.backwards.tolist()
            if case.armed[b] is True and case.no_sync[b] is True
        ]
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
        if case.no_sync[b] is not True or "expect_autograd_hooks_" not in str(
            errors[b]
        ):
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
        mine = [
            columns[name]
            for name in sharded
            if columns.get(name) in loop.columns.tolist()
        ]
        found: list[tuple[int, float]] = []
        for clip in case.at("clip").tolist() if mine else ():
            details = ledger[clip].details
            told = number(details.get("total_norm"))
            if (
                clip == 0
                or details.get("by") == "value"
                or reduces(case, loop, clip) > 1 - SAME
            ):
                continue
            there = [
                p
                for p in loop.columns.tolist()
                if not ledger.parameters[p].unsharded_of
            ]
            own = float(
                np.sqrt(np.nansum(ledger.grad[clip - 1, there].astype(float) ** 2))
            )
            # A norm over all ranks is larger than what any of them has.
            if own > 0 and near(told, own) and _shared(case, clip, mine):
                found.append((clip, told))
        if len(found) < 2:
            continue
        clip, told = found[0]
        after = loop.steps[loop.steps > clip]
        event = ledger[clip]
        own_call = re.search(
            r"clip_grad_norm_\(\s*([\w.]+)\.parameters\(\)\s*,\s*(.*)$", event.source
        )
        name = re.match(r"[\w.]*clip_grad_norm_", event.source)
        yield case.finding(
            "fsdp1-local-clip",
            "error",
            clip,
            step=int(after[0]) if after.size else None,
            evidence={
                "norm that it clipped by": told,
                "norm of this rank's shards": told,
                "clips": len(found),
            },
            cause=(
                "The clip saw this rank's shards only: each rank has a norm of its own, and shortens its part of the "
                "gradient by another factor."
            ),
            cure=(
                replaced(event, f"{own_call[1]}.clip_grad_norm_({own_call[2]}")
                if own_call and name
                else ""
            ),
            times=len(found),
            optimizer=loop.optimizer,
        )


def _shared(case: Case, clip: int, shards: list[int]) -> bool:
    """Whether other ranks hold parts of these, so that their gradients were scattered to several."""
    ranks = {
        number(case.ledger[e].details.get("ranks"))
        for e in case.at("sync").tolist()
        if e < clip
    }
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
    return [
        p
        for p, parameter in enumerate(case.ledger.parameters)
        if parameter.unsharded_of
    ]


def summed_over_ranks(case: Case, parts: list[Part]) -> Iterator[Finding]:
    """Mean losses, whole or undivided on each rank, of which the gradients are added up over the ranks by hand."""
    by_hook = near(case.events.detail("by_comm_hook", np.nan), 1.0)
    by_fsdp = near(case.events.detail("divisor", np.nan), 1.0)
    sums = np.flatnonzero(
        (case.events.detail("reduction", None) == "sum") | by_hook | by_fsdp
    )
    if not sums.size or not all(p.read and p.mean and not p.again for p in parts):
        return
    turns = set()
    for part in parts:
        rows = case.shares.of(part.step)
        rows = rows.take((rows.objective == part.objective) & ~rows.erased)
        own, ranks = np.abs(rows.constant), 1 / float(rows.averaged[-1])
        times = rows.by_hand / np.append(rows.by_hand[1:], 1.0)
        once, again = (
            bool(near(times, np.append(np.full(part.many - 1, by), ranks)).all())
            for by in (1.0, ranks)
        )
        whole = near(float(own.sum()), 1.0) or near(own, 1.0).all()
        if ranks < 2 - SAME or not (once or again) or not whole:
            return
        turns.add(again and not once)
    part, in_turn = parts[0], turns == {True}
    before = sums[sums < part.step]
    yield case.of_part(
        "loss-not-divided",
        "error" if in_turn else "warning",
        part,
        event=int(before[-1]) if before.size else None,
        evidence={
            "ranks": round(ranks),
            "shares": list(part.weights),
            "sum of shares": part.total,
        },
        cause=(
            f"`.grad` is added up over {ranks:.0f} ranks after each backward, and with it all that is there already: "
            f"the first of {part.many} micro-batches weighs {part.weights[0]:.3g}, the last one {part.weights[-1]:.3g}."
            if in_turn
            else f"Gradients are added up over {ranks:.0f} ranks, and nothing is divided by that: the step reads "
            f"{part.total:.3g} times the gradient of one large batch."
        ),
        times=len(parts),
    )


def alone(case: Case) -> bool:
    """Whether there is one rank: what averages over all of them changes nothing."""
    return case.ledger.meta.get("ranks") == 1


def of_one_rank(case: Case, backward: int) -> bool:
    """Whether what this backward left waits for its average over the ranks: a step on it would be one rank's own."""
    # FSDP keeps it elsewhere, on one rank, too.
    return unshared(case, backward) and not (
        alone(case) and case.armed[backward] is not None
    )


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
    later = (
        np.flatnonzero(np.isin(case.ranks[backward + 1 :], (-1, case.ranks[backward])))
        + backward
        + 1
    )
    others = ~case.events.where("within", "backward")[later]
    return [backward, *later[: int(others.argmax()) if others.any() else None].tolist()]


def _between_groups(case: Case, inside: list[int]) -> bool:
    """Whether FSDP averages over groups of ranks in other backwards, and in this one only over those of a group."""
    averaged = case.events.where("within", "backward") & (
        case.events.detail("op", None) == "all-reduce"
    )
    return bool(averaged.any() and not averaged[inside].any())


def _is_added_to(case: Case, zero: int, p: int) -> bool:
    """Whether what is there after this zeroing is still there at the next contribution.

    FSDP1 with `use_orig_params` erases its sum in the forward that follows.
    """
    after = np.flatnonzero(case.contributed[zero:, p] & case.backward[zero:])
    return len(after) > 0 and bool(
        (case.ledger.state[zero : zero + after[0], p] & PRESENT).all()
    )


def fsdp2_zero_keeps_unsharded(case: Case) -> Iterator[Finding]:
    """A zeroing that does not reach the sum that FSDP2 keeps elsewhere."""
    for loop in case.loops:
        yield from _kept_for_other_groups(case, loop)
    wholes = _wholes(case)
    found = []
    for zero in case.at("zero_grad").tolist() if wholes else ():
        event = case.ledger[zero]
        mine = [
            p for p in wholes if event.rank in (None, case.ledger.parameters[p].rank)
        ]
        stay = [
            p
            for p in mine
            if zero
            and case.ledger.state[zero - 1, p] & PRESENT
            and _is_added_to(case, zero, p)
        ]
        if stay:
            found.append((zero, stay))
    if not found:
        return
    zero, stay = found[0]
    yield case.finding(
        "fsdp2-zero-keeps-unsharded",
        "error",
        zero,
        evidence={
            "unsharded gradients that stayed": [
                case.ledger.parameters[p].name for p in stay[:4]
            ]
        },
        cause=(
            "`zero_grad` does not reach the whole gradients: what the backwards without sync have added to them stays, "
            + (
                "and enters the next window."
                if scatters(case.ledger).any()
                else "and no step reads it."
            )
        ),
        times=len(found),
    )


def _kept_for_other_groups(case: Case, loop: Loop) -> Iterator[Finding]:
    """Steps that run while what is averaged in each group of ranks waits there for the other groups."""
    ledger, shard_of = case.ledger, shards_of(case.ledger)
    wholes = [p for p in loop.columns.tolist() if p in shard_of]
    if not wholes:
        return
    waits: np.ndarray = np.ones(loop.backwards.size, bool)
    ends = np.append(loop.steps, len(case.events))[
        np.searchsorted(loop.steps, loop.backwards)
    ]
    scattering = np.append(scatters(ledger), False)
    for p in wholes:
        taken = ledger.fates.erased[loop.backwards, p]
        there = brought(ledger, shard_of[p], taken)
        waits &= ~case.contributed[loop.backwards, p] | (
            scattering[taken] & ((there < 0) | (there > ends))
        )
    found = np.unique(ends[waits & (ends < len(case.events))])
    # What an epoch leaves over is told as what it is.
    if found.size < 2 or 2 * found.size <= loop.steps.size:
        return
    step = int(found[0])
    yield case.finding(
        "fsdp2-zero-keeps-unsharded",
        "error",
        step,
        step=step,
        evidence={
            "backwards that wait": loop.backwards[waits & (ends == step)].tolist(),
            "steps": int(found.size),
        },
        cause=(
            "What each group of ranks has averaged waits for that of the other groups, which no backward has added "
            "before the step, and `zero_grad` does not reach it there: "
            + (
                "it enters a later window."
                if any(loop.windows.values())
                else "no step reads it."
            )
        ),
        times=int(found.size),
        optimizer=loop.optimizer,
    )


class Lone(NamedTuple):
    """An optimizer of which no gradient was ever shared: what would be found if the others' are others.

    `orders` are its steps that read something, `weights` sums of its small weights before the first step and after
    each, `pulled` whether these gradients alone have moved them: None where nobody can tell.
    """

    orders: list[int]
    weights: np.ndarray
    pulled: bool | None
    finding: Finding


def lone(case: Case, loop: Loop) -> Lone | None:
    """What would be found of an optimizer that no collective and no hand has brought anything of other ranks."""
    ledger, windows = case.ledger, {step: b for step, b in loop.windows.items() if b}
    sharded = any(ledger.parameters[p].unsharded_of for p in loop.columns)
    if not number(ledger.meta.get("ranks")) > 1 or sharded or len(windows) < 2:
        return None
    if loop.changing(case.at("sync")).size or any(
        map(bool, case.moved[loop.backwards])
    ):
        return None
    weights, pulled = _weights(case, loop)
    step, backwards = next(iter(windows.items()))
    replicated = case.armed[backwards[-1]] is not None
    finding = case.finding(
        "ddp-unsynced-step",
        "note",
        backwards[-1],
        step=step,
        evidence={"steps": len(windows), "of which read what ranks had shared": 0},
        cause=(
            f"The ranks share nothing before any of {len(windows)} steps: "
            + (
                "no forward has armed the all-reduce."
                if replicated
                else "the loss is not that of a module that averages gradients, and none are averaged by hand."
            )
        ),
        times=len(windows),
        optimizer=loop.optimizer,
    )
    return Lone(
        loop.steps.searchsorted(list(windows)).tolist(), weights, pulled, finding
    )


def _weights(case: Case, loop: Loop) -> tuple[np.ndarray, bool | None]:
    """Sums of the small weights before the first step and after each; whether only their gradients have moved them."""
    ledger, settings = case.ledger, case.settings(loop.optimizer)
    small = [
        p for p in loop.columns.tolist() if ledger.weights(p).size and p in ledger.exact
    ]
    known = (
        np.flatnonzero(np.isfinite(ledger.weights(small[0])).all(axis=1))
        if small
        else loop.steps
    )
    if not known.size or known[0] >= loop.steps[0]:
        return np.zeros((0, 8)), None
    every = [ledger.weights(p)[[known[0], *loop.steps]] for p in small]
    rng, pulled = np.random.default_rng(0), True
    # One element has one direction only.
    wide = any(weights.shape[1] > 1 for weights in every)
    whole = np.concatenate(every, axis=1)
    with np.errstate(all="ignore"):
        for p, weights in zip(small, every, strict=True):
            move, grad = (
                np.diff(weights, axis=0),
                np.nan_to_num(ledger.exact[p][1][loop.steps]),
            )
            along = (move * grad).sum(axis=1) ** 2
            pulled &= bool(
                (
                    along >= (1 - SAME) * (move**2).sum(axis=1) * (grad**2).sum(axis=1)
                ).all()
            )
        sums = whole @ rng.uniform(-1, 1, (whole.shape[1], 8))
    plain = (
        settings.get("class") == "SGD"
        and not settings.get("momentum")
        and not settings.get("weight_decay")
    )
    return sums, pulled if plain and wide else None
