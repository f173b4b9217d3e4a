"""Rules that look at what losses are divided by: nothing, the same twice, what counts nothing, or their own sizes.

A sum that is divided by its own length is a mean, and judged as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from accumviz.checks.analysis import Case, Part, near, usual
from accumviz.checks.cures import divided, divided_by_another, undivided
from accumviz.checks.distributed import summed_over_ranks, unshared
from accumviz.checks.epoch_end import micro_batches, outgrown
from accumviz.checks.report import Finding
from accumviz.ledger.events import Event, listed
from accumviz.ledger.gains import number, uncancelled


def loss_not_divided(case: Case) -> Iterator[Finding]:
    """Every mean loss of a window at its full weight; or one of them, beside others that were divided."""
    for (optimizer, objective), parts in case.objectives.items():
        whole = [p for p in parts if p.many > 1]
        if added := list(summed_over_ranks(case, parts)):
            yield from added
        elif (
            whole
            and all(_undivided(p) for p in whole)
            and not separate_tasks(case, whole[0])
        ):
            # Where micro-batches draw one of several losses, all of them are a window's.
            drawn = len({micro_batches(case, p) for p in parts}) < len(
                {p.many for p in parts}
            )
            lengths = [micro_batches(case, p) if drawn else p.many for p in whole]
            many = usual(lengths)
            whole = [
                p
                for _, p in sorted(
                    zip(lengths, whole, strict=True), key=lambda pair: pair[0] != many
                )
            ]
            part = whole[0]
            own = [
                part,
                *(_drawn(case, part) if drawn else _on_other_lines(case, whole)),
            ]
            by, many = many, sum(p.many for p in own)
            lines = list(dict.fromkeys(case.ledger[p.backwards[0]].line for p in own))
            # What an epoch cuts short stands alone; what has neighbours of its length was meant to be so long.
            varied = len({one for one, other in pairwise(lengths) if one == other}) > 1
            yield case.of_part(
                "loss-not-divided",
                "warning",
                part,
                evidence={
                    **named(case, part),
                    "micro-batches": many,
                    "sum of shares": sum(p.total for p in own),
                    "a share": part.least,
                    **({"lines": lines} if len(lines) > 1 else {}),
                },
                cause=(
                    f"{many} mean losses are added up without a division: the step reads {many} times the "
                    "gradient of one large batch."
                    + (
                        f" Windows hold from {min(lengths)} to {max(lengths)}, each its own number."
                        if varied
                        else ""
                    )
                ),
                cure=_divided(
                    case,
                    own,
                    "micro_batches_in_this_window"
                    if varied
                    else str(by if drawn else many),
                ),
                times=len(whole),
            )
        elif whole:
            yield from _mixed(case, optimizer, objective, whole)
            yield from _beside(case, objective, whole)
            yield from _in_part(case, whole)


def named(case: Case, part: Part) -> dict[str, str]:
    """Which of several losses of one backward it is."""
    several = len(case.ledger[part.backwards[0]].terms) > 1
    return {"the loss": case.shares.objectives[part.objective]} if several else {}


def _drawn(case: Case, part: Part) -> list[Part]:
    """What the same step has of other losses that nothing divided, from micro-batches of their own."""
    others = [
        p
        for p in case.parts_of[part.step]
        if p.optimizer == part.optimizer and p.many and _undivided(p)
    ]
    return [p for p in others if not set(p.backwards) & set(part.backwards)]


def _on_other_lines(case: Case, parts: list[Part]) -> list[Part]:
    """What the first step has of the same loss from another line: of micro-batches that come by another way.

    It is the same where in each window some lines synchronise and others do not, or stand in two branches of an `if`.
    """
    steps = [
        {
            p.objective: p
            for p in case.parts_of[part.step]
            if p.optimizer == part.optimizer
        }
        for part in parts
    ]
    found = []
    for other in steps[0].values():
        pairs = [
            (part, mine.get(other.objective))
            for part, mine in zip(parts, steps, strict=True)
        ]
        if all(
            twin is not None and _by_another_way(case, part, twin)
            for part, twin in pairs
        ):
            found.append(other)
    return found


def _by_another_way(case: Case, part: Part, other: Part) -> bool:
    if (
        set(part.backwards) & set(other.backwards)
        or not other.many
        or not _undivided(other)
    ):
        return False
    one, another = (case.ledger[p.backwards[0]] for p in (part, other))
    if one.label != another.label or _operations(one) != _operations(another):
        return False
    quiet, loud = ([unshared(case, b) for b in p.backwards] for p in (part, other))
    return (
        (all(quiet) and not any(loud))
        or (all(loud) and not any(quiet))
        or case.scripts.apart(one, another)
    )


def _operations(event: Event) -> list[str]:
    return [str(term.get("op")) for term in event.terms]


def _divided(case: Case, own: list[Part], many: str) -> str:
    """All losses of these backwards, divided; where one is one of several only, its line is another."""
    cures = []
    for part in own:
        b = part.backwards[0]
        others = [
            p
            for p in case.parts_of[part.step]
            if b in p.backwards and p.optimizer == part.optimizer
        ]
        alike = all(near(p.least, part.least) for p in others)
        cures.append(divided(case.ledger[b], many) if alike else "")
    return "\n".join(dict.fromkeys(cures)) if all(cures) else ""


def _undivided(part: Part) -> bool:
    ones = (
        part.known
        and not part.again
        and bool(near(part.least, 1.0) and near(part.most, 1.0))
    )
    # A sum over one element is no mean, and a choice.
    return ones and (
        part.mean or all(size > 1 and size.is_integer() for size in part.sizes)
    )


def separate_tasks(case: Case, part: Part) -> bool:
    """Whether each backward has parameters of its own: heads that are trained one after the other, and not parts."""
    reached = case.contributed[list(part.backwards)]
    return bool((reached & (reached.sum(axis=0) == 1)).any(axis=1).all())


def _mixed(
    case: Case, optimizer: int, objective: int, parts: list[Part]
) -> Iterator[Finding]:
    """Losses of which each backward has a mixture, α of one and 1 - α of the other, and nothing divided that."""
    by: list[list[float] | None] = []
    for part in parts:
        own = [
            p
            for p in case.parts_of[part.step]
            if p.optimizer == optimizer and p.backwards == part.backwards
        ]
        several = (
            len(own) > 1 and own[0].objective == objective
        )  # told once, of the first of them
        if (
            not several
            or not all(p.known and p.even for p in own)
            or not near(sum(p.least for p in own), 1.0)
        ):
            return
        by = by or [case.constants(p) for p in own]
        if not all(
            one and not any(near(factor, 1 / part.many) for factor in one) for one in by
        ):
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
    many = usual(p.many for p in parts)
    own = [p for p in parts if p.many == many]
    full = {tuple(bool(near(weight, 1.0)) for weight in p.weights) for p in own}
    if (
        many < 3
        or len(own) < 2
        or len(full) > 1
        or not all(p.known and p.mean and not p.again for p in own)
    ):
        return
    (undivided,), part = full, own[0]
    left = [
        weight
        for p in own
        for weight, one in zip(p.weights, undivided, strict=True)
        if not one
    ]
    if (
        all(undivided)
        or not any(undivided)
        or not all(near(weight, 1 / many) for weight in left)
    ):
        return
    yield case.of_part(
        "loss-not-divided",
        "warning",
        part,
        event=part.backwards[undivided.index(True)],
        evidence={
            "micro-batches": many,
            "shares": list(part.weights),
            "sum of shares": part.total,
        },
        cause=(
            f"Of {many} micro-batches, {many - sum(undivided)} are divided by {many} and {sum(undivided)} are not, "
            f"in every window: they do not count alike, and their shares add up to {part.total:.3g}."
        ),
        times=len(own),
    )


def _beside(case: Case, objective: int, parts: list[Part]) -> Iterator[Finding]:
    """A loss with a constant of its own, beside one that was divided by the number of micro-batches."""
    pairs = [(p, _main(case, p)) for p in parts]
    mains = [main for _, main in pairs if main is not None]
    part, even = parts[0], all(p.known and p.even for p in parts)
    if (
        len(mains) < len(parts)
        or not even
        or not near(min(p.least for p in parts), max(p.most for p in parts))
    ):
        return
    weight, total, proof = part.least, part.total, len({p.many for p in parts}) > 1
    if not proof:
        own, its = case.constants(part), case.constants(mains[0])
        if (
            own is None
            or not its
            or any(near(one, other) for one in own for other in (*its, 1 / part.many))
        ):
            return
        # Nobody writes a number, and means another one of which it is a part.
        proof = (
            bool(own)
            and set(own) <= case.scripts.numbers
            and total not in case.scripts.numbers
        )
        if not proof and _digits(weight) > _digits(total):
            return
    name, main = (case.shares.objectives[p.objective] for p in (part, mains[0]))
    alone = len(case.ledger[part.backwards[0]].terms) == 1
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
        cure=divided(case.ledger[part.backwards[0]], str(part.many))
        if alone and proof
        else "",
        times=len(parts),
    )


def _main(case: Case, part: Part) -> Part | None:
    """Another loss of as many micro-batches of a window, of which the shares add up to 1."""
    for other in case.parts_of[part.step]:
        alike = (
            other.optimizer == part.optimizer
            and other.objective != part.objective
            and other.many == part.many
        )
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
        sums = [p for p in parts if p.many > 1 and _counted_twice(case, p)]
        small = sums or [
            p
            for p in parts
            if p.many > 1 and p.even and _squared(case, p) and not _own(case, p)
        ]
        # Half a loss is a choice that people make; a sixteenth of one is not. Every whole window has to agree.
        if (
            not small
            or small[0].many < 3
            or len(small) < sum(p.many >= small[0].many for p in parts)
        ):
            continue
        part = small[0]
        beside = [
            p
            for one in parts
            for p in case.parts_of[one.step]
            if p.many and p.objective != objective
        ]
        if beside and not all(_twice(case, p) for p in (part, *beside)):
            continue
        b, mixed = part.backwards[0], not near(part.least * part.many**2, 1.0)
        yield case.of_part(
            "double-division",
            "warning",
            part,
            evidence={
                "micro-batches": part.many,
                "a share": part.least,
                "sum of shares": part.total,
            },
            cause=f"The losses of a window are sums, divided by its number of elements, and by {part.many} as well: "
            f"their shares add up to 1/{part.many}."
            if sums
            else f"Each of {part.many} {'mixtures of ' * mixed}losses weighs 1/{part.many**2}: it was divided by "
            f"{part.many} twice.",
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
        evidence={
            "micro-batches": part.many,
            "shares": list(part.weights),
            "sum of shares": part.total,
        },
        cause=(
            f"`.grad` is divided by {round(by)} after each backward, and with it all that is there already: the first "
            f"of {part.many} micro-batches weighs {part.weights[0]:.3g}, the last one {part.weights[-1]:.3g}."
        ),
        times=len(found),
    )


def _counted_twice(case: Case, part: Part) -> bool:
    """Whether sums were divided by the number of all elements of a window, and by that of its micro-batches as well."""
    sums = (
        part.known
        and not part.mean
        and not part.again
        and bool(near(part.each[0], part.each[1]))
    )
    by = (sums and near(part.total * part.many, 1.0) and case.constants(part)) or ()
    return any(near(one, 1 / part.many) for one in by)


def _squared(case: Case, part: Part) -> bool:
    """Whether one over the square of the number of micro-batches is what a loss weighs, or all losses of each together.

    As many losses as there are micro-batches have a mean of which each weighs as little: that is divided once.
    """
    together = sum(p.least for p in case.parts_of[part.step] if p.many == part.many)
    squared = any(near(weight * part.many**2, 1.0) for weight in (part.least, together))
    return squared and not near(together * part.many, 1.0)


def _own(case: Case, part: Part) -> bool:
    """Whether a constant stands inside a mean: it may be a part of the loss, as its classes are."""
    return any("own" in term for term in case.ledger[part.backwards[0]].terms)


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
        yield from outgrown(case, parts)
        whole = [p for p in parts if p.many > 1 and p.even]
        many = usual(p.many for p in whole)
        own = [p for p in whole if p.many == many]
        if len(own) < 2 or 2 * len(own) < len(parts):
            continue
        by = divisor(case, own[0])
        if by < 3 or not all(
            near(p.least * by, 1.0) and divisor(case, p) == by for p in own
        ):
            continue
        # Of several losses each has to be, and by no number that makes a mean of them.
        beside = [
            p
            for part in own
            for p in case.parts_of[part.step]
            if p.many and p.objective != objective
        ]
        total = own[0].total + sum(p.total for p in beside) / len(own)
        of_all = all(
            near(number(t.get("divisor")) / _undone(t), float(by))
            for p in beside
            for t in _terms(case, p)
        )
        alone = not beside or (
            of_all
            and not near(total, 1.0)
            and by % (1 + len({p.objective for p in beside})) > 0
        )
        # Another optimizer may step at another pace, and several ranks may count theirs together.
        meant = {many, many**2, many * number(case.ledger.meta.get("ranks"))} | {
            p.many for p in case.parts if p.objective == objective
        }
        if (
            by in meant
            or not alone
            or any(near(one * many, 1.0) for one in case.constants(own[0]) or ())
        ):
            continue
        part = own[0]
        alike = all(
            near(p.least * by, 1.0) or p.backwards == own[0].backwards
            for p in beside[:1]
        )
        close, late = abs(by - many) == 1, "late" if by < many else "early"
        yield case.of_part(
            "wrong-divisor",
            "warning" if close else "note",
            part,
            evidence={
                "micro-batches": many,
                "divided by": by,
                "sum of shares": part.total,
            },
            cause=(
                f"Each window holds {many} micro-batches, and each of their losses is divided by {by}: the shares add "
                f"up to {part.total:.3g} in every step. "
                + (
                    f"Either that is the wrong number, or the loop steps one micro-batch too {late}."
                    if close
                    else f"If {by} is to be their number, it is another; if it is a weight, this is as it is meant."
                )
            ),
            # Nothing is written where one of them, with a weight of its own, stands on another line.
            cure=divided_by_another(case.ledger[part.backwards[0]], by, str(many))
            if close and alike
            else "",
            times=len(own),
        )


def _without_windows(
    case: Case, objective: int, parts: list[Part]
) -> Iterator[Finding]:
    """Likewise where every step has one micro-batch: a note, unless the loop counts by what it divides by."""
    first = parts[0]
    by = divisor(case, first)
    # What the gradient is divided by is no window: it was whole when the loop did that.
    if by < 3 or len(parts) < 2 or not near(sum(case.constants(first) or ()), 1 / by):
        return
    if not all(
        p.many == 1 and p.even and not p.lost and divisor(case, p) == by for p in parts
    ):
        return
    alone = all(
        p.objective == objective
        for part in parts
        for p in case.parts_of[part.step]
        if p.many
    )
    elsewhere = {p.many for p in case.parts if p.objective == objective} | {
        number(case.ledger.meta.get("ranks"))
    }
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


def divisor(case: Case, part: Part) -> int:
    """The whole number by which a loss of each backward of a part was divided, and by nothing else; or 0."""
    found = set()
    for term in _terms(case, part):
        # A multiplier that undoes one division leaves the others.
        by = number(term.get("divisor")) / _undone(term)
        if near(abs(number(term.get("factor"))), 1.0) and 0 < part.least < 1:
            by = float(
                round(1 / part.least)
            )  # by hand: nobody multiplies gradients by a weight
        elif "own" in term or not near(abs(number(term.get("factor"))) * by, 1.0):
            by = 0.0
        found.add(
            int(by) if by and by.is_integer() and near(part.least * by, 1.0) else 0
        )
    return found.pop() if len(found) == 1 else 0


def _terms(case: Case, part: Part) -> list[Mapping[str, Any]]:
    """What is known of a part's loss in each of its backwards; what is alike comes once."""
    details, codes = case.events.details, case.events.column("details")
    known = {
        code: listed(details[code])
        for code in set(codes[list(part.backwards)].tolist())
    }
    if all(len(terms) == 1 for terms in known.values()):
        return [terms[0] for terms in known.values()]
    rows = case.shares.of(part.step)
    rows = rows.take((rows.objective == part.objective) & ~rows.erased)
    places = set(zip(codes[rows.backward].tolist(), rows.term.tolist(), strict=True))
    return [next(iter(known.get(code, [])[i : i + 1]), {}) for code, i in places]


def _undone(term: Mapping[str, Any]) -> float:
    """The product of what a loss was multiplied by and divided by as well."""
    constants = term.get("constants")
    factors = [number(one) for one in constants] if isinstance(constants, list) else []
    left = uncancelled(factors)
    return math.prod(one for one in factors if one > 1) / math.prod(
        one for one in left if one > 1
    )
