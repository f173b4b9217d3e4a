"""The rules of the house: which way imports point, what is in the repository, what the commands say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accumviz"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
DATA = {"accumviz.ledger", "accumviz.graph", "accumviz.files", "accumviz.measured", "accumviz.doctor"}


def imports(module: str, *, while_loading: bool = False) -> set[str]:
    """The modules that a module names in its imports; with `while_loading`, only what its loading needs."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if while_loading and (typing_only or later):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            found.update(
                f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source for alias in node.names
            )
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def inside(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if any(name == package or name.startswith(package + ".") for package in packages)}


@pytest.mark.parametrize("module", sorted(inside(set(MODULES), "accumviz.instruments")))
def test_instruments_do_not_know_the_views(module: str) -> None:
    assert inside(imports(module), "accumviz.views") == set()


@pytest.mark.parametrize("module", sorted(inside(set(MODULES), "accumviz.views")))
def test_views_know_neither_the_instruments_nor_torch(module: str) -> None:
    assert inside(imports(module), "accumviz.instruments", "torch") == set()


@pytest.mark.parametrize("module", sorted(DATA & set(MODULES)))
def test_data_modules_know_neither_instruments_nor_views(module: str) -> None:
    assert inside(imports(module), "accumviz.instruments", "accumviz.views", "torch", "matplotlib") == set()


def test_only_the_instruments_import_torch() -> None:
    others = set(MODULES) - inside(set(MODULES), "accumviz.instruments")
    assert {module for module in others if inside(imports(module), "torch")} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imports(module, while_loading=True) & set(MODULES) - {module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" → ".join(circle.args[1]), pytrace=False)


DATA_FIRST = sorted({"accumviz"} | (DATA & set(MODULES)))
VIEWS = sorted(inside(set(MODULES), "accumviz.views"))
# One interpreter, in which each module is the first of accumviz to be imported; what it brings stays, and is told.
BROUGHT = """
import sys
from importlib import import_module
for module in sys.argv[1:]:
    for ours in [name for name in sys.modules if name.partition(".")[0] == "accumviz"]:
        del sys.modules[ours]
    import_module(module)
    print(module, *{name.partition(".")[0] for name in sys.modules} & {"torch", "matplotlib"})
"""


def test_importing_what_reads_a_recording_brings_in_no_torch_and_importing_data_no_matplotlib() -> None:
    command = [sys.executable, "-c", BROUGHT, *DATA_FIRST, *VIEWS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    brought = {module: {*names} for module, *names in map(str.split, done.stdout.splitlines())}
    assert [*brought] == [*DATA_FIRST, *VIEWS]
    assert [module for module in DATA_FIRST if brought[module]] == []
    assert [module for module in VIEWS if "torch" in brought[module]] == []


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: there is no list of tracked files")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_tracked_file_names_a_place_on_somebodys_machine() -> None:
    place = re.compile(r"(?<![\w.])/(?:home|Users|root|work|tmp)/[A-Za-z0-9_.]+/")
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in place.finditer(text)]
    assert found == []


def test_no_notebook_and_no_output_is_tracked() -> None:
    assert [path.name for path in tracked() if path.suffix == ".ipynb"] == []
    assert [path for path in tracked() if "_build" in path.parts] == []


def test_requirements_are_pinned_and_name_no_place_to_download_from() -> None:
    for name in ("requirements.txt", "tests/requirements.txt", "tests/notebooks/requirements.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        for line in lines:
            assert re.fullmatch(r"-r \.\./requirements\.txt|[\w.-]+==[\w.]+(; .+)?", line), line
            assert "+" not in line


def test_requirements_pin_jupyter_book_before_its_rewrite_and_torch() -> None:
    text = (ROOT / "requirements.txt").read_text()
    assert re.search(r"^jupyter-book==1\.", text, re.MULTILINE)
    assert re.search(r"^torch==2\.13\.0$", text, re.MULTILINE)


def test_make_without_a_target_lists_every_command() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("book", "chapter", "test", "lab", "bench", "lint", "clean", "help"):
        assert f"make {target} " in shown


def test_make_says_which_pythons_will_do(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    stale = tmp_path / "oldpython"
    stale.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python of long ago && exit 0\nexit 1\n')
    stale.chmod(0o755)
    done = subprocess.run(
        ["make", f"PYTHON={stale}", "book"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "3.11, 3.12 or 3.13" in done.stderr
    assert "Python of long ago" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_ci_runs_the_command_of_the_readme() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")


def test_every_ignored_lint_rule_carries_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    ignored = text[text.index("ignore = [") : text.index("[tool.ruff.lint.per-file-ignores]")]
    for line in ignored.splitlines()[1:]:
        if line.strip().startswith('"'):
            assert "# " in line, line
