"""A chart left in matplotlib's own colours and letters -> one that is read on any page, light or dark."""

from __future__ import annotations

import re

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

# What a page shows in its own colours, and a saved file in these.
INK, MUTED, LINE = "#1a1f26", "#5f6b77", "#b3bbc5"
# What stands at a tick: a number, or a power of ten.
_NUMBER = re.compile(r"\$?(\\mathdefault\{)?[−-]?\d[\d.,e^{}−-]*\$?%?")
# The smallest letters that are read, in pixels.
LETTERS = 11.0


def make_native(chart: Figure) -> None:
    """Take away every ground, give ink to what nobody gave a colour, and enlarge letters too small to be read."""
    black = {
        "black",
        "k",
        *map(
            str,
            (
                rcParams["text.color"],
                rcParams["axes.labelcolor"],
                rcParams["axes.edgecolor"],
            ),
        ),
    }
    for axes in chart.axes:
        if axes.axison:
            _panel(axes, black)
    for key in (*chart.legends, *(axes.get_legend() for axes in chart.axes)):
        if key is not None:
            key.get_frame().set(facecolor="none", edgecolor=LINE)
    for text in chart.findobj(Text):
        if _among(text.get_color(), black):
            text.set_color(INK)
        text.set_fontsize(max(float(text.get_fontsize()), LETTERS))
    for line in chart.findobj(Line2D):
        if _among(line.get_color(), black):
            line.set_color(INK)


def nameless(chart: Figure) -> list[str]:
    """The axes of a drawn chart that have numbers and no name of what is counted: which, and of what panel.

    Panels of one row share the name of their y, those of one column that of their x.
    """
    named: set[tuple[str, object]] = set()
    numbered: dict[tuple[str, object], str] = {}
    for axes in chart.axes:
        place = axes.get_subplotspec()
        for axis, side, over in (
            (axes.xaxis, "x", chart.get_supxlabel()),
            (axes.yaxis, "y", chart.get_supylabel()),
        ):
            span = place and (place.colspan if side == "x" else place.rowspan)
            key = side, (span.start, span.stop) if span else id(axes)
            if over or axis.label.get_text().strip():
                named.add(key)
            labels = [
                tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible()
            ]
            if (
                axes.axison
                and axis.get_visible()
                and any(_NUMBER.fullmatch(label) for label in labels)
            ):
                numbered.setdefault(key, f"{side} of {axes.get_title() or 'a panel'}")
    return [told for key, told in numbered.items() if key not in named]


def _panel(axes: Axes, black: set[str]) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        if spine.get_edgecolor() in {to_rgba(color) for color in black}:
            spine.set_edgecolor(LINE)
    for axis in (axes.xaxis, axes.yaxis):
        for which in ("major", "minor"):
            given = axis.get_tick_params(which=which)
            size = given.get("labelsize", LETTERS)
            axis.set_tick_params(
                which=which,
                color=given.get("color", LINE),
                labelcolor=given.get("labelcolor", INK),
                labelsize=max(size, LETTERS)
                if isinstance(size, (int, float))
                else LETTERS,
            )


def _among(color: object, black: set[str]) -> bool:
    # The key of error bars has an array for a colour.
    return isinstance(color, str) and color in black
