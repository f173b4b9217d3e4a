"""Rules about several processes: what is synchronised and when, and ranks that come apart.

What compares ranks needs a few numbers of each, so that one ledger is in memory at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from accumviz.checks.analysis import (
    Conditions,
    LedgerAnalysis,
    OptimizerHistory,
    for_each_optimizer,
    is_close,
)
from accumviz.checks.report import Finding, Findings
from accumviz.ledger.events import PRESENT
from accumviz.ledger.flow import number

Key = TypeVar("Key")
Value = TypeVar("Value")
# What several ranks have, and the norm of a clip, are rounded more than what one rank has.
_SAME_WEIGHT, _SAME_NORM = 1e-2, 1e-4

# --- one process of several -------------------------------------------------------------------


@for_each_optimizer
def no_sync_excludes_forward(optimizer: OptimizerHistory) -> Findings:
    """Find a `no_sync` around the backward alone, which synchronises all the same."""
    no_sync = optimizer.events.detail("no_sync", None)
    armed = optimizer.events.detail("armed", None)
    quiet = [b for b in optimizer.backwards.tolist() if no_sync[b] is True]
    synced = [b for b in quiet if armed[b] is True]
    if not synced:
        return
    yield optimizer.finding(
        "warning",
        synced[0],
        evidence={
            "backwards in no_sync": len(quiet),
            "line of the forward": optimizer.detail(synced[0], "armed_line") or "none",
        },
        cause=(
            "A forward outside `no_sync` armed the all-reduce, and this backward is synchronised in `no_sync`: "
            "right, but as slow as without it. A forward that has no backward belongs in `torch.no_grad`."
        ),
        times=len(synced),
    )


@for_each_optimizer
def ddp_unsynced_step(optimizer: OptimizerHistory) -> Findings:
    """Find a step that reads what its rank has shared with no other."""
    if not _is_replicated(optimizer):
        return
    unsynced, averaged = _unsynced(optimizer)
    # A loop that never shares gradients, and never meant to, averages weights (LocalSGD).
    wrong = {
        step: late
        for step, late in unsynced.items()
        if averaged or _was_meant(optimizer, late[-1])
    }
    if not wrong:
        return
    step, late = next(iter(wrong.items()))
    b = late[-1]
    yield optimizer.finding(
        "error",
        b,
        step=step,
        evidence={
            "backwards not averaged": late,
            "line of the forward": optimizer.detail(b, "armed_line") or "none",
        },
        cause=f"The step reads gradients that were not averaged over the ranks: {_why_unsynced(optimizer, b)}",
        times=len(wrong),
    )


@for_each_optimizer
def summed_over_ranks(optimizer: OptimizerHistory) -> Findings:
    """Find gradients that a script sums over all ranks, and that nothing divides by their number."""
    ranks = optimizer.world_size
    reductions = optimizer.events.detail("reduction", "")
    sums = [e for e in optimizer.changing["sync"].tolist() if reductions[e] == "sum"]
    shares = [
        share for step in optimizer.windows for share in optimizer.shares_of(step)
    ]
    undivided = all(share.even and is_close(share.total, ranks) for share in shares)
    if not sums or not shares or not undivided:
        return
    yield optimizer.finding(
        "warning",
        sums[0],
        step=min(optimizer.windows),
        evidence={"ranks": ranks, "sum of shares": shares[0].total},
        cause=(
            f"`.grad` is summed over {ranks:g} ranks, and nothing divides by their number: the step reads {ranks:g} "
            "times the gradient of one large batch. Divide it, or reduce to a mean (`ReduceOp.AVG`)."
        ),
        times=len(optimizer.windows),
    )


def _why_unsynced(analysis: LedgerAnalysis, backward: int) -> str:
    if not _was_meant(analysis, backward):
        return "the last backward before it ran without synchronisation."
    if analysis.detail(backward, "armed"):
        return (
            "DDP was to average them, and did not. Its hooks are lost where parameters are moved or cast after it "
            "was made, and it waits for a gradient of every parameter."
        )
    if not analysis.detail(backward, "armed_line"):
        return "the wrapped model was never called, as where a forward goes through `model.module`."
    return "DDP averages only in the first backward after a forward outside `no_sync`, and this one is not."


def _was_meant(analysis: LedgerAnalysis, backward: int) -> bool:
    """Return whether a backward was to be synchronised: its flag was up, on a device whose collectives are seen."""
    devices = {parameter.device for parameter in analysis.parameters}
    seen = all(device.startswith(("cpu", "cuda")) for device in devices)
    armed = analysis.detail(backward, "armed")
    return analysis.detail(backward, "no_sync") is False and (seen or not armed)


def _unsynced(optimizer: OptimizerHistory) -> tuple[dict[int, list[int]], int]:
    """Return the steps that read what came after the last average, with that, and how many read averages."""
    armed = optimizer.events.detail("armed", None)
    unsynced = {}
    averaged = 0
    for step in optimizer.windows:
        rows = optimizer.consumed.of(step)
        late = rows.backward[(rows.averaged == 1) & ~rows.lost_sight]
        # Averaged too early, within the very window, is averaging that was meant.
        averaged += bool((rows.averaged < 1).any())
        if late.size and armed[late[-1]] is not None:
            unsynced[step] = np.unique(late).tolist()
    return unsynced, averaged


def fsdp2_zero_keeps_unsharded(analysis: LedgerAnalysis) -> Findings:
    """Find a zeroing that does not reach the sum that FSDP2 keeps elsewhere."""
    every = enumerate(analysis.parameters)
    whole = [p for p, parameter in every if parameter.unsharded_of]
    for zero in analysis.at["zero_grad"].tolist():
        stayed = [p for p in whole if _stays(analysis, zero, p)]
        if stayed:
            yield analysis.finding(
                "error",
                zero,
                evidence={
                    "unsharded gradients that stayed": analysis.names(stayed[:4])
                },
                cause=(
                    "`zero_grad` does not reach the whole gradients: what the backwards without sync have added to "
                    "them stays."
                ),
            )


def _stays(analysis: LedgerAnalysis, zero: int, p: int) -> bool:
    """Return whether a whole gradient is there before a zeroing, and still there at the next contribution.

    FSDP1 erases its sum in the forward that follows.
    """
    ledger = analysis.ledger
    present = ledger.state[:, p] & PRESENT > 0
    mine = ledger[zero].rank in (None, ledger.parameters[p].rank)
    if not mine or not zero or not present[zero - 1]:
        return False
    reached = analysis.contributed[:, p] & analysis.backward
    later = np.flatnonzero(reached[zero:])
    return later.size > 0 and bool(present[zero : zero + later[0]].all())


# --- what ranks say of themselves -------------------------------------------------------------


class RankWindow(NamedTuple):
    """One window of one rank, in which each element weighs the same before the average, and how many there are.

    `kind` says which window of which objective it is, so that the ranks' can be put together; `averaged`
    is over how many ranks.
    """

    kind: tuple[int, int, str]
    rank: int | None
    each: float
    elements: float
    averaged: float
    finding: Finding


# The place of an optimizer and of its clip, the limit, and what is to be said.
_Clip = tuple[int, int, float, str]


class RankSummary(NamedTuple):
    """The numbers of a ledger that the comparing rules need.

    `steps` has for the optimizers under DDP of the ranks that came to their end by themselves their place and how
    often they stepped: one that never steps may have been left behind by those that do. `norms` has for each of them
    its place and the norm of each step's gradient; none where they share no gradients on purpose. `clips` has the norm
    that each clip of shards took, `began` is that of the weights with which a rank began, NaN where it is not known.
    `losses` has for each of them its place and the loss of each backward.
    """

    windows: list[RankWindow]
    steps: list[tuple[int, int]]
    norms: list[tuple[int, list[float]]]
    clips: list[tuple[_Clip, float]]
    began: float
    losses: list[tuple[int, list[float]]]


def summarise(analysis: LedgerAnalysis, rank: int | None = None) -> RankSummary:
    """Say what a ledger has to say to others; `rank` is whose it is, where it is not that of several."""
    steps = []
    norms = []
    losses = []
    clips: list[tuple[_Clip, float]] = []
    for optimizer in analysis.every_optimizer:
        if analysis.is_sharded and analysis.world_size > 1:
            clips += _clips_of_shards(optimizer)
        if not (_is_replicated(optimizer) or _reduces_by_hand(optimizer)):
            continue
        norms.append((optimizer.place, _norms_of_steps(optimizer)))
        of_backwards = optimizer.events.column("loss")[optimizer.backwards]
        losses.append((optimizer.place, of_backwards.tolist()))
        if _has_finished(analysis, optimizer.rank if rank is None else rank):
            steps.append((optimizer.place, optimizer.steps.size))
    began = number(analysis.detail(0, "weights_norm"))
    return RankSummary(
        list(_windows(analysis, rank)), steps, norms, clips, began, losses
    )


def _clips_of_shards(optimizer: OptimizerHistory) -> Iterator[tuple[_Clip, float]]:
    """Return each clip with the norm that it took, NaN where that is not the norm of what this rank holds."""
    mine = [parameter.rank == optimizer.rank for parameter in optimizer.parameters]
    for order, clip in enumerate(optimizer.changing["clip"].tolist()):
        total = number(optimizer.detail(clip, "total_norm"))
        norms = optimizer.ledger.grad[clip - 1, mine]
        norm = float(np.linalg.norm(norms[np.isfinite(norms)].astype(float)))
        local = math.isclose(total, norm, rel_tol=_SAME_NORM)
        said = "a clip by the norm of one rank's shards alone is meant"
        most = number(optimizer.detail(clip, "max_norm"))
        key = optimizer.place, order, most, optimizer.placed(said, clip)
        yield key, norm if local else math.nan


def _norms_of_steps(optimizer: OptimizerHistory) -> list[float]:
    if _shares_nothing(optimizer):
        return []
    grads = optimizer.ledger.grad[np.ix_(optimizer.steps, optimizer.columns)]
    norms = np.linalg.norm(grads.astype(float), axis=1)
    every: list[float] = norms.tolist()
    return every


def _has_finished(analysis: LedgerAnalysis, rank: int | None) -> bool:
    """Return whether a rank's recording was closed with nothing raised."""
    ended = analysis.ledger.meta.get("ended")
    if isinstance(ended, Mapping):
        ended = ended.get(str(rank))
    return analysis.ledger.complete and ended in (None, "closed", "exit")


def _is_replicated(optimizer: OptimizerHistory) -> bool:
    """Return whether an optimizer's backwards run under DDP, with other ranks."""
    armed = optimizer.events.detail("armed", None)[optimizer.backwards].tolist()
    several = optimizer.ledger.meta.get("ranks") != 1
    return several and armed.count(None) < len(armed)


def _reduces_by_hand(optimizer: OptimizerHistory) -> bool:
    """Return whether an optimizer's gradients are summed or averaged over all ranks by the script itself."""
    syncs = optimizer.changing["sync"]
    reductions = optimizer.events.detail("reduction", "")[syncs].tolist()
    return "sum" in reductions or "mean" in reductions


def _windows(analysis: LedgerAnalysis, rank: int | None) -> Iterator[RankWindow]:
    """Return the windows whose elements weigh alike, each with what says which of the ranks' belong together."""
    owners = {optimizer.optimizer: optimizer for optimizer in analysis.optimizers}
    for (owner, _), shares in analysis.objectives.items():
        optimizer = owners[owner]
        for order, share in enumerate(shares):
            if share.averaged > 0.5 or not share.alike:
                continue
            first = share.backwards[0]
            yield RankWindow(
                (optimizer.place, order, analysis.objective(share)),
                optimizer.rank if rank is None else rank,
                share.each[0],
                sum(share.sizes),
                1 / share.averaged,
                analysis.finding(
                    "warning", first, step=share.step, cause="", evidence={}
                ),
            )


# --- ranks compared ---------------------------------------------------------------------------


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Put together what ranks say of the same thing."""
    of_keys: dict[Key, list[Value]] = defaultdict(list)
    for key, value in pairs:
        of_keys[key].append(value)
    return of_keys


def _compared_windows(ranks: Sequence[RankSummary]) -> list[list[RankWindow]]:
    """Return the windows that all ranks of one average have, of which each rank weighs its own elements alike."""
    every = chain.from_iterable(rank.windows for rank in ranks)
    kinds = _grouped((window.kind, window) for window in every)
    windows = [kinds[kind] for kind in sorted(kinds)]
    return list(filter(_can_be_compared, windows))


def _can_be_compared(windows: list[RankWindow]) -> bool:
    """Return whether these are the windows of all ranks that an average is over."""
    averaged = min(window.averaged for window in windows)
    return averaged == len(windows) > 1


def rank_token_weight(ranks: Sequence[RankSummary]) -> Findings:
    """Find ranks whose elements weigh differently, because each divides by its own count."""
    odd = list(filter(_differ, _compared_windows(ranks)))
    if not odd:
        return
    windows = sorted(odd[0], key=lambda window: window.rank or 0)
    weights = [window.each for window in windows]
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


def _differ(windows: list[RankWindow]) -> bool:
    """Return whether an element of one rank weighs more than one of another, where they have other numbers of them."""
    weights = [window.each for window in windows]
    uneven = len({window.elements for window in windows}) > 1
    alike = math.isclose(min(weights), max(weights), rel_tol=_SAME_WEIGHT)
    return uneven and not alike


# --- what has to be meant ---------------------------------------------------------------------


def conditions(analysis: LedgerAnalysis) -> Conditions:
    """Say what has to be meant for a rank to be healthy by itself."""
    if analysis.is_sharded or not analysis.world_size > 1:
        return
    for optimizer in analysis.optimizers:
        if _shares_nothing(optimizer):
            step = next(iter(optimizer.windows))
            yield "ranks that share no gradients are meant", optimizer.windows[step][0]


def _shares_nothing(optimizer: OptimizerHistory) -> bool:
    """Return whether several steps read no average. What is averaged after a step, and zeroed then, none has read."""
    syncs = optimizer.changing["sync"].tolist()
    in_vain = all(optimizer.nothing_since_step(sync) for sync in syncs)
    return in_vain and len(optimizer.windows) > 1


def conditions_of_ranks(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """Say what has to be meant for healthy ranks to be so together."""
    counts = set(chain.from_iterable(rank.steps for rank in ranks))
    norms = _grouped(chain.from_iterable(rank.norms for rank in ranks))
    losses = _grouped(chain.from_iterable(rank.losses for rank in ranks))
    # An optimizer that stepped differently often is in it more than once.
    if len(counts) > len(dict(counts)):
        yield "ranks that step a different number of times are meant"
    if any(map(_step_apart, norms.values())):
        yield "ranks that step on different gradients are meant"
    yield from _beyond_the_limit(ranks)
    if any(map(_are_the_same, losses.values())):
        yield "ranks that compute the same losses, as of the same samples, are meant"
    began = [rank.began for rank in ranks]
    if norms and max(began) > min(began) * (1 + _SAME_NORM):
        yield "ranks that begin with different weights are meant"
    windows = _compared_windows(ranks)
    if windows and all(map(_is_divided_by_ranks, windows)):
        yield f"a sum of 1/{len(windows[0])} over all ranks is meant in every step"


def _beyond_the_limit(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """Say which clips by norms of shards alone are beyond their limit by the norm of all ranks' shards."""
    clips = _grouped(chain.from_iterable(rank.clips for rank in ranks))
    for (_, _, most, said), norms in clips.items():
        if math.hypot(*norms) > most:
            yield said


def _are_the_same(losses: list[list[float]]) -> bool:
    """Return whether the losses of several optimizers in one place are the same, number by number."""
    # One loss or two may be the same by chance.
    return len(losses[0]) > 2 and losses.count(losses[0]) == len(losses) > 1


def _step_apart(norms: list[list[float]]) -> bool:
    """Return whether the norms of a step's gradients differ from one replica to another."""
    steps = zip(*norms, strict=False)
    return any(max(step) - min(step) > _SAME_WEIGHT * max(step) for step in steps)


def _is_divided_by_ranks(windows: list[RankWindow]) -> bool:
    """Return whether the shares of all ranks add up to 1 before the average, which divides by the ranks again."""
    return is_close(sum(w.each * w.elements for w in windows), 1.0)
