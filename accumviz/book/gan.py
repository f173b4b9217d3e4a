"""The loop of two players of a lab: a discriminator and a generator, of one weight each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accumviz.book.loops import NOWHERE, Axis, Choice, Loop, LoopLine

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
    Axis("first", "who begins", {"D": "the discriminator", "G": "the generator"}),
    Axis("freeze", "D is frozen while G trains", {"no": "no", "yes": "yes"}),
    Axis("divide", "each loss is divided by", {"K": "K", "nothing": "nothing"}),
)
_RIGHT = {
    "zero_d": "window",
    "zero_g": "window",
    "first": "D",
    "freeze": "no",
    "divide": "K",
}
_LEARNING_RATE = 0.1


def _rows(choice: Choice) -> Iterator[LoopLine]:
    """Yield the loop from top to bottom, lines and places."""
    first, second = ("D", "G") if choice["first"] == "D" else ("G", "D")
    yield LoopLine(0, "K = 2")
    yield LoopLine(0, "for a_round in range(3):")
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
    yield _ZERO[player].at(choice, "micro-batch", 2)
    yield from _losses(choice, player)
    yield LoopLine(1, f"{player.lower()}_opt.step()")
    yield _ZERO[player].at(choice, "after", 1)


def _losses(choice: Choice, player: str) -> Iterator[LoopLine]:
    by = " / K" if choice["divide"] == "K" else ""
    if player == "D":
        yield LoopLine(2, f"real_loss = (1 - d * real).square().mean(){by}", "divide")
        yield LoopLine(2, "real_loss.backward()")
        yield LoopLine(2, "fake = (g * noise).detach()")
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


GAN = Loop(_AXES, _RIGHT, _rows, _begin)
