"""Draw the shares of each step below the lanes of a timeline."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from accumviz.ledger.ledger import Ledger
from accumviz.views import style
from accumviz.views.columns import EventColumns
from accumviz.views.figure import INK, MUTED, Canvas, Key, clear_of, text_width
from accumviz.views.shares import Bar, Segment, among, bars, reach

# A thinner segment has no number and no gap to the next.
_THIN = 3.0
_WIDEST = 64.0


class _BarPlace(NamedTuple):
    """Where a bar is drawn: from `x` on, so wide, on the line at `zero`, with so many pixels for a share of 1."""

    x: float
    width: float
    zero: float
    scale: float


class ShareStrip(NamedTuple):
    """The bars of shares of the steps among some events, drawn to one scale; lengths add, as shares do."""

    ledger: Ledger
    bars: list[Bar]

    @classmethod
    def of(cls, ledger: Ledger, events: Sequence[int]) -> ShareStrip:
        return cls(ledger, bars(ledger, events)[0])

    @property
    def tall(self) -> float:
        """Return how many pixels it takes."""
        return 92.0 if self.bars else 0.0

    def keys(self) -> list[Key]:
        """Return the entries of the legend."""
        if not self.bars:
            return []
        whole = among(self.ledger) or "the mean of one loss"
        keys = [Key(f"share 1: {whole}", INK, kind="dashed")]
        if any(part.unknown for bar in self.bars for part in bar.segments):
            keys.append(Key("unknown share", MUTED, 0.0, "xx"))
        return keys

    def notes(self, columns: EventColumns) -> list[str]:
        """Name the bars that stand beside each other in one step, and say whether sums had no room."""
        orders = []
        for _, of_step in itertools.groupby(self.bars, lambda bar: bar.step):
            names = ", ".join(bar.objective for bar in of_step)
            if ", " in names and names not in orders:
                orders.append(names)
        notes = [f"Shares of one step, from the left: {names}." for names in orders[:2]]
        if not all(self._sums(columns)):
            notes.append(
                "Sums without room are left out here; they stand in the words below."
            )
        return notes

    def draw(self, canvas: Canvas, columns: EventColumns, top: float) -> None:
        """Draw them, the sum of each at its end, and a dashed line at 1."""
        low, high = reach(self.bars)
        scale = (self.tall - 26) / (high - low)
        zero = top + 18 + high * scale
        canvas.level(columns.left, columns.end, zero, color=MUTED, width=0.9, z=1)
        seen: Counter[int] = Counter()
        for bar, total in zip(self.bars, self._sums(columns), strict=True):
            column = columns.events.index(bar.step)
            middle = columns.x(column) + columns.width / 2
            width = self._width(columns, bar)
            before = seen[bar.step] - self._of_step(bar) / 2
            x = middle + width * before
            seen[bar.step] += 1
            place = _BarPlace(x, width - 2, zero, scale)
            # A lone part is its own sum, which stands at the end of the bar.
            self._draw_bar(canvas, bar, place, written=len(bar.segments) > 1)
            if total:
                _draw_sum(canvas, bar, place, total)
        for one in (1, -1) if low < 0 else (1,):
            y = zero - one * scale
            # Above bars, and below what is written.
            canvas.level(columns.left, columns.end, y, width=1.2, dash="--", z=2.5)
            canvas.text(columns.end + 5, y, style.number(one))

    def _draw_bar(
        self, canvas: Canvas, bar: Bar, place: _BarPlace, *, written: bool
    ) -> None:
        color = style.label_colors(self.ledger.labels).get(bar.label, MUTED)
        for part in bar.segments:
            height = abs(part.length) * place.scale
            end = part.start + part.length
            y = place.zero - max(part.start, end) * place.scale
            # A thin line between segments keeps them apart; one as thick as they are would be all there is.
            shown = height - 1.0 if height > _THIN else height
            look = _look(part, color)
            if height:
                canvas.box(place.x, y, place.width, shown, **look)
            dashed = place.zero - math.copysign(place.scale, end)
            middle, room = clear_of(y, shown, dashed)
            fits = room >= 12 and text_width(part.text, 11) <= place.width - 2
            if written and fits and not part.unknown:
                ink = style.ink_on(color) if "fill" in look else INK
                x = place.x + place.width / 2
                canvas.text(x, middle, part.text, ha="center", color=ink)

    def _of_step(self, bar: Bar) -> int:
        """Return how many bars there are in a bar's step."""
        return sum(other.step == bar.step for other in self.bars)

    def _width(self, columns: EventColumns, bar: Bar) -> float:
        """Return how wide a bar is, with what keeps it from the next."""
        return min(columns.width * 0.8, _WIDEST) / self._of_step(bar)

    def _sums(self, columns: EventColumns) -> list[str]:
        """Return what each bar adds to, to as many digits as all have room for; nothing where there is none."""
        places = [columns.events.index(step) for step in self._steps]
        between = [later - earlier for earlier, later in itertools.pairwise(places)]
        wide = min(between, default=2) * columns.width
        rooms = []
        for bar in self.bars:
            # A lone bar's sum may be as wide as the way to the next one's.
            if self._of_step(bar) == 1:
                rooms.append(wide)
            else:
                rooms.append(self._width(columns, bar))
        totals = []
        for bar, room in zip(self.bars, rooms, strict=True):
            fits = text_width(bar.total, 11, bold=True) <= room - 3
            totals.append(bar.total if fits else "")
        return totals

    @property
    def _steps(self) -> list[int]:
        return list(dict.fromkeys(bar.step for bar in self.bars))


def _look(part: Segment, color: str) -> dict[str, Any]:
    if part.unknown:
        return {"edge": MUTED, "hatch": "xx"}
    return {"edge": color} if part.again else {"fill": color}


def _draw_sum(canvas: Canvas, bar: Bar, place: _BarPlace, total: str) -> None:
    middle = place.x + place.width / 2
    y = place.zero - max(bar.ends[1], 0.0) * place.scale - 9
    canvas.text(middle, y, total, weight="bold", ha="center", ground=True)
