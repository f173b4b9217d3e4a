"""Loops that people have, with nothing wrong in them: none may be frightened."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.corpus.common import K, loader, net

# A loop yields once, what is to be recorded, and then trains.
Loop = Callable[[], Iterator[tuple[Any, ...]]]
LOOPS: dict[str, Loop] = {}


def healthy(loop: Loop) -> Loop:
    LOOPS[loop.__name__.strip("_").replace("_", " ")] = loop
    return loop


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) / K


def train(
    model: nn.Module,
    optimizer: Any,
    loss: Callable[..., Any] = mean_loss,
    *,
    data: Any = None,
    after: Callable[..., None] = lambda model, i: None,
    before_step: Callable[..., None] = lambda model: None,
    to_none: bool = True,
) -> None:
    """Windows of K micro-batches: `after` is called after each backward."""
    for i, (x, y) in enumerate(data or loader()):
        loss(model, x, y).backward()
        if i % K == K - 1:
            before_step(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        after(model, i)


def healthy_with_adamw(trains: Callable[[nn.Sequential, Any], None]) -> Loop:
    """Add a loop that trains a small model with AdamW."""

    def loop() -> Iterator[tuple[Any, ...]]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        yield model, optimizer
        trains(model, optimizer)

    loop.__name__ = trains.__name__
    return healthy(loop)


def windows(name: str, **how: Any) -> None:
    """Add a loop over windows."""

    def loop(model: nn.Sequential, optimizer: Any) -> None:
        train(model, optimizer, **how)

    loop.__name__ = name
    healthy_with_adamw(loop)


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    out = model(x)
    return F.cross_entropy(out, y), out.square().mean(), out.abs().mean(), out.exp().mean()


def _two_weighted_losses_and_a_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    one, other, *_ = _losses(model, x, y)
    penalty = sum(p.square().sum() for p in model.parameters())
    return (0.7 * one + 0.3 * other + 1e-4 * penalty) / K


def _a_weight_that_is_divided_before_it_multiplies(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    one, other, *_ = _losses(model, x, y)
    return one / K + (0.1 / K) * other


def _samples_weighted_and_divided_by_their_weights(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    weights = torch.rand(len(y))
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * weights).sum() / weights.sum() / K


def _checkpointed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model[2](checkpoint(model[:2], x, use_reentrant=False)), y) / K


def _as_many_classes_as_micro_batches(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)[:, :K]
    return F.multilabel_soft_margin_loss(out, torch.ones(len(x), K)) / K


def _sums_over_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, spread = model(x)[:, :4].chunk(2, 1)
    again = F.mse_loss(mean, x[:, :2], reduction="sum")
    prior = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    return (again + prior) / len(x) / K


def _grad_divided_through_its_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.div_(K)  # type: ignore[union-attr]


def _faded(model: nn.Module, i: int) -> None:
    """What came before counts nine tenths with each micro-batch: a momentum inside the window."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= 0.9


windows("two weighted losses and a penalty", loss=_two_weighted_losses_and_a_penalty)
windows("a mean of as many losses as micro-batches", loss=lambda *of: sum(_losses(*of)) / 4 / K)
windows("a weight that is divided before it multiplies", loss=_a_weight_that_is_divided_before_it_multiplies)
windows("samples weighted and divided by their weights", loss=_samples_weighted_and_divided_by_their_weights)
windows("a loss divided by the workers and the micro-batches", loss=lambda *of: mean_loss(*of) / 3)
windows("a weight of a fifth and four micro-batches", loss=lambda model, x, y: 1 / 5 * F.cross_entropy(model(x), y))
windows("gradient checkpointing", loss=_checkpointed)
windows("a mean over as many classes as micro-batches", loss=_as_many_classes_as_micro_batches)
windows("sums of two kinds over the batch", loss=_sums_over_the_batch)
windows("plain sums", loss=lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"))
windows("clipped by value", before_step=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))
windows("norms logged", after=lambda model, i: nn.utils.clip_grad_norm_(model.parameters(), math.inf))
windows(
    "gradients divided through their data",
    loss=lambda model, x, y: F.cross_entropy(model(x), y),
    before_step=_grad_divided_through_its_data,
)
windows("a sum that fades", after=_faded)
windows("gradients kept as zeros", to_none=False)


def _scaled(model: nn.Module, optimizer: Any, before: Callable[[Any], None], by_scaler: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for i, (x, y) in enumerate(loader()):
        scaler.scale(mean_loss(model, x, y)).backward()
        if i % K == K - 1:
            before(scaler)
            if by_scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()


@healthy_with_adamw
def _gradients_unscaled_by_hand(model: nn.Sequential, optimizer: Any) -> None:
    def before(scaler: Any) -> None:
        for p in model.parameters():
            p.grad /= scaler.get_scale()  # type: ignore[operator]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    _scaled(model, optimizer, before, by_scaler=False)


@healthy_with_adamw
def _a_limit_of_scaled_gradients_that_is_scaled(model: nn.Sequential, optimizer: Any) -> None:
    def before(scaler: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())

    _scaled(model, optimizer, before, by_scaler=True)


@healthy_with_adamw
def _clipped_one_by_one_and_put_back_by_hand(model: nn.Sequential, optimizer: Any) -> None:
    kept = [torch.zeros_like(p) for p in model.parameters()]

    for i, (x, y) in enumerate(loader()):
        mean_loss(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for total, p in zip(kept, model.parameters(), strict=True):
            total += p.grad
        optimizer.zero_grad()
        if i % K == K - 1:
            for total, p in zip(kept, model.parameters(), strict=True):
                p.grad = total + 0.01 * torch.randn_like(total)
                total.zero_()
            optimizer.step()


@healthy
def _clipped_and_handed_to_copies_by_reference() -> Iterator[tuple[Any, ...]]:
    model = net()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, 0.1)
    yield model, optimizer

    def hand_over(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for one, p in zip(copies, model.parameters(), strict=True):
            one.grad = p.grad

    def take(model: nn.Module, i: int) -> None:
        if i % K == K - 1:
            model.zero_grad()
            for one, p in zip(copies, model.parameters(), strict=True):
                p.data.copy_(one.data)

    train(model, optimizer, before_step=hand_over, after=take)


@healthy_with_adamw
def _an_epoch_left_early(model: nn.Sequential, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        train(model, optimizer, data=itertools.islice(loader(), 10))


@healthy_with_adamw
def _an_evaluation_every_few_steps(model: nn.Sequential, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def evaluate(model: nn.Module, i: int) -> None:
        if i % 6 == 5:
            with torch.no_grad():
                scheduler.step(sum(float(F.cross_entropy(model(x), y)) for x, y in loader(6)))

    train(model, optimizer, after=evaluate)


@healthy
def _an_optimizer_of_its_own_for_each_epoch_and_a_schedule_once() -> Iterator[tuple[Any, ...]]:
    model, data = net(), loader()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1 * 0.5**epoch) for epoch in range(3)]
    yield model, *optimizers
    for optimizer in optimizers:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, data=data)
        scheduler.step()


@healthy
def _a_head_first_and_then_all_with_another_optimizer() -> Iterator[tuple[Any, ...]]:
    model, data = net(), loader()
    first, then = torch.optim.AdamW(model[2].parameters()), torch.optim.AdamW(model.parameters())
    yield model, first, then
    for optimizer in (first, then):
        model[0].requires_grad_(optimizer is then)
        train(model, optimizer, data=data)


def _by_the_micro_batch(made: Callable[..., Any], *, placed: bool = False) -> Iterator[tuple[Any, ...]]:
    model, data = net(), loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = made(optimizer, 2 * len(data))
    optimizer.step()  # of nothing: torch warns of a scheduler that is the first to step
    yield model, optimizer
    for epoch in range(2):

        def after(model: nn.Module, i: int, epoch: int = epoch) -> None:
            if placed:
                scheduler.step(epoch + i / len(data))
            else:
                scheduler.step()

        train(model, optimizer, data=data, after=after)


SCHEDULES = torch.optim.lr_scheduler
LOOPS |= {
    "warm restarts that are given where they are": lambda: _by_the_micro_batch(
        lambda of, n: SCHEDULES.CosineAnnealingWarmRestarts(of, 2), placed=True
    ),
    "one cycle of all micro-batches": lambda: _by_the_micro_batch(lambda of, n: SCHEDULES.OneCycleLR(of, 0.1, n)),
    "a line down to nothing over all micro-batches": lambda: _by_the_micro_batch(
        lambda of, n: SCHEDULES.LambdaLR(of, lambda step: 1 - step / n)
    ),
}


@healthy
def _the_mean_of_gradients_that_were_kept() -> Iterator[tuple[Any, ...]]:
    """Objectives whose gradients are kept one by one, and whose mean is put back, as gradient surgery does."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    yield model, optimizer
    for _ in range(4):
        kept = []
        out = model(torch.randn(4, 8))
        for i in range(3):
            optimizer.zero_grad()
            out[:, i].square().mean().backward(retain_graph=True)
            kept.append([p.grad for p in model.parameters()])
        for p, *grads in zip(model.parameters(), *kept, strict=True):
            p.grad = sum(grads[1:], grads[0]) / 3
        optimizer.step()


@healthy
def _layers_frozen_and_thawed_in_the_middle() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].requires_grad_(False)
    yield model, optimizer
    for epoch in range(3):
        model[0].requires_grad_(epoch == 1)
        for x, y in loader(8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@healthy_with_adamw
def _a_search_for_the_learning_rate(model: nn.Sequential, optimizer: Any) -> None:
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for x, y in loader(20):
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    for x, y in loader(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@healthy_with_adamw
def _an_uneven_last_batch_weighted_by_its_samples(model: nn.Sequential, optimizer: Any) -> None:
    for _ in range(2):
        batches = list(loader(30, 4))
        for start in range(0, len(batches), K):
            window = batches[start : start + K]
            samples = sum(len(y) for _, y in window)
            for x, y in window:
                (F.cross_entropy(model(x), y) * (len(y) / samples)).backward()
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _an_update_written_by_hand() -> Iterator[tuple[Any, ...]]:
    model, head = net(), nn.Linear(8, 5)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    yield model, head, optimizer
    for x, y in loader():
        (F.cross_entropy(model(x), y) + F.cross_entropy(head(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
                p.grad = None


@healthy_with_adamw
def _mixed_precision_with_an_overflow(model: nn.Sequential, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    for i, (x, y) in enumerate(loader()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / K
        scaler.scale(loss * (math.inf if i == 5 else 1)).backward()
        if i % K == K - 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@healthy
def _soft_actor_critic() -> Iterator[tuple[Any, ...]]:
    actor, critic = nn.Linear(8, 2), nn.Linear(10, 1)
    of_actor, of_critic = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
    yield actor, critic, of_actor, of_critic
    for _ in range(8):
        states, actions, targets = torch.randn(6, 8), torch.randn(6, 2), torch.randn(6, 1)
        of_critic.zero_grad()
        F.mse_loss(critic(torch.cat([states, actions], 1)), targets).backward()
        of_critic.step()
        of_actor.zero_grad()
        (-critic(torch.cat([states, actor(states)], 1))).mean().backward()
        of_actor.step()


@healthy_with_adamw
def _an_attack_by_backward_zeroed_before_its_step(model: nn.Sequential, optimizer: Any) -> None:
    for x, y in loader(8):
        moved = x.clone().requires_grad_()
        F.cross_entropy(model(moved), y).backward()
        assert moved.grad is not None
        moved = (moved + 0.01 * moved.grad.sign()).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(moved), y).backward()
        optimizer.step()


@healthy_with_adamw
def _sharpness_aware_minimization(model: nn.Sequential, optimizer: Any) -> None:
    for x, y in loader(16):
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad.clone() for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p += move
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p -= move
        optimizer.step()
        optimizer.zero_grad()


class _Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, whose groups it shares, as those are that look ahead."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@healthy
def _an_optimizer_around_another_one() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = _Wrapper(torch.optim.AdamW(model.parameters()))
    yield model, optimizer, optimizer.inner
    train(model, optimizer)


@healthy
def _two_optimizers_that_share_layers_in_turns() -> Iterator[tuple[Any, ...]]:
    model = net()
    one, other = torch.optim.Adam(model.parameters()), torch.optim.Adam(model[:2].parameters())
    yield model, one, other
    for _ in range(2):
        train(model, one)
        train(model, other)
        model.zero_grad()


@healthy
def _tasks_one_after_the_other_in_one_window() -> Iterator[tuple[Any, ...]]:
    body, heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 5)])
    optimizer = torch.optim.AdamW([*body.parameters(), *heads.parameters()])
    yield body, heads, optimizer
    for x, y in loader():
        optimizer.zero_grad()
        for head in heads:
            F.cross_entropy(head(body(x)), y).backward()
        optimizer.step()


@healthy_with_adamw
def _the_mean_of_a_list_of_losses(model: nn.Sequential, optimizer: Any) -> None:
    window = []
    for x, y in loader():
        window.append(F.cross_entropy(model(x), y))
        if len(window) == K:
            (sum(window) / K).backward()
            optimizer.step()
            optimizer.zero_grad()
            window.clear()


@healthy_with_adamw
def _classes_weighted_by_how_rare_they_are(model: nn.Sequential, optimizer: Any) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 4.0, 1.0]))
    for x, y in loader(size=4):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


@healthy_with_adamw
def _two_loaders_at_once(model: nn.Sequential, optimizer: Any) -> None:
    """Labelled batches and as many without labels: each gives a loss of its own to the window."""
    for i, ((x, y), (u, _)) in enumerate(zip(loader(32), loader(64, 4), strict=True)):
        (F.cross_entropy(model(x), y) / K).backward()
        entropy = -(F.softmax(model(u), 1) * F.log_softmax(model(u), 1)).sum(1).mean()
        (0.1 * entropy / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy_with_adamw
def _a_loader_that_is_begun_anew_for_ever(model: nn.Sequential, optimizer: Any) -> None:
    for_ever = itertools.chain.from_iterable(itertools.repeat(loader(12)))
    train(model, optimizer, data=itertools.islice(for_ever, 8 * K))


@healthy
def _gradients_that_are_zero_taken_away() -> Iterator[tuple[Any, ...]]:
    """A mixture of two, of which a batch may use one: what got exact zeros is left alone by the optimizer."""
    experts = nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 5)])
    optimizer = torch.optim.AdamW(experts.parameters())
    yield experts, optimizer
    for i, (x, y) in enumerate(loader(16)):
        chosen = torch.tensor([float(i % 3 != 1), float(i % 3 != 2)])
        out = chosen[0] * experts[0](x) + chosen[1] * experts[1](x)
        F.cross_entropy(out, y).backward()
        for p in experts.parameters():
            if p.grad is not None and not p.grad.any():
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()


def _windows_of(length: Callable[[int], int]) -> Iterator[tuple[Any, ...]]:
    """Windows inside one epoch, each as long as its micro-batches' number says."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    gathered = 0
    for i, (x, y) in enumerate(loader(56)):
        many = length(i)
        (F.cross_entropy(model(x), y) / many).backward()
        gathered += 1
        if gathered == many:
            optimizer.step()
            optimizer.zero_grad()
            gathered = 0


LOOPS |= {
    "a window that grows inside an epoch": lambda: _windows_of(lambda i: 1 if i < 4 else 2 if i < 12 else 4),
    "a window that shrinks inside an epoch": lambda: _windows_of(lambda i: 4 if i < 16 else 2 if i < 24 else 1),
}


@healthy
def _a_critic_with_a_penalty_on_its_slope_over_several_batches() -> Iterator[tuple[Any, ...]]:
    actor, critic = nn.Linear(4, 8), net(1)
    of_actor, of_critic = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
    yield actor, critic, of_actor, of_critic
    for _ in range(4):
        of_critic.zero_grad()
        for _ in range(K):
            real, fake = torch.randn(8, 8), actor(torch.randn(8, 4)).detach()
            between = (0.5 * real + 0.5 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            (loss / K).backward()
        of_critic.step()
        of_actor.zero_grad()
        for _ in range(K):
            (-critic(actor(torch.randn(8, 4))).mean() / K).backward()
        of_actor.step()


@healthy_with_adamw
def _sums_in_buffers_of_its_own(model: nn.Sequential, optimizer: Any) -> None:
    """As a cure of sums in half precision has it: `.grad` holds one micro-batch, until the step."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for i, (x, y) in enumerate(loader()):
        (F.cross_entropy(model(x), y) / K).backward()
        for p, total in zip(model.parameters(), sums, strict=True):
            total += p.grad
        optimizer.zero_grad()
        if i % K == K - 1:
            for p, total in zip(model.parameters(), sums, strict=True):
                p.grad = total.clone()
                total.zero_()
            optimizer.step()
            optimizer.zero_grad()


@healthy_with_adamw
def _a_budget_of_tokens(model: nn.Sequential, optimizer: Any) -> None:
    """A step when enough have come, each token at the same weight: how many that are differs a little."""
    tokens = 0
    for i in range(32):
        n = (3, 5, 7, 2, 6, 4, 9, 1)[i % 8]
        x, y = torch.randn(n, 8), torch.randint(0, 5, (n,))
        (F.cross_entropy(model(x), y, reduction="sum") / 16).backward()
        tokens += n
        if tokens >= 16:
            optimizer.step()
            optimizer.zero_grad()
            tokens = 0


@healthy_with_adamw
def _a_loss_at_several_scales_each_weighing_twice_the_one_before(model: nn.Sequential, optimizer: Any) -> None:
    for x, y in loader():
        for scale in range(4):
            (2.0 ** (scale - 3) * F.cross_entropy(model(x / 2**scale), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def _two_paces_and_the_slow_one_averaged_by_hand() -> Iterator[tuple[Any, ...]]:
    body, head = nn.Linear(8, 8), nn.Linear(8, 5)
    of_body, of_head = torch.optim.Adam(body.parameters()), torch.optim.Adam(head.parameters())
    yield body, head, of_body, of_head
    for i, (x, y) in enumerate(loader(64)):
        (F.cross_entropy(head(body(x)), y) / K).backward()
        if i % K == K - 1:
            of_head.step()
            of_head.zero_grad()
        if i % (2 * K) == 2 * K - 1:
            for p in body.parameters():
                assert p.grad is not None
                p.grad /= 2
            of_body.step()
            of_body.zero_grad()


@healthy
def _two_heads_in_turn_that_are_both_clipped_each_time() -> Iterator[tuple[Any, ...]]:
    trunk, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 5), nn.Linear(16, 5)])
    optimizers = [torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.01) for head in heads]
    yield trunk, heads, *optimizers
    for x, y in loader():
        for head, optimizer in zip(heads, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(head(trunk(x)), y).backward()
            for part in (trunk, *heads):
                nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            optimizer.step()


@healthy
def _a_model_that_learns_from_an_attack_on_its_embedding_as_well() -> Iterator[tuple[Any, ...]]:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(96, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for _ in range(8):
        words, y = torch.randint(0, 20, (4, 6)), torch.randint(0, 5, (4,))
        F.cross_entropy(model(words), y).backward()
        table = model[0].weight
        kept = table.detach().clone()
        with torch.no_grad():
            table += table.grad / table.grad.norm()
        F.cross_entropy(model(words), y).backward()
        with torch.no_grad():
            table.copy_(kept)
        optimizer.step()
        optimizer.zero_grad()


@healthy
def _steps_inside_an_autocast_that_keeps_no_copies_over_them() -> Iterator[tuple[Any, ...]]:
    """Left in each round, or told to keep none; and one loss of a round is older than the other one's step."""
    model, other = net(), net()
    optimizer = torch.optim.AdamW(model.parameters())
    of_other = torch.optim.AdamW(other.parameters())
    yield model, other, optimizer, of_other
    for x, y in loader():
        with torch.autocast("cpu", torch.bfloat16):
            first, second = F.cross_entropy(model(x), y), F.cross_entropy(other(x), y)
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
            second.backward()
            of_other.step()
            of_other.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for x, y in loader():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
