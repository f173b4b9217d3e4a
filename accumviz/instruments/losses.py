"""What a backward starts from: its value, its scale and its operation, read without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accumviz.instruments import watch
from accumviz.instruments.memory import held
from accumviz.instruments.rows import Backward

_SCALING = {"MulBackward0": 1, "DivBackward0": -1}


def describe_root(row: Backward, roots: Sequence[Any], options: dict[str, Any]) -> None:
    """Write into the row what `torch.autograd.backward` was called on, and how."""
    for root in roots:
        node = getattr(root, "grad_fn", None) or getattr(root, "node", None)
        if node is not None:
            row.nodes.append(node)
    if options:
        _describe_options(row, options)
    if len(roots) != 1:
        row.details["roots"] = len(roots)
        return
    root = roots[0]
    if isinstance(root, torch.Tensor):
        if root.numel() != 1:
            row.details["root_shape"] = list(root.shape)
        elif root.is_cpu and not root.is_complex():
            row.loss = root.item()
        elif not root.is_complex():
            row.expect(("loss", None), root)
    if row.nodes:
        _walk_scale(row, row.nodes[0])


def _describe_options(row: Backward, options: dict[str, Any]) -> None:
    create = bool(options.get("create_graph"))
    retain = options.get("retain_graph")
    row.keeps = create if retain is None else bool(retain)
    if retain:
        row.details["retain_graph"] = True
    if create:
        row.details["create_graph"] = True
    inputs = options.get("inputs")
    if inputs is not None:
        row.details["inputs"] = 1 if isinstance(inputs, torch.Tensor) else len(inputs)


def _walk_scale(row: Backward, node: Any) -> None:
    """Multiply the constants between the root and the loss proper: `loss / 4` has scale 1/4.

    The gradient scaler's factor is no part of it: `amp_scale` keeps that one.
    """
    name = node.name()
    while (sign := _SCALING.get(name)) is not None:
        parents = [fn for fn, _ in node.next_functions if fn is not None]
        factor = _factor(node)
        if len(parents) != 1 or factor is None or factor.numel() != 1 or factor.is_complex():
            break
        amp = any(_is_scale_of(scaler, factor) for scaler in watch.scalers)
        if not factor.is_cpu:
            row.expect(("detail", "amp_scale") if amp else ("scale", sign), factor)
        elif amp:
            row.details["amp_scale"] = factor.item()
        elif sign > 0 or factor.item():
            row.scale *= factor.item() ** sign
        else:
            row.scale = float("inf")
        node = parents[0]
        name = node.name()
    row.details["root"] = name


def _factor(node: Any) -> torch.Tensor | None:
    # The constant is the operand without a gradient of its own; it is saved for the other one's.
    functions = node.next_functions
    for slot, position in (("_raw_saved_other", 0), ("_raw_saved_self", 1)):
        if len(functions) > position and functions[position][0] is not None:
            raw = getattr(node, slot, None)
            found = None if raw is None else held(raw)
            if found is not None:
                return found
    return None


def _is_scale_of(scaler: Any, factor: torch.Tensor) -> bool:
    scale = getattr(scaler, "_scale", None)
    return isinstance(scale, torch.Tensor) and scale.data_ptr() == factor.data_ptr()
