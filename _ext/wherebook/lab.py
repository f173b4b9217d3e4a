"""The pages in JupyterLab, for `make lab`: answers are folded, and what was not edited is saved as it was.

Jupytext writes a page in a form of its own: other line breaks, another head. A page is therefore written only where its
cells differ from those of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

from wherebook.notebooks import title

FOLDED = {"answers", "hide-cell", "hide-input", "remove-cell", "remove-input"}
# The line before a paragraph that answers a question.
ANSWERS = "{.answers}\n"
SPLIT = "continues"


def opened(notebook: NotebookNode) -> None:
    """Fold the cells that give an answer away, and paragraphs that do, each of which becomes a cell."""
    notebook.cells = [part for cell in notebook.cells for part in parts(cell)]
    for cell in notebook.cells:
        is_code = bool(FOLDED & set(cell.metadata.get("tags", [])))
        if is_code:  # of a folded cell, JupyterLab shows the first line
            cell.source = f"#@title {title(cell.source, '')}\n{cell.source}"
        if is_code or ANSWERS in cell.source:
            cell.metadata.setdefault("jupyter", {})["source_hidden"] = True


def parts(cell: NotebookNode) -> list[NotebookNode]:
    """A cell, or what stands before, in and behind its paragraphs that answer a question."""
    if ANSWERS not in cell.source:
        return [cell]
    texts: list[str] = []
    for paragraph in cell.source.split("\n\n"):
        if not texts or ANSWERS in paragraph or ANSWERS in texts[-1]:
            texts.append(paragraph)
        else:
            texts[-1] += f"\n\n{paragraph}"
    made = [nbformat.v4.new_markdown_cell(text, metadata={SPLIT: index > 0}) for index, text in enumerate(texts)]
    made[0].metadata = cell.metadata
    return made


def closed(notebook: NotebookNode) -> None:
    """Take back what `opened` did."""
    cells: list[NotebookNode] = []
    for cell in notebook.cells:
        cell.source = re.sub(r"\A#@title .*\n", "", cell.source)
        folding = cell.metadata.get("jupyter", {})
        folding.pop("source_hidden", None)
        if not folding:
            cell.metadata.pop("jupyter", None)
        if cell.metadata.pop(SPLIT, False) and cells:
            cells[-1].source += f"\n\n{cell.source}"
        else:
            cells.append(cell)
    notebook.cells = cells


def cells_of(notebook: NotebookNode) -> str:
    """The cells as Jupytext writes them, whatever the kernel says of itself."""
    kept = {name: value for name, value in notebook.metadata.items() if name in ("jupytext", "myst")}
    return jupytext.writes(NotebookNode(notebook, metadata=NotebookNode(kept)), fmt="md:myst")


class Pages(jupytext.TextFileContentsManager):  # type: ignore[misc]
    """JupyterLab's way to the files."""

    def get(self, path: str, content: bool = True, **options: Any) -> dict[str, Any]:
        """Open a page, folded."""
        model: dict[str, Any] = super().get(path, content, **options)
        if is_page(model) and content:
            opened(model["content"])
        return model

    def save(self, model: dict[str, Any], path: str = "") -> dict[str, Any]:
        """Save a page, if its cells have changed."""
        if is_page(model | {"path": path}):
            notebook = nbformat.from_dict(model["content"])
            closed(notebook)
            file = Path(self.root_dir, path.strip("/"))
            if file.exists() and cells_of(jupytext.read(file)) == cells_of(notebook):
                unchanged: dict[str, Any] = self.get(path, content=False)
                return unchanged
            model = model | {"content": notebook}
        saved: dict[str, Any] = super().save(model, path)
        return saved


def is_page(model: dict[str, Any]) -> bool:
    return model["type"] == "notebook" and model["path"].endswith(".md")
