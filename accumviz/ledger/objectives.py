"""Group the losses of backwards into objectives: one objective is one line with one operation.

Several losses of one operation in one backward are one objective where their mean was taken, and several else.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.events import Events, listed
from accumviz.ledger.flow import SAME, number

UNKNOWN, MEAN, SUM = range(3)
_REDUCTIONS = {"mean": MEAN, "sum": SUM}


class _Key(NamedTuple):
    """An objective: the call site of its backwards, the loss's operation, and which of several of a kind."""

    site: int
    op: str
    nth: int


class _Term(NamedTuple):
    """One loss of a backward; `unknown` is the place of the reason why it cannot be read, 0 for none."""

    objective: int
    reduction: int
    elements: float
    factor: float
    unknown: int


class Terms:
    """The terms of these backwards as columns; by event, `first` and `count` say which are a backward's.

    `unknown` are places in `reasons`, which begin with those given: why a term cannot be read.
    """

    def __init__(
        self, events: Events, backwards: np.ndarray, reasons: Sequence[str]
    ) -> None:
        self.reasons = list(reasons)
        self.first, self.count = np.zeros((2, len(events)), int)
        self._events = events
        self._keys = dict[_Key, int]()
        self._example: dict[int, int] = {}  # of each call site, the first backward
        sites = call_sites(events)
        codes = events.column("details")
        alike: dict[tuple[int, int], list[_Term]] = {}
        table: list[_Term] = []
        for b in backwards.tolist():
            site = int(sites[b])
            code = int(codes[b])
            self._example.setdefault(site, b)
            if (site, code) not in alike:
                alike[site, code] = self._terms(site, events.details[code])
            self.first[b] = len(table)
            self.count[b] = len(alike[site, code])
            table += alike[site, code]
        self._alike = list(alike.values())
        columns = np.array(table, float).reshape(-1, 5)
        self.objective = columns[:, 0].astype(int)
        self.reduction = columns[:, 1].astype(int)
        self.elements = columns[:, 2]
        self.factor = columns[:, 3]
        self.unknown = columns[:, 4].astype(int)

    def _terms(self, site: int, details: Mapping[str, Any]) -> list[_Term]:
        seen: Counter[str] = Counter()
        terms = []
        for term in listed(details) or [{"unknown": "the ledger has no terms for it"}]:
            op = str(term.get("op") or "")
            seen[op] += 1
            key = _Key(site, op, seen[op])
            objective = self._keys.setdefault(key, len(self._keys))
            factor = number(term.get("factor"))
            elements = number(term.get("elements"))
            unknown = _unknown(term)
            if unknown not in self.reasons:
                self.reasons.append(unknown)
            reduction = UNKNOWN if unknown else _REDUCTIONS[term["reduction"]]
            place = self.reasons.index(unknown)
            terms.append(_Term(objective, reduction, elements, factor, place))
        return terms

    def objectives(
        self, at: np.ndarray, used: np.ndarray, step: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return each row's objective, where those of which a mean was taken are one, and the names of all.

        Each row is the term `at` a place, `used` in a `step` with what it weighs there before clips and averages.
        """
        keys = list(self._keys)
        objective = self.objective[at]
        merged = np.arange(len(keys))
        for key in keys:
            if key.nth == 2:
                same = [n for n, one in enumerate(keys) if one[:2] == key[:2]]
                rows = used & np.isin(objective, same)
                if self._alike_parts(same) and _adds_to_one(step[rows], weight[rows]):
                    merged[same] = same[0]
        kept, renumbered = np.unique(merged, return_inverse=True)
        names = self._names([keys[n] for n in kept.tolist()])
        return renumbered.reshape(-1)[objective], names

    def _alike_parts(self, objectives: list[int]) -> bool:
        """Return whether the losses of one operation in each backward can be parts of a mean: with equal constants.

        Those that have each a size of its own, always the same, are different things: a loss at several resolutions.
        """
        sizes: dict[int, set[float]] = defaultdict(set)
        uneven = False
        for terms in self._alike:
            mine = [term for term in terms if term.objective in objectives]
            constants = [term.factor for term in mine]
            if constants and np.ptp(constants) > SAME * np.abs(constants).max():
                return False
            means = [term.elements for term in mine if term.reduction == MEAN]
            uneven |= bool(means) and np.ptp(means) > 0
            for term in mine:
                sizes[term.objective].add(term.elements)
        return not uneven or any(len(each) > 1 for each in sizes.values())

    def _names(self, keys: list[_Key]) -> tuple[str, ...]:
        """Return the label of each objective, with as much more as distinguishes it from the others."""
        lines = self._events.column("line")
        labels = {}
        for site, backward in self._example.items():
            labels[site] = self._events[backward].label or "loss"
        shared = Counter(labels.values())
        sites = Counter(key.site for key in keys)
        seen: Counter[str] = Counter()
        names = []
        for site, op, nth in keys:
            name = labels[site]
            line = lines[self._example[site]]
            if shared[name] > 1 and line:
                name += f" (line {line})"
            if sites[site] > 1:
                name += f" · {op}"
                name += f" {nth}" if nth > 1 else ""
            # Two files may have lines of the same number, and one line may be reached in two ways.
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name} [{seen[name]}]")
        return tuple(names)


def _unknown(term: Mapping[str, Any]) -> str:
    """Return why a term cannot be read, "" where it can."""
    if term.get("unknown"):
        return str(term["unknown"])
    if str(term.get("reduction")) not in _REDUCTIONS:
        return "how its loss was reduced is not known"
    if math.isnan(number(term.get("factor"))):
        return "its constant is not known"
    return ""


def _adds_to_one(step: np.ndarray, weight: np.ndarray) -> bool:
    """Return whether these weights add up to 1 in most steps."""
    _, of_step = np.unique(step, return_inverse=True)
    total = np.bincount(of_step, weight)
    whole = np.abs(total - 1) <= SAME
    return bool(np.isfinite(weight).all() and 2 * whole.sum() >= total.size > 0)


def call_sites(events: Events) -> np.ndarray:
    """Number the call sites of events: equal where the same lines led to the same expression."""
    codes = [events.column(name) for name in ("file", "line", "label", "frames")]
    _, sites = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True)
    numbers: np.ndarray = sites.reshape(-1)
    return numbers
