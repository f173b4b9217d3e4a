"""The chapters as written: short cells, no outputs, a text beside each figure."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import jupytext
import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "chapters").glob("*.md"))


def cells(path: Path) -> list[str]:
    return [cell.source for cell in jupytext.read(path, fmt="md:myst").cells if cell.cell_type == "code"]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_the_cells_of_a_chapter_are_short(chapter: Path) -> None:
    lengths = [sum(bool(line.strip()) for line in source.splitlines()) for source in cells(chapter)]
    assert lengths, "a chapter runs something"
    assert median(lengths) <= 8
    assert max(lengths) <= 20


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_every_chapter_is_in_the_table_of_contents(chapter: Path) -> None:
    assert f"file: chapters/{chapter.stem}\n" in (ROOT / "_toc.yml").read_text()


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_no_cell_hides_code_that_the_argument_needs(chapter: Path) -> None:
    notebook = jupytext.read(chapter, fmt="md:myst")
    hidden = {"remove-cell", "remove-input", "hide-cell", "hide-input"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and hidden & set(cell.metadata.get("tags", [])):
            lines = [line for line in cell.source.splitlines() if line.strip()]
            assert all(line.lstrip().startswith(("glue(", "from myst_nb", "assert ")) for line in lines), cell.source
