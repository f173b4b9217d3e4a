"""What the scripts of two ranks import."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD


def net(out: int = 3) -> nn.Module:
    """The same weights on every rank, and each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, out))
    torch.manual_seed(1 + dist.get_rank())
    return model


def batches(many: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's own."""
    return [(torch.randn(2, 4), torch.randint(0, 3, (2,))) for _ in range(many)]


def texts() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Windows of two texts, of other lengths on every rank."""
    lengths = [(3, 1), (2, 4)] if dist.get_rank() == 0 else [(5, 9), (8, 3)]
    return [[(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in window] for window in lengths]


groups: list[Any] = []


def replicated(model: nn.Module, **options: Any) -> Any:
    """In a group of its own, which ends with the loop: then nobody waits for a rank that has gone."""
    groups.append(dist.new_group())
    return DDP(model, process_group=groups[-1], **options)


def sharded(model: nn.Module) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


@contextmanager
def trained(record: Any, model: Any) -> Iterator[tuple[Any, SGD]]:
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        yield model, optimizer


def accelerator(*handlers: Any) -> Any:
    """An Accelerator that knows of none before it: what they share is the process's."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, kwargs_handlers=list(handlers))


def end_groups() -> None:
    """End the groups of a loop that is over, and what still holds them: it would keep another rank waiting."""
    while groups:
        dist.destroy_process_group(groups.pop())
    gc.collect()
