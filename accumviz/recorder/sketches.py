"""What a comparison needs, on request: a sketch of every large gradient, and what a forward depended on.

A sketch is a few sums of all elements of a tensor, each element in one of them, with a sign of its own. It is linear,
and the squares of its sums add up to that of the tensor's norm, on average over all signs: so the sketches of two
tensors tell how far these are apart, whichever elements differ. A sample of elements does not, of gradients in which
few are large. Signs depend on sizes alone: two recordings have the same. Nothing waits for a device, no node runs.
Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (the count sketch).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from accumviz.recorder.fsdp import local
from accumviz.recorder.memory import held
from accumviz.recorder.rows import Row
from accumviz.recorder.targets import Named
from accumviz.recorder.transfer import Quietly, Wire, readable

# Up to so many elements, each has a sign and a sum of its own; larger tensors are so many, stacked, with a sign each.
_BLOCK = 1 << 16
# A forward of more operations than this is not walked to its end, and of more targets than this not summed up.
_NODES, _TARGETS = 1 << 14, 1 << 22
_STRIDED = torch.strided
_HALF = (torch.float16, torch.bfloat16)
_U64 = np.uint64


def _random(name: str, count: int) -> np.ndarray:
    """So many numbers of 64 bits; made here, because a library's generator may make others in its next version."""
    x = np.arange(count, dtype=_U64) + _U64(zlib.crc32(name.encode()) << 24)
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9),
        (27, 0x94D049BB133111EB),
        (31, 1),
    ):  # splitmix64
        x = (x ^ (x >> _U64(shift))) * _U64(factor)
    return x


def _signs(name: str, count: int) -> torch.Tensor:
    return torch.from_numpy(
        (_random(name, count) >> _U64(63)).astype(np.float32) * 2 - 1
    )


class Sums:
    """Makes sketches of `count` sums.

    >>> Sums(4)(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [1.0, 2.0, 3.0]
    >>> Sums(4)(torch.ones(1000)).shape, bool((Sums(4)(2 * torch.ones(1000)) == 2 * Sums(4)(torch.ones(1000))).all())
    (torch.Size([4]), True)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._made: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stacked: dict[Any, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sketch of a tensor; one that has no more elements than sums as it is."""
        flat = tensor.reshape(-1)
        size = flat.numel()
        if size <= self.count:
            return flat
        if flat.dtype in _HALF:
            flat = flat.float()
        deep = -(-min(size, _BLOCK) // self.count)
        signs, order = self._block(deep, flat)
        wide = deep * self.count
        many, rest = divmod(size, wide)
        stacked = self._rows(many + 1, flat)
        # One pass over the memory of a large tensor, and none of its size beside it.
        block = torch.mv(flat[: many * wide].view(many, wide).t(), stacked[:many])
        if rest:
            block[:rest] += flat[many * wide :] * stacked[many]
        return (block * signs)[order].view(deep, self.count).sum(0)

    def _block(
        self, deep: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = deep, like.device, like.dtype
        if key not in self._made:
            wide = deep * self.count
            order = torch.from_numpy(np.argsort(_random("order", wide), kind="stable"))
            self._made[key] = _signs("signs", wide).to(like), order.to(like.device)
        return self._made[key]

    def _rows(self, many: int, like: torch.Tensor) -> torch.Tensor:
        key = like.device, like.dtype
        if key not in self._stacked or len(self._stacked[key]) < many:
            self._stacked[key] = _signs("rows", max(many, 64)).to(like)
        return self._stacked[key]


class Sketches:
    """Takes a sketch of each large leaf's `.grad`, and looks at forwards.

    `sizes` are the leaves' numbers of elements, `small` those whose elements are kept anyway.
    """

    def __init__(
        self, named: Named, sizes: list[int], small: Iterable[int], count: int
    ) -> None:
        self._named, self._sizes, self._sums = named, sizes, Sums(count)
        self._begun = False
        without = set(small) | set(named.shards.wholes)
        self._large = {
            i
            for i, t in enumerate(named.tensors)
            if i not in without and t.is_floating_point()
        }

    def take(self, row: Row, leaves: Iterable[int], wire: Wire) -> None:
        """Give a row the sketches of these leaves' `.grad` as they are now."""
        with Quietly():
            for i in leaves:
                grad = self._named.tensors[i].grad if i in self._large else None
                if grad is not None and (found := self._of(i, local(grad))) is not None:
                    row.take(("sketch", i), found)
            if row.late:
                row.send(wire)

    def _of(self, i: int, tensor: torch.Tensor) -> torch.Tensor | None:
        if (
            not readable(tensor)
            or tensor.layout is not _STRIDED
            or tensor.numel() != self._sizes[i]
        ):
            return None
        if torch.is_autocast_enabled(
            tensor.device.type
        ):  # it would round what is summed up
            with torch.autocast(tensor.device.type, enabled=False):
                return self._sums(tensor.detach())
        return self._sums(tensor.detach())

    def forget(self) -> None:
        """Let go of what is on a device."""
        self._large.clear()
        self._sums = Sums(self._sums.count)

    # --- what the forward depended on ----------------------------------------------------------

    def describe(self, row: Row, nodes: Iterable[Any], wire: Wire) -> None:
        """Write into a backward's row what its forward depended on, and where the weights were at the beginning."""
        with Quietly():
            self._describe(row, nodes)
            if row.late:
                row.send(wire)

    def _describe(self, row: Row, nodes: Iterable[Any]) -> None:
        layers = sorted(set(self._layers()))
        if layers:
            row.details["layers"] = layers
        dtypes: set[str] = set()
        targets: list[torch.Tensor] = []
        for node in _walk(nodes):
            dtypes.update(
                str(about.dtype).removeprefix("torch.")
                for about in node._input_metadata
            )
            targets += _targets(node)
        if len({found.device for found in targets}) == 1:
            row.take(
                ("detail", "targets"), torch.stack([_sum(found) for found in targets])
            )
            row.take(
                ("detail", "targets_squared"),
                torch.stack([_sum(found.square()) for found in targets]),
            )
        row.details["dtypes"] = sorted(dtype for dtype in dtypes if "float" in dtype)
        if not self._begun:
            self._begun = True
            self._weights(row)

    def _layers(self) -> Iterator[str]:
        """The kinds of layers that do something else in training mode, and are in it."""
        for root in self._named.modules.values():
            for module in root.modules():
                if isinstance(module, _BatchNorm):
                    if module.training or not module.track_running_stats:
                        yield "BatchNorm"
                elif module.training and _drops(module):
                    yield "dropout"

    def _weights(self, row: Row) -> None:
        """The sum of the squares of the weights' sketches: what tells one beginning from another."""
        parts = []
        for i, tensor in enumerate(self._named.tensors):
            weights = local(tensor) if i not in self._named.shards.wholes else None
            if (
                weights is None
                or not readable(weights)
                or weights.layout is not _STRIDED
            ):
                continue
            if i not in self._large:
                parts.append(weights.detach().flatten())
            elif (found := self._of(i, weights)) is not None:
                parts.append(found)
        if parts and len({part.device for part in parts}) == 1:
            row.take(
                ("detail", "weights"),
                torch.stack([part.abs().float().square().sum() for part in parts]),
            )


def _drops(module: torch.nn.Module) -> bool:
    return bool(
        module.p
        if isinstance(module, _DropoutNd)
        else isinstance(d := vars(module).get("dropout"), float) and d
    )


def _targets(node: Any) -> list[torch.Tensor]:
    """What a loss was compared with: the sum of it tells one batch from another."""
    raw = getattr(node, "_raw_saved_target", None)
    found = None if raw is None else held(raw)
    if (
        found is None
        or not readable(found)
        or found.numel() > _TARGETS
        or found.is_complex()
    ):
        return []
    found = found.detach()
    ignored = getattr(node, "_saved_ignore_index", None)
    return [found if ignored is None else found.masked_fill(found == ignored, 0)]


def _sum(found: torch.Tensor) -> torch.Tensor:
    return found.sum(
        dtype=torch.float64 if found.device.type in ("cpu", "cuda") else torch.float32
    )


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    work, seen = list(nodes), set(nodes)
    while work and len(seen) < _NODES:
        node = work.pop()
        yield node
        fresh = [
            fn for fn, _ in node.next_functions if fn is not None and fn not in seen
        ]
        seen.update(fresh)
        work += fresh
