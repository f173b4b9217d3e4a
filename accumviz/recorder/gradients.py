"""Read what each backward adds to the recorded leaves, by hooks that never wait for a device.

Autograd may hand a leaf without a `.grad` the very tensor that comes, so nothing of it is held: the leaf has
`ARRIVED`, and its `.grad` is read after the backward. To any other leaf autograd adds: what comes is `HELD` until it
is read in bulk.

On the CPU hooks run on the thread that called backward; on a device on the engine's thread for it, under the stream
of the operation that made the gradient. A recording follows the thread of its first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from math import prod
from threading import get_ident
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from accumviz.ledger.events import PRESENT, Parameter
from accumviz.recorder import patches, targets
from accumviz.recorder.columns import Backward, Leaves, Row
from accumviz.recorder.targets import Named
from accumviz.recorder.transfer import (
    device_norms,
    host_norms,
    keep_for_stream,
    local,
    readable,
    unseen,
)

# In all, so many elements of small tensors are kept one by one: a teaching example, not a ResNet's biases.
_EXACT_TOTAL = 1024
# So many bytes of contributions are held before they are read: on the CPU what fits into a cache, on a device what
# is worth a call.
BULK, BULK_ON_DEVICE = 1 << 20, 16 << 20
_STRIDED = torch.strided
_current_task = torch._C._current_graph_task_id
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_THREADS = (
    "another thread trains recorded parameters, too, and torch lets no thread read "
    "a .grad while another writes it"
)


class State(IntEnum):
    """What a running backward has brought to a leaf."""

    NEW = 0
    ARRIVED = 1  # `.grad` is what came; it was not read yet
    HELD = 2  # what came is held; it was not read yet
    READ = 3
    UNKNOWN = 4  # something came, and its size cannot be known


NEW, ARRIVED, HELD, READ, UNKNOWN = State
# What is read of tensors: what came, and what `.grad` is.
_CAME, _IS = ("contribution",), ("grad",)
# Tensors of leaves.
Tensors = dict[int, Tensor]
# A leaf and its norm, or (`~leaf`) its elements.
Sample = tuple[int, list[float]]


class Gradients:
    """The recorded leaves by index: hooked, watched for changes of `.grad`, and reduced to numbers.

    `small` are the leaves whose elements are kept one by one, with their sizes; `present` holds the PRESENT bit of
    each, one byte a leaf. `taken` are leaves whose `.grad` a library changes or takes away while a backward runs: what
    comes to them is held. `changeable` are those with hooks of the user's before autograd adds, `rewritable` those with
    hooks after it, whose `.grad` may not be what came. `events` counts the events.
    """

    def __init__(self, named: Named, exact: int) -> None:
        self.named, self.tensors = named, named.tensors
        self.events: Callable[[], int] = int
        self.running: Backward | None = None
        self.taken: set[int] = set()
        on_device = any(device.type != "cpu" for device in self.devices())
        self.bulk = BULK_ON_DEVICE if on_device else BULK
        # The thread that is followed, once a backward of it has reached a leaf; and how many others call backward now.
        self.thread: int | None = None
        self._is_reached = False
        self.others = 0
        self.present = bytearray(len(self.tensors))
        weights = [leaf for leaf in self.tensors if isinstance(leaf, Tensor)]
        self._ends = [*weights[:1], *weights[-1:]]
        self._shapes = [tuple(local(tensor).shape) for tensor in self.tensors]
        # As they are when the recording opens: what a leaf of another size holds is not known one by one.
        self.sizes = [prod(shape) for shape in self._shapes]
        self.small = self._small(exact)
        self._index = named.index
        self.changeable: set[int] = set()
        self.rewritable: set[int] = set()
        # Of each leaf that is hooked, our hooks' handles.
        self._handles: dict[int, list[Any]] = {}
        # Of each leaf itself, the `.grad` that it had when it was last looked at, and in which version.
        self._seen: list[tuple[Any, ref[Any] | None, int]]
        self.let_go()
        # A leaf whose `.grad` is in host memory, and what was read of it last: it differs after a change through
        # `.data`, which counts no version. Where libraries make such changes, too, nothing is made of them.
        self._last: Sample | None = None
        self.watches = True

    def _small(self, exact: int) -> dict[int, int]:
        small = {}
        total, most = 0, max(_EXACT_TOTAL, exact)
        for i, tensor in enumerate(self.tensors):
            size = self.sizes[i]
            plain = tensor.dtype.is_floating_point and tensor.layout is _STRIDED
            if plain and size <= exact and total + size <= most:
                total += size
                small[i] = size
        return small

    def __len__(self) -> int:
        return len(self.present)

    # --- hooks ---------------------------------------------------------------------------------

    def hook(self) -> None:
        """Put our hook on every leaf that needs one: last, and one before those of the user's."""
        for i, tensor in enumerate(self.tensors):
            leaf = tensor if isinstance(tensor, Tensor) else tensor.leaf
            if leaf is None or not leaf.requires_grad:
                continue
            hooks = leaf._backward_hooks
            alone = hooks and len(hooks) == 1 and i in self._handles
            if not alone or leaf._post_accumulate_grad_hooks:
                self._surround(i, leaf)

    def _surround(self, i: int, leaf: Any) -> None:
        """Put our hooks around those that a leaf has now."""
        for handle in self._handles.pop(i, ()):
            handle.remove()
        # The tensor holds its hooks: one that held the recording would keep both alive for ever.
        here = ref(self)
        handles = self._handles[i] = []
        self.changeable.discard(i)
        self.rewritable.discard(i)
        if patches.has_users(leaf._backward_hooks):
            self.changeable.add(i)
            handles.append(leaf.register_hook(_ours(_comes, here, i)))
            _put_first(leaf._backward_hooks)
        size = self.sizes[i] * leaf.dtype.itemsize
        is_rewritten = patches.has_users(leaf._post_accumulate_grad_hooks)
        is_kept = is_rewritten or i in self.taken
        handles.append(leaf.register_hook(_ours(_arrives, here, i, size, is_kept)))
        if is_rewritten:
            self.rewritable.add(i)
            hook = _ours(_is_added, here, i)
            handles.append(leaf.register_post_accumulate_grad_hook(hook))
            _put_first(leaf._post_accumulate_grad_hooks)

    # --- a backward ----------------------------------------------------------------------------

    def is_ours(self) -> bool:
        """Return whether the caller is on the thread that is followed, or inside a backward that it called."""
        if self.running is None:
            return self.thread in (None, get_ident())
        return self.running_here() is not None

    def running_here(self) -> Backward | None:
        """Return the backward that the caller is inside of; on a device hooks run on threads of the engine's."""
        running = self.running
        if running is None or get_ident() == running.thread:
            return running
        return None if self.others or _current_task() == -1 else running

    def leave_to_others(self) -> NoReturn:
        """Read no `.grad` any more, because another thread is about to write one: the recording stops."""
        self.running = None
        raise RuntimeError(_THREADS)

    def read_held(self, running: Backward, stream: int | None = None) -> None:
        """Read the contributions that are held, or only those made on this stream, and let go of them."""
        grads: Tensors = {}
        rest: dict[int, tuple[Tensor, int, int]] = {}
        for i, held in running.held.items():
            grad, version, made_on = held
            if stream not in (None, made_on):
                rest[i] = held
            # An operation of the user's may have written into it again.
            elif grad._version != version or running.state[i] != HELD:
                running.state[i] = UNKNOWN
            else:
                running.state[i] = READ
                grads[i] = grad
                if stream is None and grad.is_cuda and made_on != _stream(grad):
                    keep_for_stream(grad)
        running.held, running.waiting = rest, 0
        self.read(running, _CAME, grads)

    def _read_arrived(self, running: Backward) -> Iterable[int]:
        """Read the contributions that are what `.grad` is; return of which leaves.

        That is still what autograd made of a tensor in this place and version: the tensor itself, or a copy, which is
        written once at most.
        """
        grads: Tensors = {}
        state = running.state
        for i, mark in running.arrived.items():
            grad: Any = self.tensors[i].grad
            is_known = state[i] == ARRIVED and grad is not None
            if is_known and mark is not None:
                place, version = mark
                is_same = grad.data_ptr() == place
                is_known = grad._version == version if is_same else grad._version <= 1
            if is_known:
                state[i] = READ
                grads[i] = grad
            else:  # freed or changed meanwhile: that something came is known, not how much
                state[i] = UNKNOWN
        running.arrived = {}
        self._last = self.read(running, (*_CAME, *_IS), grads) or self._last
        return grads

    def settle(self, running: Backward) -> None:
        """Read what has reached leaves so far, and their `.grad`, while it is there to be read."""
        with patches.reading:
            fresh = [i for i in running.reached if i not in running.settled]
            running.settled |= dict.fromkeys(fresh, self.events())
            running.by_hook |= self.rewritable.intersection(self.update(fresh))
            self.read_held(running)
            arrived = self._read_arrived(running)
            self.read_grads(running, sorted(set(fresh).difference(arrived)))

    def accumulated(self, i: int) -> None:
        """Read what a backward has made of a leaf's `.grad`, before a library changes it or takes it away."""
        with patches.reading:
            running = self.running_here()
            if running is None:
                return
            if i in self.rewritable:
                running.by_hook.add(i)
            self.read_grads(running, [i])
            running.settled.setdefault(i, self.events())
            self.update([i])

    def finish(self, running: Backward) -> None:
        """Give a backward that is over its numbers, and say which leaves it has reached and changed."""
        self.running = None
        reached = running.reached
        self._is_reached = self._is_reached or bool(reached)
        if not self._is_reached:
            self.thread = None  # this one's may train what another recording has
        changed = sorted(set(self.update()) - running.synced)
        if running.held:
            self.read_held(running)
        arrived = self._read_arrived(running) if running.arrived else ()
        running.contributed = reached
        running.changed = list(dict.fromkeys([*reached, *changed]))
        running.present = bytes(self.present)
        if UNKNOWN in running.state:
            names = self.named.names
            running.unmeasured = [i for i in reached if running.state[i] == UNKNOWN]
            running.details["unmeasured"] = [names[i] for i in running.unmeasured]
        unread = set(changed)
        if self.rewritable:
            # What they have been seen with is what autograd made of it.
            running.by_hook |= self.rewritable & unread
            unread |= self.rewritable.intersection(reached).difference(running.settled)
        unread.difference_update(arrived)
        if unread:
            self.read_grads(running, sorted(unread))
        if reached and running.by_hook.issuperset(reached):
            running.details["by_hook"] = math.nan

    # --- what `.grad` is -----------------------------------------------------------------------

    def update(self, only: Iterable[int] | None = None) -> Leaves:
        """Return the leaves (or `only` of these) whose `.grad` is not the tensor, or the version of it, that it was."""
        changed = []
        seen, present = self._seen, self.present
        for i in range(len(seen)) if only is None else only:
            tensor, last, version = seen[i]
            grad = tensor.grad
            if grad is None:
                if last is None:
                    continue
                seen[i], present[i] = (tensor, None, 0), 0
            else:
                inner, count = grad, grad._version
                if type(grad) is not Tensor:
                    inner = local(grad)
                    # What is done to a part of it counts on the outside only.
                    count += inner._version if inner is not grad else 0
                if last is not None and count == version and last() is inner:
                    continue
                seen[i], present[i] = (tensor, ref(inner), count), PRESENT
            changed.append(i)
        if changed:
            self._last = None
        return changed

    def look(self) -> Leaves:
        """Return the leaves whose `.grad` has changed since the last look, be it without a new version."""
        changed = self.update()
        if changed or self._last is None or not self.watches:
            return changed
        place, before = self._last
        grad = self.tensors[max(place, ~place)].grad
        if grad is None or not readable(grad):
            return []
        numbers = _elements if place < 0 else host_norms
        now = numbers([grad])
        if now == before or not _differ(before, now):
            return []
        # A change through `.data` is one of all.
        self._last = None
        return [i for i in range(len(self)) if self.present[i]]

    def read_grads(self, row: Row, indices: Iterable[int]) -> None:
        """Give a row the `.grad` of these leaves: elements of small tensors, norms of large ones."""
        grads: Tensors = {}
        for i in indices:
            grad = self.tensors[i].grad
            if grad is not None:
                grads[i] = grad
        self._last = self.read(row, _IS, grads) or self._last

    def read(
        self,
        row: Row,
        what: Sequence[str],
        tensors: Tensors,
    ) -> Sample | None:
        """Give a row what is in these tensors of leaves.

        Returns the numbers of one in host memory, by which a change of `.grad` is seen that no version tells.
        """
        if not tensors:
            return None
        if not readable(*tensors.values()):
            tensors = self._readable_ones(row, what, tensors)
        small = self.small
        kinds: dict[Any, tuple[Leaves, list[Tensor]]] = {}
        for i, tensor in tensors.items():
            whole = tensor.layout is _STRIDED and tensor.numel() == small.get(i)
            kind = whole, tensor.dtype, tensor.device
            places, members = kinds.setdefault(kind, ([], []))
            places.append(~i if whole else i)
            members.append(tensor)
        sample: Sample | None = None
        for (whole, *_), (places, members) in kinds.items():
            first = members[0]
            if not first.is_cpu:
                parts = members if whole else device_norms(members)
                row.take_leaves(what, places, parts)
                continue
            values = _elements(members) if whole else host_norms(members)
            for each in what:
                row.given.append((each, tuple(places), values))
            if sample is None:
                end = first.numel() if whole else 1
                sample = places[0], values[:end]
        return sample

    def _readable_ones(
        self,
        row: Row,
        what: Sequence[str],
        tensors: Tensors,
    ) -> Tensors:
        """Return what can be read, local parts of DTensors, and say of the rest that something is there."""
        parts: Tensors = {}
        for i, tensor in tensors.items():
            part = local(tensor)
            if readable(part):
                parts[i] = part
            else:
                self.leave_unread(row, [i], what)
        return parts

    def leave_unread(
        self,
        row: Row,
        indices: Iterable[int],
        what: Sequence[str] = _IS,
    ) -> None:
        """Say in a row that these leaves' numbers are not known, and expect changes without a new version."""
        self._last = None
        for i in indices:
            for each in what:
                row.give(each, [i], [math.nan])

    def weigh(self, row: Row) -> None:
        """Give a row the weights of the small leaves, those of FSDP as shards only."""
        weights: Tensors = {}
        for i, size in self.small.items():
            tensor = local(self.tensors[i])
            if readable(tensor) and tensor.numel() == size:
                weights[i] = tensor
        self.read(row, ("weight",), weights)

    def weigh_rank(self, row: Row) -> None:
        """Give a row the norm of all weights of a rank that holds them whole, on the device of the first."""
        if self.named.shards.wholes or not readable(*self.tensors):
            return
        device = self.tensors[0].device
        weights = [each for each in self.tensors if each.device == device]
        norm = torch.nn.utils.get_total_norm(weights)
        row.take(norm, partial(row.details.__setitem__, "weights_norm"))

    # --- whose they are ------------------------------------------------------------------------

    def devices(self) -> set[torch.device]:
        """Return the devices that the leaves are on now."""
        return {tensor.device for tensor in self.tensors}

    def versions(self) -> list[int]:
        """Return the versions of the first and the last weights: who moves those by hand moves all.

        What FSDP gathers is no tensor, and a tensor made for inference counts no versions.
        """
        versions = []
        for leaf in self._ends:
            if not leaf.is_inference():
                versions.append(leaf._version)
        return versions

    def owned(self, owner: Any) -> Leaves:
        """Return the recorded leaves among an optimizer's, a module's or a list's tensors."""
        index = self._index
        return [index[id(tensor)] for tensor in _tensors(owner) if id(tensor) in index]

    def with_grad(self, owner: Any, *, sharded: bool = False) -> Leaves:
        """Return the owned leaves that have a `.grad`; with `sharded`, one that is a part of a tensor.

        What changes many of those at once counts no version.
        """
        leaves = []
        for i in self.owned(owner):
            grad = self.tensors[i].grad
            if grad is not None and (not sharded or local(grad) is not grad):
                leaves.append(i)
        return leaves

    def know(self, tensor: Tensor, i: int) -> None:
        """Take this tensor for that leaf: a module whose weights FSDP has put together has it as a parameter."""
        self._index.setdefault(id(tensor), i)

    def let_go(self) -> None:
        """Hold no weak reference to any `.grad`."""
        self._seen = [(tensor, None, 0) for tensor in self.tensors]

    def close(self) -> None:
        """Take our hooks away."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """Let go of every tensor."""
        self.running = None
        self.tensors.clear()
        self._ends.clear()
        self._seen.clear()
        self.named.forget()

    def parameters(self, owned: list[Leaves]) -> list[Parameter]:
        """Return the leaves as data, as they are now; `owned` are those of each optimizer."""
        owners: dict[int, list[int]] = {}
        for index, leaves in enumerate(owned):
            for i in dict.fromkeys(leaves):
                owners.setdefault(i, []).append(index)
        for whole, shard in self.named.shards.wholes.items():
            owners[whole] = owners.get(shard, [])
        return [self._parameter(i, owners.get(i, [])) for i in range(len(self))]

    def _parameter(self, i: int, optimizers: list[int]) -> Parameter:
        named, tensor = self.named, self.tensors[i]
        whole = named.shards.wholes.get(i)
        shape = self._shapes[i] if i in self.small else tuple(local(tensor).shape)
        dtype = getattr(tensor, "grad_dtype", None) or tensor.dtype
        return Parameter(
            named.names[i],
            shape,
            str(dtype).removeprefix("torch."),
            str(tensor.device),
            named.groups[i],
            tuple(named.aliases[i]),
            tuple(optimizers),
            tensor.requires_grad or whole is not None,
            unsharded_of="" if whole is None else named.names[whole],
        )


# --- our hooks ---------------------------------------------------------------------------------

Here = ref[Gradients]


@patches.guarded
def _comes(
    here: Here,
    i: int,
    grad: Tensor | None,
) -> None:
    """Note what comes to a leaf before the user's hooks see it."""
    gradients = here()
    running = None if gradients is None else gradients.running
    if running is not None and grad is not None:
        running.hooked[i] = grad, grad._version


@patches.guarded
def _is_added(here: Here, i: int, leaf: Tensor) -> None:
    """Note what autograd has made of a `.grad`, before the user's hooks see it: they change what differs later."""
    gradients = here()
    if gradients is None:
        return
    with patches.reading:
        running = gradients.running
        if running is None or i in gradients.taken:
            return
        if running.state[i] == UNKNOWN:
            running.by_hook.add(i)  # a part, perhaps of what was changed
        gradients.update([i])


def _arrives(
    here: Here,
    i: int,
    size: int,
    is_kept: bool,
    grad: Tensor | None,
) -> None:
    """Take note of what autograd is about to add to a leaf's `.grad`, which `is_kept` or is known again later."""
    gradients, thread = here(), get_ident()
    # `torch.autograd.grad` writes no `.grad`.
    if gradients is None or grad is None or thread in patches.differentiating:
        return
    try:
        with patches.reading:
            running = gradients.running
            if gradients.others and thread != getattr(running, "thread", None):
                gradients.leave_to_others()
            if running is None:
                return
            if i in gradients.changeable:
                _note_change(running, i, grad)
            if running.state[i] != NEW:
                # A further part, as reentrant checkpoints of a shared layer bring it.
                running.state[i] = UNKNOWN
                return
            running.reached.append(i)
            if is_kept or running.had[i]:
                _hold(gradients, running, i, size, grad)
                return
            # By what it is known again.
            running.state[i] = ARRIVED
            is_plain = type(grad) is Tensor and grad.layout is _STRIDED
            mark = (grad.data_ptr(), grad._version) if is_plain else None
            running.arrived[i] = mark
    except Exception as failure:
        # A hook that raises would end the user's backward.
        patches.failures.append(failure)


def _note_change(running: Backward, i: int, grad: Tensor) -> None:
    """Note whether hooks of the user's have changed what came to a leaf."""
    first, version = running.hooked.pop(i, (None, 0))
    if first is not grad or version != grad._version:
        running.by_hook.add(i)


def _hold(
    gradients: Gradients,
    running: Backward,
    i: int,
    size: int,
    grad: Tensor,
) -> None:
    """Hold what comes to a leaf until it is read in bulk."""
    running.state[i] = HELD
    stream = _stream(grad) if grad.is_cuda else 0
    # The reference keeps it another tensor than `.grad`.
    running.held[i] = grad, grad._version, stream
    running.waiting += size
    if running.waiting > gradients.bulk or i in gradients.taken:
        unseen(gradients.read_held, running, stream)


def _elements(tensors: list[Tensor]) -> list[float]:
    """Return the elements of tensors in host memory."""
    elements = list[float]()
    for tensor in tensors:
        elements += tensor.flatten().tolist()
    return elements


def _differ(before: list[float], now: list[float]) -> bool:
    """Return whether a number has changed into another that is known."""
    pairs = zip(before, now, strict=False)
    return any(old != new and not math.isnan(new) for old, new in pairs)


def _stream(grad: Tensor) -> int:
    """Return on which of its device's streams a tensor is made now."""
    if _raw_stream is None:
        return 0
    return _raw_stream(grad.get_device())  # type: ignore[no-any-return]


def _ours(function: Callable[..., None], *args: Any) -> Callable[..., None]:
    hook: Any = partial(function, *args)
    hook.__module__ = __name__
    hook.__torch_unserializable__ = True  # torch does not warn where it is saved
    return hook  # type: ignore[no-any-return]


def _put_first(hooks: dict[int, Any]) -> None:
    """Have torch call the last of these hooks before the others, which keep their order."""
    for number in list(hooks)[:-1]:
        hooks[number] = hooks.pop(number)


def _tensors(owner: Any) -> Iterable[Any]:
    if isinstance(owner, torch.nn.Module):
        return owner.parameters()
    return targets.parameters(owner) if targets.is_optimizer(owner) else owner
