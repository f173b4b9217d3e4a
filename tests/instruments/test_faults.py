"""Whatever of ours fails, training goes on bit for bit as if we were not there, and the recording says that it stopped.

Each function of the recorder that runs while a loop trains is made to raise, one at a time: once, at
its first call or in the middle of the loop, or at every call. `record(...)` itself judges its
arguments and may raise; from `with` on nothing may.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumviz as av

OURS = str(Path(sys.modules[av.record.__module__].__file__ or "").parent) + os.sep
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "graphs": {"graphs": True},
    "memory": {"memory": True},
    "path": {"path": "run.ledger"},
}
Train = Callable[[Callable[..., Any]], list[torch.Tensor]]


class Fault(Exception):
    """Planted."""

    def __str__(self) -> str:
        return "planted"


# --- loops ----------------------------------------------------------------------------------------


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def alone(around: Callable[..., Any]) -> list[torch.Tensor]:
    """What a loop does to `.grad`, each thing at least once."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with around(model, optimizer):
        for step in range(2):
            for _ in range(2):
                loss = model(torch.randn(3, 4)).square().mean() / 2
                scaler.scale(loss * (float("inf") if step else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        model[0].weight.grad = torch.ones(6, 4)
        hidden = checkpoint(model, torch.randn(3, 4), use_reentrant=False)
        (hidden.square().mean() / 2).backward()
        with contextlib.suppress(ValueError):
            Refusing.apply(model(torch.randn(3, 4))).sum().backward()
        optimizer.step()
        model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _in_ranks(model: Any, around: Callable[..., Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with around(model, optimizer):
        for _ in range(2):
            with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
                (model(torch.randn(3, 4)).square().mean() / 2).backward()
            (model(torch.randn(3, 4)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def replicated(around: Callable[..., Any]) -> list[torch.Tensor]:
    return _in_ranks(nn.parallel.DistributedDataParallel(net()), around)


def sharded(around: Callable[..., Any]) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for part in (model[0], model[2], model):
        fully_shard(part)
    return _in_ranks(model, around)


# --- faults ---------------------------------------------------------------------------------------


def is_ours(frame: types.FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def name_of(code: types.CodeType) -> str:
    return f"{code.co_filename.removeprefix(OURS)}:{code.co_firstlineno} {code.co_qualname}"


@contextlib.contextmanager
def counting(calls: Counter[types.CodeType], doors: list[types.CodeType]) -> Iterator[None]:
    """Count the calls of each function of ours; those that others call are doors."""

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and is_ours(frame) and frame.f_code.co_name != "<module>":
            calls[frame.f_code] += 1
            if not is_ours(frame.f_back) and frame.f_code not in doors:
                doors.append(frame.f_code)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def once(code: types.CodeType, at: int) -> Iterator[None]:
    """Have one call of a function raise; Python itself then forgets the profiler."""
    seen = 0

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal seen
        if event == "call" and frame.f_code is code:
            seen += 1
            if seen == at:
                raise Fault

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def always(*codes: types.CodeType) -> Iterator[None]:
    """Have every call of these functions raise, whoever holds them already."""
    found = [f for f in gc.get_objects() if type(f) is types.FunctionType and f.__code__ in codes]
    kept = [(function, function.__code__) for function in found]
    for function, code in kept:
        function.__code__ = raising(code)
    try:
        yield
    finally:
        for function, code in kept:
            function.__code__ = code


def raising(code: types.CodeType) -> types.CodeType:
    """Code that raises, in place of this one: it must close over as many variables."""
    names = "".join(f"{name}, " for name in code.co_freevars)
    lines = ["def outside():", *([f"    {names}= ({'0, ' * len(code.co_freevars)})"] if names else [])]
    lines += [f"    def {code.co_name.strip('<>')}(*args, **kwargs):", "        raise 'fault'"]
    lines += [f"        ({names})"] if names else []
    space: dict[str, Any] = {}
    exec("\n".join([*lines, f"    return {code.co_name.strip('<>')}.__code__"]), space)
    made: types.CodeType = space["outside"]()
    return made.replace(co_consts=tuple(Fault if constant == "fault" else constant for constant in made.co_consts))


# --- what must hold -------------------------------------------------------------------------------


class Run:
    """A loop under a recording, with something planted from `with` on."""

    def __init__(self, train: Train, mode: dict[str, Any] | None, plant: Any = None) -> None:
        self.raised, self.made = "", []
        self.recording: Any = None
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), unraisable():
            warnings.simplefilter("ignore")
            self._mode, self._folder, self._plant = mode, Path(folder), plant or contextlib.nullcontext()
            torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
            try:
                self.made = train(self._around)
            except Exception as error:
                self.raised = f"{type(error).__name__}: {error}"
            sys.setprofile(None)
            self.random = torch.get_rng_state()
            self.ledger = self.recording.ledger if self.recording is not None else None
            files = sorted(Path(folder).glob("*.ledger"))
            self.file: Any = av.load(files[0], repair=True) if files else None

    @contextlib.contextmanager
    def _around(self, *objects: Any) -> Iterator[None]:
        if self._mode is None:
            yield
            return
        options = dict(self._mode)
        if "path" in options:
            options["path"] = self._folder / options["path"]
        self.recording = av.record(*objects, **options)
        with self._plant, self.recording:
            yield


@contextlib.contextmanager
def unraisable() -> Iterator[None]:
    """What fails while something is thrown away is printed by Python, and reaches nobody."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def problems(bare: Run, right: Run, train: Train, mode: dict[str, Any], plant: Any) -> list[str]:
    """What a fault did to training, or to the truth of what is recorded."""
    try:
        run = Run(train, mode, plant)
    except Exception as error:
        return [f"what is left cannot be read: {type(error).__name__}: {error}"]
    if run.raised != bare.raised:
        return [f"training raised {run.raised}"]
    if not all(map(torch.equal, run.made, bare.made)) or not torch.equal(run.random, bare.random):
        return ["training went another way"]
    found = [
        f"the {what} is silent"
        for what, ledger in (("ledger", run.ledger), ("file", run.file))
        if ledger and silent(ledger, right.ledger)
    ]
    if "path" in mode and run.file is None and not silent(run.ledger, right.ledger):
        return found if "stopped" in run.ledger.meta else [*found, "there is no file"]
    return found


def silent(ledger: Any, right: Any) -> bool:
    """Whether a ledger lacks something without saying so."""
    if "Fault" in str(ledger.meta.get("stopped", "")) or "Fault" in str(ledger.meta.get("notes", "")):
        return False
    return [event.kind for event in ledger] != [event.kind for event in right] or not all(
        np.array_equal(getattr(ledger, name), getattr(right, name), equal_nan=name != "state")
        for name in ("state", "contribution", "grad")
    )


def survey(train: Train, mode: dict[str, Any]) -> tuple[int, dict[str, list[str]]]:
    """Plant every fault in one loop; returns how many were planted, and what each that was felt did."""
    bare = Run(train, None)
    Run(train, mode)  # what is imported or made on first use
    calls: Counter[types.CodeType] = Counter()
    doors: list[types.CodeType] = []
    right = Run(train, mode, counting(calls, doors))
    assert right.raised == bare.raised
    codes = sorted(calls, key=name_of)
    planted: list[tuple[str, Callable[[], Any]]] = []
    for code in codes:
        planted.append((f"{name_of(code)}, first call", lambda code=code: once(code, 1)))
        if calls[code] > 2:
            middle = calls[code] // 2 + 1
            planted.append((f"{name_of(code)}, call {middle}", lambda code=code, at=middle: once(code, at)))
        planted.append((f"{name_of(code)}, always", lambda code=code: always(code)))
    # What runs only when something has failed: that, too, may fail.
    for door in doors[:: max(1, len(doors) // 4)]:
        after: Counter[types.CodeType] = Counter()
        with always(door):
            Run(train, mode, counting(after, []))
        for code in sorted(set(after) - set(calls), key=name_of):
            name = f"{name_of(code)} after {name_of(door)}, always"
            planted.append((name, lambda code=code, door=door: always(door, code)))
    found = {}
    for name, plant in planted:
        mine = not dist.is_initialized() or dist.get_rank() == 0  # the others go on as they are
        wrong = problems(bare, right, train, mode, plant() if mine else None)
        if wrong:
            found[name] = wrong
    return len(planted), found


@pytest.mark.parametrize("mode", MODES)
def test_no_fault_of_ours_is_felt_by_a_loop(mode: str) -> None:
    planted, found = survey(alone, MODES[mode])
    assert planted > 100
    assert found == {}


def survey_in_ranks(train: Train, mode: str) -> tuple[int, dict[str, list[str]]]:
    """Faults in rank 0 alone: as many runs in each rank, or they would wait for each other."""
    return survey(train, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("train", [replicated, sharded])
def test_no_fault_of_ours_in_one_rank_is_felt_by_any(train: Train, mode: str) -> None:
    for planted, found in av.distribute(survey_in_ranks, ranks=2, timeout=250, train=train, mode=mode).returned:
        assert planted > 100
        assert found == {}
