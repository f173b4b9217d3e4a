"""Export a ledger: CSV, JSON, TensorBoard's events."""

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
from accumviz.ledger.shares import Share
from accumviz.show import encoded, literal

_TEXTS = ("kind", "label", "file", "line", "source", "within")
_NUMBERS = ("time", "loss", "scale", "saved_before", "saved_after", "allocated", "peak")
_OF_PARAMETER = (
    "parameter",
    "contribution",
    "grad",
    "present",
    "changed",
    "consumed_by",
    "erased_by",
)


def to_csv(ledger: Ledger, file: TextIO) -> None:
    """Write one row for each event and parameter.

    `contribution` and `grad` are 2-norms, `consumed_by` and `erased_by` events; what is not known is empty.
    A text that a spreadsheet would run as a formula gets a leading apostrophe.

    >>> import sys
    >>> to_csv(Ledger.build([], []), sys.stdout)
    event,rank,kind,label,file,line,source,within,time,loss,scale,...,grad,present,changed,consumed_by,erased_by
    """
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(("event", "rank", *_TEXTS, *_NUMBERS, *_OF_PARAMETER))
    consumed, erased = ledger.outcomes.consumed, ledger.outcomes.erased
    for event in ledger:
        e = event.index
        about = [e, "" if event.rank is None else event.rank]
        about += [_cell(getattr(event, name)) for name in (*_TEXTS, *_NUMBERS)]
        for p, parameter in enumerate(ledger.parameters):
            state = int(ledger.state[e, p])
            of_parameter = [
                _cell(parameter.name),
                _cell(float(ledger.contribution[e, p])),
                _cell(float(ledger.grad[e, p])),
                bool(state & PRESENT),
                bool(state & CHANGED),
                _event_or_blank(int(consumed[e, p])),
                _event_or_blank(int(erased[e, p])),
            ]
            rows.writerow(about + of_parameter)


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        text = literal(value)
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
    return "" if isinstance(value, float) and math.isnan(value) else value


def _event_or_blank(index: int) -> int | str:
    return "" if index < 0 else index


def to_json(ledger: Ledger, file: TextIO) -> None:
    """Write one object: `meta`, `parameters`, and `events` with each parameter's 2-norms by its name.

    NaN and the infinities are texts, as JSON has no numbers for them.

    >>> import sys
    >>> to_json(Ledger.build([], [dict(kind="backward", label="loss")]), sys.stdout)
    {"complete": true, "meta": {}, "parameters": [],
    "events": [
    {"event": 0, "rank": null, "kind": "backward", "label": "loss", ... "contribution": {}, "grad": {}}
    ]}
    """
    parameters = []
    for p in ledger.parameters:
        about = {"name": p.name, "shape": p.shape, "dtype": p.dtype, "device": p.device}
        parameters.append(about | {"optimizers": p.optimizers})
    head = f'"complete": {json.dumps(ledger.complete)}, "meta": {_dumps(ledger.meta)}'
    file.write(f'{{{head}, "parameters": {_dumps(parameters)},\n"events": [')
    for event in ledger:
        file.write(",\n" if event.index else "\n")
        row: dict[str, Any] = {"event": event.index, "rank": event.rank}
        row |= {name: getattr(event, name) for name in (*_TEXTS, *_NUMBERS)}
        row["details"] = dict(event.details)
        row["contribution"] = _by_name(ledger, ledger.contribution[event.index])
        row["grad"] = _by_name(ledger, ledger.grad[event.index])
        file.write(_dumps(row))
    file.write("\n]}\n")


def _by_name(ledger: Ledger, norms: np.ndarray) -> dict[str, float]:
    """Return the known norms of one event by the names of the parameters."""
    pairs = zip(ledger.parameters, norms.tolist(), strict=True)
    return {p.name: norm for p, norm in pairs if not math.isnan(norm)}


def to_tensorboard(ledger: Ledger, folder: Path) -> None:
    """Write the scalars of each step as the events that TensorBoard shows; steps are counted for each optimizer.

    The scalars are `learning rate`, `gradient norm` of an optimizer and of each of its parameters, `sum of
    shares` of each objective, and where there is one, `loss scale`. Raises `ImportError`, with the command
    that installs it, when tensorboard is missing.
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
            summary = Summary()
            for tag, value in scalars.items():
                summary.value.add(tag=tag, simple_value=value)
            writer.add_event(Entry(wall_time=time, step=step, summary=summary))
    finally:
        writer.close()


def _scalars(ledger: Ledger) -> Iterator[tuple[float, int, dict[str, float]]]:
    """Yield for each step that changed weights its time, its number among its optimizer's, and its scalars."""
    names = ledger.meta.get("optimizers", ())
    counts: dict[int, int] = {}
    for event in ledger.of("step"):
        if event.skipped:
            continue
        optimizer = int(event.details.get("optimizer_index", 0))
        number = counts.get(optimizer, 0)
        counts[optimizer] = number + 1
        known = optimizer < len(names)
        name = str(names[optimizer]) if known else f"optimizer {optimizer}"
        shares = list(ledger.shares().of(event.index))
        scalars = _rates(event, name) | _norms(ledger, event.index, optimizer, name)
        scalars |= _sums_of_shares(shares)
        scale = ledger[shares[-1].backward].details.get("amp_scale") if shares else None
        if isinstance(scale, int | float):
            scalars[f"loss scale/{name}"] = float(scale)
        yield event.time, number, scalars


def _rates(step: Event, name: str) -> dict[str, float]:
    rates = list(step.details.get("lr") or [])
    if len(rates) == 1:
        return {f"learning rate/{name}": float(rates[0])}
    return {f"learning rate/{name}/group {g}": float(r) for g, r in enumerate(rates)}


def _norms(ledger: Ledger, step: int, optimizer: int, name: str) -> dict[str, float]:
    norms = {}
    for p, parameter in enumerate(ledger.parameters):
        norm = float(ledger.grad[step, p])
        if optimizer in parameter.optimizers and not math.isnan(norm):
            norms[f"gradient norm of {name}/{parameter.name}"] = norm
    return {f"gradient norm/{name}": math.hypot(*norms.values())} | norms


def _sums_of_shares(shares: list[Share]) -> dict[str, float]:
    """Return the sum of each objective's shares, where all of them are known."""
    sums: dict[str, float] = {}
    for row in shares:
        tag = f"sum of shares/{row.objective}"
        sums[tag] = sums.get(tag, 0.0) + row.share
    return {tag: total for tag, total in sums.items() if not math.isnan(total)}


def _dumps(value: Any) -> str:
    return json.dumps(_encoded(value), allow_nan=False, default=str)


def _encoded(value: Any) -> Any:
    """Return a value with NaN and the infinities as texts."""
    if isinstance(value, dict):
        return {str(key): _encoded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(one) for one in value]
    return encoded(value) if isinstance(value, float) else value
