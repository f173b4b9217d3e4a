"""Draw the shares of each step below the lanes of a timeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from accumviz.ledger.ledger import Ledger
from accumviz.views import style
from accumviz.views.columns import EventColumns
from accumviz.views.figure import INK, MUTED, Canvas, Key, clear_of, text_width
from accumviz.views.shares import Bar, among, bars, reach

# A thinner segment has no number and no gap to the next.
_THIN = 3.0


class ShareStrip(NamedTuple):
    """The bars of shares of the steps among some events, drawn to one scale; lengths add, as shares do."""

    ledger: Ledger
    bars: list[Bar]

    @classmethod
    def of(cls, ledger: Ledger, events: Sequence[int]) -> ShareStrip:
        return cls(ledger, bars(ledger, events)[0])

    @property
    def tall(self) -> float:
        """How many pixels it takes."""
        return 92.0 if self.bars else 0.0

    def keys(self) -> list[Key]:
        """The entries of the legend."""
        if not self.bars:
            return []
        whole = among(self.ledger) or "the mean of one loss"
        keys = [Key(f"share 1: {whole}", INK, kind="dashed")]
        unknown = any(part.unknown for bar in self.bars for part in bar.segments)
        return [*keys, Key("unknown share", MUTED, 0.0, "xx")] if unknown else keys

    def notes(self, columns: EventColumns) -> list[str]:
        """What stands beside each other in one step, which nothing else tells, and whether sums had no room."""
        steps: dict[int, list[str]] = {}
        for bar in self.bars:
            steps.setdefault(bar.step, []).append(bar.objective)
        orders = dict.fromkeys(
            tuple(names) for _, names in sorted(steps.items()) if len(names) > 1
        )
        notes = [
            f"Shares of one step, from the left: {', '.join(names)}."
            for names in list(orders)[:2]
        ]
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
        rooms, sums = self._rooms(columns), self._sums(columns)
        written = all(_fits(bar, rooms[bar.step] - 2, scale) for bar in self.bars)
        drawn: dict[int, int] = {}
        ends: list[tuple[float, float, float]] = []
        for bar, told in zip(self.bars, sums, strict=True):
            wide, steps = rooms[bar.step], [bar.step for bar in self.bars]
            middle = columns.x(columns.events.index(bar.step)) + columns.width / 2
            nth = drawn[bar.step] = drawn.get(bar.step, -1) + 1
            x = middle + wide * (nth - steps.count(bar.step) / 2)
            # A lone part is its own sum, which stands at the end of the bar.
            inside = written and (len(bar.segments) > 1 or not told)
            self._draw_bar(canvas, bar, x, wide - 2, zero, scale, written=inside)
            y, middle = zero - max(bar.ends[1], 0.0) * scale - 9, x + wide / 2 - 1
            canvas.text(middle, y, told, weight="bold", ha="center")
            half = text_width(told, 11, bold=True) / 2 + 2
            ends += [(middle - half, middle + half, y)] if told else []
        for one in (1, -1) if low < 0 else (1,):
            _draw_dashed(canvas, columns, zero - one * scale, style.number(one), ends)

    def _draw_bar(
        self,
        canvas: Canvas,
        bar: Bar,
        x: float,
        wide: float,
        zero: float,
        scale: float,
        *,
        written: bool,
    ) -> None:
        color = style.label_colors(self.ledger.labels).get(bar.label, MUTED)
        for part in bar.segments:
            height, end = abs(part.length) * scale, part.start + part.length
            if not height:
                continue
            y, new = zero - max(part.start, end) * scale, part.look == "new"
            # A thin line between segments keeps them apart; one as thick as they are would be all there is.
            seen = height > _THIN
            height -= 1.0 if seen else 0.0
            if new:
                canvas.box(x, y, wide, height, fill=color)
            elif part.unknown:
                canvas.box(x, y, wide, height, edge=MUTED, hatch="xx")
            else:
                canvas.box(x, y, wide, height, edge=color)
            if written and seen and not part.unknown:
                ink = style.ink_on(color) if new else INK
                middle = clear_of(y, height, zero - math.copysign(scale, end))[0]
                canvas.text(x + wide / 2, middle, part.told, ha="center", color=ink)

    def _rooms(self, columns: EventColumns) -> dict[int, float]:
        """How wide a bar of each step is, with what keeps it from the next."""
        steps = [bar.step for bar in self.bars]
        return {e: min(columns.width * 0.8, 64.0) / steps.count(e) for e in steps}

    def _sums(self, columns: EventColumns) -> list[str]:
        """What each bar adds to, to as many digits as there is room for in all of them; nothing where there is none."""
        steps, rooms = [bar.step for bar in self.bars], self._rooms(columns)
        # A lone one may reach over the columns beside it, up to the next, or to the edge.
        count = len(columns.events)
        at = [columns.events.index(e) for e in dict.fromkeys(steps)]
        near = min([b - a for a, b in itertools.pairwise(at)], default=count)
        edge = min([2 * min(n, count - 1 - n) + 1 for n in at], default=0)
        lone = min(near * columns.width, edge * columns.width + 8)
        room = [rooms[e] if steps.count(e) > 1 else lone for e in steps]
        # Parts have three digits, and so have totals where there is room.
        for digits in (1, 2, 3):
            told = [bar.totals[min(digits, len(bar.totals) - 1)] for bar in self.bars]
            fitting = [
                text_width(text, 11, bold=True) <= most - 3
                for text, most in zip(told, room, strict=True)
            ]
            if all(fitting):
                break
        return [text * fits for text, fits in zip(told, fitting, strict=True)]


def _fits(bar: Bar, wide: float, scale: float) -> bool:
    """Whether each of its segments that is seen as one has room for its number."""
    for part in bar.segments:
        height, end = abs(part.length) * scale, part.start + part.length
        if part.unknown or height <= _THIN:
            continue
        top, one = -max(part.start, end) * scale, -math.copysign(scale, end)
        room = clear_of(top, height, one)[1]
        if room < 12 or text_width(part.told, 11) > wide - 2:
            return False
    return True


def _draw_dashed(
    canvas: Canvas,
    columns: EventColumns,
    y: float,
    told: str,
    sums: list[tuple[float, float, float]],
) -> None:
    """Draw a line across the columns, with its name at the end, and a gap where it would strike a sum through."""
    gaps = sorted((left, right) for left, right, middle in sums if abs(middle - y) < 9)
    start = columns.left
    for left, right in [*gaps, (columns.end, columns.end)]:
        canvas.level(start, left, y, width=1.2, dash="--", z=4)
        start = right
    canvas.text(columns.end + 5, y, told)
