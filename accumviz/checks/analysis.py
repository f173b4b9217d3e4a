"""A ledger prepared for rules: the history of each optimizer, what its steps read, where epochs end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from accumviz.checks.report import Finding, around, setting
from accumviz.checks.suggestions import Code
from accumviz.ledger.events import CHANGED, CONTRIBUTED, Event
from accumviz.ledger.flow import SAME, number, steps_of
from accumviz.ledger.ledger import Ledger
from accumviz.ledger.objectives import call_sites


def is_close(a: float, b: float, within: float = SAME) -> bool:
    """Return whether two numbers are the same but for rounding."""
    size = max(abs(b), 1e-30)
    return abs(a - b) <= within * size


def modal_length(lengths: Iterable[int]) -> int:
    """Return the length of those windows that hold most micro-batches; 0 where there are none.

    >>> modal_length([4, 3, 4, 3])
    4
    """
    held: Counter[int] = Counter()
    for length in lengths:
        held[length] += length
    # Of two that hold as many, the longer.
    return max(sorted(held, reverse=True), key=held.__getitem__, default=0)


def between(events: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the events that lie between two others."""
    is_inside = (events > start) & (events < stop)
    inside: np.ndarray = events[is_inside]
    return inside


@dataclass(frozen=True)
class WindowShare:
    """What one step read of one objective, before clips and averages.

    Of each backward, `weights` has its share, `each` the
    weight of one element, `sizes` how many elements there are, and `by_hand` by how much `.grad`
    was multiplied after it. `read`: all constants are known; `known`: the reductions are, too;
    `mean`: none of them is a sum; `again`: an earlier step had used one of these backwards; `erased`
    are those that were zeroed before the step.
    """

    optimizer: int
    objective: int
    step: int
    backwards: tuple[int, ...]
    weights: tuple[float, ...]
    each: tuple[float, ...]
    sizes: tuple[float, ...]
    by_hand: tuple[float, ...]
    mean: bool
    read: bool
    known: bool
    again: bool
    erased: tuple[int, ...]

    @property
    def many(self) -> int:
        """How many losses of this objective there are."""
        return len(self.weights)

    @property
    def total(self) -> float:
        """The sum of the shares."""
        return sum(self.weights)

    @property
    def least(self) -> float:
        """The smallest share."""
        return min(self.weights, default=math.inf)

    @property
    def equal(self) -> bool:
        """Whether all shares are known and the same."""
        read = self.read and not self.again and self.least > 0
        return read and is_close(self.least, max(self.weights))

    @property
    def even(self) -> bool:
        """Whether these are means that all have the same share."""
        return self.mean and self.equal

    @property
    def factors(self) -> tuple[float, ...]:
        """What the losses were multiplied by: means, or sums."""
        return self.weights if self.mean else self.each

    @property
    def judged(self) -> bool:
        """Whether the weight of each element is known, and was used by one step only."""
        least = min(self.each, default=0.0)
        return self.known and not self.again and least > 0

    @property
    def alike(self) -> bool:
        """Whether every element weighs the same, and how much is known."""
        return self.judged and is_close(min(self.each), max(self.each))


def _window_share(rows: Mapping[str, list[Any]], group: Sequence[int]) -> WindowShare:
    """Return what one step read of one objective, of rows at these places."""
    used = []
    erased = []
    for row in group:
        if rows["erased"][row]:
            erased.append(rows["backward"][row])
        else:
            used.append(row)

    def column(name: str) -> tuple[Any, ...]:
        values = rows[name]
        return tuple([values[row] for row in used])

    read = all(column("followed"))
    backwards = column("backward")
    weights, each, sizes = column("weight"), column("each"), column("elements")
    by_hand = column("by_hand")
    if read and len(set(backwards)) < len(backwards):
        together = _of_backwards(backwards, weights, each, sizes, by_hand)
        backwards, weights, each, sizes, by_hand = together
    return WindowShare(
        rows["optimizer"][group[0]],
        rows["objective"][group[0]],
        rows["step"][group[0]],
        backwards,
        weights=weights,
        each=each,
        sizes=sizes,
        by_hand=by_hand,
        mean=all(column("whole")),
        read=read,
        known=read and not any(column("opaque")),
        again=any(column("again")),
        erased=tuple(erased),
    )


def _of_backwards(*columns: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Put the losses of each backward together where their elements weigh alike, as chunks of one loss do.

    The columns are backwards, weights, each, sizes, by_hand.
    """
    together: dict[int, list[Any]] = {}
    for row in zip(*columns, strict=True):
        backward, weight, each, size, _ = row
        before = together.setdefault(backward, [backward, 0.0, each, 0.0, row[-1]])
        if not is_close(each, before[2]):
            return columns
        before[1] += weight
        before[3] += size
    return tuple(zip(*together.values(), strict=True))


class OptimizerHistory:
    """One optimizer: its parameters, its steps, and which backwards reached it."""

    def __init__(self, analysis: LedgerAnalysis, optimizer: int) -> None:
        self.analysis = analysis
        self.optimizer = optimizer
        parameters = analysis.ledger.parameters
        columns = [i for i, p in enumerate(parameters) if optimizer in p.optimizers]
        self.rank = parameters[columns[0]].rank if columns else None
        self.columns = np.array(columns, int)
        self.steps = steps_of(analysis.ledger, (optimizer,))
        events = analysis.events
        mine = events.detail("optimizer_index", 0) == optimizer
        skipped = events.where("kind", "step") & events.skipped
        self.skipped = np.flatnonzero(skipped & mine)
        contributed = analysis.contributed[:, self.columns]
        reached = contributed.any(axis=1)
        self.backwards = np.flatnonzero(reached & analysis.backward)
        shares = analysis.shares
        mine = shares.optimizer == optimizer
        used = mine & ~shares.erased & (shares.term == 0)
        self.read_step = shares.step[used]
        self.read = shares.backward[used]

    @property
    def name(self) -> str:
        """What the optimizer is called."""
        return self.analysis.optimizer_name(self.optimizer)

    @cached_property
    def windows(self) -> dict[int, list[int]]:
        """Each step and the backwards that it consumed."""
        windows: dict[int, list[int]] = {}
        for step in self.steps.tolist():
            windows[step] = []
        steps = self.read_step.tolist()
        backwards = self.read.tolist()
        for step, backward in zip(steps, backwards, strict=True):
            windows[step].append(backward)
        return windows

    @cached_property
    def full_windows(self) -> dict[int, list[int]]:
        """Each step that consumed something."""
        return {step: used for step, used in self.windows.items() if used}

    @cached_property
    def first_step_of(self) -> dict[int, int]:
        """Each backward that was consumed, and the first step that did."""
        backwards = self.read[::-1].tolist()
        steps = self.read_step[::-1].tolist()
        return dict(zip(backwards, steps, strict=True))

    @cached_property
    def first_use(self) -> np.ndarray:
        """For each event, the first step that consumed its contribution; how many events there are where none did."""
        many = len(self.analysis.events)
        first = np.full(many, many)
        first[self.read[::-1]] = self.read_step[::-1]
        return first

    @cached_property
    def usual(self) -> int:
        """How many new backwards a window usually has."""
        lengths = Counter(self.first_step_of.values())
        return modal_length(lengths.values())

    @cached_property
    def is_fed_by_hand(self) -> bool:
        """Whether it has parameters that no backward reaches, and whose `.grad` something else fills."""
        reached = self.analysis.contributed[:, self.columns].any(axis=0)
        columns = self.columns[~reached]
        edits = np.ix_(self.analysis.at("edit"), columns)
        ledger = self.analysis.ledger
        filled = (ledger.state[edits] & CHANGED > 0) & (ledger.grad[edits] > 0)
        return bool(filled.any())

    def previous_step(self, event: int) -> int:
        """Return the last step before an event; -1 where there is none."""
        place = self.steps.searchsorted(event)
        return int(self.steps[place - 1]) if place else -1

    def nothing_since_step(self, event: int) -> bool:
        """Return whether nothing has come into `.grad` between the last step and an event."""
        step = self.previous_step(event)
        since = between(self.backwards, step, event + 1)
        edits = self.changing_between("edit", step, event)
        return step >= 0 and not since.size and not edits.size

    def waiting(self, step: int) -> list[int]:
        """Return those backwards of a step that nothing erased before it: what was put back by hand is not known."""
        erased = self.analysis.erased
        return [
            b
            for b in self.windows[step]
            if not 0 <= erased[b, self.columns].max() < step
        ]

    def changed_by(self, event: int) -> bool:
        """Return whether the event touched one of this optimizer's `.grad`."""
        return self.changing(np.array([event])).size > 0

    def changing(self, events: np.ndarray) -> np.ndarray:
        """Return those of some events that touched one of this optimizer's `.grad`."""
        cells = np.ix_(events, self.columns)
        changed = self.analysis.ledger.state[cells] & CHANGED
        changing: np.ndarray = events[changed.any(axis=1)]
        return changing

    def changing_between(self, kind: str, start: int, stop: int) -> np.ndarray:
        """Return the events of a kind between two that touched one of this optimizer's `.grad`."""
        events = between(self.analysis.at(kind), start, stop)
        return self.changing(events)

    def clip_ratio(self, event: int) -> float:
        """Return by what factor an event has shortened these gradients; 1 where it did nothing."""
        ledger = self.analysis.ledger
        changed = ledger.state[event, self.columns] & CHANGED
        columns = self.columns[changed.astype(bool)]
        if event == 0:
            return 1.0
        before = ledger.grad[event - 1, columns].astype(float)
        after = ledger.grad[event, columns].astype(float)
        usable = np.isfinite(before) & np.isfinite(after)
        usable &= before > 0
        ratios = after[usable] / before[usable]
        return float(ratios.min(initial=1.0))


class LedgerAnalysis:
    """A ledger, its shares, and what several rules ask of both."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.code = Code(ledger.sources)
        self.events = ledger.columns
        self.shares = ledger.shares()
        contributed = ledger.state & CONTRIBUTED
        self.contributed: Any = contributed.astype(bool)
        self.backward = self.events.where("kind", "backward")
        self.ranks = self.events.column("rank")

    def at(self, *kinds: str) -> np.ndarray:
        """Return the events of these kinds."""
        return np.flatnonzero(self.events.where("kind", *kinds))

    def detail(self, event: int, name: str) -> Any:
        """Return one entry of an event's details; None where it has none."""
        return self.ledger[event].details.get(name)

    @cached_property
    def every_optimizer(self) -> list[OptimizerHistory]:
        """Every optimizer that has parameters here."""
        indices: set[int] = set()
        for parameter in self.ledger.parameters:
            indices.update(parameter.optimizers)
        return [OptimizerHistory(self, index) for index in sorted(indices)]

    @cached_property
    def optimizers(self) -> list[OptimizerHistory]:
        """Every optimizer that has parameters here and stepped."""
        every = self.every_optimizer
        return [each for each in every if each.steps.size or each.skipped.size]

    @cached_property
    def sites(self) -> np.ndarray:
        """For each event, a number of its call site."""
        return call_sites(self.events)

    @cached_property
    def closures(self) -> np.ndarray:
        """For each event, whether it ran in a step: a backward in a closure."""
        return self.events.where("within", "step")

    @cached_property
    def used(self) -> np.ndarray:
        """For each contribution, whether a step used it, or may still."""
        stays = self.erased < 0
        was_read = self.ledger.outcomes.steps > 0
        used: np.ndarray = (stays | was_read) & self.contributed
        return used

    @cached_property
    def erased(self) -> np.ndarray:
        """For each contribution what erased it; of what FSDP has scattered, what erased that from the shard."""
        return self.ledger.flow.erased_for_good

    def finite(self, backward: int) -> bool:
        """Return whether what a backward added is known to be neither infinite nor NaN."""
        reached = self.contributed[backward]
        norms = self.ledger.contribution[backward, reached]
        return bool(np.isfinite(norms).all())

    @cached_property
    def window_shares(self) -> list[WindowShare]:
        """What each step read of each objective, step by step."""
        shares = self.shares
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # What is maximised has a minus before it, and weighs as much.
            factor = np.abs(shares.constant) * shares.by_hand
            each = np.where(shares.mean, factor / shares.elements, factor)
            whole = shares.mean | shares.opaque
            weight = np.where(whole, factor, factor * shares.elements)
        columns = {**vars(shares), "each": each, "whole": whole, "weight": weight}
        order = np.lexsort((shares.backward, shares.objective, shares.step))
        rows = {}
        for name, column in columns.items():
            if isinstance(column, np.ndarray):
                rows[name] = column[order].tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for row, step in enumerate(rows["step"]):
            key = step, rows["objective"][row]
            groups.setdefault(key, []).append(row)
        return [_window_share(rows, group) for group in groups.values()]

    @cached_property
    def objectives(self) -> dict[tuple[int, int], list[WindowShare]]:
        """What each optimizer consumed of each objective, in the order of its steps."""
        objectives: dict[tuple[int, int], list[WindowShare]] = {}
        for share in self.window_shares:
            if share.many:
                key = share.optimizer, share.objective
                objectives.setdefault(key, []).append(share)
        return objectives

    @cached_property
    def _shares_of_steps(self) -> dict[tuple[int, int], list[WindowShare]]:
        of_steps: dict[tuple[int, int], list[WindowShare]] = {}
        for share in self.window_shares:
            key = share.step, share.optimizer
            of_steps.setdefault(key, []).append(share)
        return of_steps

    def every_share_of(self, step: int, optimizer: int) -> list[WindowShare]:
        """Return what an optimizer's step read of all objectives, or would have read but for a zeroing."""
        return self._shares_of_steps.get((step, optimizer), [])

    def shares_of(self, step: int, optimizer: int) -> list[WindowShare]:
        """Return what an optimizer's step read of all objectives."""
        return [share for share in self.every_share_of(step, optimizer) if share.many]

    def in_same_step(self, share: WindowShare) -> list[WindowShare]:
        """Return what a step read of all objectives, of which this is one."""
        return self.shares_of(share.step, share.optimizer)

    def beside(self, share: WindowShare) -> list[WindowShare]:
        """Return all losses of a window's backwards, of which this is one."""
        every = self.in_same_step(share)
        return [other for other in every if other.backwards == share.backwards]

    def micro_batches(self, share: WindowShare) -> int:
        """Count the backwards that a step consumed, of whatever objective."""
        backwards: set[int] = set()
        for other in self.in_same_step(share):
            backwards.update(other.backwards)
        return len(backwards)

    def alone(self, share: WindowShare) -> bool:
        """Return whether a step read no other loss."""
        return len(self.in_same_step(share)) == 1

    def term(self, share: WindowShare) -> Mapping[str, Any]:
        """Return what is known of a loss in its first backward."""
        backward = share.backwards[0]
        rows = self.shares.of(share.step)
        mine = rows.backward == backward
        mine &= rows.objective == share.objective
        places = rows.term[mine].tolist()
        terms = self.ledger[backward].terms
        if not places or places[0] >= len(terms):
            return {}
        term: Mapping[str, Any] = terms[places[0]]
        return term

    def adds_up_to(self, share: WindowShare, total: float) -> bool:
        """Return whether the shares of a window add up to this; a constant inside a mean counts, or does not.

        Half a mean square is a whole loss, and so is a mean of what was divided.
        """
        inside = abs(number(self.term(share).get("own", 1.0)))
        sums = [share.total, share.total / (inside or math.nan)]
        return any(is_close(each, total) for each in sums)

    def compares_samples(self, share: WindowShare) -> bool:
        """Return whether each loss compares samples with each other: of its micro-batch, or of the whole window."""
        return share.many > 1 and bool(self.term(share).get("in_batch"))

    @cached_property
    def begins_inside(self) -> bool:
        """Whether the recording may have begun inside a window: it is not that of a whole script."""
        whole = self.ledger.meta.get("ended") == "exit"
        return not whole or bool(self.ledger.flow.used_from_before())

    @cached_property
    def has_loaders(self) -> bool:
        """Whether a loader was seen at work."""
        return bool(self.events.where("kind", "loader").any())

    @cached_property
    def epochs(self) -> list[tuple[int, int]]:
        """Every run through a loader: its first event and its last (the number of events where it has no end)."""
        begun: dict[tuple[int, str], int] = {}
        epochs: dict[int, int] = {}
        for e in self.at("loader").tolist():
            details = self.ledger[e].details
            rank = int(self.ranks[e])
            loader = rank, str(details.get("loader"))
            if loader in begun:  # its end, or it was left early
                epochs[begun.pop(loader)] = e
            if details.get("what") == "begins":
                begun[loader] = e
                epochs[e] = len(self.events)
        return sorted(epochs.items())

    def epoch(self, event: int, rank: int | None = None) -> tuple[int, int] | None:
        """Return the run through a loader in which an event fell: the innermost, or the last that ended before.

        Some loaders look ahead: theirs has ended when the last batches that it gave are used.
        """
        around = None
        before = []
        for begins, ends in self.epochs:
            if begins >= event or self.ranks[begins] not in (-1, rank):
                continue
            if ends > event:
                around = begins, ends
            else:
                before.append((begins, ends))
        last = max(before, key=lambda epoch: epoch[1], default=None)
        return around or last

    def ended(self, event: int, rank: int | None = None) -> bool:
        """Return whether the run through a loader in which an event fell came to the loader's end."""
        epoch = self.epoch(event, rank)
        if epoch is None or epoch[1] == len(self.events):
            return False
        return bool(self.detail(epoch[1], "what") == "ends")

    def carried(self, share: WindowShare) -> int:
        """Count the micro-batches of a window that came before a loader began anew inside it."""
        first = share.backwards[0]
        last = share.backwards[-1]
        anew = -1
        for begins, ends in self.epochs:
            is_inside = first < begins < last
            if is_inside and self.backward[begins:ends].any():
                anew = begins
        before = [backward for backward in share.backwards if backward < anew]
        return len(before)

    def listed(self, name: str) -> Sequence[Any]:
        """Return what the ledger's meta lists under this name; nothing where it is no list."""
        entries = self.ledger.meta.get(name)
        return entries if isinstance(entries, list | tuple) else ()

    def settings(self, optimizer: int) -> Mapping[str, Any]:
        """Return what an optimizer was made with; empty where that was not recorded."""
        every = self.listed("optimizer_settings")
        settings = every[optimizer] if optimizer < len(every) else {}
        return settings if isinstance(settings, Mapping) else {}

    def optimizer_name(self, optimizer: int) -> str:
        """Return what an optimizer is called."""
        names = self.listed("optimizers")
        if optimizer < len(names):
            return str(names[optimizer])
        return f"optimizer {optimizer}"

    def finding(
        self,
        severity: str,
        event: int,
        *,
        at: Event | None = None,
        cause: str,
        **about: Any,
    ) -> Finding:
        """Return a finding at this event, on its line or on that of `at`, which led to it. `check` names its rule.

        A change by hand has no line: it is shown at its step.
        """
        at = at or self.ledger[event]
        step = about.pop("step", None)
        if at.kind == "edit" and not at.line and step is not None:
            at = self.ledger[step]
            cause += " That is done by hand, before this step."
        evidence = about.pop("evidence")
        given = setting(self.ledger[event].via, self.ledger.sources)
        if given:
            evidence = {**evidence, "setting": given}
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

    def finding_of(self, severity: str, share: WindowShare, **about: Any) -> Finding:
        """Return a finding about a window, at its first backward unless another `event` is given."""
        about = {"step": share.step, "optimizer": share.optimizer} | about
        event = about.pop("event", share.backwards[0])
        return self.finding(severity, event, **about)


Search = Callable[[LedgerAnalysis], Iterator[Finding]]


def for_each_optimizer(
    search: Callable[[LedgerAnalysis, OptimizerHistory], Iterator[Finding]],
) -> Search:
    """Search the history of each optimizer, whose number the findings get."""

    def search_all(analysis: LedgerAnalysis) -> Iterator[Finding]:
        for optimizer in analysis.optimizers:
            for finding in search(analysis, optimizer):
                yield replace(finding, optimizer=optimizer.optimizer)

    return search_all


def for_each_loss(
    search: Callable[[LedgerAnalysis, list[WindowShare]], Iterator[Finding]],
) -> Search:
    """Search the windows of each loss, of each optimizer."""

    def search_all(analysis: LedgerAnalysis) -> Iterator[Finding]:
        for shares in analysis.objectives.values():
            yield from search(analysis, shares)

    return search_all
