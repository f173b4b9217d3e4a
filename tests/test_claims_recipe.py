"""Claims 10 to 14 and 28 of the articles: who accumulates, what it does to noise, LSTMs, and the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import nn

import accumviz as av
from accumviz.ledger.ledger import Ledger
from tests.test_claims import hand_gradient, square_error, weight


def gradient(model: nn.Module, losses: Iterable[torch.Tensor]) -> torch.Tensor:
    """What a backward of each loss leaves in `.grad`, as one vector."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gap(vector: torch.Tensor, reference: torch.Tensor) -> float:
    return float((vector - reference).norm() / reference.norm())


def test_claim_10_backward_adds_and_the_loop_that_zeroes_each_time_has_windows_of_one() -> None:
    w = weight()
    with av.record(w) as recording:
        for x in (4.0, 2.0):
            square_error(w, x).backward()
    by_hand = [hand_gradient(4.0), hand_gradient(2.0)]
    assert recording.ledger.values("w").ravel().tolist() == [by_hand[0], sum(by_hand)]

    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.01)
    with av.record(w, optimizer) as recording:
        for x in (4.0, 2.0):
            optimizer.zero_grad()
            square_error(w, x).backward()
            optimizer.step()
    assert [window.backwards for window in recording.ledger.windows()] == [(1,), (4,)]


def articles_loop(samples: Iterable[float], every: int) -> tuple[torch.Tensor, Ledger]:
    """The article's order of calls: zero before each forward, step after every so many micro-batches."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.01)
    with av.record(w, optimizer) as recording:
        for done, x in enumerate(samples, start=1):
            optimizer.zero_grad()
            square_error(w, x).backward()
            if done % every == 0:
                optimizer.step()
    return w, recording.ledger


@pytest.mark.parametrize("every", [2, 3])
def test_claim_11_zeroing_inside_the_loop_leaves_one_contribution_per_step(every: int) -> None:
    samples = [4.0, 2.0, 3.0, 1.0, 2.0, 5.0]
    w, ledger = articles_loop(samples, every)
    backwards = [event.index for event in ledger.of("backward")]
    assert [window.backwards for window in ledger.windows()] == [(b,) for b in backwards[every - 1 :: every]]
    wasted = [b for event in ledger.of("zero_grad") for b in ledger.unconsumed(event.index).get("w", [])]
    assert wasted == [b for i, b in enumerate(backwards) if (i + 1) % every]

    by_hand = 1.0
    for x in samples[every - 1 :: every]:  # an ordinary loop over the micro-batches that were not wasted
        by_hand -= 0.01 * hand_gradient(x, w=by_hand)
    assert w.item() == pytest.approx(by_hand)


def test_claim_12_the_variance_falls_with_the_effective_batch_exactly_as_with_a_large_batch() -> None:
    torch.manual_seed(0)
    data = torch.randn(2048, 4)
    goal = data.sum(1, keepdim=True) + torch.randn(2048, 1)
    model = nn.Linear(4, 1)
    draws = [torch.randint(2048, (64,)) for _ in range(300)]
    with av.record(model) as recording:
        for draw in draws:
            for part in draw.chunk(8):
                (nn.functional.mse_loss(model(data[part]), goal[part]) / 8).backward()
            model.zero_grad()
    ledger = recording.ledger
    rows = [event.index for event in ledger.of("backward")]
    arrived = np.hstack([ledger.values(p.name, of="contribution")[rows] for p in ledger.parameters]).reshape(300, 8, 5)
    one, window = (8 * arrived).reshape(2400, 5).var(0).sum(), arrived.sum(1).var(0).sum()

    with torch.no_grad():  # the gradient of a linear model, without autograd
        large = torch.stack([2 * ((model(data[d]) - goal[d]) * data[d]).mean(0) for d in draws])
        bias = torch.stack([2 * (model(data[d]) - goal[d]).mean(0) for d in draws])
    batch = torch.cat([large, bias], 1).double().var(0, correction=0).sum().item()

    assert window == pytest.approx(batch, rel=1e-4)
    assert one / window == pytest.approx(8, rel=0.15)


def test_claim_13_an_optimizers_zero_grad_decides_how_many_contributions_its_step_consumes() -> None:
    def consumed(zero_each: bool) -> float:
        w = weight()
        optimizer = torch.optim.SGD([w], lr=1.0)
        for x in (4.0, 2.0):
            if zero_each:
                optimizer.zero_grad()
            (square_error(w, x) / 2).backward()
        optimizer.step()
        return 1 - w.item()

    assert consumed(zero_each=False) == hand_gradient(4.0, 2.0)
    assert consumed(zero_each=True) == hand_gradient(2.0) / 2


class Last(nn.Module):
    """An LSTM whose last output is read, and `steps` time steps of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize(("pieces", "steps"), [(2, 1), (16, 60)])
def test_claim_14_an_lstm_accumulates_the_gradient_of_the_large_batch(pieces: int, steps: int) -> None:
    torch.manual_seed(0)
    model, x, y = Last().double(), torch.randn(16, steps, 3).double(), torch.randn(16, 1).double()
    error = nn.functional.mse_loss
    whole = gradient(model, [error(model(x), y)])
    parts = zip(x.chunk(pieces), y.chunk(pieces), strict=True)
    summed = gradient(model, (error(model(a), b) / pieces for a, b in parts))
    assert gap(summed, whole) < 1e-12


def travelled(make: Callable[..., torch.optim.Optimizer], signal: float, k: int, lr: float = 1e-3) -> float:
    """How far 2048 micro-batches move 500 weights whose gradient is a signal and noise of size 1."""
    torch.manual_seed(0)
    w = torch.zeros(500, requires_grad=True)
    optimizer = make([w], lr=lr)
    for done in range(1, 2049):
        ((signal + torch.randn(500)) @ w / k).backward()
        if done % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    return w.detach().norm().item()


def test_claim_28_scaling_the_rate_with_the_window_makes_up_for_fewer_steps_of_sgd() -> None:
    assert travelled(torch.optim.SGD, 0, 8, lr=8e-3) == pytest.approx(travelled(torch.optim.SGD, 0, 1), rel=1e-3)
    assert travelled(torch.optim.SGD, 10, 8, lr=8e-3) == pytest.approx(travelled(torch.optim.SGD, 10, 1), rel=1e-3)


def test_claim_28_adam_needs_the_root_of_it_in_noise_and_all_of_it_where_there_is_none() -> None:
    in_noise = travelled(torch.optim.Adam, 0, 1) / travelled(torch.optim.Adam, 0, 8)
    in_signal = travelled(torch.optim.Adam, 10, 1) / travelled(torch.optim.Adam, 10, 8)
    assert in_noise == pytest.approx(8**0.5, rel=0.1)
    assert in_signal == pytest.approx(8, rel=0.02)


def test_accelerates_backward_divides_by_its_flag_as_the_chapter_on_the_recipe_says() -> None:
    accelerate = pytest.importorskip("accelerate")
    backward = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True).backward
    w = weight()
    for x in (4.0, 2.0, 4.0, 2.0):
        backward(square_error(w, x))
    assert w.grad is not None
    assert w.grad.item() == hand_gradient(4.0, 2.0)
