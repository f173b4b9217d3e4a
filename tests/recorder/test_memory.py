"""Saved bytes against what `saved_tensors_hooks` sees being packed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accumviz.graph.trace import trace
from accumviz.recorder.memory import nodes_below, saved_storages, saved_tensors


def packed(make: Any, parameters: list[torch.Tensor]) -> int:
    """Count independently: every storage that autograd packs, parameters excluded."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        keep.append(kept)  # an address is only unique while its owner lives
        storages[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return tensor

    keep: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        make()
    for parameter in parameters:
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def saved_bytes(roots: list[Any]) -> int:
    return sum(saved_storages(nodes_below(roots)).values())


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), (3, 4)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, 1, 8, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (3, 2, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_equal_the_storages_autograd_packs(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)

    def loss() -> torch.Tensor:
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).sum()

    expected = packed(loss, list(model.parameters()))
    kept = loss()
    assert saved_bytes([kept.grad_fn]) == expected > 0
    assert trace(kept).saved_bytes == expected


def test_a_storage_shared_by_several_operations_counts_once() -> None:
    y = torch.ones(1000, requires_grad=True) * 1.0
    roots = [y.exp().sum().grad_fn, y.sin().sum().grad_fn, (y[:10] * y[10:20]).sum().grad_fn]
    total = saved_bytes(roots)
    # y, exp's result, and the scalar's 4 or 8 bytes
    assert 8000 <= total <= 8016


def test_frozen_weights_are_no_memory_of_the_graph() -> None:
    layer = nn.Linear(100, 100).requires_grad_(False)
    assert saved_bytes([layer(torch.ones(2, 100, requires_grad=True)).sum().grad_fn]) == 0


def test_a_freed_graph_keeps_nothing() -> None:
    y = torch.ones(5, requires_grad=True).exp()
    loss = (torch.cat([y, y]) * torch.stack([y, y]).view(-1)).sum()
    assert saved_bytes([loss.grad_fn])
    loss.backward()
    assert saved_bytes([loss.grad_fn]) == 0
    assert all(tensor is None for _, tensor in saved_tensors(y.grad_fn))


def test_looking_never_calls_an_unpack_hook() -> None:
    runs: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.exp().sin()

    x = torch.ones(10, requires_grad=True)
    kept = checkpoint(block, x, use_reentrant=False)
    assert saved_bytes([kept.grad_fn]) == 0
    assert saved_tensors(kept.grad_fn) == [("self", None)]

    def unpack(_: Any) -> torch.Tensor:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = x.sin().exp()
    # what sin saved is the leaf itself, though packed without its flag; the result of exp is left
    assert saved_bytes([y.grad_fn]) == 40
    assert len(runs) == 1
