"""Append-only, versioned files for ledgers and graphs: JSON and raw numbers, never pickle, safe to open.

A file is a magic line and then chunks. A chunk is its length, its CRC-32 and a zlib-compressed
body: one JSON header and the bytes of its arrays. A killed process loses at most the chunk it
was writing.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

MAGIC = b"accumviz\n"
FORMAT = 1
_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<I")
# Plain numbers only: an object array is how a hostile file would smuggle code in.
_DTYPES = ("<f4", "<f8", "|u1", "<i4", "<i8")
# A chunk of this size would hold years of events; more is a decompression bomb.
_MAX_CHUNK = 1 << 30


class LedgerFileError(ValueError):
    """A file that cannot be read as a ledger or a graph; the message says why and what to do."""


@dataclass
class Contents:
    """What a file holds: its kind, its chunks in order, and whether it was closed properly."""

    kind: str
    chunks: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = field(default_factory=list)
    complete: bool = False


class Writer:
    """Write chunks to a file as they come; each is on disk when `append` returns."""

    def __init__(self, path: str | Path, kind: str) -> None:
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 - the writer is itself the context manager
        self._file.write(MAGIC)
        self.append({"format": FORMAT, "kind": kind})

    def append(self, meta: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        body = _pack(meta, arrays or {})
        self._file.write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.append({"end": True})
            finally:
                self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: str | Path, *, repair: bool = False) -> Contents:
    """Read every chunk of a file written by `Writer`.

    A file that ends in the middle of a chunk (its process was killed) gives what was written
    and `complete=False`. Raises `LedgerFileError` for a foreign, newer or corrupt file; with
    `repair=True` a corrupt file gives the chunks before the damage.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "x.ledger")
    >>> with Writer(path, "ledger") as writer:
    ...     writer.append({"n": 1}, {"a": np.array([1.5, float("nan")])})
    >>> read(path).chunks
    [({'n': 1}, {'a': array([1.5, nan])})]
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LedgerFileError(f"cannot open {str(path)!r}: {error.strerror or error}") from error
    if data[: len(MAGIC)] != MAGIC:
        shown = "it is empty" if not data else f"it starts with {data[:12]!r}"
        raise LedgerFileError(
            f"{path.name!r} is not an accumviz file ({shown}, expected {MAGIC!r}); "
            "pass a file written by ledger.save(...), graph.save(...) or record(..., path=...)"
        )
    contents = Contents(kind="")
    position, number = len(MAGIC), 0
    while position + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, position)
        body = data[position + _FRAME.size : position + _FRAME.size + length]
        if len(body) < length:
            break
        try:
            if zlib.crc32(body) != checksum:
                raise ValueError("its checksum does not match")
            meta, arrays = _unpack(body)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error, zlib.error) as error:
            if repair and number:
                return contents
            raise LedgerFileError(
                f"{path.name!r} is damaged at byte {position} (chunk {number}: {error}); "
                f"av.load(path, repair=True) reads the {max(number - 1, 0)} chunks before it"
            ) from error
        position += _FRAME.size + length
        if number == 0:
            _check_format(path, meta)
            contents.kind = str(meta["kind"])
        elif "end" in meta:
            contents.complete = True
        else:
            contents.chunks.append((meta, arrays))
        number += 1
    if number == 0:
        raise LedgerFileError(f"{path.name!r} ends before its first chunk: nothing was recorded in it")
    return contents


def load(path: str | Path, *, repair: bool = False) -> Any:
    """Read a ledger or a graph from the file that `save` or `record(..., path=...)` wrote.

    Opening a file runs nothing that is in it. A process that was killed leaves what it had
    recorded, and `ledger.complete` is False. Raises `LedgerFileError` for a file that is neither,
    is newer than this accumviz, or is damaged; `repair=True` then gives what stands before the
    damage.

    >>> import os, tempfile, accumviz as av
    >>> path = os.path.join(tempfile.mkdtemp(), "run.ledger")
    >>> av.Ledger.build([], [dict(kind="backward", label="loss")]).save(path)
    >>> av.load(path).of("backward")[0].label
    'loss'
    """
    from accumviz.graph import Graph
    from accumviz.ledger import Ledger

    contents = read(path, repair=repair)
    kinds: dict[str, Any] = {"ledger": Ledger, "graph": Graph}
    if contents.kind not in kinds:
        raise LedgerFileError(f"{Path(path).name!r} holds a {contents.kind!r}; expected a ledger or a graph")
    try:
        return kinds[contents.kind].from_contents(contents)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise LedgerFileError(f"{Path(path).name!r} is not a valid {contents.kind}: {error!r}") from error


def _check_format(path: Path, meta: dict[str, Any]) -> None:
    found = meta.get("format")
    if not isinstance(found, int) or "kind" not in meta:
        raise LedgerFileError(f"{path.name!r} has no format number: it is not a whole accumviz file")
    if found > FORMAT:
        raise LedgerFileError(
            f"{path.name!r} has format {found}, this accumviz reads up to {FORMAT}: "
            "update it (pip install -U accumviz) or save the file again with the older version"
        )


def _pack(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    columns, parts = [], []
    for name, array in arrays.items():
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, expected one of {_DTYPES}")
        columns.append([name, array.dtype.str, list(array.shape)])
        # Bytes of equal weight side by side: exponents repeat, so zlib finds much more.
        flat = np.ascontiguousarray(array).view(np.uint8)
        parts.append(flat.reshape(-1, array.itemsize).T.tobytes() if array.size else b"")
    head = json.dumps({"meta": meta, "arrays": columns}, separators=(",", ":")).encode()
    return zlib.compress(_HEAD.pack(len(head)) + head + b"".join(parts), 1)


def _unpack(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    stream = zlib.decompressobj()
    raw = stream.decompress(body, _MAX_CHUNK)
    if stream.unconsumed_tail:
        raise ValueError("it is larger than any recording")
    (length,) = _HEAD.unpack_from(raw)
    header = json.loads(raw[_HEAD.size : _HEAD.size + length])
    if not isinstance(header, dict) or not isinstance(header.get("meta"), dict):
        raise TypeError("its header is no JSON object")
    position, arrays = _HEAD.size + length, {}
    for name, dtype, shape in header["arrays"]:
        if dtype not in _DTYPES:
            raise ValueError(f"array {name!r} has dtype {dtype!r}")
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if count < 0 or position + count * kind.itemsize > len(raw):
            raise ValueError(f"array {name!r} is shorter than its shape {shape}")
        bytes_ = np.frombuffer(raw, np.uint8, count * kind.itemsize, position)
        arrays[name] = np.ascontiguousarray(bytes_.reshape(kind.itemsize, count).T).view(kind).reshape(shape)
        position += count * kind.itemsize
    return header["meta"], arrays
