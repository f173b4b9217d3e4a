"""Record the graph of each backward, with the gradients of its nodes, for `play`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from accumviz.graph.graph import Graph
from accumviz.graph.node_values import Walk, numbers_on_cpu, results
from accumviz.graph.scopes import Scopes, sequence
from accumviz.graph.trace import TOO_LARGE, VALUES_LIMIT, Names, graph_of
from accumviz.recorder.callsite import CallSites
from accumviz.recorder.columns import Backward

# Nodes of one graph, and of all that a recording keeps: more is for `trace` at the place of interest.
GRAPH_NODES, ALL_NODES = 2000, 100_000
_ON_A_DEVICE = "the numbers of tensors on a device are not read"
_current_task = torch._C._current_graph_task_id


class Graphs:
    """A reader of the graph that a backward is about to run, and of what the engine brings to each node."""

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        sites: CallSites,
    ) -> None:
        self._scopes, self._sites = Scopes(modules), sites
        self._open: list[EngineRun] = []
        self._room = ALL_NODES
        self._began = 0, 0

    def open(self) -> None:
        """Note which module runs which operations."""
        self._scopes.open()
        self._began = get_ident(), sequence()

    def close(self) -> None:
        """Let go of modules and nodes, also those of a backward that still runs."""
        self._scopes.close()
        self._scopes = Scopes()
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
        running.graph, running.finish_graph = run.graph, run.finish

    def _read(
        self,
        walk: Walk,
        frame: FrameType | None,
    ) -> Graph:
        names = Names(self._sites.owner(frame))
        values, notes = {}, []
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
            self._scopes,
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
        """Add what the engine brought, and in which order. Raises what went wrong on the way."""
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
        self._failure: Exception | None = None
        self._task: int | None = None
        self._top, self._leaves = walk.top, walk.leaves
        self._reads = len(walk.order) <= VALUES_LIMIT
        self._order: list[int] = []
        self._grads: dict[int, Any] = {}
        self._handles = []
        for i, fn in enumerate(walk.order):
            single = len(fn._input_metadata) == 1
            self._handles.append(fn.register_prehook(self._hook_of(i, single)))

    def close(self) -> None:
        """Let go of the nodes."""
        self.closed = True
        while self._handles:
            self._handles.pop().remove()

    def _hook_of(
        self,
        i: int,
        single: bool,
    ) -> Callable[[Any], None]:
        def hook(grads: Any) -> None:
            if self._failure is None:
                try:
                    self.note(i, grads[0] if single else None)
                except Exception as error:  # it would end the user's backward
                    self._failure = error

        return hook

    def note(
        self,
        i: int,
        grad: torch.Tensor | None,
    ) -> None:
        """Take note of what is about to go through a node."""
        task = _current_task()
        if self._task is None and i in self._top:
            self._task = task
        if task == self._task:
            again = i in self._grads
            self._order.append(i)
            is_read = self._reads and not again
            self._grads[i] = numbers_on_cpu(grad) if is_read else None
        elif i in self._leaves:
            self._grads[i] = None

    def finish(self) -> Graph:
        """Return the graph with what was brought, once the backward is over."""
        self.close()
        if self._failure is not None:
            raise self._failure
        nodes = []
        for node in self.graph:
            nodes.append(replace(node, grad=self._grads.get(node.id)))
        return replace(
            self.graph,
            nodes=tuple(nodes),
            order=tuple(self._order),
        )
