"""A ledger as chunks of a file: parameters as JSON, events and numbers as columns; written, and read with distrust."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from accumviz.ledger.container import Chunk, Reader, an_object, sane
from accumviz.ledger.events import (
    ARRAYS,
    CODES,
    KINDS,
    NUMBERS,
    TABLES,
    Arrays,
    Block,
    Parameter,
    join,
)

# Bytes of arrays in one chunk of a saved ledger: reading it holds two of them.
_CHUNK_BYTES = 4 << 20
_MOST = 1 << 48
_BYTES = ("saved_before", "saved_after", "allocated", "peak")
# By column, equal numbers stand side by side, and compress.
_BY_COLUMN = ("codes", "numbers")

# What a file may say, as `_check` reads it: an object's entries, a list of like things, a range of whole numbers, or
# types.
_TEXT = (str,)
_NUMBER = (int, float, type(None))
_WHOLE = range(_MOST + 1)
_TERM = {
    "op": _TEXT,
    "reduction": _TEXT,
    "unknown": _TEXT,
    "elements": _NUMBER,
    "factor": _NUMBER,
}
_DETAILS = {
    "optimizer_index": _WHOLE,
    "ranks": range(1, _MOST),
    "bytes": _WHOLE,
    "lr": [_NUMBER],
    "parameters": [_TEXT],
    "unmeasured": [_TEXT],
    "terms": [_TERM],
}
_PARAMETER = {
    "name": _TEXT,
    "shape": [_WHOLE],
    "dtype": _TEXT,
    "device": _TEXT,
    "group": _TEXT,
    "aliases": [_TEXT],
    "optimizers": [_WHOLE],
    "requires_grad": (bool,),
    "unsharded_of": _TEXT,
}
_META = {
    "notes": [_TEXT],
    "optimizers": [_TEXT],
    "rank": _WHOLE,
    "ranks": _WHOLE,
}


# --- writing ---------------------------------------------------------------------------------


def described(
    parameters: Iterable[Parameter], kept: Iterable[int], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a file says of its parameters and of the recording; said again, it replaces what was said before.

    Elements are kept of the parameters with the numbers `kept`.
    """
    return {
        "parameters": [asdict(parameter) for parameter in parameters],
        "kept": list(kept),
        "meta": dict(meta),
    }


def packed(block: Block) -> Chunk:
    """Return a block as a chunk."""
    tables = {name: list(block.tables[name]) for name in TABLES}
    arrays = {}
    for name, kind in ARRAYS.items():
        array = getattr(block, name)
        if name in _BY_COLUMN:
            array = array.T
        arrays[name] = array.astype(kind, copy=False)
    return {"tables": tables}, arrays


def chunks(ledger: Arrays) -> Iterator[Chunk]:
    """Yield a ledger as chunks of a few megabytes; the first has what is said of all of it."""
    kept = sorted(ledger.exact)
    about = described(ledger.parameters, kept, ledger.meta)
    about["sources"] = ledger.sources
    yield about, {}
    elements = sum(ledger.parameters[p].numel for p in kept)
    bytes_of_event = 96 + 9 * len(ledger.parameters) + 16 * elements
    step = max(1, _CHUNK_BYTES // bytes_of_event)
    for start in range(0, len(ledger.events), step):
        block = _block(ledger, kept, slice(start, start + step))
        yield packed(block)


def _block(ledger: Arrays, kept: Sequence[int], rows: slice) -> Block:
    """Return some events as a block."""
    events = ledger.columns.take(rows)
    weighed = ledger.weighed
    bounds = [rows.start, rows.stop]
    first, last = np.searchsorted(weighed.events, bounds).tolist()
    nothing = np.zeros((len(events), 0))
    added, left = [nothing], [nothing]
    weights = [np.zeros((last - first, 0))]
    for p in kept:
        of_added, of_left = ledger.exact[p]
        added.append(of_added[rows])
        left.append(of_left[rows])
        after = np.zeros((0, of_added.shape[1]))
        if last > first:
            after = weighed.elements[p][first:last]
        weights.append(after)
    return Block(
        events.tables,
        events.codes,
        events.numbers,
        ledger.contribution[rows],
        ledger.grad[rows],
        ledger.state[rows],
        np.concatenate(added, axis=1),
        np.concatenate(left, axis=1),
        weighed.events[first:last] - rows.start,
        np.concatenate(weights, axis=1),
    )


# --- reading ---------------------------------------------------------------------------------


def blocks(reader: Reader, about: dict[str, Any]) -> Iterator[Block]:
    """Yield what a file holds of events, and put into `about` what it says of all of them.

    Raises ValueError, KeyError or TypeError for anything that a ledger, its queries and the views do not expect.
    """
    sources = about.setdefault("sources", {})
    for header, arrays in reader:
        more = an_object(header.pop("sources", {}), "sources")
        _check(list(more.values()), [_TEXT], "sources")
        sources |= more
        tables = header.pop("tables", None)
        about |= header
        if tables is not None:
            yield _block_of(tables, arrays)


Kind = TypeVar("Kind", bound=Arrays)


def decode(reader: Reader, kind: type[Kind]) -> Kind:
    """Return the ledger in a file. Raises as `blocks` does."""
    about: dict[str, Any] = {}
    parts = list(blocks(reader, about))
    if "parameters" not in about:
        raise ValueError("it ends before its parameters: nothing was recorded in it")
    parameters = _parameters(about["parameters"])
    kept = about["kept"]
    _check(kept, [range(len(parameters))], "kept")
    if len(set(kept)) < len(kept):
        raise ValueError("elements of one parameter are kept twice")
    elements = sum(parameters[p].numel for p in kept)
    block = join(parts or [Block.empty(len(parameters), elements)])
    for array in (block.added, block.left, block.weights):
        if array.shape[1] != elements:
            raise ValueError(f"{array.shape[1]} elements, expected {elements}")
    meta = an_object(about["meta"], "meta") | reader.end
    _check(meta, _META, "meta")
    return kind.of_block(
        parameters,
        kept,
        block,
        sources=about["sources"],
        meta=meta,
        complete=reader.complete,
    )


def _parameters(rows: Any) -> tuple[Parameter, ...]:
    _check(rows, [_PARAMETER], "parameters")
    parameters = []
    for row in rows:
        for name in ("shape", "aliases", "optimizers"):
            row[name] = tuple(row[name])
        parameters.append(Parameter(**row))
    names = {"", *(parameter.name for parameter in parameters)}
    for parameter in parameters:
        if parameter.rank is not None:
            _check(parameter.rank, _WHOLE, "rank")
        _check(parameter.numel, _WHOLE, "the size of a parameter")
        if parameter.unsharded_of not in names:
            raise ValueError(f"{parameter.unsharded_of!r} is no parameter")
    return tuple(parameters)


def _block_of(tables: dict[str, Any], arrays: dict[str, np.ndarray]) -> Block:
    """Return a block whose columns fit together; whether they fit to the parameters is seen when it is joined."""
    for name in _BY_COLUMN:
        arrays[name] = np.ascontiguousarray(arrays[name].T)
    length = len(arrays["codes"])
    weighed = arrays["weighed"]
    for name, kind in ARRAYS.items():
        array = arrays[name]
        dimensions = 1 if name == "weighed" else 2
        rows = len(weighed) if name in ("weighed", "weights") else length
        fits = array.ndim == dimensions and array.dtype == np.dtype(kind)
        if not fits or len(array) != rows:
            raise ValueError(f"{name} is an array of {array.dtype} {array.shape}")
    if (np.diff(weighed, prepend=-1, append=length) <= 0).any():
        raise ValueError("weights are not in the order of their events")
    numbers = dict(zip(NUMBERS, arrays["numbers"].T, strict=True))
    _check_range(np.isfinite(numbers["time"]), "time")
    for name in _BYTES:
        is_unknown = np.isnan(numbers[name])
        is_size = (numbers[name] >= 0) & (numbers[name] <= _MOST)
        _check_range(is_unknown | is_size, name)
    texts = _tables(tables)
    for column, name in zip(arrays["codes"].T, CODES, strict=True):
        least = -1 if name == "rank" else 0
        most = len(texts[name]) - 1 if name in texts else np.iinfo(np.int32).max
        _check_range((column >= least) & (column <= most), name)
    return Block(texts, **{name: arrays[name] for name in ARRAYS})


def _tables(given: dict[str, Any]) -> dict[str, list[str]]:
    """Return the tables of texts; of JSON texts, what a recording writes."""
    tables = {}
    for name in TABLES:
        _check(given[name], [_TEXT], name)
        tables[name] = given[name]
    unknown = set(tables["kind"]) - set(KINDS)
    if unknown:
        raise ValueError(f"an event of the kind {min(unknown)!r}")
    tables["details"] = [_details(text) for text in tables["details"]]
    tables["frames"] = [_frames(text) for text in tables["frames"]]
    return tables


# --- checks of what a file says ----------------------------------------------------------------


def _check(value: Any, expected: Any, name: str) -> None:
    """Raise `ValueError` for a value from a file that is not as expected; entries of objects may be missing."""
    fits = False
    if isinstance(expected, dict):
        for key, each in expected.items():
            if key in an_object(value, name):
                _check(value[key], each, key)
        fits = isinstance(value, dict)
    elif isinstance(expected, list):
        fits = isinstance(value, list)
        for one in value if fits else ():
            _check(one, expected[0], name)
    elif isinstance(expected, range):
        fits = type(value) is int and value in expected
    else:
        fits = type(value) in expected
    if not fits:
        raise ValueError(f"{name} is {str(value)[:100]}")


def _check_range(fits: np.ndarray, name: str) -> None:
    if not fits.all():
        raise ValueError(f"a {name} is out of range")


def _details(text: str) -> str:
    """Return the JSON of an event's details."""
    details = an_object(sane(json.loads(text)), "details")
    _check(details, _DETAILS, "details")
    return json.dumps(details, separators=(",", ":"))


def _frames(text: str) -> str:
    """Return the JSON of the lines that led to an event."""
    frames = sane(json.loads(text))
    _check(frames, [[(str, int)]], "frames")
    for file, line, source in frames:
        _check([file, source], [_TEXT], "a frame")
        _check(line, _WHOLE, "a line")
    return json.dumps(frames, separators=(",", ":"))
