"""Read what each backward adds to the recorded leaves, by hooks that never wait for a device.

Autograd may hand a leaf without a `.grad` the very tensor that comes, so nothing of it is held: the leaf has
`ARRIVED`, and its `.grad` is read after the backward. To any other leaf autograd adds: what comes is `HELD` until it
is read in bulk.

On the CPU hooks run on the thread that called backward; on a device on the engine's thread for it, under the stream
of the operation that made the gradient. A recording follows the thread of its first backward. Leaves that backwards
of other threads reach are not looked at again: they are written while we look.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum
from math import prod
from threading import get_ident
from typing import Any
from weakref import ref

import torch

from accumviz.ledger.events import PRESENT, Parameter
from accumviz.recorder import patches, targets
from accumviz.recorder.columns import Backward, Row
from accumviz.recorder.distributed import local
from accumviz.recorder.targets import Named
from accumviz.recorder.transfer import (
    BLOCK,
    PLAIN,
    Wire,
    keep_for_stream,
    norm,
    norms,
    readable,
    split_plain,
    unseen,
)

# In all, so many elements of small tensors are kept one by one: a teaching example, not a ResNet's biases.
_EXACT_TOTAL = 1024
# So many bytes of contributions are held before they are read: on the CPU what fits into a cache, on a device what
# is worth a call.
BULK, BULK_ON_DEVICE = 1 << 20, 16 << 20
# What FSDP takes away after the hook is held only if it is so small.
_SMALL = 16 << 10
_STRIDED, _TENSOR = torch.strided, torch.Tensor
_current_task = torch._C._current_graph_task_id
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
THREADS = (
    "another thread trains recorded parameters, too: what it does is not recorded, "
    "and no share is known"
)

Hook = Callable[[torch.Tensor | None], None]


class State(IntEnum):
    """What a running backward has brought to a leaf."""

    NEW = 0
    ARRIVED = 1  # `.grad` is what came; it was not read yet
    HELD = 2  # what came is held; it was not read yet
    READ = 3
    UNKNOWN = 4  # something came, and its size cannot be known


NEW, ARRIVED, HELD, READ, UNKNOWN = State


class Gradients:
    """The recorded leaves by index: hooked, watched for changes of `.grad`, and reduced to numbers.

    `small` are the leaves whose elements are kept one by one; `present` holds the PRESENT bit of each, one byte a
    leaf. `taken` are leaves whose `.grad` a library changes or takes away while a backward runs.
    `events` counts the events.
    """

    def __init__(self, named: Named, exact: int) -> None:
        self.named, self.tensors = named, named.tensors
        self.wire = Wire()
        self.events: Callable[[], int] = int
        self.running: Backward | None = None
        self.taken: set[int] = set()
        on_device = any(device.type != "cpu" for device in self.devices())
        self.bulk = BULK_ON_DEVICE if on_device else BULK
        # The thread that is followed, how many others call backward now, and whether they have reached a leaf.
        self.thread: int | None = None
        self.others, self.disturbed = 0, False
        count = len(self.tensors)
        self.present = bytearray(count)
        shapes = [tuple(local(tensor).shape) for tensor in self.tensors]
        # As they are when the recording opens: what a leaf of another size holds is not known one by one.
        self.sizes = [prod(shape) for shape in shapes]
        self.small = dict.fromkeys(self._small(exact))
        self._shapes = shapes
        self._index = named.index
        self._lock = threading.RLock()
        # Of each leaf that is hooked, our hook's handle.
        self._handles: dict[int, Any] = {}
        self._unhooked = set(range(count))
        # Of each leaf itself, the `.grad` that it had when it was last looked at, and in which version.
        self._seen: dict[int, tuple[Any, ref[Any] | None, int]]
        self._seen = {i: (tensor, None, 0) for i, tensor in enumerate(self.tensors)}
        # What was last read of each `.grad` in host memory: it differs after a change through `.data`, which counts no
        # version. Libraries make such changes, too: then nothing is made of them.
        self._numbers: dict[int, Any] = {}
        self.watches = True
        # Optimizers, modules and lists of which some tensor is recorded, by id.
        self._owners: dict[int, ref[Any]] = {}
        # What was last said of each leaf as data, and of what.
        self._described: dict[int, tuple[Any, Parameter]] = {}

    def _small(self, exact: int) -> Iterable[int]:
        total, most = 0, max(_EXACT_TOTAL, exact)
        for i, tensor in enumerate(self.tensors):
            size = self.sizes[i]
            plain = tensor.is_floating_point() and tensor.layout is _STRIDED
            if plain and size <= exact and total + size <= most:
                total += size
                yield i

    def __len__(self) -> int:
        return len(self.present)

    # --- hooks ---------------------------------------------------------------------------------

    def hook(self) -> None:
        """Put our hook on every leaf that needs one: last, behind those of the user's."""
        missing = [i for i in self._unhooked if self.tensors[i].requires_grad]
        for i, handle in self._handles.items():
            hooks = self.tensors[i]._backward_hooks
            if not hooks or (len(hooks) > 1 and next(reversed(hooks)) != handle.id):
                missing.append(i)
        for i in missing:
            if i in self._handles:
                self._handles[i].remove()
            self._hook(i)

    def _hook(self, i: int) -> None:
        hook: Any = self._hook_of(i)
        hook.__torch_unserializable__ = True  # torch does not warn where it is saved
        self._handles[i] = self.tensors[i].register_hook(hook)  # type: ignore[no-untyped-call]
        self._unhooked.discard(i)

    def _hook_of(self, i: int) -> Hook:
        # The tensor holds its hook: one that held the recording would keep both alive for ever.
        here, elsewhere = weakref.ref(self), patches.differentiating
        size = self.sizes[i] * self.tensors[i].element_size()

        def hook(grad: torch.Tensor | None) -> None:
            gradients = here()
            if gradients is None or grad is None:
                return
            running = gradients.running
            # `torch.autograd.grad` writes no `.grad`.
            if (running is None and not gradients.others) or get_ident() in elsewhere:
                return
            try:
                with gradients._lock:
                    if running is not None and gradients._brings(running, grad):
                        gradients._receive(running, i, grad, size)
                    elif gradients.others:
                        gradients._lose(i)
            except Exception as failure:
                # A hook that raises would end the user's backward.
                patches.failures.append(failure)

        return hook

    def _brings(self, running: Backward, grad: torch.Tensor) -> bool:
        """Return whether this backward brings a gradient; a device's thread works for those of all threads."""
        if grad.is_cpu and not running.nested:
            return get_ident() == running.thread
        return not self.others

    def _lose(self, i: int) -> None:
        """Never look at a leaf again: another thread writes its `.grad`."""
        self._seen = {j: seen for j, seen in self._seen.items() if j != i}
        self.disturbed = True
        if self.running is not None and self.running.state[i] != NEW:
            self.running.state[i] = UNKNOWN

    def _receive(
        self, running: Backward, i: int, grad: torch.Tensor, size: int
    ) -> None:
        """Take note of what autograd is about to add to a leaf's `.grad`."""
        if running.waiting > self.bulk and not running.nested:
            self._read_bulk(running, grad)
        state = running.state[i]
        if state == NEW:
            running.reached.append(i)
        elif state in (READ, UNKNOWN):
            # A part, as a reentrant checkpoint brings it, after what came first was read.
            running.state[i] = UNKNOWN
            return
        if grad.is_cuda and _raw_stream is not None:
            running.streams.add(_raw_stream(grad.get_device()))
        if state == HELD:
            running.held[i] = running.held[i][0] + grad.detach(), 0
        elif state == NEW and i in self.taken and size > _SMALL:
            self.read(running, "contribution", [(i, grad.detach())])
            running.state[i] = READ
        elif running.had[i] or i in self.taken or self._is_hooked_after(i):
            # Detached where `.grad` is another tensor anyway; else the reference keeps it another tensor.
            plain = type(grad) is _TENSOR and not grad.requires_grad
            kept = grad.detach() if running.had[i] and not plain else grad
            running.held[i] = kept, kept._version
            running.waiting += size
            running.state[i] = HELD
        else:
            # What comes in parts is added up in `.grad`, in a version that is not known.
            if state == NEW and type(grad) is _TENSOR and grad.layout is _STRIDED:
                running.versions[i] = grad.data_ptr(), grad._version
            else:
                running.versions.pop(i, None)
            running.state[i] = ARRIVED

    def _is_hooked_after(self, i: int) -> bool:
        """Return whether hooks of the user's run between autograd's writing this `.grad` and our reading it."""
        return bool(self.tensors[i]._post_accumulate_grad_hooks)

    def _read_bulk(self, running: Backward, grad: torch.Tensor) -> None:
        """Read what is held, unless some of it was made on a stream that this one does not wait for."""
        if (
            not grad.is_cuda
            or _raw_stream is None
            or running.streams <= {_raw_stream(grad.get_device())}
        ):
            self.read_held(running)

    # --- a backward ----------------------------------------------------------------------------

    def begin(self, running: Backward) -> None:
        """Take what comes from now on for what this backward brings."""
        self.running = running

    def is_ours(self) -> bool:
        """Return whether the caller is on the thread that is followed, or inside a backward that it called."""
        if self.thread is None or get_ident() == self.thread:
            return True
        return self.running_here() is not None

    def running_here(self) -> Backward | None:
        """Return the backward that the caller is inside of; on a device hooks run on threads of the engine's."""
        running = self.running
        if running is None or get_ident() == running.thread:
            return running
        return None if self.others or _current_task() == -1 else running

    def read_held(self, running: Backward) -> None:
        """Read the contributions that are held, and let go of them."""
        held, running.held, running.waiting = running.held, {}, 0
        if not held:
            return
        found = []
        for i, (grad, version) in held.items():
            # An operation of the user's may have written into it again.
            same = grad._version == version and running.state[i] == HELD
            running.state[i] = READ if same else UNKNOWN
            if same:
                found.append((i, grad))
        self.read(running, "contribution", found)
        if running.streams:
            keep_for_stream([grad for grad, _ in held.values()])

    def settle(self, running: Backward) -> None:
        """Read what has reached leaves so far, and their `.grad`, while it is there to be read."""
        with self._lock:
            state, looked = running.state, running.looked
            unread = [i for i in running.reached if i not in looked]
            held = [i for i in unread if state[i] in (HELD, READ)]
            looked.update(unread)
            running.untouched |= {i for i in held if self._is_as_added(running, i)}
            self.mark_seen(unread)
            self.read_held(running)
            self._read_arrived(running)
            self.read_grads(running, held)
            count = self.events()
            for i in running.reached:
                running.settled.setdefault(i, count)

    def _is_as_added(self, running: Backward, i: int) -> bool:
        """Return whether a leaf's first contribution is in `.grad` as autograd has put it there."""
        tensor, grad = self.tensors[i], self.tensors[i].grad
        if type(grad) is not _TENSOR or running.had[i] or i not in running.held:
            return False
        came, version = running.held[i]
        if grad.data_ptr() == came.data_ptr():
            return grad._version == version
        # Autograd has copied it, since we hold it, into a new tensor: that is one change.
        return tensor.is_contiguous() and grad._version == 1

    def _read_arrived(self, running: Backward) -> None:
        """Read the contributions that are what `.grad` is."""
        found = []
        for i in running.reached:
            if running.state[i] != ARRIVED:
                continue
            grad = self.tensors[i].grad if i in self._seen else None
            # Freed or changed meanwhile: that something came is known, not how much.
            if grad is None or (
                i in running.versions and not _is_what_came(grad, *running.versions[i])
            ):
                running.state[i] = UNKNOWN
                continue
            found.append((i, grad))
            running.state[i] = READ
            running.same[i] = None
        self.read(running, "contribution", found, self._numbers)

    def accumulated(self, i: int) -> None:
        """Read what a backward has made of a leaf's `.grad`, before a library changes it or takes it away."""
        running = self.running_here()
        if running is None or i not in self._seen:
            return
        grad = self.tensors[i].grad
        if not running.had[i] and not self._is_hooked_by_user(i):
            if running.state[i] in (HELD, READ):
                running.same[i] = None
        elif grad is not None:
            self.read(running, "grad", [(i, grad)])
        running.looked.add(i)
        self.mark_seen([i])

    def finish(self, running: Backward) -> None:
        """Give a backward that is over its numbers, and say which leaves it has reached and changed."""
        self.running = None
        changed = self.update()
        if running.synced:
            changed = [i for i in changed if i not in running.synced]
        self.read_held(running)
        self._read_arrived(running)
        reached, state, alike = running.reached, running.state, running.same
        if UNKNOWN in state:
            running.unmeasured = [i for i in reached if state[i] == UNKNOWN]
            names = self.named.names
            running.details["unmeasured"] = [names[i] for i in running.unmeasured]
        if UNKNOWN in state or not running.looked.isdisjoint(changed):
            later = running.looked.intersection(changed)
            alike = {i: None for i in alike if state[i] == READ and i not in later}
        running.contributed = reached
        running.changed = list(dict.fromkeys([*reached, *changed]))
        running.alike, running.present = list(alike), bytes(self.present)
        unread = [i for i in changed if i not in alike]
        self.read_grads(running, unread)
        # Hooks that brought an event, such as a step, and changed nothing before it or since, are known.
        settled = running.untouched.difference(changed, running.synced)
        if reached and all(self._is_hooked_by_user(i, i in settled) for i in reached):
            running.details["by_hook"] = math.nan
        if self.disturbed:
            running.details["overlapped"] = True

    def _is_hooked_by_user(self, i: int, settled: bool = False) -> bool:
        """Return whether hooks of the user may have changed a contribution or, unless `settled`, the `.grad`."""
        before, after = (
            self.tensors[i]._backward_hooks,
            self.tensors[i]._post_accumulate_grad_hooks,
        )
        hooks = list(before.values()) if before and len(before) > 1 else []
        if after and not settled:
            hooks += after.values()
        modules = [getattr(hook, "__module__", None) or "" for hook in hooks]
        return not all(module.startswith(("accumviz.", "torch.")) for module in modules)

    # --- what `.grad` is -----------------------------------------------------------------------

    def update(self, only: Iterable[int] | None = None) -> list[int]:
        """Return the leaves (or `only` of these) whose `.grad` is not the tensor, or the version of it, that it was."""
        changed = []
        seen, present = self._seen, self.present
        every = seen if only is None else [i for i in only if i in seen]
        for i in every:
            tensor, last, version = seen[i]
            grad = tensor.grad
            if grad is None:
                if last is None:
                    continue
                seen[i], present[i] = (tensor, None, 0), 0
            else:
                inner, count = grad, grad._version
                if type(grad) is not _TENSOR:
                    inner = local(grad)
                    # What is done to a part of it counts on the outside only.
                    count += inner._version if inner is not grad else 0
                if last is not None and count == version and last() is inner:
                    continue
                seen[i], present[i] = (tensor, ref(inner), count), PRESENT
            changed.append(i)
            self._numbers.pop(i, None)
        return changed

    def mark_seen(self, indices: Iterable[int]) -> None:
        """Take the `.grad` of these leaves as looked at."""
        for _ in self.update(indices):
            pass

    def stop_watching(self, indices: Iterable[int]) -> None:
        """Expect that these leaves' `.grad` changes without a new version."""
        for i in indices:
            self._numbers.pop(i, None)

    def look(self) -> list[int]:
        """Return the leaves whose `.grad` has changed since the last look, be it without a new version."""
        changed = self.update()
        if changed or not self._numbers or not self.watches:
            return changed
        if not self.differs(next(reversed(self._numbers))):
            return []
        self._numbers.clear()
        return [i for i in self._seen if self.present[i]]

    def differs(self, i: int) -> bool:
        """Return whether a leaf's `.grad` is in host memory, and not what was last read of it."""
        before = self._numbers.get(i)
        after = None if before is None else self._read_again(i)
        if before is None or after is None or after == before:
            return False
        pairs = zip(before, after, strict=False)
        return any(new != old and new == new for old, new in pairs)  # noqa: PLR0124 - NaN is no change

    def _read_again(self, i: int) -> list[float] | None:
        """Return what `read` makes of a leaf's `.grad` in host memory; None where that cannot be read."""
        grad = self.tensors[i].grad
        plain, others = split_plain([(i, grad)] if type(grad) is _TENSOR else [])
        for _, tensor in plain or others:
            dense = tensor.is_cpu and tensor.layout is _STRIDED
            if not plain and not (dense and readable(tensor)):
                return None
            if i in self.small:
                return tensor.detach().reshape(-1).tolist()
            if plain and tensor.numel() <= BLOCK:
                return [math.sqrt(torch.dot(tensor, tensor).item())]
            return [norm(tensor)]
        return None

    def read_grads(self, row: Row, indices: Iterable[int]) -> None:
        """Give a row the `.grad` of these leaves: elements of small tensors, norms of large ones."""
        seen, tensors = self._seen, self.tensors
        grads = [(i, tensors[i].grad) for i in indices if i in seen]
        self.read(
            row, "grad", [one for one in grads if one[1] is not None], self._numbers
        )

    def read(
        self,
        row: Row,
        what: str,
        leaves: list[tuple[int, Any]],
        known: dict[int, Any] | None = None,
    ) -> None:
        """Give a row these tensors, likewise; modes of the user's do not see it. `known` is told what is in each."""
        if not leaves:
            return
        unseen(self._read, row, what, leaves, known)
        if row.late:
            row.send(self.wire)

    def _read(
        self, row: Row, what: str, leaves: list[tuple[int, Any]], known: Any
    ) -> None:
        plain, others = split_plain(leaves)
        places, numbers = list[int](), list[float]()
        for i, flat in plain:
            places.append(~i if self._is_small(i, flat) else i)
            if places[-1] < 0:
                read = flat.tolist()
            elif flat.numel() > BLOCK:
                read = [norm(flat)]
            else:
                read = [math.sqrt(torch.dot(flat, flat).item())]
            numbers += read
            if known is not None:
                known[i] = read
        if plain:
            row.give(what, places, numbers)
        if others:
            self._read_others(row, what, others)
            if known is not None:
                known |= {i: self._read_again(i) for i, _ in others}

    def _is_small(self, i: int, tensor: torch.Tensor) -> bool:
        """Return whether all elements of a leaf are kept: it has as many as when the recording opened."""
        return i in self.small and tensor.numel() == self.sizes[i]

    def _read_others(
        self, row: Row, what: str, leaves: Iterable[tuple[int, torch.Tensor]]
    ) -> None:
        """Read tensors of any kind and place."""
        on_device, waiting = list[int](), list[torch.Tensor]()
        for i, given in leaves:
            tensor = given if type(given) in PLAIN else local(given)
            if not readable(tensor):
                # That something is there is known, not how much.
                self.leave_unread(row, [i], what)
            elif self._is_small(i, tensor):
                row.take_leaves(what, [~i], [tensor])
            elif tensor.is_cpu:
                row.give(what, [i], [norm(tensor)])
            else:
                on_device.append(i)
                waiting.append(tensor)
        for places, reduced in norms(on_device, waiting) if waiting else ():
            row.take_leaves(what, places, reduced)

    def leave_unread(
        self, row: Row, indices: Iterable[int], what: str = "grad"
    ) -> None:
        """Say in a row that these leaves' numbers are not known."""
        for i in indices:
            row.give(what, [i], [math.nan])

    def weigh(self, row: Row) -> None:
        """Give a row the weights of the small leaves, those of FSDP as shards only."""
        unseen(self._weigh, row)

    def _weigh(self, row: Row) -> None:
        for i in self.small:
            tensor = self.tensors[i]
            inner = tensor if type(tensor) in PLAIN else local(tensor)
            if readable(inner) and self._is_small(i, inner):
                row.take_leaves("weight", [~i], [inner.detach()])

    # --- whose they are ------------------------------------------------------------------------

    def devices(self) -> set[torch.device]:
        """Return the devices that the leaves are on now."""
        return {tensor.device for tensor in self.tensors}

    def owns(self, owner: Any) -> bool:
        """Return whether any of an optimizer's, a module's or a list's tensors is recorded."""
        known = self._owners.get(id(owner))
        if known is not None and known() is owner:
            return True
        owned = any(id(tensor) in self._index for tensor in _tensors(owner))
        if owned and not isinstance(owner, list | tuple):
            with contextlib.suppress(TypeError):  # it has slots
                self._owners[id(owner)] = ref(owner)
        return owned

    def owned(self, owner: Any) -> list[int]:
        """Return the recorded leaves among an optimizer's, a module's or a list's tensors."""
        index = self._index
        return [index[id(tensor)] for tensor in _tensors(owner) if id(tensor) in index]

    def with_grad(self, owner: Any, *, sharded: bool = False) -> list[int]:
        """Return the owned leaves that have a `.grad`; with `sharded`, one that is a part of a tensor.

        What changes many of those at once counts no version.
        """
        grads = [(i, self.tensors[i].grad) for i in self.owned(owner)]
        there = [(i, grad) for i, grad in grads if grad is not None]
        return [i for i, grad in there if not sharded or local(grad) is not grad]

    def know(self, tensor: torch.Tensor, i: int) -> None:
        """Take this tensor for that leaf: a module whose weights FSDP has put together has it as a parameter."""
        self._index.setdefault(id(tensor), i)

    def let_go(self, tensors: Iterable[Any]) -> list[int]:
        """Hold no weak reference to these; return the leaves whose `.grad` they are."""
        ids = {id(tensor) for tensor in tensors}
        seen = [(i, last) for i, (_, last, _) in self._seen.items() if last is not None]
        found = [i for i, last in seen if id(last()) in ids]
        for i in found:
            self._seen[i] = (self.tensors[i], None, 0)
        return found

    def close(self) -> None:
        """Take our hooks away."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """Let go of every tensor."""
        self.running = None
        for held in (self.tensors, self._seen, self._index, self._owners):
            held.clear()
        self.named.forget()

    def parameters(self, owned: list[list[int]]) -> list[Parameter]:
        """Return the leaves as data, as they are now; `owned` are those of each optimizer."""
        owners: dict[int, list[int]] = {}
        for index, leaves in enumerate(owned):
            for i in dict.fromkeys(leaves):
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
        """Return one of them; a file asks for all at each chunk, and they seldom change."""
        named, inner = self.named, tensor if type(tensor) in PLAIN else local(tensor)
        aliases, requires_grad = tuple(named.aliases[i]), tensor.requires_grad
        key = (
            *(inner.shape, tensor.dtype, tensor.device, requires_grad),
            *(optimizers, aliases),
        )
        if i not in self._described or self._described[i][0] != key:
            whole = named.shards.wholes.get(i)
            shape = self._shapes[i] if i in self.small else tuple(inner.shape)
            parameter = Parameter(
                named.names[i],
                shape,
                str(tensor.dtype).removeprefix("torch."),
                str(tensor.device),
                named.groups[i],
                aliases,
                optimizers,
                requires_grad or whole is not None,
                unsharded_of="" if whole is None else named.names[whole],
            )
            self._described[i] = key, parameter
        return self._described[i][1]


def _is_what_came(grad: torch.Tensor, place: int, version: int) -> bool:
    """Return whether a `.grad` is still what autograd made of a tensor in this place and version.

    That is the tensor itself, or a copy, which is written once at most.
    """
    if grad.data_ptr() == place:
        return grad._version == version
    return grad._version <= 1


def _tensors(owner: Any) -> Iterable[Any]:
    if isinstance(owner, torch.nn.Module):
        return owner.parameters()
    return targets.parameters(owner) if targets.is_optimizer(owner) else owner
