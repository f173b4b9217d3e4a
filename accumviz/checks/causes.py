"""Why two gradients of a step differ: a cause is named where the numbers prove it; else what it is not, or may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from accumviz.checks.comparison import Cause, Compared, percent
from accumviz.checks.distance import contributed, known
from accumviz.ledger.events import PRESENT
from accumviz.ledger.ledger import Ledger

_EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
# What the order of additions does to a gradient of single precision: so much of its size at most.
ROUNDING = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-4, "bfloat16": 1e-4}
# One factor, or proportional: to so much. What comes from differences of sums is no more exact.
_SAME = 2e-3
# What is said of samples: of them, only the targets are looked at.
_UNSEEN = "the targets have the same sums, and inputs are not compared"
_UNTOLD = "recorded without sketch=N, or nothing to tell it by"
# Half precision rounds each operation by up to its eps: over a network, by several.
_SEVERAL = 8


class Window:
    """One ledger's side of a step: what it consumed, and what is known of that."""

    def __init__(
        self, ledger: Ledger, step: int, names: Sequence[int], backwards: Sequence[int]
    ) -> None:
        self.ledger, self.step, self.columns = ledger, step, names
        # What was erased before the step has a row, too, and is no part of what it consumed.
        self.every = ledger.shares().of(step)
        self.rows = self.every.take(np.isin(self.every.backward, backwards))
        self.consumed = set(backwards)
        self.backwards = tuple(sorted(self.consumed))

    @cached_property
    def with_erased(self) -> tuple[int, ...]:
        """What it consumed, and what had been erased by then."""
        return tuple(sorted({*self.every.backward.tolist(), *self.backwards}))

    @cached_property
    def details(self) -> list[Any]:
        """Of each backward that it consumed."""
        return [self.ledger[b].details for b in self.backwards]

    def elements(self, b: int) -> float:
        """How many elements a backward's loss is over; NaN where that is not known."""
        found = [term.get("elements") for term in self.ledger[b].terms]
        return float(found[0]) if len(found) == 1 and found[0] is not None else math.nan

    @cached_property
    def sizes(self) -> list[float]:
        """How many elements each backward is over, in order of size; none where that is not known of each."""
        found = sorted(self.elements(b) for b in self.backwards)
        return [] if any(map(math.isnan, found)) else found

    def raw(self, b: int) -> float:
        """What an element weighed in what a backward added, before anything happened to it; NaN if not known."""
        rows, here = self.every, np.flatnonzero(self.every.backward == b)
        if here.size != 1 or rows.opaque[here[0]]:
            return math.nan
        i = int(here[0])
        weight = float(
            rows.constant[i] / rows.elements[i] if rows.mean[i] else rows.constant[i]
        )
        return weight if 0 < weight < math.inf else math.nan

    def weights(self, backwards: Sequence[int]) -> list[float]:
        """What an element of each of these backwards weighs in the step."""
        return [
            float(weight)
            for weight in self.every.per_element[
                np.isin(self.every.backward, backwards)
            ]
        ]

    @property
    def shares(self) -> float:
        """The sum of the shares; NaN where they are not known."""
        return float(self.rows.share.sum()) if len(self.rows) else math.nan

    def targets(self, backwards: Sequence[int]) -> list[float]:
        """The sum of the targets of these backwards, and that of their squares; NaN where one of them has none."""
        found = []
        for name in ("targets", "targets_squared"):
            numbers: list[Any] = [self.ledger[b].details.get(name) for b in backwards]
            plain = bool(numbers) and all(isinstance(n, int | float) for n in numbers)
            found.append(math.fsum(numbers) if plain else math.nan)
        return found

    def gathered(self, name: str) -> set[str] | None:
        """What the backwards list under a name; None where nothing was looked at."""
        if not self.details or not all("dtypes" in details for details in self.details):
            return None
        return {str(each) for details in self.details for each in details.get(name, ())}

    @property
    def precision(self) -> str:
        """The coarsest type of floating-point numbers that took part."""
        used = {self.ledger.parameters[p].dtype for p in self.columns} | (
            self.gathered("dtypes") or set()
        )
        return max(
            (name for name in used if name in _EPS),
            key=_EPS.__getitem__,
            default="float32",
        )


class Case:
    """Two windows whose steps differ, and what is asked of both."""

    def __init__(
        self,
        a: Window,
        b: Window,
        pair: Compared,
        at: int,
        before: tuple[Compared, ...],
    ) -> None:
        self.a, self.b, self.pair, self.at, self.before = a, b, pair, at, before
        self.ruled_out: dict[str, str] = {}
        self.undecided: dict[str, str] = {}
        both = [
            i
            for i, part in enumerate(pair.parameters)
            if part.how in ("exact", "sketched")
        ]
        there = [(a.columns[i], b.columns[i], i) for i in both]
        self.there = [
            (p, q, i)
            for p, q, i in there
            if a.ledger.state[a.step, p] & PRESENT
            and b.ledger.state[b.step, q] & PRESENT
            and pair.parameters[i].size
        ]

    @property
    def rounding(self) -> float:
        """Up to where two gradients are proportional, in the precision at hand."""
        return max(
            _SAME, _SEVERAL * max(_EPS[self.a.precision], _EPS[self.b.precision])
        )

    def of(
        self,
        window: Window,
        which: int,
        read: Callable[[Ledger, int, int], Any],
        event: int,
    ) -> np.ndarray | None:
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
        a, b = (
            self.of(self.a, 0, known, self.a.step),
            self.of(self.b, 1, known, self.b.step),
        )
        return None if a is None or b is None or len(a) != len(b) else (a, b)

    def evened(
        self, window: Window, which: int, backwards: Sequence[int]
    ) -> np.ndarray | None:
        """What the step would have read of these backwards, had each element weighed the same."""
        total = None
        for b in backwards:
            added, weight = self.of(window, which, contributed, b), window.raw(b)
            if added is None or math.isnan(weight):
                return None
            total = added / weight + (0 if total is None else total)
        return total

    @property
    def added_alike(self) -> bool:
        """Whether what the backwards added differs by less than a tenth of what the gradients do."""
        if self.read is None or len(self.a.backwards) != len(self.b.backwards):
            return False
        apart = 0.0
        for one, other in zip(self.a.backwards, self.b.backwards, strict=True):
            x, y = (
                self.of(self.a, 0, contributed, one),
                self.of(self.b, 1, contributed, other),
            )
            if x is None or y is None or len(x) != len(y):
                return False
            apart += float(np.linalg.norm(x - y))
        return apart <= float(np.linalg.norm(self.read[0] - self.read[1])) / 10


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
    """The causes of a difference; none where the numbers prove none."""
    parts = case.pair.parameters
    if any(math.isnan(part.squared) for part in parts):
        kept = "the elements of some gradients were not kept, or not the same"
        why = (
            "a gradient is not finite"
            if any(part.how == "not finite" for part in parts)
            else kept
        )
        case.undecided["everything"] = f"not looked at: {why}"
        return ()
    owner = list(_owner(case))
    if case.read is None:
        return tuple(owner)
    begun, samples = (
        _same(*_beginnings(case)),
        _samples(case, case.a.backwards, case.b.backwards),
    )
    times, left = factor(*case.read)
    if left > case.rounding:
        case.ruled_out["×K"] = (
            f"no factor fits: the best, {times:.3g}, leaves {percent(left)}"
        )
    elif abs(times - 1) <= max(_SAME, left) and (owner or abs(times - 1) < 1e-6):
        return tuple(owner)
    elif abs(times - 1) > case.rounding:
        scale = _scale(case, times, left, False not in (begun, samples))
        if scale is not None:
            return (*owner, scale)
    if begun is False:
        return (Cause("weights", "The recordings began with different weights.", {}),)
    if begun is None:
        case.undecided["weights at the beginning"] = _UNTOLD
    else:
        case.ruled_out["weights at the beginning"] = "the same in both"
    if _moved(case):
        said = "The steps before moved the weights differently: the optimizers' settings or rates differ."
        return (Cause("weights", said, _rates(case)),)
    weights = _element_weights(case)
    if weights is not None:
        return (*owner, weights)
    if samples is False:
        evidence = {
            "backwards": [len(case.a.backwards), len(case.b.backwards)],
            "sums of targets": [
                window.targets(window.backwards)[0] for window in (case.a, case.b)
            ],
        }
        return (
            Cause(
                "data",
                "The steps consume different samples: their targets have different sums.",
                evidence,
            ),
        )
    if case.added_alike:
        why = "what the backwards added differs by less than a tenth of that"
        case.ruled_out |= dict.fromkeys(("data", "BatchNorm", "dropout"), why)
    else:
        case.undecided["data"] = f"it may be: {_UNSEEN}" if samples else _UNTOLD
    if owner:
        return ()
    return _layers_and_precision(case, bool(begun and samples))


def _owner(case: Case) -> Iterator[Cause]:
    for side, other in (("a", "b"), ("b", "a")):
        names = [
            part.name
            for part in case.pair.parameters
            if part.how == "one" and part.side == other
        ]
        if names:
            said = f"The step of {side} reads no gradient of parameters that {other}'s step reads."
            yield Cause("owner", said, {"parameters": names})


def _scale(case: Case, times: float, left: float, alike: bool) -> Cause | None:
    """One factor for all: a clip, a tail, or the factor itself, where anything but the one ratio tells of it.

    `alike` is whether weights and samples may be the same: gradients of others may be proportional, too.
    """
    a, b = case.a, case.b
    sums: dict[str, Any] = {
        "factor": times,
        "backwards": [len(a.backwards), len(b.backwards)],
    }
    totals = [a.shares, b.shares]
    told = all(map(math.isfinite, totals))
    if told:
        sums["sums of shares"] = totals
    clips = [float(window.rows.clipped.min(initial=1.0)) for window in (a, b)]
    if (
        all(clips)
        and abs(clips[0] / clips[1] - times) <= 1e-2 * abs(times)
        and abs(clips[0] / clips[1] - 1) > _SAME
    ):
        return Cause(
            "clip",
            "They are clipped by different factors, and equal but for that.",
            {"clipped by": clips},
        )
    k = times if abs(times) >= 1 else 1 / times
    alone = max(map(np.count_nonzero, case.read or ()), default=0) <= 1
    # A mean over more elements, such as padding, divides by more, and its share is the same.
    pairs = (
        [totals]
        if alone or not (told and alike)
        else [totals, [w.rows.per_element.mean() for w in (a, b)]]
    )
    if told and all(abs(x - times * y) > case.rounding * abs(x) for x, y in pairs):
        why = f", but their sums of shares are {totals[0]:.4g} and {totals[1]:.4g}"
    elif alone and not told:
        why = ", as any one number is, and their shares are not known"
    else:
        why = (
            ""
            if told or alike
            else ", but not of the same weights and samples, and their shares are not known"
        )
    if why:
        case.undecided["×K"] = f"one gradient is {k:.4g} times the other{why}"
        return None
    for window in (a, b):
        usual = max(
            (len(w.backwards) for w in window.ledger.windows() if w.step < window.step),
            default=0,
        )
        many = len(window.backwards)
        if (
            case.at
            and many < usual
            and min(abs(times * usual / many - 1), abs(times * many / usual - 1)) < 1e-2
        ):
            sums["in a whole window"] = usual
            said = f"The window holds {many} micro-batches, and one of the two divides it by {usual}."
            return Cause("tail", said, sums)
    coarse = max(a.precision, b.precision, key=_EPS.__getitem__)
    rest = (
        ", in every element"
        if left <= _SAME
        else f" but for {percent(left)}, which {coarse} may round away"
    )
    said = f"One gradient is {k:.4g} times the other{rest}: they differ by a division."
    return Cause("×K", said, sums)


def _beginnings(case: Case) -> tuple[float, float]:
    """What tells the weights at the beginning, of either recording."""
    found = []
    for ledger in (case.a.ledger, case.b.ledger):
        first = next(iter(ledger.of("backward")), None)
        value = None if first is None else first.details.get("weights")
        found.append(float(value) if isinstance(value, int | float) else math.nan)
    return found[0], found[1]


def _samples(case: Case, mine: Sequence[int], theirs: Sequence[int]) -> bool | None:
    """Whether the targets of these backwards have the same sums in both; None where that is not known."""
    found = [
        _same(*pair)
        for pair in zip(case.a.targets(mine), case.b.targets(theirs), strict=True)
    ]
    return False if False in found else None if None in found else True


def _same(a: float, b: float) -> bool | None:
    """Whether two numbers that should be one are; None where one of them is not known."""
    return (
        None
        if math.isnan(a) or math.isnan(b)
        else abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    )


def _settings(ledger: Ledger) -> Any:
    return ledger.meta.get("optimizer_settings")


def _rates(case: Case) -> dict[str, Any]:
    """The learning rates of the steps before, in each."""
    a, b = case.a.ledger, case.b.ledger
    steps = [[a[pair.a] for pair in case.before], [b[pair.b] for pair in case.before]]
    rates = [
        [rate for event in events for rate in event.details.get("lr", ())]
        for events in steps
    ]
    return {"rates in a": rates[0], "in b": rates[1]}


def _moved(case: Case) -> bool:
    """Whether the steps before this one, which read the same gradients, did something else with them."""
    if not case.before:
        return False
    rates = list(_rates(case).values())
    return bool(
        rates[0] != rates[1] or _settings(case.a.ledger) != _settings(case.b.ledger)
    )


def _element_weights(case: Case) -> Cause | None:
    """Proved: with each element at the same weight, what both have gathered is one gradient."""
    name, a, b = "element weights", case.a, case.b
    # Zeroed inside the window, a sample weighs nothing; before the window, it was none of it.
    for mine, theirs in dict.fromkeys(
        [(a.backwards, b.backwards), (a.with_erased, b.with_erased)]
    ):
        if _samples(case, mine, theirs) is False:
            continue
        even = case.evened(a, 0, mine), case.evened(b, 1, theirs)
        weights = [a.weights(mine), b.weights(theirs)]
        told = all(math.isfinite(weight) for weight in weights[0] + weights[1])
        if (
            even[0] is None
            or even[1] is None
            or len(even[0]) != len(even[1])
            or not told
        ):
            if name not in case.ruled_out:
                why = "what an element of each backward weighs, or what each backward added, is not known"
                case.undecided[name] = why
            return None
        times, left = factor(even[0], even[1])
        if np.count_nonzero(even[0]) <= 1:  # any one number is a multiple of another
            left = abs(times - 1)
        if max(map(_spread, weights)) <= 1 + _SAME:
            case.ruled_out.setdefault(name, "each element weighs the same, in both")
        elif not left <= min(case.rounding, case.pair.relative / 2):
            case.ruled_out.setdefault(
                name, f"with each element at the same weight, {percent(left)} are left"
            )
        else:
            case.ruled_out.pop(name, None)
            said = "An element of one micro-batch weighs more than one of another"
            evidence = {"shares per element in a": weights[0], "in b": weights[1]}
            return Cause(
                name, f"{said}; with equal weights the gradients are one.", evidence
            )
    return None


def _spread(weights: list[float]) -> float:
    low, high = min(weights, default=1.0), max(weights, default=1.0)
    return math.inf if low <= 0 < high else high / low if low > 0 else 1.0


def _layers_and_precision(case: Case, alike: bool) -> tuple[Cause, ...]:
    """BatchNorm, dropout, or precision: the only one of them that can be, where it is known not to be the same in both.

    `alike` is whether nothing tells the weights and the samples of one recording from those of the other.
    """
    a, b = case.a, case.b
    layers = [window.gathered("layers") for window in (a, b)]
    resized = (
        bool(a.sizes and b.sizes)
        and a.sizes != b.sizes
        and sum(a.sizes) == sum(b.sizes)
    )
    suspects: dict[str, Cause | None] = {}
    if layers[0] is None or layers[1] is None:
        unseen = "what the forwards depended on was not looked at; record(..., sketch=N) does"
        case.undecided |= {
            name: unseen
            for name in ("BatchNorm", "dropout")
            if name not in case.ruled_out
        }
    else:
        suspects |= _layers(case, layers[0], layers[1], resized)
    coarse = max((a.precision, b.precision), key=_EPS.__getitem__)
    bound = _SEVERAL * _EPS[coarse]
    # What rounding leaves of a gradient that cancels may be large beside it, but is small beside the whole difference.
    beyond = [
        part
        for part in case.pair.parameters
        if part.relative - part.uncertainty > bound
    ]
    most = (
        sum(part.squared for part in beyond)
        > sum(part.squared for part in case.pair.parameters) / 2
    )
    if coarse in ("float64", "float32") or case.pair.relative > bound:
        case.ruled_out["precision"] = (
            f"more than {coarse} does: that is {percent(bound)} at most"
        )
    elif most:
        worst = max(beyond, key=lambda part: part.squared)
        case.ruled_out["precision"] = (
            f"more than {coarse} does to {worst.name}: {percent(bound)} of it at most"
        )
    else:
        said = f"The difference is no more than {coarse} may round away, with an eps of {_EPS[coarse]:.2g}."
        # The same batches in the same precision are rounded alike.
        other = (a.precision, len(a.backwards)) != (
            b.precision,
            len(b.backwards),
        ) or resized
        evidence = {"a": a.precision, "b": b.precision, "eps": _EPS[coarse]}
        suspects["precision"] = (
            Cause("precision", said, evidence)
            if other and "data" in case.undecided
            else None
        )
    only = (
        next(iter(suspects.values()))
        if len(suspects) == 1 and layers[0] is not None
        else None
    )
    if only is not None and (alike or only.name == "precision"):
        return (only,)
    unknown = [
        name for name in ("weights at the beginning", "data") if name in case.undecided
    ]
    for name in suspects:
        others = [other for other in (*suspects, *unknown) if other != name]
        case.undecided[name] = "it may be" + (
            ", and so may " + " and ".join(others) if others else ""
        )
    return ()


def _layers(
    case: Case, a: set[str], b: set[str], resized: bool
) -> Iterator[tuple[str, Cause | None]]:
    """The layers that may be a cause, with the cause where it is proved that they did something else in each."""
    for name in ("BatchNorm", "dropout"):
        modes: dict[str, Any] = {"training mode in a": name in a, "in b": name in b}
        if name not in a | b:
            case.ruled_out[name] = "no such layer in training mode"
        elif name in case.ruled_out:
            continue
        elif (name in a) != (name in b):
            yield (
                name,
                Cause(name, f"{name} is in training mode in one of them only.", modes),
            )
        elif name == "BatchNorm" and resized:
            said = "BatchNorm is in training mode and normalises by the batch at hand, which is another in each."
            sizes = {
                f"elements in {letter}": w.sizes
                for letter, w in (("a", case.a), ("b", case.b))
            }
            yield name, Cause(name, said, modes | sizes)
        else:  # it may have seen other batches, or drawn other numbers
            yield name, None
