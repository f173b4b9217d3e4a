"""Find which module ran which operations, without a hook on any module.

A hook would be copied and pickled with its module, refused by `torch.jit.script`, traced by
`torch.compile`, and would turn off the fast paths of attention. So `torch.nn.Module.__call__` is
replaced while scopes are open; the compiler, and code that names the method, gets the original.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from types import FrameType, MethodType
from typing import Any

import torch
from torch.nn import Module

from accumviz.recorder import patches

_NOWHERE = ("", "")
MARKS = 200_000  # the oldest are forgotten: a forward pass may never meet a backward
sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Scopes:
    """Which module ran which operations of one thread, by autograd's sequence numbers."""

    def __init__(self, modules: dict[str, Module] | None = None) -> None:
        self.modules = dict(modules or {})
        # Autograd numbers operations in each thread anew.
        self._thread = threading.get_ident()
        self._starts: list[int] = []
        self._marks: list[tuple[str, str]] = []
        self._inside = [_NOWHERE]
        # The modules are kept, so that no other one gets the id of one that is gone.
        self._places: dict[int, tuple[Module, tuple[str, str]]] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def at(self, number: int) -> tuple[str, str]:
        """Return (root name, path) of the module that made the operation with this sequence number."""
        i = bisect_right(self._starts, number) - 1
        here = threading.get_ident() == self._thread
        return self._marks[i] if here and i >= 0 else _NOWHERE

    def clear(self) -> None:
        """Forget what was noted."""
        self._starts.clear()
        self._marks.clear()

    def open(self) -> None:
        """Note calls from now on."""
        self._thread = threading.get_ident()
        for root, module in self.modules.items():
            for path, inner in submodules(module):
                self._places[id(inner)] = inner, (root, path)
        _replace_call((*_open, self))

    def close(self) -> None:
        """Note no more calls."""
        _replace_call(tuple(scopes for scopes in _open if scopes is not self))
        self._places = {}

    def enter(self, module: Module) -> bool:
        """Note that this module is called; False if there is nothing to note."""
        if id(module) not in self._places or threading.get_ident() != self._thread:
            return False
        _, place = self._places[id(module)]
        self._inside.append(place)
        self._mark()
        return True

    def leave(self) -> None:
        """Note that it has returned."""
        self._inside.pop()
        self._mark()

    def _mark(self) -> None:
        self._starts.append(sequence())
        self._marks.append(self._inside[-1])
        if len(self._starts) > MARKS:
            del self._starts[: MARKS // 2], self._marks[: MARKS // 2]


def submodules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yield this module and those inside it, each once, under their paths."""
    todo = [("", module)]
    seen = {id(module)}
    while todo:
        path, at = todo.pop()
        yield path, at
        for name, child in at._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                todo.append((f"{path}.{name}" if path else name, child))


# Replaced, never changed: a call goes through those that were open when it began.
_open: tuple[Scopes, ...] = ()
_lock = threading.Lock()


class _Call:
    """A stand-in for `Module.__call__`: a module that is called gets ours, code that names it the original."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def __get__(
        self,
        module: Module | None,
        owner: type | None = None,
    ) -> Any:
        if module is None:
            return self.original
        try:
            if _open and not _names_the_method(sys._getframe(1)):
                return MethodType(_called, (self.original, module))
        except Exception as failure:
            patches.failures.append(failure)
        return MethodType(self.original, module)


def _names_the_method(caller: FrameType) -> bool:
    """Tell whether a frame names `__call__`: it may keep it, or compile it, as `torch.compile` does."""
    code = caller.f_code
    named = "__call__" in code.co_names or "__call__" in code.co_consts
    return named or caller.f_globals.get("__name__", "").startswith("torch._dynamo")


def _called(call: tuple[Any, Module], /, *args: Any, **kwargs: Any) -> Any:
    original, module = call
    entered: list[Scopes] = []
    try:
        entered += (scopes for scopes in _open if scopes.enter(module))
    except Exception as failure:
        patches.failures.append(failure)
    try:
        return original(module, *args, **kwargs)
    finally:
        try:
            for scopes in reversed(entered):
                scopes.leave()
        except Exception as failure:
            patches.failures.append(failure)


def _replace_call(scopes: tuple[Scopes, ...]) -> None:
    """Keep `Module.__call__` replaced as long as scopes are open."""
    global _open  # noqa: PLW0603 - there is one Module.__call__ in a process
    with _lock:
        _open = scopes
        call = vars(Module)["__call__"]
        if scopes and not isinstance(call, _Call):
            Module.__call__ = _Call(call)  # type: ignore[method-assign, assignment]
        elif not scopes and isinstance(call, _Call):
            Module.__call__ = call.original  # type: ignore[method-assign]
