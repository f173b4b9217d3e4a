"""FSDP's parameters as leaves: the shard that an optimizer sees, and the whole gradient kept until it is scattered.

`clip_grad_norm_` of sharded gradients is given their norm as a DTensor that may not be reduced yet:
each rank knows the norm of its part. Asking for the whole would be a collective that the user's
program does not have. But clipping asks for it, so the answer passes by here (`Norm`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from accumviz.recorder.callsite import variables
from accumviz.recorder.transfer import readable

_FSDP = "torch.distributed.fsdp."
# FSDP's functions that call a collective, and which of their variables says for what. No other frame's
# variables are read: before Python 3.13 a frame keeps what was read alive.
_MOVERS = {
    "foreach_reduce": "fsdp_params",
    "foreach_all_gather": "fsdp_params",
    "_reduce_grad": "handle",
    "_all_gather_flat_param": "self",
}


class Whole:
    """Stands for the unsharded parameter of FSDP, whose `.grad` users never see.

    It exists from the first forward on; until then it is a leaf without a `.grad`.
    """

    is_leaf = True
    layout = torch.strided

    def __init__(self, shape: tuple[int, ...], like: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), like.dtype, like.device

    @property
    def leaf(self) -> torch.Tensor | None:
        """The tensor into which autograd accumulates, once there is one."""
        raise NotImplementedError

    @property
    def grad(self) -> torch.Tensor | None:
        """What has been accumulated and not been scattered yet."""
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:
        return self.leaf is not None and self.leaf.requires_grad

    @property
    def _backward_hooks(self) -> Any:
        return None if self.leaf is None else self.leaf._backward_hooks

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        return None if self.leaf is None else self.leaf._post_accumulate_grad_hooks

    def register_hook(self, hook: Any) -> Any:
        assert self.leaf is not None
        return self.leaf.register_hook(hook)  # type: ignore[no-untyped-call]

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


class _Whole2(Whole):
    """FSDP2: `_unsharded_param`, or its sum in another dtype, to which FSDP adds once its hooks have all run."""

    def __init__(self, param: Any) -> None:
        self._param = param
        super().__init__(tuple(param._orig_size), local(param.sharded_param))

    @property
    def leaf(self) -> torch.Tensor | None:
        return getattr(self._param, "_unsharded_param", None)

    @property
    def grad(self) -> torch.Tensor | None:
        summed = getattr(self._param, "unsharded_accumulated_grad", None)
        came = None if self.leaf is None else self.leaf.grad
        if summed is None or came is None:
            summed = came if summed is None else summed
            return None if summed is None else local(summed)
        parts = local(summed), local(came)
        alike = getattr(summed, "placements", None) == getattr(came, "placements", None)
        if not alike or not all(map(readable, parts)):
            return parts[0]
        # As FSDP will add it: what it then scatters is gone before the backward is over.
        return (parts[0].detach() + parts[1].detach()).to(parts[0].dtype)


class _Whole1(Whole):
    """FSDP1: the FlatParameter while its `.grad` has the size of the whole."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        super().__init__(
            tuple(handle.flat_param._unpadded_unsharded_size), handle.flat_param
        )

    @property
    def leaf(self) -> torch.Tensor | None:
        flat: torch.Tensor = self.handle.flat_param
        return flat

    @property
    def grad(self) -> torch.Tensor | None:
        grad = self.handle.flat_param.grad
        return grad if grad is not None and holds_whole(self.handle) else None


class Shard:
    """Stands for a parameter of FSDP1 while its `.grad` is that of this rank's shard."""

    is_leaf = True

    def __init__(self, tensor: torch.Tensor, handle: Any) -> None:
        self.tensor, self._handle = tensor, handle
        self.shape = tensor.shape
        self._backward_hooks = self._post_accumulate_grad_hooks = None

    @property
    def grad(self) -> torch.Tensor | None:
        return None if holds_whole(self._handle) else self.tensor.grad

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad

    def register_hook(self, hook: Any) -> Any:
        """Nothing: autograd never reaches a shard."""
        return _Never()

    def numel(self) -> int:
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class _Never:
    id = -1

    def remove(self) -> None:
        """There is nothing to remove."""


def holds_whole(handle: Any) -> bool:
    """Whether a FlatParameter's `.grad` is the unsharded one, as between `no_sync` backwards."""
    grad = handle.flat_param.grad
    return grad is not None and grad.numel() != handle.flat_param._local_shard.numel()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def units(module: nn.Module) -> Iterator[tuple[Any, Whole, list[torch.Tensor]]]:
    """What FSDP1 and FSDP2 shard in a module: its object for it, the whole, and the parameters that users see."""
    for part in module.modules():
        handle = getattr(part, "_handle", None)
        if (
            handle is not None
            and hasattr(handle, "flat_param")
            and handle.uses_sharded_strategy
        ):
            flat = handle.flat_param
            yield (
                handle,
                _Whole1(handle),
                list(flat._params) if handle._use_orig_params else [flat],
            )
        if "torch.distributed.fsdp" in sys.modules and hasattr(part, "_get_fsdp_state"):
            state = part._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [
                getattr(state, "_fsdp_param_group", None)
            ]
            for group in groups:
                for param in group.fsdp_params if group is not None else ():
                    yield param, _Whole2(param), [param.sharded_param]


class Moving(NamedTuple):
    """What FSDP gathers or scatters now.

    `waits`: what is scattered in a group of ranks stays there until the other groups' is added. `ranks` is how many
    there are in all groups, `divisor` what their sum is divided by: NaN where a hook of the user's decides that.
    """

    units: list[Any]
    waits: bool
    ranks: int
    divisor: float


class Shards:
    """Where wholes and shards stand among the recorded leaves, by the object that FSDP gathers and scatters."""

    def __init__(self) -> None:
        # FSDP's object -> its whole's column, the columns of the shards
        self.by_id: dict[int, tuple[int, list[int]]] = {}
        self.wholes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.by_id)

    def add(self, unit: Any, whole: int, shards: list[int], sizes: list[int]) -> None:
        """Note one unit's columns; the whole goes with the first shard of which this rank has any element."""
        self.by_id[id(unit)] = whole, shards
        self.wholes[whole] = next(
            (i for i, size in zip(shards, sizes, strict=True) if size), shards[0]
        )

    def moving(self, frame: FrameType | None, ranks: int) -> Moving | None:
        """The objects that FSDP is gathering or scattering now, of so many ranks; None when it is not FSDP."""
        while frame is not None:
            variable = _MOVERS.get(frame.f_code.co_name)
            if variable is not None and frame.f_globals.get("__name__", "").startswith(
                _FSDP
            ):
                known = dict(variables(frame))
                found = known.get(variable)
                if found is not None:
                    waits = (
                        known.get("all_reduce_group") is not None
                        and known.get("all_reduce_grads") is False
                    )
                    units = list(found) if isinstance(found, list | tuple) else [found]
                    return Moving(units, waits, *_reduced(known, ranks))
            frame = frame.f_back
        return None


def _reduced(known: dict[str, Any], ranks: int) -> tuple[int, float]:
    """Over how many ranks FSDP reduces, and what it divides their sum by, from the variables of what does it."""
    state = known.get("state")
    names = (
        "reduce_scatter_group",
        "all_reduce_group",
        "reduce_scatter_comm",
        "all_reduce_hook",
    )
    if state is not None:  # FSDP1
        known, names = (
            vars(state),
            ("process_group", "_inter_node_pg", "_comm_hook", ""),
        )
    *groups, first, second = map(known.get, names)
    sizes = [group.size() for group in groups if group is not None]
    ranks = math.prod(sizes) if sizes else ranks
    by = known.get("gradient_divide_factor")
    decided = any(hook is not None and is_own(hook) for hook in (first, second))
    return ranks, math.nan if decided else float(ranks if by is None else by)


def is_own(hook: Any) -> bool:
    """Whether a hook that reduces gradients is the user's; torch's all average."""
    return not (getattr(hook, "__module__", None) or "").startswith("torch.")


def pieces(params: list[Any], output: torch.Tensor) -> list[torch.Tensor] | None:
    """Where in a reduce-scatter's output each parameter's new shard stands; None where that is not known."""
    if hasattr(params[0], "flat_param"):
        return [output] if len(params) == 1 else None
    if not all(hasattr(param, "sharded_size") for param in params):
        return None
    found, at, ranks = [], 0, params[0].mesh_info.shard_mesh_size
    for param in params:
        rows, *rest = param._orig_size
        padded = -(-rows // ranks) * int(torch.Size(rest).numel())
        found.append(output[at : at + param.sharded_size.numel()])
        at += padded
    return found


_PARTIALS = (
    ("torch.distributed.tensor.placement_types", "Partial"),
    ("torch.distributed.tensor._ops._math_ops", "_NormPartial"),
)
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
# The clips that run now, and their threads; replaced, never changed.
_open: tuple[tuple[int, Norm], ...] = ()


class Norm:
    """The norm with which a clip that begins now is called; `end`, after it, tells the whole one.

    No collective is added and none is changed.

    >>> Norm(torch.tensor(2.0)).end()
    tensor(2.)
    """

    def __init__(self, total_norm: torch.Tensor) -> None:
        self._whole: torch.Tensor | None = None
        self._part: torch.Tensor | None = None
        if all(
            placement.is_replicate()
            for placement in getattr(total_norm, "placements", ())
        ):
            self._whole = local(total_norm)
        else:
            self._part = local(total_norm)
            _watch(self)

    def end(self) -> torch.Tensor | None:
        """A plain tensor of one element; None where the clip did not ask for the whole. Call it once."""
        if self._part is not None:
            self._part = None
            _unwatch(self)
        # What a collective gives comes in a wrapper that waits for it; the clip has waited.
        wait = getattr(self._whole, "trigger_wait", None)
        whole: torch.Tensor | None = self._whole if wait is None else wait()
        return whole

    def reduced(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Take a reduction's result, if it is of this norm; on a mesh of two dimensions a second may follow."""
        if part is self._part:
            self._part = self._whole = whole


def _watch(norm: Norm) -> None:
    """Have each kind of partial value that DTensor knows say what it was reduced to."""
    global _open  # noqa: PLW0603 - the classes are the process's
    with _lock:
        if not _open:
            for module, name in _PARTIALS:
                kind = getattr(sys.modules.get(module), name, None)
                original = (
                    vars(kind).get("_reduce_value") if isinstance(kind, type) else None
                )
                if original is not None:
                    wrapper = _telling(original)
                    setattr(kind, "_reduce_value", wrapper)  # noqa: B010 - of a class that is looked up by its name
                    _undo.append(functools.partial(_restore, kind, wrapper, original))
        _open = (*_open, (get_ident(), norm))


def _unwatch(norm: Norm) -> None:
    global _open  # noqa: PLW0603 - as above
    with _lock:
        _open = tuple(other for other in _open if other[1] is not norm)
        while not _open and _undo:
            _undo.pop()()


def _restore(kind: Any, wrapper: Any, original: Any) -> None:
    if vars(kind).get("_reduce_value") is wrapper:
        kind._reduce_value = original


def _telling(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def _reduce_value(
        placement: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        whole = original(placement, tensor, *args, **kwargs)
        with contextlib.suppress(Exception):
            for thread, norm in _open:
                if thread == get_ident():
                    norm.reduced(tensor, whole)
        return whole

    return _reduce_value
