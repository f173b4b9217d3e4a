"""Bytes below a timeline: saved tensors around each backward, and what the CUDA allocator had given out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from accumviz.ledger import Ledger
from accumviz.views import style
from accumviz.views.marks import Key
from accumviz.views.sheet import INK, LINE, MUTED, Sheet, text_width

STRIP = 44.0


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

    def __call__(self, sheet: Sheet, grid: Grid, ledger: Ledger, top: float) -> None: ...


def shown(ledger: Ledger, events: Sequence[int]) -> list[Strip]:
    """The strips for which something was measured, from the top."""
    saved = any(np.isfinite(ledger[e].saved_before) for e in events)
    allocated = any(np.isfinite(ledger[e].allocated) for e in events)
    found: list[tuple[Strip, bool]] = [(_saved, saved), (_allocated, allocated)]
    return [strip for strip, measured in found if measured]


def left(ledger: Ledger) -> float:
    """How many pixels the names of the strips take beside them."""
    told = {_saved: "tensors", _allocated: "on device"}
    return max([0.0, *(text_width(told[strip], 11.5) + 22 for strip in shown(ledger, range(len(ledger))))])


def keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """What the legend says of them."""
    found = [Key("bytes before → after backward", MUTED, 0.7)] if _saved in shown(ledger, events) else []
    if _allocated in shown(ledger, events):
        found.append(Key("bytes allocated after the event", MUTED, 0.4))
    if any(np.isfinite(ledger[e].peak) for e in events):
        found.append(Key("new maximum on the way", INK, kind="total"))
    return found


def _head(sheet: Sheet, grid: Grid, top: float, upper: str, lower: str) -> None:
    sheet.line([10, grid.x(len(grid.events))], [top, top], color=LINE, width=0.6, alpha=0.8, z=0)
    sheet.text(grid.left - 14, top + 14, upper, points=11.5, ha="right")
    sheet.text(grid.left - 14, top + 29, lower, points=11.5, ha="right")


def _saved(sheet: Sheet, grid: Grid, ledger: Ledger, top: float) -> None:
    base = top + STRIP - 4
    _head(sheet, grid, top, "saved", "tensors")
    most = max([1.0, *(ledger[e].saved_before for e in grid.events if np.isfinite(ledger[e].saved_before))])
    bar = min(grid.column * 0.62, 52.0)
    for i, e in enumerate(grid.events):
        event = ledger[e]
        if not np.isfinite(event.saved_before):
            continue
        x = grid.x(i) + (grid.column - bar) / 2
        for bytes_, offset in ((event.saved_before, 0.0), (event.saved_after, bar / 2)):
            height = (STRIP - 24) * (bytes_ if np.isfinite(bytes_) else 0) / most
            sheet.box(x + offset, base - height, bar / 2, height, fill=MUTED, alpha=0.55 if offset else 0.9)
        sheet.line([x, x + bar], [base, base], color=MUTED, width=0.9)
        told = f"{style.size(event.saved_before)} → {style.size(event.saved_after)}"
        if text_width(told, 11) <= grid.column - 4:
            sheet.text(x + bar / 2, top + 10, told, points=11, ha="center")


def _allocated(sheet: Sheet, grid: Grid, ledger: Ledger, top: float) -> None:
    base = top + STRIP - 4
    _head(sheet, grid, top, "allocated", "on device")
    known = np.array([[ledger[e].allocated, ledger[e].peak] for e in grid.events])
    most = max(float(np.nanmax(known)), 1.0)
    bar = min(grid.column * 0.62, 52.0)
    for i, (allocated, peak) in enumerate(known.tolist()):
        if not np.isfinite(allocated):
            continue
        x = grid.x(i) + (grid.column - bar) / 2
        height = (STRIP - 24) * allocated / most
        sheet.box(x, base - height, bar, height, fill=MUTED, alpha=0.4)
        sheet.line([x, x + bar], [base, base], color=MUTED, width=0.9)
        told = [style.size(allocated)]
        if np.isfinite(peak):
            level = base - (STRIP - 24) * peak / most
            sheet.line([x - 3, x + bar + 3], [level, level], width=1.6, z=4)
            told.insert(0, f"{style.size(peak)}, {told[0]}")
        fitting = next((one for one in told if text_width(one, 11) <= grid.column - 4), "")
        sheet.text(x + bar / 2, top + 10, fitting, points=11, ha="center")
