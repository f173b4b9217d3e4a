"""Append-only, versioned files for ledgers and graphs: JSON and raw numbers, never pickle, safe to open.

A file is a magic line and then chunks. A chunk is its length, its CRC-32 and a zlib-compressed
body: one JSON header and the bytes of its arrays. A killed process loses at most the chunk it
was writing.

Opening a file takes at most 256 MiB and 128 times its size, whatever it claims: a chunk is
refused before it is inflated further, and its JSON before it is parsed. The writer keeps to
that bound: what compresses better is padded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

try:
    import fcntl
except ImportError:  # Windows: there, writers of one process know of each other, those of several do not
    fcntl = None  # type: ignore[assignment]

MAGIC = b"accumviz\n"
FORMAT = 2
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


class LedgerFileError(ValueError):
    """A file that cannot be read as a ledger or a graph; the message says why and what to do."""


class Writer:
    """Write chunks to a file as they come; each is in the operating system's hands when `append` returns.

    Nothing happens to the disk before `open` (or the first `append`). It refuses a file that is
    there with `FileExistsError`, unless `overwrite`; that file is then replaced by a new one that
    begins well, never emptied. It also refuses a file that another writer, of any process, has
    open, even with `overwrite`. With `whole`, nothing stands at `path` before `close`.

    What the disk refuses, and a file that was deleted meanwhile, raise `OSError`: the file then
    ends with the last whole chunk, and a later `append` tries again. A process forked from the one
    that opened it can `read`, up to what was written then; there, the other methods do nothing.
    One thread at a time may call.

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

    def __init__(self, path: str | Path, kind: str, *, overwrite: bool = False, whole: bool = False) -> None:
        self.path, self.kind, self.overwrite, self.whole = Path(path), kind, overwrite, whole
        self.size = self._weight = 0
        self._file: int | None = None
        self._process = os.getpid()
        self._closed = False
        # What tells the file from another of its name, once it is closed.
        self._about: os.stat_result | None = None
        # Where the bytes go now, and where they go in the end, symbolic links resolved.
        self._at = self._target = Path()

    @classmethod
    def temporary(cls, kind: str) -> Writer:
        """A file that only this writer can read, and that goes with it, or with its process however that ends."""
        descriptor, name = tempfile.mkstemp(prefix="accumviz-")
        if hasattr(os, "O_TEMPORARY"):  # Windows deletes it with its last descriptor
            os.close(descriptor)
            descriptor = os.open(name, os.O_RDWR | os.O_TEMPORARY | _BINARY)
        else:
            Path(name).unlink()
        writer = cls(name, kind)
        writer._nameless = True
        writer._begin(descriptor)
        return writer

    _nameless = _released = False

    @property
    def can_be_read(self) -> bool:
        """Whether `read` gives what was written: something was, and not to a pipe or a device."""
        return self.size > 0 and self._about is not None and stat.S_ISREG(self._about.st_mode)

    def open(self) -> None:
        """Begin the file. Raises `FileExistsError`, or another `OSError` where it cannot be written."""
        if self._file is not None or self._closed:
            return
        self._process = os.getpid()
        try:
            self._target = self._at = self.path.resolve()
        except (ValueError, RuntimeError) as error:  # half of a character, a circle of links
            raise OSError(errno.EINVAL, str(error), str(self.path)) from error
        there = _mode(self._target)
        if there is not None and (stat.S_ISCHR(there) or stat.S_ISFIFO(there)):
            self._begin(os.open(self._target, os.O_WRONLY | _BINARY))
            return
        if there is not None and stat.S_ISDIR(there):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path))
        if there is not None and not self.overwrite:
            raise FileExistsError(_refusal(self.path, self._target))
        try:
            self._replace() if there is not None or self.whole else self._begin(_create(self._target))
        except FileExistsError:
            raise FileExistsError(_refusal(self.path, self._target)) from None
        except OSError as error:
            if error.errno is None:
                raise
            # Named as it was given.
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _replace(self) -> None:
        """Begin a file beside the one that is there, and put it in its place."""
        with _held(self._target, self.path):
            if os.name == "nt" and not self.whole:  # there, an open file cannot be moved
                self._target.unlink()
                self._begin(_create(self._target))
                return
            self._at = self._target.with_name(f".{self._target.name}.{os.getpid()}.new")
            self._at.unlink(missing_ok=True)  # left by a process that was killed
            self._begin(_create(self._at))
            if not self.whole:
                try:
                    self._at.replace(self._target)
                except OSError:
                    self.discard()
                    raise
                self._at = self._target

    def _begin(self, descriptor: int) -> None:
        # A bare descriptor: a file object would complain when it goes before it is closed.
        self._file, self._about = descriptor, os.fstat(descriptor)
        if not self._nameless:
            _WRITTEN.add(self._target)
        try:
            # On some network disks there are no locks, and nothing better.
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(MAGIC + self._pack({"format": FORMAT, "kind": self.kind}))
        except BaseException:
            self.discard()
            raise

    def append(self, meta: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        """Write a chunk, opening the file if need be. Raises `OSError` when the disk refuses it."""
        if self._file is not None and os.getpid() != self._process:
            return
        if self._closed:
            raise ValueError(f"{str(self.path)!r} is closed; nothing can be appended to it")
        self.open()
        self._write(self._pack(meta, arrays))

    def read(self) -> Reader:
        """The chunks that were written so far; while it is open, also those of a file that was deleted meanwhile.

        Raises `LedgerFileError` when the file was deleted or replaced after it was closed.
        """
        if self._file is not None and not self._closed:
            return Reader(self.path, repair=True, descriptor=self._file, size=self.size)
        try:
            there = self._target.stat()
        except OSError as error:
            raise LedgerFileError(
                f"{str(self.path)!r}, which holds what was recorded, is not there any more "
                f"({error.strerror or error}); load it with av.load(...) from where it is now"
            ) from error
        known = self._about
        if known is None or (there.st_dev, there.st_ino, there.st_size) != (known.st_dev, known.st_ino, self.size):
            raise LedgerFileError(
                f"{str(self.path)!r}, which held what was recorded, was replaced or changed since; "
                "load what is there now with av.load(...)"
            )
        return Reader(self._target, repair=True)

    def _pack(self, meta: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> bytes:
        body, weight = _pack(meta, arrays or {}, _WEIGHTS.get(self.kind, 1))
        self._weight += weight
        # What is so regular that the reader would take it for a bomb is given the size that it may have.
        body = body.ljust((self._weight - _ROOM) // _RATIO + len(MAGIC) + 1 - self.size, b"\0")
        return _FRAME.pack(len(body), zlib.crc32(body)) + body

    def _write(self, data: bytes) -> None:
        descriptor = self._file
        assert descriptor is not None
        if not self._nameless and os.fstat(descriptor).st_nlink == 0:
            raise FileNotFoundError(f"{str(self.path)!r} was deleted while it was written")
        try:
            written = os.write(descriptor, data)
            while written < len(data):  # the disk took a part of it; a second try says why
                written += os.write(descriptor, memoryview(data)[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self.size)
                os.lseek(descriptor, self.size, os.SEEK_SET)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.size += len(data)

    def close(self, **end: Any) -> None:
        """Mark the file as closed and close it; `end` is what its `meta` says more, such as `stopped="why"`.

        With `complete=False` what it holds counts as incomplete all the same.
        Raises `OSError` when the disk refuses the mark; the file is closed even then.
        """
        if self._file is None or self._closed:
            self._closed = True
            return
        try:
            if os.getpid() == self._process:
                self._write(self._pack({"end": end}))
        except OSError:
            if self.whole:
                self.discard()
            raise
        finally:
            self.abandon()
        if self._at != self._target and os.getpid() == self._process:
            try:
                if not self.overwrite and _mode(self._target) is not None:
                    raise FileExistsError(_refusal(self.path, self._target))
                self._at.replace(self._target)
            except OSError:
                self._at.unlink()
                raise

    def discard(self) -> None:
        """Close the file without the mark, and delete it if this writer made it and has not finished."""
        if self._file is None or self._closed:
            self._closed = True
            return
        if os.getpid() == self._process and stat.S_ISREG(os.fstat(self._file).st_mode):
            with contextlib.suppress(OSError):
                self._at.unlink()
        self.abandon()

    def release(self) -> None:
        """Let others write to `path`: this writer will not. What it wrote can still be read."""
        if self._file is not None and not self._closed and os.getpid() == self._process and not self._released:
            self._released = True
            _WRITTEN.discard(self._target)
            if fcntl is not None:  # a child that was forked meanwhile would keep the lock as long as it lives
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def abandon(self) -> None:
        """Close the file as it is, without the mark."""
        if self._file is None or self._closed:
            return
        self.release()
        self._closed = True
        with contextlib.suppress(OSError):
            os.close(self._file)

    def __del__(self) -> None:
        try:
            self.abandon()
        except Exception:  # what it needs may be gone before it at the interpreter's end
            return

    def __enter__(self) -> Writer:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


_BINARY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# The files being written by this process: what a lock says where there are locks.
_WRITTEN: set[Path] = set()


def _create(path: Path) -> int:
    # To be read as well: a recording reads back what it has written, even when the file was deleted.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError:
        return None


def _in_use(path: Path) -> bool:
    """Whether a writer has this file open: asked by trying to lock it."""
    if path in _WRITTEN:
        return True
    if fcntl is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _refusal(path: Path, target: Path) -> str:
    if _in_use(target):
        return f"{str(path)!r} is being written by another recording; pass another name"
    return f"{str(path)!r} exists already; pass overwrite=True to replace it, or another name"


@contextlib.contextmanager
def _held(target: Path, path: Path) -> Iterator[None]:
    """Keep other writers off the file that is about to be replaced."""
    if target in _WRITTEN:
        raise FileExistsError(_refusal(path, target))
    descriptor = None
    try:
        if fcntl is not None and _mode(target) is not None:
            with contextlib.suppress(PermissionError):
                descriptor = os.open(target, os.O_RDONLY)
            if descriptor is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise FileExistsError(_refusal(path, target)) from None
                except OSError:  # no locks on this disk
                    pass
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


class Reader:
    """The chunks of a file written by `Writer`, one at a time, each a header and its arrays.

    `kind` is there at once. After the last chunk `complete` says whether the file was closed
    properly, and `end` what was said then: a file that ends in the middle of a chunk (its process
    was killed) gives what was written before. Raises `LedgerFileError` for a foreign, newer or corrupt file;
    with `repair` a corrupt file gives the chunks before the damage.
    """

    def __init__(
        self, path: str | Path, *, repair: bool = False, descriptor: int | None = None, size: int | None = None
    ) -> None:
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
            with self.path.open("rb") if self._descriptor is None else _Open(self._descriptor) as file:
                yield from self._read_from(file)
        except OSError as error:
            raise LedgerFileError(f"cannot open {str(self.path)!r}: {error.strerror or error}") from error
        except MemoryError as error:
            raise LedgerFileError(f"{self.path.name!r} needs more memory than there is") from error

    def _read_from(self, file: BinaryIO | _Open) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise LedgerFileError(f"{self.path.name!r} is not a file")
        # Of a file that is open, what was written when it was asked for: another process may write on.
        size = about.st_size if self._size is None else min(self._size, about.st_size)
        magic = file.read(max(len(MAGIC), 12))
        if magic[: len(MAGIC)] != MAGIC:
            shown = "it is empty" if not magic else f"it starts with {magic[:12]!r}"
            raise LedgerFileError(
                f"{self.path.name!r} is not an accumviz file ({shown}, expected {MAGIC!r}); "
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
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error, zlib.error) as error:
                if self.repair and number:
                    return
                raise LedgerFileError(
                    f"{self.path.name!r} is damaged at byte {position} (chunk {number}: {error}); "
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
            raise LedgerFileError(f"{self.path.name!r} ends before its first chunk: nothing was recorded in it")

    def _begin(self, meta: dict[str, Any]) -> None:
        found, kind, name = meta.get("format"), meta.get("kind"), self.path.name
        if type(found) is not int or not isinstance(kind, str):
            raise LedgerFileError(f"{name!r} has no format number: it is not a whole accumviz file")
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


def load(path: str | Path, *, repair: bool = False) -> Any:
    """Read a ledger or a graph from the file that `save` or `record(..., path=...)` wrote.

    Opening a file runs nothing that is in it, and takes at most 256 MiB and 128 times its size of
    memory. A process that was killed leaves what it had recorded, and `ledger.complete` is False.
    Raises `LedgerFileError` for a file that is neither, is newer than this accumviz, or is damaged;
    `repair=True` then gives what stands before the damage.

    >>> import os, tempfile, accumviz as av
    >>> path = os.path.join(tempfile.mkdtemp(), "run.ledger")
    >>> av.Ledger.build([], [dict(kind="backward", label="loss")]).save(path)
    >>> av.load(path).of("backward")[0].label
    'loss'
    """
    from accumviz import given, graphfile, ledgerfile

    given.file("path", path)
    given.flag("repair", repair)
    reader = Reader(path, repair=repair)
    decoders: dict[str, Any] = {"ledger": ledgerfile.decode, "graph": graphfile.decode}
    if reader.kind not in decoders:
        raise LedgerFileError(f"{reader.path.name!r} holds a {reader.kind!r}; expected a ledger or a graph")
    try:
        return decoders[reader.kind](reader)
    except LedgerFileError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise LedgerFileError(f"{reader.path.name!r} is not a valid {reader.kind}: {error!r}") from error
    except MemoryError as error:
        raise LedgerFileError(f"{reader.path.name!r} needs more memory than there is") from error


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


def _pack(meta: dict[str, Any], arrays: dict[str, np.ndarray], weight: int) -> tuple[bytes, int]:
    columns, parts, size = [], [], 0
    for name, array in arrays.items():
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, expected one of {_DTYPES}")
        columns.append([name, array.dtype.str, list(array.shape)])
        # Bytes of equal weight side by side: exponents repeat, so zlib finds much more.
        flat = np.ascontiguousarray(array).view(np.uint8)
        parts.append(flat.reshape(-1, array.itemsize).T.tobytes() if array.size else b"")
        size += array.nbytes
    head = json.dumps({"meta": meta, "arrays": columns}, separators=(",", ":")).encode()
    return zlib.compress(_HEAD.pack(len(head)) + head + b"".join(parts), 1), weight * size + _weight(head)


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


def _unpack(body: bytes, room: _Room, weight: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
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
        if not all(type(side) is int and 0 <= side < 1 << 48 for side in shape) or len(shape) > 8:
            raise ValueError(f"array {name!r} has no shape: {str(shape)[:100]}")
        kind, count = np.dtype(dtype), 1
        for side in shape:
            count *= side
        room.take(weight * count * kind.itemsize)
        planes = np.frombuffer(stream.read(count * kind.itemsize), np.uint8)
        arrays[name] = np.ascontiguousarray(planes.reshape(kind.itemsize, count).T).view(kind).reshape(shape)
        del planes
    return header["meta"], arrays
