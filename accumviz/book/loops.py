"""The loop whose lines can be moved, as a lab needs it: one weight, and gradients that are accumulated over windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from accumviz.book.explore import positions

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


def complete(start: Mapping[str, Any] | None) -> dict[str, str]:
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


def rows(choice: Choice) -> Iterator[LoopLine]:
    """Yield the loop from top to bottom, lines and places."""
    step, tail = choice["step"], choice["tail"]
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
    step, divide = choice["step"], choice["divide"]
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


def begin() -> tuple[Any, dict[str, Any]]:
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


def loss(w: float) -> float:
    """Return the mean loss over all samples, which every arrangement is to bring down."""
    misses = [w * x - 2 * x for x in INPUTS]
    return sum(miss * miss for miss in misses) / len(misses)
