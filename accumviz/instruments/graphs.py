"""The graph of each backward, kept while it is small enough for a person to read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from accumviz.instruments.callsite import CallSites
from accumviz.instruments.numbers import Wire
from accumviz.instruments.buffer import Backward
from accumviz.instruments.trace import Scopes, follow, hooked
from accumviz.instruments.values import Later

# Nodes of one graph, and of all that a recording keeps: more is for `trace` at the place of interest.
GRAPH_NODES, ALL_NODES = 2000, 100_000
# A forward pass that never meets a backward must not fill the memory with its marks.
_MARKS = 1_000_000


class Graphs:
    """Reads the graph that a backward is about to run, and the order in which the engine runs its nodes."""

    def __init__(self, modules: dict[str, torch.nn.Module], sites: CallSites, wire: Wire) -> None:
        self._scopes, self._sites, self._wire = Scopes(modules), sites, wire
        self._hooks = ExitStack()
        self._room = ALL_NODES
        self.left_out = 0

    def open(self) -> None:
        self._hooks.enter_context(hooked(self._scopes))

    def close(self) -> None:
        self._hooks.close()

    def begin(self, running: Backward, frame: FrameType | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Look at the graph before it is freed."""
        given = args[0] if args else kwargs.get("tensors", ())
        roots = [given] if isinstance(given, torch.Tensor) else list(given)
        if not roots or not all(isinstance(root, torch.Tensor) and root.grad_fn is not None for root in roots):
            return
        later = Later()
        found = follow(roots, self._sites.owner(frame), self._scopes, min(GRAPH_NODES, self._room), later)
        if found is None:
            self.left_out += 1
            return
        later.send(self._wire)
        running.graph, running.finish_graph = found
        running.fill_graph = later.fill
        self._room -= len(running.graph)

    def end(self, running: Backward) -> None:
        """Add the order that the engine took."""
        if running.finish_graph is not None:
            running.graph, running.finish_graph = running.finish_graph(), None
        if len(self._scopes.starts) > _MARKS:
            self._scopes.clear()
