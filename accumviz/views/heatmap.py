"""Draw the timeline of a large ledger as a heat map: hue is the loss, opacity the norm."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import to_rgb

from accumviz.ledger.flow import Window
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Ledger
from accumviz.show import counted
from accumviz.views import style, words
from accumviz.views.columns import (
    AFTER,
    ALLOCATED,
    BEFORE,
    EventColumns,
    draw_heading,
    draw_rule,
    heading_height,
    measured,
    rule_keys,
    rule_top,
)
from accumviz.views.figure import (
    INK,
    LINE,
    MUTED,
    Canvas,
    Key,
    PageFigure,
    draw_legend,
    text_width,
)
from accumviz.views.heat import BROKEN, HELD, Heat, heat, opacity
from accumviz.views.words import group_rows

_BODY, _STRIP, _RIGHT = 440.0, 52.0, 18.0
# From this width on, a column has a name; from this size on, a cell has a number, on a paler ground.
_NAMED, _NUMBERED, _PALE = 15.0, (46.0, 15.0), 0.5
# Lines of events and bands of windows that are closer than this would hide what they divide.
_RULE, _BAND = 2.5, 3.0
# Of windows that overlap, so many stand above each other, this far apart.
_BANDS, _NEXT = 6, 8.0
_WINDOW = 0.85
_MOST_CROSSES, _MOST_COLORS = 400, 6
_GREY = "#7f7f7f"


class _Plot(NamedTuple):
    """A heat map and where it stands: its columns, its upper and lower edge.

    A cell is the largest contribution of `each`: so many events, so many parameters.
    """

    ledger: Ledger
    rows: list[int]
    columns: EventColumns
    heat: Heat
    each: tuple[int, int]
    top: float
    bottom: float

    @property
    def cell(self) -> tuple[float, float]:
        """How wide and how tall a cell is."""
        tall = (self.bottom - self.top) / len(self.heat.codes)
        return self.columns.width * self.each[0], tall

    @property
    def numbered(self) -> bool:
        """Whether each contribution has a cell with room for its norm."""
        wide, tall = self.cell
        whole = self.each == (1, 1)
        return whole and wide >= _NUMBERED[0] and tall >= _NUMBERED[1]


def draw(
    ledger: Ledger, rows: list[int], events: list[int], width: float
) -> PageFigure:
    """Draw the heat map of these parameters and events."""
    groups = group_rows([ledger.parameters[p].name for p in rows])
    strips = _strips(ledger, rows, events)
    named = [text_width(words.shorten(g.name, 24), 11.5) + 24 for g in groups]
    named += [text_width(strip.name, 11.5) + 12 for strip in strips]
    left = min(196.0, max(72.0, *named))
    room = width - left - _RIGHT
    each = math.ceil(len(events) / room), math.ceil(len(rows) / _BODY)
    cells = _cells(ledger, rows, events, *each)
    tall, wide = cells.codes.shape
    columns = EventColumns(left, min(room / wide, 84.0) / each[0], events)
    bands = _bands(ledger, columns)
    above = 26 + (heading_height(ledger, columns) if columns.width >= _NAMED else 16.0)
    top = above + _NEXT * max(len(bands) - 1, 0)
    bottom = top + min(max(_BODY / tall, 1.0), 26.0) * tall
    plot = _Plot(ledger, rows, columns, cells, each, top, bottom)

    canvas = Canvas(max(columns.end + _RIGHT, 480.0))
    end = bottom + _STRIP * len(strips) + 30
    _draw_summary(canvas, plot, end)
    _draw_cells(canvas, plot)
    _draw_groups(canvas, plot, groups)
    _draw_bands(canvas, plot, bands)
    _draw_events(canvas, plot, above)
    for n, strip in enumerate(strips, 1):
        strip.draw(canvas, columns, bottom + n * _STRIP - 4, each=each[0])
    if columns.width < _NAMED:
        _draw_ticks(canvas, columns, end - 30)
    keys, notes = _legend(plot, bool(bands))
    return canvas.finish(draw_legend(canvas, keys, notes, end))


def _cells(
    ledger: Ledger, rows: list[int], events: list[int], across: int, down: int
) -> Heat:
    where = np.ix_(events, rows)
    state = ledger.state[where]
    added = np.where(state & CONTRIBUTED, ledger.contribution[where], -1.0).T
    held = ((state & PRESENT) > 0).T
    numbered = {label: i for i, label in enumerate(ledger.labels)}
    labels = np.array([numbered.get(ledger[e].label, 0) for e in events], np.int64)
    starts = np.arange(0, len(events), across), np.arange(0, len(rows), down)
    return heat(added, held, labels, *starts)


def _draw_summary(canvas: Canvas, plot: _Plot, end: float) -> None:
    counts = counted(len(plot.rows), "parameter")
    counts += f" × {counted(len(plot.columns.events), 'event')}"
    summary = f"{counts}, {words.window_summary(plot.ledger)}"
    with canvas.outside():
        canvas.text(12, 11, summary, size=12, color=MUTED)
    canvas.figure.above = f'<p class="av-remarks">{summary}</p>'
    canvas.figure.edges = canvas.figure.edges[0], 20.0, end


def _draw_cells(canvas: Canvas, plot: _Plot) -> None:
    left, top, (wide, tall) = plot.columns.left, plot.top, plot.cell
    codes, height = plot.heat.codes, plot.bottom - top
    most = _PALE if plot.numbered else 1.0
    pixels = _paint(plot.heat, plot.ledger.labels, most)
    canvas.image(left, top, wide * codes.shape[1], height, pixels)
    width = plot.columns.end - left
    canvas.box(left, top, width, height, edge=LINE, line=0.8, z=4)
    # A wall of crosses says no more than its outline.
    broken = np.argwhere(codes == BROKEN)
    y, x = (broken[:: len(broken) // _MOST_CROSSES + 1] + 0.5).T
    mark: dict[str, Any] = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6}
    canvas.line(left + wide * x, top + tall * y, width=0.0, dash="None", z=5, **mark)
    if plot.numbered:
        for row, column in np.argwhere(~(plot.heat.added < 0)).tolist():
            told = style.number(float(plot.heat.added[row, column]), 3)
            middle = left + wide * (column + 0.5), top + tall * (row + 0.5)
            canvas.text(*middle, told, ha="center")


def _paint(cells: Heat, labels: tuple[str, ...], most: float) -> np.ndarray:
    """Colour the cells, RGBA: hue is the label, opacity the norm, because that works on a light and a dark page."""
    colors = list(style.label_colors(labels).values()) or [style.CYCLE[0]]
    palette = np.array([to_rgb(color) for color in colors])
    pixels = np.zeros((*cells.codes.shape, 4))
    pixels[cells.held] = 0.5, 0.5, 0.5, HELD
    added = cells.codes > BROKEN
    pixels[added, :3] = palette[cells.labels[added] % len(palette)]
    pixels[added, 3] = opacity(cells.levels[added]) * most
    return pixels


def _draw_groups(canvas: Canvas, plot: _Plot, groups: list[words.Group]) -> None:
    left, tall = plot.columns.left, plot.cell[1] / plot.each[1]
    taken: list[float] = []
    # The largest groups get their names first; a name with no room is left to its neighbours.
    for group in sorted(groups, key=lambda g: g.start - g.stop):
        first, last = plot.top + group.start * tall, plot.top + group.stop * tall
        if group.start and last - first >= 4:
            look = {"color": LINE, "width": 0.6, "alpha": 0.9}
            canvas.level(left - 7, plot.columns.end, first, **look)
        middle = (first + last) / 2
        if all(abs(middle - other) >= 13 for other in taken):
            taken.append(middle)
            name = words.shorten(group.name, 24)
            canvas.text(left - 9, middle, name, size=11.5, mono=True, ha="right")


def _bands(ledger: Ledger, columns: EventColumns) -> list[list[Window]]:
    """The windows that end here, in rows where none lies on another; none where they are too many to be seen."""
    chosen, rows = set(columns.events), list[list[Window]]()
    windows = [w for w in ledger.windows() if w.step in chosen and w.backwards]
    if len(windows) > (columns.end - columns.left) / _BAND:
        return []
    for window in windows:
        free = (row for row in rows if row[-1].step <= window.backwards[0])
        row = next(free, rows[-1] if len(rows) == _BANDS else None)
        if row is None:
            rows.append(row := [])
        row.append(window)
    return rows


def _draw_bands(canvas: Canvas, plot: _Plot, bands: list[list[Window]]) -> None:
    at = {e: i for i, e in enumerate(plot.columns.events)}
    for n, row in enumerate(bands):
        for window in row:
            first = plot.columns.x(at.get(window.backwards[0], 0))
            wide = max(plot.columns.x(at[window.step]) - first, 1.0)
            y = plot.top - 9 - n * _NEXT
            canvas.box(first, y, wide, 6, fill=INK, alpha=_WINDOW)


def _draw_events(canvas: Canvas, plot: _Plot, above: float) -> None:
    columns, named = plot.columns, plot.columns.width >= _NAMED
    high = rule_top(columns, above=24, top=above - 12) if named else plot.top - 3
    for i, e in enumerate(columns.events):
        event, x = plot.ledger[e], columns.x(i)
        if named:
            draw_heading(canvas, event, x, columns.width, above=24, top=above - 12)
        if event.kind != "backward" and _is_ruled(plot):
            width = 1.8 if named else 0.9
            draw_rule(canvas, event, x, high, plot.bottom, width=width)


def _is_ruled(plot: _Plot) -> bool:
    """Whether lines of events stand apart."""
    return len(_ruled(plot)) <= (plot.columns.end - plot.columns.left) / _RULE


def _ruled(plot: _Plot) -> list[str]:
    kinds = [plot.ledger[e].kind for e in plot.columns.events]
    return [kind for kind in kinds if kind != "backward"]


class _Strip(NamedTuple):
    """What is drawn below a heat map: values event by event, their largest in words, and how each series looks.

    `levels` are lines over some of the events only, NaN where there is none.
    """

    name: str
    most: str
    series: list[tuple[np.ndarray, str, float]]
    levels: np.ndarray | None = None

    def draw(
        self, canvas: Canvas, columns: EventColumns, base: float, *, each: int
    ) -> None:
        """Draw it upwards from its base; of `each` so many events that share a pixel, the largest."""
        known = [values for values, *_ in self.series]
        known += [] if self.levels is None else [self.levels]
        scale = (_STRIP - 14) / (float(np.nanmax(known)) or 1.0)
        starts = np.arange(0, len(columns.events), each)
        x = [columns.x(start) for start in starts.tolist()] + [columns.end]
        across = [float(edge) for edge in np.repeat(x, 2)[1:-1]]
        for values, color, alpha in self.series:
            tops = base - scale * np.maximum.reduceat(np.nan_to_num(values), starts)
            canvas.area(
                across, base, np.repeat(tops, 2).tolist(), color=color, alpha=alpha
            )
        levels = np.zeros(0) if self.levels is None else self.levels
        for i in np.flatnonzero(levels > 0).tolist():
            y = base - scale * float(levels[i])
            canvas.level(columns.x(i), columns.x(i + 1), y, width=1.6, z=4)
        middle, left = base - (_STRIP - 14) / 2, columns.left - 9
        canvas.level(columns.left, columns.end, base, color=LINE, width=0.8)
        canvas.text(left, middle - 7, self.name, size=11.5, ha="right")
        canvas.text(left, middle + 8, f"0 to {self.most}", color=MUTED, ha="right")


def _strips(ledger: Ledger, rows: list[int], events: list[int]) -> list[_Strip]:
    part = ledger.grad[np.ix_(events, rows)].astype(float)
    with np.errstate(over="ignore"):
        norm = np.sqrt((np.where(np.isfinite(part), part, 0.0) ** 2).sum(axis=1))
    strips = [_Strip("‖.grad‖", style.number(norm.max(), 3), [(norm, MUTED, 0.6)])]
    for found in measured(ledger, events):
        most = style.size(found.most)
        if found.saved:
            series = [(found.first, MUTED, BEFORE), (found.second, MUTED, AFTER)]
            strips.append(_Strip("saved tensors", most, series))
        else:
            series = [(found.first, INK, ALLOCATED)]
            strips.append(_Strip("allocated", most, series, found.second))
    return strips


def _draw_ticks(canvas: Canvas, columns: EventColumns, top: float) -> None:
    span = len(columns.events)
    steps = (k * 10**n for n in itertools.count() for k in (1, 2, 5))
    step = next(step for step in steps if span / step <= 8)
    for i in range(0, span, step):
        x = columns.x(i) + columns.width / 2
        canvas.upright(x, top, top + 4, color=MUTED, width=0.8)
        told = f"{columns.events[i]:,}"
        canvas.text(x, top + 13, told, color=MUTED, ha="center")
    canvas.text(columns.left - 9, top + 13, "event", color=MUTED, ha="right")


def _legend(plot: _Plot, bands: bool) -> tuple[list[Key], list[str]]:
    ledger, cells, events = plot.ledger, plot.heat, plot.columns.events
    colors = list(style.label_colors(ledger.labels).items())
    keys = []
    if not plot.numbered:
        keys.append(_scale(plot, colors[0][1] if colors else style.CYCLE[0]))
    keys += [
        Key(words.shorten(label or "backward", 24), color)
        for label, color in colors[:_MOST_COLORS]
    ]
    keys.append(Key(".grad held, nothing added", _GREY, HELD))
    if (cells.codes == 0).any():
        keys.append(Key("no .grad (None)", LINE, 0.0))
    if bands:
        keys.append(Key("accumulation window", INK, _WINDOW, kind="fill"))
    keys += rule_keys(ledger, events) if _is_ruled(plot) else []
    for strip in measured(ledger, events):
        keys += strip.keys()
    if broken := int((~np.isfinite(cells.added)).sum()):
        told = counted(broken, "contribution")
        keys.append(Key(f"not finite ({told})", INK, kind="cross"))
    return keys, _notes(plot, len(colors))


def _scale(plot: _Plot, color: str) -> Key:
    low, high = (style.number(10**end, 2) for end in plot.heat.range)
    text = f"norm of the contribution (logarithmic), {low} to {high}"
    return Key(text, color, float(opacity(np.array(0))), kind="scale")


def _notes(plot: _Plot, losses: int) -> list[str]:
    notes, cells, ruled = [], plot.heat, _ruled(plot)
    if not _is_ruled(plot):
        kinds = [f"{ruled.count(kind):,} × {kind}" for kind in dict.fromkeys(ruled)]
        told = ", ".join(kinds)
        notes.append(
            f"Too many for a line each: {told}. events=slice(0, 60) shows a part of them."
        )
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
