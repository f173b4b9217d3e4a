"""Compare two recordings step by step: how far their gradients are apart, where they part, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accumviz import arguments
from accumviz.checks.report import plain
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT, Event
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.show import Displayed, counted, literal, save_page

# Two gradients that differ by less than this, relative to their size, differ by the order of additions.
ROUNDING = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-4, "bfloat16": 1e-4}
# Norms are kept in single precision: a smaller relative difference between two of them may be rounding.
_NORM_ROUNDING = 4e-7
# One factor fits two gradients, or two sums of shares, if it leaves no more than this.
_FACTOR_TOLERANCE = 2e-3
_LISTED = 8


class ParameterDistance(NamedTuple):
    """The distance between two gradients of one parameter.

    `squared` is ‖a − b‖² (NaN where elements were not kept), `at_least` a lower bound of it, `size` is
    ‖b‖². `how` is "exact", "norms" (only the bound is known), "one" (only one side, named by `side`, has
    a gradient) or "not finite" (on `side`, "a", "b" or "ab").
    """

    name: str
    squared: float
    at_least: float
    size: float
    how: str
    side: str = ""

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
            names = ", ".join(self.missing[:_LISTED])
            more = ", …" if len(self.missing) > _LISTED else ""
            lines += ["", f"  only in one of them: {literal(names)}{more}"]
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
            rows.append((share, part.name, _parameter_error(part)))
        return rows

    def to_json(self) -> str:
        """Return the comparison as one JSON object, with NaN and the infinities by name."""
        steps = []
        for pair in self.steps:
            parameters = [part._asdict() for part in pair.parameters]
            steps.append(pair._asdict() | {"parameters": parameters})
        parting = None
        if self.parting is not None:
            parting = {
                "a": asdict(self.parting.a),
                "b": asdict(self.parting.b),
                "said": self.parting.said,
            }
        whole = {
            "verdict": self.verdict,
            "relative": self.relative,
            "first": self.first,
            "steps": steps,
            "parting": parting,
            "causes": [cause._asdict() for cause in self.causes],
            "missing": list(self.missing),
            "notes": list(self.notes),
        }
        return json.dumps(plain(whole), allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write a page (`.html`), JSON (`.json`) or, under any other name, text."""
        arguments.file("path", path)
        suffix = Path(path).suffix.lower()
        if suffix in (".html", ".htm"):
            save_page(path, "Comparison", self.to_html())
        elif suffix == ".json":
            Path(path).write_text(self.to_json() + "\n", "utf-8", "replace")
        else:
            Path(path).write_text(self.text() + "\n", "utf-8", "replace")


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
    rounding = max(ROUNDING.get(a.parameters[i].dtype, 1e-4) for _, i, _ in columns)
    rounding = max(
        rounding, *(ROUNDING.get(b.parameters[j].dtype, 1e-4) for *_, j in columns)
    )
    steps: list[StepPair] = []
    first = None
    for place_of_pair, (step, other, optimizer) in enumerate(pairs):
        pair = _step_pair(a, b, step, other, optimizer, columns)
        if first is not None:
            pair = pair._replace(note="the weights differ by now")
        elif _apart(pair, rounding):
            first = place_of_pair
        steps.append(pair)
    notes += _notes_on_norms(steps)
    if first is None:
        return Comparison(tuple(steps), None, missing=missing, notes=notes)
    one = _WindowOf(a, pairs[first][0])
    other_one = _WindowOf(b, pairs[first][1])
    causes = tuple(_causes(one, other_one, steps[first], columns))
    parting = _parting(one, other_one, columns, rounding)
    return Comparison(tuple(steps), first, parting, causes, missing, notes)


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
            f"compare() found no parameter that both have: a has {_some(in_a)}, b has {_some(in_b)}; expected two "
            "recordings of one model, recorded in the same way, as in record(model, optimizer)"
        )
    return common, tuple(missing)


def _some(names: Mapping[str, int]) -> str:
    return ", ".join(list(names)[:3]) + (", …" if len(names) > 3 else "") or "none"


def _paired_steps(
    a: Ledger, b: Ledger
) -> tuple[list[tuple[int, int, int]], tuple[str, ...]]:
    """Pair the steps of each optimizer in order, as (event of a, event of b, optimizer).

    Where one ledger has no step, its last gradient is paired with the other's first step; without any
    step, the optimizer is -1.
    """
    of_a, of_b = _steps(a), _steps(b)
    if not (of_a and of_b):
        ends = [_first_step_or_end(a, of_a), _first_step_or_end(b, of_b)]
        if min(ends) < 0:
            raise ValueError(
                f"compare() found no gradient in {'a' if ends[0] < 0 else 'b'}: it has neither a step nor a backward; "
                "expected recordings of a loop, or of one backward"
            )
        note = "one of them has no step: what its `.grad` holds at its end is compared with the first step of the other"
        optimizer = next(iter(of_a or of_b), -1)
        return [(ends[0], ends[1], optimizer)], (note,) if of_a or of_b else ()
    pairs, notes = [], []
    for optimizer in sorted({*of_a, *of_b}):
        steps, others = of_a.get(optimizer, []), of_b.get(optimizer, [])
        for step, other in zip(steps, others, strict=False):
            pairs.append((step, other, optimizer))
        if len(steps) != len(others):
            notes.append(
                f"steps of optimizer {optimizer}: {len(steps)} in a, {len(others)} in b"
            )
    return sorted(pairs), tuple(notes)


def _steps(ledger: Ledger) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for event in ledger.of("step"):
        optimizer = int(event.details.get("optimizer_index", 0))
        steps.setdefault(optimizer, []).append(event.index)
    return steps


def _first_step_or_end(ledger: Ledger, steps: dict[int, list[int]]) -> int:
    """Return the first step, else the last event after which there is a gradient (-1: none)."""
    if steps:
        return min(of_optimizer[0] for of_optimizer in steps.values())
    with_gradient = np.flatnonzero((ledger.state & PRESENT).any(axis=1))
    return int(with_gradient[-1]) if with_gradient.size else -1


# --- distances -------------------------------------------------------------------------------


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
        return StepPair(step, other, label, 0.0, 0.0, (), "both were skipped")
    parts = []
    for name, i, j in columns:
        owned = [_owns(a, optimizer, i), _owns(b, optimizer, j)]
        if any(owned):
            gradient = _gradient(a, i, step) if owned[0] else None
            other_gradient = _gradient(b, j, other) if owned[1] else None
            parts.append(_distance(name, gradient, other_gradient))
    notes = [f"{'ab'[skipped.index(True)]}'s step was skipped"] if any(skipped) else []
    not_finite = {
        side for part in parts if part.how == "not finite" for side in part.side
    }
    if len(not_finite) == 2:
        notes.append("neither gradient is finite")
    elif not_finite:
        notes.append(f"{not_finite.pop()}'s gradient is not finite")
    size = math.fsum(part.size for part in parts)
    squared = math.fsum(part.squared for part in parts)
    at_least = math.fsum(part.at_least for part in parts)
    return StepPair(
        step,
        other,
        label,
        _root_ratio(squared, size),
        _root_ratio(at_least, size),
        tuple(parts),
        "; ".join(notes),
    )


def _owns(ledger: Ledger, optimizer: int, p: int) -> bool:
    """Return whether an optimizer owns a parameter; one that owns none was not seen, and may own any."""
    known = any(optimizer in parameter.optimizers for parameter in ledger.parameters)
    return not known or optimizer in ledger.parameters[p].optimizers


class _Gradient(NamedTuple):
    norm: float
    elements: np.ndarray | None


def _gradient(ledger: Ledger, p: int, event: int) -> _Gradient | None:
    """Return a parameter's `.grad` after an event; None where there is none."""
    if not ledger.state[event, p] & PRESENT:
        return None
    if p in ledger.exact:
        elements = ledger.exact[p][1][event]
        return _Gradient(float(np.linalg.norm(elements)), elements)
    return _Gradient(float(ledger.grad[event, p]), None)


def _distance(name: str, a: _Gradient | None, b: _Gradient | None) -> ParameterDistance:
    sides = [
        side for side, g in (("a", a), ("b", b)) if g and not math.isfinite(g.norm)
    ]
    if sides:
        unknown = math.nan
        side = "".join(sides)
        return ParameterDistance(name, unknown, unknown, unknown, "not finite", side)
    if a is None or b is None:
        squared = sum(g.norm**2 for g in (a, b) if g)
        size = squared if b else 0.0
        side = "a" if a else "b"
        how = ("one", side) if squared else ("exact", "")
        return ParameterDistance(name, squared, squared, size, *how)
    if a.elements is not None and b.elements is not None:
        squared = float(np.square(a.elements - b.elements).sum())
        size = float(np.square(b.elements).sum())
        return ParameterDistance(name, squared, squared, size, "exact")
    apart = abs(a.norm - b.norm) - _NORM_ROUNDING * max(a.norm, b.norm)
    return ParameterDistance(name, math.nan, max(apart, 0.0) ** 2, b.norm**2, "norms")


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


def _apart(pair: StepPair, rounding: float) -> bool:
    """Return whether two steps differ by more than rounding."""
    if "was skipped" in pair.note:
        return True
    distance = pair.at_least if math.isnan(pair.relative) else pair.relative
    return distance > rounding


def _notes_on_norms(steps: Sequence[StepPair]) -> tuple[str, ...]:
    """Say why elements could not be compared, where they could not."""
    names = sorted(
        {part.name for pair in steps for part in pair.parameters if part.how == "norms"}
    )
    if not names:
        return ()
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    note = f"of {len(names)} parameters ({listed}) only norms were kept"
    return (f"{note}: record(..., exact=N) keeps up to N elements in all",)


# --- causes ----------------------------------------------------------------------------------


class _WindowOf:
    """The window of one step: the backwards that it consumed, and their shares."""

    def __init__(self, ledger: Ledger, step: int) -> None:
        self.ledger, self.step = ledger, step
        self.backwards = _consumed(ledger, step)
        rows = ledger.shares().of(step)
        self.shares = [row for row in rows if row.backward in self.backwards]

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

    def elements(self, columns: Sequence[int]) -> np.ndarray | None:
        """Return all elements of these parameters that the step read; None where some were not kept."""
        gradients = [_gradient(self.ledger, p, self.step) for p in columns]
        kept = [
            g.elements for g in gradients if g is not None and g.elements is not None
        ]
        return np.concatenate(kept) if kept and len(kept) == len(columns) else None


def _consumed(ledger: Ledger, step: int) -> list[int]:
    """Return the backwards that a step consumed; without steps, those that are live at the end."""
    for window in ledger.windows():
        if window.step == step:
            return list(window.backwards)
    live = {e for p in range(len(ledger.parameters)) for e in ledger.live(step, p)}
    return sorted(e for e in live if ledger[e].kind == "backward")


def _causes(
    a: _WindowOf, b: _WindowOf, pair: StepPair, columns: Sequence[_Column]
) -> Iterator[Cause]:
    """Yield the causes that shares and optimizers prove."""
    for side, other in (("a", "b"), ("b", "a")):
        names = [
            part.name
            for part in pair.parameters
            if part.how == "one" and part.side == other
        ]
        if names:
            listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            said = f"The step of {side} reads no gradient of parameters that {other}'s step reads: {listed}."
            yield Cause("owner", said, {"parameters": names})
    factor = _common_factor(a, b, pair, columns)
    if factor is not None:
        sums = [a.sum_of_shares, b.sum_of_shares]
        said = (
            f"a's gradient is {factor:.4g} times b's, and so are its shares: they add up to {sums[0]:.4g} in a "
            f"({len(a.backwards)} backwards) and to {sums[1]:.4g} in b ({len(b.backwards)})."
        )
        evidence = {
            "factor": factor,
            "sums of shares": sums,
            "backwards": [len(a.backwards), len(b.backwards)],
        }
        yield Cause("factor", said, evidence)
        return
    spreads = [a.spread, b.spread]
    uneven = [
        side
        for side, spread in zip("ab", spreads, strict=True)
        if spread > 1 + _FACTOR_TOLERANCE
    ]
    if len(uneven) == 1 and not any(map(math.isnan, spreads)):
        said = (
            f"In {uneven[0]}, an element of one micro-batch weighs up to {max(spreads):.4g} times as much as one of "
            "another; in the other recording all weigh the same."
        )
        yield Cause("uneven shares", said, {"largest weight over smallest": spreads})


def _common_factor(
    a: _WindowOf, b: _WindowOf, pair: StepPair, columns: Sequence[_Column]
) -> float | None:
    """Return the factor between two gradients, if one fits and the shares differ by it, too."""
    compared = {part.name for part in pair.parameters if part.how == "exact"}
    both = [(i, j) for name, i, j in columns if name in compared]
    x, y = a.elements([i for i, _ in both]), b.elements([j for _, j in both])
    if x is None or y is None or not (np.isfinite(x).all() and y.any()):
        return None
    factor = float(x @ y) / float(y @ y)
    left = float(np.linalg.norm(x - factor * y))
    ratio = a.sum_of_shares / b.sum_of_shares if b.sum_of_shares else math.nan
    fits = left <= _FACTOR_TOLERANCE * float(np.linalg.norm(x))
    proved = abs(ratio - factor) <= _FACTOR_TOLERANCE * abs(factor)
    apart = abs(factor - 1) > _FACTOR_TOLERANCE
    return factor if fits and proved and apart else None


# --- where they part -------------------------------------------------------------------------


def _parting(
    a: _WindowOf, b: _WindowOf, columns: Sequence[_Column], rounding: float
) -> Parting:
    """Return the first events of two windows that differ."""
    last = a.ledger[a.step], b.ledger[b.step]
    counts = len(a.backwards), len(b.backwards)
    if counts[0] != counts[1]:
        said = f"the step: a has {counted(counts[0], 'backward')} in this window, b has {counts[1]}"
        return Parting(*last, said)
    number = 0
    for one, other in zip_longest(_events_that_count(a), _events_that_count(b)):
        if one is None or other is None:
            break
        if one.kind != other.kind:
            return Parting(one, other, f"a has a {one.kind} where b has a {other.kind}")
        number += one.kind == "backward"
        difference = _difference(a.ledger, b.ledger, one, other, columns, rounding)
        if difference:
            what = (
                f"backward {number} of the window"
                if one.kind == "backward"
                else f"a {one.kind}"
            )
            return Parting(one, other, f"{what}: {difference}")
    return Parting(*last, "the step itself")


def _events_that_count(window: _WindowOf) -> list[Event]:
    """Return the consumed backwards, what else changed `.grad` after the first of them, and the step."""
    ledger = window.ledger
    events = []
    for index in range(min(window.backwards, default=window.step), window.step + 1):
        event = ledger[index]
        if event.kind == "backward":
            counts = index in window.backwards
        else:
            counts = event.kind == "step" or bool((ledger.state[index] & CHANGED).any())
        if counts:
            events.append(event)
    return events


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
    bit = CONTRIBUTED if adds else PRESENT
    apart = size = 0.0
    for name, i, j in columns:
        in_a, in_b = (
            bool(a.state[one.index, i] & bit),
            bool(b.state[other.index, j] & bit),
        )
        if in_a != in_b:
            what = "contribution to" if adds else ".grad of"
            return f"only {'a' if in_a else 'b'} has a {what} {name}"
        if in_a:
            x, y = _numbers(a, i, one.index, adds), _numbers(b, j, other.index, adds)
            if len(x) != len(y):  # elements on one side, a norm on the other
                x, y = (np.array([np.linalg.norm(numbers)]) for numbers in (x, y))
            apart += float(np.square(x - y).sum())
            size += float(np.square(y).sum())
    off = _root_ratio(apart, size)
    verb = "adds" if adds else "leaves"
    if not math.isfinite(off) and not math.isfinite(apart + size):
        return f"what they {verb[:-1]} is not finite"
    if off <= min(rounding, _FACTOR_TOLERANCE) / 2:
        return ""
    return f"what a {verb} is off by {percent(off)}"


def _numbers(ledger: Ledger, p: int, event: int, adds: bool) -> np.ndarray:
    """Return a contribution's or a gradient's elements where they were kept, else its norm."""
    if p in ledger.exact:
        numbers: np.ndarray = ledger.exact[p][0 if adds else 1][event]
        return numbers
    norms = ledger.contribution if adds else ledger.grad
    return np.array([norms[event, p]], dtype=float)


# --- words -----------------------------------------------------------------------------------


def error(pair: StepPair) -> str:
    """Return the relative error of a pair of steps in words."""
    if not math.isnan(pair.relative):
        return percent(pair.relative)
    if math.isnan(pair.at_least):
        return "not known"
    return f"at least {percent(pair.at_least)} (from norms)"


def _parameter_error(part: ParameterDistance) -> str:
    if part.how == "one":
        return f"only {part.side} has a gradient"
    if part.how == "norms":
        return "not known (norms only)"
    if part.how == "not finite":
        return f"not finite in {' and '.join(part.side)}"
    return percent(part.relative)


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
