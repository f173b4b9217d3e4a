"""Forward values and gradients of a tiny graph, known for certain or not at all, and nothing disturbed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from accumviz.graph.graph import in_order
from accumviz.recorder import memory
from accumviz.recorder.transfer import PLAIN, Quietly, readable

ELEMENTS_LIMIT = 64
_UNKNOWN = object()

_FROM_SAVED: dict[str, tuple[str, str, Callable[..., torch.Tensor]]] = {
    "PowBackward0": ("_saved_self", "_saved_exponent", torch.pow),
    "MulBackward0": ("_saved_self", "_saved_other", torch.mul),
    "DivBackward0": ("_saved_self", "_saved_other", torch.div),
    "MmBackward0": ("_saved_self", "_saved_mat2", torch.mm),
    "DotBackward0": ("_saved_self", "_saved_tensor", torch.dot),
}
_FROM_INPUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MeanBackward0": torch.mean,
    "SumBackward0": torch.sum,
    "NegBackward0": torch.neg,
}
# Elementwise operations, products, reductions, losses, and what moves elements about: deterministic, and
# without side effects in all their versions (`PowBackward0`, `PowBackward1`).
_FORMULAS = (
    "Add Sub Rsub Mul Div Neg Pow Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Reciprocal Abs Sgn Sign Sin Cos Tan "
    "Asin Acos Atan Sinh Cosh Tanh Sigmoid LogSigmoid Relu LeakyRelu Elu Gelu Silu Softplus Hardtanh Hardsigmoid "
    "Hardswish Erf Clamp ClampMin ClampMax Maximum Minimum Max Min Amax Amin Where Lerp Addcmul Addcdiv MaskedFill "
    "Sum Mean Prod Var Std VarMean Norm LinalgVectorNorm Cumsum Softmax LogSoftmax Logsumexp Logaddexp "
    "MseLoss SmoothL1Loss HuberLoss NllLoss NllLoss2D BinaryCrossEntropy BinaryCrossEntropyWithLogits KlDiv "
    "Mm Mv Dot Bmm Addmm Addmv Addbmm Baddbmm Linear Ger Outer Convolution AvgPool2D MaxPool2DWithIndices "
    "NativeLayerNorm NativeBatchNorm NativeGroupNorm NativeDropout Embedding "
    "View UnsafeView ReshapeAlias T Transpose Permute Expand Repeat Squeeze Unsqueeze Select Slice Diagonal Unfold "
    "Split SplitWithSizes Unbind Cat Stack Index IndexSelect Gather Flip Roll Tril Triu Trace Clone Alias ToCopy Fill"
)
_FORMULA = re.compile(rf"(?:{_FORMULAS.replace(' ', '|')})Backward\d+")


def numbers(tensor: Any) -> Any:
    """Turn a tiny real tensor into nested lists of floats; return None when it is neither or cannot be read."""
    if not _tiny(tensor) or tensor.dtype.is_complex:
        return None
    with Quietly():
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        return dense.to("cpu", torch.float64).tolist()


def numbers_on_cpu(tensor: Any) -> Any:
    """As `numbers`, without waiting for a device: there they are unknown."""
    on_cpu = isinstance(tensor, torch.Tensor) and tensor.is_cpu
    return numbers(tensor) if on_cpu else None


def _tiny(tensor: Any) -> bool:
    few = type(tensor) in PLAIN and tensor.numel() <= ELEMENTS_LIMIT
    return few and readable(tensor)


def forward_values(
    order: list[Any],
    roots: list[torch.Tensor],
    variables: Mapping[Any, tuple[str, torch.Tensor]],
    read: Callable[[Any], Any] = numbers,
) -> dict[Any, Any]:
    """Find what each operation returned: in the caller's variables, in what was saved, or by one exact replay."""
    inside = set(order)
    tensors = {root.grad_fn: root for root in roots if root.output_nr == 0}
    for fn, (_, tensor) in variables.items():
        if fn in inside:
            tensors[fn] = tensor
    for fn in order:
        if hasattr(fn, "variable"):
            tensors[fn] = fn.variable
        for tensor in _saved_unchanged(fn):
            if tensor.output_nr == 0 and tensor.grad_fn in inside:
                tensors.setdefault(tensor.grad_fn, tensor)
    for fn in reversed(order):
        if fn not in tensors:
            again = _replay(fn, tensors)
            if again is not None:
                tensors[fn] = again
    return {fn: read(tensor) for fn, tensor in tensors.items()}


def _saved_unchanged(fn: Any) -> list[torch.Tensor]:
    """Read what was saved through autograd's own getter, which refuses a tensor changed in place since."""
    if isinstance(fn, BackwardCFunction) or not _unpacks_plainly(fn):
        return []
    tensors: list[torch.Tensor] = []
    for slot in memory.slots(fn):
        try:
            value = getattr(fn, slot.replace("_raw_saved_", "_saved_"))
        except (RuntimeError, AttributeError):
            continue
        values = value if isinstance(value, (tuple, list)) else (value,)
        tensors += [one for one in values if isinstance(one, torch.Tensor)]
    return tensors


def _unpacks_plainly(fn: Any) -> bool:
    """Tell whether reading what a node saved runs only torch's own code: a checkpoint's hook would recompute."""
    saved = [raw for _, raw in memory.raw_saved(fn)]
    return all(raw is not None and raw.unpack_hook is None for raw in saved)


def _replay(fn: Any, known: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
    """Run an operation again where its node holds everything it was run with."""
    op = type(fn).__name__
    try:
        function, operands = _operands(op, fn, known)
        tensors = [one for one in operands if isinstance(one, torch.Tensor)]
        if not all(map(_tiny, tensors)):
            return None
        with Quietly():
            return function(*operands)
    except (RuntimeError, ValueError, AttributeError, LookupError):
        return None


def _operands(
    op: str, fn: Any, known: Mapping[Any, torch.Tensor]
) -> tuple[Callable[..., torch.Tensor], list[Any]]:
    """Return what an operation was run with. Raises `LookupError` where that is not kept."""
    if op in _FROM_INPUT:
        ((source, output),) = fn.next_functions
        if output:
            raise LookupError(output)
        return _FROM_INPUT[op], [known[source]]
    first, second, function = _FROM_SAVED[op]
    if not _unpacks_plainly(fn):
        raise LookupError(op)
    operands = [getattr(fn, first), getattr(fn, second)]
    if any(one is None for one in operands):
        raise LookupError(op)
    return function, operands


def gradients(
    order: list[Any], roots: list[torch.Tensor]
) -> tuple[dict[Any, Any], str]:
    """Call each node's own formula once, roots first, and return d(roots)/d(node) by node, and a note.

    This is not `torch.autograd.grad`: the engine would run the user's hooks. Called are only
    operations of PyTorch's own that are known to be a formula and nothing else, on tensors that
    are there. What depends on any other is left out: a custom Function may count its calls, an
    in-place change of a view may have one inside, a collective would wait for other ranks.
    """
    for root in roots:
        if root.numel() != 1 or root.dtype.is_complex or not readable(root):
            note = (
                "gradients are left out: they are defined for a loss of one real number"
            )
            return {}, note
    incoming: dict[Any, list[Any]] = {}
    for fn in order:
        incoming[fn] = [None] * len(fn._input_metadata)
    with Quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for root in roots:
            _add(incoming[root.grad_fn], root.output_nr, torch.ones_like(root))
        stopped_at = _flow(order, incoming)
    slopes = {}
    for fn, came in incoming.items():
        if len(came) == 1 and came[0] is not _UNKNOWN:
            slopes[fn] = numbers(came[0])
    if not stopped_at:
        return slopes, ""
    stops = ", ".join(dict.fromkeys(stopped_at))
    return (
        slopes,
        f"gradients stop at {stops}: to know more, code other than a formula would have to run",
    )


def _flow(order: list[Any], incoming: dict[Any, list[Any]]) -> list[str]:
    """Pass gradients on from the roots, and return the operations at which they stop."""
    stopped_at = []
    for fn in _from_the_roots(order):
        if hasattr(fn, "variable"):
            continue
        targets = fn.next_functions
        try:
            results = _call(fn, incoming[fn])
        except (RuntimeError, NotImplementedError, TypeError):
            stopped_at.append(type(fn).__name__)
            results = [_UNKNOWN] * len(targets)
        for (target, output), result in zip(targets, results, strict=False):
            if target is not None and result is not None:
                fitting = _fit(result, target._input_metadata[output])
                _add(incoming[target], output, fitting)
    return stopped_at


def _from_the_roots(order: list[Any]) -> list[Any]:
    number = {fn: i for i, fn in enumerate(order)}
    edges = []
    for fn in order:
        for target, _ in fn.next_functions:
            if target is not None:
                edges.append((number[fn], number[target]))
    return [order[i] for i in in_order(len(order), edges)]


def _call(fn: Any, came: list[Any]) -> list[Any]:
    """Return what a node's formula makes of the gradients that came.

    Raises `RuntimeError` for anything but a formula.
    """
    if any(gradient is _UNKNOWN for gradient in came):
        return [_UNKNOWN] * len(fn.next_functions)
    formula = _FORMULA.fullmatch(type(fn).__name__) and not isinstance(
        fn, BackwardCFunction
    )
    saved = [tensor for _, tensor in memory.saved_tensors(fn) if tensor is not None]
    if not formula or not _unpacks_plainly(fn) or not all(map(readable, saved)):
        raise RuntimeError("calling it might run more than a formula of PyTorch's own")
    results = fn(*came)
    return list(results) if isinstance(results, tuple) else [results]


def _fit(gradient: Any, expected: Any) -> Any:
    """Sum a broadcast gradient back to its input's shape and dtype, as the engine does between nodes."""
    if gradient is _UNKNOWN:
        return gradient
    if tuple(gradient.shape) != tuple(expected.shape):
        gradient = gradient.sum_to_size(tuple(expected.shape))
    if gradient.is_complex() and not expected.dtype.is_complex:
        gradient = gradient.real
    return gradient.to(expected.dtype)


def _add(buffer: list[Any], at: int, gradient: Any) -> None:
    if gradient is _UNKNOWN or buffer[at] is _UNKNOWN:
        buffer[at] = _UNKNOWN
    else:
        buffer[at] = gradient if buffer[at] is None else buffer[at] + gradient
