"""What `accumviz run` finds of a script that trains in its own way, from the first call that begins the training."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accumviz as av
from accumviz.recorder import watch as watching
from accumviz.recorder.watch import Found, Watch

Step = Callable[[int], None]


@contextmanager
def watched(found: list[Found]) -> Iterator[None]:
    notes: list[str] = []
    watch = Watch(None, found, notes)
    try:
        yield
    finally:
        watch.close("exit")
    assert notes == []


def _steps_after_four(optimizer: torch.optim.Optimizer, i: int) -> None:
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()


def _bare() -> Step:
    w = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.01)

    def step(i: int) -> None:
        (torch.randn(2, 3).mul(w).sum(1).square().mean() / 4).backward()
        _steps_after_four(optimizer, i)

    return step


def _frozen_at_first() -> Step:
    model = nn.Linear(3, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(2, 3))
    model.requires_grad_(True)

    def step(i: int) -> None:
        (model(torch.randn(2, 3)).square().mean() / 4).backward()
        _steps_after_four(optimizer, i)

    return step


def _scaled_in_one_line() -> Step:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i: int) -> None:
        scaler.scale(F.mse_loss(model(torch.randn(2, 3)), torch.zeros(2, 1)) / 4).backward()
        if i % 4 == 3:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return step


def _differentiated_in_one_line() -> Step:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> None:
        torch.autograd.backward(model(torch.randn(2, 3)).square().mean() / 4)
        _steps_after_four(optimizer, i)

    return step


@pytest.mark.parametrize("made", [_bare, _frozen_at_first, _scaled_in_one_line, _differentiated_in_one_line])
def test_a_right_loop_is_recorded_from_its_first_backward_and_healthy(made: Callable[[], Step]) -> None:
    found: list[Found] = []
    with watched(found):
        step = made()
        for i in range(8):
            step(i)
    [recorded] = found
    ledger = recorded.recording.ledger
    assert len(ledger.of("backward")) == 8
    assert {round(share.share, 6) for share in ledger.shares()} == {0.25}
    assert av.check(ledger).healthy, str(av.check(ledger))


def test_a_model_that_another_thread_makes_while_a_recording_opens_has_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained() -> None:
        step = _differentiated_in_one_line()
        for i in range(8):
            step(i)

    other, living = threading.Thread(target=trained), watching._living

    def meanwhile() -> Any:
        if other.ident is None:
            other.start()
            other.join(0.3)  # so long as it is free to run
        return living()

    monkeypatch.setattr(watching, "_living", meanwhile)
    found: list[Found] = []
    with watched(found):
        trained()
        other.join()
    assert [len(recorded.recording.ledger.of("step")) for recorded in found] == [2, 2]
    assert all(av.check(recorded.recording.ledger).healthy for recorded in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_makes_an_optimizer_while_its_parent_was_opening_a_recording() -> None:
    watch = Watch(None, [], [])
    try:
        held, done = threading.Event(), threading.Event()

        def holding() -> None:
            with watch._lock:
                held.set()
                done.wait(20)

        def made() -> None:
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

        other = threading.Thread(target=holding)
        other.start()
        assert held.wait(20)
        child = multiprocessing.get_context("fork").Process(target=made)
        child.start()
        done.set()
        other.join()
        child.join(5)
        child.kill()
        child.join()
        assert child.exitcode == 0
    finally:
        watch.close("exit")
