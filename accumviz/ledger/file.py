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
# The least and the most that a number in an event's details may be.
_WHOLE_DETAILS = {
    "optimizer_index": (0, _MOST),
    "ranks": (1, _MOST),
    "bytes": (0, _MOST_BYTES),
}
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
    rows = _list(about["parameters"])
    parameters = tuple(_parameter(row) for row in rows)
    _check_names(parameters)
    kept = _list(about["kept"])
    _check_kept(kept, len(parameters))
    elements = sum(parameters[p].numel for p in kept)
    empty = Block.empty(len(parameters), elements)
    block = join(parts or [empty])
    for array in (block.added, block.left, block.weights):
        width = array.shape[1]
        if width != elements:
            raise ValueError(f"{width} elements are kept, expected {elements}")
    return kind.of_block(
        parameters,
        kept,
        block,
        sources=about["sources"],
        meta=_meta(about["meta"], reader.end),
        complete=reader.complete,
    )


def _check_kept(kept: list[Any], count: int) -> None:
    are_numbers = all(_whole(p, count - 1) for p in kept)
    if not are_numbers or len(set(kept)) < len(kept):
        raise ValueError(f"kept is {str(kept)[:100]}, expected numbers of parameters")


def _checked(tables: dict[str, Any], arrays: dict[str, np.ndarray]) -> Block:
    """Return a block whose columns fit together; whether they fit to the parameters is seen when it is joined."""
    for name in _BY_COLUMN:
        transposed = arrays[name].T
        arrays[name] = np.ascontiguousarray(transposed)
    length = len(arrays["codes"])
    for name, kind in ARRAYS.items():
        array = arrays[name]
        dimensions = 1 if name == "weighed" else 2
        if array.ndim != dimensions or array.dtype != np.dtype(kind):
            raise ValueError(f"{name} is an array of {array.dtype} {array.shape}")
        of_events = name not in ("weighed", "weights")
        if of_events and len(array) != length:
            raise ValueError(f"{name} has {len(array)} rows for {length} events")
    _check_weighed(arrays["weighed"], arrays["weights"], length)
    _check_numbers(arrays["numbers"])
    texts = _tables(tables, arrays["codes"])
    columns = {name: arrays[name] for name in ARRAYS}
    return Block(texts, **columns)


def _check_weighed(weighed: np.ndarray, weights: np.ndarray, length: int) -> None:
    steps = np.diff(weighed, prepend=-1, append=length)
    in_order = (steps > 0).all()
    if not in_order or len(weighed) != len(weights):
        raise ValueError("weights are not in the order of their events")


def _check_numbers(numbers: np.ndarray) -> None:
    for name, column in zip(NUMBERS, numbers.T, strict=True):
        if name == "time" and not np.isfinite(column).all():
            raise ValueError("an event happened at no time")
        if name in _BYTES:
            outside = (column < 0) | (column >= _MOST_BYTES)
            if outside.any():
                raise ValueError(f"{name} is no number of bytes")


def _tables(given: dict[str, Any], codes: np.ndarray) -> dict[str, list[str]]:
    """Return the tables of texts, if each code is a place in one."""
    tables = {}
    for name in TABLES:
        texts = _list(given[name])
        tables[name] = [_text(text) for text in texts]
    for column, name in zip(codes.T, CODES, strict=True):
        low = -1 if name == "rank" else 0
        high = len(tables[name]) - 1 if name in tables else _MOST
        outside = (column < low) | (column > high)
        if outside.any():
            raise ValueError(f"a {name} is out of range")
    unknown = set(tables["kind"]) - set(KINDS)
    if unknown:
        expected = ", ".join(KINDS)
        raise ValueError(
            f"an event of the kind {min(unknown)!r}; expected one of {expected}"
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
    for text in sources.values():
        _text(text)
    return sources


def _parameter(row: dict[str, Any]) -> Parameter:
    for name in ("name", "dtype", "device", "group", "unsharded_of"):
        _text(row[name])
    shape = tuple(_list(row["shape"]))
    _check_shape(shape)
    optimizers = tuple(_list(row["optimizers"]))
    numbers = [*optimizers]
    if row["rank"] is not None:
        numbers.append(row["rank"])
    are_numbers = all(_whole(number) for number in numbers)
    if not are_numbers or not isinstance(row["requires_grad"], bool):
        raise ValueError(f"a parameter is {str(row)[:100]}")
    aliases = _list(row["aliases"])
    for alias in aliases:
        _text(alias)
    tuples = {
        "shape": shape,
        "optimizers": optimizers,
        "aliases": tuple(aliases),
    }
    return Parameter(**{**row, **tuples})


def _check_shape(shape: tuple[Any, ...]) -> None:
    are_sides = all(_whole(side, _LARGEST) for side in shape)
    if len(shape) > 64 or not are_sides or math.prod(shape) > _LARGEST:
        raise ValueError(f"a parameter's shape is {str(shape)[:100]}")


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
    an_object(details, "details")
    for name, (least, most) in _WHOLE_DETAILS.items():
        number = details.get(name, 1)
        if not _whole(number, most, least):
            raise ValueError(f"{name} is {str(number)[:100]}, expected a whole number")
    for name in ("lr", "parameters", "unmeasured", "terms"):
        _list(details.get(name, []))
    for term in details.get("terms", ()):
        an_object(term, "a term")
        _check_term(term)
    return text


def _check_term(term: dict[str, Any]) -> None:
    for name in ("op", "reduction", "unknown"):
        _text(term.get(name, ""))
    for name in ("elements", "factor"):
        number = term.get(name)
        if number is not None and type(number) not in (int, float):
            raise ValueError(f"{name} of a term is {str(number)[:100]}")


def _frames(text: str) -> str:
    """Return the JSON of the lines that led to an event, if it is what a recording writes."""
    if text == "[]":
        return text
    frames, text = _parsed(text)
    for frame in _list(frames):
        file, line, source = _list(frame)
        _text(file)
        _text(source)
        if not _whole(line):
            raise ValueError(f"a line is {str(line)[:100]}, expected a whole number")
    return text


# What could hide half a character or a number beyond 64 bits.
_STRANGE = re.compile(r"\\u|\d{19}")


def _parsed(text: str) -> tuple[Any, str]:
    """Return what a JSON text says, and the text without what could not be shown."""
    value = json.loads(text)
    brackets = text.count("[") + text.count("{")
    if brackets < DEEPEST_JSON and not _STRANGE.search(text):
        return value, text
    value = sane(value)
    text = json.dumps(value, separators=(",", ":"))
    return value, text
