"""Compare two recordings step by step: how far their gradients are apart, where they part, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accumviz.checks.report import plain
from accumviz.ledger.events import CONTRIBUTED, PRESENT, Event
from accumviz.ledger.flow import Window
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.ledger.shares import Shares
from accumviz.show import Displayed, counted, literal, save_result

# Gradients that differ by less than this, relative to their size, differ by the order of additions.
_ROUNDING, _ROUNDING_FLOAT64 = 1e-4, 1e-10
# Shares, and gradients that differ by a factor, are equal to within this.
_TOLERANCE = 2e-3
_LISTED = 8


@dataclass(frozen=True)
class ParameterDistance:
    """The distance between two gradients of one parameter; where there is none, it counts as 0.

    `squared` is ‖a − b‖² and `size` ‖b‖². Where `exact` is False only norms were kept, and `squared` is
    the least that they allow.
    """

    name: str
    squared: float
    size: float
    exact: bool

    @property
    def relative(self) -> float:
        """‖a − b‖ / ‖b‖; NaN where only norms were kept."""
        return _root_ratio(self.squared, self.size) if self.exact else math.nan


@dataclass(frozen=True)
class StepPair:
    """Two steps, and how far the gradients that they read are apart.

    `a` and `b` are indices of events, `at_least` is a lower bound of the relative error. `note` says where an
    earlier pair differs.
    """

    a: int
    b: int
    at_least: float
    parameters: tuple[ParameterDistance, ...]
    note: str = ""

    @property
    def exact(self) -> bool:
        """True where every element was kept."""
        return all(part.exact for part in self.parameters)

    @property
    def relative(self) -> float:
        """‖a − b‖ / ‖b‖; NaN where only norms were kept, or a gradient is not finite."""
        return self.at_least if self.exact else math.nan


@dataclass(frozen=True)
class Parting:
    """The first events at which two recordings differ, and in what."""

    a: Event
    b: Event
    said: str


@dataclass(frozen=True)
class Cause:
    """A cause by name, and the numbers that prove it in a sentence."""

    name: str
    said: str


@dataclass(frozen=True)
class Comparison(Displayed):
    """The result of `compare`; errors are relative to `b`.

    `steps` are the pairs of steps in order, `first` the place of the first pair that differs by more than
    rounding (None: none does). `parting` is the first event at which the recordings part. `causes` are
    those that the shares prove, often none.
    """

    steps: tuple[StepPair, ...]
    first: int | None
    parting: Parting | None
    causes: tuple[Cause, ...]
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
        return f"the gradient is off by {error(self.step)} at step {self.first + 1} {count}"

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
            lines.append(f"  event {pair.a} of a, event {pair.b} of b: {error(pair)}")
        for share, name, off in self.by_parameter():
            lines.append(f"  {name}: {off}, {share} of the squared error")
        for note in self.notes:
            lines.append(f"  note: {note}")
        return "\n".join(literal(line) for line in lines)

    def by_parameter(self) -> list[tuple[str, str, str]]:
        """Return share of the squared error, name and error of the parameters that are furthest apart at `step`."""
        apart = [part for part in self.step.parameters if part.squared > 0]
        apart.sort(key=lambda part: -part.squared)
        whole = math.fsum(part.squared for part in apart)
        rows = []
        for part in apart[:_LISTED]:
            share = percent(part.squared / whole)
            rows.append((share, part.name, percent(part.relative)))
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
    as 0 there. Steps that were skipped are left out. Once the weights have parted, later steps differ for
    that reason, too: look at the first.

    A cause is named only where shares prove it; there may be others.

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
    a, b = recorded(a, "compare"), recorded(b, "compare")
    common, notes = _common_parameters(a, b)
    of_a, of_b = _windows(a, "a"), _windows(b, "b")
    if len(of_a) != len(of_b):
        notes.append(f"steps: {len(of_a)} in a, {len(of_b)} in b")
    both = zip(of_a, of_b, strict=False)
    pairs = [_Pair(a, b, in_a, in_b, common) for in_a, in_b in both]
    steps, first = _steps(pairs)
    if not all(step.exact for step in steps):
        notes.append(
            "of some parameters only norms were kept: see `exact=N` of `record`"
        )
    parting = None
    causes: list[Cause] = []
    if first is not None:
        pair = pairs[first]
        parting = _parting(pair, pair.rounding(steps[first]))
        causes = _causes(pair)
    return Comparison(tuple(steps), first, parting, tuple(causes), tuple(notes))


def _windows(ledger: Ledger, side: str) -> Sequence[Window]:
    """Return what each step of a recording consumed. Raises `ValueError` where there is none."""
    windows = ledger.windows()
    if not windows:
        raise ValueError(
            f"compare() found no step in {side}; expected recordings in which an optimizer steps"
        )
    return windows


def _steps(pairs: Sequence[_Pair]) -> tuple[list[StepPair], int | None]:
    """Measure each pair of steps, and return the place of the first that differs by more than rounding."""
    steps = []
    first = None
    for number, pair in enumerate(pairs):
        note = "" if first is None else "the weights differ by now"
        parts = pair.distances(pair.in_a.step, pair.in_b.step)
        step = StepPair(pair.in_a.step, pair.in_b.step, _relative(parts), parts, note)
        steps.append(step)
        if first is None and step.at_least > pair.rounding(step):
            first = number
    return steps, first


# --- what is compared -------------------------------------------------------------------------

# A parameter by its name and shape, and its column in a ledger.
_Columns = dict[tuple[str, tuple[int, ...]], int]


def _common_parameters(
    a: Ledger, b: Ledger
) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Return name and columns of the parameters of one name and shape in both, and notes of the others."""
    in_a, in_b = _columns(a), _columns(b)
    common = [(key[0], in_a[key], in_b[key]) for key in in_a if key in in_b]
    if not common:
        raise ValueError(
            f"compare() found no parameter that both have: a has {_some(in_a)}, b has {_some(in_b)}; "
            "expected two recordings of one model, recorded in the same way, as in record(model, optimizer)"
        )
    only = {
        "a": in_a.keys() - in_b.keys(),
        "b": in_b.keys() - in_a.keys(),
    }
    notes = [
        f"only in {side}: {_some(sorted(keys))}" for side, keys in only.items() if keys
    ]
    return common, notes


def _columns(ledger: Ledger) -> _Columns:
    columns = {}
    for column, parameter in enumerate(ledger.parameters):
        if not parameter.unsharded_of:
            columns[parameter.name, parameter.shape] = column
    return columns


def _some(keys: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    names = [f"{name} {shape}" for name, shape in keys]
    more = ", …" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more or "none"


class _Pair(NamedTuple):
    """Two steps that are compared: their ledgers and windows, and name and columns of the common parameters."""

    a: Ledger
    b: Ledger
    in_a: Window
    in_b: Window
    common: list[tuple[str, int, int]]

    def distances(
        self, event_a: int, event_b: int, factor: float = 1.0
    ) -> tuple[ParameterDistance, ...]:
        """Measure each parameter's distance between an event of a and, times a factor, one of b."""
        distances = []
        for name, i, j in self.common:
            left, left_exact = _gradient(self.a, self.in_a, i, event_a)
            right, right_exact = _gradient(self.b, self.in_b, j, event_b)
            exact = left_exact and right_exact
            if not exact:
                left = np.array(np.linalg.norm(left))
                right = np.array(np.linalg.norm(right))
            with np.errstate(invalid="ignore", over="ignore"):
                squared = float(np.square(left - factor * right).sum())
                size = float(np.square(factor * right).sum())
            distances.append(ParameterDistance(name, squared, size, exact))
        return tuple(distances)

    def rounding(self, step: StepPair) -> float:
        """Return how far gradients may differ by the order of additions; norms are kept in single precision."""
        parameters = *self.a.parameters, *self.b.parameters
        double = all(parameter.dtype == "float64" for parameter in parameters)
        return _ROUNDING_FLOAT64 if step.exact and double else _ROUNDING


def _gradient(
    ledger: Ledger, window: Window, p: int, event: int
) -> tuple[np.ndarray, bool]:
    """Return what a window's step reads of a parameter, or what a backward adds to it.

    That is each element, and True, or their norm, and False; nothing of another optimizer's parameter.
    """
    of, norms, bit = "contribution", ledger.contribution, CONTRIBUTED
    if event == window.step:
        of, norms, bit = "grad", ledger.grad, PRESENT
    optimizer = ledger[window.step].details.get("optimizer_index", 0)
    is_owned = optimizer in ledger.parameters[p].optimizers
    if not is_owned or not ledger.state[event, p] & bit:
        return np.zeros(1), True
    if p in ledger.exact:
        return ledger.values(p, of)[event], True
    return norms[event, p : p + 1].astype(float), False


# --- distances --------------------------------------------------------------------------------


def _relative(parts: Sequence[ParameterDistance]) -> float:
    """Return the relative distance over all parameters; a lower bound where only norms were kept."""
    squared = sum(part.squared for part in parts)
    return _root_ratio(squared, sum(part.size for part in parts))


def _root_ratio(squared: float, size: float) -> float:
    """Return the root of one square over another; a distance from nothing is infinite.

    >>> _root_ratio(1.0, 4.0), _root_ratio(0.0, 0.0), _root_ratio(1.0, 0.0)
    (0.5, 0.0, inf)
    """
    if size == 0 and squared > 0:
        return math.inf
    return math.sqrt(squared / size) if size else 0.0


# --- causes -----------------------------------------------------------------------------------


def _causes(pair: _Pair) -> list[Cause]:
    """Return the causes that gradients and shares prove."""
    shares = _shares(pair.a, pair.in_a), _shares(pair.b, pair.in_b)
    in_a, in_b = (math.fsum(each.share) for each in shares)
    factor = in_a / in_b if in_b else math.nan
    parts = pair.distances(pair.in_a.step, pair.in_b.step, factor)
    is_factor = abs(factor - 1) > _TOLERANCE and _relative(parts) <= _TOLERANCE
    if is_factor and all(part.exact for part in parts):
        said = (
            f"a's gradient is {factor:.4g} times b's, and so are its shares: they add up to {in_a:.4g} in a "
            f"({len(pair.in_a.backwards)} backwards) and to {in_b:.4g} in b ({len(pair.in_b.backwards)})."
        )
        return [Cause("factor", said)]
    return _uneven({"a": _spread(shares[0]), "b": _spread(shares[1])})


def _uneven(spreads: dict[str, float]) -> list[Cause]:
    """Return that the elements of one recording alone weigh differently, if they do."""
    uneven = max(spreads, key=spreads.__getitem__)
    if not min(spreads.values()) <= 1 + _TOLERANCE < spreads[uneven]:
        return []
    said = (
        f"In {uneven}, an element of one micro-batch weighs up to {spreads[uneven]:.4g} times as much as one of "
        "another; in the other recording all weigh the same."
    )
    return [Cause("uneven shares", said)]


def _shares(ledger: Ledger, window: Window) -> Shares:
    """Return what each backward weighs in a step, of those that it consumed."""
    rows = ledger.shares().of(window.step)
    return rows.take(~rows.erased)


def _spread(shares: Shares) -> float:
    """Return the largest weight of an element over the smallest of its objective; NaN where it is not known."""
    spread = 1.0 if len(shares) else math.nan
    for objective in np.unique(shares.objective):
        weights = shares.per_element[shares.objective == objective]
        least, most = float(weights.min()), float(weights.max())
        if not 0 < least <= most < math.inf:
            return math.nan
        spread = max(spread, most / least)
    return spread


# --- where they part --------------------------------------------------------------------------


def _parting(pair: _Pair, rounding: float) -> Parting:
    """Return the first backwards that add something else, or the steps where none does."""
    of_a, of_b = pair.in_a.backwards, pair.in_b.backwards
    said = (
        "the step: what the backwards add is the same, and what the steps read is not"
    )
    if len(of_a) != len(of_b):
        many = counted(len(of_a), "backward")
        said = f"the step: a has {many} in this window, b has {len(of_b)}"
        of_a = ()
    for number, (one, other) in enumerate(zip(of_a, of_b, strict=False), 1):
        off = _relative(pair.distances(one, other))
        if not off <= rounding:
            said = (
                f"backward {number} of the window: what a adds is off by {percent(off)}"
            )
            return Parting(pair.a[one], pair.b[other], said)
    ends = pair.a[pair.in_a.step], pair.b[pair.in_b.step]
    return Parting(*ends, said)


# --- words ------------------------------------------------------------------------------------


def error(pair: StepPair) -> str:
    """Return the relative error of a pair of steps in words."""
    if pair.exact or math.isnan(pair.at_least):
        words = percent(pair.relative)
    else:
        words = f"at least {percent(pair.at_least)} (from norms)"
    return f"{words} ({pair.note})" if pair.note else words


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
