"""Compare two recordings step by step: how far their gradients are apart, and where they part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from accumviz.checks.report import plain
from accumviz.ledger.events import CONTRIBUTED, PRESENT, Event
from accumviz.ledger.flow import Window
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.show import Displayed, counted, literal

# Gradients that differ by less than this, relative to their size, differ by the order of additions.
_ROUNDING, _ROUNDING_FLOAT64 = 1e-4, 1e-10
_LISTED = 8


@dataclass(frozen=True)
class Distance:
    """The distance between two gradients: of one parameter, or (`name` is empty) of all that a step reads.

    `squared` is ‖a − b‖² and `size` ‖b‖²; a gradient that is None counts as 0. Where `exact` is False some norms were
    all that was kept, and `squared` is the least that they allow.

    >>> Distance("w", 1.0, 4.0, True).relative, Distance("w", 1.0, 0.0, True).relative
    (0.5, inf)
    """

    name: str
    squared: float
    size: float
    exact: bool

    @property
    def at_least(self) -> float:
        """A lower bound of ‖a − b‖ / ‖b‖; infinite where b is nothing and a is something."""
        if self.size == 0:
            return math.inf if self.squared > 0 else 0.0
        return math.sqrt(self.squared / self.size)

    @property
    def relative(self) -> float:
        """‖a − b‖ / ‖b‖; NaN where only norms were kept, or a gradient is not finite."""
        return self.at_least if self.exact else math.nan

    @property
    def words(self) -> str:
        """The relative error in words."""
        if self.exact or math.isnan(self.at_least):
            return percent(self.relative)
        return f"at least {percent(self.at_least)} (from norms)"


@dataclass(frozen=True)
class StepPair(Distance):
    """Two steps, by the indices of their events `a` and `b`, and how far the gradients that they read are apart."""

    a: int
    b: int
    parameters: tuple[Distance, ...]


@dataclass(frozen=True)
class Parting:
    """The first events at which two recordings differ, and in what."""

    a: Event
    b: Event
    said: str


@dataclass(frozen=True)
class Comparison(Displayed):
    """The result of `compare`; errors are relative to `b`.

    `steps` are the pairs of steps in order, `first` the place of the first pair that differs by more than
    rounding (None: none does). `parting` is the first event at which the recordings part.
    """

    _shown_by = "accumviz.views.tables:comparison_html"

    steps: tuple[StepPair, ...]
    first: int | None
    parting: Parting | None
    notes: tuple[str, ...]

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
        return (
            f"the gradient is off by {self.step.words} at step {self.first + 1} {count}"
        )

    @property
    def furthest(self) -> list[tuple[str, str]]:
        """Name and relative error of the parameters that are furthest apart at `step`."""
        parts = sorted(self.step.parameters, key=lambda part: -part.squared)
        apart = [part for part in parts if part.squared > 0]
        return [(part.name, percent(part.relative)) for part in apart[:_LISTED]]

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the comparison as text."""
        lines = [f"Comparison: {self.summary}"]
        if self.parting is not None:
            lines.append(f"  they part at: {self.parting.said}")
            lines.append(f"    a: {place(self.parting.a)}")
            lines.append(f"    b: {place(self.parting.b)}")
        for pair in self.steps[:_LISTED]:
            lines.append(f"  event {pair.a} of a, event {pair.b} of b: {pair.words}")
        for name, off in self.furthest:
            lines.append(f"  {name}: {off}")
        for note in self.notes:
            lines.append(f"  note: {note}")
        return "\n".join(map(literal, lines))

    def to_json(self) -> str:
        """Return the comparison as one JSON object, with NaN and the infinities by name."""
        whole = asdict(self)
        whole |= {"verdict": self.verdict, "relative": self.relative}
        return json.dumps(plain(whole), allow_nan=False)


def compare(a: Ledger | Recorded, b: Ledger | Recorded) -> Comparison:
    """Compare the gradients that the steps of two recordings read.

    The error is that of `a` relative to `b`: ‖a − b‖ / ‖b‖ over all parameters that both have, by name.
    It is exact where both kept every element (`record(..., exact=N)` keeps tensors of up to N elements),
    and bounded from below where they kept norms. A parameter that a step's optimizer does not own counts
    as 0 there. Steps that were skipped are left out. Once the weights have parted, later steps differ for
    that reason, too: look at the first. What is wrong in one of them, `check` says.

    Raises `TypeError` for what is no recording, `ValueError` when they have no parameter in common, or one has no
    step.

    >>> import torch, accumviz as av
    >>> def recorded(k):
    ...     w = torch.tensor([1.0, 3.0], requires_grad=True)
    ...     optimizer = torch.optim.SGD([w], lr=0.1)
    ...     with av.record({"w": w}, optimizer) as recording:
    ...         for x in (4.0, 2.0):
    ...             (((2 - w) * x).square().sum() / k).backward()
    ...         optimizer.step()
    ...     return recording
    >>> result = av.compare(recorded(1), recorded(2))
    >>> result.relative, result.parting.said
    (1.0, 'backward 1 of the window: what a adds is off by 100 %')
    """
    a = recorded(a, "compare")
    b = recorded(b, "compare")
    common, notes = _common_parameters(a, b)
    of_a = _windows(a, "a")
    of_b = _windows(b, "b")
    every = *a.parameters, *b.parameters
    double = all(parameter.dtype == "float64" for parameter in every)
    steps: list[StepPair] = []
    first = parting = None
    for in_a, in_b in zip(of_a, of_b, strict=False):
        pair = _Pair(a, b, in_a, in_b, common)
        parts = pair.distances(in_a.step, in_b.step)
        whole = vars(_whole(parts))
        step = StepPair(**whole, a=in_a.step, b=in_b.step, parameters=parts)
        # The order of additions; norms are kept in single precision.
        rounding = _ROUNDING_FLOAT64 if step.exact and double else _ROUNDING
        if first is None and step.at_least > rounding:
            first = len(steps)
            parting = _parting(pair, rounding)
        steps.append(step)
    notes += _notes(steps, first, len(of_a), len(of_b))
    return Comparison(tuple(steps), first, parting, tuple(notes))


def _notes(
    steps: list[StepPair], first: int | None, in_a: int, in_b: int
) -> Iterator[str]:
    """Say what to know of steps that were compared, of so many in both recordings."""
    if in_a != in_b:
        yield f"steps: {in_a} in a, {in_b} in b"
    if first is not None and len(steps) > first + 1:
        yield "after the first step that differs, the weights differ, too"
    if not all(step.exact for step in steps):
        yield "of some parameters only norms were kept: see `exact=N` of `record`"


def _windows(ledger: Ledger, side: str) -> Sequence[Window]:
    """Return what each step of a recording consumed. Raises `ValueError` where there is none."""
    windows = ledger.windows()
    if not windows:
        raise ValueError(
            f"compare() found no step in {side}; expected recordings in which an optimizer steps"
        )
    return windows


# --- what is compared -------------------------------------------------------------------------

# A parameter by its name and shape.
_Key = tuple[str, tuple[int, ...]]


def _common_parameters(
    a: Ledger, b: Ledger
) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Return the parameters of one name and shape in both, and notes of the others."""
    in_a = _columns(a)
    in_b = _columns(b)
    common = [(key[0], in_a[key], in_b[key]) for key in in_a if key in in_b]
    if not common:
        raise ValueError(
            f"compare() found no parameter that both have: a has {_some(in_a)}, b has {_some(in_b)}; "
            "expected two recordings of one model, recorded in the same way, as in record(model, optimizer)"
        )
    notes = []
    for side, mine, others in (("a", in_a, in_b), ("b", in_b, in_a)):
        only = mine.keys() - others.keys()
        if only:
            notes.append(f"only in {side}: {_some(sorted(only))}")
    return common, notes


def _columns(ledger: Ledger) -> dict[_Key, int]:
    columns = {}
    for column, parameter in enumerate(ledger.parameters):
        if not parameter.unsharded_of:
            columns[parameter.name, parameter.shape] = column
    return columns


def _some(keys: Iterable[_Key]) -> str:
    names = [f"{name} {shape}" for name, shape in keys]
    more = ", …" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more or "none"


def _gradient(ledger: Ledger, step: int, p: int, event: int) -> tuple[np.ndarray, bool]:
    """Return what a step reads of a parameter, or what a backward adds to it; nothing where it is another's.

    That is each element, and True, or their norm, and False.
    """
    of, bit = ("grad", PRESENT) if event == step else ("contribution", CONTRIBUTED)
    optimizer = ledger[step].details.get("optimizer_index", 0)
    is_owned = optimizer in ledger.parameters[p].optimizers
    if not is_owned or not ledger.state[event, p] & bit:
        return np.zeros(1), True
    if p in ledger.exact:
        return ledger.values(p, of)[event], True
    norms = getattr(ledger, of)
    return norms[event, p : p + 1].astype(float), False


class _Pair(NamedTuple):
    """Two steps that are compared, over the parameters that both recordings have: name, and column in each."""

    a: Ledger
    b: Ledger
    in_a: Window
    in_b: Window
    common: list[tuple[str, int, int]]

    def distances(self, event_a: int, event_b: int) -> tuple[Distance, ...]:
        """Measure each parameter's distance between an event of a and one of b."""
        distances = []
        for name, p, q in self.common:
            left, left_exact = _gradient(self.a, self.in_a.step, p, event_a)
            right, right_exact = _gradient(self.b, self.in_b.step, q, event_b)
            exact = left_exact and right_exact
            if not exact:
                left = np.array(np.linalg.norm(left))
                right = np.array(np.linalg.norm(right))
            with np.errstate(invalid="ignore", over="ignore"):
                squared = float(np.square(left - right).sum())
                size = float(np.square(right).sum())
            distances.append(Distance(name, squared, size, exact))
        return tuple(distances)


def _whole(parts: Sequence[Distance]) -> Distance:
    """Return the distance over all parameters."""
    squared = sum(part.squared for part in parts)
    size = sum(part.size for part in parts)
    return Distance("", squared, size, all(part.exact for part in parts))


def _parting(pair: _Pair, rounding: float) -> Parting:
    """Return the first backwards that add something else, or the steps where none does."""
    a = pair.in_a
    b = pair.in_b
    at = a.step, b.step
    said = (
        "the step: what the backwards add is the same, and what the steps read is not"
    )
    both = list(zip(a.backwards, b.backwards, strict=False))
    if len(a.backwards) != len(b.backwards):
        many = counted(len(a.backwards), "backward")
        said = f"the step: a has {many} in this window, b has {len(b.backwards)}"
        both = []
    for number, events in enumerate(both, 1):
        off = _whole(pair.distances(*events)).at_least
        if not off <= rounding:
            said = (
                f"backward {number} of the window: what a adds is off by {percent(off)}"
            )
            at = events
            break
    return Parting(pair.a[at[0]], pair.b[at[1]], said)


# --- words ------------------------------------------------------------------------------------


def percent(number: float) -> str:
    """Return a share in words.

    >>> percent(0.2253), percent(3.0), percent(float("inf")), percent(float("nan"))
    ('22.5 %', '300 %', '∞ %', 'not known')
    """
    if math.isnan(number):
        return "not known"
    if math.isinf(number):
        return "∞ %"
    return f"{100 * number:.3g} %"


def place(event: Event) -> str:
    """Return an event's index, kind and line."""
    where = f"event {event.index}, {event.kind}"
    if event.file:
        where += f" {event.file}:{event.line}  {event.source}"
    return where
