"""The parts of a ledger: parameters, events and their bits, and many events as columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple, overload

import numpy as np

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
# One object for all unknown numbers: events that know as little as each other are equal.
_NAN = float("nan")

# The columns of codes: places in a table of texts (`details` and `frames`: of JSON texts), but `line` and `rank` (-1:
# all). What came with a later format stands behind what was there before.
CODES = (
    "kind",
    "label",
    "file",
    "line",
    "source",
    "within",
    "rank",
    "details",
    "frames",
    "via",
)
TABLES = ("kind", "label", "file", "source", "within", "details", "frames", "via")
_TEXTS = ("kind", "label", "file", "source", "within", "via")
NUMBERS = ("time", "loss", "scale", "saved_before", "saved_after", "allocated", "peak")
_AT = {name: i for i, name in enumerate((*CODES, *NUMBERS))}


@dataclass(frozen=True)
class Parameter:
    """A recorded leaf: its name, shape, dtype and the optimizers that own it (indices).

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
    and why, where that cannot be read (`unknown`, else empty). Where all parameters that a backward
    reached have hooks of your own, `by_hook` is NaN; an edit that a hook made before a step says so
    (`by`). Where another thread trains the parameters, too, a backward is `overlapped`: what became
    of what it brought is not known. Of an all-reduce that your own lines began, `reduction` is
    empty: it is not known; where a comm hook of yours had a hand in one of DDP's, there is a
    `by_comm_hook`; of what FSDP scatters, `divisor` by what it divides the sum, where it is not the
    number of ranks.

    `loss` is the value backward started from (NaN if it was not one number), `scale` the
    product of the constants it was multiplied by or divided by on the way there, `saved_before`
    and `saved_after` the bytes of saved tensors alive around a backward (NaN if not measured),
    `time` seconds since the recording began.

    `allocated` is what PyTorch's CUDA allocator had given out, in bytes, after the event; `peak`
    the most it had given out at once since the event before, known only where that was more than
    ever since its peak was last reset (`torch.cuda.reset_peak_memory_stats`, which is yours to
    call: a recording never does). Both are of the whole process and of the devices that hold the
    parameters (`peak`: if it is one), and NaN where not measured, as on a CPU.

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
    scale: float = 1.0
    saved_before: float = _NAN
    saved_after: float = _NAN
    within: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    allocated: float = _NAN
    peak: float = _NAN
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


def listed(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The terms that an event's details hold, whatever a file claims that they are.

    >>> listed({"terms": [{"op": "mean"}, 3]}), listed({}), listed({"terms": 3})
    ([{'op': 'mean'}, {}], [], [])
    """
    terms = details.get("terms")
    return (
        [term if isinstance(term, Mapping) else {} for term in terms]
        if isinstance(terms, list)
        else []
    )


_DEFAULTS: dict[str, Any] = {
    "label": "",
    "file": "",
    "line": 0,
    "source": "",
    "time": 0.0,
    "loss": _NAN,
    "scale": 1.0,
    "saved_before": _NAN,
    "saved_after": _NAN,
    "within": "",
    "rank": None,
    "allocated": _NAN,
    "peak": _NAN,
    "frames": "[]",
    "via": "",
}


class Events(Sequence[Event]):
    """Events as columns: an immutable sequence that makes each `Event` when it is asked for.

    Ten small integers and seven numbers an event, 96 bytes, and each distinct text once.
    `codes` is int32, events × `CODES`; `numbers` float64, events × `NUMBERS`; `tables` the
    distinct texts of each column of `TABLES`, those of `frames` and `details` as JSON (or mappings).

    >>> events = Events.of_columns(kind=["backward", "step"], loss=[2.5, float("nan")], details=[{}, {"lr": [0.1]}])
    >>> len(events), events[1].details, events[0].loss
    (2, {'lr': [0.1]}, 2.5)
    >>> events.where("kind", "step").tolist(), events.column("loss").tolist()
    ([False, True], [2.5, nan])
    """

    def __init__(
        self,
        codes: np.ndarray,
        numbers: np.ndarray,
        tables: Mapping[str, Sequence[Any]],
    ) -> None:
        self.codes, self.numbers = codes, numbers
        self.tables = {name: tuple(tables[name]) for name in TABLES}
        self.codes.flags.writeable = self.numbers.flags.writeable = False
        self._detailed: dict[tuple[str, str], np.ndarray] = {}

    @classmethod
    def of(cls, events: Iterable[Event]) -> Events:
        """The columns of these events."""
        if isinstance(events, Events):
            return events
        events = tuple(events)
        columns = {
            name: [getattr(event, name) for event in events]
            for name in (*CODES, *NUMBERS)
        }
        # Whoever made them by hand may have put anything in: no view may break on it.
        for name in _TEXTS:
            columns[name] = [
                text if isinstance(text, str) else str(text) for text in columns[name]
            ]
        columns["frames"] = [_frames_as_text(frames) for frames in columns["frames"]]
        for name, missing in (("line", 0), ("rank", None)):
            columns[name] = [
                n if isinstance(n, Integral) and 0 <= int(n) < 1 << 31 else missing
                for n in columns[name]
            ]
        for name in NUMBERS:
            columns[name] = [n if isinstance(n, Real) else _NAN for n in columns[name]]
        return cls.of_columns(len(events), **columns)

    @classmethod
    def of_columns(cls, count: int | None = None, **columns: Sequence[Any]) -> Events:
        """Events from one sequence of values for each field of `Event`; a field left out has its default.

        `kind` is needed, unless `count` is 0. Details are mappings, or their JSON text; frames JSON text.
        """
        unknown = columns.keys() - _AT.keys()
        if unknown:
            raise ValueError(
                f"no field {min(unknown)!r}; expected one of {', '.join(_AT)}"
            )
        count = len(columns["kind"]) if count is None else count
        for name, given in columns.items():
            if len(given) != count:
                raise ValueError(
                    f"{name} has {len(given)} values, expected one for each of {count} events"
                )
        codes = np.zeros((count, len(CODES)), np.int32)
        numbers = np.empty((count, len(NUMBERS)))
        tables: dict[str, Sequence[Any]] = {}
        for at, name in enumerate(CODES):
            values: Any = columns.get(name)
            if name == "line":
                codes[:, at] = 0 if values is None else values
            elif name == "rank":
                codes[:, at] = (
                    -1
                    if values is None
                    else [-1 if rank is None else rank for rank in values]
                )
            elif name == "details":
                tables[name] = _number_details(values, codes[:, at])
            else:
                places: dict[str, int] = (
                    {} if values is not None or not count else {_DEFAULTS[name]: 0}
                )
                if values is not None:
                    codes[:, at] = [
                        places.setdefault(text, len(places)) for text in values
                    ]
                tables[name] = tuple(places)
        for at, name in enumerate(NUMBERS):
            numbers[:, at] = columns[name] if name in columns else _DEFAULTS[name]
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
        return self._make(places)

    def _make(self, index: int) -> Event:
        # Details are parsed anew: what is done to those of one event changes no ledger.
        codes = dict(zip(CODES, self.codes[index].tolist(), strict=True))
        texts = {name: self.tables[name][codes[name]] for name in _TEXTS}
        numbers = dict(zip(NUMBERS, self.numbers[index].tolist(), strict=True))
        for name, value in numbers.items():
            if math.isnan(value):
                numbers[name] = _NAN
        return Event(
            index,
            line=codes["line"],
            rank=None if codes["rank"] < 0 else codes["rank"],
            details=_mapping(self.tables["details"][codes["details"]]),
            frames=self._frames[codes["frames"]],
            **texts,
            **numbers,
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Events | tuple):
            return len(self) == len(other) and all(
                a == b for a, b in zip(self, other, strict=True)
            )
        return NotImplemented

    __hash__ = None  # type: ignore[assignment] # events hold mappings

    def __repr__(self) -> str:
        return repr(tuple(self))

    def column(self, name: str) -> np.ndarray:
        """One column of `NUMBERS`, or `line` or `rank` (-1: all of them)."""
        at = _AT[name]
        found: np.ndarray = (
            self.numbers[:, at - len(CODES)] if at >= len(CODES) else self.codes[:, at]
        )
        return found

    def where(self, name: str, *texts: str) -> np.ndarray:
        """For each event, whether this column holds one of these texts."""
        found: np.ndarray = np.array(
            [text in texts for text in self.tables[name]] or [False], bool
        )[self.column(name)]
        return found

    def detail(self, name: str, default: Any) -> np.ndarray:
        """One entry of every event's details, or `default`, of whose type (number, truth, any object) the array is."""
        key = name, repr(default)
        if key in self._detailed:
            return self._detailed[key]
        values = [known.get(name, default) for known in self.details]
        kind = type(default) if isinstance(default, bool | int | float) else object
        table = np.empty(max(len(values), 1), kind)
        for i, value in enumerate(values):
            try:
                table[i] = value
            except (TypeError, ValueError, OverflowError):
                table[i] = default
        found: np.ndarray = table[self.column("details")]
        found.flags.writeable = False
        self._detailed[key] = found
        return found

    def has(self, name: str) -> np.ndarray:
        """For each event, whether its details have this entry."""
        found: np.ndarray = np.array(
            [name in details for details in self.details] or [False], bool
        )[self.column("details")]
        return found

    def label(self, event: int) -> str:
        """The label of one event."""
        label: str = self.tables["label"][self.column("label")[event]]
        return label

    @cached_property
    def details(self) -> list[Mapping[str, Any]]:
        """The distinct details, by their code."""
        return [_mapping(known) for known in self.tables["details"]]

    @cached_property
    def _frames(self) -> list[tuple[tuple[str, int, str], ...]]:
        return [
            tuple((f, n, text) for f, n, text in json.loads(known))
            for known in self.tables["frames"]
        ]

    @property
    def skipped(self) -> np.ndarray:
        """For each event, whether it is a step that changed no weight."""
        return self.detail("skipped", default=False)

    def texts(self, name: str) -> list[str]:
        """The text that each event has in this column."""
        table = self.tables[name]
        return [table[code] for code in self.column(name).tolist()]

    def take(self, places: Any) -> Events:
        """The events at these places (a slice, or integers), as events of their own, with no text that they lack."""
        codes, tables = np.array(self.codes[places]), {}
        for name in TABLES:
            used, codes[:, _AT[name]] = np.unique(
                codes[:, _AT[name]], return_inverse=True
            )
            tables[name] = [self.tables[name][code] for code in used.tolist()]
        return Events(codes, np.array(self.numbers[places]), tables)


def _mapping(known: Any) -> Mapping[str, Any]:
    if not isinstance(known, str):
        mapping: Mapping[str, Any] = known
        return mapping
    return json.loads(known) if known != "{}" else {}


def _frames_as_text(frames: Any) -> str:
    try:
        return json.dumps(
            [[str(file), int(line), str(source)] for file, line, source in frames]
        )
    except (TypeError, ValueError, OverflowError):  # made by hand, as above
        return "[]"


def _number_details(given: Sequence[Any] | None, codes: np.ndarray) -> list[Any]:
    """Number details in order of first appearance; equal texts, and no details, are one."""
    if given is None:
        return ["{}"] if len(codes) else []
    places: dict[Any, int] = {}
    table: list[Any] = []
    for row, details in enumerate(given):
        key = details if isinstance(details, str) else id(details) if details else "{}"
        if key not in places:
            places[key] = len(table)
            table.append(details or "{}")
        codes[row] = places[key]
    return table


class Gatherer:
    """Puts the tables of several parts together: each text is kept once, whichever parts have it."""

    def __init__(self) -> None:
        self.places: dict[str, dict[str, int]] = {name: {} for name in TABLES}

    def renumber(self, codes: np.ndarray, tables: Mapping[str, Sequence[str]]) -> None:
        """Turn the codes of a part, into its own tables, into codes for all parts, in place."""
        for name in TABLES:
            places = self.places[name]
            own = [places.setdefault(text, len(places)) for text in tables[name]]
            if own != list(range(len(own))):
                codes[:, _AT[name]] = np.array(own, np.int32)[codes[:, _AT[name]]]


class Weighed(NamedTuple):
    """Weights of small parameters: after which `events`, and of each parameter the `elements` (events × elements)."""

    events: np.ndarray
    elements: dict[int, np.ndarray]

    @classmethod
    def of(
        cls,
        parameters: Sequence[Parameter],
        found: Mapping[int, Mapping[int, np.ndarray]],
    ) -> Weighed:
        """From the elements by parameter and event: NaN where there are none."""
        events = sorted({event for at in found.values() for event in at})
        elements = {}
        for p, parameter in enumerate(parameters if events else ()):
            unknown, at = np.full(parameter.numel, np.nan), found.get(p, {})
            elements[p] = np.array(
                [at.get(event, unknown) for event in events]
            ).reshape(-1, parameter.numel)
        return cls(np.array(events, np.int64), elements)

    def after_each(self, count: int, parameter: int) -> np.ndarray:
        """The elements after each of so many events; empty where none of this parameter are kept."""
        if parameter not in self.elements:
            return np.zeros((0, 0))
        kept = self.elements[parameter]
        found = np.full((count, kept.shape[1]), np.nan)
        found[self.events] = kept
        return found


class Arrays:
    """What a ledger is made of: parameters, events, and arrays of events × parameters; `Ledger` says what each is.

    What reads, writes, joins or judges them stands below the ledger and needs no more than this.
    """

    def __init__(
        self,
        parameters: tuple[Parameter, ...],
        events: Sequence[Event],
        contribution: np.ndarray,
        grad: np.ndarray,
        state: np.ndarray,
        exact: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None,
        *,
        weighed: Weighed | None = None,
        sources: Mapping[str, str] | None = None,
        meta: Mapping[str, Any] | None = None,
        complete: bool = True,
    ) -> None:
        expected = (len(events), len(parameters))
        for name, given in (
            ("contribution", contribution),
            ("grad", grad),
            ("state", state),
        ):
            if given.shape != expected:
                raise ValueError(
                    f"{name} has shape {given.shape}, expected events × parameters {expected}"
                )
        self.parameters = parameters
        self.events = events if isinstance(events, Events) else tuple(events)
        self.contribution = contribution.astype(np.float32, copy=False)
        self.grad = grad.astype(np.float32, copy=False)
        self.state = state.astype(np.uint8, copy=False)
        self.exact: dict[int, tuple[np.ndarray, np.ndarray]] = dict(exact or {})
        self.weighed = weighed or Weighed(np.zeros(0, np.int64), {})
        self.sources = dict(sources or {})
        self.meta = dict(meta or {})
        self.complete = complete and "stopped" not in self.meta
        for array in (self.contribution, self.grad, self.state):
            array.flags.writeable = False
        for pair in self.exact.values():
            for array in pair:
                array.flags.writeable = False
        for array in self.weighed.elements.values():
            array.flags.writeable = False

    @cached_property
    def columns(self) -> Events:
        """The events as columns: what asks something of all of them asks here."""
        return Events.of(self.events)
