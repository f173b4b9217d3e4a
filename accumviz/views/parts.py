"""Split `.grad` after an event into the contributions that are live in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger.flow import SAME, SAME_IN_HALF
from accumviz.ledger.ledger import PRESENT, Ledger
from accumviz.views import words


class Part(NamedTuple):
    """A part of `.grad` after an event: the backward that put it there, how much it is, and how it looks.

    `born` is -1 for what no recorded backward put there, or by a factor that is unknown. The look is "new" at the event
    that adds it, "live", "used" by a step, or "unseen".
    """

    born: int
    amount: float
    look: str


def segments(ledger: Ledger, parameter: int, events: Sequence[int]) -> list[list[Part]]:
    """Split `.grad` after each event into the contributions live in it.

    Amounts are signed for a parameter of one recorded element, 2-norms else, each times its
    coefficient in the flow. What is there by an unknown coefficient, or was not recorded, is one
    part, the first.

    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = Ledger.build([Parameter("w", (1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ...     dict(kind="clip", grad={"w": -1}),
    ... ])
    >>> [[part.amount for part in parts] for parts in segments(ledger, 0, [0, 1])]
    [[-16.0], [-1.0]]
    """
    gradient = Gradient(ledger, parameter)
    return [gradient.parts(e) for e in events]


class Gradient:
    """One parameter's `.grad` over time, and what of it is from which backward."""

    def __init__(self, ledger: Ledger, parameter: int) -> None:
        self.ledger = ledger
        self.parameter = parameter
        self.signed = words.is_signed(ledger, parameter)
        self.grad = totals(ledger, parameter)
        self.added = ledger.contribution[:, parameter].astype(float)
        if self.signed:
            self.added = ledger.exact[parameter][0][:, 0]
        consumed = ledger.outcomes.consumed[:, parameter]
        self.consumed = np.where(consumed < 0, len(ledger), consumed)
        half = "16" in ledger.parameters[parameter].dtype
        self.tolerance = SAME_IN_HALF if half else SAME

    def parts(self, event: int) -> list[Part]:
        """Return what is in `.grad` after an event, first what no recorded contribution is."""
        flow = self.ledger.flow
        born = flow.live(event, self.parameter)
        coefficients = flow.coefficients(self.parameter, born, event)
        lost = np.isnan(coefficients)
        amounts = (self.added[born] * coefficients)[~lost].tolist()
        parts = []
        for b, amount in zip(born[~lost].tolist(), amounts, strict=True):
            look = "used" if self.consumed[b] <= event else "live"
            parts.append(Part(b, amount, "new" if b == event else look))
        # Norms do not add up: how much of one is there by an unknown factor is a guess, and hatched.
        rest = float(self.added[born[lost]].sum())
        if self.signed:
            rest = self._rest(event, amounts)
        return [Part(-1, rest, "unseen"), *parts] if rest else parts

    def _rest(self, event: int, amounts: list[float]) -> float:
        """Return what is in `.grad` besides these amounts, 0 where that is rounding."""
        if not present(self.ledger, event, self.parameter):
            return 0.0
        grad = float(self.grad[event])
        rest = grad - math.fsum(amounts) if np.isfinite(amounts).all() else math.nan
        most = max(map(abs, [grad, *amounts]))
        return rest if abs(rest) > self.tolerance * most else 0.0


def present(ledger: Ledger, event: int, parameter: int) -> bool:
    """Return whether there is a `.grad` after the event."""
    return bool(ledger.state[event, parameter] & PRESENT)


def totals(ledger: Ledger, p: int) -> np.ndarray:
    """Return `.grad` after each event: the number where it is one, the norm else."""
    if words.is_signed(ledger, p):
        return ledger.exact[p][1][:, 0]
    return ledger.grad[:, p].astype(float)


def together(parts: list[Part]) -> list[Part]:
    """Put the parts of several parameters together, backward by backward: norms of what one of them added.

    >>> together([Part(0, 3.0, "live"), Part(0, -4.0, "used")])
    [Part(born=0, amount=5.0, look='used')]
    """
    squares: dict[int, float] = {}
    looks: dict[int, str] = {}
    for part in parts:
        squares[part.born] = squares.get(part.born, 0.0) + part.amount**2
        if part.look == "used" or part.born not in looks:
            looks[part.born] = part.look
    norms = []
    for born in sorted(squares):
        norms.append(Part(born, math.sqrt(squares[born]), looks[born]))
    return norms
