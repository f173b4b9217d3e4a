"""Show the chain rule of one weight and two samples: streams of gradient, each as wide as its gradient is large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accumviz.views.payload import plain
from accumviz.views.player import Picture
from accumviz.views.style import number

# What one run says, by name: values, gradients (`.grad`), what each sample brings to the weight (`part`), and the
# derivative of one line of code with respect to what it reads (`by`).
Run = Mapping[str, float]
SAMPLES = ("1", "2")
# The drawings, and where the weight and the loss are in them, across; a gradient of 1 is so wide.
_DRAWINGS = {"streams-wide": 142.0, "streams-narrow": 170.0}
_SCALE = 1.1
_NOTE = (
    "Values go from w to the loss: <code>ŷ = w · x</code>, <code>e = 2x − ŷ</code>,"
    " <code>loss = (e₁² + e₂²) / 2</code>. Gradients come back to w."
    " Each stream is as wide as its gradient is large, whatever its sign."
)


@dataclass(eq=False, repr=False)
class Streams(Picture):
    """Runs of one loss for a grid of values of `w` and `x`, the first sample; `start` is what is shown first.

    A run is one forward and one backward of two samples, `x` and another one; `Run` says which numbers it gives.
    """

    runs: Mapping[tuple[float, float], Run]
    start: tuple[float, float]

    def __post_init__(self) -> None:
        self.axes = {
            "w": sorted({w for w, _ in self.runs}),
            "x1": sorted({x for _, x in self.runs}),
        }

    @property
    def content(self) -> dict[str, Any]:
        """What the page is told: the names of the numbers, the values of both axes, and a row for each run."""
        names = list(self.runs[self.start])
        rows = []
        for w in self.axes["w"]:
            for x in self.axes["x1"]:
                run = self.runs[w, x]
                rows.append(plain([run[name] for name in names]))
        at = []
        axes = []
        shown = zip(self.axes.items(), ("w", "x₁"), self.start, strict=True)
        for (name, values), title, first in shown:
            axes.append([name, title, len(values)])
            at.append(values.index(first))
        return {"names": names, "axes": axes, "start": at, "rows": rows}

    @property
    def words(self) -> list[str]:
        """The sum at the weight as it is at the start, in a sentence for each sample."""
        run = self.runs[self.start]
        sentences = []
        for sample in SAMPLES:
            factors = " × ".join(number(run[name]) for name in _factors(sample))
            sentences.append(
                f"Sample {sample} brings {factors} = {number(run[f'part{sample}'])}."
            )
        return [*sentences, f"Together: w.grad = {number(run['w.grad'])}."]

    @property
    def still(self) -> str:
        """Both drawings, of which a page shows one, and the sum at the weight."""
        run = self.runs[self.start]
        pictures = "".join(self._drawing(run, *each) for each in _DRAWINGS.items())
        return f'<p class="av-note">{_NOTE}</p>{pictures}{self._sum(run)}'

    def _drawing(self, run: Run, name: str, middle: float) -> str:
        """Draw what arrives at each result, and what its last factor makes of it for the weight."""
        holes: dict[str, Any] = {"scale": _SCALE, "middle": middle}
        for key, value in run.items():
            holes[key] = number(value)
            holes[f"width {key}"] = f"{_SCALE * abs(value):.4g}"
        # The streams meet side by side: each is moved by half the width of the other one.
        for side, beside in ((-1, "part2"), (1, "part1")):
            across = middle + side * _SCALE * abs(run[beside]) / 2
            holes[f"beside {beside}"] = f"{across:.4g}"
        return self.drawn(name, holes)

    def _sum(self, run: Run) -> str:
        sums = []
        for sample in SAMPLES:
            factors = " × ".join(_number(run, name) for name in _factors(sample))
            part = _number(run, f"part{sample}")
            sums.append(
                f'<span><i class="av-of{sample}"></i>{factors} = <b>{part}</b></span>'
            )
        total = f"<span>added at w: w.grad = <b>{_number(run, 'w.grad')}</b></span>"
        return f'<p class="av-says" aria-live="polite">{" ".join([*sums, total])}</p>'


def _factors(sample: str) -> list[str]:
    """Name the factors of a sample's path, from the loss on."""
    return [f"{result}{sample}.by" for result in ("loss", "q", "e", "y")]


def _number(run: Run, name: str) -> str:
    return f'<span data-number="{name}">{number(run[name])}</span>'
