"""Who is told of what torch does: the recordings that are open, what is wrapped for them, and what failed.

A session lasts from the first recording's opening to the last one's closing. What fails in one of them stays
inside: it is told so, and nobody else is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import torch


class Observer(Protocol):
    """What an open recording is told; `frame` is where to start looking for the user's line."""

    def failed(self, error: BaseException) -> None: ...
    def stop(self, ended: str) -> None: ...
    def forked(self) -> None: ...
    def backward_begins(
        self, frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def backward_ends(self, token: Any, error: BaseException | None) -> None: ...
    def backward_nests(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def step_begins(self, optimizer: Any, frame: FrameType) -> None: ...
    def step_prepared(self, optimizer: Any, frame: FrameType) -> None: ...
    def step_ends(self, optimizer: Any, frame: FrameType) -> None: ...
    def step_skipped(self, optimizer: Any, frame: FrameType) -> None: ...
    def scheduled(self, scheduler: Any, frame: FrameType) -> None: ...
    def loads(self, what: str, source: Any, frame: FrameType) -> None: ...
    def change_begins(self, tensors: Any) -> bool: ...
    def change_ends(
        self,
        kind: str,
        frame: FrameType,
        owner: Any,
        tensors: Any,
        details: dict[str, Any],
    ) -> None: ...
    def captures(self, frame: FrameType) -> None: ...
    def replayed(self, graph: Any, frame: FrameType) -> None: ...
    def forwards(self, module: Any, frame: FrameType) -> None: ...
    def waited(self, work: Any, frame: FrameType) -> None: ...
    def swap_begins(self, tensors: tuple[Any, ...]) -> Any: ...
    def swap_ends(self, token: Any) -> None: ...


# A wrapper is made for a session: torch wrapped from the first recording's opening to the last one's closing.
Session = object
Around = Callable[[Callable[..., Any], Session], Callable[..., Any]]


# Replaced, never changed: whoever is told goes through the recordings that were open when it happened.
listening: tuple[Observer, ...] = ()
# Others may have wrapped our wrappers, and keep them for ever: those of an earlier session stay silent.
current: Session = object()
_lock = threading.Lock()
undoing: list[Callable[[], None]] = []
# The threads that are in the middle of each, as sets: what `threading.local` keeps costs several times as much.
inside: dict[str, set[int]] = {
    kind: set() for kind in ("backward", "zero_grad", "clip", "unscale", "schedule")
}
# Those in which a scaler was asked to step, and no optimizer has begun to.
asked: set[int] = set()
# What failed and could not be told to whom it concerned: recordings that are open then are not whole.
failures: list[str] = []


def enter(observer: Observer, install: Callable[[Session], None]) -> None:
    """Tell this observer what happens from now on; `install` wraps torch for the first one's session."""
    global listening, current  # noqa: PLW0603 - torch is patched once for the whole process
    with _lock:
        if not listening:
            current = object()
            install(current)
        listening = (*listening, observer)


def leave(observer: Observer) -> None:
    """Stop telling it; the last one out leaves torch as it was."""
    global listening, current  # noqa: PLW0603 - as above
    with _lock:
        listening = tuple(other for other in listening if other is not observer)
        if not listening:
            current = object()
            left = []
            while undoing:
                undo = undoing.pop()
                try:
                    undo()
                except Exception:  # it stays silent, and is tried again the next time
                    left.append(undo)
            undoing.extend(reversed(left))


def _close_all() -> None:
    """What was never closed is closed with the process, so that its file is whole."""
    for observer in listening:
        tell((observer,), "stop", _ended_by())


def _ended_by() -> str:
    """How the script ended: by an exception, whose text this is, or by itself."""
    # In an interactive session, what was raised last ended a line, and not the session.
    interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
    error = (
        None
        if interactive
        else getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    )
    return "exit" if error is None else said(error)[:500]


def _in_child() -> None:
    """A forked process goes on without our files, and without locks that some thread of its parent held."""
    global _lock  # noqa: PLW0603 - as above
    _lock = threading.Lock()
    for threads in (
        *inside.values(),
        asked,
    ):  # this one's number stays, others' may be given out again
        threads.intersection_update((get_ident(),))
    for observer in listening:
        tell((observer,), "forked")


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


_cuda: Any = torch.cuda


def capturing() -> bool:
    """Whether what is done now goes into a CUDA graph instead of being done."""
    # The flag first: this is asked at every event, and whether we are in a fork only matters where there is a device.
    return bool(
        _cuda._initialized
        and _cuda.is_initialized()
        and _cuda.is_current_stream_capturing()
    )


def said(error: BaseException) -> str:
    """An exception's kind and text, even where making the text raises."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}"


def told(session: Session) -> tuple[Observer, ...]:
    """The open recordings; nobody while a CUDA graph is captured, which would capture what we read, too."""
    observers = listening if session is current else ()
    if observers and _cuda._initialized and capturing():
        tell(observers, "captures", sys._getframe(2))
        return ()
    return observers


def tell(
    observers: tuple[Observer, ...], what: str, *args: Any
) -> list[tuple[Observer, Any]]:
    """Call this method of each; one that fails is told so, and heard no more.

    What every step passes calls the method itself: finding it by its name costs as much as the rest of the door.
    """
    answers = []
    for observer in observers:
        try:
            answers.append((observer, getattr(observer, what)(*args)))
        except BaseException as error:
            caught(observer, error)
    return answers


def caught(observer: Observer, error: BaseException) -> None:
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


def fail(error: BaseException) -> None:
    """Something of ours failed before we knew whom to tell."""
    for observer in listening:
        failures.append(type(error).__name__)
        with contextlib.suppress(Exception):
            fails(observer, error)
            failures.pop()


def _uncounted(wrapper: Any) -> Any:
    """The wrapper, passed over by whoever warns of a line so many callers above it.

    That is said of the frames in which Python imports, which `warnings` knows by their file.
    """
    code = wrapper.__code__
    wrapper.__code__ = code.replace(
        co_filename=f"{code.co_filename} (passed over as importlib._bootstrap is)"
    )
    return wrapper


def wrap(owner: Any, name: str, around: Around, session: Session) -> None:
    """Put `around` what an owner has under this name, for this session."""
    original = getattr(owner, name, None)
    if (
        original is None
    ):  # a private helper that another torch version lacks: the change is still seen as an edit
        return
    wrapper = functools.update_wrapper(_uncounted(around(original, session)), original)

    def undo() -> None:
        # Somebody who wrapped ours in the meantime keeps working: ours passes straight through.
        if getattr(owner, name, None) is wrapper:
            setattr(owner, name, original)

    setattr(owner, name, wrapper)
    undoing.append(undo)


def wrap_decorated(decorated: Any, around: Around, session: Session) -> None:
    """Wrap a function inside its `no_grad` decorator, where those who imported it by name call it too."""
    original = getattr(decorated, "__wrapped__", None)
    for cell in getattr(decorated, "__closure__", None) or ():
        if original is not None and cell.cell_contents is original:
            cell.cell_contents = _uncounted(around(original, session))
            undoing.append(functools.partial(setattr, cell, "cell_contents", original))
