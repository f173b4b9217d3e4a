"""The places in torch where `.grad` changes, wrapped while a recording is open, and the guard around what is ours.

`torch.autograd.backward` is what `Tensor.backward` calls. Optimizer steps have global hooks
(`torch.optim.optimizer.register_optimizer_step_pre_hook`). What has none is wrapped: `zero_grad`, clips, the
gradient scaler, schedulers, data loaders. A wrapper passes straight through when no recording is open, calls what it
wraps once, and keeps inside whatever of ours fails: the recordings then stop, and say so in their ledger.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from accumviz.arguments import describe
from accumviz.recorder.transfer import unseen

Iterating = dataloader._BaseDataLoaderIter
_CAPTURED = "a CUDA graph was captured, of whose replays nothing is seen: record the loop before it is captured"

# The open recordings. Replaced, never changed: an event is told to those that were open when it happened.
listening: tuple[Any, ...] = ()
# What failed and was not told yet: a `deque.append` cannot fail, whatever else does.
failures: deque[BaseException] = deque(maxlen=1)
# How to leave torch as it was.
undoing: list[Callable[[], None]] = []
# For each kind of call, the threads that are inside one now: a nested call is no event of its own. `threading.local`
# costs several times as much.
inside: dict[str, set[int]] = {
    kind: set()
    for kind in ("backward", "zero_grad", "clip", "unscale", "schedule", "sync")
}
# The threads in which a scaler was asked to step, and no optimizer has begun to.
asked: set[int] = set()
# The threads inside a `torch.autograd.grad`: what it computes reaches no `.grad`.
differentiating: list[int] = []
scalers: weakref.WeakSet[Any] = weakref.WeakSet()

# Torch is wrapped for a session: from the first recording's opening to the last one's closing. Others may have
# wrapped our wrappers and keep them for ever; those of an earlier session stay silent.
session: object = object()
_lock = threading.Lock()
# Held while a `.grad` may be read: torch may end the process where one thread reads it and another's backward writes
# it. A thread that begins to train what is recorded waits here, and nothing is read from then on.
reading = threading.RLock()
_cuda: Any = torch.cuda
_task = torch._C._current_graph_task_id
# The hooks of all optimizers.
_before_all_steps: dict[int, Any] = optimizers._global_optimizer_pre_hooks


Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Call:
    """A call of something that is wrapped; `result` or `error` is there once it is over."""

    # It has no `__init__`, which could fail at the user's door.
    args: Args
    kwargs: Kwargs
    frame: FrameType
    recordings: tuple[Any, ...] = ()
    result: Any = None
    error: BaseException | None = None


# What happens around one call: up to its `yield` before it, and the rest after it.
Steps = Iterator[None]
Around = Callable[[Call], Steps]


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
            # What cannot be undone stays silent, and is tried again the next time.
            undoing[:] = [undo for undo in reversed(undoing) if not _is_undone(undo)]


def _is_undone(undo: Callable[[], None]) -> bool:
    """Undo what was done to torch, and return whether that succeeded."""
    try:
        undo()
    except Exception as failure:
        failures.append(failure)
        return False
    return True


def notify(
    recordings: tuple[Any, ...],
    what: str,
    *args: Any,
) -> list[tuple[Any, Any]]:
    """Call this method of each recording, and return their answers; one that fails stops.

    Modes of the user's do not see it: a FLOP counter would count what we read.
    """
    answers = []
    with reading:
        if capturing():
            # What we read would be captured, too: they stop at the next call after it.
            failures.append(RuntimeError(_CAPTURED))
            return []
        if failures:
            stop_failed(listening)
            return []
        for recording in recordings:
            try:
                answer = unseen(getattr(recording, what), *args)
                answers.append((recording, answer))
            except BaseException as failure:
                failures.append(failure)
                stop_failed((recording,))
                if not isinstance(failure, Exception):  # a key that was pressed
                    raise
    return answers


def stop_failed(recordings: tuple[Any, ...]) -> None:
    """Stop these recordings, because something of ours has failed; one that fails at that as well is let go."""
    failure = failures[-1]
    for recording in recordings:
        try:
            recording.failed(failure)
        except Exception:
            recording.failure = type(failure).__name__
            with suppress(Exception):
                leave(recording)
    failures.clear()


def capturing() -> bool:
    """Return whether what is done now goes into a CUDA graph instead of being done."""
    return bool(
        _cuda._initialized
        and _cuda.is_initialized()
        and _cuda.is_current_stream_capturing()
    )


def _close_all() -> None:
    """Close what was never closed with the process, so that its file is whole."""
    # In an interactive session, what was raised last ended a line, and not the session.
    interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
    error = getattr(sys, "last_value", None)
    ended = "exit" if error is None or interactive else describe(error)
    notify(listening, "stop", ended)


def _in_child() -> None:
    """In a forked process nothing is recorded, and no thread of its parent is in the middle of anything."""
    global listening, _lock, reading
    listening, _lock, reading = (), threading.Lock(), threading.RLock()
    for busy in (*inside.values(), asked):
        busy.intersection_update((get_ident(),))


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# --- the guard ---------------------------------------------------------------------------------


def guarded(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of our functions, which torch or the user calls: what it raises is kept in `failures`.

    `notify` stops all recordings at the next event.
    """

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except Exception as failure:
            failures.append(failure)

    return call


def passed_over(ours: Any) -> Any:
    """Have warnings that are raised below one of our functions name the user's line, as they do without us.

    Their `stacklevel` counts no frame whose file has the two words.
    """
    code = ours.__code__
    file = f"{code.co_filename} (importlib _bootstrap)"
    ours.__code__ = code.replace(co_filename=file)
    return ours


def wrapper(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """Return what takes `original`'s place for this session: it runs `around` each call, guarded."""
    made_for = session

    def call(*args: Any, **kwargs: Any) -> Any:
        if not listening or session is not made_for:
            return original(*args, **kwargs)
        made = Call()
        made.args, made.kwargs = args, kwargs
        steps: Steps = iter(())
        try:
            # A device's thread has no frame below this one.
            frame = sys._getframe()
            made.frame = frame.f_back or frame
            made.recordings = listening
            steps = around(made)
            next(steps, None)
        except Exception as failure:
            failures.append(failure)
        try:
            made.result = original(*made.args, **made.kwargs)
            return made.result
        except BaseException as raised:
            made.error = raised
            raise
        finally:
            try:
                next(steps, None)
            except Exception as failure:
                failures.append(failure)
            # The error and this frame would hold each other.
            del made, steps, frame

    return functools.update_wrapper(passed_over(call), original)


def replace(
    owner: Any,
    name: str,
    ours: Any,
) -> Callable[[], None]:
    """Put ours in the place of something of torch's; return how to undo that."""
    original = getattr(owner, name)

    def undo() -> None:
        # Somebody who wrapped ours in the meantime keeps working: ours passes straight through.
        if getattr(owner, name, None) is ours:
            setattr(owner, name, original)

    setattr(owner, name, ours)
    return undo


def _wrap(owner: Any, name: str, around: Around) -> None:
    # Another torch version lacks it: the change is seen as an edit.
    if hasattr(owner, name):
        ours = wrapper(getattr(owner, name), around)
        undoing.append(replace(owner, name, ours))


def _wrap_decorated(decorated: Any, around: Around) -> None:
    """Wrap a function inside its `no_grad` decorator, where those who imported it by name call it, too."""
    original = decorated.__wrapped__
    for cell in decorated.__closure__:
        if cell.cell_contents is original:
            cell.cell_contents = wrapper(original, around)
            undoing.append(functools.partial(setattr, cell, "cell_contents", original))


# --- what is wrapped ---------------------------------------------------------------------------


def _install() -> None:
    _leave_to_python()
    nn, optim, amp = torch.nn, torch.optim, torch.amp
    replica = nn.parallel.DistributedDataParallel
    table: list[tuple[Any, str, Around]] = [
        (torch.autograd, "backward", _backward),
        # `backward` and `grad` under any name they were imported by
        (torch.autograd, "_engine_run_backward", _engine_runs),
        (optim.Optimizer, "zero_grad", _changing("zero_grad", _read_zero)),
        (nn.Module, "zero_grad", _changing("zero_grad", _read_zero)),
        (amp.GradScaler, "scale", _scaling),
        (amp.GradScaler, "unscale_", _changing("unscale", _read_unscale)),
        (amp.GradScaler, "_maybe_opt_step", _maybe_stepping),
        (torch.utils, "swap_tensors", _swapping),
        (torch.utils.data.DataLoader, "__iter__", _then("loads")),
        (Iterating, "__next__", _loader_ends),
        (torch, "compile", _compiling),
        (Tensor, "register_hook", _hooking),
        # A hook of the module's own would be copied and pickled with it; its `forward` may have been bound before.
        (replica, "_pre_forward", _then("forwards")),
    ]
    for owner, name, around in table:
        _wrap(owner, name, around)
    # `clip_grad_norm_` ends in a function of its own that changes the grads.
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        read = functools.partial(_read_clip, name)
        _wrap_decorated(getattr(clip_grad, name), _changing("clip", read))
    if torch.distributed.is_available():
        _wrap_decorated(torch.distributed.all_reduce, _reducing)
    for scheduler in dict.fromkeys(_schedulers(LRScheduler)):
        _wrap(scheduler, "step", _scheduling)
    undoing.append(register_optimizer_step_pre_hook(guarded(_step_begins)).remove)
    undoing.append(register_optimizer_step_post_hook(guarded(_step_ends)).remove)


def _backward(call: Call) -> Steps:
    if call.args and isinstance(call.args[0], Iterator):
        # It can be read once, and torch has to.
        call.args = (tuple(call.args[0]), *call.args[1:])
    return _running(call, call.args, call.kwargs)


def _running(call: Call, args: Args, kwargs: Kwargs) -> Steps:
    """Tell of a backward that was called with these arguments.

    Inside the engine (a reentrant checkpoint) it is part of the backward that is running; so is ours, called inside
    itself by what has wrapped it.
    """
    busy, thread = inside["backward"], get_ident()
    if thread in busy or _task() != -1:
        return
    begun = notify(call.recordings, "backward_begins", call.frame, args, kwargs)
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


def _engine_runs(call: Call) -> Steps:
    if not call.kwargs.get("accumulate_grad", True):
        return _differentiating()
    if get_ident() in inside["backward"]:
        return iter(())
    *roots, inputs = call.args
    return _running(call, tuple(roots), {"inputs": inputs or None})


def _differentiating() -> Steps:
    thread = get_ident()
    try:
        differentiating.append(thread)
        yield
    finally:
        differentiating.remove(thread)


# From a call's arguments: whose `.grad` it changes (for the label), the tensors, and the event's details; or nothing.
_Change = tuple[Any, Any, Kwargs]
_Read = Callable[[Args, Kwargs], _Change | None]


def _changing(kind: str, read: _Read) -> Around:
    """Tell those recordings whose tensors it may touch of a call that changes `.grad` in place.

    Inside it, further calls of the same kind are the same event.
    """

    def around(call: Call) -> Steps:
        busy, thread = inside[kind], get_ident()
        if thread in busy:
            return
        if kind == "clip":
            _read_twice(call)
        change = read(call.args, call.kwargs)
        if change is None:
            return
        owner, tensors, details = change
        answers = notify(call.recordings, "change_begins", tensors)
        try:
            busy.add(thread)
            yield
        finally:
            busy.discard(thread)
        if call.error is not None:
            return  # what raised has not happened; what it changed nonetheless is an edit
        touched = tuple(recording for recording, touches in answers if touches)
        notify(touched, "change_ends", kind, call.frame, owner, tensors, details)

    return around


def _read_twice(call: Call) -> None:
    """Have the tensors of a clip in a list: torch has to read them as well, and a generator can be read once."""
    if call.args and isinstance(call.args[0], Iterator):
        call.args = (list(call.args[0]), *call.args[1:])
    elif isinstance(call.kwargs.get("parameters"), Iterator):
        call.kwargs["parameters"] = list(call.kwargs["parameters"])


def _read_zero(args: Args, kwargs: Kwargs) -> _Change:
    return args[0], args[0], {}


def _read_clip(name: str, args: Args, kwargs: Kwargs) -> _Change:
    by_value = name == "clip_grad_value_"
    names = ("clip_value",) if by_value else ("max_norm", "total_norm")
    limits = dict(zip(names, args[1:], strict=False))
    limits |= {limit: kwargs[limit] for limit in names if limit in kwargs}
    details = {"by": "value" if by_value else "norm", **limits}
    given = args[0] if args else kwargs["parameters"]
    if isinstance(given, list) and not given:
        details["of_nothing"] = True
    return None, [given] if isinstance(given, Tensor) else given, details


def _read_unscale(args: Args, kwargs: Kwargs) -> _Change | None:
    optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
    if not getattr(args[0], "_enabled", True):  # switched off, it does nothing
        return None
    names = {"amp_scale": "_scale", "growth": "_growth_factor"}
    scaler = {name: getattr(args[0], held, None) for name, held in names.items()}
    return optimizer, optimizer, scaler


def _reducing(call: Call) -> Steps:
    """Tell of a sum or a mean over all ranks that is there when the call returns; another one is told of before."""
    names = "tensor", "op", "group", "async_op"
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    sums, means = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG
    op = given.get("op", sums)
    everywhere = given.get("group") in (None, torch.distributed.group.WORLD)
    if (
        op not in (sums, means)
        or given.get("async_op")
        or not everywhere
        or _task() != -1
    ):
        return
    answers = notify(call.recordings, "reduction_begins", given["tensor"])
    concerned = [(recording, leaves) for recording, leaves in answers if leaves]
    if not concerned:
        return
    busy, thread = inside["sync"], get_ident()
    try:
        busy.add(thread)
        yield
    finally:
        busy.discard(thread)
    if call.error is not None:
        return  # what raised has not happened
    reduction = "sum" if op == sums else "mean"
    for recording, leaves in concerned:
        notify((recording,), "reduced", given["tensor"], leaves, reduction, call.frame)


def _scaling(call: Call) -> Steps:
    scalers.add(call.args[0])
    yield


def _maybe_stepping(call: Call) -> Steps:
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
        notify(call.recordings, "step_skipped", optimizer, call.frame)


def _step_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    asked.discard(get_ident())
    notify(listening, "step_begins", optimizer, sys._getframe(2))


def has_hooks_before(optimizer: Any) -> bool:
    """Return whether hooks of the user's run before this optimizer's step, and may change `.grad`."""
    mine = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return has_users(mine) or has_users(_before_all_steps)


def has_users(hooks: dict[int, Any] | None) -> bool:
    """Return whether some of these hooks are neither ours nor torch's."""
    for hook in (hooks or {}).values():
        function = getattr(hook, "func", hook)
        module = getattr(function, "__module__", None) or ""
        if hook is not None and not module.startswith(("accumviz.", "torch.")):
            return True
    return False


def _step_ends(optimizer: Any, args: Any, kwargs: Any) -> None:
    notify(listening, "step_ends", optimizer, sys._getframe(2))


def _schedulers(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield this class of schedulers and those below it that step in a way of their own."""
    if "step" in vars(kind):
        yield kind
    for child in kind.__subclasses__():
        yield from _schedulers(child)


def _scheduling(call: Call) -> Steps:
    busy, thread = inside["schedule"], get_ident()
    if thread in busy:  # a scheduler made of others is one
        return
    try:
        busy.add(thread)
        yield
    finally:
        busy.discard(thread)
    if call.error is None and not _is_being_made(call.frame):
        notify(call.recordings, "scheduled", call.args[0], call.frame)


def _is_being_made(frame: FrameType | None) -> bool:
    """Return whether this is the step that a scheduler takes while it is made."""
    while frame is not None and frame.f_code.co_name == "step":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_initial_step"


def _swapping(call: Call) -> Steps:
    notify(call.recordings, "swap_begins")
    yield
    notify(call.recordings, "swap_ends")


def _loader_ends(call: Call) -> Steps:
    yield
    if isinstance(call.error, StopIteration):
        notify(call.recordings, "loads", call.args[0], call.frame)


def _then(what: str) -> Around:
    """Tell of a method once it has returned: on what it was called, and where."""

    def around(call: Call) -> Steps:
        yield
        if call.error is None:
            notify(call.recordings, what, call.args[0], call.frame)

    return around


def _hooking(call: Call) -> Steps:
    """Have a hook of the user's on what a forward computed tell when it changes the gradient."""
    if len(call.args) == 2:
        tensor, hook = call.args
        if tensor.grad_fn is not None and has_users({0: hook}):
            call.args = tensor, functools.partial(_between, hook)
    yield


def _between(hook: Any, grad: Tensor) -> Any:
    """Run a hook, and tell of it if it gives another gradient than it was given."""
    changed = hook(grad)
    try:
        if changed is not None and changed is not grad:
            for recording in listening:
                recording.gradient_replaced()
    except Exception as failure:
        # Inside a backward nothing can be stopped: what has failed waits for its end.
        failures.append(failure)
    return changed


def _compiling(_: Call) -> Steps:
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

        if __package__ not in _left:
            _left.add(__package__)
            trace_rules.add(__package__)
