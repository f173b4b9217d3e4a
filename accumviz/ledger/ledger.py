"""The ledger: the immutable record of everything that happened to `.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from accumviz import arguments
from accumviz.ledger.events import (
    CHANGED,
    CODES,
    CONTRIBUTED,
    KINDS,
    NUMBERS,
    PRESENT,
    Arrays,
    Elements,
    Event,
    Events,
    Parameter,
)
from accumviz.ledger.file import Reader, chunks, decode, save, valid
from accumviz.ledger.flow import Flow, Outcomes, Window
from accumviz.ledger.merge import merge
from accumviz.ledger.shares import Shares, shares
from accumviz.show import Displayed, counted, save_page

__all__ = [
    "CHANGED",
    "CONTRIBUTED",
    "KINDS",
    "PRESENT",
    "Event",
    "Events",
    "Ledger",
    "Parameter",
    "Provenance",
    "Recorded",
    "recorded",
]


class Recorded(Protocol):
    """What has a ledger: a recording, open or closed, and what `distribute` brings back."""

    @property
    def ledger(self) -> Ledger:
        """Everything that was recorded."""


# The columns of a data frame.
_LONG = ("details", "frames", "via")
_OF_EVENT = [name for name in (*CODES, *NUMBERS) if name not in _LONG]
_COLUMNS = [
    "event",
    *_OF_EVENT,
    "parameter",
    "contribution",
    "grad",
    "present",
    "changed",
    "consumed_by",
    "erased_by",
]


@dataclass(frozen=True, eq=False)
class Provenance:
    """The loss × parameter matrix: summed contribution norms, and how many contributions there were.

    `labels` name the rows of `total` and `count`, `parameters` their columns.
    """

    labels: tuple[str, ...]
    parameters: tuple[str, ...]
    total: ndarray
    count: ndarray


class Ledger(Arrays, Displayed):
    """Events × parameters: what each event added to, and left in, every `.grad`.

    It is the sequence of its events: `len(ledger)`, `ledger[3]` and `for event in ledger` are what
    they are for a list. `parameters` are its columns, `sources` the texts of the files that the
    events point into (of a recording, the lines that events need; the others are empty), `meta`
    says with what it was recorded. `complete` is False when the recording's process ended before
    it was closed, and when the recording stopped before that: `meta["stopped"]` then says why.

    `events` is a sequence of `Event`, kept as columns: each `Event` is made when it is asked for.

    `contribution` and `grad` are float32 arrays (events × parameters) of 2-norms: what a
    backward added, and `.grad` after the event; NaN where there is none. `state` holds the
    bits `PRESENT` (`.grad` is not None), `CONTRIBUTED` and `CHANGED`. `exact` maps a parameter's
    index to two float64 arrays (events × elements): contribution and `.grad`, element by element;
    `weights` gives those of the same parameters after each step.

    >>> from accumviz.ledger.ledger import Ledger, Parameter
    >>> w = Parameter("w", shape=(1,), optimizers=(0,))
    >>> ledger = Ledger.build([w], [
    ...     dict(kind="backward", contribution={"w": -16.0}, grad={"w": -16.0}),
    ...     dict(kind="backward", contribution={"w": -4.0}, grad={"w": -20.0}),
    ...     dict(kind="step", details={"optimizer": "SGD"}, grad={"w": -20.0}),
    ... ])
    >>> ledger.windows()
    [Window(step=2, optimizer='SGD', backwards=(0, 1))]
    >>> ledger.running_sum("w").ravel().tolist()
    [-16.0, -20.0, -20.0]
    >>> ledger.live(1, "w")
    [0, 1]
    """

    _shown_by = "accumviz.views.tables:ledger_html"

    @classmethod
    def build(
        cls, parameters: list[Parameter], rows: list[dict[str, Any]], **kwargs: Any
    ) -> Ledger:
        """Make a ledger by hand, as a test or an example needs it.

        `rows` holds one dict per event: the fields of `Event`, and by parameter name `contribution`
        (a number or a list, element by element), `grad` (the same; absent: None) and `weights`.
        """
        return _built(cls, parameters, rows, **kwargs)

    @classmethod
    def merge(cls, ledgers: Iterable[Ledger | Recorded | str | Path]) -> Ledger:
        """Put the ledgers of several ranks into one, in which events and parameters say their rank.

        `ledgers` are ledgers, recordings, or the files that `record(..., path=...)` wrote on each rank. Each
        rank's events keep their order; a collective that all ranks took part in is one event. Weights are left out.
        Raises `ValueError` when there is none, or when two are of the same rank.

        >>> rows = [dict(kind="backward", contribution={"w": 1.0}, grad={"w": 1.0})]
        >>> one, two = (Ledger.build([Parameter("w", (1,))], rows, meta={"rank": r}) for r in (0, 1))
        >>> [(e.kind, e.rank) for e in Ledger.merge([one, two])]
        [('backward', 0), ('backward', 1)]
        """
        if isinstance(ledgers, str | Path | Ledger) or not isinstance(
            ledgers, Iterable
        ):
            raise TypeError(
                f"merge() was given {arguments.a(ledgers)}; expected a list of the ranks' ledgers or files"
            )
        opened = []
        for one in ledgers:
            ledger = load(one) if isinstance(one, str | Path) else one
            opened.append(recorded(ledger, "merge"))
        return merge(opened, cls)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __getitem__(self, index: int) -> Event:
        if isinstance(index, slice):
            return self.events[index]
        return self.events[self._place(index)]

    def _place(self, event: int) -> int:
        """Return the number of an event, counted from the end where it is negative."""
        return _place("event", event, len(self))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of all losses, in order of first appearance."""
        backward = self.events.where("kind", "backward")
        codes = self.events.column("label")[backward]
        table = self.events.tables["label"]
        different = dict.fromkeys(codes.tolist())
        return tuple(table[code] for code in different)

    def of(self, kind: str) -> list[Event]:
        """The events of one kind.

        Raises `ValueError` for a kind that does not exist.
        """
        if kind not in KINDS:
            raise ValueError(
                f"no event kind {kind!r}; expected one of {', '.join(KINDS)}"
            )
        places = np.flatnonzero(self.events.where("kind", kind))
        return [self.events[e] for e in places.tolist()]

    def index(self, parameter: str | int) -> int:
        """The column of a parameter, by name, alias or index.

        Raises `KeyError` with the nearest names when there is none, `IndexError` for a column beyond
        the last, `TypeError` for anything else.
        """
        if not isinstance(parameter, str):
            return _place("parameter", parameter, len(self.parameters))
        for i, candidate in enumerate(self.parameters):
            if parameter == candidate.name or parameter in candidate.aliases:
                return i
        near = arguments.nearest(parameter, (p.name for p in self.parameters))
        raise KeyError(f"no parameter {parameter!r} in this ledger; nearest: {near}")

    def values(self, parameter: str | int, of: str = "grad") -> ndarray:
        """Element by element, what `.grad` held after each event (or `of="contribution"`).

        Returns float64, events × elements; NaN where there was none. Raises `KeyError` when
        the parameter was too large for its elements to be kept: its norms are in `ledger.grad`.
        """
        p = self.index(parameter)
        if of not in ("grad", "contribution"):
            raise ValueError(f"of={of!r}; expected 'grad' or 'contribution'")
        if p not in self.exact:
            raise KeyError(
                f"{self.parameters[p].name!r} has {self.parameters[p].numel} elements, of which only norms were "
                "recorded (ledger.grad, ledger.contribution); record(..., exact=N) keeps the elements of larger tensors"
            )
        return self.exact[p][of == "grad"]

    def weights(self, parameter: str | int) -> ndarray:
        """Element by element, what a small parameter's weights were after each step, and at the first event.

        Returns float64, events × elements, NaN at other events; an empty array when they were not kept.
        """
        place = self._places.get(self.index(parameter), slice(0))
        weights = self.elements.weights[:, place]
        if not weights.size:
            return np.zeros((0, 0))
        _, count = weights.shape
        every = np.full((len(self), count), np.nan)
        every[self.elements.weighed] = weights
        return every

    @cached_property
    def flow(self) -> Flow:
        """With what coefficient each contribution is in `.grad` after each event."""
        return Flow(self)

    @property
    def outcomes(self) -> Outcomes:
        """What became of each contribution: erased by which event, consumed by which steps."""
        return self.flow.outcomes

    def live(self, event: int, parameter: str | int) -> list[int]:
        """The backwards whose contributions are in this parameter's `.grad` after the event.

        Returns indices of events; -1 is the last event, as in a list.
        """
        p = self.index(parameter)
        live: list[int] = self.flow.live(self._place(event), p).tolist()
        return live

    def unconsumed(self, event: int) -> dict[str, list[int]]:
        """The contributions, by parameter, that this event erased before any step had used them."""
        event = self._place(event)
        if self.events.where("kind", "sync")[event]:  # it hands them on
            return {}
        erased, _, steps = self.outcomes
        in_vain = (erased == event) & (steps == 0)
        unconsumed = {}
        for p in np.flatnonzero(in_vain.any(axis=0)).tolist():
            born = np.flatnonzero(in_vain[:, p])
            unconsumed[self.parameters[p].name] = born.tolist()
        return unconsumed

    def windows(self) -> list[Window]:
        """The accumulation window of every step: which backwards it consumed."""
        return self.flow.windows()

    def shares(self) -> Shares:
        """What each backward weighs in each step: the coefficient of its mean loss in the gradient that is consumed.

        A window weighs its samples as one large batch does when its shares per element are equal. What cannot be
        read is NaN, with its reason.

        >>> mean = dict(op="MeanBackward0", reduction="mean", elements=8, factor=0.5, unknown="")
        >>> row = dict(kind="backward", label="loss", contribution={"w": 1.0}, details={"terms": [mean]})
        >>> rows = [row | {"grad": {"w": 1.0}}, row | {"grad": {"w": 2.0}}, dict(kind="step", grad={"w": 2.0})]
        >>> Ledger.build([Parameter("w", (1,), optimizers=(0,))], rows).shares()
        Shares: 2 rows, 1 step
          step  backward  objective     share  elements  per element
             2         0  loss            0.5         8       0.0625
             2         1  loss            0.5         8       0.0625
        """
        return self._shares

    @cached_property
    def _shares(self) -> Shares:
        return shares(self.flow)

    def running_sum(self, parameter: str | int) -> ndarray:
        """Element by element, the sum of the live contributions after each event.

        Returns float64, events × elements: equal to `.grad` up to rounding as long as nothing
        but backward and zero_grad touched it. Raises `KeyError` as `values` does.
        """
        p = self.index(parameter)
        history = self.flow.of[p]
        added = np.zeros_like(self.values(p))
        added[history.born] = self.values(p, "contribution")[history.born]
        total = np.zeros_like(added)
        ends = set(history.ends.tolist())
        held: Any = 0.0
        for event, more in enumerate(added):
            held = more if event in ends else held + more
            total[event] = held
        return total

    def provenance(self) -> Provenance:
        """Return which loss wrote into which parameter, and how much: the loss × parameter matrix."""
        names = tuple(p.name for p in self.parameters)
        total = np.zeros((len(self.labels), len(names)))
        count = np.zeros(total.shape, np.int64)
        backward = self.events.where("kind", "backward")
        for row, label in enumerate(self.labels):
            mine = backward & self.events.where("label", label)
            norms = self.contribution[mine]
            was_added = self.state[mine] & CONTRIBUTED > 0
            total[row] = np.nansum(norms, axis=0, dtype=np.float64)
            count[row] = was_added.sum(axis=0)
        return Provenance(self.labels, names, total, count)

    def to_pandas(self) -> Any:
        """A pandas `DataFrame`, one row per event and parameter.

        Raises `ImportError`, with the command that installs it, when pandas is not there.
        """
        try:
            import pandas
        except ImportError as missing:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas"
            ) from missing
        return pandas.DataFrame(_rows(self), columns=_COLUMNS)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the ledger to a file that `av.load` reads, or a page (`.html`) that any browser opens.

        A page is written anew each time, since it can be made again. A ledger that is there is
        not replaced unless `overwrite` says so: `FileExistsError`. The file appears when it is whole.
        """
        arguments.file("path", path)
        arguments.flag("overwrite", overwrite)
        if str(path).endswith(".html"):
            save_page(path, "Ledger", self.to_html())
            return
        end = {} if self.complete else {"complete": False}
        save(path, chunks(self), overwrite=overwrite, **end)

    def __repr__(self) -> str:
        counts = []
        for kind in KINDS:
            count = int(self.events.where("kind", kind).sum())
            if count:
                counts.append(f"{count} {kind}")
        size = f"{len(self)} events × {len(self.parameters)} parameters"
        text = f"Ledger: {size} ({', '.join(counts) or 'no events'})"
        if not self.complete:
            why = "its process ended before the recording was closed"
            if "stopped" in self.meta:
                why = f"the recording stopped: {_reasons(self.meta['stopped'])}"
            text += f" - incomplete: {why}"
        for note in self.meta.get("notes", ()):
            text += f"\n  Note: {note}"
        return text


def load(path: str | Path, *, repair: bool = False) -> Ledger:
    """Read a ledger from the file that `save` or `record(..., path=...)` wrote.

    Opening a file runs nothing that is in it. A process that was killed leaves what it had recorded, and
    `ledger.complete` is False. Raises `LedgerFileError` for a file that is no ledger, is newer than this accumviz, or
    is damaged; `repair=True` then gives what stands before the damage.

    >>> import os, tempfile, accumviz as av
    >>> path = os.path.join(tempfile.mkdtemp(), "run.ledger")
    >>> av.Ledger.build([], [dict(kind="backward", label="loss")]).save(path)
    >>> av.load(path).of("backward")[0].label
    'loss'
    """
    arguments.flag("repair", repair)
    reader = Reader(path, repair=repair)
    return valid(reader, lambda chunks: decode(chunks, Ledger))


def _place(noun: str, number: Any, count: int) -> int:
    """Return a number among so many, counted from the end where it is negative."""
    try:
        place: int = range(count)[number]
    except IndexError:
        raise IndexError(
            f"no {noun} {number} in this ledger; it has {counted(count, noun)}"
        ) from None
    return place


def recorded(source: Any, verb: str) -> Ledger:
    """Return the ledger that a verb was given, or that of a recording. Raises `TypeError` for what has none."""
    ledger = source
    if not isinstance(source, Ledger):
        ledger = getattr(source, "ledger", None)
    if not isinstance(ledger, Ledger):
        raise TypeError(
            f"{verb}() was given {arguments.a(source)}; expected a recording or a ledger: what record(...) gave, "
            "or av.load('run.ledger')"
        )
    return ledger


def _reasons(stopped: Any) -> str:
    """Why a recording stopped; of several ranks, which of them."""
    if isinstance(stopped, Mapping):
        return "; ".join(f"rank {rank}: {why}" for rank, why in stopped.items())
    return str(stopped)


def _rows(ledger: Ledger) -> Iterator[tuple[Any, ...]]:
    """Yield the values of `_COLUMNS` for each event and parameter; what there is none of is NaN or None."""
    erased, consumed, _ = ledger.outcomes
    for event in ledger:
        e = event.index
        about = [getattr(event, name) for name in _OF_EVENT]
        for p, parameter in enumerate(ledger.parameters):
            state = int(ledger.state[e, p])
            yield (
                e,
                *about,
                parameter.name,
                float(ledger.contribution[e, p]),
                float(ledger.grad[e, p]),
                bool(state & PRESENT),
                bool(state & CHANGED),
                _event_or_none(consumed[e, p]),
                _event_or_none(erased[e, p]),
            )


def _event_or_none(index: np.int32) -> int | None:
    return None if index < 0 else int(index)


# --- by hand ----------------------------------------------------------------------------------

# What a row of `build` has by the names of parameters.
_BY_NAME = ("contribution", "grad", "weights")


def _built(
    kind: type[Ledger],
    parameters: list[Parameter],
    rows: list[dict[str, Any]],
    **about: Any,
) -> Ledger:
    """Return the ledger of these rows; see `Ledger.build`. Raises `KeyError` for a name that no parameter has."""
    names = [parameter.name for parameter in parameters]
    events = [_event(e, row, names) for e, row in enumerate(rows)]
    contribution, added = _tables(rows, parameters, "contribution")
    grad, left = _tables(rows, parameters, "grad")
    _, weights = _tables(rows, parameters, "weights")
    have_weights = [bool(row.get("weights")) for row in rows]
    weighed = np.flatnonzero(have_weights)
    kept = tuple(range(len(parameters)))
    elements = Elements(kept, added, left, weighed, weights[weighed])
    state = np.zeros(grad.shape, np.uint8)
    before: dict[str, Any] = {}
    for e, row in enumerate(rows):
        for p, name in enumerate(names):
            state[e, p] = _state(row, name, before)
        before = row
    return kind(parameters, events, contribution, grad, state, elements, **about)


def _event(e: int, row: dict[str, Any], names: list[str]) -> Event:
    """Return the event of a row. Raises `KeyError` where it has something of a name that no parameter has."""
    for field in _BY_NAME:
        unknown = row.get(field, {}).keys() - names
        if unknown:
            raise KeyError(f"{field} of {min(unknown)!r}; the parameters are {names}")
    fields = {name: row[name] for name in row if name not in _BY_NAME}
    return Event(e, **fields)


def _tables(
    rows: list[dict[str, Any]], parameters: list[Parameter], field: str
) -> tuple[ndarray, ndarray]:
    """Return the norms and the elements that rows have of parameters; one number stands for all elements of one."""
    norms = np.zeros((len(rows), len(parameters)))
    parts = [norms[:, :0]]
    for p, parameter in enumerate(parameters):
        elements = np.full((len(rows), parameter.numel), np.nan)
        for e, row in enumerate(rows):
            of_row = row.get(field, {})
            if parameter.name in of_row:
                elements[e] = np.ravel(of_row[parameter.name])
        norms[:, p] = np.linalg.norm(elements, axis=1)
        parts.append(elements)
    return norms, np.concatenate(parts, axis=1)


def _state(row: dict[str, Any], name: str, before: dict[str, Any]) -> int:
    """Return the bits of one parameter after a row, which follows another."""
    contributed = name in row.get("contribution", {})
    state = CONTRIBUTED | CHANGED if contributed else 0
    grads = row.get("grad", {})
    if name not in grads:
        return state
    # A zeroing changes even where a 0 becomes a 0.
    changed = row["kind"] == "zero_grad" and not np.any(grads[name])
    earlier = before.get("grad", {})
    if row["kind"] != "backward" and name in earlier:
        changed |= not np.array_equal(grads[name], earlier[name], equal_nan=True)
    return state | PRESENT | CHANGED * changed
