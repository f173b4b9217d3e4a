"""The chapters in JupyterLab: no answer is open, and what nobody has edited is saved as it was, byte for byte."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from wherebook.lab import FOLDED, Pages
from wherebook.notebooks import TITLES

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "chapters").glob("*.md"))


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(root_dir=str(tmp_path), parent=None)


def opened(pages: Pages, path: Path) -> Any:
    shutil.copy(path, pages.root_dir)
    return pages.get(path.name, type="notebook")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_no_answer_is_open_and_an_untouched_page_stays_as_it_is(path: Path, pages: Pages) -> None:
    model = opened(pages, path)
    cells = model["content"]["cells"]
    answers = [cell for cell in cells if "{.answers}" in cell["source"] or FOLDED & {*cell["metadata"].get("tags", [])}]
    assert answers
    assert all(cell["metadata"]["jupyter"]["source_hidden"] for cell in answers)
    assert not any("\n\n" in cell["source"] for cell in answers if cell["cell_type"] == "markdown")
    # All that JupyterLab shows of a folded cell.
    shown = {cell["source"].partition("\n")[0] for cell in answers} - {"{.answers}"}
    labels = {line for line in shown if line.endswith(")=")}
    assert shown - labels <= {f"#@title {name}" for name in (*TITLES.values(), "Code")}
    # As JupyterLab does: it adds what the kernel said, unfolds, runs.
    model["content"]["metadata"]["language_info"] = {"name": "python", "version": "3.99"}
    model["content"]["metadata"]["kernelspec"]["display_name"] = "Python 3 (ipykernel)"
    answers[0]["metadata"]["jupyter"] = {}
    for cell in cells:
        cell["metadata"]["trusted"] = True
    pages.save(model, path.name)
    assert Path(pages.root_dir, path.name).read_bytes() == path.read_bytes()


def test_what_was_edited_is_saved_without_a_trace_of_the_folds(pages: Pages) -> None:
    model = opened(pages, CHAPTERS[2])
    (cell,) = [
        cell for cell in model["content"]["cells"] if cell["source"].startswith("{.answers}\nThe gradient is −40")
    ]
    cell["source"] = "{.answers}\nThe gradient is twice as large."
    pages.save(model, CHAPTERS[2].name)
    file = Path(pages.root_dir, CHAPTERS[2].name)
    text = file.read_text("utf-8")
    assert "\n\n{.answers}\nThe gradient is twice as large.\n\n`check` reads a recording" in text
    assert not {"source_hidden", "continues", "trusted"} & {*text.replace(":", " ").split()}
    pages.save(pages.get(file.name, type="notebook"), file.name)
    assert file.read_text("utf-8") == text
