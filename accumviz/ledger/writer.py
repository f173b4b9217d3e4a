"""Writes the chunks of a file as they come, beside whoever else may want to write there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from accumviz.ledger.container import FORMAT, MAGIC, LedgerFileError, Reader, frame

try:
    import fcntl
except (
    ImportError
):  # Windows: there, writers of one process know of each other, those of several do not
    fcntl = None  # type: ignore[assignment]


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

    def __init__(
        self,
        path: str | Path,
        kind: str,
        *,
        overwrite: bool = False,
        whole: bool = False,
    ) -> None:
        self.path, self.kind, self.overwrite, self.whole = (
            Path(path),
            kind,
            overwrite,
            whole,
        )
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
        return (
            self.size > 0
            and self._about is not None
            and stat.S_ISREG(self._about.st_mode)
        )

    def open(self) -> None:
        """Begin the file. Raises `FileExistsError`, or another `OSError` where it cannot be written."""
        if self._file is not None or self._closed:
            return
        self._process = os.getpid()
        try:
            self._target = self._at = self.path.resolve()
        except (
            ValueError,
            RuntimeError,
        ) as error:  # half of a character, a circle of links
            raise OSError(errno.EINVAL, str(error), str(self.path)) from error
        there = _mode(self._target)
        if there is not None and (stat.S_ISCHR(there) or stat.S_ISFIFO(there)):
            self._begin(os.open(self._target, os.O_WRONLY | _BINARY))
            return
        if there is not None and stat.S_ISDIR(there):
            raise IsADirectoryError(
                errno.EISDIR, os.strerror(errno.EISDIR), str(self.path)
            )
        if there is not None and not self.overwrite:
            raise FileExistsError(_refusal(self.path, self._target))
        try:
            self._replace() if there is not None or self.whole else self._begin(
                _create(self._target)
            )
        except FileExistsError:
            raise FileExistsError(_refusal(self.path, self._target)) from None
        except OSError as error:
            if error.errno is None:
                raise
            # Named as it was given.
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _replace(self) -> None:
        """Begin a file beside the one that is there, and put it in its place."""
        with _locked(self._target, self.path):
            if (
                os.name == "nt" and not self.whole
            ):  # there, an open file cannot be moved
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

    def append(
        self, meta: dict[str, Any], arrays: dict[str, np.ndarray] | None = None
    ) -> None:
        """Write a chunk, opening the file if need be. Raises `OSError` when the disk refuses it."""
        if self._file is not None and os.getpid() != self._process:
            return
        if self._closed:
            raise ValueError(
                f"{str(self.path)!r} is closed; nothing can be appended to it"
            )
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
        if known is None or (there.st_dev, there.st_ino, there.st_size) != (
            known.st_dev,
            known.st_ino,
            self.size,
        ):
            raise LedgerFileError(
                f"{str(self.path)!r}, which held what was recorded, was replaced or changed since; "
                "load what is there now with av.load(...)"
            )
        return Reader(self._target, repair=True)

    def _pack(
        self, meta: dict[str, Any], arrays: dict[str, np.ndarray] | None = None
    ) -> bytes:
        framed, self._weight = frame(
            meta, arrays or {}, self.kind, self._weight, self.size
        )
        return framed

    def _write(self, data: bytes) -> None:
        descriptor = self._file
        assert descriptor is not None
        about = os.fstat(descriptor)
        if not self._nameless and about.st_nlink == 0:
            raise FileNotFoundError(
                f"{str(self.path)!r} was deleted while it was written"
            )
        if stat.S_ISREG(about.st_mode) and about.st_size < self.size:
            # Written on at our offset, it would have a hole that reads as zeros.
            raise OSError(
                errno.EIO, "the file was cut short while it was written", str(self.path)
            )
        try:
            written = os.write(descriptor, data)
            while written < len(
                data
            ):  # the disk took a part of it; a second try says why
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
        if (
            self._file is not None
            and not self._closed
            and os.getpid() == self._process
            and not self._released
        ):
            self._released = True
            _WRITTEN.discard(self._target)
            if (
                fcntl is not None
            ):  # a child that was forked meanwhile would keep the lock as long as it lives
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
        except (
            Exception
        ):  # what it needs may be gone before it at the interpreter's end
            return

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
def _locked(target: Path, path: Path) -> Iterator[None]:
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
