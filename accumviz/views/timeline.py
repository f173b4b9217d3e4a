"""Paint the timeline of a ledger with matplotlib: lanes of bars while numbers can be written, else a heat map."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from accumviz.ledger.ledger import Event, Ledger, Parameter, Recorded, recorded
from accumviz.show import counted
from accumviz.views import heatmap, style, words
from accumviz.views.columns import (
    STRIP,
    EventColumns,
    Strip,
    draw_headings,
    draw_rule,
    heading_height,
    rule_keys,
    strips_of,
)
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
    text_width,
)
from accumviz.views.layout import LOOKS, MOST_LANES, Lane, LaneBar, LanePart, lay_out
from accumviz.views.sharebars import ShareStrip

_LEFT, _NARROWEST, _TIGHT, _WIDEST = 14.0, 21.0, 13.0, 112.0
# How tall the line of a lane's name is, and a lane: one, two or three, more.
_NAMED, _TALL = 20.0, (150.0, 112.0, 88.0)
# Room beyond the end of a bar for its total; where none is, for "None"; and for nothing.
_TOTAL, _NONE, _CLEAR = 27.0, 23.0, 15.0
# From these widths on, a column has room for a word, and for the number of what was erased.
_WORDY, _SPACIOUS = 36.0, 80.0
# A part that is thinner has no outline: the outlines would be all of it.
_THIN = 4.0
# What the legend says of the looks of parts, their opacity and their hatching.
_LOOKS = {
    "new": ("added by this backward", 1.0, None),
    "live": ("already in .grad", LIVE, None),
    "used": ("already used by a step", 0.0, None),
    "unseen": ("not from a recorded backward", 0.0, "xx"),
}


def timeline(
    ledger: Ledger | Recorded,
    *,
    parameters: str | int | Iterable[str | int] | None = None,
    events: slice | Iterable[int] | None = None,
) -> PageFigure:
    """Draw what every event added to, and left in, each `.grad`.

    A small ledger becomes one lane per parameter, with the contributions live in `.grad` as
    stacked bars and the numbers that have room; a large one a heat map of contribution norms.
    `parameters` are names, indices or patterns (`"encoder.*"`), `events` a slice or indices.

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
    rows, chosen = _parameters(ledger, parameters), _events(ledger, events)
    if not rows or not chosen:
        figure = _nothing("parameter" if chosen else "event")
    else:
        figure = _draw(ledger, rows, chosen, WIDE)
        if 72 * figure.get_size_inches()[0] > PHONE:
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
    names = [parameter.name for parameter in ledger.parameters]
    chosen: list[int] = []
    for one in wanted:
        pattern = one if isinstance(one, str) else ""
        matches = [i for i, name in enumerate(names) if fnmatch.fnmatch(name, pattern)]
        chosen += matches or [ledger.index(one)]
    return list(dict.fromkeys(chosen))


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
    ledger: Ledger, rows: list[int], events: list[int], width: float
) -> PageFigure:
    """Paint lanes below their names, or a heat map where an event has no column wide enough for a bar."""
    # Free at the right, where the dashed line of the shares is named.
    right = 16.0 if width <= PHONE else 24.0
    room = (width - _LEFT - right) / len(events)
    least = _TIGHT if width <= PHONE else _NARROWEST
    if room < least or len(rows) > MOST_LANES:
        return heatmap.draw(ledger, rows, events, width)
    columns = EventColumns(_LEFT, min(room, _WIDEST), events)
    canvas = Canvas(max(columns.end + right, min(width, 400.0)))
    lanes = lay_out(ledger, rows, events)
    return _Painter(canvas, ledger, columns, lanes).paint()


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
        # Where no bar is, a "None" stands above the line.
        over = _TOTAL if lane.high > 0 else _CLEAR if lane.low < 0 else _NONE
        under = _TOTAL if lane.low < 0 else _CLEAR
        scale = (tall - over - under) / ((lane.high - lane.low) or 1.0)
        return cls(top, top + tall, top + over + lane.high * scale, scale)

    def y(self, value: float) -> float:
        """Return where a value stands."""
        return self.zero - value * self.scale

    def box(self, part: LanePart) -> tuple[float, float]:
        """Return the upper edge of a part and its height."""
        ends = self.y(part.start), self.y(part.start + part.length)
        return min(ends), abs(ends[1] - ends[0])


class _Painter:
    """The canvas of one timeline with lanes, and what is painted on it."""

    def __init__(
        self, canvas: Canvas, ledger: Ledger, columns: EventColumns, lanes: list[Lane]
    ) -> None:
        self.canvas, self.ledger, self.columns = canvas, ledger, columns
        self.lanes = lanes
        self.events = [ledger[e] for e in columns.events]
        self.colors = style.label_colors(ledger.labels)
        self.bar = min(columns.width * 0.66, 52.0)
        self.letters = 12.0 if columns.width >= 44 else 11.0
        self.unwritten = self.foreign = False

    def paint(self) -> PageFigure:
        """Paint headings, lanes, shares, bytes and the legend, from the top."""
        canvas, ledger, columns = self.canvas, self.ledger, self.columns
        y = heading_height(ledger, columns)
        draw_headings(canvas, ledger, columns, 0.0, y)
        tall = _TALL[min(len(self.lanes) // 2, 2)]
        for lane in self.lanes:
            what = "number" if lane.signed else "norm ‖·‖"
            self._name(lane.name, what, y, mono=True)
            self._lane(lane, _Place.of(lane, y + _NAMED, tall))
            y += _NAMED + tall
        shares = ShareStrip.of(ledger, columns.events)
        if shares.bars:
            self._name("shares of the step", "", y)
            shares.draw(canvas, columns, y + _NAMED)
            y += _NAMED + shares.tall
        strips = strips_of(ledger, columns.events)
        for strip in strips:
            self._name(strip.name, f"0 to {strip.most}", y)
            y += _NAMED + STRIP
            strip.draw(canvas, columns, y - 4)
        keys = self._keys(strips) + shares.keys()
        notes = self._notes() + shares.notes(columns)
        return canvas.finish(draw_legend(canvas, keys, notes, y + 12) + 6)

    def _name(self, name: str, what: str, y: float, *, mono: bool = False) -> None:
        """Write a name above its lane, with what its bars are at the other end."""
        canvas = self.canvas
        canvas.level(10, self.columns.end, y, color=LINE, width=0.6, alpha=0.8, z=0)
        what_width = text_width(what, 11)
        room = int((canvas.width - 30 - what_width) / text_width("x", 12.5))
        middle = y + _NAMED / 2
        canvas.text(10, middle, words.shorten(name, room), size=12.5, mono=mono)
        canvas.text(canvas.width - 10, middle, what, color=MUTED, ha="right")

    def _lane(self, lane: Lane, place: _Place) -> None:
        canvas, columns = self.canvas, self.columns
        parameter = self.ledger.parameters[lane.parameter]
        for i, event in enumerate(self.events):
            foreign = _is_foreign(self.ledger, event, parameter)
            self.foreign |= foreign
            ends = columns.x(i), place.top, place.bottom
            draw_rule(canvas, event, *ends, faint=foreign)
        canvas.level(columns.left, columns.end, place.zero, color=MUTED, width=0.9, z=1)
        digits, totals = self._totals(lane)
        self._numbers(lane, place, digits)
        for i, (bar, total) in enumerate(zip(lane.bars, totals, strict=True)):
            if bar.state == "none":
                self._absent(lane, place, i)
            elif bar.state == "broken":
                self._broken(place, i, style.number(bar.grad, digits))
            else:
                self._bar(bar, place, i, total)
            self._erased(lane, place, i, digits)

    def _totals(self, lane: Lane) -> tuple[int, list[str]]:
        """Return the totals in as many digits as have room: all, else those that a step used, else none."""
        width = self.columns.width
        grads = [bar.grad if bar.state == "whole" else None for bar in lane.bars]
        kinds = [*(event.kind for event in self.events), ""]
        used = [
            grad if kind == "step" and following != "step" else None
            for grad, (kind, following) in zip(
                grads, itertools.pairwise(kinds), strict=True
            )
        ]
        for chosen, room in ((grads, width), (used, 2 * width)):
            for digits in (4, 3):
                texts = [style.number(x, digits) for x in chosen if x is not None]
                if all(self._width(text) < room - 4 for text in texts):
                    self.unwritten |= chosen != grads
                    left = iter(texts)
                    return digits, ["" if x is None else next(left) for x in chosen]
        self.unwritten = True
        return 3, [""] * len(grads)

    def _width(self, total: str) -> float:
        return text_width(total, self.letters, bold=True)

    def _bar(self, bar: LaneBar, place: _Place, i: int, total: str) -> None:
        canvas, middle = self.canvas, self.columns.middle(i)
        for part in bar.parts:
            self._part(part, place, middle - self.bar / 2)
        left, right = middle - self.bar / 2 - 4, middle + self.bar / 2 + 4
        canvas.level(left, right, place.y(bar.grad), width=2.6, z=4)
        y = place.y(bar.end) + (13 if bar.grad < 0 else -12)
        # A total that reaches over the next column stands on lines, and clears them.
        wide = self._width(total) > self.columns.width
        canvas.text(
            middle, y, total, size=self.letters, weight="bold", ha="center", ground=wide
        )

    def _part(self, part: LanePart, place: _Place, x: float) -> None:
        canvas, (y, height) = self.canvas, place.box(part)
        color = self._color(part)
        _, alpha, hatch = _LOOKS[part.look]
        if height >= _THIN:
            box = x, y + 0.6, self.bar, height - 1.2
            canvas.box(*box, fill=color, alpha=alpha, edge=color, line=1.2, hatch=hatch)
            return
        # Of one so thin only the sides are outlined: what is hollow stays hollow, what is pale stays pale.
        gap = 1.0 if height > 2 else 0.0
        canvas.box(x, y, self.bar, max(height - gap, 0.8), fill=color, alpha=alpha)
        for side in (x, x + self.bar):
            canvas.upright(side, y, y + height, color=color, width=1.2, z=2)

    def _color(self, part: LanePart) -> str:
        if part.born < 0:
            return MUTED
        return self.colors.get(self.ledger[part.born].label, MUTED)

    def _numbers(self, lane: Lane, place: _Place, digits: int) -> None:
        """Write the amounts of new parts into them if all have room, and then those of old ones."""
        for new in (True, False):
            labels = []
            for i, bar in enumerate(lane.bars):
                for part in bar.parts:
                    # A lone old part is its own total, which stands at the end.
                    alone = len(bar.parts) == 1 and not new
                    tall = abs(part.length) * place.scale >= _THIN
                    if (part.look == "new") == new and tall and not alone:
                        labels.append((i, bar, part))
            if not all(
                self._has_room(bar, part, place, digits) for _, bar, part in labels
            ):
                return
            for i, bar, part in labels:
                self._number(self.columns.middle(i), bar, part, place, digits)

    def _has_room(
        self, bar: LaneBar, part: LanePart, place: _Place, digits: int
    ) -> bool:
        text = style.number(part.amount, digits)
        room = clear_of(*place.box(part), place.y(bar.grad))[1]
        return (
            part.together == 1 and room >= 14 and text_width(text, 11) <= self.bar - 3
        )

    def _number(
        self, x: float, bar: LaneBar, part: LanePart, place: _Place, digits: int
    ) -> None:
        text = style.number(part.amount, digits)
        y = clear_of(*place.box(part), place.y(bar.grad))[0]
        ink = style.ink_on(self._color(part)) if part.look == "new" else INK
        # On a hatched ground, a number stands in a clear one.
        ground = part.look == "unseen"
        self.canvas.text(x, y, text, ha="center", color=ink, ground=ground)

    def _absent(self, lane: Lane, place: _Place, i: int) -> None:
        canvas, middle, half = self.canvas, self.columns.middle(i), self.bar / 2
        ends = middle - half, middle + half, place.zero
        canvas.level(*ends, color=MUTED, width=2.2, dash=":", z=3)
        text = "None" if self.columns.width >= _WORDY else "∅"
        hangs = lane.low < 0 <= -lane.high
        y = place.zero + (12 if hangs else -12)
        canvas.text(
            middle, y, text, size=11.5, slant="italic", color=MUTED, ha="center"
        )

    def _broken(self, place: _Place, i: int, text: str) -> None:
        canvas, middle = self.canvas, self.columns.middle(i)
        # Below the zero line where that stands so high that it would strike the number through.
        low = place.zero < place.top + 26
        top = place.zero + 4 if low else place.top + 26
        tall = place.bottom - (24 if low else 10) - top
        box = middle - self.bar / 2, top, self.bar, tall
        canvas.box(*box, edge=INK, hatch="///", line=1.2, z=3)
        y = place.bottom - 12 if low else place.top + 14
        canvas.text(middle, y, text, size=12, weight="bold", ha="center")

    def _erased(self, lane: Lane, place: _Place, i: int, digits: int) -> None:
        """Mark what an event erased before any step used it."""
        lost = self.ledger.unconsumed(self.columns.events[i]).get(lane.name)
        if not lost:
            return
        text = "×"
        if self.columns.width >= _SPACIOUS:
            amount = words.value(self.ledger, lost[0], lane.parameter, "contribution")
            text = f"× {amount}"
            if len(lost) > 1 or len(text) > 11:
                text = f"× {counted(len(lost), 'part')}"
        middle = (place.top + place.bottom) / 2
        y = middle + (18 if place.zero < middle else -18)
        self.canvas.text(self.columns.middle(i), y, text, ha="center")

    def _keys(self, strips: list[Strip]) -> list[Key]:
        """Return the entries of the legend: only what this figure shows."""
        bars = [bar for lane in self.lanes for bar in lane.bars]
        states = {bar.state for bar in bars}
        keys = self._part_keys([part for bar in bars for part in bar.parts])
        keys.append(Key(".grad after the event", INK, kind="total"))
        if any(self.ledger.unconsumed(e) for e in self.columns.events):
            keys.append(Key("erased before any step used it", INK, kind="cross"))
        if "broken" in states:
            keys.append(Key("not finite", INK, 0.0, "///"))
        if "none" in states:
            sign = "" if self.columns.width >= _WORDY else "∅: "
            keys.append(Key(f"{sign}no .grad (None)", MUTED, kind="dots"))
        keys += rule_keys(self.ledger, self.columns.events)
        for strip in strips:
            keys += strip.keys()
        return keys

    def _part_keys(self, parts: list[LanePart]) -> list[Key]:
        """Return the entries for the colours of losses, where there are several, and for the looks of parts."""
        shown = {self.ledger[part.born].label for part in parts if part.born >= 0}
        colors = {label: ink for label, ink in self.colors.items() if label in shown}
        keys = []
        if len(colors) > 1:
            for label, color in colors.items():
                keys.append(Key(words.shorten(label or "backward", 28), color))
        first, *others = colors.values() or [MUTED]
        looks = {part.look for part in parts}
        for look in LOOKS:
            text, alpha, hatch = _LOOKS[look]
            if look not in looks:
                continue
            if look == "unseen":
                ranks = "from other ranks" if self.ledger.of("sync") else text
                keys.append(Key(ranks, MUTED, alpha, hatch))
            else:
                keys.append(Key(text, first, alpha, beside=tuple(others[:1])))
        return keys

    def _notes(self) -> list[str]:
        split = []
        for lane in self.lanes:
            if any(len(bar.parts) > 1 for bar in lane.bars):
                split.append(lane)
        scales = {(lane.low, lane.high) for lane in self.lanes} - {(0.0, 0.0)}
        said = {
            "The recording is incomplete.": not self.ledger.complete,
            "Totals without room are left out here; they stand in the words below.": self.unwritten,
            "The line of an event is faint where it does not concern a parameter.": self.foreign,
            "Norms do not add up: the parts of a tensor share the height of ‖.grad‖ "
            "in proportion to their own.": not all(lane.signed for lane in split),
            "Bars grow from zero, the oldest part first.": bool(split),
            "Each lane has a scale of its own.": len(scales) > 1,
        }
        return [note for note, holds in said.items() if holds]


def _is_foreign(ledger: Ledger, event: Event, parameter: Parameter) -> bool:
    """Return whether this was on another rank, or was done by, or to, an optimizer that does not own the parameter."""
    if event.kind == "backward":
        return False
    if event.rank is not None and event.rank != parameter.rank:
        return True
    if event.kind == "step":
        return event.details.get("optimizer_index", 0) not in parameter.optimizers
    names = ledger.meta.get("optimizers", ())
    owners = [names[o] for o in parameter.optimizers if o < len(names)]
    return event.label in names and event.label not in owners
