"""What a comparison says: how far two gradients are apart, where two recordings part, and why if that can be told."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from accumviz import arguments
from accumviz.checks.distance import Part
from accumviz.checks.report import plain, told
from accumviz.ledger.events import Event
from accumviz.show import Displayed, literal, save_page

_LISTED = 8


class Compared(NamedTuple):
    """Two steps, and how far the gradients that they read are apart.

    `a` and `b` are indices of events. `relative` is ‖a − b‖ / ‖b‖ (NaN where only norms were kept, or a gradient
    is not finite), `uncertainty` what that may be off by (three standard errors; 0 where every element is known),
    `at_least` what it is in any case. `parameters` has the same of each parameter; `note` says what else there is
    to say.
    """

    a: int
    b: int
    optimizer: str
    relative: float
    uncertainty: float
    at_least: float
    parameters: tuple[Part, ...]
    note: str = ""


class Parting(NamedTuple):
    """The first events at which two recordings differ, and in what."""

    a: Event
    b: Event
    said: str


class Cause(NamedTuple):
    """One cause by name, what it does in a sentence, and the numbers that prove it."""

    name: str
    said: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison(Displayed):
    """What `compare` found between two recordings; `b` is the one that the error is relative to.

    `steps` are the pairs of steps, in order; `first` is the place among them of the first that differs by more than
    rounding (None: none does). `parting` is the first event at which they part, `causes` are those that the numbers
    prove; empty where they prove none. `ruled_out` maps a cause to why it is not this one, `undecided` to why it may
    be one beside or instead, `missing` lists the parameters of which only one recording knows, and `notes` what to
    know beside.
    """

    steps: tuple[Compared, ...]
    first: int | None
    parting: Parting | None = None
    causes: tuple[Cause, ...] = ()
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    undecided: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> Compared:
        """The pair of steps that counts: the first that differs, else one that is not known, or differs most."""
        if self.first is not None:
            return self.steps[self.first]
        return max(
            self.steps,
            key=lambda pair: [
                math.isnan(x) or x for x in (pair.relative, pair.at_least)
            ],
        )

    @property
    def relative(self) -> float:
        """The relative error of the gradient at that step: ‖a − b‖ / ‖b‖."""
        return self.step.relative

    @property
    def uncertainty(self) -> float:
        """What it may be off by."""
        return self.step.uncertainty

    @property
    def verdict(self) -> str:
        """`"equal"`, `"equal to rounding"`, `"apart"`, or `"not known"`: elements were not kept, or are not finite."""
        if self.first is not None:
            return "apart"
        if any(math.isnan(pair.relative) for pair in self.steps):
            return "not known"
        return (
            "equal"
            if all(pair.relative == pair.uncertainty == 0 for pair in self.steps)
            else "equal to rounding"
        )

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The comparison as text."""
        lines = [f"Comparison: {self.summary}"]
        for cause in self.causes:
            lines += [f"  cause: {cause.name}. {literal(cause.said)}"]
            if cause.evidence:
                lines.append(
                    "    "
                    + "; ".join(
                        f"{name}: {told(value)}"
                        for name, value in cause.evidence.items()
                    )
                )
        if self.first is not None and not self.causes:
            lines.append("  cause: not named")
        if self.parting is not None:
            lines.append(f"  they part at: {literal(self.parting.said)}")
            lines += [
                f"    {letter}: {place(event)}"
                for letter, event in zip("ab", self.parting[:2], strict=True)
            ]
        if len(self.steps) > 1:
            lines += ["", "  event of a  event of b  error"]
            lines += [
                f"  {p.a:>10}  {p.b:>10}  {error(p)}{_noted(p.note)}"
                for p in self.steps[:_LISTED]
            ]
            if len(self.steps) > _LISTED:
                lines.append(f"  … {len(self.steps) - _LISTED} more")
        if self.first is not None:
            lines += ["", "  of it, by parameter:"]
            lines += [
                f"  {share:>7}  {literal(name)}: {said}"
                for share, name, said in self.by_parameter()
            ]
        for head, causes in (
            ("not the cause", self.ruled_out),
            ("perhaps a cause", self.undecided),
        ):
            if causes:
                lines += [
                    "",
                    f"  {head}:",
                    *(f"    {name}: {literal(why)}" for name, why in causes.items()),
                ]
        if self.missing:
            lines += ["", f"  only in one of them: {literal(told(list(self.missing)))}"]
        return "\n".join(lines + [f"  note: {literal(note)}" for note in self.notes])

    @property
    def summary(self) -> str:
        """The result in one line."""
        many = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)} compared"
        said = self.step.note if math.isnan(self.step.at_least) else ""
        if self.first is None:
            return f"{self.verdict}{said and ': '}{said} ({many})"
        return f"{said or f'the gradient is off by {error(self.step)}'} at step {self.first + 1} ({many})"

    def by_parameter(self) -> list[tuple[str, str, str]]:
        """Of the step that counts, each parameter's share of the squared error, its name, and its own error."""
        parts = sorted(
            self.step.parameters,
            key=lambda part: -(part.least if part.how == "norms" else part.squared),
        )
        whole = sum(part.squared for part in parts if not math.isnan(part.squared))
        shown = []
        for part in parts[:_LISTED]:
            share = (
                "?"
                if math.isnan(part.squared) or not whole
                else f"{100 * part.squared / whole:.0f} %"
            )
            only = (
                f"only {part.side} has a gradient"
                if part.how == "one"
                else error_of(part)
            )
            shown.append((share, part.name, only))
        return shown

    def to_json(self) -> str:
        """The comparison for machines: one JSON object, with NaN and the infinities by name."""
        pairs = [
            pair._asdict()
            | {"parameters": [part._asdict() for part in pair.parameters]}
            for pair in self.steps
        ]
        part = self.parting
        whole = {
            "verdict": self.verdict,
            "relative": self.relative,
            "uncertainty": self.uncertainty,
            "first": self.first,
            "steps": pairs,
            "parting": None
            if part is None
            else {"a": asdict(part.a), "b": asdict(part.b), "said": part.said},
            "causes": [cause._asdict() for cause in self.causes],
            "ruled_out": dict(self.ruled_out),
            "undecided": dict(self.undecided),
            "missing": list(self.missing),
            "notes": list(self.notes),
        }
        return json.dumps(plain(whole), allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write it: a page (`.html`), JSON (`.json`) or, under any other name, text."""
        arguments.file("path", path)
        suffix = Path(path).suffix.lower()
        if suffix in (".html", ".htm"):
            save_page(path, "Comparison", self.to_html())
            return
        text = self.to_json() if suffix == ".json" else self.text()
        Path(path).write_text(text + "\n", "utf-8", "replace")


def error(pair: Compared) -> str:
    """A relative error with what it may be off by."""
    if not math.isnan(pair.relative):
        return percent(pair.relative) + (
            f" ± {percent(pair.uncertainty)}" if pair.uncertainty else ""
        )
    if math.isnan(pair.at_least):
        return "not known"
    return f"at least {percent(pair.at_least)} (from norms)"


def error_of(part: Part) -> str:
    """Likewise, of one parameter."""
    if part.how == "norms":
        return f"not known ({part.how} only)"
    if part.how == "not finite":
        return f"not finite in {' and '.join(part.side)}"
    return percent(part.relative) + (
        f" ± {percent(part.uncertainty)}" if part.uncertainty else ""
    )


def percent(number: float) -> str:
    """A share in words.

    >>> percent(0.2253), percent(3.0), percent(2e-7), percent(0.0)
    ('22.5 %', '300 %', '2e−5 %', '0 %')
    """
    if not math.isfinite(number):
        return "infinitely far" if number > 0 else "not known"
    return (
        f"{100 * number:.3g} %".replace("e-0", "e−")
        .replace("e-", "e−")
        .replace("e+0", "e")
        .replace("e+", "e")
    )


def place(event: Event) -> str:
    """Where an event stands."""
    where = (
        f" {literal(event.file)}:{event.line}  {literal(event.source)}"
        if event.file
        else ""
    )
    return f"event {event.index}, {event.kind}{where}"


def _noted(note: str) -> str:
    return f"  ({note})" if note else ""
