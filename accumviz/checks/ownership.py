"""A rule about the owner of a parameter: no optimizer, two of them, or one that never gets its gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from accumviz.checks.analysis import LedgerAnalysis, OptimizerHistory
from accumviz.checks.report import Finding
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT
from accumviz.ledger.flow import steps_of

# What is zeroed or missed less often may belong to a phase that was not recorded.
_AGAIN = 3
_RULE = "parameter-outside-or-twice"


def parameter_outside_or_twice(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find gradients that no step uses, or that two optimizers apply; note parameters that no loss reaches."""
    yield from list(_replaced(analysis)) or _outside(analysis)
    yield from _only_zeroed(analysis)
    yield from _applied_twice(analysis)
    yield from _unreached(analysis)


def _replaced(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find an optimizer that steps in vain, as the backwards reach other parameters than it was made with."""
    ledger = analysis.ledger
    owned = np.array([bool(p.optimizers) for p in ledger.parameters], bool)
    touched = _touched(analysis)
    for optimizer in analysis.optimizers:
        same_rank = [
            p.rank == optimizer.rank and not p.unsharded_of for p in ledger.parameters
        ]
        reached = analysis.contributed.any(axis=0) & np.array(same_rank, bool)
        others = np.flatnonzero(reached)
        if not others.size or owned[others].any() or touched[optimizer.columns].any():
            continue
        born = np.flatnonzero(analysis.contributed[:, others].any(axis=1))
        vain = sorted({optimizer.next_step(b) for b in born.tolist()})
        vain = [step for step in vain if step < len(analysis.events)]
        if len(vain) < _AGAIN:
            continue
        names = [ledger.parameters[p].name for p in others]
        mine = [ledger.parameters[p].name for p in optimizer.columns[:4]]
        yield analysis.finding(
            _RULE,
            "error",
            vain[0],
            step=vain[0],
            evidence={
                "parameters of the optimizer": mine,
                "parameters with gradients": names[:4],
                "steps that found nothing": len(vain),
            },
            cause=(
                f"{optimizer.name} has parameters that no backward reaches, and what they reach, {_together(names)}, "
                "belongs to no optimizer: nothing is trained. An optimizer that is made before `fully_shard`, or "
                "before a layer is replaced, keeps the parameters of before."
            ),
            times=len(vain),
            optimizer=optimizer.optimizer,
        )


def _outside(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find gradients that grow in parameters which no optimizer that steps has."""
    ledger = analysis.ledger
    steps = np.sort(analysis.at("step"))
    stepping = {optimizer.optimizer for optimizer in analysis.optimizers}
    growing: dict[tuple[int, ...], list[int]] = {}
    for p, parameter in enumerate(ledger.parameters):
        if stepping.intersection(parameter.optimizers) or parameter.unsharded_of:
            continue
        born = np.flatnonzero(analysis.contributed[:, p])
        rounds = np.unique(np.searchsorted(steps, born)).size
        erased = (ledger.outcomes.erased[born, p] >= 0).any()
        least = _AGAIN if parameter.optimizers else 1
        if stepping and born.size > 1 and not erased and rounds > least:
            growing.setdefault(tuple(parameter.optimizers), []).append(p)
    for owners, columns in growing.items():
        whose = "to no optimizer"
        if owners:
            whose = f"to {analysis.optimizer_name(owners[0])}, which never steps"
        name = ledger.parameters[columns[0]].name
        yield analysis.finding(
            _RULE,
            "warning",
            int(np.flatnonzero(analysis.contributed[:, columns[0]])[1]),
            evidence={
                "parameters": [ledger.parameters[p].name for p in columns[:4]],
                "in all": len(columns),
                "norm of .grad at the end": float(ledger.grad[-1, columns[0]]),
            },
            cause=(
                f"{name} gets gradients and belongs {whose}: it is never trained, and never zeroed: what it gets "
                "stays in its `.grad`."
            ),
            times=len(columns),
            optimizer=owners[0] if owners else None,
        )


def _only_zeroed(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find an optimizer that takes no step, and zeroes again and again what backwards brought."""
    ledger = analysis.ledger
    stepping = {optimizer.optimizer for optimizer in analysis.optimizers}
    numbers = {o for p in ledger.parameters for o in p.optimizers} - stepping
    zeros = analysis.events.where("kind", "zero_grad")
    for number in sorted(numbers):
        optimizer = OptimizerHistory(analysis, number)
        lost = optimizer.lost_here
        erasers = sorted(set(lost.values()))
        changed = ledger.state[erasers] & CHANGED
        others = np.delete(changed, optimizer.columns, axis=1)
        if len(erasers) < _AGAIN or not zeros[erasers].all() or others.any():
            continue
        names = [ledger.parameters[p].name for p in optimizer.columns]
        yield analysis.finding(
            _RULE,
            "warning",
            erasers[0],
            evidence={
                "parameters": names[:4],
                "in all": len(names),
                "backwards erased": list(lost)[:8],
            },
            cause=(
                f"{optimizer.name} zeroes the gradients of {_together(names)}, and never steps: what {len(lost)} "
                "backwards brought there trains nothing."
            ),
            times=len(erasers),
            optimizer=number,
        )


def _applied_twice(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a parameter whose contributions several optimizers apply."""
    ledger = analysis.ledger
    shared: dict[tuple[int, ...], list[int]] = {}
    for p, parameter in enumerate(ledger.parameters):
        if len(set(parameter.optimizers)) > 1:
            shared.setdefault(parameter.optimizers, []).append(p)
    for owners, columns in shared.items():
        applied = [
            (b, second, p)
            for p in columns
            for b, second in _second_steps(analysis, p, owners)
        ]
        if not applied:
            continue
        b, second, p = applied[0]
        yield analysis.finding(
            _RULE,
            "warning",
            second,
            step=second,
            evidence={
                "parameters": [ledger.parameters[q].name for q in columns[:4]],
                "optimizers": [analysis.optimizer_name(o) for o in owners],
                "contribution applied twice": b,
            },
            cause=(
                f"{ledger.parameters[p].name} belongs to {len(owners)} optimizers, and several of them apply the "
                "same contribution."
            ),
            times=len({b for b, _, _ in applied}),
            optimizer=owners[-1],
        )


def _second_steps(
    analysis: LedgerAnalysis, p: int, owners: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Return each contribution that two optimizers applied, and the later of their steps."""
    born = np.flatnonzero(analysis.contributed[:, p])
    erased = analysis.ledger.outcomes.erased[born, p]
    never = len(analysis.events)
    end = np.where(erased < 0, never, erased)
    readers = []
    for owner in owners:
        steps = steps_of(analysis.ledger, (owner,))
        first = np.append(steps, never)[np.searchsorted(steps, born)]
        readers.append(np.where(first < end, first, never))
    second = np.sort(readers, axis=0)[1]
    for at in np.flatnonzero(second < never).tolist():
        yield int(born[at]), int(second[at])


def _unreached(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Note parameters that no backward reaches, beside others of the same optimizer that get gradients."""
    ledger = analysis.ledger
    touched = _touched(analysis)
    waiting = np.array(
        [p.requires_grad and not p.unsharded_of for p in ledger.parameters], bool
    )
    unsharded = {
        p.unsharded_of
        for p, some in zip(ledger.parameters, touched, strict=True)
        if some
    }
    for optimizer in analysis.optimizers:
        alone = optimizer.columns[(waiting & ~touched)[optimizer.columns]]
        many = optimizer.backwards.size
        # What one rank lacks another one may have.
        if not alone.size or not many or optimizer.rank is not None:
            continue
        names = [ledger.parameters[p].name for p in alone]
        # What FSDP has not scattered yet is elsewhere.
        if optimizer.steps.size < _AGAIN or unsharded.intersection(names):
            continue
        yield analysis.finding(
            _RULE,
            "note",
            int(optimizer.backwards[0]),
            evidence={"parameters": names[:4], "in all": len(names), "backwards": many},
            cause=(
                f"None of {many} backwards has reached {_together(names)}, which {optimizer.name} is to train: what "
                "is not used, or is detached on the way to the loss, gets no gradient."
            ),
            times=len(names),
            optimizer=optimizer.optimizer,
        )


def _together(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _touched(analysis: LedgerAnalysis) -> np.ndarray:
    """For each parameter, whether anything ever happened to its `.grad`."""
    touched: np.ndarray = np.any(
        analysis.ledger.state & (CONTRIBUTED | PRESENT | CHANGED), axis=0
    )
    return touched
