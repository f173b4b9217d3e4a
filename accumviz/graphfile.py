"""A graph as one chunk of a file: names in a table, everything else as columns of numbers, so NaN survives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from accumviz.graph import Graph, Saved


class _Table:
    """Distinct things in order of first appearance, so that a column is small integers."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self.index.setdefault(thing, len(self.index))


_COLUMNS = ("op", "name", "module", "shape", "dtype")


def encode(graph: Graph) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Turn a graph into one chunk: JSON with a table of distinct names, and columns of numbers."""
    table = _Table()
    nodes = [[table(getattr(n, c)) for c in _COLUMNS] + [n.alive, n.operations, n.parameters] for n in graph]
    saved = [
        (n.id, table(s.attr), table(s.shape), table(s.dtype), s.bytes, s.storage, s.parameter)
        for n in graph
        for s in n.saved
    ]
    numbers: dict[str, np.ndarray] = {}
    for what in ("value", "grad"):
        known = [(n.id, np.asarray(getattr(n, what), "<f8")) for n in graph if getattr(n, what) is not None]
        rows = [(i, table(array.shape), array.size) for i, array in known]
        numbers[f"{what}_at"] = np.array(rows, "<i4").reshape(-1, 3)
        numbers[what] = np.concatenate([np.zeros(0, "<f8"), *(array.ravel() for _, array in known)])
    arrays = {
        "nodes": np.array(nodes, "<i4").reshape(-1, len(_COLUMNS) + 3),
        "edges": np.array([(e.source, e.target, e.input, e.output) for e in graph.edges], "<i4").reshape(-1, 4),
        "saved": np.array(saved, "<i8").reshape(-1, 7),
        **numbers,
    }
    return {"roots": list(graph.roots), "table": list(table.index), "meta": graph.meta}, arrays


def decode(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> Graph:
    """Build the graph of a chunk; raises ValueError, KeyError or IndexError when it does not fit together."""
    from accumviz.graph import Edge, Graph, Node, Saved  # graph.py saves through this module

    table = [tuple(map(int, thing)) if isinstance(thing, list) else thing for thing in meta["table"]]
    count = len(arrays["nodes"])
    saved: dict[int, list[Saved]] = {}
    for i, attr, shape, dtype, size, storage, parameter in arrays["saved"].tolist():
        saved.setdefault(i, []).append(Saved(table[attr], table[shape], table[dtype], size, storage, bool(parameter)))
    numbers: dict[str, dict[int, Any]] = {"value": {}, "grad": {}}
    for what, known in numbers.items():
        at = 0
        for i, shape, length in arrays[f"{what}_at"].tolist():
            known[i] = arrays[what][at : at + length].reshape(table[shape]).tolist()
            at += length
    nodes = []
    for i, (*row, alive, operations, parameters) in enumerate(arrays["nodes"].tolist()):
        op, name, module, shape, dtype = (table[j] for j in row)
        kept = tuple(saved.get(i, ()))
        value, grad = numbers["value"].get(i), numbers["grad"].get(i)
        nodes.append(Node(i, op, name, module, shape, dtype, kept, bool(alive), value, grad, operations, parameters))
    edges = tuple(Edge(*row) for row in arrays["edges"].tolist())
    roots = tuple(int(root) for root in meta["roots"])
    if not all(0 <= i < count for i in (*roots, *(j for e in edges for j in (e.source, e.target)))):
        raise ValueError("an edge or a root names a node that is not there")
    return Graph(tuple(nodes), edges, roots, dict(meta["meta"]))
