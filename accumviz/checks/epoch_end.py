"""Rules that look at an epoch's end: what was left over there, thrown away, carried on, or divided by too much."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from accumviz.checks.analysis import Case, Loop, Part, near
from accumviz.checks.cures import UNAVERAGED, divided_by_another, flushed
from accumviz.checks.distributed import of_one_rank
from accumviz.checks.report import Finding
from accumviz.checks.windows import lost_inside
from accumviz.ledger.gains import number

# A loss that was left out, because it was not finite, has left no trace.
_FIRST = " It is the first one: the loop's counter begins too late, or a micro-batch was left out."


def tail_dropped(case: Case) -> Iterator[Finding]:
    """Micro-batches at the end of a loader that no step ever consumed."""
    for loop in case.loops:
        if loop.usual < 2 or not loop.steps.size:
            continue
        _, tails = lost_inside(case, loop)
        if case.has_loaders:
            tails = [
                lost for lost in tails if case.ended(case.epoch(lost[0], loop.rank))
            ]
        groups: dict[int, list[int]] = {}
        for b, end, _ in tails:
            groups.setdefault(end, []).append(b)
        cut = [lost for lost in groups.values() if len(lost) < loop.usual]
        if cut and not case.has_loaders and not _at_even_distances(loop, cut):
            continue
        left = _left_at_the_end(case, loop)
        found = cut + ([left] if left else [])
        if not found:
            continue
        local, source = (
            of_one_rank(case, found[0][-1]),
            "loader" if case.has_loaders else "loop",
        )
        yield case.finding(
            "tail-dropped",
            "warning",
            found[0][0],
            evidence={
                "backwards": found[0],
                "usual window": loop.usual,
                "lost in all": sum(map(len, found)),
            },
            cause=(
                f"The {source} ended after {len(found[0])} of {loop.usual} micro-batches of a window, and what they "
                "contributed was thrown away." + (UNAVERAGED if local else "")
            ),
            cure=""
            if local
            else flushed(
                case.ledger[int(loop.steps[0])], _divided_by(case, loop, found[0])
            ),
            times=len(found),
            optimizer=loop.optimizer,
        )


def _at_even_distances(loop: Loop, tails: list[list[int]]) -> bool:
    """Whether these are alike and as far from each other as epochs' ends: what is thrown away on purpose is not."""
    gaps = np.diff(
        [
            0,
            *(loop.backwards.searchsorted(lost[-1]) + 1 for lost in tails),
            loop.backwards.size,
        ]
    ).tolist()
    *epochs, last = gaps
    alike = len({*map(len, tails)}) == len({*epochs}) == 1
    return alike and (last == epochs[0] or (len(tails) > 1 and last < epochs[0]))


def _left_at_the_end(case: Case, loop: Loop) -> list[int]:
    """The backwards that are live when everything is over, where a loader or the script itself has ended."""
    steps, read = case.ledger.fates.steps, np.unique(loop.read)
    after = loop.backwards[loop.backwards > loop.read_step.max(initial=-1)]
    after = after[~steps[np.ix_(after, loop.columns)].any(axis=1)].tolist()
    # A loss that others' parameters learn from, too, is theirs where this optimizer has losses of its own.
    own = read[~np.delete(steps[read], loop.columns, axis=1).any(axis=1)]
    sites = set(case.sites[own if own.size else read].tolist())
    unused = [
        b
        for b in after
        if case.sites[b] in sites and b not in loop.lost and case.finite(b)
    ]
    if not unused or (loop.skipped.size and loop.skipped[-1] > unused[-1]):
        return []
    if case.ran_out or case.ended(case.epoch(unused[-1], loop.rank)):
        return unused
    return []


def _divided_by(case: Case, loop: Loop, left: list[int]) -> int:
    """The length of a whole window, if these are divided by it; 0 if not, or if that is not known."""
    term = next(iter(case.ledger[left[0]].terms), {})
    factor = abs(number(term.get("factor"))) if term.get("reduction") == "mean" else 0.0
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
            and micro_batches(case, p) < micro_batches(case, whole)
            and near(p.least, whole.least)
        ]
        if not weak:
            continue
        first = weak[0].order == 0 and (len(weak) == 1 or weak[1].order > 1)
        part = weak[0] if first or weak[0].order else weak[1]
        # Where a whole window has nothing else, whatever is in this one is one of as many.
        many = (
            micro_batches(case, part)
            if micro_batches(case, whole) == whole.many
            else part.many
        )
        b = part.backwards[0]
        yield case.of_part(
            "partial-window-underscaled",
            "error",
            part,
            evidence={
                "micro-batches": many,
                "in a whole window": whole.many,
                "shares": [part.least] * many,
                "sum of shares": part.least * many,
            },
            cause=(
                f"The window holds {many} micro-batch{'' if many == 1 else 'es'}, and each was divided by "
                f"{whole.many}: its step reads {part.least * many:.3g} of the mean gradient."
                + (_FIRST if first else "")
            ),
            # A library that calls backward has divided it; and it is not the division that is wrong in the first.
            cure=""
            if case.ledger[b].via or first
            else divided_by_another(
                case.ledger[b], whole.many, "micro_batches_in_this_window"
            ),
            times=len(weak),
        )


def micro_batches(case: Case, part: Part) -> int:
    """How many backwards a part's step has consumed, of whatever objective."""
    own = (
        p.backwards for p in case.parts_of[part.step] if p.optimizer == part.optimizer
    )
    return len(set().union(*own))


def outgrown(case: Case, parts: list[Part]) -> Iterator[Finding]:
    """Windows that are longer from some step on, and are divided by the length of those before it."""
    several, whole = [p for p in parts if p.many > 1], _whole(parts)
    since = next(
        (i for i, p in enumerate(several) if whole is not None and p.many > whole.many),
        0,
    )
    if whole is None or since < 2 or len(several) < since + 2:
        return
    long = several[since:]
    alike = all(
        p.even and p.many > whole.many and near(p.least, whole.least) for p in long
    )
    if not alike or any(
        restarted(case, p) or micro_batches(case, p) <= micro_batches(case, whole)
        for p in long
    ):
        return
    yield case.of_part(
        "wrong-divisor",
        "warning",
        long[0],
        evidence={
            "micro-batches": long[0].many,
            "divided by": whole.many,
            "sum of shares": long[0].total,
        },
        cause=(
            f"The windows grow from {whole.many} micro-batches to {long[0].many}, and each loss is still divided by "
            f"{whole.many}: the shares of a window add up to {long[0].total:.3g}."
        ),
        cure=divided_by_another(
            case.ledger[long[0].backwards[0]],
            whole.many,
            "micro_batches_in_this_window",
        ),
        times=len(long),
    )


def _from_its_beginning(case: Case, part: Part) -> bool:
    """Whether a first window was recorded from its beginning: a loader began before it, and nothing was in `.grad`."""
    first = part.backwards[0]
    columns = np.flatnonzero(case.contributed[first])
    alike = bool(
        near(
            case.ledger.grad[first, columns], case.ledger.contribution[first, columns]
        ).all()
    )
    return alike and any(begins < first for begins, _ in case.epochs)


def leftover_carried(case: Case) -> Iterator[Finding]:
    """What one epoch left over, consumed by the first step of the next one on top of its own."""
    for parts in case.objectives.values():
        whole = _whole(parts) or _usual(case, parts)
        over: list[tuple[Part, int]] = []
        if whole is not None:
            more = [
                p
                for p in parts
                if p.even and p.many > whole.many and near(p.least, whole.least)
            ]
            over = [
                (p, whole.many) for p in more if _crosses(case, p, whole.many, parts)
            ]
        over = over or on_top(case, parts)
        if not over:
            continue
        part, many = over[0]
        own = restarted(case, part) or part.many - many
        step = case.ledger[part.step]
        local = of_one_rank(case, part.backwards[own - 1])
        yield case.of_part(
            "leftover-carried",
            "error",
            part,
            evidence={
                "micro-batches": part.many,
                "in a whole window": many,
                "carried": own,
                "sum of shares": part.total,
            },
            cause=(
                f"{own} micro-batch{'' if own == 1 else 'es'} of the epoch before had no step: the first step of "
                f"the next one reads {part.total:.3g} times a mean gradient."
                + (UNAVERAGED if local else "")
            ),
            cure=""
            if local
            else flushed(step, many if near(part.least * many, 1.0) else 0),
            times=len(over),
        )


def _whole(parts: list[Part]) -> Part | None:
    """A window that is complete: several equal shares that add up to 1."""
    return next(
        (p for p in parts if p.many > 1 and p.even and near(p.total, 1.0)), None
    )


def on_top(case: Case, parts: list[Part]) -> list[tuple[Part, int]]:
    """The windows that end in a whole one, where all others are whole: and how many that one has.

    Each may have a divisor of its own, such as its number of tokens: what tells a whole one is that it adds up to 1.
    """
    several = [p for p in parts if p.many > 1]
    if not all(p.read and not p.again and min(p.weights) > 0 for p in several):
        return []
    whole = {p.many for p in several if near(p.total, 1.0)}
    rest = [p for p in several if not near(p.total, 1.0)]
    found = [
        (p, n)
        for p in rest
        for n in sorted(whole)
        if n < p.many and near(sum(p.weights[-n:]), 1.0)
    ]
    # The last may have been cut short by the recording's end.
    odd = {p.step for p in rest} - {p.step for p, _ in found} - {parts[-1].step}
    return [] if odd else [(p, n) for p, n in found if _crosses(case, p, n, parts)]


def _usual(case: Case, parts: list[Part]) -> Part | None:
    """Where no shares add up to 1, a window as all are that lie inside an epoch."""
    inside = [
        p
        for p in parts
        if p.many > 1 and p.even and case.has_loaders and not restarted(case, p)
    ]
    return inside[0] if len(inside) > 1 and len({p.many for p in inside}) == 1 else None


def _crosses(case: Case, part: Part, whole: int, parts: list[Part]) -> bool:
    """Whether a loader began anew inside a window; where no loader was seen, its length says it.

    Not of the first one, before which there is no epoch; nor where all are longer from some window on.
    """
    if case.has_loaders:
        return restarted(case, part) > 0
    longer = [p.many > whole for p in parts if p.many > 1]
    since = longer.index(True)
    grown = since > 1 and all(longer[since:]) and len(longer) > since + 1
    return part.order > 0 and part.many < 2 * whole and not grown


def restarted(case: Case, part: Part) -> int:
    """How many of a window's micro-batches came before a loader began anew inside it; 0 where none did."""
    first, last = part.backwards[0], part.backwards[-1]
    begun = [
        begins
        for begins, ends in case.epochs
        if first < begins < last and case.trains(begins, ends)
    ]
    return sum(b < begun[-1] for b in part.backwards) if begun else 0


def window_collapses_at_end(case: Case) -> Iterator[Finding]:
    """A step for each micro-batch in the last window of a loader.

    Windows may be made shorter on purpose from some step on: then no later one is longer, and none is divided by a
    length that it does not have.
    """
    for loop in case.loops:
        runs = list(_collapsed(case, loop))
        if not runs:
            continue
        run, many = runs[0]
        long = max(
            step for step, backwards in loop.windows.items() if len(backwards) > 1
        )
        sure = long > run[-1] or any(
            _weak(case, loop, step) for own, _ in runs for step in own
        )
        yield case.finding(
            "window-collapses-at-end",
            "error" if sure else "note",
            run[0],
            step=run[0],
            evidence={"usual window": many, "steps of one micro-batch, at events": run},
            cause=(
                f"At the end of the loader every micro-batch has a step of its own ({len(run)} of them), where a "
                f"window holds {many}."
                + (
                    ""
                    if sure
                    else " If windows are to be shorter from there on, that is meant."
                )
            ),
            times=len(runs),
            optimizer=loop.optimizer,
        )


def _collapsed(case: Case, loop: Loop) -> Iterator[tuple[list[int], int]]:
    """The steps of one micro-batch each that end an epoch, fewer than a window of it holds; and how many that are."""
    windows = [
        (step, backwards) for step, backwards in loop.windows.items() if backwards
    ]
    begun, lengths = (
        [backwards[0] for _, backwards in windows],
        [len(backwards) for _, backwards in windows],
    )
    for i, many in enumerate(lengths, 1):
        alone = (
            [*takewhile(lambda window: len(window[1]) == 1, windows[i : i + many])]
            if many > 1
            else []
        )
        if len(alone) < 2:
            continue
        epoch = case.epoch(begun[i], loop.rank)
        run = [step for step, own in alone if case.epoch(own[0], loop.rank) == epoch]
        if (
            epoch is None
            or not 1 < len(run) < many
            or not _at_the_end(case, loop, epoch, run)
        ):
            continue
        inside = lengths[int(np.searchsorted(begun, epoch[0])) : i]
        # Where they have several lengths, none is too short; but a counter may have cut the first one short.
        if inside and inside[0] <= many and set(inside[1:]) <= {many}:
            yield run, many


def _at_the_end(case: Case, loop: Loop, epoch: tuple[int, int], run: list[int]) -> bool:
    """Whether these steps are the last ones of an epoch that came to its end."""
    first, later = loop.windows[run[0]][0], loop.backwards[loop.backwards > run[-1]]
    # A loader that looks ahead ends before the last backwards.
    apart = (
        not later.size
        or first < epoch[1] < later[0]
        or case.epoch(int(later[0]), loop.rank) != epoch
    )
    return case.ended(epoch) and apart


def _weak(case: Case, loop: Loop, step: int) -> bool:
    """Whether what a step has consumed was divided by the length of a whole window, which it is not."""
    for part in case.parts_of[step]:
        whole = (
            _whole(case.objectives[part.optimizer, part.objective])
            if part.many
            else None
        )
        if (
            part.optimizer == loop.optimizer
            and whole
            and part.even
            and near(part.least, whole.least)
        ):
            return True
    return False
