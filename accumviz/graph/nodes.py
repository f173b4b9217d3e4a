"""What a graph is made of: operations, what they keep, and the ways of gradients between them. Pure: stdlib."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor an operation keeps for its backward.

    `attr` is the name under which the node keeps it, without `_saved_`.

    `shape` is None once the tensor was freed. `bytes` is the whole storage it holds on to, and
    `storage` tells equal storages apart (-1: no storage is known). A parameter's storage is
    there anyway, so `parameter` excludes it from every sum.
    """

    attr: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    bytes: int = 0
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
    hooks may have changed it, and a leaf's is the sum of all that came while that backward ran.
    `alive` is False once a backward has freed what it saved. `operations` and `parameters` count
    what a folded node holds.

    >>> from accumviz.graph.nodes import Node
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
    def saved_bytes(self) -> int:
        """Bytes of the distinct storages it keeps, parameters excluded."""
        return distinct_bytes([self])

    @property
    def kind(self) -> str:
        """Which of `accumulate` (a leaf's AccumulateGrad), `operation` and `fold` it is."""
        if self.operations + self.parameters > 1:
            return "fold"
        return "accumulate" if self.op == "AccumulateGrad" else "operation"


@dataclass(frozen=True, slots=True)
class Edge:
    """A gradient's way: from the operation `source` to `target`, one of its `next_functions`.

    Data went the other way in the forward. `input` is the position in `next_functions`,
    `output` says which output of `target` it was.
    """

    source: int
    target: int
    input: int = 0
    output: int = 0


def distinct_bytes(nodes: Sequence[Node]) -> int:
    """Bytes of the distinct storages that these nodes keep, parameters excluded."""
    parameters = {
        saved.storage for node in nodes for saved in node.saved if saved.parameter
    }
    kept = {
        saved.storage: saved.bytes
        for node in nodes
        for saved in node.saved
        if saved.storage >= 0
    }
    return sum(count for storage, count in kept.items() if storage not in parameters)


def in_order(
    count: int, edges: Iterable[tuple[int, int]], *, across: bool = False
) -> list[int]:
    """All of so many nodes, sources before their targets; of several that could be next, the first by number.

    `across` takes the one that has waited longest instead, and so goes level by level. What stands
    in a circle, as folded modules can, comes last.

    >>> in_order(4, [(2, 1), (1, 3)])
    [0, 2, 1, 3]
    """
    waiting = [0] * count
    targets: dict[int, list[int]] = {}
    for source, target in edges:
        waiting[target] += 1
        targets.setdefault(source, []).append(target)
    came = itertools.count(count)
    ready = [(i, i) for i, sources in enumerate(waiting) if not sources]
    found: list[int] = []
    while ready:
        _, at = heapq.heappop(ready)
        found.append(at)
        for target in targets.get(at, ()):
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (next(came) if across else target, target))
    return list(dict.fromkeys([*found, *range(count)]))
