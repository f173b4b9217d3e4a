"""Encode a ledger and its graphs as the data that a page carries."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger, Parameter
from accumviz.show import encoded, literal
from accumviz.views import shares, style, words
from accumviz.views.heat import heat
from accumviz.views.layout import (
    LOOKS,
    PageBars,
    count_parts,
    lane_height,
    one_scale,
    part_keys,
)
from accumviz.views.listing import listing

# What is shown at once; beyond, events are thinned, and a note says so.
MOST_EVENTS, MOST_CELLS = 10_000, 2_000_000
# Parts of `.grad` are shown of so many rows × events: more would take long to split, and weigh.
_MOST_BARS, _MOST_PARTS = 8000, 20_000
# So many segments of bars of shares stand on a page; of more, whole steps are left out.
_MOST_SEGMENTS = 2000
# Numbers stand in the page as they are up to here; beyond, they are packed and rounded.
_PLAIN_CELLS, _EXACT_NUMBERS, _PLAIN_TEXT = 3000, 12_000, 7000
# So many parameters are one row each; more are grouped by module.
_UNGROUPED = 12
# So many letters stand on end above a column.
_UPRIGHT = 12
# Three digits are shown of a packed number; finer steps would only weigh.
_FINEST = 8e-4
# Codes of a packed number (what lies between is a logarithm).
_NONE, _ZERO, _NAN, _INFINITE = 0, 1, 65534, 65535
# More pixels than a page is wide tell nobody anything.
_WIDEST = 640
_MUTED = "var(--av-muted)"
# What the legends say of the looks of parts of `.grad`, and of shares.
_PARTS = {
    "new": "added now",
    "live": "already in .grad",
    "used": "used by a step",
}
_SHARES = {
    "new": "one backward",
    "used": "used by an earlier step, too",
    "unseen": "unknown",
}


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
    names, kinds, heads = _Numbered(), _Numbered(), _Numbered()
    inks = []
    for label, color in colors.items():
        inks.append([names(label), color, style.ink_on(color)])
    files, lines = listing(ledger, events)
    columns, rows = _rows(ledger, chosen)
    lanes = _add_bars(ledger, rows, columns)
    happened = {
        "k": [kinds(str(event.kind)) for event in events],
        "u": [heads(_heading(event)) for event in events],
        "c": lines,
        **_events(ledger, events, names),
    }
    if len(chosen) < len(ledger):
        happened["i"] = chosen.tolist()
    everywhere = (ledger.state & PRESENT).all()
    reaches = [row["r"] for row in rows[: len(ledger.parameters)]]
    scales = one_scale((row["n"], row["r"]) for row in rows)
    for row in rows:
        row["r"] = plain(scales[words.on_any_rank(row["n"])])
    data: dict[str, Any] = {
        "note": note,
        "before": words.before(),
        "kinds": [[kind, *style.kind(kind)] for kind in kinds.values],
        "colors": inks,
        "keys": _keys(ledger, events, lanes.get("look", [])),
        "none": "" if everywhere else "∅:\u00a0.grad\u00a0is\u00a0None.",
        "e": happened,
        "heads": heads.values,
        "count": len(ledger.parameters),
        "p": rows,
        "code": files,
        "x": _exact(ledger, chosen),
        "digits": 4 if columns["c"].size <= _PLAIN_CELLS else 3,
        "lane": lane_height(reaches, len(chosen)) if lanes else 0,
        "lanes": lanes,
        "unseen": _unseen(ledger),
    }
    weighed = _shares(ledger, chosen, names, colors)
    if weighed:
        data["shares"] = weighed
    data["strings"] = names.values
    moved = ground.picture(ledger, chosen.tolist()) if ground is not None else None
    if moved:
        data["weights"] = moved
    return data, _add_numbers(data, ledger, events, columns, levels)


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
    known = np.isfinite(column) & (column > 0)
    logs = np.log(column, where=known, out=np.zeros(column.shape))
    low = float(logs[known].min()) if known.any() else 0.0
    high = float(logs[known].max()) if known.any() else 0.0
    step = max((high - low) / (_NAN - 3), _FINEST)
    codes = np.where(known, np.rint((logs - low) / step) + 2, _ZERO).astype(np.uint16)
    codes[column < 0] = _NONE
    codes[np.isnan(column)] = _NAN
    codes[np.isposinf(column)] = _INFINITE
    halves = (codes >> 8).astype(np.uint8), codes.astype(np.uint8)
    return halves[0].tobytes() + halves[1].tobytes(), low, step


def plain(
    numbers: Sequence[float] | np.ndarray, digits: int = 6
) -> list[float | str | None]:
    """Write numbers for JSON, which knows neither NaN nor infinity; whole ones without a needless point.

    >>> plain([1.0, 0.25, float("nan"), float("-inf")])
    [1, 0.25, 'NaN', '-Infinity']
    """
    return [_plain(float(x), digits) for x in np.asarray(numbers, float).ravel()]


def _plain(x: float, digits: int) -> float | str | None:
    if not math.isfinite(x):
        return encoded(x)
    short = float(f"{x:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


class _Numbered:
    """Each value once; what repeats them holds their numbers."""

    def __init__(self) -> None:
        self._at: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self._at.setdefault(value, len(self._at))

    @property
    def values(self) -> list[Any]:
        """The values, in the order of their numbers."""
        return [*self._at]


# --- which events ---------------------------------------------------------------------------------


def thin(ledger: Ledger) -> tuple[np.ndarray, str]:
    """Return the events to show, and a sentence that says which were left out (empty: none).

    Whole accumulation windows are kept.
    """
    most = max(min(MOST_EVENTS, MOST_CELLS // max(len(ledger.parameters), 1)), 2)
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
    action, subject = words.action(event), words.subject(event)
    is_named = event.kind in ("backward", "sync") and subject
    upright = words.shorten(rank + (subject if is_named else action), _UPRIGHT)
    return upright, action, rank + subject


def _events(
    ledger: Ledger, events: Sequence[Event], names: _Numbered
) -> dict[str, Any]:
    """Return the events as columns; what most of them lack is a list of positions."""
    columns: dict[str, Any] = {
        "h": [words.head(event) for event in events],
        "l": [names(words.subject(event)) for event in events],
        "retained": [i for i, event in enumerate(events) if _is_retained(event)],
    }
    saved = [(event.saved_before, event.saved_after) for event in events]
    if np.isfinite(np.array(saved, float)).any():
        for key, column in zip("ba", zip(*saved, strict=True), strict=True):
            columns[key] = [None if x == "NaN" else x for x in plain(column)]
    texts = [words.about(ledger, e) for e in events]
    if any(texts):
        columns["t"] = texts
    return columns


def _is_retained(event: Event) -> bool:
    details = event.details
    return bool(details.get("retain_graph") or details.get("create_graph"))


# --- legends --------------------------------------------------------------------------------------


def _keys(
    ledger: Ledger, events: Sequence[Event], digits: list[str]
) -> list[list[str]]:
    """Return the legend, of what there is: what it says, the look of its swatch, its colour."""
    parts = _PARTS | {"unseen": _unseen(ledger)}
    looks = {LOOKS[int(digit)] for digit in "".join(digits)}
    if not digits and (ledger.state & CONTRIBUTED).any():
        looks.add("new")
    colors = style.label_colors(ledger.labels)
    keys = []
    for text, look, color in part_keys(colors, looks, parts, _MUTED):
        # A canvas has no hatching.
        keys.append([text, "live" if look == "unseen" else look, color])
    for kind in dict.fromkeys(str(event.kind) for event in events):
        color, dashes = style.kind(kind)
        if kind != "backward":
            keys.append([literal(kind), "rule", f"{color}{style.stripes(dashes)}"])
    keys.append([".grad after the event", "after", "var(--av-text)"])
    saved = [e.saved_before for e in events if not math.isnan(e.saved_before)]
    if saved:
        pale = f"color-mix(in srgb, {_MUTED} 50%, transparent)"
        most = style.size(max(saved))
        keys.append([f"saved tensors before, at most {most}", "bytes", pale])
        if any(event.saved_after > 0 for event in events):
            keys.append(["after", "bytes", _MUTED])
    return keys


def _unseen(ledger: Ledger) -> str:
    """Say where what no recorded backward put into `.grad` comes from."""
    return "other ranks" if ledger.of("sync") else "not recorded"


def _marks(events: int, pixels: int) -> str:
    """Say what a heat map's colours mean, and how many events a pixel shows.

    >>> _marks(6, 3)
    'Stronger: a larger contribution. Grey: .grad without one; ink: not finite. A pixel shows the largest of 2 events.'
    """
    text = "Stronger: a larger contribution. Grey: .grad without one; ink: not finite."
    coarse = math.ceil(events / pixels)
    return (
        f"{text} A pixel shows the largest of {coarse} events." if coarse > 1 else text
    )


# --- shares ---------------------------------------------------------------------------------------


def _shares(
    ledger: Ledger, chosen: np.ndarray, names: _Numbered, colors: dict[str, str]
) -> dict[str, Any]:
    """Return the bars of shares: their scale `r`, and for each its step `e`, objective `o`, and so on.

    A segment is the place of its backward (-1: not shown), where it starts, how long it is, its look and its text.
    """
    bars, note = shares.bars(ledger, chosen.tolist(), _MOST_SEGMENTS)
    if not bars:
        return {}
    at = {event: i for i, event in enumerate(chosen.tolist())}
    several = len({bar.objective for bar in bars}) > 1
    rows = []
    for bar in bars:
        parts = []
        for part in bar.segments:
            # Of a width of pixels four digits are seen.
            ends = plain([part.start, part.length], 4)
            parts.append([at.get(part.backward, -1), *ends, part.look, part.text])
        rank = ledger[bar.step].rank
        whose = [
            "" if rank is None else f"rank {rank}",
            _operation(bar.objective) if several else "",
        ]
        row = {
            "e": at[bar.step],
            "o": " · ".join(filter(None, whose)),
            "l": names(literal(bar.label)),
            "t": bar.total,
            "w": bar.words,
            "s": parts,
        }
        rows.append(row)
    labels = dict.fromkeys(literal(bar.label) for bar in bars)
    looks = {part.look for bar in bars for part in bar.segments}
    inks = {label: colors[label] for label in labels}
    dashed = ", ".join(filter(None, ["Dashed: 1", shares.among(ledger)]))
    return {
        "r": plain(shares.reach(bars)),
        "rows": rows,
        "keys": part_keys(inks, looks, _SHARES, _MUTED),
        "note": f"{dashed}. {note}".strip(),
    }


def _operation(objective: str) -> str:
    """Return how an objective is written where there is little room.

    >>> _operation("loss / K · MseLossBackward0 2"), _operation("g_loss")
    ('MseLoss 2', 'g_loss')
    """
    return re.sub(r"Backward\d+", "", objective.rpartition(" · ")[2])


# --- parameters -----------------------------------------------------------------------------------


def _rows(
    ledger: Ledger, chosen: np.ndarray
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Return the columns of the page, row after row: each parameter's and, of many, each group's norms; -1 for None.

    A row is described by its name `n`, short name `s`, shape `d`, reach `r` of its bars and, if it is a group,
    the range of parameters `in` it; `u` says that what its `.grad` was before the first event is unknown.
    """
    state = ledger.state[chosen]
    added = np.where(state & CONTRIBUTED, ledger.contribution[chosen], -1.0).T
    grads = np.where(state & PRESENT, ledger.grad[chosen], -1.0).T
    rows = [_parameter(parameter) for parameter in ledger.parameters]
    if len(rows) > _UNGROUPED:
        groups = words.group_rows([row["n"] for row in rows])
        for name, start, stop in groups:
            rows.append({"n": name, "s": name, "d": [], "in": [start, stop]})
        added = np.concatenate([added, _group_norms(added, groups)])
        grads = np.concatenate([grads, _group_norms(grads, groups)])
    for row, first, grad in zip(rows, added, grads, strict=True):
        highest = grad[np.isfinite(grad)].max(initial=0.0)
        row["r"] = 0.0, float(highest)
        if len(chosen) and not _begins(ledger.events[0], first[0], grad[0]):
            row["u"] = 1
    return {"c": added.ravel(), "g": grads.ravel()}, rows


def _parameter(parameter: Parameter) -> dict[str, Any]:
    name = literal(parameter.name)
    return {"n": name, "s": words.shorten(name, 40), "d": list(parameter.shape)}


def _group_norms(column: np.ndarray, groups: Sequence[words.Group]) -> list[np.ndarray]:
    """Return the norms of tensors put together, of those that there are."""
    norms = []
    for group in groups:
        rows = column[group.start : group.stop]
        whole = np.sqrt((np.where(rows < 0, 0.0, rows) ** 2).sum(axis=0))
        norms.append(np.where((rows < 0).all(axis=0), -1.0, whole))
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
    ledger: Ledger, rows: list[dict[str, Any]], columns: dict[str, np.ndarray]
) -> dict[str, list[Any]]:
    """Return the bars of small ledgers, and add how far they reach, and what events erased unused, to the rows."""
    cells = columns["c"].size
    if not 0 < cells <= _MOST_BARS or cells != len(rows) * len(ledger):
        return {}
    if (
        count_parts(ledger) > _MOST_PARTS
    ):  # what is never zeroed stays in every later bar
        return {}
    bars = PageBars(ledger)
    norms, grads = (column.reshape(len(rows), -1) for column in columns.values())
    for p, row in enumerate(rows):
        members = range(*row.get("in", (p, p + 1)))
        row["r"] = bars.add(members, norms[p], grads[p])
    places = {parameter.name: p for p, parameter in enumerate(ledger.parameters)}
    for e in range(len(ledger)):
        for name, births in ledger.unconsumed(e).items():
            rows[places[name]].setdefault("lost", {})[e] = births
    return bars.columns


# --- numbers --------------------------------------------------------------------------------------


def _add_numbers(
    data: dict[str, Any],
    ledger: Ledger,
    events: Sequence[Event],
    columns: dict[str, np.ndarray],
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
            place = {"at": len(blob), "size": column.size, "low": low, "step": step}
            data[name] = place
            blob += packed
    if not events or not ledger.parameters:
        return blob
    pixels = _pixels(ledger, events, columns, levels)
    heat_map = {"w": pixels.shape[1], "told": _marks(len(events), pixels.shape[1])}
    if blob:
        data["heat"] = heat_map | {"at": len(blob)}
        return blob + pixels.tobytes()
    data["heat"] = heat_map | {"px": pixels.ravel().tolist()}
    return blob


def _pixels(
    ledger: Ledger,
    events: Sequence[Event],
    columns: dict[str, np.ndarray],
    levels: tuple[float, float] | None,
) -> np.ndarray:
    """Return the codes of the heat map of all parameters."""
    places = {label: i for i, label in enumerate(ledger.labels)}
    labels = np.array([places.get(event.label, 0) for event in events], np.int64)
    added, grad = (
        columns[name].reshape(-1, len(events))[: len(ledger.parameters)]
        for name in "cg"
    )
    count = min(len(events), _WIDEST)
    starts = np.unique(np.arange(count) * len(events) // count)
    return heat(added, ~(grad < 0), labels, starts, levels=levels).codes


def _exact(ledger: Ledger, chosen: np.ndarray) -> dict[str, Any]:
    """Return all elements of the small parameters, if they are few: [contributions, grads]."""
    small = [p for p in sorted(ledger.exact) if ledger.parameters[p].numel <= 4]
    numbers = 2 * len(chosen) * sum(ledger.parameters[p].numel for p in small)
    if numbers > _EXACT_NUMBERS:
        return {}
    kept: dict[str, Any] = {}
    for p in small:
        sides = []
        for values, bit in zip(ledger.exact[p], (CONTRIBUTED, PRESENT), strict=True):
            is_there = (ledger.state[chosen, p] & bit).tolist()
            rows = zip(values[chosen], is_there, strict=True)
            sides.append([plain(row) if there else None for row, there in rows])
        kept[str(p)] = sides
    return kept
