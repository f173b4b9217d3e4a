"""Every page with cells is also a notebook, `notebooks/<page>.ipynb` in the built site."""

from __future__ import annotations

import posixpath
from pathlib import Path

import jupytext
import nbformat
from sphinx.application import Sphinx

FOLDER = "notebooks"


def is_notebook(app: Sphinx, pagename: str) -> bool:
    return "kernelspec" in app.env.metadata.get(pagename, {})


def notebook_path(pagename: str) -> str:
    """Where a page's notebook lies in the site: flat, because a reader ends with one file in a downloads folder.

    >>> notebook_path("chapters/01_graphs")
    'notebooks/01_graphs.ipynb'
    """
    return posixpath.join(FOLDER, posixpath.basename(pagename) + ".ipynb")


def to_notebook(source: Path) -> nbformat.NotebookNode:
    """The page as a notebook without outputs; ids count up, so that two builds write the same bytes."""
    notebook = jupytext.read(source, fmt="md:myst")
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return notebook


def write_notebooks(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    for pagename in sorted(app.env.found_docs):
        if is_notebook(app, pagename):
            target = Path(app.outdir, notebook_path(pagename))
            target.parent.mkdir(exist_ok=True)
            nbformat.write(to_notebook(Path(app.env.doc2path(pagename))), target)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", write_notebooks)
