"""Rules that look at the order of events: clips and schedulers that stand where they should not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from accumviz.checks.analysis import Case, Loop, Part, near, reduces
from accumviz.checks.cures import before, moved
from accumviz.checks.report import Finding
from accumviz.checks.ways import alone
from accumviz.ledger.events import Event
from accumviz.ledger.gains import SAME, SAME_IN_HALF, number


def clip_per_micro_batch(case: Case) -> Iterator[Finding]:
    """A clip between the backwards of one window, which shortens what is there already."""
    clips = case.at("clip")
    for loop in case.loops if clips.size else ():
        found: list[tuple[int, int, float]] = []
        for step, backwards in loop.windows.items():
            at = int(loop.steps.searchsorted(step))
            since = (
                max(backwards[0], int(loop.steps[at - 1]) if at else -1)
                if backwards
                else step
            )
            between = (
                loop.within(clips, since, backwards[-1])
                if len(backwards) > 1
                else clips[:0]
            )
            cut = [(int(e), reduces(case, loop, int(e))) for e in between]
            found += [(e, step, factor) for e, factor in cut if factor < 1 - SAME]
        if not found:
            continue
        clip, step, _ = found[0]
        way = alone(
            *(
                case.ledger[e]
                for e in (clip, step, loop.windows[step][0], loop.windows[step][-1])
            )
        )
        rows = case.shares.of(step)
        rows = rows.take((rows.optimizer == loop.optimizer) & ~rows.erased)
        yield case.finding(
            "clip-per-micro-batch",
            "error",
            clip,
            step=step,
            evidence={
                "clips between them multiply by": [
                    factor for _, own, factor in found if own == step
                ],
                "left of each backward": rows.clipped.tolist(),
            },
            cause=(
                "The sum is clipped after each backward, so that what came early is shortened again and again, and the "
                "last micro-batch counts most."
            ),
            cure=before(way.at, way.step),
            times=len(found),
            optimizer=loop.optimizer,
            at=way.at,
        )
    for windows in case.shortened.values():
        yield from _shortened_by_hand(case, windows)


def _shortened_by_hand(
    case: Case, found: list[tuple[Part, list[float]]]
) -> Iterator[Finding]:
    """Likewise, by code of the user's own: by another factor each time, so that it is no decay that is meant."""
    ratios = [ratio for _, own in found for ratio in own]
    if max(ratios) < 1 + SAME_IN_HALF or near(min(ratios), max(ratios), SAME_IN_HALF):
        return
    part, _ = next((part, own) for part, own in found if max(own) > 1 + SAME)
    yield case.of_part(
        "clip-per-micro-batch",
        "error",
        part,
        evidence={"shares": list(part.weights), "sum of shares": part.total},
        cause=(
            "`.grad` is shortened by hand after each backward, so that what came early is shortened again and again, "
            "and the last micro-batch counts most."
        ),
        times=len(found),
    )


def clip_on_the_wrong_side(case: Case) -> Iterator[Finding]:
    """A clip of gradients that the step has already read."""
    found: dict[int, list[int]] = {}
    owners: dict[int, Loop] = {}
    clips = [
        clip
        for clip in case.at("clip").tolist()
        if any(_used_up(loop, clip) for loop in case.loops)
    ]
    for clip in clips:
        event = case.ledger[clip]
        if event.details.get("by") != "value" and not math.isfinite(
            number(event.details.get("max_norm", 0.0))
        ):
            continue  # a clip to infinity measures, and changes nothing
        here = [
            loop for loop in case.loops if loop.rank == event.rank or event.rank is None
        ]
        concerned = [loop for loop in here if loop.changed_by(clip)]
        if concerned:
            late = [loop for loop in concerned if _used_up(loop, clip)]
        else:
            # It found no gradient at all: then nobody's may be there.
            late = here if here and all(_used_up(loop, clip) for loop in here) else []
        if late and len(late) == len(concerned or here):
            owners.setdefault(late[0].optimizer, late[0])
            found.setdefault(late[0].optimizer, []).append(clip)
    for optimizer, clips in found.items():
        loop, clip = owners[optimizer], clips[0]
        step = int(loop.steps[loop.steps < clip][-1])
        way = alone(
            *(
                case.ledger[e]
                for e in (
                    clip,
                    step,
                    *loop.backwards[loop.backwards < step][-1:].tolist(),
                )
            )
        )
        yield case.finding(
            "clip-on-the-wrong-side",
            "error",
            clip,
            step=step,
            evidence={
                "event of the step": step,
                "event of the clip": clip,
                "backwards between them": 0,
            },
            cause="The clip comes after the step, which has read the gradients as they were: it has no effect.",
            cure=before(way.at, way.step),
            times=len(clips),
            optimizer=optimizer,
            at=way.at,
        )
    yield from _clipped_apart(case)


def _clipped_apart(case: Case) -> Iterator[Finding]:
    """A clip of what one rank has, before the gradients of all ranks are reduced by hand."""
    reduced = np.flatnonzero(
        np.isin(case.events.detail("reduction", "").astype(str), ("sum", "avg"))
    )
    for loop in case.loops if reduced.size else ():
        found = []
        for clip in loop.changing(case.at("clip")).tolist():
            following = [
                int(at[at > clip].min(initial=len(case.ledger)))
                for at in (loop.steps, loop.backwards)
            ]
            after = loop.changing(
                reduced[(reduced > clip) & (reduced < min(following))]
            )
            if after.size and reduces(case, loop, clip) < 1 - SAME:
                found.append((clip, following[0], int(after[0])))
        for clip, step, sync in found[:1]:
            yield case.finding(
                "clip-on-the-wrong-side",
                "warning",
                clip,
                step=step if step < len(case.ledger) else None,
                evidence={"event of the clip": clip, "event of the all-reduce": sync},
                cause=(
                    "The clip comes before the gradients are reduced over the ranks: each rank has shortened its own "
                    "by another factor, and what the step reads was not clipped as a whole."
                ),
                times=len(found),
                optimizer=loop.optimizer,
            )


def _used_up(loop: Loop, event: int) -> bool:
    """Whether nothing has been contributed since this optimizer's last step."""
    before = int(loop.steps.searchsorted(event))
    if not before:
        return False
    since = int(loop.steps[before - 1])
    return bool(
        loop.backwards.searchsorted(since) == loop.backwards.searchsorted(event)
    )


def averaged_after_the_step(case: Case) -> Iterator[Finding]:
    """Gradients that are averaged over the ranks when every step has read them already."""
    syncs = case.at("sync")
    for loop in case.loops if syncs.size and case.ledger.meta.get("ranks") != 1 else ():
        mine = loop.changing(syncs).tolist()
        late = {
            int(loop.steps[loop.steps < e][-1]): e
            for e in reversed(mine)
            if _used_up(loop, e)
        }
        windows = [step for step, backwards in loop.windows.items() if backwards]
        steps = [step for step in windows if step in late]
        # What is not zeroed afterwards is read by the next step, and after the last one nothing may be left to do.
        kept = len(set(loop.read.tolist())) < loop.read.size
        if (
            len(steps) < 2
            or kept
            or set(windows[:-1]) - set(steps)
            or not all(_used_up(loop, e) for e in mine)
        ):
            continue
        step, sync = steps[0], late[steps[0]]
        way = alone(*(case.ledger[e] for e in (sync, step, loop.windows[step][-1])))
        yield case.finding(
            "ddp-unsynced-step",
            "error",
            sync,
            step=step,
            evidence={
                "event of the step": step,
                "event of the collective": sync,
                "backwards between them": 0,
            },
            cause=(
                "The gradients are averaged over the ranks after the step, which has read what each rank had for "
                "itself: it has no effect."
            ),
            cure=before(way.at, way.step),
            times=len(steps),
            optimizer=loop.optimizer,
            at=way.at,
        )


def scheduler_per_micro_batch(case: Case) -> Iterator[Finding]:
    """A learning-rate scheduler that steps with each backward, where the optimizer steps with each window."""
    schedules = case.at("schedule")
    for loop in case.loops:
        mine = schedules[case.optimizer_of[schedules] == loop.optimizer]
        windows = {step: b for step, b in loop.windows.items() if len(b) > 1}
        if not mine.size or not windows:
            continue
        hit = []
        for step, backwards in windows.items():
            gaps = [loop.within(mine, a, b).size for a, b in pairwise(backwards)]
            if all(gaps):
                hit.append(step)
        rates = [_rate(case.ledger[e].details.get("lr")) for e in mine.tolist()]
        # OneCycleLR takes one step more than it has rates for.
        if 2 * len(hit) <= len(windows) or _arrives(rates) or _arrives(rates[:-1]):
            continue
        first = int(mine[mine > windows[hit[0]][0]][0])
        if _is_told_where(case.ledger[first]):
            continue
        way = alone(*(case.ledger[e] for e in (first, hit[0], *windows[hit[0]][:1])))
        yield case.finding(
            "scheduler-per-micro-batch",
            "error",
            first,
            step=hit[0],
            evidence={
                "scheduler steps": int(mine.size),
                "optimizer steps": int(loop.steps.size),
                "backwards": int(loop.backwards.size),
                "learning rates": rates[:8],
            },
            cause=(
                f"The scheduler steps with every micro-batch, {mine.size} times for {loop.steps.size} optimizer steps: "
                "the learning rate changes that much too fast."
            ),
            cure=moved(way.at, way.step),
            times=len(hit),
            optimizer=loop.optimizer,
            at=way.at,
        )


def _rate(rates: Any) -> float:
    """The first group's learning rate."""
    return number(rates[0]) if isinstance(rates, list | tuple) and rates else math.nan


def _arrives(rates: list[float]) -> bool:
    """Whether a schedule comes to almost nothing with its last step: then it was made for as many.

    What falls by the same ratio each time comes to nothing at any time.

    >>> _arrives([0.1, 0.2, 0.15, 0.1, 0.05, 0.0]), _arrives([0.1, 0.01, 0.001, 0.0001])
    (True, False)
    """
    highest = max(rates, default=0.0)
    fall = rates[-1 - rates[::-1].index(highest) :] if highest in rates else []
    falls = len(fall) > 2 and all(later < early for early, later in pairwise(fall))
    middle = fall[len(fall) // 2] if falls else 0.0
    return (
        falls and fall[-1] < 0.01 * highest and middle * middle > 4 * highest * fall[-1]
    )


def _is_told_where(event: Event) -> bool:
    """Whether a scheduler was told where it is, as in `step(epoch + i / n)`, so that its steps do not count."""
    told = re.search(rf"{re.escape(event.label)}\.step\(\s*[^\s)#]", event.source)
    return told is not None and event.details.get("scheduler") != "ReduceLROnPlateau"
