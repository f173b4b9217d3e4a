"""Split `.grad` into the contributions in it, and lay out its bars, for matplotlib and for the page to paint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.flow import SAME, SAME_IN_HALF
from accumviz.ledger.ledger import CHANGED, CONTRIBUTED, PRESENT, Ledger
from accumviz.show import encoded
from accumviz.views import words

# Up to so many parameters are drawn as lanes; on a page, of up to so many events, which are as many as have room.
MOST_LANES = 8
_MOST_EVENTS = 96
# How a part looks: added by this event, live since an earlier one, used by a step, or not from a recorded backward.
LOOKS = ("new", "live", "used", "unseen")
_MOST_COLORS = 8
# What a legend says where a gradient scaler is at work.
SCALED = "Bars are divided by the factor of the gradient scaler, numbers are not."


class Part(NamedTuple):
    """A part of `.grad` after an event: the backward that put it there, how much it is, and how it looks.

    `born` is -1 for what no recorded backward put there, or by a factor that is unknown. The look is "new" at the event
    that adds it, "live", "used" by a step, or "unseen".
    """

    born: int
    amount: float
    look: str


class Gradient:
    """One parameter's `.grad` over time, and what of it is from which backward."""

    def __init__(self, ledger: Ledger, parameter: int) -> None:
        self.ledger = ledger
        self.parameter = parameter
        self.signed = words.is_signed(ledger, parameter)
        if self.signed:
            added, grad = ledger.exact[parameter]
            self.added = added[:, 0]
            self.grad = grad[:, 0]
        else:
            self.added = ledger.contribution[:, parameter].astype(float)
            self.grad = ledger.grad[:, parameter].astype(float)
        consumed = ledger.outcomes.consumed[:, parameter]
        self.consumed = np.where(consumed < 0, len(ledger), consumed)
        self.scales = scales(ledger, parameter)
        half = "16" in ledger.parameters[parameter].dtype
        self.tolerance = SAME_IN_HALF if half else SAME

    def is_present(self, event: int) -> bool:
        """Return whether there is a `.grad` after the event."""
        return bool(self.ledger.state[event, self.parameter] & PRESENT)

    def parts(self, event: int) -> list[Part]:
        """Return what is in `.grad` after an event, first what no recorded contribution is."""
        flow = self.ledger.flow
        born = flow.live(event, self.parameter)
        coefficients = flow.coefficients(self.parameter, born, event)
        lost = np.isnan(coefficients)
        amounts = (self.added[born] * coefficients)[~lost].tolist()
        parts = []
        for backward, amount in zip(born[~lost].tolist(), amounts, strict=True):
            parts.append(Part(backward, amount, self._look(backward, event)))
        # Norms do not add up: how much of one is there by an unknown factor is a guess, and hatched.
        rest = float(self.added[born[lost]].sum())
        if self.signed:
            rest = self._rest(event, amounts)
        if rest:
            parts.insert(0, Part(-1, rest, "unseen"))
        return parts

    def _look(self, backward: int, event: int) -> str:
        if backward == event:
            return "new"
        return "used" if self.consumed[backward] <= event else "live"

    def _rest(self, event: int, amounts: list[float]) -> float:
        """Return what is in `.grad` besides these amounts, 0 where that is rounding."""
        if not self.is_present(event):
            return 0.0
        grad = float(self.grad[event])
        rest = math.nan
        if np.isfinite(amounts).all():
            rest = grad - math.fsum(amounts)
        largest = max(map(abs, [grad, *amounts]))
        return rest if abs(rest) > self.tolerance * largest else 0.0


def scales(ledger: Ledger, parameter: int) -> list[float]:
    """Return by what a gradient scaler has multiplied `.grad` after each event: 1 without one, and once it is unscaled.

    >>> from accumviz.ledger.ledger import Parameter
    >>> scaler = {"amp_scale": 8.0}
    >>> rows = [
    ...     dict(kind="backward", contribution={"w": 16}, grad={"w": 16}, details=scaler),
    ...     dict(kind="unscale", grad={"w": 2}, details=scaler),
    ... ]
    >>> scales(Ledger.build([Parameter("w", (1,))], rows), 0)
    [8.0, 1.0]
    """
    factors = ledger.columns.detail("amp_scale", 1.0)
    if not (factors != 1).any():
        return [1.0] * len(ledger)
    found = _followed(ledger, parameter, factors)
    return [scale if 0 < scale < math.inf else 1.0 for scale in found]


def _followed(ledger: Ledger, parameter: int, factors: np.ndarray) -> Iterator[float]:
    """Yield by what `.grad` is multiplied after each event, as the scaler's factors say."""
    state = ledger.state[:, parameter]
    is_empty = ~(ledger.grad[:, parameter] > 0)
    scale = 1.0
    # What is added to a sum that is unscaled already is as large as it looks.
    is_fresh = True
    for e, event in enumerate(ledger.events):
        if is_empty[e]:
            scale, is_fresh = 1.0, True
        elif event.kind == "backward" and state[e] & CONTRIBUTED:
            scale = float(factors[e]) if is_fresh else scale
            is_fresh = False
        elif event.kind in ("unscale", "step") and state[e] & CHANGED:
            scale = 1.0
        yield scale


def segments(ledger: Ledger, parameter: int, events: Sequence[int]) -> list[list[Part]]:
    """Split `.grad` after each event into the contributions live in it.

    Amounts are signed for a parameter of one recorded element, 2-norms else, each times its
    coefficient in the flow. What is there by an unknown coefficient, or was not recorded, is one
    part, the first.

    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = Ledger.build([Parameter("w", (1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ...     dict(kind="clip", grad={"w": -1}),
    ... ])
    >>> [[part.amount for part in parts] for parts in segments(ledger, 0, [0, 1])]
    [[-16.0], [-1.0]]
    """
    gradient = Gradient(ledger, parameter)
    return [gradient.parts(e) for e in events]


def count_parts(ledger: Ledger) -> int:
    """Return how many parts all bars of all parameters have together, at most."""
    count = 0
    for history in ledger.flow.histories:
        lifetimes = int((history.end - history.born).sum())
        count += len(history.parameters) * lifetimes
    return count


def _together(stacks: Iterable[list[Part]]) -> list[Part]:
    """Put the parts of several parameters together, backward by backward: norms of what one of them added.

    >>> _together([[Part(0, 3.0, "live")], [Part(0, -4.0, "used")]])
    [Part(born=0, amount=5.0, look='used')]
    """
    squares: dict[int, float] = {}
    looks: dict[int, str] = {}
    for parts in stacks:
        for part in parts:
            squares[part.born] = squares.get(part.born, 0.0) + part.amount**2
            if part.look == "used" or part.born not in looks:
                looks[part.born] = part.look
    norms = []
    for born in sorted(squares):
        norms.append(Part(born, math.sqrt(squares[born]), looks[born]))
    return norms


# --- bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """`.grad` after one event: what it comes to, and the parts of its bar, the oldest first, with their lengths.

    `state` is "whole", "none" where there is no `.grad`, and "broken" where a number is not finite. Lengths are
    divided by `scale`, the gradient scaler's factor.
    """

    state: str
    grad: float
    parts: tuple[Part, ...] = ()
    lengths: tuple[float, ...] = ()
    scale: float = 1.0

    @property
    def end(self) -> float:
        """Where it ends, in the units of its lengths."""
        return self.grad / self.scale

    def pieces(self) -> Iterator[tuple[Part, float, float]]:
        """Yield each part, where it starts and its length: above zero they stand on each other, below they hang."""
        above = 0.0
        below = 0.0
        for part, length in zip(self.parts, self.lengths, strict=True):
            if length >= 0:
                yield part, above, length
                above += length
            else:
                yield part, below, length
                below += length

    @property
    def reach(self) -> tuple[float, float]:
        """How far it reaches below and above zero."""
        ends = [0.0]
        if self.state == "whole":
            ends.append(self.end)
        for _, start, length in self.pieces():
            ends.append(start + length)
        return min(ends), max(ends)


@dataclass(frozen=True)
class Lane:
    """One parameter's bars, event by event, and the range of values that they reach."""

    parameter: int
    name: str
    signed: bool
    low: float
    high: float
    bars: tuple[Bar, ...]


def lay_out(
    ledger: Ledger, parameters: Sequence[int], events: Sequence[int]
) -> list[Lane]:
    """Return the lanes of these parameters; one parameter has one scale on all of its ranks.

    >>> from accumviz.ledger.ledger import Parameter
    >>> rows = [dict(kind="backward", contribution={"w": -16}, grad={"w": -16})]
    >>> (lane,) = lay_out(Ledger.build([Parameter("w", (1,))], rows), [0], [0])
    >>> lane.low, lane.high, lane.bars[0].lengths
    (-16.0, 0.0, (-16.0,))
    """
    lanes = [_lane(ledger, p, events) for p in parameters]
    scales = one_scale((lane.name, (lane.low, lane.high)) for lane in lanes)
    scaled = []
    for lane in lanes:
        low, high = scales[words.on_any_rank(lane.name)]
        scaled.append(replace(lane, low=low, high=high))
    return scaled


def _lane(ledger: Ledger, p: int, events: Sequence[int]) -> Lane:
    gradient = Gradient(ledger, p)
    bars = []
    for e in events:
        grad = float(gradient.grad[e])
        bar = Bar("none", math.nan)
        if gradient.is_present(e):
            bar = _bar(gradient, e, gradient.parts(e), grad, signed=gradient.signed)
        bars.append(bar)
    low, high = _reach(bars)
    name = ledger.parameters[p].name
    return Lane(p, name, gradient.signed, low, high, tuple(bars))


def _bar(
    gradient: Gradient, event: int, parts: list[Part], grad: float, *, signed: bool
) -> Bar:
    lengths = [part.amount for part in parts]
    whole = sum(lengths)
    if not math.isfinite(whole) or not math.isfinite(grad):
        return Bar("broken", grad)
    if whole and not signed:
        # Norms do not add up: parts of a tensor share the height of its `‖.grad‖`.
        lengths = [length * grad / whole for length in lengths]
    scale = gradient.scales[event]
    scaled = tuple(length / scale for length in lengths)
    return Bar("whole", grad, tuple(parts), scaled, scale)


def _reach(bars: Iterable[Bar]) -> tuple[float, float]:
    """Return how far bars reach below and above zero."""
    low = 0.0
    high = 0.0
    for bar in bars:
        bottom, top = bar.reach
        low = min(low, bottom)
        high = max(high, top)
    return low, high


def one_scale(
    reaches: Iterable[tuple[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """Return how far each parameter reaches on all of its ranks together, because they are compared.

    >>> one_scale([("rank 0 · w", (-1, 0)), ("rank 1 · w", (0, 2))])
    {'w': (-1, 2)}
    """
    scales: dict[str, tuple[float, float]] = {}
    for name_on_rank, (low, high) in reaches:
        name = words.on_any_rank(name_on_rank)
        least, most = scales.get(name, (low, high))
        scales[name] = min(low, least), max(high, most)
    return scales


# --- the page -------------------------------------------------------------------------------------


class PageBars:
    """The bars of `.grad` as a page has them: row by row, each row's events, and each event's parts.

    They are columns, which compress well, and which runs share: `n`, of each bar how many parts it has;
    of each part its `age`, how many events ago it was added (-1: not recorded), what it is `by` the norm of what was
    added (of what was not recorded, how much it is), and the digit of its `look` in `LOOKS`.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.gradients = []
        self.stacks = []
        for p in range(len(ledger.parameters)):
            gradient = Gradient(ledger, p)
            self.gradients.append(gradient)
            self.stacks.append([gradient.parts(e) for e in range(len(ledger))])
        self.columns: dict[str, list[Any]] = {"n": [], "age": [], "by": [], "look": []}

    def add(
        self, members: range, norms: np.ndarray, grads: np.ndarray
    ) -> tuple[float, float]:
        """Add a row of parameters with what it was added and what it had, and return how far its bars reach."""
        gradient = self.gradients[members.start]
        signed = gradient.signed and len(members) == 1
        totals = gradient.grad if signed else grads
        stacks = self._stacks_of(members)
        bars = []
        for e, parts in enumerate(stacks):
            if not grads[e] < 0:
                bars.append(_bar(gradient, e, parts, float(totals[e]), signed=signed))
        self._add_parts(stacks, norms)
        return _reach(bars)

    def _stacks_of(self, members: range) -> list[list[Part]]:
        if len(members) == 1:
            return self.stacks[members.start]
        of_members = self.stacks[members.start : members.stop]
        return [_together(of_event) for of_event in zip(*of_members, strict=True)]

    def _add_parts(self, stacks: list[list[Part]], norms: np.ndarray) -> None:
        ages = []
        factors = []
        looks = ""
        for e, parts in enumerate(stacks):
            for part in parts:
                is_unseen = part.born < 0
                norm = 1.0 if is_unseen else float(norms[part.born])
                ages.append(-1 if is_unseen else e - part.born)
                factors.append(_factor(part.amount, norm))
                looks += str(LOOKS.index(part.look))
        self.columns["n"].append([len(parts) for parts in stacks])
        self.columns["age"].append(ages)
        self.columns["by"].append(factors)
        self.columns["look"].append(looks)


def _factor(amount: float, norm: float) -> float | str:
    """Return what an amount is by a norm, to six digits."""
    factor = amount / norm if norm else 1.0
    return encoded(float(f"{factor:.6g}"))


def lane_height(reaches: Sequence[tuple[float, float]], events: int) -> int:
    """Return how tall a page's lanes are, in pixels; 0 where it draws a heat map instead.

    >>> lane_height([(0, 1)], 3), lane_height([(-1, 1)], 3), lane_height([(0, 1)], 200)
    (84, 160, 0)
    """
    count = len(reaches)
    if not 0 < count <= MOST_LANES or not 0 < events <= _MOST_EVENTS:
        return 0
    for low, high in reaches:
        shorter, longer = sorted([-low, high])
        if shorter > 0.1 * longer:
            return max(min(240 // count, 160), 60)
    return 84 if count == 1 else 60


# --- the legend -----------------------------------------------------------------------------------


def unseen(ledger: Ledger) -> str:
    """Say where what no recorded backward put into `.grad` comes from."""
    return "other ranks" if ledger.of("sync") else "not recorded"


def part_texts(ledger: Ledger) -> dict[str, str]:
    """Return what a legend says of each look of a part of `.grad`."""
    return {
        "new": "added now",
        "live": "already in .grad",
        "used": "used by a step",
        "unseen": unseen(ledger),
    }


def part_keys(
    colors: dict[str, str], looks: set[str], texts: dict[str, str], muted: str
) -> list[tuple[str, str, str]]:
    """Return the legend of the looks that are there: what it says of each, the look, and a colour.

    Where losses have several `colors`, each is named with its own.

    >>> part_keys({"loss": "blue"}, {"new"}, {"new": "added", "used": "used"}, "grey")
    [('added', 'new', 'blue')]
    """
    keys = _label_keys(colors) if "new" in looks else []
    first = next(iter(colors.values()), muted)
    for look, text in texts.items():
        if look not in looks or (look == "new" and keys):
            continue
        color = muted if look == "unseen" else first
        keys.append((text, look, color))
    return keys


def _label_keys(colors: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return an entry for each loss, where they have several colours."""
    if len(set(colors.values())) < 2:
        return []
    keys = []
    for label, color in list(colors.items())[:_MOST_COLORS]:
        keys.append((words.shorten(label or "backward", 28), "new", color))
    return keys
