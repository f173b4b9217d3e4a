"""A graph as one chunk of a file: names in a table, everything else as columns of numbers, so NaN survives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from accumviz.graph.nodes import Edge, Node, Saved
from accumviz.ledger.container import Reader, plain


class _Table:
    """Distinct things in order of first appearance, so that a column is small integers."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self.index.setdefault(thing, len(self.index))


_COLUMNS = ("op", "name", "module", "shape", "dtype")


Parts = tuple[tuple[Node, ...], tuple[Edge, ...], tuple[int, ...], dict[str, Any]]


def encode(graph: Parts) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Turn a graph (nodes, edges, roots, meta) into one chunk: JSON with a table of names, and columns of numbers."""
    (graph_nodes, edges, roots, meta), table = graph, _Table()
    nodes = [
        [table(getattr(n, c)) for c in _COLUMNS] + [n.alive, n.operations, n.parameters]
        for n in graph_nodes
    ]
    saved = [
        (
            n.id,
            table(s.attr),
            table(s.shape),
            table(s.dtype),
            s.bytes,
            s.storage,
            s.parameter,
        )
        for n in graph_nodes
        for s in n.saved
    ]
    numbers: dict[str, np.ndarray] = {}
    for what in ("value", "grad"):
        known = [
            (n.id, np.asarray(getattr(n, what), "<f8"))
            for n in graph_nodes
            if getattr(n, what) is not None
        ]
        rows = [(i, table(array.shape), array.size) for i, array in known]
        numbers[f"{what}_at"] = np.array(rows, "<i4").reshape(-1, 3)
        numbers[what] = np.concatenate(
            [np.zeros(0, "<f8"), *(array.ravel() for _, array in known)]
        )
    arrays = {
        "nodes": np.array(nodes, "<i4").reshape(-1, len(_COLUMNS) + 3),
        "edges": np.array(
            [(e.source, e.target, e.input, e.output) for e in edges], "<i4"
        ).reshape(-1, 4),
        "saved": np.array(saved, "<i8").reshape(-1, 7),
        **numbers,
    }
    return {"roots": list(roots), "table": list(table.index), "meta": meta}, arrays


def decode(reader: Reader) -> Parts:
    """The nodes, edges, roots and meta of a file's graph.

    Raises ValueError, KeyError, TypeError or IndexError when they do not fit together.
    """
    chunks = list(reader)
    if len(chunks) != 1:
        raise ValueError(f"it holds {len(chunks)} graphs, expected one")
    ((meta, arrays),) = chunks
    table = [_entry(thing) for thing in plain(meta["table"], "table")]
    texts, shapes = (
        [i for i, thing in enumerate(table) if _is(thing, kind)]
        for kind in (str, tuple)
    )
    rows = {
        name: _columns(name, arrays[name], width)
        for name, width in (
            ("nodes", 8),
            ("edges", 4),
            ("saved", 7),
            ("value_at", 3),
            ("grad_at", 3),
        )
    }
    count = len(rows["nodes"])
    nodes, edges, kept = rows["nodes"], rows["edges"], rows["saved"]
    for what, columns, there in (
        ("a text of a node", nodes[:, [0, 1, 2, 4]], texts),
        ("a shape of a node", nodes[:, 3], shapes),
        ("a node of an edge", edges[:, :2], range(count)),
        ("a node of a saved tensor", kept[:, 0], range(count)),
        ("a text of a saved tensor", kept[:, [1, 3]], texts),
        ("a shape of a saved tensor", kept[:, 2], shapes),
        ("a root", np.array(_whole(meta["roots"]), np.int64), range(count)),
    ):
        if not np.isin(columns, np.array(there, np.int64)).all():
            raise ValueError(f"{what} is not there")
    if (
        (nodes[:, 6:] < 0).any()
        or (edges[:, 2:] < 0).any()
        or (kept[:, 4] < 0).any()
        or (kept[:, 5] < -1).any()
    ):
        raise ValueError("a count is negative")
    saved: dict[int, list[Saved]] = {}
    for i, attr, shape, dtype, size, storage, parameter in kept.tolist():
        saved.setdefault(i, []).append(
            Saved(
                table[attr], table[shape], table[dtype], size, storage, bool(parameter)
            )
        )
    values, grads = (
        _numbers(rows[f"{what}_at"], arrays[what], table, count)
        for what in ("value", "grad")
    )
    made = []
    for i, (*row, alive, operations, parameters) in enumerate(nodes.tolist()):
        op, name, module, shape, dtype = (table[j] for j in row)
        kept_here, value, grad = tuple(saved.get(i, ())), values.get(i), grads.get(i)
        made.append(
            Node(
                i,
                op,
                name,
                module,
                shape,
                dtype,
                kept_here,
                bool(alive),
                value,
                grad,
                operations,
                parameters,
            )
        )
    about = _meta(meta["meta"], count)
    return (
        tuple(made),
        tuple(Edge(*row) for row in edges.tolist()),
        tuple(meta["roots"]),
        about,
    )


def _entry(thing: Any) -> Any:
    """A text, a shape, or None: a shape that is not known."""
    if isinstance(thing, list):
        return tuple(_whole(thing))
    if thing is not None and not isinstance(thing, str):
        raise TypeError(f"{thing!r} in its table")
    return thing


def _is(thing: Any, kind: type) -> bool:
    return isinstance(thing, kind) or (kind is tuple and thing is None)


def _whole(numbers: Any) -> list[int]:
    if not isinstance(numbers, list) or not all(
        type(n) is int and 0 <= n < 1 << 48 for n in numbers
    ):
        raise ValueError(f"{str(numbers)[:100]}, expected whole numbers")
    return numbers


def _columns(name: str, array: np.ndarray, width: int) -> np.ndarray:
    if array.dtype.kind != "i" or array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"{name} is an array of {array.dtype} {array.shape}")
    return array.astype(np.int64)


def _numbers(
    places: np.ndarray, numbers: np.ndarray, table: list[Any], count: int
) -> dict[int, Any]:
    """The nested lists of each node's numbers."""
    if numbers.dtype != np.float64 or numbers.ndim != 1:
        raise ValueError(f"numbers are an array of {numbers.dtype} {numbers.shape}")
    known, at = {}, 0
    for i, place, length in places.tolist():
        shape = table[place]
        # A list of no numbers is still as long as its shape says.
        sides = math.prod(max(side, 1) for side in shape)
        if (
            not 0 <= i < count
            or place < 0
            or math.prod(shape) != length
            or sides > max(length, 64)
        ):
            raise ValueError(f"{length} numbers of shape {shape} for node {i}")
        known[i] = numbers[at : at + length].reshape(shape).tolist()
        at += length
    return known


def _meta(given: Any, count: int) -> dict[str, Any]:
    meta: dict[str, Any] = plain(given, "meta", dict)
    texts = [*plain(meta.get("notes", []), "notes")]
    classes = plain(meta.get("classes", {}), "classes", dict)
    if not all(isinstance(text, str) for text in (*texts, *classes.values())):
        raise TypeError("a note or the name of a class is no text")
    if not all(node < count for node in _whole(meta.get("order", []))):
        raise ValueError("its order names a node that is not there")
    return meta
