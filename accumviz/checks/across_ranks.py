"""Rules that compare ranks, by a few numbers of each, so that one ledger is in memory at a time."""

from __future__ import annotations

import re
from collections import defaultdict
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
from accumviz.checks.divisors import divisor
from accumviz.checks.report import CHAPTERS, Finding
from accumviz.ledger.events import CHANGED
from accumviz.ledger.flow import SAME, number


class Place(NamedTuple):
    """Where a finding about an event would stand."""

    event: int
    file: str
    line: int
    source: str


class UnsyncedStep(NamedTuple):
    """A step that read what its rank had shared with no other, and what is found if the others' is another."""

    order: int
    meant: bool
    finding: Finding


@dataclass(frozen=True)
class OptimizerSummary:
    """One optimizer of one rank.

    `settings` is the same for ranks that train one model. `norms` has two weighted sums of the
    gradients' norms at each step; `steps` the place of each, and how many backwards had
    synchronised before it. `synced` counts the steps on averaged gradients; `never_shared` is what is
    found if the others' gradients differ, of one that shares nothing.
    """

    rank: int | None
    columns: int
    settings: tuple[Any, ...]
    norms: np.ndarray
    steps: list[tuple[int, Place]]
    unsynced: list[UnsyncedStep]
    synced: int
    never_shared: Finding | None


class RankWindow(NamedTuple):
    """One window of one rank: how much an element weighs there before the average, and how many there are.

    `kind` says which window of which objective it is, so that the ranks' can be put together; `averaged`
    is over how many ranks; `counted` whether it may have been divided by a number of all of them: of
    micro-batches 1, of elements 2; `grown` by how much more a hook left than there was on average.
    """

    kind: tuple[int, int, str]
    rank: int | None
    least: float
    most: float
    elements: float
    averaged: float
    grown: float
    counted: int
    step: int
    place: Place


@dataclass(frozen=True)
class RankSummary:
    """What the comparing rules need of a ledger.

    `armed` has for each rank under DDP the places of the backwards that synchronised; `cut`
    are the ranks that were stopped, and might have had more; `waited` those that waited in vain.
    """

    optimizers: list[OptimizerSummary]
    armed: dict[int, list[Place]]
    cut: frozenset[int]
    waited: frozenset[int]
    windows: list[RankWindow]


def summarise(analysis: LedgerAnalysis, rank: int | None = None) -> RankSummary:
    """Say what a ledger has to say to others; `rank` is whose it is, where it is not that of several."""
    events = analysis.events
    whose = analysis.ranks if rank is None else np.full(len(events), rank)
    under_ddp = np.array([armed is not None for armed in analysis.armed], bool)
    under_ddp &= analysis.backward
    armed = np.array([armed is True for armed in analysis.armed], bool)
    # In `join`, a rank that is done goes on to meet the others.
    armed &= ~events.detail("join", default=False)
    synced = np.flatnonzero(under_ddp & armed)
    ranks = np.unique(whose[under_ddp]).tolist()
    of_rank = {r: synced[whose[synced] == r] for r in ranks}
    cut = [r for r in ranks if not _came_to_its_end(analysis, r, of_rank[r])]
    timeout = re.compile("(?i)time[d ]*out")
    waited = [r for r in ranks if timeout.search(str(_ended(analysis, r)))]
    # One that never steps may have been left behind by those that do.
    numbers = {o for p in analysis.ledger.parameters for o in p.optimizers}
    idle = sorted(numbers - {o.optimizer for o in analysis.optimizers})
    every = [
        *analysis.optimizers,
        *(OptimizerHistory(analysis, number) for number in idle),
    ]
    return RankSummary(
        [_summary(analysis, optimizer, rank, synced) for optimizer in every],
        {r: _places(analysis, of_rank[r]) for r in ranks},
        frozenset(cut),
        frozenset(waited),
        _windows(analysis, rank),
    )


def _places(analysis: LedgerAnalysis, events: np.ndarray) -> list[Place]:
    columns, tables = analysis.events, analysis.events.tables
    names = "file", "line", "source"
    codes = np.stack([columns.column(name)[events] for name in names], axis=1)
    return [
        Place(event, tables["file"][file], line, tables["source"][source])
        for event, (file, line, source) in zip(
            events.tolist(), codes.tolist(), strict=True
        )
    ]


def _finding(rule: str, severity: str, place: Place, **about: Any) -> Finding:
    chapter = CHAPTERS[rule]
    return Finding(
        rule, severity, **{"step": None, **place._asdict(), "chapter": chapter, **about}
    )


def _came_to_its_end(analysis: LedgerAnalysis, rank: int, synced: np.ndarray) -> bool:
    """Whether a rank has done all that it was to do: its script, or its loader at least."""
    by_itself = _ended(analysis, rank) in (None, "closed", "exit")
    if by_itself and analysis.ledger.complete:
        return True
    mine = rank if (analysis.ranks >= 0).any() else None
    return bool(synced.size) and analysis.ended(analysis.epoch(int(synced[-1]), mine))


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
    whose = optimizer.rank if rank is None else rank
    armed = [analysis.armed[b] for b in optimizer.backwards.tolist()]
    replicated = not analysis.single and any(flag is not None for flag in armed)
    unsynced, averaged = _unsynced(analysis, optimizer) if replicated else ([], 0)
    never = _never_shared(analysis, optimizer)
    mine = synced[np.isin(synced, optimizer.backwards)]
    shapes = tuple(analysis.ledger.parameters[p].shape for p in optimizer.columns)
    settings = str(analysis.settings(optimizer.optimizer))
    compared = replicated or never is not None
    synced_before = np.searchsorted(mine, optimizer.steps).tolist()
    places = _places(analysis, optimizer.steps)
    steps = list(zip(synced_before, places, strict=True))
    return OptimizerSummary(
        whose,
        optimizer.columns.size,
        (shapes, settings),
        _norms(analysis, optimizer) if compared else np.zeros((0, 2)),
        steps if replicated else [],
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
        late = sorted(
            {
                b
                for reached, last in buckets
                for b in window
                if reached[b] and b > last[order]
            }
        )
        # Averaged too early, within the very window, is averaging that was meant.
        early = any(last[order] > window[0] for _, last in buckets)
        synced += not late or early
        if late and analysis.armed[late[-1]] is not None:
            unsynced.append(_unsynced_step(analysis, optimizer, step, order, late))
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
        why = "the flag was set after the forward, which is what arms the all-reduce."
    if meant and analysis.detail(b, "spent"):
        why = "an earlier backward had run since the forward, and DDP averages in the first one after it only."
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
    moved = any(map(bool, analysis.moved[optimizer.backwards]))
    if moved or optimizer.changing(analysis.at("sync")).size:
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
    """Return the windows whose shares are known, each with what tells which of the ranks' belong together."""
    numbers: dict[int | None, list[int]] = defaultdict(list)
    optimizers = {each.optimizer: each for each in analysis.optimizers}
    for optimizer in analysis.optimizers:
        numbers[optimizer.rank].append(optimizer.optimizer)
    windows = []
    for share in analysis.window_shares:
        if share.optimizer not in optimizers or not share.known or not share.many:
            continue
        optimizer = optimizers[share.optimizer]
        averaged, grown = _averaged(analysis, share, optimizer)
        if averaged < 2:
            continue
        whose = optimizer.rank if rank is None else rank
        place = numbers[optimizer.rank].index(share.optimizer)
        name = analysis.shares.objectives[share.objective]
        windows.append(
            RankWindow(
                (place, share.order, name),
                whose,
                min(share.each),
                max(share.each),
                sum(share.sizes),
                averaged,
                grown,
                _counted(analysis, share, averaged),
                share.step,
                _places(analysis, np.array(share.backwards[:1]))[0],
            )
        )
    return windows


def _averaged(
    analysis: LedgerAnalysis, share: WindowShare, optimizer: OptimizerHistory
) -> tuple[float, float]:
    """Return over how many ranks a window was averaged, and by how much more than the mean a hook left of it."""
    rows = analysis.shares.of(share.step)
    last = rows.backward == share.backwards[-1]
    ranks = 1 / float(rows.averaged[last].min(initial=1.0))
    syncs = optimizer.between(analysis.at("sync"), share.backwards[-1], share.step)
    syncs = optimizer.changing(syncs)
    if ranks < 2 or not syncs.size or analysis.armed[share.backwards[-1]] is None:
        return ranks, 1.0
    grad = analysis.ledger.grad[:, optimizer.columns]
    before = float(np.nansum(grad[share.backwards[-1]]))
    after = float(np.nansum(grad[syncs[-1]]))
    return ranks, after / before if before > 0 else 1.0


def _counted(analysis: LedgerAnalysis, share: WindowShare, ranks: float) -> int:
    """Return whether a loss may have been divided by a number of all ranks: of micro-batches 1, of elements 2."""
    by = divisor(analysis, share) if analysis.alone(share) and share.even else 0
    if by > 2 and by == share.many * round(ranks):
        return 1
    # Multiplied by the number of ranks as well, what is left was chosen.
    constants = analysis.term(share).get("constants")
    several = constants if isinstance(constants, list) else []
    multiplied = any(abs(number(one)) > 1 for one in several)
    return 0 if share.mean or multiplied else 2


def ddp_unsynced_step(ranks: Sequence[RankSummary]) -> Iterator[Finding]:
    """Find a step that reads what no rank has shared with the others."""
    every = [optimizer for rank in ranks for optimizer in rank.optimizers]
    told: set[tuple[Any, ...]] = set()
    for mine in every:
        # A loop that never shares gradients, and never meant to, averages weights (LocalSGD).
        unsynced = [one for one in mine.unsynced if one.meant or mine.synced]
        unsynced = [one for one in unsynced if _differ(mine, every, one.order)]
        if unsynced:
            finding = unsynced[0].finding
            yield replace(finding, times=len(unsynced), rank=mine.rank)
        elif mine.never_shared is not None and mine.settings not in told:
            told.add(mine.settings)  # once for all ranks
            if _come_apart(mine, every):
                yield replace(mine.never_shared, rank=mine.rank)


def _come_apart(mine: OptimizerSummary, every: list[OptimizerSummary]) -> bool:
    """Whether the gradients of ranks that share nothing differ at every step."""
    others = [
        other
        for other in every
        if other.rank != mine.rank and other.settings == mine.settings
    ]
    if not others or any(other.never_shared is None for other in others):
        return False
    steps = min(len(other.norms) for other in (mine, *others))
    return steps > 1 and all(_differ(mine, every, order) for order in range(steps))


def _differ(mine: OptimizerSummary, every: list[OptimizerSummary], order: int) -> bool:
    """Whether the ranks' gradients differ at their steps of one number; True where only one rank is known."""
    others = [
        other.norms[order]
        for other in every
        if other.rank != mine.rank
        and other.columns == mine.columns
        and order < len(other.norms)
    ]
    return not others or any(
        not np.allclose(mine.norms[order], norms, rtol=1e-5, equal_nan=True)
        for norms in others
    )


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
    # Where both of them wait for others, the one that has less is not waited for in vain.
    if least in cut and not {most, least} <= waited:
        return
    yield _finding(
        "uneven-rank-backwards",
        "error",
        synced[most][counts[least]],
        rank=most,
        evidence={
            f"synchronised backwards of rank {r}": many
            for r, many in sorted(counts.items())
        },
        cause=(
            f"Rank {most} synchronises {counts[most]} backwards and rank {least} only {counts[least]}: the "
            "one more waits for an answer that never comes."
        ),
    )


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
        # One that never steps may be sent the weights of one that does.
        never = not least.steps
        how = (
            "never does, after a backward that both have synchronised: unless it is sent the weights, they differ."
            if never
            else "does not, after a backward that both have synchronised: from then on their weights differ."
        )
        yield _finding(
            "uneven-rank-backwards",
            "note" if never else "error",
            extra[0],
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
    losses: dict[tuple[int, str], list[list[RankWindow]]] = {}
    for windows in _compared_windows(ranks):
        optimizer, _, name = windows[0].kind
        losses.setdefault((optimizer, name), []).append(windows)
    for every in losses.values():
        whole = [windows for windows in every if _is_whole_over_ranks(windows)]
        # A hook may add up what ranks have: then more is left than there was on average.
        grown = max(window.grown for windows in every for window in windows)
        if len(whole) < 2 or 2 * len(whole) < len(every) or grown > 1 + SAME:
            continue
        if _counted_over_ranks(whole):
            yield _divided_by_all(whole)


def _counted_over_ranks(whole: list[list[RankWindow]]) -> bool:
    """Whether losses were divided by a count of all ranks, and not by a weight."""
    counted = {min(window.counted for window in windows) for windows in whole}
    uneven = sum(len({w.elements for w in windows}) > 1 for windows in whole)
    # The same on ranks with other numbers of elements is divided by all of them.
    return counted == {1} or (counted == {2} and uneven > 1)


def _divided_by_all(whole: list[list[RankWindow]]) -> Finding:
    windows, many = whole[0], len(whole[0])
    # Half a loss is a choice that people make.
    half = many == 2 and windows[0].counted == 1
    unless = "Unless a half is meant, the" if half else "The"
    return _finding(
        "wrong-divisor",
        "note" if half else "warning",
        windows[0].place,
        step=windows[0].step,
        rank=windows[0].rank,
        evidence={
            "weight per element, before the average": windows[0].least,
            "elements on each rank": [window.elements for window in windows],
            "sum of shares of all ranks": 1 / many,
        },
        cause=(
            f"Each loss is divided by what {many} ranks have together, and the average over the ranks divides by "
            f"{many} again: the step reads 1/{many} of the gradient of one large batch. {unless} loss has to be "
            "multiplied by the number of ranks."
        ),
        times=len(whole),
    )


def _is_whole_over_ranks(windows: list[RankWindow]) -> bool:
    """Whether the shares of all ranks together, before the average, add up to 1."""
    weights = [window.least for window in windows]
    total = sum(window.least * window.elements for window in windows)
    return bool(is_close(min(weights), max(weights)) and is_close(total, 1.0))


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
    yield _finding(
        "rank-token-weight",
        "warning" if 2 * len(odd) >= len(every) else "note",
        windows[0].place,
        step=windows[0].step,
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
