"""The training loop of a lab: one weight, and micro-batches that are accumulated over a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from accumviz.book.loops import (
    LEARNING_RATE,
    NOWHERE,
    Axis,
    K,
    Loop,
    LoopLine,
    Other,
    movable,
)

# Fourteen samples, in micro-batches of two, or of one to three: two windows of three, and one left over.
SIZES = {"equal": (2,) * 7, "unequal": (3, 1, 2, 2, 1, 2, 3)}
INPUTS = (1.0, 3.0, 2.0, 2.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 1.0, 3.0, 1.0)


def _sizes(value: Any) -> tuple[int, ...]:
    whole = sum(SIZES["equal"])
    fits = isinstance(value, Iterable)
    sizes = tuple(value) if fits else ()
    if not sizes or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes
    ):
        raise TypeError(
            f"sizes={value!r:.80}; expected 'equal', 'unequal', or numbers of samples, as in [4, 4, 6]"
        )
    if sum(sizes) != whole:
        raise ValueError(
            f"sizes={value!r:.80} are {sum(sizes)} samples; there are {whole}: let them add up to {whole}"
        )
    return sizes


def _typed_sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace(",", " ").split())


_AXES = (
    Axis(
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
    ),
    Axis(
        "step",
        "step",
        {
            "micro-batch": "in every micro-batch",
            "window": "after K micro-batches",
            "epoch": "after the loop",
        },
        "optimizer.step()",
    ),
    Axis(
        "clip",
        "clip",
        {
            "backward": "after every backward",
            "step": "above the step",
            NOWHERE: "nowhere",
        },
        "nn.utils.clip_grad_norm_(w, 4)",
    ),
    Axis(
        "divide",
        "each loss is divided by",
        {
            "window": "the window’s length",
            "K": "K",
            "nothing": "nothing",
            "samples": "the window’s samples",
        },
    ),
    Axis("k", "K", {3: "3", 2: "2", 1: "1"}, other=K),
    Axis(
        "sizes",
        "micro-batches",
        {"equal": "equal", "unequal": "unequal"},
        other=Other(_sizes, _typed_sizes, "numbers of samples, as in 7, 7", "4, 4, 6"),
    ),
    Axis(
        "tail",
        "the last, shorter window",
        {"step": "gets a step", "carry": "is carried on", "drop": "is dropped"},
    ),
    Axis("lr", "learning rate", {0.05: "0.05"}, other=LEARNING_RATE),
)
_RIGHT: dict[str, Any] = {
    "zero_grad": "after",
    "step": "window",
    "clip": NOWHERE,
    "divide": "window",
    "k": 3,
    "sizes": "equal",
    "tail": "step",
    "lr": 0.05,
}
_ZERO, _, _CLIP = _AXES[:3]
_WINDOW = {
    "window": "min(K, len(loader) - i // K * K)",
    "epoch": "len(loader)",
    "micro-batch": "1",
}
_SAMPLES = {
    "window": "sum(sizes[i // K * K :][:K])",
    "epoch": "sum(sizes)",
    "micro-batch": "len(x)",
}


def _rows(choice: Mapping[str, Any]) -> Iterator[LoopLine]:
    """The loop from top to bottom, lines and places."""
    step, divide, tail = choice["step"], choice["divide"], choice["tail"]
    chosen = choice["sizes"]
    sizes = SIZES[chosen] if isinstance(chosen, str) else chosen
    inside = step == "window"
    divisor = {
        "window": _WINDOW if tail == "step" else _WINDOW | {"window": "K"},
        "samples": _SAMPLES,
    }.get(divide)
    counted = inside or (divisor is not None and "i //" in divisor[step])
    if divide == "K" or inside:
        yield LoopLine(0, f"K = {choice['k']}", "k")
    yield LoopLine(0, f"sizes = [{', '.join(map(str, sizes))}]", "sizes")
    yield LoopLine(0, "loader = batches_of(sizes)")
    yield LoopLine(0, "for epoch in range(2):")
    yield _zero(choice, "epoch", 1)
    yield LoopLine(
        1, "for i, (x, y) in enumerate(loader):" if counted else "for x, y in loader:"
    )
    yield _zero(choice, "micro-batch", 2)
    if divisor is not None:
        yield LoopLine(2, f"{divide} = {divisor[step]}", "divide")
    reduced = "sum" if divide == "samples" else "mean"
    by = "" if divide == "nothing" else f" / {divide}"
    yield LoopLine(2, f"loss = (w * x - y).square().{reduced}(){by}", "divide")
    yield LoopLine(2, "loss.backward()")
    yield movable(_CLIP, choice, "backward", 2)
    if step != "micro-batch":
        yield _zero(choice, "backward", 2)
    yield from _step(choice, "micro-batch", 2)
    if inside:
        last = " or i + 1 == len(loader)" if tail == "step" else ""
        yield LoopLine(2, f"if (i + 1) % K == 0{last}:", "tail")
    yield from _step(choice, "window", 3 if inside else 2)
    if inside and tail == "drop":
        yield LoopLine(1, "optimizer.zero_grad()  # drops what is left", "tail")
    yield from _step(choice, "epoch", 1)


def _step(choice: Mapping[str, Any], where: str, depth: int) -> Iterator[LoopLine]:
    """The step and what stands right above and below it; elsewhere, its place."""
    if choice["step"] != where:
        yield LoopLine(depth, "", "step", where)
        return
    # Above a step in every micro-batch is below backward, too: the two are one place.
    above = (
        "backward"
        if where == "micro-batch" and choice["zero_grad"] == "backward"
        else "before"
    )
    yield _zero(choice, above, depth)
    yield movable(_CLIP, choice, "step", depth)
    yield LoopLine(depth, "optimizer.step()", "step", where)
    yield _zero(choice, "after", depth)


def _zero(choice: Mapping[str, Any], where: str, depth: int) -> LoopLine:
    return movable(_ZERO, choice, where, depth)


def _begin(choice: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    import accumviz as av

    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=choice["lr"])
    recording = av.record({"w": w}, optimizer, sources=True, memory=False)
    return recording, {
        "w": w,
        "optimizer": optimizer,
        "nn": torch.nn,
        "batches_of": _batches_of,
    }


def _batches_of(sizes: list[int]) -> Any:
    """Make a loader of so many samples in each micro-batch."""
    import torch

    x = torch.tensor(INPUTS)
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    batches = [list(range(a, b)) for a, b in pairwise(ends)]
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, 2 * x), batch_sampler=batches
    )


def _loss(w: float) -> float:
    """The mean loss over all samples, which every arrangement is to bring down."""
    import torch

    x = torch.tensor(INPUTS)
    return float((w * x - 2 * x).square().mean())


LOOP = Loop(_AXES, _RIGHT, _rows, _begin, _loss)
