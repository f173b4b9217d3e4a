"""Whole training programs in four dressings: healthy as they are; with a mistake, it is found, and on its line.

What each mistake is in each of them stands in `dressings/disguises.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import accumviz as av
from accumviz.checks.check import RULES
from accumviz.checks.report import Report
from accumviz.recorder import callsite
from tests.dressings.disguises import DISGUISES, Edit, Texts

HERE = Path(__file__).parent / "dressings"
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


class Dressing(NamedTuple):
    """The files of a program, the last of which is the script; and those that lie where libraries do."""

    files: tuple[str, ...]
    library: tuple[str, ...] = ()


DRESSINGS = {
    "names": Dressing(("renamed",)),
    "names by hand": Dressing(("renamed",)),
    "helpers": Dressing(("engine", "driven")),
    "framework": Dressing(("accelerated",)),
    "hooks": Dressing(("woven",), library=("loom",)),
}
# What needs several ranks, or two networks, has tests of its own.
ELSEWHERE = {
    "gan-gradient-leak",
    *("ddp-unsynced-step", "uneven-rank-backwards", "no-sync-excludes-forward", "rank-token-weight"),
    *("fsdp2-zero-keeps-unsharded", "fsdp-no-sync-memory", "fsdp1-local-clip", "ddp-static-graph-no-sync"),
}


def variant(dressing: str, edits: tuple[Edit, ...]) -> Texts:
    """The texts of a dressing's files after these edits; of a library's, none is edited."""
    library, texts = (
        {name: (HERE / f"{name}.py").read_text("utf-8") for name in names}
        for names in (DRESSINGS[dressing].library, DRESSINGS[dressing].files)
    )
    for edit in edits:
        edit(texts)
    return library | texts


def marked(texts: Texts) -> list[tuple[str, int]]:
    rows = [(f"{name}.py", *row) for name, text in texts.items() for row in enumerate(text.splitlines(), 1)]
    return [(file, line) for file, line, row in rows if row.endswith("# here")]


def run(dressing: str, texts: Texts, options: dict[str, Any], folder: Path) -> Report:
    """What is found in a program of which the files lie in this folder, and a library's where libraries do."""
    if dressing == "framework":
        pytest.importorskip("accelerate")
    packages = folder / "site-packages"
    packages.mkdir(parents=True)
    tapes: list[Any] = []

    def tape(*objects: Any) -> Any:
        tapes.append(av.record(*objects, **options))
        return tapes[-1]

    names = {name: f"tests.dressings.{name}" for name in texts}
    with (
        mock.patch.object(callsite, "_LIBRARIES", (*callsite._LIBRARIES, f"{packages}/")),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, text in texts.items():
            path = (packages if name in DRESSINGS[dressing].library else folder) / f"{name}.py"
            path.write_text(text, "utf-8")
            spec = importlib.util.spec_from_file_location(names[name], path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, names[name], module)
            spec.loader.exec_module(module)
        torch.manual_seed(0)
        try:
            module.descend(tape)
        except RuntimeError as error:  # it is this that ends a script which steps before its backward
            assert "inplace operation" in str(error)
    return av.check(tapes[0])


@pytest.fixture(scope="module")
def known() -> dict[tuple[Any, ...], Report]:
    """What was found in programs without a mistake, by dressing, texts and options: several rules have the same."""
    return {}


CASES = [pytest.param(rule, dressing, id=f"{rule}-{dressing}") for rule, dressing in DISGUISES]


def test_every_rule_that_one_process_can_break_has_its_disguises() -> None:
    here = [rule.name for rule in RULES if rule.name not in ELSEWHERE]
    by_hand = {(rule, dressing) for rule, dressing in DISGUISES if dressing == "names by hand"}
    expected = {(rule, dressing) for rule in here for dressing in DRESSINGS} - {
        (rule, "names by hand") for rule in here
    }
    assert set(DISGUISES) - by_hand == expected
    assert {rule.name for rule in RULES} >= ELSEWHERE


@pytest.mark.parametrize(("rule", "dressing"), CASES)
def test_a_mistake_is_found_on_its_line_in_every_dressing(rule: str, dressing: str, tmp_path: Path) -> None:
    made = DISGUISES[rule, dressing]
    texts = variant(dressing, made.about + made.mistake)
    (line,) = marked(texts)
    report = run(dressing, texts, made.options, tmp_path)
    assert [(found.rule, (found.file, found.line)) for found in report.findings] == [(rule, line)], report


@pytest.mark.parametrize(("rule", "dressing"), CASES)
def test_the_same_program_without_the_mistake_is_healthy(
    rule: str, dressing: str, known: dict[tuple[Any, ...], Report], tmp_path: Path
) -> None:
    made = DISGUISES[rule, dressing]
    texts = variant(dressing, made.about)
    key = dressing, *texts.values(), *made.options
    report = known[key] = known.get(key) or run(dressing, texts, made.options, tmp_path)
    assert report.healthy and report.findings == () and marked(texts) == [], report


def test_a_helper_that_only_zeroes_is_told_beside_the_line_that_calls_it_too_early(tmp_path: Path) -> None:
    made = DISGUISES["zero-before-step", "helpers"]
    texts = variant("helpers", made.about + made.mistake)
    (found,) = run("helpers", texts, made.options, tmp_path).findings
    line = texts["engine"].splitlines().index("        optimizer.zero_grad()") + 1
    assert found.source == "engine.zero()  # here"
    assert found.evidence["by way of"] == f"engine.py:{line} optimizer.zero_grad()"
