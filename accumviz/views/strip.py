"""What stands under the lanes of a timeline, in the columns of its events: shares, saved and allocated bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from accumviz.ledger.ledger import Ledger
from accumviz.views import style
from accumviz.views.figure import INK, LINE, MUTED, Canvas, text_width
from accumviz.views.legend import Key
from accumviz.views.parts import Segment
from accumviz.views.shares import Bar, among, bars, reach

_STRIP, _WEIGHED = 44.0, 92.0
# How opaque bytes are: saved before and after a backward, and allocated.
BEFORE, AFTER, ALLOCATED = 0.5, 0.95, 0.2


class Grid(NamedTuple):
    """Where columns (events) and lanes (parameters) stand, in pixels; `named` is room for a name above each lane."""

    left: float
    top: float
    column: float
    lane: float
    events: list[int]
    named: float = 0.0

    def x(self, position: int) -> float:
        return self.left + position * self.column


class Strip(Protocol):
    """Draws one strip, with its upper edge at `top`."""

    def __call__(
        self, canvas: Canvas, grid: Grid, ledger: Ledger, top: float
    ) -> None: ...


def clear_of(y: float, height: float, line: float) -> tuple[float, float]:
    """Where in a part a number is written, and its room there, so that a line does not strike it through.

    >>> clear_of(0, 20, 30), clear_of(0, 20, 5)
    ((10.0, 20), (13.15, 13.7))
    """
    if not y + 1 < line < y + height - 1:
        return y + height / 2, height
    above, below = line - 1.3 - y, y + height - line - 1.3
    return (y + above / 2, above) if above > below else (y + height - below / 2, below)


def beside(ledger: Ledger) -> float:
    """How many pixels the names of the strips take beside them."""
    told = {_saved: "tensors", _allocated: "on device", _weighed: "the step"}
    return max(
        [
            0.0,
            *(
                text_width(told[strip], 11.5) + 22
                for strip in strips(ledger, range(len(ledger)))
            ),
        ]
    )


def strips(ledger: Ledger, events: Sequence[int]) -> list[Strip]:
    """The strips for which something was measured, from the top."""
    saved = any(np.isfinite(ledger[e].saved_before) for e in events)
    allocated = any(np.isfinite(ledger[e].allocated) for e in events)
    weighed = bool(bars(ledger, events)[0])
    found: list[tuple[Strip, bool]] = [
        (_weighed, weighed),
        (_saved, saved),
        (_allocated, allocated),
    ]
    return [strip for strip, measured in found if measured]


def heights_of(shown: Sequence[Strip]) -> list[float]:
    """How many pixels each strip takes."""
    return [_WEIGHED if strip is _weighed else _STRIP for strip in shown]


def strip_keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """What the legend says of them."""
    shown = strips(ledger, events)
    weighed = bars(ledger, events)[0]
    found = (
        [Key(f"share 1: {among(ledger) or 'the mean of one loss'}", INK, kind="dashed")]
        if weighed
        else []
    )
    if any(part.unknown for bar in weighed for part in bar.segments):
        found.append(Key("unknown share", MUTED, 0.0, "xx"))
    found += saved_keys(ledger, events) if _saved in shown else []
    return found + (allocated_keys(ledger, events) if _allocated in shown else [])


def strip_notes(ledger: Ledger, grid: Grid) -> list[str]:
    """What stands beside each other in one step, which nothing else tells, and whether sums had no room."""
    found = bars(ledger, grid.events)[0]
    several = {
        step: [bar.objective for bar in found if bar.step == step]
        for step in {bar.step for bar in found}
    }
    orders = dict.fromkeys(
        tuple(names) for _, names in sorted(several.items()) if len(names) > 1
    )
    notes = [
        f"Shares of one step, from the left: {', '.join(names)}."
        for names in list(orders)[:2]
    ]
    left_out = not all(_sums(found, grid))
    return notes + (
        ["Sums without room are left out here; they stand in the words below."]
        if left_out
        else []
    )


def saved_keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """What the legend says of the bytes that autograd keeps; of those after a backward only where there are any."""
    after = any(
        np.isfinite(ledger[e].saved_after) and ledger[e].saved_after > 0 for e in events
    )
    keys = [Key("saved before the backward", MUTED, BEFORE, kind="fill")]
    return keys + ([Key("saved after it", MUTED, AFTER, kind="fill")] if after else [])


def allocated_keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """What the legend says of the bytes on a device."""
    peak = any(np.isfinite(ledger[e].peak) for e in events)
    keys = [Key("bytes allocated after the event", INK, ALLOCATED, kind="fill")]
    return keys + ([Key("new maximum on the way", INK, kind="total")] if peak else [])


def gap_of(
    part: Segment,
    stack: list[Segment],
    y: float,
    height: float,
    *,
    told: str,
    wide: float,
) -> tuple[float, float] | None:
    """Where the hatching of what came from elsewhere leaves room for its number; None where it has none."""
    fits = height >= 26 and text_width(told, 11) <= wide - 3
    return (
        (y + height / 2 - 8, y + height / 2 + 8)
        if part.born < 0 and len(stack) > 1 and fits
        else None
    )


def _head(canvas: Canvas, grid: Grid, top: float, upper: str, lower: str) -> None:
    canvas.line(
        [10, grid.x(len(grid.events))],
        [top - grid.named] * 2,
        color=LINE,
        width=0.6,
        alpha=0.8,
        z=0,
    )
    if grid.named:
        canvas.text(10, top - grid.named / 2, f"{upper} {lower}", points=11.5)
        return
    canvas.text(grid.left - 14, top + 14, upper, points=11.5, ha="right")
    canvas.text(grid.left - 14, top + 29, lower, points=11.5, ha="right")


def _saved(canvas: Canvas, grid: Grid, ledger: Ledger, top: float) -> None:
    base = top + _STRIP - 4
    _head(canvas, grid, top, "saved", "tensors")
    most = max(
        [
            1.0,
            *(
                ledger[e].saved_before
                for e in grid.events
                if np.isfinite(ledger[e].saved_before)
            ),
        ]
    )
    bar = min(grid.column * 0.62, 52.0)
    for i, e in enumerate(grid.events):
        event = ledger[e]
        if not np.isfinite(event.saved_before):
            continue
        x = grid.x(i) + (grid.column - bar) / 2
        for bytes_, offset in ((event.saved_before, 0.0), (event.saved_after, bar / 2)):
            height = (_STRIP - 24) * (bytes_ if np.isfinite(bytes_) else 0) / most
            canvas.box(
                x + offset,
                base - height,
                bar / 2,
                height,
                fill=MUTED,
                alpha=AFTER if offset else BEFORE,
            )
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
        canvas.box(x, base - height, bar, height, fill=INK, alpha=ALLOCATED)
        canvas.line([x, x + bar], [base, base], color=MUTED, width=0.9)
        told = [style.size(allocated)]
        if np.isfinite(peak):
            level = base - (_STRIP - 24) * peak / most
            canvas.line([x - 3, x + bar + 3], [level, level], width=1.6, z=4)
            told.insert(0, f"{style.size(peak)}, {told[0]}")
        fitting = next(
            (one for one in told if text_width(one, 11) <= grid.column - 4), ""
        )
        canvas.text(x + bar / 2, top + 10, fitting, points=11, ha="center")


def _weighed(canvas: Canvas, grid: Grid, ledger: Ledger, top: float) -> None:
    """A stack for each step, one segment each backward; lengths add, as shares do."""
    _head(canvas, grid, top, "shares of", "the step")
    found = bars(ledger, grid.events)[0]
    low, high = reach(found)
    scale = (_WEIGHED - 26) / (high - low)
    zero = top + 18 + high * scale
    canvas.line(
        [grid.left, grid.x(len(grid.events))], [zero, zero], color=MUTED, width=0.9, z=1
    )
    rooms, sums = _rooms(found, grid), _sums(found, grid)
    written = all(_fits(bar, rooms[bar.step] - 2, scale) for bar in found)
    where: list[tuple[float, float, float]] = []
    for e, own in itertools.groupby(
        zip(found, sums, strict=True), key=lambda pair: pair[0].step
    ):
        among_ = list(own)
        left = grid.x(grid.events.index(e)) + (grid.column - rooms[e] * len(among_)) / 2
        for n, (bar, told) in enumerate(among_):
            # A lone part is its own sum, which stands at the end of the bar.
            inside = written and (len(bar.segments) > 1 or not told)
            _stack(
                canvas,
                ledger,
                bar,
                left + n * rooms[e],
                rooms[e] - 2,
                zero,
                scale,
                written=inside,
            )
            middle, end = (
                left + (n + 0.5) * rooms[e] - 1,
                zero - max(bar.ends[1], 0.0) * scale,
            )
            canvas.text(middle, end - 9, told, points=11, bold=True, ha="center")
            half = text_width(told, 11, bold=True) / 2
            where += [(middle - half - 2, middle + half + 2, end - 9)] if told else []
    for one in (1, -1) if low < 0 else (1,):
        _dashed(canvas, grid, zero - one * scale, style.number(one), where)


def _dashed(
    canvas: Canvas,
    grid: Grid,
    y: float,
    told: str,
    sums: list[tuple[float, float, float]],
) -> None:
    """A line across the columns, with its name at the end, and a gap where it would strike a sum through."""
    end = grid.x(len(grid.events))
    gaps = sorted((left, right) for left, right, middle in sums if abs(middle - y) < 9)
    for start, stop in itertools.pairwise([grid.left, *itertools.chain(*gaps), end]):
        if (start, stop) not in gaps:
            canvas.line([start, stop], [y, y], width=1.2, dash="--", z=4)
    canvas.text(end + 5, y, told, points=11)


def _rooms(found: list[Bar], grid: Grid) -> dict[int, float]:
    """How wide a bar of each step is, with what keeps it from the next."""
    steps = [bar.step for bar in found]
    return {e: min(grid.column * 0.8, 64.0) / steps.count(e) for e in steps}


def _sums(found: list[Bar], grid: Grid) -> list[str]:
    """What each bar adds to, to as many digits as there is room for in all of them; nothing where there is none."""
    rooms, steps = _rooms(found, grid), [bar.step for bar in found]
    # A lone one may reach over the columns beside it, up to the next, or to the edge.
    at = [grid.events.index(e) for e in dict.fromkeys(steps)]
    near = (
        min([b - a for a, b in itertools.pairwise(at)], default=len(grid.events))
        * grid.column
    )
    edge = min(
        (grid.column * (2 * min(n, len(grid.events) - 1 - n) + 1) + 8 for n in at),
        default=0.0,
    )

    def told(bar: Bar, digits: int) -> str:
        return bar.totals[min(digits, len(bar.totals) - 1)]

    def fits(bar: Bar, digits: int) -> bool:
        room = min(near, edge) if steps.count(bar.step) == 1 else rooms[bar.step]
        return text_width(told(bar, digits), 11, bold=True) <= room - 3

    # Parts have three digits, and so have totals where there is room.
    digits = next((n for n in (1, 2, 3) if all(fits(bar, n) for bar in found)), 3)
    return [told(bar, digits) if fits(bar, digits) else "" for bar in found]


def _fits(bar: Bar, wide: float, scale: float) -> bool:
    """Whether each of its parts that is seen as one has room for its number."""
    seen = [
        part
        for part in bar.segments
        if not part.unknown and abs(part.length) * scale > 3
    ]
    rooms = []
    for part in seen:
        end = part.start + part.length
        top, one = -max(part.start, end) * scale, -math.copysign(scale, end)
        rooms.append(clear_of(top, abs(part.length) * scale, one)[1])
    return all(
        room >= 12 and text_width(part.told, 11) <= wide - 2
        for room, part in zip(rooms, seen, strict=True)
    )


def _stack(
    canvas: Canvas,
    ledger: Ledger,
    bar: Bar,
    x: float,
    wide: float,
    zero: float,
    scale: float,
    *,
    written: bool,
) -> None:
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
        if written and height > 3 and not part.unknown:
            ink = style.ink_on(color) if new else INK
            middle = clear_of(
                y, height - gap, zero - math.copysign(scale, part.start + part.length)
            )[0]
            canvas.text(
                x + wide / 2, middle, part.told, points=11, ha="center", color=ink
            )
