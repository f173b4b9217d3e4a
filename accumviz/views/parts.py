"""`.grad` after an event as the contributions that are live in it: which, how much of each, how tall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger import lifecycle
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Ledger
from accumviz.views import words

_ALONE = 23  # parts of one `.grad`; earlier ones are put together
# Up to so many parameters are drawn as bars. What is less of a lane on one side of zero asks for no taller one;
# lines stand between parts while a lane has so many pixels for each of them.
_BARS, _SEEN, _ROOMY = 8, 0.1, 8


class Segment(NamedTuple):
    """A part of `.grad` after an event: which backward put it there, how much, and its state then.

    `born` is -1 for what no recorded backward put there. Where very many are live, the early ones
    are `together` backwards in one part, of which `born` is the last.
    """

    born: int
    amount: float
    new: bool
    used: bool
    together: int = 1


def segments(
    ledger: Ledger, parameter: int, events: Sequence[int]
) -> list[list[Segment]]:
    """Split `.grad` after each event into the contributions live in it.

    Amounts are signed for a parameter of one recorded element, 2-norms else; what a clip or an
    unscale did to the whole of `.grad` is applied to each part, and an all-reduce leaves each
    rank its share of the average. Of many parts the last 23 stand alone; the early ones are put
    together by label, sign and use.

    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = Ledger.build([Parameter("w", (1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ...     dict(kind="clip", grad={"w": -1}),
    ... ])
    >>> [[part.amount for part in parts] for parts in segments(ledger, 0, [0, 1])]
    [[-16.0], [-1.0]]
    """
    signed = words.is_signed(ledger, parameter)
    if signed:
        added, grad = (array[:, 0].astype(float) for array in ledger.exact[parameter])
    else:
        added, grad = (
            a[:, parameter].astype(float) for a in (ledger.contribution, ledger.grad)
        )
    factor = np.ones(len(ledger))
    for event in ledger:
        before = grad[event.index - 1] if event.index else np.nan
        known = (
            np.isfinite([before, grad[event.index]]).all()
            and before != 0
            and grad[event.index] != 0
        )
        if event.kind in ("clip", "unscale") and known:
            factor[event.index] = grad[event.index] / before
    scale = np.cumprod(factor)
    averaged = words.averaged(ledger, parameter)
    when, ranks = (
        [s.index for s in averaged],
        np.array([s.details.get("ranks", 1) for s in averaged] + [1]),
    )
    numbered = {label: i for i, label in enumerate(ledger.labels)}
    labels = np.array([numbered.get(event.label, 0) for event in ledger], np.int64)
    result = []
    for e in events:
        births = np.array(ledger.live(e, parameter), np.int64)
        # What a rank's own contribution counts for, once it was averaged.
        first = np.searchsorted(when, births, side="right")
        among = np.where(
            first < np.searchsorted(when, e, side="right"), ranks[first], 1
        )
        amounts = added[births] * (scale[e] / scale[births] / among)
        used = lifecycle.used(ledger.fates, births, e, parameter)
        alone = len(births) - _ALONE if len(births) > _ALONE + 1 else 0
        looks = 4 * labels[births[:alone]] + 2 * (amounts[:alone] > 0) + used[:alone]
        parts = []
        for look in np.unique(looks):
            them = np.flatnonzero(looks == look)
            parts.append(
                Segment(
                    int(births[them[-1]]),
                    float(amounts[them].sum()),
                    False,
                    bool(look & 1),
                    them.size,
                )
            )
        late = (column[alone:].tolist() for column in (births, amounts, used))
        parts += [
            Segment(born, amount, born == e, spent)
            for born, amount, spent in zip(*late, strict=True)
        ]
        unseen = (
            float(grad[e]) - sum(part.amount for part in parts)
            if signed and present(ledger, e, parameter)
            else 0
        )
        if abs(unseen) > 1e-4 * max(
            abs(float(grad[e])), *(abs(part.amount) for part in parts), 0.0
        ):
            # A step uses an average as a whole, not a rank's own part of it.
            spent = bool(when) and when[0] <= e and bool(used[:1].any())
            parts.insert(0, Segment(-1, unseen, False, spent))
        result.append(parts)
    return result


def present(ledger: Ledger, event: int, parameter: int) -> bool:
    """Whether there is a `.grad` after the event."""
    return bool(ledger.state[event, parameter] & PRESENT)


def totals(ledger: Ledger, p: int) -> np.ndarray:
    """`.grad` after each event: the number where it is one, the norm else."""
    return (
        ledger.exact[p][1][:, 0] if words.is_signed(ledger, p) else ledger.grad[:, p]
    ).astype(float)


def heights(stack: list[Segment], grad: float, signed: bool) -> list[float]:
    """How tall each part is drawn. Norms do not add up, so parts of a tensor share the height of its `‖.grad‖`."""
    amounts = [part.amount for part in stack]
    whole = sum(amounts)
    if signed or not np.isfinite(whole) or not np.isfinite(grad) or whole == 0:
        return amounts
    return [amount * grad / whole for amount in amounts]


def extent(stacks: list[list[float]], grads: np.ndarray) -> tuple[float, float]:
    """How far bars and totals reach below and above zero."""
    finite = [[amount for amount in stack if np.isfinite(amount)] for stack in stacks]
    known = grads[np.isfinite(grads)].tolist()
    low = min([0.0, *known, *(sum(a for a in amounts if a < 0) for amounts in finite)])
    return low, max(
        [0.0, *known, *(sum(a for a in amounts if a > 0) for amounts in finite)]
    )


def lane(ledger: Ledger, reaches: Sequence[list[float]]) -> tuple[int, bool]:
    """How tall a lane of bars is, in pixels, and whether the parts in it are too many for lines between them."""
    count = len(ledger.parameters)
    if not 0 < count <= _BARS:
        return 0, False
    tall = 84 if count == 1 else 60
    if any(min(-low, high) > _SEEN * max(-low, high) for low, high in reaches):
        tall = max(min(240 // count, 160), 60)
    born, of = np.nonzero(ledger.state & CONTRIBUTED)
    ends = ledger.fates.erased[born, of]
    live = np.zeros((len(ledger) + 1, len(ledger.parameters)), np.int64)
    np.add.at(live, (born, of), 1)
    np.add.at(live, (np.where(ends < 0, len(ledger), ends), of), -1)
    return tall, bool(tall < _ROOMY * live.cumsum(axis=0).max(initial=0))
