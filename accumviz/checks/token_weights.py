"""The rule that looks at what single elements of a loss weigh, where micro-batches have different numbers of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from accumviz.checks.analysis import Case, Part, near
from accumviz.checks.cures import summed
from accumviz.checks.divisors import named
from accumviz.checks.epoch_end import on_top, restarted
from accumviz.checks.report import Finding

# The most that is misplaced where no element counts more than twice as much as another: with √2 times as many of one.
_MUCH = 3 - 2 * math.sqrt(2)


def token_mean_of_means(case: Case) -> Iterator[Finding]:
    """Means over unequal numbers of elements, averaged as if they were equal."""
    for parts in case.objectives.values():
        unequal = [
            p
            for p in parts
            if p.known and p.many > 1 and p.elements[0] < p.elements[1] and _means(p)
        ]
        # What an epoch left over may be a smaller batch: that is another mistake.
        unequal = [
            p
            for p in unequal
            if min(p.elements[0], p.each[0]) > 0
            and not near(p.each[0], p.each[1])
            and not restarted(case, p)
        ]
        carried = {p.step for p, _ in on_top(case, parts)} if unequal else set()
        unequal = [p for p in unequal if p.step not in carried]
        if not unequal:
            continue
        inside = [p for p in unequal if not _only_the_last_is_smaller(p)]
        worst = max(inside or unequal, key=lambda p: p.each[1] / p.each[0])
        low = worst.backwards[worst.sizes.index(worst.elements[1])]
        weighted = any(term.get("class_weights") for term in case.ledger[low].terms)
        # An average over ranks divides by their number, and one rank's count weighs its elements otherwise.
        averaged = bool((case.shares.of(worst.step).averaged < 1).any())
        clipped = bool((case.shares.of(worst.step).clipped < 1).any())
        each = [
            weight / n for weight, n in zip(worst.weights, worst.sizes, strict=True)
        ]
        yield case.of_part(
            "token-mean-of-means",
            "note"
            if weighted or not inside
            else "error"
            if _misplaced(worst) > _MUCH
            else "warning",
            worst,
            event=low,
            evidence={
                **named(case, worst),
                "elements": list(worst.sizes),
                f"weight per element{', before the clip' * clipped}": each,
                "largest over smallest": worst.each[1] / worst.each[0],
                "weight on the wrong elements": _misplaced(worst),
            },
            cause=(
                f"Each loss is a mean over its own elements, and these are from {worst.elements[0]:g} to "
                f"{worst.elements[1]:g}: an element of the smallest counts {worst.each[1] / worst.each[0]:.3g} times "
                "as much as one of the largest."
            )
            + ("" if inside else " Only the last micro-batch of a window was smaller.")
            + (
                " They are counted with the weights of their classes."
                if weighted
                else ""
            ),
            cure=""  # what a line divides is the whole loss, and not one of its terms
            if named(case, worst)
            else summed(
                case.ledger[low],
                "elements_in_window * world_size" if averaged else "elements_in_window",
                "elements_in_window: counted over all of its micro-batches"
                + (" on all ranks" if averaged else ""),
                sums=not worst.mean,
            ),
            times=len(inside or unequal),
        )


def _misplaced(part: Part) -> float:
    """How much of a step's weight lies on other elements than in one large batch."""
    weight, many = sum(part.weights), sum(part.sizes)
    return (
        sum(
            abs(w / weight - n / many)
            for w, n in zip(part.weights, part.sizes, strict=True)
        )
        / 2
    )


def _means(part: Part) -> bool:
    """Whether all of a part are means; sums are where each is divided by its own number of elements, and no weights."""
    return part.mean or bool(
        near(part.least, part.most) and all(size.is_integer() for size in part.sizes)
    )


def _only_the_last_is_smaller(part: Part) -> bool:
    *others, last = part.sizes
    return (
        len(set(others)) == 1 and last < others[0] and bool(near(part.least, part.most))
    )
