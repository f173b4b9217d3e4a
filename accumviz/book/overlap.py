"""Show when the ranks of DDP compute and when they communicate, in one window, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accumviz.show import plural
from accumviz.views import style
from accumviz.views.player import Picture

# What happened, of which micro-batch, layer or bucket, and when, in seconds of a clock that all ranks share.
Note = tuple[str, int, float]
# A limit for buckets in MiB, and whether all micro-batches but the last are in `no_sync`.
Setting = tuple[int, bool]

# What the thread that computes has done since its note before.
DONE = {"backward": "forward", "gradient": "gradient", "end": "wait", "step": "step"}
LANES = (
    ("micro-batch", "heads"),
    ("rank 0", "compute"),
    ("rank 0", "network"),
    ("rank 1", "network"),
    ("rank 1", "compute"),
    ("time, ms", "axis"),
)
HEADS, AXIS = 0, 5
COMPUTE, NETWORK = (1, 4), (2, 3)
# More bars than this on top of each other leave no room for words.
_MOST_LABELLED = 3
_LEGEND = (
    (
        "gradient",
        (
            "DDP’s buckets: the two colours alternate. In compute: a layer’s gradient, by its number. "
            "In network: the all-reduce, from when this rank is ready until it has the mean"
        ),
    ),
    ("wait", "the rank waits for the network, or for the other rank"),
    ("step", "optimizer step"),
)


class Stretch(NamedTuple):
    """A stretch of one rank's time; `which` is a micro-batch, a layer (of a gradient) or a bucket."""

    kind: str
    which: int
    micro_batch: int
    start: float
    end: float
    bucket: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Mark(NamedTuple):
    """A box in a lane, as `overlap.js` takes it; `left` and `width` are percent of the axis, the others of the lane."""

    lane: int
    name: str
    look: str
    left: float
    width: float = 0.0
    top: float = 0.0
    height: float = 100.0
    label: str = ""
    says: str = ""


def buckets(notes: Sequence[Note]) -> dict[int, int]:
    """Return the bucket of each layer: the gradients that have come since the all-reduce before are in it.

    >>> buckets([("gradient", 1, 0.1), ("launch", 0, 0.2), ("gradient", 0, 0.3), ("launch", 1, 0.4)])
    {1: 0, 0: 1}
    """
    found: dict[int, int] = {}
    came = []
    for what, which, _ in notes:
        if what == "gradient":
            came.append(which)
        elif what == "forward":
            came = []
        elif what == "launch":
            found |= dict.fromkeys(came, which)
            came = []
    return found


def stretches(notes: Sequence[Note]) -> list[Stretch]:
    """Return what one rank did, worked out from the times that it noted."""
    bucket_of = buckets(notes)
    launched = {}
    made = []
    k, since = 0, 0.0
    for what, which, at in notes:
        if what == "launch":
            launched[which] = at
        elif what == "reduced":
            made.append(Stretch("reduce", which, k, launched[which], at, which))
        elif what == "forward":
            k, since = which, at
            launched = {}
        elif what != "end" or launched:  # what sends nothing waits for nothing
            bucket = bucket_of.get(which, 0)
            made.append(Stretch(DONE[what], which, k, since, at, bucket))
            since = at
    return made


@dataclass(eq=False, repr=False)
class Overlap(Picture):
    """One window of two ranks for each setting: their notes, and the bytes of one layer."""

    runs: Mapping[Setting, Sequence[Sequence[Note]]]
    start: Setting
    layer: int

    def __post_init__(self) -> None:
        self.caps = sorted({cap for cap, _ in self.runs})
        self._done = {}
        for setting, ranks in self.runs.items():
            self._done[setting] = list(map(stretches, ranks))
        self._axis = max(map(self.seconds, self.runs))

    def seconds(self, setting: Setting) -> float:
        """Return how long a window takes, from the first forward to the last step."""
        ends = [rank[-1].end for rank in self._done[setting]]
        return max(ends) - self._zero(setting)

    def _zero(self, setting: Setting) -> float:
        return min(rank[0].start for rank in self._done[setting])

    def counts(self, setting: Setting) -> tuple[int, int, float]:
        """Return the all-reduces of a window, the bytes of gradients in them, and the seconds that rank 0 waits."""
        first = self._done[setting][0]
        reduced = [one.micro_batch for one in first if one.kind == "reduce"]
        computed = [one.micro_batch for one in first if one.kind == "gradient"]
        size = self.layer * sum(map(computed.count, set(reduced)))
        waits = sum(one.seconds for one in first if one.kind == "wait")
        return len(reduced), size, waits

    def sentence(self, setting: Setting) -> str:
        """Return what a window sends, and how long it takes."""
        count, size, waits = self.counts(setting)
        sent = (
            f"{count} {plural(count, 'all-reduce')}, {style.size(size)} of gradients."
        )
        return f"{sent} The window takes {_ms(self.seconds(setting))} ms; in {_ms(waits)} of them, rank 0 only waits."

    def marks(self, setting: Setting) -> Iterator[Mark]:
        """Yield every box of the picture."""
        for rank, done in enumerate(self._done[setting]):
            for one in done:
                yield self._mark(setting, rank, one)
        yield from self._heads(setting)
        yield from self._ticks()
        cap, quiet = setting
        other = self._part(self.seconds((cap, not quiet)))
        label = f"ends here {'without' if quiet else 'with'} no_sync"
        yield Mark(HEADS, "other", "other", other)
        look = "ghost before" if other > 53 else "ghost after"
        yield Mark(AXIS, "ghost", look, other, label=label)

    def _mark(self, setting: Setting, rank: int, one: Stretch) -> Mark:
        zero = self._zero(setting)
        start = one.start - zero
        end = one.end - zero
        says = f"{_ms(start)} to {_ms(end)} ms, rank {rank}: {_said(one)}"
        name = f"{one.kind} {rank} {one.micro_batch} {one.which}"
        place = self._part(start), self._part(one.seconds)
        look = f"{one.kind} {'odd' if one.bucket % 2 else 'even'}"
        if one.kind != "reduce":
            labels = {"gradient": str(one.which), "wait": "waits"}
            label = labels.get(one.kind, one.kind)
            return Mark(COMPUTE[rank], name, look, *place, label=label, says=says)
        rows = 1 + max(each.bucket for each in self._done[setting][rank])
        label = f"bucket {one.bucket}" if rows <= _MOST_LABELLED else ""
        row = 100 * one.bucket / rows
        return Mark(NETWORK[rank], name, look, *place, row, 100 / rows, label, says)

    def _heads(self, setting: Setting) -> Iterator[Mark]:
        """Yield the name of each micro-batch, and in each network lane that nothing is sent in it."""
        done = self._done[setting][0]
        zero = self._zero(setting)
        sent = {one.micro_batch for one in done if one.kind == "reduce"}
        for k in range(1 + done[-1].micro_batch):
            ours = [one for one in done if one.micro_batch == k]
            left = self._part(ours[0].start - zero)
            width = self._part(ours[-1].end - ours[0].start)
            yield Mark(HEADS, f"head {k}", "head", left, width, label=str(k + 1))
            for lane in () if k in sent else NETWORK:
                name = f"silent {lane} {k}"
                text = "nothing is sent"
                yield Mark(lane, name, "silent", left, width, label=text)

    def _ticks(self) -> Iterator[Mark]:
        longest = 1000 * self._axis
        steps = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 60000)
        apart = next(step for step in steps if longest < 8 * step)
        for at in range(0, int(longest) + 1, apart):
            yield Mark(AXIS, f"tick {at}", "tick", self._part(at / 1000), label=str(at))

    def _part(self, seconds: float) -> float:
        return 100 * seconds / self._axis

    @property
    def content(self) -> dict[str, Any]:
        """What the page is told: for each limit of the buckets the window without `no_sync`, and the one with it."""
        runs = []
        for cap in self.caps:
            runs.append([self._shown((cap, quiet)) for quiet in (False, True)])
        cap, quiet = self.start
        start = [self.caps.index(cap), int(quiet)]
        return {
            "caps": self.caps,
            "start": start,
            "lanes": LANES,
            "legend": _LEGEND,
            "runs": runs,
        }

    def _shown(self, setting: Setting) -> dict[str, Any]:
        marks = []
        for mark in self.marks(setting):
            marks.append([round(x, 2) if isinstance(x, float) else x for x in mark])
        return {"says": self.sentence(setting), "marks": marks}

    @property
    def words(self) -> list[str]:
        """What a window of each setting sends, in sentences."""
        shown = []
        for cap, quiet in sorted(self.runs):
            way = "with" if quiet else "without"
            said = self.sentence((cap, quiet))
            shown.append(f"bucket_cap_mb {cap}, {way} no_sync: {said}")
        return shown


def overlap(
    returned: Sequence[Mapping[Setting, Sequence[Sequence[Note]]]],
    *,
    start: Setting,
    layer: int,
) -> Overlap:
    """Keep the window of median length of those that two ranks noted for each setting, and show it.

    `returned` holds for each rank its windows by setting; a window is the notes of one rank. A note is what
    happened, the micro-batch, layer or bucket that it happened to, and the time: "forward" and "backward" begin,
    the "gradient" of a layer is there, an all-reduce is "launch"ed and "reduced", "end" of a backward, "step".
    `layer` is the bytes of one layer.
    """
    runs = {}
    for setting in returned[0]:
        windows = zip(*(rank[setting] for rank in returned), strict=True)
        by_length = sorted(windows, key=_length)
        runs[setting] = by_length[len(by_length) // 2]
    return Overlap(runs, start, layer)


def _length(window: Sequence[Sequence[Note]]) -> float:
    return max(notes[-1][2] for notes in window) - min(notes[0][2] for notes in window)


def _said(one: Stretch) -> str:
    of = {
        "gradient": f"the gradient of layer {one.which}, which is in bucket {one.bucket}",
        "reduce": f"the all-reduce of bucket {one.which}, until this rank has the mean",
        "wait": "the backward has its last gradient, and waits for the network or the other rank",
        "step": "the optimizer's step",
    }
    return of.get(one.kind, f"the forward of micro-batch {one.micro_batch + 1}")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"
