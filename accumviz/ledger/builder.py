"""Build a ledger from rows written by hand, for tests and examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
    shape = (len(rows), len(parameters))
    exact = {
        p: (
            np.full((len(rows), one.numel), np.nan),
            np.full((len(rows), one.numel), np.nan),
        )
        for p, one in enumerate(parameters)
    }
    state = np.zeros(shape, np.uint8)
    weights: dict[int, dict[int, np.ndarray]] = {}
    for e, row in enumerate(rows):
        for p, added in _by_parameter(parameters, e, row, "contribution"):
            exact[p][0][e] = added
            state[e, p] |= CONTRIBUTED | CHANGED
        for p, grad in _by_parameter(parameters, e, row, "grad"):
            exact[p][1][e] = grad
            state[e, p] |= PRESENT
            if _changes(row["kind"], exact[p][1][e - 1] if e else grad, grad):
                state[e, p] |= CHANGED
        for p, weight in _by_parameter(parameters, e, row, "weights"):
            weights.setdefault(p, {})[e] = weight
    norms = np.full((2, *shape), np.nan, np.float32)
    for p, sides in exact.items():
        norms[:, :, p] = np.sqrt((np.array(sides) ** 2).sum(axis=2))
    for side, bit in zip(norms, (CONTRIBUTED, PRESENT), strict=True):
        side[state & bit == 0] = np.nan
    fields = [{k: v for k, v in row.items() if k not in _BY_NAME} for row in rows]
    events = tuple(Event(e, **about) for e, about in enumerate(fields))
    return (events, *norms, state, exact), Weighed.of(parameters, weights)


def _by_parameter(
    parameters: list[Parameter], e: int, row: dict[str, Any], name: str
) -> Iterator[tuple[int, np.ndarray]]:
    """The columns that a row names under `name`, with their elements. Raises `KeyError` for another name."""
    names = [parameter.name for parameter in parameters]
    for key, value in row.get(name, {}).items():
        if key not in names:
            near = arguments.nearest(str(key), names)
            raise KeyError(
                f"rows[{e}] has a {name} of {key!r}, which is no parameter; nearest: {near}"
            )
        p = names.index(key)
        where = f"rows[{e}][{name!r}][{key!r}]"
        yield p, _elements(where, value, parameters[p].numel)


def _changes(kind: str, before: np.ndarray, after: np.ndarray) -> bool:
    """Whether an event changed a `.grad` that is there after it: a `zero_grad` also a 0 into a 0."""
    if kind == "zero_grad" and not after.any():
        return True
    other = not np.isnan(before).any() and bool((before != after).any())
    return other and kind != "backward"


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
