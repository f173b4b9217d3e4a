"""Charts of matplotlib and drawings of Graphviz that are readable on any page, light or dark.

Importing it sets matplotlib's defaults to the page's inks and to letters that can be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.layout_engine import ConstrainedLayoutEngine

from accumviz.show import escape
from accumviz.views.figure import INK, LINE, MUTED, PageFigure
from accumviz.views.graph import SMALL, STYLE, graphviz
from accumviz.views.style import MONO

__all__ = ["INK", "LINE", "MUTED", "Drawing", "ThemedFigure", "svg_from_dot"]

# The smallest letters that are read, in pixels.
_LETTERS = 11.0
_LOOK: Any = {
    "font.size": _LETTERS,
    "axes.titlesize": 12.0,
    "axes.facecolor": "none",
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.color": LINE,
    "ytick.labelcolor": INK,
    "legend.fontsize": _LETTERS,
    "legend.frameon": False,
}
mpl.rcParams.update(_LOOK)


class ThemedFigure(PageFigure):
    """An ordinary matplotlib figure that notebooks show as inline SVG in the page's colours."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # The last number below one panel stands beside the first below the next.
        options["layout"] = ConstrainedLayoutEngine(wspace=0.06)
        super().__init__(*arguments, **options)


# --- drawings of other tools --------------------------------------------------------------------

# Shapes keep their colours; lines and free text get the page's, and text on a coloured box a dark one.
_DRAWN = f"""
.accumviz .av-dot .graph > polygon {{ display: none; }}
.accumviz .av-dot [stroke="black"] {{ stroke: currentColor; }}
.accumviz .av-dot [fill="black"], .accumviz .av-dot text {{ fill: currentColor; }}
.accumviz .av-dot text {{ font-family: {MONO}; }}
.accumviz .av-dot .node :is(polygon, ellipse, path):not([fill="none"]) ~ text {{ fill: #1a1a1a; }}
"""
# torchviz writes in 10 points.
_LARGER = SMALL / 10


@dataclass(frozen=True)
class Drawing:
    """An SVG with a text alternative, shown by a notebook in the page's own colours."""

    svg: str
    alt: str

    def _repr_html_(self) -> str:
        return (
            f'<figure class="accumviz av-graph av-drawn"><style>{STYLE}{_DRAWN}</style>\n'
            '<div class="av-scroll" tabindex="0" role="group" aria-label="Drawing, scrollable">'
            f"{self.svg}</div></figure>"
        )

    def __repr__(self) -> str:
        return self.alt


def svg_from_dot(source: Any, alt: str) -> Drawing:
    """Draw DOT source (text, or an object with `.source` such as torchviz's) for any theme, with no `dot`.

    `alt` is the text alternative. Raises LayoutError without Graphviz.
    """
    # Graphviz knows how wide Courier is; of "monospace" it knows nothing and leaves too little room.
    text = getattr(source, "source", source)
    text = re.sub(r'fontname="?monospace"?', "fontname=Courier", text)
    drawn = graphviz(text, "svg")
    view = re.findall(r'viewBox="([^"]*)"', drawn)[0]
    *_, width, height = [float(side) * _LARGER for side in view.split()]
    body = drawn[drawn.index("<g ") :]
    body = re.sub(
        r"<!--.*?-->|<title>.*?</title>| id=\"[^\"]*\"", "", body, flags=re.DOTALL
    )
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="av-dot" role="img" aria-label="{escape(alt)}" '
        f'viewBox="{view}" width="{width:.0f}" height="{height:.0f}" '
        f'style="--av-width:{width:.0f}px">{body.strip()}',
        alt,
    )
