"""Rules about several processes: what is synchronised and when, and ranks that come apart.

What compares ranks needs a few numbers of each, so that one ledger is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.analysis import (
    LedgerAnalysis,
    OptimizerHistory,
    WindowShare,
    is_close,
)
from accumviz.checks.report import CHAPTERS, Finding
from accumviz.checks.weights import _divisor as divisor
from accumviz.ledger.events import CHANGED, PRESENT
from accumviz.ledger.flow import number, scatters

# --- one process of several -------------------------------------------------------------------


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


def fsdp2_zero_keeps_unsharded(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a zeroing that does not reach the sum that FSDP2 keeps elsewhere."""
    parameters = analysis.ledger.parameters
    whole = [p for p, parameter in enumerate(parameters) if parameter.unsharded_of]
    kept = []
    for zero in analysis.at("zero_grad").tolist() if whole else ():
        stay = [p for p in whole if _stays(analysis, zero, p)]
        if stay:
            kept.append((zero, stay))
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
            "unsharded gradients that stayed": [parameters[p].name for p in stay[:4]]
        },
        cause=(
            "`zero_grad` does not reach the whole gradients: what the backwards without sync have added to them "
            f"stays, {later}"
        ),
        times=len(kept),
    )


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


def fsdp1_local_clip(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a clip of FSDP1's shards to the norm that one rank has: each rank shortens its own by another factor."""
    ledger = analysis.ledger
    sharded = {p.unsharded_of for p in ledger.parameters if p.unsharded_of}
    if not sharded or analysis.single:
        return
    for optimizer in analysis.optimizers:
        names = [ledger.parameters[p].name for p in optimizer.columns]
        local = [
            clip
            for clip in optimizer.changing(analysis.at("clip")).tolist()
            if sharded.intersection(names) and _is_local(analysis, optimizer, clip)
        ]
        if not local:
            continue
        clip = local[0]
        event = ledger[clip]
        yield analysis.finding(
            "fsdp1-local-clip",
            "error",
            clip,
            step=optimizer.next_step(clip),
            evidence={
                "norm of this rank's shards": event.details["total_norm"],
                "max_norm": event.details.get("max_norm", "?"),
                "the clip multiplies by": optimizer.clip_ratio(clip),
            },
            cause=(
                "The clip takes the norm of this rank's shards alone, and each rank has another one: their pieces of "
                "one gradient are shortened by different factors. FSDP1's own `model.clip_grad_norm_` asks all ranks."
            ),
            times=len(local),
            optimizer=optimizer.optimizer,
        )


def _is_local(analysis: LedgerAnalysis, optimizer: OptimizerHistory, clip: int) -> bool:
    """Return whether a clip that shortened gradients took the norm of what this rank holds for the whole."""
    event = analysis.ledger[clip]
    total = number(event.details.get("total_norm"))
    mine = np.array([p.rank == optimizer.rank for p in analysis.ledger.parameters])
    norms = analysis.ledger.grad[clip - 1, mine].astype(float)
    norms = norms[np.isfinite(norms)]
    here = float(np.sqrt(np.square(norms).sum()))
    return optimizer.clip_ratio(clip) < 1 and bool(is_close(total, here, 1e-4))


# --- what ranks say of themselves -------------------------------------------------------------


class UnsyncedStep(NamedTuple):
    """A step that read what its rank had shared with no other, and what is found if the others' is another."""

    order: int
    meant: bool
    finding: Finding


@dataclass(frozen=True)
class OptimizerSummary:
    """One optimizer of one rank.

    `settings` is the same for ranks that train one model. `norms` has two weighted sums of the
    gradients' norms at each step; `steps` holds each step as an event, and how many backwards had
    synchronised before it. `synced` counts the steps on averaged gradients; `never_shared` is what is
    found if the others' gradients differ, of one that shares nothing.
    """

    rank: int | None
    settings: tuple[Any, ...]
    norms: np.ndarray
    steps: list[tuple[int, Finding]]
    unsynced: list[UnsyncedStep]
    synced: int
    never_shared: Finding | None


class RankWindow(NamedTuple):
    """One window of one rank: how much an element weighs there before the average, and how many there are.

    `kind` says which window of which objective it is, so that the ranks' can be put together; `averaged`
    is over how many ranks; `counted` says whether a loss may have been divided by a number of all of them.
    """

    kind: tuple[int, int, str]
    rank: int | None
    least: float
    most: float
    elements: float
    averaged: float
    counted: str
    finding: Finding


@dataclass(frozen=True)
class RankSummary:
    """What the comparing rules need of a ledger.

    `armed` has for each rank under DDP a finding at each backward that synchronised; `cut`
    are the ranks that were stopped, and might have had more; `waited` those that waited in vain, and
    `finished` those that were done by themselves.
    """

    optimizers: list[OptimizerSummary]
    armed: dict[int, list[Finding]]
    cut: frozenset[int]
    waited: frozenset[int]
    finished: frozenset[int]
    windows: list[RankWindow]


def summarise(analysis: LedgerAnalysis, rank: int | None = None) -> RankSummary:
    """Say what a ledger has to say to others; `rank` is whose it is, where it is not that of several."""
    whose = analysis.ranks
    if rank is not None:
        whose = np.full(whose.size, rank)
    flags = analysis.armed
    under_ddp = analysis.backward & np.array([f is not None for f in flags], bool)
    armed = under_ddp & np.array([flag is True for flag in flags], bool)
    synced = np.flatnonzero(armed)
    ranks = np.unique(whose[under_ddp]).tolist()
    of_rank = {r: synced[whose[synced] == r] for r in ranks}
    cut = [r for r in ranks if not _came_to_its_end(analysis, r, of_rank[r])]
    timeout = re.compile("(?i)time[d ]*out")
    waited = [r for r in ranks if timeout.search(str(_ended(analysis, r)))]
    # One that never steps may have been left behind by those that do.
    numbers = sorted({o for p in analysis.ledger.parameters for o in p.optimizers})
    every = [OptimizerHistory(analysis, number) for number in numbers]
    return RankSummary(
        [_summary(analysis, optimizer, rank, synced) for optimizer in every],
        {r: _places(analysis, of_rank[r]) for r in ranks},
        frozenset(cut),
        frozenset(waited),
        frozenset(r for r in ranks if _finished(analysis, r)),
        _windows(analysis, rank),
    )


def _places(analysis: LedgerAnalysis, events: np.ndarray) -> list[Finding]:
    """Return an unfinished finding about uneven ranks at each of some events."""
    rule, severity = "uneven-rank-backwards", "error"
    return [
        analysis.finding(rule, severity, event, cause="", evidence={})
        for event in events.tolist()
    ]


def _came_to_its_end(analysis: LedgerAnalysis, rank: int, synced: np.ndarray) -> bool:
    """Return whether a rank has done all that it was to do: its script, or its loader at least."""
    by_itself = _ended(analysis, rank) in (None, "closed", "exit")
    if by_itself and analysis.ledger.complete:
        return True
    mine = rank if (analysis.ranks >= 0).any() else None
    return bool(synced.size) and analysis.ended(analysis.epoch(int(synced[-1]), mine))


def _finished(analysis: LedgerAnalysis, rank: int) -> bool:
    """Return whether a rank's recording was closed with nothing raised."""
    return analysis.ledger.complete and _ended(analysis, rank) in ("closed", "exit")


def _ended(analysis: LedgerAnalysis, rank: int) -> Any:
    """Return how a rank's recording ended."""
    ended = analysis.ledger.meta.get("ended")
    return ended.get(str(rank)) if isinstance(ended, Mapping) else ended


def _summary(
    analysis: LedgerAnalysis,
    optimizer: OptimizerHistory,
    rank: int | None,
    synced: np.ndarray,
) -> OptimizerSummary:
    armed = [analysis.armed[b] for b in optimizer.backwards.tolist()]
    replicated = not analysis.single and any(flag is not None for flag in armed)
    unsynced, averaged = _unsynced(analysis, optimizer) if replicated else ([], 0)
    never = _never_shared(analysis, optimizer)
    compared = replicated or never is not None
    mine = synced[np.isin(synced, optimizer.backwards)]
    steps = optimizer.steps if replicated else optimizer.steps[:0]
    synced_before = np.searchsorted(mine, steps).tolist()
    shapes = tuple(analysis.ledger.parameters[p].shape for p in optimizer.columns)
    return OptimizerSummary(
        optimizer.rank if rank is None else rank,
        (shapes, str(analysis.settings(optimizer.optimizer))),
        _norms(analysis, optimizer) if compared else np.zeros((0, 2)),
        list(zip(synced_before, _places(analysis, steps), strict=True)),
        unsynced,
        averaged,
        never,
    )


def _norms(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> np.ndarray:
    """Return two weighted sums of the norms at each step: where both are equal, so are the norms."""
    norms = analysis.ledger.grad[np.ix_(optimizer.steps, optimizer.columns)]
    weights = np.random.default_rng(0).uniform(0.5, 1.5, (optimizer.columns.size, 2))
    # What is infinite gets a place among numbers: a product of it may warn.
    finite = np.clip(np.nan_to_num(norms.astype(float), nan=-1.0), -1e300, 1e300)
    sums: np.ndarray = finite @ weights
    return sums


def _unsynced(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> tuple[list[UnsyncedStep], int]:
    """Return the steps that read what came after the last average, and how many read averages."""
    buckets = _synced_together(analysis, optimizer)
    unsynced, synced = [], 0
    for order, (step, window) in enumerate(optimizer.windows.items()):
        if not window:
            continue
        late = {
            b
            for reached, last in buckets
            for b in window
            if reached[b] and b > last[order]
        }
        # Averaged too early, within the very window, is averaging that was meant.
        early = any(last[order] > window[0] for _, last in buckets)
        synced += not late or early
        if late and analysis.armed[max(late)] is not None:
            one = _unsynced_step(analysis, optimizer, step, order, sorted(late))
            unsynced.append(one)
    return unsynced, synced


def _synced_together(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> list[tuple[list[bool], list[int]]]:
    """For each bucket of parameters: which events reach it; before each step, its last average.

    Parameters that are never averaged do not count, unless that is all of them.
    """
    syncs = optimizer.changing(analysis.at("sync"))
    state = analysis.ledger.state[np.ix_(syncs, optimizer.columns)]
    changed = (state & CHANGED).astype(bool)
    groups: dict[bytes, list[int]] = {}
    for place, when in enumerate(np.packbits(changed, axis=0).T):
        groups.setdefault(when.tobytes(), []).append(place)
    buckets: list[tuple[list[bool], list[int]]] = []
    for places in groups.values():
        when = syncs[changed[:, places[0]]]
        if when.size or len(groups) == 1:
            before = np.searchsorted(when, optimizer.steps)
            last = np.append(-1, when)[before]
            columns = optimizer.columns[places]
            reached: np.ndarray = np.any(analysis.contributed[:, columns], axis=1)
            buckets.append((reached.tolist(), last.tolist()))
    return buckets


def _unsynced_step(
    analysis: LedgerAnalysis,
    optimizer: OptimizerHistory,
    step: int,
    order: int,
    late: list[int],
) -> UnsyncedStep:
    b = late[-1]
    # The flag was up when backward ran, and down when its forward did.
    meant = analysis.armed[b] is False and analysis.no_sync[b] is False
    why = "the last backward before it ran without synchronisation."
    if meant:
        why = (
            "the forward is what arms the all-reduce, for the first backward after it, and no forward ran since the "
            "flag was set."
        )
    finding = analysis.finding(
        "ddp-unsynced-step",
        "error",
        b,
        step=step,
        evidence={
            "backwards not averaged": late,
            "armed by its forward": bool(analysis.armed[b]),
            "flag at its backward": not analysis.no_sync[b],
            "line of the forward": analysis.detail(b, "armed_line") or 0,
        },
        cause=f"The step reads gradients that were not averaged over the ranks: {why}",
        optimizer=optimizer.optimizer,
    )
    return UnsyncedStep(order, meant, finding)


def _never_shared(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Finding | None:
    """Return what is found of an optimizer that no collective and no hand has brought anything of other ranks."""
    windows = optimizer.full_windows
    ledger = analysis.ledger
    sharded = any(ledger.parameters[p].unsharded_of for p in optimizer.columns)
    if not number(ledger.meta.get("ranks")) > 1 or sharded or len(windows) < 2:
        return None
    # What is averaged after the step, and zeroed then, no step has read.
    kept = len(set(optimizer.read.tolist())) < optimizer.read.size
    syncs = optimizer.changing(analysis.at("sync")).tolist()
    shared = kept or not all(optimizer.nothing_since_step(sync) for sync in syncs)
    moved = any(map(bool, analysis.moved[optimizer.backwards]))
    if moved or (syncs and shared):
        return None
    step, window = next(iter(windows.items()))
    return analysis.finding(
        "ddp-unsynced-step",
        "note",
        window[-1],
        step=step,
        evidence={"steps": len(windows), "of which read what ranks had shared": 0},
        cause=(
            f"The ranks share nothing before any of {len(windows)} steps. Unless their weights are averaged, or each "
            "is to train a model of its own, they come apart."
        ),
        times=len(windows),
        optimizer=optimizer.optimizer,
    )


def _windows(analysis: LedgerAnalysis, rank: int | None) -> list[RankWindow]:
    """Return the windows whose shares are known, each with what says which of the ranks' belong together."""
    numbers: dict[int | None, list[int]] = {}
    for optimizer in analysis.optimizers:
        numbers.setdefault(optimizer.rank, []).append(optimizer.optimizer)
    of_rank = {o: r for r, optimizers in numbers.items() for o in optimizers}
    windows = []
    orders: dict[tuple[int, int], int] = {}
    for share in analysis.window_shares:
        orders[share.optimizer, share.objective] = order = (
            orders.get((share.optimizer, share.objective), -1) + 1
        )
        averaged = _averaged(analysis, share) if share.known and share.many else 0.0
        if averaged < 2:
            continue
        its_rank = of_rank[share.optimizer]
        place = numbers[its_rank].index(share.optimizer)
        name = analysis.shares.objectives[share.objective]
        finding = analysis.finding_of(
            "rank-token-weight", "warning", share, cause="", evidence={}
        )
        windows.append(
            RankWindow(
                (place, order, name),
                its_rank if rank is None else rank,
                min(share.each),
                max(share.each),
                sum(share.sizes),
                averaged,
                _counted(analysis, share, averaged),
                replace(finding, optimizer=None),
            )
        )
    return windows


def _averaged(analysis: LedgerAnalysis, share: WindowShare) -> float:
    """Return over how many ranks a window was averaged."""
    rows = analysis.shares.of(share.step)
    last = rows.backward == share.backwards[-1]
    return 1 / float(rows.averaged[last].min(initial=1.0))


def _counted(analysis: LedgerAnalysis, share: WindowShare, ranks: float) -> str:
    """Return of what of all ranks a loss may have been divided by the number, and by nothing else; or ""."""
    if share.even and analysis.alone(share):
        by = divisor(analysis, share)
        return "micro-batches" if by > 2 and by == share.many * round(ranks) else ""
    # Multiplied by the number of ranks as well, what is left was chosen.
    multiplied = any(one > 1 for one in analysis.constants(share))
    return "" if share.mean or multiplied else "elements"


# --- ranks compared ---------------------------------------------------------------------------


def ddp_unsynced_step(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find a step that reads what no rank has shared with the others."""
    every = [optimizer for rank in ranks for optimizer in rank.optimizers]
    noted: set[tuple[Any, ...]] = set()
    for mine in every:
        # A loop that never shares gradients, and never meant to, averages weights (LocalSGD).
        unsynced = [one for one in mine.unsynced if one.meant or mine.synced]
        unsynced = [one for one in unsynced if _differ(mine, every, one.order)]
        if unsynced:
            finding = unsynced[0].finding
            yield replace(finding, times=len(unsynced), rank=mine.rank)
        elif mine.never_shared is not None and mine.settings not in noted:
            noted.add(mine.settings)  # once for all ranks
            if _come_apart(mine, every):
                yield replace(mine.never_shared, rank=mine.rank)


def _others(
    mine: OptimizerSummary, every: list[OptimizerSummary]
) -> list[OptimizerSummary]:
    """Return the other ranks' optimizers that train the same model."""
    return [
        other
        for other in every
        if other.rank != mine.rank and other.settings == mine.settings
    ]


def _come_apart(mine: OptimizerSummary, every: list[OptimizerSummary]) -> bool:
    """Return whether the gradients of ranks that share nothing differ at every step."""
    others = _others(mine, every)
    if not others or any(other.never_shared is None for other in others):
        return False
    steps = min(len(other.norms) for other in (mine, *others))
    return steps > 1 and all(_differ(mine, every, order) for order in range(steps))


def _differ(mine: OptimizerSummary, every: list[OptimizerSummary], order: int) -> bool:
    """Return whether the ranks' gradients differ at their steps of one number; also where only one rank is known."""
    others = [o.norms[order] for o in _others(mine, every) if order < len(o.norms)]
    alike = [
        np.allclose(mine.norms[order], norms, rtol=1e-5, equal_nan=True)
        for norms in others
    ]
    return not others or not all(alike)


def uneven_rank_backwards(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find ranks that synchronise a different number of times, so that one waits for ever."""
    synced = {r: places for rank in ranks for r, places in rank.armed.items()}
    counts = {r: len(places) for r, places in synced.items()}
    if len(set(counts.values())) < 2:
        yield from _uneven_steps(ranks)
        return
    most = max(counts, key=lambda r: counts[r])
    least = min(counts, key=lambda r: counts[r])
    waited = frozenset().union(*(rank.waited for rank in ranks))
    cut = frozenset().union(*(rank.cut for rank in ranks))
    # A rank that was done by itself has not waited for ever: DDP's `join` lets others be done before it.
    if any(most in rank.finished for rank in ranks):
        return
    # Where both of them wait for others, the one that has less is not waited for in vain.
    if least in cut and not {most, least} <= waited:
        return
    evidence = {
        f"synchronised backwards of rank {r}": many
        for r, many in sorted(counts.items())
    }
    cause = (
        f"Rank {most} synchronises {counts[most]} backwards and rank {least} only {counts[least]}: the one more waits "
        "for an answer that never comes."
    )
    place = synced[most][counts[least]]
    yield replace(place, rank=most, evidence=evidence, cause=cause)


def _uneven_steps(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find a step that some ranks take after a backward that they all have synchronised, and others do not."""
    alike: dict[tuple[Any, ...], list[OptimizerSummary]] = {}
    seen: list[tuple[Any, ...]] = []
    for rank in ranks:
        for mine in rank.optimizers:
            seen.append((mine.rank, mine.settings))
            if mine.rank in rank.armed and mine.rank not in rank.cut:
                key = seen.count(seen[-1]), mine.settings
                alike.setdefault(key, []).append(mine)
    for every in alike.values():
        most = max(every, key=lambda mine: len(mine.steps))
        least = min(every, key=lambda mine: len(mine.steps))
        its = {synced for synced, _ in least.steps}
        extra = [place for synced, place in most.steps if synced not in its]
        if not extra or len(most.steps) == len(least.steps):
            continue
        how = "does not, after a backward that both have synchronised: from then on their weights differ."
        if not least.steps:
            # One that never steps may be sent the weights of one that does.
            how = (
                "never does, after a backward that both have synchronised: unless it is sent the weights, they "
                "differ."
            )
        yield replace(
            extra[0],
            severity="error" if least.steps else "note",
            step=extra[0].event,
            rank=most.rank,
            evidence={f"steps of rank {o.rank}": len(o.steps) for o in every},
            cause=f"Rank {most.rank} steps here and rank {least.rank} {how}",
            times=len(extra),
        )


def _compared_windows(ranks: Sequence[RankSummary]) -> list[list[RankWindow]]:
    """Return the windows that all ranks of one average have, of which each rank weighs its own elements alike."""
    kinds: dict[tuple[int, int, str], list[RankWindow]] = {}
    for rank in ranks:
        for window in rank.windows:
            kinds.setdefault(window.kind, []).append(window)
    return [
        windows
        for _, windows in sorted(kinds.items())
        if len(windows) > 1
        and min(window.averaged for window in windows) == len(windows)
        and all(w.least > 0 and is_close(w.least, w.most) for w in windows)
    ]


def divided_by_ranks(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find losses divided by what all ranks have together, where their average divides by the ranks as well."""
    every = _compared_windows(ranks)
    divided = [windows for windows in every if _is_whole_over_ranks(windows)]
    if len(divided) < 2 or 2 * len(divided) < len(every):
        return
    window, many = divided[0][0], len(divided[0])
    uneven = sum(len({w.elements for w in windows}) > 1 for windows in divided)
    # The same on ranks with other numbers of elements is divided by all of them.
    if window.counted == "elements" and uneven < 2:
        return
    # Half a loss is a choice that people make.
    half = many == 2 and window.counted == "micro-batches"
    unless = "Unless a half is meant, the" if half else "The"
    yield replace(
        window.finding,
        rule="wrong-divisor",
        chapter=CHAPTERS["wrong-divisor"],
        severity="note" if half else "warning",
        rank=window.rank,
        evidence={
            "weight per element, before the average": window.least,
            "elements on each rank": [w.elements for w in divided[0]],
            "sum of shares of all ranks": 1 / many,
        },
        cause=(
            f"Each loss is divided by the {window.counted} of {many} ranks, and the average over the ranks divides by "
            f"{many} again: the step reads 1/{many} of the gradient of one large batch. {unless} loss has to be "
            "multiplied by the number of ranks."
        ),
        times=len(divided),
    )


def _is_whole_over_ranks(windows: list[RankWindow]) -> bool:
    """Return whether the shares of all ranks, counted over all of them, add up to 1 before the average."""
    weights = [window.least for window in windows]
    total = sum(window.least * window.elements for window in windows)
    counted = all(window.counted for window in windows)
    return counted and bool(
        is_close(min(weights), max(weights)) and is_close(total, 1.0)
    )


def rank_token_weight(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find ranks whose elements weigh differently, because each divides by its own count."""
    every = _compared_windows(ranks)
    odd = [
        windows
        for windows in every
        if len({w.elements for w in windows}) > 1
        and not is_close(
            min(w.least for w in windows), max(w.least for w in windows), 1e-2
        )
    ]
    if not odd:
        return
    windows = sorted(odd[0], key=lambda window: window.rank or 0)
    weights = [window.least for window in windows]
    yield replace(
        windows[0].finding,
        severity="warning" if 2 * len(odd) >= len(every) else "note",
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
