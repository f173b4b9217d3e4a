"""Measured -> HTML: a table with a bar or a curve in each row, and chips that say where each run was made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from accumviz.book.measurements import Measured, Measurement, provenance
from accumviz.show import escape, marked
from accumviz.views import style
from accumviz.views.words import counted

# The recorded run and this one keep their colours, whichever of them is there.
_COLOR = {"recorded": style.CYCLE[0], "this run": style.CYCLE[1]}
_DASH = ("", "", "6 3", "2 3")
_WIDE, _HIGH, _THICK = 240, 44, 12
_MOST_TOLD = 24

_CSS = """
.accumviz.av-measured { max-width: 100%; text-align: left; }
.av-measured ul.av-chips { display: flex; flex-wrap: wrap; gap: 0.3rem 0.5rem; list-style: none; margin: 0 0 0.5rem;
  padding: 0; font-size: 0.8125rem; }
.av-measured li.av-chip { border: 1px solid var(--av-line); border-radius: 1rem; margin: 0; padding: 0.1rem 0.7rem;
  overflow-wrap: anywhere; }
.av-measured li.av-chip b { font-weight: 600; }
.av-measured .av-key { width: 0.7rem; height: 0.7rem; }
.av-measured .av-scroll { overflow-x: auto; max-width: 100%; }
.av-measured table { border-collapse: collapse; font-size: 0.8125rem; line-height: 1.35; color: inherit; margin: 0;
  width: auto; border: 0; font-variant-numeric: tabular-nums; }
.av-measured table tr, .av-measured table th, .av-measured table td { background: transparent !important; }
.av-measured th, .av-measured td { padding: 0.25rem 0.6rem; border: 0; font-weight: normal; text-align: left;
  color: inherit; vertical-align: middle; }
.av-measured tbody th { min-width: 7rem; }
.av-measured tbody th.av-quiet { min-width: 0; white-space: nowrap; }
.av-measured code { background: none; border: 0; padding: 0; color: inherit; font-size: 0.95em; }
.av-measured thead th { color: var(--av-muted); vertical-align: bottom; }
.av-measured table + table { margin-top: 0.8rem; }
.av-measured tbody { border-top: 1px solid var(--av-line); }
.av-measured .av-n { text-align: right; white-space: nowrap; }
.av-measured .av-quiet { color: var(--av-muted); }
.av-measured svg { display: block; }
.av-measured svg.av-key, .av-measured th svg { display: inline-block; margin-right: 0.35rem; }
.accumviz.av-measured svg.av-bar { max-width: max(4rem, 18vw); }
.av-measured .av-each { display: block; }
.av-measured p { margin: 0.5rem 0 0; font-size: 0.8125rem; }
.av-measured details { margin-top: 0.4rem; font-size: 0.8125rem; color: var(--av-muted); }
.av-measured details summary { cursor: pointer; width: max-content; }
.av-measured details li { overflow-wrap: anywhere; }
@media (max-width: 480px) {
  .av-measured th, .av-measured td { padding-inline: 0.25rem; }
  .av-measured tbody th { min-width: 4.5rem; }
}
"""


def measured_html(measured: Measured) -> str:
    """Show what was measured: the run recorded on a GPU, if there is one, and the run made here.

    Runs made on GPUs share their bars and curves; a GPU and a CPU have tables, and a measure, of their own.

    >>> "this run:" in measured_html(Measured("doc/example", Measurement({"full batch": 2.0})))
    True
    """
    runs = measured.runs
    together = all(run.gpu for run in runs.values())
    tables = "".join(
        _table(measured, group)
        for group in ([runs] if together else [{t: r} for t, r in runs.items()])
    )
    return (
        f'<div class="accumviz av-measured"><style>{style.CSS}{_CSS}</style>{_chips(measured)}'
        f'<div class="av-scroll" tabindex="0" role="group" aria-label="measured">{tables}</div>'
        f"{_remarks(measured)}{_in_words(measured)}</div>"
    )


def _table(measured: Measured, runs: dict[str, Measurement]) -> str:
    """One table for runs that share a measure."""
    labels = [
        label
        for label in _labels(measured.here)
        if label[1] in ("", *_seen(runs.values()))
    ]
    head, cells = (_bars if measured.here.single else _curves)(measured, runs, labels)
    rows = "".join(
        f"<tr>{_heads(label, labels)}{cells[label]}</tr>" for label in labels
    )
    return f"<table><thead><tr>{_corner(measured.here)}{head}</tr></thead><tbody>{rows}</tbody></table>"


def amount(value: float, unit: str) -> str:
    """Write a number with its unit, as a person would.

    >>> amount(0.000012345, "s"), amount(2048, "bytes"), amount(3, ""), amount(float("nan"), "s")
    ('12.3 µs', '2 KiB', '3', '–')
    """
    if math.isnan(value):
        return "–"
    if unit == "bytes":
        return style.size(value)
    if unit != "s" or not math.isfinite(value):
        return f"{style.number(value, 3)} {unit}".rstrip()
    factor, name = next(
        (
            (f, n)
            for f, n in ((1, "s"), (1e3, "ms"), (1e6, "µs"))
            if abs(value) * f >= 1
        ),
        (1e9, "ns"),
    )
    return f"{style.number(value * factor, 3)} {name}"


def _key(title: str) -> str:
    return (
        f'<svg class="av-key" aria-hidden="true" viewBox="0 0 1 1"><rect width="1" height="1" fill="{_COLOR[title]}"/>'
        "</svg>"
    )


def _called(measured: Measured, title: str) -> str:
    """What tells a run from the other one: its device, unless both were made on the same."""
    runs = measured.runs
    return (
        runs[title].device
        if len({run.device for run in runs.values()}) == len(runs)
        else title
    )


def _labels(run: Measurement) -> list[tuple[str, str]]:
    """What the rows of the table are: each number's own, or each curve's with all its series."""
    if not run.single:
        return [(row, "") for row in run.names()]
    return [(row, name) for row, names in run.names().items() for name in names]


def _corner(run: Measurement) -> str:
    return "<td></td>" if run.flat or not run.single else "<td></td><td></td>"


def _heads(label: tuple[str, str], labels: list[tuple[str, str]]) -> str:
    row, name = label
    if not name:
        return f'<th scope="row">{marked(row)}</th>'
    names = [series for other, series in labels if other == row]
    first = (
        f'<th scope="rowgroup" rowspan="{len(names)}">{marked(row)}</th>'
        if name == names[0]
        else ""
    )
    return f'{first}<th class="av-quiet" scope="row">{marked(name)}</th>'


def _most(cells: Iterable[list[float]]) -> float:
    return (
        max((abs(x) for cell in cells for x in cell if math.isfinite(x)), default=0.0)
        or 1.0
    )


def _bars(
    measured: Measured, runs: dict[str, Measurement], labels: list[tuple[str, str]]
) -> tuple[str, dict[tuple[str, str], str]]:
    """The columns of runs that share a measure: their numbers, and one bar for each."""
    head, body = "", dict.fromkeys(labels, "")
    cells = {
        label: {title: run.rows()[label[0]][label[1]][0] for title, run in runs.items()}
        for label in labels
    }
    most = _most(list(each.values()) for each in cells.values())
    against = measured.here.flat and len(labels) > 1
    for title in runs:
        ratio = (
            f'<th class="av-n" scope="col">× “{marked(labels[0][0])}”</th>'
            if against
            else ""
        )
        head += f'<th class="av-n" scope="col">{escape(_called(measured, title))}</th>{ratio}'
        for label in labels:
            value, first = cells[label][title], cells[labels[0]][title]
            body[label] += (
                f'<td class="av-n">{escape(amount(value, measured.unit))}</td>'
            )
            times = (
                style.number(value / first, 3)
                if math.isfinite(first) and first
                else "–"
            )
            body[label] += f'<td class="av-n av-quiet">{times}</td>' if against else ""
    for label in labels:
        drawn = ""
        for i, (title, value) in enumerate(cells[label].items()):
            share = 0.0 if math.isnan(value) else min(abs(value) / most, 1.0)
            place = (
                f'y="{i * _THICK}" width="{share * _WIDE:.1f}" height="{_THICK - 2}"'
            )
            drawn += f'<rect x="0" {place} fill="{_COLOR[title]}"/>' if share else ""
        bars = _svg(drawn, _THICK * len(runs) - 2, _WIDE).replace(
            ">", ' class="av-bar" preserveAspectRatio="none">', 1
        )
        body[label] += f"<td>{bars}</td>"
    return f"{head}<td></td>", body


def _curves(
    measured: Measured, runs: dict[str, Measurement], labels: list[tuple[str, str]]
) -> tuple[str, dict[tuple[str, str], str]]:
    """The columns of runs that share a measure: one drawing for each row, and how far each series goes."""
    series, titles = _seen(runs.values()), list(runs)
    rows = {title: run.rows() for title, run in runs.items()}
    most = _most(
        row[name]
        for table in rows.values()
        for row in table.values()
        for name in series
    )
    lengths = {
        len(row[name])
        for table in rows.values()
        for row in table.values()
        for name in series
    }
    # What stands for an axis: all rows of a table share it.
    axis = f"0 to {amount(most, measured.unit)}" + (
        f", over {counted(lengths.pop(), 'value')}" if len(lengths) == 1 else ""
    )
    called = escape(" and ".join(_called(measured, title) for title in titles))
    head, body = (
        f'<th scope="col">{called}<span class="av-each">{escape(axis)}</span></th>',
        {},
    )
    for i, name in enumerate(series):
        key = _svg(_level([1.0], 1.0, i, "currentColor", 18, 10), 10, 18)
        head += f'<th class="av-n" scope="col">{key}{marked(name)}, at most</th>'
    for label in labels:
        cells = {title: rows[title][label[0]] for title in titles}
        drawn = f'<line x1="0" x2="{_WIDE}" y1="{_HIGH}" y2="{_HIGH}" stroke="currentColor" stroke-opacity="0.5"/>'
        told = ""
        for i, name in enumerate(series):
            each = ""
            for title in titles:
                filled = title == titles[0]
                drawn += _level(
                    cells[title][name],
                    most,
                    i,
                    _COLOR[title],
                    _WIDE,
                    _HIGH,
                    filled=filled,
                )
                key = _key(title) if len(titles) > 1 else ""
                most_here = escape(amount(_highest(cells[title][name]), measured.unit))
                each += f'<span class="av-each">{key}{most_here}</span>'
            told += f'<td class="av-n">{each}</td>'
        body[label] = f"<td>{_svg(drawn, _HIGH, _WIDE)}</td>{told}"
    return head, body


def _seen(runs: Iterable[Measurement]) -> list[str]:
    """The series of which something was measured, in any row."""
    found: dict[str, bool] = {}
    for run in runs:
        for row in run.rows().values():
            for name, cell in row.items():
                found[name] = found.get(name, False) or not all(
                    math.isnan(x) for x in cell
                )
    return [name for name, there in found.items() if there]


def _highest(cell: list[float]) -> float:
    return max((x for x in cell if not math.isnan(x)), default=math.nan)


def _level(
    cell: list[float],
    most: float,
    which: int,
    color: str,
    wide: float,
    high: float,
    *,
    filled: bool = True,
) -> str:
    """One series as levels, one for each number: the first filled, the others lines; gaps where there is none."""
    step = wide / len(cell)
    parts: list[list[str]] = []
    for i, (before, value) in enumerate(pairwise([math.nan, *cell])):
        if math.isnan(value):
            continue
        if math.isnan(before):
            parts.append([])
        y = 1.5 + (high - 1.5) * (1 - min(max(value, 0.0), most) / most)
        parts[-1] += [f"{i * step:.1f},{y:.1f}", f"{(i + 1) * step:.1f},{y:.1f}"]
    drawn = ""
    for part in parts:
        if which == 0 and filled:
            left, right = part[0].split(",")[0], part[-1].split(",")[0]
            ground = f"{right},{high:.1f} {left},{high:.1f}"
            drawn += f'<polygon points="{" ".join(part)} {ground}" fill="{color}" fill-opacity="0.35"/>'
        dash = f' stroke-dasharray="{_DASH[which]}"' if _DASH[which] else ""
        width = 1 if which == 0 else 2
        drawn += f'<polyline points="{" ".join(part)}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>'
    return drawn


def _svg(inside: str, high: float, wide: float) -> str:
    """A drawing without words: what it says stands in the cells beside it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" aria-hidden="true" width="{wide:g}" height="{high:g}" '
        f'viewBox="0 0 {wide:g} {high:g}">{inside}</svg>'
    )


def _chips(measured: Measured) -> str:
    chips = ""
    for title, run in measured.runs.items():
        told = " · ".join(map(escape, provenance(run)))
        chips += f'<li class="av-chip">{_key(title)}<b>{title}:</b> {told}</li>'
    return f'<ul class="av-chips">{chips}</ul>'


def _remarks(measured: Measured) -> str:
    told = ""
    for title, run in measured.runs.items():
        missing = [
            name
            for name in next(iter(run.names().values()))
            if name not in _seen([run])
        ]
        said = [measured.says(run.values)] if measured.says else []
        said += (
            [f"Not measured on this device: {', '.join(missing)}."] if missing else []
        )
        if said:
            told += f"<p><b>{escape(_called(measured, title))}:</b> {marked(' '.join(said))}</p>"
    return told


def _in_words(measured: Measured) -> str:
    """Every number of every curve: a drawing alone would keep them from who cannot see it."""
    if measured.here.single:
        return ""
    items = ""
    for title, run in measured.runs.items():
        for row, series in run.rows().items():
            for name in _seen([run]):
                cell = series[name]
                told = ", ".join(amount(x, measured.unit) for x in cell[:_MOST_TOLD])
                told += (
                    f", and {len(cell) - _MOST_TOLD} more"
                    if len(cell) > _MOST_TOLD
                    else ""
                )
                items += f"<li>{escape(f'{title}, {row}, {name}: {told}')}</li>"
    return f"<details><summary>In words</summary><ul>{items}</ul></details>"
