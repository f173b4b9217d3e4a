"""A plain recorder, to compare with: tensor hooks, norms in bulk, versions for edits, call sites cached."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# So many bytes of gradients are held before their norms are taken.
_BULK = 4 << 20


class Plain:
    """The norms of what each backward adds and of what `.grad` becomes, and where it was called."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.rows: list[tuple[str, str, list[float], list[float], list[int]]] = []
        self.held: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.bytes = 0
        self.versions: list[tuple[int, int]] = [(0, 0)] * len(self.parameters)
        self.places: dict[tuple[Any, int], str] = {}

    def comes(self, grad: torch.Tensor) -> None:
        self.held.append(grad.detach())
        self.bytes += grad.nbytes
        if self.bytes > _BULK:
            self.reduce()

    def reduce(self) -> None:
        if self.held:
            self.norms += torch._foreach_norm(self.held)
        self.held, self.bytes = [], 0

    def changed(self) -> list[int]:
        changed = []
        for i, parameter in enumerate(self.parameters):
            grad = parameter.grad
            version = (0, 0) if grad is None else (id(grad), grad._version)
            if version != self.versions[i]:
                self.versions[i] = version
                changed.append(i)
        return changed

    def place(self) -> str:
        frame: Any = sys._getframe(2)
        while frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        key = frame.f_code, frame.f_lasti
        if key not in self.places:
            self.places[key] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self.places[key]

    def note(self, kind: str) -> None:
        self.reduce()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        now = torch._foreach_norm(grads) if grads else []
        came, self.norms = [norm.item() for norm in self.norms], []
        self.rows.append((kind, self.place(), came, [norm.item() for norm in now], self.changed()))


@contextmanager
def recording(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Plain]:
    """Record each backward and each step in the block."""
    plain, backward = Plain(model), torch.autograd.backward

    def wrapped(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        plain.note("backward")

    handles: list[Any] = [p.register_hook(plain.comes) for p in plain.parameters]  # type: ignore[no-untyped-call]
    handles.append(optimizer.register_step_post_hook(lambda *_: plain.note("step")))
    torch.autograd.backward = wrapped
    try:
        yield plain
    finally:
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()
