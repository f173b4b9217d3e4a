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
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Observer(Protocol):
    """What an open recording is told; `frame` is where to start looking for the user's line."""

    def failed(self, error: Exception) -> None: ...
    def backward_begins(self, frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def backward_ends(self, token: Any, error: str) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None: ...
    def step_ends(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None: ...
    def step_skipped(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None: ...
    def change_begins(self, tensors: Any) -> bool: ...
    def captures(self, frame: FrameType) -> None: ...
    def replayed(self, frame: FrameType) -> None: ...
    def change_ends(self, kind: str, frame: FrameType, owner: Any, tensors: Any, details: dict[str, Any]) -> None: ...


Around = Callable[[Callable[..., Any]], Callable[..., Any]]
# Replaced, never changed: whoever is told goes through the recordings that were open when it happened.
_open: tuple[Observer, ...] = ()
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
# Within zero_grad and clip, further calls of the same kind are the same event.
_inside = threading.local()
scalers: weakref.WeakSet[Any] = weakref.WeakSet()


def enter(observer: Observer) -> None:
    """Tell this observer what happens from now on."""
    global _open  # noqa: PLW0603 - torch is patched once for the whole process
    with _lock:
        if not _open:
            _install()
        _open = (*_open, observer)


def leave(observer: Observer) -> None:
    """Stop telling it; the last one out leaves torch as it was."""
    global _open  # noqa: PLW0603 - as above
    with _lock:
        _open = tuple(other for other in _open if other is not observer)
        if not _open:
            while _undo:
                _undo.pop()()


def _told() -> tuple[Observer, ...]:
    """The open recordings; nobody while a CUDA graph is captured, which would capture what we read, too."""
    observers = _open
    if observers and capturing():
        _tell(observers, "captures", sys._getframe(2))
        return ()
    return observers


def capturing() -> bool:
    """Whether what is done now goes into a CUDA graph instead of being done."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _tell(observers: tuple[Observer, ...], what: str, *args: Any) -> None:
    for observer in observers:
        try:
            getattr(observer, what)(*args)
        except Exception as failure:
            observer.failed(failure)


def _install() -> None:
    _leave_to_python()
    _wrap(torch, "compile", _compiling)
    _wrap(torch.cuda.CUDAGraph, "replay", _replaying)
    _wrap(torch.autograd, "backward", _backward)
    _wrap(torch.optim.Optimizer, "zero_grad", _zeroing)
    _wrap(torch.nn.Module, "zero_grad", _zeroing)
    # clip_grad_norm_ ends in a function of its own that changes the grads
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        _wrap_decorated(getattr(clip_grad, name, None), _clipping)
    _wrap(torch.amp.GradScaler, "scale", _scaling)
    _wrap(torch.amp.GradScaler, "unscale_", _unscaling)
    _wrap(torch.amp.GradScaler, "_maybe_opt_step", _maybe_stepping)
    _undo.append(register_optimizer_step_pre_hook(_step_begins).remove)
    _undo.append(register_optimizer_step_post_hook(_step_ends).remove)


def _wrap(owner: Any, name: str, around: Around) -> None:
    original = getattr(owner, name, None)
    if original is None:  # a private helper that another torch version lacks: the change is still seen as an edit
        return
    wrapper = functools.update_wrapper(around(original), original)

    def undo() -> None:
        # Somebody who wrapped ours in the meantime keeps working: ours passes straight through.
        if getattr(owner, name, None) is wrapper:
            setattr(owner, name, original)

    setattr(owner, name, wrapper)
    _undo.append(undo)


def _wrap_decorated(decorated: Any, around: Around) -> None:
    """Wrap a function inside its `no_grad` decorator, where those who imported it by name call it too."""
    original = getattr(decorated, "__wrapped__", None)
    for cell in getattr(decorated, "__closure__", None) or ():
        if original is not None and cell.cell_contents is original:
            cell.cell_contents = around(original)
            _undo.append(functools.partial(setattr, cell, "cell_contents", original))


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    inside = torch._C._current_graph_task_id

    def backward(*args: Any, **kwargs: Any) -> Any:
        observers = _told()
        # Inside the engine (a reentrant checkpoint), a backward is part of the one that is running.
        if not observers or inside() != -1:
            return original(*args, **kwargs)
        if args and type(args[0]) is not torch.Tensor and isinstance(args[0], Iterator):
            args = (tuple(args[0]), *args[1:])  # it can be read once, and torch has to read it
        tokens, error = [], ""
        frame = sys._getframe(1)
        for observer in observers:
            try:
                tokens.append(observer.backward_begins(frame, args, kwargs))
            except Exception as failure:
                tokens.append(None)
                observer.failed(failure)
        try:
            return original(*args, **kwargs)
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
            raise
        finally:
            for observer, token in zip(observers, tokens, strict=True):
                if token is not None:
                    try:
                        observer.backward_ends(token, error)
                    except Exception as failure:
                        observer.failed(failure)

    return backward


def _step_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _tell(_told(), "step_begins", optimizer, sys._getframe(1))


def _step_ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _tell(_told(), "step_ends", optimizer, sys._getframe(1))


def _observed(
    kind: str, owner: Any, tensors: Any, details: dict[str, Any], original: Callable[..., Any], *args: Any
) -> Any:
    """Run a call that changes `.grad` in place, and tell those recordings whose tensors it may touch."""
    concerned = []
    for observer in _told():
        try:
            if observer.change_begins(tensors):
                concerned.append(observer)
        except Exception as failure:
            observer.failed(failure)
    setattr(_inside, kind, True)
    try:
        return original(*args)
    finally:
        setattr(_inside, kind, False)
        for observer in concerned:
            try:
                observer.change_ends(kind, sys._getframe(2), owner, tensors, dict(details))
            except Exception as failure:
                observer.failed(failure)


def _zeroing(original: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(owner: Any, set_to_none: bool = True) -> Any:
        if not _open or getattr(_inside, "zero_grad", False):
            return original(owner, set_to_none)
        return _observed("zero_grad", owner, owner, {"set_to_none": set_to_none}, original, owner, set_to_none)

    return zero_grad


def _clipping(original: Callable[..., Any]) -> Callable[..., Any]:
    value = original.__name__ == "clip_grad_value_"
    names = ("clip_value",) if value else ("max_norm", "total_norm")

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not _open or getattr(_inside, "clip", False):
            return original(parameters, *args, **kwargs)
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        details = {"by": "value" if value else "norm"} | dict(zip(names, args, strict=False))
        details |= {k: v for k, v in kwargs.items() if k in names}
        return _observed("clip", None, tensors, details, functools.partial(original, **kwargs), tensors, *args)

    return clip


def _scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scalers.add(scaler)
        return original(scaler, *args, **kwargs)

    return scale


def _unscaling(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale(scaler: Any, optimizer: torch.optim.Optimizer) -> Any:
        if not _open or not getattr(scaler, "_enabled", True):  # switched off, it does nothing
            return original(scaler, optimizer)
        details = {"amp_scale": getattr(scaler, "_scale", None)}
        return _observed("unscale", optimizer, optimizer, details, original, scaler, optimizer)

    return unscale


def _maybe_stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
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
                _tell(_told(), "step_skipped", optimizer, sys._getframe(1))

    return maybe_step


def _leave_to_python() -> None:
    """Have the compiler, once it is there, run what is ours as it stands, between the parts that it compiles.

    Otherwise it would trace us into the user's step, and stop at what cannot be traced.
    """
    if "torch._dynamo" in sys.modules:
        from torch._dynamo import trace_rules

        add = getattr(trace_rules, "add", None)
        if add is not None and __package__ not in _left:
            _left.add(__package__)
            add(__package__)


_left: set[str] = set()


def _compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - its name in torch
        compiled = original(*args, **kwargs)
        _leave_to_python()
        return compiled

    return compile


def _replaying(original: Callable[..., Any]) -> Callable[..., Any]:
    def replay(graph: Any) -> Any:
        result = original(graph)
        _tell(_told(), "replayed", sys._getframe(1))
        return result

    return replay
