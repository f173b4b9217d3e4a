"""Count how many batches each BatchNorm layer puts into its running statistics."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from accumviz.recorder import patches


class BatchNorms:
    """The BatchNorm layers of what is recorded; none is held. `counted`: by name, once it is closed."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._layers: dict[str, tuple[weakref.ref[Any], _Count]] = {}
        self._modules = {
            name if len(modules) > 1 else "": module for name, module in modules.items()
        }
        self.counted: dict[str, int] = {}

    def open(self) -> None:
        """Remember what each has counted so far."""
        for prefix, module in self._modules.items():
            for name, layer in module.named_modules(prefix=prefix):
                count = _count(layer)
                if count is not None:
                    self._layers[name] = weakref.ref(layer), count
        self._modules.clear()

    def close(self) -> None:
        """Ask how many more there are."""
        for name, (layer, before) in self._layers.items():
            now = _count(layer())
            if now is None or now.batches <= before.batches:
                continue
            more = now.batches - before.batches
            # A forward counts one: who writes a larger number there, as an average of weights does, has taken it over.
            self.counted[name] = (
                min(more, now.version - before.version)
                if now.buffer == before.buffer
                else more
            )
        self._layers.clear()


class _Count(NamedTuple):
    """How many batches are in a layer's running statistics; the buffer that says so, and how often it was written."""

    batches: int
    buffer: int
    version: int


def _count(layer: Any) -> _Count | None:
    """What a layer has counted; None where it keeps no statistics, or cannot be asked."""
    if not isinstance(layer, _BatchNorm):
        return None
    tracked = layer._buffers.get("num_batches_tracked")
    with contextlib.suppress(Exception):
        if tracked is not None and not patches.capturing():
            return _Count(int(tracked.item()), id(tracked), tracked._version)
    return None
