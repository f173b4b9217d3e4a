"""The share of each micro-batch in each step: the constants of its loss times its coefficient in `.grad`.

Pure: stdlib and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from accumviz.ledger.flow import (
    BY_COMM_HOOK,
    BY_HAND,
    DIFFERENT,
    SAME,
    SAME_IN_HALF,
    UNREAD,
    Flow,
    History,
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
    "the step read gradients that the scaler had scaled, and nobody is known to have unscaled them",
    "it was unscaled by another factor than that by which the scaler had scaled it",
    "parameters have hooks of your own, which may change what a backward brings",
    "another thread changed the same .grad while it ran",
    "over how many elements it sums was not recorded",
)
_CLOSURE, _PARTLY, _SCALED, _RESCALED, _HOOKED, _OVERLAPPED, _UNCOUNTED = range(
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


class StepSum(NamedTuple):
    """The shares of one objective in one step, taken together.

    `total` is their sum, `lightest` and `heaviest` the extremes of what an element weighs (of
    backwards that were not erased); NaN where one of them is unknown, and `unknown` says why.
    """

    step: int
    objective: str
    backwards: tuple[int, ...]
    total: float
    lightest: float
    heaviest: float
    unknown: str


class Shares(Sequence[Share]):
    """What each backward weighs in each step: rows in the order of the steps, kept as columns.

    `step`, `backward`, `objective` (its number in `objectives`), `term` (its number in the
    backward), `share`, `elements` and `per_element` are arrays of one entry each row, as are the
    factors of a share: `constant` (of the loss), `mean` (whether its reduction is one; a sum has its
    elements as a factor), `by_hand`, `clipped`, `averaged` (over ranks), `erased` (then it is 0).
    `opaque` losses cannot be taken apart, of those `followed` every factor is known; `optimizer` is
    the number of the one that stepped, `again` says that an earlier step of it had consumed the
    backward. `left_out` counts the rows of contributions that stay for ever which are not listed.
    """

    def __init__(
        self,
        columns: Mapping[str, np.ndarray],
        objectives: Sequence[str],
        reasons: Sequence[str],
        left_out: int = 0,
    ) -> None:
        self.columns, self.objectives = dict(columns), objectives
        self.reasons, self.left_out = reasons, left_out
        for array in self.columns.values():
            array.flags.writeable = False

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            column: np.ndarray = self.__dict__["columns"][name]
        except KeyError:
            # Asked while it is unpickled, it has no columns yet.
            names = ", ".join(self.__dict__.get("columns", ()))
            raise AttributeError(
                f"shares have no column {name!r}; they have {names}"
            ) from None
        return column

    def __len__(self) -> int:
        return len(self.columns["step"])

    @overload
    def __getitem__(self, index: int) -> Share: ...
    @overload
    def __getitem__(self, index: slice) -> Shares: ...
    def __getitem__(self, index: int | slice) -> Share | Shares:
        if isinstance(index, slice):
            return self.take(index)
        return next(self._rows([range(len(self))[index]]))

    def __iter__(self) -> Iterator[Share]:
        for start in range(0, len(self), 1024):
            yield from self._rows(slice(start, start + 1024))

    def _rows(self, where: Any) -> Iterator[Share]:
        columns = (self.columns[name][where].tolist() for name in Share._fields)
        for step, backward, objective, *numbers, unknown in zip(*columns, strict=True):
            share, elements, each = numbers
            name, reason = self.objectives[objective], self.reasons[unknown]
            yield Share(step, backward, name, share, elements, each, reason)

    def take(self, where: Any) -> Shares:
        """Return the rows at these places (a slice, integers or truths), as shares of their own."""
        columns = {name: array[where] for name, array in self.columns.items()}
        return Shares(columns, self.objectives, self.reasons)

    def of(self, step: int) -> Shares:
        """Return the rows of one step, by the index of its event."""
        start, stop = np.searchsorted(self.columns["step"], [step, step + 1]).tolist()
        return self.take(slice(start, stop))

    def sums(self) -> list[StepSum]:
        """Return what the shares of each objective add up to in each step, and whether elements weigh the same."""
        order = np.lexsort((self.backward, self.objective, self.step))
        keys = np.stack([self.step, self.objective])[:, order]
        starts = np.flatnonzero((np.diff(keys, prepend=-1) != 0).any(axis=0))
        return [self._sum(rows) for rows in np.split(order, starts[1:]) if rows.size]

    def _sum(self, rows: np.ndarray) -> StepSum:
        each = self.per_element[rows][~self.erased[rows]]
        return StepSum(
            step=int(self.step[rows[0]]),
            objective=self.objectives[self.objective[rows[0]]],
            backwards=tuple(self.backward[rows].tolist()),
            total=float(self.share[rows].sum()),
            lightest=float(each.min()) if each.size else math.nan,
            heaviest=float(each.max()) if each.size else math.nan,
            unknown=self.reasons[self.unknown[rows].max()],
        )

    @property
    def lost_sight(self) -> np.ndarray:
        """For each row, whether what became of the contribution in `.grad` is unknown."""
        found: np.ndarray = (self.unknown > 0) & (self.unknown < _UNCOUNTED)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shares):
            return NotImplemented
        # Text, because NaN is no equal of itself.
        return [*map(repr, self)] == [*map(repr, other)]

    __hash__ = None  # type: ignore[assignment] # they hold arrays

    def __repr__(self) -> str:
        steps = len(np.unique(self.columns["step"]))
        title = f"Shares: {counted(len(self), 'row')}, {counted(steps, 'step')}"
        if self.left_out:
            title += f" ({self.left_out} more rows of contributions that stay in .grad)"
        if not len(self):
            return title
        width = max(9, *(len(name[:24]) for name in self.objectives))
        head = (
            f"  step  backward  {'objective':<{width}}     share  elements  per element"
        )
        lines = [title, head, *(_line(row, width) for row in self[:20])]
        if len(self) > 20:
            lines.append(f"  … {len(self) - 20} more rows")
        return "\n".join(lines)


def _line(row: Share, width: int) -> str:
    numbers = (row.share, row.elements, row.per_element)
    share, elements, each = ("?" if math.isnan(n) else f"{n:.4g}" for n in numbers)
    where = f"{row.step:>6}  {row.backward:>8}  {row.objective[:24]:<{width}}"
    why = f"  ({row.unknown})" if row.unknown else ""
    return f"{where}  {share:>8}  {elements:>8}  {each:>11}{why}"


def shares(flow: Flow) -> Shares:
    """See `Ledger.shares`."""
    readings, left_out = _readings(flow)
    backward = readings["backward"]
    terms = Terms(flow.events, np.unique(backward), _REASONS)
    many = terms.count[backward]
    row = np.repeat(np.arange(many.size), many)
    term = np.arange(row.size) - np.repeat(np.cumsum(many) - many, many)
    at = terms.first[backward][row] + term
    columns = {name: array[row] for name, array in readings.items()} | {"term": term}
    reason = columns.pop("reason")
    erased = columns["erased"]
    constant, elements = terms.factor[at], terms.elements[at]
    mean, summed = terms.reduction[at] == MEAN, terms.reduction[at] == SUM
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        gain = columns["by_hand"] * columns["clipped"] * columns["averaged"]
        gain = np.where(reason > 0, np.nan, gain)
        coefficient = np.where(erased, 0.0, constant * gain)
        # A loss that cannot be taken apart enters with its constant all the same.
        share = np.where(summed & ~erased, coefficient * elements, coefficient)
        each = coefficient / np.where(mean, elements, np.nan)
        each = np.where(erased | summed, coefficient, each)
        weight = constant * columns["by_hand"] * np.where(summed, elements, 1.0)
    unknown = np.where(reason > 0, reason, terms.unknown[at])
    unknown = np.where((unknown == 0) & np.isnan(share), _UNCOUNTED, unknown)
    columns |= {"constant": constant, "elements": elements, "mean": mean}
    objective, names = terms.objectives(
        terms.objective[at], columns | {"weight": weight}
    )
    columns |= {
        "objective": objective,
        "share": share,
        "per_element": each,
        "unknown": np.where(erased, 0, unknown),
        "opaque": terms.unknown[at] > 0,
        "followed": (reason == 0) & np.isfinite(constant),
    }
    return Shares(columns, names, terms.reasons, left_out)


_Columns = dict[str, np.ndarray]


class _Entry(NamedTuple):
    """How contributions came into the `.grad` that steps read.

    `entered` is the event, `end` the one that erased them; the factors are those of before: of an unsharded gradient
    until it was scattered.
    """

    history: History
    backward: np.ndarray
    entered: np.ndarray
    end: np.ndarray
    used: np.ndarray
    by_hand: Any = 1.0
    clipped: Any = 1.0
    averaged: Any = 1.0
    reason: Any = 0

    def take(self, where: np.ndarray) -> _Entry:
        """Return the entries at these places."""
        return _Entry(
            self.history, *(np.broadcast_to(x, self.end.shape)[where] for x in self[1:])
        )


def _readings(flow: Flow) -> tuple[_Columns, int]:
    """Return a row for each step and backward that it read, or that was erased before; how many are left out."""
    ledger = flow.ledger
    owners = sorted({o for p in ledger.parameters for o in p.optimizers})
    every: list[_Columns] = []
    left_out = 0
    for optimizer in owners:
        entries = list(_entries(flow, optimizer))
        kinds = np.zeros(len(flow.events), int)
        read = []
        for entry in entries:
            kinds[np.unique(entry.backward)] += 1
            rows, more = _read(flow, optimizer, entry)
            left_out = max(left_out, more)
            read.append(rows)
        if read:
            every.append(_combined(flow, _joined(read), kinds))
    if not every:
        every = [_combined(flow, _no_rows(), np.zeros(0, int))]
    rows = _joined(every)
    order = np.lexsort((rows["backward"], rows["step"]))
    return {name: array[order] for name, array in rows.items()}, left_out


def _joined(parts: list[_Columns]) -> _Columns:
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


def _entries(flow: Flow, optimizer: int) -> Iterator[_Entry]:
    """For each history of an optimizer's parameters, how its contributions entered the `.grad` that steps read."""
    owned = [
        p for p, one in enumerate(flow.ledger.parameters) if optimizer in one.optimizers
    ]
    histories: dict[tuple[int, int], tuple[int, int | None]] = {}
    for p in owned:
        shard = flow.shards.get(p)
        key = id(flow.of[p]), 0 if shard is None else id(flow.of[shard])
        histories.setdefault(key, (p, shard))
    backward = flow.events.where("kind", "backward")
    used = flow.outcomes.steps > 0
    for p, shard in histories.values():
        history = flow.of[p]
        mine = backward[history.born]
        born, end = history.born[mine], history.end[mine]
        if not born.size:
            continue
        entry = _Entry(history, born, born, end, used[born, p])
        if shard is None:
            yield entry
            continue
        yield from _scattered(flow, p, shard)
        # No step reads it there: what was zeroed is lost as it came, the rest waits.
        zeroed = entry.take(~flow.scatters[end] & (end < len(flow.events)))
        if zeroed.backward.size:
            yield zeroed._replace(end=zeroed.backward)


def _scattered(flow: Flow, whole: int, shard: int) -> Iterator[_Entry]:
    """Follow what reduce-scatters took from an unsharded gradient into its shard."""
    born, sync = flow.scattered(whole, shard)
    if not born.size:
        return
    events, history = flow.events, flow.of[shard]
    ranks = events.detail("ranks", math.nan)[sync]
    divisor = events.detail("divisor", math.nan)[sync]
    times = np.where(events.has("divisor")[sync], ranks / divisor, 1.0)
    change = flow.of[whole].factors.between(born, sync)
    known = (times > 0) & (times < math.inf) & (ranks >= 1)
    yield _Entry(
        history,
        born,
        sync,
        history.gone[np.searchsorted(history.gone[:-1], sync, side="right")],
        flow.outcomes.steps[sync, shard] > 0,
        by_hand=change.by_hand * np.where(known, times, 1.0),
        clipped=change.clipped,
        averaged=np.where(known, 1 / ranks, 1.0),
        reason=np.where(known, change.reason, BY_COMM_HOOK),
    )


def _read(flow: Flow, optimizer: int, entry: _Entry) -> tuple[_Columns, int]:
    """Return which steps read these contributions; those that no step reads count 0 in the next one."""
    steps = steps_of(flow.ledger, (optimizer,))
    first, until = flow.reads(steps, entry.history, entry.entered, entry.end)
    lost = until <= first
    skipped = flow.events.where("kind", "step") & flow.events.skipped
    mine = flow.events.detail("optimizer_index", 0) == optimizer
    skips = np.flatnonzero(skipped & mine)
    # It was there for a step that was skipped.
    tried = np.searchsorted(skips, entry.end) > np.searchsorted(skips, entry.entered)
    erased_first = (first < steps.size) & ~tried & ~entry.used
    many = np.where(lost, erased_first, until - first)
    listed = np.minimum(many, _FIRST) if many.sum() > _MOST else many
    which = np.repeat(np.arange(many.size), listed)
    nth = np.arange(which.size) - np.repeat(np.cumsum(listed) - listed, listed)
    step = steps[first[which] + nth]
    rows = _followed(flow, entry.take(which), step, lost[which])
    rows["optimizer"] = np.full(step.size, optimizer)
    return rows, int((many - listed).sum())


def _followed(
    flow: Flow, entry: _Entry, step: np.ndarray, lost: np.ndarray
) -> _Columns:
    """Return what happened to contributions before the steps, and why that is unknown."""
    change = entry.history.factors.between(entry.entered, step)
    by_hand, reason = entry.by_hand * change.by_hand, np.array(entry.reason)
    reason = np.where(change.reason > 0, change.reason, reason)
    # What was erased may be in what was put there by hand afterwards.
    put_back = (change.reason == BY_HAND) & (change.unknown_at > entry.end)
    erased = lost & ~put_back
    inside = flow.inside[entry.backward]
    reason = np.where(inside & (entry.end < step), _CLOSURE, reason)
    scale = flow.events.detail("amp_scale", 1.0)[entry.backward]
    scaled = np.log(np.maximum(scale * change.unscaled, np.finfo(float).tiny))
    # To multiply by one over the scale by hand is to unscale.
    undone = np.abs(scaled + np.log(by_hand)) <= SAME_IN_HALF
    undone &= np.abs(scaled) > SAME_IN_HALF
    by_hand = np.where(undone, by_hand * np.exp(scaled), by_hand)
    wrong = (np.abs(scaled) > SAME_IN_HALF) & ~undone
    why = np.where(change.unscaled != 1, _RESCALED, _SCALED)
    reason = np.where((reason == 0) & wrong, why, reason)
    hooked = flow.events.detail("by_hook", 1.0)[entry.backward] != 1
    overlapped = flow.events.detail("overlapped", default=False)[entry.backward]
    reason = np.where((reason == 0) & hooked, _HOOKED, reason)
    reason = np.where((reason == 0) & overlapped, _OVERLAPPED, reason)
    erased &= ~overlapped
    return {
        "step": step,
        "backward": entry.backward,
        "by_hand": by_hand,
        "clipped": entry.clipped * change.clipped,
        "averaged": np.minimum(entry.averaged, change.averaged),
        "erased": erased,
        "reason": np.where(erased, 0, reason),
    }


def _no_rows() -> _Columns:
    kinds = {
        "step": int,
        "backward": int,
        "reason": int,
        "optimizer": int,
        "erased": bool,
    }
    kinds |= dict.fromkeys(("by_hand", "clipped", "averaged"), float)
    return {name: np.zeros(0, kind) for name, kind in kinds.items()}


def _combined(flow: Flow, rows: _Columns, kinds: np.ndarray) -> _Columns:
    """Return one row for each step and backward, of what an optimizer's parameters say; unknown where they differ.

    `kinds` counts, for each backward, the histories of parameters that it reached.
    """
    key = rows["step"] * len(flow.events) + rows["backward"]
    order = np.argsort(key, kind="stable")
    rows = {name: array[order] for name, array in rows.items()}
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    if not starts.size:
        return rows | {"again": np.zeros(0, bool)}
    used = ~rows["erased"]
    total = np.log(rows["by_hand"] * rows["clipped"] * rows["averaged"])
    high = np.maximum.reduceat(np.where(used, total, -np.inf), starts)
    low = np.minimum.reduceat(np.where(used, total, np.inf), starts)
    some = np.logical_or.reduceat(used, starts)
    reason = np.maximum.reduceat(rows["reason"], starts)
    # Where an earlier step read it and it was erased since, there is no row.
    many = np.add.reduceat(used.astype(int), starts)
    half = any(p.dtype in ("float16", "bfloat16") for p in flow.ledger.parameters)
    with np.errstate(invalid="ignore"):
        apart = some & (high - low > (SAME_IN_HALF if half else SAME))
    rows = {name: array[starts] for name, array in rows.items()}
    partly = some & (many < kinds[rows["backward"]])
    reason = np.where((reason == 0) & apart, DIFFERENT, reason)
    reason = np.where((reason == 0) & partly, _PARTLY, reason)
    rows |= {"reason": reason, "erased": ~some}
    order = np.lexsort((rows["step"], rows["backward"]))
    again = np.zeros(starts.size, bool)
    again[order[1:]] = np.diff(rows["backward"][order]) == 0
    return rows | {"again": again & some}
