"""The loop of two players of a lab: a discriminator and a generator, of one weight each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from accumviz.book.loops import LEARNING_RATE, NOWHERE, Axis, K, Loop, LoopLine, movable
from accumviz.checks.report import Report
from accumviz.ledger.ledger import Ledger
from accumviz.show import counted

_PLACES = {
    "round": "at the top of the round",
    "window": "above its own micro-batches",
    "micro-batch": "first in each of its micro-batches",
    "after": "below its step",
    NOWHERE: "nowhere",
}
_ZERO_D = Axis("zero_d", "d_opt.zero_grad", _PLACES, "d_opt.zero_grad()")
_ZERO_G = Axis("zero_g", "g_opt.zero_grad", _PLACES, "g_opt.zero_grad()")
# What a page can show of a loop that runs K micro-batches of each player in each round.
_MOST = 20


def _few(value: Any) -> int:
    k = int(K.take(value))
    if k > _MOST:
        raise ValueError(
            f"k={value!r:.40}; expected at most {_MOST} micro-batches of each player, as in k=3"
        )
    return k


_AXES = (
    _ZERO_D,
    _ZERO_G,
    Axis(
        "first",
        "who begins",
        {"D": "the discriminator", "G": "the generator", "turns": "they take turns"},
    ),
    Axis("detach", "the fake is detached", {"yes": "yes", "no": "no"}),
    Axis("freeze", "D is frozen while G trains", {"no": "no", "yes": "yes"}),
    Axis("k", "K", {2: "2", 4: "4", 1: "1"}, other=replace(K, take=_few)),
    Axis("divide", "each loss is divided by", {"K": "K", "nothing": "nothing"}),
    Axis("lr", "learning rate", {0.1: "0.1"}, other=LEARNING_RATE),
)
_RIGHT: dict[str, Any] = {
    "zero_d": "window",
    "zero_g": "window",
    "first": "D",
    "detach": "yes",
    "freeze": "no",
    "k": 2,
    "divide": "K",
    "lr": 0.1,
}
# Whose step each loss is for.
_OWN = {"real_loss": "d_opt", "fake_loss": "d_opt", "g_loss": "g_opt"}


def _rows(choice: Mapping[str, Any]) -> Iterator[LoopLine]:
    """The loop from top to bottom, lines and places."""
    order = {"D": "DG", "G": "GD"}.get(choice["first"], "")
    yield LoopLine(0, f"K = {choice['k']}", "k")
    yield LoopLine(0, "for a_round in range(3):")
    if order:
        yield from _top(choice, order[0])
        for player in order:
            yield from _window(choice, player, opens=player == order[0])
        return
    for player in "DG":
        yield from _top(choice, player)
    yield LoopLine(1, "for _ in range(K):", "first")
    for player in "DG":
        yield from _micro_batch(choice, player)
    for player in "DG":
        yield from _step(choice, player)


def _axis(player: str) -> Axis:
    return _ZERO_D if player == "D" else _ZERO_G


def _above(choice: Mapping[str, Any], player: str) -> str:
    """For a player who begins, the top of the round and the place above its micro-batches are one."""
    return "round" if choice[_axis(player).name] == "round" else "window"


def _top(choice: Mapping[str, Any], begins: str) -> Iterator[LoopLine]:
    for player in "DG":
        if choice["first"] == "turns" and player != begins:
            continue
        if player != begins:
            yield movable(_axis(player), choice, "round", 1)
    yield movable(_axis(begins), choice, _above(choice, begins), 1)


def _window(
    choice: Mapping[str, Any], player: str, *, opens: bool
) -> Iterator[LoopLine]:
    """One player's micro-batches, and its step."""
    if not opens:
        yield movable(_axis(player), choice, "window", 1)
    yield LoopLine(1, "for _ in range(K):", "first")
    yield from _micro_batch(choice, player)
    yield from _step(choice, player)


def _micro_batch(choice: Mapping[str, Any], player: str) -> Iterator[LoopLine]:
    by = " / K" if choice["divide"] == "K" else ""
    yield movable(_axis(player), choice, "micro-batch", 2)
    if player == "D":
        yield LoopLine(2, f"real_loss = (1 - d * real).square().mean(){by}", "divide")
        yield LoopLine(2, "real_loss.backward()")
        yield LoopLine(
            2,
            "fake = (g * noise).detach()"
            if choice["detach"] == "yes"
            else "fake = g * noise",
            "detach",
        )
        yield LoopLine(2, f"fake_loss = (d * fake).square().mean(){by}", "divide")
        yield LoopLine(2, "fake_loss.backward()")
        return
    frozen = choice["freeze"] == "yes"
    if frozen:
        yield LoopLine(2, "d.requires_grad_(False)", "freeze")
    yield LoopLine(2, f"g_loss = (1 - d * (g * noise)).square().mean(){by}", "divide")
    yield LoopLine(2, "g_loss.backward()")
    if frozen:
        yield LoopLine(2, "d.requires_grad_(True)", "freeze")


def _step(choice: Mapping[str, Any], player: str) -> Iterator[LoopLine]:
    yield LoopLine(1, f"{player.lower()}_opt.step()")
    yield movable(_axis(player), choice, "after", 1)


def _begin(choice: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    import accumviz as av

    g = torch.tensor([1.0], requires_grad=True)
    d = torch.tensor([0.25], requires_grad=True)
    g_opt, d_opt = (torch.optim.SGD([w], lr=choice["lr"]) for w in (g, d))
    recording = av.record({"g": g, "d": d}, g_opt, d_opt, sources=True, memory=False)
    return recording, {
        "g": g,
        "d": d,
        "g_opt": g_opt,
        "d_opt": d_opt,
        "noise": 1.0,
        "real": 2.0,
    }


def _remark(ledger: Ledger, report: Report) -> str:
    """What the shares show and is no mistake to `check`: the other player's loss in a step.

    Of that it may have a note, which leaves a loop healthy: that the two are opponents is known here.
    """
    optimizers = ledger.meta["optimizers"]
    mistakes = [finding for finding in report.findings if finding.severity != "note"]
    named = {
        (finding.rule, optimizers[finding.optimizer])
        for finding in mistakes
        if finding.optimizer is not None
    }
    steps_of = {window.step: window.optimizer for window in ledger.windows()}
    leaks: dict[tuple[str, str], set[int]] = {}
    for row in ledger.shares():
        label, optimizer = ledger[row.backward].label, steps_of[row.step]
        if (
            _OWN[label] != optimizer
            and row.share
            and ("gan-gradient-leak", optimizer) not in named
        ):
            leaks.setdefault((label, optimizer), set()).add(row.step)
    if not leaks:
        return ""
    told = ", and ".join(
        f"{label} weighs in {_steps(steps)} of {owner}"
        for (label, owner), steps in leaks.items()
    )
    return (
        f"The shares show what `check` counts as no mistake: {told}. A ledger does not say that two optimizers belong "
        "to opponents."
    )


def _steps(steps: set[int]) -> str:
    return counted(len(steps), "step")


LOOP = Loop(_AXES, _RIGHT, _rows, _begin, remark=_remark)
