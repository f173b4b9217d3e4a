"""Colours, number formats and CSS variables, for both themes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from accumviz.ledger.events import Event

# Okabe & Ito, "Color Universal Design" (2008): told apart with every common colour vision.
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")

# How events of each kind are drawn: their colour, and their line, told apart without colour, too: pixels of ink and of
# ground by turns. Without any a line is solid; no line is drawn at a backward.
_KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "backward": ("#0072B2", ()),
    "zero_grad": ("#D55E00", (6, 4)),
    "step": ("#009E73", ()),
    "clip": ("#CC79A7", (2, 3)),
    "unscale": ("#E69F00", (9, 3)),
    "sync": ("#56B4E9", (2, 6)),
    "edit": ("#9A7D0A", (4, 2, 2, 2, 2, 2)),
    "schedule": ("#7B5EA7", (7, 2, 2, 2)),
    "loader": ("#7A7A7A", (1, 9)),
}

# What has no colour of its own.
MUTED = "#5f6b77"
# White has more contrast with these, black with the other colours of losses.
_DARK = (CYCLE[0], MUTED)

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace"


def kind(name: str) -> tuple[str, tuple[int, ...]]:
    """How events of this kind are drawn: the colour, and how long the dashes of their line and its gaps are.

    >>> kind("step"), kind("what nobody knows")
    (('#009E73', ()), ('#7f7f7f', (2, 3)))
    """
    return _KINDS.get(name, ("#7f7f7f", (2, 3)))


def lines(events: Iterable[Event]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return how the line of each kind of event among these is drawn; a backward has none."""
    kinds = dict.fromkeys(event.kind for event in events)
    kinds.pop("backward", None)
    return {name: kind(name) for name in kinds}


def stripes(dashes: tuple[int, ...]) -> str:
    """What a swatch that is as such a line has beside its colour: the stops of its ground.

    >>> stripes((6, 4)), stripes(())
    ('; --av-d: var(--av-c) 0 6px, transparent 0 10px', '')
    """
    ends = itertools.accumulate(dashes)
    stops = [
        f"{ink} 0 {end}px"
        for ink, end in zip(itertools.cycle(["var(--av-c)", "transparent"]), ends)
    ]
    return f"; --av-d: {', '.join(stops)}" if stops else ""


@cache
def static(name: str, beside: str = __file__) -> str:
    """Return a style sheet or a script that pages carry, from the folder beside a module."""
    return (Path(beside).parent / "static" / name).read_text("utf-8")


# What every view begins with: the names of colours, in both themes and in every host.
CSS = static("base.css")


def label_colors(labels: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Give each loss label its colour, in order of first appearance.

    >>> label_colors(["loss", "g_loss"])
    {'loss': '#0072B2', 'g_loss': '#E69F00'}
    """
    unique = dict.fromkeys(labels)
    return {label: CYCLE[i % len(CYCLE)] for i, label in enumerate(unique)}


def ink_on(color: str) -> str:
    """Black or white, whichever has the higher contrast with a colour of a loss (WCAG 2).

    >>> ink_on("#0072B2"), ink_on("#E69F00"), ink_on("#009E73")
    ('#fff', '#000', '#000')
    """
    return "#fff" if color in _DARK else "#000"


def number(value: float, digits: int = 4) -> str:
    """Write a number as a person would: a true minus sign, few digits, no needless zeros.

    >>> number(-16.0), number(0.123456), number(1234567.0), number(float("nan"))
    ('−16', '0.1235', '1.235e6', 'NaN')
    >>> number(-0.0), number(99999.4), number(1e5), number(1e-3), number(-math.inf)
    ('0', '99999', '1e5', '0.001', '−∞')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{digits}g}"
        if "e" in text:
            text = f"{value:.0f}"
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return text.replace("-", "−")


def size(count: float) -> str:
    """Write a number of bytes with binary units.

    >>> size(0), size(1023), size(1024), size(1536), size(1e6), size(1020 * 1024), size(5 * 2**30)
    ('0 B', '1023 B', '1 KiB', '1.5 KiB', '977 KiB', '1020 KiB', '5 GiB')
    """
    if math.isnan(count):
        return "not measured"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return (
        f"{count:.3g} {unit}"
        if unit != "B" and abs(count) < 999.5
        else f"{count:.0f} {unit}"
    )
