"""The rules of the house: which way imports point, what is in the repository, what the commands say."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accumviz"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# Whatever imports torch records; all else reads what was recorded. Each folder may import from those before it.
RECORDER = ("accumviz.recorder", "accumviz.graph.trace", "accumviz.graph.recorded", "accumviz.graph.node_values")
TEACHING_WITH_TORCH = {"accumviz.book.distribute", "accumviz.book.lab"}
# Above everything, the recorder included: they run, or stand around, what the user trains.
ABOVE = {"accumviz.cli", "accumviz.expectation"} | {name for name in MODULES if "accumviz.integrations" in name}
DATA = {"accumviz.arguments", "accumviz.show"}
FLOORS = ("accumviz.ledger", "accumviz.graph", "accumviz.checks", "accumviz.views", "accumviz.book")


def imports(module: str) -> set[str]:
    """The modules that a module names in any import: at its top, inside functions, for types only."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            found.update(
                f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source for alias in node.names
            )
    return found


def inside(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if any(name == package or name.startswith(package + ".") for package in packages)}


DATA |= inside(set(MODULES), "accumviz.ledger", "accumviz.graph") - inside(set(MODULES), *RECORDER)
READERS = set(MODULES) - inside(set(MODULES), *RECORDER) - TEACHING_WITH_TORCH - ABOVE


@pytest.mark.parametrize("module", sorted(READERS - {"accumviz"}))
def test_a_module_imports_nothing_from_a_later_folder(module: str) -> None:
    folders = [folder for folder in FLOORS if inside({module}, folder)]
    later = FLOORS[FLOORS.index(folders[0]) + 1 :] if folders else ()
    assert inside(imports(module), *later) == set() or module in {"accumviz.__main__", "accumviz.show"}
    assert inside(imports(module), *RECORDER) == set()


@pytest.mark.parametrize("folders", [RECORDER, ("accumviz.checks",)])
def test_the_recorder_and_the_checks_know_the_data_and_nothing_else(folders: tuple[str, ...]) -> None:
    for module in inside(set(MODULES), *folders):
        known = inside(imports(module), "accumviz") - inside(imports(module), *folders) - {"accumviz"}
        assert known - DATA == set(), module


def test_only_the_recorder_and_what_records_for_the_book_import_torch() -> None:
    others = set(MODULES) - inside(set(MODULES), *RECORDER)
    assert {module for module in others if inside(imports(module), "torch")} <= TEACHING_WITH_TORCH


def test_nothing_outside_the_book_imports_the_books_instruments() -> None:
    outside = set(MODULES) - inside(set(MODULES), "accumviz.book") - {"accumviz"}
    assert {module for module in outside if inside(imports(module), "accumviz.book")} == set()


def test_no_data_module_imports_matplotlib() -> None:
    assert {module for module in DATA if inside(imports(module), "matplotlib")} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    # The package itself names the verbs' homes, and loads none of them.
    modules = set(MODULES) - {"accumviz"}
    TopologicalSorter({module: imports(module) & modules - {module} for module in modules}).prepare()


def test_modules_are_looked_up_by_name_in_two_places_only() -> None:
    looks_up = re.compile(r"(import_module|resolve_name)\(").search
    by_name = {module for module, path in MODULES.items() if looks_up(path.read_text("utf-8"))}
    assert by_name - inside(by_name, *RECORDER) == {"accumviz", "accumviz.show"}


# A function asks more of its reader with each of these, and with each operand of a boolean operator after the first.
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.comprehension, ast.Lambda)
# Today's figures: each landing may lower them, none may raise them.
MOST_OVER_15, MOST_COMPLEX, MEAN = 0, 14, 3.64


def complexity(function: ast.AST) -> int:
    total, left = 1, list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, BRANCHES):
            total += 1 + len(getattr(node, "ifs", ()))
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        left += ast.iter_child_nodes(node)
    return total


def test_functions_do_not_become_more_complex() -> None:
    found: dict[str, int] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{module}:{node.lineno} {node.name}"] = complexity(node)
    over = sorted((n for n, value in found.items() if value > 15), key=found.__getitem__)
    assert len(over) <= MOST_OVER_15, over
    assert max(found.values()) <= MOST_COMPLEX, over[-1]
    assert sum(found.values()) / len(found) <= MEAN


LIGHT = READERS | {"accumviz.cli", "accumviz.expectation", "accumviz.recorder.run"}


@pytest.mark.parametrize(
    ("library", "modules"),
    [
        ("torch", LIGHT),
        ("matplotlib", {"accumviz", "accumviz.views.graph"} | DATA | inside(set(MODULES), "accumviz.checks")),
        ("pygraphviz", READERS),
    ],
)
def test_importing_what_reads_a_recording_brings_in_no_large_library(library: str, modules: set[str]) -> None:
    """The modules are imported in turn, in an interpreter of their own, and the first that brings it is named."""
    script = (
        "import importlib, sys\n"
        f"for module in {sorted(modules)}:\n"
        "    importlib.import_module(module)\n"
        f"    assert {library!r} not in sys.modules, module\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


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


def test_every_file_that_is_named_on_the_map_or_in_a_first_line_is_there() -> None:
    """By its name alone, or by the last of its folders."""
    paths = ["/" + str(path.relative_to(ROOT)) for path in tracked()]
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.glob("*/js/*.[jt]s")]
    first = {str(path.relative_to(ROOT)): path.read_text("utf-8").partition("\n")[0] for path in sources}
    assert [name for name, line in first.items() if line and not re.search(r"\w", line)] == []
    for where, text in {**first, "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text("utf-8")}.items():
        named = re.findall(r"(?<![*\w./-])[\w./-]*\w\.(?:py|js|yml|json|toml|md|txt)\b", text)
        gone = [name for name in named if not any(path.endswith("/" + name) for path in paths)]
        assert gone == [], where


def test_requirements_are_pinned_and_name_no_place_to_download_from() -> None:
    for name in ("requirements.txt", "tests/requirements.txt", "tests/notebooks/requirements.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        for line in lines:
            assert re.fullmatch(r"-r \.\./requirements\.txt|[\w.-]+==[\w.]+(; .+)?", line), line
            assert "+" not in line


def test_make_without_a_target_lists_every_command() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("book", "chapter", "test", "lab", "bench", "lint", "clean", "help"):
        assert f"make {target} " in shown
