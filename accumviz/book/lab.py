"""`lab`: a training loop whose lines the reader moves; every arrangement is a recording of real autograd."""

from __future__ import annotations

import html
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from accumviz import arguments
from accumviz.book import loops, weights
from accumviz.book.loops import Axis, Choice, LoopLine
from accumviz.checks.report import Report
from accumviz.ledger.ledger import Ledger
from accumviz.show import Displayed, counted
from accumviz.views import player, shares, style
from accumviz.views.payload import encode, identity, ledger_data, shared
from accumviz.views.player import fragment
from accumviz.views.tables import report_data

# A name of its own: what the events of an arrangement show is the text that ran, not a file's.
_FILE = "loop.py"


@dataclass(frozen=True)
class Arrangement:
    """An arrangement that ran: its lines and places for lines, its text, its ledger and its report."""

    rows: Sequence[LoopLine]
    text: str
    ledger: Ledger
    report: Report

    @property
    def right(self) -> bool:
        """Whether `check` calls it healthy."""
        return self.report.healthy

    @property
    def words(self) -> list[str]:
        """The shares and the report, as text."""
        bars, *_ = shares.bars(self.ledger)
        lines = map(str.strip, self.report.text().splitlines())
        return [*(bar.words for bar in bars), *filter(None, lines)]


def lab(start: Mapping[str, Any] | None = None) -> Lab:
    """Let the reader rearrange a training loop and see what follows: recorded, every arrangement of it.

    `start` says how the loop that is shown first differs from the right one: `zero_grad` ("epoch",
    "micro-batch", "backward", "before", "after" the step, or "nowhere"), `step` ("micro-batch",
    "window", "epoch"), `clip` ("backward", "step", "nowhere"), `divide` ("window", "K", "nothing",
    "samples"), `sizes` ("equal", "unequal") and `tail` ("step", "carry", "drop").

    Recorded are the start and every loop that differs from it in one of these or in two.
    Raises `ValueError` for a start that is none.

    >>> import accumviz as av
    >>> shown = av.lab()
    >>> shown
    Lab: 105 arrangements of a loop...
    >>> shown.check(zero_grad="nowhere").findings[0].rule
    'missing-zero-grad'
    """
    arguments.mapping("start", start, "{'step': 'epoch'}")
    first = loops.complete(start)
    recorded: dict[tuple[str, ...], Arrangement] = {}
    different: dict[tuple[LoopLine, ...], Arrangement] = {}
    for choice in loops.near(first):
        rows = tuple(loops.rows(choice))
        if rows not in different:
            different[rows] = _arrange(rows)
        recorded[tuple(choice.values())] = different[rows]
    return Lab(first, recorded)


def _arrange(rows: Sequence[LoopLine]) -> Arrangement:
    """Record an arrangement: its source text is what runs."""
    import accumviz as av

    lines = [f"{'    ' * row.depth}{row.text}\n" for row in rows if row.text]
    text = "".join(lines)
    recording, names = loops.begin()
    linecache.cache[_FILE] = (len(text), None, lines, _FILE)
    code = compile(text, _FILE, "exec")
    with recording:
        exec(code, names)  # noqa: S102 - the text is ours: choices are checked before it is written
    ledger = recording.ledger
    report = av.check(ledger)
    return Arrangement(rows, text, ledger, report)


@dataclass(eq=False, repr=False)
class Lab(Displayed):
    """A loop whose lines can be moved, with a recording of each arrangement."""

    start: Choice
    recorded: Mapping[tuple[str, ...], Arrangement]

    def __post_init__(self) -> None:
        self._first = self.recorded[tuple(self.start.values())]
        runs = {id(run): run for run in self.recorded.values()}
        self._runs = list(runs.values())

    def run(self, **choice: Any) -> Ledger:
        """Return the ledger of one arrangement, as in `lab.run(zero_grad="nowhere")`.

        What is not named is as at the start. Raises `ValueError` for an arrangement that is not recorded.
        """
        return self._arrangement(choice).ledger

    def check(self, **choice: Any) -> Report:
        """Return the report on one arrangement; raises as `run` does."""
        return self._arrangement(choice).report

    def text(self, **choice: Any) -> str:
        """Return the source of one arrangement; raises as `run` does."""
        return self._arrangement(choice).text

    def _arrangement(self, choice: Mapping[str, Any]) -> Arrangement:
        asked = {name: str(value) for name, value in choice.items()}
        complete = {**self.start, **asked}
        made = self.recorded.get(tuple(complete.values()))
        if made is None:
            raise ValueError(
                f"{asked!r:.160} is not recorded: the lab has the loops that differ from its start in at most "
                "two choices"
            )
        return made

    @cached_property
    def content(self) -> dict[str, Any]:
        """What the page is told: each different run once, and of each part of it, what differs once."""
        numbers = {id(run): i for i, run in enumerate(self._runs)}
        grid = {}
        for key, run in self.recorded.items():
            places = map(str, self._places(key))
            grid[".".join(places)] = numbers[id(run)]
        runs, parts = shared([self._told(run) for run in self._runs])
        return {
            "offers": [_offer(axis) for axis in loops.AXES],
            "start": self._places(tuple(self.start.values())),
            "grid": grid,
            "runs": runs,
            "parts": parts,
        }

    def _places(self, key: Sequence[str]) -> list[int]:
        """Return where an arrangement's values are in the lists of the choices."""
        pairs = zip(loops.AXES, key, strict=True)
        return [list(axis.values).index(value) for axis, value in pairs]

    @cached_property
    def _ground(self) -> weights.Field | None:
        """The ground below the weights: one for all arrangements, so that their paths can be compared."""
        ledgers = [run.ledger for run in self._runs]
        right = [run.ledger for run in self._runs if run.right]
        return weights.field(ledgers, loops.loss, right=right)

    def _told(self, run: Arrangement) -> dict[str, Any]:
        """Return what the page is told of a run."""
        whole = ledger_data(run.ledger, self._ground)
        whole["about"] = counted(len(run.ledger), "event")
        whole["rows"] = _rows(run)
        whole["report"] = report_data(run.report)
        return whole

    @cached_property
    def id(self) -> str:
        """The name by which a permalink finds this lab on a page: it stays while the start does."""
        return identity({"lab": list(self.start.values())})

    def to_html(self) -> str:
        """Return a fragment of HTML that needs nothing else; with its scripts stripped, the start remains as text."""
        sheets = [
            player.assets()[0],
            style.static("report.css"),
            style.static("lab.css", __file__),
        ]
        script = style.static("lab.js", __file__)
        data = encode(self.content)
        return fragment("lab", self.id, self._text(), data, sheets, script)

    def _text(self) -> str:
        words = "".join(f"<p>{html.escape(line)}</p>" for line in self._first.words)
        return (
            '<details class="av-words" open><summary>In words</summary>'
            f"<pre>{html.escape(self._first.text)}</pre>{words}</details>\n"
        )

    @property
    def words(self) -> list[str]:
        """The loop at the start, and what check says of it."""
        return ["", self._first.text, *self._first.words]

    def __repr__(self) -> str:
        return (
            f"Lab: {len(self.recorded)} arrangements of a loop, {len(self._runs)} of them different; "
            ".save('lab.html') writes a page"
        )


# --- what the page is told ----------------------------------------------------------------------


def _offer(axis: Axis) -> dict[str, Any]:
    return {
        "name": axis.name,
        "title": axis.title,
        "values": list(axis.values),
        "labels": list(axis.values.values()),
        "line": axis.line,
    }


def _rows(run: Arrangement) -> list[list[Any]]:
    """Return each row: its line's number (0: a place for a line), its depth, and what can be moved or changed there."""
    number = 0
    rows = []
    for row in run.rows:
        number += bool(row.text)
        shown = number if row.text else 0
        rows.append([shown, row.depth, row.role, row.value])
    return rows
