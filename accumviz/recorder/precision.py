"""Observe what 16 bits do to steps: copies of weights that autocast keeps over a step, and weights that do not move.

Neither is in `.grad`. Both are looked at only where it can happen, without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accumviz.recorder.memory import DEEP

# So many backwards are searched for old copies: the walk through a graph takes time.
_SEARCHES = 8


class CastCache:
    """The weights that steps have moved inside an autocast, which keeps their 16-bit copies until it is left."""

    def __init__(self) -> None:
        # The id of each weight, and the number of the first node made after its last step.
        self._moved: dict[int, int] = {}
        self._searches = 0

    def note_step(self, weights: Iterable[Any]) -> None:
        """Note that a step has moved these weights, if an autocast is open that keeps copies."""
        inside = torch._C._is_any_autocast_enabled()
        if inside and torch.is_autocast_cache_enabled():
            now = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            self._moved |= dict.fromkeys(map(id, weights), now)

    def old_weight(self, roots: Sequence[Any]) -> Any:
        """Return a weight of which a forward after a step read the copy from before it; None where there is none."""
        if not self._moved or self._searches >= _SEARCHES:
            return None
        self._searches += 1
        visited = set(roots)
        waiting = list(roots)
        while waiting and len(visited) < DEEP:
            node = waiting.pop()
            for below, _ in node.next_functions:
                if below is None or below in visited:
                    continue
                visited.add(below)
                waiting.append(below)
                weight = _copied(below)
                moved = self._moved.get(id(weight), 0)
                if below._sequence_nr() < moved <= node._sequence_nr():
                    return weight
        return None


def _copied(node: Any) -> Any:
    """Return the weight that a node has copied to another type; None where it has done something else."""
    if type(node).__name__ != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)
