"""Append-only files for ledgers and graphs: JSON and raw numbers, never pickle, safe to open.

A file is a magic line and then chunks. A chunk is a frame (stored size, inflated size, CRC-32)
and a zlib-compressed body: one JSON header and the bytes of its arrays. A process that is killed
loses at most the chunk it was writing.

What a chunk takes in memory is at most 64 times its stored size, and the reader refuses one that
claims more before it inflates it. The writer pads what compresses better.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

import numpy as np

from accumviz import arguments

_NAME, FORMAT = b"accumviz", 4
MAGIC = b"%s %d\n" % (_NAME, FORMAT)
_FRAME = struct.Struct("<III")
_HEADER_SIZE = struct.Struct("<I")
# Plain numbers only: an object array is how a hostile file would smuggle code in.
_DTYPES = ("<f4", "<f8", "|u1", "<i4", "<i8")
# Bytes of memory for each stored byte of a chunk, and for each byte of a JSON header once it is parsed.
_RATIO, _JSON_RATIO = 64, 8
# The arrays of a graph become objects, which take so many times their bytes.
_OBJECT_RATIO = {"graph": 24}
_DEEPEST_JSON = 16
_LARGEST_INTEGER = 1 << 63
_MOST = 2**31 - 1

Chunk = tuple[dict[str, Any], dict[str, np.ndarray]]


class LedgerFileError(ValueError):
    """A file that cannot be read as a ledger or a graph; the message says why and what to do."""


# --- chunks ----------------------------------------------------------------------------------


def _pack(header: dict[str, Any], arrays: dict[str, np.ndarray], kind: str) -> bytes:
    """Return a chunk as it is stored."""
    columns, parts = [], []
    for name, array in arrays.items():
        if array.dtype.str not in _DTYPES:
            raise TypeError(
                f"array {name!r} has dtype {array.dtype}, expected one of {_DTYPES}"
            )
        columns.append([name, array.dtype.str, list(array.shape)])
        # Bytes of equal weight side by side: exponents repeat, so zlib finds much more.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts.append(flat.reshape(-1, array.itemsize).T.tobytes())
    text = json.dumps(
        {"meta": header, "arrays": columns}, separators=(",", ":")
    ).encode()
    raw = b"".join([_HEADER_SIZE.pack(len(text)), text, *parts])
    body = zlib.compress(raw, 1)
    body = body.ljust(_memory(len(text), len(raw), kind) // _RATIO + 1, b"\0")
    return _FRAME.pack(len(body), len(raw), zlib.crc32(body)) + body


def _memory(header: int, inflated: int, kind: str) -> int:
    """Return the bytes that a chunk may take once it is read."""
    return _JSON_RATIO * header + _OBJECT_RATIO.get(kind, 1) * inflated


def _unpack(body: bytes, inflated: int, kind: str) -> Chunk:
    """Return the header and the arrays of a chunk; raises `ValueError` for one that takes too much memory."""
    if inflated > _RATIO * len(body):
        raise ValueError(f"it claims to inflate to {inflated:,} bytes")
    raw = memoryview(zlib.decompressobj().decompress(body, inflated))
    (size,) = _HEADER_SIZE.unpack_from(raw)
    if len(raw) != inflated or _memory(size, inflated, kind) > _RATIO * len(body):
        raise ValueError("its contents take more memory than a chunk of its size may")
    end = _HEADER_SIZE.size + size
    text = bytes(raw[_HEADER_SIZE.size : end])
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if 4 * values > max(size, 1 << 20):
        raise ValueError("its header is a list of nothings")
    parsed_text = json.loads(text)
    header = an_object(an_object(parsed_text, "its header").get("meta"), "its header")
    arrays = {}
    for name, dtype, shape in parsed_text["arrays"]:
        if dtype not in _DTYPES:
            raise ValueError(f"array {name!r} has dtype {dtype!r}")
        if len(shape) > 8 or not all(whole(side, 1 << 48) for side in shape):
            raise ValueError(f"array {a_text(name)!r} has no shape: {str(shape)[:100]}")
        element = np.dtype(dtype)
        count = 1
        for side in shape:
            count *= side
        start, end = end, end + count * element.itemsize
        if end > inflated:
            raise ValueError(f"array {a_text(name)!r} is longer than its chunk")
        planes = np.frombuffer(raw[start:end], np.uint8).reshape(
            element.itemsize, count
        )
        arrays[a_text(name)] = (
            np.array(planes.T, order="C").view(element).reshape(shape)
        )
    return header, arrays


# --- reading ---------------------------------------------------------------------------------


class Reader:
    """Iterate over the chunks of a file written by `Writer`, each a header and its arrays.

    `kind` is known at once. After the last chunk `complete` says whether the file was closed
    properly, and `end` holds what was said then: a file that ends in the middle of a chunk gives
    what was written before. Raises `LedgerFileError` for a foreign, damaged, older or newer file;
    with `repair` a damaged file gives the chunks before the damage.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        repair: bool = False,
        opened: BinaryIO | None = None,
        size: int | None = None,
    ) -> None:
        arguments.file("path", path)
        self.path, self.repair = Path(path), repair
        self.complete = False
        self.end: dict[str, Any] = {}
        self.kind = ""
        self._size = size  # of an open file, so much was written when it was asked for
        self._chunks = self._read(opened)
        next(self._chunks)  # the first chunk says what the file is

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def _read(self, opened: BinaryIO | None) -> Iterator[Chunk]:
        try:
            with opened or self.path.open("rb") as file:
                yield from self._read_from(file)
        except OSError as error:
            raise LedgerFileError(
                f"cannot open {str(self.path)!r}: {error.strerror or error}"
            ) from error
        except MemoryError as error:
            raise LedgerFileError(
                f"{str(self.path)!r} needs more memory than there is"
            ) from error

    def _read_from(self, file: BinaryIO) -> Iterator[Chunk]:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise LedgerFileError(f"{str(self.path)!r} is not a file")
        file.seek(0)
        self._check_magic(file.read(len(MAGIC)))
        number = 0
        for position, body, inflated, checksum in _frames(
            file, about.st_size if self._size is None else self._size
        ):
            try:
                if zlib.crc32(body) != checksum:
                    raise ValueError("its checksum does not match")
                header, arrays = _unpack(body, inflated, self.kind)
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
            # What was written after the closing mark was not written by a recording.
            self.complete = False
            if number == 0:
                self.kind = str(header.get("kind", ""))[:80]
                yield {}, {}
            elif "end" in header:
                self.end = (
                    dict(header["end"]) if isinstance(header["end"], dict) else {}
                )
                self.complete = self.end.pop("complete", True) is True
            else:
                yield header, arrays
            number += 1
        if number == 0:
            raise LedgerFileError(
                f"{str(self.path)!r} ends before its first chunk: nothing was recorded in it"
            )

    def _check_magic(self, magic: bytes) -> None:
        if magic == MAGIC:
            return
        name = str(self.path)
        if magic.startswith(_NAME):
            raise LedgerFileError(
                f"{name!r} has another format than {FORMAT}, which this accumviz reads: record again, or open it with "
                "the version that wrote it"
            )
        shown = f"it starts with {magic!r}" if magic else "it is empty"
        raise LedgerFileError(
            f"{name!r} is not an accumviz file ({shown}, expected {MAGIC!r}); "
            "pass a file written by ledger.save(...), graph.save(...) or record(..., path=...)"
        )


def _frames(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes, int, int]]:
    """Yield position, body, inflated size and checksum of each whole chunk."""
    position = len(MAGIC)
    while position + _FRAME.size <= size:
        frame = file.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            return
        length, inflated, checksum = _FRAME.unpack(frame)
        body = file.read(min(length, size))
        if len(body) < length:
            return
        yield position, body, inflated, checksum
        position += _FRAME.size + length


T = TypeVar("T")


def valid(reader: Reader, decode: Callable[[Reader], T]) -> T:
    """Return what `decode` makes of a file; raises `LedgerFileError` where its contents do not fit together."""
    try:
        return decode(reader)
    except LedgerFileError:
        raise
    except MemoryError as error:
        raise LedgerFileError(
            f"{str(reader.path)!r} needs more memory than there is"
        ) from error
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


# --- writing ---------------------------------------------------------------------------------


class Writer:
    """Write chunks to a file as they come; each is in the operating system's hands when `append` returns.

    Nothing happens to the disk before `open` (or the first `append`). It refuses an existing file with
    `FileExistsError`; with `overwrite` a new file takes its place, once it has begun well. With `whole`,
    nothing stands at `path` before `close`.

    What the disk refuses, and a file that was deleted or cut short meanwhile, raise `OSError`: the file
    then ends with its last whole chunk, and a later `append` tries again. In a process forked from the
    one that opened it, nothing is written. One thread at a time may call.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "x.ledger")
    >>> with Writer(path, "ledger") as writer:
    ...     writer.append({"n": 1}, {"a": np.array([1.5, float("nan")])})
    >>> list(Reader(path))
    [({'n': 1}, {'a': array([1.5, nan])})]
    >>> Writer(path, "ledger").open()
    Traceback (most recent call last):
    FileExistsError: ... exists already; pass overwrite=True to replace it, or another name
    """

    def __init__(
        self,
        path: str | Path,
        kind: str,
        *,
        overwrite: bool = False,
        whole: bool = False,
    ) -> None:
        self.path, self.kind = Path(path), kind
        self.overwrite, self.whole = overwrite, whole
        self.size = 0
        self._file: BinaryIO | None = None
        self._temporary = False
        self._closed = False
        self._process = os.getpid()
        # The path with links resolved, and where the bytes go until the file has begun (or, `whole`, ended) well.
        self._target = self._unfinished = Path()

    @classmethod
    def temporary(cls, kind: str) -> Writer:
        """Return a writer of a file without a name, which goes with it, or with its process."""
        writer = cls("(a temporary file)", kind)
        writer._temporary = True
        writer._begin(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 - the writer closes it
        return writer

    @property
    def can_be_read(self) -> bool:
        """Whether something was written."""
        return self.size > 0

    def open(self) -> None:
        """Begin the file. Raises `FileExistsError`, or another `OSError` where it cannot be written."""
        if self._file is not None or self._closed:
            return
        self._process = os.getpid()
        try:
            self._target = self.path.resolve()
        except (
            ValueError,
            RuntimeError,
        ) as error:  # half of a character, a circle of links
            raise OSError(errno.EINVAL, str(error), str(self.path)) from error
        if self._target.is_dir():
            raise IsADirectoryError(
                errno.EISDIR, os.strerror(errno.EISDIR), str(self.path)
            )
        replaces = self._target.exists()
        if replaces and not self.overwrite:
            raise FileExistsError(self._refusal())
        self._unfinished = self._target
        if replaces or self.whole:
            name = f".{self._target.name}.{os.getpid()}.new"
            self._unfinished = self._target.with_name(name)
        try:
            self._begin(_create(self._unfinished))
            if not self.whole:
                self._move_to_target()
        except FileExistsError:
            raise FileExistsError(self._refusal()) from None
        except OSError as error:
            raise OSError(
                error.errno, error.strerror or str(error), str(self.path)
            ) from error

    def _refusal(self) -> str:
        return f"{str(self.path)!r} exists already; pass overwrite=True to replace it, or another name"

    def _begin(self, file: BinaryIO) -> None:
        self._file = file
        try:
            self._write(MAGIC + _pack({"kind": self.kind}, {}, self.kind))
        except BaseException:
            self.discard()
            raise

    def _move_to_target(self) -> None:
        if self._unfinished == self._target:
            return
        try:
            if not self.overwrite and self._target.exists():
                raise FileExistsError(self._refusal())
            self._unfinished.replace(self._target)
        except OSError:
            self._unfinished.unlink(missing_ok=True)
            raise
        self._unfinished = self._target

    def append(
        self, header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None
    ) -> None:
        """Write a chunk, opening the file if need be. Raises `OSError` when the disk refuses it."""
        if self._closed:
            raise ValueError(
                f"{str(self.path)!r} is closed; nothing can be appended to it"
            )
        if self._file is None or os.getpid() == self._process:
            self.open()
            self._write(_pack(header, arrays or {}, self.kind))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        about = os.fstat(self._file.fileno())
        if about.st_nlink == 0 and not self._temporary:
            raise FileNotFoundError(
                f"{str(self.path)!r} was deleted while it was written"
            )
        if about.st_size < self.size:
            raise OSError(
                errno.EIO, "the file was cut short while it was written", str(self.path)
            )
        try:
            left = memoryview(data)
            while left:  # where the disk took only a part, the second try says why
                left = left[self._file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self.size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.size += len(data)

    def read(self) -> Reader:
        """Return the chunks that were written so far.

        Raises `LedgerFileError` where the file was deleted or changed after it was closed.
        """
        if self._file is not None and not self._closed:
            opened = os.fdopen(os.dup(self._file.fileno()), "rb")
            return Reader(self.path, repair=True, opened=opened, size=self.size)
        try:
            size = self._target.stat().st_size
        except OSError as error:
            raise LedgerFileError(
                f"{str(self.path)!r}, which holds what was recorded, is not there any more "
                f"({error.strerror or error}); load it with av.load(...) from where it is now"
            ) from error
        if size != self.size:
            raise LedgerFileError(
                f"{str(self.path)!r}, which held what was recorded, was replaced or changed since; "
                "load what is there now with av.load(...)"
            )
        return Reader(self._target, repair=True)

    def close(self, **end: Any) -> None:
        """Mark the file as closed and close it; `end` is kept as `Reader.end`.

        With `complete=False` what it holds counts as incomplete all the same.
        Raises `OSError` when the disk refuses the mark; the file is closed even then.
        """
        try:
            if (
                self._file is not None
                and not self._closed
                and os.getpid() == self._process
            ):
                self._write(_pack({"end": end}, {}, self.kind))
                self.abandon()
                self._move_to_target()
        except OSError:
            if self.whole:
                self.discard()
            raise
        finally:
            self.abandon()

    def discard(self) -> None:
        """Close the file without the mark, and delete it."""
        if (
            self._file is not None
            and not self._closed
            and not self._temporary
            and os.getpid() == self._process
        ):
            with contextlib.suppress(OSError):
                self._unfinished.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is, without the mark."""
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def __del__(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # what it needs may be gone before it at the interpreter's end
            self.abandon()

    def __enter__(self) -> Writer:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


def _create(path: Path) -> BinaryIO:
    """Create a file that can be read as well; writes go to its end, wherever a reader has moved."""
    mode = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
    return os.fdopen(
        os.open(path, mode | getattr(os, "O_BINARY", 0), 0o666), "r+b", buffering=0
    )


# --- checks of what a file says ----------------------------------------------------------------


def plain(value: Any, name: str, kind: type = list) -> Any:
    """Return JSON from a file if it is a list (or an object) and everything in it can be printed."""
    return _printable(
        a_list(value, name) if kind is list else an_object(value, name), 0
    )


def parsed(text: str, name: str, kind: type = list) -> Any:
    """Parse JSON and check it as `plain` does, which most texts are too simple to need."""
    value = json.loads(text)
    simple = (
        text.isascii()
        and "\\u" not in text
        and text.count("[") + text.count("{") <= _DEEPEST_JSON
    )
    if not simple or re.search(r"\d{19}", text):
        return plain(value, name, kind)
    return a_list(value, name) if kind is list else an_object(value, name)


def _printable(value: Any, depth: int) -> Any:
    if depth > _DEEPEST_JSON:
        raise ValueError("lists within lists within lists")
    if isinstance(value, str):
        return a_text(value)
    if isinstance(value, dict):
        return {
            a_text(name): _printable(each, depth + 1) for name, each in value.items()
        }
    if isinstance(value, list):
        return [_printable(each, depth + 1) for each in value]
    if isinstance(value, int) and not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise ValueError("a number beyond 64 bits")
    return value


def a_text(value: Any) -> str:
    """Return a text that can be written anywhere; half a character becomes "?"."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:100]!r} where a text was expected")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def whole(value: Any, most: int = _MOST) -> bool:
    """Return whether a value from a file is a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def a_list(value: Any, name: str) -> list[Any]:
    """Return a value from a file if it is a list; raises `TypeError` otherwise."""
    if not isinstance(value, list):
        raise TypeError(f"{name} is {str(value)[:100]!r}, expected a list")
    return value


def an_object(value: Any, name: str) -> dict[str, Any]:
    """Return a value from a file if it is an object; raises `TypeError` otherwise."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {str(value)[:100]!r}, expected an object")
    return value
