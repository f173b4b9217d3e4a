"""The columns that lanes and heat map share: one for each event, with its heading, its line and its bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from accumviz.ledger.ledger import Event, Ledger
from accumviz.views import style, words
from accumviz.views.figure import INK, LINE, MUTED, Canvas, Key, text_width

# How opaque bytes are: saved before and after a backward, and allocated.
BEFORE, AFTER, ALLOCATED = 0.5, 0.95, 0.2
# How tall a strip of bytes is with its numbers, and how large the letters of a turned heading are.
STRIP, _TURNED = 44.0, 11.5
# From these widths on, a heading stands upright in three lines, and a line among turned ones touches none of them.
_UPRIGHT, _ROOMY = 66.0, 20.0


class EventColumns(NamedTuple):
    """Where the columns of events stand, in pixels: the left edge of the first, and how wide each is."""

    left: float
    width: float
    events: list[int]

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


def heading_height(ledger: Ledger, columns: EventColumns) -> float:
    """Return how many pixels the headings take above these columns."""
    if columns.width >= _UPRIGHT:
        return 50.0
    titles = [_title(ledger[e]) for e in columns.events]
    return 14 + max(text_width(title, _TURNED) for title in titles)


def draw_headings(
    canvas: Canvas, ledger: Ledger, columns: EventColumns, above: float, top: float
) -> None:
    """Name each event above its column, between `above` and `top`, and begin its line there."""
    for i, e in enumerate(columns.events):
        event, x = ledger[e], columns.x(i)
        if columns.width >= _UPRIGHT:
            _draw_lines(canvas, event, x, columns.width, above)
        else:
            middle = columns.middle(i) + 1
            canvas.text(middle, top - 8, _title(event), size=_TURNED, turned=True)
        # Where headings stand close, a line among them would touch two.
        begin = above + 4 if columns.width >= _ROOMY else top - 3
        if event.kind != "backward":
            draw_rule(canvas, event, x, begin, top)


def _draw_lines(
    canvas: Canvas, event: Event, x: float, width: float, above: float
) -> None:
    """Write a heading upright: the kind, what it acted on, the user's line."""
    room = int((width - 10) / text_width("x", 11))
    about = "skipped" if event.skipped else words.shorten(words.subject(event), room)
    where = words.place(event)
    if text_width(where, 11) > width - 7:
        # The rank is all that tells some columns apart.
        known = event.rank is not None
        where = f"rank {event.rank}" if known else words.shorten(where, room)
    canvas.text(x + 7, above + 11, event.kind, size=12 if width >= 80 else 11)
    code = event.kind != "sync" and not event.skipped
    canvas.text(x + 7, above + 26, about, mono=code)
    canvas.text(x + 7, above + (40 if about else 26), where, color=MUTED)


def _title(event: Event) -> str:
    rank = "" if event.rank is None else f"rank {event.rank} "
    action = words.action(event)
    # To whom it was done may be cut; what was done is what the column shows.
    whom = words.shorten(words.subject(event), max(19 - len(action), 9))
    return f"{rank}{action} {whom}".strip()


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


def rule_keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """Return the entries of a legend for the lines of these events."""
    keys = []
    for kind in dict.fromkeys(ledger[e].kind for e in events):
        if kind != "backward":
            color, dashes = style.kind(kind)
            keys.append(Key(kind, color, kind="rule", dashes=dashes))
    return keys


@dataclass(frozen=True)
class Strip:
    """Values below a timeline, NaN where there is none: `areas` that are filled, and a `level` over some events.

    `written` are the values of each event in words.
    """

    name: str
    most: str
    areas: list[tuple[np.ndarray, Key]]
    level: tuple[np.ndarray, Key] | None = None
    written: tuple[str, ...] = ()

    def keys(self) -> list[Key]:
        """Return the entries of a legend for what there is."""
        series = [*self.areas, *([self.level] if self.level else [])]
        return [key for values, key in series if key.text and (values > 0).any()]

    def draw(
        self, canvas: Canvas, columns: EventColumns, base: float, each: int = 1
    ) -> None:
        """Draw it upwards from its base; of `each` so many events that share a pixel, the largest."""
        known = [values for values, _ in self.areas]
        known += [self.level[0]] if self.level else []
        scale = (STRIP - 18) / (float(np.nanmax(known)) or 1.0)
        starts = np.arange(0, len(columns.events), each)
        edges = [columns.x(start) for start in starts.tolist()] + [columns.end]
        across = [float(edge) for edge in np.repeat(edges, 2)[1:-1]]
        for values, key in self.areas:
            most = np.maximum.reduceat(np.nan_to_num(values), starts)
            tops = np.repeat(base - scale * most, 2).tolist()
            canvas.area(across, base, tops, color=key.color, alpha=key.alpha)
        levels = self.level[0] if self.level else np.zeros(0)
        for i in np.flatnonzero(levels > 0).tolist():
            y = base - scale * float(levels[i])
            canvas.level(columns.x(i), columns.x(i + 1), y, width=1.6, z=4)
        canvas.level(columns.left, columns.end, base, color=LINE, width=0.8)
        for i, text in enumerate(self.written):
            if text_width(text, 11) <= columns.width - 4:
                canvas.text(columns.middle(i), base - STRIP + 10, text, ha="center")


def strips_of(ledger: Ledger, events: Sequence[int]) -> list[Strip]:
    """Return the strips of the bytes that were measured at these events: saved tensors, and those of a device."""
    chosen = [ledger[e] for e in events]
    before, after, allocated, peak = np.array(
        [[e.saved_before, e.saved_after, e.allocated, e.peak] for e in chosen], float
    ).T
    strips = []
    if np.isfinite(before).any():
        most = style.size(float(np.nanmax(before)))
        areas = [
            (before, Key("saved before the backward", MUTED, BEFORE, kind="fill")),
            (after, Key("saved after it", MUTED, AFTER, kind="fill")),
        ]
        written = tuple(map(_saved, before.tolist(), after.tolist()))
        strips.append(Strip("saved tensors", most, areas, None, written))
    if np.isfinite(allocated).any():
        most = style.size(float(np.nanmax([allocated, peak])))
        bytes_after = Key(
            "bytes allocated after the event", INK, ALLOCATED, kind="fill"
        )
        level = peak, Key("new maximum on the way", INK, kind="total")
        written = tuple("" if math.isnan(x) else style.size(x) for x in allocated)
        areas = [(allocated, bytes_after)]
        strips.append(Strip("allocated on device", most, areas, level, written))
    return strips


def _saved(before: float, after: float) -> str:
    if math.isnan(before):
        return ""
    return f"{style.size(before)} → {style.size(after)}"


def ticks(count: int) -> range:
    """Return the places of at most eight round numbers below a count."""
    steps = (k * 10**n for n in itertools.count() for k in (1, 2, 5))
    return range(0, count, next(step for step in steps if count / step <= 8))
