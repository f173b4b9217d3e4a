"""Read from the graph which losses a backward starts from: reduction, number of elements, constant factor.

A term is a reduced loss under the root: which reduction, over how many elements, times which constant. It is read from
what the graph's nodes saved, without unpacking it: no node runs, no user code does, and no device is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from accumviz.recorder import patches
from accumviz.recorder.columns import Backward, Row
from accumviz.recorder.distributed import local
from accumviz.recorder.memory import held
from accumviz.recorder.transfer import PLAIN, plainly, readable, unseen

# A sum of more losses than this, or one of more operations, is not taken apart further.
_MOST_TERMS, _MOST_NODES = 64, 512
# A mask is counted up to so many elements: more would cost a step what the loss itself does.
_LARGEST_MASK = 1 << 22
_REDUCTIONS = ("none", "mean", "sum")
_SIGNED = "it is summed with weights of which some are negative"
_ARGUMENTS = (
    "tensors",
    "grad_tensors",
    "retain_graph",
    "create_graph",
    "grad_variables",
    "inputs",
)
_LEAF = "torch::autograd::AccumulateGrad"
_LEAF_ITSELF = "it is a parameter itself, and no loss"
_GIVEN = "backward was given a gradient to start from"
_SEVERAL = "backward started from several numbers, or from an edge of the graph"
_MORE = f"the root adds up more than {_MOST_TERMS} losses"
_NOT_READ = "a constant that it is multiplied or divided by cannot be read"
_PACKED = "what it saved was packed away by a hook, or freed"
_PRODUCT = "it is a product of two things that both have gradients"
_QUOTIENT = "it is divided by something that has a gradient"
_PICKED = "it is one element, picked from a tensor of several"
_NO_SIZE = "the size of what it reduces is not known"
_BATCH_FIRST = "its batch was reduced before, in another way"
_WEIGHTED_PARTS = "it adds up stacked losses, each with a weight of its own"
_WEIGHTED_SUMS = "it is summed with weights before and after a first sum"
_MASK = "it is summed under a mask that is too large to be counted, or cannot be read"


def _variants(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}Backward{n}" for name in names for n in range(4))


_ALIAS = "AliasBackward0"
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
_ELEMENTWISE = (*_SAME, *_NEGATED, *_variants("Add", "Sub"))
# The power in which a node's constant operand enters; of some, it is a number and no tensor.
_POWERS = {"MulBackward0": 1, "DivBackward0": -1, "MulBackward1": 1, "DivBackward1": -1}
_WITH_NUMBER = ("MulBackward1", "DivBackward1")
_REDUCING = {
    **dict.fromkeys(_variants("Sum"), "sum"),
    **dict.fromkeys(_variants("Mean"), "mean"),
}
_JOINED = ("StackBackward0", "CatBackward0", "GatherBackward")
_MASKED = {
    "MaskedFillBackward0": "_raw_saved_mask",
    "WhereBackward0": "_raw_saved_condition",
}
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


class _UnreadableError(Exception):
    """The reason for which a term cannot be read."""


# --- nodes ----------------------------------------------------------------------------------------

# By the type of a node, its name; a class per user function, or per compilation, is not kept.
_names: dict[type, str] = {}


def _name_of(node: Any) -> str:
    """Return what autograd calls this node."""
    kind = type(node)
    if kind in _names:
        return _names[kind]
    name: str = node.name()
    if kind.__module__ == "builtins" and kind.__name__ == name:
        _names[kind] = name
    return name


def _only_parent(node: Any) -> Any:
    """Return the one node below this one; None where there is none, or several."""
    parents = [fn for fn, _ in node.next_functions if fn is not None]
    return parents[0] if len(parents) == 1 else None


def _operand(node: Any, name: str) -> Any:
    """Return the constant operand of a product or a quotient, of which one side has a gradient."""
    if name in _WITH_NUMBER:
        return getattr(node, "_saved_other", None)
    first = node.next_functions[0][0] is not None
    if not first and _POWERS[name] < 0:
        return None  # a constant divided by a loss scales nothing
    raw = getattr(node, "_raw_saved_other" if first else "_raw_saved_self", None)
    return held(raw)


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
    if not patches.scalers or not isinstance(value, torch.Tensor):
        return False
    for scaler in patches.scalers:
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, torch.Tensor) and scale.data_ptr() == value.data_ptr():
            return True
    return False


def _sizes_reduced(node: Any) -> list[int] | None:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return None if sizes is None else [int(size) for size in sizes]


class Factor(NamedTuple):
    """Everything that a loss is multiplied by.

    `known` is the product of the constants that are numbers, `each` these constants, `late` those on a device, with
    their powers. `divisor` is the product of those by which it is divided. `own` is the product of those inside a
    mean, which cannot be told from the loss itself, as in half a square. `unknown` says why the factor is not known.
    """

    known: float = 1.0
    late: tuple[tuple[int, torch.Tensor], ...] = ()
    unknown: str = ""
    each: tuple[float, ...] = ()
    divisor: float = 1.0
    own: float = 1.0

    def times(self, constant: Any, power: int, *, inside: bool = False) -> Factor:
        """Return this factor times one more constant, or (power -1) divided by it; `inside` a mean it is `own`."""
        if constant is None:
            return self._replace(unknown=_NOT_READ)
        if isinstance(constant, torch.Tensor):
            own = math.nan if inside else self.own
            return self._replace(late=(*self.late, (power, constant)), own=own)
        value = _raised(constant, power)
        return self._replace(
            known=self.known * value,
            each=self.each if abs(value) == 1 else (*self.each, value),
            divisor=self.divisor if power > 0 else self.divisor * constant,
            own=self.own * value if inside else self.own,
        )


_ONE = Factor()
_Below = list[tuple[Any, Factor]]


# --- terms ----------------------------------------------------------------------------------------


class _Terms:
    """The losses below a backward's roots, as they are found."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._terms: list[dict[str, Any]] = row.details.setdefault("terms", [])

    def read(self, node: Any, name: str, factor: Factor = _ONE) -> None:
        """Add the losses below this node, times a factor, from the first to the last."""
        waiting, visited = [(node, name, factor)], 0
        while waiting:
            node, name, factor = waiting.pop()
            visited += 1
            if len(self._terms) >= _MOST_TERMS or visited > _MOST_NODES:
                self.add(name, factor, unknown=_MORE)
                return
            try:
                for below, times in reversed(self._visit(node, name, factor)):
                    waiting.append((below, _name_of(below), times))
            except _UnreadableError as why:
                self.add(name, factor, unknown=str(why))

    def add(
        self,
        op: str,
        factor: Factor,
        reduction: str = "",
        elements: Any = None,
        unknown: str = "",
    ) -> dict[str, Any]:
        """Add a term; numbers on a device are put into it when they have arrived."""
        late = isinstance(elements, torch.Tensor)
        if isinstance(elements, float) and math.isnan(elements):
            elements, unknown = None, _SIGNED
        term = {
            "op": op,
            "reduction": reduction,
            "elements": 1 if late else elements,
            "factor": None if factor.unknown else factor.known,
            "unknown": unknown or factor.unknown,
        }
        self._terms.append(term)
        if late:
            self._row.take(elements, partial(_put_elements, term))
        if not factor.unknown:
            for power, constant in factor.late:
                self._row.take(constant, partial(_put_factor, term, power))
            _note_constants(term, factor)
        return term

    def _visit(self, node: Any, name: str, factor: Factor) -> _Below:
        """Add the loss that this node is, or return what is added up below it, each with its factor."""
        if name in _CROSS_ENTROPIES:
            self._add_cross_entropy(node, name, factor)
            return []
        if name in _OTHER_LOSSES:
            size = _size(node, "_raw_saved_self")
            self.add(name, factor, _REDUCTIONS[node._saved_reduction], size)
            return []
        if name in _REDUCING:
            return self._visit_reduction(node, name, factor)
        return _linear(node, name, factor)

    def _add_cross_entropy(self, node: Any, name: str, factor: Factor) -> None:
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

    def _visit_reduction(self, node: Any, name: str, factor: Factor) -> _Below:
        """Add a sum or a mean, or return the losses that were stacked for it."""
        sizes = _sizes_reduced(node)
        if sizes is None:
            raise _UnreadableError(_NO_SIZE)
        below = node.next_functions[0][0]
        if not sizes and _name_of(below) in (*_CROSS_ENTROPIES, *_OTHER_LOSSES):
            return [
                (below, factor)
            ]  # of one number, as in `loss.mean()` for several GPUs
        kind = _REDUCING[name]
        reduced = _Reduced(node, kind, math.prod(sizes), factor)
        count, factor = reduced.count, reduced.factor
        if reduced.over_batch is not None:
            # What is left of a sample is its own: a sum over the batch is one of losses that are means, then.
            left = count if kind == "mean" else 1
            factor = factor._replace(known=factor.known / left)
            return [(reduced.over_batch, factor)]
        parts = reduced.parts()
        if parts:
            each = factor.times(count, -1) if kind == "mean" else factor
            return [(part, each) for part in parts]
        if kind == "mean":  # each of the numbers that it leaves is one over its part
            numbers = math.prod(node._input_metadata[0].shape)
            self.add(name, factor, kind, count // max(numbers, 1))
        else:
            self.add(name, factor, kind, reduced.elements())
        return []


def _note_constants(term: dict[str, Any], factor: Factor) -> None:
    """Write into a term what its factor is made of: None where that is on a device, or not finite."""
    if factor.divisor != 1 and math.isfinite(factor.divisor):
        term["divisor"] = factor.divisor
    if abs(factor.own) != 1:
        term["own"] = factor.own if math.isfinite(factor.own) else None
    if len(factor.each) + len(factor.late) > 1:
        read = not factor.late and all(map(math.isfinite, factor.each))
        term["constants"] = list(factor.each) if read else None


def _size(node: Any, slot: str) -> int:
    """Return how many elements what a node saved has, which a tensor of any type or place tells."""
    tensor = held(getattr(node, slot, None))
    # Another type's might run code of the user's.
    if tensor is None or type(tensor) not in PLAIN:
        raise _UnreadableError(_PACKED)
    return tensor.numel()


def _linear(node: Any, name: str, factor: Factor) -> _Below:
    """Return what is below an operation that scales, adds up or passes on losses."""
    if name in _SAME:
        return [(node.next_functions[0][0], factor)]
    if name in _NEGATED:
        return [(node.next_functions[0][0], factor.times(-1, 1))]
    if name in _TWO_SIDES:
        return _two_sides(node, name, factor)
    if name in _POWERS:
        return _scaled(node, name, factor)
    if name == "SelectBackward0":
        if math.prod(node._saved_self_sym_sizes) != 1:
            raise _UnreadableError(_PICKED)
        return [(node.next_functions[0][0], factor)]
    raise _UnreadableError(_why(node, name))


def _two_sides(node: Any, name: str, factor: Factor) -> _Below:
    alpha = getattr(node, "_saved_alpha", 1)
    # `torch.rsub(a, b)` is b - alpha * a.
    signs = {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1)}
    of_sides = signs[name.partition("Backward")[0]]
    below = []
    for (side, _), sign in zip(node.next_functions, of_sides, strict=False):
        if side is not None:
            below.append((side, factor.times(sign, 1)))
    return below


def _scaled(node: Any, name: str, factor: Factor) -> _Below:
    parent = _only_parent(node)
    if parent is None:
        raise _UnreadableError(_PRODUCT)
    if _POWERS[name] < 0 and node.next_functions[0][0] is None:
        raise _UnreadableError(_QUOTIENT)
    constant = _operand(node, name)
    if _is_scale(constant):
        return [(parent, factor)]
    return [(parent, factor.times(_number(constant), _POWERS[name]))]


def _why(node: Any, name: str) -> str:
    """Say why what is below this node cannot be read."""
    if name == _LEAF:
        return _LEAF_ITSELF
    if "CompiledFunction" in name:
        return "it was computed inside torch.compile, which keeps one operation for all"
    if isinstance(node, BackwardCFunction):
        return (
            f"{name} is an operation written in Python, whose reduction cannot be read"
        )
    return f"{name} is no sum, no mean and no constant factor"


# --- sums and means written out -------------------------------------------------------------------


class _Reduced:
    """What a sum or a mean reduces, past what only scales, masks or arranges its elements.

    `node` is where the loss proper begins, `count` how many elements are reduced there. `over_batch` is what reduced
    the first dimension, the batch's, before, in the other way.
    """

    def __init__(self, node: Any, kind: str, count: int, factor: Factor) -> None:
        self.node, self.count, self.factor = node, count, factor
        self.over_batch: Any = None
        self._kind = kind
        self._masks: list[torch.Tensor] = []
        self._masks_sums = False  # what was masked are sums, as of the classes of a row
        while self._descend():
            pass

    def _descend(self) -> bool:
        """Go one operation down; return whether the loss proper may begin further below."""
        below = _only_parent(self.node)
        if below is None:
            return False
        name = _name_of(below)
        if name in _JOINED or name in _CROSS_ENTROPIES:
            self.node = below
            return False
        if _only_parent(below) is None or not self._passes(below, name):
            return False
        self.node = below
        return True

    def _passes(self, node: Any, name: str) -> bool:
        """Return whether this operation does nothing else to elements, and take note of what it does."""
        if name in _REDUCING:
            return self._passes_reduction(node, _REDUCING[name])
        if name in _ELEMENTWISE:
            alpha = getattr(node, "_saved_alpha", 1)
            if alpha != 1 and node.next_functions[0][0] is None:
                self._scale(float(alpha), 1)
            return True
        if name in _POWERS:
            return self._passes_scale(node, name)
        if name in _MASKED:
            return self._passes_mask(node, name)
        return False

    def _passes_reduction(self, node: Any, kind: str) -> bool:
        sizes = _sizes_reduced(node)
        if sizes is None:
            raise _UnreadableError(_NO_SIZE)
        if kind == self._kind:
            self.count = math.prod(sizes)
            self._masks_sums = bool(self._masks)
            return True
        left = node._input_metadata[0].shape
        if list(left[:1]) != sizes[:1]:
            if self._masks or math.prod(left) != self.count:
                raise _UnreadableError(_BATCH_FIRST)
            self.over_batch = node
        return False

    def _scale(self, constant: Any, power: int) -> None:
        inside = self._kind == "mean"
        self.factor = self.factor.times(constant, power, inside=inside)

    def _passes_scale(self, node: Any, name: str) -> bool:
        constant = _operand(node, name)
        if not isinstance(constant, torch.Tensor) or constant.numel() == 1:
            self._scale(_number(constant), _POWERS[name])
            return True
        if name == "MulBackward0":
            self._mask(constant)
            return True
        return False

    def _mask(self, mask: torch.Tensor) -> None:
        if self._masks_sums:
            raise _UnreadableError(_WEIGHTED_SUMS)
        self._masks.append(mask)

    def _passes_mask(self, node: Any, name: str) -> bool:
        mask = held(getattr(node, _MASKED[name]))
        if mask is None or node.next_functions[0][0] is None or not readable(mask):
            return False
        with torch.no_grad():
            self._mask(mask if name == "WhereBackward0" else ~mask)
        return True

    def parts(self) -> list[Any]:
        """Return the losses that were stacked or joined for this reduction; none where there are no such."""
        if _name_of(self.node) not in _JOINED or not self.count:
            return []
        joined = [(fn, at) for fn, at in self.node.next_functions if fn is not None]
        shapes = [fn._input_metadata[at].shape for fn, at in joined]
        single = all(math.prod(shape) == 1 for shape in shapes)
        if not single or len(self.node.next_functions) != self.count:
            return []
        if self._masks:
            raise _UnreadableError(_WEIGHTED_PARTS)
        return [fn for fn, _ in joined]

    def elements(self) -> Any:
        """Return how many elements a sum has: those that its masks let through, by what they weigh."""
        if _name_of(self.node) in _CROSS_ENTROPIES:
            self._mask(_counted_targets(self.node))
        if not self._masks:
            return self.count
        for mask in self._masks:
            if not readable(mask) or mask.dtype.is_complex:
                raise _UnreadableError(_MASK)
        sizes = {mask.numel() for mask in self._masks}
        size = max(sizes)
        alone = len(self._masks) == 1
        if not 0 < size <= _LARGEST_MASK or not (alone or sizes == {self.count}):
            raise _UnreadableError(_MASK)
        with torch.no_grad():
            return _number(self._weigh(self.count // size))

    def _weigh(self, repeated: int) -> torch.Tensor:
        """Return the sum of what each element weighs; NaN where some weigh less than nothing."""
        weights = self._masks[0].reshape(-1)
        for other in self._masks[1:]:
            weights = weights * other.reshape(-1)
        total = weights.sum() * repeated
        if weights.dtype is torch.bool:
            return total
        return torch.where(weights.min() < 0, math.nan, total)


def _counted_targets(node: Any) -> torch.Tensor:
    """Return which targets of an unreduced cross entropy count."""
    target = held(node._raw_saved_target)
    if not readable(target) or target.numel() > _LARGEST_MASK:  # type: ignore[union-attr]
        raise _UnreadableError(_MASK)
    ignored = node._saved_ignore_index
    ignored -= (1 << 64) if ignored >= 1 << 63 else 0
    with torch.no_grad():
        counted: torch.Tensor = target != ignored
    return counted


# --- what backward was called on ------------------------------------------------------------------


def describe_root(row: Backward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into the row what `torch.autograd.backward` was called on, and how."""
    # A mode (a FLOP counter) would be handed the constant of `loss / 2` as a plain 2, and cannot take its item().
    unseen(_describe_call, row, dict(zip(_ARGUMENTS, args, strict=False)) | kwargs)


def _describe_call(row: Backward, call: dict[str, Any]) -> None:
    retain, create = call.get("retain_graph"), call.get("create_graph")
    row.keeps = bool(create if retain is None else retain)
    if retain:
        row.details["retain_graph"] = True
    if create:
        row.details["create_graph"] = True
    inputs = call.get("inputs")
    if inputs is not None:
        several = isinstance(inputs, list | tuple | dict)
        row.details["inputs"] = len(inputs) if several else 1
    root, given = call.get("tensors", ()), call.get("grad_tensors")
    with torch._C.DisableTorchFunction():  # a subclass would be asked each question
        # An edge of the graph is a tuple that has a node.
        if not isinstance(root, list | tuple) or hasattr(root, "node"):
            _describe_one(row, root, given)
        elif len(root) == 1:
            if isinstance(given, list | tuple) and len(given) == 1:
                given = given[0]
            _describe_one(row, root[0], given)
        else:
            _describe_several(row, root, given)


def _describe_several(row: Backward, roots: Any, given: Any) -> None:
    """Describe several losses: they are as good as their sum."""
    row.details["roots"] = len(roots)
    nodes = [_node(root) for root in roots]
    row.nodes = tuple(node for node in nodes if node is not None)
    single = all(type(root) is torch.Tensor and root.numel() == 1 for root in roots)
    whole = single and len(row.nodes) == len(roots) > 0
    terms = _Terms(row)
    if not whole or given is not None or patches.scalers:
        why = f"backward started from {len(roots)} roots at once"
        terms.add("", _ONE._replace(unknown=why))
        return
    for node in row.nodes:
        terms.read(node, _name_of(node))


def _node(root: Any) -> Any:
    """Return the node of a tensor, or of an edge of the graph."""
    if isinstance(root, torch.Tensor):
        return root.grad_fn
    return getattr(root, "node", None)


def _describe_one(row: Backward, root: Any, given: Any) -> None:
    node = _node(root)
    whole = isinstance(root, torch.Tensor) and root.numel() == 1
    if whole and not root.is_complex():
        value = plainly(local(root))
        if readable(value):
            row.take(value, partial(setattr, row, "loss"))
    elif isinstance(root, torch.Tensor) and not whole:
        row.details["root_shape"] = list(root.shape)
    if node is None:
        _Terms(row).add("", _ONE._replace(unknown=_LEAF_ITSELF))
        return
    row.nodes = (node,)
    node, name, factor = _walk_scale(row, node)
    row.details["root"] = name
    row.label = row.label or name
    terms = _Terms(row)
    if given is not None:
        start = _number(given) if whole and not _is_scale(given) else None
        if not isinstance(start, float):
            terms.add(name, _ONE._replace(unknown=_GIVEN))
            return
        # `loss.backward(torch.tensor(1 / K))`
        row.scale *= start
        factor = factor.times(start, 1)
    if whole:
        terms.read(node, name, factor)
    else:
        terms.add(name, _ONE._replace(unknown=_SEVERAL))


def _walk_scale(row: Backward, node: Any) -> tuple[Any, str, Factor]:
    """Multiply the constants between the root and the loss proper: `loss / 4` has scale 1/4.

    The gradient scaler's factor is no part of it: `amp_scale` keeps that one. Returns the node
    that made the loss proper, its name, and what it is multiplied by.
    """
    name, factor = _name_of(node), _ONE
    while name in _POWERS or name == _ALIAS:
        parent = _only_parent(node)
        if parent is None:
            break
        above = _name_of(parent)
        if name != _ALIAS:
            constant = _operand(node, name)
            value, power = _number(constant), _POWERS[name]
            # A constant times a parameter is a loss, not a scaled one.
            if value is None or above == _LEAF:
                break
            if _is_scale(constant):
                _note(row, value, partial(row.details.__setitem__, "amp_scale"))
            else:
                _note(row, value, partial(_scale, row, power))
                factor = factor.times(value, power)
        node, name = parent, above
    return node, name, factor


def _note(row: Backward, value: Any, put: Callable[[float], None]) -> None:
    """Hand a number to `put`: later, if it is on a device."""
    if isinstance(value, torch.Tensor):
        row.take(value, put)
    else:
        put(value)


def _scale(row: Backward, power: int, value: float) -> None:
    row.scale *= _raised(value, power)


def _put_factor(term: dict[str, Any], power: int, value: float) -> None:
    if term["factor"] is not None:
        term["factor"] *= _raised(value, power)


def _put_elements(term: dict[str, Any], value: float) -> None:
    """Note how many elements there are, as a sum of weights; NaN where some of these are negative."""
    term["elements"] = value
    if math.isnan(value):
        term["elements"], term["unknown"] = None, _SIGNED


def _raised(constant: float, power: int) -> float:
    """Return a constant, or (power -1) one divided by it.

    >>> _raised(4.0, -1), _raised(0.0, -1)
    (0.25, inf)
    """
    if power > 0:
        return constant
    return 1 / constant if constant else math.inf
