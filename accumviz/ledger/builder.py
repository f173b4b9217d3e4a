"""Ledgers by hand: rows as a test or an example writes them -> arrays. Pure: stdlib and numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accumviz import arguments
from accumviz.ledger.events import (
    CHANGED,
    CONTRIBUTED,
    PRESENT,
    Event,
    Parameter,
    Weighed,
)

# What a row of `build` has by the names of parameters.
_BY_NAME = ("contribution", "grad", "weights")


def arrays(
    parameters: list[Parameter], rows: list[dict[str, Any]]
) -> tuple[tuple[Any, ...], Weighed]:
    """See `Ledger.build`: the events, contributions, gradients, states and elements of these rows, and the weights."""
    _check_rows(parameters, rows)
    names = [parameter.name for parameter in parameters]
    shape = (len(rows), len(parameters))
    norms = {
        name: np.full(shape, np.nan, np.float32) for name in ("contribution", "grad")
    }
    exact = {
        i: (
            np.full((len(rows), p.numel), np.nan),
            np.full((len(rows), p.numel), np.nan),
        )
        for i, p in enumerate(parameters)
    }
    state = np.zeros(shape, np.uint8)
    weights: dict[int, dict[int, np.ndarray]] = {}
    events = []
    for e, row in enumerate(rows):
        for which, name in enumerate(("contribution", "grad", "weights")):
            for key, value in row.get(name, {}).items():
                if key not in names:
                    near = arguments.nearest(str(key), names)
                    raise KeyError(
                        f"rows[{e}] has a {name} of {key!r}, which is no parameter; nearest: {near}"
                    )
                p = names.index(key)
                values = _elements(
                    f"rows[{e}][{name!r}][{key!r}]", value, parameters[p].numel
                )
                if name == "weights":
                    weights.setdefault(p, {})[e] = values
                    continue
                norms[name][e, p] = np.sqrt((values**2).sum())
                exact[p][which][e] = values
                state[e, p] |= (CONTRIBUTED | CHANGED) if which == 0 else PRESENT
                # A zeroing with a 0 after it has zeroed this one, also if it was 0.
                zeroed = row["kind"] == "zero_grad" and not values.any()
                before = exact[p][1][e - 1] if e else values
                other = not np.isnan(before).any() and (before != values).any()
                if which and (zeroed or (other and row["kind"] != "backward")):
                    state[e, p] |= CHANGED
        events.append(Event(e, **{k: v for k, v in row.items() if k not in _BY_NAME}))
    found = norms["contribution"], norms["grad"], state, exact
    return (tuple(events), *found), Weighed.of(parameters, weights)


def _check_rows(parameters: Any, rows: Any) -> None:
    """What `build` was given. Raises `TypeError`."""
    for name, listed, kind, example in (
        ("parameters", parameters, Parameter, "[Parameter('w', shape=(1,))]"),
        ("rows", rows, Mapping, "[dict(kind='backward', grad={'w': -16})]"),
    ):
        if not isinstance(listed, Sequence):
            raise TypeError(
                f"{name} is {arguments.a(listed)}; expected a list, as in {example}"
            )
        for i, one in enumerate(listed):
            if not isinstance(one, kind):
                raise TypeError(
                    f"{name}[{i}] is {arguments.a(one)}; expected each as in {example}"
                )
    fields = [
        *(f.name for f in dataclasses.fields(Event) if f.name != "index"),
        *_BY_NAME,
    ]
    for e, row in enumerate(rows):
        strange = [key for key in row if key not in fields]
        if strange or "kind" not in row:
            what = f"has {strange[0]!r}" if strange else "has no 'kind'"
            raise TypeError(
                f"rows[{e}] {what}; expected 'kind' and any of {', '.join(fields[1:])}"
            )
        for name in _BY_NAME:
            if not isinstance(row.get(name, {}), Mapping):
                raise TypeError(
                    f"rows[{e}][{name!r}] is {arguments.a(row[name])}; expected {{parameter: number or list}}"
                )


def _elements(where: str, value: Any, count: int) -> np.ndarray:
    """The elements of one parameter; one number stands for all of them."""
    expected = (
        f"expected a number, or a list of {count}"
        if count != 1
        else "expected a number"
    )
    try:
        found = np.ravel(np.asarray(value, float))
    except (TypeError, ValueError):
        raise TypeError(f"{where} is {value!r:.80}; {expected}") from None
    if found.size not in (1, count):
        raise ValueError(f"{where} has {found.size} numbers; {expected}")
    return np.broadcast_to(found, (count,))
