"""Rules on ledgers written by hand: each mistake, the loop without it, the mistake in disguise; and what is none."""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import accumviz as av
from accumviz.checks import report as reports
from accumviz.checks.check import RULES, check_ranks
from accumviz.checks.report import Report
from accumviz.ledger.ledger import KINDS, Ledger, Parameter
from accumviz.views.tables import report_data
from tests.by_hand import Play, of, played, term, windows
from tests.conftest import ROOT
from tests.thorough import examples


def of_sizes(sizes: tuple[int, ...]) -> Play:
    """Two windows of means over so many elements."""
    return of(*[[term(n, 1 / len(sizes)) for n in sizes]] * 2)


def _saved(*held: int, each: int = 0) -> Play:
    """Windows of two backwards, before which so many graphs are kept."""
    made = Play()
    for many in made.each(held):
        for _ in range(2):
            made.backward(term(8, 0.5), numbers=(many * 120e3 + 120e3, (many + each) * 120e3))
    return made


RIGHT = "4444csz" * 3
# The parameters of two networks, and the optimizer that has each.
MAKER_AND_JUDGE = {"g": 0, "d": 1}


def judged(made: Play | Ledger) -> Report:
    return av.check(made.ledger if isinstance(made, Play) else made)


def found(made: Play | Ledger) -> list[str]:
    return [finding.rule for finding in judged(made).findings]


def _ddp(armed: list[bool], no_sync: list[bool], seed: int = 0) -> Play:
    play = Play(seed=seed)
    for _ in play.each(range(2)):
        for one, other in zip(armed, no_sync, strict=True):
            play.backward(armed=one, armed_line=3, no_sync=other)
            if one:
                play.weights = {n: {b: w / 2 for b, w in ws.items()} for n, ws in play.weights.items()}
                play.touched(play._put("sync", within="backward", details={"op": "all-reduce", "ranks": 2}), ["w", "v"])
    return play


def _sharded(*doings: str) -> Ledger:
    """FSDP2's two places: `shard` is `.grad`, `whole` is where no_sync gathers."""
    parameters = [
        Parameter("shard", (2,), optimizers=(0,)),
        Parameter("whole", (4,), "bfloat16", optimizers=(0,), unsharded_of="shard"),
    ]
    rows: list[dict[str, Any]] = []
    grad: dict[str, Any] = {}
    for doing in doings:
        row: dict[str, Any] = {"kind": doing, "file": "a.py", "line": len(doing)}
        if doing == "backward":
            grad = grad | {"whole": [1.0] * 4}
            row |= {"label": "loss", "contribution": {"whole": [1.0] * 4}, "details": {"terms": [term(8, 0.5)]}}
        elif doing == "sync":
            grad = {"shard": [1.0] * 2}
            details = {"op": "reduce-scatter", "ranks": 2}
            row |= {"within": "backward", "contribution": {"shard": [1.0] * 2}, "details": details}
        elif doing == "zero_grad":
            grad = {name: value for name, value in grad.items() if name == "whole"}
        elif doing == "edit":  # FSDP1's forward erases what `zero_grad` meant
            grad = {}
        rows.append(row | {"grad": grad})
    return Ledger.build(parameters, rows)


def test_a_zeroing_that_does_not_reach_the_gathered_sum_is_found() -> None:
    stale = ("backward", "sync", "step", "zero_grad", "backward", "zero_grad", "backward", "sync", "step", "zero_grad")
    assert found(_sharded(*stale)) == ["fsdp2-zero-keeps-unsharded"]
    (judged,) = av.check(_sharded(*stale)).findings
    assert "no_sync" not in judged.cause  # which FSDP2 does not have
    erased_late = (*stale[:6], "edit", *stale[6:])
    assert "fsdp2-zero-keeps-unsharded" not in found(_sharded(*erased_late))


def test_a_sum_that_is_never_scattered_and_not_zeroed_is_one_finding() -> None:
    (judged,) = av.check(_sharded(*["backward", "backward", "step", "zero_grad"] * 3)).findings
    assert judged.rule == "fsdp2-zero-keeps-unsharded" and judged.cause.endswith("to them stays.")


def _ranks(*plays: Play) -> Ledger:
    for rank, play in enumerate(plays):
        play.rank = rank
    return Ledger.merge([play.ledger for play in plays])


def _synced(elements: int, factor: float, times: int = 3, seed: int = 0, loss: float = math.nan) -> Play:
    play = Play(seed=seed)
    for n in play.each(range(times)):
        play.backward(term(elements, factor), armed=True, armed_line=3, no_sync=False)
        play.rows[-1]["loss"] = loss / (1 + n)
        play.sync(2)
    return play


def test_ranks_that_have_no_average_in_common_count_their_own() -> None:
    def apart() -> list[Play]:
        return [_synced(own, 1.0, seed=seed) for seed, own in enumerate((30, 30, 110, 110))]

    assert found(_ranks(*apart())) == []  # a model in each of two groups of two
    plays = apart()[1:3]
    for play in plays:  # a model on each
        play.rows = [row for row in play.rows if row["kind"] != "sync"]
    assert "rank-token-weight" not in found(_ranks(*plays))


def _of_all_ranks(*windows: tuple[list[dict[str, Any]], ...]) -> Ledger:
    """Windows of two ranks, each with its own terms."""
    plays = [Play(), Play()]
    for window in windows:
        for play, terms in zip(plays, window, strict=True):
            for one in terms:
                last = one is terms[-1]
                play.backward(one, armed=last, armed_line=3, no_sync=not last)
            play.sync(2)
            play.step()
            play.zero()
    return _ranks(*plays)


@pytest.mark.parametrize(
    ("terms", "elements"),
    [
        # A rank's elements are those of its whole window.
        (([term(3, 1 / 4, "sum"), term(1, 1 / 4, "sum")], [term(2, 1 / 6, "sum"), term(4, 1 / 6, "sum")]), [4, 6]),
        # Each rank divides by a number of micro-batches of its own.
        (([term(8, 1 / 2)] * 2, [term(8, 1 / 3)] * 3), [16, 24]),
    ],
)
def test_ranks_that_divide_by_a_number_of_their_own_are_found(terms: Any, elements: list[int]) -> None:
    (judged,) = av.check(_of_all_ranks(*[terms] * 3)).findings
    assert (judged.rule, judged.severity, judged.times) == ("rank-token-weight", "warning", 3)
    assert judged.evidence["elements on each rank"] == elements
    weight = judged.evidence["weight per element on each rank, before the average"]
    assert weight == pytest.approx([1 / many for many in elements])


def _divided(elements: int, factor: float) -> dict[str, Any]:
    return term(elements, factor, "sum") | {"divisor": 1 / factor}


def _counted_over_ranks(times: int, loss: Callable[[int, float], Any] = _divided) -> Ledger:
    """Sums over texts, divided by the elements of all ranks, and multiplied `times`."""
    lengths = [((3, 1), (2, 4)), ((5, 2), (2, 2)), ((7, 1), (1, 9)), ((6, 2), (1, 2))]
    every = [(one, times / sum(map(sum, one))) for one in lengths]
    return _of_all_ranks(*(tuple([loss(n, by) for n in own] for own in one) for one, by in every))


def _one_steps_less_often(kept: int) -> Ledger:
    plays = [_synced(8, 1.0, times=4) for _ in range(2)]
    steps = [n for n, row in enumerate(plays[0].rows) if row["kind"] == "step"]
    for skipped in reversed(steps[kept:]):
        del plays[0].rows[skipped]
    return _ranks(*plays)


def _by_themselves() -> Ledger:
    """Two ranks that share no gradient."""
    plays = [Play(seed=seed, rank=seed) for seed in range(2)]
    for play in plays * 5:
        for _ in range(2):
            play.backward(term(8, 0.5), armed=False, armed_line=3, no_sync=True)
        play.step()
        play.zero()
    return _ranks(*plays)


@pytest.mark.parametrize(
    "plays",
    [
        lambda: (_synced(30, 1.0), _synced(110, 1.0)),
        lambda: (_synced(30, 1.0), _synced(30, 1.0)),
        lambda: (_synced(8, 1.0, times=3), _synced(8, 1.0, times=2)),
        lambda: [_ddp([False] * 4, [True] * 3 + [False], seed=seed) for seed in (0, 3)],
        lambda: [_ddp([False] * 4, [True] * 3 + [False]) for _ in range(2)],
        lambda: (played("4l4l4l4szl" * 2), played("4444szl" * 2)),
    ],
)
def test_files_that_are_judged_one_after_the_other_say_what_they_say_as_one(plays: Callable[[], Any]) -> None:
    every = tuple(plays())
    whole = av.check(_ranks(*every))
    apart = check_ranks(iter([play.ledger for play in every]))
    assert [(f.rule, f.severity, f.times, f.line) for f in apart.findings] == [
        (f.rule, f.severity, f.times, f.line) for f in whole.findings
    ]
    assert apart.verdict == whole.verdict
    assert apart.counts["backwards"] == whole.counts["backwards"]
    assert all(f.rank in (0, 1) for f in apart.findings)
    if apart.findings:
        assert f"{apart.findings[0].rule}  rank 0" in repr(apart)


def test_a_mistake_of_one_rank_explains_nothing_on_another() -> None:
    plays = [played("4444s" * 3), played("(4444sz44)" * 2)]
    for rank, play in enumerate(plays):
        play.rank = rank
    findings = check_ranks([play.ledger for play in plays]).findings
    assert {(f.rule, f.rank) for f in findings} >= {("missing-zero-grad", 0), ("leftover-carried", 1)}


def test_a_rank_that_cannot_be_judged_is_named() -> None:
    one = played(RIGHT).ledger
    two = Ledger(one.parameters, one.events, one.contribution, one.grad, one.state, meta=one.meta, complete=False)
    report = check_ranks([one, two])
    assert report.verdict == "no verdict"
    assert report.reason.startswith("rank 1: the ledger is incomplete")


def test_steps_that_the_scaler_skipped_are_counted_by_themselves() -> None:
    counts = av.check(played("1Sz1Sz1Sz1sz").ledger).counts
    assert (counts["steps"], counts["skipped steps"]) == (1, 3)


def _beside(factor: float) -> Play:
    """A loss that is divided, and another one of the same backward that may not be."""
    return of(*[[(term(8, 0.25), term(8, factor, op="MseLossBackward0"))] * 4] * 2)


def test_a_script_that_ended_with_an_error_is_not_healthy() -> None:
    play = played(RIGHT)
    for ended, verdict in (("ValueError: x", "no verdict"), ("exit", "healthy"), ("KeyboardInterrupt", "healthy")):
        play.meta["ended"] = ended
        assert av.check(play.ledger).verdict == verdict


def _helper() -> Play:
    """Two losses through one helper: their innermost line is the same, the ones above it are not."""
    play = Play()
    for _ in play.each(range(3)):
        for caller in (30, 31):
            play.backward(term(8, 1.0))
            play.rows[-1]["frames"] = (("train.py", 10, "loss.backward()"), ("train.py", caller, "backward(x)"))
    return play


def _by_autograd_grad() -> Play:
    play = Play()
    for _ in play.each(range(3)):
        play._put("edit", grad={"w": [1.0] * 3, "v": [1.0] * 3})
    return play


def _master_copies() -> Play:
    play = Play({"w": None, "master": 0})
    for _ in play.each(range(3)):
        for _ in range(2):
            play.backward(term(8, 1.0), into=("w",))
        play.grad["master"] = play.grad.pop("w")
        play.touched(play._put("edit"), ["w", "master"])
    return play


def test_a_window_that_is_zeroed_in_one_of_two_networks_is_found() -> None:
    (finding,) = av.check(played("z[0]4z[0]4z[0]4z[0]4s[0]s[1]z" * 2, MAKER_AND_JUDGE).ledger).findings
    assert (finding.rule, finding.optimizer, finding.times) == ("zero-grad-inside-window", 0, 6)
    assert finding.evidence["backwards erased, by event"] == [1, 3, 5]


@pytest.mark.parametrize(
    ("divisor", "rules"), [(2, ["wrong-divisor"]), (3, ["wrong-divisor"]), (4, []), (5, ["wrong-divisor"]), (8, [])]
)
def test_a_divisor_below_the_length_of_the_windows_is_a_warning_and_one_far_above_a_condition(
    divisor: int, rules: list[str]
) -> None:
    report = av.check(played(f"{divisor}{divisor}{divisor}{divisor}sz" * 3, said=True).ledger)
    assert [finding.rule for finding in report.findings] == rules
    assert report.condition == (
        "" if divisor == 4 else f"a sum of {4 / divisor:.3g} is meant in every step (train.py:10)"
    )


@pytest.mark.parametrize("into", [("d", "e"), ("e",)])
def test_what_another_loss_alone_reaches_is_not_trained_and_has_to_be_meant(into: tuple[str, ...]) -> None:
    play = Play({"g": 0, "d": 1, "e": 1})
    for _ in range(4):
        play.zero(1)
        play.backward(term(8, 1), into=into, label="loss_d", line=11)
        play.step(1)
        play.zero(0)
        play.backward(term(8, 1), into=("g", "d", "e"), label="loss_g", line=12)  # what leaks is zeroed in time
        play.step(0)
    report = av.check(play.ledger)
    assert report.findings == ()
    assert ("SGD 1 is meant to have d, of which no loss" in report.condition) == (into == ("e",)), report.condition


@pytest.mark.parametrize(
    ("counts", "factor", "carried"),
    [
        ((2, 2, 2, 4, 4), 0.5, False),
        ((2, 2, 2, 3, 3), 0.5, False),
        ((2, 2, 4), 0.5, False),
        ((3, 2, 2, 2), 0.5, False),
        ((4, 6, 4, 6), 0.25, True),
        ((4, 7, 7), 0.25, True),
    ],
)
def test_windows_that_grow_and_a_first_one_that_is_too_long_carry_nothing_over(
    counts: tuple[int, ...], factor: float, carried: bool
) -> None:
    assert found(windows(*counts, factor=factor)).count("leftover-carried") == carried


def _drawn(*windows: str, factor: float = 0.25, lines: bool = False) -> Play:
    """Each micro-batch is of one of several tasks, which have losses of their own, on one line or on two."""
    play = Play()
    for tasks in play.each(windows):
        for task in tasks:
            op = "MseLossBackward0" if task == "b" else "NllLossBackward0"
            play.backward(term(8, factor, op=op), line=40 + (lines and task == "b"))
    return play


@pytest.mark.parametrize("lines", [False, True])
def test_a_window_of_several_tasks_is_as_long_as_all_of_its_micro_batches(lines: bool) -> None:
    tasks = ("aaab", "aaaa", "abab", "bbab", "aaba")
    assert found(_drawn(*tasks, lines=lines)) == []
    (short,) = {f.rule: f for f in av.check(_drawn(*tasks, "ab", lines=lines).ledger).findings}.values()
    assert short.rule == "partial-window-underscaled"
    assert short.evidence["micro-batches"] == 2 and "reads 0.5 of" in short.cause
    for finding in av.check(_drawn(*tasks, factor=1.0, lines=lines).ledger).findings:
        assert finding.rule == "loss-not-divided"
        assert "/ micro_batches_in_this_window)" in finding.suggestion


def test_a_loss_that_some_micro_batches_have_makes_no_window_short() -> None:
    for factor, rules in ((0.5, []), (1.0, ["loss-not-divided"])):
        both = tuple(term(8, factor, op=op) for op in ("NllLossBackward0", "MseLossBackward0"))
        play = of(*[[both[:many] for many in own] for own in ((2, 1), (2, 2), (1, 2), (1, 1), (2, 1))])
        assert found(play) == rules
        assert all(f.evidence["micro-batches"] == 2 for f in av.check(play.ledger).findings)


def test_where_windows_grow_the_cure_of_undivided_losses_divides_by_each_ones_own_number() -> None:
    (grown,) = av.check(windows(1, 1, 2, 2, 2, 4, 4, 4, factor=1.0).ledger).findings
    assert grown.cause.startswith("4 mean losses are added up")
    assert "(loss / micro_batches_in_this_window)" in grown.suggestion
    (steady,) = av.check(windows(4, 4, 3, 4, 4, 3, factor=1.0).ledger).findings
    assert "(loss / 4)" in steady.suggestion and steady.cause.startswith("4 mean losses")


def _forgotten(rounds: int, *, kept: bool = True) -> Play:
    play = Play({"w": 0, "v": 1})
    for _ in range(rounds):
        for _ in range(4):
            play.backward()
        play.step(0)
        play.touched(play.zero(0 if kept else None), ["w"] if kept else ["w", "v"])
    return play


def test_an_optimizer_that_neither_steps_nor_zeroes_is_found() -> None:
    (finding,) = av.check(_forgotten(5).ledger).findings
    assert (finding.rule, finding.severity) == ("parameter-outside-or-twice", "warning")
    assert finding.evidence["parameters"] == ["v"] and "No optimizer that steps has v" in finding.cause
    assert found(_forgotten(3)) == found(_forgotten(5, kept=False)) == []


def _counted(*, divisor: int, said: int = 4, first_tokens: int = 0) -> Play:
    made = []
    for lengths in ((3, 40, 7, 110), (9, 9, 30, 2), (20, 10, 60, 1)):
        count = sum(lengths) + first_tokens
        factors = {"constants": [1 / count, 1 / said]} if divisor > 1 else {}
        made.append([term(n, 1 / count / divisor, "sum") | factors for n in lengths])
    return of(*made)


def test_sums_that_are_divided_by_all_elements_and_by_the_micro_batches_are_divided_once_too_often() -> None:
    (finding,) = av.check(_counted(divisor=4).ledger).findings
    assert (finding.rule, finding.severity, finding.times) == ("double-division", "warning", 3)
    assert "divided by 4 once too often" in finding.cause and finding.evidence["sum of shares"] == pytest.approx(0.25)
    assert found(_counted(divisor=1)) == found(_counted(divisor=3, said=3)) == []
    assert found(_counted(divisor=1, first_tokens=4)) == []


def test_unequal_means_name_the_loss_where_a_backward_has_several_and_offer_no_cure_of_all() -> None:
    play = of([(term(8, 0.25), term(n, 0.25, op="SmoothL1LossBackward0")) for n in (3, 40, 7, 110)])
    finding = next(f for f in av.check(play.ledger).findings if f.rule == "token-mean-of-means")
    assert finding.evidence["the loss"] == "loss · SmoothL1LossBackward0" and finding.suggestion == ""
    assert "the loss" not in av.check(of_sizes((3, 40, 7, 110)).ledger).findings[0].evidence


def _rates(rates: list[float], source: str = "scheduler.step()", name: str = "LambdaLR") -> Play:
    """A scheduler that steps with each micro-batch, and these rates."""
    play = Play()
    for i, rate in enumerate(rates):
        play.backward()
        if i % 4 == 3:
            play.step()
            play.zero()
        at = play.schedule(source=source)
        play.rows[at] |= {"label": "scheduler"}
        play.rows[at]["details"] |= {"lr": [rate], "scheduler": name}
    return play


@pytest.mark.parametrize(
    ("rates", "accused"),
    [
        ([0.1 * (1 - (i + 1) / 16) for i in range(16)], False),  # it ends with the last
        ([0.1 * max(0.0, 1 - (i + 1) / 8) for i in range(16)], True),  # long before
        ([0.1 * (1 + math.cos(math.pi * (i + 1) / 4)) for i in range(16)], True),  # up and down
        ([0.1 * (1 + math.cos(math.pi * (i + 1) / 15)) for i in range(16)], False),  # once more, after its end
        ([0.1 * 0.5**i for i in range(16)], True),
        ([0.1] * 16, True),
    ],
)
def test_a_schedule_that_ends_with_the_last_micro_batch_was_made_for_them(rates: list[float], accused: bool) -> None:
    assert found(_rates(rates)) == ["scheduler-per-micro-batch"] * accused


@pytest.mark.parametrize(
    ("made_for", "every", "accused"),
    [
        (32, 1, True),  # one for each micro-batch
        (30, 1, True),  # but for some of the last window
        (8, 1, False),  # one for each window
        (100, 1, False),  # stopped early
        (16, 1, False),  # of two cycles
        (32, 2, False),  # one for each epoch, as the default has it
    ],
)
def test_a_schedule_is_too_long_that_takes_one_step_a_window_of_one_for_each_micro_batch(
    made_for: int, every: int, accused: bool
) -> None:
    play = Play()
    for window in play.each(range(8)):
        for _ in range(4):
            play.backward(term(8, 1 / 4))
        if window % every == 0:
            at = play.schedule()
            play.rows[at]["details"] |= {} if window else {"horizon": made_for}
    assert found(play) == ["schedule-too-long"] * accused


@pytest.mark.parametrize(
    ("source", "name", "accused"),
    [
        ("scheduler.step(epoch + i / iters)", "CosineAnnealingWarmRestarts", False),
        ("optimizer.step(); scheduler.step(epoch=epoch)", "LambdaLR", False),
        ("optimizer.step(closure); scheduler.step()", "LambdaLR", True),
        ("scheduler.step(loss)", "ReduceLROnPlateau", True),
        ("scheduler.step(", "LambdaLR", True),
    ],
)
def test_a_scheduler_that_is_told_where_it_is_may_be_told_so_with_each_micro_batch(
    source: str, name: str, accused: bool
) -> None:
    assert found(_rates([0.1] * 16, source, name)) == ["scheduler-per-micro-batch"] * accused


FOUND: dict[str, tuple[Callable[[], Play | Ledger], list[str]]] = {
    "a window that is begun anew once": (lambda: played("(4444sz44z" + "4444sz" * 5 + ")"), []),
    "a weight that is no count": (lambda: played("5555sz" * 3), []),
    "two networks in turns on one loss": (lambda: played("1s[0]z1s[1]z" * 4, MAKER_AND_JUDGE), []),
    "two losses through one helper": (_helper, []),
    "gradients from autograd.grad": (_by_autograd_grad, []),
    "a recording opened in the middle": (lambda: played("44sz" + RIGHT), []),
    "a recording ended in the middle": (lambda: played(RIGHT + "44", ended="KeyboardInterrupt"), []),
    "windows across epochs": (lambda: played("(4444sz44)(44sz4444sz)" * 2), []),
    "weights averaged instead of gradients": (lambda: _ddp([False] * 4, [True] * 4), []),
    "the first micro-batch averaged instead of the last": (
        lambda: _ddp([True, False, False, False], [False, True, True, True]),
        ["ddp-unsynced-step"],
    ),
    "a clip that does nothing to scaled gradients": (lambda: played("22cusz" * 2, amp=1024, clip=1e9), []),
    "a step too late in each epoch": (
        lambda: played("(4" + "4444sz" * 3 + "444)" + "(4444sz4444sz)"),
        ["leftover-carried"],
    ),
    "one micro-batch left over": (lambda: played("(4444sz4)" * 3), ["leftover-carried"]),
    "windows of two lengths and one divisor": (lambda: played("4sz4sz44sz" * 3), ["sums-differ"]),
    "sums over more elements in some windows": (lambda: _of_texts((3, 20), (3, 20), (6, 50), (3, 15)), ["sums-differ"]),
    "a list of losses that each epoch empties": (
        lambda: _saved(*range(6), *range(6), 0, 1, each=1),
        ["graph-retained"],
    ),
    "graphs that are kept for a while": (lambda: _saved(3, 1, 2, 5, 4, 1, each=1), []),
    "a leak through one line": (
        lambda: played("1s[0]z[0]1[d]s[1]z[1]" * 6, MAKER_AND_JUDGE),
        ["gan-gradient-leak", "loss-not-divided"],
    ),
    "a leak through one line that is zeroed": (
        lambda: played("z[1]1s[0]z[0]z[1]1[d]s[1]z[1]" * 6, MAKER_AND_JUDGE),
        [],
    ),
    "an optimizer whose parameters were replaced": (
        lambda: played("2[new]2[new]sz" * 3, {"old": 0, "new": None}),
        ["parameter-outside-or-twice"],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_in_loops_beside_a_mistake(name: str) -> None:
    made, rules = FOUND[name]
    assert found(made()) == rules


@pytest.mark.parametrize(
    ("sizes", "severity"),
    [((2, 3, 4, 2), "warning"), ((90, 100, 110, 95), "warning"), ((3, 40, 7, 110), "error"), ((8, 8, 8, 3), "note")],
)
def test_means_over_elements_of_nearly_equal_numbers_are_no_error(sizes: tuple[int, ...], severity: str) -> None:
    report = av.check(of_sizes(sizes).ledger)
    (finding,) = report.findings
    wrong = sum(abs(1 / 4 - n / sum(sizes)) for n in sizes) / 2
    assert (finding.rule, finding.severity) == ("token-mean-of-means", severity)
    assert finding.evidence["part of the weight to move for all to weigh the same"] == pytest.approx(wrong)
    assert report.healthy == (severity == "note")


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=6), clip=st.booleans(), elements=st.integers(1, 99))
@settings(max_examples=examples(60), deadline=None)
def test_any_right_windows_are_healthy(counts: list[int], clip: bool, elements: int) -> None:
    assert found(windows(*counts, elements=elements, clip=clip)) == []


def _a_second_backward() -> Play:
    play = Play()
    for _ in play.each(range(2)):
        for _ in range(4):
            play.backward(term(8, 1 / 4))
            play.backward(term(8, 0.3), label="aux", line=11)
    return play


def _a_first_loss_that_is_zeroed() -> Play:
    play = Play()
    for _ in play.each(range(3)):
        play.backward(term(8, 1.0), label="first", line=11)
        play.zero()
        play.backward(term(8, 1.0))
    return play


def _half() -> Play:
    play = played(RIGHT)
    play.dtypes = {"w": "bfloat16"}
    return play


def _weighed_by_size(factor: float) -> Play:
    return of(*[[term(size, factor * size / 16) for size in (6, 2, 4, 4)]] * 2)


def _of_two_ranks(factor: float) -> Play:
    play = Play()
    play.meta |= {"rank": 0, "ranks": 2}
    for _ in play.each(range(3)):
        play.backward(term(8, factor), armed=True, armed_line=3, no_sync=False)
        play.sync()
    return play


def _contrast(factor: float) -> Play:
    """Windows of losses that compare samples with each other."""
    return of(*[[term(8, factor) | {"in_batch": True}] * 4] * 3)


def _of_texts(*windows: tuple[int, int]) -> Play:
    """Windows of four sums over so many elements each, divided by such a count."""
    return of(*[[_divided(elements, 1 / count)] * 4 for elements, count in windows])


MEANT: dict[str, tuple[Callable[[], Play | Ledger], str]] = {
    "a division for a window with a step for each loss": (
        lambda: played("4sz" * 3, said=True),
        "a loss that is divided by 4 is meant, with a step for each (train.py:10)",
    ),
    "a step for each loss": (lambda: played("1sz" * 3, said=True), ""),
    "ranks that share nothing": (_by_themselves, "ranks that share no gradients are meant (train.py:10)"),
    "ranks that share their gradients": (lambda: _ranks(*[_synced(8, 1.0, loss=n) for n in (3, 4)]), ""),
    "ranks of one sample": (lambda: _ranks(*[_synced(8, 1.0, loss=3) for _ in "12"]), "compute the same losses"),
    "replicas that step on different gradients": (
        lambda: _ranks(_synced(8, 1.0), _synced(8, 1.0, seed=3)),
        "ranks that step on different gradients are meant",
    ),
    "a rank that never steps": (lambda: _one_steps_less_often(0), "no optimizer is meant to apply the gradients of"),
    "a rank that steps less often": (lambda: _one_steps_less_often(3), "ranks that step a different number of times"),
    "a number of all ranks that the average divides by again": (
        lambda: _of_all_ranks(*[tuple([term(8, 1 / 8)] * 4 for _ in range(2))] * 3),
        "a sum of 0.5 is meant in every step (train.py:10)",
    ),
    "elements of all ranks that the average divides by again": (
        lambda: _counted_over_ranks(1),
        "a sum of 1/2 over all ranks is meant in every step",
    ),
    "elements of all ranks, multiplied by the ranks": (lambda: _counted_over_ranks(2), ""),
    "means times their elements": (lambda: _counted_over_ranks(2, lambda n, by: term(n, n * by)), ""),
    "FSDP's sums in half precision": (
        lambda: _sharded(*["backward", "backward", "sync", "step", "zero_grad"] * 2),
        "unsharded sums in bfloat16 are meant (a.py:8)",
    ),
    "FSDP's shards, averaged each time": (
        lambda: _sharded(*["backward", "sync", "backward", "sync", "step", "zero_grad"] * 2),
        "",
    ),
    "sums over texts that are divided by tokens": (
        lambda: _of_texts((3, 20), (3, 50), (3, 20), (3, 40)),
        "sums of shares from 0.24 to 0.6 are meant",
    ),
    "a constant sum": (lambda: windows(4, 4, 4, factor=0.5), "a sum of 2 is meant in every step"),
    "a constant sum over unequal sizes": (lambda: _weighed_by_size(2), "a sum of 2 is meant in every step"),
    "sizes that weigh alike": (lambda: _weighed_by_size(1), ""),
    "a loss that is not divided beside one that is": (
        lambda: _beside(0.3),
        "a sum of 1.2 is meant in every step for loss · MseLossBackward0",
    ),
    "an undivided loss with a backward of its own": (_a_second_backward, "a sum of 1.2 is meant in every step for aux"),
    "a first loss that is zeroed": (
        _a_first_loss_that_is_zeroed,
        "what 3 micro-batches brought and a zeroing erased is meant to be thrown away",
    ),
    "sums in half precision": (_half, "sums in bfloat16 are meant"),
    "a tail without a loader": (
        lambda: played("4444sz44z4444sz4444sz", ended="exit"),
        "what 2 micro-batches brought and a zeroing erased is meant to be thrown away",
    ),
    "weights": (lambda: played("12sz" * 3), "elements that weigh up to 2 times as much as others are meant"),
    "a window of another length": (lambda: played("(4444sz444444sz4444sz)"), "sums of shares from 1 to 1.5 are meant"),
    "a factor that is the number of ranks": (
        lambda: _of_two_ranks(2),
        "a loss that is multiplied by 2, the number of ranks, is meant (train.py:10)",
    ),
    "a factor of one rank": (lambda: _of_two_ranks(1), ""),
    "the samples of a micro-batch": (
        lambda: _contrast(0.25),
        "each loss is meant to compare the samples of its micro-batch alone (train.py:10)",
    ),
    "the samples of a window": (
        lambda: _contrast(1.0),
        "each loss is meant to compare the samples of its whole window (train.py:10)",
    ),
    "nothing": (lambda: _beside(0.25), ""),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_has_to_be_meant_is_said_beside_healthy(name: str) -> None:
    play, condition = MEANT[name]
    report = judged(play())
    assert report.healthy and condition in report.condition
    assert bool(report.condition) == bool(condition)
    assert ("healthy, if " in repr(report)) == bool(condition) and condition in repr(report)
    assert condition in report.to_html()


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        (Ledger.build([], []), "nothing was recorded"),
        (Play().ledger, "nothing was recorded"),
        (_by_autograd_grad().ledger, "no backward"),
        (_master_copies().ledger, "32-bit copies of weights"),
    ],
)
def test_without_anything_to_judge_there_is_no_verdict(ledger: Ledger, said: str) -> None:
    report = av.check(ledger)
    assert report.verdict == "no verdict" and said in report.reason and not report.healthy
    assert report.supposed == ""


def test_a_recording_that_stopped_is_not_healthy_and_its_mistakes_are_found() -> None:
    for play, verdict in ((played(RIGHT), "no verdict"), (windows(4, 4, factor=1.0), "findings")):
        play.meta["stopped"] = "RuntimeError"
        assert av.check(play.ledger).verdict == verdict


@pytest.mark.parametrize("events", [RIGHT, "1sz" * 3])
def test_a_ledger_without_terms_has_no_verdict_and_says_which_rules_need_them(events: str) -> None:
    play = played(events)
    for row in play.rows:
        row.get("details", {}).pop("terms", None)
    report = av.check(play.ledger)
    assert report.verdict == "no verdict" and "no terms" in report.reason
    assert {"token-mean-of-means", "loss-not-divided", "partial-window-underscaled", "leftover-carried"} <= set(
        report.unjudged
    )
    assert "zero-grad-inside-window" not in report.unjudged


def test_every_rule_has_its_entry_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert {name for rule in RULES for name in rule.explains} <= set(names)
    text = (ROOT / "accumviz/checks/rules.md").read_text("utf-8")
    assert sorted(re.findall(r"^\(rule-(.+)\)=$", text, re.MULTILINE)) == sorted(names)
    parts = r"\*\*What\.\*\* .*?\*\*Why\.\*\* .*?\*\*Example\.\*\*\n\n```diff\n.*?\*\*Fix\.\*\* .*?\]\(#[\w-]+\)"
    for name in names:
        written = text.partition(f"(rule-{name})=\n#### {name}\n\n")[2].partition("\n(rule-")[0]
        assert re.match(parts, written, re.DOTALL), name
    monkeypatch.setenv("ACCUMVIZ_BOOK", "https://example.org/book/")
    report = av.check(windows(4, 4, factor=1.0).ledger)
    assert "\n  Read: https://example.org/book/api.html#rule-loss-not-divided" in repr(report)


@pytest.mark.parametrize(
    ("via", "source", "named"),
    [
        ("transformers/trainer.py:1", "trainer.train()", "gradient_accumulation_steps"),
        ("accelerate/accelerator.py:1", "accelerator.backward(loss)", "gradient_accumulation_steps"),
        ("lightning/pytorch/core/module.py:1", "trainer.fit(model)", "accumulate_grad_batches"),
        ("lightning/pytorch/core/module.py:1", "self.manual_backward(loss)", None),  # Lightning divides nothing there
    ],
)
def test_a_finding_under_a_framework_names_its_setting(via: str, source: str, named: str | None) -> None:
    play = windows(4, 4, factor=1 / 16)
    for row in play.rows:
        row |= {"via": via, "source": source}
    [finding] = av.check(play.ledger).findings
    assert finding.evidence.get("setting") == named


def test_a_report_is_text_json_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = av.check(windows(4, 4, factor=1.0).ledger)
    text = repr(report)
    assert max(map(len, report.text(width=60).splitlines())) <= 60
    assert report.text(width=60).split() == text.split(), "wrapped, and nothing else"
    assert "1 warning" in text and "loss-not-divided" in text and "train.py:10" in text and "\x1b" not in text
    assert "\x1b[33mwarning\x1b[0m" in report.text(color=True)
    parsed = json.loads(report.to_json())
    assert parsed["verdict"] == "findings" and parsed["findings"][0]["rule"] == "loss-not-divided"
    report.save(tmp_path / "report.html")
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()
    assert "loss-not-divided" in report.to_html()
    bundle = report._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"} and bundle["text/plain"] == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in str(report)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in str(report)


def test_a_healthy_report_says_once_what_is_not_checked() -> None:
    for events, said in ((RIGHT, True), ("4444s" * 3, False)):
        report = av.check(played(events).ledger)
        text = "(an EMA, a teacher)"
        assert repr(report).count(text) == report.to_html().count(text) == said


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ("4444sz" * 3, ">Healthy: check finds no mistake."),
        ("1111sz" * 3, ">1 mistake: loss-not-divided."),
        ("4444", ">No verdict: no optimizer stepped"),
    ],
)
def test_a_reports_page_begins_with_what_it_comes_to(events: str, said: str) -> None:
    assert said in av.check(played(events, said=True).ledger).to_html()


@pytest.mark.parametrize(("reaches", "said"), [(("w",), True), (("w", "v"), False)])
def test_without_a_verdict_every_format_says_what_has_to_be_meant(reaches: tuple[str, ...], said: bool) -> None:
    play = Play({"w": 0, "v": 0})
    for _ in range(3):
        play.backward(into=reaches, terms=None)
        play.step()
        play.zero()
    report = av.check(play.ledger)
    meant = "SGD 0 is meant to have v, of which no loss reaches any"
    assert report.verdict == "no verdict"
    assert (f"\n  Right only if {meant}" in repr(report)) == said
    for text in (report.to_html(), report.to_json(), reports.github(report), report_data(report)["said"]):
        assert (meant in text) == said


def test_a_report_carries_no_text_that_a_page_would_run() -> None:
    play = windows(4, 4, factor=1.0)
    for row in play.rows:
        row["label"] = row["source"] = "<script>x</script>\x1b[2J"
    report = av.check(play.ledger)
    assert "<script>" not in report.to_html() and "\x1b" not in repr(report)
    hostile = replace(report.findings[0], file="a\n::error::b,c:d", cause="100%\r\n::error::", suggestion="- \x1b[2J")
    commands = reports.github(replace(report, findings=(hostile,)))
    assert commands.isprintable() and "file=a %3A%3Aerror%3A%3Ab%2Cc%3Ad,line=" in commands
    [result] = json.loads(reports.sarif(report))["runs"][0]["results"]
    assert result["ruleId"] == "loss-not-divided" and result["locations"]


_NONSENSE: list[Any] = [None, True, -1, 0, 1e308, math.nan, math.inf, "x", [], {}, [1], {"a": 1}, [{}], [[None]]]
_KEYS = (
    *("terms", "armed", "no_sync", "ranks", "amp_scale", "max_norm", "total_norm", "optimizer_index", "skipped"),
    *(
        "what",
        "loader",
        "lr",
        "by",
        "error",
        "unmeasured",
        "armed_line",
        "old_weight",
        "unmoved",
        "horizon",
        "stepped",
        "growth",
    ),
    "unrecorded",
)


@given(seed=st.integers(0, 10**6))
@example(seed=120)  # a share of a loss that its backward does not have
@example(seed=48644)  # averaged after a step that read nothing
@example(seed=3828)  # infinite norms of a step, where ranks are compared
@example(seed=21570)  # rates that are no numbers
@settings(max_examples=examples(150), deadline=None)
def test_a_ledger_of_nonsense_is_judged_without_an_error(seed: int) -> None:
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(rng.randrange(30)):
        details = {key: rng.choice(_NONSENSE) for key in rng.sample(_KEYS, 4)}
        if rng.random() < 0.5:
            details["terms"] = [{key: rng.choice(_NONSENSE) for key in ("op", "reduction", "elements", "factor")}]
        grad = {name: rng.choice([0.0, 1.0, -2.0, float("inf"), float("nan"), 1e30]) for name in rng.sample("abc", 2)}
        row: dict[str, Any] = {"kind": rng.choice(KINDS), "grad": grad, "details": details, "line": rng.randrange(3)}
        row["within"] = rng.choice(["", "", "step", "backward"])
        row["source"] = rng.choice(["", "loss.backward()", "\\1.step()", "x.step(y)", "(" * 5])
        if row["kind"] in ("backward", "sync"):
            row["contribution"] = {name: rng.choice([0.0, 1.0, float("nan")]) for name in grad}
        rows.append(row)
    parameters = [Parameter("a", (1,), optimizers=(0,)), Parameter("b", (2,), optimizers=(0, 1)), Parameter("c", (2,))]
    meta = {key: rng.choice(_NONSENSE) for key in ("optimizers", "ended", "merged")}
    ledger = Ledger.build(parameters, rows, meta=meta)
    report = av.check(ledger)
    assert report.verdict in ("findings", "healthy", "no verdict")
    assert repr(report) and report.to_html() and json.loads(report.to_json()) and repr(ledger.shares())
    ranks = [meta | {"rank": rank, "ranks": rng.choice([2, *_NONSENSE])} for rank in range(2)]
    assert repr(check_ranks([Ledger.build(parameters, rows, meta=own) for own in ranks]))
