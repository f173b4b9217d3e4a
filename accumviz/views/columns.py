"""Draw the columns of a timeline: one for each event, with its heading, and shares and bytes below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
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
# A thinner segment of a bar of shares has no gap to the next; how wide bars are at most, and at least.
_THIN = 3.0
_WIDEST = 64.0
_SLIM = 14.0
# How opaque the bytes of a strip are: those behind, and those in front.
_BEHIND = 0.5
_IN_FRONT = 0.95


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
            canvas.text(middle, top - 8, _title(event), size=_TURNED, rotation=90)
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
    canvas.text(x, above + 11, event.kind)
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
    look: Any = {"color": LINE, "linewidth": 0.6, "alpha": 0.7, "zorder": 0}
    if event.kind != "backward":
        color, dash = style.kind(event.kind)
        alpha = 0.25 if faint else 1.0
        look = {"color": color, "linewidth": 1.8, "alpha": alpha, "zorder": 1}
        look["dash"] = dash
    canvas.upright(x, top, bottom, **look)


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
    line: Any = {"color": LINE, "linewidth": 0.6, "alpha": 0.8, "zorder": 0}
    canvas.level(10, canvas.width - 10, y, **line)
    room = canvas.width - 30 - text_width(what, 11)
    name = words.shorten(name, int(room / text_width("x", 12.5)))
    canvas.text(10, middle, name, size=12.5, mono=mono)
    canvas.text(canvas.width - 10, middle, what, color=MUTED, ha="right")
    return y + _NAME


# --- bytes and norms ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """Values of each event below a timeline: areas in front of each other, each with its key, and in words."""

    name: str
    areas: list[tuple[np.ndarray, Key]]
    most: str
    texts: tuple[str, ...] = ()

    def keys(self) -> list[Key]:
        """Return the entries of a legend for what there is."""
        keys = []
        for values, key in self.areas:
            if key.text and (values > 0).any():
                keys.append(key)
        return keys

    def draw(self, canvas: Canvas, columns: EventColumns, top: float) -> float:
        """Draw it, and return where it ends."""
        top = draw_name(canvas, self.name, f"0 to {self.most}", top)
        base = top + _STRIP - 4
        edges = [columns.x(i) for i in range(len(columns.events) + 1)]
        most = max(float(values.max()) for values, _ in self.areas) or 1.0
        scale = (_STRIP - 18) / most
        for values, key in self.areas:
            canvas.axes.stairs(
                base - scale * values,
                edges,
                baseline=base,
                fill=True,
                color=key.color,
                alpha=key.alpha,
                linewidth=0,
                clip_on=False,
                zorder=2,
            )
        canvas.level(columns.left, columns.end, base, color=LINE, linewidth=0.8)
        for i, text in enumerate(self.texts):
            if text_width(text, 11) <= columns.width - 4:
                canvas.text(columns.middle(i), top + 6, text, ha="center")
        return top + _STRIP


def saved_strips(events: Sequence[Event]) -> list[Strip]:
    """Return the strip of the bytes of saved tensors, where they were measured at every backward."""
    before = np.array([event.saved_before for event in events], float)
    after = np.array([event.saved_after for event in events], float)
    is_backward = np.array([event.kind == "backward" for event in events])
    if not is_backward.any() or np.isnan(before[is_backward]).any():
        return []
    texts = []
    for event in events:
        is_measured = math.isfinite(event.saved_before)
        sizes = f"{style.size(event.saved_before)} → {style.size(event.saved_after)}"
        texts.append(sizes if is_measured else "")
    before_key = Key("saved before the backward", MUTED, _BEHIND, kind="fill")
    after_key = Key("saved after it", MUTED, _IN_FRONT, kind="fill")
    areas = [(np.nan_to_num(before), before_key), (np.nan_to_num(after), after_key)]
    most = style.size(float(np.nanmax(before)))
    return [Strip("saved tensors", areas, most, tuple(texts))]


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
        self.bars, _ = bars(ledger, [event.index for event in columns.events])
        self.width = min(max(0.8 * columns.width, _SLIM), _WIDEST)
        self.colors = style.label_colors(ledger.labels)
        # Whether a sum had no room.
        self.left_out = False

    def keys(self) -> list[Key]:
        """Return the entries of the legend."""
        if not self.bars:
            return []
        whole = among(self.ledger) or "the mean of one loss"
        keys = [Key(f"share 1: {whole}", INK, kind="dashed")]
        parts = [part for bar in self.bars for part in bar.segments]
        if any(part.unknown for part in parts):
            keys.append(Key("unknown share", MUTED, 0.0, "xx"))
        return keys

    def draw(self, canvas: Canvas, columns: EventColumns, top: float) -> float:
        """Draw them, each sum where it has room, and a dashed line at 1; return where they end."""
        if not self.bars:
            return top
        top = draw_name(canvas, "shares of the step", "", top)
        low, high = reach(self.bars)
        scale = (_SHARES - 26) / (high - low)
        zero = top + 18 + high * scale
        left, end = columns.left, columns.end
        canvas.level(left, end, zero, color=MUTED, linewidth=0.9, zorder=1)
        positions = {event.index: i for i, event in enumerate(columns.events)}
        steps = [
            positions[step] for step in dict.fromkeys(bar.step for bar in self.bars)
        ]
        apart = int(np.diff(steps).min(initial=2))
        for step, of_step in groupby(self.bars, key=attrgetter("step")):
            beside = list(of_step)
            width = self.width / len(beside)
            # A lone bar's sum may be as wide as the way to the next one's.
            room = width if len(beside) > 1 else apart * columns.width
            x = columns.middle(positions[step]) - self.width / 2
            for bar in beside:
                gap = min(2.0, width / 4)
                place = _BarPlace(x, width - gap, zero, scale)
                self._draw_bar(canvas, bar, place, room)
                x += width
        for one in (1, -1) if low < 0 else (1,):
            y = zero - one * scale
            # Above bars, and below what is written.
            canvas.level(left, end, y, linewidth=1.2, dash=(4.44, 1.92), zorder=2.5)
            canvas.text(end + 5, y, style.number(one))
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
