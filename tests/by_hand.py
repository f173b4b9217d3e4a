"""Loops played by hand: what they do to `.grad` is computed here, and written down as a recording would."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from accumviz.ledger.events import CHANGED
from accumviz.ledger.ledger import Ledger, Parameter

T = TypeVar("T")
LINES = {
    "backward": "loss.backward()",
    "zero_grad": "optimizer.zero_grad()",
    "step": "optimizer.step()",
    "clip": "clip_grad_norm_(model.parameters(), 1.0)",
    "unscale": "scaler.unscale_(optimizer)",
    "schedule": "scheduler.step()",
}


def term(
    elements: float | None = 8, factor: float | None = 0.25, reduction: str = "mean", op: str = "NllLossBackward0"
) -> dict[str, Any]:
    return {"op": op, "reduction": reduction, "elements": elements, "factor": factor, "unknown": ""}


class Play:
    """A loop over some optimizers' parameters (`{"w": 0, "v": 0, "d": 1}`: which optimizer owns which).

    `weights` follows, for each live backward and parameter, the coefficient with which its
    contribution is in `.grad`: what `shares` has to find, computed forwards.
    """

    def __init__(self, owners: dict[str, int | None] | None = None, seed: int = 0, rank: int | None = None) -> None:
        self.owners: dict[str, Any] = {"w": 0, "v": 0} if owners is None else owners
        self.rng = np.random.default_rng(seed)
        self.rows: list[dict[str, Any]] = []
        self.grad: dict[str, np.ndarray] = {}
        self.weights: dict[str, dict[int, float]] = {name: {} for name in self.owners}
        self.steps: dict[int, dict[int, float]] = {}
        self.amp = 1.0
        self.rank = rank
        self.dtypes: dict[str, str] = {}
        self.meta: dict[str, Any] = {}

    def _put(self, kind: str, line: int | None = None, **fields: Any) -> int:
        number = list(LINES).index(kind) + 1 if kind in LINES else 0
        grads = {name: value.tolist() for name, value in self.grad.items()}
        about = {"file": "train.py", "line": line or 10 * number, "source": LINES.get(kind, "")}
        self.rows.append({"kind": kind, "grad": grads, **about, **fields})
        return len(self.rows) - 1

    def backward(
        self,
        *terms: dict[str, Any],
        into: tuple[str, ...] | None = None,
        label: str = "loss",
        line: int | None = None,
        within: str = "",
        numbers: tuple[float, float] | None = None,
        **details: Any,
    ) -> int:
        into = tuple(self.owners) if into is None else into
        contribution = {}
        for name in into:
            added = self.rng.normal(size=3) * self.amp
            contribution[name] = added.tolist()
            self.grad[name] = self.grad.get(name, 0.0) + added
            self.weights[name][len(self.rows)] = self.amp
        if self.amp != 1:
            details["amp_scale"] = self.amp
        if terms or "terms" not in details:
            details["terms"] = list(terms) or [term()]
        if details["terms"] is None:
            del details["terms"]
        saved = {} if numbers is None else {"saved_before": numbers[0], "saved_after": numbers[1]}
        source = f"{label}.backward()" if "(" not in label else label
        said = {"label": label, "source": source, "within": within, "contribution": contribution, "details": details}
        return self._put("backward", line, **said, **saved)

    def _scale(self, by: float, kind: str, names: Iterable[str] = (), **fields: Any) -> int:
        """An event that multiplies what is in the `.grad` of these parameters, or of all."""
        touched = [name for name in names or self.grad if name in self.grad]
        for name in touched:
            self.grad[name] = self.grad[name] * by
            self.weights[name] = {b: weight * by for b, weight in self.weights[name].items()}
        at = self._put(kind, **fields)
        self.touched(at, touched)
        return at

    def clip(self, most: float = 1.0) -> int:
        total = math.sqrt(sum(float((g**2).sum()) for g in self.grad.values()))
        details = {"by": "norm", "max_norm": most, "total_norm": total}
        return self._scale(min(1.0, most / (total + 1e-6)), "clip", details=details)

    def edit(self, by: float, names: tuple[str, ...] = ()) -> int:
        return self._scale(by, "edit", names)

    def unscale(self, optimizer: int = 0) -> int:
        names = [name for name, owner in self.owners.items() if owner == optimizer]
        return self._scale(1 / self.amp, "unscale", names, details={"amp_scale": self.amp})

    def sync(self, ranks: int = 2) -> int:
        """An average over ranks of which the others have nothing: each live weight once by 1/ranks."""
        details = {"op": "all-reduce", "bytes": 12, "ranks": ranks}
        return self._scale(1 / ranks, "sync", within="backward", details=details)

    def touched(self, event: int, names: list[str]) -> None:
        """Say that the event changed these parameters' `.grad`."""
        self.rows[event]["changed"] = names

    def step(self, optimizer: int = 0, *, skipped: bool = False, **fields: Any) -> int:
        names = [name for name, owner in self.owners.items() if owner == optimizer]
        at = len(self.rows)
        if not skipped:
            self.steps[at] = {b: weight for name in names for b, weight in self.weights[name].items()}
        details = {"optimizer": "SGD", "optimizer_index": optimizer, "lr": [0.1]}
        details |= {"skipped": True} if skipped else {}
        return self._put("step", details=details, **fields)

    def zero(self, optimizer: int | None = None, **fields: Any) -> int:
        for name, owner in self.owners.items():
            if optimizer is None or owner == optimizer:
                self.weights[name] = {}
                self.grad.pop(name, None)
        return self._put("zero_grad", details={"set_to_none": True}, **fields)

    def each(self, windows: Iterable[T]) -> Iterator[T]:
        """Go through windows, each of which ends with a step and a zeroing."""
        for window in windows:
            yield window
            self.step()
            self.zero()

    def schedule(self, **fields: Any) -> int:
        about = {"scheduler": "StepLR", "optimizer": "SGD", "optimizer_index": 0, "lr": [0.05]}
        return self._put("schedule", label="StepLR", details=about, **fields)

    def loader(self, what: str) -> int:
        about = {"what": what, "loader": 0, "batches": 4, "length": 4, "drop_last": False}
        return self._put("loader", details=about)

    @property
    def ledger(self) -> Ledger:
        count = len({owner for owner in self.owners.values() if owner is not None})
        parameters = [
            Parameter(
                name,
                (3,),
                dtype=self.dtypes.get(name, "float32"),
                optimizers=() if owner is None else owner if isinstance(owner, tuple) else (owner,),
                rank=self.rank,
            )
            for name, owner in self.owners.items()
        ]
        meta = {"optimizers": [f"SGD {i}" for i in range(count)], "ended": "closed"} | self.meta
        if self.rank is not None:
            meta |= {"rank": self.rank, "ranks": 2}
        rows = [{key: value for key, value in row.items() if key != "changed"} for row in self.rows]
        built = Ledger.build(parameters, rows, meta=meta)
        state = np.array(built.state)
        for event, row in enumerate(self.rows):
            for name in row.get("changed", ()):
                state[event, list(self.owners).index(name)] |= CHANGED
        held = (built.parameters, built.events, built.contribution, built.grad, state, built.elements)
        return Ledger(*held, meta=meta)


def of(*windows: list[Any]) -> Play:
    """Windows of backwards, each of one term or of several."""
    play = Play()
    for window in play.each(windows):
        for terms in window:
            play.backward(*(terms if isinstance(terms, tuple) else (terms,)))
    return play


def windows(*counts: int, factor: float | None = None, elements: float = 8, clip: bool = False) -> Play:
    """Right windows of so many micro-batches: divided by their own number, or by a factor that is given."""
    play = Play()
    for count in play.each(counts):
        for _ in range(count):
            play.backward(term(elements, 1 / count if factor is None else factor))
        if clip:
            play.clip(0.5)
    return play


def played(
    events: str,
    owners: dict[str, Any] | None = None,
    *,
    amp: float = 1.0,
    said: bool = False,
    clip: float = 0.5,
    **meta: Any,
) -> Play:
    """A loop of events, each one sign, and in brackets which parameters or which optimizer it is for, if not for all.

    A digit is a backward of a mean divided by it (whose divisor was recorded, if `said`); `b` and `Z` happen inside
    the step that follows them. `S` is skipped by the scaler, `e` halves gradients by hand, `+` doubles the scale.
    """
    play = Play(owners)
    play.amp = amp
    play.meta |= meta
    source = "optimizer.step()" if amp == 1 else "scaler.step(optimizer)"
    signs: dict[str, Callable[..., object]] = {
        "s": lambda *optimizer: play.step(*optimizer, source=source),
        "S": lambda: play.step(skipped=True),
        "z": play.zero,
        "Z": lambda: play.zero(within="step"),
        "b": lambda: play.backward(term(8, 0.5), within="step"),
        "c": lambda: play.clip(clip),
        "e": lambda *names: play.edit(0.5, names),
        "u": play.unscale,
        "l": play.schedule,
        "+": lambda: setattr(play, "amp", play.amp * 2),
        "(": lambda: play.loader("begins"),
        ")": lambda: play.loader("ends"),
    }
    for sign, bracket in re.findall(r"(.)(?:\[(.*?)\])?", events):
        of = [int(one) if one.isdigit() else one for one in bracket.split(",") if one]
        if sign.isdigit():
            divided = term(8, 1 / int(sign)) | ({"divisor": float(sign)} if said else {})
            play.backward(divided, into=tuple(of) or None)
        else:
            signs[sign](*of)
    return play
