"""Each mistake of the corpus is found on its line, and nothing in its right twin, nor in loops that are right."""

from pathlib import Path
from typing import Any

import pytest
import torch

import accumviz as av
from accumviz.checks.check import RULES, check_ranks
from accumviz.checks.report import Finding, Report
from accumviz.ledger.ledger import Ledger
from tests.corpus import healthy
from tests.corpus.scripts import Script, run, scripts

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
MISTAKES = {script.name: script for script in scripts("mistakes")}


def serious(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity != "note"]


def judged(script: Script, folder: Path, *, right: bool) -> Report:
    torch.manual_seed(0)
    recordings: list[Any] = []

    def record(*objects: Any, **settings: Any) -> Any:
        recordings.append(av.record(*objects, **settings))
        return recordings[0]

    run(script.text(right=right), script.name, folder / "loop.py", record)
    return av.check(recordings[0])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_the_only_finding_and_on_its_line(name: str, tmp_path: Path) -> None:
    script = MISTAKES[name]
    report = judged(script, tmp_path, right=False)
    every = serious(report) or report.findings
    found = [(finding.rule, Path(finding.file).name, finding.line) for finding in every]
    assert found == [(script.rule, "loop.py", script.line)], report


@pytest.mark.parametrize("name", MISTAKES)
def test_the_right_twin_is_healthy(name: str, tmp_path: Path) -> None:
    report = judged(MISTAKES[name], tmp_path, right=True)
    assert report.healthy and serious(report) == [], report


@pytest.mark.parametrize("name", healthy.LOOPS)
def test_a_loop_with_nothing_wrong_has_no_finding(name: str) -> None:
    torch.manual_seed(0)
    running = healthy.LOOPS[name]()
    with av.record(*next(running)) as recording:
        assert list(running) == []
    report = av.check(recording)
    assert report.verdict != "findings" and report.findings == (), report


_LOOP = """
import torch
from torch import nn

def loop(record):
    limit, model = 0.01, nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i in range(8):
            (model(torch.randn(2, 4)).square().mean() / 2).backward()
"""
_CLIP = "nn.utils.clip_grad_norm_(model.parameters(), limit)"
_ZERO = "  optimizer.step()\n+ optimizer.zero_grad()"
_EVERY_SECOND = ["if i % 2:", "    optimizer.step()"]
# What follows the backward, and what is suggested.
_SUGGESTED: dict[str, tuple[list[str], str]] = {
    "moved with its condition": (
        ["if limit is not None:", f"    {_CLIP}", *_EVERY_SECOND, "    optimizer.zero_grad()"],
        f"- if limit is not None:\n-     {_CLIP}\n  …\n+ if limit is not None:\n+     {_CLIP}\n  optimizer.step()",
    ),
    "not moved out of a condition that holds more": (
        ["if limit:", f"    norm = {_CLIP}", "    assert norm", *_EVERY_SECOND, "    optimizer.zero_grad()"],
        "",
    ),
    "not moved across a line that reads what it assigns": (
        [f"norm = {_CLIP}", "assert norm", *_EVERY_SECOND, "    optimizer.zero_grad()"],
        "",
    ),
    "not taken out where it is all of its block": (
        ["if i % 2:", "    optimizer.step()", "if limit:", "    optimizer.step()", "optimizer.zero_grad()"],
        "",
    ),
    "zeroed where micro-batches are counted": (_EVERY_SECOND, _ZERO),
    "not zeroed where a step may be skipped": ([f"if {_CLIP} < 1e9:", "    optimizer.step()"], ""),
    "not zeroed in one branch of two": (["if i % 3:", "    optimizer.step()", "else:", "    optimizer.step()"], ""),
}


@pytest.mark.parametrize("name", _SUGGESTED)
def test_a_suggestion_keeps_conditions_and_is_left_out_where_it_would_not_be_reached(name: str, tmp_path: Path) -> None:
    lines, suggested = _SUGGESTED[name]
    text = _LOOP + "\n".join(" " * 12 + line for line in lines) + "\n"
    report = judged(Script("loop", text.splitlines(), "", 0), tmp_path, right=False)
    assert [finding.suggestion for finding in serious(report)] == [suggested], report


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("a_gan_that_accumulates_both_losses_in_turns", "  of_maker.step()\n+ of_judge.zero_grad()"),
        ("a_gan_whose_judge_is_zeroed_too_early", "+ of_judge.zero_grad()\n  loss.backward()"),
        (
            "clipped_and_left_to_the_step_to_unscale",
            (
                "+ s.unscale_(optimizer)\n"
                "  nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # finding: clip-scaled-grads"
            ),
        ),
        (
            "clipped_before_it_is_unscaled",
            (
                "- s.unscale_(optimizer)  # wrong\n+ s.unscale_(optimizer)  # wrong\n"
                "  nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # finding: clip-scaled-grads"
            ),
        ),
    ],
)
def test_a_suggestion_puts_a_call_where_the_right_twin_has_it(name: str, suggested: str, tmp_path: Path) -> None:
    (finding,) = serious(judged(MISTAKES[name], tmp_path, right=False))
    assert finding.suggestion == suggested


RANKS = {script.name: script for script in scripts("ranks")}


def play(loops: list[tuple[Script, bool]], folder: Path) -> list[Ledger]:
    """Run every script on one rank, one after the other."""
    return [play_one(script, right, folder) for script, right in loops]


def play_one(script: Script, right: bool, folder: Path) -> Ledger:
    from tests.corpus import of_ranks

    recordings: list[Any] = []

    def record(*objects: Any, **settings: Any) -> Any:
        recordings.append(av.record(*objects, **settings))
        return recordings[0]

    path = folder / f"{torch.distributed.get_rank()}-{right}" / f"{script.name}.py"
    path.parent.mkdir(exist_ok=True)
    run(script.text(right=right), script.name, path, record)
    of_ranks.end_groups()
    ledger: Ledger = recordings[0].ledger
    return ledger


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[Ledger]]:
    """The ledgers of both ranks, by script and whether it is the right twin."""
    loops = [(script, right) for script in RANKS.values() for right in (False, True)]
    world = av.distribute(play, loops=loops, folder=tmp_path_factory.mktemp("ranks"), timeout=300)
    pairs = zip(loops, zip(*world.returned, strict=True), strict=True)
    return {(script.name, right): list(each) for (script, right), each in pairs}


@pytest.mark.parametrize("name", RANKS)
def test_a_mistake_of_ranks_is_found_on_its_line(name: str, ledgers: dict[tuple[str, bool], list[Ledger]]) -> None:
    script = RANKS[name]
    for report in (av.check(Ledger.merge(ledgers[name, False])), check_ranks(ledgers[name, False])):
        (finding,) = serious(report) or report.findings
        assert (finding.rule, finding.line) == (script.rule, script.line), report


@pytest.mark.parametrize("name", RANKS)
def test_the_right_twin_of_ranks_is_healthy(name: str, ledgers: dict[tuple[str, bool], list[Ledger]]) -> None:
    for report in map(av.check, (*ledgers[name, True], Ledger.merge(ledgers[name, True]))):
        assert serious(report) == [], report
        # What ranks reduce by hand is in no share.
        assert report.healthy or "by hand" in report.reason, report


def test_every_rule_has_a_script() -> None:
    assert {rule.name for rule in RULES} <= {script.rule for script in (*MISTAKES.values(), *RANKS.values())}


@pytest.mark.parametrize("K", [2, 4])
def test_gradients_that_a_hand_puts_under_a_sum_leave_no_verdict(K: int) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with av.record(model, optimizer) as recording:
        for _ in range(3):
            losses = [model(torch.randn(8, 4)).square().mean() / K for _ in range(K)]
            for p, grad in zip(model.parameters(), torch.autograd.grad(losses[0], [*model.parameters()]), strict=True):
                p.grad = grad
            for loss in losses[1:]:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report = av.check(recording)
    assert (report.verdict, report.findings) == ("no verdict", ())
