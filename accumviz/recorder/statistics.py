"""Layers that count their forwards: how many batches each BatchNorm put into its running statistics meanwhile."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from accumviz.recorder import sessions


class BatchNorms:
    """The BatchNorm layers of what is recorded; none is held. `counted`: by name, once it is closed."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._layers: dict[str, tuple[weakref.ref[Any], int]] = {}
        self._modules = list(modules)
        self.counted: dict[str, int] = {}

    def open(self) -> None:
        """Remember what each has counted so far."""
        for module in self._modules:
            for name, layer in module.named_modules():
                count = _count(layer)
                if count is not None:
                    self._layers[name] = weakref.ref(layer), count
        self._modules.clear()

    def close(self) -> None:
        """Ask how many more there are."""
        for name, (layer, before) in self._layers.items():
            now = _count(layer())
            if now is not None and now > before:
                self.counted[name] = now - before
        self._layers.clear()


def _count(layer: Any) -> int | None:
    """How many batches are in a layer's running statistics; None where it keeps none, or cannot be asked."""
    if not isinstance(layer, _BatchNorm):
        return None
    tracked = layer._buffers.get("num_batches_tracked")
    with contextlib.suppress(Exception):
        return None if tracked is None or sessions.capturing() else int(tracked.item())
    return None
