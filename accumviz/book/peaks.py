"""Show the bytes that are alive during one training step, for several K, with checkpoints and without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from accumviz.show import Displayed, table
from accumviz.views import style
from accumviz.views.payload import encode, identity
from accumviz.views.player import fragment
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
# The picture is as wide and as high, in its own units; a page stretches it.
_WIDE = 1000
# Names of curves stand so far apart, in hundredths of the height.
_APART = 7.0
_MIB = 2**20


class Moment(NamedTuple):
    """The bytes of each kind after one operation, of which micro-batch, in which phase of the step."""

    operation: str
    phase: str
    micro_batch: int
    alive: tuple[int, ...]


Run = Sequence[Moment]


@dataclass(eq=False, repr=False)
class Peaks(Displayed):
    """Runs of one step by K and by whether it used checkpoints, under a line that says what a device holds.

    `gpu` is where the line is to begin, in bytes.
    """

    runs: Mapping[tuple[int, bool], Run]
    gpu: int

    def __post_init__(self) -> None:
        self.ks = sorted({k for k, _ in self.runs})
        highest = max(self._peak(k, way) for k, way in self.runs)
        # Above the highest curve there is room for the line.
        self.top = ceil(1.08 * highest / _MIB) * _MIB

    def _peak(self, k: int, checkpoints: bool) -> int:
        return max(sum(moment.alive) for moment in self.runs[k, checkpoints])

    def _peaks(self, checkpoints: bool) -> list[int]:
        return [self._peak(k, checkpoints) for k in self.ks]

    @property
    def content(self) -> dict[str, Any]:
        """Return what the page is told: for each way and K, the moments of the step and where its name stands."""
        runs = []
        for checkpoints in (False, True):
            heights = [100 * peak / self.top for peak in self._peaks(checkpoints)]
            places = _apart(heights)
            of_way = []
            for k, place in zip(self.ks, places, strict=True):
                of_way.append(_columns(self.runs[k, checkpoints]) | {"label": place})
            runs.append(of_way)
        return {
            "kinds": KINDS,
            "ks": self.ks,
            "top": self.top,
            "gpu": self.gpu,
            "runs": runs,
        }

    def to_html(self) -> str:
        """Return a fragment of HTML that needs nothing else; without scripts, a drawing and a table remain."""
        content = self.content
        css = style.CSS + style.static("peaks.css", __file__)
        script = style.static("peaks.js", __file__)
        text = (
            f'{self._still()}<div class="av-words"><p>{" ".join(self.words)}</p>'
            f"{self._table()}</div>"
        )
        return fragment(
            "peaks", identity(content), text, encode(content), [css], script
        )

    def _still(self) -> str:
        """Return the drawing without scripts: the curve of each K, filled for the first, and what a device holds."""
        ways = [("", False), (" av-checkpoints", True)]
        curves = ""
        for look, checkpoints in ways:
            for k in self.ks:
                points = _points(self.runs[k, checkpoints], self.top)
                curves += f'<polyline class="av-curve{look}" points="{points}"/>'
        line = _WIDE * (1 - self.gpu / self.top)
        filled = f"0,{_WIDE} {_points(self.runs[self.ks[0], False], self.top)} {_WIDE},{_WIDE}"
        names = ""
        for k, run in zip(self.ks, self.content["runs"][0], strict=True):
            peak = size(self._peak(k, False))
            names += f'<span class="av-name" style="bottom:{run["label"]}%">K = {k}: {peak}</span>'
        return (
            f'<div class="av-still"><svg viewBox="0 0 {_WIDE} {_WIDE}" preserveAspectRatio="none" role="img" '
            f'aria-label="Bytes alive during one step, for each K">'
            f'<polygon class="av-band-3" points="{filled}"/>{curves}'
            f'<path class="av-gpu" d="M0 {line:.0f}H{_WIDE}"/></svg>{names}'
            f'<span class="av-gpu-name" style="bottom:{100 * self.gpu / self.top:.1f}%">'
            f"a GPU that holds {size(self.gpu)}</span></div>"
        )

    def _table(self) -> str:
        rows = []
        for k, plain, checkpoints in zip(
            self.ks, self._peaks(False), self._peaks(True), strict=True
        ):
            rows.append([str(k), size(plain), size(checkpoints)])
        heads = ["K", "without checkpoints", "with checkpoints"]
        return table(heads, rows, "The most bytes that are alive at once")

    @property
    def words(self) -> list[str]:
        """Say which K fit into the device, without checkpoints and with them."""
        sentences = []
        for way, checkpoints in (("Without", False), ("With", True)):
            peaks = zip(self.ks, self._peaks(checkpoints), strict=True)
            fitting = [k for k, peak in peaks if peak <= self.gpu]
            fits = f"K ≥ {fitting[0]} fits" if fitting else "no K fits"
            sentences.append(f"{way} checkpoints {fits} into {size(self.gpu)}.")
        return sentences

    def __repr__(self) -> str:
        return f"Peaks: {len(self.runs)} runs of one step, K = {', '.join(map(str, self.ks))}"


def _columns(run: Run) -> dict[str, Any]:
    """Write a run as columns, each name once."""
    names = sorted({moment.operation for moment in run})
    phases = sorted({moment.phase for moment in run})
    return {
        "names": names,
        "phases": phases,
        "operation": [names.index(moment.operation) for moment in run],
        "phase": [phases.index(moment.phase) for moment in run],
        "part": [moment.micro_batch for moment in run],
        "alive": [
            list(kind) for kind in zip(*(moment.alive for moment in run), strict=True)
        ],
    }


def _points(run: Run, top: int) -> str:
    """Write the curve of a run: from its first operation to its last, from no bytes to the most that are drawn.

    >>> _points([Moment("add", "forward", 1, (1,)), Moment("mm", "backward", 1, (2,))], 4)
    '0,750 1000,500'
    """
    apart = _WIDE / max(len(run) - 1, 1)
    points = []
    for i, moment in enumerate(run):
        height = _WIDE * sum(moment.alive) / top
        points.append(f"{apart * i:.0f},{_WIDE - height:.0f}")
    return " ".join(points)


def _apart(heights: Sequence[float]) -> list[float]:
    """Raise each place that is too near to the one below it.

    >>> _apart([60, 22, 20])
    [60, 27.0, 20]
    """
    places: list[float] = []
    for height in reversed(heights):
        lowest = places[-1] + _APART if places else height
        places.append(max(round(height, 1), lowest))
    return places[::-1]
