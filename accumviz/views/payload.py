"""Ledger and graphs -> what a player carries in its page: plain JSON while small, packed columns beyond; inert text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from accumviz.ledger import CONTRIBUTED, PRESENT, Event, Ledger
from accumviz.views import style, words
from accumviz.views.groups import group_rows
from accumviz.views.listing import listing

# What is shown at once; beyond, events are thinned, and a note says so.
MOST_EVENTS, MOST_CELLS = 10_000, 2_000_000
# Numbers stand in the page as they are up to here; beyond, they are packed and rounded.
_PLAIN_CELLS, _EXACT_NUMBERS, _PLAIN_TEXT = 3000, 12_000, 7000
# Codes of a packed number; what lies between is a logarithm.
_NONE, _ZERO, _NAN, _INFINITE = 0, 1, 65534, 65535


def ledger_data(ledger: Ledger) -> tuple[dict[str, Any], bytes]:
    """Everything the player shows of a ledger: data for JSON, and the bytes of its packed columns."""
    chosen, note = thin(ledger)
    events = [ledger.events[e] for e in chosen]
    names = _Names()
    data: dict[str, Any] = {
        "about": words.overview(ledger, range(len(ledger)), range(len(ledger.parameters))),
        "total": len(ledger),
        "note": note,
        "kinds": {kind: style.KIND.get(kind, "#7f7f7f") for kind in dict.fromkeys(str(e.kind) for e in events)},
        "colors": [],
        "e": _events(events, names),
        "p": [
            {"n": words.literal(p.name), "d": list(p.shape), "o": list(p.optimizers)} for p in ledger.parameters
        ],
        "groups": [[g.name, g.start, g.stop] for g in group_rows([words.literal(p.name) for p in ledger.parameters])],
        "code": listing(ledger, events),
    }
    if len(chosen) < len(ledger):
        data["e"]["i"] = chosen.tolist()
    colors = style.label_colors([words.literal(label) for label in ledger.labels])
    data["colors"] = [[names(label), color] for label, color in colors.items()]
    blob = b""
    columns = {
        "c": _column(ledger.contribution[chosen], ledger.state[chosen] & CONTRIBUTED > 0),
        "g": _column(ledger.grad[chosen], ledger.state[chosen] & PRESENT > 0),
    }
    for name, column in columns.items():
        if column.size <= _PLAIN_CELLS:
            data[name] = plain(column)
            continue
        packed, low, step = pack(column)
        data[name] = {"at": len(blob), "size": column.size, "low": low, "step": step}
        blob += packed
    data["x"] = _exact(ledger, chosen)
    data["strings"] = names.texts
    return data, blob


def encode(data: dict[str, Any], blob: bytes = b"") -> str:
    """Write a player's data as the text of a JSON script: nothing in it can end the script or be run."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if blob or len(text) > _PLAIN_TEXT:
        raw = text.encode("utf-8", "replace")
        packed = zlib.compress(struct.pack("<I", len(raw)) + raw + blob, 6)
        text = json.dumps({"z": base64.b64encode(packed).decode()})
    return text.replace("<", "\\u003c")


def identity(data: dict[str, Any], blob: bytes = b"") -> str:
    """A name for a player that is the same whenever its content is."""
    raw = json.dumps(data, sort_keys=True, allow_nan=False).encode("utf-8", "replace")
    return "av" + hashlib.sha256(raw + blob).hexdigest()[:6]


def thin(ledger: Ledger) -> tuple[np.ndarray, str]:
    """The events to show, and a sentence that says which were left out (empty: none).

    Whole accumulation windows are kept, so that what is live in `.grad` stays explained.
    """
    most = max(min(MOST_EVENTS, MOST_CELLS // max(len(ledger.parameters), 1)), 2)
    if len(ledger) <= most:
        return np.arange(len(ledger)), ""
    opens = np.array([event.kind == "backward" and not event.within for event in ledger.events], bool)
    opens[1:] &= ~opens[:-1]
    opens[0] = True
    starts = np.flatnonzero(opens)
    sizes = np.diff(np.append(starts, len(ledger)))
    if sizes.max() * 4 > most:  # no windows to keep whole
        chosen = np.unique(np.linspace(0, len(ledger) - 1, most).astype(int))
        return chosen, f"{len(chosen):,} of {len(ledger):,} events are shown, evenly spaced."
    window = np.repeat(np.arange(len(starts)), sizes)
    odd = ~np.isfinite(np.where(ledger.state & CONTRIBUTED, ledger.contribution, 0)).all(axis=1)
    odd |= np.array([event.skipped or event.kind == "edit" for event in ledger.events], bool)
    wanted = np.unique(window[odd])
    extra = wanted[np.cumsum(sizes[wanted]) <= most // 4]
    every = math.ceil(sizes.sum() / max(most - sizes[extra].sum() - 2 * sizes.max(), 1))
    kept = np.union1d(np.append(np.arange(0, len(starts), every), len(starts) - 1), extra)
    chosen = np.flatnonzero(np.isin(window, kept))
    told = f"{len(chosen):,} of {len(ledger):,} events are shown: one accumulation window of {every}"
    if extra.size:
        some = "all" if extra.size == wanted.size else "the first"
        told += f", and {some} with a number that is not finite, a skipped step or an edit"
    return chosen, f"{told}."


def pack(column: np.ndarray) -> tuple[bytes, float, float]:
    """Norms (-1: None) as 16-bit logarithms, parameter by parameter, high bytes before low ones.

    Neighbours in time are alike, and equal bytes side by side are what compression lives on.

    >>> packed, low, step = pack(np.array([-1.0, 0.0, 20.0, np.nan]))
    >>> len(packed), unpack(packed, low, step).round(3).tolist()
    (8, [-1.0, 0.0, 20.0, nan])
    """
    known = np.isfinite(column) & (column > 0)
    logs = np.log(column, where=known, out=np.zeros(column.shape))
    low = float(logs[known].min()) if known.any() else 0.0
    high = float(logs[known].max()) if known.any() else 0.0
    step = max(high - low, 1e-6) / (_NAN - 3)
    codes = np.where(known, np.rint((logs - low) / step) + 2, _ZERO).astype(np.uint16)
    codes[column < 0] = _NONE
    codes[np.isnan(column)] = _NAN
    codes[np.isposinf(column)] = _INFINITE
    return (codes >> 8).astype(np.uint8).tobytes() + codes.astype(np.uint8).tobytes(), low, step


def unpack(packed: bytes, low: float, step: float) -> np.ndarray:
    """What a page makes of packed norms."""
    high, rest = np.frombuffer(packed, np.uint8).reshape(2, -1).astype(np.int64)
    codes = high * 256 + rest
    values: np.ndarray = np.exp(low + (codes - 2) * step)
    for code, value in ((_NONE, -1.0), (_ZERO, 0.0), (_NAN, np.nan), (_INFINITE, np.inf)):
        values[codes == code] = value
    return values


def plain(numbers: Sequence[float] | np.ndarray) -> list[float | str | None]:
    """Numbers for JSON, which knows neither NaN nor infinity; whole ones without a needless point.

    >>> plain([1.0, 0.25, float("nan"), float("-inf")])
    [1, 0.25, 'NaN', '-Infinity']
    """
    return [_plain(float(x)) for x in np.asarray(numbers, float).ravel()]


def _plain(x: float) -> float | str | None:
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "Infinity" if x > 0 else "-Infinity"
    short = float(f"{x:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


class _Names:
    """Each text once; columns of events hold its number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._at: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if text not in self._at:
            self._at[text] = len(self.texts)
            self.texts.append(text)
        return self._at[text]


def _events(events: Sequence[Event], names: _Names) -> dict[str, Any]:
    """The events as columns; what most of them lack is a list of positions."""
    columns: dict[str, Any] = {
        "k": [names(str(e.kind)) for e in events],
        "l": [names(words.subject(e)) for e in events],
        "f": [names(str(e.file)) for e in events],
        "n": [_whole(e.line) for e in events],
        "skipped": [i for i, e in enumerate(events) if e.skipped],
        "inside": [i for i, e in enumerate(events) if e.kind == "backward" and e.within == "step"],
        "retained": [i for i, e in enumerate(events) if e.details.get("retain_graph") or e.details.get("create_graph")],
        "by": [[i, _whole(e.details.get("optimizer_index", 0))] for i, e in enumerate(events) if e.kind == "step"],
    }
    for key, name in (("loss", "loss"), ("b", "saved_before"), ("a", "saved_after")):
        numbers = np.array([getattr(e, name) for e in events], float)
        if np.isfinite(numbers).any() or np.isinf(numbers).any():
            columns[key] = [None if x == "NaN" else x for x in plain(numbers)]
    return columns


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _column(norms: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Parameter by parameter; -1, which no norm is, where there is none."""
    return np.where(there, norms, -1.0).T.ravel()


def _exact(ledger: Ledger, chosen: np.ndarray) -> dict[str, Any]:
    """Element by element, the smallest parameters first, as many as fit: [contributions, grads]."""
    kept: dict[str, Any] = {}
    room = _EXACT_NUMBERS
    for p in sorted(ledger.exact, key=lambda p: (ledger.parameters[p].numel, p)):
        numel = ledger.parameters[p].numel
        room -= 2 * numel * len(chosen)
        if numel > 4 or room < 0:
            break
        state = ledger.state[chosen, p]
        kept[str(p)] = [
            [row if there else None for row, there in zip(_rows(values[chosen]), state & bit, strict=True)]
            for values, bit in zip(ledger.exact[p], (CONTRIBUTED, PRESENT), strict=True)
        ]
    return kept


def _rows(values: np.ndarray) -> list[Any]:
    return [plain(row) for row in values]
