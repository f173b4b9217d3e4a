"""Show the bytes that are alive during one training step, for several K, with checkpoints and without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accumviz.show import Displayed, escape, table
from accumviz.views.player import picture
from accumviz.views.style import size

# What is alive, from the bottom of the picture to its top.
KINDS = (
    "weights",
    "optimizer state",
    "gradients",
    "results of the forward",
    "recomputed results",
    "gradients on their way",
)


class Moment(NamedTuple):
    """The bytes of each kind after one operation, of which micro-batch, in which phase of the step."""

    operation: str
    phase: str
    micro_batch: int
    alive: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Peaks(Displayed):
    """Runs of one step by K and by whether it used checkpoints, under a line that says what a device holds.

    `gpu` is where the line begins, in bytes.
    """

    runs: Mapping[tuple[int, bool], Sequence[Moment]]
    gpu: int

    def __post_init__(self) -> None:
        self.ks = sorted({k for k, _ in self.runs})

    def peak(self, k: int, checkpoints: bool) -> int:
        """Return the most bytes that are alive at once."""
        return max(sum(moment.alive) for moment in self.runs[k, checkpoints])

    @property
    def content(self) -> dict[str, Any]:
        """What the page is told: for each K the moments of its step, without checkpoints and with them."""
        ways = []
        for checkpoints in (False, True):
            ways.append([self.runs[k, checkpoints] for k in self.ks])
        return {"kinds": KINDS, "ks": self.ks, "gpu": self.gpu, "runs": ways}

    def to_html(self) -> str:
        """Return a fragment of HTML that needs nothing else; without scripts, the curves and a table remain."""
        rows = []
        for k in self.ks:
            rows.append([str(k), size(self.peak(k, False)), size(self.peak(k, True))])
        heads = ["K", "without checkpoints", "with checkpoints"]
        peaks = table(heads, rows, "The most bytes alive at once")
        text = f'<div class="av-words">{self._still()}{peaks}</div>'
        return picture("peaks", self.content, text, __file__)

    def _still(self) -> str:
        """Draw the bytes that are alive during the step, a curve for each K, without checkpoints."""
        most = max(self.peak(k, False) for k in self.ks)
        curves = ""
        for k in self.ks:
            run = self.runs[k, False]
            points = []
            for at, moment in enumerate(run):
                x = 100 * at / len(run)
                y = 100 - 100 * sum(moment.alive) / most
                points.append(f"{x:.1f},{y:.1f}")
            curves += f'<polyline class="av-curve" points="{" ".join(points)}"/>'
        label = escape(" ".join(self.words))
        return (
            f'<svg class="av-still" viewBox="0 0 100 100" preserveAspectRatio="none" role="img"'
            f' aria-label="{label}">{curves}</svg>'
        )

    @property
    def words(self) -> list[str]:
        """What the picture shows, in sentences."""
        sentences = []
        for k in self.ks:
            plain, recomputed = self.peak(k, False), self.peak(k, True)
            sentences.append(
                f"K = {k}: at most {size(plain)} are alive, with checkpoints {size(recomputed)}."
            )
        return sentences

    def __repr__(self) -> str:
        return f"Peaks: {len(self.runs)} runs of one step, K = {', '.join(map(str, self.ks))}"
