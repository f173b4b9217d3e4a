"""The places in torch where `.grad` changes, wrapped while a recording is open, and the guard around what is ours.

`torch.autograd.backward` is what `Tensor.backward` calls. Optimizer steps have global hooks
(`torch.optim.optimizer.register_optimizer_step_pre_hook`). What has none is wrapped: `zero_grad`, clips, the
gradient scaler, schedulers, data loaders. A wrapper passes straight through when no recording is open, calls what it
wraps once, and keeps inside whatever of ours fails: the recordings are told, stop, and say so in their ledger.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from accumviz.recorder import loaders

# The open recordings. Replaced, never changed: an event is told to those that were open when it happened.
listening: tuple[Any, ...] = ()
# What failed where no recording could be told: those that are open then are not whole, and say so.
failures: list[str] = []
# How to leave torch as it was.
undoing: list[Callable[[], None]] = []
# The threads that are in the middle of each; `threading.local` costs several times as much.
inside: dict[str, set[int]] = {
    kind: set() for kind in ("backward", "zero_grad", "clip", "unscale", "schedule")
}
# The threads in which a scaler was asked to step, and no optimizer has begun to.
asked: set[int] = set()
# The threads inside a `torch.autograd.grad` that runs inside a backward: what it computes reaches no `.grad`.
differentiating: list[int] = []
scalers: weakref.WeakSet[Any] = weakref.WeakSet()

# Torch is wrapped for a session: from the first recording's opening to the last one's closing. Others may have
# wrapped our wrappers and keep them for ever; those of an earlier session stay silent.
session: object = object()
_lock = threading.Lock()
_cuda: Any = torch.cuda
_task = torch._C._current_graph_task_id
# The hooks of all optimizers in their order: one that was registered after ours may change `.grad`.
_before_all_steps: dict[int, Any] = getattr(
    optimizers, "_global_optimizer_pre_hooks", {}
)


class Call:
    """A call of something that is wrapped; `result` or `error` is there once it is over."""

    __slots__ = ("args", "error", "frame", "kwargs", "recordings", "result")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> None:
        self.args, self.kwargs, self.frame = args, kwargs, frame
        self.recordings = _uncaptured(frame) if _cuda._initialized else listening
        self.result: Any = None
        self.error: BaseException | None = None

    def notify(self, what: str, *args: Any) -> list[tuple[Any, Any]]:
        """Call this method of each open recording."""
        return notify(self.recordings, what, *args)


# What happens around one call: up to its `yield` before it, and the rest after it.
Around = Callable[[Call], Iterator[None]]


# --- who is told -------------------------------------------------------------------------------


def enter(recording: Any) -> None:
    """Tell this recording what happens from now on."""
    global listening, session  # noqa: PLW0603 - torch is wrapped once for the whole process
    with _lock:
        if not listening:
            session = object()
            _install()
        listening = (*listening, recording)


def leave(recording: Any) -> None:
    """Stop telling it; the last one out leaves torch as it was."""
    global listening, session  # noqa: PLW0603 - as in `enter`
    with _lock:
        listening = tuple(other for other in listening if other is not recording)
        if not listening:
            session = object()
            left = []
            while undoing:
                undo = undoing.pop()
                try:
                    undo()
                except (
                    Exception
                ):  # its wrapper stays silent, and it is tried again the next time
                    left.append(undo)
            undoing.extend(reversed(left))


def notify(recordings: tuple[Any, ...], what: str, *args: Any) -> list[tuple[Any, Any]]:
    """Call this method of each recording, and return their answers; one that fails is told so, and heard no more."""
    answers = []
    for recording in recordings:
        try:
            answers.append((recording, getattr(recording, what)(*args)))
        except BaseException as failure:
            report(failure, (recording,))
            if not isinstance(failure, Exception):  # a key that was pressed
                raise
    return answers


def report(failure: BaseException, recordings: tuple[Any, ...] | None = None) -> None:
    """Tell recordings (by default all) that something of ours failed; one that cannot even be told is let go."""
    for recording in listening if recordings is None else recordings:
        try:
            recording.failed(failure)
        except Exception:
            failures.append(type(failure).__name__)
            with suppress(Exception):
                leave(recording)


def describe(error: BaseException) -> str:
    """Return an exception's kind and text, even where making the text raises."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}"[:500]


def capturing() -> bool:
    """Return whether what is done now goes into a CUDA graph instead of being done."""
    return bool(
        _cuda._initialized
        and _cuda.is_initialized()
        and _cuda.is_current_stream_capturing()
    )


def _uncaptured(frame: FrameType) -> tuple[Any, ...]:
    """Return the open recordings; none while a CUDA graph is captured, which would capture what we read, too."""
    if not capturing():
        return listening
    notify(listening, "captures", frame)
    return ()


def _close_all() -> None:
    """Close what was never closed with the process, so that its file is whole."""
    # In an interactive session, what was raised last ended a line, and not the session.
    interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    ended = "exit" if error is None or interactive else describe(error)
    notify(listening, "stop", ended)


def _in_child() -> None:
    """In a forked process nothing is recorded, and no thread of its parent is in the middle of anything."""
    global listening, _lock
    listening, _lock = (), threading.Lock()
    for busy in (*inside.values(), asked):
        busy.intersection_update((get_ident(),))


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# --- the guard ---------------------------------------------------------------------------------


def guarded(
    ours: Callable[..., Any], failed: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Return a function for torch or the user to call, in which whatever of ours fails stays.

    `failed` is told of it; by default, all open recordings are.
    """

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except Exception as failure:
            # What handles a failure may fail as well: then its name stays here.
            failures.append(type(failure).__name__)
            with suppress(Exception):
                (failed or report)(failure)
                failures.pop()

    return call


def wrapper(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """Return what stands in `original`'s place for this session: it runs `around` each call, guarded."""
    made_for = session

    def call(*args: Any, **kwargs: Any) -> Any:
        if not listening or session is not made_for:
            return original(*args, **kwargs)
        made = steps = caller = None
        try:
            # A device's thread has no frame below this one.
            caller = sys._getframe().f_back or sys._getframe()
            made = Call(args, kwargs, caller)
            steps = around(made)
            next(steps, None)
        except Exception as failure:
            failures.append(type(failure).__name__)
            with suppress(Exception):
                report(failure)
                failures.pop()
        if made is None:
            return original(*args, **kwargs)
        try:
            made.result = original(*made.args, **made.kwargs)
            return made.result
        except BaseException as raised:
            made.error = raised
            raise
        finally:
            try:
                if steps is not None:
                    next(steps, None)
            except Exception as failure:
                failures.append(type(failure).__name__)
                with suppress(Exception):
                    report(failure)
                    failures.pop()
            # The error and this frame would hold each other.
            made = steps = caller = None

    call.__code__ = _uncounted(call.__code__)
    return functools.update_wrapper(call, original)


@functools.cache
def _uncounted(code: CodeType) -> CodeType:
    """Have a wrapper passed over by whoever warns of a line so many callers above it.

    `warnings` passes over the frames in which Python imports, and knows them by their file.
    """
    name = f"{code.co_filename} (passed over as importlib._bootstrap is)"
    return code.replace(co_filename=name)


def _wrap(owner: Any, name: str, around: Around) -> None:
    original = getattr(owner, name, None)
    if (
        original is None
    ):  # another torch version lacks it: the change is seen as an edit
        return
    ours = wrapper(original, around)

    def undo() -> None:
        # Somebody who wrapped ours in the meantime keeps working: ours passes straight through.
        if getattr(owner, name, None) is ours:
            setattr(owner, name, original)

    setattr(owner, name, ours)
    undoing.append(undo)


def _wrap_decorated(decorated: Any, around: Around) -> None:
    """Wrap a function inside its `no_grad` decorator, where those who imported it by name call it, too."""
    original = getattr(decorated, "__wrapped__", None)
    for cell in getattr(decorated, "__closure__", None) or ():
        if original is not None and cell.cell_contents is original:
            cell.cell_contents = wrapper(original, around)
            undoing.append(functools.partial(setattr, cell, "cell_contents", original))


# --- what is wrapped ---------------------------------------------------------------------------


def _install() -> None:
    _leave_to_python()
    nn, optim, amp = torch.nn, torch.optim, torch.amp
    replica = nn.parallel.DistributedDataParallel
    # A hook of the module's own would be copied and pickled with it; its `forward` may have been bound before.
    forward = "_pre_forward" if hasattr(replica, "_pre_forward") else "forward"
    table: list[tuple[Any, str, Around]] = [
        (torch.autograd, "backward", _backward),
        # `torch.autograd.backward` and `grad` under any name they were imported by
        (torch.autograd, "_engine_run_backward", _engine_runs),
        (optim.Optimizer, "zero_grad", _changing("zero_grad", _read_zero)),
        (nn.Module, "zero_grad", _changing("zero_grad", _read_zero)),
        (amp.GradScaler, "scale", _scaling),
        (amp.GradScaler, "unscale_", _changing("unscale", _read_unscale)),
        (amp.GradScaler, "_maybe_opt_step", _maybe_stepping),
        (torch.utils, "swap_tensors", _swapping),
        (torch.utils.data.DataLoader, "__iter__", _loader_begins),
        (loaders.Iterating, "__next__", _loader_ends),
        (torch, "compile", _compiling),
        (torch.cuda.CUDAGraph, "replay", _then("replayed")),
        (getattr(torch.distributed, "Work", None), "wait", _then("waited")),
        (replica, forward, _forwarding),
    ]
    for owner, name, around in table:
        _wrap(owner, name, around)
    # `clip_grad_norm_` ends in a function of its own that changes the grads.
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        function = getattr(clip_grad, name, None)
        _wrap_decorated(
            function, _changing("clip", functools.partial(_read_clip, name))
        )
    for scheduler in _schedulers(LRScheduler):
        _wrap(scheduler, "step", _scheduling)
    _meet_schedulers()
    prepared = guarded(_step_prepared)
    begins = guarded(functools.partial(_step_begins, prepared))
    undoing.append(register_optimizer_step_pre_hook(begins).remove)
    undoing.append(register_optimizer_step_post_hook(guarded(_step_ends)).remove)


def _backward(call: Call) -> Iterator[None]:
    if _task() != -1:
        # Inside the engine (a reentrant checkpoint), it is part of the backward that is running.
        call.notify("backward_nests", call.args, call.kwargs)
        return
    busy, thread = inside["backward"], get_ident()
    if thread in busy:  # ours, called inside itself by what has wrapped it
        return
    if call.args and isinstance(call.args[0], Iterator):
        # It can be read once, and torch has to.
        call.args = (tuple(call.args[0]), *call.args[1:])
    begun = call.notify("backward_begins", call.frame, call.args, call.kwargs)
    error: BaseException | None = None
    try:
        busy.add(thread)
        yield
        error = call.error
    except BaseException as raised:  # a key that was pressed before the call
        error = raised
        raise
    finally:
        busy.discard(thread)
        for recording, running in begun:
            notify((recording,), "backward_ends", running, error)
        error = None  # it and this frame would hold each other


def _engine_runs(call: Call) -> Iterator[None]:
    nested, thread = _task() != -1, get_ident()
    if not call.kwargs.get("accumulate_grad", True):
        if nested:
            try:
                differentiating.append(thread)
                yield
            finally:
                differentiating.remove(thread)
    elif not nested and thread not in inside["backward"] and len(call.args) == 5:
        # `torch.autograd.backward` by a name that it was imported by before ours stood there
        *roots, inputs = call.args
        meant = Call(tuple(roots), {"inputs": inputs or None}, call.frame)
        steps = _backward(meant)
        next(steps, None)
        yield
        meant.error = call.error
        next(steps, None)


# From a call's arguments: whose `.grad` it changes (for the label), the tensors, and the event's details; or nothing.
_Change = tuple[Any, Any, dict[str, Any]]
_Read = Callable[[tuple[Any, ...], dict[str, Any]], _Change | None]


def _changing(kind: str, read: _Read) -> Around:
    """Tell of a call that changes `.grad` in place those recordings whose tensors it may touch.

    Inside it, further calls of the same kind are the same event.
    """

    def around(call: Call) -> Iterator[None]:
        busy, thread = inside[kind], get_ident()
        if thread in busy:
            return
        if kind == "clip":
            _read_twice(call)
        change = read(call.args, call.kwargs)
        if change is None:
            return
        owner, tensors, details = change
        answers = call.notify("change_begins", tensors)
        try:
            busy.add(thread)
            yield
        finally:
            busy.discard(thread)
        if call.error is not None:
            return  # what raised has not happened; what it changed nonetheless is an edit
        for recording, touches in answers:
            if touches:
                about = kind, call.frame, owner, tensors, dict(details)
                notify((recording,), "change_ends", *about)

    return around


def _read_twice(call: Call) -> None:
    """Have the tensors of a clip in a list: torch has to read them as well."""
    if call.args and isinstance(call.args[0], Iterator):
        call.args = (list(call.args[0]), *call.args[1:])
    elif isinstance(call.kwargs.get("parameters"), Iterator):
        call.kwargs["parameters"] = list(call.kwargs["parameters"])


def _read_zero(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change:
    to_none = args[1] if len(args) > 1 else kwargs.get("set_to_none", True)
    return args[0], args[0], {"set_to_none": bool(to_none)}


def _read_clip(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change:
    by_value = name == "clip_grad_value_"
    names = ("clip_value",) if by_value else ("max_norm", "total_norm")
    details: dict[str, Any] = {"by": "value" if by_value else "norm"}
    details |= dict(zip(names, args[1:], strict=False))
    details |= {name: value for name, value in kwargs.items() if name in names}
    # A DTensor may not be reduced yet, and reading it would be a collective that the user's program does not have.
    details = {
        name: value
        for name, value in details.items()
        if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor
    }
    given = args[0] if args else kwargs["parameters"]
    return None, [given] if isinstance(given, torch.Tensor) else given, details


def _read_unscale(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
    if not getattr(args[0], "_enabled", True):  # switched off, it does nothing
        return None
    return optimizer, optimizer, {"amp_scale": getattr(args[0], "_scale", None)}


def _scaling(call: Call) -> Iterator[None]:
    scalers.add(call.args[0])
    yield


def _maybe_stepping(call: Call) -> Iterator[None]:
    """Tell of a step that the scaler skips: it was asked for, and no optimizer has begun to step."""
    thread = get_ident()
    try:
        asked.add(thread)
        yield
    finally:
        skipped = thread in asked
        asked.discard(thread)
    if skipped and call.error is None:
        optimizer = call.args[1] if len(call.args) > 1 else call.kwargs["optimizer"]
        call.notify("step_skipped", optimizer, call.frame)


def _step_begins(prepared: Any, optimizer: Any, args: Any, kwargs: Any) -> None:
    asked.discard(get_ident())
    frame = sys._getframe(2)
    notify(_uncaptured(frame), "step_begins", optimizer, frame)
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    ours_is_last = getattr(
        next(reversed(_before_all_steps.values()), None), "__wrapped__", None
    )
    if hooks is None or (
        not hooks and getattr(ours_is_last, "func", None) is _step_begins
    ):
        return
    # An optimizer's own hooks run after those of all optimizers, and may change `.grad`: ours is the last of them.
    if next(reversed(hooks.values()), None) is not prepared:
        for number in [number for number, hook in hooks.items() if hook is prepared]:
            del hooks[number]
        undoing.append(optimizer.register_step_pre_hook(prepared).remove)


def _step_prepared(optimizer: Any, args: Any, kwargs: Any) -> None:
    frame = sys._getframe(2)
    notify(_uncaptured(frame), "step_prepared", optimizer, frame)


def _step_ends(optimizer: Any, args: Any, kwargs: Any) -> None:
    frame = sys._getframe(2)
    notify(_uncaptured(frame), "step_ends", optimizer, frame)


def _schedulers(kind: type[Any]) -> list[type[Any]]:
    """Return this class of schedulers and those below it that step in a way of their own."""
    below = [each for child in kind.__subclasses__() for each in _schedulers(child)]
    return [*([kind] if "step" in vars(kind) else []), *dict.fromkeys(below)]


def _meet_schedulers() -> None:
    """Wrap the step of every scheduler's class that is defined from now on, too."""
    made_for = session
    if "__init_subclass__" in vars(LRScheduler):
        return  # another version's own: its classes are seen through `super().step()`

    @guarded
    def meet(cls: type[Any]) -> None:
        if session is made_for and "step" in vars(cls):
            _wrap(cls, "step", _scheduling)

    def __init_subclass__(cls: type[Any], /, **kwargs: Any) -> None:  # noqa: N807 - its name in Python
        super(LRScheduler, cls).__init_subclass__(**kwargs)
        meet(cls)

    LRScheduler.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    undoing.append(functools.partial(delattr, LRScheduler, "__init_subclass__"))


def _scheduling(call: Call) -> Iterator[None]:
    busy, thread = inside["schedule"], get_ident()
    if thread in busy:  # a scheduler made of others is one
        return
    try:
        busy.add(thread)
        yield
    finally:
        busy.discard(thread)
    if call.error is None and not _is_being_made(call.frame):
        call.notify("scheduled", call.args[0], call.frame)


def _is_being_made(frame: FrameType | None) -> bool:
    """Return whether this is the step that a scheduler takes while it is made."""
    while frame is not None and frame.f_code.co_name == "step":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_initial_step"


def _swapping(call: Call) -> Iterator[None]:
    """Let go of both tensors meanwhile: torch refuses those to which there are weak references."""
    begun = notify(listening, "swap_begins", (*call.args, *call.kwargs.values()))
    try:
        yield
    finally:
        for recording, leaves in begun:
            notify((recording,), "swap_ends", leaves)


def _loader_begins(call: Call) -> Iterator[None]:
    yield
    if call.error is None:
        loaders.begin(call.args[0], call.result)
        call.notify("loads", "begins", call.args[0], call.frame)


def _loader_ends(call: Call) -> Iterator[None]:
    yield
    if isinstance(call.error, StopIteration):
        call.notify("loads", "ends", call.args[0], call.frame)


def _then(what: str) -> Around:
    """Tell of a method once it has returned: on what it was called, and where."""

    def around(call: Call) -> Iterator[None]:
        yield
        if call.error is None:
            call.notify(what, call.args[0], call.frame)

    return around


def _forwarding(call: Call) -> Iterator[None]:
    call.notify("forwards", call.args[0], call.frame)
    yield


def _compiling(_: Call) -> Iterator[None]:
    yield
    _leave_to_python()


_left: set[str] = set()


@guarded
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
