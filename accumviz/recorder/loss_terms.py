"""Read from a backward's graph its losses (reduction, elements, constant factor), its weights, and old copies of them.

A term is a reduced loss under the root: which reduction, over how many elements, times which constant. It is read from
what the graph's nodes saved, without unpacking it: no node runs, no user code does, and no device is waited for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from accumviz.recorder import patches
from accumviz.recorder.columns import Backward, Details
from accumviz.recorder.memory import ACCUMULATE_GRAD, UNREAD, held, nodes_below
from accumviz.recorder.transfer import PLAIN, local, plainly, readable

# A sum of more losses than this, or one of more operations, is not taken apart further.
_MOST_TERMS, _MOST_NODES = 64, 512
_REDUCTIONS = ("none", "mean", "sum")
_ARGUMENTS = ("tensors", "grad_tensors", "retain_graph", "create_graph")
_LEAF_ITSELF = "it is a parameter itself, and no loss"
_START = "backward did not start from one number alone"
_MORE = f"the root adds up more than {_MOST_TERMS} losses"
_NOT_READ = UNREAD or "a constant that it is multiplied or divided by cannot be read"
_PACKED = UNREAD or "what it saved was packed away by a hook, or freed"
_NESTED = "how its sums, means and weights are nested in one another is not read"
_SIGNED = "it is summed with weights of which some are negative"
_PRODUCT = "it is a product or a quotient of two things that have gradients"
_COMPILED = "it was computed inside torch.compile, which keeps one operation for all"


def _variants(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{n}" for name in names for n in range(4))


_SAME = _variants(
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Alias",
)
_NEGATED = _variants("Neg")
_TWO_SIDES = _variants("Add", "Sub", "Rsub")
_ELEMENTWISE = _SAME | _NEGATED | _variants("Add", "Sub")
# The power in which a node's constant operand enters; of some, it is a number and no tensor.
_POWERS = {"MulBackward0": 1, "DivBackward0": -1, "MulBackward1": 1, "DivBackward1": -1}
_REDUCING = {
    **dict.fromkeys(_variants("Sum"), "sum"),
    **dict.fromkeys(_variants("Mean"), "mean"),
}
_JOINED = ("StackBackward0", "CatBackward0", "GatherBackward")
_MASKED = {
    "MaskedFillBackward0": "_raw_saved_mask",
    "WhereBackward0": "_raw_saved_condition",
}
_PENALTIES = _SAME | _variants("Pow", "Abs", "Mul")
# So many backwards are searched for old copies of weights: the walk through a graph takes time.
_SEARCHES = 8
# What lies between a cross entropy and the products that it compares.
_TURNED = _variants("T", "Transpose", "Permute")
_SCALINGS = {"LogSoftmaxBackward0", *_TURNED, *_POWERS, *_SAME}
_MOST_SCALINGS = 8
# What may stretch one side to the size of the other.
_STRETCHING = _TWO_SIDES | _variants("Mul", "Div")
_CROSS_ENTROPIES = _variants("NllLoss", "NllLoss2D")
_OTHER_LOSSES = _variants(
    "MseLoss",
    "L1Loss",
    "SmoothL1Loss",
    "HuberLoss",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "KlDiv",
    "SoftMarginLoss",
)

# Losses that take logits or logarithms of probabilities, and are given probabilities; the last one is a `kl_div`.
_GIVEN_PROBABILITIES = re.compile(
    r"(NllLoss(2D)?(/LogSoftmax)*|BinaryCrossEntropyWithLogits|(Sum|Mean)(/Mul)*/Sub/Mul)/(Softmax|Sigmoid)\b"
)
# Losses that take logarithms of probabilities, and are given what a layer has computed.
_GIVEN_LOGITS = re.compile(
    r"((Mean|Sum|Div|Where)/)*(NllLoss(2D)?|CtcLoss)(/Transpose|/Permute)*/(Addmm|Mm|Convolution)\b"
)

# Operations written in Python that return what they are given, as DDP's does to what a model returns that it searches
# for unused parameters.
_IDENTITIES = ("_DDPSinkBackward",)


class _Constant(NamedTuple):
    """What a loss is multiplied by, or (power -1) divided by.

    `value` is a number, a tensor on a device or None where it cannot be read. One `inside` a mean cannot be told from
    the loss itself, as in half a square.
    """

    value: Any
    power: int = 1
    inside: bool = False


_Factor = tuple[_Constant, ...]
_Below = list[tuple[Any, _Factor]]


class _UnreadableError(Exception):
    """The reason for which a term cannot be read."""


# --- nodes ----------------------------------------------------------------------------------------


def _below(node: Any) -> list[tuple[Any, int]]:
    """Return what is below a node: for each of its inputs, the node that made it and which of its outputs it is."""
    inputs: list[tuple[Any, int]] = list(node.next_functions)
    for place, (below, at) in enumerate(inputs):
        if type(below).__name__ in _IDENTITIES:
            inputs[place] = _past_identities(below, at)
    return inputs


def _past_identities(node: Any, at: int) -> tuple[Any, int]:
    while type(node).__name__ in _IDENTITIES:
        inputs = node.next_functions
        # What is no tensor is an output, and no input.
        if at and len(inputs) != len(node._input_metadata):
            break
        node, at = inputs[at]
    return node, at


def _only_below(node: Any) -> Any:
    """Return the one node below this one; None where there is none, or several."""
    only = None
    for one, _ in _below(node):
        if one is not None and only is not None:
            return None
        only = only or one
    return only


def _constant(node: Any, name: str) -> Any:
    """Return the constant by which a node multiplies or divides; None where it does something else."""
    if name.endswith("1"):
        return node._saved_other
    is_first = node.next_functions[0][0] is not None
    if not is_first and name == "DivBackward0":
        return None  # a constant divided by a loss scales nothing
    slot = "_raw_saved_other" if is_first else "_raw_saved_self"
    return held(getattr(node, slot, None))


def _number(value: Any) -> Any:
    """Return a number, or the tensor that is to be sent from its device; None for what cannot be read or is complex."""
    if isinstance(value, int | float):
        return float(value)
    if type(value) not in PLAIN or value.numel() != 1 or value.dtype.is_complex:
        return None
    if not readable(value):
        return None
    return float(value.item()) if value.is_cpu else value


def _is_scale(value: Any) -> bool:
    """Return whether this is what a gradient scaler multiplies losses by."""
    if not isinstance(value, Tensor):
        return False
    for scaler in patches.scalers:
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, Tensor) and scale.data_ptr() == value.data_ptr():
            return True
    return False


def _raised(constant: float, power: int) -> float:
    """Return a constant, or (power -1) one divided by it.

    >>> _raised(4.0, -1), _raised(0.0, -1)
    (0.25, inf)
    """
    if power > 0:
        return constant
    return 1 / constant if constant else math.inf


# --- terms ----------------------------------------------------------------------------------------


class _Terms:
    """The losses below a backward's root, as they are found."""

    def __init__(self, row: Backward) -> None:
        self._row = row
        self._terms: list[Details] = row.details.setdefault("terms", [])
        # By operation and constants; a tensor is known by its identity, without being read.
        self._sums: dict[tuple[str, _Factor], Details] = {}
        # Whether what is visited is all of the root, times constants.
        self._is_whole = True
        # The node that is visited, and from which one each term was read.
        self._visited: Any = None
        self.begins: list[tuple[Details, Any]] = []

    def read(self, root: Any) -> None:
        """Add the losses below this node, from the first to the last."""
        waiting: _Below = [(root, ())]
        visited = 0
        while waiting:
            node, factor = waiting.pop()
            self._visited = node
            self._is_whole = not (waiting or self._terms)
            name = type(node).__name__
            visited += 1
            if len(self._terms) >= _MOST_TERMS or visited > _MOST_NODES:
                self.add(name, factor, unknown=_MORE)
                return
            try:
                waiting += reversed(self._visit(node, name, factor))
            except _UnreadableError as why:
                self.add(name, factor, unknown=str(why))

    def add(
        self,
        op: str,
        factor: _Factor = (),
        reduction: str = "",
        elements: Any = None,
        unknown: str = "",
    ) -> Details:
        """Add a term; numbers on a device are put into it when they have arrived.

        Chunks of one sum are one term: their elements weigh the same, and are counted together.
        """
        term = self._sums.get((op, factor)) if reduction == "sum" else None
        if term is None:
            term = {
                "op": op,
                "reduction": reduction,
                "elements": None,
                "factor": 1.0,
                "unknown": unknown,
            }
            self._terms.append(term)
            self._multiply(term, factor)
            if reduction == "sum":
                self._sums[op, factor] = term
        self._row.take(elements, partial(_put_elements, term))
        self.begins.append((term, self._visited))
        return term

    def _multiply(self, term: Details, factor: _Factor) -> None:
        """Write into a term its factor, and what that is made of: None where it is on a device, or not finite.

        `divisor` is what it is divided by as far as that is known at once, `own` what stands inside the mean, and
        `constants` are all of them where there are several.
        """
        divisor = own = 1.0
        constants = []
        for constant in factor:
            if constant.value is None:
                term["factor"] = None
                term["unknown"] = term["unknown"] or _NOT_READ
                return
        for value, power, is_inside in factor:
            multiplied = math.nan
            if isinstance(value, Tensor):
                self._row.take(value, partial(_put_factor, term, power))
            else:
                multiplied = _raised(value, power)
                term["factor"] *= multiplied
                divisor *= value if power < 0 else 1
            own *= multiplied if is_inside else 1
            if abs(multiplied) != 1:
                constants.append(multiplied)
        if divisor != 1 and math.isfinite(divisor):
            term["divisor"] = divisor
        if abs(own) != 1:
            term["own"] = _if_finite(own)
        if len(constants) > 1:
            are_finite = all(map(math.isfinite, constants))
            term["constants"] = constants if are_finite else None

    def _visit(
        self,
        node: Any,
        name: str,
        factor: _Factor,
    ) -> _Below:
        """Add the loss that this node is, or return what is added up below it, each with its factor."""
        if name in _REDUCING:
            return self._visit_reduction(node, name, factor)
        if name in _CROSS_ENTROPIES:
            self._add_cross_entropy(node, name, factor)
            return []
        if name in _OTHER_LOSSES:
            reduction = _REDUCTIONS[node._saved_reduction]
            term = self.add(name, factor, reduction, _size(node, "_raw_saved_self"))
            _note_stretched(term, node)
            return []
        if name in _POWERS:
            return self._visit_scaled(node, name, factor)
        return _linear(node, name, factor)

    def _visit_scaled(self, node: Any, name: str, factor: _Factor) -> _Below:
        """Return the loss that this node multiplies or divides by a constant.

        The gradient scaler's factor is no part of it: `amp_scale` keeps that one.
        """
        below = _only_below(node)
        if below is None:
            raise _UnreadableError(_PRODUCT)
        constant = _constant(node, name)
        value = _number(constant)
        if not _is_scale(constant):
            factor += (_Constant(value, _POWERS[name]),)
        elif self._is_whole:
            row = self._row
            row.take(value, partial(row.details.__setitem__, "amp_scale"))
        return [(below, factor)]

    def _add_cross_entropy(
        self,
        node: Any,
        name: str,
        factor: _Factor,
    ) -> None:
        """Add a cross entropy: its elements are the targets that count, with the weights of their classes."""
        reduction = _REDUCTIONS[node._saved_reduction]
        if reduction == "none":
            elements: Any = _size(node, "_raw_saved_target")
        else:
            elements = _number(held(node._raw_saved_total_weight))
        if elements is None:
            raise _UnreadableError(_PACKED)
        term = self.add(name, factor, reduction, elements)
        if held(node._raw_saved_weight) is not None:
            term["class_weights"] = True
        if _compares_samples(node):
            term["in_batch"] = True

    def _visit_reduction(
        self,
        node: Any,
        name: str,
        factor: _Factor,
    ) -> _Below:
        """Add a sum or a mean, or return the losses that were stacked for it."""
        below, _ = _below(node)[0]
        if not node._saved_self_sym_sizes:
            # Of one number, as in `loss.mean()` for several GPUs
            return [(below, factor)]
        kind = _REDUCING[name]
        reduced = _Reduced(node, kind)
        factor += reduced.factor
        count = reduced.count
        parts = reduced.parts()
        if parts:
            if kind == "mean":
                factor += (_Constant(count, -1),)
            return [(part, factor) for part in parts]
        if kind == "mean":  # each of the numbers that it leaves is one over its part
            numbers = math.prod(node._input_metadata[0].shape)
            term = self.add(name, factor, kind, count // max(numbers, 1))
        else:
            term = self.add(name, factor, kind, reduced.elements())
            if _is_of_weights(reduced.node):
                term["of_weights"] = True
        _note_stretched(term, node)
        return []


def _note_stretched(term: Details, node: Any) -> None:
    """Note of a loss that it is of n × n numbers where n were computed: a column met a row of targets, say."""
    waiting = [node]
    inputs = [one for one, _ in _below(node)]
    for _ in range(_MOST_SCALINGS):
        if not waiting:
            return
        above = waiting.pop()
        made = tuple(above._input_metadata[0].shape)
        reduces = above is node or type(above).__name__ in _REDUCING
        below = [(one, at) for one, at in _below(above) if one is not None]
        stretches = len(below) == 1 and _may_stretch(above, inputs)
        for one, at in below:
            shape = tuple(one._input_metadata[at].shape)
            if stretches and _is_squared(shape, made):
                term["stretched"] = int(made[0])
            elif shape == made or reduces:
                waiting.append(one)


def _may_stretch(node: Any, inputs: list[Any]) -> bool:
    """Return whether this may stretch one side to the size of the other, as a loss expands its own inputs.

    Elsewhere a norm is expanded, to divide rows by it.
    """
    name = type(node).__name__
    return name in _STRETCHING or (name == "ExpandBackward0" and node in inputs)


def _is_squared(shape: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """Return whether n numbers were stretched to n × n."""
    many = made[0] if made else 0
    return many > 1 and made == (many, many) and shape in ((many,), (many, 1))


def _is_of_weights(node: Any) -> bool:
    """Return whether this adds up powers of weights, as a penalty does: the same in each micro-batch."""
    waiting = [below for below, _ in node.next_functions]
    for _ in range(_MOST_SCALINGS):
        if not waiting:
            return True
        below = waiting.pop()
        if type(below).__name__ in _PENALTIES:
            waiting += [each for each, _ in below.next_functions]
        elif type(below) is not ACCUMULATE_GRAD:
            return False
    return False


def _compares_samples(node: Any) -> bool:
    """Return whether a cross entropy's classes are the samples: products of each with each, none of them a weight."""
    scores = held(node._raw_saved_self)
    if scores is None or type(scores) not in PLAIN:
        return False
    shape = tuple(scores.shape)
    if len(shape) != 2 or shape[0] != shape[1]:
        return False
    factors = _factors_below(node)
    return bool(factors) and not any(map(_is_weight, factors))


def misgiven(node: Any) -> str:
    """Return what a loss is given by mistake: the "Softmax" of logits, its own "targets", or "logits"."""
    way = []
    for _ in range(_MOST_SCALINGS):
        if node is None:
            break
        name = type(node).__name__
        if "BinaryCrossEntropy" in name and node.next_functions[0][0] is None:
            return "targets"
        # A layer adds its bias to three dimensions, after the product.
        if name == "AddBackward0" and any(
            type(one) is ACCUMULATE_GRAD for one, _ in _below(node)
        ):
            name = "AddmmBackward0"
        if name not in _SAME:
            way.append(name.partition("Backward")[0])
        node = _only_below(node)
    below = "/".join(way)
    given = _GIVEN_PROBABILITIES.match(below)
    if _GIVEN_LOGITS.match(below):
        return "logits"
    return given[6] if given else ""


def _factors_below(node: Any) -> list[Any]:
    """Return what is multiplied in the first matrix product below; nothing where more than scalings is in between."""
    waiting = [node.next_functions[0][0]]
    for _ in range(_MOST_SCALINGS):
        if not waiting:
            break
        below = waiting.pop()
        name = type(below).__name__
        sides = [side for side, _ in getattr(below, "next_functions", ())]
        if name == "MmBackward0":
            return sides
        if name in _SCALINGS:
            waiting += sides
    return []


def _is_weight(node: Any) -> bool:
    """Return whether this is a parameter, or one that is transposed."""
    if type(node).__name__ in _TURNED:
        node = node.next_functions[0][0]
    return node is None or type(node) is ACCUMULATE_GRAD


def _put_factor(term: Details, power: int, value: float) -> None:
    term["factor"] *= _raised(value, power)


def _if_finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _put_elements(term: Details, value: float) -> None:
    """Note how many elements there are, as a sum of weights; NaN where some of these are negative."""
    if math.isnan(value):
        term["unknown"] = _SIGNED
    else:
        term["elements"] = value + (term["elements"] or 0)


def _size(node: Any, slot: str) -> int:
    """Return how many elements what a node saved has, which a tensor of any type or place tells."""
    tensor = held(getattr(node, slot, None))
    # Another type's might run code of the user's.
    if tensor is None or type(tensor) not in PLAIN:
        raise _UnreadableError(_PACKED)
    return tensor.numel()


def _linear(node: Any, name: str, factor: _Factor) -> _Below:
    """Return what is below an operation that scales, adds up or passes on losses."""
    first = _below(node)[0][0] if node.next_functions else None
    if name in _SAME:
        return [(first, factor)]
    if name in _NEGATED:
        return [(first, (*factor, _Constant(-1)))]
    if name in _TWO_SIDES:
        return _two_sides(node, name, factor)
    raise _UnreadableError(_why(node, name))


def _two_sides(node: Any, name: str, factor: _Factor) -> _Below:
    alpha = getattr(node, "_saved_alpha", 1)
    # `torch.rsub(a, b)` is b - alpha * a.
    signs = {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1)}
    of_sides = signs[name.partition("Backward")[0]]
    below = []
    for (side, _), sign in zip(_below(node), of_sides, strict=False):
        if side is not None:
            signed = factor if sign == 1 else (*factor, _Constant(sign))
            below.append((side, signed))
    return below


def _why(node: Any, name: str) -> str:
    """Say why what is below this node cannot be read."""
    if type(node) is ACCUMULATE_GRAD:
        return _LEAF_ITSELF
    if "CompiledFunction" in name:
        return _COMPILED
    if isinstance(node, BackwardCFunction):
        return (
            f"{name} is an operation written in Python, whose reduction cannot be read"
        )
    return f"{name} is no sum, no mean and no constant factor"


# --- sums and means written out -------------------------------------------------------------------


class _Reduced:
    """What a sum or a mean reduces, past what only scales, masks or arranges its elements.

    `node` is where the loss proper begins, `count` how many elements are reduced there.
    """

    def __init__(self, node: Any, kind: str) -> None:
        self.node = node
        self.count = math.prod(map(int, node._saved_self_sym_sizes))
        self.factor: _Factor = ()
        self._kind = kind
        self._masks: list[Tensor] = []
        self._descend()

    def _descend(self) -> None:
        """Go down to where the loss proper begins."""
        below = _only_below(self.node)
        while below is not None:
            name = type(below).__name__
            if name in _JOINED or name in _CROSS_ENTROPIES:
                self.node = below
                return
            next_below = _only_below(below)
            if next_below is None or not self._pass_through(below, name):
                return
            self.node, below = below, next_below

    def _pass_through(self, node: Any, name: str) -> bool:
        """Take note of what this operation does to elements; return whether that is scaling, masking or arranging."""
        if name in _REDUCING:
            return self._pass_reduction(node, _REDUCING[name])
        if name in _POWERS:
            return self._pass_scale(node, name)
        if name in _MASKED:
            return self._pass_mask(node, name)
        return name in _ELEMENTWISE and getattr(node, "_saved_alpha", 1) == 1

    def _pass_reduction(self, node: Any, kind: str) -> bool:
        sizes = list(map(int, node._saved_self_sym_sizes))
        if kind == self._kind:
            self.count = math.prod(sizes)
            return True
        left = node._input_metadata[0].shape
        # The other way over each sample makes that sample's loss; over the batch, it makes losses of it.
        if list(left[:1]) != sizes[:1]:
            raise _UnreadableError(_NESTED)
        return False

    def _pass_scale(self, node: Any, name: str) -> bool:
        constant = _constant(node, name)
        if not isinstance(constant, Tensor) or constant.numel() == 1:
            inside = self._kind == "mean"
            self.factor += (_Constant(_number(constant), _POWERS[name], inside),)
            return True
        if name == "MulBackward0":
            self._masks.append(constant)
            return True
        return False

    def _pass_mask(self, node: Any, name: str) -> bool:
        mask = held(getattr(node, _MASKED[name]))
        if mask is None:
            raise _UnreadableError(_PACKED)
        if node.next_functions[0][0] is None or not readable(mask):
            return False
        with torch.no_grad():
            self._masks.append(mask if name == "WhereBackward0" else ~mask)
        return True

    def parts(self) -> list[Any]:
        """Return the nodes of the losses that were stacked or joined for this reduction; none if there are none."""
        if type(self.node).__name__ not in _JOINED:
            return []
        joined = []
        for node, at in _below(self.node):
            if node is None or math.prod(node._input_metadata[at].shape) != 1:
                return []
            joined.append(node)
        if len(joined) != self.count:
            return []
        if self._masks:
            raise _UnreadableError(_NESTED)
        return joined

    def elements(self) -> Any:
        """Return how many elements a sum has: those that its masks let through, by what they weigh."""
        below = _only_below(self.node)
        if type(below).__name__ in _TWO_SIDES and any(map(_has_mask, _below(below))):
            raise _UnreadableError(_NESTED)
        if type(self.node).__name__ in _CROSS_ENTROPIES:
            self._masks.append(_counted_targets(self.node))
        if not self._masks:
            return self.count
        size = self._masks[0].numel()
        if (len(self._masks) > 1 and size != self.count) or not size:
            raise _UnreadableError(_NESTED)
        self._check_masks(size)
        with torch.no_grad():
            return _number(_sum_of_product(self._masks) * (self.count // size))

    def _check_masks(self, size: int) -> None:
        for mask in self._masks:
            if not readable(mask) or mask.dtype.is_complex or mask.numel() != size:
                raise _UnreadableError(_NESTED)


def _has_mask(side: tuple[Any, int]) -> bool:
    """Return whether one of two things that are added up is multiplied by a mask, past scalings."""
    node: Any = side[0]
    while node is not None:
        name = type(node).__name__
        if name in _MASKED:
            return True
        constant = _constant(node, name) if name in _POWERS else None
        if isinstance(constant, Tensor) and constant.numel() > 1:
            return name == "MulBackward0"
        if constant is None and name not in _SAME:
            return False
        node = _only_below(node)
    return False


def _sum_of_product(masks: list[Tensor]) -> Tensor:
    """Return the sum of the weights that masks are together; NaN where one is negative."""
    weights = masks[0].reshape(-1)
    for mask in masks[1:]:
        weights = weights * mask.reshape(-1)
    total = weights.sum()
    if weights.dtype is not torch.bool:
        total = torch.where(weights.min() < 0, math.nan, total)
    return total


def _counted_targets(node: Any) -> Tensor:
    """Return which targets of an unreduced cross entropy count."""
    target = held(node._raw_saved_target)
    if target is None or not readable(target):
        raise _UnreadableError(_PACKED)
    ignored = node._saved_ignore_index
    ignored -= (1 << 64) if ignored >= 1 << 63 else 0
    with torch.no_grad():
        counted: Tensor = target != ignored
    return counted


# --- what backward was called on ------------------------------------------------------------------


def describe_root(
    row: Backward,
    args: patches.Args,
    kwargs: patches.Kwargs,
) -> list[tuple[Details, Any]]:
    """Write into the row what `torch.autograd.backward` was called on, and how.

    Returns its terms, each with a node from which it was read.
    """
    call = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    retain = call.get("retain_graph")
    row.keeps = bool(call.get("create_graph") if retain is None else retain)
    for option in ("retain_graph", "create_graph"):
        if call.get(option):
            row.details[option] = True
    given = call.get("grad_tensors")
    if isinstance(given, list | tuple):
        given = next((each for each in given if each is not None), None)
    roots = call.get("tensors", ())
    if not isinstance(roots, list | tuple):
        roots = [roots]
    terms = _Terms(row)
    with torch._C.DisableTorchFunction():  # a subclass would be asked each question
        tensors = [root for root in roots if isinstance(root, Tensor)]
        row.nodes = [root.grad_fn for root in tensors if root.grad_fn is not None]
        if len(roots) == len(tensors) == 1:
            _describe_root(row, terms, roots[0], given)
        else:
            terms.add("", unknown=_START)
    return terms.begins


def _describe_root(row: Backward, terms: _Terms, root: Any, given: Any) -> None:
    single = root.numel() == 1
    if single:
        value = root if type(root) in PLAIN else plainly(local(root))
        row.take(_number(value), partial(setattr, row, "loss"))
    if not row.nodes:
        terms.add("", unknown=_LEAF_ITSELF)
        return
    node, _ = _past_identities(row.nodes[0], root.output_nr)
    name = type(node).__name__
    row.label = row.label or name
    if single and (given is None or _is_one(given)):
        terms.read(node)
    else:
        terms.add(name, unknown=_START)


def _is_one(given: Any) -> bool:
    """Return whether the gradient that backward was given is 1; one on a device is not waited for."""
    start = _number(given)
    return isinstance(start, float) and start == 1


# --- weights: those that no recording has, and old copies ------------------------------------------


def leaves_below(roots: Sequence[Any]) -> list[Any]:
    """Return the leaves that a backward from these nodes reaches."""
    nodes = nodes_below(roots)
    return [node.variable for node in nodes if type(node) is ACCUMULATE_GRAD]


class CastCache:
    """The weights that steps have moved inside an autocast, which keeps their 16-bit copies until it is left."""

    def __init__(self) -> None:
        # The id of each weight, and the number of the first node made after its last step.
        self._moved: dict[int, int] = {}
        self._searches = 0

    def note_step(self, weights: Iterable[Any]) -> None:
        """Note that a step has moved these weights, if an autocast is open that keeps copies."""
        inside = torch._C._is_any_autocast_enabled()
        if inside and torch.is_autocast_cache_enabled():
            now = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            self._moved |= dict.fromkeys(map(id, weights), now)

    def old_weight(self, roots: Sequence[Any]) -> Any:
        """Return a weight of which a forward after a step read the copy from before it; None where there is none."""
        if not self._moved or self._searches >= _SEARCHES:
            return None
        self._searches += 1
        for node in nodes_below(roots):
            for below, _ in node.next_functions:
                weight = self._copied(below)
                moved = self._moved.get(id(weight), 0)
                if moved and below._sequence_nr() < moved <= node._sequence_nr():
                    return weight
        return None

    @staticmethod
    def _copied(node: Any) -> Any:
        """Return the weight of which a node is the copy; None where it is not one."""
        if type(node).__name__ != "ToCopyBackward0":
            return None
        return getattr(node.next_functions[0][0], "variable", None)
