"""Ledger and graphs -> what a player carries in its page: plain JSON while small, packed columns beyond; inert text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from accumviz.ledger import lifecycle
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger
from accumviz.show import encoded, literal
from accumviz.views import shares, style, words
from accumviz.views.heat import BROKEN, PRESENT_ONLY, heat
from accumviz.views.listing import listing
from accumviz.views.parts import lane
from accumviz.views.words import group_rows

# What is shown at once; beyond, events are thinned, and a note says so.
MOST_EVENTS, MOST_CELLS = 10_000, 2_000_000
# So many segments of bars of shares stand on a page; of more, whole steps are left out.
_MOST_SEGMENTS = 2000
# Numbers stand in the page as they are up to here; beyond, they are packed and rounded.
_PLAIN_CELLS, _EXACT_NUMBERS, _PLAIN_TEXT = 3000, 12_000, 7000
# So many parameters are one row each; more are grouped by module.
_UNGROUPED = 12
# A call longer than so many letters is shortened above a column, where a page would cut it in the middle.
_HEADING = 14
# Three digits are shown of a packed number; finer steps would only weigh.
_FINEST = 8e-4
# These change the whole of `.grad`, and so every part of it alike.
_SCALING = ("clip", "unscale")
# Codes of a packed number (what lies between is a logarithm), and what the looks of shares mean.
_NONE, _ZERO, _NAN, _INFINITE = 0, 1, 65534, 65535
_LOOKS = {
    "new": "one backward",
    "used": "used by an earlier step, too",
    "unseen": "unknown",
}
# More pixels than a page is wide tell nobody anything.
_WIDEST = 640


class Ground(Protocol):
    """What the weights of a ledger are drawn on, where somebody draws them."""

    def picture(self, ledger: Ledger, chosen: Sequence[int]) -> dict[str, Any]: ...


def ledger_data(
    ledger: Ledger,
    ground: Ground | None = None,
    levels: tuple[float, float] | None = None,
) -> tuple[dict[str, Any], bytes]:
    """Everything the player shows of a ledger: data for JSON, and the bytes of its packed columns.

    `levels` are the logarithms between which a heat map's levels lie, if not the run's own.
    """
    chosen, note = thin(ledger)
    events = [ledger.events[e] for e in chosen]
    names = _Names()
    kinds = list(dict.fromkeys(str(e.kind) for e in events))
    columns, described = _rows(ledger, chosen)
    members = [tuple(row.get("in", (p, p + 1))) for p, row in enumerate(described)]
    fates, which = lifecycle.runs(
        ledger,
        ledger.fates,
        chosen,
        columns["c"].reshape(len(described), len(chosen)),
        members,
    )
    described = [row | {"f": runs} for row, runs in zip(described, which, strict=True)]
    files, lines = listing(ledger, events)
    colors = style.label_colors([literal(label) for label in ledger.labels])
    # What stands above a column: on end; in two lines.
    titles = [
        (
            words.title(e),
            words.action(e),
            words.on_rank(e, words.brief_call(words.subject(e), _HEADING)),
        )
        for e in events
    ]
    heads = {title: code for code, title in enumerate(dict.fromkeys(titles))}
    data: dict[str, Any] = {
        "note": f"{note} {_unmeasured(events)}".strip(),
        "before": words.before(),
        "kinds": [[kind, *style.kind(kind)] for kind in kinds],
        "colors": [
            [names(label), color, style.ink_on(color)]
            for label, color in colors.items()
        ],
        "keys": _keys(ledger, events, kinds),
        "none": ""
        if (ledger.state & PRESENT).all()
        else "∅:\u00a0.grad\u00a0is\u00a0None.",
        "e": {
            "k": [kinds.index(str(e.kind)) for e in events],
            **_events(ledger, events, names),
            "c": lines,
            "u": [heads[title] for title in titles],
        },
        "heads": [*heads],
        "count": len(ledger.parameters),
        "p": described,
        "fates": fates,
        "cut": _cut([row["n"] for row in described]),
        "code": files,
        "x": _exact(ledger, chosen),
        "strings": names.texts,
    }
    if weighed := _shares(ledger, chosen, names, colors):
        data["shares"] = weighed
    if ground is not None and (moved := ground.picture(ledger, chosen.tolist())):
        data["weights"] = moved
    data["lane"], data["close"] = lane(ledger, [row["r"] for row in described])
    if len(chosen) < len(ledger):
        data["e"]["i"] = chosen.tolist()
    data["digits"] = 4 if columns["c"].size <= _PLAIN_CELLS else 3
    blob = b""
    for name, column in columns.items():
        if column.size <= _PLAIN_CELLS:
            data[name] = plain(column)
            continue
        packed, low, step = pack(column)
        data[name] = {"at": len(blob), "size": column.size, "low": low, "step": step}
        blob += packed
    if len(chosen) and ledger.parameters:
        numbered = {label: i for i, label in enumerate(ledger.labels)}
        labels = np.array([numbered.get(e.label, 0) for e in events], np.int64)
        added, grad = (
            columns[name].reshape(-1, len(chosen))[: len(ledger.parameters)]
            for name in "cg"
        )
        count = min(len(chosen), _WIDEST)
        starts = np.unique(np.arange(count) * len(chosen) // count)
        pixels = heat(added, ~(grad < 0), labels, starts, levels=levels).codes
        where = {"at": len(blob)} if blob else {"px": pixels.ravel().tolist()}
        data["heat"] = {
            "w": pixels.shape[1],
            "told": _marks(pixels, len(chosen)),
            **where,
        }
        blob += pixels.tobytes() if blob else b""
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
    opens = np.array(
        [event.kind == "backward" and not event.within for event in ledger.events], bool
    )
    opens[1:] &= ~opens[:-1]
    opens[0] = True
    starts = np.flatnonzero(opens)
    sizes = np.diff(np.append(starts, len(ledger)))
    if sizes.max() * 4 > most:  # no windows to keep whole
        chosen = np.unique(np.linspace(0, len(ledger) - 1, most).astype(int))
        return (
            chosen,
            f"{len(chosen):,} of {len(ledger):,} events are shown, evenly spaced.",
        )
    window = np.repeat(np.arange(len(starts)), sizes)
    odd = ~np.isfinite(
        np.where(ledger.state & CONTRIBUTED, ledger.contribution, 0)
    ).all(axis=1)
    odd |= np.array(
        [event.skipped or event.kind == "edit" for event in ledger.events], bool
    )
    wanted = np.unique(window[odd])
    extra = wanted[np.cumsum(sizes[wanted]) <= most // 4]
    every = math.ceil(sizes.sum() / max(most - sizes[extra].sum() - 2 * sizes.max(), 1))
    kept = np.union1d(
        np.append(np.arange(0, len(starts), every), len(starts) - 1), extra
    )
    chosen = np.flatnonzero(np.isin(window, kept))
    told = f"{len(chosen):,} of {len(ledger):,} events are shown: one accumulation window of {every}"
    if extra.size:
        some = "all" if extra.size == wanted.size else "the first"
        told += (
            f", and {some} with a number that is not finite, a skipped step or an edit"
        )
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
    step = max((high - low) / (_NAN - 3), _FINEST)
    codes = np.where(known, np.rint((logs - low) / step) + 2, _ZERO).astype(np.uint16)
    codes[column < 0] = _NONE
    codes[np.isnan(column)] = _NAN
    codes[np.isposinf(column)] = _INFINITE
    return (
        (codes >> 8).astype(np.uint8).tobytes() + codes.astype(np.uint8).tobytes(),
        low,
        step,
    )


def unpack(packed: bytes, low: float, step: float) -> np.ndarray:
    """What a page makes of packed norms."""
    high, rest = np.frombuffer(packed, np.uint8).reshape(2, -1).astype(np.int64)
    codes = high * 256 + rest
    values: np.ndarray = np.exp(low + (codes - 2) * step)
    for code, value in (
        (_NONE, -1.0),
        (_ZERO, 0.0),
        (_NAN, np.nan),
        (_INFINITE, np.inf),
    ):
        values[codes == code] = value
    return values


def plain(
    numbers: Sequence[float] | np.ndarray, digits: int = 6
) -> list[float | str | None]:
    """Numbers for JSON, which knows neither NaN nor infinity; whole ones without a needless point.

    >>> plain([1.0, 0.25, float("nan"), float("-inf")])
    [1, 0.25, 'NaN', '-Infinity']
    """
    return [_plain(float(x), digits) for x in np.asarray(numbers, float).ravel()]


def _plain(x: float, digits: int) -> float | str | None:
    if not math.isfinite(x):
        return encoded(x)
    short = float(f"{x:.{digits}g}")
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


def _events(ledger: Ledger, events: Sequence[Event], names: _Names) -> dict[str, Any]:
    """The events as columns; what most of them lack is a list of positions."""
    columns: dict[str, Any] = {
        "h": [words.head(e) for e in events],
        "l": [names(words.subject(e)) for e in events],
        "retained": [
            i
            for i, e in enumerate(events)
            if e.details.get("retain_graph") or e.details.get("create_graph")
        ],
        "scales": [i for i, e in enumerate(events) if e.kind in _SCALING],
    }
    if any(not math.isnan(e.saved_before) for e in events):
        for key, name in (("b", "saved_before"), ("a", "saved_after")):
            columns[key] = [
                None if x == "NaN" else x
                for x in plain([getattr(e, name) for e in events])
            ]
    if any(
        told := [
            "; ".join(filter(None, [words.about(e), words.moved(ledger, e)]))
            for e in events
        ]
    ):
        columns["t"] = told
    return columns


def _shares(
    ledger: Ledger, chosen: np.ndarray, names: _Names, colors: dict[str, str]
) -> dict[str, Any]:
    """The bars of shares: their scale `r`, the longest words `m` of a step, and for each its step, objective and so on.

    A segment is the place of its backward (-1: not shown), where it starts, how long it is, its look and its text.
    """
    bars, note = shares.bars(ledger, chosen.tolist(), _MOST_SEGMENTS)
    if not bars:
        return {}
    at = {event: i for i, event in enumerate(chosen.tolist())}
    short = shares.apart([bar.objective for bar in bars])
    dashed = ", ".join(filter(None, ["Dashed: 1", shares.among(ledger)]))
    rows = []
    for bar in bars:
        parts = [
            # Of a width of pixels four digits are seen.
            [
                at.get(part.backward, -1),
                *plain([part.start, part.length], 4),
                part.look,
                part.told,
            ]
            for part in bar.segments
        ]
        row = {
            "e": at[bar.step],
            "o": shares.whose(
                ledger[bar.step], short[bar.objective] if len(short) > 1 else ""
            ),
            "l": names(literal(bar.label)),
            "t": bar.total,
            "w": bar.words,
        }
        rows.append(row | {"s": parts})
    looks = {part.look for bar in bars for part in bar.segments}
    inks = list(
        dict.fromkeys((literal(bar.label), colors[literal(bar.label)]) for bar in bars)
    )
    several = len({color for _, color in inks}) > 1 and "new" in looks
    keys = (
        [[words.shorten(label, 28), "new", color] for label, color in inks[:8]]
        if several
        else []
    )
    keys += [
        [text, look, "var(--av-muted)" if several or look == "unseen" else inks[0][1]]
        for look, text in _LOOKS.items()
        if look in looks and not (several and look == "new")
    ]
    note = f"{'Each piece: one backward. ' * several}{dashed}. {note}".strip()
    return {
        "r": plain(shares.reach(bars)),
        "m": shares.longest(bars),
        "rows": rows,
        "keys": keys,
        "note": note,
    }


def _unmeasured(events: Sequence[Event]) -> str:
    """Which bars of saved bytes are missing because nobody measured: measuring a large graph each time would cost.

    >>> _unmeasured([Event(0, "backward", saved_before=8.0, saved_after=0.0), Event(1, "backward")])
    'Saved tensors were measured at 1 of 2 backwards.'
    """
    known = [not math.isnan(e.saved_before) for e in events if e.kind == "backward"]
    if all(known) or not any(known):
        return ""
    return f"Saved tensors were measured at {sum(known):,} of {words.counted(len(known), 'backward')}."


def _rows(
    ledger: Ledger, chosen: np.ndarray
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """The columns of the page, row after row: each parameter's and, of many, each group's norms; -1 for None.

    A row is described by its name `n`, shape `d`, reach `r` of its bars and, if it is a group,
    the range of parameters `in` it; `y` says what ranks make of its parts, `u` that nobody knows what its
    `.grad` was before the first event: that event does not account for all of it.
    """
    state = ledger.state[chosen]
    columns = {
        "c": np.where(state & CONTRIBUTED, ledger.contribution[chosen], -1.0).T,
        "g": np.where(state & PRESENT, ledger.grad[chosen], -1.0).T,
    }
    found: list[dict[str, Any]] = [
        {
            "n": literal(p.name),
            "s": words.shorten(p.name, 40),
            "d": list(p.shape),
        }
        for p in ledger.parameters
    ]
    groups = group_rows([row["n"] for row in found]) if len(found) > _UNGROUPED else []
    found += [
        {"n": group.name, "s": group.name, "d": [], "in": [group.start, group.stop]}
        for group in groups
    ]
    for name, column in columns.items():
        merged = [_norm(column[group.start : group.stop]) for group in groups]
        columns[name] = np.concatenate([column, *(row[None] for row in merged)])
    for p, row in enumerate(found):
        grad = columns["g"][p]
        row["r"] = plain([0.0, grad[np.isfinite(grad)].max(initial=0.0)])
        if len(chosen) and not _begins(
            ledger.events[0], float(columns["c"][p, 0]), float(grad[0])
        ):
            row["u"] = 1
        if p >= len(ledger.parameters):
            continue
        if words.is_signed(ledger, p):
            row["r"] = plain(lifecycle.reach(ledger, ledger.fates, p))
        # What a rank's own part counts for, once it is averaged.
        ranks = {s.index: s.details.get("ranks", 1) for s in words.averaged(ledger, p)}
        if ranks:
            row["y"] = [
                [i, 1 / ranks[e]] for i, e in enumerate(chosen.tolist()) if e in ranks
            ]
    _to_one_scale(found)
    return {name: column.ravel() for name, column in columns.items()}, found


def _begins(first: Event, added: float, grad: float) -> bool:
    """Whether `.grad` was None before an event that left it so, after it had added so much; -1 is None.

    >>> backward, zero = Event(0, "backward"), Event(0, "zero_grad")
    >>> _begins(backward, 2.0, 2.0), _begins(backward, 2.0, 5.0), _begins(backward, -1, 5.0), _begins(zero, -1, -1)
    (True, False, False, False)
    """
    return first.kind != "zero_grad" and (
        grad < 0 or math.isclose(grad, added, rel_tol=1e-3)
    )


def _to_one_scale(rows: list[dict[str, Any]]) -> None:
    """What is one parameter on several ranks is compared, and so drawn to one scale."""
    ranges: dict[str, list[list[Any]]] = {}
    for row in rows:
        ranges.setdefault(words.on_any_rank(row["n"]), []).append(row["r"])
    for same in ranges.values():
        reach = [min(low for low, _ in same), max(high for _, high in same)]
        for one in same:
            one[:] = reach


def _keys(
    ledger: Ledger, events: Sequence[Event], kinds: Sequence[str]
) -> list[list[str]]:
    """The legend, of what is there: what it says, the look of its swatch, its colour."""
    colors = [
        [words.shorten(label or "backward", 28), "new", color]
        for label, color in style.label_colors(ledger.labels).items()
    ]
    own = colors[0][2] if colors else "var(--av-muted)"
    erased, consumed, _ = ledger.fates
    born, of = np.nonzero(ledger.state & CONTRIBUTED)
    until, used = (
        np.where(ends < 0, len(ledger), ends)[born, of] for ends in (erased, consumed)
    )
    looks = [
        (born.size and len(colors) == 1, ["added now", "new", own]),
        ((np.minimum(until, used) > born + 1).any(), ["already in .grad", "live", own]),
        ((used < len(ledger)).any(), ["used by a step", "used", own]),
        (
            any(
                words.averaged(ledger, p)
                for p in range(len(ledger.parameters))
                if words.is_signed(ledger, p)
            ),
            ["from other ranks", "live", "var(--av-muted)"],
        ),
    ]
    ruled = [(literal(kind), *style.kind(kind)) for kind in kinds if kind != "backward"]
    rules = [
        [kind, "rule", f"{color}{style.stripes(dashes)}"]
        for kind, color, dashes in ruled
    ]
    marks = [[".grad after the event", "after", "var(--av-text)"]]
    if known := [e.saved_before for e in events if not math.isnan(e.saved_before)]:
        pale = "color-mix(in srgb, var(--av-muted) 50%, transparent)"
        marks.append(
            [f"saved tensors before, at most {style.size(max(known))}", "bytes", pale]
        )
        if any(e.saved_after > 0 for e in events):
            marks.append(["after", "bytes", "var(--av-muted)"])
    return [
        *(colors[:8] if len(colors) > 1 else []),
        *(look for there, look in looks if there),
        *rules,
        *marks,
    ]


def _marks(pixels: np.ndarray, events: int) -> str:
    """What the legend says of a heat map's colours, of those that it has, and of how many events a pixel shows.

    >>> _marks(np.array([[0, 3, 9]]), 3), _marks(np.array([[1, 2]]), 2)
    ('Stronger: a larger contribution.', 'Grey: .grad without one; ink: not finite.')
    >>> _marks(np.array([[3, 3]]), 5)
    'Stronger: a larger contribution. A pixel shows the largest of 3 events.'
    """
    told = (
        ((pixels > BROKEN).any(), "stronger: a larger contribution"),
        ((pixels == PRESENT_ONLY).any(), "grey: .grad without one"),
        ((pixels == BROKEN).any(), "ink: not finite"),
    )
    text = "; ".join(mark for there, mark in told if there)
    coarse = math.ceil(events / pixels.shape[1])
    more = f" A pixel shows the largest of {coarse} events." if coarse > 1 else ""
    return f"{text[:1].upper()}{text[1:]}.{more}" if text else ""


def _norm(rows: np.ndarray) -> np.ndarray:
    """The norm of tensors put together, of those that are there."""
    whole: np.ndarray = np.sqrt((np.where(rows < 0, 0.0, rows) ** 2).sum(axis=0))
    return np.where((rows < 0).all(axis=0), -1.0, whole)


def _cut(names: Sequence[str]) -> int:
    """How many characters all names begin with, up to the last dot but one: they tell nothing apart."""
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and len({tuple(part[: shared + 1]) for part in parts}) == 1:
        shared += 1
    return sum(len(part) + 1 for part in parts[0][: shared - 1]) if shared > 1 else 0


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
            [
                row if there else None
                for row, there in zip(
                    map(plain, values[chosen]), state & bit, strict=True
                )
            ]
            for values, bit in zip(ledger.exact[p], (CONTRIBUTED, PRESENT), strict=True)
        ]
    return kept
