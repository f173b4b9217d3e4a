"""What a backward starts from: its value, its scale, its operation, its losses; nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch

from accumviz.recorder import patches
from accumviz.recorder.distributed import local
from accumviz.recorder.rows import Backward, raised
from accumviz.recorder.terms import (
    LEAF,
    LEAF_ITSELF,
    ONE,
    SCALING,
    Factor,
    describe_terms,
    is_scale,
    name_of,
    number,
    operand,
    unknown_root,
)
from accumviz.recorder.transfer import plainly, readable

_TENSOR = torch.Tensor
_ALIAS = "AliasBackward0"


def describe_root(row: Backward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into the row what `torch.autograd.backward` was called on, and how."""
    if not torch._C._len_torch_dispatch_stack():
        _describe_root(row, args, kwargs)
        return
    # A mode (a FLOP counter) would be handed the constant of `loss / 2` as a plain 2, and cannot take its item().
    with torch._C._DisableTorchDispatch():
        _describe_root(row, args, kwargs)


def _describe_root(
    row: Backward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    root = args[0] if args else kwargs.get("tensors", ())
    given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
    retain = args[2] if len(args) > 2 else kwargs.get("retain_graph")
    create = args[3] if len(args) > 3 else kwargs.get("create_graph")
    inputs = args[5] if len(args) > 5 else kwargs.get("inputs")
    details = row.details
    if retain or create:
        row.keeps = bool(create if retain is None else retain)
        details |= {"retain_graph": True} if retain else {}
        details |= {"create_graph": True} if create else {}
    if inputs is not None:
        details["inputs"] = (
            len(inputs) if isinstance(inputs, list | tuple | dict) else 1
        )
    if (
        type(root) is _TENSOR
        and root.is_cpu
        and root.numel() == 1
        and readable(root)
        and type(loss := root.item()) is not complex
    ):
        row.loss, node = loss, root.grad_fn
        if node is not None:
            _describe_node(row, node, given)
        else:
            unknown_root(row, LEAF_ITSELF)
        return
    with (
        torch._C.DisableTorchFunction()
    ):  # a subclass, or a mode, would be told of each question
        _describe_roots(row, root, given)


def _describe_roots(row: Backward, root: Any, given: Any) -> None:
    details = row.details
    plain = isinstance(root, torch.Tensor)
    if not plain and isinstance(root, list | tuple) and not hasattr(root, "node"):
        row.nodes = tuple(node for node in map(_node, root) if node is not None)
        if len(root) != 1:
            details["roots"] = len(root)
            _describe_each(row, root, given)
            return
        root = root[0]
        given = given[0] if isinstance(given, list | tuple) and given else given
    if isinstance(root, torch.Tensor):
        node = root.grad_fn
        if root.numel() != 1:
            details["root_shape"] = list(root.shape)
        elif not root.is_complex() and readable(value := plainly(local(root))):
            row.take(("loss", None), value)
    else:
        node = _node(root)
    if node is not None:
        _describe_node(
            row, node, given, whole=isinstance(root, torch.Tensor) and root.numel() == 1
        )
    else:
        unknown_root(row, LEAF_ITSELF)


def _describe_each(row: Backward, roots: Any, given: Any) -> None:
    """Several losses at once are as good as their sum."""
    whole = all(
        type(root) is _TENSOR and root.numel() == 1 and root.grad_fn is not None
        for root in roots
    )
    if not roots or not whole or given is not None or patches.scalers:
        unknown_root(row, f"backward started from {len(roots)} roots at once")
        return
    for node in row.nodes:
        describe_terms(row, node, name_of(node))


def _describe_node(row: Backward, node: Any, given: Any, *, whole: bool = True) -> None:
    row.nodes = (node,)
    (node, name), factor = _unaliased(node), ONE
    if name in SCALING:
        node, name, factor = _walk_scale(row, node, name)
    row.details["root"] = name
    if (
        not row.label
    ):  # no source to read it from: the operation names it better than nothing
        row.label = name
    value = (
        number(given) if whole and given is not None and not is_scale(given) else None
    )
    if isinstance(value, float):  # `loss.backward(torch.tensor(1 / K))`
        row.scale *= value
        factor = factor.times(value, 1)
    if given is not None and not isinstance(value, float):
        unknown_root(row, "backward was given a gradient to start from", name)
    elif not whole:
        unknown_root(
            row,
            "backward started from several numbers, or from an edge of the graph",
            name,
        )
    else:
        describe_terms(row, node, name, factor)


def starts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The nodes from which `torch.autograd.backward`, called with these, goes through the graph."""
    roots = args[0] if args else kwargs.get("tensors", ())
    roots = (
        roots
        if isinstance(roots, list | tuple) and not hasattr(roots, "node")
        else [roots]
    )
    return [node for node in map(_node, roots) if node is not None]


def _node(root: Any) -> Any:
    # a tensor, or a GradientEdge
    return (
        root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)
    )


def _walk_scale(row: Backward, node: Any, name: str) -> tuple[Any, str, Factor]:
    """Multiply the constants between the root and the loss proper: `loss / 4` has scale 1/4.

    The gradient scaler's factor is no part of it: `amp_scale` keeps that one. Returns the node
    that made the loss proper, its name, and what it is multiplied by.
    """
    factor = ONE
    while name in SCALING:
        parents = [fn for fn, _ in node.next_functions if fn is not None]
        constant = operand(node, name)
        value = number(constant)
        if len(parents) != 1 or value is None:
            break
        parent, above = _unaliased(parents[0])
        if above == LEAF:  # a constant times a parameter is a loss, not a scaled one
            break
        amp = bool(patches.scalers) and is_scale(constant)
        if isinstance(value, torch.Tensor):
            row.take(
                ("detail", "amp_scale") if amp else ("scale", SCALING[name]), value
            )
        elif amp:
            row.details["amp_scale"] = value
        else:
            row.scale *= raised(value, SCALING[name])
        factor = factor if amp else factor.times(value, SCALING[name])
        node, name = parent, above
    return node, name, factor


def _unaliased(node: Any) -> tuple[Any, str]:
    """This node and its name, or those of what it gives another type: what a subclass ends each operation with."""
    while (name := name_of(node)) == _ALIAS:
        node = node.next_functions[0][0]
    return node, name
