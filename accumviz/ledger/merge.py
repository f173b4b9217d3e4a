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
_MEASURED = [list(NUMBERS).index(name) for name in ("allocated", "peak")]

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
    # What each rank did last, in rows in which it did nothing: others leave its `.grad` as it was.
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
        present = _pick(ledger.state & PRESENT, last, 0)
        state.append(_pick(ledger.state, here, 0) | present)
        weighed |= np.isin(here, ledger.weighed.events)
        for p, parameter in enumerate(ledger.parameters):
            column = len(parameters)
            if p in ledger.exact:
                added, left = ledger.exact[p]
                exact[column] = _pick(added, here, np.nan), _pick(left, last, np.nan)
            if p in ledger.weighed.elements:
                after = ledger.weighed.after_each(len(ledger.events), p)
                weights[column] = _pick(after, here, np.nan)
            parameters.append(_renamed(parameter, rank, first))
    events = np.flatnonzero(weighed)
    elements = {p: after[events] for p, after in weights.items()}
    sources: dict[str, str] = {}
    for one in ranks:
        sources = one.ledger.sources | sources
    return kind(
        parameters,
        _events(rows, ranks),
        np.concatenate(contribution, axis=1),
        np.concatenate(grad, axis=1),
        np.concatenate(state, axis=1),
        exact,
        weighed=Weighed(events, elements),
        sources=sources,
        meta=_meta(ranks),
        complete=all(one.ledger.complete for one in ranks),
    )


def _ranks(ledgers: Sequence[Arrays]) -> list[RankLedger]:
    """Return the ledgers in the order of their ranks. Raises `ValueError` where there is none, or a rank twice."""
    if not ledgers:
        raise ValueError(
            "no ledger to merge; pass the ledger of each rank, or its file"
        )
    of_rank = {}
    for place, ledger in enumerate(ledgers):
        of_rank[int(ledger.meta.get("rank", place))] = ledger
    if len(of_rank) < len(ledgers):
        numbers = [ledger.meta.get("rank") for ledger in ledgers]
        raise ValueError(
            f"ranks {numbers} to merge; expected each once (ledger.meta['rank'] says which it is)"
        )
    ranks = []
    first = 0
    for rank, ledger in sorted(of_rank.items()):
        ranks.append(RankLedger(rank, ledger, first))
        first += _optimizers(ledger)
    return ranks


def _optimizers(ledger: Arrays) -> int:
    """Return how many optimizers a ledger speaks of."""
    used: list[int] = ledger.columns.detail("optimizer_index", 0).tolist()
    for parameter in ledger.parameters:
        used += parameter.optimizers
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
    if len(ranks) > 1:
        together = takes_part.all(axis=1)
        codes[together, _CODE["rank"]] = -1
        # Bytes are those of one process.
        for column in _MEASURED:
            numbers[together, column] = np.nan
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
        details["optimizer_index"] = details.get("optimizer_index", 0) + first
        table.append(json.dumps(details))
    return Events(codes, events.numbers, {**events.tables, "details": table})


def _meta(ranks: list[RankLedger]) -> dict[str, Any]:
    """Return what is said of all ranks together, and of each how its recording stopped and ended."""
    metas = {str(one.rank): one.ledger.meta for one in ranks}
    meta = dict(ranks[0].ledger.meta)
    meta.pop("rank", None)
    meta["merged"] = [one.rank for one in ranks]
    for listed in ("optimizers", "optimizer_settings", "notes"):
        every: list[Any] = []
        for each in metas.values():
            every += each.get(listed, ())
        meta[listed] = every
    meta["notes"] = list(dict.fromkeys(meta["notes"]))
    for said in ("stopped", "ended"):
        meta.pop(said, None)
        of_rank = {rank: each[said] for rank, each in metas.items() if said in each}
        if of_rank:
            meta[said] = of_rank
    ends = [each.get("ended") for each in metas.values()]
    if ends.count(ends[0]) == len(ends) and ends[0] is not None:
        meta["ended"] = ends[0]
    return meta
