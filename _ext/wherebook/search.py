"""Search by section: what Sphinx would index by page is written section by section, with its text to quote.

The answer of a prediction is searched like everything else, but stands in a field of its own: results do not quote it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from wherebook.gate import answers, question, source_of_question

INDEX = "searchindex.js"
# Pages that gather what others explain come after them; what one sees comes before what explains it.
GATHERED = {"chapters/13_audit": 0.5, "bibliography": 0.4, "symptoms": 1.5}
UNSAID = (nodes.raw, nodes.comment, nodes.math, nodes.math_block, nodes.target, addnodes.index)


QUESTION = re.compile(r'<p class="av-question">.*?</p>', re.DOTALL)
ANSWER = re.compile(r'<p class="av-recorded">.*?</p>(?:<table class="av-others">.*?</table>)?', re.DOTALL)


def spoken(node: nodes.Node, around: nodes.Node, shut: bool = False) -> Iterator[tuple[bool, str]]:
    """Yield the texts of a node, each with whether it is shut until a prediction is answered.

    Sections, symptoms, terms and descriptions inside are entries themselves, and left out.
    """
    asked = question(node)
    if asked is not None:
        yield from ((False, plain(part)) for part in QUESTION.findall(asked.astext()))
        yield from ((True, plain(part)) for part in ANSWER.findall(asked.astext()))
    absent = source_of_question(node) if asked is not None else None
    hidden = answers(node)
    for child in node.children:
        if child is absent or is_left_out(child, around):
            continue
        if isinstance(child, nodes.Text):
            yield shut, child.astext()
        else:
            yield from spoken(child, around, shut or child in hidden or child in answers(child))
        if isinstance(child, nodes.TextElement) and not isinstance(child, nodes.Inline):
            yield shut, " "


def joined(texts: Iterable[str]) -> str:
    return " ".join("".join(texts).split())


def plain(markup: str) -> str:
    """HTML as text.

    >>> plain("<p>Is <code>b &#42; 2</code><br>a leaf?</p>")
    ' Is b * 2 a leaf? '
    """
    return html.unescape(re.sub(r"<[^>]*>", lambda tag: "" if "code" in tag[0] else " ", markup))


def is_left_out(node: nodes.Node, around: nodes.Node) -> bool:
    is_first_cell = isinstance(around, nodes.row) and node is around[0]
    is_title = is_first_cell or (isinstance(node, nodes.title) and node.parent is around)
    return is_title or isinstance(node, UNSAID) or is_entry(node)


def is_entry(node: nodes.Node) -> bool:
    is_kind = isinstance(node, nodes.section | nodes.row | nodes.definition_list_item | addnodes.desc)
    return is_kind and bool(anchor(node))


def anchor(node: nodes.Node) -> str:
    """The id that an address names: of a section, a symptom, a term of the glossary, or a described name."""
    named = node if isinstance(node, nodes.section | nodes.row) else next(iter(node.children), None)
    ids = named.get("ids", []) if isinstance(named, nodes.Element) else []
    return ids[0] if ids else ""


def title(node: nodes.Element, numbers: dict[str, tuple[int, ...]]) -> str:
    """What an entry is called, with the number of a section."""
    if isinstance(node, nodes.section):
        number = next((numbers[f"#{name}"] for name in node["ids"] if f"#{name}" in numbers), ())
        if isinstance(node.parent, nodes.document):
            number = numbers.get("", ())
        prefix = ".".join(map(str, number)) + ". " if number else ""
        return prefix + node[0].astext()
    first = node[0]
    name = first.get("fullname", "") if isinstance(first, addnodes.desc_signature) else ""
    return name or " ".join(first.astext().split())


def entries(doctree: nodes.document, address: str, numbers: dict[str, Any], weight: float) -> Iterator[dict[str, Any]]:
    """Every section, symptom, term and described name of a page, as search.js reads them."""
    page = ""
    for node in doctree.findall(nodes.Element):
        if not is_entry(node):
            continue
        name = title(node, numbers)
        page = page or name
        place = address if isinstance(node.parent, nodes.document) else f"{address}#{anchor(node)}"
        parts = list(spoken(node, node))
        text, shut = (joined(part for is_shut, part in parts if is_shut == which) for which in (False, True))
        yield {"url": place, "title": name, "page": page, "text": text, "shut": shut, "weight": weight}


def write_index(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    found: list[dict[str, Any]] = []
    for docname in sorted(app.env.found_docs):
        address = app.builder.get_target_uri(docname)
        numbers = app.env.toc_secnumbers.get(docname, {})
        found += entries(app.env.get_doctree(docname), address, numbers, GATHERED.get(docname, 1.0))
    text = f"BOOK_SECTIONS = {json.dumps(found, ensure_ascii=False)};\n"
    Path(app.outdir, INDEX).write_text(text, "utf-8")


def name_symptoms(app: Sphinx, doctree: nodes.document) -> None:
    """Give each symptom an id: a row has its own address, and is found by itself."""
    for table in doctree.findall(nodes.table):
        if "symptoms" in table["classes"]:
            for row in next(table.findall(nodes.tbody)):
                row["ids"] = [nodes.make_id(row[0].astext())]


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", name_symptoms)
    app.connect("build-finished", write_index, priority=600)  # after Sphinx has written its own
