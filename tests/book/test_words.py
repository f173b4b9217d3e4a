"""A word of the glossary is linked to it where a chapter first uses it."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Words that prose needs in their everyday meaning, too: where a chapter means the glossary's, a pattern cannot tell.
EVERYDAY = {
    "accumulation",
    "backward",
    "clip",
    "edit",
    "event",
    "generator",
    "graph",
    "label",
    "leak",
    "live",
    "loader",
    "parameter",
    "recording",
    "scale",
    "schedule",
    "step",
    "sync",
    "term",
    "version",
}
LINK = re.compile(r"\{term\}`([^`<]+?)(?:\s*<([^`>]+)>)?`")
# The head of the file, code and figures, headings, tables, labels, formulas; and within a line, other roles and code.
NO_PROSE = re.compile(
    r"\A---.*?^---$|^```.*?^```$|^#[^\n]*$|^\|[^\n]*$|^\([\w-]+\)=$|\$[^$]*\$", re.MULTILINE | re.DOTALL
)
CODE = re.compile(r"(?:\{[\w:]+\})?`[^`]*`")


def words() -> list[str]:
    glossary = (ROOT / "glossary.md").read_text("utf-8").partition("```{glossary}\n")[2]
    return [line for line in glossary.splitlines() if re.match(r"[^\s`]", line)]


def unlinked(markdown: str, words: list[str]) -> list[str]:
    """The words whose first use in prose is no link to the glossary, each with where that is."""
    links: dict[str, int] = {}

    def blank(cut: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", cut[0])

    def noted(link: re.Match[str]) -> str:
        links.setdefault((link[2] or " ".join(link[1].split())).casefold(), link.start())
        return blank(link)

    plain = CODE.sub(blank, LINK.sub(noted, NO_PROSE.sub(blank, markdown)))
    found = []
    for word in words:
        used = re.search(rf"(?<![\w.-]){re.escape(word)}(?:e?s)?(?![\w-])", plain, re.IGNORECASE)
        if used and links.get(word.casefold(), len(plain)) > used.start():
            line = plain.count("\n", 0, used.start()) + 1
            found.append(f"line {line}: {word}")
    return found


def test_a_chapter_links_each_word_where_it_first_uses_it(chapter: Path) -> None:
    wanted = [word for word in words() if word not in EVERYDAY]
    assert unlinked(chapter.read_text("utf-8"), wanted) == []


def test_the_glossary_is_in_the_order_of_the_alphabet() -> None:
    assert words() == sorted(words(), key=lambda word: word.lstrip(".").casefold())


def test_every_everyday_word_is_in_the_glossary() -> None:
    assert set(words()) >= EVERYDAY


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A {term}`leaf`, then a leaf.", []),
        ("Two {term}`leaves <leaf>`.", []),
        ("A leaf, then a {term}`leaf`.", ["line 1: leaf"]),
        ("Some text,\nand two windows.", ["line 2: window"]),
        ("A `leaf`.\n\n## A leaf\n\n```{code-cell}\nleaf = 3\n```\n\n| a leaf |\n\n{numref}`leaf`", []),
        ("A leaflet and a pop-leaf.", []),
    ],
)
def test_a_first_use_without_a_link_is_found(text: str, found: list[str]) -> None:
    assert unlinked(text, ["leaf", "window"]) == found
