"""Lay out the lanes of a timeline once, in each parameter's own units, for matplotlib and for the page to paint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accumviz.ledger.ledger import Ledger
from accumviz.show import encoded
from accumviz.views import words
from accumviz.views.parts import (
    Gradient,
    Part,
    present,
    segments,
    together,
    totals,
)

# Up to so many parameters are drawn as lanes; on a page, of up to so many events, which are as many as have room.
MOST_LANES, _MOST_EVENTS = 8, 96
# How a part looks: added by this event, live since an earlier one, used by a step, or not from a recorded backward.
LOOKS = ("new", "live", "used", "unseen")
_MOST_COLORS = 8


@dataclass(frozen=True)
class Bar:
    """`.grad` after one event: what it comes to, and the parts of its bar, the oldest first, with their lengths.

    `state` is "whole", "none" where there is no `.grad`, and "broken" where a number is not finite.
    """

    state: str
    grad: float
    parts: tuple[Part, ...] = ()
    lengths: tuple[float, ...] = ()

    def pieces(self) -> Iterator[tuple[Part, float, float]]:
        """Yield each part, where it starts and its length: above zero they stand on each other, below they hang."""
        ends = {True: 0.0, False: 0.0}
        for part, length in zip(self.parts, self.lengths, strict=True):
            side = length >= 0
            yield part, ends[side], length
            ends[side] += length

    @property
    def reach(self) -> tuple[float, float]:
        """How far it reaches below and above zero."""
        ends = [0.0]
        if self.state == "whole":
            ends.append(self.grad)
        for _, start, length in self.pieces():
            ends.append(start + length)
        return min(ends), max(ends)


@dataclass(frozen=True)
class Lane:
    """One parameter's bars, event by event, and the range of values that they reach."""

    parameter: int
    name: str
    signed: bool
    low: float
    high: float
    bars: tuple[Bar, ...]


def lay_out(
    ledger: Ledger, parameters: Sequence[int], events: Sequence[int]
) -> list[Lane]:
    """Return the lanes of these parameters; one parameter has one scale on all of its ranks.

    >>> from accumviz.ledger.ledger import Parameter
    >>> rows = [dict(kind="backward", contribution={"w": -16}, grad={"w": -16})]
    >>> (lane,) = lay_out(Ledger.build([Parameter("w", (1,))], rows), [0], [0])
    >>> lane.low, lane.high, lane.bars[0].lengths
    (-16.0, 0.0, (-16.0,))
    """
    lanes = [_lane(ledger, p, events) for p in parameters]
    scales = one_scale((lane.name, (lane.low, lane.high)) for lane in lanes)
    scaled = []
    for lane in lanes:
        low, high = scales[words.on_any_rank(lane.name)]
        scaled.append(replace(lane, low=low, high=high))
    return scaled


def one_scale(
    reaches: Iterable[tuple[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """Return how far each parameter reaches on all of its ranks together, because they are compared.

    >>> one_scale([("rank 0 · w", (-1, 0)), ("rank 1 · w", (0, 2))])
    {'w': (-1, 2)}
    """
    scales: dict[str, tuple[float, float]] = {}
    for own_name, (low, high) in reaches:
        name = words.on_any_rank(own_name)
        least, most = scales.get(name, (low, high))
        scales[name] = min(low, least), max(high, most)
    return scales


def _lane(ledger: Ledger, p: int, events: Sequence[int]) -> Lane:
    gradient = Gradient(ledger, p)
    bars = []
    for e in events:
        grad = float(gradient.grad[e])
        if present(ledger, e, p):
            bars.append(_bar(gradient.parts(e), grad, signed=gradient.signed))
        else:
            bars.append(Bar("none", math.nan))
    lows, highs = zip(*(bar.reach for bar in bars), strict=True)
    name = ledger.parameters[p].name
    return Lane(p, name, gradient.signed, min(lows), max(highs), tuple(bars))


def _bar(parts: list[Part], grad: float, *, signed: bool) -> Bar:
    lengths = [part.amount for part in parts]
    whole = sum(lengths)
    if not math.isfinite(whole) or not math.isfinite(grad):
        return Bar("broken", grad)
    if whole and not signed:
        # Norms do not add up: parts of a tensor share the height of its `‖.grad‖`.
        lengths = [length * grad / whole for length in lengths]
    return Bar("whole", grad, tuple(parts), tuple(lengths))


def count_parts(ledger: Ledger) -> int:
    """Return how many parts all bars of all parameters have together, at most."""
    count = 0
    for history in ledger.flow.histories:
        events = int((history.end - history.born).sum())
        count += len(history.parameters) * events
    return count


class PageBars:
    """The bars of `.grad` as a page has them: row by row, each row's events, and each event's parts.

    They are columns, which compress well, and which runs share: `n`, of each bar how many parts it has;
    of each part its `age`, how many events ago it was added (-1: not recorded), what it is `by` the norm of what was
    added (of what was not recorded, how much it is), and the digit of its `look` in `LOOKS`.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        events = range(len(ledger))
        self.stacks = [
            segments(ledger, p, events) for p in range(len(ledger.parameters))
        ]
        self.columns: dict[str, list[Any]] = {"n": [], "age": [], "by": [], "look": []}

    def add(
        self, members: range, norms: np.ndarray, grads: np.ndarray
    ) -> tuple[float, float]:
        """Add a row of parameters with what it was added and what it had, and return how far its bars reach."""
        stacks = self._stacks_of(members)
        signed = len(members) == 1 and words.is_signed(self.ledger, members.start)
        totals_of = totals(self.ledger, members.start) if signed else grads
        ages, amounts, looks = [], [], ""
        reaches = [(0.0, 0.0)]
        for e, parts in enumerate(stacks):
            if not grads[e] < 0:
                bar = _bar(parts, float(totals_of[e]), signed=signed)
                reaches.append(bar.reach)
            for part in parts:
                ages.append(-1 if part.born < 0 else e - part.born)
                norm = 1.0 if part.born < 0 else float(norms[part.born])
                amounts.append(_factor(part.amount, norm))
                looks += str(LOOKS.index(part.look))
        row = [len(parts) for parts in stacks], ages, amounts, looks
        for column, cells in zip(self.columns.values(), row, strict=True):
            column.append(cells)
        lows, highs = zip(*reaches, strict=True)
        return min(lows), max(highs)

    def _stacks_of(self, members: range) -> list[list[Part]]:
        if len(members) == 1:
            return self.stacks[members.start]
        stacks = []
        for of_event in zip(*(self.stacks[p] for p in members), strict=True):
            stacks.append(together(list(itertools.chain(*of_event))))
        return stacks


def _factor(amount: float, norm: float) -> float | str:
    """Return what an amount is by a norm, to six digits."""
    factor = amount / norm if norm else 1.0
    return encoded(float(f"{factor:.6g}"))


def lane_height(reaches: Sequence[tuple[float, float]], events: int) -> int:
    """Return how tall a page's lanes are, in pixels; 0 where it draws a heat map instead.

    >>> lane_height([(0, 1)], 3), lane_height([(-1, 1)], 3), lane_height([(0, 1)], 200)
    (84, 160, 0)
    """
    count = len(reaches)
    if not 0 < count <= MOST_LANES or not 0 < events <= _MOST_EVENTS:
        return 0
    if any(min(-low, high) > 0.1 * max(-low, high) for low, high in reaches):
        return max(min(240 // count, 160), 60)
    return 84 if count == 1 else 60


def part_keys(
    colors: dict[str, str], looks: set[str], texts: dict[str, str], muted: str
) -> list[tuple[str, str, str]]:
    """Return the legend of the looks that are there: what it says of each, the look, and a colour.

    Where losses have several `colors`, each is named with its own.

    >>> part_keys({"loss": "blue"}, {"new"}, {"new": "added", "used": "used"}, "grey")
    [('added', 'new', 'blue')]
    """
    keys = []
    if len(set(colors.values())) > 1 and "new" in looks:
        for label, color in list(colors.items())[:_MOST_COLORS]:
            keys.append((words.shorten(label or "backward", 28), "new", color))
    first = next(iter(colors.values()), muted)
    for look, text in texts.items():
        if look in looks and not (look == "new" and keys):
            keys.append((text, look, muted if look == "unseen" else first))
    return keys
