"""The `grad_fn` graph of a tensor as a `Graph`: one iterative walk that leaves the graph unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from accumviz import arguments
from accumviz.graph.graph import Edge, Graph, Node, Saved
from accumviz.graph.node_values import forward_values, gradients
from accumviz.graph.scopes import Scopes, submodules
from accumviz.recorder import memory
from accumviz.recorder.callsite import variables

# Nodes: a larger graph has no readable numbers, and calling every backward costs.
VALUES_LIMIT = 200
_FREED = (
    "a backward has freed this graph: the operations are there, what they saved is gone; "
    "trace before calling backward, or call backward(retain_graph=True)"
)


def trace(
    *tensors: Any,
    module: Module | Mapping[str, Module] | None = None,
    values: bool = False,
    names: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Read the autograd graph below one or more tensors, with the caller's names on it.

    `tensors` are tensors with a `grad_fn`, or one function without arguments that computes and
    returns them: then it is run here, and each operation knows the module that ran it. `module`
    gives parameters their paths; without it, modules among the caller's variables do. `names` adds
    names to those of the caller's variables.

    `values=True` puts forward values and gradients on the nodes of a graph of at most 200, for
    tensors of at most 64 elements; what cannot be known for certain stays None. A gradient is
    what the operations' own formulas give. Only formulas of PyTorch's own are called, those that
    are known to do nothing else: no hook, no custom Function, no collective runs, and `.grad`,
    random state and graph stay unchanged. What a real backward brought is in the graphs of
    `record(..., graphs=True)`.

    Raises `TypeError` for what is not a tensor, `ValueError` for a tensor without a graph.

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
    _check_names(names)
    frame = sys._getframe(1)
    with torch._C.DisableTorchFunctionSubclass():
        scopes = Scopes(_named_modules(module, frame))
    if len(tensors) == 1 and _is_function(tensors[0]):
        tensors = (_run(tensors[0], scopes),)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        labels = Labels(frame, names or {})
        roots = []
        for i, given in enumerate(tensors):
            roots += [_checked(t, f"argument {i}", labels) for t in _flat(given)]
        if not roots:
            raise ValueError(
                "nothing to trace; pass the tensor you call backward on, as in av.trace(loss)"
            )
        walk = walk_of(roots)
        numbers: Numbers = ({}, {}, [])
        if values:
            numbers = _numbers(walk, labels)
        return graph_of(walk, labels, scopes, numbers)


# Forward values and gradients by node, and notes on them.
Numbers = tuple[dict[Any, Any], dict[Any, Any], list[str]]


def _check_names(names: Any) -> None:
    """Raise `TypeError` for anything but tensors by name."""
    if names is None:
        return
    pairs = names.items() if isinstance(names, Mapping) else [(None, None)]
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise TypeError(
                f"names={names!r:.80}; expected tensors by name, as in names={{'y_hat': y_hat}}"
            )


def _is_function(given: Any) -> bool:
    return callable(given) and not isinstance(given, (torch.Tensor, Module))


def _run(function: Callable[[], Any], scopes: Scopes) -> Any:
    """Call a function within scopes. Raises `TypeError` for one that needs arguments."""
    with suppress(ValueError):  # of one without a signature
        needed = []
        for one in signature(function).parameters.values():
            if one.default is one.empty and one.kind not in (
                one.VAR_POSITIONAL,
                one.VAR_KEYWORD,
            ):
                needed.append(one.name)
        if needed:
            name = getattr(function, "__name__", type(function).__name__)
            listed = ", ".join(needed)
            raise TypeError(
                f"trace() was given {name}, which wants {listed}; expected a tensor, or a function without "
                f"arguments, as in av.trace(lambda: {name}({listed}))"
            )
    scopes.open()
    try:
        return function()
    finally:
        scopes.close()


def _named_modules(
    module: Module | Mapping[str, Module] | None, frame: FrameType
) -> dict[str, Module]:
    """Name the modules to take paths from: those given, else those among the caller's variables."""
    if isinstance(module, Module):
        return {"model": module}
    if isinstance(module, Mapping) and all(
        isinstance(one, Module) for one in module.values()
    ):
        return dict(module)
    if module is not None:
        raise TypeError(
            f"module is {arguments.a(module)}; expected a torch.nn.Module, "
            "or a dict of them by name"
        )
    candidates: dict[int, tuple[str, Module]] = {}
    inner: set[int] = set()
    for name, value in variables(frame):
        if issubclass(type(value), Module):
            candidates.setdefault(id(value), (name, value))
            inner |= {id(one) for one in value.modules() if one is not value}
    return {name: one for name, one in candidates.values() if id(one) not in inner}


class Labels:
    """Names of the caller's tensors, by grad_fn and, for leaves, by identity."""

    def __init__(self, frame: FrameType | None, names: Mapping[str, Any]) -> None:
        self.tensors: dict[Any, tuple[str, torch.Tensor]] = {}
        self.leaves: dict[int, str] = {}
        self.named: list[tuple[str, torch.Tensor]] = []
        pairs = [*names.items(), *([] if frame is None else variables(frame))]
        for name, value in pairs:
            if issubclass(type(value), torch.Tensor):
                self.named.append((name, value))
                self._add(name, value)

    def _add(self, name: str, value: torch.Tensor) -> None:
        # Asking such a view for its node makes a new one, in another place of the engine's order.
        if value._is_view() and value._base is not None and value._base._version:
            return
        if value.grad_fn is None:
            self.leaves.setdefault(id(value), name)
        elif value.output_nr == 0:
            self.tensors.setdefault(value.grad_fn, (name, value))

    def name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor, empty where it has none."""
        return next((name for name, value in self.named if value is tensor), "")


def _flat(given: Any) -> Iterator[Any]:
    if isinstance(given, (tuple, list)):
        for part in given:
            yield from _flat(part)
    else:
        yield given


def _checked(tensor: Any, where: str, labels: Labels) -> torch.Tensor:
    """Return a tensor that has a graph; raise an error that says why another has none."""
    if not isinstance(tensor, torch.Tensor):
        parts = [k for k, v in vars_of(tensor).items() if isinstance(v, torch.Tensor)]
        hint = (
            f"one of its tensors ({', '.join(parts)})"
            if parts
            else "the tensor you call backward on"
        )
        raise TypeError(
            f"{where} is {arguments.a(tensor)}; expected a tensor with a grad_fn: pass {hint}"
        )
    if tensor.grad_fn is not None:
        return tensor
    name = labels.name(tensor) or where
    if tensor.requires_grad:
        raise ValueError(
            f"{name} is a leaf: it was not computed from anything, so it has no grad_fn and no graph; "
            f"trace what is computed from it, such as the loss"
        )
    key, _ = memory.storage(tensor)
    for source, other in labels.named:
        if other.requires_grad and memory.storage(other)[0] == key != -1:
            raise ValueError(
                f"{name} was detached from {source}: it holds the same numbers without the graph; trace {source}"
            )
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise ValueError(
            f"{name} is {tensor.dtype}: only floating-point tensors have gradients, so it has no graph"
        )
    raise ValueError(
        f"{name} has no grad_fn: it was computed under torch.no_grad() or inference_mode(), was detached, or comes "
        "from tensors of which none requires grad; compute it again with gradients on, from a tensor that requires grad"
    )


def vars_of(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


@dataclass
class Walk:
    """The nodes below some roots, in traversal order, with their edges and leaves."""

    roots: list[torch.Tensor]
    order: list[Any]
    edges: list[Edge]
    leaves: dict[int, torch.Tensor]
    top: tuple[int, ...]


def walk_of(roots: list[torch.Tensor]) -> Walk:
    """Go through the graph below these roots, without recursion."""
    order: list[Any] = list(dict.fromkeys(root.grad_fn for root in roots))
    index = {fn: i for i, fn in enumerate(order)}
    top = tuple(range(len(order)))
    edges = []
    leaves = {}
    for source, fn in enumerate(order):
        if hasattr(fn, "variable"):
            leaves[source] = fn.variable
        for position, (following, output) in enumerate(fn.next_functions):
            if following is None:
                continue
            if following not in index:
                index[following] = len(order)
                order.append(following)
            edges.append(Edge(source, index[following], position, output))
    memory.keep_deletable(order, [order[i] for i in top])
    return Walk(roots, order, edges, leaves, top)


def _numbers(walk: Walk, labels: Labels) -> Numbers:
    if len(walk.order) > VALUES_LIMIT:
        size = f"the graph has {len(walk.order):,} nodes, they are shown up to {VALUES_LIMIT}"
        return {}, {}, [f"values are left out: {size}"]
    values = forward_values(walk.order, walk.roots, labels.tensors)
    slopes, note = gradients(walk.order, walk.roots)
    return values, slopes, [note] if note else []


def graph_of(walk: Walk, labels: Labels, scopes: Scopes, numbers: Numbers) -> Graph:
    """Put what is known of the nodes into a `Graph`."""
    values, slopes, notes = numbers
    paths = _Paths(scopes, walk.leaves)
    storages = _Storages(walk.leaves)
    nodes = []
    for i, fn in enumerate(walk.order):
        leaf = walk.leaves.get(i)
        saved: tuple[Saved, ...] = ()
        alive = True
        if leaf is not None:
            name = paths.of_parameter(leaf) or labels.leaves.get(id(leaf), "")
            module = paths.of_parameter(leaf).rpartition(".")[0]
            shape, dtype = _shape(leaf), _dtype(leaf)
        else:
            name, _ = labels.tensors.get(fn, ("", None))
            module = paths.joined(*scopes.at(fn._sequence_nr()))
            shape, dtype = _first_output(fn)
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
            slopes.get(fn),
        )
        nodes.append(node)
    if not all(node.alive for node in nodes):
        notes = [_FREED]
    meta = {"torch": torch.__version__, "notes": notes, "classes": paths.classes}
    return Graph(tuple(nodes), tuple(walk.edges), walk.top, meta)


class _Paths:
    """Paths of parameters and modules; a root module's own name leads only where there are several."""

    def __init__(self, scopes: Scopes, leaves: dict[int, torch.Tensor]) -> None:
        reached = {id(leaf) for leaf in leaves.values()}
        self._parameters: dict[int, tuple[str, str]] = {}
        for root, module in scopes.modules.items():
            for path, parameter in module.named_parameters():
                if id(parameter) in reached:
                    self._parameters[id(parameter)] = root, path
        self._roots = {root for root, _ in self._parameters.values()}
        self.classes: dict[str, str] = {}
        for root in self._roots:
            for path, inner in submodules(scopes.modules[root]):
                self.classes[self.joined(root, path)] = type(inner).__name__

    def of_parameter(self, leaf: torch.Tensor) -> str:
        return self.joined(*self._parameters.get(id(leaf), ("", "")))

    def joined(self, root: str, path: str) -> str:
        """Join a root's name and a path, without what `torch.compile` puts in."""
        path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
        if len(self._roots) < 2:
            return path
        return ".".join(part for part in (root, path) if part)


class _Storages:
    """What the nodes of one graph save: equal storages have equal numbers."""

    def __init__(self, leaves: dict[int, torch.Tensor]) -> None:
        self._numbers: dict[int, int] = {-1: -1}
        self._leaves = {memory.storage(leaf)[0] for leaf in leaves.values()} - {-1}

    def saved(self, fn: Any) -> tuple[tuple[Saved, ...], bool]:
        """List what a node keeps, and tell whether it still has it."""
        rows, alive = [], True
        for attr, raw in memory.raw_saved(fn):
            tensor = memory.held(raw)
            if tensor is not None:
                rows.append(self._row(attr, tensor))
            elif raw is None or (raw.data is None and raw.unpack_hook is None):
                if raw is None or _was_freed(fn, attr):
                    rows.append(Saved(attr))
                    alive = False
            else:
                rows.append(Saved(attr, dtype="packed by a hook"))
        return tuple(rows), alive

    def _row(self, attr: str, tensor: torch.Tensor) -> Saved:
        key, size = memory.storage(tensor)
        number = self._numbers.setdefault(key, len(self._numbers) - 1)
        parameter = key in self._leaves or memory.is_parameter(tensor)
        return Saved(attr, _shape(tensor), _dtype(tensor), size, number, parameter)


def _was_freed(fn: Any, attr: str) -> bool:
    """Tell freed from never needed: there is no hook on an empty slot, so reading it unpacks nothing."""
    try:
        getattr(fn, f"_saved_{attr.partition('[')[0]}")
    except AttributeError:
        return False
    except RuntimeError:
        return True
    return False


def _first_output(fn: Any) -> tuple[tuple[int, ...] | None, str]:
    try:
        first = fn._input_metadata[0]
        return _shape(first), _dtype(first)
    except (RuntimeError, IndexError, TypeError, AttributeError):
        return None, ""


def _shape(tensor: Any) -> tuple[int, ...] | None:
    try:
        return tuple(map(int, tensor.shape))
    except (
        RuntimeError,
        TypeError,
        AttributeError,
    ):  # nested tensors have no one shape
        return None


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
