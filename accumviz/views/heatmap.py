"""Paint the timeline of a large ledger as a heat map: hue is the loss, opacity the norm."""

from __future__ import annotations

import math
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
    draw_rule,
    heading_height,
    norm_strip,
    rule_keys,
    saved_strips,
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
from accumviz.views.layout import BROKEN, LABELS, LEVELS, Heat, heat, label_places

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
# How opaque a cell is that only held `.grad`, and one with the weakest contribution: told apart on a dark ground, too.
_HELD = 0.13
_FAINTEST = 0.46


def draw(
    ledger: Ledger, rows: list[int], events: list[int], width: float
) -> PageFigure:
    """Paint the heat map of these parameters and events."""
    groups = words.group_rows([ledger.parameters[p].name for p in rows])
    names = max(text_width(group.name, 11.5) for group in groups) + 24
    left = min(names, max(0.3 * width, 134.0))
    room = width - left - _RIGHT
    each = math.ceil(len(events) / room)
    each_row = math.ceil(len(rows) / _BODY)
    where = np.ix_(events, rows)
    state = ledger.state[where]
    added = np.where(state & CONTRIBUTED, ledger.contribution[where], -1.0).T
    held = ((state & PRESENT) > 0).T
    labels = label_places(ledger, [ledger[e] for e in events])
    across = np.arange(0, len(events), each)
    down = np.arange(0, len(rows), each_row)
    cells = heat(added, held, labels, across, down)
    column_width = min(room / len(across), _WIDEST) / each
    columns = EventColumns(left, column_width, [ledger[e] for e in events])
    canvas = Canvas(max(columns.end + _RIGHT, min(width, 480.0)))
    size = f"{counted(len(rows), 'parameter')} × {counted(len(events), 'event')}"
    above = draw_lines(canvas, f"{size}, {words.window_summary(ledger)}", 2.0) + 3
    is_named = columns.width >= _NAMED
    top = above + (heading_height(columns) if is_named else 3.0)
    bottom = top + min(max(_BODY, len(down)), 26.0 * len(down))
    plot = _Map(canvas, columns, cells, top, bottom)
    plot.draw_cells(list(style.label_colors(ledger.labels).values()), each)
    plot.draw_groups(groups, len(rows))
    if is_named:
        draw_headings(canvas, columns, above, top)
    else:
        plot.draw_ticks()
    is_ruled = plot.draw_rules()
    shares = ShareStrip(ledger, columns)
    y = shares.draw(canvas, columns, bottom + (4 if is_named else 26))
    keys = _keys(ledger, cells, int((~np.isfinite(added)).sum())) + shares.keys()
    notes = []
    if is_ruled:
        keys += rule_keys(columns.events)
    else:
        notes.append(
            "Lines of events have no room; events=slice(0, 60) shows a part of them."
        )
    for strip in (norm_strip(ledger, rows, events), *saved_strips(columns.events)):
        y = strip.draw(canvas, columns, y, each)
        keys += strip.keys()
    if each > 1 or each_row > 1:
        notes.append(
            "Thinned: each cell shows the largest contribution of its neighbourhood."
        )
    if not ledger.complete:
        notes.append("The recording is incomplete.")
    return canvas.finish(draw_legend(canvas, keys, [*notes, shares.note], y))


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
        codes = self.heat.codes
        rows, across = codes.shape
        cell_width = self.columns.width * each
        cell_height = (self.bottom - self.top) / rows
        self.canvas.axes.imshow(
            _palette(colors)[codes],
            extent=(left, left + cell_width * across, self.bottom, self.top),
            interpolation="none",
            aspect="auto",
            clip_on=False,
            zorder=1,
        )
        frame: Any = {"edge": LINE, "linewidth": 0.8, "zorder": 4}
        width = self.columns.end - left
        self.canvas.box(left, self.top, width, self.bottom - self.top, **frame)
        # A wall of crosses says no more than its outline.
        broken = np.argwhere(codes == BROKEN)
        every = len(broken) // _MOST_CROSSES + 1
        y, x = (broken[::every] + 0.5).T
        mark: Any = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6}
        xs = left + cell_width * x
        ys = self.top + cell_height * y
        self.canvas.line(xs, ys, linewidth=0, zorder=5, **mark)

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
                self.canvas.level(left - 7, end, first, color=LINE, linewidth=0.6)
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
                canvas.upright(x, y - 13, y - 9, color=MUTED, linewidth=0.8)
                number = f"{columns.events[position].index:,}"
                canvas.text(x, y, number, color=MUTED, ha="center")
        canvas.text(columns.left - 9, y, "event", color=MUTED, ha="right")


def _palette(colors: list[str]) -> np.ndarray:
    """Return the colour of each code, RGBA: hue is the label, opacity the norm, for a light and a dark page."""
    grey = [0.5, 0.5, 0.5, _HELD]
    palette = [[0.0] * 4, grey, grey]
    for label in range(LABELS):
        rgb = to_rgb(colors[label % len(colors)]) if colors else to_rgb(_GREY)
        for alpha in np.linspace(_FAINTEST, 1, LEVELS).tolist():
            palette.append([*rgb, alpha])
    return np.array(palette)


def _keys(ledger: Ledger, cells: Heat, broken: int) -> list[Key]:
    weakest, strongest = (style.number(10**end, 2) for end in cells.range)
    colors = style.label_colors(ledger.labels)
    scale = f"norm added (log), {weakest} to {strongest}"
    first = next(iter(colors.values()), _GREY)
    keys = [Key(scale, first, _FAINTEST, kind="scale")]
    for label, color in list(colors.items())[:_MOST_COLORS]:
        keys.append(Key(words.shorten(label or "backward", 24), color))
    keys.append(Key(".grad held, nothing added", _GREY, _HELD))
    if (cells.codes == 0).any():
        keys.append(Key("no .grad (None)", LINE, 0.0))
    if broken:
        text = f"not finite ({counted(broken, 'contribution')})"
        keys.append(Key(text, INK, kind="cross"))
    return keys
