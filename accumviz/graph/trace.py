"""The `grad_fn` graph of a tensor as a `Graph`: one iterative walk that leaves the graph as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from accumviz import arguments
from accumviz.graph.graph import Edge, Graph, Node, Saved
from accumviz.graph.node_values import Watch, forward_values, gradients, variables_of
from accumviz.graph.scopes import Scopes, modules, submodules
from accumviz.recorder import memory
from accumviz.recorder.callsite import variables
from accumviz.recorder.distributed import units

__all__ = ["Scopes", "modules", "trace"]

VALUES_LIMIT = (
    200  # nodes; beyond it nobody follows the numbers, and calling every backward costs
)
_FREED = (
    "a backward has freed this graph: the operations are there, what they saved is gone; "
    "trace before calling backward, or call backward(retain_graph=True)"
)


def trace(
    *tensors: Any,
    module: Module | Mapping[str, Module] | Scopes | None = None,
    values: bool = False,
    names: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Read the autograd graph below one or more tensors, with the caller's names on it.

    `tensors` are tensors with a `grad_fn`, or one function without arguments that computes and
    returns them: then it is run here, and each operation knows the module that ran it. `module`
    gives parameters their paths; without it, modules among the caller's variables do. It may also
    be the scopes of `with modules(model) as scopes`, so that a forward pass outside tells, too,
    which module ran what. `names` adds names to those of the caller's variables.

    `values=True` puts forward values and gradients on the nodes of a graph of at most 200, for
    tensors of at most 64 elements; what cannot be known for certain stays None. A gradient is
    what the operations' own formulas give. Only formulas of PyTorch's own are called, those that
    are known to do nothing else: no hook, no custom Function, no collective runs, and `.grad`,
    random state and graph stay as they are. What a real backward brought is in the graphs of
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
    if names is not None and not (
        isinstance(names, Mapping)
        and all(
            isinstance(name, str) and isinstance(one, torch.Tensor)
            for name, one in names.items()
        )
    ):
        raise TypeError(
            f"names={names!r:.80}; expected tensors by name, as in names={{'y_hat': y_hat}}"
        )
    frame = sys._getframe(1)
    with torch._C.DisableTorchFunctionSubclass():
        scopes = (
            module if isinstance(module, Scopes) else Scopes(_roots_of(module, frame))
        )
    frames: list[FrameType] = [frame]
    watched: Watch | None = None
    if (
        len(tensors) == 1
        and callable(tensors[0])
        and not isinstance(tensors[0], (torch.Tensor, Module))
    ):
        _check_function(tensors[0])
        tensors, frames, watched = _run(tensors[0], scopes, frame, values)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        flat = [
            (t, f"argument {i}") for i, one in enumerate(tensors) for t in _flatten(one)
        ]
        labels = Labels(frames, names or {})
        roots = [_check(tensor, where, labels) for tensor, where in flat]
        if not roots:
            raise ValueError(
                "nothing to trace; pass the tensor you call backward on, as in av.trace(loss)"
            )
        walk = walk_of(roots)
        found, slopes, notes = (
            _numbers(walk, labels, watched) if values else ({}, {}, [])
        )
        return read(walk, labels, scopes, found, slopes, notes)


def _check_function(function: Callable[..., Any]) -> None:
    """Raise `TypeError` for a function that cannot be called without arguments."""
    with suppress(ValueError):  # of one that says nothing of its arguments
        wanted = [
            p.name
            for p in signature(function).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if wanted:
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"trace() was given {name}, which wants {', '.join(wanted)}; expected a tensor, or a function without "
                f"arguments, as in av.trace(lambda: {name}({', '.join(wanted)}))"
            )


def _roots_of(
    module: Module | Mapping[str, Module] | None, frame: FrameType
) -> dict[str, Module]:
    """Name the modules to take paths from: those given, else those among the caller's variables."""
    if isinstance(module, Module):
        return {"model": module}
    if module is not None:
        if isinstance(module, Mapping) and all(
            isinstance(m, Module) for m in module.values()
        ):
            return dict(module)
        raise TypeError(
            f"module is {arguments.a(module)}; expected a torch.nn.Module, "
            "a dict of them by name, or the scopes of `with modules(model) as scopes:`"
        )
    found = {name: v for name, v in variables(frame) if issubclass(type(v), Module)}
    inner = {id(m) for v in found.values() for m in v.modules() if m is not v}
    unique = {id(v): name for name, v in reversed(found.items()) if id(v) not in inner}
    return {name: v for name, v in found.items() if unique.get(id(v)) == name}


class Labels:
    """Names of the caller's tensors, by grad_fn and, for leaves, by identity."""

    def __init__(
        self, frames: list[FrameType], names: Mapping[str, torch.Tensor]
    ) -> None:
        self.tensors: dict[Any, tuple[str, torch.Tensor]] = {}
        self.leaves: dict[int, str] = {}
        self.found: list[tuple[str, torch.Tensor]] = []
        for name, value in [
            *names.items(),
            *(pair for frame in frames for pair in variables(frame)),
        ]:
            if not issubclass(type(value), torch.Tensor):
                continue
            self.found.append((name, value))
            try:
                # Asking such a view for its node makes a new one, in another place of the engine's order.
                node = (
                    None if value._is_view() and value._base._version else value.grad_fn
                )
            except (
                RuntimeError
            ):  # a view whose base was changed in place has no way back
                continue
            if node is None:
                self.leaves.setdefault(id(value), name)
            elif value.output_nr == 0:
                self.tensors.setdefault(node, (name, value))

    def name(self, tensor: torch.Tensor) -> str:
        return next((name for name, value in self.found if value is tensor), "")


def _run(
    function: Callable[[], Any], scopes: Scopes, frame: FrameType, values: bool
) -> tuple[tuple[Any, ...], list[FrameType], Watch | None]:
    frames: list[FrameType] = []
    watch = Watch() if values else None
    scopes.open()
    try:
        with (
            watch or nullcontext(),
            variables_of(getattr(function, "__code__", None), frames),
        ):
            result = function()
    finally:
        scopes.close()
    return (result,), [*frames, frame], watch


def _flatten(given: Any) -> list[Any]:
    return (
        [t for part in given for t in _flatten(part)]
        if isinstance(given, (tuple, list))
        else [given]
    )


def _check(tensor: Any, where: str, labels: Labels) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        inside = ", ".join(
            k
            for k, v in getattr(tensor, "__dict__", {}).items()
            if isinstance(v, torch.Tensor)
        )
        hint = (
            f"pass one of its tensors ({inside})"
            if inside
            else "pass the tensor you call backward on"
        )
        raise TypeError(
            f"{where} is {arguments.a(tensor)}; expected a tensor with a grad_fn: {hint}"
        )
    if tensor.grad_fn is not None:
        return tensor
    name = labels.name(tensor) or where
    if tensor.requires_grad:
        raise ValueError(
            f"{name} is a leaf: it was not computed from anything, so it has no grad_fn and no graph; "
            f"trace what is computed from it, such as the loss"
        )
    key = memory.storage(tensor)[0]
    source = next(
        (n for n, t in labels.found if t.requires_grad and memory.storage(t)[0] == key),
        None,
    )
    if source:
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
    index: dict[Any, int] = {fn: i for i, fn in enumerate(order)}
    top = tuple(range(len(order)))
    edges = []
    leaves: dict[int, torch.Tensor] = {}
    for source, fn in enumerate(order):
        if hasattr(fn, "variable"):
            leaves[source] = fn.variable
        for position, (following, output) in enumerate(fn.next_functions):
            if following is None:
                continue
            target = index.get(following)
            if target is None:
                target = index[following] = len(order)
                order.append(following)
            edges.append(Edge(source, target, position, output))
    memory.keep_deletable(order, [order[i] for i in top])
    return Walk(roots, order, edges, leaves, top)


def _numbers(
    walk: Walk, labels: Labels, watched: Watch | None
) -> tuple[dict[Any, Any], dict[Any, Any], list[str]]:
    """Forward values and gradients by node, and what a reader should know of them."""
    if len(walk.order) > VALUES_LIMIT:
        said = f"the graph has {len(walk.order):,} nodes, they are shown up to {VALUES_LIMIT}"
        return {}, {}, [f"values are left out: {said}"]
    values = forward_values(walk.order, walk.roots, labels.tensors, watched)
    slopes, stopped = gradients(walk.order, walk.roots)
    return values, slopes, [stopped] if stopped else []


def read(
    walk: Walk,
    labels: Labels,
    scopes: Scopes,
    numbers: Mapping[Any, Any],
    slopes: Mapping[Any, Any],
    notes: list[str],
) -> Graph:
    """Put what is known of the nodes into a `Graph`: values and gradients are given by node."""
    order, leaves = walk.order, walk.leaves
    places, prefix, classes = _places(scopes, leaves)
    storages: dict[int, int] = {}
    own = {memory.storage(leaf)[0] for leaf in leaves.values()}
    nodes = []
    shape: tuple[int, ...] | None
    saved: tuple[Saved, ...]
    for i, fn in enumerate(order):
        leaf = leaves.get(i)
        if leaf is not None:
            path = places.get(id(leaf), "")
            name = path or labels.leaves.get(id(leaf), "")
            shape, dtype = _shape(leaf), _dtype(leaf.dtype)
            place, saved, alive = path.rpartition(".")[0], (), True
        else:
            name = labels.tensors[fn][0] if fn in labels.tensors else ""
            shape, dtype = _metadata(fn)
            place = prefix(scopes.at(fn._sequence_nr()))
            saved, alive = _saved(fn, storages, own)
        op = type(fn).__name__
        nodes.append(
            Node(
                i,
                op,
                name,
                place,
                shape,
                dtype,
                saved,
                alive,
                numbers.get(fn),
                slopes.get(fn),
            )
        )
    if not all(node.alive for node in nodes):
        notes = [_FREED]
    meta = {"torch": torch.__version__, "notes": notes, "classes": classes}
    return Graph(tuple(nodes), tuple(walk.edges), walk.top, meta)


def _places(
    scopes: Scopes, leaves: dict[int, torch.Tensor]
) -> tuple[dict[int, str], Callable[[tuple[str, str]], str], dict[str, str]]:
    """Give each parameter its path; the module's own name leads it only where there are several modules."""
    reached = {id(leaf) for leaf in leaves.values()}
    named = {
        id(p): (root, path)
        for root, module in scopes.modules.items()
        for path, p in module.named_parameters()
    }
    paths = {key: place for key, place in named.items() if key in reached}
    if len(paths) < len(reached) and "torch.distributed.fsdp" in sys.modules:
        # FSDP2 computes with gathered parameters of its own: each stands for the one that users see.
        for _, whole, shards in (
            unit for module in scopes.modules.values() for unit in units(module)
        ):
            if (
                len(shards) == 1
                and id(whole.leaf) in reached
                and id(shards[0]) in named
            ):
                paths[id(whole.leaf)] = named[id(shards[0])]
    used = {root for root, _ in paths.values()}

    def join(place: tuple[str, str]) -> str:
        path = place[1].replace("_orig_mod.", "").removesuffix("_orig_mod")
        return ".".join(filter(None, (place[0], path))) if len(used) > 1 else path

    classes = {
        join((root, path)): type(inner).__name__
        for root in used
        for path, inner in submodules(scopes.modules[root])
    }
    return {key: join(place) for key, place in paths.items()}, join, classes


def _metadata(fn: Any) -> tuple[tuple[int, ...] | None, str]:
    try:
        first = fn._input_metadata[0]
        return _shape(first), _dtype(first.dtype)
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


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saved(
    fn: Any, storages: dict[int, int], own: set[int]
) -> tuple[tuple[Saved, ...], bool]:
    """List what a node keeps, and whether it still has it."""
    saved, alive = [], True
    for attr, raw in memory.raw_saved(fn):
        tensor = memory.held(raw)
        if tensor is not None:
            key, size = memory.storage(tensor)
            number = storages.setdefault(key, len(storages))
            parameter = key in own or memory.is_parameter(tensor)
            saved.append(
                Saved(
                    attr, _shape(tensor), _dtype(tensor.dtype), size, number, parameter
                )
            )
        elif (
            memory.READABLE
            and raw is not None
            and (raw.data is not None or raw.unpack_hook is not None)
        ):
            saved.append(Saved(attr, dtype="packed by a hook"))
        elif raw is None or (memory.READABLE and _was_freed(fn, attr)):
            saved.append(Saved(attr))
            alive = False
    return tuple(saved), alive


def _was_freed(fn: Any, attr: str) -> bool:
    """Tell freed from never needed: there is no hook on an empty slot, so reading it unpacks nothing."""
    try:
        getattr(fn, f"_saved_{attr.partition('[')[0]}")
    except (RuntimeError, AttributeError) as error:
        return isinstance(error, RuntimeError)
    return False
