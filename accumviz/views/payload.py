"""Encode a ledger and its graphs as the data that a page carries."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger, Parameter
from accumviz.show import encoded, literal
from accumviz.views import layout, shares, style, words
from accumviz.views.heat import heat, label_places
from accumviz.views.listing import listing

# What is shown at once; beyond, events are thinned, and a note says so.
MOST_EVENTS = 10_000
MOST_CELLS = 2_000_000
# Parts of `.grad` are shown of so many rows × events: more would take long to split, and weigh.
_MOST_BARS = 8000
_MOST_PARTS = 20_000
# So many segments of bars of shares stand on a page; of more, whole steps are left out.
_MOST_SEGMENTS = 2000
# Numbers stand in the page as they are up to here; beyond, they are packed and rounded.
_PLAIN_CELLS = 3000
_EXACT_NUMBERS = 12_000
_PLAIN_TEXT = 7000
# So many parameters are one row each; more are grouped by module.
_UNGROUPED = 12
# So many letters stand on end above a column.
_UPRIGHT = 12
# Three digits are shown of a packed number; finer steps would only weigh.
_FINEST = 8e-4
# Codes of a packed number (what lies between is a logarithm).
_NONE = 0
_ZERO = 1
_NAN = 65534
_INFINITE = 65535
# More pixels than a page is wide tell nobody anything.
_WIDEST = 640
_MUTED = "var(--av-muted)"
# What the legend says of the looks of shares.
_SHARES = {
    "new": "one backward",
    "used": "used by an earlier step, too",
    "unseen": "unknown",
}

Columns = dict[str, np.ndarray]
Row = dict[str, Any]


class Ground(Protocol):
    """What the weights of a ledger are drawn on."""

    def picture(self, ledger: Ledger, chosen: Sequence[int]) -> dict[str, Any]: ...


def ledger_data(
    ledger: Ledger,
    ground: Ground | None = None,
    levels: tuple[float, float] | None = None,
) -> tuple[dict[str, Any], bytes]:
    """Return everything the player shows of a ledger: data for JSON, and the bytes of its packed columns.

    `levels` are the logarithms between which a heat map's levels lie, if not the run's own.
    """
    chosen, note = thin(ledger)
    events = [ledger.events[e] for e in chosen]
    colors = style.label_colors([literal(label) for label in ledger.labels])
    subjects = [words.subject(event) for event in events]
    strings, places = _numbered([*colors, *subjects])
    kinds, kind_places = _numbered(str(event.kind) for event in events)
    heads, head_places = _numbered(_heading(event) for event in events)
    files, lines = listing(ledger, events)
    happened = {
        "k": kind_places,
        "u": head_places,
        "c": lines,
        "l": places[len(colors) :],
        **_events(ledger, events),
    }
    if len(chosen) < len(ledger):
        happened["i"] = chosen.tolist()
    columns, rows = _rows(ledger, chosen)
    lanes = _add_bars(ledger, rows, columns)
    height = _lane_height(rows[: len(ledger.parameters)], len(chosen)) if lanes else 0
    _use_one_scale(rows)
    has_none = not (ledger.state & PRESENT).all()
    data: dict[str, Any] = {
        "note": note,
        "before": words.before(),
        "strings": strings,
        "kinds": [[kind, *style.kind(kind)] for kind in kinds],
        "colors": _inks(colors),
        "keys": _keys(ledger, events, lanes.get("look", [])),
        "none": "∅:\u00a0.grad\u00a0is\u00a0None." if has_none else "",
        "e": happened,
        "heads": heads,
        "count": len(ledger.parameters),
        "p": rows,
        "code": files,
        "x": _exact(ledger, chosen),
        "digits": 4 if columns["c"].size <= _PLAIN_CELLS else 3,
        "lane": height,
        "lanes": lanes,
        "unseen": layout.unseen(ledger),
    }
    data |= _further_panes(ledger, chosen.tolist(), colors, ground)
    return data, _add_numbers(data, ledger, events, columns, levels)


def _further_panes(
    ledger: Ledger, chosen: list[int], colors: dict[str, str], ground: Ground | None
) -> dict[str, Any]:
    """Return shares and weights, where there are some to show."""
    panes = {"shares": _shares(ledger, chosen, colors)}
    if ground is not None:
        panes["weights"] = ground.picture(ledger, chosen)
    return {name: pane for name, pane in panes.items() if pane}


def _inks(colors: dict[str, str]) -> list[list[Any]]:
    """Return each colour with its place and the ink on it."""
    inks = []
    for place, color in enumerate(colors.values()):
        inks.append([place, color, style.ink_on(color)])
    return inks


def _lane_height(rows: Sequence[Row], events: int) -> int:
    reaches = [row["r"] for row in rows]
    return layout.lane_height(reaches, events)


def _numbered(values: Iterable[Hashable]) -> tuple[list[Any], list[int]]:
    """Return each value once, and the place of every value among them.

    >>> _numbered("abca")
    (['a', 'b', 'c'], [0, 1, 2, 0])
    """
    places: dict[Hashable, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return list(places), numbers


# --- what travels ---------------------------------------------------------------------------------


def encode(data: dict[str, Any], blob: bytes = b"") -> str:
    """Write a player's data as the text of a JSON script: nothing in it can end the script or be run."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if blob or len(text) > _PLAIN_TEXT:
        raw = text.encode("utf-8", "replace")
        packed = zlib.compress(struct.pack("<I", len(raw)) + raw + blob, 9)
        text = json.dumps({"z": base64.b64encode(packed).decode()})
    return text.replace("<", "\\u003c")


def identity(data: dict[str, Any], blob: bytes = b"") -> str:
    """Return a name for a player that is the same whenever its content is."""
    raw = json.dumps(data, sort_keys=True, allow_nan=False).encode("utf-8", "replace")
    return "av" + hashlib.sha256(raw + blob).hexdigest()[:6]


def pack(column: np.ndarray) -> tuple[bytes, float, float]:
    """Encode norms (-1: None) as 16-bit logarithms, parameter by parameter, high bytes before low ones.

    Neighbours in time are alike, and equal bytes side by side are what compression lives on.
    """
    positive = np.isfinite(column) & (column > 0)
    logs = np.log(column, where=positive, out=np.zeros(column.shape))
    low = 0.0
    high = 0.0
    if positive.any():
        low = float(logs[positive].min())
        high = float(logs[positive].max())
    step = max((high - low) / (_NAN - 3), _FINEST)
    levels = np.rint((logs - low) / step) + 2
    codes = np.where(positive, levels, _ZERO).astype(np.uint16)
    codes[column < 0] = _NONE
    codes[np.isnan(column)] = _NAN
    codes[np.isposinf(column)] = _INFINITE
    high_bytes = (codes >> 8).astype(np.uint8)
    low_bytes = codes.astype(np.uint8)
    return high_bytes.tobytes() + low_bytes.tobytes(), low, step


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


# --- which events ---------------------------------------------------------------------------------


def thin(ledger: Ledger) -> tuple[np.ndarray, str]:
    """Return the events to show, and a sentence that says which were left out (empty: none).

    Whole accumulation windows are kept.
    """
    parameters = max(len(ledger.parameters), 1)
    most = max(min(MOST_EVENTS, MOST_CELLS // parameters), 2)
    if len(ledger) <= most:
        return np.arange(len(ledger)), ""
    opens = np.array([event.kind == "backward" for event in ledger.events])
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


def _events(ledger: Ledger, events: Sequence[Event]) -> dict[str, Any]:
    """Return the events as columns; what most of them lack is a list of positions."""
    columns: dict[str, Any] = {
        "h": [words.head(event) for event in events],
        "retained": [i for i, event in enumerate(events) if _is_retained(event)],
    }
    before = [event.saved_before for event in events]
    after = [event.saved_after for event in events]
    if np.isfinite([before, after]).any():
        columns["b"] = _or_none(before)
        columns["a"] = _or_none(after)
    texts = [words.about(ledger, event) for event in events]
    if any(texts):
        columns["t"] = texts
    return columns


def _is_retained(event: Event) -> bool:
    details = event.details
    return bool(details.get("retain_graph") or details.get("create_graph"))


def _or_none(numbers: Sequence[float]) -> list[float | str | None]:
    return [None if math.isnan(x) else _plain(x, 6) for x in numbers]


# --- legends --------------------------------------------------------------------------------------


def _keys(
    ledger: Ledger, events: Sequence[Event], digits: list[str]
) -> list[list[str]]:
    """Return the legend, of what there is: what it says, the look of its swatch, its colour."""
    looks = {layout.LOOKS[int(digit)] for digit in "".join(digits)}
    if not digits and (ledger.state & CONTRIBUTED).any():
        looks.add("new")
    colors = style.label_colors(ledger.labels)
    texts = layout.part_texts(ledger)
    keys = []
    for text, look, color in layout.part_keys(colors, looks, texts, _MUTED):
        keys.append([text, look, color])
    for kind in dict.fromkeys(str(event.kind) for event in events):
        if kind != "backward":
            color, dashes = style.kind(kind)
            keys.append([literal(kind), "rule", f"{color}{style.stripes(dashes)}"])
    keys.append([".grad after the event", "after", "var(--av-text)"])
    return keys + _byte_keys(events)


def _byte_keys(events: Sequence[Event]) -> list[list[str]]:
    """Return the entries of the legend for the bytes of saved tensors, where they were measured."""
    before = [event.saved_before for event in events]
    measured = [size for size in before if not math.isnan(size)]
    if not measured:
        return []
    text = f"saved tensors before, at most {style.size(max(measured))}"
    pale = f"color-mix(in srgb, {_MUTED} 50%, transparent)"
    keys = [[text, "bytes", pale]]
    if any(event.saved_after > 0 for event in events):
        keys.append(["after", "bytes", _MUTED])
    backwards = sum(event.kind == "backward" for event in events)
    if len(measured) < backwards:
        keys.append(["not measured", "unseen", _MUTED])
    return keys


def _marks(events: int, pixels: int) -> str:
    """Say what a heat map's colours mean, and how many events a pixel shows.

    >>> _marks(6, 3)
    'Stronger: a larger contribution. Grey: .grad without one; ink: not finite. A pixel shows the largest of 2 events.'
    """
    text = "Stronger: a larger contribution. Grey: .grad without one; ink: not finite."
    each = math.ceil(events / pixels)
    if each > 1:
        text += f" A pixel shows the largest of {each} events."
    return text


# --- shares ---------------------------------------------------------------------------------------


def _shares(
    ledger: Ledger, chosen: list[int], colors: dict[str, str]
) -> dict[str, Any]:
    """Return the bars of shares: their scale `r`, and for each its step `e`, objective `o`, and so on.

    A segment is the place of its backward (-1: not shown), where it starts, how long it is, its look and its text.
    """
    bars, note = shares.bars(ledger, chosen, _MOST_SEGMENTS)
    if not bars:
        return {}
    places = {event: place for place, event in enumerate(chosen)}
    labels = list(colors)
    objectives = {bar.objective for bar in bars}
    inks = {}
    looks: set[str] = set()
    rows = []
    for bar in bars:
        label = literal(bar.label)
        inks[label] = colors[label]
        looks.update(part.look for part in bar.segments)
        rank = ledger[bar.step].rank
        row = {
            "e": places[bar.step],
            "o": _whose(bar, rank, several=len(objectives) > 1),
            "l": labels.index(label),
            "t": bar.total,
            "w": bar.words,
            "s": [_segment(part, places) for part in bar.segments],
        }
        rows.append(row)
    dashed = "Dashed: 1"
    together = shares.among(ledger)
    if together:
        dashed += f", {together}"
    return {
        "r": plain(shares.reach(bars)),
        "rows": rows,
        "keys": layout.part_keys(inks, looks, _SHARES, _MUTED),
        "note": f"{dashed}. {note}".strip(),
    }


def _whose(bar: shares.ShareBar, rank: int | None, *, several: bool) -> str:
    """Return the rank of a bar, and its objective where there are several."""
    whose = []
    if rank is not None:
        whose.append(f"rank {rank}")
    if several:
        whose.append(_operation(bar.objective))
    return " · ".join(whose)


def _segment(part: shares.Segment, places: dict[int, int]) -> list[Any]:
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


def _rows(ledger: Ledger, chosen: np.ndarray) -> tuple[Columns, list[Row]]:
    """Return the columns of the page, row after row: each parameter's and, of many, each group's norms; -1 for None.

    A row is described by its name `n`, short name `s`, shape `d`, reach `r` of its bars and, if it is a group,
    the range of parameters `in` it; `k` is the gradient scaler's factor event by event; `u` says that what its
    `.grad` was before the first event is unknown.
    """
    state = ledger.state[chosen]
    added = np.where(state & CONTRIBUTED, ledger.contribution[chosen], -1.0).T
    grads = np.where(state & PRESENT, ledger.grad[chosen], -1.0).T
    rows = [_parameter(parameter) for parameter in ledger.parameters]
    if len(rows) > _UNGROUPED:
        groups = words.group_rows([row["n"] for row in rows])
        added = np.concatenate([added, _group_norms(added, groups)])
        grads = np.concatenate([grads, _group_norms(grads, groups)])
        for name, start, stop in groups:
            rows.append({"n": name, "s": name, "d": [], "in": [start, stop]})
    for row, first, grad in zip(rows, added, grads, strict=True):
        highest = grad[np.isfinite(grad)].max(initial=0.0)
        row["r"] = 0.0, float(highest)
        if len(chosen) and not _begins(ledger.events[0], first[0], grad[0]):
            row["u"] = 1
    return {"c": added.ravel(), "g": grads.ravel()}, rows


def _parameter(parameter: Parameter) -> Row:
    name = literal(parameter.name)
    return {"n": name, "s": words.shorten(name, 40), "d": list(parameter.shape)}


def _group_norms(column: np.ndarray, groups: Sequence[words.Group]) -> list[np.ndarray]:
    """Return the norms of tensors put together, of those that there are."""
    norms = []
    for group in groups:
        rows = column[group.start : group.stop]
        is_none = rows < 0
        squares = np.where(is_none, 0.0, rows) ** 2
        whole = np.sqrt(squares.sum(axis=0))
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
    ledger: Ledger, rows: list[Row], columns: Columns
) -> dict[str, list[Any]]:
    """Return the bars of small ledgers, and add how far they reach, and what events erased unused, to the rows."""
    cells = columns["c"].size
    is_thinned = cells != len(rows) * len(ledger)
    if is_thinned or not 0 < cells <= _MOST_BARS:
        return {}
    # What is never zeroed stays in every later bar.
    if layout.count_parts(ledger) > _MOST_PARTS:
        return {}
    bars = layout.PageBars(ledger)
    norms = columns["c"].reshape(len(rows), -1)
    grads = columns["g"].reshape(len(rows), -1)
    for p, row in enumerate(rows):
        members = range(*row.get("in", (p, p + 1)))
        row["r"] = bars.add(members, norms[p], grads[p])
        scales = bars.gradients[members.start].scales
        if any(scale != 1 for scale in scales):
            row["k"] = plain(scales)
    _add_erased(ledger, rows)
    return bars.columns


def _add_erased(ledger: Ledger, rows: list[Row]) -> None:
    rows_by_name = {}
    for parameter, row in zip(ledger.parameters, rows, strict=False):
        rows_by_name[parameter.name] = row
    for e in range(len(ledger)):
        for name, births in ledger.unconsumed(e).items():
            rows_by_name[name].setdefault("lost", {})[e] = births


def _use_one_scale(rows: list[Row]) -> None:
    """Let each row reach as far as its parameter does on all ranks."""
    scales = layout.one_scale((row["n"], row["r"]) for row in rows)
    for row in rows:
        name = words.on_any_rank(row["n"])
        row["r"] = plain(scales[name])


# --- numbers --------------------------------------------------------------------------------------


def _add_numbers(
    data: dict[str, Any],
    ledger: Ledger,
    events: Sequence[Event],
    columns: Columns,
    levels: tuple[float, float] | None,
) -> bytes:
    """Add norms and heat map to the data, as numbers or as places in the bytes that are returned."""
    blob = b""
    for name, column in columns.items():
        if len(data["x"]) == len(data["p"]):
            continue  # all elements are in the page, and so their norms
        if column.size <= _PLAIN_CELLS:
            data[name] = plain(column)
        else:
            packed, low, step = pack(column)
            data[name] = {
                "at": len(blob),
                "size": column.size,
                "low": low,
                "step": step,
            }
            blob += packed
    if not events or not ledger.parameters:
        return blob
    pixels = _pixels(ledger, events, columns, levels)
    width = pixels.shape[1]
    data["heat"] = {"w": width, "told": _marks(len(events), width)}
    if blob:
        data["heat"]["at"] = len(blob)
        blob += pixels.tobytes()
    else:
        data["heat"]["px"] = pixels.ravel().tolist()
    return blob


def _pixels(
    ledger: Ledger,
    events: Sequence[Event],
    columns: Columns,
    levels: tuple[float, float] | None,
) -> np.ndarray:
    """Return the codes of the heat map of all parameters."""
    count = len(ledger.parameters)
    added = columns["c"].reshape(-1, len(events))[:count]
    grad = columns["g"].reshape(-1, len(events))[:count]
    width = min(len(events), _WIDEST)
    starts = np.unique(np.arange(width) * len(events) // width)
    labels = label_places(ledger, events)
    return heat(added, ~(grad < 0), labels, starts, levels=levels).codes


def _exact(ledger: Ledger, chosen: np.ndarray) -> dict[str, Any]:
    """Return all elements of the small parameters, if they are few: [contributions, grads]."""
    small = [p for p in sorted(ledger.exact) if ledger.parameters[p].numel <= 4]
    elements = sum(ledger.parameters[p].numel for p in small)
    if 2 * len(chosen) * elements > _EXACT_NUMBERS:
        return {}
    kept: dict[str, Any] = {}
    for p in small:
        state = ledger.state[chosen, p]
        added, grads = ledger.exact[p]
        kept[str(p)] = [
            _elements(added[chosen], state & CONTRIBUTED),
            _elements(grads[chosen], state & PRESENT),
        ]
    return kept


def _elements(values: np.ndarray, present: np.ndarray) -> list[Any]:
    """Return the elements after each event, None where there are none."""
    rows = []
    for row, is_present in zip(values, present, strict=True):
        rows.append(plain(row) if is_present else None)
    return rows
