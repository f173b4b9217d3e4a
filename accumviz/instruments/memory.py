"""Saved tensors of autograd nodes, read without unpacking: looking must never recompute a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

# `dir()` of a node takes longer than reading all it saved, and the answer is the same for its class.
_slots: dict[type, tuple[str, ...]] = {}
_CUSTOM = ("_raw_saved_tensors",)
# Older versions of PyTorch show what was saved only by unpacking it, which may run someone's hook.
READABLE = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
_ACCUMULATE = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def slots(node: Any) -> tuple[str, ...]:
    """Name the attributes in which this kind of node keeps tensors (`_raw_saved_self`, ...)."""
    kind = type(node)
    names = _slots.get(kind)
    if names is None:
        if issubclass(kind, BackwardCFunction):
            # a class per user function, or per compilation: caching it would keep it alive for ever
            return _CUSTOM
        names = _slots[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return names


def raw_saved(node: Any) -> list[tuple[str, Any]]:
    """List what a node saved as (attribute, SavedTensor), without unpacking; None stands for a freed list."""
    found: list[tuple[str, Any]] = []
    for slot in slots(node):
        attr = slot.removeprefix("_raw_saved_")
        try:
            raw = getattr(node, slot)
        except RuntimeError:  # a freed list of tensors raises where a freed tensor is only empty
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
    if isinstance(data, torch.Tensor):
        return data
    if isinstance(data, tuple):  # save_on_cpu packs (device, copy)
        return next((part for part in data if isinstance(part, torch.Tensor)), None)
    return None


def inputs_of_checkpoint(raw: Any) -> list[torch.Tensor]:
    """List the inputs that a non-reentrant checkpoint keeps to run its part again.

    The graph holds placeholders only; the hook that would unpack them holds the inputs.
    """
    for cell in getattr(raw.unpack_hook, "__closure__", None) or ():
        frame = cell.cell_contents
        args = getattr(frame, "saved_args", None)
        if args is None:  # torch 2.10 and 2.11 keep them in a node of their own
            args = getattr(getattr(getattr(frame, "input_saver", None), "grad_fn", None), "_raw_saved_tensors", None)
        if args is not None:
            return [kept for one in args if isinstance(one, type(raw)) and (kept := held(one)) is not None]
    return []


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
    except (NotImplementedError, RuntimeError):  # sparse and opaque layouts have no storage of their own
        pass
    try:
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        else:
            parts = [tensor.values(), *(getattr(tensor, name)() for name in _INDICES[tensor.layout])]
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
    return type(base) is torch.nn.Parameter or (base is not None and base.is_leaf and base.requires_grad)


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
    tops = [root for root in roots if root not in targets]  # a lower root would hold itself alive
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


def saved_storages(roots: Iterable[Any], limit: int | None = None) -> dict[int, int] | None:
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
                for kept in (tensor,) if tensor is not None else inputs_of_checkpoint(one):
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
    for leaf in own:  # a hook that packs a detached tensor hides that it was a parameter
        key = storage(leaf)[0]
        if key in storages:
            storages[key] = 0
    keep_deletable(order, tops)
    return storages
