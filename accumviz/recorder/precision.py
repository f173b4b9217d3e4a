"""Observe what 16 bits do to steps: copies of weights that autocast keeps over a step, and weights that do not move.

Neither is in `.grad`. Both are looked at only where it can happen, without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accumviz.recorder.distributed import local
from accumviz.recorder.memory import DEEP
from accumviz.recorder.targets import parameters
from accumviz.recorder.transfer import HALF, readable

# So many backwards are searched for old copies: the walk through a graph takes time.
_SEARCHES = 8
# About so many elements of a weight show whether a step moves it.
_ELEMENTS = 256


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


class StepSample:
    """Elements of an optimizer's 16-bit weights before a step, to see how many of them it leaves as they are."""

    def __init__(self, optimizer: Any) -> None:
        self._weights: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._given: list[torch.Tensor] = []
        weights = parameters(optimizer)
        halves = [w for w in weights if w.dtype in HALF and w.grad is not None]
        for place in {0, len(halves) // 2, len(halves) - 1} if halves else ():
            weight, grad = local(halves[place]), local(halves[place].grad)
            is_here = grad.device == halves[0].device
            if is_here and _is_dense(weight) and _is_dense(grad):
                self._add(weight, grad)

    def _add(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        self._weights.append(weight)
        self._before.append(_elements(weight).clone())
        self._given.append(_elements(grad) != 0)

    def details(self) -> dict[str, Any]:
        """Say which share of the elements with a gradient the step has left bit for bit as they were."""
        if not self._weights:
            return {}
        now = torch.cat([_elements(weight) for weight in self._weights])
        given = torch.cat(self._given)
        left = (now == torch.cat(self._before)) & given
        return {"unmoved": left.sum() / given.sum().clamp(min=1)}


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether some elements can be read without a copy of the whole."""
    return (
        readable(tensor) and tensor.layout is torch.strided and tensor.is_contiguous()
    )


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)]
