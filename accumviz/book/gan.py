"""The loop of two players of a lab: a discriminator and a generator, of one weight each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accumviz.book.loops import NOWHERE, Axis, Choice, Loop, LoopLine
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
_ZERO = {
    "D": Axis("zero_d", "d_opt.zero_grad", _PLACES, "d_opt.zero_grad()"),
    "G": Axis("zero_g", "g_opt.zero_grad", _PLACES, "g_opt.zero_grad()"),
}
_AXES = (
    *_ZERO.values(),
    Axis(
        "first",
        "who begins",
        {"D": "the discriminator", "G": "the generator", "turns": "they take turns"},
    ),
    Axis("detach", "the fake is detached", {"yes": "yes", "no": "no"}),
    Axis("freeze", "D is frozen while G trains", {"no": "no", "yes": "yes"}),
    Axis("k", "K", {"2": "2", "4": "4", "1": "1"}),
    Axis("divide", "each loss is divided by", {"K": "K", "nothing": "nothing"}),
)
_RIGHT = {
    "zero_d": "window",
    "zero_g": "window",
    "first": "D",
    "detach": "yes",
    "freeze": "no",
    "k": "2",
    "divide": "K",
}
_LEARNING_RATE = 0.1
# Whose step each loss is for.
_OWN = {"real_loss": "d_opt", "fake_loss": "d_opt", "g_loss": "g_opt"}


def _rows(choice: Choice) -> Iterator[LoopLine]:
    """Yield the loop from top to bottom, lines and places."""
    yield LoopLine(0, f"K = {choice['k']}", "k")
    yield LoopLine(0, "for a_round in range(3):")
    if choice["first"] == "turns":
        yield _top(choice, "D")
        yield _top(choice, "G")
        yield LoopLine(1, "for _ in range(K):", "first")
        yield from _micro_batch(choice, "D")
        yield from _micro_batch(choice, "G")
        yield from _step(choice, "D")
        yield from _step(choice, "G")
        return
    first, second = "DG" if choice["first"] == "D" else "GD"
    yield _ZERO[second].at(choice, "round", 1)
    yield _top(choice, first)
    yield from _window(choice, first)
    yield _ZERO[second].at(choice, "window", 1)
    yield from _window(choice, second)


def _top(choice: Choice, player: str) -> LoopLine:
    """Return the top of the round, which for a player who begins is above its micro-batches, too."""
    axis = _ZERO[player]
    where = "round" if choice[axis.name] == "round" else "window"
    return axis.at(choice, where, 1)


def _window(choice: Choice, player: str) -> Iterator[LoopLine]:
    """Yield one player's micro-batches, and its step."""
    yield LoopLine(1, "for _ in range(K):", "first")
    yield from _micro_batch(choice, player)
    yield from _step(choice, player)


def _micro_batch(choice: Choice, player: str) -> Iterator[LoopLine]:
    by = " / K" if choice["divide"] == "K" else ""
    yield _ZERO[player].at(choice, "micro-batch", 2)
    if player == "D":
        detached = choice["detach"] == "yes"
        fake = "(g * noise).detach()" if detached else "g * noise"
        yield LoopLine(2, f"real_loss = (1 - d * real).square().mean(){by}", "divide")
        yield LoopLine(2, "real_loss.backward()")
        yield LoopLine(2, f"fake = {fake}", "detach")
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


def _step(choice: Choice, player: str) -> Iterator[LoopLine]:
    yield LoopLine(1, f"{player.lower()}_opt.step()")
    yield _ZERO[player].at(choice, "after", 1)


def _begin() -> tuple[Any, dict[str, Any]]:
    import torch

    import accumviz as av

    g = torch.tensor([1.0], requires_grad=True)
    d = torch.tensor([0.25], requires_grad=True)
    g_opt = torch.optim.SGD([g], lr=_LEARNING_RATE)
    d_opt = torch.optim.SGD([d], lr=_LEARNING_RATE)
    recording = av.record({"g": g, "d": d}, g_opt, d_opt, sources=True, memory=False)
    names = {"g": g, "d": d, "g_opt": g_opt, "d_opt": d_opt, "noise": 1.0, "real": 2.0}
    return recording, names


def _remark(ledger: Ledger, report: Report) -> str:
    """Say what the shares show and is no mistake to `check`: the other player's loss in a step.

    Of that it may have a note, which leaves a loop healthy: that the two are opponents is known here.
    """
    optimizers = ledger.meta["optimizers"]
    named = set()
    for finding in report.findings:
        is_mistake = finding.severity != "note" and finding.optimizer is not None
        if finding.rule == "gan-gradient-leak" and is_mistake:
            named.add(optimizers[finding.optimizer])
    owners = {window.step: window.optimizer for window in ledger.windows()}
    leaks: dict[tuple[str, str], set[int]] = {}
    for row in ledger.shares():
        loss, owner = ledger[row.backward].label, owners[row.step]
        if row.share and _OWN[loss] != owner and owner not in named:
            leaks.setdefault((loss, owner), set()).add(row.step)
    if not leaks:
        return ""
    weighs = []
    for (loss, owner), steps in leaks.items():
        weighs.append(f"{loss} weighs in {counted(len(steps), 'step')} of {owner}")
    return (
        f"The shares show what `check` counts as no mistake: {', and '.join(weighs)}. "
        "A ledger does not say that two optimizers belong to opponents."
    )


GAN = Loop(_AXES, _RIGHT, _rows, _begin, remark=_remark)
