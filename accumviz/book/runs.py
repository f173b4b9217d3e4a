"""Compare the runs of an explorer: their figures, the gradients of their steps, and one scale for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from accumviz.ledger.events import Event
from accumviz.ledger.ledger import PRESENT, Ledger
from accumviz.show import encoded, literal
from accumviz.views import style, words
from accumviz.views.layout import decades

# Of larger models the norms of the tensors are compared, of longer runs the first steps.
_MOST_ELEMENTS = 256
_MOST_NUMBERS = 1024
# Bars that are more than so many times as long as those of the right runs are torn off.
_TORN = 3.0
# In a legend: what it says, the look of its swatch, its colour.
_KEY = ["longer than drawn", "torn", "var(--av-muted)"]
Range = tuple[float, float]
Page = dict[str, Any]


# --- figures and gradients ----------------------------------------------------------------------


def key_figures(ledger: Ledger) -> list[tuple[str, str]]:
    """Return name and value of what a reader compares first.

    >>> key_figures(Ledger.build([], [dict(kind="backward"), dict(kind="step")]))
    [('backwards', '1'), ('steps', '1')]
    """
    steps = _steps(ledger)
    backwards = ledger.of("backward")
    shown = [("backwards", f"{len(backwards):,}"), ("steps", f"{len(steps):,}")]
    saved = _most(event.saved_before for event in ledger)
    if saved >= 0:
        shown.append(("saved before a backward, at most", style.size(saved)))
    if ledger.parameters and len(ledger):
        name = "gradient of the last step" if steps else "gradient at the end"
        last = steps[-1] if steps else ledger[-1]
        shown.append((name, _gradient(ledger, last)))
    return shown


def _steps(ledger: Ledger) -> list[Event]:
    return [event for event in ledger.of("step") if not event.skipped]


def _most(values: Iterable[float | None]) -> float:
    """Return the largest value that is known; -1 where none is."""
    numbers = [value for value in values if value is not None]
    return max(filter(isfinite, numbers), default=-1.0)


def _gradient(ledger: Ledger, event: Event) -> str:
    if len(ledger.parameters) == 1:
        return words.value(ledger, event.index, 0)
    every = range(len(ledger.parameters))
    used = [p for p in every if _is_used(ledger, event, p)]
    if not used:
        return "None"
    norms = ledger.grad[event.index, used]
    whole = float(np.linalg.norm(norms))
    return f"‖·‖ {style.number(whole)}"


def _is_used(ledger: Ledger, event: Event, p: int) -> bool:
    """Return whether there is a `.grad`, and, in a step, whether its optimizer owns the parameter."""
    if not ledger.state[event.index, p] & PRESENT:
        return False
    owners = ledger.parameters[p].optimizers
    if event.kind != "step" or not owners:
        return True
    return event.details.get("optimizer_index", 0) in owners


def gradients(ledger: Ledger) -> Page:
    """Return each step's `.grad` as one row of numbers (null: none), the norms where elements were not all kept.

    Of a run without a step it is what there is in the end. `of` names what the numbers are, so that
    only like is compared with like. Nothing is rounded: two runs that are said to be equal are.

    >>> from accumviz.ledger.ledger import Parameter
    >>> gradients(Ledger.build([Parameter("w", (1,))], [dict(kind="step", grad={"w": -20})]))
    {'of': ['w', 1], 'exact': True, 'end': False, 'steps': 1, 'rows': [[-20.0]]}
    """
    parameters = ledger.parameters
    names: list[Any] = []
    for parameter in parameters:
        names += [literal(parameter.name), parameter.numel]
    numbers = sum(parameter.numel for parameter in parameters)
    exact = len(ledger.exact) == len(parameters)
    exact = exact and numbers <= _MOST_ELEMENTS
    if not exact:
        numbers = len(parameters)
    steps = _steps(ledger)
    shown = steps or list(ledger)[-1:]
    most = max(_MOST_NUMBERS // max(numbers, 1), 1)
    return {
        "of": names,
        "exact": exact,
        "end": not steps,
        "steps": len(shown),
        "rows": [_row(ledger, event, exact) for event in shown[:most]],
    }


def _row(ledger: Ledger, event: Event, exact: bool) -> list[Any]:
    """Return every `.grad` at an event: its elements, or its norm."""
    row: list[Any] = []
    for p, parameter in enumerate(ledger.parameters):
        if not _is_used(ledger, event, p):
            row += [None] * (parameter.numel if exact else 1)
        elif exact:
            _, elements = ledger.exact[p]
            row += map(encoded, elements[event.index].tolist())
        else:
            norm = float(ledger.grad[event.index, p])
            row.append(encoded(norm))
    return row


# --- one scale for all runs ---------------------------------------------------------------------


@dataclass(frozen=True)
class CommonScale:
    """The ranges to which every run is drawn, so that a wrong run looks different from the right one.

    `rows` are the ranges of `.grad` by parameter, `shares` that of shares; `tall` is how many
    pixels the lanes of a run take; `layout` is what keeps timelines equally tall whatever their
    length, and saved bytes comparable.
    """

    rows: Mapping[str, Range]
    shares: Range
    tall: int
    layout: Page

    def apply(self, page: Page) -> Page:
        """Return what a player is told of a run, drawn to this scale."""
        rows = []
        is_torn = False
        for row in page["p"]:
            scale = self.rows[row["n"]]
            is_torn = is_torn or _is_beyond(row["r"], scale)
            rows.append(row | {"r": list(scale)})
        lane = self.tall // page["count"]
        scaled = page | self.layout | {"p": rows, "lane": lane}
        if is_torn:
            scaled["keys"] = [*page["keys"], _KEY]
        shares = page.get("shares")
        if shares is not None:
            scaled["shares"] = shares | {"r": list(self.shares)}
            if _is_beyond(shares["r"], self.shares):
                scaled["shares"]["keys"] = [*shares["keys"], _KEY]
        return scaled


def common_scale(pages: Sequence[Page], right: Sequence[Page]) -> CommonScale:
    """Return one scale for these runs; `right` are those that others are torn off against."""
    right_bars = _bars(right)
    rows = {}
    for name, ranges in _bars(pages).items():
        rows[name] = _torn(ranges, right_bars[name])
    shares = _torn(_shares(pages), _shares(right))
    tall = max(page["lane"] * page["count"] for page in pages)
    return CommonScale(rows, shares, tall, _layout(pages))


def common_levels(ledgers: Sequence[Ledger]) -> Range | None:
    """Return the logarithms between which the levels of all heat maps lie."""
    levels = []
    for ledger in ledgers:
        if ledger.contribution.size:
            levels.append(decades(ledger.contribution))
    return _union(levels) if levels else None


def _bars(pages: Sequence[Page]) -> defaultdict[str, list[Range]]:
    """Return the ranges of each parameter's bars in all runs."""
    bars = defaultdict(list)
    for page in pages:
        for row in page["p"]:
            bars[row["n"]].append(row["r"])
    return bars


def _shares(pages: Sequence[Page]) -> list[Range]:
    return [page["shares"]["r"] for page in pages if "shares" in page]


def _layout(pages: Sequence[Page]) -> Page:
    """Return what keeps all that is below a timeline in its place: it is as tall as the tallest."""
    layout: Page = {}
    lengths = {len(page["e"]["k"]) for page in pages}
    saved = []
    for page in pages:
        saved += page["e"].get("b", [])
    if len(lengths) > 1:
        layout["sizes"] = sorted(lengths)
    most = _most(saved)
    if most >= 0:
        layout["most"] = most
    return layout


def _is_beyond(ends: Sequence[float], scale: Range) -> bool:
    low, high = scale
    return ends[0] < low or ends[1] > high


def _union(ranges: Sequence[Range]) -> Range:
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def _torn(every: Sequence[Range], right: Sequence[Range]) -> Range:
    """Return the range of all runs, cut at three times that of the right ones.

    >>> _torn([(0.0, 1.0), (-2.0, 40.0)], [(0.0, 1.0)])
    (-2.0, 3.0)
    """
    if not every:
        return 0.0, 0.0
    low, high = _union(every)
    if not right:
        return low, high
    most = _TORN * float(np.abs(right).max())
    if most:
        low = max(low, -most)
        high = min(high, most)
    return low, high
