"""The notebooks in the built site, as files."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from tests.conftest import missing
from tests.notebooks.bare import BARE, site

ROOT = Path(__file__).resolve().parents[2]
HIDING = {"hide-input", "hide-cell", "remove-input"}
# Fences, code between backticks (but not a role's), formulas.
PARTS = r"^(`{3,})[^`\n]*\n.*?^\1$", r"(?<!\})(`+)(?!`).+?(?<!`)\2(?!`)", r"\$\$.*?\$\$", r"\$[^$]+\$"
CODE = re.compile("|".join(PARTS), re.DOTALL | re.MULTILINE)
MYST = re.compile(
    r"\{[\w:+-]+\}`|^ *:{3,}|^ *[`~]{3,} *\{|^\([\w:.-]+\)=|^:[\w-]+:|\]\((?!https?:|attachment:)|\]\{", re.MULTILINE
)


def words(notebook: Any) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def without_setup(notebook: Any) -> list[Any]:
    """Its cells but for those that install."""
    return [cell for cell in notebook.cells[:-1] if not cell.source.startswith("#@title Set up accumviz\n")]


def written(name: str) -> list[Any]:
    """The cells of the page that a notebook was made from."""
    (page,) = (path for folder in (ROOT, ROOT / "chapters") for path in folder.glob(f"{Path(name).stem}.md"))
    return [cell for cell in jupytext.read(page, fmt="md:myst").cells if cell.cell_type == "code"]


def test_a_notebook_is_valid_without_outputs_and_at_most_500_kb(notebook: Any, notebook_path: Path) -> None:
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook_path.stat().st_size <= 500 * 1024  # it carries accumviz, lab, rules and all
    opening, title = notebook.cells[:2]
    assert opening.cell_type == title.cell_type == "markdown"
    assert title.source.startswith("# ")
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert [cell.id for cell in notebook.cells] == [f"cell-{index}" for index in range(len(notebook.cells))]


def test_a_notebook_whose_cells_use_a_gpu_asks_for_one(notebook: Any, notebook_path: Path) -> None:
    measures = notebook_path.stem in ("03_accumulation", "07_memory")
    assert (notebook.metadata.get("accelerator") == "GPU") == measures


def test_nothing_of_myst_is_left_in_a_notebook(notebook: Any) -> None:
    assert MYST.findall(CODE.sub("", words(notebook))) == []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)
            assert not re.match(r":tags:|---", cell.source)
            assert set(cell.metadata) <= {"jupyter", "cellView", "tags"}
            assert set(cell.metadata.get("tags", [])) <= {"raises-exception"}


def test_a_notebook_has_the_code_of_its_page_but_not_what_only_checks_it(notebook: Any, notebook_name: str) -> None:
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"][1:-1]
    shown = [cell.source for cell in written(notebook_name) if "remove-cell" not in cell.metadata.get("tags", [])]
    assert [re.sub(r"\A#@title .*\n", "", source) for source in code] == shown


def made(cell: Any) -> set[str]:
    """The names that a cell makes: by assigning, by `def` and `class`, by importing."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(cell.source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def test_no_cell_of_a_notebook_needs_a_name_that_only_a_removed_one_makes(notebook_name: str) -> None:
    lost: set[str] = set()
    for cell in written(notebook_name):
        names = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)]
        bound = made(cell)
        if "remove-cell" in cell.metadata.get("tags", []):
            lost |= bound
        else:
            assert lost & ({node.id for node in names} - bound) == set(), cell.source
            lost -= bound


def test_a_notebook_imports_only_what_a_runtime_has_or_it_brings(notebook: Any) -> None:
    if not (BARE / ".ready").exists():
        missing(f"there is no bare runtime: run `make {BARE.name}/.ready`")
    brought = set(re.findall(r"\baccumviz\b|\btorchviz\b", notebook.cells[-1].source.splitlines()[1]))
    there = {path.name.partition(".")[0] for path in site(BARE).iterdir()} | sys.stdlib_module_names | brought
    for cell in without_setup(notebook):
        asked = set(re.findall(r'^if find_spec\("(\w+)"\)', cell.source, re.MULTILINE))  # and goes on without it
        tree = ast.walk(ast.parse(cell.source)) if cell.cell_type == "code" else ()
        for node in tree:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= there | asked, cell.source


def test_code_that_the_page_hides_is_folded_under_a_title(notebook: Any, notebook_name: str) -> None:
    hidden = {cell.source for cell in written(notebook_name) if HIDING & {*cell.metadata.get("tags", [])}}
    for cell in without_setup(notebook):
        title, _, source = cell.source.partition("\n")
        folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert folded == (cell.metadata.get("cellView") == "form") == (source in hidden)
        assert not folded or re.fullmatch(r"#@title (\w+|Fig\. [\d.]+)", title)


def test_the_numbers_in_a_notebook_are_those_of_its_page(notebook: Any, notebook_name: str, site: Path) -> None:
    stem = Path(notebook_name).stem
    page = next(path for path in (site / f"chapters/{stem}.html", site / f"{stem}.html") if path.exists()).read_text()
    captions = re.findall(r'<span class="caption-number">(Fig\. [\d.]+) </span>', page)
    assert re.findall(r"^\*\*(Fig\. [\d.]+)\*\* ", words(notebook), re.MULTILINE) == captions
    equations = re.findall(r'<span class="eqno">\(([\d.]+)\)', page)
    assert re.findall(r"\\tag\{([\d.]+)\}", words(notebook)) == equations
