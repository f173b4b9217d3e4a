"""Loops that people have, with nothing wrong in them: none may be frightened."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accumviz as av

K = 4
# A loop yields once, what is to be recorded, and then trains.
Loop = Callable[[], Iterator[tuple[Any, ...]]]
LOOPS: dict[str, Loop] = {}


def healthy(loop: Loop) -> Loop:
    LOOPS[loop.__name__.strip("_").replace("_", " ")] = loop
    return loop


def net(out: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, out))


def loader(samples: int = 32, size: int = 2, **settings: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, 8), torch.randint(0, 5, (samples,)))
    return DataLoader(data, batch_size=size, **settings)


@healthy
def _clipped_by_value() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _an_average_of_weights_and_a_warmup() -> Iterator[tuple[Any, ...]]:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)


@healthy
def _an_optimizer_for_the_body_and_one_for_the_head() -> Iterator[tuple[Any, ...]]:
    model = net()
    body = torch.optim.SGD(model[0].parameters(), lr=0.01, momentum=0.9)
    head = torch.optim.AdamW(model[2].parameters())
    yield model, body, head
    for i, (x, y) in enumerate(loader()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            for optimizer in (body, head):
                optimizer.step()
                optimizer.zero_grad()


@healthy
def _gradient_checkpointing() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        (F.cross_entropy(model[2](hidden), y) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _reentrant_checkpointing() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        (F.cross_entropy(model[2](hidden), y) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


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


@healthy
def _a_search_for_the_learning_rate() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    yield model, optimizer
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


@healthy
def _an_evaluation_every_few_steps() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % 6 == 5:
            model.eval()
            with torch.no_grad():
                total = sum(float(F.cross_entropy(model(a), b)) for a, b in loader(6))
            scheduler.step(total)
            model.train()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _an_epoch_left_early() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for _ in range(2):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader()):
            (F.cross_entropy(model(x), y) / K).backward()
            if i % K == K - 1:
                optimizer.step()
                optimizer.zero_grad()
            if i == 9:
                break


@healthy
def _an_uneven_last_batch_weighted_by_its_samples() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
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
def _two_weighted_losses_and_a_penalty() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        out = model(x)
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = 0.7 * F.cross_entropy(out, y) + 0.3 * out.square().mean() + 1e-4 * penalty
        (loss / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _smoothed_labels() -> Iterator[tuple[Any, ...]]:
    model, criterion = net(), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        (criterion(model(x), y) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _a_focal_loss() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        each = F.cross_entropy(model(x), y, reduction="none")
        loss = ((1 - torch.exp(-each)) ** 2 * each).mean()
        (loss / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _a_contrastive_loss_over_a_whole_batch() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for x, _ in loader(size=8):
        one, other = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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


@healthy
def _windows_summed_up_outside_grad() -> Iterator[tuple[Any, ...]]:
    model, head = net(), nn.Linear(8, 5)
    of_model, of_head = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
    yield model, head, of_model, of_head
    weights = list(model.parameters())
    total = [torch.zeros_like(p) for p in weights]
    for i, (x, y) in enumerate(loader()):
        for kept, new in zip(total, torch.autograd.grad(F.cross_entropy(model(x), y), weights), strict=True):
            kept += new / K
        (F.cross_entropy(head(x), y) / K).backward()
        if i % K == K - 1:
            for p, kept in zip(weights, total, strict=True):
                p.grad = kept.clone()
                kept.zero_()
            of_model.step()
            of_head.step()
            of_model.zero_grad()
            of_head.zero_grad()


@healthy
def _mixed_precision_with_an_overflow() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    yield model, optimizer
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
def _gradients_kept_as_zeros() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield model, optimizer
    optimizer.zero_grad(set_to_none=False)
    for i, (x, y) in enumerate(loader()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@healthy
def _the_model_zeroed_and_the_optimizer_too() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield model, optimizer
    model.zero_grad()
    for i, (x, y) in enumerate(loader()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()


@healthy
def _an_optimizer_for_each_parameter_in_its_hook() -> Iterator[tuple[Any, ...]]:
    model = net()
    own = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def apply(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(apply)
    yield (model, *own.values())
    for x, y in loader():
        F.cross_entropy(model(x), y).backward()


@healthy
def _truncated_backpropagation_through_time() -> Iterator[tuple[Any, ...]]:
    cell, head = nn.LSTM(8, 8), nn.Linear(8, 5)
    optimizer = torch.optim.AdamW([*cell.parameters(), *head.parameters()])
    yield cell, head, optimizer
    state = None
    for _ in range(8):
        out, state = cell(torch.randn(6, 2, 8), state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        F.cross_entropy(head(out).flatten(0, 1), torch.randint(0, 5, (12,))).backward()
        nn.utils.clip_grad_norm_([*cell.parameters(), *head.parameters()], 0.25)
        optimizer.step()


@healthy
def _an_actor_and_a_critic_with_one_trunk() -> Iterator[tuple[Any, ...]]:
    trunk, actor, critic = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*trunk.parameters(), *actor.parameters(), *critic.parameters()])
    yield trunk, actor, critic, optimizer
    for _ in range(4):
        states, returns = torch.randn(12, 8), torch.randn(12)
        for _ in range(3):
            hidden = trunk(states)
            chances = torch.distributions.Categorical(logits=actor(hidden))
            value = critic(hidden).squeeze(1)
            gain = (returns - value).detach()
            loss = -(chances.log_prob(chances.sample()) * gain).mean() + 0.5 * (returns - value).square().mean()
            loss = loss - 0.01 * chances.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trunk.parameters(), 0.5)
            optimizer.step()


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


@healthy
def _an_adversarial_step_on_the_input() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield model, optimizer
    for x, y in loader(8):
        moved = x.clone().requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
            moved = (moved + 0.01 * slope.sign()).detach().requires_grad_()
        optimizer.zero_grad()
        F.cross_entropy(model(moved), y).backward()
        optimizer.step()


@healthy
def _an_attack_by_backward_zeroed_before_its_step() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield model, optimizer
    for x, y in loader(8):
        moved = x.clone().requires_grad_()
        F.cross_entropy(model(moved), y).backward()
        assert moved.grad is not None
        moved = (moved + 0.01 * moved.grad.sign()).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(moved), y).backward()
        optimizer.step()


@healthy
def _sharpness_aware_minimization() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield model, optimizer
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


@healthy
def _the_mean_of_a_list_of_losses() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    window = []
    for x, y in loader():
        window.append(F.cross_entropy(model(x), y))
        if len(window) == K:
            (sum(window) / K).backward()
            optimizer.step()
            optimizer.zero_grad()
            window.clear()


@healthy
def _the_schedule_once_an_epoch_and_gradients_logged() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    yield model, optimizer
    norms = []
    for _ in range(3):
        for i, (x, y) in enumerate(loader(16)):
            (F.cross_entropy(model(x), y) / K).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
            if i % K == K - 1:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()


@healthy
def _samples_weighted_one_by_one() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for i, (x, y) in enumerate(loader()):
        weights = torch.rand(len(y))
        loss = (F.cross_entropy(model(x), y, reduction="none") * weights).sum() / (K * len(y))
        loss.backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _classes_weighted_by_how_rare_they_are() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 4.0, 1.0]))
    yield model, optimizer
    for x, y in loader(size=4):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


@healthy
def _meta_learning_by_reptile() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    yield model, optimizer
    for _ in range(3):
        before = copy.deepcopy(model.state_dict())
        for x, y in loader(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        after = model.state_dict()
        model.load_state_dict({name: before[name] + 0.1 * (after[name] - before[name]) for name in before})


@healthy
def _gradients_looked_at_after_the_step() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for x, y in loader():
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()


@healthy
def _a_window_that_grows_with_the_epochs() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for many in (1, 2, 4):
        for i, (x, y) in enumerate(loader(16)):
            (F.cross_entropy(model(x), y) / many).backward()
            if i % many == many - 1:
                optimizer.step()
                optimizer.zero_grad()


@healthy
def _two_loaders_at_once() -> Iterator[tuple[Any, ...]]:
    """Labelled batches and as many without labels: each gives a loss of its own to the window."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer
    for i, ((x, y), (u, _)) in enumerate(zip(loader(32), loader(64, 4), strict=True)):
        (F.cross_entropy(model(x), y) / K).backward()
        entropy = -(F.softmax(model(u), 1) * F.log_softmax(model(u), 1)).sum(1).mean()
        (0.1 * entropy / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def _a_loader_that_is_begun_anew_for_ever() -> Iterator[tuple[Any, ...]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    yield model, optimizer

    def batches() -> Iterator[Any]:
        while True:
            yield from source

    source = loader(12)
    stream = batches()
    for _ in range(8):
        for _ in range(K):
            x, y = next(stream)
            (F.cross_entropy(model(x), y) / K).backward()
        optimizer.step()
        optimizer.zero_grad()


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


class _Proxy:
    """An optimizer in a framework's clothes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@healthy
def _an_optimizer_behind_a_proxy() -> Iterator[tuple[Any, ...]]:
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = _Proxy(inner)
    yield model, inner
    for i, (x, y) in enumerate(loader(16)):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", LOOPS)
def test_a_healthy_loop_is_not_frightened(name: str) -> None:
    torch.manual_seed(0)
    running = LOOPS[name]()
    parts = next(running)
    with av.record(*parts) as recording:
        assert list(running) == []
    report = av.check(recording)
    assert report.verdict != "findings", report
    assert report.findings == (), report
