"""Draw the shares of each step below the lanes of a timeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.ledger import Ledger
from accumviz.views import style
from accumviz.views.columns import EventColumns
from accumviz.views.figure import INK, MUTED, Canvas, Key, clear_of, text_width
from accumviz.views.shares import Segment, ShareBar, among, bars, reach

TALL = 92.0
# A thinner segment has no gap to the next, and a wider bar is not drawn.
_THIN, _WIDEST = 3.0, 64.0


class _BarPlace(NamedTuple):
    """Where a bar is drawn: from `x` on, so wide, on the line at `zero`, with so many pixels for a share of 1."""

    x: float
    width: float
    zero: float
    scale: float


class ShareStrip:
    """The bars of shares of the steps among some events, drawn to one scale; lengths add, as shares do."""

    def __init__(self, ledger: Ledger, events: Sequence[int]) -> None:
        self.ledger = ledger
        self.bars = bars(ledger, events)[0]
        # Whether a sum had no room.
        self.left_out = False
        by_step = itertools.groupby(self.bars, lambda bar: bar.step)
        self.steps = [(step, list(of_step)) for step, of_step in by_step]

    def keys(self) -> list[Key]:
        """Return the entries of the legend."""
        whole = among(self.ledger) or "the mean of one loss"
        keys = [Key(f"share 1: {whole}", INK, kind="dashed")]
        if any(part.unknown for bar in self.bars for part in bar.segments):
            keys.append(Key("unknown share", MUTED, 0.0, "xx"))
        return keys

    def draw(self, canvas: Canvas, columns: EventColumns, top: float) -> None:
        """Draw them, the sum of each at its end where it has room, and a dashed line at 1."""
        low, high = reach(self.bars)
        scale = (TALL - 26) / (high - low)
        zero = top + 18 + high * scale
        canvas.level(columns.left, columns.end, zero, color=MUTED, width=0.9, z=1)
        indices = [event.index for event in columns.events]
        places = [indices.index(step) for step, _ in self.steps]
        apart = int(np.diff(places).min(initial=2))
        for at, (_, of_step) in zip(places, self.steps, strict=True):
            wide = min(columns.width * 0.8, _WIDEST) / len(of_step)
            x = columns.middle(at) - wide * len(of_step) / 2
            # A lone bar's sum may be as wide as the way to the next one's.
            room = wide if len(of_step) > 1 else apart * columns.width
            for n, bar in enumerate(of_step):
                place = _BarPlace(x + n * wide, wide - 2, zero, scale)
                self._draw_bar(canvas, bar, place, room)
        for one in (1, -1) if low < 0 else (1,):
            y = zero - one * scale
            # Above bars, and below what is written.
            canvas.level(columns.left, columns.end, y, width=1.2, dash="--", z=2.5)
            canvas.text(columns.end + 5, y, style.number(one))

    def _draw_bar(
        self, canvas: Canvas, bar: ShareBar, place: _BarPlace, room: float
    ) -> None:
        color = style.label_colors(self.ledger.labels).get(bar.label, MUTED)
        middle = place.x + place.width / 2
        for part in bar.segments:
            height = abs(part.length) * place.scale
            y = place.zero - max(part.start, part.start + part.length) * place.scale
            # A thin line between segments keeps them apart; one as thick as they are would be all there is.
            shown = height - 1.0 if height > _THIN else height
            if height:
                canvas.box(place.x, y, place.width, shown, **_look(part, color))
            # A lone part is its own sum, which stands at the end of the bar.
            if len(bar.segments) > 1 and part.look == "new":
                line = place.zero - math.copysign(place.scale, part.length)
                y, tall = clear_of(y, shown, line)
                if tall >= 12 and text_width(part.text, 11) <= place.width - 2:
                    ink = style.ink_on(color)
                    canvas.text(middle, y, part.text, ha="center", color=ink)
        if text_width(bar.total, 11, bold=True) > room - 3:
            self.left_out = True
        else:
            y = place.zero - max(bar.ends[1], 0.0) * place.scale - 9
            look: Any = {"weight": "bold", "ha": "center", "ground": True}
            canvas.text(middle, y, bar.total, **look)


def _look(part: Segment, color: str) -> dict[str, Any]:
    if part.unknown:
        return {"edge": MUTED, "hatch": "xx"}
    return {"edge": color} if part.again else {"fill": color}
