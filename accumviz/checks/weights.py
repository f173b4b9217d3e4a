"""Rules that look at what micro-batches weigh: means over unequal numbers, losses divided too little or too often.

A sum that is divided by its own length is a mean, and judged as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from accumviz.checks.cures import divided, divided_by_another, flushed, summed, undivided
from accumviz.checks.evidence import Case, Part, near
from accumviz.checks.order import shortened
from accumviz.checks.report import Finding
from accumviz.gains import number


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
        yield case.of_part(
            "token-mean-of-means",
            "error" if inside else "note",
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
            + ("" if inside else " Only the last micro-batch of a window was smaller."),
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


def loss_not_divided(case: Case) -> Iterator[Finding]:
    """Every mean loss of a window at its full weight; or one of them, beside others that were divided."""
    for (optimizer, objective), parts in case.objectives.items():
        whole = [p for p in parts if p.many > 1]
        if whole and all(_undivided(p) for p in whole) and not _tasks(case, whole[0]):
            part = whole[0]
            yield case.of_part(
                "loss-not-divided",
                "warning",
                part,
                evidence={
                    **_named(case, part),
                    "micro-batches": part.many,
                    "sum of shares": part.total,
                    "a share": part.least,
                },
                cause=(
                    f"{part.many} mean losses are added up without a division: the step reads {part.many} times the "
                    "gradient of one large batch."
                ),
                cure=_divided(case, part),
                times=len(whole),
            )
        elif whole:
            yield from _mixed(case, optimizer, objective, whole)
            yield from _beside(case, objective, whole)


def _named(case: Case, part: Part) -> dict[str, str]:
    """Which of several losses of one backward it is."""
    several = len(case.ledger[part.backwards[0]].details.get("terms", ())) > 1
    return {"the loss": case.shares.objectives[part.objective]} if several else {}


def _divided(case: Case, part: Part) -> str:
    """All losses of a backward, divided; where it is one of several only, its line is another."""
    b = part.backwards[0]
    others = [p for p in case.parts_of[part.step] if b in p.backwards and p.optimizer == part.optimizer]
    return divided(case.ledger[b], str(part.many)) if all(near(p.least, part.least) for p in others) else ""


def _beside(case: Case, objective: int, parts: list[Part]) -> Iterator[Finding]:
    """A loss with a constant of its own, beside one that was divided by the number of micro-batches."""
    pairs = [(p, _main(case, p)) for p in parts]
    mains = [main for _, main in pairs if main is not None]
    part, even = parts[0], all(p.known and _even(p) for p in parts)
    if len(mains) < len(parts) or not even or not near(min(p.least for p in parts), max(p.most for p in parts)):
        return
    weight, total, proof = part.least, part.total, len({p.many for p in parts}) > 1
    if not proof:
        own, its = case.constants(part), case.constants(mains[0])
        if own is None or not its or any(near(one, other) for one in own for other in (*its, 1 / part.many)):
            return
        # Nobody writes a number, and means another one of which it is a part.
        proof = bool(own) and set(own) <= case.written and total not in case.written
        if not proof and _digits(weight) > _digits(total):
            return
    name, main = (case.shares.objectives[p.objective] for p in (part, mains[0]))
    alone = len(case.ledger[part.backwards[0]].details.get("terms", ())) == 1
    yield case.of_part(
        "loss-not-divided",
        "warning" if proof else "note",
        part,
        evidence={
            "the loss": name,
            "micro-batches": part.many,
            "a share": weight,
            "sum of shares": total,
            f"that of {main}": mains[0].total,
        },
        cause=(
            f"Beside {main}, whose shares add up to 1, {name} is undivided: with {weight:.3g} in each of {part.many} "
            f"micro-batches, it weighs {total:.3g} in the step."
            if proof
            else f"{name} has {weight:.3g} before it in each of {part.many} micro-batches. If that is its weight in a "
            f"large batch, it has to be divided as {main} is; if it is a part of {total:.3g}, it was."
        ),
        cure=divided(case.ledger[part.backwards[0]], str(part.many)) if alone and proof else "",
        times=len(parts),
    )


def _mixed(case: Case, optimizer: int, objective: int, parts: list[Part]) -> Iterator[Finding]:
    """Losses of which each backward has a mixture, α of one and 1 - α of the other, and nothing divided that."""
    by: list[list[float] | None] = []
    for part in parts:
        own = [p for p in case.parts_of[part.step] if p.optimizer == optimizer and p.backwards == part.backwards]
        several = len(own) > 1 and own[0].objective == objective  # told once, of the first of them
        if not several or not all(p.known and _even(p) for p in own) or not near(sum(p.least for p in own), 1.0):
            return
        by = by or [case.constants(p) for p in own]
        if not all(one and not any(near(factor, 1 / part.many) for factor in one) for one in by):
            return
    part = parts[0]
    yield case.of_part(
        "loss-not-divided",
        "warning",
        part,
        evidence={
            "the losses": [case.shares.objectives[p.objective] for p in own],
            "micro-batches": part.many,
            "shares": [p.least for p in own],
            "sum of shares": sum(p.total for p in own),
        },
        cause=(
            f"The losses of each micro-batch are mixed with weights that add up to 1, and {part.many} of them are "
            f"added up without a division: the step reads {part.many} times the gradient of one large batch."
        ),
        cure=divided(case.ledger[part.backwards[0]], str(part.many)),
        times=len(parts),
    )


def _main(case: Case, part: Part) -> Part | None:
    """Another loss of as many micro-batches of a window, of which the shares add up to 1."""
    for other in case.parts_of[part.step]:
        alike = other.optimizer == part.optimizer and other.objective != part.objective and other.many == part.many
        if alike and other.read and not other.again and near(other.total, 1.0):
            return other
    return None


def _digits(value: float) -> int:
    """How many digits a number is written with.

    >>> _digits(0.3), _digits(0.075), _digits(1e-4)
    (1, 2, 1)
    """
    return len(f"{value:.6e}".partition("e")[0].replace(".", "").rstrip("0"))


def _undivided(part: Part) -> bool:
    ones = part.known and not part.again and bool(near(part.least, 1.0) and near(part.most, 1.0))
    # A sum over one element is no mean, and a choice.
    return ones and (part.mean or all(size > 1 and size.is_integer() for size in part.sizes))


def _tasks(case: Case, part: Part) -> bool:
    """Whether each backward has parameters of its own: heads that are trained one after the other, and not parts."""
    reached = case.contributed[list(part.backwards)]
    return bool((reached & (reached.sum(axis=0) == 1)).any(axis=1).all())


def _even(part: Part) -> bool:
    """Whether all of a part could be read, and has one constant."""
    return part.read and part.mean and not part.again and part.least > 0 and bool(near(part.least, part.most))


def _whole(parts: list[Part]) -> Part | None:
    """A window that is complete: several equal shares that add up to 1."""
    return next((p for p in parts if p.many > 1 and _even(p) and near(p.total, 1.0)), None)


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
            and _even(p)
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
            more = [p for p in parts if _even(p) and p.many > whole.many and near(p.least, whole.least)]
            over = [(p, p.many - whole.many) for p in more if _crosses(case, p)]
        over = over or _on_top(case, parts)
        if not over:
            continue
        part, own = over[0]
        step = case.ledger[part.step]
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
                f"{own} micro-batch{'' if own == 1 else 'es'} of the epoch before stayed in `.grad`: the first step of "
                f"the next one reads {part.total:.3g} times a mean gradient."
            ),
            cure=flushed(step, part.many - own if near(part.least * (part.many - own), 1.0) else 0),
            times=len(over),
        )


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
    inside = [p for p in parts if p.many > 1 and _even(p) and case.has_loaders and not _restarted(case, p)]
    return inside[0] if len(inside) > 1 and len({p.many for p in inside}) == 1 else None


def _crosses(case: Case, part: Part) -> bool:
    """Whether a loader began anew inside a window; where no loader was seen, its length says it."""
    return not case.has_loaders or _restarted(case, part)


def _restarted(case: Case, part: Part) -> bool:
    first, last = part.backwards[0], part.backwards[-1]
    return any(first < begins < last and case.trains(begins, ends) for begins, ends in case.epochs)


def double_division(case: Case) -> Iterator[Finding]:
    """Losses divided by the number of micro-batches twice, or `.grad` after each of them."""
    for (_, objective), parts in case.objectives.items():
        yield from _divided_in_turn(case, parts)
        small = [p for p in parts if p.many > 1 and _even(p) and near(p.least * p.many**2, 1.0)]
        # Half a loss is a choice that people make; a sixteenth of one is not. Every whole window has to agree.
        if not small or small[0].many < 3 or len(small) < sum(p.many >= small[0].many for p in parts):
            continue
        part = small[0]
        beside = [p for one in parts for p in case.parts_of[one.step] if p.many and p.objective != objective]
        if beside and not all(_twice(case, p) for p in (part, *beside)):
            continue
        b = part.backwards[0]
        yield case.of_part(
            "double-division",
            "warning",
            part,
            evidence={"micro-batches": part.many, "a share": part.least, "sum of shares": part.total},
            cause=f"Each of {part.many} losses weighs 1/{part.many**2}: it was divided by {part.many} twice.",
            cure=undivided(case.ledger[b], part.many),
            times=len(small),
        )


def _divided_in_turn(case: Case, parts: list[Part]) -> Iterator[Finding]:
    """`.grad` divided by hand after each backward, so that what came early is divided again and again."""
    found = shortened(case, parts)
    ratios = [ratio for _, own in found for ratio in own]
    by = ratios[0] if ratios else 0.0
    if by < 1.5 or not all(near(ratio, float(round(by))) for ratio in ratios):
        return
    part = found[0][0]
    yield case.of_part(
        "double-division",
        "error",
        part,
        evidence={"micro-batches": part.many, "shares": list(part.weights), "sum of shares": part.total},
        cause=(
            f"`.grad` is divided by {round(by)} after each backward, and with it all that is there already: the first "
            f"of {part.many} micro-batches weighs {part.weights[0]:.3g}, the last one {part.weights[-1]:.3g}."
        ),
        times=len(found),
    )


def _twice(case: Case, part: Part) -> bool:
    """Whether the number of micro-batches is twice among what a loss was divided by."""
    return sum(bool(near(one, 1 / part.many)) for one in case.constants(part) or ()) > 1


def wrong_divisor(case: Case) -> Iterator[Finding]:
    """Losses divided by a whole number that is that of no window's micro-batches.

    A weight that is meant is multiplied with mostly, and written as it is; what one divides by is a count. Which one
    cannot be known: next to the window's length it is a warning, else a note.
    """
    for (_, objective), parts in case.objectives.items():
        whole = [p for p in parts if p.many > 1 and _even(p)]
        usual = max({p.many for p in whole}, key=[p.many for p in whole].count, default=0)
        own = [p for p in whole if p.many == usual]
        if len(own) < 2 or 2 * len(own) < len(parts):
            continue
        by = _divisor(case, own[0])
        if by < 3 or not all(near(p.least * by, 1.0) and _divisor(case, p) == by for p in own):
            continue
        alone = all(p.objective == objective for part in own for p in case.parts_of[part.step] if p.many)
        # Another optimizer may step at another pace, and several ranks may count theirs together.
        meant = {usual, usual**2, usual * number(case.ledger.meta.get("ranks"))} | {
            p.many for p in case.parts if p.objective == objective
        }
        if by in meant or not alone or any(near(one * usual, 1.0) for one in case.constants(own[0]) or ()):
            continue
        part = own[0]
        close, late = abs(by - usual) == 1, "late" if by < usual else "early"
        yield case.of_part(
            "wrong-divisor",
            "warning" if close else "note",
            part,
            evidence={"micro-batches": usual, "divided by": by, "sum of shares": part.total},
            cause=(
                f"Each window holds {usual} micro-batches, and each of their losses is divided by {by}: the shares add "
                f"up to {part.total:.3g} in every step. "
                + (
                    f"Either that is the wrong number, or the loop steps one micro-batch too {late}."
                    if close
                    else f"If {by} is to be their number, it is another; if it is a weight, this is as it is meant."
                )
            ),
            cure=divided_by_another(case.ledger[part.backwards[0]], by, str(usual)) if close else "",
            times=len(own),
        )


def _divisor(case: Case, part: Part) -> int:
    """The whole number by which the one loss of each backward of a part was divided, or else its gradient; or 0."""
    found = set()
    for code in set(case.events.column("details")[list(part.backwards)].tolist()):
        terms = case.events.details[code].get("terms")
        term = terms[0] if isinstance(terms, list) and len(terms) == 1 and isinstance(terms[0], Mapping) else {}
        by = number(term.get("divisor"))
        if near(abs(number(term.get("factor"))), 1.0) and 0 < part.least < 1:
            by = float(round(1 / part.least))  # by hand: nobody multiplies gradients by a weight
        elif not near(abs(number(term.get("factor"))) * by, 1.0):
            by = 0.0
        found.add(int(by) if by and by.is_integer() and near(part.least * by, 1.0) else 0)
    return found.pop() if len(found) == 1 else 0
