"""Sketches on their way to the ledger: flat, as the columns that they stand beside."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np


class Kept:
    """The sketches of a chunk's rows: of which row and leaf, how many elements, and those one after the other."""

    def __init__(self) -> None:
        self._where, self._elements = array("q"), array("d")

    def put(self, row: int, leaf: int, elements: Iterable[float]) -> None:
        before = len(self._elements)
        self._elements.extend(elements)
        self._where.extend((row, leaf, len(self._elements) - before))

    def cut(self, rows: int) -> None:
        """Drop what is for the rows from here on."""
        del self._where[len(self._where) // 3 * 3 :]
        while self._where and self._where[-3] >= rows:
            del self._where[-3:]
        del self._elements[sum(self._where[2::3]) :]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Row, leaf and count of each, 3 × sketches; and all elements."""
        return np.array(self._where, np.int64).reshape(-1, 3).T, np.array(self._elements)
