"""A lane of a timeline: where the bars of one parameter stand, and how what they come to is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from accumviz.ledger.ledger import Ledger
from accumviz.views import style, words
from accumviz.views.figure import text_width
from accumviz.views.parts import Segment, heights, present, segments, totals
from accumviz.views.strip import Grid, clear_of

# A part that is thinner has no outline: the outlines would be all of it.
THIN = 4.0
# From the end of a bar to where its total ends, where this stands level; and from one total to the next.
LEVEL, _APART = 24.0, 5.0


class Slot(NamedTuple):
    """Where one bar stands: its column's room, its lane, its zero line and pixels per unit."""

    x: float
    bar: float
    room: float
    top: float
    lane: float
    zero: float
    scale: float

    @property
    def middle(self) -> float:
        """The middle of the column."""
        return self.x + self.bar / 2

    def parts(
        self, stack: list[Segment], heights: list[float]
    ) -> Iterator[tuple[Segment, float, float]]:
        """Each part, its upper edge and its height. Old parts first: the newest sits at the end, as the total does."""
        ends = {True: self.zero, False: self.zero}
        for part, drawn in zip(stack, heights, strict=True):
            height, up = abs(drawn) * self.scale, drawn >= 0
            yield part, ends[up] - height * up, height
            ends[up] += -height if up else height


class Lane(NamedTuple):
    """One parameter's bars: their parts, how tall each is, what `.grad` comes to, and where each stands."""

    p: int
    signed: bool
    stacks: list[list[Segment]]
    heights: list[list[float]]
    grads: list[float]
    slots: list[Slot]
    there: list[bool]

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        grid: Grid,
        row: int,
        p: int,
        reach: tuple[float, float],
        margin: float = LEVEL,
    ) -> Lane:
        top, inside = grid.top + grid.lane * row + grid.named, grid.lane - grid.named
        events = grid.events
        signed, stacks, grads = (
            words.is_signed(ledger, p),
            segments(ledger, p, events),
            totals(ledger, p)[events].tolist(),
        )
        low, high = reach
        # Room for a total beyond the end of a bar, on the sides that have bars.
        # Where no bar is, a "None" stands above the line, and a name may stand above the lane.
        over, under = (
            (margin if high > 0 else 12 if low < 0 else 20),
            (margin if low < 0 else 12),
        )
        scale = (inside - over - under - 6) / ((high - low) or 1.0)
        zero, bar = top + over + 3 + high * scale, min(grid.column * 0.66, 52.0)
        lefts = (grid.x(i) + (grid.column - bar) / 2 for i in range(len(events)))
        slots = [Slot(x, bar, grid.column, top, inside, zero, scale) for x in lefts]
        tall = [
            heights(stack, grad, signed)
            for stack, grad in zip(stacks, grads, strict=True)
        ]
        return cls(
            p,
            signed,
            stacks,
            tall,
            grads,
            slots,
            [present(ledger, e, p) for e in events],
        )

    def whole(self, i: int) -> bool:
        """Whether all of this bar can be drawn."""
        amounts = [self.grads[i], *(part.amount for part in self.stacks[i])]
        return self.there[i] and bool(np.isfinite(amounts).all())

    def told(self) -> list[float]:
        """The totals that are finite."""
        return [grad for i, grad in enumerate(self.grads) if self.whole(i)]

    def writes(self, digits: int, *, new: bool) -> bool:
        """Whether its parts are labelled, those that are new or the others: all that are seen as parts, or none."""
        return all(
            part.together == 1
            and text_width(style.number(part.amount, digits), 11) <= slot.bar - 3
            and clear_of(y, height, slot.zero - grad * slot.scale)[1] >= 14
            for i, (slot, stack, tall, grad) in enumerate(
                zip(self.slots, self.stacks, self.heights, self.grads, strict=True)
            )
            if self.whole(i)
            for part, y, height in slot.parts(stack, tall)
            if height >= THIN and part.new == new and labelled(part, stack)
        )


def labelled(part: Segment, stack: list[Segment]) -> bool:
    """Whether a part may have a number of its own."""
    # A lone part is its own total, which stands at the end of the bar.
    return part.born >= 0 and (part.new or len(stack) > 1)


class Telling(NamedTuple):
    """How the totals of a picture are written: to how many digits, and level or turned."""

    digits: int
    turned: bool

    def told(self, grad: float) -> str:
        """A total; where digits were lost, the last one that is left stands even if it is a zero.

        >>> Telling(3, False).told(0.10013), Telling(3, False).told(-0.1)
        ('0.100', '−0.1')
        """
        short, full = (
            style.number(grad, self.digits),
            f"{abs(grad):#.{self.digits}g}".rstrip("."),
        )
        exact = abs(float(f"{grad:.{self.digits}g}") - grad) <= 1e-5 * abs(grad)
        return (
            short if exact or "e" in short + full else ("−" if grad < 0 else "") + full
        )

    def level(self, told: str, room: float) -> float:
        """How large the letters of a total are that stands level; 0 where it has no room."""
        sizes = (12.0, 11.0) if room >= 44 and not self.turned else (11.0,)
        return next(
            (
                size
                for size in sizes
                if text_width(told, size, bold=True) <= room - _APART
            ),
            0.0,
        )

    def fits(self, lanes: list[Lane]) -> bool:
        """Whether all totals have room."""
        column = lanes[0].slots[0].room
        return self.turned or all(
            self.level(self.told(grad), column)
            for lane in lanes
            for grad in lane.told()
        )

    def margin(self, lanes: list[Lane]) -> float:
        """How far beyond the end of a bar its total reaches."""
        longest = max(
            (
                text_width(self.told(grad), 11, bold=True)
                for lane in lanes
                for grad in lane.told()
            ),
            default=0.0,
        )
        return max(LEVEL, 12 + longest) if self.turned else LEVEL


def telling_of(lanes: list[Lane]) -> Telling:
    """Level while all totals have room, else those turned that have none; to as many digits as fit, but at least three.

    Three digits rather than four where then the parts can be written, too.
    """
    for turned in (False, True):
        fitting = [
            telling for n in (4, 3) if (telling := Telling(n, turned)).fits(lanes)
        ]
        for parts in ((True, False), (True,)):
            for telling in fitting:
                if all(
                    lane.writes(telling.digits, new=new)
                    for lane in lanes
                    for new in parts
                ):
                    return telling
        if fitting:
            return fitting[0]
    raise AssertionError("turned, every total has room")
