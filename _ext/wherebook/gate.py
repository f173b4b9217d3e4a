"""Predictions gate: what answers one is shut until the reader has answered it, or asked to be shown.

To a prediction belongs what stands between it and the next one, or the next heading, and is marked as its answer: the
output of a cell tagged `hide-output`, a cell tagged `answers`, and what else has that class: `{.answers}` stands in the
line above a paragraph. A script opens it; without one it stands open. The source of a prediction, which says the
answer, stays in the notebook.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

ASKS = re.compile(r'<div class="accumviz av-predict[^"]*"(?: id="(?P<key>[^"]*)")?(?= data-av-predict=)')
TITLE = re.compile(r'<p class="av-tag">[^<]*</p>')
MARKS = {"answers", "tag_answers"}
LINE = '<p class="av-shut"><a href="#{}">Opens with your {}</a></p>'


def is_source(node: nodes.Node) -> bool:
    """Whether this part of a cell shows its source, folded or not."""
    below: Any = node if isinstance(node, nodes.Element) else nodes.Element()
    return any(one.get("nb_element") == "cell_code_source" for one in below.findall(nodes.container))


def only_asks(source: str) -> bool:
    """Whether a cell ends in a prediction, so that all before it only makes the question.

    >>> only_asks("left = 3\\nav.predict('How many?', left)"), only_asks("av.predict('How many?', 3).answer")
    (True, False)
    """
    try:
        *_, last = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and isinstance(last.value.func, ast.Attribute)
        and last.value.func.attr == "predict"
    )


def question(cell: nodes.Node) -> nodes.raw | None:
    """The output in which a cell asks for a prediction; None where it does not."""
    if not isinstance(cell, nodes.container) or cell.get("nb_element") != "cell_code":
        return None
    return next((raw for raw in cell.findall(nodes.raw) if ASKS.search(raw.astext())), None)


def source_of_question(cell: nodes.Element) -> nodes.Node | None:
    """Return the folded source of a cell that only asks, which says the answer and is not on the page."""
    source = next((part for part in cell.children if is_source(part)), None)
    is_folded = source is not None and "tag_hide-input" in cell["classes"]
    return source if is_folded and only_asks(source.astext()) else None


def answers(node: nodes.Node) -> list[nodes.Node]:
    """What of this part of a page answers a prediction: all of it, the outputs of a cell, or nothing."""
    if not isinstance(node, nodes.Element):
        return []
    classes = set(node.get("classes", ()))
    if MARKS & classes:
        return [node]
    return [part for part in node.children if not is_source(part)] if "tag_hide-output" in classes else []


def replaced(raw: nodes.raw, pattern: re.Pattern[str], text: str) -> nodes.raw:
    """The same output with the first of what matches written anew."""
    written = nodes.raw("", pattern.sub(lambda _: text, raw.astext(), count=1), format="html")
    raw.replace_self(written)
    return written


def unfolded(part: nodes.Node) -> list[nodes.Node]:
    """An output without the bar that would have to be opened, too."""
    is_bar = isinstance(part, nodes.Element) and type(part).__name__ == "HideCodeCellNode"
    return list(part.children) if is_bar else [part]


def is_seen(node: nodes.Node) -> bool:
    """Whether a reader of the page sees anything of this node."""
    if isinstance(node, (nodes.Invisible, nodes.target)):
        return False
    return not isinstance(node, nodes.container) or (bool(node.children) and "tag_remove-cell" not in node["classes"])


def shut(parts: list[nodes.Node], line: str, key: str) -> None:
    """Wrap neighbours in an element that opens with the prediction `key`, and has a line in their place."""
    parent: Any = parts[0].parent
    place = parent.index(parts[0])
    before = nodes.raw("", f'<div data-answers="{key}">{line}', format="html")
    inner = [one for part in parts for one in unfolded(part)]
    for part in parts:
        parent.remove(part)
    parent[place:place] = [before, *inner, nodes.raw("", "</div>", format="html")]


def runs(parent: nodes.Element) -> Iterator[tuple[str, list[nodes.Node], bool]]:
    """What answers each prediction among the children: neighbours together, with the prediction's id.

    The last says whether it follows on what the same prediction shuts already, so that one line does for both.
    """
    key, above = "", ""
    together: list[nodes.Node] = []
    for child in list(parent.children):
        raw = question(child)
        found = [] if raw is not None or isinstance(child, nodes.section) else answers(child)
        if together and found != [child]:
            yield key, together, above == key
            together, above = [], key
        if raw is not None:
            named = ASKS.search(raw.astext())
            key, above = named["key"] if named else "", ""
        elif isinstance(child, nodes.section):
            key = above = ""
        elif found == [child]:
            together.append(child)
        elif found:
            yield key, found, False
            above = key
        elif is_seen(child):
            above = ""
    if together:
        yield key, together, above == key


def number(doctree: nodes.document) -> set[str]:
    """Give each prediction an id, take its source from the page, and call it an exercise where it stands among them.

    Returns the ids of the exercises.
    """
    count = 0
    called: set[str] = set()
    exercises: dict[int, int] = {}
    for cell in list(doctree.findall(nodes.container)):
        raw = question(cell)
        if raw is None:
            continue
        count += 1
        source = source_of_question(cell)
        if source is not None:
            cell.remove(source)
        section = exercise_section(cell)
        looks = " av-exercise" if section is not None else ""
        raw = replaced(raw, ASKS, f'<div class="accumviz av-predict{looks}" id="prediction-{count}"')
        if section is not None:
            called.add(f"prediction-{count}")
            exercises[id(section)] = exercises.get(id(section), 0) + 1
            replaced(raw, TITLE, f'<p class="av-tag">Exercise {exercises[id(section)]}</p>')
    return called


def exercise_section(node: nodes.Node) -> nodes.section | None:
    while (node := node.parent) is not None:
        if isinstance(node, nodes.section) and node[0].astext() == "Exercises":
            return node
    return None


def resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    if app.builder.format != "html":
        return
    exercises = number(doctree)
    for parent in [doctree, *doctree.findall(nodes.section)]:
        for key, parts, said in list(runs(parent)):
            if key:
                shut(parts, "" if said else LINE.format(key, "answer" if key in exercises else "prediction"), key)
            elif any(MARKS & set(part.get("classes", ())) for part in parts if isinstance(part, nodes.Element)):
                logger.warning("this is marked as an answer, but no prediction stands above it", location=parts[0])


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", resolve)
