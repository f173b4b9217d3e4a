"""Random loops, judged by `check` and by what every sample really weighed in every step.

Sample i is element i of the parameter, so that its part of a step's `.grad` is one number. That number, divided by the
sample's own gradient, is its weight: nothing of accumviz is used to know it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import accumviz as av
from accumviz.checks.report import Report

# Weights that differ by less are equal: clips and float32 round.
CLOSE = 5e-3
# Where samples weigh alike in each step, it may still be said that there are too many, or of the constant.
ABOUT_A_CONSTANT = {"loss-not-divided", "double-division", "wrong-divisor", "leftover-carried"}


@dataclass
class Loop:
    """A training loop with at most a few mistakes: how it weighs, zeroes, clips, and ends."""

    seed: int
    micro_batches: int
    windows: int
    sizes: str
    reduction: str
    factor: str
    zero: str
    clip: str
    tail: int
    tail_is: str
    by_hand: str
    beside: str


@dataclass
class Step:
    """What one step was given, and what each sample weighed in it, before a clip of the whole window."""

    weights: torch.Tensor
    samples: set[int]


def random_loop(seed: int) -> Loop:
    """Draw a loop in which each part is right more often than not."""
    draw = random.Random(seed)

    def mostly(right: str, *wrong: str) -> str:
        return right if draw.random() < 0.75 else draw.choice(wrong)

    return Loop(
        seed,
        draw.choice([2, 3, 4]),
        draw.choice([3, 4, 5]),
        mostly("equal", "varied"),
        draw.choice(["mean", "sum"]),
        mostly("right", "none", "place", "one more", "half", "random"),
        mostly("after step", "never", "inside", "before step"),
        mostly("none", "before step", "each"),
        draw.choice([0, 1]),
        draw.choice(["divided by its own", "divided as a whole one", "carried"]),
        mostly("none", "once", "each"),
        draw.choice(["nothing", "objective", "optimizer"]),
    )


def batches_of(loop: Loop) -> list[list[torch.Tensor]]:
    """Return the samples of each micro-batch of each window; a short window comes last, or last but one."""
    draw = random.Random(loop.seed)
    lengths = [loop.micro_batches] * loop.windows
    if loop.tail:
        lengths.insert(loop.windows - (loop.tail_is == "carried"), loop.tail)
    first, windows = 0, []
    for length in lengths:
        window = []
        for _ in range(length):
            size = 3 if loop.sizes == "equal" else draw.randint(1, 6)
            window.append(torch.arange(first, first + size))
            first += size
        windows.append(window)
    return windows


def factor_of(loop: Loop, place: int, window: list[torch.Tensor], draw: random.Random) -> float:
    """Return what the loss of a window's micro-batch is multiplied by."""
    many = len(window)
    if loop.tail_is == "divided as a whole one":
        many = loop.micro_batches
    right = 1 / many if loop.reduction == "mean" else 1 / sum(map(len, window))
    return {
        "right": right,
        "none": 1.0,
        "place": 1 / (place + 1),
        "one more": 1 / (loop.micro_batches + 1),
        "half": right / 2,
        "random": 1 / draw.choice([2, 3, 4]),
    }[loop.factor]


def run(loop: Loop) -> tuple[Report, list[Step]]:
    """Train while it is recorded; return what `check` says, and what really happened."""
    draw = random.Random(loop.seed)
    torch.manual_seed(loop.seed)
    windows = batches_of(loop)
    count = sum(len(samples) for window in windows for samples in window)
    targets = torch.rand(2, count) + 1
    w, v = nn.Parameter(torch.zeros(count)), nn.Parameter(torch.zeros(count))
    owned = {"nothing": [[w]], "objective": [[w, v]], "optimizer": [[w], [v]]}[loop.beside]
    optimizers = [torch.optim.SGD(parameters, 1e-4) for parameters in owned]
    steps = []

    def zero() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    with av.record({"w": w, "v": v}, optimizers) as recording:
        for window in windows:
            once = 1.0
            for place, samples in enumerate(window):
                loss = nn.functional.mse_loss(w[samples], targets[0, samples], reduction=loop.reduction)
                factor = factor_of(loop, place, window, draw)
                if loop.by_hand == "once" and loop.factor == "right":
                    once, factor = factor, 1.0
                loss = loss if factor == 1 else loss * factor
                if loop.beside != "nothing":
                    beside = nn.functional.mse_loss(v[samples], targets[1, samples])
                    loss = loss + beside * len(samples) / sum(map(len, window))
                loss.backward()
                if loop.by_hand == "each":
                    w.grad.mul_(0.5)
                if loop.clip == "each":
                    nn.utils.clip_grad_norm_([w], 0.05)
                if loop.zero == "inside" and place == len(window) - 2:
                    zero()
            if len(window) < loop.micro_batches and loop.tail_is == "carried":
                continue
            if once != 1:
                w.grad.mul_(once)
            if loop.zero == "before step":
                zero()
            grad = torch.zeros(count) if w.grad is None else w.grad
            weights = grad.detach() / (2 * (w.detach() - targets[0]))
            steps.append(Step(weights, set(torch.cat(window).tolist())))
            if loop.clip == "before step":
                nn.utils.clip_grad_norm_([w], 0.05)
            for optimizer in optimizers:
                optimizer.step()
            if loop.zero == "after step":
                zero()
    return av.check(recording), steps


def is_right(loop: Loop, steps: list[Step]) -> bool:
    """Return whether each step is that of one large batch, up to one constant."""
    used: set[int] = set()
    sums, elements = [], []
    for step in steps:
        read = set(torch.nonzero(step.weights.abs() > 1e-9).flatten().tolist())
        weights = [float(step.weights[sample]) for sample in sorted(read)]
        # A step on sums may hold what an earlier window left over: nothing says how many belong to it.
        whole = step.samples <= read if loop.reduction == "sum" else step.samples == read
        if not whole or read & used or not alike(weights):
            return False
        used |= read
        sums.append(sum(weights))
        elements.append(weights[0])
    return alike(sums) or (loop.reduction == "sum" and alike(elements))


def alike(numbers: list[float]) -> bool:
    return max(numbers) - min(numbers) <= CLOSE * max(numbers)


# Each of these was once called healthy while its samples weighed differently, or accused while they weighed alike.
ONCE_WRONG = (151, 282, 355, 745, 779, 856, 1752, 1859, 2126, 2259)


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in range(0, 240, 40)] + [ONCE_WRONG])
def test_healthy_loops_are_those_whose_steps_are_the_large_batchs(seeds: Sequence[int]) -> None:
    for seed in seeds:
        loop = random_loop(seed)
        report, steps = run(loop)
        rules = {finding.rule for finding in report.findings if finding.severity != "note"}
        if is_right(loop, steps):
            assert rules <= ABOUT_A_CONSTANT, f"{loop}\n{report}"
        elif not report.unjudged and not report.condition:
            assert not report.healthy, f"{loop}\n{report}"
