"""The `grad_fn` graph of a tensor as a `Graph`: one iterative walk that leaves the graph unchanged."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from accumviz import arguments
from accumviz.graph.graph import FOLDED, Graph, Node, Saved
from accumviz.graph.node_values import Walk, gradients, numbers, results
from accumviz.recorder import memory
from accumviz.recorder.callsite import variables

# Nodes: a larger graph has no readable numbers, and calling every backward costs.
VALUES_LIMIT = 200
TOO_LARGE = f"values are left out: the graph has more than {VALUES_LIMIT} nodes"
# Of the module that ran an operation, by the operation's sequence number: the name of its root, and its path there.
RanIn = Callable[[int], tuple[str, str]]
NOWHERE = ("", "")
_DEEP = f"the graph has more than {memory.DEEP:,} operations; trace what one of its parts computes"
_FREED = (
    "a backward has freed this graph: the operations are there, what they saved is gone; "
    "trace before calling backward, or call backward(retain_graph=True)"
)


def trace(*tensors: torch.Tensor, values: bool = False) -> Graph:
    """Read the autograd graph below one or more tensors, with the caller's names on it.

    Nodes are named after the caller's variables; modules among these give parameters their paths.

    `values=True` puts forward values and gradients on the nodes of a graph of at most 200, for
    tensors of at most 64 elements; what cannot be known for certain stays None. A gradient is
    what the operations' own formulas give. Only formulas of PyTorch's own are called, those that
    are known to do nothing else: no hook, no custom Function, no collective runs, and `.grad`,
    random state and graph stay unchanged. What a real backward brought, and which module ran an
    operation, is in the graphs of `record(..., graphs=True)`.

    A graph of more than 40 nodes is shown folded: a click on a module unfolds it. There, an operation
    counts to the innermost module that holds the parameters which are used before it and after it.

    Raises `TypeError` for what is not a tensor, `ValueError` for a tensor without a graph, and for a graph of more than
    10,000 nodes.

    >>> import torch, accumviz as av
    >>> w = torch.tensor(3.0, requires_grad=True)
    >>> loss = (w * 2) ** 2
    >>> av.trace(loss, values=True)
    Graph: 3 nodes, 2 edges, saves 12 B; root loss
      id  operation       name  shape  dtype    saved  value  grad
       0  PowBackward0    loss  ()     float32  4 B    36     1
       1  MulBackward0          ()     float32  8 B    6      12
       2  AccumulateGrad  w     ()     float32         3      24
    """
    arguments.flag("values", values)
    if not tensors:
        raise ValueError(
            "nothing to trace; pass the tensor you call backward on, as in av.trace(loss)"
        )
    frame = sys._getframe(1)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        names = Names(frame)
        for i, tensor in enumerate(tensors):
            _check(tensor, f"argument {i}", names)
        walk = Walk(tensors)
        if len(walk.order) > memory.DEEP:
            raise ValueError(_DEEP)
        modules = _modules(frame)
        if not values:
            return graph_of(walk, names, modules)
        if len(walk.order) > VALUES_LIMIT:
            return graph_of(walk, names, modules, notes=[TOO_LARGE])
        tensor_of = results(walk, names.tensors)
        found = {fn: numbers(tensor) for fn, tensor in tensor_of.items()}
        slopes, note = gradients(walk)
        notes = [note] if note else []
        return graph_of(walk, names, modules, None, found, slopes, notes)


def _modules(frame: FrameType) -> dict[str, Module]:
    """Name the modules among a frame's variables, without those inside others."""
    modules: dict[int, tuple[str, Module]] = {}
    inner = set()
    for name, value in variables(frame):
        if issubclass(type(value), Module):
            modules.setdefault(id(value), (name, value))
            inner |= {id(one) for one in value.modules() if one is not value}
    return {
        name: module for name, module in modules.values() if id(module) not in inner
    }


def _check(
    tensor: Any,
    where: str,
    names: Names,
) -> None:
    """Raise an error that says why a tensor has no graph."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{where} is {arguments.a(tensor)}; expected the tensor you call backward on"
        )
    if tensor.grad_fn is not None:
        return
    name = names.of(tensor) or where
    if tensor.requires_grad:
        raise ValueError(
            f"{name} is a leaf: it was not computed from anything, so it has no grad_fn and no graph; "
            f"trace what is computed from it, such as the loss"
        )
    raise ValueError(
        f"{name} has no grad_fn: it was computed under torch.no_grad() or inference_mode(), was detached, or comes "
        "from tensors of which none requires grad; compute it again with gradients on, from a tensor that requires grad"
    )


class Names:
    """Names of the caller's tensors: of those that operations returned by grad_fn, and of leaves."""

    def __init__(self, frame: FrameType | None) -> None:
        self.tensors: dict[Any, torch.Tensor] = {}
        self._named: dict[int, str] = {}
        for name, value in [] if frame is None else variables(frame):
            if issubclass(type(value), torch.Tensor):
                self._named.setdefault(id(value), name)
                self._note_node(value)

    def _note_node(self, tensor: torch.Tensor) -> None:
        base = tensor._base
        # Asking such a view for its node makes a new one, in another place of the engine's order.
        if tensor._is_view() and base is not None and base._version:
            return
        if tensor.grad_fn is not None and tensor.output_nr == 0:
            self.tensors.setdefault(tensor.grad_fn, tensor)

    def of(self, tensor: torch.Tensor | None) -> str:
        """Return the name of a tensor, empty where it has none."""
        return self._named.get(id(tensor), "")


def graph_of(
    walk: Walk,
    names: Names,
    modules: Mapping[str, Module],
    ran_in: RanIn | None = None,
    values: Mapping[Any, Any] | None = None,
    grads: Mapping[Any, Any] | None = None,
    notes: Iterable[str] = (),
) -> Graph:
    """Put what is known of the nodes into a `Graph`; without `ran_in`, parameters say which modules a large one has."""
    values = values or {}
    grads = grads or {}
    paths = _Paths(modules, walk.leaves)
    storages = _Storages(walk.leaves)
    is_large = len(walk.order) > FOLDED
    between = paths.between(walk) if ran_in is None and is_large else {}
    nodes = []
    for i, fn in enumerate(walk.order):
        leaf = walk.leaves.get(i)
        saved: tuple[Saved, ...] = ()
        alive = True
        if leaf is not None:
            path = paths.of(leaf)
            name = path or names.of(leaf)
            module = path.rpartition(".")[0]
            shape, dtype = _described(leaf)
        else:
            name = names.of(names.tensors.get(fn))
            module = between.get(fn, "")
            if ran_in is not None:
                module = paths.joined(*ran_in(fn._sequence_nr()))
            shape, dtype = _described(next(iter(fn._input_metadata), None))
            saved, alive = storages.saved(fn)
        node = Node(
            i,
            type(fn).__name__,
            name,
            module,
            shape,
            dtype,
            saved,
            alive,
            values.get(fn),
            grads.get(fn),
        )
        nodes.append(node)
    if not all(node.alive for node in nodes):
        notes = [_FREED]
    if memory.UNREAD:
        notes = [
            *notes,
            f"{memory.UNREAD}: its bytes, and whether they were freed, are unknown",
        ]
    edges = tuple(walk.edges)
    return Graph(
        tuple(nodes),
        edges,
        walk.top,
        tuple(notes),
        paths.classes,
    )


class _Paths:
    """Paths of parameters and modules; a root module's own name leads only where there are several."""

    def __init__(
        self,
        modules: Mapping[str, Module],
        leaves: dict[int, torch.Tensor],
    ) -> None:
        reached = set(map(id, leaves.values()))
        self._parameters: dict[int, tuple[str, str]] = {}
        for root, module in modules.items():
            for path, parameter in module.named_parameters():
                if id(parameter) in reached:
                    self._parameters[id(parameter)] = root, path
        self._roots = {root for root, _ in self._parameters.values()}
        self.classes: dict[str, str] = {}
        for root in self._roots:
            for path, inner in modules[root].named_modules():
                self.classes[self.joined(root, path)] = type(inner).__name__

    def of(self, leaf: torch.Tensor) -> str:
        """Return the path of a parameter, empty where it is of no module."""
        return self.joined(*self._parameters.get(id(leaf), NOWHERE))

    def joined(
        self,
        root: str,
        path: str,
    ) -> str:
        """Join a root's name and a path, without what `torch.compile` puts in."""
        path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
        if len(self._roots) < 2:
            return path
        return f"{root}.{path}".strip(".")

    def _used(self, walk: Walk) -> dict[Any, list[str]]:
        """Return for each operation that uses parameters the modules that hold them."""
        used: dict[Any, list[str]] = {}
        for edge in walk.edges:
            leaf = walk.leaves.get(edge.target)
            if leaf is not None and id(leaf) in self._parameters:
                module = self.of(leaf).rpartition(".")[0]
                used.setdefault(walk.order[edge.source], []).append(module)
        return used

    def between(self, walk: Walk) -> dict[Any, str]:
        """Return for each operation the innermost module that holds the parameters used before it and after it."""
        used = self._used(walk)
        operations = [fn for i, fn in enumerate(walk.order) if i not in walk.leaves]
        operations.sort(key=lambda fn: fn._sequence_nr())
        before = _holds(map(used.get, operations))
        after = _holds(map(used.get, reversed(operations)))[::-1]
        places = {}
        for fn, *ends in zip(operations, before, after, strict=True):
            places[fn] = _common(used.get(fn) or ends)
        return places


def _holds(used: Iterable[list[str] | None]) -> list[str]:
    """Return for each operation the module of the parameters used last."""
    last = ""
    return [last := _common(modules) if modules else last for modules in used]


def _common(modules: Iterable[str]) -> str:
    """Return the innermost module that holds all these.

    >>> _common(["body.0.attn", "body.0.mlp"])
    'body.0'
    """
    levels = zip(*[module.split(".") for module in modules], strict=False)
    shared = takewhile(lambda names: len(set(names)) == 1, levels)
    return ".".join(name for name, *_ in shared)


class _Storages:
    """The storages that the nodes of one graph save: equal storages have equal numbers."""

    def __init__(self, leaves: dict[int, torch.Tensor]) -> None:
        self._numbers: dict[int, int] = {-1: -1}
        self._leaves = {memory.storage(leaf)[0] for leaf in leaves.values()} - {-1}

    def saved(self, fn: Any) -> tuple[tuple[Saved, ...], bool]:
        """List what a node keeps, and tell whether it still has all of it."""
        rows = []
        alive = True
        for attr, raw in memory.raw_saved(fn):
            tensor = memory.held(raw)
            if tensor is not None:
                rows.append(self._row(attr, tensor))
            elif _was_freed(fn, attr, raw):
                alive = False
            elif memory.UNREAD:
                rows.append(Saved(attr, bytes=math.nan))
        return tuple(rows), alive

    def _row(
        self,
        attr: str,
        tensor: torch.Tensor,
    ) -> Saved:
        key, size = memory.storage(tensor)
        number = self._numbers.setdefault(key, len(self._numbers) - 1)
        is_parameter = key in self._leaves or memory.is_parameter(tensor)
        return Saved(
            attr,
            *_described(tensor),
            size,
            number,
            is_parameter,
        )


def _was_freed(
    fn: Any,
    attr: str,
    raw: Any,
) -> bool:
    """Tell freed from never needed: there is no hook on an empty slot, so reading it unpacks nothing."""
    if raw is None:
        return True
    if not memory.unpacks_plainly(raw) or raw.data is not None:
        return False
    try:
        getattr(fn, f"_saved_{attr.partition('[')[0]}")
    except AttributeError:
        return False
    except RuntimeError:
        return True
    return False


def _described(tensor: Any) -> tuple[tuple[int, ...] | None, str]:
    """Return the shape and the dtype of a tensor, or of what a node knows of its output."""
    try:
        shape = tuple(map(int, tensor.shape))
        return shape, str(tensor.dtype).removeprefix("torch.")
    except (RuntimeError, TypeError, AttributeError):
        return None, ""  # nested tensors have no one shape
