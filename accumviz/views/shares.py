"""Prepare shares for drawing: for each step a bar with a segment for each backward, and a sentence."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger.flow import SAME
from accumviz.ledger.ledger import Event, Ledger
from accumviz.ledger.shares import Shares
from accumviz.show import literal, plural
from accumviz.views.style import number

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
    elements: float
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


class Bar(NamedTuple):
    """The shares of one objective in one step; `label` is that of its first backward."""

    step: int
    objective: str
    label: str
    segments: tuple[Segment, ...]

    def total(self, digits: int = 4) -> str:
        """What they add to, "?" where not all are known."""
        if any(part.unknown for part in self.segments):
            return "?"
        return number(sum(part.share for part in self.segments), digits)

    @property
    def ends(self) -> tuple[float, float]:
        """How far it reaches to the left and to the right of 0."""
        ends = [0.0, *(part.start + part.length for part in self.segments)]
        return min(ends), max(ends)

    @property
    def words(self) -> str:
        """What it shows, in sentences."""
        erased = [part for part in self.segments if part.erased]
        again = [part for part in self.segments if part.again]
        sentences = [
            f"Shares of {self.objective} in the step of event {self.step}:",
            *self._known_and_unknown(),
            _happened(erased, "erased before the step."),
            _happened(again, "used by an earlier step, too."),
            _unequal(self.segments),
        ]
        return " ".join(filter(None, sentences))

    def _known_and_unknown(self) -> list[str]:
        known = [part.text for part in self.segments if not part.unknown]
        sentences = []
        if known:
            total = self.total()
            several = len(known) > 1 and total != "?"
            adds = f", which add to {total}" if several else ""
            sentences.append(f"{_sum(known)}{adds}.")
        for why in dict.fromkeys(part.unknown for part in self.segments):
            if why:
                of = _named([part for part in self.segments if part.unknown == why])
                the = "The" if sentences else "the"
                sentences.append(f"{the} share of {of} is unknown: {why}.")
        return sentences


def has_terms(ledger: Ledger) -> bool:
    """Whether the recorder kept what shares are read from: a ledger by hand may not."""
    return any("terms" in details for details in ledger.columns.details)


def bars(
    ledger: Ledger, events: Iterable[int] | None = None, most: int = 0
) -> tuple[list[Bar], str]:
    """A bar for each step among these events (all), and each objective of its backwards; of many the evenly spaced.

    `most` is how many segments there may be, 0 for any number. Also returns a sentence that says
    which steps were left out (empty: none).

    >>> bars(Ledger.build([], []))
    ([], '')
    """
    if not has_terms(ledger):
        return [], ""
    shares = ledger.shares()
    if events is not None:
        shares = shares.take(np.isin(shares.step, list(events)))
    steps = np.unique(shares.step).tolist()
    shown, note = steps, ""
    if most and len(shares) > most:
        shown, room = [], most
        for step in steps[:: math.ceil(len(shares) / most)]:
            if len(shares.of(step)) <= room:
                shown.append(step)
                room -= len(shares.of(step))
        note = f"The shares of {len(shown):,} of {len(steps):,} steps are shown."
    return [bar for step in shown for bar in _of_step(ledger, shares.of(step))], note


def _of_step(ledger: Ledger, rows: Shares) -> list[Bar]:
    backwards = np.unique(rows.backward).tolist()
    micro_batch = {b: n for n, b in enumerate(backwards, 1)}
    every = []
    for objective in dict.fromkeys(rows.objective.tolist()):
        mine = rows.take(rows.objective == objective)
        label = ledger.events[int(mine.backward[0])].label
        name = literal(mine.objectives[objective])
        segments = _segments(mine, micro_batch)
        every.append(Bar(int(mine.step[0]), name, label, segments))
    return every


def _segments(rows: Shares, micro_batch: dict[int, int]) -> tuple[Segment, ...]:
    ends = {True: 0.0, False: 0.0}  # to the right of 0, and to the left
    segments = []
    # What is unknown comes last, so that what is known adds up, and has the room of an equal part, to be seen.
    order = np.lexsort((rows.backward, ~np.isfinite(rows.share))).tolist()
    for k in order:
        row = rows[k]
        known = math.isfinite(row.share)
        length = row.share if known else 1 / len(rows)
        side = length >= 0
        segment = Segment(
            row.backward,
            micro_batch[row.backward],
            ends[side],
            length,
            row.share,
            row.elements,
            row.per_element,
            "" if known else literal(row.unknown) or "it is not finite",
            bool(rows.erased[k]),
            bool(rows.again[k]),
        )
        segments.append(segment)
        ends[side] += length
    return tuple(segments)


def _happened(parts: Sequence[Segment], what: str) -> str:
    if not parts:
        return ""
    several = len({part.nth for part in parts}) > 1
    return f"{_named(parts).capitalize()} {'were' if several else 'was'} {what}"


def _unequal(segments: Sequence[Segment]) -> str:
    """How much more an element of one micro-batch weighs than one of another; nothing where all weigh the same."""
    weighs = {
        abs(part.per_element): part
        for part in reversed(segments)
        if math.isfinite(part.per_element) and part.per_element and not part.unknown
    }
    if not weighs:
        return ""
    most, least = max(weighs), min(weighs)
    if most <= (1 + SAME) * least:
        return ""
    heavy, light = weighs[most], weighs[least]
    sizes = "", ""
    if heavy.elements != light.elements:
        sizes = _elements(heavy), _elements(light)
    one = f"An element of micro-batch {heavy.nth}{sizes[0]}"
    other = f"one of micro-batch {light.nth}{sizes[1]}"
    return f"{one} weighs {number(most / least, 3)} times {other}."


def _elements(part: Segment) -> str:
    if not math.isfinite(part.elements):
        return ""
    return f" ({number(part.elements)} {plural(int(part.elements), 'element')})"


def _sum(shares: Sequence[str]) -> str:
    """Shares as a sum, equal neighbours together where there are many.

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
    """The micro-batches by their numbers.

    >>> _named([Segment(0, n, 0, 0, 0, 1, 0, "", True, False) for n in (1, 2, 3)])
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
    """What a share of 1 is where ranks average, and whose shares a rank's own ledger has; nothing for one process.

    >>> among(Ledger.build([], [{"kind": "sync"}], meta={"rank": 1, "ranks": 4})), among(Ledger.build([], []))
    ('all 4 ranks together, here rank 1', '')
    """
    ranks, rank = ledger.meta.get("ranks", 1), ledger.meta.get("rank")
    if not ledger.of("sync") or not isinstance(ranks, int) or ranks < 2:
        return ""
    here = "" if rank is None else f", here rank {rank}"
    return f"all {ranks} ranks together{here}"


def whose(step: Event, objective: str) -> str:
    """What tells bars of shares apart: the rank, where there are several, and the objective, where there are.

    >>> whose(Event(0, "step", rank=1), ""), whose(Event(0, "step", rank=1), "loss"), whose(Event(0, "step"), "loss")
    ('rank 1', 'rank 1 · loss', 'loss')
    """
    rank = "" if step.rank is None else f"rank {step.rank}"
    return " · ".join(filter(None, [rank, objective]))


def reach(shown: Sequence[Bar]) -> tuple[float, float]:
    """The scale of bars that are compared, with room beyond the dashed 1; with one below 0 for shares that are."""
    low = min((bar.ends[0] for bar in shown), default=0.0)
    high = max((bar.ends[1] for bar in shown), default=1.0)
    return (min(1.05 * low, -1.05) if low < 0 else 0.0), max(1.05 * high, 1.05)


def longest(shown: Sequence[Bar]) -> str:
    """The longest that is said of one step, of all its objectives together."""
    steps = itertools.groupby(shown, lambda bar: bar.step)
    return max((" ".join(bar.words for bar in some) for _, some in steps), key=len)


def apart(names: Sequence[str]) -> dict[str, str]:
    """How objectives are written where there is little room: without a label that all share, and `Backward0`.

    >>> apart(["scale(loss / K) · MseBackward0", "scale(loss / K) · MseBackward0 2"])
    {'scale(loss / K) · MseBackward0': '…Mse', 'scale(loss / K) · MseBackward0 2': '…Mse 2'}
    >>> apart(["g_loss", "d_loss · MeanBackward0", "d_loss · MeanBackward0 2"])
    {'g_loss': 'g_loss', 'd_loss · MeanBackward0': 'd_loss · Mean', 'd_loss · MeanBackward0 2': 'd_loss · Mean 2'}
    >>> apart(["loss", "loss"]), apart(["d_loss", "d_reg"])
    ({'loss': 'loss'}, {'d_loss': 'd_loss', 'd_reg': 'd_reg'})
    """
    different = list(dict.fromkeys(names))
    short = [re.sub(r"Backward\d+", "", name) for name in different]
    label = short[0].rpartition(" · ")[0] + " · "
    if len(short) > 1 and all(name.startswith(label) for name in short):
        short = [f"…{name.removeprefix(label)}" for name in short]
    if len(set(short)) < len(short):
        short = different
    return dict(zip(different, short, strict=True))
