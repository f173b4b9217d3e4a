"""Rules about whose gradient it is: parameters of no optimizer or of two, networks that train each other by mistake."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations, takewhile
from typing import Any

import numpy as np

from accumviz.checks.analysis import (
    Conditions,
    LedgerAnalysis,
    OptimizerHistory,
    between,
    for_each_optimizer,
)
from accumviz.checks.report import Findings
from accumviz.checks.suggestions import knows, zeroing
from accumviz.checks.weights import from_to
from accumviz.ledger.events import PRESENT
from accumviz.ledger.flow import number
from accumviz.show import counted

# What is zeroed or missed less often may belong to a phase that was not recorded.
_AGAIN = 3
# So many modules are named of those that a loss reaches.
_MOST_PARTS = 4


def _named(analysis: LedgerAnalysis, columns: Sequence[int]) -> str:
    """Name the first of some parameters, and how many more there are."""
    first, *others = analysis.names(columns)
    return f"{first} and {len(others)} more" if others else first


# --- parameters without an optimizer, or with two ---------------------------------------------


def parameter_outside_or_twice(analysis: LedgerAnalysis) -> Findings:
    """Find gradients that no step uses and nothing erases, and steps without any gradient."""
    is_erased = _is_erased(analysis)
    outside = [p for p in _unused(analysis) if not is_erased[p]]
    if outside:
        names = analysis.names(outside[:4])
        brought = np.flatnonzero(analysis.contributed[:, outside[0]])
        yield analysis.finding(
            "warning",
            int(brought[1]),
            evidence={"parameters": names},
            cause=f"No optimizer that steps has {_named(analysis, outside)}: gradients add up there in vain.",
            times=brought.size,
        )
    yield from _nothing_to_step_on(analysis)


@for_each_optimizer
def _nothing_to_step_on(optimizer: OptimizerHistory) -> Findings:
    """Find steps without any gradient, where backwards only reach what no optimizer has."""
    in_vain = _steps_in_vain(optimizer)
    if len(in_vain) < _AGAIN or optimizer.ledger.meta.get("steps_elsewhere"):
        return
    step, backward = in_vain[0]
    yield optimizer.finding(
        "error",
        backward,
        step=step,
        evidence={"steps of the optimizer": optimizer.steps.size},
        cause=(
            f"This backward reaches no parameter of {optimizer.name}, whose step has no gradient: what it trains "
            "is something else, as where layers are replaced after the optimizer is made. Make one for these."
        ),
        times=len(in_vain),
    )


def _steps_in_vain(optimizer: OptimizerHistory) -> list[tuple[int, int]]:
    """Return the steps without a gradient, each with the first backward since the step before."""
    grads = optimizer.ledger.grad[optimizer.steps][:, optimizer.columns]
    filled = np.any(grads > 0, axis=1)
    owned = [bool(parameter.optimizers) for parameter in optimizer.parameters]
    reached = np.any(optimizer.contributed[:, owned], axis=1)
    in_vain = []
    for step in optimizer.steps[~filled].tolist():
        before = optimizer.previous_step(step)
        since = between(optimizer.at["backward"], before, step)
        if since and not reached[since].any():
            in_vain.append((step, since[0]))
    return in_vain


def _is_erased(analysis: LedgerAnalysis) -> list[bool]:
    """Mark the parameters of which something erased a contribution."""
    flow = analysis.ledger.flow
    is_erased = np.any(flow.fates.erased >= 0, axis=0)
    marks: list[bool] = is_erased[flow.history_of].tolist()
    return marks


def _unused(analysis: LedgerAnalysis) -> list[int]:
    """Return the parameters that get gradients again and again, and of which no optimizer has stepped."""
    if any(optimizer.is_fed_by_hand for optimizer in analysis.optimizers):
        return []  # these may be what its parameters are copies of
    stepping = {optimizer.optimizer for optimizer in analysis.optimizers}
    every = range(len(analysis.parameters) if stepping else 0)
    return [p for p in every if _is_unused(analysis, p, stepping)]


def _is_unused(analysis: LedgerAnalysis, p: int, stepping: set[int]) -> bool:
    """Return whether a parameter gets gradients again and again, and none of these optimizers has it."""
    parameter = analysis.parameters[p]
    is_stepped = not stepping.isdisjoint(parameter.optimizers)
    if is_stepped or parameter.unsharded_of:
        return False
    often = _AGAIN if parameter.optimizers else 1
    return _rounds(analysis, p) > often


def _rounds(analysis: LedgerAnalysis, p: int) -> int:
    """Count the windows, of whatever optimizer, in which a parameter gets a gradient."""
    born = np.flatnonzero(analysis.contributed[:, p])
    steps = analysis.at["step"]
    return np.unique(steps.searchsorted(born)).size


# --- what optimizers step on ------------------------------------------------------------------


def with_gradients(optimizer: OptimizerHistory) -> str:
    """Say how many of an optimizer's weights have a gradient in one of its steps: "12 of 34 weights".

    Of those that FSDP shards, each rank has some.
    """
    touched = _touched(optimizer)
    every = optimizer.columns.tolist()
    columns = [p for p in every if not optimizer.parameters[p].unsharded_of]
    whole = sum(optimizer.parameters[p].numel for p in columns)
    some = sum(optimizer.parameters[p].numel for p in columns if touched[p])
    said = f"{some:,} of {whole:,} weights" if some < whole else f"{whole:,} weights"
    return f"{said} of its rank" if optimizer.is_sharded else said


def _touched(optimizer: OptimizerHistory) -> np.ndarray:
    """Mark the parameters with a `.grad` at one of an optimizer's steps, or that any step has used."""
    present = optimizer.ledger.state[optimizer.steps] & PRESENT
    flow = optimizer.ledger.flow
    consumed = np.any(flow.fates.steps > 0, axis=0)
    touched: np.ndarray = np.any(present, axis=0) | consumed[flow.history_of]
    return touched


# --- what losses are made of, and what they reach ---------------------------------------------

# A term of a loss, and the names of the parameters that it reaches.
_Reach = tuple[str, frozenset[str]]
# The first backward of each line that calls one, with its terms.
_Losses = list[tuple[int, list[_Reach]]]


def losses(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say of each line that calls backward what its losses are made of, and which modules the parts reach."""
    names = [each.name.split(".") for each in analysis.parameters]
    levels = zip(*names, strict=False)
    common = len(list(takewhile(lambda level: len(set(level)) == 1, levels)))
    # A network may be frozen when the recording ends.
    every = set(analysis.names(np.flatnonzero(analysis.contributed.any(axis=0))))
    every |= {each.name for each in analysis.parameters if each.requires_grad}
    whole = "all parameters" if len(every) == len(names) else "all trainable parameters"
    for backward, terms in _reaches(analysis):
        made_of: dict[str, list[str]] = defaultdict(list)
        for term, reached in terms:
            parts = whole if reached >= every else _parts(reached, common)
            made_of[parts].append(term)
        loss = analysis.placed(analysis.ledger[backward].label or "a loss", backward)
        yield f"{loss}: {_said_of_parts(made_of)}."


def _said_of_parts(made_of: Mapping[str, Sequence[str]]) -> str:
    said = []
    for parts, terms in made_of.items():
        each = []
        for term, times in Counter(terms).items():
            each.append(term if times == 1 else f"{term} ({times} times)")
        reached = f" reaches {parts}" if parts else ""
        said.append(" + ".join(each) + reached)
    return "; ".join(said)


def _reaches(analysis: LedgerAnalysis) -> Iterator[tuple[int, list[_Reach]]]:
    """Return the first backward of each line, with its terms; what they reach is empty where it is not known.

    One line may have several: of the losses of two networks, say, each is of other operations.
    """
    shares = analysis.shares
    met: set[tuple[int, str]] = set()
    for backward in _first_backwards(analysis).tolist():
        terms = analysis.ledger[backward].terms
        operations = {
            (int(analysis.sites[backward]), str(term.get("op"))) for term in terms
        }
        if operations <= met:
            continue
        met |= operations
        contributed = np.flatnonzero(analysis.contributed[backward])
        whole = frozenset(analysis.names(contributed))
        reached = [_reached(term) for term in terms]
        # A checkpoint hides what is in it, and `inputs=` leaves some out.
        if frozenset().union(*reached) != whole:
            reached = [frozenset()] * len(terms)
        called = []
        for n, term in enumerate(terms):
            its = (shares.backward == backward) & (shares.term == n)
            alike = np.isin(shares.objective, shares.objective[its])
            called.append(_called(term, shares.constant[alike]))
            if len(terms) == 1 and reached[0]:
                # The line may be one network's, and then another one's.
                every = analysis.contributed[shares.backward[alike]].any(axis=0)
                reached[0] |= set(analysis.names(np.flatnonzero(every)))
        yield backward, list(zip(called, reached, strict=True))


def _first_backwards(analysis: LedgerAnalysis) -> np.ndarray:
    """Return the first backward of each line and of each loss."""
    backwards, shares = analysis.at["backward"], analysis.shares
    _, first = np.unique(analysis.sites[backwards], return_index=True)
    _, of_losses = np.unique(shares.objective, return_index=True)
    return np.union1d(backwards[first], shares.backward[of_losses])


def _reached(term: Mapping[str, Any]) -> frozenset[str]:
    names = term.get("reaches")
    return frozenset(map(str, names) if isinstance(names, list) else ())


def _called(term: Mapping[str, Any], factors: np.ndarray) -> str:
    """Name a term by its operation and its factor, which may differ from one backward to the next: `10 × L1Loss`."""
    operation = re.sub(r"Backward\d*$", "", str(term.get("op")))
    if term.get("unknown"):
        return f"{operation} (not read)"
    if term.get("reduction") == "sum" and operation != "Sum":
        operation += " (sum)"
    every = np.append(factors, number(term.get("factor")))
    every = every[np.isfinite(every)]
    if np.all(every == 1):
        return operation
    return f"{from_to(every.tolist(), digits=3)} × {operation}"


def _parts(names: Iterable[str], common: int) -> str:
    """Name the modules of these parameters, below the `common` ones of all that are recorded."""
    parts = sorted({(name.split(".")[common:] or [name])[0] for name in names})
    if len(parts) > _MOST_PARTS:
        parts = [*parts[: _MOST_PARTS - 1], f"{len(parts) - _MOST_PARTS + 1} more"]
    *others, last = parts or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _misgiven(analysis: LedgerAnalysis, first: _Losses) -> Conditions:
    """Name losses that are given probabilities for logits or the reverse, or a gradient for their targets alone."""
    for backward, terms in first:
        for term, (loss, _) in zip(analysis.ledger[backward].terms, terms, strict=True):
            given = term.get("misgiven")
            said = f"probabilities of a {given} and not logits, or their logarithms, are meant for {loss}"
            if given == "logits":
                said = (
                    f"logits, and no logarithms of probabilities, are meant for {loss}"
                )
            if given == "targets":
                said = "a binary cross entropy of which the targets alone have a gradient is meant"
            if given:
                yield said, backward


def _moving_nothing(analysis: LedgerAnalysis, first: _Losses) -> Conditions:
    """Name the terms of a loss that reach no parameter of the optimizers that step on it."""
    for backward, terms in first:
        readers = set()
        for (_, optimizer), shares in analysis.window_shares.items():
            if any(backward in share.backwards for share in shares):
                readers.add(optimizer)
        moved = set()
        for parameter in analysis.parameters:
            if readers.intersection(parameter.optimizers):
                moved.add(parameter.name)
        for term, reached in terms:
            if reached and moved and moved.isdisjoint(reached):
                said = f"a part of this loss that moves no weight, {term}, is meant"
                yield said, backward


# --- what has to be meant ---------------------------------------------------------------------


def conditions(analysis: LedgerAnalysis) -> Conditions:
    """Say what has to be meant for a healthy loop to be so: what no step or no loss trains, and what several do."""
    yield from _thrown_away(analysis)
    first = list(_reaches(analysis))
    yield from _moving_nothing(analysis, first)
    yield from _misgiven(analysis, first)
    if not analysis.ledger.meta.get("steps_elsewhere"):
        yield from _unrecorded(analysis)
    for name in map(str, analysis.listed("frozen_in_vain")):
        said = f"{name} = False is meant, which freezes nothing,"
        yield said, int(analysis.at["step"][0])
    for optimizer in analysis.optimizers:
        for said in _of_optimizer(optimizer):
            yield said, int(optimizer.steps[0])
    pairs = permutations(analysis.optimizers, 2)
    shared = [_shared_loss(one, other) for one, other in pairs]
    yield from [condition for condition in shared if condition][:1]


def _thrown_away(analysis: LedgerAnalysis) -> Conditions:
    """Name parameters of which gradients are erased, and that no optimizer trains."""
    is_erased = _is_erased(analysis)
    thrown_away = [p for p in _unused(analysis) if is_erased[p]]
    if thrown_away:
        names = _named(analysis, thrown_away)
        brought = np.flatnonzero(analysis.contributed[:, thrown_away[0]])
        said = f"no optimizer is meant to apply the gradients of {names}"
        yield said, int(brought[0])


def _unrecorded(analysis: LedgerAnalysis) -> Conditions:
    """Say of losses that they reach parameters which are not recorded."""
    unrecorded = analysis.events.detail("unrecorded", 0)
    for backward in np.flatnonzero(unrecorded > 0).tolist():
        many = counted(unrecorded[backward], "parameter")
        said = (
            f"this loss is meant to reach {many} without an optimizer or a recorded model, as layers in a plain list "
            "are"
        )
        yield said, backward


def _of_idle(optimizer: OptimizerHistory) -> Iterator[str]:
    """Say which parameters of an optimizer no loss reaches, and which are frozen."""
    name, parameters = optimizer.name, optimizer.parameters
    idle = _idle(optimizer)
    frozen = [p for p in idle if not parameters[p].requires_grad]
    unreached = [p for p in idle if parameters[p].requires_grad]
    if unreached:
        names = _named(optimizer, unreached)
        yield f"{name} is meant to have {names}, of which no loss reaches any"
    if frozen:
        yield f"{name} is meant to have {_named(optimizer, frozen)} frozen"


def _of_optimizer(optimizer: OptimizerHistory) -> Iterator[str]:
    """Say what an optimizer steps on in vain: a gradient of 0, an empty group, what is frozen or no loss reaches."""
    yield from _of_idle(optimizer)
    zeros = _of_zeros(optimizer)
    if zeros:
        times = optimizer.contributed[:, zeros[0]].sum()
        names = _named(optimizer, zeros)
        yield f"a gradient of 0 in each of {times} backwards is meant for {names}"
    empty = optimizer.events.detail("empty_groups", default=False)
    if empty[optimizer.steps[:1]].any():
        yield f"a group of {optimizer.name} without a parameter is meant"


def _idle(optimizer: OptimizerHistory) -> list[int]:
    """Return an optimizer's parameters without a `.grad` at any of its steps."""
    # What one rank lacks another one may have, and what a shard lacks the whole gradient that FSDP keeps.
    if (
        optimizer.is_sharded
        or optimizer.rank is not None
        or len(optimizer.windows) < _AGAIN
    ):
        return []
    touched = _touched(optimizer)
    idle: list[int] = optimizer.columns[~touched[optimizer.columns]].tolist()
    return idle


def _of_zeros(optimizer: OptimizerHistory) -> list[int]:
    """Return an optimizer's parameters that get gradients in several windows, all of them 0."""
    # What is 0 on one rank may be more on another one.
    if optimizer.world_size > 1:
        return []
    brings = optimizer.contributed & (optimizer.ledger.contribution != 0)
    still = optimizer.columns[~brings.any(axis=0)[optimizer.columns]].tolist()
    return [p for p in still if _rounds(optimizer, p) >= _AGAIN]


def _shared_loss(
    one: OptimizerHistory, other: OptimizerHistory
) -> tuple[str, int] | None:
    """Name losses that two optimizers learn from, where one has several: opponents, or parts of one model."""
    its = one.sites[one.read]
    theirs = np.unique(one.sites[other.read])
    # Of several that it learns from, what the other one learns from as well.
    shared = np.isin(theirs, its).any()
    several = np.unique(its).size > 1
    if not (shared and several and _are_apart(one, other)):
        return None
    backwards = one.read[np.isin(its, theirs)].tolist()
    every = [one.ledger[b].label or "a loss" for b in backwards]
    labels = list(dict.fromkeys(every))
    trained = " and ".join(labels)
    verb = "is" if len(labels) == 1 else "are each"
    said = f"{trained} {verb} meant to train what {one.name} has, as well as what {other.name} has"
    return said, backwards[0]


# --- several networks -------------------------------------------------------------------------


# Backwards that leak, each with the step that was to read it, and the one that did so later.
_Leaks = Iterator[tuple[int, int, int]]


@for_each_optimizer
def gan_gradient_leak(optimizer: OptimizerHistory) -> Findings:
    """Find a loss of one network that another network's step consumes as well."""
    leaks = list(_all_leaks(optimizer))
    if not leaks:
        return
    b, early, late = min(leaks)
    label = optimizer.ledger[b].label or "The loss"
    leaked = {leak[0] for leak in leaks}
    window = optimizer.windows[late]
    alone = [backward for backward in window if backward not in leaked]
    yield optimizer.finding(
        "error",
        b,
        step=late,
        evidence={"consumed by the steps at events": [early, late]},
        cause=(
            f"{label} also reached the parameters of {optimizer.name}, and its gradient was still there when that "
            "optimizer stepped for its own loss. Zero it in between, or keep this loss away from these parameters, by "
            "`detach` or `requires_grad_(False)`."
        ),
        suggestion=_zeroed_first(optimizer, early, late, alone),
        times=len(leaked),
    )


def _all_leaks(optimizer: OptimizerHistory) -> _Leaks:
    """Return each backward that leaks from another optimizer's loss, where this one has several, and both steps."""
    for other in optimizer.optimizers:
        if _are_apart(optimizer, other):
            yield from _read_later(optimizer, other)
            yield from _read_together(optimizer, other)


def _are_apart(one: OptimizerHistory, other: OptimizerHistory) -> bool:
    """Return whether two optimizers of one rank have networks of their own: no parameter or layer in common."""
    apart = set(one.columns).isdisjoint(other.columns)
    layers = _layers(one) & _layers(other)
    return one.rank == other.rank and apart and not layers


def _layers(optimizer: OptimizerHistory) -> set[str]:
    """Return the names of the layers that an optimizer has parameters of."""
    names = optimizer.names(optimizer.columns)
    return {name.rpartition(".")[0] for name in names if "." in name}


def _read_later(optimizer: OptimizerHistory, other: OptimizerHistory) -> _Leaks:
    """Return each backward that this optimizer's step read when the other one had stepped on it, and both steps.

    Between them, this optimizer has a loss of its own. Steps at different paces share one loss: that leaks nothing.
    """
    sites = optimizer.sites
    shared = set(sites[list(other.first_step_of)].tolist())
    same_pace = abs(optimizer.steps.size - other.steps.size) <= 1
    for b, late in optimizer.first_step_of.items():
        early = other.first_step_of.get(b, late)
        inside = between(optimizer.backwards, early, late)
        its_sites = set(sites[inside].tolist())
        # One line of a trainer may call the backwards of both.
        is_its_own = inside and not other.contributed[inside][:, other.columns].any()
        has_another_loss = is_its_own or not its_sites <= shared
        if has_another_loss and (same_pace or sites[b] not in its_sites):
            yield b, early, late


def _read_together(optimizer: OptimizerHistory, other: OptimizerHistory) -> _Leaks:
    """Return what both optimizers read of one loss where it trains one of them only, and both steps.

    The loop erases this one's loss for the other one, and not the other's for this one.
    """
    sites = optimizer.sites
    reached = np.isin(np.arange(len(sites)), other.backwards)
    erased = reached & ~other.in_use
    for step, window in optimizer.windows.items():
        lost = [b for b in window if erased[b]]
        its_sites = sites[lost]
        for b in window:
            # Those of another line that come after the first that was erased.
            follows = lost and b > lost[0] and sites[b] not in its_sites
            if follows and b in other.first_step_of:
                yield b, other.first_step_of[b], step


def _zeroed_first(
    analysis: LedgerAnalysis,
    early: int,
    step: int,
    alone: list[int],
) -> str:
    """Suggest to zero below the other's step, where backwards that do not leak come after it."""
    other, late = analysis.ledger[early], analysis.ledger[step]
    if not alone or alone[0] < early or not knows(other, late):
        return ""
    return analysis.code.added(other, zeroing(late), below=True)
