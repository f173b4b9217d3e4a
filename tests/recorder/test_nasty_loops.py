"""A zoo of nasty loops: each trains under a recording, in every mode, bit for bit as it does without one."""

import contextlib
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accumviz as av
from accumviz.book.distribute import RankError
from tests.recorder.loops import MODES
from tests.recorder.nasty import IN_RANKS, LOOPS, Loop
from tests.thorough import THOROUGH


def plain(value: Any) -> list[Any]:
    """Everything that a loop made, down to tensors that can be compared and sent."""
    if isinstance(value, torch.Tensor):
        value = getattr(value, "_local_tensor", value)
        if hasattr(value, "a"):  # made of two
            return [*plain(value.a), *plain(value.b)]
        grad = value.grad if value.is_leaf else None
        own = value.detach().to_dense().as_subclass(torch.Tensor).clone()
        return [own, *(plain(grad) if grad is not None else [None])]
    if isinstance(value, torch.nn.Module):
        return [item for _, parameter in sorted(value.named_parameters()) for item in plain(parameter)]
    if isinstance(value, torch.optim.Optimizer):
        value = list(value.state.values())
    if isinstance(value, dict):
        value = list(value.values())
    return [item for part in value for item in plain(part)] if isinstance(value, list | tuple) else [value]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    return bool(type(one) is type(other) and one == other)


def text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as inner:
        return f"no text: {inner}"


class Told:
    """What one run of a loop made, what it raised, what was said, and its recordings."""

    def __init__(self, loop: Loop, mode: dict[str, Any] | None, folder: Path) -> None:
        torch.manual_seed(0)
        self.mode, self.recordings, self.paths = mode, [], []
        self._folder, self.made, self.raised = folder, [], ("", "")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self.made = plain(loop.run(self._record))
            except BaseException as error:
                self.raised = type(error).__name__, text(error)
        self.random = torch.get_rng_state()
        self.said = [str(one.message) for one in said if "accumviz" in str(one.message)]

    def _record(self, *objects: Any, **groups: Any) -> Any:
        if self.mode is None:
            return contextlib.nullcontext()
        options = dict(self.mode)
        if "path" in options:
            options["path"] = self._folder / f"{len(self.recordings)}.{options['path']}"
        recording = av.record(*objects, **options, **groups)
        self.recordings.append(recording)
        return recording


def problems(loop: Loop, mode: dict[str, Any], folder: Path) -> list[str]:
    """What a recording changed, or lost; empty when all is well."""
    bare, told = Told(loop, None, folder), Told(loop, mode, folder)
    found = []
    if bare.raised != told.raised:
        found.append(f"raised {told.raised} instead of {bare.raised}")
    elif len(bare.made) != len(told.made) or not all(map(same, bare.made, told.made)):
        found.append("trained to something else")
    if not torch.equal(bare.random, told.random):
        found.append("the random numbers went another way")
    found += [f"said: {line}" for line in told.said]
    try:
        return found + kept(loop, told, folder)
    except Exception as error:
        return [*found, f"what was recorded cannot be read: {type(error).__name__}: {error}"]


def kept(loop: Loop, told: Told, folder: Path) -> list[str]:
    """What is wrong with the ledgers, and with their files."""
    if not told.recordings:
        return ["recorded nothing"]
    ledgers = [recording.ledger for recording in told.recordings]
    found = [f"stopped: {ledger.meta['stopped']}" for ledger in ledgers if "stopped" in ledger.meta]
    mode, backwards = told.mode or {}, ledgers[-1].of("backward")
    if loop.backwards is not None and len(backwards) != loop.backwards:
        found.append(f"recorded {len(backwards)} backwards instead of {loop.backwards}")
    if "graphs" in mode and set(told.recordings[-1].graphs) != {event.index for event in backwards}:
        found.append(f"kept {len(told.recordings[-1].graphs)} graphs of {len(backwards)}")
    files = [av.load(path) for path in sorted(folder.glob("*.ledger"))]
    found += [f"a file is not complete: {file.meta}" for file in files if "stopped" in file.meta or not file.complete]
    if "path" in mode and [len(file) for file in files] != [len(ledger) for ledger in ledgers]:
        found.append("the files hold something else than the recordings")
    return found


# At a push a loop is trained in one mode and in another one, with graphs each second loop.
HERE = [
    (name, mode)
    for i, name in enumerate(LOOPS)
    for mode in (MODES if THOROUGH else ("default", ("graphs", "memory", "graphs", "path")[i % 4]))
]


@pytest.mark.parametrize(("name", "mode"), HERE)
def test_a_nasty_loop_trains_and_raises_as_without_a_recording(name: str, mode: str, tmp_path: Path) -> None:
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    assert problems(LOOPS[name], MODES[mode], tmp_path) == []


def in_these_ranks(mode: str) -> dict[str, list[str]]:
    """Every loop of several processes in one mode, in the ranks that call."""
    found = {}
    for name, loop in IN_RANKS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = problems(loop, MODES[mode], Path(folder))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def in_ranks() -> Any:
    """What was found in so many ranks, each number of ranks and each mode in processes of its own."""

    @functools.cache
    def found(ranks: int, mode: str) -> tuple[dict[str, list[str]], ...] | RankError:
        try:
            return av.distribute(in_these_ranks, ranks=ranks, mode=mode, timeout=120).returned
        except RankError as error:
            return error

    return found


@pytest.mark.parametrize("name", IN_RANKS)
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(ranks, mode) for ranks in (1, 2) for mode in MODES] if THOROUGH else [(1, "path"), (2, "default"), (2, "graphs")],
)
def test_a_nasty_loop_in_ranks_trains_as_without_a_recording(in_ranks: Any, ranks: int, mode: str, name: str) -> None:
    found = in_ranks(ranks, mode)
    if isinstance(found, RankError):
        raise found
    assert [rank[name] for rank in found] == [[]] * ranks
