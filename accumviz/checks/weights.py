"""Rules that look at what micro-batches weigh: means over unequal numbers, losses divided too little or too often."""

from __future__ import annotations

from collections.abc import Iterator

from accumviz.checks.cures import added, again, divided, replaced
from accumviz.checks.evidence import Case, Part, near
from accumviz.checks.report import Finding


def token_mean_of_means(case: Case) -> Iterator[Finding]:
    """Means over unequal numbers of elements, averaged as if they were equal."""
    for (optimizer, objective), parts in case.objectives.items():
        unequal = [p for p in parts if p.known and p.mean and p.many > 1 and p.elements[0] < p.elements[1]]
        # What an epoch left over may be a smaller batch: that is another mistake.
        unequal = [p for p in unequal if p.each[0] > 0 and not near(p.each[0], p.each[1]) and not _restarted(case, p)]
        if not unequal:
            continue
        inside = [p for p in unequal if not _only_the_last_is_smaller(p)]
        worst = max(inside or unequal, key=lambda p: p.each[1] / p.each[0])
        rows = case.shares.of(worst.step)
        rows = rows.take((rows.objective == objective) & ~rows.erased)
        low = int(rows.backward[rows.elements.argmax()])
        yield case.finding(
            "token-mean-of-means",
            "error" if inside else "note",
            low,
            step=worst.step,
            evidence={
                "elements": rows.elements.tolist(),
                "weight per element": (rows.constant * rows.by_hand / rows.elements).tolist(),
                "largest over smallest": worst.each[1] / worst.each[0],
            },
            cause=(
                f"Each loss is a mean over its own elements, and these are from {worst.elements[0]:g} to "
                f"{worst.elements[1]:g}: an element of the smallest counts {worst.each[1] / worst.each[0]:.3g} times "
                "as much as one of the largest."
            )
            + ("" if inside else " Only the last micro-batch of a window was smaller."),
            cure=_summed(case, low),
            times=len(inside or unequal),
            optimizer=optimizer,
        )


def _only_the_last_is_smaller(part: Part) -> bool:
    *others, last = part.sizes
    return len(set(others)) == 1 and last < others[0] and bool(near(part.least, part.most))


def _summed(case: Case, backward: int) -> str:
    """Sum, and divide by what the window holds."""
    event = case.ledger[backward]
    loss, source = event.label, event.source
    if not loss or (f"{loss}.backward(" not in source and f"({loss})" not in source):
        return ""
    # What it was divided by goes: the number of micro-batches is not what it is a mean over.
    bare = loss.split(" / ")[0].strip("(")
    from_here = source.replace(loss, f"{bare} / elements_in_window", 1)
    if f"{loss}.backward(" in source:
        at = source.index(f"{loss}.backward(")
        open_ = "" if at and source[at - 1] == "(" else "("
        from_here = source.replace(f"{loss}.backward(", f"{open_}{bare} / elements_in_window).backward(", 1)
    said = f'# {bare} with reduction="sum"; elements_in_window: counted over all of its micro-batches'
    return replaced(event, said, from_here)


def loss_not_divided(case: Case) -> Iterator[Finding]:
    """Every mean loss of a window at its full weight."""
    for (optimizer, _), parts in case.objectives.items():
        whole = [p for p in parts if p.many > 1]
        if not whole or not all(_undivided(p) for p in whole) or _tasks(case, whole[0]):
            continue
        part = whole[0]
        b = part.backwards[0]
        yield case.finding(
            "loss-not-divided",
            "warning",
            b,
            step=part.step,
            evidence={"micro-batches": part.many, "sum of shares": part.total, "a share": part.least},
            cause=(
                f"{part.many} mean losses are added up without a division: the step reads {part.many} times the "
                "gradient of one large batch."
            ),
            cure=divided(case.ledger[b], str(part.many)),
            times=len(whole),
            optimizer=optimizer,
        )


def _undivided(part: Part) -> bool:
    return part.known and part.mean and not part.again and bool(near(part.least, 1.0) and near(part.most, 1.0))


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
    for (optimizer, _), parts in case.objectives.items():
        whole = _whole(parts)
        if whole is None:
            continue
        weak = [
            p
            for p in parts
            # What was recorded of the first window may be its end only.
            if p.order > 0 and not p.lost and _even(p) and p.many < whole.many and near(p.least, whole.least)
        ]
        if not weak:
            continue
        part = weak[0]
        b = part.backwards[0]
        yield case.finding(
            "partial-window-underscaled",
            "error",
            b,
            step=part.step,
            evidence={
                "micro-batches": part.many,
                "in a whole window": whole.many,
                "shares": [part.least] * part.many,
                "sum of shares": part.total,
            },
            cause=(
                f"The window holds {part.many} micro-batches, and each was divided by {whole.many}: its step reads "
                f"{part.total:.3g} of the mean gradient."
            ),
            cure=_by_the_windows_length(case, b),
            times=len(weak),
            optimizer=optimizer,
        )


def _by_the_windows_length(case: Case, backward: int) -> str:
    event = case.ledger[backward]
    if event.via:  # the library that calls backward has divided it
        return ""
    bare = event.label.split(" / ")[0].strip("(")
    if not bare or " / " not in event.source or event.label not in event.source:
        return divided(event, "micro_batches_in_this_window")
    return replaced(event, event.source.replace(event.label, f"{bare} / micro_batches_in_this_window", 1))


def leftover_carried(case: Case) -> Iterator[Finding]:
    """What one epoch left over, consumed by the first step of the next one on top of its own."""
    for (optimizer, _), parts in case.objectives.items():
        whole = _whole(parts) or _usual(case, parts)
        if whole is None:
            continue
        over = [
            p for p in parts if _even(p) and p.many > whole.many and near(p.least, whole.least) and _crosses(case, p)
        ]
        if not over:
            continue
        part = over[0]
        step = case.ledger[part.step]
        own = part.many - whole.many
        yield case.finding(
            "leftover-carried",
            "error",
            part.backwards[0],
            step=part.step,
            evidence={
                "micro-batches": part.many,
                "in a whole window": whole.many,
                "carried": own,
                "sum of shares": part.total,
            },
            cause=(
                f"{own} micro-batch{'' if own == 1 else 'es'} of the epoch before stayed in `.grad`: the first step of "
                f"the next one reads {part.total:.3g} times a mean gradient."
            ),
            cure=added(step, "# and once more when the loader has ended:", *again(step)),
            times=len(over),
            optimizer=optimizer,
        )


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
    """Losses divided by the number of micro-batches twice."""
    for (optimizer, objective), parts in case.objectives.items():
        steps = {p.step for p in parts}
        alone = all(p.objective == objective for step in steps for p in case.parts_of[step] if p.many)
        small = [p for p in parts if p.many > 1 and _even(p) and near(p.least * p.many**2, 1.0)]
        # Half a loss is a choice that people make; a sixteenth of one is not. Every whole window has to agree.
        if not alone or not small or small[0].many < 3 or len(small) < sum(p.many >= small[0].many for p in parts):
            continue
        part = small[0]
        b = part.backwards[0]
        yield case.finding(
            "double-division",
            "warning",
            b,
            step=part.step,
            evidence={"micro-batches": part.many, "a share": part.least, "sum of shares": part.total},
            cause=(
                f"Each of {part.many} losses weighs 1/{part.many**2}: it was divided by {part.many} twice, by the "
                "loop and by what it calls."
            ),
            cure=_undone(case, b),
            times=len(small),
            optimizer=optimizer,
        )


def _undone(case: Case, backward: int) -> str:
    event = case.ledger[backward]
    bare = event.label.split(" / ")[0].strip("(")
    if " / " not in event.label or event.label not in event.source:
        return ""
    return replaced(event, event.source.replace(f"({event.label})", bare, 1).replace(event.label, bare, 1))
