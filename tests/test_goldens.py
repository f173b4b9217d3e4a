"""The goldens: what is written of a loop is the same in each run, and a difference is named once for all loops."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import accumviz as av
from tests.goldens import compare, describe, plain
from tests.toys import toy


def test_what_varies_from_run_to_run_is_left_out() -> None:
    held = {"time": 1.5, "loss": 0.123456789, "file": f"{Path.cwd()}/a.py", "of": (float("nan"), True)}
    assert plain(held) == {"loss": 0.123457, "file": "a.py", "of": ["nan", True]}


def test_a_ledger_is_described_by_its_events_shares_report_and_pages() -> None:
    described = describe(toy())
    assert [event["kind"] for event in described["ledger"]["events"]] == ["backward", "backward", "step", "zero_grad"]
    assert described["ledger"]["events"][1]["parameters"]["w"]["live"] == [0, 1]
    assert described["report"] == av.check(toy()).text().splitlines()
    assert described == describe(toy()) and described["player"]["text"] != described["timeline"]["text"]


def written(folder: Path, **loops: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, described in loops.items():
        (folder / f"{name}.json").write_text(json.dumps({"loop": name, "recordings": [described]}))
    return folder


def test_one_difference_in_two_loops_is_one_line(tmp_path: Path) -> None:
    old = describe(toy())
    new = copy.deepcopy(old)
    new["ledger"]["events"][2]["parameters"]["w"]["norms"][1] *= 2
    new["report"].append("another line")
    lines = compare(written(tmp_path / "old", a=old, b=old, c=old), written(tmp_path / "new", a=new, b=new, d=old))
    assert sorted(re.sub(" +", " ", line).replace(str(tmp_path), "") for line in lines) == [
        " 1 ×: only in /new (d)",
        " 1 ×: only in /old (c)",
        " 2 × recordings ledger events parameters * norms: × 2 (a, b)",
        " 2 × recordings report: nothing -> another line (a, b)",
    ]
    assert compare(tmp_path / "old", tmp_path / "old") == []
