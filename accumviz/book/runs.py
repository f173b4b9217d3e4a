"""Compare the runs of an explorer: their figures, the gradients of their steps, and one scale for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accumviz.ledger.events import Event
from accumviz.ledger.ledger import PRESENT, Ledger
from accumviz.show import encoded, literal
from accumviz.views import style, words
from accumviz.views.heat import decades

# Of larger models the norms of the tensors are compared, of longer runs the first steps.
_MOST_ELEMENTS, _MOST_NUMBERS = 256, 1024
# Bars that are more than so many times as long as those of the right runs are torn off.
_TORN = 3.0
_TORN_BAR = "Torn edge: longer than drawn."
# In a legend: what it says, the look of its swatch, its colour.
_KEY = ["longer than drawn", "torn", "var(--av-muted)"]
Range = tuple[float, float]
Page = dict[str, Any]


# --- figures and gradients ----------------------------------------------------------------------


def figures(ledger: Ledger) -> list[tuple[str, str]]:
    """Return name and value of what a reader compares first.

    >>> figures(Ledger.build([], [dict(kind="backward"), dict(kind="step")]))
    [('backwards', '1'), ('steps', '1')]
    """
    steps = _steps(ledger)
    shown = [
        ("backwards", f"{len(ledger.of('backward')):,}"),
        ("steps", f"{len(steps):,}"),
    ]
    saved = _most(event.saved_before for event in ledger)
    saved = max(saved, _most(event.saved_after for event in ledger))
    if saved >= 0:
        shown.append(("saved by one graph, at most", style.size(saved)))
    reached = _most(event.allocated for event in ledger)
    reached = max(reached, _most(event.peak for event in ledger))
    if reached >= 0:
        shown.append(("allocated on the device, at most", style.size(reached)))
    if ledger.parameters and len(ledger):
        last = steps[-1] if steps else ledger[-1]
        name = "gradient of the last step" if steps else "gradient at the end"
        shown.append((name, _gradient(ledger, last)))
    return shown


def _steps(ledger: Ledger) -> list[Event]:
    return [event for event in ledger.of("step") if not event.skipped]


def _most(values: Iterable[Any]) -> float:
    """Return the largest value that is known; -1 where none is."""
    known = [float(value) for value in values if value is not None]
    return max((value for value in known if np.isfinite(value)), default=-1.0)


def _gradient(ledger: Ledger, event: Event) -> str:
    if len(ledger.parameters) == 1:
        return words.value(ledger, event.index, 0)
    used = [p for p in range(len(ledger.parameters)) if _is_used(ledger, event, p)]
    if not used:
        return "None"
    norm = float(np.linalg.norm(ledger.grad[event.index, used]))
    return f"‖·‖ {style.number(norm)}"


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
    sizes = [parameter.numel for parameter in parameters]
    exact = len(ledger.exact) == len(sizes) and sum(sizes) <= _MOST_ELEMENTS
    if not exact:
        sizes = [1] * len(sizes)
    steps = _steps(ledger)
    at = steps or list(ledger)[-1:]
    rows = []
    for event in at[: max(_MOST_NUMBERS // max(sum(sizes), 1), 1)]:
        row: list[float | str | None] = []
        for p, size in enumerate(sizes):
            if not _is_used(ledger, event, p):
                row += [None] * size
                continue
            norm = ledger.grad[event.index, p : p + 1]
            numbers = ledger.exact[p][1][event.index] if exact else norm
            row += [encoded(float(x)) for x in numbers]
        rows.append(row)
    names: list[Any] = []
    for parameter in parameters:
        names += [literal(parameter.name), parameter.numel]
    return {
        "of": names,
        "exact": exact,
        "end": not steps,
        "steps": len(at),
        "rows": rows,
    }


# --- one scale for all runs ---------------------------------------------------------------------


@dataclass(frozen=True)
class CommonScale:
    """The ranges to which every run is drawn, so that a wrong run looks different from the right one.

    `rows` are the ranges of `.grad` by parameter, `shares` that of shares; `layout` is what
    makes timelines equally tall, and saved bytes comparable.
    """

    rows: Mapping[str, Range]
    shares: Range
    layout: Page

    def apply(self, page: Page) -> Page:
        """Return what a player is told of a run, drawn to this scale."""
        scaled = page | self.layout
        scaled["p"] = []
        is_torn = False
        for row in page["p"]:
            scale = self.rows[row["n"]]
            is_torn = is_torn or _is_beyond(row["r"], scale)
            scaled["p"].append(row | {"r": list(scale)})
        if is_torn:
            first, *others = page["bars"]
            scaled["keys"] = [*page["keys"], _KEY]
            scaled["bars"] = [f"{first} {_TORN_BAR}", *others]
        shares = page.get("shares")
        if shares is not None:
            scaled["shares"] = shares | {"r": list(self.shares)}
            if _is_beyond(shares["r"], self.shares):
                scaled["shares"]["keys"] = [*shares["keys"], _KEY]
        return scaled


def common_scale(pages: Sequence[Page], right: Sequence[Page]) -> CommonScale:
    """Return one scale for these runs; `right` are those that others are torn off against."""
    names = dict.fromkeys(row["n"] for page in pages for row in page["p"])
    rows = {}
    for name in names:
        rows[name] = _torn(_bars(pages, name), _bars(right, name))
    shares = _torn(_shares(pages), _shares(right))
    return CommonScale(rows, shares, _layout(pages))


def common_levels(ledgers: Sequence[Ledger]) -> Range | None:
    """Return the logarithms between which the levels of all heat maps lie."""
    added = [ledger.contribution for ledger in ledgers]
    levels = [decades(one) for one in added if one.size]
    return _union(levels) if levels else None


def _bars(pages: Sequence[Page], name: str) -> list[Range]:
    return [row["r"] for page in pages for row in page["p"] if row["n"] == name]


def _shares(pages: Sequence[Page]) -> list[Range]:
    return [page["shares"]["r"] for page in pages if "shares" in page]


def _layout(pages: Sequence[Page]) -> Page:
    """Return what keeps all that is below a timeline in its place: it is as tall as the tallest."""
    layout: Page = {}
    lengths = sorted({len(page["e"]["k"]) for page in pages})
    lanes = {page["lane"] for page in pages if "lane" in page}
    if len(lengths) > 1:
        layout["sizes"] = lengths
    if len(lanes) > 1:
        layout["lane"] = max(lanes)
    saved = _most(x for page in pages for x in page["e"].get("b", []))
    if saved >= 0:
        layout["most"] = saved
    return layout


def _is_beyond(ends: Sequence[float], scale: Range) -> bool:
    return ends[0] < scale[0] or ends[1] > scale[1]


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
    most = _TORN * max((abs(end) for ends in right for end in ends), default=0.0)
    return (max(low, -most), min(high, most)) if most else (low, high)
