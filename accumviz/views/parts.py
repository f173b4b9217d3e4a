"""Split `.grad` after an event into the contributions that are live in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.flow import SAME, SAME_IN_HALF
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Ledger
from accumviz.views import words

# Digits of a factor in a page.
_DIGITS = 6


class Part(NamedTuple):
    """A part of `.grad` after an event: the backward that put it there, how much it is, and how it looks.

    `born` is -1 for what no recorded backward put there, or by a factor that is unknown. The look is "new" at the event
    that adds it, "live", "used" by a step, or "unseen".
    """

    born: int
    amount: float
    look: str


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


class Gradient:
    """One parameter's `.grad` over time, and what of it is from which backward."""

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
        half = "16" in ledger.parameters[parameter].dtype
        self.tolerance = SAME_IN_HALF if half else SAME

    def parts(self, event: int) -> list[Part]:
        """Return what is in `.grad` after an event, first what no recorded contribution is."""
        flow = self.ledger.flow
        born = flow.live(event, self.parameter)
        coefficients = flow.coefficients(self.parameter, born, event)
        lost = np.isnan(coefficients)
        amounts = (self.added[born] * coefficients)[~lost].tolist()
        parts = []
        for b, amount in zip(born[~lost].tolist(), amounts, strict=True):
            look = "used" if self.consumed[b] <= event else "live"
            parts.append(Part(b, amount, "new" if b == event else look))
        # Norms do not add up: how much of one is there by an unknown factor is a guess, and hatched.
        rest = float(self.added[born[lost]].sum())
        if self.signed:
            rest = self._rest(event, amounts)
        return [Part(-1, rest, "unseen"), *parts] if rest else parts

    def _rest(self, event: int, amounts: list[float]) -> float:
        """Return what is in `.grad` besides these amounts, 0 where that is rounding."""
        if not present(self.ledger, event, self.parameter):
            return 0.0
        grad = float(self.grad[event])
        rest = grad - math.fsum(amounts) if np.isfinite(amounts).all() else math.nan
        most = max(map(abs, [grad, *amounts]))
        return rest if abs(rest) > self.tolerance * most else 0.0


def present(ledger: Ledger, event: int, parameter: int) -> bool:
    """Return whether there is a `.grad` after the event."""
    return bool(ledger.state[event, parameter] & PRESENT)


def totals(ledger: Ledger, p: int) -> np.ndarray:
    """Return `.grad` after each event: the number where it is one, the norm else."""
    if words.is_signed(ledger, p):
        return ledger.exact[p][1][:, 0]
    return ledger.grad[:, p].astype(float)


def _reach(stacks: list[list[float]], grads: np.ndarray) -> tuple[float, float]:
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
    gradient = Gradient(ledger, parameter)
    stacks = [gradient.parts(e) for e in chosen.tolist()]
    amounts = []
    unseen = []
    for stack in stacks:
        amounts.append([part.amount for part in stack])
        unseen.append(int(bool(stack) and stack[0].born < 0))
    changes = np.diff(unseen, prepend=0, append=0)
    edges = np.flatnonzero(changes).tolist()
    return _reach(amounts, gradient.grad[chosen]), edges


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
