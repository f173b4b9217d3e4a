"""Count bytes: tensors that graphs save, alive around a backward, and memory of a device.

Saved tensors are read without unpacking: looking must never recompute a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._C._autograd import SavedTensor
from torch.autograd.function import BackwardCFunction

_CHECKPOINT = "torch.utils.checkpoint"
ACCUMULATE_GRAD = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
# Why nothing can be said of what graphs saved: before 2.10 torch shows it unpacked only, and a user's hook unpacks.
UNREAD = ""
if not hasattr(SavedTensor, "data"):
    UNREAD = f"torch {torch.__version__} does not say what a graph saved"
# Of a graph with more nodes nothing is said: PyTorch frees a chain of nodes that Python has seen by recursion in C, and
# past some 50,000 of them `del loss` ends the process.
DEEP = 10_000
# Measuring may take a share of the loop's time, after some seconds that are free.
_SHARE, _FREE = 0.002, 0.01
# `dir()` of a node takes longer than reading all it saved, and is the same for its class.
_slots: dict[type, tuple[str, ...]] = {}


def slots(node: Any) -> tuple[str, ...]:
    """Name the attributes in which this kind of node keeps tensors (`_raw_saved_self`, ...)."""
    kind = type(node)
    if issubclass(kind, BackwardCFunction):
        # A class for each user function: caching it would keep it alive for ever.
        return ("_raw_saved_tensors",)
    if kind not in _slots:
        _slots[kind] = tuple(n for n in dir(kind) if n.startswith("_raw_saved_"))
    return _slots[kind]


def raw_saved(node: Any) -> list[tuple[str, Any]]:
    """List what a node saved as (attribute, SavedTensor), without unpacking; None stands for a freed list."""
    pairs: list[tuple[str, Any]] = []
    for slot in slots(node):
        name = slot.removeprefix("_raw_saved_")
        try:
            raw = getattr(node, slot)
        except RuntimeError:
            # A freed list of tensors raises where a freed tensor is only empty.
            raw = None
        if isinstance(raw, (tuple, list)):
            pairs += [(f"{name}[{i}]", one) for i, one in enumerate(raw)]
        else:
            pairs.append((name, raw))
    return pairs


def held(raw: Any) -> Tensor | None:
    """Return the tensor a SavedTensor really holds, None when it was freed, packed into something else or `UNREAD`."""
    data = getattr(raw, "data", None)
    # `save_on_cpu` packs (device, copy).
    for part in data if isinstance(data, tuple) else (data,):
        if isinstance(part, Tensor):
            return part
    return None


def saved_tensors(node: Any) -> list[tuple[str, Tensor | None]]:
    """List the tensors a node keeps for its backward, as (attribute, tensor).

    None stands for a tensor that was freed, that the operation did not need, or that a hook
    packed into something that is not a tensor (a non-reentrant checkpoint's placeholder).

    >>> x = torch.ones(2, requires_grad=True)
    >>> saved_tensors((x ** 2).grad_fn)[0][1] is x
    True
    """
    return [(attr, held(raw)) for attr, raw in raw_saved(node)]


def inputs_of_checkpoint(raw: Any) -> list[Tensor]:
    """List the inputs that a non-reentrant checkpoint keeps to run its part again.

    The graph holds placeholders only; the hook that would unpack them holds the inputs, since
    PyTorch 2.12 in a list, before in a node of their own.
    """
    tensors: list[Tensor] = []
    for frame in _frames_of_checkpoint(getattr(raw, "unpack_hook", None)):
        kept = [one for one in _kept_inputs(frame) if isinstance(one, type(raw))]
        tensors += [tensor for tensor in map(held, kept) if tensor is not None]
    return tensors


def _frames_of_checkpoint(hook: Any) -> Iterator[Any]:
    """Yield the frame of a checkpoint that a hook of its own closes over."""
    if getattr(hook, "__module__", "") != _CHECKPOINT:
        return
    for cell in hook.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            frame = cell.cell_contents
            if type(frame).__module__ == _CHECKPOINT:
                yield frame


def _kept_inputs(frame: Any) -> Iterable[Any]:
    """Return what a checkpoint's frame has saved of its inputs."""
    kept: Iterable[Any] | None = getattr(frame, "saved_args", None)
    if kept is not None:
        return kept
    saver = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
    return [] if saver is None else [one for _, one in raw_saved(saver)]


def unpacks_plainly(raw: Any) -> bool:
    """Return whether reading what was saved runs only torch's own code: a checkpoint's hook would recompute."""
    return raw is not None and getattr(raw, "unpack_hook", raw) is None


def storage(tensor: Tensor) -> tuple[int, int]:
    """Return a key that equal storages share, and the storage's bytes; (-1, 0) of a layout without one storage."""
    try:
        key = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
        return key, tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return -1, 0


def is_parameter(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter or a view of one: it is there with or without the graph."""
    base = tensor._base if tensor._is_view() else tensor
    if base is None:
        return False
    return type(base) is torch.nn.Parameter or (base.is_leaf and base.requires_grad)


def nodes_below(roots: Iterable[Any]) -> list[Any]:
    """Return the nodes of the graph below these, and them; nothing of a deep one."""
    order = [root for root in dict.fromkeys(roots) if root is not None]
    seen = set(order)
    for node in order:
        if len(order) > DEEP:
            return []
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                order.append(below)
    return order


def saved_storages(nodes: Iterable[Any]) -> dict[int, int]:
    """Map each storage that these nodes of a graph keep alive to its bytes.

    Parameters (leaves that require grad, and frozen `nn.Parameter`s) count as 0. Tensors without
    one storage, such as sparse ones, are left out.

    >>> x = torch.ones(1000, requires_grad=True)
    >>> [*saved_storages(nodes_below([x.exp().sum().grad_fn])).values()]
    [4000]
    """
    storages: dict[int, int] = {}
    leaves: list[Tensor] = []
    for node in nodes:
        if type(node) is ACCUMULATE_GRAD:
            leaves.append(node.variable)
            continue
        for one in _alive(node):
            key, size = storage(one)
            storages.setdefault(key, 0 if is_parameter(one) else size)
    # A hook that packs a detached tensor hides that it was a parameter.
    for leaf in leaves:
        key, _ = storage(leaf)
        if key in storages:
            storages[key] = 0
    return storages


def _alive(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node saves, and those that a checkpoint keeps for it."""
    for _, raw in raw_saved(node):
        tensor = held(raw)
        if tensor is None:
            yield from inputs_of_checkpoint(raw)
        else:
            yield tensor


class _Mark:
    """An object that lives as long as a graph node that carries it."""


def _undivided(root: Any) -> Any:
    """Return the loss of which a root is a multiple, as in a loss over K: who keeps that one keeps the graph."""
    while True:
        below = [fn for fn, _ in root.next_functions if fn is not None]
        saved = [tensor for _, tensor in saved_tensors(root) if tensor is not None]
        if len(below) != 1 or any(tensor.numel() != 1 for tensor in saved):
            return root
        if type(below[0]) is ACCUMULATE_GRAD:
            return root
        root = below[0]


class Held:
    """Bytes of saved tensors, counted once per storage, over all graphs that a recording has met.

    A graph is met at its backward: what was built and never had one is not counted.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = False if UNREAD else wanted
        self._spent = 0.0
        self._start = time.perf_counter()
        self._retained: list[tuple[ref[_Mark], dict[int, int]]] = []

    def begin(self, row: Any) -> None:
        """Note in a backward the bytes that are alive before it: of its graph and of those retained earlier."""
        if self._wanted is False:
            return
        began = time.perf_counter()
        allowed = _FREE + _SHARE * (began - self._start)
        if self._wanted is None and self._spent > allowed:
            return
        nodes = nodes_below(row.nodes)
        if not nodes:
            return
        row.storages = saved_storages(nodes)
        self._retained = [pair for pair in self._retained if pair[0]() is not None]
        self._spent += time.perf_counter() - began
        row.saved_before = self._total(row.storages)

    def end(self, row: Any) -> None:
        """Note the bytes alive once the backward is over; unknown when it failed half-way."""
        storages, row.storages = row.storages, None
        if storages is None or "error" in row.details:
            return
        if row.keeps and row.nodes:
            mark = _Mark()
            _undivided(row.nodes[0]).metadata["accumviz"] = mark
            self._retained.append((ref(mark), storages))
        else:
            for _, retained in self._retained:
                for key in storages:
                    retained.pop(key, None)
        row.saved_after = self._total({})

    def _total(self, storages: dict[int, int]) -> float:
        alive: dict[int, int] = {}
        for _, retained in self._retained:
            alive |= retained
        return float(sum((alive | storages).values()))
