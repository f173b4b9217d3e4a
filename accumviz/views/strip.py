"""What stands under the lanes of a timeline, in the columns of its events: shares, saved and allocated bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from accumviz.ledger import Ledger
from accumviz.views import style
from accumviz.views.figure import INK, LINE, MUTED, Canvas, Key, text_width
from accumviz.views.shares import Bar, bars, reach

_STRIP, _WEIGHED = 44.0, 92.0


class Grid(NamedTuple):
    """Where columns (events) and lanes (parameters) stand, in pixels."""

    left: float
    top: float
    column: float
    lane: float
    events: list[int]

    def x(self, position: int) -> float:
        return self.left + position * self.column


class Strip(Protocol):
    """Draws one strip, with its upper edge at `top`."""

    def __call__(self, canvas: Canvas, grid: Grid, ledger: Ledger, top: float) -> None: ...


def beside(ledger: Ledger) -> float:
    """How many pixels the names of the strips take beside them."""
    told = {_saved: "tensors", _allocated: "on device", _weighed: "the step"}
    return max([0.0, *(text_width(told[strip], 11.5) + 22 for strip in strips(ledger, range(len(ledger))))])


def strips(ledger: Ledger, events: Sequence[int]) -> list[Strip]:
    """The strips for which something was measured, from the top."""
    saved = any(np.isfinite(ledger[e].saved_before) for e in events)
    allocated = any(np.isfinite(ledger[e].allocated) for e in events)
    weighed = bool(bars(ledger, events)[0])
    found: list[tuple[Strip, bool]] = [(_weighed, weighed), (_saved, saved), (_allocated, allocated)]
    return [strip for strip, measured in found if measured]


def heights_of(shown: Sequence[Strip]) -> list[float]:
    """How many pixels each strip takes."""
    return [_WEIGHED if strip is _weighed else _STRIP for strip in shown]


def strip_keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """What the legend says of them."""
    shown = strips(ledger, events)
    weighed = bars(ledger, events)[0]
    found = [Key("share 1: the mean of one loss", INK, kind="dashed")] if weighed else []
    if any(part.unknown for bar in weighed for part in bar.segments):
        found.append(Key("unknown share", MUTED, 0.0, "xx"))
    found += [Key("bytes before → after backward", MUTED, 0.7)] if _saved in shown else []
    if _allocated in shown:
        found.append(Key("bytes allocated after the event", MUTED, 0.4))
    if any(np.isfinite(ledger[e].peak) for e in events):
        found.append(Key("new maximum on the way", INK, kind="total"))
    return found


def _head(canvas: Canvas, grid: Grid, top: float, upper: str, lower: str) -> None:
    canvas.line([10, grid.x(len(grid.events))], [top, top], color=LINE, width=0.6, alpha=0.8, z=0)
    canvas.text(grid.left - 14, top + 14, upper, points=11.5, ha="right")
    canvas.text(grid.left - 14, top + 29, lower, points=11.5, ha="right")


def _saved(canvas: Canvas, grid: Grid, ledger: Ledger, top: float) -> None:
    base = top + _STRIP - 4
    _head(canvas, grid, top, "saved", "tensors")
    most = max([1.0, *(ledger[e].saved_before for e in grid.events if np.isfinite(ledger[e].saved_before))])
    bar = min(grid.column * 0.62, 52.0)
    for i, e in enumerate(grid.events):
        event = ledger[e]
        if not np.isfinite(event.saved_before):
            continue
        x = grid.x(i) + (grid.column - bar) / 2
        for bytes_, offset in ((event.saved_before, 0.0), (event.saved_after, bar / 2)):
            height = (_STRIP - 24) * (bytes_ if np.isfinite(bytes_) else 0) / most
            canvas.box(x + offset, base - height, bar / 2, height, fill=MUTED, alpha=0.55 if offset else 0.9)
        canvas.line([x, x + bar], [base, base], color=MUTED, width=0.9)
        told = f"{style.size(event.saved_before)} → {style.size(event.saved_after)}"
        if text_width(told, 11) <= grid.column - 4:
            canvas.text(x + bar / 2, top + 10, told, points=11, ha="center")


def _allocated(canvas: Canvas, grid: Grid, ledger: Ledger, top: float) -> None:
    base = top + _STRIP - 4
    _head(canvas, grid, top, "allocated", "on device")
    known = np.array([[ledger[e].allocated, ledger[e].peak] for e in grid.events])
    most = max(float(np.nanmax(known)), 1.0)
    bar = min(grid.column * 0.62, 52.0)
    for i, (allocated, peak) in enumerate(known.tolist()):
        if not np.isfinite(allocated):
            continue
        x = grid.x(i) + (grid.column - bar) / 2
        height = (_STRIP - 24) * allocated / most
        canvas.box(x, base - height, bar, height, fill=MUTED, alpha=0.4)
        canvas.line([x, x + bar], [base, base], color=MUTED, width=0.9)
        told = [style.size(allocated)]
        if np.isfinite(peak):
            level = base - (_STRIP - 24) * peak / most
            canvas.line([x - 3, x + bar + 3], [level, level], width=1.6, z=4)
            told.insert(0, f"{style.size(peak)}, {told[0]}")
        fitting = next((one for one in told if text_width(one, 11) <= grid.column - 4), "")
        canvas.text(x + bar / 2, top + 10, fitting, points=11, ha="center")


def _weighed(canvas: Canvas, grid: Grid, ledger: Ledger, top: float) -> None:
    """A stack for each step, one segment each backward; lengths add, as shares do."""
    _head(canvas, grid, top, "shares of", "the step")
    found = bars(ledger, grid.events)[0]
    low, high = reach(found)
    scale = (_WEIGHED - 26) / (high - low)
    zero = top + 18 + high * scale
    end = grid.x(len(grid.events))
    canvas.line([grid.left, end], [zero, zero], color=MUTED, width=0.9, z=1)
    for one in (1, -1) if low < 0 else (1,):
        canvas.line([grid.left, end], [zero - one * scale] * 2, width=1.2, dash="--", z=4)
        canvas.text(end + 5, zero - one * scale, style.number(one), points=11)
    for i, e in enumerate(grid.events):
        own = [bar for bar in found if bar.step == e]
        room = min(grid.column * 0.8, 64.0) / max(len(own), 1)
        left = grid.x(i) + (grid.column - room * len(own)) / 2
        for n, bar in enumerate(own):
            _stack(canvas, ledger, bar, left + n * room, room - 2, zero, scale)
            wide = grid.column if len(own) == 1 else room
            told = next((text for text in bar.totals if text_width(text, 11) <= wide), "")
            canvas.text(left + n * room + room / 2, top + 9, told, points=11, bold=True, ha="center")


def _stack(canvas: Canvas, ledger: Ledger, bar: Bar, x: float, wide: float, zero: float, scale: float) -> None:
    color = style.label_colors(ledger.labels).get(bar.label, MUTED)
    for part in bar.segments:
        height = abs(part.length) * scale
        if not height:
            continue
        y = zero - max(part.start, part.start + part.length) * scale
        new = part.look == "new"
        edge = MUTED if part.unknown else color
        # A thin line between segments keeps them apart; one as thick as they are would be all there is.
        gap = 1.0 if height > 3 else 0.0
        canvas.box(
            x,
            y,
            wide,
            height - gap,
            fill=color if new else "none",
            edge="none" if new else edge,
            hatch="xx" if part.unknown else None,
        )
        if height >= 13 and text_width(part.told, 11) <= wide - 2 and not part.unknown:
            ink = style.ink_on(color) if new else INK
            canvas.text(x + wide / 2, y + (height - gap) / 2, part.told, points=11, ha="center", color=ink)
