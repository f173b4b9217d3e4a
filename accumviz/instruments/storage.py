"""Which tensors hold numbers that may be read, and how to read them so that nobody's code runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)
_SPARSE = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
# Devices without numbers, and those where reading one runs, and waits for, all that was put off.
_UNREAD = {"meta", "lazy", "xla", "hpu", "vulkan"}
# Devices whose storages do not tell their size (backends written in Python); a released one looks like any other.
UNSIZED: set[str] = set()
_functorch: Any = getattr(torch._C, "_functorch", None)
_wrapped: Callable[[torch.Tensor], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", lambda _: False)
_transform: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", lambda: None)


def readable(tensor: Any) -> bool:
    """Tell whether a tensor's numbers can be read: nothing is computed, and no code but torch's own runs.

    Not those of a subclass (DTensor, fake tensors), of a tensor inside a transform of
    `torch.func` or a compilation, of a quantized, nested or meta tensor, and not those of a
    tensor whose storage was released, as FSDP does with parameters that it has gathered:
    reading there ends the process.

    >>> w = torch.ones(2)
    >>> readable(w), readable(torch.ones(2, device="meta"))
    (True, False)
    >>> released = w.untyped_storage().resize_(0)
    >>> readable(w)
    False
    """
    if type(tensor) not in PLAIN or torch.compiler.is_compiling():
        return False
    if tensor.device.type in _UNREAD or tensor.is_quantized or tensor.is_nested:
        return False
    if _transform() is not None or _wrapped(tensor) or tensor._is_zerotensor():
        return False
    try:
        return _stored(tensor)
    except (RuntimeError, NotImplementedError):  # opaque layouts
        return False


def _stored(tensor: torch.Tensor) -> bool:
    layout = tensor.layout
    if layout is torch.strided:
        if tensor.numel() == 0 or tensor.device.type in UNSIZED:
            return True
        span = tensor.numel()
        if not tensor.is_contiguous():
            span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return (tensor.storage_offset() + span) * tensor.element_size() <= tensor.untyped_storage().nbytes()
    if layout is torch.sparse_coo:
        return _stored(tensor._indices()) and _stored(tensor._values())
    return layout in _SPARSE and all(_stored(getattr(tensor, part)()) for part in (*_SPARSE[layout], "values"))


class Quietly:
    """Within it, what we do to tensors is seen by no mode, subclass or graph of the user's.

    >>> with Quietly():
    ...     torch.is_grad_enabled()
    False
    """

    def __enter__(self) -> None:
        self._guards = [torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()]
        for guard in self._guards:
            guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(kind, error, trace)
