"""Hooks of the user's that change gradients: what they did is recorded, and no loop that is right is called wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import accumviz as av

K, WINDOWS = 4, 3


class Loop:
    """K micro-batches a step of two parameters, whose gradients are whole numbers: exact in any order."""

    def __init__(self, *, momentum: float = 0.0, losses: int = 1, wide: int = 1) -> None:
        self.net = nn.ParameterList([torch.arange(1.0, 3.0).repeat(wide), torch.full((wide,), 3.0)])
        self.own = list(self.net.parameters())
        self.optimizer = torch.optim.SGD(self.own, lr=2.0**-20, momentum=momentum)
        self.losses, self.batch = losses, 0

    def full(self) -> bool:
        """Whether this micro-batch is the last of its window."""
        return self.batch % K == 0

    def loss(self, divisor: float = 1.0) -> Tensor:
        weights = torch.cat(self.own)
        scores = weights * torch.tensor([[self.batch], [1.0]]) * torch.arange(1, len(weights) + 1)
        loss = scores.sum(1).mean() / divisor
        return loss if self.losses == 1 else loss + scores.square().sum(1).mean() / divisor

    def train(self, divisor: float = 1.0, by_hand: float = 1.0) -> Any:
        with av.record(self.net, self.optimizer) as recording:
            for self.batch in range(1, WINDOWS * K + 1):
                loss = self.loss(divisor)
                loss.backward()
                if self.full():
                    for p in self.own if by_hand != 1 else ():
                        p.grad.div_(by_hand)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return recording.ledger


Hooked = Callable[[Loop, float], None]


def _in_place(loop: Loop, by: float, *, always: bool = False) -> None:
    def hook(p: Tensor) -> None:
        if (always or loop.full()) and p.grad is not None:
            p.grad.div_(by)

    for p in loop.own:
        p.register_post_accumulate_grad_hook(hook)


def _another_tensor(loop: Loop, by: float) -> None:
    def hook(p: Tensor) -> None:
        if loop.full() and p.grad is not None:
            p.grad = p.grad / by

    for p in loop.own:
        p.register_post_accumulate_grad_hook(hook)


def _before_the_step(loop: Loop, by: float) -> None:
    def hook(*_: Any) -> None:
        for p in loop.own:
            if p.grad is not None:
                p.grad.div_(by)

    loop.optimizer.register_step_pre_hook(hook)


def _through_data(loop: Loop, by: float) -> None:
    def hook(*_: Any) -> None:
        for p in loop.own:
            if p.grad is not None:
                p.grad.data.div_(by)

    loop.optimizer.register_step_pre_hook(hook)


HOOKS: dict[str, Hooked] = {
    "after accumulation, in place": _in_place,
    "after accumulation, another tensor": _another_tensor,
    "before the step": _before_the_step,
    "before the step, without a version": _through_data,
}
LOOPS: dict[str, dict[str, Any]] = {
    "elements": {},
    "norms": {"wide": 70},
    "momentum": {"momentum": 0.5},
    "two losses": {"losses": 2},
}
hooks = pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
loops = pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)


def _told(ledger: Any) -> list[str]:
    return [f"{event.kind} {event.details.get('by', '')}".strip() for event in ledger]


def _rules(ledger: Any) -> set[str]:
    return {finding.rule for finding in av.check(ledger).findings}


@hooks
@loops
def test_a_division_in_a_hook_is_an_edit_of_its_own_and_the_loop_is_healthy(
    hook: Hooked, options: dict[str, Any]
) -> None:
    loop, plain = Loop(**options), Loop(**options)
    hook(loop, K)
    ledger, by_hand = loop.train(), plain.train(by_hand=K)
    assert _told(ledger) == [*["backward"] * K, "edit hook", "step", "zero_grad"] * WINDOWS
    # To the last bit what a division by hand in that place is told as.
    assert bool(ledger.exact) == (options != LOOPS["norms"])
    for what in ("grad", "contribution"):
        np.testing.assert_array_equal(getattr(ledger, what), getattr(by_hand, what))
        for p in ledger.exact:
            np.testing.assert_array_equal(ledger.values(p, what), by_hand.values(p, what))
    np.testing.assert_array_equal(ledger.state, by_hand.state)
    assert ledger.shares() == by_hand.shares()
    np.testing.assert_allclose(ledger.shares().share, 1 / K, rtol=1e-6)
    assert av.check(ledger).verdict == "healthy"


@hooks
@loops
def test_a_hook_that_changes_nothing_hides_no_missing_division(hook: Hooked, options: dict[str, Any]) -> None:
    loop = Loop(**options)
    hook(loop, 1.0)
    ledger = loop.train()
    np.testing.assert_allclose(ledger.shares().share, 1.0, rtol=1e-6)
    assert _rules(ledger) == {"loss-not-divided"}


@hooks
def test_a_hook_that_divides_once_more_is_found(hook: Hooked) -> None:
    loop = Loop()
    hook(loop, K)
    ledger = loop.train(divisor=K)
    np.testing.assert_allclose(ledger.shares().share, 1 / K**2)
    assert _rules(ledger) == {"double-division"}


def test_a_hook_of_all_optimizers_that_came_while_the_recording_was_open_is_an_edit_too() -> None:
    loop, handles = Loop(), list[Any]()

    def divide(*_: Any) -> None:
        for p in loop.own:
            p.grad.div_(K)

    def late(_: Tensor) -> None:
        if not handles:
            handles.append(register_optimizer_step_pre_hook(divide))

    loop.own[0].register_hook(late)
    try:
        ledger = loop.train()
    finally:
        handles[0].remove()
    assert _told(ledger) == [*["backward"] * K, "edit hook", "step", "zero_grad"] * WINDOWS
    np.testing.assert_allclose(ledger.shares().share, 1 / K, rtol=1e-6)
    assert av.check(ledger).verdict == "healthy"
    assert not loop.optimizer._optimizer_step_pre_hooks


def test_a_hook_that_divides_after_every_backward_divides_what_was_there_too() -> None:
    loop = Loop()
    _in_place(loop, K, always=True)
    ledger = loop.train()
    np.testing.assert_allclose(ledger.shares().share, [1 / K**n for n in (4, 3, 2, 1)] * WINDOWS)
    assert _rules(ledger) == {"double-division"}


@hooks
def test_nothing_of_ours_stays_with_what_the_user_hooked(hook: Hooked) -> None:
    loop = Loop()
    hook(loop, K)
    ours = [p._post_accumulate_grad_hooks for p in loop.own], loop.optimizer._optimizer_step_pre_hooks
    before = [dict(hooks or {}) for hooks in (*ours[0], ours[1])]
    loop.train()
    assert [dict(hooks or {}) for hooks in (*ours[0], ours[1])] == before


# --- what comes, changed on its way ---------------------------------------------------------------


def _on_its_way(loop: Loop, change: Callable[[Tensor], Tensor | None]) -> None:
    for p in loop.own:
        p.register_hook(change)


@loops
def test_what_a_tensors_hook_divides_is_unknown_and_not_judged(options: dict[str, Any]) -> None:
    loop, plain = Loop(**options), Loop(**options)
    _on_its_way(loop, lambda g: g / K)
    ledger, divided = loop.train(), plain.train(divisor=K)
    assert _told(ledger) == [*["backward"] * K, "step", "zero_grad"] * WINDOWS
    for what in ("grad", "contribution"):
        np.testing.assert_array_equal(getattr(ledger, what), getattr(divided, what))
    assert {row.unknown for row in ledger.shares()} == {"hooks of the parameters changed what it brought"}
    assert av.check(ledger).verdict == "no verdict"


CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "looks": lambda _: None,
    "gives it back": lambda g: g,
    "gives a copy": lambda g: g.clone(),
    "clamps what is smaller": lambda g: g.clamp(-1e6, 1e6),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@loops
def test_a_tensors_hook_that_changes_nothing_hides_no_missing_division(
    change: Callable[[Tensor], Tensor | None], options: dict[str, Any]
) -> None:
    loop = Loop(**options)
    _on_its_way(loop, change)
    ledger = loop.train()
    assert set(ledger.shares().share) == {1.0}
    assert _rules(ledger) == {"loss-not-divided"}


UNREAD: dict[str, Callable[[Tensor], Tensor | None]] = {
    "clamps": lambda g: g.clamp(-0.5, 0.5),
    "in place": lambda g: g.div_(K),
    "to a norm of one": lambda g: g / g.norm(),
    "each element by another": lambda g: g * torch.linspace(0.5, 2, g.numel()),
}


@pytest.mark.parametrize("change", UNREAD.values(), ids=UNREAD)
@loops
def test_what_a_tensors_hook_changes_in_another_way_is_unknown_and_judged_by_nobody(
    change: Callable[[Tensor], Tensor | None], options: dict[str, Any]
) -> None:
    loop = Loop(**options)
    _on_its_way(loop, change)
    ledger = loop.train()
    shares = ledger.shares()
    assert np.isnan(shares.share).all()
    assert {row.unknown for row in shares} == {"hooks of the parameters changed what it brought"}
    assert av.check(ledger).verdict == "no verdict"


def test_a_parameter_without_a_hook_shows_what_a_backward_weighs() -> None:
    loop = Loop()
    loop.own[0].register_hook(lambda g: g * torch.tensor([0.0, 1.0]))
    ledger = loop.train()
    assert set(ledger.shares().share) == {1.0}
    assert _rules(ledger) == {"loss-not-divided"}


def test_hooks_that_come_and_go_count_from_then_on() -> None:
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def quarter(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.div_(4)

    with av.record(w, optimizer) as recording:
        (w * w).sum().backward()
        for register, hook in (
            (w.register_hook, lambda g: g / 2),
            (w.register_hook, lambda g: g / 4),
            (w.register_post_accumulate_grad_hook, quarter),
        ):
            handle = register(hook)
            (w * 1.0).sum().backward()
            handle.remove()
        both = w.register_hook(lambda g: g * 3), w.register_hook(lambda g: g * 2)
        (w * 1.0).sum().backward()
        for handle in both:
            handle.remove()
        (w * 1.0).sum().backward()
    ledger = recording.ledger
    told = [(event.kind, event.details.get("by_hook")) for event in ledger]
    plain = ("backward", None)
    assert told == [plain, ("backward", 0.5), ("backward", 0.25), plain, ("edit", None), ("backward", 6.0), plain]
    assert ledger.values("w")[:, 0].tolist() == [2.0, 2.5, 2.75, 3.75, 0.9375, 6.9375, 7.9375]
    assert not w._backward_hooks
    assert not w._post_accumulate_grad_hooks


def test_a_hook_that_raises_leaves_nothing_of_the_gradient_behind() -> None:
    w = torch.ones(2, requires_grad=True)

    def refuse(_: Tensor) -> None:
        raise ValueError("not today")

    handle = w.register_hook(refuse)
    with av.record(w) as recording:
        with pytest.raises(ValueError, match="not today"):
            (w * w).sum().backward()
        handle.remove()
        (w * w).sum().backward()
    assert recording.ledger.complete
    assert recording.ledger.values("w")[:, 0].tolist()[-1] == 2.0


# --- among other things that run inside a backward ------------------------------------------------


@pytest.mark.parametrize("wide", [1, 70], ids=["elements", "norms"])
def test_a_hook_that_divides_and_then_steps_is_told_in_this_order(wide: int) -> None:
    loop = Loop(wide=wide)
    own = {p: torch.optim.SGD([p], lr=0.1) for p in loop.own}

    def hook(p: Tensor) -> None:
        if p.grad is not None and loop.full():
            p.grad.div_(K)
            own[p].step()
            own[p].zero_grad()

    for p in loop.own:
        p.register_post_accumulate_grad_hook(hook)
    with av.record(loop.net, *own.values()) as recording:
        for loop.batch in range(1, 2 * K + 1):
            loop.loss().backward()
    ledger = recording.ledger
    inside = ["edit hook", "step", "zero_grad"] * 2
    assert _told(ledger) == [*["backward"] * K, *inside] * 2
    assert {event.within for event in ledger if event.kind != "backward"} == {"backward"}
    shares = ledger.shares()
    if wide == 1:
        assert shares.share.tolist() == [1 / K] * 4 * K
        assert av.check(ledger).verdict == "healthy"
    else:  # one norm alone does not tell a division from another change
        assert np.isnan(shares.share).all()
        assert av.check(ledger).verdict == "no verdict"


def _replicated(how: str, view: bool) -> None:
    torch.manual_seed(0)
    model, full = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), False

    def after(p: Tensor) -> None:
        if full and p.grad is not None:
            p.grad.div_(K)

    for p in model.parameters():
        if how == "accumulated":
            p.register_post_accumulate_grad_hook(after)
        elif how == "coming":
            p.register_hook(lambda g: g / K)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    with av.record(replica, optimizer):
        for batch in range(1, 2 * K + 1):
            full = batch % K == 0
            with contextlib.nullcontext() if full else replica.no_sync():
                replica(torch.randn(3, 4)).square().mean().backward()
            if full:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("view", [False, True], ids=["buckets", "views"])
@pytest.mark.parametrize("how", ["accumulated", "coming", ""])
def test_what_a_hook_divides_before_ranks_average_it_is_told_apart_from_that(how: str, view: bool) -> None:
    ledger = av.distribute(_replicated, ranks=2, how=how, view=view).ledgers[0]
    assert ledger is not None
    edit = ["edit hook"] * (how == "accumulated")
    assert _told(ledger) == [*["backward"] * K, *edit, "sync", "step", "zero_grad"] * 2
    if how == "coming":
        assert np.isnan(ledger.shares().share).all()
    else:
        np.testing.assert_allclose(ledger.shares().share, 1 / 2 / (K if how else 1), rtol=1e-5)
    assert _rules(ledger) == (set() if how else {"loss-not-divided"})
