"""Rules about the order of one window: clips, the gradient scaler and schedulers in the wrong place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from accumviz.checks.analysis import (
    Conditions,
    LedgerAnalysis,
    OptimizerHistory,
    between,
    for_each_optimizer,
)
from accumviz.checks.report import Finding, Findings
from accumviz.checks.suggestions import calling_line
from accumviz.ledger.events import CHANGED, PRESENT, Event
from accumviz.ledger.flow import SAME, number
from accumviz.show import counted

# Of a scaler that begins too high, so few steps are skipped.
_AGAIN = 3


def _misplaced(
    analysis: LedgerAnalysis,
    event: int,
    step: int,
    *backwards: int,
    below: bool = False,
    **about: Any,
) -> Finding:
    """Return an error at the line that leads to an event alone; it is to stand above the step's own line, or below."""
    here, end, *others = (analysis.ledger[e] for e in (event, step, *backwards))
    at = calling_line(here, end, *others)
    end = calling_line(end, here)
    suggestion = analysis.code.moved(at, end, below=below)
    about = {"suggestion": suggestion, **about}
    return analysis.finding("error", event, step=step, at=at, **about)


# --- clips ------------------------------------------------------------------------------------


@for_each_optimizer
def clip_per_micro_batch(optimizer: OptimizerHistory) -> Findings:
    """Find a clip between the backwards of one window, which shortens what is there already."""
    every = {step: _clips_inside(optimizer, step) for step in optimizer.windows}
    clips = {step: inside for step, inside in every.items() if inside}
    if not clips:
        return
    step, inside = next(iter(clips.items()))
    window = optimizer.waiting(step)
    yield _misplaced(
        optimizer,
        inside[0],
        step,
        window[0],
        window[-1],
        evidence={
            "each clip inside the window multiplies by": list(
                map(optimizer.clip_ratio, inside)
            ),
        },
        cause=(
            "The sum is clipped inside its window, so that what came early is shortened more often than what comes "
            "last."
        ),
        times=sum(map(len, clips.values())),
    )


def _clips_inside(optimizer: OptimizerHistory, step: int) -> list[int]:
    """Return the clips that shorten something between the backwards of a step."""
    clips = optimizer.changing["clip"]
    backwards = optimizer.waiting(step) if clips.size else []
    if not backwards:
        return []
    since = max(backwards[0], optimizer.previous_step(step))
    inside = between(clips, since, backwards[-1])
    return [clip for clip in inside if optimizer.clip_ratio(clip) < 1 - SAME]


def clip_on_the_wrong_side(analysis: LedgerAnalysis) -> Findings:
    """Find a clip of gradients that the step has already read, or of others than the next step reads."""
    yield from _clip_after_its_step(analysis)
    for clip in _clips_in_vain(analysis):
        concerned = _concerned(analysis, clip)
        if concerned and not _reads_too_late(analysis, clip):
            columns = np.flatnonzero(analysis.ledger.state[clip] & CHANGED)
            yield analysis.finding(
                "warning",
                clip,
                evidence={"parameters that are clipped": analysis.names(columns)},
                cause=(
                    "The clip only shortens what a step has read already and no other step reads: it has no effect. "
                    "Clip what the next step reads."
                ),
                optimizer=concerned[0].optimizer,
            )


@for_each_optimizer
def _clip_after_its_step(optimizer: OptimizerHistory) -> Findings:
    every = optimizer.at["clip"].tolist()
    clips = [clip for clip in every if _reads_too_late(optimizer, clip) is optimizer]
    if not clips:
        return
    clip, step = clips[0], optimizer.previous_step(clips[0])
    before = optimizer.backwards[optimizer.backwards < step][-1:].tolist()
    yield _misplaced(
        optimizer,
        clip,
        step,
        *before,
        evidence={"event of the step": step},
        cause="The clip comes after the step, which has read the gradients as they were: it has no effect.",
        times=len(clips),
    )


def _clips_in_vain(analysis: LedgerAnalysis) -> list[int]:
    """Return the clips of lines that only shorten what one step has read already, and what no other step reads."""
    flow, clips = analysis.ledger.flow, analysis.at["clip"]
    changed = analysis.ledger.state[clips] & CHANGED > 0
    live, fresh = np.zeros((2, clips.size), bool)
    for history in flow.histories:
        # The step that reads what came last reads all that is there.
        last = history.born.searchsorted(clips) - 1
        born, end = (np.append(e, 0)[last] for e in (history.born, history.end))
        there = changed[:, history.parameters[0]] & (end > clips)
        _, consumed, steps = (each[born, history.number] for each in flow.fates)
        live |= there
        fresh |= there & ((steps != 1) | (consumed > clips))
    lines = analysis.sites[clips]
    in_vain: list[int] = clips[live & ~np.isin(lines, lines[fresh])].tolist()
    return in_vain


def clip_of_nothing(analysis: LedgerAnalysis) -> Findings:
    """Find a line that clips no parameter at all, each time, while there are gradients."""
    clips = analysis.at["clip"]
    empty = analysis.events.detail("of_nothing", default=False)[clips].astype(bool)
    lines = analysis.events.column("line")[clips]
    each_time = empty & ~np.isin(lines, lines[~empty])
    for event in clips[each_time].tolist():
        present = analysis.ledger.state[event] & PRESENT
        if present.any():
            yield analysis.finding(
                "note",
                event,
                evidence={},
                cause=(
                    "The clip is given no parameters, and nothing is clipped: `filter`, `map` and generators can be "
                    "read once, and the optimizer or an earlier clip has read this one. Make a list of it."
                ),
            )


def _reads_too_late(analysis: LedgerAnalysis, clip: int) -> OptimizerHistory | None:
    """Return the first optimizer of those that a clip concerns, where nothing has come since any of their steps."""
    concerned = _concerned(analysis, clip)
    late = all(o.nothing_since_step(clip) for o in concerned)
    return concerned[0] if concerned and late else None


def _concerned(analysis: LedgerAnalysis, clip: int) -> list[OptimizerHistory]:
    """Return the optimizers whose `.grad` a clip changed; all where there is none, as after a step that is zeroed."""
    event = analysis.ledger[clip]
    # A clip to infinity measures, and changes nothing.
    most = number(event.details.get("max_norm", 0.0))
    if event.details.get("by") != "value" and not math.isfinite(most):
        return []
    on_rank = [o for o in analysis.optimizers if event.rank in (None, o.rank)]
    # What it changed may be handed to an optimizer.
    if not (analysis.ledger.state[clip] & CHANGED).any():
        stepped = min((o.previous_step(clip) for o in on_rank), default=0)
        return [] if between(analysis.at["backward"], stepped, clip) else on_rank
    return [o for o in on_rank if o.changes[clip]]


# --- the scaler -------------------------------------------------------------------------------


def _scaled(optimizer: OptimizerHistory) -> dict[int, float]:
    """Return the backwards whose loss the scaler had multiplied by something else than 1, and by what."""
    scales = optimizer.events.detail("amp_scale", 1.0)
    backwards = optimizer.backwards
    scaled = backwards[scales[backwards] != 1]
    return dict(zip(scaled.tolist(), scales[scaled].tolist(), strict=True))


@for_each_optimizer
def clip_scaled_grads(optimizer: OptimizerHistory) -> Findings:
    """Find a clip of gradients that the scaler has not unscaled yet."""
    scaled = _scaled(optimizer)
    clips = optimizer.changing["clip"].tolist()
    early = [c for c in clips if _clips_scaled(optimizer, [*scaled], c)]
    if not early:
        return
    clip = early[0]
    steps = np.concatenate([optimizer.steps, optimizer.skipped])
    step = min(steps[steps > clip].tolist(), default=None)
    scale = scaled[max(b for b in scaled if b < clip)]
    yield optimizer.finding(
        "error",
        clip,
        step=step,
        evidence={
            "max_norm": optimizer.detail(clip, "max_norm") or "none, by value",
            "the clip multiplies by": optimizer.clip_ratio(clip),
        },
        cause=(
            f"The clip sees gradients that are still multiplied by {scale:g}; after the division, next to nothing "
            "is left. Unscale once, before the clip."
        ),
        suggestion=_unscaled_first(optimizer, early, step),
        times=len(early),
    )


def _unscaled_first(
    analysis: OptimizerHistory, clips: list[int], step: int | None
) -> str:
    """Suggest to unscale above a clip: move the line that does so, or add one with the names of the step's line.

    What is clipped more than once in a window cannot be unscaled each time.
    """
    clip, *others = clips
    if step is None or min(others, default=step) < step:
        return ""
    late = between(analysis.changing["unscale"], clip, step)
    # Without a call of its own, it is the scaler's step that unscales.
    if late and analysis.ledger[late[0]].line != analysis.ledger[step].line:
        unscale, place = analysis.ledger[late[0]], analysis.ledger[clip]
        return analysis.code.moved(unscale, place, below=False)
    call = re.search(r"([\w.]+)\.step\(\s*([\w.]+)", analysis.ledger[step].source)
    scaler, optimizer = call.groups() if call else ("scaler", "optimizer")
    line = f"{scaler}.unscale_({optimizer})"
    return analysis.code.added(analysis.ledger[clip], line)


def _clips_scaled(optimizer: OptimizerHistory, scaled: list[int], clip: int) -> bool:
    """Return whether a clip shortened gradients of this window that nothing had unscaled."""
    since = optimizer.previous_step(clip)
    inside = [b for b in scaled if since < b < clip]
    # The limit may be as many times larger.
    scaled_limit = "get_scale" in optimizer.ledger[clip].source
    if not inside or scaled_limit or optimizer.clip_ratio(clip) >= 1 - SAME:
        return False
    unscales = between(optimizer.changing["unscale"], since, clip)
    edits = between(optimizer.changing["edit"], inside[-1], clip)
    return not (unscales or any(_may_unscale(optimizer, edit) for edit in edits))


def _may_unscale(optimizer: OptimizerHistory, edit: int) -> bool:
    """Return whether a hand may have unscaled what is in `.grad`: it is less now, by half or more, or not known."""
    before, after = optimizer.ledger.grad[[edit - 1, edit]][:, optimizer.columns]
    return not np.nansum(after) > np.nansum(before) / 2


@for_each_optimizer
def backward_after_unscale(optimizer: OptimizerHistory) -> Findings:
    """Find a scaled contribution added to a sum that is unscaled already."""
    scaled = _scaled(optimizer)
    late = _added_late(optimizer, scaled)
    if not late:
        return
    b, inside, step = late[0]
    # An `update` that stands between two of them belongs to the step as well.
    several: dict[str, Any] = {"suggestion": ""} if len(inside) > 1 else {}
    yield _misplaced(
        optimizer,
        inside[0],
        step,
        b,
        evidence={"scale": scaled[b]},
        cause=(
            f"Backward {b} comes after `unscale_`: it is not unscaled, or those before it are unscaled twice. "
            "Unscale once, before the step."
        ),
        times=len(late),
        **several,
    )


def _added_late(
    optimizer: OptimizerHistory, scaled: dict[int, float]
) -> list[tuple[int, list[int], int]]:
    """Return the first scaled backward after an `unscale_` of its window, with all of these and the step."""
    late = []
    for step, window in optimizer.windows.items() if scaled else ():
        # What an earlier step has unscaled and left is another mistake.
        since = max(window[0], optimizer.previous_step(step))
        inside = between(optimizer.changing["unscale"], since, step)
        after = [b for b in window if inside and b > inside[0] and b in scaled]
        if after:
            late.append((after[0], inside, step))
    return late


# --- schedulers -------------------------------------------------------------------------------


@for_each_optimizer
def scheduler_per_micro_batch(optimizer: OptimizerHistory) -> Findings:
    """Find a learning-rate scheduler that steps with each backward, where the optimizer steps with each window."""
    schedules = _schedules(optimizer)
    steps = _stepped_too_often(optimizer, schedules)
    if not steps or _comes_to_nothing(optimizer, schedules):
        return
    step, backward = steps[0], optimizer.windows[steps[0]][0]
    yield _misplaced(
        optimizer,
        int(schedules[schedules > backward][0]),
        step,
        backward,
        below=True,
        evidence={"first learning rates": _rates(optimizer, schedules)[:8]},
        cause=(
            f"The scheduler steps with every micro-batch, {schedules.size} times for {optimizer.steps.size} "
            f"optimizer steps: the learning rate changes {schedules.size / optimizer.steps.size:.3g} times too fast."
        ),
        times=len(steps),
    )


@for_each_optimizer
def schedule_too_long(optimizer: OptimizerHistory) -> Findings:
    """Find a schedule that is made for as many steps as there are micro-batches, and takes one in each window."""
    micro_batches = optimizer.backwards.size
    for event, taken, horizon in _made_for(optimizer, _schedules(optimizer)):
        once_a_window = optimizer.steps.size < 2 * taken <= horizon
        close = abs(horizon - micro_batches) < optimizer.usual
        if taken >= _AGAIN and once_a_window and close:
            yield optimizer.finding(
                "warning",
                event,
                evidence={"made for": horizon, "steps taken": taken},
                cause=(
                    f"The schedule is made for {horizon:.0f} steps, as many as there are micro-batches, and takes "
                    f"{taken}, one in each window: the script ends with {taken / horizon:.0%} of it done. Make it for "
                    "as many steps as there are windows."
                ),
            )


def _made_for(
    optimizer: OptimizerHistory, schedules: np.ndarray
) -> Iterator[tuple[int, int, float]]:
    """Return of each schedule its first event, how many steps it takes, and for how many it is made, if that is known.

    Schedules of one name are one: each is as long as the others, or takes over where they end.
    """
    labels = optimizer.events.column("label")[schedules]
    horizons = optimizer.events.detail("horizon", math.nan)[schedules]
    for label in np.unique(labels[np.isfinite(horizons)]).tolist():
        mine = labels == label
        taken = int(np.count_nonzero(mine))
        yield int(schedules[mine][0]), taken, float(np.nansum(horizons[mine]))


def conditions(analysis: LedgerAnalysis) -> Conditions:
    """Say what has to be meant for a healthy loop to be so: a schedule of other steps, clips one by one."""
    for optimizer in analysis.optimizers:
        schedules = _schedules(optimizer)
        too_often = _stepped_too_often(optimizer, schedules)
        if too_often and _comes_to_nothing(optimizer, schedules):
            yield "a schedule of the micro-batches is meant", int(schedules[0])
        for said in _of_schedules(optimizer, schedules):
            yield said, int(schedules[-1])
        leaps = _leaps(optimizer)
        if len(leaps) > 1:
            said = f"a scale that leaps up {len(leaps)} times, as with a new scaler in each epoch, is meant"
            yield said, leaps[0]
        alone = _clipped_alone(optimizer)
        if alone:
            said = f"{len(alone)} clips before a step are meant, each by the norm of its own parameters"
            yield said, alone[0]
        still = _stands_still(optimizer)
        if still:
            many = f"{len(still)} of {optimizer.steps.size} steps"
            said = f"{many} of {optimizer.name} at a rate of almost 0 are meant"
            yield said, int(optimizer.steps[still[0]])


def _stands_still(optimizer: OptimizerHistory) -> list[int]:
    """Return the steps at less than a millionth of the highest rate, where more than a tenth of all are such."""
    rates = _rates(optimizer, optimizer.steps)
    almost_nothing = 1e-6 * max(rates, default=0.0)
    still = [n for n, rate in enumerate(rates) if rate < almost_nothing]
    return still if len(still) > max(2, len(rates) // 10) else []


def learning_rates(optimizer: OptimizerHistory) -> str:
    """Say at which rates an optimizer stepped, and how often its scheduler did; of groups, the first counts."""
    rates = _rates(optimizer, optimizer.steps)
    if not rates:
        return ""
    low, high = min(rates), max(rates)
    said = f"at a learning rate of {low:.3g}"
    if low < high:
        said = (
            f"at learning rates from {low:.3g} to {high:.3g}, the last {rates[-1]:.3g}"
        )
        changes = np.sign(np.diff(rates))
        again = int(np.count_nonzero(np.diff(changes[changes != 0]) > 0))
        if again:
            said += f", rising again {counted(again, 'time')}"
    of_groups = optimizer.events.detail("lr", None)[optimizer.steps[0]]
    if isinstance(of_groups, list) and len(set(map(str, of_groups))) > 1:
        said += ", of its first group"
    moves = _schedules(optimizer).size
    return f"{said}, with {counted(moves, 'step')} of a scheduler" if moves else said


def _clipped_alone(optimizer: OptimizerHistory) -> list[int]:
    """Return the clips of one line before a step, each of some of an optimizer's gradients by their own norm."""
    clips = optimizer.changing["clip"]
    sites = optimizer.sites
    for step, window in optimizer.windows.items():
        before = between(clips, window[-1], step)
        alone = [
            clip
            for clip in before
            if sites[clip] == sites[before[0]]
            and optimizer.detail(clip, "by") != "value"
        ]
        if len(alone) > 1 and min(map(optimizer.clip_ratio, alone)) < 1 - SAME:
            return alone
    return []


def _of_schedules(optimizer: OptimizerHistory, schedules: np.ndarray) -> Iterator[str]:
    """Say of schedules that they end early or begin anew, in a whole script, or that they run ahead of the steps."""
    attempts = np.union1d(optimizer.steps, optimizer.skipped)
    places = attempts.searchsorted(schedules)
    last = attempts[places[places > 0] - 1]
    ahead = np.isin(optimizer.skipped, last).sum()
    # A scaler that begins too high skips a few steps.
    if ahead > _AGAIN:
        yield f"a schedule that goes on in {ahead} steps which the scaler skipped is meant"
    if not optimizer.is_whole_script:
        return
    for _, taken, horizon in _made_for(optimizer, schedules):
        if 2 * taken <= horizon:
            yield f"a script that ends after {taken} of the {horizon:g} steps of its schedule is meant"
    # With so many steps the optimizer's state had been loaded when its schedule began.
    stepped = optimizer.events.detail("stepped", math.nan)[schedules]
    before = np.nanmax(stepped - optimizer.steps.searchsorted(schedules), initial=0)
    # One that steps more seldom may not have begun.
    if before * schedules.size >= max(optimizer.steps.size, 1):
        yield f"a schedule that begins anew after {before:g} steps is meant"


def _leaps(optimizer: OptimizerHistory) -> list[int]:
    """Return the unscalings, right after another one of this optimizer's, whose scale has more than grown since."""
    unscales = optimizer.at["unscale"]
    scales = optimizer.events.detail("amp_scale", math.nan)[unscales]
    growth = optimizer.events.detail("growth", math.nan)[unscales]
    mine = optimizer.changes[unscales]
    leaps = (scales[1:] > 1.01 * growth[1:] * scales[:-1]) & mine[1:] & mine[:-1]
    events: list[int] = unscales[1:][leaps].tolist()
    return events


def _schedules(optimizer: OptimizerHistory) -> np.ndarray:
    """Return the steps of an optimizer's scheduler."""
    every = optimizer.at["schedule"]
    index = optimizer.events.detail("optimizer_index", 0)[every]
    mine: np.ndarray = every[index == optimizer.optimizer]
    return mine


def _stepped_too_often(optimizer: OptimizerHistory, schedules: np.ndarray) -> list[int]:
    """Return the steps of most windows, where a scheduler steps between any two of their backwards; else none."""
    if not schedules.size or _is_given_its_place(optimizer.ledger[int(schedules[0])]):
        return []
    several = {s: used for s, used in optimizer.windows.items() if len(used) > 1}
    steps = []
    for step, window in several.items():
        if all(between(schedules, *pair) for pair in pairwise(window)):
            steps.append(step)
    return steps if 2 * len(steps) > len(several) else []


def _rates(analysis: LedgerAnalysis, schedules: np.ndarray) -> list[float]:
    """Return the first group's learning rate after each of these events."""
    of_groups = analysis.events.detail("lr", None)
    rates = []
    for groups in of_groups[schedules].tolist():
        if isinstance(groups, list) and groups:
            rates.append(number(groups[0]))
    return rates


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
