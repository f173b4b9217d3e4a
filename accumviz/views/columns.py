"""The columns that lanes and heat map share: one for each event, with its heading, and shares and bytes below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.ledger import Event, Ledger
from accumviz.views import style, words
from accumviz.views.figure import (
    INK,
    LINE,
    MUTED,
    Canvas,
    Key,
    clear_of,
    text_width,
)
from accumviz.views.shares import Segment, ShareBar, among, bars, reach

# From this width on, a heading stands upright in three lines; else its letters are turned, and so large.
_UPRIGHT = 66.0
_TURNED = 11.5
# How tall the line of a name is, a strip of bytes with its numbers, and the bars of shares.
_NAME = 20.0
_STRIP = 44.0
_SHARES = 92.0
# A thinner segment of a bar of shares has no gap to the next, and a wider bar is not drawn.
_THIN = 3.0
_WIDEST = 64.0
# How many pixels a step has for its bar at least, and a bar in columns that are narrower.
_FINEST = 6.0
_SLIM = 14.0
# How opaque the bytes of a strip are: those behind, and those in front.
_BEHIND = 0.5
_IN_FRONT = 0.95
# What was not measured.
_HATCH = "////"


class EventColumns(NamedTuple):
    """Where the columns of events stand, in pixels: the left edge of the first, and how wide each is."""

    left: float
    width: float
    events: list[Event]

    def x(self, position: int) -> float:
        """Return the left edge of a column."""
        return self.left + position * self.width

    def middle(self, position: int) -> float:
        """Return the middle of a column."""
        return self.x(position) + self.width / 2

    @property
    def end(self) -> float:
        """The right edge of the last one."""
        return self.x(len(self.events))


def heading_height(columns: EventColumns) -> float:
    """Return how many pixels the headings take above these columns."""
    if columns.width >= _UPRIGHT:
        return 50.0
    titles = [_title(event) for event in columns.events]
    return 14 + max(text_width(title, _TURNED) for title in titles)


def draw_headings(
    canvas: Canvas, columns: EventColumns, above: float, top: float
) -> None:
    """Name each event above its column, between `above` and `top`, and begin its line there."""
    is_upright = columns.width >= _UPRIGHT
    for i, event in enumerate(columns.events):
        x = columns.x(i)
        if is_upright:
            begin = above + 4
            _draw_lines(canvas, event, x + 7, columns.width, above)
        else:
            begin = top - 3
            middle = columns.middle(i) + 1
            canvas.text(middle, top - 8, _title(event), size=_TURNED, turned=True)
        if event.kind != "backward":
            draw_rule(canvas, event, x, begin, top)


def _draw_lines(
    canvas: Canvas, event: Event, x: float, width: float, above: float
) -> None:
    """Write a heading upright: the kind, what it acted on, the user's line."""
    is_sync = event.kind == "sync"
    room = int((width - 10) / text_width("x", 11))
    if is_sync:
        room += 1  # its letters are narrower than those of code
    about = "skipped" if event.skipped else words.shorten(words.subject(event), room)
    is_code = not is_sync and not event.skipped
    where = words.shorten(words.place(event), room)
    where_y = 40 if about else 26
    canvas.text(x, above + 11, event.kind, size=11)
    canvas.text(x, above + 26, about, mono=is_code)
    canvas.text(x, above + where_y, where, color=MUTED)


def _title(event: Event) -> str:
    rank = "" if event.rank is None else f"rank {event.rank} "
    # To whom it was done may be cut; what was done is what the column shows.
    subject = words.shorten(words.subject(event), 12)
    return f"{rank}{words.action(event)} {subject}".strip()


def draw_rule(
    canvas: Canvas,
    event: Event,
    x: float,
    top: float,
    bottom: float,
    *,
    faint: bool = False,
) -> None:
    """Draw an event's line across rows, faint across those that it does not concern; a backward has hardly any."""
    if event.kind == "backward":
        canvas.upright(x, top, bottom, color=LINE, width=0.6, alpha=0.7, z=0)
        return
    color, dash = style.kind(event.kind)
    alpha = 0.25 if faint else 1.0
    canvas.upright(x, top, bottom, color=color, dash=dash, alpha=alpha, width=1.8, z=1)


def rule_keys(events: Sequence[Event]) -> list[Key]:
    """Return the entries of a legend for the lines of these events."""
    keys = []
    for kind in dict.fromkeys(event.kind for event in events):
        if kind != "backward":
            color, dashes = style.kind(kind)
            keys.append(Key(kind, color, kind="rule", dashes=dashes))
    return keys


def draw_name(
    canvas: Canvas, name: str, what: str, y: float, *, mono: bool = False
) -> float:
    """Write a name above what it is of, with what is drawn there at the other end; return where that begins."""
    middle = y + _NAME / 2
    canvas.level(10, canvas.width - 10, y, color=LINE, width=0.6, alpha=0.8, z=0)
    room = canvas.width - 30 - text_width(what, 11)
    name = words.shorten(name, int(room / text_width("x", 12.5)))
    canvas.text(10, middle, name, size=12.5, mono=mono)
    canvas.text(canvas.width - 10, middle, what, color=MUTED, ha="right")
    return y + _NAME


# --- bytes and norms ------------------------------------------------------------------------------


class Area(NamedTuple):
    """Values of each event, NaN where there is none, and the entry of the legend for them."""

    values: np.ndarray
    key: Key


@dataclass(frozen=True)
class Strip:
    """Values of each event below a timeline: areas in front of each other, and in words.

    `missing` are the stretches, from an event to before another one, in which nothing was measured.
    """

    name: str
    areas: list[Area]
    most: str
    texts: tuple[str, ...] = ()
    missing: tuple[tuple[int, int], ...] = ()

    def keys(self) -> list[Key]:
        """Return the entries of a legend for what there is."""
        keys = []
        for area in self.areas:
            if area.key.text and (area.values > 0).any():
                keys.append(area.key)
        if self.missing:
            keys.append(Key("not measured", MUTED, 0.0, _HATCH))
        return keys

    def draw(
        self, canvas: Canvas, columns: EventColumns, base: float, each: int = 1
    ) -> None:
        """Draw it upwards from its base; of `each` so many events that share a pixel, the largest."""
        most = _largest(self.areas) or 1.0
        starts = np.arange(0, len(columns.events), each)
        lefts = [columns.x(start) for start in starts.tolist()]
        across = np.repeat([*lefts, columns.end], 2)[1:-1].tolist()
        scale = (_STRIP - 18) / most
        for values, key in self.areas:
            largest = np.maximum.reduceat(np.nan_to_num(values), starts)
            tops = np.repeat(base - scale * largest, 2).tolist()
            canvas.area(across, base, tops, color=key.color, alpha=key.alpha)
        tall = _STRIP - 18
        for start, stop in self.missing:
            wide = (stop - start) * columns.width
            look: Any = {"hatch": _HATCH, "edge": LINE, "line": 0.0}
            canvas.box(columns.x(start), base - tall, wide, tall, **look)
        canvas.level(columns.left, columns.end, base, color=LINE, width=0.8)
        y = base - _STRIP + 10
        for i, text in enumerate(self.texts):
            if text_width(text, 11) <= columns.width - 4:
                canvas.text(columns.middle(i), y, text, ha="center")


def strips_of(events: Sequence[Event]) -> list[Strip]:
    """Return the strips of the bytes that were measured at these events: saved tensors, and those of a device."""
    before = np.array([event.saved_before for event in events], float)
    after = np.array([event.saved_after for event in events], float)
    peak = np.array([event.peak for event in events], float)
    allocated = np.array([event.allocated for event in events], float)
    strips = []
    if np.isfinite(before).any():
        areas = _two_areas(before, "saved before the backward", after, "saved after it")
        texts = tuple(_saved(event) for event in events)
        most = style.size(float(np.nanmax(before)))
        strips.append(Strip("saved tensors", areas, most, texts, _missing(events)))
    if np.isfinite(allocated).any():
        areas = _two_areas(
            peak, "new maximum on the way", allocated, "allocated after it"
        )
        most = style.size(_largest(areas))
        strips.append(Strip("allocated on device", areas, most))
    return strips


def _missing(events: Sequence[Event]) -> tuple[tuple[int, int], ...]:
    """Return the stretches of backwards whose saved tensors were not measured.

    >>> _missing([Event(i, "backward", saved_before=b) for i, b in enumerate((8, math.nan, math.nan, 8))])
    ((1, 3),)
    """
    backwards = [i for i, event in enumerate(events) if event.kind == "backward"]
    lacks = [math.isnan(events[i].saved_before) for i in backwards]
    stretches = []
    alike = groupby(zip(lacks, backwards, strict=True), key=itemgetter(0))
    for is_missing, run in alike:
        places = [i for _, i in run]
        if is_missing:
            stretches.append((places[0], places[-1] + 1))
    return tuple(stretches)


def _two_areas(
    behind: np.ndarray, behind_text: str, front: np.ndarray, front_text: str
) -> list[Area]:
    behind_key = Key(behind_text, MUTED, _BEHIND, kind="fill")
    front_key = Key(front_text, MUTED, _IN_FRONT, kind="fill")
    return [Area(behind, behind_key), Area(front, front_key)]


def _largest(areas: list[Area]) -> float:
    return float(np.nanmax([area.values for area in areas]))


def _saved(event: Event) -> str:
    if math.isnan(event.saved_before):
        return ""
    return f"{style.size(event.saved_before)} → {style.size(event.saved_after)}"


def norm_strip(ledger: Ledger, rows: list[int], events: list[int]) -> Strip:
    """Return the strip of the norm of all `.grad` after each event."""
    cells = ledger.grad[np.ix_(events, rows)].astype(float)
    norms = np.linalg.norm(np.nan_to_num(cells, posinf=0.0), axis=1)
    area = Area(norms, Key("", MUTED, 0.6))
    return Strip("‖.grad‖", [area], style.number(norms.max(), 3))


def draw_strips(
    canvas: Canvas, columns: EventColumns, strips: list[Strip], y: float, each: int = 1
) -> float:
    """Draw strips below each other from `y` on, and return where they end."""
    for strip in strips:
        top = draw_name(canvas, strip.name, f"0 to {strip.most}", y)
        y = top + _STRIP
        strip.draw(canvas, columns, y - 4, each)
    return y


# --- shares ---------------------------------------------------------------------------------------


class _BarPlace(NamedTuple):
    """Where a bar is drawn: from `x` on, so wide, on the line at `zero`, with so many pixels for a share of 1."""

    x: float
    width: float
    zero: float
    scale: float

    @property
    def middle(self) -> float:
        """Where its texts stand."""
        return self.x + self.width / 2


class ShareStrip:
    """The bars of shares of the steps among some events, drawn to one scale; lengths add, as shares do."""

    def __init__(self, ledger: Ledger, columns: EventColumns) -> None:
        self.ledger = ledger
        events = columns.events
        steps = [i for i, event in enumerate(events) if event.kind == "step"]
        apart = int(np.diff(steps).min(initial=len(events)))
        every = math.ceil(_FINEST / (apart * columns.width))
        shown = steps[::every]
        self.bars, _ = bars(ledger, [events[i].index for i in shown])
        room = every * apart * columns.width
        self.width = max(min(0.4 * room, _SLIM), min(0.8 * columns.width, _WIDEST))
        self.note = ""
        if every > 1:
            self.note = f"The shares of one step in {every} are shown."
        self.colors = style.label_colors(ledger.labels)
        # Whether a sum had no room.
        self.left_out = False

    def keys(self) -> list[Key]:
        """Return the entries of the legend."""
        whole = among(self.ledger) or "the mean of one loss"
        keys = [Key(f"share 1: {whole}", INK, kind="dashed")]
        for bar in self.bars:
            if any(part.unknown for part in bar.segments):
                return [*keys, Key("unknown share", MUTED, 0.0, "xx")]
        return keys

    def draw(self, canvas: Canvas, columns: EventColumns, top: float) -> float:
        """Draw them, each sum where it has room, and a dashed line at 1; return where they end."""
        low, high = reach(self.bars)
        scale = (_SHARES - 26) / (high - low)
        zero = top + 18 + high * scale
        canvas.level(columns.left, columns.end, zero, color=MUTED, width=0.9, z=1)
        by_step: dict[int, list[ShareBar]] = {}
        for bar in self.bars:
            by_step.setdefault(bar.step, []).append(bar)
        indices = [event.index for event in columns.events]
        positions = [indices.index(step) for step in by_step]
        apart = int(np.diff(positions).min(initial=2))
        for position, of_step in zip(positions, by_step.values(), strict=True):
            count = len(of_step)
            width = self.width / count
            left = columns.middle(position) - width * count / 2
            # A lone bar's sum may be as wide as the way to the next one's.
            room = width if count > 1 else apart * columns.width
            for n, bar in enumerate(of_step):
                gap = min(2.0, width / 4)
                place = _BarPlace(left + n * width, width - gap, zero, scale)
                self._draw_bar(canvas, bar, place, room)
        for one in (1, -1) if low < 0 else (1,):
            y = zero - one * scale
            # Above bars, and below what is written.
            canvas.level(columns.left, columns.end, y, width=1.2, dash="--", z=2.5)
            canvas.text(columns.end + 5, y, style.number(one))
        return top + _SHARES

    def _draw_bar(
        self, canvas: Canvas, bar: ShareBar, place: _BarPlace, room: float
    ) -> None:
        color = self.colors.get(bar.label, MUTED)
        for part in bar.segments:
            height = abs(part.length) * place.scale
            highest = max(part.start, part.start + part.length)
            y = place.zero - highest * place.scale
            # A thin line between segments keeps them apart; one as thick as they are would be all there is.
            shown = height - 1.0 if height > _THIN else height
            if height:
                look = _share_look(part, color)
                canvas.box(place.x, y, place.width, shown, **look)
            # A lone part is its own sum, which stands at the end of the bar.
            if len(bar.segments) > 1 and part.look == "new":
                _write_share(canvas, part, place, (y, shown), color)
        if text_width(bar.total, 11, bold=True) > room - 3:
            self.left_out = True
            return
        y = place.zero - max(bar.ends[1], 0.0) * place.scale - 9
        total: Any = {"weight": "bold", "ha": "center", "ground": True}
        canvas.text(place.middle, y, bar.total, **total)


def _share_look(part: Segment, color: str) -> dict[str, Any]:
    if part.unknown:
        return {"edge": MUTED, "hatch": "xx"}
    return {"edge": color} if part.again else {"fill": color}


def _write_share(
    canvas: Canvas,
    part: Segment,
    place: _BarPlace,
    box: tuple[float, float],
    color: str,
) -> None:
    """Write a share into its segment, where that has room beside the dashed line."""
    line = place.zero - math.copysign(place.scale, part.length)
    middle, room = clear_of(*box, line)
    if room >= 12 and text_width(part.text, 11) <= place.width - 2:
        ink = style.ink_on(color)
        canvas.text(place.middle, middle, part.text, ha="center", color=ink)
