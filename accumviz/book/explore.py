"""Record an experiment once for each choice, and switch between the runs with no kernel, all drawn to one scale."""

from __future__ import annotations

import json
import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from accumviz import arguments
from accumviz.checks.check import check
from accumviz.ledger.events import Event, numbered
from accumviz.ledger.ledger import PRESENT, Ledger, recorded
from accumviz.show import Displayed, counted, encoded, literal, table
from accumviz.views import style, weights, words
from accumviz.views.layout import decades
from accumviz.views.payload import encode, identity, shared
from accumviz.views.player import Player, assets, fragment, play

# More runs would make a page that is too heavy.
_MOST_RUNS = 64
Choices = Mapping[str, Sequence[Any]]
# Of larger models the norms of the tensors are compared, of longer runs the first steps.
_MOST_ELEMENTS = 256
_MOST_NUMBERS = 1024
# Bars that are more than so many times as long as those of the right runs are torn off.
_TORN = 3.0
# In a legend: what it says, the look of its swatch, its colour.
_KEY = ["longer than drawn", "torn", "var(--av-muted)"]
Range = tuple[float, float]
Page = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of an experiment: what was recorded, or what was raised."""

    choice: Mapping[str, Any]
    player: Player | None = None
    figures: Sequence[tuple[str, str]] = ()
    failure: Exception | None = None

    @property
    def ledger(self) -> Ledger | None:
        """What was recorded; None if the run raised."""
        return None if self.player is None else self.player.ledger

    @property
    def error(self) -> str:
        """What was raised, and by which line."""
        text = literal(str(self.failure).partition("\n")[0])
        error = f"{type(self.failure).__name__}: {text}"
        trace = getattr(self.failure, "__traceback__", None)
        for last in traceback.extract_tb(trace)[-1:]:
            error += f" (raised by: {literal(last.line)})" if last.line else ""
        return error

    @cached_property
    def right(self) -> bool:
        """Whether `check` calls it healthy."""
        return self.ledger is not None and check(self.ledger).healthy

    def content(self, scale: CommonScale) -> dict[str, Any]:
        """Return what a page is told of this run, drawn to this scale."""
        if self.player is None:
            return {"error": self.error}
        return {
            "figures": [list(pair) for pair in self.figures],
            "grad": gradients(self.player.ledger),
            "right": int(self.right),
            "data": scale.apply(self.player.content),
        }


@dataclass(eq=False, repr=False)
class Explorer(Displayed):
    """The recorded runs of one experiment, and the controls that switch between them.

    `choices` are the values of each control, by name.
    """

    experiment: Callable[..., Any]
    choices: Choices
    runs: Sequence[Run]
    start: Sequence[int]
    against: Sequence[int] | None
    loss: weights.Loss | None = None
    tabs: bool = False

    def __post_init__(self) -> None:
        self._players = [run.player for run in self.runs if run.player]
        self._right = [run.player for run in self.runs if run.player and run.right]
        ledgers = [player.ledger for player in self._players]
        right = [player.ledger for player in self._right]
        self._ground = weights.field(ledgers, self.loss, right=right)
        norms = [ledger.contribution.ravel() for ledger in ledgers]
        self._levels = decades(np.concatenate(norms))
        for player in self._players:
            self._draw_among_others(player)

    def _draw_among_others(self, player: Player) -> None:
        """Draw a run's weights and heat map to the scales of all runs."""
        player.ground = self._ground
        player.levels = self._levels

    def run(self, **choice: Any) -> Ledger:
        """Return the ledger of one run, as in `explorer.run(k=4)`; a choice that is left out has its first value.

        Raises what the experiment raised there, and `ValueError` for a choice that was not recorded.
        """
        sizes = list(map(len, self.choices.values()))
        places = positions("run", choice, self.choices)
        place = int(np.ravel_multi_index(places, sizes))
        run = self.runs[place]
        if run.failure is not None:
            raise run.failure
        assert run.ledger is not None
        return run.ledger

    @cached_property
    def _scale(self) -> CommonScale:
        """The scale of all runs: bars more than three times as long as the right runs' are torn off."""
        pages = [player.content for player in self._players]
        right = [player.content for player in self._right]
        return CommonScale(pages, right)

    @cached_property
    def content(self) -> dict[str, Any]:
        """What the page is told: each different run once, and what runs have in common once."""
        pages = [json.dumps(run.content(self._scale)) for run in self.runs]
        texts, grid = numbered(pages)
        different = list(map(json.loads, texts))
        shown = [page for page in different if "data" in page]
        rows, parts = shared([page["data"] for page in shown])
        for page, row in zip(shown, rows, strict=True):
            page["data"] = row
        controls = [control(name, values) for name, values in self.choices.items()]
        if self.tabs:
            controls[0]["kind"] = "tabs"
        return {
            "controls": controls,
            "grid": grid,
            "runs": different,
            "parts": parts,
            "start": list(self.start),
            "against": self.against and list(self.against),
        }

    @cached_property
    def id(self) -> str:
        """The name by which a permalink finds this explorer on a page."""
        return identity(self.content)

    def to_html(self) -> str:
        """Return a fragment of HTML that needs nothing else; without scripts, a table of all runs remains."""
        sheets = [assets()[0], _static("explore.css")]
        data = encode(self.content)
        script = _static("explore.js")
        return fragment("explorer", self.id, self._table(), data, sheets, script)

    def live(self) -> Any:
        """Return the same view as a widget, in which the kernel records values outside the grid."""
        shown = _widget(encode(self.content))

        def record(change: Any) -> None:
            asked = change["new"]["choice"]
            choice = {}
            for place, (name, values) in zip(asked, self.choices.items(), strict=True):
                typed = isinstance(place, str)
                choice[name] = number(place) if typed else values[place]
            run = record_run(self.experiment, choice)
            if run.player:
                self._draw_among_others(run.player)
            page = encode(run.content(self._scale))
            shown.told = {"choice": asked, "run": page}

        shown.observe(record, "ask")
        return shown

    def _rows(self) -> list[list[str]]:
        """Return the table of all runs: a heading, then one row for each; a row that raised ends with its error."""
        names = dict.fromkeys(name for run in self.runs for name, _ in run.figures)
        rows = [[*map(literal, self.choices), *names]]
        for run in self.runs:
            figures = dict(run.figures)
            cells = [figures.get(name, "") for name in names]
            chosen = map(label, run.choice.values())
            rows.append([*chosen, run.error] if run.failure else [*chosen, *cells])
        return rows

    def _table(self) -> str:
        heads, *rows = self._rows()
        return (
            f'<details class="av-words" open><summary>All {counted(len(rows), "run")} in a table</summary>'
            '<div class="av-runs" tabindex="0" role="group" aria-label="all runs, scrollable">'
            f"{table(heads, rows)}</div></details>\n"
        )

    @property
    def words(self) -> list[str]:
        """Each run's choice and figures, in one line."""
        return ["  ".join(row) for row in self._rows()]

    def __repr__(self) -> str:
        sizes = [f"{literal(name)} ({len(v)})" for name, v in self.choices.items()]
        failed = sum(run.failure is not None for run in self.runs)
        raised = f", {failed} of which raised" if failed else ""
        return (
            f"Explorer: {counted(len(self.runs), 'run')}{raised}; {', '.join(sizes)}; "
            ".save('runs.html') writes a page"
        )


def _static(name: str) -> str:
    return style.static(name, __file__)


def explore(
    experiment: Callable[..., Any] | Mapping[str, Any],
    *,
    start: Mapping[str, Any] | None = None,
    against: Mapping[str, Any] | None = None,
    loss: weights.Loss | None = None,
    **choices: Iterable[Any],
) -> Explorer:
    """Record an experiment for every combination of choices, and switch between the runs with no kernel.

    `experiment(**choice)` records one run and returns its recording or its ledger; a dictionary of
    figures after it, such as `(recording, {"final loss": 0.3})`, is shown with the run. Numbers
    become a slider, True and False a switch, all else a select; functions go by their names. `start`
    is shown first, `against` is an outline behind it; behind a wrong run it is the nearest right one. `loss`, a
    function of a single weight, is drawn below its ways. A choice for which the experiment raises
    shows what was raised; the others work. Runs that are there already are given by name instead, as
    in `explore({"divided": recording, "undivided": other})`: tabs above one player.

    Raises `ValueError` for more than 64 runs and for values that are missing or repeated,
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
    tabs = isinstance(experiment, Mapping)
    if isinstance(experiment, Mapping):
        choices = {"run": list(experiment)}
        made = experiment
        experiment = lambda run: made[run]  # noqa: E731
    if not callable(experiment):
        raise TypeError(
            f"explore() was given {arguments.a(experiment)}; expected a function that records one run, or runs by name"
        )
    grid = _grid(choices)
    arguments.mapping("start", start, "{'k': 4}")
    arguments.mapping("against", against, "{'k': 4}")
    begin = positions("start", start or {}, grid)
    beside = None
    if against is not None:
        beside = positions("against", {**(start or {}), **against}, grid)
    recorded = _record_all(experiment, grid)
    return Explorer(experiment, grid, recorded, begin, beside, loss, tabs=tabs)


def _grid(choices: Mapping[str, Iterable[Any]]) -> Choices:
    """Return the values of each choice. Raises as `explore` does."""
    grid = {}
    for name, values in choices.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(
                f"{name}={values!r}; expected a list of values to record, as in {name}=[1, 2, 4]"
            )
        grid[name] = tuple(values)
        labels = set(map(label, grid[name]))
        if not labels or len(labels) < len(grid[name]):
            raise ValueError(
                f"{name}={list(grid[name])!r}; expected one value or more, each of them once"
            )
    count = math.prod(map(len, grid.values()))
    if not grid or count > _MOST_RUNS:
        raise ValueError(
            f"{count:,} runs of {len(grid)} choices; expected lists of values by name, as in k=[1, 2, 4], "
            f"and at most {_MOST_RUNS} runs"
        )
    return grid


def _record_all(experiment: Callable[..., Any], grid: Choices) -> list[Run]:
    """Record every combination of choices; raise what the first raised if all of them did."""
    recorded = []
    for values in product(*grid.values()):
        choice = dict(zip(grid, values, strict=True))
        recorded.append(record_run(experiment, choice))
    failures = [run.failure for run in recorded if run.failure is not None]
    if len(failures) == len(recorded):
        raise failures[0]
    return recorded


def record_run(experiment: Callable[..., Any], choice: Mapping[str, Any]) -> Run:
    """Run an experiment once, and keep what it recorded or raised."""
    try:
        result = experiment(**choice)
    except Exception as failure:
        # What the experiment held need not stay alive until the page is made.
        traceback.clear_frames(failure.__traceback__)
        return Run(choice, failure=failure)
    recording: Any = result
    figures: Any = {}
    if isinstance(result, tuple) and len(result) == 2:
        recording, figures = result
    ledger = recorded(recording, "explore")
    arguments.mapping("figures", figures, "{'final loss': 0.3}")
    shown = key_figures(ledger)
    for name, value in figures.items():
        shown.append((literal(name), label(value)))
    return Run(choice, play(recording), shown)


def _widget(content: str) -> Any:
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as missing:
        raise arguments.explained(missing, "live") from missing

    class Live(anywidget.AnyWidget):
        """The state that page and kernel share."""

        _esm = _static("explore-live.js")
        _css = assets()[0] + _static("explore.css")
        data = traitlets.Unicode().tag(sync=True)
        id = traitlets.Unicode().tag(sync=True)
        at = traitlets.Dict().tag(sync=True)
        ask = traitlets.Dict().tag(sync=True)
        told = traitlets.Dict().tag(sync=True)

    return Live(data=content)


def positions(argument: str, choice: Mapping[str, Any], choices: Choices) -> list[int]:
    """Return where the chosen values are in their lists; 0 for a choice that is not named."""
    for name in choice:
        if name not in choices:
            raise ValueError(
                f"{argument} names {name!r}; the choices are {', '.join(choices)}"
            )
    places = []
    for name, values in choices.items():
        labels = list(map(label, values))
        chosen = label(choice[name]) if name in choice else labels[0]
        if chosen not in labels:
            raise ValueError(
                f"{argument} has {name}={choice[name]!r:.80}; expected one of {', '.join(labels)}"
            )
        places.append(labels.index(chosen))
    return places


def control(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return how one choice is offered.

    >>> control("k", [1, 2, 4])
    {'name': 'k', 'kind': 'slider', 'labels': ['1', '2', '4']}
    """
    kinds = set(map(type, values))
    kind = "select"
    if len(values) == 1:
        kind = "fixed"
    elif kinds == {bool}:
        kind = "switch"
    elif len(values) > 2 and kinds <= {int, float}:
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


def number(text: str) -> float | int:
    """Return the number that a reader typed.

    >>> number("3"), number("0.5")
    (3, 0.5)
    """
    value = float(text)
    return int(value) if value.is_integer() else value


# --- figures and gradients ----------------------------------------------------------------------


def key_figures(ledger: Ledger) -> list[tuple[str, str]]:
    """Return name and value of what a reader compares first.

    >>> key_figures(Ledger.build([], [dict(kind="backward"), dict(kind="step")]))
    [('backwards', '1'), ('steps', '1')]
    """
    steps = _steps(ledger)
    backwards = ledger.of("backward")
    shown = [("backwards", f"{len(backwards):,}"), ("steps", f"{len(steps):,}")]
    saved = ledger.events.column("saved_before")
    if np.isfinite(saved).any():
        most = style.size(np.nanmax(saved))
        shown.append(("saved before a backward, at most", most))
    if ledger.parameters and len(ledger):
        name = "gradient of the last step" if steps else "gradient at the end"
        last = steps[-1] if steps else ledger[-1]
        shown.append((name, _gradient(ledger, last)))
    return shown


def _steps(ledger: Ledger) -> list[Event]:
    return [event for event in ledger.of("step") if not event.skipped]


def _gradient(ledger: Ledger, event: Event) -> str:
    if len(ledger.parameters) == 1:
        return words.value(ledger, event.index, 0)
    every = range(len(ledger.parameters))
    used = [p for p in every if _is_used(ledger, event, p)]
    if not used:
        return "None"
    whole = np.linalg.norm(ledger.grad[event.index, used])
    return f"‖·‖ {style.number(float(whole))}"


def _is_used(ledger: Ledger, event: Event, p: int) -> bool:
    """Return whether there is a `.grad`, and, in a step, whether its optimizer owns the parameter."""
    if not ledger.state[event.index, p] & PRESENT:
        return False
    owners = ledger.parameters[p].optimizers
    if event.kind != "step" or not owners:
        return True
    return event.details.get("optimizer_index", 0) in owners


def gradients(ledger: Ledger) -> Page:
    """Return each step's `.grad` as one row of numbers (null: none), the norms where elements were not all kept.

    Of a run without a step it is what there is in the end. `of` names what the numbers are, so that
    only like is compared with like. Nothing is rounded: two runs that are said to be equal are.

    >>> from accumviz.ledger.ledger import Parameter
    >>> gradients(Ledger.build([Parameter("w", (1,))], [dict(kind="step", grad={"w": -20})]))
    {'of': ['w', 1], 'exact': True, 'end': False, 'steps': 1, 'rows': [[-20.0]]}
    """
    parameters = ledger.parameters
    names = []
    for parameter in parameters:
        names += [literal(parameter.name), parameter.numel]
    numbers = sum(parameter.numel for parameter in parameters)
    exact = len(ledger.exact) == len(parameters)
    exact = exact and numbers <= _MOST_ELEMENTS
    if not exact:
        numbers = len(parameters)
    steps = _steps(ledger)
    shown = steps or list(ledger)[-1:]
    most = max(_MOST_NUMBERS // max(numbers, 1), 1)
    return {
        "of": names,
        "exact": exact,
        "end": not steps,
        "steps": len(shown),
        "rows": [_row(ledger, event, exact) for event in shown[:most]],
    }


def _row(ledger: Ledger, event: Event, exact: bool) -> list[Any]:
    """Return every `.grad` at an event: its elements, or its norm."""
    row: list[Any] = []
    for p, parameter in enumerate(ledger.parameters):
        if not _is_used(ledger, event, p):
            row += [None] * (parameter.numel if exact else 1)
        elif exact:
            _, elements = ledger.exact[p]
            row += map(encoded, elements[event.index].tolist())
        else:
            norm = float(ledger.grad[event.index, p])
            row.append(encoded(norm))
    return row


# --- one scale for all runs ---------------------------------------------------------------------


class CommonScale:
    """The ranges to which every run is drawn, so that a wrong run looks different from the right one.

    `right` are the runs that others are torn off against.
    """

    def __init__(self, pages: Sequence[Page], right: Sequence[Page]) -> None:
        # The ranges of `.grad` by parameter, and that of shares; how many pixels the lanes of a run take.
        self._rows = {}
        right_bars = _bars(right)
        for name, ranges in _bars(pages).items():
            self._rows[name] = _torn(ranges, right_bars[name])
        self._shares = _torn(_shares(pages), _shares(right))
        self._tall = max(page["lane"] * page["count"] for page in pages)
        self._layout = _layout(pages)

    def apply(self, page: Page) -> Page:
        """Return what a player is told of a run, drawn to this scale."""
        rows = []
        is_torn = False
        for row in page["p"]:
            scale = self._rows[row["n"]]
            rows.append(row | {"r": list(scale)})
            is_torn |= _is_beyond(row["r"], scale)
        lane = self._tall // page["count"]
        scaled = page | self._layout | {"p": rows, "lane": lane}
        if is_torn:
            scaled["keys"] = [*page["keys"], _KEY]
        shares = page.get("shares")
        if shares is not None:
            scaled["shares"] = shares | {"r": list(self._shares)}
            if _is_beyond(shares["r"], self._shares):
                scaled["shares"]["keys"] = [*shares["keys"], _KEY]
        return scaled


def _bars(pages: Sequence[Page]) -> defaultdict[str, list[Range]]:
    """Return the ranges of each parameter's bars in all runs."""
    bars = defaultdict(list)
    for page in pages:
        for row in page["p"]:
            bars[row["n"]].append(row["r"])
    return bars


def _shares(pages: Sequence[Page]) -> list[Range]:
    return [page["shares"]["r"] for page in pages if "shares" in page]


def _layout(pages: Sequence[Page]) -> Page:
    """Return what keeps all that is below a timeline in its place: it is as tall as the tallest."""
    layout: Page = {}
    lengths = {len(page["e"]["k"]) for page in pages}
    saved = []
    for page in pages:
        saved += [size or 0 for size in page["e"].get("b", [])]
    if len(lengths) > 1:
        layout["sizes"] = sorted(lengths)
    if saved:
        layout["most"] = max(saved)
    return layout


def _is_beyond(ends: Sequence[float], scale: Range) -> bool:
    low, high = scale
    return ends[0] < low or ends[1] > high


def _torn(every: Sequence[Range], right: Sequence[Range]) -> Range:
    """Return the range of all runs, cut at three times that of the right ones.

    >>> _torn([(0.0, 1.0), (-2.0, 40.0)], [(0.0, 1.0)])
    (-2.0, 3.0)
    """
    lows, highs = zip((0, 0), *every, strict=True)
    most = _TORN * float(np.abs(right).max(initial=0)) or math.inf
    return max(min(lows), -most), min(max(highs), most)
