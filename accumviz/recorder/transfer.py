"""Read norms and elements of tensors: check that they can be read, reduce them in place, copy them without waiting.

Training never waits for them, and no code of the user's runs.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

_HALF = (torch.float16, torch.bfloat16)
_FLOAT, _STRIDED = torch.float32, torch.strided
# So many elements are summed up in their own precision.
BLOCK = 1 << 16
# Pinned memory costs a call that may wait for the device: so one piece of it for many events.
_PIECE, _ALIGNED = 1 << 20, 16
# Where a copy to pinned memory runs behind the caller's back. Elsewhere numbers stay on the device until they are read.
ASYNCHRONOUS = {"cuda"}


class Wire:
    """Copies numbers to the host without waiting, in the order in which they are sent.

    Each copy runs on the stream that is current where it is sent, behind what computed the
    numbers. `sent` counts the calls of `send`; what the call of that number sent has arrived once
    `arrived()` is as large.

    >>> wire = Wire()
    >>> [part.tolist() for part in wire.send([[torch.tensor([1.0, 2.0])], [torch.tensor(3.0), torch.tensor(4.0)]])]
    [[1.0, 2.0], [3.0, 4.0]]
    >>> wire.sent, wire.arrived()
    (1, 1)
    """

    def __init__(self) -> None:
        self.sent = 0
        self._arrived = 0
        self._piece: torch.Tensor | None = None
        self._at = 0
        # The streams on which something was sent since the last mark, and the marks that were not passed yet.
        self._streams: dict[int, Any] = {}
        self._marks: list[tuple[int, list[Any]]] = []
        self._lock = threading.Lock()  # hooks run on one thread per device

    def open(self, devices: set[torch.device]) -> None:
        """Take the first piece of pinned memory before training, not during it."""
        if any(device.type in ASYNCHRONOUS for device in devices):
            self._piece = pinned(_PIECE)

    def send(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Send tensors of at most one dimension, as they are now; each part is of one device and dtype.

        Returns for each part one flat tensor, to be read once it has arrived.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, part in enumerate(parts):
            groups.setdefault((part[0].device, part[0].dtype), []).append(place)
        found: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(parts)
        with self._lock:
            self.sent += 1
            for (device, _), places in groups.items():
                members = [tensor for place in places for tensor in parts[place]]
                flat = self._copied(members, device)
                lengths = [
                    sum(tensor.numel() for tensor in parts[place]) for place in places
                ]
                for place, end, length in zip(
                    places, itertools.accumulate(lengths), lengths, strict=True
                ):
                    found[place] = flat[end - length : end]
        return found

    def _copied(
        self, members: list[torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        flat = (
            torch.hstack(members).detach()
            if len(members) > 1
            else members[0].detach().reshape(-1)
        )
        if device.type not in ASYNCHRONOUS:
            return flat if len(members) > 1 else flat.clone()
        stream = current_stream(device)
        self._streams[hash(stream)] = stream
        size = flat.numel() * flat.element_size()
        if self._piece is None or self._at + size > self._piece.numel():
            self._piece, self._at = pinned(max(_PIECE, size)), 0
        start, self._at = self._at, self._at + -(-size // _ALIGNED) * _ALIGNED
        return (
            self._piece[start : start + size]
            .view(flat.dtype)
            .copy_(flat, non_blocking=True)
        )

    def arrived(self) -> int:
        """The number of the last call whose numbers can be read without waiting."""
        with self._lock:
            while self._marks and all(event.query() for event in self._marks[0][1]):
                self._arrived = self._marks.pop(0)[0]
            if not self._streams and not self._marks:
                self._arrived = self.sent
            elif not self._marks:
                self._mark()
            return self._arrived

    def _mark(self) -> None:
        self._marks.append(
            (self.sent, [mark(stream) for stream in self._streams.values()])
        )
        self._streams.clear()

    def wait(self) -> int:
        """Wait until all that was sent has arrived; returns its number."""
        with self._lock:
            if self._streams:
                self._mark()
            for number, events in self._marks:
                for event in events:
                    event.synchronize()
                self._arrived = number
            self._marks.clear()
            self._arrived = self.sent
            return self._arrived


# What the tests replace to run all this without CUDA.
def pinned(size: int) -> torch.Tensor:
    """Host memory into which a device can write by itself."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def current_stream(device: torch.device) -> Any:
    """The stream on which the caller's work for this device goes."""
    return torch.cuda.current_stream(device)


def mark(stream: Any) -> Any:
    """An event that is passed when what the stream was given so far is done."""
    return stream.record_event()


def keep_for_stream(tensors: Sequence[torch.Tensor]) -> None:
    """See to it that the memory of tensors made on other streams is not reused before the current one has read it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def numbers(host: torch.Tensor) -> np.ndarray:
    """What has arrived, as a flat array."""
    host = host.cpu()
    # numpy knows no bfloat16
    return np.asarray((host.float() if host.dtype is torch.bfloat16 else host).numpy())


def host_norms(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return the 2-norms of tensors in host memory.

    They are summed up block by block, in double precision between blocks: torch's own norm of ten million float32 of
    0.1 is off by 0.8 %, and of half precision it makes a copy in single precision first.

    >>> host_norms([torch.tensor([3.0, 4.0]), torch.ones(4, 4, dtype=torch.bfloat16)])
    [5.0, 4.0]
    """
    norms = []
    for tensor in tensors:
        if tensor.dtype is _FLOAT and _is_flat(tensor):
            flat = tensor.detach().view(-1)
            blocks = (flat,) if len(flat) <= BLOCK else torch.split(flat, BLOCK)
            # For 128 elements, half the time of `_foreach_norm`
            squares = [torch.dot(block, block).item() for block in blocks]
            norms.append(math.sqrt(math.fsum(squares)))
        else:
            norms.append(_host_norm(tensor.detach()))
    return norms


def _host_norm(tensor: torch.Tensor) -> float:
    """Return the norm of a tensor of any dtype and layout in host memory."""
    values = tensor if tensor.layout is _STRIDED else tensor.coalesce().values()
    blocks = torch.split(values.view(-1), BLOCK) if _is_flat(values) else (values,)
    reduced = torch._foreach_norm(blocks, 2.0, dtype=_precision(values.dtype))
    return math.hypot(*[one.item() for one in reduced])


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.layout is _STRIDED and tensor.is_contiguous()


def _precision(dtype: torch.dtype) -> torch.dtype | None:
    """Return in what to sum squares up: those of half precision fit into single precision."""
    return torch.float32 if dtype in _HALF else None


def device_norms(
    leaves: list[int], tensors: list[torch.Tensor]
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Yield leaves and the 2-norms of their tensors on a device, computed there, in few kernels.

    There is one pair for each device and dtype.

    >>> list(device_norms([7, 8], [torch.tensor([3.0, 4.0]), torch.ones(4)]))
    [([7, 8], [tensor(5.), tensor(2.)])]
    """
    groups: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
    for i, tensor in zip(leaves, tensors, strict=True):
        places, members = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        places.append(i)
        values = tensor if tensor.layout is _STRIDED else tensor._values()
        members.append(values.detach())
    for (_, dtype), (places, members) in groups.items():
        reduced = torch._foreach_norm(members, 2.0, dtype=_precision(dtype))
        yield places, list(reduced)


# --- what can be read --------------------------------------------------------------------------

PLAIN = (torch.Tensor, torch.nn.Parameter)
# Devices without numbers, and those where reading one runs, and waits for, all that was put off.
_UNREAD = {"meta", "lazy", "xla", "hpu", "vulkan"}
# Devices whose storages do not tell their size (backends written in Python); a released one looks like any other.
UNSIZED: set[str] = set()
_functorch: Any = getattr(torch._C, "_functorch", None)
_wrapped: Callable[[torch.Tensor], bool] = getattr(
    _functorch, "is_functorch_wrapped_tensor", lambda _: False
)
_transform: Callable[[], Any] = getattr(
    _functorch, "peek_interpreter_stack", lambda: None
)


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
            if type(tensor) not in PLAIN or tensor.device.type in _UNREAD:
                return False
            if tensor.is_quantized or tensor.is_nested or _wrapped(tensor):
                return False
            if tensor._is_zerotensor():
                return False
            if tensor.layout is not _STRIDED:
                if not _is_whole(tensor):
                    return False
            elif tensor.numel() and tensor.device.type not in UNSIZED:
                span = tensor.numel() if tensor.is_contiguous() else _span(tensor)
                end = (tensor.storage_offset() + span) * tensor.element_size()
                if end > tensor.untyped_storage().nbytes():
                    return False
    except (RuntimeError, NotImplementedError):  # opaque layouts
        return False
    return True


def plainly(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass that keeps its numbers as any tensor does, as a plain one; any other as it is.

    What a subclass without a dispatch of its own may do to functions, it cannot do to storage.

    >>> class Named(torch.Tensor): ...
    >>> readable(loss := torch.ones(()).as_subclass(Named)), readable(plainly(loss))
    (False, True)
    """
    if (
        type(tensor) in PLAIN
        or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        return tensor
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def _is_whole(sparse: torch.Tensor) -> bool:
    """Return whether a sparse tensor's values can be read."""
    if sparse.layout is not torch.sparse_coo:
        return False
    # Elsewhere, what is there twice is added up only by asking the device, and waiting.
    once = sparse.is_cpu or sparse.is_coalesced()
    return once and readable(sparse._indices(), sparse._values())


def _span(tensor: torch.Tensor) -> int:
    """Return over how many elements of its storage a tensor's own are spread."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call this where modes of the user's do not see what it does to tensors."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if not modes:
        return function(*args)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return function(*args)


class Quietly:
    """Within it, what we do to tensors is seen by no mode, subclass or graph of the user's.

    >>> with Quietly():
    ...     torch.is_grad_enabled()
    False
    """

    def __enter__(self) -> None:
        self._guards = [
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
        ]
        for guard in self._guards:
            guard.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(kind, error, trace)
