"""The page's scripts: typed, linted, unit-tested without a browser, and built from what is committed beside them."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger, Parameter
from accumviz.views import payload
from tests.conftest import missing
from tests.js import scripts

MODULES = sorted(path for folder in scripts.SOURCES for path in folder.glob("*.js"))
CARRIED = [path for folder in scripts.BUILT for path in sorted(folder.iterdir())]
SCRIPTS = {path.stem: path for path in CARRIED if path.suffix == ".js"}


@pytest.fixture(scope="session", autouse=True)
def _tools() -> None:
    if not scripts.is_installed():
        missing("the tools of the scripts are not installed: run `make scripts`")


def test_what_pages_carry_is_what_its_sources_build(tmp_path: Path) -> None:
    scripts.build(tmp_path)
    built, committed = (
        {path.name: path.read_text("utf-8") for path in paths} for paths in (tmp_path.iterdir(), CARRIED)
    )
    assert built == committed, "a script or a sheet is not what its sources build: run `make scripts`, and commit"


def test_types_hold_and_the_linter_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.check() == 0, capsys.readouterr().out


def test_units_pass() -> None:
    done = scripts.run("node", "--disable-warning=MODULE_TYPELESS_PACKAGE_JSON", "--test", "tests/js/*.test.js")
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"^. pass (\d+)", done.stdout, re.MULTILINE)[1]) > 40  # type: ignore[index]


@pytest.mark.parametrize(
    ("tool", "wrong"),
    [
        ("tsc", 'import { clamp } from "./numbers.js";\nexport const x = clamp("1", 2, 3);\n'),
        ("eslint", "export const put = (el, text) => { el.innerHTML = text; };\n"),
        ("eslint", "export const unknown = () => fetch('x');\n"),
    ],
    ids=["wrong argument", "markup", "request"],
)
def test_a_tool_finds_a_fault(tool: str, wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "accumviz" / "views" / "js"
    shutil.copytree(scripts.SOURCES[0], folder)
    (folder / "fault.js").write_text(wrong)
    if tool == "tsc":
        config = tmp_path / "tests" / "js" / "tsconfig.json"
        config.parent.mkdir(parents=True)
        shutil.copy(scripts.HERE / "tsconfig.json", config)
        done = scripts.run("tsc", "--project", config)
    else:
        done = scripts.run(
            "eslint", *scripts.STYLE, "--stdin", "--stdin-filename=accumviz/views/js/fault.js", text=wrong
        )
    assert done.returncode != 0
    assert "fault.js" in done.stdout


def test_a_page_carries_little_and_asks_for_nothing_more() -> None:
    sizes = {name: len(gzip.compress(path.read_bytes())) for name, path in SCRIPTS.items()}
    assert sizes["accumviz"] <= 18 * 1024
    assert sizes["live"] <= 18 * 1024
    assert sizes["explore"] <= 22 * 1024 + 50
    assert sizes["explore-live"] <= 22 * 1024 + 100
    assert sizes["lab"] <= 16 * 1024
    assert sizes["predict"] <= 3_400
    assert sizes["whole"] <= 29 * 1024 <= 0.75 * sum(sizes[name] for name in ("explore", "lab", "predict"))
    unwanted = r"\bimport\b|innerHTML|insertAdjacentHTML|document\.write|\beval\b|\bfetch\b|XMLHttpRequest|</script"
    for path in SCRIPTS.values():
        assert not re.search(unwanted, path.read_text("utf-8"))
        assert path.read_text("utf-8").startswith("// Built by `make scripts`.")


@pytest.mark.parametrize(
    ("name", "exports"),
    [("accumviz", 0), ("explore", 0), ("whole", 0), ("lab", 0), ("live", 1), ("explore-live", 1)],
)
def test_a_module_has_one_export_the_view_where_a_notebook_loads_it(name: str, exports: int) -> None:
    text = SCRIPTS[name].read_text("utf-8")
    assert len(re.findall(r"export\s*\{[\w$]+ as default\}", text)) == exports
    assert len(re.findall(r"\bexport\b", text)) == exports


def test_what_only_a_kernel_can_is_in_the_module_of_notebooks_and_not_in_that_of_pages() -> None:
    page, notebook = (SCRIPTS[name].read_text("utf-8") for name in ("explore", "explore-live"))
    for word in ("The kernel is recording this run.", "another value", "save_changes", "change:told"):
        assert word in notebook
        assert word not in page
    assert "data-accumviz-" not in notebook, "a widget is bare: no page is searched for players"


def test_tools_are_locked_exactly_and_no_registry_is_named() -> None:
    wanted = json.loads((scripts.HERE / "package.json").read_text())["devDependencies"]
    lock = (scripts.HERE / "package-lock.json").read_text()
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    assert json.loads(lock)["packages"][""]["devDependencies"] == wanted
    assert '"resolved"' not in lock
    assert all("integrity" in one for path, one in json.loads(lock)["packages"].items() if path)


def at_random(rng: np.random.Generator) -> Ledger:
    """A loop in no order at all: contributions, Nones, zeros, clips, syncs, closures, two optimizers, two ranks."""
    count, length = int(rng.choice([1, 2, 7, 32], p=[0.3, 0.3, 0.3, 0.1])), int(rng.integers(1, 60))
    kinds = rng.choice(["backward", "backward", "step", "zero_grad", "clip", "sync", "edit"], length)
    events = tuple(
        Event(
            e,
            str(kind),
            rank=int(rng.integers(2)) if rng.random() < 0.2 else None,
            within="step" if kind == "backward" and rng.random() < 0.2 else "",
            details={"optimizer_index": int(rng.integers(2)), "skipped": bool(rng.random() < 0.2)}
            if kind == "step"
            else {},
        )
        for e, kind in enumerate(kinds)
    )
    present = rng.random((length, count)) < 0.8
    added = (kinds == "backward")[:, None] & (rng.random((length, count)) < 0.7)
    grad = rng.choice([0.0, 1.0, 2.5, np.inf, np.nan], (length, count), p=[0.3, 0.4, 0.2, 0.05, 0.05])
    norms = rng.choice([0.0, 1.0, np.nan], (length, count), p=[0.2, 0.7, 0.1])
    owners = [(), (0,), (1,), (0, 1)]
    parameters = tuple(
        Parameter(
            f"m{p // 4}.w{p}",
            (2, 2),
            optimizers=owners[rng.integers(4)],
            rank=int(rng.integers(2)) if rng.random() < 0.3 else None,
            unsharded_of="m0.w0" if p and rng.random() < 0.2 else "",
        )
        for p in range(count)
    )
    state = np.where(present, PRESENT, 0) + np.where(added, CONTRIBUTED, 0)
    return Ledger(parameters, events, np.where(added, norms, np.nan), np.where(present, grad, np.nan), state)


def read_by_the_page(told: list[dict[str, Any]]) -> list[Any]:
    """What the page's own functions make of lifetimes: per ledger, row and event what is live, used and lost."""
    script = """
        import { decode, live, lost } from "./accumviz/views/js/lifetimes.js";
        let text = "";
        for await (const chunk of process.stdin) text += chunk;
        const rows = ({ length, flow, rows }) => rows.map(({ c, f }) => {
          const read = decode(flow[f], c);
          return Array.from({ length }, (_, e) => {
            const here = live(read, e);
            const used = here.filter((k) => read.consumed[k] <= e);
            return [here, used].map((some) => some.map((k) => read.born[k])).concat([lost(read, e)]);
          });
        });
        console.log(JSON.stringify(JSON.parse(text).map(rows)));
    """
    quiet = "--disable-warning=MODULE_TYPELESS_PACKAGE_JSON"
    done = scripts.run("node", quiet, "--input-type=module", "--eval", script, text=json.dumps(told))
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def norms(data: dict[str, Any], p: int, length: int) -> list[float]:
    """A row's contributions: as the page has them, or of all elements that it has."""
    if "c" in data:
        found: list[float] = data["c"][p * length : (p + 1) * length]
        return found
    return [-1.0 if values is None else float(np.linalg.norm(values)) for values in data["x"][str(p)][0]]


def carried(ledger: Ledger) -> dict[str, Any]:
    data, _ = payload.ledger_data(ledger)
    length, rows = len(ledger), data["p"]
    told = [{"c": norms(data, p, length), "f": row["f"]} for p, row in enumerate(rows)]
    return {"length": length, "flow": data["flow"], "rows": told, "in": [row.get("in") for row in rows]}


def test_the_page_holds_live_used_and_lost_what_the_ledger_says() -> None:
    rng = np.random.default_rng(7)
    ledgers = [at_random(rng) for _ in range(300)]
    told = [carried(ledger) for ledger in ledgers]
    assert any(fate < 0 for one in told for each in one["flow"] for fate in each["runs"]), "something is handed on"
    assert any(inside and inside[1] > inside[0] + 1 for one in told for inside in one["in"]), "there are groups"
    for ledger, one, found in zip(ledgers, told, read_by_the_page(told), strict=True):
        consumed = ledger.outcomes.consumed
        for row, (inside, events) in enumerate(zip(one["in"], found, strict=True)):
            members = range(*inside) if inside else [row]
            for e, (live, used, lost) in enumerate(events):
                expected = {p: ledger.live(e, p) for p in members}
                assert live == sorted({b for births in expected.values() for b in births})
                firsts = {b: [int(consumed[b, p]) for p in members if ledger.state[b, p] & CONTRIBUTED] for b in live}
                assert used == [b for b, steps in firsts.items() if any(0 <= step <= e for step in steps)]
                if not inside:
                    assert lost == ledger.unconsumed(e).get(ledger.parameters[row].name, [])


def test_of_thinned_events_what_is_live_is_what_the_ledger_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MOST_EVENTS", 12)
    rng = np.random.default_rng(8)
    ledgers = [ledger for ledger in (at_random(rng) for _ in range(60)) if len(ledger) > 12]
    told = [carried_thinned(ledger) for ledger in ledgers]
    for ledger, (chosen, _), found in zip(ledgers, told, read_by_the_page([one for _, one in told]), strict=True):
        for p in range(len(ledger.parameters)):
            for position, (live, _, _) in enumerate(found[p]):
                expected = [b for b in ledger.live(chosen[position], p) if b in chosen]
                assert [chosen[b] for b in live] == expected


def carried_thinned(ledger: Ledger) -> tuple[list[int], dict[str, Any]]:
    data, _ = payload.ledger_data(ledger)
    chosen = data["e"]["i"]
    rows = [{"c": norms(data, p, len(chosen)), "f": row["f"]} for p, row in enumerate(data["p"])]
    return chosen, {"length": len(chosen), "flow": data["flow"], "rows": rows}
