"""Rules about whose gradient it is: parameters of no optimizer or of two, networks that train each other by mistake."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

import numpy as np

from accumviz.checks.analysis import (
    LedgerAnalysis,
    OptimizerHistory,
    between,
    for_each_optimizer,
)
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import calling_line, knows, zeroing
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT
from accumviz.ledger.flow import number

# What is zeroed or missed less often may belong to a phase that was not recorded.
_AGAIN = 3
# Losses of opponents cancel in a generator, up to how they weigh each sample.
_OPPOSED = -0.9


# --- parameters without an optimizer, or with two ---------------------------------------------


def parameter_outside_or_twice(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find gradients that no step uses and nothing erases, or that an optimizer which steps in vain should have."""
    ledger = analysis.ledger
    erased = ledger.outcomes.erased
    in_vain = any(not optimizer.full_windows for optimizer in analysis.optimizers)
    outside: dict[tuple[int, ...], list[int]] = {}
    for p in _unused(analysis):
        owners = ledger.parameters[p].optimizers
        if (erased[:, p] < 0).all() or (in_vain and not owners):
            outside.setdefault(owners, []).append(p)
    for owners, columns in outside.items():
        whose = (
            "to no optimizer (one that is made before `fully_shard`, or before a layer is replaced, keeps the old "
            "parameters)"
        )
        if owners:
            whose = f"to {analysis.optimizer_name(owners[0])}, which never steps"
        names = _names(analysis, columns)
        yield analysis.finding(
            "warning",
            int(np.flatnonzero(analysis.contributed[:, columns[0]])[1]),
            evidence={
                "parameters": names,
                "in all": len(columns),
                "norm of .grad at the end": float(ledger.grad[-1, columns[0]]),
            },
            cause=f"{names[0]} gets gradients and belongs {whose}: it is never trained.",
            times=len(columns),
            optimizer=owners[0] if owners else None,
        )
    yield from _nothing_to_step_on(analysis)


@for_each_optimizer
def _nothing_to_step_on(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find steps without any gradient, where backwards only reach what no optimizer has."""
    ledger = analysis.ledger
    reached = np.any(analysis.contributed, axis=1)
    every = analysis.at("backward")
    if reached[every].all() or ledger.meta.get("steps_elsewhere"):
        return
    in_vain = {}
    for step, used in optimizer.windows.items():
        since = between(every, optimizer.previous_step(step), step)
        by_hand = (ledger.grad[step, optimizer.columns] > 0).any()
        if since.size and not (used or by_hand or reached[since].any()):
            in_vain[step] = int(since[0])
    if len(in_vain) < _AGAIN:
        return
    step, backward = next(iter(in_vain.items()))
    yield analysis.finding(
        "error",
        backward,
        step=step,
        evidence={
            "steps without a gradient": len(in_vain),
            "of": int(optimizer.steps.size),
        },
        cause=(
            f"This backward reaches no parameter of {optimizer.name}, whose step has no gradient: what it trains "
            "is something else, as where layers are replaced after the optimizer is made. Make one for these."
        ),
        times=len(in_vain),
    )


def _unused(analysis: LedgerAnalysis) -> list[int]:
    """Return the parameters that get gradients again and again, and of which no optimizer has stepped."""
    if any(optimizer.is_fed_by_hand for optimizer in analysis.optimizers):
        return []  # these may be what its parameters are copies of
    stepping = {optimizer.optimizer for optimizer in analysis.optimizers}
    unused = []
    for p, parameter in enumerate(analysis.ledger.parameters):
        # What is missed less often may belong to a phase that was not recorded.
        often = _rounds(analysis, p) > (_AGAIN if parameter.optimizers else 1)
        outside = stepping and not stepping.intersection(parameter.optimizers)
        if often and outside and not parameter.unsharded_of:
            unused.append(p)
    return unused


def _rounds(analysis: LedgerAnalysis, p: int) -> int:
    """Count the times between steps in which a parameter gets a gradient."""
    born = np.flatnonzero(analysis.contributed[:, p])
    return np.unique(np.searchsorted(analysis.at("step"), born)).size


def _thrown_away(analysis: LedgerAnalysis) -> str:
    """Name parameters of which no optimizer steps, and whose gradients are erased; empty where there are none."""
    erased = analysis.ledger.outcomes.erased
    columns = [p for p in _unused(analysis) if (erased[:, p] >= 0).any()]
    if not columns:
        return ""
    names = [analysis.ledger.parameters[p].name for p in columns]
    return f"no optimizer is meant to apply the gradients of {_together(names)}"


def _unreached(analysis: LedgerAnalysis) -> str:
    """Name parameters that no backward reaches, beside others of the same optimizer; empty where there are none."""
    parameters = analysis.ledger.parameters
    happened = analysis.ledger.state & (CONTRIBUTED | PRESENT | CHANGED)
    touched = np.any(happened, axis=0)
    # What FSDP has not scattered yet is elsewhere.
    elsewhere = {parameters[p].unsharded_of for p in np.flatnonzero(touched).tolist()}
    for optimizer in analysis.optimizers:
        names = [
            parameters[p].name
            for p in optimizer.columns[~touched[optimizer.columns]].tolist()
            if parameters[p].requires_grad and not parameters[p].unsharded_of
        ]
        # What one rank lacks another one may have.
        known = optimizer.rank is None and not elsewhere.intersection(names)
        if names and known and len(optimizer.full_windows) >= _AGAIN:
            return f"no loss is meant to reach {_together(names)}, which {optimizer.name} has"
    return ""


def _without_gradients(analysis: LedgerAnalysis) -> str:
    """Name an optimizer that steps and never has a gradient; empty where there is none."""
    for optimizer in analysis.optimizers:
        if optimizer.steps.size >= _AGAIN and not optimizer.full_windows:
            return f"{optimizer.name} is meant to step {optimizer.steps.size} times without a gradient"
    return ""


def _names(analysis: LedgerAnalysis, columns: np.ndarray | list[int]) -> list[str]:
    """Return the names of the first of some parameters."""
    return [analysis.ledger.parameters[p].name for p in columns[:4]]


def _together(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


# --- what has to be meant ---------------------------------------------------------------------


def conditions(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say what has to be meant for a healthy loop to be so."""
    yield _thrown_away(analysis)
    yield _unreached(analysis)
    yield _without_gradients(analysis)
    yield _shared_loss(analysis)
    yield _drift(analysis)


# --- a zero tensor ----------------------------------------------------------------------------


def _drift(analysis: LedgerAnalysis) -> str:
    """Name parameters that momentum or weight decay moves in steps where their `.grad` is a zero tensor.

    With None in its place, the optimizer leaves them alone. Empty where that is not so.
    """
    grad, state = analysis.ledger.grad, analysis.ledger.state
    for optimizer in analysis.optimizers:
        settings = analysis.settings(optimizer.optimizer)
        names = ("momentum", "weight_decay")
        if "betas" not in settings and not any(
            number(settings.get(n)) > 0 for n in names
        ):
            continue
        steps = np.array(list(optimizer.full_windows), int)
        cells = np.ix_(steps, optimizer.columns)
        zero = np.array((state[cells] & PRESENT > 0) & (grad[cells] == 0))
        # What cancels, as a critic's last bias under WGAN, was given to be 0.
        for row, used in enumerate(optimizer.full_windows.values()):
            came = analysis.contributed[:, optimizer.columns][used]
            zero[row] &= ~came.any(axis=0)
        drifting = np.flatnonzero(zero.sum(axis=0) >= 2)
        if drifting.size:
            idle = _names(analysis, optimizer.columns[drifting].tolist())
            many = int(zero[:, drifting[0]].sum())
            return (
                f"{optimizer.name} is meant to move {_together(idle)} in {many} steps whose gradient is a zero tensor "
                "and not None"
            )
    return ""


# --- several networks -------------------------------------------------------------------------


@for_each_optimizer
def gan_gradient_leak(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[Finding]:
    """Find a loss of one network that another network's step consumes as well."""
    leaks = list(_all_leaks(analysis, optimizer))
    if not leaks:
        return
    b, early, late = min(leaks)
    label = analysis.ledger[b].label
    leaked = {leak[0] for leak in leaks}
    window = optimizer.windows[late]
    own = [backward for backward in window if backward not in leaked]
    at = analysis.ledger[b]
    if own and analysis.ledger[own[0]].line == at.line:
        at = calling_line(at, analysis.ledger[own[0]])
    yield analysis.finding(
        "error",
        b,
        step=late,
        evidence={
            "the loss": label,
            "consumed by the step at event": early,
            "and by the step at event": late,
            "of": optimizer.name,
        },
        cause=(
            f"{label or 'The loss'} also reached the parameters of {optimizer.name}, and its contribution "
            "was still there when that one stepped for a loss of its own."
        ),
        suggestion=_zeroed_first(analysis, early, late, own, window),
        times=len(leaked),
        at=at,
    )


def _all_leaks(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory
) -> Iterator[tuple[int, int, int]]:
    """Return what leaks from the other optimizers' losses, where this one has several."""
    if np.unique(analysis.sites[optimizer.backwards]).size < 2:
        return
    for other in analysis.optimizers:
        if _are_apart(analysis, optimizer, other):
            yield from _leaks(analysis, optimizer, other)
            yield from _read_together(analysis, optimizer, other)


def _are_apart(
    analysis: LedgerAnalysis, one: OptimizerHistory, other: OptimizerHistory
) -> bool:
    """Return whether two optimizers of one rank have networks of their own: no parameter or layer in common."""
    apart = not set(one.columns) & set(other.columns)
    layers = _layers(analysis, one) & _layers(analysis, other)
    return one.rank == other.rank and apart and not layers


def _layers(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> set[str]:
    """Return the names of the layers that an optimizer has parameters of."""
    names = [analysis.ledger.parameters[p].name for p in optimizer.columns.tolist()]
    return {name.rpartition(".")[0] for name in names if "." in name}


def _leaks(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, other: OptimizerHistory
) -> Iterator[tuple[int, int, int]]:
    """Return each backward that this optimizer's step read when the other one had stepped on it, and both steps.

    Between them, this optimizer has a loss of its own. Steps at different paces share one loss: that leaks nothing.
    """
    sites = analysis.sites
    shared = set(sites[list(other.first_step_of)].tolist())
    same_pace = abs(optimizer.steps.size - other.steps.size) <= 1
    for b, late in optimizer.first_step_of.items():
        early = other.first_step_of.get(b, late)
        inside = between(optimizer.backwards, early, late)
        its_sites = set(sites[inside].tolist())
        if its_sites - shared and (same_pace or sites[b] not in its_sites):
            yield b, early, late


def _read_together(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, other: OptimizerHistory
) -> Iterator[tuple[int, int, int]]:
    """Return what both optimizers read of one loss where it trains one of them only, and both steps.

    Either the loop erases this one's loss for the other one, and not the other's for this one; or the two losses cancel
    in this one's network in every step, and not in the other's.
    """
    opposed = _always_opposed(analysis, optimizer)
    if _always_opposed(analysis, other):
        opposed = set()
    for step, window in optimizer.full_windows.items():
        both = [b for b in window if b in other.first_step_of]
        kept = _kept_from(analysis, other, window)
        sites = set(analysis.sites[kept].tolist())
        for b in both:
            one_way = kept and kept[0] < b and analysis.sites[b] not in sites
            if one_way or b in opposed:
                yield b, other.first_step_of[b], step


def _kept_from(
    analysis: LedgerAnalysis, other: OptimizerHistory, window: list[int]
) -> list[int]:
    """Return those backwards that reached the other optimizer's parameters, and were erased there unused."""
    reached = analysis.contributed[:, other.columns]
    used = analysis.used[:, other.columns]
    return [b for b in window if reached[b].any() and not used[b].any()]


def _always_opposed(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> set[int]:
    """Return the backwards that all but undid what was in `.grad`, where every step has one."""
    opposed: set[int] = set()
    for window in optimizer.full_windows.values():
        against = [b for b in window[1:] if _cosine(analysis, optimizer, b) < _OPPOSED]
        if not against:
            return set()
        opposed.update(against)
    return opposed if len(optimizer.full_windows) >= _AGAIN else set()


def _cosine(analysis: LedgerAnalysis, optimizer: OptimizerHistory, b: int) -> float:
    """Return the cosine of the angle between what a backward brought and what was there, from three norms."""
    ledger = analysis.ledger
    rows = ledger.contribution[b], ledger.grad[b - 1], ledger.grad[b]
    norms = np.nan_to_num([row[optimizer.columns] for row in rows]).astype(float)
    came, before, after = np.square(norms).sum(axis=1).tolist()
    product = 2 * math.sqrt(came * before)
    return (after - before - came) / product if product else 0.0


def _zeroed_first(
    analysis: LedgerAnalysis, early: int, step: int, own: list[int], window: list[int]
) -> str:
    """Suggest to zero above the first backward of a window, where its line has one, or below the other's step."""
    if not own or own[0] < early:
        return ""
    first, late = analysis.ledger[own[0]], analysis.ledger[step]
    lines = analysis.events.column("line")[window].tolist()
    if lines.count(first.line) == 1 and knows(first, late):
        return analysis.code.added_above(first, zeroing(late))
    other = analysis.ledger[early]
    return analysis.code.added_below(other, zeroing(late)) if knows(other, late) else ""


def _shared_loss(analysis: LedgerAnalysis) -> str:
    """Name losses that two optimizers learn from, of several that one has: opponents, or parts of one model.

    Empty where there is none.
    """
    for one, other in permutations(analysis.optimizers, 2):
        its = analysis.sites[one.read]
        theirs = np.unique(analysis.sites[other.read])
        both = np.isin(its, theirs)
        # All that the other one learns from, of several.
        several = np.unique(its).size > 1 and np.isin(theirs, its).all()
        if not theirs.size or not several or not _are_apart(analysis, one, other):
            continue
        backwards = one.read[both].tolist()
        labels = dict.fromkeys(analysis.ledger[b].label or "a loss" for b in backwards)
        meant = "is" if len(labels) == 1 else "are each"
        learned = f"{' and '.join(labels)} {meant} meant to train"
        return f"{learned} what {one.name} has, as well as what {other.name} has"
    return ""
