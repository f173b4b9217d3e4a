"""The verb: every rule in turn, root causes first, one finding for one cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from accumviz.checks import mixing, networks, order, precision, ranks, weights, windows
from accumviz.checks.evidence import Case
from accumviz.checks.report import SEVERITIES, Finding, Report
from accumviz.ledger import Ledger, Recorded, recorded

_SHARES = "shares"
_MEMORY = "memory"


class Rule(NamedTuple):
    """A rule: its name, the function that finds, what it explains (no finding of its own then), and what it needs."""

    name: str
    find: Callable[[Case], Iterator[Finding]]
    explains: tuple[str, ...] = ()
    needs: str = ""


# Root causes stand before what follows from them.
RULES = (
    Rule("step-before-backward", networks.step_before_backward),
    Rule("nonfinite-micro-batch", precision.nonfinite_micro_batch),
    Rule(
        "missing-zero-grad",
        windows.missing_zero_grad,
        (
            "gan-gradient-leak",
            "loss-not-divided",
            "leftover-carried",
            "clip-per-micro-batch",
            "parameter-outside-or-twice",
        ),
    ),
    Rule(
        "zero-before-step",
        windows.zero_before_step,
        ("zero-grad-inside-window", "tail-dropped", "clip-on-the-wrong-side", "zero-tensor-drift"),
    ),
    Rule(
        "zero-grad-inside-window",
        windows.zero_grad_inside_window,
        ("tail-dropped", "partial-window-underscaled", "token-mean-of-means", "window-collapses-at-end"),
    ),
    Rule("backward-after-unscale", precision.backward_after_unscale, ("clip-per-micro-batch", "clip-scaled-grads")),
    Rule("bypass-scaler-step", precision.bypass_scaler_step, ("clip-scaled-grads",)),
    Rule("clip-scaled-grads", precision.clip_scaled_grads, ("clip-per-micro-batch",)),
    Rule("clip-per-micro-batch", order.clip_per_micro_batch),
    Rule("clip-on-the-wrong-side", order.clip_on_the_wrong_side),
    Rule("gan-gradient-leak", networks.gan_gradient_leak),
    Rule("window-collapses-at-end", windows.window_collapses_at_end, ("partial-window-underscaled",)),
    Rule("leftover-carried", weights.leftover_carried, ("tail-dropped",), _SHARES),
    Rule("double-division", weights.double_division, ("partial-window-underscaled",), _SHARES),
    Rule("partial-window-underscaled", weights.partial_window_underscaled, needs=_SHARES),
    Rule("tail-dropped", windows.tail_dropped),
    Rule("token-mean-of-means", weights.token_mean_of_means, ("rank-token-weight", "loss-not-divided"), _SHARES),
    Rule("loss-not-divided", weights.loss_not_divided, needs=_SHARES),
    Rule("scheduler-per-micro-batch", order.scheduler_per_micro_batch, ("scheduler-on-skipped-step",)),
    Rule("scheduler-on-skipped-step", precision.scheduler_on_skipped_step),
    Rule(
        "ddp-unsynced-step",
        ranks.ddp_unsynced_step,
        ("no-sync-excludes-forward", "uneven-rank-backwards", "rank-token-weight"),
    ),
    Rule("uneven-rank-backwards", ranks.uneven_rank_backwards),
    Rule("no-sync-excludes-forward", ranks.no_sync_excludes_forward),
    Rule("rank-token-weight", ranks.rank_token_weight, needs=_SHARES),
    Rule("fsdp2-zero-keeps-unsharded", ranks.fsdp2_zero_keeps_unsharded, ("fsdp-no-sync-memory",)),
    Rule("fsdp-no-sync-memory", ranks.fsdp_no_sync_memory),
    Rule("graph-retained", networks.graph_retained, needs=_MEMORY),
    Rule("low-precision-accumulation", precision.low_precision_accumulation),
    Rule("zero-tensor-drift", networks.zero_tensor_drift),
    Rule("parameter-outside-or-twice", networks.parameter_outside_or_twice),
    Rule("fsdp1-local-clip", ranks.fsdp1_local_clip),
    Rule("ddp-static-graph-no-sync", ranks.ddp_static_graph_no_sync),
    Rule("micro-batch-side-effects", mixing.micro_batch_side_effects),
    Rule("contrastive-accumulation", mixing.contrastive_accumulation),
)


def check(recording: Ledger | Recorded) -> Report:
    """Look for the known mistakes of training loops in a recording.

    `recording` is what `record` gave, or a ledger. The report has findings, each with its line, its
    numbers and its cure; or it says that the loop is healthy; or that nobody can tell, and why.

    >>> from accumviz.ledger import Ledger, Parameter
    >>> row = dict(kind="backward", label="loss", contribution={"w": 1.0}, grad={"w": 1.0})
    >>> check(Ledger.build([Parameter("w", (1,), optimizers=(0,))], [row])).reason
    'no optimizer stepped while it was recorded'
    """
    ledger = recorded(recording, "check")
    kinds = {kind: int(ledger.columns.where("kind", kind).sum()) for kind in ("backward", "step")}
    counts = {"events": len(ledger), "backwards": kinds["backward"], "steps": kinds["step"]}
    reason = _nothing_to_judge(ledger, kinds)
    if reason:
        # What stops a script in its first window is found all the same.
        early = ranks.ddp_static_graph_no_sync(Case(ledger)) if kinds["backward"] else ()
        return Report(tuple(early), reason, {}, counts)
    case = Case(ledger)
    found = _one_for_each_cause(case)
    unjudged = _unjudged(case)
    return Report(tuple(found), _no_verdict(case), unjudged, counts)


def _nothing_to_judge(ledger: Ledger, kinds: dict[str, int]) -> str:
    if len(ledger) and not (kinds["backward"] and kinds["step"]) and _cut_short(ledger):
        return _cut_short(ledger)
    if not len(ledger):
        return "nothing was recorded"
    if not kinds["backward"]:
        return "no backward was recorded: what the steps read came from elsewhere"
    if not kinds["step"]:
        return "no optimizer stepped while it was recorded"
    return ""


def _cut_short(ledger: Ledger) -> str:
    if "stopped" in ledger.meta:
        return f"the recording stopped before its end: {ledger.meta['stopped']}"
    return "" if ledger.complete else "the ledger is incomplete: its process ended before the recording was closed"


def _no_verdict(case: Case) -> str:
    """Why the silence of the rules says nothing, if it does not."""
    ledger = case.ledger
    if _cut_short(ledger):
        return _cut_short(ledger)
    captured = [note for note in case.listed("notes") if "CUDA graph" in str(note)]
    if captured:
        return f"part of the training is not in the ledger: {captured[0]}"
    shares = case.shares
    if not case.loops:
        return "no parameter that was recorded belongs to an optimizer that stepped"
    unknown = shares.unknown[case.once]
    if unknown.size and (unknown > 0).all():
        return f"what the micro-batches weigh is not known: {_most(case)}"
    return ""


def _most(case: Case) -> str:
    """The most frequent reason why a share is unknown."""
    unknown = case.shares.unknown
    code, _ = Counter(unknown[unknown > 0].tolist()).most_common(1)[0]
    return case.shares.reasons[code]


def _unjudged(case: Case) -> dict[str, str]:
    """The rules that lacked something, and what."""
    found: dict[str, str] = {}
    unknown = case.shares.unknown[case.once] > 0
    for rule in RULES:
        if rule.needs == _SHARES and unknown.any():
            found[rule.name] = f"{int(unknown.sum())} of {unknown.size} shares are unknown: {_most(case)}"
        elif rule.needs == _MEMORY and np.isnan(case.events.column("saved_after")[case.backward]).all():
            found[rule.name] = "saved bytes were not measured: record(..., memory=True)"
    return found


def _one_for_each_cause(case: Case) -> list[Finding]:
    found: dict[tuple[str, str, int, str], Finding] = {}
    explained: list[tuple[str, int | None]] = []
    for rule in RULES:
        for finding in rule.find(case):
            owner = finding.optimizer
            if any(name == rule.name and (None in (o, owner) or o == owner) for name, o in explained):
                continue
            key = (finding.rule, finding.file, finding.line, finding.source)
            if key in found:  # one line, in several ranks or for several objectives
                before = found[key]
                found[key] = replace(before, times=before.times + finding.times)
                continue
            found[key] = finding
        mine = [finding for finding in found.values() if finding.rule == rule.name and finding.severity != "note"]
        explained += [(name, finding.optimizer) for finding in mine for name in rule.explains]
    return sorted(found.values(), key=lambda finding: SEVERITIES.index(finding.severity))
