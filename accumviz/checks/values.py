"""Rules about values: numbers that are not finite, what 16 bits lose, graphs that outlive their backward."""

from __future__ import annotations

import math
import re

import numpy as np

from accumviz.checks.analysis import (
    Conditions,
    LedgerAnalysis,
    OptimizerHistory,
    for_each_optimizer,
)
from accumviz.checks.report import Finding, Findings
from accumviz.checks.suggestions import replaced
from accumviz.ledger.events import PRESENT
from accumviz.ledger.flow import number

# Fewer steps say nothing about what rises, or is lost again and again.
_RISING = 4
# Of weights, a part that is as good as all, and a part that may be meant.
_ALL, _MOST = 0.99, 0.5


@for_each_optimizer
def nonfinite_micro_batch(optimizer: OptimizerHistory) -> Findings:
    """Find an infinite or NaN contribution that a step has consumed."""
    unmeasured = optimizer.events.detail("unmeasured", None)
    grads = optimizer.ledger.grad[optimizer.steps][:, optimizer.columns]
    sound = np.all(np.isfinite(grads), axis=1)
    unsound = set(optimizer.steps[~sound].tolist())
    consumed = {
        b: step
        for b, step in optimizer.first_step_of.items()
        if step in unsound and not (unmeasured[b] or optimizer.finite(b))
    }
    if not consumed:
        return
    b = min(consumed)
    yield optimizer.finding(
        "error",
        b,
        step=consumed[b],
        evidence={"loss": optimizer.ledger[b].loss},
        cause="A contribution is infinite or NaN, and the step consumed it: so are the weights from then on.",
        times=len(consumed),
    )


# --- 16 bits ----------------------------------------------------------------------------------


@for_each_optimizer
def weights_frozen_by_autocast(optimizer: OptimizerHistory) -> Findings:
    """Find forwards that read copies of weights from before the last step, which an autocast around both keeps."""
    old = optimizer.events.detail("old_weight", None)
    names = set(optimizer.names(optimizer.columns))
    # What another network's loss reads one step late is read anew for the own.
    late = [b for b in optimizer.first_step_of if str(old[b]) in names]
    if not late:
        return
    b = min(late)
    yield optimizer.finding(
        "error",
        b,
        step=optimizer.first_step_of[b],
        evidence={"such a weight": old[b]},
        cause=(
            "`autocast` keeps the 16-bit copies of weights until it is left: this forward read those from before "
            "the last step, as if no step had been. Open `autocast` around each forward alone."
        ),
    )


@for_each_optimizer
def step_lost_in_rounding(optimizer: OptimizerHistory) -> Findings:
    """Find steps that leave all 16-bit weights as they are, though they have gradients."""
    steps, left = _left_as_they_are(optimizer)
    if left < _ALL:
        return
    yield optimizer.finding(
        "warning",
        steps[0],
        step=steps[0],
        evidence={
            "part of the weights that a step leaves as they are": left,
            "learning rate": optimizer.detail(steps[0], "lr"),
        },
        cause=(
            f"The steps of {optimizer.name} are smaller than the rounding of 16-bit weights, which stay bit for "
            "bit as they were. Keep the weights in 32 bits, as `autocast` does, or round stochastically."
        ),
        times=len(steps),
    )


def _left_as_they_are(optimizer: OptimizerHistory) -> tuple[list[int], float]:
    """Return the steps that were to move 16-bit weights, and which part of these a step leaves as they are.

    Of few steps, 0: a schedule may begin with a rate of almost nothing.
    """
    unmoved = optimizer.events.detail("unmoved", math.nan)
    steps = []
    for step in optimizer.windows:
        if not np.isfinite(unmoved[step]):
            continue
        rates = optimizer.detail(step, "lr")
        if isinstance(rates, list) and all(number(rate) > 0 for rate in rates):
            steps.append(step)
    left = float(np.median(unmoved[steps])) if len(steps) >= _RISING else 0.0
    return steps, left


# --- graphs -----------------------------------------------------------------------------------


@for_each_optimizer
def graph_retained(optimizer: OptimizerHistory) -> Findings:
    """Find saved tensors of which more are alive after each window, or losses that are run again."""
    several = [used for used in optimizer.windows.values() if len(used) > 1]
    last = _last_of_rising(optimizer)
    runs = several or [last]
    if all(_run_again(optimizer, used) for used in runs):
        b = runs[0][1]
        yield optimizer.finding(
            "error",
            b,
            step=optimizer.first_step_of[b],
            evidence={"losses in each backward": _losses(optimizer, runs[0])},
            cause=(
                f"Each backward runs the graphs of all losses so far: `{optimizer.ledger[b].label}` adds them up with "
                "their graphs. Call `backward` on the new loss alone, and add its `detach()` to the sum."
            ),
            times=len(several or last),
        )
    elif last:
        yield _kept(optimizer, last)


def _losses(analysis: LedgerAnalysis, backwards: list[int]) -> list[int]:
    """Count the losses that each of these added up."""
    return [len(analysis.ledger[b].terms) for b in backwards]


def _run_again(analysis: LedgerAnalysis, used: list[int]) -> bool:
    """Return whether each backward runs more losses than the one before, whose graphs were retained."""
    increases = np.diff(_losses(analysis, used))
    growing = bool(np.all(increases > 0))
    one_line = np.unique(analysis.sites[used]).size == 1
    retained = analysis.events.detail("retain_graph", default=False)
    return growing and one_line and bool(retained[used[:-1]].all())


def _last_of_rising(optimizer: OptimizerHistory) -> list[int]:
    """Return the last backward of each window, where more bytes are saved after each; else none."""
    after = optimizer.events.column("saved_after")
    before = optimizer.events.column("saved_before")
    every = [used[-1] for used in optimizer.windows.values()]
    last = [b for b in every if np.isfinite(after[b])]
    if len(last) < _RISING:
        return []
    one_graph = before[last[:2]].max()
    return last if _rises(after[last], one_graph) else []


def _rises(saved: np.ndarray, one_graph: float) -> bool:
    """Return whether bytes rise by at least half a graph, again and again: a list may be emptied with each epoch."""
    falls = np.flatnonzero(np.diff(saved) <= 0)
    long = []
    for run in np.split(saved, falls + 1):
        risen = run[-1] - run[0]
        long.append(run.size >= _RISING and risen >= 0.5 * one_graph)
    # The last run may have been cut short.
    return all(long[:-1] or long)


def _kept(optimizer: OptimizerHistory, last: list[int]) -> Finding:
    """Return the finding about saved tensors that something keeps."""
    saved = optimizer.events.column("saved_after")[last]
    retained = [b for b in last if optimizer.detail(b, "retain_graph")]
    event = optimizer.ledger[(retained or last)[0]]
    keeper, suggestion = "something that is kept, such as a loss in a list,", ""
    if retained:
        keeper = "`retain_graph=True`"
        line = re.sub(r",?\s*retain_graph\s*=\s*True", "", event.source)
        suggestion = replaced(event, line)
    return optimizer.finding(
        "error",
        event.index,
        step=optimizer.first_step_of[event.index],
        evidence={"bytes saved after each window": saved.astype(int).tolist()},
        cause=(
            f"Graphs outlive their backward: {keeper} keeps the saved tensors of each, and memory grows with every "
            "window."
        ),
        suggestion=suggestion,
        times=len(last),
    )


# --- what has to be meant ---------------------------------------------------------------------


def conditions(analysis: LedgerAnalysis) -> Conditions:
    """Say what has to be meant for a healthy loop to be so: sums and steps in 16 bits, which lose what is small."""
    for optimizer in analysis.optimizers:
        yield from _sums(optimizer)
        steps, left = _left_as_they_are(optimizer)
        if left > _MOST:
            said = f"steps that leave {left:.0%} of the 16-bit weights as they are, bit for bit, are meant"
            yield said, steps[0]


def _sums(optimizer: OptimizerHistory) -> Conditions:
    """Say of sums in 16 bits that they are meant: those of `.grad`, and those that FSDP keeps until it scatters."""
    longest = max(optimizer.windows.values(), key=len, default=[])
    if len(longest) < 2:
        return
    for p in optimizer.columns.tolist():
        parameter = optimizer.parameters[p]
        if parameter.dtype not in ("bfloat16", "float16"):
            continue
        present = optimizer.ledger.state[:-1, p] & PRESENT > 0
        # What FSDP scatters after each backward is added up in the shards.
        if (optimizer.contributed[1:, p] & present).any():
            where = "FSDP's unsharded sums" if parameter.unsharded_of else "sums"
            yield f"{where} in {parameter.dtype} are meant", longest[1]
