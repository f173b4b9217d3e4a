"""The workflow of CI: it runs the commands that people are told, may do little, and publishes what was tested."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "book.yml"
TEXT = WORKFLOW.read_text()
JOBS: dict[str, Any] = yaml.safe_load(TEXT)["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]
PUSHED_TO_MAIN = "github.event_name == 'push' && github.ref == 'refs/heads/main'"


def linters() -> list[list[str]]:
    """What `make lint` calls on the workflow."""
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if str(WORKFLOW.relative_to(ROOT)) in line]
    assert lines
    return [shlex.split(line.strip().removeprefix("@")) for line in lines]


def lint(linter: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / linter[0].removeprefix("$(BIN)/")
    return subprocess.run([program, *linter[1:]], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("linter", linters(), ids=lambda linter: Path(linter[0]).name)
def test_the_workflow_passes_the_linters_of_make_lint(linter: list[str]) -> None:
    done = lint(linter, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_that_a_job_names_are_there() -> None:
    named = re.findall(r"\btests/[\w/]+\.py\b", WORKFLOW.read_text("utf-8"))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_action_is_pinned_to_a_commit_and_says_its_version() -> None:
    used = re.findall(r"uses: *(.+)", TEXT)
    assert len(used) == sum("uses" in step for step in STEPS) > 0
    assert [line for line in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_only_the_job_that_publishes_may_write_and_it_runs_no_code_of_the_repository() -> None:
    assert yaml.safe_load(TEXT)["permissions"] == {}
    assert {name: job["permissions"] for name, job in JOBS.items()} == {
        "test": {"contents": "read"},
        "oldest": {"contents": "read"},
        "newest": {"contents": "read"},
        "publish": {"contents": "write"},
    }
    assert [step["uses"] for step in JOBS["publish"]["steps"] if "checkout" in step.get("uses", "")] == []
    checkouts = [step for step in STEPS if "actions/checkout@" in step.get("uses", "")]
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False] * 3
    assert "secrets." not in TEXT


def test_what_is_published_is_the_site_that_passed_its_tests_on_main() -> None:
    publish, test = JOBS["publish"], JOBS["test"]
    assert (publish["needs"], publish["if"]) == ("test", PUSHED_TO_MAIN)
    [kept] = [step for step in test["steps"] if "actions/upload-artifact@" in step.get("uses", "")]
    [taken] = [step for step in publish["steps"] if "actions/download-artifact@" in step.get("uses", "")]
    assert test["steps"].index(kept) > [step.get("run") for step in test["steps"]].index("make test")
    assert kept["with"]["path"] == "_build/html"
    assert kept["with"]["name"] == taken["with"]["name"]
    assert kept["if"] == f"matrix.python == '{test['strategy']['matrix']['python'][0]}'"
