"""Why two gradients of a step differ: a cause is named where the numbers leave no other, and else what it is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from accumviz.checks.comparison import Cause, Compared, percent
from accumviz.checks.distance import contributed, known
from accumviz.events import PRESENT
from accumviz.ledger import Ledger

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# What the order of additions does to a gradient of single precision: so much of its size at most.
ROUNDING = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-4, "bfloat16": 1e-4}
# One factor, or proportional: to so much. What comes from differences of sums is no more exact.
_SAME = 2e-3
# Half precision rounds each operation by up to its eps: over a network, by several.
_SEVERAL = 8


class Window:
    """One ledger's side of a step: what it consumed, and what is known of that."""

    def __init__(self, ledger: Ledger, step: int, names: Sequence[int], backwards: Sequence[int]) -> None:
        self.ledger, self.step, self.columns = ledger, step, names
        rows = ledger.shares().of(step)
        every = sorted({*rows.backward.tolist(), *backwards})
        self.backwards, self.lost = [b for b in every if b in set(backwards)], len(every) - len(set(backwards))
        self.every, self.rows = every, rows

    @cached_property
    def details(self) -> list[Any]:
        """Of each backward."""
        return [self.ledger[b].details for b in self.every]

    def elements(self, b: int) -> float:
        """How many elements a backward's loss is over; NaN where that is not known."""
        found = [term.get("elements") for term in self.ledger[b].details.get("terms", ())]
        return float(found[0]) if len(found) == 1 and found[0] is not None else math.nan

    @cached_property
    def raw(self) -> dict[int, float]:
        """What an element weighed in what each backward added, before anything happened to it."""
        rows, found = self.rows, dict[int, float]()
        for b in self.every:
            here = np.flatnonzero(rows.backward == b)
            if here.size != 1 or rows.opaque[here[0]]:
                return {}
            i = int(here[0])
            found[b] = float(rows.constant[i] / rows.elements[i] if rows.mean[i] else rows.constant[i])
        return found if all(math.isfinite(weight) and weight > 0 for weight in found.values()) else {}

    @cached_property
    def weights(self) -> list[float]:
        """What an element of each backward weighs in the step."""
        return [float(weight) for weight in self.rows.per_element]

    def total(self, name: str) -> float:
        """The sum of a number over all backwards; NaN where one of them lacks it."""
        numbers = [details.get(name) for details in self.details]
        plain = bool(numbers) and all(isinstance(n, int | float) for n in numbers)
        return math.fsum(numbers) if plain else math.nan

    def gathered(self, name: str) -> set[str] | None:
        """What the backwards list under a name; None where nothing was looked at."""
        if not self.details or not all("dtypes" in details for details in self.details):
            return None
        return {str(each) for details in self.details for each in details.get(name, ())}

    @property
    def precision(self) -> str:
        """The coarsest type of floating-point numbers that took part."""
        used = {self.ledger.parameters[p].dtype for p in self.columns} | (self.gathered("dtypes") or set())
        return max((name for name in used if name in _EPS), key=_EPS.__getitem__, default="float32")


class Case:
    """Two windows whose steps differ, and what is asked of both."""

    def __init__(self, a: Window, b: Window, pair: Compared, at: int, before: tuple[Compared, ...]) -> None:
        self.a, self.b, self.pair, self.at, self.before = a, b, pair, at, before
        self.ruled_out: dict[str, str] = {}
        self.undecided: dict[str, str] = {}
        both = [i for i, part in enumerate(pair.parameters) if part.how in ("exact", "sketched")]
        there = [(a.columns[i], b.columns[i], i) for i in both]
        self.there = [
            (p, q, i)
            for p, q, i in there
            if a.ledger.state[a.step, p] & PRESENT and b.ledger.state[b.step, q] & PRESENT and pair.parameters[i].size
        ]

    @property
    def rounding(self) -> float:
        """Up to where two gradients are proportional, in the precision at hand."""
        return max(_SAME, _SEVERAL * max(_EPS[self.a.precision], _EPS[self.b.precision]))

    def of(self, window: Window, which: int, read: Callable[[Ledger, int, int], Any], event: int) -> np.ndarray | None:
        """All known elements, or sums of them, of the parameters that both have."""
        found = []
        for places in self.there:
            p = places[which]
            elements = read(window.ledger, p, event)
            if elements is None or not len(elements):
                return None
            found.append(elements)
        return np.concatenate(found) if found else None

    @cached_property
    def read(self) -> tuple[np.ndarray, np.ndarray] | None:
        """What both steps read."""
        a, b = self.of(self.a, 0, known, self.a.step), self.of(self.b, 1, known, self.b.step)
        return None if a is None or b is None or len(a) != len(b) else (a, b)

    def evened(self, window: Window, which: int) -> np.ndarray | None:
        """What the step would have read, had each element weighed the same."""
        total = None
        for b in window.every if window.raw else ():
            added = self.of(window, which, contributed, b)
            if added is None:
                return None
            total = added / window.raw[b] + (0 if total is None else total)
        return total


def factor(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The λ for which a ≈ λ b, and how much of a is left over.

    >>> factor(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    (2.0, 0.0)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        size, whole = float(b @ b), float(a @ a)
        if not (0 < size < math.inf and 0 < whole < math.inf):
            return math.nan, math.inf
        times = float(a @ b) / size
        return times, float(np.linalg.norm(a - times * b) / math.sqrt(whole))


def find(case: Case) -> tuple[Cause, ...]:
    """The causes of a difference, all of it together; none where that cannot be said."""
    if any(math.isnan(part.squared) for part in case.pair.parameters):
        case.undecided |= {"everything": "not looked at: the elements of some gradients were not kept, or not the same"}
        return ()
    owner = list(_owner(case))
    if case.read is None:
        return tuple(owner)
    times, left = factor(*case.read)
    if left <= case.rounding:
        if abs(times - 1) <= max(_SAME, left) and (owner or abs(times - 1) < 1e-6):
            return tuple(owner)
        if abs(times - 1) > case.rounding:
            return (*owner, _scale(case, times))
    else:
        case.ruled_out["×K"] = f"no factor fits: the best, {times:.3g}, leaves {percent(left)}"
    if _differ(case, "weights at the beginning", *_beginnings(case)):
        return (Cause("weights", "The recordings began with different weights.", {}),)
    if _moved(case):
        said = "The steps before moved the weights differently: the optimizers' settings or rates differ."
        return (Cause("weights", said, _rates(case)),)
    sums = [(window.total("targets"), window.total("targets_squared")) for window in (case.a, case.b)]
    if any(_differ(case, "data", *pair) for pair in zip(*sums, strict=True)):
        evidence = {
            "backwards": [len(case.a.every), len(case.b.every)],
            "sums of targets": [total for total, _ in sums],
        }
        return (Cause("data", "The steps consume different samples: their targets have different sums.", evidence),)
    weights = _element_weights(case)
    if weights is not None:
        return (*owner, weights)
    if owner:
        return ()
    return _layers_and_precision(case)


def _owner(case: Case) -> Iterator[Cause]:
    for side, other in (("a", "b"), ("b", "a")):
        names = [part.name for part in case.pair.parameters if part.how == "one" and part.side == other]
        if names:
            said = f"The step of {side} reads no gradient of parameters that {other}'s step reads."
            yield Cause("owner", said, {"parameters": names})


def _scale(case: Case, times: float) -> Cause:
    """One factor for all: a tail, a clip, or nothing better than the factor itself."""
    a, b = case.a, case.b
    sums = {"factor": times, "backwards": [len(a.backwards), len(b.backwards)]}
    totals = [float(window.rows.share.sum()) for window in (a, b)]
    if all(map(math.isfinite, totals)):
        sums["sums of shares"] = totals
    clips = [float(window.rows.clipped.min(initial=1.0)) for window in (a, b)]
    if all(clips) and abs(clips[0] / clips[1] - times) <= 1e-2 * abs(times) and abs(clips[0] / clips[1] - 1) > _SAME:
        return Cause("clip", "They are clipped by different factors, and equal but for that.", {"clipped by": clips})
    for window in (a, b):
        usual = max((len(w.backwards) for w in window.ledger.windows() if w.step < window.step), default=0)
        many = len(window.backwards)
        if case.at and many < usual and min(abs(times * usual / many - 1), abs(times * many / usual - 1)) < 1e-2:
            sums["in a whole window"] = usual
            said = f"The window holds {many} micro-batches, and one of the two divides it by {usual}."
            return Cause("tail", said, sums)
    k = times if abs(times) >= 1 else 1 / times
    said = f"One gradient is {k:.4g} times the other, in every element: they differ by a division."
    return Cause("×K", said, sums)


def _beginnings(case: Case) -> tuple[float, float]:
    """What tells the weights at the beginning, of either recording."""
    found = []
    for ledger in (case.a.ledger, case.b.ledger):
        first = next(iter(ledger.of("backward")), None)
        value = None if first is None else first.details.get("weights")
        found.append(float(value) if isinstance(value, int | float) else math.nan)
    return found[0], found[1]


def _differ(case: Case, name: str, a: float, b: float) -> bool:
    """Whether two numbers that should be one differ; that they are one, or not known, is kept."""
    if math.isnan(a) or math.isnan(b):
        case.undecided.setdefault(name, "recorded without sketch=N, or nothing to tell it by")
        return False
    if abs(a - b) <= 1e-6 * max(abs(a), abs(b)):
        case.ruled_out.setdefault(name, "the same in both")
        return False
    return True


def _settings(ledger: Ledger) -> Any:
    return ledger.meta.get("optimizer_settings")


def _rates(case: Case) -> dict[str, Any]:
    """The learning rates of the steps before, in each."""
    a, b = case.a.ledger, case.b.ledger
    steps = [[a[pair.a] for pair in case.before], [b[pair.b] for pair in case.before]]
    rates = [[rate for event in events for rate in event.details.get("lr", ())] for events in steps]
    return {"rates in a": rates[0], "in b": rates[1]}


def _moved(case: Case) -> bool:
    """Whether the steps before this one, which read the same gradients, did something else with them."""
    if not case.before:
        return False
    rates = list(_rates(case).values())
    return bool(rates[0] != rates[1] or _settings(case.a.ledger) != _settings(case.b.ledger))


def _element_weights(case: Case) -> Cause | None:
    """Proved: with each element at the same weight, what both have gathered is one gradient."""
    name = "element weights"
    even = [case.evened(case.a, 0), case.evened(case.b, 1)]
    if even[0] is None or even[1] is None or len(even[0]) != len(even[1]):
        case.undecided[name] = "what an element of each backward weighs, or what each backward added, is not known"
        return None
    _, left = factor(even[0], even[1])
    spread = [_spread(window.weights) for window in (case.a, case.b)]
    if left > case.rounding:
        case.ruled_out[name] = f"with each element at the same weight, {percent(left)} are left"
        return None
    if max(spread) <= 1 + _SAME:
        case.ruled_out[name] = "each element weighs the same, in both"
        return None
    said = "An element of one micro-batch weighs more than one of another; with equal weights the gradients are one."
    evidence = {"shares per element in a": case.a.weights, "in b": case.b.weights}
    return Cause(name, said, evidence)


def _spread(weights: list[float]) -> float:
    low, high = min(weights, default=1.0), max(weights, default=1.0)
    return math.inf if low <= 0 < high else high / low if low > 0 else 1.0


def _layers_and_precision(case: Case) -> tuple[Cause, ...]:
    """BatchNorm, dropout, or precision: the only one of them that can be, with the same data and weights."""
    a, b = case.a, case.b
    layers = [window.gathered("layers") for window in (a, b)]
    suspects: list[Cause] = []
    if layers[0] is None or layers[1] is None:
        unseen = "what the forwards depended on was not looked at; record(..., sketch=N) does"
        case.undecided |= {"BatchNorm": unseen, "dropout": unseen}
    else:
        suspects = list(_layers(case, layers[0], layers[1]))
    coarse = max((a.precision, b.precision), key=_EPS.__getitem__)
    bound = _SEVERAL * _EPS[coarse]
    # What rounding leaves of a gradient that cancels may be large beside it, but is small beside the whole difference.
    beyond = [part for part in case.pair.parameters if part.relative - part.uncertainty > bound]
    most = sum(part.squared for part in beyond) > sum(part.squared for part in case.pair.parameters) / 2
    if coarse in ("float64", "float32") or case.pair.relative > bound:
        case.ruled_out["precision"] = f"more than {coarse} does: that is {percent(bound)} at most"
    elif most:
        worst = max(beyond, key=lambda part: part.squared)
        case.ruled_out["precision"] = f"more than {coarse} does to {worst.name}: {percent(bound)} of it at most"
    else:
        said = f"The difference is what {coarse} rounds away, with an eps of {_EPS[coarse]:.2g}."
        suspects.append(Cause("precision", said, {"a": a.precision, "b": b.precision, "eps": _EPS[coarse]}))
    same = all(case.ruled_out.get(name) == "the same in both" for name in ("weights at the beginning", "data"))
    if len(suspects) == 1 and (same or suspects[0].name == "precision") and layers[0] is not None:
        return (suspects[0],)
    why = (
        "it may be, and so may "
        if len(suspects) > 1
        else "it may be; whether data and weights are the same is not known"
    )
    for one in suspects:
        others = " and ".join(other.name for other in suspects if other is not one)
        case.undecided[one.name] = why + others
    return ()


def _layers(case: Case, a: set[str], b: set[str]) -> Iterator[Cause]:
    sizes = [[window.elements(b) for b in window.every] for window in (case.a, case.b)]
    alike = len(sizes[0]) == len(sizes[1]) and bool(np.allclose(sizes[0], sizes[1], equal_nan=True))
    for name in ("BatchNorm", "dropout"):
        modes = {"training mode in a": name in a, "in b": name in b}
        if name not in a | b:
            case.ruled_out[name] = "no such layer in training mode"
        elif name in a and name in b and name == "BatchNorm" and alike:
            case.ruled_out[name] = "the batches are of the same size, so its statistics are the same"
        elif (name in a) != (name in b):
            yield Cause(name, f"{name} is in training mode in one of them only.", modes)
        elif name == "BatchNorm":
            said = "BatchNorm is in training mode and normalises by the batch at hand, which is another in each."
            yield Cause(name, said, modes | {"elements in a": sizes[0], "elements in b": sizes[1]})
        else:
            yield Cause(name, "Dropout is in training mode and drew other numbers in each.", modes)
