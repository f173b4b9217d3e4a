"""The optimizers of a recording: what each is called, which parameters it has, and which of them are one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
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
    other and steps the same parameters. None is held: a loop may make a new one, with a state of
    the model's size, for each epoch. `owned` tells the numbers of the leaves that an optimizer has.
    """

    def __init__(self, owned: Callable[[Any], list[int]]) -> None:
        self.names: list[str] = []
        # Of each, the leaves that it had when it was last seen.
        self._leaves: list[list[int]] = []
        self._owned = owned
        # Every object met, the wrapped ones too, by id.
        self._met: dict[int, tuple[Callable[[], Any], int]] = {}

    def meet(self, optimizer: Any, frame: FrameType | None) -> int:
        """The number of this optimizer."""
        met = self._met.get(id(optimizer))
        if met is not None and met[0]() is optimizer:
            return met[1]
        self._met = {key: known for key, known in self._met.items() if known[0]() is not None}
        index = next((i for known, i in self._met.values() if _one(known(), optimizer)), len(self.names))
        if index == len(self.names):
            self.names.append(self._name(optimizer, frame))
            self._leaves.append(self._owned(optimizer))
        self._met[id(optimizer)] = _weak(optimizer), index
        return index

    def leaves(self) -> list[list[int]]:
        """The leaves that each has, or had."""
        for known, index in reversed(self._met.values()):  # of one and its wrapper, what was met first
            optimizer = known()
            if optimizer is not None:
                self._leaves[index] = self._owned(optimizer)
        return self._leaves

    def _name(self, optimizer: Any, frame: FrameType | None) -> str:
        """The callers' own name for it, else its class, kept apart from those already taken."""
        name = ""
        for _ in range(_CALLERS):
            if frame is None or name:
                break
            name, frame = variable(frame, optimizer), frame.f_back
            name = "" if name == "self" else name  # a method of its own
        name = name or type(optimizer).__name__
        if name not in self.names:
            return name
        return next(f"{name}#{n}" for n in range(2, len(self.names) + 3) if f"{name}#{n}" not in self.names)

    def forget(self) -> None:
        """Forget which optimizers there were; their names stay."""
        self._met.clear()


def _weak(item: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(item)
    except TypeError:  # with slots: held, so that no other gets its id
        return lambda: item


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
