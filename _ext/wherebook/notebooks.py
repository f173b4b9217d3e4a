"""Every page with cells is also a notebook, `notebooks/<page>.ipynb` in the built site, that needs nothing else."""

from __future__ import annotations

import ast
import base64
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from wherebook import claims, wheels
from wherebook.lookup import Lookup
from wherebook.plain import PROJECT, PlainError, plain
from wherebook.setupcell import setup_cells

FOLDER = "notebooks"
# What a runtime such as Colab's does not have and a chapter may import, beside accumviz itself.
CARRIED = ("torchviz",)
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}
TITLES = {"predict": "Predict", "explore": "Explore", "lab": "Lab", "play": "Play", "record": "Record"}

OPENING = """> **{book}**, {place}, as a notebook
>
> Outputs appear as the cells run, from the top. Run them one by one: where a question comes first, the next cell
> answers it. Some code is folded: *Show code* in Colab, three dots in Jupyter.
>
> It needs a Python with PyTorch, Matplotlib and anywidget, as Colab has it. The first code cell installs accumviz
> from the last cell of this notebook."""
# A viewer that runs nothing shows no output. This picture, 4 KB, is the front page's, by `make screenshots`.
COVER = Path(__file__).with_name("cover.png")
CAPTION = """![A weight climbs its loss from side to side.](attachment:cover.png)

*The book in a picture: no loss was divided by the number of micro-batches, so each step is too long, and the loss
climbs.*"""


def is_notebook(app: Sphinx, pagename: str) -> bool:
    return "kernelspec" in app.env.metadata.get(pagename, {})


def notebook_path(pagename: str) -> str:
    """Where a page's notebook lies in the site: flat, because a reader ends with one file in a downloads folder.

    >>> notebook_path("chapters/01_graphs")
    'notebooks/01_graphs.ipynb'
    """
    return posixpath.join(FOLDER, posixpath.basename(pagename) + ".ipynb")


def source_cells(source: Path) -> list[Any]:
    """A page's cells as written, without those that only assert what the prose says."""
    cells: list[Any] = jupytext.read(source, fmt="md:myst").cells
    return [cell for cell in cells if "remove-cell" not in cell.metadata.get("tags", [])]


def title(source: str, figure: str) -> str:
    """What a folded cell is called: by the first verb of accumviz that fits, else by the figure that it draws.

    >>> title("explorer = av.explore(train, K=[1, 2])", ""), title("figure", "Fig. 5.2"), title("x = 1", "")
    ('Explore', 'Fig. 5.2', 'Code')
    """
    return next((name for verb, name in TITLES.items() if f"av.{verb}(" in source), figure or "Code")


def imported(cells: list[Any]) -> set[str]:
    """The packages that the cells import."""
    found = set()
    for cell in cells:
        for node in ast.walk(ast.parse(cell.source if cell.cell_type == "code" else "")):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found


def converted(cells: list[Any], book: Lookup) -> Iterator[Any]:
    """The cells as any notebook knows them; a numbered caption follows its figure as text."""
    for cell in cells:
        if cell.cell_type == "markdown":
            if text := plain(cell.source, book):  # a label alone leaves nothing
                yield new_markdown_cell(text)
            continue
        tags = set(cell.metadata.get("tags", []))
        kept = {"tags": ["raises-exception"]} if "raises-exception" in tags else {}
        figure = cell.metadata.get("mystnb", {}).get("figure", {})
        number = book.figure(figure["name"]) if "name" in figure else ""
        if tags & {"hide-input", "hide-cell", "remove-input"}:
            yield new_code_cell(f"#@title {title(cell.source, number)}\n{cell.source}", metadata=FOLDED | kept)
        else:
            yield new_code_cell(cell.source, metadata=kept)
        if figure:
            bold = f"**{number}** " if number else ""
            yield new_markdown_cell(bold + plain(figure["caption"], book))


def to_notebook(app: Sphinx, pagename: str, brought: dict[str, wheels.Wheel], verdicts: dict[str, str]) -> Any:
    """The page as a notebook without outputs, that carries what it needs."""
    book = Lookup(app, pagename, verdicts)
    cells = source_cells(Path(app.env.doc2path(pagename)))
    place = "its first page"
    if pagename != app.config.root_doc:
        place = ", ".join(part for part in (book.chapter(pagename), f"*{book.title(pagename)}*") if part)
    opening = OPENING.format(book=app.config.html_title, place=place)
    first, last = ends(cells, brought)
    written = [new_markdown_cell(opening), *converted(cells, book)]
    show_cover(written[1])
    # Who only looks at a notebook begins with its title, not with code.
    written.insert(next(i for i, cell in enumerate(written) if cell.cell_type == "code"), first)
    if references := book.references():
        written.append(new_markdown_cell("\n".join(["## References", "", *(f"- {text}" for text in references)])))
    written.append(last)
    for index, cell in enumerate(written):
        cell["id"] = f"cell-{index}"  # two builds write the same bytes
    metadata = {
        "colab": {"name": posixpath.basename(notebook_path(pagename)), "toc_visible": True},
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    if any("cuda.is_available" in cell.source for cell in cells):
        metadata["accelerator"] = "GPU"  # Colab then offers a runtime that has one
    notebook = new_notebook(cells=written, metadata=metadata)
    nbformat.validate(notebook)
    return notebook


def show_cover(cell: Any) -> None:
    """Put the cover under the title and the paragraph that follows."""
    parts = cell.source.split("\n\n")
    cell.source = "\n\n".join([*parts[:2], CAPTION, *parts[2:]])
    cell["attachments"] = {COVER.name: {"image/png": base64.b64encode(COVER.read_bytes()).decode()}}


def ends(cells: list[Any], brought: dict[str, wheels.Wheel]) -> tuple[Any, Any]:
    """The first cell and the last: they install accumviz, and what else of `brought` the page imports."""
    names = ["accumviz", *(name for name in CARRIED if name in imported(cells))]
    mine = {name: brought[name] for name in names}
    text = wheels.together(mine.values())
    versions = {name: wheel.version for name, wheel in mine.items()}
    # The chapters show what graphs saved, which older torches do not say.
    needed = wheels.needs(mine.values()) | {"torch": "2.10"}
    first, last = setup_cells(versions, needed, text)
    return new_code_cell(first, metadata=FOLDED), new_code_cell(last, metadata=FOLDED)


def write_notebooks(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html" or not app.config.book_has_notebooks:
        return
    brought = {"accumviz": wheels.built(PROJECT), **{name: wheels.installed(name) for name in CARRIED}}
    verdicts = claims.verdicts(app) if claims.pages(app, app.env) else {}
    for pagename in sorted(app.env.found_docs):
        if is_notebook(app, pagename):
            target = Path(app.outdir, notebook_path(pagename))
            target.parent.mkdir(exist_ok=True)
            try:
                notebook = to_notebook(app, pagename, brought, verdicts)
            except PlainError as problem:
                raise ExtensionError(f"{pagename} cannot become a notebook: {problem}") from problem
            nbformat.write(notebook, target)


def setup(app: Sphinx) -> None:
    app.add_config_value("book_has_notebooks", True, "html")  # a chapter alone refers to what is not there
    app.connect("build-finished", write_notebooks)
