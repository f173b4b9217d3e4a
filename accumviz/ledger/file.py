"""A ledger's file: chunks of JSON and raw numbers, never pickle, appended as they come.

A file is a line that says so, and then chunks. A chunk is its length, a checksum (CRC-32) and a
zlib-compressed body: the length of a JSON header, the header, and the bytes of its arrays. A process that is killed
loses at most the chunk it was writing. Chunks hold the parameters as JSON, and events and numbers as columns.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy import ndarray

from accumviz import arguments
from accumviz.ledger.events import ARRAYS, Arrays, Block, Events, Parameter, join

FORMAT = 6
MAGIC = b"accumviz %d\n" % FORMAT
_FRAME = struct.Struct("<II")
_HEADER_SIZE = struct.Struct("<I")
# Bytes of arrays in one chunk of a saved ledger: reading it holds two of them.
_CHUNK_BYTES = 4 << 20
# A file is unpacked to so many bytes, or to so many times its own: a few bytes of zlib stand for thousands.
_ROOM, _TIMES = 1 << 28, 64
# JSON takes about so many times the bytes of its text once it is parsed.
_PARSED = 8

# What a chunk says, and its arrays by name.
Chunk = tuple[dict[str, Any], dict[str, ndarray]]


class LedgerFileError(ValueError):
    """A file that cannot be read as a ledger; the message says why and what to do."""


# What goes wrong where a file does not hold what it should.
_WRONG = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    struct.error,
    zlib.error,
)


# --- chunks ----------------------------------------------------------------------------------


def pack(header: dict[str, Any], arrays: dict[str, ndarray]) -> bytes:
    """Return a chunk as it is stored."""
    columns = []
    parts = []
    for name, array in arrays.items():
        columns.append([name, array.dtype.str, list(array.shape)])
        # Bytes of equal weight side by side: exponents repeat, so zlib finds much more.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts.append(flat.reshape(-1, array.itemsize).T.tobytes())
    whole = {"meta": header, "arrays": columns}
    text = json.dumps(whole, separators=(",", ":")).encode()
    size = _HEADER_SIZE.pack(len(text))
    body = zlib.compress(b"".join([size, text, *parts]), 1)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def unpack(body: bytes, room: int) -> tuple[Chunk, int]:
    """Return the header and the arrays of a chunk, and how many of so many bytes they take."""
    inflater = zlib.decompressobj()
    raw = memoryview(inflater.decompress(body, room))
    (size,) = _HEADER_SIZE.unpack_from(raw)
    taken = len(raw) + _PARSED * size
    if not inflater.eof or taken > room:
        raise ValueError("it takes more memory than a file of this size may")
    end = _HEADER_SIZE.size + size
    whole = json.loads(bytes(raw[_HEADER_SIZE.size : end]))
    arrays = {}
    for name, dtype, shape in whole["arrays"]:
        element = np.dtype(dtype)
        count = math.prod(shape)
        start, end = end, end + count * element.itemsize
        planes = np.frombuffer(raw[start:end], np.uint8)
        planes = planes.reshape(element.itemsize, count)
        values = np.array(planes.T, order="C")
        # NumPy refuses to see objects in bytes: an array of those could run code.
        arrays[name] = values.view(element).reshape(shape)
    return (whole["meta"], arrays), taken


# --- reading ---------------------------------------------------------------------------------


class Reader:
    """Iterate over the chunks of a file written by `Writer`, each a header and its arrays.

    After the last chunk `complete` says whether the file was closed properly, and `end` holds what was said then: a
    file that ends in the middle of a chunk gives what was written before. Raises `LedgerFileError` for a foreign,
    damaged, older or newer file; with `repair` a damaged file gives the chunks before the damage.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        repair: bool = False,
        opened: BinaryIO | None = None,
    ) -> None:
        arguments.file("path", path)
        self.path = Path(path)
        self.repair = repair
        self.complete = False
        self.end: dict[str, Any] = {}
        self._opened = opened

    def __iter__(self) -> Iterator[Chunk]:
        try:
            with self._opened or self.path.open("rb") as file:
                file.seek(0)
                magic = file.read(len(MAGIC))
                if magic != MAGIC:
                    raise LedgerFileError(
                        f"{str(self.path)!r} is not an accumviz file of format {FORMAT} (it starts with {magic!r}); "
                        "pass a file that this version of accumviz has written"
                    )
                yield from self._chunks(file)
        except OSError as error:
            raise LedgerFileError(
                f"cannot open {str(self.path)!r}: {error.strerror or error}"
            ) from error

    def _chunks(self, file: BinaryIO) -> Iterator[Chunk]:
        room = max(_ROOM, _TIMES * os.fstat(file.fileno()).st_size)
        for number, (position, body, checksum) in enumerate(_frames(file), 1):
            try:
                if zlib.crc32(body) != checksum:
                    raise ValueError("its checksum does not match")
                (header, arrays), taken = unpack(body, room)
                room -= taken
            except _WRONG as error:
                if self.repair:
                    return
                raise LedgerFileError(
                    f"{str(self.path)!r} is damaged at byte {position} (chunk {number}: {error}); "
                    f"av.load(path, repair=True) reads the {number - 1} chunks before it"
                ) from error
            # What was written after the closing mark was not written by a recording.
            self.complete = False
            if "end" in header:
                self.end = header["end"]
                self.complete = self.end.pop("complete", True) is True
            else:
                yield header, arrays


def _frames(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """Yield position, body and checksum of each whole chunk."""
    size = os.fstat(file.fileno()).st_size
    while True:
        position = file.tell()
        frame = file.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            return
        length, checksum = _FRAME.unpack(frame)
        # A false length would take as much memory as it says.
        body = file.read(min(length, size))
        if len(body) < length:
            return
        yield position, body, checksum


T = TypeVar("T")


def valid(reader: Reader, decode: Callable[[Reader], T]) -> T:
    """Return what `decode` makes of a file. Raises `LedgerFileError` where its contents do not fit together."""
    try:
        return decode(reader)
    except LedgerFileError:
        raise
    except (*_WRONG, MemoryError) as error:
        raise LedgerFileError(
            f"{str(reader.path)!r} is not a valid ledger: {error!r}"
        ) from error


# --- writing ---------------------------------------------------------------------------------


class Writer:
    """Write chunks to a file as they come; each is in the operating system's hands when `append` returns.

    Nothing happens to the disk before `open` (or the first `append`). It refuses an existing file with
    `FileExistsError`, unless `overwrite` says that a new one takes its place.

    What the disk refuses, and a file that was deleted or cut short meanwhile, raise `OSError`: the file
    then ends with its last whole chunk, and a later `append` tries again. In a process forked from the
    one that opened it, nothing is written. One thread at a time may call.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "x.ledger")
    >>> writer = Writer(path)
    >>> writer.append({"n": 1}, {"a": np.array([1.5, float("nan")])})
    >>> writer.close()
    >>> list(Reader(path))
    [({'n': 1}, {'a': array([1.5, nan])})]
    >>> Writer(path).open()
    Traceback (most recent call last):
    FileExistsError: ... exists already; pass overwrite=True to replace it, or another name
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.overwrite = overwrite
        self.size = 0
        self._file: BinaryIO | None = None
        self._closed = False
        self._process = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process may write: one that was forked leaves the file to its parent."""
        return os.getpid() == self._process

    def open(self) -> None:
        """Begin the file. Raises `FileExistsError`, or another `OSError` where it cannot be written."""
        if self._file is not None or self._closed:
            return
        self._process = os.getpid()
        self.path = self.path.absolute()
        self._file = _create(self.path, self.overwrite)
        try:
            self._write(MAGIC)
        except BaseException:
            self.discard()
            raise

    def append(
        self, header: dict[str, Any], arrays: dict[str, ndarray] | None = None
    ) -> None:
        """Write a chunk, opening the file if need be. Raises `OSError` when the disk refuses it."""
        if self._closed:
            raise ValueError(
                f"{str(self.path)!r} is closed; nothing can be appended to it"
            )
        if self._file is None or self.is_ours:
            self.open()
            self._write(pack(header, arrays or {}))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        about = os.fstat(self._file.fileno())
        if about.st_nlink == 0 or about.st_size < self.size:
            said = "the file was deleted or cut short while it was written"
            raise OSError(errno.EIO, said, str(self.path))
        try:
            self._file.seek(self.size)  # wherever a reader has moved
            left = memoryview(data)
            while left:  # where the disk took only a part, the second try says why
                left = left[self._file.write(left) :]
        except OSError as error:
            error.filename = str(self.path)
            with contextlib.suppress(OSError):
                self._file.truncate(self.size)
            raise
        self.size += len(data)

    def read(self) -> Reader:
        """Return the chunks that were written so far.

        Raises `LedgerFileError` where the file was moved or changed after it was closed.
        """
        opened = None
        if self._file is not None and not self._closed:
            opened = os.fdopen(os.dup(self._file.fileno()), "rb")
        elif not self.path.exists() or self.path.stat().st_size != self.size:
            raise LedgerFileError(
                f"{str(self.path)!r}, which holds what was recorded, was moved or changed since; "
                "load it with av.load(...) from where it is now"
            )
        return Reader(self.path, repair=True, opened=opened)

    def close(self, **end: Any) -> None:
        """Mark the file as closed and close it; `end` is kept as `Reader.end`.

        With `complete=False` what it holds counts as incomplete all the same.
        Raises `OSError` when the disk refuses the mark; the file is closed even then.
        """
        try:
            if self._file is not None and not self._closed and self.is_ours:
                self._write(pack({"end": end}, {}))
        finally:
            self.abandon()

    def discard(self) -> None:
        """Close the file without the mark, and delete it."""
        if self._file is not None and self.is_ours:
            self.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is, without the mark."""
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def __del__(self) -> None:
        # What it needs may be gone before it at the interpreter's end.
        with contextlib.suppress(Exception):
            self.abandon()


def save(
    path: str | Path,
    chunks: Iterable[Chunk],
    *,
    overwrite: bool,
    **end: Any,
) -> None:
    """Write a whole file, which appears at `path` when it is finished; `overwrite` as for `Writer`."""
    target = Path(path).absolute()
    if target.exists() and not overwrite:
        raise _exists(target)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.new")
    writer = Writer(unfinished, overwrite=True)
    try:
        for header, arrays in chunks:
            writer.append(header, arrays)
        writer.close(**end)
        unfinished.replace(target)
    except BaseException:
        writer.discard()
        raise


def _create(path: Path, overwrite: bool) -> BinaryIO:
    """Create a file that can be read as well."""
    if overwrite and path.is_file():
        path.unlink()
    try:
        return path.open("x+b", buffering=0)
    except FileExistsError:
        raise _exists(path) from None
    except ValueError as error:  # half of a character
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def _exists(path: Path) -> FileExistsError:
    said = f"{str(path)!r} exists already; pass overwrite=True to replace it, or another name"
    return FileExistsError(said)


# --- a ledger as chunks ------------------------------------------------------------------------


def described(
    parameters: Iterable[Parameter], kept: Iterable[int], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a file says of its parameters and of the recording; said again, it replaces what was said before.

    Elements are kept of the parameters with the numbers `kept`.
    """
    return {
        "parameters": list(map(asdict, parameters)),
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


def blocks(reader: Reader, about: dict[str, Any]) -> Iterator[Block]:
    """Yield what a file holds of events, and put into `about` what it says of all of them."""
    sources = about.setdefault("sources", {})
    for header, arrays in reader:
        sources |= header.pop("sources", {})
        tables = header.pop("tables", None)
        about |= header
        if tables is not None:
            codes, numbers = (
                np.ascontiguousarray(arrays.pop(name).T)
                for name in ("codes", "numbers")
            )
            yield Block(Events(codes, numbers, tables), **arrays)


Kind = TypeVar("Kind", bound=Arrays)


def decode(reader: Reader, kind: type[Kind]) -> Kind:
    """Return the ledger in a file."""
    about: dict[str, Any] = {}
    parts = list(blocks(reader, about))
    if "parameters" not in about:
        raise ValueError("it ends before its parameters: nothing was recorded in it")
    meta = about["meta"] | reader.end
    if not all(isinstance(meta.get(name, 0), int) for name in ("rank", "ranks")):
        raise ValueError("its rank is no number")
    parameters = list(map(_parameter, about["parameters"]))
    kept = about["kept"]
    elements = sum(parameters[p].numel for p in kept)
    block = join(parts or [Block.empty(len(parameters), elements)])
    if block.weighed.size == 0:
        block.weights = np.zeros((0, elements))
    return kind.of_block(
        parameters,
        kept,
        block,
        sources=about["sources"],
        meta=meta,
        complete=reader.complete,
    )


def _parameter(row: dict[str, Any]) -> Parameter:
    for name in ("shape", "aliases", "optimizers"):
        row[name] = tuple(row[name])
    return Parameter(**row)
