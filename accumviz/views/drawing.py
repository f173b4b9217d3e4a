"""Someone else's DOT as a drawing that follows the page's theme."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Any

from accumviz.show import escape
from accumviz.views.graphcss import STYLE
from accumviz.views.layout import graphviz


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
        raise TypeError(f"source is a {type(source).__name__}; expected DOT text or an object with .source")
    # Graphviz knows how wide Courier is; of "monospace" it knows nothing and leaves too little room
    drawn = graphviz(re.sub(r'fontname="?monospace"?', "fontname=Courier", text), "svg")
    labels = [html.unescape(label) for label in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)]
    alt = alt or "Graph with the labels " + ", ".join(label.strip() for label in labels if label.strip())
    return Drawing(_themed(drawn, alt), alt)


_BACKGROUND = re.compile(r'<polygon fill="(?:white|#ffffff|transparent)" stroke="(?:none|transparent)"[^>]*/>\s*')
_BLACK = re.compile(r'(fill|stroke)="(?:black|#000000)"')


def _themed(drawn: str, alt: str) -> str:
    """Keep Graphviz's shapes; give lines and free text the page's colour, text on a coloured box a dark one."""
    head, _, body = drawn[drawn.index("<svg") :].partition(">")
    box = [float(part) for part in re.search(r'viewBox="([^"]*)"', head).group(1).split()]  # type: ignore[union-attr]
    body = re.sub(r"<!--.*?-->|<title>.*?</title>|</?a\b[^>]*>", "", body, flags=re.DOTALL)
    body = re.sub(r' (?:id|xlink:\w+)="[^"]*"', "", body)
    body = _BACKGROUND.sub("", body, count=2)

    def node(match: re.Match[str]) -> str:
        group = match.group(0)
        colored = re.search(r'<(?:polygon|ellipse|path) fill="(?!none|transparent|black)', group)
        return re.sub(r"<text ", '<text style="fill:#1a1a1a" ', group) if colored else group

    body = re.sub(r'<g class="node">.*?</g>', node, body, flags=re.DOTALL)
    body = re.sub(r'font-family="Courier[^"]*"', 'class="av-mono"', body)
    body = _BLACK.sub(r'\1="currentColor"', body)
    smallest = min((float(px) for px in re.findall(r'font-size="([\d.]+)', body)), default=14.0)
    scale = re.search(r"scale\(([\d.]+)", body)
    factor = max(1.0, 12.5 / (smallest * (float(scale.group(1)) if scale else 1.0)))
    width, height = box[2] * factor, box[3] * factor
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" '
        f'viewBox="{" ".join(f"{part:g}" for part in box)}" width="{width:.0f}" height="{height:.0f}" '
        f'style="--av-width:{width:.0f}px">{body.strip()}'
    )
