"""DOT source of other tools as a drawing in the page's colours."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Any

from accumviz import arguments
from accumviz.show import escape
from accumviz.views.graphviz import SMALL, STYLE, TITLE, graphviz


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
    labels = []
    for label in re.findall(r"<text[^>]*>([^<]*)</text>", drawn):
        if label.strip():
            labels.append(html.unescape(label).strip())
    alt = alt or "Graph with the labels " + ", ".join(labels)
    return Drawing(_themed(drawn, alt), alt)


# Comments, titles, links, ids and the white sheet below everything.
_DROPPED = re.compile(
    r"<!--.*?-->|<title>.*?</title>|</?a\b[^>]*>"
    r'| (?:id|xlink:\w+)="[^"]*"'
    r'|<polygon fill="(?:white|#ffffff|transparent)" stroke="(?:none|transparent)"[^>]*/>\s*',
    re.DOTALL,
)
_BLACK = re.compile(r'(fill|stroke)="(?:black|#000000)"')
_NODE = re.compile(r'<g class="node">.*?</g>', re.DOTALL)
_COLORED = re.compile(r'<(?:polygon|ellipse|path) fill="(?!none|transparent|black)')


def _themed(drawn: str, alt: str) -> str:
    """Keep Graphviz's shapes; give lines and free text the page's colour, text on a coloured box a dark one."""
    head, _, body = drawn[drawn.index("<svg") :].partition(">")
    body = _NODE.sub(_with_dark_text, _DROPPED.sub("", body))
    body = re.sub(r'font-family="Courier[^"]*"', 'class="av-mono"', body)
    body = _BLACK.sub(r'\1="currentColor"', body)
    _, view, *_ = re.split(r'viewBox="([^"]*)"', head)
    sizes = [float(px) for px in re.findall(r'font-size="([\d.]+)', body)]
    _, scale, *_ = [*re.split(r"scale\(([\d.]+)", body, maxsplit=1), "1"]
    factor = max(1.0, SMALL / (min(sizes, default=TITLE) * float(scale)))
    width, height = (float(side) * factor for side in view.split()[2:])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" '
        f'viewBox="{view}" width="{width:.0f}" height="{height:.0f}" '
        f'style="--av-width:{width:.0f}px">{body.strip()}'
    )


def _with_dark_text(node: re.Match[str]) -> str:
    dark = '<text style="fill:#1a1a1a" '
    return node[0].replace("<text ", dark) if _COLORED.search(node[0]) else node[0]
