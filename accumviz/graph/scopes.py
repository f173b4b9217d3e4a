"""Which module ran which operations: told at the modules' doors, without a hook on any of them.

A hook would be copied and pickled with its module, refused by `torch.jit.script`, traced by
`torch.compile`, and would turn off the fast paths of attention. So `torch.nn.Module.__call__` is
replaced while somebody watches; the compiler, and whoever asks for it by name, gets the original.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

import torch
from torch.nn import Module

_NOWHERE = ("", "")
MARKS = 200_000  # of one thread: the oldest are forgotten
sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class _Marks(threading.local):
    """One thread's marks: autograd numbers operations in each thread anew."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.places: list[tuple[str, str]] = []
        self.inside = [_NOWHERE]


class Scopes:
    """Which module ran which operations, told by autograd's sequence numbers.

    `modules` makes it, and `trace(loss, module=scopes)` reads it.
    """

    def __init__(self, modules: dict[str, Module] | None = None) -> None:
        self.modules = dict(modules or {})
        self.failure: Exception | None = (
            None  # ours, kept out of the user's forward pass
        )
        self._marks = _Marks()
        # The modules are kept, so that no other one gets the id of one that is gone.
        self._places: dict[int, tuple[Module, tuple[str, str]]] = {}

    def __len__(self) -> int:
        return len(self._marks.starts)

    def at(self, sequence: int) -> tuple[str, str]:
        """Return (root name, path) of the module in which this thread made the operation with this number."""
        marks = self._marks
        i = bisect_right(marks.starts, sequence) - 1
        return marks.places[i] if i >= 0 else _NOWHERE

    def clear(self) -> None:
        """Forget what was seen, so that a long recording keeps only the current graph's marks."""
        self._marks.starts.clear()
        self._marks.places.clear()

    def open(self) -> None:
        """Be told from now on."""
        for root, module in self.modules.items():
            for path, inner in submodules(module):
                self._places[id(inner)] = inner, (root, path)
        _watch(self)

    def close(self) -> None:
        """Be told no more."""
        _unwatch(self)
        self._places = {}

    def knows(self, module: Module) -> bool:
        """Whether it wants to be told of calls of this module."""
        return id(module) in self._places

    def enter(self, module: Module) -> bool:
        """Note that this module is called; False if there is nothing to note."""
        known = self._places.get(id(module))
        if known is None or self.failure is not None:
            return False
        self._marks.inside.append(known[1])
        self._mark(known[1])
        return True

    def leave(self) -> None:
        """Note that it has returned."""
        inside = self._marks.inside
        inside.pop()
        self._mark(inside[-1])

    def _mark(self, place: tuple[str, str]) -> None:
        starts, places = self._marks.starts, self._marks.places
        starts.append(sequence())
        places.append(place)
        if len(starts) > MARKS:  # a forward pass may never meet a backward
            del starts[: MARKS // 2], places[: MARKS // 2]


@contextmanager
def modules(*given: Module, **named: Module) -> Iterator[Scopes]:
    """Note which module runs which operations, for a trace afterwards: `trace(loss, module=scopes)`.

    Costs some microseconds per module call and nothing per operation.

    >>> import torch, accumviz as av
    >>> from accumviz.graph.trace import modules
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with modules(model) as scopes:
    ...     loss = model(torch.ones(1, 2)).sum()
    >>> [node.module for node in av.trace(loss, module=scopes)][:3]
    ['', '1', '0']
    """
    scopes = Scopes(
        {**{f"model{i or ''}": module for i, module in enumerate(given)}, **named}
    )
    scopes.open()
    try:
        yield scopes
    finally:
        scopes.close()


def submodules(module: Module) -> Iterator[tuple[str, Module]]:
    """The modules inside this one and itself, each once, under their paths."""
    todo = [("", module)]
    seen = {id(module)}
    while todo:
        path, at = todo.pop()
        yield path, at
        for name, child in at._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                todo.append((f"{path}.{name}" if path else name, child))


# Replaced, never changed: a call goes through those that watched when it began.
_watching: tuple[Scopes, ...] = ()
_lock = threading.Lock()


class _Door:
    """Stands for `Module.__call__`: an instance that is called gets ours, everybody else the original."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def __get__(self, module: Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self.original
        try:
            if any(scopes.knows(module) for scopes in _watching) and not _by_name(
                sys._getframe(1)
            ):
                return MethodType(_called, (self.original, module))
        except Exception as error:  # it would end the user's forward pass
            for scopes in _watching:
                scopes.failure = error
        return MethodType(self.original, module)


def _by_name(caller: FrameType) -> bool:
    """Whether this frame names the method: it may keep it, or compile it, as `torch.compile` does."""
    code = caller.f_code
    named = "__call__" in code.co_names or "__call__" in code.co_consts
    return named or caller.f_globals.get("__name__", "").startswith("torch._dynamo")


def _called(door: tuple[Any, Module], /, *args: Any, **kwargs: Any) -> Any:
    original, module = door
    inside: list[Scopes] = []
    try:
        inside += (scopes for scopes in _watching if scopes.enter(module))
    except Exception as error:
        for scopes in _watching:
            scopes.failure = error
    try:
        return original(module, *args, **kwargs)
    finally:
        try:
            for scopes in reversed(inside):
                scopes.leave()
        except Exception as error:
            for scopes in _watching:
                scopes.failure = error


def _watch(scopes: Scopes) -> None:
    global _watching  # noqa: PLW0603 - there is one Module.__call__ in a process
    with _lock:
        _watching = (*_watching, scopes)
        if not isinstance(vars(Module)["__call__"], _Door):
            Module.__call__ = _Door(vars(Module)["__call__"])  # type: ignore[method-assign, assignment]


def _unwatch(scopes: Scopes) -> None:
    global _watching  # noqa: PLW0603 - as above
    with _lock:
        _watching = tuple(other for other in _watching if other is not scopes)
        door = vars(Module)["__call__"]
        if not _watching and isinstance(door, _Door):
            Module.__call__ = door.original  # type: ignore[method-assign]
