"""A recording that is over holds data only: no tensor, module, optimizer, frame or graph of the user's."""

import contextlib
import gc
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import accumviz as av
from accumviz.recorder import patches
from accumviz.recorder.recording import Recording
from tests.recorder.loops import raised_inside


class Local:
    """Something large among the caller's variables."""


class Fault(Exception):
    """Raised inside ours."""


def record(path: Path | None, how: str, end: str) -> tuple[Recording, list[weakref.ref[Any]]]:
    """Train under a recording that ends so; and weak references to all that it met."""
    local, model = Local(), nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    if how == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "FSDP2":
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    recording = av.record(model, optimizer, path=path, graphs=how == "graphs", memory=how == "memory")
    with warnings.catch_warnings(), contextlib.suppress(KeyError), recording:
        warnings.simplefilter("ignore", RuntimeWarning)
        for step in range(3):
            loss = model(torch.ones(2, 30)).square().mean()
            sys.setprofile(raised_inside(Fault) if end == "failed inside" and step == 1 else None)
            loss.backward(retain_graph=step == 1)
            sys.setprofile(None)
            if end == "left by an exception":
                raise KeyError(local)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert ("stopped by Fault" in repr(recording)) == (end == "failed inside")
    # No weak reference to a FSDP2 parameter: it refuses to be swapped then.
    return recording, [weakref.ref(thing) for thing in (local, model, optimizer, loss, *model.parameters())]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_let_go(recording: Recording, found: list[weakref.ref[Any]]) -> None:
    gc.collect()
    assert [type(thing()).__name__ for thing in found if thing() is not None] == []
    _ = recording.ledger, recording.graphs, repr(recording)
    assert patches.listening == ()


@pytest.mark.parametrize("end", ["closed", "left by an exception", "failed inside"])
@pytest.mark.parametrize("how", ["alone", "graphs", "memory", "path"])
def test_a_recording_that_is_over_keeps_nothing_of_the_users_alive(how: str, end: str, tmp_path: Path) -> None:
    assert_let_go(*record(tmp_path / "x.ledger" if how == "path" else None, how, end))


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
@pytest.mark.usefixtures("one_rank")
def test_nor_does_one_of_a_model_that_is_distributed(how: str) -> None:
    assert_let_go(*record(None, how, "closed"))


@pytest.mark.usefixtures("one_rank")
def test_a_group_outlives_a_recording_for_its_end_may_wait_for_python() -> None:
    group = (model := nn.parallel.DistributedDataParallel(nn.Linear(2, 1))).process_group
    before = sys.getrefcount(group)
    av.record(model).start().stop()
    assert sys.getrefcount(group) > before


def test_a_closed_recording_needs_no_collector_to_let_a_tensor_go() -> None:
    gc.collect()
    gc.disable()
    try:
        w, other = torch.ones(100, requires_grad=True), torch.ones(100)
        unused = weakref.ref(other)
        with av.record(w) as recording:
            del other
            assert unused() is None, "looking for names keeps none of the caller's variables"
            hidden = w * 2
            found = weakref.ref(hidden)
            hidden.square().sum().backward(retain_graph=True)
            del hidden
            assert found() is None
        found = weakref.ref(w)
        del w
        assert found() is None
        assert len(recording.ledger) == 1
    finally:
        gc.enable()


def test_an_open_recording_stays_open_when_nobody_holds_it(tmp_path: Path) -> None:
    w = torch.ones(2, requires_grad=True)
    av.record(w, path=tmp_path / "x.ledger").start()
    gc.collect()
    (recording,) = patches.listening
    (w * 2).sum().backward()
    recording.stop()
    assert len(av.load(tmp_path / "x.ledger")) == 1


def test_an_optimizer_made_for_an_epoch_goes_with_it_and_the_ledger_still_knows_it() -> None:
    model = nn.Linear(3, 1)
    gone = []
    with av.record(model) as recording:
        for _ in range(4):
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gone.append(weakref.ref(optimizer))
        assert [one() is None for one in gone] == [True, True, True, False]
    ledger = recording.ledger
    names = ["optimizer", "optimizer#2", "optimizer#3", "optimizer#4"]
    assert ledger.meta["optimizers"] == names
    assert [event.details["optimizer"] for event in ledger.of("step")] == names
    assert [parameter.optimizers for parameter in ledger.parameters] == [(0, 1, 2, 3)] * 2
