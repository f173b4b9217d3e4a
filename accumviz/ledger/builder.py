"""Build a ledger from rows written by hand, for tests and examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from accumviz import arguments
from accumviz.ledger.events import (
    CHANGED,
    CONTRIBUTED,
    PRESENT,
    Arrays,
    Event,
    Parameter,
    Weighed,
)

# What a row of `build` has by the names of parameters.
_BY_NAME = ("contribution", "grad", "weights")
_FIELDS = [field.name for field in dataclasses.fields(Event) if field.name != "index"]

Kind = TypeVar("Kind", bound=Arrays)


def build(
    kind: type[Kind],
    parameters: list[Parameter],
    rows: list[dict[str, Any]],
    **about: Any,
) -> Kind:
    """Return the ledger of these rows; see `Ledger.build`."""
    _check(parameters, rows)
    shape = (len(rows), len(parameters))
    state = np.zeros(shape, np.uint8)
    sides = {name: [_unknown(len(rows), p) for p in parameters] for name in _BY_NAME}
    for e, row in enumerate(rows):
        for name, columns in sides.items():
            for p, elements in _by_parameter(parameters, e, row, name):
                columns[p][e] = elements
        for p, grad in enumerate(sides["grad"]):
            state[e, p] = _state(row, parameters[p], grad[max(e - 1, 0)], grad[e])
    norms = {}
    for name, bit in (("contribution", CONTRIBUTED), ("grad", PRESENT)):
        norms[name] = np.full(shape, np.nan, np.float32)
        for p, elements in enumerate(sides[name]):
            norms[name][:, p] = np.sqrt(np.square(elements).sum(axis=1))
        norms[name][state & bit == 0] = np.nan
    weighed = [e for e, row in enumerate(rows) if row.get("weights")]
    weights = {}
    if weighed:
        weights = {p: after[weighed] for p, after in enumerate(sides["weights"])}
    return kind(
        parameters,
        [_event(e, row) for e, row in enumerate(rows)],
        norms["contribution"],
        norms["grad"],
        state,
        dict(enumerate(zip(sides["contribution"], sides["grad"], strict=True))),
        weighed=Weighed(np.array(weighed, np.int64), weights),
        **about,
    )


def _unknown(rows: int, parameter: Parameter) -> np.ndarray:
    return np.full((rows, parameter.numel), np.nan)


def _event(index: int, row: dict[str, Any]) -> Event:
    return Event(index, **{k: v for k, v in row.items() if k not in _BY_NAME})


def _by_parameter(
    parameters: list[Parameter], e: int, row: dict[str, Any], name: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the columns that a row names under `name`, with their elements. Raises `KeyError` for another name."""
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


def _state(
    row: dict[str, Any], parameter: Parameter, before: np.ndarray, after: np.ndarray
) -> int:
    """Return the bits of one parameter after a row."""
    state, kind = 0, row["kind"]
    if parameter.name in row.get("contribution", {}):
        state |= CONTRIBUTED | CHANGED
    if parameter.name not in row.get("grad", {}):
        return state
    # A `zero_grad` has changed even a 0 into a 0.
    zeroed = kind == "zero_grad" and not after.any()
    other = not np.isnan(before).any() and bool((before != after).any())
    if zeroed or (other and kind != "backward"):
        state |= CHANGED
    return state | PRESENT


def _elements(where: str, value: Any, count: int) -> np.ndarray:
    """Return the elements of one parameter; one number stands for all of them."""
    expected = "a number" if count == 1 else f"a number, or a list of {count}"
    try:
        elements = np.ravel(np.asarray(value, float))
    except (TypeError, ValueError):
        raise TypeError(f"{where} is {value!r:.80}; expected {expected}") from None
    if elements.size not in (1, count):
        raise ValueError(f"{where} has {elements.size} numbers; expected {expected}")
    return np.broadcast_to(elements, (count,))


# --- what `build` is given -------------------------------------------------------------------


def _check(parameters: Any, rows: Any) -> None:
    """Raise `TypeError` for what are no parameters or rows."""
    _check_list("parameters", parameters, Parameter, "[Parameter('w', shape=(1,))]")
    _check_list("rows", rows, Mapping, "[dict(kind='backward', grad={'w': -16})]")
    fields = [*_FIELDS, *_BY_NAME]
    for e, row in enumerate(rows):
        strange = [f"has {key!r}" for key in row if key not in fields]
        if "kind" not in row:
            strange.append("has no 'kind'")
        if strange:
            raise TypeError(
                f"rows[{e}] {strange[0]}; expected 'kind' and any of {', '.join(fields[1:])}"
            )
        for name in _BY_NAME:
            if not isinstance(row.get(name, {}), Mapping):
                raise TypeError(
                    f"rows[{e}][{name!r}] is {arguments.a(row[name])}; expected {{parameter: number or list}}"
                )


def _check_list(name: str, given: Any, kind: type, example: str) -> None:
    if not isinstance(given, Sequence):
        raise TypeError(
            f"{name} is {arguments.a(given)}; expected a list, as in {example}"
        )
    for i, one in enumerate(given):
        if not isinstance(one, kind):
            raise TypeError(
                f"{name}[{i}] is {arguments.a(one)}; expected each as in {example}"
            )
