"""Collect the numbers of each event as a row, and pack rows into columns.

A `Backward` also keeps what it needs until its numbers are taken.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from accumviz.graph.graph import Graph
from accumviz.ledger.events import (
    CHANGED,
    CODES,
    CONTRIBUTED,
    NUMBERS,
    PRESENT,
    Weighed,
)
from accumviz.recorder.callsite import CallSite
from accumviz.recorder.transfer import Wire, numbers

# What a number is, and where it goes: ("contribution" or "grad", leaves), ("exact contribution" or
# "exact grad", leaf), ("exact weight", leaf), ("loss", None), ("scale", its power),
# ("lr", its group), ("detail", its name) or ("term", (its place, what of it, its power)).
Target = tuple[str, Any]
_SINGLE = frozenset(("loss", "scale", "lr", "detail", "term"))
_NAN = float("nan")


def raised(constant: float, power: int) -> float:
    """A constant, or (power -1) one divided by it.

    >>> raised(4.0, -1), raised(0.0, -1)
    (0.25, inf)
    """
    if power > 0:
        return constant
    return 1 / constant if constant else math.inf


SIGNED = "it is summed with weights of which some are negative"


def arrived(term: dict[str, Any], what: str, power: int, value: float) -> None:
    """Put a number into a term: a factor, or its elements, which are NaN where some have negative weights."""
    if what == "elements" and math.isnan(value):
        term["elements"], term["unknown"] = None, SIGNED
    elif term[what] is not None:
        term[what] *= raised(value, power)


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
    written: dict[int, bool] = {}  # noqa: RUF012 - replaced, never changed, as long as it is empty
    sent = 0
    done = False
    measured = False  # whether it has numbers beside its time

    def __init__(
        self,
        kind: str,
        label: str,
        site: CallSite,
        time: float,
        within: str,
        details: dict[str, Any],
    ):
        self.kind, self.label, self.site, self.time = kind, label, site, time
        self.within, self.details = within, details
        # Where numbers go, how many each time, and the numbers.
        self.targets: list[tuple[Target, int]] = []
        self.numbers: list[float] = []
        self.late: list[tuple[Target, list[torch.Tensor]]] = []
        self.host: list[tuple[Target, torch.Tensor]] = []

    def give(self, target: Target, found: Any) -> None:
        """Give it these numbers."""
        self.targets.append((target, len(found)))
        self.numbers.extend(found)

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
            self.give(target, flat.tolist())

    def take_all(self, target: Target, tensors: list[torch.Tensor]) -> None:
        """Take several single numbers, likewise."""
        if tensors[0].is_cpu:
            self.give(target, [tensor.item() for tensor in tensors])
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
                self.give(target, numbers(host))
        self.host = []

    def _fill(self, what: str, where: Any, value: float) -> None:
        if what == "loss":
            self.loss = value
        elif what == "scale":
            self.scale *= raised(value, where)
        elif what == "term":
            place, of, power = where
            arrived(self.details["terms"][place], of, power, value)
        elif what == "lr":
            self.details["lr"][where] = value
        elif where == "found_inf":
            self.details |= {"skipped": True} if value else {}
        else:
            self.details[where] = value


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
    the leaves in the order in which it came. What is `held` is there in its version. A contribution has been read
    (`settled`) before the event of that number. `looked` are the leaves whose `.grad` was looked at while it runs,
    `untouched` those of them in which it was then just what had come;
    `same` those whose `.grad` is what was contributed.
    """

    measured = True
    keeps = nested = False
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
        self.versions: dict[int, tuple[int, int]] = {}
        self.settled: dict[int, int] = {}
        self.same: dict[int, None] = {}
        self.looked: set[int] = set()
        self.untouched: set[int] = set()
        self.streams: set[int] = set()  # on which contributions came


# What a row says beside its time if it was not measured.
_NO_NUMBERS = (_NAN, 1.0, _NAN, _NAN, _NAN, _NAN)


class Part(NamedTuple):
    """Where numbers of one kind go: those of a row from `start` to `stop`, which are of these leaves.

    Of a leaf that is `resized` there are more or fewer elements than it had when the recording opened: only their norm
    has a place.
    """

    what: str
    leaves: slice | list[int]
    places: slice | list[int]
    start: int
    stop: int
    resized: bool


class RowLayout(NamedTuple):
    """All of a row but its numbers: most rows have the shape of the one that stood on their line before.

    `number` is the shape's own, as the bytes that are kept of each row, `length` how many numbers a row has;
    `alike` and `unmeasured` are those of `Row`.
    """

    number: bytes
    length: int
    pack: Callable[..., bytes]
    state: bytes
    parts: Sequence[Part]
    alike: Sequence[int]
    unmeasured: Sequence[int]


# A shape, the rows that have it, and their numbers, a row each.
Group = tuple[RowLayout, np.ndarray, np.ndarray]


def _together(places: Sequence[int]) -> slice | list[int]:
    """Places as a slice where they are side by side, which is put into in a fraction of the time."""
    side_by_side = places and list(places) == list(range(places[0], places[-1] + 1))
    return slice(places[0], places[-1] + 1) if side_by_side else list(places)


def _put(
    whole: np.ndarray, rows: np.ndarray, places: slice | list[int], found: Any
) -> None:
    whole[rows if isinstance(places, slice) else rows[:, None], places] = found


class Columns:
    """So many `rows` of codes, numbers, states, contributions and `.grad`.

    `slices` are the small parameters' elements in an array of all of them. `before` is what
    `.grad` was above the first row, and `exact_before` its elements.
    """

    def __init__(
        self,
        count: int,
        slices: Mapping[int, slice],
        before: np.ndarray,
        exact_before: np.ndarray,
    ) -> None:
        self.rows = 0
        self.codes = bytearray()
        self._count, self._slices, self._elements = count, slices, len(exact_before)
        self._before, self._exact_before = before, exact_before
        self._shapes: dict[Any, RowLayout] = {}
        # Of each row, the number of its shape; and the numbers of all, one after the other.
        self._which, self._numbers = bytearray(), bytearray()

    def shape(self, row: Row) -> RowLayout:
        """The shape of this row."""
        where = tuple(
            (what, i if isinstance(i, int) else tuple(i), n)
            for (what, i), n in row.targets
        )
        key = (
            *(bytes(row.present), tuple(row.changed), tuple(row.contributed)),
            *(tuple(row.alike), tuple(row.unmeasured), where),
        )
        found = self._shapes.get(key)
        if found is None:
            parts, stop = [], len(NUMBERS)
            for what, i, n in where:
                leaves = (i,) if isinstance(i, int) else i
                own = self._slices[i] if isinstance(i, int) else None
                places = leaves if own is None else range(own.start, own.stop)
                resized = own is not None and n != len(places)
                parts.append(
                    Part(
                        what,
                        _together(leaves),
                        _together(places),
                        stop,
                        stop + n,
                        resized,
                    )
                )
                stop += n
            number = len(self._shapes).to_bytes(4, sys.byteorder)
            packer = struct.Struct(f"{stop}d").pack
            found = RowLayout(
                number,
                stop,
                packer,
                _state(row),
                parts,
                tuple(row.alike),
                tuple(row.unmeasured),
            )
            self._shapes[key] = found
        return found

    def put(self, row: Row, codes: bytes, shape: RowLayout) -> None:
        """Add this row; what is there of one that failed half-way is dropped by `cut`."""
        if row.measured:
            self._numbers += shape.pack(
                *(
                    row.time,
                    row.loss,
                    row.scale,
                    row.before,
                    row.after,
                    row.allocated,
                    row.peak,
                ),
                *row.numbers,
            )
        else:
            self._numbers += shape.pack(row.time, *_NO_NUMBERS, *row.numbers)
        self._which += shape.number
        self.codes += codes
        self.rows += 1

    def cut(self) -> None:
        """Drop what comes behind the rows that are whole: the beginnings of one that could not be finished."""
        rows = self.rows
        del self._which[4 * rows :], self.codes[rows * 4 * len(CODES) :]
        lengths = [shape.length for shape in self._shapes.values()]
        del self._numbers[
            8 * sum(lengths[which] for which in memoryview(self._which).cast("i")) :
        ]

    def _groups(self) -> list[Group]:
        """Each shape, the rows that have it, and their numbers, a row each."""
        which, flat = (
            np.frombuffer(self._which, np.int32),
            np.frombuffer(self._numbers, np.float64),
        )
        shapes = list(self._shapes.values())
        lengths = np.array([shape.length for shape in shapes], np.int64)[which]
        heads = np.cumsum(lengths) - lengths
        rows = [np.flatnonzero(which == number) for number in range(len(shapes))]
        return [
            (shape, at, flat[heads[at][:, None] + np.arange(shape.length)])
            for shape, at in zip(shapes, rows, strict=True)
        ]

    def arrays(
        self,
    ) -> tuple[tuple[np.ndarray, ...], Weighed]:
        """Numbers, state, contribution, its elements, `.grad` and its elements, these two with what was before on top.

        With them, the weights of the small leaves after the rows that were given any.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self._arrays()

    def _arrays(
        self,
    ) -> tuple[tuple[np.ndarray, ...], Weighed]:
        count, rows = self._count, self.rows
        measured, state = (
            np.empty((rows, len(NUMBERS))),
            np.empty((rows, count), np.uint8),
        )
        contribution = np.full((rows, count), np.nan, np.float32)
        exact = np.full((rows, self._elements), np.nan)
        grad = np.concatenate(
            [self._before[None], np.full((rows, count), np.nan, np.float32)]
        )
        exact_grad = np.concatenate(
            [self._exact_before[None], np.full((rows, self._elements), np.nan)]
        )
        below, exact_below = grad[1:], exact_grad[1:]
        told = np.zeros((rows + 1, count), bool)
        flat = told[1:].reshape(-1)
        wholes = {
            "contribution": contribution,
            "grad": below,
            "exact contribution": exact,
            "exact grad": exact_below,
        }
        groups = self._groups()
        for shape, at, found in groups:
            measured[at], state[at] = (
                found[:, : len(NUMBERS)],
                np.frombuffer(shape.state, np.uint8),
            )
            for part in shape.parts:
                numbers = found[:, part.start : part.stop]
                if part.resized and part.what != "exact weight":
                    length = np.sqrt(np.square(numbers).sum(axis=1, keepdims=True))
                    _put(
                        wholes[part.what.removeprefix("exact ")],
                        at,
                        part.leaves,
                        length,
                    )
                elif part.what in wholes:
                    _put(wholes[part.what], at, part.places, numbers)
                if part.what in ("grad", "exact grad"):
                    _put(told[1:], at, part.leaves, True)
        alike = self._flat([(at, shape.alike) for shape, at, _ in groups])
        unmeasured = self._flat([(at, shape.unmeasured) for shape, at, _ in groups])
        for p, where in self._slices.items():
            exact[unmeasured[unmeasured % count == p] // count, where] = np.nan
        self._norms_of_small(exact, contribution)
        contribution.reshape(-1)[unmeasured] = np.nan
        contribution[(state & CONTRIBUTED) == 0] = np.nan
        # With no `.grad` before, what backward added is what is there now.
        below.reshape(-1)[alike] = contribution.reshape(-1)[alike]
        for p, where in self._slices.items():
            same = alike[alike % count == p] // count
            exact_below[same, where] = exact[same, where]
        # A `.grad` that nothing touched is what it was: fill each row from the last one that says.
        flat[alike] = True
        last = np.maximum.accumulate(
            np.where(told, np.arange(rows + 1)[:, None], 0), axis=0
        )
        grad = grad[last, np.arange(count)]
        gone = np.concatenate([np.zeros((1, count), bool), (state & PRESENT) == 0])
        for p, where in self._slices.items():
            exact_grad[:, where] = exact_grad[last[:, p], where]
            exact_grad[gone[:, p], where] = np.nan
        self._norms_of_small(exact_grad, grad)
        grad[gone] = np.nan
        return (
            (measured, state, contribution, exact, grad, exact_grad),
            self._weighed(groups),
        )

    def _weighed(self, groups: list[Group]) -> Weighed:
        groups = [
            group
            for group in groups
            if any(part.what == "exact weight" for part in group[0].parts)
        ]
        if not groups:
            return Weighed(np.zeros(0, np.int64), {})
        rows = np.sort(np.concatenate([at for _, at, _ in groups]))
        whole = np.full((len(rows), self._elements), np.nan)
        for shape, at, found in groups:
            for part in shape.parts:
                if part.what == "exact weight" and not part.resized:
                    _put(
                        whole,
                        np.searchsorted(rows, at),
                        part.places,
                        found[:, part.start : part.stop],
                    )
        return Weighed(rows, {p: whole[:, where] for p, where in self._slices.items()})

    def _flat(self, sets: list[tuple[np.ndarray, Sequence[int]]]) -> np.ndarray:
        """The places of rows and leaves in an array of all of them, as if it were flat."""
        places = [
            (at[:, None] * self._count + np.array(leaves, np.int64)).ravel()
            for at, leaves in sets
            if leaves
        ]
        return np.concatenate(places) if places else np.zeros(0, np.int64)

    def _norms_of_small(self, elements: np.ndarray, norms: np.ndarray) -> None:
        for p, where in self._slices.items():
            length = np.sqrt(np.square(elements[:, where]).sum(axis=1))
            norms[:, p] = np.where(np.isnan(length), norms[:, p], length)


def _state(row: Row) -> bytes:
    """Its bits, one byte a parameter."""
    state = bytearray(row.present)
    for p in row.changed:
        state[p] |= CHANGED
    for p in row.contributed:
        state[p] |= CONTRIBUTED
    return bytes(state)
