"""How far two gradients are apart: from their elements where a ledger has them, else estimated from sketches.

A sketch is a set of sums of elements with random signs (`record(..., sketch=N)`). Pure: stdlib and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger.events import CHANGED, PRESENT
from accumviz.ledger.ledger import Ledger

# Norms are kept in single precision: what two of them differ by below this, rounding may have done.
_ROUNDED = 4e-7


class Part(NamedTuple):
    """One parameter's part of the distance between two gradients.

    `squared` estimates ‖a − b‖², `variance` is that of the estimate, `least` and `most` are what it
    cannot be below or above. `size` is ‖b‖². `how` is "exact", "sketched", "norms" (nothing but the
    bounds is known), "one" (only one side has a gradient; then `side` is "a" or "b") or "not finite" (and
    on which `side`, or "ab").
    """

    name: str
    squared: float
    variance: float
    least: float
    most: float
    size: float
    how: str
    side: str = ""

    @property
    def relative(self) -> float:
        """‖a − b‖ / ‖b‖; NaN where it is not known."""
        return over(self.squared, self.size)

    @property
    def uncertainty(self) -> float:
        """How much that may be off: three standard errors."""
        return _uncertainty(
            self.squared, self.variance, self.least, self.most, self.size
        )


class Distance(NamedTuple):
    """The distance of two whole gradients: ‖a − b‖ / ‖b‖, what it may be off by, and what it is at least."""

    relative: float
    uncertainty: float
    at_least: float
    parts: tuple[Part, ...]


def over(squared: float, size: float) -> float:
    """The root of one square over another; a distance from nothing is infinite.

    >>> over(1.0, 4.0), over(0.0, 0.0), over(1.0, 0.0)
    (0.5, 0.0, inf)
    """
    if size > 0 or math.isnan(squared):
        return math.sqrt(squared / size) if size > 0 else math.nan
    return math.inf if squared > 0 else 0.0


def _uncertainty(
    squared: float, variance: float, least: float, most: float, size: float
) -> float:
    if math.isnan(squared) or not size > 0:
        return math.nan if math.isnan(squared) else 0.0
    off = 3 * math.sqrt(variance)
    middle = math.sqrt(squared)
    high, low = (
        math.sqrt(min(squared + off, max(most, squared))),
        math.sqrt(max(squared - off, min(least, squared))),
    )
    return max(high - middle, middle - low) / math.sqrt(size)


def total(parts: Sequence[Part]) -> Distance:
    """The distance of the whole, from that of each parameter."""
    size = math.fsum(part.size for part in parts)
    least = math.fsum(
        part.least if part.how == "norms" else part.squared for part in parts
    )
    if any(math.isnan(part.squared) for part in parts):
        return Distance(
            math.nan,
            math.nan,
            over(least, size) if math.isfinite(least) else math.nan,
            tuple(parts),
        )
    squared = math.fsum(part.squared for part in parts)
    variance = math.fsum(part.variance for part in parts)
    low, high = (
        math.fsum(getattr(part, which) for part in parts) for which in ("least", "most")
    )
    uncertainty = _uncertainty(squared, variance, low, high, size)
    relative = over(squared, size)
    return Distance(
        relative, uncertainty, max(relative - uncertainty, 0.0), tuple(parts)
    )


def between(name: str, a: Side, b: Side) -> Part:
    """The distance of two gradients of one parameter."""
    wrong = "".join(
        x
        for x, y in (("a", a.norm), ("b", b.norm))
        if y is not None and not math.isfinite(y)
    )
    if wrong:
        return Part(
            name, math.nan, math.nan, math.nan, math.nan, math.nan, "not finite", wrong
        )
    if a.norm is None or b.norm is None:
        there = b.norm if a.norm is None else a.norm
        squared = 0.0 if there is None else there**2
        size = 0.0 if b.norm is None else squared
        side = "" if there is None or not squared else "b" if a.norm is None else "a"
        return Part(
            name, squared, 0.0, squared, squared, size, "one" if side else "exact", side
        )
    least = max(abs(a.norm - b.norm) - _ROUNDED * max(a.norm, b.norm), 0.0) ** 2
    most, size = (a.norm + b.norm) ** 2, b.norm**2
    if a.elements is None or b.elements is None or len(a.elements) != len(b.elements):
        return Part(name, math.nan, math.nan, least, most, size, "norms")
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.square(a.elements - b.elements)
        if len(a.elements) == a.many:
            squared = float(apart.sum())
            return Part(
                name,
                squared,
                0.0,
                squared,
                squared,
                float(np.square(b.elements).sum()),
                "exact",
            )
        weight = np.square(a.elements) + np.square(b.elements)
    squared, variance = estimate(apart, weight, a.norm, b.norm)
    squared = min(max(squared, least), most) if math.isfinite(squared) else squared
    return Part(
        name,
        squared,
        variance,
        least,
        most,
        size,
        "sketched" if math.isfinite(squared) else "norms",
    )


def estimate(
    apart: np.ndarray, weight: np.ndarray, a: float, b: float
) -> tuple[float, float]:
    """‖a − b‖² and its variance, from (aᵢ − bᵢ)² and aᵢ² + bᵢ² of the sums of two sketches, and from both norms.

    Of what the two norms say together, (aᵢ − bᵢ)² / (aᵢ² + bᵢ²) is the share that lies apart: a number between 0 and
    2, and the same for all sums where one gradient is a multiple of the other.
    """
    whole, seen = a**2 + b**2, float(weight.sum())
    if not seen > 0 or not math.isfinite(seen + whole):
        return (0.0, 0.0) if seen == whole == 0 else (math.nan, math.nan)
    share = float(apart.sum()) / seen
    left = apart - share * weight
    # As many sums as carry the weight: what a few agree on says little of the others.
    carrying = seen**2 / float(np.square(weight).sum())
    return whole * share, (whole / seen) ** 2 * float(np.square(left).sum()) * (
        1 + 8 / carrying
    )


class Side(NamedTuple):
    """One parameter's gradient in one ledger: its norm (None: there is none), how many elements, and those known.

    Of a large one, `elements` are the sums of its sketch.
    """

    norm: float | None
    elements: np.ndarray | None
    many: int


def side(ledger: Ledger, p: int, event: int) -> Side:
    """What a parameter's `.grad` was after an event."""
    count = ledger.parameters[p].numel
    if event < 0 or not ledger.state[event, p] & PRESENT:
        return Side(None, None, count)
    elements = known(ledger, p, event)
    if elements is not None and len(elements) == count:
        return Side(float(np.sqrt(np.square(elements).sum())), elements, count)
    return Side(float(ledger.grad[event, p]), elements, count)


def known(ledger: Ledger, p: int, event: int) -> np.ndarray | None:
    """Those elements of a `.grad` that are known after an event."""
    if p in ledger.exact:
        found: np.ndarray = ledger.exact[p][1][event]
        return found
    if p not in ledger.sketched:
        return None
    events, elements = ledger.sketched[p]
    at = int(np.searchsorted(events, event, side="right")) - 1
    # What was taken longer ago holds as long as nothing has touched it since.
    if at < 0 or (ledger.state[events[at] + 1 : event + 1, p] & CHANGED).any():
        return None
    taken: np.ndarray = elements[at]
    return taken


def contributed(ledger: Ledger, p: int, backward: int) -> np.ndarray | None:
    """Those elements that are known of what a backward added to a `.grad`; None where they are not."""
    if p in ledger.exact:
        found: np.ndarray = ledger.exact[p][0][backward]
        return found
    after = known(ledger, p, backward)
    if after is None or not ledger.state[backward, p] & PRESENT:
        return None
    inside = backward + 1
    while (
        inside < len(ledger)
        and ledger.columns.tables["within"][ledger.columns.codes[inside, 5]]
        == "backward"
    ):
        if ledger.state[inside, p] & CHANGED:  # a collective has averaged it in between
            return None
        inside += 1
    if not backward or not ledger.state[backward - 1, p] & PRESENT:
        return after
    before = known(ledger, p, backward - 1)
    return None if before is None else after - before
