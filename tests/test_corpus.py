"""Each mistake of the corpus is found on its line, and nothing in its right twin, nor in loops that are right."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import accumviz as av
from accumviz.checks.check import RULES, check_ranks
from accumviz.checks.report import Finding, Report
from accumviz.ledger.ledger import Ledger
from tests.corpus import healthy
from tests.corpus.scripts import Script, run, scripts

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
MISTAKES = {script.name: script for script in scripts("mistakes")}
# Another network shares the mistake, runs inside the closure, or is all that is still reached.
NOT_BESIDE = {
    "a_closure_that_is_zeroed_outside_it",
    "a_sum_for_a_log_with_its_graph_of_which_each_backward_runs_all_so_far",
    "graphs_kept_in_a_list",
    "layers_replaced_after_the_optimizer_was_made",
    "one_autocast_around_the_whole_loop",
}
BESIDE = [(name, beside) for name in MISTAKES for beside in (False, True) if not beside or name not in NOT_BESIDE]


def serious(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity != "note"]


@contextmanager
def another_network() -> Iterator[dict[str, Any]]:
    """What else is to be recorded: a network that is trained rightly with each step of another optimizer."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if stepped is not optimizer:
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    hook = register_optimizer_step_post_hook(train)
    try:
        yield {"another": model, "its_optimizer": optimizer}
    finally:
        hook.remove()


def recorded(script: Script, path: Path, *, right: bool, beside: bool = False) -> Ledger:
    """Run a loop or its right twin in a file of its own."""
    torch.manual_seed(0)
    recordings: list[Any] = []
    with another_network() if beside else nullcontext({}) as others:

        def record(*objects: Any, **settings: Any) -> Any:
            recordings.append(av.record(*objects, **settings, **others))
            return recordings[0]

        run(script.text(right=right), script.name, path, record)
    ledger: Ledger = recordings[0].ledger
    return ledger


def without_names(ledger: Ledger) -> Ledger:
    """The same loop where nothing is known of its code but line numbers."""
    events = [replace(event, label="", source="") for event in ledger]
    numbers = (ledger.contribution, ledger.grad, ledger.state, ledger.elements)
    return Ledger(ledger.parameters, events, *numbers, meta=ledger.meta)


@pytest.mark.parametrize(("name", "beside"), BESIDE)
def test_a_mistake_is_the_only_finding_and_on_its_line(name: str, beside: bool, tmp_path: Path) -> None:
    script = MISTAKES[name]
    ledger = recorded(script, tmp_path / "loop.py", right=False, beside=beside)
    for report in map(av.check, (ledger, without_names(ledger))):
        every = serious(report) or report.findings
        found = [(finding.rule, Path(finding.file).name, finding.line) for finding in every]
        assert found == [(script.rule, "loop.py", script.line)], report
        assert every[0].evidence or every[0].severity == "note"
        assert every[0].cause.endswith(".")
        assert json.loads(report.to_json())["findings"]
        assert all(re.fullmatch(r"[-+ ] .*\S", line) for line in every[0].suggestion.splitlines())


@pytest.mark.parametrize(("name", "beside"), BESIDE)
def test_the_right_twin_is_healthy(name: str, beside: bool, tmp_path: Path) -> None:
    report = av.check(recorded(MISTAKES[name], tmp_path / "loop.py", right=True, beside=beside))
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
    report = av.check(recorded(Script("loop", text.splitlines(), "", 0), tmp_path / "loop.py", right=False))
    assert [finding.suggestion for finding in serious(report)] == [suggested], report


_UNSCALED = "s.unscale_(optimizer)"
_CLIPPED = "  nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # finding: clip-scaled-grads"


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("a_gan_that_accumulates_both_losses_in_turns", "  of_maker.step()\n+ of_judge.zero_grad()"),
        ("a_gan_whose_judge_is_zeroed_too_early", "  of_maker.step()\n+ of_judge.zero_grad()"),
        ("clipped_and_left_to_the_step_to_unscale", f"+ {_UNSCALED}\n{_CLIPPED}"),
        ("clipped_before_it_is_unscaled", f"- {_UNSCALED}  # wrong\n+ {_UNSCALED}  # wrong\n{_CLIPPED}"),
    ],
)
def test_a_suggestion_puts_a_call_where_the_right_twin_has_it(name: str, suggested: str, tmp_path: Path) -> None:
    (finding,) = serious(av.check(recorded(MISTAKES[name], tmp_path / "loop.py", right=False)))
    assert finding.suggestion == suggested


RANKS = {script.name: script for script in scripts("ranks")}


def play(loops: list[tuple[Script, bool]], folder: Path) -> list[Ledger]:
    """Run every script on one rank, one after the other."""
    from tests.corpus import of_ranks

    ledgers = []
    for script, right in loops:
        path = folder / f"{torch.distributed.get_rank()}-{right}" / f"{script.name}.py"
        path.parent.mkdir(exist_ok=True)
        ledgers.append(recorded(script, path, right=right))
        of_ranks.end_groups()
    return ledgers


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
