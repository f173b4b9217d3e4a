"""What is live in `.grad`: which event erased each contribution, which steps consumed it, and so the windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np

from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT, Arrays, Event


class Fates(NamedTuple):
    """What became of each contribution: arrays of events × parameters.

    `erased` is the event that removed it from `.grad`, `consumed` the first step that used it
    (-1: none), `steps` how many steps used it. Entries without a contribution hold -1, -1, 0.
    """

    erased: np.ndarray
    consumed: np.ndarray
    steps: np.ndarray


class Backwards(Sequence[int]):
    """The backwards that one step consumed, as a tuple of indices holds them, but looked up when asked.

    Where nothing is ever erased each window holds all backwards before it; all windows of an
    optimizer share two arrays here: when each backward ran, and until when it is consumed.

    >>> found = Backwards(np.array([0, 1, 3]), np.array([3, 9, 9]), step=4, length=2)
    >>> found, found == (1, 3), 3 in found, found[-1], found[:1], list(found)
    ((1, 3), True, True, 3, (1,), [1, 3])
    """

    __slots__ = ("_born", "_length", "_step", "_until")

    def __init__(
        self, born: np.ndarray, until: np.ndarray, step: int, length: int
    ) -> None:
        self._born, self._until, self._step, self._length = born, until, step, length

    def _found(self) -> np.ndarray:
        before = int(np.searchsorted(self._born, self._step))
        found: np.ndarray = self._born[:before][self._until[:before] > self._step]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The indices as numpy takes them, at once and not one by one."""
        return self._found().astype(dtype or np.int64)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from self._found().tolist()

    def __reversed__(self) -> Iterator[int]:
        yield from reversed(self._found().tolist())

    def __contains__(self, event: object) -> bool:
        if not isinstance(event, int | float | np.number):
            return False
        at = int(np.searchsorted(self._born, event))
        return (
            at < self._born.size
            and bool(self._born[at] == event)
            and event < self._step < self._until[at]
        )

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | tuple[int, ...]:
        return tuple(self)[index]

    def index(self, value: int, *between: int) -> int:
        """Where an event stands; raises `ValueError` when it is not there."""
        return tuple(self).index(value, *between)

    def __eq__(self, other: object) -> bool:
        return (
            tuple(self) == tuple(other)
            if isinstance(other, tuple | Backwards)
            else NotImplemented
        )

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


def fates(ledger: Arrays) -> Fates:
    """See `Ledger.fates`."""
    shape = ledger.state.shape
    erased, consumed = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    steps = np.zeros(shape, np.int32)
    contributed = (ledger.state & CONTRIBUTED).astype(bool)
    zeroed = {
        rank: _zeroing(ledger, rank) for rank in {p.rank for p in ledger.parameters}
    }
    # A shard is away while FSDP averages it over groups of ranks; only a reduce-scatter takes a gradient for good.
    away = ledger.columns.where("kind", "sync") & ~scatters(ledger)
    gone = (ledger.state & PRESENT == 0) & ~away[:, None]
    for rank, where in zeroed.items():
        own = np.array(
            [
                p
                for p, parameter in enumerate(ledger.parameters)
                if parameter.rank == rank
            ]
        )
        events = np.flatnonzero(where)
        at, before = np.ix_(events, own), np.ix_(np.maximum(events - 1, 0), own)
        # A sum that was 0 already, and that nobody touched, is no erasure: another optimizer's gradients were zeroed.
        touched = (ledger.state[at] & CHANGED > 0) | (ledger.grad[before] != 0)
        gone[at] |= (ledger.grad[at] == 0) & touched
    inside = ledger.columns.where("kind", "backward") & ledger.columns.where(
        "within", "step"
    )
    zeroed_by = zeroed_by_steps(ledger)
    for columns in _alike(ledger, contributed, gone):
        born, ends = (
            np.flatnonzero(contributed[:, columns[0]]),
            np.flatnonzero(gone[:, columns[0]]),
        )
        if not born.size:
            continue
        parameter = ledger.parameters[columns[0]]
        # No step reads an unsharded gradient before it is scattered.
        mine = steps_of(ledger, () if parameter.unsharded_of else parameter.optimizers)
        after = np.searchsorted(ends, born, side="right")
        end = np.where(after < ends.size, np.append(ends, 0)[after], len(ledger.events))
        first = np.searchsorted(mine, born, side="right")
        # A closure's backward is used by the step around it, even when the closure zeroes again.
        until = steps_before(mine, end, zeroed_by)
        until = np.where(
            inside[born], np.maximum(until, np.minimum(first + 1, mine.size)), until
        )
        # Most often all columns are alike, and whole rows are set.
        cells: Any = (
            born
            if len(columns) == len(ledger.parameters)
            else np.ix_(born, np.array(columns))
        )
        erased[cells] = np.where(end < len(ledger.events), end, -1)[:, None]
        steps[cells] = (until - first)[:, None]
        consumed[cells] = np.where(
            until > first, np.append(mine, -1)[np.minimum(first, mine.size)], -1
        )[:, None]
    for sync, births, whole, shard in _scattered(ledger, erased):
        consumed[births, whole], steps[births, whole] = (
            consumed[sync, shard],
            steps[sync, shard],
        )
    return Fates(erased, consumed, steps)


def _alike(
    ledger: Arrays, contributed: np.ndarray, gone: np.ndarray
) -> list[list[int]]:
    """The columns in groups: the same optimizers, and the same events that contribute and that end."""
    found: dict[tuple[Any, ...], list[int]] = {}
    born, ended = np.packbits(contributed, axis=0), np.packbits(gone, axis=0)
    for p, parameter in enumerate(ledger.parameters):
        key = (
            bool(parameter.unsharded_of),
            parameter.optimizers,
            born[:, p].tobytes(),
            ended[:, p].tobytes(),
        )
        found.setdefault(key, []).append(p)
    return list(found.values())


def _zeroing(ledger: Arrays, rank: int | None) -> np.ndarray:
    ranks = ledger.columns.column("rank")
    found: np.ndarray = ledger.columns.where("kind", "zero_grad", "edit", "step") & (
        (ranks < 0) | (ranks == (-1 if rank is None else rank))
    )
    return found


def _scattered(
    ledger: Arrays, erased: np.ndarray
) -> Iterator[tuple[int, np.ndarray, int, int]]:
    """The reduce-scatters: event, the contributions that it took from an unsharded gradient, and the columns.

    Where the groups of ranks are averaged later, the event is the one that brings the sum of all since then.
    """
    scattering = scatters(ledger)
    for whole, shard in shards_of(ledger).items():
        born = np.flatnonzero(erased[:, whole] >= 0)
        born = born[scattering[erased[born, whole]]]
        bringing = brought(ledger, shard, erased[born, whole])
        for sync in np.unique(bringing[bringing >= 0]).tolist():
            yield sync, born[bringing == sync], whole, shard


def erased_for_good(ledger: Arrays, fates: Fates) -> np.ndarray:
    """As `Fates.erased`; but what was scattered ends where it does in its shard, and not while it waits for that."""
    found = fates.erased
    if any(parameter.unsharded_of for parameter in ledger.parameters):
        found = np.where(
            np.append(scatters(ledger), False)[found], -1, found
        )  # -1 is the last
        for sync, births, whole, shard in _scattered(ledger, fates.erased):
            found[births, whole] = fates.erased[sync, shard]
    return found


def shards_of(ledger: Arrays) -> dict[int, int]:
    """For each unsharded gradient, the column of the parameter that it is scattered to."""
    found = {}
    for whole, parameter in enumerate(ledger.parameters):
        name = parameter.unsharded_of
        if name:
            found[whole] = next(
                i
                for i, p in enumerate(ledger.parameters)
                if name == p.name or name in p.aliases
            )
    return found


def scatters(ledger: Arrays) -> np.ndarray:
    """For each event, whether it is a collective that takes gradients elsewhere, and leaves none."""
    op = ledger.columns.detail("op", None)
    found: np.ndarray = ledger.columns.where("kind", "sync") & ~np.isin(
        op, ("all-reduce", "all-gather", "broadcast")
    )
    return found


def brought(ledger: Arrays, shard: int, taken: np.ndarray) -> np.ndarray:
    """For each of these reduce-scatters, the one from that time on that adds to the shard; -1 where none does."""
    bringing = np.flatnonzero(
        scatters(ledger) & (ledger.state[:, shard] & CONTRIBUTED > 0)
    )
    found: np.ndarray = np.append(bringing, -1)[np.searchsorted(bringing, taken)]
    return found


def steps_of(ledger: Arrays, optimizers: tuple[int, ...]) -> np.ndarray:
    """The steps of these optimizers that changed weights, as indices of events."""
    events = ledger.columns
    taken = events.where("kind", "step") & ~events.skipped
    found: np.ndarray = np.flatnonzero(
        taken & np.isin(events.detail("optimizer_index", 0), optimizers)
    )
    return found


def zeroed_by_steps(ledger: Arrays) -> np.ndarray:
    """For each event, and what is after the last, the step that zeroed there what it had read; -1 for none.

    A step may do that itself, or have it done by what it calls. Where a closure's backward ran in the step, what
    zeroed may be the closure.
    """
    events = ledger.columns
    within, ranks = events.where("within", "step"), events.column("rank")
    found = np.where(
        np.append(events.where("kind", "step"), False), np.arange(len(events) + 1), -1
    )
    zeros = np.flatnonzero(within & events.where("kind", "zero_grad", "edit"))
    for rank in np.unique(ranks[zeros]).tolist():
        steps = np.flatnonzero(events.where("kind", "step") & (ranks == rank))
        closures = np.flatnonzero(
            within & events.where("kind", "backward") & (ranks == rank)
        )
        mine = zeros[ranks[zeros] == rank]
        around = np.searchsorted(steps, mine)
        mine, around = mine[around < steps.size], around[around < steps.size]
        begins = np.where(around > 0, steps[around - 1], -1)
        alone = np.searchsorted(closures, begins) == np.searchsorted(
            closures, steps[around]
        )
        found[mine[alone]] = steps[around[alone]]
    return found


def steps_before(
    steps: np.ndarray, ends: np.ndarray, zeroed_by: np.ndarray
) -> np.ndarray:
    """How many of an optimizer's steps came before each of these events; the one that zeroed there itself, too."""
    found = np.searchsorted(steps, ends, side="left")
    itself: np.ndarray = np.append(steps, -2)[found] == zeroed_by[ends]
    return np.asarray(found + itself)


def inherited(ledger: Arrays) -> np.ndarray:
    """Of each parameter, the first step that used what `.grad` held before the recording began; -1 for none.

    That it held anything is seen where it is first read: after a contribution there is another sum, or without one
    there is something. Of ranks, only the latter: what they have averaged is another sum, too. Nothing is said of what
    an edit has touched before that step: it may have replaced it.
    """
    found = np.full(len(ledger.parameters), -1)
    if not len(ledger.events):
        return found
    zeroed_by, edits = zeroed_by_steps(ledger), ledger.columns.where("kind", "edit")
    for p in np.flatnonzero(ledger.state[0] & PRESENT).tolist():
        state, grad = ledger.state[:, p], ledger.grad[:, p]
        gone = np.flatnonzero((state & PRESENT == 0) | (grad == 0))
        end = np.append(gone, len(ledger.events))[:1]
        steps = steps_of(ledger, ledger.parameters[p].optimizers)
        if (
            not steps_before(steps, end, zeroed_by)[0]
            or (edits & (state & CHANGED > 0))[: steps[0]].any()
        ):
            continue
        read = np.flatnonzero(~np.isnan(grad[: int(end[0])]))[:1]
        if _held(ledger, p, read):
            found[p] = steps[0]
    return found


def _held(ledger: Arrays, p: int, read: np.ndarray) -> bool:
    """Whether `.grad` held anything before the event at which it was first read, if it was at any."""
    if not read.size:
        return False
    [event] = read.tolist()
    if (ledger.state[:event, p] & CONTRIBUTED).any():  # what came first was not read
        return False
    if not ledger.state[event, p] & CONTRIBUTED:
        return (
            ledger.events[event].kind not in ("backward", "sync")
            or not ledger.state[event, p] & CHANGED
        )
    sum_, added = float(ledger.grad[event, p]), float(ledger.contribution[event, p])
    return (
        ledger.meta.get("ranks", 1) == 1
        and math.isfinite(sum_)
        and abs(sum_ - added) > 1e-3 * abs(sum_)
    )


def windows(ledger: Arrays, fates: Fates) -> list[Window]:
    """See `Ledger.windows`."""
    steps: dict[int, list[Event]] = {}
    for event in (
        ledger.events[e]
        for e in np.flatnonzero(ledger.columns.where("kind", "step")).tolist()
    ):
        if not event.skipped:
            steps.setdefault(event.details.get("optimizer_index", 0), []).append(event)
    found = [
        window
        for optimizer, events in steps.items()
        for window in _windows_of(ledger, fates, optimizer, events)
    ]
    return sorted(found, key=lambda window: window.step)


def _windows_of(
    ledger: Arrays, fates: Fates, optimizer: int, steps: list[Event]
) -> Iterator[Window]:
    """The windows of one optimizer: what enters and leaves from step to step, never all that stays."""
    until = _until(ledger, fates, optimizer)
    born = np.flatnonzero(until >= 0)
    until = until[born]
    leaving = np.sort(until)
    into = np.searchsorted(born, [event.index for event in steps]).tolist()
    out = np.searchsorted(
        leaving, [event.index for event in steps], side="right"
    ).tolist()
    for event, entered, left in zip(steps, into, out, strict=True):
        backwards = Backwards(born, until, event.index, entered - left)
        yield Window(event.index, str(event.details.get("optimizer", "")), backwards)


def _until(ledger: Arrays, fates: Fates, optimizer: int) -> np.ndarray:
    """Per event, before which event an optimizer's steps consume something of what it contributed; -1: never."""
    mine = np.array([optimizer in p.optimizers for p in ledger.parameters], bool)
    contributed = (ledger.state[:, mine] & CONTRIBUTED).astype(bool)
    erased = np.where(
        fates.erased[:, mine] < 0, len(ledger.events), fates.erased[:, mine]
    )
    consumed = np.where(fates.consumed[:, mine] < 0, -1, fates.consumed[:, mine] + 1)
    # Of an unsharded gradient a step consumes what was scattered, and nothing as long as it is there.
    erased[
        :,
        [bool(p.unsharded_of) for p in ledger.parameters if optimizer in p.optimizers],
    ] = -1
    # A step may consume what was erased before it: by its own closure, or by a reduce-scatter that hands it on.
    ends = np.where(contributed, np.maximum(erased, consumed), -1).max(
        axis=1, initial=-1
    )
    until: np.ndarray = ends.copy()
    behind = [
        (sync, births)
        for sync, births, whole, _ in _scattered(ledger, fates.erased)
        if optimizer in ledger.parameters[whole].optimizers
    ]
    for sync, births in behind:
        until[births] = np.maximum(until[births], ends[sync])
    until[[sync for sync, _ in behind]] = -1
    return until


def live(ledger: Arrays, fates: Fates, event: int, parameter: int) -> np.ndarray:
    """The backwards whose contributions are in this parameter's `.grad` after the event, as indices of events."""
    born = np.flatnonzero(ledger.state[: event + 1, parameter] & CONTRIBUTED)
    erased = fates.erased[born, parameter]
    found: np.ndarray = born[(erased < 0) | (erased > event)]
    return found


def used(fates: Fates, backwards: np.ndarray, event: int, parameter: int) -> np.ndarray:
    """Which of these backwards' contributions a step had consumed by this event."""
    consumed = fates.consumed[backwards, parameter]
    found: np.ndarray = (consumed >= 0) & (consumed <= event)
    return found


def unconsumed(fates: Fates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every contribution that no step used: what erased it, its parameter and its backward, in this order."""
    births, columns = np.nonzero((fates.erased >= 0) & (fates.steps == 0))
    ends = fates.erased[births, columns]
    order = np.lexsort((births, columns, ends))
    return ends[order], columns[order], births[order]


def running_sum(
    ledger: Arrays, fates: Fates, parameter: int, parts: np.ndarray
) -> np.ndarray:
    """The sum of the live ones among a parameter's contributions (`parts`, events × elements) after each event."""
    total = np.zeros_like(parts)
    born, ends = _lives(ledger, fates, parameter)
    total[born] = parts[born]
    # What is born between two ends is erased together, so that sums run from the first of them to its end.
    ends, first = np.unique(ends, return_index=True)
    for start, end in zip(born[first].tolist(), ends.tolist(), strict=True):
        total[start:end] = np.cumsum(total[start:end], axis=0)
    return total


def reach(ledger: Arrays, fates: Fates, parameter: int) -> list[float]:
    """How far the contributions live in a signed parameter's `.grad`, stacked by sign, reach at any time."""
    added, grad = (values[:, 0] for values in ledger.exact[parameter])
    found = [0.0, *grad[np.isfinite(grad)]]
    born, ends = _lives(ledger, fates, parameter)
    known = np.isfinite(added[born])
    born, ends = born[known], ends[known]
    for side in (-1, 1):
        part = np.where(added[born] * side > 0, added[born], 0.0)
        change = np.zeros(len(ledger.events) + 1)
        np.add.at(change, born, part)
        np.add.at(change, ends, -part)
        found += [*np.cumsum(change)[:-1]]
    return [min(found), max(found)]


def _lives(
    ledger: Arrays, fates: Fates, parameter: int
) -> tuple[np.ndarray, np.ndarray]:
    """A parameter's contributions, and before which event each is gone."""
    born = np.flatnonzero(ledger.state[:, parameter] & CONTRIBUTED)
    erased = fates.erased[born, parameter]
    return born, np.where(erased < 0, len(ledger.events), erased)


# Runs count events from the last contribution in them, so that windows of one form are equal, and compress to nothing.
_NEVER, _HANDED_ON = 0, -1


def runs(
    ledger: Arrays,
    fates: Fates,
    chosen: np.ndarray,
    added: np.ndarray,
    rows: Sequence[tuple[int, int]],
) -> tuple[list[list[int]], list[int]]:
    """Tell when the contributions of each row are erased and first consumed, in positions of the `chosen` events.

    `added` holds rows × chosen events, below 0 where there is no contribution; a row is a range
    of parameters, and what several of them receive is erased with the last and consumed with
    the first of it. Returns lists of runs, and which of them each row has. A run is three
    numbers: how many contributions share a fate, and how many events after the last of them they
    are erased and consumed (0: never; consumed -1: never, but handed on by a collective).
    """
    state, consumed = ledger.state[chosen], _positions(fates.consumed[chosen], chosen)
    erased, handed = (
        _positions(fates.erased[chosen], chosen),
        _handed_on(ledger, fates, chosen),
    )
    told: list[list[int]] = []
    found: dict[bytes, int] = {}
    which = []
    for row, (start, stop) in enumerate(rows):
        born = np.flatnonzero(~(added[row] < 0))
        if stop == start + 1:
            ends, uses, passed = (
                array[born, start] for array in (erased, consumed, handed)
            )
        else:
            there = (state[born, start:stop] & CONTRIBUTED).astype(bool)
            ends = np.where(there, erased[born, start:stop], -1).max(axis=1, initial=-1)
            uses = np.where(there, consumed[born, start:stop], len(chosen)).min(
                axis=1, initial=len(chosen)
            )
            passed = np.zeros(born.size, bool)
        key = b"".join(array.tobytes() for array in (born, ends, uses, passed))
        if key not in found:
            found[key] = len(told)
            told.append(_runs(born, ends, uses, passed, len(chosen)))
        which.append(found[key])
    return told, which


def _positions(events: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Where in `chosen` an event has happened; their number, if it never has."""
    return np.where(events < 0, len(chosen), np.searchsorted(chosen, events)).astype(
        np.int32
    )


def _handed_on(ledger: Arrays, fates: Fates, chosen: np.ndarray) -> np.ndarray:
    """The contributions that no step used because a collective took them elsewhere."""
    erased = fates.erased[chosen]
    by_sync = np.append(ledger.columns.where("kind", "sync"), False)[
        erased
    ]  # -1 is the last
    taken: np.ndarray = by_sync & (erased >= 0) & (fates.steps[chosen] == 0)
    return taken


def _runs(
    born: np.ndarray, ends: np.ndarray, uses: np.ndarray, passed: np.ndarray, never: int
) -> list[int]:
    if not born.size:
        return []
    changes = (
        (np.diff(ends) != 0)
        | (np.diff(uses) != 0)
        | (np.diff(passed.astype(np.int8)) != 0)
    )
    last = np.append(np.flatnonzero(changes), born.size - 1)
    counts = np.diff(last, prepend=-1)
    erased = np.where(ends[last] == never, _NEVER, ends[last] - born[last])
    consumed = np.where(uses[last] == never, _NEVER, uses[last] - born[last])
    consumed[passed[last]] = _HANDED_ON
    told: list[int] = np.stack([counts, erased, consumed], axis=1).ravel().tolist()
    return told
