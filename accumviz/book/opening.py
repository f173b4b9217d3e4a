"""Show one division of a loop: its code, `.grad` as a vessel that fills, and the weight on its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accumviz.ledger.ledger import Ledger
from accumviz.show import Displayed
from accumviz.views import weights
from accumviz.views.payload import listing
from accumviz.views.player import Picture
from accumviz.views.style import number

# The ways to take a step: all samples at once, or in pieces, with the division and without it.
WHOLE = "full batch"
DIVIDED = "accumulated"
UNDIVIDED = "undivided"
WAYS = (WHOLE, DIVIDED, UNDIVIDED)


@dataclass(eq=False, repr=False)
class Opening(Picture):
    """Recordings of one loop for several learning rates, each with its division and without it.

    `runs` holds a ledger for each rate and way. `loss` is the mean loss of all samples at a weight, and `slope` its
    gradient there. `token` is the division in the code, and `more` what stands behind a button.
    """

    runs: Mapping[tuple[float, str], Ledger]
    loss: weights.Loss
    slope: Callable[[float], float]
    start: float
    token: str
    more: Displayed | None = None

    def __post_init__(self) -> None:
        self.rates = sorted({rate for rate, _ in self.runs})
        shown = [self.runs[self.start, way] for way in WAYS]
        ground = weights.field(shown, self.loss)
        assert ground is not None
        self._ground = ground

    @property
    def content(self) -> dict[str, Any]:
        """What the page is told: the code, the curve, and for each rate the run of each way."""
        first = self.runs[self.start, DIVIDED]
        (code, *_), _ = listing(first, list(first))
        runs = []
        for rate in self.rates:
            runs.append([self._run(self.runs[rate, way]) for way in WAYS])
        return {
            "code": code["lines"],
            "token": self.token,
            "rates": list(map(number, self.rates)),
            "start": self.rates.index(self.start),
            "ground": self._ground.elements(),
            "runs": runs,
        }

    def _run(self, ledger: Ledger) -> dict[str, Any]:
        stations = self._ground.picture(ledger, range(len(ledger)))["p"]
        _, lines = listing(ledger, list(ledger))
        events = []
        for event, line, state in zip(ledger, lines, self._states(ledger), strict=True):
            events.append([event.kind, line, *state])
        first, last = self._losses(ledger)
        return {
            "way": [station[:4] for station in stations],
            "events": events,
            "from": number(first, 3),
            "to": number(last, 3),
            "fails": last > first / 2,
        }

    def _states(self, ledger: Ledger) -> Iterator[tuple[list[float], str, str]]:
        """Yield after each event what is in `.grad`: its parts as fractions of a large batch's, both as numbers."""
        added = ledger.values(0, "contribution")[:, 0].tolist()
        grads = ledger.values(0)[:, 0].tolist()
        moved = ledger.weights(0)[:, 0].tolist()
        here = weights.path(ledger).values[0]
        parts = []
        whole = 0.0
        for e, event in enumerate(ledger):
            # What a step has used is compared with what it used until the next event.
            if event.kind == "step":
                here = moved[e]
            else:
                whole = self.slope(here)
            if event.kind == "backward":
                parts.append(round(added[e] / whole, 4) if whole else 0.0)
            elif event.kind == "zero_grad":
                parts = []
            grad = number(grads[e], 3)
            if math.isnan(grads[e]):
                grad = "None"
            yield list(parts), grad, number(whole, 3)

    def _losses(self, ledger: Ledger) -> tuple[float, float]:
        """Return the loss before the first step and after the last one."""
        first, *_, last = weights.path(ledger).values
        return float(self.loss(first)), float(self.loss(last))

    def to_html(self) -> str:
        """Return the picture, and behind a button what there is more."""
        page = super().to_html()
        if self.more is None:
            return page
        return (
            f'{page}<details class="av-more"><summary>All panes: code, graph, gradient, timeline, shares'
            f"</summary>{self.more.to_html()}</details>"
        )

    @property
    def words(self) -> list[str]:
        """Where each way leads at each learning rate, in a sentence."""
        sentences = []
        for (rate, way), ledger in self.runs.items():
            first, last = self._losses(ledger)
            sentences.append(
                f"learning rate {number(rate)}, {way}: the loss goes from {number(first, 3)} to {number(last, 3)}."
            )
        return sentences
