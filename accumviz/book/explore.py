"""Record an experiment once for each choice, and switch between the runs with no kernel."""

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

    @property
    def ledger(self) -> Ledger | None:
        """What was recorded; None if the run raised."""
        return None if self.player is None else self.player.ledger

    @property
    def right(self) -> bool:
        """Whether `check` calls it healthy."""
        return self.ledger is not None and check(self.ledger).healthy

    def content(self, scale: CommonScale) -> tuple[dict[str, Any], bytes]:
        """Return what a page is told of this run, drawn to this scale."""
        if self.player is None or self.ledger is None:
            return {"error": self.error}, b""
        data, blob = self.player.content
        page = {
            "figures": [list(pair) for pair in self.figures],
            "grad": outcome.gradients(self.ledger),
            "data": scale.apply(data),
        }
        return page, blob


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
        loss: weights.Loss | None = None,
    ) -> None:
        self.experiment, self.choices, self.runs = experiment, choices, runs
        self.start, self.against = start, against
        ledgers = [run.ledger for run in runs if run.ledger is not None]
        right = [run.ledger for run in runs if run.ledger is not None and run.right]
        self._ground = weights.field(ledgers, loss, right=right)
        self._levels = common_levels(ledgers)
        for run in runs:
            self._draw_among_others(run)

    def _draw_among_others(self, run: Run) -> None:
        """Draw a run's weights and heat map to the scales of all runs."""
        if run.player is not None:
            run.player.ground, run.player.levels = self._ground, self._levels

    def run(self, **choice: Any) -> Ledger:
        """The ledger of one run, as in `explorer.run(k=4)`; choices that have a single value may be left out.

        Raises what the experiment raised there, and `ValueError` for a choice that was not recorded.
        """
        for name, values in self.choices.items():
            if len(values) == 1:
                choice.setdefault(name, values[0])
        missing = [name for name in self.choices if name not in choice]
        if missing:
            raise ValueError(
                f"run() was given no {' and no '.join(missing)}; expected one value for each choice"
            )
        index = 0
        places = positions("run", choice, self.choices)
        for values, place in zip(self.choices.values(), places, strict=True):
            index = index * len(values) + place
        run = self.runs[index]
        if run.failure is not None:
            raise run.failure
        assert run.ledger is not None
        return run.ledger

    @cached_property
    def _scale(self) -> CommonScale:
        """The scale of all runs: bars more than three times as long as the right runs' are torn off."""
        pages = {
            i: run.player.content[0] for i, run in enumerate(self.runs) if run.player
        }
        right = [page for i, page in pages.items() if self.runs[i].right]
        return common_scale([*pages.values()], right)

    @cached_property
    def content(self) -> tuple[dict[str, Any], bytes]:
        """What the page is told: each different run once, and what runs have in common once."""
        parts: dict[str, int] = {}
        places: dict[str, int] = {}
        different: list[dict[str, Any]] = []
        grid, blob = [], b""
        for run in self.runs:
            page, packed = run.content(self._scale)
            text = json.dumps(page, sort_keys=True).encode("utf-8", "replace")
            key = hashlib.sha256(text + packed).hexdigest()
            if key not in places:
                places[key] = len(different)
                different.append(page)
                if "data" in page:
                    page["data"] = _numbered(page["data"], parts)
                    page["bytes"] = [len(blob), len(blob) + len(packed)]
                    blob += packed
            grid.append(places[key])
        data = {
            "controls": self._controls(),
            "grid": grid,
            "runs": different,
            "parts": [json.loads(part) for part in parts],
            "start": list(self.start),
            "against": None if self.against is None else list(self.against),
        }
        return data, blob

    def _controls(self) -> list[dict[str, Any]]:
        controls = [control(name, values) for name, values in self.choices.items()]
        if isinstance(self.experiment, _NamedRuns):
            # Runs by name are tabs above one player, which begins before anything has run.
            controls[0]["kind"] = "tabs"
        return controls

    @cached_property
    def id(self) -> str:
        """The name by which a permalink finds this explorer on a page."""
        return identity(*self.content)

    def to_html(self) -> str:
        """A fragment of HTML that needs nothing else; with its scripts stripped, a table of all runs remains."""
        sheets = [assets()[0], _static("explore.css")]
        data, script = encode(*self.content), _static("explore.js")
        return fragment("explorer", self.id, self._table(), data, sheets, script)

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
        css, data = assets()[0] + _static("explore.css"), encode(*self.content)
        shown = widget(_static("explore-live.js"), css, "explorer", data)

        def record(change: Any) -> None:
            asked = change["new"]["choice"]
            choice = {}
            for place, (name, values) in zip(asked, self.choices.items(), strict=True):
                recorded = isinstance(place, int)
                choice[name] = values[place] if recorded else number(place, values)
            run = record_run(self.experiment, choice)
            self._draw_among_others(run)
            shown.told = {"choice": asked, "run": encode(*run.content(self._scale))}

        shown.observe(record, "ask")
        return shown

    def _rows(self) -> list[list[str]]:
        """The table of all runs: a heading, then one row for each."""
        names = list(
            dict.fromkeys(name for run in self.runs for name, _ in run.figures)
        )
        rows = [[*map(literal, self.choices), *names]]
        for run in self.runs:
            figures = dict(run.figures)
            cells = [figures.get(name, "") for name in names]
            rows.append(
                [
                    *map(label, run.choice.values()),
                    *([run.error] if run.failure else cells),
                ]
            )
        return rows

    def _table(self) -> str:
        head, *rows = self._rows()
        cells = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in head)
        body = ""
        for row in rows:
            missing = len(head) - len(row)
            wide = f' colspan="{missing + 1}"' if missing else ""
            first = "".join(f"<td>{html.escape(text)}</td>" for text in row[:-1])
            body += f"<tr>{first}<td{wide}>{html.escape(row[-1])}</td></tr>"
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        runs = counted(len(self.runs), "run")
        box = f'<div class="av-runs" tabindex="0" role="group" aria-label="all runs, scrollable">{table}</div>'
        return f'<details class="av-words" open><summary>All {runs} in a table</summary>{box}</details>\n'

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        bundle = super()._repr_mimebundle_(include, exclude)
        rows = self._rows()
        full = [row for row in rows if len(row) == len(rows[0])]
        widths = [max(map(len, column)) for column in zip(*full, strict=True)]
        lines = [repr(self)]
        for row in rows:
            cells = zip(row, widths, strict=False)
            lines.append("  ".join(text.ljust(width) for text, width in cells).rstrip())
        bundle["text/plain"] = "\n".join(lines)
        return bundle

    def __repr__(self) -> str:
        choices = ", ".join(
            f"{literal(name)} ({len(values)})" for name, values in self.choices.items()
        )
        failed = sum(run.failure is not None for run in self.runs)
        raised = f", {failed} of which raised" if failed else ""
        runs = counted(len(self.runs), "run")
        return f"Explorer: {runs}{raised}; {choices}; .save('runs.html') writes a page"


def _numbered(data: Mapping[str, Any], parts: dict[str, int]) -> dict[str, int]:
    """Replace each part of a run's data by its number among the parts of all runs."""
    return {
        name: parts.setdefault(json.dumps(part), len(parts))
        for name, part in data.items()
    }


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
    first = dict(start or {})
    begin = positions("start", first, grid)
    beside = None
    if against is not None:
        beside = positions("against", first | dict(against), grid)
    return Explorer(
        experiment, grid, _record_all(experiment, grid), begin, beside, loss
    )


def _record_all(experiment: Callable[..., Any], grid: Choices) -> list[Run]:
    """Record every combination of choices; raise what the first raised if all of them did."""
    from tqdm.auto import tqdm

    combinations = list(product(*grid.values()))
    # A notebook's bar does not read this variable, as those of a terminal do.
    silent = bool(os.environ.get("TQDM_DISABLE"))
    look = {"desc": "recording", "unit": "run", "leave": False, "delay": 0.5}
    runs: list[Run] = []
    for values in tqdm(combinations, disable=silent, **look):
        runs.append(record_run(experiment, dict(zip(grid, values, strict=True))))
        if len(runs) > 1:
            _drop_frames(runs[-1].failure)
    first = runs[0].failure
    if first is not None and all(run.failure is not None for run in runs):
        all_runs = counted(len(runs), "run")
        first.add_note(
            f"All {all_runs} of the experiment raised; this is the first of them."
        )
        raise first
    _drop_frames(first)
    return runs


def record_run(experiment: Callable[..., Any], choice: Mapping[str, Any]) -> Run:
    """Run an experiment once, and keep what it recorded or raised."""
    try:
        result = experiment(**choice)
    except Exception as failure:
        text = literal(str(failure).partition("\n")[0])
        line = literal(traceback.extract_tb(failure.__traceback__)[-1].line or "")
        raised = f" (raised by: {line})" if line else ""
        error = f"{type(failure).__name__}: {text}{raised}"
        return Run(choice, failure=failure, error=error)
    parts = list(result) if isinstance(result, tuple) else [result]
    figures = parts.pop() if len(parts) > 1 and _are_figures(parts[-1]) else {}
    ledger = ledger_of(parts[0]) if parts else None
    if ledger is None or len(parts) > 2:
        raise TypeError(
            f"the experiment returned {arguments.a(result)}; expected {_EXPECTED}"
        )
    graphs = parts[1] if len(parts) == 2 else getattr(parts[0], "graphs", None)
    given = [(literal(name), label(value)) for name, value in figures.items()]
    return Run(choice, play(ledger, graphs), [*outcome.figures(ledger), *given])


def _are_figures(value: Any) -> bool:
    """Return whether a value is figures by name, rather than graphs by event."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


@dataclass(frozen=True)
class _NamedRuns:
    """Runs that were made already, as the experiment that returns the one that is chosen."""

    runs: Mapping[str, Any]

    def __call__(self, run: str) -> Any:
        return self.runs[run]


def _drop_frames(failure: BaseException | None) -> None:
    """Drop an exception's frames, which keep alive what the experiment held, and note where it was raised."""
    if failure is None:
        return
    where = "".join(traceback.format_tb(failure.__traceback__))
    failure.add_note(f"In the experiment it was raised here:\n{where}".rstrip())
    waiting: list[BaseException | None] = [failure]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            inner = getattr(one, "exceptions", ())
            waiting += [one.__cause__, one.__context__, *inner]


def _grid(choices: Mapping[str, Iterable[Any]], most: int) -> Choices:
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
    if not grid:
        raise ValueError(
            "explore() was given no choices; expected lists of values by name, as in k=[1, 2, 4]"
        )
    runs = prod(map(len, grid.values()))
    if runs > most:
        sizes = " × ".join(f"{len(values)} {name}" for name, values in grid.items())
        raise ValueError(
            f"{sizes} are {runs:,} runs; expected at most {most}: leave values out, or pass most={runs}"
        )
    return grid


def positions(argument: str, choice: Mapping[str, Any], choices: Choices) -> list[int]:
    """Return where the chosen values are in their lists; 0 for a choice that is not named."""
    labels = {name: [label(value) for value in choices[name]] for name in choices}
    for name, value in choice.items():
        if name not in choices:
            raise ValueError(
                f"{argument} names {name!r}; the choices are {', '.join(choices)}"
            )
        if label(value) not in labels[name]:
            raise ValueError(
                f"{argument} has {name}={value!r}, which is not recorded; recorded: {', '.join(labels[name])}"
            )
    return [
        listed.index(label(choice[name])) if name in choice else 0
        for name, listed in labels.items()
    ]


def control(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return how one choice is offered.

    >>> control("k", [1, 2, 4])
    {'name': 'k', 'kind': 'slider', 'labels': ['1', '2', '4']}
    """
    bools = [isinstance(value, bool) for value in values]
    numbers = all(isinstance(value, (int, float)) for value in values)
    kind = "select"
    if len(values) == 1:
        kind = "fixed"
    elif all(bools):
        kind = "switch"
    elif len(values) > 2 and numbers and not any(bools):
        kind = "slider"
    return {"name": literal(name), "kind": kind, "labels": list(map(label, values))}


def label(value: Any) -> str:
    """Return how a value of a choice is written.

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
    """Return the number that a reader typed: whole where all recorded ones are.

    >>> number("3", (1, 2)), number("3", (0.5, 1))
    (3, 3.0)
    """
    value = float(text)
    whole = value.is_integer() and all(isinstance(one, int) for one in values)
    return int(value) if whole else value
