"""What `accumviz run` finds of a script that trains in its own way, from the first call that begins the training."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accumviz as av
from accumviz.ledger.ledger import CONTRIBUTED
from accumviz.recorder.detection import Detector
from accumviz.recorder.recording import Recording

Step = Callable[[int], None]


@contextmanager
def watched() -> Iterator[list[Recording]]:
    found: list[Recording] = []
    notes: list[str] = []
    detector = Detector(None, found, notes)
    try:
        yield found
    finally:
        detector.close("exit")
    assert notes == []


def _stepping(parameters: Iterable[nn.Parameter], backward: Callable[[], None], scaler: Any = None) -> Step:
    """A step after each fourth backward."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def step(i: int) -> None:
        backward()
        if i % 4 == 3:
            if scaler is None:
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()

    return step


def _bare() -> Step:
    w = nn.Parameter(torch.ones(3))
    return _stepping([w], lambda: (torch.randn(2, 3).mul(w).sum(1).square().mean() / 4).backward())


def _scaled_in_one_line() -> Step:
    model, x, scaler = nn.Linear(3, 1), torch.randn(2, 3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    return _stepping(
        model.parameters(), lambda: scaler.scale(F.mse_loss(model(x), torch.zeros(2, 1)) / 4).backward(), scaler
    )


def _differentiated_in_one_line() -> Step:
    model, x = nn.Linear(3, 1), torch.randn(2, 3)
    return _stepping(model.parameters(), lambda: torch.autograd.backward(model(x).square().mean() / 4))


@pytest.mark.parametrize("made", [_bare, _scaled_in_one_line, _differentiated_in_one_line])
def test_a_right_loop_is_recorded_from_its_first_backward_and_healthy(made: Callable[[], Step]) -> None:
    with watched() as found:
        step = made()
        for i in range(8):
            step(i)
    [recorded] = found
    ledger = recorded.ledger
    assert len(ledger.of("backward")) == 8
    assert {round(share.share, 6) for share in ledger.shares()} == {0.25}
    assert av.check(ledger).healthy, str(av.check(ledger))


def _critic_before_generator(G: nn.Module, D: nn.Module, i: int) -> torch.Tensor:
    G.requires_grad_(i % 2 == 1)
    D.requires_grad_(i % 2 == 0)
    fake = D(G(torch.randn(4, 2)))
    return fake.mean() if i % 2 else (D(torch.randn(4, 2)) - fake).mean()


def _head_before_body(body: nn.Module, head: nn.Module, i: int) -> torch.Tensor:
    body.requires_grad_(i > 1)
    return head(body(torch.randn(4, 2))).square().mean()


@pytest.mark.parametrize(
    ("loss", "trains"), [(_critic_before_generator, ["b", "a", "b", "a"]), (_head_before_body, ["b", "b", "ab", "ab"])]
)
def test_what_is_frozen_when_the_training_begins_is_recorded_from_then_on(loss: Any, trains: list[str]) -> None:
    with watched() as found:
        a, b = nn.Linear(2, 2), nn.Linear(2, 1)
        optimizers = [torch.optim.Adam(model.parameters()) for model in (a, b)]
        for i in range(4):
            loss(a, b, i).backward()
            for model, optimizer in zip((a, b), optimizers, strict=True):
                if model.weight.requires_grad:
                    optimizer.step()
                optimizer.zero_grad()
    [recorded] = found
    ledger = recorded.ledger
    weights = {parameter.name: i for i, parameter in enumerate(ledger.parameters)}
    reached = ledger.state & CONTRIBUTED > 0
    backwards = [event.index for event in ledger.of("backward")]
    got = [[name for name in "ab" if reached[at, weights[f"{name}.weight"]]] for at in backwards]
    assert ["".join(names) for names in got] == trains
    assert av.check(ledger).verdict == "healthy", str(av.check(ledger))


def test_of_models_made_one_after_the_other_the_first_four_are_recorded() -> None:
    recordings: list[Recording] = []
    notes: list[str] = []
    detector = Detector(None, recordings, notes)
    for _ in range(6):
        step = _differentiated_in_one_line()
        for i in range(4):
            step(i)
    detector.close("exit")
    assert [len(recording.ledger.windows()) for recording in recordings] == [1] * 4
    assert notes == ["the first 4 models were recorded, and later ones were not"]


def test_a_warning_of_the_first_backward_names_the_users_line() -> None:
    with watched() as found, pytest.warns(FutureWarning, match="grad_variables") as said:
        w = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([w], lr=0.01)
        torch.autograd.backward(w.square(), grad_variables=torch.ones(1))
        optimizer.step()
    assert len(found) == 1 and said[0].filename == __file__
