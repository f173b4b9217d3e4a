"""What recording costs under DDP: two ranks that take the same turns in lockstep, each timing its own process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

import accumviz as av
from benchmarks._turns import Row, in_turns, quartile, row, spent
from benchmarks.record import transformer


def run(quick: bool = False) -> list[Row]:
    """Measure; the number is that of the slower rank."""
    world = av.distribute(_rank, ranks=2, timeout=300, rounds=2 if quick else 16, length=3 if quick else 12)
    times = list(world.returned)
    name = "transformer, 2.6 M weights, DDP, 2 ranks"
    bare = max(quartile(each["bare"]) for each in times)
    ratio = max(quartile(each["recording"]) / quartile(each["bare"]) for each in times)
    return [row(f"{name}: bare step", 1e3 * bare, "ms"), row(f"{name}: recording", ratio, "×", 1.04)]


def _rank(rounds: int, length: int) -> dict[str, list[float]]:
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    model, optimizer, step = transformer(128, 576, (8, 32), DistributedDataParallel)
    spent(step, 4)
    barrier: Callable[[], object] = dist.barrier
    turns = {"bare": nullcontext, "recording": lambda: av.record(model, optimizer)}
    return in_turns(step, turns, rounds=rounds, length=length, settling=max(2, length // 3), before=barrier)
