"""The norm of gradients of which each rank holds a part, as torch itself reduces it while it clips.

`clip_grad_norm_` of sharded gradients is given their norm as a DTensor that may not be reduced yet:
each rank knows the norm of its part. Asking for the whole would be a collective that the user's
program does not have. But clipping asks for it, so the answer passes by here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from accumviz.instruments.sharded import local

_PARTIALS = (
    ("torch.distributed.tensor.placement_types", "Partial"),
    ("torch.distributed.tensor._ops._math_ops", "_NormPartial"),
)
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
# The clips that run now, and their threads; replaced, never changed.
_open: tuple[tuple[int, Norm], ...] = ()


class Norm:
    """The norm with which a clip that begins now is called; `end`, after it, tells the whole one.

    No collective is added and none is changed.

    >>> Norm(torch.tensor(2.0)).end()
    tensor(2.)
    """

    def __init__(self, total_norm: torch.Tensor) -> None:
        self._whole: torch.Tensor | None = None
        self._part: torch.Tensor | None = None
        if all(placement.is_replicate() for placement in getattr(total_norm, "placements", ())):
            self._whole = local(total_norm)
        else:
            self._part = local(total_norm)
            _watch(self)

    def end(self) -> torch.Tensor | None:
        """A plain tensor of one element; None where the clip did not ask for the whole. Call it once."""
        if self._part is not None:
            self._part = None
            _unwatch(self)
        # What a collective gives comes in a wrapper that waits for it; the clip has waited.
        wait = getattr(self._whole, "trigger_wait", None)
        whole: torch.Tensor | None = self._whole if wait is None else wait()
        return whole

    def reduced(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Take a reduction's result, if it is of this norm; on a mesh of two dimensions a second may follow."""
        if part is self._part:
            self._part = self._whole = whole


def _watch(norm: Norm) -> None:
    """Have each kind of partial value that DTensor knows say what it was reduced to."""
    global _open  # noqa: PLW0603 - the classes are the process's
    with _lock:
        if not _open:
            for module, name in _PARTIALS:
                kind = getattr(sys.modules.get(module), name, None)
                original = vars(kind).get("_reduce_value") if isinstance(kind, type) else None
                if original is not None:
                    wrapper = _telling(original)
                    setattr(kind, "_reduce_value", wrapper)  # noqa: B010 - of a class that is looked up by its name
                    _undo.append(functools.partial(_restore, kind, wrapper, original))
        _open = (*_open, (get_ident(), norm))


def _unwatch(norm: Norm) -> None:
    global _open  # noqa: PLW0603 - as above
    with _lock:
        _open = tuple(other for other in _open if other[1] is not norm)
        while not _open and _undo:
            _undo.pop()()


def _restore(kind: Any, wrapper: Any, original: Any) -> None:
    if vars(kind).get("_reduce_value") is wrapper:
        kind._reduce_value = original


def _telling(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def _reduce_value(placement: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole = original(placement, tensor, *args, **kwargs)
        with contextlib.suppress(Exception):
            for thread, norm in _open:
                if thread == get_ident():
                    norm.reduced(tensor, whole)
        return whole

    return _reduce_value
