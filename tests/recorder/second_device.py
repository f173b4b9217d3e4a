"""A second device on a machine that has none: the engine runs its nodes on a thread of its own, and copies come late.

PyTorch's registration for backends written in Python gives a device type, here `late`. Its tensors have
no memory: an operation runs on CPU tensors of the same sizes, strides and storages. What makes it a device
is real: autograd queues its nodes for the thread of that device, so that hooks run there, with no frame of
the user's below them. A copy to the host with `non_blocking=True` arrives only when its stream is waited
for; any other way to get a number onto the host is counted in `waits`, because on a GPU it would wait.

Register it before the first backward of a process: only then does the engine start the thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from accumviz.recorder import transfer

NAME = "late"
waits: Counter[str] = Counter()
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
# A device storage's address -> a way to ask whether it is gone, and the memory behind it.
_memory: dict[int, tuple[Any, torch.UntypedStorage]] = {}
_library: Any = None
_aten = torch.ops.aten
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


class Stream:
    """Copies to the host in order, each done when somebody waits for it, or for one behind it."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], Any]] = []
        self.done = 0

    def record_event(self) -> Mark:
        return Mark(self, self.done + len(self.queued))

    def run(self, count: int) -> None:
        while self.queued and self.done < count:
            self.queued.pop(0)()
            self.done += 1


class Mark:
    def __init__(self, stream: Stream, count: int) -> None:
        self.stream, self.count = stream, count

    def query(self) -> bool:
        return self.stream.done >= self.count

    def synchronize(self) -> None:
        self.stream.run(self.count)


stream = Stream()


def register() -> None:
    """Make the device, and tell the recorder that copies from it are asynchronous."""
    _setup_privateuseone_for_python_backend(NAME)
    global _library
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_run, "PrivateUse1")
    transfer.ASYNCHRONOUS.add(NAME)
    transfer.UNSIZED.add(NAME)
    # Not zeros: a number that is read before it arrived must not pass for one.
    transfer.pinned = lambda size: torch.full((size,), 0xAB, dtype=torch.uint8)
    transfer.current_stream = lambda device: stream
    transfer.mark = lambda of: of.record_event()


def alive() -> int:
    """Bytes of all tensors on the device."""
    for address, (weak, _) in list(_memory.items()):
        if torch.UntypedStorage._expired(weak):
            del _memory[address]
    return sum(storage.nbytes() for _, storage in _memory.values())


def _is_ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _view(base: torch.Tensor, size: Any, stride: Any, offset: Any) -> torch.Tensor:
    # The kernel of the meta device: it looks at no memory, and leaves the device as it is.
    view: torch.Tensor = _aten.as_strided.default.redispatch(_META, base, size, stride, offset)
    return view


def _made(data: torch.Tensor) -> torch.Tensor:
    base = torch._C._acc.create_empty_tensor(tuple(data.shape), data.dtype)
    storage = base.untyped_storage()
    _memory[storage._cdata] = storage._weak_ref(), data.untyped_storage()
    if base.stride() != data.stride() or data.storage_offset():
        return _view(base, data.shape, data.stride(), data.storage_offset())
    return base


def _data(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_ours(tensor):
        return tensor
    storage = _memory[tensor.untyped_storage()._cdata][1]
    with torch._C._AutoDispatchBelowAutograd():
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    data = _data(source)
    if _is_ours(source) and not _is_ours(target) and non_blocking:
        snapshot = data.clone()
        stream.queued.append(lambda: target.copy_(snapshot))
        return target
    if _is_ours(source) != _is_ours(target) and not non_blocking:
        waits["copy"] += 1
    _data(target).copy_(data)
    return target


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name
    if name in _WAITING:
        waits[name] += 1
    if op is _aten._copy_from.default:
        return _copied(*args, **kwargs)
    if op is _aten.as_strided.default:
        return _view(*args, *([args[0].storage_offset()] if len(args) < 4 else []), **kwargs)
    sources: dict[int, torch.Tensor] = {}

    def enter(value: Any) -> Any:
        if _is_ours(value):
            data = _data(value)
            sources[data.untyped_storage()._cdata] = value
            return data
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    written = [
        kwargs[argument.name] if argument.name in kwargs else args[place]
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.name in kwargs or place < len(args))
    ]

    def leave(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        address = value.untyped_storage()._cdata
        same = [t for t in written if _is_ours(t) and _memory[t.untyped_storage()._cdata][1]._cdata == address]
        if same:
            return same[0]
        if address in sources:
            return _view(sources[address], value.shape, value.stride(), value.storage_offset())
        return _made(value)

    given = tree_map(enter, (args, kwargs))
    with torch._C._AutoDispatchBelowAutograd():
        return tree_map(leave, op(*given[0], **given[1]))
