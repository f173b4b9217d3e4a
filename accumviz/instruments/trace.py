"""The `grad_fn` graph of a tensor as a `Graph`: one iterative walk that leaves the graph as it was."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from accumviz.graph import Edge, Graph, Node, Saved
from accumviz.instruments import memory
from accumviz.instruments.callsite import variables
from accumviz.instruments.values import Later, Watch, forward_values, gradients, variables_of
from accumviz.instruments.values import numbers as numbers_of

VALUES_LIMIT = 200  # nodes; beyond it nobody follows the numbers, and calling every backward costs
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
    what the operations' own formulas give; hooks are not run, and `.grad`, random state and graph
    stay as they are.

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
    frame = sys._getframe(1)
    with torch._C.DisableTorchFunctionSubclass():
        scopes = module if isinstance(module, Scopes) else Scopes(_roots_of(module, frame))
    frames: list[FrameType] = [frame]
    watched: Watch | None = None
    if len(tensors) == 1 and callable(tensors[0]) and not isinstance(tensors[0], (torch.Tensor, Module)):
        tensors, frames, watched = _run(tensors[0], scopes, frame, values)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        flat = [(t, f"argument {i}") for i, given in enumerate(tensors) for t in _flatten(given)]
        labels = _Labels(frames, names or {})
        roots = [_check(tensor, where, labels) for tensor, where in flat]
        if not roots:
            raise ValueError("nothing to trace; pass the tensor you call backward on, as in av.trace(loss)")
        return _read(_walk(roots), labels, scopes, watched, values)


def follow(
    roots: list[torch.Tensor], frame: FrameType | None, scopes: Scopes, limit: int, later: Later
) -> tuple[Graph, Callable[[], Graph]] | None:
    """Read a graph that the engine is about to run, of at most `limit` nodes (else None), and watch it run.

    Returns the graph, and a function to call afterwards: it gives the graph with `meta["order"]`,
    the ids of the nodes in the order in which the engine ran them. Numbers on a device are left to `later`.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        walk = _walk(roots)
        if len(walk.order) > limit:
            return None
        labels = _Labels([frame] if frame is not None else [], {})
        graph = _read(walk, labels, scopes, None, len(walk.order) <= VALUES_LIMIT, later)
    ran: list[int] = []

    def noting(i: int) -> Callable[[Any], None]:
        return lambda _: ran.append(i)

    handles = [fn.register_prehook(noting(i)) for i, fn in enumerate(walk.order)]

    def finish() -> Graph:
        for handle in handles:
            handle.remove()
        return replace(graph, meta={**graph.meta, "order": ran})

    return graph, finish


@dataclass
class Scopes:
    """Which module ran which operations, told by autograd's sequence numbers at the module's doors.

    `modules` makes it, and `trace(loss, module=scopes)` reads it.
    """

    modules: dict[str, Module] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)

    def at(self, sequence: int) -> tuple[str, str]:
        """Return (root name, path) of the module in which an operation with this number was made."""
        i = bisect_right(self.starts, sequence) - 1
        return self.paths[i] if i >= 0 else ("", "")

    def clear(self) -> None:
        """Forget what was seen, so that a long recording keeps only the current graph's marks."""
        self.starts.clear()
        self.paths.clear()


@contextmanager
def modules(*given: Module, **named: Module) -> Iterator[Scopes]:
    """Note which module runs which operations, for a trace afterwards: `trace(loss, module=scopes)`.

    Costs two small hooks per module call and nothing per operation; they are removed on exit.

    >>> import torch, accumviz as av
    >>> from accumviz.instruments.trace import modules
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with modules(model) as scopes:
    ...     loss = model(torch.ones(1, 2)).sum()
    >>> [node.module for node in av.trace(loss, module=scopes)][:3]
    ['', '1', '0']
    """
    scopes = Scopes({**{f"model{i or ''}": module for i, module in enumerate(given)}, **named})
    with hooked(scopes):
        yield scopes


@contextmanager
def hooked(scopes: Scopes) -> Iterator[None]:
    stack = [("", "")]
    handles = []

    def enter(place: tuple[str, str]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(place)
            scopes.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            scopes.paths.append(place)

        return hook

    def leave(*_: Any) -> None:
        if len(stack) > 1:
            stack.pop()
        scopes.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        scopes.paths.append(stack[-1])

    try:
        for root, module in scopes.modules.items():
            for path, inner in _submodules(module):
                handles.append(inner.register_forward_pre_hook(enter((root, path))))
                handles.append(inner.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _submodules(module: Module) -> Iterator[tuple[str, Module]]:
    """Walk modules, but not into compiled ones: a hook there would compile them anew."""
    todo = [("", module)]
    seen = {module}
    while todo:
        path, at = todo.pop()
        yield path, at
        if type(at).__name__ == "OptimizedModule":
            continue
        for name, child in at.named_children():
            if child not in seen:
                seen.add(child)
                todo.append((f"{path}.{name}" if path else name, child))


def _roots_of(module: Module | Mapping[str, Module] | None, frame: FrameType) -> dict[str, Module]:
    """Name the modules to take paths from: those given, else those among the caller's variables."""
    if isinstance(module, Module):
        return {"model": module}
    if module is not None:
        if isinstance(module, Mapping) and all(isinstance(m, Module) for m in module.values()):
            return dict(module)
        raise TypeError(
            f"module is a {type(module).__name__}; expected a torch.nn.Module, "
            "a dict of them by name, or the scopes of `with modules(model) as scopes:`"
        )
    found = {name: v for name, v in variables(frame) if issubclass(type(v), Module)}
    inner = {id(m) for v in found.values() for m in v.modules() if m is not v}
    unique = {id(v): name for name, v in reversed(found.items()) if id(v) not in inner}
    return {name: v for name, v in found.items() if unique.get(id(v)) == name}


class _Labels:
    """Names of the caller's tensors, by grad_fn and, for leaves, by identity."""

    def __init__(self, frames: list[FrameType], names: Mapping[str, torch.Tensor]) -> None:
        self.tensors: dict[Any, tuple[str, torch.Tensor]] = {}
        self.leaves: dict[int, str] = {}
        self.found: list[tuple[str, torch.Tensor]] = []
        for name, value in [*names.items(), *(pair for frame in frames for pair in variables(frame))]:
            if not issubclass(type(value), torch.Tensor):
                continue
            self.found.append((name, value))
            try:
                node = value.grad_fn
            except RuntimeError:  # a view whose base was changed in place has no way back
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
    with hooked(scopes), watch or nullcontext(), variables_of(getattr(function, "__code__", None), frames):
        result = function()
    return (result,), [*frames, frame], watch


def _flatten(given: Any) -> list[Any]:
    return [t for part in given for t in _flatten(part)] if isinstance(given, (tuple, list)) else [given]


def _check(tensor: Any, where: str, labels: _Labels) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        inside = ", ".join(k for k, v in getattr(tensor, "__dict__", {}).items() if isinstance(v, torch.Tensor))
        hint = f"pass one of its tensors ({inside})" if inside else "pass the tensor you call backward on"
        raise TypeError(f"{where} is a {type(tensor).__name__}; expected a tensor with a grad_fn: {hint}")
    if tensor.grad_fn is not None:
        return tensor
    name = labels.name(tensor) or where
    if tensor.requires_grad:
        raise ValueError(
            f"{name} is a leaf: it was not computed from anything, so it has no grad_fn and no graph; "
            f"trace what is computed from it, such as the loss"
        )
    key = memory.storage(tensor)[0]
    source = next((n for n, t in labels.found if t.requires_grad and memory.storage(t)[0] == key), None)
    if source:
        raise ValueError(
            f"{name} was detached from {source}: it holds the same numbers without the graph; trace {source}"
        )
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise ValueError(f"{name} is {tensor.dtype}: only floating-point tensors have gradients, so it has no graph")
    raise ValueError(
        f"{name} has no grad_fn: it was computed under torch.no_grad() or inference_mode(), was detached, or comes "
        "from tensors of which none requires grad; compute it again with gradients on, from a tensor that requires grad"
    )


@dataclass
class _Walk:
    """The nodes below some roots, in traversal order, with their edges and leaves."""

    roots: list[torch.Tensor]
    order: list[Any]
    edges: list[Edge]
    leaves: dict[int, torch.Tensor]
    top: tuple[int, ...]


def _walk(roots: list[torch.Tensor]) -> _Walk:
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
    return _Walk(roots, order, edges, leaves, top)


def _read(
    walk: _Walk,
    labels: _Labels,
    scopes: Scopes,
    watched: Watch | None,
    values: bool,
    read: Callable[[Any], Any] = numbers_of,
) -> Graph:
    roots, order, leaves = walk.roots, walk.order, walk.leaves
    places, prefix, classes = _places(scopes, leaves)
    storages: dict[int, int] = {}
    own = {memory.storage(leaf)[0] for leaf in leaves.values()}
    notes = []
    stopped = ""
    numbers: dict[Any, Any] = {}
    slopes: dict[Any, Any] = {}
    if values and len(order) <= VALUES_LIMIT:
        numbers = forward_values(order, roots, labels.tensors, watched, read)
        slopes, stopped = gradients(order, roots, read)
    elif values:
        notes.append(f"values are left out: the graph has {len(order):,} nodes, they are shown up to {VALUES_LIMIT}")

    nodes = []
    shape: tuple[int, ...] | None
    saved: tuple[Saved, ...]
    for i, fn in enumerate(order):
        leaf = leaves.get(i)
        if leaf is not None:
            path = places.get(id(leaf), "")
            name = path or labels.leaves.get(id(leaf), "")
            shape, dtype = tuple(map(int, leaf.shape)), _dtype(leaf.dtype)
            place, saved, alive = path.rpartition(".")[0], (), True
        else:
            name = labels.tensors[fn][0] if fn in labels.tensors else ""
            shape, dtype = _metadata(fn)
            place = prefix(scopes.at(fn._sequence_nr())) if scopes.starts else ""
            saved, alive = _saved(fn, storages, own)
        op = type(fn).__name__
        nodes.append(Node(i, op, name, place, shape, dtype, saved, alive, numbers.get(fn), slopes.get(fn)))
    if not all(node.alive for node in nodes):
        notes.append(_FREED)
    elif stopped:
        notes.append(stopped)
    meta = {"torch": torch.__version__, "notes": notes, "classes": classes}
    return Graph(tuple(nodes), tuple(walk.edges), walk.top, meta)


def _places(
    scopes: Scopes, leaves: dict[int, torch.Tensor]
) -> tuple[dict[int, str], Callable[[tuple[str, str]], str], dict[str, str]]:
    """Give each parameter its path; the module's own name leads it only where there are several modules."""
    reached = {id(leaf) for leaf in leaves.values()}
    paths = {
        id(p): (root, path)
        for root, module in scopes.modules.items()
        for path, p in module.named_parameters()
        if id(p) in reached
    }
    used = {root for root, _ in paths.values()}

    def join(place: tuple[str, str]) -> str:
        path = place[1].replace("_orig_mod.", "").removesuffix("_orig_mod")
        return ".".join(filter(None, (place[0], path))) if len(used) > 1 else path

    classes = {
        join((root, path)): type(inner).__name__ for root in used for path, inner in _submodules(scopes.modules[root])
    }
    return {key: join(place) for key, place in paths.items()}, join, classes


def _metadata(fn: Any) -> tuple[tuple[int, ...] | None, str]:
    try:
        first = fn._input_metadata[0]
        return tuple(map(int, first.shape)), _dtype(first.dtype)
    except (RuntimeError, IndexError, TypeError, AttributeError):  # nested tensors have no one shape
        return None, ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saved(fn: Any, storages: dict[int, int], own: set[int]) -> tuple[tuple[Saved, ...], bool]:
    """List what a node keeps, and whether it still has it."""
    saved, alive = [], True
    for attr, raw in memory.raw_saved(fn):
        tensor = memory.held(raw)
        if tensor is not None:
            key, size = memory.storage(tensor)
            number = storages.setdefault(key, len(storages))
            try:
                shape = tuple(map(int, tensor.shape))
            except RuntimeError:  # a nested tensor
                shape = None
            parameter = key in own or memory.is_parameter(tensor)
            saved.append(Saved(attr, shape, _dtype(tensor.dtype), size, number, parameter))
        elif memory.READABLE and raw is not None and (raw.data is not None or raw.unpack_hook is not None):
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
