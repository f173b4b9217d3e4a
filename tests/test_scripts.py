"""The page's scripts: typed, linted, unit-tested without a browser, and built from what is committed beside them."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.js import scripts

MODULES = sorted(path for folder in scripts.SOURCES for path in folder.glob("*.js"))
CARRIED = [path for folder in scripts.BUILT for path in sorted(folder.iterdir())]
SCRIPTS = {path.stem: path for path in CARRIED if path.suffix == ".js"}
PICTURES = ("opening", "overlap", "peaks", "plumbing", "sharding", "streams")


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
    # The report above a player, and hatching, take half a KiB.
    assert sizes["accumviz"] <= 18.5 * 1024 + 50
    assert sizes["explore"] <= 22.5 * 1024 + 50
    assert sizes["explore-live"] <= 22.5 * 1024 + 100
    assert sizes["lab"] <= 16 * 1024
    assert max(sizes[name] for name in PICTURES) <= 8 * 1024
    assert sizes["predict"] <= 3_400
    assert sizes["unfold"] <= 2_200  # the way back to where the reader was takes 100 bytes
    assert sizes["whole"] <= 29 * 1024 <= 0.75 * sum(sizes[name] for name in ("explore", "lab", "predict"))
    unwanted = r"\bimport\b|innerHTML|insertAdjacentHTML|document\.write|\beval\b|\bfetch\b|XMLHttpRequest|</script"
    for path in SCRIPTS.values():
        assert not re.search(unwanted, path.read_text("utf-8"))
        assert path.read_text("utf-8").startswith("// Built by `make scripts`.")


@pytest.mark.parametrize(
    ("name", "exports"), [("accumviz", 0), ("explore", 0), ("whole", 0), ("lab", 0), ("unfold", 0), ("explore-live", 1)]
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
