"""What a backward starts from: its value, its scale and its operation, read without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch

from accumviz.recorder import patches
from accumviz.recorder.fsdp import local
from accumviz.recorder.memory import held
from accumviz.recorder.rows import Backward
from accumviz.recorder.transfer import readable

_SCALING = {"MulBackward0": 1, "DivBackward0": -1}
_TENSOR = torch.Tensor
# By the type of a node, its name; a class per user function, or per compilation, is not kept.
_names: dict[type, str] = {}
_LEAF = "torch::autograd::AccumulateGrad"


def describe_root(row: Backward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into the row what `torch.autograd.backward` was called on, and how."""
    if not torch._C._len_torch_dispatch_stack():
        _describe_root(row, args, kwargs)
        return
    # A mode (a FLOP counter) would be handed the constant of `loss / 2` as a plain 2, and cannot take its item().
    with torch._C._DisableTorchDispatch():
        _describe_root(row, args, kwargs)


def _describe_root(row: Backward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    root = args[0] if args else kwargs.get("tensors", ())
    retain = args[2] if len(args) > 2 else kwargs.get("retain_graph")
    create = args[3] if len(args) > 3 else kwargs.get("create_graph")
    inputs = args[5] if len(args) > 5 else kwargs.get("inputs")
    details = row.details
    if retain or create:
        row.keeps = bool(create if retain is None else retain)
        details |= {"retain_graph": True} if retain else {}
        details |= {"create_graph": True} if create else {}
    if inputs is not None:
        details["inputs"] = len(inputs) if isinstance(inputs, list | tuple | dict) else 1
    if type(root) is _TENSOR and root.numel() == 1 and root.is_cpu and not root.is_complex():
        row.loss, node = root.item(), root.grad_fn
        if node is not None:
            _describe_node(row, node)
        return
    plain = isinstance(root, torch.Tensor)
    if not plain and isinstance(root, list | tuple) and not hasattr(root, "node"):
        row.nodes = tuple(node for node in map(_node, root) if node is not None)
        if len(root) != 1:
            details["roots"] = len(root)
            return
        root = root[0]
    if isinstance(root, torch.Tensor):
        node = root.grad_fn
        if root.numel() != 1:
            details["root_shape"] = list(root.shape)
        elif not root.is_complex() and readable(local(root)):
            row.take(("loss", None), local(root))
    else:
        node = _node(root)
    if node is not None:
        _describe_node(row, node)


def _describe_node(row: Backward, node: Any) -> None:
    row.nodes = (node,)
    name = _names.get(type(node)) or _name(node)
    if name in _SCALING:
        name = _walk_scale(row, node, name)
    row.details["root"] = name
    if not row.label:  # no source to read it from: the operation names it better than nothing
        row.label = name


def _name(node: Any) -> str:
    name: str = node.name()
    if type(node).__module__ == "builtins" and type(node).__name__ == name:
        _names[type(node)] = name
    return name


def _node(root: Any) -> Any:
    # a tensor, or a GradientEdge
    return root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)


def _walk_scale(row: Backward, node: Any, name: str) -> str:
    """Multiply the constants between the root and the loss proper: `loss / 4` has scale 1/4.

    The gradient scaler's factor is no part of it: `amp_scale` keeps that one. Returns the
    name of the operation that made the loss proper.
    """
    while (sign := _SCALING.get(name)) is not None:
        parents = [fn for fn, _ in node.next_functions if fn is not None]
        factor = _factor(node, sign)
        if len(parents) != 1 or factor is None or factor.numel() != 1 or factor.is_complex():
            break
        above = parents[0].name()
        if above == _LEAF:  # a constant times a parameter is a loss, not a scaled one
            break
        amp = any(_is_scale_of(scaler, factor) for scaler in patches.scalers)
        if not factor.is_cpu:
            row.take(("detail", "amp_scale") if amp else ("scale", sign), factor)
        elif amp:
            row.details["amp_scale"] = factor.item()
        elif sign > 0 or factor.item():
            row.scale *= factor.item() ** sign
        else:
            row.scale = float("inf")
        node, name = parents[0], above
    return str(name)


def _factor(node: Any, sign: int) -> torch.Tensor | None:
    # The constant is the operand without a gradient of its own; it is saved for the other one's.
    # A constant divided by a loss scales nothing.
    functions = node.next_functions
    for slot, position in (("_raw_saved_other", 0), ("_raw_saved_self", 1))[: 2 if sign > 0 else 1]:
        if len(functions) > position and functions[position][0] is not None:
            raw = getattr(node, slot, None)
            found = None if raw is None else held(raw)
            if found is not None:
                return found
    return None


def _is_scale_of(scaler: Any, factor: torch.Tensor) -> bool:
    scale = getattr(scaler, "_scale", None)
    return isinstance(scale, torch.Tensor) and scale.data_ptr() == factor.data_ptr()
