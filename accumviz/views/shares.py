"""Prepare shares for drawing: for each step a bar with a segment for each backward, and a sentence."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from accumviz.ledger.ledger import Event, Ledger
from accumviz.ledger.shares import Shares
from accumviz.show import literal
from accumviz.views.style import number

# So many shares, elements or reasons are written one by one.
_MOST_TOLD = 6
# What lies closer is rounding.
_SAME = 1e-3


class Segment(NamedTuple):
    """What one backward weighs in one step: `share` long, from `start` on; an unknown one has room to be seen.

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
    def told(self) -> str:
        """Its share, "?" where that is unknown."""
        return "?" if self.unknown else number(self.share, 3)

    @property
    def look(self) -> str:
        """The name of its look: `new`, `used` by an earlier step, or `unseen` where it is not known."""
        return "unseen" if self.unknown else "used" if self.again else "new"


class Bar(NamedTuple):
    """The shares of one objective in one step; `words` says them, and `total` what they add to ("?": not all known)."""

    step: int
    objective: str
    label: str
    segments: tuple[Segment, ...]
    total: str
    words: str

    @property
    def totals(self) -> list[str]:
        """What they add to, with as many digits as there may be room for."""
        if self.total == "?":
            return ["?"]
        return [
            self.total,
            *(
                number(sum(part.share for part in self.segments), digits)
                for digits in (3, 2, 1)
            ),
        ]

    @property
    def ends(self) -> tuple[float, float]:
        """How far it reaches to the left and to the right of 0."""
        ends = [0.0, *(part.start + part.length for part in self.segments)]
        return min(ends), max(ends)


def has_terms(ledger: Ledger) -> bool:
    """Whether the recorder kept what shares are read from: an earlier version, or a ledger by hand, may not."""
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
    keys = shares.optimizer.astype(np.int64) * len(ledger) + shares.backward
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    again = (shares.step[first][which.reshape(-1)] < shares.step) & ~shares.erased
    wanted = (
        np.isin(shares.step, list(events))
        if events is not None
        else np.ones(len(shares), bool)
    )
    shares, again = shares.take(wanted), again[wanted]
    windows = _runs(shares.step)
    shown, note = windows, ""
    if most and len(shares) > most:
        shown, room = [], most
        for start, stop in windows[:: math.ceil(len(shares) / most)]:
            if stop - start <= room:
                shown.append((start, stop))
                room -= stop - start
        note = f"The shares of {len(shown):,} of {len(windows):,} steps are shown."
    return [
        bar
        for a, b in shown
        for bar in _of_step(ledger, shares.take(slice(a, b)), again[a:b])
    ], note


def _runs(column: np.ndarray) -> list[tuple[int, int]]:
    """Where equal neighbours begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(column)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _of_step(ledger: Ledger, window: Shares, used: np.ndarray) -> list[Bar]:
    micro = {b: n + 1 for n, b in enumerate(np.unique(window.backward).tolist())}
    found = []
    for objective in dict.fromkeys(window.objective.tolist()):
        mine = window.objective == objective
        rows = window.take(mine)
        ends = [0.0, 0.0]
        segments = []
        told = zip(rows, rows.erased.tolist(), used[mine].tolist(), strict=True)
        # What is unknown comes last, so that what is known adds up, and has the room of an equal part, to be seen.
        for row, erased, again in sorted(
            told, key=lambda one: (not math.isfinite(one[0].share), one[0].backward)
        ):
            known = math.isfinite(row.share)
            length = row.share if known else 1 / len(rows)
            side = int(length < 0)
            why = "" if known else literal(row.unknown) or "it is not finite"
            segments.append(
                Segment(
                    row.backward,
                    micro[row.backward],
                    ends[side],
                    length,
                    row.share,
                    row.elements,
                    row.per_element,
                    why,
                    erased,
                    again,
                )
            )
            ends[side] += length
        name = literal(rows[0].objective)
        label = ledger.events[rows[0].backward].label
        total = (
            "?"
            if any(part.unknown for part in segments)
            else number(sum(part.share for part in segments), 4)
        )
        step = rows[0].step
        found.append(
            Bar(
                step,
                name,
                label,
                tuple(segments),
                total,
                _sentence(step, name, segments, total),
            )
        )
    return found


def _sentence(step: int, name: str, segments: Sequence[Segment], total: str) -> str:
    known = [part for part in segments if not part.unknown]
    told = f"Shares of {literal(name)} in the step of event {step}: "
    if known:
        told += _sum([part.told for part in known])
        told += f", which add to {total}." if len(known) > 1 and total != "?" else "."
    reasons = dict.fromkeys(part.unknown for part in segments if part.unknown)
    for why in reasons:
        of = _named([part for part in segments if part.unknown == why])
        told += f"{' T' if known else 't'}he share of {of} is unknown: {why}."
    erased = [part for part in segments if part.erased]
    told += _said_of(erased, "erased before the step.")
    again = [part for part in segments if part.again]
    told += _said_of(again, "used by an earlier step, too.")
    return told + unequal(segments)


def _said_of(parts: Sequence[Segment], what: str) -> str:
    if not parts:
        return ""
    several = len({part.nth for part in parts}) > 1
    return f" {_named(parts).capitalize()} {'were' if several else 'was'} {what}"


def unequal(segments: Sequence[Segment]) -> str:
    """How much more an element of one micro-batch weighs than one of another; nothing where all weigh the same."""
    known = [
        p
        for p in segments
        if not p.unknown
        and not p.erased
        and math.isfinite(p.per_element)
        and p.per_element
    ]
    if not known:
        return ""
    low = min(known, key=lambda part: abs(part.per_element))
    high = max(known, key=lambda part: abs(part.per_element))
    ratio = abs(high.per_element / low.per_element)
    if ratio <= 1 + _SAME:
        return ""
    one, other = (
        ("", "") if high.elements == low.elements else (_elements(high), _elements(low))
    )
    told = f"An element of micro-batch {high.nth}{one} weighs {number(ratio, 3)} times"
    return f" {told} one of micro-batch {low.nth}{other}."


def _elements(part: Segment) -> str:
    if not math.isfinite(part.elements):
        return ""
    return f" ({number(part.elements)} element{'' if part.elements == 1 else 's'})"


def _sum(told: Sequence[str]) -> str:
    """Shares as a sum, equal neighbours together where there are many.

    >>> _sum(["0.25", "−0.25"]), _sum(["0.1"] * 10)
    ('0.25 − 0.25', '10 × 0.1')
    """
    if len(told) <= _MOST_TOLD:
        return " + ".join(told).replace("+ −", "− ")
    runs = [(text, len(list(same))) for text, same in itertools.groupby(told)]
    parts = [f"{count} × {text}" if count > 1 else text for text, count in runs]
    if len(parts) > _MOST_TOLD:
        parts = [*parts[: _MOST_TOLD - 1], "…", parts[-1]]
    return " + ".join(parts).replace("+ −", "− ")


def _named(parts: Sequence[Segment]) -> str:
    """The micro-batches by their numbers.

    >>> _named([Segment(0, n, 0, 0, 0, 1, 0, "", True, False) for n in (1, 2, 3)])
    'micro-batches 1, 2 and 3'
    """
    numbers = [str(n) for n in dict.fromkeys(part.nth for part in parts)]
    if len(numbers) == 1:
        return f"micro-batch {numbers[0]}"
    if len(numbers) > _MOST_TOLD:
        numbers = [*numbers[:_MOST_TOLD], f"{len(numbers) - _MOST_TOLD:,} more"]
    return f"micro-batches {', '.join(numbers[:-1])} and {numbers[-1]}"


def among(ledger: Ledger) -> str:
    """What a share of 1 is where ranks average, and whose shares a rank's own ledger has; nothing for one process.

    >>> among(Ledger.build([], [{"kind": "sync"}], meta={"rank": 1, "ranks": 4})), among(Ledger.build([], []))
    ('all 4 ranks together, here rank 1', '')
    """
    ranks, rank = ledger.meta.get("ranks", 1), ledger.meta.get("rank")
    if not ledger.of("sync") or not isinstance(ranks, int) or ranks < 2:
        return ""
    return f"all {ranks} ranks together{'' if rank is None else f', here rank {rank}'}"


def whose(step: Event, objective: str) -> str:
    """What tells bars of shares apart: the rank, where there are several, and the objective, where there are.

    >>> whose(Event(0, "step", rank=1), ""), whose(Event(0, "step", rank=1), "loss"), whose(Event(0, "step"), "loss")
    ('rank 1', 'rank 1 · loss', 'loss')
    """
    return " · ".join(
        filter(None, ["" if step.rank is None else f"rank {step.rank}", objective])
    )


def reach(shown: Sequence[Bar]) -> tuple[float, float]:
    """The scale of bars that are compared, with room beyond the dashed 1; with one below 0 for shares that are."""
    low = min((bar.ends[0] for bar in shown), default=0.0)
    high = max((bar.ends[1] for bar in shown), default=1.0)
    return (min(1.05 * low, -1.05) if low < 0 else 0.0), max(1.05 * high, 1.05)


def longest(shown: Sequence[Bar]) -> str:
    """The longest that is said of one step, of all its objectives together."""
    return max(
        (
            " ".join(bar.words for bar in some)
            for _, some in itertools.groupby(shown, lambda bar: bar.step)
        ),
        key=len,
    )


def apart(names: Sequence[str]) -> dict[str, str]:
    """How objectives are written where there is little room: without what all of them begin with, or say of a node.

    >>> apart(["scale(loss / K) · MseBackward0", "scale(loss / K) · MseBackward0 2"])
    {'scale(loss / K) · MseBackward0': '…Mse', 'scale(loss / K) · MseBackward0 2': '…Mse 2'}
    >>> apart(["g_loss", "d_loss · MeanBackward0", "d_loss · MeanBackward0 2"])
    {'g_loss': 'g_loss', 'd_loss · MeanBackward0': 'd_loss · Mean', 'd_loss · MeanBackward0 2': 'd_loss · Mean 2'}
    >>> apart(["loss", "loss"]), apart(["d_loss", "d_reg"])
    ({'loss': 'loss'}, {'d_loss': 'd_loss', 'd_reg': 'd_reg'})
    """
    different = dict.fromkeys(names)
    shared = ""
    for piece in re.findall(r"\w*\W+", names[0]) if len(different) > 1 else []:
        if not all(
            name.startswith(shared + piece) and name != shared + piece
            for name in different
        ):
            break
        shared += piece
    short = [
        re.sub(r"Backward\d+", "", f"{'…' * bool(shared)}{name[len(shared) :]}")
        for name in different
    ]
    return dict(
        zip(
            different,
            short if len(set(short)) == len(short) else different,
            strict=True,
        )
    )
