"""The recorded leaves: our hook where it is needed, and what each `.grad` was when we last looked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from math import prod
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle

from accumviz.ledger.events import PRESENT, Parameter
from accumviz.recorder import targets
from accumviz.recorder.distributed import local
from accumviz.recorder.rows import Row
from accumviz.recorder.targets import Named
from accumviz.recorder.transfer import PLAIN, Wire, norm, norms, readable, unseen

# In all, so many elements of small tensors are kept one by one: a teaching example, not a ResNet's biases.
_EXACT_TOTAL = 1024
# Bytes of gradients that are still in a processor's cache when the next one arrives. Read there, a gradient
# costs a fraction of what it costs from memory, and what was held for it is free for the next.
HOT = 512 << 10

_STRIDED, _TENSOR = torch.strided, torch.Tensor
_hooks = attrgetter("_backward_hooks")
Hook = Callable[[torch.Tensor | None], None]


class Leaves:
    """Parameters by index: hooked, watched for changes of `.grad`, and reduced to numbers.

    A leaf without a `.grad` needs no hook: what backward adds is what is there afterwards. So a
    leaf gets ours only once it goes into a backward with a `.grad`, when a hook of the user's
    may change or free that `.grad` before we see it, or when all gradients together are too large
    to be read from the cache afterwards.

    `small` are the leaves whose elements are kept one by one; `present` holds the PRESENT bit of
    each, one byte a leaf. What runs once per event is written for speed: a step of a small model
    takes a fifth of a millisecond.
    """

    hook_of: Callable[[int], Hook]  # makes our hook for a leaf
    # Makes the one that is called once `.grad` is written, before those of the user's.
    written_of: Callable[[int], Hook] | None = None
    # Makes the two that are called before and after those of the user's which may change a contribution.
    around_of: Callable[[int], tuple[Hook, Hook]] | None = None

    def __init__(self, named: Named, exact: int) -> None:
        self.named, self.tensors, self.wire = named, named.tensors, Wire()
        count = len(self.tensors)
        self._all = range(count)
        self.present = bytearray(count)
        # Replaced, never changed: a backward keeps what it began with.
        self.unhooked = dict.fromkeys(range(count))
        self._lock = threading.RLock()
        self._index = named.index
        # As they are when the recording opens: what a leaf of another size holds is not known one by one.
        self._shapes = [tuple(local(tensor).shape) for tensor in self.tensors]
        self.sizes = [prod(shape) for shape in self._shapes]
        bytes_ = sum(
            n * tensor.element_size()
            for n, tensor in zip(self.sizes, self.tensors, strict=True)
        )
        too_large = bytes_ > HOT and all(
            tensor.device.type == "cpu" for tensor in self.tensors
        )
        self._handles: dict[int, Any] = {}
        self._hooks: list[int | None] = [None] * count
        self._written: dict[int, Any] = {}
        self._around: dict[int, list[Any]] = {}
        # When it was last made sure that ours are the last hooks: the next handle's number, and each leaf's hooks.
        self._made, self._lengths = -1, list[int]()
        self._bare = -1  # the next handle's number when no leaf had any hook
        # Of each leaf, its number, itself, and the `.grad` that it had when we last looked, in which version.
        self._seen: list[tuple[int, torch.Tensor, ref[torch.Tensor] | None, int]]
        self._seen = [(i, tensor, None, 0) for i, tensor in enumerate(self.tensors)]
        self.small: dict[int, None] = {}
        # Those of whom it is known that some of their tensors are recorded, by id.
        self._owners: dict[int, ref[Any]] = {}
        # What was last said of each as data, and of what.
        self._parameters: dict[int, tuple[Any, Parameter]] = {}
        # Those that need our hook whether or not they have a `.grad`.
        self.always: set[int] = set(range(count)) if too_large else set()
        total = 0
        for i, tensor in enumerate(self.tensors):
            size = self.sizes[i]
            fits = size <= exact and total + size <= max(_EXACT_TOTAL, exact)
            if fits and tensor.is_floating_point() and tensor.layout is _STRIDED:
                total += size
                self.small[i] = None

    def __len__(self) -> int:
        return len(self._all)

    def hook(self) -> None:
        """Put our hook on every leaf, last."""
        self._hook(self._all)

    def _hook(self, indices: Iterable[int]) -> None:
        """Put our hook on these leaves, behind the users'."""
        with self._lock:
            unhooked = dict(self.unhooked)
            for i in indices:
                tensor = self.tensors[i]
                if tensor._post_accumulate_grad_hooks and i not in self._written:
                    self._precede(i, tensor)
                there = tensor._backward_hooks
                if there and next(reversed(there)) == self._hooks[i]:
                    continue
                if i in self._handles:
                    self._handles.pop(i).remove()
                if there:
                    self._surround(i, tensor)
                self._hooks[i] = None
                unhooked[i] = None
                if tensor.requires_grad:
                    handle = tensor.register_hook(self.hook_of(i))  # type: ignore[no-untyped-call]
                    self._handles[i], self._hooks[i] = handle, handle.id
                    del unhooked[i]
            self.unhooked = unhooked

    def _precede(self, i: int, tensor: torch.Tensor) -> None:
        """Have ours called before the hooks of the user's that may change this `.grad`, if there are any."""
        hooks: Any = tensor._post_accumulate_grad_hooks
        if self.written_of is not None and self._followed(tensor) and _users(hooks):
            handle = tensor.register_post_accumulate_grad_hook(self.written_of(i))  # type: ignore[no-untyped-call]
            self._written[i] = handle
            _first(hooks, handle.id)

    def _surround(self, i: int, tensor: torch.Tensor) -> None:
        """Have ours called before and after the hooks of the user's that may change what comes, if there are any."""
        hooks: Any = tensor._backward_hooks
        for handle in self._around.pop(i, ()):
            handle.remove()
        if self.around_of is not None and self._followed(tensor) and _users(hooks):
            self._around[i] = [tensor.register_hook(hook) for hook in self.around_of(i)]  # type: ignore[no-untyped-call]
            _first(hooks, self._around[i][0].id)

    def _followed(self, tensor: torch.Tensor) -> bool:
        """Whether it is known when hooks of this tensor are called: FSDP has ways of its own."""
        return not self.named.shards and type(tensor) in PLAIN and tensor.requires_grad

    def close(self) -> None:
        """Take our hooks away."""
        around = [handle for handles in self._around.values() for handle in handles]
        for handle in [*self._handles.values(), *self._written.values(), *around]:
            handle.remove()
        self._handles.clear()
        self._written.clear()
        self._around.clear()

    def forget(self) -> None:
        """Let go of every tensor."""
        self.tensors.clear()
        self._seen.clear()
        self._all = range(0)
        self._index.clear()
        self._owners.clear()
        self.named.forget()

    def freed_by_user(self, i: int) -> bool:
        """Whether a hook of the user's runs between autograd's writing this `.grad` and our reading it."""
        return bool(self.tensors[i]._post_accumulate_grad_hooks)

    def update(
        self,
        only: Iterable[int] | None = None,
        *,
        into: list[tuple[int, torch.Tensor]] | None = None,
    ) -> list[int]:
        """The leaves (or `only` these) whose `.grad` is not the tensor, or the version of it, that it was.

        `into` is given the `.grad` of each that has one: asked for a second time, it costs as much again.
        """
        found = []
        seen, present = self._seen, self.present
        for i, tensor, known, version in (
            seen if only is None else [seen[i] for i in only]
        ):
            grad = tensor.grad
            if grad is None:
                if known is None:
                    continue
                seen[i], present[i] = (i, tensor, None, 0), 0
            elif type(grad) is _TENSOR:
                count = grad._version
                if known is not None and count == version and known() is grad:
                    continue
                seen[i], present[i] = (i, tensor, ref(grad), count), PRESENT
            else:
                inner = local(grad)
                count = _version(grad, inner)
                if known is not None and known() is inner and count == version:
                    continue
                seen[i], present[i] = (i, tensor, ref(inner), count), PRESENT
            found.append(i)
            if into is not None and grad is not None:
                into.append((i, grad))
        return found

    def prepare(self, only: Iterable[int] | None = None) -> None:
        """See to it that our hook is where a backward needs it, behind the hooks that users added meanwhile."""
        present, hooks, always = self.present, self._hooks, self.always
        # Handles are numbered: where ours were the last, none was made since and none is gone, ours still are.
        made = RemovableHandle.next_id
        if only is None and not self._handles and not always and PRESENT not in present:
            if made == self._bare:
                return
            for tensor in self.tensors:
                if tensor._post_accumulate_grad_hooks or tensor._backward_hooks:
                    break
            else:
                self._bare = made
                return
        if (
            only is None
            and made == self._made
            and len(self._handles) == len(self.tensors)
        ):
            there = list(map(_hooks, self.tensors))
            if all(there) and list(map(len, there)) == self._lengths:
                return
        bare: list[int] = []
        for i in self._all if only is None else only:
            tensor = self.tensors[i]
            after = tensor._post_accumulate_grad_hooks
            mine = tensor._backward_hooks
            needed = present[i] or hooks[i] is not None or i in always or after or mine
            if needed and (
                not mine
                or next(reversed(mine)) != hooks[i]
                or (after and i not in self._written)
            ):
                bare.append(i)
        if bare:
            self._hook(bare)
        if only is None and len(self._handles) == len(self.tensors):
            self._made = made
            self._lengths = [len(there or ()) for there in map(_hooks, self.tensors)]

    def note(self, indices: Iterable[int]) -> None:
        """Take the `.grad` of these leaves as seen."""
        self.saw((i, self.tensors[i].grad) for i in indices)

    def saw(self, found: Iterable[tuple[int, torch.Tensor | None]]) -> None:
        """Take these leaves' `.grad`, which was asked for just now, as seen."""
        seen, present, tensors = self._seen, self.present, self.tensors
        for i, grad in found:
            if grad is None:
                seen[i], present[i] = (i, tensors[i], None, 0), 0
            elif type(grad) is _TENSOR:
                seen[i], present[i] = (i, tensors[i], ref(grad), grad._version), PRESENT
            else:
                inner = local(grad)
                seen[i], present[i] = (
                    (i, tensors[i], ref(inner), _version(grad, inner)),
                    PRESENT,
                )

    def let_go(self, tensors: Iterable[Any]) -> list[int]:
        """Hold no weak reference to these; returns the leaves whose `.grad` they are."""
        ids = {id(tensor) for tensor in tensors}
        found = [
            i
            for i, _, known, _ in self._seen
            if known is not None and id(known()) in ids
        ]
        for i in found:
            self._seen[i] = (i, self.tensors[i], None, 0)
        return found

    def devices(self) -> set[torch.device]:
        """Where the leaves are now."""
        return {tensor.device for tensor in self.tensors}

    def owns(self, owner: Any) -> bool:
        """Whether any of an optimizer's, a module's or a list's tensors is recorded."""
        known = self._owners.get(id(owner))
        if known is not None and known() is owner:
            return True
        index = self._index
        found = any(id(tensor) in index for tensor in _tensors(owner))
        if found and not isinstance(owner, list | tuple):
            with contextlib.suppress(TypeError):  # with slots
                self._owners[id(owner)] = ref(owner)
        return found

    def know(self, tensor: torch.Tensor, i: int) -> None:
        """Take this tensor for that leaf: a module whose weights FSDP has put together has it as a parameter."""
        self._index.setdefault(id(tensor), i)

    def owned(self, owner: Any) -> list[int]:
        """The recorded leaves among an optimizer's, a module's or a list's tensors."""
        index = self._index
        return [index[id(tensor)] for tensor in _tensors(owner) if id(tensor) in index]

    def sharded(self, owner: Any) -> list[int]:
        """Those of an owner's leaves whose `.grad` is a part of one: what changes many at once counts no version."""
        tensors = self.tensors
        found = [
            (i, grad)
            for i in self.owned(owner)
            if (grad := tensors[i].grad) is not None
        ]
        return [
            i
            for i, grad in found
            if type(grad) is not _TENSOR and local(grad) is not grad
        ]

    def read(self, row: Row, indices: Iterable[int], what: str = "grad") -> None:
        """Give a row the `.grad` of these leaves: elements of small tensors, norms of large ones."""
        if PRESENT not in self.present:
            return
        found = [
            (i, grad) for i in indices if (grad := self.tensors[i].grad) is not None
        ]
        self.reduce(row, what, found)

    def reduce(
        self, row: Row, what: str, found: Iterable[tuple[int, torch.Tensor]]
    ) -> None:
        """Give a row these tensors, likewise; no mode of the user's sees it."""
        with unseen():
            self._reduce(row, what, found)

    def _reduce(
        self, row: Row, what: str, found: Iterable[tuple[int, torch.Tensor]]
    ) -> None:
        small = self.small
        on_host: list[int] = []
        numbers: list[float] = []
        on_device: list[int] = []
        tensors: list[torch.Tensor] = []
        for i, given in found:
            tensor = given if type(given) is _TENSOR else local(given)
            if not readable(tensor):
                # That something is there is known, not how much.
                self.leave_unread(row, [i], what)
            elif i in small:
                row.take((f"exact {what}", i), tensor)
            elif tensor.is_cpu:
                on_host.append(i)
                numbers.append(norm(tensor))
            else:
                on_device.append(i)
                tensors.append(tensor)
        if on_host:
            row.give((what, on_host), numbers)
        for leaves, reduced in norms(on_device, tensors) if tensors else ():
            row.take_all((what, leaves), reduced)
        if row.late:
            row.send(self.wire)

    def stands(self, row: Row, only: int | None = None) -> bool:
        """Whether a `.grad` is still what this row says of it; what is done through `.data` counts no version.

        Asked of the last of its leaves on the CPU, or of this one; True where there is none.
        """
        end, fresh = len(row.numbers), len(row.alike) == len(row.contributed) > 0
        for (what, where), many in reversed(row.targets):
            start, end = end - many, end - many
            leaves = [where] if isinstance(where, int) else where
            i = leaves[-1] if only is None else only
            if i not in leaves:
                continue
            if not (what.endswith("grad") or (fresh and what.endswith("contribution"))):
                continue
            grad = self.tensors[i].grad
            if (
                type(grad) is not _TENSOR
                or not grad.is_cpu
                or grad.layout is not _STRIDED
                or not readable(grad)
            ):
                continue
            known = row.numbers[start : start + many]
            if i in self.small:
                found = grad.tolist() if grad.dim() == 1 else grad.reshape(-1).tolist()
            else:
                found = [norm(grad)]
                known = [known[leaves.index(i)]]
            return found == known or any(number != number for number in found)  # noqa: PLR0124 - what is no number
        return True

    def weigh(self, row: Row) -> None:
        """Give a row the weights of the small leaves, those of FSDP as shards only."""
        with unseen():
            for i in self.small:
                tensor = self.tensors[i]
                inner = tensor if type(tensor) in PLAIN else local(tensor)
                if readable(inner) and inner.numel() == self.sizes[i]:
                    row.take(("exact weight", i), inner.detach())

    def leave_unread(
        self, row: Row, indices: Iterable[int], what: str = "grad"
    ) -> None:
        """Give a row for these leaves that the number is not known."""
        for i in indices:
            target = (f"exact {what}", i) if i in self.small else (what, [i])
            row.give(target, [float("nan")] * (self.sizes[i] if i in self.small else 1))

    def parameters(self, owned: list[list[int]]) -> list[Parameter]:
        """The leaves as data, as they are now; `owned` are those of each optimizer."""
        owners: dict[int, list[int]] = {}
        for index, found in enumerate(owned):
            for i in dict.fromkeys(found):
                owners.setdefault(i, []).append(index)
        for whole, shard in self.named.shards.wholes.items():
            owners[whole] = owners.get(shard, [])
        return [
            self._parameter(i, tensor, tuple(owners.get(i, ())))
            for i, tensor in enumerate(self.tensors)
        ]

    def _parameter(
        self, i: int, tensor: torch.Tensor, optimizers: tuple[int, ...]
    ) -> Parameter:
        """One of them: a file asks for all at each chunk, and they seldom change."""
        named, inner = self.named, tensor if type(tensor) in PLAIN else local(tensor)
        aliases, requires_grad = named.aliases[i], tensor.requires_grad
        key = (
            inner.shape,
            tensor.dtype,
            tensor.device,
            requires_grad,
            optimizers,
            len(aliases),
        )
        known = self._parameters.get(i)
        if known is None or known[0] != key:
            found = Parameter(
                name=named.names[i],
                shape=self._shapes[i] if i in self.small else tuple(inner.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                group=named.groups[i],
                aliases=tuple(aliases),
                optimizers=optimizers,
                requires_grad=requires_grad or i in named.shards.wholes,
                unsharded_of=named.names[named.shards.wholes[i]]
                if i in named.shards.wholes
                else "",
            )
            known = self._parameters[i] = key, found
        return known[1]


def _users(hooks: Any) -> bool:
    """Whether any of these hooks is not one of ours."""
    return not all(
        (getattr(hook, "__module__", None) or "").startswith(__package__)
        for hook in hooks.values()
    )


def _first(hooks: Any, number: int) -> None:
    """Have this hook called first: the order is that in which the dict was filled, not that of an OrderedDict."""
    there = dict(hooks)
    try:
        hooks.clear()
        hooks[number] = there[number]
    finally:
        hooks.update(there)


def _version(grad: torch.Tensor, inner: torch.Tensor) -> int:
    """How often a `.grad` was changed in place; what is done to a part of one counts on the outside only."""
    counted: int = inner._version
    return counted if grad is inner else counted + grad._version


def _tensors(owner: Any) -> Iterable[Any]:
    if isinstance(owner, torch.nn.Module):
        return owner.parameters()
    return targets.parameters(owner) if targets.is_optimizer(owner) else owner
