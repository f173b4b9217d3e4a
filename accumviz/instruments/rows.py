"""From what was seen to the ledger's columns: rows wait here until their numbers are in, then freeze in bulk."""

from __future__ import annotations

import linecache
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accumviz.files import Writer
from accumviz.instruments.callsite import CallSite
from accumviz.instruments.numbers import Numbers
from accumviz.ledger import CHANGED, CONTRIBUTED, PRESENT, Event, Ledger, Parameter

# A cell or a script, not a generated file: the player shows the code beside what it did.
_LONGEST_SOURCE = 200_000
# Freezing costs a few array operations however many rows there are: so seldom, unless a file waits.
_BULK, _FILE_BULK, _SECONDS = 2048, 256, 1.0

# What a number is, and where it goes: ("contribution" or "grad", leaves), ("exact contribution" or
# "exact grad", leaf), ("loss", None), ("scale", its power) or ("detail", its name).
Target = tuple[str, Any]


class Row:
    """One event before it is frozen: what is known of it, and which numbers are still to come."""

    # Class attributes, because most events need few of them and a row is made in the training loop.
    loss, scale = float("nan"), 1.0
    before = after = float("nan")
    present = b""
    changed: Sequence[int] = ()
    contributed: Sequence[int] = ()
    same: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    targets: Sequence[Target] = ()
    numbers: Numbers | None = None
    done = False

    def __init__(self, kind: str, label: str, site: CallSite, time: float, within: str, details: dict[str, Any]):
        self.kind, self.label, self.site, self.time = kind, label, site, time
        self.within, self.details = within, details

    def event(self, index: int) -> Event:
        site = self.site
        plain = {k: v if isinstance(v, bool | int | float | str | list) else repr(v) for k, v in self.details.items()}
        return Event(
            index, self.kind, self.label, site.file, site.line, site.source, self.time, self.loss, self.scale,
            self.before, self.after, self.within, plain,
        )


class Backward(Row):
    """A backward that is running: what it started from, and what has reached which leaf so far."""

    keeps = False
    storages: dict[int, int] | None = None
    bytes = 0

    def __init__(self, label: str, site: CallSite, time: float, within: str, had: bytearray) -> None:
        super().__init__("backward", label, site, time, within, {})
        self.had = had
        self.thread = threading.get_ident()
        self.nodes: list[Any] = []
        self.targets: list[Target] = []
        self.pieces: list[torch.Tensor] = []
        self.fresh: dict[int, None] = {}
        self.settled: dict[int, None] = {}
        self.held: dict[int, torch.Tensor] = {}
        self.unknown: set[int] = set()

    def expect(self, target: Target, tensor: torch.Tensor) -> None:
        """Take a number that is still on a device, as it is now."""
        self.targets.append(target)
        self.pieces.append(tensor.detach().clone())

    def receive(self, i: int, grad: torch.Tensor) -> None:
        """Take note of what autograd is about to add to a leaf's `.grad`."""
        if i in self.settled:  # a reentrant checkpoint brings contributions in parts; this one came too late
            self.unknown.add(i)
        elif not self.had[i]:
            # Kept nowhere: autograd may then hand this very tensor to `.grad` without a copy.
            self.fresh[i] = None
        elif i in self.held:
            self.held[i] = self.held[i] + grad.detach()
        else:
            self.held[i] = grad.detach()
            if grad.layout is torch.strided:
                self.bytes += grad.numel() * grad.element_size()


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

    def __init__(self, sizes: list[int], small: list[int], path: str | Path | None) -> None:
        self.pending: list[Row] = []
        self._frozen: list[Row] = []
        self._parts: list[Columns] = []
        self._count = len(sizes)
        ends = np.cumsum([sizes[p] for p in small]).tolist()
        self._slices = {p: slice(end - sizes[p], end) for p, end in zip(small, ends, strict=True)}
        self._elements = ends[-1] if ends else 0
        self._sources: dict[str, str] = {}
        self._writer = None if path is None else Writer(path, "ledger")
        self._written, self._since = 0, time.monotonic()
        self._header: list[Parameter] = []

    def __len__(self) -> int:
        return len(self._frozen) + len(self.pending)

    def due(self) -> bool:
        """Whether enough rows are waiting to freeze, or a file has waited long enough."""
        if self._writer is None:
            return len(self.pending) >= _BULK
        return len(self.pending) >= _FILE_BULK or time.monotonic() - self._since > _SECONDS

    def settle(self, parameters: Callable[[], list[Parameter]], *, wait: bool = False) -> None:
        """Freeze the rows whose numbers have arrived; with `wait`, all that are done."""
        rows = []
        for row in self.pending:
            if not row.done or not (wait or row.numbers is None or row.numbers.ready()):
                break
            rows.append(row)
        if rows:
            self._parts.append(self._freeze(rows))
            self._frozen += rows
            del self.pending[: len(rows)]
        if self._writer is not None and self._written < len(self._frozen):
            self._write(parameters())

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
            bits[CHANGED] += [base + p for p in row.changed]
            if row.contributed:
                bits[CONTRIBUTED] += [base + p for p in row.contributed]
                places["same"] += [base + p for p in row.same]
                places["lost"] += [base + p for p in row.unmeasured]
            if row.numbers is not None:
                for (what, where), array in zip(row.targets, row.numbers.read(), strict=True):
                    if what in values:
                        places[what] += [base + p for p in where]
                        values[what].append(array)
                    elif what == "exact contribution":
                        new.exact[r, self._slices[where]] = array
                    elif what == "exact grad":
                        new.exact_grad[r + 1, self._slices[where]] = array
                        fresh[r + 1, where] = True
                    else:
                        self._fill(row, what, where, float(array.sum()))
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
            with np.errstate(over="ignore", invalid="ignore"):
                norms[:, p] = np.sqrt(np.square(elements[:, where]).sum(axis=1))

    def _fill(self, row: Row, what: str, where: Any, value: float) -> None:
        if what == "loss":
            row.loss = value
        elif what == "scale":
            row.scale *= value**where
        elif where == "found_inf":
            row.details |= {"skipped": True} if value else {}
        else:
            row.details[where] = value

    def ledger(self, parameters: list[Parameter], meta: dict[str, Any], *, start: int = 0) -> Ledger:
        """The frozen rows, from `start` on, as a ledger."""
        parts = self._parts or [Columns(0, self._count, self._elements)]
        joined = {
            name: np.concatenate([getattr(part, name)[skip:] for part in parts])[start:]
            for name, skip in (("contribution", 0), ("state", 0), ("exact", 0), ("grad", 1), ("exact_grad", 1))
        }
        exact = {p: (joined["exact"][:, s].copy(), joined["exact_grad"][:, s].copy()) for p, s in self._slices.items()}
        events = tuple(row.event(i) for i, row in enumerate(self._frozen[start:]))
        return Ledger(
            tuple(parameters), events, joined["contribution"], joined["grad"], joined["state"], exact,
            sources=self._read_sources(), meta=meta,
        )

    def _read_sources(self) -> dict[str, str]:
        for name, path in dict.fromkeys((row.site.file, row.site.path) for row in self._frozen):
            if path and name not in self._sources:
                text = "".join(linecache.getlines(path))
                self._sources[name] = text if len(text) <= _LONGEST_SOURCE else ""
        return dict(self._sources)

    def begin(self, parameters: list[Parameter], meta: dict[str, Any]) -> None:
        """Write what is known before the first event, so that even an early kill leaves a ledger."""
        if self._writer is not None:
            self._header = parameters
            self._writer.append(self.ledger(parameters, meta).header())

    def _write(self, parameters: list[Parameter]) -> None:
        assert self._writer is not None
        part = self.ledger(parameters, {}, start=self._written)
        meta, arrays = part.chunk()
        if parameters != self._header:  # an optimizer was met, or a dtype changed, since the file began
            meta["parameters"] = part.header()["parameters"]
            self._header = parameters
        self._writer.append(meta, arrays)
        self._written, self._since = len(self._frozen), time.monotonic()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
