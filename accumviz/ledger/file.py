"""A ledger as chunks of a file: parameters as JSON, events and numbers as columns; written, and read with distrust."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from accumviz.ledger.container import (
    FORMAT,
    Reader,
    a_list,
    a_text,
    an_object,
    parsed,
    plain,
    whole,
)
from accumviz.ledger.events import (
    CODES,
    KINDS,
    NUMBERS,
    TABLES,
    Arrays,
    Events,
    Gatherer,
    Parameter,
    Weighed,
)

# So many bytes of arrays in one chunk of a saved ledger: reading it holds two of them.
_CHUNK = 4 << 20
_MOST = 2**31 - 1
# A ledger from before there were ranks, or a CUDA device, knows nothing of them.
_LATER = ("rank", "unsharded_of")
_ON_DEVICES = NUMBERS.index("allocated")
# One of before format 3 knows one line of each event, and no weights.
_LINES = CODES.index("frames")


def header(ledger: Arrays) -> dict[str, Any]:
    """What a file says once: the parameters and where the recording was made."""
    return described(ledger.parameters, ledger.meta)


def described(
    parameters: Iterable[Parameter], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """These parameters and this `meta`, as a file says them."""
    rows = [
        {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(p).items()}
        for p in parameters
    ]
    return {
        "parameters": [
            {k: v for k, v in row.items() if k not in _LATER or v not in (None, "")}
            for row in rows
        ],
        "meta": dict(meta),
    }


def chunks(ledger: Arrays) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """The events and their arrays, in chunks of a few megabytes; the texts of the files with the first."""
    wide = (
        9 * len(ledger.parameters)
        + 16 * sum(a.shape[1] for a, _ in ledger.exact.values())
        + 96
    )
    step = max(1, _CHUNK // wide)
    for start in range(0, len(ledger.events), step):
        where = slice(start, start + step)
        head, arrays = pack(
            ledger.columns.take(where),
            ledger.contribution[where],
            ledger.grad[where],
            ledger.state[where],
            {
                p: (added[where], grad[where])
                for p, (added, grad) in ledger.exact.items()
            },
            _weighed_in(ledger.weighed, start, start + step),
        )
        yield head | ({} if start else {"sources": ledger.sources}), arrays
    if not len(ledger.events) and ledger.sources:
        yield {"sources": ledger.sources}, {}


def chunk(ledger: Arrays) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The events of a ledger and their arrays, as one chunk: what a recording appends."""
    head, arrays = pack(
        ledger.columns,
        ledger.contribution,
        ledger.grad,
        ledger.state,
        ledger.exact,
        ledger.weighed,
    )
    return head | {"sources": ledger.sources}, arrays


def pack(
    events: Events,
    contribution: np.ndarray,
    grad: np.ndarray,
    state: np.ndarray,
    exact: Mapping[int, tuple[np.ndarray, np.ndarray]] = {},
    weighed: Weighed | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """One chunk: these events and their rows of the ledger's arrays.

    All chunks of a file have the same parameters in `exact`, and `weighed` has all of them. A chunk
    may also hold `sources`, which are added, and `parameters` or `meta`, which replace what was said
    before.
    """
    tables = {name: list(events.tables[name]) for name in TABLES}
    tables["details"] = [
        known
        if isinstance(known, str)
        else json.dumps(dict(known), separators=(",", ":"))
        for known in tables["details"]
    ]
    known = (
        len(NUMBERS)
        if np.isfinite(events.numbers[:, _ON_DEVICES:]).any()
        else _ON_DEVICES
    )
    arrays = {
        "codes": events.codes.T.astype("<i4", copy=False),
        "numbers": events.numbers[:, :known].T.astype("<f8", copy=False),
        "contribution": contribution.astype("<f4", copy=False),
        "grad": grad.astype("<f4", copy=False),
        "state": state.astype("|u1", copy=False),
    }
    parameters = sorted(exact)
    for which, name in enumerate(("exact contribution", "exact grad")):
        if parameters:
            arrays[name] = np.concatenate(
                [exact[p][which] for p in parameters], axis=1
            ).astype("<f8", copy=False)
    if weighed is not None and weighed.events.size:
        kept = [weighed.elements[p] for p in sorted(weighed.elements)]
        arrays["weighed"] = weighed.events.astype("<i4", copy=False)
        arrays["weights"] = np.concatenate(kept, axis=1).astype("<f8", copy=False)
    return {"tables": tables, "exact": parameters}, arrays


def _weighed_in(weighed: Weighed, start: int, stop: int) -> Weighed:
    """What of it happened after these events, counted from the first of them."""
    where = slice(*np.searchsorted(weighed.events, [start, stop]).tolist())
    return Weighed(
        weighed.events[where] - start,
        {p: found[where] for p, found in weighed.elements.items()},
    )


class Parts:
    """Chunks from several places as one file: a recording's, on disk and in memory."""

    def __init__(
        self, *parts: Iterable[tuple[dict[str, Any], dict[str, np.ndarray]]]
    ) -> None:
        self.format, self.complete, self.end = FORMAT, True, dict[str, Any]()
        # What reads chunks takes them apart.
        self._chunks = (
            (dict(head), dict(arrays)) for part in parts for head, arrays in part
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        return self._chunks


def decode(reader: Reader | Parts) -> Arrays:
    """Put the chunks of a file together.

    Raises ValueError, KeyError or TypeError for anything that a ledger, its queries and the views do not expect.
    """
    first, _ = next(iter(reader), ({}, {}))
    if not first:
        raise ValueError("it ends before its parameters: nothing was recorded in it")
    described, about = first["parameters"], first["meta"]
    sources: dict[str, str] = {}
    joined = {
        name: _Growing()
        for name in ("codes", "numbers", "contribution", "grad", "state")
    }
    exact: tuple[_Growing, _Growing] = _Growing(), _Growing()
    weighed: tuple[list[np.ndarray], _Growing] = [], _Growing()
    gathered, small = Gatherer(), None
    for meta, arrays in reader:
        # A recording's file says again what has changed since it began.
        described, about = meta.get("parameters", described), meta.get("meta", about)
        sources |= _sources(meta.get("sources", {}))
        if reader.format == 1:
            _from_first_format(meta, arrays)
        if "tables" not in meta:
            continue
        if reader.format < 3:
            _from_before_frames(meta["tables"], arrays)
        codes, numbers = _codes(meta["tables"], arrays), _numbers(arrays)
        gathered.renumber(codes, meta["tables"])
        joined["codes"].add(codes, (len(CODES),), "<i4")
        joined["numbers"].add(numbers, (len(NUMBERS),), "<f8")
        for name, kind in (("contribution", "<f4"), ("grad", "<f4"), ("state", "|u1")):
            _same_length(name, arrays[name], codes)
            joined[name].add(arrays[name], (len(described),), kind)
        if small is None:
            small = meta["exact"]
        elif small != meta["exact"]:
            raise ValueError("its chunks hold the elements of different parameters")
        for name, column in zip(
            ("exact contribution", "exact grad"), exact, strict=True
        ):
            if small:
                _same_length(name, arrays[name], codes)
                column.add(arrays[name], arrays[name].shape[1:], "<f8")
        if small and "weighed" in arrays:
            weighed[0].append(
                _weighed_rows(arrays["weighed"], len(codes))
                + joined["codes"].rows
                - len(codes)
            )
            _same_length("weights", arrays["weights"], arrays["weighed"])
            weighed[1].add(arrays["weights"], arrays["weights"].shape[1:], "<f8")
        arrays.clear()
    parameters = _parameters(described)
    about = _meta(about | _meta(reader.end))
    count, wide = joined["codes"].rows, len(parameters)
    events = Events(
        joined["codes"].array((len(CODES),), np.int32),
        joined["numbers"].array((len(NUMBERS),), np.float64),
        {name: list(places) for name, places in gathered.places.items()},
    )
    return Arrays(
        parameters,
        events,
        joined["contribution"].array((wide,), np.float32),
        joined["grad"].array((wide,), np.float32),
        joined["state"].array((wide,), np.uint8),
        _exact(parameters, small or [], exact, count),
        weighed=_weighed(parameters, small or [], *weighed),
        sources=sources,
        meta=about,
        complete=reader.complete,
    )


class _Growing:
    """Rows of an array that arrive in parts; never two copies of all of them, and a single part is not copied."""

    def __init__(self) -> None:
        self.rows = 0
        self._first: np.ndarray | None = None
        self._bytes = bytearray()

    def add(self, part: np.ndarray, shape: tuple[int, ...], kind: str) -> None:
        if part.shape[1:] != shape or part.dtype != np.dtype(kind):
            raise ValueError(
                f"an array of {part.dtype} {part.shape}, expected {kind} and rows of {shape}"
            )
        part = np.ascontiguousarray(part)
        if not self.rows:
            self._first = part
        else:
            if self._first is not None:
                self._bytes += self._first.reshape(-1).view(np.uint8).data
                self._first = None
            self._bytes += part.reshape(-1).view(np.uint8).data
        self.rows += len(part)

    def array(self, shape: tuple[int, ...], kind: type) -> np.ndarray:
        if self._first is not None:
            return self._first.astype(kind, copy=False)
        return np.frombuffer(self._bytes, kind).reshape(self.rows, *shape)


def _same_length(name: str, array: np.ndarray, codes: np.ndarray) -> None:
    if array.ndim != 2 or len(array) != len(codes):
        raise ValueError(f"{name} has shape {array.shape} for {len(codes)} events")


def _codes(tables: dict[str, Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The columns of codes, events × `CODES`: each is a place in its table, whose texts are what they should be."""
    found = arrays["codes"]
    if found.dtype != np.dtype("<i4") or found.ndim != 2 or len(found) != len(CODES):
        raise ValueError(f"codes are an array of {found.dtype} {found.shape}")
    codes = np.array(found.T, np.int32, order="C")
    for at, name in enumerate(CODES):
        column, low, high = codes[:, at], 0, _MOST
        if name in TABLES:
            tables[name] = [a_text(text) for text in a_list(tables[name], name)]
            high = len(tables[name]) - 1
        elif name == "rank":
            low = -1
        if column.size and not low <= int(column.min()) <= int(column.max()) <= high:
            raise ValueError(
                f"a {name} is out of range: from {column.min()} to {column.max()}"
            )
    unknown = set(tables["kind"]) - set(KINDS)
    if unknown:
        raise ValueError(
            f"an event of the kind {min(unknown)!r}; expected one of {', '.join(KINDS)}"
        )
    tables["details"] = [_details(text) for text in tables["details"]]
    tables["frames"] = [_frames(text) for text in tables["frames"]]
    return codes


def _numbers(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The columns of numbers, events × `NUMBERS`; what is not there is not known."""
    found = arrays["numbers"]
    if (
        found.dtype != np.dtype("<f8")
        or found.ndim != 2
        or found.shape
        not in {
            (many, arrays["codes"].shape[1]) for many in (_ON_DEVICES, len(NUMBERS))
        }
    ):
        raise ValueError(f"numbers are an array of {found.dtype} {found.shape}")
    numbers = np.full((found.shape[1], len(NUMBERS)), np.nan)
    numbers[:, : len(found)] = found.T
    if not np.isfinite(numbers[:, NUMBERS.index("time")]).all():
        raise ValueError("an event happened at no time")
    for name in ("saved_before", "saved_after", "allocated", "peak"):
        column = numbers[:, NUMBERS.index(name)]
        with np.errstate(invalid="ignore"):
            if not (np.isnan(column) | ((column >= 0) & (column < 2**62))).all():
                raise ValueError(f"{name} is no number of bytes")
    return numbers


def _from_before_frames(tables: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Add to a chunk of before format 3 the columns that it lacks, in place."""
    found = arrays["codes"]
    if (
        found.ndim == 2
        and len(found) == _LINES
        and not {"frames", "via"} & tables.keys()
    ):
        arrays["codes"] = np.concatenate(
            [found, np.zeros((len(CODES) - _LINES, found.shape[1]), found.dtype)]
        )
        tables["frames"], tables["via"] = (["[]"], [""]) if found.shape[1] else ([], [])


def _from_first_format(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Turn a chunk of format 1, with one JSON object for each event, into one of today, in place."""
    if "events" not in meta:
        return
    rows = a_list(meta["events"], "events")
    for row in rows:
        if (
            not isinstance(row, dict)
            or "kind" not in row
            or row.keys() - set(CODES[:_LINES])
        ):
            raise ValueError(f"an event is {str(row)[:100]}")
        if not all(
            isinstance(row.get(name, ""), str)
            for name in TABLES
            if name in CODES[: _LINES - 1]
        ):
            raise ValueError("a text of an event is none")
        if not whole(row.get("line", 0)) or not (
            row.get("rank") is None or whole(row["rank"])
        ):
            raise ValueError("a line or a rank of an event is no whole number")
    defaults: dict[str, Any] = {"line": 0, "rank": None, "details": {}}
    given = {
        name: [row.get(name, defaults.get(name, "")) for row in rows]
        for name in CODES[:_LINES]
    }
    given["details"] = [
        json.dumps(plain(details, "details", dict)) for details in given["details"]
    ]
    events = Events.of_columns(len(rows), **given)
    meta["tables"] = {
        name: list(events.tables[name]) for name in TABLES if name not in CODES[_LINES:]
    }
    arrays["codes"] = events.codes.T[:_LINES]
    known = (
        NUMBERS if "allocated" in arrays or "peak" in arrays else NUMBERS[:_ON_DEVICES]
    )
    unknown = np.full(len(rows), np.nan)
    columns = [
        arrays.pop(name, unknown) if name in ("allocated", "peak") else arrays.pop(name)
        for name in known
    ]
    arrays["numbers"] = np.array(columns, "<f8")
    small = sorted(int(name[5:]) for name in arrays if name.startswith("grad/"))
    meta["exact"] = small
    for which in ("contribution", "grad"):
        if small:
            arrays[f"exact {which}"] = np.concatenate(
                [arrays.pop(f"{which}/{p}") for p in small], axis=1
            )


def _exact(
    parameters: tuple[Parameter, ...],
    small: list[Any],
    columns: tuple[_Growing, _Growing],
    count: int,
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """The elements of each parameter, cut out of those of all."""
    if not all(whole(p) and p < len(parameters) for p in a_list(small, "exact")) or len(
        set(small)
    ) < len(small):
        raise ValueError(f"exact is {str(small)[:100]}, expected indices of parameters")
    if not small:
        return {}
    wide = sum(parameters[p].numel for p in small)
    added, grad = (column.array((wide,), np.float64) for column in columns)
    if added.shape != grad.shape or added.shape != (count, wide):
        raise ValueError(
            f"elements of shape {added.shape} and {grad.shape}, expected {(count, wide)}"
        )
    found, start = {}, 0
    for p in small:
        end = start + parameters[p].numel
        found[p] = added[:, start:end], grad[:, start:end]
        start = end
    return found


def _weighed_rows(rows: np.ndarray, count: int) -> np.ndarray:
    if rows.dtype != np.dtype("<i4") or rows.ndim != 1 or not len(rows):
        raise ValueError(
            f"weights are after events that are an array of {rows.dtype} {rows.shape}"
        )
    if rows[0] < 0 or rows[-1] >= count or (np.diff(rows) <= 0).any():
        raise ValueError("weights are not in the order of their events")
    return rows.astype(np.int64)


def _weighed(
    parameters: tuple[Parameter, ...],
    small: list[Any],
    events: list[np.ndarray],
    column: _Growing,
) -> Weighed | None:
    """The weights of each small parameter, cut out of those of all."""
    if not events:
        return None
    wide = sum(parameters[p].numel for p in small)
    every = column.array((wide,), np.float64)
    if every.shape[1:] != (wide,):
        raise ValueError(f"weights of shape {every.shape}, expected {wide} an event")
    found, start = {}, 0
    for p in small:
        end = start + parameters[p].numel
        found[p] = every[:, start:end]
        start = end
    return Weighed(np.concatenate(events), found)


def _parameters(rows: Any) -> tuple[Parameter, ...]:
    found = []
    for row in a_list(rows, "parameters"):
        shape, optimizers, aliases = (
            a_list(row[name], name) for name in ("shape", "optimizers", "aliases")
        )
        if (
            not all(whole(n, 1 << 48) for n in shape)
            or len(shape) > 64
            or math.prod(shape) > 1 << 48
        ):
            raise ValueError(f"a parameter's shape is {str(shape)[:100]}")
        if not all(whole(n) for n in optimizers):
            raise ValueError(
                f"a parameter's optimizers are {str(optimizers)[:100]}, expected whole numbers"
            )
        rank = row.get("rank")
        if not isinstance(row["requires_grad"], bool) or not (
            rank is None or whole(rank)
        ):
            raise ValueError(f"a parameter is {str(row)[:100]}")
        tuples = {
            "shape": tuple(shape),
            "optimizers": tuple(optimizers),
            "aliases": tuple(map(a_text, aliases)),
        }
        texts = {
            k: a_text(row.get(k, ""))
            for k in ("name", "dtype", "device", "group", "unsharded_of")
        }
        found.append(Parameter(**{**row, **texts, **tuples}))
    names = (
        {p.name for p in found} | {alias for p in found for alias in p.aliases} | {""}
    )
    lost = {p.unsharded_of for p in found} - names
    if lost:
        raise ValueError(f"no parameter {min(lost)!r}, of which another is a part")
    return tuple(found)


def _sources(given: Any) -> dict[str, str]:
    return {
        a_text(file): a_text(text) for file, text in an_object(given, "sources").items()
    }


def _meta(given: Any) -> dict[str, Any]:
    """What a recording says about itself: plain, and of the type that is known for some of it."""
    meta: dict[str, Any] = plain(given, "meta", dict)
    for name in ("notes", "optimizers"):
        for text in a_list(meta.get(name, []), name):
            a_text(text)
    for settings in a_list(meta.get("optimizer_settings", []), "optimizer_settings"):
        an_object(settings, "an optimizer's settings")
    for name in ("rank", "ranks"):
        if name in meta and not whole(meta[name]):
            raise ValueError(f"{name} is {meta[name]!r}, expected a whole number")
    return meta


def _details(text: str) -> str:
    """The JSON of an event's details, if it is of what a recording writes."""
    if text == "{}":
        return text
    details = parsed(text, "details", dict)
    for name in ("optimizer_index", "ranks", "bytes"):
        known = details.get(name, 1)
        if (
            not whole(known, 1 << 62)
            or (name != "bytes" and known > _MOST)
            or (name == "ranks" and not known)
        ):
            raise ValueError(f"{name} is {str(known)[:100]}, expected a whole number")
    for name in ("lr", "parameters", "unmeasured", "terms"):
        a_list(details.get(name, []), name)
    for term in details.get("terms", ()):
        _check_term(an_object(term, "a term"))
    return (
        text
        if text.isascii() and "\\u" not in text
        else json.dumps(details, separators=(",", ":"))
    )


def _check_term(term: dict[str, Any]) -> None:
    for name in ("op", "reduction", "unknown"):
        a_text(term.get(name, ""))
    for name in ("elements", "factor"):
        known = term.get(name)
        if known is not None and (
            isinstance(known, bool) or not isinstance(known, int | float)
        ):
            raise ValueError(
                f"{name} of a term is {str(known)[:100]}, expected a number"
            )


def _frames(text: str) -> str:
    """The JSON of the lines that led to an event, if it is of what a recording writes."""
    if text == "[]":
        return text
    frames = parsed(text, "frames")
    for frame in frames:
        file, line, source = a_list(frame, "a frame")
        a_text(file), a_text(source)
        if not whole(line):
            raise ValueError(f"a line is {str(line)[:100]}, expected a whole number")
    return (
        text
        if text.isascii() and "\\u" not in text
        else json.dumps(frames, separators=(",", ":"))
    )
