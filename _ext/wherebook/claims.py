"""The audit: every claim, quoted, with the verdict that a hidden cell computed, and a link to what decides it.

A claim is an item of a numbered list: the sentence as a quotation, a paragraph that begins with **Says:**, and, where
the article leaves out what the reader needs, one that begins with **Omits:**. A page shows all of them at once, as one
mark each, by article and with its verdict; a mark leads to its row in the table below, which scrolls in a frame.

A chapter marks the place with a label, `(claim-20)=`, and a hidden cell beside it ends with the verdict as a value,
`{"claim-20": "wrong: it raises"}`. That needs no package, so the cell runs in a downloaded notebook, too.
"""

from __future__ import annotations

import ast
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from jupyter_cache import get_cache
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)

KINDS = {
    "right": "right",
    "right, if": "right under a condition",
    "wrong": "wrong",
    "outdated": "outdated",
    "undecided": "undecided",
}
CHOICE = '<label><input type="radio" name="verdict" value="{}"{}> {}{}</label>'
MARK = '<a href="#claim-row-{0}" class="{1}" aria-label="Claim {0}: {2}">{0}</a>'
FIGURE = """<figure class="claims"><fieldset class="claims"><legend>Show</legend>{choices}
<label hidden>with the words <input type="search"></label></fieldset>
{articles}<figcaption><p>Each number is a claim, and leads to its row in the table, which scrolls.</p></figcaption>
</figure>"""
FRAME = '<div class="claims" role="region" tabindex="0" aria-label="All claims: quoted, judged, and where">'
VERDICT = re.compile(r"(right, if|right|wrong|outdated|undecided)\b(.*)", re.DOTALL)


class Stated(nodes.General, nodes.Element):
    """What the directive leaves until every chapter has run: articles as paragraphs, claims as numbered lists."""


class Claims(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        place = Stated()
        self.set_source_info(place)
        self.state.nested_parse(self.content, self.content_offset, place)
        self.env.metadata[self.env.docname]["claims"] = "here"
        labels = self.env.domaindata["std"]["anonlabels"]
        for number, *_ in stated(place):
            labels[f"claim-row-{number}"] = self.env.docname, f"claim-row-{number}"
        return [place]


def returned(notebook: dict[str, Any]) -> dict[str, str]:
    """The verdicts that the hidden cells of an executed notebook end with.

    >>> output = {"data": {"text/plain": ["{'claim-2': 'right'}"]}}
    >>> returned({"cells": [{"metadata": {"tags": ["remove-cell"]}, "outputs": [output]}]})
    {'claim-2': 'right'}
    """
    found: dict[str, str] = {}
    for cell in notebook["cells"]:
        if "remove-cell" in cell["metadata"].get("tags", []):
            for output in cell.get("outputs", []):
                text = "".join(output.get("data", {}).get("text/plain", ""))
                if text.startswith("{'claim-"):
                    found |= ast.literal_eval(text)
    return found


def verdicts(app: Sphinx) -> dict[str, str]:
    """Of all pages. What myst-nb keeps beside the site has no outputs where a page was not executed anew."""
    found: dict[str, str] = {}
    config = app.env.mystnb_config  # type: ignore[attr-defined]
    cache = get_cache(config.execution_cache_path)
    for docname in sorted(app.env.found_docs):
        path = Path(config.output_folder, f"{docname}.ipynb")
        if path.exists():
            notebook = nbformat.read(path, as_version=4)
            with suppress(KeyError):  # not in the cache: executed anew, with an error
                _, notebook = cache.merge_match_into_notebook(notebook, cell_meta=())
            for key, verdict in returned(notebook).items():
                if key in found:
                    logger.warning("%s has a second verdict", key, location=docname)
                found[key] = verdict
    return found


def stated(place: Stated) -> Iterator[tuple[int, str, nodes.Element]]:
    """Each claim's number, its article, and the statement."""
    article = ""
    for part in place.children:
        if isinstance(part, nodes.enumerated_list):
            for number, item in enumerate(part.children, part.get("start", 1)):
                yield number, article, item
        else:
            article = part.astext()


def section(app: Sphinx, name: str) -> nodes.section | None:
    """The section that a label stands in; None where nothing bears it."""
    target, anchor = app.env.domaindata["std"]["anonlabels"].get(name, ("", ""))
    elements = app.env.get_doctree(target).findall(nodes.Element) if target else ()
    node: Any = next((element for element in elements if anchor in element["ids"]), None)
    while node is not None and not isinstance(node, nodes.section):
        node = node.parent
    return node


def link(app: Sphinx, docname: str, name: str) -> nodes.reference | None:
    """To the element behind a label, called by the number and title of its section; None where nothing bears it."""
    node = section(app, name)
    if node is None:
        return None
    target, anchor = app.env.domaindata["std"]["anonlabels"][name]
    number = app.env.toc_secnumbers.get(target, {}).get(f"#{node['ids'][0]}", ())
    text = f"{'.'.join(map(str, number))} {node[0].astext()}".strip()
    return nodes.reference("", text, refuri=f"{app.builder.get_relative_uri(docname, target)}#{anchor}", internal=True)


def words(text: str) -> list[nodes.Node]:
    """Plain text with its code marked, and its apostrophes as on the rest of the page.

    >>> [str(node) for node in words("wrong: `x` isn't")]
    ['wrong: ', '<literal>x</literal>', ' isn’t']
    """
    parts = enumerate(text.split("`"))
    return [nodes.literal(part, part) if i % 2 else nodes.Text(part.replace("'", "’")) for i, part in parts if part]


def row(cells: Iterable[Iterable[nodes.Node]], kind: str = "", name: str = "") -> nodes.row:
    names = {"classes": [nodes.make_id(kind)] if kind else [], "ids": [name] if name else []}
    return nodes.row("", *(nodes.entry("", *cell) for cell in cells), **names)


def claim(number: int, article: str, item: nodes.Element) -> list[nodes.Node]:
    """What stands in a row of a claim: its quotation with the article, what it says, and what the article omits."""
    quoted, *parts = item.children
    leads = [part.astext().partition(":")[0] for part in parts]
    if not isinstance(quoted, nodes.block_quote) or leads not in (["Says"], ["Says", "Omits"]):
        logger.warning("claim %d: expected a quotation, then Says: and perhaps Omits:", number, location=item)
    return [quoted, nodes.paragraph("", article, classes=["article"]), *parts]


def picture(marks: Iterable[tuple[int, str, str]]) -> str:
    """Every claim as one mark in the row of its article, below the choice of verdicts that says what a mark means.

    >>> drawn = picture([(1, "A page", "right"), (3, "Another", "wrong"), (7, "A page", "")])
    >>> [line.count("<a ") for line in drawn.splitlines() if line.startswith("<p>")]
    [2, 1]
    """
    articles: dict[str, str] = {}
    for number, article, kind in marks:
        articles.setdefault(article, "")
        articles[article] += MARK.format(number, nodes.make_id(kind), html.escape(kind or "no verdict"))
    choices = CHOICE.format("all", " checked", "", "all") + "".join(
        CHOICE.format(nodes.make_id(kind), "", f'<i class="{nodes.make_id(kind)}"></i> ', kind.replace("if", "if …"))
        for kind in KINDS
    )
    rows = "".join(
        f"<p><span>{html.escape(name)}</span> <span>{drawn}</span></p>\n" for name, drawn in articles.items()
    )
    return FIGURE.format(choices=choices, articles=rows)


def table(app: Sphinx, docname: str, place: Stated) -> list[nodes.Node]:
    found, kinds, body = verdicts(app), Counter[str](), nodes.tbody()
    marks: list[tuple[int, str, str]] = []
    for number, article, statement in stated(place):
        said = found.get(f"claim-{number}", "")
        verdict, where = VERDICT.fullmatch(said), link(app, docname, f"claim-{number}")
        if verdict is None:
            logger.warning("claim %d: a verdict begins with one of %s, not %r", number, [*KINDS], said, location=place)
        if where is None:
            logger.warning("claim %d: no (claim-%d)= stands before what decides it", number, number, location=place)
        kind, rest = verdict.groups() if verdict else ("", said)
        kinds[kind] += 1
        marks.append((number, article, kind))
        decided = nodes.paragraph("", "", nodes.strong(kind, kind), *words(rest))
        places = [nodes.paragraph("", "", where)] if where else []
        cells = [[nodes.paragraph("", str(number))], claim(number, article, statement), [decided, *places]]
        body += row(cells, kind, f"claim-row-{number}")
    head = ("No.", "The claim", "The verdict, and where it is decided")
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (1, 12, 8)), cols=3)
    group += [nodes.thead("", row([nodes.paragraph("", text)] for text in head)), body]
    counts = ", ".join(f"{kinds[kind]} {name}" for kind, name in KINDS.items())
    summary = nodes.paragraph("", f"Of {kinds.total()} claims: {counts}.")
    drawn = nodes.raw("", picture(marks), format="html")
    opening = nodes.raw("", FRAME, format="html")
    return [summary, drawn, opening, nodes.table("", group, classes=["claims"]), nodes.raw("", "</div>", format="html")]


def resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for place in list(doctree.findall(Stated)):
        place.replace_self(table(app, docname, place))


def pages(app: Sphinx, env: Any) -> list[str]:
    """What any chapter changes, is written again."""
    return [docname for docname, data in env.metadata.items() if "claims" in data]


def setup(app: Sphinx) -> None:
    app.add_node(Stated)
    app.add_directive("claims", Claims)
    app.connect("doctree-resolved", resolve)
    app.connect("env-updated", pages)
