"""Rules about precision: the gradient scaler, values that are not finite, sums that lose what is added."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from accumviz.checks.analysis import LedgerAnalysis, OptimizerHistory, is_close
from accumviz.checks.order import lines_of
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import added_above, moved_above, taken_over
from accumviz.ledger.events import CONTRIBUTED
from accumviz.ledger.flow import SAME, SAME_IN_HALF, number

# A few per cent of a normal distribution's elements are too small for any format of 8 bits.
_LOST, _LOOKED_AT = 0.05, 20


def _scaled(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> np.ndarray:
    """Return the backwards whose loss the scaler had multiplied by something else than 1."""
    scales = analysis.events.detail("amp_scale", 1.0)
    scaled: np.ndarray = optimizer.backwards[scales[optimizer.backwards] != 1]
    return scaled


def clip_scaled_grads(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a clip of gradients that the scaler has not unscaled yet."""
    clips = analysis.at("clip")
    for optimizer in analysis.optimizers if clips.size else ():
        scaled = _scaled(analysis, optimizer)
        early = [
            clip
            for clip in clips.tolist()
            if scaled.size and _clips_scaled(analysis, optimizer, scaled, clip)
        ]
        if not early:
            continue
        clip = early[0]
        ends = np.sort(np.concatenate([optimizer.steps, optimizer.skipped]))
        after = ends[ends > clip][:1].tolist()
        event, scale = analysis.ledger[clip], _scale(analysis, scaled, clip)
        line = "scaler.unscale_(optimizer)"
        if after:
            source = analysis.ledger[after[0]].source
            call = re.search(r"([\w.]+)\.step\(\s*([\w.]+)", source)
            line = f"{call[1]}.unscale_({call[2]})" if call else line
        # What is clipped more than once in a window cannot be unscaled each time.
        once = not after or sum(c < after[0] for c in early) == 1
        yield analysis.finding(
            "clip-scaled-grads",
            "error",
            clip,
            step=after[0] if after else None,
            evidence={
                "scale": scale,
                "max_norm": event.details.get("max_norm", "?"),
                "the clip multiplies by": optimizer.clip_ratio(clip),
            },
            cause=(
                f"The clip sees gradients that are still multiplied by {scale:g}; after the division, next to nothing "
                "is left."
            ),
            suggestion=added_above(event, line) if once else "",
            times=len(early),
            optimizer=optimizer.optimizer,
        )


def _scale(analysis: LedgerAnalysis, scaled: np.ndarray, event: int) -> float:
    """Return the scale of the last scaled backward before an event."""
    return number(analysis.detail(int(scaled[scaled < event][-1]), "amp_scale"))


def _clips_scaled(
    analysis: LedgerAnalysis,
    optimizer: OptimizerHistory,
    scaled: np.ndarray,
    clip: int,
) -> bool:
    """Whether a clip shortens gradients that are still scaled."""
    skipped = optimizer.skipped[optimizer.skipped < clip]
    since = max(optimizer.previous_step(clip), int(skipped.max(initial=-1)))
    inside = optimizer.between(scaled, since, clip)
    if not inside.size or optimizer.clip_ratio(clip) >= 1 - SAME:
        return False
    if optimizer.change_between(analysis.at("unscale"), since, clip):
        return False
    # The limit may be as many times larger; or it was a hand that unscaled.
    if "get_scale" in analysis.ledger[clip].source:
        return False
    scale = _scale(analysis, scaled, clip)
    edits = optimizer.between(analysis.at("edit"), int(inside[-1]), clip).tolist()
    ratios = [optimizer.clip_ratio(edit) * scale for edit in edits]
    return not any(is_close(ratio, 1.0, SAME_IN_HALF) for ratio in ratios)


def backward_after_unscale(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a scaled contribution added to a sum that is unscaled already."""
    unscales = analysis.at("unscale")
    for optimizer in analysis.optimizers if unscales.size else ():
        scaled = set(_scaled(analysis, optimizer).tolist())
        mine = optimizer.changing(unscales)
        late = []
        for step, window in optimizer.windows.items():
            if len(window) < 2:
                continue
            # What an earlier step has unscaled and left is another mistake.
            since = max(window[0], optimizer.previous_step(step))
            inside = optimizer.between(mine, since, step).tolist()
            after = [b for b in window if inside and b > inside[0] and b in scaled]
            late += [(after[0], inside, step)] if after else []
        if not late:
            continue
        b, inside, step = late[0]
        scale = number(analysis.detail(b, "amp_scale"))
        at, end = lines_of(analysis, inside[0], step, b)
        again = len(inside) > 1
        more = ", which are divided again with it. Once, before the step, is enough."
        yield analysis.finding(
            "backward-after-unscale",
            "error",
            inside[0],
            step=step,
            evidence={
                "event of the unscale": inside[0],
                "event of the backward after it": b,
                "scale": scale,
            },
            cause=(
                f"Backward {b} comes after `unscale_`: its contribution enters the step {scale:g} times as large as "
                f"those before it{more if again else '.'}"
            ),
            # An `update` that stands between two of them belongs to the step as well.
            suggestion="" if again else moved_above(at, end),
            times=len(late),
            optimizer=optimizer.optimizer,
            at=at,
        )


def bypass_scaler_step(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a step outside the scaler, on gradients that it has multiplied."""
    for optimizer in analysis.optimizers:
        scaled = set(_scaled(analysis, optimizer).tolist())
        bypassed = [
            step
            for step, window in optimizer.full_windows.items()
            if scaled.intersection(window)
            and _steps_alone(analysis, optimizer, step, window)
        ]
        if not bypassed:
            continue
        step = bypassed[0]
        scale = number(analysis.detail(optimizer.windows[step][0], "amp_scale"))
        yield analysis.finding(
            "bypass-scaler-step",
            "error",
            step,
            step=step,
            evidence={"scale": scale, "steps": len(bypassed)},
            cause=f"The optimizer steps by itself, on gradients that are still {scale:g} times too large.",
            suggestion=taken_over(analysis.ledger[step]),
            times=len(bypassed),
            optimizer=optimizer.optimizer,
        )


def _steps_alone(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, step: int, window: list[int]
) -> bool:
    """Whether a step is none of the scaler's, and what it reads was never unscaled."""
    event = analysis.ledger[step]
    # `scaler.step(optimizer)`: an optimizer that is handed over may divide by itself. A fused one did.
    handed = re.search(r"\.step\(\s*(?!closure\b)[A-Za-z_]", event.source)
    if not event.source or handed or "amp_scale" in event.details:
        return False
    if optimizer.change_between(analysis.at("unscale"), window[0], step):
        return False
    # Of what a hand has divided by the scale, the share is known.
    return bool(analysis.shares.of(step).lost_sight.any())


def nonfinite_micro_batch(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find an infinite or NaN contribution that a step has consumed."""
    unmeasured = analysis.events.detail("unmeasured", None)
    ledger = analysis.ledger
    for optimizer in analysis.optimizers:
        columns = optimizer.columns
        strange = ~np.isfinite(ledger.contribution[:, columns])
        odd = analysis.contributed[:, columns] & strange
        unsound = ~np.all(np.isfinite(ledger.grad[:, columns]), axis=1)
        consumed = [
            (b, step)
            for step, window in optimizer.full_windows.items()
            for b in window
            if odd[b].any() and not unmeasured[b] and unsound[step]
        ]
        if not consumed:
            continue
        b, step = min(consumed)
        names = [ledger.parameters[p].name for p in columns[odd[b]][:4].tolist()]
        yield analysis.finding(
            "nonfinite-micro-batch",
            "error",
            b,
            step=step,
            evidence={"loss": ledger[b].loss, "parameters": names},
            cause="A contribution is infinite or NaN, and the step consumed it: so are the weights from then on.",
            times=len({b for b, _ in consumed}),
            optimizer=optimizer.optimizer,
        )


def low_precision_accumulation(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find sums in half precision that contributions leave as they were."""
    parameters = analysis.ledger.parameters
    for optimizer in analysis.optimizers:
        half = [
            p
            for p in optimizer.columns.tolist()
            if parameters[p].dtype in ("bfloat16", "float16")
        ]
        counts = [_additions(analysis, p) for p in half]
        lost = sum(unchanged for unchanged, _, _ in counts)
        added = sum(every for _, every, _ in counts)
        if added < _LOOKED_AT or lost < _LOST * added:
            continue
        yield analysis.finding(
            "low-precision-accumulation",
            "warning",
            min(first for unchanged, _, first in counts if unchanged),
            evidence={
                "elements that contributions left unchanged": lost / added,
                "elements looked at": added,
                "dtype": parameters[half[0]].dtype,
            },
            cause=(
                f"{lost / added:.0%} of the additions to `.grad` change nothing: what is added is below the last digit "
                "of the sum."
            ),
            optimizer=optimizer.optimizer,
        )


def _additions(analysis: LedgerAnalysis, p: int) -> tuple[int, int, int]:
    """Count a parameter's additions that changed nothing, and all of them; and say where the first one was."""
    ledger = analysis.ledger
    born = np.flatnonzero(ledger.state[:, p] & CONTRIBUTED)
    born = born[born > 0]
    before = ledger.grad[born - 1, p]
    born = born[np.isfinite(before) & (before > 0)]
    if p in ledger.exact:
        part, grad = ledger.exact[p]
        added = (part[born] != 0) & np.isfinite(part[born])
    else:
        grad = ledger.grad[:, [p]]
        added = (ledger.contribution[born, p] > 0)[:, None]
    unchanged = added & (grad[born] == grad[born - 1])
    events = born[unchanged.any(axis=1)] if born.size else born
    return int(unchanged.sum()), int(added.sum()), int(events[0]) if events.size else 0
