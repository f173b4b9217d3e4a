"""Rules about several processes: what is synchronised and when, and ranks that come apart.

What compares ranks needs a few numbers of each, so that one ledger is in memory at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from accumviz.checks.analysis import (
    LedgerAnalysis,
    OptimizerHistory,
    for_each_optimizer,
    is_close,
)
from accumviz.checks.report import Finding
from accumviz.ledger.events import CHANGED, PRESENT
from accumviz.ledger.flow import number, scatters

# --- one process of several -------------------------------------------------------------------


@for_each_optimizer
def no_sync_excludes_forward(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a `no_sync` around the backward alone, which synchronises all the same."""
    no_sync = analysis.events.detail("no_sync", None)
    armed = analysis.events.detail("armed", None)
    quiet = [b for b in optimizer.backwards.tolist() if no_sync[b] is True]
    yield from _synced_for_others(analysis, optimizer, quiet)
    synced = [b for b in quiet if armed[b] is True]
    if not synced:
        return
    yield analysis.finding(
        "warning",
        synced[0],
        evidence={
            "backwards in no_sync": len(quiet),
            "of which synchronised": len(synced),
            "line of the forward": analysis.detail(synced[0], "armed_line") or 0,
        },
        cause=(
            "A forward outside `no_sync` armed the all-reduce, and this backward is synchronised in `no_sync`: "
            "right, but as slow as without it. A forward that has no backward belongs in `torch.no_grad`."
        ),
        times=len(synced),
    )


def _synced_for_others(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, quiet: list[int]
) -> Iterator[Finding]:
    """Find backwards in one network's `no_sync` that synchronise another one, whose gradients are then zeroed."""
    inside = analysis.events.where("kind", "sync")
    inside = inside & analysis.events.where("within", "backward")
    for other in analysis.optimizers:
        syncs = other.changing(np.flatnonzero(inside))
        places = other.backwards.searchsorted(syncs)
        synced = set(other.backwards[places[places > 0] - 1].tolist())
        in_vain = [b for b in quiet if b in synced and b not in other.first_step_of]
        if not in_vain or np.intersect1d(optimizer.columns, other.columns).size:
            continue
        yield analysis.finding(
            "warning",
            in_vain[0],
            evidence={
                "backwards in no_sync": len(quiet),
                "of which synchronised": len(in_vain),
            },
            cause=(
                "`no_sync` of one network does not hold for another: this backward averages the gradients of "
                f"{other.name} over the ranks, and they are zeroed. Enter the `no_sync` of both, or freeze the other."
            ),
            times=len(in_vain),
        )


@for_each_optimizer
def ddp_unsynced_step(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a step that reads what its rank has shared with no other."""
    if not _is_replicated(analysis, optimizer):
        return
    unsynced, averaged = _unsynced(analysis, optimizer)
    # A loop that never shares gradients, and never meant to, averages weights (LocalSGD).
    wrong = unsynced
    if not averaged:
        wrong = [one for one in unsynced if _was_meant(analysis, one[1][-1])]
    if not wrong:
        return
    step, late = wrong[0]
    b = late[-1]
    yield analysis.finding(
        "error",
        b,
        step=step,
        evidence={
            "backwards not averaged": late,
            "armed by its forward": bool(analysis.detail(b, "armed")),
            "flag at its backward": not analysis.detail(b, "no_sync"),
            "line of the forward": analysis.detail(b, "armed_line") or 0,
        },
        cause=f"The step reads gradients that were not averaged over the ranks: {_why_unsynced(analysis, b)}",
        times=len(wrong),
    )


def _why_unsynced(analysis: LedgerAnalysis, backward: int) -> str:
    if not _was_meant(analysis, backward):
        return "the last backward before it ran without synchronisation."
    if analysis.detail(backward, "armed"):
        return (
            "DDP was to average them, and did not. Its hooks are lost where parameters are moved or cast after it "
            "was made, and it waits for a gradient of every parameter."
        )
    return (
        "a forward through DDP arms the all-reduce, for the first backward after it, and none ran before this "
        "backward with the flag set."
    )


def _was_meant(analysis: LedgerAnalysis, backward: int) -> bool:
    """Return whether a backward was to be synchronised: its flag was up, on a device whose collectives are seen."""
    devices = {parameter.device for parameter in analysis.ledger.parameters}
    seen = all(device.startswith(("cpu", "cuda")) for device in devices)
    armed = analysis.detail(backward, "armed")
    return analysis.detail(backward, "no_sync") is False and (seen or not armed)


def _unsynced(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> tuple[list[tuple[int, list[int]]], int]:
    """Return the steps that read what came after the last average, with that, and how many read averages.

    Parameters that are never averaged do not count, unless that is all of them.
    """
    syncs = optimizer.changing(analysis.at("sync"))
    state = analysis.ledger.state[np.ix_(syncs, optimizer.columns)]
    changed = (state & CHANGED).astype(bool)
    ever = changed.any(axis=0) if syncs.size else np.ones(optimizer.columns.size, bool)
    columns = optimizer.columns[ever]
    last = np.full((syncs.size + 1, columns.size), -1, np.int32)
    last[1:] = np.where(changed[:, ever], syncs[:, None], -1)
    last = np.maximum.accumulate(last)
    armed = analysis.events.detail("armed", None)
    unsynced = []
    averaged = 0
    for step, window in optimizer.full_windows.items():
        until = last[syncs.searchsorted(step)]
        backwards = np.array(window)
        reached = analysis.contributed[np.ix_(backwards, columns)]
        after = reached & (backwards[:, None] > until)
        late = backwards[after.any(axis=1)].tolist()
        # Averaged too early, within the very window, is averaging that was meant.
        averaged += not late or until.max(initial=-1) > window[0]
        if late and armed[late[-1]] is not None:
            unsynced.append((step, late))
    return unsynced, averaged


def fsdp2_zero_keeps_unsharded(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a zeroing that does not reach the sum that FSDP2 keeps elsewhere."""
    kept = _kept_by_zeros(analysis)
    if not kept:
        return
    zero = min(kept)
    scattered = scatters(analysis.events).any()
    later = "and enters the next window." if scattered else "and no step reads it."
    yield analysis.finding(
        "error",
        zero,
        evidence={"unsharded gradients that stayed": kept[zero][:4]},
        cause=(
            "`zero_grad` does not reach the whole gradients: what the backwards without sync have added to them "
            f"stays, {later}"
        ),
        times=len(kept),
    )


def _kept_by_zeros(analysis: LedgerAnalysis) -> dict[int, list[str]]:
    """Return the zeroings that leave whole gradients as they are, with the names of those."""
    parameters = analysis.ledger.parameters
    whole = [p for p, parameter in enumerate(parameters) if parameter.unsharded_of]
    kept = {}
    for zero in analysis.at("zero_grad").tolist():
        names = [parameters[p].name for p in whole if _stays(analysis, zero, p)]
        if names:
            kept[zero] = names
    return kept


def _stays(analysis: LedgerAnalysis, zero: int, p: int) -> bool:
    """Return whether a whole gradient is there before a zeroing, and still there at the next contribution.

    FSDP1 erases its sum in the forward that follows.
    """
    ledger = analysis.ledger
    present = ledger.state[:, p] & PRESENT
    mine = ledger[zero].rank in (None, ledger.parameters[p].rank)
    if not mine or not zero or not present[zero - 1]:
        return False
    reached = analysis.contributed[zero:, p] & analysis.backward[zero:]
    after = np.flatnonzero(reached)
    return bool(after.size) and bool(present[zero : zero + int(after[0])].all())


# An average is the same number on all ranks, up to the order of its additions.
_SAME = 1e-2

# --- what ranks say of themselves -------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerSummary:
    """One optimizer of one rank under DDP: its number there, how often it stepped, and on gradients of which norms.

    Where it shares no gradients on purpose, there are no norms.
    """

    rank: int | None
    place: int
    steps: int
    norms: list[float]


class RankWindow(NamedTuple):
    """One window of one rank: how much an element weighs there before the average, and how many there are.

    `kind` says which window of which objective it is, so that the ranks' can be put together; `averaged`
    is over how many ranks.
    """

    kind: tuple[int, int, str]
    rank: int | None
    least: float
    most: float
    elements: float
    averaged: float
    finding: Finding


@dataclass(frozen=True)
class RankSummary:
    """What the comparing rules need of a ledger.

    `armed` has for each rank under DDP an unfinished finding at each backward that synchronised; `finished` are the
    ranks that came to their end by themselves.
    """

    optimizers: list[OptimizerSummary]
    armed: dict[int, list[Finding]]
    finished: frozenset[int]
    windows: list[RankWindow]


def summarise(analysis: LedgerAnalysis, rank: int | None = None) -> RankSummary:
    """Say what a ledger has to say to others; `rank` is whose it is, where it is not that of several."""
    armed = _armed(analysis, rank)
    finished = [r for r in armed if _has_finished(analysis, r)]
    return RankSummary(
        _summarise_optimizers(analysis, rank),
        armed,
        frozenset(finished),
        list(_windows(analysis, rank)),
    )


def _armed(analysis: LedgerAnalysis, rank: int | None) -> dict[int, list[Finding]]:
    """Return for each rank under DDP an unfinished finding at each backward that synchronised."""
    flags = analysis.events.detail("armed", None)
    armed: dict[int, list[Finding]] = {}
    for event in np.flatnonzero(analysis.backward).tolist():
        if flags[event] is None:
            continue
        its_rank = int(analysis.ranks[event]) if rank is None else rank
        findings = armed.setdefault(its_rank, [])
        if flags[event] is True:
            finding = analysis.finding("error", event, cause="", evidence={})
            findings.append(finding)
    return armed


def _summarise_optimizers(
    analysis: LedgerAnalysis, rank: int | None
) -> list[OptimizerSummary]:
    """Return the optimizers under DDP. One that never steps may have been left behind by those that do."""
    summaries = []
    count: Counter[int | None] = Counter()
    for optimizer in analysis.every_optimizer:
        its_rank = optimizer.rank if rank is None else rank
        if _is_replicated(analysis, optimizer):
            place = count[its_rank]
            norms = _norms_of_steps(analysis, optimizer)
            summaries.append(
                OptimizerSummary(its_rank, place, optimizer.steps.size, norms)
            )
        count[its_rank] += 1
    return summaries


def _norms_of_steps(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> list[float]:
    if _shares_nothing(analysis, optimizer):
        return []
    grads = analysis.ledger.grad[np.ix_(optimizer.steps, optimizer.columns)]
    return np.linalg.norm(grads.astype(float), axis=1).tolist()


def _has_finished(analysis: LedgerAnalysis, rank: int) -> bool:
    """Return whether a rank's recording was closed with nothing raised."""
    ended = analysis.ledger.meta.get("ended")
    if isinstance(ended, Mapping):
        ended = ended.get(str(rank))
    return analysis.ledger.complete and ended in (None, "closed", "exit")


def _is_replicated(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> bool:
    """Return whether an optimizer's backwards run under DDP, with other ranks."""
    armed = analysis.events.detail("armed", None)[optimizer.backwards].tolist()
    return analysis.ledger.meta.get("ranks") != 1 and armed.count(None) < len(armed)


def _windows(analysis: LedgerAnalysis, rank: int | None) -> Iterator[RankWindow]:
    """Return the windows whose shares are known, each with what says which of the ranks' belong together."""
    numbers: dict[int | None, list[int]] = {}
    of_rank: dict[int, int | None] = {}
    for optimizer in analysis.optimizers:
        numbers.setdefault(optimizer.rank, []).append(optimizer.optimizer)
        of_rank[optimizer.optimizer] = optimizer.rank
    for (owner, objective), shares in analysis.objectives.items():
        its_rank = of_rank[owner]
        place = numbers[its_rank].index(owner)
        name = analysis.shares.objectives[objective]
        for order, share in enumerate(shares):
            rows = analysis.shares.of(share.step)
            last = rows.backward == share.backwards[-1]
            averaged = 1 / float(rows.averaged[last].min(initial=1.0))
            if averaged < 2 or not share.known:
                continue
            finding = analysis.finding_of("warning", share, cause="", evidence={})
            yield RankWindow(
                (place, order, name),
                its_rank if rank is None else rank,
                min(share.each),
                max(share.each),
                sum(share.sizes),
                averaged,
                replace(finding, optimizer=None),
            )


# --- ranks compared ---------------------------------------------------------------------------


def uneven_rank_backwards(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find ranks that synchronise a different number of times, so that one waits for ever."""
    armed: dict[int, list[Finding]] = {}
    for rank in ranks:
        armed |= rank.armed
    if not armed:
        return
    counts = {rank: len(findings) for rank, findings in armed.items()}
    most = max(counts, key=counts.__getitem__)
    least = min(counts, key=counts.__getitem__)
    many = counts[most]
    few = counts[least]
    finished = _finished(ranks)
    # A rank that was done by itself has not waited: DDP's `join` lets others be done before it.
    if many == few or most in finished or least not in finished:
        return
    evidence = {}
    for rank_number, count in sorted(counts.items()):
        evidence[f"synchronised backwards of rank {rank_number}"] = count
    yield replace(
        armed[most][few],
        rank=most,
        evidence=evidence,
        cause=(
            f"Rank {most} synchronises {many} backwards and rank {least} only {few}: the one more waits for an answer "
            "that never comes."
        ),
        times=many - few,
    )


def _finished(ranks: Sequence[RankSummary]) -> set[int]:
    finished: set[int] = set()
    for rank in ranks:
        finished |= rank.finished
    return finished


def _compared_windows(ranks: Sequence[RankSummary]) -> list[list[RankWindow]]:
    """Return the windows that all ranks of one average have, of which each rank weighs its own elements alike."""
    kinds: dict[tuple[int, int, str], list[RankWindow]] = {}
    for rank in ranks:
        for window in rank.windows:
            kinds.setdefault(window.kind, []).append(window)
    of_kinds = [windows for _, windows in sorted(kinds.items())]
    return [windows for windows in of_kinds if _can_be_compared(windows)]


def _can_be_compared(windows: list[RankWindow]) -> bool:
    """Return whether these are the windows of all ranks, and each rank weighs its own elements alike."""
    averaged = min(window.averaged for window in windows)
    if len(windows) == 1 or averaged != len(windows):
        return False
    return all(_is_even(window) for window in windows)


def _is_even(window: RankWindow) -> bool:
    return window.least > 0 and is_close(window.least, window.most)


def rank_token_weight(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find ranks whose elements weigh differently, because each divides by its own count."""
    every = _compared_windows(ranks)
    odd = [windows for windows in every if _weigh_differently(windows)]
    if not odd:
        return
    windows = sorted(odd[0], key=lambda window: window.rank or 0)
    weights = [window.least for window in windows]
    yield replace(
        windows[0].finding,
        rank=windows[0].rank,
        evidence={
            "weight per element on each rank, before the average": weights,
            "elements on each rank": [window.elements for window in windows],
        },
        cause=(
            "Each rank divides by its own count, and the average over ranks treats them alike: an element of one "
            f"rank counts {max(weights) / min(weights):.3g} times as much as one of another."
        ),
        times=len(odd),
    )


def _weigh_differently(windows: list[RankWindow]) -> bool:
    """Return whether an element of one rank weighs more than one of another, where they have other numbers of them."""
    weights = [window.least for window in windows]
    uneven = len({window.elements for window in windows}) > 1
    return uneven and not is_close(min(weights), max(weights), 1e-2)


# --- what has to be meant ---------------------------------------------------------------------


def conditions(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say what has to be meant for a rank to be healthy by itself."""
    if not number(analysis.ledger.meta.get("ranks")) > 1:
        return
    parameters = analysis.ledger.parameters
    sharded = any(parameter.unsharded_of for parameter in parameters)
    for optimizer in analysis.optimizers:
        if sharded:
            if _clips_locally(analysis, optimizer):
                yield "a clip by the norm of one rank's shards alone is meant"
        elif _shares_nothing(analysis, optimizer):
            yield "ranks that share no gradients are meant"


def _shares_nothing(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> bool:
    """Return whether several steps read no average. What is averaged after a step, and zeroed then, none has read."""
    syncs = optimizer.changing(analysis.at("sync")).tolist()
    in_vain = all(optimizer.nothing_since_step(sync) for sync in syncs)
    return in_vain and len(optimizer.full_windows) > 1


def _clips_locally(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> bool:
    clips = optimizer.changing(analysis.at("clip")).tolist()
    return any(_is_local(analysis, optimizer, clip) for clip in clips)


def _is_local(analysis: LedgerAnalysis, optimizer: OptimizerHistory, clip: int) -> bool:
    """Return whether a clip that shortened gradients took the norm of what this rank holds for the whole."""
    total = number(analysis.detail(clip, "total_norm"))
    mine = np.array([p.rank == optimizer.rank for p in analysis.ledger.parameters])
    norms = analysis.ledger.grad[clip - 1, mine].astype(float)
    finite = norms[np.isfinite(norms)]
    norm = float(np.sqrt(np.square(finite).sum()))
    return optimizer.clip_ratio(clip) < 1 and is_close(total, norm, 1e-4)


def conditions_of_ranks(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """Say what has to be meant for healthy ranks to be so together."""
    if _step_unevenly(ranks):
        yield "ranks that step a different number of times are meant"
    windows = _compared_windows(ranks)
    if windows and all(_is_divided_by_ranks(of_ranks) for of_ranks in windows):
        yield f"a sum of 1/{len(windows[0])} over all ranks is meant in every step"
    if _step_apart(ranks):
        yield "ranks that step on different gradients are meant"


def _step_unevenly(ranks: Sequence[RankSummary]) -> bool:
    """Return whether an optimizer stepped more often on one rank than on another, of those that came to their end."""
    finished = _finished(ranks)
    steps: dict[int, set[int]] = {}
    for rank in ranks:
        for optimizer in rank.optimizers:
            if optimizer.rank in finished:
                counts = steps.setdefault(optimizer.place, set())
                counts.add(optimizer.steps)
    return any(len(counts) > 1 for counts in steps.values())


def _step_apart(ranks: Sequence[RankSummary]) -> bool:
    """Return whether an optimizer's gradients differ in their norm from one replica to another."""
    norms: dict[int, list[list[float]]] = {}
    for rank in ranks:
        for optimizer in rank.optimizers:
            norms.setdefault(optimizer.place, []).append(optimizer.norms)
    for of_ranks in norms.values():
        for step in zip(*of_ranks, strict=False):
            if max(step) - min(step) > _SAME * max(step):
                return True
    return False


def _is_divided_by_ranks(windows: list[RankWindow]) -> bool:
    """Return whether the shares of all ranks add up to 1 before the average, which divides by the ranks again."""
    total = sum(window.least * window.elements for window in windows)
    return is_close(total, 1.0)
