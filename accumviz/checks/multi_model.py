"""Rules about several networks, and about graphs that outlive their backward."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from accumviz.checks.analysis import LedgerAnalysis, OptimizerHistory
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import added_above, replaced, zeroing

# Fewer steps say nothing about what rises.
_RISING = 4


def graph_retained(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find saved tensors of which more are alive after each window, or losses that are run again."""
    for optimizer in analysis.optimizers:
        finding = _rising(analysis, optimizer) or _run_again(analysis, optimizer)
        if finding is not None:
            yield finding


def _rising(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> Finding | None:
    after = analysis.events.column("saved_after")
    before = analysis.events.column("saved_before")
    last = [window[-1] for window in optimizer.full_windows.values()]
    last = [b for b in last if np.isfinite(after[b])]
    if len(last) < _RISING:
        return None
    saved = after[last]
    one_graph = np.nanmax(before[last[:2]])
    if not _rises(saved, one_graph):
        return None
    kept = [b for b in last if analysis.detail(b, "retain_graph")]
    event = analysis.ledger[kept[0] if kept else last[0]]
    summed = bool(kept) and (np.diff(_losses(analysis, last)) > 0).all()
    if summed:
        cause = _summed_cause(event.label)
    else:
        keeper = "something that is kept, such as a loss in a list,"
        keeper = "`retain_graph=True`" if kept else keeper
        cause = (
            f"Graphs outlive their backward: {keeper} keeps the saved tensors of each, and memory grows with every "
            "window."
        )
    line = re.sub(r",?\s*retain_graph\s*=\s*True", "", event.source)
    return analysis.finding(
        "graph-retained",
        "error",
        event.index,
        step=optimizer.first_step_of[event.index],
        evidence={"bytes saved after each window": saved.astype(int).tolist()},
        cause=cause,
        # Of a sum that grows, the second backward would meet what the first has freed.
        suggestion=replaced(event, line) if kept and not summed else "",
        times=len(last),
        optimizer=optimizer.optimizer,
    )


def _rises(saved: np.ndarray, one_graph: float) -> bool:
    """Whether bytes rise by at least half a graph, again and again: a list may be emptied with each epoch."""
    runs = np.split(saved, np.flatnonzero(np.diff(saved) <= 0) + 1)
    long = [r.size >= _RISING and r[-1] - r[0] >= 0.5 * one_graph for r in runs]
    # The last run may have been cut short.
    return all(long[:-1] or long)


def _summed_cause(label: str) -> str:
    return (
        f"Each backward runs the graphs of all losses so far: `{label}` adds them up with their graphs. Call "
        "`backward` on the new loss alone, and add its `detach()` to the sum."
    )


def _run_again(analysis: LedgerAnalysis, optimizer: OptimizerHistory) -> Finding | None:
    """Find a sum that begins anew in each window, and of which every micro-batch runs all so far."""
    windows = {s: used for s, used in optimizer.full_windows.items() if len(used) > 1}
    if not windows:
        return None
    for used in windows.values():
        counts = _losses(analysis, used)
        growing = [(n + 1) * counts[0] for n in range(len(counts))]
        one_line = len(set(analysis.lines[used].tolist())) == 1
        retained = all(analysis.detail(b, "retain_graph") for b in used[:-1])
        if not counts[0] or counts != growing or not one_line or not retained:
            return None
    step, used = next(iter(windows.items()))
    return analysis.finding(
        "graph-retained",
        "error",
        used[1],
        step=step,
        evidence={"losses in each backward": _losses(analysis, used)},
        cause=_summed_cause(analysis.ledger[used[1]].label),
        times=len(windows),
        optimizer=optimizer.optimizer,
    )


def _losses(analysis: LedgerAnalysis, backwards: list[int]) -> list[int]:
    """Count the losses that each of these added up."""
    return [len(analysis.ledger[b].terms) for b in backwards]


def gan_gradient_leak(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find a loss of one network that another network's step consumes as well."""
    for optimizer in analysis.optimizers:
        leaks = [
            leak
            for other in analysis.optimizers
            if other is not optimizer and _apart(optimizer, other)
            for leak in _leaks(analysis, optimizer, other)
        ]
        if not leaks:
            continue
        b, early, late = min(leaks)
        event = analysis.ledger[b]
        leaked = {leak[0] for leak in leaks}
        yield analysis.finding(
            "gan-gradient-leak",
            "error",
            b,
            step=late,
            evidence={
                "the loss": event.label,
                "consumed by the step at event": early,
                "and by the step at event": late,
                "of": optimizer.name,
            },
            cause=(
                f"{event.label or 'The loss'} also reached the parameters of {optimizer.name}, and its contribution "
                "was still there when that one stepped for a loss of its own."
            ),
            suggestion=_zeroed_first(analysis, optimizer, late, leaked),
            times=len(leaked),
            optimizer=optimizer.optimizer,
        )


def _apart(one: OptimizerHistory, other: OptimizerHistory) -> bool:
    """Whether two optimizers of one rank have no parameter in common."""
    return one.rank == other.rank and not set(one.columns) & set(other.columns)


def _leaks(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, other: OptimizerHistory
) -> Iterator[tuple[int, int, int]]:
    """Return each backward that this optimizer's step read when the other one had stepped on it, and both steps.

    Between them, this optimizer has a loss of its own. Steps at different paces share one loss: that leaks nothing.
    """
    sites = analysis.sites
    shared = set(sites[list(other.first_step_of)].tolist())
    same_pace = abs(optimizer.steps.size - other.steps.size) <= 1
    for b, late in optimizer.first_step_of.items():
        early = other.first_step_of.get(b, late)
        between = optimizer.between(optimizer.backwards, early, late)
        its_sites = set(sites[between].tolist())
        if not its_sites - shared:
            continue
        if same_pace or sites[b] not in its_sites:
            yield b, early, late


def shared_loss(analysis: LedgerAnalysis) -> str:
    """Name a loss that two optimizers learn from, of which one has losses of its own: opponents, or parts of one model.

    The losses do not say whether they pull apart. Empty where there is none.
    """
    losses = {
        optimizer: set(analysis.sites[optimizer.read].tolist())
        for optimizer in analysis.optimizers
    }
    for one, its in losses.items():
        for other, theirs in losses.items():
            # All that the other one learns from, and more.
            if not theirs or not theirs < its or not _apart(one, other):
                continue
            both = [b for b in one.read.tolist() if analysis.sites[b] in theirs]
            label = analysis.ledger[both[0]].label or "a loss"
            return f"{label} is meant to train what {one.name} has, as well as what {other.name} has"
    return ""


def _zeroed_first(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, step: int, leaked: set[int]
) -> str:
    """Suggest to zero above the first backward of a window, where its line has one backward in it."""
    window = [b for b in optimizer.windows[step] if b not in leaked]
    lines = analysis.lines[window].tolist()
    if not lines or lines.count(lines[0]) > 1:
        return ""
    return added_above(analysis.ledger[window[0]], zeroing(analysis.ledger[step]))
