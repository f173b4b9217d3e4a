"""The flow of gradients: the coefficient with which each contribution is in `.grad` after each later event.

A `backward` adds to `.grad`. Later events scale what is in it (`clip`, `unscale`, `sync`, an `edit` by one factor),
read it (`step`) or erase it (`zero_grad`). What is live, consumed or erased, the windows, the shares and the parts of
a drawn bar are all read from here. A factor that cannot be read is unknown, with its reason. Pure: stdlib and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT, Arrays, Event, Events

# Two numbers are the same if they differ by less than float32 norms are rounded; gradients in half precision are
# rounded once more.
SAME, SAME_IN_HALF = 1e-3, 2e-2
HALF = ("float16", "bfloat16")

# Why the factor of an event is unknown; 0 is "known".
UNREAD = (
    "",
    ".grad was changed by hand, and not by one factor for every parameter",
    ".grad was clipped element by element",
    "what it was clipped or divided by was not recorded",
    "ranks reduced gradients in a way of yours or between groups; whether to a sum or a mean is not known",
    "it weighs differently in different parameters",
)
BY_HAND, BY_VALUE, NOT_RECORDED, REDUCED, DIFFERENT = range(1, len(UNREAD))


class Outcomes(NamedTuple):
    """What became of each contribution: arrays of events × parameters.

    `erased` is the event that removed it from `.grad`, `consumed` the first step that used it
    (-1: none), `steps` how many steps used it. Entries without a contribution hold -1, -1, 0.
    """

    erased: ndarray
    consumed: ndarray
    steps: ndarray


class Backwards(Sequence[int]):
    """The backwards of a window: a tuple of event indices that is kept as an array.

    Where nothing is ever erased each window holds all backwards before it, so that windows share one array.

    >>> window = Backwards(np.array([0, 1, 3]))
    >>> window, window == (0, 1, 3), 3 in window, window[-1], window[:1]
    ((0, 1, 3), True, True, 3, (0,))
    """

    __slots__ = ("_events",)

    def __init__(self, events: ndarray) -> None:
        self._events = events

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: Any) -> Any:
        events = self._events[index].tolist()
        return tuple(events) if isinstance(index, slice) else events

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

# Whose factor it is: changes by hand, clips, the gradient scaler.
_HAND, _CLIP, _SCALER = range(3)


class Factor(NamedTuple):
    """What one event did to `.grad`: one factor for all parameters that it changed.

    `reason` is a place in `UNREAD`; where it is not 0 the factor is unknown. `ranks` is over how many ranks the event
    averaged, 0 where it did not: an average leaves alone what an earlier one has made the same everywhere, so that
    it is not one of the factors.
    """

    factor: float = 1.0
    kind: int = _HAND
    ranks: float = 0.0
    reason: int = 0


class Scaling(NamedTuple):
    """The events that scale `.grad`: a row of `factors` for each (as `Factor` has them), and what it `changed`."""

    events: ndarray
    factors: ndarray
    changed: ndarray


class _Change(NamedTuple):
    """An event that changed some parameters' `.grad`, and by which ratio their norms changed.

    `ratio` is NaN where norms changed by several ratios, or none is known; then it `says_nothing`. `remains` are the
    changed parameters of which something is left.
    """

    event: Event
    ratio: float
    says_nothing: bool
    remains: ndarray
    tolerance: float

    def number(self, name: str) -> float:
        """Return a number of the event's details, NaN where it is none."""
        return number(self.event.details.get(name))


def scaling(ledger: Arrays) -> Scaling:
    """Return the events of a ledger that scale `.grad`, each with its factor."""
    changed = ledger.state & CHANGED > 0
    scales = _scales(ledger.events)
    scales &= changed.any(axis=1)
    at = np.flatnonzero(scales)
    changed = changed[at]
    after = ledger.grad[at].astype(float)
    before = ledger.grad[at - 1].astype(float)
    before[at == 0] = np.nan
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = after / before
    says_something = changed & np.isfinite(ratio)
    says_something &= ratio > 0
    ratio[~says_something] = np.nan
    present = ledger.state[at] & PRESENT
    remains = changed & (after != 0)
    remains &= present > 0
    dtypes = [parameter.dtype for parameter in ledger.parameters]
    in_half = changed & np.isin(dtypes, HALF)
    tolerance = np.where(in_half.any(axis=1), SAME_IN_HALF, SAME)
    factors = []
    for row, e in enumerate(at.tolist()):
        event = ledger.events[e]
        ratios = ratio[row][~np.isnan(ratio[row])]
        within = float(tolerance[row])
        one_ratio = _one(ratios, within)
        left = remains[row] & (ratio[row] != 1)
        change = _Change(event, one_ratio, not ratios.size, left, within)
        factor = _factor(ledger, change)
        factors.append(factor)
        if factor.reason == BY_VALUE:
            changed[row] &= ratio[row] != 1
        elif event.kind == "edit":
            changed[row] = remains[row] & (ratio[row] != 1)
    rows = np.array(factors, float)
    rows = rows.reshape(-1, len(Factor._fields))
    return Scaling(at, rows, changed)


def _one(ratios: ndarray, tolerance: float) -> float:
    """Return the ratio that all of these are; NaN where they differ or there is none."""
    if not ratios.size:
        return math.nan
    mean = float(ratios.mean())
    return mean if np.ptp(ratios) <= tolerance * mean else math.nan


def _scales(events: Events) -> ndarray:
    """Mark the events that may scale what is in `.grad`."""
    # A fused optimizer unscales what it reads, and leaves it unscaled.
    unscales = events.detail("amp_scale", 0.0) > 0
    fused = events.where("kind", "step") & ~events.skipped & unscales
    synced = events.where("kind", "sync") & ~scatters(events)
    changes = events.where("kind", "clip", "unscale", "edit")
    scales: ndarray = changes | fused | synced
    return scales


def _factor(ledger: Arrays, change: _Change) -> Factor:
    event = change.event
    if event.kind == "sync":
        return _of_sync(change)
    if event.kind == "clip":
        return _of_clip(change)
    if event.kind == "edit":
        is_known = not math.isnan(change.ratio) and _multiplies(ledger, change)
        return Factor(change.ratio) if is_known else Factor(reason=BY_HAND)
    scale = change.number("amp_scale") or math.nan
    return _read(1 / scale, change.ratio, _SCALER)


def _of_sync(change: _Change) -> Factor:
    event = change.event
    ranks = change.number("ranks")
    usual = "mean" if event.within == "backward" else ""
    reduction = event.details.get("reduction", usual)
    if reduction not in ("mean", "sum") or not 1 <= ranks < math.inf:
        return Factor(reason=REDUCED)
    # A sum is an average, times the number of ranks.
    return Factor(ranks if reduction == "sum" else 1.0, ranks=ranks)


def _multiplies(ledger: Arrays, change: _Change) -> bool:
    """Return whether every element was multiplied by the ratio of the norms.

    Kept elements show it. Where only norms are kept, those of several parameters have to agree, or to be divided by
    the number of ranks.
    """
    remaining = np.flatnonzero(change.remains).tolist()
    kept = [p for p in remaining if p in ledger.exact]
    if kept:
        return all(_is_multiple(ledger.exact[p][1], change) for p in kept)
    by_ranks = change.ratio * number(ledger.meta.get("ranks"))
    return len(remaining) > 1 or abs(by_ranks - 1) < change.tolerance


def _is_multiple(grad: ndarray, change: _Change) -> bool:
    """Return whether an event multiplied every element of a `.grad` by the ratio of the norms."""
    e = change.event.index
    expected = grad[e - 1] * change.ratio
    # Small elements may be lost to rounding beside large ones.
    largest = np.abs(expected).max(initial=0)
    with np.errstate(invalid="ignore"):
        apart = np.abs(grad[e] - expected)
    agrees = apart <= change.tolerance * largest
    return bool(agrees.all())


def _of_clip(change: _Change) -> Factor:
    if change.event.details.get("by") == "value":
        return Factor(kind=_CLIP, reason=BY_VALUE)
    norm = change.number("total_norm")
    limit = change.number("max_norm")
    expected = math.nan
    if norm >= 0:
        expected = min(1.0, limit / (norm + 1e-6))
    agrees = abs(expected - change.ratio) <= SAME_IN_HALF * change.ratio
    if not agrees and not change.says_nothing:
        expected = math.nan
    return _read(expected, change.ratio, _CLIP)


def _read(expected: float, ratio: float, kind: int) -> Factor:
    """Return the factor that is expected, or else the one that the norms show."""
    if expected > 0 and math.isfinite(expected):
        return Factor(expected, kind)
    if not math.isnan(ratio):
        return Factor(ratio, kind)
    return Factor(kind=kind, reason=NOT_RECORDED)


class Product(NamedTuple):
    """What scaled contributions between two events: factors by hand, of clips and of the scaler; averages.

    `averaged` is one over the number of ranks; `reason` is a place in `UNREAD`, and where it is not 0 the factors are
    not all that happened.
    """

    by_hand: ndarray
    clipped: ndarray
    unscaled: ndarray
    averaged: ndarray
    reason: ndarray

    @property
    def coefficient(self) -> ndarray:
        """All of them together, NaN where that is unknown."""
        with np.errstate(over="ignore", invalid="ignore"):
            product = self.by_hand * self.clipped * self.unscaled * self.averaged
        coefficient: ndarray = np.where(self.reason > 0, np.nan, product)
        return coefficient


class Factors:
    """The factors by which one parameter's `.grad` was scaled, summed up as logarithms."""

    def __init__(self, every: Scaling, parameter: int) -> None:
        mine = every.changed[:, parameter]
        factor, kind, ranks, reason = every.factors[mine].T
        # The first column stands for "no event yet".
        logarithms = np.zeros((3, factor.size + 1))
        columns = np.arange(factor.size) + 1
        logarithms[kind.astype(int), columns] = np.log(factor)
        self._events = every.events[mine]
        self._sums = np.cumsum(logarithms, axis=1)
        self._last_average = _last(ranks > 0)
        by_value = reason == BY_VALUE
        self._last_by_value = _last(by_value)
        self._last_unknown = _last((reason > 0) & ~by_value)
        # The last place of these is that of "none", -1.
        self._ranks = np.append(ranks, 1.0)
        self._reason = np.append(reason, 0).astype(int)

    def between(self, start: ndarray, stop: ndarray) -> Product:
        """Return what happened after `start`, up to and with `stop` (arrays of events)."""
        before = np.searchsorted(self._events, start, side="right")
        after = np.searchsorted(self._events, stop, side="right")
        average = self._last_average[after]
        unknown = self._last_unknown[after]
        by_value = self._last_by_value[after]
        sums = self._sums[:, after]
        sums = sums - self._sums[:, before]
        by_hand, clipped, unscaled = np.exp(sums)
        share_of_rank = 1 / self._ranks[average]
        reason = np.select(
            [unknown >= before, by_value >= before],
            [self._reason[unknown], BY_VALUE],
        )
        return Product(
            by_hand,
            clipped,
            unscaled,
            averaged=np.where(average >= before, share_of_rank, 1.0),
            reason=reason,
        )


def _last(marked: ndarray) -> ndarray:
    """Return, for the first 0, 1, … places, which of them is the last that is marked; -1 for none."""
    places = np.arange(marked.size)
    places = np.where(marked, places, -1)
    last = np.maximum.accumulate(np.append(-1, places))
    return last.astype(np.int64)


# --- what became of each contribution -------------------------------------------------------------


class History(NamedTuple):
    """Parameters of which `.grad` went through the same events; `number` counts such histories.

    `born` are the events that contributed to it, `end` those that erased each contribution (the number of events:
    none did); `ends` all events that erased something, `factors` what scaled it. Of unsharded gradients `shard` is
    the parameter that they are scattered to: no step reads them before.
    """

    number: int
    parameters: ndarray
    optimizers: tuple[int, ...]
    shard: int | None
    born: ndarray
    end: ndarray
    ends: ndarray
    factors: Factors

    @property
    def readers(self) -> tuple[int, ...]:
        """The optimizers whose steps read it."""
        return () if self.shard is not None else self.optimizers


class Passage(NamedTuple):
    """Contributions of backwards to the `.grad` of one history, on their way to the steps that read them.

    Steps read them in the `.grad` of the history `read`: the same, or that of the shard to which they are scattered.
    `entered` is the event at which each came there, `end` the one that erased it there, `consumed` the first step
    that used it (-1: none), `steps` how many did. `ranks` is over how many ranks it was averaged on the way to the
    shard (NaN: not known).
    """

    history: History
    read: History
    backward: ndarray
    entered: ndarray
    end: ndarray
    ranks: ndarray
    consumed: ndarray
    steps: ndarray

    @property
    def is_scattered(self) -> bool:
        """Whether steps read the contributions in another `.grad` than backwards add them to."""
        return self.read is not self.history

    def until(self, which: ndarray, stop: ndarray) -> Product:
        """Return what happened to the contributions at these places until events, each until its own."""
        entered = self.entered[which]
        product = self.read.factors.between(entered, stop)
        ranks = self.ranks[which]
        is_first_reason = np.isnan(ranks) & (product.reason == 0)
        return product._replace(
            averaged=np.fmin(product.averaged, 1 / ranks),
            reason=np.where(is_first_reason, REDUCED, product.reason),
        )


class Flow:
    """The coefficients with which contributions are in `.grad`, by parameters of equal history."""

    def __init__(self, ledger: Arrays) -> None:
        self.ledger = ledger
        self.events = ledger.events
        self.scaling = scaling(ledger)
        self._backward = self.events.where("kind", "backward")
        self._scatters = np.append(scatters(self.events), False)
        around = _steps_around(self.events)
        # A closure's backward is used by the step around it, even when the closure zeroes again.
        self.in_closure = self._backward & (around >= 0)
        self._last_reader = _last_readers(self.events, around, self.in_closure)
        self.histories = list(self._histories())
        self.of: dict[int, History] = {}
        for history in self.histories:
            self.of |= dict.fromkeys(history.parameters.tolist(), history)
        numbers = [self.of[p].number for p in range(len(ledger.parameters))]
        self.history_of = np.array(numbers, int)

    def _histories(self) -> Iterator[History]:
        """Yield the parameters to which the same happened at the same events, each group with what happened."""
        parameters = self.ledger.parameters
        columns = {parameter.name: p for p, parameter in enumerate(parameters)}
        contributed = self.ledger.state & CONTRIBUTED > 0
        gone = _gone(self.ledger)
        marks = np.concatenate([contributed, gone, self.scaling.changed])
        of_parameters = np.ascontiguousarray(marks.T)
        alike: dict[tuple[Any, ...], list[int]] = {}
        for p, parameter in enumerate(parameters):
            shard = columns.get(parameter.unsharded_of)
            key = parameter.optimizers, shard, of_parameters[p].tobytes()
            alike.setdefault(key, []).append(p)
        for number, (key, members) in enumerate(alike.items()):
            optimizers, shard, _ = key
            first = members[0]
            born = np.flatnonzero(contributed[:, first])
            ends = np.flatnonzero(gone[:, first])
            ends = np.append(ends, len(self.events))
            yield History(
                number,
                np.array(members),
                optimizers,
                shard,
                born,
                _next(ends, born),
                ends,
                Factors(self.scaling, first),
            )

    def reads(
        self,
        steps: ndarray,
        entered: ndarray,
        end: ndarray,
    ) -> tuple[ndarray, ndarray]:
        """Return which steps read contributions that entered `.grad` and left it there: `steps[first:until]` each."""
        last = self._last_reader[end]
        first = np.searchsorted(steps, entered, side="right")
        until = np.searchsorted(steps, last, side="right")
        # The step around a closure has used what its backward brought.
        at_least = first + self.in_closure[entered]
        at_least = np.minimum(at_least, steps.size)
        return first, np.maximum(until, at_least)

    def _consumed(
        self,
        optimizers: Sequence[int],
        entered: ndarray,
        end: ndarray,
    ) -> tuple[ndarray, ndarray]:
        """Return the first step that used each contribution (-1: none), and how many did."""
        steps = steps_of(self.events, optimizers)
        first, until = self.reads(steps, entered, end)
        many = np.maximum(until - first, 0)
        following = np.append(steps, -1)[first]
        return np.where(many > 0, following, -1), many

    @cached_property
    def passages(self) -> list[Passage]:
        """How the contributions of backwards to each history came to the steps that read them."""
        passages: list[Passage] = []
        for history in self.histories:
            mine = self._backward[history.born]
            born = history.born[mine]
            end = history.end[mine]
            if history.shard is None:
                passages.append(self._passage(history, history, born, born, end))
            else:
                shard = self.of[history.shard]
                passages += self._scattered(history, shard, born, end)
        return [passage for passage in passages if passage.backward.size]

    def _scattered(
        self,
        history: History,
        shard: History,
        born: ndarray,
        end: ndarray,
    ) -> list[Passage]:
        """Return the passage of what is scattered to a shard, and of what is erased before, which no step reads."""
        taken = self._scatters[end]
        lost = born[~taken & (end < len(self.events))]
        born = born[taken]
        scattered = end[taken]
        entered = self._arrival(shard, scattered)
        leaves = _next(shard.ends, entered)
        ranks = self._ranks(history, born, scattered)
        return [
            self._passage(history, shard, born, entered, leaves, ranks),
            self._passage(history, history, lost, lost, lost),
        ]

    def _arrival(self, shard: History, scattered: ndarray) -> ndarray:
        """Return where what was scattered is in its shard: it waits beside it for an average over groups of ranks."""
        state = self.ledger.state[:, shard.parameters[0]]
        present = np.flatnonzero(state & PRESENT)
        places = np.searchsorted(present, scattered)
        arrived = np.append(present, -1)[places]
        return np.where(arrived < 0, scattered, arrived)

    def _passage(
        self,
        history: History,
        read: History,
        backward: ndarray,
        entered: ndarray,
        end: ndarray,
        ranks: ndarray | None = None,
    ) -> Passage:
        """Return the passage of contributions to one history to where they are read."""
        if ranks is None:
            ranks = np.ones(backward.size)
        consumed, steps = self._consumed(read.readers, entered, end)
        return Passage(history, read, backward, entered, end, ranks, consumed, steps)

    def _ranks(
        self,
        history: History,
        born: ndarray,
        scattered: ndarray,
    ) -> ndarray:
        """Return over how many ranks contributions were averaged when they were scattered; NaN where unknown."""
        ranks = self.events.detail("ranks", math.nan)[scattered]
        reduced_otherwise = self.events.has("reduction")[scattered]
        product = history.factors.between(born, scattered)
        # Rarely changed before it is scattered, and then not followed.
        unchanged = product.coefficient == 1
        averaged = (ranks >= 1) & ~reduced_otherwise
        return np.where(averaged & unchanged, ranks, np.nan)

    def coefficients(
        self,
        parameter: int,
        born: ndarray,
        event: int,
    ) -> ndarray:
        """Return with which coefficient contributions are in `.grad` after an event; NaN where that is unknown."""
        stop = np.full(born.shape, event)
        product = self.of[parameter].factors.between(born, stop)
        return product.coefficient

    def live(self, event: int, parameter: int) -> ndarray:
        """Return the events whose contributions are in a parameter's `.grad` after an event."""
        history = self.of[parameter]
        was_born = history.born <= event
        live = was_born & (history.end > event)
        born: ndarray = history.born[live]
        return born

    @cached_property
    def outcomes(self) -> Outcomes:
        """See `Ledger.outcomes`."""
        return Outcomes(*(each[:, self.history_of] for each in self.fates))

    @cached_property
    def fates(self) -> Outcomes:
        """What became of each contribution, as `Outcomes` has it, but in arrays of events × histories."""
        shape = len(self.events), len(self.histories)
        erased = np.full(shape, -1, np.int32)
        consumed = np.full(shape, -1, np.int32)
        steps = np.zeros(shape, np.int32)
        for history in self.histories:
            cells = history.born, history.number
            first, many = self._consumed(history.readers, history.born, history.end)
            erased[cells] = self._event(history.end)
            consumed[cells] = first
            steps[cells] = many
        for passage in self.passages:
            if passage.is_scattered:
                cells = passage.backward, passage.history.number
                consumed[cells] = passage.consumed
                steps[cells] = passage.steps
        return Outcomes(erased, consumed, steps)

    def _event(self, end: ndarray) -> ndarray:
        """Return the events that erased something, -1 where none did."""
        return np.where(end < len(self.events), end, -1)

    @cached_property
    def erased_for_good(self) -> ndarray:
        """As in `fates`; but what was scattered ends where its shard's contribution does."""
        erased = self.fates.erased.copy()
        for passage in self.passages:
            if passage.is_scattered:
                cells = passage.backward, passage.history.number
                erased[cells] = self._event(passage.end)
        return erased

    def windows(self) -> list[Window]:
        """See `Ledger.windows`."""
        events = self.events
        taken = events.where("kind", "step") & ~events.skipped
        stepped = events.detail("optimizer_index", 0)[taken]
        windows: list[Window] = []
        for optimizer in np.unique(stepped).tolist():
            windows += self._windows_of(optimizer)
        return sorted(windows)

    def _consumed_until(self, optimizer: int) -> ndarray:
        """Return, per event, before which event the optimizer's steps consume some of what it added; -1: never."""
        until = np.full(len(self.events), -1)
        for passage in self.passages:
            if optimizer in passage.history.optimizers:
                # A step may consume what its own closure erased before it.
                last = np.maximum(passage.end, passage.consumed + 1)
                np.maximum.at(until, passage.backward, last)
        return until

    def _windows_of(self, optimizer: int) -> Iterator[Window]:
        until = self._consumed_until(optimizer)
        born = np.flatnonzero(until >= 0)
        until = until[born]
        in_order = (np.diff(until) >= 0).all()
        names = self.events.detail("optimizer", "")
        for step in steps_of(self.events, [optimizer]).tolist():
            stop = np.searchsorted(born, step)
            if in_order:  # a slice, which takes no memory
                start = np.searchsorted(until, step, side="right")
                read = born[start:stop]
            else:
                read = born[:stop][until[:stop] > step]
            yield Window(step, str(names[step]), Backwards(read))

    def used_from_before(self) -> bool:
        """Return whether a step used what `.grad` held before the first event, which did not replace it."""
        held = _held_before(self.ledger)
        for p in np.flatnonzero(held).tolist():
            history = self.of[p]
            steps = steps_of(self.events, history.optimizers)
            if (steps <= history.ends[0]).any():
                return True
        return False


def _held_before(ledger: Arrays) -> ndarray:
    """Mark the parameters of which `.grad` held something before the first event that is in it after that, too."""
    if not len(ledger.events):
        return np.zeros(len(ledger.parameters), bool)
    state = ledger.state[0]
    grad = ledger.grad[0]
    added = ledger.contribution[0]
    with np.errstate(invalid="ignore"):
        differs = np.abs(grad - added) > SAME * grad
    differs &= grad < math.inf
    if ledger.meta.get("ranks", 1) != 1:  # an average is another sum, too
        differs[:] = False
    was_added = state & CONTRIBUTED > 0
    unchanged = state & CHANGED == 0
    was_left = (grad > 0) & unchanged
    held: ndarray = np.where(was_added, differs, was_left)
    return held


def _next(ends: ndarray, events: ndarray) -> ndarray:
    """Return the first of some ends after each event; the last of them for all later ones."""
    places = np.searchsorted(ends[:-1], events, side="right")
    following: ndarray = ends[places]
    return following


def _steps_around(events: Events) -> ndarray:
    """Return, for each event inside a step, the event of that step, which follows it; -1 for others."""
    around = np.full(len(events), -1)
    inside = events.where("within", "step")
    steps = events.where("kind", "step")
    ranks = events.column("rank")
    for rank in np.unique(ranks[inside]).tolist():
        mine = ranks == rank
        at = np.flatnonzero(inside & mine)
        of_rank = np.flatnonzero(steps & mine)
        places = np.searchsorted(of_rank, at)
        around[at] = np.append(of_rank, -1)[places]
    return around


def _last_readers(events: Events, around: ndarray, in_closure: ndarray) -> ndarray:
    """Return, for each event that erases (and for "none"), the last event that may have read what it erased.

    A step may zero what it has read; but where a closure ran inside it, the closure may have zeroed before.
    """
    last = np.arange(len(events) + 1)
    zeros = events.where("kind", "zero_grad", "edit")
    with_closure = np.isin(around, around[in_closure])
    in_step = (around >= 0) & ~with_closure
    places = np.flatnonzero(zeros & in_step)
    last[places] = around[places]
    return last


def _gone(ledger: Arrays) -> ndarray:
    """Mark where each `.grad` was removed or zeroed: events × parameters."""
    events = ledger.events
    # A shard is away while FSDP averages it over groups of ranks; only a reduce-scatter takes a gradient for good.
    away = events.where("kind", "sync") & ~scatters(events)
    absent = ledger.state & PRESENT == 0
    gone: ndarray = absent & ~away[:, None]
    zeros = events.where("kind", "zero_grad", "edit", "step")
    at = np.flatnonzero(zeros)
    before = np.maximum(at - 1, 0)
    # A sum that was 0 already, and that nothing touched, is no erasure: another optimizer's gradients were zeroed.
    changed = ledger.state[at] & CHANGED > 0
    was_something = ledger.grad[before] != 0
    is_zero = ledger.grad[at] == 0
    zeroed = events.where("kind", "zero_grad", "step")[at]
    gone[at] |= is_zero & (changed & zeroed[:, None] | was_something)
    return gone


def scatters(events: Events) -> ndarray:
    """Mark the collectives that take gradients elsewhere, and leave none."""
    operation = events.detail("op", None)
    stays = np.isin(operation, ("all-reduce", "all-gather", "broadcast"))
    takes: ndarray = events.where("kind", "sync") & ~stays
    return takes


def steps_of(
    events: Events, optimizers: Sequence[int], *, skipped: bool = False
) -> ndarray:
    """Return the steps of these optimizers that changed weights, or those that were skipped, as indices of events."""
    steps = events.where("kind", "step") & (events.skipped == skipped)
    mine = np.isin(events.detail("optimizer_index", 0), optimizers)
    return np.flatnonzero(steps & mine)


def number(value: Any) -> float:
    """Return a number of an event's details, NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
