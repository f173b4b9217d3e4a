"""What a backward brings to a leaf, also where it is read in many bulks.

Each case is recorded twice: with gradients that fit into one bulk, and with bulks so small that each is read as the
next one comes.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import accumviz as av
from accumviz.recorder import gradients, transfer


@pytest.fixture(params=[gradients.BULK, 1], ids=["all at once", "one by one"], autouse=True)
def _bulk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BULK", request.param)


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    return [float(t.double().norm()) for t in tensors]


@pytest.mark.parametrize("size", [1, 100], ids=["elements", "norms"])
def test_a_grad_that_changes_again_in_its_backward_is_read_as_it_is_in_the_end(size: int) -> None:
    early, between, late = (torch.ones(size, requires_grad=True) for _ in range(3))

    def change(_: torch.Tensor) -> None:
        assert early.grad is not None
        early.grad.mul_(10)

    with av.record({"early": early, "between": between, "late": late}) as recording:
        for _ in range(2):
            # What was computed last is differentiated first; what comes next has the one before read.
            (late * 2 + (between * 3 + early * 5)).sum().backward()
            late.register_hook(change)
    backward = recording.ledger.of("backward")[1]
    assert early.grad is not None
    assert recording.ledger.contribution[backward.index, 0] == pytest.approx(5 * size**0.5)
    assert recording.ledger.grad[backward.index, 0] == pytest.approx(float(early.grad.norm()))
    assert early.grad.eq(100).all()


def test_what_autograd_grad_computes_inside_a_backward_is_no_contribution() -> None:
    w = torch.tensor([3.0], requires_grad=True)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                torch.autograd.grad((w**2).sum(), w)
            return grad

    for before in (False, True):
        w.grad = torch.ones(1) if before else None
        with av.record(w) as recording:
            Inner.apply(w * 2).sum().backward()
            (w * 1.0).sum().backward()
        assert recording.ledger.values("w", "contribution").ravel().tolist() == [2.0, 1.0]


def test_what_comes_in_memory_used_again_is_not_taken_for_what_came_after() -> None:
    room = torch.empty(100)
    a, b = (torch.ones(100, requires_grad=True) for _ in range(2))
    for p in (a, b):
        p.register_hook(lambda grad: torch.mul(grad, 0.5, out=room))
    with av.record(a=a, b=b) as recording:
        for _ in range(2):
            (a.sum() + 3 * b.sum()).backward()
    for row in recording.ledger.contribution.tolist():
        for came, true in zip(row, (5, 15), strict=True):
            assert math.isnan(came) or math.isclose(came, true, rel_tol=1e-5)
    assert not np.isnan(recording.ledger.contribution).all(axis=1).any()
    np.testing.assert_allclose(recording.ledger.grad[-1], [10, 30], rtol=1e-5)


@pytest.mark.parametrize(
    "grad",
    [
        torch.randn(1, 1).expand(8, 50),
        torch.randn(17, 50)[1::2],
        torch.randn(8, 50).relu().to_sparse(),
        torch.full((8, 50), 1e30),
    ],
    ids=["expanded", "with gaps", "sparse", "too large"],
)
@pytest.mark.filterwarnings("error")
def test_a_gradient_put_into_grad_has_the_norm_that_torch_gives_it(grad: torch.Tensor) -> None:
    weight = torch.ones(8, 50, requires_grad=True)
    with av.record(weight, exact=0) as recording:
        weight.grad = grad
    np.testing.assert_allclose(recording.ledger.grad[0], [grad.to_dense().norm().item()], rtol=1e-6)


def test_the_norm_of_a_large_gradient_is_exact_to_a_millionth() -> None:
    weight = torch.ones(120_000, requires_grad=True)
    grad = torch.randn(120_000) * torch.rand(120_000).mul(10).exp()
    with av.record(weight) as recording:
        weight.grad = grad
    np.testing.assert_allclose(recording.ledger.grad[0], _norms([grad]), rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_precision_is_a_single_precision_number(dtype: torch.dtype) -> None:
    half = torch.tensor([60000.0, 60000.0, 1 / 3], dtype=dtype), torch.tensor([1 / 3, 1 / 7], dtype=dtype)
    found = [float(norm) for norm in transfer.device_norms(half)]
    assert transfer.host_norms(half) == pytest.approx(found, rel=1e-6)
    np.testing.assert_allclose(found, _norms([*half]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "transposed", "expanded", "sparse", "double", "too large", "not a number"])
@pytest.mark.filterwarnings("error")
def test_each_kind_of_gradient_that_comes_has_its_norm_and_that_of_grad(kind: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float64 if kind == "double" else torch.float32
    weight, other = (torch.ones(40, 30, requires_grad=True, dtype=dtype) for _ in range(2))
    factor = torch.full((40, 30), {"too large": 1e30, "not a number": float("nan")}.get(kind, 2.0), dtype=dtype)

    def loss() -> torch.Tensor:
        looked_up = nn.functional.embedding(torch.tensor([1, 1, 7]), other, sparse=kind == "sparse")
        of_weight = {
            "transposed": lambda: (weight.T * torch.arange(30.0)[:, None]).sum(),
            "expanded": lambda: weight.sum() * 3,
        }.get(kind, lambda: (weight * factor).sum())
        return of_weight() + looked_up.square().sum()

    parts = [g.to_dense() for g in torch.autograd.grad(loss(), (weight, other))]
    with av.record({"weight": weight, "other": other}, exact=0) as recording:
        for _ in range(3):
            loss().backward()
    ledger = recording.ledger
    np.testing.assert_allclose(ledger.contribution, [[g.norm() for g in parts]] * 3, rtol=1e-5)
    np.testing.assert_allclose(ledger.grad, [[(g * k).norm() for g in parts] for k in (1, 2, 3)], rtol=1e-5)
    assert [event.kind for event in ledger] == ["backward"] * 3


def test_a_backward_inside_another_brings_nothing_twice_to_a_leaf() -> None:
    layer, x = nn.Linear(20, 20), torch.randn(4, 20, requires_grad=True)
    part = torch.autograd.grad(layer(layer(x)).sum(), list(layer.parameters()))
    with av.record(layer, exact=0) as recording:
        for _ in range(2):
            layer(checkpoint(layer, x, use_reentrant=True)).sum().backward()
    ledger = recording.ledger
    np.testing.assert_allclose(ledger.grad, [_norms([g * k for g in part]) for k in (1, 2)], rtol=1e-4)
    # Of parts, that a part came too late is known.
    late = np.isnan(ledger.contribution)
    np.testing.assert_allclose(np.where(late, _norms(list(part)), ledger.contribution), [_norms(list(part))] * 2, 1e-4)


def _beside(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("shared", [True, False])
def test_a_recording_stops_where_another_thread_trains_what_is_recorded(shared: bool) -> None:
    first, second = (torch.ones(100, requires_grad=True) for _ in range(2))
    optimizers = [torch.optim.SGD([leaf], 0.1) for leaf in (first, second)]

    def train(leaf: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        (leaf * leaf).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with av.record(first, second, *optimizers) as recording:
        train(first, optimizers[0])
        with pytest.warns(RuntimeWarning, match="stopped recording .* another thread trains"):
            _beside(lambda: train(first if shared else second, optimizers[0 if shared else 1]))
        train(first, optimizers[0])
    ledger = recording.ledger
    assert "another thread trains" in ledger.meta["stopped"]
    assert [event.kind for event in ledger] == ["backward", "step", "zero_grad"]
    assert not math.isnan(ledger.shares()[0].share)
    assert av.check(ledger).verdict == "no verdict"


def test_another_threads_training_of_other_parameters_disturbs_nothing() -> None:
    mine, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([mine], 0.1)

    def train() -> None:
        for _ in range(3):
            (other * other).sum().backward()
        list(DataLoader([0.0]))  # type: ignore[arg-type]

    with av.record(mine, optimizer) as recording:
        y = mine * mine
        y.register_hook(lambda _: _beside(train))
        y.sum().backward()
        optimizer.step()
    assert [(row.share, row.unknown) for row in recording.ledger.shares()] == [(1, "")]
    assert "notes" not in recording.ledger.meta
