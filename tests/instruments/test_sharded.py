"""What FSDP shards: what deleted tensors it keeps, and the norm of gradients that no rank has whole."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accumviz as av


def deleted_yet_alive(kind: str, recorded: bool) -> list[bool]:
    """Train once, and look whether what the loop deletes is gone: a large tensor, and the model's output."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if kind == "FSDP2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with av.record(model) if recorded else contextlib.nullcontext():
        large = torch.ones(1 << 10)
        output = model(torch.ones(4, 8))
        kept = [weakref.ref(large), weakref.ref(output)]
        loss = output.square().mean()
        loss.backward()
        dist.all_reduce(loss.detach().clone())
        del large, output, loss
        gc.collect()
        return [reference() is not None for reference in kept]


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2"])
def test_a_recording_keeps_nothing_alive_that_the_loop_deletes(kind: str) -> None:
    assert av.distribute(deleted_yet_alive, kind=kind, recorded=True).returned == ([False, False],) * 2
