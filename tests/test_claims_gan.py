"""The claims of the article about GANs: what each loss writes into which player, by recordings and by other means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import accumviz as av


def players(g_layers: int = 2, d_layers: int = 2) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A generator, a discriminator, noise and real samples, the same on every call."""
    torch.manual_seed(0)

    def network(layers: int, outputs: int) -> nn.Module:
        hidden = [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(layers - 1)]
        return nn.Sequential(*hidden, nn.Linear(2, outputs))

    return network(g_layers, 2), network(d_layers, 1), torch.randn(16, 2), torch.randn(16, 2)


def against(score: Tensor, target: float) -> Tensor:
    return binary_cross_entropy_with_logits(score, torch.full_like(score, target))


def gradient(loss: Tensor, of: nn.Module) -> list[Tensor]:
    """The gradient without any `.grad`."""
    return list(torch.autograd.grad(loss, list(of.parameters())))


def grads(of: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in of.parameters()]


def equal(first: Iterable[Any], second: Iterable[Any]) -> bool:
    return all(torch.allclose(a, b, atol=1e-7) for a, b in zip(first, second, strict=True))


def losses_consumed(ledger: av.Ledger) -> list[tuple[str, list[str]]]:
    return [(window.optimizer, [ledger[b].label for b in window.backwards]) for window in ledger.windows()]


def play(zero_first: bool, rounds: int = 2) -> tuple[av.Ledger, list[Tensor]]:
    G, D, z, x = players()
    g_opt, d_opt = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (G, D))
    taken = []
    with av.record(g_opt, d_opt, G=G, D=D) as recording:
        for _ in range(rounds):
            fake = G(z)
            g_loss = against(D(fake), 1)
            if zero_first:
                g_opt.zero_grad()
            g_loss.backward()
            g_opt.step()
            if not zero_first:
                g_opt.zero_grad()
            d_loss = against(D(x), 1) + against(D(fake.detach()), 0)
            if zero_first:
                d_opt.zero_grad()
            d_loss.backward()
            taken = [p.grad.clone() for p in D.parameters() if p.grad is not None]
            d_opt.step()
            if not zero_first:
                d_opt.zero_grad()
    return recording.ledger, taken


def test_claim_17_in_a_gan_zeroing_after_the_step_lets_the_discriminator_consume_the_generators_loss() -> None:
    assert losses_consumed(play(True)[0]) == [("g_opt", ["g_loss"]), ("d_opt", ["d_loss"])] * 2
    assert losses_consumed(play(False)[0]) == [("g_opt", ["g_loss"]), ("d_opt", ["g_loss", "d_loss"])] * 2


@pytest.mark.parametrize(
    ("order", "by_g", "by_d"),
    [
        ("g G d D", ["g_loss"], ["d_loss"]),
        ("g d G D", ["g_loss", "d_loss"], ["d_loss"]),
        ("gg G dd D", ["g_loss"] * 2, ["d_loss"] * 2),
        ("gd gd G D", ["g_loss", "d_loss"] * 2, ["d_loss", "g_loss", "d_loss"]),
    ],
)
def test_claim_17_a_player_consumes_every_backward_between_its_zero_and_its_step(
    order: str, by_g: list[str], by_d: list[str]
) -> None:
    """Small letters are backwards, capitals steps. Each player is zeroed right before its first own backward."""
    G, D, z, x = players()
    g_opt, d_opt = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (G, D))
    zeroed = {"g": False, "d": False}
    with av.record(g_opt, d_opt, G=G, D=D) as recording:
        for what in order.replace(" ", ""):
            if what in zeroed and not zeroed[what]:
                {"g": g_opt, "d": d_opt}[what].zero_grad()
                zeroed[what] = True
            if what == "g":
                g_loss = against(D(G(z)), 1)
                g_loss.backward()
            elif what == "d":
                d_loss = against(D(x), 1) + against(D(G(z)), 0)
                d_loss.backward()
            else:
                {"G": g_opt, "D": d_opt}[what].step()
    assert losses_consumed(recording.ledger) == [("g_opt", by_g), ("d_opt", by_d)]


def accumulate(divide: str, *, method: Any = torch.optim.SGD, clip: float = 0, penalty: float = 0) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = method(model.parameters(), lr=0.1)
    for x in torch.randn(5, 8, 2):
        loss = model(x).square().mean()
        (loss / 5 if divide == "losses" else loss).backward()
    if penalty:
        (penalty * model.weight.square().sum()).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    if divide == "grads":
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 5
    optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("method", [torch.optim.SGD, torch.optim.Adam])
def test_claim_18_dividing_losses_or_grads_is_the_same_when_nothing_comes_between(method: Any) -> None:
    torch.testing.assert_close(accumulate("losses", method=method), accumulate("grads", method=method))


@pytest.mark.parametrize("between", [{"clip": 0.1}, {"penalty": 0.1}])
def test_claim_18_clipping_or_a_second_loss_in_between_makes_them_differ(between: dict[str, float]) -> None:
    assert (accumulate("losses", **between) - accumulate("grads", **between)).norm() > 1e-3


def test_claim_19_the_printed_loop_names_what_is_not_there_and_steps_on_an_empty_window() -> None:
    model = nn.Linear(2, 1)
    start = model.weight.clone()
    assert not hasattr(torch.nn, "losses")
    with pytest.raises(TypeError, match="parameters"):
        torch.optim.Adam(parameters=model.parameters())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unsupported operand type"):
        [p.grad / 5 for p in model.parameters()]  # type: ignore[operator]
    optimizer = torch.optim.Adam(model.parameters())
    with av.record(model, optimizer) as recording:
        model(torch.randn(8, 2)).square().mean() / 5
        optimizer.step()
    assert [window.backwards for window in recording.ledger.windows()] == [()]
    assert torch.equal(model.weight, start)


@pytest.mark.parametrize(("order", "g_layers", "d_layers"), [("GD", 1, 2), ("GD", 2, 2), ("DG", 1, 1)])
def test_claim_20_one_forward_for_both_players_raises_unless_nothing_behind_needs_the_moved_weights(
    order: str, g_layers: int, d_layers: int
) -> None:
    G, D, z, x = players(g_layers, d_layers)
    score = D(G(z))
    losses = {"G": against(score, 1), "D": against(D(x), 1) + against(score, 0)}
    optimizers = {"G": torch.optim.Adam(G.parameters()), "D": torch.optim.Adam(D.parameters())}
    first, second = order
    losses[first].backward(retain_graph=True)
    optimizers[first].step()
    # The noise needs no gradient, so the lowest layer's weight is not needed on the way back.
    if order == "GD" and g_layers == 1:
        losses[second].backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[second].backward()


def test_claim_20_both_backwards_before_both_steps_give_the_gradients_of_the_detached_loop() -> None:
    G, D, z, x = players()
    for_g = gradient(against(D(G(z)), 1), G)
    for_d = gradient(against(D(x), 1) + against(D(G(z).detach()), 0), D)
    with av.record(G=G, D=D) as recording:
        score = D(G(z))
        g_loss, d_loss = against(score, 1), against(D(x), 1) + against(score, 0)
        g_loss.backward(inputs=list(G.parameters()), retain_graph=True)
        d_loss.backward(inputs=list(D.parameters()))
    assert equal(grads(G), for_g) and equal(grads(D), for_d)
    count, mine = recording.ledger.provenance().count, len(for_g)
    assert (count[0, :mine] == 1).all() and (count[1, mine:] == 1).all()
    assert not count[0, mine:].any() and not count[1, :mine].any()


def test_claim_21_the_leak_into_each_parameter_is_that_parameters_gradient_of_the_other_loss() -> None:
    G, D, z, x = players()
    leaks = gradient(against(D(G(z)), 1), D) + gradient(against(D(x), 1) + against(D(G(z)), 0), G)
    with av.record(D=D, G=G) as recording:
        g_loss = against(D(G(z)), 1)
        g_loss.backward()
        d_loss = against(D(x), 1) + against(D(G(z)), 0)
        d_loss.backward()
    matrix, of_d = recording.ledger.provenance(), len(list(D.parameters()))
    recorded = [*matrix.total[0, :of_d], *matrix.total[1, of_d:]]
    assert recorded == pytest.approx([leak.norm().item() for leak in leaks], rel=1e-5)


@pytest.mark.parametrize(
    ("when", "leaks", "learns"),
    [
        ("never", True, True),
        ("before the forward", False, False),
        ("before the backward", False, True),
        ("after the backward", True, True),
    ],
)
def test_claim_22_freezing_works_until_the_backward_but_a_score_made_while_frozen_teaches_nothing(
    when: str, leaks: bool, learns: bool
) -> None:
    G, D, z, _ = players()
    with av.record(G=G, D=D) as recording:
        D.requires_grad_(when != "before the forward")
        score = D(G(z))
        g_loss = against(score, 1)
        if when == "before the backward":
            D.requires_grad_(False)
        g_loss.backward(retain_graph=True)
        seen = [grad is not None for grad in grads(D)]
        if when == "after the backward":
            D.requires_grad_(False)
        D.requires_grad_(True)
        D.zero_grad()
        fake_loss = against(score, 0)
        fake_loss.backward()
    assert seen == [leaks] * len(seen)
    assert [grad is not None for grad in grads(D)] == [learns] * len(seen)
    count, of_g = recording.ledger.provenance().count, len(list(G.parameters()))
    assert count[:, of_g:].any(axis=1).tolist() == [leaks, learns]
    # No moment of freezing D keeps the discriminator's loss out of G.
    assert count[1, :of_g].all()
