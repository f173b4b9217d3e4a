"""Make a matplotlib chart readable on any page: light, dark, and on a phone."""

from __future__ import annotations

import html
import math
import pickle
import re
import textwrap
from itertools import pairwise
from typing import Any, TypeVar

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text

from accumviz.views.figure import INK, LINE, MUTED, PHONE, PageFigure

__all__ = ["INK", "LINE", "MUTED", "ThemedFigure", "for_phone"]

# What stands at a tick: a number, or a power of ten.
_NUMBER = re.compile(r"\$?(\\mathdefault\{)?[−-]?\d[\d.,e^{}−-]*\$?%?")
# The smallest letters that are read, in pixels.
_LETTERS = 11.0
# A chart that is no wider fits where it stands alone.
_FITS = 343.0
# How wide a letter is of its size: what fits with it fits in the page's own fonts.
_EM = 0.61
# Names of bars take no more of the width; between two of them stay these pixels.
_NAMES, _APART = 0.4, 4.0

Chart = TypeVar("Chart", bound=Figure)


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
        make_native(self)
        super().savefig(*arguments, **options)

    def for_phone(self) -> PageFigure | None:
        return for_phone(self)

    def attributes(self) -> str:
        # For a test of the book: no reader sees it.
        wrong = nameless(self)
        return f'data-nameless="{html.escape(", ".join(wrong))}" ' if wrong else ""


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
        text.set_fontsize(max(float(text.get_fontsize()), _LETTERS))
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
        for side in "xy":
            span = place and (place.colspan if side == "x" else place.rowspan)
            key = side, (span.start, span.stop) if span else id(axes)
            if _has_name(chart, axes, side):
                named.add(key)
            elif _has_numbers(axes, side):
                numbered.setdefault(key, f"{side} of {axes.get_title() or 'a panel'}")
    return [told for key, told in numbered.items() if key not in named]


def _has_name(chart: Figure, axes: Axes, side: str) -> bool:
    over = chart.get_supxlabel() if side == "x" else chart.get_supylabel()
    label = axes.get_xlabel() if side == "x" else axes.get_ylabel()
    return bool(over or label.strip())


def _has_numbers(axes: Axes, side: str) -> bool:
    axis = axes.xaxis if side == "x" else axes.yaxis
    if not axes.axison or not axis.get_visible():
        return False
    labels = [tick for tick in axis.get_ticklabels() if tick.get_visible()]
    return any(_NUMBER.fullmatch(label.get_text()) for label in labels)


def _panel(axes: Axes, black: set[str]) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        if spine.get_edgecolor() in {to_rgba(color) for color in black}:
            spine.set_edgecolor(LINE)
    for axis in (axes.xaxis, axes.yaxis):
        for which in ("major", "minor"):
            given = axis.get_tick_params(which=which)
            size = given.get("labelsize", _LETTERS)
            axis.set_tick_params(
                which=which,
                color=given.get("color", LINE),
                labelcolor=given.get("labelcolor", INK),
                labelsize=max(size, _LETTERS)
                if isinstance(size, (int, float))
                else _LETTERS,
            )


def _among(color: object, black: set[str]) -> bool:
    # The key of error bars has an array for a colour.
    return isinstance(color, str) and color in black


def for_phone(chart: Chart) -> Chart | None:
    """The same chart, as wide as a phone; None where it fits as it is, was placed by hand, or cannot be copied."""
    if (
        not isinstance(chart.get_layout_engine(), ConstrainedLayoutEngine)
        or _width(chart) <= _FITS
    ):
        return None
    try:
        # What is laid out again must not move in the chart that its owner has.
        copy: Chart = pickle.loads(pickle.dumps(chart))  # noqa: S301 - our own bytes, of this moment
    except (AttributeError, TypeError, pickle.PicklingError):
        return None
    columns = _stack(copy)
    for text in copy.findobj(Text):
        text.set_fontsize(max(float(text.get_fontsize()), _LETTERS))
    for axes in copy.axes:
        axes.tick_params(which="both", labelsize=_LETTERS)
    keys = _say_above(copy)
    for axes in copy.axes:
        _wrap(copy, axes, PHONE / columns)
    for axes, key in keys:
        # The title stands above the key, which stands above the panel.
        axes.set_title(
            axes.get_title(), pad=6 + 72 * key.get_window_extent().height / copy.dpi
        )
    _make_room(copy)
    return copy


def _width(chart: Figure) -> float:
    return 72 * float(chart.get_size_inches()[0])


def _stack(chart: Figure) -> int:
    """Break the panels of a row, so that each is as wide as it was; returns how many still stand side by side."""
    high, places = (
        float(chart.get_size_inches()[1]),
        [axes.get_subplotspec() for axes in chart.axes],
    )
    grids = {place.get_gridspec() for place in places if place is not None}
    side = next(iter(grids)).ncols if len(grids) == 1 else 1
    columns, rows = side, 1
    if None not in places and side == len(places):
        columns = max(int(_FITS * side / _width(chart)), 1)
        rows = math.ceil(side / columns)
        grid = GridSpec(rows, columns, figure=chart)
        for n, axes in enumerate(chart.axes):
            axes.set_subplotspec(grid[n // columns, n % columns])
            if n % columns == 0:
                _number_again(axes, chart.axes[0])
    chart.set_size_inches(PHONE / 72, high * rows)
    return columns


def _number_again(axes: Axes, first: Axes) -> None:
    """What a panel shared with its neighbour at the left it says itself where it begins a row."""
    if axes.get_shared_y_axes().joined(axes, first):
        axes.tick_params(labelleft=True)
        axes.set_ylabel(
            axes.get_ylabel() or first.get_ylabel(), color=first.yaxis.label.get_color()
        )


def _say_above(chart: Figure) -> list[tuple[Axes, Legend]]:
    """One key above all panels: inside a narrow one it would lie on what it explains.

    Where the first panel has nothing of it, it stands above the one that has; such are returned.
    """
    inside = [axes for axes in chart.axes if axes.get_legend()]
    keys = [*chart.legends, *filter(None, (axes.get_legend() for axes in inside))]
    entries: dict[str, tuple[Any, Text]] = {}
    for key in keys:
        for hand, text in zip(key.legend_handles, key.texts, strict=True):
            if hand:
                entries[text.get_text()] = hand, text
        key.remove()
    first = chart.axes[0].get_legend_handles_labels()[1] if chart.axes else []
    own = inside[0] if len(keys) == len(inside) == 1 and not first else None
    for columns in range(len(entries), 0, -1):
        key = _key(chart, own, entries, columns)
        if columns == 1 or key.get_window_extent().width <= (own or chart).bbox.width:
            return [(own, key)] if own else []
        key.remove()
    return []


def _key(
    chart: Figure, own: Axes | None, entries: dict[str, tuple[Any, Text]], columns: int
) -> Legend:
    """Draw a key in so many columns, above a panel of its own or above all of them."""
    hands = [hand for hand, _ in entries.values()]
    looks: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": _LETTERS}
    if own:
        looks |= {"bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0.2}
        key = own.legend(hands, [*entries], loc="lower left", **looks)
    else:
        key = chart.legend(hands, [*entries], loc="outside upper left", **looks)
    for text, (_, old) in zip(key.texts, entries.values(), strict=True):
        text.set_color(old.get_color())
    chart.draw_without_rendering()
    return key


def _wrap(chart: Figure, axes: Axes, room: float) -> None:
    chart.draw_without_rendering()
    names = [label.get_text() for label in axes.get_yticklabels()]
    told = [_broken(name, _NAMES * room) for name in names]
    if told != names:
        axes.set_yticks(axes.get_yticks(), told)
        chart.draw_without_rendering()
    scale = 72 / chart.dpi
    wide, high = axes.bbox.width * scale, axes.bbox.height * scale
    for text, most in (
        (axes.title, wide),
        (axes.xaxis.label, wide),
        (axes.yaxis.label, high),
    ):
        text.set_text(
            _broken(text.get_text(), most * _LETTERS / float(text.get_fontsize()))
        )


def _broken(text: str, room: float) -> str:
    letters = max(int(room / (_EM * _LETTERS)), 8)
    kept = re.sub(r" ([=/]) ", "\u00a0\\1\u00a0", text)  # `K = 4` stays together
    lines = (
        textwrap.wrap(line, letters, break_long_words=False, break_on_hyphens=False)
        or [""]
        for line in kept.split("\n")
    )
    return "\n".join(piece for line in lines for piece in line)


def _make_room(chart: Figure) -> None:
    """Turn the names below that would meet, widen what a number ends beyond, heighten until no two at the side meet."""
    chart.draw_without_rendering()
    apart = _APART * chart.dpi / 72
    for axes in chart.axes:
        boxes = [
            label.get_window_extent()
            for label in axes.get_xticklabels()
            if label.get_text()
        ]
        if any(
            right.x0 - left.x1 < apart
            for left, right in pairwise(sorted(boxes, key=lambda box: box.x0))
        ):
            axes.tick_params(axis="x", labelrotation=90)
        beyond = max(
            (text.get_window_extent().x1 + apart - axes.bbox.x1 for text in axes.texts),
            default=0.0,
        )
        if beyond > 0 and axes.get_xscale() == "linear":
            left, right = axes.get_xlim()
            axes.set_xlim(
                left, right + (right - left) * beyond / (axes.bbox.width - beyond)
            )
    chart.draw_without_rendering()
    most = 1.0
    for axes in chart.axes:
        boxes = [
            label.get_window_extent()
            for label in axes.get_yticklabels()
            if label.get_text()
        ]
        for low, high in pairwise(sorted(boxes, key=lambda box: box.y0)):
            between = (high.y0 + high.y1 - low.y0 - low.y1) / 2
            most = max(
                most, ((low.height + high.height) / 2 + apart) / max(between, 1.0)
            )
    wide, tall = chart.get_size_inches()
    inside = sum(axes.bbox.height for axes in chart.axes) / chart.dpi
    chart.set_size_inches(wide, tall + (most - 1) * inside)
