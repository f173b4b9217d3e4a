"""Rules that look at windows: what a step consumed, what was lost before it, what it consumed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np

from accumviz.checks.analysis import Case, Loop, Part, near
from accumviz.checks.cures import added, inserted, moved, removed, zeroing
from accumviz.checks.multi_model import cleared, leaked
from accumviz.checks.report import Finding
from accumviz.checks.ways import Way, alone
from accumviz.ledger.events import PRESENT, Event
from accumviz.ledger.gains import SAME, SAME_IN_HALF
from accumviz.ledger.ledger import Ledger


def zero_grad_inside_window(case: Case) -> Iterator[Finding]:
    """Contributions of one window erased, again and again, before its step."""
    for loop in case.loops:
        inside, _ = lost_inside(case, loop)
        if not inside:
            continue
        steps = sorted({step for _, _, step in inside})
        windows = [step for step, backwards in loop.windows.items() if backwards]
        if len(inside) < 2 or 2 * len(steps) < len(windows):
            continue
        _, eraser, step = inside[0]
        lost = [b for b, _, s in inside if s == step]
        kept = loop.windows[step]
        together = _steps_of_what(case, loop, eraser, step)
        way = alone(
            *(case.ledger[e] for e in (eraser, together[-1], lost[0], kept[-1]))
        )
        yield case.finding(
            "zero-grad-inside-window",
            "error",
            eraser,
            step=step,
            evidence={
                "backwards erased": lost,
                "backwards consumed": kept,
                "steps concerned": len(steps),
            },
            cause=(
                f"`.grad` is zeroed between the backwards of one window: {len(lost)} of {len(lost) + len(kept)} "
                "micro-batches are lost before the step sees them."
            ),
            cure=_zeroed_after(case, loop, way, together),
            times=len(inside),
            optimizer=loop.optimizer,
            at=way.at,
        )


def _steps_of_what(case: Case, loop: Loop, eraser: int, step: int) -> list[int]:
    """This step and those behind it, until the next backward, of every optimizer for which this event zeroed."""
    backwards = loop.within(np.flatnonzero(case.backward), step, len(case.events))
    stop = int(backwards[0]) if backwards.size else len(case.events)
    others = [
        each
        for each in case.loops
        if each.rank == loop.rank and each.changed_by(eraser)
    ]
    return [
        step,
        *sorted(
            int(end) for each in others for end in loop.within(each.steps, step, stop)
        ),
    ]


def _zeroed_after(case: Case, loop: Loop, way: Way, steps: list[int]) -> str:
    """The cure that zeroes after these steps, and not where it is done now."""
    if way.at.line == way.step.line and way.at.file == way.step.file:
        return ""
    if (way.at.file, way.at.line) in [frame[:2] for frame in way.at.frames[2:]]:
        return ""  # what stands between may call others as well, as what runs all callbacks does
    if _zeroed_anyway(case, loop, way.at):
        return removed(way.at)
    if not set(case.sites[list(loop.lost_here)].tolist()) <= set(
        case.sites[loop.read].tolist()
    ):
        return ""  # of others' losses, which come below the step: it has to be zeroed of them as well
    lines = {(case.ledger[step].file, case.ledger[step].line) for step in steps}
    if len(steps) > 1 and (len(lines) < len(steps) or not way.together):
        return ""  # below a line that steps for each of them in turn, the next one would find nothing
    return moved(way.at, way.step, "" if way.together else zeroing(way.step))


def _zeroed_anyway(case: Case, loop: Loop, at: Event) -> bool:
    """Whether what each step leaves in `.grad` is zeroed before the next backward on another way than this line's."""
    apart: dict[int, bool] = {}

    def elsewhere(event: int) -> bool:
        site = int(case.sites[event])
        if site not in apart:
            zero = case.ledger[event]
            apart[site] = (at.file, at.line) not in [
                (zero.file, zero.line),
                *(frame[:2] for frame in zero.frames),
            ]
        return apart[site]

    def ends(of: Loop, backwards: list[int]) -> list[int]:
        here = np.ix_(np.array(backwards, int), of.columns)
        found: list[int] = np.unique(case.erased[here][case.contributed[here]]).tolist()
        return found

    others = [
        other for other in case.loops if other.rank == loop.rank and other is not loop
    ]
    for other in others:  # one line may zero for several
        if any(
            end >= 0 and not elsewhere(end) for end in ends(other, other.read.tolist())
        ):
            return False
    zeros, steps = case.at("zero_grad"), 0
    for step, consumed in loop.windows.items():
        after = loop.backwards[loop.backwards.searchsorted(step) :][:1]
        if not after.size:
            continue
        if consumed:
            zeroed = all(
                0 <= end < after[0] and elsewhere(end) for end in ends(loop, consumed)
            )
        else:  # nothing is left that one could see erased
            following = loop.within(zeros, step, int(after[0])).tolist()
            zeroed = any(case.ledger[zero].label == loop.name for zero in following)
        if not zeroed:
            return False
        steps += 1
    return steps > 0


_Lost = list[tuple[int, int, int]]


def lost_inside(case: Case, loop: Loop) -> tuple[_Lost, _Lost]:
    """What was erased before a step that consumed others of its call site: inside the window, and as a tail before it.

    Each as backward, what erased it, and that step.
    """
    inside: _Lost = []
    tails: _Lost = []
    steps, inside_step = loop.steps, case.events.where("within", "step")
    by_step: dict[int, list[tuple[int, int]]] = {}
    written = _written(case, loop)
    for b, end in (*loop.lost.items(), *_apart(case, loop)):
        at = int(steps.searchsorted(b))
        if _moved_by(case, loop, b, end) or (
            at < steps.size and loop.within(written, b, int(steps[at])).size
        ):
            continue
        if (
            at < steps.size
            and end < steps[at]
            and case.ledger[end].kind in ("zero_grad", "edit")
        ):
            by_step.setdefault(int(steps[at]), []).append((b, end))
    for step, lost in by_step.items():
        kept = loop.windows[step]
        sites = set(case.sites[kept].tolist()) if kept else set()
        alike = [(b, end) for b, end in lost if case.sites[b] in sites]
        if kept and inside_step[kept[-1]] and not alike:
            # The last closure of a window runs inside the step, the others before it: one line, reached in two ways.
            lines = set(case.lines[kept].tolist())
            alike = [
                (b, end)
                for b, end in lost
                if case.lines[b] in lines and not inside_step[b]
            ]
        if not alike:
            continue
        if case.has_loaders:
            now = case.epoch(kept[-1], loop.rank)
            for b, end in alike:
                (inside if case.epoch(b, loop.rank) == now else tails).append(
                    (b, end, step)
                )
        else:
            # Without a loader to ask, a window that is whole without them says that they were left over.
            whole = any(
                near(p.total, 1.0) and p.read for p in _parts_of(case, loop, step)
            )
            tail = (
                whole and len(alike) < len(kept) and len({end for _, end in alike}) == 1
            )
            (tails if tail else inside).extend((b, end, step) for b, end in alike)
    return inside, tails


def _written(case: Case, loop: Loop) -> np.ndarray:
    """The edits by which a hand put gradients there that it had kept elsewhere: what was erased may be among them."""
    found: list[int] = []
    ledger, edits = (
        case.ledger,
        loop.changing(
            case.at("edit") if loop.lost or loop.lost_here else np.zeros(0, int)
        ),
    )
    for e in edits[edits > 0].tolist():
        columns = loop.columns[(ledger.state[e, loop.columns] & PRESENT) > 0]
        before, after = (
            ledger.grad[e - 1, columns].astype(float),
            ledger.grad[e, columns].astype(float),
        )
        before, after = np.nan_to_num(before[after > 0]), after[after > 0]
        one = (
            before.all()
            and after.size
            and near(after / before, after[0] / before[0], SAME_IN_HALF).all()
        )
        if not one and ((after > before).any() or not _shortens(ledger, e, columns)):
            found.append(e)
    return np.array(found, int)


def _shortens(ledger: Ledger, edit: int, columns: np.ndarray) -> bool:
    """Whether a change by hand is a clip, of each parameter by itself, as far as its elements are kept."""
    for p in (p for p in columns.tolist() if p in ledger.exact):
        before, after = ledger.exact[p][1][edit - 1], ledger.exact[p][1][edit]
        along = float(before @ after) / (
            float(np.linalg.norm(before) * np.linalg.norm(after)) or 1.0
        )
        if not near(along, 1.0, SAME) and after.any():
            return False
    return any(p in ledger.exact for p in columns.tolist())


def _moved_by(case: Case, loop: Loop, backward: int, erased: int) -> bool:
    """Whether the weights were moved by hand before the next backward, so that this one has told where to (SAM).

    Where they are moved before each window, too, that is for another reason.
    """
    at = int(loop.steps.searchsorted(backward))
    first = loop.backwards[
        loop.backwards.searchsorted(loop.steps[at - 1] if at else -1)
    ]
    later = loop.backwards[loop.backwards.searchsorted(erased) :]
    return bool(
        later.size
        and case.moved[later[0]]
        and not case.moved[first]
        and 0 in loop.columns
    )


def _apart(case: Case, loop: Loop) -> Iterator[tuple[int, int]]:
    """What was erased here before a step, where another optimizer's step consumed it with what this one consumed.

    Whoever trains two networks in turns on one loss means to lose it; nobody accumulates it for one of them only.
    """
    if not loop.lost_here:
        return
    together = [
        {*found}
        for other in case.loops
        if other is not loop
        for found in other.windows.values()
    ]
    for b, end in loop.lost_here.items():
        at = int(loop.steps.searchsorted(b))
        kept = loop.windows[int(loop.steps[at])] if at < loop.steps.size else []
        if kept and any(b in found and kept[-1] in found for found in together):
            yield b, end


def _parts_of(case: Case, loop: Loop, step: int) -> list[Part]:
    return [
        p
        for p in case.parts_of.get(step, ())
        if p.optimizer == loop.optimizer and p.many
    ]


def missing_zero_grad(case: Case) -> Iterator[Finding]:
    """A contribution that several steps of one optimizer consumed."""
    inside = case.events.where("within", "step")
    for loop in case.loops:
        times = Counter(loop.read.tolist())
        twice = [b for b, many in times.items() if many > 1]
        if not twice:
            continue
        first = twice[0]
        steps = loop.read_step[loop.read == first].tolist()
        step, closure = case.ledger[steps[0]], bool(inside[twice].any())
        kept = _momentum(case, loop, twice)
        if kept:
            yield case.finding(
                "missing-zero-grad",
                "note",
                steps[0],
                step=steps[1],
                evidence={
                    "kept of each `.grad`": kept,
                    "backwards read again": len(twice),
                },
                cause=(
                    f"`.grad` is not zeroed: after each step {kept:.3g} of it is kept, as momentum keeps it. If that "
                    "is meant, nothing is wrong."
                ),
                times=len(twice),
                optimizer=loop.optimizer,
            )
            continue
        yield case.finding(
            "missing-zero-grad",
            "error",
            steps[0],
            step=steps[1],
            evidence={
                "backward": first,
                "consumed by the steps at events": steps,
                "backwards read again": len(twice),
            },
            cause=(
                f"The contribution of backward {first} is still in `.grad` after the step that used it, and is used "
                f"by {len(steps) - 1} more."
                + (
                    " The step calls a closure: it has to zero before its first backward."
                    if closure
                    else ""
                )
            ),
            # A step may call its closure several times, of which no line here is sure to be the first.
            cure="" if closure else _zeroed_below(case, loop, step),
            times=len(twice),
            optimizer=loop.optimizer,
        )


def _zeroed_below(case: Case, loop: Loop, step: Event) -> str:
    """The cure that zeroes below a step; before the next window, where another one's losses may come until then."""
    leaks = leaked(case, loop)
    return cleared(case, loop, leaks) if leaks else added(step, zeroing(step))


def _momentum(case: Case, loop: Loop, twice: list[int]) -> float:
    """The part of `.grad` that is kept by hand from each step to the next, and of what is new nothing less; or 0."""
    s = case.shares
    rows = np.flatnonzero(
        (s.optimizer == loop.optimizer)
        & np.isin(s.backward, twice)
        & ~s.erased
        & s.followed
    )
    rows = rows[np.lexsort((s.step[rows], s.backward[rows]))]
    factors, again = s.by_hand[rows], np.diff(s.backward[rows], prepend=-1) == 0
    if not again.any() or not np.all(near(factors[~again], 1.0)):
        return 0.0
    ratios = factors[again] / factors[np.flatnonzero(again) - 1]
    return (
        float(ratios[0])
        if 0 < ratios[0] < 1 and np.all(near(ratios, ratios[0]))
        else 0.0
    )


def ascent_gradient_kept(case: Case) -> Iterator[Finding]:
    """Backwards between which the weights were moved by hand, as SAM does, and the step takes all of them.

    Of each place undivided, in every window. Where a half of each is taken, somebody means both; and where one layer
    was moved alone, against which a model learns to hold.
    """
    moved = case.events.detail("last_moved", default=False)
    for loop in case.loops:
        windows = [
            (step, _places(case, backwards, moved))
            for step, backwards in loop.windows.items()
            if backwards
        ]
        # It is the first parameter's weights that were looked at, and the last one's.
        if (
            len(windows) < 2
            or 0 not in loop.columns
            or not all(
                len(own) > 1 and case.contributed[list(chain(*own)), 0].all()
                for _, own in windows
            )
            or not all(
                _alike(case, _parts_of(case, loop, step), own) for step, own in windows
            )
        ):
            continue
        step, own = windows[0]
        backwards, firsts = list(chain(*own)), [case.ledger[place[0]] for place in own]
        at, end = firsts[1], case.ledger[step]
        lines = {(event.file, event.line) for event in firsts}
        # What steps in a method of its own has another name here; what a place has more of is zeroed with each of it.
        named = "self." in at.source or "self." not in end.source
        apart = named and len(lines) == len(backwards)
        last = (
            "the first one, which" if len(own) == 2 else "those before the last, which"
        )
        yield case.finding(
            "ascent-gradient-kept",
            "warning",
            at.index,
            step=step,
            evidence={"backwards": backwards, "windows": len(windows)},
            cause=(
                f"Between backwards {own[0][-1]} and {at.index} the weights were moved by hand"
                f"{f', and {len(own) - 1} times in all' * (len(own) > 2)}, and the step takes the gradients of "
                f"{'both' if len(own) == 2 else 'all'} places: {last} told where to move them, "
                f"{'is' if len(own) == 2 else 'are'} still in `.grad`."
            ),
            cure="\n".join(inserted(event, zeroing(end)) for event in firsts[1:])
            if apart
            else "",
            times=len(windows),
            optimizer=loop.optimizer,
        )


def _places(case: Case, backwards: list[int], moved: np.ndarray) -> list[list[int]]:
    """A window's backwards by where the weights were; none where they were moved before the first one."""
    found: list[list[int]] = [] if case.moved[backwards[0]] else [[]]
    for b in backwards if found else ():
        found += [[]] * bool(moved[b])
        found[-1] = [*found[-1], b]
    return found


def _alike(case: Case, parts: list[Part], places: list[list[int]]) -> bool:
    """Whether what a step consumed are the same losses at each of these places, and no parts of a mean."""
    sums: list[dict[int, float]] = [{} for _ in places]
    for part in parts:
        for b, weight in zip(part.backwards, part.weights, strict=True):
            place = next(i for i, own in enumerate(places) if b in own)
            sums[place][part.objective] = sums[place].get(part.objective, 0.0) + weight
    first, *others = (sorted(own.values()) for own in sums)
    same = all(
        len(own) == len(first) and bool(near(own, first).all()) for own in others
    )
    return (
        same
        and all(part.read and part.mean for part in parts)
        and bool(near(max(first), 1.0))
    )


def zero_before_step(case: Case) -> Iterator[Finding]:
    """A step that finds nothing, because what came before it was zeroed."""
    for loop in case.loops:
        found: list[tuple[int, int, list[int]]] = []
        written = _written(case, loop)
        # What another optimizer used its part of may be kept from this one on purpose, for a while, but not for ever.
        never = not any(loop.windows.values())
        erased = sorted((loop.lost | (loop.lost_here if never else {})).items())
        for step, consumed in loop.windows.items():
            if consumed:
                continue
            at = int(loop.steps.searchsorted(step))
            since = int(loop.steps[at - 1]) if at else -1
            lost = [(b, end) for b, end in erased if since < b < step and end < step]
            # What FSDP has scattered to a group of ranks waits for other groups: nobody zeroed it.
            lost = [
                (b, end)
                for b, end in lost
                if case.ledger[end].kind in ("zero_grad", "edit")
            ]
            if lost and not loop.within(written, lost[0][0], step).size:
                found.append((step, lost[-1][1], [b for b, _ in lost]))
        if not found:
            continue
        step, eraser, backwards = found[0]
        together = _steps_of_what(case, loop, eraser, step)
        way = alone(*(case.ledger[e] for e in (eraser, together[-1], backwards[0])))
        yield case.finding(
            "zero-before-step",
            "error",
            eraser,
            step=step,
            evidence={
                "backwards erased": backwards,
                "steps that found nothing": len(found),
            },
            cause="`.grad` is zeroed between the backward and the step: the step finds nothing to apply.",
            cure=_zeroed_after(case, loop, way, together),
            times=len(found),
            optimizer=loop.optimizer,
            at=way.at,
        )
