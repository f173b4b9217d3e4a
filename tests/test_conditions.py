"""What a report says of loops that no rule accuses: what an optimizer did, and what has to be meant."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import accumviz as av
from accumviz.checks.report import Report


def trained(
    loss: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.mse_loss(out[:, 0], y),
    clip: Callable[[nn.Module], object] = lambda model: None,
    micro: int = 1,
    freeze: str = "",
) -> Report:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    if freeze:
        setattr(model, freeze, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with av.record(model, optimizer) as recording:
        for _ in range(4):
            for _ in range(micro):
                (loss(model(torch.randn(8, 3)), torch.randn(8)) / micro).backward()
            clip(model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return av.check(recording)


def test_a_report_says_what_each_optimizer_did() -> None:
    report = trained(micro=2)
    [said] = report.steps
    assert said == (
        "optimizer: 4 steps, of 2 micro-batches with shares that add up to 1, "
        "at learning rates from 0.025 to 0.1, the last 0.025, with 4 steps of a scheduler."
    )
    assert said in repr(report) and said in report.to_html() and said in report.to_json()


REDUCED = [lambda e: e.square().mean(), lambda e: e.abs().sum() / 8, lambda e: e.mean(1).mean()]


@pytest.mark.parametrize("reduce", REDUCED)
def test_a_column_that_meets_a_row_is_a_condition(reduce: Callable[[Tensor], Tensor]) -> None:
    """`(8, 1) - (8,)` is 8 × 8, each output with each other one's target."""
    assert "a loss of 8 × 8 numbers" in trained(lambda out, y: reduce(out - y)).condition
    assert trained(lambda out, y: reduce(out - y[:, None])).condition == ""


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_torchs_that_stretches_its_input_is_a_condition() -> None:
    assert "a loss of 8 × 8 numbers" in trained(F.mse_loss).condition
    pairs = trained(lambda out, y: F.relu(1 - (out - out.T)).square().mean() + F.mse_loss(out[:, 0], y))
    assert "numbers" not in pairs.condition, "each pair of outputs is meant"


def test_clips_of_one_parameter_each_are_a_condition() -> None:
    def one_by_one(model: nn.Module) -> None:
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.01)

    said = "2 clips before a step are meant, each by the norm of its own parameters"
    assert said in trained(clip=one_by_one).condition
    together = trained(clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert together.condition == ""


def test_what_only_looks_like_freezing_is_a_condition() -> None:
    assert "requires_grad = False is meant, which freezes nothing" in trained(freeze="requires_grad").condition
    assert trained(freeze="training").condition == ""


def script(steps: int, made_for: int) -> str:
    """A script whose schedule is made for so many steps, and what its report says has to be meant."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, made_for)
    recording = av.record(model, optimizer)
    recording.start()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    recording.stop("exit")
    return av.check(recording).condition


def test_a_schedule_of_which_half_is_left_at_the_end_of_a_script_is_a_condition() -> None:
    assert "a script that ends after 4 of the 16 steps of its schedule is meant" in script(4, 16)
    assert script(9, 16) == ""


@pytest.mark.parametrize(("waits", "said"), [(False, "a schedule that goes on in 4 steps"), (True, "")])
def test_a_schedule_that_goes_on_in_skipped_steps_is_a_condition(waits: bool, said: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with av.record(model, optimizer) as recording:
        for i in range(12):
            optimizer.zero_grad()
            bad = torch.inf if i % 3 == 1 else 1.0
            scaler.scale(model(torch.randn(8, 3)).square().mean() * bad).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if not waits or scaler.get_scale() >= scale:
                scheduler.step()
    report = av.check(recording)
    assert report.counts["skipped steps"] == 4
    assert ("goes on" in report.condition, report.condition.startswith(said)) == (bool(said), True)


@pytest.mark.parametrize(("by_hand", "found"), [(lambda g: g.add_(1e-3), True), (lambda g: g.div_(1024), False)])
def test_a_change_by_hand_excuses_a_clip_of_scaled_gradients_only_if_it_unscales(
    by_hand: Callable[[Tensor], Tensor], found: bool
) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with av.record(model, optimizer) as recording:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 3)).square().mean()).backward()
            for parameter in model.parameters():
                by_hand(parameter.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
    rules = [finding.rule for finding in av.check(recording).findings]
    assert ("clip-scaled-grads" in rules) == found
