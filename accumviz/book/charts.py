"""Charts of matplotlib and drawings of Graphviz that are readable on any page: light, dark, and on a phone."""

from __future__ import annotations

import html
import math
import pickle
import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.text import Text

from accumviz import arguments
from accumviz.show import escape
from accumviz.views.figure import INK, LINE, MUTED, PHONE, PageFigure
from accumviz.views.graphviz import SMALL, STYLE, TITLE, graphviz

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


class ThemedFigure(PageFigure):
    """An ordinary matplotlib figure that notebooks show as inline SVG in the page's colours, and again for a phone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        engine = self.get_layout_engine()
        if isinstance(engine, ConstrainedLayoutEngine):
            # The last number below one panel stands beside the first below the next.
            engine.set(wspace=0.06)

    def savefig(self, *arguments: Any, **options: Any) -> None:
        """Write it as matplotlib does, with no ground, ink or letters that a page could not show."""
        _use_page_colours(self)
        super().savefig(*arguments, **options)

    def for_phone(self) -> ThemedFigure | None:
        """Return the same as wide as a phone; None where it fits as it is, was placed by hand, or cannot be copied."""
        width, _ = self.get_size_inches()
        engine = self.get_layout_engine()
        if 72 * width <= _FITS or not isinstance(engine, ConstrainedLayoutEngine):
            return None
        try:
            # What is laid out again must not move in the chart that its owner has.
            small: ThemedFigure = pickle.loads(pickle.dumps(self))  # noqa: S301 - our own bytes, of this moment
        except (AttributeError, TypeError, pickle.PicklingError):
            return None
        room = PHONE / _stack_panels(small)
        _use_page_colours(small)
        key = _move_keys_above(small)
        for axes in small.axes:
            axes.tick_params(which="both", labelsize=_LETTERS)
            _wrap(axes, room)
        if key is not None:
            # The title stands above the key, which stands above the panel.
            high = 72 * key.get_window_extent().height / small.dpi
            title = key.axes.get_title()
            key.axes.set_title(title, pad=6 + high)
        small.draw_without_rendering()
        for axes in small.axes:
            _turn_names(axes)
            _widen(axes)
        _heighten(small)
        return small


def _use_page_colours(chart: Figure) -> None:
    """Take away every ground, give ink to what has no colour of its own, and enlarge letters too small to be read."""
    for axes in chart.axes:
        axes.set_facecolor("none")
        for spine in axes.spines.values():
            if same_color(spine.get_edgecolor(), "black"):
                spine.set_edgecolor(LINE)
        for side in (axes.xaxis, axes.yaxis):
            given = side.get_tick_params()
            size = float(given.get("labelsize", _LETTERS))
            look = {
                "color": given.get("color", LINE),
                "labelcolor": given.get("labelcolor", INK),
                "labelsize": max(size, _LETTERS),
            }
            side.set_tick_params(**look)
            side.set_tick_params(which="minor", **look)
    for key in chart.findobj(Legend):
        key.get_frame().set(facecolor="none", edgecolor=LINE)
    for text in chart.findobj(Text):
        if same_color(text.get_color(), "black"):
            text.set_color(INK)
        size = float(text.get_fontsize())
        text.set_fontsize(max(size, _LETTERS))


# --- on a phone ---------------------------------------------------------------------------------


def _stack_panels(chart: Figure) -> int:
    """Break a row of panels, so that each is as wide as it was; return how many still stand side by side."""
    width, height = chart.get_size_inches()
    panels = chart.axes
    places = [axes.get_subplotspec() for axes in panels]
    grids = {place.get_gridspec() for place in places if place is not None}
    columns = max((grid.ncols for grid in grids), default=1)
    rows = 1
    if len(grids) == 1 and columns == len(panels) > 1:
        fitting = _FITS * columns / (72 * width)
        columns = max(int(fitting), 1)
        rows = math.ceil(len(panels) / columns)
        grid = GridSpec(rows, columns, figure=chart)
        for n, axes in enumerate(panels):
            row, column = divmod(n, columns)
            axes.set_subplotspec(grid[row, column])
            if column == 0 and axes.get_shared_y_axes().joined(axes, panels[0]):
                # What it shared with its neighbour at the left it says itself.
                axes.tick_params(labelleft=True)
                name = axes.get_ylabel() or panels[0].get_ylabel()
                axes.set_ylabel(name)
    chart.set_size_inches(PHONE / 72, height * rows)
    return columns


def _move_keys_above(chart: Figure) -> Legend | None:
    """Make one key above all panels: inside a narrow one it would lie on what it explains.

    Where only one panel after the first has a key, it stands above that one, and is returned.
    """
    inside = [axes for axes in chart.axes if axes.get_legend() is not None]
    keys = chart.findobj(Legend)
    entries: dict[str, tuple[Any, Text]] = {}
    for key in keys:
        for handle, text in zip(key.legend_handles, key.texts, strict=True):
            entries[text.get_text()] = handle, text
        key.remove()
    if not entries:
        return None
    above: Any = chart
    if len(keys) == len(inside) == 1 and inside[0] is not chart.axes[0]:
        above = inside[0]
    for columns in range(len(entries), 0, -1):
        key = _key(above, entries, columns)
        chart.draw_without_rendering()
        if columns == 1 or key.get_window_extent().width <= above.bbox.width:
            break
        key.remove()
    return None if above is chart else key


def _key(above: Any, entries: dict[str, tuple[Any, Text]], columns: int) -> Legend:
    """Draw a key in so many columns, above a panel or above all of them."""
    handles = [handle for handle, _ in entries.values()]
    options: dict[str, Any] = {"loc": "outside upper left"}
    if isinstance(above, Axes):
        options = {
            "loc": "lower left",
            "bbox_to_anchor": (0, 1),
            "borderaxespad": 0,
            "borderpad": 0.2,
        }
    key: Legend = above.legend(
        handles,
        list(entries),
        ncols=columns,
        frameon=False,
        fontsize=_LETTERS,
        **options,
    )
    for text, (_, old) in zip(key.texts, entries.values(), strict=True):
        text.set_color(old.get_color())
    return key


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
    boxes = _boxes(axes.get_xticklabels())
    boxes.sort(key=lambda box: box.x0)
    if any(right.x0 - left.x1 < _APART for left, right in pairwise(boxes)):
        axes.tick_params(axis="x", labelrotation=90)


def _widen(axes: Axes) -> None:
    """Widen what a panel shows until no number ends beyond it."""
    ends = [text.get_window_extent().x1 for text in axes.texts]
    beyond = max(ends, default=0.0) + _APART - axes.bbox.x1
    if beyond > 0 and axes.get_xscale() == "linear":
        left, right = axes.get_xlim()
        more = (right - left) * beyond / (axes.bbox.width - beyond)
        axes.set_xlim(left, right + more)


def _heighten(chart: Figure) -> None:
    """Heighten a chart until no two names at its side meet."""
    chart.draw_without_rendering()
    most = 1.0
    for axes in chart.axes:
        boxes = _boxes(axes.get_yticklabels())
        boxes.sort(key=lambda box: box.y0)
        for low, high in pairwise(boxes):
            apart = (high.y0 + high.y1 - low.y0 - low.y1) / 2
            apart = max(apart, 1.0)
            needed = (low.height + high.height) / 2 + _APART
            most = max(most, needed / apart)
    width, height = chart.get_size_inches()
    inside = sum(axes.bbox.height for axes in chart.axes) / chart.dpi
    chart.set_size_inches(width, height + (most - 1) * inside)


def _boxes(labels: list[Text]) -> list[Any]:
    return [label.get_window_extent() for label in labels if label.get_text()]


# --- drawings of other tools --------------------------------------------------------------------


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
    # Graphviz knows how wide Courier is; of "monospace" it knows nothing and leaves too little room.
    text = re.sub(r'fontname="?monospace"?', "fontname=Courier", text)
    drawn = graphviz(text, "svg")
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
    start = drawn.index("<svg")
    head, _, body = drawn[start:].partition(">")
    body = _DROPPED.sub("", body)
    body = _NODE.sub(_with_dark_text, body)
    body = re.sub(r'font-family="Courier[^"]*"', 'class="av-mono"', body)
    body = _BLACK.sub(r'\1="currentColor"', body)
    sizes = [float(px) for px in re.findall(r'font-size="([\d.]+)', body)]
    scaled = re.search(r"scale\(([\d.]+)", body)
    scale = float(scaled[1]) if scaled else 1.0
    smallest = min(sizes, default=TITLE) * scale
    factor = max(1.0, SMALL / smallest)
    view = re.findall(r'viewBox="([^"]*)"', head)[0]
    *_, width, height = [float(side) * factor for side in view.split()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" '
        f'viewBox="{view}" width="{width:.0f}" height="{height:.0f}" '
        f'style="--av-width:{width:.0f}px">{body.strip()}'
    )


def _with_dark_text(node: re.Match[str]) -> str:
    drawn = node[0]
    if _COLORED.search(drawn):
        return drawn.replace("<text ", '<text style="fill:#1a1a1a" ')
    return drawn
