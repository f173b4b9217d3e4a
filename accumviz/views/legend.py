"""What the marks of a timeline mean: drawn below it in a file; on a page in HTML, which wraps and never scrolls."""

from __future__ import annotations

import html
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from accumviz.ledger.ledger import Ledger
from accumviz.views import style
from accumviz.views.figure import INK, LIVE, MUTED, PAGE_INKS, SANS, Canvas

_LEFT, _LINE, _POINTS = 12.0, 19.0, 11.5
# Between the end of one entry and the mark of the next.
_BETWEEN = 16.0


class Key(NamedTuple):
    """One entry: what it says, its colour, and how its swatch is drawn; `beside` it are others that mean the same."""

    text: str
    color: str
    alpha: float = 1.0
    hatch: str | None = None
    kind: str = "box"
    line: str | tuple[int, ...] = "-"
    beside: tuple[str, ...] = ()


@cache
def _drawn(text: str) -> float:
    """How wide a text is in a file, in pixels: files have matplotlib's own letters."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing|Matplotlib currently does not support"
        )
        letters = FontProperties(family=SANS, size=_POINTS)
        return float(
            text_to_path.get_text_width_height_descent(text, letters, ismath=False)[0]
        )


def _flow(keys: list[Key], width: float) -> Iterator[tuple[Key, float, int]]:
    x, line = _LEFT, 0
    for key in keys:
        needed = 18 + _drawn(key.text)
        if x > _LEFT and x + needed > width - 6:
            x, line = _LEFT, line + 1
        yield key, x, line
        x += needed + _BETWEEN


def _wrapped(notes: list[str], width: float) -> list[str]:
    room = max(int((width - 2 * _LEFT) / (0.55 * _POINTS)), 20)
    # A word that is wider than the figure stays whole.
    return [
        line
        for note in notes
        for line in textwrap.wrap(
            note, room, break_long_words=False, break_on_hyphens=False
        )
        or [""]
    ]


def legend_height(keys: list[Key], notes: list[str], width: float) -> float:
    """How many pixels the legend takes at this width."""
    return (
        _LINE
        * (
            max((line for _, _, line in _flow(keys, width)), default=-1)
            + 1
            + len(_wrapped(notes, width))
        )
        + 4
    )


def draw_legend(
    canvas: Canvas, keys: list[Key], notes: list[str], top: float, *, first: str = ""
) -> None:
    """Draw the entries, then the notes, below `top`; on a page `first`, an entry in HTML, leads them."""
    figure = canvas.figure
    figure.edges = (*figure.edges[:2], min(figure.edges[2], top))
    figure.below = _page(keys, notes, first)
    with canvas.outside():
        _draw(canvas, keys, notes, top)


def _draw(canvas: Canvas, keys: list[Key], notes: list[str], top: float) -> None:
    used = -1
    for key, x, line in _flow(keys, canvas.width):
        used = max(used, line)
        y = top + _LINE * (line + 0.5)
        if key.kind in ("box", "fill"):
            colors = (key.color, *key.beside)
            wide = 13 / len(colors)
            for n, color in enumerate(colors):
                left = x + n * wide
                edge = color if key.kind == "box" else "none"
                canvas.box(
                    left,
                    y - 5.5,
                    wide,
                    11,
                    fill=color,
                    alpha=key.alpha,
                    edge=edge,
                    hatch=key.hatch,
                    line=1.2,
                )
        elif key.kind == "cross":
            canvas.text(x + 6, y, "×", points=13, ha="center", color=key.color)
        elif key.kind == "dots":
            canvas.line([x, x + 13], [y, y], color=key.color, width=2.2, dash=":")
        elif key.kind == "dashed":
            canvas.line([x, x + 13], [y, y], color=key.color, width=1.4, dash="--")
        elif key.kind == "total":
            canvas.line([x, x + 13], [y, y], color=key.color, width=2.4)
        else:
            canvas.line(
                [x + 6.5, x + 6.5],
                [y - 7, y + 7],
                color=key.color,
                width=2,
                dash=key.line,
            )
        canvas.text(x + 18, y, key.text, points=_POINTS, color=INK)
    for k, note in enumerate(_wrapped(notes, canvas.width)):
        canvas.text(
            _LEFT, top + _LINE * (used + 1.5 + k), note, points=_POINTS, color=MUTED
        )


def rule_keys(ledger: Ledger, events: Sequence[int]) -> list[Key]:
    """The entries for the lines that these events rule through every row."""
    kinds = dict.fromkeys(
        ledger[e].kind for e in events if ledger[e].kind != "backward"
    )
    looks = ((kind, *style.kind(kind)) for kind in kinds)
    return [Key(kind, color, kind="rule", line=line) for kind, color, line in looks]


def entry(mark: str, text: str, wide: float = 14) -> str:
    """One entry on a page: a drawing, 14 pixels high, and what it means."""
    drawn = f'<svg aria-hidden="true" width="{wide:g}" height="14" viewBox="0 0 {wide:g} 14">{mark}</svg>'
    return f"<li>{drawn}<span>{html.escape(text)}</span></li>"


def _page(keys: Sequence[Key], notes: Iterable[str], first: str) -> str:
    items = first + "".join(entry(_mark(key), key.text) for key in keys)
    said = html.escape(" ".join(notes))
    return f'<ul class="av-legend">{items}</ul>' + (
        f'<p class="av-remarks">{said}</p>' if said else ""
    )


def _mark(key: Key) -> str:
    if key.kind not in ("box", "fill"):
        place, wide, dash = {
            "cross": ("M3.5 3.5l7 7m0-7l-7 7", 1.5, ""),
            "dots": ("M0 7h14", 2.2, "2.2 3.6"),
            "dashed": ("M0 7h14", 1.4, "4.4 2.2"),
            "total": ("M0 7h14", 2.4, ""),
            "rule": (
                "M7 0v14",
                2,
                "" if isinstance(key.line, str) else " ".join(map(str, key.line)),
            ),
        }[key.kind]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<path d="{place}" fill="none" style="stroke: {_ink(key.color)}" stroke-width="{wide}"{dashes}/>'
    drawn, colors = "", (key.color, *key.beside)
    wide = 13 / len(colors)
    alpha = f"var(--av-live, {LIVE})" if key.alpha == LIVE else f"{key.alpha:g}"
    for n, color in enumerate(colors):
        ink = _ink(color)
        edge = f"stroke: {ink}" if key.kind == "box" else "stroke: none"
        place = f'x="{0.5 + n * wide:g}" y="1.5" width="{wide:g}" height="11" stroke-width="1.2"'
        drawn += f'<rect {place} style="fill: {ink}; fill-opacity: {alpha}; {edge}"/>'
        if key.hatch:
            lines = "M.5 7.5l6-6M.5 12.5l11-11M5.5 12.5l8-8M11 12.5l2.5-2.5"
            lines += (
                "M13.5 7.5l-6-6M13.5 12.5l-11-11M8.5 12.5l-8-8M3 12.5l-2.5-2.5"
                if "x" in key.hatch
                else ""
            )
            drawn += f'<path d="{lines}" fill="none" style="stroke: {ink}"/>'
    return drawn


def _ink(color: str) -> str:
    return PAGE_INKS.get(color, color)
