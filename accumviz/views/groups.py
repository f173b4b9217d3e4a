"""Which parameters stand together under one name, so that many of them can be read; needs nothing but names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple


class Group(NamedTuple):
    """Neighbouring rows under one name."""

    name: str
    start: int
    stop: int


def group_rows(names: Sequence[str], most: int = 26) -> list[Group]:
    """Group neighbouring parameters by the deepest module prefix that gives at most `most` groups.

    >>> group_rows(["a.weight", "a.bias", "b.weight"], most=2)
    [Group(name='a', start=0, stop=2), Group(name='b', start=2, stop=3)]
    """
    # The ranks of a ledger of several come first: "rank 0 · encoder.weight".
    parts = [re.split(r"(?<= · )|(?<=\.)", name) for name in names]
    best: list[Group] = []
    for depth in range(1, max((len(p) for p in parts), default=1) + 1):
        # A name stays whole only when it is all there is; otherwise its last part is inside the group.
        keys = ["".join(p[:depth]).rstrip(" ·.") for p in parts]
        groups, start = [], 0
        for key, rows in itertools.groupby(keys):
            count = len(list(rows))
            groups.append(Group(key, start, start + count))
            start += count
        if best and len(groups) > most:
            break
        best = groups
    return best
