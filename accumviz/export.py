"""Export a ledger: CSV, pandas, JSON, TensorBoard's events."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from accumviz import needs
from accumviz.checks.report import plain
from accumviz.ledger.events import Event
from accumviz.ledger.ledger import COLUMNS, OF_EVENT, Ledger, rows
from accumviz.show import literal


def to_csv(ledger: Ledger, file: TextIO) -> None:
    """Write one row for each event and parameter.

    `contribution` and `grad` are 2-norms, `consumed_by` and `erased_by` events; what is not known is empty.
    A text that a spreadsheet would run as a formula gets a leading apostrophe.

    >>> import sys
    >>> to_csv(Ledger.build([], []), sys.stdout)
    event,kind,label,file,line,source,within,rank,time,loss,...,grad,present,changed,consumed_by,erased_by
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows(ledger):
        writer.writerow([_cell(value) for value in row])


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        text = literal(value)
        is_formula = text.startswith(("=", "+", "-", "@"))
        return f"'{text}" if is_formula else text
    if isinstance(value, float) and math.isnan(value):
        return ""
    return value


def to_json(ledger: Ledger, file: TextIO) -> None:
    """Write one object: `meta`, `parameters`, and `events` with each parameter's 2-norms by its name.

    NaN and the infinities are texts, as JSON has no numbers for them.

    >>> import sys
    >>> to_json(Ledger.build([], [dict(kind="backward", label="loss")]), sys.stdout)
    {"complete": true, "meta": {}, "parameters": [],
    "events": [
    {"event": 0, "kind": "backward", "label": "loss", ... "contribution": {}, "grad": {}}
    ]}
    """
    about = {
        "complete": ledger.complete,
        "meta": ledger.meta,
        "parameters": [asdict(parameter) for parameter in ledger.parameters],
    }
    head = _dumps(about).removesuffix("}")
    file.write(f'{head},\n"events": [\n')
    before = ""
    for event in ledger:
        file.write(before + _dumps(_row(ledger, event)))
        before = ",\n"
    file.write("\n]}\n")


def _row(ledger: Ledger, event: Event) -> dict[str, Any]:
    return {
        "event": event.index,
        **{name: getattr(event, name) for name in OF_EVENT},
        "details": event.details,
        "contribution": _by_name(ledger, ledger.contribution[event.index]),
        "grad": _by_name(ledger, ledger.grad[event.index]),
    }


def _by_name(ledger: Ledger, norms: np.ndarray) -> dict[str, float]:
    """Return the norms of one event by the names of the parameters, where there are any."""
    by_name = {}
    for parameter, norm in zip(ledger.parameters, norms.tolist(), strict=True):
        by_name[parameter.name] = norm
    return _without_nan(by_name)


def _without_nan(scalars: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if not math.isnan(value)}


def _dumps(value: Any) -> str:
    return json.dumps(plain(value), allow_nan=False, default=str)


def to_tensorboard(ledger: Ledger, folder: Path) -> None:
    """Write the scalars of each step as the events that TensorBoard shows; steps are counted for each optimizer.

    The scalars are `learning rate`, `gradient norm` of an optimizer and of each of its parameters, `sum of
    shares` of each objective where they are known. Raises `ImportError`, with the command that installs it, when
    tensorboard is missing.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event as Entry
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as missing:
        raise needs.explained(missing, "export --to tensorboard") from missing
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
    names = dict(enumerate(ledger.meta.get("optimizers", ())))
    for event in ledger.of("step"):
        if event.skipped:
            continue
        optimizer = int(event.details.get("optimizer_index", 0))
        name = names.get(optimizer, f"optimizer {optimizer}")
        scalars = _norms(ledger, event.index, optimizer, name)
        scalars |= _rates(event, name)
        scalars |= _sums_of_shares(ledger, event)
        yield event.time, counts[optimizer], _without_nan(scalars)
        counts[optimizer] += 1


def _rates(step: Event, name: str) -> dict[str, float]:
    """Return the learning rate of each group of an optimizer."""
    rates = {}
    for group, rate in enumerate(step.details.get("lr", ())):
        tag = f"learning rate/{name}"
        if group:
            tag += f"/group {group}"
        rates[tag] = float(rate)
    return rates


def _sums_of_shares(ledger: Ledger, step: Event) -> dict[str, float]:
    """Return the sum of the shares of each objective in a step."""
    sums: dict[str, float] = {}
    for row in ledger.shares().of(step.index):
        tag = f"sum of shares/{row.objective}"
        sums[tag] = sums.get(tag, 0.0) + row.share
    return sums


def _norms(ledger: Ledger, step: int, optimizer: int, name: str) -> dict[str, float]:
    """Return the norm of an optimizer's gradient, and of each parameter's."""
    norms = {}
    for p, parameter in enumerate(ledger.parameters):
        norm = float(ledger.grad[step, p])
        if optimizer in parameter.optimizers and not math.isnan(norm):
            norms[f"gradient norm of {name}/{parameter.name}"] = norm
    whole = math.hypot(*norms.values())
    return {f"gradient norm/{name}": whole, **norms}
