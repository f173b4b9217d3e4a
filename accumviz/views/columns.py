"""The columns that lanes and heat map share: one for each event, with its heading, its line and its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from accumviz.ledger.ledger import Event, Ledger
from accumviz.views import style, words
from accumviz.views.figure import LINE, MUTED, Canvas, Key, text_width

# How tall a strip of bytes is with its numbers, and how large the letters of a turned heading are.
STRIP, _TURNED = 44.0, 11.5
# How tall the line of a name is.
NAMED = 20.0
# How opaque the bytes of a strip are: those behind, and those in front.
BEHIND, IN_FRONT = 0.5, 0.95
# From this width on, a heading stands upright in three lines.
_UPRIGHT = 66.0


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
    for i, event in enumerate(columns.events):
        begin = top - 3
        if columns.width >= _UPRIGHT:
            _draw_lines(canvas, event, columns.x(i) + 7, columns.width, above)
            begin = above + 4
        else:
            middle = columns.middle(i) + 1
            canvas.text(middle, top - 8, _title(event), size=_TURNED, turned=True)
        if event.kind != "backward":
            draw_rule(canvas, event, columns.x(i), begin, top)


def _draw_lines(
    canvas: Canvas, event: Event, x: float, width: float, above: float
) -> None:
    """Write a heading upright: the kind, what it acted on, the user's line."""
    room = int((width - 10) / text_width("x", 11))
    if event.kind == "sync":
        room += 1  # its letters are narrower than those of code
    about = "skipped" if event.skipped else words.shorten(words.subject(event), room)
    where = words.shorten(words.place(event), room)
    canvas.text(x, above + 11, event.kind, size=11)
    canvas.text(x, above + 26, about, mono=event.kind != "sync" and not event.skipped)
    canvas.text(x, above + (40 if about else 26), where, color=MUTED)


def _title(event: Event) -> str:
    rank = "" if event.rank is None else f"rank {event.rank} "
    # To whom it was done may be cut; what was done is what the column shows.
    whom = words.shorten(words.subject(event), 12)
    return f"{rank}{words.action(event)} {whom}".strip()


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


@dataclass(frozen=True)
class Strip:
    """Values of each event below a timeline, NaN where there is none: areas in front of each other, and in words."""

    name: str
    most: str
    areas: list[tuple[np.ndarray, Key]]
    texts: tuple[str, ...] = ()

    def keys(self) -> list[Key]:
        """Return the entries of a legend for what there is."""
        return [key for values, key in self.areas if key.text and (values > 0).any()]

    def draw(
        self, canvas: Canvas, columns: EventColumns, base: float, each: int = 1
    ) -> None:
        """Draw it upwards from its base; of `each` so many events that share a pixel, the largest."""
        most = float(np.nanmax([values for values, _ in self.areas])) or 1.0
        starts = np.arange(0, len(columns.events), each)
        edges = [*(columns.x(start) for start in starts.tolist()), columns.end]
        across = np.repeat(edges, 2)[1:-1].tolist()
        for values, key in self.areas:
            largest = np.maximum.reduceat(np.nan_to_num(values), starts)
            tops = np.repeat(base - (STRIP - 18) / most * largest, 2).tolist()
            canvas.area(across, base, tops, color=key.color, alpha=key.alpha)
        canvas.level(columns.left, columns.end, base, color=LINE, width=0.8)
        for i, text in enumerate(self.texts):
            if text_width(text, 11) <= columns.width - 4:
                canvas.text(columns.middle(i), base - STRIP + 10, text, ha="center")


def strips_of(events: Sequence[Event]) -> list[Strip]:
    """Return the strips of the bytes that were measured at these events: saved tensors, and those of a device."""
    strips = []
    before = np.array([event.saved_before for event in events], float)
    after = np.array([event.saved_after for event in events], float)
    if np.isfinite(before).any():
        texts = []
        for event in events:
            text = f"{style.size(event.saved_before)} → {style.size(event.saved_after)}"
            texts.append("" if math.isnan(event.saved_before) else text)
        areas = [
            (before, Key("saved before the backward", MUTED, BEHIND, kind="fill")),
            (after, Key("saved after it", MUTED, IN_FRONT, kind="fill")),
        ]
        most = style.size(float(np.nanmax(before)))
        strips.append(Strip("saved tensors", most, areas, tuple(texts)))
    peak = np.array([event.peak for event in events], float)
    allocated = np.array([event.allocated for event in events], float)
    if np.isfinite(allocated).any():
        areas = [
            (peak, Key("new maximum on the way", MUTED, BEHIND, kind="fill")),
            (allocated, Key("allocated after it", MUTED, IN_FRONT, kind="fill")),
        ]
        most = style.size(float(np.nanmax([peak, allocated])))
        strips.append(Strip("allocated on device", most, areas))
    return strips


def draw_name(
    canvas: Canvas, name: str, what: str, y: float, *, mono: bool = False
) -> float:
    """Write a name above what it is of, with what is drawn there at the other end; return where that begins."""
    middle = y + NAMED / 2
    canvas.level(10, canvas.width - 10, y, color=LINE, width=0.6, alpha=0.8, z=0)
    room = canvas.width - 30 - text_width(what, 11)
    name = words.shorten(name, int(room / text_width("x", 12.5)))
    canvas.text(10, middle, name, size=12.5, mono=mono)
    canvas.text(canvas.width - 10, middle, what, color=MUTED, ha="right")
    return y + NAMED


def draw_strips(
    canvas: Canvas, columns: EventColumns, strips: list[Strip], y: float, each: int = 1
) -> float:
    """Draw strips below each other from `y` on, and return where they end."""
    for strip in strips:
        y = draw_name(canvas, strip.name, f"0 to {strip.most}", y) + STRIP
        strip.draw(canvas, columns, y - 4, each)
    return y


def norm_strip(ledger: Ledger, rows: list[int], events: list[int]) -> Strip:
    """Return the strip of the norm of all `.grad` after each event."""
    grad = np.nan_to_num(ledger.grad[np.ix_(events, rows)].astype(float), posinf=0.0)
    norms = np.linalg.norm(grad, axis=1)
    return Strip(
        "‖.grad‖", style.number(norms.max(), 3), [(norms, Key("", MUTED, 0.6))]
    )
