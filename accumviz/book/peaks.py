"""Show the bytes that are alive during one training step, for several K, with checkpoints and without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
            plain, recomputed = self.peak(k, False), self.peak(k, True)
            sentences.append(
                f"K = {k}: at most {size(plain)} are alive, with checkpoints {size(recomputed)}."
            )
        return sentences
