"""Draw a ledger with matplotlib: bars while each number can be written, a heat map beyond."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz import arguments
from accumviz.ledger.ledger import Event, Ledger, Parameter, Recorded, recorded
from accumviz.show import counted
from accumviz.views import heatmap, style, words
from accumviz.views.columns import (
    AFTER,
    ALLOCATED,
    BEFORE,
    Bytes,
    EventColumns,
    draw_heading,
    draw_rule,
    heading_height,
    measured,
    rule_keys,
    rule_top,
)
from accumviz.views.figure import (
    INK,
    LINE,
    LIVE,
    MUTED,
    PHONE,
    Canvas,
    Key,
    PageFigure,
    clear_of,
    draw_legend,
    text_width,
)
from accumviz.views.parts import LivePart, extent, heights, present, segments, totals
from accumviz.views.sharebars import ShareStrip

_MOST_LANES, _NARROWEST, _WIDEST = 8, 27.0, 112.0
# On a phone, names may stand above their lanes, in so much room, and columns may be as narrow as this.
_NAMED, _TIGHT = 18.0, 21.0
# So many letters of a name stand on a line beside a lane, and so many in all.
_LETTERS, _MOST_LETTERS = 20, 48
# From these widths on, a column has room for a word, and for the number of what was erased.
_WORDY, _SPACIOUS = 36.0, 80.0
# A part that is thinner has no outline: the outlines would be all of it.
_THIN = 4.0
# From the end of a bar to where its total ends, where this stands level; and from one total to the next.
_LEVEL, _APART = 24.0, 5.0
_STRIP = 44.0
# How parts look, and what the legend says of them: opacity and hatching.
_LOOKS: dict[str, tuple[str, float, str | None]] = {
    "new": ("added by this backward", 1.0, None),
    "live": ("already in .grad", LIVE, None),
    "used": ("already used by a step", 0.0, None),
    "unseen": ("not from a recorded backward", 0.0, "xx"),
}


def timeline(
    ledger: Ledger | Recorded,
    *,
    parameters: str | int | Iterable[str | int] | None = None,
    events: slice | Iterable[int] | None = None,
    width: float = 640,
) -> PageFigure:
    """Draw what every event added to, and left in, each `.grad`.

    A small ledger becomes one lane per parameter, with the contributions live in `.grad` as
    stacked bars and every number written; a large one a heat map of contribution norms.
    `parameters` are names, indices or patterns (`"encoder.*"`), `events` a slice or indices,
    `width` the most CSS pixels it may take (72 to the inch in a saved file).

    Raises `KeyError` for an unknown parameter, `IndexError` for an unknown event, `TypeError` and
    `ValueError` for what is neither.

    >>> import accumviz as av
    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = av.Ledger.build([Parameter("w", shape=(1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ... ])
    >>> av.timeline(ledger).words[1]
    'Event 0, backward: w receives −16, .grad −16.'
    """
    ledger = recorded(ledger, "timeline")
    width = arguments.above_zero("width", width, "CSS pixels")
    rows, chosen = _parameters(ledger, parameters), _events(ledger, events)
    if not rows or not chosen:
        figure = _nothing("no event" if not chosen else "no parameter", width)
    elif lanes := _lanes(ledger, rows, chosen, width):
        figure = lanes
        if width > PHONE and 72 * figure.get_size_inches()[0] > PHONE:
            figure.narrow = _lanes(ledger, rows, chosen, PHONE) or _lanes(
                ledger, rows, chosen, PHONE, above=True
            )
    else:
        figure = heatmap.draw(ledger, rows, chosen, width)
    figure.words = words.story(ledger, chosen, rows)
    if figure.narrow:
        figure.narrow.words = figure.words
    return figure


def _nothing(what: str, width: float) -> PageFigure:
    canvas = Canvas(min(width, 420))
    said = f"Nothing to show: this ledger has {what}."
    canvas.text(12, 20, said, size=12, color=MUTED)
    return canvas.finish(40)


def _parameters(
    ledger: Ledger, wanted: str | int | Iterable[str | int] | None
) -> list[int]:
    if wanted is None:
        return list(range(len(ledger.parameters)))
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        wanted = [wanted]
    names = [parameter.name for parameter in ledger.parameters]
    chosen: list[int] = []
    for one in wanted:
        pattern = one if isinstance(one, str) else ""
        matches = [i for i, name in enumerate(names) if fnmatch.fnmatch(name, pattern)]
        chosen += matches or [ledger.index(one)]
    return list(dict.fromkeys(chosen))


def _events(ledger: Ledger, wanted: slice | Iterable[int] | None) -> list[int]:
    every = range(len(ledger))
    said = f"events={wanted!r:.80}; expected a slice or indices of this ledger's {len(ledger)} events, as in events=[0]"
    try:
        if wanted is None or isinstance(wanted, slice):
            return list(every[wanted or slice(None)])
        return sorted({every[e] for e in wanted})
    except IndexError:
        raise IndexError(said) from None
    except TypeError:
        raise TypeError(said) from None


class _Lane(NamedTuple):
    """One parameter's bars: their parts, how tall each is drawn, what `.grad` comes to, and whether there is one.

    Once it is placed, it is `tall` pixels high from its `top`, and has its zero line and its pixels per unit.
    """

    p: int
    signed: bool
    stacks: list[list[LivePart]]
    heights: list[list[float]]
    grads: list[float]
    present: list[bool]
    reach: tuple[float, float]
    top: float = 0.0
    tall: float = 0.0
    zero: float = 0.0
    scale: float = 1.0

    def placed(self, top: float, tall: float, margin: float) -> _Lane:
        """The same, with room for a total beyond the ends of its bars."""
        low, high = self.reach
        # Where no bar is, a "None" stands above the line.
        empty = 12 if low < 0 else 20
        over, under = margin if high > 0 else empty, margin if low < 0 else 12
        scale = (tall - over - under - 6) / ((high - low) or 1.0)
        zero = top + over + 3 + high * scale
        return self._replace(top=top, tall=tall, zero=zero, scale=scale)

    def is_whole(self, i: int) -> bool:
        """Whether all of a bar can be drawn."""
        amounts = [self.grads[i], *(part.amount for part in self.stacks[i])]
        return self.present[i] and bool(np.isfinite(amounts).all())

    def finite(self) -> list[float]:
        """The totals of the bars that can be drawn."""
        return [grad for i, grad in enumerate(self.grads) if self.is_whole(i)]

    def net(self, i: int) -> float:
        """Where the line of `.grad` lies."""
        return self.zero - self.grads[i] * self.scale

    def parts(self, i: int) -> Iterator[tuple[LivePart, float, float]]:
        """Each part of a bar, its upper edge and its height; old ones first, so that the newest sits at the end."""
        up = down = self.zero
        for part, drawn in zip(self.stacks[i], self.heights[i], strict=True):
            height = abs(drawn) * self.scale
            if drawn >= 0:
                up -= height
                yield part, up, height
            else:
                yield part, down, height
                down += height

    def end(self, i: int) -> float:
        """The end of a bar, beyond which its total is written."""
        edges = [self.zero, self.net(i)]
        for _, y, height in self.parts(i):
            edges += [y, y + height]
        return max(edges) if self.grads[i] < 0 else min(edges)

    def writes(self, digits: int, bar: float, *, new: bool) -> bool:
        """Whether the parts that are new, or all others, have room for their numbers: all are written, or none."""
        for i in range(len(self.grads)):
            if not self.is_whole(i):
                continue
            for part, y, height in self.parts(i):
                if part.new != new or not self.is_labelled(i, part, height):
                    continue
                wide = text_width(style.number(part.amount, digits), 11)
                room = clear_of(y, height, self.net(i))[1]
                if part.together > 1 or wide > bar - 3 or room < 14:
                    return False
        return True

    def is_labelled(self, i: int, part: LivePart, height: float) -> bool:
        """Whether a part may have a number of its own: a lone one is its own total, which stands at the end."""
        alone = len(self.stacks[i]) == 1 and not part.new
        return part.born >= 0 and height >= _THIN and not alone


class _Writing(NamedTuple):
    """How the totals of a picture are written: with how many digits, and level or, where they have no room, turned."""

    digits: int
    turned: bool

    def text(self, grad: float) -> str:
        """A total; where digits were lost, the last one that is left stands even if it is a zero.

        >>> _Writing(3, False).text(0.10013), _Writing(3, False).text(-0.1)
        ('0.100', '−0.1')
        """
        short = style.number(grad, self.digits)
        full = f"{abs(grad):#.{self.digits}g}".rstrip(".")
        exact = abs(float(f"{grad:.{self.digits}g}") - grad) <= 1e-5 * abs(grad)
        if exact or "e" in short + full:
            return short
        return f"−{full}" if grad < 0 else full

    def size(self, grad: float, room: float) -> float:
        """How large the letters of a total are that stands level; 0 where it has no room."""
        text = self.text(grad)
        for size in (12.0, 11.0) if room >= 44 and not self.turned else (11.0,):
            if text_width(text, size, bold=True) <= room - _APART:
                return size
        return 0.0

    def margin(self, lanes: Sequence[_Lane]) -> float:
        """How far beyond the end of a bar its total reaches."""
        if not self.turned:
            return _LEVEL
        texts = [self.text(grad) for lane in lanes for grad in lane.finite()]
        widths = [text_width(text, 11, bold=True) for text in texts]
        return max(_LEVEL, 12 + max(widths, default=0.0))

    def fits(self, lanes: Sequence[_Lane], room: float) -> bool:
        """Whether all totals have room."""
        grads = (grad for lane in lanes for grad in lane.finite())
        return self.turned or all(self.size(grad, room) for grad in grads)

    def written(self, lanes: Sequence[_Lane], bar: float) -> int:
        """Which parts are written, too: 2 for all, 1 for new ones, 0 for none."""
        new, old = (
            all(lane.writes(self.digits, bar, new=which) for lane in lanes)
            for which in (True, False)
        )
        return new + (new and old)


class _Picture(NamedTuple):
    """What is drawn, on what, where and how."""

    canvas: Canvas
    ledger: Ledger
    columns: EventColumns
    lanes: list[_Lane]
    writing: _Writing
    named: float

    @property
    def bar(self) -> float:
        """How wide a bar is."""
        return _bar_width(self.columns)

    def middle(self, i: int) -> float:
        """The middle of a column."""
        return self.columns.x(i) + self.columns.width / 2


def _bar_width(columns: EventColumns) -> float:
    return min(columns.width * 0.66, 52.0)


def _lanes(
    ledger: Ledger,
    rows: list[int],
    events: list[int],
    width: float,
    *,
    above: bool = False,
) -> PageFigure | None:
    """Draw lanes with their names beside or `above` them; None where an event has no column wide enough."""
    shares, strips = ShareStrip.of(ledger, events), measured(ledger, events)
    left = 14.0 if above else _names_width(ledger, rows, shares, strips)
    # Free at the right, where the dashed line of the shares is named.
    right = 16.0 if width <= PHONE else 24.0
    room, least = (width - left - right) / len(events), _TIGHT if above else _NARROWEST
    if room < least or len(rows) > _MOST_LANES:
        return None
    columns = EventColumns(left, min(room, _WIDEST), events)
    named = _NAMED if above else 0.0
    top = heading_height(ledger, columns)
    lanes = _to_one_scale(ledger, [_lane(ledger, p, events) for p in rows])
    writing, lanes = _placed(lanes, columns, top, named)

    canvas = Canvas(max(columns.end + right, min(width, 400.0)))
    picture = _Picture(canvas, ledger, columns, lanes, writing, named)
    foreign = _draw_events(picture, top)
    for lane in lanes:
        _draw_lane(picture, lane)
    y = lanes[-1].top + lanes[-1].tall
    if shares.bars:
        y += named
        _draw_strip_name(picture, y, ("shares of", "the step"))
        shares.draw(canvas, columns, y)
        y += shares.tall
    for strip in strips:
        y += named
        _draw_strip_name(picture, y, strip.name)
        _draw_bytes(picture, strip, y)
        y += _STRIP
    keys = _keys(picture) + shares.keys()
    for strip in strips:
        keys += strip.keys()
    notes = _notes(picture, foreign) + shares.notes(columns)
    return canvas.finish(draw_legend(canvas, keys, notes, y + 12) + 6)


def _names_width(
    ledger: Ledger, rows: list[int], shares: ShareStrip, strips: list[Bytes]
) -> float:
    """How much room the names of lanes and strips take beside them."""
    names = [line for p in rows for line in _name_lines(ledger.parameters[p].name)]
    widths = [text_width(name, 12.5) + 26 for name in names]
    widths += [text_width(strip.name[1], 11.5) + 22 for strip in strips]
    widths += [text_width("the step", 11.5) + 22] if shares.bars else []
    return max(64.0, *widths)


def _name_lines(name: str) -> list[str]:
    """The lines of a name beside its lane: what tells it from others may be its end or its middle.

    >>> _name_lines("0.weight"), _name_lines("rank 0 · _flat_param (unsharded)")
    (['0.weight'], ['rank 0 · _flat_param', '(unsharded)'])
    >>> _name_lines("layers.11.self_attn.out_proj.weight")
    ['layers.11.self_attn.', 'out_proj.weight']
    """
    lines = [""]
    for piece in re.findall(r"[^. ]*[. ]*", words.shorten(name, _MOST_LETTERS)):
        if lines[-1] and len(f"{lines[-1]}{piece}".rstrip()) > _LETTERS:
            lines.append("")
        lines[-1] += piece
    return [words.shorten(line.strip(), _LETTERS) for line in lines]


def _lane(ledger: Ledger, p: int, events: list[int]) -> _Lane:
    signed, grads = words.is_signed(ledger, p), totals(ledger, p)[events]
    stacks = segments(ledger, p, events)
    drawn = [
        heights(stack, grad, signed)
        for stack, grad in zip(stacks, grads.tolist(), strict=True)
    ]
    there = [present(ledger, e, p) for e in events]
    reach = extent(drawn, grads)
    return _Lane(p, signed, stacks, drawn, grads.tolist(), there, reach)


def _to_one_scale(ledger: Ledger, lanes: list[_Lane]) -> list[_Lane]:
    """Give one parameter on several ranks one scale."""
    reaches: dict[str, list[tuple[float, float]]] = {}
    names = [words.on_any_rank(ledger.parameters[lane.p].name) for lane in lanes]
    for name, lane in zip(names, lanes, strict=True):
        reaches.setdefault(name, []).append(lane.reach)
    shared = {
        name: (min(low for low, _ in same), max(high for _, high in same))
        for name, same in reaches.items()
    }
    return [
        lane._replace(reach=shared[name])
        for name, lane in zip(names, lanes, strict=True)
    ]


def _placed(
    lanes: list[_Lane], columns: EventColumns, top: float, named: float
) -> tuple[_Writing, list[_Lane]]:
    """Place the lanes, and write totals level while all have room, with as many digits as fit, but at least three.

    Three digits rather than four where then the parts can be written, too.
    """
    height = _lane_height(lanes)
    both_sides = any(low < 0 < high for low, high in (lane.reach for lane in lanes))
    found = []
    for turned in (False, True):
        for digits in (4, 3):
            writing = _Writing(digits, turned)
            margin = writing.margin(lanes)
            tall = height + (margin - _LEVEL) * (1 + both_sides)
            placed = [
                lane.placed(top + named + (tall + named) * row, tall, margin)
                for row, lane in enumerate(lanes)
            ]
            if writing.fits(placed, columns.width):
                found.append((writing, placed))
        if found:
            break
    bar = _bar_width(columns)
    return max(found, key=lambda one: one[0].written(one[1], bar))


def _lane_height(lanes: list[_Lane]) -> float:
    """Tall enough to write a number into the smallest new part, if that is not too tall."""
    base = 132.0 if len(lanes) == 1 else 104.0 if len(lanes) <= 3 else 84.0
    most = base * (1.7 if len(lanes) == 1 else 1.4)
    needed = base
    for lane in lanes:
        low, high = lane.reach
        around = 30 + 12 * (low < 0) + 12 * (high > 0)
        for amount in _new_amounts(lane):
            height = 14.5 * (high - low) / abs(amount) + around
            needed = max(needed, height if height <= most else base)
    return needed


def _new_amounts(lane: _Lane) -> Iterator[float]:
    for stack, drawn in zip(lane.stacks, lane.heights, strict=True):
        for part, amount in zip(stack, drawn, strict=True):
            if part.new and amount:
                yield amount


def _draw_events(picture: _Picture, top: float) -> bool:
    """Draw headings and lines of events; return whether some do not concern all parameters."""
    canvas, ledger, columns, lanes, _, named = picture
    some = False
    parameters = [ledger.parameters[lane.p] for lane in lanes]
    begin = rule_top(columns, above=0, top=top - 3 if named else top)
    bottom = lanes[-1].top + lanes[-1].tall
    for i, e in enumerate(columns.events):
        event, x = ledger[e], columns.x(i)
        draw_heading(canvas, event, x, columns.width, above=0, top=top)
        foreign = [_is_foreign(ledger, event, one) for one in parameters]
        some |= any(foreign)
        if event.kind == "backward":
            # No line strikes through a name that stands above its lane.
            if columns.width > 20:
                draw_rule(canvas, event, x, top, top if named else bottom)
        elif named or any(foreign):
            draw_rule(canvas, event, x, begin, top)
            for lane, faint in zip(lanes, foreign, strict=True):
                alpha = 0.25 if faint else 1.0
                draw_rule(canvas, event, x, lane.top, lane.top + lane.tall, alpha=alpha)
        else:
            draw_rule(canvas, event, x, begin, bottom)
    return some


def _is_foreign(ledger: Ledger, event: Event, parameter: Parameter) -> bool:
    """Whether this happened on another rank, or was done by, or to, an optimizer that does not own the parameter."""
    if event.kind == "backward":
        return False
    if event.rank is not None and event.rank != parameter.rank:
        return True
    if event.kind == "step":
        return event.details.get("optimizer_index", 0) not in parameter.optimizers
    names = ledger.meta.get("optimizers", ())
    owners = [names[o] for o in parameter.optimizers if o < len(names)]
    return event.label in names and event.label not in owners


def _draw_lane(picture: _Picture, lane: _Lane) -> None:
    canvas, columns = picture.canvas, picture.columns
    canvas.level(columns.left, columns.end, lane.zero, color=MUTED, width=0.9, z=1)
    if lane is not picture.lanes[0]:
        _draw_divider(picture, lane.top)
    _draw_lane_name(picture, lane)
    finite = lane.finite()
    hangs = all(grad <= 0 for grad in finite) and any(grad < 0 for grad in finite)
    digits, bar = picture.writing.digits, picture.bar
    written = [new for new in (True, False) if lane.writes(digits, bar, new=new)]
    for i in range(len(columns.events)):
        if not lane.present[i]:
            _draw_absent(picture, lane, i, below=hangs)
        elif not lane.is_whole(i):
            _draw_broken(picture, lane, i)
        else:
            for part, y, height in lane.parts(i):
                _draw_part(picture, lane, i, part, y, height, written)
            x, net = picture.middle(i) - bar / 2, lane.net(i)
            canvas.level(x - 4, x + bar + 4, net, width=2.6, z=4)
            _draw_total(picture, lane, i)
        _draw_erased(picture, lane, i)


def _draw_divider(picture: _Picture, top: float) -> None:
    look = {"color": LINE, "width": 0.6, "alpha": 0.8, "z": 0}
    picture.canvas.level(10, picture.columns.end, top - picture.named, **look)


def _draw_lane_name(picture: _Picture, lane: _Lane) -> None:
    canvas, name = picture.canvas, picture.ledger.parameters[lane.p].name
    what = "number" if lane.signed else "norm ‖·‖"
    if picture.named:
        y = lane.top - picture.named / 2
        canvas.text(10, y, words.shorten(name, 31), size=12.5, mono=True)
        canvas.text(canvas.width - 10, y, what, color=MUTED, ha="right")
        return
    x, y = picture.columns.left - 14, lane.top + lane.tall / 2 + 8
    lines = _name_lines(name)
    for n, line in enumerate(lines):
        above = 16 * (len(lines) - n)
        canvas.text(x, y - above, line, size=12.5, mono=True, ha="right")
    canvas.text(x, y, what, color=MUTED, ha="right")


def _draw_strip_name(picture: _Picture, top: float, name: tuple[str, str]) -> None:
    _draw_divider(picture, top)
    canvas = picture.canvas
    if picture.named:
        canvas.text(10, top - picture.named / 2, " ".join(name), size=11.5)
        return
    for n, line in enumerate(name):
        x, y = picture.columns.left - 14, top + 14 + 15 * n
        canvas.text(x, y, line, size=11.5, ha="right")


def _draw_absent(picture: _Picture, lane: _Lane, i: int, *, below: bool) -> None:
    canvas, middle, half = picture.canvas, picture.middle(i), picture.bar / 2
    look = {"color": MUTED, "width": 2.2, "dash": ":", "z": 3}
    canvas.level(middle - half, middle + half, lane.zero, **look)
    text = "None" if picture.columns.width >= _WORDY else "∅"
    y = lane.zero + (12 if below else -12)
    canvas.text(middle, y, text, size=11.5, slant="italic", color=MUTED, ha="center")


def _draw_broken(picture: _Picture, lane: _Lane, i: int) -> None:
    canvas, middle, bar = picture.canvas, picture.middle(i), picture.bar
    bottom = lane.top + lane.tall
    # Below the zero line where that stands so high that it would strike the number through.
    low = lane.zero < lane.top + 26
    top = lane.zero + 4 if low else lane.top + 26
    tall = bottom - (24 if low else 10) - top
    look: dict[str, Any] = {"edge": INK, "hatch": "///", "line": 1.2, "z": 3}
    canvas.box(middle - bar / 2, top, bar, tall, **look)
    y = bottom - 12 if low else lane.top + 14
    told = style.number(lane.grads[i], picture.writing.digits)
    canvas.text(middle, y, told, size=12, weight="bold", ha="center")


def _look(part: LivePart) -> str:
    if part.born < 0:
        return "unseen"
    return "new" if part.new else "used" if part.used else "live"


def _draw_part(
    picture: _Picture,
    lane: _Lane,
    i: int,
    part: LivePart,
    y: float,
    height: float,
    written: list[bool],
) -> None:
    canvas, ledger, bar = picture.canvas, picture.ledger, picture.bar
    middle = picture.middle(i)
    x = middle - bar / 2
    colors = style.label_colors(ledger.labels)
    color = MUTED if part.born < 0 else colors.get(ledger[part.born].label, MUTED)
    _, alpha, hatch = _LOOKS[_look(part)]
    told = style.number(part.amount, picture.writing.digits)
    if height < _THIN:
        # Of one so thin only the sides are outlined: what is hollow stays hollow, what is pale stays pale.
        gap = 1.0 if height > 2 else 0.0
        canvas.box(x, y, bar, max(height - gap, 0.8), fill=color, alpha=alpha)
        for side in (x, x + bar):
            canvas.upright(side, y, y + height, color=color, width=1.2, z=2)
        return
    numbered = hatch and len(lane.stacks[i]) > 1 and height >= 26
    if numbered and text_width(told, 11) <= bar - 3:
        _draw_around(canvas, (x, y + 0.6, bar, height - 1.2), told, color, hatch)
        hatch = None
    look: dict[str, Any] = {
        "fill": color,
        "alpha": alpha,
        "edge": color,
        "line": 1.2,
        "hatch": hatch,
    }
    canvas.box(x, y + 0.6, bar, height - 1.2, **look)
    if part.new in written and lane.is_labelled(i, part, height):
        ink = style.ink_on(color) if part.new else INK
        where = clear_of(y, height, lane.net(i))[0]
        canvas.text(middle, where, told, ha="center", color=ink)


def _draw_around(
    canvas: Canvas,
    box: tuple[float, float, float, float],
    told: str,
    color: str,
    hatch: str | None,
) -> None:
    """Hatch a box around its number, and no wider: a band across the bar looks like another part."""
    x, y, wide, tall = box
    top, side = y + tall / 2 - 8, max((wide - text_width(told, 11) - 4) / 2, 0.0)
    pieces = [(x, y, wide, top - y), (x, top + 16, wide, y + tall - top - 16)]
    if side > 2:
        pieces += [(x, top, side, 16), (x + wide - side, top, side, 16)]
    for piece in pieces:
        canvas.box(*piece, edge=color, line=0.0, hatch=hatch)
    canvas.text(x + wide / 2, top + 8, told, ha="center")


def _draw_total(picture: _Picture, lane: _Lane, i: int) -> None:
    """Write what `.grad` comes to beyond the end of its bar; turned, it begins, or ends, there."""
    grad, end, x = lane.grads[i], lane.end(i), picture.middle(i)
    below, text = grad < 0, picture.writing.text(grad)
    if size := picture.writing.size(grad, picture.columns.width):
        y = end + 12 if below else end - 11
        picture.canvas.text(x, y, text, size=size, weight="bold", ha="center")
    else:
        y, ha = (end + 5, "right") if below else (end - 5, "left")
        picture.canvas.text(x, y, text, weight="bold", ha=ha, turned=True)


def _draw_erased(picture: _Picture, lane: _Lane, i: int) -> None:
    ledger, e = picture.ledger, picture.columns.events[i]
    lost = ledger.unconsumed(e).get(ledger.parameters[lane.p].name)
    if not lost:
        return
    text = "×"
    if picture.columns.width >= _SPACIOUS:
        digits = picture.writing.digits
        text += f" {words.value(ledger, lost[0], lane.p, 'contribution', digits)}"
        if len(lost) > 1 or not 2 < len(text) <= 11:
            text = f"× {counted(len(lost), 'part')}"
    middle = lane.top + lane.tall / 2
    y = middle + (18 if lane.zero < middle else -18)
    picture.canvas.text(picture.middle(i), y, text, ha="center")


def _draw_bytes(picture: _Picture, strip: Bytes, top: float) -> None:
    canvas, columns = picture.canvas, picture.columns
    base, scale = top + _STRIP - 4, (_STRIP - 24) / strip.most
    bar = min(columns.width * 0.62, 52.0)
    for i in np.flatnonzero(np.isfinite(strip.first)).tolist():
        first, second = float(strip.first[i]), float(strip.second[i])
        x, tall = picture.middle(i) - bar / 2, first * scale
        told = [style.size(first)]
        if strip.saved:
            after = scale * (second if np.isfinite(second) else 0)
            canvas.box(x, base - tall, bar / 2, tall, fill=MUTED, alpha=BEFORE)
            box = (x + bar / 2, base - after, bar / 2, after)
            canvas.box(*box, fill=MUTED, alpha=AFTER)
            told = [f"{told[0]} → {style.size(second)}"]
        else:
            canvas.box(x, base - tall, bar, tall, fill=INK, alpha=ALLOCATED)
            if np.isfinite(second):
                canvas.level(x - 3, x + bar + 3, base - second * scale, width=1.6, z=4)
                told.insert(0, f"{style.size(second)}, {told[0]}")
        canvas.level(x, x + bar, base, color=MUTED, width=0.9)
        fitting = [one for one in told if text_width(one, 11) <= columns.width - 4]
        if fitting:
            canvas.text(x + bar / 2, top + 10, fitting[0], ha="center")


def _keys(picture: _Picture) -> list[Key]:
    """The entries of the legend: only what this figure shows."""
    ledger, events = picture.ledger, picture.columns.events
    stacks = itertools.chain.from_iterable(lane.stacks for lane in picture.lanes)
    parts = list(itertools.chain.from_iterable(stacks))
    keys = _part_keys(ledger, parts)
    keys.append(Key(".grad after the event", INK, kind="total"))
    if any(ledger.unconsumed(e) for e in events):
        keys.append(Key("erased before any step used it", INK, kind="cross"))
    if not np.isfinite([part.amount for part in parts]).all():
        keys.append(Key("not finite", INK, 0.0, "///"))
    if not all(all(lane.present) for lane in picture.lanes):
        sign = "" if picture.columns.width >= _WORDY else "∅: "
        keys.append(Key(f"{sign}no .grad (None)", MUTED, kind="dots"))
    return keys + rule_keys(ledger, events)


def _part_keys(ledger: Ledger, parts: list[LivePart]) -> list[Key]:
    """The entries for the colours of losses, where there are several, and for the looks of parts."""
    shown = {ledger[part.born].label for part in parts if part.born >= 0}
    colors = {
        label: color
        for label, color in style.label_colors(ledger.labels).items()
        if label in shown
    }
    keys = []
    if len(colors) > 1:
        keys = [
            Key(words.shorten(label or "backward", 28), color)
            for label, color in colors.items()
        ]
    first, *others = colors.values() or [MUTED]
    looks = {_look(part) for part in parts}
    for look, (text, alpha, hatch) in _LOOKS.items():
        if look in looks and look != "unseen":
            keys.append(Key(text, first, alpha, beside=tuple(others[:1])))
        elif look in looks:
            said = "from other ranks" if ledger.of("sync") else text
            keys.append(Key(said, MUTED, alpha, hatch))
    return keys


def _notes(picture: _Picture, foreign: bool) -> list[str]:
    lanes = picture.lanes
    split = [lane for lane in lanes if any(len(stack) > 1 for stack in lane.stacks)]
    reaches = {lane.reach for lane in lanes if any(lane.reach)}
    said = {
        "The recording is incomplete.": not picture.ledger.complete,
        "The line of an event is faint where it does not concern a parameter.": foreign,
        "Norms do not add up: the parts of a tensor share the height of ‖.grad‖ in proportion to their own.": any(
            not lane.signed for lane in split
        ),
        "Bars grow from zero, the oldest part first.": bool(split),
        "Each lane has a scale of its own.": len(reaches) > 1,
    }
    return [note for note, holds in said.items() if holds]
