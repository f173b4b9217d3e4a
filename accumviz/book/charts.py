"""Charts of matplotlib and drawings of Graphviz that are readable on any page: light, dark, and on a phone.

Importing it sets matplotlib's defaults to the page's inks and to letters that can be read.
"""

from __future__ import annotations

import math
import pickle
import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.text import Text

from accumviz.show import escape
from accumviz.views.figure import INK, LINE, MUTED, PHONE, PageFigure
from accumviz.views.graph import SMALL, STYLE, graphviz
from accumviz.views.style import MONO

__all__ = ["INK", "LINE", "MUTED", "Drawing", "ThemedFigure", "svg_from_dot"]

# The smallest letters that are read, in pixels.
_LETTERS = 11.0
# A chart that is no wider fits where it stands alone.
_FITS = 343.0
# How wide a letter is of its size: what fits with it fits in the page's own fonts.
_EM = 0.61
# Names of bars take no more of the width; between two of them stay these pixels.
_NAMES = 0.4
_APART = 4.0
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
    """An ordinary matplotlib figure that notebooks show as inline SVG in the page's colours, and again for a phone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # The last number below one panel stands beside the first below the next.
        options["layout"] = ConstrainedLayoutEngine(wspace=0.06)
        super().__init__(*arguments, **options)

    def for_phone(self) -> ThemedFigure | None:
        """Return the same as wide as a phone; None where it fits as it is."""
        width, height = self.get_size_inches()
        if 72 * width <= _FITS:
            return None
        # What is laid out again must not move in the chart that its owner has.
        small: ThemedFigure = pickle.loads(pickle.dumps(self))  # noqa: S301 - our own bytes, of this moment
        taller, columns = _stack_panels(small, _FITS / (72 * width))
        small.set_size_inches(PHONE / 72, height * taller)
        _move_keys_above(small)
        for axes in small.axes:
            _wrap(axes, PHONE / columns)
        small.draw_without_rendering()
        for axes in small.axes:
            _turn_names(axes)
            # A number may end beyond its panel.
            axes.spines[["top", "right"]].set_visible(False)
        _heighten(small)
        return small


# --- on a phone ---------------------------------------------------------------------------------


def _stack_panels(chart: Figure, part: float) -> tuple[float, int]:
    """Break rows of panels where only a part of each fits, and return how many times the rows, and how many columns."""
    panels = chart.axes
    place = panels[0].get_subplotspec()
    if place is None or place.get_gridspec().ncols == 1:
        return 1, 1
    wide = place.get_gridspec()
    columns = max(int(wide.ncols * part), 1)
    rows = math.ceil(len(panels) / columns)
    grid = GridSpec(rows, columns, figure=chart)
    for n, axes in enumerate(panels):
        row, column = divmod(n, columns)
        axes.set_subplotspec(grid[row, column])
        if column == 0 and axes.get_shared_y_axes().joined(axes, panels[0]):
            # It shared numbers and a name with its neighbour at the left.
            axes.tick_params(labelleft=True)
            axes.set_ylabel(panels[0].get_ylabel())
    return rows / wide.nrows, columns


def _move_keys_above(chart: Figure) -> None:
    """Make one key above all panels: inside a narrow one it would lie on what it explains."""
    entries: dict[str, Any] = {}
    for key in chart.findobj(Legend):
        for handle, text in zip(key.legend_handles, key.texts, strict=True):
            entries[text.get_text()] = handle
        key.remove()
    for columns in range(len(entries), 0, -1):
        key = chart.legend(
            list(entries.values()),
            list(entries),
            ncols=columns,
            loc="outside upper left",
        )
        chart.draw_without_rendering()
        if columns == 1 or key.get_window_extent().width <= chart.bbox.width:
            break
        key.remove()


def _wrap(axes: Axes, room: float) -> None:
    """Break names of bars, titles and names of axes that are wider than their room."""
    chart = axes.get_figure()
    assert isinstance(chart, Figure)
    chart.draw_without_rendering()
    names = [label.get_text() for label in axes.get_yticklabels()]
    broken = [_broken(name, _NAMES * room) for name in names]
    if broken != names:
        axes.set_yticks(axes.get_yticks(), broken)
        chart.draw_without_rendering()
    width = axes.bbox.width * 72 / chart.dpi
    height = axes.bbox.height * 72 / chart.dpi
    _wrap_text(axes.title, width)
    _wrap_text(axes.xaxis.label, width)
    _wrap_text(axes.yaxis.label, height)


def _wrap_text(text: Text, room: float) -> None:
    size = float(text.get_fontsize())
    broken = _broken(text.get_text(), room * _LETTERS / size)
    text.set_text(broken)


def _broken(text: str, room: float) -> str:
    letters = max(int(room / (_EM * _LETTERS)), 8)
    kept = re.sub(r" ([=/]) ", "\u00a0\\1\u00a0", text)  # `K = 4` stays together
    lines = []
    wrapper = textwrap.TextWrapper(
        letters, break_long_words=False, break_on_hyphens=False
    )
    for line in kept.split("\n"):
        lines.append(wrapper.fill(line))
    return "\n".join(lines)


def _turn_names(axes: Axes) -> None:
    """Turn names below a panel that would meet."""
    boxes = _boxes(axes.get_xticklabels(), "x0")
    if any(right.x0 - left.x1 < _APART for left, right in pairwise(boxes)):
        axes.tick_params(axis="x", labelrotation=90)


def _heighten(chart: Figure) -> None:
    """Heighten a chart until no two names at its side meet."""
    chart.draw_without_rendering()
    most = 1.0
    for axes in chart.axes:
        boxes = _boxes(axes.get_yticklabels(), "y0")
        for low, high in pairwise(boxes):
            apart = (high.y0 + high.y1 - low.y0 - low.y1) / 2
            apart = max(apart, 1.0)
            needed = (low.height + high.height) / 2 + _APART
            most = max(most, needed / apart)
    width, height = chart.get_size_inches()
    inside = sum(axes.bbox.height for axes in chart.axes) / chart.dpi
    chart.set_size_inches(width, height + (most - 1) * inside)


def _boxes(labels: list[Text], start: str) -> list[Any]:
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    return sorted(boxes, key=attrgetter(start))


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
