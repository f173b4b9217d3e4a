"""Every page opens from a folder as from a server, and says to a screen reader what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

TEMPLATES = Path(__file__).with_name("templates")

# Before the first paint, so that no page flashes in the wrong colours; a browser may deny what it has kept.
HEAD = """(() => {
  const root = document.documentElement;
  let kept;
  try { kept = localStorage.getItem("mode"); } catch {}
  root.dataset.mode = ["light", "dark"].includes(kept) ? kept : "auto";
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = root.dataset.mode === "auto" ? dark : root.dataset.mode;
  // What answers a question stands open, unless the reader has chosen to predict first, or the address says so.
  let first;
  try { first = localStorage.getItem("predict") === "first"; } catch {}
  const asked = new URLSearchParams(location.search);
  if (asked.has("predict") || (first && !asked.has("show"))) root.dataset.avPredicts = "";
  root.dataset.avBook = "";
  root.classList.add("book-live");
})();"""

# What axe finds in pages as Sphinx and MyST-NB write them. tests/book/test_pages.py has it look.
MENDS = (
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    # a page in another tab gets no handle on this one
    (re.compile(r'target="_blank"(?![^>]*\brel=)'), 'target="_blank" rel="noopener"'),
    # deprecated in ARIA 1.3, and no item of the list that it stands in
    (re.compile(r'role="doc-biblioentry"'), 'role="listitem"'),
    # Sphinx and docutils each write one
    (re.compile(r'<meta name="viewport"[^>]*>(?=<meta name="viewport")'), ""),
)
# Events happen at lines with one of these, and figures speak of those lines by number.
NUMBERED = re.compile(r"\b([Ee]vents?|[Ss]teps?|[Ll]ines?|[Rr]anks?|[Ee]pochs?|[Cc]hapters?|K =) (?=\d)")
SPOKEN_OF = re.compile(r"\.(?:backward|step|zero_grad|unscale_|clip_grad_\w+)\(|\brecord\(|autograd\.grad\(")


def mend(html: str) -> str:
    """A page as the theme wrote it, with what its markup gets wrong put right.

    >>> mend('<summary aria-label="Toggle hidden content"> Show')
    '<summary> Show'
    """
    for pattern, replacement in MENDS:
        html = pattern.sub(replacement, html)
    return html


def mend_every_page(app: Sphinx) -> None:
    """The theme's templates are rendered after the last event that could change them."""
    templates = app.builder.templates  # type: ignore[attr-defined]
    render = templates.render
    templates.render = lambda *arguments: mend(render(*arguments))


def own_layout(app: Sphinx, config: Config) -> None:
    config.templates_path = [str(TEMPLATES), *config.templates_path]


def describe(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """What the layout asks for beside what Sphinx tells it."""
    context["book_head_script"] = HEAD
    context["book_buttons"] = []
    context["author"] = app.config.author


def number_lines(app: Sphinx, doctree: nodes.document) -> None:
    """The lines of a cell that figures speak of have numbers."""
    blocks: list[nodes.Element] = [*doctree.findall(nodes.literal_block), *doctree.findall(nodes.doctest_block)]
    for block in blocks:
        text = block.astext()
        is_cell = "cell_input" in getattr(block.parent, "attributes", {}).get("classes", [])
        if is_cell and SPOKEN_OF.search(text) and "av.predict(" not in text:
            block["linenos"] = text.count("\n") > 1


def column_widths(app: Sphinx, doctree: nodes.document) -> None:
    """What is said in sentences in a table keeps a width in which they can be read."""
    for entry in doctree.findall(nodes.entry):
        if len(entry.astext()) > 40:
            entry["classes"].append("book-prose")


def fold_names(app: Sphinx, doctree: nodes.document) -> None:
    """The button of a folded cell says what it opens; two of the same words told nobody which is which."""
    for cell in doctree.findall(nodes.container):
        if "prompt_show" in cell:
            source = next((block.astext() for block in cell.findall(nodes.literal_block)), "")
            pictured = next(cell.findall(nodes.figure), None) is not None
            cell["prompt_show"] = fold_name(source, "tag_hide-cell" in cell["classes"], pictured)
            cell["prompt_hide"] = cell["prompt_show"].replace("Show", "Hide", 1)


def fold_name(source: str, whole: bool, pictured: bool) -> str:
    """What opens a folded cell, with its outputs or without, says.

    >>> fold_name("many = 2\\ndef mended(N): pass", True, False), fold_name("figure, axes = 1, 2", False, False)
    ('Show code and outcome: mended', 'Show the code: figure')
    >>> fold_name("figure", False, False), fold_name("figure", True, False), fold_name("def bars(): 1", False, True)
    ('Show the code of what follows', 'Show code and outcome', 'Show the code of the figure')
    >>> fold_name("import accumviz as av", False, False), fold_name("import torch\\ndef f(): pass", False, False)
    ('Show the imports', 'Show the imports and helpers')
    """
    names = (r"^(?:def|class) (\w+)", r"^(\w+)(?:, \w+)* = ")
    found = next(filter(None, (re.search(name, source, re.MULTILINE) for name in names)), None)
    if whole:
        return f"Show code and outcome: {found[1]}" if found else "Show code and outcome"
    if pictured:
        return "Show the code of the figure"
    if source.startswith(("import ", "from ")):
        return "Show the imports and helpers" if found else "Show the imports"
    return f"Show the code: {found[1]}" if found else "Show the code of what follows"


def keep_together(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """A number stays on the line of the word that it is of."""
    if app.builder.format != "html":
        return
    for text in list(doctree.findall(nodes.Text)):
        kept = NUMBERED.sub("\\1\N{NO-BREAK SPACE}", text)
        if kept != text and not isinstance(text.parent, (nodes.literal, nodes.FixedTextElement, nodes.raw, nodes.math)):
            text.parent.replace(text, nodes.Text(kept))


def no_widget_state(app: Sphinx, env: Any) -> None:
    """Static pages have no kernel: stored widget state would only add weight and scripts from elsewhere."""
    for data in getattr(env, "nb_metadata", {}).values():
        for key in [key for key in data.get("js_files", {}) if key.startswith("ipywidgets")]:
            del data["js_files"][key]


def setup(app: Sphinx) -> None:
    app.connect("config-inited", own_layout)
    app.connect("builder-inited", mend_every_page)
    for mend_tree in (number_lines, column_widths, fold_names):
        app.connect("doctree-read", mend_tree)
    app.connect("doctree-resolved", keep_together)
    app.connect("html-page-context", describe)
    app.connect("env-check-consistency", no_widget_state)
