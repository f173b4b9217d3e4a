"""Merge the ledgers of several ranks into one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy import ndarray

from accumviz.ledger.events import (
    CODES,
    PRESENT,
    Arrays,
    Elements,
    Events,
    Parameter,
)

_RANK = list(CODES).index("rank")
_DETAILS = list(CODES).index("details")

Kind = TypeVar("Kind", bound=Arrays)


class RankLedger(NamedTuple):
    """One rank's ledger: `first` of its optimizers has that number among those of all ranks."""

    rank: int
    ledger: Arrays
    first: int


def named(rank: int, parameter: str) -> str:
    """Return a parameter's name among those of all ranks.

    >>> named(0, "weight")
    'rank 0 · weight'
    """
    return f"rank {rank} · {parameter}"


def merge(ledgers: Sequence[Arrays], kind: type[Kind]) -> Kind:
    """Return the ledger of all ranks; see `Ledger.merge`. Weights are those of one rank, and are left out."""
    ranks = _ranks(ledgers)
    rows = _rows([one.ledger.events for one in ranks])
    # What each rank did last, in rows in which it did nothing: others leave its `.grad` as it was.
    latest = np.maximum.accumulate(rows, axis=0)
    parameters: list[Parameter] = []
    kept: list[int] = []
    arrays: dict[str, list[ndarray]] = defaultdict(list)
    sources: dict[str, str] = {}
    for place, (rank, ledger, first) in enumerate(ranks):
        here = rows[:, place]
        last = latest[:, place]
        elements = ledger.elements
        kept += [len(parameters) + p for p in elements.kept]
        of_rank = {
            "contribution": _pick(ledger.contribution, here),
            "grad": _pick(ledger.grad, last),
            "added": _pick(elements.added, here),
            "left": _pick(elements.left, last),
        }
        happened = _pick(ledger.state, here, 0)
        present = _pick(ledger.state & PRESENT, last, 0)
        of_rank["state"] = happened | present
        for name, array in of_rank.items():
            arrays[name].append(array)
        for parameter in ledger.parameters:
            parameters.append(_renamed(parameter, rank, first))
        # Where they differ, the first rank's.
        sources = ledger.sources | sources
    beside = {}
    for name, parts in arrays.items():
        beside[name] = np.concatenate(parts, axis=1)
    added = beside.pop("added")
    left = beside.pop("left")
    return kind(
        parameters,
        _events(rows, ranks),
        **beside,
        elements=Elements(tuple(kept), added, left),
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
    numbers = [len(ledger.meta.get("optimizers", ())) - 1]
    numbers += ledger.events.detail("optimizer_index", 0).tolist()
    for parameter in ledger.parameters:
        numbers += parameter.optimizers
    return max(numbers) + 1


def _renamed(parameter: Parameter, rank: int, first: int) -> Parameter:
    whole = parameter.unsharded_of
    aliases = [named(rank, alias) for alias in parameter.aliases]
    optimizers = [first + optimizer for optimizer in parameter.optimizers]
    return replace(
        parameter,
        name=named(rank, parameter.name),
        aliases=tuple(aliases),
        optimizers=tuple(optimizers),
        rank=rank,
        unsharded_of=named(rank, whole) if whole else "",
    )


def _pick(array: ndarray, rows: ndarray, missing: float = np.nan) -> ndarray:
    """Return these rows of an array; -1 is a row of what is missing."""
    elements = array.shape[1:]
    row_of_missing = np.full((1, *elements), missing, array.dtype)
    array = np.concatenate([array, row_of_missing])
    picked: ndarray = array[rows]
    return picked


# --- events ----------------------------------------------------------------------------------


def _rows(ledgers: list[Events]) -> ndarray:
    """Put all events in one order, each rank's in its own: turn by turn between collectives, together in them.

    Returns rows × ranks, which of its events each rank has in the row (-1: none).
    """
    collectives = list(map(_collectives, ledgers))
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
    collectives = [""] * len(events)
    codes = events.column("details")
    is_sync = events.where("kind", "sync")
    for event in np.flatnonzero(is_sync).tolist():
        details = events.details[codes[event]]
        entries = map(details.get, ("op", "bytes", "parameters"))
        collectives[event] = str(list(entries))
    return collectives


def _events(rows: ndarray, ranks: list[RankLedger]) -> Events:
    """Return the events of the rows: of those that several ranks took part in, the first one's."""
    joined = Events.join([_shifted(one) for one in ranks])
    counts = [len(one.ledger.events) for one in ranks]
    takes_part = rows >= 0
    first = takes_part.argmax(axis=1)
    before = np.cumsum([0, *counts])[first]
    places = before + rows[np.arange(len(rows)), first]
    codes = joined.codes[places]
    if len(ranks) > 1:
        together = takes_part.all(axis=1)
        codes[together, _RANK] = -1
    return Events(codes, joined.numbers[places], joined.tables)


def _shifted(one: RankLedger) -> Events:
    """Return the events of a rank, whose optimizers are counted over all ranks."""
    events = one.ledger.events
    codes = np.array(events.codes)
    codes[:, _RANK] = one.rank
    table = list(events.tables["details"])
    steps = events.where("kind", "step", "schedule")
    of_steps = codes[steps, _DETAILS]
    used, places = np.unique(of_steps, return_inverse=True)
    codes[steps, _DETAILS] = len(table) + places
    for code in used.tolist():
        details = json.loads(table[code])
        details["optimizer_index"] = details.get("optimizer_index", 0) + one.first
        table.append(json.dumps(details))
    return Events(codes, events.numbers, {**events.tables, "details": table})


def _meta(ranks: list[RankLedger]) -> dict[str, Any]:
    """Return what is said of all ranks together, and of each how its recording stopped and ended."""
    metas = {str(one.rank): one.ledger.meta for one in ranks}
    meta = dict(ranks[0].ledger.meta)
    meta.pop("rank", None)
    for entry in ("optimizers", "notes"):
        meta[entry] = []
        for of_rank in metas.values():
            meta[entry] += of_rank.get(entry, ())
    meta["notes"] = list(dict.fromkeys(meta["notes"]))
    stopped = {rank: m["stopped"] for rank, m in metas.items() if "stopped" in m}
    if stopped:
        meta["stopped"] = stopped
    ended = {rank: of_rank.get("ended") for rank, of_rank in metas.items()}
    if any(end != meta.get("ended") for end in ended.values()):
        meta["ended"] = ended
    return meta
