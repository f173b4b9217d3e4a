"""The autograd graph as plain data: stable ids, no tensors, nothing that keeps a graph alive."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from accumviz import arguments
from accumviz.show import Displayed, counted, plural

# Of more nodes, modules are shown folded.
FOLDED = 40
_REPR_ROWS = 16


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor an operation keeps for its backward.

    `attr` is the name under which the node keeps it, without `_saved_`.

    `bytes` is the whole storage it holds on to (NaN: torch does not say), and `storage` tells equal
    storages apart (-1: no storage is known, as of sparse tensors). A parameter's storage is there
    anyway, so `parameter` excludes it from every sum.
    """

    attr: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    bytes: float = 0
    storage: int = -1
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One backward operation, or a group of them after folding.

    `op` is autograd's own name; `name` is the variable's or the parameter's, `module` the dotted
    path of the module that ran it; both are empty when unknown. `shape` and `dtype` are those of
    the operation's first forward output. `value` and `grad` (the derivative of the roots with
    respect to it) are nested lists of floats, None when unknown. In a recorded graph, `grad` is
    what the engine brought to the node: it begins with the gradient that `backward` was given,
    and hooks may have changed it. `alive` is False once a backward has freed what it saved.
    `operations` and `parameters` count what a folded node holds.

    >>> from accumviz.graph.graph import Node
    >>> Node(0, "MulBackward0", name="y_hat", shape=(4,)).kind
    'operation'
    """

    id: int
    op: str
    name: str = ""
    module: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    saved: tuple[Saved, ...] = ()
    alive: bool = True
    value: Any = None
    grad: Any = None
    operations: int = 1
    parameters: int = 0

    @property
    def saved_bytes(self) -> float:
        """Bytes of the distinct storages it keeps, parameters excluded."""
        return distinct_bytes([self])

    @property
    def kind(self) -> str:
        """`accumulate` (a leaf's AccumulateGrad), `operation` or `fold`."""
        if self.operations + self.parameters > 1:
            return "fold"
        return "accumulate" if self.op == "AccumulateGrad" else "operation"

    @property
    def title(self) -> str:
        """The node's name, or its module's when it is a fold, or its operation."""
        return self.name or (self.module if self.kind == "fold" else "") or self.op

    def is_in(self, module: str) -> bool:
        """Return whether it is of this module, or of one inside it."""
        return f"{self.module}.".startswith(f"{module}.")


@dataclass(frozen=True, slots=True)
class Edge:
    """The way of a gradient: from the operation `source` to `target`, one of its `next_functions`.

    Data went the other way in the forward.
    """

    source: int
    target: int


@dataclass(frozen=True, repr=False)
class Graph(Displayed):
    """An autograd graph: nodes, edges, and the ids of its roots.

    It holds no tensor and keeps none alive. `len(graph)` counts its nodes, and `for node in graph`
    goes over them in traversal order, from the loss on; a node's `id` is its place there. `notes` say
    what a reader should know about it, and `classes` what the modules are. A recorded graph knows the
    `order` in which the engine ran the nodes, and whether it was there `before` the recording.

    >>> from accumviz.graph.graph import Edge, Graph, Node
    >>> graph = Graph((Node(0, "MulBackward0", "c"), Node(1, "AccumulateGrad", "a")), (Edge(0, 1),), (0,))
    >>> graph
    Graph: 2 nodes, 1 edge, saves 0 B; root c
      id  operation       name
       0  MulBackward0    c
       1  AccumulateGrad  a
    """

    _shown_by = "accumviz.views.graph:graph_html"

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    roots: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict, hash=False)
    order: tuple[int, ...] = ()
    before: bool = False

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @property
    def saved_bytes(self) -> float:
        """Bytes the graph keeps alive: each storage once, parameters excluded; NaN where torch does not say."""
        return distinct_bytes(self.nodes)

    @property
    def alive(self) -> bool:
        """False when a backward has freed any of what the graph had saved."""
        return all(node.alive for node in self.nodes)

    def chain(self) -> list[str]:
        """Name the operations from the root down, when the graph is a single path.

        Raises `ValueError` where it branches.

        >>> from accumviz.graph.graph import Edge, Graph, Node
        >>> Graph((Node(0, "PowBackward0"), Node(1, "AccumulateGrad")), (Edge(0, 1),), (0,)).chain()
        ['PowBackward0', 'AccumulateGrad']
        """
        steps = {(edge.source, edge.target) for edge in self.edges}
        if steps != {(i, i + 1) for i in range(len(self) - 1)}:
            raise ValueError(
                "the graph is not a single path: look at .nodes and .edges instead"
            )
        return [node.op for node in self.nodes]

    def collapse_modules(self, depth: int = 1) -> Graph:
        """Fold each module, down to `depth` levels of its dotted path, into one node with its parameters.

        Operations that ran in no module, or between the folded modules (a residual addition),
        stay single. Raises `ValueError` for a depth below 1.

        >>> from accumviz.graph.graph import Edge, Graph, Node
        >>> inside = (Node(0, "ReluBackward0", module="act"),
        ...           Node(1, "AddmmBackward0", module="fc"),
        ...           Node(2, "AccumulateGrad", "fc.bias", module="fc"))
        >>> folded = Graph(inside, (Edge(0, 1), Edge(1, 2)), (0,)).collapse_modules()
        >>> [(node.module or node.op, node.operations, node.parameters) for node in folded]
        [('act', 1, 0), ('fc', 1, 1)]
        """
        expected = "how many levels of modules to fold, 1 for the outermost"
        depth = arguments.whole(
            "depth",
            depth,
            expected,
            least=1,
        )
        containers = set()
        for node in self.nodes:
            path = node.module.split(".")
            for i in range(1, min(len(path), depth)):
                containers.add(".".join(path[:i]))

        def folded_module(node: Node) -> str:
            path = ".".join(node.module.split(".")[:depth])
            # Folding what runs before and after its parts would draw a cycle.
            return "" if path in containers else path

        return self._fold(folded_module)

    def inside(self, module: str) -> Graph:
        """Unfold one module, and keep what it is linked to.

        The modules inside it are folded, and so are those around it. A module that holds nothing but
        another one is unfolded down to the first that holds more. Without a node in `module`, the
        graph is empty.

        >>> from accumviz.graph.graph import Edge, Graph, Node
        >>> nodes = (Node(0, "MeanBackward0"), Node(1, "ReluBackward0", module="fc"),
        ...          Node(2, "AddmmBackward0", module="fc"), Node(3, "MulBackward0"), Node(4, "AddBackward0"))
        >>> graph = Graph(nodes, tuple(Edge(i, i + 1) for i in range(4)), (0,))
        >>> [node.op for node in graph.inside("fc")]
        ['MeanBackward0', 'ReluBackward0', 'AddmmBackward0', 'MulBackward0']
        """
        path = module.split(".")

        def folded_module(node: Node) -> str:
            parts = node.module.split(".")
            for level in range(1, len(parts) + 1):
                if parts[:level] != path[:level]:
                    return ".".join(parts[:level])
            return ""

        around = self._fold(folded_module)
        members = [node for node in around if node.is_in(module)]
        if len(members) == 1 and members[0].kind == "fold":
            return self.inside(members[0].module)
        inner = {node.id for node in members}
        kept = set(inner)
        for edge in around.edges:
            ends = {edge.source, edge.target}
            if ends & inner:
                kept |= ends
        return around.subgraph(kept)

    def subgraph(self, ids: Iterable[int]) -> Graph:
        """Return these nodes, numbered anew, and the edges between them."""
        place = {old: new for new, old in enumerate(sorted(ids))}
        edges = []
        for edge in self.edges:
            if {edge.source, edge.target} <= place.keys():
                edges.append(Edge(place[edge.source], place[edge.target]))
        return replace(
            self,
            nodes=tuple(replace(self.nodes[old], id=new) for old, new in place.items()),
            edges=tuple(edges),
            roots=tuple(place[root] for root in self.roots if root in place),
            order=(),  # it names nodes that are not there
        )

    def _fold(self, group_of: Callable[[Node], str]) -> Graph:
        """Fold the nodes of each module that `group_of` names into one; others stay single."""
        groups = defaultdict(list)
        for node in self.nodes:
            groups[group_of(node) or node.id].append(node)
        place = {}
        folded = []
        for i, (group, members) in enumerate(groups.items()):
            for node in members:
                place[node.id] = i
            if len(members) == 1:
                folded.append(replace(members[0], id=i))
            else:
                label = self.classes.get(str(group), "module")
                folded.append(_joined(i, members, label, str(group)))
        roots = dict.fromkeys(place[root] for root in self.roots)
        return replace(
            self,
            nodes=tuple(folded),
            edges=self._edges_between(place),
            roots=tuple(roots),
            order=(),  # it names nodes that are folded now
        )

    def _edges_between(self, place: dict[int, int]) -> tuple[Edge, ...]:
        """Return each edge between different places of its nodes once."""
        edges = {}
        for edge in self.edges:
            ends = place[edge.source], place[edge.target]
            if ends[0] != ends[1]:
                edges[ends] = Edge(*ends)
        return tuple(edges.values())

    def __repr__(self) -> str:
        roots = ", ".join(self.nodes[root].title for root in self.roots[:3])
        saved = f"{self.saved_bytes:,} B"
        if math.isnan(self.saved_bytes):
            saved = "unknown"
        head = (
            f"Graph: {counted(len(self), 'node')}, {counted(len(self.edges), 'edge')}, "
            f"saves {saved}; {plural(len(self.roots) or 1, 'root')} {roots or 'unknown'}"
        )
        lines = [head, *_table([_row(node) for node in self.nodes[:_REPR_ROWS]])]
        if len(self) > _REPR_ROWS:
            more = len(self) - _REPR_ROWS
            lines.append(f"  … and {more:,} more; .collapse_modules() folds them")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def distinct_bytes(nodes: Iterable[Node]) -> float:
    """Sum the distinct storages that these nodes keep, parameters excluded."""
    sizes = {}
    excluded = set()
    for node in nodes:
        for saved in node.saved:
            sizes[saved.storage] = saved.bytes
            if saved.parameter:
                excluded.add(saved.storage)
    return sum(sizes[storage] for storage in sizes.keys() - excluded)


def in_order(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Order so many nodes, sources before their targets; those that could be next, by number.

    What lies in a circle, as folded modules can, comes last.

    >>> in_order(4, [(2, 1), (1, 3)])
    [0, 2, 1, 3]
    """
    sorter = TopologicalSorter(dict.fromkeys(range(count), ()))
    for source, target in edges:
        sorter.add(target, source)
    with suppress(CycleError):
        sorter.prepare()
    order = []
    while ready := sorter.get_ready():
        order += sorted(ready)
        sorter.done(*ready)
    return list(dict.fromkeys([*order, *range(count)]))


def _table(rows: list[dict[str, str]]) -> list[str]:
    """Align rows below their headings; a column without any entry is left out."""
    columns = []
    for name in rows[0] if rows else ():
        cells = [row[name] for row in rows]
        width = max(map(len, [name, *cells]))
        if any(cells):
            justify = str.rjust if name == "id" else str.ljust
            columns.append([justify(cell, width) for cell in [name, *cells]])
    return ["  " + "  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _row(node: Node) -> dict[str, str]:
    op = node.op
    if node.kind == "fold":
        op = f"{op} ({node.operations} operations, {node.parameters} parameters)"
    return {
        "id": str(node.id),
        "operation": op,
        "name": node.name,
        "module": node.module,
        "shape": "" if node.shape is None else str(node.shape),
        "dtype": node.dtype,
        "saved": f"{node.saved_bytes:,} B" if node.saved_bytes > 0 else "",
        "state": "" if node.alive else "freed",
        "value": _short(node.value),
        "grad": _short(node.grad),
    }


def _short(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        return f"{value:.4g}"
    text = "[" + ", ".join(map(_short, value)) + "]"
    return text if len(text) <= 40 else text[:38] + "…]"


def _joined(
    at: int,
    nodes: Sequence[Node],
    label: str,
    module: str,
) -> Node:
    operations = [node for node in nodes if node.kind != "accumulate"]
    # The first in traversal order is the one nearest the loss: what the group hands on.
    first = (operations or nodes)[0]
    leaves = len(nodes) - len(operations)
    return Node(
        at,
        label,
        module=module,
        shape=first.shape,
        dtype=first.dtype,
        saved=tuple(saved for node in nodes for saved in node.saved),
        alive=all(node.alive for node in nodes),
        operations=sum(node.operations for node in operations),
        parameters=leaves + sum(node.parameters for node in operations),
    )
