"""Hooks of the user's that change gradients: what they did is recorded, and no loop that is right is called wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import accumviz as av

K, WINDOWS = 4, 3


class Loop:
    """K micro-batches a step of two parameters, whose gradients are whole numbers: exact in any order."""

    def __init__(self, *, momentum: float = 0.0, losses: int = 1, wide: int = 1) -> None:
        self.net = nn.ParameterList([torch.arange(1.0, 3.0).repeat(wide), torch.full((wide,), 3.0)])
        self.own = list(self.net.parameters())
        self.optimizer = torch.optim.SGD(self.own, lr=2.0**-4, momentum=momentum)
        self.losses, self.batch = losses, 0

    def full(self) -> bool:
        """Whether this micro-batch is the last of its window."""
        return self.batch % K == 0

    def train(self, divisor: float = 1.0, by_hand: float = 1.0) -> Any:
        with av.record(self.net, self.optimizer) as recording:
            for self.batch in range(1, WINDOWS * K + 1):
                x = torch.tensor([[self.batch], [1.0]])
                scores = x * torch.cat([p.reshape(1, -1) for p in self.own], dim=1)
                loss = scores.sum(1).mean() / divisor
                if self.losses > 1:
                    loss = loss + scores.square().sum(1).mean() / divisor
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
