"""A matplotlib figure, drawn in pixels, that a page shows in its own colours; and what every timeline has on it."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon, Rectangle

from accumviz.ledger.ledger import Event, Ledger
from accumviz.show import save_page
from accumviz.views import style, words

# What a page shows in its own colours, and a saved file in these.
INK, MUTED, LINE = "#1a1f26", "#5f6b77", "#b3bbc5"
# What a phone has beside its margins, in a prediction's answer too.
PHONE = 320.0
# How opaque a part of `.grad` is that no step has used and no new backward added.
LIVE = 0.36
# How much of its colour lies behind a weak cell on a dark ground, where a pale one would be near black.
_LIFT = 0.45
PAGE_INKS = {INK: "currentColor", MUTED: "var(--av-muted)", LINE: "var(--av-line)"}
SANS, _MONO = "DejaVu Sans", "DejaVu Sans Mono"
# DejaVu is among the widest fonts: a text that fits in it fits in what the page uses.
_EM = 0.61
# A bold number: how wide its minus and its point are, and all else.
_BOLD, _BOLD_EM = {"−": 0.838, ".": 0.38}, 0.696
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "accumviz",
    "savefig.bbox": None,
    "path.sketch": None,
    "path.effects": [],
    "image.composite_image": False,
}
_CSS = """
:root[data-theme="dark"] .accumviz, [data-jp-theme-light="false"] .accumviz { --av-live: 0.64; --av-lift: %(lift)s; }
@media (prefers-color-scheme: dark) {
  :root:not([data-theme]) :not([data-jp-theme-light]) > .accumviz { --av-live: 0.64; --av-lift: %(lift)s; } }
.accumviz .av-scroll { overflow-x: auto; max-width: 100%%; }
.accumviz .av-figure { display: block; height: auto; max-width: 100%%; }
.accumviz .av-narrow .av-figure { max-width: 100%%; }
@media (max-width: 30rem) { .accumviz .av-wide { display: none; } .accumviz .av-narrow { display: block !important; } }
.accumviz ul.av-legend { display: flex; flex-wrap: wrap; gap: 0.1rem 0.9rem; list-style: none; margin: 0.4rem 0 0.2rem;
  padding: 0; max-width: 46rem; font-size: 0.75rem; }
.accumviz ul.av-legend li { display: flex; align-items: center; gap: 0.35rem; margin: 0; padding: 0; }
.accumviz ul.av-legend svg { flex: none; }
.accumviz p.av-remarks { margin: 0.2rem 0; max-width: 46rem; font-size: 0.75rem; color: var(--av-muted); }
.accumviz details.av-words { font-size: 0.8125rem; color: var(--av-muted); margin-top: 0.25rem; }
.accumviz details.av-words summary { cursor: pointer; width: max-content; }
.accumviz details.av-words li { overflow-wrap: anywhere; }
""" % {"lift": _LIFT}
_SPOKEN = 1600
_LIFTS = "lifts-on-a-dark-ground"
_shown = itertools.count()


class PageFigure(Figure):
    """An ordinary matplotlib figure that notebooks show as inline SVG in the page's colours.

    `words` is its text alternative: sentences, the first of which says what is seen. `narrow` is the same for a phone.
    A page says `above` and `below` it, in HTML, what stands at its `edges`, so that this does not scroll with it.
    """

    words: list[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.narrow: PageFigure | None = None
        self.above, self.below = "", ""
        self.edges: tuple[list[Artist], float, float] = [], 0.0, math.inf

    def save(self, path: str | Path) -> None:
        """Write a self-contained page (`.html`), or any format that matplotlib's `savefig` knows."""
        if str(path).endswith(".html"):
            save_page(path, "Timeline", self.to_html())
        else:
            self.savefig(path)

    def to_svg(self, *, bare: bool = False) -> str:
        """The figure as inline SVG: the page's text colour, no ids that another figure could have; `bare`: no edges."""
        buffer = io.StringIO()
        lifts = self.findobj(lambda artist: artist.get_gid() == _LIFTS)
        outside, top, bottom = self.edges if bare else ([], 0.0, math.inf)
        for lift in lifts:
            lift.set_visible(True)
        for artist in outside:
            artist.set_visible(False)
        with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
            # The page's fonts draw the text, so glyphs that matplotlib's font lacks are no loss.
            warnings.filterwarnings(
                "ignore", "Glyph .* missing|Matplotlib currently does not support"
            )
            self.savefig(
                buffer, format="svg", facecolor="none", metadata={"Date": None}
            )
        for lift in lifts:
            lift.set_visible(False)
        for artist in outside:
            artist.set_visible(artist not in lifts)
        raw = buffer.getvalue()
        body = re.sub(
            r"<metadata>.*?</metadata>|<style.*?</style>",
            "",
            raw[raw.index("<svg") :],
            flags=re.DOTALL,
        )
        body = body[body.index(">") + 1 :]
        used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', body))
        # One process can show a figure twice; a page can hold figures of two processes.
        prefix = f"av{hashlib.sha256(raw.encode()).hexdigest()[:6]}-{next(_shown)}-"
        # Only inside tags: a parameter may be called anything.
        body = re.sub(r"<[^>]*>", lambda tag: _themed(tag[0], used, prefix), body)
        body = re.sub(r"\n\s*", " ", body)
        width, height = (float(side) * 72 for side in self.get_size_inches())
        height = min(height, bottom) - top
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="av-figure" '
            f'{self.attributes()}role="img" aria-label="{html.escape(self._spoken())}" '
            f'viewBox="0 {top:g} {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" '
            f'style="stroke-linejoin: round; stroke-linecap: butt; min-width: {0.93 * width:.0f}px">{body.strip()}'
        )

    def for_phone(self) -> PageFigure | None:
        """The same for a phone, where it can be made of this one."""
        return None

    def attributes(self) -> str:
        """What the SVG says of itself beside its words."""
        return ""

    def _spoken(self) -> str:
        """As many sentences as one can listen to; all of them stand below the figure."""
        lengths = itertools.accumulate(len(word) + 1 for word in self.words)
        spoken = [
            word
            for word, length in zip(self.words, lengths, strict=True)
            if length <= _SPOKEN
        ]
        return " ".join(spoken) + (
            " More below, in words." if len(spoken) < len(self.words) else ""
        )

    def to_html(self) -> str:
        """The figure as self-contained HTML: SVG in a box that scrolls by itself, and the same in words."""
        items = "".join(f"<li>{html.escape(word)}</li>" for word in self.words)
        drawn, below = self.to_svg(bare=True), self.below
        if smaller := self.narrow or self.for_phone():
            drawn = _either(drawn, smaller.to_svg(bare=True))
            below = _either(below, smaller.below) if below != smaller.below else below
        return (
            f'<div class="accumviz av-timeline"><style>{style.CSS}{_CSS}</style>{self.above}'
            f'<div class="av-scroll" tabindex="0" role="group" aria-label="timeline">{drawn}</div>{below}'
            f'<details class="av-words"><summary>In words</summary><ul>{items}</ul></details></div>'
        )

    def _repr_mimebundle_(self, **_formats: Any) -> dict[str, str]:
        png = io.BytesIO()
        with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Glyph .* missing|Matplotlib currently does not support"
            )
            self.savefig(png, format="png", dpi=108)
        return {
            "text/html": self.to_html(),
            "image/png": base64.b64encode(png.getvalue()).decode(),
            "text/plain": "\n".join(self.words),
        }


def _either(wide: str, narrow: str) -> str:
    """One for a wide page and one for a phone. Where styles are taken off, one of the two is enough."""
    return f'<div class="av-wide">{wide}</div><div class="av-narrow" style="display: none">{narrow}</div>'


def _themed(tag: str, used: set[str], prefix: str) -> str:
    tag = re.sub(
        r' id="([\w.-]+)"',
        lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "",
        tag,
    )
    tag = re.sub(r'(url\(|href=")#', rf"\1#{prefix}", tag)
    # In style declarations, not in presentation attributes: those know no var().
    for ink, page in PAGE_INKS.items():
        tag = tag.replace(f": {ink}", f": {page}")
    # What is live in `.grad` is pale; on a dark ground as pale a colour would be near black.
    tag = tag.replace(f"fill-opacity: {LIVE}", f"fill-opacity: var(--av-live, {LIVE})")
    if tag.startswith("<image") and (opacity := f'opacity="{_LIFT}"') in tag:
        tag = tag.replace(opacity, "").replace(
            'style="', 'style="opacity: var(--av-lift, 0); '
        )
    if " d=" in tag or tag.startswith("<use"):
        tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)  # a hundredth of a pixel is enough
    return re.sub(
        r"'DejaVu Sans( Mono)?'[^;\"]*",
        lambda m: style.MONO if m[1] else style.FONT,
        tag,
    )


def text_width(text: str, points: float = 12, *, bold: bool = False) -> float:
    """How wide a text is at most, in pixels: room for it, whatever font the page has. What is bold is a number."""
    return points * (
        sum(_BOLD.get(letter, _BOLD_EM) for letter in text) if bold else len(text) * _EM
    )


class Canvas:
    """A figure whose coordinates are CSS pixels, from the top left.

    One unit is a point of the figure (1/72 inch) and a pixel of the page, so that a font of 12 is 12 px.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = PageFigure(figsize=(width / 72, height / 72), facecolor="white")
        # A user's `figure.autolayout` must not move what is placed by hand.
        self.figure.set_layout_engine("none")
        self.figure.words = []
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self._frame()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is drawn meanwhile a page says in words and marks of its own, outside the box that scrolls."""
        before = {id(artist) for artist in self.axes.get_children()}
        yield
        artists, top, bottom = self.figure.edges
        added = [
            artist for artist in self.axes.get_children() if id(artist) not in before
        ]
        self.figure.edges = [*artists, *added], top, bottom

    def _frame(self) -> None:
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(self.height, 0)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        points: float = 12,
        color: str = INK,
        ha: str = "left",
        va: str = "center",
        bold: bool = False,
        italic: bool = False,
        mono: bool = False,
        turned: bool = False,
    ) -> None:
        """Write a text as it is: a `$` is a dollar."""
        self.axes.text(
            x,
            y,
            text,
            fontsize=points,
            color=color,
            ha=ha,
            va=va,
            parse_math=False,
            usetex=False,
            family=_MONO if mono else SANS,
            weight="bold" if bold else "normal",
            style="italic" if italic else "normal",
            rotation=90 if turned else 0,
            rotation_mode="anchor",
        )

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
        hatch: str | None = None,
        line: float = 1.0,
        dash: str = "-",
        z: float = 2,
    ) -> None:
        """Draw a rectangle; `alpha` is of its fill, so that the page's background shines through."""
        self.axes.add_patch(
            Rectangle(
                (x, y),
                width,
                height,
                facecolor=(fill, alpha) if fill != "none" else "none",
                edgecolor=edge,
                linewidth=line,
                linestyle=dash,
                hatch=hatch,
                clip_on=False,
                zorder=z,
                antialiased=True,
            )
        )

    def line(
        self,
        xs: list[float],
        ys: list[float],
        *,
        color: str = INK,
        width: float = 1.0,
        dash: str | tuple[int, ...] = "-",
        alpha: float = 1.0,
        z: float = 3,
    ) -> None:
        """Draw a line through points; `dash` may be pixels of ink and of ground by turns."""
        # What matplotlib takes is in widths of the line.
        dashes: Any = (
            dash
            if isinstance(dash, str)
            else (0, tuple(part / width for part in dash))
            if dash
            else "-"
        )
        self.axes.add_line(
            Line2D(
                xs,
                ys,
                color=color,
                linewidth=width,
                linestyle=dashes,
                alpha=alpha,
                clip_on=False,
                zorder=z,
                marker="None",
                solid_capstyle="butt",
                dash_capstyle="butt",
            )
        )

    def area(
        self,
        xs: list[float],
        low: list[float],
        high: list[float],
        *,
        color: str,
        alpha: float,
    ) -> None:
        """Fill the room between two lines."""
        outline = np.column_stack([[*xs, *reversed(xs)], [*high, *reversed(low)]])
        self.axes.add_patch(
            Polygon(
                outline,
                facecolor=color,
                edgecolor="none",
                alpha=alpha,
                clip_on=False,
                zorder=2,
            )
        )

    def image(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        pixels: np.ndarray,
        lift: np.ndarray | None = None,
    ) -> None:
        """Lay an RGBA image, rows × columns × 4, over a rectangle; its cells keep sharp edges.

        `lift` is one that lies behind it where a page is dark.
        """
        place: Any = {
            "extent": (x, x + width, y + height, y),
            "interpolation": "none",
            "aspect": "auto",
        }
        if lift is not None:
            self.axes.imshow(
                lift,
                **place,
                clip_on=False,
                zorder=1,
                alpha=_LIFT,
                gid=_LIFTS,
                visible=False,
            )
        self.axes.imshow(pixels, **place, clip_on=False, zorder=1)
        self._frame()

    def points(
        self,
        xs: list[float],
        ys: list[float],
        *,
        marker: str,
        size: float,
        color: str = INK,
    ) -> None:
        """Mark points."""
        self.axes.add_line(
            Line2D(
                xs,
                ys,
                color=color,
                linestyle="None",
                marker=marker,
                markersize=size,
                markeredgecolor=color,
                markeredgewidth=1.6,
                clip_on=False,
                zorder=5,
            )
        )


_POINTS = 11.5
# From this width on, a heading stands upright in three lines; in narrower columns it is turned.
_UPRIGHT, _ROOMY = 66.0, 20.0


def heading_height(ledger: Ledger, events: list[int], column: float) -> float:
    """How many pixels the headings of these events take above columns of this width."""
    if column >= _UPRIGHT:
        return 50.0
    return 14 + max(text_width(_title(ledger[e]), _POINTS) for e in events)


def draw_heading(
    canvas: Canvas,
    event: Event,
    x: float,
    column: float,
    *,
    top: float,
    bottom: float,
    above: float = 0.0,
    faint: bool = False,
) -> None:
    """Name an event above its column; all but a backward also rule through every row."""
    if event.kind != "backward":
        # Where names stand close, a line among them would touch two.
        begin = above + 4 if column >= _ROOMY else top - 3
        draw_rule(canvas, event, x, top=begin, bottom=top if faint else bottom)
    if event.kind == "backward" and column > 20:
        canvas.line([x, x], [top, bottom], color=LINE, width=0.6, alpha=0.7, z=0)
    if column < _UPRIGHT:
        canvas.text(
            x + column / 2 + 1, top - 8, _title(event), points=_POINTS, turned=True
        )
        return
    roomy, room = column >= 80, int((column - 10) / text_width("x", 11))
    canvas.text(x + 7, above + 11, event.kind, points=12 if roomy else 11)
    about = "skipped" if event.skipped else words.brief(words.subject(event), room)
    if event.kind == "sync":
        # Letters of a page's own are narrower than those of code.
        about = words.collective(event, int((column - 7) / text_width("x", 11) / 0.86))
    if about:
        canvas.text(
            x + 7,
            above + 26,
            about,
            points=11,
            mono=not event.skipped and event.kind != "sync",
        )
    if place := words.place(event):
        # The rank is all that tells some columns apart; the line stands in the words below.
        rank = "" if event.rank is None else f"rank {event.rank}"
        place = (
            place
            if text_width(place, 11) <= column - 7
            else rank or words.shorten(place, room)
        )
        canvas.text(x + 7, above + (40 if about else 26), place, points=11, color=MUTED)


def draw_rule(
    canvas: Canvas,
    event: Event,
    x: float,
    *,
    top: float,
    bottom: float,
    alpha: float = 1.0,
) -> None:
    """Draw an event's line across rows; fainter across those it does not concern."""
    color, dash = style.kind(event.kind)
    canvas.line(
        [x, x], [top, bottom], color=color, width=1.8, dash=dash, alpha=alpha, z=1
    )


def _title(event: Event) -> str:
    rank = "" if event.rank is None else f"rank {event.rank} "
    action = words.action(event)
    # To whom it was done may be cut; what was done is what the column shows.
    return f"{rank}{action} {words.brief(words.subject(event), max(19 - len(action), 9))}".strip()
