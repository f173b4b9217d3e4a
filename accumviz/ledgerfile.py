"""A ledger as chunks of a file: events as JSON, numbers as columns; what a recording appends, and how it is read."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from accumviz.files import Contents
    from accumviz.ledger import Ledger

_FLOATS = ("time", "loss", "scale", "saved_before", "saved_after")
# In a file only where there was a CUDA device; older files know nothing of them.
_ON_DEVICES = ("allocated", "peak")


def header(ledger: Ledger) -> dict[str, Any]:
    """What a file says once: the parameters and where the recording was made."""
    return {"parameters": [_known(asdict(p)) for p in ledger.parameters], "meta": ledger.meta}


def chunk(ledger: Ledger) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The events and their arrays."""
    columns = {*_FLOATS, *_ON_DEVICES, "index"}
    rows = [_known({k: v for k, v in vars(e).items() if k not in columns}) for e in ledger.events]
    arrays: dict[str, np.ndarray] = {
        "contribution": ledger.contribution,
        "grad": ledger.grad,
        "state": ledger.state,
        **{name: np.array([getattr(e, name) for e in ledger.events], np.float64) for name in _FLOATS},
    }
    for name in _ON_DEVICES:
        column = np.array([getattr(e, name) for e in ledger.events], np.float64)
        if np.isfinite(column).any():
            arrays[name] = column
    for p, (contribution, grad) in ledger.exact.items():
        arrays |= {f"contribution/{p}": contribution, f"grad/{p}": grad}
    return {"events": rows, "sources": ledger.sources}, arrays


def _known(row: dict[str, Any]) -> dict[str, Any]:
    """Without what only ledgers of several processes have: older readers know the rest."""
    return {
        name: value for name, value in row.items() if name not in ("rank", "unsharded_of") or value not in (None, "")
    }


def decode(contents: Contents) -> Ledger:
    """Put the chunks of a file together; raises ValueError, KeyError or TypeError when they do not fit."""
    from accumviz.ledger import Event, Ledger

    first = contents.chunks[0][0]
    described, about = first["parameters"], first["meta"]
    events: list[Event] = []
    sources: dict[str, str] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for meta, arrays in contents.chunks[1:]:
        names = (*_FLOATS, *(name for name in _ON_DEVICES if name in arrays))
        floats = [arrays[name].tolist() for name in names]
        for row, *numbers in zip(meta["events"], *floats, strict=True):
            events.append(Event(len(events), **row, **dict(zip(names, numbers, strict=True))))
        sources.update(meta["sources"])
        # A recording's file says again what has changed since it began.
        described, about = meta.get("parameters", described), meta.get("meta", about)
        for name, array in arrays.items():
            parts.setdefault(name, []).append(array)
    parameters = tuple(_parameter(row) for row in described)
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    none = np.zeros((0, len(parameters)))
    exact = {}
    for p, parameter in enumerate(parameters):
        if f"grad/{p}" in joined:
            exact[p] = (joined[f"contribution/{p}"], joined[f"grad/{p}"])
            if {array.shape for array in exact[p]} != {(len(events), parameter.numel)}:
                raise ValueError(f"the elements of {parameter.name!r} do not have its shape {parameter.shape}")
    return Ledger(
        parameters,
        tuple(events),
        joined.get("contribution", none),
        joined.get("grad", none),
        joined.get("state", none),
        exact,
        sources=sources,
        meta=about,
        complete=contents.complete,
    )


def _parameter(row: dict[str, Any]) -> Any:
    from accumviz.ledger import Parameter

    for name in ("shape", "optimizers"):
        if not all(isinstance(n, int) and n >= 0 for n in row[name]):
            raise ValueError(f"{name} is {row[name]!r}, expected whole numbers")
    tuples = {name: tuple(row[name]) for name in ("shape", "optimizers", "aliases")}
    return Parameter(**{**row, **tuples})
