"""The saved tensors alive around a backward: those of its own graph, and of retained graphs still held."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

from accumviz.instruments.memory import saved_storages

# Unless asked for every time, walks may take this share of the loop's time, after so many seconds that are free.
SHARE, FREE = 0.002, 0.01
_UNKNOWN = float("nan")


class _Mark:
    """Lives as long as the graph node that carries it."""


class Held:
    """Bytes of saved tensors, counted once per storage, over all graphs that a recording has met.

    A graph is met at its backward: what was built and never had one is not counted.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._spent, self._start = 0.0, time.perf_counter()
        self._retained: list[tuple[weakref.ref[_Mark], dict[int, int]]] = []

    def before(self, nodes: Sequence[Any]) -> dict[int, int] | None:
        """The storages of this backward's graph, or None where they are not measured."""
        now = time.perf_counter()
        if not self._wanted and (self._wanted is False or self._spent > FREE + SHARE * (now - self._start)):
            return None
        storages = saved_storages(nodes)
        self._retained = [(mark, held) for mark, held in self._retained if mark() is not None]
        self._spent += time.perf_counter() - now
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

    def after(self, nodes: Sequence[Any], storages: dict[int, int] | None, *, keeps: bool, failed: bool) -> float:
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
