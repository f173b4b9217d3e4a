"""The page of a lab: recorded arrangements of a loop, which the reader's moves choose between."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accumviz.book import weights
from accumviz.checks.report import Finding, Report, told
from accumviz.ledger.ledger import Ledger
from accumviz.show import Displayed, check_page_name, counted, literal, save_page
from accumviz.views import player, shares, style, words
from accumviz.views.payload import encode, identity, ledger_data
from accumviz.views.player import fragment, widget
from accumviz.views.report import first_line

# What is told of a run in parts, so that runs which differ in one part share the others.
_IN_PARTS = ("e", "shares", "report", "weights")


class Offer(NamedTuple):
    """A choice: its name, its title, its values with what each is called, and the line that it moves ("" for none).

    With an `example`, a kernel takes other values, too.
    """

    name: str
    title: str
    values: tuple[str, ...]
    labels: tuple[str, ...]
    line: str
    example: str = ""


@dataclass(frozen=True)
class Arrangement:
    """An arrangement that ran: the rows of its text (lines, and places for lines), its ledger and its report.

    `remark` says what the report does not, and what is wrong all the same.
    """

    rows: Sequence[Any]
    text: str
    ledger: Ledger
    report: Report
    remark: str = ""

    @property
    def right(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return self.report.healthy and not self.remark


class Lab(Displayed):
    """A loop whose lines can be moved, with a recording of each arrangement."""

    def __init__(
        self,
        offers: Sequence[Offer],
        start: tuple[str, ...],
        recorded: Mapping[tuple[str, ...], Arrangement],
        task: str,
        record: Callable[[Mapping[str, str]], Arrangement],
        loss: Callable[..., float] | None,
    ) -> None:
        self.offers, self.start, self.recorded = tuple(offers), start, dict(recorded)
        self.task, self.record, self.loss = task, record, loss

    def run(self, **choice: Any) -> Ledger:
        """The ledger of one arrangement, as in `lab.run(zero_grad="nowhere")`: what is not named is as at the start.

        Raises `ValueError` for an arrangement that is not recorded.
        """
        return self._arrangement(choice).ledger

    def check(self, **choice: Any) -> Report:
        """The report on one arrangement; raises as `run` does."""
        return self._arrangement(choice).report

    def text(self, **choice: Any) -> str:
        """The source of one arrangement; raises as `run` does."""
        return self._arrangement(choice).text

    def _arrangement(self, choice: Mapping[str, Any]) -> Arrangement:
        names = [offer.name for offer in self.offers]
        for name, value in choice.items():
            if name not in names:
                raise ValueError(
                    f"there is no choice {name!r:.80}; the choices are {', '.join(names)}"
                )
            offered = self.offers[names.index(name)].values
            if str(value) not in offered:
                raise ValueError(
                    f"{name}={value!r:.80} is not recorded; recorded: {', '.join(offered)}"
                )
        key = tuple(
            str(choice.get(name, first))
            for name, first in zip(names, self.start, strict=True)
        )
        if key not in self.recorded:
            raise ValueError(
                f"{dict(choice)!r:.160} is not recorded: the lab has the loops that differ from its start in at most "
                "two choices"
            )
        return self.recorded[key]

    @cached_property
    def content(self) -> dict[str, Any]:
        """What the page is told: each different run once, and of each part of it, what differs once."""
        numbers = {id(run): i for i, run in enumerate(self._runs)}
        grid = {}
        for key, run in self.recorded.items():
            grid[".".join(map(str, self._places(key)))] = numbers[id(run)]
        rows, parts = _shared([self._flat(run) for run in self._runs])
        return {
            "offers": [offer._asdict() for offer in self.offers],
            "start": self._places(self.start),
            "task": self.task,
            "grid": grid,
            "runs": rows,
            "parts": parts,
        }

    def _places(self, key: Sequence[str]) -> list[int]:
        """Return where an arrangement's values are in the lists of the choices."""
        pairs = zip(self.offers, key, strict=True)
        return [offer.values.index(value) for offer, value in pairs]

    @cached_property
    def _ground(self) -> weights.Field | None:
        """The ground below the weights: one for all arrangements, so that their ways can be compared.

        Where there is no loss to be seen, it is there for the paths of right loops: one that moves less
        than all of them would make it too narrow.
        """
        if self.loss is not None:
            return weights.field([run.ledger for run in self._runs], self.loss)
        reaches = [_reach(run.ledger) for run in self._runs]
        right = [
            reach for run, reach in zip(self._runs, reaches, strict=True) if run.right
        ]
        least = np.min(right or [np.zeros_like(reaches[0])], axis=0)
        pairs = zip(self._runs, reaches, strict=True)
        return weights.field(
            [run.ledger for run, reach in pairs if (reach >= least).all()]
        )

    @property
    def _runs(self) -> list[Arrangement]:
        """The arrangements that differ."""
        return list({id(run): run for run in self.recorded.values()}.values())

    def _flat(self, run: Arrangement) -> dict[str, Any]:
        """A run as its parts by name: `e.k` is the part `k` of what is told of events."""
        data, blob = ledger_data(run.ledger, self._ground)
        if blob:
            raise ValueError(
                f"the loop has {len(run.ledger):,} events: too many for a lab"
            )
        whole = data | {"about": counted(len(run.ledger), "event")}
        whole |= {
            "rows": _rows(run),
            "report": report_data(run.report) | {"remark": literal(run.remark)},
        }
        if "shares" in whole:
            whole["shares"] = _in_columns(whole["shares"])
        flat: dict[str, Any] = {}
        for name, part in whole.items():
            if name in _IN_PARTS:
                flat |= {f"{name}.{key}": value for key, value in part.items()}
            else:
                flat[name] = part
        return flat

    @cached_property
    def id(self) -> str:
        """The name by which a permalink finds this lab on a page: it stays while the start does."""
        return identity({"lab": list(self.start), "task": self.task})

    def to_html(self) -> str:
        """A fragment of HTML that needs nothing else; with its scripts stripped, the start remains as text."""
        sheets, script = assets()
        return fragment(
            "lab", self.id, self._text(), encode(self.content), sheets, script
        )

    def _text(self) -> str:
        run = self.recorded[self.start]
        said = "".join(f"<p>{html.escape(line)}</p>" for line in self._said(run))
        return (
            f'<details class="av-words" open><summary>In words</summary><pre>{html.escape(run.text)}</pre>{said}'
            "</details>\n"
        )

    def _said(self, run: Arrangement) -> list[str]:
        """The task, the shares and the report of an arrangement, as text; of a task the suggestions are left out."""
        lines = ["Repair this loop until check says healthy."] if self.task else []
        lines += [bar.words for bar in shares.bars(run.ledger)[0]]
        report = run.report.text()
        if self.task:
            report = "; ".join(
                [
                    first_line(run.report),
                    *(finding.cause for finding in run.report.findings),
                ]
            )
        lines += [line.strip() for line in report.splitlines() if line.strip()]
        return [*lines, run.remark] if run.remark else lines

    def save(self, path: str | Path) -> None:
        """Write one self-contained page that any browser opens.

        Raises `ValueError` for a name that does not end in `.html`.
        """
        check_page_name(path)
        save_page(path, "accumviz lab", self.to_html())

    def live(self) -> Any:
        """The same view as a widget, in which the kernel records any other arrangement, and other values.

        What goes wrong there is said in the widget. Raises `ImportError` when anywidget is not installed.
        """
        sheets, script = assets()
        shown = widget(
            script, "".join(sheets), "lab", encode(self.content), live=True, id=self.id
        )

        def record(change: Any) -> None:
            asked = change["new"]
            answer: dict[str, Any] = {"n": asked.get("n"), "key": asked.get("key")}
            try:
                answer["run"] = encode(self._flat(self.record(asked["choice"])))
            except Exception as failure:
                text = literal(str(failure).partition("\n")[0])
                answer["error"] = f"{type(failure).__name__}: {text}"[:400]
            shown.told = answer

        shown.observe(record, "ask")
        return shown

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        bundle = super()._repr_mimebundle_(include, exclude)
        run = self.recorded[self.start]
        bundle["text/plain"] = "\n".join([repr(self), "", run.text, *self._said(run)])
        return bundle

    def __repr__(self) -> str:
        runs = len(self._runs)
        task = ", to be repaired" if self.task else ""
        return (
            f"Lab: {len(self.recorded)} arrangements of a loop{task}, {runs} of them different; "
            ".save('lab.html') writes a page"
        )


def assets() -> tuple[list[str], str]:
    """Return the style sheets, the first of them a player's, and the module of a lab."""
    sheets = [player.assets()[0], style.static("lab.css", __file__)]
    return sheets, style.static("lab.js", __file__)


def _shared(
    runs: Sequence[Mapping[str, Any]],
) -> tuple[list[list[int]], dict[str, list[Any]]]:
    """Number the parts of runs: a row for each run (-1: it has no such part), and the different parts by name.

    >>> _shared([{"a": 1, "b": [2]}, {"a": 1}])
    ([[0, 0], [0, -1]], {'a': [1], 'b': [[2]]})
    """
    names = list(dict.fromkeys(name for run in runs for name in run))
    numbers: dict[str, dict[str, int]] = {name: {} for name in names}
    rows = []
    for run in runs:
        row = [-1] * len(names)
        for i, name in enumerate(names):
            if name in run:
                texts = numbers[name]
                row[i] = texts.setdefault(json.dumps(run[name]), len(texts))
        rows.append(row)
    parts = {name: [json.loads(text) for text in numbers[name]] for name in names}
    return rows, parts


def report_data(report: Report) -> dict[str, Any]:
    """A report as a page shows it."""
    return {
        "verdict": report.verdict,
        "said": first_line(report),
        "findings": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    evidence = "; ".join(
        f"{literal(name)}: {told(value)}" for name, value in finding.evidence.items()
    )
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "event": finding.event,
        "line": finding.line,
        "cause": literal(finding.cause),
        "evidence": evidence,
        "suggestion": finding.suggestion.splitlines(),
        "read": [finding.chapter, *words.reading(finding.chapter)],
    }


def _reach(ledger: Ledger) -> np.ndarray:
    """How far each element of the weights comes from where it began."""
    _, _, points = weights.path(ledger)
    return np.asarray(np.nanmax(np.abs(points - points[:1]), axis=0, initial=0.0))


def _in_columns(told: Mapping[str, Any]) -> dict[str, Any]:
    """The bars of shares column by column: what is alike stands together, and weighs little once it is packed.

    >>> _in_columns({"r": [0, 1], "note": "", "rows": [{"e": 3, "t": "1", "s": [[0, 0, 1, "new", "1"]]}]})
    {'r': [0, 1], 'note': '', 'e': [3], 't': ['1'], 's': [[[0], [0], [1], ['new'], ['1']]]}
    """
    rows = told["rows"]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "s"}
    segments = [
        [list(column) for column in zip(*row["s"], strict=True)] for row in rows
    ]
    return {
        **{name: part for name, part in told.items() if name != "rows"},
        **columns,
        "s": segments,
    }


def _rows(run: Arrangement) -> list[list[Any]]:
    """Each row: its line's number (0: a place for a line), its depth, and what can be moved or changed there."""
    number, rows = 0, []
    for row in run.rows:
        number += bool(row.text)
        rows.append([number if row.text else 0, row.depth, row.role, row.value])
    return rows
