"""Where data loaders begin and end: what torch's own iterators tell of themselves; no code of the user's is asked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, dataloader, sampler
from torch.utils.data.distributed import DistributedSampler

# Their lengths are sums over what they were given; another's may draw a batch, or a random number.
_PLAIN = (
    sampler.BatchSampler,
    sampler.RandomSampler,
    sampler.SequentialSampler,
    sampler.SubsetRandomSampler,
    sampler.WeightedRandomSampler,
    DistributedSampler,
)
Iterating = dataloader._BaseDataLoaderIter
# The loader that each iterator belongs to.
_of: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()


def begun(loader: Any, iterator: Any) -> None:
    """Remember whose iterator this is."""
    if isinstance(iterator, Iterating):
        _of[iterator] = weakref.ref(loader)


class Loaders:
    """The loaders of a recording in the order in which they were met; none is held."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = 0

    def describe(self, what: str, source: Any) -> dict[str, Any]:
        """An event's details: `source` is a loader that begins, or an iterator that ends."""
        known = _of.get(source) if what == "ends" else None
        loader = None if known is None else known()
        loader = source if loader is None else loader  # asked whether it is true, a loader asks the data set its length
        details = {"what": what, "loader": self._number(loader), "length": length(source)}
        if what == "ends":
            given = getattr(source, "_num_yielded", None)
            details["batches"] = given if isinstance(given, int) else None
        return details | {"drop_last": drop_last(loader)}

    def _number(self, loader: Any) -> int:
        met = self._met.get(id(loader))
        if met is not None and met[0]() is loader:
            return met[1]
        self._met = {key: known for key, known in self._met.items() if known[0]() is not None}
        self._met[id(loader)] = weakref.ref(loader), self._count
        self._count += 1
        return self._count - 1


def length(source: Any) -> int | None:
    """How many batches a loader or an iterator gives, where torch itself knows; None else.

    >>> length(DataLoader(range(10), batch_size=4))
    3
    """
    try:
        batches = source._index_sampler if source._dataset_kind == dataloader._DatasetKind.Map else None
        if batches is None or type(batches) not in _PLAIN or type(getattr(batches, "sampler", batches)) not in _PLAIN:
            return None
        return len(batches)
    except Exception:  # a data set without a length, or one whose length raises
        return None


def drop_last(source: Any) -> bool | None:
    """Whether a last batch that is not full is left out; None where the loader has no say in it.

    >>> drop_last(DataLoader(range(10), batch_size=4, drop_last=True))
    True
    """
    if not isinstance(source, DataLoader):  # an iterator whose loader was never seen
        said = getattr(source, "_drop_last", None)
    elif source.batch_sampler is None:
        said = None
    else:
        said = getattr(source.batch_sampler, "__dict__", {}).get("drop_last")
    return said if isinstance(said, bool) else None
