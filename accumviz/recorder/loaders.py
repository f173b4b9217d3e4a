"""Number the data loaders whose epochs are recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

Iterating = dataloader._BaseDataLoaderIter


class Loaders:
    """The loaders of a recording in the order in which they were met; none is held.

    A loop may hold a loader's iterator alone. What draws indices for both is the same.
    """

    def __init__(self) -> None:
        self._samplers: list[Callable[[], Any]] = []

    def number_of(self, source: Any) -> int:
        """Return the number of a loader, or of the one that an iterator is of."""
        sampler = getattr(source, "_index_sampler", source)
        for number, alive in enumerate(self._samplers):
            if alive() is sampler:
                return number
        try:
            self._samplers.append(weakref.ref(sampler))
        except TypeError:  # a plain list of indices
            self._samplers.append(lambda: sampler)
        return len(self._samplers) - 1
