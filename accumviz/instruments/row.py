"""One event on its way to the ledger's columns, and what a running backward keeps until it has its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch

from accumviz.graph import Graph
from accumviz.instruments.callsite import CallSite
from accumviz.instruments.numbers import Wire, numbers

# What a number is, and where it goes: ("contribution" or "grad", leaves), ("exact contribution" or
# "exact grad", leaf), ("loss", None), ("scale", its power), ("lr", its group) or ("detail", its name).
Target = tuple[str, Any]
_SINGLE = frozenset(("loss", "scale", "lr", "detail"))
_NAN = float("nan")


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
        if not flat.is_cpu:
            self.late.append((target, [flat]))
        elif target[0] in _SINGLE:
            self._fill(*target, float(sum(flat.tolist())))
        else:
            self.values.append((target, flat.tolist()))

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

    def arrive(self) -> None:
        """Take what a device has sent, once it is there."""
        for target, host in self.host:
            if target[0] in _SINGLE:
                self._fill(*target, float(sum(numbers(host))))
            else:
                self.values.append((target, numbers(host)))
        self.host = []

    def _fill(self, what: str, where: Any, value: float) -> None:
        if what == "loss":
            self.loss = value
        elif what == "scale":
            self.scale *= value**where
        elif what == "lr":
            self.details["lr"][where] = value
        elif where == "found_inf":
            self.details |= {"skipped": True} if value else {}
        else:
            self.details[where] = value


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
