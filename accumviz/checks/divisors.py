"""Rules that look at what losses are divided by: nothing, the same twice, what counts nothing, or their own sizes.

A sum that is divided by its own length is a mean, and judged as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from accumviz.checks.cures import divided, divided_by_another, summed, undivided
from accumviz.checks.evidence import Case, Part, near
from accumviz.checks.ranks import unshared
from accumviz.checks.report import Finding
from accumviz.checks.tails import on_top, restarted
from accumviz.events import Event
from accumviz.gains import number, uncancelled


def loss_not_divided(case: Case) -> Iterator[Finding]:
    """Every mean loss of a window at its full weight; or one of them, beside others that were divided."""
    for (optimizer, objective), parts in case.objectives.items():
        whole = [p for p in parts if p.many > 1]
        if whole and all(_undivided(p) for p in whole) and not _tasks(case, whole[0]):
            part = whole[0]
            own = [part, *_on_other_lines(case, whole)]
            many = sum(p.many for p in own)
            yield case.of_part(
                "loss-not-divided",
                "warning",
                part,
                evidence={
                    **_named(case, part),
                    "micro-batches": many,
                    "sum of shares": sum(p.total for p in own),
                    "a share": part.least,
                    **({"lines": [case.ledger[p.backwards[0]].line for p in own]} if len(own) > 1 else {}),
                },
                cause=(
                    f"{many} mean losses are added up without a division: the step reads {many} times the "
                    "gradient of one large batch."
                ),
                cure=_divided(case, own, many),
                times=len(whole),
            )
        elif whole:
            yield from _mixed(case, optimizer, objective, whole)
            yield from _beside(case, objective, whole)
            yield from _in_part(case, whole)


def _named(case: Case, part: Part) -> dict[str, str]:
    """Which of several losses of one backward it is."""
    several = len(case.ledger[part.backwards[0]].details.get("terms", ())) > 1
    return {"the loss": case.shares.objectives[part.objective]} if several else {}


def _on_other_lines(case: Case, parts: list[Part]) -> list[Part]:
    """What the first step has of the same loss from another line: of micro-batches that come by another way.

    It is the same where in each window some lines synchronise and others do not, or stand in two branches of an `if`.
    """
    steps = [{p.objective: p for p in case.parts_of[part.step] if p.optimizer == part.optimizer} for part in parts]
    found = []
    for other in steps[0].values():
        pairs = [(part, mine.get(other.objective)) for part, mine in zip(parts, steps, strict=True)]
        if all(twin is not None and _by_another_way(case, part, twin) for part, twin in pairs):
            found.append(other)
    return found


def _by_another_way(case: Case, part: Part, other: Part) -> bool:
    if set(part.backwards) & set(other.backwards) or not other.many or not _undivided(other):
        return False
    one, another = (case.ledger[p.backwards[0]] for p in (part, other))
    if one.label != another.label or _operations(one) != _operations(another):
        return False
    quiet, loud = ([unshared(case, b) for b in p.backwards] for p in (part, other))
    return (all(quiet) and not any(loud)) or (all(loud) and not any(quiet)) or case.scripts.apart(one, another)


def _operations(event: Event) -> list[str]:
    terms = event.details.get("terms")
    return [str(term.get("op")) for term in terms if isinstance(term, Mapping)] if isinstance(terms, list) else []


def _divided(case: Case, own: list[Part], many: int) -> str:
    """All losses of these backwards, divided; where one is one of several only, its line is another."""
    cures = []
    for part in own:
        b = part.backwards[0]
        others = [p for p in case.parts_of[part.step] if b in p.backwards and p.optimizer == part.optimizer]
        alike = all(near(p.least, part.least) for p in others)
        cures.append(divided(case.ledger[b], str(many)) if alike else "")
    return "\n".join(dict.fromkeys(cures)) if all(cures) else ""


def _undivided(part: Part) -> bool:
    ones = part.known and not part.again and bool(near(part.least, 1.0) and near(part.most, 1.0))
    # A sum over one element is no mean, and a choice.
    return ones and (part.mean or all(size > 1 and size.is_integer() for size in part.sizes))


def _tasks(case: Case, part: Part) -> bool:
    """Whether each backward has parameters of its own: heads that are trained one after the other, and not parts."""
    reached = case.contributed[list(part.backwards)]
    return bool((reached & (reached.sum(axis=0) == 1)).any(axis=1).all())


def _mixed(case: Case, optimizer: int, objective: int, parts: list[Part]) -> Iterator[Finding]:
    """Losses of which each backward has a mixture, α of one and 1 - α of the other, and nothing divided that."""
    by: list[list[float] | None] = []
    for part in parts:
        own = [p for p in case.parts_of[part.step] if p.optimizer == optimizer and p.backwards == part.backwards]
        several = len(own) > 1 and own[0].objective == objective  # told once, of the first of them
        if not several or not all(p.known and p.even for p in own) or not near(sum(p.least for p in own), 1.0):
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


def _in_part(case: Case, parts: list[Part]) -> Iterator[Finding]:
    """Some micro-batches of each window at their full weight, and the same others divided by their number."""
    usual = max((p.many for p in parts), key=[p.many for p in parts].count)
    own = [p for p in parts if p.many == usual]
    full = {tuple(bool(near(weight, 1.0)) for weight in p.weights) for p in own}
    if usual < 3 or len(own) < 2 or len(full) > 1 or not all(p.known and p.mean and not p.again for p in own):
        return
    (undivided,), part = full, own[0]
    left = [weight for p in own for weight, one in zip(p.weights, undivided, strict=True) if not one]
    if all(undivided) or not any(undivided) or not all(near(weight, 1 / usual) for weight in left):
        return
    yield case.of_part(
        "loss-not-divided",
        "warning",
        part,
        event=part.backwards[undivided.index(True)],
        evidence={"micro-batches": usual, "shares": list(part.weights), "sum of shares": part.total},
        cause=(
            f"Of {usual} micro-batches, {usual - sum(undivided)} are divided by {usual} and {sum(undivided)} are not, "
            f"in every window: they do not count alike, and their shares add up to {part.total:.3g}."
        ),
        times=len(own),
    )


def _beside(case: Case, objective: int, parts: list[Part]) -> Iterator[Finding]:
    """A loss with a constant of its own, beside one that was divided by the number of micro-batches."""
    pairs = [(p, _main(case, p)) for p in parts]
    mains = [main for _, main in pairs if main is not None]
    part, even = parts[0], all(p.known and p.even for p in parts)
    if len(mains) < len(parts) or not even or not near(min(p.least for p in parts), max(p.most for p in parts)):
        return
    weight, total, proof = part.least, part.total, len({p.many for p in parts}) > 1
    if not proof:
        own, its = case.constants(part), case.constants(mains[0])
        if own is None or not its or any(near(one, other) for one in own for other in (*its, 1 / part.many)):
            return
        # Nobody writes a number, and means another one of which it is a part.
        proof = bool(own) and set(own) <= case.scripts.numbers and total not in case.scripts.numbers
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


def double_division(case: Case) -> Iterator[Finding]:
    """Losses divided by the number of micro-batches twice, or `.grad` after each of them."""
    for (_, objective), parts in case.objectives.items():
        yield from _divided_in_turn(case, parts)
        small = [p for p in parts if p.many > 1 and p.even and near(p.least * p.many**2, 1.0)]
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
    found = case.shortened.get((parts[0].optimizer, parts[0].objective), [])
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
        yield from _without_windows(case, objective, parts)
        whole = [p for p in parts if p.many > 1 and p.even]
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


def _without_windows(case: Case, objective: int, parts: list[Part]) -> Iterator[Finding]:
    """Likewise where every step has one micro-batch: a note, unless the loop counts by what it divides by."""
    first = parts[0]
    by = _divisor(case, first)
    # What the gradient is divided by is no window: it was whole when the loop did that.
    if by < 3 or len(parts) < 2 or not near(sum(case.constants(first) or ()), 1 / by):
        return
    if not all(p.many == 1 and p.even and not p.lost and _divisor(case, p) == by for p in parts):
        return
    alone = all(p.objective == objective for part in parts for p in case.parts_of[part.step] if p.many)
    elsewhere = {p.many for p in case.parts if p.objective == objective} | {case.ledger.meta.get("ranks")}
    if not alone or by in elsewhere:
        return
    event = case.ledger[first.backwards[0]]
    counted = case.scripts.counted(event)
    yield case.of_part(
        "wrong-divisor",
        "warning" if counted else "note",
        first,
        evidence={
            "micro-batches": 1,
            "divided by": by,
            "share": first.total,
            "the step on line": case.ledger[first.step].line,
        },
        cause=(
            f"The loss is divided by `{counted}`, by which the loop counts its micro-batches, and each of them has a "
            f"step of its own: every step reads 1/{by} of a gradient, and no window of {by} comes about."
            if counted
            else f"Every step reads one micro-batch, and its loss is divided by {by}. If {by} of them were to be one "
            "window, it never comes about; if that is a weight, it is as it is meant."
        ),
        times=len(parts),
    )


def _divisor(case: Case, part: Part) -> int:
    """The whole number by which the one loss of each backward of a part was divided, or else its gradient; or 0."""
    found = set()
    for code in set(case.events.column("details")[list(part.backwards)].tolist()):
        terms = case.events.details[code].get("terms")
        term = terms[0] if isinstance(terms, list) and len(terms) == 1 and isinstance(terms[0], Mapping) else {}
        # A multiplier that undoes one division leaves the others.
        by = number(term.get("divisor")) / _undone(term)
        if near(abs(number(term.get("factor"))), 1.0) and 0 < part.least < 1:
            by = float(round(1 / part.least))  # by hand: nobody multiplies gradients by a weight
        elif not near(abs(number(term.get("factor"))) * by, 1.0):
            by = 0.0
        found.add(int(by) if by and by.is_integer() and near(part.least * by, 1.0) else 0)
    return found.pop() if len(found) == 1 else 0


def _undone(term: Mapping[str, Any]) -> float:
    """The product of what a loss was multiplied by and divided by as well."""
    constants = term.get("constants")
    factors = [number(one) for one in constants] if isinstance(constants, list) else []
    left = uncancelled(factors)
    return math.prod(one for one in factors if one > 1) / math.prod(one for one in left if one > 1)


def token_mean_of_means(case: Case) -> Iterator[Finding]:
    """Means over unequal numbers of elements, averaged as if they were equal."""
    for parts in case.objectives.values():
        unequal = [p for p in parts if p.known and p.many > 1 and p.elements[0] < p.elements[1] and _means(p)]
        # What an epoch left over may be a smaller batch: that is another mistake.
        unequal = [p for p in unequal if p.each[0] > 0 and not near(p.each[0], p.each[1]) and not restarted(case, p)]
        carried = {p.step for p, _ in on_top(case, parts)} if unequal else set()
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
