"""What a report says of loops that no rule accuses: what an optimizer did, and what has to be meant."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

import accumviz as av
from accumviz.checks.report import Report


def line() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, SGD(model.parameters(), lr=0.1)


def trained(
    loss: Callable[[int], Tensor],
    model: Any,
    optimizer: SGD,
    *,
    steps: int = 4,
    K: int = 1,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> Report:
    """Judge a right loop of K losses to a step, with what is called before and after each step."""
    with av.record(model, optimizer) as recording:
        for _ in range(steps):
            for n in range(K):
                loss(n).backward()
            before()
            optimizer.step()
            after()
            optimizer.zero_grad()
    report = av.check(recording)
    assert report.healthy or "differently in different parameters" in report.reason, report
    return report


def fitted(
    loss: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.mse_loss(out[:, 0], y),
    clip: Callable[[nn.Module], object] = lambda model: None,
    freeze: str = "",
) -> str:
    """What has to be meant where a line is fitted."""
    model, optimizer = line()
    if freeze:
        setattr(model, freeze, False)

    def loss_of_samples(_: int) -> Tensor:
        return loss(model(torch.randn(8, 3)), torch.randn(8))

    return trained(loss_of_samples, model, optimizer, before=lambda: clip(model)).condition


def test_a_report_says_what_each_optimizer_did() -> None:
    model, optimizer = line()
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def loss(_: int) -> Tensor:
        return model(torch.randn(8, 3)).square().mean() / 2

    report = trained(loss, model, optimizer, K=2, after=lambda: scheduler.step())
    [said], [of_loss] = report.steps, report.losses
    assert said == (
        "optimizer: 4 steps on 4 weights, of 2 micro-batches with shares that add up to 1, "
        "at learning rates from 0.025 to 0.1, the last 0.025, with 4 steps of a scheduler."
    )
    assert of_loss.endswith("): 0.5 × Mean reaches all parameters.") and of_loss in repr(report)
    assert said in repr(report) and said in report.to_html() and said in report.to_json()


REDUCED = [lambda e: e.square().mean(), lambda e: e.abs().sum() / 8, lambda e: e.mean(1).mean()]


@pytest.mark.parametrize("reduce", REDUCED)
def test_a_column_that_meets_a_row_is_a_condition(reduce: Callable[[Tensor], Tensor]) -> None:
    """`(8, 1) - (8,)` is 8 × 8, each output with each other one's target."""
    assert "a loss of 8 × 8 numbers" in fitted(lambda out, y: reduce(out - y))
    assert fitted(lambda out, y: reduce(out - y[:, None])) == ""


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_torchs_that_stretches_its_input_is_a_condition() -> None:
    assert "a loss of 8 × 8 numbers" in fitted(F.mse_loss)
    pairs = fitted(lambda out, y: F.relu(1 - (out - out.T)).square().mean() + F.mse_loss(out[:, 0], y))
    assert "numbers" not in pairs, "each pair of outputs is meant"


def test_clips_of_one_parameter_each_are_a_condition() -> None:
    said = "2 clips before a step are meant, each by the norm of its own parameters"
    assert said in fitted(clip=lambda model: [nn.utils.clip_grad_norm_([p], 0.01) for p in model.parameters()])
    assert fitted(clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01)) == ""


def test_what_only_looks_like_freezing_is_a_condition() -> None:
    assert "requires_grad = False is meant, which freezes nothing" in fitted(freeze="requires_grad")
    assert fitted(freeze="training") == ""


def test_frozen_parameters_and_empty_groups_of_an_optimizer_are_conditions() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = SGD([{"params": model.parameters()}, {"params": []}], lr=0.1)
    report = trained(lambda _: model(torch.ones(2, 4)).mean(), model, optimizer)
    assert report.steps[0].startswith("optimizer: 4 steps on 5 of 25 weights, of 1 micro-batch")
    assert "optimizer is meant to have 0.weight and 1 more frozen (test_conditions.py:" in report.condition
    assert "a group of optimizer without a parameter is meant (test_conditions.py:" in report.condition


@pytest.mark.parametrize(
    ("penalty", "meant"),
    [
        (lambda w, x, n: w.square().sum(), True),
        (lambda w, x, n: w.abs().sum(), True),
        (lambda w, x, n: w.square().sum() / 4, False),
        (lambda w, x, n: w.square().sum() * (n == 0), False),
        (lambda w, x, n: w[x.long()].square().sum(), False),  # of the samples' own rows
        (lambda w, x, n: (w * x).square().sum(), False),
    ],
)
def test_a_penalty_on_weights_in_each_micro_batch_is_a_condition(penalty: Callable[..., Any], meant: bool) -> None:
    w, x = torch.ones(8, requires_grad=True), torch.arange(8.0)

    def loss(n: int) -> Tensor:
        return ((w * x) ** 2).mean() / 4 + 0.1 * penalty(w, x, n)

    condition = trained(loss, w, SGD([w], lr=0.01), K=4).condition
    assert ("a penalty on weights that is added 4 times in a step is meant (test_conditions" in condition) == meant


@pytest.mark.parametrize(("start", "steps", "meant"), [(0.0, 3, True), (0.0, 1, False), (1.0, 3, False)])
def test_a_gradient_that_is_0_in_each_window_is_a_condition(start: float, steps: int, meant: bool) -> None:
    model = nn.ParameterDict({"a": torch.full((4, 2), start), "b": torch.zeros(2, 4)})

    def loss(_: int) -> Tensor:
        return (torch.ones(2, 4) @ model["a"] @ model["b"] - 1).square().mean() / 4

    condition = trained(loss, model, SGD(model.parameters(), lr=0.1), steps=steps, K=4).condition
    said = "a gradient of 0 in each of 12 backwards is meant for a and 1 more (test_conditions.py:"
    assert (said in condition) == meant == bool(condition), condition


@pytest.mark.parametrize(("registered", "flat"), [(False, False), (True, False), (False, True)])
def test_layers_in_a_plain_list_are_a_condition(registered: bool, flat: bool) -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[0].weight._is_flat_param = flat  # FSDP's, of which weights are views
    model = nn.Linear(4, 1)
    model.layers = nn.ModuleList(layers) if registered else layers
    frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def loss(_: int) -> Tensor:
        return model(nn.Sequential(frozen, *layers)(torch.ones(2, 4, requires_grad=True))).mean()

    condition = trained(loss, model, SGD(model.parameters(), lr=0.1)).condition
    assert ("this loss is meant to reach 6 parameters" in condition) is not (registered or flat)


@pytest.mark.parametrize("steps", [False, True])
def test_a_network_that_is_not_recorded_may_have_an_optimizer_of_its_own(steps: bool) -> None:
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    of_maker, of_judge = (SGD(each.parameters(), lr=0.1) for each in (maker, judge))
    recorded = trained(
        lambda _: judge(maker(torch.ones(2, 4))).mean(), maker, of_maker, after=lambda: steps and of_judge.step()
    )
    assert ("this loss is meant to reach 2 parameters" in recorded.condition) is not steps


def script(model: nn.Module, optimizer: Any, scheduler: Any, steps: int, every: int = 1) -> str:
    """Return what has to be meant of a whole script, whose schedule moves after every so many steps."""
    recording = av.record(model, optimizer).start()
    for n in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if n % every == every - 1:
            scheduler.step()
    recording.stop("exit")
    return av.check(recording).condition


@pytest.mark.parametrize(("steps", "said"), [(4, "after 4 of the 16 steps of its schedule is meant"), (9, "")])
def test_a_schedule_of_which_half_is_left_at_the_end_of_a_script_is_a_condition(steps: int, said: str) -> None:
    model, optimizer = line()
    condition = script(model, optimizer, CosineAnnealingLR(optimizer, 16), steps)
    assert said in condition and bool(said) == bool(condition)


@pytest.mark.parametrize(
    ("loaded", "every", "said"),
    [((0,), 1, "a schedule that begins anew after 6 steps is meant"), ((0, 1), 1, ""), ((), 1, ""), ((0,), 8, "")],
)
def test_a_schedule_that_begins_anew_where_the_optimizer_goes_on_is_a_condition(
    loaded: tuple[int, ...], every: int, said: str
) -> None:
    saved: list[dict[str, Any]] = []
    for steps in (6, 8):
        model, _ = line()
        optimizer = Adam(model.parameters(), lr=0.1)
        # Of two schedules in a row, the second one begins at its own 0.
        parts = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for _ in range(2)]
        objects = optimizer, SequentialLR(optimizer, parts, [9])
        for place in loaded if saved else ():
            objects[place].load_state_dict(saved[place])
        condition = script(model, *objects, steps, every)
        saved = [each.state_dict() for each in objects]
    assert condition.startswith(said) and bool(said) == bool(condition)


@pytest.mark.parametrize("anew", [True, False])
def test_a_scale_that_leaps_up_with_each_new_scaler_is_a_condition(anew: bool) -> None:
    model, optimizer = line()
    with av.record(model, optimizer) as recording:
        for epoch in range(3):
            if anew or not epoch:
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=4.0, growth_interval=1)
            for infinite in (True, True, True, False):
                optimizer.zero_grad()
                loss = model(torch.randn(8, 3)).square().mean() * (torch.inf if infinite else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    said = "a scale that leaps up 2 times, as with a new scaler in each epoch, is meant (test_conditions.py:"
    condition = av.check(recording).condition
    assert condition.startswith(said) == ("leaps" in condition) == anew


@pytest.mark.parametrize(("waits", "said"), [(False, "a schedule that goes on in 4 steps"), (True, "")])
def test_a_schedule_that_goes_on_in_skipped_steps_is_a_condition(waits: bool, said: str) -> None:
    model, optimizer = line()
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
    model, optimizer = line()
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


def of_two(loss: Callable[[nn.ModuleDict, Tensor], Tensor], rates: tuple[float, ...] = (0.1,)) -> Report:
    """A loss of an actor and a critic, of which only the actor is trained."""
    nets = nn.ModuleDict({"actor": line()[0], "critic": nn.Linear(3, 1)})
    optimizer, coming = SGD(nets["actor"].parameters(), lr=0.1), iter(rates)

    def schedule() -> None:
        optimizer.param_groups[0]["lr"] = next(coming)

    return trained(lambda _: loss(nets, torch.randn(8, 3)), nets, optimizer, steps=len(rates), before=schedule)


def test_a_report_says_which_modules_each_part_of_a_loss_reaches() -> None:
    def joint(nets: nn.ModuleDict, x: Tensor) -> Tensor:
        return (nets["actor"](x) * nets["critic"](x)).sum() + 0.5 * nets["critic"](x).square().mean()

    def detached(nets: nn.ModuleDict, x: Tensor) -> Tensor:
        return (nets["actor"](x) - nets["critic"](x).detach()).square().sum() + 0.5 * nets["actor"](x).abs().mean()

    report = of_two(joint)
    assert report.losses[0].endswith("): Sum reaches all parameters; 0.5 × Mean reaches critic.")
    assert "a part of this loss that moves no weight, 0.5 × Mean, is meant" in report.condition
    report = of_two(detached)
    assert report.losses[0].endswith("): Sum + 0.5 × Mean reaches actor.") and "moves no weight" not in report.condition


def acting(nets: nn.ModuleDict, x: Tensor) -> Tensor:
    return nets["actor"](x).square().mean()


def test_a_report_says_how_often_a_rate_rises_again() -> None:
    assert "rising again" not in of_two(acting, (0.1, 0.2, 0.2, 0.1, 0.1)).steps[0]
    assert of_two(acting, (0.2, 0.1, 0.1, 0.2, 0.1, 0.3)).steps[0].endswith("the last 0.3, rising again 2 times.")


@pytest.mark.parametrize(("last", "said"), [(0.0, "3 of 6 steps of optimizer at a rate of almost 0"), (0.1, "")])
def test_many_steps_at_a_rate_of_almost_0_are_a_condition(last: float, said: str) -> None:
    condition = of_two(acting, (1.0, 1.0, 1.0, last, last, last)).condition
    assert condition.startswith(said) and bool(condition) == bool(said)


CLASSES, HALF = torch.tensor([0, 1]), torch.full((2, 2), 0.5)
OF_LOGITS: list[tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: F.cross_entropy(x, CLASSES), lambda x: x),
    (lambda x: F.nll_loss(x, CLASSES), lambda x: x.log_softmax(1)),
    (lambda x: F.binary_cross_entropy_with_logits(x.squeeze().float(), HALF), lambda x: x),
    (lambda x: (F.kl_div(x, HALF, reduction="none") * HALF).sum(), lambda x: x.log_softmax(1)),
]


@pytest.mark.parametrize(("loss", "right"), OF_LOGITS)
def test_a_softmax_before_a_loss_of_logits_is_a_condition(
    loss: Callable[..., Tensor], right: Callable[[Tensor], Tensor]
) -> None:
    said = "probabilities of a Softmax and not logits, or their logarithms, are meant"
    assert said in of_two(lambda nets, x: loss(nets["actor"](x[:2]).expand(2, 2).softmax(1))).condition
    assert said not in of_two(lambda nets, x: loss(right(nets["actor"](x[:2]).expand(2, 2)))).condition
    assert said not in of_two(lambda nets, x: (nets["actor"](x[:2]).softmax(1) * HALF).sum(1).mean()).condition


def test_a_loss_with_its_targets_in_front_or_without_logarithms_is_a_condition() -> None:
    loss, right = partial(F.binary_cross_entropy_with_logits, reduction="none"), HALF[0]
    swapped = of_two(lambda nets, x: loss(right, nets["actor"](x[:2])[:, 0]).mean()).condition
    assert swapped.startswith("a binary cross entropy of which the targets alone have a gradient is meant")
    assert of_two(lambda nets, x: loss(nets["actor"](x[:2])[:, 0], right).mean()).condition == ""
    logits = of_two(lambda nets, x: F.nll_loss(nets["actor"](x[:2]), CLASSES[:1].repeat(2))).condition
    assert logits.startswith("logits, and no logarithms of probabilities, are meant for NllLoss")


def test_a_loss_that_is_not_read_is_a_condition_where_its_factors_add_up_to_1() -> None:
    def judged(K: int, divisor: int) -> str:
        model, optimizer = line()
        x = torch.randn(8, 3)
        return trained(lambda _: model(x).mean() / model(x).exp().sum() / divisor, model, optimizer, K=K).condition

    for K, each in ((1, "step"), (4, "micro-batch")):
        assert f"is meant to weigh the same in each {each}" in judged(K, K)
    with pytest.raises(AssertionError, match="no verdict"):
        judged(4, 1)


def test_a_change_by_hand_of_all_that_a_step_reads_is_a_condition_and_a_clip_by_value_is_none() -> None:
    def each(change: Callable[[Tensor], object]) -> Callable[[nn.Module], object]:
        return lambda model: list(map(change, model.parameters()))

    assert "what is done to `.grad` by hand" in fitted(clip=each(lambda p: p.grad.add_(0.1)))
    assert fitted(clip=each(lambda p: nn.utils.clip_grad_value_(p, 0.01))) == ""


def test_two_losses_of_one_line_are_named_with_the_range_of_their_factors() -> None:
    (model, optimizer), divisors = line(), iter([0, 8, 0, 8.8])

    def loss(_: int) -> Tensor:
        out, by = model(torch.ones(8, 3)), next(divisors)
        return F.mse_loss(out, out.detach() + 1, reduction="sum") / by if by else out.mean()

    said = "".join(trained(loss, model, optimizer).losses)
    assert ": Mean reaches all" in said and ": 0.114 to 0.125 × MseLoss (sum) reaches all" in said


def test_what_right_loops_of_projects_do_is_no_mistake() -> None:
    model, optimizer = line()
    counts, average = iter([3, 5] * 4), iter([1.0, 1.04] * 4)

    def weighted(_: int) -> Tensor:
        out = model(torch.randn(n := next(counts), 3))
        return F.mse_loss(out, out.detach() + 1, reduction="sum") / 8 + out.abs().mean() * (8 - n) / 8

    with av.record(model, optimizer) as recording:
        for _ in range(4):
            model(torch.randn(8, 3)).square().mean().backward()
            model.weight.grad, model.bias.grad = torch.randn(1, 3), torch.randn(1)
            optimizer.step()
    optimizer.zero_grad()
    assert not av.check(recording).findings
    assert "weigh up to" in trained(weighted, model, optimizer, K=2).condition
    averaged = trained(lambda _: model(torch.randn(8, 3)).square().sum() / next(average), model, optimizer, K=2)
    assert "up to 1.04 times" in averaged.condition
