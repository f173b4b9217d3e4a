"""A stretch of events on its way from rows to arrays: flat, so that the collector has nothing to walk."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from accumviz.events import CHANGED, CODES, CONTRIBUTED, NUMBERS, PRESENT
from accumviz.instruments.row import Row

_TO_BOTH = bytes(n | CHANGED | CONTRIBUTED for n in range(256))
_TO_CHANGED = bytes(n | CHANGED for n in range(256))
# A struct of so many floats is looked for once.
_packers: dict[int, Callable[..., bytes]] = {}
_numbers = struct.Struct(f"{len(NUMBERS)}d").pack


class _Places:
    """Sets of places by number: most rows fill the same ones as the row before, and a place costs as much as a float.

    `wide` is the length of a row in the array that has them.
    """

    def __init__(self, wide: int) -> None:
        self.wide = wide
        self._numbers: dict[tuple[int, ...], int] = {}
        self.sets: list[np.ndarray] = []

    def number(self, where: Sequence[int]) -> int:
        """The number of this set."""
        key = tuple(where)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.sets)
            self.sets.append(np.array(key, np.int64))
        return found


class _Scattered:
    """Rows and what they fill: sets of places, and with `put` the numbers that go there."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._rows: list[int] = []
        self._which: list[int] = []
        self._values = bytearray()

    def add(self, row: int, where: Sequence[int]) -> None:
        self._which.append(self._places.number(where))
        self._rows.append(row)

    def put(self, row: int, where: Sequence[int], values: Sequence[float]) -> None:
        pack = _packers.get(len(where))
        if pack is None:
            pack = _packers[len(where)] = struct.Struct(f"{len(where)}d").pack
        self._values += pack(*values)
        self._which.append(self._places.number(where))
        self._rows.append(row)

    def cut(self, rows: int) -> None:
        """Drop what is for the rows from here on, and numbers without a place."""
        whole = next((n for n, row in enumerate(self._rows) if row >= rows), min(len(self._rows), len(self._which)))
        del self._rows[whole:], self._which[whole:]
        if self._values:
            del self._values[8 * len(self.places()) :]

    def places(self) -> np.ndarray:
        """In the flat array, in the order in which they came."""
        if not self._rows:
            return np.zeros(0, np.int64)
        sets = [self._places.sets[which] for which in self._which]
        starts = np.repeat(np.array(self._rows) * self._places.wide, [len(places) for places in sets])
        return np.asarray(np.concatenate(sets) + starts)

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
        leaves, elements = _Places(count), _Places(self._elements)
        self._contribution, self._grad = _Scattered(leaves), _Scattered(leaves)
        self._exact, self._exact_grad = _Scattered(elements), _Scattered(elements)
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
        if row.alike:
            self._alike.add(at, row.alike)
        if row.unmeasured:
            self._unmeasured.add(at, row.unmeasured)
        self._states += _state(row, self._count)
        self.numbers += _numbers(row.time, row.loss, row.scale, row.before, row.after, row.allocated, row.peak)
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

    def _norms_of_small(self, elements: np.ndarray, norms: np.ndarray) -> None:
        for p, where in self._slices.items():
            norms[:, p] = np.sqrt(np.square(elements[:, where]).sum(axis=1))


def _state(row: Row, count: int) -> bytes | bytearray:
    """Its bits, one byte a parameter."""
    state, changed, contributed = row.present, row.changed, row.contributed
    if not changed:
        return state
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
