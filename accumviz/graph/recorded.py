"""The graph of each backward, with what the engine brought to its nodes, while a person can read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from accumviz.graph.graph import Graph
from accumviz.graph.node_values import Later, Sum, fill, forward_values
from accumviz.graph.scopes import Scopes, sequence
from accumviz.graph.trace import VALUES_LIMIT, Labels, Walk, read, walk_of
from accumviz.recorder.callsite import CallSites
from accumviz.recorder.rows import Backward
from accumviz.recorder.transfer import Wire

# Nodes of one graph, and of all that a recording keeps: more is for `trace` at the place of interest.
GRAPH_NODES, ALL_NODES = 2000, 100_000
_current_task = torch._C._current_graph_task_id


class Graphs:
    """Reads the graph that a backward is about to run, and what the engine brings to each node as it runs."""

    def __init__(
        self, modules: dict[str, torch.nn.Module], sites: CallSites, wire: Wire
    ) -> None:
        self._scopes, self._sites, self._wire = Scopes(modules), sites, wire
        self._flows: list[Flow] = []
        self._room = ALL_NODES
        self._began = 0, 0
        self.left_out = 0

    def open(self) -> None:
        """Watch which module runs which operations."""
        self._scopes.open()
        self._began = get_ident(), sequence()

    def close(self) -> None:
        """Let go of modules and nodes, those of a backward that still runs, too."""
        self._scopes.close()
        self._scopes = Scopes()
        while self._flows:
            self._flows.pop().close()

    def begin(
        self,
        running: Backward,
        frame: FrameType | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Look at the graph before it is freed; raises what went wrong in a forward pass."""
        if self._scopes.failure is not None:
            raise self._scopes.failure
        given = args[0] if args else kwargs.get("tensors", ())
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            roots = [given] if isinstance(given, torch.Tensor) else list(given)
            if not roots or not all(
                isinstance(root, torch.Tensor) and root.grad_fn is not None
                for root in roots
            ):
                return
            walk = walk_of(roots)
            if len(walk.order) > min(GRAPH_NODES, self._room):
                self.left_out += 1
                return
            owner = self._sites.owner(frame)
            labels = Labels([owner] if owner is not None else [], {})
            later, values = Later(self._wire), {}
            small = len(walk.order) <= VALUES_LIMIT
            if small:
                values = forward_values(walk.order, roots, labels.tensors, None, later)
                later.send()
            notes = (
                []
                if small
                else [
                    f"values are left out: the graph has more than {VALUES_LIMIT} nodes"
                ]
            )
            graph = read(walk, labels, self._scopes, values, {}, notes)
            thread, first = self._began
            # Autograd numbers operations in each thread anew.
            if thread == get_ident():
                graph.meta["before"] = all(
                    walk.order[i]._sequence_nr() < first for i in walk.top
                )
        flow = Flow(graph, later.now if small else None)
        self._flows.append(flow)
        flow.open(walk)
        running.graph, running.finish_graph, running.fill_graph = (
            graph,
            flow.finish,
            fill,
        )
        self._room -= len(graph)

    def end(self, running: Backward) -> None:
        """Add what the engine brought, and in which order; raises what went wrong on the way."""
        finish, running.finish_graph = running.finish_graph, None
        if finish is not None:
            running.graph = finish()
            self._flows = [flow for flow in self._flows if not flow.closed]


class Flow:
    """What the engine brings to the nodes of one graph, read by hooks of ours just before each node runs.

    Small tensors are read at once, and nothing is kept: a tensor that we held could not be summed
    in place or become a `.grad`. What comes in another run of the engine (a hook's, another
    thread's) is not this backward's; only a leaf takes what a backward inside this one brings,
    because its `.grad` does.
    """

    def __init__(self, graph: Graph, now: Callable[[Any], Any] | None) -> None:
        self._graph, self._now = graph, now
        self._thread, self._task = get_ident(), -2
        self._ran: list[int] = []
        self._brought: dict[int, list[Any]] = {}
        self._handles: list[Any] = []
        self._failure: Exception | None = None
        self.closed = False

    def open(self, walk: Walk) -> None:
        """Hook on to the nodes."""
        self._leaves = frozenset(walk.leaves)
        self._single = frozenset(
            i for i, fn in enumerate(walk.order) if len(fn._input_metadata) == 1
        )
        for i, fn in enumerate(walk.order):
            self._handles.append(fn.register_prehook(self._hook_of(i)))

    def close(self) -> None:
        """Let go of the nodes."""
        self.closed = True
        while self._handles:
            self._handles.pop().remove()

    def _hook_of(self, i: int) -> Callable[[Any], None]:
        def hook(grads: Any) -> None:
            if self._failure is None:
                try:
                    self.note(i, grads)
                except Exception as error:  # it would end the user's backward
                    self._failure = error

        return hook

    def note(self, i: int, grads: Sequence[torch.Tensor | None]) -> None:
        """Take note of what is about to go through a node."""
        task = _current_task()
        first = next((grad for grad in grads if grad is not None), None)
        if first is not None and first.is_cpu and get_ident() != self._thread:
            if (
                i in self._leaves
            ):  # another training's, or a part of this one for which the engine took a thread
                self._brought.setdefault(i, []).append(None)
            return
        if self._task == -2:
            self._task = task
        own = task == self._task
        if own:
            self._ran.append(i)
        elif i not in self._leaves:
            return
        if self._now is not None and i in self._single:
            # On a device, one thread runs the backwards of all: whose this is cannot be told.
            told = own or (first is not None and first.is_cpu)
            self._brought.setdefault(i, []).append(
                self._now(grads[0]) if told else None
            )

    def finish(self) -> Graph:
        """The graph with what was brought, once the backward is over."""
        self.close()
        if self._failure is not None:
            raise self._failure
        brought = {
            i: parts[0] if len(parts) == 1 else Sum(tuple(parts))
            for i, parts in self._brought.items()
        }
        nodes = tuple(
            replace(node, grad=brought.get(node.id)) for node in self._graph.nodes
        )
        return replace(
            self._graph, nodes=nodes, meta={**self._graph.meta, "order": self._ran}
        )
