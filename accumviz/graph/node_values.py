"""Forward values and gradients of a tiny graph, known for certain or not at all, and nothing disturbed."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from accumviz.graph.graph import Graph
from accumviz.graph.nodes import in_order
from accumviz.recorder import memory
from accumviz.recorder.transfer import PLAIN, Quietly, Wire, readable

ELEMENTS_LIMIT = 64
_WATCH_LIMIT = 1000
_UNKNOWN = object()


class Watch(TorchFunctionMode):
    """See each operation's result while a function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, Any] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            torch.compiler.is_compiling()
        ):  # the compiler runs this too, and its tensors hold no numbers
            return result
        if isinstance(result, torch.Tensor) and len(self.results) < _WATCH_LIMIT:
            node = result.grad_fn
            if (
                node is not None
                and result.output_nr == 0
                and result.numel() <= ELEMENTS_LIMIT
            ):
                self.results[node] = numbers(result)
        return result


@contextmanager
def variables_of(code: CodeType | None, into: list[FrameType]) -> Iterator[None]:
    """Keep the frame in which this code returns: it still has its variables afterwards."""

    def keep(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            into[:] = [frame]

    if (
        code is None or sys.getprofile() is not None
    ):  # a profiler is at work: names matter less
        yield
        return
    sys.setprofile(keep)
    try:
        yield
    finally:
        sys.setprofile(None)


def numbers(tensor: Any) -> Any:
    """Turn a tiny real tensor into nested lists of floats, None when it is neither or cannot be read."""
    if not _tiny(tensor):
        return None
    with Quietly():
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        return dense.to("cpu", torch.float64).tolist()


def _tiny(tensor: Any) -> bool:
    few = type(tensor) in PLAIN and tensor.numel() <= ELEMENTS_LIMIT
    return few and not tensor.dtype.is_complex and readable(tensor)


class Later:
    """Reads numbers for a graph; those on a device are sent for, and put in their places when somebody looks."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: list[tuple[Place, torch.Tensor]] = []

    def __call__(self, tensor: Any) -> Any:
        """As `numbers`; of a tensor on a device, a place to be filled, once `send` was called."""
        if not _tiny(tensor) or tensor.is_cpu:
            return numbers(tensor)
        with Quietly():
            dense = (
                tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
            )
        place = Place(tuple(dense.shape))
        self._waiting.append((place, dense))
        return place

    def now(self, tensor: Any) -> Any:
        """As `numbers`; what is on a device is sent for at once, on the stream of the caller, and not kept."""
        if not _tiny(tensor) or tensor.is_cpu:
            return numbers(tensor)
        with Quietly():
            dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
            place = Place(tuple(dense.shape))
            (place.host,) = self._wire.send([[dense.reshape(-1)]])
        return place

    def send(self) -> None:
        """Send for what waits, before anybody changes it."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            with Quietly():
                arriving = self._wire.send(
                    [[tensor.reshape(-1)] for _, tensor in waiting]
                )
            for (place, _), host in zip(waiting, arriving, strict=True):
                place.host = host


@dataclass
class Place:
    """Where numbers of a tensor on a device will be, once they have arrived."""

    shape: tuple[int, ...]
    host: torch.Tensor | None = None


class Sum(NamedTuple):
    """What reached a leaf in several parts."""

    parts: tuple[Any, ...]


def fill(graph: Graph) -> Graph:
    """The graph with its numbers, once they have arrived."""
    nodes = (
        replace(node, value=_filled(node.value), grad=_filled(node.grad))
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _filled(value: Any) -> Any:
    if isinstance(value, Sum):
        first, *others = (_filled(part) for part in value.parts)
        for other in others:
            first = _added(first, other)
        return first
    if isinstance(value, Place):
        return None if value.host is None else numbers(value.host.reshape(value.shape))
    return value


def _added(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    return (
        [_added(x, y) for x, y in zip(a, b, strict=True)]
        if isinstance(a, list)
        else a + b
    )


def forward_values(
    order: list[Any],
    roots: list[torch.Tensor],
    variables: Mapping[Any, tuple[str, torch.Tensor]],
    watched: Watch | None,
    read: Callable[[Any], Any] = numbers,
) -> dict[Any, Any]:
    """Find what each operation gave: from the run, the caller's variables, what was saved, or one exact replay."""
    found: dict[Any, Any] = dict(watched.results) if watched else {}
    inside = set(order)
    tensors = {root.grad_fn: root for root in roots if root.output_nr == 0}
    tensors |= {
        node: tensor for node, (_, tensor) in variables.items() if node in inside
    }
    tensors |= {fn: fn.variable for fn in order if hasattr(fn, "variable")}
    for fn in order:
        for tensor in _checked_saved(fn):
            if tensor.output_nr == 0 and tensor.grad_fn in inside:
                tensors.setdefault(tensor.grad_fn, tensor)
    for fn in reversed(order):
        if (
            fn not in tensors
            and fn not in found
            and (again := _replay(fn, tensors)) is not None
        ):
            tensors[fn] = again
    for fn, tensor in tensors.items():
        if found.get(fn) is None:
            found[fn] = read(tensor)
    return found


def _checked_saved(fn: Any) -> list[torch.Tensor]:
    """Read what was saved through autograd's own getter, which refuses a tensor changed in place since."""
    if isinstance(fn, BackwardCFunction) or not _unpacks_plainly(fn):
        return []
    kept: list[torch.Tensor] = []
    for slot in memory.slots(fn):
        try:
            value = getattr(fn, slot.replace("_raw_saved_", "_saved_"))
        except (RuntimeError, AttributeError):
            continue
        kept += [
            t
            for t in (value if isinstance(value, (tuple, list)) else (value,))
            if isinstance(t, torch.Tensor)
        ]
    return kept


def _unpacks_plainly(fn: Any) -> bool:
    """Tell whether reading what a node saved runs nobody's code (a checkpoint's hook would recompute)."""
    return memory.READABLE and all(
        raw is not None and raw.unpack_hook is None for _, raw in memory.raw_saved(fn)
    )


def _both(fn: Any, first: str, second: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    a, b = getattr(fn, first), getattr(fn, second)
    return None if a is None or b is None else (a, b)


def _small(operand: Any) -> bool:
    return (
        type(operand) in PLAIN
        and operand.numel() <= ELEMENTS_LIMIT
        and readable(operand)
    )


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


def _replay(fn: Any, known: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
    """Run an operation again where its node holds everything it was run with."""
    op = type(fn).__name__
    try:
        if op in _FROM_SAVED and _unpacks_plainly(fn):
            first, second, function = _FROM_SAVED[op]
            pair = _both(fn, first, second)
            if pair is None or not all(
                _small(t) for t in pair if isinstance(t, torch.Tensor)
            ):
                return None
            with Quietly():
                return function(*pair)
        if op in _FROM_INPUT:
            ((source, output),) = fn.next_functions
            value = known.get(source)
            if value is not None and output == 0 and _small(value):
                with Quietly():
                    return _FROM_INPUT[op](value)
    except (RuntimeError, ValueError, AttributeError):
        return None
    return None


def gradients(
    order: list[Any], roots: list[torch.Tensor]
) -> tuple[dict[Any, Any], str]:
    """Call each node's own formula once, roots first, and return d(roots)/d(node) by node, and a note.

    This is not `torch.autograd.grad`: the engine would run the user's hooks. Called are only
    operations of PyTorch's own that are known to be a formula and nothing else, on tensors that
    are there. What depends on any other is left out: a custom Function may count its calls, an
    in-place change of a view may have one inside, a collective would wait for other ranks.
    """
    if any(
        root.numel() != 1 or root.dtype.is_complex or not readable(root)
        for root in roots
    ):
        return (
            {},
            "gradients are left out: they are defined for a loss of one real number",
        )
    incoming: dict[Any, list[Any]] = {
        fn: [None] * len(fn._input_metadata) for fn in order
    }
    for root in roots:
        _add(incoming[root.grad_fn], root.output_nr, torch.ones_like(root))
    silent = []
    with Quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        number = {fn: i for i, fn in enumerate(order)}
        edges = (
            (i, number[to])
            for i, fn in enumerate(order)
            for to, _ in fn.next_functions
            if to is not None
        )
        for fn in [order[i] for i in in_order(len(order), edges)]:
            if hasattr(fn, "variable"):
                continue
            given = incoming[fn]
            results = tuple(_UNKNOWN for _ in fn.next_functions)
            if not any(g is _UNKNOWN for g in given):
                try:
                    results = _call(fn, given)
                except (RuntimeError, NotImplementedError, TypeError):
                    silent.append(type(fn).__name__)
            for (target, output), result in zip(
                fn.next_functions, results, strict=False
            ):
                if target is not None and result is not None:
                    _add(
                        incoming[target],
                        output,
                        _fit(result, target._input_metadata[output]),
                    )
    known = {
        fn: numbers(given[0])
        for fn, given in incoming.items()
        if len(given) == 1 and given[0] is not _UNKNOWN
    }
    stops = ", ".join(dict.fromkeys(silent))
    note = (
        f"gradients stop at {stops}: to know more, code other than a formula would have to run"
        if silent
        else ""
    )
    return known, note


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


def _call(fn: Any, given: list[Any]) -> tuple[Any, ...]:
    own = (
        not isinstance(fn, BackwardCFunction)
        and _FORMULA.fullmatch(type(fn).__name__)
        and _unpacks_plainly(fn)
    )
    if not own or not all(
        readable(kept) for _, kept in memory.saved_tensors(fn) if kept is not None
    ):
        raise RuntimeError("calling it might run more than a formula of PyTorch's own")
    results = fn(*given)
    return results if isinstance(results, tuple) else (results,)


def _fit(gradient: Any, expected: Any) -> Any:
    """Sum a broadcast gradient back to its input's shape and dtype, as the engine does between nodes."""
    if gradient is _UNKNOWN:
        return gradient
    if tuple(gradient.shape) != tuple(expected.shape):
        gradient = gradient.sum_to_size(tuple(expected.shape))
    if gradient.dtype != expected.dtype:
        real = gradient.is_complex() and not expected.dtype.is_complex
        gradient = (gradient.real if real else gradient).to(expected.dtype)
    return gradient


def _add(buffer: list[Any], at: int, gradient: Any) -> None:
    if gradient is _UNKNOWN or buffer[at] is _UNKNOWN:
        buffer[at] = _UNKNOWN
    else:
        buffer[at] = gradient if buffer[at] is None else buffer[at] + gradient
