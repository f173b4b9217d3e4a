"""Make text and numbers safe for a page, and build the page around them."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from accumviz import arguments

# On a page of its own, a view brings the two grounds that a book or a notebook has anyway.
_PAGE = """
:root { color-scheme: light dark; }
@media print { :root { color-scheme: light; } }
body { margin: 0 auto; padding: clamp(0.5rem, 2vw, 1.5rem); max-width: 84rem;
  background: light-dark(#fff, #14181d); color: light-dark(#1f262d, #e6e9ec); }
body .accumviz { --av-accent: light-dark(#0072b2, #6cb8e6); --av-ground: light-dark(#fff, #14181d);
  --av-muted: light-dark(#5a6570, #a4afba); --av-line: light-dark(#d3dbe1, #38424c);
  --av-surface: light-dark(#f3f5f7, #20262d); }
h1 { font: 600 1rem system-ui, sans-serif; margin: 0 0 0.5rem; }
"""


def literal(text: str) -> str:
    """Make a text safe to draw: white space becomes a blank, other unprintable characters visible.

    >>> literal("a\\tb\\u202ec")
    'a b�c'
    """
    return "".join(map(_visible, str(text)))


def _visible(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else "�"


def escape(text: str) -> str:
    """Make any text safe inside an element or a quoted attribute.

    >>> escape("<b>\\u202e")
    '&lt;b&gt;�'
    """
    return html.escape(literal(text))


# In prose: code, which stays; what opens a quotation, or closes one; minus signs, ranges and dates; an equation.
_TYPED = re.compile(
    r"""(?P<code>`[^`]+`)|(?P<date>\b\d{4}-\d\d-\d\d\b)|(?P<open>(?<![^\s(\[{–—“‘])['"](?=\S))|(?P<close>['"])"""
    r"""|(?P<minus>(?:(?<=\d[eE])|(?<![^\s(\['"×=<>≤≥]))-(?=\.?\d))|(?P<range>(?<=\d)-(?=\d))"""
    r"""|(?P<equal>(?<![^\s(]\S)(?<=\w) [=<>≤≥] (?=[-−]?\d))"""
)


def typeset(text: str) -> str:
    """Write a text as print has it, except for the code in it: curly quotes, true minus signs, equations on one line.

    >>> print(typeset("the step's '-4', 3e-8, 4-8 and not 1-D, `x['a-1']`, 2026-11-21"))
    the step’s ‘−4’, 3e−8, 4–8 and not 1-D, `x['a-1']`, 2026-11-21
    >>> " " in typeset("K = 4")
    False
    """

    def print_of(typed: re.Match[str]) -> str:
        signs = {"'": "‘’", '"': "“”"}
        match typed.lastgroup:
            case "open" | "close":
                return signs[typed[0]][typed.lastgroup == "close"]
            case "minus":
                return "−"
            case "range":
                return "–"
            case "equal":
                return typed[0].replace(" ", "\xa0")
        return typed[0]

    return _TYPED.sub(print_of, text)


def marked(text: str, *, veiled: bool = False) -> str:
    """Write a text with `code` in backticks as HTML; veiled, each character as a number that only browsers read.

    >>> marked("`w` < 1")
    '<code>w</code> &lt; 1'
    """
    # Printable throughout, so that no character turns the direction of what follows.
    parts = re.split(r"`([^`]+)`", typeset(literal(text)))
    marks = ""
    for i, part in enumerate(parts):
        safe = _veil(part) if veiled else html.escape(part)
        marks += f"<code>{safe}</code>" if i % 2 else safe
    return marks


def _veil(text: str) -> str:
    return "".join(f"&#{ord(char)};" for char in text)


def table(
    heads: Iterable[str], rows: Iterable[Iterable[str]], caption: str = ""
) -> str:
    """Write a table of texts as HTML.

    >>> table(["k"], [["1"]])
    '<table><thead><tr><th scope="col">k</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in row)
        body += f"<tr>{cells}</tr>"
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def plural(count: int, noun: str) -> str:
    """Write a noun as it stands behind this count.

    >>> plural(1, "rank"), plural(2, "rank")
    ('rank', 'ranks')
    """
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Write a count and its noun.

    >>> counted(1, "event"), counted(10000, "event")
    ('1 event', '10,000 events')
    """
    return f"{count:,} {plural(count, noun)}"


def encoded(value: float) -> float | str:
    """Write a number as JSON can hold it: NaN and the infinities by name, in the words that JavaScript has for them.

    >>> encoded(1.5), encoded(float("-inf"))
    (1.5, '-Infinity')
    """
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def save_page(path: str | Path, title: str, content: str) -> None:
    """Write HTML as one page that any browser opens, on a light and on a dark ground."""
    arguments.file("path", path)
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_PAGE}</style></head>"
    )
    Path(path).write_text(
        f"{head}<body><main><h1>{title}</h1>{content}</main></body></html>",
        "utf-8",
        "replace",
    )


class Displayed:
    """Something a notebook shows as static, self-contained HTML, with its `repr` as the text fallback."""

    # The function that makes the HTML, which is imported when somebody asks for it.
    _shown_by = ""

    @property
    def words(self) -> list[str]:
        """What is shown, in lines of text."""
        return []

    def _repr_mimebundle_(self, **_formats: Any) -> dict[str, str]:
        bundle = {"text/plain": "\n".join([repr(self), *self.words])}
        try:
            bundle["text/html"] = self.to_html()
        except ImportError as missing:  # a view's own library is not there: the text still says everything
            bundle["text/plain"] += f"\n({missing})"
        return bundle

    def to_html(self) -> str:
        """Return what a notebook shows: a fragment of HTML that needs no other file and no kernel.

        Raises `ImportError` when the view lacks a library; the message says which.
        """
        text: str = resolve_name(self._shown_by)(self)
        return text

    def save(self, path: str | Path) -> None:
        """Write one self-contained page that any browser opens, anew each time.

        Raises `ValueError` for a name that does not end in `.html`.
        """
        arguments.file("path", path)
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(
                f"save({str(path)!r}); this is saved as a page: expected a name that ends in .html"
            )
        title = f"accumviz {type(self).__name__.lower()}"
        save_page(path, title, self.to_html())
