"""Build a ledger from rows written by hand, for tests and examples."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy import ndarray

from accumviz.ledger.events import (
    CHANGED,
    CONTRIBUTED,
    PRESENT,
    Arrays,
    Elements,
    Event,
    Parameter,
)

# What a row of `build` has by the names of parameters.
_BY_NAME = ("contribution", "grad", "weights")

Kind = TypeVar("Kind", bound=Arrays)


def build(
    kind: type[Kind],
    parameters: list[Parameter],
    rows: list[dict[str, Any]],
    **about: Any,
) -> Kind:
    """Return the ledger of these rows; see `Ledger.build`. Raises `KeyError` for a name that no parameter has."""
    names = [parameter.name for parameter in parameters]
    events = []
    for e, row in enumerate(rows):
        for field in _BY_NAME:
            unknown = row.get(field, {}).keys() - names
            if unknown:
                raise KeyError(
                    f"{field} of {min(unknown)!r}; the parameters are {names}"
                )
        fields = {name: row[name] for name in row if name not in _BY_NAME}
        events.append(Event(e, **fields))
    shape = (len(rows), len(parameters))
    state = np.zeros(shape, np.uint8)
    contribution = np.zeros(shape)
    grad = np.zeros(shape)
    added = _elements(rows, parameters, "contribution")
    left = _elements(rows, parameters, "grad")
    end = 0
    for p, parameter in enumerate(parameters):
        start, end = end, end + parameter.numel
        came = added[:, start:end]
        held = left[:, start:end]
        contribution[:, p] = np.linalg.norm(came, axis=1)
        grad[:, p] = np.linalg.norm(held, axis=1)
        before = np.concatenate([held[:1], held])
        for e, row in enumerate(rows):
            state[e, p] = _state(row, parameter.name, before[e], held[e])
    have_weights = [bool(row.get("weights")) for row in rows]
    weighed = np.flatnonzero(have_weights)
    weights = _elements(rows, parameters, "weights")[weighed]
    kept = tuple(range(len(parameters)))
    elements = Elements(kept, added, left, weighed, weights)
    return kind(parameters, events, contribution, grad, state, elements, **about)


def _elements(
    rows: list[dict[str, Any]], parameters: list[Parameter], field: str
) -> ndarray:
    """Return the elements that rows have of all parameters; one number stands for all of a parameter."""
    count = len(rows)
    columns = [np.zeros((count, 0))]
    for parameter in parameters:
        column = np.full((count, parameter.numel), np.nan)
        for e, row in enumerate(rows):
            of_row = row.get(field, {})
            if parameter.name in of_row:
                column[e] = np.ravel(of_row[parameter.name])
        columns.append(column)
    return np.concatenate(columns, axis=1)


def _state(row: dict[str, Any], name: str, before: ndarray, after: ndarray) -> int:
    """Return the bits of one parameter after a row."""
    contributed = name in row.get("contribution", {})
    state = CONTRIBUTED | CHANGED if contributed else 0
    if name not in row.get("grad", {}):
        return state
    # A zeroing changes even where a 0 becomes a 0.
    changed = row["kind"] == "zero_grad" and not after.any()
    if row["kind"] != "backward" and not np.isnan(before).any():
        changed |= bool((before != after).any())
    return state | PRESENT | CHANGED * changed
