"""Append-only, versioned files for ledgers and graphs: JSON and raw numbers, never pickle, safe to open.

A file is a magic line and then chunks. A chunk is its length, its CRC-32 and a zlib-compressed
body: one JSON header and the bytes of its arrays. A killed process loses at most the chunk it
was writing.

Opening a file takes at most 256 MiB and 128 times its size, whatever it claims: a chunk is
refused before it is inflated further, and its JSON before it is parsed. The writer keeps to
that bound: what compresses better is padded.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from accumviz import arguments

MAGIC = b"accumviz\n"
FORMAT = 3
_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<I")
# Plain numbers only: an object array is how a hostile file would smuggle code in.
_DTYPES = ("<f4", "<f8", "|u1", "<i4", "<i8")
# What the contents of a file may take: so much, and so many times its size. Half of what the module's
# text says, because an array and the bytes it is made from are there together.
_ROOM, _RATIO = 128 << 20, 64
# A graph's arrays become objects, which are so many times larger.
_WEIGHTS = {"graph": 24}
_PIECE = 1 << 18
_MOST = 2**31 - 1
# JSON may be so deep; shorter rows of digits than this are within 64 bits.
_DEEP, _LONG = 16, re.compile(r"\d{19}")


class LedgerFileError(ValueError):
    """A file that cannot be read as a ledger or a graph; the message says why and what to do."""


class Reader:
    """The chunks of a file written by `Writer`, one at a time, each a header and its arrays.

    `kind` is there at once. After the last chunk `complete` says whether the file was closed
    properly, and `end` what was said then: a file that ends in the middle of a chunk (its process
    was killed) gives what was written before. Raises `LedgerFileError` for a foreign, newer or corrupt file;
    with `repair` a corrupt file gives the chunks before the damage.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        repair: bool = False,
        descriptor: int | None = None,
        size: int | None = None,
    ) -> None:
        arguments.file("path", path)
        self.path, self.repair = Path(path), repair
        self._descriptor, self._size = descriptor, size
        self.complete = False
        self.end: dict[str, Any] = {}
        self.format = 0
        self.kind = ""
        self._chunks = self._read()
        # The first chunk says what the file is.
        next(self._chunks)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        return self._chunks

    def _read(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        try:
            with (
                self.path.open("rb")
                if self._descriptor is None
                else _Open(self._descriptor) as file
            ):
                yield from self._read_from(file)
        except OSError as error:
            raise LedgerFileError(
                f"cannot open {str(self.path)!r}: {error.strerror or error}"
            ) from error
        except MemoryError as error:
            raise LedgerFileError(
                f"{str(self.path)!r} needs more memory than there is"
            ) from error

    def _read_from(
        self, file: BinaryIO | _Open
    ) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise LedgerFileError(f"{str(self.path)!r} is not a file")
        # Of a file that is open, what was written when it was asked for: another process may write on.
        size = about.st_size if self._size is None else min(self._size, about.st_size)
        magic = file.read(max(len(MAGIC), 12))
        if magic[: len(MAGIC)] != MAGIC:
            shown = "it is empty" if not magic else f"it starts with {magic[:12]!r}"
            raise LedgerFileError(
                f"{str(self.path)!r} is not an accumviz file ({shown}, expected {MAGIC!r}); "
                "pass a file written by ledger.save(...), graph.save(...) or record(..., path=...)"
            )
        position, number, room = len(MAGIC), 0, _Room(_ROOM)
        while position + _FRAME.size <= size:
            file.seek(position)
            frame = file.read(_FRAME.size)
            if len(frame) < _FRAME.size:
                break
            length, checksum = _FRAME.unpack(frame)
            if position + _FRAME.size + length > size:
                break
            body = file.read(length)
            if len(body) < length:
                break
            try:
                if zlib.crc32(body) != checksum:
                    raise ValueError("its checksum does not match")
                # By what was read so far, so that nothing is inflated on the word of what is still to come.
                room.grow(_RATIO * (_FRAME.size + length))
                meta, arrays = _unpack(body, room, _WEIGHTS.get(self.kind, 1))
            except (
                ValueError,
                KeyError,
                TypeError,
                OverflowError,
                RecursionError,
                struct.error,
                zlib.error,
            ) as error:
                if self.repair and number:
                    return
                raise LedgerFileError(
                    f"{str(self.path)!r} is damaged at byte {position} (chunk {number}: {error}); "
                    f"av.load(path, repair=True) reads the {max(number - 1, 0)} chunks before it"
                ) from error
            position += _FRAME.size + length
            # What was written after the closing mark was not written by a recording.
            self.complete = False
            if number == 0:
                self._begin(meta)
                yield {}, {}
            elif "end" in meta:
                self.end = dict(meta["end"]) if isinstance(meta["end"], dict) else {}
                self.complete = self.end.pop("complete", True) is True
            else:
                del body
                yield meta, arrays
            number += 1
        if number == 0:
            raise LedgerFileError(
                f"{str(self.path)!r} ends before its first chunk: nothing was recorded in it"
            )

    def _begin(self, meta: dict[str, Any]) -> None:
        found, kind, name = meta.get("format"), meta.get("kind"), str(self.path)
        if type(found) is not int or not isinstance(kind, str):
            raise LedgerFileError(
                f"{name!r} has no format number: it is not a whole accumviz file"
            )
        if found > FORMAT:
            raise LedgerFileError(
                f"{name!r} has format {found}, this accumviz reads up to {FORMAT}: "
                "update it (pip install -U accumviz) or save the file again with the older version"
            )
        self.format, self.kind = found, kind


class _Open:
    """Reads a file that is open elsewhere, and leaves its place in it alone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0

    def fileno(self) -> int:
        return self._descriptor

    def seek(self, at: int) -> None:
        self._at = at

    def read(self, size: int) -> bytes:
        if hasattr(os, "pread"):
            found = os.pread(self._descriptor, size, self._at)
        else:
            os.lseek(self._descriptor, self._at, os.SEEK_SET)
            found = os.read(self._descriptor, size)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        self._at += len(found)
        return found

    def __enter__(self) -> _Open:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever opened it closes it."""


T = TypeVar("T")


def valid(reader: Reader, decode: Callable[[Reader], T]) -> T:
    """What `decode` makes of a file; raises `LedgerFileError` where it finds something else than was expected."""
    try:
        return decode(reader)
    except LedgerFileError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise LedgerFileError(
            f"{str(reader.path)!r} is not a valid {reader.kind}: {error!r}"
        ) from error
    except MemoryError as error:
        raise LedgerFileError(
            f"{str(reader.path)!r} needs more memory than there is"
        ) from error


class _Room:
    """How many bytes the contents of a file may still take."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def grow(self, size: int) -> None:
        self.most += size
        self.left += size

    def take(self, size: int) -> None:
        if size > self.left:
            raise ValueError(
                f"its contents are larger than the {self.most >> 20:,} MiB that a file of its size may hold"
            )
        self.left -= size


def _weight(head: bytes) -> int:
    """The most bytes that JSON takes once parsed, told from how often what begins a value stands in it."""
    containers = 256 * head.count(b"{") + 88 * head.count(b"[")
    return 4 * len(head) + containers + 96 * (head.count(b",") + head.count(b":"))


def frame(
    meta: dict[str, Any],
    arrays: dict[str, np.ndarray],
    kind: str,
    weight: int,
    size: int,
) -> tuple[bytes, int]:
    """A chunk as it stands in a file, and the weight of the file with it; before, it has `weight` and `size` bytes."""
    body, more = _pack(meta, arrays, _WEIGHTS.get(kind, 1))
    # What is so regular that the reader would take it for a bomb is given the size that it may have.
    body = body.ljust((weight + more - _ROOM) // _RATIO + len(MAGIC) + 1 - size, b"\0")
    return _FRAME.pack(len(body), zlib.crc32(body)) + body, weight + more


def _pack(
    meta: dict[str, Any], arrays: dict[str, np.ndarray], weight: int
) -> tuple[bytes, int]:
    columns, parts, size = [], [], 0
    for name, array in arrays.items():
        if array.dtype.str not in _DTYPES:
            raise TypeError(
                f"array {name!r} has dtype {array.dtype}, expected one of {_DTYPES}"
            )
        columns.append([name, array.dtype.str, list(array.shape)])
        # Bytes of equal weight side by side: exponents repeat, so zlib finds much more.
        flat = np.ascontiguousarray(array).view(np.uint8)
        parts.append(
            flat.reshape(-1, array.itemsize).T.tobytes() if array.size else b""
        )
        size += array.nbytes
    head = json.dumps({"meta": meta, "arrays": columns}, separators=(",", ":")).encode()
    return zlib.compress(
        _HEAD.pack(len(head)) + head + b"".join(parts), 1
    ), weight * size + _weight(head)


class _Inflated:
    """The inflated bytes of a body, as many at a time as are asked for."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = memoryview(body), 0
        self._stream, self._rest = zlib.decompressobj(), b""

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0:
            if not self._rest:
                self._rest = bytes(self._body[self._at : self._at + _PIECE])
                self._at += _PIECE
            ended = not self._rest
            # Even when all is read, some of what it inflates to may still be due.
            part = self._stream.decompress(self._rest, size)
            self._rest = self._stream.unconsumed_tail
            if (ended and not part) or (self._stream.eof and len(part) < size):
                raise ValueError("it is shorter than it says")
            parts.append(part)
            size -= len(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]


def _unpack(
    body: bytes, room: _Room, weight: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    stream = _Inflated(body)
    (length,) = _HEAD.unpack(stream.read(_HEAD.size))
    if length > room.left:
        room.take(length)
    head = stream.read(length)
    room.take(_weight(head))
    header = json.loads(head)
    del head
    if not isinstance(header, dict) or not isinstance(header.get("meta"), dict):
        raise TypeError("its header is no JSON object")
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        if not isinstance(name, str) or dtype not in _DTYPES:
            raise ValueError(f"array {name!r} has dtype {dtype!r}")
        if (
            not all(type(side) is int and 0 <= side < 1 << 48 for side in shape)
            or len(shape) > 8
        ):
            raise ValueError(f"array {name!r} has no shape: {str(shape)[:100]}")
        kind, count = np.dtype(dtype), 1
        for side in shape:
            count *= side
        room.take(weight * count * kind.itemsize)
        planes = np.frombuffer(stream.read(count * kind.itemsize), np.uint8)
        arrays[name] = (
            np.ascontiguousarray(planes.reshape(kind.itemsize, count).T)
            .view(kind)
            .reshape(shape)
        )
        del planes
    return header["meta"], arrays


def plain(value: Any, name: str, kind: type = list) -> Any:
    """JSON that came from a file, if it is a list (or an object) and what is in it can be printed."""
    return _plain(a_list(value, name) if kind is list else an_object(value, name), 0)


def parsed(text: str, name: str, kind: type = list) -> Any:
    """As `plain`, of the JSON in this text; most texts are too short of brackets, digits and escapes to be refused."""
    value = json.loads(text)
    short = (
        text.isascii()
        and "\\u" not in text
        and text.count("[") + text.count("{") <= _DEEP
    )
    if not short or _LONG.search(text):
        return plain(value, name, kind)
    return a_list(value, name) if kind is list else an_object(value, name)


def _plain(value: Any, depth: int) -> Any:
    """JSON as it is, if it is not deep and its texts and numbers can be printed."""
    if depth > _DEEP:
        raise ValueError("lists within lists within lists")
    if isinstance(value, str):
        return a_text(value)
    if isinstance(value, dict):
        return {a_text(name): _plain(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a number beyond 64 bits")
    return value


def a_text(value: Any) -> str:
    """A text that can be written anywhere: half a character, as in a file's name that is no UTF-8, becomes "?"."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:100]!r} where a text was expected")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def whole(value: Any, most: int = _MOST) -> bool:
    """Whether something that came from a file is a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def a_list(value: Any, name: str) -> list[Any]:
    """What came from a file, if it is a list; raises `TypeError` else."""
    if not isinstance(value, list):
        raise TypeError(f"{name} is {str(value)[:100]!r}, expected a list")
    return value


def an_object(value: Any, name: str) -> dict[str, Any]:
    """What came from a file, if it is an object; raises `TypeError` else."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {str(value)[:100]!r}, expected an object")
    return value
