"""Paint the timeline of a ledger with matplotlib: lanes of bars below the columns of events."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from accumviz.ledger.ledger import Event, Ledger, Parameter, Recorded, recorded
from accumviz.views import style, words
from accumviz.views.columns import (
    EventColumns,
    draw_headings,
    draw_name,
    draw_rule,
    draw_saved,
    draw_shares,
    heading_height,
    rule_keys,
    share_keys,
)
from accumviz.views.figure import (
    INK,
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
from accumviz.views.shares import bars

_LEFT = 14.0
# How narrow a column of bars may be, on a page and on a phone, and how wide.
_NARROWEST = 21.0
_TIGHT = 13.0
_WIDEST = 112.0
# How tall a lane is: one, two or three, more.
_LANES = (150.0, 112.0, 88.0)
# Room beyond the ends of bars, for their totals.
_TOTAL = 27.0
# From this width on, a column has room for a word.
_WORDY = 36.0
# A part that is thinner has no outline: the outlines would be all of it.
_THIN = 4.0
# The opacity of the looks of parts, and their hatching.
_LOOKS = {
    "new": (1.0, None),
    "live": (LIVE, None),
    "used": (0.0, None),
    "unseen": (0.0, "xx"),
}


def timeline(
    ledger: Ledger | Recorded,
    *,
    parameters: str | int | Iterable[str | int] | None = None,
    events: slice | Iterable[int] | None = None,
) -> PageFigure:
    """Draw what every event added to, and left in, each `.grad`.

    Each parameter is one lane, with the contributions live in `.grad` as stacked bars and the
    numbers that have room. `parameters` are names, indices or patterns (`"encoder.*"`), `events`
    a slice or indices; of more than 8 parameters or 96 events the first ones are drawn, and a note
    says so: a large ledger is for `av.play`.

    Raises `KeyError` for an unknown parameter, `IndexError` for an unknown event, `TypeError` for
    what is neither.

    >>> import accumviz as av
    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = av.Ledger.build([Parameter("w", shape=(1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ... ])
    >>> av.timeline(ledger).words[1]
    'Event 0, backward: w receives −16, .grad −16.'
    """
    ledger = recorded(ledger, "timeline")
    rows = _parameters(ledger, parameters)
    chosen = _events(ledger, events)
    with drawing():
        if not chosen or not rows:
            figure = _nothing("parameter" if chosen else "event")
        else:
            figure = _draw(ledger, rows, chosen, WIDE)
            width = 72 * figure.get_size_inches()[0]
            # What does not fit on a page scrolls there, and on a phone, too.
            if PHONE < width <= WIDE:
                figure.narrow = _draw(ledger, rows, chosen, PHONE)
    figure.words = words.story(ledger, chosen, rows)
    if figure.narrow is not None:
        figure.narrow.words = figure.words
    return figure


def _nothing(what: str) -> PageFigure:
    canvas = Canvas(420)
    text = f"Nothing to show: this ledger has no {what}."
    canvas.text(12, 20, text, size=12, color=MUTED)
    return canvas.finish(40)


def _parameters(
    ledger: Ledger, wanted: str | int | Iterable[str | int] | None
) -> list[int]:
    if wanted is None:
        return list(range(len(ledger.parameters)))
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        wanted = [wanted]
    chosen: list[int] = []
    for one in wanted:
        matches = _matching(ledger, one) if isinstance(one, str) else []
        chosen += matches or [ledger.index(one)]
    return list(dict.fromkeys(chosen))


def _matching(ledger: Ledger, pattern: str) -> list[int]:
    matches = []
    for p, parameter in enumerate(ledger.parameters):
        if fnmatch.fnmatch(parameter.name, pattern):
            matches.append(p)
    return matches


def _events(ledger: Ledger, wanted: slice | Iterable[int] | None) -> list[int]:
    every = range(len(ledger))
    expected = (
        f"events={wanted!r:.80}; expected a slice or indices of "
        f"this ledger's {len(ledger)} events, as in events=[0]"
    )
    try:
        if wanted is None or isinstance(wanted, slice):
            return list(every[wanted or slice(None)])
        return sorted({every[e] for e in wanted})
    except (IndexError, TypeError) as error:
        raise type(error)(expected) from None


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
    columns = EventColumns(_LEFT, min(max(room, narrowest), _WIDEST), shown)
    canvas = Canvas(max(columns.end + right, min(width, 400.0)))
    lanes = lay_out(ledger, rows[:MOST_LANES], events[:MOST_EVENTS])
    painter = _Painter(canvas, ledger, columns, lanes)
    if len(rows) > MOST_LANES:
        painter.notes.append(f"The first {MOST_LANES} of {len(rows)} parameters.")
    if len(events) > MOST_EVENTS:
        painter.notes.append(f"The first {MOST_EVENTS} of {len(events):,} events.")
    return painter.paint()


@dataclass(frozen=True)
class _Place:
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
        self, canvas: Canvas, ledger: Ledger, columns: EventColumns, lanes: list[Lane]
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
        """Paint headings, lanes, shares, bytes and the legend, from the top."""
        canvas = self.canvas
        columns = self.columns
        y = heading_height(columns)
        draw_headings(canvas, columns, 0.0, y)
        tall = _LANES[min(len(self.lanes) // 2, 2)]
        for lane in self.lanes:
            what = "number" if lane.signed else "norm ‖·‖"
            top = draw_name(canvas, lane.name, what, y, mono=True)
            self._lane(lane, _Place.of(lane, top, tall))
            y = top + tall
        shares, _ = bars(self.ledger, [event.index for event in columns.events])
        y, had_room = draw_shares(canvas, columns, shares, y)
        self.left_out |= not had_room
        keys = self._keys() + share_keys(self.ledger, shares)
        y, saved_keys = draw_saved(canvas, columns, y)
        keys += saved_keys
        bottom = draw_legend(canvas, keys, self._notes(), y + 12)
        return canvas.finish(bottom + 6)

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
            if bar.state == "none":
                self._absent(place, i)
            elif bar.state == "broken":
                self._broken(place, i, totals[i])
            else:
                self._bar(bar, place, i)
                self._total(bar, place, i, totals[i], rooms[i])
            self._erased(lane, place, i)

    def _rules(self, lane: Lane, place: _Place) -> None:
        """Draw the line of each event across a lane."""
        parameter = self.ledger.parameters[lane.parameter]
        for i, event in enumerate(self.columns.events):
            faint = _is_foreign(self.ledger, event, parameter)
            self.foreign |= faint
            x = self.columns.x(i)
            draw_rule(
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
        if max(_total_width(total) for total in totals) <= column:
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
        if height >= _THIN:
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
        """Write how much a part is into it, where there is room: the middle of what is free, and its height."""
        text = style.number(part.amount)
        middle, room = free
        if room < 14 or text_width(text, 11) > self.bar - 3:
            return
        ink = style.ink_on(self._color(part)) if part.look == "new" else INK
        # On a hatched ground, a number stands in a clear one.
        ground = part.look == "unseen"
        self.canvas.text(
            x,
            middle,
            text,
            ha="center",
            color=ink,
            ground=ground,
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

    def _broken(self, place: _Place, i: int, text: str) -> None:
        middle = self.columns.middle(i)
        top = place.top + 26
        self.canvas.box(
            middle - self.bar / 2,
            top,
            self.bar,
            place.bottom - 10 - top,
            edge=INK,
            hatch="///",
            linewidth=1.2,
            zorder=3,
        )
        self.canvas.text(
            middle,
            place.top + 12,
            text,
            weight="bold",
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
        states = {bar.state for bar in self._bars}
        if "broken" in states:
            keys.append(Key("not finite", INK, 0.0, "///"))
        if "none" in states:
            sign = "" if self.is_wordy else "∅: "
            keys.append(Key(f"{sign}no .grad (None)", MUTED, kind="dots"))
        return keys + rule_keys(events)

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
        split = {lane.signed for lane in self.lanes if _has_split_bars(lane)}
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


def _has_split_bars(lane: Lane) -> bool:
    return any(len(bar.parts) > 1 for bar in lane.bars)


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
