"""A ledger as chunks of a file: parameters as JSON, events and numbers as columns; written, and read with distrust."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from accumviz.ledger.container import (
    Chunk,
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

# Bytes of arrays in one chunk of a saved ledger: reading it holds two of them.
_CHUNK_BYTES = 4 << 20
_MOST = 2**31 - 1
_BYTES = ("saved_before", "saved_after", "allocated", "peak")
# The arrays of a chunk with a row for each event: their dtype, and whether their columns are the parameters.
_COLUMNS = {
    "codes": "<i4",
    "numbers": "<f8",
    "contribution": "<f4",
    "grad": "<f4",
    "state": "|u1",
}
_EXACT = ("exact contribution", "exact grad")


# --- writing ---------------------------------------------------------------------------------


def described(
    parameters: Iterable[Parameter], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a file says of parameters and of the recording; said again, it replaces what was said before."""
    rows = []
    for parameter in parameters:
        fields = asdict(parameter).items()
        rows.append({k: list(v) if isinstance(v, tuple) else v for k, v in fields})
    return {"parameters": rows, "meta": dict(meta)}


def chunks(ledger: Arrays) -> Iterator[Chunk]:
    """Yield a ledger's events and arrays in chunks of a few megabytes; the first has the texts of the files."""
    wide = 9 * len(ledger.parameters) + 96
    wide += 16 * sum(elements.shape[1] for elements, _ in ledger.exact.values())
    step = max(1, _CHUNK_BYTES // wide)
    for start in range(0, max(len(ledger.events), 1), step):
        where = slice(start, start + step)
        exact = {
            p: (added[where], grad[where]) for p, (added, grad) in ledger.exact.items()
        }
        header, arrays = pack(
            ledger.columns.take(where),
            ledger.contribution[where],
            ledger.grad[where],
            ledger.state[where],
            exact,
            _weighed_between(ledger.weighed, start, start + step),
        )
        if not start:
            header["sources"] = ledger.sources
        yield header, arrays


def pack(
    events: Events,
    contribution: np.ndarray,
    grad: np.ndarray,
    state: np.ndarray,
    exact: Mapping[int, tuple[np.ndarray, np.ndarray]] = {},
    weighed: Weighed | None = None,
) -> Chunk:
    """Return one chunk: these events and their rows of the ledger's arrays.

    All chunks of a file have the same parameters in `exact`, and `weighed` has all of them. A chunk
    may also hold `sources`, which are added, and `parameters` or `meta`, which replace what was said
    before.
    """
    tables = {name: list(events.tables[name]) for name in TABLES}
    details = tables["details"]
    tables["details"] = [
        d if isinstance(d, str) else json.dumps(dict(d), separators=(",", ":"))
        for d in details
    ]
    rows = {
        "codes": events.codes,
        "numbers": events.numbers,
        "contribution": contribution,
        "grad": grad,
        "state": state,
    }
    arrays = {
        name: rows[name].astype(kind, copy=False) for name, kind in _COLUMNS.items()
    }
    # By column, equal numbers stand side by side, and compress.
    arrays["codes"], arrays["numbers"] = arrays["codes"].T, arrays["numbers"].T
    parameters = sorted(exact)
    if parameters:
        for which, name in enumerate(_EXACT):
            arrays[name] = _side_by_side([exact[p][which] for p in parameters])
    if weighed is not None and weighed.events.size:
        arrays["weighed"] = weighed.events.astype("<i4", copy=False)
        arrays["weights"] = _side_by_side(
            [weighed.elements[p] for p in sorted(weighed.elements)]
        )
    return {"tables": tables, "exact": parameters}, arrays


def _side_by_side(columns: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns, axis=1).astype("<f8", copy=False)


def _weighed_between(weighed: Weighed, start: int, stop: int) -> Weighed:
    """Return the weights after events from `start` to `stop`, counted from `start`."""
    first, last = np.searchsorted(weighed.events, [start, stop]).tolist()
    elements = {p: rows[first:last] for p, rows in weighed.elements.items()}
    return Weighed(weighed.events[first:last] - start, elements)


# --- reading ---------------------------------------------------------------------------------


class Parts:
    """Chunks from several places as those of one file."""

    def __init__(self, *parts: Iterable[Chunk]) -> None:
        self.complete, self.end = True, dict[str, Any]()
        self._chunks = (
            (dict(head), dict(arrays)) for part in parts for head, arrays in part
        )

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks


def decode(reader: Reader | Parts) -> Arrays:
    """Put the chunks of a file together.

    Raises ValueError, KeyError or TypeError for anything that a ledger, its queries and the views do not expect.
    """
    first, _ = next(iter(reader), ({}, {}))
    if not first:
        raise ValueError("it ends before its parameters: nothing was recorded in it")
    said = {"parameters": first["parameters"], "meta": first["meta"]}
    sources: dict[str, str] = {}
    rows: dict[str, list[np.ndarray]] = {
        name: [] for name in (*_COLUMNS, *_EXACT, "weighed", "weights")
    }
    gathered, exact, count = Gatherer(), None, 0
    for header, arrays in reader:
        said |= {name: header[name] for name in said if name in header}
        sources |= _sources(header.get("sources", {}))
        if "tables" not in header:
            continue
        arrays["codes"], arrays["numbers"] = (
            _codes(header["tables"], arrays),
            _numbers(arrays),
        )
        length = len(arrays["codes"])
        gathered.renumber(arrays["codes"], header["tables"])
        if exact is None:
            exact = header["exact"]
        if exact != header["exact"]:
            raise ValueError("its chunks hold the elements of different parameters")
        if "weighed" in arrays:
            arrays["weighed"] = _weighed_events(arrays["weighed"], length) + count
            _check_length("weights", arrays["weights"], len(arrays["weighed"]))
        for name in (*_COLUMNS, *(_EXACT if exact else ())):
            _check_length(name, arrays[name], length)
        for name in rows.keys() & arrays.keys():
            rows[name].append(arrays[name])
        count += length
    parameters = _parameters(said["parameters"])
    joined = {
        name: _join(name, rows.pop(name), len(parameters), count) for name in _COLUMNS
    }
    tables = {name: list(places) for name, places in gathered.places.items()}
    elements = _Elements(parameters, exact or [])
    return Arrays(
        parameters,
        Events(joined["codes"], joined["numbers"], tables),
        joined["contribution"],
        joined["grad"],
        joined["state"],
        elements.exact(rows[_EXACT[0]], rows[_EXACT[1]], count),
        weighed=elements.weighed(rows["weighed"], rows["weights"]),
        sources=sources,
        meta=_meta(_meta(said["meta"]) | reader.end),
        complete=reader.complete,
    )


def _check_length(name: str, array: np.ndarray, length: int) -> None:
    if array.ndim != 2 or len(array) != length:
        raise ValueError(f"{name} has shape {array.shape} for {length} events")


def _join(
    name: str, parts: list[np.ndarray], parameters: int, count: int
) -> np.ndarray:
    wide = {"codes": len(CODES), "numbers": len(NUMBERS)}.get(name, parameters)
    kind = np.dtype(_COLUMNS[name])
    for part in parts:
        if part.shape[1] != wide or part.dtype != kind:
            raise ValueError(
                f"{name} is an array of {part.dtype} {part.shape}, expected {kind} and {wide} columns"
            )
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    return np.concatenate([np.zeros((0, wide), kind), *parts])


def _codes(tables: dict[str, Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the columns of codes, events × `CODES`, each a place in its table; checks the tables in place."""
    stored = arrays["codes"]
    if stored.dtype != np.dtype("<i4") or stored.ndim != 2 or len(stored) != len(CODES):
        raise ValueError(f"codes are an array of {stored.dtype} {stored.shape}")
    codes = np.array(stored.T, np.int32, order="C")
    for column, name in zip(codes.T, CODES, strict=True):
        low, high = -1 if name == "rank" else 0, _MOST
        if name in TABLES:
            tables[name] = [a_text(text) for text in a_list(tables[name], name)]
            high = len(tables[name]) - 1
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
    """Return the columns of numbers, events × `NUMBERS`."""
    numbers = arrays["numbers"].T
    if numbers.ndim != 2 or numbers.shape[1] != len(NUMBERS):
        raise ValueError(f"numbers are an array of shape {numbers.shape}")
    if not np.isfinite(numbers[:, NUMBERS.index("time")]).all():
        raise ValueError("an event happened at no time")
    for name in _BYTES:
        column = numbers[:, NUMBERS.index(name)]
        with np.errstate(invalid="ignore"):
            if not (np.isnan(column) | ((column >= 0) & (column < 2**62))).all():
                raise ValueError(f"{name} is no number of bytes")
    return numbers


class _Elements:
    """The columns of all parameters whose elements were kept, cut into those of each."""

    def __init__(self, parameters: Sequence[Parameter], kept: Any) -> None:
        known = all(whole(p) and p < len(parameters) for p in a_list(kept, "exact"))
        if not known or len(set(kept)) < len(kept):
            raise ValueError(
                f"exact is {str(kept)[:100]}, expected indices of parameters"
            )
        self._sizes = {p: parameters[p].numel for p in kept}

    def exact(
        self, added: list[np.ndarray], grad: list[np.ndarray], count: int
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        if not self._sizes:
            return {}
        contributions, gradients = self._cut(added, count), self._cut(grad, count)
        return {p: (contributions[p], gradients[p]) for p in self._sizes}

    def weighed(
        self, events: list[np.ndarray], weights: list[np.ndarray]
    ) -> Weighed | None:
        if not events:
            return None
        after = np.concatenate(events)
        return Weighed(after, self._cut(weights, len(after)))

    def _cut(self, parts: list[np.ndarray], count: int) -> dict[int, np.ndarray]:
        wide = sum(self._sizes.values())
        whole_rows = np.concatenate([np.zeros((0, wide)), *parts])
        if whole_rows.dtype != np.float64 or len(whole_rows) != count:
            raise ValueError(
                f"elements of {whole_rows.dtype} {whole_rows.shape}, expected {(count, wide)}"
            )
        ends = np.cumsum([*self._sizes.values()])[:-1]
        return dict(zip(self._sizes, np.split(whole_rows, ends, axis=1), strict=True))


def _weighed_events(events: np.ndarray, count: int) -> np.ndarray:
    """Return the events after which there are weights, if they are in order."""
    if events.dtype != np.dtype("<i4") or events.ndim != 1 or not len(events):
        raise ValueError(
            f"weights are after events that are an array of {events.dtype} {events.shape}"
        )
    if events[0] < 0 or events[-1] >= count or (np.diff(events) <= 0).any():
        raise ValueError("weights are not in the order of their events")
    return events.astype(np.int64)


# --- checks of what a file says ----------------------------------------------------------------


def _parameters(rows: Any) -> tuple[Parameter, ...]:
    parameters = tuple(_parameter(row) for row in a_list(rows, "parameters"))
    names = {""}
    for parameter in parameters:
        names |= {parameter.name, *parameter.aliases}
    for parameter in parameters:
        if parameter.unsharded_of not in names:
            raise ValueError(
                f"no parameter {parameter.unsharded_of!r}, of which another is a part"
            )
    return parameters


def _parameter(row: dict[str, Any]) -> Parameter:
    shape, optimizers = (
        a_list(row["shape"], "shape"),
        a_list(row["optimizers"], "optimizers"),
    )
    sides = len(shape) <= 64 and all(whole(side, 1 << 48) for side in shape)
    if not sides or math.prod(shape) > 1 << 48:
        raise ValueError(f"a parameter's shape is {str(shape)[:100]}")
    if not all(whole(n) for n in optimizers):
        raise ValueError(
            f"a parameter's optimizers are {str(optimizers)[:100]}, expected whole numbers"
        )
    if not isinstance(row["requires_grad"], bool) or not (
        row["rank"] is None or whole(row["rank"])
    ):
        raise ValueError(f"a parameter is {str(row)[:100]}")
    texts = {
        name: a_text(row[name])
        for name in ("name", "dtype", "device", "group", "unsharded_of")
    }
    aliases = tuple(a_text(alias) for alias in a_list(row["aliases"], "aliases"))
    tuples = {
        "shape": tuple(shape),
        "optimizers": tuple(optimizers),
        "aliases": aliases,
    }
    return Parameter(**{**row, **texts, **tuples})


def _sources(given: Any) -> dict[str, str]:
    return {
        a_text(file): a_text(text) for file, text in an_object(given, "sources").items()
    }


def _meta(given: Any) -> dict[str, Any]:
    """Check what a recording says about itself."""
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


# Details that are whole numbers, each with its smallest and largest value.
_WHOLE_DETAILS = {
    "optimizer_index": (0, _MOST),
    "ranks": (1, _MOST),
    "bytes": (0, 1 << 62),
}


def _details(text: str) -> str:
    """Return the JSON of an event's details, if it is what a recording writes."""
    if text == "{}":
        return text
    details = parsed(text, "details", dict)
    for name, (low, high) in _WHOLE_DETAILS.items():
        number = details.get(name, low)
        if not whole(number, high) or number < low:
            raise ValueError(f"{name} is {str(number)[:100]}, expected a whole number")
    for name in ("lr", "parameters", "unmeasured", "terms"):
        a_list(details.get(name, []), name)
    for term in details.get("terms", ()):
        _check_term(an_object(term, "a term"))
    return _as_stored(text, details)


def _check_term(term: dict[str, Any]) -> None:
    for name in ("op", "reduction", "unknown"):
        a_text(term.get(name, ""))
    for name in ("elements", "factor"):
        number = term.get(name)
        if type(number) not in (int, float, type(None)):
            raise ValueError(
                f"{name} of a term is {str(number)[:100]}, expected a number"
            )


def _frames(text: str) -> str:
    """Return the JSON of the lines that led to an event, if it is what a recording writes."""
    if text == "[]":
        return text
    frames = parsed(text, "frames")
    for frame in frames:
        file, line, source = a_list(frame, "a frame")
        a_text(file), a_text(source)
        if not whole(line):
            raise ValueError(f"a line is {str(line)[:100]}, expected a whole number")
    return _as_stored(text, frames)


def _as_stored(text: str, value: Any) -> str:
    """Return the text, written anew where it may hold half characters."""
    simple = text.isascii() and "\\u" not in text
    return text if simple else json.dumps(value, separators=(",", ":"))
