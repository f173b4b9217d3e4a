"""Cell outputs on a page: what they share stands there once, and a cell that raised is no page at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from accumviz.book import predict
from accumviz.views.style import static

# JSON payloads are data, and two equal ones may feed two players; only code and style may be shared.
ASSET = re.compile(
    r"<(?P<tag>style|script)\b(?P<attributes>[^>]*)>(?P<text>.*?)</(?P=tag)\s*>",
    re.DOTALL | re.IGNORECASE,
)

# Where a report says what to read: the name of a rule, which has its entry in the reference.
READ = re.compile(r"(?<=class='av-said av-read'>)Read: (?P<rule>[\w-]+)")


def link_reports(html: str, pathto: Callable[[str], str]) -> str:
    """Make a link of what a report says to read; `pathto` gives a page's address as seen from this one.

    >>> link_reports("<p class='av-said av-read'>Read: tail-dropped</p>", lambda page: f"../{page}.html")
    "<p class='av-said av-read'>Read: <a href='../api.html#rule-tail-dropped'>tail-dropped</a></p>"
    """

    def link(said: re.Match[str]) -> str:
        address = pathto("api").rstrip("#")  # "#" on the page itself
        return f"Read: <a href='{address}#rule-{said['rule']}'>{said['rule']}</a>"

    return READ.sub(link, html)


PRINTED = re.compile(
    r'(<div class="output (?:text_plain|stream)[^>]*><div class="highlight"><pre)>(.*?)(?=</pre>)', re.DOTALL
)
COLUMNS = re.compile(r"^.*\S {2,}\S", re.MULTILINE)


def keep_columns(html: str) -> str:
    """Mark what was printed in columns: several lines, in one of which spaces stand in a row behind a word.

    >>> made = '<div class="output stream x"><div class="highlight"><pre>{}</pre></div></div>'
    >>> [keep_columns(made.format(text)).count("book-columns") for text in ("a  b\\nc  d", "a  b", "a b\\n  c d")]
    [1, 0, 0]
    """

    def mark(found: re.Match[str]) -> str:
        text = re.sub("<[^>]*>", "", found[2]).strip()
        return f'{found[1]} class="book-columns">{found[2]}' if "\n" in text and COLUMNS.search(text) else found[0]

    return PRINTED.sub(mark, html)


CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
NAMED = re.compile(r'(?<=<span class="pre">)[^<]{12,}(?=</span>)')


def breakable(html: str) -> str:
    """Long names in tables may go on in the next line where they have a mark, for a phone; elsewhere no word is broken.

    >>> breakable('<td><code><span class="pre">torch.amp.GradScaler</span></code></td>')
    '<td><code><span class="pre">torch.<wbr>amp.<wbr>GradScaler</span></code></td>'
    """
    return CELL.sub(lambda cell: NAMED.sub(lambda name: re.sub(r"[._(=](?=\w)", r"\g<0><wbr>", name[0]), cell[0]), html)


def share_assets(html: str) -> str:
    """Keep the first of equal styles and scripts of accumviz; every output carries its own, to live alone elsewhere.

    >>> ours, other = "<style>.accumviz{}</style>", "<style>.other{}</style>"
    >>> share_assets(ours + "1" + ours + "2" + other + other)
    '<style>.accumviz{}</style>12<style>.other{}</style><style>.other{}</style>'
    """
    seen: set[tuple[str, str]] = set()

    def keep(match: re.Match[str]) -> str:
        whole, attributes = match[0], match["attributes"].lower()
        if "accumviz" not in whole or "json" in attributes:
            return whole
        key = (match["tag"].lower(), match["text"].strip())
        if key in seen:
            return ""
        seen.add(key)
        return whole

    return ASSET.sub(keep, html)


def one_module(html: str) -> str:
    """Of a page with several kinds of view, one module for all of them: a quarter less travels.

    An explorer's module starts players, too; the whole one also labs and predictions.

    >>> one_module(f"1{module('lab')}2{module('explore')}3") == f"1{module('whole')}23"
    True
    >>> one_module(f"1{module('accumviz')}2{module('explore')}") == f"1{module('explore')}2"
    True
    >>> one_module(f"1{module('lab')}2") == f"1{module('lab')}2"
    True
    """
    there = {name for name in (*VIEWS, "predict") if module(name) in html}
    if "lab" in there and len(there - {"predict"}) > 1:
        return _replaced(html, [*there], "whole")
    if {"accumviz", "explore"} <= there:
        return _replaced(html, ["accumviz", "explore"], "explore")
    return html


VIEWS = ("accumviz", "explore", "lab")


def module(name: str) -> str:
    """Return the module that pages carry, as they carry it."""
    text = static(f"{name}.js") if name == "accumviz" else static(f"{name}.js", predict.__file__)
    return f'<script type="module">{text}</script>'


def _replaced(html: str, names: list[str], by: str) -> str:
    """Put one module in the place of the first of these."""
    first = min(map(html.index, map(module, names)))
    before, after = html[:first], html[first:]
    for name in names:
        after = after.replace(module(name), "")
    return before + module(by) + after


def share_on_page(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: nodes.document) -> None:
    context["body"] = breakable(keep_columns(context.get("body", "")))
    if "accumviz" in context.get("body", ""):
        context["body"] = link_reports(one_module(share_assets(context["body"])), context["pathto"])


def no_failed_cells(app: Sphinx, env: Any) -> None:
    """A cell that raised fails the build also where warnings are not errors: a reader must never meet a broken page."""
    if app.warningiserror or app.keep_going:  # myst-nb has warned already, with the traceback
        return
    failed = [
        docname
        for docname, data in getattr(env, "nb_metadata", {}).items()
        if data.get("exec_data") and not data["exec_data"]["succeeded"]
    ]
    if failed:
        raise ExtensionError(f"a cell raised an error in: {', '.join(sorted(failed))} (the traceback stands above)")


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", share_on_page)
    app.connect("env-check-consistency", no_failed_cells)
