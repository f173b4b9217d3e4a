"""Summarise a whole run in a few figures, beside those of another run."""

from __future__ import annotations

from typing import Any

import numpy as np

from accumviz.ledger.ledger import PRESENT, Ledger
from accumviz.show import encoded, literal
from accumviz.views import style, words

# Of larger models the norms of the larger tensors are compared, of longer runs the first steps.
_MOST_ELEMENTS, _MOST_NUMBERS = 256, 1024


def figures(ledger: Ledger) -> list[tuple[str, str]]:
    """Name and value of what a reader compares first.

    >>> figures(Ledger.build([], [dict(kind="backward"), dict(kind="step")]))
    [('backwards', '1'), ('steps', '1')]
    """
    steps = [event for event in ledger.of("step") if not event.skipped]
    told = [
        ("backwards", f"{len(ledger.of('backward')):,}"),
        ("steps", f"{len(steps):,}"),
    ]
    saved = np.array(
        [[event.saved_before, event.saved_after] for event in ledger], float
    )
    if np.isfinite(saved).any():
        told.append(
            ("saved by one graph, at most", style.size(float(np.nanmax(saved))))
        )
    reached = np.array([[event.allocated, event.peak] for event in ledger], float)
    if np.isfinite(reached).any():
        told.append(
            ("allocated on the device, at most", style.size(float(np.nanmax(reached))))
        )
    if ledger.parameters and (at := compared(ledger)):
        told.append(
            (
                f"gradient {'of the last step' if steps else 'at the end'}",
                _gradient(ledger, at[-1]),
            )
        )
    return told


def compared(ledger: Ledger) -> list[int]:
    """The events after which two runs' gradients are compared: the steps, or the end where no step was taken."""
    steps = [event.index for event in ledger.of("step") if not event.skipped]
    return steps or [len(ledger) - 1] * bool(len(ledger))


def gradients(ledger: Ledger) -> dict[str, Any]:
    """Each compared event's `.grad` as one row of numbers (null: none), the norm where elements were not kept.

    `of` names what the numbers are, so that only like is compared with like. Nothing is rounded:
    two runs that are said to be equal are.

    >>> from accumviz.ledger.ledger import Parameter
    >>> gradients(Ledger.build([Parameter("w", (1,))], [dict(kind="step", grad={"w": -20})]))
    {'of': ['w', 1], 'exact': True, 'end': False, 'steps': 1, 'rows': [[-20.0]]}
    """
    room, counts = _MOST_ELEMENTS, dict.fromkeys(range(len(ledger.parameters)), 0)
    for p in sorted(ledger.exact, key=lambda p: (ledger.parameters[p].numel, p)):
        room -= ledger.parameters[p].numel
        counts[p] = ledger.parameters[p].numel if room >= 0 else 0
    at = compared(ledger)
    kept = at[
        : max(
            _MOST_NUMBERS // max(sum(max(count, 1) for count in counts.values()), 1), 1
        )
    ]
    names = [
        part
        for p, count in counts.items()
        for part in (literal(ledger.parameters[p].name), count)
    ]
    return {
        "of": names,
        "exact": all(counts.values()),
        "end": not any(ledger[event].kind == "step" for event in at),
        "steps": len(at),
        "rows": [
            [
                x
                for p, count in counts.items()
                for x in _numbers(ledger, event, p, count)
            ]
            for event in kept
        ],
    }


def _numbers(
    ledger: Ledger, event: int, p: int, count: int
) -> list[float | str | None]:
    if not ledger.state[event, p] & PRESENT or not _read(ledger, event, p):
        return [None] * max(count, 1)
    found = ledger.exact[p][1][event] if count else ledger.grad[event, p : p + 1]
    return [encoded(float(x)) for x in found]


def _read(ledger: Ledger, event: int, p: int) -> bool:
    # What a step's optimizer does not own is no part of what it took: of two optimizers, each leaves the other's alone.
    owners = ledger.parameters[p].optimizers
    return (
        ledger[event].kind != "step"
        or not owners
        or ledger[event].details.get("optimizer_index", 0) in owners
    )


def _gradient(ledger: Ledger, event: int) -> str:
    if len(ledger.parameters) == 1:
        return words.value(ledger, event, 0)
    read = np.array(
        [_read(ledger, event, p) for p in range(len(ledger.parameters))], bool
    )
    norms = ledger.grad[event][((ledger.state[event] & PRESENT) > 0) & read]
    return (
        f"‖·‖ {style.number(float(np.sqrt((norms**2).sum())))}"
        if norms.size
        else "None"
    )
