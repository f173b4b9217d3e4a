"""The reference pages: nothing public without a description, no word without a use, no work that nobody cites."""

import inspect
import re
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

import pytest
from bs4 import BeautifulSoup, Tag

import accumviz
from accumviz.ledger.ledger import KINDS
from tests.book.test_words import words
from tests.conftest import ROOT

PAGE = (ROOT / "api.md").read_text()
PUBLIC = [getattr(accumviz, name) for name in accumviz.__all__]
PAGES = ("index.md", "api.md", "accumviz/checks/rules.md", "bibliography.md", "chapters/*.md")
BOOK = "\n".join(path.read_text() for pattern in PAGES for path in ROOT.glob(pattern))


@pytest.fixture(scope="module")
def entries(site: Path) -> dict[str, Tag]:
    """The descriptions on the page, by the name that leads to each."""
    page = BeautifulSoup((site / "api.html").read_text(), "html.parser")
    return {str(term["id"]): term.parent.select_one(":scope > dd") for term in page.select("dl.py > dt[id]")}


def members(cls: type) -> dict[str, Any]:
    """What a reader may use of a class: its own methods and properties."""
    kinds = (classmethod, staticmethod, property, cached_property)
    own = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    return {name: value for name, value in own.items() if isinstance(value, kinds) or inspect.isfunction(value)}


def left_out(cls: type) -> set[str]:
    """What the page leaves out by name, because only accumviz's own modules call it."""
    listed = re.search(rf"autoclass:: [\w.]+\b{cls.__name__}\n((?:   :.*\n)*)", PAGE)
    assert listed, f"{cls.__name__} is not on the page"
    only, without = (re.search(rf":{option}: (.+)", listed[1]) for option in ("members", "exclude-members"))
    named = set(re.split(r",\s*", only[1])) if only else set(members(cls))
    assert named <= set(members(cls))
    return (set(members(cls)) - named) | (set(re.split(r",\s*", without[1])) if without else set())


def name_of(subject: Any) -> str:
    """The name under which the page describes it."""
    if subject in PUBLIC:
        return f"accumviz.{subject.__name__}"
    return f"{subject.__module__}.{subject.__qualname__}"


def classes() -> list[type]:
    """The classes that the page lists."""
    return [resolve_name(path) for path in re.findall(r"autoclass:: ([\w.]+)", PAGE)]


def says(entry: Tag) -> str:
    return entry.p.get_text(strip=True) if entry.p else ""


@pytest.mark.parametrize("name", accumviz.__all__)
def test_every_public_name_has_a_description(name: str, entries: dict[str, Tag]) -> None:
    assert says(entries[f"accumviz.{name}"])


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_every_public_method_has_a_description(cls: type, entries: dict[str, Tag]) -> None:
    names = [f"{name_of(cls)}.{name}" for name in set(members(cls)) - left_out(cls)]
    assert [name for name in [name_of(cls), *names] if name not in entries or not says(entries[name])] == []


@pytest.mark.parametrize("verb", [one for one in PUBLIC if inspect.isfunction(one)], ids=lambda verb: verb.__name__)
def test_what_a_verb_returns_is_described(verb: Any, entries: dict[str, Tag]) -> None:
    returned = get_type_hints(verb)["return"]
    assert returned is Any or name_of(returned) in entries


def test_every_example_stands_on_the_page_as_code(entries: dict[str, Tag]) -> None:
    examples = 0
    for name, entry in entries.items():
        lines = (inspect.getdoc(resolve_name(name)) or "").splitlines()
        written = {line for line in lines if line.startswith((">>> ", "... "))}
        assert written <= {line for block in entry.select("pre") for line in block.get_text().splitlines()}, name
        examples += len(written)
    assert examples


def test_no_markup_is_left_in_a_description(entries: dict[str, Tag]) -> None:
    texts = [part.get_text() for entry in entries.values() for part in entry.select("p")]
    assert [text for text in texts if re.search(r"`|>>>|:\w+:", text)] == []


def test_the_page_leads_nowhere_else(site: Path) -> None:
    page = BeautifulSoup((site / "api.html").read_text(), "html.parser")
    assert [link["href"] for link in page.select("article a[href]") if "://" in str(link["href"])] == []


def test_every_kind_of_event_is_in_the_glossary() -> None:
    assert set(KINDS) <= set(words())


@pytest.mark.parametrize("word", words())
def test_every_word_of_the_glossary_is_used(word: str) -> None:
    text = re.sub(r"\s+", " ", BOOK)
    assert re.search(rf"(?<!\w){re.escape(word)}", text, re.IGNORECASE)


def test_every_reference_is_cited() -> None:
    keys = re.findall(r"^@\w+\{(.+),$", (ROOT / "references.bib").read_text(), re.MULTILINE)
    cited = re.findall(r"\{cite:\w+\}`([^`]+)`", BOOK)
    assert sorted(set(keys) - {key.strip() for group in cited for key in group.split(",")}) == []
