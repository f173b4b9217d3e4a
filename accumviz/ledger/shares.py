"""The share of each micro-batch in each step: the constants of its loss times its coefficient in `.grad`.

Pure: stdlib and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np

from accumviz.ledger.flow import (
    BY_HAND,
    DIFFERENT,
    SAME,
    SAME_IN_HALF,
    UNREAD,
    Flow,
    Passage,
    steps_of,
)
from accumviz.ledger.objectives import MEAN, SUM, Terms
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
    "another thread changed the same .grad while it ran",
    "over how many elements it sums was not recorded",
    "a hook on a tensor between the loss and the parameters changed the gradient",
    "its backward has several losses, and which of them reach this optimizer is not recorded",
)
_CLOSURE, _PARTLY, _SCALED, _HOOKED, _OVERLAPPED, _UNCOUNTED, _BETWEEN, _AMONG = range(
    len(UNREAD), len(_REASONS)
)


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
    `opaque` losses cannot be taken apart, of those `followed` every factor is known; `optimizer` is
    the number of the one that stepped, `again` says that an earlier step of it had consumed the
    backward; `unknown` is a place in `reasons`. `left_out` counts the rows of contributions that stay
    for ever which are not listed.
    """

    step: np.ndarray
    backward: np.ndarray
    objective: np.ndarray
    term: np.ndarray
    share: np.ndarray
    elements: np.ndarray
    per_element: np.ndarray
    unknown: np.ndarray
    constant: np.ndarray
    mean: np.ndarray
    by_hand: np.ndarray
    clipped: np.ndarray
    averaged: np.ndarray
    erased: np.ndarray
    opaque: np.ndarray
    followed: np.ndarray
    optimizer: np.ndarray
    again: np.ndarray
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
        columns = {
            name: array[where]
            for name, array in vars(self).items()
            if isinstance(array, np.ndarray)
        }
        return replace(self, **columns, left_out=0)

    def of(self, step: int) -> Shares:
        """Return the rows of one step, by the index of its event."""
        start, stop = np.searchsorted(self.step, [step, step + 1]).tolist()
        return self.take(slice(start, stop))

    @property
    def in_closure(self) -> np.ndarray:
        """For each row, whether a step's closure brought and erased it: one of several looks at the loss."""
        brought: np.ndarray = self.unknown == _CLOSURE
        return brought

    @property
    def lost_sight(self) -> np.ndarray:
        """For each row, whether what became of the contribution in `.grad` is unknown."""
        is_unknown = self.unknown > 0
        lost: np.ndarray = is_unknown & (self.unknown < _UNCOUNTED)
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
    terms = Terms(flow.events, backwards, _REASONS)
    # A row for each term of a reading's backward.
    many = terms.count[readings.backward]
    readings = _told_apart(readings, many > 1)
    of = readings.at(np.repeat(np.arange(many.size), many))
    term = _counted_up(many)
    at = terms.first[of.backward] + term
    constant = terms.factor[at]
    elements = terms.elements[at]
    mean = terms.reduction[at] == MEAN
    summed = terms.reduction[at] == SUM
    lost = of.reason > 0
    used = ~of.erased
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        gain = of.by_hand * of.clipped * of.averaged
        gain = np.where(lost, np.nan, gain)
        coefficient = np.where(of.erased, 0.0, constant * gain)
        # A loss that cannot be taken apart enters with its constant all the same.
        of_mean = coefficient * elements
        share = np.where(summed & used, of_mean, coefficient)
        each = coefficient / np.where(mean, elements, np.nan)
        counted_elements = np.where(summed, elements, 1.0)
        weight = constant * of.by_hand * counted_elements
    unknown = np.where(lost, of.reason, terms.unknown[at])
    is_uncounted = (unknown == 0) & np.isnan(share)
    unknown = np.where(is_uncounted, _UNCOUNTED, unknown)
    objective, names = terms.objectives(at, used, of.step, weight)
    return Shares(
        step=of.step,
        backward=of.backward,
        objective=objective,
        term=term,
        share=share,
        elements=elements,
        per_element=np.where(of.erased | summed, coefficient, each),
        unknown=np.where(of.erased, 0, unknown),
        constant=constant,
        mean=mean,
        by_hand=of.by_hand,
        clipped=of.clipped,
        averaged=of.averaged,
        erased=of.erased,
        opaque=terms.unknown[at] > 0,
        followed=np.isfinite(constant) & ~lost,
        optimizer=of.optimizer,
        again=of.again,
        objectives=names,
        reasons=terms.reasons,
        left_out=left_out,
    )


def _told_apart(readings: _Readings, several: np.ndarray) -> _Readings:
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


def _counted_up(many: np.ndarray) -> np.ndarray:
    """Return 0, 1, … for each of these numbers.

    >>> _counted_up(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.cumsum(many) - many
    starts = np.repeat(starts, many)
    places: np.ndarray = np.arange(starts.size) - starts
    return places


class _Readings(NamedTuple):
    """A row for each step and each backward that it read, or that was erased before it, as columns."""

    step: np.ndarray
    backward: np.ndarray
    optimizer: np.ndarray
    by_hand: np.ndarray
    clipped: np.ndarray
    averaged: np.ndarray
    erased: np.ndarray
    again: np.ndarray
    reason: np.ndarray

    def at(self, places: np.ndarray) -> _Readings:
        """Return the rows at these places."""
        return _Readings(*(column[places] for column in self))


def _joined(parts: Sequence[_Readings]) -> _Readings:
    if not parts:
        none = np.zeros(0, int)
        no = np.zeros(0, bool)
        return _Readings(none, none, none, none, none, none, no, no, none)
    columns = []
    for pieces in zip(*parts, strict=True):
        columns.append(np.concatenate(pieces))
    return _Readings(*columns)


def _every_reading(flow: Flow) -> tuple[_Readings, int]:
    """Return what each step read, in the order of the steps, and how many rows are left out."""
    optimizers: set[int] = set()
    for parameter in flow.ledger.parameters:
        optimizers.update(parameter.optimizers)
    every = []
    left_out = 0
    for optimizer in sorted(optimizers):
        rows, more = _readings_of(flow, optimizer)
        every.append(rows)
        left_out = max(left_out, more)
    rows = _joined(every)
    order = np.lexsort((rows.backward, rows.step))
    return rows.at(order), left_out


def _readings_of(flow: Flow, optimizer: int) -> tuple[_Readings, int]:
    """Return what the steps of one optimizer read, and how many rows are left out."""
    read = []
    left_out = 0
    # How many histories of its parameters each backward reached.
    reached = np.zeros(len(flow.events), int)
    for passage in flow.passages:
        if optimizer in passage.history.optimizers:
            reached[np.unique(passage.backward)] += 1
            rows, more = _read(flow, optimizer, passage)
            left_out = max(left_out, more)
            read.append(rows)
    return _combined(flow, _joined(read), reached), left_out


def _read(flow: Flow, optimizer: int, passage: Passage) -> tuple[_Readings, int]:
    """Return which steps read these contributions; those that no step reads count 0 in the next one."""
    events = flow.events
    steps = steps_of(flow.ledger, (optimizer,))
    entered = passage.entered
    end = passage.end
    first, until = flow.reads(steps, entered, end)
    lost = until <= first
    mine = events.detail("optimizer_index", 0) == optimizer
    skipped = events.where("kind", "step") & events.skipped
    skips = np.flatnonzero(skipped & mine)
    skips_before = np.searchsorted(skips, entered)
    # It was there for a step that was skipped.
    tried = np.searchsorted(skips, end) > skips_before
    has_next_step = first < steps.size
    erased_first = has_next_step & ~tried & (passage.consumed < 0)
    many = np.where(lost, erased_first, until - first)
    listed = many
    if many.sum() > _MOST:
        listed = np.minimum(many, _FIRST)
    which = np.repeat(np.arange(many.size), listed)
    step = steps[first[which] + _counted_up(listed)]
    rows = _followed(flow, passage, which, step, lost[which])
    rows = rows._replace(optimizer=np.full(step.size, optimizer))
    return rows, int((many - listed).sum())


def _followed(
    flow: Flow,
    passage: Passage,
    which: np.ndarray,
    step: np.ndarray,
    lost: np.ndarray,
) -> _Readings:
    """Return what happened to the contributions at these places before the steps."""
    events = flow.events
    backward = passage.backward[which]
    end = passage.end[which]
    happened = passage.until(which, step)
    overlapped = events.detail("overlapped", default=False)[backward]
    between = events.detail("between", default=False)[backward]
    # How many backwards before an event had their gradients changed by hooks: with them goes what is in `.grad`.
    hooked = np.cumsum([0, *events.has("by_hook")])
    # What was erased may be in what was put there by hand.
    erased = lost & (happened.reason != BY_HAND) & ~overlapped
    reason = happened.reason
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = events.detail("amp_scale", 1.0)[backward] * happened.unscaled
        still_scaled = np.abs(np.log(scale)) > SAME_IN_HALF
    others = (
        (_SCALED, still_scaled),
        (_HOOKED, hooked[step] > hooked[backward]),
        (_OVERLAPPED, overlapped),
        (_BETWEEN, between),
    )
    for code, here in others:
        is_first_reason = (reason == 0) & here
        reason = np.where(is_first_reason, code, reason)
    lost_in_closure = flow.in_closure[backward] & (end < step)
    reason = np.where(lost_in_closure, _CLOSURE, reason)
    return _Readings(
        step,
        backward,
        optimizer=step,
        by_hand=happened.by_hand,
        clipped=happened.clipped,
        averaged=happened.averaged,
        erased=erased,
        again=erased,
        reason=np.where(erased, 0, reason),
    )


def _combined(flow: Flow, rows: _Readings, reached: np.ndarray) -> _Readings:
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
    some = many > 0
    reason = np.maximum.reduceat(rows.reason, starts)
    tolerance = SAME
    for parameter in flow.ledger.parameters:
        if parameter.dtype in ("float16", "bfloat16"):
            tolerance = SAME_IN_HALF
    with np.errstate(invalid="ignore"):
        spread = np.maximum.reduceat(highest, starts)
        spread = spread - np.minimum.reduceat(lowest, starts)
    differ = some & (spread > tolerance)
    rows = rows.at(starts)
    partly = some & (many < reached[rows.backward])
    for code, here in ((DIFFERENT, differ), (_PARTLY, partly)):
        is_first_reason = (reason == 0) & here
        reason = np.where(is_first_reason, code, reason)
    order = np.lexsort((rows.step, rows.backward))
    same_backward = np.diff(rows.backward[order]) == 0
    again = np.zeros(starts.size, bool)
    again[order[1:]] = same_backward
    return rows._replace(reason=reason, erased=~some, again=again & some)
