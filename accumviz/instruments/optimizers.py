"""The optimizers of a recording: what each is called, which parameters it has, and which of them are one."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from accumviz.instruments.callsite import variable

# The variables of so many callers are searched for an optimizer's name.
_CALLERS = 32


def is_optimizer(item: Any) -> bool:
    """Whether this steps like an optimizer: it is one, or wraps one and shows its groups."""
    if isinstance(item, torch.optim.Optimizer):
        return True
    return not isinstance(item, torch.nn.Module | torch.Tensor) and callable(getattr(item, "step", None)) and _has(item)


def _has(item: Any) -> bool:
    return isinstance(getattr(item, "param_groups", None), list)


def parameters(optimizer: Any) -> Iterator[Any]:
    """Its parameters; none where a wrapper cannot say."""
    try:
        groups = list(optimizer.param_groups)
    except Exception:  # whatever a wrapper's property raises is no affair of the loop that we watch
        return
    for group in groups:
        yield from group["params"]


class Optimizers:
    """Optimizers in the order in which they were met.

    An optimizer and what wraps it are one: they share the very list of groups, or one holds the
    other and steps the same parameters.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.known: list[Any] = []
        # Every object met, the wrapped ones too; held, so that no other gets its id.
        self._met: dict[int, tuple[Any, int]] = {}

    def meet(self, optimizer: Any, frame: FrameType | None) -> int:
        """The number of this optimizer."""
        met = self._met.get(id(optimizer))
        if met is None:
            index = next((i for i, known in enumerate(self.known) if _one(known, optimizer)), len(self.known))
            if index == len(self.known):
                self.known.append(optimizer)
                self.names.append(self._name(optimizer, frame))
            met = self._met[id(optimizer)] = optimizer, index
        return met[1]

    def _name(self, optimizer: Any, frame: FrameType | None) -> str:
        """The callers' own name for it, else its class, kept apart from those already taken."""
        name = ""
        for _ in range(_CALLERS):
            if frame is None or name:
                break
            name, frame = variable(frame, optimizer), frame.f_back
            name = "" if name == "self" else name  # a method of its own
        name = name or type(optimizer).__name__
        return name if name not in self.names else f"{name}#{self.names.count(name) + 1}"

    def forget(self) -> None:
        """Let the optimizers go; their names stay."""
        self.known.clear()
        self._met.clear()


def _one(a: Any, b: Any) -> bool:
    shared = getattr(a, "param_groups", None)
    if shared is not None and shared is getattr(b, "param_groups", None):
        return True
    return _holds(a, b) or _holds(b, a)


def _holds(outer: Any, inner: Any) -> bool:
    inside = getattr(outer, "__dict__", {})
    if not any(value is inner for value in inside.values()):
        return False
    mine = {id(p) for p in parameters(outer)}
    return not mine or any(id(p) in mine for p in parameters(inner))
