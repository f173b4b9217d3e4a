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
    "ranks reduced gradients in a way of yours or between groups; whether to a sum or a mean is not known",
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

    factor: float = 1.0
    kind: int = _HAND
    ranks: float = 0.0
    reason: int = 0


class _Change:
    """An event that changed some parameters' `.grad`: its details, and the norms around it.

    `ratio` is the norm after it by the norm before, for each parameter; NaN where it did not change, or where that says
    nothing. `remains` are the changed parameters of which something is left.
    """

    def __init__(self, ledger: Arrays, event: int, changed: np.ndarray) -> None:
        events = ledger.columns
        kind = events.column("kind")[event]
        details = events.column("details")[event]
        self.ledger = ledger
        self.event = event
        self.kind = events.tables["kind"][kind]
        self.details = events.details[details]
        self.changed = changed
        after = ledger.grad[event].astype(float)
        before = np.full(after.shape, np.nan)
        if event:
            before = ledger.grad[event - 1].astype(float)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            ratio = after / before
        meaningful = changed & np.isfinite(ratio)
        meaningful &= ratio > 0
        self.ratio = np.where(meaningful, ratio, np.nan)
        present = ledger.state[event] & PRESENT
        self.remains = changed & (after != 0)
        self.remains &= present > 0
        self.tolerance = SAME
        for p in np.flatnonzero(changed).tolist():
            if ledger.parameters[p].dtype in ("float16", "bfloat16"):
                self.tolerance = SAME_IN_HALF

    def number(self, name: str) -> float:
        """Return a number of the event's details, NaN where it is none."""
        return number(self.details.get(name))

    def one_ratio(self) -> float:
        """Return the ratio that all changed parameters have; NaN where they differ or none is known."""
        ratios = self.ratio[~np.isnan(self.ratio)]
        if not ratios.size:
            return math.nan
        mean = float(ratios.mean())
        is_one = np.ptp(ratios) <= self.tolerance * mean
        return mean if is_one else math.nan

    def multiplies(self, factor: float) -> bool:
        """Return whether every element was multiplied by this factor.

        Kept elements show it. Where only norms are kept, those of several parameters have to agree.
        """
        remaining = np.flatnonzero(self.remains).tolist()
        kept = [p for p in remaining if p in self.ledger.exact]
        if not kept:
            return len(remaining) > 1
        return all(self._multiplies_elements(p, factor) for p in kept)

    def _multiplies_elements(self, parameter: int, factor: float) -> bool:
        _, grad = self.ledger.exact[parameter]
        expected = grad[self.event - 1] * factor
        # Small elements may be lost to rounding beside large ones.
        largest = np.abs(expected).max(initial=0)
        with np.errstate(invalid="ignore"):
            apart = np.abs(grad[self.event] - expected)
        agrees = apart <= self.tolerance * largest
        return bool(agrees.all())


def scaling(ledger: Arrays) -> Scaling:
    """Return the events of a ledger that scale `.grad`, each with its factor."""
    changed = ledger.state & CHANGED > 0
    scales = _scales(ledger.columns)
    at = np.flatnonzero(scales & changed.any(axis=1))
    changed = changed[at]
    factors = []
    for row, event in enumerate(at.tolist()):
        change = _Change(ledger, event, changed[row])
        factor = _factor(change)
        factors.append(factor)
        if factor.reason == BY_VALUE:
            changed[row] &= change.ratio != 1
        elif change.kind == "edit":
            changed[row] = change.remains
    rows = np.array(factors, float)
    rows = rows.reshape(-1, len(_Factor._fields))
    factor_of, kind, ranks, reason = rows.T
    return Scaling(
        at,
        kind.astype(int),
        factor_of,
        ranks,
        reason.astype(int),
        changed,
    )


def _scales(events: Events) -> np.ndarray:
    """Mark the events that may scale what is in `.grad`."""
    # A fused optimizer unscales what it reads, and leaves it unscaled.
    unscales = events.detail("amp_scale", 0.0) > 0
    taken = events.where("kind", "step") & ~events.skipped
    fused = taken & unscales
    synced = events.where("kind", "sync") & ~scatters(events)
    changes = events.where("kind", "clip", "unscale", "edit")
    scales: np.ndarray = changes | fused | synced
    return scales


def _factor(change: _Change) -> _Factor:
    if change.kind == "sync":
        return _of_sync(change)
    if change.kind == "clip":
        return _of_clip(change)
    if change.kind == "edit":
        return _of_edit(change)
    scale = change.number("amp_scale") or math.nan
    return _read(1 / scale, change.one_ratio(), _SCALER)


def _of_edit(change: _Change) -> _Factor:
    ratio = change.one_ratio()
    if math.isnan(ratio) or not change.multiplies(ratio):
        return _Factor(reason=BY_HAND)
    return _Factor(ratio)


def _of_sync(change: _Change) -> _Factor:
    within_backward = change.ledger.columns.where("within", "backward")
    averages = "reduction" not in change.details
    averages &= within_backward[change.event]
    ranks = change.number("ranks")
    if averages and 1 <= ranks < math.inf:
        return _Factor(ranks=ranks)
    return _Factor(reason=REDUCED)


def _of_clip(change: _Change) -> _Factor:
    if change.details.get("by") == "value":
        return _Factor(kind=_CLIP, reason=BY_VALUE)
    norm = change.number("total_norm")
    limit = change.number("max_norm")
    expected = math.nan
    if norm >= 0:
        expected = min(1.0, limit / (norm + 1e-6))
    ratio = change.one_ratio()
    agrees = abs(expected - ratio) <= SAME_IN_HALF * ratio
    says_nothing = np.isnan(change.ratio).all()
    if not agrees and not says_nothing:
        expected = math.nan
    return _read(expected, ratio, _CLIP)


def _read(expected: float, ratio: float, kind: int) -> _Factor:
    """Return the factor that is expected, or else the one that the norms show."""
    if expected > 0 and math.isfinite(expected):
        return _Factor(expected, kind)
    if not math.isnan(ratio):
        return _Factor(ratio, kind)
    return _Factor(kind=kind, reason=NOT_RECORDED)


class Product(NamedTuple):
    """What scaled contributions between two events: factors by hand, of clips and of the scaler; averages.

    `averaged` is one over the number of ranks; `reason` is a place in `UNREAD`, and where it is not 0 the factors are
    not all that happened.
    """

    by_hand: np.ndarray
    clipped: np.ndarray
    unscaled: np.ndarray
    averaged: np.ndarray
    reason: np.ndarray

    @property
    def coefficient(self) -> np.ndarray:
        """All of them together, NaN where that is unknown."""
        with np.errstate(over="ignore", invalid="ignore"):
            product = self.by_hand * self.clipped
            product = product * self.unscaled * self.averaged
        unknown = self.reason > 0
        coefficient: np.ndarray = np.where(unknown, np.nan, product)
        return coefficient


class Factors:
    """The factors by which one parameter's `.grad` was scaled, summed up as logarithms."""

    def __init__(self, every: Scaling, parameter: int) -> None:
        mine = np.flatnonzero(every.changed[:, parameter])
        kind = every.kind[mine]
        ranks = every.ranks[mine]
        reason = every.reason[mine]
        factor = every.factor[mine]
        factor = np.where(reason > 0, 1.0, factor)
        # The first column stands for "no event yet".
        logarithms = np.zeros((3, mine.size + 1))
        column = np.arange(mine.size) + 1
        logarithms[kind, column] = np.log(factor)
        self._events = every.events[mine]
        self._sums = np.cumsum(logarithms, axis=1)
        self._last_average = _last(ranks > 0)
        self._last_unknown = _last(reason > 0)
        # The last place of these is that of "none", -1.
        self._ranks = np.append(ranks, 1.0)
        self._reason = np.append(reason, 0)

    def between(self, start: np.ndarray, stop: np.ndarray) -> Product:
        """Return what happened after `start`, up to and with `stop` (arrays of events)."""
        before = np.searchsorted(self._events, start, side="right")
        after = np.searchsorted(self._events, stop, side="right")
        average = self._last_average[after]
        unknown = self._last_unknown[after]
        sums = self._sums[:, after] - self._sums[:, before]
        by_hand, clipped, unscaled = np.exp(sums)
        share_of_rank = 1 / self._ranks[average]
        return Product(
            by_hand,
            clipped,
            unscaled,
            averaged=np.where(average >= before, share_of_rank, 1.0),
            reason=np.where(unknown >= before, self._reason[unknown], 0),
        )


def _last(marked: np.ndarray) -> np.ndarray:
    """Return, for the first 0, 1, … places, which of them is the last that is marked; -1 for none."""
    places = np.arange(marked.size)
    places = np.where(marked, places, -1)
    last = np.append(-1, np.maximum.accumulate(places))
    return last.astype(np.int64)


# --- what became of each contribution -------------------------------------------------------------


class History(NamedTuple):
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

    @property
    def readers(self) -> tuple[int, ...]:
        """The optimizers whose steps read it."""
        return () if self.shard is not None else self.optimizers


class _Alike(NamedTuple):
    """Parameters of the same optimizers and the same shard to which the same happened."""

    optimizers: tuple[int, ...]
    shard: int | None
    parameters: list[int]


class Passage(NamedTuple):
    """Contributions of backwards to the `.grad` of one history, on their way to the steps that read them.

    Steps read them in the `.grad` of the history `read`: the same, or that of the shard to which they are scattered.
    `entered` is the event at which each came there, `end` the one that erased it there, `consumed` the first step
    that used it (-1: none), `steps` how many did. `ranks` is over how many ranks it was averaged on the way to the
    shard (NaN: not known).
    """

    history: History
    read: History
    backward: np.ndarray
    entered: np.ndarray
    end: np.ndarray
    ranks: np.ndarray
    consumed: np.ndarray
    steps: np.ndarray

    @property
    def is_scattered(self) -> bool:
        """Whether steps read the contributions in another `.grad` than backwards add them to."""
        return self.read is not self.history

    @property
    def cells(self) -> tuple[np.ndarray, ...]:
        """Their places in arrays of events × parameters."""
        return np.ix_(self.backward, self.history.parameters)

    def until(self, which: np.ndarray, stop: np.ndarray) -> Product:
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
        self.events = ledger.columns
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

    def _histories(self) -> Iterator[History]:
        contributed = np.asfortranarray(self.ledger.state & CONTRIBUTED > 0)
        gone = np.asfortranarray(_gone(self.ledger))
        for alike in self._alike(contributed, gone, self.scaling.changed):
            first = alike.parameters[0]
            born = np.flatnonzero(contributed[:, first])
            ends = np.flatnonzero(gone[:, first])
            ends = np.append(ends, len(self.events))
            yield History(
                np.array(alike.parameters),
                alike.optimizers,
                alike.shard,
                born,
                _next(ends, born),
                ends,
                Factors(self.scaling, first),
            )

    def _alike(self, *happened: np.ndarray) -> list[_Alike]:
        """Put together the parameters to which the same happened at the same events."""
        parameters = self.ledger.parameters
        columns = {parameter.name: p for p, parameter in enumerate(parameters)}
        alike: dict[tuple[Any, ...], _Alike] = {}
        for p, parameter in enumerate(parameters):
            optimizers = parameter.optimizers
            shard = columns.get(parameter.unsharded_of)
            key: list[Any] = [optimizers, shard]
            for marks in happened:
                bits = np.packbits(marks[:, p])
                key.append(bits.tobytes())
            one = _Alike(optimizers, shard, [])
            one = alike.setdefault(tuple(key), one)
            one.parameters.append(p)
        return list(alike.values())

    def reads(
        self, steps: np.ndarray, entered: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which steps read contributions that entered `.grad` and left it there: `steps[first:until]` each."""
        last = self._last_reader[end]
        first = np.searchsorted(steps, entered, side="right")
        until = np.searchsorted(steps, last, side="right")
        # The step around a closure has used what its backward brought.
        at_least = first + self.in_closure[entered]
        at_least = np.minimum(at_least, steps.size)
        return first, np.maximum(until, at_least)

    def _consumed(
        self, optimizers: Sequence[int], entered: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first step that used each contribution (-1: none), and how many did."""
        steps = steps_of(self.ledger, optimizers)
        first, until = self.reads(steps, entered, end)
        many = np.maximum(until - first, 0)
        following = np.append(steps, -1)[first]
        return np.where(many > 0, following, -1), many

    @cached_property
    def passages(self) -> list[Passage]:
        """How the contributions of backwards to each history came to the steps that read them."""
        passages: list[Passage] = []
        for history in self.histories:
            if history.shard is None:
                mine = self._backward[history.born]
                born = history.born[mine]
                end = history.end[mine]
                passage = self._passage(history, history, born, born, end)
                passages.append(passage)
            else:
                shard = self.of[history.shard]
                passages += self._scattered(history, shard)
        return [passage for passage in passages if passage.backward.size]

    def _scattered(self, history: History, shard: History) -> list[Passage]:
        """Return the passage of what is scattered to a shard, and of what is erased before, which no step reads."""
        mine = self._backward[history.born]
        born = history.born[mine]
        end = history.end[mine]
        taken = self._scatters[end]
        erased = ~taken & (end < len(self.events))
        lost = born[erased]
        born = born[taken]
        scattered = end[taken]
        entered = self._arrival(shard, scattered)
        leaves = _next(shard.ends, entered)
        ranks = self._ranks(history, born, scattered)
        return [
            self._passage(history, shard, born, entered, leaves, ranks),
            self._passage(history, history, lost, lost, lost),
        ]

    def _arrival(self, shard: History, scattered: np.ndarray) -> np.ndarray:
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
        backward: np.ndarray,
        entered: np.ndarray,
        end: np.ndarray,
        ranks: np.ndarray | None = None,
    ) -> Passage:
        """Return the passage of contributions to one history to where they are read."""
        if ranks is None:
            ranks = np.ones(backward.size)
        consumed, steps = self._consumed(read.readers, entered, end)
        return Passage(history, read, backward, entered, end, ranks, consumed, steps)

    def _ranks(
        self, history: History, born: np.ndarray, scattered: np.ndarray
    ) -> np.ndarray:
        """Return over how many ranks contributions were averaged when they were scattered; NaN where unknown."""
        ranks = self.events.detail("ranks", math.nan)[scattered]
        reduced_otherwise = self.events.has("reduction")[scattered]
        product = history.factors.between(born, scattered)
        # Rarely changed before it is scattered, and then not followed.
        unchanged = product.coefficient == 1
        averaged = (ranks >= 1) & ~reduced_otherwise
        return np.where(averaged & unchanged, ranks, np.nan)

    def coefficients(self, parameter: int, born: np.ndarray, event: int) -> np.ndarray:
        """Return with which coefficient contributions are in `.grad` after an event; NaN where that is unknown."""
        stop = np.full(born.shape, event)
        product = self.of[parameter].factors.between(born, stop)
        return product.coefficient

    def live(self, event: int, parameter: int) -> np.ndarray:
        """Return the events whose contributions are in a parameter's `.grad` after an event."""
        history = self.of[parameter]
        was_born = history.born <= event
        live = was_born & (history.end > event)
        born: np.ndarray = history.born[live]
        return born

    @cached_property
    def outcomes(self) -> Outcomes:
        """See `Ledger.outcomes`."""
        shape = self.ledger.state.shape
        erased = np.full(shape, -1, np.int32)
        consumed = np.full(shape, -1, np.int32)
        steps = np.zeros(shape, np.int32)
        for history in self.histories:
            cells = np.ix_(history.born, history.parameters)
            end = history.end
            first, many = self._consumed(history.readers, history.born, end)
            erased[cells] = self._event(end)
            consumed[cells] = first[:, None]
            steps[cells] = many[:, None]
        for passage in self.passages:
            if passage.is_scattered:
                consumed[passage.cells] = passage.consumed[:, None]
                steps[passage.cells] = passage.steps[:, None]
        return Outcomes(erased, consumed, steps)

    def _event(self, end: np.ndarray) -> np.ndarray:
        """Return the events that erased something as a column, -1 where none did."""
        is_event = end < len(self.events)
        events = np.where(is_event, end, -1)
        return events[:, None]

    @cached_property
    def erased_for_good(self) -> np.ndarray:
        """As `Outcomes.erased`; but what was scattered ends where its shard's contribution does."""
        erased = self.outcomes.erased.copy()
        for passage in self.passages:
            if passage.is_scattered:
                erased[passage.cells] = self._event(passage.end)
        return erased

    def windows(self) -> list[Window]:
        """See `Ledger.windows`."""
        events = self.events
        taken = events.where("kind", "step") & ~events.skipped
        stepped = events.detail("optimizer_index", 0)[taken]
        windows: list[Window] = []
        for optimizer in np.unique(stepped).tolist():
            windows += self._windows_of(optimizer)
        return sorted(windows, key=lambda window: window.step)

    def _windows_of(self, optimizer: int) -> list[Window]:
        names = self.events.detail("optimizer", "")
        until = self._until(optimizer)
        born = np.flatnonzero(until >= 0)
        until = until[born]
        in_order = (np.diff(until) >= 0).all()
        steps = steps_of(self.ledger, (optimizer,))
        windows = []
        for step in steps.tolist():
            stop = np.searchsorted(born, step)
            if in_order:  # a slice, which takes no memory
                start = np.searchsorted(until, step, side="right")
                read = born[start:stop]
            else:
                before = born[:stop]
                read = before[until[:stop] > step]
            name = str(names[step])
            windows.append(Window(step, name, Backwards(read)))
        return windows

    def _until(self, optimizer: int) -> np.ndarray:
        """Return, per event, before which event an optimizer's steps consume some of its contribution; -1: never."""
        until = np.full(len(self.events), -1)
        for passage in self.passages:
            if optimizer in passage.history.optimizers:
                # A step may consume what its own closure erased before it.
                last = np.maximum(passage.end, passage.consumed + 1)
                longest = np.maximum(until[passage.backward], last)
                until[passage.backward] = longest
        return until

    def running_sum(self, parameter: int, added: np.ndarray) -> np.ndarray:
        """Return the sum of the live ones among a parameter's contributions (events × elements) after each event."""
        total = np.zeros_like(added)
        history = self.of[parameter]
        total[history.born] = added[history.born]
        # What is born between two ends is erased together, so that sums run from the first of them to its end.
        ends, first = np.unique(history.end, return_index=True)
        starts = history.born[first]
        spans = np.stack([starts, ends], axis=1)
        for start, end in spans.tolist():
            together = total[start:end]
            together[:] = np.cumsum(together, axis=0)
        return total

    def used_from_before(self) -> bool:
        """Return whether a step used what `.grad` held before the first event, which did not replace it."""
        held = _held_before(self.ledger)
        for p in np.flatnonzero(held).tolist():
            history = self.of[p]
            steps = steps_of(self.ledger, history.optimizers)
            if (steps <= history.ends[0]).any():
                return True
        return False


def _held_before(ledger: Arrays) -> np.ndarray:
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
    held: np.ndarray = np.where(was_added, differs, was_left)
    return held


def _next(ends: np.ndarray, events: np.ndarray) -> np.ndarray:
    """Return the first of some ends after each event; the last of them for all later ones."""
    places = np.searchsorted(ends[:-1], events, side="right")
    following: np.ndarray = ends[places]
    return following


def _steps_around(events: Events) -> np.ndarray:
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


def _last_readers(
    events: Events, around: np.ndarray, in_closure: np.ndarray
) -> np.ndarray:
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


def _gone(ledger: Arrays) -> np.ndarray:
    """Mark where each `.grad` was removed or zeroed: events × parameters."""
    events = ledger.columns
    # A shard is away while FSDP averages it over groups of ranks; only a reduce-scatter takes a gradient for good.
    away = events.where("kind", "sync") & ~scatters(events)
    absent = ledger.state & PRESENT == 0
    gone: np.ndarray = absent & ~away[:, None]
    zeros = events.where("kind", "zero_grad", "edit", "step")
    at = np.flatnonzero(zeros)
    before = np.maximum(at - 1, 0)
    # A sum that was 0 already, and that nothing touched, is no erasure: another optimizer's gradients were zeroed.
    changed = ledger.state[at] & CHANGED > 0
    was_something = ledger.grad[before] != 0
    is_zero = ledger.grad[at] == 0
    gone[at] |= is_zero & (changed | was_something)
    return gone


def scatters(events: Events) -> np.ndarray:
    """Mark the collectives that take gradients elsewhere, and leave none."""
    operation = events.detail("op", None)
    stays = np.isin(operation, ("all-reduce", "all-gather", "broadcast"))
    takes: np.ndarray = events.where("kind", "sync") & ~stays
    return takes


def steps_of(ledger: Arrays, optimizers: Sequence[int]) -> np.ndarray:
    """Return the steps of these optimizers that changed weights, as indices of events."""
    events = ledger.columns
    taken = events.where("kind", "step") & ~events.skipped
    stepped = events.detail("optimizer_index", 0)
    mine = np.isin(stepped, optimizers)
    return np.flatnonzero(taken & mine)


def number(value: Any) -> float:
    """Return a number of an event's details, NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
