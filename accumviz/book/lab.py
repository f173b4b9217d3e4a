"""`lab`: a training loop whose lines the reader moves; every arrangement is a recording of real autograd."""

from __future__ import annotations

import html
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from accumviz import arguments
from accumviz.book.explore import positions
from accumviz.checks.report import Report
from accumviz.ledger.ledger import Ledger
from accumviz.show import Displayed, counted
from accumviz.views import player, shares, style, weights
from accumviz.views.payload import encode, identity, ledger_data, shared
from accumviz.views.player import fragment
from accumviz.views.tables import report_data

# A name of its own: what the events of an arrangement show is the text that ran, not a file's.
_FILE = "loop.py"
# How tall its bars are, in pixels: loop, verdict and timeline are seen at once.
_LANE = 68


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
        bars, *_ = shares.bars(self.ledger, range(len(self.ledger)))
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
    first = _complete(start)
    recorded: dict[tuple[str, ...], Arrangement] = {}
    different: dict[tuple[LoopLine, ...], Arrangement] = {}
    for choice in near(first):
        rows = tuple(loop_lines(choice))
        if rows not in different:
            different[rows] = _arrange(rows)
        recorded[tuple(choice.values())] = different[rows]
    return Lab(first, recorded)


def _arrange(rows: Sequence[LoopLine]) -> Arrangement:
    """Record an arrangement: its source text is what runs."""
    import accumviz as av

    lines = [f"{'    ' * row.depth}{row.text}\n" for row in rows if row.text]
    text = "".join(lines)
    recording, names = _begin()
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
        offers = []
        for axis in AXES:
            offer = {
                "name": axis.name,
                "title": axis.title,
                "values": list(axis.values),
                "labels": list(axis.values.values()),
                "line": axis.line,
            }
            offers.append(offer)
        numbers = {id(run): i for i, run in enumerate(self._runs)}
        grid = {}
        for key, run in self.recorded.items():
            places = map(str, self._places(key))
            grid[".".join(places)] = numbers[id(run)]
        runs, parts = shared([self._told(run) for run in self._runs])
        return {
            "offers": offers,
            "start": self._places(tuple(self.start.values())),
            "grid": grid,
            "tallest": self._tallest,
            "runs": runs,
            "parts": parts,
        }

    @property
    def _tallest(self) -> list[int]:
        """Which runs have the most lines and the longest: the tallest code, and the tallest where lines break."""
        most = []
        longest = []
        for run in self._runs:
            lengths = list(map(len, run.text.splitlines()))
            most.append((len(lengths), sum(lengths)))
            longest.append((max(lengths), sum(lengths)))
        return [most.index(max(most)), longest.index(max(longest))]

    def _places(self, key: Sequence[str]) -> list[int]:
        """Return where an arrangement's values are in the lists of the choices."""
        pairs = zip(AXES, key, strict=True)
        return [list(axis.values).index(value) for axis, value in pairs]

    @cached_property
    def _ground(self) -> weights.Field | None:
        """The ground below the weights: one for all arrangements, so that their paths can be compared."""
        ledgers = [run.ledger for run in self._runs]
        right = [run.ledger for run in self._runs if run.right]
        return weights.field(ledgers, mean_loss, right=right)

    def _told(self, run: Arrangement) -> dict[str, Any]:
        """Return what the page is told of a run."""
        whole = ledger_data(run.ledger, self._ground)
        whole["lane"] = _LANE
        whole["sizes"] = sorted({len(run.ledger) for run in self._runs})
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


def _rows(run: Arrangement) -> list[list[Any]]:
    """Return each row: its line's number (0: a place for a line), its depth, and what can be moved or changed there."""
    number = 0
    rows = []
    for row in run.rows:
        number += bool(row.text)
        shown = number if row.text else 0
        rows.append([shown, row.depth, row.role, row.value])
    return rows


# --- the loop ----------------------------------------------------------------------------------

NOWHERE = "nowhere"
# So many choices may differ from the start at once.
REACH = 2
Choice = Mapping[str, str]


class LoopLine(NamedTuple):
    """A line of the loop, with what the reader may move or change in it (`role`); or, without text, a place for one.

    A place is where the line `role` stands once `value` is chosen.
    """

    depth: int
    text: str
    role: str = ""
    value: str = ""


@dataclass(frozen=True)
class Axis:
    """One choice: its name, what it is called, and its values with what they are called; a `line` can be moved."""

    name: str
    title: str
    values: Mapping[str, str]
    line: str = ""

    def at(self, choice: Choice, where: str, depth: int) -> LoopLine:
        """Return the line where it was put; elsewhere, a place for it."""
        is_here = choice[self.name] == where
        return LoopLine(depth, self.line if is_here else "", self.name, where)


# Fourteen samples, in micro-batches of two, or of one to three: two windows of three, and one left over.
_SIZES = {"equal": "2, 2, 2, 2, 2, 2, 2", "unequal": "3, 1, 2, 2, 1, 2, 3"}
INPUTS = (1.0, 3.0, 2.0, 2.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 1.0, 3.0, 1.0)
_ZERO = Axis(
    "zero_grad",
    "zero_grad",
    {
        "epoch": "above the loop over micro-batches",
        "micro-batch": "first in every micro-batch",
        "backward": "below backward",
        "before": "above the step",
        "after": "below the step",
        NOWHERE: "nowhere",
    },
    "optimizer.zero_grad()",
)
_STEP = Axis(
    "step",
    "step",
    {
        "micro-batch": "in every micro-batch",
        "window": "after K micro-batches",
        "epoch": "after the loop",
    },
    "optimizer.step()",
)
_CLIP = Axis(
    "clip",
    "clip",
    {
        "backward": "after every backward",
        "step": "above the step",
        NOWHERE: "nowhere",
    },
    "nn.utils.clip_grad_norm_(w, 4)",
)
_DIVIDE = Axis(
    "divide",
    "each loss is divided by",
    {
        "window": "the window’s length",
        "K": "K",
        "nothing": "nothing",
        "samples": "the window’s samples",
    },
)
_BATCHES = Axis("sizes", "micro-batches", {"equal": "equal", "unequal": "unequal"})
_TAIL = Axis(
    "tail",
    "the last, shorter window",
    {"step": "gets a step", "carry": "joins the next epoch", "drop": "is dropped"},
)
AXES = (_ZERO, _STEP, _CLIP, _DIVIDE, _BATCHES, _TAIL)
# A loop without a mistake.
RIGHT = {
    "zero_grad": "after",
    "step": "window",
    "clip": NOWHERE,
    "divide": "window",
    "sizes": "equal",
    "tail": "step",
}
# What a loss is divided by, where it is not K, in a loop that steps so often.
_DIVISORS = {
    "window": {
        "micro-batch": "1",
        "window": "min(K, len(loader) - i // K * K)  # 3, 3, then 1",
        "epoch": "len(loader)",
    },
    "samples": {
        "micro-batch": "len(x)",
        "window": "sum(sizes[i // K * K :][:K])",
        "epoch": "sum(sizes)",
    },
}


def _complete(start: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a value for each choice, from what differs from the right loop.

    Raises `ValueError` for a choice or a value that there is not.
    """
    offered = {axis.name: list(axis.values) for axis in AXES}
    places = positions("start", {**RIGHT, **(start or {})}, offered)
    pairs = zip(offered.items(), places, strict=True)
    return {name: values[place] for (name, values), place in pairs}


def near(start: Choice) -> list[dict[str, str]]:
    """Return every choice that differs from the start in at most `REACH` places, the start first."""

    def differences(choice: Choice) -> int:
        return sum(choice[name] != start[name] for name in choice)

    every = product(*(axis.values for axis in AXES))
    choices = [dict(zip(RIGHT, values, strict=True)) for values in every]
    choices.sort(key=differences)
    return [choice for choice in choices if differences(choice) <= REACH]


def loop_lines(choice: Choice) -> Iterator[LoopLine]:
    """Yield the loop from top to bottom, lines and places."""
    step = choice["step"]
    tail = choice["tail"]
    in_windows = step == "window"
    if choice["divide"] == "K" or in_windows:
        yield LoopLine(0, "K = 3")
    yield LoopLine(0, f"sizes = [{_SIZES[choice['sizes']]}]", "sizes")
    yield LoopLine(0, "loader = batches_of(sizes)")
    yield LoopLine(0, "for epoch in range(2):")
    yield _ZERO.at(choice, "epoch", 1)
    if in_windows:
        yield LoopLine(1, "for i, (x, y) in enumerate(loader):")
    else:
        yield LoopLine(1, "for x, y in loader:")
    yield _ZERO.at(choice, "micro-batch", 2)
    yield from _loss_lines(choice)
    yield LoopLine(2, "loss.backward()")
    yield _CLIP.at(choice, "backward", 2)
    if step != "micro-batch":
        yield _ZERO.at(choice, "backward", 2)
    yield from _step(choice, "micro-batch", 2)
    if in_windows:
        last = " or i + 1 == len(loader)" if tail == "step" else ""
        yield LoopLine(2, f"if (i + 1) % K == 0{last}:", "tail")
    yield from _step(choice, "window", 3 if in_windows else 2)
    if in_windows and tail == "drop":
        yield LoopLine(1, "optimizer.zero_grad()  # drops what is left", "tail")
    yield from _step(choice, "epoch", 1)


def _loss_lines(choice: Choice) -> Iterator[LoopLine]:
    """Yield what the loss is divided by, and the loss."""
    divide = choice["divide"]
    divisor = _divisor(choice)
    if divisor:
        yield LoopLine(2, f"{divide} = {divisor}", "divide")
    reduced = "sum" if divide == "samples" else "mean"
    by = "" if divide == "nothing" else f" / {divide}"
    yield LoopLine(2, f"loss = (w * x - y).square().{reduced}(){by}", "divide")


def _divisor(choice: Choice) -> str:
    step = choice["step"]
    divide = choice["divide"]
    if step == divide == "window" and choice["tail"] != "step":
        return "K"
    return _DIVISORS.get(divide, {}).get(step, "")


def _step(choice: Choice, where: str, depth: int) -> Iterator[LoopLine]:
    """Yield the step and what stands right above and below it; elsewhere, its place."""
    if choice["step"] == where:
        # Above a step in every micro-batch is below backward, too: the two are one place.
        is_one = where == "micro-batch" and choice["zero_grad"] == "backward"
        yield _ZERO.at(choice, "backward" if is_one else "before", depth)
        yield _CLIP.at(choice, "step", depth)
    yield _STEP.at(choice, where, depth)
    if choice["step"] == where:
        yield _ZERO.at(choice, "after", depth)


def _begin() -> tuple[Any, dict[str, Any]]:
    """Return a recording that is not open yet, and the names with which the text of a loop runs."""
    import torch

    import accumviz as av

    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.05)
    recording = av.record({"w": w}, optimizer, sources=True, memory=False)
    names = {"w": w, "optimizer": optimizer, "nn": torch.nn, "batches_of": _batches_of}
    return recording, names


def _batches_of(sizes: list[int]) -> Any:
    """Make a loader of so many samples in each micro-batch."""
    import torch

    x = torch.tensor(INPUTS)
    ends = list(accumulate(sizes))
    batches = [list(range(*span)) for span in pairwise([0, *ends])]
    samples = torch.utils.data.TensorDataset(x, 2 * x)
    return torch.utils.data.DataLoader(samples, batch_sampler=batches)


def mean_loss(w: float) -> float:
    """Return the mean loss over all samples, which every arrangement is to bring down."""
    misses = [w * x - 2 * x for x in INPUTS]
    return sum(miss * miss for miss in misses) / len(misses)
