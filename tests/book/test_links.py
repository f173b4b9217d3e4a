"""Every link inside the built book leads somewhere."""

import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Anchors(HTMLParser):
    """What a page links to, loads, and can be linked at."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.ids: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.ids.update([attributes["id"] or ""] if "id" in attributes else [])
        self.names |= {attributes[key] or "" for key in ("id", "name") if key in attributes}
        links = [attributes.get("href"), attributes.get("src")]
        self.links += [link for link in links if link and not link.startswith(("data:", "javascript:", "mailto:"))]


@cache
def anchors(path: Path) -> Anchors:
    parser = Anchors()
    parser.feed(path.read_text())
    return parser


def test_every_link_and_anchor_inside_the_book_resolves(page_name: str, site: Path) -> None:
    page = site / page_name
    broken = []
    for link in anchors(page).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        fragment = unquote(parts.fragment)
        if not target.exists() or (fragment and target.suffix == ".html" and fragment not in anchors(target).names):
            broken.append(link)
    assert broken == []


def test_an_id_stands_once_on_a_page(page_name: str, site: Path) -> None:
    ids = anchors(site / page_name).ids
    assert sorted({name for name, count in ids.items() if name and count > 1}) == []


def test_what_outputs_share_stands_once_on_a_page(page_name: str, site: Path) -> None:
    html = (site / page_name).read_text()
    assets = [
        match[0]
        for match in re.finditer(r"<(style|script)\b[^>]*>.*?</\1>", html, re.DOTALL)
        if "accumviz" in match[0] and "json" not in match[0].split(">")[0]
    ]
    assert len(assets) == len(set(assets))
