"""The share of each micro-batch in each step: the constants of its loss times its coefficient in `.grad`.

The losses of backwards are grouped into objectives: one objective is one line with one operation. Several losses of one
operation in one backward are one objective where their mean was taken, and several else. That a mean was taken is seen
from three things: they have equal constants, they do not have each a size of its own, and what they weigh in a step
adds up to 1. Pure: stdlib and numpy.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
from numpy import ndarray

from accumviz.ledger.events import Details, Events, listed
from accumviz.ledger.flow import (
    BY_HAND,
    BY_VALUE,
    DIFFERENT,
    SAME,
    SAME_IN_HALF,
    UNREAD,
    Flow,
    Passage,
    number,
    steps_of,
)
from accumviz.show import counted

# Where nothing is ever erased each step reads all backwards before it: of more rows than this, each backward has its
# first ones.
_MOST, _FIRST = 4_000_000, 16

_REASONS = (
    *UNREAD,
    "a closure in the step brought it, and it was erased there: what of it the step used is not known",
    "it was erased in some parameters and used in others",
    "the gradient scaler had scaled it, and it was not unscaled by the same factor before the step",
    "hooks of your own changed gradients on their way into .grad",
    "over how many elements it sums was not recorded",
    "a hook on a tensor between the loss and the parameters changed the gradient",
    "its backward has several losses, and which of them reach this optimizer is not recorded",
)
_CLOSURE, _PARTLY, _SCALED, _HOOKED, _UNCOUNTED, _BETWEEN, _AMONG = range(
    len(UNREAD), len(_REASONS)
)
_UNKNOWN, _MEAN, _SUM = range(3)
_REDUCTIONS = {"mean": _MEAN, "sum": _SUM}


class Share(NamedTuple):
    """What one backward weighs in one step, for one of its objectives.

    `step` and `backward` are indices of events. `share` is the coefficient with which the mean of
    the loss enters the gradient that the step consumes, `elements` how many that mean is over,
    `per_element` the one over the other. What cannot be read is NaN, and `unknown` says why; of a
    loss that cannot be taken apart, `share` is the coefficient of the loss as it stands.
    """

    step: int
    backward: int
    objective: str
    share: float
    elements: float
    per_element: float
    unknown: str


@dataclass(frozen=True, eq=False, repr=False)
class Shares(Sequence[Share]):
    """What each backward weighs in each step: rows in the order of the steps, kept as columns.

    `step`, `backward`, `objective` (its number in `objectives`), `term` (its number in the
    backward), `share`, `elements` and `per_element` are arrays of one entry each row, as are the
    factors of a share: `constant` (of the loss), `mean` (whether its reduction is one; a sum has its
    elements as a factor), `by_hand`, `clipped`, `averaged` (over ranks), `erased` (then it is 0).
    `opaque` losses cannot be taken apart, of those `followed` every factor is known, but for a clip
    `by_value` of the whole window; `optimizer` is
    the number of the one that stepped, `again` says that an earlier step of it had consumed the
    backward; `unknown` is a place in `reasons`. `left_out` counts the rows of contributions that stay
    for ever which are not listed.
    """

    step: ndarray
    backward: ndarray
    objective: ndarray
    term: ndarray
    share: ndarray
    elements: ndarray
    per_element: ndarray
    unknown: ndarray
    constant: ndarray
    mean: ndarray
    by_hand: ndarray
    clipped: ndarray
    averaged: ndarray
    erased: ndarray
    opaque: ndarray
    followed: ndarray
    by_value: ndarray
    optimizer: ndarray
    again: ndarray
    objectives: Sequence[str]
    reasons: Sequence[str]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, index: int) -> Share: ...
    @overload
    def __getitem__(self, index: slice) -> Shares: ...
    def __getitem__(self, index: int | slice) -> Share | Shares:
        if isinstance(index, slice):
            return self.take(index)
        place = range(len(self))[index]
        return next(self._rows([place]))

    def __iter__(self) -> Iterator[Share]:
        return self._rows(slice(None))

    def _rows(self, where: Any) -> Iterator[Share]:
        columns = []
        for name in Share._fields:
            column = getattr(self, name)[where]
            columns.append(column.tolist())
        for values in zip(*columns, strict=True):
            row = Share(*values)
            objective = self.objectives[values[2]]
            unknown = self.reasons[values[-1]]
            yield row._replace(objective=objective, unknown=unknown)

    def take(self, where: Any) -> Shares:
        """Return the rows at these places (a slice, integers or truths), as shares of their own."""
        columns: dict[str, Any] = {}
        for name, values in vars(self).items():
            if isinstance(values, ndarray):
                columns[name] = values[where]
        return replace(self, **columns, left_out=0)

    def of(self, step: int) -> Shares:
        """Return the rows of one step, by the index of its event."""
        bounds = [step, step + 1]
        start, stop = np.searchsorted(self.step, bounds).tolist()
        return self.take(slice(start, stop))

    @property
    def in_closure(self) -> ndarray:
        """For each row, whether a step's closure brought and erased it: one of several looks at the loss."""
        brought: ndarray = self.unknown == _CLOSURE
        return brought

    @property
    def lost_sight(self) -> ndarray:
        """For each row, whether what became of the contribution in `.grad` is unknown."""
        is_unknown = self.unknown > 0
        lost: ndarray = is_unknown & (self.unknown < _UNCOUNTED)
        return lost

    def __repr__(self) -> str:
        steps = len(np.unique(self.step))
        title = f"Shares: {counted(len(self), 'row')}, {counted(steps, 'step')}"
        if self.left_out:
            title += f" ({self.left_out} more rows of contributions that stay in .grad)"
        if not len(self):
            return title
        width = max(9, *(len(name[:24]) for name in self.objectives))
        head = (
            f"  step  backward  {'objective':<{width}}     share  elements  per element"
        )
        lines = [title, head]
        for row in self[:20]:
            lines.append(_line(row, width))
        if len(self) > 20:
            lines.append(f"  … {len(self) - 20} more rows")
        return "\n".join(lines)


def _line(row: Share, width: int) -> str:
    share = _number(row.share)
    elements = _number(row.elements)
    each = _number(row.per_element)
    where = f"{row.step:>6}  {row.backward:>8}  {row.objective[:24]:<{width}}"
    why = f"  ({row.unknown})" if row.unknown else ""
    return f"{where}  {share:>8}  {elements:>8}  {each:>11}{why}"


def _number(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:.4g}"


def shares(flow: Flow) -> Shares:
    """See `Ledger.shares`."""
    readings, left_out = _every_reading(flow)
    backwards = np.unique(readings.backward)
    terms = _TermColumns(flow.events, backwards, _REASONS)
    # A row for each term of a reading's backward.
    many = terms.count[readings.backward]
    readings = _told_apart(readings, many > 1)
    places = np.repeat(np.arange(many.size), many)
    of = readings.at(places)
    term = _counted_up(many)
    at = terms.first[of.backward] + term
    constant = terms.factor[at]
    elements = terms.elements[at]
    mean = terms.reduction[at] == _MEAN
    summed = terms.reduction[at] == _SUM
    opaque = terms.unknown[at] > 0
    lost = of.reason > 0
    # A constant that was not read may be the scaler's.
    maybe_unscaled = opaque & (of.reason == _SCALED)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        gain = of.by_hand * of.clipped * of.averaged
        coefficient = constant * np.where(lost, np.nan, gain)
        coefficient = np.where(of.erased, 0.0, coefficient)
        # A loss that cannot be taken apart enters with its constant all the same.
        means = np.where(summed, elements, 1.0)
        share = np.where(of.erased, 0.0, coefficient * means)
        each = coefficient / np.where(mean, elements, np.nan)
        weight = constant * of.by_hand * means
    unknown = np.select(
        [of.erased, lost & ~maybe_unscaled, opaque, np.isnan(share)],
        [0, of.reason, terms.unknown[at], _UNCOUNTED],
    )
    objective, names = terms.objectives(at, ~of.erased, of.step, weight)
    columns = of._asdict()
    del columns["reason"]
    return Shares(
        **columns,
        objective=objective,
        term=term,
        share=share,
        elements=elements,
        per_element=np.where(of.erased | summed, coefficient, each),
        unknown=unknown,
        constant=constant,
        mean=mean,
        opaque=opaque,
        followed=np.isfinite(constant) & (~lost | of.by_value),
        objectives=names,
        reasons=terms.reasons,
        left_out=left_out,
    )


def _told_apart(readings: _Readings, several: ndarray) -> _Readings:
    """Mark backwards of several losses that a hand scaled for one optimizer and not, or otherwise, for another."""
    first = several & ~readings.erased & ~readings.again
    backward = readings.backward[first]
    by_hand = readings.by_hand[first]
    size = readings.backward.max(initial=-1) + 1
    highest = np.zeros(size)
    lowest = np.full(size, np.inf)
    np.maximum.at(highest, backward, by_hand)
    np.minimum.at(lowest, backward, by_hand)
    with np.errstate(invalid="ignore"):
        differ = highest > (1 + SAME) * lowest
    is_first_reason = differ[readings.backward] & (readings.reason == 0) & several
    return readings._replace(reason=np.where(is_first_reason, _AMONG, readings.reason))


def _counted_up(many: ndarray) -> ndarray:
    """Return 0, 1, … for each of these numbers.

    >>> _counted_up(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.repeat(np.cumsum(many) - many, many)
    places: ndarray = np.arange(starts.size) - starts
    return places


class _Readings(NamedTuple):
    """A row for each step and each backward that it read, or that was erased before it, as columns."""

    step: ndarray
    backward: ndarray
    optimizer: ndarray
    by_hand: ndarray
    clipped: ndarray
    averaged: ndarray
    erased: ndarray
    again: ndarray
    by_value: ndarray
    reason: ndarray

    def at(self, places: ndarray) -> _Readings:
        """Return the rows at these places."""
        return _Readings(*(column[places] for column in self))


def _joined(parts: Sequence[_Readings]) -> _Readings:
    if not parts:
        none = np.zeros(0, int)
        no = np.zeros(0, bool)
        return _Readings(none, none, none, none, none, none, no, no, no, none)
    return _Readings(*map(np.concatenate, zip(*parts, strict=True)))


def _every_reading(flow: Flow) -> tuple[_Readings, int]:
    """Return what each step read, in the order of the steps, and how many rows are left out."""
    optimizers: set[int] = set()
    for parameter in flow.ledger.parameters:
        optimizers.update(parameter.optimizers)
    left_out = 0
    most = len(flow.events)
    rows = [int(passage.steps.sum()) for passage in flow.passages]
    if max(rows, default=0) > _MOST:
        most = _FIRST
        beyond = [np.maximum(passage.steps - most, 0) for passage in flow.passages]
        left_out = max(int(each.sum()) for each in beyond)
    every = [_readings_of(flow, optimizer, most) for optimizer in sorted(optimizers)]
    readings = _joined(every)
    order = np.lexsort((readings.backward, readings.step))
    return readings.at(order), left_out


def _readings_of(flow: Flow, optimizer: int, most: int) -> _Readings:
    """Return what the steps of one optimizer read, of each contribution the first steps, at `most` so many."""
    read = []
    # How many histories of its parameters each backward reached.
    reached = np.zeros(len(flow.events), int)
    for passage in flow.passages:
        if optimizer in passage.history.optimizers:
            reached[np.unique(passage.backward)] += 1
            read.append(_read(flow, optimizer, passage, most))
    return _combined(flow, _joined(read), reached)


def _read(flow: Flow, optimizer: int, passage: Passage, most: int) -> _Readings:
    """Return which steps read these contributions; those that no step reads count 0 in the next one."""
    events = flow.events
    entered = passage.entered
    steps = steps_of(events, [optimizer])
    first, until = flow.reads(steps, entered, passage.end)
    lost = until <= first
    skips = steps_of(events, [optimizer], skipped=True)
    skips_before = np.searchsorted(skips, entered)
    # It was there for a step that was skipped.
    tried = np.searchsorted(skips, passage.end) > skips_before
    erased_first = (first < steps.size) & ~tried & (passage.consumed < 0)
    many = np.where(lost, erased_first, np.minimum(until - first, most))
    which = np.repeat(np.arange(many.size), many)
    step = steps[first[which] + _counted_up(many)]
    rows = _followed(flow, passage, which, step, lost[which])
    return rows._replace(optimizer=np.full(step.size, optimizer))


def _followed(
    flow: Flow,
    passage: Passage,
    which: ndarray,
    step: ndarray,
    lost: ndarray,
) -> _Readings:
    """Return what happened to the contributions at these places before the steps."""
    events = flow.events
    backward = passage.backward[which]
    happened = passage.until(which, step)
    born = passage.history.born
    last = born[np.searchsorted(born, step) - 1]
    # Of a whole window each element is clipped once, as the large batch's is.
    by_value = (happened.reason == BY_VALUE) & (passage.until(which, last).reason == 0)
    # How many backwards before an event had their gradients changed by hooks: with them goes what is in `.grad`.
    hooked = np.cumsum([0, *events.has("by_hook")])
    # What was erased may be in what was put there by hand.
    erased = lost & (happened.reason != BY_HAND)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = events.detail("amp_scale", 1.0)[backward] * happened.unscaled
        still_scaled = np.abs(np.log(scale)) > SAME_IN_HALF
    in_closure = flow.in_closure[backward] & (passage.end[which] < step)
    changed_by_hooks = hooked[step] > hooked[backward]
    between = events.detail("between", default=False)[backward]
    gone = happened.reason > 0
    reason = np.select(
        [erased, in_closure, gone, still_scaled, changed_by_hooks, between],
        [0, _CLOSURE, happened.reason, _SCALED, _HOOKED, _BETWEEN],
    )
    return _Readings(
        step,
        backward,
        optimizer=step,
        by_hand=happened.by_hand,
        clipped=happened.clipped,
        averaged=happened.averaged,
        erased=erased,
        again=erased,
        by_value=by_value & (reason == BY_VALUE),
        reason=reason,
    )


def _combined(flow: Flow, rows: _Readings, reached: ndarray) -> _Readings:
    """Return one row for each step and backward, of what an optimizer's parameters say; unknown where they differ."""
    key = rows.step * len(flow.events) + rows.backward
    order = np.argsort(key, kind="stable")
    rows = rows.at(order)
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    if not starts.size:
        return rows
    used = ~rows.erased
    total = np.log(rows.by_hand * rows.clipped * rows.averaged)
    highest = np.where(used, total, -np.inf)
    lowest = np.where(used, total, np.inf)
    # Where an earlier step read it and it was erased since, there is no row.
    many = np.add.reduceat(used.astype(int), starts)
    reason = np.maximum.reduceat(rows.reason, starts)
    by_value = np.logical_and.reduceat(rows.by_value | (rows.reason == 0), starts)
    with np.errstate(invalid="ignore"):
        spread = np.maximum.reduceat(highest, starts)
        spread = spread - np.minimum.reduceat(lowest, starts)
    rows = rows.at(starts)
    some = many > 0
    differ = some & (spread > SAME_IN_HALF)
    partly = some & (many < reached[rows.backward])
    # The rows are in the order of their steps.
    _, first = np.unique(rows.backward, return_index=True)
    again = np.ones(starts.size, bool)
    again[first] = False
    return rows._replace(
        reason=np.select([reason > 0, differ, partly], [reason, DIFFERENT, _PARTLY]),
        erased=~some,
        again=again & some,
        by_value=by_value & (reason == BY_VALUE),
    )


# --- objectives -----------------------------------------------------------------------------------


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


class _TermColumns:
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
            reduction = _UNKNOWN if unknown else _REDUCTIONS[term["reduction"]]
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
        every = []
        for terms in self._distinct:
            mine = [term for term in terms if term.objective in objectives]
            if _differ([term.factor for term in mine], SAME):
                return False
            every.append(mine)
        return not _have_sizes_of_their_own(every)

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


def _have_sizes_of_their_own(backwards: list[list[_Term]]) -> bool:
    """Return whether each of several objectives is over a number of elements of its own, always the same."""
    sizes: dict[int, set[float]] = defaultdict(set)
    differ = False
    for terms in backwards:
        for term in terms:
            sizes[term.objective].add(term.elements)
        means = [term.elements for term in terms if term.reduction == _MEAN]
        differ = differ or _differ(means)
    return differ and all(len(its_sizes) == 1 for its_sizes in sizes.values())


def _differ(values: list[float], tolerance: float = 0.0) -> bool:
    """Return whether some numbers are further apart than a part of the largest."""
    largest = np.abs(values).max(initial=0)
    return bool(values) and bool(np.ptp(values) > tolerance * largest)


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
