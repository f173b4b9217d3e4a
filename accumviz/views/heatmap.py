"""The timeline of a ledger too large for bars: hue is the loss, opacity the norm; nothing is left out silently."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Ledger
from accumviz.ledger.lifecycle import Window
from accumviz.views import style, words
from accumviz.views.figure import (
    INK,
    LINE,
    MUTED,
    Canvas,
    draw_heading,
    heading_height,
    text_width,
)
from accumviz.views.legend import Key, draw_legend, entry, legend_height, rule_keys
from accumviz.views.strip import AFTER, ALLOCATED, BEFORE, allocated_keys, saved_keys
from accumviz.views.words import Group, group_rows

_BODY, _STRIP, _RIGHT = 440.0, 52.0, 18.0
_DECADES, _FAINTEST = 6.0, 0.24
# Rules closer than this many pixels would hide what they divide.
_RULE, _BAND = 2.5, 3.0
# Of windows that overlap, so many stand above each other, this far apart.
_BANDS, _NEXT = 6, 8.0
_SAVED, _ALLOCATED = ("saved_before", "saved_after"), ("peak", "allocated")
_PRESENT = (0.5, 0.5, 0.5, 0.13)
_WINDOW = 0.85


class Cells(NamedTuple):
    """Rows × columns of a heat map: largest finite norm (NaN: none), its label, what else is there."""

    norm: np.ndarray
    label: np.ndarray
    broken: np.ndarray
    present: np.ndarray


def cells(
    ledger: Ledger,
    columns: Sequence[int],
    events: Sequence[int],
    per_row: int,
    per_column: int,
) -> Cells:
    """Gather contribution norms, the largest of each `per_row` parameters × `per_column` events.

    The largest, not the mean: a single spike must survive thinning.
    """
    where = np.ix_(list(events), list(columns))
    added, state = ledger.contribution[where], ledger.state[where]
    there = (state & CONTRIBUTED) > 0

    def thin(array: np.ndarray) -> np.ndarray:
        across = np.maximum.reduceat(
            array, np.arange(0, len(events), per_column), axis=0
        )
        return np.maximum.reduceat(
            across, np.arange(0, len(columns), per_row), axis=1
        ).T

    norm, label = None, None
    for i, name in enumerate(ledger.labels or ("",)):
        mine = np.array([ledger[e].label == name for e in events])[:, None]
        part = thin(np.where(there & mine & np.isfinite(added), added, -1.0))
        if norm is None or label is None:
            norm, label = part, np.zeros(part.shape, int)
        else:
            label, norm = np.where(part > norm, i, label), np.maximum(part, norm)
    assert norm is not None and label is not None
    norm = np.where(norm < 0, np.nan, norm)
    return Cells(
        norm, label, thin(there & ~np.isfinite(added)), thin((state & PRESENT) > 0)
    )


def draw(ledger: Ledger, columns: list[int], events: list[int], width: float) -> Canvas:
    """Draw the heat map of these parameters (columns of the ledger) and events."""
    groups = group_rows([ledger.parameters[p].name for p in columns])
    strips = _strips(ledger, events)
    beside = (text_width(words.shorten(g.name, 24), 11.5) + 24 for g in groups)
    left = min(
        196.0, max(72.0, *beside, *(text_width(told, 11.5) + 12 for told, _ in strips))
    )
    room = width - left - _RIGHT
    per_column, per_row = math.ceil(len(events) / room), math.ceil(len(columns) / _BODY)
    data = cells(ledger, columns, events, per_row, per_column)
    wide = min(room / data.norm.shape[1], 84.0)
    tall = min(max(_BODY / data.norm.shape[0], 1.0), 26.0)
    plot, body = wide * data.norm.shape[1], tall * data.norm.shape[0]
    per_event = wide / per_column
    named = per_event >= 15
    bands = _bands(ledger, events, plot)
    top = (
        26
        + (heading_height(ledger, events, per_event) if named else 16)
        + _NEXT * max(len(bands) - 1, 0)
    )
    numbers = per_column == per_row == 1 and wide >= 46 and tall >= 15
    low, high = _range(data.norm)
    thinned = {"per_row": per_row, "per_column": per_column}
    keys, notes = _legend(
        ledger, data, columns, events, **thinned, low=low, plot=plot, bands=bool(bands)
    )
    bottom = top + body + _STRIP * (1 + len(strips)) + 30
    total = max(left + plot + _RIGHT, 480.0)
    canvas = Canvas(total, bottom + legend_height(keys, notes, total) + 22)

    colors = list(style.label_colors(ledger.labels).values()) or [style.CYCLE[0]]
    most = 0.5 if numbers else 1.0  # numbers are read on a paler cell
    pixels = paint(data, colors, low, high, most)
    summary = _summary(ledger, columns, events)
    with canvas.outside():
        canvas.text(12, 11, summary, color=MUTED)
    canvas.figure.above = f'<p class="av-remarks">{summary}</p>'
    canvas.figure.edges = canvas.figure.edges[0], 20.0, bottom
    canvas.image(left, top, plot, body, pixels, lifted(pixels, most))
    canvas.box(left, top, plot, body, edge=LINE, line=0.8, z=4)
    at = _Plot(
        left,
        top,
        wide,
        tall,
        top + body,
        [left + per_event * i for i in range(len(events) + 1)],
    )
    if numbers:
        _write(canvas, ledger, columns, events, at)
    _crosses(canvas, data, at)
    _rows(canvas, groups, at, tall / per_row)
    _columns(canvas, ledger, events, at, named, bands)
    _norms(canvas, ledger, columns, events, at)
    for n, (told, names) in enumerate(strips, 2):
        _bytes(canvas, ledger, events, at, at.bottom + n * _STRIP - 4, told, names)
    if not named:
        _ticks(canvas, events, at.x, bottom - 30)
    with canvas.outside():
        _scale(canvas, colors[0], low, high, bottom, most)
    draw_legend(
        canvas, keys, notes, bottom + 22, first=_scale_entry(colors[0], low, high, most)
    )
    return canvas


def _range(norm: np.ndarray) -> tuple[float, float]:
    positive = norm[norm > 0]
    if not positive.size:
        return -1.0, 0.0
    high = float(np.log10(positive.max()))
    low = max(float(np.log10(positive.min())), high - _DECADES)
    return (low, high) if high - low > 0.01 else (high - 1.0, high)


def paint(
    data: Cells, colors: Sequence[str], low: float, high: float, most: float = 1.0
) -> np.ndarray:
    """Colour the cells, RGBA: hue is the label, opacity the logarithm of the norm.

    Opacity, because it works on a light and on a dark page alike. A cell that only held
    `.grad` is a faint grey; one where `.grad` was None is clear.
    """
    palette = np.array(
        [[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colors]
    )
    pixels = np.zeros((*data.norm.shape, 4))
    pixels[data.present] = _PRESENT
    with np.errstate(divide="ignore"):
        share = np.clip((np.log10(data.norm) - low) / (high - low), 0, 1)
    # More steps than an eye can tell apart would only make the page heavier.
    share = np.round(share * 23) / 23
    there = ~np.isnan(data.norm)
    pixels[there, :3] = palette[data.label[there] % len(palette)]
    pixels[there, 3] = (_FAINTEST + (1 - _FAINTEST) * share[there]) * most
    return pixels


def lifted(pixels: np.ndarray, most: float = 1.0) -> np.ndarray:
    """What lies behind cells on a dark ground: the weaker one is, the more of its colour; nothing behind a grey one."""
    lift = pixels.copy()
    lift[..., 3] = np.where(
        np.ptp(pixels[..., :3], axis=-1) > 0, most - pixels[..., 3], 0
    )
    return lift


class _Plot(NamedTuple):
    """Where the heat map stands, in pixels: its corner, the size of a cell, and the left edge of each event."""

    left: float
    top: float
    wide: float
    tall: float
    bottom: float
    x: list[float]


def _rows(canvas: Canvas, groups: list[Group], at: _Plot, tall: float) -> None:
    taken: list[float] = []
    # The largest groups get their names first; a name with no room is left to its neighbours.
    for group in sorted(groups, key=lambda g: g.start - g.stop):
        first, last = at.top + group.start * tall, at.top + group.stop * tall
        if group.start and last - first >= 4:
            canvas.line(
                [at.left - 7, at.x[-1]],
                [first, first],
                color=LINE,
                width=0.6,
                alpha=0.9,
            )
        middle = (first + last) / 2
        if all(abs(middle - other) >= 13 for other in taken):
            taken.append(middle)
            canvas.text(
                at.left - 9,
                middle,
                words.shorten(group.name, 24),
                points=11.5,
                mono=True,
                ha="right",
            )


def _bands(ledger: Ledger, events: list[int], plot: float) -> list[list[Window]]:
    """The windows that end here, in rows where none lies on another; none where they are too many to be seen."""
    chosen, rows = set(events), list[list[Window]]()
    windows = [w for w in ledger.windows() if w.step in chosen and w.backwards]
    for window in windows if len(windows) <= plot / _BAND else ():
        free = (row for row in rows if row[-1].step <= window.backwards[0])
        row = next(free, rows[-1] if len(rows) == _BANDS else None)
        if row is None:
            rows.append(row := [])
        row.append(window)
    return rows


def _columns(
    canvas: Canvas,
    ledger: Ledger,
    events: list[int],
    plot: _Plot,
    named: bool,
    bands: list[list[Window]],
) -> None:
    at, x, top, bottom = (
        {e: i for i, e in enumerate(events)},
        plot.x,
        plot.top,
        plot.bottom,
    )
    each = x[1] - x[0]
    for n, window in ((n, window) for n, row in enumerate(bands) for window in row):
        first = x[at.get(window.backwards[0], 0)]
        canvas.box(
            first,
            top - 9 - n * _NEXT,
            max(x[at[window.step]] - first, 1.0),
            6,
            fill=INK,
            alpha=_WINDOW,
        )
    above = top - 12 - _NEXT * max(len(bands) - 1, 0)
    ruled = [e for e in events if ledger[e].kind != "backward"]
    if named:
        for e in events:
            draw_heading(
                canvas, ledger[e], x[at[e]], each, top=above, bottom=bottom, above=24
            )
    elif len(ruled) <= (x[-1] - x[0]) / _RULE:
        for e in ruled:
            color, dash = style.kind(ledger[e].kind)
            canvas.line(
                [x[at[e]]] * 2, [top - 3, bottom], color=color, width=0.9, dash=dash
            )


def _write(
    canvas: Canvas, ledger: Ledger, columns: list[int], events: list[int], at: _Plot
) -> None:
    for (i, e), (row, p) in itertools.product(enumerate(events), enumerate(columns)):
        if ledger.state[e, p] & CONTRIBUTED:
            told = style.number(float(ledger.contribution[e, p]), 3)
            x, y = at.left + at.wide * (i + 0.5), at.top + at.tall * (row + 0.5)
            canvas.text(x, y, told, points=11, ha="center")


def _crosses(canvas: Canvas, data: Cells, at: _Plot) -> None:
    rows, columns = np.nonzero(data.broken)
    if len(rows) > 400:  # a wall of crosses says no more than its outline
        rows, columns = rows[:: len(rows) // 400], columns[:: len(columns) // 400]
    x, y = at.left + at.wide * (columns + 0.5), at.top + at.tall * (rows + 0.5)
    canvas.points(x.tolist(), y.tolist(), marker="x", size=6)


def _norms(
    canvas: Canvas, ledger: Ledger, columns: list[int], events: list[int], at: _Plot
) -> None:
    part = ledger.grad[np.ix_(events, columns)].astype(float)
    with np.errstate(over="ignore"):
        norm = np.sqrt(
            np.nansum(np.where(np.isfinite(part), part, np.nan) ** 2, axis=1)
        )
    most = float(norm.max()) or 1.0
    x, base, room = at.x, at.bottom + _STRIP - 4, _STRIP - 14
    per_column = round(at.wide / (x[1] - x[0]))
    starts = np.arange(0, len(events), per_column)
    # A step ends its column: `.grad` stays as it is until the next event.
    high = np.repeat(base - room * np.maximum.reduceat(norm, starts) / most, 2).tolist()
    low = np.repeat(base - room * np.minimum.reduceat(norm, starts) / most, 2).tolist()
    edges = np.append(np.array(x)[starts], x[-1])
    across = np.repeat(edges, 2)[1:-1].tolist()
    flat = [base] * len(across)
    canvas.area(across, flat, high, color=MUTED, alpha=0.3)
    canvas.line(across, high, color=INK, width=0.9)
    if per_column > 1:
        canvas.line(across, low, color=MUTED, width=0.7)
    canvas.line([x[0], x[-1]], [base, base], color=LINE, width=0.8)
    canvas.text(
        x[0] - 9, base - room / 2 - 7, "‖.grad‖", points=11.5, mono=True, ha="right"
    )
    canvas.text(
        x[0] - 9,
        base - room / 2 + 8,
        f"0 to {style.number(most, 3)}",
        points=11,
        color=MUTED,
        ha="right",
    )


def _strips(ledger: Ledger, events: list[int]) -> list[tuple[str, tuple[str, str]]]:
    """The strips of bytes that were measured: what each is called, and what it shows, the fainter first."""
    return [
        (told, names)
        for told, names in (("saved tensors", _SAVED), ("allocated", _ALLOCATED))
        if any(np.isfinite(getattr(ledger[e], name)) for e in events for name in names)
    ]


def _bytes(
    canvas: Canvas,
    ledger: Ledger,
    events: list[int],
    at: _Plot,
    base: float,
    told: str,
    names: tuple[str, str],
) -> None:
    x, room = at.x, _STRIP - 14
    first, second = (
        np.nan_to_num([getattr(ledger[e], name) for e in events]) for name in names
    )
    most = float(max(first.max(), second.max())) or 1.0
    edges = np.repeat(x, 2)[1:-1].tolist()

    def level(bytes_: np.ndarray) -> list[float]:
        return list(np.repeat(base - room * bytes_ / most, 2).tolist())

    flat = [base] * len(edges)
    if names == _SAVED:
        canvas.area(edges, flat, level(first), color=MUTED, alpha=BEFORE)
        canvas.area(edges, flat, level(second), color=MUTED, alpha=AFTER)
    else:
        canvas.area(edges, flat, level(second), color=INK, alpha=ALLOCATED)
        for left, right, peak in zip(x, x[1:], first.tolist(), strict=False):
            if peak:
                canvas.line(
                    [left, right], [base - room * peak / most] * 2, width=1.6, z=4
                )
    canvas.line([x[0], x[-1]], [base, base], color=LINE, width=0.8)
    canvas.text(x[0] - 9, base - room / 2 - 7, told, points=11.5, ha="right")
    canvas.text(
        x[0] - 9,
        base - room / 2 + 8,
        f"0 to {style.size(most)}",
        points=11,
        color=MUTED,
        ha="right",
    )


def _ticks(canvas: Canvas, events: list[int], x: list[float], top: float) -> None:
    span = len(events)
    step = next(
        s
        for k in itertools.count()
        for s in (10**k, 2 * 10**k, 5 * 10**k)
        if span / s <= 8
    )
    for i in range(0, span, step):
        at = (x[i] + x[min(i + 1, span)]) / 2
        canvas.line([at, at], [top, top + 4], color=MUTED, width=0.8)
        canvas.text(at, top + 13, f"{events[i]:,}", points=11, color=MUTED, ha="center")
    canvas.text(x[0] - 9, top + 13, "event", points=11, color=MUTED, ha="right")


_SCALED = "norm of the contribution (logarithmic)"


def _scale_entry(color: str, low: float, high: float, most: float) -> str:
    """The scale in steps that can be told apart; on a dark ground the weaker ones are lifted as cells are."""
    shades = [(n, _FAINTEST + (1 - _FAINTEST) * n / 15) for n in range(16)]
    place = 'y="1" width="6.2" height="12"'
    lift, seen = (
        "".join(
            f'<rect x="{6 * n}" {place} fill-opacity="{(a if own else 1 - a) * most:.2f}"/>'
            for n, a in shades
        )
        for own in (False, True)
    )
    drawn = (
        f'<g fill="{color}"><g style="opacity: var(--av-lift, 0)">{lift}</g>{seen}</g>'
    )
    return entry(
        drawn,
        f"{_SCALED}, {style.number(10**low, 2)} to {style.number(10**high, 2)}",
        96,
    )


def _scale(
    canvas: Canvas, color: str, low: float, high: float, top: float, most: float
) -> None:
    rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    strip = np.zeros((1, 64, 4))
    strip[0, :, :3], strip[0, :, 3] = rgb, np.linspace(_FAINTEST, 1, 64) * most
    canvas.text(12, top + 9, _SCALED, points=11.5)
    x = 18 + text_width(_SCALED, 11.5) * 0.95
    canvas.text(x + 42, top + 9, style.number(10**low, 2), points=11.5, ha="right")
    canvas.image(x + 48, top + 3, 96, 12, strip, lifted(strip, most))
    canvas.text(x + 150, top + 9, style.number(10**high, 2), points=11.5)


def _counted_kinds(kinds: list[str]) -> str:
    return ", ".join(f"{kinds.count(kind):,} × {kind}" for kind in dict.fromkeys(kinds))


def _summary(ledger: Ledger, columns: list[int], events: list[int]) -> str:
    counts = f"{words.counted(len(columns), 'parameter')} × {words.counted(len(events), 'event')}"
    return f"{counts}, {words.window_summary(ledger)}"


def _legend(
    ledger: Ledger,
    data: Cells,
    columns: list[int],
    events: list[int],
    *,
    per_row: int,
    per_column: int,
    low: float,
    plot: float,
    bands: bool,
) -> tuple[list[Key], list[str]]:
    colors = style.label_colors(ledger.labels)
    keys = [
        Key(words.shorten(label or "backward", 24), color)
        for label, color in list(colors.items())[:6]
    ]
    keys += [Key(".grad held, nothing added", "#7f7f7f", _PRESENT[3])]
    if (np.isnan(data.norm) & ~data.present).any():
        keys += [Key("no .grad (None)", LINE, 0.0)]
    keys += [Key("accumulation window", INK, _WINDOW, kind="fill")] if bands else []
    ruled, notes = [ledger[e].kind for e in events if ledger[e].kind != "backward"], []
    if len(ruled) <= plot / _RULE:
        keys += rule_keys(ledger, events)
    else:
        notes.append(
            f"Too many for a line each: {_counted_kinds(ruled)}. events=slice(0, 60) shows a part of them."
        )
    if any(np.isfinite(ledger[e].saved_before) for e in events):
        keys += saved_keys(ledger, events)
    if any(np.isfinite(ledger[e].allocated) for e in events):
        keys += allocated_keys(ledger, events)
    if len(colors) > 6:
        notes.append(f"{len(colors)} losses; colours repeat after the sixth.")
    if data.broken.any():
        part = ledger.contribution[np.ix_(events, columns)]
        there = (ledger.state[np.ix_(events, columns)] & CONTRIBUTED) > 0
        keys.append(
            Key(
                f"not finite ({words.counted(int((there & ~np.isfinite(part)).sum()), 'contribution')})",
                INK,
                kind="cross",
            )
        )
    if per_column > 1 or per_row > 1:
        thinned = [
            words.counted(n, what)
            for n, what in ((per_row, "parameter"), (per_column, "event"))
            if n > 1
        ]
        notes.append(
            f"Thinned: each cell shows the largest contribution of {' × '.join(thinned)}."
        )
    smallest = data.norm[data.norm > 0]
    if smallest.size and np.log10(smallest.min()) < low - 1e-6:
        notes.append(
            f"The faintest colour also stands for smaller norms, down to {style.number(smallest.min(), 2)}."
        )
    if not ledger.complete:
        notes.append("The recording is incomplete.")
    return keys, notes
