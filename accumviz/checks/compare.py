"""Compare two recordings step by step: how far their gradients are apart, where they part, and why."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks.report import plain
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT, Event
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.ledger.shares import Shares
from accumviz.show import Displayed, counted, literal, save_result

# Gradients that differ by less than this, relative to their size, differ by the order of additions.
_ROUNDING, _ROUNDING_FLOAT64 = 1e-4, 1e-10
# Norms are kept in single precision: a smaller relative difference between two of them may be rounding.
_NORM_ROUNDING = 4e-7
# Shares, and gradients that differ by a factor, are equal to within this.
_TOLERANCE = 2e-3
_LISTED = 8
_NORMS_ONLY = "only norms were kept"
_NONE_IN = "zero or none in"


@dataclass(frozen=True)
class ParameterDistance:
    """The distance between two gradients of one parameter; where there is none, it counts as 0.

    `squared` is ‖a − b‖² (NaN where elements were not kept), `at_least` a lower bound of it, `size` is
    ‖b‖². `note` says why a number is missing, or which side has no gradient, or only zeros.
    """

    name: str
    squared: float
    at_least: float
    size: float
    note: str = ""

    @property
    def relative(self) -> float:
        """‖a − b‖ / ‖b‖; NaN where it is not known."""
        return _root_ratio(self.squared, self.size)


@dataclass(frozen=True)
class StepPair:
    """Two steps, and how far the gradients that they read are apart.

    `a` and `b` are indices of events. `relative` is ‖a − b‖ / ‖b‖ (NaN where only norms were kept, or a
    gradient is not finite), `at_least` a lower bound of it, `parameters` the same for each parameter.
    """

    a: int
    b: int
    optimizer: str
    relative: float
    at_least: float
    parameters: tuple[ParameterDistance, ...]
    note: str = ""


@dataclass(frozen=True)
class Parting:
    """The first events at which two recordings differ, and in what."""

    a: Event
    b: Event
    said: str


@dataclass(frozen=True)
class Cause:
    """A cause by name, what it does in a sentence, and the numbers that prove it."""

    name: str
    said: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison(Displayed):
    """The result of `compare`; errors are relative to `b`.

    `steps` are the pairs of steps in order, `first` the place of the first pair that differs by more than
    rounding (None: none does). `parting` is the first event at which the recordings part. `causes` are
    those that the shares prove, often none. `missing` lists parameters that only one recording has.
    """

    steps: tuple[StepPair, ...]
    first: int | None
    parting: Parting | None = None
    causes: tuple[Cause, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> StepPair:
        """The first pair that differs; where none does, one that is not known, or the one that is furthest apart."""
        if self.first is not None:
            return self.steps[self.first]
        return max(
            self.steps,
            key=lambda pair: (math.isnan(pair.relative), pair.relative),
        )

    @property
    def relative(self) -> float:
        """The relative error of the gradient at `step`: ‖a − b‖ / ‖b‖."""
        return self.step.relative

    @property
    def verdict(self) -> str:
        """`"equal"`, `"equal to rounding"`, `"apart"`, or `"not known"` (elements not kept, or not finite)."""
        if self.first is not None:
            return "apart"
        if math.isnan(self.relative):
            return "not known"
        return "equal to rounding" if self.relative else "equal"

    @property
    def summary(self) -> str:
        """The result in one line."""
        count = f"({counted(len(self.steps), 'step')} compared)"
        if self.first is None:
            return f"{self.verdict} {count}"
        result = self.step.note
        if self.step.at_least > 0:
            result = f"the gradient is off by {error(self.step)}"
        return f"{result} at step {self.first + 1} {count}"

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the comparison as text."""
        lines = [f"Comparison: {self.summary}"]
        for cause in self.causes:
            lines.append(f"  cause: {cause.name}. {cause.said}")
        if self.parting is not None:
            lines.append(f"  they part at: {self.parting.said}")
            lines.append(f"    a: {place(self.parting.a)}")
            lines.append(f"    b: {place(self.parting.b)}")
        for pair in self.steps[:_LISTED]:
            line = f"  event {pair.a} of a, event {pair.b} of b: {error(pair)}"
            lines.append(f"{line} ({pair.note})" if pair.note else line)
        for share, name, off in self.by_parameter():
            lines.append(f"  {name}: {off}, {share} of the squared error")
        for name in self.missing:
            lines.append(f"  only in one of them: {name}")
        for note in self.notes:
            lines.append(f"  note: {note}")
        return "\n".join(literal(line) for line in lines)

    def by_parameter(self) -> list[tuple[str, str, str]]:
        """Return share of the squared error, name and error of the parameters that are furthest apart at `step`."""
        apart = [part for part in self.step.parameters if part.squared != 0]
        apart.sort(key=lambda part: -part.at_least)
        whole = math.fsum(part.squared for part in apart)
        rows = []
        for part in apart[:_LISTED]:
            share = percent(part.squared / whole)
            rows.append((share, part.name, part.note or percent(part.relative)))
        return rows

    def to_json(self) -> str:
        """Return the comparison as one JSON object, with NaN and the infinities by name."""
        whole = asdict(self)
        whole |= {"verdict": self.verdict, "relative": self.relative}
        return json.dumps(plain(whole), allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write a page (`.html`), JSON (`.json`) or, under any other name, text."""
        save_result(path, self)


def compare(a: Ledger | Recorded, b: Ledger | Recorded) -> Comparison:
    """Compare the gradients that the steps of two recordings read.

    The error is that of `a` relative to `b`: ‖a − b‖ / ‖b‖ over all parameters that both have, by name.
    It is exact where both kept every element (`record(..., exact=N)` keeps tensors of up to N elements),
    and bounded from below where they kept norms. A parameter that a step's optimizer does not own counts
    as 0 there. A recording without a step, such as one large batch, is compared by what is in `.grad` at
    its end. Once the weights have parted, later steps differ for that reason, too: look at the first.

    A cause is named only where gradients or shares prove it; there may be others.

    Raises `TypeError` for what is no recording, `ValueError` when they have no parameter, or no gradient, in common.

    >>> import torch, accumviz as av
    >>> def recorded(k):
    ...     w = torch.tensor([1.0, 3.0], requires_grad=True)
    ...     with av.record(w) as recording:
    ...         for x in (4.0, 2.0):
    ...             (((2 - w) * x).square().sum() / k).backward()
    ...     return recording
    >>> result = av.compare(recorded(1), recorded(2))
    >>> result.relative, result.parting.said
    (1.0, 'backward 1 of the window: what a adds is off by 100 %')
    """
    a, b = recorded(a, "compare"), recorded(b, "compare")
    columns, missing = _common_parameters(a, b)
    ledgers = _Ledgers(a, b, columns)
    pairs, notes = _paired_events(a, b)
    dtypes = {parameter.dtype for parameter in (*a.parameters, *b.parameters)}
    rounding = _ROUNDING_FLOAT64 if dtypes == {"float64"} else _ROUNDING
    steps: list[StepPair] = []
    first = None
    for number, (step, other) in enumerate(pairs):
        pair = _step_pair(ledgers, step, other)
        if first is not None:
            pair = replace(pair, note="the weights differ by now")
        elif step.skipped != other.skipped or pair.at_least > rounding:
            first = number
        steps.append(pair)
    parts = [part for pair in steps for part in pair.parameters]
    if any(part.note == _NORMS_ONLY for part in parts):
        notes += (f"of some parameters {_NORMS_ONLY}: see `exact=N` of `record`",)
    result = Comparison(tuple(steps), first, missing=missing, notes=notes)
    if first is None:
        return result
    windows = _window(a, pairs[first][0]), _window(b, pairs[first][1])
    parting = _parting(ledgers, *windows, result.step, rounding)
    causes: list[Cause] = []
    if result.step.at_least > rounding:
        causes = _causes(ledgers, *windows, result.step)
    return replace(result, parting=parting, causes=tuple(causes))


# --- what is compared -------------------------------------------------------------------------

# A parameter that both have: its name, its column in a, its column in b.
_Column = tuple[str, int, int]


def _common_parameters(a: Ledger, b: Ledger) -> tuple[list[_Column], tuple[str, ...]]:
    """Return the parameters of one name and shape in both, and descriptions of the others."""
    in_a, in_b = _columns(a), _columns(b)
    common = [(key[0], in_a[key], in_b[key]) for key in in_a if key in in_b]
    missing = [f"{name} {shape} in a" for name, shape in in_a.keys() - in_b.keys()]
    missing += [f"{name} {shape} in b" for name, shape in in_b.keys() - in_a.keys()]
    if not common:
        names_a, names_b = [name for name, _ in in_a], [name for name, _ in in_b]
        raise ValueError(
            f"compare() found no parameter that both have: a has {_some(names_a)}, b has {_some(names_b)}; "
            "expected two recordings of one model, recorded in the same way, as in record(model, optimizer)"
        )
    return common, tuple(sorted(missing))


def _columns(ledger: Ledger) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return the column of each name and shape."""
    columns = {}
    for column, parameter in enumerate(ledger.parameters):
        if not parameter.unsharded_of:
            columns[parameter.name, parameter.shape] = column
    return columns


def _some(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more or "none"


def _paired_events(
    a: Ledger, b: Ledger
) -> tuple[list[tuple[Event, Event]], tuple[str, ...]]:
    """Pair the steps of each optimizer in order; without any such pair, the first steps or the ends."""
    of_a, of_b = _steps(a), _steps(b)
    pairs: list[tuple[Event, Event]] = []
    for optimizer in of_a.keys() & of_b.keys():
        pairs += zip(of_a[optimizer], of_b[optimizer], strict=False)
    if not pairs:
        note = "no step in common: a first step, or the end of a recording without one, is compared"
        return [(_step_or_end(a, "a"), _step_or_end(b, "b"))], (note,)
    pairs.sort(key=lambda pair: pair[0].index)
    counts = len(a.of("step")), len(b.of("step"))
    if counts[0] == counts[1]:
        return pairs, ()
    return pairs, (f"steps: {counts[0]} in a, {counts[1]} in b",)


def _steps(ledger: Ledger) -> dict[int, list[Event]]:
    """Return the steps of each optimizer."""
    steps = defaultdict(list)
    for event in ledger.of("step"):
        steps[_optimizer(event)].append(event)
    return steps


def _optimizer(step: Event) -> int:
    return int(step.details.get("optimizer_index", 0))


def _step_or_end(ledger: Ledger, side: str) -> Event:
    """Return the first step, else the last event after which there is a gradient."""
    for step in ledger.of("step"):
        return step
    with_gradient = np.flatnonzero((ledger.state & PRESENT).any(axis=1))
    if not with_gradient.size:
        raise ValueError(
            f"compare() found no gradient in {side}: it has neither a step nor a backward; expected recordings of a "
            "loop, or of one backward"
        )
    return ledger[int(with_gradient[-1])]


# --- distances --------------------------------------------------------------------------------


class _Reading(NamedTuple):
    """A gradient or a contribution: its norm, and its elements where they were kept."""

    norm: float = 0.0
    elements: np.ndarray | None = None


class _Ledgers(NamedTuple):
    """Two ledgers, and the parameters that both have."""

    a: Ledger
    b: Ledger
    columns: Sequence[_Column]

    def distances(
        self, one: Event, other: Event, of: str = "grad", factor: float = 1.0
    ) -> tuple[ParameterDistance, ...]:
        """Measure each parameter's distance between an event of a and, times a factor, one of b."""
        owned_a, owned_b = _owned(self.a, one), _owned(self.b, other)
        distances = []
        for name, i, j in self.columns:
            in_a = in_b = _Reading()
            if i in owned_a:
                in_a = _gradient(self.a, i, one, of)
            if j in owned_b:
                in_b = _gradient(self.b, j, other, of)
            distances.append(_distance(name, in_a, in_b, factor))
        return tuple(distances)


def _owned(ledger: Ledger, event: Event) -> Sequence[int]:
    """Return the parameters that an event can read: of a step those of its optimizer, if that is known."""
    every = range(len(ledger.parameters))
    if event.kind != "step":
        return every
    optimizer = _optimizer(event)
    owned = [p for p in every if optimizer in ledger.parameters[p].optimizers]
    return owned or every


def _gradient(ledger: Ledger, p: int, event: Event, of: str) -> _Reading:
    """Return a parameter's `.grad` after an event, or what the event added (`of="contribution"`)."""
    i = event.index
    bit, norms = PRESENT, ledger.grad
    if of == "contribution":
        bit, norms = CONTRIBUTED, ledger.contribution
    if not ledger.state[i, p] & bit:
        return _Reading()
    if p not in ledger.exact:
        return _Reading(float(norms[i, p]))
    elements = ledger.values(p, of)[i]
    return _Reading(float(np.linalg.norm(elements)), elements)


def _distance(name: str, a: _Reading, b: _Reading, factor: float) -> ParameterDistance:
    """Measure the distance of one gradient from another one times a factor."""
    norms = {"a": a.norm, "b": abs(factor) * b.norm}
    odd = [side for side, norm in norms.items() if not math.isfinite(norm)]
    if odd:
        note = f"not finite in {' and '.join(odd)}"
        return ParameterDistance(name, math.nan, math.nan, math.nan, note)
    least, most = sorted(norms.values())
    size = norms["b"] * norms["b"]
    if least == 0:
        side = "b" if norms["a"] else "a"
        note = f"{_NONE_IN} {side}" if most else ""
        return ParameterDistance(name, most * most, most * most, size, note)
    if a.elements is not None and b.elements is not None:
        expected = factor * b.elements
        squared = float(np.square(a.elements - expected).sum())
        size = float(np.square(expected).sum())
        return ParameterDistance(name, squared, squared, size)
    apart = max(most - least - _NORM_ROUNDING * most, 0.0)
    return ParameterDistance(name, math.nan, apart * apart, size, _NORMS_ONLY)


def _step_pair(ledgers: _Ledgers, step: Event, other: Event) -> StepPair:
    """Measure how far apart the gradients are that two steps read."""
    relative, at_least = 0.0, 0.0
    parts: tuple[ParameterDistance, ...] = ()
    note = "both steps were skipped"
    if not (step.skipped and other.skipped):
        parts = ledgers.distances(step, other)
        relative, at_least = _relative(parts)
        notes = {part.note for part in parts if math.isnan(part.size)}
        if step.skipped:
            notes.add("a's step was skipped")
        if other.skipped:
            notes.add("b's step was skipped")
        note = "; ".join(sorted(notes))
    return StepPair(
        a=step.index,
        b=other.index,
        optimizer=step.label or "",
        relative=relative,
        at_least=at_least,
        parameters=parts,
        note=note,
    )


def _relative(parts: Sequence[ParameterDistance]) -> tuple[float, float]:
    """Return the relative distance over all of some parameters, and a lower bound of it."""
    size = math.fsum(part.size for part in parts)
    squared = math.fsum(part.squared for part in parts)
    at_least = math.fsum(part.at_least for part in parts)
    return _root_ratio(squared, size), _root_ratio(at_least, size)


def _root_ratio(squared: float, size: float) -> float:
    """Return the root of one square over another; a distance from nothing is infinite.

    >>> _root_ratio(1.0, 4.0), _root_ratio(0.0, 0.0), _root_ratio(1.0, 0.0)
    (0.5, 0.0, inf)
    """
    if size == 0 and squared > 0:
        return math.inf
    return math.sqrt(squared / size) if size else 0.0


# --- causes -----------------------------------------------------------------------------------


class _Window(NamedTuple):
    """What one step read: the backwards that it consumed, and their shares."""

    ledger: Ledger
    step: Event
    backwards: list[int]
    shares: Shares

    def sum_of_shares(self) -> float:
        """Return the sum of the shares; NaN where they are not known."""
        return math.fsum(self.shares.share) if len(self.shares) else math.nan

    def spread(self) -> float:
        """Return the largest weight of an element over the smallest of its objective; NaN where it is not known."""
        spread = 1.0 if len(self.shares) else math.nan
        for objective in np.unique(self.shares.objective):
            of_objective = self.shares.objective == objective
            weights = self.shares.per_element[of_objective]
            least, most = float(weights.min()), float(weights.max())
            if not 0 < least <= most < math.inf:
                return math.nan
            spread = max(spread, most / least)
        return spread


def _window(ledger: Ledger, step: Event) -> _Window:
    """Return what is in the gradients that a step reads, or that a recording ends with."""
    live: set[int] = set()
    for p in _owned(ledger, step):
        live.update(ledger.live(step.index, p))
    backwards = sorted(index for index in live if ledger[index].kind == "backward")
    rows = ledger.shares().of(step.index)
    consumed = rows.take(np.isin(rows.backward, backwards))
    return _Window(ledger, step, backwards, consumed)


def _causes(ledgers: _Ledgers, a: _Window, b: _Window, pair: StepPair) -> list[Cause]:
    """Return the causes that gradients and shares prove."""
    factor = _factor(ledgers, a, b)
    if factor:
        return [factor]
    causes = []
    spreads = {"a": a.spread(), "b": b.spread()}
    for side, other in (("a", "b"), ("b", "a")):
        note = f"{_NONE_IN} {side}"
        names = [part.name for part in pair.parameters if part.note == note]
        if names:
            said = f"What {side}'s step reads is zero or none, and what {other}'s reads is not: {_some(names)}."
            causes.append(Cause("no gradient", said, {"parameters": names}))
        if spreads[other] <= 1 + _TOLERANCE < spreads[side]:
            said = (
                f"In {side}, an element of one micro-batch weighs up to {spreads[side]:.4g} times as much as one of "
                "another; in the other recording all weigh the same."
            )
            evidence = {"largest weight over smallest": [*spreads.values()]}
            causes.append(Cause("uneven shares", said, evidence))
    return causes


def _factor(ledgers: _Ledgers, a: _Window, b: _Window) -> Cause | None:
    """Return the factor between two gradients, if it is the one between the sums of their shares."""
    sums = [a.sum_of_shares(), b.sum_of_shares()]
    factor = sums[0] / sums[1] if sums[1] else math.nan
    left, _ = _relative(ledgers.distances(a.step, b.step, factor=factor))
    if math.isnan(left) or left > _TOLERANCE or abs(factor - 1) <= _TOLERANCE:
        return None
    counts = [len(a.backwards), len(b.backwards)]
    said = (
        f"a's gradient is {factor:.4g} times b's, and so are its shares: they add up to {sums[0]:.4g} in a "
        f"({counts[0]} backwards) and to {sums[1]:.4g} in b ({counts[1]})."
    )
    evidence = {"factor": factor, "sums of shares": sums, "backwards": counts}
    return Cause("factor", said, evidence)


# --- where they part --------------------------------------------------------------------------


def _parting(
    ledgers: _Ledgers, a: _Window, b: _Window, pair: StepPair, rounding: float
) -> Parting | None:
    """Return the first events of two windows that differ; None where one is not finite before."""
    counts = len(a.backwards), len(b.backwards)
    if counts[0] != counts[1]:
        many = counted(counts[0], "backward")
        said = f"the step: a has {many} in this window, b has {counts[1]}"
        return Parting(a.step, b.step, said)
    number = 0
    for one, other in zip(_events(a), _events(b), strict=False):
        if one.kind != other.kind:
            return Parting(one, other, f"a has a {one.kind} where b has a {other.kind}")
        what, of = f"{one.kind}: what a leaves", "grad"
        if one.kind == "backward":
            number += 1
            what, of = f"backward {number} of the window: what a adds", "contribution"
        _, at_least = _relative(ledgers.distances(one, other, of))
        if math.isnan(at_least):
            return None
        if at_least > rounding:
            return Parting(one, other, f"{what} is off by {percent(at_least)}")
    off = error(pair) if pair.at_least > 0 else pair.note
    return Parting(a.step, b.step, f"the step: {off}")


def _events(window: _Window) -> list[Event]:
    """Return the consumed backwards, what else changed `.grad` after the first of them, and the step."""
    ledger, last = window.ledger, window.step.index
    first = min(window.backwards, default=last)
    counts = (ledger.state & CHANGED).any(axis=1)
    counts &= ~ledger.columns.where("kind", "backward")
    counts[[*window.backwards, last]] = True
    indices = np.flatnonzero(counts[first : last + 1]) + first
    return [ledger[index] for index in indices.tolist()]


# --- words ------------------------------------------------------------------------------------


def error(pair: StepPair) -> str:
    """Return the relative error of a pair of steps in words."""
    if math.isnan(pair.relative) and pair.at_least >= 0:
        return f"at least {percent(pair.at_least)} (from norms)"
    return percent(pair.relative)


def percent(number: float) -> str:
    """Return a share in words.

    >>> percent(0.2253), percent(3.0), percent(float("inf")), percent(float("nan"))
    ('22.5 %', '300 %', '∞ %', 'not known')
    """
    if math.isnan(number):
        return "not known"
    if math.isinf(number):
        return "∞ %"
    return f"{100 * number:.3g} %".replace("-", "−")


def place(event: Event) -> str:
    """Return an event's index, kind and line."""
    where = f"event {event.index}, {event.kind}"
    if event.file:
        where += f" {event.file}:{event.line}  {event.source}"
    return where
