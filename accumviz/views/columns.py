"""The columns that lanes and heat map share: one for each event, with its heading and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger.ledger import Event, Ledger
from accumviz.views import style, words
from accumviz.views.figure import INK, LINE, MUTED, Canvas, Key, text_width

# How opaque bytes are: saved before and after a backward, and allocated.
BEFORE, AFTER, ALLOCATED = 0.5, 0.95, 0.2
# How large the letters of a heading are that is turned.
_TURNED = 11.5
# From these widths on, a heading stands upright in three lines, its first line has larger letters, and a line among
# turned headings touches none of them.
_UPRIGHT, _WIDE, _ROOMY = 66.0, 80.0, 20.0


class EventColumns(NamedTuple):
    """Where the columns of events stand, in pixels: the left edge of the first, and how wide each is."""

    left: float
    width: float
    events: list[int]

    def x(self, position: int) -> float:
        """The left edge of a column."""
        return self.left + position * self.width

    @property
    def end(self) -> float:
        """The right edge of the last one."""
        return self.x(len(self.events))


def heading_height(ledger: Ledger, columns: EventColumns) -> float:
    """How many pixels the headings take above these columns."""
    if columns.width >= _UPRIGHT:
        return 50.0
    titles = [_title(ledger[e]) for e in columns.events]
    return 14 + max(text_width(title, _TURNED) for title in titles)


def draw_heading(
    canvas: Canvas, event: Event, x: float, width: float, *, above: float, top: float
) -> None:
    """Name an event above its column, between `above` and `top`."""
    if width < _UPRIGHT:
        middle = x + width / 2 + 1
        canvas.text(middle, top - 8, _title(event), size=_TURNED, turned=True)
        return
    room = int((width - 10) / text_width("x", 11))
    canvas.text(x + 7, above + 11, event.kind, size=12 if width >= _WIDE else 11)
    code = not event.skipped and event.kind != "sync"
    if event.kind == "sync":
        # Letters of a page's own are narrower than those of code.
        room_of_text = int((width - 7) / text_width("x", 11) / 0.86)
        about = words.collective(event, room_of_text)
    else:
        about = "skipped" if event.skipped else words.brief(words.subject(event), room)
    canvas.text(x + 7, above + 26, about, mono=code)
    where = words.place(event)
    if text_width(where, 11) > width - 7:
        # The rank is all that tells some columns apart; the line stands in the words below.
        whole = event.rank is None
        where = words.shorten(where, room) if whole else f"rank {event.rank}"
    canvas.text(x + 7, above + (40 if about else 26), where, color=MUTED)


def _title(event: Event) -> str:
    rank = "" if event.rank is None else f"rank {event.rank} "
    action = words.action(event)
    # To whom it was done may be cut; what was done is what the column shows.
    whom = words.brief(words.subject(event), max(19 - len(action), 9))
    return f"{rank}{action} {whom}".strip()


def rule_top(columns: EventColumns, *, above: float, top: float) -> float:
    """Where lines of events begin: where headings stand close, a line among them would touch two."""
    return above + 4 if columns.width >= _ROOMY else top - 3


def draw_rule(
    canvas: Canvas,
    event: Event,
    x: float,
    top: float,
    bottom: float,
    *,
    alpha: float = 1.0,
    width: float = 1.8,
) -> None:
    """Draw an event's line across rows, fainter across those that it does not concern; a backward has hardly any."""
    if event.kind == "backward":
        canvas.upright(x, top, bottom, color=LINE, width=0.6, alpha=0.7, z=0)
        return
    color, dash = style.kind(event.kind)
    look = {"color": color, "dash": dash, "alpha": alpha, "width": width}
    canvas.upright(x, top, bottom, z=1, **look)


def rule_keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """The entries of a legend for the lines of these events."""
    kinds = dict.fromkeys(ledger[e].kind for e in events)
    looks = [(kind, *style.kind(kind)) for kind in kinds if kind != "backward"]
    return [
        Key(kind, color, kind="rule", dashes=dashes) for kind, color, dashes in looks
    ]


class Bytes(NamedTuple):
    """Bytes measured at some events, NaN where they were not: the two numbers of each, and what to call them.

    Of saved tensors they are those before and after a backward, of a device those allocated and a new maximum.
    """

    saved: bool
    name: tuple[str, str]
    first: np.ndarray
    second: np.ndarray

    @property
    def most(self) -> float:
        """The largest number, at least one byte."""
        return float(np.nanmax([self.first, self.second], initial=1.0))

    def keys(self) -> list[Key]:
        """The entries of a legend for what there is."""
        if self.saved:
            keys = [Key("saved before the backward", MUTED, BEFORE, kind="fill")]
            after = Key("saved after it", MUTED, AFTER, kind="fill")
            return [*keys, after] if (self.second > 0).any() else keys
        keys = [Key("bytes allocated after the event", INK, ALLOCATED, kind="fill")]
        peak = Key("new maximum on the way", INK, kind="total")
        return [*keys, peak] if np.isfinite(self.second).any() else keys


def measured(ledger: Ledger, events: Sequence[int]) -> list[Bytes]:
    """The bytes that were measured at these events, from the top of a figure."""
    every = [ledger[e] for e in events]
    saved = np.array([[e.saved_before, e.saved_after] for e in every], float)
    device = np.array([[e.allocated, e.peak] for e in every], float)
    strips = [
        Bytes(True, ("saved", "tensors"), *saved.T),
        Bytes(False, ("allocated", "on device"), *device.T),
    ]
    return [strip for strip in strips if np.isfinite(strip.first).any()]
