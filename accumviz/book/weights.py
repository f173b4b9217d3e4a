"""Draw the path of one or two weights, over a curve or contours of the loss, or from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
# The picture, in its own units, and the room in it that is the path's.
WIDTH, HEIGHT = 320, 190
# Left of it is room for the rings around the first station, and then for the numbers of the axis.
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 306.0, 14.0, 162.0
_FINE, _COARSE, _LEVELS = 61, 33, 9
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

    names: tuple[str, ...] = ()
    events: Sequence[int] = ()
    points: np.ndarray = np.zeros((0, 0))


def path(ledger: Ledger) -> WeightPath:
    """Return the path of the weights: nothing for more than two elements, or for some that were not kept."""
    parameters = ledger.parameters
    steps = [event.index for event in ledger.of("step")]
    is_small = 1 <= sum(parameter.numel for parameter in parameters) <= 2
    of_ranks = any(parameter.rank is not None for parameter in parameters)
    if not steps or not is_small or of_ranks:
        return WeightPath()
    kept = [ledger.weights(i) for i in range(len(parameters))]
    if not all(one.size for one in kept):
        return WeightPath()
    elements = np.concatenate(kept, axis=1)
    seen = ~np.isnan(elements).all(axis=1)
    seen[steps] = True
    events = [e if e in steps else -1 for e in np.flatnonzero(seen).tolist()]
    if events.count(-1) > 1:
        return WeightPath()
    return WeightPath(_element_names(ledger), events, elements[seen])


def _element_names(ledger: Ledger) -> tuple[str, ...]:
    names = []
    for parameter in ledger.parameters:
        name = literal(parameter.name)
        if parameter.numel == 1:
            names.append(name)
        else:
            names += [f"{name}[{i}]" for i in range(parameter.numel)]
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
    shown.ground = field([] if shown.ledger is None else [shown.ledger], loss)
    return shown


# --- the ground, which all runs share ------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """The ground on which paths are drawn: the range of each element, and the loss where one was given.

    `lines` draw the loss; `heights` is the range of its curve, of one element. `runs` counts those
    that share the ground, and `steps` is how many points the longest path has.
    """

    names: tuple[str, ...]
    ranges: tuple[Range, ...]
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
        place = {event: i for i, event in enumerate(chosen)} | {-1: -1}
        kept = [i for i, event in enumerate(events) if event in place]
        if names != self.names or not kept:
            return {}
        kept = kept[:: math.ceil(len(kept) / _MOST_POINTS)]
        across, up = self._axes(len(events))
        digits = words.telling(points)
        stations: list[list[Any]] = []
        before = None
        for i in kept:
            values = points[i].tolist()
            point = self._place(values, i)
            x, y = _inside(point, before, across, up)
            stations.append(
                [
                    place[events[i]],
                    round(_along(x, across, _LEFT, _RIGHT), 1),
                    round(_along(y, up, _BOTTOM, _TOP), 1),
                    self._words(values, digits),
                    self._arrow(values),
                ]
            )
            before = point
        is_beyond = any(arrow for *_, arrow in stations)
        return {
            "m": self._elements(across, up),
            "note": self._note(),
            "arrow": "Arrow: beyond the edge." if is_beyond else "",
            "p": stations,
        }

    def _axes(self, points: int) -> tuple[Range, Range]:
        if len(self.ranges) == 2:
            return self.ranges[0], self.ranges[1]
        if self.loss is None:
            return (0.0, max(self.steps, points, 2) - 1.0), self.ranges[0]
        return self.ranges[0], self.heights

    def _place(self, values: Sequence[float], i: int) -> tuple[float, float]:
        """Return where the i-th point is, in the units of the axes; what is not finite is beyond all."""
        finite = [x if math.isfinite(x) else _BEYOND for x in values]
        if len(finite) == 2:
            return finite[0], finite[1]
        if self.loss is None:
            return float(i), finite[0]
        height = _at(self.loss, finite[0])
        return finite[0], height if math.isfinite(height) else _BEYOND

    def _words(self, values: Sequence[float], digits: int) -> str:
        said = []
        for name, value in zip(self.names, values, strict=True):
            said.append(f"{shorten(name, 40)} {number(value, digits)}")
        if self.loss is not None and all(map(math.isfinite, values)):
            said.append(f"loss {number(_at(self.loss, *values))}")
        return ", ".join(said)

    def _arrow(self, values: Sequence[float]) -> str:
        """Return what stands at the edge for a point beyond it."""
        signs = [("←", "→"), ("↓", "↑")]
        if len(values) == 1 and self.loss is None:
            signs = signs[1:]
        for i, (low, high) in enumerate(self.ranges):
            if not low <= values[i] <= high:
                less, more = signs[i]
                return f"{less if values[i] < low else more} {number(values[i], 3)}"
        return ""

    def _note(self) -> str:
        note = "Small dots: after each step."
        if self.loss is not None:
            note += " Grey: the loss."
        if self.runs > 1:
            note += " One scale for all runs."
        return note

    def _elements(self, across: Range, up: Range) -> list[list[Any]]:
        """Return ticks, axes with their names, and lines of the loss.

        Each is a name, its attributes, and its text if it has one.
        """
        names = [shorten(name, 24) for name in self.names]
        if len(names) == 1:
            names = ["step", *names] if self.loss is None else [*names, "loss"]
        marks = _round_values(*across)
        if names[0] == "step":
            marks = [mark for mark in marks if mark.is_integer()]
        elements: list[list[Any]] = []
        for mark, text in zip(marks, _apart(marks), strict=True):
            at = round(_along(mark, across, _LEFT, _RIGHT), 1)
            elements.append(["text.av-tickx", {"x": at, "y": 176}, text])
        marks = _round_values(*up)
        for mark, text in zip(marks, _apart(marks), strict=True):
            at = round(_along(mark, up, _BOTTOM, _TOP) + 4, 1)
            elements.append(["text.av-ticky", {"x": 40, "y": at}, text])
        end = {"x": 310, "y": 189, "text-anchor": "end"}
        elements.append(["path.av-axes", {"d": "M46 10V162H310"}])
        elements.append(["text.av-axisname", end, names[0]])
        elements.append(["text.av-axisname", {"x": 50, "y": 10}, names[1]])
        elements += [["path.av-loss", {"d": line}] for line in self.lines]
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
    models = [path(ledger).points for ledger in right]
    ranges = []
    for i in range(len(names)):
        columns = [one.points[:, i] for one in paths]
        ranges.append(_range(columns, [model[:, i] for model in models]))
    if loss is not None:
        end = _last_finite(models[0] if models else paths[0].points)
        ranges = _with_valley(loss, ranges, end)
    heights, lines = _drawn(loss, ranges)
    steps = max(len(one.events) for one in paths)
    return Field(names, tuple(ranges), loss, heights, lines, len(paths), steps)


def _last_finite(points: np.ndarray) -> list[float]:
    """Return the last point whose elements are all finite, if there is one."""
    finite = points[np.isfinite(points).all(axis=1)]
    last: list[float] = finite[-1].tolist() if len(finite) else []
    return last


def _range(paths: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> Range:
    """Return the lowest and the highest value; what runs away is left out, so that the others are seen."""
    begin = float(paths[0][0]) if np.isfinite(paths[0][0]) else 0.0
    reaches = [_reach(one) for one in paths]
    typical = [_reach(one) for one in right]
    moving = sorted(filter(None, typical)) or sorted(filter(None, reaches)) or [0.0]
    limit = _LONG * moving[(len(moving) - 1) // 2]
    most = max(reach for reach in reaches if reach <= limit)
    values = np.concatenate(paths)
    values = values[np.isfinite(values)]
    low = max(float(values.min(initial=begin)), begin - most)
    high = min(float(values.max(initial=begin)), begin + most)
    margin = 0.12 * (high - low) or 0.5 * abs(begin) or 1.0
    return low - margin, high + margin


def _reach(values: np.ndarray) -> float:
    """Return how far a path comes from its beginning; of one that runs away, how far most of it does.

    >>> _reach(np.array([1.0, 1.5, 2.0])), _reach(np.array([1.0, 2.0, 0.0, 3.0, -1e9]))
    (1.0, 4.5)
    """
    gaps = np.abs(values[np.isfinite(values)] - values[0])
    moved = gaps[gaps > 0]
    if not moved.size:
        return 0.0
    return min(float(moved.max()), _FAR * float(np.median(moved)))


# --- the loss ------------------------------------------------------------------------------------


def _at(loss: Loss, *weights: float) -> float:
    try:
        return float(loss(*weights))
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as wrong:
        takes = "one number" if len(weights) == 1 else "two numbers"
        raise TypeError(
            f"loss gave no number ({wrong}); expected a function that takes {takes}, the weights, "
            "and returns the loss there"
        ) from wrong


def _with_valley(
    loss: Loss, ranges: Sequence[Range], end: Sequence[float]
) -> list[Range]:
    """Widen ranges so that they hold where the loss is lowest, if that is near: a path is read by where it leads.

    It is looked for along each element, from the `end` of a path.
    """
    widened = []
    for i, (low, high) in enumerate(ranges):
        wide = high - low
        at = list(end) or [begin for begin, _ in ranges]
        losses = {}
        for x in np.linspace(low - 3 * wide, high + 3 * wide, 71).tolist():
            at[i] = x
            losses[x] = _at(loss, *at)
        lowest = min(losses, key=lambda x: (math.isnan(losses[x]), losses[x]))
        room = 0.0 if low < lowest < high else 0.2 * wide
        widened.append((min(low, lowest - room), max(high, lowest + room)))
    return widened


def _drawn(loss: Loss | None, ranges: Sequence[Range]) -> tuple[Range, list[str]]:
    """Return the heights of the loss's curve, and the lines that draw it."""
    if loss is None:
        return (0.0, 1.0), []
    if len(ranges) == 1:
        return _curve(loss, ranges[0])
    return (0.0, 1.0), _contours(loss, *ranges)


def _curve(loss: Loss, across: Range) -> tuple[Range, list[str]]:
    """Return what the loss reaches over a range, and its curve there."""
    places = np.linspace(*across, _FINE)
    losses = np.array([_at(loss, x) for x in places.tolist()])
    finite = np.isfinite(losses)
    if not finite.any():
        return (0.0, 1.0), []
    low, high = float(losses[finite].min()), float(losses[finite].max())
    if low < 0.3 * high:
        low = min(low, 0.0)
    up = low, high if high > low else low + 1.0
    points = []
    for x, y in zip(places[finite].tolist(), losses[finite].tolist(), strict=True):
        points.append((_along(x, across, _LEFT, _RIGHT), _along(y, up, _BOTTOM, _TOP)))
    return up, [_line(points)]


def _contours(loss: Loss, across: Range, up: Range) -> list[str]:
    from contourpy import contour_generator

    losses = []
    for y in np.linspace(*up, _COARSE).tolist():
        row = [_at(loss, x, y) for x in np.linspace(*across, _COARSE).tolist()]
        losses.append(row)
    if not np.isfinite(losses).any():
        return []
    low, high = float(np.nanmin(losses)), float(np.nanmax(losses))
    columns = np.linspace(_LEFT, _RIGHT, _COARSE)
    rows = np.linspace(_BOTTOM, _TOP, _COARSE)
    generator = contour_generator(columns, rows, np.array(losses))
    contours = []
    for k in range(1, _LEVELS + 1):
        # Closer together near the valley, where paths go.
        level = low + (high - low) * (k / (_LEVELS + 1)) ** 2
        contours.append("".join(_line(line) for line in generator.lines(level)))
    return contours


def _line(points: Any) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


# --- axes ----------------------------------------------------------------------------------------


def _along(value: float, axis: Range, start: float, stop: float) -> float:
    low, high = axis
    return start + (stop - start) * (value - low) / ((high - low) or 1.0)


def _inside(
    point: tuple[float, float], before: tuple[float, float] | None, *axes: Range
) -> list[float]:
    """Return where a point is drawn: of one that lies outside, where the way from the point before leaves the ground.

    >>> _inside((2, 3.0), (1, 1.0), (0, 2), (0, 2))
    [1.5, 2.0]
    """
    lows, highs = zip(*axes, strict=True)
    edges: list[float] = np.clip(point, lows, highs).tolist()
    if before is None or (np.clip(before, lows, highs) != before).any():
        return edges
    share = 1.0
    for was, now, edge in zip(before, point, edges, strict=True):
        if now != edge:
            share = min(share, (edge - was) / (now - was))
    return [was + share * (now - was) for was, now in zip(before, point, strict=True)]


def _round_values(low: float, high: float) -> list[float]:
    """Return two to five round numbers in a range.

    >>> _round_values(0.976, 2.23), _round_values(0.0, 3.0)
    ([1.0, 1.5, 2.0], [0.0, 1.0, 2.0, 3.0])
    """
    wide = high - low
    if not 0 < wide < math.inf:
        return [low]
    unit = 10.0 ** math.floor(math.log10(wide))
    sizes = [unit * k for k in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)]
    step = next(size for size in sizes if wide / size < 5)
    first, last = math.ceil(low / step), math.floor(high / step)
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
