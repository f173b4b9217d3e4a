"""The few places in torch where `.grad` changes, wrapped while a recording is open and left as they were after.

Sources: torch.autograd.backward is what Tensor.backward calls; optimizer steps have global hooks
(torch.optim.optimizer.register_optimizer_step_pre_hook); zero_grad, clipping and the gradient
scaler have none, so they are wrapped. Each wrapper is a door: it passes straight through when no
recording is open, calls what it wraps once, and keeps inside whatever of ours fails.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accumviz.recorder import loaders
from accumviz.recorder.fsdp import Norm


class Observer(Protocol):
    """What an open recording is told; `frame` is where to start looking for the user's line."""

    def failed(self, error: BaseException) -> None: ...
    def stop(self, ended: str) -> None: ...
    def forked(self) -> None: ...
    def backward_begins(self, frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def backward_ends(self, token: Any, error: BaseException | None) -> None: ...
    def backward_nests(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def step_begins(self, optimizer: Any, frame: FrameType) -> None: ...
    def step_prepared(self, optimizer: Any, frame: FrameType) -> None: ...
    def step_ends(self, optimizer: Any, frame: FrameType) -> None: ...
    def step_skipped(self, optimizer: Any, frame: FrameType) -> None: ...
    def scheduled(self, scheduler: Any, frame: FrameType) -> None: ...
    def loads(self, what: str, source: Any, frame: FrameType) -> None: ...
    def change_begins(self, tensors: Any) -> bool: ...
    def change_ends(self, kind: str, frame: FrameType, owner: Any, tensors: Any, details: dict[str, Any]) -> None: ...
    def captures(self, frame: FrameType) -> None: ...
    def replayed(self, frame: FrameType) -> None: ...
    def swap_begins(self, tensors: tuple[Any, ...]) -> Any: ...
    def swap_ends(self, token: Any) -> None: ...


# A wrapper is made for a session: torch wrapped from the first recording's opening to the last one's closing.
Session = object
Around = Callable[[Callable[..., Any], Session], Callable[..., Any]]


# Replaced, never changed: whoever is told goes through the recordings that were open when it happened.
_open: tuple[Observer, ...] = ()
# Others may have wrapped our wrappers, and keep them for ever: those of an earlier session stay silent.
_session: Session = object()
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
# The threads that are in the middle of each, as sets: what `threading.local` keeps costs several times as much.
_inside: dict[str, set[int]] = {kind: set() for kind in ("backward", "zero_grad", "clip", "unscale", "schedule")}
# Those in which a scaler was asked to step, and no optimizer has begun to.
_asked: set[int] = set()
# Threads inside a torch.autograd.grad that is inside a backward: what it computes reaches no `.grad`.
differentiating: list[int] = []
scalers: weakref.WeakSet[Any] = weakref.WeakSet()
# What failed and could not be told to whom it concerned: recordings that are open then are not whole.
failures: list[str] = []


def enter(observer: Observer) -> None:
    """Tell this observer what happens from now on."""
    global _open, _session  # noqa: PLW0603 - torch is patched once for the whole process
    with _lock:
        if not _open:
            _session = object()
            _install(_session)
        _open = (*_open, observer)


def leave(observer: Observer) -> None:
    """Stop telling it; the last one out leaves torch as it was."""
    global _open, _session  # noqa: PLW0603 - as above
    with _lock:
        _open = tuple(other for other in _open if other is not observer)
        if not _open:
            _session = object()
            left = []
            while _undo:
                undo = _undo.pop()
                try:
                    undo()
                except Exception:  # it stays silent, and is tried again the next time
                    left.append(undo)
            _undo.extend(reversed(left))


def _close_all() -> None:
    """What was never closed is closed with the process, so that its file is whole."""
    for observer in _open:
        _tell((observer,), "stop", _ended_by())


def _ended_by() -> str:
    """How the script ended: by an exception, whose text this is, or by itself."""
    # In an interactive session, what was raised last ended a line, and not the session.
    interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
    error = None if interactive else getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return "exit" if error is None else said(error)[:500]


def _in_child() -> None:
    """A forked process goes on without our files, and without locks that some thread of its parent held."""
    global _lock  # noqa: PLW0603 - as above
    _lock = threading.Lock()
    for threads in (*_inside.values(), _asked):  # this one's number stays, others' may be given out again
        threads.intersection_update((get_ident(),))
    for observer in _open:
        _tell((observer,), "forked")


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


_cuda: Any = torch.cuda


def capturing() -> bool:
    """Whether what is done now goes into a CUDA graph instead of being done."""
    # The flag first: this is asked at every event, and whether we are in a fork only matters where there is a device.
    return bool(_cuda._initialized and _cuda.is_initialized() and _cuda.is_current_stream_capturing())


def said(error: BaseException) -> str:
    """An exception's kind and text, even where making the text raises."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}"


def _told(session: Session) -> tuple[Observer, ...]:
    """The open recordings; nobody while a CUDA graph is captured, which would capture what we read, too."""
    observers = _open if session is _session else ()
    if observers and _cuda._initialized and capturing():
        _tell(observers, "captures", sys._getframe(2))
        return ()
    return observers


def _tell(observers: tuple[Observer, ...], what: str, *args: Any) -> list[tuple[Observer, Any]]:
    """Call this method of each; one that fails is told so, and heard no more.

    What every step passes calls the method itself: finding it by its name costs as much as the rest of the door.
    """
    answers = []
    for observer in observers:
        try:
            answers.append((observer, getattr(observer, what)(*args)))
        except BaseException as error:
            _failed(observer, error)
    return answers


def _failed(observer: Observer, error: BaseException) -> None:
    """Tell it, while the error is being handled; a key that was pressed is the user's, and raised again."""
    failures.append(type(error).__name__)
    with contextlib.suppress(Exception):
        fails(observer, error)
        failures.pop()
    if not isinstance(error, Exception):
        raise error


def fails(observer: Observer, error: BaseException) -> None:
    """Tell this observer that something of its own failed; one that cannot even be told is heard no more."""
    try:
        observer.failed(error)
    except Exception:
        failures.append(type(error).__name__)
        with contextlib.suppress(Exception):
            leave(observer)


def _fail(error: BaseException) -> None:
    """Something of ours failed before we knew whom to tell."""
    for observer in _open:
        failures.append(type(error).__name__)
        with contextlib.suppress(Exception):
            fails(observer, error)
            failures.pop()


def _install(session: Session) -> None:
    _leave_to_python()
    _wrap(torch, "compile", _compiling, session)
    _wrap(torch.cuda.CUDAGraph, "replay", _replaying, session)
    _wrap(torch.autograd, "backward", _backward, session)
    # autograd.grad under any name it was imported by
    _wrap(torch.autograd, "_engine_run_backward", _running, session)
    _wrap(torch.optim.Optimizer, "zero_grad", _zeroing, session)
    _wrap(torch.nn.Module, "zero_grad", _zeroing, session)
    _wrap(torch.utils, "swap_tensors", _swapping, session)
    # clip_grad_norm_ ends in a function of its own that changes the grads
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        _wrap_decorated(getattr(clip_grad, name, None), _clipping, session)
    _wrap(torch.amp.GradScaler, "scale", _scaling, session)
    _wrap(torch.amp.GradScaler, "unscale_", _unscaling, session)
    _wrap(torch.amp.GradScaler, "_maybe_opt_step", _maybe_stepping, session)
    for scheduler in _schedulers(torch.optim.lr_scheduler.LRScheduler):
        _wrap(scheduler, "step", _scheduling, session)
    _meet(torch.optim.lr_scheduler.LRScheduler, session)
    _wrap(torch.utils.data.DataLoader, "__iter__", _beginning, session)
    _wrap(loaders.Iterating, "__next__", _ending, session)
    _undo.append(register_optimizer_step_pre_hook(functools.partial(_step_begins, session)).remove)
    _undo.append(register_optimizer_step_post_hook(functools.partial(_step_ends, session)).remove)


def _schedulers(kind: type[Any]) -> list[type[Any]]:
    """This class of schedulers and those below it that step in a way of their own."""
    below = [each for child in kind.__subclasses__() for each in _schedulers(child)]
    return [*([kind] if "step" in vars(kind) else []), *dict.fromkeys(below)]


def _meet(kind: type[Any], session: Session) -> None:
    """Wrap the step of every scheduler's class that is defined from now on, too."""

    def __init_subclass__(cls: type[Any], /, **kwargs: Any) -> None:  # noqa: N807 - its name in Python
        super(kind, cls).__init_subclass__(**kwargs)
        if session is _session and "step" in vars(cls):
            try:
                _wrap(cls, "step", _scheduling, session)
            except Exception as failure:
                failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    _fail(failure)
                    failures.pop()

    if "__init_subclass__" in vars(kind):  # another version's own: its classes are seen through super().step()
        return
    kind.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    _undo.append(functools.partial(delattr, kind, "__init_subclass__"))


def _uncounted(wrapper: Any) -> Any:
    """The wrapper, passed over by whoever warns of a line so many callers above it.

    That is said of the frames in which Python imports, which `warnings` knows by their file.
    """
    code = wrapper.__code__
    wrapper.__code__ = code.replace(co_filename=f"{code.co_filename} (passed over as importlib._bootstrap is)")
    return wrapper


def _wrap(owner: Any, name: str, around: Around, session: Session) -> None:
    original = getattr(owner, name, None)
    if original is None:  # a private helper that another torch version lacks: the change is still seen as an edit
        return
    wrapper = functools.update_wrapper(_uncounted(around(original, session)), original)

    def undo() -> None:
        # Somebody who wrapped ours in the meantime keeps working: ours passes straight through.
        if getattr(owner, name, None) is wrapper:
            setattr(owner, name, original)

    setattr(owner, name, wrapper)
    _undo.append(undo)


def _wrap_decorated(decorated: Any, around: Around, session: Session) -> None:
    """Wrap a function inside its `no_grad` decorator, where those who imported it by name call it too."""
    original = getattr(decorated, "__wrapped__", None)
    for cell in getattr(decorated, "__closure__", None) or ():
        if original is not None and cell.cell_contents is original:
            cell.cell_contents = _uncounted(around(original, session))
            _undo.append(functools.partial(setattr, cell, "cell_contents", original))


def _backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    task = torch._C._current_graph_task_id

    def backward(*args: Any, **kwargs: Any) -> Any:
        if not _open or session is not _session:
            return original(*args, **kwargs)
        if task() != -1:  # inside the engine (a reentrant checkpoint), it is part of the backward that is running
            try:
                _tell(_open, "backward_nests", args, kwargs)
            except Exception as failure:
                failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    _fail(failure)
                    failures.pop()
            return original(*args, **kwargs)
        inside, thread = _inside["backward"], get_ident()
        if thread in inside:  # once somebody has wrapped ours, it may be called again inside itself
            return original(*args, **kwargs)
        if args and type(args[0]) is not torch.Tensor and isinstance(args[0], Iterator):
            args = (tuple(args[0]), *args[1:])  # it can be read once, and torch has to read it
        begun: list[tuple[Observer, Any]] = []
        error = None
        try:
            frame = sys._getframe(1)
            for observer in _told(session):
                try:
                    begun.append((observer, observer.backward_begins(frame, args, kwargs)))
                except BaseException as failure:
                    _failed(observer, failure)
        except Exception as failure:
            failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                _fail(failure)
                failures.pop()
        inside.add(thread)
        try:
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
                        _failed(observer, failure)
            except Exception as failure:
                failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    _fail(failure)
                    failures.pop()
            error = None  # else this frame and the error would hold each other

    return backward


def _running(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    task = torch._C._current_graph_task_id

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _open or session is not _session or kwargs.get("accumulate_grad", True) or task() == -1:
            return original(*args, **kwargs)
        thread = get_ident()
        differentiating.append(thread)
        try:
            return original(*args, **kwargs)
        finally:
            differentiating.remove(thread)

    return run


def _step_begins(session: Session, optimizer: Any, args: Any, kwargs: Any) -> None:
    if _asked:
        _asked.discard(get_ident())
    try:
        frame = sys._getframe(1)
        for observer in _told(session):
            try:
                observer.step_begins(optimizer, frame)
            except BaseException as failure:
                _failed(observer, failure)
        own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        if own:
            _follow(optimizer, own, session)
    except Exception as failure:
        failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            _fail(failure)
            failures.pop()


def _follow(optimizer: Any, own: Any, session: Session) -> None:
    """Have an optimizer's own hooks end with one of ours: torch calls them after those of all optimizers."""
    last = next(reversed(own.values()))
    if session is not _session or (getattr(last, "func", None) is _step_prepared and last.args[0] is session):
        return
    for number in [number for number, hook in own.items() if getattr(hook, "func", None) is _step_prepared]:
        del own[number]
    _undo.append(optimizer.register_step_pre_hook(functools.partial(_step_prepared, session)).remove)


def _step_prepared(session: Session, optimizer: Any, args: Any, kwargs: Any) -> None:
    try:
        _tell(_told(session), "step_prepared", optimizer, sys._getframe(1))
    except Exception as failure:
        failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            _fail(failure)
            failures.pop()


def _step_ends(session: Session, optimizer: Any, args: Any, kwargs: Any) -> None:
    try:
        frame = sys._getframe(1)
        for observer in _told(session):
            try:
                observer.step_ends(optimizer, frame)
            except BaseException as failure:
                _failed(observer, failure)
    except Exception as failure:
        failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            _fail(failure)
            failures.pop()


# From a call's arguments: whose `.grad` it changes (for the label), the tensors, and the event's details; or nothing.
_Read = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any, dict[str, Any]] | None]


def _observing(kind: str, original: Callable[..., Any], session: Session, read: _Read) -> Callable[..., Any]:
    """Run a call that changes `.grad` in place, and tell those recordings whose tensors it may touch.

    Within zero_grad, clip and unscale, further calls of the same kind are the same event.
    """

    inside = _inside[kind]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _open or session is not _session or (thread := get_ident()) in inside:
            return original(*args, **kwargs)
        if kind == "clip":  # what can be read once, torch has to read
            if args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            elif isinstance(kwargs.get("parameters"), Iterator):
                kwargs["parameters"] = list(kwargs["parameters"])
        concerned: list[Observer] = []
        change: tuple[Any, Any, dict[str, Any]] | None = None
        try:
            observers = _told(session)
            change = read(args, kwargs) if observers else None
            if change is not None:
                for observer in observers:
                    try:
                        if observer.change_begins(change[1]):
                            concerned.append(observer)
                    except BaseException as failure:
                        _failed(observer, failure)
        except Exception as failure:
            failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                _fail(failure)
                failures.pop()
        inside.add(thread)
        try:
            return original(*args, **kwargs)
        finally:
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
                            _failed(observer, failure)
                except Exception as failure:
                    failures.append(type(failure).__name__)
                    with contextlib.suppress(Exception):
                        _fail(failure)
                        failures.pop()

    return call


def _ended(details: dict[str, Any]) -> dict[str, Any]:
    """Details with the norms that only the clip itself could tell; without those that it did not."""
    ended = {name: value.end() if isinstance(value, Norm) else value for name, value in details.items()}
    return {name: value for name, value in ended.items() if value is not None}


def _zeroing(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        to_none = args[1] if len(args) > 1 else kwargs.get("set_to_none", True)
        return args[0], args[0], {"set_to_none": bool(to_none)}

    return _observing("zero_grad", original, session, read)


def _clipping(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    value = original.__name__ == "clip_grad_value_"
    names = ("clip_value",) if value else ("max_norm", "total_norm")

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        given = args[0] if args else kwargs["parameters"]
        tensors = [given] if isinstance(given, torch.Tensor) else given
        details = {"by": "value" if value else "norm"} | dict(zip(names, args[1:], strict=False))
        details |= {k: v for k, v in kwargs.items() if k in names}
        for name, number in details.items():
            if isinstance(number, torch.Tensor) and type(number) is not torch.Tensor:
                details[name] = Norm(number)
        return None, tensors, details

    return _observing("clip", original, session, read)


def _scaling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def scale(*args: Any, **kwargs: Any) -> Any:
        if session is _session:
            try:
                scalers.add(args[0])
            except Exception as failure:
                failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    _fail(failure)
                    failures.pop()
        return original(*args, **kwargs)

    return scale


def _unscaling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]] | None:
        optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
        if not getattr(args[0], "_enabled", True):  # switched off, it does nothing
            return None
        return optimizer, optimizer, {"amp_scale": getattr(args[0], "_scale", None)}

    return _observing("unscale", original, session, read)


def _maybe_stepping(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def maybe_step(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        _asked.add(thread)
        try:
            found = original(*args, **kwargs)
        finally:
            skipped = thread in _asked
            _asked.discard(thread)
        if skipped and _open and session is _session:
            try:
                optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
                _tell(_told(session), "step_skipped", optimizer, sys._getframe(1))
            except Exception as failure:
                failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    _fail(failure)
                    failures.pop()
        return found

    return maybe_step


def _scheduling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        inside = _inside["schedule"]
        if not _open or session is not _session or (thread := get_ident()) in inside:  # one made of others is one
            return original(*args, **kwargs)
        inside.add(thread)
        try:
            found = original(*args, **kwargs)
        finally:
            inside.discard(thread)
        try:
            frame = sys._getframe(1)
            if not _first(frame):
                for observer in _told(session):
                    try:
                        observer.scheduled(args[0], frame)
                    except BaseException as failure:
                        _failed(observer, failure)
        except Exception as failure:
            failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                _fail(failure)
                failures.pop()
        return found

    return step


def _first(frame: FrameType | None) -> bool:
    """Whether this is the step that a scheduler takes while it is made."""
    while frame is not None and frame.f_code.co_name == "step":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_initial_step"


def _beginning(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def __iter__(*args: Any, **kwargs: Any) -> Any:  # noqa: N807 - its name in torch
        iterator = original(*args, **kwargs)
        if _open and session is _session:
            try:
                loaders.begun(args[0], iterator)
                for observer in _told(session):
                    try:
                        observer.loads("begins", args[0], sys._getframe(1))
                    except BaseException as failure:
                        _failed(observer, failure)
            except Exception as failure:
                failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    _fail(failure)
                    failures.pop()
        return iterator

    return __iter__


def _ending(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def __next__(*args: Any, **kwargs: Any) -> Any:  # noqa: N807 - its name in torch
        try:
            return original(*args, **kwargs)
        except StopIteration:
            if _open and session is _session:
                try:
                    for observer in _told(session):
                        try:
                            observer.loads("ends", args[0], sys._getframe(1))
                        except BaseException as failure:
                            _failed(observer, failure)
                except Exception as failure:
                    failures.append(type(failure).__name__)
                    with contextlib.suppress(Exception):
                        _fail(failure)
                        failures.pop()
            raise

    return __next__


def _swapping(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def swap_tensors(*args: Any, **kwargs: Any) -> Any:
        if not _open or session is not _session:
            return original(*args, **kwargs)
        # It refuses tensors to which there are weak references, and we have one to each `.grad`.
        begun: list[tuple[Observer, Any]] = []
        try:
            begun = _tell(_open, "swap_begins", (*args, *kwargs.values()))
        except Exception as failure:
            failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                _fail(failure)
                failures.pop()
        try:
            return original(*args, **kwargs)
        finally:
            try:
                for observer, token in begun:
                    _tell((observer,), "swap_ends", token)
            except Exception as failure:
                failures.append(type(failure).__name__)
                with contextlib.suppress(Exception):
                    _fail(failure)
                    failures.pop()

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
        failures.append(type(failure).__name__)
        with contextlib.suppress(Exception):
            _fail(failure)
            failures.pop()


_left: set[str] = set()


def _compiling(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - its name in torch
        compiled = original(*args, **kwargs)
        if session is _session:
            _leave_to_python()
        return compiled

    return compile


def _replaying(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def replay(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            _tell(_told(session), "replayed", sys._getframe(1))
        except Exception as failure:
            failures.append(type(failure).__name__)
            with contextlib.suppress(Exception):
                _fail(failure)
                failures.pop()
        return result

    return replay
