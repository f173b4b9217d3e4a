"""Record what DDP and FSDP do to `.grad`: the collectives that move gradients, and sharded parameters.

Every collective of every backend goes through an operator of torch's `c10d` library. While a recording is open, a
kernel in front of these operators takes note of the call and passes it on. That sees what DDP's C++ reducer sends, and
what a comm hook sends. Nothing of DDP or FSDP is replaced.

`bytes` are those of the whole that is reduced or gathered: an all-reduce's tensor, what an all-gather gives, what a
reduce-scatter is given. What a ring or a tree sends on the wire differs.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from accumviz.recorder import patches
from accumviz.recorder.callsite import CallSites, variables
from accumviz.recorder.rows import Backward, Row, Sync
from accumviz.recorder.transfer import keep_for_stream, readable

# The operators, what they do, and which argument is the whole.
_OPERATORS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
}
_KEYS = ("AutogradCPU", "AutogradCUDA")
_ALL_REDUCE = inspect.unwrap(dist.all_reduce).__code__ if dist.is_available() else None
# SyncBatchNorm reduces inside a backward as well.
_BATCH_NORM = str(Path("nn", "modules", "_functions.py"))
_FSDP = "torch.distributed.fsdp."
# FSDP's functions that call a collective, and which of their variables says for what. No other frame's variables are
# read: before Python 3.13 a frame keeps what was read alive.
_MOVERS = {
    "foreach_reduce": "fsdp_params",
    "foreach_all_gather": "fsdp_params",
    "_reduce_grad": "handle",
    "_all_gather_flat_param": "self",
}


# --- this process among others -----------------------------------------------------------------


def rank() -> tuple[int, int] | None:
    """Return this process's rank and how many there are; None when it is no rank of anything."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    number, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if number.isdigit() and ranks.isdigit():
        return int(number), int(ranks)
    return None


def own_path(path: Path) -> Path:
    """Return where this process writes its ledger: each rank to a file of its own."""
    here = rank()
    if here is None:
        return path
    return path.with_name(f"{path.stem}.rank{here[0]}{path.suffix}")


# --- FSDP's parameters -------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor; any other tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


class Whole:
    """Stands for the unsharded parameter of FSDP, whose `.grad` users never see.

    It exists from the first forward on; until then it is a leaf without a `.grad`. `dtype` is that of its `.grad`, once
    there was one: FSDP may keep the sum in another than that of the shards.
    """

    is_leaf = True
    is_nested = False
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
        grad = self._sum()
        if grad is not None:
            self.dtype = grad.dtype
        return grad

    def _sum(self) -> torch.Tensor | None:
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

    def is_complex(self) -> bool:
        return self.dtype.is_complex


class _Whole2(Whole):
    """FSDP2: `_unsharded_param`, or its sum in another dtype, to which FSDP adds once its hooks have all run."""

    def __init__(self, param: Any) -> None:
        self._param = param
        super().__init__(tuple(param._orig_size), local(param.sharded_param))

    @property
    def leaf(self) -> torch.Tensor | None:
        return getattr(self._param, "_unsharded_param", None)

    def _sum(self) -> torch.Tensor | None:
        summed = getattr(self._param, "unsharded_accumulated_grad", None)
        came = None if self.leaf is None else self.leaf.grad
        if summed is None or came is None:
            there = came if summed is None else summed
            return None if there is None else local(there)
        parts = local(summed).detach(), local(came).detach()
        alike = getattr(summed, "placements", None) == getattr(came, "placements", None)
        if not alike or not all(map(readable, parts)):
            return parts[0]
        # As FSDP will add it: what it then scatters is gone before the backward is over.
        return (parts[0] + parts[1]).to(parts[0].dtype)


class _Whole1(Whole):
    """FSDP1: the FlatParameter while its `.grad` has the size of the whole."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        flat = handle.flat_param
        super().__init__(tuple(flat._unpadded_unsharded_size), flat)

    @property
    def leaf(self) -> torch.Tensor | None:
        flat: torch.Tensor = self.handle.flat_param
        return flat

    def _sum(self) -> torch.Tensor | None:
        return self.handle.flat_param.grad if _holds_whole(self.handle) else None


class Shard:
    """Stands for a parameter of FSDP1 while its `.grad` is that of this rank's shard."""

    is_leaf = True

    def __init__(self, tensor: torch.Tensor, handle: Any) -> None:
        self.tensor, self._handle = tensor, handle
        self.shape = tensor.shape
        self._backward_hooks = {_NoHandle.id: None}
        self._post_accumulate_grad_hooks = None

    @property
    def grad(self) -> torch.Tensor | None:
        return None if _holds_whole(self._handle) else self.tensor.grad

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad

    def register_hook(self, hook: Any) -> Any:
        """Return a handle of nothing: autograd never reaches a shard."""
        return _NoHandle()

    def numel(self) -> int:
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class _NoHandle:
    id = -1

    def remove(self) -> None:
        """Remove nothing."""


def _holds_whole(handle: Any) -> bool:
    """Return whether a FlatParameter's `.grad` is the unsharded one, as between `no_sync` backwards."""
    grad = handle.flat_param.grad
    return grad is not None and grad.numel() != handle.flat_param._local_shard.numel()


def units(module: nn.Module) -> Iterator[tuple[Any, Whole, list[torch.Tensor]]]:
    """Yield what FSDP1 and FSDP2 shard in a module: its object for it, the whole, the parameters that users see."""
    for part in module.modules():
        handle: Any = getattr(part, "_handle", None)
        if hasattr(handle, "flat_param") and handle.uses_sharded_strategy:
            flat = handle.flat_param
            seen = list(flat._params) if handle._use_orig_params else [flat]
            yield handle, _Whole1(handle), seen
        for param in _fsdp2_params(part):
            yield param, _Whole2(param), [param.sharded_param]


def _fsdp2_params(module: Any) -> Iterator[Any]:
    if "torch.distributed.fsdp" not in sys.modules:
        return
    if hasattr(module, "_get_fsdp_state"):
        state = module._get_fsdp_state()
        alone = [getattr(state, "_fsdp_param_group", None)]
        for group in getattr(state, "_fsdp_param_groups", None) or alone:
            if group is not None:
                yield from group.fsdp_params


class Moving(NamedTuple):
    """What FSDP gathers or scatters now, among how many ranks, and what it divides their sum by.

    `divisor` is NaN where a hook of the user's decides that. `waits`: what a group of ranks scatters is not added to
    `.grad` before that of the other groups.
    """

    units: list[Any]
    waits: bool
    ranks: int
    divisor: float


class Shards:
    """Where wholes and shards are among the recorded leaves, by the object that FSDP gathers and scatters."""

    def __init__(self) -> None:
        # FSDP's object -> its whole's column, the columns of the shards
        self.by_id: dict[int, tuple[int, list[int]]] = {}
        self.wholes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.by_id)

    def add(self, unit: Any, whole: int, shards: list[int], sizes: list[int]) -> None:
        """Note one unit's columns; the whole goes with the first shard of which this rank has any element."""
        self.by_id[id(unit)] = whole, shards
        filled = (i for i, size in zip(shards, sizes, strict=True) if size)
        self.wholes[whole] = next(filled, shards[0])

    def columns(self, units: list[Any]) -> list[tuple[int, list[int]]]:
        """Return the columns of these units, as far as they are recorded."""
        known = [self.by_id.get(id(unit)) for unit in units]
        return [columns for columns in known if columns is not None]

    def moving(self, frame: FrameType | None, ranks: int) -> Moving | None:
        """Return what FSDP is gathering or scattering now, of so many ranks; None when it is not FSDP."""
        for at in _outwards(frame):
            variable = _MOVERS.get(at.f_code.co_name)
            if variable is not None and at.f_globals["__name__"].startswith(_FSDP):
                held = dict(variables(at))
                moved = held.get(variable)
                if moved is not None:
                    return _moving(moved, held, ranks)
        return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _moving(moved: Any, held: dict[str, Any], ranks: int) -> Moving:
    """Read from the variables of FSDP's function what it moves, over how many ranks, and how it divides."""
    by, state = held.get("gradient_divide_factor"), held.get("state")
    between = held.get("all_reduce_group")
    groups = held.get("reduce_scatter_group"), between
    hooks = held.get("reduce_scatter_comm"), held.get("all_reduce_hook")
    if state is not None:  # FSDP1
        groups = state.process_group, getattr(state, "_inter_node_pg", None)
        hooks = getattr(state, "_comm_hook", None), None
    sizes = [group.size() for group in groups if group is not None]
    ranks = math.prod(sizes) if sizes else ranks
    divisor = float(ranks if by is None else by)
    if any(_is_users(hook) for hook in hooks):
        divisor = math.nan
    waits = between is not None and held.get("all_reduce_grads") is False
    several = list(moved) if isinstance(moved, list | tuple) else [moved]
    return Moving(several, waits, ranks, divisor)


def _is_users(hook: Any) -> bool:
    """Return whether a hook that reduces gradients is the user's; torch's all average."""
    module = getattr(hook, "__module__", None) or ""
    return hook is not None and not module.startswith("torch.")


def _arriving(
    shards: list[int], moving: Moving, output: torch.Tensor
) -> dict[int, torch.Tensor | None]:
    """Return each parameter's new shard in a reduce-scatter's output; None where that is not known."""
    params = moving.units
    pieces: dict[int, torch.Tensor | None] = dict.fromkeys(shards)
    if len(shards) != len(params):
        return pieces
    if hasattr(params[0], "flat_param"):
        pieces[shards[0]] = output
    elif all(hasattr(param, "sharded_size") for param in params):
        at, ranks = 0, params[0].mesh_info.shard_mesh_size
        for i, param in zip(shards, params, strict=True):
            rows, *rest = param._orig_size
            pieces[i] = output[at : at + param.sharded_size.numel()]
            at += -(-rows // ranks) * torch.Size(rest).numel()
    return pieces


# --- collectives -------------------------------------------------------------------------------

_library: Any = None


def watch_collectives() -> bool:
    """Tell the open recordings of every collective, until the last one closes; False without torch.distributed."""
    global _library  # noqa: PLW0603 - the operators are the process's
    if not (dist.is_available() and dist.is_initialized()):
        return False
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        patches.undoing.append(_unwatch)
        for name, (op, whole) in _OPERATORS.items():
            packet: Any = getattr(torch.ops.c10d, name, None)
            for key in _KEYS if packet is not None else ():
                kernel = _kernel(packet.default, _noting(op, whole))
                _library.impl(name, kernel, key, with_keyset=True)
    return True


def _unwatch() -> None:
    global _library
    library, _library = _library, None
    if library is not None:
        library._destroy()


def _kernel(operator: Any, around: patches.Around) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        rest = keyset & torch._C._after_autograd_keyset
        passing: Any = functools.partial(operator.redispatch, rest)
        try:
            passing = patches.wrapper(passing, around)
        except Exception as failure:
            patches.failures.append(failure)
        return passing(*args, **kwargs)

    return kernel


def _noting(op: str, whole: int) -> patches.Around:
    def around(call: patches.Call) -> Iterator[None]:
        moved = list(_tensors(call.args[whole])), list(_tensors(call.args[0]))
        rows = patches.notify(call.recordings, "collective", op, *moved, call.frame)
        yield
        for recording, row in rows:
            if row is not None and call.error is None:
                patches.notify((recording,), "launched", row, _work(call.result))

    return around


def _work(given: Any) -> Any:
    """Return what a collective is waited for by, the very object that Python is given; None where it is not known."""
    boxed = given[-1] if isinstance(given, list | tuple) else given
    if isinstance(boxed, torch.ScriptObject) and hasattr(dist.Work, "unbox"):
        return dist.Work.unbox(boxed)
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class ByHand(NamedTuple):
    """A collective that the user's own lines began: its leaves, by which it is waited for, and whose thread it is."""

    leaves: list[int]
    work: Any
    thread: int


class _Replica:
    """A model that DDP replicates: its leaves in DDP's order, and whether a forward has armed its all-reduce.

    `armed` is None before the first forward; `line` is that of the last one that counted. `spent` says that a backward
    has used it since. `arrivals` is the order in which the gradients of its first synchronised backward came.
    """

    def __init__(self, module: Any, index: dict[int, int]) -> None:
        self.module = module
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        self.members = [
            index.get(id(tensor), -1)
            for name, tensor in module.module.named_parameters()
            if tensor.requires_grad and name not in ignored
        ]
        self.leaves = {i for i in self.members if i >= 0}
        self.armed: bool | None = None
        self.line, self.spent = 0, False
        self.arrivals: list[int] = []

    def concerns(self, reached: Set[int] | None) -> bool:
        """Return whether a backward that reached these leaves may use its all-reduce."""
        if self.armed is None:
            return False
        return reached is None or not reached.isdisjoint(self.leaves)

    @property
    def hooks(self) -> list[Any]:
        """Its comm hooks."""
        return [hook for hook, *_ in getattr(self.module, "_comm_hooks", ())]

    @property
    def in_place(self) -> bool:
        """Whether DDP divides and reduces in `.grad` itself, or a hook decides what becomes of it."""
        return getattr(self.module, "gradient_as_bucket_view", True) or bool(self.hooks)


class Collectives:
    """The leaves that are reduced across ranks, and the collectives that do it, as they come.

    What autograd brings to such a leaf is read while it is there: later, the average replaces it.
    """

    def __init__(
        self,
        gradients: Any,
        rows: Any,
        sites: CallSites,
        edits: weakref.WeakMethod[Callable[[list[int]], None]],
    ) -> None:
        self._leaves = leaves = gradients
        self._rows, self._sites = rows, sites
        self._edits = edits
        self._shards: Shards = leaves.named.shards
        modules = [m for root in leaves.named.wrapped for m in root.modules()]
        self.replicas = [
            _Replica(module, leaves.named.index)
            for module in dict.fromkeys(modules)
            if isinstance(module, nn.parallel.DistributedDataParallel)
        ]
        self._handles: list[Any] = []
        self._ranks = 1
        self._replicated = {i for each in self.replicas for i in each.leaves}
        # The leaves whose `.grad` is changed or taken away while the backward runs.
        taken = set(self._shards.wholes)
        for replica in self.replicas:
            taken |= {
                i
                for i in replica.leaves
                if replica.in_place or leaves.tensors[i].device.type != "cpu"
            }
        leaves.taken = taken
        self.unhooked = set(taken)
        self.by_hand: dict[Row, ByHand] = {}
        self.told: dict[int, Row] = {}

    def open(self) -> None:
        """Watch every collective."""
        if watch_collectives():
            self._ranks = dist.get_world_size()

    def close(self) -> None:
        """Leave everything as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """Let go of the modules and of what they hold."""
        for held in (self.replicas, self.by_hand, self.told, self.unhooked):
            held.clear()

    def forwards(self, module: nn.Module, frame: FrameType) -> None:
        """Take note of a forward, if it is one that arms an all-reduce."""
        for replica in self.replicas:
            if replica.module is module and torch.is_grad_enabled():
                wanted = bool(replica.module.require_backward_grad_sync)
                # What is armed stays so until a backward.
                if wanted or not replica.armed:
                    replica.armed, replica.spent = wanted, False
                    replica.line = self._sites.find(frame).line

    def describe(self, details: dict[str, Any], reached: Set[int] | None) -> None:
        """Say of a backward whether a forward had armed its all-reduce, and what the flag is.

        `reached` are the leaves that it has met, where it is over: what replicates none of them does not count.
        """
        for name in ("armed", "armed_line", "no_sync", "spent"):
            details.pop(name, None)
        concerned = [r for r in self.replicas if r.concerns(reached)]
        if not concerned:
            return
        # One that is not armed is what the step lacks.
        lacking = (replica for replica in concerned if not replica.armed)
        first = next(lacking, concerned[-1])
        details["armed"], details["armed_line"] = first.armed, first.line
        flags = [each.module.require_backward_grad_sync for each in concerned]
        details["no_sync"] = not all(flags)
        if first.spent:
            details["spent"] = True

    def hook(self) -> None:
        """Hook those of the leaves that are taken away which exist by now."""
        for i in list(self.unhooked):
            tensor: Any = self._leaves.tensors[i]
            leaf = tensor.leaf if isinstance(tensor, Whole) else tensor
            if leaf is not None and leaf.requires_grad:
                self._leaves.know(leaf, i)
                hook = leaf.register_post_accumulate_grad_hook(self._after(i))
                self._handles.append(hook)
                self.unhooked.discard(i)

    def _after(self, i: int) -> Callable[[torch.Tensor], None]:
        here = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            collectives = here()
            if collectives is not None:
                collectives._leaves.accumulated(i)

        return patches.guarded(hook)

    def collective(
        self,
        op: str,
        whole: list[torch.Tensor],
        output: list[torch.Tensor],
        frame: FrameType,
    ) -> Row | None:
        """Take note of a collective, if it moves gradients or sharded parameters that are recorded.

        Returns the row of one that the user's own lines began.
        """
        inside = torch._C._current_graph_task_id() != -1
        running = self._leaves.running_here() if inside else None
        if running is not None:
            # Once it is over, `.grad` is no longer what this backward made of it.
            self._leaves.settle(running)
            running.untouched.clear()
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        details: dict[str, Any] = {"op": op, "bytes": size, "ranks": self._ranks}
        moving = self._shards.moving(frame, self._ranks) if self._shards else None
        if moving is not None:
            self._fsdp(op, moving, output, frame, running, details)
            return None
        if op != "all-reduce":
            return None
        armed = running is not None and any(each.armed for each in self.replicas)
        if not armed or self._is_by_hand(whole, frame):
            return self._begin_by_hand(whole, frame, running, details)
        leaves = self._bucket(whole, frame, running, details)
        if leaves:
            row = self._row(leaves, frame, running, details)
            self._inside(running, Sync(row, leaves, {}))
        return None

    def _row(
        self,
        leaves: Iterable[int],
        frame: FrameType,
        running: Backward | None,
        details: dict[str, Any],
    ) -> Row:
        details["parameters"] = [self._leaves.named.names[i] for i in leaves]
        rows = self._rows
        if running is not None:
            row = rows.begin("sync", running.label, running.site, "backward", details)
        else:
            row = rows.begin("sync", "", self._sites.find(frame), "", details)
        return row  # type: ignore[no-any-return]

    def _inside(self, running: Any, sync: Sync) -> None:
        running.syncs = [*running.syncs, sync]
        running.synced = {*running.synced, *sync.leaves}

    def _over(self, row: Row) -> None:
        row.present = bytes(self._leaves.present)
        self._rows.finish(row)

    # --- FSDP ----------------------------------------------------------------------------------

    def _fsdp(
        self,
        op: str,
        moving: Moving,
        output: list[torch.Tensor],
        frame: FrameType,
        running: Backward | None,
        details: dict[str, Any],
    ) -> None:
        details["ranks"] = moving.ranks
        columns = self._shards.columns(moving.units)
        shards = [i for _, inside in columns for i in inside]
        if not shards:
            return
        scatters = op == "reduce-scatter"
        if scatters and moving.divisor != moving.ranks:
            details["divisor"] = moving.divisor
        row = self._row(shards, frame, running, details)
        if running is None or op == "all-gather":
            self._over(row)
        elif not scatters:
            # What the groups of ranks reduce among them is in no `.grad` yet.
            self._inside(running, Sync(row, [], {}))
        else:
            leaves = [*(whole for whole, _ in columns), *shards]
            arriving = {} if moving.waits else _arriving(shards, moving, output[0])
            self._inside(running, Sync(row, leaves, arriving))

    # --- DDP -----------------------------------------------------------------------------------

    def _bucket(
        self,
        whole: list[torch.Tensor],
        frame: FrameType,
        running: Any,
        details: dict[str, Any],
    ) -> list[int]:
        """Return the leaves in the bucket that DDP reduces now.

        Buckets are filled from the last parameter to the first, and from the second synchronised backward on in the
        order in which the gradients of the first came. (DDP cannot be asked: it holds its lock.)
        """
        if any(at.f_code.co_filename.endswith(_BATCH_NORM) for at in _outwards(frame)):
            return []
        arrived = [i for i in running.reached if i in self._replicated]
        left = [i for i in arrived if i not in running.synced]
        replica = next((r for r in self.replicas if r.leaves & {*left}), None)
        if replica is None or replica.armed is None:
            return []
        details["armed_line"] = replica.line
        details["ranks"] = dist.get_world_size(replica.module.process_group)
        if any(map(_is_users, replica.hooks)):
            details["by_comm_hook"] = math.nan  # what it makes of the sum is not known
        count = sum(tensor.numel() for tensor in whole)
        free = replica.leaves - running.synced
        for order in (replica.arrivals, arrived, replica.members[::-1]):
            inside = self._filled([i for i in order if i in free], count)
            if inside:
                return inside
        return [i for i in left if i in free]  # a comm hook sends something else

    def _filled(self, order: list[int], count: int) -> list[int]:
        """Return the first leaves in this order that have so many elements together; none where that is no sum."""
        held, inside = 0, []
        for i in order:
            if held >= count:
                break
            inside.append(i)
            held += self._leaves.sizes[i]
        return inside if held == count else []

    def finish(self, running: Any) -> None:
        """Read what the collectives of a backward left in `.grad`, once it is over."""
        leaves, present = self._leaves, bytearray(running.present)
        self._spend(running)
        for i in running.synced:
            if i not in running.reached:
                present[i] = running.had[i]
        running.present = bytes(present)
        for row, concerned, arriving in running.syncs:
            row.changed = concerned
            row.contributed = [i for i in arriving if leaves.present[i]]
            leaves.read_grads(row, concerned)
            for i in row.contributed:
                piece = arriving[i]
                if piece is None and not present[i]:
                    piece = leaves.tensors[i].grad
                self._contribute(row, i, piece)
            for i in concerned:
                present[i] = leaves.present[i]
            row.present = bytes(present)
            self._rows.finish(row)

    def _spend(self, running: Any) -> None:
        """Note which replicas a backward has synchronised: a forward has to arm them again."""
        for replica in self.replicas:
            if replica.armed is not None and running.synced & replica.leaves:
                arrived = [i for i in running.reached if i in self._replicated]
                replica.arrivals = replica.arrivals or arrived
                replica.armed, replica.spent = False, True

    def _contribute(self, row: Row, i: int, piece: torch.Tensor | None) -> None:
        if piece is None:
            row.unmeasured = [*row.unmeasured, i]
            return
        self._leaves.read(row, "contribution", [(i, piece.reshape(-1))])
        keep_for_stream([piece])  # it was scattered on a stream of FSDP's

    # --- by hand -------------------------------------------------------------------------------

    def _is_by_hand(self, whole: list[torch.Tensor], frame: FrameType) -> bool:
        """Return whether an all-reduce inside an armed backward is the user's own, and none of DDP's."""
        leaves = self._grads_in(whole)
        if not leaves or not self._replicated.issuperset(leaves):
            return bool(leaves)
        if any(replica.hooks for replica in self.replicas):  # they call it as users do
            return False
        return any(at.f_code is _ALL_REDUCE for at in _outwards(frame))

    def _begin_by_hand(
        self,
        whole: list[torch.Tensor],
        frame: FrameType,
        running: Backward | None,
        details: dict[str, Any],
    ) -> Row | None:
        """Return the row of an all-reduce that no library began, if it reduces any `.grad`."""
        leaves = self._grads_in(whole)
        if not leaves:
            return None
        # On a device, what is changed through `.data` is not seen: there it takes an edit to tell a sum.
        grads = [self._leaves.tensors[i].grad for i in leaves]
        on_cpu = all(grad is not None and grad.is_cpu for grad in grads)
        size = sum(self._leaves.sizes[i] for i in leaves)
        wholly = on_cpu and sum(tensor.numel() for tensor in whole) >= size
        details["reduction"] = _reduction(frame, self._ranks) if wholly else ""
        if running is None and (edits := self._edits()) is not None:
            edits(leaves)
        row = self._row(leaves, frame, running, details)
        self.by_hand[row] = ByHand(leaves, None, get_ident())
        return row

    def _grads_in(self, whole: list[torch.Tensor]) -> list[int]:
        """Return the leaves whose `.grad` is in what is reduced."""
        sent = {tensor.untyped_storage().data_ptr() for tensor in whole}
        leaves = []
        for i, tensor in enumerate(self._leaves.tensors):
            grad = None if tensor.grad is None else local(tensor.grad)
            if (
                grad is not None
                and grad.layout is torch.strided
                and grad.untyped_storage().data_ptr() in sent
            ):
                leaves.append(i)
        return leaves

    def launched(self, row: Row, work: Any) -> None:
        """Take note that the collective of this row is on its way."""
        if row in self.by_hand:
            self.by_hand[row] = self.by_hand[row]._replace(work=work)

    def waited(self, work: Any) -> None:
        """Read what a collective gave that was waited for: nothing has been done with it yet."""
        for row, begun in list(self.by_hand.items()):
            if begun.work is work and begun.thread == get_ident():
                del self.by_hand[row]
                self._end_by_hand(row, begun.leaves, self._leaves.read_grads)
                self.told |= dict.fromkeys(begun.leaves, row)
                return

    def claim(self, changed: list[int]) -> list[int]:
        """Give the changes of collectives that were not waited for to them, unread; return the others."""
        begun, self.by_hand = self.by_hand, {}
        for row, (leaves, _, _) in begun.items():
            row.details["reduction"] = ""
            self._end_by_hand(row, leaves, self._leaves.leave_unread)
        taken = {i for each in begun.values() for i in each.leaves}
        return [i for i in changed if i not in taken]

    def _end_by_hand(
        self, row: Row, leaves: list[int], read: Callable[[Row, list[int]], None]
    ) -> None:
        row.changed = leaves  # the library writes without a new version
        self._leaves.mark_seen(leaves)
        read(row, leaves)
        self._over(row)


def _reduction(frame: FrameType, ranks: int) -> str:
    """Return what an all-reduce over so many ranks reduces to, by its name in torch; empty where it is not known."""
    for at in _outwards(frame):
        if at.f_code is _ALL_REDUCE:
            held = dict(variables(at))
            if dist.get_world_size(held.get("group")) != ranks:
                return ""
            return str(held.get("op")).rpartition(".")[2].lower()
    return ""
