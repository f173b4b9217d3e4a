"""The chapters as written: short cells, no outputs, a text beside each figure."""

import ast
import re
from pathlib import Path
from statistics import median

import jupytext
from wherebook.gate import only_asks

from tests.book.conftest import CHAPTERS
from tests.conftest import ROOT

HIDING = {"remove-cell", "remove-input", "hide-cell", "hide-input"}


def cells(path: Path) -> list[str]:
    return [cell.source for cell in jupytext.read(path, fmt="md:myst").cells if cell.cell_type == "code"]


def test_the_cells_of_a_chapter_are_short(chapter: Path) -> None:
    lengths = [sum(bool(line.strip()) for line in source.splitlines()) for source in cells(chapter)]
    assert lengths, "a chapter runs something"
    assert median(lengths) <= 8
    assert max(lengths) <= 20


def test_the_loop_to_download_is_the_one_that_chapter_5_runs() -> None:
    file = ast.parse((ROOT / "chapters/accumulate.py").read_text("utf-8"))
    (loop,) = (ast.unparse(node) for node in file.body if isinstance(node, ast.FunctionDef))
    assert loop in [ast.unparse(ast.parse(source)) for source in cells(ROOT / "chapters/05_recipe.md")]


def test_a_chapter_has_twelve_sections_at_most(chapter: Path) -> None:
    text = jupytext.read(chapter, fmt="md:myst").cells
    headings = [line for cell in text if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    assert sum(line.startswith("## ") for line in headings) <= 12


def test_every_chapter_is_in_the_table_of_contents(chapter: Path) -> None:
    assert f"file: chapters/{chapter.stem}\n" in (ROOT / "_toc.yml").read_text()


def test_no_visible_cell_needs_a_name_that_a_hidden_one_makes(chapter: Path) -> None:
    hidden_names: set[str] = set()
    for cell in jupytext.read(chapter, fmt="md:myst").cells:
        if cell.cell_type != "code":
            continue
        names = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)]
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        if HIDING & set(cell.metadata.get("tags", [])):
            hidden_names |= bound
        else:
            used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            assert hidden_names & (used - bound) == set(), cell.source
            hidden_names -= bound


def test_what_needs_a_kernel_runs_in_the_notebook_only(chapter: Path) -> None:
    """Built, it would leave all that its widget knows on the page, and nothing to see."""
    for cell in jupytext.read(chapter, fmt="md:myst").cells:
        if cell.cell_type == "code":
            assert (".live()" in cell.source) == ("skip-execution" in cell.metadata.get("tags", [])), cell.source


def test_notebooks_of_chapters_2_to_4_have_a_live_cell_and_their_pages_say_what_to_try() -> None:
    for chapter in CHAPTERS[1:4]:
        found = jupytext.read(chapter, fmt="md:myst").cells
        before = [found[i - 1] for i, cell in enumerate(found) if cell.source.endswith(".live()")]
        assert before
        assert all(cell.cell_type == "markdown" and "notebook" in cell.source for cell in before)


def test_every_prediction_takes_an_answer_and_keeps_its_source_to_itself(chapter: Path) -> None:
    text = chapter.read_text("utf-8")
    assert not re.search(r"\{admonition\} *predict|:class: *predict", text, re.IGNORECASE), "ask with av.predict"
    for cell in jupytext.read(chapter, fmt="md:myst").cells:
        if cell.cell_type == "code" and only_asks(cell.source):
            assert "hide-input" in cell.metadata.get("tags", []), cell.source
