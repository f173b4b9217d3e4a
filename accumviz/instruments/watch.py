"""The few places in torch where `.grad` changes, wrapped while a recording is open and left as they were after.

Sources: torch.autograd.backward is what Tensor.backward calls; optimizer steps have global hooks
(torch.optim.optimizer.register_optimizer_step_pre_hook); zero_grad, clipping and the gradient
scaler have none, so they are wrapped. Each wrapper passes straight through when no recording is open.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Observer(Protocol):
    """What an open recording is told; `frame` is where to start looking for the user's line."""

    def failed(self, error: Exception) -> None: ...
    def backward_begins(self, frame: FrameType, roots: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
    def backward_ends(self, token: Any, error: BaseException | None) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None: ...
    def step_ends(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None: ...
    def step_skipped(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None: ...
    def change_begins(self, tensors: Any) -> bool: ...
    def change_ends(self, kind: str, frame: FrameType, owner: Any, details: dict[str, Any]) -> None: ...


_open: list[Observer] = []
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
# Within zero_grad and clip, further calls of the same kind are the same event.
_inside = threading.local()
scalers: weakref.WeakSet[Any] = weakref.WeakSet()


def enter(observer: Observer) -> None:
    """Tell this observer what happens from now on."""
    with _lock:
        if not _open:
            _install()
        _open.append(observer)


def leave(observer: Observer) -> None:
    """Stop telling it; the last one out leaves torch as it was."""
    with _lock:
        if observer in _open:
            _open.remove(observer)
        if not _open:
            while _undo:
                _undo.pop()()


def _tell(observer: Observer, what: str, *args: Any) -> Any:
    """Call one observer; its failure is its own, never the training's."""
    if observer in _open:
        try:
            return getattr(observer, what)(*args)
        except Exception as error:
            observer.failed(error)
    return None


def _install() -> None:
    _wrap(torch.autograd, "backward", _backward)
    _wrap(torch.optim.Optimizer, "zero_grad", _zeroing_optimizer)
    _wrap(torch.nn.Module, "zero_grad", _zeroing_module)
    # clip_grad_norm_ is often imported by name: what it calls inside its own module is not.
    _wrap(clip_grad, "_clip_grads_with_norm_", _clipping)
    for module in (clip_grad, torch.nn.utils):
        _wrap(module, "clip_grad_value_", _clipping)
    _wrap(torch.amp.GradScaler, "scale", _scaling)
    _wrap(torch.amp.GradScaler, "unscale_", _unscaling)
    _wrap(torch.amp.GradScaler, "_maybe_opt_step", _maybe_stepping)
    for handle in (
        register_optimizer_step_pre_hook(_step_begins),
        register_optimizer_step_post_hook(_step_ends),
    ):
        _undo.append(handle.remove)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:  # a private helper that another torch version lacks: the change is still seen as an edit
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _open:
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    def undo() -> None:
        # Somebody who wrapped ours in the meantime keeps working: ours passes straight through.
        if getattr(owner, name, None) is wrapper:
            setattr(owner, name, original)

    setattr(owner, name, wrapper)
    _undo.append(undo)


def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Inside the engine (a reentrant checkpoint), a backward is part of the one that is running.
    if torch._C._current_graph_task_id() != -1:
        return original(*args, **kwargs)
    tensors = args[0] if args else kwargs.get("tensors", ())
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    options = {name: value for name, value in kwargs.items() if value is not None}
    if len(args) > 2:
        options |= dict(zip(("retain_graph", "create_graph"), args[2:4], strict=False))
    frame = sys._getframe(1)
    tokens = [(observer, _tell(observer, "backward_begins", frame, roots, options)) for observer in tuple(_open)]
    error: BaseException | None = None
    try:
        return original(*args, **kwargs)
    except BaseException as caught:
        error = caught
        raise
    finally:
        for observer, token in reversed(tokens):
            if token is not None:
                _tell(observer, "backward_ends", token, error)


def _step_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for observer in tuple(_open):
        _tell(observer, "step_begins", optimizer, sys._getframe(1))


def _step_ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for observer in tuple(_open):
        _tell(observer, "step_ends", optimizer, sys._getframe(1))


def _observed(
    kind: str, tensors: Iterable[Any], owner: Any, details: dict[str, Any], original: Callable[..., Any], *args: Any
) -> Any:
    """Run a call that changes `.grad` in place, and tell those recordings whose tensors it may touch."""
    if getattr(_inside, kind, False):
        return original(*args)
    observers = [observer for observer in tuple(_open) if _tell(observer, "change_begins", tensors)]
    setattr(_inside, kind, True)
    try:
        return original(*args)
    finally:
        setattr(_inside, kind, False)
        for observer in observers:
            _tell(observer, "change_ends", kind, sys._getframe(2), owner, details)


def _zeroing_optimizer(original: Callable[..., Any], owner: Any, set_to_none: bool = True) -> Any:
    tensors = [p for group in owner.param_groups for p in group["params"]]
    return _observed("zero_grad", tensors, owner, {"set_to_none": set_to_none}, original, owner, set_to_none)


def _zeroing_module(original: Callable[..., Any], owner: Any, set_to_none: bool = True) -> Any:
    tensors = list(owner.parameters())
    return _observed("zero_grad", tensors, owner, {"set_to_none": set_to_none}, original, owner, set_to_none)


def _clipping(original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    value = original.__name__ == "clip_grad_value_"
    names = ("clip_value",) if value else ("max_norm", "total_norm")
    details = {"by": "value" if value else "norm"} | dict(zip(names, args, strict=False))
    details |= {k: v for k, v in kwargs.items() if k in names}
    return _observed("clip", tensors, None, details, functools.partial(original, **kwargs), tensors, *args)


def _scaling(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
    scalers.add(scaler)
    return original(scaler, *args, **kwargs)


def _unscaling(original: Callable[..., Any], scaler: Any, optimizer: torch.optim.Optimizer) -> Any:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    details = {"amp_scale": getattr(scaler, "_scale", None)}
    return _observed("unscale", tensors, optimizer, details, original, scaler, optimizer)


def _maybe_stepping(
    original: Callable[..., Any], scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> Any:
    stepped = False

    def note(*_: Any) -> None:
        nonlocal stepped
        stepped = True

    handle = optimizer.register_step_pre_hook(note)
    try:
        return original(scaler, optimizer, *args, **kwargs)
    finally:
        handle.remove()
        if not stepped:
            for observer in tuple(_open):
                _tell(observer, "step_skipped", optimizer, sys._getframe(1))
