"""Ledger -> matplotlib: exact bars while every number can be written, a heat map beyond; never torch, never pyplot."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from accumviz import given
from accumviz.ledger import Event, Ledger, Parameter, Recorded, recorded
from accumviz.views import heatmap, style, words
from accumviz.views.figure import (
    INK,
    LINE,
    LIVE,
    MUTED,
    Canvas,
    Key,
    ThemedFigure,
    draw_heading,
    draw_legend,
    draw_rule,
    heading_height,
    legend_height,
    text_width,
)
from accumviz.views.parts import Segment, extent, heights, present, segments, totals
from accumviz.views.phone import PHONE
from accumviz.views.strip import Grid, beside, heights_of, strip_keys, strips

_MOST_LANES, _NARROWEST = 8, 27.0
# Of a name: `0.weight (unsharded)` is told from `0.weight` by its end, and read whole.
_LETTERS = 20
# How wide a bold minus and point are of their size, all else being as wide as a digit.
_BOLD = {"−": 0.838, ".": 0.38}


def timeline(
    ledger: Ledger | Recorded,
    *,
    parameters: str | int | Iterable[str | int] | None = None,
    events: slice | Iterable[int] | None = None,
    width: float = 640,
) -> ThemedFigure:
    """Draw what every event added to, and left in, each `.grad`.

    A small ledger becomes one lane per parameter, with the contributions live in `.grad` as
    stacked bars and every number written; a large one a heat map of contribution norms.
    `parameters` are names, indices or patterns (`"encoder.*"`), `events` a slice or indices,
    `width` the most CSS pixels it may take (72 to the inch in a saved file).

    Raises `KeyError` for an unknown parameter, `IndexError` for an unknown event, `TypeError` and
    `ValueError` for what is neither.

    >>> import accumviz as av
    >>> from accumviz.ledger import Parameter
    >>> ledger = av.Ledger.build([Parameter("w", shape=(1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ... ])
    >>> av.timeline(ledger).words[1]
    'Event 0, backward: w receives −16, .grad −16.'
    """
    ledger, width = recorded(ledger, "timeline"), given.above_zero("width", width, "CSS pixels")
    columns, chosen = _columns(ledger, parameters), _events(ledger, events)
    if not columns or not chosen:
        canvas = Canvas(min(width, 420), 40)
        what = "no event" if not chosen else "no parameter"
        canvas.text(12, 20, f"Nothing to show: this ledger has {what}.", color=MUTED)
    elif len(columns) <= _MOST_LANES and _has_room(ledger, columns, chosen, width):
        canvas = _lanes(ledger, columns, chosen, width)
        if canvas.width > PHONE and _has_room(ledger, columns, chosen, PHONE):
            canvas.figure.narrow = _lanes(ledger, columns, chosen, PHONE).figure
            canvas.figure.narrow.words = words.story(ledger, chosen, columns)
    else:
        canvas = heatmap.draw(ledger, columns, chosen, width)
    canvas.figure.words = words.story(ledger, chosen, columns)
    return canvas.figure


def _columns(ledger: Ledger, wanted: str | int | Iterable[str | int] | None) -> list[int]:
    if wanted is None:
        return list(range(len(ledger.parameters)))
    chosen: list[int] = []
    for one in wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]:
        matches = [i for i, p in enumerate(ledger.parameters) if isinstance(one, str) and fnmatch.fnmatch(p.name, one)]
        chosen += matches or [ledger.index(one)]
    return list(dict.fromkeys(chosen))


def _events(ledger: Ledger, wanted: slice | Iterable[int] | None) -> list[int]:
    every = range(len(ledger))
    said = f"events={wanted!r:.80}; expected a slice or indices of this ledger's {len(ledger)} events, as in events=[0]"
    try:
        if wanted is None or isinstance(wanted, slice):
            return list(every[wanted or slice(None)])
        return sorted({every[e] for e in wanted})
    except IndexError:
        raise IndexError(said) from None
    except TypeError:
        raise TypeError(said) from None


def _left(ledger: Ledger, columns: Sequence[int]) -> float:
    names = [words.shorten(ledger.parameters[p].name, _LETTERS) for p in columns]
    return max(64.0, beside(ledger), *(text_width(name, 12.5, mono=True) + 26 for name in names))


def _has_room(ledger: Ledger, columns: Sequence[int], events: Sequence[int], width: float) -> bool:
    return (width - _left(ledger, columns) - 24) / len(events) >= _NARROWEST


def _foreign(event: Event, parameter: Parameter) -> bool:
    """Whether this happened on another rank, or is a step of an optimizer that does not own the parameter."""
    if event.rank is not None and event.rank != parameter.rank:
        return event.kind != "backward"
    return event.kind == "step" and event.details.get("optimizer_index", 0) not in parameter.optimizers


def _lanes(ledger: Ledger, columns: list[int], events: list[int], width: float) -> Canvas:
    left = _left(ledger, columns)
    column = float(np.clip((width - left - 24) / len(events), _NARROWEST, 112))
    lane = _lane_height(ledger, columns, events)
    top = heading_height(ledger, events, column)
    shown = strips(ledger, events)
    rooms = heights_of(shown)
    total = max(left + column * len(events) + 24, min(width, 400.0))
    extents = _extents(ledger, columns, events)
    keys, notes = _keys(ledger, columns, events), [] if ledger.complete else ["The recording is incomplete."]
    grads = (grad for p in columns for grad in totals(ledger, p)[events] if np.isfinite(grad))
    if not all(_total(float(grad), column)[0] for grad in grads):
        notes.append("Totals without room are left out here; they stand in the words below.")
    if any(
        not words.is_signed(ledger, p) and any(len(parts) > 1 for parts in segments(ledger, p, events)) for p in columns
    ):
        notes.append("The parts of a tensor share the height of ‖.grad‖ in proportion to their own norms.")
    if any(len(parts) > 1 for p in columns for parts in segments(ledger, p, events)):
        notes.append("Bars grow from zero, the oldest part first.")
    if len({reach for reach in extents.values() if any(reach)}) > 1:
        notes.append("Each lane has a scale of its own.")
    bottom = top + lane * len(columns) + sum(rooms) + 12
    canvas = Canvas(total, bottom + legend_height(keys, notes, total) + 6)
    grid = Grid(left, top, column, lane, events)
    for i, e in enumerate(events):
        foreign = [p for p in columns if _foreign(ledger[e], ledger.parameters[p])]
        below = top + lane * len(columns)
        draw_heading(canvas, ledger[e], grid.x(i), column, top=top, bottom=below, faint=bool(foreign))
        for row, p in enumerate(columns if foreign else []):
            y, alpha = top + lane * row, 0.25 if p in foreign else 1.0
            draw_rule(canvas, ledger[e], grid.x(i), top=y, bottom=y + lane, alpha=alpha)
    for row, p in enumerate(columns):
        _lane(canvas, grid, ledger, row, p, extents[p])
    for n, draw in enumerate(shown):
        draw(canvas, grid, ledger, top + lane * len(columns) + sum(rooms[:n]))
    draw_legend(canvas, keys, notes, bottom)
    return canvas


class _Slot(NamedTuple):
    """Where one bar stands: its column's room, its lane, its zero line and pixels per unit."""

    x: float
    bar: float
    room: float
    top: float
    lane: float
    zero: float
    scale: float

    @property
    def middle(self) -> float:
        return self.x + self.bar / 2


def _lane_height(ledger: Ledger, columns: list[int], events: list[int]) -> float:
    """Tall enough to write a number into the smallest contribution, if that is not too tall."""
    base = 132.0 if len(columns) == 1 else 104.0 if len(columns) <= 3 else 84.0
    most, needed = base * 1.4, base
    for p in columns:
        signed, stacks, grads = words.is_signed(ledger, p), segments(ledger, p, events), totals(ledger, p)[events]
        drawn = [heights(stack, float(grad), signed) for stack, grad in zip(stacks, grads, strict=True)]
        low, high = extent(drawn, grads)
        parts = (
            pair for stack, heights in zip(stacks, drawn, strict=True) for pair in zip(stack, heights, strict=True)
        )
        for amount in (amount for part, amount in parts if part.new and amount):
            height = 14.5 * (high - low) / abs(amount) + 30 + 12 * (low < 0) + 12 * (high > 0)
            needed = max(needed, height if height <= most else base)
    return needed


def _extents(ledger: Ledger, columns: list[int], events: list[int]) -> dict[int, tuple[float, float]]:
    """How far the bars of each lane reach; one parameter on several ranks is drawn to one scale."""
    found: dict[int, tuple[float, float]] = {}
    same: dict[str, list[int]] = {}
    for p in columns:
        signed, grads = words.is_signed(ledger, p), totals(ledger, p)[events]
        stacks = zip(segments(ledger, p, events), grads, strict=True)
        found[p] = extent([heights(stack, float(grad), signed) for stack, grad in stacks], grads)
        same.setdefault(words.on_any_rank(ledger.parameters[p].name), []).append(p)
    for ranks in same.values():
        both = min(found[p][0] for p in ranks), max(found[p][1] for p in ranks)
        found |= dict.fromkeys(ranks, both)
    return found


def _lane(canvas: Canvas, grid: Grid, ledger: Ledger, row: int, p: int, reach: tuple[float, float]) -> None:
    parameter, top = ledger.parameters[p], grid.top + grid.lane * row
    signed, stacks = words.is_signed(ledger, p), segments(ledger, p, grid.events)
    grads = totals(ledger, p)[grid.events]
    low, high = reach
    span = (high - low) or 1.0
    # Room for a total beyond the end of a bar, on the sides that have bars.
    over, under = (24 if high > 0 else 12), (24 if low < 0 else 12)
    scale = (grid.lane - over - under - 6) / span
    zero = top + over + 3 + high * scale

    end = grid.x(len(grid.events))
    canvas.line([grid.left, end], [zero, zero], color=MUTED, width=0.9, z=1)
    if row:
        canvas.line([10, end], [top, top], color=LINE, width=0.6, alpha=0.8, z=0)
    middle = top + grid.lane / 2
    canvas.text(grid.left - 14, middle - 8, words.shorten(parameter.name, _LETTERS), points=12.5, mono=True, ha="right")
    what = "number" if signed else "norm ‖·‖"
    canvas.text(grid.left - 14, middle + 8, what, points=11, color=MUTED, ha="right")

    bar = min(grid.column * 0.66, 52.0)
    for i, (e, stack) in enumerate(zip(grid.events, stacks, strict=True)):
        slot = _Slot(grid.x(i) + (grid.column - bar) / 2, bar, grid.column, top, grid.lane, zero, scale)
        grad = float(grads[i])
        if not present(ledger, e, p):
            _absent(canvas, slot, below=high == 0 and low < 0)
        elif not np.isfinite(grad) or any(not np.isfinite(s.amount) for s in stack):
            _broken(canvas, slot, grad)
        else:
            # Where columns are narrow, a total that did not change is not said twice.
            quiet = grid.column < 52 and i > 0 and present(ledger, e - 1, p) and grads[i - 1] == grad
            _bar(canvas, ledger, slot, stack, heights(stack, grad, signed), grad, quiet=quiet)
        lost = ledger.unconsumed(e).get(parameter.name)
        if lost:
            told = "×" if grid.column < 80 else f"× {_lost(ledger, p, lost)}"
            at = middle + (18 if zero < middle else -18)
            canvas.text(slot.middle, at, told, points=11, ha="center")


def _lost(ledger: Ledger, p: int, births: list[int]) -> str:
    told = words.value(ledger, births[0], p, "contribution", 3) if len(births) == 1 else ""
    return told if 0 < len(told) <= 9 else words.counted(len(births), "part")


def _absent(canvas: Canvas, at: _Slot, below: bool) -> None:
    canvas.line([at.x, at.x + at.bar], [at.zero, at.zero], color=MUTED, width=2.2, dash=":", z=3)
    text = "None" if at.room >= 36 else "∅"
    y = at.zero + (12 if below else -12)
    canvas.text(at.middle, y, text, points=11.5, italic=True, color=MUTED, ha="center")


def _broken(canvas: Canvas, at: _Slot, grad: float) -> None:
    # Below the zero line where that stands so high that it would strike the number through.
    low = at.zero < at.top + 26
    box = (at.zero + 4, at.top + at.lane - 24 - at.zero - 4) if low else (at.top + 26, at.lane - 36)
    canvas.box(at.x, box[0], at.bar, box[1], edge=INK, hatch="///", line=1.2, z=3)
    number = at.top + (at.lane - 12 if low else 14)
    canvas.text(at.middle, number, style.number(grad), points=12, bold=True, ha="center")


def _bar(
    canvas: Canvas, ledger: Ledger, at: _Slot, stack: list[Segment], heights: list[float], grad: float, *, quiet: bool
) -> None:
    colors = style.label_colors(ledger.labels)
    net, ends = at.zero - grad * at.scale, {True: at.zero, False: at.zero}
    # Old parts first: the newest sits at the end, where the total is written.
    for part, drawn in zip(stack, heights, strict=True):
        height, up = abs(drawn) * at.scale, drawn >= 0
        y = ends[up] - height if up else ends[up]
        ends[up] += -height if up else height
        color = colors.get(ledger[part.born].label, MUTED) if part.born >= 0 else MUTED
        alpha, hatch = 1.0 if part.new else 0.0 if part.used else LIVE, "xx" if part.born < 0 else None
        canvas.box(
            at.x, y + 0.6, at.bar, max(height - 1.2, 0.8), fill=color, alpha=alpha, edge=color, line=1.2, hatch=hatch
        )
        told = _fitting(part.amount, at.bar - 3, 11) if part.together == 1 else ""
        ink = style.ink_on(color) if part.new else INK
        # A lone part is its own total, which stands at the end of the bar.
        if height >= 14 and told and part.born >= 0 and (part.new or len(stack) > 1):
            canvas.text(at.middle, y + height / 2, told, points=11, ha="center", color=ink)
    inside = ends[True] + 1 < net < ends[False] - 1
    # Parts that cancel leave the total inside the bar: there only its ends are marked, to spare the numbers.
    for x, to in [(at.x - 8, at.x), (at.x + at.bar, at.x + at.bar + 8)] if inside else [(at.x - 4, at.x + at.bar + 4)]:
        canvas.line([x, to], [net, net], width=2.6, z=4)
    edge = max(ends[False], net) + 12 if grad < 0 else min(ends[True], net) - 11
    total, points = _total(grad, at.room)
    if total and not quiet:
        canvas.text(at.middle, edge, total, points=points, bold=True, ha="center")


def _total(grad: float, room: float) -> tuple[str, float]:
    """What stands at the end of a bar, apart from the totals beside it, and the size of its letters."""
    points = 12.0 if room >= 52 else 11.0
    apart = 5.0 if room >= 36 else 2.4  # in narrower columns, two digits go before a wider gap
    for told in _shorter(grad):
        if points * sum(_BOLD.get(letter, 0.696) for letter in told) <= room - apart:
            return told, points
    return "", points


def _fitting(amount: float, room: float, points: float) -> str:
    """The number with as many digits as there is room for; empty when not even two fit."""
    return next((told for told in _shorter(amount) if text_width(told, points) <= room), "")


def _shorter(amount: float) -> list[str]:
    return [style.number(amount, digits) for digits in (4, 3, 2)]


def _keys(ledger: Ledger, columns: list[int], events: list[int]) -> list[Key]:
    """The entries of the legend: only what this figure shows."""
    stacks = [stack for p in columns for stack in segments(ledger, p, events)]
    parts = [part for stack in stacks for part in stack]
    colors = style.label_colors(ledger.labels)
    shown = {ledger[part.born].label for part in parts if part.born >= 0}
    seen = [label for label in ledger.labels if label in shown]
    keys = [Key(words.shorten(label or "backward", 28), colors[label]) for label in seen] if len(seen) > 1 else []
    own = colors[seen[0]] if len(seen) == 1 else MUTED
    keys += [Key("added by this backward", own)] if any(s.new for s in parts) else []
    keys += [Key("already in .grad", own, LIVE)] if any(not s.new and not s.used and s.born >= 0 for s in parts) else []
    keys += [Key("already used by a step", own, 0.0)] if any(s.used for s in parts) else []
    unseen = "from other ranks" if ledger.of("sync") else "not from a recorded backward"
    keys += [Key(unseen, MUTED, LIVE, "xx")] if any(s.born < 0 for s in parts) else []
    keys += [Key(".grad after the event", INK, kind="total")]
    if any(ledger.unconsumed(e) for e in events):
        keys += [Key("erased before any step used it", INK, kind="cross")]
    if any(not np.isfinite(part.amount) for part in parts):
        keys += [Key("not finite", INK, 0.0, "///")]
    if any(not present(ledger, e, p) for e in events for p in columns):
        keys += [Key("no .grad (None)", MUTED, kind="dots")]
    return keys + strip_keys(ledger, events)
