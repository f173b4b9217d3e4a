"""Bytes: of the tensors that graphs save, alive around a backward, and given out by a device's allocator.

Saved tensors are read without unpacking: looking must never recompute a checkpoint.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

# `dir()` of a node takes longer than reading all it saved, and the answer is the same for its class.
_slots: dict[type, tuple[str, ...]] = {}
_CUSTOM = ("_raw_saved_tensors",)
_CHECKPOINT = "torch.utils.checkpoint"
# Older versions of PyTorch show what was saved only by unpacking it, which may run someone's hook.
READABLE = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
_TENSOR = torch.Tensor
_ACCUMULATE = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def slots(node: Any) -> tuple[str, ...]:
    """Name the attributes in which this kind of node keeps tensors (`_raw_saved_self`, ...)."""
    kind = type(node)
    names = _slots.get(kind)
    if names is None:
        if issubclass(kind, BackwardCFunction):
            # a class per user function, or per compilation: caching it would keep it alive for ever
            return _CUSTOM
        names = _slots[kind] = tuple(
            name for name in dir(kind) if name.startswith("_raw_saved_")
        )
    return names


def raw_saved(node: Any) -> list[tuple[str, Any]]:
    """List what a node saved as (attribute, SavedTensor), without unpacking; None stands for a freed list."""
    found: list[tuple[str, Any]] = []
    for slot in slots(node):
        attr = slot.removeprefix("_raw_saved_")
        try:
            raw = getattr(node, slot)
        except (
            RuntimeError
        ):  # a freed list of tensors raises where a freed tensor is only empty
            found.append((attr, None))
            continue
        if isinstance(raw, (tuple, list)):
            found += [(f"{attr}[{i}]", one) for i, one in enumerate(raw)]
        else:
            found.append((attr, raw))
    return found


def held(raw: Any) -> torch.Tensor | None:
    """Return the tensor a SavedTensor really holds, None when it was freed or packed into something else."""
    data = raw.data if READABLE and raw is not None else None
    if type(data) is _TENSOR or isinstance(data, torch.Tensor):
        return data
    if isinstance(data, tuple):  # save_on_cpu packs (device, copy)
        return next((part for part in data if isinstance(part, torch.Tensor)), None)
    return None


def inputs_of_checkpoint(raw: Any) -> list[torch.Tensor]:
    """List the inputs that a non-reentrant checkpoint keeps to run its part again.

    The graph holds placeholders only; the hook that would unpack them holds the inputs, since
    PyTorch 2.12 in a list, before in a node of their own.
    """
    hook = raw.unpack_hook
    if getattr(hook, "__module__", "") != _CHECKPOINT:
        return []
    found: list[torch.Tensor] = []
    for cell in hook.__closure__ or ():
        try:
            frame = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if type(frame).__module__ != _CHECKPOINT:
            continue
        kept = getattr(frame, "saved_args", None)
        if kept is None:
            saver = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
            kept = [] if saver is None else [one for _, one in raw_saved(saver)]
        found += [
            tensor
            for one in kept
            if isinstance(one, type(raw)) and (tensor := held(one)) is not None
        ]
    return found


def saved_tensors(node: Any) -> list[tuple[str, torch.Tensor | None]]:
    """List the tensors a node keeps for its backward, as (attribute, tensor).

    None stands for a tensor that was freed, that the operation did not need, or that a hook
    packed into something that is not a tensor (a non-reentrant checkpoint's placeholder).

    >>> x = torch.ones(2, requires_grad=True)
    >>> saved_tensors((x ** 2).grad_fn)[0][1] is x
    True
    """
    return [(attr, held(raw)) for attr, raw in raw_saved(node)]


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a key that equal storages share, and the storage's bytes."""
    try:
        return torch._C._storage_address(tensor), tensor.untyped_storage().nbytes()  # type: ignore[attr-defined]
    except (
        NotImplementedError,
        RuntimeError,
    ):  # sparse and opaque layouts have no storage of their own
        pass
    try:
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        else:
            parts = [
                tensor.values(),
                *(getattr(tensor, name)() for name in _INDICES[tensor.layout]),
            ]
    except (RuntimeError, KeyError):
        return id(tensor), 0
    return storage(parts[-1])[0], sum(storage(part)[1] for part in parts)


_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_INDICES = {
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def is_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a parameter or a view of one: it is there with or without the graph."""
    base = tensor._base if tensor._is_view() else tensor
    return type(base) is torch.nn.Parameter or (
        base is not None and base.is_leaf and base.requires_grad
    )


class _Dismantling:
    """Nodes of a deep graph, let go one by one from the top when the last root goes."""

    def __init__(self, below: list[Any]) -> None:
        self.below = below

    def __del__(self) -> None:
        self.below.reverse()
        while self.below:
            self.below.pop()


DEEP = 10_000  # nodes; the crash below was seen from about 50,000 in a row


def keep_deletable(order: list[Any], roots: list[Any]) -> None:
    """See to it that a deep graph which was walked can still be freed.

    A node that Python has seen keeps its wrapper, and PyTorch frees a chain of such nodes by
    recursion in C: past some 50,000 of them, `del loss` ends the process. So the roots carry a
    list of what is below them, which lets go in an order without recursion.
    """
    if len(order) <= DEEP:
        return
    targets = {following for node in order for following, _ in node.next_functions}
    tops = [
        root for root in roots if root not in targets
    ]  # a lower root would hold itself alive
    held_by_caller = set(roots)
    dismantling = _Dismantling([node for node in order if node not in held_by_caller])
    for top in tops:
        top.metadata["accumviz: nodes below"] = dismantling


def saved_bytes(roots: Iterable[Any], limit: int | None = None) -> int | None:
    """Sum the bytes of the distinct storages that the graph below these grad_fns keeps alive.

    Parameters (leaves that require grad, and frozen `nn.Parameter`s) are excluded. Returns None
    when the graph has more than `limit` nodes, or on a PyTorch that cannot tell. Costs about a
    microsecond per node.

    >>> x = torch.ones(1000, requires_grad=True)
    >>> saved_bytes([x.exp().sum().grad_fn])
    4000
    """
    storages = saved_storages(roots, limit)
    return None if storages is None else sum(storages.values())


def saved_storages(
    roots: Iterable[Any], limit: int | None = None
) -> dict[int, int] | None:
    """Map each storage that `saved_bytes` counts to its bytes (parameters to 0)."""
    if not READABLE:
        return None
    tops = [root for root in dict.fromkeys(roots) if root is not None]
    order = list(tops)
    seen = set(order)
    storages: dict[int, int] = {}
    own: list[torch.Tensor] = []
    known = _slots
    address = torch._C._storage_address  # type: ignore[attr-defined]
    for node in order:
        if type(node) is _ACCUMULATE:
            own.append(node.variable)
            continue
        names = known.get(type(node))
        if names is None:
            names = slots(node)
        for name in names:
            try:
                raw = getattr(node, name)
            except RuntimeError:
                continue
            for one in raw if type(raw) is tuple else (raw,):
                data = one.data
                if data is None:
                    continue
                tensor = data if isinstance(data, torch.Tensor) else held(one)
                for kept in (
                    (tensor,) if tensor is not None else inputs_of_checkpoint(one)
                ):
                    try:
                        key = address(kept)
                    except (NotImplementedError, RuntimeError):
                        key = storage(kept)[0]
                    if key not in storages:
                        storages[key] = 0 if is_parameter(kept) else storage(kept)[1]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                order.append(following)
        if limit is not None and len(order) > limit:
            keep_deletable(order, tops)
            return None
    for (
        leaf
    ) in own:  # a hook that packs a detached tensor hides that it was a parameter
        key = storage(leaf)[0]
        if key in storages:
            storages[key] = 0
    keep_deletable(order, tops)
    return storages


_UNKNOWN = float("nan")


class _Budget:
    """What measuring may take unless it is wanted each time: a share of the loop's time, after some that is free."""

    SHARE, FREE = 0.002, 0.01  # seconds a second, seconds

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._spent, self._start = 0.0, time.perf_counter()

    def begin(self) -> float | None:
        """When the measurement begins, for `end`; None where there is to be none."""
        now = time.perf_counter()
        if not self._wanted and (
            self._wanted is False
            or self._spent > self.FREE + self.SHARE * (now - self._start)
        ):
            return None
        return now

    def end(self, began: float) -> None:
        self._spent += time.perf_counter() - began


class _Mark:
    """Lives as long as a graph node that carries it."""


def _with_what_is_scaled(root: Any) -> Iterator[Any]:
    """A root, and what is below it as long as that is one and a number was all that was saved: a loss over K.

    Whoever keeps that loss keeps the graph, though its quotient is gone.
    """
    node = root
    while node is not None:
        yield node
        below = [
            following for following, _ in node.next_functions if following is not None
        ]
        numbers = all(
            tensor is None or tensor.numel() == 1 for _, tensor in saved_tensors(node)
        )
        node = (
            below[0]
            if len(below) == 1 and numbers and type(below[0]) is not _ACCUMULATE
            else None
        )


class Held:
    """Bytes of saved tensors, counted once per storage, over all graphs that a recording has met.

    A graph is met at its backward: what was built and never had one is not counted.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._budget = _Budget(wanted)
        self._retained: list[tuple[weakref.ref[_Mark], dict[int, int]]] = []

    def before(self, nodes: Sequence[Any]) -> dict[int, int] | None:
        """The storages of this backward's graph, or None where they are not measured."""
        began = self._budget.begin()
        if began is None:
            return None
        storages = saved_storages(nodes)
        self._retained = [
            (mark, held) for mark, held in self._retained if mark() is not None
        ]
        self._budget.end(began)
        return storages

    def total(self, storages: dict[int, int] | None) -> float:
        """Bytes alive: these storages and those of the graphs that earlier backwards retained."""
        if storages is None:
            return _UNKNOWN
        if not self._retained:
            return float(sum(storages.values()))
        union: dict[int, int] = {}
        for _, held in self._retained:
            union |= held
        return float(sum((union | storages).values()))

    def after(
        self,
        nodes: Sequence[Any],
        storages: dict[int, int] | None,
        *,
        keeps: bool,
        failed: bool,
    ) -> float:
        """Bytes alive once the backward is over; unknown when it failed half-way."""
        if storages is None or failed:
            return _UNKNOWN
        if keeps and nodes:
            mark = _Mark()
            for node in _with_what_is_scaled(nodes[0]):
                node.metadata["accumviz"] = mark
            self._retained.append((weakref.ref(mark), storages))
        else:
            for _, held in self._retained:
                for key in storages:
                    held.pop(key, None)
        return self.total({})


class Allocated:
    """Bytes allocated on a recording's devices, after an event and at most since the one before.

    `torch.cuda.memory_stats` copies counters that the allocator keeps on the host: nothing waits
    for a device. Only the user resets its peak, so a peak is known where it moved.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted, self.devices = wanted, list[int]()
        self._peaks: dict[int, int] = {}
        self._budget = _Budget(wanted)

    def open(self, devices: Iterable[torch.device]) -> None:
        """Begin with what the allocator says now."""
        if self._wanted is not False:
            self.devices = sorted(
                device.index or 0 for device in devices if device.type == "cuda"
            )
        self._peaks = {device: _counters(device)[1] for device in self.devices}

    def after(self) -> tuple[float, float]:
        """Bytes allocated now, and the new maximum if there was one since the last call; NaN where not known."""
        if not self.devices:
            return _UNKNOWN, _UNKNOWN
        began = self._budget.begin()
        if began is None:
            return _UNKNOWN, _UNKNOWN
        allocated, peak = 0, _UNKNOWN
        for device in self.devices:
            current, most = _counters(device)
            allocated += current
            if most != self._peaks[device] and len(self.devices) == 1:
                peak = float(most)
            self._peaks[device] = most
        self._budget.end(began)
        return float(allocated), peak


def _counters(device: int) -> tuple[int, int]:
    """Bytes allocated, and the most since the process began or the user reset the peak."""
    found = (
        torch.cuda.memory_stats_as_nested_dict(device)
        .get("allocated_bytes", {})
        .get("all", {})
    )
    return found.get("current", 0), found.get("peak", 0)
