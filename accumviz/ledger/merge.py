"""Merge the ledgers of several ranks into one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from accumviz.ledger.events import (
    CODES,
    NUMBERS,
    PRESENT,
    Arrays,
    Events,
    Gatherer,
    Parameter,
    Weighed,
)

_CODE = {name: at for at, name in enumerate(CODES)}
_NUMBER = {name: at for at, name in enumerate(NUMBERS)}

Kind = TypeVar("Kind", bound=Arrays)


class RankLedger(NamedTuple):
    """One rank's ledger: `first` of its optimizers has that number among those of all ranks."""

    rank: int
    ledger: Arrays
    first: int


def name(rank: int, parameter: str) -> str:
    """Return a parameter's name among those of all ranks.

    >>> name(0, "weight")
    'rank 0 · weight'
    """
    return f"rank {rank} · {parameter}"


def merge(ledgers: Sequence[Arrays], kind: type[Kind]) -> Kind:
    """Return the ledger of all ranks; see `Ledger.merge`."""
    ranks = _ranks(ledgers)
    rows = _rows([one.ledger.columns for one in ranks])
    # What each rank did last, in rows in which it did nothing.
    latest = np.maximum.accumulate(rows, axis=0)
    parameters: list[Parameter] = []
    contribution = []
    grad = []
    state = []
    exact = {}
    weights = {}
    weighed = np.zeros(len(rows), bool)
    for place, (rank, ledger, first) in enumerate(ranks):
        here = rows[:, place]
        last = latest[:, place]
        contribution.append(_pick(ledger.contribution, here, np.nan))
        grad.append(_pick(ledger.grad, last, np.nan))
        # What others do leaves this rank's `.grad` as it was.
        present = _pick(ledger.state & PRESENT, last, 0)
        state.append(_pick(ledger.state, here, 0) | present)
        for p, (added, left) in ledger.exact.items():
            sides = _pick(added, here, np.nan), _pick(left, last, np.nan)
            exact[len(parameters) + p] = sides
        weighed |= np.isin(here, ledger.weighed.events)
        for p in ledger.weighed.elements:
            after = ledger.weighed.after_each(len(ledger.events), p)
            weights[len(parameters) + p] = _pick(after, here, np.nan)
        parameters += [_renamed(p, rank, first) for p in ledger.parameters]
    events = np.flatnonzero(weighed)
    elements = {p: after[events] for p, after in weights.items()}
    return kind(
        parameters,
        _events(rows, ranks),
        np.concatenate(contribution, axis=1),
        np.concatenate(grad, axis=1),
        np.concatenate(state, axis=1),
        exact,
        weighed=Weighed(events, elements),
        sources=_sources(ranks),
        meta=_meta(ranks),
        complete=all(one.ledger.complete for one in ranks),
    )


def _ranks(ledgers: Sequence[Arrays]) -> list[RankLedger]:
    """Return the ledgers in the order of their ranks. Raises `ValueError` where there is none, or a rank twice."""
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
    ranks = []
    first = 0
    for place in np.argsort(numbers).tolist():
        ledger = ledgers[place]
        ranks.append(RankLedger(numbers[place], ledger, first))
        first += _optimizers(ledger)
    return ranks


def _optimizers(ledger: Arrays) -> int:
    """Return how many optimizers a ledger speaks of."""
    used: list[int] = []
    for parameter in ledger.parameters:
        used += parameter.optimizers
    steps = ledger.columns.where("kind", "step", "schedule")
    used += ledger.columns.detail("optimizer_index", 0)[steps].tolist()
    named = len(ledger.meta.get("optimizers", ()))
    return max([named, *(o + 1 for o in used)])


def _renamed(parameter: Parameter, rank: int, first: int) -> Parameter:
    whole = parameter.unsharded_of
    return replace(
        parameter,
        name=name(rank, parameter.name),
        aliases=tuple(name(rank, alias) for alias in parameter.aliases),
        optimizers=tuple(first + o for o in parameter.optimizers),
        rank=rank,
        unsharded_of=name(rank, whole) if whole else "",
    )


def _pick(array: np.ndarray, rows: np.ndarray, missing: float) -> np.ndarray:
    """Return these rows of an array; -1 is a row of what is missing."""
    last = np.full((1, *array.shape[1:]), missing, array.dtype)
    picked: np.ndarray = np.concatenate([array, last])[rows]
    return picked


# --- events ----------------------------------------------------------------------------------


def _rows(ledgers: list[Events]) -> np.ndarray:
    """Put all events in one order, each rank's in its own: turn by turn between collectives, together in them.

    Returns rows × ranks, which of its events each rank has in the row (-1: none).
    """
    collective = [_collectives(events) for events in ledgers]
    at = [0] * len(ledgers)
    rows: list[list[int]] = []
    while True:
        waiting = [n for n, keys in enumerate(collective) if at[n] < len(keys)]
        if not waiting:
            return np.array(rows, np.int64).reshape(-1, len(ledgers))
        going = [n for n in waiting if collective[n][at[n]] is None]
        together: dict[Any, list[int]] = {}
        for n in going or waiting:
            # A rank that is in no collective has a row of its own.
            key = n if going else collective[n][at[n]]
            row = together.setdefault(key, [-1] * len(ledgers))
            row[n] = at[n]
            at[n] += 1
        rows += together.values()


def _collectives(events: Events) -> list[Any]:
    """Return of each event what its part in one collective has in common with other ranks'; None for another event."""
    columns = [events.detail(name, None) for name in ("op", "bytes", "parameters")]
    collectives: list[Any] = [None] * len(events)
    for e in np.flatnonzero(events.where("kind", "sync")).tolist():
        collectives[e] = str([column[e] for column in columns])
    return collectives


def _events(rows: np.ndarray, ranks: list[RankLedger]) -> Events:
    """Return the events of the rows: of those that several ranks took part in, the first one's."""
    takes_part = rows >= 0
    first = takes_part.argmax(axis=1)
    codes = np.zeros((len(rows), len(CODES)), np.int32)
    numbers = np.zeros((len(rows), len(NUMBERS)))
    gathered = Gatherer()
    for place, one in enumerate(ranks):
        events = _shifted(one.ledger.columns, one.first)
        moved = gathered.renumbered(events)
        moved[:, _CODE["rank"]] = one.rank
        here = first == place
        codes[here] = moved[rows[here, place]]
        numbers[here] = events.numbers[rows[here, place]]
    together = takes_part.all(axis=1) & (len(ranks) > 1)
    codes[together, _CODE["rank"]] = -1
    # The ranks' bytes are there at once; their peaks were reached when it suited each.
    allocated = np.zeros(int(together.sum()))
    for place, one in enumerate(ranks):
        allocated += one.ledger.columns.column("allocated")[rows[together, place]]
    numbers[together, _NUMBER["allocated"]] = allocated
    numbers[together, _NUMBER["peak"]] = np.nan
    return Events(codes, numbers, gathered.tables)


def _shifted(events: Events, first: int) -> Events:
    """Return events whose optimizers are counted over all ranks."""
    codes = np.array(events.codes)
    table = list(events.tables["details"])
    steps = np.flatnonzero(events.where("kind", "step", "schedule"))
    used, again = np.unique(codes[steps, _CODE["details"]], return_inverse=True)
    codes[steps, _CODE["details"]] = len(table) + again
    for code in used.tolist():
        details = json.loads(table[code])
        index = details.get("optimizer_index", 0) + first
        table.append(json.dumps({**details, "optimizer_index": index}))
    return Events(codes, events.numbers, {**events.tables, "details": table})


# --- what is said of all ranks ---------------------------------------------------------------


def _sources(ranks: list[RankLedger]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for one in reversed(ranks):
        sources.update(one.ledger.sources)
    return sources


def _meta(ranks: list[RankLedger]) -> dict[str, Any]:
    """Return what is said of all ranks together, and of each where they differ."""
    meta = dict(ranks[0].ledger.meta)
    for name in ("rank", "notes", "stopped", "ended"):
        meta.pop(name, None)
    meta["merged"] = [one.rank for one in ranks]
    meta["optimizers"] = _every(ranks, "optimizers")
    if any("optimizer_settings" in one.ledger.meta for one in ranks):
        meta["optimizer_settings"] = _settings(ranks)
    notes = dict.fromkeys(_every(ranks, "notes"))
    if notes:
        meta["notes"] = list(notes)
    if stopped := _by_rank(ranks, "stopped"):
        meta["stopped"] = stopped
    if ended := _ended(ranks):
        meta["ended"] = ended
    return meta


def _every(ranks: list[RankLedger], name: str) -> list[Any]:
    every: list[Any] = []
    for one in ranks:
        every += one.ledger.meta.get(name, ())
    return every


def _by_rank(ranks: list[RankLedger], name: str) -> dict[str, Any]:
    values = {}
    for one in ranks:
        if name in one.ledger.meta:
            values[str(one.rank)] = one.ledger.meta[name]
    return values


def _ended(ranks: list[RankLedger]) -> Any:
    """Return one text where all ended alike, else one for each rank that says how."""
    ended = _by_rank(ranks, "ended")
    alike = len(ended) == len(ranks) and len(set(map(str, ended.values()))) == 1
    return next(iter(ended.values())) if alike else ended


def _settings(ranks: list[RankLedger]) -> list[Any]:
    """Return the settings of every optimizer, empty for those of a rank that has none."""
    settings: list[Any] = []
    for one in ranks:
        meta = one.ledger.meta
        recorded = meta.get("optimizer_settings", ())
        missing = len(meta.get("optimizers", ())) - len(recorded)
        settings += recorded
        settings += [{}] * missing
    return settings
