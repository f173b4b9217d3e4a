"""What a backward starts from: its value, its scale and its operation, read without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from accumviz.instruments import watch
from accumviz.instruments.memory import held

_SCALING = {"MulBackward0": 1, "DivBackward0": -1}


@dataclass
class Root:
    """The tensors of one `backward` call, described: `numbers` are targets and tensors still on a device."""

    nodes: list[Any]
    label: str = ""
    scale: float = 1.0
    loss: float = float("nan")
    details: dict[str, Any] = field(default_factory=dict)
    numbers: list[tuple[tuple[str, Any], torch.Tensor]] = field(default_factory=list)
    keeps: bool = False


def describe_root(roots: tuple[Any, ...], options: dict[str, Any]) -> Root:
    """Describe what `torch.autograd.backward` was called on, and how."""
    nodes = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    result = Root([node for node in nodes if node is not None])
    retain, create = options.get("retain_graph"), bool(options.get("create_graph"))
    result.keeps = create if retain is None else bool(retain)
    for name, value in (("retain_graph", bool(retain)), ("create_graph", create)):
        if value:
            result.details[name] = True
    inputs = options.get("inputs")
    if inputs is not None:
        result.details["inputs"] = 1 if isinstance(inputs, torch.Tensor) else len(inputs)
    if len(roots) != 1:
        result.details["roots"] = len(roots)
        return result
    root = roots[0]
    if isinstance(root, torch.Tensor):
        if root.numel() != 1:
            result.details["root_shape"] = list(root.shape)
        elif root.device.type == "cpu" and not root.is_complex():
            result.loss = float(root.detach())
        elif not root.is_complex():
            result.numbers.append((("loss", None), root.detach().clone()))
    if result.nodes:
        _walk_scale(result, result.nodes[0])
    return result


def _walk_scale(result: Root, node: Any) -> None:
    """Multiply the constants between the root and the loss proper: `loss / 4` has scale 1/4.

    The gradient scaler's factor is no part of it: `amp_scale` keeps that one.
    """
    while (sign := _SCALING.get(node.name())) is not None:
        parents = [fn for fn, _ in node.next_functions if fn is not None]
        factor = _factor(node)
        if len(parents) != 1 or factor is None or factor.numel() != 1 or factor.is_complex():
            break
        amp = any(_is_scale_of(scaler, factor) for scaler in watch.scalers)
        if factor.device.type == "cpu":
            value = float(factor.detach()) ** sign if float(factor.detach()) else float("inf")
            if amp:
                result.details["amp_scale"] = value
            else:
                result.scale *= value
        else:
            target = ("detail", "amp_scale") if amp else ("scale", sign)
            result.numbers.append((target, factor.detach().clone()))
        node = parents[0]
    result.details["root"] = node.name()
    result.label = node.name()


def _factor(node: Any) -> torch.Tensor | None:
    # Which operand is the constant: the one that has no gradient of its own.
    for slot, position in (("_raw_saved_other", 0), ("_raw_saved_self", 1)):
        functions = node.next_functions
        if len(functions) > position and functions[position][0] is not None:
            raw = getattr(node, slot, None)
            found = held(raw) if raw is not None else None
            if found is not None:
                return found
    return None


def _is_scale_of(scaler: Any, factor: torch.Tensor) -> bool:
    scale = getattr(scaler, "_scale", None)
    return isinstance(scale, torch.Tensor) and scale.data_ptr() == factor.data_ptr()
