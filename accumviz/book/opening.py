"""Show one division of a loop: its code, `.grad` as a vessel that fills, and the weight on its loss."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from accumviz.book import weights
from accumviz.ledger.ledger import Ledger, ledger_of
from accumviz.show import Displayed, escape, table
from accumviz.views import style
from accumviz.views.payload import encode, identity, listing
from accumviz.views.player import fragment
from accumviz.views.style import number

# The ways to take a step: all samples at once, or in pieces, with the division and without it.
WHOLE = "whole"
DIVIDED = "divided"
UNDIVIDED = "undivided"
WAYS = (WHOLE, DIVIDED, UNDIVIDED)


class Opening(Displayed):
    """Recordings of one loop for several learning rates, each with its division and without it.

    `runs` holds a ledger for each rate and way. `loss` is the mean loss of all samples at a weight, and `slope` its
    gradient there. `token` is the division in the code, and `more` what stands behind a button.
    """

    def __init__(
        self,
        runs: Mapping[tuple[float, str], Ledger],
        loss: weights.Loss,
        slope: Callable[[float], float],
        start: float,
        token: str,
        more: Displayed | None = None,
    ) -> None:
        self.runs = runs
        self.loss = loss
        self.slope = slope
        self.start = start
        self.token = token
        self.more = more
        self.rates = sorted({rate for rate, _ in runs})
        shown = [runs[start, way] for way in WAYS]
        self._ground = weights.field(shown, loss)

    @property
    def content(self) -> dict[str, Any]:
        """What the page is told: the code, the curve, and for each rate the run of each way."""
        assert self._ground is not None
        first = self.runs[self.start, DIVIDED]
        (code, *_), _ = listing(first, list(first))
        return {
            "code": code["lines"],
            "token": self.token,
            "rates": [number(rate) for rate in self.rates],
            "start": self.rates.index(self.start),
            "ground": self._ground.elements(),
            "runs": [[self._run(rate, way) for way in WAYS] for rate in self.rates],
        }

    def _run(self, rate: float, way: str) -> dict[str, Any]:
        ledger = self.runs[rate, way]
        assert self._ground is not None
        stations = self._ground.picture(ledger, range(len(ledger)))["p"]
        _, lines = listing(ledger, list(ledger))
        losses = [self._loss_at(weight) for weight in _path(ledger)]
        return {
            "way": [station[:4] for station in stations],
            "events": [
                [str(event.kind), line, *state]
                for event, line, state in zip(
                    ledger, lines, self._states(ledger), strict=True
                )
            ],
            "from": number(losses[0], 3),
            "to": number(losses[-1], 3),
            "fails": losses[-1] > losses[0] / 2,
        }

    def _states(self, ledger: Ledger) -> Iterable[tuple[list[float], str]]:
        """Tell after each event what is in `.grad`: its parts as fractions of a large batch's, and the number."""
        grads = ledger.values(0)[:, 0]
        moved = ledger.weights(0)[:, 0]
        here = _path(ledger)[0]
        parts: list[float] = []
        before = 0.0
        for event, grad, weight in zip(
            ledger, grads.tolist(), moved.tolist(), strict=True
        ):
            held = 0.0 if np.isnan(grad) else grad
            if event.kind == "backward":
                whole = self.slope(here)
                parts = [*parts, (held - before) / whole if whole else 0.0]
            elif event.kind == "step":
                here = weight
            elif event.kind == "zero_grad":
                parts = []
            before = held
            shown = [round(part, 4) for part in parts]
            yield shown, "None" if np.isnan(grad) else number(grad, 3)

    def _loss_at(self, weight: float) -> float:
        return float(self.loss(weight))

    def to_html(self) -> str:
        """Return a fragment of HTML that needs nothing else; without scripts, a picture and a table remain."""
        content = self.content
        css = style.CSS + style.static("opening.css", __file__)
        script = style.static("opening.js", __file__)
        text = f'<div class="av-words">{self._still()}{self._table()}</div>'
        page = fragment(
            "opening", identity(content), text, encode(content), [css], script
        )
        if self.more is None:
            return page
        return (
            f'{page}<details class="av-more"><summary>All panes: code, graph, gradient, timeline, shares'
            f"</summary>{self.more.to_html()}</details>"
        )

    def _still(self) -> str:
        """Draw where both ways lead at the rate at which the page opens."""
        assert self._ground is not None
        marks = "".join(_markup(*element) for element in self._ground.elements())
        paths = ""
        for way in (DIVIDED, UNDIVIDED):
            stations = self._ground.picture(self.runs[self.start, way], range(99))["p"]
            points = " ".join(f"{x},{y}" for _, x, y, *_ in stations)
            paths += f'<polyline class="av-{way}" points="{points}"/>'
        words = escape(" ".join(self.words))
        return (
            f'<svg viewBox="0 0 {weights.WIDTH} {weights.HEIGHT + 2}" role="img" aria-label="{words}">'
            f"{marks}{paths}</svg>"
        )

    def _table(self) -> str:
        heads = ["learning rate", *WAYS]
        rows = []
        for rate in self.rates:
            losses = [self._loss_at(_path(self.runs[rate, way])[-1]) for way in WAYS]
            rows.append([number(rate), *[number(loss, 3) for loss in losses]])
        return table(heads, rows, "Loss after the last step")

    @property
    def words(self) -> list[str]:
        """Where each way leads, in a sentence."""
        sentences = []
        for way in WAYS:
            path = _path(self.runs[self.start, way])
            first, last = (number(self._loss_at(at), 3) for at in (path[0], path[-1]))
            sentences.append(f"{way}: the loss goes from {first} to {last}.")
        return sentences

    def __repr__(self) -> str:
        return f"Opening: {len(self.runs)} runs, learning rates {number(self.rates[0])} to {number(self.rates[-1])}"


def opening(
    experiment: Callable[[str, float], Any],
    *,
    rates: Sequence[float],
    start: float,
    loss: weights.Loss,
    slope: Callable[[float], float],
    token: str,
    more: Displayed | None = None,
) -> Opening:
    """Record an experiment for each learning rate and each of the three ways, and show what one division does.

    `experiment(way, rate)` records one run of a single weight; the ways are "whole", "divided" and "undivided".
    """
    runs = {}
    for rate in rates:
        for way in WAYS:
            ledger = ledger_of(experiment(way, rate))
            assert ledger is not None
            runs[rate, way] = ledger
    return Opening(runs, loss, slope, start, token, more)


def _path(ledger: Ledger) -> list[float]:
    points: list[float] = weights.path(ledger).points[:, 0].tolist()
    return points


def _markup(name: str, attributes: Mapping[str, Any], text: str = "") -> str:
    tag, *classes = name.split(".")
    pairs = {"class": " ".join(classes), **attributes}
    written = " ".join(f'{key}="{value}"' for key, value in pairs.items())
    return f"<{tag} {written}>{html.escape(text)}</{tag}>"
