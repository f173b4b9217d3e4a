"""Draw the path of one or two weights, over a curve or contours of the loss, or from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 306, 14, 162
_FINE, _COARSE, _LEVELS = 61, 33, 9
# A path that runs away is cut where it is so many times as far from its beginning as half of its steps.
_FAR = 3.0
# Beside paths that are so many times as long, all others would be a point.
_LONG = 8.0
_MOST_POINTS = 400
_MOST_DIGITS = 5


@dataclass(frozen=True)
class Field:
    """The ground on which paths are drawn: the range of each axis, and the loss where one was given.

    `losses` is one row for a curve, and one for each value of the second element for contours; `steps` is how many
    points the longest path has.
    """

    names: tuple[str, ...]
    ranges: tuple[tuple[float, float], ...]
    losses: np.ndarray | None = None
    loss: Loss | None = None
    runs: int = 1
    steps: int = 0

    def picture(self, ledger: Ledger, chosen: Sequence[int]) -> dict[str, Any]:
        """A path as a page draws it: the ground `m` below it as elements, what they mean, and the points `p`.

        A point is the place of its event (-1: before the first), where it stands, what it says, and, where
        it lies outside, an arrow with its number.
        """
        names, at, points = path(ledger)
        if tuple(names) != self.names:
            return {}
        place = {event: i for i, event in enumerate(chosen)} | {-1: -1}
        kept = [i for i, event in enumerate(at) if event in place]
        kept = kept[:: math.ceil(len(kept) / _MOST_POINTS)] if kept else kept
        names, (across, up), lines = _axes(self, max(self.steps, len(at)))
        digits = words.telling(points)
        stations: list[list[Any]] = []
        before = None
        for i in kept:
            values = [float(x) for x in points[i]]
            stands = _stands(self, values, i)
            x, y = _seen(stands, before, across, up)
            x, y = _along(x, across, _LEFT, _RIGHT), _along(y, up, _BOTTOM, _TOP)
            told = [_words(self, self.names, values, digits), _arrow(self, values)]
            stations.append([place[at[i]], round(x, 1), round(y, 1), *told])
            before = stands
        if not stations:
            return {}
        steps = len(self.names) == 1 and self.losses is None
        named = [
            _axis(names[0], across, (_LEFT, _RIGHT), whole=steps),
            _axis(names[1], up, (_BOTTOM, _TOP)),
        ]
        note = "Small dots: after each step."
        note += " Grey: the loss." if lines else ""
        note += " One scale for all runs." if self.runs > 1 else ""
        beyond = any(arrow for *_, arrow in stations)
        return {
            "m": _elements(named, lines),
            "note": note,
            "arrow": "Arrow: beyond the edge." if beyond else "",
            "p": stations,
        }


def _axis(
    name: str, reach: Range, span: Range, *, whole: bool = False
) -> tuple[str, list[Any]]:
    """What an axis is called, and its ticks: where each stands and what it says; `whole` numbers only, or all."""
    base = _base(*reach)
    marks = _round_values(reach[0] - base, reach[1] - base)
    if whole:
        marks = [mark for mark in marks if mark.is_integer()]
    if base:
        name = f"{name} {'+' if base < 0 else '−'} {number(abs(base))}"
    ticks = [
        [round(_along(mark + base, reach, *span), 1), told]
        for mark, told in zip(marks, _apart(marks), strict=True)
    ]
    return name, ticks


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


def path(ledger: Ledger) -> tuple[list[str], list[int], np.ndarray]:
    """The elements' names, the events after which they were so (-1: before the first), and points × elements.

    Nothing where there are more than two elements, or some that were not kept.
    """
    parameters = ledger.parameters
    steps = {event.index for event in ledger.of("step")}
    few = 1 <= sum(p.numel for p in parameters) <= 2
    kept = [ledger.weights(i) for i in range(len(parameters))] if few else []
    ranks = any(p.rank is not None for p in parameters)
    if ranks or not steps or not kept or not all(one.size for one in kept):
        return [], [], np.zeros((0, 0))
    elements = np.concatenate(kept, axis=1)
    there = ~np.isnan(elements).all(axis=1)
    there[list(steps)] = True
    known = np.flatnonzero(there).tolist()
    at = [e if e in steps else -1 for e in known]
    if at.count(-1) > 1:
        return [], [], np.zeros((0, 0))
    return _element_names(ledger), at, elements[known]


def _element_names(ledger: Ledger) -> list[str]:
    names = []
    for parameter in ledger.parameters:
        name = literal(parameter.name)
        several = [f"{name}[{i}]" for i in range(parameter.numel)]
        names += several if parameter.numel > 1 else [name]
    return names


def field(ledgers: Sequence[Ledger], loss: Loss | None = None) -> Field | None:
    """The ground for the paths of these runs; None where there is no path, or the runs have different weights.

    `loss` takes one number for each element of the weights and returns the loss there. Raises
    `TypeError` for a loss that cannot be called or returns no number.
    """
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss is {arguments.a(loss)}; expected a function of the weights: loss=lambda w: ..."
        )
    paths = [path(ledger) for ledger in ledgers]
    names = {tuple(one) for one, _, _ in paths}
    if len(names) != 1 or not (axes := names.pop()):
        return None
    points = [one for _, _, one in paths]
    ranges = tuple(_range([one[:, i] for one in points]) for i in range(len(axes)))
    steps = max(len(at) for _, at, _ in paths)
    if loss is None:
        return Field(axes, ranges, runs=len(paths), steps=steps)
    middle = _middle(points[0], ranges)
    ranges = tuple(
        _down_to_the_valley(loss, one, middle, i) for i, one in enumerate(ranges)
    )
    return Field(axes, ranges, _losses(loss, ranges), loss, len(paths), steps)


def _middle(points: np.ndarray, ranges: Sequence[Range]) -> list[float]:
    """Where the last finite point of a path lies, within these ranges."""
    ends = points[np.isfinite(points).all(axis=1)][-1:]
    if not len(ends):
        return [low for low, _ in ranges]
    lows, highs = zip(*ranges, strict=True)
    return [float(x) for x in np.clip(ends[0], lows, highs)]


def _losses(loss: Loss, ranges: Sequence[Range]) -> np.ndarray:
    """The loss on a grid: one row for one weight, and for two a row for each value of the second."""
    fine = _FINE if len(ranges) == 1 else _COARSE
    across, *up = (np.linspace(*one, fine) for one in ranges)
    rows = up[0] if up else [None]
    return np.array(
        [[_at(loss, x, *([] if y is None else [y])) for x in across] for y in rows]
    )


def _elements(
    axes: Sequence[tuple[str, list[Any]]], lines: Sequence[str]
) -> list[list[Any]]:
    """Ticks, axes with their names, and lines of the loss: each a name, its attributes, and its text if it has one."""
    (across, below), (up, beside) = axes
    return [
        *(["text.av-tickx", {"x": at, "y": 176}, text] for at, text in below),
        *(
            ["text.av-ticky", {"x": 40, "y": round(at + 4, 1)}, text]
            for at, text in beside
        ),
        ["path.av-axes", {"d": "M46 10V162H310"}],
        ["text.av-axisname", {"x": 310, "y": 189, "text-anchor": "end"}, across],
        ["text.av-axisname", {"x": 50, "y": 10}, up],
        *(["path.av-loss", {"d": line}] for line in lines),
    ]


def _apart(values: Sequence[float]) -> list[str]:
    """Numbers with as many digits as tell them apart.

    >>> _apart([1, 1.5]), _apart([2.0, 2.002, 2.004])
    (['1', '1.5'], ['2', '2.002', '2.004'])
    """
    for digits in (3, 4, _MOST_DIGITS):
        told = [number(value, digits) for value in values]
        if len(set(told)) == len(told):
            break
    return told


def _at(loss: Loss, *weights: float) -> float:
    try:
        return float(loss(*map(float, weights)))
    except (TypeError, ValueError) as wrong:
        raise TypeError(
            f"loss({', '.join(f'{w:.4g}' for w in weights)}) gave no number ({wrong}); expected a function that takes "
            f"{'one number' if len(weights) == 1 else 'two numbers'}, the weights, and returns the loss there"
        ) from wrong


def _range(paths: Sequence[np.ndarray]) -> tuple[float, float]:
    """From the lowest to the highest value; what runs away is left out, so that the others are seen."""
    far = []
    for one in paths:
        gaps = np.abs(one[np.isfinite(one)] - one[0])
        if gaps.any():
            far.append(min(float(gaps.max()), _FAR * float(np.median(gaps[gaps > 0]))))
    most = min(far, default=0.0) * (1 if len(paths) == 1 else _FAR)
    every = np.concatenate(paths)
    every = every[np.isfinite(every)]
    begin = float(paths[0][0]) if len(paths[0]) and math.isfinite(paths[0][0]) else 0.0
    low = max(float(every.min(initial=begin)), begin - most)
    high = min(float(every.max(initial=begin)), begin + most)
    # What does not run away is seen whole, beside however short a path.
    reaches = [
        float(np.abs(one[np.isfinite(one)] - begin).max(initial=0.0)) for one in paths
    ]
    for one, reach in zip(paths, reaches, strict=True):
        if _is_steady(one) and reach <= _LONG * float(np.median(reaches)):
            low, high = (
                min(low, float(one.min(initial=low))),
                max(high, float(one.max(initial=high))),
            )
    margin = 0.12 * (high - low) or 0.5 * abs(begin) or 1.0
    return low - margin, high + margin


def _is_steady(one: np.ndarray) -> bool:
    """Whether no step is much larger than the first.

    >>> _is_steady(np.array([1.0, 1.2, 1.5])), _is_steady(np.array([1.0, 40.0, -7000.0]))
    (True, False)
    """
    sizes = np.abs(np.diff(one))
    return bool(
        np.isfinite(sizes).all()
        and (not sizes.any() or sizes.max() <= _FAR * sizes[sizes > 0][0])
    )


def _down_to_the_valley(
    loss: Loss, span: tuple[float, float], middle: list[float], i: int
) -> tuple[float, float]:
    """A range that goes on while the loss falls, for some way: a path is read by where it leads."""
    low, high = span

    def at(x: float) -> float:
        return _at(loss, *(x if k == i else other for k, other in enumerate(middle)))

    for _ in range(6):
        wide = high - low
        below, inside, above = (
            at(low),
            min(at(low + 0.2 * wide), at(high - 0.2 * wide)),
            at(high),
        )
        if below < inside and below <= above:
            low -= 0.5 * wide
        elif above < inside:
            high += 0.5 * wide
        else:
            break
    return low, high


def _axes(
    ground: Field, points: int
) -> tuple[list[str], tuple[tuple[float, float], tuple[float, float]], list[str]]:
    """What the axes are called, what they reach, and the lines of the loss."""
    names = [shorten(name, 24) for name in ground.names]
    if len(names) == 2:
        across, up = ground.ranges
        return names, (across, up), _contours(ground)
    (only,) = ground.ranges
    if ground.losses is None:
        return ["step", *names], ((0.0, float(max(points - 1, 1))), only), []
    values = ground.losses[0]
    finite = values[np.isfinite(values)]
    low, high = (
        (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    )
    up = (min(low, 0.0) if low < 0.3 * high else low, high if high > low else low + 1.0)
    xs = np.linspace(_LEFT, _RIGHT, len(values))
    known = np.isfinite(values)
    heights = [_along(v, up, _BOTTOM, _TOP) for v in values[known].tolist()]
    stations = np.column_stack([xs[known], heights])
    return [*names, "loss"], (only, up), [_line(stations)]


def _contours(ground: Field) -> list[str]:
    if ground.losses is None or not np.isfinite(ground.losses).any():
        return []
    from contourpy import contour_generator

    losses = ground.losses
    low, high = float(np.nanmin(losses)), float(np.nanmax(losses))
    rows, columns = losses.shape
    generator = contour_generator(
        np.linspace(_LEFT, _RIGHT, columns), np.linspace(_BOTTOM, _TOP, rows), losses
    )
    # Closer together near the valley, where paths go.
    levels = [
        low + (high - low) * (k / (_LEVELS + 1)) ** 2 for k in range(1, _LEVELS + 1)
    ]
    return [
        "".join(_line(np.asarray(line)) for line in generator.lines(level))
        for level in levels
    ]


def _line(points: np.ndarray) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if len(points) else ""


def _along(value: float, axis: tuple[float, float], start: float, stop: float) -> float:
    low, high = axis
    return start + (stop - start) * (value - low) / ((high - low) or 1.0)


def _round_values(low: float, high: float) -> list[float]:
    """Two to five round numbers in a range.

    >>> _round_values(0.976, 2.23), _round_values(0.0, 3.0)
    ([1.0, 1.5, 2.0], [0.0, 1.0, 2.0, 3.0])
    >>> _round_values(0.99998, 1.00014)
    [1.0, 1.0001]
    """
    wide = high - low
    if not 0 < wide < math.inf:
        return [low]
    unit = 10.0 ** math.floor(math.log10(wide))
    step = next(
        unit * k for k in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if wide / (unit * k) < 5
    )
    values = [
        k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]
    # What needs more digits than there is room for would say its neighbour's number.
    said = [float(f"{value:.{_MOST_DIGITS}g}") for value in values]
    return [
        value
        for value, exact in zip(said, values, strict=True)
        if math.isclose(value, exact, rel_tol=1e-8)
    ] or [float(f"{values[0]:.6g}") if values else low]


def _base(low: float, high: float) -> float:
    """What is taken off the marks of an axis: 0 where they have room for the digits that tell them apart.

    >>> _base(0.9, 1.4), _base(0.9999995, 1.00001)
    (0.0, 1.0)
    """
    most = max(abs(low), abs(high))
    return float(f"{(low + high) / 2:.4g}") if 0 < high - low < 1e-4 * most else 0.0


def _stands(ground: Field, values: Sequence[float], i: int) -> tuple[float, float]:
    """Where a point is, in the units of the axes; what is not finite is beyond all."""
    if len(values) == 2:
        x, y = values
    elif ground.loss is None:
        x, y = float(i), values[0]
    else:
        x, y = (
            values[0],
            _at(ground.loss, values[0]) if math.isfinite(values[0]) else math.inf,
        )
    return (x if math.isfinite(x) else math.inf), (y if math.isfinite(y) else math.inf)


def _seen(
    point: tuple[float, float],
    before: tuple[float, float] | None,
    *axes: tuple[float, float],
) -> list[float]:
    """Where a point is drawn: of one that lies outside, where the way from the point before it leaves the ground.

    >>> _seen((2, 3.0), (1, 1.0), (0, 2), (0, 2))
    [1.5, 2.0]
    """
    inside = [float(np.clip(v, *axis)) for v, axis in zip(point, axes, strict=True)]
    if before is None or not all(
        low <= v <= high for v, (low, high) in zip(before, axes, strict=True)
    ):
        return inside
    gone = [
        (now - v) / (to - v)
        for v, now, to in zip(before, inside, point, strict=True)
        if to not in (now, math.inf)
    ]
    share = min(gone, default=1.0)
    return [
        v + share * (to - v) if math.isfinite(to) else now
        for v, now, to in zip(before, inside, point, strict=True)
    ]


def _words(
    ground: Field, names: Sequence[str], values: Sequence[float], digits: int
) -> str:
    told = [
        f"{shorten(name, 40)} {number(value, digits)}"
        for name, value in zip(names, values, strict=True)
    ]
    if ground.loss is not None and all(map(math.isfinite, values)):
        told.append(f"loss {number(_at(ground.loss, *values))}")
    return ", ".join(told)


def _arrow(ground: Field, values: Sequence[float]) -> str:
    """What stands at the edge for a point beyond it."""
    upwards = len(values) == 1 and ground.loss is None
    for i, (value, (low, high)) in enumerate(zip(values, ground.ranges, strict=True)):
        if low <= value <= high:
            continue
        less, more = ("↓", "↑") if i or upwards else ("←", "→")
        return f"{less if value < low else more} {number(value, 3)}"
    return ""
