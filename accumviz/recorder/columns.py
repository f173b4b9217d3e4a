"""Turn what happens while a recording is open into columns, which are held in memory or written to its file.

An event is a `Row` until it is done and its numbers have arrived from their device. Rows then become a `Block`, many
at a time.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor

from accumviz.graph.graph import Graph
from accumviz.ledger import file as ledgerfile
from accumviz.ledger.events import (
    CHANGED,
    CONTRIBUTED,
    NUMBERS,
    PRESENT,
    Block,
    Events,
    Parameter,
    join,
)
from accumviz.ledger.file import LedgerFileError, Reader, Writer, valid
from accumviz.ledger.ledger import Ledger
from accumviz.recorder.callsite import CallSite, Sources
from accumviz.recorder.transfer import readable, wire

# A block has at most so many events, and so many numbers of parameters.
_EVENTS, _NUMBERS = 256, 200_000
# A file gets what there is with the first event after so many seconds.
_SECONDS = 0.5
# What a disk says that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NAN = float("nan")
# The fields of an event that a row has itself, and those that its line of code has.
_OF_ROWS = ("kind", "label", "within", "details", *NUMBERS)
_OF_SITES = ("file", "line", "source", "frames", "via")
# Numbers of leaves.
Leaves = list[int]
# What becomes of numbers once they are known.
Put = Callable[[list[float]], None]
# What an event says of itself; what is known of the parameters, and of the recording itself.
Details = dict[str, Any]
About = tuple[list[Parameter], Details]


class Row:
    """One event on its way to the columns: what is known of it, and which numbers are still to come.

    `changed`, `contributed` and `unmeasured` are leaves: those whose `.grad` it changed, those that it added to, and
    those to which something of unknown size was added.
    """

    # Class attributes, because most events need few of them and a row is made in the training loop.
    loss = saved_before = saved_after = _NAN
    present: bytes | bytearray = b""
    changed: Sequence[int] = ()
    contributed: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    done = False

    def __init__(
        self,
        kind: str,
        label: str,
        site: CallSite,
        within: str,
        details: Details,
    ) -> None:
        self.kind = kind
        self.label = label
        self.site = site
        self.time = 0.0
        self.within = within
        self.details = details
        # What was read ("contribution", "grad" or "weight"), of which leaves, and the numbers.
        self.given: list[tuple[str, tuple[int, ...], list[float]]] = []
        # What a device sends: what becomes of it, where it arrives, and the mark that is passed then.
        self.coming: list[tuple[Put, Tensor, Any]] = []

    def give(
        self,
        what: str,
        leaves: Iterable[int],
        values: list[float],
    ) -> None:
        """Give it numbers of leaves: the norm of each, or (`~leaf`) all its elements."""
        self.given.append((what, tuple(leaves), values))

    def take(self, value: Any, put: Callable[[float], None]) -> None:
        """Hand a number to `put`, if it can be read: at once, or when a device has sent it."""
        if not isinstance(value, Tensor):
            if value is not None:
                put(value)
        # A DTensor may not be reduced yet, and reading it would be a collective that the user's program does not have.
        elif readable(value):
            self._take([value], lambda values: put(float(sum(values))))

    def take_leaves(
        self,
        what: Sequence[str],
        leaves: Sequence[int],
        tensors: list[Tensor],
    ) -> None:
        """Give it the elements of these tensors, of one device and dtype, as numbers of leaves."""

        def put(values: list[float]) -> None:
            for each in what:
                self.give(each, leaves, values)

        self._take(tensors, put)

    def _take(self, tensors: list[Tensor], put: Put) -> None:
        """Read tensors as they are now, without waiting for a device."""
        if tensors[0].is_cpu:
            values: list[float] = []
            for tensor in tensors:
                values += tensor.to_dense().flatten().tolist()
            put(values)
        else:
            self.coming.append((put, *wire.send(tensors)))

    def is_whole(self, wait: bool) -> bool:
        """Return whether all numbers are there; with `wait`, once they are."""
        for _, _, mark in self.coming:
            if mark is None:
                continue
            if wait:
                mark.synchronize()
            elif not mark.query():
                return False
        return True

    def arrive(self) -> None:
        """Take what a device has sent, once it is there."""
        for put, host, _ in self.coming:
            put(host.tolist())
        self.coming = []


class Sync(Row):
    """A collective: inside a backward, what it does to the `.grad` of `leaves` is there only when that is over.

    `pieces` are what a reduce-scatter adds to them, as long as that was not read.
    """

    leaves: Sequence[int] = ()

    def __init__(
        self,
        label: str,
        site: CallSite,
        within: str,
        details: Details,
    ) -> None:
        super().__init__("sync", label, site, within, details)
        self.pieces: dict[int, Tensor] = {}


class Backward(Row):
    """A backward that is running: what it started from, and what has reached which leaf so far.

    `had` are the PRESENT bits when it began, `state` is what it has brought to each leaf (`gradients.State`), `reached`
    the leaves in the order in which it came. What is `held` is there in its version, made on this stream; what
    `arrived` and was not held had this place and version. A contribution has been read (`settled`) before the event of
    that number. `hooked` is what came before hooks of the user's saw it; `by_hook` are the leaves for which these
    changed it, or `.grad`.
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
        self,
        site: CallSite,
        within: str,
        had: bytes,
        thread: int,
    ) -> None:
        super().__init__("backward", site.subject, site, within, {})
        self.had = had
        self.thread = thread
        self.state = bytearray(len(had))
        self.reached: Leaves = []
        self.held: dict[int, tuple[Tensor, int, int]] = {}
        self.arrived: dict[int, tuple[int, int] | None] = {}
        self.settled: dict[int, int] = {}
        self.hooked: dict[int, tuple[Tensor, int]] = {}
        self.by_hook: set[int] = set()


# --- from rows to a block --------------------------------------------------------------------


class Layout:
    """Where numbers stand in a row of the table of all leaves: the norms first, then the elements of small leaves."""

    def __init__(self, sizes: Sequence[int], small: Iterable[int]) -> None:
        self.count = len(sizes)
        self.elements: dict[int, slice] = {}
        owners = list(range(self.count))
        for leaf in small:
            start = len(owners)
            stop = start + sizes[leaf]
            self.elements[leaf] = slice(start, stop)
            owners += [leaf] * sizes[leaf]
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

    def marked(self, rows: list[Row], name: str) -> ndarray:
        """Return rows × leaves: True where this attribute of a row names a leaf."""
        lists = [getattr(row, name) for row in rows]
        counts = [len(leaves) for leaves in lists]
        at = np.repeat(np.arange(len(rows)), counts)
        leaves = np.fromiter(itertools.chain(*lists), np.intp, sum(counts))
        marks = np.zeros((len(rows), self.count), bool)
        marks[at, leaves] = True
        return marks

    def fill_norms(self, table: ndarray) -> None:
        """Put the norms of leaves whose elements are known where those of the others are."""
        for leaf, where in self.elements.items():
            squares = np.square(table[:, where])
            norms = np.sqrt(squares.sum(axis=1))
            is_known = ~np.isnan(norms)
            np.copyto(table[:, leaf], norms, where=is_known)


@np.errstate(over="ignore", invalid="ignore")
def block_of(
    rows: list[Row],
    layout: Layout,
    before: ndarray,
) -> tuple[Block, ndarray]:
    """Return rows as a block, and what `.grad` is after the last one, where it was `before` the first."""
    count = layout.count
    owners = layout.owners
    tables, read, weighed = _filled(rows, layout)
    changed = layout.marked(rows, "changed")
    contributed = layout.marked(rows, "contributed")
    bits = b"".join([row.present for row in rows])
    present = np.frombuffer(bits, np.uint8)
    present = present.reshape(len(rows), count)
    added = tables["contribution"]
    unknown = ~contributed | layout.marked(rows, "unmeasured")
    added[unknown[:, owners]] = np.nan
    grad = np.concatenate([before, tables["grad"]])
    # A `.grad` that nothing touched is what it was: fill each row from the last one that says.
    numbered = np.arange(1, len(rows) + 1)[:, None]
    says = np.where(read, numbered, 0)
    last = np.maximum.accumulate(says, axis=0)
    grad = grad[last[:, owners], np.arange(len(owners))]
    absent = present == 0
    grad[absent[:, owners]] = np.nan
    layout.fill_norms(added)
    layout.fill_norms(grad)
    state = present | (CONTRIBUTED * contributed + CHANGED * changed).astype(np.uint8)
    block = Block(
        _events(rows),
        added[:, :count].astype(np.float32),
        grad[:, :count].astype(np.float32),
        state,
        added[:, count:].copy(),
        grad[:, count:].copy(),
        np.flatnonzero(weighed),
        tables["weight"][weighed, count:],
    )
    return block, grad[-1:].copy()


def _filled(
    rows: list[Row], layout: Layout
) -> tuple[dict[str, ndarray], ndarray, ndarray]:
    """Return what rows were given, of which leaves they read `.grad`, and which have weights."""
    # Most rows are given numbers of the same leaves, which go into a table at once.
    alike: dict[Any, tuple[list[int], list[list[float]]]] = {}
    for at, row in enumerate(rows):
        for nth, (what, leaves, values) in enumerate(row.given):
            places, given = alike.setdefault((nth, what, leaves), ([], []))
            places.append(at)
            given.append(values)
    tables = {}
    for what in ("contribution", "grad", "weight"):
        tables[what] = np.full((len(rows), len(layout.owners)), np.nan)
    read = np.zeros((len(rows), layout.count), bool)
    weighed = np.zeros(len(rows), bool)
    # What a row is given later of a leaf replaces what it was given before.
    for key in sorted(alike):
        _, what, leaves = key
        places, given = alike[key]
        cells = np.ix_(places, layout.places(leaves))
        tables[what][cells] = given
        if what == "grad":
            whole = [max(leaf, ~leaf) for leaf in leaves]
            read[np.ix_(places, whole)] = True
        elif what == "weight":
            weighed[places] = True
    return tables, read, weighed


def _events(rows: list[Row]) -> Events:
    """Return what rows say beside their numbers of leaves."""
    columns = {}
    for name in _OF_ROWS:
        columns[name] = [getattr(row, name) for row in rows]
    for name in _OF_SITES:
        columns[name] = [getattr(row.site, name) for row in rows]
    return Events.of_columns(**columns)


# --- an open recording -----------------------------------------------------------------------


class Columns:
    """The events of an open recording, in the order in which they began.

    A row is `pending` until it is done, its numbers have arrived and those before it are away; it
    then becomes a row of a block. Blocks are written to the file, or kept. `about` says what is known of the
    parameters and of the recording. `lost` is why the file takes no more.
    """

    def __init__(
        self,
        sizes: list[int],
        small: Iterable[int],
        about: Callable[[], About],
        *,
        path: str | Path | None = None,
        overwrite: bool = False,
        sources: bool = False,
    ) -> None:
        self._about = about
        self.start = time.perf_counter()
        self.pending: list[Row] = []
        self.lost = ""
        self._layout = Layout(sizes, small)
        self._grad = np.full((1, len(self._layout.owners)), np.nan)
        most = _NUMBERS // max(len(sizes), 1)
        self._bulk = max(16, min(_EVENTS, most))
        self._due = 0.0
        self._away = 0  # rows that are in blocks
        self._blocks: list[Block] = []
        self._writer: Writer | None = None
        if path is not None:
            self._writer = Writer(path, overwrite=overwrite)
        self._writes = False
        self._sources = Sources(sources)
        self._graphs: dict[int, Graph] = {}
        # What is said of the recording where it fails before anything is known of it.
        parameters = [Parameter(f"parameter {n}", (s,)) for n, s in enumerate(sizes)]
        self.last_about: About = parameters, {"stopped": "it did not begin"}
        self._written: About | None = None
        self._end: Details = {}
        self._given_up = False
        # The ledger may be asked for on another thread than the one that trains.
        self._lock = threading.RLock()
        self._ledger: tuple[Any, Ledger] | None = None

    def __len__(self) -> int:
        with self._lock:
            return self._away + len(self.pending)

    def begin(self, row: Row) -> None:
        """Give an event its time and its place: it begins to take effect."""
        row.time = time.perf_counter() - self.start
        self.pending.append(row)

    def finish(self, row: Row) -> None:
        """Take a row as whole, but for what a device still sends."""
        if (row.site.file, row.site.line) not in self._sources.met:
            self._sources.meet(row.site)
        row.done = True
        is_due = self._writes and time.monotonic() > self._due
        if is_due or len(self.pending) >= self._bulk:
            self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Put away the rows that are done and whose numbers have arrived; with `wait`, all that are done."""

        def is_ready(row: Row) -> bool:
            return row.done and row.is_whole(wait)

        with self._lock:
            while True:
                first = self.pending[: self._bulk]
                rows = list(itertools.takewhile(is_ready, first))
                if not rows:
                    break
                self._put_away(rows)
            self._due = time.monotonic() + _SECONDS

    def _put_away(self, rows: list[Row]) -> None:
        for place, row in enumerate(rows, self._away):
            row.arrive()
            if isinstance(row, Backward) and row.graph is not None:
                self._graphs[place] = row.graph
        block, grad = block_of(rows, self._layout, self._grad)
        # What the file does not take stays in memory.
        if not (self._writes and self._append(*ledgerfile.packed(block))):
            self._blocks.append(block)
        self._grad = grad
        del self.pending[: len(rows)]
        self._away += len(rows)

    def expect(self, running: Backward) -> None:
        """Count what a backward had yet to bring as there already in the rows that happened while it ran.

        Its own row stands before them with all it brought: a `.grad` may not be gone in between.
        """
        if self.pending[-1] is running:
            return
        _add_present(running, running.settled)
        had, settled = running.had, running.settled
        with self._lock:
            first = self.pending.index(running) + 1
            inner = enumerate(self.pending[first:], self._away + first)
        for number, row in inner:
            if row.within == "backward" and row.done:
                new = [i for i in running.reached if not had[i]]
                late = [i for i in new if settled.get(i, number + 1) > number]
                _add_present(row, late)

    # --- files ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin the file, if there is one, with what is known before the first event."""
        if self._writer is None:
            return
        try:
            self._writer.open()
            self._writer.append(self._take_news())
            self._writes = True
        except OSError as error:
            if error.errno not in _FULL:  # a name that cannot be is the user's to know
                raise
            self._lose(error)
        except Exception:
            self._writer.discard()
            self._writer = None
            raise

    def _take_news(self) -> Details:
        """Take what the file does not say yet beside its events: source files, and what is said of the recording."""
        news: Details = {"sources": self._sources.news()}
        parameters, meta = self._describe()
        if self._written != self.last_about:
            self._written = self.last_about
            news |= ledgerfile.described(parameters, self._layout.elements, meta)
        return news

    def _write_news(self) -> None:
        """Write what has changed beside the events, where no event will say so."""
        if self._describe() != self._written:
            self._append({})

    def _describe(self) -> About:
        """Return the parameters and what is said of the recording; once it has failed, as they were last."""
        try:
            self.last_about = self._about()
        except Exception:
            if not self._given_up:
                raise
        return self.last_about

    def _append(self, header: Details, *arrays: dict[str, ndarray]) -> bool:
        """Write this to the file, with the news; return whether that has been done."""
        writer = self._writer
        if writer is None or not (self._writes and writer.is_ours):
            return False
        try:
            writer.append(header | self._take_news(), *arrays)
        except OSError as error:
            self._lose(error)
        return self._writes

    def _lose(self, error: OSError) -> None:
        """Hold in memory what comes, since the disk takes no more; what the file has is read from there."""
        self._writes = False
        self.lost = f"{type(error).__name__}: {error}"

    def close(self, **end: Any) -> None:
        """Write what there is; `end` is what the file says last."""
        with self._lock:
            self._given_up |= "stopped" in end
            try:
                self.settle(wait=True)
            except Exception:
                if not self._given_up:
                    raise
            self._end = end
            self._write_news()
            if self._writer is not None and self._writes:
                try:
                    self._writer.close(**end)
                except OSError as error:
                    self._lose(error)
                self._writes = False

    def give_up(self) -> None:
        """Put away the rows that are done, and drop all others, after something of ours has failed.

        Should that fail as well, the rest is dropped, too; from now on errors of ours say nothing new.
        """
        with self._lock:
            self._given_up = True
            self.pending[:] = [row for row in self.pending if row.done]
            with contextlib.suppress(Exception):
                self.settle(wait=True)
            self.pending.clear()

    # --- what comes out ------------------------------------------------------------------------

    def graphs(self) -> dict[int, Graph]:
        """Return the graphs that backwards ran, by event."""
        return dict(self._graphs)

    def ledger(self) -> Ledger:
        """Return all rows that are done, as a ledger."""
        with self._lock:
            self.settle(wait=True)
            self._write_news()
            parameters, meta = self._describe()
            about = self._away, parameters, meta | self._end
            if self._ledger is None or self._ledger[0] != about:
                self._ledger = about, self._joined(parameters, meta | self._end)
            return self._ledger[1]

    def _joined(self, parameters: list[Parameter], meta: Details) -> Ledger:
        layout = self._layout
        parts: list[Block] = []
        if self._writer is not None and self._writer.size:
            parts += valid(self._writer.read(), _blocks)
        parts += self._blocks
        if not parts:
            elements = len(layout.owners) - layout.count
            parts.append(Block.empty(layout.count, elements))
        whole = join(parts)
        count = len(whole.events)
        if count < self._away and not self._given_up:
            raise LedgerFileError(
                f"only {count} of {self._away} events can be read: the file was cut short"
            )
        return Ledger.of_block(
            parameters,
            list(layout.elements),
            whole,
            sources=self._sources.all(),
            meta=meta,
        )


def _blocks(reader: Reader) -> list[Block]:
    return list(ledgerfile.blocks(reader, {}))


def _add_present(row: Row, leaves: Iterable[int]) -> None:
    present = bytearray(row.present)
    for leaf in leaves:
        present[leaf] = PRESENT
    row.present = bytes(present)
