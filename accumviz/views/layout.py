"""Lay out what is in each `.grad`, once, for matplotlib and for the page: bars of contributions, or a heat map."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.flow import SAME, SAME_IN_HALF
from accumviz.ledger.ledger import CHANGED, CONTRIBUTED, PRESENT, Ledger
from accumviz.show import encoded
from accumviz.views import words

# So many parameters and events are drawn as lanes, which are as many as have room; a page shows more as a heat map.
MOST_LANES = 8
MOST_EVENTS = 96
# How a part looks: added by this event, live since an earlier one, used by a step, or not from a recorded backward.
LOOKS = ("new", "live", "used", "unseen")
_MOST_COLORS = 8
# What a legend says where a gradient scaler is at work.
SCALED = "Bars are divided by the factor of the gradient scaler, numbers are not."
Range = tuple[float, float]
# An entry of a legend: what it says, the look of its swatch, its colour.
Entry = tuple[str, str, str]


class Part(NamedTuple):
    """A part of `.grad` after an event: the backward that put it there, how much it is, and how it looks.

    `born` is -1 for what no recorded backward put there, or by a factor that is unknown. The look is "new" at the event
    that adds it, "live", "used" by a step, or "unseen".
    """

    born: int
    amount: float
    look: str


class Gradient:
    """One parameter's `.grad` over time: signed numbers where they were recorded, norms else."""

    def __init__(self, ledger: Ledger, parameter: int) -> None:
        self.ledger = ledger
        self.parameter = parameter
        is_number = ledger.parameters[parameter].numel == 1
        self.signed = is_number and parameter in ledger.exact
        self.added = ledger.contribution[:, parameter].astype(float)
        self.grad = ledger.grad[:, parameter].astype(float)
        if self.signed:
            added, grad = ledger.exact[parameter]
            self.added = added[:, 0]
            self.grad = grad[:, 0]
        self.scales = scales(ledger, parameter)

    def is_present(self, event: int) -> bool:
        """Return whether there is a `.grad` after the event."""
        return bool(self.ledger.state[event, self.parameter] & PRESENT)

    def parts(self, event: int) -> list[Part]:
        """Split `.grad` after an event into what each backward has in it; the first part is what none is known to have.

        Amounts are contributions times their coefficients in the flow.

        >>> from accumviz.ledger.ledger import Parameter
        >>> ledger = Ledger.build([Parameter("w", (1,))], [
        ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
        ...     dict(kind="clip", grad={"w": -1}),
        ... ])
        >>> Gradient(ledger, 0).parts(1)
        [Part(born=0, amount=-1.0, look='live')]
        """
        flow = self.ledger.flow
        born = flow.live(event, self.parameter)
        coefficients = flow.coefficients(self.parameter, born, event)
        amounts = self.added[born] * coefficients
        is_lost = np.isnan(coefficients)
        parts = []
        for backward, amount in zip(born[~is_lost], amounts[~is_lost], strict=True):
            look = self._look(int(backward), event)
            parts.append(Part(int(backward), float(amount), look))
        # Norms do not add up: how much of one is there by an unknown factor is a guess, and hatched.
        rest = float(self.added[born[is_lost]].sum())
        if self.signed:
            rest = self._rest(event, [part.amount for part in parts])
        if rest:
            parts.insert(0, Part(-1, rest, "unseen"))
        return parts

    def _look(self, backward: int, event: int) -> str:
        if backward == event:
            return "new"
        consumed = self.ledger.outcomes.consumed[backward, self.parameter]
        return "used" if 0 <= consumed <= event else "live"

    def _rest(self, event: int, amounts: list[float]) -> float:
        """Return what is in `.grad` besides these amounts, 0 where that is rounding."""
        if not self.is_present(event):
            return 0.0
        grad = float(self.grad[event])
        rest = math.nan
        if np.isfinite(amounts).all():
            rest = grad - math.fsum(amounts)
        is_half = "16" in self.ledger.parameters[self.parameter].dtype
        tolerance = SAME_IN_HALF if is_half else SAME
        largest = max(map(abs, [grad, *amounts]))
        return rest if abs(rest) > tolerance * largest else 0.0


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
    factors = ledger.events.detail("amp_scale", 1.0)
    state = ledger.state[:, parameter]
    is_empty = ~(ledger.grad[:, parameter] > 0)
    scale = 1.0
    # What is added to a sum that is unscaled already is as large as it looks.
    is_fresh = True
    followed = []
    for e, event in enumerate(ledger.events):
        if is_empty[e]:
            scale = 1.0
            is_fresh = True
        elif event.kind == "backward" and state[e] & CONTRIBUTED:
            if is_fresh and 0 < factors[e] < math.inf:
                scale = float(factors[e])
            is_fresh = False
        elif event.kind in ("unscale", "step") and state[e] & CHANGED:
            scale = 1.0
        followed.append(scale)
    return followed


# --- bars -----------------------------------------------------------------------------------------


class Bar(NamedTuple):
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
        ends = {True: 0.0, False: 0.0}
        for part, length in zip(self.parts, self.lengths, strict=True):
            is_above = length >= 0
            yield part, ends[is_above], length
            ends[is_above] += length

    @property
    def reach(self) -> Range:
        """How far it reaches below and above zero."""
        ends = [0.0]
        if self.state == "whole":
            ends.append(self.end)
        for _, start, length in self.pieces():
            ends.append(start + length)
        return min(ends), max(ends)


def _bar(
    gradient: Gradient,
    event: int,
    parts: list[Part],
    grad: float,
    *,
    signed: bool,
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


class Lane(NamedTuple):
    """One parameter's bars, event by event, and the range of values that they reach."""

    parameter: int
    name: str
    signed: bool
    bars: tuple[Bar, ...]
    reach: Range


def lay_out(
    ledger: Ledger, parameters: Sequence[int], events: Sequence[int]
) -> list[Lane]:
    """Return the lanes of these parameters; one parameter has one scale on all of its ranks.

    >>> from accumviz.ledger.ledger import Parameter
    >>> rows = [dict(kind="backward", contribution={"w": -16}, grad={"w": -16})]
    >>> (lane,) = lay_out(Ledger.build([Parameter("w", (1,))], rows), [0], [0])
    >>> lane.reach, lane.bars[0].lengths
    ((-16.0, 0.0), (-16.0,))
    """
    lanes = [_lane(ledger, p, events) for p in parameters]
    reaches = one_scale([(lane.name, lane.reach) for lane in lanes])
    pairs = zip(lanes, reaches, strict=True)
    return [lane._replace(reach=reach) for lane, reach in pairs]


def _lane(
    ledger: Ledger,
    p: int,
    events: Sequence[int],
) -> Lane:
    gradient = Gradient(ledger, p)
    bars = []
    for e in events:
        grad = float(gradient.grad[e])
        bar = Bar("none", math.nan)
        if gradient.is_present(e):
            bar = _bar(
                gradient,
                e,
                gradient.parts(e),
                grad,
                signed=gradient.signed,
            )
        bars.append(bar)
    name = ledger.parameters[p].name
    return Lane(
        p,
        name,
        gradient.signed,
        tuple(bars),
        _reach(bars),
    )


def _reach(bars: Iterable[Bar]) -> Range:
    """Return how far bars reach below and above zero."""
    bottoms, tops = zip((0.0, 0.0), *[bar.reach for bar in bars], strict=True)
    return min(bottoms), max(tops)


def one_scale(reaches: Sequence[tuple[str, Range]]) -> list[Range]:
    """Return how far each parameter reaches on all of its ranks together, because they are compared.

    >>> one_scale([("rank 0 · w", (-1, 0)), ("rank 1 · w", (0, 2))])
    [(-1, 2), (-1, 2)]
    """
    widest: dict[str, Range] = {}
    # The name of a parameter, without the rank that a merged ledger puts before it.
    names = [re.sub(r"^rank \d+ · ", "", name) for name, _ in reaches]
    for name, (_, (low, high)) in zip(names, reaches, strict=True):
        least, most = widest.get(name, (low, high))
        widest[name] = min(low, least), max(high, most)
    return [widest[name] for name in names]


# --- bars on a page -------------------------------------------------------------------------------


def most_parts(ledger: Ledger) -> int:
    """Return how many parts all bars of all parameters have together, at most: what is never zeroed stays in all."""
    count = 0
    for history in ledger.flow.histories:
        lifetimes = int((history.end - history.born).sum())
        count += len(history.parameters) * lifetimes
    return count


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
        self.columns: dict[str, list[Any]] = {
            "n": [],
            "age": [],
            "by": [],
            "look": [],
        }

    def add(
        self,
        members: range,
        norms: np.ndarray,
        grads: np.ndarray,
    ) -> Range:
        """Add a row of parameters with what it was added and what it had, and return how far its bars reach."""
        gradient = self.gradients[members.start]
        stacks = self.stacks[members.start]
        is_alone = len(members) == 1
        if not is_alone:
            of_members = self.stacks[members.start : members.stop]
            of_events = zip(*of_members, strict=True)
            stacks = list(map(_together, of_events))
        signed = gradient.signed and is_alone
        totals = gradient.grad if signed else grads
        bars = []
        for e, parts in enumerate(stacks):
            if not grads[e] < 0:
                bars.append(_bar(gradient, e, parts, float(totals[e]), signed=signed))
        self._add_parts(stacks, norms)
        return _reach(bars)

    def _add_parts(
        self,
        stacks: list[list[Part]],
        norms: np.ndarray,
    ) -> None:
        ages = []
        factors = []
        looks = ""
        for e, parts in enumerate(stacks):
            for part in parts:
                is_unseen = part.born < 0
                norm = 1.0 if is_unseen else float(norms[part.born])
                factor = part.amount / norm if norm else 1.0
                ages.append(-1 if is_unseen else e - part.born)
                factors.append(encoded(float(f"{factor:.6g}")))
                looks += str(LOOKS.index(part.look))
        self.columns["n"].append(list(map(len, stacks)))
        self.columns["age"].append(ages)
        self.columns["by"].append(factors)
        self.columns["look"].append(looks)


def _together(stacks: Iterable[list[Part]]) -> list[Part]:
    """Put the parts of several parameters together, backward by backward: norms of what one of them added.

    >>> _together([[Part(0, 3.0, "live")], [Part(0, -4.0, "used")]])
    [Part(born=0, amount=5.0, look='used')]
    """
    merged: dict[int, Part] = {}
    for parts in stacks:
        for part in parts:
            before = merged.get(part.born, Part(part.born, 0.0, part.look))
            look = part.look if part.look == "used" else before.look
            amount = math.hypot(before.amount, part.amount)
            merged[part.born] = Part(part.born, amount, look)
    return [merged[born] for born in sorted(merged)]


def lane_height(count: int, events: int) -> int:
    """Return how tall a page's lanes are, in pixels; 0 where it draws a heat map instead.

    >>> lane_height(1, 3), lane_height(4, 3), lane_height(1, 200)
    (160, 60, 0)
    """
    if not 0 < count <= MOST_LANES or not 0 < events <= MOST_EVENTS:
        return 0
    return max(160 // count, 60)


# --- heat maps ------------------------------------------------------------------------------------

# Codes of a byte: nothing, `.grad` is there, a number that is not finite; then levels, label after label.
_PRESENT = 1
_BROKEN = 2
_LEVELS = 30
_LABELS = 8
# Levels span so many decades; of norms that are closer than this, all have the highest.
_DECADES = 6.0
_NARROW = 0.01


def heat(
    added: np.ndarray,
    held: np.ndarray,
    labels: np.ndarray,
    starts: np.ndarray,
    levels: Range | None = None,
) -> np.ndarray:
    """Code norms (-1: none), parameters × events: of each cell's the largest, so that a single spike survives.

    `held` says where there is a `.grad`, `labels` numbers each event's loss. A cell begins at each event of `starts`.
    `levels` are the logarithms between which levels lie (`decades`).

    >>> held = np.array([[False, True, True, True]])
    >>> heat(np.array([[-1, 1.0, 10.0, np.inf]]), held, np.zeros(4, int), np.arange(4)).tolist()
    [[0, 3, 32, 2]]
    """
    low, high = levels or decades(added)
    is_broken = ~np.isfinite(added)
    is_positive = ~is_broken & (added > 0)
    logs = np.log10(
        added,
        where=is_positive,
        out=np.full(added.shape, low),
    )
    share = np.clip(
        (logs - low) / (high - low),
        0,
        1,
    )
    level = np.rint(share * (_LEVELS - 1)).astype(int)
    # The level decides between a cell's events, the label only colours it.
    ranked = level * _LABELS + labels % _LABELS
    ranked[is_broken | (added < 0)] = -1
    ranked = np.maximum.reduceat(ranked, starts, axis=1)
    level, label = np.divmod(ranked, _LABELS)
    colored = _BROKEN + 1 + label * _LEVELS + level
    is_held = np.maximum.reduceat(held, starts, axis=1)
    codes = np.where(ranked >= 0, colored, is_held * _PRESENT)
    codes[np.maximum.reduceat(is_broken, starts, axis=1)] = _BROKEN
    return codes.astype(np.uint8)


def decades(added: np.ndarray) -> Range:
    """Return the logarithms of the smallest and the largest norm that a heat map tells apart.

    >>> decades(np.array([-1.0, 0.01, 100.0])), decades(np.array([1.0]))
    ((-2.0, 2.0), (-1.0, 0.0))
    """
    logs = np.log10(added[np.isfinite(added) & (added > 0)])
    if not logs.size:
        return -1.0, 0.0
    low = float(logs.min())
    high = float(logs.max())
    if high - low <= _NARROW:
        return high - 1, high
    return max(low, high - _DECADES), high


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
    colors: dict[str, str],
    looks: set[str],
    texts: dict[str, str],
    muted: str,
) -> list[Entry]:
    """Return the legend of the looks that are there: what it says of each, the look, and a colour.

    Where losses have several `colors`, each is named with its own.

    >>> part_keys({"loss": "blue"}, {"new"}, {"new": "added", "used": "used"}, "grey")
    [('added', 'new', 'blue')]
    """
    named = []
    if "new" in looks and len(set(colors.values())) > 1:
        for label, color in list(colors.items())[:_MOST_COLORS]:
            named.append((words.shorten(label or "backward", 28), "new", color))
        looks = looks - {"new"}
    first = next(iter(colors.values()), muted)
    inks = dict.fromkeys(texts, first) | {"unseen": muted}
    return named + [(texts[look], look, inks[look]) for look in texts if look in looks]
