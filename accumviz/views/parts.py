"""Split `.grad` after an event into the contributions that are live in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.flow import SAME, SAME_IN_HALF
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Ledger
from accumviz.views import words

_ALONE = 23  # parts of one `.grad`; earlier ones are put together
# Digits of a factor in a page.
_DIGITS = 6


class LivePart(NamedTuple):
    """A part of `.grad` after an event: which backward put it there, how much, and its state then.

    `born` is -1 for what no recorded backward put there, or by a factor that is unknown. Where very many are live, the
    early ones are `together` backwards in one part, of which `born` is the last.
    """

    born: int
    amount: float
    new: bool
    used: bool
    together: int = 1


def segments(
    ledger: Ledger, parameter: int, events: Sequence[int]
) -> list[list[LivePart]]:
    """Split `.grad` after each event into the contributions live in it.

    Amounts are signed for a parameter of one recorded element, 2-norms else, each times its
    coefficient in the flow. What is there by an unknown coefficient, or was not recorded, is one
    part. Of many parts the last 23 stand alone; the early ones are put together by label, sign and
    use.

    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = Ledger.build([Parameter("w", (1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ...     dict(kind="clip", grad={"w": -1}),
    ... ])
    >>> [[part.amount for part in parts] for parts in segments(ledger, 0, [0, 1])]
    [[-16.0], [-1.0]]
    """
    gradient = _Gradient(ledger, parameter)
    labels = ledger.columns.column("label")
    return [_joined(gradient.parts(e), labels) for e in events]


class _Gradient:
    """One parameter's `.grad` over time, and what of it is from whom."""

    def __init__(self, ledger: Ledger, parameter: int) -> None:
        self.ledger = ledger
        self.parameter = parameter
        self.signed = words.is_signed(ledger, parameter)
        self.grad = totals(ledger, parameter)
        self.added = ledger.contribution[:, parameter].astype(float)
        if self.signed:
            self.added = ledger.exact[parameter][0][:, 0]
        consumed = ledger.outcomes.consumed[:, parameter]
        self.consumed = np.where(consumed < 0, len(ledger), consumed)
        averages = ledger.flow.averages(parameter)
        self.averaged = int(averages[0]) if averages.size else len(ledger)
        half = "16" in ledger.parameters[parameter].dtype
        self.tolerance = SAME_IN_HALF if half else SAME

    def parts(self, event: int) -> list[LivePart]:
        """Return what is in `.grad` after an event, first what no known contribution is."""
        flow = self.ledger.flow
        born = flow.live(event, self.parameter)
        coefficients = flow.coefficients(self.parameter, born, event)
        amounts = self.added[born] * coefficients
        used = self.consumed[born] <= event
        lost = np.isnan(coefficients)
        kept = ~lost
        columns = [column[kept].tolist() for column in (born, amounts, used)]
        parts = []
        for b, amount, spent in zip(*columns, strict=True):
            parts.append(LivePart(b, amount, b == event, spent))
        if self.signed:
            rest = self._rest(event, [part.amount for part in parts])
        else:
            # Norms do not add up: the height of this part is a guess, and hatched.
            rest = float(self.added[born[lost]].sum())
        # A step uses an average as a whole, not a rank's own part of it.
        like = used[lost][-1:] if lost.any() else used[:1] & (self.averaged <= event)
        if rest:
            parts.insert(0, LivePart(-1, rest, False, bool(like.any())))
        return parts

    def _rest(self, event: int, amounts: list[float]) -> float:
        """Return what is in `.grad` besides these amounts, 0 where that is rounding."""
        if not present(self.ledger, event, self.parameter):
            return 0.0
        grad = float(self.grad[event])
        rest = grad - math.fsum(amounts) if np.isfinite(amounts).all() else math.nan
        most = max(map(abs, [grad, *amounts]))
        return rest if abs(rest) > self.tolerance * most else 0.0


def _joined(parts: list[LivePart], labels: np.ndarray) -> list[LivePart]:
    """Put early parts of one look together, where there are many."""
    many = len(parts) - _ALONE
    if many < 2:
        return parts
    looks: dict[tuple[Any, ...], LivePart] = {}
    for part in parts[:many]:
        label = labels[part.born] if part.born >= 0 else None
        look = label, part.amount > 0, part.used
        before = looks.get(look, part._replace(amount=0.0, together=0))
        amount = before.amount + part.amount
        together = before.together + 1
        looks[look] = part._replace(amount=amount, together=together)
    return [*looks.values(), *parts[many:]]


def present(ledger: Ledger, event: int, parameter: int) -> bool:
    """Return whether there is a `.grad` after the event."""
    return bool(ledger.state[event, parameter] & PRESENT)


def totals(ledger: Ledger, p: int) -> np.ndarray:
    """Return `.grad` after each event: the number where it is one, the norm else."""
    if words.is_signed(ledger, p):
        return ledger.exact[p][1][:, 0]
    return ledger.grad[:, p].astype(float)


def heights(stack: list[LivePart], grad: float, signed: bool) -> list[float]:
    """Return how tall each part is drawn. Norms do not add up: parts of a tensor share the height of its `‖.grad‖`."""
    amounts = [part.amount for part in stack]
    whole = sum(amounts)
    if signed or not np.isfinite(whole) or not np.isfinite(grad) or whole == 0:
        return amounts
    return [amount * grad / whole for amount in amounts]


def extent(stacks: list[list[float]], grads: np.ndarray) -> tuple[float, float]:
    """Return how far bars and totals reach below and above zero."""
    reached = [0.0, *grads[np.isfinite(grads)].tolist()]
    for stack in stacks:
        amounts = np.array(stack)
        finite = amounts[np.isfinite(amounts)]
        reached.append(float(finite[finite < 0].sum()))
        reached.append(float(finite[finite > 0].sum()))
    return min(reached), max(reached)


# --- what a page carries --------------------------------------------------------------------------

# Runs count events from the last contribution in them, so that windows of one form are equal, and compress to nothing.
_NEVER, _HANDED_ON = 0, -1


def of_signed(
    ledger: Ledger, parameter: int, chosen: np.ndarray
) -> tuple[tuple[float, float], list[int]]:
    """Return how far the bars of a signed parameter reach, and after which of the `chosen` events a part is unseen.

    The latter are ranges: where one begins, where it ends, and so on.
    """
    gradient = _Gradient(ledger, parameter)
    stacks = [gradient.parts(e) for e in chosen.tolist()]
    amounts = []
    unseen = []
    for stack in stacks:
        amounts.append([part.amount for part in stack])
        unseen.append(int(bool(stack) and stack[0].born < 0))
    changes = np.diff(unseen, prepend=0, append=0)
    edges = np.flatnonzero(changes).tolist()
    return extent(amounts, gradient.grad[chosen]), edges


def lifetimes(
    ledger: Ledger,
    chosen: np.ndarray,
    added: np.ndarray,
    rows: Sequence[tuple[int, int]],
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return for each row when its contributions are erased and first consumed, and what scales them.

    `added` holds rows × `chosen` events, below 0 where there is no contribution; a row is a range of
    parameters, and what several of them receive is erased with the last and consumed with the first of it.
    They are distinct lifetimes, and which of them each row has: `runs` are three numbers each, how many
    contributions share a fate, and how many of the chosen events after the last of them they are erased and
    consumed (0: never; consumed -1: never, but handed on by a collective). `by` are the factors of `.grad`:
    the place of the event, the factor (null: unknown), and what an average makes of those not averaged before.
    """
    distinct: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    which = []
    for row, (start, stop) in enumerate(rows):
        born = np.flatnonzero(~(added[row] < 0))
        members = slice(start, stop)
        one = {
            "runs": _runs(ledger, chosen, born, members),
            "by": _factors(ledger, chosen, members),
        }
        key = repr(one)
        if key not in places:
            places[key] = len(distinct)
            distinct.append(one)
        which.append(places[key])
    return distinct, which


def _runs(
    ledger: Ledger, chosen: np.ndarray, born: np.ndarray, members: slice
) -> list[int]:
    if not born.size:
        return []
    never = len(chosen)
    events = chosen[born]
    contributed = ledger.state[events, members] & CONTRIBUTED > 0
    erased, consumed, steps = (array[events, members] for array in ledger.outcomes)
    ends = np.where(erased < 0, never, np.searchsorted(chosen, erased))
    ends = np.where(contributed, ends, -1).max(axis=1)
    uses = np.where(consumed < 0, never, np.searchsorted(chosen, consumed))
    uses = np.where(contributed, uses, never).min(axis=1)
    handed_on = np.zeros(born.size, bool)
    if erased.shape[1] == 1:
        by_sync = ledger.columns.where("kind", "sync")[erased[:, 0]]
        handed_on = by_sync & (erased[:, 0] >= 0) & (steps[:, 0] == 0)
    fates = np.stack([ends, uses, handed_on])
    changes = (np.diff(fates) != 0).any(axis=0)
    last = np.append(np.flatnonzero(changes), born.size - 1)
    count = np.diff(last, prepend=-1)
    gone = np.where(ends == never, _NEVER, ends - born)[last]
    used = np.where(uses == never, _NEVER, uses - born)[last]
    used[handed_on[last]] = _HANDED_ON
    runs: list[int] = np.stack([count, gone, used], 1).ravel().tolist()
    return runs


def _factors(ledger: Ledger, chosen: np.ndarray, members: slice) -> list[list[Any]]:
    scaling = ledger.flow.scaling
    changed = scaling.changed[:, members]
    factors = []
    for at in np.flatnonzero(changed.any(axis=1)).tolist():
        factor = None
        ranks = float(scaling.ranks[at])
        if changed[at].all() and not scaling.reason[at]:
            factor = float(f"{scaling.factor[at]:.{_DIGITS}g}")
        if factor != 1 or ranks:
            place = int(np.searchsorted(chosen, scaling.events[at]))
            mean = [1 / ranks] if ranks else []
            factors.append([place, factor, *mean])
    return factors
