"""Group the losses of backwards into objectives: one objective is one line with one operation.

Several losses of one operation in one backward are one objective where their mean was taken, and several else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.events import Events
from accumviz.ledger.flow import SAME, number

UNKNOWN, MEAN, SUM = range(3)


class _Key(NamedTuple):
    """An objective: the call site of its backwards, the loss's operation, and which of several of a kind."""

    site: int
    op: str
    nth: int


class Terms:
    """The terms of these backwards as columns; by event, `first` and `count` say which are a backward's.

    `unknown` are places in `reasons`, which begin with those given: why a term cannot be read.
    """

    def __init__(
        self, events: Events, backwards: np.ndarray, reasons: Sequence[str]
    ) -> None:
        self.reasons = list(reasons)
        self.first, self.count = np.zeros((2, len(events)), int)
        self._events, self._sites = events, call_sites(events)
        self._example: dict[int, int] = {}  # of each call site, the first backward
        numbers: dict[_Key, int] = {}
        parsed: dict[tuple[int, int], list[tuple[float, ...]]] = {}
        rows: list[tuple[float, ...]] = []
        codes = events.column("details").tolist()
        for b in backwards.tolist():
            site = int(self._sites[b])
            self._example.setdefault(site, b)
            if (site, codes[b]) not in parsed:
                terms = events.details[codes[b]].get("terms")
                parsed[site, codes[b]] = [
                    (numbers.setdefault(key, len(numbers)), *self._read(term))
                    for key, term in _numbered(site, terms)
                ]
            self.first[b], self.count[b] = len(rows), len(parsed[site, codes[b]])
            rows += parsed[site, codes[b]]
        self._keys = list(numbers)
        table = np.array(rows, float).reshape(-1, 5)
        self.objective, self.reduction, self.unknown = table[:, [0, 1, 4]].T.astype(int)
        self.elements, self.factor = table[:, 2], table[:, 3]

    def _read(self, term: Mapping[str, Any]) -> tuple[float, ...]:
        """Return a term's reduction, elements, factor and why it is unknown, as numbers."""
        factor, elements = number(term.get("factor")), number(term.get("elements"))
        reduction = {"mean": MEAN, "sum": SUM}.get(str(term.get("reduction")), UNKNOWN)
        unknown = str(term.get("unknown") or "")
        if not unknown and reduction == UNKNOWN:
            unknown = "how its loss was reduced is not known"
        elif not unknown and math.isnan(factor):
            unknown = "its constant is not known"
        if unknown not in self.reasons:
            self.reasons.append(unknown)
        reduction = UNKNOWN if unknown else reduction
        return reduction, elements, factor, self.reasons.index(unknown)

    def objectives(
        self, objective: np.ndarray, rows: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return each row's objective, where those of which a mean was taken are one, and the names of all.

        `rows` are columns of shares, and `weight`: what the loss weighs in the step before clips and averages.
        """
        kinds: dict[tuple[int, str], int] = {}
        kind_of = np.array(
            [kinds.setdefault(key[:2], n) for n, key in enumerate(self._keys)], int
        )
        several = {kind_of[n] for n, key in enumerate(self._keys) if key.nth > 1}
        merged = np.arange(len(self._keys))
        for kind in several:
            mine = kind_of[objective] == kind
            columns = {name: column[mine] for name, column in rows.items()}
            if _parts_of_a_mean(objective[mine], columns):
                merged[kind_of == kind] = kind
        kept, renumbered = np.unique(merged, return_inverse=True)
        names = self._names([self._keys[n] for n in kept.tolist()])
        return renumbered.reshape(-1)[objective], names

    def _names(self, keys: list[_Key]) -> tuple[str, ...]:
        """Return the label of each objective, with as much more as tells it from the others."""
        lines = self._events.column("line")
        labels = {
            site: self._events.label(b) or "loss" for site, b in self._example.items()
        }
        shared, sites = Counter(labels.values()), Counter(key.site for key in keys)
        seen: Counter[str] = Counter()
        names = []
        for site, op, nth in keys:
            name, line = labels[site], lines[self._example[site]]
            if shared[name] > 1 and line:
                name += f" (line {line})"
            if sites[site] > 1:
                name += f" · {op}"
                name += f" {nth}" if nth > 1 else ""
            # Two files may have lines of the same number, and one line may be reached in two ways.
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name} [{seen[name]}]")
        return tuple(names)


def _numbered(site: int, terms: Any) -> Iterator[tuple[_Key, Mapping[str, Any]]]:
    """The terms of a backward, each with its objective."""
    if not isinstance(terms, list) or not terms:
        missing = terms is None
        why = (
            "the ledger has no terms for it" if missing else "its terms cannot be read"
        )
        terms = [{"unknown": why}]
    seen: Counter[str] = Counter()
    for given in terms:
        readable = isinstance(given, Mapping)
        term = given if readable else {"unknown": "its terms cannot be read"}
        op = str(term.get("op") or "")
        seen[op] += 1
        yield _Key(site, op, seen[op]), term


def _parts_of_a_mean(objective: np.ndarray, rows: Mapping[str, np.ndarray]) -> bool:
    """Whether the losses of one operation in each backward are parts of a mean: equal, and 1 in most steps.

    Those that have each a size of its own, always the same, are different things: a loss at several resolutions.
    """
    used, weight = ~rows["erased"], rows["weight"]
    if not used.any() or not np.isfinite(weight[used]).all():
        return False
    _, of_step = np.unique(rows["step"][used], return_inverse=True)
    total = np.bincount(of_step, weight[used])
    if 2 * (np.abs(total - 1) <= SAME).sum() < total.size:
        return False
    constant, elements = rows["constant"], rows["elements"]
    if (_spread(constant, rows["backward"]) > SAME * np.abs(constant).max()).any():
        return False
    if not rows["mean"].any() or not (_spread(elements, rows["backward"]) > 0).any():
        return True
    return bool((_spread(elements, objective) > 0).any())


def _spread(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The largest less the smallest value of each group."""
    _, group = np.unique(group, return_inverse=True)
    low, high = np.full((2, group.max() + 1), np.inf)
    np.minimum.at(low, group, values)
    np.minimum.at(high, group, -values)
    found: np.ndarray = np.where(np.isfinite(low), -high - low, 0)
    return found


def call_sites(events: Events) -> np.ndarray:
    """Number the call sites of events: equal where the same lines led to the same expression."""
    codes = [events.column(name) for name in ("file", "line", "label", "frames")]
    _, sites = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True)
    found: np.ndarray = sites.reshape(-1)
    return found
