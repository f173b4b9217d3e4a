"""From what was seen to the ledger's columns, and from there to a file: what is written leaves memory."""

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
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from accumviz.events import CHANGED, CODES, CONTRIBUTED, NUMBERS, PRESENT, TABLES, Events, Parameter
from accumviz.format import ledger as ledgerfile
from accumviz.format.writer import Writer
from accumviz.graph import Graph
from accumviz.instruments.callsite import CallSite
from accumviz.instruments.numbers import Wire, numbers
from accumviz.ledger import Ledger
from accumviz.sources import needed

# A cell or a script, not a generated file: the player shows the code beside what it did.
_LONGEST_SOURCE = 200_000
# A chunk has room for so many events, and for so many numbers of large parameters.
_EVENTS, _NUMBERS = 2048, 200_000
# In memory, so many rows are put away at a time: one by one, the code that does it has left the cache in between.
_TOGETHER = 24
# A file has each event after so many, and after so many seconds.
_FILE_EVENTS, _SECONDS = 256, 0.5
_LONGEST_WRITE = 5.0
# What a recording without a file may hold in memory; the rest goes to a temporary one.
ROOM = 64 << 20

# What a number is, and where it goes: ("contribution" or "grad", leaves), ("exact contribution" or
# "exact grad", leaf), ("loss", None), ("scale", its power), ("lr", its group) or ("detail", its name).
Target = tuple[str, Any]
_NAN = float("nan")
# What a disk says that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Row:
    """One event on its way to the columns: what is known of it, and which numbers are still to come."""

    # Class attributes, because most events need few of them and a row is made in the training loop.
    loss, scale = _NAN, 1.0
    before = after = _NAN
    allocated = peak = _NAN
    present: bytes | bytearray = b""
    changed: Sequence[int] = ()
    contributed: Sequence[int] = ()
    # Leaves whose `.grad` is what was contributed, and those that got something of unknown size.
    alike: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    sent = 0
    done = False

    def __init__(self, kind: str, label: str, site: CallSite, time: float, within: str, details: dict[str, Any]):
        self.kind, self.label, self.site, self.time = kind, label, site, time
        self.within, self.details = within, details
        self.values: list[tuple[Target, Any]] = []
        self.late: list[tuple[Target, list[torch.Tensor]]] = []
        self.host: list[tuple[Target, torch.Tensor]] = []

    def take(self, target: Target, tensor: torch.Tensor) -> None:
        """Take the elements of a tensor as they are now; from a device, with the next `send`."""
        flat = tensor if tensor.layout is torch.strided else tensor.to_dense()
        if flat.dim() != 1:
            flat = flat.reshape(-1)
        if flat.is_cpu:
            self.values.append((target, flat.tolist()))
        else:
            self.late.append((target, [flat]))

    def take_all(self, target: Target, tensors: list[torch.Tensor]) -> None:
        """Take several single numbers, likewise."""
        if tensors[0].is_cpu:
            self.values.append((target, [tensor.item() for tensor in tensors]))
        else:
            self.late.append((target, tensors))

    def send(self, wire: Wire) -> None:
        """Send what was taken from devices, before anybody changes it."""
        if self.late:
            arriving = wire.send([tensors for _, tensors in self.late])
            self.host += zip((target for target, _ in self.late), arriving, strict=True)
            self.late, self.sent = [], wire.sent

    def arrivals(self) -> Iterable[tuple[Target, Any]]:
        """All numbers, once those from devices have arrived."""
        return [*self.values, *((target, numbers(host)) for target, host in self.host)] if self.host else self.values


class Sync(NamedTuple):
    """A collective that runs inside a backward: its row, and the leaves that it concerns.

    What it does to their `.grad` is there only when the backward is over. `arriving` are those
    of them that a reduce-scatter adds to, with what it adds if that is known.
    """

    row: Row
    leaves: list[int]
    arriving: dict[int, torch.Tensor | None]


class Backward(Row):
    """A backward that is running: what it started from, and what has reached which leaf so far.

    `had` are the PRESENT bits when it began, `met` the leaves at which our hook saw something
    arrive. Of a leaf that had no `.grad`, nothing is kept while it runs (autograd may then hand it
    the very tensor that comes, without a copy): it is `fresh`. What comes to the others is `held`
    until it is reduced; then the leaf is `settled`, before the row of that number. `read` are those
    whose `.grad` was taken as well, `same` those of which it was all that was taken.

    It is `hot` while each hook finds what the hooks before it saw in `.grad`, and in the cache. It
    is kept `whole` where contributions may come in parts, and `loose` when our hooks came too late
    to tell all that reached a leaf.
    """

    keeps = loose = hot = whole = False
    task: int | None = None  # the engine's number for it, where several threads train
    tags: Sequence[Any] = ()
    storages: dict[int, int] | None = None
    waiting = 0  # bytes that are not reduced yet
    nodes: Sequence[Any] = ()
    syncs: Sequence[Sync] = ()
    synced: Set[int] = frozenset()
    graph: Graph | None = None
    finish_graph: Callable[[], Graph] | None = None
    fill_graph: Callable[[Graph], Graph] | None = None

    def __init__(self, site: CallSite, time: float, within: str, had: bytes, thread: int) -> None:
        self.kind, self.label, self.site, self.time, self.within = "backward", site.subject, site, time, within
        self.details, self.values, self.late, self.host = {}, [], [], []
        self.had, self.thread = had, thread
        self.met: dict[int, None] = {}
        self.fresh: dict[int, None] = {}
        self.settled: dict[int, int] = {}
        self.held: dict[int, torch.Tensor] = {}
        self.read: dict[int, None] = {}
        self.same: dict[int, None] = {}
        self.unknown: dict[int, None] = {}
        self.streams: set[int] = set()  # on which contributions came


class _Scattered:
    """Numbers and their places in an array that is made later; two flat arrays, of no weight for the collector."""

    def __init__(self) -> None:
        self.places, self.values = array("q"), array("d")

    def cut(self, end: int) -> None:
        """Drop the places from here on, and a number without a place, or the other way round."""
        _cut(self.places, end)
        whole = min(len(self.places), len(self.values))
        del self.places[whole:], self.values[whole:]

    def into(self, whole: np.ndarray) -> None:
        """Put the numbers in their places; where one place was given several, the last one."""
        if self.places:
            whole.reshape(-1)[np.frombuffer(self.places, np.int64)] = np.frombuffer(self.values, np.float64)


def _cut(places: array[int], end: int) -> None:
    while places and places[-1] >= end:
        places.pop()


class _Columns:
    """A stretch of events on its way to arrays. Above the first row of `.grad` stands what it was before."""

    def __init__(self, before: np.ndarray, exact_before: np.ndarray) -> None:
        self.before, self.exact_before = before, exact_before
        self.codes, self.numbers = array("i"), array("d")
        self.states = bytearray()
        self.contribution, self.grad = _Scattered(), _Scattered()
        self.exact, self.exact_grad = _Scattered(), _Scattered()
        # Places in events × parameters: small ones whose elements are given, those whose `.grad` is what was
        # contributed, and those that got something of unknown size.
        self.elements, self.alike, self.unmeasured = array("q"), array("q"), array("q")

    def cut(self, rows: int, count: int, elements: int) -> None:
        """Drop what comes behind so many rows: the beginnings of one that could not be finished."""
        del self.codes[rows * len(CODES) :], self.numbers[rows * len(NUMBERS) :], self.states[rows * count :]
        for scattered, wide in ((self.contribution, count), (self.grad, count)):
            scattered.cut(rows * wide)
        for scattered in (self.exact, self.exact_grad):
            scattered.cut(rows * elements)
        for places in (self.elements, self.alike, self.unmeasured):
            _cut(places, rows * count)


_TO_BOTH = bytes(n | CHANGED | CONTRIBUTED for n in range(256))
_TO_CHANGED = bytes(n | CHANGED for n in range(256))


class Buffer:
    """Events between the training loop and the ledger.

    A row is `pending` until it is done, its numbers have arrived and those before it are away; it
    then becomes a row of the open columns. Those are closed when they are full, or when a file has
    waited long enough, and written: to the file, or kept until there are more than `ROOM` bytes of
    them, and then written to a temporary file. A process forked from this one has what was there
    until then, and holds what comes in memory.
    """

    def __init__(
        self,
        sizes: list[int],
        small: list[int],
        wire: Wire,
        about: Callable[[], tuple[list[Parameter], dict[str, Any]]],
        *,
        path: str | Path | None = None,
        overwrite: bool = False,
        sources: bool = False,
    ) -> None:
        self._wire, self._about, self._whole_sources = wire, about, sources
        self.pending: list[Row] = []
        self.lost = ""  # why there is no file any more
        self._count, self._sizes = len(sizes), sizes
        ends = np.cumsum([sizes[p] for p in small]).tolist()
        self._slices = {p: slice(end - sizes[p], end) for p, end in zip(small, ends, strict=True)}
        self._elements = ends[-1] if ends else 0
        self._starts = {p: where.start for p, where in self._slices.items()}
        self._away = 0  # rows that are in columns
        self._bulk = max(64, min(_EVENTS, _NUMBERS // max(self._count, 1)))
        self._writer = None if path is None else Writer(path, "ledger", overwrite=overwrite)
        self._graphs: dict[int, tuple[Graph, Callable[[Graph], Graph] | None]] = {}
        self._chunks: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
        self._bytes, self._room = 0, float(ROOM)
        self._temporary = False
        self._written: list[Writer] = []  # files that take no more, but are read
        self._given_up = False
        self._asked = -math.inf  # when a device was asked what has arrived
        self._end: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._flusher: threading.Timer | None = None
        self._said: Any = None
        self._ledger: tuple[Any, Ledger] | None = None
        # By file: the lines that events stand on; and what of its text they need, until it is written.
        self._lines: dict[str, set[int]] = {}
        self._texts: dict[str, str] = {}
        # By line and kind, the last event's label, whereabouts and details, and the codes that these became.
        self._last: dict[tuple[int, str], tuple[CallSite, str, str, dict[str, Any], array[int]]] = {}
        self._begin(np.full(self._count, np.nan, np.float32), np.full(self._elements, np.nan))
        _alive.add(self)

    def _begin(self, grad: np.ndarray, exact_grad: np.ndarray) -> None:
        self._columns, self._at = _Columns(grad, exact_grad), 0
        self._tables: dict[str, dict[str, int]] = {name: {} for name in TABLES}
        self._last.clear()
        self._since = time.monotonic()

    def __len__(self) -> int:
        return self._away + len(self.pending)

    # --- from rows to columns ------------------------------------------------------------------

    def settle(self, *, wait: bool = False) -> None:
        """Put away the rows whose numbers have arrived; with `wait`, all that are done."""
        pending = self.pending
        if not wait:
            if not pending or not pending[0].done:
                return
            if pending[0].sent:
                if not self._worth_asking():
                    return
            elif len(pending) < _TOGETHER and (self._writer is None or self._temporary):
                return
        self._put_away(wait=wait)

    def _put_away(self, *, wait: bool) -> None:
        """Likewise, however few there are."""
        pending = self.pending
        with self._lock:
            if len(pending) == 1 and pending[0].done and not pending[0].sent:
                self._put(pending[0], self._away)
                del pending[:1]  # another thread may have added one meanwhile
                self._away += 1
                if self._writer is not None:
                    self._write_soon()
                return
            there, moved = -1, 0
            try:
                for row in pending:
                    if not row.done:
                        break
                    if row.sent:
                        if there < 0:
                            there = self._wire.wait() if wait else self._wire.arrived()
                        if row.sent > there:
                            break
                    self._put(row, self._away + moved)
                    moved += 1
            finally:
                del pending[:moved]
                self._away += moved
            if self._writer is not None:
                self._write_soon()

    def _worth_asking(self) -> bool:
        """Whether to ask a device what has arrived: for many events at once, or because a file waits for them."""
        if len(self.pending) < self._bulk:
            if self._writer is None or self._temporary or time.monotonic() - self._asked < _SECONDS:
                return False
            self._asked = time.monotonic()
        return True

    def _write_soon(self) -> None:
        """Write by count and by time, also when no event comes: a loop that pauses loses no more than one that runs."""
        if self._temporary or not self._at:
            return
        if self._at >= _FILE_EVENTS or time.monotonic() - self._since > _SECONDS:
            self._close_columns()
        elif self._flusher is None:
            self._flush_later()

    def _flush_later(self) -> None:
        flusher = threading.Timer(_SECONDS, _flush, (weakref.ref(self),))
        flusher.daemon = True
        # No new thread can be had while the interpreter ends, nor beyond a limit: the next event asks again.
        with contextlib.suppress(RuntimeError):
            flusher.start()
            self._flusher = flusher

    def flush(self) -> None:
        """Write what is in the columns, whoever asks."""
        with self._lock:
            self._flusher = None
            if self._at and not self._given_up:
                self._close_columns()

    def _put(self, row: Row, index: int) -> None:
        columns, count = self._columns, self._count
        base = self._at * count
        if type(row) is Backward and row.graph is not None:
            self._graphs[index] = row.graph, row.fill_graph
        state, changed, contributed = row.present, row.changed, row.contributed
        if changed:
            both = changed is contributed
            if len(changed) == count:
                state = state.translate(_TO_BOTH if both else _TO_CHANGED)
            else:
                state = bytearray(state)
                bits = CHANGED | CONTRIBUTED if both else CHANGED
                for p in changed:
                    state[p] |= bits
            if contributed and not both:
                state = bytearray(state)
                for p in contributed:
                    state[p] |= CONTRIBUTED
        columns.states += state
        for (what, where), found in row.arrivals() if row.host else row.values:
            if what == "contribution":
                columns.contribution.places.extend([base + p for p in where])
                columns.contribution.values.extend(found)
            elif what == "grad":
                columns.grad.places.extend([base + p for p in where])
                columns.grad.values.extend(found)
            elif what == "exact contribution":
                start = self._at * self._elements + self._starts[where]
                columns.exact.places.extend(range(start, start + len(found)))
                columns.exact.values.extend(found)
            elif what == "exact grad":
                start = self._at * self._elements + self._starts[where]
                columns.exact_grad.places.extend(range(start, start + len(found)))
                columns.exact_grad.values.extend(found)
                columns.elements.append(base + where)
            else:
                self._fill(row, what, where, float(sum(found)))
        if row.alike:
            columns.alike.extend([base + p for p in row.alike])
        if row.unmeasured:
            columns.unmeasured.extend([base + p for p in row.unmeasured])
        # Most events say what the last one on the same line said.
        site = row.site
        known = self._last.get((id(site), row.kind))
        if (
            known is None
            or known[0] is not site
            or known[1] != row.label
            or known[2] != row.within
            or known[3] != row.details
        ):
            known = self._last[id(site), row.kind] = (site, row.label, row.within, row.details, self._codes(row))
        columns.codes.extend(known[4])
        columns.numbers.extend((row.time, row.loss, row.scale, row.before, row.after, row.allocated, row.peak))
        self._at += 1
        if self._at == self._bulk:
            self._close_columns()

    def _codes(self, row: Row) -> array[int]:
        tables, site = self._tables, row.site
        if site.path:
            lines = self._lines.setdefault(site.file, set())
            if site.line not in lines:
                lines.add(site.line)
                # Here, not in the thread that writes: keeping the parser's warnings to ourselves concerns all threads.
                self._texts[site.file] = self._source(site.path, lines)
        return array(
            "i",
            (
                _place(tables["kind"], row.kind),
                _place(tables["label"], row.label),
                _place(tables["file"], site.file),
                site.line,
                _place(tables["source"], site.source),
                _place(tables["within"], row.within),
                -1,
                _place(tables["details"], self._detailed(row.details)),
            ),
        )

    def _detailed(self, details: dict[str, Any]) -> str:
        if not details:
            return "{}"
        return json.dumps({name: _plain(value) for name, value in details.items()}, separators=(",", ":"))

    def _fill(self, row: Row, what: str, where: Any, value: float) -> None:
        if what == "loss":
            row.loss = value
        elif what == "scale":
            row.scale *= value**where
        elif what == "lr":
            row.details["lr"][where] = value
        elif where == "found_inf":
            row.details |= {"skipped": True} if value else {}
        else:
            row.details[where] = value

    def expect(self, running: Backward, touched: Iterable[int]) -> None:
        """In rows that happened inside this backward, what it had yet to bring counts as there already.

        Its own row stands before them with all it brought: a `.grad` may not be gone in between.
        """
        position = self.pending.index(running)
        last = len(self)
        arrivals = sorted((running.settled.get(i, last), i) for i in touched if not running.had[i])
        missing, arrived = bytearray(self._count), 0
        for _, i in arrivals:
            missing[i] = PRESENT
        for number, row in enumerate(self.pending[position + 1 :], self._away + position + 1):
            while arrived < len(arrivals) and arrivals[arrived][0] <= number:
                missing[arrivals[arrived][1]] = 0
                arrived += 1
            if row.within == "backward" and row.done:
                both = int.from_bytes(row.present, "little") | int.from_bytes(missing, "little")
                row.present = both.to_bytes(self._count, "little")

    # --- from columns to chunks ----------------------------------------------------------------

    def _close_columns(self) -> None:
        """Make the open columns a chunk, write it, and begin new ones."""
        head, arrays, grad, exact_grad = self._chunk()
        head |= self._news()
        self._begin(grad, exact_grad)
        self._keep(head, arrays)

    def _chunk(self) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """The open columns as a chunk, and what `.grad` is after its last event."""
        columns, rows = self._columns, self._at
        with np.errstate(over="ignore", invalid="ignore"):
            contribution, state, exact, grad, exact_grad = self._arrays(columns, rows)
        events = Events(
            np.frombuffer(columns.codes, np.int32).reshape(rows, len(CODES)),
            np.frombuffer(columns.numbers, np.float64).reshape(rows, len(NUMBERS)),
            {name: tuple(table) for name, table in self._tables.items()},
        )
        elements = {p: (exact[:, where], exact_grad[1:, where]) for p, where in self._slices.items()}
        head, arrays = ledgerfile.pack(events, contribution, grad[1:], state, elements)
        return head, arrays, grad[-1].copy(), exact_grad[-1].copy()

    def _arrays(self, columns: _Columns, rows: int) -> tuple[np.ndarray, ...]:
        """Contribution, state, and its elements; `.grad` and its elements with one row more at the top."""
        count = self._count
        state = np.frombuffer(columns.states, np.uint8).reshape(rows, count)
        contribution = np.full((rows, count), np.nan, np.float32)
        exact = np.full((rows, self._elements), np.nan)
        grad = np.concatenate([columns.before[None], np.full((rows, count), np.nan, np.float32)])
        exact_grad = np.concatenate([columns.exact_before[None], np.full((rows, self._elements), np.nan)])
        alike, unmeasured = np.array(columns.alike, np.int64), np.array(columns.unmeasured, np.int64)
        columns.contribution.into(contribution)
        columns.exact.into(exact)
        for p, where in self._slices.items():
            exact[unmeasured[unmeasured % count == p] // count, where] = np.nan
        self._norms_of_small(exact, contribution)
        contribution.reshape(-1)[unmeasured] = np.nan
        contribution[(state & CONTRIBUTED) == 0] = np.nan
        below, exact_below = grad[1:], exact_grad[1:]
        columns.grad.into(below)
        columns.exact_grad.into(exact_below)
        # With no `.grad` before, what backward added is what is there now.
        below.reshape(-1)[alike] = contribution.reshape(-1)[alike]
        for p, where in self._slices.items():
            same = alike[alike % count == p] // count
            exact_below[same, where] = exact[same, where]
        # A `.grad` that nothing touched is what it was: fill each row from the last one that says.
        told = np.zeros((rows + 1, count), bool)
        flat = told[1:].reshape(-1)
        for places in (columns.grad.places, columns.elements, columns.alike):
            flat[np.array(places, np.int64)] = True
        last = np.maximum.accumulate(np.where(told, np.arange(rows + 1)[:, None], 0), axis=0)
        grad = grad[last, np.arange(count)]
        gone = np.concatenate([np.zeros((1, count), bool), (state & PRESENT) == 0])
        for p, where in self._slices.items():
            exact_grad[:, where] = exact_grad[last[:, p], where]
            exact_grad[gone[:, p], where] = np.nan
        self._norms_of_small(exact_grad, grad)
        grad[gone] = np.nan
        return contribution, state, exact, grad, exact_grad

    def _norms_of_small(self, elements: np.ndarray, norms: np.ndarray) -> None:
        for p, where in self._slices.items():
            norms[:, p] = np.sqrt(np.square(elements[:, where]).sum(axis=1))

    def _news(self) -> dict[str, Any]:
        """What a chunk says beside its events: code that was not shown yet, and what has changed since."""
        news: dict[str, Any] = {}
        if self._texts:
            news["sources"] = dict(sorted(self._texts.items()))
        said = self._described()
        if said != self._said:
            self._said = said
            news |= ledgerfile.described(*said)
        self._texts.clear()
        return news

    def _described(self) -> Any:
        try:
            said = self._about()
        except Exception:
            if not self._given_up:
                raise
        else:
            if len(said[0]) == self._count:
                return said
        # It failed while the parameters were let go, or before anything was known of them.
        unknown = [Parameter(f"parameter {n}", (size,)) for n, size in enumerate(self._sizes)]
        return self._said or (unknown, {"stopped": "it did not begin"})

    def _source(self, path: str, lines: set[int]) -> str:
        text = "".join(linecache.getlines(path))
        if len(text) > _LONGEST_SOURCE:
            return ""
        return text if self._whole_sources else needed(text, lines)

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
            if error.errno not in _FULL:  # a name that cannot be: whoever passed it is told
                raise
            self._lose(error)
        except Exception:
            writer, self._writer = self._writer, None
            writer.discard()
            raise

    def _keep(self, head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if self._writer is not None:
            try:
                self._writer.append(head, arrays)
            except OSError as error:
                self._lose(error)
            else:
                if self._writer.can_be_read:
                    return
        self._chunks.append((head, {name: np.array(array) for name, array in arrays.items()}))
        self._bytes += sum(array.nbytes for array in arrays.values())
        if self._bytes > self._room and self._writer is None:
            self._spill()

    def _lose(self, error: OSError) -> None:
        """The disk takes no more: what the file has is read from there, what comes is held in memory."""
        self._let_be()
        if self._temporary:
            self._room = math.inf
        self.lost = f"{type(error).__name__}: {error}"

    def _let_be(self) -> None:
        """Write no more to the file; what it has is still read from there."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.can_be_read:
            writer.release()
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
        for index, (graph, fill) in list(self._graphs.items()):
            if fill is not None:
                self._graphs[index] = fill(graph), None
        return {index: graph for index, (graph, _) in self._graphs.items()}

    def ledger(self) -> Ledger:
        """All rows that are done, as a ledger."""
        with self._lock:
            self.settle(wait=True)
            parameters, meta = about = self._described()
            if self._ledger is None or self._ledger[0] != (self._away, about):
                if self._at:
                    self._close_columns()
                writers = self._written if self._writer is None else [*self._written, self._writer]
                parts = [writer.read() for writer in writers if writer.can_be_read]
                described: list[tuple[dict[str, Any], dict[str, np.ndarray]]]
                described = [(ledgerfile.described(parameters, meta | self._end), {})]
                chunks = self._chunks
                if not self._away:  # even without events a ledger has its columns
                    head, arrays, *_ = self._chunk()
                    chunks = [(head, {name: np.array(array) for name, array in arrays.items()})]
                whole = ledgerfile.Parts(described, *parts, chunks, described)
                self._ledger = (self._away, about), Ledger.of_arrays(ledgerfile.decode(whole))
            return self._ledger[1]

    def give_up(self) -> None:
        """Keep what is whole, drop what is not, after something of ours has failed: it may do so again."""
        with self._lock:
            self._given_up = True
            self._columns.cut(self._at, self._count, self._elements)
            self.pending[:] = [row for row in self.pending if row.done]
            with contextlib.suppress(Exception):
                self._put_away(wait=True)
            if self.pending:
                self.pending.clear()
                self._columns.cut(self._at, self._count, self._elements)

    def close(self, **end: Any) -> None:
        """Write what there is; `end` is what the file says last."""
        with self._lock:
            try:
                self.settle(wait=True)
                if self._at:
                    self._close_columns()
            except Exception:
                if not self._given_up:
                    raise
            self._end = end
            if self._flusher is not None:
                self._flusher.cancel()
                self._flusher = None
            if self._writer is not None and not self._temporary:
                try:
                    self._writer.close(**end)
                except OSError as error:
                    self._lose(error)
                self._let_be()

    def forked(self) -> None:
        """In a forked process: hold on in memory, and leave the parent's file to the parent."""
        self._lock, self._flusher = threading.RLock(), None
        if self._writer is not None and self._writer.size:
            self._let_be()
            self._temporary = False


def _place(table: dict[str, int], text: str) -> int:
    found = table.get(text)
    if found is None:
        found = table[text] = len(table)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)[:200]


def _flush(buffer: weakref.ref[Buffer]) -> None:
    here = buffer()
    if here is not None:
        with contextlib.suppress(Exception):
            here.flush()


# A fork copies a buffer as it stands, so nobody may be in the middle of a change; those whose locks this thread took.
_alive: weakref.WeakSet[Buffer] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    # The lock is held for as long as a write takes; a disk that hangs may not hang the user's fork.
    _forking.locks = [buffer._lock for buffer in list(_alive) if buffer._lock.acquire(timeout=_LONGEST_WRITE)]


def _after_fork() -> None:
    for lock in _forking.locks:
        lock.release()
    _forking.locks = []


def _in_child() -> None:
    _forking.locks = []
    for buffer in list(_alive):
        buffer.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
