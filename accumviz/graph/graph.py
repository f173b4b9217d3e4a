"""The autograd graph as plain data: stable ids, no tensors, nothing that keeps a graph alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accumviz import arguments
from accumviz.graph import file as columns
from accumviz.graph.nodes import Edge, Node, Saved, distinct_bytes, in_order
from accumviz.ledger.container import LedgerFileError, Reader, Writer, valid
from accumviz.show import Displayed, counted, save_page, shown

__all__ = ["Difference", "Edge", "Graph", "Node", "Saved"]

_REPR_ROWS = 16


@dataclass(frozen=True)
class Difference:
    """What changed from one graph to another; nodes are matched by module, operation and name.

    `changed` holds pairs of nodes, as they were and as they are; `saved_bytes` is how many more
    bytes the second graph keeps.
    """

    removed: tuple[Node, ...]
    added: tuple[Node, ...]
    changed: tuple[tuple[Node, Node], ...]
    saved_bytes: int

    def __repr__(self) -> str:
        lines = [f"- {_title(node)}" for node in self.removed]
        lines += [f"+ {_title(node)}" for node in self.added]
        lines += [
            f"~ {_title(new)}: {', '.join(_changes(old, new))}"
            for old, new in self.changed
        ]
        return "\n".join(
            [*(lines or ["no difference"]), f"saved bytes: {self.saved_bytes:+,}"]
        )


@dataclass(frozen=True, repr=False)
class Graph(Displayed):
    """An autograd graph: nodes, edges, and the ids of its roots.

    It holds no tensor and keeps none alive. `len(graph)` counts its nodes, and `for node in graph`
    goes over them in traversal order, from the loss on; a node's `id` is its place there. `meta`
    holds `notes`, and in `recording.graphs` the `order` in which the engine ran the nodes.

    >>> from accumviz.graph.graph import Edge, Graph, Node
    >>> graph = Graph((Node(0, "MulBackward0", "c"), Node(1, "AccumulateGrad", "a")), (Edge(0, 1),), (0,))
    >>> graph
    Graph: 2 nodes, 1 edge, saves 0 B; root c
      id  operation       name
       0  MulBackward0    c
       1  AccumulateGrad  a
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    roots: tuple[int, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict, hash=False)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @property
    def saved_bytes(self) -> int:
        """Bytes the graph keeps alive: each storage once, parameters excluded."""
        return distinct_bytes(self.nodes)

    @property
    def alive(self) -> bool:
        """False when a backward has freed any of what the graph had saved."""
        return all(node.alive for node in self.nodes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know about this graph, in sentences."""
        return tuple(self.meta.get("notes", ()))

    def chain(self) -> list[str]:
        """Name the operations from the root down, when the graph is a single path.

        Raises `ValueError` where it branches.

        >>> from accumviz.graph.graph import Edge, Graph, Node
        >>> Graph((Node(0, "PowBackward0"), Node(1, "AccumulateGrad")), (Edge(0, 1),), (0,)).chain()
        ['PowBackward0', 'AccumulateGrad']
        """
        following: dict[int, set[int]] = {}
        for edge in self.edges:
            following.setdefault(edge.source, set()).add(edge.target)
        branch = next((i for i, targets in following.items() if len(targets) > 1), None)
        if branch is not None or len(self.roots) != 1:
            where = (
                f"{len(self.roots)} roots"
                if branch is None
                else f"a branch at {self.nodes[branch].op}"
            )
            raise ValueError(
                f"the graph is not a single path: it has {where}; look at .nodes and .edges instead"
            )
        names, at = [], self.roots[0]
        while True:
            names.append(self.nodes[at].op)
            if at not in following:
                return names
            (at,) = following[at]

    def diff(self, other: Graph) -> Difference:
        """Say what `other` has that this graph has not, and the reverse.

        >>> from accumviz.graph.graph import Graph, Node
        >>> a = Graph((Node(0, "MulBackward0"),))
        >>> a.diff(Graph((Node(0, "AddBackward0"),)))
        - MulBackward0
        + AddBackward0
        saved bytes: +0
        """
        if not isinstance(other, Graph):
            raise TypeError(
                f"diff() was given {arguments.a(other)}; expected the graph to compare with, as from av.trace"
            )
        mine, theirs = _keyed(self.nodes), _keyed(other.nodes)
        both = [(node, theirs[key]) for key, node in mine.items() if key in theirs]
        return Difference(
            removed=tuple(node for key, node in mine.items() if key not in theirs),
            added=tuple(node for key, node in theirs.items() if key not in mine),
            changed=tuple(pair for pair in both if _changes(*pair)),
            saved_bytes=other.saved_bytes - self.saved_bytes,
        )

    def collapse_modules(self, depth: int = 1) -> Graph:
        """Fold each module, down to `depth` levels of its dotted path, into one node with its parameters.

        Operations that ran in no module, or between the folded modules (a residual addition),
        stay as they are. Raises `ValueError` for a depth below 1.

        >>> from accumviz.graph.graph import Edge, Graph, Node
        >>> inside = (Node(0, "ReluBackward0", module="act"),
        ...           Node(1, "AddmmBackward0", module="fc"),
        ...           Node(2, "AccumulateGrad", "fc.bias", module="fc"))
        >>> folded = Graph(inside, (Edge(0, 1), Edge(1, 2)), (0,)).collapse_modules()
        >>> [(node.module or node.op, node.operations, node.parameters) for node in folded]
        [('act', 1, 0), ('fc', 1, 1)]
        """
        depth = arguments.whole(
            "depth",
            depth,
            "how many levels of modules to fold, 1 for the outermost",
            least=1,
        )
        classes: dict[str, str] = self.meta.get("classes", {})

        paths = {
            node.module: node.module.split(".") for node in self.nodes if node.module
        }
        containers = {
            ".".join(path[:i])
            for path in paths.values()
            for i in range(1, min(len(path), depth))
        }

        def module(node: Node) -> tuple[str, str]:
            path = ".".join(paths.get(node.module, ())[:depth])
            if (
                path in containers
            ):  # folding what runs before and after its parts would draw a cycle
                return "", ""
            return path, classes.get(path, "module") if path else ""

        return self._fold(module)

    def collapse_runs(self) -> Graph:
        """Fold each run of operations that has one way in and one way out into one node."""
        targets: dict[int, set[int]] = {}
        sources: dict[int, set[int]] = {}
        for edge in self.edges:
            targets.setdefault(edge.source, set()).add(edge.target)
            sources.setdefault(edge.target, set()).add(edge.source)
        start: dict[int, int] = {}
        for node in self.nodes:
            at = node.id
            while (
                at not in start
            ):  # walk to the end of the run; each node is visited once
                start[at] = node.id
                onward = targets.get(at, set())
                if len(onward) != 1 or node.kind == "accumulate":
                    break
                (following,) = onward
                joins = len(sources[following]) > 1 or following in self.roots
                if joins or self.nodes[following].kind == "accumulate":
                    break
                at = following
        return self._fold(
            lambda node: (
                (f"#{start[node.id]}", "run") if node.kind == "operation" else ("", "")
            )
        )

    def collapse_slices(self, count: int = 100) -> Graph:
        """Fold the graph into at most `count` nodes: equal slices of an order in which gradients flow."""
        count = arguments.whole("count", count, "the most nodes to keep", least=1)
        order = in_order(
            len(self.nodes),
            ((edge.source, edge.target) for edge in self.edges),
            across=True,
        )
        rank = {at: position for position, at in enumerate(order)}
        width = -(-len(self.nodes) // count)
        return self._fold(lambda node: (f"#{rank[node.id] // width}", "slice"))

    def _fold(self, group: Callable[[Node], tuple[str, str]]) -> Graph:
        """Fold nodes of one group (key, what to call it) into one; the empty key stays alone."""
        members: list[list[Node]] = []
        place: dict[str, int] = {}
        called: list[str] = []
        new: list[int] = []
        for node in self.nodes:
            key, label = group(node)
            at = place.setdefault(key, len(members)) if key else len(members)
            if at == len(members):
                members.append([])
                called.append(label)
            members[at].append(node)
            new.append(at)
        nodes = [
            _join(i, nodes, label)
            for i, (nodes, label) in enumerate(zip(members, called, strict=True))
        ]
        for key, i in place.items():
            if not key.startswith("#") and nodes[i].kind == "fold":
                nodes[i] = replace(nodes[i], module=key, name="")
        edges: dict[tuple[int, int], Edge] = {}
        for edge in self.edges:
            source, target = new[edge.source], new[edge.target]
            if source != target:
                edges.setdefault(
                    (source, target), Edge(source, target, edge.input, edge.output)
                )
        roots = tuple(dict.fromkeys(new[root] for root in self.roots))
        return Graph(tuple(nodes), tuple(edges.values()), roots, dict(self.meta))

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the graph to a file: `.html` a page, `.svg` a drawing, else a file that `av.load` reads.

        Pages and drawings are written anew each time. A file of the last kind that is there is
        not replaced unless `overwrite` says so: `FileExistsError`.
        """
        arguments.file("path", path)
        arguments.flag("overwrite", overwrite)
        suffix = Path(path).suffix.lower()
        if suffix == ".html":
            save_page(
                path, f"Autograd graph: {counted(len(self), 'node')}", self.to_html()
            )
            return
        if suffix == ".svg":
            Path(path).write_text(shown(self, "svg"), encoding="utf-8")
            return
        with Writer(path, "graph", overwrite=overwrite, whole=True) as writer:
            writer.append(
                *columns.encode((self.nodes, self.edges, self.roots, self.meta))
            )

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a graph written by `save`. Raises `LedgerFileError` for any other file.

        >>> import os, tempfile
        >>> from accumviz.graph.graph import Graph, Node
        >>> path = os.path.join(tempfile.mkdtemp(), "c.graph")
        >>> graph = Graph((Node(0, "MulBackward0", value=float("inf"), shape=()),))
        >>> graph.save(path); Graph.load(path) == graph
        True
        """
        reader = Reader(path)
        if reader.kind != "graph":
            raise LedgerFileError(
                f"{str(path)!r} holds a {reader.kind}; open it with av.load(...)"
            )
        return cls.read(reader)

    @classmethod
    def read(cls, reader: Reader) -> Graph:
        """The graph of a file that is open. Raises `LedgerFileError` when it is not whole."""
        return cls(*valid(reader, columns.decode))

    def __repr__(self) -> str:
        roots = ", ".join(_title(self.nodes[root]) for root in self.roots[:3])
        head = (
            f"Graph: {counted(len(self), 'node')}, {counted(len(self.edges), 'edge')}, "
            f"saves {self.saved_bytes:,} B; root{'s' if len(self.roots) > 1 else ''} {roots or 'unknown'}"
        )
        columns = (
            "id",
            "operation",
            "name",
            "module",
            "shape",
            "dtype",
            "saved",
            "state",
            "value",
            "grad",
        )
        rows = [columns, *(_row(node) for node in self.nodes[:_REPR_ROWS])]
        kept = [
            i for i in range(len(columns)) if i < 2 or any(row[i] for row in rows[1:])
        ]
        widths = {i: max(len(row[i]) for row in rows) for i in kept}
        lines = [
            "  "
            + "  ".join(
                row[i].rjust(widths[i]) if i == 0 else row[i].ljust(widths[i])
                for i in kept
            ).rstrip()
            for row in rows
        ]
        if len(self) > _REPR_ROWS:
            lines.append(
                f"  … and {len(self) - _REPR_ROWS:,} more; .collapse_modules() folds them"
            )
        return "\n".join([head, *lines, *(f"note: {note}" for note in self.notes)])


def _title(node: Node) -> str:
    return node.name or (node.module if node.kind == "fold" else "") or node.op


def _row(node: Node) -> tuple[str, ...]:
    kept = node.saved_bytes
    return (
        str(node.id),
        node.op
        if node.kind != "fold"
        else f"{node.op} ({node.operations} operations, {node.parameters} parameters)",
        node.name,
        node.module,
        "" if node.shape is None else str(node.shape),
        node.dtype,
        f"{kept:,} B" if kept else "",
        "" if node.alive else "freed",
        _short(node.value),
        _short(node.grad),
    )


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(_short, value)) + "]"
        return text if len(text) <= 40 else text[:38] + "…]"
    return f"{value:.4g}"


def _join(at: int, nodes: list[Node], label: str) -> Node:
    if len(nodes) == 1:
        return replace(nodes[0], id=at)
    # the first in traversal order is the one nearest the loss: what the group hands on
    first = next((node for node in nodes if node.kind != "accumulate"), nodes[0])
    return Node(
        at,
        label,
        shape=first.shape,
        dtype=first.dtype,
        saved=tuple(saved for node in nodes for saved in node.saved),
        alive=all(node.alive for node in nodes),
        operations=sum(node.operations for node in nodes if node.kind != "accumulate"),
        parameters=sum(
            1 if node.kind == "accumulate" else node.parameters for node in nodes
        ),
    )


def _keyed(nodes: tuple[Node, ...]) -> dict[tuple[str, str, str, int], Node]:
    seen: Counter[tuple[str, str, str]] = Counter()
    keyed = {}
    for node in nodes:
        key = (node.module, node.op, node.name)
        keyed[(*key, seen[key])] = node
        seen[key] += 1
    return keyed


def _changes(old: Node, new: Node) -> list[str]:
    compared = (
        "shape",
        "dtype",
        "alive",
        "saved_bytes",
        "value",
        "grad",
        "operations",
        "parameters",
    )
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in compared]
    # repr, because NaN differs from itself
    return [f"{name} {a} → {b}" for name, a, b in pairs if repr(a) != repr(b)]
