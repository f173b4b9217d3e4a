"""A recording that is over holds data only: no tensor, module, optimizer, frame or graph of the user's."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accumviz as av
from accumviz.recorder import patches
from accumviz.recorder.recording import Recording


class Local:
    """Something large among the caller's variables."""


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if how == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model


def record(path: Path | None, how: str, end: str) -> tuple[Recording, list[weakref.ref[Any]]]:
    """Train under a recording that ends so; and weak references to all that it met."""
    local, model = Local(), wrapped(nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)), how)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    options: dict[str, Any] = {"graphs": {"graphs": True}, "memory": {"memory": True}}.get(how, {})
    recording = av.record(model, optimizer, path=path, **options)
    failures = {"failed inside": "_finish", "failed at the end": "_edits", "failed at closing": "_parameters"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if end != "never entered":
            recording.start()
            for step in range(3):
                loss = model(torch.ones(2, 30)).square().mean()
                loss.backward(retain_graph=step == 1)
                if step == 1:
                    if end in failures:
                        setattr(recording, failures[end], None)
                    if end == "left by an exception":
                        try:
                            with recording._rows._lock:
                                raise KeyError(local)
                        except KeyError as error:
                            recording.__exit__(type(error), error, error.__traceback__)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            recording.stop()
    if end in failures:
        assert "stopped by" in repr(recording)
    parameters = list(model.parameters())
    # No weak reference to a FSDP2 parameter: it refuses to be swapped then.
    return recording, [weakref.ref(thing) for thing in (local, model, optimizer, *parameters, loss_of(locals()))]


def loss_of(names: dict[str, Any]) -> Any:
    return names.get("loss", names["model"])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


ENDS = ["closed", "left by an exception", "failed inside", "failed at the end", "failed at closing"]


def assert_let_go(recording: Recording, found: list[weakref.ref[Any]]) -> None:
    gc.collect()
    assert [type(thing()).__name__ for thing in found if thing() is not None] == []
    _ = recording.ledger, recording.graphs, repr(recording)
    assert patches.listening == ()


@pytest.mark.parametrize("end", [*ENDS, "never entered"])
@pytest.mark.parametrize("how", ["alone", "graphs", "memory", "path"])
def test_a_recording_that_is_over_keeps_nothing_of_the_users_alive(how: str, end: str, tmp_path: Path) -> None:
    recording, found = record(tmp_path / "x.ledger" if how == "path" else None, how, end)
    if end == "never entered":
        del recording
        gc.collect()
        assert [thing() for thing in found if thing() is not None] == []
    else:
        assert_let_go(recording, found)


@pytest.mark.parametrize("end", ["closed", "failed inside"])
@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
@pytest.mark.usefixtures("one_rank")
def test_nor_does_one_of_a_model_that_is_distributed(how: str, end: str, tmp_path: Path) -> None:
    recording, found = record(tmp_path / "x.ledger", how, end)
    assert_let_go(recording, found)


def test_a_closed_recording_needs_no_collector_to_let_a_tensor_go() -> None:
    gc.collect()
    gc.disable()
    try:
        w = torch.ones(100, requires_grad=True)
        with av.record(w) as recording:
            (w * 2).sum().backward()
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


def test_exploring_a_run_that_failed_does_not_keep_its_model() -> None:
    found = []

    def train(k: int) -> Recording:
        model = nn.Linear(50, 50)
        found.append(weakref.ref(model.weight))
        with av.record(model) as recording:
            model(torch.ones(1, 50)).sum().backward()
            if k == 2:
                raise ValueError("no")
        return recording

    shown = av.explore(train, k=[1, 2, 4])
    gc.collect()
    assert [one() for one in found] == [None, None, None]
    assert shown is not None


BEFORE = torch.ones(1, requires_grad=True)


@pytest.mark.parametrize("age", ["before these tests", "new"])
def test_a_hook_that_is_left_on_a_tensor_is_found_whenever_that_was_made(
    age: str, hooks_of_ours: Callable[[], list[Any]]
) -> None:
    def left(gradient: torch.Tensor) -> None: ...

    left.__module__ = "accumviz.recorder.gradients"
    tensor = torch.ones(1, requires_grad=True) if age == "new" else BEFORE
    handle = tensor.register_hook(left)
    assert hooks_of_ours() == [left]
    handle.remove()
    assert hooks_of_ours() == []
