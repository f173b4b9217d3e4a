"""Rules about windows: what a step consumed, what was lost before it, what was consumed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from accumviz.checks.analysis import LedgerAnalysis, OptimizerHistory, is_close
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import (
    added_below,
    calling_line,
    deleted,
    moved_below,
    zeroing,
)
from accumviz.ledger.events import Event


class Loss(NamedTuple):
    """A backward of which an optimizer used nothing: what erased it, and the step before which that was."""

    backward: int
    eraser: int
    step: int


def zero_grad_inside_window(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find contributions of one window that are erased, again and again, before its step."""
    for optimizer in analysis.optimizers:
        inside, _ = lost_before_steps(analysis, optimizer)
        steps = {loss.step for loss in inside}
        if len(inside) < 2 or 2 * len(steps) < len(optimizer.full_windows):
            continue
        _, eraser, step = inside[0]
        lost = [loss.backward for loss in inside if loss.step == step]
        kept = optimizer.windows[step]
        events = [analysis.ledger[e] for e in (step, lost[0], kept[-1])]
        zero = calling_line(analysis.ledger[eraser], *events)
        yield analysis.finding(
            "zero-grad-inside-window",
            "error",
            eraser,
            step=step,
            evidence={
                "backwards erased": lost,
                "backwards consumed": kept,
                "steps concerned": len(steps),
            },
            cause=(
                f"`.grad` is zeroed between the backwards of one window: {len(lost)} of {len(lost) + len(kept)} "
                "micro-batches are lost before the step sees them."
            ),
            suggestion=_zeroed_after(analysis, optimizer, zero, step),
            times=len(inside),
            optimizer=optimizer.optimizer,
            at=zero,
        )


def zero_before_step(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a step that reads nothing, because what came before it was zeroed."""
    for optimizer in analysis.optimizers:
        # What another optimizer used may be kept from this one for a while, but not for ever.
        erased = dict(optimizer.lost)
        if not optimizer.full_windows:
            erased |= optimizer.lost_here
        steps = [step for step, used in optimizer.windows.items() if not used]
        vain = {
            step: _zeroed_before(analysis, optimizer, erased, step) for step in steps
        }
        vain = {step: losses for step, losses in vain.items() if losses}
        if not vain:
            continue
        step, losses = next(iter(vain.items()))
        eraser = losses[-1].eraser
        events = [analysis.ledger[e] for e in (step, losses[0].backward)]
        zero = calling_line(analysis.ledger[eraser], *events)
        yield analysis.finding(
            "zero-before-step",
            "error",
            eraser,
            step=step,
            evidence={
                "backwards erased": [loss.backward for loss in losses],
                "steps that found nothing": len(vain),
            },
            cause="`.grad` is zeroed between the backward and the step: the step finds nothing to apply.",
            suggestion=_zeroed_after(analysis, optimizer, zero, step),
            times=len(vain),
            optimizer=optimizer.optimizer,
            at=zero,
        )


def _zeroed_before(
    analysis: LedgerAnalysis,
    optimizer: OptimizerHistory,
    erased: dict[int, int],
    step: int,
) -> list[Loss]:
    """Return what was zeroed between the step before and this one."""
    if analysis.shares.of(step).lost_sight.any():
        return []  # a hand has put something there
    since = optimizer.previous_step(step)
    return [
        Loss(b, end, step)
        for b, end in sorted(erased.items())
        if since < b and end < step and _is_zeroing(analysis, end)
    ]


def _is_zeroing(analysis: LedgerAnalysis, event: int) -> bool:
    """Whether an event zeroes; what FSDP has scattered waits elsewhere."""
    return analysis.ledger[event].kind in ("zero_grad", "edit")


def _zeroed_after(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, zero: Event, step: int
) -> str:
    """Suggest to zero after the step, and not where it is done now."""
    step_event = analysis.ledger[step]
    line = calling_line(step_event, analysis.ledger[zero.index])
    touched = [each for each in analysis.optimizers if each.changed_by(zero.index)]
    if len(touched) > 1 or line.line == zero.line:
        return ""
    if line.file != zero.file or _runs_others(zero):
        return ""
    if _zeroed_elsewhere(analysis, optimizer, zero):
        return deleted(zero)
    return moved_below(zero, line, zeroing(step_event))


def _runs_others(zero: Event) -> bool:
    """Whether the line is one that a framework's callbacks go through, so that it may call others as well."""
    return (zero.file, zero.line) in [frame[:2] for frame in zero.frames[2:]]


def _zeroed_elsewhere(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, zero: Event
) -> bool:
    """Whether another line zeroes after each step, before the next backward."""
    zeros = optimizer.changing(analysis.at("zero_grad"))
    lines = {frame[:2] for frame in zero.frames} | {(zero.file, zero.line)}
    for step in optimizer.full_windows:
        after = optimizer.between(zeros, step, optimizer.next_backward(step))
        events = [analysis.ledger[e] for e in after.tolist()]
        if all((event.file, event.line) in lines for event in events):
            return False
    return True


def lost_before_steps(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> tuple[list[Loss], list[Loss]]:
    """Return what was erased before a step that consumed others of its call site: inside its window, and as a tail."""
    by_step: dict[int, list[Loss]] = {}
    lost = [*optimizer.lost.items(), *_used_by_another(analysis, optimizer)]
    for b, end in lost:
        step = optimizer.next_step(b)
        if step < len(analysis.events) and end < step and _is_zeroing(analysis, end):
            by_step.setdefault(step, []).append(Loss(b, end, step))
    inside: list[Loss] = []
    tails: list[Loss] = []
    for step, losses in by_step.items():
        kept = optimizer.windows[step]
        if not kept or analysis.shares.of(step).lost_sight.any():
            continue
        alike = _of_the_same_loss(analysis, losses, kept)
        alike = [loss for loss in alike if not _meant(analysis, optimizer, loss, alike)]
        if analysis.has_loaders:
            epoch = analysis.epoch(kept[-1], optimizer.rank)
            for loss in alike:
                same = analysis.epoch(loss.backward, optimizer.rank) == epoch
                (inside if same else tails).append(loss)
        elif _may_be_a_tail(analysis, optimizer, alike):
            tails += alike
        else:
            inside += alike
    return inside, tails


def _of_the_same_loss(
    analysis: LedgerAnalysis, losses: list[Loss], kept: list[int]
) -> list[Loss]:
    """Return those that came by the same lines as what the step consumed."""
    sites = set(analysis.sites[kept].tolist())
    alike = [loss for loss in losses if analysis.sites[loss.backward] in sites]
    inside_step = analysis.events.where("within", "step")
    if alike or not inside_step[kept[-1]]:
        return alike
    # The last closure of a window runs inside the step, the others before it.
    lines = set(analysis.lines[kept].tolist())
    return [
        loss
        for loss in losses
        if analysis.lines[loss.backward] in lines and not inside_step[loss.backward]
    ]


def _meant(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, loss: Loss, every: list[Loss]
) -> bool:
    """Whether a backward only said where to move the weights, as in SAM, or its window was complete and refused."""
    first = optimizer.next_backward(optimizer.previous_step(loss.backward) + 1)
    following = optimizer.next_backward(loss.eraser)
    moved = analysis.moved
    if following < len(moved) and moved[following] and not moved[first]:
        return True
    group = [other.backward for other in every if other.eraser == loss.eraser]
    if len(group) != len(optimizer.windows[loss.step]):
        return False
    # Its norm was looked at: then it was complete, and thrown away on purpose.
    looked = analysis.at("unscale", "clip")
    return optimizer.change_between(looked, group[-1], loss.eraser) and _is_whole(
        analysis, optimizer, loss.step
    )


def _is_whole(analysis: LedgerAnalysis, optimizer: OptimizerHistory, step: int) -> bool:
    """Whether the shares of a step add up to 1."""
    shares = analysis.shares_of(step, optimizer.optimizer)
    return any(is_close(share.total, 1.0) and share.read for share in shares)


def _may_be_a_tail(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, losses: list[Loss]
) -> bool:
    """Whether a window is whole without these: without a loader to ask, that says that they were left over."""
    if not losses or len({loss.eraser for loss in losses}) > 1:
        return False
    step = losses[0].step
    fewer = len(losses) < len(optimizer.windows[step])
    return fewer and _is_whole(analysis, optimizer, step)


def _used_by_another(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[tuple[int, int]]:
    """Find what was erased here, where another optimizer's step used it together with what this one used.

    Two networks that are trained in turns on one loss lose it on purpose; no window is meant for one of them only.
    """
    if not optimizer.lost_here:
        return
    others = [other for other in analysis.optimizers if other is not optimizer]
    windows = [set(used) for other in others for used in other.full_windows.values()]
    for b, end in optimizer.lost_here.items():
        kept = optimizer.windows.get(optimizer.next_step(b))
        if kept and any(b in window and kept[-1] in window for window in windows):
            yield b, end


def missing_zero_grad(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find contributions that several steps of one optimizer consumed."""
    in_step = analysis.events.where("within", "step")
    for optimizer in analysis.optimizers:
        counts = Counter(optimizer.read.tolist())
        twice = [b for b, many in counts.items() if many > 1]
        if not twice:
            continue
        steps = optimizer.read_step[optimizer.read == twice[0]].tolist()
        kept = _momentum(analysis, optimizer, twice)
        closure = bool(in_step[twice].any())
        if kept:
            evidence = {
                "kept of each `.grad`": kept,
                "backwards read again": len(twice),
            }
            cause = (
                f"`.grad` is not zeroed: after each step {kept:.3g} of it is kept, as momentum keeps it. If that "
                "is meant, nothing is wrong."
            )
        else:
            evidence = {
                "backward": twice[0],
                "consumed by the steps at events": steps,
                "backwards read again": len(twice),
            }
            cause = (
                f"The contribution of backward {twice[0]} is still in `.grad` after the step that used it, and is "
                f"used by {len(steps) - 1} more."
            )
            if closure:
                cause += " The step calls a closure: it has to zero before its first backward."
        step = analysis.ledger[steps[0]]
        suggested = not kept and not closure
        yield analysis.finding(
            "missing-zero-grad",
            "note" if kept else "error",
            steps[0],
            step=steps[1],
            evidence=evidence,
            cause=cause,
            suggestion=added_below(step, zeroing(step)) if suggested else "",
            times=len(twice),
            optimizer=optimizer.optimizer,
        )


def _momentum(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, twice: list[int]
) -> float:
    """Return which part of `.grad` a hand keeps from each step to the next, where it is always the same; or 0."""
    s = analysis.shares
    mine = (s.optimizer == optimizer.optimizer) & np.isin(s.backward, twice)
    rows = np.flatnonzero(mine & ~s.erased & s.followed)
    rows = rows[np.lexsort((s.step[rows], s.backward[rows]))]
    factors = s.by_hand[rows]
    again = np.diff(s.backward[rows], prepend=-1) == 0
    if not again.any() or not np.all(is_close(factors[~again], 1.0)):
        return 0.0
    ratios = factors[again] / factors[np.flatnonzero(again) - 1]
    same = bool(np.all(is_close(ratios, ratios[0])))
    return float(ratios[0]) if same and 0 < ratios[0] < 1 else 0.0
