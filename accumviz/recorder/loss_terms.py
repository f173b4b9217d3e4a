"""Read from the graph which losses a backward starts from: reduction, number of elements, constant factor.

A term is a reduced loss under the root: which reduction, over how many elements, times which constant. It is read from
what the graph's nodes saved, without unpacking it: no node runs, no user code does, and no device is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from accumviz.recorder import patches
from accumviz.recorder.distributed import local
from accumviz.recorder.memory import held
from accumviz.recorder.rows import Backward, Row, arrived, raised
from accumviz.recorder.transfer import PLAIN, plainly, readable

LEAF = "torch::autograd::AccumulateGrad"
# A sum of more losses than this, or one that hangs together by more operations, is not taken apart further.
_TERMS, _NODES = 64, 512
# Of so many constants before a loss each is told.
_CONSTANTS = 8
# A mask is counted up to so many elements: more would cost a step what the loss itself does.
_MASK = 1 << 22
_ALIAS = "AliasBackward0"
_REDUCTIONS = ("none", "mean", "sum")
LEAF_ITSELF = "it is a parameter itself, and no loss"
_NOT_READ = "a constant that it is multiplied or divided by cannot be read"
_TENSOR, _NUMBER = torch.Tensor, (int, float)

# By the type of a node, its name; a class per user function, or per compilation, is not kept.
_names: dict[type, str] = {}


class Factor(NamedTuple):
    """What a loss is multiplied by: the constants that are known, their product and each; and those on a device.

    `divisor` is the product of those by which it is divided, `own` that of those inside a mean, which nobody can tell
    from the loss itself: half a square.
    """

    known: float = 1.0
    late: tuple[tuple[int, torch.Tensor], ...] = ()
    unknown: str = ""
    each: tuple[float, ...] = ()
    divisor: float = 1.0
    own: float = 1.0

    def times(self, constant: Any, power: int) -> Factor:
        """Likewise, times one more constant, or (power -1) divided by it."""
        if constant is None:
            return self._replace(unknown=_NOT_READ)
        if isinstance(constant, torch.Tensor):
            return self._replace(late=(*self.late, (power, constant)))
        value = raised(constant, power)
        plain = abs(value) == 1 or len(self.each) >= _CONSTANTS
        each = self.each if plain else (*self.each, value)
        divisor = self.divisor if power > 0 else self.divisor * constant
        return self._replace(known=self.known * value, each=each, divisor=divisor)

    def times_inside(self, constant: Any, power: int) -> Factor:
        """Note a constant inside a mean; one that is not read yet is NaN."""
        number = isinstance(constant, float)
        return self._replace(
            own=self.own * (raised(constant, power) if number else math.nan)
        )


ONE = Factor()


def name_of(node: Any) -> str:
    """What autograd calls this node."""
    known = _names.get(type(node))
    if known is not None:
        return known
    name: str = node.name()
    if type(node).__module__ == "builtins" and type(node).__name__ == name:
        _names[type(node)] = name
    return name


def operand(node: Any, name: str) -> Any:
    """The constant operand of a Mul or Div, as it was saved for the other one's gradient; None where there is none."""
    functions = node.next_functions
    if name in _WITH_NUMBER:
        return getattr(node, "_saved_other", None)
    # A constant divided by a loss scales nothing.
    for slot, position in (("_raw_saved_other", 0), ("_raw_saved_self", 1))[
        : 2 if SCALING[name] > 0 else 1
    ]:
        if (
            len(functions) > position
            and functions[position][0] is not None
            and all(
                fn is None for fn, _ in functions[:position] + functions[position + 1 :]
            )
        ):
            raw = getattr(node, slot, None)
            return None if raw is None else held(raw)
    return None


SCALING = {"MulBackward0": 1, "DivBackward0": -1, "MulBackward1": 1, "DivBackward1": -1}
_WITH_NUMBER = ("MulBackward1", "DivBackward1")


def number(found: Any) -> Any:
    """A number, or the tensor that is to be sent from its device; None for what cannot be read or is not real."""
    if isinstance(found, _NUMBER):
        return float(found)
    if type(found) not in PLAIN or found.numel() != 1 or found.dtype.is_complex:
        return None
    if not readable(found):
        return None
    return float(found.item()) if found.is_cpu else found


def is_scale(found: Any) -> bool:
    """Whether this is what a gradient scaler multiplies losses by."""
    if not isinstance(found, torch.Tensor):
        return False
    scales = (getattr(scaler, "_scale", None) for scaler in patches.scalers)
    return any(
        isinstance(s, torch.Tensor) and s.data_ptr() == found.data_ptr() for s in scales
    )


# --- the walk -------------------------------------------------------------------------------------


def describe_terms(row: Row, node: Any, name: str, factor: Factor = ONE) -> None:
    """Write into the row which losses are below this node, times `factor`: after those of other roots."""
    terms: list[dict[str, Any]] = row.details.setdefault("terms", [])
    work, visited = [(node, name, factor)], 0
    while work:
        node, name, factor = work.pop()
        visited += 1
        if len(terms) >= _TERMS or visited > _NODES:
            # What was read so far stays; that there is more is the last thing said.
            more = f"the root adds up more than {_TERMS} losses"
            _add(row, terms, name, factor, "", None, more)
            return
        if name in _LOSSES:
            _add(row, terms, name, factor, *_LOSSES[name](node))
            _note_class_weights(terms[-1], node)
            continue
        below = _take_apart(row, terms, node, name, factor)
        if isinstance(below, str):
            _add(row, terms, name, factor, "", None, below)
        else:
            work += [(fn, name_of(fn), times) for fn, times in reversed(below)]


def _take_apart(
    row: Row, terms: list[dict[str, Any]], node: Any, name: str, factor: Factor
) -> Found:
    """Return what is added up below a node, each with its factor; or why that cannot be read."""
    if name in _LINEAR:
        return _LINEAR[name](node, factor)
    if name in SCALING:
        return _scaled(node, name, factor)
    if name in _REDUCING:
        return _reduced(row, terms, node, name, factor)
    return _why(node, name)


def unknown_root(row: Row, why: str, op: str = "") -> None:
    """Write into the row that what it started from cannot be taken apart."""
    row.details["terms"] = [_term(op, None, "", None, why)]


def _term(
    op: str, factor: float | None, reduction: str, elements: float | None, unknown: str
) -> dict[str, Any]:
    return {
        "op": op,
        "reduction": reduction,
        "elements": elements,
        "factor": factor,
        "unknown": unknown,
    }


def _add(
    row: Row,
    terms: list[dict[str, Any]],
    op: str,
    factor: Factor,
    reduction: str,
    elements: Any,
    unknown: str = "",
) -> None:
    known, late, lost = factor.known, factor.late, factor.unknown
    place = len(terms)
    if isinstance(elements, torch.Tensor):
        terms.append(_term(op, None if lost else known, reduction, 1, unknown or lost))
        row.take(("term", (place, "elements", 1)), elements)
    else:
        terms.append(
            _term(op, None if lost else known, reduction, elements, unknown or lost)
        )
    if not lost:
        for power, constant in late:
            row.take(("term", (place, "factor", power)), constant)
        _tell(terms[place], factor)


def _tell(term: dict[str, Any], factor: Factor) -> None:
    """Of a factor that is a product, its constants, None where some are on a device or not finite; and products."""
    each, late = factor.each, factor.late
    if factor.divisor != 1 and math.isfinite(factor.divisor):
        term["divisor"] = factor.divisor
    if abs(factor.own) != 1:
        term["own"] = factor.own if math.isfinite(factor.own) else None
    if len(each) + len(late) > 1:
        term["constants"] = (
            None if late or not all(map(math.isfinite, each)) else list(each)
        )


Found = list[tuple[Any, Factor]] | str


def _why(node: Any, name: str) -> str:
    """Why what is below this node cannot be read."""
    if name == LEAF:
        return LEAF_ITSELF
    if "CompiledFunction" in name:
        return "it was computed inside torch.compile, which keeps one operation for all"
    if isinstance(node, BackwardCFunction):
        return (
            f"{name} is an operation written in Python, whose reduction cannot be read"
        )
    return f"{name} is no sum, no mean and no constant factor"


def _scaled(node: Any, name: str, factor: Factor) -> Found:
    parents = [fn for fn, _ in node.next_functions if fn is not None]
    if len(parents) != 1:
        return "it is a product of two things that both have gradients"
    if SCALING[name] < 0 and node.next_functions[0][0] is None:
        return "it is divided by something that has a gradient"
    found = operand(node, name)
    if patches.scalers and is_scale(found):
        return [(parents[0], factor)]
    return [(parents[0], factor.times(number(found), SCALING[name]))]


def _two_sides(node: Any, factor: Factor) -> Found:
    """Both sides of a sum or a difference, `alpha` before one of them."""
    alpha = getattr(node, "_saved_alpha", 1)
    # `torch.rsub(a, b)` is b - alpha * a.
    signs = {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1)}
    kind = name_of(node).partition("Backward")[0]
    return [
        (below, factor.times(sign, 1))
        for (below, _), sign in zip(node.next_functions, signs[kind], strict=False)
        if below is not None
    ]


def _negated(node: Any, factor: Factor) -> Found:
    return [(node.next_functions[0][0], factor.times(-1, 1))]


def _same(node: Any, factor: Factor) -> Found:
    return [(node.next_functions[0][0], factor)]


def _picked(node: Any, factor: Factor) -> Found:
    """One element: of one, or of scalars that were stacked."""
    below = node.next_functions[0][0]
    count = math.prod(node._saved_self_sym_sizes)
    if count == 1:
        return [(below, factor)]
    if name_of(below) == "StackBackward0" and len(below.next_functions) == count:
        chosen = below.next_functions[node._saved_index][0]
        return [] if chosen is None else [(chosen, factor)]
    return "it is one element, picked from a tensor of several"


def _variants(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}Backward{n}" for name in names for n in range(4))


_VIEWS = _variants(
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Alias",
)
_MOVES = _variants("Permute", "Transpose", "T")
_LINEAR: dict[str, Callable[[Any, Factor], Found]] = {
    **dict.fromkeys((*_VIEWS, *_MOVES, *_variants("Expand")), _same),
    **dict.fromkeys(_variants("Add", "Sub", "Rsub"), _two_sides),
    **dict.fromkeys(_variants("Neg"), _negated),
    "SelectBackward0": _picked,
}

# --- losses that torch reduces itself -------------------------------------------------------------

# A loss's reduction, its elements, and why they are not known.
_Read = tuple[str, Any, str]
_PACKED = "what it saved was packed away by a hook, or freed"


def _size(node: Any, slot: str) -> int | None:
    """How many elements what it saved has; a tensor of any type or place tells that."""
    raw = getattr(node, slot, None)
    tensor = None if raw is None else held(raw)
    # Another type's might run code of the user's.
    return tensor.numel() if tensor is not None and type(tensor) in PLAIN else None


def _loss(node: Any) -> _Read:
    reduction, size = _REDUCTIONS[node._saved_reduction], _size(node, "_raw_saved_self")
    return (reduction, size, "" if size is not None else _PACKED)


def _cross_entropy(node: Any) -> _Read:
    """Its elements are the targets that count, with the weights of their classes."""
    reduction = _REDUCTIONS[node._saved_reduction]
    if reduction == "none":
        size = _size(node, "_raw_saved_target")
        return reduction, size, "" if size is not None else _PACKED
    raw = node._raw_saved_total_weight
    total = raw.data
    if type(total) is not _TENSOR:
        total = held(raw)
    elements = None if total is None else number(total)
    return reduction, elements, "" if elements is not None else _PACKED


def _note_class_weights(term: dict[str, Any], node: Any) -> None:
    """Say so where a cross entropy counts its classes unequally."""
    weight = getattr(node, "_raw_saved_weight", None)
    if (
        term["op"] in _CROSS_ENTROPIES
        and weight is not None
        and held(weight) is not None
    ):
        term["class_weights"] = True


def _of_rows(node: Any) -> _Read:
    """Losses that have one number for each row of what they were given."""
    size = _size(node, "_raw_saved_target")
    given = None if size is None else held(node._raw_saved_self)
    rows = None if given is None else (given.shape[0] if given.dim() > 1 else 1)
    return _REDUCTIONS[node._saved_reduction], rows, "" if rows is not None else _PACKED


_LOSSES: dict[str, Callable[[Any], _Read]] = {
    **dict.fromkeys(_variants("NllLoss", "NllLoss2D"), _cross_entropy),
    **dict.fromkeys(_variants("MultiMarginLoss", "MultilabelMarginLoss"), _of_rows),
    **dict.fromkeys(
        _variants(
            "MseLoss",
            "L1Loss",
            "SmoothL1Loss",
            "HuberLoss",
            "BinaryCrossEntropy",
            "BinaryCrossEntropyWithLogits",
            "KlDiv",
            "SoftMarginLoss",
        ),
        _loss,
    ),
}

# --- sums and means written out -------------------------------------------------------------------

_REDUCING = {
    **dict.fromkeys(_variants("Sum"), "sum"),
    **dict.fromkeys(_variants("Mean"), "mean"),
}
_JOINED = ("StackBackward0", "CatBackward0", "GatherBackward")
_MANY = "it is summed under a mask that is too large to be counted, or cannot be read"


class _Reduced(NamedTuple):
    """What a sum or a mean reduces, past what only scales, masks or arranges its elements.

    `node` is where the loss proper begins, `elements` how many are reduced there.
    """

    node: Any
    name: str
    elements: int
    factor: Factor
    masks: list[torch.Tensor]


def _reduced(
    row: Row, terms: list[dict[str, Any]], node: Any, name: str, factor: Factor
) -> Found:
    """A sum or a mean: the term itself, or the losses that were stacked for it.

    Below it, constants are factors; a mask says how many elements a sum has, weights how much they weigh.
    """
    kind = _REDUCING[name]
    inner = _walk_down(node, name, kind, factor)
    if isinstance(inner, str):
        return inner
    at, below, count, factor, masks = inner
    first = None if masks else _reduced_first(at, count)
    if first is not None:
        # What is left of a sample is its own: a sum over the batch is one of losses that are means, then.
        kept = count if kind == "mean" else 1
        return [(first, factor._replace(known=factor.known / kept))]
    if below in _JOINED and len(at.next_functions) == count and count and _single(at):
        if masks:
            return "it adds up stacked losses, each with a weight of its own"
        each = factor.times(count, -1) if kind == "mean" else factor
        return [(fn, each) for fn, _ in at.next_functions if fn is not None]
    if kind == "mean":  # each of the numbers that it leaves is one over its part
        left = math.prod(node._input_metadata[0].shape)
        _add(row, terms, name, factor, kind, count // max(left, 1))
        return []
    if below in _CROSS_ENTROPIES and (counted := _counted_targets(at)) is not None:
        masks.append(counted)
    _add_sum(row, terms, name, factor, count, masks)
    return []


def _walk_down(node: Any, name: str, kind: str, factor: Factor) -> _Reduced | str:
    count = _counted(node)
    if count is None:
        return "the size of what it reduces is not known"
    masks: list[torch.Tensor] = []
    at, below, apart = node, name, False
    while (step := _below(at, below, kind)) is not None:
        at, passed, inner = step
        if isinstance(passed, torch.Tensor):
            if apart:
                return "it is summed with weights before and after a first sum"
            masks.append(passed)
        elif passed is not None:
            factor = factor.times(*passed)
            if kind == "mean":
                factor = factor.times_inside(*passed)
        if inner is not None:
            count, apart = inner, bool(masks)
        below = name_of(at)
    return _Reduced(at, below, count, factor, masks)


def _reduced_first(node: Any, count: int) -> Any:
    """What takes together the first dimension, the batch's, in another way than the `count` numbers that it leaves."""
    parents = [fn for fn, _ in node.next_functions if fn is not None]
    if (
        len(parents) != 1
        or name_of(parents[0]) not in _REDUCING
        or name_of(node) in _JOINED
    ):
        return None
    sizes = [int(size) for size in getattr(parents[0], "_saved_self_sym_sizes", ())]
    # Negative ones are told as what they are in 64 bits.
    found = getattr(parents[0], "_saved_dim", None) or range(len(sizes))
    dims = {
        (dim - (1 << 64) if dim >= 1 << 63 else dim) % max(len(sizes), 1)
        for dim in found
    }
    kept = math.prod(size for dim, size in enumerate(sizes) if dim not in dims)
    return parents[0] if 0 in dims and kept == count else None


def _single(node: Any) -> bool:
    """Whether each of the parts that are joined there is one number."""
    parts = [
        fn._input_metadata[place] for fn, place in node.next_functions if fn is not None
    ]
    return all(math.prod(part.shape) == 1 for part in parts)


def _counted(node: Any) -> int | None:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return None if sizes is None else math.prod(int(size) for size in sizes)


def _below(node: Any, name: str, kind: str) -> tuple[Any, Any, int | None] | None:
    """One step down from something that is reduced, past what only scales, masks or arranges its elements.

    Returns the node there, what it passed (a mask, a constant and its power, or None), and the size of
    what is reduced there if it is another; None where the loss proper begins.
    """
    parents = [fn for fn, _ in node.next_functions if fn is not None]
    if len(parents) != 1 or name in _JOINED or name in _CROSS_ENTROPIES:
        return None
    parent = parents[0]
    above = name_of(parent)
    if above in _JOINED or above in _CROSS_ENTROPIES:
        return parent, None, None
    if sum(fn is not None for fn, _ in parent.next_functions) != 1:
        return None
    if _REDUCING.get(above) == kind:
        return parent, None, _counted(parent)
    if above in _PASSED:
        alpha = getattr(parent, "_saved_alpha", 1)
        second = parent.next_functions[0][0] is None  # `alpha` is before the second
        scales = second and alpha != 1
        return parent, (float(alpha), 1) if scales else None, None
    if above in SCALING:
        return _below_scaling(parent, above)
    return _below_mask(parent, above) if above in _MASKED else None


def _below_scaling(node: Any, name: str) -> tuple[Any, Any, int | None] | None:
    constant = operand(node, name)
    if not isinstance(constant, torch.Tensor) or constant.numel() == 1:
        return node, (number(constant), SCALING[name]), None
    return (node, constant, None) if name == "MulBackward0" else None


def _below_mask(node: Any, name: str) -> tuple[Any, Any, int | None] | None:
    mask = held(getattr(node, _MASKED[name]))
    if mask is None or node.next_functions[0][0] is None:
        return None
    if type(mask) not in PLAIN or not readable(mask):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return node, mask if name == "WhereBackward0" else ~mask, None


_PASSED = (*_VIEWS, *_variants("Neg", "Sub", "Add"))
_MASKED = {
    "MaskedFillBackward0": "_raw_saved_mask",
    "WhereBackward0": "_raw_saved_condition",
}
_CROSS_ENTROPIES = _variants("NllLoss", "NllLoss2D")


def _counted_targets(node: Any) -> torch.Tensor | None:
    """Which targets of an unreduced cross entropy count."""
    target = held(node._raw_saved_target)
    ignored = node._saved_ignore_index
    ignored -= (1 << 64) if ignored >= 1 << 63 else 0
    if (
        target is None
        or type(target) not in PLAIN
        or not readable(target)
        or target.numel() > _MASK
    ):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        found: torch.Tensor = target != ignored
    return found


def _add_sum(
    row: Row,
    terms: list[dict[str, Any]],
    name: str,
    factor: Factor,
    count: int,
    masks: list[torch.Tensor],
) -> None:
    """A sum's elements are those that its masks let through; weights count as much as they weigh."""
    if not masks:
        _add(row, terms, name, factor, "sum", count)
        return
    if not _countable(masks, count):
        _add(row, terms, name, factor, "sum", None, _MANY)
        return
    repeated, place = count // masks[0].numel(), len(terms)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        weights = masks[0].reshape(-1)
        for other in masks[1:]:
            weights = weights * other.reshape(-1)
        total = weights.sum()
        lowest = None if weights.dtype is torch.bool else weights.min()
    _add(row, terms, name, factor, "sum", number(total))
    term = terms[place]
    term["elements"] *= repeated
    if lowest is not None:
        low = number(lowest)
        if isinstance(low, torch.Tensor):
            row.take(("term", (place, "lowest", 1)), low)
        else:
            arrived(term, "lowest", 1, low)


def _countable(masks: list[torch.Tensor], count: int) -> bool:
    """Whether masks can be read, are no larger than is cheap, and meet the elements one by one."""
    for mask in masks:
        if type(mask) not in PLAIN or mask.dtype.is_complex or not readable(mask):
            return False
    sizes = {mask.numel() for mask in masks}
    if len(sizes) > 1 or not 0 < max(sizes) <= _MASK:
        return False
    # What is repeated along other dimensions does not meet element by element.
    return count in sizes or len({tuple(mask.shape) for mask in masks}) == 1


# --- what backward was called on ---------------------------------------------------------------


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
    root = _argument(args, kwargs, 0, "tensors")
    given = _argument(args, kwargs, 1, "grad_tensors")
    retain = _argument(args, kwargs, 2, "retain_graph")
    create = _argument(args, kwargs, 3, "create_graph")
    inputs = _argument(args, kwargs, 5, "inputs")
    row.keeps = bool(create if retain is None else retain)
    row.details |= {"retain_graph": True} if retain else {}
    row.details |= {"create_graph": True} if create else {}
    if inputs is not None:
        several = isinstance(inputs, list | tuple | dict)
        row.details["inputs"] = len(inputs) if several else 1
    with torch._C.DisableTorchFunction():  # a subclass would be asked each question
        _describe_roots(row, () if root is None else root, given)


def _argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


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
