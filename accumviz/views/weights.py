"""Draw the path of a single weight: over the curve of the loss, or from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from accumviz.ledger.ledger import Ledger
from accumviz.show import literal
from accumviz.views import words
from accumviz.views.style import number
from accumviz.views.words import shorten

Loss = Callable[[float], Any]
Range = tuple[float, float]
Element = list[Any]
# The room for the path in a picture of 320 × 190.
# Left of it is room for the rings around the first station, and then for the numbers of the axis.
_ACROSS = (52.0, 306.0)
_UP = (162.0, 14.0)
# Digits of a tick: enough to tell it from its neighbours, too few to show how its step is rounded.
_DIGITS = 8
# Points of a curve.
_FINE = 61
# Beside what is more than so many times as far away as the right runs come, these would be a point.
_LONG = 2.0


class WeightPath(NamedTuple):
    """The way of a weight: its name, the events after which it was so (-1: before the first), and what it was."""

    name: str = ""
    events: Sequence[int] = ()
    values: Sequence[float] = ()


def path(ledger: Ledger) -> WeightPath:
    """Return the path of the weight: nothing for more than one element, or for one that was not kept."""
    steps = [event.index for event in ledger.of("step")]
    sizes = [parameter.numel for parameter in ledger.parameters]
    if not steps or sizes != [1] or not ledger.weights(0).size:
        return WeightPath()
    values = ledger.weights(0)[:, 0]
    earlier = np.flatnonzero(~np.isnan(values[: steps[0]]))
    before = earlier[:1].tolist()
    events = [-1] * len(before) + steps
    name = literal(ledger.parameters[0].name)
    return WeightPath(name, events, values[before + steps].tolist())


# --- the ground, which all runs share ------------------------------------------------------------


class Field(NamedTuple):
    """The ground on which paths are drawn: the range of each axis, and the loss where one was given.

    Without a loss, `across` are steps, and `up` the weight; with one, `across` is the weight, and `curve` draws the
    loss. `runs` counts those that share the ground.
    """

    name: str
    across: Range
    up: Range
    loss: Loss | None = None
    curve: str = ""
    runs: int = 1

    def picture(self, ledger: Ledger, chosen: Sequence[int]) -> dict[str, Any]:
        """Return a path as a page draws it: the ground `m` below it, what it means, and the points `p`.

        On a loss, it leads the panes beside the code. A point is the place of its event (-1: before the first),
        where it stands, what it says, and, where it lies outside, an arrow with its number.
        """
        name, events, values = path(ledger)
        if name != self.name:
            return {}
        places = {event: place for place, event in enumerate(chosen)}
        places[-1] = -1
        stations = []
        for i, event in enumerate(events):
            if event in places:
                station = self._station(i, values[i])
                stations.append([places[event], *station])
        if not stations:
            return {}
        is_beyond = any(arrow for *_, arrow in stations)
        return {
            "m": self.elements(),
            "leads": self.loss is not None,
            "note": self._note(),
            "arrow": "Arrow: beyond the edge." if is_beyond else "",
            "p": stations,
        }

    def _station(self, i: int, value: float) -> list[Any]:
        """Return where the i-th point is drawn, what it says, and its arrow if it lies beyond the edge."""
        text = f"{shorten(self.name, 40)} {number(value, words.WEIGHT_DIGITS)}"
        if self.loss is None:
            x, y = float(i), value
            arrow = _arrow(value, self.up, "↓↑")
        else:
            x, y = value, _at(self.loss, value)
            arrow = _arrow(value, self.across, "←→")
            if math.isfinite(value):
                text += f", loss {number(y)}"
        column = _place(x, self.across, _ACROSS)
        row = _place(y, self.up, _UP)
        return [column, row, text, arrow]

    def _note(self) -> str:
        note = "Small dots: after each step."
        if self.loss is not None:
            note += " Grey: the loss."
        if self.runs > 1:
            note += " One scale for all runs."
        return note

    def elements(self) -> list[Element]:
        """Return ticks, axes with their names, and the curve of the loss.

        Each is a name, its attributes, and its text if it has one.
        """
        below = "step"
        beside = self.name
        if self.loss is not None:
            below = self.name
            beside = "loss"
        elements = self._ticks()
        end = {"x": 310, "y": 189, "text-anchor": "end"}
        elements.append(["path.av-axes", {"d": "M46 10V162H310"}])
        elements.append(["text.av-axisname", end, shorten(below, 24)])
        start = {"x": 50, "y": 10}
        elements.append(["text.av-axisname", start, shorten(beside, 24)])
        if self.curve:
            elements.append(["path.av-loss", {"d": self.curve}])
        return elements

    def _ticks(self) -> list[Element]:
        elements = []
        for value in _round_values(*self.across):
            if self.loss is not None or value.is_integer():
                x = _place(value, self.across, _ACROSS)
                text = number(value, _DIGITS)
                elements.append(["text.av-tickx", {"x": x, "y": 176}, text])
        for value in _round_values(*self.up):
            y = round(_place(value, self.up, _UP) + 4, 1)
            text = number(value, _DIGITS)
            elements.append(["text.av-ticky", {"x": 40, "y": y}, text])
        return elements


def _arrow(value: float, axis: Range, signs: str) -> str:
    low, high = axis
    if low <= value <= high:
        return ""
    sign = signs[0] if value < low else signs[1]
    return f"{sign} {number(value, 3)}"


def field(
    ledgers: Sequence[Ledger],
    loss: Loss | None = None,
    *,
    right: Sequence[Ledger] = (),
) -> Field | None:
    """Return the ground for the paths of these runs; None where there is no path, or the runs have different weights.

    `loss` takes the weight and returns the loss there. The `right` ones among the runs say how
    far it is worth looking. Raises `TypeError` for a loss that returns no number.
    """
    paths = list(map(path, ledgers))
    names = {one.name for one in paths}
    if len(names) != 1 or "" in names:
        return None
    (name,) = names
    reached = _range(paths, [path(ledger) for ledger in right])
    runs = len(paths)
    if loss is None:
        longest = max(len(one.events) for one in paths)
        steps = (0.0, max(longest, 2) - 1.0)
        return Field(name, steps, reached, runs=runs)
    across = _with_valley(loss, reached)
    heights, curve = _curve(loss, across)
    return Field(name, across, heights, loss, curve, runs)


def _range(paths: Sequence[WeightPath], right: Sequence[WeightPath]) -> Range:
    """Return the lowest and the highest value; what runs away is left out, so that the others are seen."""
    values = _finite(paths)
    if not values.size:
        return -1.0, 1.0
    begin = float(values[0])
    away = np.abs(_finite(right) - begin)
    reach = away.max(initial=0.0)
    if reach:
        is_near = np.abs(values - begin) <= _LONG * reach
        values = values[is_near]
    low = float(values.min())
    high = float(values.max())
    margin = 0.12 * (high - low) or 0.5 * abs(begin) or 1.0
    return low - margin, high + margin


def _finite(paths: Sequence[WeightPath]) -> ndarray:
    """Return all values that are finite."""
    values = np.concatenate([np.zeros(0), *(one.values for one in paths)])
    return np.compress(np.isfinite(values), values)


# --- the loss ------------------------------------------------------------------------------------


def _at(loss: Loss, weight: float) -> float:
    try:
        return float(loss(weight))
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as wrong:
        raise TypeError(
            f"loss gave no number ({wrong}); expected a function that takes one number, the weight, "
            "and returns the loss there"
        ) from wrong


def _with_valley(loss: Loss, across: Range) -> Range:
    """Widen a range so that it holds where the loss is lowest, if that is near: a path is read by where it leads."""
    low, high = across
    wide = high - low
    around = low - 3 * wide, high + 3 * wide
    places, losses = _losses(loss, around, 71)
    if not losses.size:
        return across
    lowest = float(places[losses.argmin()])
    room = 0.0 if low < lowest < high else 0.2 * wide
    return min(low, lowest - room), max(high, lowest + room)


def _losses(loss: Loss, across: Range, count: int) -> tuple[ndarray, ndarray]:
    """Return places in a range, and the losses there, where they are finite."""
    places = np.linspace(*across, count)
    losses = np.array([_at(loss, x) for x in places.tolist()])
    is_finite = np.isfinite(losses)
    return places[is_finite], losses[is_finite]


def _curve(loss: Loss, across: Range) -> tuple[Range, str]:
    """Return what the loss reaches over a range, and its curve there."""
    places, losses = _losses(loss, across, _FINE)
    if not losses.size:
        return (0.0, 1.0), ""
    low = float(losses.min())
    high = float(losses.max())
    if low < 0.3 * high:
        low = min(low, 0.0)
    if high <= low:
        high = low + 1.0
    points = []
    for x, height in zip(places.tolist(), losses.tolist(), strict=True):
        column = _place(x, across, _ACROSS)
        row = _place(height, (low, high), _UP)
        points.append(f"{column:.1f} {row:.1f}")
    return (low, high), "M" + "L".join(points)


# --- axes ----------------------------------------------------------------------------------------


def _place(value: float, axis: Range, room: Range) -> float:
    """Return where a value is drawn; at the edge, if it lies beyond.

    >>> _place(1.0, (0.0, 4.0), (10.0, 50.0)), _place(9.0, (0.0, 4.0), (10.0, 50.0))
    (20.0, 50.0)
    """
    low, high = axis
    start, stop = room
    inside = high if math.isnan(value) else min(max(value, low), high)
    wide = (high - low) or 1.0
    place = start + (stop - start) * (inside - low) / wide
    return round(place, 1)


def _round_values(low: float, high: float) -> list[float]:
    """Return three to five round numbers in a range.

    >>> _round_values(0.976, 2.23), _round_values(0.0, 3.0)
    ([1.0, 1.5, 2.0], [0.0, 1.0, 2.0, 3.0])
    """
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=3)
    ticks = locator.tick_values(low, high)
    return [float(tick) for tick in ticks if low <= tick <= high]
