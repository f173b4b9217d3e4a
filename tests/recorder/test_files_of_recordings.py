"""What a recording has seen is not lost: however the process, the disk, the folder or a fork ends what it was doing."""

import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accumviz as av
from accumviz.ledger.file import LedgerFileError
from accumviz.recorder.recording import Recording
from tests.conftest import ROOT
from tests.light import LIGHT
from tests.thorough import THOROUGH

POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork, and no limits")

OPENING = f"""{LIGHT}
import atexit, os, signal, sys, threading, time
import torch
import accumviz as av
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def train(steps, model=model, optimizer=optimizer):
    for _ in range(steps):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
path = sys.argv[1]
"""


def started(script: str, path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, *options, "-c", OPENING + textwrap.dedent(script), str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(script: str, path: Path, *options: str) -> tuple[int, str, str]:
    """What a script ends with, prints, and complains of."""
    process = started(script, path, *options)
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    """Every file is closed once its recording is gone, and nobody is warned of one that was not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield
        gc.collect()


class Loop:
    """A small model that trains, and what its weights would be without us."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.steps = 0

    def train(self, steps: int = 10) -> None:
        for _ in range(steps):
            self.model(torch.ones(4, 3)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += steps

    def record(self, path: Path | str | None = None, **options: Any) -> Recording:
        return av.record(self.model, self.optimizer, path=path, **options)

    def is_as_without_us(self) -> bool:
        other = Loop()
        other.train(self.steps)
        return torch.equal(other.model.weight, self.model.weight)


def test_a_recording_is_started_and_stopped_by_hand(path: Path) -> None:
    loop = Loop()
    recording = loop.record(path).start()
    loop.train()
    recording.stop()
    recording.stop()
    loop.train()
    assert len(recording.ledger) == len(av.load(path)) == 30
    assert av.load(path).complete
    with pytest.raises(RuntimeError, match="used already"):
        recording.start()


# The rest of a script that records, its exit code, how many events there are then, and how the recording ended.
ENDS: dict[str, tuple[str, int, int, str]] = {
    "an exception inside with": (
        "with av.record(model) as second: train(1); raise KeyError('mine')",
        1,
        63,
        "KeyError: 'mine'",
    ),
    "sys.exit beside a daemon thread inside with": (
        """
        other = torch.nn.Linear(3, 1)
        def run():
            with av.record(other, path=path + ".thread"):
                train(20, other, torch.optim.SGD(other.parameters(), 0.01))
                open(path + ".done", "w").close()
                time.sleep(600)
        threading.Thread(target=run, daemon=True).start()
        while not os.path.exists(path + ".done"): time.sleep(0.01)
        sys.exit(3)
        """,
        3,
        60,
        "exit",
    ),
    "training while the interpreter ends": ("atexit.register(train, 300)", 0, 960, "exit"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_recording_that_is_never_closed_is_closed_with_the_process(end: str, path: Path) -> None:
    rest, code, events, ended = ENDS[end]
    script = f"""
recording = av.record(model, optimizer, path=path).start()
train(20)
{textwrap.dedent(rest)}
"""
    *done, err = run(script, path, "-X", "dev", "-W", "ignore::DeprecationWarning")
    assert done == [code, ""], err
    assert err.strip().splitlines()[-1:] == (["KeyError: 'mine'"] if code == 1 else []), err
    ledger = av.load(path)
    assert (len(ledger), ledger.complete, ledger.meta["ended"]) == (events, True, ended)
    if "daemon" in end:
        thread = av.load(f"{path}.thread")
        assert (len(thread), thread.complete) == (60, True)


@POSIX
def test_killed_at_any_moment_a_file_loads_and_misses_at_most_a_second_of_training(tmp_path: Path) -> None:
    """The loop tells after each step how far it is and when."""
    script = """
    told = os.open(path + ".told", os.O_WRONLY | os.O_CREAT)
    start = time.time()
    parent = os.getppid()
    with av.record(model, optimizer, path=path):
        events = 0
        while os.getppid() == parent:  # where nobody is left to kill it, it ends by itself
            train(1)
            events += 3
            os.pwrite(told, f"{time.time()} {events}".encode().ljust(40), 0)
    """
    lost = []
    rng = random.Random(0)
    kills = int(os.environ.get("ACCUMVIZ_KILLS", "12" if THOROUGH else "3"))
    for batch in range(-(-kills // 3)):
        paths = [tmp_path / f"{batch}-{each}.ledger" for each in range(3)]
        for path, process in [(path, started(script, path)) for path in paths]:
            told = Path(f"{path}.told")
            while not told.exists() or not told.read_text():
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(rng.random() * 2)
            # By when which event had happened: the last reading that is a second old.
            readings, late = [], 0.0
            until = time.time() + 1.2
            while time.time() < until:
                readings.append(told.read_text().split())
                asleep = time.time()
                time.sleep(0.02)
                late += time.time() - asleep - 0.02
            process.kill()
            killed = time.time()
            process.communicate()
            ledger = av.load(path)
            assert not ledger.complete and av.check(ledger).verdict == "no verdict"
            # As long as this process was kept from waking, that one may have been kept from writing.
            due = max((int(events) for when, events in readings if float(when) < killed - 1 - late), default=0)
            lost.append((due - len(ledger), path.name))
    assert max(lost)[0] <= 0, lost


@POSIX
@pytest.mark.parametrize("by", ["os.fork", "DataLoader"])
def test_a_fork_leaves_the_file_to_its_parent(by: str, path: Path) -> None:
    script = f"""
    import warnings
    warnings.simplefilter("ignore")
    with av.record(model, optimizer, path=path) as recording:
        train(100)
        if {by!r} == "os.fork":
            for end in [os._exit] * 19 + [sys.exit]:
                train(1)
                if not os.fork():
                    train(5)
                    recording.stop()
                    end(0)
                assert os.wait()[1] == 0
            train(80)
        else:
            data = torch.utils.data.TensorDataset(torch.ones(100, 3))
            for (x,) in torch.utils.data.DataLoader(data, 1, num_workers=2):
                train(1)
    """
    code, _, err = run(script, path)
    assert (code, err) == (0, "")
    ledger = av.load(path)
    assert len(ledger) == 600 + 2 * (by == "DataLoader")  # it begins and ends
    assert ledger.complete


def test_what_is_there_is_refused_before_the_loop_and_replaced_if_asked(path: Path) -> None:
    path.write_text("thesis")
    loop = Loop()
    recording = loop.record(path)
    assert len(recording.ledger) == 0
    assert "not entered" in repr(recording)
    with pytest.raises(FileExistsError, match="overwrite=True"), recording:
        loop.train()
    assert (path.read_text(), loop.steps) == ("thesis", 0)
    path.unlink()
    with recording:  # the same one, once there is room for it
        loop.train()
    assert len(recording.ledger) == len(av.load(path)) == 30
    with loop.record(path, overwrite=True):
        assert len(av.load(path)) == 0


@pytest.mark.parametrize("name", ["nowhere/x.ledger", ".", "", "a\0b"])
def test_a_path_that_cannot_be_a_file_is_refused_before_the_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Loop()
    with pytest.raises(OSError), loop.record(name):
        loop.train()
    assert loop.steps == 0


@POSIX
def test_a_recording_without_a_name_touches_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Loop()
    never = loop.record("never.ledger")
    assert len(never.ledger) == 0
    with loop.record() as recording:
        pass
    assert len(recording.ledger) == 0
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def full(size: int) -> Iterator[None]:
    """A disk on which no file may become longer than this."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@POSIX
@pytest.mark.parametrize("at", ["opening", "half-way", "closing"])
def test_a_full_disk_is_said_once_and_costs_the_file_only(at: str, path: Path) -> None:
    loop = Loop()
    with pytest.warns(RuntimeWarning) as said, contextlib.ExitStack() as stack:
        if at != "closing":
            stack.enter_context(full(10 if at == "opening" else 20_000))
        with loop.record(path) as recording:
            loop.train(600)
            if at == "closing":
                recording.write_out()
                stack.enter_context(full(path.stat().st_size))
        early = recording.ledger
    assert len(said) == 1
    assert "held in memory" in str(said[0].message)
    assert "stopped" not in recording.ledger.meta
    assert len(early) == len(recording.ledger) == 1800
    assert recording.ledger.values("weight", "contribution").shape == (1800, 3)
    assert loop.is_as_without_us()
    if at == "opening":
        assert not path.exists()
    else:
        assert 0 < len(av.load(path)) <= 1800
        assert not av.load(path).complete
    with loop.record(path, overwrite=True) as again:  # while the first is still held
        loop.train(1)
    assert len(again.ledger) == len(av.load(path)) == 3
    assert len(recording.ledger) == 1800


@POSIX
def test_a_warning_that_is_made_an_error_does_not_end_the_training(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop()
    with warnings.catch_warnings(), full(10), loop.record(path):
        warnings.simplefilter("error")
        loop.train(600)
    assert loop.is_as_without_us()
    assert "held in memory" in capsys.readouterr().err


def test_a_file_or_a_folder_that_vanishes_is_said_once_and_what_it_held_is_read_back(tmp_path: Path) -> None:
    loop = Loop()
    folder = tmp_path / "folder"
    folder.mkdir()
    recording = loop.record(folder / "x.ledger")
    with pytest.warns(RuntimeWarning, match="deleted or cut short while it was written") as said, recording:
        loop.train(200)
        recording.write_out()
        shutil.rmtree(folder)
        loop.train(200)
        assert len(recording.ledger) == 1200
        loop.train(200)
    assert len(said) == 1
    assert [event.index for event in recording.ledger] == list(range(1800))
    assert recording.ledger.complete
    assert loop.is_as_without_us()
    assert not folder.exists()


def test_a_file_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Loop()
    with loop.record("x.ledger") as recording:
        loop.train()
    monkeypatch.chdir("/")
    assert len(recording.ledger) == 30


@pytest.mark.parametrize("by", ["a move", "another recording"])
def test_a_file_that_is_not_ours_any_more_is_said_so(by: str, path: Path) -> None:
    loop = Loop()
    with loop.record(path) as recording:
        loop.train()
    if by == "a move":
        path.rename(path.with_name("elsewhere"))
    else:
        with loop.record(path, overwrite=True) as other:
            loop.train(20)
        assert len(other.ledger) == 60
    assert repr(recording) == "Recording (closed): 30 events × 2 parameters"
    with pytest.raises(LedgerFileError, match=r"run.ledger', which holds .* was moved or changed since"):
        _ = recording.ledger
