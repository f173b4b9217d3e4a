"""The recorded leaves: our hook where it is needed, and what each `.grad` was when we last looked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

from accumviz.instruments.naming import Named
from accumviz.instruments.numbers import Wire, norms
from accumviz.instruments.rows import Row
from accumviz.instruments.sharded import local
from accumviz.ledger import PRESENT, Parameter

# In all, so many elements of small tensors are kept one by one: a teaching example, not a ResNet's biases.
_EXACT_TOTAL = 1024

_FLOAT, _STRIDED, _TENSOR = torch.float32, torch.strided, torch.Tensor
Hook = Callable[[torch.Tensor | None], None]


class Leaves:
    """Parameters by index: hooked, watched for changes of `.grad`, and reduced to numbers.

    A leaf without a `.grad` needs no hook: what backward adds is what is there afterwards. So a
    leaf gets ours only once it goes into a backward with a `.grad`, or when a hook of the user's
    may change or free that `.grad` before we see it.

    `small` are the leaves whose elements are kept one by one; `present` holds the PRESENT bit of
    each, one byte a leaf. What runs once per event is written for speed: a step of a small model
    takes half a millisecond.
    """

    hook_of: Callable[[int], Hook]  # makes our hook for a leaf

    def __init__(self, named: Named, exact: int) -> None:
        self.named, self.tensors, self.wire = named, named.tensors, Wire()
        count = len(self.tensors)
        self._all = range(count)
        self.present = bytearray(count)
        self.unhooked = dict.fromkeys(range(count))
        self._index = named.index
        self.sizes = [local(tensor).numel() for tensor in self.tensors]
        self._handles: dict[int, Any] = {}
        self._hooks: list[int | None] = [None] * count
        self._grads: list[ref[torch.Tensor] | None] = [None] * count
        self._versions = [0] * count
        self.small: dict[int, None] = {}
        total = 0
        for i, tensor in enumerate(self.tensors):
            size = self.sizes[i]
            fits = size <= exact and total + size <= max(_EXACT_TOTAL, exact)
            if fits and tensor.is_floating_point():
                total += size
                self.small[i] = None
        self.update()

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._index

    def hook(self) -> None:
        """Put our hook on every leaf, last."""
        for i, tensor in enumerate(self.tensors):
            there = tensor._backward_hooks
            if not there or next(reversed(there)) != self._hooks[i]:
                self._hook(i, tensor)

    def _hook(self, i: int, tensor: torch.Tensor) -> None:
        if i in self._handles:
            self._handles.pop(i).remove()
        self._hooks[i] = None
        self.unhooked[i] = None
        if tensor.requires_grad:
            handle = tensor.register_hook(self.hook_of(i))  # type: ignore[no-untyped-call]
            self._handles[i], self._hooks[i] = handle, handle.id
            del self.unhooked[i]

    def unhook(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def freed_by_user(self, i: int) -> bool:
        """Whether a hook of the user's runs between autograd's writing this `.grad` and our reading it."""
        return bool(self.tensors[i]._post_accumulate_grad_hooks)

    def update(self, only: Iterable[int] | None = None, *, hook: bool = False) -> list[int]:
        """The leaves (or `only` these) whose `.grad` is not the tensor, or the version of it, that it was.

        With `hook`, also see to it that ours is where a backward needs it, behind the hooks that
        users added meanwhile.
        """
        found = []
        tensors, grads, versions = self.tensors, self._grads, self._versions
        present, hooks = self.present, self._hooks
        for i in self._all if only is None else only:
            tensor = tensors[i]
            grad, known = tensor.grad, grads[i]
            if type(grad) is not _TENSOR and grad is not None:
                grad = local(grad)
            if grad is None:
                if known is not None:
                    grads[i], present[i] = None, 0
                    found.append(i)
                if not hook or (hooks[i] is None and not tensor._post_accumulate_grad_hooks):
                    continue
            elif known is None or known() is not grad or grad._version != versions[i]:
                grads[i], versions[i], present[i] = ref(grad), grad._version, PRESENT
                found.append(i)
            if hook:
                there = tensor._backward_hooks
                if not there or next(reversed(there)) != hooks[i]:
                    self._hook(i, tensor)
        return found

    def note(self, indices: Iterable[int]) -> None:
        """Take the `.grad` of these leaves as seen."""
        for i in indices:
            grad = self.tensors[i].grad
            if grad is None:
                self._grads[i], self.present[i] = None, 0
            else:
                grad = local(grad)
                self._grads[i], self._versions[i], self.present[i] = ref(grad), grad._version, PRESENT

    def devices(self) -> set[torch.device]:
        """Where the leaves are now."""
        return {tensor.device for tensor in self.tensors}

    def owns(self, owner: Any) -> bool:
        """Whether any of an optimizer's, a module's or a list's tensors is recorded."""
        index = self._index
        if isinstance(owner, torch.optim.Optimizer):
            for group in owner.param_groups:
                for tensor in group["params"]:
                    if id(tensor) in index:
                        return True
            return False
        tensors = owner.parameters() if isinstance(owner, torch.nn.Module) else owner
        return any(id(tensor) in index for tensor in tensors)

    def owned(self, owner: Any) -> list[int]:
        """The recorded leaves among an optimizer's, a module's or a list's tensors."""
        index = self._index
        if isinstance(owner, torch.optim.Optimizer):
            return [index[id(p)] for group in owner.param_groups for p in group["params"] if id(p) in index]
        tensors = owner.parameters() if isinstance(owner, torch.nn.Module) else owner
        return [index[id(tensor)] for tensor in tensors if id(tensor) in index]

    def read(self, row: Row, indices: Iterable[int], what: str = "grad") -> None:
        """Give a row the `.grad` of these leaves: elements of small tensors, norms of large ones."""
        tensors = self.tensors
        self.reduce(row, what, [(i, grad) for i in indices if (grad := tensors[i].grad) is not None])

    def reduce(self, row: Row, what: str, found: list[tuple[int, torch.Tensor]]) -> None:
        """Give a row these tensors, likewise."""
        small = self.small
        indices, tensors = [], []
        # One call for all where it can be: CPU, single precision, dense.
        alike = True
        for i, given in found:
            tensor = given if type(given) is _TENSOR else local(given)
            if i in small:
                row.take((f"exact {what}", i), tensor)
                continue
            indices.append(i)
            tensors.append(tensor)
            alike = alike and tensor.dtype is _FLOAT and tensor.is_cpu and tensor.layout is _STRIDED
        if tensors and alike:
            row.values.append(((what, indices), [norm.item() for norm in torch._foreach_norm(tensors, 2.0)]))
        elif tensors:
            for leaves, reduced in norms(indices, tensors):
                row.take_all((what, leaves), reduced)
        row.send(self.wire)

    def leave_unread(self, row: Row, indices: Iterable[int]) -> None:
        """Give a row for these leaves that their `.grad` is not known."""
        for i in indices:
            target = ("exact grad", i) if i in self.small else ("grad", [i])
            row.values.append((target, [float("nan")] * (self.sizes[i] if i in self.small else 1)))

    def parameters(self, optimizers: list[torch.optim.Optimizer]) -> list[Parameter]:
        """The leaves as data, as they are now."""
        owners: dict[int, list[int]] = {}
        for index, optimizer in enumerate(optimizers):
            for i in dict.fromkeys(self.owned(optimizer)):
                owners.setdefault(i, []).append(index)
        named = self.named
        for whole, shard in named.shards.wholes.items():
            owners[whole] = owners.get(shard, [])
        return [
            Parameter(
                name=named.names[i],
                shape=tuple(local(tensor).shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                group=named.groups[i],
                aliases=tuple(named.aliases[i]),
                optimizers=tuple(owners.get(i, ())),
                requires_grad=tensor.requires_grad or i in named.shards.wholes,
                unsharded_of=named.names[named.shards.wholes[i]] if i in named.shards.wholes else "",
            )
            for i, tensor in enumerate(self.tensors)
        ]
