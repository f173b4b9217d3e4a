"""The few places in torch where `.grad` changes, wrapped while a recording is open and left as they were after.

Sources: torch.autograd.backward is what Tensor.backward calls; optimizer steps have global hooks
(torch.optim.optimizer.register_optimizer_step_pre_hook); zero_grad, clipping and the gradient
scaler have none, so they are wrapped. Each wrapper is a door: it passes straight through when no
recording is open, calls what it wraps once, and keeps inside whatever of ours fails.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from accumviz.recorder import loaders, sessions
from accumviz.recorder.fsdp import Norm
from accumviz.recorder.sessions import Observer, Session

# Threads inside a torch.autograd.grad that is inside a backward: what it computes reaches no `.grad`.
differentiating: list[int] = []
scalers: weakref.WeakSet[Any] = weakref.WeakSet()
# The hooks of all optimizers in their order: one that was registered after ours may change `.grad`.
_of_all: dict[int, Any] = getattr(optimizers, "_global_optimizer_pre_hooks", {})


def enter(observer: Observer) -> None:
    """Tell this observer what happens from now on."""
    sessions.enter(observer, _install)


def _install(session: Session) -> None:
    _leave_to_python()
    sessions.wrap(torch, "compile", _compiling, session)
    sessions.wrap(
        torch.cuda.CUDAGraph,
        "replay",
        functools.partial(_afterwards, "replayed"),
        session,
    )
    sessions.wrap(
        getattr(torch.distributed, "Work", None),
        "wait",
        functools.partial(_afterwards, "waited"),
        session,
    )
    # A hook of the module's own would be copied and pickled with it; its `forward` may have been bound before.
    replica = torch.nn.parallel.DistributedDataParallel
    sessions.wrap(
        replica,
        "_pre_forward" if hasattr(replica, "_pre_forward") else "forward",
        _forwarding,
        session,
    )
    sessions.wrap(torch.autograd, "backward", _backward, session)
    # autograd.grad under any name it was imported by
    sessions.wrap(torch.autograd, "_engine_run_backward", _running, session)
    sessions.wrap(torch.optim.Optimizer, "zero_grad", _zeroing, session)
    sessions.wrap(torch.nn.Module, "zero_grad", _zeroing, session)
    sessions.wrap(torch.utils, "swap_tensors", _swapping, session)
    # clip_grad_norm_ ends in a function of its own that changes the grads
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        sessions.wrap_decorated(getattr(clip_grad, name, None), _clipping, session)
    sessions.wrap(torch.amp.GradScaler, "scale", _scaling, session)
    sessions.wrap(torch.amp.GradScaler, "unscale_", _unscaling, session)
    sessions.wrap(torch.amp.GradScaler, "_maybe_opt_step", _maybe_stepping, session)
    for scheduler in _schedulers(torch.optim.lr_scheduler.LRScheduler):
        sessions.wrap(scheduler, "step", _scheduling, session)
    _meet(torch.optim.lr_scheduler.LRScheduler, session)
    sessions.wrap(torch.utils.data.DataLoader, "__iter__", loaders.beginning, session)
    sessions.wrap(loaders.Iterating, "__next__", loaders.ending, session)
    sessions.undoing.append(
        register_optimizer_step_pre_hook(
            functools.partial(_step_begins, session)
        ).remove
    )
    sessions.undoing.append(
        register_optimizer_step_post_hook(functools.partial(_step_ends, session)).remove
    )


def _schedulers(kind: type[Any]) -> list[type[Any]]:
    """This class of schedulers and those below it that step in a way of their own."""
    below = [each for child in kind.__subclasses__() for each in _schedulers(child)]
    return [*([kind] if "step" in vars(kind) else []), *dict.fromkeys(below)]


def _meet(kind: type[Any], session: Session) -> None:
    """Wrap the step of every scheduler's class that is defined from now on, too."""

    def __init_subclass__(cls: type[Any], /, **kwargs: Any) -> None:  # noqa: N807 - its name in Python
        super(kind, cls).__init_subclass__(**kwargs)
        if session is sessions.current and "step" in vars(cls):
            try:
                sessions.wrap(cls, "step", _scheduling, session)
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()

    if "__init_subclass__" in vars(
        kind
    ):  # another version's own: its classes are seen through super().step()
        return
    kind.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    sessions.undoing.append(functools.partial(delattr, kind, "__init_subclass__"))


def _backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    task = torch._C._current_graph_task_id

    def backward(*args: Any, **kwargs: Any) -> Any:
        if not sessions.listening or session is not sessions.current:
            return original(*args, **kwargs)
        if (
            task() != -1
        ):  # inside the engine (a reentrant checkpoint), it is part of the backward that is running
            try:
                sessions.tell(sessions.listening, "backward_nests", args, kwargs)
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()
            return original(*args, **kwargs)
        inside, thread = sessions.inside["backward"], get_ident()
        if (
            thread in inside
        ):  # once somebody has wrapped ours, it may be called again inside itself
            return original(*args, **kwargs)
        if args and type(args[0]) is not torch.Tensor and isinstance(args[0], Iterator):
            args = (
                tuple(args[0]),
                *args[1:],
            )  # it can be read once, and torch has to read it
        begun: list[tuple[Observer, Any]] = []
        error = None
        try:
            frame = sys._getframe(1)
            for observer in sessions.told(session):
                try:
                    begun.append(
                        (observer, observer.backward_begins(frame, args, kwargs))
                    )
                except BaseException as failure:
                    sessions.caught(observer, failure)
        except Exception as failure:
            sessions.failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                sessions.fail(failure)
                sessions.failures.pop()
        try:
            inside.add(thread)  # a key may be pressed as soon as it is there
            return original(*args, **kwargs)
        except BaseException as caught:
            error = caught
            raise
        finally:
            inside.discard(thread)
            try:
                for observer, token in begun:
                    try:
                        observer.backward_ends(token, error)
                    except BaseException as failure:
                        sessions.caught(observer, failure)
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()
            error = None  # else this frame and the error would hold each other

    return backward


def _running(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    task = torch._C._current_graph_task_id

    def run(*args: Any, **kwargs: Any) -> Any:
        if not sessions.listening or session is not sessions.current:
            return original(*args, **kwargs)
        thread, accumulates = get_ident(), kwargs.get("accumulate_grad", True)
        if (
            accumulates
            and thread not in sessions.inside["backward"]
            and task() == -1
            and len(args) == 5
        ):
            # torch.autograd.backward by a name that it was imported by before ours stood there

            def backward(*_: Any, **__: Any) -> Any:
                return original(*args, **kwargs)

            roots, given, retain, create, inputs = args
            return _backward(backward, session)(
                roots, given, retain, create, inputs=inputs or None
            )
        if accumulates or task() == -1:
            return original(*args, **kwargs)
        try:
            differentiating.append(thread)
            return original(*args, **kwargs)
        finally:
            if thread in differentiating:
                differentiating.remove(thread)

    return run


def _step_begins(session: Session, optimizer: Any, args: Any, kwargs: Any) -> None:
    if sessions.asked:
        sessions.asked.discard(get_ident())
    try:
        frame = sys._getframe(1)
        for observer in sessions.told(session):
            try:
                observer.step_begins(optimizer, frame)
            except BaseException as failure:
                sessions.caught(observer, failure)
        own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        behind = (
            getattr(next(reversed(_of_all.values()), None), "func", None)
            is not _step_begins
        )
        if own or (behind and own is not None):
            _follow(optimizer, own, session)
    except Exception as failure:
        sessions.failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            sessions.fail(failure)
            sessions.failures.pop()


def _follow(optimizer: Any, own: Any, session: Session) -> None:
    """Have an optimizer's own hooks end with one of ours: torch calls them after those of all optimizers."""
    last: Any = next(reversed(own.values()), None)
    if session is not sessions.current or (
        getattr(last, "func", None) is _step_prepared and last.args[0] is session
    ):
        return
    for number in [
        number
        for number, hook in own.items()
        if getattr(hook, "func", None) is _step_prepared
    ]:
        del own[number]
    sessions.undoing.append(
        optimizer.register_step_pre_hook(
            functools.partial(_step_prepared, session)
        ).remove
    )


def _step_prepared(session: Session, optimizer: Any, args: Any, kwargs: Any) -> None:
    try:
        sessions.tell(
            sessions.told(session), "step_prepared", optimizer, sys._getframe(1)
        )
    except Exception as failure:
        sessions.failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            sessions.fail(failure)
            sessions.failures.pop()


def _step_ends(session: Session, optimizer: Any, args: Any, kwargs: Any) -> None:
    try:
        frame = sys._getframe(1)
        for observer in sessions.told(session):
            try:
                observer.step_ends(optimizer, frame)
            except BaseException as failure:
                sessions.caught(observer, failure)
    except Exception as failure:
        sessions.failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            sessions.fail(failure)
            sessions.failures.pop()


# From a call's arguments: whose `.grad` it changes (for the label), the tensors, and the event's details; or nothing.
_Read = Callable[
    [tuple[Any, ...], dict[str, Any]], tuple[Any, Any, dict[str, Any]] | None
]


def _observing(
    kind: str, original: Callable[..., Any], session: Session, read: _Read
) -> Callable[..., Any]:
    """Run a call that changes `.grad` in place, and tell those recordings whose tensors it may touch.

    Within zero_grad, clip and unscale, further calls of the same kind are the same event.
    """

    inside = sessions.inside[kind]

    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            not sessions.listening
            or session is not sessions.current
            or (thread := get_ident()) in inside
        ):
            return original(*args, **kwargs)
        if kind == "clip":  # what can be read once, torch has to read
            if args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            elif isinstance(kwargs.get("parameters"), Iterator):
                kwargs["parameters"] = list(kwargs["parameters"])
        concerned: list[Observer] = []
        change: tuple[Any, Any, dict[str, Any]] | None = None
        try:
            observers = sessions.told(session)
            change = read(args, kwargs) if observers else None
            if change is not None:
                for observer in observers:
                    try:
                        if observer.change_begins(change[1]):
                            concerned.append(observer)
                    except BaseException as failure:
                        sessions.caught(observer, failure)
        except Exception as failure:
            sessions.failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                sessions.fail(failure)
                sessions.failures.pop()
        try:
            inside.add(thread)
            found = original(*args, **kwargs)
        finally:  # what raised has not happened; what it changed nonetheless is an edit
            inside.discard(thread)
        if change is not None:
            try:
                owner, tensors, details = change
                if kind != "zero_grad":
                    details = _ended(details)
                frame = sys._getframe(1)
                for observer in concerned:
                    try:
                        observer.change_ends(kind, frame, owner, tensors, dict(details))
                    except BaseException as failure:
                        sessions.caught(observer, failure)
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()
        return found

    return call


def _ended(details: dict[str, Any]) -> dict[str, Any]:
    """Details with the norms that only the clip itself could tell; without those that it did not."""
    ended = {
        name: value.end() if isinstance(value, Norm) else value
        for name, value in details.items()
    }
    return {name: value for name, value in ended.items() if value is not None}


def _zeroing(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def read(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        to_none = args[1] if len(args) > 1 else kwargs.get("set_to_none", True)
        return args[0], args[0], {"set_to_none": bool(to_none)}

    return _observing("zero_grad", original, session, read)


def _clipping(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    value = original.__name__ == "clip_grad_value_"
    names = ("clip_value",) if value else ("max_norm", "total_norm")

    def read(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        given = args[0] if args else kwargs["parameters"]
        tensors = [given] if isinstance(given, torch.Tensor) else given
        details = {"by": "value" if value else "norm"} | dict(
            zip(names, args[1:], strict=False)
        )
        details |= {k: v for k, v in kwargs.items() if k in names}
        for name, number in details.items():
            if isinstance(number, torch.Tensor) and type(number) is not torch.Tensor:
                details[name] = Norm(number)
        return None, tensors, details

    return _observing("clip", original, session, read)


def _scaling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def scale(*args: Any, **kwargs: Any) -> Any:
        if session is sessions.current:
            try:
                scalers.add(args[0])
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()
        return original(*args, **kwargs)

    return scale


def _unscaling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def read(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]] | None:
        optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
        if not getattr(args[0], "_enabled", True):  # switched off, it does nothing
            return None
        return optimizer, optimizer, {"amp_scale": getattr(args[0], "_scale", None)}

    return _observing("unscale", original, session, read)


def _maybe_stepping(
    original: Callable[..., Any], session: Session
) -> Callable[..., Any]:
    def maybe_step(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        try:
            sessions.asked.add(thread)
            found = original(*args, **kwargs)
        finally:
            skipped = thread in sessions.asked
            sessions.asked.discard(thread)
        if skipped and sessions.listening and session is sessions.current:
            try:
                optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
                sessions.tell(
                    sessions.told(session), "step_skipped", optimizer, sys._getframe(1)
                )
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()
        return found

    return maybe_step


def _scheduling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        inside = sessions.inside["schedule"]  # a scheduler made of others is one
        if (
            not sessions.listening
            or session is not sessions.current
            or (thread := get_ident()) in inside
        ):
            return original(*args, **kwargs)
        try:
            inside.add(thread)
            found = original(*args, **kwargs)
        finally:
            inside.discard(thread)
        try:
            frame = sys._getframe(1)
            if not _first(frame):
                for observer in sessions.told(session):
                    try:
                        observer.scheduled(args[0], frame)
                    except BaseException as failure:
                        sessions.caught(observer, failure)
        except Exception as failure:
            sessions.failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                sessions.fail(failure)
                sessions.failures.pop()
        return found

    return step


def _first(frame: FrameType | None) -> bool:
    """Whether this is the step that a scheduler takes while it is made."""
    while frame is not None and frame.f_code.co_name == "step":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_initial_step"


def _swapping(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def swap_tensors(*args: Any, **kwargs: Any) -> Any:
        if not sessions.listening or session is not sessions.current:
            return original(*args, **kwargs)
        # It refuses tensors to which there are weak references, and we have one to each `.grad`.
        begun: list[tuple[Observer, Any]] = []
        try:
            begun = sessions.tell(
                sessions.listening, "swap_begins", (*args, *kwargs.values())
            )
        except Exception as failure:
            sessions.failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                sessions.fail(failure)
                sessions.failures.pop()
        try:
            return original(*args, **kwargs)
        finally:
            try:
                for observer, token in begun:
                    sessions.tell((observer,), "swap_ends", token)
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()

    return swap_tensors


def _leave_to_python() -> None:
    """Have the compiler, once it is there, run what is ours as it stands, between the parts that it compiles.

    Otherwise it would trace us into the user's step, and stop at what cannot be traced.
    """
    try:
        if "torch._dynamo" in sys.modules:
            from torch._dynamo import trace_rules

            add = getattr(trace_rules, "add", None)
            if add is not None and __package__ not in _left:
                _left.add(__package__)
                add(__package__)
    except Exception as failure:
        sessions.failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            sessions.fail(failure)
            sessions.failures.pop()


_left: set[str] = set()


def _compiling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - its name in torch
        compiled = original(*args, **kwargs)
        if session is sessions.current:
            _leave_to_python()
        return compiled

    return compile


def _afterwards(
    told: str, original: Callable[..., Any], session: Session
) -> Callable[..., Any]:
    """A method after which observers are told of it: on what it was called, and where."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            sessions.tell(sessions.told(session), told, args[0], sys._getframe(1))
        except Exception as failure:
            sessions.failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                sessions.fail(failure)
                sessions.failures.pop()
        return result

    return call


def _forwarding(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def prepare(*args: Any, **kwargs: Any) -> Any:
        if sessions.listening and session is sessions.current:
            try:
                sessions.tell(
                    sessions.told(session), "forwards", args[0], sys._getframe(1)
                )
            except Exception as failure:
                sessions.failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    sessions.fail(failure)
                    sessions.failures.pop()
        return original(*args, **kwargs)

    return prepare
