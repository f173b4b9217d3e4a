"""Rules that look at whose parameters are trained: by nobody, by two optimizers, or by one that gets nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from accumviz.checks.analysis import Case, Loop
from accumviz.checks.report import Finding
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT
from accumviz.ledger.lifecycle import steps_of

# What is zeroed or missed less often may belong to a phase that was not recorded.
_AGAIN = 3


def parameter_outside_or_twice(case: Case) -> Iterator[Finding]:
    """A gradient that nobody uses and nobody zeroes, or that is only zeroed; or one that two optimizers apply.

    And, as a note, a parameter that is its optimizer's and that no loss has reached.
    """
    yield from list(_stale(case)) or _outside(case)
    yield from _only_zeroed(case)
    yield from _twice(case)
    yield from _unreached(case)


def _stale(case: Case) -> Iterator[Finding]:
    """An optimizer that steps in vain, as the backwards reach other parameters than those that it was made with."""
    ledger = case.ledger
    owned = np.array([bool(p.optimizers) for p in ledger.parameters], bool)
    counts = np.array([not p.unsharded_of for p in ledger.parameters], bool)
    there = _touched(case)
    for loop in case.loops:
        mine = np.array([p.rank == loop.rank for p in ledger.parameters], bool) & counts
        others = np.flatnonzero(mine & case.contributed.any(axis=0))
        # What the loss reaches is nobody's, and nobody's own is ever reached.
        if not others.size or owned[others].any() or there[loop.columns].any():
            continue
        born = np.flatnonzero(case.contributed[:, others].any(axis=1))
        vain = np.unique(np.searchsorted(loop.steps, born))
        vain = loop.steps[vain[vain < loop.steps.size]]
        if vain.size < _AGAIN:
            continue
        names = [ledger.parameters[p].name for p in others]
        yield case.finding(
            "parameter-outside-or-twice",
            "error",
            int(vain[0]),
            step=int(vain[0]),
            evidence={
                "parameters of the optimizer": [
                    ledger.parameters[p].name for p in loop.columns[:4]
                ],
                "parameters with gradients": names[:4],
                "steps that found nothing": int(vain.size),
            },
            cause=(
                f"{loop.name} has parameters that no backward reaches, and what they reach, {_together(names)}, "
                "belongs to no optimizer: nothing is trained. An optimizer that is made before `fully_shard`, or "
                "before a layer is replaced, keeps the parameters of before."
            ),
            times=int(vain.size),
            optimizer=loop.optimizer,
        )


def _outside(case: Case) -> Iterator[Finding]:
    ledger = case.ledger
    steps = np.concatenate([loop.steps for loop in case.loops] or [np.zeros(0, int)])
    if not steps.size:
        return
    stepped = {loop.optimizer for loop in case.loops}
    found: dict[tuple[int, ...], list[int]] = {}
    for p, parameter in enumerate(ledger.parameters):
        if not stepped.isdisjoint(parameter.optimizers) or parameter.unsharded_of:
            continue
        born = np.flatnonzero(case.contributed[:, p])
        grows = born.size > 1 and (ledger.fates.erased[born, p] < 0).all()
        rounds = np.unique(np.searchsorted(np.sort(steps), born)).size
        if grows and rounds > (_AGAIN if parameter.optimizers else 1):
            found.setdefault(tuple(parameter.optimizers), []).append(p)
    for owners, columns in found.items():
        whose = (
            f"to {case.optimizer_name(owners[0])}, which never steps"
            if owners
            else "to no optimizer"
        )
        yield case.finding(
            "parameter-outside-or-twice",
            "warning",
            int(np.flatnonzero(case.contributed[:, columns[0]])[1]),
            evidence={
                "parameters": [ledger.parameters[p].name for p in columns[:4]],
                "in all": len(columns),
                "norm of .grad at the end": float(ledger.grad[-1, columns[0]]),
            },
            cause=(
                f"{ledger.parameters[columns[0]].name} gets gradients and belongs {whose}: it is never trained, "
                "and never zeroed: what it gets stays in its `.grad`."
            ),
            times=len(columns),
            optimizer=owners[0] if owners else None,
        )


def _only_zeroed(case: Case) -> Iterator[Finding]:
    """An optimizer that takes no step, and zeroes again and again what backwards brought that another one used."""
    ledger, stepped = case.ledger, {loop.optimizer for loop in case.loops}
    zeroing = case.events.where("kind", "zero_grad")
    for optimizer in sorted(
        {o for p in ledger.parameters for o in p.optimizers} - stepped
    ):
        loop = Loop(case, optimizer)
        erasers = sorted(set(loop.lost_here.values()))
        others = np.delete(ledger.state[erasers] & CHANGED, loop.columns, axis=1)
        if len(erasers) < _AGAIN or not zeroing[erasers].all() or others.any():
            continue
        lost, names = (
            list(loop.lost_here),
            [ledger.parameters[p].name for p in loop.columns],
        )
        yield case.finding(
            "parameter-outside-or-twice",
            "warning",
            erasers[0],
            evidence={
                "parameters": names[:4],
                "in all": len(names),
                "backwards erased": lost[:8],
            },
            cause=(
                f"{loop.name} zeroes the gradients of {_together(names)}, and never steps: what {len(lost)} backwards "
                "brought there trains nothing."
            ),
            times=len(erasers),
            optimizer=optimizer,
        )


def _twice(case: Case) -> Iterator[Finding]:
    ledger = case.ledger
    by_owners: dict[tuple[int, ...], list[int]] = {}
    for p, parameter in enumerate(ledger.parameters):
        if len(set(parameter.optimizers)) > 1:
            by_owners.setdefault(parameter.optimizers, []).append(p)
    for owners, columns in by_owners.items():
        for p in columns:
            born = np.flatnonzero(case.contributed[:, p])
            end = np.where(
                ledger.fates.erased[born, p] < 0,
                len(case.events),
                ledger.fates.erased[born, p],
            )
            read = []
            for owner in owners:
                mine = steps_of(ledger, (owner,))
                after = np.searchsorted(mine, born)
                step = np.append(mine, len(case.events))[after]
                read.append(np.where(step < end, step, -1))
            both = np.flatnonzero((np.array(read) >= 0).all(axis=0))
            if not both.size:
                continue
            second = int(max(one[both[0]] for one in read))
            yield case.finding(
                "parameter-outside-or-twice",
                "warning",
                second,
                step=second,
                evidence={
                    "parameters": [ledger.parameters[q].name for q in columns[:4]],
                    "optimizers": [case.optimizer_name(o) for o in owners],
                    "contribution applied twice": int(born[both[0]]),
                },
                cause=(
                    f"{ledger.parameters[p].name} belongs to {len(owners)} optimizers, and each of them applies the "
                    "same contribution."
                ),
                times=int(both.size),
                optimizer=owners[-1],
            )
            break


def _unreached(case: Case) -> Iterator[Finding]:
    """Parameters that wait for a gradient in vain, beside others of the same optimizer that get one."""
    ledger = case.ledger
    waiting = np.array(
        [p.requires_grad and not p.unsharded_of for p in ledger.parameters], bool
    )
    there = _touched(case)
    kept = {
        p.unsharded_of
        for p, some in zip(ledger.parameters, there.tolist(), strict=True)
        if some
    }
    for loop in case.loops:
        alone, many = (
            loop.columns[(waiting & ~there)[loop.columns]],
            loop.backwards.size,
        )
        # What one rank lacks another one may have.
        if (
            not alone.size
            or not many
            or loop.steps.size < _AGAIN
            or loop.rank is not None
        ):
            continue
        names = [ledger.parameters[p].name for p in alone]
        # What FSDP has not scattered yet is elsewhere.
        names = [name for name in names if name not in kept] or names
        yield case.finding(
            "parameter-outside-or-twice",
            "note",
            int(loop.backwards[0]),
            evidence={"parameters": names[:4], "in all": len(names), "backwards": many},
            cause=(
                f"What {many} backwards brought to {_together(names)} waits to be synchronised, and no step has read "
                "it."
                if kept.issuperset(names)
                else f"None of {many} backwards has reached {_together(names)}, which {loop.name} is to train: what is "
                "not used, or is detached on the way to the loss, gets no gradient."
            ),
            times=len(names),
            optimizer=loop.optimizer,
        )


def _together(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _touched(case: Case) -> np.ndarray:
    """For each parameter, whether anything ever happened to its `.grad`."""
    found: np.ndarray = np.any(
        (case.ledger.state & (CONTRIBUTED | PRESENT | CHANGED)) > 0, axis=0
    )
    return found
