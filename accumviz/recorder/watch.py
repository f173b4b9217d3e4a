"""Finds what a script trains, and opens a recording when its first training step begins."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import update_wrapper
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from accumviz.graph.scopes import submodules
from accumviz.recorder import patches, record
from accumviz.recorder.callsite import CallSites, variable
from accumviz.recorder.recording import Recording
from accumviz.recorder.targets import Named, collect

# A script that makes a model for each fold or trial is recorded so many times, and so many at once.
_MOST, _OPEN = 32, 8
_LIVING = (torch.nn.Module, torch.amp.GradScaler)
# So many callers are asked what they call a model.
_CALLERS = 32


class Found(NamedTuple):
    """A recording that was opened."""

    recording: Recording

    @property
    def file(self) -> Path | None:
        """The recording's file, if it has one."""
        return self.recording.file

    @property
    def counted(self) -> str:
        """How much was recorded, without reading the file."""
        return repr(self.recording).partition(": ")[2]


class Watch:
    """Sees optimizers being made, and opens a recording of what they train when the training begins.

    It begins with a data loader, a forward in training mode (both once there is an optimizer), or a
    backward. What is made later has a recording of its own.
    """

    def __init__(
        self,
        path: Path | None,
        recordings: list[Found],
        notes: list[str],
        *,
        exact: int = 64,
    ) -> None:
        record.check()
        self._path, self._recordings, self._notes, self._exact = (
            path,
            recordings,
            notes,
            exact,
        )
        # For each recording its file, the optimizers that it was opened with, and whether it still runs.
        self._opened: list[tuple[Recording, list[weakref.ref[Any]]]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._armed, self._busy, self._closed = False, False, False
        self._number = 1  # of the first name that no other run has
        self._lock = threading.RLock()
        self._undo: list[Callable[[], None]] = []
        _watching.add(self)
        _wrap(torch.optim.Optimizer, "__init__", self._making, [])
        self._arm()

    # --- when ----------------------------------------------------------------------------------

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - its name in torch
            original(optimizer, *args, **kwargs)
            try:
                # While another thread opens a recording, it is armed still, and will not be when that is open.
                with self._lock:
                    if not self._closed:
                        self._optimizers = [
                            known for known in self._optimizers if known() is not None
                        ]
                        self._optimizers.append(weakref.ref(optimizer))
                        self._arm()
            except Exception as error:
                self._fail(error)

        return __init__

    def _arm(self) -> None:
        """Be told when a training step begins, once."""
        if self._armed:
            return
        self._armed = True
        _wrap(torch.nn.Module, "__call__", self._at("forward"), self._undo)
        _wrap(torch.utils.data.DataLoader, "__iter__", self._at("loader"), self._undo)
        _wrap(torch.autograd, "backward", self._at("backward"), self._undo)

    def _at(self, what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        owner, name = {
            "forward": (torch.nn.Module, "__call__"),
            "loader": (torch.utils.data.DataLoader, "__iter__"),
            "backward": (torch.autograd, "backward"),
        }[what]

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            used = False

            def begins(*args: Any, **kwargs: Any) -> Any:
                nonlocal used
                if used or torch.compiler.is_compiling():
                    return original(*args, **kwargs)
                before = now = getattr(owner, name)
                try:
                    if self._armed and self._begins(what, args):
                        self._open(sys._getframe(1))
                        used = not self._armed
                        now = getattr(owner, name)
                except Exception as error:
                    used = True
                    self._fail(error)
                # A recording that was opened just now wants to see this call, too.
                return (original if now is before else now)(*args, **kwargs)

            return begins

        return around

    def _begins(self, what: str, args: tuple[Any, ...]) -> bool:
        if self._busy or self._closed:
            return False
        if what == "backward":
            return True
        if all(known() is None for known in self._optimizers):
            return False
        return what == "loader" or (args[0].training and torch.is_grad_enabled())

    def _fail(self, error: BaseException) -> None:
        self._armed = False
        self._note(
            f"some of the training was not recorded: {type(error).__name__}: {error}"
        )

    def _note(self, said: str) -> None:
        if said not in self._notes:
            self._notes.append(said)

    # --- what ----------------------------------------------------------------------------------

    def _open(self, frame: FrameType | None) -> None:
        """Record every model and optimizer that no recording has."""
        with self._lock:
            if not self._armed or self._busy:
                return
            self._busy = True
            try:
                optimizers = [
                    found
                    for known in self._optimizers
                    if (found := known()) is not None
                ]
                known = {
                    id(tensor)
                    for recording, _ in self._opened
                    for tensor in recording._leaves.tensors
                }
                fresh = [
                    o
                    for o in optimizers
                    if any(id(p) not in known for p in _parameters(o))
                ]
                if self._recordings and not fresh:
                    self._disarm()
                    return
                modules, scalers = _living()
                # `scaler.scale(model(x))` was looked up before the forward that has us called.
                patches.scalers.update(scalers)
                roots = _roots(modules, fresh, known, frame)
                if not roots and not any(
                    p.requires_grad for o in fresh for p in _parameters(o)
                ):
                    return  # it differentiates something that is no model, or all is frozen: training may begin later
                if any(
                    torch.nn.parameter.is_lazy(p)
                    for root in roots
                    for p in root.parameters()
                ):
                    return  # its first forward makes the parameters
                self._disarm()
                self._let_go()
                if len(self._recordings) >= _MOST:
                    self._note(
                        f"after {_MOST} models made one after the other, later ones were not recorded"
                    )
                    self._closed = True
                    return
                self._record(roots, fresh, frame)
            finally:
                self._busy = False

    def _record(
        self, roots: list[Any], optimizers: list[Any], frame: FrameType | None
    ) -> None:
        caller = CallSites().owner(frame)
        groups: dict[str, Any] = {}
        if len(roots) > 1:
            for root in roots:
                name = _called(root, caller) or type(root).__name__
                while name in groups:
                    name += "_"
                groups[name] = root
        # Without a module, what an optimizer was given is all there is.
        named = collect(() if groups else (*(roots or optimizers),), groups, caller)
        # Last, as in record(): a model knows better names for the same parameters.
        for optimizer in optimizers:
            more = collect((optimizer,), {}, caller)
            for name, tensor in zip(more.names, more.tensors, strict=True):
                if id(tensor) not in named.index:
                    named.add(name, tensor, "")
        named.optimizers[:] = optimizers
        about = {"exact": self._exact, "memory": None}
        recording = self._started(named, caller, about)
        named.optimizers.clear()  # none is held: a loop may make one for each epoch
        self._recordings.append(Found(recording))
        self._opened.append(
            (recording, [weakref.ref(optimizer) for optimizer in optimizers])
        )

    def _started(
        self, named: Named, caller: FrameType | None, about: dict[str, Any]
    ) -> Recording:
        """A recording that is open, in a file of its own: a name that another run took meanwhile gets a number."""
        optimizers = list(named.optimizers)
        while True:
            named.optimizers[:] = optimizers
            recording = Recording(named, caller, path=self._place(), **about)
            try:
                return recording.start()
            except FileExistsError:
                self._number += 1
            except OSError as error:
                self._note(
                    f"no file could be written ({error}), so the recording was held in memory, and is gone now"
                )
                self._path = None

    def _place(self) -> Path | None:
        if self._path is None:
            return None
        number = f"-{self._number}" if self._number > 1 else ""
        model = f".model{len(self._recordings) + 1}" if self._recordings else ""
        return self._path.with_name(
            f"{self._path.stem}{number}{model}{self._path.suffix}"
        )

    def _let_go(self) -> None:
        """Close the recordings of models whose optimizers are gone, and the oldest where there are many."""
        still = []
        for recording, optimizers in self._opened:
            if optimizers and all(known() is None for known in optimizers):
                recording.stop()
            else:
                still.append((recording, optimizers))
        if len(still) >= _OPEN:
            still.pop(0)[0].stop()
            self._note(
                f"only {_OPEN} models are recorded at once: the recording of the oldest was closed early"
            )
        self._opened = still

    def _disarm(self) -> None:
        self._armed = False
        while self._undo:
            self._undo.pop()()

    def close(self, ended: str) -> None:
        """Close all recordings; afterwards nothing of ours is left in torch that does anything."""
        self._closed = True
        self._disarm()
        for recording, _ in self._opened:
            recording.stop(ended)
        if not self._recordings and not self._notes:
            self._note(
                "nothing was recorded: no model or optimizer was seen training in this process"
            )


def _wrap(
    owner: Any,
    name: str,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
    undo: list[Callable[[], None]],
) -> None:
    original = getattr(owner, name)
    wrapper = update_wrapper(around(original), original)

    def back() -> None:
        if getattr(owner, name) is wrapper:
            setattr(owner, name, original)

    setattr(owner, name, wrapper)
    undo.append(back)


def _parameters(optimizer: Any) -> Iterable[Any]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


def _living() -> tuple[list[Any], list[Any]]:
    """The modules and the gradient scalers that there are."""
    # By class: a proxy says that it is one, and may do anything when it is asked.
    found = [one for one in gc.get_objects() if issubclass(type(one), _LIVING)]
    modules, scalers = (
        [one for one in found if issubclass(type(one), kind)] for kind in _LIVING
    )
    return modules, scalers


def _roots(
    modules: list[Any], optimizers: list[Any], known: set[int], frame: FrameType | None
) -> list[Any]:
    """The models that are trained: whole ones, not their parts, and neither losses nor what only wraps them.

    They share parameters with an optimizer, or some caller has a name for them; with neither, all are taken.
    """
    inner = {
        id(child)
        for module in modules
        for _, child in submodules(module)
        if child is not module
    }
    whole = []
    for module in modules:
        if id(module) in inner:
            continue
        module = getattr(module, "_modules", {}).get("_orig_mod", module)  # noqa: PLW2901 - torch.compile's wrapper
        tensors = {id(p) for p in module.parameters() if p.requires_grad}
        if tensors and not tensors & known:
            whole.append((module, tensors))
    owned = {id(p) for optimizer in optimizers for p in _parameters(optimizer)}
    caller = CallSites().owner(frame)
    wanted = [
        m
        for m, tensors in whole
        if tensors & owned or (not known and _called(m, caller))
    ]
    return wanted if wanted or owned else [m for m, _ in whole]


def _called(module: Any, frame: FrameType | None) -> str:
    """What the outermost of the callers that know it call it: inside a function, several models have one name."""
    name = ""
    for _ in range(_CALLERS):
        if frame is None:
            break
        found, frame = variable(frame, module), frame.f_back
        name = found if found not in ("", "self") else name
    return name


# In a forked process, a thread that was opening a recording is gone, and its lock with it.
_watching: weakref.WeakSet[Watch] = weakref.WeakSet()


def _in_child() -> None:
    for watch in list(_watching):
        watch._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
