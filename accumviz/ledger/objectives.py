"""Group the losses of backwards into objectives: one objective is one line with one operation.

Several losses of one operation in one backward are one objective where their mean was taken, and several else. That
a mean was taken is seen from three things: they have equal constants, they do not have each a size of its own, and
what they weigh in a step adds up to 1.
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
        self.first = np.zeros(len(events), int)
        self.count = np.zeros(len(events), int)
        self._events = events
        self._keys: dict[_Key, int] = {}
        self._example: dict[int, int] = {}  # of each call site, the first backward
        sites = call_sites(events)
        codes = events.column("details")
        alike: dict[tuple[int, int], list[_Term]] = {}
        table: list[_Term] = []
        for backward in backwards.tolist():
            site = int(sites[backward])
            code = int(codes[backward])
            self._example.setdefault(site, backward)
            key = site, code
            if key not in alike:
                alike[key] = self._terms(site, events.details[code])
            terms = alike[key]
            self.first[backward] = len(table)
            self.count[backward] = len(terms)
            table += terms
        self._distinct = list(alike.values())
        columns = np.array(table, float)
        columns = columns.reshape(-1, len(_Term._fields))
        self.objective = columns[:, 0].astype(int)
        self.reduction = columns[:, 1].astype(int)
        self.elements = columns[:, 2]
        self.factor = columns[:, 3]
        self.unknown = columns[:, 4].astype(int)

    def _terms(self, site: int, details: Mapping[str, Any]) -> list[_Term]:
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
            unknown = _unknown(term)
            if unknown not in self.reasons:
                self.reasons.append(unknown)
            reduction = UNKNOWN
            if not unknown:
                reduction = _REDUCTIONS[term["reduction"]]
            terms.append(
                _Term(
                    self._keys.setdefault(key, len(self._keys)),
                    reduction,
                    number(term.get("elements")),
                    number(term.get("factor")),
                    self.reasons.index(unknown),
                )
            )
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
        for several in self._of_one_operation():
            rows = used & np.isin(objective, several)
            steps = step[rows]
            if self._have_one_mean(several, steps, weight[rows]):
                merged[several] = several[0]
        kept, renumbered = np.unique(merged, return_inverse=True)
        renumbered = renumbered.reshape(-1)
        kept_keys = [keys[n] for n in kept.tolist()]
        return renumbered[objective], self._names(kept_keys)

    def _of_one_operation(self) -> list[list[int]]:
        """Return the objectives that one line has of one operation, where there are several."""
        groups: dict[tuple[int, str], list[int]] = {}
        for key, n in self._keys.items():
            operation = key.site, key.op
            group = groups.setdefault(operation, [])
            group.append(n)
        return [group for group in groups.values() if len(group) > 1]

    def _have_one_mean(
        self, objectives: list[int], step: np.ndarray, weight: np.ndarray
    ) -> bool:
        """Return whether a mean of these losses was taken, which weigh so much in these steps."""
        of_backwards = []
        for terms in self._distinct:
            mine = [term for term in terms if term.objective in objectives]
            if mine:
                of_backwards.append(mine)
        return (
            all(_have_equal_constants(terms) for terms in of_backwards)
            and not _have_sizes_of_their_own(of_backwards)
            and _adds_to_one(step, weight)
        )

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


def _unknown(term: Mapping[str, Any]) -> str:
    """Return why a term cannot be read, "" where it can."""
    if term.get("unknown"):
        return str(term["unknown"])
    if str(term.get("reduction")) not in _REDUCTIONS:
        return "how its loss was reduced is not known"
    if math.isnan(number(term.get("factor"))):
        return "its constant is not known"
    return ""


def _have_equal_constants(terms: list[_Term]) -> bool:
    """Return whether losses of one backward have the same constant, as far as they are known."""
    constants = [term.factor for term in terms]
    largest = np.abs(constants).max()
    differ = np.ptp(constants) > SAME * largest
    return not differ


def _have_sizes_of_their_own(of_backwards: list[list[_Term]]) -> bool:
    """Return whether each loss has a size of its own, always the same: a loss at several resolutions."""
    differ = False
    sizes: dict[int, set[float]] = defaultdict(set)
    for terms in of_backwards:
        means = [term.elements for term in terms if term.reduction == MEAN]
        if means and np.ptp(means) > 0:
            differ = True
        for term in terms:
            sizes[term.objective].add(term.elements)
    return differ and all(len(its_sizes) == 1 for its_sizes in sizes.values())


def _adds_to_one(step: np.ndarray, weight: np.ndarray) -> bool:
    """Return whether these weights add up to 1 in most steps."""
    if not step.size or not np.isfinite(weight).all():
        return False
    _, of_step = np.unique(step, return_inverse=True)
    total = np.bincount(of_step, weight)
    is_one = np.abs(total - 1) <= SAME
    return bool(is_one.mean() >= 0.5)


def call_sites(events: Events) -> np.ndarray:
    """Number the call sites of events: equal where the same lines led to the same expression."""
    codes = [events.column(name) for name in ("file", "line", "label", "frames")]
    distinguishing = np.stack(codes, axis=1)
    _, sites = np.unique(distinguishing, axis=0, return_inverse=True)
    numbers: np.ndarray = sites.reshape(-1)
    return numbers
