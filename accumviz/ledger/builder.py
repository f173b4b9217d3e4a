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
    """Return the ledger of these rows; see `Ledger.build`."""
    for row in rows:
        _check(row, [parameter.name for parameter in parameters])
    state = np.zeros((len(rows), len(parameters)), np.uint8)
    added, left = np.full((2, *state.shape), np.nan)
    exact = {}
    weights = {}
    weighed = [e for e, row in enumerate(rows) if row.get("weights")]
    for p, parameter in enumerate(parameters):
        of_added, of_left, after = (_column(rows, parameter, n) for n in _BY_NAME)
        for e, row in enumerate(rows):
            state[e, p] = _state(row, parameter, of_left[max(e - 1, 0)], of_left[e])
        added[:, p] = np.linalg.norm(of_added, axis=1)
        left[:, p] = np.linalg.norm(of_left, axis=1)
        exact[p] = of_added, of_left
        if weighed:
            weights[p] = after[weighed]
    events = []
    for e, row in enumerate(rows):
        fields = {name: row[name] for name in row if name not in _BY_NAME}
        events.append(Event(e, **fields))
    kept = Weighed(np.array(weighed, np.int64), weights)
    return kind(parameters, events, added, left, state, exact, weighed=kept, **about)


def _check(row: dict[str, Any], names: list[str]) -> None:
    """Raise `KeyError` for a name that no parameter has."""
    for field in _BY_NAME:
        for name in row.get(field, {}):
            if name not in names:
                raise KeyError(f"{field} of {name!r}; the parameters are {names}")


def _column(rows: list[dict[str, Any]], parameter: Parameter, field: str) -> np.ndarray:
    """Return the elements that rows have of a parameter; one number stands for all of them."""
    elements = np.full((len(rows), parameter.numel), np.nan)
    for e, row in enumerate(rows):
        if parameter.name in row.get(field, {}):
            elements[e] = np.ravel(row[field][parameter.name])
    return elements


def _state(
    row: dict[str, Any], parameter: Parameter, before: np.ndarray, after: np.ndarray
) -> int:
    """Return the bits of one parameter after a row."""
    state = 0
    if parameter.name in row.get("contribution", {}):
        state |= CONTRIBUTED | CHANGED
    if parameter.name not in row.get("grad", {}):
        return state
    # A `zero_grad` has changed even a 0 into a 0.
    zeroed = row["kind"] == "zero_grad" and not after.any()
    other = not np.isnan(before).any() and bool((before != after).any())
    if zeroed or (other and row["kind"] != "backward"):
        state |= CHANGED
    return state | PRESENT
