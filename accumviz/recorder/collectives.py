"""Collectives that move gradients between ranks: all-reduce (DDP), all-gather and reduce-scatter (FSDP).

Every collective of every backend goes through an operator of torch's `c10d` library. While a
recording is open, a kernel in front of these operators takes note of the call and passes it on.
That sees what DDP's C++ reducer sends, with or without a comm hook of the user's, and what the
hook sends where it compresses. Nothing of DDP or FSDP is replaced.

`bytes` are those of the whole that is reduced or gathered: an all-reduce's tensor, what an
all-gather gives, what a reduce-scatter is given. What a ring or a tree sends on the wire differs.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from accumviz.recorder import sessions
from accumviz.recorder.callsite import CallSites, variables
from accumviz.recorder.contributions import Contributions
from accumviz.recorder.fsdp import Whole, is_own, local, pieces
from accumviz.recorder.rows import Backward, Row, Sent, Sync
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
# SyncBatchNorm, too, reduces inside a backward.
_BATCH_NORM = str(Path("nn", "modules", "_functions.py"))


class Listener(Protocol):
    """What an open recording is told of a collective: before it begins, and when it is on its way.

    Of those that move what no library asked for there is a row, by which it is told of them again.
    """

    def failed(self, error: Exception) -> None: ...
    def collective(
        self,
        op: str,
        whole: list[torch.Tensor],
        given: list[torch.Tensor],
        frame: FrameType,
    ) -> Row | None: ...
    def launched(self, row: Row, work: Any) -> None: ...


_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()
_library: Any = None


def listen(listener: Listener) -> None:
    """Tell this listener of collectives from now on."""
    global _listeners, _library  # noqa: PLW0603 - the operators are the process's
    with _lock:
        if not _listeners:
            _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
            for name in _OPERATORS:
                packet: Any = getattr(torch.ops.c10d, name, None)
                for key in _KEYS if packet is not None else ():
                    _library.impl(
                        name, _kernel(name, packet.default), key, with_keyset=True
                    )
        _listeners = (*_listeners, listener)


def leave(listener: Listener) -> None:
    """Stop telling it; the last one out leaves the operators as they were."""
    global _listeners, _library  # noqa: PLW0603 - as above
    with _lock:
        if listener in _listeners:
            _listeners = tuple(other for other in _listeners if other is not listener)
            if not _listeners:
                _library._destroy()
                _library = None


def _kernel(name: str, operator: Any) -> Callable[..., Any]:
    op, whole = _OPERATORS[name]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        begun: list[tuple[Listener, Row]] = []
        for listener in _listeners:
            try:
                # A device's thread has no frame below this one.
                row = listener.collective(
                    op, _tensors(args[whole]), _tensors(args[0]), sys._getframe()
                )
                if row is not None:
                    begun.append((listener, row))
            except Exception as error:
                sessions.failures.append(type(error).__name__)
                with contextlib.suppress(Exception):
                    listener.failed(error)
                    sessions.failures.pop()
        given = operator.redispatch(
            keyset & torch._C._after_autograd_keyset, *args, **kwargs
        )
        for listener, row in begun:
            try:
                listener.launched(row, _work(given))
            except Exception as error:
                sessions.failures.append(type(error).__name__)
                with contextlib.suppress(Exception):
                    listener.failed(error)
                    sessions.failures.pop()
        return given

    return kernel


def _work(given: Any) -> Any:
    """What a collective is waited for by, the very object that Python is given; None where that is not known."""
    boxed = given[-1] if isinstance(given, list | tuple) else given
    return (
        dist.Work.unbox(boxed)
        if isinstance(boxed, torch.ScriptObject) and hasattr(dist.Work, "unbox")
        else None
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [tensor for item in value for tensor in _tensors(item)]
        if isinstance(value, list | tuple)
        else []
    )


class Manual(NamedTuple):
    """A collective that the user's own lines began: its leaves, by which it is waited for, and whose thread it is."""

    leaves: list[int]
    work: Any
    thread: int


class Collectives:
    """The leaves that are reduced across ranks, and the collectives that do it, as they come.

    What autograd brings to such a leaf is read while it is there: later, the average replaces it.
    """

    def __init__(
        self,
        contributions: Contributions,
        sites: CallSites,
        failed: Callable[[Exception], None],
        edits: weakref.WeakMethod[Callable[[list[int]], None]],
    ) -> None:
        self._contributions, self._sites, self.failed, self._edits = (
            contributions,
            sites,
            failed,
            edits,
        )
        self._leaves = leaves = contributions.leaves
        named = leaves.named
        self._shards = named.shards
        found = dict.fromkeys(
            part
            for module in named.wrapped
            for part in module.modules()
            if _replicates(part)
        )
        self.replicas: list[Any] = list(found)
        self._members = [
            [named.index.get(id(p), -1) for p in _synced(replica)]
            for replica in self.replicas
        ]
        # Of each, whether a forward has armed its all-reduce, the line of that or of the last one, and if a backward
        # since then has spent it.
        self._armed: list[tuple[bool, int, bool] | None] = [None] * len(self.replicas)
        # The order in which the gradients of the first synchronised backward came.
        self._arrivals: dict[int, list[int]] = {}
        self._handles: list[Any] = []
        self._ranks = 1
        self._replicated = {i for members in self._members for i in members if i >= 0}
        # The leaves whose `.grad` is changed or taken away while the backward runs.
        in_place = {
            i
            for n, members in enumerate(self._members)
            for i in members
            if _in_place(self.replicas[n])
        }
        elsewhere = {
            i for i in self._replicated if leaves.tensors[i].device.type != "cpu"
        }
        contributions.taken = (
            (in_place & self._replicated) | elsewhere | self._shards.wholes.keys()
        )
        self.unhooked = set(contributions.taken)
        leaves.always |= self._replicated | contributions.taken
        self.manual: dict[Row, Manual] = {}
        self.told = contributions.told

    def open(self) -> None:
        """Watch every collective."""
        if dist.is_available() and dist.is_initialized():
            self._ranks = dist.get_world_size()
            listen(self)

    def forwards(self, module: torch.nn.Module, frame: FrameType) -> None:
        """Take note of a forward, if it is one that arms an all-reduce."""
        n = next(
            (n for n, replica in enumerate(self.replicas) if replica is module), -1
        )
        if n < 0:
            return
        armed, wanted = (
            self._armed[n],
            bool(self.replicas[n].require_backward_grad_sync),
        )
        # One without gradients changes nothing, and what is armed stays so until a backward.
        if torch.is_grad_enabled() and (wanted or armed is None or not armed[0]):
            self._armed[n] = wanted, self._sites.find(frame).line, False

    def close(self) -> None:
        """Leave everything as it was."""
        leave(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """Let go of the modules and of what they hold."""
        self.replicas.clear()
        self._members.clear()
        self.manual.clear()
        self.told.clear()
        self.unhooked.clear()

    def hook(self) -> None:
        """Hook those of the leaves that are taken away which exist by now."""
        for i in list(self.unhooked):
            tensor: Any = self._leaves.tensors[i]
            leaf = tensor.leaf if isinstance(tensor, Whole) else tensor
            if leaf is not None and leaf.requires_grad:
                self._leaves.know(leaf, i)
                self._handles.append(
                    leaf.register_post_accumulate_grad_hook(self._after(i))
                )
                self.unhooked.discard(i)

    def describe(self, details: dict[str, Any], reached: Set[int] | None) -> None:
        """Say of a backward whether a forward had armed its all-reduce, what the flag is, and if in `join`.

        `reached` are the leaves that it has met, where it is over: what replicates none of them is not asked.
        """
        for name in ("armed", "armed_line", "no_sync", "spent", "join"):
            details.pop(name, None)
        every = zip(self.replicas, self._armed, self._members, strict=True)
        asked = [
            (r, armed)
            for r, armed, own in every
            if armed and (reached is None or not reached.isdisjoint(own))
        ]
        if not asked:
            return
        # One that is not armed is what the step lacks.
        _, (armed, line, spent) = next(
            (one for one in asked if not one[1][0]), asked[-1]
        )
        details["armed"], details["armed_line"] = armed, line
        details["no_sync"] = any(
            not replica.require_backward_grad_sync for replica, _ in asked
        )
        if spent:
            details["spent"] = True
        if any(
            getattr(getattr(replica, "_join_config", None), "enable", False)
            for replica, _ in asked
        ):
            details["join"] = True

    def _after(self, i: int) -> Callable[[torch.Tensor], None]:
        here = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            collectives = here()
            if collectives is None:
                return
            try:
                running = collectives._contributions.running()
                if running is not None:
                    leaves = collectives._leaves
                    grad = (
                        leaves.tensors[i].grad
                    )  # asked for once: FSDP's sum in another dtype is made each time
                    if i in running.written:
                        collectives._contributions.edited(running, [i])
                    elif running.had[i]:
                        leaves.reduce(
                            running, "grad", [] if grad is None else [(i, grad)]
                        )
                        running.read[i] = None
                    elif i not in running.unknown:
                        running.same[i] = None
                    leaves.saw([(i, grad)])
            except Exception as error:
                sessions.failures.append(type(error).__name__)
                with contextlib.suppress(Exception):
                    collectives.failed(error)
                    sessions.failures.pop()

        return hook

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
        if sessions.capturing():
            return None
        contributions = self._contributions
        running = (
            contributions.running() if torch._C._current_graph_task_id() != -1 else None
        )
        if running is not None and running.written:
            contributions.edited(running)
        if (
            running is not None and running.hot
        ):  # once it is over, `.grad` is no longer what this backward made of it
            contributions.reduce(running)
        details: dict[str, Any] = {
            "op": op,
            "bytes": sum(t.numel() * t.element_size() for t in whole),
        }
        details["ranks"] = self._ranks
        moving = self._shards.moving(frame, self._ranks) if self._shards else None
        arriving: dict[int, torch.Tensor | None] = {}
        leaves: list[int] = []
        if moving is not None:
            moved, details["ranks"] = moving.units, moving.ranks
            units = [
                self._shards.by_id[id(unit)]
                for unit in moved
                if id(unit) in self._shards.by_id
            ]
            shards = [i for _, inside in units for i in inside]
            if op == "reduce-scatter":
                leaves = [*(i for i, _ in units), *shards]
                details |= (
                    {}
                    if moving.divisor == moving.ranks
                    else {"divisor": moving.divisor}
                )
            if op == "reduce-scatter" and not moving.waits:
                new = pieces(moved, output[0]) if len(shards) == len(moved) else None
                arriving = (
                    dict(zip(shards, new, strict=True))
                    if new
                    else dict.fromkeys(shards)
                )
            concerned = shards
        elif op != "all-reduce":
            return None
        elif (
            running is not None
            and any(armed and armed[0] for armed in self._armed)
            and not self._hand(whole, frame)
        ):
            concerned = leaves = self._bucket(whole, frame, running, details)
        else:
            return self._by_hand(whole, frame, running, details)
        if not concerned:
            return None
        details["parameters"] = [self._leaves.named.names[i] for i in concerned]
        rows = contributions.rows
        if running is not None:
            row = rows.begin("sync", running.label, running.site, "backward", details)
        else:
            row = rows.begin("sync", "", self._sites.find(frame), "", details)
        if running is not None and (
            leaves or op == "all-reduce"
        ):  # FSDP's between groups, of what is no `.grad` yet
            sent = (
                self._sent(whole, frame, leaves, details["ranks"])
                if "by_comm_hook" in details
                else None
            )
            running.syncs = [*running.syncs, Sync(row, leaves, arriving, sent)]
            running.synced = {*running.synced, *leaves}
        else:
            row.present = bytes(self._leaves.present)
            rows.finish(row)
        return None

    def _sent(
        self, whole: list[torch.Tensor], frame: FrameType, leaves: list[int], ranks: int
    ) -> Sent | None:
        """What a comm hook of the user's sends of the gradients in a bucket; None where that cannot be compared."""
        grads, reduction = (
            [self._leaves.tensors[i].grad for i in leaves],
            _reduction(frame, ranks),
        )
        # What is sent from where `.grad` is may have been divided there.
        if (
            reduction not in ("sum", "avg")
            or self._grads_in(whole)
            or (before := _length(grads)) is None
        ):
            return None
        sent = _length(whole)
        factor = (
            None
            if sent is None
            else sent / before / (ranks if reduction == "avg" else 1)
        )
        return (
            None
            if factor is None
            else Sent(whole, [tensor._version for tensor in whole], factor)
        )

    def _by_hand(
        self,
        whole: list[torch.Tensor],
        frame: FrameType,
        running: Backward | None,
        details: dict[str, Any],
    ) -> Row | None:
        """The row of an all-reduce that no library began, if it reduces any `.grad`: what it gives is not there yet."""
        leaves = self._grads_in(whole)
        if not leaves:
            return None
        details["parameters"] = [self._leaves.named.names[i] for i in leaves]
        details["reduction"] = (
            _reduction(frame, self._ranks) if self._wholly(leaves, whole) else ""
        )
        rows = self._contributions.rows
        if running is not None:
            self._contributions.settle(running)
            row = rows.begin("sync", running.label, running.site, "backward", details)
        else:
            if (edits := self._edits()) is not None:
                edits(leaves)
            row = rows.begin("sync", "", self._sites.find(frame), "", details)
        self.manual[row] = Manual(leaves, None, get_ident())
        return row

    def _hand(self, whole: list[torch.Tensor], frame: FrameType | None) -> bool:
        """Whether an all-reduce inside a backward for which one is armed is the user's own, and none of DDP's."""
        leaves = self._grads_in(whole)
        if not leaves or not self._replicated.issuperset(leaves):
            return bool(leaves)
        if any(
            getattr(replica, "_comm_hooks", ()) for replica in self.replicas
        ):  # they call it as users do
            return False
        while frame is not None and frame.f_code is not _ALL_REDUCE:
            frame = frame.f_back
        return frame is not None

    def _wholly(self, leaves: list[int], whole: list[torch.Tensor]) -> bool:
        """Whether all of these leaves' `.grad` is reduced, and would be seen to change after that."""
        grads = [self._leaves.tensors[i].grad for i in leaves]
        # On a device, what is changed through `.data` is not seen: there it takes an edit to tell a sum.
        seen = all(grad is not None and grad.is_cpu for grad in grads)
        return seen and sum(tensor.numel() for tensor in whole) >= sum(
            self._leaves.sizes[i] for i in leaves
        )

    def launched(self, row: Row, work: Any) -> None:
        """The collective of this row is on its way."""
        if row in self.manual:
            self.manual[row] = self.manual[row]._replace(work=work)

    def waited(self, work: Any) -> None:
        """Somebody has waited for a collective: what it gave is there, and nothing has been done with it."""
        if not self.manual:
            return
        for row, known in list(
            self.manual.items()
        ):  # other threads' come and go meanwhile
            if known.work is work and known.thread == get_ident():
                del self.manual[row]
                self._over(row, known.leaves)
                self.told |= dict.fromkeys(known.leaves, row)
                return

    def _over(self, row: Row, leaves: list[int], *, read: bool = True) -> None:
        row.changed = leaves  # the library writes without a new version
        (self._leaves.read if read else self._leaves.leave_unread)(row, leaves)
        self._leaves.note(leaves)
        row.present = bytes(self._leaves.present)
        self._contributions.rows.finish(row)

    def _bucket(
        self,
        whole: list[torch.Tensor],
        frame: FrameType,
        running: Backward,
        details: dict[str, Any],
    ) -> list[int]:
        """The leaves in the bucket that DDP reduces now.

        Buckets are filled from the last parameter to the first, and from the second synchronised
        backward on in the order in which the gradients of the first came. (DDP cannot be asked:
        it holds its lock.)
        """
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_filename.endswith(_BATCH_NORM):
                return []
            above = above.f_back
        count = sum(tensor.numel() for tensor in whole)
        arrived = [i for i in running.met if i in self._replicated]
        left = [i for i in arrived if i not in running.synced]
        owner = next(
            (n for n, members in enumerate(self._members) if set(left) & set(members)),
            -1,
        )
        armed = self._armed[owner] if owner >= 0 else None
        if armed is None:
            return []
        details["armed_line"] = armed[1]
        details["ranks"] = dist.get_world_size(self.replicas[owner].process_group)
        if _own_comm_hook(self.replicas[owner]):
            details["by_comm_hook"] = (
                math.nan
            )  # until it is known what the hook makes of the sum
        mine = set(self._members[owner])
        for order in (
            self._arrivals.get(owner, ()),
            arrived,
            self._members[owner][::-1],
        ):
            held, inside = 0, []
            for i in (i for i in order if i in mine and i not in running.synced):
                if held >= count:
                    break
                inside.append(i)
                held += self._leaves.sizes[i]
            if held == count:
                return inside
        details["compressed"] = True  # a comm hook sends something else than the bucket
        return [i for i in left if i in mine]

    def _grads_in(self, whole: list[torch.Tensor]) -> list[int]:
        """The leaves whose `.grad` is reduced by hand."""
        sent = {tensor.untyped_storage().data_ptr() for tensor in whole}
        grads = ((i, tensor.grad) for i, tensor in enumerate(self._leaves.tensors))
        plain = ((i, local(grad)) for i, grad in grads if grad is not None)
        return [
            i
            for i, grad in plain
            if grad.layout is torch.strided
            and grad.untyped_storage().data_ptr() in sent
        ]

    def finish(self, running: Backward) -> None:
        """The backward is over: read what its collectives left in `.grad`."""
        leaves = self._leaves
        present = bytearray(running.present)
        for n, members in enumerate(self._members):
            armed = self._armed[n]
            if armed is None or not running.synced & set(members):
                continue
            self._arrivals.setdefault(
                n, [i for i in running.met if i in self._replicated]
            )
            self._armed[n] = False, armed[1], True
        for i in running.synced:
            if i not in running.met:
                present[i] = running.had[i]
        running.present = bytes(present)
        for row, concerned, arriving, sent in running.syncs:
            row.changed = concerned
            if (
                sent is not None
                and [tensor._version for tensor in sent.tensors] == sent.versions
            ):
                gave, made = (
                    _length(sent.tensors),
                    _length([leaves.tensors[i].grad for i in concerned]),
                )
                if gave is not None and made is not None:
                    row.take(("detail", "by_comm_hook"), sent.factor * made / gave)
            row.contributed = [i for i in arriving if leaves.present[i]]
            leaves.read(row, concerned)
            for i in row.contributed:
                new = arriving[i]
                brought = (
                    new if new is not None or present[i] else leaves.tensors[i].grad
                )
                if brought is None:
                    row.unmeasured = [*row.unmeasured, i]
                else:
                    leaves.reduce(row, "contribution", [(i, brought.reshape(-1))])
                    keep_for_stream(
                        [brought]
                    )  # what was scattered was made on a stream of its own
            for i in concerned:
                present[i] = leaves.present[i]
            row.present = bytes(present)
            self._contributions.rows.finish(row)

    def claim(self, changed: list[int]) -> list[int]:
        """Give the changes that collectives by hand made to them; return the others.

        Of what was done between such a collective and now, nothing is known: nor is then what it gave.
        """
        manual, self.manual = self.manual, {}
        for row, (concerned, work, _) in manual.items():
            row.details["reduction"] = ""
            self._over(
                row,
                concerned,
                read=work is None or (not sessions.capturing() and work.is_completed()),
            )
        taken = {i for known in manual.values() for i in known.leaves}
        return [i for i in changed if i not in taken] if taken else changed


def _reduction(frame: FrameType | None, ranks: int) -> str:
    """What an all-reduce over so many ranks reduces to, by its name in torch; nothing where nobody can tell."""
    while frame is not None:
        if frame.f_code is _ALL_REDUCE:
            known = dict(variables(frame))
            if dist.get_world_size(known.get("group")) != ranks:
                return ""
            return str(known.get("op")).rpartition(".")[2].lower()
        frame = frame.f_back
    return ""


def _replicates(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def _in_place(replica: Any) -> bool:
    """Whether DDP divides and reduces in `.grad` itself, or somebody's hook decides what becomes of it."""
    return bool(
        getattr(replica, "gradient_as_bucket_view", True)
        or getattr(replica, "_comm_hooks", True)
    )


def _own_comm_hook(replica: Any) -> bool:
    """Whether a comm hook that is not torch's, all of which average, decides what becomes of gradients."""
    return any(is_own(hook) for hook, *_ in getattr(replica, "_comm_hooks", ()))


def _length(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The norm of all of these together, where they lie; None where it cannot be read."""
    found = [
        tensor.detach() for tensor in tensors if tensor is not None and readable(tensor)
    ]
    if len(found) < len(tensors) or any(
        tensor.layout is not torch.strided for tensor in found
    ):
        return None
    lengths = [
        torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in found
    ]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(lengths))
    return whole


def _synced(replica: Any) -> list[torch.Tensor]:
    """The parameters that DDP numbers, in its order."""
    ignored = set(getattr(replica, "parameters_to_ignore", ()))
    named = replica.module.named_parameters()
    return [
        tensor for name, tensor in named if tensor.requires_grad and name not in ignored
    ]
