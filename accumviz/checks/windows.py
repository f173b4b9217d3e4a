"""Rules about windows: what was lost before a step, what no step used, what was consumed twice."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.analysis import (
    Conditions,
    LedgerAnalysis,
    OptimizerHistory,
    are_close,
    for_each_optimizer,
    is_close,
)
from accumviz.checks.report import Finding, Findings
from accumviz.checks.suggestions import calling_line
from accumviz.checks.weights import is_whole
from accumviz.ledger.events import Event
from accumviz.ledger.flow import BY_HAND, SAME
from accumviz.show import counted


class Loss(NamedTuple):
    """A backward of which an optimizer used nothing: what erased it, and the step before which that was."""

    backward: int
    eraser: int
    step: int


# --- lost before a step -----------------------------------------------------------------------


@for_each_optimizer
def zero_grad_inside_window(optimizer: OptimizerHistory) -> Findings:
    """Find contributions of one window that are erased, again and again, before its step."""
    inside, _ = _lost_before_steps(optimizer)
    steps = {loss.step for loss in inside}
    if len(inside) < 2 or 2 * len(steps) < len(optimizer.windows):
        return
    first = inside[0]
    lost = [loss.backward for loss in inside if loss.step == first.step]
    kept = optimizer.windows[first.step]
    yield _zeroed_too_early(
        optimizer,
        first,
        kept[-1],
        evidence={"backwards erased, by event": lost, "consumed": kept},
        cause=(
            f"`.grad` is zeroed between the backwards of one window: {len(lost)} of {len(lost) + len(kept)} "
            "micro-batches are lost before the step sees them."
        ),
        times=len(inside),
    )


@for_each_optimizer
def zero_before_step(optimizer: OptimizerHistory) -> Findings:
    """Find a step that reads nothing, because what came before it was zeroed."""
    idle = [step for step in optimizer.steps.tolist() if step not in optimizer.windows]
    every = [_lost_for_all(optimizer, step) for step in idle]
    vain = list(filter(None, every))
    if not vain:
        return
    losses = vain[0]
    yield _zeroed_too_early(
        optimizer,
        losses[0]._replace(eraser=losses[-1].eraser),
        losses[-1].backward,
        evidence={"backwards erased, by event": [loss.backward for loss in losses]},
        cause="`.grad` is zeroed between the backward and the step: the step finds nothing to apply.",
        times=len(vain),
    )


def _zeroed_too_early(
    optimizer: OptimizerHistory,
    loss: Loss,
    other: int,
    **about: Any,
) -> Finding:
    """Return a finding at the line that led to a zeroing, and neither to the step nor to these backwards.

    The suggestion is to zero after the step, and not where it is done now, where that is for this optimizer alone.
    """
    step = optimizer.ledger[loss.step]
    others = [optimizer.ledger[event] for event in (loss.backward, other)]
    zero = calling_line(optimizer.ledger[loss.eraser], step, *others)
    line = calling_line(step, zero)
    touched = sum(each.changes[loss.eraser] for each in optimizer.optimizers)
    alone = touched == 1 and line.file == zero.file
    return optimizer.finding(
        "error",
        loss.eraser,
        step=loss.step,
        suggestion=_zeroed_below(optimizer, line, loss.backward, zero) if alone else "",
        at=zero,
        **about,
    )


def _zeroed_below(
    optimizer: OptimizerHistory,
    step: Event,
    backward: int,
    zero: Event | None = None,
) -> str:
    """Suggest to zero below a step, where one line takes all steps."""
    lines = optimizer.events.column("line")[optimizer.steps]
    if np.unique(lines).size > 1:
        return ""
    return optimizer.code.zeroed_below(step, optimizer.ledger[backward], zero)


def _erased_before(optimizer: OptimizerHistory, step: int) -> list[Loss]:
    """Return the backwards that were zeroed before a step could read them."""
    lost = optimizer.lost.get((step, optimizer.optimizer))
    # Where a hand has put something into `.grad`, what is there is not known.
    if not lost or optimizer.shares.of(step).lost_sight.any():
        return []
    finite = filter(optimizer.finite, lost)
    return [Loss(b, int(optimizer.eraser[b]), step) for b in finite]


def _is_used_elsewhere(optimizer: OptimizerHistory, backward: int) -> bool:
    """Return whether another optimizer used what a backward added, or may still."""
    others = [each for each in optimizer.optimizers if each is not optimizer]
    return any(other.in_use[backward] for other in others)


def _lost_for_all(optimizer: OptimizerHistory, step: int) -> list[Loss]:
    """Return what was erased before a step, and used by no other optimizer."""
    losses = _erased_before(optimizer, step)
    # What another optimizer used may be kept from this one for a while, but not for ever.
    if not optimizer.windows:
        return losses
    return [loss for loss in losses if not _is_used_elsewhere(optimizer, loss.backward)]


def _lost_before_steps(optimizer: OptimizerHistory) -> tuple[list[Loss], list[Loss]]:
    """Return what was erased before a step that consumed others of its loss: inside its window, and as a tail.

    Nothing is missing in a window that is whole without it; and in SAM a backward only says where to move the weights.
    """
    inside: list[Loss] = []
    tails: list[Loss] = []
    for step, kept in optimizer.windows.items():
        losses = _lost_of_one_loss(optimizer, step, kept)
        if not losses:
            continue
        epoch = optimizer.epoch(kept[-1])
        whole = len(kept) > 1 and _is_whole(optimizer, step)
        for loss in losses:
            if optimizer.epoch(loss.backward) != epoch:
                tails.append(loss)
            elif not whole and not _in_turns(optimizer, loss, kept[-1]):
                inside.append(loss)
    return inside, tails


def _lost_of_one_loss(
    optimizer: OptimizerHistory, step: int, kept: list[int]
) -> list[Loss]:
    """Return what was erased before a step, of the losses of what it consumed; nothing in SAM."""
    losses = _erased_before(optimizer, step)
    if not losses or optimizer.moved[kept].any():
        return []
    sites = optimizer.sites
    return [loss for loss in losses if sites[loss.backward] in sites[kept]]


def _in_turns(optimizer: OptimizerHistory, loss: Loss, kept: int) -> bool:
    """Return whether another optimizer used what was erased here, and not with what this one used.

    Two networks that are trained in turns on one loss lose it on purpose; no window is meant for one of them only.
    """
    for other in optimizer.optimizers:
        step = other.first_step_of.get(loss.backward)
        if step is not None and step == other.first_step_of.get(kept):
            return False
    return _is_used_elsewhere(optimizer, loss.backward)


def _is_whole(optimizer: OptimizerHistory, step: int) -> bool:
    """Return whether the shares of a loss in a step add up to 1, divided or not."""
    shares = optimizer.shares_of(step)
    return any(share.read and is_whole(share.weights) for share in shares)


def conditions(analysis: LedgerAnalysis) -> Conditions:
    """Say what has to be meant for a healthy loop to be so: that no step used what a zeroing erased."""
    lost: dict[int, int] = {}
    for optimizer in analysis.optimizers:
        lost |= _lost_to_all_steps(optimizer)
    if lost:
        many = f"{len(lost)} micro-batch{'es' * (len(lost) > 1)}"
        said = f"what {many} brought and a zeroing erased is meant to be thrown away"
        yield said, lost[min(lost)]


def _lost_to_all_steps(optimizer: OptimizerHistory) -> dict[int, int]:
    """Return the backwards that were erased before an optimizer's steps and used by no other, with their erasers."""
    lost: dict[int, int] = {}
    # What a closure erases its step has looked at; the first step may have begun before the recording.
    if optimizer.closures.any():
        return lost
    for step, kept in optimizer.windows.items():
        losses = _lost_for_all(optimizer, step)
        # SAM erases what has said where to move the weights, and brings as much there.
        moved = optimizer.moved[kept[0]] and not optimizer.closures[kept[0]]
        if not moved or len(losses) > len(kept):
            lost |= {loss.backward: loss.eraser for loss in losses}
    return lost


# --- the last window --------------------------------------------------------------------------


@for_each_optimizer
def tail_dropped(optimizer: OptimizerHistory) -> Findings:
    """Find micro-batches at the end of a loader that no step ever consumed."""
    if optimizer.usual < 2 or not optimizer.steps.size:
        return
    every = [*_thrown_away(optimizer), _left_at_the_end(optimizer)]
    dropped = list(filter(None, every))
    if not dropped:
        return
    lost = dropped[0]
    source = "loader" if optimizer.epochs else "loop"
    # A run that ends after so many steps leaves a part of a window.
    by_chance = len(lost) < optimizer.usual and not optimizer.ended(lost[-1])
    yield optimizer.finding(
        "note" if by_chance else "warning",
        lost[0],
        evidence={"backwards, by event": lost, "lost in all": sum(map(len, dropped))},
        cause=(
            f"The {source} ended after {len(lost)} of {optimizer.usual} micro-batches of a window, and what they "
            "contributed was thrown away. Step once more after it, on averaged gradients where there are several "
            "ranks, and divide by their own number."
        ),
        times=len(dropped),
    )


def _thrown_away(optimizer: OptimizerHistory) -> list[list[int]]:
    """Return the backwards that were zeroed at each epoch's end, where they are fewer than a window's."""
    # Without a loader to ask, what is thrown away now and then may be so on purpose.
    if not optimizer.epochs:
        return []
    _, tails = _lost_before_steps(optimizer)
    groups: dict[int, list[int]] = {}
    for loss in tails:
        if optimizer.ended(loss.backward):
            groups.setdefault(loss.eraser, []).append(loss.backward)
    return [lost for lost in groups.values() if len(lost) < optimizer.usual]


def _live_after_all(optimizer: OptimizerHistory) -> list[int]:
    """Return the backwards after the last step that read one which nothing used or erased, at lines that steps read."""
    sites = optimizer.sites
    used = np.any(optimizer.ledger.flow.fates.steps > 0, axis=1)
    gone = used | (optimizer.eraser >= 0)
    gone |= ~np.isin(sites, sites[optimizer.read])
    last = optimizer.read_step.max(initial=-1)
    late = optimizer.backwards[optimizer.backwards > last]
    live: list[int] = late[~gone[late]].tolist()
    return live


def _left_at_the_end(optimizer: OptimizerHistory) -> list[int]:
    """Return the backwards that are live when everything is over, where a loader or the script has ended."""
    unused = list(filter(optimizer.finite, _live_after_all(optimizer)))
    if not unused or (optimizer.skipped > unused[-1]).any():
        return []
    has_ended = optimizer.is_whole_script or optimizer.ended(unused[-1])
    return unused if has_ended else []


# --- consumed twice ---------------------------------------------------------------------------


@for_each_optimizer
def gradient_applied_twice(optimizer: OptimizerHistory) -> Findings:
    """Find steps on what another optimizer has applied to the same parameters, or this one, with nothing new."""
    flow = optimizer.ledger.flow
    used_twice = flow.fates.steps > 1
    inner = np.flatnonzero(optimizer.closures)
    for other in optimizer.optimizers:
        shared = np.intersect1d(optimizer.columns, other.columns)
        twice: Any = used_twice[:, flow.history_of[shared]].any(axis=1)
        before = other.first_use[optimizer.read]
        again = (before < optimizer.read_step) & twice[optimizer.read]
        # A wrapper's step runs the step of the optimizer in it.
        again &= ~np.isin(before, inner)
        if optimizer is other:
            again &= ~_brings_something_new(optimizer)
        if again.any():
            yield _second_step(optimizer, other, again)


def _brings_something_new(optimizer: OptimizerHistory) -> np.ndarray:
    """Mark what an optimizer reads in steps that read something first, of those that have the same parameters."""
    mine = set(optimizer.columns)
    uses = [o.first_use for o in optimizer.optimizers if not mine.isdisjoint(o.columns)]
    first = np.min(uses, axis=0)
    new = first[optimizer.read] == optimizer.read_step
    return np.isin(optimizer.read_step, optimizer.read_step[new])


def _second_step(
    optimizer: OptimizerHistory, other: OptimizerHistory, again: np.ndarray
) -> Finding:
    steps = optimizer.read_step[again].tolist()
    backward = int(optimizer.read[again][0])
    step = steps[0]
    before = other.first_step_of[backward]
    reached = optimizer.contributed[backward, optimizer.columns]
    shared = np.intersect1d(optimizer.columns[reached], other.columns).tolist()
    alone = optimizer is other
    is_one_line = optimizer.sites[before] == optimizer.sites[step]
    suggestion = ""
    if alone and not is_one_line:
        suggestion = optimizer.code.removed(optimizer.ledger[step])
    return optimizer.finding(
        "error" if alone else "warning",
        step,
        step=step,
        evidence={
            "applied by the steps at events": [before, step],
            "parameters": optimizer.names(shared[:4]),
        },
        cause=(
            f"{other.name} has applied the gradient of backward {backward} already, and {optimizer.name} applies it "
            "once more: the weights are moved twice. Step once, and give each parameter to one optimizer."
        ),
        suggestion=suggestion,
        times=len(set(steps)),
    )


@for_each_optimizer
def missing_zero_grad(optimizer: OptimizerHistory) -> Findings:
    """Find contributions that several steps of one optimizer consumed, or a closure that adds its evaluations up."""
    evaluated = _evaluated_in_vain(optimizer)
    shares = optimizer.consumed
    # What a hand has put into `.grad` may be something else.
    kept = shares.unknown[shares.term == 0] != BY_HAND
    again = kept & (optimizer.first_use[optimizer.read] < optimizer.read_step)
    if evaluated:
        yield _unzeroed_closure(optimizer, evaluated)
    elif again.any():
        yield _read_again(optimizer, np.unique(optimizer.read[again]).tolist())


def _evaluated_in_vain(optimizer: OptimizerHistory) -> dict[int, list[int]]:
    """Return the steps whose closure moved the weights and added to what it had brought before, and its backwards."""
    again = optimizer.moved & optimizer.closures
    evaluated: dict[int, list[int]] = {}
    if not again.any():
        return evaluated
    for step in optimizer.windows:
        before = optimizer.previous_step(step)
        waiting = [b for b in optimizer.waiting(step) if b > before]
        if again[waiting[1:]].any():
            evaluated[step] = waiting
    return evaluated


def _unzeroed_closure(
    analysis: LedgerAnalysis, evaluated: dict[int, list[int]]
) -> Finding:
    first, backwards = next(iter(evaluated.items()))
    return analysis.finding(
        "error",
        first,
        step=first,
        evidence={"backwards, by event": backwards},
        cause=(
            "The closure does not zero: what it brings at one place of the weights is added to what it brought at "
            "others. It has to zero before its first backward."
        ),
        times=len(evaluated),
    )


def _read_again(optimizer: OptimizerHistory, twice: list[int]) -> Finding:
    steps = optimizer.read_step[optimizer.read == twice[0]].tolist()
    more = counted(len(steps) - 1, "later step")
    severity = "error"
    cause = f"Nothing zeroes the gradient that this step has used, so that {more} will use it again."
    suggestion = _zeroed_beside(optimizer, steps[0], twice[0])
    divisors = [term.get("divisor") for term in optimizer.ledger[twice[0]].terms]
    eraser = int(optimizer.eraser[twice[0]])
    one_line = np.unique(optimizer.sites[steps]).size == 1
    if divisors == [len(steps)] and one_line and eraser >= 0:
        # Who divides by the number of micro-batches wants one step for all of them.
        cause += f" Each loss is divided by {len(steps)}: if that is for accumulation, step where you zero."
        suggestion = optimizer.code.moved(
            optimizer.ledger[steps[0]], optimizer.ledger[eraser], below=False
        )
    shares = optimizer.consumed
    factors = shares.by_hand[shares.backward == twice[0]]
    kept = factors[1:] / factors[:-1]
    # A hand that divides the sum has done so before the first step.
    if is_close(factors[0], 1.0) and kept.max() < 1 - SAME and are_close(kept.tolist()):
        severity, suggestion = "note", ""
        cause = f"{more} will use {kept[0]:.3g} of this gradient again each time, as with momentum. Is that meant?"
    return optimizer.finding(
        severity,
        steps[0],
        step=steps[1],
        evidence={"consumed by the steps at events": steps},
        cause=cause,
        suggestion=suggestion,
        times=len(twice),
    )


def _zeroed_beside(optimizer: OptimizerHistory, at: int, backward: int) -> str:
    """Suggest to zero below a step, where other optimizers read all of its window or nothing of it."""
    step = optimizer.ledger[at]
    window = optimizer.windows[at]
    alone = [not _is_used_elsewhere(optimizer, b) for b in window]
    # Below its step, what another network's loss brings afterwards would stay.
    if any(alone) and not all(alone):
        return ""
    return _zeroed_below(optimizer, step, backward)
