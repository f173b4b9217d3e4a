"""Draw the columns of a timeline: one for each event, with its heading, and shares and bytes below."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from accumviz.views.shares import ShareBar, among, reach

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
# The bytes of saved tensors, those behind first: what the legend says, and how opaque they are.
_SAVED = (
    ("saved_before", "saved before the backward", 0.5),
    ("saved_after", "saved after it", 0.95),
)
# How a place looks where nothing was measured.
_UNMEASURED: dict[str, Any] = {"edge": MUTED, "hatch": "xx", "linewidth": 0}


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
            canvas.text(
                middle,
                top - 8,
                _title(event),
                size=_TURNED,
                rotation=90,
            )
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
    if event.kind == "backward":
        canvas.upright(x, top, bottom, color=LINE, linewidth=0.6, alpha=0.7, zorder=0)
        return
    color, dash = style.kind(event.kind)
    canvas.upright(
        x,
        top,
        bottom,
        color=color,
        linewidth=1.8,
        alpha=0.25 if faint else 1.0,
        dash=dash,
        zorder=1,
    )


def rule_keys(events: Sequence[Event]) -> list[Key]:
    """Return the entries of a legend for the lines of these events."""
    keys = []
    for kind, (color, dashes) in style.rules(events).items():
        keys.append(Key(kind, color, kind="rule", dashes=dashes))
    return keys


def draw_name(
    canvas: Canvas,
    name: str,
    what: str,
    y: float,
    *,
    mono: bool = False,
) -> float:
    """Write a name above what it is of, with what is drawn there at the other end; return where that begins."""
    middle = y + _NAME / 2
    canvas.level(
        10,
        canvas.width - 10,
        y,
        color=LINE,
        linewidth=0.6,
        alpha=0.8,
        zorder=0,
    )
    room = canvas.width - 30 - text_width(what, 11)
    name = words.shorten(name, int(room / text_width("x", 12.5)))
    canvas.text(10, middle, name, size=12.5, mono=mono)
    canvas.text(
        canvas.width - 10,
        middle,
        what,
        color=MUTED,
        ha="right",
    )
    return y + _NAME


# --- bytes ----------------------------------------------------------------------------------------


def draw_saved(
    canvas: Canvas, columns: EventColumns, top: float
) -> tuple[float, list[Key]]:
    """Draw the bytes of saved tensors, where any backward was measured; return where they end, and their legend."""
    backwards = [i for i, one in enumerate(columns.events) if one.kind == "backward"]
    sizes = [columns.events[i].saved_before for i in backwards]
    most = max((size for size in sizes if not math.isnan(size)), default=math.nan)
    if math.isnan(most):
        return top, []
    top = draw_name(canvas, "saved tensors", f"0 to {style.size(most)}", top)
    base = top + _STRIP - 4
    keys = _draw_stairs(canvas, columns, base, (_STRIP - 18) / (most or 1.0))
    canvas.level(columns.left, columns.end, base, color=LINE, linewidth=0.8)
    for i, size in zip(backwards, sizes, strict=True):
        if math.isnan(size):
            x = columns.left + columns.width * i
            canvas.box(x, top + 14, columns.width, base - top - 14, **_UNMEASURED)
        else:
            _write_sizes(canvas, columns, i, top + 6)
    if any(map(math.isnan, sizes)):
        keys.append(Key("not measured", MUTED, 0, hatch="xx"))
    return top + _STRIP, keys


def _draw_stairs(
    canvas: Canvas, columns: EventColumns, base: float, scale: float
) -> list[Key]:
    """Draw the bytes as steps above `base`, with so many pixels a byte; return their legend."""
    edges = columns.left + columns.width * np.arange(len(columns.events) + 1)
    keys = []
    for side, text, alpha in _SAVED:
        values = np.nan_to_num([getattr(event, side) for event in columns.events])
        canvas.axes.stairs(
            base - scale * values,
            edges,
            baseline=base,
            fill=True,
            color=MUTED,
            alpha=alpha,
            linewidth=0,
            clip_on=False,
            zorder=2,
        )
        if values.any():
            keys.append(Key(text, MUTED, alpha, kind="fill"))
    return keys


def _write_sizes(canvas: Canvas, columns: EventColumns, i: int, y: float) -> None:
    """Write the bytes saved before and after a backward, where they have room."""
    event = columns.events[i]
    text = f"{style.size(event.saved_before)} → {style.size(event.saved_after)}"
    if text_width(text, 11) <= columns.width - 4:
        canvas.text(columns.middle(i), y, text, ha="center")


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


def share_keys(ledger: Ledger, shown: Sequence[ShareBar]) -> list[Key]:
    """Return the entries of a legend for these bars of shares."""
    if not shown:
        return []
    whole = among(ledger) or "the mean of one loss"
    keys = [Key(f"share 1: {whole}", INK, kind="dashed")]
    if any(part.unknown for bar in shown for part in bar.segments):
        keys.append(Key("unknown share", MUTED, 0.0, "xx"))
    return keys


def draw_shares(
    canvas: Canvas, columns: EventColumns, shown: Sequence[ShareBar], top: float
) -> tuple[float, bool]:
    """Draw bars of shares to one scale, and a dashed line at 1; return where they end, and if all sums had room."""
    if not shown:
        return top, True
    top = draw_name(canvas, "shares of the step", "", top)
    low, high = reach(shown)
    scale = (_SHARES - 26) / (high - low)
    zero = top + 18 + high * scale
    canvas.level(columns.left, columns.end, zero, color=MUTED, linewidth=0.9, zorder=1)
    had_room = _draw_bars(canvas, columns, shown, zero, scale)
    for one in (1, -1) if low < 0 else (1,):
        y = zero - one * scale
        # Above bars, and below what is written.
        canvas.level(
            columns.left,
            columns.end,
            y,
            linewidth=1.2,
            dash=(4.44, 1.92),
            zorder=2.5,
        )
        canvas.text(columns.end + 5, y, style.number(one))
    return top + _SHARES, had_room


def _draw_bars(
    canvas: Canvas,
    columns: EventColumns,
    shown: Sequence[ShareBar],
    zero: float,
    scale: float,
) -> bool:
    """Draw the bars of each step beside each other, with their sums; return if all of these had room."""
    positions = {event.index: i for i, event in enumerate(columns.events)}
    steps = [positions[step] for step in dict.fromkeys(bar.step for bar in shown)]
    apart = int(np.diff(steps).min(initial=2))
    whole = min(max(0.8 * columns.width, _SLIM), _WIDEST)
    had_room = True
    for step, of_step in groupby(shown, key=attrgetter("step")):
        beside = list(of_step)
        width = whole / len(beside)
        # A lone bar's sum may be as wide as the way to the next one's.
        room = width if len(beside) > 1 else apart * columns.width
        x = columns.middle(positions[step]) - whole / 2
        for bar in beside:
            place = _BarPlace(
                x,
                width - min(2.0, width / 4),
                zero,
                scale,
            )
            _draw_bar(canvas, bar, place)
            had_room &= _write_sum(canvas, bar, place, room)
            x += width
    return had_room


def _draw_bar(canvas: Canvas, bar: ShareBar, place: _BarPlace) -> None:
    for part in bar.segments:
        height = abs(part.length) * place.scale
        highest = max(part.start, part.start + part.length)
        y = place.zero - highest * place.scale
        # A thin line between segments keeps them apart; one as thick as they are would be all there is.
        shown = height - 1.0 if height > _THIN else height
        looks: dict[str, dict[str, Any]] = {
            "new": {"fill": bar.color},
            "used": {"edge": bar.color},
            "unseen": {"edge": MUTED, "hatch": "xx"},
        }
        if height:
            canvas.box(place.x, y, place.width, shown, **looks[part.look])
        # A lone part is its own sum, which stands at the end of the bar.
        if len(bar.segments) > 1 and part.look == "new":
            line = place.zero - math.copysign(place.scale, part.length)
            ink = style.ink_on(bar.color)
            _write_share(canvas, part.text, place, clear_of(y, shown, line), ink)


def _write_share(
    canvas: Canvas, text: str, place: _BarPlace, free: tuple[float, float], ink: str
) -> None:
    """Write a share into its segment, where there is room: the middle of what is free, and its height."""
    middle, room = free
    if room >= 12 and text_width(text, 11) <= place.width - 2:
        canvas.text(place.middle, middle, text, ha="center", color=ink)


def _write_sum(
    canvas: Canvas,
    bar: ShareBar,
    place: _BarPlace,
    room: float,
) -> bool:
    """Write what a bar adds to beyond its end, and return whether that had room."""
    if text_width(bar.total, 11, bold=True) > room - 3:
        return False
    y = place.zero - max(bar.ends[1], 0.0) * place.scale - 9
    canvas.text(
        place.middle,
        y,
        bar.total,
        weight="bold",
        ha="center",
        ground=True,
    )
    return True
