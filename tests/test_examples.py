"""Each loop of `examples` gets the report that its page shows, and is healthy once the change below it is made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.light import LIGHT

ROOT = Path(__file__).resolve().parent.parent
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
