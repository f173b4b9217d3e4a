"""Paint the timeline of a large ledger as a heat map: hue is the loss, opacity the norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Ledger
from accumviz.show import counted
from accumviz.views import style, words
from accumviz.views.columns import (
    EventColumns,
    ShareStrip,
    draw_headings,
    draw_name,
    draw_rule,
    draw_strips,
    heading_height,
    norm_strip,
    rule_keys,
    strips_of,
)
from accumviz.views.figure import (
    INK,
    LINE,
    MUTED,
    Canvas,
    Key,
    PageFigure,
    draw_legend,
    draw_lines,
    text_width,
)
from accumviz.views.heat import (
    BROKEN,
    HELD,
    LABELS,
    LEVELS,
    Heat,
    heat,
    label_places,
    opacity,
)

# How tall all cells are together at most, what is free at the right, and how wide a column is at most.
_BODY = 440.0
_RIGHT = 18.0
_WIDEST = 84.0
# From this width on, a column has a name.
_NAMED = 15.0
# Lines of events that are closer than this would hide what they divide.
_RULE = 2.5
_MOST_CROSSES = 400
_MOST_COLORS = 6
_GREY = "#7f7f7f"


def draw(
    ledger: Ledger, rows: list[int], events: list[int], width: float
) -> PageFigure:
    """Paint the heat map of these parameters and events."""
    groups = words.group_rows([ledger.parameters[p].name for p in rows])
    left = _left(groups, width)
    room = width - left - _RIGHT
    each = math.ceil(len(events) / room)
    each_row = math.ceil(len(rows) / _BODY)
    cells = _cells(ledger, rows, events, (each, each_row))
    tall, wide = cells.codes.shape
    column_width = min(room / wide, _WIDEST) / each
    columns = EventColumns(left, column_width, [ledger[e] for e in events])
    canvas = Canvas(max(columns.end + _RIGHT, min(width, 480.0)))
    size = f"{counted(len(rows), 'parameter')} × {counted(len(events), 'event')}"
    above = draw_lines(canvas, f"{size}, {words.window_summary(ledger)}", 2.0) + 3
    is_named = columns.width >= _NAMED
    top = above + (heading_height(columns) if is_named else 3.0)
    row_height = min(max(_BODY / tall, 1.0), 26.0)
    bottom = top + row_height * tall
    plot = _Map(canvas, columns, cells, top, bottom)
    plot.draw_cells(_colors(ledger), each)
    plot.draw_groups(groups, len(rows))
    if is_named:
        draw_headings(canvas, columns, above, top)
    is_ruled = plot.draw_rules()
    strips = [norm_strip(ledger, rows, events), *strips_of(columns.events)]
    below = 4 if is_named else 26
    y = bottom + below
    if not is_named:
        plot.draw_ticks()
    shares = ShareStrip(ledger, columns)
    if shares.bars:
        y = shares.draw(canvas, columns, draw_name(canvas, "shares of the step", "", y))
    y = draw_strips(canvas, columns, strips, y, each)
    keys = _keys(ledger, cells)
    if shares.bars:
        keys += shares.keys()
    if is_ruled:
        keys += rule_keys(columns.events)
    for strip in strips:
        keys += strip.keys()
    notes = _notes(ledger, cells, (len(rows), len(events)), is_ruled=is_ruled)
    return canvas.finish(draw_legend(canvas, keys, [*notes, shares.note], y))


def _left(groups: Iterable[words.Group], width: float) -> float:
    """Return the room that names have."""
    wanted = max(text_width(group.name, 11.5) for group in groups) + 24
    return min(wanted, max(0.3 * width, 134.0))


def _cells(
    ledger: Ledger, rows: list[int], events: list[int], each: tuple[int, int]
) -> Heat:
    where = np.ix_(events, rows)
    state = ledger.state[where]
    added = np.where(state & CONTRIBUTED, ledger.contribution[where], -1.0)
    held = (state & PRESENT) > 0
    labels = label_places(ledger, [ledger[e] for e in events])
    across = np.arange(0, len(events), each[0])
    return heat(added.T, held.T, labels, across, np.arange(0, len(rows), each[1]))


def _colors(ledger: Ledger) -> list[str]:
    return list(style.label_colors(ledger.labels).values()) or [style.CYCLE[0]]


@dataclass(frozen=True)
class _Map:
    """A heat map and where it stands."""

    canvas: Canvas
    columns: EventColumns
    heat: Heat
    top: float
    bottom: float

    def draw_cells(self, colors: list[str], each: int) -> None:
        """Draw the cells, of `each` so many events, as an image, with crosses where a number is not finite."""
        left = self.columns.left
        top = self.top
        codes = self.heat.codes
        rows, across = codes.shape
        height = self.bottom - top
        cell_width = self.columns.width * each
        cell_height = height / rows
        pixels = _palette(colors)[codes]
        self.canvas.image(left, top, cell_width * across, height, pixels)
        width = self.columns.end - left
        self.canvas.box(left, top, width, height, edge=LINE, line=0.8, z=4)
        # A wall of crosses says no more than its outline.
        broken = np.argwhere(codes == BROKEN)
        every = len(broken) // _MOST_CROSSES + 1
        y, x = (broken[::every] + 0.5).T
        xs = left + cell_width * x
        ys = top + cell_height * y
        mark: Any = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6}
        self.canvas.line(xs, ys, width=0, dash="None", z=5, **mark)

    def draw_groups(self, groups: list[words.Group], rows: int) -> None:
        """Name the groups of rows, the largest first; a name with no room is left to its neighbours."""
        left = self.columns.left
        tall = (self.bottom - self.top) / rows
        room = int((left - 20) / text_width("x", 11.5))
        taken: list[float] = []
        for group in sorted(groups, key=lambda group: group.start - group.stop):
            first = self.top + group.start * tall
            height = (group.stop - group.start) * tall
            if group.start and height >= 4:
                end = self.columns.end
                self.canvas.level(left - 7, end, first, color=LINE, width=0.6)
            middle = first + height / 2
            if all(abs(middle - other) >= 13 for other in taken):
                taken.append(middle)
                name = words.shorten(group.name, room)
                look: Any = {"size": 11.5, "mono": True, "ha": "right"}
                self.canvas.text(left - 9, middle, name, **look)

    def draw_rules(self) -> bool:
        """Draw the lines of events where they stand apart, and return whether they do."""
        columns = self.columns
        ruled = []
        for i, event in enumerate(columns.events):
            if event.kind != "backward":
                ruled.append((i, event))
        if len(ruled) * _RULE > columns.end - columns.left:
            return False
        for i, event in ruled:
            draw_rule(self.canvas, event, columns.x(i), self.top - 3, self.bottom)
        return True

    def draw_ticks(self) -> None:
        """Number some events below their columns."""
        canvas = self.canvas
        columns = self.columns
        y = self.bottom + 13
        count = len(columns.events)
        for tick in MaxNLocator(8, integer=True).tick_values(0, count - 1):
            if 0 <= tick < count:
                position = int(tick)
                x = columns.middle(position)
                canvas.upright(x, y - 13, y - 9, color=MUTED, width=0.8)
                number = f"{columns.events[position].index:,}"
                canvas.text(x, y, number, color=MUTED, ha="center")
        canvas.text(columns.left - 9, y, "event", color=MUTED, ha="right")


def _palette(colors: list[str]) -> np.ndarray:
    """Return the colour of each code, RGBA: hue is the label, opacity the norm, for a light and a dark page."""
    grey = [0.5, 0.5, 0.5, HELD]
    palette = [[0.0] * 4, grey, grey]
    for label in range(LABELS):
        rgb = to_rgb(colors[label % len(colors)])
        for level in range(LEVELS):
            palette.append([*rgb, float(opacity(np.array(level)))])
    return np.array(palette)


def _keys(ledger: Ledger, cells: Heat) -> list[Key]:
    low, high = cells.range
    weakest = style.number(10**low, 2)
    strongest = style.number(10**high, 2)
    if cells.is_clipped:
        weakest += " or less"
    scale = f"norm added (log), {weakest} to {strongest}"
    faintest = float(opacity(np.array(0)))
    keys = [Key(scale, _colors(ledger)[0], faintest, kind="scale")]
    colors = style.label_colors(ledger.labels)
    for label, color in list(colors.items())[:_MOST_COLORS]:
        keys.append(Key(words.shorten(label or "backward", 24), color))
    keys.append(Key(".grad held, nothing added", _GREY, HELD))
    if (cells.codes == 0).any():
        keys.append(Key("no .grad (None)", LINE, 0.0))
    if cells.broken:
        text = f"not finite ({counted(cells.broken, 'contribution')})"
        keys.append(Key(text, INK, kind="cross"))
    return keys


def _notes(
    ledger: Ledger, cells: Heat, size: tuple[int, int], *, is_ruled: bool
) -> list[str]:
    notes = []
    if not is_ruled:
        notes.append(
            "Lines of events have no room; events=slice(0, 60) shows a part of them."
        )
    if cells.codes.shape != size:
        notes.append(
            "Thinned: each cell shows the largest contribution of its neighbourhood."
        )
    if not ledger.complete:
        notes.append("The recording is incomplete.")
    return notes
