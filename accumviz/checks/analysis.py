"""A ledger prepared for rules: the history of each optimizer, what its steps read, where epochs end."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.report import Finding, Findings, around, setting
from accumviz.checks.suggestions import Code
from accumviz.ledger.events import CHANGED, CONTRIBUTED, KINDS, Event, listed
from accumviz.ledger.flow import SAME, number, steps_of
from accumviz.ledger.ledger import Ledger


def is_close(a: float, b: float) -> bool:
    """Return whether two numbers are the same but for rounding."""
    return math.isclose(a, b, rel_tol=SAME)


def are_close(values: Collection[float]) -> bool:
    """Return whether all of some numbers are the same but for rounding."""
    return not values or is_close(min(values), max(values))


def modal_length(lengths: Iterable[int]) -> int:
    """Return the length of those windows that hold most micro-batches; 0 where there are none.

    >>> modal_length([4, 3, 4, 3])
    4
    """
    held: Counter[int] = Counter()
    for length in lengths:
        held[length] += length
    # Of two that hold as many, the longer.
    return max(held, key=lambda length: (held[length], length), default=0)


def between(events: np.ndarray, start: int, stop: int) -> list[int]:
    """Return the events, of some in their order, that lie between two others."""
    first, last = events.searchsorted([start + 1, stop])
    inside: list[int] = events[first:last].tolist()
    return inside


class _Row(NamedTuple):
    """The weight of one loss of one backward in one step, before clips and averages; names as in `Shares`.

    `weight` is the weight of its mean, or of the whole loss where it is no mean, `each` the weight of one element. A
    `whole` loss is a mean, or cannot be taken apart.
    """

    step: int
    objective: int
    backward: int
    term: int
    optimizer: int
    weight: float
    each: float
    elements: float
    by_hand: float
    averaged: float
    whole: bool
    opaque: bool
    followed: bool
    again: bool


def _columns(rows: list[_Row]) -> Any:
    """Return a row of columns: each field of all rows."""
    return _Row._make(zip(*rows, strict=True))


@dataclass(frozen=True, eq=False)
class WindowShare:
    """The losses of one objective that one step read, with their weights before clips and averages.

    Of each backward, `weights` has its share, `each` the weight of one element, `sizes` how many elements there are,
    and `by_hand` by how much `.grad` was multiplied after it; `averaged` is by how much the last one was over ranks.
    `read`: all constants are known; `known`: the reductions are, too; `mean`: none of them is a sum; `again`: an
    earlier step had used one of these backwards. `term` is what was recorded of the loss in its first backward,
    `beside` what the step read of every objective, this one among them.
    """

    optimizer: int
    objective: int
    step: int
    backwards: tuple[int, ...]
    weights: tuple[float, ...]
    each: tuple[float, ...]
    sizes: tuple[float, ...]
    by_hand: tuple[float, ...]
    averaged: float
    mean: bool
    read: bool
    known: bool
    again: bool
    term: Mapping[str, Any]
    beside: WindowShares = field(repr=False)

    @cached_property
    def many(self) -> int:
        """The number of losses of this objective."""
        return len(self.weights)

    @cached_property
    def total(self) -> float:
        """The sum of the shares."""
        return sum(self.weights)

    @cached_property
    def least(self) -> float:
        """The smallest share."""
        return min(self.weights)

    @cached_property
    def equal(self) -> bool:
        """True where all shares are known and the same."""
        read = self.read and not self.again and self.least > 0
        return read and are_close(self.weights)

    @property
    def even(self) -> bool:
        """True of means that all have the same share."""
        return self.mean and self.equal

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors that the losses were multiplied by: means, or sums."""
        return self.weights if self.mean else self.each

    @cached_property
    def judged(self) -> bool:
        """True where the weight of each element is known, and was used by one step only."""
        return self.known and not self.again and min(self.each) > 0

    @property
    def alike(self) -> bool:
        """True where every element weighs the same, and how much is known."""
        return self.judged and are_close(self.each)

    @property
    def alone(self) -> bool:
        """True where the step read no other loss."""
        return len(self.beside) == 1

    @cached_property
    def micro_batches(self) -> int:
        """The number of backwards that the step consumed, of whatever objective."""
        return len({b for share in self.beside for b in share.backwards})

    @property
    def compares_samples(self) -> bool:
        """True where each loss compares samples with each other: of its micro-batch, or of the whole window."""
        return self.many > 1 and bool(self.term.get("in_batch"))

    def adds_up_to(self, total: float) -> bool:
        """Return whether the shares add up to this; a constant inside a mean counts, or does not.

        Half a mean square is a whole loss, and so is a mean of what was divided.
        """
        inside = abs(number(self.term.get("own", 1.0))) or math.nan
        sums = self.total, self.total / inside
        return any(is_close(each, total) for each in sums)


WindowShares = list[WindowShare]
# What has to be meant for a healthy loop to be so, each with the event that it is about.
Conditions = Iterator[tuple[str, int]]


def _put_together(rows: list[_Row]) -> list[_Row]:
    """Put the losses of each backward together where their elements weigh alike, as chunks of one loss do."""
    together: dict[int, _Row] = {}
    for row in rows:
        before = together.get(row.backward)
        if before is None:
            together[row.backward] = row
            continue
        if not is_close(row.each, before.each):
            return rows
        weight = before.weight + row.weight
        elements = before.elements + row.elements
        together[row.backward] = before._replace(weight=weight, elements=elements)
    return list(together.values())


class LedgerAnalysis:
    """A ledger, its shares, and what several rules ask of both.

    `world_size` is NaN where it is not known. `at` has the events of each kind. By event, `sites` are numbers of call
    sites, `closures` says what ran in a step, `moved` which backwards are at weights that were moved since the one
    before, as in SAM. By event and history of a `.grad`, `erased` is what erased a contribution (of what FSDP has
    scattered, what erased that from the shard), `used` says that a step used it, or may still. `optimizers` are those
    that stepped, `every_optimizer` those that have parameters here; `window_shares` has what each step of each
    optimizer read of every objective, `lost` the backwards that were erased before it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.parameters = ledger.parameters
        self.code = Code(ledger.sources)
        self.world_size = number(ledger.meta.get("ranks"))
        self.is_whole_script = ledger.meta.get("ended") == "exit"
        self.is_sharded = any(p.unsharded_of for p in ledger.parameters)
        self.events = ledger.events
        self.at: dict[str, np.ndarray] = {}
        for kind in KINDS:
            self.at[kind] = np.flatnonzero(self.events.where("kind", kind))
        self.shares = ledger.shares()
        self.contributed: Any = ledger.state & CONTRIBUTED > 0
        self.backward = self.events.where("kind", "backward")
        self.ranks = self.events.column("rank")
        self.sites = self.events.sites
        self.closures = self.events.where("within", "step")
        self.moved = self.events.detail("moved", default=False)
        flow = ledger.flow
        self.erased = flow.erased_for_good
        self.used: Any = (self.erased < 0) | (flow.fates.steps > 0)
        first = [history.parameters[0] for history in flow.histories]
        self.used &= self.contributed[:, first]
        self.window_shares = self._window_shares()
        self.lost = self._lost()
        self.every_optimizer: list[OptimizerHistory] = []
        self.optimizers: list[OptimizerHistory] = []
        owners = (parameter.optimizers for parameter in ledger.parameters)
        for index in sorted(set().union(*owners)):
            optimizer = OptimizerHistory(self, index)
            self.every_optimizer.append(optimizer)
            if optimizer.steps.size or optimizer.skipped.size:
                self.optimizers.append(optimizer)

    def detail(self, event: int, name: str) -> Any:
        """Return one entry of an event's details; None where it has none."""
        return self.ledger[event].details.get(name)

    def names(self, columns: Iterable[int]) -> list[str]:
        """Return the names of some parameters."""
        return [self.parameters[p].name for p in columns]

    def finite(self, backward: int) -> bool:
        """Return whether what a backward added is known to be neither infinite nor NaN."""
        reached = self.contributed[backward]
        norms = self.ledger.contribution[backward, reached]
        return bool(np.isfinite(norms).all())

    def _lost(self) -> dict[tuple[int, int], list[int]]:
        """Return for each step of each optimizer the backwards that were erased before it."""
        is_first = self.shares.term == 0
        shares = self.shares.take(self.shares.erased & is_first)
        columns = shares.step, shares.optimizer, shares.backward
        lost: dict[tuple[int, int], list[int]] = defaultdict(list)
        for step, optimizer, backward in np.stack(columns, axis=1).tolist():
            lost[step, optimizer].append(backward)
        return dict(lost)

    def _window_shares(self) -> dict[tuple[int, int], WindowShares]:
        """Return what each step of each optimizer read of every objective."""
        of_steps: dict[tuple[int, int], WindowShares] = defaultdict(list)
        for _, group in groupby(self._rows(), key=attrgetter("step", "objective")):
            rows = list(group)
            beside = of_steps[rows[0].step, rows[0].optimizer]
            beside.append(self._window_share(rows, beside))
        return dict(of_steps)

    def _rows(self) -> Iterator[_Row]:
        shares = self.shares.take(~self.shares.erased)
        columns = dict(vars(shares))
        whole = columns["whole"] = shares.mean | shares.opaque
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # What is maximised has a minus before it, and weighs as much.
            factor = np.abs(shares.constant) * shares.by_hand
            each = factor / shares.elements
            columns["each"] = np.where(shares.mean, each, factor)
            weight = factor * shares.elements
            columns["weight"] = np.where(whole, factor, weight)
        order = np.lexsort((shares.backward, shares.objective, shares.step))
        lists = []
        for name in _Row._fields:
            column = columns[name][order]
            lists.append(column.tolist())
        return map(_Row._make, zip(*lists, strict=True))

    def _window_share(self, rows: list[_Row], beside: WindowShares) -> WindowShare:
        """Return what one step read of one objective."""
        flags = _columns(rows)
        read = all(flags.followed)
        of = _columns(_put_together(rows)) if read else flags
        first = rows[0]
        code = self.events.column("details")[first.backward]
        terms = listed(self.events.details[code]) or [{}]
        return WindowShare(
            first.optimizer,
            first.objective,
            first.step,
            backwards=of.backward,
            weights=of.weight,
            each=of.each,
            sizes=of.elements,
            by_hand=of.by_hand,
            averaged=of.averaged[-1],
            mean=all(flags.whole),
            read=read,
            known=read and not any(flags.opaque),
            again=any(flags.again),
            term=terms[first.term],
            beside=beside,
        )

    @cached_property
    def objectives(self) -> dict[tuple[int, int], WindowShares]:
        """The shares that each optimizer consumed of each objective, in the order of its steps."""
        objectives: dict[tuple[int, int], WindowShares] = defaultdict(list)
        for of_step in self.window_shares.values():
            for share in of_step:
                objectives[share.optimizer, share.objective].append(share)
        return dict(objectives)

    def objective(self, share: WindowShare) -> str:
        """Return the name of a loss."""
        return self.shares.objectives[share.objective]

    @cached_property
    def begins_inside(self) -> bool:
        """True where the recording may have begun inside a window: it does not hold a whole script."""
        from_before = self.ledger.flow.used_from_before()
        return bool(from_before) or not self.is_whole_script

    # --- loaders ------------------------------------------------------------------------------

    @cached_property
    def epochs(self) -> list[tuple[int, int]]:
        """Every run through a loader: its first event and its last (the number of events where it has no end)."""
        begun: dict[tuple[int, str], int] = {}
        epochs: dict[int, int] = {}
        for e in self.at["loader"].tolist():
            loader = int(self.ranks[e]), str(self.detail(e, "loader"))
            if loader in begun:  # its end, or it was left early
                epochs[begun.pop(loader)] = e
            if self.detail(e, "what") == "begins":
                begun[loader] = e
                epochs[e] = len(self.events)
        return sorted(epochs.items())

    def carried(self, share: WindowShare) -> int:
        """Count the micro-batches of a window that came before a loader began anew inside it."""
        first = share.backwards[0]
        last = share.backwards[-1]
        carried = 0
        for begins, ends in self.epochs:
            if first < begins < last and self.backward[begins:ends].any():
                carried = sum(b < begins for b in share.backwards)
        return carried

    # --- what a recording says of itself --------------------------------------------------------

    def listed(self, name: str) -> Sequence[Any]:
        """Return what the ledger's meta lists under this name; nothing where it is no list."""
        entries = self.ledger.meta.get(name)
        return entries if isinstance(entries, list | tuple) else ()

    # --- findings -------------------------------------------------------------------------------

    def finding(
        self,
        severity: str,
        event: int,
        *,
        at: Event | None = None,
        cause: str,
        evidence: dict[str, Any],
        step: int | None = None,
        **about: Any,
    ) -> Finding:
        """Return a finding at this event, on its line or on the line of `at`, which led to it. `check` names its rule.

        A change by hand has no line: it is shown at its step.
        """
        at = at or self.ledger[event]
        if at.kind == "edit" and not at.line and step is not None:
            at = self.ledger[step]
            cause += " That is done by hand, before this step."
        if given := setting(self.ledger[event], self.ledger.sources):
            evidence = evidence | {"setting": given}
        return Finding(
            "",
            severity,
            step,
            event,
            at.file,
            at.line,
            at.source,
            evidence,
            cause,
            around=around(str(self.ledger.sources.get(at.file, "")), at.line),
            **about,
        )

    def placed(self, said: str, event: int) -> str:
        """Write the line of an event behind what is said of it, where it has one."""
        at = self.ledger[event]
        return f"{said} ({Path(at.file).name}:{at.line})" if at.line else said

    def finding_of(self, severity: str, share: WindowShare, **about: Any) -> Finding:
        """Return a finding about a window, at its first backward unless another `event` is given."""
        about = {"step": share.step, "optimizer": share.optimizer} | about
        event = about.pop("event", share.backwards[0])
        return self.finding(severity, event, **about)


class OptimizerHistory(LedgerAnalysis):
    """The analysis of a ledger for one optimizer: its parameters, its steps, and which backwards reached it.

    By event, `changes` says what touched the `.grad` of one of its parameters (of each kind, `changing`), `eraser` is
    what erased its contribution last, `in_use` says that a step used some of it, or may still.

    `consumed` are the shares that its steps read. These `read` backwards, each in the step of `read_step`: `windows`
    has each step that consumed something, with its backwards, `first_step_of` each backward that was consumed, with
    the first step that did. `place` is the optimizer's number on its rank.
    """

    def __init__(self, analysis: LedgerAnalysis, optimizer: int) -> None:
        vars(self).update(vars(analysis))
        self.optimizer = optimizer
        has = [optimizer in parameter.optimizers for parameter in self.parameters]
        self.columns = np.flatnonzero(has)
        self.rank = self.parameters[self.columns[0]].rank
        # Optimizers of several ranks are numbered through.
        self.place = sum(before.rank == self.rank for before in self.every_optimizer)
        names = dict(enumerate(self.listed("optimizers")))
        self.name = str(names.get(optimizer, f"optimizer {optimizer}"))
        self.steps = steps_of(self.events, [optimizer])
        self.skipped = steps_of(self.events, [optimizer], skipped=True)
        reached = self._any(self.contributed)
        self.backwards = np.flatnonzero(reached & self.backward)
        self.changes = self._any(self.ledger.state & CHANGED)
        self.changing = {}
        for kind, events in self.at.items():
            self.changing[kind] = events[self.changes[events]]
        histories = np.unique(self.ledger.flow.history_of[self.columns])
        self.eraser = self.erased[:, histories].max(axis=1)
        self.in_use = self.used[:, histories].any(axis=1)
        mine = self.shares.optimizer == optimizer
        self.consumed = self.shares.take(mine & ~self.shares.erased)
        first = self.consumed.term == 0
        self.read_step = self.consumed.step[first]
        self.read = self.consumed.backward[first]
        self.windows: dict[int, list[int]] = {}
        self.first_step_of: dict[int, int] = {}
        read = self.read.tolist()
        steps = self.read_step.tolist()
        pairs = zip(read, steps, strict=True)
        for backward, step in pairs:
            self.windows.setdefault(step, []).append(backward)
            self.first_step_of.setdefault(backward, step)

    @cached_property
    def longest(self) -> int:
        """How many backwards the longest window holds; 0 where there is no window."""
        return max(map(len, self.windows.values()), default=0)

    @cached_property
    def usual(self) -> int:
        """How many new backwards a window usually has."""
        lengths = Counter(self.first_step_of.values())
        return modal_length(lengths.values())

    def _any(self, cells: np.ndarray) -> np.ndarray:
        """Mark the events at which this holds of one of this optimizer's parameters."""
        events: np.ndarray = np.any(cells[:, self.columns], axis=1)
        return events

    def shares_of(self, step: int) -> WindowShares:
        """Return what a step read of every objective."""
        return self.window_shares[step, self.optimizer]

    @cached_property
    def first_use(self) -> np.ndarray:
        """For each event, the first step that consumed its contribution; beyond the last event where none did."""
        many = len(self.events)
        first = np.full(many, many)
        first[self.read[::-1]] = self.read_step[::-1]
        return first

    @cached_property
    def is_fed_by_hand(self) -> bool:
        """True where something else than a backward fills an empty `.grad`, or one that no backward reaches."""
        reached = self.contributed.any(axis=0)
        for edit in self.changing["edit"].tolist():
            columns, before, after = self.norms_around(edit)
            # Of an empty one there is no norm.
            was_empty = ~(before > 0)
            by_hand = was_empty | ~reached[columns]
            if (by_hand & (after > 0)).any():
                return True
        return False

    def norms_around(self, event: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which of these parameters an event changed, and their norms before and after it."""
        changed = self.ledger.state[event, self.columns] & CHANGED
        columns = self.columns[changed > 0]
        norms = self.ledger.grad[[event - 1, event]]
        before, after = norms[:, columns].astype(float)
        # Before the first event there is nothing.
        if event == 0:
            before = np.zeros_like(after)
        return columns, before, after

    def epoch(self, event: int) -> tuple[int, int] | None:
        """Return the run through a loader in which an event fell, or the last that ended before it.

        Some loaders look ahead: theirs has ended when the last batches that it gave are used.
        """
        begun = [
            (begins, ends)
            for begins, ends in self.epochs
            if begins < event and self.ranks[begins] in (-1, self.rank)
        ]
        return max(begun, key=itemgetter(1), default=None)

    def ended(self, event: int) -> bool:
        """Return whether the run through a loader in which an event fell came to the loader's end."""
        _, end = self.epoch(event) or (-1, len(self.events))
        return end < len(self.events) and self.detail(end, "what") == "ends"

    def previous_step(self, event: int) -> int:
        """Return the last step before an event; -1 where there is none."""
        place = self.steps.searchsorted(event)
        return int(self.steps[place - 1]) if place else -1

    def nothing_since_step(self, event: int) -> bool:
        """Return whether nothing has come into `.grad` between the last step and an event."""
        step = self.previous_step(event)
        since = between(self.backwards, step, event + 1)
        edits = between(self.changing["edit"], step, event)
        return step >= 0 and not since and not edits

    def waiting(self, step: int) -> list[int]:
        """Return those backwards of a step that nothing erased before it: what was put back by hand is not known."""
        window = self.windows[step]
        return [b for b in window if not 0 <= self.eraser[b] < step]

    def clip_ratio(self, event: int) -> float:
        """Return by what factor an event has shortened these gradients; 1 where it did nothing."""
        _, before, after = self.norms_around(event)
        usable = np.isfinite(before) & np.isfinite(after) & (before > 0)
        ratios = after[usable] / before[usable]
        return float(ratios.min(initial=1.0))


Search = Callable[[LedgerAnalysis], Findings]


def for_each_optimizer(
    search: Callable[[OptimizerHistory], Findings],
) -> Search:
    """Search the history of each optimizer, whose number the findings get."""

    @wraps(search)
    def search_all(analysis: LedgerAnalysis) -> Findings:
        for optimizer in analysis.optimizers:
            for finding in search(optimizer):
                yield replace(finding, optimizer=optimizer.optimizer)

    return search_all


def for_each_loss(
    search: Callable[[LedgerAnalysis, WindowShares], Findings],
) -> Search:
    """Search the windows of each loss, of each optimizer whose gradients are the losses' alone."""

    @wraps(search)
    def search_all(analysis: LedgerAnalysis) -> Findings:
        fed = [o.optimizer for o in analysis.every_optimizer if o.is_fed_by_hand]
        for (optimizer, _), shares in analysis.objectives.items():
            if optimizer not in fed:
                yield from search(analysis, shares)

    return search_all
