"""Prepare shares for drawing: for each step a bar with a segment for each backward, and a sentence."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from accumviz.ledger.flow import SAME
from accumviz.ledger.ledger import Ledger
from accumviz.ledger.shares import Shares
from accumviz.show import literal
from accumviz.views.style import MUTED, label_colors, number

# So many shares or micro-batches are written one by one.
_MOST_LISTED = 6


class Segment(NamedTuple):
    """What one backward weighs in one step: `length` long, from `start` on; an unknown one has room to be seen.

    `nth` counts the micro-batches of the window from 1; `again` says that an earlier step used it, too.
    """

    backward: int
    nth: int
    start: float
    length: float
    share: float
    per_element: float
    unknown: str
    erased: bool
    again: bool

    @property
    def text(self) -> str:
        """Its share, "?" where that is unknown."""
        return "?" if self.unknown else number(self.share, 3)

    @property
    def look(self) -> str:
        """The name of its look: `new`, `used` by an earlier step, or `unseen` where it is not known."""
        if self.unknown:
            return "unseen"
        return "used" if self.again else "new"


class ShareBar(NamedTuple):
    """The shares of one objective in one step; `label` is that of its first backward, which has the `color`."""

    step: int
    objective: str
    label: str
    color: str
    segments: tuple[Segment, ...]

    @property
    def total(self) -> str:
        """What they add to, "?" where not all are known."""
        if any(part.unknown for part in self.segments):
            return "?"
        return number(sum(part.share for part in self.segments))

    @property
    def ends(self) -> tuple[float, float]:
        """How far it reaches to the left and to the right of 0."""
        ends = [0.0, *(part.start + part.length for part in self.segments)]
        return min(ends), max(ends)

    @property
    def words(self) -> str:
        """What it shows, in sentences."""
        first, *others = [*self._known(), *self._unknown()]
        start = f"Shares of {self.objective} in the step of event {self.step}: "
        said = start + ". ".join([first, *map(_capital, others)]) + "."
        erased = [part for part in self.segments if part.erased]
        again = [part for part in self.segments if part.again]
        sentences = [
            said,
            _happened(erased, "erased before the step."),
            _happened(again, "used by an earlier step, too."),
            _unequal(self.segments),
        ]
        return " ".join(filter(None, sentences))

    def _known(self) -> list[str]:
        texts = [part.text for part in self.segments if not part.unknown]
        if 1 < len(texts) == len(self.segments):
            return [f"{_sum(texts)}, which add to {self.total}"]
        return [_sum(texts)] if texts else []

    def _unknown(self) -> list[str]:
        parts_by_reason: dict[str, list[Segment]] = {}
        for part in self.segments:
            if part.unknown:
                parts_by_reason.setdefault(part.unknown, []).append(part)
        clauses = []
        for why, parts in parts_by_reason.items():
            clauses.append(f"the share of {_named(parts)} is unknown: {why}")
        return clauses


def bars(
    ledger: Ledger, events: Iterable[int], most: int = sys.maxsize
) -> tuple[list[ShareBar], str]:
    """Return a bar for each step among these events, and each objective of its backwards.

    Of more than `most` segments whole steps are left out, and a sentence says so.

    >>> bars(Ledger.build([], []), [])
    ([], '')
    """
    # A ledger by hand may not have what shares are read from.
    if not any("terms" in details for details in ledger.events.details):
        return [], ""
    shares = ledger.shares()
    shares = shares.take(np.isin(shares.step, list(events)))
    steps = np.unique(shares.step).tolist()
    every = max(math.ceil(len(shares) / most), 1)
    shown = steps[::every]
    note = ""
    if len(shown) < len(steps):
        note = f"The shares of {len(shown):,} of {len(steps):,} steps are shown."
    found = []
    for step in shown:
        found += _of_step(ledger, shares.of(step))
    return found, note


def _of_step(ledger: Ledger, rows: Shares) -> list[ShareBar]:
    backwards = np.unique(rows.backward).tolist()
    micro_batch = {b: n for n, b in enumerate(backwards, 1)}
    colors = label_colors(ledger.labels)
    every = []
    for objective in dict.fromkeys(rows.objective.tolist()):
        mine = rows.take(rows.objective == objective)
        label = ledger.events[int(mine.backward[0])].label
        name = literal(mine.objectives[objective])
        segments = _segments(mine, micro_batch)
        color = colors.get(label, MUTED)
        every.append(ShareBar(int(mine.step[0]), name, label, color, segments))
    return every


def _segments(rows: Shares, micro_batch: dict[int, int]) -> tuple[Segment, ...]:
    ends = {True: 0.0, False: 0.0}  # to the right of 0, and to the left
    segments = []
    # What is unknown comes last, so that what is known adds up, and has the room of an equal part, to be seen.
    order = np.lexsort((rows.backward, ~np.isfinite(rows.share))).tolist()
    for k in order:
        row = rows[k]
        unknown = ""
        length = row.share
        if not math.isfinite(row.share):
            unknown = literal(row.unknown) or "it is not finite"
            length = 1 / len(rows)
        side = length >= 0
        segment = Segment(
            row.backward,
            micro_batch[row.backward],
            ends[side],
            length,
            row.share,
            row.per_element,
            unknown,
            bool(rows.erased[k]),
            bool(rows.again[k]),
        )
        segments.append(segment)
        ends[side] += length
    return tuple(segments)


def _capital(clause: str) -> str:
    return clause[:1].upper() + clause[1:]


def _happened(parts: Sequence[Segment], what: str) -> str:
    if not parts:
        return ""
    several = len({part.nth for part in parts}) > 1
    return f"{_named(parts).capitalize()} {'were' if several else 'was'} {what}"


def _unequal(segments: Sequence[Segment]) -> str:
    """Say how much more an element of one micro-batch weighs than one of another; nothing where all weigh the same."""
    weighed = []
    for part in segments:
        if part.per_element and math.isfinite(part.per_element):
            weighed.append((abs(part.per_element), part.nth))
    if not weighed:
        return ""
    most, heavy = max(weighed, key=itemgetter(0))
    least, light = min(weighed, key=itemgetter(0))
    if most <= (1 + SAME) * least:
        return ""
    times = number(most / least, 3)
    return f"An element of micro-batch {heavy} weighs {times} times one of micro-batch {light}."


def _sum(shares: Sequence[str]) -> str:
    """Write shares as a sum, equal neighbours together where there are many.

    >>> _sum(["0.25", "−0.25"]), _sum(["0.1"] * 10)
    ('0.25 − 0.25', '10 × 0.1')
    """
    parts = list(shares)
    if len(parts) > _MOST_LISTED:
        runs = [(text, len(list(same))) for text, same in itertools.groupby(shares)]
        parts = [f"{count} × {text}" if count > 1 else text for text, count in runs]
    if len(parts) > _MOST_LISTED:
        parts = [*parts[: _MOST_LISTED - 1], "…", parts[-1]]
    return " + ".join(parts).replace("+ −", "− ")


def _named(parts: Sequence[Segment]) -> str:
    """Name the micro-batches by their numbers.

    >>> _named([Segment(0, n, 0, 0, 0, 0, "", True, False) for n in (1, 2, 3)])
    'micro-batches 1, 2 and 3'
    """
    numbers = [str(n) for n in dict.fromkeys(part.nth for part in parts)]
    if len(numbers) == 1:
        return f"micro-batch {numbers[0]}"
    if len(numbers) > _MOST_LISTED:
        more = len(numbers) - _MOST_LISTED
        numbers = [*numbers[:_MOST_LISTED], f"{more:,} more"]
    return f"micro-batches {', '.join(numbers[:-1])} and {numbers[-1]}"


def among(ledger: Ledger) -> str:
    """Say what a share of 1 is where ranks average, and whose shares a rank's own ledger has; nothing for one process.

    >>> among(Ledger.build([], [{"kind": "sync"}], meta={"rank": 1, "ranks": 4})), among(Ledger.build([], []))
    ('all 4 ranks together, here rank 1', '')
    """
    ranks = ledger.meta.get("ranks", 1)
    rank = ledger.meta.get("rank")
    if not ledger.of("sync") or not isinstance(ranks, int) or ranks < 2:
        return ""
    here = "" if rank is None else f", here rank {rank}"
    return f"all {ranks} ranks together{here}"


def reach(shown: Sequence[ShareBar]) -> tuple[float, float]:
    """Return the scale of bars that are compared, with room beyond the dashed 1, and to the left where one goes there.

    >>> reach([])
    (0.0, 1.05)
    """
    low = min((bar.ends[0] for bar in shown), default=0.0)
    high = max((bar.ends[1] for bar in shown), default=1.0)
    left = min(1.05 * low, -1.05) if low < 0 else 0.0
    right = max(1.05 * high, 1.05)
    return left, right
