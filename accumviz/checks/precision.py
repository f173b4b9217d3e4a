"""Rules that look at precision: the gradient scaler, numbers that are none, sums that lose what is added."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from accumviz.checks.analysis import Case, Loop, near, reduces
from accumviz.checks.cures import before, guarded, inserted, taken_over
from accumviz.checks.report import Finding
from accumviz.checks.ways import alone
from accumviz.ledger.events import CONTRIBUTED
from accumviz.ledger.gains import SAME, SAME_IN_HALF, number


def _scaled(case: Case, loop: Loop) -> np.ndarray:
    """This optimizer's backwards whose loss the scaler had multiplied by something else than 1."""
    found: np.ndarray = loop.backwards[
        case.events.detail("amp_scale", 1.0)[loop.backwards] != 1
    ]
    return found


def clip_scaled_grads(case: Case) -> Iterator[Finding]:
    """A clip of gradients that the scaler has not unscaled yet."""
    clips, unscales, edits = case.at("clip"), case.at("unscale"), case.at("edit")
    for loop in case.loops:
        scaled = _scaled(case, loop)
        ends = np.sort(np.concatenate([loop.steps, loop.skipped]))
        found: list[tuple[int, int]] = []
        for clip in clips.tolist() if scaled.size else ():
            at = int(ends.searchsorted(clip))
            since = int(ends[at - 1]) if at else -1
            there = scaled[(scaled > since) & (scaled < clip)]
            unscaled = loop.changing(loop.within(unscales, since, clip)).size
            if (
                not there.size
                or unscaled
                or not loop.changed_by(clip)
                or reduces(case, loop, clip) >= 1 - SAME
            ):
                continue
            # A limit may be as many times larger; or it was a hand that unscaled.
            if "get_scale" in case.ledger[clip].source or _divided(
                case, loop, edits, int(there[-1]), clip
            ):
                continue
            found.append((clip, int(ends[at]) if at < ends.size else -1))
        if not found:
            continue
        clip, step = found[0]
        event = case.ledger[clip]
        scale = float(case.events.detail("amp_scale", 1.0)[scaled[scaled < clip][-1]])
        step_line = case.ledger[step] if step >= 0 else None
        found_line = (
            re.search(r"([\w.]+)\.step\(\s*([\w.]+)", step_line.source)
            if step_line
            else None
        )
        line = (
            f"{found_line[1]}.unscale_({found_line[2]})"
            if found_line
            else "scaler.unscale_(optimizer)"
        )
        # What is clipped more than once in a window cannot be unscaled each time.
        once = (
            sum(end == step and case.sites[c] == case.sites[clip] for c, end in found)
            == 1
        )
        yield case.finding(
            "clip-scaled-grads",
            "error",
            clip,
            step=step if step >= 0 else None,
            evidence={
                "scale": scale,
                "max_norm": event.details.get(
                    "max_norm", event.details.get("clip_value", "?")
                ),
                "the clip multiplies by": reduces(case, loop, clip),
            },
            cause=(
                f"The clip sees gradients that are still multiplied by {scale:g}; after the division, next to nothing "
                "is left."
            ),
            cure=inserted(event, line) if once else "",
            times=len(found),
            optimizer=loop.optimizer,
        )


def _divided(case: Case, loop: Loop, edits: np.ndarray, scaled: int, clip: int) -> bool:
    """Whether a hand has divided by the scale, between a backward and a clip."""
    scale = number(case.ledger[scaled].details.get("amp_scale"))
    between = loop.changing(loop.within(edits, scaled, clip)).tolist()
    return any(
        near(reduces(case, loop, edit) * scale, 1.0, SAME_IN_HALF) for edit in between
    )


def backward_after_unscale(case: Case) -> Iterator[Finding]:
    """A scaled contribution added to a sum that is unscaled already."""
    unscales = case.at("unscale")
    for loop in case.loops:
        scaled = set(_scaled(case, loop).tolist())
        found: list[tuple[int, list[int], int]] = []
        before_it = -1
        for step, backwards in loop.windows.items() if scaled else ():
            # What an earlier step has unscaled and left is another mistake.
            begins, before_it = max([*backwards[:1], before_it]), step
            if len(backwards) < 2:
                continue
            mine = [
                e
                for e in loop.within(unscales, begins, step).tolist()
                if loop.changed_by(e)
            ]
            late = [b for b in backwards if mine and b > mine[0] and b in scaled]
            if late:
                found.append((late[0], mine, step))
        if not found:
            continue
        b, (unscale, *again), step = found[0]
        scale = number(case.ledger[b].details.get("amp_scale"))
        way = alone(*(case.ledger[e] for e in (unscale, step, b)))
        yield case.finding(
            "backward-after-unscale",
            "error",
            unscale,
            step=step,
            evidence={
                "event of the unscale": unscale,
                "event of the backward after it": b,
                "scale": scale,
            },
            cause=(
                f"Backward {b} comes after `unscale_`: its contribution enters the step {scale:g} times as large as "
                "those before it"
                + (
                    ", which are divided again with it. Once, before the step, is enough."
                    if again
                    else "."
                )
            ),
            # An `update` that stands between two of them belongs to the step as well.
            cure="" if again else before(way.at, way.step),
            times=len(found),
            optimizer=loop.optimizer,
            at=way.at,
        )


def bypass_scaler_step(case: Case) -> Iterator[Finding]:
    """A step outside the scaler, on gradients that it has multiplied."""
    unscales = case.at("unscale")
    for loop in case.loops:
        scaled = _scaled(case, loop)
        if not scaled.size:
            continue
        found = []
        for step, backwards in loop.windows.items():
            event = case.ledger[step]
            # `scaler.step(optimizer)`: an optimizer that is handed over may do the division itself. A fused one did.
            handed = re.search(r"\.step\(\s*(?!closure\b)[A-Za-z_]", event.source)
            if (
                not backwards
                or not event.source
                or handed
                or "amp_scale" in event.details
            ):
                continue
            if any(
                loop.changed_by(e)
                for e in loop.within(unscales, backwards[0], step).tolist()
            ):
                continue
            # Of what a hand has divided by the scale, it is known what became of it.
            if (
                np.isin(backwards, scaled).any()
                and case.shares.of(step).lost_sight.any()
            ):
                found.append((step, backwards[0]))
        if not found:
            continue
        step, b = found[0]
        event = case.ledger[step]
        scale = number(case.ledger[b].details.get("amp_scale"))
        scalers = case.scripts.called_on("scale", case.ledger[b].file)
        scaler = scalers.pop() if len(scalers) == 1 else "scaler"
        yield case.finding(
            "bypass-scaler-step",
            "error",
            step,
            step=step,
            evidence={"scale": scale, "steps": len(found)},
            cause=f"The optimizer steps by itself, on gradients that are still {scale:g} times too large.",
            cure=taken_over(
                event,
                scaler,
                updated=scaler in case.scripts.called_on("update", event.file),
            ),
            times=len(found),
            optimizer=loop.optimizer,
        )


def scheduler_on_skipped_step(case: Case) -> Iterator[Finding]:
    """A scheduler that steps although the optimizer's step was skipped."""
    schedules = case.at("schedule")
    for loop in case.loops:
        mine = schedules[case.optimizer_of[schedules] == loop.optimizer]
        # One that steps once an epoch meets a skipped step by chance.
        if not mine.size or 2 * mine.size < loop.steps.size:
            continue
        found = []
        for skip in loop.skipped.tolist():
            later = loop.backwards[loop.backwards > skip]
            until = int(later[0]) if later.size else len(case.events)
            after = loop.within(mine, skip, until)
            if after.size:
                found.append((int(after[0]), skip))
        if not found:
            continue
        at, skip = found[0]
        way = alone(case.ledger[at], case.ledger[skip])
        yield case.finding(
            "scheduler-on-skipped-step",
            "warning",
            at,
            step=skip,
            evidence={"skipped steps, at events": [skip for _, skip in found]},
            cause="The scaler skipped the step, and the scheduler went on: rates and weights drift apart.",
            cure=guarded(way.at, way.step) if way.together else "",
            times=len(found),
            optimizer=loop.optimizer,
            at=way.at,
        )


def nonfinite_micro_batch(case: Case) -> Iterator[Finding]:
    """An infinite or NaN contribution that a step has consumed."""
    unmeasured = case.events.detail("unmeasured", None)
    for loop in case.loops:
        found = []
        strange = ~np.isfinite(case.ledger.contribution[:, loop.columns])
        reached = case.contributed[:, loop.columns] & strange
        odd = np.asarray(np.any(reached, axis=1))
        if not odd.any():
            continue
        consumed = sorted(
            {
                (b, s)
                for s, b in zip(
                    loop.read_step.tolist(), loop.read.tolist(), strict=True
                )
            }
        )
        for b, step in consumed:
            if (
                bool(odd[b])
                and not unmeasured[b]
                and not bool(np.isfinite(case.ledger.grad[step, loop.columns]).all())
            ):
                found.append((b, step))
        if not found:
            continue
        b, step = found[0]
        columns = loop.columns[np.flatnonzero(reached[b])]
        yield case.finding(
            "nonfinite-micro-batch",
            "error",
            b,
            step=step,
            evidence={
                "loss": case.ledger[b].loss,
                "parameters": [
                    case.ledger.parameters[p].name for p in columns[:4].tolist()
                ],
            },
            cause="A contribution is infinite or NaN, and the step consumed it: so are the weights from then on.",
            times=len({b for b, _ in found}),
            optimizer=loop.optimizer,
        )


def low_precision_accumulation(case: Case) -> Iterator[Finding]:
    """Sums in half precision that contributions leave as they were."""
    ledger = case.ledger
    for loop in case.loops:
        half = [
            p
            for p in loop.columns.tolist()
            if ledger.parameters[p].dtype in ("bfloat16", "float16")
        ]
        lost = added = 0
        first = -1
        for p in half:
            born = np.flatnonzero(ledger.state[:, p] & CONTRIBUTED)
            born = born[(born > 0)]
            born = born[
                np.isfinite(ledger.grad[born - 1, p]) & (ledger.grad[born - 1, p] > 0)
            ]
            if not born.size:
                continue
            if p in ledger.exact:
                part, grad = ledger.exact[p]
                some = (part[born] != 0) & np.isfinite(part[born])
                same = some & (grad[born] == grad[born - 1])
            else:
                some = (ledger.contribution[born, p] > 0)[:, None]
                same = (
                    some & (ledger.grad[born, p] == ledger.grad[born - 1, p])[:, None]
                )
            lost, added = lost + int(same.sum()), added + int(some.sum())
            if first < 0 and same.any():
                first = int(born[same.any(axis=1)][0])
        # A few per cent of a normal distribution's elements are too small for any format of 8 bits.
        if not added or lost < 0.05 * added or added < 20:
            continue
        yield case.finding(
            "low-precision-accumulation",
            "warning",
            first,
            evidence={
                "elements that contributions left unchanged": lost / added,
                "elements looked at": added,
                "dtype": ledger.parameters[half[0]].dtype,
            },
            cause=(
                f"{lost / added:.0%} of the additions to `.grad` change nothing: what is added is below the last digit "
                "of the sum."
            ),
            optimizer=loop.optimizer,
        )
