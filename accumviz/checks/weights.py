"""Rules that look at what the micro-batches of a window weigh: means over unequal numbers, and an epoch's last window.

A sum that is divided by its own length is a mean, and judged as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from accumviz.checks.cures import UNAVERAGED, divided_by_another, flushed, summed
from accumviz.checks.evidence import Case, Part, near
from accumviz.checks.ranks import of_one_rank
from accumviz.checks.report import Finding


def token_mean_of_means(case: Case) -> Iterator[Finding]:
    """Means over unequal numbers of elements, averaged as if they were equal."""
    for parts in case.objectives.values():
        unequal = [p for p in parts if p.known and p.many > 1 and p.elements[0] < p.elements[1] and _means(p)]
        # What an epoch left over may be a smaller batch: that is another mistake.
        unequal = [p for p in unequal if p.each[0] > 0 and not near(p.each[0], p.each[1]) and not _restarted(case, p)]
        carried = {p.step for p, _ in _on_top(case, parts)} if unequal else set()
        unequal = [p for p in unequal if p.step not in carried]
        if not unequal:
            continue
        inside = [p for p in unequal if not _only_the_last_is_smaller(p)]
        worst = max(inside or unequal, key=lambda p: p.each[1] / p.each[0])
        low = worst.backwards[worst.sizes.index(worst.elements[1])]
        terms = case.ledger[low].details.get("terms", ())
        weighted = any(isinstance(term, Mapping) and term.get("class_weights") for term in terms)
        yield case.of_part(
            "token-mean-of-means",
            "error" if inside and not weighted else "note",
            worst,
            event=low,
            evidence={
                "elements": list(worst.sizes),
                "weight per element": [weight / n for weight, n in zip(worst.weights, worst.sizes, strict=True)],
                "largest over smallest": worst.each[1] / worst.each[0],
            },
            cause=(
                f"Each loss is a mean over its own elements, and these are from {worst.elements[0]:g} to "
                f"{worst.elements[1]:g}: an element of the smallest counts {worst.each[1] / worst.each[0]:.3g} times "
                "as much as one of the largest."
            )
            + ("" if inside else " Only the last micro-batch of a window was smaller.")
            + (" They are counted with the weights of their classes." if weighted else ""),
            cure=summed(
                case.ledger[low],
                "elements_in_window",
                "elements_in_window: counted over all of its micro-batches",
                sums=not worst.mean,
            ),
            times=len(inside or unequal),
        )


def _means(part: Part) -> bool:
    """Whether all of a part are means; sums are where each is divided by its own number of elements, and no weights."""
    return part.mean or bool(near(part.least, part.most) and all(size.is_integer() for size in part.sizes))


def _only_the_last_is_smaller(part: Part) -> bool:
    *others, last = part.sizes
    return len(set(others)) == 1 and last < others[0] and bool(near(part.least, part.most))


def partial_window_underscaled(case: Case) -> Iterator[Finding]:
    """A short window whose losses were divided by the length of a long one."""
    for parts in case.objectives.values():
        whole = _whole(parts)
        if whole is None:
            continue
        weak = [
            p
            for p in parts
            # What was recorded of the first window may be its end only.
            if (p.order > 0 or _from_its_beginning(case, p))
            and not p.lost
            and p.even
            and p.many < whole.many
            and near(p.least, whole.least)
        ]
        if not weak:
            continue
        part = weak[0]
        b = part.backwards[0]
        yield case.of_part(
            "partial-window-underscaled",
            "error",
            part,
            evidence={
                "micro-batches": part.many,
                "in a whole window": whole.many,
                "shares": [part.least] * part.many,
                "sum of shares": part.total,
            },
            cause=(
                f"The window holds {part.many} micro-batch{'' if part.many == 1 else 'es'}, and each was divided by "
                f"{whole.many}: its step reads {part.total:.3g} of the mean gradient."
                + ("" if part.order else " It is the first one: the loop's counter begins too late.")
            ),
            # A library that calls backward has divided it; and it is not the division that is wrong in the first.
            cure=""
            if case.ledger[b].via or not part.order
            else divided_by_another(case.ledger[b], whole.many, "micro_batches_in_this_window"),
            times=len(weak),
        )


def _from_its_beginning(case: Case, part: Part) -> bool:
    """Whether a first window was recorded from its beginning: a loader began before it, and nothing was in `.grad`."""
    first = part.backwards[0]
    columns = np.flatnonzero(case.contributed[first])
    alike = bool(near(case.ledger.grad[first, columns], case.ledger.contribution[first, columns]).all())
    return alike and any(begins < first for begins, _ in case.epochs)


def leftover_carried(case: Case) -> Iterator[Finding]:
    """What one epoch left over, consumed by the first step of the next one on top of its own."""
    for parts in case.objectives.values():
        whole = _whole(parts) or _usual(case, parts)
        over: list[tuple[Part, int]] = []
        if whole is not None:
            more = [p for p in parts if p.even and p.many > whole.many and near(p.least, whole.least)]
            over = [(p, p.many - whole.many) for p in more if _crosses(case, p)]
        over = over or _on_top(case, parts)
        if not over:
            continue
        part, own = over[0]
        step = case.ledger[part.step]
        local = of_one_rank(case, part.backwards[own - 1])
        yield case.of_part(
            "leftover-carried",
            "error",
            part,
            evidence={
                "micro-batches": part.many,
                "in a whole window": part.many - own,
                "carried": own,
                "sum of shares": part.total,
            },
            cause=(
                f"{own} micro-batch{'' if own == 1 else 'es'} of the epoch before had no step: the first step of "
                f"the next one reads {part.total:.3g} times a mean gradient." + (UNAVERAGED if local else "")
            ),
            cure="" if local else flushed(step, part.many - own if near(part.least * (part.many - own), 1.0) else 0),
            times=len(over),
        )


def _whole(parts: list[Part]) -> Part | None:
    """A window that is complete: several equal shares that add up to 1."""
    return next((p for p in parts if p.many > 1 and p.even and near(p.total, 1.0)), None)


def _on_top(case: Case, parts: list[Part]) -> list[tuple[Part, int]]:
    """The windows that end in a whole one, where all others are whole: and how many stand before that.

    Each may have a divisor of its own, such as its number of tokens: what tells a whole one is that it adds up to 1.
    """
    several = [p for p in parts if p.many > 1]
    if not all(p.read and not p.again and min(p.weights) > 0 for p in several):
        return []
    whole = {p.many for p in several if near(p.total, 1.0)}
    rest = [p for p in several if not near(p.total, 1.0)]
    found = [(p, p.many - n) for p in rest for n in sorted(whole) if n < p.many and near(sum(p.weights[-n:]), 1.0)]
    # The last may have been cut short by the recording's end.
    odd = {p.step for p in rest} - {p.step for p, _ in found} - {parts[-1].step}
    return [] if odd else [(p, own) for p, own in found if _crosses(case, p)]


def _usual(case: Case, parts: list[Part]) -> Part | None:
    """Where no shares add up to 1, a window as all are that lie inside an epoch."""
    inside = [p for p in parts if p.many > 1 and p.even and case.has_loaders and not _restarted(case, p)]
    return inside[0] if len(inside) > 1 and len({p.many for p in inside}) == 1 else None


def _crosses(case: Case, part: Part) -> bool:
    """Whether a loader began anew inside a window; where no loader was seen, its length says it."""
    return not case.has_loaders or _restarted(case, part)


def _restarted(case: Case, part: Part) -> bool:
    first, last = part.backwards[0], part.backwards[-1]
    return any(first < begins < last and case.trains(begins, ends) for begins, ends in case.epochs)
