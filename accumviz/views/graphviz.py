"""Graphviz, in process or on PATH, whichever is there; and somebody else's DOT as a drawing in the page's colours."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from string import Template
from typing import Any

from accumviz import arguments
from accumviz.show import escape
from accumviz.views.style import CSS, CYCLE, MONO

TITLE, SMALL = 14.0, 12.5  # px
SHRINK = 0.88  # the smallest text stays 11 px

STYLE = CSS + Template("""
.av-graph { margin: 0.75rem 0; --av-leaf: $leaf; --av-root: $root; }
html[data-theme="dark"] .av-graph, [data-jp-theme-light="false"] .av-graph { --av-leaf: $leaf_dark; }
.av-graph .av-scroll { overflow: auto; max-height: 75rem; }
.av-graph svg { display: block; height: auto;
  width: var(--av-width); max-width: 100%; min-width: calc(var(--av-width) * $shrink); }
:where(.av-graph:not(.av-drawn)) text { font-size: ${small}px; fill: var(--av-text); unicode-bidi: isolate; }
.av-graph .av-mono { font-family: $mono; }
.av-graph .av-title { font-family: $mono; font-size: ${title}px; font-weight: 600; }
.av-graph .av-quiet { fill: var(--av-muted); }
.av-graph .av-box { fill: var(--av-surface); stroke: var(--av-line); stroke-width: 1.2; }
.av-graph .av-behind { fill: var(--av-surface); stroke: var(--av-line); opacity: 0.75; }
.av-graph .av-rule { stroke: var(--av-line); }
.av-graph .av-accumulate .av-box { fill: var(--av-leaf); fill-opacity: 0.13; stroke: var(--av-leaf); }
.av-graph .av-root .av-box { fill: var(--av-root); fill-opacity: 0.13; stroke: var(--av-root); stroke-width: 2.2; }
.av-graph .av-freed .av-box { fill: none; stroke-dasharray: 5 4; }
.av-graph .av-freed:not(.av-root) .av-box { stroke: var(--av-muted); }
.av-graph .av-freed text { fill: var(--av-muted); }
.av-graph .av-edge { fill: none; stroke: var(--av-muted); stroke-width: 1.4; }
.av-graph .av-tip { fill: var(--av-muted); stroke: none; }
.av-graph figcaption { color: var(--av-muted); font-size: 0.8125rem; margin-top: 0.5rem; text-align: left; }
.av-graph .av-key { display: inline-block; margin-right: 1.2em; }
.av-graph .av-key i { display: inline-block; width: 1.1em; height: 0.8em; margin-right: 0.4em;
  border: 1.5px solid var(--av-muted); background: var(--av-surface); border-radius: 3px; vertical-align: -0.05em; }
.av-graph .av-key .av-accumulate { border-color: var(--av-leaf); border-radius: 0.4em; }
.av-graph .av-key .av-root { border-color: var(--av-root); border-width: 2px; }
.av-graph .av-key .av-freed { border: 1.5px dashed var(--av-muted); background: none; }
.av-graph .av-key .av-fold { box-shadow: 3px 3px 0 -1px var(--av-line); }
.av-graph details { font-size: 0.8125rem; margin-top: 0.25rem; text-align: left; }
.av-graph summary { cursor: pointer; color: var(--av-muted); width: max-content; }
.av-form[open] + .av-scroll { display: none; }
@media print {
  .av-graph .av-scroll { overflow: visible; max-height: none; }
  .av-graph svg { min-width: 0; }
}
""").substitute(
    leaf=CYCLE[0],
    leaf_dark=CYCLE[4],
    root=CYCLE[2],
    shrink=SHRINK,
    small=SMALL,
    title=TITLE,
    mono=MONO,
)
_TIMEOUT = 300  # seconds; the largest drawing anyone should wait for


class LayoutError(ImportError):
    """No layout engine is there, or it refused; the message says what to do."""


def graphviz(source: str, form: str) -> str:
    """Lay out DOT source with Graphviz's `dot` and return it as `json`, `svg`, ...

    Uses `pygraphviz`, whose wheel carries Graphviz, else a `dot` on PATH. Raises LayoutError
    when neither is there or the source is not DOT.
    """
    try:
        from pygraphviz import AGraph
    except ImportError:
        return _on_path(source, form)
    try:
        # pygraphviz warns about every graph of more than 1,000 nodes
        with redirect_stderr(StringIO()), _without_font_warnings():
            drawn: bytes = AGraph(string=source).draw(format=form, prog="dot")
    except Exception as error:  # its C layer raises several unrelated types
        raise LayoutError(f"Graphviz could not draw this: {error}") from error
    return drawn.decode("utf-8", "replace")


@contextmanager
def _without_font_warnings() -> Iterator[None]:
    """The wheel's fontconfig complains, from C, about settings of the system's newer one; pass on the rest."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            rest = [
                line
                for line in caught.read().splitlines(keepends=True)
                if b"Fontconfig" not in line
            ]
            os.write(2, b"".join(rest))


def _on_path(source: str, form: str) -> str:
    dot = shutil.which("dot")
    if dot is None:
        raise LayoutError(
            "drawing a graph needs a layout engine, and there is neither pygraphviz nor a `dot` on PATH; "
            "install one: `pip install pygraphviz` (its wheel carries Graphviz), "
            "or Graphviz itself: `apt install graphviz`, `brew install graphviz`"
        )
    done = subprocess.run(  # noqa: S603 - the user's own Graphviz, given text on its standard input
        [dot, f"-T{form}"],
        input=source.encode(),
        capture_output=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode or not done.stdout:
        raise LayoutError(
            f"`dot` could not draw this: {done.stderr.decode('utf-8', 'replace').strip()[:300]}"
        )
    return done.stdout.decode("utf-8", "replace")


@dataclass(frozen=True)
class Drawing:
    """An SVG with a text alternative, shown by a notebook in the page's own colours."""

    svg: str
    alt: str

    def _repr_html_(self) -> str:
        return (
            f'<figure class="accumviz av-graph av-drawn"><style>{STYLE}</style>\n'
            '<div class="av-scroll" tabindex="0" role="group" aria-label="Drawing, scrollable">'
            f"{self.svg}</div></figure>"
        )

    def __repr__(self) -> str:
        return self.alt


def svg_from_dot(source: Any, alt: str = "") -> Drawing:
    """Draw DOT source (text, or an object with `.source` such as torchviz's) for any theme, with no `dot`.

    `alt` is the text alternative; without it, the drawing's own labels are listed.
    Raises LayoutError without Graphviz.
    """
    text = getattr(source, "source", source)
    if not isinstance(text, str):
        raise TypeError(
            f"source is {arguments.a(source)}; expected DOT text or an object with .source"
        )
    # Graphviz knows how wide Courier is; of "monospace" it knows nothing and leaves too little room
    drawn = graphviz(re.sub(r'fontname="?monospace"?', "fontname=Courier", text), "svg")
    labels = [
        html.unescape(label)
        for label in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    ]
    alt = alt or "Graph with the labels " + ", ".join(
        label.strip() for label in labels if label.strip()
    )
    return Drawing(_themed(drawn, alt), alt)


_BACKGROUND = re.compile(
    r'<polygon fill="(?:white|#ffffff|transparent)" stroke="(?:none|transparent)"[^>]*/>\s*'
)
_BLACK = re.compile(r'(fill|stroke)="(?:black|#000000)"')


def _themed(drawn: str, alt: str) -> str:
    """Keep Graphviz's shapes; give lines and free text the page's colour, text on a coloured box a dark one."""
    head, _, body = drawn[drawn.index("<svg") :].partition(">")
    view_box = re.search(r'viewBox="([^"]*)"', head)
    assert view_box is not None, "Graphviz gives each drawing a viewBox"
    box = [float(part) for part in view_box.group(1).split()]
    body = re.sub(
        r"<!--.*?-->|<title>.*?</title>|</?a\b[^>]*>", "", body, flags=re.DOTALL
    )
    body = re.sub(r' (?:id|xlink:\w+)="[^"]*"', "", body)
    body = _BACKGROUND.sub("", body, count=2)

    def node(match: re.Match[str]) -> str:
        group = match.group(0)
        colored = re.search(
            r'<(?:polygon|ellipse|path) fill="(?!none|transparent|black)', group
        )
        return (
            re.sub(r"<text ", '<text style="fill:#1a1a1a" ', group)
            if colored
            else group
        )

    body = re.sub(r'<g class="node">.*?</g>', node, body, flags=re.DOTALL)
    body = re.sub(r'font-family="Courier[^"]*"', 'class="av-mono"', body)
    body = _BLACK.sub(r'\1="currentColor"', body)
    smallest = min(
        (float(px) for px in re.findall(r'font-size="([\d.]+)', body)), default=14.0
    )
    scale = re.search(r"scale\(([\d.]+)", body)
    factor = max(1.0, 12.5 / (smallest * (float(scale.group(1)) if scale else 1.0)))
    width, height = box[2] * factor, box[3] * factor
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" '
        f'viewBox="{" ".join(f"{part:g}" for part in box)}" width="{width:.0f}" height="{height:.0f}" '
        f'style="--av-width:{width:.0f}px">{body.strip()}'
    )
