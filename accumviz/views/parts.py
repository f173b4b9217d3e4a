"""Split `.grad` after an event into the contributions that are live in it."""

from __future__ import annotations

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


class _Stack(NamedTuple):
    """The contributions that are in a `.grad` after an event by a known factor; and the amount of what else is there.

    `rest_used` says whether a step has used all of that.
    """

    born: np.ndarray
    amounts: np.ndarray
    used: np.ndarray
    rest: float
    rest_used: bool


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
    labels = ledger.columns.column("label")
    return [
        _parts(stack, labels, e)
        for e, stack in zip(events, _stacks(ledger, parameter, events), strict=True)
    ]


def _stacks(ledger: Ledger, p: int, events: Sequence[int]) -> list[_Stack]:
    flow, signed = ledger.flow, words.is_signed(ledger, p)
    if signed:
        added, grad = (column[:, 0] for column in ledger.exact[p])
    else:
        added, grad = ledger.contribution[:, p].astype(float), ledger.grad[:, p]
    consumed = ledger.outcomes.consumed[:, p]
    averaging = np.append(flow.averages(p), len(ledger))[0]
    rough = SAME_IN_HALF if "16" in ledger.parameters[p].dtype else SAME
    stacks = []
    for e in events:
        born = flow.live(e, p)
        amounts = added[born] * flow.coefficients(p, born, e)
        used = (consumed[born] >= 0) & (consumed[born] <= e)
        lost = np.isnan(amounts) & ~np.isnan(added[born])
        rest = 0.0
        if lost.any() and not signed:
            # Norms do not add up: the height of this part is a guess, and hatched.
            rest = float(added[born[lost]].sum())
        elif signed and present(ledger, e, p):
            rest = _rest(float(grad[e]), amounts[~lost], rough)
        # A step uses an average as a whole, not a rank's own part of it.
        last = used[lost][-1:] if lost.any() else used[:1] & (averaging <= e)
        spent = bool(last.any())
        stacks.append(_Stack(born[~lost], amounts[~lost], used[~lost], rest, spent))
    return stacks


def _rest(grad: float, amounts: np.ndarray, rough: float) -> float:
    """Return what is in `.grad` besides these amounts, 0 where that is rounding."""
    with np.errstate(invalid="ignore"):
        rest = grad - float(amounts.sum())
    most = max(abs(grad), *np.abs(amounts).tolist(), 0.0)
    return rest if abs(rest) > rough * most else 0.0


def _parts(stack: _Stack, labels: np.ndarray, event: int) -> list[LivePart]:
    born, amounts, used = stack.born, stack.amounts, stack.used
    alone = len(born) - _ALONE if len(born) > _ALONE + 1 else 0
    looks = 4 * labels[born[:alone]] + 2 * (amounts[:alone] > 0) + used[:alone]
    parts = []
    if stack.rest:
        parts.append(LivePart(-1, stack.rest, False, stack.rest_used))
    for look in np.unique(looks):
        them = np.flatnonzero(looks == look)
        last, whole = int(born[them[-1]]), float(amounts[them].sum())
        parts.append(LivePart(last, whole, False, bool(look & 1), them.size))
    late = (column[alone:].tolist() for column in (born, amounts, used))
    for b, amount, spent in zip(*late, strict=True):
        parts.append(LivePart(b, amount, b == event, spent))
    return parts


def present(ledger: Ledger, event: int, parameter: int) -> bool:
    """Whether there is a `.grad` after the event."""
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
    every = [np.array(stack) for stack in stacks]
    ends = [grads[np.isfinite(grads)], np.zeros(1)]
    for stack in every:
        finite = stack[np.isfinite(stack)]
        ends.append(np.array([finite[finite < 0].sum(), finite[finite > 0].sum()]))
    reached = np.concatenate(ends)
    return float(reached.min()), float(reached.max())


# --- what a page carries --------------------------------------------------------------------------

# Runs count events from the last contribution in them, so that windows of one form are equal, and compress to nothing.
_NEVER, _HANDED_ON = 0, -1


def of_signed(
    ledger: Ledger, parameter: int, chosen: np.ndarray
) -> tuple[tuple[float, float], list[int]]:
    """Return how far the bars of a signed parameter reach, and after which of the `chosen` events a part is unseen.

    The latter are ranges: where one begins, where it ends, and so on.
    """
    stacks = _stacks(ledger, parameter, chosen.tolist())
    amounts = [[*stack.amounts.tolist(), stack.rest] for stack in stacks]
    unseen = np.array([stack.rest != 0 for stack in stacks], int)
    edges = np.flatnonzero(np.diff(unseen, prepend=0, append=0)).tolist()
    return extent(amounts, totals(ledger, parameter)[chosen]), edges


def lifetimes(
    ledger: Ledger,
    chosen: np.ndarray,
    added: np.ndarray,
    rows: Sequence[tuple[int, int]],
) -> tuple[list[dict[str, Any]], list[int]]:
    """Tell for each row when its contributions are erased and first consumed, and what scales them.

    `added` holds rows × `chosen` events, below 0 where there is no contribution; a row is a range of
    parameters, and what several of them receive is erased with the last and consumed with the first of it.
    Returns distinct lifetimes, and which of them each row has: `runs` are three numbers each, how many
    contributions share a fate, and how many of the chosen events after the last of them they are erased and
    consumed (0: never; consumed -1: never, but handed on by a collective). `by` are the factors of `.grad`:
    the place of the event, the factor (null: unknown), and what an average makes of those not averaged before.
    """
    distinct: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    which = []
    for row, (start, stop) in enumerate(rows):
        born = np.flatnonzero(~(added[row] < 0))
        one = {
            "runs": _runs(ledger, chosen, born, slice(start, stop)),
            "by": _factors(ledger, chosen, slice(start, stop)),
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
    erased, consumed, steps = (
        array[chosen[born], members] for array in ledger.outcomes
    )
    contributed = ledger.state[chosen[born], members] & CONTRIBUTED > 0
    ends = np.where(erased < 0, never, np.searchsorted(chosen, erased))
    ends = np.where(contributed, ends, -1).max(axis=1)
    uses = np.where(consumed < 0, never, np.searchsorted(chosen, consumed))
    uses = np.where(contributed, uses, never).min(axis=1)
    syncs = np.append(ledger.columns.where("kind", "sync"), False)
    handed = (syncs[erased] & (steps == 0)).all(axis=1) & (ends < never)
    if erased.shape[1] > 1:
        handed[:] = False
    shared = np.stack([ends, uses, handed])
    changes = (np.diff(shared) != 0).any(axis=0)
    last = np.append(np.flatnonzero(changes), born.size - 1)
    ends, uses = ends[last], uses[last]
    gone = np.where(ends == never, _NEVER, ends - born[last])
    used = np.where(uses == never, _NEVER, uses - born[last])
    used[handed[last]] = _HANDED_ON
    runs: list[int] = (
        np.stack([np.diff(last, prepend=-1), gone, used], 1).ravel().tolist()
    )
    return runs


def _factors(ledger: Ledger, chosen: np.ndarray, members: slice) -> list[list[Any]]:
    scaling = ledger.flow.scaling
    changed = scaling.changed[:, members]
    found = []
    for at in np.flatnonzero(changed.any(axis=1)).tolist():
        known = changed[at].all() and not scaling.reason[at]
        factor = float(f"{scaling.factor[at]:.{_DIGITS}g}") if known else None
        mean = [float(1 / scaling.ranks[at])] if scaling.ranks[at] else []
        if factor != 1 or mean:
            place = int(np.searchsorted(chosen, scaling.events[at]))
            found.append([place, factor, *mean])
    return found
