"""Walk the nodes below a tensor: their values and gradients, known for certain or not at all, and nothing disturbed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from accumviz.graph.graph import Edge, in_order
from accumviz.recorder import memory
from accumviz.recorder.transfer import PLAIN, readable

ELEMENTS_LIMIT = 64
# Tensors by the operation that returned them.
Results = dict[Any, torch.Tensor]

# How an operation is run again: its function, and what its node saved. Without a name, its one input.
_AGAIN: dict[str, list[Any]] = {
    "PowBackward0": [torch.pow, "_saved_self", "_saved_exponent"],
    "MulBackward0": [torch.mul, "_saved_self", "_saved_other"],
    "MeanBackward0": [torch.mean],
    "SumBackward0": [torch.sum],
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


class Walk:
    """The nodes below some roots, in traversal order, with their edges and leaves; of a deep graph, some."""

    def __init__(self, roots: Sequence[torch.Tensor]) -> None:
        self.roots = list(roots)
        self.order: list[Any] = list(dict.fromkeys(root.grad_fn for root in roots))
        self.top = tuple(range(len(self.order)))
        self.edges: list[Edge] = []
        self.leaves: dict[int, torch.Tensor] = {}
        index = {fn: i for i, fn in enumerate(self.order)}
        for source, fn in enumerate(self.order):
            if len(self.order) > memory.DEEP:
                break
            if hasattr(fn, "variable"):
                self.leaves[source] = fn.variable
            for target, _ in fn.next_functions:
                if target is None:
                    continue
                if target not in index:
                    index[target] = len(self.order)
                    self.order.append(target)
                self.edges.append(Edge(source, index[target]))


@contextmanager
def quietly() -> Iterator[None]:
    """Hide what a block does to tensors from modes, as `unseen` does for a call, and from subclasses and graphs, too.

    >>> with quietly():
    ...     torch.is_grad_enabled()
    False
    """
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
    ):
        yield


def numbers(tensor: Any) -> Any:
    """Turn a tiny real tensor into nested lists of floats; return None when it is neither or cannot be read."""
    if not _is_tiny(tensor) or tensor.dtype.is_complex:
        return None
    if tensor.layout is not torch.strided:
        return None
    with quietly():
        return tensor.to("cpu", torch.float64).tolist()


def numbers_on_cpu(tensor: torch.Tensor | None) -> Any:
    """Do as `numbers` does, without waiting for a device: there they are unknown."""
    is_there = tensor is not None and tensor.is_cpu
    return numbers(tensor) if is_there else None


def _is_tiny(tensor: Any) -> bool:
    few = type(tensor) in PLAIN and tensor.numel() <= ELEMENTS_LIMIT
    return few and readable(tensor)


def results(walk: Walk, variables: Mapping[Any, torch.Tensor]) -> Results:
    """Find what operations returned: in the caller's variables, in what was saved, or by one exact replay."""
    inside = set(walk.order)
    tensors = {fn: tensor for fn, tensor in variables.items() if fn in inside}
    tensors = _kept(walk, inside) | tensors | _ends(walk)
    for fn in reversed(walk.order):
        again = None if fn in tensors else _run_again(fn, tensors)
        if again is not None:
            tensors[fn] = again
    return tensors


def _kept(walk: Walk, inside: set[Any]) -> Results:
    """Return what operations returned and others saved."""
    tensors: Results = {}
    for fn in walk.order:
        for tensor in _saved_unchanged(fn):
            if tensor.output_nr == 0 and tensor.grad_fn in inside:
                tensors.setdefault(tensor.grad_fn, tensor)
    return tensors


def _ends(walk: Walk) -> Results:
    """Return the roots, and the leaves."""
    tensors = {root.grad_fn: root for root in walk.roots if root.output_nr == 0}
    for i, leaf in walk.leaves.items():
        tensors[walk.order[i]] = leaf
    return tensors


def _saved_unchanged(fn: Any) -> list[torch.Tensor]:
    """Read what was saved through autograd's own getter, which refuses a tensor changed in place since."""
    if isinstance(fn, BackwardCFunction) or not _unpacks_plainly(fn):
        return []
    tensors = []
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
    return all(memory.unpacks_plainly(raw) for _, raw in memory.raw_saved(fn))


def _run_again(fn: Any, tensors: Results) -> torch.Tensor | None:
    """Run an operation again where everything it was run with is there, and tiny."""
    operation = _AGAIN.get(type(fn).__name__)
    if operation is None or not _unpacks_plainly(fn):
        return None
    function, *names = operation
    try:
        operands = [getattr(fn, name) for name in names]
        if not names:
            ((source, output),) = fn.next_functions
            operands = [tensors.get(source) if output == 0 else None]
        if not all(map(_is_usable, operands)):
            return None
        with quietly():
            again: torch.Tensor = function(*operands)
            return again
    except RuntimeError:  # changed in place since
        return None


def _is_usable(operand: Any) -> bool:
    if isinstance(operand, torch.Tensor):
        return _is_tiny(operand)
    return operand is not None


def gradients(walk: Walk) -> tuple[dict[Any, Any], str]:
    """Call each node's own formula once, roots first, and return d(roots)/d(node) by node, or a note.

    This is not `torch.autograd.grad`: the engine would run the user's hooks. Called are only
    operations of PyTorch's own that are known to be a formula and nothing else, on tensors that
    are there: a custom Function may count its calls, an in-place change of a view may have one
    inside, a collective would wait for other ranks. A graph with any other has no gradients.
    """
    obstacle = _obstacle(walk)
    if obstacle:
        return {}, f"gradients are left out: {obstacle}"
    came = {}
    for fn in walk.order:
        came[fn] = [None] * len(fn._input_metadata)
    try:
        with quietly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for root in walk.roots:
                _add(
                    came[root.grad_fn],
                    root.output_nr,
                    torch.ones_like(root),
                )
            _flow(walk, came)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return {}, f"gradients are left out: {error}"
    slopes = {}
    for fn, parts in came.items():
        if len(parts) == 1:
            slopes[fn] = numbers(parts[0])
    return slopes, ""


def _obstacle(walk: Walk) -> str:
    """Return why the gradients of a graph cannot be computed, if they cannot."""
    for root in walk.roots:
        if root.numel() != 1 or root.dtype.is_complex or not readable(root):
            return "they are defined for a loss of one real number"
    for fn in walk.order:
        if not hasattr(fn, "variable") and not _is_formula(fn):
            return f"{type(fn).__name__} might run more than a formula of PyTorch's"
    return ""


def _is_formula(fn: Any) -> bool:
    """Tell whether calling a node computes a formula of PyTorch's own from what can be read, and nothing else."""
    named = _FORMULA.fullmatch(type(fn).__name__)
    if not named or isinstance(fn, BackwardCFunction) or not _unpacks_plainly(fn):
        return False
    saved = [tensor for _, tensor in memory.saved_tensors(fn) if tensor is not None]
    return all(map(readable, saved))


def _flow(walk: Walk, came: dict[Any, list[Any]]) -> None:
    """Pass gradients on from the roots."""
    edges = [(edge.source, edge.target) for edge in walk.edges]
    for i in in_order(len(walk.order), edges):
        fn = walk.order[i]
        if hasattr(fn, "variable"):
            continue
        passed = fn(*came[fn])
        if not isinstance(passed, tuple):
            passed = (passed,)
        for (target, output), gradient in zip(fn.next_functions, passed, strict=False):
            if target is not None and gradient is not None:
                fitting = _fit(gradient, target._input_metadata[output])
                _add(came[target], output, fitting)


def _fit(gradient: torch.Tensor, expected: Any) -> torch.Tensor:
    """Sum a broadcast gradient back to its input's shape and dtype, as the engine does between nodes."""
    if tuple(gradient.shape) != tuple(expected.shape):
        gradient = gradient.sum_to_size(tuple(expected.shape))
    return gradient.to(expected.dtype)


def _add(
    parts: list[Any],
    at: int,
    gradient: torch.Tensor,
) -> None:
    parts[at] = gradient if parts[at] is None else parts[at] + gradient
