"""Show the memory of one training step: what is alive on one device, for several K, and what FSDP's ranks hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from accumviz.show import counted, escape
from accumviz.views.player import Picture
from accumviz.views.style import size

# What is alive, from the bottom of the picture to its top.
KINDS = (
    "weights",
    "optimizer state",
    "gradients",
    "saved tensors",
    "recomputed tensors",
    "gradients of activations",
)


class Moment(NamedTuple):
    """The bytes of each kind after one operation, of which micro-batch, in which phase of the step."""

    operation: str
    phase: str
    micro_batch: int
    alive: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Peaks(Picture):
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

    @property
    def words(self) -> list[str]:
        """What the picture shows, in sentences."""
        sentences = []
        for k in self.ks:
            plain = self.peak(k, False)
            recomputed = self.peak(k, True)
            sentences.append(
                f"K = {k}: at most {size(plain)} are alive, with checkpoints {size(recomputed)}."
            )
        return sentences


# --- how the shards of FSDP breathe --------------------------------------------------------------

# A phase; the bytes of each layer on this rank, by kind; the most bytes of all tensors while these stay.
ShardMoment = tuple[str, Sequence[Sequence[int]], int]
SHARD, GATHERED, WHOLE, AVERAGED = range(4)
# Whether each forward ends with resharding, and whether each micro-batch averages its gradients.
Setting = tuple[bool, bool]
# What is shown first.
_START = (True, True)

# What it means for a layer that its bytes of a kind grow, or shrink.
_CHANGES = {
    (GATHERED, True): "layer {} is gathered",
    (GATHERED, False): "layer {} is resharded",
    (WHOLE, True): "layer {} has its whole gradient, from this rank’s samples alone",
    (WHOLE, False): "the whole gradient of layer {} is handed over to be averaged",
    (AVERAGED, True): "each rank gets its rows of layer {}’s averaged gradient",
    (AVERAGED, False): "zero_grad frees the gradient of layer {}",
}
_LEGEND = (
    ("own av-rank-0", "rank 0’s shard of the weights"),
    ("own av-rank-1", "rank 1’s"),
    ("lent av-rank-0", "gathered copy of rank 0’s half"),
    ("lent av-rank-1", "of rank 1’s"),
    ("whole", "whole gradient, of one rank’s samples"),
    ("averaged", "a shard of the averaged gradient"),
    ("rest", "activations, buffers for sending"),
)


class Stripe(NamedTuple):
    """A row of the drawing, as high as `height` in the units of its shapes: classes, and the path of each."""

    name: str
    height: int
    shapes: list[tuple[str, str]]


@dataclass(eq=False, repr=False)
class Sharding(Picture):
    """The moments of one window on each rank, for each setting, and the most bytes that a rank holds with DDP."""

    runs: Mapping[Setting, Sequence[Sequence[ShardMoment]]]
    ddp: int

    def __post_init__(self) -> None:
        self._most = max(self.ddp, *map(self.most, self.runs))

    def most(self, setting: Setting) -> int:
        """Return the most bytes that rank 0 holds."""
        return max(total for _, _, total in self.runs[setting][0])

    def counts(self, setting: Setting) -> tuple[int, int, int]:
        """Return the all-gathers and reduce-scatters, and the bytes of gradients before the last forward."""
        moments = self.runs[setting][0]
        held = _held(moments)
        change = np.diff(held, axis=0)
        gathers = int((change[..., GATHERED] > 0).sum())
        scatters = int((change[..., WHOLE] < 0).sum())
        phases = [phase for phase, _, _ in moments]
        last = max(phase for phase in phases if phase.startswith("forward"))
        waiting = held[phases.index(last), :, [WHOLE, AVERAGED]]
        return gathers, scatters, int(waiting.sum())

    def sentence(self, setting: Setting) -> str:
        """Return what a window sends, and what it holds."""
        gathers, scatters, waiting = self.counts(setting)
        return (
            f"{counted(gathers, 'all-gather')}, {counted(scatters, 'reduce-scatter')}."
            f" Between the micro-batches, a rank holds {size(waiting)} of gradients."
            f" At most it holds {size(self.most(setting))}; with DDP that averages every time, {size(self.ddp)}."
        )

    def lanes(self, setting: Setting) -> dict[str, list[Stripe]]:
        """Return the rows of the drawing under their headings."""
        drawn: dict[str, list[Stripe]] = {}
        ranks = self.runs[setting]
        for rank, moments in enumerate(ranks):
            held = _held(moments)
            unit = held[0, 0, SHARD]
            drawn[f"rank {rank}"] = []
            for layer in range(held.shape[1]):
                shapes = list(_stripes(held[:, layer] / unit, rank, len(ranks)))
                lane = Stripe(f"layer {layer + 1}", 2 * len(ranks) + 1, shapes)
                drawn[f"rank {rank}"].append(lane)
        shapes = list(self._memory(ranks[0], len(ranks)))
        drawn["memory of rank 0"] = [Stripe(f"0 to {size(self._most)}", 100, shapes)]
        return drawn

    def _memory(
        self,
        moments: Sequence[ShardMoment],
        ranks: int,
    ) -> Iterator[tuple[str, str]]:
        """Yield what rank 0 holds, kind upon kind, in percent of the most that any setting takes."""
        kinds = _held(moments).sum(axis=1).T
        totals = np.array([total for _, _, total in moments])
        stack = [
            ("own av-rank-0", kinds[SHARD]),
            ("averaged", kinds[AVERAGED]),
            ("whole", kinds[WHOLE]),
        ]
        for owner in range(ranks):
            stack.append((f"lent av-rank-{owner}", kinds[GATHERED] / ranks))
        stack.append(("rest", totals - kinds.sum(axis=0)))
        tops = np.full(len(totals), 100.0)
        for look, sizes in stack:
            heights = 100 * sizes / self._most
            tops = tops - heights
            yield look, _boxes(tops, heights)
        yield "ddp", f"M0 {self._of_ddp():.4g}h{len(totals)}"

    def _of_ddp(self) -> float:
        """Return where DDP's line is, in percent from above."""
        return 100 - 100 * self.ddp / self._most

    @property
    def content(self) -> dict[str, Any]:
        """What the page is told: a run for each setting, in the order of two binary digits."""
        runs = list(map(self._shown, sorted(self.runs)))
        return {"start": list(map(int, _START)), "runs": runs}

    def _shown(self, setting: Setting) -> dict[str, Any]:
        paths = []
        for lanes in self.lanes(setting).values():
            for lane in lanes:
                paths += [path for _, path in lane.shapes]
        moments = self.runs[setting][0]
        return {
            "says": self.sentence(setting),
            "phases": list(_lengths(moments).values()),
            "paths": paths,
            "moments": _said(moments),
        }

    @property
    def still(self) -> str:
        """The setting at the start: what a window sends, the drawing, and its legend."""
        keys = ""
        for look, text in _LEGEND:
            keys += f'<span><i class="av-{look}"></i> {escape(text)}</span>'
        says = escape(self.sentence(_START))
        above = f'<p class="av-says" aria-live="polite">{says}</p>'
        return f'{above}{self._drawing()}<p class="av-legend">{keys}</p>'

    def _drawing(self) -> str:
        """Draw the setting at the start."""
        moments = self.runs[_START][0]
        heads = ""
        for phase, length in _lengths(moments).items():
            heads += f'<span style="flex-grow:{length}">{escape(phase)}</span>'
        rows = f'<div class="av-heads">{heads}</div>'
        for title, lanes in self.lanes(_START).items():
            rows += f'<p class="av-title">{escape(title)}</p>'
            for lane in lanes:
                shapes = ""
                for look, path in lane.shapes:
                    shapes += f'<path class="av-{look}" d="{path}"/>'
                box = f"0 0 {len(moments)} {lane.height}"
                rows += f'<p>{escape(lane.name)}</p><svg viewBox="{box}" preserveAspectRatio="none">{shapes}</svg>'
        rows += f'<b style="--av-top:{self._of_ddp():.4g}">DDP: {size(self.ddp)}</b><i class="av-now"></i>'
        return f'<div class="av-map" role="img" aria-label="{escape(self.sentence(_START))}">{rows}</div>'

    @property
    def words(self) -> list[str]:
        """What a window of each setting sends and holds, in sentences."""
        shown = []
        for reshard, sync in sorted(self.runs, reverse=True):
            said = self.sentence((reshard, sync))
            often = "each" if sync else "the last"
            shown.append(
                f"reshard_after_forward={reshard}, {often} micro-batch averages: {said}"
            )
        return shown


def _held(moments: Sequence[ShardMoment]) -> np.ndarray:
    """Return the bytes by moment, layer and kind."""
    return np.array([layers for _, layers, _ in moments])


def _lengths(moments: Sequence[ShardMoment]) -> Counter[str]:
    """Return how many moments each phase has, in order."""
    return Counter(phase for phase, _, _ in moments)


def _stripes(held: np.ndarray, rank: int, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield what a rank holds of a layer, from above: weights by owner, its whole gradient, its rows of the average."""
    shard, gathered, whole, averaged = held.T
    for owner in range(ranks):
        yield f"lent av-rank-{owner}", _boxes(owner, gathered / ranks)
    yield f"own av-rank-{rank}", _boxes(rank, shard)
    yield "whole", _boxes(ranks, whole)
    yield "averaged", _boxes(2 * ranks, averaged)


def _boxes(tops: np.ndarray | int, heights: np.ndarray) -> str:
    """Write the path of a box for each stretch of moments in which top and height stay.

    >>> _boxes(1, np.array([0, 2, 2]))
    'M1 1h2v2h-2z'
    """
    path, start = "", 0
    places = zip(np.broadcast_to(tops, heights.shape), heights, strict=True)
    for (top, height), same in groupby(places):
        width = len(list(same))
        if height:
            path += f"M{start} {top:.4g}h{width}v{height:.4g}h-{width}z"
        start += width
    return path


def _said(moments: Sequence[ShardMoment]) -> list[str]:
    """Return of each moment what has changed, and what a rank holds."""
    texts = []
    before = moments[0][1]
    for phase, layers, total in moments:
        changes = "; ".join(_changes(before, layers)) or "nothing has changed"
        texts.append(f"{phase}: {changes}. Rank 0 holds {size(total)}.")
        before = layers
    return texts


def _changes(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
) -> Iterator[str]:
    change = np.subtract(after, before)
    for (kind, grows), text in _CHANGES.items():
        sizes = change[:, kind] if grows else -change[:, kind]
        layers = np.flatnonzero(sizes > 0)
        if len(layers) == len(change) > 1:
            yield text.replace("layer {}", "every layer")
        else:
            yield from (text.format(layer + 1) for layer in layers)
