"""`check`: run every rule, root causes first, and report one finding for each cause."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from accumviz.checks import order, owners, values, weights, windows
from accumviz.checks import ranks as several
from accumviz.checks.analysis import LedgerAnalysis, OptimizerHistory
from accumviz.checks.report import SEVERITIES, Finding, Findings, Report, rules_named
from accumviz.ledger.ledger import Ledger, Recorded, recorded
from accumviz.show import counted

_SHARES = "shares"
_MEMORY = "memory"
# What a recording's notes say of training that it could not see.
_MOVED = "weights were moved by hand between the backwards of a window: what its step is for is not known"
_FED = (
    "steps on gradients that were put into `.grad` by hand, as into 32-bit copies of weights: "
    "which backwards they are from is not known"
)
_LACKING = "not recorded"


class Rule(NamedTuple):
    """A rule: the function that finds, what it explains (no finding then), and what it needs.

    One that `compares` finds in the summaries of several ranks' ledgers, any other in one ledger.
    """

    find: Callable[[Any], Findings]
    explains: tuple[str, ...] = ()
    needs: str = ""
    compares: bool = False

    @property
    def name(self) -> str:
        """The name that findings have."""
        return self.find.__name__.replace("_", "-")


# Said only where no rule before them has named the cause.
_UNEXPLAINED = ("uneven-shares", "sums-differ")
# Root causes stand before what follows from them.
RULES = (
    Rule(windows.gradient_applied_twice, ("missing-zero-grad",)),
    Rule(
        windows.missing_zero_grad,
        ("gan-gradient-leak", "loss-not-divided", "clip-per-micro-batch"),
    ),
    Rule(windows.zero_before_step),
    Rule(windows.zero_grad_inside_window, ("wrong-divisor",)),
    Rule(order.backward_after_unscale, ("clip-per-micro-batch", "clip-scaled-grads")),
    Rule(values.nonfinite_micro_batch),
    Rule(values.weights_frozen_by_autocast),
    Rule(values.step_lost_in_rounding),
    Rule(order.clip_scaled_grads, ("clip-per-micro-batch",)),
    Rule(order.clip_per_micro_batch),
    Rule(order.clip_on_the_wrong_side),
    Rule(order.clip_of_nothing),
    Rule(owners.gan_gradient_leak, ("partial-window-underscaled",)),
    Rule(several.fsdp2_zero_keeps_unsharded, ("leftover-carried",)),
    Rule(weights.leftover_carried, ("tail-dropped",), _SHARES),
    Rule(weights.double_division, needs=_SHARES),
    Rule(weights.wrong_divisor, needs=_SHARES),
    Rule(weights.partial_window_underscaled, ("tail-dropped",), _SHARES),
    Rule(windows.tail_dropped),
    Rule(
        weights.token_mean_of_means,
        ("rank-token-weight", "loss-not-divided"),
        _SHARES,
    ),
    Rule(several.summed_over_ranks, ("loss-not-divided",), _SHARES),
    Rule(weights.loss_not_divided, needs=_SHARES),
    Rule(order.scheduler_per_micro_batch),
    Rule(order.schedule_too_long),
    Rule(several.ddp_unsynced_step, ("no-sync-excludes-forward",)),
    Rule(several.no_sync_excludes_forward),
    Rule(several.rank_token_weight, needs=_SHARES, compares=True),
    Rule(values.graph_retained, needs=_MEMORY),
    Rule(owners.parameter_outside_or_twice),
    Rule(weights.uneven_shares, needs=_SHARES),
    Rule(weights.sums_differ, needs=_SHARES),
)


def check(
    recording: Ledger | Recorded,
    *,
    ignore: str | Iterable[str] = (),
) -> Report:
    """Look for the known mistakes of training loops in a recording.

    `recording` is what `record` gave, or a ledger. The report has findings, each with its line, its
    numbers and a suggestion; or it says that the loop is healthy; or that it cannot be judged, and why.

    `ignore` names rules whose findings are set aside, as those are whose line ends with
    `# accumviz: ignore[rule]`. The report counts them, and calls a loop healthy only on the condition that
    they are meant. Raises `ValueError` for a name that no rule has.

    >>> from accumviz.ledger.ledger import Ledger, Parameter
    >>> row = dict(kind="backward", label="loss", contribution={"w": 1.0}, grad={"w": 1.0})
    >>> check(Ledger.build([Parameter("w", (1,), optimizers=(0,))], [row])).reason
    "no optimizer stepped while it was recorded; one of a class that is none of torch's is not seen"
    """
    ignored = rules_named(ignore)
    return _report([_judge(recorded(recording, "check"), None)], ignored)


def check_ranks(
    ledgers: Iterable[Ledger],
    *,
    ignore: str | Iterable[str] = (),
) -> Report:
    """Judge all ranks' ledgers as one, with one of them in memory at a time; `ignore` as for `check`.

    Events are counted in each rank's own file; a finding says whose they are. `ledgers` are taken one after the other.
    """
    ignored = rules_named(ignore)
    judged: list[_Judged] = []
    for place, ledger in enumerate(ledgers):
        judged.append(_judge(ledger, int(ledger.meta.get("rank", place))))
        del ledger
    return _report(judged, ignored)


def _report(judged: list[_Judged], rules: Set[str]) -> Report:
    """Put together what each ledger came to; of a reason that not all have, say whose it is."""
    counts: Counter[str] = Counter()
    unjudged: dict[str, str] = {}
    for one in judged:
        counts.update(one.counts)
        for rule, why in one.unjudged.items():
            unjudged.setdefault(rule, one.of_rank(why))
    of_one = next(filter(None, (one.condition for one in judged)), "")
    of_all = next(several.conditions_of_ranks(_summaries(judged)), "")
    findings = _one_for_each_cause(judged)
    ignored = [each for each in findings if _is_ignored(each, rules)]
    serious = any(finding.severity != "note" for finding in ignored)
    meant = "what is ignored is meant" if serious else ""
    return Report(
        tuple(_with_misspelt(each) for each in findings if each not in ignored),
        _reason(judged),
        unjudged,
        dict(counts),
        ", and if ".join(filter(None, (meant, of_one, of_all))),
        tuple(ignored),
        judged[0].steps,
        judged[0].losses,
    )


def _is_ignored(finding: Finding, rules: Set[str]) -> bool:
    """Return whether a finding is to be ignored: by its rule's name, or by a comment on its line."""
    return finding.rule in rules or finding.rule in _ignored_on_its_line(finding)


def _ignored_on_its_line(finding: Finding) -> list[str]:
    line = dict(finding.around).get(finding.line, finding.source)
    comment = re.search(r"#\s*accumviz:\s*ignore\[(.*?)\]", line)
    return re.split(r"[,\s]+", comment[1]) if comment else []


def _with_misspelt(finding: Finding) -> Finding:
    """Say in a finding which names of the comment on its line no rule has."""
    known = {rule.name for rule in RULES}
    for name in _ignored_on_its_line(finding):
        if name not in known:
            said = f"{finding.cause} No rule is called {name!r}, as the comment on this line has it."
            finding = replace(finding, cause=said)
    return finding


def _reason(judged: list[_Judged]) -> str:
    """Return why there is no verdict; where not all ledgers have that reason, whose the first one is."""
    reasons = {one.reason for one in judged}
    if len(reasons) == 1:
        return reasons.pop()
    return next(one.of_rank(one.reason) for one in judged if one.reason)


def _summaries(judged: Sequence[_Judged]) -> list[several.RankSummary]:
    return [one.summary for one in judged if one.summary is not None]


@dataclass
class _Judged:
    """The judgement of one ledger: what each rule found, and what those that compare ranks need."""

    rank: int | None
    counts: dict[str, int]
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    summary: several.RankSummary | None = None
    reason: str = ""
    unjudged: dict[str, str] = field(default_factory=dict)
    condition: str = ""
    steps: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    def of_rank(self, text: str) -> str:
        """Say of a text whose it is, where there are files of several ranks."""
        return text if self.rank is None else f"rank {self.rank}: {text}"


def _judge(ledger: Ledger, rank: int | None) -> _Judged:
    backwards = int(ledger.events.where("kind", "backward").sum())
    steps = int(ledger.events.where("kind", "step").sum())
    skipped = int(ledger.events.skipped.sum())
    counts = {"events": len(ledger), "backwards": backwards, "steps": steps - skipped}
    if skipped:
        counts["skipped steps"] = skipped
    judged = _Judged(rank, counts)
    judged.reason = _nothing_to_judge(ledger, backwards, steps)
    if not backwards:
        return judged
    analysis = LedgerAnalysis(ledger)
    judged.steps = tuple(map(_taken, analysis.optimizers))
    judged.losses = tuple(owners.losses(analysis))
    judged.summary = several.summarise(analysis, rank)
    for rule in RULES:
        every = () if rule.compares else rule.find(analysis)
        judged.findings[rule.name] = [
            replace(each, rule=rule.name, rank=rank) for each in every
        ]
    if judged.reason:
        return judged
    judged.reason = next(filter(None, _reasons(analysis)), "")
    judged.unjudged = _unjudged(analysis)
    judged.condition = ", and if ".join(dict.fromkeys(_conditions(analysis)))
    return judged


def _taken(optimizer: OptimizerHistory) -> str:
    """Say what an optimizer did: its steps, what they consumed, and at which learning rate."""
    many = counted(optimizer.steps.size, "step")
    many += f" on {owners.with_gradients(optimizer)}"
    pieces = many, weights.sums_of_shares(optimizer), order.learning_rates(optimizer)
    return f"{optimizer.name}: {', '.join(filter(None, pieces))}."


def _conditions(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say what has to be meant, and on which line, each condition once or more."""
    for module in (windows, weights, owners, order, several, values):
        for condition in module.conditions(analysis):
            yield analysis.placed(*condition)


def _nothing_to_judge(ledger: Ledger, backwards: int, steps: int) -> str:
    if backwards and steps:
        return ""
    said = "no backward was recorded"
    if backwards:
        said = "no optimizer stepped while it was recorded; one of a class that is none of torch's is not seen"
    if not len(ledger):
        said = "nothing was recorded"
    return _cut_short(ledger) or said


def _cut_short(ledger: Ledger) -> str:
    """Say why a recording holds less than the script was to do, if it does."""
    if "stopped" in ledger.meta:
        return f"the recording stopped before its end: {ledger.meta['stopped']}"
    if not ledger.complete:
        return "the ledger is incomplete: its process ended before the recording was closed"
    return _error_at_the_end(ledger.meta.get("ended"))


def _error_at_the_end(ended: Any) -> str:
    """Say with which error a script ended, or the script of one rank of several."""
    every = ended.values() if isinstance(ended, Mapping) else [ended]
    error = next(filter(_is_error, every), None)
    return f"the script ended with an error: {error}" if error else ""


def _is_error(ended: Any) -> bool:
    """Return whether a script or a backward ended with an error; an interrupt may come anywhere."""
    if ended in (None, "", "closed", "exit"):
        return False
    return not str(ended).startswith(("KeyboardInterrupt", "SystemExit"))


def _reasons(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say what keeps the training, or one of its optimizers, from being judged; some may be empty."""
    yield _cut_short(analysis.ledger)
    for note in map(str, analysis.listed("notes")):
        if _LACKING in note:
            yield f"part of the training is not in the ledger: {note}"
    if not analysis.optimizers:
        yield "no parameter that was recorded belongs to an optimizer that stepped"
    for optimizer in analysis.optimizers:
        yield from _reasons_of(optimizer)
    yield from _last_errors(analysis)


def _last_errors(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say which error the last backward of each rank raised."""
    last = {analysis.ranks[b]: b for b in analysis.at["backward"].tolist()}
    for b in last.values():
        error = analysis.detail(b, "error")
        if _is_error(error):
            yield f"the last backward raised an error: {error}"


def _reasons_of(optimizer: OptimizerHistory) -> Iterator[str]:
    """Say what keeps an optimizer from being judged."""
    if optimizer.is_fed_by_hand:
        yield f"{optimizer.name} {_FED}"
    if optimizer.steps.size and not optimizer.windows:
        yield f"no backward in the ledger brought what {optimizer.name} steps on"
    yield _unread(optimizer)
    # A window holds backwards of several places of the weights, as a SAM's does.
    moved = optimizer.moved & ~optimizer.closures
    later = [b for used in optimizer.windows.values() for b in used[1:]]
    if moved[later].any():
        yield _MOVED


def _unread(optimizer: OptimizerHistory) -> str:
    """Say why it is not known what an optimizer's steps weighed, if it is not.

    Of the looks at a loss that a closure takes, the last counts.
    """
    shares = optimizer.consumed
    counts = ~shares.in_closure | shares.in_closure.all()
    counts &= ~weights.excused(optimizer)
    unknown = shares.unknown[counts]
    if not unknown.any():
        return ""
    said = "what the micro-batches weigh is not known"
    if not unknown.all():
        said = _how_many(unknown)
    of = f" for {optimizer.name}" if len(optimizer.optimizers) > 1 else ""
    return f"{said}{of}: {_most_frequent(optimizer, unknown)}"


def _how_many(unknown: np.ndarray) -> str:
    return f"{np.count_nonzero(unknown)} of {unknown.size} shares are unknown"


def _most_frequent(analysis: LedgerAnalysis, unknown: np.ndarray) -> str:
    """Return the most frequent reason why a share is unknown."""
    codes = Counter(unknown[unknown > 0].tolist())
    [(code, _)] = codes.most_common(1)
    return analysis.shares.reasons[code]


def _unjudged(analysis: LedgerAnalysis) -> dict[str, str]:
    """Return the rules that lacked something, and what."""
    saved = analysis.events.column("saved_after")[analysis.backward]
    lacking = {_SHARES: "; ".join(_lacking_of_shares(analysis))}
    if np.isnan(saved).all():
        lacking[_MEMORY] = (
            "saved bytes were not measured: record(..., memory=True), on torch 2.10 or newer"
        )
    return {rule.name: lacking[rule.needs] for rule in RULES if lacking.get(rule.needs)}


def _lacking_of_shares(analysis: LedgerAnalysis) -> Iterator[str]:
    """Say what is in no share, or of which shares."""
    unknown = analysis.shares.unknown[analysis.shares.term == 0]
    if unknown.any():
        yield f"{_how_many(unknown)}: {_most_frequent(analysis, unknown)}"
    astray = analysis.backward & ~analysis.contributed.any(axis=1)
    if analysis.ledger.meta.get("steps_elsewhere") and astray.any():
        yield (
            f"{astray.sum()} of {analysis.backward.sum()} backwards reached no parameter that is recorded, and an "
            "optimizer stepped that is not recorded: what they trained is in no share"
        )
    if analysis.ledger.flow.used_from_before():
        yield "a step also used what `.grad` held before the recording began, which is in no share"


def _one_for_each_cause(judged: list[_Judged]) -> list[Finding]:
    """Put together what the rules have found, but for what another finding explains."""
    findings: dict[tuple[str, str, int, str], Finding] = {}
    explained: dict[str, set[Any]] = defaultdict(set)
    for rule in RULES:
        for finding in _findings(rule, judged):
            if _is_explained(finding, explained[rule.name]):
                continue
            if finding.severity != "note":
                for name in (*rule.explains, *_UNEXPLAINED):
                    explained[name].add(_owner(finding))
            # One line, in several ranks or for several objectives, is one finding.
            key = finding.rule, finding.file, finding.line, finding.source
            before = findings.setdefault(key, replace(finding, times=0))
            findings[key] = replace(before, times=before.times + finding.times)
    return sorted(findings.values(), key=lambda each: SEVERITIES.index(each.severity))


def _findings(rule: Rule, judged: list[_Judged]) -> Findings:
    """Return what a rule has found in each rank, and by comparing them."""
    for one in judged:
        yield from one.findings.get(rule.name, ())
    if rule.compares:
        for finding in rule.find(_summaries(judged)):
            # In one ledger the optimizers of all ranks are numbered through.
            rank = finding.rank if judged[0].rank is not None else None
            yield replace(finding, rule=rule.name, rank=rank)


def _is_explained(finding: Finding, owners: set[Any]) -> bool:
    """Return whether another finding has said why, of the same optimizer or of all."""
    owner = _owner(finding)
    return bool(owners) if owner is None else not owners.isdisjoint((owner, None))


def _owner(finding: Finding) -> tuple[int | None, int] | None:
    """Return whose optimizer a finding is about: of several files each counts its own."""
    return None if finding.optimizer is None else (finding.rank, finding.optimizer)
