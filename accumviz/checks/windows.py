"""Rules that look at windows: what was consumed, what was lost, and what each micro-batch weighed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from accumviz.checks.cures import added, divided, moved, zeroing
from accumviz.checks.evidence import Case, Loop, Part, near
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
    name = event.file or "your code"
    return (
        f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line},2 @@\n-{source}\n"
        f'+# {bare} with reduction="sum"; elements_in_window: counted over all of its micro-batches\n+{from_here}'
    )


def zero_grad_inside_window(case: Case) -> Iterator[Finding]:
    """Contributions of one window erased, again and again, before its step."""
    for loop in case.loops:
        inside, _ = _lost_inside(case, loop)
        if not inside:
            continue
        steps = sorted({step for _, _, step in inside})
        windows = [step for step, backwards in loop.windows.items() if backwards]
        if len(inside) < 2 or 2 * len(steps) < len(windows):
            continue
        _, eraser, step = inside[0]
        at, end = case.ledger[eraser], case.ledger[step]
        lost = [b for b, _, s in inside if s == step]
        kept = loop.windows[step]
        yield case.finding(
            "zero-grad-inside-window",
            "error",
            eraser,
            step=step,
            evidence={"backwards erased": lost, "backwards consumed": kept, "steps concerned": len(steps)},
            cause=(
                f"`.grad` is zeroed between the backwards of one window: {len(lost)} of {len(lost) + len(kept)} "
                "micro-batches are lost before the step sees them."
            ),
            cure=moved(at, end) if at.line != end.line else "",
            times=len(inside),
            optimizer=loop.optimizer,
        )


_Lost = list[tuple[int, int, int]]


def _lost_inside(case: Case, loop: Loop) -> tuple[_Lost, _Lost]:
    """What was erased before a step that consumed others of its call site: inside the window, and as a tail before it.

    Each as backward, what erased it, and that step.
    """
    inside: _Lost = []
    tails: _Lost = []
    steps = loop.steps
    by_step: dict[int, list[tuple[int, int]]] = {}
    for b, end in loop.lost.items():
        at = int(steps.searchsorted(b))
        if at < steps.size and end < steps[at] and case.ledger[end].kind in ("zero_grad", "edit"):
            by_step.setdefault(int(steps[at]), []).append((b, end))
    for step, lost in by_step.items():
        kept = loop.windows[step]
        sites = set(case.sites[kept].tolist()) if kept else set()
        alike = [(b, end) for b, end in lost if case.sites[b] in sites]
        if not alike:
            continue
        if case.has_loaders:
            now = case.epoch(kept[-1], loop.rank)
            for b, end in alike:
                (inside if case.epoch(b, loop.rank) == now else tails).append((b, end, step))
        else:
            # Without a loader to ask, a window that is whole without them says that they were left over.
            whole = any(near(p.total, 1.0) and p.read for p in _parts_of(case, loop, step))
            tail = whole and len(alike) < len(kept) and len({end for _, end in alike}) == 1
            (tails if tail else inside).extend((b, end, step) for b, end in alike)
    return inside, tails


def _parts_of(case: Case, loop: Loop, step: int) -> list[Part]:
    return [p for p in case.parts_of.get(step, ()) if p.optimizer == loop.optimizer and p.many]


def tail_dropped(case: Case) -> Iterator[Finding]:
    """Micro-batches at the end of a loader that no step ever consumed."""
    for loop in case.loops:
        if loop.usual < 2 or not loop.steps.size:
            continue
        _, tails = _lost_inside(case, loop)
        if case.has_loaders:
            tails = [lost for lost in tails if case.ended(case.epoch(lost[0], loop.rank))]
        groups: dict[int, list[int]] = {}
        for b, end, _ in tails:
            groups.setdefault(end, []).append(b)
        left = _left_at_the_end(case, loop)
        found = [lost for lost in groups.values() if len(lost) < loop.usual] + ([left] if left else [])
        if not found:
            continue
        yield case.finding(
            "tail-dropped",
            "warning",
            found[0][0],
            evidence={"backwards": found[0], "usual window": loop.usual, "lost in all": sum(map(len, found))},
            cause=(
                f"The loader ended after {len(found[0])} of {loop.usual} micro-batches of a window, and what they "
                "contributed was thrown away."
            ),
            cure=_flush(case, loop),
            times=len(found),
            optimizer=loop.optimizer,
        )


def _left_at_the_end(case: Case, loop: Loop) -> list[int]:
    """The backwards that are live when everything is over, where a loader or the script itself has ended."""
    after = loop.backwards[loop.backwards > loop.steps[-1]].tolist()
    sites = set(case.sites[loop.read].tolist())
    unused = [b for b in after if case.sites[b] in sites and b not in loop.lost and case.finite(b)]
    if not unused or (loop.skipped.size and loop.skipped[-1] > unused[-1]):
        return []
    if case.ran_out or case.ended(case.epoch(unused[-1], loop.rank)):
        return unused
    return []


def _flush(case: Case, loop: Loop) -> str:
    step = case.ledger[int(loop.steps[0])]
    if not step.source:
        return ""
    return added(step, "# and once more after the loop, for what is left:", step.source, zeroing(step))


def missing_zero_grad(case: Case) -> Iterator[Finding]:
    """A contribution that several steps of one optimizer consumed."""
    inside = case.events.where("within", "step")
    for loop in case.loops:
        times = Counter(loop.read.tolist())
        twice = [b for b, many in times.items() if many > 1 and not inside[b]]
        if not twice:
            continue
        first = twice[0]
        steps = loop.read_step[loop.read == first].tolist()
        step = case.ledger[steps[0]]
        yield case.finding(
            "missing-zero-grad",
            "error",
            steps[0],
            step=steps[1],
            evidence={"backward": first, "consumed by the steps": steps, "backwards read again": len(twice)},
            cause=(
                f"The contribution of backward {first} is still in `.grad` after the step that used it, and is used "
                f"by {len(steps) - 1} more."
            ),
            cure=added(step, zeroing(step)),
            times=len(twice),
            optimizer=loop.optimizer,
        )


def loss_not_divided(case: Case) -> Iterator[Finding]:
    """Every mean loss of a window at its full weight."""
    for (optimizer, _), parts in case.objectives.items():
        whole = [p for p in parts if p.many > 1]
        if not whole or not all(_undivided(p) for p in whole):
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
    bare = event.label.split(" / ")[0].strip("(")
    if not bare or " / " not in event.source or event.label not in event.source:
        return divided(event, "micro_batches_in_this_window")
    source = event.source.replace(event.label, f"{bare} / micro_batches_in_this_window", 1)
    name = event.file or "your code"
    return f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line} @@\n-{event.source}\n+{source}"


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
            cure=added(step, "# and once more when the loader has ended:", step.source, zeroing(step)),
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
    return any(first < begins < last for begins, _ in case.epochs)


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
    source = event.source.replace(f"({event.label})", bare, 1).replace(event.label, bare, 1)
    if source == event.source:
        return ""
    name = event.file or "your code"
    return f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line} @@\n-{event.source}\n+{source}"


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
            evidence={"usual window": loop.usual, "steps of one micro-batch": [step for step, _ in run]},
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
    later = loop.backwards[loop.backwards > run[-1][0]]
    following = int(later[0]) if later.size else len(case.events)
    # A loader that looks one batch ahead ends before the last backward.
    return run[0][1][0] < epoch[1] < following or case.epoch(following, loop.rank) != epoch


def zero_before_step(case: Case) -> Iterator[Finding]:
    """A step that finds nothing, because what came before it was zeroed."""
    for loop in case.loops:
        found: list[tuple[int, int, list[int]]] = []
        for step, consumed in loop.windows.items():
            if consumed:
                continue
            at = int(loop.steps.searchsorted(step))
            since = int(loop.steps[at - 1]) if at else -1
            lost = [(b, end) for b, end in loop.lost.items() if since < b < step and end < step]
            if lost:
                found.append((step, lost[-1][1], [b for b, _ in lost]))
        if not found:
            continue
        step, eraser, backwards = found[0]
        yield case.finding(
            "zero-before-step",
            "error",
            eraser,
            step=step,
            evidence={"backwards erased": backwards, "steps that found nothing": len(found)},
            cause="`.grad` is zeroed between the backward and the step: the step finds nothing to apply.",
            cure=moved(case.ledger[eraser], case.ledger[step]),
            times=len(found),
            optimizer=loop.optimizer,
        )
