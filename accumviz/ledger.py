"""The ledger: the immutable record of everything that happened to `.grad`. Pure: stdlib and numpy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from accumviz import fates, files, ledgerfile, merging
from accumviz.display import Displayed
from accumviz.fates import Fates, Window

# Bits of `Ledger.state`, one byte per event and parameter.
PRESENT, CONTRIBUTED, CHANGED = 1, 2, 4
KINDS = ("backward", "zero_grad", "step", "unscale", "clip", "sync", "edit")


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
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Event:
    """One thing that happened to `.grad`, and the line of the user's code that did it.

    `index` is its place in the ledger, `kind` one of `"backward"`, `"zero_grad"`, `"step"`,
    `"unscale"`, `"clip"`, `"sync"` and `"edit"`. `label` is what a loss or an optimizer is called
    there; `file`, `line` and `source` are where. `details` holds what only its kind has, such as
    the `lr` of a step.

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
    loss: float = float("nan")
    scale: float = 1.0
    saved_before: float = float("nan")
    saved_after: float = float("nan")
    within: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    allocated: float = float("nan")
    peak: float = float("nan")

    @property
    def skipped(self) -> bool:
        """Whether this is a step that changed no weight (the gradient scaler found inf or NaN)."""
        return bool(self.details.get("skipped"))


@dataclass(frozen=True, eq=False)
class Provenance(Displayed):
    """The loss × parameter matrix: summed contribution norms, and how many contributions there were.

    `labels` name the rows of `total` and `count`, `parameters` their columns.
    """

    labels: tuple[str, ...]
    parameters: tuple[str, ...]
    total: np.ndarray
    count: np.ndarray


class Ledger(Displayed):
    """Events × parameters: what each event added to, and left in, every `.grad`.

    It is the sequence of its events: `len(ledger)`, `ledger[3]` and `for event in ledger` are what
    they are for a list. `parameters` are its columns, `sources` the texts of the files that the
    events point into, `meta` says with what it was recorded, and `complete` is False when the
    recording's process ended before it was closed.

    `contribution` and `grad` are float32 arrays (events × parameters) of 2-norms: what a
    backward added, and `.grad` after the event; NaN where there is none. `state` holds the
    bits `PRESENT` (`.grad` is not None), `CONTRIBUTED` and `CHANGED`. `exact` maps a parameter's
    index to two float64 arrays (events × elements): contribution and `.grad`, element by element.

    >>> from accumviz.ledger import Ledger, Parameter
    >>> w = Parameter("w", shape=(1,), optimizers=(0,))
    >>> ledger = Ledger.build([w], [
    ...     dict(kind="backward", contribution={"w": -16.0}, grad={"w": -16.0}),
    ...     dict(kind="backward", contribution={"w": -4.0}, grad={"w": -20.0}),
    ...     dict(kind="step", details={"optimizer": "SGD"}, grad={"w": -20.0}),
    ... ])
    >>> ledger.windows()
    [Window(step=2, optimizer='SGD', backwards=(0, 1), scale=2.0)]
    >>> ledger.running_sum("w").ravel().tolist()
    [-16.0, -20.0, -20.0]
    >>> ledger.live(1, "w")
    [0, 1]
    """

    def __init__(
        self,
        parameters: tuple[Parameter, ...],
        events: tuple[Event, ...],
        contribution: np.ndarray,
        grad: np.ndarray,
        state: np.ndarray,
        exact: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None,
        *,
        sources: Mapping[str, str] | None = None,
        meta: Mapping[str, Any] | None = None,
        complete: bool = True,
    ) -> None:
        expected = (len(events), len(parameters))
        for name, given in (("contribution", contribution), ("grad", grad), ("state", state)):
            if given.shape != expected:
                raise ValueError(f"{name} has shape {given.shape}, expected events × parameters {expected}")
        self.parameters = parameters
        self.events = events
        self.contribution = contribution.astype(np.float32, copy=False)
        self.grad = grad.astype(np.float32, copy=False)
        self.state = state.astype(np.uint8, copy=False)
        self.exact: dict[int, tuple[np.ndarray, np.ndarray]] = dict(exact or {})
        self.sources = dict(sources or {})
        self.meta = dict(meta or {})
        self.complete = complete
        for array in (self.contribution, self.grad, self.state):
            array.flags.writeable = False
        for array in (array for pair in self.exact.values() for array in pair):
            array.flags.writeable = False

    @classmethod
    def build(cls, parameters: list[Parameter], rows: list[dict[str, Any]], **kwargs: Any) -> Ledger:
        """Make a ledger by hand, as a test or an example needs it.

        `rows` holds one dict per event: the fields of `Event`, and by parameter name `contribution`
        (a number or a list, element by element) and `grad` (the same; absent: None).
        """
        shape = (len(rows), len(parameters))
        norms = {name: np.full(shape, np.nan, np.float32) for name in ("contribution", "grad")}
        exact = {
            i: (np.full((len(rows), p.numel), np.nan), np.full((len(rows), p.numel), np.nan))
            for i, p in enumerate(parameters)
        }
        state = np.zeros(shape, np.uint8)
        events = []
        for e, row in enumerate(rows):
            for which, name in enumerate(("contribution", "grad")):
                for key, value in row.get(name, {}).items():
                    p = next(i for i, parameter in enumerate(parameters) if parameter.name == key)
                    values = np.broadcast_to(np.ravel(np.asarray(value, float)), (parameters[p].numel,))
                    norms[name][e, p] = np.sqrt((values**2).sum())
                    exact[p][which][e] = values
                    state[e, p] |= (CONTRIBUTED | CHANGED) if which == 0 else PRESENT
            events.append(Event(e, **{k: v for k, v in row.items() if k not in norms}))
        return cls(tuple(parameters), tuple(events), norms["contribution"], norms["grad"], state, exact, **kwargs)

    @classmethod
    def merge(cls, ledgers: Iterable[Ledger | str | Path]) -> Ledger:
        """Put the ledgers of several ranks into one, in which events and parameters say their rank.

        `ledgers` are ledgers, or the files that `record(..., path=...)` wrote on each rank. Each
        rank's events keep their order; a collective that all ranks took part in is one event.
        Raises `ValueError` when there is none, or when two are of the same rank.

        >>> rows = [dict(kind="backward", contribution={"w": 1.0}, grad={"w": 1.0})]
        >>> one, two = (Ledger.build([Parameter("w", (1,))], rows, meta={"rank": r}) for r in (0, 1))
        >>> [(e.kind, e.rank) for e in Ledger.merge([one, two])]
        [('backward', 0), ('backward', 1)]
        """
        return merging.merge([files.load(x) if isinstance(x, str | Path) else x for x in ledgers])

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __getitem__(self, index: int) -> Event:
        return self.events[index]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of all losses, in order of first appearance."""
        return tuple(dict.fromkeys(event.label for event in self.events if event.kind == "backward"))

    def of(self, kind: str) -> list[Event]:
        """The events of one kind.

        Raises `ValueError` for a kind that does not exist.
        """
        if kind not in KINDS:
            raise ValueError(f"no event kind {kind!r}; expected one of {', '.join(KINDS)}")
        return [event for event in self.events if event.kind == kind]

    def index(self, parameter: str | int) -> int:
        """The column of a parameter, by name, alias or index.

        Raises `KeyError` with the nearest names when there is none.
        """
        if isinstance(parameter, int):
            return range(len(self.parameters))[parameter]
        for i, candidate in enumerate(self.parameters):
            if parameter == candidate.name or parameter in candidate.aliases:
                return i
        names = [p.name for p in self.parameters]
        near = difflib.get_close_matches(parameter, names, n=3, cutoff=0.3) or names[:3]
        raise KeyError(f"no parameter {parameter!r} in this ledger; nearest: {', '.join(near)}")

    def values(self, parameter: str | int, of: str = "grad") -> np.ndarray:
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

    @cached_property
    def fates(self) -> Fates:
        """What became of each contribution: erased by which event, consumed by which steps."""
        return fates.fates(self)

    def live(self, event: int, parameter: str | int) -> list[int]:
        """The backwards whose contributions are in this parameter's `.grad` after the event.

        Returns indices of events; -1 is the last event, as in a list.
        """
        p = self.index(parameter)
        event = range(len(self))[event]
        born = np.flatnonzero(self.state[: event + 1, p] & CONTRIBUTED)
        erased = self.fates.erased[born, p]
        return [int(b) for b in born[(erased < 0) | (erased > event)]]

    def unconsumed(self, event: int) -> dict[str, list[int]]:
        """The contributions, by parameter, that this event erased before any step had used them."""
        if self.events[event].kind == "sync":  # it hands them on
            return {}
        ends, columns, births = self._unconsumed
        here = slice(*np.searchsorted(ends, [range(len(self))[event], range(len(self))[event] + 1]))
        found: dict[str, list[int]] = {}
        for p, born in zip(columns[here].tolist(), births[here].tolist(), strict=True):
            found.setdefault(self.parameters[p].name, []).append(born)
        return found

    @cached_property
    def _unconsumed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every contribution that no step used: what erased it, its parameter and its backward, in this order."""
        births, columns = np.nonzero((self.fates.erased >= 0) & (self.fates.steps == 0))
        ends = self.fates.erased[births, columns]
        order = np.lexsort((births, columns, ends))
        return ends[order], columns[order], births[order]

    def windows(self) -> list[Window]:
        """The accumulation window of every step: which backwards it consumed.

        `scale` is the sum of their scales: 1.0 when K losses were each divided by K.
        """
        return fates.windows(self)

    def running_sum(self, parameter: str | int) -> np.ndarray:
        """Element by element, the sum of the live contributions after each event.

        Returns float64, events × elements: equal to `.grad` up to rounding as long as nothing
        but backward and zero_grad touched it. Raises `KeyError` as `values` does.
        """
        p = self.index(parameter)
        parts = self.values(p, "contribution")
        total = np.zeros_like(parts)
        born = np.flatnonzero(self.state[:, p] & CONTRIBUTED)
        total[born] = parts[born]
        ends = np.where(self.fates.erased[born, p] < 0, len(self), self.fates.erased[born, p])
        # What is born between two ends is erased together, so that sums run from the first of them to its end.
        ends, first = np.unique(ends, return_index=True)
        for start, end in zip(born[first].tolist(), ends.tolist(), strict=True):
            total[start:end] = np.cumsum(total[start:end], axis=0)
        return total

    def provenance(self) -> Provenance:
        """Which loss wrote into which parameter, and how much: the loss × parameter matrix."""
        rows = {label: [e.index for e in self.of("backward") if e.label == label] for label in self.labels}
        total = np.array([np.nansum(self.contribution[r], axis=0, dtype=np.float64) for r in rows.values()])
        count = np.array([(self.state[r] & CONTRIBUTED > 0).sum(axis=0) for r in rows.values()])
        shape = (len(rows), len(self.parameters))
        names = tuple(p.name for p in self.parameters)
        return Provenance(self.labels, names, total.reshape(shape), count.reshape(shape).astype(np.int64))

    def to_pandas(self) -> Any:
        """A pandas `DataFrame`, one row per event and parameter.

        Raises `ImportError`, with the command that installs it, when pandas is not there.
        """
        try:
            import pandas
        except ImportError as missing:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from missing
        e, p = (a.ravel() for a in np.indices(self.state.shape))
        columns: dict[str, Any] = {
            name: np.array([getattr(event, name) for event in self.events], dtype)[e]
            for name, dtype in (
                ("kind", object),
                ("label", object),
                ("file", object),
                ("line", int),
                ("loss", float),
                ("scale", float),
                ("saved_before", float),
                ("saved_after", float),
                ("allocated", float),
                ("peak", float),
            )
        }
        return pandas.DataFrame(
            {
                "event": e,
                **columns,
                "parameter": np.array([x.name for x in self.parameters], object)[p],
                "contribution": self.contribution.ravel(),
                "grad": self.grad.ravel(),
                "present": (self.state & PRESENT > 0).ravel(),
                "changed": (self.state & CHANGED > 0).ravel(),
                "consumed_by": self.fates.consumed.ravel(),
                "erased_by": self.fates.erased.ravel(),
            }
        )

    def save(self, path: str | Path) -> None:
        """Write the ledger to a file that `av.load` reads, or a page (`.html`) that any browser opens."""
        if str(path).endswith(".html"):
            self.save_page(path, "Ledger")
            return
        with files.Writer(path, "ledger") as writer:
            writer.append(self.header())
            writer.append(*self.chunk())

    def header(self) -> dict[str, Any]:
        """What a file says once: the parameters and where the recording was made."""
        return ledgerfile.header(self)

    def chunk(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The events and their arrays, as one chunk of a file."""
        return ledgerfile.chunk(self)

    @classmethod
    def from_contents(cls, contents: files.Contents) -> Ledger:
        """The ledger in a file's chunks."""
        return ledgerfile.decode(contents)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(self.of(k))} {k}" for k in KINDS if self.of(k)) or "no events"
        lines = [f"Ledger: {len(self)} events × {len(self.parameters)} parameters ({counts})"]
        if not self.complete:
            lines[0] += " - incomplete: its process ended before the recording was closed"
        lines += [f"  Note: {note}" for note in self.meta.get("notes", ())]
        names = [p.name for p in self.parameters[:4]]
        width = max([9, *(len(name) for name in names)])
        lines.append("  #  event      label        " + "  ".join(f"{name:>{width}}" for name in names))
        for event in self.events[:12]:
            cells = []
            for p in range(len(names)):
                there = self.state[event.index, p] & PRESENT
                value = self.values(p)[event.index] if p in self.exact else self.grad[event.index, p : p + 1]
                shown = f"{value[0]:.4g}" if value.size == 1 else f"|{self.grad[event.index, p]:.4g}|"
                cells.append(f"{shown if there else 'None':>{width}}")
            lines.append(f"{event.index:>3}  {event.kind:<9}  {event.label[:11]:<11}  " + "  ".join(cells))
        if len(self) > 12 or len(self.parameters) > 4:
            more = max(len(self) - 12, 0), max(len(self.parameters) - 4, 0)
            lines.append("  … {} more events, {} more parameters".format(*more))
        return "\n".join(lines)
