"""One scale for all runs of an explorer, so that a wrong run looks different from the right one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accumviz.ledger.ledger import Ledger
from accumviz.views.heat import decades

# Bars that are more than so many times as long as those of the right runs are torn off.
_TORN = 3.0
_TORN_BAR = "Torn edge: longer than drawn."
# In a legend: what it says, the look of its swatch, its colour.
_KEY = ["longer than drawn", "torn", "var(--av-muted)"]
Range = tuple[float, float]
Page = dict[str, Any]


@dataclass(frozen=True)
class CommonScale:
    """The ranges to which every run is drawn.

    `rows` are the ranges of `.grad` by parameter, `shares` that of shares; `layout` is what
    makes timelines equally tall, and saved bytes comparable.
    """

    rows: Mapping[str, Range]
    shares: Range | None
    layout: Page

    def apply(self, page: Page) -> Page:
        """Return what a player is told of a run, drawn to this scale."""
        reach = [(_pair(row["r"]), self.rows.get(row["n"])) for row in page["p"]]
        rows = [
            row | {"r": list(scale or own)}
            for row, (own, scale) in zip(page["p"], reach, strict=True)
        ]
        scaled = page | self.layout | {"p": rows}
        if any(_is_torn(own, scale) for own, scale in reach):
            scaled["keys"] = [*page["keys"], _KEY]
            scaled["bars"] = [f"{page['bars'][0]} {_TORN_BAR}", *page["bars"][1:]]
        shares = page.get("shares")
        if shares is not None:
            keys = [
                *shares["keys"],
                *[_KEY] * _is_torn(_pair(shares["r"]), self.shares),
            ]
            scaled["shares"] = shares | {
                "r": list(self.shares or shares["r"]),
                "keys": keys,
            }
        return scaled


def common_scale(pages: Sequence[Page], right: Sequence[Page]) -> CommonScale:
    """Return one scale for these runs; `right` are those that others are torn off against."""
    names = {row["n"]: None for page in pages for row in page["p"]}
    rows = {}
    for name in names:
        rows[name] = _clipped(_ranges(pages, name), _ranges(right, name))
    shares = [_shares(page) for page in pages if "shares" in page]
    right_shares = [_shares(page) for page in right if "shares" in page]
    reach = _clipped(shares, right_shares) if shares else None
    return CommonScale(rows, reach, _layout(pages))


def common_levels(ledgers: Sequence[Ledger]) -> Range | None:
    """Return the logarithms between which the levels of all heat maps lie."""
    found = [
        decades(ledger.contribution) for ledger in ledgers if ledger.contribution.size
    ]
    return _union(found) if found else None


def _layout(pages: Sequence[Page]) -> Page:
    """Nothing below a timeline moves from run to run: it is as tall as the tallest."""
    layout: Page = {}
    lengths = sorted({len(page["e"]["k"]) for page in pages})
    lanes = {page["lane"] for page in pages if "lane" in page}
    saved = [x for page in pages for x in page["e"].get("b", []) if x is not None]
    if len(lengths) > 1:
        layout["sizes"] = lengths
    if len(lanes) > 1:
        layout["lane"] = max(lanes)
    if saved:
        layout["most"] = max(map(float, saved))
    return layout


def _ranges(pages: Iterable[Page], name: str) -> list[Range]:
    return [_pair(row["r"]) for page in pages for row in page["p"] if row["n"] == name]


def _shares(page: Page) -> Range:
    return _pair(page["shares"]["r"])


def _pair(ends: Sequence[Any]) -> Range:
    return float(ends[0]), float(ends[1])


def _is_torn(own: Range, scale: Range | None) -> bool:
    """Return whether some bars of a run are longer than their scale."""
    return scale is not None and (own[0] < scale[0] or own[1] > scale[1])


def _union(ranges: Sequence[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _clipped(every: Sequence[Range], right: Sequence[Range]) -> Range:
    """Return the range of all runs, cut at three times that of the right ones.

    >>> _clipped([(0.0, 1.0), (-2.0, 40.0)], [(0.0, 1.0)])
    (-2.0, 3.0)
    """
    low, high = _union(every)
    most = _TORN * max((abs(end) for one in right for end in one), default=0.0)
    if not most:
        return low, high
    return max(low, -most), min(high, most)
