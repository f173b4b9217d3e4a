"""Show the chain rule of one weight and two samples: streams of gradient, each as wide as its gradient is large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accumviz.views.payload import plain
from accumviz.views.player import Picture
from accumviz.views.style import number

# What one run says, by name: values, gradients (`.grad`), what each sample brings to the weight (`part`), and the
# derivative of one line of code with respect to what it reads (`by`).
Run = Mapping[str, float]
SAMPLES = ("1", "2")
_INDEX = {"1": "₁", "2": "₂"}
# Of each sample's path, from the weight on: each result, how it is written, and how the factor on the way to it is.
_STATIONS = (("y", "ŷ#", "x#"), ("e", "e#", ""), ("q", "e#²", "2e#"), ("loss", "", ""))
_NOTE = (
    "Values go from w to the loss: <code>ŷ = w · x</code>, <code>e = 2x − ŷ</code>,"
    " <code>loss = (e₁² + e₂²) / 2</code>. Gradients come back to w."
    " Each stream is as wide as its gradient is large, whatever its sign."
)


class Positions(NamedTuple):
    """Where the parts of the drawing are along the way from the weight to the loss, and across it.

    `stops` are the middles of the boxes on a lane, from the weight on: a chip, a card, a chip, and so on. `ends` are
    the middles of the weight's card and the loss's. The paths part and meet at `bends`. A gradient of 1 is `scale`
    wide.
    """

    upright: bool
    size: tuple[int, int]
    lanes: tuple[int, int]
    card: tuple[int, int]
    chip: tuple[int, int]
    stops: tuple[int, ...]
    ends: tuple[int, int]
    bends: tuple[int, int, int, int]
    scale: float

    @property
    def middle(self) -> float:
        """Where the weight and the loss are, across."""
        return sum(self.lanes) / 2

    def at(self, along: float, across: float | str) -> str:
        """Write a point, as a path names it."""
        place = (across, along) if self.upright else (along, across)
        return "{} {}".format(*place)

    def streams(self, lane: float) -> Iterator[str]:
        """Yield the path of each stream of a lane, from the weight on; `#` is where it arrives there."""
        first, *chips = self.stops[::2]
        weight, parted, meeting, loss = self.bends
        # A stream may be wider than a box: it ends at the edges of the boxes between which it is widest.
        start = self.at(self.ends[0] + self.card[self.upright] / 2, "#")
        end = self.at(first - self.chip[self.upright] / 2, lane)
        yield f"M{start}L{self.at(weight, '#')}{self._bend(weight, '#', parted, lane)}L{end}"
        for chip in chips:
            yield f"M{self.at(first, lane)}L{self.at(chip, lane)}"
            first = chip
        end = self.at(self.ends[1], self.middle)
        yield f"M{self.at(first, lane)}L{self.at(meeting, lane)}{self._bend(meeting, lane, loss, self.middle)}L{end}"

    def _bend(
        self,
        start: float,
        across: float | str,
        end: float,
        other: float | str,
    ) -> str:
        half = (start + end) / 2
        points = (
            self.at(half, across),
            self.at(half, other),
            self.at(end, other),
        )
        return f"C{' '.join(points)}"


WIDE = Positions(
    upright=False,
    size=(990, 284),
    lanes=(64, 220),
    card=(100, 64),
    chip=(66, 56),
    stops=(258, 350, 442, 534, 626, 718, 808),
    ends=(57, 934),
    bends=(112, 222, 842, 885),
    scale=1.1,
)
NARROW = Positions(
    upright=True,
    size=(340, 548),
    lanes=(84, 256),
    card=(104, 44),
    chip=(66, 42),
    stops=(130, 181, 232, 283, 334, 385, 436),
    ends=(27, 520),
    bends=(51, 108, 462, 496),
    scale=1.1,
)


@dataclass(eq=False, repr=False)
class Streams(Picture):
    """Runs of one loss for a grid of values of `w` and `x`, the first sample; `start` is what is shown first."""

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
        pictures = "".join(_drawing(layout, run) for layout in (WIDE, NARROW))
        return f'<p class="av-note">{_NOTE}</p>{pictures}{self._sum()}'

    def _sum(self) -> str:
        run = self.runs[self.start]
        sums = []
        for sample in SAMPLES:
            factors = " × ".join(_number(run, name) for name in _factors(sample))
            part = _number(run, f"part{sample}")
            sums.append(
                f'<span><i class="av-of{sample}"></i>{factors} = <b>{part}</b></span>'
            )
        total = f"<span>added at w: w.grad = <b>{_number(run, 'w.grad')}</b></span>"
        return f'<p class="av-says" aria-live="polite">{" ".join([*sums, total])}</p>'


def streams(
    experiment: Callable[[float, float], Run],
    w: Sequence[float],
    x: Sequence[float],
    start: tuple[float, float],
) -> Streams:
    """Run an experiment for each value of `w` and of `x`, and show how the gradient comes to `w`.

    `experiment(w, x)` runs one forward and one backward of two samples, `x` and another one, and returns its numbers by
    name; `Run` says which.
    """
    runs = {}
    for weight in w:
        for sample in x:
            runs[weight, sample] = experiment(weight, sample)
    return Streams(runs, start)


def _factors(sample: str) -> list[str]:
    """Name the factors of a sample's path, from the loss on."""
    return [f"{result}{sample}.by" for result, *_ in reversed(_STATIONS)]


def _number(run: Run, name: str, tag: str = "span") -> str:
    return f'<{tag} data-number="{name}">{number(run[name])}</{tag}>'


def _drawing(layout: Positions, run: Run) -> str:
    """Draw the paths of both samples, with a card for each result and a chip for each factor."""
    width, height = layout.size
    middle = layout.middle
    drawn, boxes = "", ""
    for sample, lane in zip(SAMPLES, layout.lanes, strict=True):
        drawn += _flowing(layout, run, sample, lane)
        boxes += _boxes(layout, run, sample, lane)
    weight, loss = layout.ends
    boxes += _card(layout, run, (weight, middle), "↔ w", "w", ".grad", "w")
    boxes += _card(layout, run, (loss, middle), "loss", "loss")
    kind = "narrow" if layout.upright else "wide"
    return (
        f'<svg class="av-{kind}" viewBox="0 0 {width} {height}" data-scale="{layout.scale}" data-middle="{middle}"'
        f' role="img" aria-label="Two paths lead from the loss back to w. Below, their factors, and the sum.">'
        f"{drawn}{boxes}</svg>"
    )


def _flowing(layout: Positions, run: Run, sample: str, lane: int) -> str:
    """Draw the streams of a sample: what arrives at each result, and what its last factor makes of it for `w`."""
    first = sample == SAMPLES[0]
    beside = f"part{SAMPLES[first]}"
    side = -1 if first else 1
    across = layout.middle + side * layout.scale * abs(run[beside]) / 2
    arriving = [f"{result}{sample}.grad" for result, *_ in _STATIONS[:-1]]
    names = [f"part{sample}", *arriving, "loss.grad"]
    drawn = ""
    for name, way in zip(names, layout.streams(lane), strict=True):
        place = f'd="{way.replace("#", f"{across:.4g}")}"'
        if "#" in way:
            place += f' data-way="{way}" data-beside="{beside}" data-side="{side}"'
        size = layout.scale * abs(run[name])
        drawn += f'<path class="av-bed" {place}/>'
        drawn += f'<path class="av-of{sample}" {place} stroke-width="{size:.4g}" data-width="{name}"/>'
    return drawn


def _boxes(layout: Positions, run: Run, sample: str, lane: int) -> str:
    """Draw the factors of a sample and its results, along its lane."""
    drawn = ""
    for i, (result, title, factor) in enumerate(_STATIONS):
        by = f"× {_number(run, f'{result}{sample}.by', 'tspan')}"
        name = factor.replace("#", _INDEX[sample])
        drag = ""
        if name == "x₁":
            drag, name = "x1", "↔ x₁"
        drawn += _box(
            layout, (layout.stops[2 * i], lane), layout.chip, (by, name), drag
        )
        if title:
            place = (layout.stops[2 * i + 1], lane)
            name = title.replace("#", _INDEX[sample])
            drawn += _card(layout, run, place, name, result + sample)
    return drawn


def _card(
    layout: Positions,
    run: Run,
    place: tuple[float, float],
    title: str,
    name: str,
    kept: str = "grad",
    drag: str = "",
) -> str:
    """Draw a result: its value, and the gradient that arrives at it, which only a leaf keeps as its `.grad`."""
    value = f"{title} = {_number(run, name, 'tspan')}"
    grad = f"{kept} {_number(run, f'{name}.grad', 'tspan')}"
    return _box(layout, place, layout.card, (value, grad), drag)


def _box(
    layout: Positions,
    place: tuple[float, float],
    size: tuple[int, int],
    lines: tuple[str, str],
    drag: str = "",
) -> str:
    """Draw a box with one or two lines of text; what is dragged says which number it changes."""
    x, y = map(float, layout.at(*place).split())
    width, height = size
    kind = "chip" if size == layout.chip else "card"
    texts = ""
    written = [line for line in lines if line]
    for i, line in enumerate(written):
        below = 18 * i - 9 * len(written) + 14
        texts += f'<text class="av-line{i}" y="{below}">{line}</text>'
    dragged = f' data-drag="{drag}"' if drag else ""
    return (
        f'<g class="av-{kind}" transform="translate({x:g} {y:g})"{dragged}><rect x="{-width / 2}" y="{-height / 2}"'
        f' width="{width}" height="{height}" rx="8"/>{texts}</g>'
    )
