"""Whatever of ours fails, training goes on bit for bit as if we were not there, and the recording says that it stopped.

Each function of the recorder that runs while a loop trains is made to raise, one at a time: once, at
its first call or in the middle of the loop, or at every call. `record(...)` itself judges its
arguments and may raise; from `with` on nothing may. What torch or the user calls is a door: it must
have a `try` of its own, and is then the one that catches; all that it calls is made to raise.
At a push each of these faults is planted in one of the modes in which its function runs, thoroughly in all.
"""

import contextlib
import dis
import functools
import gc
import os
import sys
import tempfile
import types
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import accumviz as av
from accumviz.graph import recorded
from accumviz.recorder import columns, patches
from tests.recorder.loops import MODES, Train, alone, replicated, sharded
from tests.thorough import THOROUGH

PACKAGE = str(Path(av.__file__).parent) + os.sep
# What runs while a loop trains: the recorder, and what records graphs.
OURS = PACKAGE + "recorder" + os.sep, PACKAGE + "graph" + os.sep


class Fault(Exception):
    """Planted."""

    def __str__(self) -> str:
        return "planted"


def is_ours(frame: types.FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def name_of(code: types.CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}"


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
    kept = [(function, code) for code in codes for function in holders().get(code, ())]
    for function, code in kept:
        function.__code__ = raising(code)
    try:
        yield
    finally:
        for function, code in kept:
            function.__code__ = code


@functools.cache
def holders() -> dict[types.CodeType, list[types.FunctionType]]:
    """Our functions and methods by their code; those that are made anew in each loop are made of the same."""
    found: dict[types.CodeType, list[types.FunctionType]] = {}
    gc.unfreeze()  # what is frozen is not listed
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__code__.co_filename.startswith(OURS):
            found.setdefault(thing.__code__, []).append(thing)
    gc.freeze()
    return found


def guarded(code: types.CodeType) -> bool:
    """Whether a door catches what happens behind it, or calls nothing that could fail."""
    return bool(code.co_exceptiontable) or not any("CALL" in step.opname for step in dis.get_instructions(code))


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


class Run:
    """A loop under a recording, with something planted from `with` on."""

    def __init__(self, train: Train, mode: dict[str, Any] | None, plant: Any = None) -> None:
        self.raised, self.made = "", []
        self.recording: Any = None
        self.ledger: Any
        self.file: Any
        # By count and at the end only: what is written by time is decided by others at work on the machine.
        late = mock.patch.object(columns, "_SECONDS", 3600)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), unraisable(), late:
            warnings.simplefilter("ignore")
            self._mode, self._folder, self._plant = mode, Path(folder), plant or contextlib.nullcontext()
            torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
            try:
                self.made = train(self._around)
            except Exception as error:
                self.raised = f"{type(error).__name__}: {error}"
            sys.setprofile(None)
            self.random = torch.get_rng_state()
            self.ledger, self.file, self.unread = None, None, ""
            try:
                self.ledger = self.recording.ledger if self.recording is not None else None
                files = sorted(Path(folder).glob("*.ledger"))
                self.file = av.load(files[0], repair=True) if files else None
            except Exception as error:
                self.unread = f"{type(error).__name__}: {error}"

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
def both(*plants: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
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
    run = Run(train, mode, plant)
    if run.raised != bare.raised:
        return [f"training raised {run.raised}"]
    if not all(map(torch.equal, run.made, bare.made)) or not torch.equal(run.random, bare.random):
        return ["training went another way"]
    if run.unread:
        return [f"what is left cannot be read: {run.unread}"]
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


# Whether the which-th of so many faults of a function is planted.
Wanted = Callable[[str, int, int], bool]


def plans(
    calls: Counter[types.CodeType], doors: list[types.CodeType], wanted: Wanted
) -> list[tuple[str, Callable[[], Any]]]:
    """Every fault that can be planted and is wanted, and its name."""
    planted: list[tuple[str, Callable[[], Any]]] = []
    for code in sorted((code for code in calls if code not in doors or not guarded(code)), key=name_of):
        name, middle = name_of(code), calls[code] // 2 + 1
        faults = [(f"{name}, first call", functools.partial(once, code, 1))]
        if calls[code] > 2:
            faults.append((f"{name}, call {middle}", functools.partial(once, code, middle)))
        if code in holders():
            faults.append((f"{name}, always", functools.partial(always, code)))
        planted += [fault for which, fault in enumerate(faults) if wanted(name, which, len(faults))]
    return planted


@functools.cache
def functions(mode: str) -> frozenset[str]:
    """What of ours runs while a loop of one process trains."""
    Run(alone, MODES[mode])  # what is imported or made on first use
    calls: Counter[types.CodeType] = Counter()
    Run(alone, MODES[mode], counting(calls, []))
    return frozenset(map(name_of, calls))


def number(function: str) -> int:
    """Always the same for one function, and as good as drawn."""
    return zlib.crc32(function.encode())


def every(function: str, which: int, of: int) -> bool:
    return True


def in_turn(mode: str) -> Wanted:
    """Each fault in one of the modes in which its function runs."""

    def wanted(function: str, which: int, of: int) -> bool:
        modes = [other for other in MODES if function in functions(other)] or [mode]
        return modes[(number(function) + which) % len(modes)] == mode

    return wanted


def one_of_what_runs_elsewhere(elsewhere: frozenset[str], turn: int) -> Wanted:
    """Every fault of what runs in ranks only, and of other functions one, in one of the two turns."""

    def wanted(function: str, which: int, of: int) -> bool:
        drawn, its_turn = divmod(number(function), 2)
        return function not in elsewhere or (its_turn == turn and drawn % of == which)

    return wanted


def survey(train: Train, mode: dict[str, Any], wanted: Wanted = every) -> tuple[int, dict[str, list[str]]]:
    """Plant every fault that is wanted in one loop; returns how many were planted, and what each that was felt did.

    In ranks, rank 0 alone has faults; the others train as often, and must not feel them.
    """
    mine = not dist.is_initialized() or dist.get_rank() == 0
    bare = Run(train, None)
    Run(train, mode)  # what is imported or made on first use
    calls: Counter[types.CodeType] = Counter()
    doors: list[types.CodeType] = []
    right = Run(train, mode, counting(calls, doors))
    assert right.raised == bare.raised
    assert all(map(torch.equal, right.made, bare.made)) and torch.equal(right.random, bare.random)
    planted = plans(calls, doors, wanted)
    # What runs only when something has failed: that, too, may fail.
    inside = [code for code in sorted(calls, key=name_of) if code not in doors and code in holders()]
    for n in range(3):
        first, after = inside[n * len(inside) // 3], Counter[types.CodeType]()
        run = Run(train, mode, both(always(first) if mine else contextlib.nullcontext(), counting(after, [])))
        if dist.is_initialized() and run.raised != bare.raised:  # the other ranks wait for what this one left out
            raise AssertionError(f"{name_of(first)}, always: training raised {run.raised}")
        later = sorted((set(after) & set(holders())) - set(calls), key=name_of)
        for code in later:
            name = f"{name_of(code)}, always, after {name_of(first)}"
            planted.append((name, functools.partial(always, first, code)))
    found = {}
    for n in range(agreed(len(planted))):
        name, plant = planted[n] if mine else (f"fault {n} of another rank", contextlib.nullcontext)
        wrong = problems(bare, right, train, mode, plant())
        if wrong and dist.is_initialized():  # as above
            raise AssertionError(f"{name}: {wrong}")
        if wrong:
            found[name] = wrong
    for left in (*patches.listening, None):  # what the last fault kept from leaving, or from being undone
        patches.leave(left)
    for left_watching in recorded._open:
        left_watching.close()
    return agreed(len(planted)), found


def agreed(count: int) -> int:
    """What rank 0 says, where there are ranks."""
    if not dist.is_initialized():
        return count
    said = [count]
    dist.broadcast_object_list(said, 0)
    return said[0]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_no_fault_of_ours_is_felt_by_a_loop(mode: str) -> None:
    planted, found = survey(alone, MODES[mode], every if THOROUGH else in_turn(mode))
    gc.collect()
    assert planted > 100
    assert found == {}, "\n".join(f"{k}: {v}" for k, v in found.items())


def survey_in_ranks(train: Train, mode: str, elsewhere: frozenset[str], turn: int) -> tuple[int, dict[str, list[str]]]:
    """Faults in rank 0 alone: as many runs in each rank, or they would wait for each other."""
    return survey(train, MODES[mode], every if THOROUGH else one_of_what_runs_elsewhere(elsewhere, turn))


# Ranks with each of the other modes take minutes.
@pytest.mark.long
@pytest.mark.parametrize("mode", MODES if THOROUGH else ["default"])
@pytest.mark.parametrize("train", [replicated, sharded])
def test_no_fault_of_ours_in_one_rank_is_felt_by_any(train: Train, mode: str) -> None:
    turn = [replicated, sharded].index(train)
    world = av.distribute(
        survey_in_ranks, ranks=2, timeout=250, train=train, mode=mode, elsewhere=functions(mode), turn=turn
    )
    assert [found for _, found in world.returned] == [{}] * 2
    assert min(planted for planted, _ in world.returned) > 60
