"""A ledger as chunks of a file: parameters as JSON, events and numbers as columns; written, and read with distrust."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from numpy import ndarray

from accumviz.ledger.container import Chunk, Reader, an_object, sane
from accumviz.ledger.events import (
    ARRAYS,
    CODES,
    KINDS,
    NUMBERS,
    TABLES,
    Arrays,
    Block,
    Events,
    Parameter,
    join,
)

# Bytes of arrays in one chunk of a saved ledger: reading it holds two of them.
_CHUNK_BYTES = 4 << 20
_MOST = 1 << 48
_LARGEST_CODE = np.iinfo(np.int32).max
_BYTES = ("saved_before", "saved_after")
# The arrays of a chunk, and what their numbers are. Those of events stand by column: equal numbers are neighbours,
# and compress.
_ARRAYS = {"codes": "<i4", "numbers": "<f8", **ARRAYS}

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
    "rank": (int, type(None)),
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
    events = block.events
    arrays = {"codes": events.codes.T, "numbers": events.numbers.T}
    for name, kind in ARRAYS.items():
        arrays[name] = getattr(block, name).astype(kind, copy=False)
    return {"tables": events.tables}, arrays


def chunks(ledger: Arrays) -> Iterator[Chunk]:
    """Yield a ledger as chunks of a few megabytes; the first has what is said of all of it."""
    kept, added, left, weighed, weights = ledger.elements
    about = described(ledger.parameters, kept, ledger.meta)
    about["sources"] = ledger.sources
    yield about, {}
    bytes_of_event = 72 + 9 * len(ledger.parameters) + 16 * added.shape[1]
    step = max(1, _CHUNK_BYTES // bytes_of_event)
    for start in range(0, len(ledger.events), step):
        rows = slice(start, start + step)
        bounds = [rows.start, rows.stop]
        first, last = np.searchsorted(weighed, bounds).tolist()
        block = Block(
            ledger.events.take(rows),
            ledger.contribution[rows],
            ledger.grad[rows],
            ledger.state[rows],
            added[rows],
            left[rows],
            weighed[first:last] - start,
            weights[first:last],
        )
        yield packed(block)


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
    elements = sum(parameters[p].numel for p in kept)
    block = join(parts or [Block.empty(len(parameters), elements)])
    if block.weighed.size == 0:
        block.weights = np.zeros((0, elements))
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
        parameter = Parameter(**row)
        _check(parameter.numel, _WHOLE, "the size of a parameter")
        parameters.append(parameter)
    return tuple(parameters)


def _block_of(tables: dict[str, Any], arrays: dict[str, ndarray]) -> Block:
    """Return a block whose columns fit together; whether they fit to the parameters is seen when it is joined."""
    for name in ("codes", "numbers"):
        arrays[name] = np.ascontiguousarray(arrays[name].T)
    codes = arrays["codes"]
    weighed = arrays["weighed"]
    for name, kind in _ARRAYS.items():
        array = arrays[name]
        dimensions = 1 if name == "weighed" else 2
        rows = weighed if name in ("weighed", "weights") else codes
        fits = array.ndim == dimensions and array.dtype == np.dtype(kind)
        if not fits or len(array) != len(rows):
            raise ValueError(f"{name} is an array of {array.dtype} {array.shape}")
    apart = np.diff(weighed, prepend=-1, append=len(codes))
    if (apart <= 0).any():
        raise ValueError("weights are not in the order of their events")
    for column, name in zip(arrays["numbers"].T, NUMBERS, strict=True):
        _check_numbers(column, name)
    texts = _tables(tables)
    for column, name in zip(codes.T, CODES, strict=True):
        least = -1 if name == "rank" else 0
        most = len(texts[name]) - 1 if name in texts else _LARGEST_CODE
        _check_range((column >= least) & (column <= most), name)
    events = Events(arrays.pop("codes"), arrays.pop("numbers"), texts)
    return Block(events, **{name: arrays[name] for name in ARRAYS})


def _check_numbers(column: ndarray, name: str) -> None:
    if name == "time":
        _check_range(np.isfinite(column), name)
    elif name in _BYTES:
        is_size = (column >= 0) & (column <= _MOST)
        _check_range(is_size | np.isnan(column), name)


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


def _check_range(fits: ndarray, name: str) -> None:
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
    for file, line, source in frames:
        _check([file, source], [_TEXT], "a frame")
        _check(line, _WHOLE, "a line")
    return json.dumps(frames, separators=(",", ":"))
