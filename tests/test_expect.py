"""A training loop pinned in a test: what is expected and so passes, what is not fails with the report."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accumviz as av
from tests.conftest import ROOT
from tests.corpus.common import sgd


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: int = 8,
    k: int = 4,
    by: Callable[[int], float] = lambda i: 4,
    *,
    flush: bool = False,
) -> None:
    for i in range(batches):
        (model(torch.randn(2, 8)).square().mean() / by(i)).backward()
        if (i + 1) % k == 0 or (flush and i + 1 == batches):
            optimizer.step()
            optimizer.zero_grad()


def test_a_loop_that_does_what_is_expected_passes() -> None:
    model, optimizer = sgd()
    with av.expect(model, optimizer, accumulates=4, complete=True, steps=2) as expected:
        train(model, optimizer)
    assert expected.report.healthy
    assert len(expected.ledger.windows()) == 2


@pytest.mark.parametrize(
    ("wanted", "loop", "said"),
    [
        ({"accumulates": 8}, {}, "the step at event 4 consumes 4 backwards, expected 8 (and so 1 more)"),
        ({"complete": True}, {"by": lambda i: 1.0}, "the shares of the step at event 4 add up to 4, expected 1"),
        (
            {"complete": True},
            {"batches": 6, "flush": True},
            "the shares of the step at event 8 add up to 0.5, expected 1",
        ),
        ({"steps": 3}, {}, "2 steps, expected 3"),
        ({}, {"batches": 6, "flush": True}, "partial-window-underscaled"),
    ],
)
def test_what_is_not_as_expected_fails_with_the_report(wanted: Any, loop: Any, said: str) -> None:
    model, optimizer = sgd()
    with pytest.raises(AssertionError) as failed, av.expect(model, optimizer, **wanted):
        train(model, optimizer, **loop)
    assert said in str(failed.value)
    assert "\nReport: " in "\n" + str(failed.value)


@pytest.mark.parametrize("by", [3, 1])
def test_a_constant_inside_a_mean_is_the_losses_own(by: int) -> None:
    model, optimizer = sgd()
    wrong = pytest.raises(AssertionError, match="the shares of the step at event 3")
    with nullcontext() if by == 3 else wrong, av.expect(model, optimizer, complete=True):
        for _ in range(3):
            (-(0.5 * model(torch.randn(2, 8)).square()).mean() / by).backward()
        optimizer.step()


def test_a_short_last_window_is_no_wrong_length() -> None:
    model, optimizer = sgd()
    data = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=2)
    with av.expect(model, optimizer, accumulates=4, complete=True):
        for _ in range(2):
            for i, x in enumerate(data):
                (model(x).square().mean() / (4 if i < 4 else 2)).backward()
                if i in (3, 5):
                    optimizer.step()
                    optimizer.zero_grad()
    with (
        pytest.raises(AssertionError, match="the step at event 8 consumes 2 backwards"),
        av.expect(model, optimizer, accumulates=4),
    ):
        for k in (4, 2, 4):
            train(model, optimizer, k, k, lambda i, k=k: k)


def test_nothing_expected_is_what_check_finds_alone() -> None:
    model, optimizer = sgd()
    with av.expect(model, optimizer):
        train(model, optimizer, by=lambda i: 1.0)  # a warning, and no error
    with pytest.raises(AssertionError, match="loss-not-divided"), av.expect(model, optimizer, fail_on="warning"):
        train(model, optimizer, by=lambda i: 1.0)
    with av.expect(model, optimizer, fail_on=None):
        train(model, optimizer, 6, flush=True)
    with av.expect(model, optimizer, ignore="partial-window-underscaled") as expected:
        train(model, optimizer, 6, flush=True)
    assert [finding.rule for finding in expected.report.ignored] == ["partial-window-underscaled"]


def test_no_verdict_fails_with_its_reason() -> None:
    model, optimizer = sgd()
    with pytest.raises(AssertionError, match="no verdict: nothing was recorded"), av.expect(model, optimizer):
        pass
    with pytest.raises(AssertionError, match="no optimizer stepped"), av.expect(model, optimizer):
        model(torch.randn(2, 8)).sum().backward()


def test_an_exception_of_the_block_passes_through_unchanged() -> None:
    model, optimizer = sgd()
    error = KeyError("mine")
    with pytest.raises(KeyError) as raised, av.expect(model, optimizer, accumulates=99):
        train(model, optimizer)
        raise error
    assert raised.value is error
    assert raised.value.__context__ is None


@pytest.mark.parametrize(
    ("wanted", "error", "said"),
    [
        ({"accumulates": 0}, ValueError, "accumulates=0; expected how many backwards each step consumes"),
        ({"steps": 0}, ValueError, "steps=0; expected how often the optimizers step"),
        ({"ignore": ["divided"]}, ValueError, "there is no rule 'divided'; nearest: loss-not-divided"),
        ({"fail_on": "all"}, ValueError, "fail_on='all'; expected 'error', 'warning' or None"),
    ],
)
def test_a_strange_expectation_is_refused_in_words(wanted: Any, error: type[Exception], said: str) -> None:
    model, _ = sgd()
    with pytest.raises(error) as refused:
        av.expect(model, **wanted)
    assert said in str(refused.value)


LOOPS = """
import sys
import pytest

def test_nothing_heavy_was_imported_when_pytest_started():
    assert not {"torch", "numpy", "matplotlib"} & set(sys.modules)

def make():
    import torch
    model = torch.nn.Linear(3, 1)
    return torch, model, torch.optim.SGD(model.parameters(), lr=0.1)

def loop(expect, by):
    torch, model, optimizer = make()
    with expect(model, optimizer, accumulates=4, complete=True):
        for i in range(4):
            (model(torch.randn(2, 3)).square().mean() / by).backward()
        optimizer.step()

def test_right(expect):
    loop(expect, 4)

def test_wrong(expect):
    loop(expect, 1)

def test_raises(expect):
    torch, model, optimizer = make()
    with pytest.raises(KeyError), expect(model, optimizer):
        raise KeyError("mine")
"""


def test_the_fixture_fails_with_the_report_and_no_frame_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_loop.py").write_text(LOOPS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "accumviz.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "no:hypothesispytest", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "expected otherwise: the shares of the step at event 4 add up to 4, expected 1" in done.stdout
    assert "E       Report: " in done.stdout
    assert "loss-not-divided" in done.stdout
    assert "Traceback" not in done.stdout
    assert "another exception" not in done.stdout
    assert "__exit__" not in done.stdout
