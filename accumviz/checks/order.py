"""Rules about the order of events: clips, averages and schedulers in the wrong place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from accumviz.checks.analysis import LedgerAnalysis, OptimizerHistory, is_close
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import calling_line, moved_above, moved_below
from accumviz.ledger.events import Event
from accumviz.ledger.flow import SAME, SAME_IN_HALF, number


def lines_of(
    analysis: LedgerAnalysis, event: int, step: int, *others: int
) -> tuple[Event, Event]:
    """Return an event at the line that leads to it alone, and the step at its own line there."""
    at, end, *rest = (analysis.ledger[e] for e in (event, step, *others))
    return calling_line(at, end, *rest), calling_line(end, at)


def clip_per_micro_batch(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a clip between the backwards of one window, which shortens what is there already."""
    for optimizer in analysis.optimizers if analysis.at("clip").size else ():
        clips = [
            (clip, step)
            for step, backwards in optimizer.full_windows.items()
            for clip in _clips_inside(analysis, optimizer, step, backwards)
        ]
        if not clips:
            continue
        clip, step = clips[0]
        window = optimizer.windows[step]
        at, end = lines_of(analysis, clip, step, window[0], window[-1])
        rows = analysis.shares.of(step)
        mine = (rows.optimizer == optimizer.optimizer) & ~rows.erased
        yield analysis.finding(
            "clip-per-micro-batch",
            "error",
            clip,
            step=step,
            evidence={
                "clips between them multiply by": [
                    optimizer.clip_ratio(c) for c, s in clips if s == step
                ],
                "left of each backward": rows.clipped[mine].tolist(),
            },
            cause=(
                "The sum is clipped after each backward, so that what came early is shortened again and again, and the "
                "last micro-batch counts most."
            ),
            suggestion=moved_above(at, end),
            times=len(clips),
            optimizer=optimizer.optimizer,
            at=at,
        )
    yield from _shortened_by_hand(analysis)


def _clips_inside(
    analysis: LedgerAnalysis,
    optimizer: OptimizerHistory,
    step: int,
    backwards: list[int],
) -> list[int]:
    """Return the clips between backwards of one window that shortened what the step reads."""
    since = max(backwards[0], optimizer.previous_step(step))
    clips = optimizer.between(analysis.at("clip"), since, backwards[-1]).tolist()
    return [clip for clip in clips if optimizer.clip_ratio(clip) < 1 - SAME]


def _shortened_by_hand(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a clip in code of the user's own: by another factor each time, so that it is no decay that is meant."""
    for shares in analysis.objectives.values():
        ratios = analysis.fading(shares)
        if not ratios or is_close(min(ratios), max(ratios), SAME_IN_HALF):
            continue
        share = next(s for s in shares if s.many > 1 and not is_close(s.least, s.most))
        yield analysis.finding_of(
            "clip-per-micro-batch",
            "error",
            share,
            evidence={"shares": list(share.weights), "sum of shares": share.total},
            cause=(
                "`.grad` is shortened by hand after each backward, so that what came early is shortened again and "
                "again, and the last micro-batch counts most."
            ),
            times=sum(share.many > 1 for share in shares),
        )


def clip_on_the_wrong_side(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a clip of gradients that the step has already read, or that are not averaged yet."""
    late: dict[int, list[int]] = {}
    for clip in analysis.at("clip").tolist():
        owner = _reads_too_late(analysis, clip)
        if owner is not None:
            late.setdefault(owner, []).append(clip)
    for optimizer in analysis.optimizers:
        clips = late.get(optimizer.optimizer)
        if clips:
            yield _after_the_step(
                analysis,
                optimizer,
                "clip-on-the-wrong-side",
                clips,
                "The clip comes after the step, which has read the gradients as they were: it has no effect.",
            )
        yield from _before_the_average(analysis, optimizer)


def _reads_too_late(analysis: LedgerAnalysis, clip: int) -> int | None:
    """Return the first optimizer of those that a clip concerns, where nothing has come since any of their steps."""
    event = analysis.ledger[clip]
    by_norm = event.details.get("by") != "value"
    most = number(event.details.get("max_norm", 0.0))
    if by_norm and not math.isfinite(most):
        return None  # a clip to infinity measures, and changes nothing
    on_rank = [o for o in analysis.optimizers if event.rank in (None, o.rank)]
    # Where it changed nothing, nothing may be there for any of them.
    concerned = [o for o in on_rank if o.changed_by(clip)] or on_rank
    if concerned and all(o.nothing_since_step(clip) for o in concerned):
        return concerned[0].optimizer
    return None


def _after_the_step(
    analysis: LedgerAnalysis,
    optimizer: OptimizerHistory,
    rule: str,
    events: list[int],
    cause: str,
) -> Finding:
    """Return the finding about what belongs between the last backward and the step, and comes after it."""
    event = events[0]
    step = optimizer.previous_step(event)
    before = optimizer.backwards[optimizer.backwards < step][-1:].tolist()
    at, end = lines_of(analysis, event, step, *before)
    return analysis.finding(
        rule,
        "error",
        event,
        step=step,
        evidence={
            "event of the step": step,
            "event after it": event,
            "backwards between them": 0,
        },
        cause=cause,
        suggestion=moved_above(at, end),
        times=len(events),
        optimizer=optimizer.optimizer,
        at=at,
    )


def _before_the_average(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a clip of what one rank has, before the gradients of all ranks are reduced by hand."""
    reductions = analysis.events.detail("reduction", "").astype(str)
    reduced = np.flatnonzero(np.isin(reductions, ("sum", "avg")))
    if not reduced.size:
        return
    early = []
    for clip in optimizer.changing(analysis.at("clip")).tolist():
        until = min(optimizer.next_step(clip), optimizer.next_backward(clip))
        after = optimizer.changing(reduced[(reduced > clip) & (reduced < until)])
        if after.size and optimizer.clip_ratio(clip) < 1 - SAME:
            early.append((clip, int(after[0])))
    for clip, sync in early[:1]:
        step = optimizer.next_step(clip)
        yield analysis.finding(
            "clip-on-the-wrong-side",
            "warning",
            clip,
            step=step if step < len(analysis.events) else None,
            evidence={"event of the clip": clip, "event of the all-reduce": sync},
            cause=(
                "The clip comes before the gradients are reduced over the ranks: each rank has shortened its own "
                "by another factor, and what the step reads was not clipped as a whole."
            ),
            times=len(early),
            optimizer=optimizer.optimizer,
        )


def averaged_after_the_step(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find gradients that are averaged over the ranks when every step has read them already."""
    syncs = analysis.at("sync")
    for optimizer in analysis.optimizers if syncs.size and not analysis.single else ():
        mine = optimizer.changing(syncs).tolist()
        if not mine or not all(optimizer.nothing_since_step(sync) for sync in mine):
            continue
        windows = list(optimizer.full_windows)
        steps = {optimizer.previous_step(sync) for sync in mine}
        # What is not zeroed afterwards is read by the next step; after the last one nothing may be left to do.
        kept = len(set(optimizer.read.tolist())) < optimizer.read.size
        if kept or len(steps & set(windows)) < 2 or not steps.issuperset(windows[:-1]):
            continue
        firsts = {optimizer.previous_step(sync): sync for sync in reversed(mine)}
        events = [firsts[step] for step in windows if step in firsts]
        yield _after_the_step(
            analysis,
            optimizer,
            "ddp-unsynced-step",
            events,
            "The gradients are averaged over the ranks after the step, which has read what each rank had for "
            "itself: it has no effect.",
        )


def scheduler_per_micro_batch(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a learning-rate scheduler that steps with each backward, where the optimizer steps with each window."""
    every = analysis.at("schedule")
    for optimizer in analysis.optimizers:
        schedules = every[analysis.optimizer_of[every] == optimizer.optimizer]
        windows = {s: used for s, used in optimizer.windows.items() if len(used) > 1}
        steps = [
            step
            for step, used in windows.items()
            if all(optimizer.between(schedules, *pair).size for pair in pairwise(used))
        ]
        if not schedules.size or 2 * len(steps) <= len(windows):
            continue
        rates = [_rate(analysis.detail(e, "lr")) for e in schedules.tolist()]
        first = int(schedules[schedules > windows[steps[0]][0]][0])
        # OneCycleLR takes one step more than it has rates for.
        made_for_as_many = _comes_to_nothing(rates) or _comes_to_nothing(rates[:-1])
        if made_for_as_many or _is_told_where(analysis.ledger[first]):
            continue
        at, end = lines_of(analysis, first, steps[0], windows[steps[0]][0])
        yield analysis.finding(
            "scheduler-per-micro-batch",
            "error",
            first,
            step=steps[0],
            evidence={
                "scheduler steps": int(schedules.size),
                "optimizer steps": int(optimizer.steps.size),
                "backwards": int(optimizer.backwards.size),
                "learning rates": rates[:8],
            },
            cause=(
                f"The scheduler steps with every micro-batch, {schedules.size} times for {optimizer.steps.size} "
                "optimizer steps: the learning rate changes that much too fast."
            ),
            suggestion=moved_below(at, end),
            times=len(steps),
            optimizer=optimizer.optimizer,
            at=at,
        )


def _rate(rates: Any) -> float:
    """Return the first group's learning rate."""
    several = isinstance(rates, list | tuple) and rates
    return number(rates[0]) if several else math.nan


def _comes_to_nothing(rates: list[float]) -> bool:
    """Whether a schedule comes to almost nothing with its last step: then it was made for as many.

    What falls by the same ratio each time comes to nothing at any time.

    >>> _comes_to_nothing([0.1, 0.2, 0.15, 0.1, 0.05, 0.0]), _comes_to_nothing([0.1, 0.01, 0.001, 0.0001])
    (True, False)
    """
    highest = max(rates, default=0.0)
    if highest not in rates:
        return False
    fall = rates[-1 - rates[::-1].index(highest) :]
    if len(fall) < 3 or not all(later < early for early, later in pairwise(fall)):
        return False
    middle, last = fall[len(fall) // 2], fall[-1]
    return last < 0.01 * highest and middle * middle > 4 * highest * last


def _is_told_where(event: Event) -> bool:
    """Whether a scheduler was told where it is, as in `step(epoch + i / n)`, so that its steps do not count."""
    call = re.search(rf"{re.escape(event.label)}\.step\(\s*[^\s)#]", event.source)
    return call is not None and event.details.get("scheduler") != "ReduceLROnPlateau"
