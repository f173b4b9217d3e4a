"""A ledger as chunks of a file: parameters as JSON, events and numbers as columns; written, and read with distrust."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from accumviz.ledger.container import DEEPEST_JSON, Chunk, Reader, an_object, sane
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
_MOST = 2**31 - 1
_MOST_BYTES = 1 << 62
_LARGEST = 1 << 48
_BYTES = ("saved_before", "saved_after", "allocated", "peak")
# By column, equal numbers stand side by side, and compress.
_BY_COLUMN = ("codes", "numbers")


# --- writing ---------------------------------------------------------------------------------


def described(
    parameters: Iterable[Parameter], kept: Iterable[int], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a file says of its parameters and of the recording; said again, it replaces what was said before.

    Elements are kept of the parameters with the numbers `kept`.
    """
    rows = [asdict(parameter) for parameter in parameters]
    return {"parameters": rows, "kept": list(kept), "meta": dict(meta)}


def packed(block: Block) -> Chunk:
    """Return a block as a chunk."""
    tables = {name: list(block.tables[name]) for name in TABLES}
    arrays = {}
    for name, kind in ARRAYS.items():
        array = getattr(block, name).astype(kind, copy=False)
        arrays[name] = array.T if name in _BY_COLUMN else array
    return {"tables": tables}, arrays


def chunks(ledger: Arrays) -> Iterator[Chunk]:
    """Yield a ledger as chunks of a few megabytes; the first has what is said of all of it."""
    kept = sorted(ledger.exact)
    about = described(ledger.parameters, kept, ledger.meta)
    yield about | {"sources": ledger.sources}, {}
    wide = 9 * len(ledger.parameters) + 96
    wide += 16 * sum(ledger.parameters[p].numel for p in kept)
    step = max(1, _CHUNK_BYTES // wide)
    for start in range(0, len(ledger.events), step):
        yield packed(_block(ledger, kept, start, start + step))


def _block(ledger: Arrays, kept: Sequence[int], start: int, stop: int) -> Block:
    """Return the events from `start` to `stop` as a block."""
    events, weighed = ledger.columns.take(slice(start, stop)), ledger.weighed
    none = np.zeros((len(events), 0))
    added = [ledger.exact[p][0][start:stop] for p in kept]
    left = [ledger.exact[p][1][start:stop] for p in kept]
    first, last = np.searchsorted(weighed.events, [start, stop]).tolist()
    weights = np.zeros((0, sum(one.shape[1] for one in added)))
    if last > first:
        after = [weighed.elements[p][first:last] for p in kept]
        weights = np.concatenate(after, axis=1)
    return Block(
        events.tables,
        events.codes,
        events.numbers,
        ledger.contribution[start:stop],
        ledger.grad[start:stop],
        ledger.state[start:stop],
        np.concatenate([none, *added], axis=1),
        np.concatenate([none, *left], axis=1),
        weighed.events[first:last] - start,
        weights,
    )


# --- reading ---------------------------------------------------------------------------------


def blocks(reader: Reader, about: dict[str, Any]) -> Iterator[Block]:
    """Yield what a file holds of events, and put into `about` what it says of all of them.

    Raises ValueError, KeyError or TypeError for anything that a ledger, its queries and the views do not expect.
    """
    sources = about.setdefault("sources", {})
    for header, arrays in reader:
        sources |= _texts(header.pop("sources", {}))
        tables = header.pop("tables", None)
        about |= header
        if tables is not None:
            yield _checked(tables, arrays)


Kind = TypeVar("Kind", bound=Arrays)


def decode(reader: Reader, kind: type[Kind]) -> Kind:
    """Return the ledger in a file. Raises as `blocks` does."""
    about: dict[str, Any] = {}
    parts = list(blocks(reader, about))
    if "parameters" not in about:
        raise ValueError("it ends before its parameters: nothing was recorded in it")
    parameters = tuple(_parameter(row) for row in _list(about["parameters"]))
    _check_names(parameters)
    kept = _list(about["kept"])
    numbers = all(_whole(p, len(parameters) - 1) for p in kept)
    if not numbers or len(set(kept)) < len(kept):
        raise ValueError(f"kept is {str(kept)[:100]}, expected numbers of parameters")
    elements = sum(parameters[p].numel for p in kept)
    block = join(parts or [Block.empty(len(parameters), elements)])
    for array in (block.added, block.left, block.weights):
        if array.shape[1] != elements:
            raise ValueError(f"{array.shape[1]} elements are kept, expected {elements}")
    return kind.of_block(
        parameters,
        kept,
        block,
        sources=about["sources"],
        meta=_meta(about["meta"], reader.end),
        complete=reader.complete,
    )


def _checked(tables: dict[str, Any], arrays: dict[str, np.ndarray]) -> Block:
    """Return a block whose columns fit together; whether they fit to the parameters is seen when it is joined."""
    for name in _BY_COLUMN:
        arrays[name] = np.ascontiguousarray(arrays[name].T)
    length = len(arrays["codes"])
    for name, kind in ARRAYS.items():
        array = arrays[name]
        expected = (1 if name == "weighed" else 2), np.dtype(kind)
        if (array.ndim, array.dtype) != expected:
            raise ValueError(f"{name} is an array of {array.dtype} {array.shape}")
        if len(array) != length and name not in ("weighed", "weights"):
            raise ValueError(f"{name} has {len(array)} rows for {length} events")
    _check_weighed(arrays["weighed"], arrays["weights"], length)
    _check_numbers(arrays["numbers"])
    return Block(_tables(tables, arrays["codes"]), **{n: arrays[n] for n in ARRAYS})


def _check_weighed(weighed: np.ndarray, weights: np.ndarray, length: int) -> None:
    steps = np.diff(weighed, prepend=-1, append=length)
    if len(weighed) != len(weights) or (steps <= 0).any():
        raise ValueError("weights are not in the order of their events")


def _check_numbers(numbers: np.ndarray) -> None:
    columns = dict(zip(NUMBERS, numbers.T, strict=True))
    if not np.isfinite(columns["time"]).all():
        raise ValueError("an event happened at no time")
    for name in _BYTES:
        column = columns[name]
        within = (column >= 0) & (column < _MOST_BYTES)
        if not (within | np.isnan(column)).all():
            raise ValueError(f"{name} is no number of bytes")


def _tables(given: dict[str, Any], codes: np.ndarray) -> dict[str, list[str]]:
    """Return the tables of texts, if each code is a place in one."""
    tables = {name: [_text(text) for text in _list(given[name])] for name in TABLES}
    for column, name in zip(codes.T, CODES, strict=True):
        low = -1 if name == "rank" else 0
        high = len(tables[name]) - 1 if name in tables else _MOST
        if ((column < low) | (column > high)).any():
            raise ValueError(f"a {name} is out of range")
    unknown = set(tables["kind"]) - set(KINDS)
    if unknown:
        raise ValueError(
            f"an event of the kind {min(unknown)!r}; expected one of {', '.join(KINDS)}"
        )
    tables["details"] = [_details(text) for text in tables["details"]]
    tables["frames"] = [_frames(text) for text in tables["frames"]]
    return tables


# --- checks of what a file says ----------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:100]!r} where a text was expected")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:100]!r} where a list was expected")
    return value


def _whole(value: Any, most: int = _MOST, least: int = 0) -> bool:
    return type(value) is int and least <= value <= most


def _texts(given: Any) -> dict[str, str]:
    sources = an_object(given, "sources")
    return {_text(file): _text(text) for file, text in sources.items()}


def _parameter(row: dict[str, Any]) -> Parameter:
    for name in ("name", "dtype", "device", "group", "unsharded_of"):
        _text(row[name])
    shape, rank = tuple(_list(row["shape"])), row["rank"]
    sides = len(shape) <= 64 and all(_whole(side, _LARGEST) for side in shape)
    if not sides or math.prod(shape) > _LARGEST:
        raise ValueError(f"a parameter's shape is {str(shape)[:100]}")
    optimizers = tuple(_list(row["optimizers"]))
    numbers = (*optimizers, *([] if rank is None else [rank]))
    requires_grad = isinstance(row["requires_grad"], bool)
    if not requires_grad or not all(_whole(n) for n in numbers):
        raise ValueError(f"a parameter is {str(row)[:100]}")
    aliases = tuple(_text(alias) for alias in _list(row["aliases"]))
    tuples = {"shape": shape, "optimizers": optimizers, "aliases": aliases}
    return Parameter(**{**row, **tuples})


def _check_names(parameters: Iterable[Parameter]) -> None:
    names = {""}
    for parameter in parameters:
        names |= {parameter.name, *parameter.aliases}
    for parameter in parameters:
        if parameter.unsharded_of not in names:
            raise ValueError(
                f"no parameter {parameter.unsharded_of!r}, of which another is a part"
            )


def _meta(given: Any, end: dict[str, Any]) -> dict[str, Any]:
    """Return what a recording says of itself, and what was said when it was closed."""
    meta = an_object(given, "meta") | end
    for name in ("notes", "optimizers"):
        for text in _list(meta.get(name, [])):
            _text(text)
    for settings in _list(meta.get("optimizer_settings", [])):
        an_object(settings, "an optimizer's settings")
    for name in ("rank", "ranks"):
        if not _whole(meta.get(name, 0)):
            raise ValueError(f"{name} is {meta[name]!r}, expected a whole number")
    return meta


def _details(text: str) -> str:
    """Return the JSON of an event's details, if it is what a recording writes."""
    if text == "{}":
        return text
    details, text = _parsed(text)
    get = an_object(details, "details").get
    numbers = {name: get(name, 1) for name in ("optimizer_index", "ranks", "bytes")}
    index, ranks, size = numbers.values()
    right = _whole(index) and _whole(ranks, least=1) and _whole(size, _MOST_BYTES)
    if not right:
        raise ValueError(f"{str(numbers)[:100]}, expected whole numbers")
    for name in ("lr", "parameters", "unmeasured", "terms"):
        _list(details.get(name, []))
    for term in details.get("terms", ()):
        _check_term(an_object(term, "a term"))
    return text


def _check_term(term: dict[str, Any]) -> None:
    for name in ("op", "reduction", "unknown"):
        _text(term.get(name, ""))
    for name in ("elements", "factor"):
        number = term.get(name)
        if type(number) not in (int, float, type(None)):
            raise ValueError(f"{name} of a term is {str(number)[:100]}")


def _frames(text: str) -> str:
    """Return the JSON of the lines that led to an event, if it is what a recording writes."""
    if text == "[]":
        return text
    frames, text = _parsed(text)
    for frame in _list(frames):
        file, line, source = _list(frame)
        _text(file), _text(source)
        if not _whole(line):
            raise ValueError(f"a line is {str(line)[:100]}, expected a whole number")
    return text


# What could hide half a character or a number beyond 64 bits.
_STRANGE = re.compile(r"\\u|\d{19}")


def _parsed(text: str) -> tuple[Any, str]:
    """Return what a JSON text says, and the text without what could not be shown."""
    value = json.loads(text)
    flat = text.count("[") + text.count("{") < DEEPEST_JSON
    if flat and not _STRANGE.search(text):
        return value, text
    value = sane(value)
    return value, json.dumps(value, separators=(",", ":"))
