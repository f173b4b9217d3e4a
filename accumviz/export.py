"""Export a ledger: CSV and JSON."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict
from typing import Any, TextIO

import numpy as np

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
