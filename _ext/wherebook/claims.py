"""The audit: every claim with the verdict that a hidden cell computed, and a link to the place that decides it.

A chapter marks the place with a label, `(claim-20)=`, and its hidden cell ends with the verdict as a plain value,
`{"claim-20": "wrong: …"}`. That needs no package, so the cell runs in a downloaded notebook, too.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)

KINDS = {"right": "right", "right, if": "right under a condition", "wrong": "wrong", "outdated": "outdated"}
VERDICT = re.compile(r"(right, if|right|wrong|outdated)\b(.*)", re.DOTALL)
CODE = re.compile(r"`([^`]+)`")


class claims(nodes.General, nodes.Element):
    """What the directive leaves: the articles as paragraphs, each with its claims as a numbered list."""


class Claims(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        place = claims()
        self.set_source_info(place)
        self.state.nested_parse(self.content, self.content_offset, place)
        self.env.metadata[self.env.docname]["claims"] = "yes"
        return [place]


def returned(notebook: dict[str, Any]) -> dict[str, str]:
    """The verdicts that the hidden cells of an executed notebook end with.

    >>> output = {"data": {"text/plain": "{'claim-2': 'right'}"}}
    >>> returned({"cells": [{"metadata": {"tags": ["remove-cell"]}, "outputs": [output]}]})
    {'claim-2': 'right'}
    """
    found: dict[str, str] = {}
    for cell in notebook["cells"]:
        if "remove-cell" in cell["metadata"].get("tags", []):
            for output in cell.get("outputs", []):
                text = output.get("data", {}).get("text/plain", "")
                if text.startswith("{'claim-"):
                    found |= ast.literal_eval(text)
    return found


def rows(place: claims, found: dict[str, str]) -> Iterator[tuple[int, str, nodes.list_item, str, str]]:
    """Number, article, statement, and the verdict in two parts: its kind, and what follows."""
    article = ""
    for part in place.children:
        if not isinstance(part, nodes.enumerated_list):
            article = part.astext()
            continue
        for number, item in enumerate(part.children, part.get("start", 1)):
            said = found.get(f"claim-{number}", "")
            verdict = VERDICT.match(said)
            if not verdict:
                logger.warning("claim %d has no verdict among %s: %r", number, [*KINDS], said, location=place)
            yield number, article, item, *(verdict.groups() if verdict else ("", said))


def link(app: Sphinx, docname: str, number: int, place: claims) -> nodes.Node:
    """To the deciding place, by the number and title of its section."""
    env = app.env
    target, anchor = env.domaindata["std"]["anonlabels"].get(f"claim-{number}", ("", ""))
    marked = [node for node in env.get_doctree(target).findall(nodes.Element) if anchor in node["ids"]] if target else []
    section = next((node for node in (marked and [marked[-1]]) if node), None)
    while section is not None and not isinstance(section, nodes.section):
        section = section.parent
    if section is None:
        logger.warning("claim %d has no place: put (claim-%d)= before the deciding cell", number, number, location=place)
        return nodes.Text("")
    numbers = env.toc_secnumbers.get(target, {}).get(f"#{section['ids'][0]}", ())
    text = " ".join([".".join(map(str, numbers)), section[0].astext()])
    address = f"{app.builder.get_relative_uri(docname, target)}#{anchor}"
    return nodes.reference("", text.strip(), refuri=address, internal=True)
