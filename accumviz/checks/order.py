"""Rules about the order of one window: clips, the gradient scaler and schedulers in the wrong place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from accumviz.checks.analysis import (
    LedgerAnalysis,
    OptimizerHistory,
    between,
    for_each_optimizer,
    is_close,
)
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import calling_line
from accumviz.ledger.events import CHANGED, PRESENT, Event
from accumviz.ledger.flow import SAME, number

# Of a scaler that begins too high, so few steps are skipped.
_AGAIN = 3


def lines_of(
    analysis: LedgerAnalysis, event: int, step: int, *others: int
) -> tuple[Event, Event]:
    """Return an event at the line that leads to it alone, and the step at its own line there."""
    at, end, *rest = (analysis.ledger[e] for e in (event, step, *others))
    return calling_line(at, end, *rest), calling_line(end, at)


# --- clips ------------------------------------------------------------------------------------


@for_each_optimizer
def clip_per_micro_batch(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a clip between the backwards of one window, which shortens what is there already."""
    every = {step: _clips_inside(optimizer, step) for step in optimizer.full_windows}
    clips = {step: inside for step, inside in every.items() if inside}
    if not clips:
        return
    step, inside = next(iter(clips.items()))
    clip = inside[0]
    window = optimizer.waiting(step)
    at, end = lines_of(analysis, clip, step, window[0], window[-1])
    rows = analysis.shares.of(step)
    mine = (rows.optimizer == optimizer.optimizer) & ~rows.erased
    ratios = [optimizer.clip_ratio(c) for c in inside]
    yield analysis.finding(
        "error",
        clip,
        step=step,
        evidence={
            "clips between them multiply by": ratios,
            "left of each backward": rows.clipped[mine].tolist(),
        },
        cause=(
            "The sum is clipped after each backward, so that what came early is shortened again and again, and the "
            "last micro-batch counts most."
        ),
        suggestion=analysis.code.moved_above(at, end),
        times=sum(map(len, clips.values())),
        at=at,
    )


def _clips_inside(optimizer: OptimizerHistory, step: int) -> list[int]:
    """Return the clips that shorten something between the backwards of a step."""
    backwards = optimizer.waiting(step)
    if not backwards:
        return []
    since = max(backwards[0], optimizer.previous_step(step))
    inside = optimizer.changing_between("clip", since, backwards[-1]).tolist()
    return [c for c in inside if optimizer.clip_ratio(c) < 1 - SAME]


@for_each_optimizer
def clip_on_the_wrong_side(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a clip of gradients that the step has already read."""
    late: dict[int, list[int]] = {}
    for clip in analysis.at("clip").tolist():
        owner = _reads_too_late(analysis, clip)
        if owner is not None:
            late.setdefault(owner, []).append(clip)
    clips = late.get(optimizer.optimizer)
    if not clips:
        return
    clip, step = clips[0], optimizer.previous_step(clips[0])
    before = optimizer.backwards[optimizer.backwards < step][-1:].tolist()
    at, end = lines_of(analysis, clip, step, *before)
    yield analysis.finding(
        "error",
        clip,
        step=step,
        evidence={"event of the step": step, "event of the clip": clip},
        cause="The clip comes after the step, which has read the gradients as they were: it has no effect.",
        suggestion=analysis.code.moved_above(at, end),
        times=len(clips),
        at=at,
    )


def _reads_too_late(analysis: LedgerAnalysis, clip: int) -> int | None:
    """Return the first optimizer of those that a clip concerns, where nothing has come since any of their steps."""
    event = analysis.ledger[clip]
    if _only_measures(event):
        return None
    on_rank = [o for o in analysis.optimizers if event.rank in (None, o.rank)]
    concerned = [o for o in on_rank if o.changed_by(clip)]
    changed = analysis.ledger.state[clip] & CHANGED
    # Where it changed nothing, nothing may be in `.grad` of any of them. What it changed may be handed to an optimizer.
    if not changed.any():
        concerned = on_rank
    if concerned and all(o.nothing_since_step(clip) for o in concerned):
        return concerned[0].optimizer
    return None


def _only_measures(event: Event) -> bool:
    """Return whether a clip is to infinity, and changes nothing."""
    most = number(event.details.get("max_norm", 0.0))
    return event.details.get("by") != "value" and not math.isfinite(most)


def clip_of_nothing(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a line that clips no parameter at all, each time, while there are gradients."""
    clips = analysis.at("clip")
    empty = analysis.events.detail("of_nothing", default=False)[clips]
    lines = analysis.events.column("line")[clips]
    for line in np.unique(lines[empty]).tolist():
        event, *others = clips[lines == line].tolist()
        present = analysis.ledger.state[event] & PRESENT
        if not empty[lines == line].all() or not present.any():
            continue
        yield analysis.finding(
            "note",
            event,
            evidence={"max_norm": analysis.detail(event, "max_norm") or "?"},
            cause=(
                "The clip is given no parameters, and nothing is clipped: `filter`, `map` and generators can be read "
                "once, and the optimizer or an earlier clip has read this one. Make a list of it."
            ),
            times=1 + len(others),
        )


# --- the scaler -------------------------------------------------------------------------------


def _scaled(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> np.ndarray:
    """Return the backwards whose loss the scaler had multiplied by something else than 1."""
    scales = analysis.events.detail("amp_scale", 1.0)
    scaled: np.ndarray = optimizer.backwards[scales[optimizer.backwards] != 1]
    return scaled


@for_each_optimizer
def clip_scaled_grads(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a clip of gradients that the scaler has not unscaled yet."""
    scaled = _scaled(analysis, optimizer)
    clips = optimizer.changing(analysis.at("clip")).tolist() if scaled.size else []
    early = [c for c in clips if _clips_scaled(analysis, optimizer, scaled, c)]
    if not early:
        return
    clip = early[0]
    steps = np.sort(np.concatenate([optimizer.steps, optimizer.skipped]))
    after = steps[steps > clip][:1].tolist()
    scale = _scale(analysis, scaled, clip)
    # What is clipped more than once in a window cannot be unscaled each time.
    once = bool(after) and sum(c < after[0] for c in early) == 1
    yield analysis.finding(
        "error",
        clip,
        step=after[0] if after else None,
        evidence={
            "scale": scale,
            "max_norm": analysis.ledger[clip].details.get("max_norm", "?"),
            "the clip multiplies by": optimizer.clip_ratio(clip),
        },
        cause=(
            f"The clip sees gradients that are still multiplied by {scale:g}; after the division, next to nothing "
            "is left."
        ),
        suggestion=_unscaled_above(analysis, clip, after[0]) if once else "",
        times=len(early),
    )


def _unscaled_above(analysis: LedgerAnalysis, clip: int, step: int) -> str:
    """Suggest to unscale above a clip, with the names that the step's line has."""
    call = re.search(r"([\w.]+)\.step\(\s*([\w.]+)", analysis.ledger[step].source)
    line = "scaler.unscale_(optimizer)"
    if call is not None:
        line = f"{call[1]}.unscale_({call[2]})"
    return analysis.code.added_above(analysis.ledger[clip], line)


def _scale(analysis: LedgerAnalysis, scaled: np.ndarray, event: int) -> float:
    """Return the scale of the last backward before an event."""
    last = scaled[scaled < event][-1:].tolist()
    return number(analysis.detail(last[0], "amp_scale")) if last else math.nan


def _clips_scaled(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, scaled: np.ndarray, clip: int
) -> bool:
    """Return whether a clip shortened gradients of this window that nothing had unscaled."""
    since = optimizer.previous_step(clip)
    inside = between(scaled, since, clip)
    if not inside.size or optimizer.clip_ratio(clip) >= 1 - SAME:
        return False
    # The limit may be as many times larger.
    if "get_scale" in analysis.ledger[clip].source:
        return False
    unscales = optimizer.changing_between("unscale", since, clip)
    # A hand may have unscaled.
    edits = optimizer.changing_between("edit", int(inside[-1]), clip)
    return not (unscales.size or edits.size)


@for_each_optimizer
def backward_after_unscale(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a scaled contribution added to a sum that is unscaled already."""
    scaled = set(_scaled(analysis, optimizer).tolist())
    late = []
    for step, window in optimizer.full_windows.items():
        # What an earlier step has unscaled and left is another mistake.
        since = max(window[0], optimizer.previous_step(step))
        inside = optimizer.changing_between("unscale", since, step).tolist()
        after = [b for b in window if inside and b > inside[0] and b in scaled]
        if after:
            late.append((after[0], inside, step))
    if not late:
        return
    b, inside, step = late[0]
    scale = number(analysis.detail(b, "amp_scale"))
    at, end = lines_of(analysis, inside[0], step, b)
    yield analysis.finding(
        "error",
        inside[0],
        step=step,
        evidence={
            "event of the unscale": inside[0],
            "event of the backward after it": b,
            "scale": scale,
        },
        cause=(
            f"Backward {b} comes after `unscale_`: it is not unscaled, or those before it are unscaled twice. "
            "Unscale once, before the step."
        ),
        # An `update` that stands between two of them belongs to the step as well.
        suggestion=analysis.code.moved_above(at, end) if len(inside) == 1 else "",
        times=len(late),
        at=at,
    )


@for_each_optimizer
def scaler_updated_between_steps(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find gradients that were scaled by one factor, and unscaled by another."""
    scales = analysis.events.detail("amp_scale", 1.0)
    scaled = _scaled(analysis, optimizer)
    changed = []
    for step, window in optimizer.full_windows.items():
        unscales = optimizer.changing_between("unscale", window[0], step)
        for b in np.intersect1d(window, scaled).tolist():
            if unscales.size and not is_close(scales[b], scales[unscales[0]]):
                changed.append((b, int(unscales[0]), step))
    if not changed:
        return
    b, unscale, step = changed[0]
    yield analysis.finding(
        "error",
        unscale,
        step=step,
        evidence={
            "event of the backward": b,
            "scaled by": float(scales[b]),
            "unscaled by": float(scales[unscale]),
        },
        cause=(
            f"Backward {b} was scaled by {scales[b]:g}, and its gradients are divided by {scales[unscale]:g}: "
            "`scaler.update()` ran in between. Call it once, after all steps."
        ),
        times=len({step for _, _, step in changed}),
    )


# --- schedulers -------------------------------------------------------------------------------


@for_each_optimizer
def scheduler_per_micro_batch(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a learning-rate scheduler that steps with each backward, where the optimizer steps with each window."""
    schedules, steps = _stepped_too_often(analysis, optimizer)
    if not steps or _comes_to_nothing(analysis, schedules):
        return
    window = optimizer.windows[steps[0]]
    first = int(schedules[schedules > window[0]][0])
    at, end = lines_of(analysis, first, steps[0], window[0])
    yield analysis.finding(
        "error",
        first,
        step=steps[0],
        evidence={
            "scheduler steps": int(schedules.size),
            "optimizer steps": int(optimizer.steps.size),
            "backwards": int(optimizer.backwards.size),
            "learning rates": _rates(analysis, schedules)[:8],
        },
        cause=(
            f"The scheduler steps with every micro-batch, {schedules.size} times for {optimizer.steps.size} "
            "optimizer steps: the learning rate changes that much too fast."
        ),
        suggestion=analysis.code.moved_below(at, end),
        times=len(steps),
        at=at,
    )


def conditions(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say what has to be meant for a healthy loop to be so: a schedule that was made for as many micro-batches."""
    for optimizer in analysis.optimizers:
        schedules, steps = _stepped_too_often(analysis, optimizer)
        if steps and _comes_to_nothing(analysis, schedules):
            yield "a schedule of the micro-batches is meant"
        idle = _after_skipped_steps(optimizer, schedules)
        if idle >= _AGAIN:
            yield f"a schedule that moves on with {idle} steps that the scaler skipped is meant"


def _schedules(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> np.ndarray:
    """Return the steps of an optimizer's scheduler."""
    every = analysis.at("schedule")
    index = analysis.events.detail("optimizer_index", 0)[every]
    mine: np.ndarray = every[index == optimizer.optimizer]
    return mine


def _after_skipped_steps(optimizer: OptimizerHistory, schedules: np.ndarray) -> int:
    """Count the steps of a scheduler since the last of which the scaler skipped all steps."""
    idle = 0
    for pair in pairwise([-1, *schedules.tolist()]):
        skipped = between(optimizer.skipped, *pair)
        taken = between(optimizer.steps, *pair)
        idle += skipped.size > 0 and not taken.size
    return idle


def _stepped_too_often(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> tuple[np.ndarray, list[int]]:
    """Return a scheduler's steps, and the steps of most windows between whose backwards it steps; else none."""
    schedules = _schedules(analysis, optimizer)
    windows = {s: used for s, used in optimizer.windows.items() if len(used) > 1}
    steps = [s for s in windows if _between_all(schedules, windows[s])]
    most = schedules.size and 2 * len(steps) > len(windows)
    if not most or _is_given_its_place(analysis.ledger[int(schedules[0])]):
        return schedules, []
    return schedules, steps


def _between_all(schedules: np.ndarray, window: list[int]) -> bool:
    """Return whether a scheduler steps between any two backwards of a window."""
    return all(between(schedules, *pair).size for pair in pairwise(window))


def _rates(analysis: LedgerAnalysis, schedules: np.ndarray) -> list[float]:
    """Return the first group's learning rate after each of these events."""
    every = [analysis.detail(event, "lr") for event in schedules.tolist()]
    return [number(rates[0]) for rates in every if isinstance(rates, list) and rates]


def _comes_to_nothing(analysis: LedgerAnalysis, schedules: np.ndarray) -> bool:
    """Return whether the rate comes to almost nothing at the end alone: the schedule may have been made for as many."""
    rates = _rates(analysis, schedules)
    almost_nothing = 0.01 * max(rates, default=0.0)
    low = [rate < almost_nothing for rate in rates]
    # OneCycleLR takes one step more than it has rates for, and a cosine is low for a twentieth of its steps.
    return any(low[-2:]) and sum(low) <= 2 + 0.1 * len(low)


def _is_given_its_place(event: Event) -> bool:
    """Return whether a scheduler is given where it is, as in `step(epoch + i / n)`, so that its steps do not count."""
    call = re.search(rf"{re.escape(event.label)}\.step\(\s*[^\s)#]", event.source)
    return call is not None and event.details.get("scheduler") != "ReduceLROnPlateau"
