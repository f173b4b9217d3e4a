"""The flow of gradients: the coefficient with which each contribution is in `.grad` after each later event.

A `backward` adds to `.grad`. Later events scale what is there (`clip`, `unscale`, `sync`, an `edit` by one factor),
read it (`step`) or remove it (`zero_grad`). What is live, consumed or erased, the windows, the shares and the parts of
a drawn bar are all read from here. A factor that cannot be read is unknown, with its reason. Pure: stdlib and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

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
    "gradients were reduced by hand; whether to a sum or a mean was not recorded",
    "a comm hook reduced gradients; whether to a sum or a mean could not be read",
    "it weighs differently in different parameters",
)
BY_HAND, BY_VALUE, NOT_RECORDED, REDUCED, BY_COMM_HOOK, DIFFERENT = range(
    1, len(UNREAD)
)


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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The indices as numpy takes them."""
        return self._events.astype(dtype or np.int64)

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self._events[index].tolist())
        return int(self._events[index])

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


class _Factor(NamedTuple):
    """What one event did to `.grad`."""

    factor: float
    kind: int = 0
    ranks: float = 0.0
    reason: int = 0


def scaling(ledger: Arrays) -> Scaling:
    """Return the events of a ledger that scale `.grad`, each with its factor."""
    events = ledger.columns
    # A fused optimizer unscales what it reads, and leaves it unscaled.
    fused = events.where("kind", "step") & (events.detail("amp_scale", 0.0) > 0)
    scales = events.where("kind", "clip", "unscale", "edit") | (fused & ~events.skipped)
    scales |= events.where("kind", "sync") & ~scatters(events)
    at = np.flatnonzero(scales)
    at = at[(ledger.state[at] & CHANGED).any(axis=1)]
    changed = (ledger.state[at] & CHANGED).astype(bool)
    # What a by-hand all-reduce has just summed, over how many ranks.
    summed = np.ones(len(ledger.parameters))
    rows = []
    for row, e in enumerate(at.tolist()):
        look = _Look.at(ledger, e, changed[row])
        factor = _READ[look.kind](look, summed)
        if factor.reason:
            changed[row] &= ~look.zero  # a zero is a zero under any factor
        if factor.reason == BY_VALUE:
            changed[row] &= look.ratio != 1
        elif look.kind == "edit":
            changed[row] &= look.left
        summed[changed[row]] = 1
        if factor.ranks and look.kind == "sync":
            summed[changed[row]] = factor.factor
        rows.append(factor)
    table = np.array(rows, float).reshape(-1, 4)
    return Scaling(
        at,
        kind=table[:, 1].astype(int),
        factor=table[:, 0],
        ranks=table[:, 2],
        reason=table[:, 3].astype(int),
        changed=changed,
    )


class _Look(NamedTuple):
    """What is known of one event that changed `.grad`.

    `ratio` is the norm after it by the norm before, NaN where that says nothing; `zero` where both are 0, `left`
    where it is not 0 or None now.
    """

    ledger: Arrays
    event: int
    kind: str
    details: Mapping[str, Any]
    changed: np.ndarray
    ratio: np.ndarray
    zero: np.ndarray
    left: np.ndarray
    rough: float

    @classmethod
    def at(cls, ledger: Arrays, event: int, changed: np.ndarray) -> _Look:
        events, after = ledger.columns, ledger.grad[event].astype(float)
        before = ledger.grad[event - 1] if event else np.full(after.shape, np.nan)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            ratio = np.where(changed, after / before, np.nan)
        ratio[~(np.isfinite(ratio) & (ratio > 0))] = np.nan
        half = any(
            ledger.parameters[p].dtype in ("float16", "bfloat16")
            for p in np.flatnonzero(changed)
        )
        return cls(
            ledger,
            event,
            events.tables["kind"][events.column("kind")[event]],
            events.details[events.column("details")[event]],
            changed,
            ratio,
            zero=changed & (before == 0) & (after == 0),
            left=(after != 0) & (ledger.state[event] & PRESENT > 0),
            rough=SAME_IN_HALF if half else SAME,
        )

    @property
    def within_backward(self) -> bool:
        return bool(self.ledger.columns.where("within", "backward")[self.event])

    def one_ratio(self) -> float:
        """Return the ratio that all changed parameters have, NaN where they differ or none is known."""
        known = self.ratio[~np.isnan(self.ratio)]
        if not known.size:
            return math.nan
        middle = float(known.mean())
        return middle if np.ptp(known) <= self.rough * middle else math.nan

    def read(self, expected: float, kind: int) -> _Factor:
        """Return the factor that an event's details name, or else the one that the norms show."""
        ratio = self.one_ratio()
        if expected > 0 and math.isfinite(expected):
            return _Factor(expected, kind)
        if not math.isnan(ratio):
            return _Factor(ratio, kind)
        differ = not np.isnan(self.ratio).all()
        return _Factor(1, kind, reason=DIFFERENT if differ else NOT_RECORDED)


def _read_unscale(look: _Look, summed: np.ndarray) -> _Factor:
    scale = number(look.details.get("amp_scale"))
    return look.read(1 / scale if scale > 0 else math.nan, 2)


def _read_clip(look: _Look, summed: np.ndarray) -> _Factor:
    if look.details.get("by") == "value":
        return _Factor(1, 1, reason=BY_VALUE)
    norm, most = (number(look.details.get(n)) for n in ("total_norm", "max_norm"))
    if not (norm >= 0 and math.isfinite(norm + most)):
        return look.read(math.nan, 1)
    factor = min(1.0, most / (norm + 1e-6))
    ratio = look.one_ratio()
    agrees = abs(factor - ratio) <= SAME_IN_HALF * ratio
    return look.read(factor if agrees or np.isnan(look.ratio).all() else math.nan, 1)


def _read_sync(look: _Look, summed: np.ndarray) -> _Factor:
    ranks = number(look.details.get("ranks"))
    library = "avg" if look.within_backward else ""
    reduction = look.details.get("reduction", library)
    if "by_comm_hook" in look.details:
        return _Factor(1, reason=BY_COMM_HOOK)
    if reduction not in ("sum", "avg") or not 1 <= ranks < math.inf:
        return _Factor(1, reason=REDUCED)
    # A sum is so many times the mean.
    return _Factor(ranks if reduction == "sum" else 1.0, ranks=ranks)


def _read_edit(look: _Look, summed: np.ndarray) -> _Factor:
    """Read a change by hand: one factor for all, or the division that makes a mean of a sum over ranks."""
    changed = look.changed & look.left & ~look.zero
    ratio = look.ratio[changed]
    mean = np.abs(ratio * summed[changed] - 1) <= look.rough
    if mean.all() and (summed[changed] > 1).all() and ratio.size:
        return _Factor(float(ratio.mean()))
    factor = look.one_ratio()
    if not math.isnan(factor) and _is_factor(look, changed, factor):
        return _Factor(factor)
    return _Factor(1, reason=BY_HAND)


def _is_factor(look: _Look, changed: np.ndarray, factor: float) -> bool:
    """Whether a change by hand multiplied every element by this.

    Where elements are kept, they say it; where only norms are, those of several parameters have to agree.
    """
    columns = np.flatnonzero(changed).tolist()
    exact = [p for p in columns if p in look.ledger.exact]
    for p in exact:
        before, after = look.ledger.exact[p][1][[look.event - 1, look.event]]
        with np.errstate(invalid="ignore", over="ignore"):
            away = np.abs(after - before * factor)
            # An element may be lost to rounding where others are large: the whole is compared.
            size = np.abs(before * factor).max(initial=0)
            if not (away <= look.rough * size).all():
                return False
    return bool(exact) or len(columns) > 1


_READ = {
    "unscale": _read_unscale,
    "step": _read_unscale,
    "clip": _read_clip,
    "sync": _read_sync,
    "edit": _read_edit,
}


class Change(NamedTuple):
    """What happened to contributions between two events: factors by hand, of clips and of the scaler; averages.

    `averaged` is one over the number of ranks; `reason` a place in `UNREAD`, and where it is not 0 the factors are not
    all that happened.
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
        found: np.ndarray = np.where(self.reason > 0, np.nan, product)
        return found


class Factors:
    """The factors by which one parameter's `.grad` was scaled, summed up as logarithms."""

    def __init__(self, every: Scaling, parameter: int) -> None:
        mine = np.flatnonzero(every.changed[:, parameter])
        self._events = every.events[mine]
        logs = np.log(np.where(every.reason[mine] > 0, 1.0, every.factor[mine]))
        self._logs = [
            np.append(0.0, np.cumsum(np.where(every.kind[mine] == kind, logs, 0.0)))
            for kind in range(3)
        ]
        self._last_average = _last(every.ranks[mine] > 0)
        self._last_unknown = _last(every.reason[mine] > 0)
        self._ranks = np.append(every.ranks[mine], 1.0)
        self._reason = np.append(every.reason[mine], 0)
        self._at = np.append(self._events, -1)  # -1 is also the place of "none"

    def between(self, start: np.ndarray, stop: np.ndarray) -> Change:
        """Return what happened after `start`, up to and with `stop` (arrays of events)."""
        before = np.searchsorted(self._events, start, side="right")
        after = np.searchsorted(self._events, stop, side="right")
        average, unknown = self._last_average[after], self._last_unknown[after]
        by_hand, clipped, unscaled = (np.exp(s[after] - s[before]) for s in self._logs)
        return Change(
            by_hand,
            clipped,
            unscaled,
            np.where(average >= before, 1 / self._ranks[average], 1.0),
            np.where(unknown >= before, self._reason[unknown], 0),
            self._at[unknown],
        )


def _last(marked: np.ndarray) -> np.ndarray:
    """For 0, 1, … of these, the place of the last that is marked among so many; -1 for none."""
    places = np.where(marked, np.arange(marked.size), -1)
    return np.append(-1, np.maximum.accumulate(places)).astype(np.int64)


# --- what became of each contribution -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class History:
    """Parameters of which `.grad` went through the same events.

    `born` are the events that contributed to it, `end` those that erased each contribution (the number of events:
    none did); `gone` all events that erased something, `factors` what scaled it.
    """

    parameters: list[int]
    optimizers: tuple[int, ...]
    rank: int | None
    born: np.ndarray
    end: np.ndarray
    gone: np.ndarray
    factors: Factors


class Flow:
    """The coefficients with which contributions are in `.grad`, by parameters of equal history."""

    def __init__(self, ledger: Arrays) -> None:
        self.ledger, self.events = ledger, ledger.columns
        self.scaling = scaling(ledger)
        self.contributed = np.asfortranarray(ledger.state & CONTRIBUTED > 0)
        self.scatters = np.append(scatters(self.events), False)
        inside = self.events.where("within", "step")
        self.inside = self.events.where("kind", "backward") & inside
        zeros = self.events.where("kind", "zero_grad", "edit") & inside
        self._zeros_inside = np.append(zeros, False)
        self._orders: dict[int | None, tuple[np.ndarray, np.ndarray]] = {}
        self.histories = list(self._histories())
        self.of = {p: one for one in self.histories for p in one.parameters}
        self.shards = shards_of(ledger)

    def _histories(self) -> Iterator[History]:
        ledger, gone = self.ledger, np.asfortranarray(_gone(self.ledger))
        every = (self.contributed, gone, self.scaling.changed)
        packed = [np.packbits(array, axis=0) for array in every]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for p, parameter in enumerate(ledger.parameters):
            # No step reads an unsharded gradient before it is scattered.
            optimizers = () if parameter.unsharded_of else parameter.optimizers
            bits = (bits[:, p].tobytes() for bits in packed)
            alike.setdefault((optimizers, parameter.rank, *bits), []).append(p)
        for (optimizers, rank, *_), parameters in alike.items():
            first = parameters[0]
            born = np.flatnonzero(self.contributed[:, first])
            ends = np.append(np.flatnonzero(gone[:, first]), len(self.events))
            yield History(
                parameters,
                optimizers,
                rank,
                born,
                ends[np.searchsorted(ends[:-1], born, side="right")],
                ends,
                Factors(self.scaling, first),
            )

    def reads(
        self, steps: np.ndarray, history: History, entered: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which steps read contributions that entered `.grad` and left it there: `steps[first:until]` each.

        A step may zero what it has read. A closure's backward is used by the step around it, even when the closure
        zeroes again.
        """
        first = np.searchsorted(steps, entered, side="right")
        until = np.searchsorted(steps, end)
        next_step = np.append(steps, -1)[until]
        itself = next_step == end
        zeroed_inside = np.flatnonzero(self._zeros_inside[end] & (next_step >= 0))
        if zeroed_inside.size:
            itself[zeroed_inside] = ~self._closures(next_step[zeroed_inside], history)
        until += itself
        inside = self.inside[entered]
        closed = np.maximum(until, np.minimum(first + 1, steps.size))
        return first, np.where(inside, closed, until)

    def _closures(self, steps: np.ndarray, history: History) -> np.ndarray:
        """Whether a closure's backward ran inside each step: what zeroed there may be the closure."""
        if history.rank not in self._orders:
            ranks = self.events.column("rank")
            mine = ranks == (-1 if history.rank is None else history.rank)
            self._orders[history.rank] = (
                np.flatnonzero(self.events.where("kind", "step") & mine),
                np.flatnonzero(self.inside & mine),
            )
        every, closures = self._orders[history.rank]
        begins = np.append(every, -1)[np.searchsorted(every, steps) - 1]
        before, after = (
            np.searchsorted(closures, begins),
            np.searchsorted(closures, steps),
        )
        found: np.ndarray = before < after
        return found

    def coefficients(self, parameter: int, born: np.ndarray, event: int) -> np.ndarray:
        """Return with which coefficient contributions are in `.grad` after an event; NaN where that is unknown."""
        stop = np.full(born.shape, event)
        return self.of[parameter].factors.between(born, stop).coefficient

    def averages(self, parameter: int) -> np.ndarray:
        """Return the events that averaged a parameter's `.grad` over ranks."""
        found: np.ndarray = self.scaling.events[
            self.scaling.changed[:, parameter] & (self.scaling.ranks > 0)
        ]
        return found

    def live(self, event: int, parameter: int) -> np.ndarray:
        """Return the events whose contributions are in a parameter's `.grad` after an event."""
        history = self.of[parameter]
        found: np.ndarray = history.born[
            (history.born <= event) & (history.end > event)
        ]
        return found

    @cached_property
    def outcomes(self) -> Outcomes:
        """See `Ledger.outcomes`."""
        shape = self.ledger.state.shape
        erased, consumed = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        steps = np.zeros(shape, np.int32)
        for history in self.histories:
            mine = steps_of(self.ledger, history.optimizers)
            first, until = self.reads(mine, history, history.born, history.end)
            used = np.append(mine, -1)[np.minimum(first, mine.size)]
            erasing = np.where(history.end < len(self.events), history.end, -1)
            cells = np.ix_(history.born, np.array(history.parameters))
            erased[cells] = erasing[:, None]
            consumed[cells] = np.where(until > first, used, -1)[:, None]
            steps[cells] = np.maximum(until - first, 0)[:, None]
        for whole, shard in self.shards.items():
            born, sync = self.scattered(whole, shard)
            consumed[born, whole] = consumed[sync, shard]
            steps[born, whole] = steps[sync, shard]
        return Outcomes(erased, consumed, steps)

    def scattered(self, whole: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what reduce-scatters took from an unsharded gradient, and the events that brought it to the shard.

        Where groups of ranks are averaged later, the latter is a later scatter. What has not been brought is left out.
        """
        history = self.of[whole]
        taken = self.scatters[history.end]
        brings = np.flatnonzero(self.scatters[:-1] & self.contributed[:, shard])
        at = np.searchsorted(brings, history.end[taken])
        here = at < brings.size
        return history.born[taken][here], brings[at[here]]

    @cached_property
    def erased_for_good(self) -> np.ndarray:
        """As `Outcomes.erased`; but what was scattered ends where its shard's contribution does."""
        erased = self.outcomes.erased
        if not self.shards:
            return erased
        found = np.where(self.scatters[erased], -1, erased)
        for whole, shard in self.shards.items():
            born, sync = self.scattered(whole, shard)
            found[born, whole] = erased[sync, shard]
        return found

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
        found = []
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
                found.append(Window(step, str(names[step]), Backwards(read)))
        return sorted(found, key=lambda window: window.step)

    def _until(self, optimizer: int) -> np.ndarray:
        """Per event, before which event an optimizer's steps consume something of what it contributed; -1: never."""
        parameters = self.ledger.parameters
        mine = [p for p, one in enumerate(parameters) if optimizer in one.optimizers]
        erased = self.erased_for_good[:, mine]
        last = np.where(erased < 0, len(self.events), erased)
        # A step may consume what its own closure erased before it.
        last = np.maximum(last, self.outcomes.consumed[:, mine] + 1)
        here = self.contributed[:, mine].copy()
        for column, p in enumerate(mine):
            if (
                p in self.shards
            ):  # of an unsharded gradient a step consumes what was scattered
                here[:, column] = False
                here[self.scattered(p, self.shards[p])[0], column] = True
        until: np.ndarray = np.where(here, last, -1).max(axis=1, initial=-1)
        until[self.events.where("kind", "sync")] = -1
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

        That it held anything is seen where it is first read: after a contribution there is another sum, or without one
        there is something. An average over ranks is another sum, too, and an edit may have replaced what was there.
        """
        found = []
        for p in np.flatnonzero(self.ledger.state[:1].any(axis=0)).tolist():
            history, grad = self.of[p], self.ledger.grad[:, p]
            steps = steps_of(self.ledger, history.optimizers)
            gone = np.append(np.flatnonzero(grad == 0), history.gone)
            end = np.array([gone.min()])
            _, until = self.reads(steps, history, np.zeros(1, int), end)
            read = np.flatnonzero(~np.isnan(grad[: int(end[0])]))[:1].tolist()
            if until[0] and read and self._held_before(p, read[0], int(steps[0])):
                found.append(int(steps[0]))
        return min(found, default=-1)

    def _held_before(self, p: int, event: int, step: int) -> bool:
        ledger, kinds = self.ledger, self.events.texts("kind")
        state = ledger.state[:, p]
        edited = (state[:step] & CHANGED > 0) & self.events.where("kind", "edit")[:step]
        if edited.any() or (state[:event] & CONTRIBUTED).any():
            return False
        if not state[event] & CONTRIBUTED:
            changed = bool(state[event] & CHANGED)
            return kinds[event] not in ("backward", "sync") or not changed
        grad, added = float(ledger.grad[event, p]), float(ledger.contribution[event, p])
        alone = ledger.meta.get("ranks", 1) == 1
        return alone and math.isfinite(grad) and abs(grad - added) > SAME * abs(grad)


def _gone(ledger: Arrays) -> np.ndarray:
    """Mark where each `.grad` was removed or zeroed: events × parameters."""
    events = ledger.columns
    # A shard is away while FSDP averages it over groups of ranks; only a reduce-scatter takes a gradient for good.
    away = events.where("kind", "sync") & ~scatters(events)
    gone: np.ndarray = (ledger.state & PRESENT == 0) & ~away[:, None]
    at = np.flatnonzero(events.where("kind", "zero_grad", "edit", "step"))
    # A sum that was 0 already, and that nothing touched, is no erasure: another optimizer's gradients were zeroed.
    touched = (ledger.state[at] & CHANGED > 0) | (
        ledger.grad[np.maximum(at - 1, 0)] != 0
    )
    gone[at] |= (ledger.grad[at] == 0) & touched
    return gone


def scatters(events: Events) -> np.ndarray:
    """Mark the collectives that take gradients elsewhere, and leave none."""
    stays = np.isin(
        events.detail("op", None), ("all-reduce", "all-gather", "broadcast")
    )
    found: np.ndarray = events.where("kind", "sync") & ~stays
    return found


def shards_of(ledger: Arrays) -> dict[int, int]:
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
