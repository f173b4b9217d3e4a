"""Record the graph of each backward, with the modules that ran its operations and what the engine brought to its nodes.

Which module ran an operation is found without a hook on any module. A hook would be copied and pickled with its module,
refused by `torch.jit.script`, traced by `torch.compile`, and would turn off the fast paths of attention. So
`torch.nn.Module.__call__` is replaced while scopes are open; the compiler, and code that names the method, gets the
original.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from threading import Lock, get_ident
from types import FrameType, MethodType
from typing import Any

import torch
from torch.nn import Module

from accumviz.graph.graph import Graph
from accumviz.graph.node_values import Walk, numbers_on_cpu, results
from accumviz.graph.trace import NOWHERE, TOO_LARGE, VALUES_LIMIT, Names, graph_of
from accumviz.recorder import patches
from accumviz.recorder.callsite import CallSites
from accumviz.recorder.columns import Backward

# Nodes of one graph, and of all that a recording keeps: more is for `trace` at the place of interest.
GRAPH_NODES, ALL_NODES = 2000, 100_000
_ON_A_DEVICE = "the numbers of tensors on a device are not read"
_MARKS = 200_000  # the oldest are forgotten: a forward pass may never meet a backward
_current_task = torch._C._current_graph_task_id
_sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


# --- which module ran an operation ---------------------------------------------------------------


class Scopes:
    """Which module ran which operations of one thread, by autograd's sequence numbers."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules
        # Autograd numbers operations in each thread anew.
        self._thread = get_ident()
        self._starts: list[int] = []
        self._marks: list[tuple[str, str]] = []
        self._inside = [NOWHERE]
        # The modules are kept, so that no other one gets the id of one that is gone.
        self._places: dict[int, tuple[Module, tuple[str, str]]] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def at(self, number: int) -> tuple[str, str]:
        """Return (root name, path) of the module that made the operation with this sequence number."""
        i = bisect_right(self._starts, number) - 1
        here = get_ident() == self._thread
        return self._marks[i] if here and i >= 0 else NOWHERE

    def open(self) -> None:
        """Note calls from now on."""
        self._thread = get_ident()
        for root, module in self.modules.items():
            for path, inner in module.named_modules():
                self._places[id(inner)] = inner, (root, path)
        _replace_call((*_open, self))

    def close(self) -> None:
        """Note no more calls, and forget what was noted."""
        _replace_call(tuple(scopes for scopes in _open if scopes is not self))
        self.modules = {}
        self._places = {}
        self._starts = []
        self._marks = []

    def enter(self, module: Module) -> bool:
        """Note that this module is called; False if there is nothing to note."""
        if id(module) not in self._places or get_ident() != self._thread:
            return False
        _, place = self._places[id(module)]
        self._inside.append(place)
        self._mark()
        return True

    def leave(self) -> None:
        """Note that it has returned."""
        self._inside.pop()
        self._mark()

    def _mark(self) -> None:
        self._starts.append(_sequence())
        self._marks.append(self._inside[-1])
        if len(self._starts) > _MARKS:
            del self._starts[: _MARKS // 2], self._marks[: _MARKS // 2]


# Replaced, never changed: a call goes through those that were open when it began.
_open: tuple[Scopes, ...] = ()
_lock = Lock()


class _Call:
    """A stand-in for `Module.__call__`: a module that is called gets ours, code that names it the original."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __get__(
        self,
        module: Module | None,
        owner: type | None = None,
    ) -> Any:
        if module is None:
            return self.original
        try:
            if _open and not _names_the_method(sys._getframe(1)):
                return MethodType(_called, (self.original, module))
        except Exception as failure:
            patches.failures.append(failure)
        return MethodType(self.original, module)


def _names_the_method(caller: FrameType) -> bool:
    """Tell whether a frame names `__call__`: it may keep it, or compile it, as `torch.compile` does."""
    code = caller.f_code
    named = "__call__" in code.co_names or "__call__" in code.co_consts
    return named or caller.f_globals.get("__name__", "").startswith("torch._dynamo")


def _called(call: tuple[Any, Module], /, *args: Any, **kwargs: Any) -> Any:
    original, module = call
    entered = _enter(module) or ()
    try:
        return original(module, *args, **kwargs)
    finally:
        _leave(entered)


@patches.guarded
def _enter(module: Module) -> list[Scopes]:
    return [scopes for scopes in _open if scopes.enter(module)]


@patches.guarded
def _leave(entered: Sequence[Scopes]) -> None:
    for scopes in entered:
        scopes.leave()


def _replace_call(scopes: tuple[Scopes, ...]) -> None:
    """Keep `Module.__call__` replaced as long as scopes are open."""
    global _open  # noqa: PLW0603 - there is one Module.__call__ in a process
    with _lock:
        _open = scopes
        call = vars(Module)["__call__"]
        if scopes and not isinstance(call, _Call):
            Module.__call__ = _Call(call)  # type: ignore[method-assign, assignment]
        elif not scopes and isinstance(call, _Call):
            Module.__call__ = call.original  # type: ignore[method-assign]


# --- graphs --------------------------------------------------------------------------------------


class Graphs:
    """A reader of the graph that a backward is about to run, and of what the engine brings to each node."""

    def __init__(
        self,
        modules: dict[str, Module],
        sites: CallSites,
    ) -> None:
        self._scopes = Scopes(modules)
        self._sites = sites
        self._open: list[EngineRun] = []
        self._room = ALL_NODES
        self._began = 0, 0

    def open(self) -> None:
        """Note which module runs which operations."""
        self._scopes.open()
        self._began = get_ident(), _sequence()

    def close(self) -> None:
        """Let go of modules and nodes, also those of a backward that still runs."""
        self._scopes.close()
        while self._open:
            self._open.pop().close()

    def begin(
        self,
        running: Backward,
        frame: FrameType | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Look at the graph before it is freed."""
        given = args[0] if args else kwargs.get("tensors", ())
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            roots = [given] if isinstance(given, torch.Tensor) else list(given)
            for root in roots:
                if not isinstance(root, torch.Tensor) or root.grad_fn is None:
                    return
            if not roots:
                return
            walk = Walk(roots)
            if len(walk.order) > min(GRAPH_NODES, self._room):
                return
            run = EngineRun(self._read(walk, frame), walk)
        self._open.append(run)
        self._room -= len(walk.order)
        running.graph = run.graph
        running.finish_graph = run.finish

    def _read(
        self,
        walk: Walk,
        frame: FrameType | None,
    ) -> Graph:
        names = Names(self._sites.owner(frame))
        values = {}
        notes = []
        if len(walk.order) > VALUES_LIMIT:
            notes.append(TOO_LARGE)
        else:
            tensors = results(walk, names.tensors)
            values = {fn: numbers_on_cpu(tensor) for fn, tensor in tensors.items()}
            if not all(root.is_cpu for root in walk.roots):
                notes.append(_ON_A_DEVICE)
        graph = graph_of(
            walk,
            names,
            self._scopes.modules,
            self._scopes.at if len(self._scopes) else None,
            values,
            notes=notes,
        )
        thread, first = self._began
        if thread != get_ident():  # autograd numbers operations in each thread anew
            return graph
        tops = [walk.order[i] for i in walk.top]
        before = all(fn._sequence_nr() < first for fn in tops)
        return replace(graph, before=before)

    def end(self, running: Backward) -> None:
        """Add what the engine brought, and in which order."""
        finish, running.finish_graph = running.finish_graph, None
        if finish is not None:
            running.graph = finish()
            self._open = [run for run in self._open if not run.closed]


class EngineRun:
    """A reader of what the engine brings to the nodes of one graph, by hooks of ours just before each node runs.

    Small tensors are read at once, and nothing is kept: a tensor that we held could not be summed
    in place or become a `.grad`. Another run of the engine (a hook's, another thread's) brings
    something else; of a leaf that it reaches, the gradient is unknown.
    """

    def __init__(
        self,
        graph: Graph,
        walk: Walk,
    ) -> None:
        self.graph = graph
        self.closed = False
        self._task: int | None = None
        self._top = walk.top
        self._leaves = walk.leaves
        self._reads = len(walk.order) <= VALUES_LIMIT
        self._order: list[int] = []
        self._grads: dict[int, Any] = {}
        self._handles = []
        for i, fn in enumerate(walk.order):
            single = len(fn._input_metadata) == 1
            hook = patches.guarded(partial(self.note, i, single))
            self._handles.append(fn.register_prehook(hook))

    def close(self) -> None:
        """Let go of the nodes."""
        self.closed = True
        while self._handles:
            self._handles.pop().remove()

    def note(self, i: int, single: bool, grads: Any) -> None:
        """Take note of what is about to go through a node; of several gradients none is read."""
        task = _current_task()
        if self._task is None and i in self._top:
            self._task = task
        if task == self._task:
            again = i in self._grads
            self._order.append(i)
            is_read = self._reads and single and not again
            self._grads[i] = numbers_on_cpu(grads[0]) if is_read else None
        elif i in self._leaves:
            self._grads[i] = None

    def finish(self) -> Graph:
        """Return the graph with what was brought, once the backward is over."""
        self.close()
        nodes = []
        for node in self.graph:
            nodes.append(replace(node, grad=self._grads.get(node.id)))
        return replace(
            self.graph,
            nodes=tuple(nodes),
            order=tuple(self._order),
        )
