"""Recording on a device whose backward runs on the engine's thread and whose numbers come late, in a process apart.

Each function whose name has no underscore before it is a check of what must hold there.
"""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accumviz as av
from accumviz.ledger.ledger import CONTRIBUTED, Ledger
from accumviz.recorder import gradients
from benchmarks import _cuda as cuda
from tests.conftest import ROOT
from tests.goldens import differences, ledger_of
from tests.recorder import second_device as device

Loop = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], None]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))


def _scaled(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    scaler = torch.amp.GradScaler(x.device.type, init_scale=8.0)
    for step in range(3):
        for _ in range(2):
            loss = (model(x) - y).square().mean() / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def _run(where: str, loop: Loop = _scaled, recorded: bool = True, **kwargs: Any) -> tuple[nn.Module, Any]:
    model, data = _model().to(where), torch.arange(6).to(where)
    target = torch.randn(6, 2, generator=torch.Generator().manual_seed(1)).to(where)
    lr = torch.tensor(0.1).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr, foreach=False, capturable=False)
    device.waits.clear()
    with av.record(model, optimizer, memory=True, **kwargs) if recorded else nullcontext() as recording:
        loop(model, optimizer, data, target)
        counted = +device.waits
        if recording is not None:
            recording.waits = counted
    return model, recording if recorded else counted


def _alike(ours: Ledger, theirs: Ledger) -> None:
    """All is the same but the device, the line that called `_run`, saved bytes, rounding, and constants sent late."""
    others = ("parameters *", "events frames", "events saved_before", "terms divisor", "terms constants")
    apart = [one for one in differences(ledger_of(ours), ledger_of(theirs)) if not one[0].endswith(others)]
    assert not apart, apart
    assert ours.exact.keys() == theirs.exact.keys()
    for p, pair in ours.exact.items():
        np.testing.assert_allclose(pair, theirs.exact[p], rtol=1e-5, atol=1e-8)


def _padded(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Losses whose elements and constants are on the device."""
    target = torch.tensor([0, 1, 0, 1, -100, -100]).to(x.device)
    mask, four = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]).to(x.device), torch.tensor(4.0).to(x.device)
    signed = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, 1.0]).to(x.device)
    for _ in range(2):
        scores = model(x)
        each = nn.functional.cross_entropy(scores, target, reduction="none")
        whole = nn.functional.cross_entropy(scores, target, reduction="sum") / mask.sum()
        (whole + 0.5 * ((each * mask).sum() / mask.sum()) - (each * signed).sum() / four).backward()
        nn.functional.cross_entropy(model(x), target).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()


def a_ledger_is_that_of_the_cpu_with_the_users_lines_and_labels() -> None:
    for loop in (_scaled, _padded):
        _, ours = _run(device.NAME, loop)
        _, theirs = _run("cpu", loop)
        _alike(ours.ledger, theirs.ledger)
        if loop is _padded:
            first, second = ours.ledger.of("backward")[:2]
            assert [t["elements"] for t in first.details["terms"]] == [4, 4, None]
            np.testing.assert_allclose([t["factor"] for t in first.details["terms"]], [1 / 4, 1 / 8, -1 / 4])
            assert second.details["terms"][0]["elements"] == 4
            continue
        assert {e.label for e in ours.ledger.of("backward")} == {"scaler.scale(loss)"}
        assert all(e.source for e in ours.ledger)
        assert all(e.file.endswith("test_second_device.py") for e in ours.ledger)


def training_is_the_same_bit_for_bit_and_waits_for_the_device_not_once_more() -> None:
    for loop in (_padded, _scaled):
        plain, bare = _run(device.NAME, loop, recorded=False)
        for kwargs in ({}, {"graphs": True}, {"exact": 0}, {"exact": 1000}):
            recorded, recording = _run(device.NAME, loop, **kwargs)
            assert recording.waits == bare, (loop.__name__, kwargs)
            for a, b in zip(plain.parameters(), recorded.parameters(), strict=True):
                assert torch.equal(a.cpu(), b.cpu()), (loop.__name__, kwargs)
    assert bare  # the gradient scaler's own question is counted: what counts nothing proves nothing


def numbers_that_are_late_are_complete_when_the_recording_is_closed() -> None:
    model, data = _model().to(device.NAME), torch.arange(6).to(device.NAME)
    with av.record(model) as recording:
        before = device.stream.done
        model(data).square().sum().backward()
        model(data).square().sum().backward()
        assert device.stream.queued  # nothing has arrived, because nobody has asked
        assert device.stream.done == before
    assert not device.stream.queued
    ledger = recording.ledger
    assert np.isfinite(ledger.grad).all()
    np.testing.assert_allclose(ledger.grad[1], 2 * ledger.grad[0], rtol=1e-6)
    expected = [float(p.grad.cpu().norm()) for p in model.parameters() if p.grad is not None]
    np.testing.assert_allclose(ledger.grad[1], expected, rtol=1e-6)


def nothing_on_the_device_is_kept_alive() -> None:
    def left(recorded: bool) -> list[int]:
        found = []
        model, data = _model().to(device.NAME), torch.arange(6).to(device.NAME)
        with av.record(model, graphs=True) if recorded else nullcontext():
            for _ in range(3):
                model(data).square().sum().backward()
                found.append(device.alive())
        return [now - found[0] for now in found]

    assert left(recorded=True) == left(recorded=False)


def leaves_on_two_devices_lose_nothing_to_each_others_threads() -> None:
    here = [torch.ones(100, requires_grad=True) for _ in range(30)]
    there = [torch.ones(100).to(device.NAME).requires_grad_() for _ in range(30)]
    on_device, bulk, switch = gradients.BULK_ON_DEVICE, gradients.BULK, sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)  # the two threads take turns as often as they can
        gradients.BULK = gradients.BULK_ON_DEVICE = 1000
        with av.record({"here": here[0]}, [*here[1:], *there]) as recording:
            for _ in range(10):
                (sum((w * 2).sum() for w in here) + sum((w * 3).sum() for w in there).cpu()).backward()
    finally:
        sys.setswitchinterval(switch)
        gradients.BULK, gradients.BULK_ON_DEVICE = bulk, on_device
    ledger = recording.ledger
    assert ((ledger.state & CONTRIBUTED) > 0).all()
    expected = np.repeat([20.0, 30.0], 30)
    np.testing.assert_allclose(ledger.contribution, np.tile(expected, (10, 1)), rtol=1e-6)
    np.testing.assert_allclose(ledger.grad[-1], 10 * expected, rtol=1e-6)


def an_optimizer_that_steps_on_the_engines_thread_has_a_line() -> None:
    w = torch.ones(2).to(device.NAME).requires_grad_()
    optimizer = torch.optim.SGD([w], 0.5)

    def hook(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(hook)
    with av.record(w, optimizer) as recording:
        for _ in range(2):
            (w * w).sum().backward()
    told = [(e.kind, e.within, e.source) for e in recording.ledger]
    assert told == 2 * [
        ("backward", "", "(w * w).sum().backward()"),
        ("step", "backward", "optimizer.step()"),
        ("zero_grad", "backward", "optimizer.zero_grad()"),
    ]
    assert recording.ledger.windows()[0].backwards == (0,)
    assert recording.ledger.values("w", "contribution")[[0, 3]].tolist() == [[2, 2], [0, 0]]


def a_graph_has_no_values_of_the_device_and_nobody_waits_for_them() -> None:
    w, x = torch.tensor([1.0, 2.0]).to(device.NAME).requires_grad_(), torch.tensor([3.0, 4.0]).to(device.NAME)
    with av.record(w, graphs=True) as recording:
        loss = (w * x).square().sum()
        device.waits.clear()
        loss.backward()
        assert not device.waits
    graph = recording.graphs[0]
    assert all(n.value is None and n.grad is None for n in graph)
    assert graph.notes == ("the numbers of tensors on a device are not read",)


def the_checks_for_cuda_hold_here_as_far_as_they_can_be_run() -> None:
    name = device.NAME
    for rows in (cuda.numbers(name), cuda.places(name), cuda.neutrality(name, amps=(False,))):
        assert rows
        assert [row for row in rows if row["holds"] is not True] == []


# The device can be registered once in a process, before its first backward.
_RUN = """
import json, traceback
import torch
from tests.recorder import second_device
torch.set_num_threads(1)  # the operations are tiny
second_device.register()
from tests.recorder import test_second_device
failed = {}
for name in test_second_device.NAMES:
    try:
        getattr(test_second_device, name)()
    except BaseException:
        failed[name] = traceback.format_exc()
print("RESULT" + json.dumps(failed))
"""
NAMES = [
    name
    for name, value in list(globals().items())
    if inspect.isfunction(value) and value.__module__ == __name__ and not name.startswith("_")
]


@cache
def _failures() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert told, f"the process ended with {done.returncode}:\n{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads(told[0].removeprefix("RESULT"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_a_second_device(name: str) -> None:
    assert name not in _failures(), _failures()[name]
