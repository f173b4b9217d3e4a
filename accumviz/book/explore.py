"""An experiment × choices -> Explorer: recorded once for each choice, then switched between with no kernel."""

from __future__ import annotations

import hashlib
import html
import json
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from accumviz import arguments
from accumviz.book import outcome, weights
from accumviz.book.scale import CommonScale, common_levels, common_scale
from accumviz.checks.check import check
from accumviz.ledger.ledger import Ledger, ledger_of
from accumviz.show import Displayed, check_page_name, counted, literal, save_page
from accumviz.views import style
from accumviz.views.payload import encode, identity
from accumviz.views.player import Player, assets, fragment, play, widget

_EXPECTED = "a recording, a ledger, (ledger, graphs), or one of these followed by a dictionary of figures"
Choices = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Run:
    """One run of an experiment: what was recorded, or what was raised and, as `error`, that in one sentence."""

    choice: Mapping[str, Any]
    player: Player | None = None
    figures: Sequence[tuple[str, str]] = ()
    failure: Exception | None = None
    error: str = ""

    def draw_among(
        self, ground: weights.Field | None, levels: tuple[float, float] | None
    ) -> None:
        """Draw its weights and its heat map as those of the other runs are drawn."""
        if self.player is not None:
            self.player.ground, self.player.levels = ground, levels

    def page(self) -> dict[str, Any] | None:
        """Return what a player is told of this run; None if it raised."""
        return None if self.player is None else self.player.content[0]

    def content(self, scale: CommonScale) -> tuple[dict[str, Any], bytes]:
        """Return what a page is told of this run, drawn to this scale."""
        if self.player is None or self.player.ledger is None:
            return {"error": self.error}, b""
        data, blob = self.player.content
        told = {
            "figures": [list(pair) for pair in self.figures],
            "grad": outcome.gradients(self.player.ledger),
        }
        return {**told, "data": scale.apply(data)}, blob

    @property
    def right(self) -> bool:
        """Whether `check` calls it healthy."""
        if self.player is None or self.player.ledger is None:
            return False
        return check(self.player.ledger).healthy


class Explorer(Displayed):
    """The recorded runs of one experiment, and the controls that switch between them.

    `choices` are the values of each control, by name.
    """

    def __init__(
        self,
        experiment: Callable[..., Any],
        choices: Choices,
        runs: Sequence[Run],
        start: Sequence[int],
        against: Sequence[int] | None,
        ground: weights.Field | None = None,
    ) -> None:
        self.experiment, self.choices, self.runs = experiment, choices, runs
        self.start, self.against, self.ground = start, against, ground
        players = [run.player for run in runs if run.player is not None]
        self.levels = common_levels(
            [player.ledger for player in players if player.ledger]
        )
        for run in runs:
            run.draw_among(ground, self.levels)

    def run(self, **choice: Any) -> Ledger:
        """The ledger of one run, as in `explorer.run(k=4)`; choices that have a single value may be left out.

        Raises what the experiment raised there, and `ValueError` for a choice that was not recorded.
        """
        single = {
            name: values[0] for name, values in self.choices.items() if len(values) == 1
        }
        missing = [name for name in self.choices if name not in single | choice]
        if missing:
            raise ValueError(
                f"run() was given no {' and no '.join(missing)}; expected one value for each choice"
            )
        index = 0
        for name, position in zip(
            self.choices, positions("run", single | choice, self.choices), strict=True
        ):
            index = index * len(self.choices[name]) + position
        found = self.runs[index]
        if found.failure is not None:
            raise found.failure
        assert found.player is not None and found.player.ledger is not None
        return found.player.ledger

    @cached_property
    def scale(self) -> CommonScale:
        """The scale of all runs: longer bars than three times those of right ones are torn off."""
        pages = [page for run in self.runs if (page := run.page()) is not None]
        right = [page for run in self.runs if run.right and (page := run.page())]
        return common_scale(pages, right)

    @cached_property
    def content(self) -> tuple[dict[str, Any], bytes]:
        """What the page is told: each different run once, and what runs have in common once."""
        parts: dict[str, int] = {}
        places: dict[str, int] = {}
        shown: list[dict[str, Any]] = []
        grid, blob = [], b""
        contents = [run.content(self.scale) for run in self.runs]
        for told, packed in contents:
            key = hashlib.sha256(
                json.dumps(told, sort_keys=True).encode("utf-8", "replace") + packed
            ).hexdigest()
            if key not in places:
                places[key] = len(shown)
                shown.append(told)
                if "data" in told:
                    told["data"] = {
                        name: parts.setdefault(json.dumps(part), len(parts))
                        for name, part in told["data"].items()
                    }
                    told["bytes"] = [len(blob), len(blob) + len(packed)]
                    blob += packed
            grid.append(places[key])
        data = {
            "controls": [
                self._control(name, values) for name, values in self.choices.items()
            ],
            "grid": grid,
            "runs": shown,
            "parts": [json.loads(part) for part in parts],
            "start": list(self.start),
            "against": None if self.against is None else list(self.against),
        }
        return data, blob

    @cached_property
    def id(self) -> str:
        """The name by which a permalink finds this explorer on a page."""
        return identity(*self.content)

    def to_html(self) -> str:
        """A fragment of HTML that needs nothing else; with its scripts stripped, a table of all runs remains."""
        sheets, script = [assets()[0], _static("explore.css")], _static("explore.js")
        return fragment(
            "explorer", self.id, self._table(), encode(*self.content), sheets, script
        )

    def save(self, path: str | Path) -> None:
        """Write one self-contained page that any browser opens.

        Raises `ValueError` for a name that does not end in `.html`.
        """
        check_page_name(path)
        save_page(path, "accumviz explorer", self.to_html())

    def live(self) -> Any:
        """The same view as a widget, in which the kernel records values outside the grid.

        Raises `ImportError` when anywidget is not installed.
        """
        css = assets()[0] + _static("explore.css")
        shown = widget(
            _static("explore-live.js"), css, "explorer", encode(*self.content)
        )

        def record(change: Any) -> None:
            asked = change["new"]["choice"]
            choice = {
                name: values[place] if isinstance(place, int) else number(place, values)
                for place, (name, values) in zip(
                    asked, self.choices.items(), strict=True
                )
            }
            run = record_run(self.experiment, choice)
            run.draw_among(self.ground, self.levels)
            shown.told = {"choice": asked, "run": encode(*run.content(self.scale))}

        shown.observe(record, "ask")
        return shown

    def _control(self, name: str, values: Sequence[Any]) -> dict[str, Any]:
        """Runs by name are tabs above one player, which begins before anything has run."""
        named = isinstance(self.experiment, _NamedRuns)
        return control(name, values) | ({"kind": "tabs"} if named else {})

    def _rows(self) -> list[list[str]]:
        """The table of all runs: a heading, then one row for each."""
        names = list(
            dict.fromkeys(name for run in self.runs for name, _ in run.figures)
        )
        rows = [[*map(literal, self.choices), *names]]
        for run in self.runs:
            told = dict(run.figures)
            figures = (
                [told.get(name, "") for name in names]
                if run.failure is None
                else [run.error]
            )
            rows.append([*map(label, run.choice.values()), *figures])
        return rows

    def _table(self) -> str:
        head, *rows = self._rows()
        cells = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in head)
        body = ""
        for row in rows:
            wide = (
                f' colspan="{len(head) - len(row) + 1}"' if len(row) < len(head) else ""
            )
            last = f"<td{wide}>{html.escape(row[-1])}</td>"
            body += f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row[:-1])}{last}</tr>"
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        summary = f"<summary>All {counted(len(self.runs), 'run')} in a table</summary>"
        box = f'<div class="av-runs" tabindex="0" role="group" aria-label="all runs, scrollable">{table}</div>'
        return f'<details class="av-words" open>{summary}{box}</details>\n'

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        bundle = super()._repr_mimebundle_(include, exclude)
        rows = self._rows()
        whole = [row for row in rows if len(row) == len(rows[0])]
        widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) for text, width in zip(row, widths, strict=False)
            )
            for row in rows
        ]
        bundle["text/plain"] = "\n".join(
            [repr(self), *(line.rstrip() for line in lines)]
        )
        return bundle

    def __repr__(self) -> str:
        told = ", ".join(
            f"{literal(name)} ({len(values)})" for name, values in self.choices.items()
        )
        failed = sum(run.failure is not None for run in self.runs)
        raised = f", {failed} of which raised" if failed else ""
        return f"Explorer: {counted(len(self.runs), 'run')}{raised}; {told}; .save('runs.html') writes a page"


def _static(name: str) -> str:
    return style.static(name, __file__)


def explore(
    experiment: Callable[..., Any] | Mapping[str, Any],
    *,
    start: Mapping[str, Any] | None = None,
    against: Mapping[str, Any] | None = None,
    most: int = 64,
    loss: weights.Loss | Iterable[Any] | None = None,
    **choices: Iterable[Any],
) -> Explorer:
    """Record an experiment for every combination of choices, and switch between the runs with no kernel.

    `experiment(**choice)` records one run and returns its recording, its ledger, or (ledger,
    graphs); a dictionary of figures after it, such as `(recording, {"final loss": 0.3})`, is
    shown with the run. Numbers become a slider, True and False a switch, all else a select;
    functions go by their names. `start` is shown first, `against` opens a second run beside it,
    with a meter of the difference. `loss`, a function of the weights where these are one or two
    numbers, is drawn below their ways. A choice for which the experiment raises shows what was
    raised; the others work. Runs that are there already are given by name instead, as in
    `explore({"divided": recording, "undivided": other})`: tabs above one player.

    Raises `ValueError` for more than `most` runs and for values that are missing or repeated,
    `TypeError` for an experiment that returns something else, and what the experiment raised when
    every run did.

    >>> import torch, accumviz as av
    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> def train(k):
    ...     with av.record(w) as recording:
    ...         for _ in range(k):
    ...             (w.sum() / k).backward()
    ...     return recording
    >>> av.explore(train, k=[1, 2, 4])
    Explorer: 3 runs; k (3); .save('runs.html') writes a page
    """
    from tqdm.auto import tqdm

    if loss is not None and not callable(loss):
        choices, loss = choices | {"loss": loss}, None
    if isinstance(experiment, Mapping) and experiment and not choices:
        choices, experiment = {"run": list(experiment)}, _NamedRuns(dict(experiment))
    if not callable(experiment):
        raise TypeError(
            f"explore() was given {arguments.a(experiment)}; expected a function that records one run, or runs by name"
        )
    for name, chosen in (("start", start), ("against", against)):
        if chosen is not None and not isinstance(chosen, Mapping):
            raise TypeError(
                f"{name}={chosen!r:.80}; expected a value for a choice, by name, as in {name}={{'k': 4}}"
            )
    most = arguments.whole("most", most, "how many runs to allow", least=1)
    grid = _grid(choices, most)
    begin = positions("start", dict(start or {}), grid)
    beside = (
        None
        if against is None
        else positions("against", dict(start or {}) | dict(against), grid)
    )
    combinations = [
        dict(zip(grid, values, strict=True)) for values in product(*grid.values())
    ]
    # A notebook's bar does not ask the environment, as those of a terminal do.
    silent = bool(os.environ.get("TQDM_DISABLE"))
    bar = tqdm(
        combinations,
        desc="recording",
        unit="run",
        leave=False,
        delay=0.5,
        disable=silent,
    )
    runs: list[Run] = []
    for choice in bar:
        runs.append(record_run(experiment, choice))
        if len(runs) > 1:
            _let_go(runs[-1].failure)
    if all(run.failure is not None for run in runs):
        failure = runs[0].failure
        assert failure is not None
        failure.add_note(
            f"All {counted(len(runs), 'run')} of the experiment raised; this is the first of them."
        )
        raise failure
    _let_go(runs[0].failure)
    ledgers = [
        run.player.ledger
        for run in runs
        if run.player is not None and run.player.ledger is not None
    ]
    return Explorer(experiment, grid, runs, begin, beside, weights.field(ledgers, loss))


def record_run(experiment: Callable[..., Any], choice: Mapping[str, Any]) -> Run:
    """Run an experiment once, and keep what it recorded or raised."""
    try:
        result = experiment(**choice)
    except Exception as failure:
        text = literal(str(failure).partition("\n")[0])
        line = literal(traceback.extract_tb(failure.__traceback__)[-1].line or "")
        error = (
            f"{type(failure).__name__}: {text}{f' (raised by: {line})' if line else ''}"
        )
        return Run(choice, failure=failure, error=error)
    figures: Mapping[str, Any] = {}
    parts = list(result) if isinstance(result, tuple) else [result]
    if (
        len(parts) > 1
        and isinstance(parts[-1], Mapping)
        and all(isinstance(key, str) for key in parts[-1])
    ):
        figures = parts.pop()
    ledger = ledger_of(parts[0]) if parts else None
    graphs = (
        parts[1]
        if len(parts) == 2
        else getattr(parts[0], "graphs", None)
        if parts
        else None
    )
    if ledger is None or len(parts) > 2:
        raise TypeError(
            f"the experiment returned {arguments.a(result)}; expected {_EXPECTED}"
        )
    told = [
        *outcome.figures(ledger),
        *((literal(name), label(value)) for name, value in figures.items()),
    ]
    return Run(choice, play(ledger, graphs), told)


@dataclass(frozen=True)
class _NamedRuns:
    """Runs that were made already, as the experiment that returns the one that is asked for."""

    runs: Mapping[str, Any]

    def __call__(self, run: str) -> Any:
        return self.runs[run]


def _let_go(failure: BaseException | None) -> None:
    """Drop the frames of an exception, which keep alive what the experiment held, and note where it was raised."""
    if failure is None:
        return
    where = "".join(traceback.format_tb(failure.__traceback__))
    failure.add_note(f"In the experiment it was raised here:\n{where}".rstrip())
    waiting: list[BaseException | None] = [failure]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _grid(
    choices: Mapping[str, Iterable[Any]], most: int
) -> dict[str, tuple[Any, ...]]:
    grid: dict[str, tuple[Any, ...]] = {}
    for name, values in choices.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                f"{name}={values!r}; expected a list of values to record, as in {name}=[1, 2, 4]"
            )
        grid[name] = tuple(values)
        labels = [label(value) for value in grid[name]]
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(
                f"{name}={list(grid[name])!r}; expected one value or more, each of them once"
            )
    runs = prod(map(len, grid.values()))
    if not grid:
        raise ValueError(
            "explore() was given no choices; expected lists of values by name, as in k=[1, 2, 4]"
        )
    if runs > most:
        sizes = " × ".join(f"{len(values)} {name}" for name, values in grid.items())
        raise ValueError(
            f"{sizes} are {runs:,} runs; expected at most {most}: leave values out, or pass most={runs}"
        )
    return grid


def positions(argument: str, choice: Mapping[str, Any], choices: Choices) -> list[int]:
    """Where the chosen values stand in their lists; 0 for a choice that is not named."""
    for name, value in choice.items():
        if name not in choices:
            raise ValueError(
                f"{argument} names {name!r}; the choices are {', '.join(choices)}"
            )
        if label(value) not in map(label, choices[name]):
            recorded = ", ".join(map(label, choices[name]))
            raise ValueError(
                f"{argument} has {name}={value!r}, which is not recorded; recorded: {recorded}"
            )
    return [
        list(map(label, values)).index(label(choice[name])) if name in choice else 0
        for name, values in choices.items()
    ]


def control(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """How one choice is offered.

    >>> control("k", [1, 2, 4])
    {'name': 'k', 'kind': 'slider', 'labels': ['1', '2', '4']}
    """
    if len(values) == 1:
        kind = "fixed"
    elif set(map(type, values)) == {bool}:
        kind = "switch"
    else:
        numbers = all(
            isinstance(value, (int, float)) and not isinstance(value, bool)
            for value in values
        )
        kind = "slider" if numbers and len(values) > 2 else "select"
    return {"name": literal(name), "kind": kind, "labels": list(map(label, values))}


def label(value: Any) -> str:
    """How a value of a choice is written.

    >>> label(True), label(1e-3), label(16), label(explore)
    ('yes', '0.001', '16', 'explore')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return style.number(value)
    return literal(getattr(value, "__name__", None) or str(value))


def number(text: str, values: Sequence[Any]) -> float | int:
    """The number that a reader typed: whole where all recorded ones are.

    >>> number("3", (1, 2)), number("3", (0.5, 1))
    (3, 3.0)
    """
    value = float(text)
    return (
        int(value)
        if value.is_integer() and all(isinstance(known, int) for known in values)
        else value
    )
