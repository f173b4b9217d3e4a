"""Turn what happens while a recording is open into columns, which are held in memory or written to its file.

An event is a `Row` until it is done and its numbers have arrived from their device. Rows then become a `Block`, many
at a time.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import linecache
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from accumviz.graph.graph import Graph
from accumviz.ledger import file as ledgerfile
from accumviz.ledger.container import LedgerFileError, Reader, Writer, valid
from accumviz.ledger.events import (
    CHANGED,
    CONTRIBUTED,
    PRESENT,
    TABLES,
    Block,
    Parameter,
    join,
)
from accumviz.ledger.ledger import Ledger
from accumviz.recorder.callsite import CallSite, needs, only
from accumviz.recorder.memory import Allocated
from accumviz.recorder.transfer import Wire, numbers

# A block has at most so many events, and so many numbers of parameters.
_EVENTS, _NUMBERS = 256, 200_000
# A file has each event after so many seconds.
_SECONDS = 0.5
# What a recording without a file may hold in memory; the rest goes to a temporary one.
ROOM = 64 << 20
# A cell or a script, not a generated file: the player shows the code beside what it did.
_LONGEST_SOURCE = 200_000
# What a disk says that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NAN = float("nan")
# What becomes of numbers once they are known.
Put = Callable[[list[float]], None]


class Row:
    """One event on its way to the columns: what is known of it, and which numbers are still to come.

    `changed`, `contributed`, `alike` and `unmeasured` are leaves: those whose `.grad` it changed, those that it added
    to, those whose `.grad` is now what was added, and those to which something of unknown size was added.
    """

    # Class attributes, because most events need few of them and a row is made in the training loop.
    loss, scale = _NAN, 1.0
    before = after = _NAN
    allocated = peak = _NAN
    present: bytes | bytearray = b""
    changed: Sequence[int] = ()
    contributed: Sequence[int] = ()
    alike: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    sent = 0
    done = False

    def __init__(
        self,
        kind: str,
        label: str,
        site: CallSite,
        time: float,
        within: str,
        details: dict[str, Any],
    ) -> None:
        self.kind, self.label, self.site, self.time = kind, label, site, time
        self.within, self.details = within, details
        # What was read ("contribution", "grad" or "weight"), of which leaves, and the numbers.
        self.given: list[tuple[str, tuple[int, ...], list[float]]] = []
        self.late: list[tuple[Put, list[torch.Tensor]]] = []
        self.host: list[tuple[Put, torch.Tensor]] = []

    def give(self, what: str, leaves: Iterable[int], found: list[float]) -> None:
        """Give it numbers of leaves: the norm of each, or (`~leaf`) all its elements."""
        self.given.append((what, tuple(leaves), found))

    def take(self, tensor: torch.Tensor, put: Callable[[float], None]) -> None:
        """Hand one number to `put`, or the sum of several."""
        self._take([tensor], lambda found: put(float(sum(found))))

    def take_leaves(
        self, what: str, leaves: Sequence[int], tensors: list[torch.Tensor]
    ) -> None:
        """Give it the elements of these tensors, of one device and dtype, as numbers of leaves."""
        self._take(tensors, lambda found: self.give(what, leaves, found))

    def _take(self, tensors: list[torch.Tensor], put: Put) -> None:
        """Read tensors as they are now; from a device, with the next `send`."""
        flat = [_flat(tensor) for tensor in tensors]
        if flat[0].is_cpu:
            put([number for one in flat for number in one.reshape(-1).tolist()])
        else:
            self.late.append((put, flat))

    def send(self, wire: Wire) -> None:
        """Send what was taken from devices, before anybody changes it."""
        if self.late:
            puts = [put for put, _ in self.late]
            arriving = wire.send([tensors for _, tensors in self.late])
            self.host += zip(puts, arriving, strict=True)
            self.late, self.sent = [], wire.sent

    def arrive(self) -> None:
        """Take what a device has sent, once it is there."""
        for put, host in self.host:
            put(numbers(host).tolist())
        self.host = []


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    strided = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return strided if strided.dim() < 2 else strided.reshape(-1)


class Sync(NamedTuple):
    """A collective that runs inside a backward: its row, and the leaves that it concerns.

    What it does to their `.grad` is there only when the backward is over. `pieces` are what a reduce-scatter adds to
    them, as long as that was not read; `measured` those of which it was known.
    """

    row: Row
    leaves: list[int]
    pieces: dict[int, torch.Tensor]
    measured: Set[int] = frozenset()


class Backward(Row):
    """A backward that is running: what it started from, and what has reached which leaf so far.

    `had` are the PRESENT bits when it began, `state` is what it has brought to each leaf (`gradients.State`), `reached`
    the leaves in the order in which it came. What is `held` is there in its version; what `arrived` and was not held
    had this place and version. A contribution has been read (`settled`) before the event of that number, and `same` are
    the leaves whose `.grad` is what was contributed. `coming` and `added` are what came, and what `.grad` became,
    before hooks of the user's saw it; `by_hook` are the leaves for which these have changed it.
    """

    keeps = False
    storages: dict[int, int] | None = None
    waiting = 0  # bytes that are held
    nodes: Sequence[Any] = ()
    syncs: Sequence[Sync] = ()
    synced: Set[int] = frozenset()
    graph: Graph | None = None
    finish_graph: Callable[[], Graph] | None = None

    def __init__(
        self, site: CallSite, time: float, within: str, had: bytes, thread: int
    ) -> None:
        super().__init__("backward", site.subject, site, time, within, {})
        self.had, self.thread = had, thread
        self.state = bytearray(len(had))
        self.reached: list[int] = []
        self.held: dict[int, tuple[torch.Tensor, int]] = {}
        self.arrived: dict[int, tuple[int, int] | None] = {}
        self.settled: dict[int, int] = {}
        self.same: list[int] = []
        self.coming: dict[int, tuple[torch.Tensor, int]] = {}
        self.added: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.by_hook: set[int] = set()
        self.streams: set[int] = set()  # on which contributions came


# --- from rows to a block --------------------------------------------------------------------


class Layout:
    """Where numbers stand in a row of the table of all leaves: the norms first, then the elements of small leaves."""

    def __init__(self, sizes: Sequence[int], small: Iterable[int]) -> None:
        self.count = len(sizes)
        self.elements: dict[int, slice] = {}
        owners = list(range(self.count))
        for leaf in small:
            start = len(owners)
            owners += [leaf] * sizes[leaf]
            self.elements[leaf] = slice(start, len(owners))
        # Of each column, the leaf.
        self.owners = np.array(owners, np.intp)

    def places(self, leaves: Iterable[int]) -> list[int]:
        """Return where numbers of these leaves go, as `Row.given` names them."""
        places: list[int] = []
        for leaf in leaves:
            if leaf < 0:
                where = self.elements[~leaf]
                places += range(where.start, where.stop)
            else:
                places.append(leaf)
        return places

    def marked(self, leaves: Sequence[Sequence[int]]) -> np.ndarray:
        """Return rows × leaves: True where a row names a leaf."""
        counts = [len(one) for one in leaves]
        marks = np.zeros((len(leaves), self.count), bool)
        rows = np.repeat(np.arange(len(leaves)), counts)
        named = np.fromiter(itertools.chain.from_iterable(leaves), np.intp, sum(counts))
        marks[rows, named] = True
        return marks

    def fill_norms(self, table: np.ndarray) -> None:
        """Put the norms of leaves whose elements are known where those of the others are."""
        for leaf, where in self.elements.items():
            norms = np.sqrt(np.square(table[:, where]).sum(axis=1))
            np.copyto(table[:, leaf], norms, where=~np.isnan(norms))


def block_of(
    rows: list[Row], layout: Layout, before: np.ndarray
) -> tuple[Block, np.ndarray]:
    """Return rows as a block, and what `.grad` is after the last one, where it was `before` the first."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _block_of(rows, layout, before)


def _block_of(
    rows: list[Row], layout: Layout, before: np.ndarray
) -> tuple[Block, np.ndarray]:
    count, owners = layout.count, layout.owners
    shape = (len(rows), len(owners))
    tables = {
        what: np.full(shape, np.nan) for what in ("contribution", "grad", "weight")
    }
    read = np.zeros((len(rows), count), bool)
    weighed = np.zeros(len(rows), bool)
    for (what, leaves), (at, found) in _alike(rows).items():
        tables[what][np.ix_(at, layout.places(leaves))] = found
        if what == "grad":
            read[np.ix_(at, [max(leaf, ~leaf) for leaf in leaves])] = True
        elif what == "weight":
            weighed[at] = True
    changed = layout.marked([row.changed for row in rows])
    contributed = layout.marked([row.contributed for row in rows])
    same = layout.marked([row.alike for row in rows])
    unmeasured = layout.marked([row.unmeasured for row in rows])
    bits = b"".join([row.present for row in rows])
    present = np.frombuffer(bits, np.uint8).reshape(len(rows), count)
    added, grad = tables["contribution"], np.concatenate([before, tables["grad"]])
    added[(unmeasured | ~contributed)[:, owners]] = np.nan
    # With no `.grad` before, what backward added is what is there now.
    np.copyto(grad[1:], added, where=same[:, owners])
    # A `.grad` that nothing touched is what it was: fill each row from the last one that says.
    numbered = np.arange(1, len(rows) + 1)[:, None]
    last = np.maximum.accumulate(np.where(read | same, numbered, 0), axis=0)
    grad = grad[last[:, owners], np.arange(len(owners))]
    grad[(present == 0)[:, owners]] = np.nan
    layout.fill_norms(added)
    layout.fill_norms(grad)
    texts, codes = _codes(rows)
    block = Block(
        texts,
        codes,
        np.array([_measured(row) for row in rows]),
        added[:, :count].astype(np.float32),
        grad[:, :count].astype(np.float32),
        present | (CONTRIBUTED * contributed + CHANGED * changed).astype(np.uint8),
        added[:, count:].copy(),
        grad[:, count:].copy(),
        np.flatnonzero(weighed),
        tables["weight"][weighed, count:],
    )
    return block, grad[-1:].copy()


# As `NUMBERS` has them.
_measured = attrgetter("time", "loss", "scale", "before", "after", "allocated", "peak")

Given = dict[tuple[str, tuple[int, ...]], tuple[list[int], list[list[float]]]]


def _alike(rows: list[Row]) -> Given:
    """Return the rows that were given the same numbers of the same leaves, and those numbers."""
    alike: Given = {}
    for place, row in enumerate(rows):
        for what, leaves, found in row.given:
            at, all_found = alike.setdefault((what, leaves), ([], []))
            at.append(place)
            all_found.append(found)
    return alike


def _codes(rows: list[Row]) -> tuple[dict[str, list[str]], np.ndarray]:
    """Return the texts of rows, each once, and in which place of these tables each row has its own."""
    tables: dict[str, dict[str, int]] = {name: {} for name in TABLES}
    # Most events say what the last one of their kind on the same line said.
    last: dict[tuple[int, str], tuple[Any, list[int]]] = {}
    codes = []
    for row in rows:
        said, key = (row.label, row.within, row.details), (id(row.site), row.kind)
        if key not in last or last[key][0] != said:
            last[key] = said, _coded(row, tables)
        codes.append(last[key][1])
    return {name: list(table) for name, table in tables.items()}, np.array(
        codes, np.int32
    )


def _coded(row: Row, tables: dict[str, dict[str, int]]) -> list[int]:
    """Return the codes of a row, in the order of `CODES`; texts that the tables do not have are added."""
    site = row.site
    said: dict[str, Any] = {
        "kind": row.kind,
        "label": row.label,
        "file": site.file,
        "line": site.line,
        "source": site.source,
        "within": row.within,
        "rank": -1,
        "details": _json(row.details),
        "frames": _json(site.frames),
        "via": site.via,
    }
    for name, table in tables.items():
        said[name] = table.setdefault(said[name], len(table))
    return list(said.values())


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=lambda one: repr(one)[:200])


# --- the code of events ----------------------------------------------------------------------


class Sources:
    """The source files that events point into, or (not `whole`) the lines of them that those events need."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._met: set[tuple[str, int]] = set()
        self._texts: dict[str, str] = {}
        self._lines: dict[str, set[int]] = {}
        self._unsaid: set[str] = set()

    def __contains__(self, site: CallSite) -> bool:
        return (site.file, site.line) in self._met

    def meet(self, site: CallSite) -> None:
        """Read the file of a line that was not met before."""
        self._met.add((site.file, site.line))
        if not site.path:
            return
        text = "".join(linecache.getlines(site.path))
        self._texts[site.file] = text = text if len(text) <= _LONGEST_SOURCE else ""
        lines = self._lines.setdefault(site.file, set())
        if not self._whole:
            lines |= needs(text, site.line)
        self._unsaid.add(site.file)

    def all(self) -> dict[str, str]:
        """Return the files."""
        return self._shown(self._texts)

    def news(self) -> dict[str, str]:
        """Return the files of which something was met since the last time."""
        unsaid, self._unsaid = self._unsaid, set()
        return self._shown(unsaid)

    def _shown(self, files: Iterable[str]) -> dict[str, str]:
        if self._whole:
            return {file: self._texts[file] for file in sorted(files)}
        return {
            file: only(self._texts[file], self._lines[file]) for file in sorted(files)
        }


# --- an open recording -----------------------------------------------------------------------


class Columns:
    """The events of an open recording, in the order in which they began.

    A row is `pending` until it is done, its numbers have arrived and those before it are away; it
    then becomes a row of a block. Blocks are written to the file, or kept until there are more than `ROOM`
    bytes of them, and then written to a temporary file. `about` says what is known of the parameters and of the
    recording. `lost` is why there is no file any more.
    """

    def __init__(
        self,
        sizes: list[int],
        small: Iterable[int],
        wire: Wire,
        allocated: Allocated,
        about: Callable[[], tuple[list[Parameter], dict[str, Any]]],
        *,
        path: str | Path | None = None,
        overwrite: bool = False,
        sources: bool = False,
    ) -> None:
        self._wire, self._allocated, self._about = wire, allocated, about
        self.start = time.perf_counter()
        self.pending: list[Row] = []
        self.lost = ""
        self._sizes, self._layout = sizes, Layout(sizes, small)
        self._grad = np.full((1, len(self._layout.owners)), np.nan)
        self._bulk = max(16, min(_EVENTS, _NUMBERS // max(len(sizes), 1)))
        # So many rows are looked at together: one by one, the code that does it has left the cache in between.
        self._enough = self._bulk
        self._due = 0.0
        self._away = 0  # rows that are in blocks
        self._blocks: list[Block] = []
        self._bytes, self._room = 0, float(ROOM)
        self._writer: Writer | None = None
        if path is not None:
            self._writer = Writer(path, overwrite=overwrite)
        self._temporary = False
        self._written: list[Writer] = []  # files that take no more, but are read
        self._flusher: threading.Timer | None = None
        self._sources = Sources(sources)
        self._graphs: dict[int, Graph] = {}
        self._said: Any = None
        self._end: dict[str, Any] = {}
        self._given_up = False
        self._lock = threading.RLock()
        self._ledger: tuple[Any, Ledger] | None = None

    def __len__(self) -> int:
        with self._lock:  # a thread that writes takes rows from one to the other
            return self._away + len(self.pending)

    def begin(
        self,
        kind: str,
        label: str,
        site: CallSite,
        within: str,
        details: dict[str, Any],
        changed: Sequence[int] = (),
    ) -> Row:
        """Return a new event, which takes its place when it begins to take effect."""
        row = Row(kind, label, site, time.perf_counter() - self.start, within, details)
        row.changed = changed
        self.pending.append(row)
        return row

    def finish(self, row: Row) -> None:
        """Take a row as whole, but for what a device still sends."""
        if self._allocated.devices:
            row.allocated, row.peak = self._allocated.after()
        if row.site not in self._sources:
            # Here, not in the thread that writes: keeping the parser's warnings to ourselves concerns all threads.
            with self._lock:
                self._sources.meet(row.site)
        row.done = True
        to_file = self._writer is not None and not self._temporary
        if len(self.pending) >= self._enough or (
            to_file and time.monotonic() > self._due
        ):
            self.settle()
        if to_file and self._flusher is None:
            self._flush_later()

    def settle(self, *, wait: bool = False) -> None:
        """Put away the rows that are done and whose numbers have arrived; with `wait`, all that are done."""
        with self._lock:
            self._put_away(self._wire.wait() if wait else self._wire.arrived())
            self._enough = len(self.pending) + self._bulk
            self._due = time.monotonic() + _SECONDS

    def flush(self) -> None:
        """Write what is there, whoever asks; a device is not asked, which may be in the middle of a capture."""
        with self._lock:
            self._flusher = None
            if not self._given_up:
                self._put_away(0)

    def _flush_later(self) -> None:
        """Write by time also when no event comes: a loop that pauses loses no more than one that runs."""
        flusher = threading.Timer(_SECONDS, _flush, (weakref.ref(self),))
        flusher.daemon = True
        # No new thread can be had while the interpreter ends, nor beyond a limit: the next event asks again.
        with contextlib.suppress(RuntimeError):
            flusher.start()
            self._flusher = flusher

    def _put_away(self, arrived: int) -> None:
        """Make blocks of the rows that are done, of which a device has sent all numbers up to `arrived`."""
        while rows := self._ready(arrived):
            for place, row in enumerate(rows, self._away):
                if row.host:
                    row.arrive()
                if isinstance(row, Backward) and row.graph is not None:
                    self._graphs[place] = row.graph
            block, grad = block_of(rows, self._layout, self._grad)
            self._keep(block)
            self._grad = grad
            del self.pending[: len(rows)]  # another thread may have added some
            self._away += len(rows)

    def _ready(self, arrived: int) -> list[Row]:
        rows = []
        for row in self.pending[: self._bulk]:
            if not row.done or row.sent > arrived:
                break
            rows.append(row)
        return rows

    def expect(self, running: Backward) -> None:
        """Count what a backward had yet to bring as there already in the rows that happened while it ran.

        Its own row stands before them with all it brought: a `.grad` may not be gone in between.
        """
        with self._lock:
            inner = self.pending[self.pending.index(running) + 1 :]
        if not inner:
            return
        last, first = len(self), len(self) - len(inner)
        settled = {i: running.settled.get(i, last) for i in running.reached}
        _add_present(running, [i for i, number in settled.items() if number < last])
        for number, row in enumerate(inner, first):
            if row.within == "backward" and row.done:
                late = [i for i, at in settled.items() if at > number]
                _add_present(row, [i for i in late if not running.had[i]])

    # --- files ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin the file, if there is one, with what is known before the first event."""
        if self._writer is None:
            return
        try:
            self._writer.open()
            self._writer.append(self._news())
        except OSError as error:
            if error.errno not in _FULL:  # a name that cannot be is the user's to know
                raise
            self._lose(error)
        except Exception:
            writer, self._writer = self._writer, None
            writer.discard()
            raise

    def _news(self) -> dict[str, Any]:
        """Return what the file does not say yet beside its events: lines of code, and what has changed."""
        news: dict[str, Any] = {"sources": self._sources.news()}
        about = self._described()
        if about != self._said:
            self._said = about
            news |= ledgerfile.described(about[0], self._layout.elements, about[1])
        return news

    def _write_news(self) -> None:
        """Write what has changed beside the events, where no event will say so."""
        writer = self._writer
        if writer is None or not (writer.is_ours and writer.can_be_read):
            return
        if self._described() == self._said:
            return
        try:
            writer.append(self._news())
        except OSError as error:
            self._lose(error)

    def _described(self) -> tuple[list[Parameter], dict[str, Any]]:
        """Return the parameters and what is said of the recording, also when that cannot be known any more."""
        meta: dict[str, Any] = {"stopped": "it did not begin"}
        try:
            parameters, meta = self._about()
            if len(parameters) == len(self._sizes):
                return parameters, meta
        except Exception:
            if not self._given_up:
                raise
        if self._said is not None:
            return self._said[0], meta
        # It failed while the parameters were let go, or before anything was known of them.
        sizes = enumerate(self._sizes)
        return [Parameter(f"parameter {n}", (size,)) for n, size in sizes], meta

    def _keep(self, block: Block) -> None:
        """Write a block, or hold it in memory."""
        if self._writer is not None and self._writer.is_ours:
            header, arrays = ledgerfile.packed(block)
            try:
                self._writer.append(header | self._news(), arrays)
                return
            except OSError as error:
                self._lose(error)
        self._blocks.append(block)
        self._bytes += sum([array.nbytes for array in block.arrays])
        if self._bytes > self._room and self._writer is None:
            self._spill()

    def _spill(self) -> None:
        """Write what memory holds to a temporary file that goes with the recording."""
        writer = Writer(None)
        try:
            for block in self._blocks:
                writer.append(*ledgerfile.packed(block))
        except OSError:  # no room there, either: memory is all there is
            self._room = math.inf
        else:
            self._writer, self._temporary = writer, True
            self._blocks, self._bytes = [], 0

    def _lose(self, error: OSError) -> None:
        """Hold in memory what comes, since the disk takes no more; what the file has is read from there."""
        self.stop_writing()
        if self._temporary:
            self._room = math.inf
        self.lost = f"{type(error).__name__}: {error}"

    def stop_writing(self) -> None:
        """Write no more to the file; what it has is still read from there."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.can_be_read:
            self._written.append(writer)

    def close(self, **end: Any) -> None:
        """Write what there is; `end` is what the file says last."""
        with self._lock:
            try:
                self.settle(wait=True)
            except Exception:
                if not self._given_up:
                    raise
            self._end = end
            if self._flusher is not None:
                self._flusher.cancel()
                self._flusher = None
            self._write_news()
            writer = self._writer
            if writer is not None and writer.is_ours and not self._temporary:
                try:
                    writer.close(**end)
                except OSError as error:
                    self._lose(error)
                self.stop_writing()

    def give_up(self) -> None:
        """Keep what is whole, drop what is not, after something of ours has failed: it may do so again."""
        with self._lock:
            self._given_up = True
            self.pending[:] = [row for row in self.pending if row.done]
            with contextlib.suppress(Exception):
                self.settle(wait=True)
            self.pending.clear()

    def is_on_disk(self) -> bool:
        """Return whether all that was recorded can be read back from the file, once it is closed."""
        if self.lost:
            return False
        try:
            for writer in self._written:
                writer.read()
        except LedgerFileError:
            return False
        return True

    # --- what comes out ------------------------------------------------------------------------

    def graphs(self) -> dict[int, Graph]:
        """Return the graphs that backwards ran, by event."""
        return dict(self._graphs)

    def ledger(self) -> Ledger:
        """Return all rows that are done, as a ledger."""
        with self._lock:
            self.settle(wait=True)
            self._write_news()
            parameters, meta = self._described()
            about = self._away, parameters, meta | self._end
            if self._ledger is None or self._ledger[0] != about:
                self._ledger = about, self._joined(parameters, meta | self._end)
            return self._ledger[1]

    def _joined(self, parameters: list[Parameter], meta: dict[str, Any]) -> Ledger:
        layout, parts = self._layout, list[Block]()
        for writer in (*self._written, self._writer):
            if writer is not None and writer.can_be_read:
                parts += valid(writer.read(), _blocks)
        parts += self._blocks
        if not parts:
            elements = len(layout.owners) - layout.count
            parts.append(Block.empty(layout.count, elements))
        whole = join(parts)
        if len(whole.codes) < self._away and not self._given_up:
            raise LedgerFileError(
                f"only {len(whole.codes)} of {self._away} events can be read: the file was cut short"
            )
        kept, sources = list(layout.elements), self._sources.all()
        return Ledger.of_block(parameters, kept, whole, sources=sources, meta=meta)


def _blocks(reader: Reader) -> list[Block]:
    return list(ledgerfile.blocks(reader, {}))


def _add_present(row: Row, leaves: Iterable[int]) -> None:
    present = bytearray(row.present)
    for leaf in leaves:
        present[leaf] = PRESENT
    row.present = bytes(present)


def _flush(columns: weakref.ref[Columns]) -> None:
    here = columns()
    if here is not None:
        with contextlib.suppress(Exception):
            here.flush()
