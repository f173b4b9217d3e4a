"""The saved tensors alive around a backward: those of its own graph, and of retained graphs still held."""

from __future__ import annotations

import weakref
from typing import Any

from accumviz.instruments.memory import saved_storages

# A graph of so many nodes is walked in about a millisecond; larger ones only when asked for.
_LIMIT = 2000
_UNKNOWN = float("nan")


class _Mark:
    """Lives as long as the graph node that carries it."""


class Held:
    """Bytes of saved tensors, counted once per storage, over all graphs that a recording has met.

    A graph is met at its backward: what was built and never had one is not counted.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._too_large: set[Any] = set()
        self._retained: list[tuple[weakref.ref[_Mark], dict[int, int]]] = []

    def before(self, nodes: list[Any], place: Any) -> dict[int, int] | None:
        """The storages of this backward's graph, or None where they are not measured."""
        if self._wanted is False or (self._wanted is None and place in self._too_large):
            return None
        storages = saved_storages(nodes, None if self._wanted else _LIMIT)
        if storages is None:
            self._too_large.add(place)
        self._retained = [(mark, held) for mark, held in self._retained if mark() is not None]
        return storages

    def total(self, storages: dict[int, int] | None) -> float:
        """Bytes alive: these storages and those of the graphs that earlier backwards retained."""
        if storages is None:
            return _UNKNOWN
        if not self._retained:
            return float(sum(storages.values()))
        union: dict[int, int] = {}
        for _, held in self._retained:
            union |= held
        return float(sum((union | storages).values()))

    def after(self, nodes: list[Any], storages: dict[int, int] | None, *, keeps: bool, failed: bool) -> float:
        """Bytes alive once the backward is over; unknown when it failed half-way."""
        if storages is None or failed:
            return _UNKNOWN
        if keeps and nodes:
            mark = _Mark()
            nodes[0].metadata["accumviz"] = mark
            self._retained.append((weakref.ref(mark), storages))
        else:
            for _, held in self._retained:
                for key in storages:
                    held.pop(key, None)
        return self.total({})
