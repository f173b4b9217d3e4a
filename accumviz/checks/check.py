"""The verb: every rule in turn, root causes first, one finding for one cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks import (
    across_ranks,
    batch_coupling,
    distributed,
    divisors,
    epoch_end,
    multi_model,
    order,
    ownership,
    precision,
    token_weights,
    uneven,
    windows,
)
from accumviz.checks.analysis import Case
from accumviz.checks.report import SEVERITIES, Finding, Report
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.ledger.lifecycle import inherited

# The rank and the number of an optimizer: of several files each counts its own.
_Owner = tuple[int | None, int] | None

_SHARES = "shares"
_MEMORY = "memory"
# What a recording's notes say of training that it could not see.
_LACKING = ("CUDA graph", "not recorded")


class Rule(NamedTuple):
    """A rule: its name, the function that finds, what it explains (no finding of its own then), and what it needs.

    `compare` finds instead where ranks have to be compared, in what each of them told of itself.
    """

    name: str
    find: Callable[[Case], Iterator[Finding]] | None
    explains: tuple[str, ...] = ()
    needs: str = ""
    compare: Callable[[across_ranks.Compared], Iterator[Finding]] | None = None


# Root causes stand before what follows from them.
RULES = (
    Rule("step-before-backward", multi_model.step_before_backward),
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
        (
            "zero-grad-inside-window",
            "tail-dropped",
            "clip-on-the-wrong-side",
            "zero-tensor-drift",
        ),
    ),
    Rule(
        "zero-grad-inside-window",
        windows.zero_grad_inside_window,
        (
            "tail-dropped",
            "partial-window-underscaled",
            "token-mean-of-means",
            "window-collapses-at-end",
            "wrong-divisor",
        ),
    ),
    # A step that the scaler takes, and asks of all its gradients, is skipped where one is infinite.
    Rule(
        "backward-after-unscale",
        precision.backward_after_unscale,
        ("clip-per-micro-batch", "clip-scaled-grads", "nonfinite-micro-batch"),
    ),
    Rule(
        "bypass-scaler-step",
        precision.bypass_scaler_step,
        ("clip-scaled-grads", "nonfinite-micro-batch"),
    ),
    Rule("nonfinite-micro-batch", precision.nonfinite_micro_batch),
    Rule("clip-scaled-grads", precision.clip_scaled_grads, ("clip-per-micro-batch",)),
    Rule("clip-per-micro-batch", order.clip_per_micro_batch),
    Rule("clip-on-the-wrong-side", order.clip_on_the_wrong_side),
    Rule(
        "gan-gradient-leak",
        multi_model.gan_gradient_leak,
        ("tail-dropped", "leftover-carried", "loss-not-divided"),
    ),
    Rule(
        "window-collapses-at-end",
        epoch_end.window_collapses_at_end,
        ("partial-window-underscaled",),
    ),
    Rule(
        "fsdp2-zero-keeps-unsharded",
        distributed.fsdp2_zero_keeps_unsharded,
        (
            "leftover-carried",
            "tail-dropped",
            "fsdp-no-sync-memory",
            "partial-window-underscaled",
            "parameter-outside-or-twice",
        ),
    ),
    Rule("leftover-carried", epoch_end.leftover_carried, ("tail-dropped",), _SHARES),
    Rule(
        "double-division",
        divisors.double_division,
        ("partial-window-underscaled",),
        _SHARES,
    ),
    Rule(
        "wrong-divisor",
        divisors.wrong_divisor,
        (),
        _SHARES,
        across_ranks.divided_by_ranks,
    ),
    Rule(
        "partial-window-underscaled",
        epoch_end.partial_window_underscaled,
        ("tail-dropped",),
        _SHARES,
    ),
    Rule("tail-dropped", epoch_end.tail_dropped),
    Rule(
        "token-mean-of-means",
        token_weights.token_mean_of_means,
        ("rank-token-weight", "loss-not-divided"),
        _SHARES,
    ),
    Rule(
        "ascent-gradient-kept",
        windows.ascent_gradient_kept,
        ("loss-not-divided",),
        _SHARES,
    ),
    Rule("loss-not-divided", divisors.loss_not_divided, needs=_SHARES),
    Rule(
        "scheduler-per-micro-batch",
        order.scheduler_per_micro_batch,
        ("scheduler-on-skipped-step",),
    ),
    Rule("scheduler-on-skipped-step", precision.scheduler_on_skipped_step),
    Rule(
        "ddp-unsynced-step",
        order.averaged_after_the_step,
        ("no-sync-excludes-forward", "uneven-rank-backwards", "rank-token-weight"),
        compare=across_ranks.ddp_unsynced_step,
    ),
    Rule("uneven-rank-backwards", None, compare=across_ranks.uneven_rank_backwards),
    Rule("no-sync-excludes-forward", distributed.no_sync_excludes_forward),
    Rule("rank-token-weight", None, (), _SHARES, across_ranks.rank_token_weight),
    Rule("fsdp-no-sync-memory", distributed.fsdp_no_sync_memory),
    Rule("graph-retained", multi_model.graph_retained, needs=_MEMORY),
    Rule("low-precision-accumulation", precision.low_precision_accumulation),
    Rule("zero-tensor-drift", multi_model.zero_tensor_drift),
    Rule("parameter-outside-or-twice", ownership.parameter_outside_or_twice),
    Rule("fsdp1-local-clip", distributed.fsdp1_local_clip),
    Rule("ddp-static-graph-no-sync", distributed.ddp_static_graph_no_sync),
    Rule("micro-batch-side-effects", batch_coupling.micro_batch_side_effects),
    Rule("contrastive-accumulation", batch_coupling.contrastive_accumulation),
    # Only where no rule before them has named the cause.
    Rule("uneven-shares", uneven.uneven_shares, needs=_SHARES),
    Rule("sums-differ", uneven.sums_differ, needs=_SHARES),
)
_LAST = frozenset({"uneven-shares", "sums-differ"})


def check(recording: Ledger | Recorded) -> Report:
    """Look for the known mistakes of training loops in a recording.

    `recording` is what `record` gave, or a ledger. The report has findings, each with its line, its
    numbers and its cure; or it says that the loop is healthy; or that nobody can tell, and why.

    >>> from accumviz.ledger.ledger import Ledger, Parameter
    >>> row = dict(kind="backward", label="loss", contribution={"w": 1.0}, grad={"w": 1.0})
    >>> check(Ledger.build([Parameter("w", (1,), optimizers=(0,))], [row])).reason
    'no optimizer stepped while it was recorded'
    """
    judged = _judge(recorded(recording, "check"), None)
    found = _one_for_each_cause([judged])
    return Report(
        tuple(found),
        judged.reason,
        judged.unjudged,
        judged.counts,
        judged.condition,
    )


def check_ranks(ledgers: Iterable[Ledger]) -> Report:
    """As `check` of all ranks' ledgers in one, with one of them in memory at a time.

    Events are counted in each rank's own file; a finding says whose they are. `ledgers` are taken one after the other.
    """
    judged: list[_Judged] = []
    for place, ledger in enumerate(ledgers):
        judged.append(_judge(ledger, int(ledger.meta.get("rank", place))))
        del ledger
    counts: dict[str, int] = {}
    unjudged: dict[str, str] = {}
    for one in judged:
        for what, many in one.counts.items():
            counts[what] = counts.get(what, 0) + many
        for rule, why in one.unjudged.items():
            unjudged.setdefault(rule, f"rank {one.rank}: {why}")
    whose: dict[str, list[int | None]] = {}
    for one in judged:
        if one.reason:
            whose.setdefault(one.reason, []).append(one.rank)
    alike = len(whose) == 1 and len(next(iter(whose.values()))) == len(judged)
    reasons = [
        why
        if alike
        else f"rank{'s' * (len(them) > 1)} {', '.join(map(str, them))}: {why}"
        for why, them in whose.items()
    ]
    condition = next((one.condition for one in judged if one.condition), "")
    return Report(
        tuple(_one_for_each_cause(judged)),
        "; ".join(reasons),
        unjudged,
        counts,
        condition,
    )


class _Judged(NamedTuple):
    """What one ledger came to: what each rule found, and what it tells those that compare."""

    rank: int | None
    found: dict[str, list[Finding]]
    facts: across_ranks.Facts | None
    reason: str
    unjudged: dict[str, str]
    counts: dict[str, int]
    condition: str = ""


def _judge(ledger: Ledger, rank: int | None) -> _Judged:
    kinds = {
        kind: int(ledger.columns.where("kind", kind).sum())
        for kind in ("backward", "step")
    }
    counts = {
        "events": len(ledger),
        "backwards": kinds["backward"],
        "steps": kinds["step"],
    }
    reason = _nothing_to_judge(ledger, kinds)
    if reason:
        # What stops a script in its first window is found all the same.
        early = (
            distributed.ddp_static_graph_no_sync(Case(ledger))
            if kinds["backward"]
            else ()
        )
        stopped = [replace(finding, rank=rank) for finding in early]
        facts = across_ranks.facts(Case(ledger), rank) if kinds["backward"] else None
        return _Judged(
            rank, {"ddp-static-graph-no-sync": stopped}, facts, reason, {}, counts
        )
    case = Case(ledger)
    found: dict[str, list[Finding]] = {}
    explained: list[tuple[str, _Owner]] = []
    for rule in RULES:
        mine = (
            []
            if rule.find is None
            else [f for f in rule.find(case) if not _explained(explained, f)]
        )
        found[rule.name] = [replace(finding, rank=rank) for finding in mine]
        serious = [finding for finding in mine if finding.severity != "note"]
        explained += [
            (name, _owner(finding))
            for finding in serious
            for name in (*rule.explains, *_LAST)
        ]
    return _Judged(
        rank,
        found,
        across_ranks.facts(case, rank),
        _no_verdict(case),
        _unjudged(case),
        counts,
        uneven.condition(case),
    )


def _explained(explained: list[tuple[str, _Owner]], finding: Finding) -> bool:
    """Whether another finding has said why: of the same optimizer, or of one of which nobody knows."""
    owner = _owner(finding)
    return any(
        name == finding.rule and (None in (o, owner) or o == owner)
        for name, o in explained
    )


def _nothing_to_judge(ledger: Ledger, kinds: dict[str, int]) -> str:
    if not (kinds["backward"] and kinds["step"]) and _cut_short(ledger):
        return _cut_short(ledger)
    if not len(ledger):
        return "nothing was recorded"
    if not kinds["backward"]:
        return "no backward was recorded: what the steps read came from elsewhere"
    if not kinds["step"]:
        return "no optimizer stepped while it was recorded"
    return ""


def _cut_short(ledger: Ledger) -> str:
    """Say why a recording holds less than the script was to do, if it does."""
    if "stopped" in ledger.meta:
        return f"the recording stopped before its end: {ledger.meta['stopped']}"
    if not ledger.complete:
        return "the ledger is incomplete: its process ended before the recording was closed"
    ended = ledger.meta.get("ended")
    every = ended.values() if isinstance(ended, Mapping) else [ended]
    errors = [str(each) for each in every if _is_error(each)]
    return f"the script ended with an error: {errors[0]}" if errors else ""


def _is_error(ended: Any) -> bool:
    """Whether a recording's end is that of a script which raised; whoever interrupts a script may do so anywhere."""
    right = ("", "closed", "exit", "None")
    text = str(ended).partition(":")[0]
    return text not in right and text not in ("KeyboardInterrupt", "SystemExit")


def _no_verdict(case: Case) -> str:
    """Why the silence of the rules says nothing, if it does not."""
    ledger = case.ledger
    if _cut_short(ledger):
        return _cut_short(ledger)
    lacking = [
        str(note)
        for note in case.listed("notes")
        if any(words in str(note) for words in _LACKING)
    ]
    if lacking:
        return f"part of the training is not in the ledger: {lacking[0]}"
    shares = case.shares
    if not case.loops:
        return "no parameter that was recorded belongs to an optimizer that stepped"
    unknown = shares.unknown[case.once]
    if unknown.size and (unknown > 0).all():
        return f"what the micro-batches weigh is not known: {_most(case)}"
    last = {case.ranks[b]: b for b in case.at("backward").tolist()}
    errors = [
        str(ledger[b].details.get("error") or "KeyboardInterrupt")
        for b in last.values()
    ]
    # Who stops a script stops it anywhere.
    raised = [error for error in errors if not error.startswith("KeyboardInterrupt")]
    return f"the last backward raised an error: {raised[0]}" if raised else ""


def _most(case: Case) -> str:
    """The most frequent reason why a share is unknown."""
    unknown = case.shares.unknown
    code, _ = Counter(unknown[unknown > 0].tolist()).most_common(1)[0]
    return case.shares.reasons[code]


def _unjudged(case: Case) -> dict[str, str]:
    """The rules that lacked something, and what."""
    found: dict[str, str] = {}
    unknown = case.shares.unknown[case.once] > 0
    lacking = (
        [f"{int(unknown.sum())} of {unknown.size} shares are unknown: {_most(case)}"]
        if unknown.any()
        else []
    )
    if (
        case.ledger.meta.get("steps_elsewhere")
        and (astray := case.backward & ~case.contributed.any(axis=1)).any()
    ):
        lacking.append(
            f"{int(astray.sum())} of {int(case.backward.sum())} backwards reached no parameter that is recorded, and "
            "an optimizer stepped that is not recorded: what they trained is in no share"
        )
    from_before = inherited(case.ledger)
    if (from_before >= 0).any():
        step = from_before[from_before >= 0].min()
        lacking.append(
            f"the step of event {step} also used what `.grad` held before the recording began, which is in no share"
        )
    for rule in RULES:
        if rule.needs == _SHARES and lacking:
            found[rule.name] = "; ".join(lacking)
        elif (
            rule.needs == _MEMORY
            and np.isnan(case.events.column("saved_after")[case.backward]).all()
        ):
            found[rule.name] = "saved bytes were not measured: record(..., memory=True)"
    return found


def _one_for_each_cause(judged: list[_Judged]) -> list[Finding]:
    found: dict[tuple[str, str, int, str], Finding] = {}
    explained: list[tuple[str, _Owner]] = []
    between: list[
        tuple[str, _Owner]
    ] = []  # by what only a comparison of ranks can find
    facts = [one.facts for one in judged if one.facts is not None]
    compared = across_ranks.Compared(facts) if facts else None
    for rule in RULES:
        mine = [
            f
            for one in judged
            for f in one.found.get(rule.name, ())
            if not _explained(between, f)
        ]
        if rule.compare is not None and compared is not None:
            # In one ledger the optimizers of all ranks are numbered through.
            apart = [
                f if judged[0].rank is not None else replace(f, rank=None)
                for f in rule.compare(compared)
            ]
            apart = [f for f in apart if not _explained(explained, f)]
            between += [(name, _owner(f)) for f in apart for name in rule.explains]
            mine += apart
        for finding in mine:
            key = (finding.rule, finding.file, finding.line, finding.source)
            if key in found:  # one line, in several ranks or for several objectives
                before = found[key]
                found[key] = replace(before, times=before.times + finding.times)
                continue
            found[key] = finding
            if finding.severity != "note":
                explained += [(name, _owner(finding)) for name in rule.explains]
    return sorted(
        found.values(), key=lambda finding: SEVERITIES.index(finding.severity)
    )


def _owner(finding: Finding) -> _Owner:
    return None if finding.optimizer is None else (finding.rank, finding.optimizer)
