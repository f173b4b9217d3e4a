"""Lay out the lanes of a timeline once, in each parameter's own units, for matplotlib and for the page to paint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from accumviz.ledger.ledger import Ledger
from accumviz.views import words
from accumviz.views.parts import LivePart, extent, heights, present, segments, totals

# Up to so many parameters are drawn as lanes; on a page, of up to so many events, which are as many as have room.
MOST_LANES, _MOST_EVENTS = 8, 96
# How a part looks: added by this event, live since an earlier one, used by a step, or not from a recorded backward.
LOOKS = ("new", "live", "used", "unseen")


@dataclass(frozen=True)
class LanePart:
    """A part of a bar: the backward that added it (-1: none that was recorded), its amount, and where it stands.

    It reaches from `start` to `start + length`; `together` counts the backwards that it is of.
    """

    born: int
    amount: float
    start: float
    length: float
    look: str
    together: int


@dataclass(frozen=True)
class LaneBar:
    """`.grad` after one event: what it comes to, and the parts of its bar, the oldest first.

    `state` is "whole", "none" where there is no `.grad`, and "broken" where a number is not finite.
    """

    state: str
    grad: float
    parts: tuple[LanePart, ...] = ()

    @property
    def end(self) -> float:
        """Where the bar ends on the side of its total."""
        ends = [0.0, self.grad]
        for part in self.parts:
            ends.append(part.start + part.length)
        return min(ends) if self.grad < 0 else max(ends)


@dataclass(frozen=True)
class Lane:
    """One parameter's bars, event by event, and the range of values that they reach."""

    parameter: int
    name: str
    signed: bool
    low: float
    high: float
    bars: tuple[LaneBar, ...]


def lay_out(
    ledger: Ledger, parameters: Sequence[int], events: Sequence[int]
) -> list[Lane]:
    """Return the lanes of these parameters; one parameter has one scale on all of its ranks.

    >>> from accumviz.ledger.ledger import Parameter
    >>> rows = [dict(kind="backward", contribution={"w": -16}, grad={"w": -16})]
    >>> (lane,) = lay_out(Ledger.build([Parameter("w", (1,))], rows), [0], [0])
    >>> lane.low, lane.high, lane.bars[0].parts[0].length
    (-16.0, 0.0, -16.0)
    """
    found = [_lane(ledger, p, list(events)) for p in parameters]
    scales: dict[str, tuple[float, float]] = {}
    for lane in found:
        name = words.on_any_rank(lane.name)
        low, high = scales.get(name, (0.0, 0.0))
        scales[name] = min(low, lane.low), max(high, lane.high)
    scaled = []
    for lane in found:
        low, high = scales[words.on_any_rank(lane.name)]
        scaled.append(replace(lane, low=low, high=high))
    return scaled


def page_lanes(
    ledger: Ledger, events: Sequence[int]
) -> tuple[int, dict[str, list[Any]]]:
    """Return how tall a page's lanes are, in pixels, and the bars of each; 0 and none where it draws a heat map.

    A lane is four columns, which compress well, and which runs share: `n`, of each bar how many
    parts it has (-1: there is no `.grad`, -2: a number is not finite); of each part its `age`, how many
    events ago it was added (-1: not recorded), its length `by`, and the digit of its `look` in
    `LOOKS`. Parts stand on each other, as here.
    """
    count = len(ledger.parameters)
    if not 0 < count <= MOST_LANES or len(events) > _MOST_EVENTS:
        return 0, {}
    lanes = lay_out(ledger, range(count), events)
    tall = 84 if count == 1 else 60
    if any(min(-one.low, one.high) > 0.1 * max(-one.low, one.high) for one in lanes):
        tall = max(min(240 // count, 160), 60)
    columns = zip(*(_page_lane(lane) for lane in lanes), strict=True)
    names = ("n", "age", "by", "look")
    return tall, {
        name: list(column) for name, column in zip(names, columns, strict=True)
    }


def _page_lane(lane: Lane) -> tuple[list[int], list[int], list[float], str]:
    counts: list[int] = []
    ages: list[int] = []
    lengths: list[float] = []
    looks = ""
    for event, bar in enumerate(lane.bars):
        counts.append({"none": -1, "broken": -2}.get(bar.state, len(bar.parts)))
        for part in bar.parts:
            ages.append(-1 if part.born < 0 else event - part.born)
            lengths.append(float(f"{part.length:.3g}"))
            looks += str(LOOKS.index(part.look))
    return counts, ages, lengths, looks


def _lane(ledger: Ledger, p: int, events: list[int]) -> Lane:
    signed = words.is_signed(ledger, p)
    grads = totals(ledger, p)[events]
    stacks = segments(ledger, p, events)
    bars, lengths = [], []
    for event, stack, grad in zip(events, stacks, grads.tolist(), strict=True):
        lengths.append(heights(stack, grad, signed))
        if present(ledger, event, p):
            bars.append(_bar(stack, lengths[-1], grad))
        else:
            bars.append(LaneBar("none", math.nan))
    low, high = extent(lengths, grads)
    return Lane(p, ledger.parameters[p].name, signed, low, high, tuple(bars))


def _bar(stack: list[LivePart], lengths: list[float], grad: float) -> LaneBar:
    amounts = [part.amount for part in stack]
    if not all(map(math.isfinite, [grad, *amounts])):
        return LaneBar("broken", grad)
    ends = {True: 0.0, False: 0.0}
    parts = []
    for part, length in zip(stack, lengths, strict=True):
        # Positive parts stand on each other above zero, negative ones hang below it.
        side = length >= 0
        start = ends[side]
        ends[side] += length
        drawn = LanePart(
            part.born, part.amount, start, length, _look(part), part.together
        )
        parts.append(drawn)
    return LaneBar("whole", grad, tuple(parts))


def _look(part: LivePart) -> str:
    if part.born < 0:
        return "unseen"
    if part.new:
        return "new"
    return "used" if part.used else "live"
