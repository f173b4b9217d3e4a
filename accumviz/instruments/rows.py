"""From what was seen to the ledger's columns: rows wait here until their numbers are in, then freeze in bulk."""

from __future__ import annotations

import contextlib
import linecache
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from accumviz import ledgerfile
from accumviz.files import Writer
from accumviz.graph import Graph
from accumviz.instruments.callsite import CallSite
from accumviz.instruments.numbers import Wire, numbers
from accumviz.ledger import CHANGED, CONTRIBUTED, PRESENT, Event, Ledger, Parameter

# A cell or a script, not a generated file: the player shows the code beside what it did.
_LONGEST_SOURCE = 200_000
# Freezing costs a few array operations however many rows there are: so seldom, but before they take
# much memory, and soon if a file waits.
_BULK, _BULK_NUMBERS, _FILE_BULK, _SECONDS = 2048, 200_000, 256, 1.0

# What a number is, and where it goes: ("contribution" or "grad", leaves), ("exact contribution" or
# "exact grad", leaf), ("loss", None), ("scale", its power), ("lr", its group) or ("detail", its name).
Target = tuple[str, Any]


class Row:
    """One event before it is frozen: what is known of it, and which numbers are still to come."""

    # Class attributes, because most events need few of them and a row is made in the training loop.
    loss, scale = float("nan"), 1.0
    before = after = float("nan")
    allocated = peak = float("nan")
    present: bytes | bytearray = b""
    changed: Sequence[int] = ()
    contributed: Sequence[int] = ()
    same: Sequence[int] = ()
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

    def strip(self) -> None:
        """Let go of what is in the columns now."""
        self.changed = self.contributed = self.same = ()
        self.values, self.late, self.host = _NOTHING, _NOTHING, _NOTHING
        self.present = b""

    def event(self, index: int) -> Event:
        site = self.site
        plain = {k: v if isinstance(v, bool | int | float | str | list) else repr(v) for k, v in self.details.items()}
        return Event(
            index,
            self.kind,
            self.label,
            site.file,
            site.line,
            site.source,
            self.time,
            self.loss,
            self.scale,
            self.before,
            self.after,
            self.within,
            plain,
            allocated=self.allocated,
            peak=self.peak,
        )


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

    `had` are the PRESENT bits when it began. Of a leaf that had no `.grad`, nothing is kept while
    it runs (autograd may then hand it the very tensor that comes, without a copy); such a leaf is
    in `fresh` if it has our hook. What comes to the others is `held` until it is reduced; then the
    leaf is `settled`, before the row of that number. It is `loose` when our hooks came too late to
    tell all that reached a leaf.
    """

    keeps = loose = False
    task: int | None = None  # the engine's number for it, where several threads train
    tags: Sequence[Any] = ()
    storages: dict[int, int] | None = None
    waiting = 0  # bytes in `held`
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
        self.fresh: dict[int, None] = {}
        self.settled: dict[int, int] = {}
        self.held: dict[int, torch.Tensor] = {}
        self.unknown: dict[int, None] = {}
        self.streams: set[int] = set()  # on which contributions came

    def receive(self, i: int, grad: torch.Tensor, freed: bool) -> None:
        """Take note of what autograd is about to add to a leaf's `.grad`."""
        if i in self.settled:  # a reentrant checkpoint brings contributions in parts; this one came too late
            self.unknown[i] = None
        elif i in self.held:
            self.held[i] = self.held[i] + grad.detach()
        elif self.had[i] or freed:
            # Detached where `.grad` is another tensor anyway; else the reference keeps it another tensor.
            self.held[i] = grad.detach() if self.had[i] else grad
            if grad.layout is torch.strided:
                self.waiting += grad.numel() * grad.element_size()
        else:
            self.fresh[i] = None

    def strip(self) -> None:
        super().strip()
        self.fresh = self.settled = self.unknown = self.held = _EMPTY
        self.had, self.nodes, self.syncs, self.tags = b"", (), (), ()


# What a stripped row holds instead of containers of its own.
_EMPTY: dict[int, Any] = {}
_NOTHING: list[Any] = []


class Columns:
    """The frozen arrays of a stretch of rows, one row per event."""

    def __init__(self, rows: int, count: int, elements: int) -> None:
        self.contribution = np.full((rows, count), np.nan, np.float32)
        self.state = np.zeros((rows, count), np.uint8)
        self.exact = np.full((rows, elements), np.nan)
        # One row more at the top: what stood before the first.
        self.grad = np.full((rows + 1, count), np.nan, np.float32)
        self.exact_grad = np.full((rows + 1, elements), np.nan)


class Rows:
    """The growing columns of a recording; written to a file as they grow, if there is one."""

    def __init__(self, sizes: list[int], small: list[int], wire: Wire, path: str | Path | None) -> None:
        self._wire = wire
        self.pending: list[Row] = []
        self._frozen: list[Row] = []
        self._parts: list[Columns] = []
        self._count = len(sizes)
        ends = np.cumsum([sizes[p] for p in small]).tolist()
        self._slices = {p: slice(end - sizes[p], end) for p, end in zip(small, ends, strict=True)}
        self._elements = ends[-1] if ends else 0
        self._lock = threading.Lock()
        self._writer = None if path is None else Writer(path, "ledger")
        self._bulk = max(64, min(_BULK, _BULK_NUMBERS // max(self._count, 1)))
        self._written, self._written_parts, self._since = 0, 0, time.monotonic()
        self._told: set[str] = set()
        self._header: tuple[list[Parameter], dict[str, Any]] = ([], {})

    def __len__(self) -> int:
        return len(self._frozen) + len(self.pending)

    def graphs(self) -> dict[int, Graph]:
        """The graphs that frozen backwards ran, by event."""
        found = {}
        for i, row in enumerate(self._frozen):
            if isinstance(row, Backward) and row.graph is not None:
                if row.fill_graph is not None:
                    row.graph, row.fill_graph = row.fill_graph(row.graph), None
                found[i] = row.graph
        return found

    def due(self) -> bool:
        """Whether enough rows are waiting to freeze, or a file has waited long enough."""
        if self._writer is None:
            return len(self.pending) >= self._bulk
        return len(self.pending) >= _FILE_BULK or time.monotonic() - self._since > _SECONDS

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
        for number, row in enumerate(self.pending[position + 1 :], len(self._frozen) + position + 1):
            while arrived < len(arrivals) and arrivals[arrived][0] <= number:
                missing[arrivals[arrived][1]] = 0
                arrived += 1
            if row.within == "backward" and row.done:
                both = int.from_bytes(row.present, "little") | int.from_bytes(missing, "little")
                row.present = both.to_bytes(self._count, "little")

    def settle(
        self, parameters: Callable[[], list[Parameter]], meta: Callable[[], dict[str, Any]], *, wait: bool = False
    ) -> None:
        """Freeze the rows whose numbers have arrived; with `wait`, all that are done."""
        with self._lock:
            rows = []
            there = self._wire.wait() if wait else self._wire.arrived()
            for row in self.pending:
                if not row.done or row.sent > there:
                    break
                rows.append(row)
            if rows:
                with np.errstate(over="ignore", invalid="ignore"):
                    self._parts.append(self._freeze(rows))
                self._frozen += rows
                del self.pending[: len(rows)]
                for row in rows:
                    row.strip()
            if self._writer is not None and self._written < len(self._frozen):
                self._write(parameters(), meta())

    def _freeze(self, rows: list[Row]) -> Columns:
        new = Columns(len(rows), self._count, self._elements)
        if self._parts:
            new.grad[0], new.exact_grad[0] = self._parts[-1].grad[-1], self._parts[-1].exact_grad[-1]
        fresh = np.zeros((len(rows) + 1, self._count), bool)
        places: dict[str, list[int]] = {"contribution": [], "grad": [], "same": [], "lost": []}
        values: dict[str, list[np.ndarray]] = {"contribution": [], "grad": []}
        bits: dict[int, list[int]] = {CHANGED: [], CONTRIBUTED: []}
        for r, row in enumerate(rows):
            base = r * self._count
            changed = [base + p for p in row.changed]
            bits[CHANGED] += changed
            if row.contributed:
                alike = row.contributed is row.changed
                bits[CONTRIBUTED] += changed if alike else [base + p for p in row.contributed]
                places["same"] += changed if row.same is row.changed else [base + p for p in row.same]
                places["lost"] += [base + p for p in row.unmeasured]
            for (what, where), array in row.arrivals():
                if what in values:
                    places[what] += [base + p for p in where]
                    values[what] += [array]
                elif what == "exact contribution":
                    new.exact[r, self._slices[where]] = array
                elif what == "exact grad":
                    new.exact_grad[r + 1, self._slices[where]] = array
                    fresh[r + 1, where] = True
                else:
                    self._fill(row, what, where, float(sum(array)))
        new.state[:] = np.frombuffer(b"".join(row.present for row in rows), np.uint8).reshape(new.state.shape)
        for bit, found in bits.items():
            new.state.reshape(-1)[found] |= bit
        if values["contribution"]:
            new.contribution.reshape(-1)[places["contribution"]] = np.concatenate(values["contribution"])
        below, arrived = new.grad[1:].reshape(-1), fresh[1:].reshape(-1)
        if values["grad"]:
            below[places["grad"]] = np.concatenate(values["grad"])
            arrived[places["grad"]] = True
        self._norms_of_small(new.exact, new.contribution)
        new.contribution.reshape(-1)[places["lost"]] = np.nan
        new.contribution[(new.state & CONTRIBUTED) == 0] = np.nan
        # With no `.grad` before, what backward added is what is there now.
        below[places["same"]] = new.contribution.reshape(-1)[places["same"]]
        arrived[places["same"]] = True
        for p, where in self._slices.items():
            same = [place // self._count for place in places["same"] if place % self._count == p]
            new.exact_grad[np.array(same, int) + 1, where] = new.exact[same, where]
        self._carry(new, fresh)
        return new

    def _carry(self, new: Columns, fresh: np.ndarray) -> None:
        """A `.grad` that nothing touched is what it was: fill each row from the last one that says."""
        last = np.maximum.accumulate(np.where(fresh, np.arange(len(fresh))[:, None], 0), axis=0)
        new.grad[:] = new.grad[last, np.arange(self._count)]
        gone = np.concatenate([np.zeros((1, self._count), bool), (new.state & PRESENT) == 0])
        for p, where in self._slices.items():
            new.exact_grad[:, where] = new.exact_grad[last[:, p], where]
            new.exact_grad[gone[:, p], where] = np.nan
        self._norms_of_small(new.exact_grad, new.grad)
        new.grad[gone] = np.nan

    def _norms_of_small(self, elements: np.ndarray, norms: np.ndarray) -> None:
        for p, where in self._slices.items():
            norms[:, p] = np.sqrt(np.square(elements[:, where]).sum(axis=1))

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

    def ledger(self, parameters: list[Parameter], meta: dict[str, Any], *, rows: int = 0, parts: int = 0) -> Ledger:
        """The frozen rows as a ledger, leaving out so many rows, which are so many parts."""
        kept = self._parts[parts:] or [Columns(0, self._count, self._elements)]
        joined = {
            name: np.concatenate([getattr(part, name)[skip:] for part in kept])
            for name, skip in (("contribution", 0), ("state", 0), ("exact", 0), ("grad", 1), ("exact_grad", 1))
        }
        exact = {p: (joined["exact"][:, s].copy(), joined["exact_grad"][:, s].copy()) for p, s in self._slices.items()}
        frozen = self._frozen[rows:]
        return Ledger(
            tuple(parameters),
            tuple(row.event(i) for i, row in enumerate(frozen)),
            joined["contribution"],
            joined["grad"],
            joined["state"],
            exact,
            sources=self._read_sources(frozen),
            meta=meta,
        )

    def _read_sources(self, rows: list[Row]) -> dict[str, str]:
        sources = {}
        for site in dict.fromkeys(row.site for row in rows):
            if site.path and site.file not in sources:
                text = "".join(linecache.getlines(site.path))
                sources[site.file] = text if len(text) <= _LONGEST_SOURCE else ""
        return sources

    def begin(self, parameters: list[Parameter], meta: dict[str, Any]) -> None:
        """Write what is known before the first event, so that even an early kill leaves a ledger."""
        if self._writer is not None:
            self._header = parameters, meta
            self._writer.append(ledgerfile.header(self.ledger(parameters, meta)))

    def _write(self, parameters: list[Parameter], meta: dict[str, Any]) -> None:
        assert self._writer is not None
        part = self.ledger(parameters, meta, rows=self._written, parts=self._written_parts)
        head, arrays = ledgerfile.chunk(part)
        head["sources"] = {name: text for name, text in part.sources.items() if name not in self._told}
        self._told |= part.sources.keys()
        if (parameters, meta) != self._header:  # an optimizer was met, or a dtype changed, since the file began
            head |= ledgerfile.header(part)
            self._header = parameters, meta
        self._writer.append(head, arrays)
        self._written, self._written_parts, self._since = len(self._frozen), len(self._parts), time.monotonic()

    def give_up(self) -> None:
        """Keep what is whole, drop what is not, and write no more."""
        self.pending = [row for row in self.pending if row.done]
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
