"""Group the losses of backwards into objectives: one objective is one line with one operation.

Several losses of one operation in one backward are one objective where their mean was taken, and several else. That
a mean was taken is seen from three things: they have equal constants, they do not have each a size of its own, and
what they weigh in a step adds up to 1.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from accumviz.ledger.events import Details, Events, listed
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
        self, events: Events, backwards: ndarray, reasons: Sequence[str]
    ) -> None:
        self.reasons = list(reasons)
        self.first = np.zeros(len(events), int)
        self.count = np.zeros(len(events), int)
        self._events = events
        self._keys: dict[_Key, int] = {}
        self._example: dict[int, int] = {}  # of each call site, the first backward
        codes = events.column("details")
        alike: dict[tuple[int, int], list[_Term]] = {}
        table: list[_Term] = []
        for backward in backwards.tolist():
            site = int(events.sites[backward])
            code = int(codes[backward])
            self._example.setdefault(site, backward)
            if (site, code) not in alike:
                alike[site, code] = self._terms(site, events.details[code])
            terms = alike[site, code]
            self.first[backward] = len(table)
            self.count[backward] = len(terms)
            table += terms
        self._distinct = list(alike.values())
        columns = np.array(table, float)
        columns = columns.reshape(-1, len(_Term._fields)).T
        objective, reduction, self.elements, self.factor, unknown = columns
        self.objective = objective.astype(int)
        self.reduction = reduction.astype(int)
        self.unknown = unknown.astype(int)

    def _terms(self, site: int, details: Details) -> list[_Term]:
        """Return the terms of a backward at a call site, with numbers for objectives and reasons that are new."""
        recorded = listed(details)
        if not recorded:
            recorded = [{"unknown": "the ledger has no terms for it"}]
        seen: Counter[str] = Counter()
        terms = []
        for term in recorded:
            op = str(term.get("op") or "")
            seen[op] += 1
            key = _Key(site, op, seen[op])
            objective = self._keys.setdefault(key, len(self._keys))
            unknown = _unknown(term)
            if unknown not in self.reasons:
                self.reasons.append(unknown)
            reduction = UNKNOWN if unknown else _REDUCTIONS[term["reduction"]]
            elements = number(term.get("elements"))
            factor = number(term.get("factor"))
            place = self.reasons.index(unknown)
            terms.append(_Term(objective, reduction, elements, factor, place))
        return terms

    def objectives(
        self, at: ndarray, used: ndarray, step: ndarray, weight: ndarray
    ) -> tuple[ndarray, tuple[str, ...]]:
        """Return each row's objective, where those of which a mean was taken are one, and the names of all.

        Each row is the term `at` a place, `used` in a `step` with what it weighs there before clips and averages.
        """
        keys = list(self._keys)
        objective = self.objective[at]
        merged = np.arange(len(keys))
        of_operation = defaultdict(list)
        for key, n in self._keys.items():
            of_operation[key.site, key.op].append(n)
        for several in of_operation.values():
            rows = used & np.isin(objective, several)
            may_be = len(several) > 1 and self._may_be_one_mean(several)
            if may_be and _adds_to_one(step[rows], weight[rows]):
                merged[several] = several[0]
        kept, renumbered = np.unique(merged, return_inverse=True)
        kept_keys = [keys[n] for n in kept.tolist()]
        return renumbered.reshape(-1)[objective], self._names(kept_keys)

    def _may_be_one_mean(self, objectives: list[int]) -> bool:
        """Return whether a mean of these losses may have been taken.

        Then they have the same constant in each backward, as far as it is known. And they do not have each a size of
        its own, always the same, as a loss at several resolutions has.
        """
        differ = False
        sizes: dict[int, set[float]] = defaultdict(set)
        for terms in self._distinct:
            mine = [term for term in terms if term.objective in objectives]
            constants = [term.factor for term in mine]
            largest = np.abs(constants).max(initial=0)
            if mine and np.ptp(constants) > SAME * largest:
                return False
            of_means = []
            for term in mine:
                sizes[term.objective].add(term.elements)
                if term.reduction == MEAN:
                    of_means.append(term.elements)
            if of_means and np.ptp(of_means) > 0:
                differ = True
        have_sizes = all(len(its_sizes) == 1 for its_sizes in sizes.values())
        return not (differ and have_sizes)

    def _names(self, keys: list[_Key]) -> tuple[str, ...]:
        """Return the label of each objective, with as much more as distinguishes it from the others."""
        labels = {}
        for site, backward in self._example.items():
            labels[site] = self._events[backward].label or "loss"
        sites_of = Counter(labels.values())
        keys_of = Counter(key.site for key in keys)
        seen: Counter[str] = Counter()
        names = []
        for key in keys:
            name = labels[key.site]
            if sites_of[name] > 1:
                name += self._line(key.site)
            if keys_of[key.site] > 1:
                name += f" · {key.op}"
                name += f" {key.nth}" if key.nth > 1 else ""
            # Two files may have lines of the same number, and one line may be reached in two ways.
            seen[name] += 1
            if seen[name] > 1:
                name += f" [{seen[name]}]"
            names.append(name)
        return tuple(names)

    def _line(self, site: int) -> str:
        lines = self._events.column("line")
        line = lines[self._example[site]]
        return f" (line {line})" if line else ""


def _unknown(term: Details) -> str:
    """Return why a term cannot be read, "" where it can."""
    if term.get("unknown"):
        return str(term["unknown"])
    if str(term.get("reduction")) not in _REDUCTIONS:
        return "how its loss was reduced is not known"
    if math.isnan(number(term.get("factor"))):
        return "its constant is not known"
    return ""


def _adds_to_one(step: ndarray, weight: ndarray) -> bool:
    """Return whether these weights add up to 1 in most steps."""
    if not step.size or not np.isfinite(weight).all():
        return False
    _, of_step = np.unique(step, return_inverse=True)
    total = np.bincount(of_step, weight)
    is_one = np.abs(total - 1) <= SAME
    return bool(is_one.mean() >= 0.5)
