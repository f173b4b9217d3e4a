"""Read norms and elements of tensors: check that they can be read, reduce them in place, copy them without waiting.

Training never waits for them, and no code of the user's runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_STRIDED = torch.strided
_item = Tensor.item
# So many elements are summed up in their own precision: the norm of so many equal ones is off by 6e-6.
BLOCK = 1 << 16
# About so many elements of a weight show whether a step moves it.
_ELEMENTS = 256
# Pinned memory costs a call that may wait for the device: so one piece of it for many events.
_PIECE, _ALIGNED = 1 << 20, 16
# Where a copy to pinned memory runs behind the caller's back. Elsewhere numbers stay on the device until they are read.
ASYNCHRONOUS = {"cuda"}


class Wire:
    """Copies numbers to the host without waiting, each behind what computed it, on the stream that is current.

    >>> host, mark = Wire().send([torch.tensor([1.0, 2.0]), torch.tensor(3.0)])
    >>> host.tolist(), mark
    ([1.0, 2.0, 3.0], None)
    """

    def __init__(self) -> None:
        self._piece: Tensor | None = None
        self._at = 0
        self._lock = threading.Lock()  # hooks run on one thread per device

    def open(self, devices: set[torch.device]) -> None:
        """Take the first piece of pinned memory before training, not during it."""
        needed = any(device.type in ASYNCHRONOUS for device in devices)
        if needed and self._piece is None:
            self._piece = pinned(_PIECE)

    def send(self, tensors: list[Tensor]) -> tuple[Tensor, Any]:
        """Send tensors of one device and dtype, as they are now.

        Returns all their elements, and the mark that is passed once they have arrived. Without a mark they stay on
        their device until they are read.
        """
        flat = _joined(tensors)
        if flat.device.type not in ASYNCHRONOUS:
            return flat, None
        size = flat.numel() * flat.element_size()
        with self._lock:
            if self._piece is None or self._at + size > self._piece.numel():
                self._piece, self._at = pinned(max(_PIECE, size)), 0
            room = self._piece[self._at : self._at + size]
            self._at += -(-size // _ALIGNED) * _ALIGNED
        host = room.view(flat.dtype).copy_(flat, non_blocking=True)
        return host, mark(current_stream(flat.device))


wire = Wire()


def _joined(tensors: list[Tensor]) -> Tensor:
    """Copy the elements of tensors of one device and dtype into a new one."""
    with torch.no_grad():
        if all(tensor.dim() == 0 for tensor in tensors):  # norms, of hundreds of leaves
            return torch.stack(tensors)
        dense = [one if one.layout is _STRIDED else one.to_dense() for one in tensors]
        return torch.cat([one.reshape(-1) for one in dense])


# What the tests replace to run all this without CUDA.
def pinned(size: int) -> Tensor:
    """Host memory into which a device can write by itself."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def current_stream(device: torch.device) -> Any:
    """The stream on which the caller's work for this device goes."""
    return torch.cuda.current_stream(device)


def mark(stream: Any) -> Any:
    """An event that is passed when what the stream was given so far is done."""
    return stream.record_event()


def keep_for_stream(tensor: Tensor) -> None:
    """See to it that the memory of a tensor made on another stream is not reused before the current one has read it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def host_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the 2-norms of tensors of one dtype in host memory.

    >>> host_norms([torch.tensor([3.0, 4.0]), torch.ones(4, 4)])
    [5.0, 4.0]
    """
    short: list[Tensor] = []
    large: dict[int, float] = {}
    for place, tensor in enumerate(tensors):
        if tensor.layout is _STRIDED and tensor.numel() <= BLOCK:
            short.append(tensor)
        else:
            large[place] = _norm(tensor)
    # One call for all takes half the time of one for each.
    norms = list(map(_item, device_norms(short))) if short else []
    for place, norm in large.items():
        norms.insert(place, norm)
    return norms


def _norm(tensor: Tensor) -> float:
    """Return the 2-norm of a large tensor.

    It is summed up block by block, in double precision between blocks: torch's own norm of ten million float32 of 0.1
    is off by 0.8 %, and of half precision it makes a copy in single precision first.
    """
    values = tensor.detach()
    if values.layout is not _STRIDED:
        values = values.coalesce().values()
    blocks: Sequence[Tensor] = (values,)
    if values.is_contiguous():
        blocks = torch.split(values.view(-1), BLOCK)
        if values.dtype is torch.float32:
            squares = [torch.dot(block, block).item() for block in blocks]
            return math.sqrt(math.fsum(squares))
    return math.hypot(*[norm.item() for norm in device_norms(blocks)])


def device_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norms of tensors of one dtype, computed on their device, in few kernels.

    >>> device_norms([torch.tensor([3.0, 4.0]), torch.ones(4)])
    [tensor(5.), tensor(2.)]
    """
    members = []
    for tensor in tensors:
        values = tensor if tensor.layout is _STRIDED else tensor._values()
        members.append(values.detach() if values.requires_grad else values)
    # Squares of half precision fit into single precision.
    dtype = torch.float32 if members[0].dtype in HALF else None
    return list(torch._foreach_norm(members, 2.0, dtype=dtype))


# --- what a step moves -------------------------------------------------------------------------


class StepSample:
    """Elements of 16-bit weights before a step, to see how many of them it leaves as they are."""

    def __init__(self, weights: Iterable[Any]) -> None:
        halves = [w for w in weights if w.dtype in HALF and w.grad is not None]
        self._weights: list[Tensor] = []
        self._before: list[Tensor] = []
        self._given: list[Tensor] = []
        for whole in halves[:: max(1, len(halves) // 2)]:
            weight, grad = local(whole), local(whole.grad)
            is_here = grad.device == halves[0].device
            if is_here and _is_dense(weight) and _is_dense(grad):
                self._weights.append(weight)
                self._before.append(_sample(weight).clone())
                self._given.append(_sample(grad) != 0)

    def details(self) -> dict[str, Any]:
        """Say which share of the elements with a gradient the step has left bit for bit as they were."""
        if not self._weights:
            return {}
        now = torch.cat([_sample(weight) for weight in self._weights])
        given = torch.cat(self._given)
        left = (now == torch.cat(self._before)) & given
        return {"unmoved": left.sum() / given.sum().clamp(min=1)}


def _is_dense(tensor: Tensor) -> bool:
    """Return whether some elements can be read without a copy of the whole."""
    return readable(tensor) and tensor.layout is _STRIDED and tensor.is_contiguous()


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)]


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor; any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


# --- what can be read --------------------------------------------------------------------------

PLAIN = (Tensor, torch.nn.Parameter)
# Devices without numbers, and those where reading one runs, and waits for, all that was put off.
_UNREAD = {"meta", "lazy", "xla", "hpu", "vulkan"}
# Devices whose storages do not tell their size (backends written in Python); a released one looks like any other.
UNSIZED: set[str] = set()
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_transform = torch._C._functorch.peek_interpreter_stack


def readable(*tensors: Any) -> bool:
    """Tell whether the numbers of all these can be read: nothing is computed, and no code but torch's own runs.

    Not those of a subclass (DTensor, fake tensors), of a tensor inside a transform of
    `torch.func` or a compilation, of a quantized, nested or meta tensor, and not those of a
    tensor whose storage was released, as FSDP does with parameters that it has gathered:
    reading there ends the process.

    >>> w = torch.ones(2)
    >>> readable(w), readable(w, torch.ones(2, device="meta"))
    (True, False)
    >>> released = w.untyped_storage().resize_(0)
    >>> readable(w)
    False
    """
    if torch.compiler.is_compiling() or _transform() is not None:
        return False
    try:
        for tensor in tensors:
            if type(tensor) not in PLAIN or _wrapped(tensor):
                return False
            if any((tensor.is_quantized, tensor.is_nested, tensor._is_zerotensor())):
                return False
            # `device` makes an object, which takes longer than all the rest.
            is_usual = tensor.is_cpu or tensor.is_cuda
            # Of most tensors this is all, without a call of ours for each.
            if is_usual and tensor.layout is _STRIDED and tensor.is_contiguous():
                end = tensor.storage_offset() + tensor.numel()
                if end * tensor.element_size() <= tensor.untyped_storage().nbytes():
                    continue
            if not _is_whole(tensor):
                return False
    except (RuntimeError, NotImplementedError):  # opaque layouts
        return False
    return True


def plainly(tensor: Tensor) -> Tensor:
    """A tensor of a subclass that keeps its numbers as any tensor does, as a plain one; any other as it is.

    What a subclass without a dispatch of its own may do to functions, it cannot do to storage.

    >>> class Named(Tensor): ...
    >>> readable(loss := torch.ones(()).as_subclass(Named)), readable(plainly(loss))
    (False, True)
    """
    if (
        type(tensor) in PLAIN
        or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        return tensor
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def _is_whole(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor can be read, whatever its device and layout."""
    device = tensor.device.type
    if device in _UNREAD:
        return False
    if tensor.layout is torch.sparse_coo:
        # Elsewhere, what is there twice is added up only by asking the device, and waiting.
        once = tensor.is_cpu or tensor.is_coalesced()
        return once and readable(tensor._indices(), tensor._values())
    if tensor.layout is not _STRIDED:
        return False
    # Over so many elements of the storage the tensor's own are spread.
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        span += (size - 1) * stride
    end = (tensor.storage_offset() + span) * tensor.element_size()
    if end <= tensor.untyped_storage().nbytes():
        return True
    return not tensor.numel() or device in UNSIZED


def unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call this where modes of the user's do not see what it does to tensors."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if not modes:
        return function(*args)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return function(*args)
