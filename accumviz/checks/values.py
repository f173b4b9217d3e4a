"""Rules about values: numbers that are not finite, sums that lose what is added, graphs that outlive their backward."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from accumviz.checks.analysis import LedgerAnalysis, OptimizerHistory
from accumviz.checks.report import Finding
from accumviz.checks.suggestions import replaced
from accumviz.ledger.events import CONTRIBUTED

# A few per cent of a normal distribution's elements are too small for any format of 8 bits.
_LOST, _LOOKED_AT = 0.05, 20
# Fewer steps say nothing about what rises.
_RISING = 4


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


# --- half precision ---------------------------------------------------------------------------


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
    born = np.flatnonzero(ledger.state[1:, p] & CONTRIBUTED) + 1
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


# --- graphs -----------------------------------------------------------------------------------


def graph_retained(analysis: LedgerAnalysis) -> Iterator[Finding]:
    """Find saved tensors of which more are alive after each window, or losses that are run again."""
    after = analysis.events.column("saved_after")
    before = analysis.events.column("saved_before")
    for optimizer in analysis.optimizers:
        windows = list(optimizer.full_windows.values())
        several = [used for used in windows if len(used) > 1]
        if several and all(_runs_again(analysis, used) for used in several):
            yield _summed(analysis, optimizer, several[0][1], len(several))
            continue
        last = [used[-1] for used in windows if np.isfinite(after[used[-1]])]
        if len(last) >= _RISING and _rises(after[last], before[last[:2]].max()):
            yield _kept(analysis, optimizer, last, after[last])


def _rises(saved: np.ndarray, one_graph: float) -> bool:
    """Return whether bytes rise by at least half a graph, again and again: a list may be emptied with each epoch."""
    runs = np.split(saved, np.flatnonzero(np.diff(saved) <= 0) + 1)
    long = [r.size >= _RISING and r[-1] - r[0] >= 0.5 * one_graph for r in runs]
    # The last run may have been cut short.
    return all(long[:-1] or long)


def _kept(
    analysis: LedgerAnalysis,
    optimizer: OptimizerHistory,
    last: list[int],
    saved: np.ndarray,
) -> Finding:
    """Return the finding about saved tensors that something keeps."""
    retained = [b for b in last if analysis.detail(b, "retain_graph")]
    event = analysis.ledger[retained[0] if retained else last[0]]
    if retained and (np.diff(_losses(analysis, last)) > 0).all():
        return _summed(analysis, optimizer, event.index, len(last))
    keeper, suggestion = "something that is kept, such as a loss in a list,", ""
    if retained:
        keeper = "`retain_graph=True`"
        line = re.sub(r",?\s*retain_graph\s*=\s*True", "", event.source)
        suggestion = replaced(event, line)
    return analysis.finding(
        "graph-retained",
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
        optimizer=optimizer.optimizer,
    )


def _losses(analysis: LedgerAnalysis, backwards: list[int]) -> list[int]:
    """Count the losses that each of these added up."""
    return [len(analysis.ledger[b].terms) for b in backwards]


def _runs_again(analysis: LedgerAnalysis, used: list[int]) -> bool:
    """Return whether each backward of a window runs a sum of all losses so far."""
    counts = _losses(analysis, used)
    growing = [(n + 1) * counts[0] for n in range(len(counts))]
    one_line = len(set(analysis.sites[used].tolist())) == 1
    retained = all(analysis.detail(b, "retain_graph") for b in used[:-1])
    return counts[0] > 0 and counts == growing and one_line and retained


def _summed(
    analysis: LedgerAnalysis, optimizer: OptimizerHistory, b: int, times: int
) -> Finding:
    """Return the finding about a sum of losses that keeps their graphs."""
    step = optimizer.first_step_of[b]
    losses = _losses(analysis, optimizer.windows[step])
    return analysis.finding(
        "graph-retained",
        "error",
        b,
        step=step,
        evidence={"losses in each backward": losses},
        cause=(
            f"Each backward runs the graphs of all losses so far: `{analysis.ledger[b].label}` adds them up with their "
            "graphs. Call `backward` on the new loss alone, and add its `detach()` to the sum."
        ),
        times=times,
        optimizer=optimizer.optimizer,
    )
