"""Rules that look at an epoch's end: what was left over there, thrown away, carried on, or divided by too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from accumviz.checks.cures import UNAVERAGED, divided_by_another, flushed
from accumviz.checks.evidence import Case, Loop, Part, near
from accumviz.checks.ranks import of_one_rank
from accumviz.checks.report import Finding
from accumviz.checks.windows import lost_inside
from accumviz.gains import number


def tail_dropped(case: Case) -> Iterator[Finding]:
    """Micro-batches at the end of a loader that no step ever consumed."""
    for loop in case.loops:
        if loop.usual < 2 or not loop.steps.size:
            continue
        _, tails = lost_inside(case, loop)
        if case.has_loaders:
            tails = [lost for lost in tails if case.ended(case.epoch(lost[0], loop.rank))]
        groups: dict[int, list[int]] = {}
        for b, end, _ in tails:
            groups.setdefault(end, []).append(b)
        left = _left_at_the_end(case, loop)
        found = [lost for lost in groups.values() if len(lost) < loop.usual] + ([left] if left else [])
        if not found:
            continue
        local = of_one_rank(case, found[0][-1])
        yield case.finding(
            "tail-dropped",
            "warning",
            found[0][0],
            evidence={"backwards": found[0], "usual window": loop.usual, "lost in all": sum(map(len, found))},
            cause=(
                f"The loader ended after {len(found[0])} of {loop.usual} micro-batches of a window, and what they "
                "contributed was thrown away." + (UNAVERAGED if local else "")
            ),
            cure="" if local else flushed(case.ledger[int(loop.steps[0])], _divided_by(case, loop, found[0])),
            times=len(found),
            optimizer=loop.optimizer,
        )


def _left_at_the_end(case: Case, loop: Loop) -> list[int]:
    """The backwards that are live when everything is over, where a loader or the script itself has ended."""
    after = loop.backwards[loop.backwards > loop.read_step.max(initial=-1)].tolist()
    sites = set(case.sites[loop.read].tolist())
    unused = [b for b in after if case.sites[b] in sites and b not in loop.lost and case.finite(b)]
    if not unused or (loop.skipped.size and loop.skipped[-1] > unused[-1]):
        return []
    if case.ran_out or case.ended(case.epoch(unused[-1], loop.rank)):
        return unused
    return []


def _divided_by(case: Case, loop: Loop, left: list[int]) -> int:
    """The length of a whole window, if these are divided by it; 0 if not, or if that is not known."""
    terms = case.ledger[left[0]].details.get("terms")
    term = terms[0] if isinstance(terms, list) and terms else None
    factor = abs(number(term.get("factor"))) if isinstance(term, Mapping) and term.get("reduction") == "mean" else 0.0
    return loop.usual if near(factor * loop.usual, 1.0) else 0


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
        over = over or on_top(case, parts)
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


def on_top(case: Case, parts: list[Part]) -> list[tuple[Part, int]]:
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
    inside = [p for p in parts if p.many > 1 and p.even and case.has_loaders and not restarted(case, p)]
    return inside[0] if len(inside) > 1 and len({p.many for p in inside}) == 1 else None


def _crosses(case: Case, part: Part) -> bool:
    """Whether a loader began anew inside a window; where no loader was seen, its length says it."""
    return not case.has_loaders or restarted(case, part)


def restarted(case: Case, part: Part) -> bool:
    first, last = part.backwards[0], part.backwards[-1]
    return any(first < begins < last and case.trains(begins, ends) for begins, ends in case.epochs)


def window_collapses_at_end(case: Case) -> Iterator[Finding]:
    """A step for each micro-batch in the last window of a loader."""
    for loop in case.loops:
        if loop.usual < 2:
            continue
        windows = [(step, backwards) for step, backwards in loop.windows.items() if backwards]
        runs: list[list[tuple[int, list[int]]]] = [[]]
        for step, backwards in windows:
            if len(backwards) == 1 and loop.usual > 1:
                runs[-1].append((step, backwards))
            elif runs[-1]:
                runs.append([])
        found = [run for run in runs if len(run) > 1 and _at_the_end(case, loop, run)]
        if not found:
            continue
        run = found[0]
        yield case.finding(
            "window-collapses-at-end",
            "error",
            run[0][0],
            step=run[0][0],
            evidence={"usual window": loop.usual, "steps of one micro-batch, at events": [step for step, _ in run]},
            cause=(
                f"At the end of the loader every micro-batch has a step of its own ({len(run)} of them), where a "
                f"window holds {loop.usual}."
            ),
            times=len(found),
            optimizer=loop.optimizer,
        )


def _at_the_end(case: Case, loop: Loop, run: list[tuple[int, list[int]]]) -> bool:
    epoch = case.epoch(run[0][1][0], loop.rank)
    if not case.ended(epoch) or epoch is None:
        return False
    # An epoch that steps with every micro-batch from its beginning means to.
    if not any(len(own) > 1 and epoch[0] < own[0] < run[0][0] for own in loop.windows.values()):
        return False
    later = loop.backwards[loop.backwards > run[-1][0]]
    # A loader that looks ahead ends before the last backwards.
    return not later.size or run[0][1][0] < epoch[1] < later[0] or case.epoch(int(later[0]), loop.rank) != epoch
