"""What the scripts of the corpus import."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

K = 4


def net(out: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, out))


def sgd() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@contextmanager
def trained(record: Any, **how: Any) -> Iterator[tuple[nn.Sequential, torch.optim.Optimizer]]:
    model, optimizer = sgd()
    with record(model, optimizer, **how):
        yield model, optimizer


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 8), torch.randint(0, 5, (n,))) for n in sizes]


def loader(samples: int = 32, size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randint(0, 5, (samples,))), size)
