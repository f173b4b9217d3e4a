"""Hooks of the user's that may change gradients: what they did before a step is an edit; else no share is known."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import accumviz as av
from accumviz.ledger.ledger import PRESENT

K, WINDOWS = 4, 3


class Loop:
    """K micro-batches a step of two parameters, whose gradients are whole numbers: exact in any order."""

    def __init__(self, *, momentum: float = 0.0, wide: int = 1) -> None:
        self.net = nn.ParameterList([torch.arange(1.0, 3.0).repeat(wide), torch.full((wide,), 3.0)])
        self.own = list(self.net.parameters())
        self.optimizer = torch.optim.SGD(self.own, lr=2.0**-20, momentum=momentum)
        self.batch = 0

    def full(self) -> bool:
        """Whether this micro-batch is the last of its window."""
        return self.batch % K == 0

    def loss(self) -> Tensor:
        weights = torch.cat(self.own)
        scores = weights * torch.tensor([[self.batch], [1.0]]) * torch.arange(1, len(weights) + 1)
        return scores.sum(1).mean()

    def train(self, by_hand: float = 1.0) -> Any:
        with av.record(self.net, self.optimizer) as recording:
            for self.batch in range(1, WINDOWS * K + 1):
                loss = self.loss()
                loss.backward()
                if self.full():
                    for p in self.own if by_hand != 1 else ():
                        p.grad.div_(by_hand)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return recording.ledger


def _before_the_step(loop: Loop, by: float) -> None:
    def hook(*_: Any) -> None:
        for p in loop.own:
            p.grad.div_(by)

    loop.optimizer.register_step_pre_hook(hook)


LOOPS: dict[str, dict[str, Any]] = {"elements": {}, "norms": {"wide": 70, "momentum": 0.5}}
loops = pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)


def _told(ledger: Any) -> list[str]:
    return [f"{event.kind} {event.details.get('by', '')}".strip() for event in ledger]


def _rules(ledger: Any) -> set[str]:
    return {finding.rule for finding in av.check(ledger).findings}


@loops
def test_a_division_in_a_hook_is_an_edit_of_its_own_and_the_loop_is_healthy(options: dict[str, Any]) -> None:
    loop, plain = Loop(**options), Loop(**options)
    _before_the_step(loop, K)
    ledger, by_hand = loop.train(), plain.train(by_hand=K)
    assert _told(ledger) == [*["backward"] * K, "edit hook", "step", "zero_grad"] * WINDOWS
    # To the last bit what a division by hand in that place is told as.
    assert bool(ledger.exact) == (options != LOOPS["norms"])
    for what in ("grad", "contribution"):
        np.testing.assert_array_equal(getattr(ledger, what), getattr(by_hand, what))
        for p in ledger.exact:
            np.testing.assert_array_equal(ledger.values(p, what), by_hand.values(p, what))
    np.testing.assert_array_equal(ledger.state, by_hand.state)
    assert repr(ledger.shares()) == repr(by_hand.shares())
    np.testing.assert_allclose(ledger.shares().share, 1 / K, rtol=1e-6)
    assert av.check(ledger).verdict == "healthy"


@loops
def test_a_hook_that_changes_nothing_hides_no_missing_division(options: dict[str, Any]) -> None:
    loop = Loop(**options)
    _before_the_step(loop, 1.0)
    ledger = loop.train()
    np.testing.assert_allclose(ledger.shares().share, 1.0, rtol=1e-6)
    assert _rules(ledger) == {"loss-not-divided"}


def _divides(p: Any) -> None:
    p.grad.div_(K)


def _replaces(p: Any) -> None:
    p.grad = p.grad / K


def _shares_under(change: Callable[[Any], Any], after: bool, options: dict[str, Any]) -> Any:
    loop = Loop(**options)
    for p in loop.own:
        (p.register_post_accumulate_grad_hook if after else p.register_hook)(change)
    return loop.train()


# What hooks do, and whether after autograd has added.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "divides": (lambda g: g / K, False),
    "divides in place": (lambda g: g.div_(K), False),
    "copies": (lambda g: g.clone(), False),
    "divides .grad": (_divides, True),
    "replaces .grad": (_replaces, True),
}


def _looks(g: Tensor) -> None:
    (g if g.grad is None else g.grad).norm().item()


LOOKS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "looks": (_looks, False),
    "returns what came": (lambda g: g, False),
    "looks at .grad": (_looks, True),
}


@pytest.mark.parametrize("hook", CHANGES)
@loops
def test_what_hooks_changed_of_all_parameters_has_no_share(hook: str, options: dict[str, Any]) -> None:
    ledger = _shares_under(*CHANGES[hook], options)
    assert {event.kind for event in ledger} >= {"backward", "step"}
    shares = ledger.shares()
    assert np.isnan(shares.share).all()
    assert all("hooks of your own" in row.unknown for row in shares)
    assert av.check(ledger).verdict == "no verdict"


@pytest.mark.parametrize("hook", LOOKS)
@loops
def test_hooks_that_only_look_leave_every_share_known(hook: str, options: dict[str, Any]) -> None:
    ledger = _shares_under(*LOOKS[hook], options)
    np.testing.assert_allclose(ledger.shares().share, 1.0, rtol=1e-6)
    assert _rules(ledger) == {"loss-not-divided"}
    np.testing.assert_array_equal(ledger.grad, Loop(**options).train().grad)


@pytest.mark.parametrize(("factor", "verdict"), [(None, "findings"), (1 / K, "no verdict")])
def test_a_hook_between_loss_and_parameters_leaves_no_share_known_if_it_changes(
    factor: float | None, verdict: str
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with av.record(model, optimizer) as recording:
        for n in range(2 * K):
            output = model(torch.randn(3, 2))
            output.register_hook(lambda grad: None if factor is None else grad * factor)
            output.square().mean().backward()
            if n % K == K - 1:
                optimizer.step()
                optimizer.zero_grad()
    report = av.check(recording)
    assert report.verdict == verdict
    assert ("a hook on a tensor between" in report.reason) == (factor is not None)


def test_a_hook_that_changes_one_sum_of_a_window_leaves_no_share_of_it_known() -> None:
    loop = Loop()
    for p in loop.own:
        p.register_post_accumulate_grad_hook(lambda p: _divides(p) if loop.full() else None)
    ledger = loop.train()
    assert ["by_hook" in event.details for event in ledger.of("backward")] == [False, False, False, True] * WINDOWS
    assert np.isnan(ledger.shares().share).all()


def test_our_hooks_are_first_and_last_and_the_users_keep_their_order() -> None:
    w, called = torch.ones(2, requires_grad=True), list[str]()
    for name in ("a", "b"):
        w.register_hook(lambda _, name=name: called.append(name))
        w.register_post_accumulate_grad_hook(lambda _, name=name: called.append(f"after {name}"))
    with av.record(w):
        (w * w).sum().backward()
    (w * w).sum().backward()
    assert called == ["a", "b", "after a", "after b"] * 2


def test_a_parameter_without_a_hook_shows_what_a_backward_weighs() -> None:
    loop = Loop()
    loop.own[0].register_hook(lambda g: g * torch.tensor([0.0, 1.0]))
    ledger = loop.train()
    assert set(ledger.shares().share) == {1.0}
    assert _rules(ledger) == {"loss-not-divided"}


def test_hooks_that_come_and_go_count_from_then_on() -> None:
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    with av.record(w, optimizer) as recording:
        (w * w).sum().backward()
        for register, hook in (
            (w.register_hook, lambda g: g / 2),
            (w.register_hook, lambda g: g / 4),
            (w.register_post_accumulate_grad_hook, _divides),
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
    hooked = ["by_hook" in event.details for event in ledger]
    assert hooked == [False, True, True, True, True, False]
    assert {event.kind for event in ledger} == {"backward"}
    assert ledger.values("w", "contribution")[:, 0].tolist() == [2.0, 0.5, 0.25, 1.0, 6.0, 1.0]
    assert ledger.values("w")[:, 0].tolist() == [2.0, 2.5, 2.75, 0.9375, 6.9375, 7.9375]
    assert not w._backward_hooks
    assert not w._post_accumulate_grad_hooks


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_shares_of_an_optimizer_in_hooks_are_known_unless_it_changes_the_gradient(factor: float) -> None:
    model = nn.Linear(3, 1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: Any) -> None:
        if factor != 1:
            p.grad.mul_(factor)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with av.record(model, *optimizers.values()) as recording:
        for _ in range(4):
            (model(torch.ones(2, 3)).mean() / 4).backward()
    ledger = recording.ledger
    assert [(e.kind, e.within) for e in ledger.events[:5]] == [
        ("backward", ""),
        *[("step", "backward"), ("zero_grad", "backward")] * 2,
    ]
    np.testing.assert_allclose(ledger.contribution[0], [3**0.5 / 4, 1 / 4], rtol=1e-6)
    assert (ledger.outcomes.steps[::5] == 1).all() and not (ledger.state[-1] & PRESENT).any()
    shares = [row.share for row in ledger.shares()]
    assert len(ledger.of("step")) == 8
    assert shares == [0.25] * 8 if factor == 1 else np.isnan(shares).all()
    assert av.check(ledger).findings == ()
