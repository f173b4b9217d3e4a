"""Keep the events of an open recording in memory, or write them to its file as they come."""

from __future__ import annotations

import contextlib
import errno
import json
import linecache
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accumviz.graph.graph import Graph
from accumviz.ledger import file as ledgerfile
from accumviz.ledger.container import LedgerFileError, Writer
from accumviz.ledger.events import CODES, PRESENT, TABLES, Events, Parameter
from accumviz.ledger.ledger import Ledger
from accumviz.recorder.callsite import CallSite, needs, only
from accumviz.recorder.memory import Allocated
from accumviz.recorder.rows import Backward, Columns, Row, RowLayout
from accumviz.recorder.transfer import Wire

# A cell or a script, not a generated file: the player shows the code beside what it did.
_LONGEST_SOURCE = 200_000
# A chunk has room for so many events, and for so many numbers of large parameters.
_EVENTS, _NUMBERS = 2048, 200_000
# In memory, so many rows are put away at a time: one by one, the code that does it has left the cache in between.
_TOGETHER = 24
# A file has each event after so many, and after so many seconds.
_FILE_EVENTS, _SECONDS = 256, 0.5
# What a recording without a file may hold in memory; the rest goes to a temporary one.
ROOM = 64 << 20

# What a disk says that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Buffer:
    """Events between the training loop and the ledger.

    A row is `pending` until it is done, its numbers have arrived and those before it are away; it
    then becomes a row of the open columns. Those are closed when they are full, or when a file has
    waited long enough, and written: to the file, or kept until there are more than `ROOM` bytes of
    them, and then written to a temporary file. Nothing is recorded in a process forked from
    this one, and the writer leaves the file to its parent.
    """

    def __init__(
        self,
        sizes: list[int],
        small: list[int],
        wire: Wire,
        allocated: Allocated,
        about: Callable[[], tuple[list[Parameter], dict[str, Any]]],
        *,
        path: str | Path | None = None,
        overwrite: bool = False,
        sources: bool = False,
    ) -> None:
        self._wire, self._allocated, self._about, self._whole_sources = (
            wire,
            allocated,
            about,
            sources,
        )
        self.start = time.perf_counter()
        self.pending: list[Row] = []
        self.present: bytes | bytearray = bytes(
            len(sizes)
        )  # the PRESENT bits after the last row that is away
        self.lost = ""  # why there is no file any more
        self._count, self._sizes = len(sizes), sizes
        ends = np.cumsum([sizes[p] for p in small]).tolist()
        self._slices = {
            p: slice(end - sizes[p], end) for p, end in zip(small, ends, strict=True)
        }
        self._elements = ends[-1] if ends else 0
        self._away = 0  # rows that are in columns
        self._bulk = max(64, min(_EVENTS, _NUMBERS // max(self._count, 1)))
        self._writer = (
            None if path is None else Writer(path, "ledger", overwrite=overwrite)
        )
        self._least = (
            _TOGETHER if path is None else 0
        )  # with fewer rows nothing is to be done
        self._graphs: dict[int, Graph] = {}
        self._chunks: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
        self._bytes, self._room = 0, float(ROOM)
        self._temporary = False
        self._written: list[Writer] = []  # files that take no more, but are read
        self._given_up = False
        self._process = os.getpid()
        self._asked = -math.inf  # when a device was asked what has arrived
        self._end: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._flusher: threading.Timer | None = None
        self._said: Any = None
        self._ledger: tuple[Any, Ledger] | None = None
        # By file: the lines that events stand on, and those that these need; and its text, until they are written.
        self._lines: dict[str, tuple[set[int], set[int]]] = {}
        self._texts: dict[str, str] = {}
        # By line, kind and how many leaves are alike, the last event's label, whereabouts and details, and the codes
        # that these became; what it filled, and the shape that this became.
        self._last: dict[
            tuple[int, str, int],
            tuple[tuple[Any, ...], bytes, tuple[Any, ...], RowLayout],
        ] = {}
        self._met: dict[
            int, CallSite
        ] = {}  # lines whose text was looked for since the last chunk
        self._begin(
            np.full(self._count, np.nan, np.float32), np.full(self._elements, np.nan)
        )

    def _begin(self, grad: np.ndarray, exact_grad: np.ndarray) -> None:
        self._columns = Columns(self._count, self._slices, grad, exact_grad)
        self._tables: dict[str, dict[str, int]] = {name: {} for name in TABLES}
        self._last.clear()
        self._met.clear()
        self._since = time.monotonic()

    def __len__(self) -> int:
        with self._lock:  # a thread that writes takes rows from one to the other
            return self._away + len(self.pending)

    # --- from rows to columns ------------------------------------------------------------------

    def begin(
        self,
        kind: str,
        label: str,
        site: CallSite,
        within: str,
        details: dict[str, Any],
        changed: Sequence[int] = (),
    ) -> Row:
        """A new event, which takes its place when it begins to take effect."""
        row = Row(kind, label, site, time.perf_counter() - self.start, within, details)
        if changed:
            row.changed = changed
        self.pending.append(row)
        return row

    def finish(self, row: Row) -> None:
        """This row is whole, but for what a device still sends."""
        if self._allocated.devices:
            row.allocated, row.peak = self._allocated.after()
            row.measured = True
        site = row.site
        if id(site) not in self._met:
            # Here, not in the thread that writes: keeping the parser's warnings to ourselves concerns all threads.
            self._meet(site)
        row.done = True
        if len(self.pending) >= self._least:
            self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Put away the rows whose numbers have arrived, many at a time; with `wait`, all that are done."""
        pending = self.pending
        if not wait:
            in_memory = self._writer is None or self._temporary
            if (
                (in_memory and len(pending) < min(_TOGETHER, self._bulk))
                or not pending
                or not pending[0].done
            ):
                return
            if pending[0].sent:
                if not self._worth_asking():
                    return
            elif (
                not in_memory
                and len(pending) < _TOGETHER
                and time.monotonic() - self._since < _SECONDS
            ):
                self._flush_later()
                return
        self._put_away(wait=wait)

    def _put_away(self, *, wait: bool = False, sent: bool = True) -> None:
        """Likewise, however few there are; without `sent`, up to the first that a device sends something."""
        pending = self.pending
        with self._lock:
            there, ready = -1, 0
            for row in pending:
                if not row.done or (row.sent and not sent):
                    break
                if row.sent:
                    if there < 0:
                        there = self._wire.wait() if wait else self._wire.arrived()
                    if row.sent > there:
                        break
                ready += 1
            moved = 0
            try:
                for row in pending[:ready]:
                    self._put(row, self._away + moved)
                    moved += 1
            finally:
                self.present = pending[moved - 1].present if moved else self.present
                del pending[:moved]  # another thread may have added some meanwhile
                self._away += moved
            if self._writer is not None:
                self._write_soon()

    def _worth_asking(self) -> bool:
        """Whether to ask a device what has arrived: for many events at once, or because a file waits for them."""
        if len(self.pending) < self._bulk:
            if (
                self._writer is None
                or self._temporary
                or time.monotonic() - self._asked < _SECONDS
            ):
                return False
            self._asked = time.monotonic()
        return True

    def _write_soon(self) -> None:
        """Write by count and by time, also when no event comes: a loop that pauses loses no more than one that runs."""
        if self._temporary or not self._columns.rows:
            return
        if (
            self._columns.rows >= _FILE_EVENTS
            or time.monotonic() - self._since > _SECONDS
        ):
            self._close_columns()
        else:
            self._flush_later()

    def _flush_later(self) -> None:
        if self._flusher is not None:
            return
        flusher = threading.Timer(_SECONDS, _flush, (weakref.ref(self),))
        flusher.daemon = True
        # No new thread can be had while the interpreter ends, nor beyond a limit: the next event asks again.
        with contextlib.suppress(RuntimeError):
            flusher.start()
            self._flusher = flusher

    def flush(self) -> None:
        """Write what is there, whoever asks; a device is not asked, which may be in the middle of a capture."""
        with self._lock:
            self._flusher = None
            if not self._given_up:
                self._put_away(sent=False)
                if self._columns.rows:
                    self._close_columns()

    def _put(self, row: Row, index: int) -> None:
        if type(row) is Backward and row.graph is not None:
            self._graphs[index] = row.graph
        if row.host:
            row.arrive()
        # Most events say what the last one on the same line said.
        site, columns = row.site, self._columns
        said = site, row.label, row.within, row.details
        # A window's first backward, which finds no `.grad`, has another shape than those after it.
        key = id(site), row.kind, len(row.alike)
        filled = (
            row.present,
            row.changed,
            row.contributed,
            row.alike,
            row.unmeasured,
            row.targets,
        )
        known = self._last.get(key)
        if known is None or known[0] != said:
            known = self._last[key] = said, self._codes(row), filled, columns.shape(row)
        elif known[2] != filled:
            known = self._last[key] = said, known[1], filled, columns.shape(row)
        columns.put(row, known[1], known[3])
        if columns.rows == self._bulk:
            self._close_columns()

    def _meet(self, site: CallSite) -> None:
        self._met[id(site)] = site
        if site.path:
            lines, kept = self._lines.get(site.file, (set(), set()))
            if site.line not in lines:
                text = "".join(linecache.getlines(site.path))
                text = text if len(text) <= _LONGEST_SOURCE else ""
                news = set() if self._whole_sources else needs(text, site.line)
                # Replaced, never changed: another thread may be writing what was there.
                self._lines[site.file] = {*lines, site.line}, kept | news
                self._texts[site.file] = text

    def _codes(self, row: Row) -> bytes:
        tables, site = self._tables, row.site
        codes = (
            _place(tables["kind"], row.kind),
            _place(tables["label"], row.label),
            _place(tables["file"], site.file),
            site.line,
            _place(tables["source"], site.source),
            _place(tables["within"], row.within),
            -1,
            _place(tables["details"], self._detailed(row.details)),
            _place(tables["frames"], json.dumps(site.frames, separators=(",", ":"))),
            _place(tables["via"], site.via),
        )
        return np.array(codes, np.int32).tobytes()

    def _detailed(self, details: dict[str, Any]) -> str:
        if not details:
            return "{}"
        return json.dumps(
            {name: _plain(value) for name, value in details.items()},
            separators=(",", ":"),
        )

    def expect(self, running: Backward) -> None:
        """Count what a backward had yet to bring as there already in the rows that happened while it ran.

        Its own row stands before them with all it brought: a `.grad` may not be gone in between.
        """
        inner = self.pending[self.pending.index(running) + 1 :]
        if not inner:
            return
        last, first = len(self), len(self) - len(inner)
        settled = {i: running.settled.get(i, last) for i in running.reached}
        self._add_present(
            running, [i for i, number in settled.items() if number < last]
        )
        for number, row in enumerate(inner, first):
            if row.within == "backward" and row.done:
                late = [i for i, at in settled.items() if at > number]
                self._add_present(row, [i for i in late if not running.had[i]])

    def _add_present(self, row: Row, leaves: list[int]) -> None:
        present = bytearray(row.present)
        for i in leaves:
            present[i] = PRESENT
        row.present = bytes(present)

    # --- from columns to chunks ----------------------------------------------------------------

    def _close_columns(self) -> None:
        """Make the open columns a chunk, write it, and begin new ones."""
        head, arrays, grad, exact_grad = self._chunk()
        head |= self._news()
        self._begin(grad, exact_grad)
        self._keep(head, arrays)

    def _chunk(
        self,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """The open columns as a chunk, and what `.grad` is after its last event."""
        columns, rows = self._columns, self._columns.rows
        (measured, state, contribution, exact, grad, exact_grad), weighed = (
            columns.arrays()
        )
        events = Events(
            np.frombuffer(columns.codes, np.int32).reshape(rows, len(CODES)),
            measured,
            {name: tuple(table) for name, table in self._tables.items()},
        )
        elements = {
            p: (exact[:, where], exact_grad[1:, where])
            for p, where in self._slices.items()
        }
        head, arrays = ledgerfile.pack(
            events, contribution, grad[1:], state, elements, weighed
        )
        return head, arrays, grad[-1].copy(), exact_grad[-1].copy()

    def _news(self) -> dict[str, Any]:
        """What a chunk says beside its events: code that was not shown yet, and what has changed since."""
        news: dict[str, Any] = {}
        texts, self._texts = (
            self._texts,
            {},
        )  # the training may meet a new line meanwhile
        if texts:
            news["sources"] = {
                file: text if self._whole_sources else only(text, self._lines[file][1])
                for file, text in sorted(texts.items())
            }
        said = self._described()
        if said != self._said:
            self._said = said
            news |= ledgerfile.described(*said)
        return news

    def _described(self) -> Any:
        meta: dict[str, Any] = {"stopped": "it did not begin"}
        try:
            said = self._about()
        except Exception:
            if not self._given_up:
                raise
        else:
            if len(said[0]) == self._count:
                return said
            meta |= said[1]
        # It failed while the parameters were let go, or before anything was known of them.
        unknown = [
            Parameter(f"parameter {n}", (size,)) for n, size in enumerate(self._sizes)
        ]
        return self._said or (unknown, meta)

    # --- from chunks to a file -----------------------------------------------------------------

    def open(self) -> None:
        """Begin the file, if there is one, with what is known before the first event."""
        self._said = self._about()
        if self._writer is None:
            return
        try:
            self._writer.open()
            self._writer.append(ledgerfile.described(*self._said))
        except OSError as error:
            if (
                error.errno not in _FULL
            ):  # a name that cannot be: whoever passed it is told
                raise
            self._lose(error)
        except Exception:
            writer, self._writer = self._writer, None
            writer.discard()
            raise

    def _keep(self, head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if self._writer is not None and self._may_write():
            try:
                self._writer.append(head, arrays)
            except OSError as error:
                self._lose(error)
            else:
                if self._writer.can_be_read:
                    return
        self._chunks.append(
            (head, {name: np.array(array) for name, array in arrays.items()})
        )
        self._bytes += sum(array.nbytes for array in arrays.values())
        if self._bytes > self._room and self._writer is None:
            self._spill()

    def _may_write(self) -> bool:
        """Return whether this is the process that records: one forked from it leaves the file to its parent."""
        return os.getpid() == self._process

    def _lose(self, error: OSError) -> None:
        """The disk takes no more: what the file has is read from there, what comes is held in memory."""
        self.stop_writing()
        if self._temporary:
            self._room = math.inf
        self.lost = f"{type(error).__name__}: {error}"

    def stop_writing(self) -> None:
        """Write no more to the file; what it has is still read from there."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.can_be_read:
            self._written.append(writer)

    def _spill(self) -> None:
        """Write what memory holds to a temporary file that goes with the recording."""
        try:
            writer = Writer.temporary("ledger")
            writer.append(ledgerfile.described(*self._described()))
            for head, arrays in self._chunks:
                writer.append(head, arrays)
        except OSError:  # no room there, either: memory is all there is
            self._room = math.inf
        else:
            self._writer, self._temporary = writer, True
            self._chunks, self._bytes = [], 0

    # --- what comes out ------------------------------------------------------------------------

    def graphs(self) -> dict[int, Graph]:
        """The graphs that backwards ran, by event."""
        return dict(self._graphs)

    def ledger(self) -> Ledger:
        """All rows that are done, as a ledger."""
        with self._lock:
            self.settle(wait=True)
            parameters, meta = self._described()
            about = self._away, parameters, meta, self._end
            if self._ledger is None or self._ledger[0] != about:
                if self._columns.rows:
                    self._close_columns()
                writers = (
                    self._written
                    if self._writer is None
                    else [*self._written, self._writer]
                )
                parts = [writer.read() for writer in writers if writer.can_be_read]
                described: list[tuple[dict[str, Any], dict[str, np.ndarray]]]
                described = [(ledgerfile.described(parameters, meta | self._end), {})]
                chunks = self._chunks
                if not self._away:  # even without events a ledger has its columns
                    head, arrays, *_ = self._chunk()
                    chunks = [
                        (
                            head,
                            {name: np.array(array) for name, array in arrays.items()},
                        )
                    ]
                whole = ledgerfile.Parts(described, *parts, chunks, described)
                ledger = Ledger.of_arrays(ledgerfile.decode(whole))
                if len(ledger) < self._away and not self._given_up:
                    raise LedgerFileError(
                        f"only {len(ledger)} of {self._away} events can be read: the file was cut short"
                    )
                self._ledger = about, ledger
            return self._ledger[1]

    def give_up(self) -> None:
        """Keep what is whole, drop what is not, after something of ours has failed: it may do so again."""
        with self._lock:
            self._given_up = True
            self._columns.cut()
            self.pending[:] = [row for row in self.pending if row.done]
            with contextlib.suppress(Exception):
                self._put_away(wait=True)
            if self.pending:
                self.pending.clear()
                self._columns.cut()

    def close(self, **end: Any) -> None:
        """Write what there is; `end` is what the file says last."""
        with self._lock:
            try:
                self.settle(wait=True)
                if self._columns.rows:
                    self._close_columns()
            except Exception:
                if not self._given_up:
                    raise
            self._end = end
            if self._flusher is not None:
                self._flusher.cancel()
                self._flusher = None
            own = not self._temporary and self._may_write()
            if self._writer is not None and own:
                try:
                    self._writer.close(**end)
                except OSError as error:
                    self._lose(error)
                self.stop_writing()

    def is_on_disk(self) -> bool:
        """Whether all that was recorded can be read back from the file, once it is closed."""
        if self.lost:
            return False
        try:
            for writer in self._written:
                writer.read()
        except LedgerFileError:
            return False
        return True


def _place(table: dict[str, int], text: str) -> int:
    found = table.get(text)
    if found is None:
        found = table[text] = len(table)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return (
        value
        if value is None or isinstance(value, bool | int | float | str)
        else repr(value)[:200]
    )


def _flush(buffer: weakref.ref[Buffer]) -> None:
    here = buffer()
    if here is not None:
        with contextlib.suppress(Exception):
            here.flush()
