"""Events on their way to the ledger: a row each, then columns, which are flat: the collector has no more to walk.

A `Backward` also keeps what it needs until its numbers are taken.
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from accumviz.events import CHANGED, CODES, CONTRIBUTED, NUMBERS, PRESENT, Weighed
from accumviz.graph import Graph
from accumviz.recorder.callsite import CallSite
from accumviz.recorder.transfer import Wire, numbers

# What a number is, and where it goes: ("contribution" or "grad", leaves), ("exact contribution" or
# "exact grad", leaf), ("exact weight", leaf), ("loss", None), ("scale", its power), ("lr", its group),
# ("detail", its name) or ("term", (its place, what of it, its power)).
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
    """Put a number into a term: a factor, its elements, or the lowest of the weights that it is summed with."""
    if what == "lowest":
        if value < 0:
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
    sent = 0
    done = False
    measured = False  # whether it has numbers beside its time

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

    measured = True
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


_TO_BOTH = bytes(n | CHANGED | CONTRIBUTED for n in range(256))
_TO_CHANGED = bytes(n | CHANGED for n in range(256))
_numbers, _time = struct.Struct(f"{len(NUMBERS)}d").pack, struct.Struct("d").pack
_NO_NUMBERS = _numbers(_NAN, _NAN, 1.0, _NAN, _NAN, _NAN, _NAN)[8:]


@functools.cache
def _packer(count: int) -> Callable[..., bytes]:
    """What makes bytes of so many floats."""
    return struct.Struct(f"{count}d").pack


class _Sets:
    """Sets of places by number: most rows fill the same ones as the row before, and a place costs as much as a float.

    `wide` is the length of a row in the array that has the places.
    """

    def __init__(self, wide: int) -> None:
        self.wide = wide
        # Its number, and what makes bytes of as many numbers.
        self.known: dict[tuple[int, ...], tuple[int, Callable[..., bytes]]] = {}

    def meet(self, key: tuple[int, ...]) -> tuple[int, Callable[..., bytes]]:
        """Number this set."""
        found = self.known[key] = len(self.known), _packer(len(key))
        return found

    def places(self, rows: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Where in the flat array these rows' sets are, one after the other."""
        lengths = np.array([len(key) for key in self.known])
        flat = np.array([place for key in self.known for place in key], np.int64)
        own = lengths[which]
        before = np.cumsum(own) - own
        within = np.arange(own.sum()) + np.repeat((np.cumsum(lengths) - lengths)[which] - before, own)
        return np.asarray(flat[within] + np.repeat(rows * self.wide, own))


# A row and a set as one number: a list of them is longer than a flat array, and two arrays cost twice as much.
_SETS = 1 << 32


class _Scattered:
    """Rows and what they fill: sets of places, and with `put` the numbers that go there."""

    def __init__(self, sets: _Sets) -> None:
        self._sets = sets
        self._filled = array("q")
        self._values = bytearray()

    def add(self, row: int, where: Sequence[int]) -> None:
        key = tuple(where)
        known = self._sets.known.get(key) or self._sets.meet(key)
        self._filled.append(row * _SETS + known[0])

    def put(self, row: int, where: Sequence[int], values: Sequence[float]) -> None:
        key = tuple(where)
        number, pack = self._sets.known.get(key) or self._sets.meet(key)
        self._values += pack(*values)
        self._filled.append(row * _SETS + number)

    def cut(self, rows: int) -> None:
        """Drop what is for the rows from here on, and numbers without a place."""
        while self._filled and self._filled[-1] >= rows * _SETS:
            self._filled.pop()
        if self._values:
            del self._values[8 * len(self.places()) :]

    def places(self) -> np.ndarray:
        """In the flat array, in the order in which they came."""
        if not self._filled:
            return np.zeros(0, np.int64)
        filled = np.array(self._filled, np.int64)
        return self._sets.places(filled // _SETS, filled % _SETS)

    def into(self, whole: np.ndarray) -> np.ndarray:
        """Put the numbers in their places, and return these; where one was given several numbers, it has the last."""
        places = self.places()
        whole.reshape(-1)[places] = np.frombuffer(self._values, np.float64)
        return places


class Columns:
    """So many `rows` of codes, numbers, states, contributions and `.grad`.

    `slices` are the small parameters' elements in an array of all of them. `before` is what
    `.grad` was above the first row, and `exact_before` its elements.
    """

    def __init__(self, count: int, slices: Mapping[int, slice], before: np.ndarray, exact_before: np.ndarray) -> None:
        self.rows = 0
        self.codes, self.numbers = bytearray(), bytearray()
        self._count, self._slices, self._elements = count, slices, len(exact_before)
        self._within = {p: tuple(range(where.start, where.stop)) for p, where in slices.items()}
        self._before, self._exact_before = before, exact_before
        self._states = bytearray()
        leaves, elements = _Sets(count), _Sets(self._elements)
        self._contribution, self._grad = _Scattered(leaves), _Scattered(leaves)
        self._exact, self._exact_grad = _Scattered(elements), _Scattered(elements)
        # After which row, and of which small leaf; and their weights, one after the other.
        self._weighed, self._weights = array("q"), bytearray()
        # Small leaves whose elements are given, leaves whose `.grad` is what was contributed, and those that got
        # something of unknown size.
        self._given, self._alike, self._unmeasured = _Scattered(leaves), _Scattered(leaves), _Scattered(leaves)

    def put(self, row: Row, codes: bytes) -> None:
        """Add this row and its codes; what is there of one that failed half-way is dropped by `cut`."""
        at = self.rows
        for (what, where), found in row.values:
            if what == "contribution":
                self._contribution.put(at, where, found)
            elif what == "grad":
                self._grad.put(at, where, found)
            elif what == "exact contribution":
                self._exact.put(at, self._within[where][: len(found)], found)
            elif what == "exact grad":
                self._exact_grad.put(at, self._within[where][: len(found)], found)
                self._given.add(at, (where,))
            elif what == "exact weight":
                self._weighed.append(at * _SETS + where)
                self._weights += _packer(len(found))(*found)
        if row.alike:
            self._alike.add(at, row.alike)
        if row.unmeasured:
            self._unmeasured.add(at, row.unmeasured)
        self._states += _state(row, self._count) if row.changed else row.present
        if row.measured:
            self.numbers += _numbers(row.time, row.loss, row.scale, row.before, row.after, row.allocated, row.peak)
        else:
            self.numbers += _time(row.time)
            self.numbers += _NO_NUMBERS
        self.codes += codes
        self.rows = at + 1

    def cut(self) -> None:
        """Drop what comes behind the rows that are whole: the beginnings of one that could not be finished."""
        rows = self.rows
        del (
            self._states[rows * self._count :],
            self.numbers[rows * 8 * len(NUMBERS) :],
            self.codes[rows * 4 * len(CODES) :],
        )
        for scattered in (self._contribution, self._grad, self._exact, self._exact_grad, self._given, self._alike):
            scattered.cut(rows)
        self._unmeasured.cut(rows)
        while self._weighed and self._weighed[-1] >= rows * _SETS:
            self._weighed.pop()
        sizes = {p: where.stop - where.start for p, where in self._slices.items()}
        del self._weights[8 * sum(sizes[key % _SETS] for key in self._weighed) :]

    def arrays(self) -> tuple[np.ndarray, ...]:
        """State, contribution, its elements, `.grad` and its elements; the last two with what was before on top."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._arrays()

    def _arrays(self) -> tuple[np.ndarray, ...]:
        count, rows = self._count, self.rows
        state = np.frombuffer(self._states, np.uint8).reshape(rows, count)
        contribution = np.full((rows, count), np.nan, np.float32)
        exact = np.full((rows, self._elements), np.nan)
        grad = np.concatenate([self._before[None], np.full((rows, count), np.nan, np.float32)])
        exact_grad = np.concatenate([self._exact_before[None], np.full((rows, self._elements), np.nan)])
        alike, unmeasured = self._alike.places(), self._unmeasured.places()
        self._contribution.into(contribution)
        self._exact.into(exact)
        for p, where in self._slices.items():
            exact[unmeasured[unmeasured % count == p] // count, where] = np.nan
        self._norms_of_small(exact, contribution)
        contribution.reshape(-1)[unmeasured] = np.nan
        contribution[(state & CONTRIBUTED) == 0] = np.nan
        below, exact_below = grad[1:], exact_grad[1:]
        told = np.zeros((rows + 1, count), bool)
        flat = told[1:].reshape(-1)
        flat[self._grad.into(below)] = True
        self._exact_grad.into(exact_below)
        # With no `.grad` before, what backward added is what is there now.
        below.reshape(-1)[alike] = contribution.reshape(-1)[alike]
        for p, where in self._slices.items():
            same = alike[alike % count == p] // count
            exact_below[same, where] = exact[same, where]
        # A `.grad` that nothing touched is what it was: fill each row from the last one that says.
        flat[self._given.places()] = flat[alike] = True
        last = np.maximum.accumulate(np.where(told, np.arange(rows + 1)[:, None], 0), axis=0)
        grad = grad[last, np.arange(count)]
        gone = np.concatenate([np.zeros((1, count), bool), (state & PRESENT) == 0])
        for p, where in self._slices.items():
            exact_grad[:, where] = exact_grad[last[:, p], where]
            exact_grad[gone[:, p], where] = np.nan
        self._norms_of_small(exact_grad, grad)
        grad[gone] = np.nan
        return state, contribution, exact, grad, exact_grad

    def weighed(self) -> Weighed:
        """The weights of the small leaves, after the rows that were given any."""
        if not self._weighed:
            return Weighed(np.zeros(0, np.int64), {})
        keys = np.array(self._weighed, np.int64)
        rows, at = np.unique(keys // _SETS, return_inverse=True)
        leaves = keys % _SETS
        found = {p: np.full((len(rows), s.stop - s.start), np.nan) for p, s in self._slices.items()}
        sizes = np.zeros(self._count, np.int64)
        sizes[list(found)] = [values.shape[1] for values in found.values()]
        ends = np.cumsum(sizes[leaves])
        flat = np.frombuffer(self._weights, np.float64)
        for p, values in found.items():
            mine = np.flatnonzero(leaves == p)
            if mine.size:
                values[at[mine]] = flat[(ends[mine] - sizes[p])[:, None] + np.arange(sizes[p])]
        return Weighed(rows, found)

    def _norms_of_small(self, elements: np.ndarray, norms: np.ndarray) -> None:
        for p, where in self._slices.items():
            norms[:, p] = np.sqrt(np.square(elements[:, where]).sum(axis=1))


def _state(row: Row, count: int) -> bytes | bytearray:
    """The bits of a row that changed something, one byte a parameter."""
    state, changed, contributed = row.present, row.changed, row.contributed
    both = changed is contributed
    if len(changed) == count:
        state = state.translate(_TO_BOTH if both else _TO_CHANGED)
        if both or not contributed:
            return state
    state = bytearray(state)
    if len(changed) != count:
        bits = CHANGED | CONTRIBUTED if both else CHANGED
        for p in changed:
            state[p] |= bits
    if not both:
        for p in contributed:
            state[p] |= CONTRIBUTED
    return state
