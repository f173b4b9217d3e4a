"""The flow of gradients: the coefficient with which each contribution is in `.grad` after each later event.

A `backward` adds to `.grad`. Later events scale what is in it (`clip`, `unscale`, `sync`, an `edit` by one factor),
read it (`step`) or erase it (`zero_grad`). What is live, consumed or erased, the windows, the shares and the parts of
a drawn bar are all read from here. A factor that cannot be read is unknown, with its reason. Pure: stdlib and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT, Arrays, Events

# Two numbers are the same if they differ by less than float32 norms are rounded; gradients in half precision are
# rounded once more.
SAME, SAME_IN_HALF = 1e-3, 2e-2

# Why the factor of an event is unknown; 0 is "known".
UNREAD = (
    "",
    ".grad was changed by hand, and not by one factor for every parameter",
    ".grad was clipped element by element",
    "what it was clipped or divided by was not recorded",
    "ranks reduced gradients by hand, by a hook, with a divisor of yours or between groups; whether to a sum or a mean is not known",
    "it weighs differently in different parameters",
)
BY_HAND, BY_VALUE, NOT_RECORDED, REDUCED, DIFFERENT = range(1, len(UNREAD))


class Outcomes(NamedTuple):
    """What became of each contribution: arrays of events × parameters.

    `erased` is the event that removed it from `.grad`, `consumed` the first step that used it
    (-1: none), `steps` how many steps used it. Entries without a contribution hold -1, -1, 0.
    """

    erased: np.ndarray
    consumed: np.ndarray
    steps: np.ndarray


class Backwards(Sequence[int]):
    """The backwards of a window: a tuple of event indices that is kept as an array.

    Where nothing is ever erased each window holds all backwards before it, so that windows share one array.

    >>> window = Backwards(np.array([0, 1, 3]))
    >>> window, window == (0, 1, 3), 3 in window, window[-1], window[:1]
    ((0, 1, 3), True, True, 3, (0,))
    """

    __slots__ = ("_events",)

    def __init__(self, events: np.ndarray) -> None:
        self._events = events

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: Any) -> Any:
        found = self._events[index].tolist()
        return tuple(found) if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[int]:
        return iter(self._events.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple | Backwards):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Window(NamedTuple):
    """One accumulation window: an optimizer step and the backwards whose contributions it consumed.

    `step` and `backwards` are indices of events, `optimizer` is the name of the one that stepped;
    `backwards` prints, compares and indexes as a tuple does. What each of them weighs is in
    `Ledger.shares`.
    """

    step: int
    optimizer: str
    backwards: Sequence[int]


# --- the factor of each event ---------------------------------------------------------------------


class Scaling(NamedTuple):
    """The events that scale `.grad`, and by which factor: one for all parameters that the event `changed`.

    `kind` says whose factor it is: 0 changes by hand, 1 clips, 2 the gradient scaler. `reason` is a place in `UNREAD`;
    where it is not 0 the factor is unknown. `ranks` is over how many ranks the event averaged, 0 where it did not: an
    average leaves alone what an earlier one has made the same everywhere, so that it is not one of the factors.
    """

    events: np.ndarray
    kind: np.ndarray
    factor: np.ndarray
    ranks: np.ndarray
    reason: np.ndarray
    changed: np.ndarray


_HAND, _CLIP, _SCALER = range(3)


class _Factor(NamedTuple):
    """What one event did to `.grad`."""

    factor: float
    kind: int = _HAND
    ranks: float = 0.0
    reason: int = 0


@dataclass
class _Change:
    """An event that changed `.grad`: its details, and the norms around it.

    `ratio` is the norm after it by the norm before, for each parameter; NaN where it did not change, or where that says
    nothing.
    """

    ledger: Arrays
    event: int
    kind: str
    details: Mapping[str, Any]
    changed: np.ndarray

    def __post_init__(self) -> None:
        ledger = self.ledger
        event = self.event
        after = ledger.grad[event].astype(float)
        before = ledger.grad[event - 1] if event else np.full(after.shape, np.nan)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            ratio = np.where(self.changed, after / before, np.nan)
        ratio[~(np.isfinite(ratio) & (ratio > 0))] = np.nan
        self.ratio = ratio
        self.stays_zero = self.changed & (before == 0) & (after == 0)
        self.remains = (after != 0) & (ledger.state[event] & PRESENT > 0)

    @property
    def tolerance(self) -> float:
        """How far apart two equal ratios of norms may be."""
        changed = np.flatnonzero(self.changed).tolist()
        dtypes = {self.ledger.parameters[p].dtype for p in changed}
        return SAME_IN_HALF if dtypes & {"float16", "bfloat16"} else SAME

    def one_ratio(self) -> float:
        """Return the ratio that all changed parameters have; NaN where they differ or none is known."""
        ratios = self.ratio[~np.isnan(self.ratio)]
        if not ratios.size:
            return math.nan
        mean = float(ratios.mean())
        return mean if np.ptp(ratios) <= self.tolerance * mean else math.nan

    def number(self, name: str) -> float:
        """Return a number of the event's details, NaN where it is none."""
        return number(self.details.get(name))

    def read(self, expected: float, kind: int) -> _Factor:
        """Return the factor that is expected, or else the one that the norms show."""
        ratio = self.one_ratio()
        if expected > 0 and math.isfinite(expected):
            return _Factor(expected, kind)
        if not math.isnan(ratio):
            return _Factor(ratio, kind)
        nothing_read = np.isnan(self.ratio).all()
        return _Factor(1, kind, reason=NOT_RECORDED if nothing_read else DIFFERENT)


def scaling(ledger: Arrays) -> Scaling:
    """Return the events of a ledger that scale `.grad`, each with its factor."""
    events = ledger.columns
    # A fused optimizer unscales what it reads, and leaves it unscaled.
    fused = events.where("kind", "step") & (events.detail("amp_scale", 0.0) > 0)
    scales = events.where("kind", "clip", "unscale", "edit") | (fused & ~events.skipped)
    scales |= events.where("kind", "sync") & ~scatters(events)
    at = np.flatnonzero(scales)
    changed = ledger.state[at] & CHANGED > 0
    at = at[changed.any(axis=1)]
    changed = changed[changed.any(axis=1)]
    kinds = events.texts("kind")
    rows = []
    for row, e in enumerate(at.tolist()):
        details = events.details[events.column("details")[e]]
        change = _Change(ledger, e, kinds[e], details, changed[row])
        factor = _factor(change)
        rows.append(factor)
        changed[row] = _affected(change, factor)
    table = np.array(rows, float).reshape(-1, 4)
    return Scaling(
        at,
        kind=table[:, 1].astype(int),
        factor=table[:, 0],
        ranks=table[:, 2],
        reason=table[:, 3].astype(int),
        changed=changed,
    )


def _factor(change: _Change) -> _Factor:
    if change.kind == "clip":
        return _of_clip(change)
    if change.kind == "sync":
        return _of_sync(change)
    if change.kind == "edit":
        return _of_edit(change)
    return change.read(1 / (change.number("amp_scale") or math.nan), _SCALER)


def _affected(change: _Change, factor: _Factor) -> np.ndarray:
    """Return the parameters whose contributions the factor of an event is about."""
    affected = change.changed
    if factor.reason:  # a zero is a zero under any factor
        affected = affected & ~change.stays_zero
    if factor.reason == BY_VALUE:
        affected = affected & (change.ratio != 1)
    elif change.kind == "edit":
        affected = affected & change.remains
    return affected


def _of_clip(change: _Change) -> _Factor:
    if change.details.get("by") == "value":
        return _Factor(1, _CLIP, reason=BY_VALUE)
    norm = change.number("total_norm")
    limit = change.number("max_norm")
    expected = min(1.0, limit / (norm + 1e-6)) if norm >= 0 else math.nan
    ratio = change.one_ratio()
    agrees = abs(expected - ratio) <= SAME_IN_HALF * ratio
    if agrees or np.isnan(change.ratio).all():
        return change.read(expected, _CLIP)
    return change.read(math.nan, _CLIP)


def _of_sync(change: _Change) -> _Factor:
    within_backward = change.ledger.columns.where("within", "backward")[change.event]
    by_others = "reduction" in change.details
    ranks = change.number("ranks")
    if by_others or not within_backward or not 1 <= ranks < math.inf:
        return _Factor(1, reason=REDUCED)
    return _Factor(1, ranks=ranks)


def _of_edit(change: _Change) -> _Factor:
    changed = change.changed & change.remains & ~change.stays_zero
    factor = change.one_ratio()
    if not math.isnan(factor) and _multiplies(change, changed, factor):
        return _Factor(factor)
    return _Factor(1, reason=BY_HAND)


def _multiplies(change: _Change, changed: np.ndarray, factor: float) -> bool:
    """Return whether a change by hand multiplied every element by this factor.

    Kept elements show it. Where only norms are kept, those of several parameters have to agree.
    """
    kept = [p for p in np.flatnonzero(changed).tolist() if p in change.ledger.exact]
    for p in kept:
        _, grad = change.ledger.exact[p]
        before = grad[change.event - 1]
        after = grad[change.event]
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(after - before * factor)
            # Small elements may be lost to rounding beside large ones.
            most = np.abs(before * factor).max(initial=0)
            if not (distance <= change.tolerance * most).all():
                return False
    return bool(kept) or changed.sum() > 1


class Product(NamedTuple):
    """What scaled contributions between two events: factors by hand, of clips and of the scaler; averages.

    `averaged` is one over the number of ranks; `reason` is a place in `UNREAD`, and where it is not 0 the factors are
    not all that happened. `unknown_at` is the last event with an unknown factor, -1 for none.
    """

    by_hand: np.ndarray
    clipped: np.ndarray
    unscaled: np.ndarray
    averaged: np.ndarray
    reason: np.ndarray
    unknown_at: np.ndarray

    @property
    def coefficient(self) -> np.ndarray:
        """All of them together, NaN where that is unknown."""
        with np.errstate(over="ignore", invalid="ignore"):
            product = self.by_hand * self.clipped * self.unscaled * self.averaged
        coefficient: np.ndarray = np.where(self.reason > 0, np.nan, product)
        return coefficient

    def then(self, later: Product) -> Product:
        """Return what happened in both stretches, this one and a later one."""
        return Product(
            self.by_hand * later.by_hand,
            self.clipped * later.clipped,
            self.unscaled * later.unscaled,
            np.minimum(self.averaged, later.averaged),
            np.where(later.reason > 0, later.reason, self.reason),
            later.unknown_at,
        )


class Factors:
    """The factors by which one parameter's `.grad` was scaled, summed up as logarithms."""

    def __init__(self, every: Scaling, parameter: int) -> None:
        mine = np.flatnonzero(every.changed[:, parameter])
        reason = every.reason[mine]
        kind = every.kind[mine]
        logarithms = np.log(np.where(reason > 0, 1.0, every.factor[mine]))
        self._events = every.events[mine]
        self._sums = []
        for each in (_HAND, _CLIP, _SCALER):
            sums = np.cumsum(np.where(kind == each, logarithms, 0.0))
            self._sums.append(np.append(0.0, sums))
        self._last_average = _last(every.ranks[mine] > 0)
        self._last_unknown = _last(reason > 0)
        # The last place of these is that of "none", -1.
        self._ranks = np.append(every.ranks[mine], 1.0)
        self._reason = np.append(reason, 0)
        self._at = np.append(self._events, -1)

    def between(self, start: np.ndarray, stop: np.ndarray) -> Product:
        """Return what happened after `start`, up to and with `stop` (arrays of events)."""
        before = np.searchsorted(self._events, start, side="right")
        after = np.searchsorted(self._events, stop, side="right")
        average = self._last_average[after]
        unknown = self._last_unknown[after]
        by_hand, clipped, unscaled = (np.exp(s[after] - s[before]) for s in self._sums)
        return Product(
            by_hand,
            clipped,
            unscaled,
            np.where(average >= before, 1 / self._ranks[average], 1.0),
            np.where(unknown >= before, self._reason[unknown], 0),
            self._at[unknown],
        )


def _last(marked: np.ndarray) -> np.ndarray:
    """Return, for the first 0, 1, … places, which of them is the last that is marked; -1 for none."""
    places = np.where(marked, np.arange(marked.size), -1)
    return np.append(-1, np.maximum.accumulate(places)).astype(np.int64)


# --- what became of each contribution -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class History:
    """Parameters of which `.grad` went through the same events.

    `born` are the events that contributed to it, `end` those that erased each contribution (the number of events:
    none did); `ends` all events that erased something, `factors` what scaled it. Of unsharded gradients `shard` is
    the parameter that they are scattered to: no step reads them before.
    """

    parameters: np.ndarray
    optimizers: tuple[int, ...]
    shard: int | None
    born: np.ndarray
    end: np.ndarray
    ends: np.ndarray
    factors: Factors

    def end_of(self, entered: np.ndarray) -> np.ndarray:
        """Return what erased that which entered this `.grad` with these events."""
        last = len(self.ends) - 1
        return self.ends[np.searchsorted(self.ends[:last], entered, side="right")]


class Passage(NamedTuple):
    """The contributions of backwards to a history, on their way to the steps that read them.

    `entered` is the event at which each came into the `.grad` that steps read, `end` the one that erased it there,
    `consumed` the first step that used it (-1: none), `steps` how many did. Of what was scattered, `shard` is the
    history of that `.grad`, and `ranks` over how many ranks it was averaged on the way (NaN: not known).
    """

    history: History
    backward: np.ndarray
    entered: np.ndarray
    end: np.ndarray
    consumed: np.ndarray
    steps: np.ndarray
    shard: History | None = None
    ranks: np.ndarray = np.ones(0)

    @property
    def cells(self) -> tuple[np.ndarray, ...]:
        """Their places in arrays of events × parameters."""
        return np.ix_(self.backward, self.history.parameters)

    def until(self, which: np.ndarray, stop: np.ndarray) -> Product:
        """Return what happened to the contributions at these places until events, each until its own."""
        entered = self.entered[which]
        if self.shard is None:
            return self.history.factors.between(entered, stop)
        ranks = self.ranks[which]
        unknown = np.where(np.isnan(ranks), REDUCED, 0)
        before = self.history.factors.between(self.backward[which], entered)
        before = before._replace(
            averaged=np.where(unknown > 0, 1.0, 1 / ranks),
            reason=np.maximum(before.reason, unknown),
        )
        return before.then(self.shard.factors.between(entered, stop))


class Flow:
    """The coefficients with which contributions are in `.grad`, by parameters of equal history."""

    def __init__(self, ledger: Arrays) -> None:
        self.ledger = ledger
        self.events = ledger.columns
        self.scaling = scaling(ledger)
        self._backward = self.events.where("kind", "backward")
        self._scatters = np.append(scatters(self.events), False)
        around = _steps_around(self.events)
        # A closure's backward is used by the step around it, even when the closure zeroes again.
        self.in_closure = self._backward & (around >= 0)
        self._last_reader = _last_readers(self.events, around, self.in_closure)
        self._shards = _shards_of(ledger)
        self.histories = list(self._histories())
        self.of = {p: one for one in self.histories for p in one.parameters.tolist()}

    def _histories(self) -> Iterator[History]:
        ledger = self.ledger
        count = len(self.events)
        contributed = np.asfortranarray(ledger.state & CONTRIBUTED > 0)
        gone = np.asfortranarray(_gone(ledger))
        # By column, what happened to each `.grad`, as bytes that can be compared.
        packed = [
            np.packbits(each, axis=0)
            for each in (contributed, gone, self.scaling.changed)
        ]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for p, parameter in enumerate(ledger.parameters):
            shard = self._shards.get(p)
            columns = [p] if shard is None else [p, shard]
            bits = [each[:, column].tobytes() for each in packed for column in columns]
            alike.setdefault((parameter.optimizers, *bits), []).append(p)
        for (optimizers, *_), parameters in alike.items():
            first = parameters[0]
            born = np.flatnonzero(contributed[:, first])
            ends = np.append(np.flatnonzero(gone[:, first]), count)
            end = ends[np.searchsorted(ends[:-1], born, side="right")]
            factors = Factors(self.scaling, first)
            shard = self._shards.get(first)
            yield History(
                np.array(parameters), optimizers, shard, born, end, ends, factors
            )

    def reads(
        self, steps: np.ndarray, entered: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which steps read contributions that entered `.grad` and left it there: `steps[first:until]` each."""
        first = np.searchsorted(steps, entered, side="right")
        until = np.searchsorted(steps, self._last_reader[end], side="right")
        at_least = np.minimum(first + self.in_closure[entered], steps.size)
        return first, np.maximum(until, at_least)

    def consumed(
        self, history: History, entered: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first step that used each contribution (-1: none), and how many did."""
        steps = steps_of(self.ledger, history.optimizers)
        if history.shard is not None:
            steps = steps[:0]
        first, until = self.reads(steps, entered, end)
        used = np.append(steps, -1)[np.minimum(first, steps.size)]
        return np.where(until > first, used, -1), np.maximum(until - first, 0)

    @cached_property
    def passages(self) -> list[Passage]:
        """How the contributions of backwards to each history came to the steps that read them."""
        passages: list[Passage] = []
        for history in self.histories:
            mine = self._backward[history.born]
            born = history.born[mine]
            end = history.end[mine]
            if history.shard is not None:
                passages += self._to_shard(history, self.of[history.shard], born, end)
            elif born.size:
                uses = self.consumed(history, born, end)
                passages.append(Passage(history, born, born, end, *uses))
        return passages

    def _to_shard(
        self, history: History, shard: History, born: np.ndarray, end: np.ndarray
    ) -> Iterator[Passage]:
        """Follow the contributions to an unsharded gradient into its shard."""
        brings = shard.born[self._scatters[shard.born]]
        # Where groups of ranks are averaged later, it is a later event that brings what was taken.
        at = np.searchsorted(brings, end)
        taken = self._scatters[end] & (at < brings.size)
        if taken.any():
            entered = brings[at[taken]]
            ranks = self.events.detail("ranks", math.nan)[entered]
            # Where FSDP was asked for something else than the average, the reduction is not known.
            averages = (ranks >= 1) & ~self.events.has("reduction")[entered]
            ranks = np.where(averages, ranks, math.nan)
            end_there = shard.end_of(entered)
            uses = self.consumed(shard, entered, end_there)
            yield Passage(history, born[taken], entered, end_there, *uses, shard, ranks)
        # No step reads an unsharded gradient: what was zeroed there is lost as it came, the rest waits.
        lost = born[~self._scatters[end] & (end < len(self.events))]
        if lost.size:
            never = np.full(lost.size, -1), np.zeros(lost.size, int)
            yield Passage(history, lost, lost, lost, *never)

    def coefficients(self, parameter: int, born: np.ndarray, event: int) -> np.ndarray:
        """Return with which coefficient contributions are in `.grad` after an event; NaN where that is unknown."""
        stop = np.full(born.shape, event)
        return self.of[parameter].factors.between(born, stop).coefficient

    def averages(self, parameter: int) -> np.ndarray:
        """Return the events that averaged a parameter's `.grad` over ranks."""
        averages = self.scaling.changed[:, parameter] & (self.scaling.ranks > 0)
        events: np.ndarray = self.scaling.events[averages]
        return events

    def live(self, event: int, parameter: int) -> np.ndarray:
        """Return the events whose contributions are in a parameter's `.grad` after an event."""
        history = self.of[parameter]
        live = (history.born <= event) & (history.end > event)
        born: np.ndarray = history.born[live]
        return born

    @property
    def _to_shards(self) -> list[Passage]:
        return [passage for passage in self.passages if passage.shard is not None]

    @cached_property
    def outcomes(self) -> Outcomes:
        """See `Ledger.outcomes`."""
        shape = self.ledger.state.shape
        erased = np.full(shape, -1, np.int32)
        consumed = np.full(shape, -1, np.int32)
        steps = np.zeros(shape, np.int32)
        for history in self.histories:
            first, many = self.consumed(history, history.born, history.end)
            cells = np.ix_(history.born, history.parameters)
            erasing = np.where(history.end < len(self.events), history.end, -1)
            erased[cells] = erasing[:, None]
            consumed[cells] = first[:, None]
            steps[cells] = many[:, None]
        for passage in self._to_shards:
            consumed[passage.cells] = passage.consumed[:, None]
            steps[passage.cells] = passage.steps[:, None]
        return Outcomes(erased, consumed, steps)

    @cached_property
    def erased_for_good(self) -> np.ndarray:
        """As `Outcomes.erased`; but what was scattered ends where its shard's contribution does."""
        erased = self.outcomes.erased
        if not self._to_shards:
            return erased
        for_good = np.where(self._scatters[erased], -1, erased)
        for passage in self._to_shards:
            end = np.where(passage.end < len(self.events), passage.end, -1)
            for_good[passage.cells] = end[:, None]
        return for_good

    @cached_property
    def unconsumed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every contribution that no step used: what erased it, its parameter and its backward, in this order."""
        erased, _, steps = self.outcomes
        births, columns = np.nonzero((erased >= 0) & (steps == 0))
        ends = erased[births, columns]
        order = np.lexsort((births, columns, ends))
        return ends[order], columns[order], births[order]

    def windows(self) -> list[Window]:
        """See `Ledger.windows`."""
        events = self.events
        taken = np.flatnonzero(events.where("kind", "step") & ~events.skipped)
        index = events.detail("optimizer_index", 0)[taken]
        names = events.detail("optimizer", "")
        windows = []
        for optimizer in np.unique(index).tolist():
            until = self._until(optimizer)
            born = np.flatnonzero(until >= 0)
            until = until[born]
            ordered = bool((np.diff(until) >= 0).all())
            for step in taken[index == optimizer].tolist():
                stop = np.searchsorted(born, step)
                if ordered:  # a slice, which takes no memory
                    read = born[np.searchsorted(until, step, side="right") : stop]
                else:
                    read = born[:stop][until[:stop] > step]
                windows.append(Window(step, str(names[step]), Backwards(read)))
        return sorted(windows, key=lambda window: window.step)

    def _until(self, optimizer: int) -> np.ndarray:
        """Return, per event, before which event an optimizer's steps consume some of its contribution; -1: never."""
        until = np.full(len(self.events), -1)
        for passage in self.passages:
            if optimizer in passage.history.optimizers:
                # A step may consume what its own closure erased before it.
                last = np.maximum(passage.end, passage.consumed + 1)
                until[passage.backward] = np.maximum(until[passage.backward], last)
        return until

    def running_sum(self, parameter: int, added: np.ndarray) -> np.ndarray:
        """Return the sum of the live ones among a parameter's contributions (events × elements) after each event."""
        total = np.zeros_like(added)
        history = self.of[parameter]
        total[history.born] = added[history.born]
        # What is born between two ends is erased together, so that sums run from the first of them to its end.
        ends, first = np.unique(history.end, return_index=True)
        for start, end in zip(history.born[first].tolist(), ends.tolist(), strict=True):
            total[start:end] = np.cumsum(total[start:end], axis=0)
        return total

    def used_from_before(self) -> int:
        """Return the first step that used what `.grad` held before the recording began; -1 for none.

        Only the first event shows it: after a contribution there is another sum, or without one there is something.
        """
        ledger = self.ledger
        first = ledger.state[:1]
        grad = ledger.grad[:1]
        added = ledger.contribution[:1]
        with np.errstate(invalid="ignore"):
            differs = (np.abs(grad - added) > SAME * grad) & (grad < math.inf)
        contributed = first & CONTRIBUTED > 0
        changed = first & CHANGED > 0
        held = np.where(contributed, differs, (grad > 0) & ~changed)
        if ledger.meta.get("ranks", 1) != 1:
            held &= ~contributed  # an average is another sum, too
        edits = self.events.where("kind", "edit")
        steps: list[int] = []
        for p in np.flatnonzero(held.any(axis=0)).tolist():
            # An edit may have replaced what was there.
            replaced = np.flatnonzero(edits & (ledger.state[:, p] & CHANGED > 0))
            last = min([int(self.of[p].ends[0]), *replaced.tolist()])
            mine = steps_of(ledger, self.of[p].optimizers)
            steps += mine[mine <= last][:1].tolist()
        return min(steps, default=-1)


def _steps_around(events: Events) -> np.ndarray:
    """Return, for each event inside a step, the event of that step, which follows it; -1 for others."""
    around = np.full(len(events), -1)
    inside = events.where("within", "step")
    steps = events.where("kind", "step")
    ranks = events.column("rank")
    for rank in np.unique(ranks[inside]).tolist():
        of_rank = np.flatnonzero(steps & (ranks == rank))
        at = np.flatnonzero(inside & (ranks == rank))
        around[at] = np.append(of_rank, -1)[np.searchsorted(of_rank, at)]
    return around


def _last_readers(
    events: Events, around: np.ndarray, in_closure: np.ndarray
) -> np.ndarray:
    """Return, for each event that erases (and for "none"), the last event that may have read what it erased.

    A step may zero what it has read; but where a closure ran inside it, the closure may have zeroed before.
    """
    last = np.arange(len(events) + 1)
    zeros = events.where("kind", "zero_grad", "edit") & (around >= 0)
    zeros &= ~np.isin(around, around[in_closure])
    last[:-1][zeros] = around[zeros]
    return last


def _gone(ledger: Arrays) -> np.ndarray:
    """Mark where each `.grad` was removed or zeroed: events × parameters."""
    events = ledger.columns
    # A shard is away while FSDP averages it over groups of ranks; only a reduce-scatter takes a gradient for good.
    away = events.where("kind", "sync") & ~scatters(events)
    gone: np.ndarray = (ledger.state & PRESENT == 0) & ~away[:, None]
    at = np.flatnonzero(events.where("kind", "zero_grad", "edit", "step"))
    # A sum that was 0 already, and that nothing touched, is no erasure: another optimizer's gradients were zeroed.
    changed = ledger.state[at] & CHANGED > 0
    was_something = ledger.grad[np.maximum(at - 1, 0)] != 0
    gone[at] |= (ledger.grad[at] == 0) & (changed | was_something)
    return gone


def scatters(events: Events) -> np.ndarray:
    """Mark the collectives that take gradients elsewhere, and leave none."""
    stays = np.isin(
        events.detail("op", None), ("all-reduce", "all-gather", "broadcast")
    )
    takes: np.ndarray = events.where("kind", "sync") & ~stays
    return takes


def _shards_of(ledger: Arrays) -> dict[int, int]:
    """Return, for each unsharded gradient, the column of the parameter that it is scattered to."""
    columns: dict[str, int] = {}
    for column, parameter in enumerate(ledger.parameters):
        for name in (parameter.name, *parameter.aliases):
            columns.setdefault(name, column)
    return {
        whole: columns[parameter.unsharded_of]
        for whole, parameter in enumerate(ledger.parameters)
        if parameter.unsharded_of
    }


def steps_of(ledger: Arrays, optimizers: Sequence[int]) -> np.ndarray:
    """Return the steps of these optimizers that changed weights, as indices of events."""
    events = ledger.columns
    taken = events.where("kind", "step") & ~events.skipped
    mine = np.isin(events.detail("optimizer_index", 0), optimizers)
    return np.flatnonzero(taken & mine)


def number(value: Any) -> float:
    """Return a number of an event's details, NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
