"""Paint the timeline of a ledger with matplotlib: a column for each event, with a lane of bars for each parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.ledger import Event, Ledger, Parameter, Recorded, recorded
from accumviz.views import style, words
from accumviz.views.figure import (
    INK,
    LINE,
    LIVE,
    MUTED,
    PHONE,
    WIDE,
    Canvas,
    Key,
    PageFigure,
    clear_of,
    draw_legend,
    drawing,
    text_width,
)
from accumviz.views.layout import (
    MOST_EVENTS,
    MOST_LANES,
    SCALED,
    Bar,
    Lane,
    Part,
    lay_out,
    part_keys,
    part_texts,
)
from accumviz.views.shares import ShareBar, among, bars, reach

_LEFT = 14.0
# How narrow a column of bars may be, on a page and on a phone, and how wide.
_NARROWEST = 21.0
_TIGHT = 13.0
_WIDEST_COLUMN = 112.0
# How tall a lane is: one, two or three, more.
_LANES = (150.0, 112.0, 88.0)
# Room beyond the ends of bars, for their totals.
_TOTAL = 27.0
# From this width on, a column has room for a word.
_WORDY = 36.0
# A part that is thinner has no outline: the outlines would be all of it.
_THIN_PART = 4.0
# The opacity of the looks of parts, and their hatching.
_LOOKS = {
    "new": (1.0, None),
    "live": (LIVE, None),
    "used": (0.0, None),
    "unseen": (0.0, "xx"),
}
# From this width on, a heading stands upright in three lines; else its letters are turned, and so large.
_UPRIGHT = 66.0
_TURNED = 11.5
# How tall the line of a name is, and the bars of shares.
_NAME = 20.0
_SHARES = 92.0
# A thinner segment of a bar of shares has no gap to the next; how wide bars are at most, and at least.
_THIN_SEGMENT = 3.0
_WIDEST_BAR = 64.0
_SLIMMEST_BAR = 14.0


def timeline(
    ledger: Ledger | Recorded,
    *,
    parameters: Iterable[str | int] | None = None,
    events: slice = slice(None),
) -> PageFigure:
    """Draw what every event added to, and left in, each `.grad`.

    Each parameter is one lane, with the contributions live in `.grad` as stacked bars and the
    numbers that have room. `parameters` are names or indices, `events` a slice; of more than 8
    parameters or 96 events the first ones are drawn, and a note says so: a large ledger is for
    `av.play`.

    Raises `KeyError` for an unknown parameter, `TypeError` for events that are no slice.

    >>> import accumviz as av
    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = av.Ledger.build([Parameter("w", shape=(1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ... ])
    >>> av.timeline(ledger).words[1]
    'Event 0, backward: w receives −16, .grad −16.'
    """
    ledger = recorded(ledger, "timeline")
    every = range(len(ledger.parameters))
    rows = list(map(ledger.index, every if parameters is None else parameters))
    if not isinstance(events, slice):
        raise TypeError(f"events={events!r:.80}; expected a slice, as in slice(0, 8)")
    chosen = list(range(len(ledger))[events])
    story = words.story(ledger, chosen, rows)
    with drawing():
        if not chosen or not rows:
            figure = _nothing("parameter" if chosen else "event")
        else:
            figure = _draw(ledger, rows, chosen, WIDE)
            width = 72 * figure.get_size_inches()[0]
            # What does not fit on a page scrolls there, and on a phone, too.
            if PHONE < width <= WIDE:
                figure.narrow = _draw(ledger, rows, chosen, PHONE)
                figure.narrow.words = story
    figure.words = story
    return figure


def _nothing(what: str) -> PageFigure:
    canvas = Canvas(420)
    text = f"Nothing to show: this ledger has no {what}."
    canvas.text(12, 20, text, size=12, color=MUTED)
    return canvas.finish(40)


def _draw(
    ledger: Ledger,
    rows: list[int],
    events: list[int],
    width: float,
) -> PageFigure:
    """Paint the first lanes below their names; what is wider than the page scrolls there."""
    is_phone = width <= PHONE
    # Free at the right, where the dashed line of the shares is named.
    right = 16.0 if is_phone else 24.0
    narrowest = _TIGHT if is_phone else _NARROWEST
    shown = [ledger[e] for e in events[:MOST_EVENTS]]
    room = (width - _LEFT - right) / len(shown)
    columns = _Columns(_LEFT, min(max(room, narrowest), _WIDEST_COLUMN), shown)
    canvas = Canvas(max(columns.end + right, min(width, 400.0)))
    lanes = lay_out(ledger, rows[:MOST_LANES], events[:MOST_EVENTS])
    painter = _Painter(canvas, ledger, columns, lanes)
    if len(rows) > MOST_LANES:
        painter.notes.append(f"The first {MOST_LANES} of {len(rows)} parameters.")
    if len(events) > MOST_EVENTS:
        painter.notes.append(f"The first {MOST_EVENTS} of {len(events):,} events.")
    return painter.paint()


class _Place(NamedTuple):
    """Where a lane stands: its edges, its zero line, and its pixels per unit."""

    top: float
    bottom: float
    zero: float
    scale: float

    @classmethod
    def of(cls, lane: Lane, top: float, tall: float) -> _Place:
        """Return the place of a lane, with room for totals beyond the ends of its bars."""
        low, high = lane.reach
        units = (high - low) or 1.0
        scale = (tall - 2 * _TOTAL) / units
        zero = top + _TOTAL + high * scale
        return cls(top, top + tall, zero, scale)

    def y(self, value: float) -> float:
        """Return where a value stands."""
        return self.zero - value * self.scale


class _Painter:
    """The canvas of one timeline with lanes, and what is painted on it."""

    def __init__(
        self, canvas: Canvas, ledger: Ledger, columns: _Columns, lanes: list[Lane]
    ) -> None:
        self.canvas = canvas
        self.ledger = ledger
        self.columns = columns
        self.lanes = lanes
        self._bars = [bar for lane in lanes for bar in lane.bars]
        self.colors = style.label_colors(ledger.labels)
        self.bar = min(columns.width * 0.66, 52.0)
        self.notes: list[str] = []
        self.is_wordy = columns.width >= _WORDY
        # Whether a total had no room, and a line was faint.
        self.left_out = False
        self.foreign = False

    def paint(self) -> PageFigure:
        """Paint headings, lanes, shares and the legend, from the top."""
        canvas = self.canvas
        columns = self.columns
        y = _heading_height(columns)
        _draw_headings(canvas, columns, y)
        tall = _LANES[min(len(self.lanes) // 2, 2)]
        for lane in self.lanes:
            what = "number" if lane.signed else "norm ‖·‖"
            top = _draw_name(canvas, lane.name, what, y, mono=True)
            self._lane(lane, _Place.of(lane, top, tall))
            y = top + tall
        y, share_keys = self._shares(y)
        keys = self._keys() + share_keys
        bottom = draw_legend(canvas, keys, self._notes(), y + 12)
        return canvas.finish(bottom + 6)

    def _shares(self, top: float) -> tuple[float, list[Key]]:
        """Draw bars of shares to one scale, and a dashed line at 1; return where they end, and their legend."""
        canvas = self.canvas
        columns = self.columns
        shown, _ = bars(self.ledger, [event.index for event in columns.events])
        if not shown:
            return top, []
        top = _draw_name(canvas, "shares of the step", "", top)
        low, high = reach(shown)
        scale = (_SHARES - 26) / (high - low)
        zero = top + 18 + high * scale
        canvas.level(
            columns.left, columns.end, zero, color=MUTED, linewidth=0.9, zorder=1
        )
        self._share_bars(shown, zero, scale)
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
        whole = among(self.ledger) or "the mean of one loss"
        keys = [Key(f"share 1: {whole}", INK, kind="dashed")]
        if any(part.unknown for bar in shown for part in bar.segments):
            keys.append(Key("unknown share", MUTED, 0.0, "xx"))
        return top + _SHARES, keys

    def _share_bars(self, shown: Sequence[ShareBar], zero: float, scale: float) -> None:
        """Draw the bars of each step beside each other, with their sums."""
        columns = self.columns
        positions = {event.index: i for i, event in enumerate(columns.events)}
        steps = [positions[step] for step in dict.fromkeys(bar.step for bar in shown)]
        apart = int(np.diff(steps).min(initial=2))
        whole = min(max(0.8 * columns.width, _SLIMMEST_BAR), _WIDEST_BAR)
        for step, of_step in itertools.groupby(shown, key=attrgetter("step")):
            beside = list(of_step)
            width = whole / len(beside)
            # A lone bar's sum may be as wide as the way to the next one's.
            room = width if len(beside) > 1 else apart * columns.width
            x = columns.middle(positions[step]) - whole / 2
            for bar in beside:
                place = _SharePlace(x, width - min(2.0, width / 4), zero, scale)
                _draw_share_bar(self.canvas, bar, place)
                if text_width(bar.total, 11, bold=True) <= room - 3:
                    _write_sum(self.canvas, bar, place)
                else:
                    self.left_out = True
                x += width

    def _lane(self, lane: Lane, place: _Place) -> None:
        canvas = self.canvas
        columns = self.columns
        self._rules(lane, place)
        canvas.level(
            columns.left,
            columns.end,
            place.zero,
            color=MUTED,
            linewidth=0.9,
            zorder=1,
        )
        digits = 4 if self.is_wordy else 3
        totals = [style.number(bar.grad, digits) for bar in lane.bars]
        rooms = self._rooms(totals)
        for i, bar in enumerate(lane.bars):
            if bar.state == "whole":
                self._bar(bar, place, i)
            if bar.state == "none":
                self._absent(place, i)
            else:
                self._total(bar, place, i, totals[i], rooms[i])
            self._erased(lane, place, i)

    def _rules(self, lane: Lane, place: _Place) -> None:
        """Draw the line of each event across a lane."""
        parameter = self.ledger.parameters[lane.parameter]
        for i, event in enumerate(self.columns.events):
            faint = _is_foreign(self.ledger, event, parameter)
            self.foreign |= faint
            x = self.columns.x(i)
            _draw_rule(
                self.canvas,
                event,
                x,
                place.top,
                place.bottom,
                faint=faint,
            )

    def _rooms(self, totals: list[str]) -> list[float]:
        """Return the room of each total: a column if all fit there, else two, where a step used it."""
        column = self.columns.width
        if max(map(_total_width, totals)) <= column:
            return [column] * len(totals)
        kinds = [event.kind for event in self.columns.events] + [""]
        rooms = []
        for kind, following in itertools.pairwise(kinds):
            is_used = kind == "step" and following != "step"
            rooms.append(2 * column if is_used else 0.0)
        return rooms

    def _bar(self, bar: Bar, place: _Place, i: int) -> None:
        middle = self.columns.middle(i)
        left = middle - self.bar / 2
        line = place.y(bar.end)
        for part, start, length in bar.pieces():
            top = place.y(max(start, start + length))
            height = abs(length) * place.scale
            self._part(part, left, top, height)
            # A lone part that was there is its own total, which stands at the end.
            if len(bar.parts) > 1 or part.look == "new":
                self._number(part, middle, clear_of(top, height, line))
        right = left + self.bar
        self.canvas.level(
            left - 4,
            right + 4,
            line,
            linewidth=2.6,
            zorder=4,
        )

    def _total(
        self,
        bar: Bar,
        place: _Place,
        i: int,
        text: str,
        room: float,
    ) -> None:
        """Write what a bar comes to beyond its end, where that has room."""
        width = _total_width(text)
        if width > room:
            self.left_out = True
            return
        low, high = bar.reach
        y = place.y(low) + 13 if bar.grad < 0 else place.y(high) - 12
        middle = self.columns.middle(i)
        is_wide = width > self.columns.width
        self.canvas.text(
            middle,
            y,
            text,
            weight="bold",
            ha="center",
            ground=is_wide,
        )

    def _part(
        self,
        part: Part,
        x: float,
        y: float,
        height: float,
    ) -> None:
        canvas = self.canvas
        color = self._color(part)
        alpha, hatch = _LOOKS[part.look]
        if height >= _THIN_PART:
            canvas.box(
                x,
                y + 0.6,
                self.bar,
                height - 1.2,
                fill=color,
                edge=color,
                alpha=alpha,
                hatch=hatch,
                linewidth=1.2,
            )
            return
        # Of one so thin only the sides are outlined: what is hollow stays hollow, what is pale stays pale.
        gap = 1.0 if height > 2 else 0.0
        filled = max(height - gap, 0.8)
        canvas.box(
            x,
            y,
            self.bar,
            filled,
            fill=color,
            alpha=alpha,
        )
        for side in (x, x + self.bar):
            canvas.upright(
                side,
                y,
                y + height,
                color=color,
                linewidth=1.2,
                zorder=2,
            )

    def _color(self, part: Part) -> str:
        if part.born < 0:
            return MUTED
        label = self.ledger[part.born].label
        return self.colors.get(label, MUTED)

    def _number(
        self,
        part: Part,
        x: float,
        free: tuple[float, float],
    ) -> None:
        """Write how much a part is into what is free of it."""
        ink = style.ink_on(self._color(part)) if part.look == "new" else INK
        # On a hatched ground, a number stands in a clear one.
        self.canvas.write_inside(
            x,
            free,
            self.bar,
            style.number(part.amount),
            color=ink,
            ground=part.look == "unseen",
        )

    def _absent(self, place: _Place, i: int) -> None:
        middle = self.columns.middle(i)
        self.canvas.level(
            middle - self.bar / 2,
            middle + self.bar / 2,
            place.zero,
            color=MUTED,
            linewidth=2.2,
            dash=(2.2, 3.63),
        )
        self.canvas.text(
            middle,
            place.zero - 12,
            "None" if self.is_wordy else "∅",
            size=11.5,
            style="italic",
            color=MUTED,
            ha="center",
        )

    def _erased(self, lane: Lane, place: _Place, i: int) -> None:
        """Mark what an event erased before any step used it."""
        event = self.columns.events[i].index
        lost = self.ledger.unconsumed(event).get(lane.name)
        if not lost:
            return
        text = "×"
        if len(lost) == 1:
            amount = words.value(
                self.ledger,
                lost[0],
                lane.parameter,
                "contribution",
            )
            text = f"× {amount}"
        if text_width(text, 11) > self.columns.width:
            text = "×"
        middle = (place.top + place.bottom) / 2
        beside = 18 if place.zero < middle else -18
        self.canvas.text(
            self.columns.middle(i),
            middle + beside,
            text,
            ha="center",
        )

    def _keys(self) -> list[Key]:
        """Return the entries of the legend: only what this figure shows."""
        events = self.columns.events
        keys = self._part_keys()
        keys.append(Key(".grad after the event", INK, kind="total"))
        if any(self.ledger.unconsumed(event.index) for event in events):
            keys.append(Key("erased before any step used it", INK, kind="cross"))
        if any(bar.state == "none" for bar in self._bars):
            sign = "" if self.is_wordy else "∅: "
            keys.append(Key(f"{sign}no .grad (None)", MUTED, kind="dots"))
        for kind, (color, dashes) in style.lines(events).items():
            keys.append(Key(kind, color, kind="rule", dashes=dashes))
        return keys

    def _part_keys(self) -> list[Key]:
        """Return the entries of the legend for the parts of bars."""
        looks = {part.look for bar in self._bars for part in bar.parts}
        keys = []
        texts = part_texts(self.ledger)
        for text, look, color in part_keys(self.colors, looks, texts, MUTED):
            keys.append(Key(text, color, *_LOOKS[look]))
        return keys

    def _notes(self) -> list[str]:
        # By whether its lane is signed, for each bar of several parts.
        split = set()
        for lane in self.lanes:
            if any(len(bar.parts) > 1 for bar in lane.bars):
                split.add(lane.signed)
        scales = {lane.reach for lane in self.lanes} - {(0.0, 0.0)}
        notes = {
            "The recording is incomplete.": not self.ledger.complete,
            "Numbers without room are left out here; they stand in the words below.": self.left_out,
            "The line of an event is faint where it does not concern a parameter.": self.foreign,
            "A bar is as high as the norm of .grad. Norms do not add up, so the bar is divided in proportion to the "
            "norms of its contributions.": False in split,
            "Bars grow from zero, the oldest part first.": bool(split),
            "Each lane has a scale of its own.": len(scales) > 1,
            SCALED: any(bar.scale != 1 for bar in self._bars),
        }
        return self.notes + [note for note, holds in notes.items() if holds]


def _total_width(total: str) -> float:
    return text_width(total, 11, bold=True) + 4


def _is_foreign(ledger: Ledger, event: Event, parameter: Parameter) -> bool:
    """Return whether this was on another rank, or was done by, or to, an optimizer that does not own the parameter."""
    if event.kind == "backward":
        return False
    if event.rank is not None and event.rank != parameter.rank:
        return True
    if event.kind == "step":
        return event.details.get("optimizer_index", 0) not in parameter.optimizers
    names = ledger.meta.get("optimizers", ())
    others = [o for o, name in enumerate(names) if name == event.label]
    return bool(others) and set(others).isdisjoint(parameter.optimizers)


# --- the columns of events ---------------------------------------------------------------------


class _Columns(NamedTuple):
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


def _heading_height(columns: _Columns) -> float:
    """Return how many pixels the headings take above these columns."""
    if columns.width >= _UPRIGHT:
        return 50.0
    titles = list(map(_heading, columns.events))
    return 14 + max(text_width(title, _TURNED) for title in titles)


def _draw_headings(canvas: Canvas, columns: _Columns, top: float) -> None:
    """Name each event above its column, which begins at `top`, and begin its line there."""
    for i, event in enumerate(columns.events):
        x = columns.x(i)
        begin = 4.0
        if columns.width >= _UPRIGHT:
            _draw_upright(canvas, event, x + 7, columns.width)
        else:
            begin = top - 3
            middle = columns.middle(i) + 1
            canvas.text(
                middle,
                top - 8,
                _heading(event),
                size=_TURNED,
                rotation=90,
            )
        if event.kind != "backward":
            _draw_rule(canvas, event, x, begin, top)


def _draw_upright(canvas: Canvas, event: Event, x: float, width: float) -> None:
    """Write a heading upright: the kind, what it acted on, the user's line."""
    is_sync = event.kind == "sync"
    room = int((width - 10) / text_width("x", 11))
    if is_sync:
        room += 1  # its letters are narrower than those of code
    about = "skipped" if event.skipped else words.shorten(words.subject(event), room)
    is_code = not is_sync and not event.skipped
    where = words.shorten(words.place(event), room)
    where_y = 40 if about else 26
    canvas.text(x, 11, event.kind)
    canvas.text(x, 26, about, mono=is_code)
    canvas.text(x, where_y, where, color=MUTED)


def _heading(event: Event) -> str:
    rank = "" if event.rank is None else f"rank {event.rank} "
    # To whom it was done may be cut; what was done is what the column shows.
    subject = words.shorten(words.subject(event), 12)
    return f"{rank}{words.action(event)} {subject}".strip()


def _draw_rule(
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


def _draw_name(
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


# --- shares ---------------------------------------------------------------------------------------


class _SharePlace(NamedTuple):
    """Where a bar is drawn: from `x` on, so wide, on the line at `zero`, with so many pixels for a share of 1."""

    x: float
    width: float
    zero: float
    scale: float

    @property
    def middle(self) -> float:
        """Where its texts stand."""
        return self.x + self.width / 2


def _draw_share_bar(canvas: Canvas, bar: ShareBar, place: _SharePlace) -> None:
    for part in bar.segments:
        height = abs(part.length) * place.scale
        highest = max(part.start, part.start + part.length)
        y = place.zero - highest * place.scale
        # A thin line between segments keeps them apart; one as thick as they are would be all there is.
        shown = height - 1.0 if height > _THIN_SEGMENT else height
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
            free = clear_of(y, shown, line)
            canvas.write_inside(place.middle, free, place.width, part.text, color=ink)


def _write_sum(canvas: Canvas, bar: ShareBar, place: _SharePlace) -> None:
    """Write what a bar adds to beyond its end."""
    y = place.zero - max(bar.ends[1], 0.0) * place.scale - 9
    canvas.text(
        place.middle,
        y,
        bar.total,
        weight="bold",
        ha="center",
        ground=True,
    )
