"""Ledger -> the formats of others: a table (CSV), JSON, the trace that ui.perfetto.dev opens, TensorBoard's events."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from accumviz.ledger.events import CHANGED, PRESENT, Event
from accumviz.ledger.ledger import Ledger
from accumviz.ledger.lifecycle import steps_of
from accumviz.show import encoded

_TEXTS = ("kind", "label", "file", "line", "source", "within")
_NUMBERS = ("time", "loss", "scale", "saved_before", "saved_after", "allocated", "peak")


def to_csv(ledger: Ledger, file: TextIO) -> None:
    """One row for each event and parameter: 2-norms of `contribution` and `grad`, and what became of it.

    Numbers that are not known are empty, `consumed_by` and `erased_by` are events.

    >>> import sys
    >>> to_csv(Ledger.build([], []), sys.stdout)
    event,rank,kind,label,file,line,source,within,time,loss,scale,...,grad,present,changed,consumed_by,erased_by
    """
    rows = csv.writer(file, lineterminator="\n")
    results = (
        "parameter",
        "contribution",
        "grad",
        "present",
        "changed",
        "consumed_by",
        "erased_by",
    )
    rows.writerow(("event", "rank", *_TEXTS, *_NUMBERS, *results))
    consumed, erased = ledger.fates.consumed, ledger.fates.erased
    for event in ledger:
        e = event.index
        about = [
            e,
            "" if event.rank is None else event.rank,
            *(getattr(event, name) for name in _TEXTS),
        ]
        about += [_blank(getattr(event, name)) for name in _NUMBERS]
        for p, parameter in enumerate(ledger.parameters):
            state = int(ledger.state[e, p])
            norms = (
                _blank(float(ledger.contribution[e, p])),
                _blank(float(ledger.grad[e, p])),
            )
            fate = (_event(int(consumed[e, p])), _event(int(erased[e, p])))
            rows.writerow(
                (
                    *about,
                    parameter.name,
                    *norms,
                    bool(state & PRESENT),
                    bool(state & CHANGED),
                    *fate,
                )
            )


def to_json(ledger: Ledger, file: TextIO) -> None:
    """One object: `meta`, `parameters`, and `events` with each parameter's 2-norms by its name.

    NaN and the infinities are texts, as JSON has no numbers for them.

    >>> import sys
    >>> to_json(Ledger.build([], [dict(kind="backward", label="loss")]), sys.stdout)
    {"complete": true, "meta": {}, "parameters": [],
    "events": [
    {"event": 0, "rank": null, "kind": "backward", "label": "loss", ... "contribution": {}, "grad": {}}
    ]}
    """
    parameters = [
        {
            "name": p.name,
            "shape": list(p.shape),
            "dtype": p.dtype,
            "device": p.device,
            "optimizers": list(p.optimizers),
        }
        for p in ledger.parameters
    ]
    head = f'"complete": {json.dumps(ledger.complete)}, "meta": {_dumps(ledger.meta)}'
    file.write(f'{{{head}, "parameters": {_dumps(parameters)},\n"events": [')
    for event in ledger:
        file.write(",\n" if event.index else "\n")
        row: dict[str, Any] = {"event": event.index, "rank": event.rank}
        row |= {name: getattr(event, name) for name in (*_TEXTS, *_NUMBERS)} | {
            "details": dict(event.details)
        }
        for name, norms in (
            ("contribution", ledger.contribution),
            ("grad", ledger.grad),
        ):
            known = enumerate(ledger.parameters)
            row[name] = {
                p.name: float(norms[event.index, i])
                for i, p in known
                if not math.isnan(norms[event.index, i])
            }
        file.write(_dumps(row))
    file.write("\n]}\n")


def to_perfetto(ledger: Ledger, file: TextIO) -> None:
    """A trace in Chrome's format, in microseconds: a process for each rank, a track for each kind of event.

    >>> import sys
    >>> to_perfetto(Ledger.build([], []), sys.stdout)
    {"displayTimeUnit": "ms", "traceEvents": [
    ]}
    """
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    file.writelines(
        (",\n" if n else "\n") + _dumps(row) for n, row in enumerate(_trace(ledger))
    )
    file.write("\n]}\n")


def to_tensorboard(ledger: Ledger, folder: Path) -> None:
    """The scalars of each step, counted from 0 for each optimizer, as the events that TensorBoard shows.

    `learning rate`, `gradient norm` of an optimizer and of each of its parameters, `sum of shares` of each
    objective, and where there are such, `clip factor` and `loss scale`. Raises `ImportError`, with the command that
    installs it, when tensorboard is not there.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event as Entry
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as missing:
        raise ImportError(
            "export --to tensorboard needs tensorboard: pip install tensorboard"
        ) from missing
    folder.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(folder))
    try:
        for time, step, scalars in _scalars(ledger):
            values = [
                Summary.Value(tag=tag, simple_value=value)
                for tag, value in scalars.items()
            ]
            writer.add_event(
                Entry(wall_time=time, step=step, summary=Summary(value=values))
            )
    finally:
        writer.close()


def _scalars(ledger: Ledger) -> Iterator[tuple[float, int, dict[str, float]]]:
    """For each step that changed weights its time, its number among its optimizer's, and its scalars."""
    shares, names = ledger.shares(), ledger.meta.get("optimizers", ())
    for optimizer in sorted({o for p in ledger.parameters for o in p.optimizers}):
        name = (
            str(names[optimizer])
            if optimizer < len(names)
            else f"optimizer {optimizer}"
        )
        columns = [
            i for i, p in enumerate(ledger.parameters) if optimizer in p.optimizers
        ]
        for number, step in enumerate(steps_of(ledger, (optimizer,)).tolist()):
            event = ledger[step]
            rates = event.details.get("lr") or ()
            several = len(rates) > 1
            found = {
                f"learning rate/{name}{f'/group {g}' * several}": float(rate)
                for g, rate in enumerate(rates)
            }
            norms = ledger.grad[step, columns].astype(float)
            found[f"gradient norm/{name}"] = math.sqrt(float(np.nansum(norms**2)))
            found |= {
                f"gradient norm of {name}/{ledger.parameters[p].name}": norm
                for p, norm in zip(columns, norms.tolist(), strict=True)
                if not math.isnan(norm)
            }
            rows = shares.of(step)
            rows = rows.take(rows.optimizer == optimizer)
            for objective in np.unique(rows.objective).tolist():
                known = rows.share[rows.objective == objective]
                if not np.isnan(known).any():
                    found[f"sum of shares/{shares.objectives[objective]}"] = float(
                        known.sum()
                    )
            if rows.clipped.size and (rows.clipped != 1).any():
                found[f"clip factor/{name}"] = float(rows.clipped[-1])
            scale = (
                ledger[int(rows.backward[-1])].details.get("amp_scale")
                if len(rows)
                else None
            )
            if isinstance(scale, int | float):
                found[f"loss scale/{name}"] = float(scale)
            yield event.time, number, found


def _trace(ledger: Ledger) -> Iterator[dict[str, Any]]:
    tracks: dict[tuple[int, str], int] = {}
    for event in ledger:
        process = event.rank or 0
        if not any(known == process for known, _ in tracks):
            yield {
                "ph": "M",
                "pid": process,
                "name": "process_name",
                "args": {"name": f"rank {process}"},
            }
        track = tracks.get((process, event.kind))
        if track is None:
            track = tracks[process, event.kind] = len(tracks)
            about = {"ph": "M", "pid": process, "tid": track, "name": "thread_name"}
            yield about | {"args": {"name": event.kind}}
        at = {"pid": process, "tid": track, "ts": round(event.time * 1e6, 3)}
        yield at | {
            "ph": "i",
            "s": "t",
            "name": event.label or event.kind,
            "cat": event.kind,
            "args": _told(event),
        }
        if event.kind == "backward" and math.isfinite(event.loss):
            counter = {
                "ph": "C",
                "pid": process,
                "ts": at["ts"],
                "name": f"loss: {event.label}",
            }
            yield counter | {"args": {"loss": event.loss}}


def _told(event: Event) -> dict[str, Any]:
    numbers = {
        name: getattr(event, name)
        for name in _NUMBERS[1:]
        if not math.isnan(getattr(event, name))
    }
    return {
        "event": event.index,
        "line": f"{event.file}:{event.line}",
        "source": event.source,
        **numbers,
    } | dict(event.details)


def _blank(value: float) -> float | str:
    return "" if math.isnan(value) else value


def _event(index: int) -> int | str:
    return "" if index < 0 else index


def _dumps(value: Any) -> str:
    return json.dumps(_plain(value), allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return encoded(value) if isinstance(value, float) else value
