"""Compare two recordings step by step: how far their gradients are apart, where they part, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accumviz import arguments
from accumviz.checks.report import plain
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT, Event
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.ledger.shares import Share
from accumviz.show import Displayed, counted, literal, save_page

# Two gradients that differ by less than this, relative to their size, differ by the order of additions.
_ROUNDING = {"float64": 1e-10}
_SINGLE = 1e-4
# Norms are kept in single precision: a smaller relative difference between two of them may be rounding.
_NORM_ROUNDING = 4e-7
# One factor fits two gradients, or two sums of shares, if it leaves no more than this.
_FACTOR_TOLERANCE = 2e-3
_LISTED = 8
_NORMS_ONLY = "only norms were kept"
_SKIPPED = "was skipped"


class ParameterDistance(NamedTuple):
    """The distance between two gradients of one parameter.

    `squared` is ‖a − b‖² (NaN where elements were not kept), `at_least` a lower bound of it, `size` is
    ‖b‖². `note` says why a number is missing, or that only one side has a gradient.
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


class StepPair(NamedTuple):
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


class Parting(NamedTuple):
    """The first events at which two recordings differ, and in what."""

    a: Event
    b: Event
    said: str


class Cause(NamedTuple):
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
            self.steps, key=lambda pair: (math.isnan(pair.relative), pair.relative)
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
        if any(math.isnan(pair.relative) for pair in self.steps):
            return "not known"
        if all(pair.relative == 0 for pair in self.steps):
            return "equal"
        return "equal to rounding"

    @property
    def summary(self) -> str:
        """The result in one line."""
        count = f"{counted(len(self.steps), 'step')} compared"
        unknown = self.step.note if math.isnan(self.step.at_least) else ""
        if self.first is None:
            return f"{self.verdict}{unknown and ': '}{unknown} ({count})"
        result = unknown or f"the gradient is off by {error(self.step)}"
        return f"{result} at step {self.first + 1} ({count})"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the comparison as text."""
        lines = [f"Comparison: {self.summary}"]
        for cause in self.causes:
            lines.append(f"  cause: {cause.name}. {literal(cause.said)}")
        if self.first is not None and not self.causes:
            lines.append("  cause: not named")
        if self.parting is not None:
            lines.append(f"  they part at: {literal(self.parting.said)}")
            lines.append(f"    a: {place(self.parting.a)}")
            lines.append(f"    b: {place(self.parting.b)}")
        if len(self.steps) > 1:
            lines += ["", "  event of a  event of b  error"]
            for pair in self.steps[:_LISTED]:
                note = f"  ({pair.note})" if pair.note else ""
                lines.append(f"  {pair.a:>10}  {pair.b:>10}  {error(pair)}{note}")
            if len(self.steps) > _LISTED:
                lines.append(f"  … {len(self.steps) - _LISTED} more")
        if self.first is not None:
            lines += ["", "  of it, by parameter:"]
            for share, name, off in self.by_parameter():
                lines.append(f"  {share:>7}  {literal(name)}: {off}")
        if self.missing:
            lines += ["", f"  only in one of them: {literal(_some(self.missing))}"]
        lines += [f"  note: {literal(note)}" for note in self.notes]
        return "\n".join(lines)

    def by_parameter(self) -> list[tuple[str, str, str]]:
        """Return share of the squared error, name and error of the parameters that are furthest apart at `step`."""
        parts = sorted(self.step.parameters, key=lambda part: -part.at_least)
        whole = sum(part.squared for part in parts if not math.isnan(part.squared))
        rows = []
        for part in parts[:_LISTED]:
            known = whole and not math.isnan(part.squared)
            share = f"{100 * part.squared / whole:.0f} %" if known else "?"
            rows.append((share, part.name, part.note or percent(part.relative)))
        return rows

    def to_json(self) -> str:
        """Return the comparison as one JSON object, with NaN and the infinities by name."""
        whole = asdict(self) | {"verdict": self.verdict, "relative": self.relative}
        whole["steps"] = []
        for pair in self.steps:
            parameters = [part._asdict() for part in pair.parameters]
            whole["steps"].append(pair._asdict() | {"parameters": parameters})
        whole["causes"] = [cause._asdict() for cause in self.causes]
        if self.parting is not None:
            a, b = asdict(self.parting.a), asdict(self.parting.b)
            whole["parting"] = {"a": a, "b": b, "said": self.parting.said}
        return json.dumps(plain(whole), allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write a page (`.html`), JSON (`.json`) or, under any other name, text."""
        arguments.file("path", path)
        suffix = Path(path).suffix.lower()
        if suffix in (".html", ".htm"):
            save_page(path, "Comparison", self.to_html())
            return
        text = self.to_json() if suffix == ".json" else self.text()
        Path(path).write_text(text + "\n", "utf-8", "replace")


def compare(a: Ledger | Recorded, b: Ledger | Recorded) -> Comparison:
    """Compare the gradients that the steps of two recordings read.

    The error is that of `a` relative to `b`: ‖a − b‖ / ‖b‖ over all parameters that both have, by name.
    It is exact where both kept every element (`record(..., exact=N)` keeps tensors of up to N elements),
    and bounded from below where they kept norms. A parameter that a step's optimizer does not own counts
    as 0 there. A recording without a step, such as one large batch, is compared by what is in `.grad` at
    its end. Once the weights have parted, later steps differ for that reason, too: look at the first.

    A cause is named only where shares or optimizers prove it.

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
    pairs, notes = _paired_steps(a, b)
    dtypes = {a.parameters[i].dtype for _, i, _ in columns}
    dtypes |= {b.parameters[j].dtype for *_, j in columns}
    rounding = max(_ROUNDING.get(dtype, _SINGLE) for dtype in dtypes)
    steps: list[StepPair] = []
    first = None
    for step, other, optimizer in pairs:
        pair = _step_pair(a, b, step, other, optimizer, columns)
        if first is not None:
            pair = pair._replace(note="the weights differ by now")
        elif _SKIPPED in pair.note or _least(pair.relative, pair.at_least) > rounding:
            first = len(steps)
        steps.append(pair)
    notes += _notes_on_norms(steps)
    if first is None:
        return Comparison(tuple(steps), None, missing=missing, notes=notes)
    one, other_one = _read_by(a, steps[first].a), _read_by(b, steps[first].b)
    causes = tuple(_causes(one, other_one, steps[first], columns))
    parting = _parting(one, other_one, columns, rounding)
    return Comparison(tuple(steps), first, parting, causes, missing, notes)


# --- what is compared -------------------------------------------------------------------------

# A parameter that both have: its name, its column in a, its column in b.
_Column = tuple[str, int, int]


def _common_parameters(a: Ledger, b: Ledger) -> tuple[list[_Column], tuple[str, ...]]:
    """Return the parameters of one name and shape in both, and descriptions of the others."""
    in_a, in_b = (
        {p.name: i for i, p in enumerate(ledger.parameters) if not p.unsharded_of}
        for ledger in (a, b)
    )
    common, missing = [], []
    for name, i in in_a.items():
        if name not in in_b:
            missing.append(f"{name} (a)")
            continue
        shapes = a.parameters[i].shape, b.parameters[in_b[name]].shape
        if shapes[0] == shapes[1]:
            common.append((name, i, in_b[name]))
        else:
            missing.append(f"{name} (shape {shapes[0]} in a, {shapes[1]} in b)")
    missing += [f"{name} (b)" for name in in_b if name not in in_a]
    if not common:
        raise ValueError(
            f"compare() found no parameter that both have: a has {_some(list(in_a))}, b has {_some(list(in_b))}; "
            "expected two recordings of one model, recorded in the same way, as in record(model, optimizer)"
        )
    return common, tuple(missing)


def _some(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more or "none"


def _paired_steps(
    a: Ledger, b: Ledger
) -> tuple[list[tuple[int, int, int]], tuple[str, ...]]:
    """Pair the steps of each optimizer in order, as (event of a, event of b, optimizer).

    Where one ledger has no step, its last gradient is paired with the other's first step; without any
    step, the optimizer is -1.
    """
    of_a, of_b = _steps(a), _steps(b)
    if not (of_a and of_b):
        ends = (_first_step_or_end("a", a, of_a), _first_step_or_end("b", b, of_b))
        note = "one of them has no step: what its `.grad` holds at its end is compared with the first step of the other"
        optimizer = next(iter(of_a or of_b), -1)
        return [(*ends, optimizer)], (note,) if of_a or of_b else ()
    pairs, notes = [], []
    for optimizer in sorted({*of_a, *of_b}):
        steps, others = of_a.get(optimizer, []), of_b.get(optimizer, [])
        for step, other in zip(steps, others, strict=False):
            pairs.append((step, other, optimizer))
        if len(steps) != len(others):
            note = (
                f"steps of optimizer {optimizer}: {len(steps)} in a, {len(others)} in b"
            )
            notes.append(note)
    return sorted(pairs), tuple(notes)


def _steps(ledger: Ledger) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for event in ledger.of("step"):
        optimizer = int(event.details.get("optimizer_index", 0))
        steps.setdefault(optimizer, []).append(event.index)
    return steps


def _first_step_or_end(side: str, ledger: Ledger, steps: dict[int, list[int]]) -> int:
    """Return the first step, else the last event after which there is a gradient."""
    if steps:
        return min(of_optimizer[0] for of_optimizer in steps.values())
    with_gradient = np.flatnonzero((ledger.state & PRESENT).any(axis=1))
    if not with_gradient.size:
        raise ValueError(
            f"compare() found no gradient in {side}: it has neither a step nor a backward; expected recordings of a "
            "loop, or of one backward"
        )
    return int(with_gradient[-1])


# --- distances --------------------------------------------------------------------------------


def _step_pair(
    a: Ledger,
    b: Ledger,
    step: int,
    other: int,
    optimizer: int,
    columns: Sequence[_Column],
) -> StepPair:
    """Measure how far apart the gradients are that two steps read."""
    label = a[step].label or ""
    skipped = [a[step].skipped, b[other].skipped]
    if all(skipped):
        return StepPair(step, other, label, 0.0, 0.0, (), "both steps were left out")
    parts = []
    for name, i, j in columns:
        of_a = _read(a, i, step, PRESENT) if _owns(a, optimizer, i) else None
        of_b = _read(b, j, other, PRESENT) if _owns(b, optimizer, j) else None
        if _owns(a, optimizer, i) or _owns(b, optimizer, j):
            parts.append(_distance(name, of_a, of_b))
    notes = [f"{'ab'[skipped.index(True)]}'s step {_SKIPPED}"] if any(skipped) else []
    not_finite = {part.note for part in parts if part.note.startswith("not finite")}
    relative, at_least = _relative(parts)
    return StepPair(
        step,
        other,
        label,
        relative,
        at_least,
        tuple(parts),
        "; ".join([*notes, *sorted(not_finite)]),
    )


def _owns(ledger: Ledger, optimizer: int, p: int) -> bool:
    """Return whether an optimizer owns a parameter; one that owns none was not seen, and may own any."""
    seen = any(optimizer in parameter.optimizers for parameter in ledger.parameters)
    return not seen or optimizer in ledger.parameters[p].optimizers


class _Read(NamedTuple):
    """A gradient or a contribution: its norm, and its elements where they were kept."""

    norm: float
    elements: np.ndarray | None


def _read(ledger: Ledger, p: int, event: int, bit: int) -> _Read | None:
    """Return a parameter's `.grad` after an event, or (CONTRIBUTED) what the event added; None where there is none."""
    if not ledger.state[event, p] & bit:
        return None
    adds = bit == CONTRIBUTED
    if p in ledger.exact:
        elements = ledger.exact[p][0 if adds else 1][event]
        return _Read(float(np.linalg.norm(elements)), elements)
    norms = ledger.contribution if adds else ledger.grad
    return _Read(float(norms[event, p]), None)


def _distance(name: str, a: _Read | None, b: _Read | None) -> ParameterDistance:
    sides = {"a": a, "b": b}
    odd = [side for side, g in sides.items() if g and not math.isfinite(g.norm)]
    if odd:
        note = f"not finite in {' and '.join(odd)}"
        return ParameterDistance(name, math.nan, math.nan, math.nan, note)
    if a is None or b is None:
        size = b.norm**2 if b else 0.0
        squared = size + (a.norm**2 if a else 0.0)
        note = f"only {'a' if a else 'b'} has a gradient" if squared else ""
        return ParameterDistance(name, squared, squared, size, note)
    if a.elements is not None and b.elements is not None:
        squared = float(np.square(a.elements - b.elements).sum())
        size = float(np.square(b.elements).sum())
        return ParameterDistance(name, squared, squared, size)
    apart = abs(a.norm - b.norm) - _NORM_ROUNDING * max(a.norm, b.norm)
    at_least = max(apart, 0.0) ** 2
    return ParameterDistance(name, math.nan, at_least, b.norm**2, _NORMS_ONLY)


def _relative(parts: Sequence[ParameterDistance]) -> tuple[float, float]:
    """Return the relative distance over all of some parameters, and a lower bound of it."""
    size = math.fsum(part.size for part in parts)
    squared = math.fsum(part.squared for part in parts)
    at_least = math.fsum(part.at_least for part in parts)
    return _root_ratio(squared, size), _root_ratio(at_least, size)


def _least(relative: float, at_least: float) -> float:
    return at_least if math.isnan(relative) else relative


def _root_ratio(squared: float, size: float) -> float:
    """Return the root of one square over another; a distance from nothing is infinite.

    >>> _root_ratio(1.0, 4.0), _root_ratio(0.0, 0.0), _root_ratio(1.0, 0.0)
    (0.5, 0.0, inf)
    """
    if math.isnan(squared) or math.isnan(size):
        return math.nan
    if size > 0:
        return math.sqrt(squared / size)
    return math.inf if squared > 0 else 0.0


def _notes_on_norms(steps: Sequence[StepPair]) -> tuple[str, ...]:
    """Say why elements could not be compared, where they could not."""
    every = [part for pair in steps for part in pair.parameters]
    names = sorted({part.name for part in every if part.note == _NORMS_ONLY})
    if not names:
        return ()
    note = f"of {len(names)} parameters ({_some(names)}) only norms were kept"
    return (f"{note}: record(..., exact=N) keeps up to N elements in all",)


# --- causes -----------------------------------------------------------------------------------


class _Window(NamedTuple):
    """What one step read: the backwards that it consumed, and their shares."""

    ledger: Ledger
    step: int
    backwards: list[int]
    shares: list[Share]

    @property
    def sum_of_shares(self) -> float:
        """The sum of the shares; NaN where they are not known."""
        return math.fsum(row.share for row in self.shares) if self.shares else math.nan

    @property
    def spread(self) -> float:
        """The largest weight of an element over the smallest of its objective; NaN where they are not known."""
        weights: dict[str, list[float]] = {}
        for row in self.shares:
            weights.setdefault(row.objective, []).append(row.per_element)
        spreads = []
        for of_objective in weights.values():
            known = all(math.isfinite(weight) for weight in of_objective)
            if not known or min(of_objective) <= 0:
                return math.nan
            spreads.append(max(of_objective) / min(of_objective))
        return max(spreads, default=math.nan)


def _read_by(ledger: Ledger, step: int) -> _Window:
    """Return what a step read; of an end without a step, what is live there."""
    windows = {window.step: list(window.backwards) for window in ledger.windows()}
    backwards = windows.get(step)
    if backwards is None:
        columns = range(len(ledger.parameters))
        live = {event for p in columns for event in ledger.live(step, p)}
        backwards = sorted(e for e in live if ledger[e].kind == "backward")
    rows = ledger.shares().of(step)
    shares = [row for row in rows if row.backward in backwards]
    return _Window(ledger, step, backwards, shares)


def _causes(
    a: _Window, b: _Window, pair: StepPair, columns: Sequence[_Column]
) -> Iterator[Cause]:
    """Yield the causes that shares and optimizers prove."""
    for side, other in (("a", "b"), ("b", "a")):
        alone = f"only {other} has a gradient"
        names = [part.name for part in pair.parameters if part.note == alone]
        if names:
            said = f"The step of {side} reads no gradient of parameters that {other}'s step reads: {_some(names)}."
            yield Cause("owner", said, {"parameters": names})
    sums = [a.sum_of_shares, b.sum_of_shares]
    factor = _common_factor(a, b, pair, columns)
    if factor is not None:
        counts = [len(a.backwards), len(b.backwards)]
        said = (
            f"a's gradient is {factor:.4g} times b's, and so are its shares: they add up to {sums[0]:.4g} in a "
            f"({counts[0]} backwards) and to {sums[1]:.4g} in b ({counts[1]})."
        )
        evidence = {"factor": factor, "sums of shares": sums, "backwards": counts}
        yield Cause("factor", said, evidence)
        return
    spreads = {"a": a.spread, "b": b.spread}
    uneven = [side for side in spreads if spreads[side] > 1 + _FACTOR_TOLERANCE]
    if len(uneven) == 1 and not any(map(math.isnan, spreads.values())):
        most = max(spreads.values())
        said = (
            f"In {uneven[0]}, an element of one micro-batch weighs up to {most:.4g} times as much as one of "
            "another; in the other recording all weigh the same."
        )
        evidence = {"largest weight over smallest": list(spreads.values())}
        yield Cause("uneven shares", said, evidence)


def _common_factor(
    a: _Window, b: _Window, pair: StepPair, columns: Sequence[_Column]
) -> float | None:
    """Return the factor between two gradients, if one fits and the shares differ by it, too."""
    compared = {part.name for part in pair.parameters if not part.note}
    both = [(i, j) for name, i, j in columns if name in compared]
    x = _elements(a, [i for i, _ in both])
    y = _elements(b, [j for _, j in both])
    if not x.size or x.size != y.size or not np.isfinite(x).all() or not y.any():
        return None
    factor = float(x @ y) / float(y @ y)
    left = float(np.linalg.norm(x - factor * y))
    ratio = a.sum_of_shares / b.sum_of_shares if b.sum_of_shares else math.nan
    fits = left <= _FACTOR_TOLERANCE * float(np.linalg.norm(x))
    proved = abs(ratio - factor) <= _FACTOR_TOLERANCE * abs(factor)
    apart = abs(factor - 1) > _FACTOR_TOLERANCE
    return factor if fits and proved and apart else None


def _elements(window: _Window, columns: Sequence[int]) -> np.ndarray:
    """Return all elements of these parameters that a step read."""
    gradients = [_read(window.ledger, p, window.step, PRESENT) for p in columns]
    kept = [g.elements for g in gradients if g and g.elements is not None]
    return np.concatenate([np.zeros(0), *kept])


# --- where they part --------------------------------------------------------------------------


def _parting(
    a: _Window, b: _Window, columns: Sequence[_Column], rounding: float
) -> Parting:
    """Return the first events of two windows that differ."""
    last = a.ledger[a.step], b.ledger[b.step]
    counts = len(a.backwards), len(b.backwards)
    if counts[0] != counts[1]:
        many = counted(counts[0], "backward")
        return Parting(
            *last, f"the step: a has {many} in this window, b has {counts[1]}"
        )
    number = 0
    for one, other in zip(_events_that_count(a), _events_that_count(b), strict=False):
        if one.kind != other.kind:
            return Parting(one, other, f"a has a {one.kind} where b has a {other.kind}")
        number += one.kind == "backward"
        difference = _difference(a.ledger, b.ledger, one, other, columns, rounding)
        if difference:
            what = f"a {one.kind}"
            if one.kind == "backward":
                what = f"backward {number} of the window"
            return Parting(one, other, f"{what}: {difference}")
    return Parting(*last, "the step itself")


def _events_that_count(window: _Window) -> Iterator[Event]:
    """Yield the consumed backwards, what else changed `.grad` after the first of them, and the step."""
    ledger = window.ledger
    for index in range(min(window.backwards, default=window.step), window.step + 1):
        event = ledger[index]
        counts = event.kind == "step" or bool((ledger.state[index] & CHANGED).any())
        if event.kind == "backward":
            counts = index in window.backwards
        if counts:
            yield event


def _difference(
    a: Ledger,
    b: Ledger,
    one: Event,
    other: Event,
    columns: Sequence[_Column],
    rounding: float,
) -> str:
    """Say in what two events differ: what they add (a backward), or what they leave; empty if in nothing."""
    adds = one.kind == "backward"
    bit, verb = (CONTRIBUTED, "adds") if adds else (PRESENT, "leaves")
    parts = []
    for name, i, j in columns:
        of_a, of_b = _read(a, i, one.index, bit), _read(b, j, other.index, bit)
        if (of_a is None) != (of_b is None):
            what = "contribution to" if adds else ".grad of"
            return f"only {'b' if of_a is None else 'a'} has a {what} {name}"
        parts.append(_distance(name, of_a, of_b))
    off = _least(*_relative(parts))
    if math.isnan(off):
        return f"what they {verb[:-1]} is not finite"
    if off <= min(rounding, _FACTOR_TOLERANCE) / 2:
        return ""
    return f"what a {verb} is off by {percent(off)}"


# --- words ------------------------------------------------------------------------------------


def error(pair: StepPair) -> str:
    """Return the relative error of a pair of steps in words."""
    if not math.isnan(pair.relative):
        return percent(pair.relative)
    if math.isnan(pair.at_least):
        return "not known"
    return f"at least {percent(pair.at_least)} (from norms)"


def percent(number: float) -> str:
    """Return a share in words.

    >>> percent(0.2253), percent(3.0), percent(2e-7), percent(0.0)
    ('22.5 %', '300 %', '2e−5 %', '0 %')
    """
    if not math.isfinite(number):
        return "infinitely far" if number > 0 else "not known"
    digits = f"{100 * number:.3g}"
    mantissa, e, exponent = digits.partition("e")
    return f"{mantissa}e{int(exponent)} %".replace("-", "−") if e else f"{digits} %"


def place(event: Event) -> str:
    """Return an event's index, kind and line."""
    where = f"event {event.index}, {event.kind}"
    if event.file:
        where += f" {literal(event.file)}:{event.line}  {literal(event.source)}"
    return where
