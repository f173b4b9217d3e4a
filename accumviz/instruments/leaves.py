"""The recorded leaves: our hook on each, and what its `.grad` was when we last looked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

from accumviz.instruments.naming import Named
from accumviz.instruments.numbers import norms
from accumviz.instruments.rows import Target
from accumviz.ledger import PRESENT, Parameter

# In all, so many elements of small tensors are kept one by one: a teaching example, not a ResNet's biases.
_EXACT_TOTAL = 1024


Hook = Callable[[torch.Tensor | None], None]


class Leaves:
    """Parameters by index: hooked, watched for changes of `.grad`, and reduced to numbers.

    `small` are those whose elements are kept one by one; `present` holds the PRESENT bit of
    each, one byte a leaf. What runs once per event is written for speed: a step of a small
    model takes half a millisecond.
    """

    def __init__(self, named: Named, exact: int, hook_of: Callable[[int], Hook]) -> None:
        self.named, self.tensors = named, named.tensors
        self.present = bytearray(len(self.tensors))
        self._hook_of = hook_of
        self._index = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        self._handles: dict[int, Any] = {}
        self._hooks = [0] * len(self.tensors)
        self._grads: list[ref[torch.Tensor] | None] = [None] * len(self.tensors)
        self._versions = [0] * len(self.tensors)
        self.small: dict[int, None] = {}
        total = 0
        for i, tensor in enumerate(self.tensors):
            fits = tensor.numel() <= exact and total + tensor.numel() <= max(_EXACT_TOTAL, exact)
            if fits and tensor.is_floating_point():
                total += tensor.numel()
                self.small[i] = None
        self.note(self.changed())

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._index

    def hook(self) -> None:
        """Put our hook on every leaf that requires grad, behind the hooks that users add to it."""
        for i, tensor in enumerate(self.tensors):
            hooks = tensor._backward_hooks
            if hooks is not None and len(hooks) == self._hooks[i]:
                continue
            if i in self._handles:
                self._handles.pop(i).remove()
            if tensor.requires_grad:
                self._handles[i] = tensor.register_hook(self._hook_of(i))  # type: ignore[no-untyped-call]
                self._hooks[i] = len(tensor._backward_hooks or ())

    def unhook(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def changed(self) -> list[int]:
        """The leaves whose `.grad` is another tensor, or another version of it, than when last noted."""
        found = []
        grads, versions = self._grads, self._versions
        for i, tensor in enumerate(self.tensors):
            grad, known = tensor.grad, grads[i]
            if grad is None:
                if known is not None:
                    found.append(i)
            elif known is None or known() is not grad or grad._version != versions[i]:
                found.append(i)
        return found

    def note(self, indices: Iterable[int]) -> None:
        """Take the `.grad` of these leaves as seen."""
        for i in indices:
            grad = self.tensors[i].grad
            if grad is None:
                self._grads[i], self.present[i] = None, 0
            else:
                self._grads[i], self._versions[i], self.present[i] = ref(grad), grad._version, PRESENT

    def owned(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """The recorded leaves among an optimizer's parameters."""
        index = self._index
        return [index[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in index]

    def read(self, indices: list[int]) -> tuple[list[Target], list[torch.Tensor]]:
        """The `.grad` of these leaves, reduced."""
        there = [(i, grad.detach()) for i in indices if (grad := self.tensors[i].grad) is not None]
        return self.reduce("grad", there)

    def reduce(self, what: str, found: list[tuple[int, torch.Tensor]]) -> tuple[list[Target], list[torch.Tensor]]:
        """The elements of small tensors and the norms of large ones, each with where it goes in a row."""
        targets: list[Target] = []
        pieces: list[torch.Tensor] = []
        small = self.small
        large = [(i, tensor) for i, tensor in found if i not in small] if small else found
        if large:
            for positions, reduced in norms([tensor for _, tensor in large]):
                targets.append((what, [large[k][0] for k in positions]))
                pieces.append(reduced)
        if len(large) < len(found):
            for i, tensor in found:
                if i in small:
                    targets.append((f"exact {what}", i))
                    # Copied now: it may be the `.grad` that the next event changes in place.
                    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
                    pieces.append(dense.reshape(-1).clone())
        return targets, pieces

    def parameters(self, optimizers: list[torch.optim.Optimizer]) -> list[Parameter]:
        """The leaves as data, as they are now."""
        owners: dict[int, list[int]] = {}
        for index, optimizer in enumerate(optimizers):
            for i in dict.fromkeys(self.owned(optimizer)):
                owners.setdefault(i, []).append(index)
        named = self.named
        return [
            Parameter(
                name=named.names[i], shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device), group=named.groups[i], aliases=tuple(named.aliases[i]),
                optimizers=tuple(owners.get(i, ())), requires_grad=tensor.requires_grad,
            )
            for i, tensor in enumerate(self.tensors)
        ]
