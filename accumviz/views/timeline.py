"""Ledger -> matplotlib: exact bars while every number can be written, a heat map beyond; never torch, never pyplot."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

import numpy as np

from accumviz import arguments
from accumviz.ledger.ledger import Event, Ledger, Parameter, Recorded, recorded
from accumviz.views import heatmap, style, words
from accumviz.views.figure import (
    INK,
    LINE,
    LIVE,
    MUTED,
    PHONE,
    Canvas,
    PageFigure,
    draw_heading,
    draw_rule,
    heading_height,
    text_width,
)
from accumviz.views.lane import LEVEL, THIN, Lane, Slot, Telling, labelled, telling_of
from accumviz.views.legend import Key, draw_legend, legend_height, rule_keys
from accumviz.views.parts import Segment, extent, heights, present, segments, totals
from accumviz.views.strip import (
    Grid,
    beside,
    clear_of,
    gap_of,
    heights_of,
    strip_keys,
    strip_notes,
    strips,
)

_MOST_LANES, _NARROWEST = 8, 27.0
# On a phone, names may stand above their lanes, in so much room, and columns may be as narrow as this.
_NAMED, _TIGHT = 18.0, 21.0
# So many letters of a name stand on a line beside a lane, and so many in all.
_LETTERS, _MOST_LETTERS = 20, 48
# From this width on, a column has room for a word.
_WORDY = 36.0


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
    ledger, width = (
        recorded(ledger, "timeline"),
        arguments.above_zero("width", width, "CSS pixels"),
    )
    columns, chosen = _columns(ledger, parameters), _events(ledger, events)
    if not columns or not chosen:
        canvas = Canvas(min(width, 420), 40)
        what = "no event" if not chosen else "no parameter"
        canvas.text(12, 20, f"Nothing to show: this ledger has {what}.", color=MUTED)
    elif len(columns) <= _MOST_LANES and _has_room(ledger, columns, chosen, width):
        canvas = _lanes(ledger, columns, chosen, width)
        for above in (False, True) if canvas.width > PHONE else ():
            if not canvas.figure.narrow and _has_room(
                ledger, columns, chosen, PHONE, above=above
            ):
                canvas.figure.narrow = _lanes(
                    ledger, columns, chosen, PHONE, above=above
                ).figure
                canvas.figure.narrow.words = words.story(ledger, chosen, columns)
    else:
        canvas = heatmap.draw(ledger, columns, chosen, width)
    canvas.figure.words = words.story(ledger, chosen, columns)
    return canvas.figure


def _columns(
    ledger: Ledger, wanted: str | int | Iterable[str | int] | None
) -> list[int]:
    if wanted is None:
        return list(range(len(ledger.parameters)))
    chosen: list[int] = []
    for one in (
        wanted
        if isinstance(wanted, Iterable) and not isinstance(wanted, str)
        else [wanted]
    ):
        matches = [
            i
            for i, p in enumerate(ledger.parameters)
            if isinstance(one, str) and fnmatch.fnmatch(p.name, one)
        ]
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


def _left(ledger: Ledger, columns: Sequence[int], *, above: bool) -> float:
    if above:
        return 14.0
    names = [line for p in columns for line in _name(ledger.parameters[p].name)]
    return max(64.0, beside(ledger), *(text_width(name, 12.5) + 26 for name in names))


def _name(name: str) -> list[str]:
    """The lines of a name beside its lane: what tells it from others may be its end or its middle.

    >>> _name("0.weight"), _name("rank 0 · _flat_param (unsharded)"), _name("layers.11.self_attn.out_proj.weight")
    (['0.weight'], ['rank 0 · _flat_param', '(unsharded)'], ['layers.11.self_attn.', 'out_proj.weight'])
    """
    lines = [""]
    for piece in re.findall(r"[^. ]*[. ]*", words.shorten(name, _MOST_LETTERS)):
        if lines[-1] and len(f"{lines[-1]}{piece}".rstrip()) > _LETTERS:
            lines.append("")
        lines[-1] += piece
    return [words.shorten(line.strip(), _LETTERS) for line in lines]


def _right(width: float) -> float:
    """What is free at the right, where the dashed line of the shares is named."""
    return 16.0 if width <= PHONE else 24.0


def _has_room(
    ledger: Ledger,
    columns: Sequence[int],
    events: Sequence[int],
    width: float,
    *,
    above: bool = False,
) -> bool:
    """Whether each event has a column wide enough, with the names of the lanes beside them or `above` them."""
    return (width - _left(ledger, columns, above=above) - _right(width)) / len(
        events
    ) >= (_TIGHT if above else _NARROWEST)


def _foreign(ledger: Ledger, event: Event, parameter: Parameter) -> bool:
    """Whether this happened on another rank, or was done by, or to, an optimizer that does not own the parameter."""
    if event.rank is not None and event.rank != parameter.rank:
        return event.kind != "backward"
    if event.kind == "step":
        return event.details.get("optimizer_index", 0) not in parameter.optimizers
    names = ledger.meta.get("optimizers", ())
    return event.label in names and not any(
        names[o] == event.label for o in parameter.optimizers if o < len(names)
    )


def _lanes(
    ledger: Ledger,
    columns: list[int],
    events: list[int],
    width: float,
    *,
    above: bool = False,
) -> Canvas:
    left, named = _left(ledger, columns, above=above), _NAMED if above else 0.0
    column = float(
        np.clip(
            (width - left - _right(width)) / len(events),
            _TIGHT if above else _NARROWEST,
            112,
        )
    )
    lane = _lane_height(ledger, columns, events) + named
    top = heading_height(ledger, events, column)
    shown = strips(ledger, events)
    rooms = [tall + named for tall in heights_of(shown)]
    total = max(left + column * len(events) + _right(width), min(width, 400.0))
    grid = Grid(left, top, column, lane, events, named)
    extents = _extents(ledger, columns, events)
    lanes = [Lane.of(ledger, grid, row, p, extents[p]) for row, p in enumerate(columns)]
    foreign = {
        e: [p for p in columns if _foreign(ledger, ledger[e], ledger.parameters[p])]
        for e in events
    }
    telling = telling_of(lanes)
    if (margin := telling.margin(lanes)) > LEVEL:
        lane += (margin - LEVEL) * (
            1 + any(low < 0 < high for low, high in extents.values())
        )
        grid = grid._replace(lane=lane)
        lanes = [
            Lane.of(ledger, grid, row, p, extents[p], margin)
            for row, p in enumerate(columns)
        ]
    keys, notes = (
        _keys(ledger, columns, events, column),
        [] if ledger.complete else ["The recording is incomplete."],
    )
    if any(foreign.values()):
        notes.append(
            "The line of an event is faint where it does not concern a parameter."
        )
    if any(
        not lane_.signed and any(len(stack) > 1 for stack in lane_.stacks)
        for lane_ in lanes
    ):
        notes.append(
            "Norms do not add up: the parts of a tensor share the height of ‖.grad‖ in proportion to their own."
        )
    if any(len(stack) > 1 for lane_ in lanes for stack in lane_.stacks):
        notes.append("Bars grow from zero, the oldest part first.")
    if len({reach for reach in extents.values() if any(reach)}) > 1:
        notes.append("Each lane has a scale of its own.")
    notes += strip_notes(ledger, grid)
    bottom = top + lane * len(columns) + sum(rooms) + 12
    canvas = Canvas(total, bottom + legend_height(keys, notes, total) + 6)
    for i, e in enumerate(events):
        below = top + lane * len(columns)
        # No line strikes through a name that stands above its lane.
        apart = bool(foreign[e]) or above
        draw_heading(
            canvas,
            ledger[e],
            grid.x(i),
            column,
            top=top,
            bottom=top if above else below,
            faint=apart,
        )
        for row, p in enumerate(
            columns if apart and ledger[e].kind != "backward" else []
        ):
            y, alpha = top + lane * row, 0.25 if p in foreign[e] else 1.0
            draw_rule(
                canvas,
                ledger[e],
                grid.x(i),
                top=y + named,
                bottom=y + lane,
                alpha=alpha,
            )
    for lane_ in lanes:
        _draw_lane(canvas, grid, ledger, lane_, telling)
    for n, draw in enumerate(shown):
        draw(canvas, grid, ledger, top + lane * len(columns) + sum(rooms[:n]) + named)
    draw_legend(canvas, keys, notes, bottom)
    return canvas


def _lane_height(ledger: Ledger, columns: list[int], events: list[int]) -> float:
    """Tall enough to write a number into the smallest contribution, if that is not too tall."""
    base = 132.0 if len(columns) == 1 else 104.0 if len(columns) <= 3 else 84.0
    most, needed = base * (1.7 if len(columns) == 1 else 1.4), base
    for p in columns:
        signed, stacks, grads = (
            words.is_signed(ledger, p),
            segments(ledger, p, events),
            totals(ledger, p)[events],
        )
        drawn = [
            heights(stack, float(grad), signed)
            for stack, grad in zip(stacks, grads, strict=True)
        ]
        low, high = extent(drawn, grads)
        parts = (
            pair
            for stack, heights in zip(stacks, drawn, strict=True)
            for pair in zip(stack, heights, strict=True)
        )
        for amount in (amount for part, amount in parts if part.new and amount):
            height = (
                14.5 * (high - low) / abs(amount)
                + 30
                + 12 * (low < 0)
                + 12 * (high > 0)
            )
            needed = max(needed, height if height <= most else base)
    return needed


def _extents(
    ledger: Ledger, columns: list[int], events: list[int]
) -> dict[int, tuple[float, float]]:
    """How far the bars of each lane reach; one parameter on several ranks is drawn to one scale."""
    found: dict[int, tuple[float, float]] = {}
    same: dict[str, list[int]] = {}
    for p in columns:
        signed, grads = words.is_signed(ledger, p), totals(ledger, p)[events]
        stacks = zip(segments(ledger, p, events), grads, strict=True)
        found[p] = extent(
            [heights(stack, float(grad), signed) for stack, grad in stacks], grads
        )
        same.setdefault(words.on_any_rank(ledger.parameters[p].name), []).append(p)
    for ranks in same.values():
        both = min(found[p][0] for p in ranks), max(found[p][1] for p in ranks)
        found |= dict.fromkeys(ranks, both)
    return found


def _draw_lane(
    canvas: Canvas, grid: Grid, ledger: Ledger, lane: Lane, telling: Telling
) -> None:
    digits = telling.digits
    parameter, (_, _, _, top, tall, zero, _) = ledger.parameters[lane.p], lane.slots[0]
    end = grid.x(len(grid.events))
    canvas.line([grid.left, end], [zero, zero], color=MUTED, width=0.9, z=1)
    if top > grid.top + grid.named:
        canvas.line(
            [10, end], [top - grid.named] * 2, color=LINE, width=0.6, alpha=0.8, z=0
        )
    middle, what = top + tall / 2, "number" if lane.signed else "norm ‖·‖"
    if grid.named:
        canvas.text(
            10,
            top - grid.named / 2,
            words.shorten(parameter.name, 31),
            points=12.5,
            mono=True,
        )
        canvas.text(
            canvas.width - 10,
            top - grid.named / 2,
            what,
            points=11,
            color=MUTED,
            ha="right",
        )
    else:
        lines = _name(parameter.name)
        for n, line in enumerate(lines):
            canvas.text(
                grid.left - 14,
                middle + 8 - 16 * (len(lines) - n),
                line,
                points=12.5,
                mono=True,
                ha="right",
            )
        canvas.text(
            grid.left - 14, middle + 8, what, points=11, color=MUTED, ha="right"
        )
    known = lane.told()
    hangs = all(grad <= 0 for grad in known) and any(grad < 0 for grad in known)
    writes = {new: lane.writes(digits, new=new) for new in (True, False)}
    for i, (e, slot, grad) in enumerate(
        zip(grid.events, lane.slots, lane.grads, strict=True)
    ):
        if not lane.there[i]:
            _absent(canvas, slot, below=hangs)
        elif not lane.whole(i):
            _broken(canvas, slot, grad, digits)
        else:
            _bar(
                canvas,
                ledger,
                slot,
                lane.stacks[i],
                lane.heights[i],
                grad,
                digits,
                writes,
            )
            _total(
                canvas,
                slot,
                telling,
                grad,
                _end(slot, lane.stacks[i], lane.heights[i], grad),
            )
        lost = ledger.unconsumed(e).get(parameter.name)
        if lost:
            said = (
                "×" if grid.column < 80 else f"× {_lost(ledger, lane.p, lost, digits)}"
            )
            canvas.text(
                slot.middle,
                middle + (18 if zero < middle else -18),
                said,
                points=11,
                ha="center",
            )


def _total(canvas: Canvas, at: Slot, telling: Telling, grad: float, end: float) -> None:
    """Write what `.grad` comes to beyond the end of its bar; turned, it begins, or ends, there."""
    told, below = telling.told(grad), grad < 0
    if size := telling.level(told, at.room):
        canvas.text(
            at.middle,
            end + (12 if below else -11),
            told,
            points=size,
            bold=True,
            ha="center",
        )
    else:
        y, ha = (end + 5, "right") if below else (end - 5, "left")
        canvas.text(at.middle, y, told, points=11, bold=True, ha=ha, turned=True)


def _lost(ledger: Ledger, p: int, births: list[int], digits: int) -> str:
    told = (
        words.value(ledger, births[0], p, "contribution", digits)
        if len(births) == 1
        else ""
    )
    return told if 0 < len(told) <= 9 else words.counted(len(births), "part")


def _absent(canvas: Canvas, at: Slot, below: bool) -> None:
    canvas.line(
        [at.x, at.x + at.bar], [at.zero, at.zero], color=MUTED, width=2.2, dash=":", z=3
    )
    text = "None" if at.room >= _WORDY else "∅"
    y = at.zero + (12 if below else -12)
    canvas.text(at.middle, y, text, points=11.5, italic=True, color=MUTED, ha="center")


def _broken(canvas: Canvas, at: Slot, grad: float, digits: int) -> None:
    # Below the zero line where that stands so high that it would strike the number through.
    low = at.zero < at.top + 26
    box = (
        (at.zero + 4, at.top + at.lane - 24 - at.zero - 4)
        if low
        else (at.top + 26, at.lane - 36)
    )
    canvas.box(at.x, box[0], at.bar, box[1], edge=INK, hatch="///", line=1.2, z=3)
    number = at.top + (at.lane - 12 if low else 14)
    canvas.text(
        at.middle, number, style.number(grad, digits), points=12, bold=True, ha="center"
    )


def _bar(
    canvas: Canvas,
    ledger: Ledger,
    at: Slot,
    stack: list[Segment],
    heights: list[float],
    grad: float,
    digits: int,
    writes: dict[bool, bool],
) -> None:
    """Draw the parts, with their amounts where new ones and others are written, and the line of `.grad` upon them."""
    colors, net = style.label_colors(ledger.labels), at.zero - grad * at.scale
    for part, y, height in at.parts(stack, heights):
        color = colors.get(ledger[part.born].label, MUTED) if part.born >= 0 else MUTED
        # What came from elsewhere has one look, used or not: on a grey ground its hatching would be lost.
        alpha, hatch = (
            (0.0, "xx")
            if part.born < 0
            else (1.0 if part.new else 0.0 if part.used else LIVE, None)
        )
        if height >= THIN:
            box = y + 0.6, at.bar, height - 1.2
            free = gap_of(
                part,
                stack,
                *box[::2],
                told=style.number(part.amount, digits),
                wide=at.bar,
            )
            canvas.box(
                at.x,
                *box,
                fill=color,
                alpha=alpha,
                edge=color,
                line=1.2,
                hatch=None if free else hatch,
            )
            if free:
                told = style.number(part.amount, digits)
                # Around the number, and no wider: a band across the bar looks like another part.
                side = max((at.bar - text_width(told, 11) - 4) / 2, 0.0)
                bands = (
                    (at.x, box[0], at.bar, free[0] - box[0]),
                    (at.x, free[1], at.bar, box[0] + box[2] - free[1]),
                )
                sides = (
                    (x, free[0], side, free[1] - free[0])
                    for x in (at.x, at.x + at.bar - side)
                    if side > 2
                )
                for place in (*bands, *sides):
                    canvas.box(*place, edge=color, line=0.0, hatch=hatch)
                canvas.text(at.middle, sum(free) / 2, told, points=11, ha="center")
        else:
            # Of one so thin only the sides are outlined: what is hollow stays hollow, what is pale stays pale.
            gap = 1.0 if height > 2 else 0.0
            canvas.box(at.x, y, at.bar, max(height - gap, 0.8), fill=color, alpha=alpha)
            for x in (at.x, at.x + at.bar):
                canvas.line([x, x], [y, y + height], color=color, width=1.2, z=2)
        if writes[part.new] and height >= THIN and labelled(part, stack):
            ink = style.ink_on(color) if part.new else INK
            written = clear_of(y, height, net)[0]
            canvas.text(
                at.middle,
                written,
                style.number(part.amount, digits),
                points=11,
                ha="center",
                color=ink,
            )
    canvas.line([at.x - 4, at.x + at.bar + 4], [net, net], width=2.6, z=4)


def _end(at: Slot, stack: list[Segment], heights: list[float], grad: float) -> float:
    """The end of a bar, beyond which its total is written."""
    edges = [
        edge for _, y, height in at.parts(stack, heights) for edge in (y, y + height)
    ]
    net = at.zero - grad * at.scale
    return max([at.zero, net, *edges]) if grad < 0 else min([at.zero, net, *edges])


def _keys(
    ledger: Ledger, columns: list[int], events: list[int], column: float
) -> list[Key]:
    """The entries of the legend: only what this figure shows."""
    stacks = [stack for p in columns for stack in segments(ledger, p, events)]
    parts = [part for stack in stacks for part in stack]
    colors = style.label_colors(ledger.labels)
    shown = {ledger[part.born].label for part in parts if part.born >= 0}
    seen = [label for label in ledger.labels if label in shown]
    keys = (
        [Key(words.shorten(label or "backward", 28), colors[label]) for label in seen]
        if len(seen) > 1
        else []
    )
    own, *others = [colors[label] for label in seen] or [MUTED]
    beside = tuple(others[:1])
    keys += (
        [Key("added by this backward", own, beside=beside)]
        if any(s.new for s in parts)
        else []
    )
    live, used = (
        any(not s.new and s.used == spent and s.born >= 0 for s in parts)
        for spent in (False, True)
    )
    keys += [Key("already in .grad", own, LIVE, beside=beside)] if live else []
    keys += [Key("already used by a step", own, 0.0, beside=beside)] if used else []
    unseen = "from other ranks" if ledger.of("sync") else "not from a recorded backward"
    keys += [Key(unseen, MUTED, 0.0, "xx")] if any(s.born < 0 for s in parts) else []
    keys += [Key(".grad after the event", INK, kind="total")]
    if any(ledger.unconsumed(e) for e in events):
        keys += [Key("erased before any step used it", INK, kind="cross")]
    if any(not np.isfinite(part.amount) for part in parts):
        keys += [Key("not finite", INK, 0.0, "///")]
    if any(not present(ledger, e, p) for e in events for p in columns):
        keys += [
            Key(
                "no .grad (None)" if column >= _WORDY else "∅: no .grad (None)",
                MUTED,
                kind="dots",
            )
        ]
    return keys + rule_keys(ledger, events) + strip_keys(ledger, events)
