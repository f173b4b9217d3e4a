"""Elements of large parameters' `.grad`, kept on request: as a ledger holds them, and as a chunk of a file does. Pure.

A ledger maps a parameter's index to two arrays: the events after which its elements were taken, and those elements
(events × elements). A chunk has them one after the other: `sketched` says for each the event, the parameter and how
many there are (3 × sketches), `sketches` are the elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from accumviz.ledger.container import whole

Sketches = Mapping[int, tuple[np.ndarray, np.ndarray]]


def pack(where: np.ndarray, elements: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a chunk; single precision where that is all that the numbers have."""
    if not where.size:
        return {}
    with np.errstate(over="ignore"):
        single = elements.astype("<f4")
    same = (single == elements) | (np.isnan(single) & np.isnan(elements))
    return {
        "sketched": where.astype("<i4"),
        "sketches": single if same.all() else elements.astype("<f8"),
    }


def flat(sketches: Sketches, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of these events, counted from the first of them, in the order of the events."""
    where, elements = [], []
    for p in sorted(sketches):
        events, found = sketches[p]
        here = slice(*np.searchsorted(events, [start, stop]).tolist())
        where += [(event - start, p, found.shape[1]) for event in events[here].tolist()]
        elements += list(found[here])
    order = sorted(range(len(where)), key=where.__getitem__)
    joined = [elements[i] for i in order]
    return np.array([where[i] for i in order], np.int64).reshape(
        -1, 3
    ).T, np.concatenate(joined or [np.zeros(0)])


class Gathered:
    """Puts the sketches of a file's chunks together."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, np.ndarray]]] = {}

    def add(self, arrays: Mapping[str, np.ndarray], count: int, before: int) -> None:
        """Those of a chunk of so many events, with so many before it. Raises `ValueError` for what is none."""
        if "sketched" not in arrays:
            return
        where, elements = arrays["sketched"], arrays["sketches"]
        if (
            where.dtype != np.dtype("<i4")
            or where.ndim != 2
            or len(where) != 3
            or not where.size
        ):
            raise ValueError(f"sketches are of an array of {where.dtype} {where.shape}")
        if elements.ndim != 1 or elements.dtype.kind != "f":
            raise ValueError(
                f"sketches are an array of {elements.dtype} {elements.shape}"
            )
        rows, leaves, lengths = where.astype(np.int64)
        if (
            rows.min() < 0
            or rows.max() >= count
            or (np.diff(rows) < 0).any()
            or leaves.min() < 0
        ):
            raise ValueError("sketches are not in the order of their events")
        if lengths.min() < 0 or lengths.sum() != len(elements):
            raise ValueError(
                f"sketches of {lengths.sum()} elements, and {len(elements)} are there"
            )
        ends = np.cumsum(lengths).tolist()
        for row, leaf, end, length in zip(
            rows.tolist(), leaves.tolist(), ends, lengths.tolist(), strict=True
        ):
            self._parts.setdefault(leaf, []).append(
                (row + before, elements[end - length : end])
            )

    def of(self, parameters: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """What a ledger of so many parameters holds. Raises `ValueError` where one has sketches of several lengths."""
        found = {}
        for p, parts in sorted(self._parts.items()):
            events = np.array([event for event, _ in parts], np.int64)
            if (
                p >= parameters
                or len({len(elements) for _, elements in parts}) > 1
                or (np.diff(events) <= 0).any()
            ):
                raise ValueError(
                    f"the sketches of parameter {p} do not belong together"
                )
            found[p] = events, np.array([elements for _, elements in parts], float)
        return found


def asked(meta: Mapping[str, Any]) -> int:
    """How many elements of each parameter a recording was asked to keep; 0 where it was not."""
    found = meta.get("sketch", 0)
    return found if whole(found) else 0
