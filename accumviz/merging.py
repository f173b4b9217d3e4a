"""Ledgers of several ranks -> one. Pure: stdlib and numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from accumviz.ledger import Event, Ledger

# One row of the merged ledger: for each rank that took part, its place in the list and its event.
_Row = list[tuple[int, int]]


def name(rank: int, parameter: str) -> str:
    """A parameter's name among those of all ranks.

    >>> name(0, "weight")
    'rank 0 · weight'
    """
    return f"rank {rank} · {parameter}"


def merge(ledgers: Sequence[Ledger]) -> Ledger:
    """See `Ledger.merge`."""
    from accumviz.ledger import Ledger

    if not ledgers:
        raise ValueError("no ledger to merge; pass the ledger of each rank, or its file")
    numbers = [int(ledger.meta.get("rank", place)) for place, ledger in enumerate(ledgers)]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"ranks {numbers} to merge; expected each once (ledger.meta['rank'] says which it is)")
    order = sorted(range(len(ledgers)), key=numbers.__getitem__)
    ledgers, numbers = [ledgers[i] for i in order], [numbers[i] for i in order]
    rows = _rows(ledgers)
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
    first = 0
    for place, ledger in enumerate(ledgers):
        own, last = _places(rows, place)
        columns["contribution"].append(_pick(ledger.contribution, own, np.nan))
        columns["grad"].append(_pick(ledger.grad, last, np.nan))
        # What others do leaves this rank's `.grad` as it was.
        columns["state"].append(_pick(ledger.state, own, 0) | _pick(ledger.state & 1, last, 0))
        for p, (contribution, grad) in ledger.exact.items():
            exact[first + p] = _pick(contribution, own, np.nan), _pick(grad, last, np.nan)
        first += len(ledger.parameters)
    return Ledger(
        tuple(parameters),
        tuple(_event(i, row, ledgers, numbers, offsets) for i, row in enumerate(rows)),
        np.concatenate(columns["contribution"], axis=1),
        np.concatenate(columns["grad"], axis=1),
        np.concatenate(columns["state"], axis=1),
        exact,
        sources={file: text for ledger in reversed(ledgers) for file, text in ledger.sources.items()},
        meta=_meta(ledgers, numbers),
        complete=all(ledger.complete for ledger in ledgers),
    )


def _rows(ledgers: Sequence[Ledger]) -> list[_Row]:
    """All events, each rank's in its order: turn by turn between collectives, together in them."""
    at = [0] * len(ledgers)
    rows: list[_Row] = []
    while any(at[place] < len(ledger) for place, ledger in enumerate(ledgers)):
        waiting = [place for place, ledger in enumerate(ledgers) if at[place] < len(ledger)]
        free = [place for place in waiting if ledgers[place][at[place]].kind != "sync"]
        if free:
            rows += [[(place, at[place])] for place in free]
            for place in free:
                at[place] += 1
            continue
        events = {place: ledgers[place][at[place]] for place in waiting}
        alike: dict[Any, _Row] = {}
        for place, event in events.items():
            alike.setdefault(_collective(event), []).append((place, event.index))
        rows += alike.values()
        for place in waiting:
            at[place] += 1
    return rows


def _collective(event: Event) -> tuple[Any, ...]:
    return (event.details.get("op"), event.details.get("bytes"), tuple(event.details.get("parameters", ())))


def _places(rows: list[_Row], place: int) -> tuple[np.ndarray, np.ndarray]:
    """For each row, this rank's event in it (-1: none), and its last event so far."""
    own = np.array([dict(row).get(place, -1) for row in rows], np.int64)
    return own, np.maximum.accumulate(own) if own.size else own


def _pick(array: np.ndarray, where: np.ndarray, missing: float) -> np.ndarray:
    padded = np.concatenate([array, np.full((1, *array.shape[1:]), missing, array.dtype)])
    picked: np.ndarray = padded[where]
    return picked


def _event(index: int, row: _Row, ledgers: Sequence[Ledger], numbers: list[int], offsets: list[int]) -> Event:
    place, at = row[0]
    event = ledgers[place][at]
    details = dict(event.details)
    if event.kind == "step":
        details["optimizer_index"] = details.get("optimizer_index", 0) + offsets[place]
    if len(row) < len(ledgers) or len(row) == 1:
        return replace(event, index=index, details=details, rank=numbers[place])
    # The ranks' bytes are there at once; their peaks were reached when it suited each.
    allocated = sum(ledgers[place][at].allocated for place, at in row)
    return replace(event, index=index, details=details, rank=None, allocated=allocated, peak=float("nan"))


def _optimizers(ledger: Ledger) -> int:
    used = [o for p in ledger.parameters for o in p.optimizers]
    used += [event.details.get("optimizer_index", 0) for event in ledger if event.kind == "step"]
    return max([len(ledger.meta.get("optimizers", ())), *(o + 1 for o in used)])


def _meta(ledgers: Sequence[Ledger], numbers: list[int]) -> dict[str, Any]:
    meta = {key: value for key, value in ledgers[0].meta.items() if key != "rank"}
    stopped = {str(n): x.meta["stopped"] for n, x in zip(numbers, ledgers, strict=True) if "stopped" in x.meta}
    optimizers = [o for ledger in ledgers for o in ledger.meta.get("optimizers", ())]
    notes = list(dict.fromkeys(note for ledger in ledgers for note in ledger.meta.get("notes", ())))
    meta |= {"notes": notes} if notes else {}
    return meta | {"merged": numbers, "optimizers": optimizers} | ({"stopped": stopped} if stopped else {})
