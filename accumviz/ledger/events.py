"""The parts of a ledger: parameters, events and their bits, and many events as columns."""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar, overload

import numpy as np
from numpy import ndarray

# Bits of `Ledger.state`, one byte per event and parameter.
PRESENT, CONTRIBUTED, CHANGED = 1, 2, 4
KINDS = (
    "backward",
    "zero_grad",
    "step",
    "unscale",
    "clip",
    "sync",
    "edit",
    "schedule",
    "loader",
)
# What only events of one kind have, by name.
Details = Mapping[str, Any]
# One object for all unknown numbers: events that know as little as each other are equal.
_NAN = float("nan")

# The columns of an event, each with what stands in it by default: places in a table of texts (of `details` and
# `frames`: JSON texts), but `line` and `rank` (-1: all); and numbers.
CODES: dict[str, Any] = {
    "kind": "",
    "label": "",
    "file": "",
    "line": 0,
    "source": "",
    "within": "",
    "rank": -1,
    "details": "{}",
    "frames": "[]",
    "via": "",
}
TABLES = tuple(name for name, default in CODES.items() if isinstance(default, str))
NUMBERS = {
    "time": 0.0,
    "loss": _NAN,
    "saved_before": _NAN,
    "saved_after": _NAN,
}
_AT = {name: i for i, name in enumerate((*CODES, *NUMBERS))}


@dataclass(frozen=True)
class Parameter:
    """A recorded leaf: its name, shape, the dtype of its `.grad`, and the optimizers that own it (indices).

    `group` is the keyword of `record` under which it came, `aliases` are its other names where it
    is used more than once.

    In a ledger of several processes, `rank` is the one it lives in. `unsharded_of` names the
    parameter whose whole gradient this is, kept by FSDP until it is reduced and scattered.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    group: str = ""
    aliases: tuple[str, ...] = ()
    optimizers: tuple[int, ...] = ()
    requires_grad: bool = True
    rank: int | None = None
    unsharded_of: str = ""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Event:
    """One thing that happened to `.grad`, and the line of the user's code that did it.

    `index` is its place in the ledger, `kind` one of `"backward"`, `"zero_grad"`, `"step"`,
    `"unscale"`, `"clip"`, `"sync"` and `"edit"`; and, of what goes on around `.grad`, `"schedule"`
    (a learning-rate scheduler stepped) and `"loader"` (one begins or ends). `label` is what a loss
    or an optimizer is called there; `file`, `line` and `source` are where. `frames` are the lines of
    your code that led there, innermost first, four at most: (file, line, source) each. `via` is the
    library's own line, as `"transformers/trainer.py:2345"`, where the call came through one.

    `details` holds what only its kind has, such as the `lr` of a step, or the `terms` of a backward:
    for each loss under its root, the operation (`op`), its `reduction` ("mean", "sum", "none"), over
    how many `elements` (of a cross entropy the targets that count), times which constant `factor`;
    and why, where that cannot be read (`unknown`, else empty). Where hooks of your own changed
    the gradients of all parameters that a backward reached, `by_hook` is NaN; an edit that a hook
    made before a step says so (`by`); where one on a tensor between the loss and the parameters changed
    the gradient, the backward holds `between`. Where ranks reduce in
    a way that is not known (in your own lines, by a comm hook, between groups of ranks), `reduction` is empty.

    `loss` is the value backward started from (NaN if it was not one number), `saved_before`
    and `saved_after` the bytes of saved tensors alive around a backward (NaN if not measured),
    `time` seconds since the recording began.

    `within` names the event this one ran inside
    (`"step"` for a closure, `"backward"` for an optimizer that steps in a hook). In a ledger of
    several processes, `rank` is the one it happened in; None is all of them together.
    """

    index: int
    kind: str
    label: str = ""
    file: str = ""
    line: int = 0
    source: str = ""
    time: float = 0.0
    loss: float = _NAN
    saved_before: float = _NAN
    saved_after: float = _NAN
    within: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    frames: tuple[tuple[str, int, str], ...] = ()
    via: str = ""

    @property
    def skipped(self) -> bool:
        """Whether this is a step that changed no weight (the gradient scaler found inf or NaN)."""
        return bool(self.details.get("skipped"))

    @property
    def terms(self) -> list[Mapping[str, Any]]:
        """The `terms` of `details`, each in its place; none where they are not known."""
        return listed(self.details)


def listed(details: Details) -> list[Details]:
    """Return the terms that an event's details hold, whatever a file claims that they are.

    >>> listed({"terms": [{"op": "mean"}, 3]}), listed({}), listed({"terms": 3})
    ([{'op': 'mean'}, {}], [], [])
    """
    terms = details.get("terms")
    if not isinstance(terms, list):
        return []
    return [term if isinstance(term, Mapping) else {} for term in terms]


class Events(Sequence[Event]):
    """Events as columns: an immutable sequence that makes each `Event` when it is asked for.

    Ten small integers and four numbers an event, 72 bytes, and each distinct text once.
    `codes` is int32, events × `CODES`; `numbers` float64, events × `NUMBERS`; `tables` the
    distinct texts of each column of `TABLES`, those of `frames` and `details` as JSON.

    >>> events = Events.of_columns(kind=["backward", "step"], loss=[2.5, float("nan")], details=[{}, {"lr": [0.1]}])
    >>> len(events), events[1].details, events[0].loss
    (2, {'lr': [0.1]}, 2.5)
    >>> events.where("kind", "step").tolist(), events.column("loss").tolist()
    ([False, True], [2.5, nan])
    """

    def __init__(
        self,
        codes: ndarray,
        numbers: ndarray,
        tables: Mapping[str, Sequence[str]],
    ) -> None:
        self.codes = codes
        self.numbers = numbers
        self.tables = {name: tuple(tables[name]) for name in TABLES}
        codes.flags.writeable = numbers.flags.writeable = False
        self._detailed: dict[tuple[str, str], ndarray] = {}

    @classmethod
    def of(cls, events: Iterable[Event]) -> Events:
        """Return the columns of these events."""
        if isinstance(events, Events):
            return events
        events = tuple(events)
        columns = {}
        for name in _AT:
            columns[name] = [getattr(event, name) for event in events]
        return cls.of_columns(**columns)

    @classmethod
    def of_columns(cls, **columns: Sequence[Any]) -> Events:
        """Return events from one sequence of values for each field of `Event`; a field left out has its default.

        `kind` is needed. Details are mappings, or their JSON text; frames JSON text.
        """
        count = len(columns["kind"])
        codes = np.zeros((count, len(CODES)), np.int32)
        numbers = np.empty((count, len(NUMBERS)))
        tables: dict[str, list[str]] = {}
        for at, (name, default) in enumerate(CODES.items()):
            values = columns.get(name, (default,) * count)
            if name in TABLES:
                texts = [_text(value or default) for value in values]
                tables[name], values = numbered(texts)
            codes[:, at] = [default if value is None else value for value in values]
        for at, (name, default) in enumerate(NUMBERS.items()):
            numbers[:, at] = columns.get(name, default)
        return cls(codes, numbers, tables)

    @classmethod
    def join(cls, parts: Sequence[Events]) -> Events:
        """Return the events of all parts, one after the other, with each text once."""
        codes = np.concatenate([part.codes for part in parts])
        numbers = np.concatenate([part.numbers for part in parts])
        tables = {}
        for name in TABLES:
            column = codes[:, _AT[name]]
            texts: list[str] = []
            start = 0
            for part in parts:
                stop = start + len(part)
                column[start:stop] += len(texts)
                texts += part.tables[name]
                start = stop
            tables[name], places = numbered(texts)
            column[:] = np.array(places, np.int32)[column]
        return cls(codes, numbers, tables)

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return tuple(self[i] for i in places)
        row = self.codes[places].tolist()
        codes = dict(zip(CODES, row, strict=True))
        fields: dict[str, Any] = {}
        for name, table in self.tables.items():
            fields[name] = table[codes[name]]
        # Parsed anew: what is done to the details of one event changes no ledger.
        fields["details"] = json.loads(fields["details"])
        fields["frames"] = self._frames[codes["frames"]]
        fields["line"] = codes["line"]
        fields["rank"] = None if codes["rank"] < 0 else codes["rank"]
        numbers = self.numbers[places].tolist()
        for name, value in zip(NUMBERS, numbers, strict=True):
            fields[name] = _NAN if math.isnan(value) else value
        return Event(places, **fields)

    def column(self, name: str) -> ndarray:
        """Return one column of `NUMBERS`, or `line` or `rank` (-1: all of them)."""
        at = _AT[name]
        if at < len(CODES):
            return self.codes[:, at]
        return self.numbers[:, at - len(CODES)]

    def where(self, name: str, *texts: str) -> ndarray:
        """Return for each event whether this column holds one of these texts."""
        table = self.tables[name]
        codes = [code for code, text in enumerate(table) if text in texts]
        return np.isin(self.column(name), codes)

    def detail(self, name: str, default: Any) -> ndarray:
        """Return one entry of every event's details, or `default`, whose type (number, truth, object) the array has."""
        key = name, repr(default)
        if key not in self._detailed:
            kind = type(default) if isinstance(default, bool | int | float) else object
            count = max(len(self.details), 1)
            table = np.full(count, default, kind)
            for code, value in self._entries.get(name, {}).items():
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    table[code] = value
            column = table[self.column("details")]
            column.flags.writeable = False
            self._detailed[key] = column
        return self._detailed[key]

    def has(self, name: str) -> ndarray:
        """Return for each event whether its details have this entry."""
        codes = list(self._entries.get(name, {}))
        return np.isin(self.column("details"), codes)

    @cached_property
    def _entries(self) -> dict[str, dict[int, Any]]:
        """The entries of the distinct details: by name, and by the code of the details."""
        entries: dict[str, dict[int, Any]] = defaultdict(dict)
        for code, details in enumerate(self.details):
            for name, value in details.items():
                entries[name][code] = value
        return dict(entries)

    @cached_property
    def sites(self) -> ndarray:
        """The number of each event's call site: equal where the same lines led to the same expression."""
        names = ("file", "line", "label", "frames")
        columns = [self.column(name).tolist() for name in names]
        _, places = numbered(zip(*columns, strict=True))
        return np.array(places, int)

    @cached_property
    def details(self) -> list[Details]:
        """The distinct details, by their code."""
        return list(map(json.loads, self.tables["details"]))

    @cached_property
    def _frames(self) -> list[tuple[tuple[str, int, str], ...]]:
        frames = []
        for text in self.tables["frames"]:
            frames.append(tuple(map(tuple, json.loads(text))))
        return frames

    @property
    def skipped(self) -> ndarray:
        """For each event, whether it is a step that changed no weight."""
        return self.detail("skipped", default=False)

    def take(self, places: Any) -> Events:
        """Return the events at these places (a slice, or integers), with no text that they lack."""
        codes = np.array(self.codes[places])
        tables = {}
        for name in TABLES:
            column = codes[:, _AT[name]]
            used, column[:] = np.unique(column, return_inverse=True)
            table = self.tables[name]
            tables[name] = [table[code] for code in used.tolist()]
        return Events(codes, np.array(self.numbers[places]), tables)


def _text(value: Any) -> str:
    """Return details or frames as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), default=repr)


T = TypeVar("T", bound=Hashable)


def numbered(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return each value once, and the place of every value among them.

    >>> numbered("abca")
    (['a', 'b', 'c'], [0, 1, 2, 0])
    """
    table: dict[T, int] = {}
    places = [table.setdefault(value, len(table)) for value in values]
    return list(table), places


class Elements(NamedTuple):
    """What is kept element by element, of the parameters with the numbers `kept`, one parameter after the other.

    `added` and `left`, what was contributed and `.grad`, are events × elements; `weights` are those elements'
    weights after the events `weighed`.
    """

    kept: tuple[int, ...]
    added: ndarray
    left: ndarray
    weighed: ndarray = np.zeros(0, np.int32)
    weights: ndarray = np.zeros((0, 0))


@dataclass
class Block:
    """Consecutive events with their rows of all arrays: what a recording adds at once, and a file stores as one chunk.

    `contribution`, `grad` and `state` have a column for each parameter. `added` and `left`, what was contributed
    and `.grad`, have one for each element of the parameters of which elements are kept, one parameter after the
    other. `weights` are those elements' weights after the events `weighed`.
    """

    events: Events
    contribution: ndarray
    grad: ndarray
    state: ndarray
    added: ndarray
    left: ndarray
    weighed: ndarray
    weights: ndarray

    @classmethod
    def empty(cls, parameters: int, elements: int) -> Block:
        """Return a block of no events."""
        norms = np.zeros((0, parameters), np.float32)
        state = np.zeros((0, parameters), np.uint8)
        kept = np.zeros((0, elements))
        events = Events.of(())
        weighed = np.zeros(0, np.int32)
        return cls(events, norms, norms, state, kept, kept, weighed, kept)


# The arrays of a block beside its events, and what their numbers are.
ARRAYS = {
    "contribution": "<f4",
    "grad": "<f4",
    "state": "|u1",
    "added": "<f8",
    "left": "<f8",
    "weighed": "<i4",
    "weights": "<f8",
}


def join(blocks: list[Block]) -> Block:
    """Put blocks (one at least) together; the list is emptied, so that no number is held twice for long."""
    if len(blocks) == 1:
        return blocks[0]
    events = Events.join([block.events for block in blocks])
    parts = {}
    for name in ARRAYS:
        parts[name] = [getattr(block, name) for block in blocks]
    start = 0
    for number, block in enumerate(blocks):
        parts["weighed"][number] = block.weighed + start
        start += len(block.events)
    blocks.clear()
    joined = {name: np.concatenate(parts.pop(name)) for name in ARRAYS}
    return Block(events, **joined)


class Arrays:
    """What a ledger is made of: parameters, events, and arrays of events × parameters; `Ledger` says what each is.

    What reads, writes, joins or judges them stands below the ledger and needs no more than this.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        events: Iterable[Event],
        contribution: ndarray,
        grad: ndarray,
        state: ndarray,
        elements: Elements | None = None,
        *,
        sources: Mapping[str, str] | None = None,
        meta: Mapping[str, Any] | None = None,
        complete: bool = True,
    ) -> None:
        self.parameters = tuple(parameters)
        self.events = Events.of(events)
        self.contribution = contribution.astype(np.float32, copy=False)
        self.grad = grad.astype(np.float32, copy=False)
        self.state = state.astype(np.uint8, copy=False)
        nothing = np.zeros((len(self.events), 0))
        self.elements = elements or Elements((), nothing, nothing)
        self.sources = dict(sources or {})
        self.meta = dict(meta or {})
        self.complete = complete and "stopped" not in self.meta
        self._check_shapes()
        kept, *arrays = self.elements
        shown: list[Any] = [self.contribution, self.grad, self.state, *arrays]
        for array in shown:
            array.flags.writeable = False
        self.exact: dict[int, tuple[ndarray, ndarray]] = {}
        self._places: dict[int, slice] = {}
        end = 0
        for p in kept:
            start, end = end, end + self.parameters[p].numel
            self._places[p] = slice(start, end)
            self.exact[p] = (
                self.elements.added[:, start:end],
                self.elements.left[:, start:end],
            )

    def _check_shapes(self) -> None:
        expected = (len(self.events), len(self.parameters))
        for name in ("contribution", "grad", "state"):
            shape = getattr(self, name).shape
            if shape != expected:
                raise ValueError(
                    f"{name} has shape {shape}, expected events × parameters {expected}"
                )

    @classmethod
    def of_block(
        cls,
        parameters: Sequence[Parameter],
        kept: Iterable[int],
        block: Block,
        **about: Any,
    ) -> Self:
        """Return the ledger of a block; elements are kept of the parameters with the numbers `kept`."""
        return cls(
            parameters,
            block.events,
            block.contribution,
            block.grad,
            block.state,
            Elements(
                tuple(kept), block.added, block.left, block.weighed, block.weights
            ),
            **about,
        )
