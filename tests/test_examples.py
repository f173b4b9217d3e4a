"""Each example gets the report that its page shows, and is healthy once changed; what README.md shows is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accumviz.cli import main
from tests.conftest import ROOT
from tests.light import LIGHT

PAGE = (ROOT / "examples" / "README.md").read_text("utf-8")
# A script's name, what is said of it, and the change.
SECTIONS = re.findall(r"^## \[(\S+)\].*?```\n\$ .*?\n(.*?)```.*?```diff\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)


def report(script: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "accumviz", "run", "--check", str(script)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_each_script_has_its_section() -> None:
    assert sorted(name for name, _, _ in SECTIONS) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(("name", "said", "change"), SECTIONS, ids=[name for name, _, _ in SECTIONS])
def test_an_example_gets_its_report_and_is_healthy_once_changed(
    name: str, said: str, change: str, tmp_path: Path
) -> None:
    script = ROOT / "examples" / name
    assert report(script, tmp_path) == said
    rows = change.splitlines()
    before, after = ("\n".join(row[2:] for row in rows if row[0] in (" ", sign)) for sign in "-+")
    text = script.read_text("utf-8")
    assert text.count(before) == 1
    changed = tmp_path / name
    changed.write_text(LIGHT + text.replace(before, after), "utf-8")
    assert "\nReport: healthy (" in report(changed, tmp_path)


def test_the_readme_shows_the_first_report_and_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    name, said, _ = SECTIONS[0]
    assert f"```\n$ accumviz run --check {name}\n{said}```\n" in readme
    main(["rules"])
    assert f"```\n$ accumviz rules\n{capsys.readouterr().out}```\n" in readme


def test_the_readmes_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []
