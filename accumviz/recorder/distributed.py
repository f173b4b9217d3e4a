"""Record what DDP and FSDP do to `.grad`: the collectives that move gradients, and sharded parameters.

Every collective of every backend goes through an operator of torch's `c10d` library. While a recording is open, a
kernel in front of these operators takes note of the call and passes it on. That sees what DDP's C++ reducer sends, and
what a comm hook sends. Nothing of DDP or FSDP is replaced.

`bytes` are those of the whole that is reduced or gathered: an all-reduce's tensor, what an all-gather gives, what a
reduce-scatter is given. What a ring or a tree sends on the wire differs. An empty `reduction` says that it is not
known what becomes of the sum: it is reduced by hand, by a hook, between groups of ranks, or with another divisor.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accumviz.recorder import patches
from accumviz.recorder.callsite import CallSites, variables
from accumviz.recorder.columns import Backward, Details, Leaves, Sync
from accumviz.recorder.transfer import keep_for_stream, local, readable, unseen

# The operators, what they do, and which argument is the whole.
_OPERATORS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
}
_KEYS = ("AutogradCPU", "AutogradCUDA")
_ALL_REDUCE = inspect.unwrap(dist.all_reduce).__code__ if dist.is_available() else None
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
# What FSDP2's function and FSDP1's state hold where the sum over ranks becomes something else than their mean.
_SPECIAL = ("gradient_divide_factor", "all_reduce_group", "all_reduce_hook")
_SPECIAL_OF_FSDP1 = ("_comm_hook", "_inter_node_pg")
# The groups of recorded modules, by their id, until the process exits. A group that ends waits for its threads, and
# these may wait for Python: a module that is dropped with the last hold on its group would hang. Python itself lets
# threads go on while it drops a group, but not while the interpreter ends; so this is cleared at exit.
_groups: dict[int, Any] = {}
atexit.register(_groups.clear)


# --- this process among others -----------------------------------------------------------------


def rank() -> tuple[int, int] | None:
    """Return this process's rank and how many there are; None when it is no rank of anything."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    number = os.environ.get("RANK", "")
    ranks = os.environ.get("WORLD_SIZE", "")
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


class Whole:
    """Stands for the unsharded parameter of FSDP, whose `.grad` users never see.

    It exists from the first forward on; until then it is a leaf without a `.grad`. `dtype` is that of its `.grad`, once
    there was one: FSDP may keep the sum in another than that of the shards. `leaf` is the tensor into which autograd
    accumulates, once there is one.
    """

    is_leaf = True
    layout = torch.strided

    def __init__(
        self,
        unit: Any,
        shape: Iterable[int],
        like: Tensor,
    ) -> None:
        self.unit = unit
        self.shape = torch.Size(shape)
        self.dtype = like.dtype
        self.device = like.device

    @property
    def leaf(self) -> Tensor | None:
        raise NotImplementedError

    def _sum(self) -> Tensor | None:
        raise NotImplementedError

    @property
    def grad(self) -> Tensor | None:
        """What has been accumulated and not been scattered yet."""
        grad = self._sum()
        if grad is not None:
            self.dtype = grad.dtype
        return grad

    @property
    def requires_grad(self) -> bool:
        return self.leaf is not None and self.leaf.requires_grad


class _WholeOfFsdp2(Whole):
    """FSDP2's `_unsharded_param`, or its sum in another dtype, to which FSDP adds after all hooks."""

    @property
    def leaf(self) -> Tensor | None:
        return getattr(self.unit, "_unsharded_param", None)

    def _sum(self) -> Tensor | None:
        summed = getattr(self.unit, "unsharded_accumulated_grad", None)
        came = getattr(self.leaf, "grad", None)
        if summed is None or came is None:
            alone = came if summed is None else summed
            return None if alone is None else local(alone)
        mine = local(summed).detach()
        theirs = local(came).detach()
        if not readable(mine, theirs):
            return mine
        # As FSDP will add it: what it then scatters is gone before the backward is over.
        return (mine + theirs).to(mine.dtype)


class _WholeOfFsdp1(Whole):
    """FSDP1's FlatParameter while its `.grad` has the size of the whole."""

    @property
    def leaf(self) -> Tensor:
        flat: Tensor = self.unit.flat_param
        return flat

    def _sum(self) -> Tensor | None:
        return self.leaf.grad if _holds_whole(self.unit) else None


class Shard:
    """Stands for a parameter of FSDP1 while its `.grad` is that of this rank's shard."""

    leaf = None  # autograd never reaches a shard

    def __init__(self, tensor: Tensor, handle: Any) -> None:
        self.tensor = tensor
        self._handle = handle
        self.shape = tensor.shape

    @property
    def grad(self) -> Tensor | None:
        return None if _holds_whole(self._handle) else self.tensor.grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def _holds_whole(handle: Any) -> bool:
    """Return whether a FlatParameter's `.grad` is the unsharded one, as between `no_sync` backwards."""
    flat = handle.flat_param
    return flat.grad is not None and flat.grad.numel() != flat._local_shard.numel()


def units(module: nn.Module) -> Iterator[tuple[Whole, list[Tensor]]]:
    """Yield what FSDP1 and FSDP2 shard in a module: the whole, and the parameters that users see."""
    for part in module.modules():
        handle: Any = getattr(part, "_handle", None)
        if hasattr(handle, "flat_param") and handle.uses_sharded_strategy:
            flat = handle.flat_param
            seen = list(flat._params) if handle._use_orig_params else [flat]
            shape = flat._unpadded_unsharded_size
            yield _WholeOfFsdp1(handle, shape, flat), seen
        for param in _fsdp2_params(part):
            shard = param.sharded_param
            whole = _WholeOfFsdp2(param, param._orig_size, local(shard))
            yield whole, [shard]


def _fsdp2_params(module: Any) -> Iterator[Any]:
    if hasattr(module, "_get_fsdp_state"):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in groups or [getattr(state, "_fsdp_param_group", None)]:
            if group is not None:
                yield from group.fsdp_params


class _Moving(NamedTuple):
    """What FSDP gathers or scatters now, among how many ranks (0: all), and whether it averages their gradients."""

    units: list[Any]
    ranks: int
    averages: bool


class Shards:
    """Where wholes and shards are among the recorded leaves, by the object that FSDP gathers and scatters."""

    def __init__(self) -> None:
        # FSDP's object -> its whole's column, the columns of the shards
        self.by_id: dict[int, tuple[int, Leaves]] = {}
        self.wholes: dict[int, int] = {}

    def add(
        self,
        unit: Any,
        whole: int,
        shards: Leaves,
        sizes: Leaves,
    ) -> None:
        """Note one unit's columns; the whole goes with the first shard of which this rank has any element."""
        self.by_id[id(unit)] = whole, shards
        filled = (i for i, size in zip(shards, sizes, strict=True) if size)
        self.wholes[whole] = next(filled, shards[0])

    def columns(self, units: list[Any]) -> tuple[Leaves, Leaves]:
        """Return the columns of these units' wholes, and of their shards, as far as they are recorded."""
        wholes: Leaves = []
        shards: Leaves = []
        for unit in units:
            if id(unit) in self.by_id:
                whole, inside = self.by_id[id(unit)]
                wholes.append(whole)
                shards += inside
        return wholes, shards


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _moving(frame: FrameType) -> _Moving | None:
    """Return what FSDP is gathering or scattering now; None when it is not FSDP."""
    for at in _outwards(frame):
        name = _MOVERS.get(at.f_code.co_name)
        if name is not None and at.f_globals["__name__"].startswith(_FSDP):
            inside = dict(variables(at))
            moved = inside.get(name)
            if moved is not None:
                return _read_move(moved, inside)
    return None


def _read_move(moved: Any, inside: Details) -> _Moving:
    """Read from the variables of FSDP's function what it moves, and how."""
    state = inside.get("state")
    if state is None:
        group = inside.get("reduce_scatter_group")
        special = list(map(inside.get, _SPECIAL))
        comm = inside.get("reduce_scatter_comm")
        if comm is not None and not type(comm).__module__.startswith(_FSDP):
            special.append(comm)
        # Before 2.9, gloo gives FSDP2 the sum where it asks for the mean.
        if torch.__version__ < "2.9" and dist.get_backend(group) == "gloo":
            special.append(group)
    else:  # FSDP1
        group = state.process_group
        special = [getattr(state, name, None) for name in _SPECIAL_OF_FSDP1]
    averages = all(each is None for each in special)
    units = list(moved) if isinstance(moved, list | tuple) else [moved]
    return _Moving(units, 0 if group is None else group.size(), averages)


def _pieces(
    shards: Leaves,
    params: list[Any],
    output: Tensor,
) -> dict[int, Tensor]:
    """Return each parameter's new shard in a reduce-scatter's output, where that is known."""
    if len(shards) != len(params):
        return {}
    if hasattr(params[0], "flat_param"):
        return {shards[0]: output}
    pieces: dict[int, Tensor] = {}
    start = 0
    for i, param in zip(shards, params, strict=True):
        pieces[i] = output[start : start + param.sharded_size.numel()]
        # Each rank's part is padded to equal rows.
        start += param.padded_sharded_param_size.numel()
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
            operator = getattr(torch.ops.c10d, name).default
            for key in _KEYS:
                kernel = _kernel(operator, _noting(op, whole))
                _library.impl(name, kernel, key, with_keyset=True)
    return True


def _unwatch() -> None:
    global _library
    library, _library = _library, None
    if library is not None:
        library._destroy()


def _kernel(operator: Any, around: patches.Around) -> Callable[..., Any]:
    def kernel(
        keyset: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rest = keyset & torch._C._after_autograd_keyset
        passing: Any = functools.partial(operator.redispatch, rest)
        try:
            passing = patches.wrapper(passing, around)
        except Exception as failure:
            patches.failures.append(failure)
        return passing(*args, **kwargs)

    return kernel


def _noting(op: str, whole: int) -> patches.Around:
    def around(call: patches.Call) -> patches.Steps:
        if (
            get_ident() in patches.inside["sync"]
        ):  # what it makes of `.grad` is read once it is over
            return
        moved = list(_tensors(call.args[whole]))
        output = list(_tensors(call.args[0]))
        patches.notify(call.recordings, "collective", op, moved, output, call.frame)
        yield

    return around


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class _Replica:
    """A model that DDP replicates: its leaves, and whether a forward has armed its all-reduce.

    `armed` is None before the first forward or backward; `line` is that of the last forward that counted.
    """

    def __init__(self, module: Any, index: dict[int, int]) -> None:
        self.module = module
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        # In the order of DDP's buckets, as a rule
        self.leaves: Leaves = []
        for name, tensor in module.module.named_parameters():
            recorded = tensor.requires_grad and id(tensor) in index
            if recorded and name not in ignored:
                self.leaves.insert(0, index[id(tensor)])
        self.armed: bool | None = None
        self.line = 0

    @property
    def has_comm_hook(self) -> bool:
        """Whether a comm hook reduces, which may do anything."""
        return bool(getattr(self.module, "_comm_hooks", ()))

    @property
    def in_place(self) -> bool:
        """Whether DDP divides and reduces in `.grad` itself, or a hook decides what becomes of it."""
        return self.has_comm_hook or getattr(
            self.module, "gradient_as_bucket_view", True
        )


class Collectives:
    """The leaves that are reduced across ranks, and the collectives that do it, as they come.

    What autograd brings to such a leaf is read while it is there: later, the average replaces it.
    """

    def __init__(
        self,
        gradients: Any,
        rows: Any,
        sites: CallSites,
    ) -> None:
        self._leaves = gradients
        self._rows = rows
        self._sites = sites
        self._shards: Shards = gradients.named.shards
        modules = [m for root in gradients.named.wrapped for m in root.modules()]
        for module in modules:
            group = getattr(module, "process_group", None)
            if group is not None:
                _groups[id(group)] = group
        self.replicas = [
            _Replica(module, gradients.named.index)
            for module in dict.fromkeys(modules)
            if isinstance(module, nn.parallel.DistributedDataParallel)
        ]
        self._handles: list[Any] = []
        self._ranks = 1
        gradients.taken = self._taken()
        self.unhooked = set(gradients.taken)

    def _taken(self) -> set[int]:
        """Return the leaves whose `.grad` is changed or taken away while the backward runs."""
        taken = set(self._shards.wholes)
        for replica in self.replicas:
            for i in replica.leaves:
                if replica.in_place or self._leaves.tensors[i].device.type != "cpu":
                    taken.add(i)
        return taken

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
        self.replicas.clear()
        self.unhooked.clear()

    def forwards(self, module: nn.Module, frame: FrameType) -> None:
        """Take note of a forward, if it is one that arms an all-reduce."""
        for replica in self.replicas:
            if replica.module is module and torch.is_grad_enabled():
                wanted = bool(replica.module.require_backward_grad_sync)
                # What is armed stays so until a backward.
                if wanted or not replica.armed:
                    replica.armed = wanted
                    replica.line = self._sites.find(frame).line

    def describe(self, running: Backward) -> None:
        """Say of a backward that is over whether a forward had armed its all-reduce, and what the flag is."""
        concerned = self._concerned(running)
        if concerned:
            # One that is not armed is what the step lacks.
            first = min(concerned, key=lambda replica: bool(replica.armed))
            flags = [each.module.require_backward_grad_sync for each in concerned]
            running.details["armed"] = first.armed
            running.details["armed_line"] = first.line
            running.details["no_sync"] = not all(flags)

    def _concerned(self, running: Backward) -> list[_Replica]:
        """Return the replicas that a backward has reached, as far as it is known whether they were armed."""
        reached = {*running.reached}
        concerned = []
        for replica in self.replicas:
            # A comm hook may send nothing on purpose.
            silent = replica.has_comm_hook and replica.armed and not running.syncs
            if reached.isdisjoint(replica.leaves) or silent:
                continue
            if replica.armed is not None:
                concerned.append(replica)
            else:  # its forward, if there was one, came before the recording
                replica.armed = False
        return concerned

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

    def _after(self, i: int) -> Callable[[Tensor], None]:
        here = ref(self)

        def hook(_: Tensor) -> None:
            collectives = here()
            if collectives is not None:
                unseen(collectives._leaves.accumulated, i)

        return patches.guarded(hook)

    def collective(
        self,
        op: str,
        whole: list[Tensor],
        output: list[Tensor],
        frame: FrameType,
    ) -> None:
        """Take note of a collective, if it moves gradients or sharded parameters that are recorded."""
        inside = torch._C._current_graph_task_id() != -1
        running = self._leaves.running_here() if inside else None
        details = self._moves(op, whole)
        if running is None:
            sync = Sync("", self._sites.find(frame), "", details)
        else:
            # A collective counts no version: what a hook of the user's makes of a gradient with it is not known.
            running.by_hook.update(running.hooked)
            # Once it is over, `.grad` is no longer what this backward made of it.
            self._leaves.settle(running)
            sync = Sync(running.label, running.site, "backward", details)
        moving = _moving(frame) if self._shards.by_id else None
        if moving is not None:
            self._fsdp(sync, moving, output, running)
        elif op == "all-reduce":
            self._all_reduce(sync, whole, running, frame)

    def _all_reduce(
        self,
        sync: Sync,
        whole: list[Tensor],
        running: Backward | None,
        frame: FrameType,
    ) -> None:
        replica = None if running is None else self._sender(frame, running)
        if running is None or replica is None:
            self._by_hand(sync, whole)
        else:
            count = sum(tensor.numel() for tensor in whole)
            self._ddp(sync, replica, count, running)

    def _moves(self, op: str, whole: list[Tensor]) -> Details:
        """Return what a collective is, and how much it moves."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        return {"op": op, "bytes": size, "ranks": self._ranks}

    def _begin(self, sync: Sync, leaves: Leaves) -> None:
        sync.details["parameters"] = [self._leaves.named.names[i] for i in leaves]
        self._rows.begin(sync)

    def _over(self, sync: Sync) -> None:
        sync.present = bytes(self._leaves.present)
        self._rows.finish(sync)

    def _inside(
        self,
        running: Backward,
        sync: Sync,
        leaves: Leaves,
    ) -> None:
        """Leave what a collective does to these leaves to the end of the backward."""
        sync.leaves = leaves
        running.syncs = [*running.syncs, sync]
        running.synced = {*running.synced, *leaves}

    # --- FSDP ----------------------------------------------------------------------------------

    def _fsdp(
        self,
        sync: Sync,
        moving: _Moving,
        output: list[Tensor],
        running: Backward | None,
    ) -> None:
        _, shards = self._shards.columns(moving.units)
        if not shards:
            return
        op = sync.details["op"]
        sync.details["ranks"] = moving.ranks or self._ranks
        if op == "reduce-scatter" and not moving.averages:
            sync.details["reduction"] = ""
        self._begin(sync, shards)
        if running is None or op == "all-gather":
            self._over(sync)
            return
        if op == "all-reduce":
            # What groups of ranks reduce between them is in no `.grad` yet.
            self._inside(running, sync, [])
        else:
            self._scatter(sync, moving, output[0], running)

    def _scatter(
        self,
        sync: Sync,
        moving: _Moving,
        output: Tensor,
        running: Backward,
    ) -> None:
        """Note what a reduce-scatter brings to shards."""
        wholes, shards = self._shards.columns(moving.units)
        # FSDP has used what it scattered before, and may free it: one piece at a time is held.
        self._read_pieces(running)
        sync.contributed = shards
        if moving.averages:
            sync.pieces = _pieces(shards, moving.units, output)
        sync.unmeasured = [i for i in shards if i not in sync.pieces]
        self._inside(running, sync, [*wholes, *shards])

    def _read_pieces(self, running: Backward) -> None:
        """Read what reduce-scatters of this backward brought, and let go of it."""
        for sync in running.syncs:
            for i, piece in sync.pieces.items():
                self._leaves.read(sync, ("contribution",), {i: piece.reshape(-1)})
                keep_for_stream(piece)  # it was scattered on a stream of FSDP's
            sync.pieces.clear()

    # --- DDP -----------------------------------------------------------------------------------

    def _sender(self, frame: FrameType, running: Backward) -> _Replica | None:
        """Return whose bucket is reduced now inside a backward; None where it is not DDP that reduces."""
        left = {*running.reached} - running.synced
        sender: _Replica | None = None
        for replica in reversed(self.replicas):
            if replica.armed and not left.isdisjoint(replica.leaves):
                sender = replica
        if sender is None:
            return None
        for at in _outwards(frame):
            # `dist.all_reduce` is on the stack where the user called it, or a comm hook; DDP's reducer calls no Python.
            by_hand = at.f_code is _ALL_REDUCE and not sender.has_comm_hook
            if by_hand or at.f_code.co_filename.endswith(_BATCH_NORM):
                return None
        return sender

    def _ddp(
        self,
        sync: Sync,
        replica: _Replica,
        count: int,
        running: Backward,
    ) -> None:
        """Note the all-reduce of a bucket of so many elements, and the line of the forward that armed it."""
        sync.details["armed_line"] = replica.line
        sync.details["ranks"] = dist.get_world_size(replica.module.process_group)
        if replica.has_comm_hook:
            sync.details["reduction"] = ""
        leaves = self._bucket(replica, count, running)
        self._begin(sync, leaves)
        self._inside(running, sync, leaves)

    def _bucket(
        self,
        replica: _Replica,
        count: int,
        running: Backward,
    ) -> Leaves:
        """Return the leaves in a bucket: the first so many elements of what has arrived, and of what is unused.

        DDP cannot be asked, for it holds its lock.
        """
        free = [i for i in replica.leaves if i not in running.synced]
        arrived = [i for i in running.reached if i in free]
        inside: Leaves = []
        total = 0
        for i in dict.fromkeys([*arrived, *free]):
            if total >= count:
                break
            inside.append(i)
            total += self._leaves.sizes[i]
        # A comm hook may send something else.
        return inside if total == count else arrived

    # --- by hand -------------------------------------------------------------------------------

    def _by_hand(self, sync: Sync, whole: list[Tensor]) -> None:
        """Note an all-reduce of the user's, if it reduces any `.grad`; what it makes of them is not known."""
        leaves = self.grads_in(whole)
        if leaves:
            self._reduces(sync, leaves, "")

    def reduced(
        self, tensor: Tensor, leaves: Leaves, reduction: str, frame: FrameType
    ) -> None:
        """Note a sum or a mean over all ranks of a tensor with the `.grad` of these leaves, which is there."""
        sync = Sync(
            "", self._sites.find(frame), "", self._moves("all-reduce", [tensor])
        )
        self._reduces(sync, leaves, reduction)

    def _reduces(
        self,
        sync: Sync,
        leaves: Leaves,
        reduction: str,
    ) -> None:
        sync.details["reduction"] = reduction
        self._begin(sync, leaves)
        sync.changed = leaves
        self._leaves.update(leaves)
        if reduction:
            self._leaves.read_grads(sync, leaves)
        else:  # The library writes later, and without a new version.
            self._leaves.leave_unread(sync, leaves)
        self._over(sync)

    def grads_in(self, whole: list[Tensor]) -> Leaves:
        """Return the leaves whose `.grad` is in what is reduced."""
        sent = {tensor.untyped_storage().data_ptr() for tensor in whole}
        leaves = []
        for i, tensor in enumerate(self._leaves.tensors):
            if tensor.grad is None:
                continue
            grad = local(tensor.grad)
            strided = grad.layout is torch.strided
            if strided and grad.untyped_storage().data_ptr() in sent:
                leaves.append(i)
        return leaves

    # --- once a backward is over ---------------------------------------------------------------

    def finish(self, running: Any) -> None:
        """Read what the collectives of a backward left in `.grad`, once it is over."""
        leaves = self._leaves
        present = bytearray(running.present)
        self._read_pieces(running)
        self._disarm(running)
        for i in running.synced:
            if i not in running.reached:
                present[i] = running.had[i]
        running.present = bytes(present)
        for sync in running.syncs:
            sync.changed = sync.leaves
            sync.contributed = [i for i in sync.contributed if leaves.present[i]]
            leaves.read_grads(sync, sync.leaves)
            for i in sync.leaves:
                present[i] = leaves.present[i]
            sync.present = bytes(present)
            self._rows.finish(sync)

    def _disarm(self, running: Any) -> None:
        """Disarm the replicas that a backward has synchronised: a forward has to arm them again."""
        for replica in self.replicas:
            if not running.synced.isdisjoint(replica.leaves):
                replica.armed = False
