"""Merge the ledgers of several ranks into one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

_RANK = list(CODES).index("rank")
_DETAILS = list(CODES).index("details")
# Bytes are those of one process.
_OF_ONE_PROCESS = (
    list(NUMBERS).index("allocated"),
    list(NUMBERS).index("peak"),
)

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
    for place, (rank, ledger, first) in enumerate(ranks):
        here = rows[:, place]
        last = latest[:, place]
        added = _pick(ledger.contribution, here, np.nan)
        left = _pick(ledger.grad, last, np.nan)
        contribution.append(added)
        grad.append(left)
        happened = _pick(ledger.state, here, 0)
        present = _pick(ledger.state & PRESENT, last, 0)
        state.append(happened | present)
        for p, (all_added, all_left) in ledger.exact.items():
            column = len(parameters) + p
            added = _pick(all_added, here, np.nan)
            left = _pick(all_left, last, np.nan)
            exact[column] = added, left
        for parameter in ledger.parameters:
            parameters.append(_renamed(parameter, rank, first))
    return kind(
        parameters,
        _events(rows, ranks),
        np.concatenate(contribution, axis=1),
        np.concatenate(grad, axis=1),
        np.concatenate(state, axis=1),
        exact,
        weighed=_weighed(rows, ranks),
        sources=_sources(ranks),
        meta=_meta(ranks),
        complete=all(one.ledger.complete for one in ranks),
    )


def _weighed(rows: np.ndarray, ranks: list[RankLedger]) -> Weighed:
    """Return the weights that ranks kept after each row in which one of them did."""
    kept = np.zeros(len(rows), bool)
    weights = {}
    before = 0
    for place, one in enumerate(ranks):
        here = rows[:, place]
        weighed = one.ledger.weighed
        kept |= np.isin(here, weighed.events)
        count = len(one.ledger.events)
        for p in weighed.elements:
            after = weighed.after_each(count, p)
            weights[before + p] = _pick(after, here, np.nan)
        before += len(one.ledger.parameters)
    elements = {}
    for p, after in weights.items():
        elements[p] = after[kept]
    return Weighed(np.flatnonzero(kept), elements)


def _sources(ranks: list[RankLedger]) -> dict[str, str]:
    """Return the sources of all ranks; where they differ, the first one's."""
    sources: dict[str, str] = {}
    for one in ranks:
        sources = one.ledger.sources | sources
    return sources


def _ranks(ledgers: Sequence[Arrays]) -> list[RankLedger]:
    """Return the ledgers in the order of their ranks. Raises `ValueError` where there is none, or a rank twice."""
    if not ledgers:
        raise ValueError(
            "no ledger to merge; pass the ledger of each rank, or its file"
        )
    of_rank = {}
    for place, ledger in enumerate(ledgers):
        rank = int(ledger.meta.get("rank", place))
        of_rank[rank] = ledger
    if len(of_rank) < len(ledgers):
        numbers = [ledger.meta.get("rank") for ledger in ledgers]
        raise ValueError(
            f"ranks {numbers} to merge; expected each once (ledger.meta['rank'] says which it is)"
        )
    ranks = []
    first = 0
    for rank in sorted(of_rank):
        ledger = of_rank[rank]
        ranks.append(RankLedger(rank, ledger, first))
        first += _count_optimizers(ledger)
    return ranks


def _count_optimizers(ledger: Arrays) -> int:
    """Return how many optimizers a ledger speaks of."""
    stepped = ledger.columns.detail("optimizer_index", 0)
    used: set[int] = set(stepped.tolist())
    for parameter in ledger.parameters:
        used.update(parameter.optimizers)
    last = max(used, default=-1)
    named = len(ledger.meta.get("optimizers", ()))
    return max(named, last + 1)


def _renamed(parameter: Parameter, rank: int, first: int) -> Parameter:
    whole = parameter.unsharded_of
    aliases = [name(rank, alias) for alias in parameter.aliases]
    optimizers = [first + optimizer for optimizer in parameter.optimizers]
    return replace(
        parameter,
        name=name(rank, parameter.name),
        aliases=tuple(aliases),
        optimizers=tuple(optimizers),
        rank=rank,
        unsharded_of=name(rank, whole) if whole else "",
    )


def _pick(array: np.ndarray, rows: np.ndarray, missing: float) -> np.ndarray:
    """Return these rows of an array; -1 is a row of what is missing."""
    elements = array.shape[1:]
    row_of_missing = np.full((1, *elements), missing, array.dtype)
    array = np.concatenate([array, row_of_missing])
    picked: np.ndarray = array[rows]
    return picked


# --- events ----------------------------------------------------------------------------------


def _rows(ledgers: list[Events]) -> np.ndarray:
    """Put all events in one order, each rank's in its own: turn by turn between collectives, together in them.

    Returns rows × ranks, which of its events each rank has in the row (-1: none).
    """
    collectives = [_collectives(events) for events in ledgers]
    position = [0] * len(ledgers)
    rows: list[list[int]] = []
    while next_of := _next_collectives(collectives, position):
        going = [place for place, collective in next_of.items() if not collective]
        together: dict[Any, list[int]] = {}
        for place in going or next_of:
            # A rank that is in no collective has a row of its own.
            key = next_of[place] or place
            nothing = [-1] * len(ledgers)
            row = together.setdefault(key, nothing)
            row[place] = position[place]
            position[place] += 1
        rows += together.values()
    merged = np.array(rows, np.int64)
    return merged.reshape(-1, len(ledgers))


def _next_collectives(
    collectives: list[list[str]], position: list[int]
) -> dict[int, str]:
    """Return, for each ledger that has more events, the collective that its next one is; "" for none."""
    next_of = {}
    for place, at in enumerate(position):
        if at < len(collectives[place]):
            next_of[place] = collectives[place][at]
    return next_of


def _collectives(events: Events) -> list[str]:
    """Return of each event what its part in one collective has in common with other ranks'; "" for another event."""
    columns = [events.detail(name, None) for name in ("op", "bytes", "parameters")]
    collectives = [""] * len(events)
    is_sync = events.where("kind", "sync")
    for event in np.flatnonzero(is_sync).tolist():
        described = [column[event] for column in columns]
        collectives[event] = str(described)
    return collectives


def _events(rows: np.ndarray, ranks: list[RankLedger]) -> Events:
    """Return the events of the rows: of those that several ranks took part in, the first one's."""
    takes_part = rows >= 0
    first = takes_part.argmax(axis=1)
    count = len(rows)
    codes = np.zeros((count, len(CODES)), np.int32)
    numbers = np.zeros((count, len(NUMBERS)))
    gathered = Gatherer()
    for place, one in enumerate(ranks):
        events = _shifted(one.ledger.columns, one.first)
        renumbered = gathered.renumbered(events)
        renumbered[:, _RANK] = one.rank
        here = first == place
        picked = rows[here, place]
        codes[here] = renumbered[picked]
        numbers[here] = events.numbers[picked]
    if len(ranks) > 1:
        together = takes_part.all(axis=1)
        codes[together, _RANK] = -1
        for column in _OF_ONE_PROCESS:
            numbers[together, column] = np.nan
    return Events(codes, numbers, gathered.tables)


def _shifted(events: Events, first: int) -> Events:
    """Return events whose optimizers are counted over all ranks."""
    codes = np.array(events.codes)
    table = list(events.tables["details"])
    steps = events.where("kind", "step", "schedule")
    of_steps = codes[steps, _DETAILS]
    used, places = np.unique(of_steps, return_inverse=True)
    codes[steps, _DETAILS] = len(table) + places
    for code in used.tolist():
        details = json.loads(table[code])
        details["optimizer_index"] = details.get("optimizer_index", 0) + first
        table.append(json.dumps(details))
    tables = {**events.tables, "details": table}
    return Events(codes, events.numbers, tables)


def _meta(ranks: list[RankLedger]) -> dict[str, Any]:
    """Return what is said of all ranks together, and of each how its recording stopped and ended."""
    metas = {str(one.rank): one.ledger.meta for one in ranks}
    meta = dict(ranks[0].ledger.meta)
    meta.pop("rank", None)
    meta["merged"] = [one.rank for one in ranks]
    for entry in ("optimizers", "notes"):
        meta[entry] = _joined(metas, entry)
    meta["notes"] = list(dict.fromkeys(meta["notes"]))
    for entry in ("stopped", "ended"):
        meta.pop(entry, None)
        of_rank = _by_rank(metas, entry)
        if of_rank:
            meta[entry] = of_rank
    end = ranks[0].ledger.meta.get("ended")
    same = all(each.get("ended") == end for each in metas.values())
    if same and end is not None:
        meta["ended"] = end
    return meta


def _joined(metas: Mapping[str, Mapping[str, Any]], entry: str) -> list[Any]:
    """Return what all ranks list under this name."""
    every: list[Any] = []
    for meta in metas.values():
        every += meta.get(entry, ())
    return every


def _by_rank(metas: Mapping[str, Mapping[str, Any]], entry: str) -> dict[str, Any]:
    """Return the entry of each rank that has it."""
    of_rank = {}
    for rank, meta in metas.items():
        if entry in meta:
            of_rank[rank] = meta[entry]
    return of_rank
