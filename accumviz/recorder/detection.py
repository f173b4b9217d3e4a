"""Find what a script trains, and open a recording when its first training step begins."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import torch

from accumviz.recorder import patches
from accumviz.recorder.callsite import Caller, CallSites
from accumviz.recorder.recording import Recording
from accumviz.recorder.targets import Named, collect, distinct, names_of, parameters

# A script that makes a model for each fold or trial is recorded so many times.
_MOST = 4
_MANY = f"the first {_MOST} models were recorded, and later ones were not"


class Detector:
    """Sees optimizers being made, and opens a recording of what they train when the training begins.

    It begins with a data loader, a forward in training mode (both once there is an optimizer), or a backward. What is
    made later has a recording of its own. `recordings` and `notes`, on what was not recorded, grow as it sees more.
    """

    def __init__(
        self,
        path: Path | None,
        recordings: list[Recording],
        notes: list[str],
        *,
        exact: int = 64,
    ) -> None:
        self._path = path
        self._exact = exact
        self.recordings = recordings
        self.notes = notes
        self._number = 1  # of the first name that no other run has
        # For each recording that is open, the optimizers that it was opened with.
        self._opened: dict[Recording, list[ref[Any]]] = {}
        self._optimizers: list[ref[Any]] = []
        self._armed = self._closed = False
        self._process = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._forget_optimizers = self._watch_optimizers()
        self._arm()

    # --- when ----------------------------------------------------------------------------------

    def _watch_optimizers(self) -> Callable[[], None]:
        """See which optimizers are made; return how to end that."""
        original = torch.optim.Optimizer.__init__

        @functools.wraps(original)
        @patches.passed_over
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - its name in torch
            original(optimizer, *args, **kwargs)
            try:
                if not self._closed and os.getpid() == self._process:
                    self._optimizers.append(ref(optimizer))
                    self._arm()
            except Exception as failure:
                self._fail(failure)

        return patches.replace(torch.optim.Optimizer, "__init__", __init__)

    def _arm(self) -> None:
        """Be told when a training step begins, once."""
        if not self._armed:
            self._armed = True
            self._watch(torch.nn.Module, "__call__", self._trains)
            loader = torch.utils.data.DataLoader
            self._watch(loader, "__iter__", self._has_optimizer)
            self._watch(torch.autograd, "backward", lambda *_: True)

    def _disarm(self) -> None:
        self._armed = False
        while self._undo:
            self._undo.pop()()

    def _watch(
        self,
        owner: Any,
        name: str,
        begins: Callable[..., bool],
    ) -> None:
        """Open a recording at the first call of something with which a training step begins."""
        original = getattr(owner, name)

        @functools.wraps(original)
        @patches.passed_over
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._armed or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            before = getattr(owner, name)
            try:
                if begins(*args[:1]):
                    self._open(sys._getframe(1))
            except Exception as failure:
                self._fail(failure)
            now = getattr(owner, name)
            # A recording that was opened just now wants to see this call, too.
            return (original if now is before else now)(*args, **kwargs)

        self._undo.append(patches.replace(owner, name, call))

    def _has_optimizer(self, *_: Any) -> bool:
        return bool(self._alive())

    def _trains(self, module: Any) -> bool:
        return module.training and torch.is_grad_enabled() and self._has_optimizer()

    def _fail(self, failure: Exception) -> None:
        self._armed = False
        said = f"{type(failure).__name__}: {failure}"
        self._note(f"some of the training was not recorded: {said}")

    def _note(self, said: str) -> None:
        if said not in self.notes:
            self.notes.append(said)

    # --- what ----------------------------------------------------------------------------------

    def _open(self, frame: FrameType) -> None:
        """Record every model and optimizer that no recording has."""
        if self._closed or os.getpid() != self._process:
            return
        self._armed = False  # while we look: another thread may begin, too
        recorded = {id(p) for recording in self._opened for p in recording.tensors}
        fresh = [each for each in self._alive() if not recorded.issuperset(_ids(each))]
        if self.recordings and not fresh:
            self._disarm()
            return
        # `scaler.scale(model(x))` was looked up before the forward that has us called.
        patches.scalers.update(_living(torch.amp.GradScaler))
        caller = CallSites().owner(frame)
        roots = _roots(fresh, recorded, caller)
        if not _can_train(roots, fresh):
            self._armed = True
            return
        self._disarm()
        self._close_those_that_are_over()
        self._record(roots, fresh, caller)

    def _alive(self) -> list[Any]:
        optimizers = [reference() for reference in self._optimizers]
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def _record(
        self,
        roots: list[Any],
        optimizers: list[Any],
        caller: Caller,
    ) -> None:
        if len(self.recordings) >= _MOST:
            self._note(_MANY)
            self._closed = True
            return
        groups = _grouped(roots, caller) if len(roots) > 1 else {}
        given = (*optimizers,) if groups else (*roots, *optimizers)
        recording = self._started(collect(given, groups, caller), caller)
        self.recordings.append(recording)
        self._opened[recording] = [ref(each) for each in optimizers]

    def _started(self, named: Named, caller: Caller) -> Recording:
        """Return an open recording in a file of its own: a name that another run has taken gets a number."""
        while True:
            place = self._place()
            recording = Recording(
                named, caller, path=place, exact=self._exact, memory=None
            )
            try:
                recording.start()
                break
            except FileExistsError:
                self._number += 1
        named.optimizers.clear()  # none is held: a loop may make one for each epoch
        return recording

    def _place(self) -> Path | None:
        if self._path is None:
            return None
        stem = self._path.stem
        if self._number > 1:
            stem += f"-{self._number}"
        if self.recordings:
            stem += f".model{len(self.recordings) + 1}"
        return self._path.with_stem(stem)

    def _close_those_that_are_over(self) -> None:
        for recording, optimizers in list(self._opened.items()):
            if optimizers and all(reference() is None for reference in optimizers):
                recording.stop()
                del self._opened[recording]

    def close(self, ended: str) -> None:
        """Close all recordings; afterwards nothing of ours is left in torch."""
        self._closed = True
        self._forget_optimizers()
        self._disarm()
        for recording in self._opened:
            recording.stop(ended)


def _living(kind: type[Any]) -> list[Any]:
    """Return all modules, or all gradient scalers, that there are."""
    # By class: a proxy says that it is one, and may do anything when it is asked.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _can_train(roots: list[Any], optimizers: list[Any]) -> bool:
    """Return whether all of these parameters are there, and some require grad: else something else begins."""
    given = [p for optimizer in optimizers for p in parameters(optimizer)]
    given += [p for root in roots for p in root.parameters()]
    if any(map(torch.nn.parameter.is_lazy, given)):  # a forward makes them
        return False
    return any(p.requires_grad for p in given)


def _ids(optimizer: Any) -> set[int]:
    return set(map(id, parameters(optimizer)))


def _roots(
    optimizers: list[Any],
    recorded: set[int],
    caller: Caller,
) -> list[Any]:
    """Return the models that are trained: whole ones, not their parts, and neither losses nor what only wraps them.

    They share parameters with an optimizer, or some caller has a name for them; with neither, all are taken. What an
    optimizer owns may be frozen only now, as a GAN's players are by turns.
    """
    owned = set[int]().union(*map(_ids, optimizers))
    wanted = []
    others = []
    for module in _whole_models():
        trained = _trained(module, owned)
        if not trained or trained & recorded:
            continue
        if trained & owned or (not recorded and any(names_of(module, caller))):
            wanted.append(module)
        else:
            others.append(module)
    return wanted if wanted or owned else others


def _trained(module: Any, owned: set[int]) -> set[int]:
    """Return the parameters of a model that require grad, or that an optimizer owns."""
    has = list(module.parameters())
    trained = {id(p) for p in has if p.requires_grad}
    return trained | owned.intersection(map(id, has))


def _whole_models() -> list[Any]:
    """Return the modules that are no part of another, without the compiler's wrapper."""
    modules = _living(torch.nn.Module)
    inner: set[int] = set()
    for module in modules:
        children = [child for child in module.modules() if child is not module]
        inner.update(map(id, children))
    whole = [module for module in modules if id(module) not in inner]
    return [getattr(one, "_modules", {}).get("_orig_mod", one) for one in whole]


def _grouped(roots: list[Any], caller: Caller) -> dict[str, Any]:
    """Return the models by the names that they have in the caller, each once."""
    groups: dict[str, Any] = {}
    for root in roots:
        name = type(root).__name__
        # Inside a function, several models have one name: the outermost counts.
        for name in names_of(root, caller):  # noqa: B007
            pass
        groups[distinct(name, groups)] = root
    return groups
