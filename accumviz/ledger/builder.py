"""Build a ledger from rows written by hand, for tests and examples."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

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
    exact = {}
    weights = {}
    weighed = [e for e, row in enumerate(rows) if row.get("weights")]
    for p, parameter in enumerate(parameters):
        added = _column(rows, parameter, "contribution")
        left = _column(rows, parameter, "grad")
        contribution[:, p] = np.linalg.norm(added, axis=1)
        grad[:, p] = np.linalg.norm(left, axis=1)
        exact[p] = added, left
        if weighed:
            weights[p] = _column(rows, parameter, "weights")[weighed]
        before = np.concatenate([left[:1], left])
        for e, row in enumerate(rows):
            state[e, p] = _state(row, parameter.name, before[e], left[e])
    return kind(
        parameters,
        events,
        contribution,
        grad,
        state,
        exact,
        weighed=Weighed(np.array(weighed, np.int64), weights),
        **about,
    )


def _column(rows: list[dict[str, Any]], parameter: Parameter, field: str) -> np.ndarray:
    """Return the elements that rows have of a parameter; one number stands for all of them."""
    elements = np.full((len(rows), parameter.numel), np.nan)
    for e, row in enumerate(rows):
        of_row = row.get(field, {})
        if parameter.name in of_row:
            elements[e] = np.ravel(of_row[parameter.name])
    return elements


def _state(
    row: dict[str, Any], name: str, before: np.ndarray, after: np.ndarray
) -> int:
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
