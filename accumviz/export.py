"""Export a ledger: CSV, JSON, TensorBoard's events."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from accumviz.ledger.events import CHANGED, PRESENT, Event, Parameter
from accumviz.ledger.ledger import Ledger
from accumviz.ledger.shares import Share
from accumviz.show import encoded, literal

_OF_EVENT = (
    "kind",
    "label",
    "file",
    "line",
    "source",
    "within",
    "time",
    "loss",
    "scale",
    "saved_before",
    "saved_after",
    "allocated",
    "peak",
)
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
    rows.writerow(("event", "rank", *_OF_EVENT, *_OF_PARAMETER))
    for event in ledger:
        index = event.index
        values = [index, event.rank, *_fields(event).values()]
        about = [_cell(value) for value in values]
        for p in range(len(ledger.parameters)):
            rows.writerow(about + _cells_of_parameter(ledger, index, p))


def _fields(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in _OF_EVENT}


def _cells_of_parameter(ledger: Ledger, event: int, p: int) -> list[Any]:
    """Return the cells of `_OF_PARAMETER` for one event and parameter."""
    state = int(ledger.state[event, p])
    outcomes = ledger.outcomes
    values = [
        ledger.parameters[p].name,
        float(ledger.contribution[event, p]),
        float(ledger.grad[event, p]),
        bool(state & PRESENT),
        bool(state & CHANGED),
        _event_or_none(outcomes.consumed[event, p]),
        _event_or_none(outcomes.erased[event, p]),
    ]
    return [_cell(value) for value in values]


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        text = literal(value)
        is_formula = text.startswith(("=", "+", "-", "@"))
        return f"'{text}" if is_formula else text
    if isinstance(value, float) and math.isnan(value):
        return ""
    return "" if value is None else value


def _event_or_none(index: np.int64) -> int | None:
    return None if index < 0 else int(index)


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
    about = {
        "complete": ledger.complete,
        "meta": ledger.meta,
        "parameters": [_described(parameter) for parameter in ledger.parameters],
    }
    head = _dumps(about).removesuffix("}")
    file.write(head)
    file.write(',\n"events": [')
    before = "\n"
    for event in ledger:
        row = _dumps(_row(ledger, event))
        file.write(before + row)
        before = ",\n"
    file.write("\n]}\n")


def _described(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "shape": parameter.shape,
        "dtype": parameter.dtype,
        "device": parameter.device,
        "optimizers": parameter.optimizers,
    }


def _row(ledger: Ledger, event: Event) -> dict[str, Any]:
    index = event.index
    return {
        "event": index,
        "rank": event.rank,
        **_fields(event),
        "details": event.details,
        "contribution": _by_name(ledger, ledger.contribution[index]),
        "grad": _by_name(ledger, ledger.grad[index]),
    }


def _by_name(ledger: Ledger, norms: np.ndarray) -> dict[str, float]:
    """Return the known norms of one event by the names of the parameters."""
    norm_of = {}
    for p, parameter in enumerate(ledger.parameters):
        norm = float(norms[p])
        if not math.isnan(norm):
            norm_of[parameter.name] = norm
    return norm_of


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
    counts: Counter[int] = Counter()
    for event in ledger.of("step"):
        if event.skipped:
            continue
        optimizer = int(event.details.get("optimizer_index", 0))
        scalars = _scalars_of(ledger, event, optimizer)
        yield event.time, counts[optimizer], scalars
        counts[optimizer] += 1


def _scalars_of(ledger: Ledger, step: Event, optimizer: int) -> dict[str, float]:
    name = _optimizer_name(ledger, optimizer)
    shares = list(ledger.shares().of(step.index))
    scalars = _rates(step, name)
    scalars |= _norms(ledger, step.index, optimizer, name)
    scalars |= _sums_of_shares(shares)
    if shares:
        details = ledger[shares[-1].backward].details
        scale = details.get("amp_scale")
        if isinstance(scale, int | float):
            scalars[f"loss scale/{name}"] = float(scale)
    return scalars


def _optimizer_name(ledger: Ledger, optimizer: int) -> str:
    names = ledger.meta.get("optimizers", ())
    if optimizer < len(names):
        return str(names[optimizer])
    return f"optimizer {optimizer}"


def _rates(step: Event, name: str) -> dict[str, float]:
    tag = f"learning rate/{name}"
    rates = step.details.get("lr") or []
    if len(rates) == 1:
        return {tag: float(rates[0])}
    return {f"{tag}/group {g}": float(rate) for g, rate in enumerate(rates)}


def _norms(ledger: Ledger, step: int, optimizer: int, name: str) -> dict[str, float]:
    norms = {}
    for p, parameter in enumerate(ledger.parameters):
        norm = float(ledger.grad[step, p])
        if optimizer in parameter.optimizers and not math.isnan(norm):
            norms[f"gradient norm of {name}/{parameter.name}"] = norm
    whole = math.hypot(*norms.values())
    return {f"gradient norm/{name}": whole, **norms}


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
    if isinstance(value, Mapping):
        return {str(name): _encoded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, float):
        return encoded(value)
    return value
