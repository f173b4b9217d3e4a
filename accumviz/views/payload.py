"""Encode a ledger as the data that a page carries, and list the code around its events."""

from __future__ import annotations

import base64
import hashlib
import json
import keyword
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accumviz.ledger.events import numbered
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger
from accumviz.show import encoded, literal
from accumviz.views import layout, shares, style, words
from accumviz.views.weights import Field

# What is shown at once; beyond, events are thinned, and a note says so.
MOST_EVENTS = 10_000
MOST_CELLS = 2_000_000
# Parts of `.grad` are shown of so many rows × events: more would take long to split, and weigh.
_MOST_BARS = 8000
_MOST_PARTS = 20_000
# So many segments of bars of shares stand on a page; of more, whole steps are left out.
_MOST_SEGMENTS = 2000
# Of more numbers, fewer digits stand in the page.
_PLAIN_CELLS = 3000
_EXACT_NUMBERS = 12_000
_PLAIN_TEXT = 7000
# So many parameters are one row each; more are grouped by module.
_UNGROUPED = 12
# So many letters stand on end above a column.
_UPRIGHT = 12
# More pixels than a page is wide tell nobody anything.
_WIDEST = 640
_MUTED = "var(--av-muted)"
# What the legend says of a heat map.
_HEAT = "Stronger: a pixel’s largest contribution. Grey: .grad alone; ink: not finite."
# What the legend says of the looks of shares.
_SHARES = {
    "new": "one backward",
    "used": "used by an earlier step, too",
    "unseen": "unknown",
}
# Lines: around one with an event, of all that is shown; letters of one line.
_AROUND = 24
_MOST_LINES = 400
_LONGEST = 400
# So many empty lines may stand between two definitions.
_MOST_EMPTY = 2
_TOKENS = re.compile(
    r"(?P<comment>#.*)|(?P<string>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')|(?P<keyword>\b(?:%s)\b)"
    % "|".join(keyword.kwlist)
)

Row = dict[str, Any]
# What is shown of a file: its `name` and `lines`.
Shown = dict[str, Any]


def ledger_data(
    ledger: Ledger,
    ground: Field | None = None,
    levels: layout.Range | None = None,
) -> dict[str, Any]:
    """Return everything the player shows of a ledger, as data for JSON.

    `levels` are the logarithms between which a heat map's levels lie, if not the run's own.
    """
    chosen, note = thin(ledger)
    events = [ledger.events[e] for e in chosen]
    state = ledger.state[chosen]
    # Row after row, event by event; -1 is None.
    added = np.where(state & CONTRIBUTED, ledger.contribution[chosen], -1.0).T
    grads = np.where(state & PRESENT, ledger.grad[chosen], -1.0).T
    colors = style.label_colors([literal(label) for label in ledger.labels])
    said = _events(ledger, events, list(colors))
    heat = _heat(said["l"], added, grads, levels)
    rows, added, grads = _rows(ledger, added, grads)
    lanes = _add_bars(ledger, rows, added, grads)
    _use_one_scale(rows)
    height = layout.lane_height(len(ledger.parameters), len(events)) if lanes else 0
    files, lines = listing(ledger, events)
    kinds, kind_places = numbered(event.kind for event in events)
    heads, head_places = numbered(map(_heading, events))
    happened = {"k": kind_places, "u": head_places, "c": lines}
    happened |= said | _saved(ledger, chosen)
    if len(events) < len(ledger):
        happened["i"] = chosen.tolist()
    exact = _exact(ledger, chosen)
    is_small = added.size <= _PLAIN_CELLS
    norms = {}
    if len(exact) < len(rows):
        digits = 6 if is_small else 3
        norms = {"c": plain(added, digits), "g": plain(grads, digits)}
    has_none = not (ledger.state & PRESENT).all()
    data = {
        "note": note,
        "before": words.before(),
        "kinds": [[kind, *style.kind(kind)] for kind in kinds],
        "colors": [
            [place, color, style.ink_on(color)]
            for place, color in enumerate(colors.values())
        ],
        "keys": _keys(ledger, events, lanes.get("look", []))
        + _byte_keys(ledger, chosen),
        "none": "∅:\u00a0.grad\u00a0is\u00a0None." if has_none else "",
        "e": happened,
        "heads": heads,
        "count": len(ledger.parameters),
        "p": rows,
        "code": files,
        "x": exact,
        "digits": 4 if is_small else 3,
        "lane": height,
        "lanes": lanes,
        "unseen": layout.unseen(ledger),
        **norms,
        **heat,
        **_shares(ledger, chosen.tolist(), colors),
    }
    weights = ground.picture(ledger, chosen.tolist()) if ground else {}
    if weights:
        data["weights"] = weights
    return data


# --- what travels ---------------------------------------------------------------------------------


def encode(data: dict[str, Any]) -> str:
    """Write a player's data as the text of a JSON script: nothing in it can end the script or be run."""
    text = json.dumps(
        data,
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
    )
    if len(text) > _PLAIN_TEXT:
        packed = zlib.compress(text.encode("utf-8", "replace"))
        text = json.dumps({"z": base64.b64encode(packed).decode()})
    return text.replace("<", "\\u003c")


def identity(data: dict[str, Any]) -> str:
    """Return a name for a player that is the same whenever its content is."""
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode("utf-8", "replace"))
    return "av" + digest.hexdigest()[:6]


def plain(
    numbers: Sequence[float] | np.ndarray, digits: int = 6
) -> list[float | str | None]:
    """Write numbers for JSON, which knows neither NaN nor infinity; whole ones without a needless point.

    >>> plain([1.0, 0.25, float("nan"), float("-inf")])
    [1, 0.25, 'NaN', '-Infinity']
    """
    values = np.asarray(numbers, float).ravel().tolist()
    return [_plain(value, digits) for value in values]


def _plain(value: float, digits: int) -> float | str | None:
    if not math.isfinite(value):
        return encoded(value)
    short = float(f"{value:.{digits}g}")
    is_whole = short == int(short) and abs(short) < 1e15
    return int(short) if is_whole else short


def shared(
    runs: Sequence[Mapping[str, Any]],
) -> tuple[list[list[int]], dict[str, list[Any]]]:
    """Number the parts of runs: a row for each run (-1: it has no such part), and the different parts by name.

    What is told by name in a part is a part itself: `e.k` is the `k` of `e`.

    >>> shared([{"a": 1, "b": {"c": 2}}, {"a": 1}])
    ([[0, 0], [0, -1]], {'a': [1], 'b.c': [2]})
    """
    texts: dict[str, dict[str, int]] = {}
    rows = []
    for run in runs:
        row = {}
        for name, part in _parts(run):
            different = texts.setdefault(name, {})
            row[name] = different.setdefault(json.dumps(part), len(different))
        rows.append(row)
    numbered = []
    for row in rows:
        numbered.append([row.get(name, -1) for name in texts])
    parts = {}
    for name, different in texts.items():
        parts[name] = list(map(json.loads, different))
    return numbered, parts


def _parts(run: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, part in run.items():
        if isinstance(part, dict) and part:
            for key, value in part.items():
                yield f"{name}.{key}", value
        else:
            yield name, part


# --- which events ---------------------------------------------------------------------------------


def thin(ledger: Ledger) -> tuple[np.ndarray, str]:
    """Return the events to show, and a sentence that says which were left out (empty: none).

    Whole accumulation windows are kept.
    """
    parameters = max(len(ledger.parameters), 1)
    most = max(min(MOST_EVENTS, MOST_CELLS // parameters), 2)
    if len(ledger) <= most:
        return np.arange(len(ledger)), ""
    opens = ledger.events.where("kind", "backward")
    opens[1:] &= ~opens[:-1]
    windows = opens.cumsum() - opens[0]
    every = math.ceil(len(ledger) / most)
    chosen = np.flatnonzero(windows % every == 0)[:most]
    shown = f"{len(chosen):,} of {len(ledger):,} events are shown"
    return chosen, f"{shown}, of one accumulation window in {every}."


# --- events ---------------------------------------------------------------------------------------


def _heading(event: Event) -> tuple[str, str, str]:
    """Return what stands above a column: on end; in two lines."""
    rank = "" if event.rank is None else f"{event.rank}: "
    action = words.action(event)
    subject = words.subject(event)
    is_named = event.kind in ("backward", "sync") and subject
    upright = rank + (subject if is_named else action)
    return words.shorten(upright, _UPRIGHT), action, rank + subject


def _events(
    ledger: Ledger, events: Sequence[Event], labels: list[str]
) -> dict[str, Any]:
    """Return what is said of the events as columns."""
    places = {label: place for place, label in enumerate(labels)}
    columns = {
        "h": list(map(words.head, events)),
        "l": [places.get(literal(event.label), -1) for event in events],
    }
    texts = [words.about(ledger, event) for event in events]
    if any(texts):
        columns["t"] = texts
    return columns


def _saved(
    ledger: Ledger,
    chosen: np.ndarray,
) -> dict[str, list[Any]]:
    """Return the places of the events that kept their graph, and the bytes saved before and after (None: unknown)."""
    kept = ledger.events.detail("retain_graph", default=False)
    made = ledger.events.detail("create_graph", default=False)
    retained = np.flatnonzero((kept | made)[chosen])
    columns: dict[str, list[Any]] = {"retained": retained.tolist()}
    for name, side in (("b", "saved_before"), ("a", "saved_after")):
        sizes = ledger.events.column(side)[chosen]
        if np.isfinite(sizes).any():
            columns[name] = [None if size == "NaN" else size for size in plain(sizes)]
    return columns


# --- legends --------------------------------------------------------------------------------------


def _keys(
    ledger: Ledger, events: Sequence[Event], digits: list[str]
) -> list[layout.Entry]:
    """Return the legend, of what there is."""
    looks = {layout.LOOKS[int(digit)] for digit in "".join(digits)}
    if not digits and (ledger.state & CONTRIBUTED).any():
        looks.add("new")
    colors = style.label_colors(ledger.labels)
    texts = layout.part_texts(ledger)
    keys = layout.part_keys(colors, looks, texts, _MUTED)
    for kind, (color, dashes) in style.lines(events).items():
        keys.append((literal(kind), "rule", f"{color}{style.stripes(dashes)}"))
    keys.append((".grad after the event", "after", "var(--av-text)"))
    return keys


def _byte_keys(
    ledger: Ledger,
    chosen: np.ndarray,
) -> list[layout.Entry]:
    """Return the entries of the legend for the bytes of saved tensors, where they were measured."""
    columns = ledger.events.take(chosen)
    before = columns.column("saved_before")[columns.where("kind", "backward")]
    measured = before[~np.isnan(before)]
    if not measured.size:
        return []
    text = f"saved tensors before, at most {style.size(measured.max())}"
    pale = f"color-mix(in srgb, {_MUTED} 50%, transparent)"
    keys = [(text, "bytes", pale)]
    if (columns.column("saved_after") > 0).any():
        keys.append(("after", "bytes", _MUTED))
    if measured.size < before.size:
        keys.append(("not measured", "unseen", _MUTED))
    return keys


# --- shares ---------------------------------------------------------------------------------------


def _shares(
    ledger: Ledger, chosen: list[int], colors: dict[str, str]
) -> dict[str, Any]:
    """Return the bars of shares, where there are some: their scale `r`, and for each its step `e`, objective `o`, ...

    A segment is the place of its backward (-1: not shown), where it starts, how long it is, its look and its text.
    """
    bars, note = shares.bars(ledger, chosen, _MOST_SEGMENTS)
    if not bars:
        return {}
    places = {event: place for place, event in enumerate(chosen)}
    labels = list(colors)
    several = len({bar.objective for bar in bars}) > 1
    rows = []
    for bar in bars:
        rank = ledger[bar.step].rank
        whose = [] if rank is None else [f"rank {rank}"]
        if several:
            whose.append(_operation(bar.objective))
        row = {
            "e": places[bar.step],
            "o": " · ".join(whose),
            "l": labels.index(literal(bar.label)),
            "t": bar.total,
            "w": bar.words,
            "s": [_segment(part, places) for part in bar.segments],
        }
        rows.append(row)
    looks = {part.look for bar in bars for part in bar.segments}
    inks = {literal(bar.label): bar.color for bar in bars}
    dashed = ", ".join(filter(None, ["Dashed: 1", shares.among(ledger)]))
    pane = {
        "r": plain(shares.reach(bars)),
        "rows": rows,
        "keys": layout.part_keys(inks, looks, _SHARES, _MUTED),
        "note": f"{dashed}. {note}".strip(),
    }
    return {"shares": pane}


def _segment(
    part: shares.Segment,
    places: dict[int, int],
) -> list[Any]:
    place = places.get(part.backward, -1)
    # Of a width of pixels four digits are seen.
    start, length = plain([part.start, part.length], 4)
    return [place, start, length, part.look, part.text]


def _operation(objective: str) -> str:
    """Return how an objective is written where there is little room.

    >>> _operation("loss / K · MseLossBackward0 2"), _operation("g_loss")
    ('MseLoss 2', 'g_loss')
    """
    operation = objective.rpartition(" · ")[2]
    return re.sub(r"Backward\d+", "", operation)


# --- parameters -----------------------------------------------------------------------------------


def _rows(
    ledger: Ledger, added: np.ndarray, grads: np.ndarray
) -> tuple[list[Row], np.ndarray, np.ndarray]:
    """Return each parameter and, of many, each group of them, with their norms, row after row.

    A row is described by its name `n`, short name `s`, shape `d`, reach `r` of its bars and, if it is a group,
    the range of parameters `in` it; `k` is the gradient scaler's factor event by event; `u` says that what its
    `.grad` was before the first event is unknown.
    """
    rows: list[Row] = []
    for parameter in ledger.parameters:
        name = literal(parameter.name)
        short = words.shorten(name, 40)
        rows.append({"n": name, "s": short, "d": list(parameter.shape)})
    if len(rows) > _UNGROUPED:
        groups = words.group_rows([row["n"] for row in rows])
        added = np.concatenate([added, _group_norms(added, groups)])
        grads = np.concatenate([grads, _group_norms(grads, groups)])
        for name, start, stop in groups:
            rows.append({"n": name, "s": name, "d": [], "in": [start, stop]})
    for row, norms, sums in zip(rows, added, grads, strict=True):
        highest = sums[np.isfinite(sums)].max(initial=0.0)
        row["r"] = 0.0, float(highest)
        if len(ledger) and not _begins(ledger.events[0], norms[0], sums[0]):
            row["u"] = 1
    return rows, added, grads


def _group_norms(
    cells: np.ndarray,
    groups: Sequence[words.Group],
) -> list[np.ndarray]:
    """Return the norms of tensors put together, of those that there are."""
    norms = []
    for group in groups:
        rows = cells[group.start : group.stop]
        is_none = rows < 0
        whole = np.linalg.norm(np.where(is_none, 0.0, rows), axis=0)
        norms.append(np.where(is_none.all(axis=0), -1.0, whole))
    return norms


def _begins(first: Event, added: float, grad: float) -> bool:
    """Return whether `.grad` was None before an event that left it so, after it had added so much; -1 is None.

    >>> backward, zero = Event(0, "backward"), Event(0, "zero_grad")
    >>> _begins(backward, 2.0, 2.0), _begins(backward, 2.0, 5.0), _begins(backward, -1, 5.0), _begins(zero, -1, -1)
    (True, False, False, False)
    """
    if first.kind == "zero_grad":
        return False
    return bool(grad < 0) or math.isclose(grad, added, rel_tol=1e-3)


def _add_bars(
    ledger: Ledger,
    rows: list[Row],
    added: np.ndarray,
    grads: np.ndarray,
) -> dict[str, list[Any]]:
    """Return the bars of small ledgers, and add how far they reach, and what events erased unused, to the rows."""
    is_thinned = added.shape[1] < len(ledger)
    if is_thinned or not 0 < added.size <= _MOST_BARS:
        return {}
    if layout.most_parts(ledger) > _MOST_PARTS:
        return {}
    bars = layout.PageBars(ledger)
    for p, row in enumerate(rows):
        members = range(*row.get("in", (p, p + 1)))
        row["r"] = bars.add(
            members,
            added[p],
            grads[p],
        )
        scales = bars.gradients[members.start].scales
        if any(scale != 1 for scale in scales):
            row["k"] = plain(scales)
    _add_lost(ledger, rows)
    return bars.columns


def _add_lost(ledger: Ledger, rows: list[Row]) -> None:
    """Add to the rows which backwards each event erased before a step used them."""
    places = {parameter.name: p for p, parameter in enumerate(ledger.parameters)}
    for e in range(len(ledger)):
        for name, births in ledger.unconsumed(e).items():
            rows[places[name]].setdefault("lost", {})[e] = births


def _use_one_scale(rows: list[Row]) -> None:
    """Let each row reach as far as its parameter does on all ranks."""
    own = [(row["n"], row["r"]) for row in rows]
    reaches = layout.one_scale(own)
    for row, reach in zip(rows, reaches, strict=True):
        row["r"] = plain(reach)


def _heat(
    labels: Sequence[int],
    added: np.ndarray,
    grads: np.ndarray,
    levels: layout.Range | None,
) -> dict[str, Any]:
    """Return the heat map of all parameters, where there is something to show; `labels` numbers each event's loss."""
    if not added.size:
        return {}
    width = min(len(labels), _WIDEST)
    starts = np.unique(np.arange(width) * len(labels) // width)
    codes = layout.heat(added, ~(grads < 0), np.maximum(labels, 0), starts, levels)
    heat = {
        "w": width,
        "told": _HEAT,
        "px": codes.ravel().tolist(),
    }
    return {"heat": heat}


def _exact(
    ledger: Ledger,
    chosen: np.ndarray,
) -> dict[str, Any]:
    """Return all elements of the small parameters, if they are few: [contributions, grads]."""
    every = range(len(ledger.parameters))
    small = [p for p in every if words.is_vector(ledger, p)]
    elements = sum(ledger.parameters[p].numel for p in small)
    if 2 * len(chosen) * elements > _EXACT_NUMBERS:
        return {}
    kept = {}
    for p in small:
        state = ledger.state[chosen, p]
        added, grads = ledger.exact[p]
        kept[str(p)] = [
            _elements(added[chosen], state & CONTRIBUTED),
            _elements(grads[chosen], state & PRESENT),
        ]
    return kept


def _elements(
    values: np.ndarray,
    present: np.ndarray,
) -> list[Any]:
    """Return the elements after each event, None where there are none."""
    rows = zip(values, present, strict=True)
    return [plain(row) if is_present else None for row, is_present in rows]


# --- code -----------------------------------------------------------------------------------------


def listing(
    ledger: Ledger,
    events: Sequence[Event],
) -> tuple[list[Shown], list[int]]:
    """Return per file with events its name and lines, and each event's line: its place in all of them (-1: none).

    A line is its number and its parts, plain text and [kind, text] by turns; number 0 stands for
    lines left out. Without the file's text, the events' own lines are all there is.

    >>> rows = [dict(kind="step", file="a.py", line=2, source="opt.step()")]
    >>> listing(one := Ledger.build([], rows), one.events)
    ([{'name': 'a.py', 'lines': [[2, 'opt.step()']]}], [0])
    """
    sources: dict[str, dict[int, str]] = {}
    for event in events:
        if event.line > 0:
            lines = sources.setdefault(event.file, {})
            lines.setdefault(event.line, event.source)
    files = []
    at = {}
    count = 0
    for file, lines in sources.items():
        shown = sorted(lines.items())
        text = ledger.sources.get(file, "")
        if text:
            shown = _stretches(text.expandtabs(4).splitlines(), lines)
        written = []
        for n, line in shown[:_MOST_LINES]:
            at[file, n] = count
            count += 1
            written.append([n, *_colored(line[:_LONGEST])])
        files.append({"name": file, "lines": written})
    places = [at.get((event.file, event.line), -1) for event in events]
    return files, places


def _colored(line: str) -> list[Any]:
    """Split a line of Python where its look changes.

    >>> _colored("if x:  # why")
    [['keyword', 'if'], ' x:  ', ['comment', '# why']]
    """
    pieces: list[Any] = []
    end = 0
    for token in _TOKENS.finditer(line):
        pieces.append(line[end : token.start()])
        pieces.append([token.lastgroup, token[0]])
        end = token.end()
    pieces.append(line[end:])
    return [piece for piece in pieces if piece]


def _stretches(text: list[str], lines: Iterable[int]) -> list[tuple[int, str]]:
    """Return the lines around these; between stretches a line with the number 0."""
    near: set[int] = set()
    for line in lines:
        near.update(range(line - _AROUND, line + _AROUND + 1))
    near -= _left_out(text)
    shown: list[tuple[int, str]] = []
    for n in sorted(near & set(range(1, len(text) + 1))):
        if shown and n > shown[-1][0] + 1:
            shown.append((0, ""))
        shown.append((n, text[n - 1]))
    return shown


def _left_out(text: list[str]) -> set[int]:
    """Return the lines of code that was left out of a file: no style has so many empty lines in a row."""
    gaps = set()
    empty = []
    for n, line in enumerate([*text, "end"], 1):
        if not line.strip():
            empty.append(n)
            continue
        if len(empty) > _MOST_EMPTY:
            gaps.update(empty)
        empty = []
    return gaps
