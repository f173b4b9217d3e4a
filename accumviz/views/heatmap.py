"""Paint the timeline of a large ledger as a heat map: hue is the loss, opacity the norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Ledger
from accumviz.show import counted
from accumviz.views import style, words
from accumviz.views.columns import (
    STRIP,
    EventColumns,
    Strip,
    draw_headings,
    draw_rule,
    heading_height,
    rule_keys,
    strips_of,
    ticks,
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
from accumviz.views.heat import BROKEN, HELD, Heat, heat, opacity

_BODY, _RIGHT, _WIDEST = 440.0, 18.0, 84.0
# From this width on, a column has a name.
_NAMED = 15.0
# Lines of events that are closer than this would hide what they divide.
_RULE = 2.5
_MOST_CROSSES, _MOST_COLORS = 400, 6
_GREY = "#7f7f7f"


@dataclass(frozen=True)
class _Map:
    """A heat map and where it stands; a cell is the largest contribution of `each`: so many events, parameters."""

    ledger: Ledger
    rows: list[int]
    columns: EventColumns
    heat: Heat
    each: tuple[int, int]
    top: float
    bottom: float

    @property
    def ruled(self) -> list[str]:
        """The kinds of the events that have lines, or would have."""
        kinds = [self.ledger[e].kind for e in self.columns.events]
        return [kind for kind in kinds if kind != "backward"]

    @property
    def is_ruled(self) -> bool:
        """Whether lines of events stand apart."""
        return len(self.ruled) * _RULE <= self.columns.end - self.columns.left


def draw(
    ledger: Ledger, rows: list[int], events: list[int], width: float
) -> PageFigure:
    """Paint the heat map of these parameters and events."""
    groups = words.group_rows([ledger.parameters[p].name for p in rows])
    strips = [_norms(ledger, rows, events), *strips_of(ledger, events)]
    names = [group.name for group in groups] + [strip.name for strip in strips]
    wanted = max(text_width(name, 11.5) + 24 for name in names)
    left = min(wanted, max(0.3 * width, 134.0))
    room = width - left - _RIGHT
    each = math.ceil(len(events) / room), math.ceil(len(rows) / _BODY)
    cells = _cells(ledger, rows, events, each)
    tall, wide = cells.codes.shape
    columns = EventColumns(left, min(room / wide, _WIDEST) / each[0], events)
    canvas = Canvas(max(columns.end + _RIGHT, min(width, 480.0)))
    counts = f"{counted(len(rows), 'parameter')} × {counted(len(events), 'event')}"
    summary = f"{counts}, {words.window_summary(ledger)}"
    above = draw_lines(canvas, summary, 2.0) + 3
    named = columns.width >= _NAMED
    top = above + (heading_height(ledger, columns) if named else 3.0)
    bottom = top + min(max(_BODY / tall, 1.0), 26.0) * tall
    plot = _Map(ledger, rows, columns, cells, each, top, bottom)
    _draw_cells(canvas, plot)
    _draw_groups(canvas, plot, groups)
    if named:
        draw_headings(canvas, ledger, columns, above, top)
    if plot.is_ruled:
        for i, e in enumerate(events):
            if ledger[e].kind != "backward":
                draw_rule(canvas, ledger[e], columns.x(i), top - 3, bottom)
    y = bottom
    for strip in strips:
        y += STRIP + 8
        _draw_strip(canvas, plot, strip, y - 4)
    if not named:
        _draw_ticks(canvas, columns, y)
        y += 30
    return canvas.finish(draw_legend(canvas, _keys(plot, strips), _notes(plot), y))


def _cells(
    ledger: Ledger, rows: list[int], events: list[int], each: tuple[int, int]
) -> Heat:
    where = np.ix_(events, rows)
    state = ledger.state[where]
    added = np.where(state & CONTRIBUTED, ledger.contribution[where], -1.0).T
    held = ((state & PRESENT) > 0).T
    places = {label: i for i, label in enumerate(ledger.labels)}
    labels = np.array([places.get(ledger[e].label, 0) for e in events], np.int64)
    across = np.arange(0, len(events), each[0])
    return heat(added, held, labels, across, np.arange(0, len(rows), each[1]))


def _norms(ledger: Ledger, rows: list[int], events: list[int]) -> Strip:
    """Return the norm of all `.grad` after each event."""
    grad = ledger.grad[np.ix_(events, rows)].astype(float)
    with np.errstate(over="ignore"):
        norm = np.sqrt((np.where(np.isfinite(grad), grad, 0.0) ** 2).sum(axis=1))
    area = norm, Key("", MUTED, 0.6)
    return Strip("‖.grad‖", style.number(norm.max(), 3), [area])


def _draw_cells(canvas: Canvas, plot: _Map) -> None:
    left, codes = plot.columns.left, plot.heat.codes
    wide = plot.columns.width * plot.each[0]
    tall = (plot.bottom - plot.top) / len(codes)
    pixels = _paint(plot.heat, plot.ledger.labels)
    canvas.image(left, plot.top, wide * codes.shape[1], plot.bottom - plot.top, pixels)
    frame = left, plot.top, plot.columns.end - left, plot.bottom - plot.top
    canvas.box(*frame, edge=LINE, line=0.8, z=4)
    # A wall of crosses says no more than its outline.
    broken = np.argwhere(codes == BROKEN)
    y, x = (broken[:: len(broken) // _MOST_CROSSES + 1] + 0.5).T
    mark: Any = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6}
    canvas.line(left + wide * x, plot.top + tall * y, width=0, dash="None", z=5, **mark)


def _paint(cells: Heat, labels: tuple[str, ...]) -> np.ndarray:
    """Colour the cells, RGBA: hue is the label, opacity the norm, because that works on a light and a dark page."""
    colors = list(style.label_colors(labels).values()) or [style.CYCLE[0]]
    palette = np.array([to_rgb(color) for color in colors])
    pixels = np.zeros((*cells.codes.shape, 4))
    pixels[cells.held] = 0.5, 0.5, 0.5, HELD
    added = cells.codes > BROKEN
    pixels[added, :3] = palette[cells.labels[added] % len(palette)]
    pixels[added, 3] = opacity(cells.levels[added])
    return pixels


def _draw_groups(canvas: Canvas, plot: _Map, groups: list[words.Group]) -> None:
    left, tall = plot.columns.left, (plot.bottom - plot.top) / len(plot.rows)
    taken: list[float] = []
    # The largest groups get their names first; a name with no room is left to its neighbours.
    for group in sorted(groups, key=lambda group: group.start - group.stop):
        first, last = plot.top + group.start * tall, plot.top + group.stop * tall
        if group.start and last - first >= 4:
            canvas.level(left - 7, plot.columns.end, first, color=LINE, width=0.6)
        middle = (first + last) / 2
        if all(abs(middle - other) >= 13 for other in taken):
            taken.append(middle)
            room = int((left - 20) / text_width("x", 11.5))
            name = words.shorten(group.name, room)
            canvas.text(left - 9, middle, name, size=11.5, mono=True, ha="right")


def _draw_strip(canvas: Canvas, plot: _Map, strip: Strip, base: float) -> None:
    strip.draw(canvas, plot.columns, base, plot.each[0])
    left, middle = plot.columns.left - 9, base - STRIP / 2
    canvas.text(left, middle, strip.name, size=11.5, ha="right")
    canvas.text(left, middle + 15, f"0 to {strip.most}", color=MUTED, ha="right")


def _draw_ticks(canvas: Canvas, columns: EventColumns, top: float) -> None:
    for i in ticks(len(columns.events)):
        x = columns.middle(i)
        canvas.upright(x, top, top + 4, color=MUTED, width=0.8)
        number = f"{columns.events[i]:,}"
        canvas.text(x, top + 13, number, color=MUTED, ha="center")
    canvas.text(columns.left - 9, top + 13, "event", color=MUTED, ha="right")


def _keys(plot: _Map, strips: list[Strip]) -> list[Key]:
    colors = list(style.label_colors(plot.ledger.labels).items())
    low, high = (style.number(10**end, 2) for end in plot.heat.range)
    scale = f"norm added (log), {low} to {high}"
    color = colors[0][1] if colors else style.CYCLE[0]
    weakest = float(opacity(np.array(0)))
    keys = [Key(scale, color, weakest, kind="scale")]
    for label, color in colors[:_MOST_COLORS]:
        keys.append(Key(words.shorten(label or "backward", 24), color))
    keys.append(Key(".grad held, nothing added", _GREY, HELD))
    if (plot.heat.codes == 0).any():
        keys.append(Key("no .grad (None)", LINE, 0.0))
    if plot.is_ruled:
        keys += rule_keys(plot.ledger, plot.columns.events)
    for strip in strips:
        keys += strip.keys()
    broken = int((~np.isfinite(plot.heat.added)).sum())
    if broken:
        text = f"not finite ({counted(broken, 'contribution')})"
        keys.append(Key(text, INK, kind="cross"))
    return keys


def _notes(plot: _Map) -> list[str]:
    notes, cells, ruled = [], plot.heat, plot.ruled
    if not plot.is_ruled:
        kinds = [f"{ruled.count(kind):,} × {kind}" for kind in dict.fromkeys(ruled)]
        notes.append(
            f"Too many for a line each: {', '.join(kinds)}. "
            "events=slice(0, 60) shows a part of them."
        )
    losses = len(plot.ledger.labels)
    if losses > _MOST_COLORS:
        notes.append(f"{losses} losses; colours repeat after the sixth.")
    counts = ((plot.each[1], "parameter"), (plot.each[0], "event"))
    thinned = [counted(n, what) for n, what in counts if n > 1]
    if thinned:
        each = " × ".join(thinned)
        notes.append(f"Thinned: each cell shows the largest contribution of {each}.")
    if 0 < cells.smallest < 10 ** cells.range[0] * (1 - 1e-6):
        least = style.number(cells.smallest, 2)
        notes.append(
            f"The faintest colour also stands for smaller norms, down to {least}."
        )
    return notes if plot.ledger.complete else [*notes, "The recording is incomplete."]
