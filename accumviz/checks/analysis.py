"""A ledger as rules ask about it: whose windows, which epoch, what was lost, where it stands in the code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.diffs import placed
from accumviz.checks.report import CHAPTERS, Finding
from accumviz.checks.scripts import Scripts
from accumviz.ledger.events import CHANGED, CONTRIBUTED, Event
from accumviz.ledger.gains import SAME, number, uncancelled
from accumviz.ledger.ledger import Ledger
from accumviz.ledger.lifecycle import erased_for_good, steps_of
from accumviz.ledger.objectives import call_sites
from accumviz.ledger.shares import Shares, used_before


def near(a: Any, b: Any, within: float = SAME) -> Any:
    """Whether two numbers, or each of two arrays, are the same but for rounding."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= within * max(abs(b), 1e-30)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(np.subtract(a, b)) <= within * np.maximum(np.abs(b), 1e-30)


def usual(lengths: Iterable[int]) -> int:
    """Of windows with so many micro-batches, the length of those that hold most of them; 0 where there are none.

    >>> usual([4, 3, 4, 3])
    4
    """
    counts = Counter(lengths)
    return max(counts, key=lambda length: (length * counts[length], length), default=0)


class Part(NamedTuple):
    """What one step consumed of one objective: how many backwards, and what they weigh before clips and averages.

    `weights` are their shares, one for each backward, `total` their sum, `least` and `most` their
    extremes, `each` those of the weights per element, `elements` those of their numbers, which are
    `sizes`. `read` says whether all constants are known, `known` whether the reductions are, too;
    `mean` that none of them is a sum. `again`: an earlier step had consumed one of them.
    """

    optimizer: int
    objective: int
    step: int
    order: int  # the how manyth step of its optimizer
    backwards: tuple[int, ...]
    many: int
    total: float
    least: float
    most: float
    each: tuple[float, float]
    elements: tuple[float, float]
    sizes: tuple[float, ...]
    weights: tuple[float, ...]
    mean: bool
    read: bool
    known: bool
    again: bool
    lost: int

    @property
    def even(self) -> bool:
        """Whether all of it could be read, and has one constant."""
        return (
            self.read
            and self.mean
            and not self.again
            and self.least > 0
            and bool(near(self.least, self.most))
        )


class Loop:
    """One optimizer's life: its parameters, its steps, and which backwards reached it.

    `windows` maps each step to the backwards it consumed. `lost` maps each backward of which no
    optimizer used anything to the event that erased the last of it here.
    """

    def __init__(self, case: Case, optimizer: int) -> None:
        self.case, self.optimizer = case, optimizer
        ledger = case.ledger
        self.columns = np.array(
            [i for i, p in enumerate(ledger.parameters) if optimizer in p.optimizers],
            int,
        )
        self.rank = (
            ledger.parameters[self.columns[0]].rank if self.columns.size else None
        )
        self.steps = steps_of(ledger, (optimizer,))
        self.skipped = np.flatnonzero(case.skipped & (case.optimizer_of == optimizer))
        reached = case.contributed[:, self.columns].any(axis=1)
        self.backwards = np.flatnonzero(reached & case.backward)
        rows = case.once[
            (case.shares.optimizer[case.once] == optimizer)
            & ~case.shares.erased[case.once]
        ]
        self.read_step, self.read = case.shares.step[rows], case.shares.backward[rows]

    @property
    def name(self) -> str:
        """What the optimizer is called."""
        return self.case.optimizer_name(self.optimizer)

    @cached_property
    def windows(self) -> dict[int, list[int]]:
        """Each step and the backwards that it consumed."""
        found: dict[int, list[int]] = {step: [] for step in self.steps.tolist()}
        for step, backward in zip(
            self.read_step.tolist(), self.read.tolist(), strict=True
        ):
            found[step].append(backward)
        return found

    @cached_property
    def first_reads(self) -> dict[int, int]:
        """Each backward that was consumed, and the first step that did."""
        return dict(
            zip(self.read[::-1].tolist(), self.read_step[::-1].tolist(), strict=True)
        )

    @cached_property
    def usual(self) -> int:
        """How many backwards a window usually has that no earlier one had."""
        return usual(Counter(self.first_reads.values()).values())

    @cached_property
    def lost(self) -> dict[int, int]:
        """The backwards that nobody used, and what erased them here; not those that a skipped step had read."""
        case, found = self.case, {}
        for b in self.backwards[case.wasted[self.backwards]].tolist():
            end = int(case.erased[b, self.columns].max())
            tried = np.searchsorted(self.skipped, end) > np.searchsorted(
                self.skipped, b
            )
            if not tried and case.finite(b):
                found[b] = end
        return found

    @cached_property
    def lost_here(self) -> dict[int, int]:
        """The backwards of which this optimizer used nothing, and another one did, and what erased them here."""
        case = self.case
        here: np.ndarray = ~case.used[:, self.columns].any(axis=1) & ~case.wasted
        mine = self.backwards[here[self.backwards]].tolist()
        return {b: int(case.erased[b, self.columns].max()) for b in mine}

    def changed_by(self, event: int) -> bool:
        """Whether the event touched one of this optimizer's `.grad`."""
        return bool((self.case.ledger.state[event, self.columns] & CHANGED).any())

    def changing(self, events: np.ndarray) -> np.ndarray:
        """Those of some events that touched one of this optimizer's `.grad`."""
        found: np.ndarray = events[
            (self.case.ledger.state[np.ix_(events, self.columns)] & CHANGED).any(axis=1)
        ]
        return found

    def within(self, events: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Those of some sorted events that lie between two, in this optimizer's rank."""
        found = events[
            np.searchsorted(events, start, side="right") : np.searchsorted(events, stop)
        ]
        ranks = self.case.ranks[found]
        mine: np.ndarray = found[
            (ranks < 0) | (ranks == (-1 if self.rank is None else self.rank))
        ]
        return mine


class Case:
    """A ledger, its shares, and what several rules ask of both."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.events = ledger, ledger.columns
        self.shares: Shares = ledger.shares()
        self.contributed = (ledger.state & CONTRIBUTED).astype(bool)
        self.backward = self.events.where("kind", "backward")
        self.skipped = self.events.where("kind", "step") & self.events.skipped
        self.optimizer_of = self.events.detail("optimizer_index", 0)
        self.ranks = self.events.column("rank")
        self.once = np.flatnonzero(self.shares.term == 0)

    def at(self, *kinds: str) -> np.ndarray:
        """The events of these kinds."""
        return np.flatnonzero(self.events.where("kind", *kinds))

    @cached_property
    def loops(self) -> list[Loop]:
        """Every optimizer that has parameters here and stepped."""
        owners = sorted({o for p in self.ledger.parameters for o in p.optimizers})
        return [
            loop
            for loop in (Loop(self, o) for o in owners)
            if loop.steps.size or loop.skipped.size
        ]

    @cached_property
    def sites(self) -> np.ndarray:
        """For each event, a number of its call site."""
        return call_sites(self.ledger)

    @cached_property
    def lines(self) -> np.ndarray:
        """For each event, a number of its line and expression, however that was reached."""
        own = [self.events.column(name) for name in ("file", "line", "label")]
        found: np.ndarray = np.unique(
            np.stack(own, axis=1), axis=0, return_inverse=True
        )[1].reshape(-1)
        return found

    @cached_property
    def wasted(self) -> np.ndarray:
        """For each event, whether it is a backward of which all contributions were erased and none used."""
        found: np.ndarray = (
            self.backward & self.contributed.any(axis=1) & ~self.used.any(axis=1)
        )
        return found

    @cached_property
    def used(self) -> np.ndarray:
        """For each contribution, whether a step used it, or may still."""
        found: np.ndarray = (self.erased < 0) | (self.ledger.fates.steps > 0)
        found &= self.contributed
        return found

    @cached_property
    def erased(self) -> np.ndarray:
        """For each contribution what erased it; of what FSDP has scattered, what erased that from the shard."""
        return erased_for_good(self.ledger, self.ledger.fates)

    def finite(self, backward: int) -> bool:
        """Whether what a backward added is known to be neither infinite nor NaN."""
        there = self.contributed[backward]
        return bool(np.isfinite(self.ledger.contribution[backward, there]).all())

    @cached_property
    def parts(self) -> list[Part]:
        """What each step consumed of each objective, step by step."""
        s = self.shares
        if not len(s):
            return []
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # What is maximised has a minus before it, and weighs as much.
            factor = np.abs(s.constant) * s.by_hand
            each = np.where(s.mean, factor / s.elements, factor)
            weight = np.where(s.mean | s.opaque, factor, factor * s.elements)
        order = np.lexsort((s.backward, s.objective, s.step))
        step, objective, optimizer = (
            s.step[order],
            s.objective[order],
            s.optimizer[order],
        )
        change = (np.diff(step, prepend=-1) != 0) | (
            np.diff(objective, prepend=-1) != 0
        )
        starts = np.flatnonzero(change)
        lost, used = s.erased[order], ~s.erased[order]
        weight, each, elements = weight[order], each[order], s.elements[order]
        before = used_before(s.optimizer[order], s.backward[order], step, used)
        followed, opaque = s.followed[order] | lost, s.opaque[order] & used
        low = [
            np.minimum.reduceat(np.where(used, x, np.inf), starts).tolist()
            for x in (weight, each, elements)
        ]
        high = [
            np.maximum.reduceat(np.where(used, x, -np.inf), starts).tolist()
            for x in (weight, each, elements)
        ]
        total = np.add.reduceat(np.where(used, weight, 0), starts).tolist()
        count, gone = (
            np.add.reduceat(which.astype(int), starts).tolist()
            for which in (used, lost)
        )
        mean = np.logical_and.reduceat(s.mean[order] | opaque | lost, starts).tolist()
        read = np.logical_and.reduceat(followed, starts)
        known = (read & ~np.logical_or.reduceat(opaque, starts)).tolist()
        again = np.logical_or.reduceat(before, starts).tolist()
        backward, sizes, weights = (
            s.backward[order].tolist(),
            elements.tolist(),
            weight.tolist(),
        )
        ends = [*starts[1:].tolist(), len(order)]
        place = {
            o: {e: i for i, e in enumerate(steps_of(self.ledger, (o,)).tolist())}
            for o in set(optimizer.tolist())
        }
        used_list, read_list = used.tolist(), read.tolist()
        return [
            Part(
                o,
                ob,
                st,
                place[o][st],
                tuple(backward[k] for k in range(start, end) if used_list[k]),
                count[i],
                total[i],
                low[0][i],
                high[0][i],
                (low[1][i], high[1][i]),
                (low[2][i], high[2][i]),
                tuple(sizes[k] for k in range(start, end) if used_list[k]),
                tuple(weights[k] for k in range(start, end) if used_list[k]),
                mean[i],
                read_list[i],
                known[i],
                again[i],
                gone[i],
            )
            for i, (start, end, o, ob, st) in enumerate(
                zip(
                    starts.tolist(),
                    ends,
                    *(one[starts].tolist() for one in (optimizer, objective, step)),
                    strict=True,
                )
            )
        ]

    def constants(self, part: Part) -> list[float] | None:
        """What the loss of a part was multiplied by in its first backward, one by one, without 1; None: not known.

        What undid each other is left out, too: whoever multiplies by K before a library divides by it does neither.
        """
        rows = self.shares.of(part.step)
        here = np.flatnonzero(
            (rows.objective == part.objective) & (rows.backward == part.backwards[0])
        )
        terms = self.ledger[part.backwards[0]].terms
        if not here.size or int(rows.term[here[0]]) >= len(terms):
            return None
        term = terms[int(rows.term[here[0]])]
        found = term.get("constants", [term.get("factor")])
        if not isinstance(found, list) or any(math.isnan(number(one)) for one in found):
            return None
        return uncancelled([abs(one) for one in found if abs(one) != 1])

    @cached_property
    def scripts(self) -> Scripts:
        """What was kept of the scripts."""
        return Scripts(self.ledger.sources)

    @cached_property
    def objectives(self) -> dict[tuple[int, int], list[Part]]:
        """The parts of each optimizer's objectives that consumed something, in the order of its steps."""
        found: dict[tuple[int, int], list[Part]] = {}
        for part in self.parts:
            if part.many:
                found.setdefault((part.optimizer, part.objective), []).append(part)
        return found

    @cached_property
    def shortened(self) -> dict[tuple[int, int], list[tuple[Part, list[float]]]]:
        """The windows of objectives of which `.grad` was changed by hand after each backward, in each of them.

        With each, how many times less was left after it of every backward than of the next one.
        """
        every = {key: self._shortened(parts) for key, parts in self.objectives.items()}
        return {key: found for key, found in every.items() if found}

    def _shortened(self, parts: list[Part]) -> list[tuple[Part, list[float]]]:
        found = []
        for part in parts:
            if part.many < 2:
                continue
            if not part.read or part.again or near(part.least, part.most):
                return []
            rows = self.shares.of(part.step)
            left = rows.by_hand[
                (rows.objective == part.objective) & ~rows.erased
            ].tolist()
            ratios = [
                later / early if early else 0.0 for early, later in pairwise(left)
            ]
            if not all(1 - SAME <= ratio < math.inf for ratio in ratios):
                return []
            found.append((part, ratios))
        return found

    @cached_property
    def parts_of(self) -> dict[int, list[Part]]:
        """The parts of each step."""
        found: dict[int, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.step, []).append(part)
        return found

    @cached_property
    def moved(self) -> np.ndarray:
        """For each event, whether it is a backward before which the first parameter's weights were moved by hand."""
        return self.events.detail("moved", default=False)

    @cached_property
    def armed(self) -> list[bool | None]:
        """For each event, whether the last forward had armed the all-reduce of this backward; None without DDP."""
        return list(self.events.detail("armed", None).tolist())

    @cached_property
    def no_sync(self) -> list[bool | None]:
        """For each event, whether the flag was down when this backward began; None without DDP."""
        return list(self.events.detail("no_sync", None).tolist())

    @cached_property
    def has_loaders(self) -> bool:
        """Whether a loader was seen at work."""
        return bool(self.events.where("kind", "loader").any())

    @cached_property
    def epochs(self) -> list[tuple[int, int]]:
        """Every run through a loader: its first event and its last (the number of events where it has no end)."""
        begun: dict[tuple[int, str], int] = {}
        found: dict[int, int] = {}
        for event in (self.ledger[e] for e in self.at("loader").tolist()):
            which = (
                -1 if event.rank is None else event.rank,
                str(event.details.get("loader")),
            )
            if event.details.get("what") == "begins":
                if which in begun:  # left early
                    found[begun[which]] = event.index
                begun[which] = event.index
                found[event.index] = len(self.events)
            elif which in begun:
                found[begun.pop(which)] = event.index
        return sorted(found.items())

    def epoch(self, event: int, rank: int | None = None) -> tuple[int, int] | None:
        """The run through a loader in which an event fell: the innermost, or else the one that ended last before it.

        Some loaders look ahead: theirs has ended when the last batches that it gave are used.
        """
        mine = [
            e
            for e in self.epochs
            if e[0] < event and self.ranks[e[0]] in (-1, -1 if rank is None else rank)
        ]
        around = [e for e in mine if e[1] > event]
        return around[-1] if around else max(mine, key=lambda e: e[1], default=None)

    def trains(self, begins: int, ends: int) -> bool:
        """Whether anything was learnt in a run through a loader; an evaluation has no backward."""
        return bool(self.backward[begins:ends].any())

    def ended(self, epoch: tuple[int, int] | None) -> bool:
        """Whether a run through a loader came to the loader's end."""
        return (
            epoch is not None
            and epoch[1] < len(self.events)
            and self.ledger[epoch[1]].details.get("what") == "ends"
        )

    @property
    def ran_out(self) -> bool:
        """Whether the script came to its end while this was recorded."""
        return self.ledger.meta.get("ended") == "exit"

    def listed(self, name: str) -> Sequence[Any]:
        """What the ledger's meta lists under this name; nothing where it is no list."""
        found = self.ledger.meta.get(name)
        return found if isinstance(found, list | tuple) else ()

    def settings(self, optimizer: int) -> Mapping[str, Any]:
        """What an optimizer was made with; empty where that was not recorded."""
        known = self.listed("optimizer_settings")
        found = known[optimizer] if optimizer < len(known) else {}
        return found if isinstance(found, Mapping) else {}

    def optimizer_name(self, optimizer: int) -> str:
        """What an optimizer is called."""
        names = self.listed("optimizers")
        return (
            str(names[optimizer])
            if optimizer < len(names)
            else f"optimizer {optimizer}"
        )

    def finding(
        self,
        rule: str,
        severity: str,
        event: int,
        *,
        evidence: Mapping[str, Any],
        cause: str,
        step: int | None = None,
        cure: str = "",
        times: int = 1,
        optimizer: int | None = None,
        at: Event | None = None,
    ) -> Finding:
        """A finding at this event, on its line or on that of `at`, which led to it.

        A change by hand, which has no line, is told at the next one that has.
        """
        own = self.ledger[event]
        at = at or own
        if (at.file, at.line) != (own.file, own.line):
            evidence = {**evidence, "by way of": f"{own.file}:{own.line} {own.source}"}
        if at.kind == "edit" and not at.line:
            later = (self.ledger[e] for e in range(event + 1, len(self.events)))
            at = next((e for e in later if e.line and e.rank == at.rank), at)
            cause += " That is done by hand, above this line." if at.line else ""
        about = {
            "step": step,
            "event": event,
            "file": at.file,
            "line": at.line,
            "source": at.source,
        }
        return Finding(
            rule,
            severity,
            evidence=dict(evidence),
            cause=cause,
            cure=placed(cure, self.ledger.sources),
            chapter=CHAPTERS[rule],
            times=times,
            optimizer=optimizer,
            **about,  # type: ignore[arg-type] # one of each kind
        )

    def of_part(
        self,
        rule: str,
        severity: str,
        part: Part,
        *,
        event: int | None = None,
        **about: Any,
    ) -> Finding:
        """A finding about a part, at its first backward unless another `event` is given."""
        at = part.backwards[0] if event is None else event
        return self.finding(
            rule, severity, at, step=part.step, optimizer=part.optimizer, **about
        )


def reduces(case: Case, loop: Loop, event: int) -> float:
    """By what factor a clip has shortened this optimizer's gradients; 1 where it did nothing."""
    ledger = case.ledger
    if event == 0:
        return 1.0
    columns = loop.columns[(ledger.state[event, loop.columns] & CHANGED).astype(bool)]
    before, after = (
        ledger.grad[event - 1, columns].astype(float),
        ledger.grad[event, columns].astype(float),
    )
    some = np.isfinite(before) & np.isfinite(after) & (before > 0)
    return float((after[some] / before[some]).min(initial=1.0))
