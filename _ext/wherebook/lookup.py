"""What the words of a page refer to, as the built book numbers and names it."""

from __future__ import annotations

import re
from posixpath import dirname, join, normpath
from typing import Any

from docutils import nodes
from pybtex.plugin import find_plugin
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

from wherebook import claims, reference
from wherebook.plain import PlainError


class Lookup:
    """References of one page, by its name."""

    def __init__(self, app: Sphinx, docname: str, verdicts: dict[str, str]) -> None:
        self.app, self.env, self.docname, self.verdicts = app, app.env, docname, verdicts
        self.cited: set[str] = set()
        self.advised = False

    def resolved(self, domain: str, kind: str, target: str) -> str:
        """What the site shows for a reference."""
        words = nodes.inline(target, target)
        place = pending_xref("", words, refdoc=self.docname, refexplicit=False, reftype=kind, reftarget=target)
        found = self.env.get_domain(domain).resolve_xref(
            self.env, self.docname, self.app.builder, kind, target, place, words
        )
        if found is None or found is words:
            raise PlainError(f"nothing in the book is called {target!r}")
        return found.astext()

    def figure(self, label: str) -> str:
        return self.resolved("std", "numref", label)

    def equation(self, label: str) -> str:
        return self.resolved("math", "eq", label)

    def citation(self, keys: str, kind: str) -> str:
        self.cited |= {key.strip() for key in keys.split(",")}
        # square brackets are links in Markdown
        return self.resolved("cite", kind, keys).replace("[", "(").replace("]", ")")

    def references(self) -> list[str]:
        """The works that were cited, in the order of the bibliography."""
        domain: Any = self.env.get_domain("cite")
        backend = find_plugin("pybtex.backends", "markdown")()
        found = [entry.formatted_entry.text.render(backend) for entry in domain.citations if entry.key in self.cited]
        # full stops and hyphens need no escape where no line begins with them
        return [re.sub(r"\\([-.()])", r"\1", " ".join(text.split())) for text in found]

    def chapter(self, docname: str) -> str:
        """ "chapter 3", or nothing for a page without a number."""
        number = self.env.toc_secnumbers.get(docname, {}).get("")
        return f"chapter {number[0]}" if number else ""

    def title(self, docname: str) -> str:
        return self.env.titles[docname].astext()

    def link(self, text: str, target: str) -> str:
        """A link into the book in words, or to the published page where an address is known."""
        if re.match(r"https?:", target):
            return f"[{text}]({target})"
        if target.startswith("#claim-row-"):  # a notebook's claims are a list, with the same numbers
            return text
        path, _, label = target.partition("#")
        docname, anchor = normpath(join(dirname(self.docname), path.removesuffix(".md"))), ""
        section = ""
        if label:
            docname, anchor, section = self.labelled(label)
        if docname not in self.env.found_docs:
            raise PlainError(f"the book has no page {target!r}")
        if docname != self.docname and self.app.config.html_baseurl:
            page = self.app.builder.get_target_uri(docname)
            return f"[{text}]({join(self.app.config.html_baseurl, page)}{'#' * bool(anchor)}{anchor})"
        return in_words(text, self.chapter(docname) * (docname != self.docname), section, self.title(docname))

    def labelled(self, label: str) -> tuple[str, str, str]:
        """Page, anchor and section title of a label."""
        docname, anchor = self.env.domaindata["std"]["anonlabels"].get(label, ("", ""))
        section = claims.section(self.app, label)
        if section is None:
            raise PlainError(f"nothing in the book bears the label {label!r}")
        return docname, anchor, section[0].astext()

    def claim(self, number: int) -> str:
        """The verdict on a claim, and where it was found."""
        verdict = claims.VERDICT.fullmatch(self.verdicts.get(f"claim-{number}", ""))
        if verdict is None:
            raise PlainError(f"claim {number} has no verdict")
        docname, _, section = self.labelled(f"claim-{number}")
        # what is right without a condition needs no reason, and some reasons are times of one machine
        reason = "" if verdict[1] == "right" else verdict[2]
        return f"**{verdict[1]}**{reason} ({self.chapter(docname)}, *{section}*)"

    def described(self, lines: list[str]) -> str:
        """What the page describes at length, in a sentence each; a notebook can ask Python for the rest."""
        advice = [] if self.advised else ["In a cell, `help(...)` says more about each of these.", ""]
        self.advised = True
        return "\n".join([*advice, *reference.summaries(lines)])


def in_words(text: str, chapter: str, section: str, title: str) -> str:
    """A reference for readers who cannot follow it by a click.

    >>> in_words("with DDP", "chapter 7", "A window over ranks", "Several processes")
    'with DDP (chapter 7, *A window over ranks*)'
    >>> in_words("chapter 3", "chapter 3", "Accumulation", "Gradient accumulation")
    'chapter 3, *Accumulation*'
    >>> in_words("Accumulation", "", "Accumulation", "Gradient accumulation")
    '*Accumulation*'
    >>> in_words("zero once", "chapter 2", "", "What zero_grad does")
    'zero once (chapter 2)'
    >>> in_words("The article's loop", "", "The article’s loop", "Several processes")
    "*The article's loop*"
    >>> in_words("glossary", "", "", "Glossary")
    'glossary'
    """
    if (section or title).replace("’", "'").startswith(text.replace("’", "'")):  # the site's titles have curly ones
        return f"*{text}*" + f" ({chapter})" * bool(chapter and section)
    if section and chapter and text == chapter:
        return f"{chapter}, *{section}*"
    where = ", ".join(part for part in (chapter, section and f"*{section}*") if part)
    return f"{text} ({where})" if where else text
