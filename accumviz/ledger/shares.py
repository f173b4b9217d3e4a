"""What each micro-batch weighs in each step: read from the terms of its loss and from what became of it in `.grad`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from accumviz.ledger.events import CONTRIBUTED, Arrays
from accumviz.ledger.gains import (
    HAND,
    HOOKED,
    SAME,
    SAME_IN_HALF,
    UNREAD,
    UNSEEN,
    Gains,
    number,
    of_events,
)
from accumviz.ledger.lifecycle import (
    Fates,
    brought,
    shards_of,
    steps_before,
    steps_of,
    zeroed_by_steps,
)
from accumviz.ledger.objectives import MEAN, NO_TERMS, SUM, Terms
from accumviz.show import counted

# Where nothing is ever erased each step reads all backwards before it: so many rows are listed, then the first ones.
_MOST, _FIRST = 4_000_000, 16

_REASONS = (
    "",
    *UNREAD,
    "a closure in the step brought it, and it was erased there: what of it the step used is not known",
    "it weighs differently in different parameters",
    "it was erased in some parameters and used in others",
    "the step read gradients that the scaler had scaled, and nobody is known to have unscaled them",
    "it was unscaled by another factor than that by which the scaler had scaled it",
    "hooks of the parameters changed what it brought, by no one factor that could be read",
    "another thread changed the same .grad while it ran",
    NO_TERMS,
    "over how many elements it sums was not recorded",
)
_CLOSURE, _APART, _PARTLY, _SCALED, _RESCALED, _HOOKED, _OVERLAPPED = range(
    len(UNREAD) + 1, len(_REASONS) - 2
)
_UNCOUNTED = len(_REASONS) - 1


class Share(NamedTuple):
    """What one backward weighs in one step, for one of its objectives.

    `step` and `backward` are indices of events. `share` is the coefficient with which the mean of
    the loss enters the gradient that the step consumes, `elements` how many that mean is over,
    `per_element` the one over the other. What cannot be read is NaN, and `unknown` says why; of a
    loss that cannot be taken apart, `share` is the coefficient of the loss as it stands.
    """

    step: int
    backward: int
    objective: str
    share: float
    elements: float
    per_element: float
    unknown: str


class Shares(Sequence[Share]):
    """What each backward weighs in each step: rows in the order of the steps, kept as columns.

    `step`, `backward`, `objective` (its number in `objectives`), `term` (its number in the
    backward), `share`, `elements` and `per_element` are arrays of one entry each row, as are the
    factors of a share: `constant` (of the loss, and of hooks that multiply what it brings), `mean`
    (whether its reduction is one; a sum has its elements as a factor), `by_hand`, `clipped`,
    `averaged` (over ranks), `erased` (then it is 0). `opaque` losses cannot be taken apart, of
    those `followed` every factor is known; `optimizer` is the number of the one that stepped.
    `left_out` counts the rows of contributions
    that stay for ever which are not listed.
    """

    def __init__(
        self,
        columns: Mapping[str, np.ndarray],
        objectives: Sequence[str],
        reasons: Sequence[str],
        left_out: int = 0,
    ) -> None:
        self.columns, self.objectives, self.reasons, self.left_out = (
            dict(columns),
            objectives,
            reasons,
            left_out,
        )
        for array in self.columns.values():
            array.flags.writeable = False

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            found: np.ndarray = self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(
                f"shares have no column {name!r}; they have {', '.join(self.columns)}"
            ) from None
        return found

    def __len__(self) -> int:
        return len(self.columns["step"])

    @overload
    def __getitem__(self, index: int) -> Share: ...
    @overload
    def __getitem__(self, index: slice) -> Shares: ...
    def __getitem__(self, index: int | slice) -> Share | Shares:
        if isinstance(index, slice):
            return self.take(index)
        return next(self._rows([range(len(self))[index]]))

    def __iter__(self) -> Iterator[Share]:
        for start in range(0, len(self), 1024):
            yield from self._rows(slice(start, start + 1024))

    def _rows(self, where: Any) -> Iterator[Share]:
        names = (
            "step",
            "backward",
            "objective",
            "share",
            "elements",
            "per_element",
            "unknown",
        )
        for row in zip(
            *(self.columns[name][where].tolist() for name in names), strict=True
        ):
            step, backward, objective, share, elements, each, unknown = row
            yield Share(
                step,
                backward,
                self.objectives[objective],
                share,
                elements,
                each,
                self.reasons[unknown],
            )

    def take(self, where: Any) -> Shares:
        """The rows at these places (a slice, integers or truths), as shares of their own."""
        return Shares(
            {name: array[where] for name, array in self.columns.items()},
            self.objectives,
            self.reasons,
        )

    def of(self, step: int) -> Shares:
        """The rows of one step, by the index of its event."""
        return self.take(
            slice(*np.searchsorted(self.columns["step"], [step, step + 1]).tolist())
        )

    @property
    def lost_sight(self) -> np.ndarray:
        """For each row, whether nobody knows what became in `.grad` of what the backward brought."""
        found: np.ndarray = (self.unknown > 0) & (self.unknown <= _OVERLAPPED)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shares):
            return NotImplemented
        return len(self) == len(other) and all(map(_alike, self, other))

    __hash__ = None  # type: ignore[assignment] # they hold arrays

    def __repr__(self) -> str:
        steps = len(np.unique(self.columns["step"]))
        title = f"Shares: {counted(len(self), 'row')}, {counted(steps, 'step')}"
        if self.left_out:
            title += f" ({self.left_out} more rows of contributions that stay in .grad)"
        if not len(self):
            return title
        width = max(9, *(len(name[:24]) for name in self.objectives))
        lines = [
            title,
            f"  step  backward  {'objective':<{width}}     share  elements  per element",
        ]
        for row in self._rows(slice(0, 20)):
            numbers = (row.share, row.elements, row.per_element)
            share, elements, each = (
                "?" if math.isnan(n) else f"{n:.4g}" for n in numbers
            )
            why = f"  ({row.unknown})" if row.unknown else ""
            name = row.objective[:24]
            lines.append(
                f"{row.step:>6}  {row.backward:>8}  {name:<{width}}  {share:>8}  {elements:>8}  {each:>11}{why}"
            )
        if len(self) > 20:
            lines.append(f"  … {len(self) - 20} more rows")
        return "\n".join(lines)


def _alike(one: Share, other: Share) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))  # noqa: PLR0124


def shares(ledger: Arrays, fates: Fates) -> Shares:
    """See `Ledger.shares`."""
    pairs, left_out = _combined(ledger, _pairs(ledger, fates))
    terms = Terms(ledger, np.unique(pairs["backward"]), _REASONS)
    first = terms.first[pairs["backward"]]
    many = terms.count[pairs["backward"]]
    row = np.repeat(np.arange(many.size), many)
    number = np.arange(row.size) - np.repeat(np.cumsum(many) - many, many)
    term = first[row] + number
    columns = {name: array[row] for name, array in pairs.items()}
    reduction, elements, constant = (
        terms.reduction[term],
        terms.elements[term],
        terms.factor[term],
    )
    with np.errstate(over="ignore", invalid="ignore"):
        factor = columns["by_hand"] * columns["clipped"] * columns["averaged"]
    bad, opaque = columns.pop("bad"), terms.unknown[term]
    overlapped = ledger.columns.detail("overlapped", default=False)[columns["backward"]]
    columns["erased"] = columns["erased"] & ~overlapped
    bad = np.where((bad == 0) & overlapped, _OVERLAPPED, bad)
    by_hook = ledger.columns.detail("by_hook", 1.0)[columns["backward"]]
    constant = constant * np.where(np.isfinite(by_hook), by_hook, 1.0)
    bad = np.where((bad == 0) & ~np.isfinite(by_hook), _HOOKED, bad)
    gain = np.where(bad > 0, np.nan, factor)
    summed, mean = reduction == SUM, reduction == MEAN
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        coefficient = np.where(columns["erased"], 0.0, constant * gain)
        # A loss that nobody can take apart enters with its constant all the same.
        share = np.where(
            summed & ~columns["erased"], coefficient * elements, coefficient
        )
        each = np.where(
            columns["erased"] | summed,
            coefficient,
            coefficient / np.where(mean, elements, np.nan),
        )
    unknown = np.where(bad > 0, bad, opaque)
    unknown = np.where((unknown == 0) & np.isnan(share), _UNCOUNTED, unknown)
    unknown = np.where(columns["erased"], 0, unknown)
    with np.errstate(over="ignore", invalid="ignore"):
        weight = constant * columns["by_hand"] * np.where(summed, elements, 1.0)
    seen = {"weight": weight, "constant": constant, "elements": elements, "mean": mean}
    objective, names = terms.objectives(terms.objective[term], columns | seen)
    columns |= {
        "objective": objective,
        "term": number,
        "share": share,
        "elements": elements,
        "per_element": each,
        "unknown": unknown,
        "constant": constant,
        "mean": mean,
        "opaque": opaque > 0,
        "followed": (bad == 0) & np.isfinite(constant),
    }
    return Shares(columns, names, terms.reasons, left_out)


_Pairs = dict[str, np.ndarray]


def _pairs(ledger: Arrays, fates: Fates) -> Iterator[_Pairs]:
    """For each optimizer, and each kind of its parameters, which steps read which backwards, and by what factor."""
    events = ledger.columns
    gains = of_events(ledger)
    backward = events.where("kind", "backward")
    inside, zeroed_by = (
        backward & events.where("within", "step"),
        zeroed_by_steps(ledger),
    )
    sync = np.append(events.where("kind", "sync"), False)
    amp = np.log(np.maximum(events.detail("amp_scale", 1.0), np.finfo(float).tiny))
    # Asked column by column.
    contributed = np.asfortranarray((ledger.state & CONTRIBUTED).astype(bool))
    shard_of = shards_of(ledger)
    ends = np.where(fates.erased < 0, len(events), fates.erased)
    skipped_all = events.where("kind", "step") & events.skipped
    index = events.detail("optimizer_index", 0)
    apart = gains.apart()  # what all parameters have tells none from another
    for optimizer in sorted({o for p in ledger.parameters for o in p.optimizers}):
        steps = steps_of(ledger, (optimizer,))
        skipped = np.flatnonzero(skipped_all & (index == optimizer))
        seen: dict[bytes, None] = {}
        for p, parameter in enumerate(ledger.parameters):
            if optimizer not in parameter.optimizers:
                continue
            shard = shard_of.get(p)
            key = _signature(contributed, fates.erased, apart, p)
            key += (
                b""
                if shard is None
                else _signature(contributed, fates.erased, apart, shard)
            )
            if key in seen:
                continue
            seen[key] = None
            born = np.flatnonzero(contributed[:, p] & backward)
            if not born.size:
                continue
            end = ends[born, p]
            handed = sync[np.minimum(end, len(events))] & (end < len(events))
            if shard is not None and handed.any():
                yield from _handed_on(
                    ledger,
                    gains,
                    steps,
                    skipped,
                    optimizer,
                    (p, shard),
                    born[handed],
                    end[handed],
                    zeroed_by,
                    amp,
                    ends,
                    fates.steps > 0,
                )
                born, end = born[~handed], end[~handed]
            if (
                shard is not None
            ):  # no step reads it there: what was zeroed is lost as it came, the rest waits
                born = born[end < len(events)]
                end = born
            used = fates.steps[born, p] > 0
            yield _read(
                gains,
                steps,
                skipped,
                optimizer,
                p,
                born,
                end,
                inside[born],
                used,
                zeroed_by,
                amp[born],
            )


def _signature(
    contributed: np.ndarray, erased: np.ndarray, apart: Sequence[np.ndarray], p: int
) -> bytes:
    own = (
        np.packbits(contributed[:, p]),
        erased[contributed[:, p], p],
        *(part[:, p] for part in apart),
    )
    return b"|".join(array.tobytes() for array in own)


def _read(
    gains: Gains,
    steps: np.ndarray,
    skipped: np.ndarray,
    optimizer: int,
    p: int,
    born: np.ndarray,
    end: np.ndarray,
    inside: np.ndarray,
    used: np.ndarray,
    zeroed_by: np.ndarray,
    amp: np.ndarray,
) -> _Pairs:
    """The steps that read these contributions to one parameter; those that nobody's reads count 0 in the next one."""
    first = np.searchsorted(steps, born, side="right")
    until = steps_before(steps, end, zeroed_by)
    until = np.where(
        inside, np.maximum(until, np.minimum(first + 1, steps.size)), until
    )
    lost = until <= first
    # What a skipped step has read, it was there for.
    tried = np.searchsorted(skipped, end) > np.searchsorted(skipped, born)
    many = np.where(lost, (first < steps.size) & ~tried & ~used, until - first)
    listed = np.minimum(many, _FIRST) if many.sum() > _MOST else many
    reached, left_out = born[listed == many], int((many - listed).sum())
    many = listed
    which = np.repeat(np.arange(born.size), many)
    step = steps[
        first[which] + np.arange(which.size) - np.repeat(np.cumsum(many) - many, many)
    ]
    b = born[which]
    before, after = (
        np.searchsorted(gains.events, b),
        np.searchsorted(gains.events, step, side="right"),
    )
    bad = np.where(gains.bad[after, p] > b, gains.why[after, p], 0)
    # What was erased may be among what a hand put there afterwards.
    erased = lost[which] & ~(
        (gains.bad[after, p] > end[which]) & (gains.why[after, p] == HAND)
    )
    bad = np.where(inside[which] & (end[which] < step), _CLOSURE, bad)
    unscaled = amp[which] + gains.unscaled[after, p] - gains.unscaled[before, p]
    by_hand = gains.by_hand[after, p] - gains.by_hand[before, p]
    # Whoever multiplies by one over the scale by hand has unscaled.
    undone = (np.abs(unscaled) > SAME_IN_HALF) & (
        np.abs(unscaled + by_hand) <= SAME_IN_HALF
    )
    by_hand, unscaled = (
        np.where(undone, by_hand + unscaled, by_hand),
        np.where(undone, 0, unscaled),
    )
    why = np.where(
        gains.unscaled[after, p] != gains.unscaled[before, p], _RESCALED, _SCALED
    )
    bad = np.where((bad == 0) & (np.abs(unscaled) > SAME_IN_HALF), why, bad)
    averaged = gains.averaged[after, p]
    place = np.searchsorted(gains.events, averaged) + 1
    ranks = gains.ranks[np.minimum(place, gains.ranks.size - 1)]
    return {
        "step": step,
        "backward": b,
        "optimizer": np.full(step.size, optimizer),
        "by_hand": by_hand,
        "clipped": gains.clipped[after, p] - gains.clipped[before, p],
        "averaged": np.where(averaged > b, 1 / ranks, 1.0),
        "erased": erased,
        "bad": np.where(erased, 0, bad),
        "reached": np.stack([np.full(reached.size, optimizer), reached]),
        "left_out": np.array([left_out]),
    }


def _handed_on(
    ledger: Arrays,
    gains: Gains,
    steps: np.ndarray,
    skipped: np.ndarray,
    optimizer: int,
    columns: tuple[int, int],
    born: np.ndarray,
    taken: np.ndarray,
    zeroed_by: np.ndarray,
    amp: np.ndarray,
    ends: np.ndarray,
    used: np.ndarray,
) -> Iterator[_Pairs]:
    """As `_read`, of what a reduce-scatter took from an unsharded gradient (`columns[0]`) into its shard."""
    whole, shard = columns
    taken = brought(ledger, shard, taken)
    born, taken = born[taken >= 0], taken[taken >= 0]
    syncs, which = np.unique(taken, return_inverse=True)
    if not born.size:
        return
    nothing = np.zeros(syncs.size, bool)
    # The scaler's factor is that of the backward; from the sync on it is the shard that is unscaled.
    first = np.zeros(syncs.size, np.int64)
    first[which] = born
    end, gone = ends[syncs, shard], used[syncs, shard]
    read = _read(
        gains,
        steps,
        skipped,
        optimizer,
        shard,
        syncs,
        end,
        nothing,
        gone,
        zeroed_by,
        amp[first],
    )
    for b, sync in zip(born.tolist(), taken.tolist(), strict=True):
        here = np.flatnonzero(read["backward"] == sync)
        if not here.size:
            continue
        one = {
            name: array[here]
            for name, array in read.items()
            if name not in ("reached", "left_out")
        }
        before, after = np.searchsorted(gains.events, [b, sync])
        ranks = number(ledger.events[sync].details.get("ranks"))
        divisor = number(ledger.events[sync].details.get("divisor", ranks))
        times = ranks / divisor if divisor else math.nan
        bad = gains.why[after, whole] if gains.bad[after, whole] > b else 0
        if not (1 <= ranks < math.inf and 0 < times < math.inf):
            bad = HOOKED if 1 <= ranks < math.inf else UNSEEN
            ranks = times = 1.0
        yield one | {
            "backward": np.full(here.size, b),
            "by_hand": one["by_hand"]
            + math.log(times)
            + gains.by_hand[after, whole]
            - gains.by_hand[before, whole],
            "clipped": one["clipped"]
            + gains.clipped[after, whole]
            - gains.clipped[before, whole],
            "averaged": np.full(here.size, 1 / ranks),
            "bad": np.where(one["bad"] > 0, one["bad"], bad),
            "reached": np.array([[one["optimizer"][0]], [b]]),
            "left_out": np.zeros(1, int),
        }


def _combined(ledger: Arrays, found: Iterator[_Pairs]) -> tuple[_Pairs, int]:
    """One row for each step and backward, of what its parameters say; unknown where they do not agree."""
    every = list(found)
    left_out = max((int(pairs.pop("left_out")[0]) for pairs in every), default=0)
    # How many kinds of an optimizer's parameters each backward reached.
    each = np.concatenate(
        [one.pop("reached") for one in every] or [np.zeros((2, 0))], axis=1
    ).astype(np.int64)
    reached, kinds = np.unique(
        each[0] * len(ledger.columns) + each[1], return_counts=True
    )
    names = (
        "step",
        "backward",
        "optimizer",
        "by_hand",
        "clipped",
        "averaged",
        "erased",
        "bad",
    )
    pairs = {
        name: np.concatenate([one[name] for one in every] or [np.zeros(0)])
        for name in names
    }
    for name in ("step", "backward", "optimizer", "bad"):
        pairs[name] = pairs[name].astype(np.int64)
    pairs["erased"] = pairs["erased"].astype(bool)
    rough = (
        SAME_IN_HALF
        if any(p.dtype in ("float16", "bfloat16") for p in ledger.parameters)
        else SAME
    )
    key = pairs["step"] * len(ledger.columns) + pairs["backward"]
    order = np.argsort(key, kind="stable")
    pairs = {name: array[order] for name, array in pairs.items()}
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    if starts.size:
        total = pairs["by_hand"] + pairs["clipped"] + np.log(pairs["averaged"])
        used = ~pairs["erased"]
        high = np.maximum.reduceat(np.where(used, total, -np.inf), starts)
        low = np.minimum.reduceat(np.where(used, total, np.inf), starts)
        some, every_one = (
            np.logical_or.reduceat(used, starts),
            np.logical_and.reduceat(used, starts),
        )
        bad = np.maximum.reduceat(pairs["bad"], starts)
        with np.errstate(invalid="ignore"):
            bad = np.where((bad == 0) & some & (high - low > rough), _APART, bad)
        # Of a kind that it was erased in after an earlier step, there is no row.
        asked = (pairs["optimizer"] * len(ledger.columns) + pairs["backward"])[starts]
        at = np.searchsorted(reached, asked)
        whole = (np.append(reached, -1)[at] != asked) | (
            np.diff(starts, append=key.size) >= np.append(kinds, 0)[at]
        )
        bad = np.where((bad == 0) & some & ~(every_one & whole), _PARTLY, bad)
        pairs = {name: array[starts] for name, array in pairs.items()}
        pairs["bad"], pairs["erased"] = bad, ~some
    with np.errstate(over="ignore"):
        pairs["by_hand"], pairs["clipped"] = (
            np.exp(pairs["by_hand"]),
            np.exp(pairs["clipped"]),
        )
    return pairs, left_out


def used_before(
    optimizer: np.ndarray, backward: np.ndarray, step: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """Which rows are of a backward that an earlier step of the same optimizer had consumed."""
    found = np.zeros(step.size, bool)
    at = np.flatnonzero(used)
    order = at[np.lexsort((step[at], backward[at], optimizer[at]))]
    same = (
        (np.diff(optimizer[order]) == 0)
        & (np.diff(backward[order]) == 0)
        & (np.diff(step[order]) > 0)
    )
    found[order[1:][same]] = True
    # The terms of one backward stand one after the other, and only the first of them came after another step.
    keys = set(
        zip(
            optimizer[found].tolist(),
            backward[found].tolist(),
            step[found].tolist(),
            strict=True,
        )
    )
    if keys:
        found |= [
            key in keys
            for key in zip(
                optimizer.tolist(), backward.tolist(), step.tolist(), strict=True
            )
        ]
    return found
