"""Record where an epoch of a data loader begins and ends."""

from __future__ import annotations

import weakref
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


class _Known:
    """A loader that was seen: what is known of it when the loop holds only its iterator."""

    def __init__(self, loader: Any) -> None:
        self.loader = weakref.ref(loader)
        self.drop_last = drop_last(loader)


# Both by their `id`, and let go with the object: a loader asked for its hash may be the user's code.
_loaders: dict[int, _Known] = {}
_of: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def _known(loader: Any) -> _Known:
    known = _loaders.get(id(loader))
    if known is None or known.loader() is not loader:
        for key in [
            key for key, other in list(_loaders.items()) if other.loader() is None
        ]:
            del _loaders[key]
        known = _loaders[id(loader)] = _Known(loader)
    return known


def begin(loader: Any, iterator: Any) -> None:
    """Remember whose iterator this is."""
    if isinstance(iterator, Iterating):
        _of[iterator] = _known(loader)


class Loaders:
    """The loaders of a recording in the order in which they were met; none is held."""

    def __init__(self) -> None:
        self._met: weakref.WeakKeyDictionary[_Known, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def describe(self, what: str, source: Any) -> dict[str, Any]:
        """An event's details: `source` is a loader that begins, or an iterator that ends."""
        known = _of.get(source) if what == "ends" else None
        known = _known(source) if known is None else known
        if known not in self._met:
            self._met[known] = self._count
            self._count += 1
        details = {"what": what, "loader": self._met[known], "length": length(source)}
        if what == "ends":
            given = getattr(source, "_num_yielded", None)
            details["batches"] = given if isinstance(given, int) else None
        return details | {"drop_last": known.drop_last}


def length(source: Any) -> int | None:
    """How many batches a loader or an iterator gives, where torch itself knows; None else.

    >>> length(DataLoader(range(10), batch_size=4))
    3
    """
    try:
        batches = (
            source._index_sampler
            if source._dataset_kind == dataloader._DatasetKind.Map
            else None
        )
        if (
            batches is None
            or type(batches) not in _PLAIN
            or type(getattr(batches, "sampler", batches)) not in _PLAIN
        ):
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
