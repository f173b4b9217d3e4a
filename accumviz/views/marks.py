"""What every timeline shares: the headings and rules of events, and a legend that says only what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from accumviz.ledger import Event, Ledger
from accumviz.views import style, words
from accumviz.views.sheet import INK, LINE, MUTED, Sheet, text_width

# Told apart without colour too.
DASH = {"step": "-", "zero_grad": "--", "clip": ":", "unscale": ":", "sync": ":", "edit": "-."}
_LEFT, _LINE, _POINTS = 12.0, 19.0, 11.5
# From this width on, a heading stands upright in three lines; in narrower columns it is turned.
_UPRIGHT = 66.0


class Key(NamedTuple):
    """One entry: what it says, its colour, and how its swatch is drawn."""

    text: str
    color: str
    alpha: float = 1.0
    hatch: str | None = None
    kind: str = "box"


def _flow(keys: list[Key], width: float) -> Iterator[tuple[Key, float, int]]:
    x, line = _LEFT, 0
    for key in keys:
        needed = 20 + text_width(key.text, _POINTS) * 0.95
        if x > _LEFT and x + needed > width - 6:
            x, line = _LEFT, line + 1
        yield key, x, line
        x += needed + 14


def _wrapped(notes: list[str], width: float) -> list[str]:
    room, lines = max(int((width - 2 * _LEFT) / (text_width("x", _POINTS) * 0.9)), 20), []
    for note in notes:
        line = ""
        for word in note.split():
            if line and len(line) + 1 + len(word) > room:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}".strip()
        lines.append(line)
    return lines


def legend_height(keys: list[Key], notes: list[str], width: float) -> float:
    """How many pixels the legend takes at this width."""
    return _LINE * (max((line for _, _, line in _flow(keys, width)), default=-1) + 1 + len(_wrapped(notes, width))) + 4


def draw_legend(sheet: Sheet, keys: list[Key], notes: list[str], top: float) -> None:
    """Draw the entries, then the notes, below `top`."""
    used = -1
    for key, x, line in _flow(keys, sheet.width):
        used = max(used, line)
        y = top + _LINE * (line + 0.5)
        if key.kind == "box":
            sheet.box(x, y - 5.5, 13, 11, fill=key.color, alpha=key.alpha, edge=key.color, hatch=key.hatch, line=1.2)
        elif key.kind == "cross":
            sheet.text(x + 6, y, "×", points=13, ha="center", color=key.color)
        elif key.kind == "dots":
            sheet.line([x, x + 13], [y, y], color=key.color, width=2.2, dash=":")
        elif key.kind == "total":
            sheet.line([x, x + 13], [y, y], color=key.color, width=2.4)
        else:
            sheet.line([x + 6.5, x + 6.5], [y - 7, y + 7], color=key.color, width=2, dash=key.kind)
        sheet.text(x + 18, y, key.text, points=_POINTS, color=INK)
    for k, note in enumerate(_wrapped(notes, sheet.width)):
        sheet.text(_LEFT, top + _LINE * (used + 1.5 + k), note, points=_POINTS, color=MUTED)


def heading_height(ledger: Ledger, events: list[int], column: float) -> float:
    """How many pixels the headings of these events take above columns of this width."""
    if column >= _UPRIGHT:
        return 50.0
    return 14 + max(text_width(_title(ledger[e]), _POINTS, bold=ledger[e].kind != "backward") for e in events)


def draw_heading(
    sheet: Sheet,
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
        draw_rule(sheet, event, x, top=above + 4, bottom=top if faint else bottom)
    if event.kind == "backward" and column > 20:
        sheet.line([x, x], [top, bottom], color=LINE, width=0.6, alpha=0.7, z=0)
    if column < _UPRIGHT:
        bold = event.kind != "backward"
        sheet.text(x + column / 2 + 1, top - 8, _title(event), points=_POINTS, turned=True, bold=bold)
        return
    roomy, room = column >= 80, int((column - 10) / text_width("x", 11))
    sheet.text(x + 7, above + 11, event.kind, points=12 if roomy else 11, bold=roomy)
    about = "skipped" if event.skipped else words.shorten(words.subject(event), room)
    if about:
        sheet.text(x + 7, above + 26, about, points=11, mono=not event.skipped)
    if words.place(event):
        place = words.shorten(words.place(event), room)
        sheet.text(x + 7, above + (40 if about else 26), place, points=11, color=MUTED)


def draw_rule(sheet: Sheet, event: Event, x: float, *, top: float, bottom: float, alpha: float = 1.0) -> None:
    """Draw an event's line across rows; fainter across those it does not concern."""
    sheet.line([x, x], [top, bottom], color=style.KIND[event.kind], width=1.8, dash=DASH[event.kind], alpha=alpha, z=1)


def _title(event: Event) -> str:
    rank = "" if event.rank is None else f"rank {event.rank} "
    return rank + words.shorten(f"{words.action(event)} {words.subject(event)}".strip(), 20)
