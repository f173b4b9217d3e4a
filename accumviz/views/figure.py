"""Paint a timeline with matplotlib, as a figure that a page shows in its own colours."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from accumviz.show import save_page
from accumviz.views import style

# What a page shows in its own colours, and a saved file in these.
INK, MUTED, LINE, GROUND = "#1a1f26", style.MUTED, "#b3bbc5", "#fefefe"
_PAGE_INKS = {
    INK: "currentColor",
    MUTED: "var(--av-muted)",
    LINE: "var(--av-line)",
    GROUND: "var(--av-ground)",
}
# What a page has for a figure, and a phone beside its margins, in a prediction's answer too.
WIDE, PHONE = 640.0, 320.0
# How opaque a part of `.grad` is that no step has used and no new backward added.
LIVE = 0.36
_SANS, _MONO = "DejaVu Sans", "DejaVu Sans Mono"
# DejaVu is among the widest fonts: a text that fits in it fits in what the page uses.
_EM = 0.61
# A bold number: how wide its minus and its point are, and all else.
_BOLD, _BOLD_EM = {"−": 0.838, ".": 0.38}, 0.696
_SAVED: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "accumviz",
    "savefig.bbox": None,
    "image.composite_image": False,
}
# What is drawn by hand: texts as they are, lines in pixels.
_DRAWN: Any = {
    "font.family": _SANS,
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,
    "lines.color": INK,
    "lines.linewidth": 1.0,
    "lines.scale_dashes": False,
    "lines.solid_capstyle": "butt",
}
_CSS = """
:root[data-theme="dark"] .accumviz, [data-jp-theme-light="false"] .accumviz { --av-live: 0.64; }
@media (prefers-color-scheme: dark) {
  :root:not([data-theme]) :not([data-jp-theme-light]) > .accumviz { --av-live: 0.64; } }
.accumviz .av-scroll { overflow-x: auto; max-width: 100%; }
.accumviz .av-figure { display: block; height: auto; max-width: 100%; }
.accumviz .av-narrow .av-figure { max-width: 100%; }
@media (max-width: 30rem) { .accumviz .av-wide { display: none; } .accumviz .av-narrow { display: block !important; } }
.accumviz details.av-words { font-size: 0.8125rem; color: var(--av-muted); margin-top: 0.25rem; }
.accumviz details.av-words summary { cursor: pointer; width: max-content; }
.accumviz details.av-words li { overflow-wrap: anywhere; }
"""
_SPOKEN = 1600
_shown = itertools.count()


@contextmanager
def drawing() -> Iterator[None]:
    """Draw with our settings, whatever the user's are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_DRAWN)
        yield


@contextmanager
def _saving() -> Iterator[None]:
    """Save with our settings; the page's fonts draw the text, so that missing glyphs are no loss."""
    with matplotlib.rc_context(_SAVED), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing|Matplotlib currently does not support"
        )
        yield


class PageFigure(Figure):
    """An ordinary matplotlib figure that notebooks show as inline SVG in the page's colours.

    `words` is its text alternative: sentences, the first of which says what is seen. `narrow` is the same for a phone.
    """

    words: list[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.narrow: PageFigure | None = None

    def save(self, path: str | Path) -> None:
        """Write a self-contained page (`.html`), or any format that matplotlib's `savefig` knows."""
        if str(path).endswith(".html"):
            save_page(path, "Timeline", self.to_html())
        else:
            self.savefig(path)

    def to_svg(self) -> str:
        """Return inline SVG: the page's text colour, and no ids that another figure could have."""
        buffer = io.StringIO()
        with _saving():
            self.savefig(
                buffer, format="svg", facecolor="none", metadata={"Date": None}
            )
        width, height = (float(side) * 72 for side in self.get_size_inches())
        # As much as one can listen to; all of it stands below the figure.
        said = textwrap.shorten(
            " ".join(self.words),
            _SPOKEN,
            placeholder=" …",
        )
        spoken = html.escape(said)
        least = f"min-width: {0.93 * width:.0f}px"
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'class="av-figure" role="img" aria-label="{spoken}" '
            f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
            f'style="stroke-linejoin: round; stroke-linecap: butt; {least}">'
            f"{_for_a_page(buffer.getvalue())}"
        )

    def for_phone(self) -> PageFigure | None:
        """Return the same for a phone, where there is such a figure."""
        return self.narrow

    def to_html(self) -> str:
        """Return the figure as self-contained HTML: SVG in a box that scrolls by itself, and the same in words."""
        items = "".join(f"<li>{html.escape(word)}</li>" for word in self.words)
        drawn = self.to_svg()
        narrow = self.for_phone()
        if narrow is not None:
            # Where styles are taken off, one of the two is enough.
            hidden = 'class="av-narrow" style="display: none"'
            drawn = f'<div class="av-wide">{drawn}</div><div {hidden}>{narrow.to_svg()}</div>'
        return (
            f'<div class="accumviz av-timeline"><style>{style.CSS}{_CSS}</style>'
            f'<div class="av-scroll" tabindex="0" role="group" aria-label="timeline">{drawn}</div>'
            f'<details class="av-words"><summary>In words</summary><ul>{items}</ul></details></div>'
        )

    def _repr_mimebundle_(self, **_formats: Any) -> dict[str, str]:
        png = io.BytesIO()
        with _saving():
            self.savefig(png, format="png", dpi=108)
        return {
            "text/html": self.to_html(),
            "image/png": base64.b64encode(png.getvalue()).decode(),
            "text/plain": "\n".join(self.words),
        }


def _for_a_page(raw: str) -> str:
    """Return what is inside an SVG of matplotlib, in the colours and fonts of the page."""
    body = re.sub(r"<(metadata|style).*?</\1>", "", raw, flags=re.DOTALL)
    body = body[body.index("<svg") :].partition(">")[2]
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', body))
    # One process can show a figure twice; a page can hold figures of two processes.
    prefix = f"av{hashlib.sha256(raw.encode()).hexdigest()[:6]}-{next(_shown)}-"
    # Only inside tags: a parameter may be called anything.
    body = re.sub(
        r"<[^>]*>",
        lambda tag: _themed(tag[0], used, prefix),
        body,
    )
    return re.sub(r"\n\s*", " ", body).strip()


def _themed(
    tag: str,
    used: set[str],
    prefix: str,
) -> str:
    tag = re.sub(
        r' id="([\w.-]+)"',
        lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "",
        tag,
    )
    tag = re.sub(r'(url\(|href=")#', rf"\1#{prefix}", tag)
    # In style declarations, not in presentation attributes: those know no var().
    for ink, page in _PAGE_INKS.items():
        tag = tag.replace(f": {ink}", f": {page}")
    # What is live in `.grad` is pale; on a dark ground as pale a colour would be near black.
    tag = tag.replace(f"fill-opacity: {LIVE}", f"fill-opacity: var(--av-live, {LIVE})")
    if " d=" in tag or tag.startswith("<use"):
        tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)  # a hundredth of a pixel is enough
    return re.sub(
        r"'DejaVu Sans( Mono)?'[^;\"]*",
        lambda m: style.MONO if m[1] else style.FONT,
        tag,
    )


def text_width(
    text: str,
    points: float = 12,
    *,
    bold: bool = False,
) -> float:
    """Return how wide a text is at most, in pixels, whatever font the page has. What is bold is a number."""
    if not bold:
        return points * len(text) * _EM
    return points * sum(_BOLD.get(letter, _BOLD_EM) for letter in text)


def clear_of(
    y: float,
    height: float,
    line: float,
) -> tuple[float, float]:
    """Return where in a part a number is written, and its room there, so that a line does not strike it through.

    >>> clear_of(0, 20, 30), clear_of(0, 20, 5)
    ((10.0, 20), (13.15, 13.7))
    """
    if not y + 1 < line < y + height - 1:
        return y + height / 2, height
    above = line - 1.3 - y
    below = y + height - line - 1.3
    return (y + above / 2, above) if above > below else (y + height - below / 2, below)


class Canvas:
    """A figure whose coordinates are CSS pixels, from the top left.

    One unit is a point of the figure (1/72 inch) and a pixel of the page, so that a font of 12 is 12 px.
    """

    def __init__(self, width: float) -> None:
        self.width = width
        self.figure = PageFigure(facecolor="white")
        self.figure.words = []
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()

    def finish(self, height: float) -> PageFigure:
        """End the figure at this height."""
        self.figure.set_size_inches(self.width / 72, height / 72)
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(height, 0)
        return self.figure

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        mono: bool = False,
        ground: bool = False,
        **look: Any,
    ) -> None:
        """Write a text, on a clear `ground` where lines would cross it."""
        if mono:
            look["family"] = _MONO
        if ground:
            look["bbox"] = {"facecolor": GROUND, "edgecolor": "none", "pad": 1.0}
        self.axes.text(
            x,
            y,
            text,
            va="center",
            rotation_mode="anchor",
            **look,
        )

    def write_inside(
        self,
        x: float,
        free: tuple[float, float],
        width: float,
        text: str,
        **look: Any,
    ) -> None:
        """Write a text around `x` into what is `free`, its middle and its height, where there is room."""
        middle, room = free
        if room >= 12 and text_width(text, 11) <= width - 2:
            self.text(x, middle, text, ha="center", **look)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        edge: str = "none",
        alpha: float = 1.0,
        **look: Any,
    ) -> None:
        """Draw a rectangle; `alpha` is of its fill, so that the page's background shines through."""
        box = Rectangle(
            (x, y),
            width,
            height,
            facecolor=(fill, alpha) if fill != "none" else "none",
            edgecolor=edge,
            clip_on=False,
            **{"zorder": 2, **look},
        )
        self.axes.add_patch(box)

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        *,
        dash: Sequence[float] = (),
        **look: Any,
    ) -> None:
        """Draw a line through points; `dash` is pixels of ink and of ground by turns."""
        style: Any = (0, dash) if dash else "-"
        line = Line2D(
            xs,
            ys,
            linestyle=style,
            clip_on=False,
            **{"zorder": 3, **look},
        )
        self.axes.add_line(line)

    def level(self, x: float, end: float, y: float, **look: Any) -> None:
        """Draw a level line from `x` to `end`."""
        self.line([x, end], [y, y], **look)

    def upright(self, x: float, top: float, bottom: float, **look: Any) -> None:
        """Draw an upright line from `top` to `bottom`."""
        self.line([x, x], [top, bottom], **look)


_LEFT, _LINE, _LETTERS = 12.0, 19.0, 11.5
# From the start of a mark to its text, and from the end of an entry to the mark of the next.
_MARK, _BETWEEN = 18.0, 16.0
# The marks of a legend that are lines: from where to where in a square of 14 pixels, how thick, and their dashes.
_STROKES: dict[str, tuple[list[tuple[float, ...]], float, tuple[float, ...]]] = {
    "cross": ([(3.5, 3.5, 10.5, 10.5), (10.5, 3.5, 3.5, 10.5)], 1.5, ()),
    "dots": ([(0, 7, 14, 7)], 2.2, (2.2, 3.6)),
    "dashed": ([(0, 7, 14, 7)], 1.4, (4.4, 2.2)),
    "total": ([(0, 7, 14, 7)], 2.4, ()),
    "rule": ([(7, 0, 7, 14)], 2, ()),
}


class Key(NamedTuple):
    """One entry of a legend: what it says, its colour and the look of its mark.

    `kind` is a box, or a line.
    """

    text: str
    color: str
    alpha: float = 1.0
    hatch: str | None = None
    kind: str = "box"
    dashes: tuple[float, ...] = ()

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        """Draw its mark, with its upper left corner there."""
        if self.kind in _STROKES:
            self._draw_lines(canvas, x, y)
        else:
            canvas.box(
                x,
                y + 1.5,
                13,
                11,
                fill=self.color,
                edge=self.color,
                alpha=self.alpha,
                hatch=self.hatch,
                linewidth=1.2,
            )

    def _draw_lines(self, canvas: Canvas, x: float, y: float) -> None:
        lines, width, dashes = _STROKES[self.kind]
        for x0, y0, x1, y1 in lines:
            canvas.line(
                [x + x0, x + x1],
                [y + y0, y + y1],
                color=self.color,
                linewidth=width,
                dash=self.dashes or dashes,
            )


def draw_legend(
    canvas: Canvas,
    keys: list[Key],
    notes: list[str],
    top: float,
) -> float:
    """Draw the entries, then the notes, below `top`, and return where they end."""
    x, y = _LEFT, top
    for key in keys:
        needed = _MARK + text_width(key.text, _LETTERS)
        if x > _LEFT and x + needed > canvas.width - 6:
            x, y = _LEFT, y + _LINE
        middle = y + _LINE / 2
        key.draw(canvas, x, middle - 7)
        canvas.text(x + _MARK, middle, key.text, size=_LETTERS)
        x += needed + _BETWEEN
    y += _LINE if keys else 0
    room = max(int((canvas.width - 2 * _LEFT) / (0.55 * _LETTERS)), 20)
    # A word that is wider than the figure stays whole.
    text = " ".join(notes)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    for line in lines:
        canvas.text(
            _LEFT,
            y + _LINE / 2,
            line,
            size=_LETTERS,
            color=MUTED,
        )
        y += _LINE
    return y + 4
