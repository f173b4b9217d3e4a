"""Merge the ledgers of several ranks into one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from accumviz.ledger.events import CODES, NUMBERS, Arrays, Events, Gatherer, Weighed


def name(rank: int, parameter: str) -> str:
    """A parameter's name among those of all ranks.

    >>> name(0, "weight")
    'rank 0 · weight'
    """
    return f"rank {rank} · {parameter}"


def merge(ledgers: Sequence[Arrays]) -> Arrays:
    """See `Ledger.merge`."""
    if not ledgers:
        raise ValueError(
            "no ledger to merge; pass the ledger of each rank, or its file"
        )
    numbers = [
        int(ledger.meta.get("rank", place)) for place, ledger in enumerate(ledgers)
    ]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"ranks {numbers} to merge; expected each once (ledger.meta['rank'] says which it is)"
        )
    order = sorted(range(len(ledgers)), key=numbers.__getitem__)
    ledgers, numbers = [ledgers[i] for i in order], [numbers[i] for i in order]
    events = [ledger.columns for ledger in ledgers]
    rows = _rows(events)
    # What each rank did last, in rows in which it did nothing.
    latest = np.maximum.accumulate(rows, axis=0)
    offsets = np.cumsum([0, *(_optimizers(ledger) for ledger in ledgers)]).tolist()
    parameters = [
        replace(
            p,
            name=name(rank, p.name),
            aliases=tuple(name(rank, alias) for alias in p.aliases),
            optimizers=tuple(o + offset for o in p.optimizers),
            rank=rank,
            unsharded_of=name(rank, p.unsharded_of) if p.unsharded_of else "",
        )
        for ledger, rank, offset in zip(ledgers, numbers, offsets, strict=False)
        for p in ledger.parameters
    ]
    columns: dict[str, list[np.ndarray]] = {"contribution": [], "grad": [], "state": []}
    exact: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    weights: list[tuple[int, np.ndarray, Weighed]] = []
    first = 0
    for place, ledger in enumerate(ledgers):
        own, last = rows[:, place], latest[:, place]
        columns["contribution"].append(_pick(ledger.contribution, own, np.nan))
        columns["grad"].append(_pick(ledger.grad, last, np.nan))
        # What others do leaves this rank's `.grad` as it was.
        columns["state"].append(
            _pick(ledger.state, own, 0) | _pick(ledger.state & 1, last, 0)
        )
        for p, (contribution, grad) in ledger.exact.items():
            exact[first + p] = (
                _pick(contribution, own, np.nan),
                _pick(grad, last, np.nan),
            )
        weights.append((first, own, ledger.weighed))
        first += len(ledger.parameters)
    return Arrays(
        tuple(parameters),
        _events(rows, events, numbers, offsets),
        np.concatenate(columns["contribution"], axis=1),
        np.concatenate(columns["grad"], axis=1),
        np.concatenate(columns["state"], axis=1),
        exact,
        weighed=_weighed(weights),
        sources={
            file: text
            for ledger in reversed(ledgers)
            for file, text in ledger.sources.items()
        },
        meta=_meta(ledgers, numbers),
        complete=all(ledger.complete for ledger in ledgers),
    )


def _rows(ledgers: list[Events]) -> np.ndarray:
    """All events, each rank's in its order: turn by turn between collectives, together in them.

    Returns rows × ranks, which of its events each rank has in the row (-1: none).
    """
    sync = [events.where("kind", "sync").tolist() for events in ledgers]
    collective = [_collectives(events) for events in ledgers]
    at, many = [0] * len(ledgers), [len(events) for events in ledgers]
    rows: list[list[int]] = []
    while True:
        waiting = [place for place in range(len(ledgers)) if at[place] < many[place]]
        if not waiting:
            return np.array(rows, np.int64).reshape(-1, len(ledgers))
        going = [place for place in waiting if not sync[place][at[place]]]
        alike: dict[Any, list[int]] = {}
        for place in going or waiting:
            # Whoever is not in a collective has a row of its own.
            key = place if going else collective[place][at[place]]
            alike.setdefault(key, [-1] * len(ledgers))[place] = at[place]
            at[place] += 1
        rows += alike.values()


def _collectives(events: Events) -> list[Any]:
    """What collectives of several ranks that are one have in common."""
    op, size, parameters = (
        events.detail(name, None).tolist() for name in ("op", "bytes", "parameters")
    )
    return [
        (a, b, tuple(c or ())) for a, b, c in zip(op, size, parameters, strict=True)
    ]


def _weighed(parts: list[tuple[int, np.ndarray, Weighed]]) -> Weighed:
    """The ranks' weights, each after the rows in which its own events are: NaN where another's are."""
    placed = []
    for _, own, weighed in parts:
        # In which row each of its events is.
        where = np.zeros(int(own.max(initial=-1)) + 1, np.int64)
        where[own[own >= 0]] = np.flatnonzero(own >= 0)
        placed.append(where[weighed.events])
    events = np.unique(np.concatenate(placed))
    elements = {}
    for (first, _, weighed), rows in zip(parts, placed, strict=True):
        at = np.searchsorted(events, rows)
        for p, found in weighed.elements.items():
            elements[first + p] = np.full((len(events), found.shape[1]), np.nan)
            elements[first + p][at] = found
    return Weighed(events, elements)


def _pick(array: np.ndarray, where: np.ndarray, missing: float) -> np.ndarray:
    padded = np.concatenate(
        [array, np.full((1, *array.shape[1:]), missing, array.dtype)]
    )
    picked: np.ndarray = padded[where]
    return picked


def _events(
    rows: np.ndarray, ledgers: list[Events], numbers: list[int], offsets: list[int]
) -> Events:
    """The events of the rows: of those that several ranks took part in, the first one's."""
    there = rows >= 0
    first, together = there.argmax(axis=1), there.all(axis=1) & (len(ledgers) > 1)
    codes, values = (
        np.zeros((len(rows), len(CODES)), np.int32),
        np.zeros((len(rows), len(NUMBERS))),
    )
    gathered = Gatherer()
    allocated = NUMBERS.index("allocated"), NUMBERS.index("peak")
    for place, events in enumerate(ledgers):
        own = np.array(events.codes)
        tables = events.tables | {
            "details": _shifted(events, own[:, CODES.index("details")], offsets[place])
        }
        gathered.renumber(own, tables)
        own[:, CODES.index("rank")] = numbers[place]
        here = first == place
        codes[here], values[here] = (
            own[rows[here, place]],
            events.numbers[rows[here, place]],
        )
    codes[together, CODES.index("rank")] = -1
    # The ranks' bytes are there at once; their peaks were reached when it suited each.
    each = [
        events.column("allocated")[rows[together, place]]
        for place, events in enumerate(ledgers)
    ]
    values[together, allocated[0]], values[together, allocated[1]] = (
        np.sum(each, axis=0),
        np.nan,
    )
    return Events(
        codes, values, {name: list(places) for name, places in gathered.places.items()}
    )


def _shifted(events: Events, codes: np.ndarray, offset: int) -> list[str]:
    """The table of details, and in `codes` the places in it, once optimizers are counted over all ranks."""
    table = [
        known if isinstance(known, str) else json.dumps(dict(known), default=repr)
        for known in events.tables["details"]
    ]
    steps = np.flatnonzero(events.where("kind", "step", "schedule"))
    used, again = np.unique(codes[steps], return_inverse=True)
    codes[steps] = len(table) + again
    for code in used.tolist():
        details = json.loads(table[code])
        table.append(
            json.dumps(
                details
                | {"optimizer_index": details.get("optimizer_index", 0) + offset}
            )
        )
    return table


def _optimizers(ledger: Arrays) -> int:
    used = [o for p in ledger.parameters for o in p.optimizers]
    used += ledger.columns.detail("optimizer_index", 0)[
        ledger.columns.where("kind", "step", "schedule")
    ].tolist()
    return max([len(ledger.meta.get("optimizers", ())), *(o + 1 for o in used)])


def _meta(ledgers: Sequence[Arrays], numbers: list[int]) -> dict[str, Any]:
    """Return what is said of all ranks together, and of each where they differ."""
    meta = {key: value for key, value in ledgers[0].meta.items() if key != "rank"}
    meta |= {"merged": numbers, "optimizers": _every(ledgers, "optimizers")}
    if any("optimizer_settings" in ledger.meta for ledger in ledgers):
        meta["optimizer_settings"] = _settings(ledgers)
    notes = list(dict.fromkeys(_every(ledgers, "notes")))
    meta |= {"notes": notes} if notes else {}
    stopped = _by_rank(ledgers, numbers, "stopped")
    meta |= {"stopped": stopped} if stopped else {}
    ended = _by_rank(ledgers, numbers, "ended")
    meta.pop("ended", None)
    if ended:  # one text where all ended alike, else one for each rank that says how
        alike = len(ended) == len(ledgers) and len(set(map(str, ended.values()))) == 1
        meta["ended"] = next(iter(ended.values())) if alike else ended
    return meta


def _every(ledgers: Sequence[Arrays], name: str) -> list[Any]:
    return [one for ledger in ledgers for one in ledger.meta.get(name, ())]


def _by_rank(
    ledgers: Sequence[Arrays], numbers: list[int], name: str
) -> dict[str, Any]:
    ranks = zip(numbers, ledgers, strict=True)
    return {str(n): one.meta[name] for n, one in ranks if name in one.meta}


def _settings(ledgers: Sequence[Arrays]) -> list[Any]:
    """Return the settings of every optimizer, empty for those of a rank that has none."""
    settings: list[Any] = []
    for ledger in ledgers:
        known = list(ledger.meta.get("optimizer_settings", ()))
        missing = len(ledger.meta.get("optimizers", ())) - len(known)
        settings += known + [{}] * missing
    return settings
