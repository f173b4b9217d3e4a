"""Which losses a backward is the gradient of, and which of them are the same objective: same lines, same operation.

Several losses of one operation in one backward are one objective where somebody took their mean, and several else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accumviz.ledger.events import Arrays
from accumviz.ledger.gains import SAME, number

NO_TERMS = "the ledger has no terms: it was recorded by an earlier version"

NONE, MEAN, SUM = range(3)


class Terms:
    """The terms of these backwards as columns; `first` and `count` say which are whose, by event.

    `unknown` are places in `reasons`, of which some are given: why a term cannot be read.
    """

    def __init__(
        self, ledger: Arrays, backwards: np.ndarray, reasons: Sequence[str]
    ) -> None:
        events = ledger.columns
        self.reasons = list(reasons)
        self._places = {text: i for i, text in enumerate(self.reasons)}
        sites = call_sites(ledger)
        details = events.column("details")
        self.first, self.count = (
            np.zeros(len(events), np.int64),
            np.zeros(len(events), np.int64),
        )
        by_details: dict[int, tuple[int, list[str]]] = {}
        rows: list[tuple[int, float, float, int]] = []
        known: dict[tuple[int, int], list[int]] = {}
        found: dict[tuple[int, str, int], int] = {}
        objective: list[int] = []
        taken: list[tuple[int, float, float, int]] = []
        parsed = events.details
        for b, site, code in zip(
            backwards.tolist(),
            sites[backwards].tolist(),
            details[backwards].tolist(),
            strict=True,
        ):
            if code not in by_details:
                given = _listed(parsed[code].get("terms"))
                by_details[code] = len(rows), [op for op, _ in given]
                rows += [self._row(term) for _, term in given]
            start, ops = by_details[code]
            if (site, code) not in known:
                seen: dict[str, int] = {}
                own = []
                for op in ops:
                    seen[op] = seen.get(op, 0) + 1
                    own.append(found.setdefault((site, op, seen[op]), len(found)))
                known[site, code] = own
            self.first[b], self.count[b] = len(taken), len(ops)
            taken += rows[start : start + len(ops)]
            objective += known[site, code]
        self._sites, self._keys, self._backwards, self._ledger = (
            sites,
            found,
            backwards,
            ledger,
        )
        table = np.array(taken, float).reshape(-1, 4)
        self.reduction, self.elements, self.factor = (
            table[:, 0].astype(int),
            table[:, 1],
            table[:, 2],
        )
        self.unknown, self.objective = table[:, 3].astype(int), np.array(objective, int)

    def objectives(
        self, objective: np.ndarray, rows: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """For each row its objective, where those of which a mean was taken are one, and all of their names.

        `objective` has the rows' own ones, and `rows` their columns `step`, `backward`, `weight` (in the step, before
        clips and averages), `constant`, `elements`, `mean` and `erased`.
        """
        kinds: dict[tuple[int, str], int] = {}
        several: set[int] = set()
        kind_of = np.zeros(len(self._keys), int)
        for own, (site, op, nth) in enumerate(self._keys):
            kind_of[own] = kinds.setdefault((site, op), own)
            if nth > 1:
                several.add(int(kind_of[own]))
        one = {
            kind
            for kind in several
            if _averaged(objective, kind_of[objective] == kind, rows)
        }
        merged = np.where(np.isin(kind_of, list(one)), kind_of, np.arange(kind_of.size))
        kept = {key: own for own, key in enumerate(self._keys) if merged[own] == own}
        number = np.zeros(merged.size, int)
        number[list(kept.values())] = np.arange(len(kept))
        return number[merged[objective]], _names(
            self._ledger, self._sites, kept, self._backwards
        )

    def _row(self, term: Mapping[str, Any]) -> tuple[int, float, float, int]:
        unknown = str(term.get("unknown") or "")
        reduction = {"mean": MEAN, "sum": SUM}.get(str(term.get("reduction")), NONE)
        factor = number(term.get("factor"))
        if not unknown and (reduction == NONE or math.isnan(factor)):
            unknown = (
                "how its loss was reduced is not known"
                if reduction == NONE
                else "its constant is not known"
            )
        reduction = NONE if unknown else reduction
        if unknown not in self._places:
            self._places[unknown] = len(self.reasons)
            self.reasons.append(unknown)
        return reduction, number(term.get("elements")), factor, self._places[unknown]


def _averaged(
    objective: np.ndarray, mine: np.ndarray, rows: Mapping[str, np.ndarray]
) -> bool:
    """Whether the losses of one operation in each backward are the parts of a mean: equal, and 1 in most steps.

    Those that have each a size of its own, always the same, are different things: a loss at several resolutions.
    """
    step, backward, weight, constant, elements = (
        rows[name][mine]
        for name in ("step", "backward", "weight", "constant", "elements")
    )
    used = ~rows["erased"][mine]
    if not used.any() or not np.isfinite(weight[used]).all():
        return False
    _, of_step = np.unique(step[used], return_inverse=True)
    total = np.bincount(of_step, weight[used])
    if 2 * (np.abs(total - 1) <= SAME).sum() < total.size:
        return False
    _, whose = np.unique(backward, return_inverse=True)
    if (_spread(constant, whose) > SAME * np.abs(constant).max()).any():
        return False
    if not rows["mean"][mine].any() or not (_spread(elements, whose) > 0).any():
        return True
    return bool((_spread(elements, objective[mine]) > 0).any())


def _spread(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The largest less the smallest value of each group."""
    many = int(group.max()) + 1
    low, high = np.full(many, np.inf), np.full(many, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    found: np.ndarray = np.where(np.isfinite(low), high - low, 0)
    return found


def _listed(terms: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(terms, list) or not terms:
        return [
            ("", {"unknown": NO_TERMS if terms is None else "its terms cannot be read"})
        ]
    found = [
        term if isinstance(term, Mapping) else {"unknown": "its terms cannot be read"}
        for term in terms
    ]
    return [(str(term.get("op") or ""), term) for term in found]


def call_sites(ledger: Arrays) -> np.ndarray:
    """For each event, a number of its call site: equal where the same lines led to the same expression."""
    events = ledger.columns
    own = [events.column(name) for name in ("file", "line", "label", "frames")]
    _, sites = np.unique(np.stack(own, axis=1), axis=0, return_inverse=True)
    found: np.ndarray = sites.reshape(-1)
    return found


def _names(
    ledger: Arrays,
    sites: np.ndarray,
    found: Mapping[tuple[int, str, int], int],
    backwards: np.ndarray,
) -> tuple[str, ...]:
    """The label of an objective, with as much more as tells it from the others."""
    here, first = np.unique(sites[backwards], return_index=True)
    at = dict(zip(here.tolist(), backwards[first].tolist(), strict=True))
    events = ledger.columns
    labels, lines = events.tables["label"], events.column("line")
    label = {
        site: labels[events.column("label")[b]] or "loss" for site, b in at.items()
    }
    twice = {
        name
        for name in label.values()
        if sum(other == name for other in label.values()) > 1
    }
    names = []
    for site, op, nth in found:
        name = label[site]
        if name in twice and lines[at[site]]:
            name += f" (line {lines[at[site]]})"
        if sum(other == site for other, _, _ in found) > 1:
            name += f" · {op}{f' {nth}' if nth > 1 else ''}"
        names.append(name)
    # Lines of two files may have the same number, and one line may be reached in two ways.
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[i] += f" [{seen[name]}]" if seen[name] > 1 else ""
    return tuple(names)
