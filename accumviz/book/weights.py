"""Draw the path of one or two weights, over a curve or contours of the loss, or from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from accumviz import arguments
from accumviz.graph.graph import Graph
from accumviz.ledger.ledger import Ledger, Recorded
from accumviz.show import literal
from accumviz.views import player, words
from accumviz.views.player import Player
from accumviz.views.style import number
from accumviz.views.words import shorten

Loss = Callable[..., Any]
Range = tuple[float, float]
Point = tuple[float, float]
Names = tuple[str, ...]
Numbers = Sequence[float]
Element = list[Any]
# The picture, in its own units, and the room in it that is the path's.
WIDTH = 320
HEIGHT = 190
# Left of it is room for the rings around the first station, and then for the numbers of the axis.
_LEFT = 52.0
_RIGHT = 306.0
_TOP = 14.0
_BOTTOM = 162.0
# Points of a curve, points of each side of contours, and contours.
_FINE = 61
_COARSE = 33
_LEVELS = 9
# A path runs away where it comes so many times as far as most of its steps.
_FAR = 3.0
# Beside what runs so many times as far as a right run mostly does, all others would be a point.
_LONG = 5.0
_MOST_POINTS = 400
# Any number that is far beyond all edges.
_BEYOND = 1e30


class WeightPath(NamedTuple):
    """The way of the weights: the elements' names, the events after which they were so, and points × elements.

    The event before the first is -1.
    """

    names: Names = ()
    events: Sequence[int] = ()
    points: np.ndarray = np.zeros((0, 0))


def path(ledger: Ledger) -> WeightPath:
    """Return the path of the weights: nothing for more than two elements, or for some that were not kept."""
    parameters = ledger.parameters
    size = sum(parameter.numel for parameter in parameters)
    of_ranks = any(parameter.rank is not None for parameter in parameters)
    steps = [event.index for event in ledger.of("step")]
    if not steps or of_ranks or size not in (1, 2):
        return WeightPath()
    kept = []
    for i in range(len(parameters)):
        weights = ledger.weights(i)
        if not weights.size:
            return WeightPath()
        kept.append(weights)
    elements = np.concatenate(kept, axis=1)
    seen = ~np.isnan(elements).all(axis=1)
    seen[steps] = True
    events = np.flatnonzero(seen)
    before = events[~np.isin(events, steps)]
    if before.size > 1:
        return WeightPath()
    events[: before.size] = -1
    return WeightPath(_element_names(ledger), events.tolist(), elements[seen])


def _element_names(ledger: Ledger) -> Names:
    names = []
    for parameter in ledger.parameters:
        name = literal(parameter.name)
        if parameter.numel == 1:
            names.append(name)
            continue
        for i in range(parameter.numel):
            names.append(f"{name}[{i}]")
    return tuple(names)


def play(
    ledger: Ledger | Recorded | Graph | None,
    graph: Graph | Mapping[int, Graph] | None = None,
    *,
    loss: Loss | None = None,
) -> Player:
    """Show code, graph, `.grad`, weights, timeline and shares under one scrubber, with no kernel.

    `ledger` may be the recording, whose own graphs are shown where none are given. `graph` is one
    graph for all backwards, or each backward's own by its event's index. Either of the two may be
    missing: `play(ledger)` has no graph pane, `play(graph)` nothing else. Weights of one or two
    elements are drawn on their way; `loss`, a function of these numbers, puts its curve or contours below.
    Raises `TypeError` for anything else, `ValueError` for the graph of an event that is no backward.

    >>> play(Ledger.build([], []))
    Player: 0 events, 0 parameters; a notebook shows it, .save('run.html') writes a page
    """
    shown = player.play(ledger, graph)
    ledgers = [] if shown.ledger is None else [shown.ledger]
    shown.ground = field(ledgers, loss)
    return shown


# --- the ground, which all runs share ------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """The ground on which paths are drawn: the range of each element, and the loss where one was given.

    `lines` draw the loss; `heights` is the range of its curve, of one element. `runs` counts those
    that share the ground, and `steps` is how many points the longest path has.
    """

    names: Names
    ranges: Sequence[Range]
    loss: Loss | None
    heights: Range
    lines: Sequence[str]
    runs: int
    steps: int

    def picture(self, ledger: Ledger, chosen: Sequence[int]) -> dict[str, Any]:
        """Return a path as a page draws it: the ground `m` below it, what it means, and the points `p`.

        A point is the place of its event (-1: before the first), where it stands, what it says, and,
        where it lies outside, an arrow with its number.
        """
        names, events, points = path(ledger)
        places = {event: i for i, event in enumerate(chosen)}
        places[-1] = -1
        kept = [i for i, event in enumerate(events) if event in places]
        if names != self.names or not kept:
            return {}
        across, up = self._axes(len(events))
        digits = words.telling(points)
        stations = []
        is_beyond = False
        before = None
        for i in kept[:: math.ceil(len(kept) / _MOST_POINTS)]:
            values = points[i].tolist()
            point = self._place(values, i)
            x, y = _inside(point, before, across, up)
            arrow = self._arrow(values)
            station = [
                places[events[i]],
                _x(x, across),
                _y(y, up),
                self._words(values, digits),
                arrow,
            ]
            stations.append(station)
            is_beyond = is_beyond or arrow != ""
            before = point
        return {
            "m": self._elements(across, up),
            "note": self._note(),
            "arrow": "Arrow: beyond the edge." if is_beyond else "",
            "p": stations,
        }

    def _axes(self, points: int) -> tuple[Range, Range]:
        first, *others = self.ranges
        if others:
            return first, others[0]
        if self.loss is not None:
            return first, self.heights
        last = max(self.steps, points, 2) - 1.0
        return (0.0, last), first

    def _place(self, values: Numbers, i: int) -> Point:
        """Return where the i-th point is, in the units of the axes; what is not finite is beyond all."""
        first, *others = map(_finite, values)
        if others:
            return first, others[0]
        if self.loss is None:
            return float(i), first
        height = _at(self.loss, first)
        return first, _finite(height)

    def _words(self, values: Numbers, digits: int) -> str:
        parts = []
        for name, value in zip(self.names, values, strict=True):
            text = number(value, digits)
            parts.append(f"{shorten(name, 40)} {text}")
        if self.loss is not None and all(map(math.isfinite, values)):
            loss = _at(self.loss, *values)
            parts.append(f"loss {number(loss)}")
        return ", ".join(parts)

    def _arrow(self, values: Numbers) -> str:
        """Return what stands at the edge for a point beyond it."""
        signs = ["←→", "↓↑"]
        if len(values) == 1 and self.loss is None:
            signs = ["↓↑"]
        for value, (low, high), sign in zip(values, self.ranges, signs, strict=False):
            if low <= value <= high:
                continue
            arrow = sign[0] if value < low else sign[1]
            return f"{arrow} {number(value, 3)}"
        return ""

    def _note(self) -> str:
        note = "Small dots: after each step."
        if self.loss is not None:
            note += " Grey: the loss."
        if self.runs > 1:
            note += " One scale for all runs."
        return note

    def _elements(self, across: Range, up: Range) -> list[Element]:
        """Return ticks, axes with their names, and lines of the loss.

        Each is a name, its attributes, and its text if it has one.
        """
        names = [shorten(name, 24) for name in self.names]
        columns = _round_values(*across)
        rows = _round_values(*up)
        if len(names) == 1 and self.loss is None:
            names.insert(0, "step")
        names.append("loss")
        if names[0] == "step":
            columns = list(filter(float.is_integer, columns))
        end = {"x": 310, "y": 189, "text-anchor": "end"}
        elements: list[Element] = []
        for value, text in zip(columns, _apart(columns), strict=True):
            at = {"x": _x(value, across), "y": 176}
            elements.append(["text.av-tickx", at, text])
        for value, text in zip(rows, _apart(rows), strict=True):
            at = {"x": 40, "y": _y(value, up, 4)}
            elements.append(["text.av-ticky", at, text])
        elements += [
            ["path.av-axes", {"d": "M46 10V162H310"}],
            ["text.av-axisname", end, names[0]],
            ["text.av-axisname", {"x": 50, "y": 10}, names[1]],
        ]
        for line in self.lines:
            elements.append(["path.av-loss", {"d": line}])
        return elements


def field(
    ledgers: Sequence[Ledger],
    loss: Loss | None = None,
    *,
    right: Sequence[Ledger] = (),
) -> Field | None:
    """Return the ground for the paths of these runs; None where there is no path, or the runs have different weights.

    `loss` takes one number for each element of the weights and returns the loss there. The `right`
    ones among the runs say how far it is worth looking. Raises `TypeError` for a loss that cannot be
    called or returns no number.
    """
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss is {arguments.a(loss)}; expected a function of the weights: loss=lambda w: ..."
        )
    paths = [path(ledger) for ledger in ledgers]
    names = paths[0].names if paths else ()
    if not names or any(one.names != names for one in paths):
        return None
    models = [path(ledger) for ledger in right]
    ranges = []
    for i in range(len(names)):
        columns = [one.points[:, i] for one in paths]
        typical = [model.points[:, i] for model in models]
        ranges.append(_range(columns, typical))
    heights: Range = 0.0, 1.0
    lines: list[str] = []
    if loss is not None:
        first = models[0] if models else paths[0]
        ranges = _with_valley(loss, ranges, first.points)
        if len(names) == 1:
            heights, lines = _curve(loss, ranges[0])
        else:
            lines = _contours(loss, *ranges)
    steps = max(len(one.events) for one in paths)
    return Field(names, ranges, loss, heights, lines, len(paths), steps)


def _range(paths: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> Range:
    """Return the lowest and the highest value; what runs away is left out, so that the others are seen."""
    values = np.concatenate(paths)
    begin = float(values[0])
    if not math.isfinite(begin):
        begin = 0.0
    reaches = [_reach(one) for one in paths]
    typical = [_reach(one) for one in right]
    if not any(typical):
        typical = reaches
    moving = list(filter(None, typical)) or [0.0]
    limit = _LONG * median_low(moving)
    most = max(reach for reach in reaches if reach <= limit)
    values = values[np.isfinite(values)]
    lowest = float(values.min(initial=begin))
    highest = float(values.max(initial=begin))
    low = max(lowest, begin - most)
    high = min(highest, begin + most)
    margin = 0.12 * (high - low) or 0.5 * abs(begin) or 1.0
    return low - margin, high + margin


def _reach(values: np.ndarray) -> float:
    """Return how far a path comes from its beginning; of one that runs away, how far most of it does.

    >>> _reach(np.array([1.0, 1.5, 2.0])), _reach(np.array([1.0, 2.0, 0.0, 3.0, -1e9]))
    (1.0, 4.5)
    """
    finite = values[np.isfinite(values)]
    gaps = np.abs(finite - values[0])
    moved = gaps[gaps > 0]
    if not moved.size:
        return 0.0
    farthest = float(moved.max())
    usual = float(np.median(moved))
    return min(farthest, _FAR * usual)


# --- the loss ------------------------------------------------------------------------------------


def _at(loss: Loss, *weights: float) -> float:
    try:
        return float(loss(*weights))
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as wrong:
        takes = "two numbers" if weights[1:] else "one number"
        raise TypeError(
            f"loss gave no number ({wrong}); expected a function that takes {takes}, the weights, "
            "and returns the loss there"
        ) from wrong


def _with_valley(
    loss: Loss, ranges: Sequence[Range], points: np.ndarray
) -> list[Range]:
    """Widen ranges so that they hold where the loss is lowest, if that is near: a path is read by where it leads.

    It is looked for along each element, from the last point of a path that is finite.
    """
    is_finite = np.isfinite(points).all(axis=1)
    ends = points[is_finite].tolist()
    end = ends[-1] if ends else [begin for begin, _ in ranges]
    widened = []
    for i, (low, high) in enumerate(ranges):
        wide = high - low
        at = [*end]
        losses = {}
        places = np.linspace(low - 3 * wide, high + 3 * wide, 71)
        for x in places.tolist():
            at[i] = x
            losses[x] = _at(loss, *at)
        lowest = min(losses, key=lambda x: (math.isnan(losses[x]), losses[x]))
        room = 0.0 if low < lowest < high else 0.2 * wide
        first = min(low, lowest - room)
        last = max(high, lowest + room)
        widened.append((first, last))
    return widened


def _curve(loss: Loss, across: Range) -> tuple[Range, list[str]]:
    """Return what the loss reaches over a range, and its curve there."""
    places = np.linspace(*across, _FINE)
    losses = np.array([_at(loss, x) for x in places.tolist()])
    is_finite = np.isfinite(losses)
    places = places[is_finite]
    losses = losses[is_finite]
    if not losses.size:
        return (0.0, 1.0), []
    low = float(losses.min())
    high = float(losses.max())
    if low < 0.3 * high:
        low = min(low, 0.0)
    if high <= low:
        high = low + 1.0
    columns = _along(places, across, _LEFT, _RIGHT)
    rows = _along(losses, (low, high), _BOTTOM, _TOP)
    return (low, high), [_line(np.stack([columns, rows], axis=1))]


def _contours(loss: Loss, across: Range, up: Range) -> list[str]:
    from contourpy import contour_generator

    xs = np.linspace(*across, _COARSE)
    ys = np.linspace(*up, _COARSE)
    losses = []
    for y in ys.tolist():
        for x in xs.tolist():
            losses.append(_at(loss, x, y))
    if not np.isfinite(losses).any():
        return []
    low = float(np.nanmin(losses))
    high = float(np.nanmax(losses))
    columns = np.linspace(_LEFT, _RIGHT, _COARSE)
    rows = np.linspace(_BOTTOM, _TOP, _COARSE)
    heights = np.reshape(losses, (_COARSE, _COARSE))
    generator = contour_generator(columns, rows, heights)
    contours = []
    for k in range(1, _LEVELS + 1):
        # Closer together near the valley, where paths go.
        part = (k / (_LEVELS + 1)) ** 2
        level = low + (high - low) * part
        lines = map(_line, generator.lines(level))
        contours.append("".join(lines))
    return contours


def _line(points: Any) -> str:
    places = [f"{x:.1f} {y:.1f}" for x, y in points]
    return "M" + "L".join(places)


# --- axes ----------------------------------------------------------------------------------------


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _BEYOND


def _x(value: float, axis: Range) -> float:
    place: float = _along(value, axis, _LEFT, _RIGHT)
    return round(place, 1)


def _y(value: float, axis: Range, below: float = 0.0) -> float:
    place: float = _along(value, axis, _BOTTOM, _TOP)
    return round(place + below, 1)


def _along(value: Any, axis: Range, start: float, stop: float) -> Any:
    low, high = axis
    wide = (high - low) or 1.0
    return start + (stop - start) * (value - low) / wide


def _inside(point: Point, before: Point | None, *axes: Range) -> Any:
    """Return where a point is drawn: of one that lies outside, where the way from the point before leaves the ground.

    >>> _inside((2, 3.0), (1, 1.0), (0, 2), (0, 2))
    [1.5, 2.0]
    """
    lows, highs = zip(*axes, strict=True)
    edges = np.clip(point, lows, highs)
    if before is None or (np.clip(before, lows, highs) != before).any():
        return edges.tolist()
    start = np.array(before)
    way = point - start
    inside = edges - start
    leaves = edges != point
    shares = inside[leaves] / way[leaves]
    share = shares.min(initial=1.0)
    places = start + share * way
    return places.tolist()


def _round_values(low: float, high: float) -> list[float]:
    """Return two to five round numbers in a range.

    >>> _round_values(0.976, 2.23), _round_values(0.0, 3.0)
    ([1.0, 1.5, 2.0], [0.0, 1.0, 2.0, 3.0])
    """
    wide = high - low
    if not 0 < wide < math.inf:
        return [low]
    unit = 10.0 ** math.floor(math.log10(wide))
    for factor in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        step = unit * factor
        if wide / step < 5:
            break
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [k * step for k in range(first, last + 1)]


def _apart(values: Sequence[float]) -> list[str]:
    """Write numbers with as many digits as tell them apart.

    >>> _apart([1, 1.5]), _apart([2.0, 2.002, 2.004])
    (['1', '1.5'], ['2', '2.002', '2.004'])
    """
    for digits in range(3, 9):
        texts = [number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts
