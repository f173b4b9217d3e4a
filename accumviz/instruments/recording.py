"""The open recording: it observes, never steers, and never waits for the device."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any

import torch

from accumviz import __version__
from accumviz.graph import Graph
from accumviz.instruments import ranks, watch
from accumviz.instruments.callsite import CallSite, CallSites
from accumviz.instruments.graphs import Graphs
from accumviz.instruments.held import Held
from accumviz.instruments.leaves import Hook, Leaves
from accumviz.instruments.losses import describe_root
from accumviz.instruments.naming import Named, optimizer_name
from accumviz.instruments.numbers import Numbers
from accumviz.instruments.rows import Backward, Row, Rows
from accumviz.instruments.sync import Syncs
from accumviz.ledger import PRESENT, Ledger, Parameter

# Contributions are reduced in bulk; beyond this many bytes held at once, in several bulks.
_BULK_BYTES = 64 << 20


class Recording:
    """The open recording: mutable while the loop runs; `recording.ledger` is its frozen ledger.

    `record` makes it, `with` opens and closes it, once. Both properties may be read at any time,
    inside the block too. Should recording itself fail, it warns, stops and keeps what it has: the
    training goes on.
    """

    def __init__(
        self,
        named: Named,
        frame: FrameType | None,
        *,
        path: str | Path | None,
        exact: int,
        memory: bool | None,
        graphs: bool = False,
    ) -> None:
        self._open: list[Backward] = []
        self._leaves = Leaves(named, exact, self._hook_of)
        self._frame: FrameType | None = frame
        self._optimizers: list[torch.optim.Optimizer] = []
        self._optimizer_names: list[str] = []
        self._memory = Held(memory)
        self._sites = CallSites()
        self._graphs = Graphs(named.modules, self._sites) if graphs else None
        self._steps: list[tuple[Any, FrameType, int]] = []
        self._entered = self._closed = False
        self._failure = ""
        # Threads other than the one we were opened in, and the leaves that their backwards reach.
        self._opener, self._shared = get_ident(), False
        # Not empty as long as no other thread trains; a list, because the hooks hold it.
        self._alone = [True]
        self._theirs: set[int] = set()
        self._start = perf_counter()
        small = list(self._leaves.small)
        self._syncs = Syncs(self, self._leaves)
        self._rank = ranks.where()
        self._rows = Rows(self._leaves.sizes, small, ranks.ledger_path(path))
        for optimizer in named.optimizers:
            self._meet(optimizer)

    def __enter__(self) -> Recording:
        if self._entered:
            raise RuntimeError("this recording has been used already; call record(...) again for a new one")
        self._entered = True
        self._start = perf_counter()
        self._leaves.update()
        self._rows.begin(self._parameters(), self._meta())
        if self._graphs is not None:
            self._graphs.open()
        self._syncs.open(lambda frame: self._sites.find(frame).line)
        ranks.opened(self)
        watch.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close()
        except Exception as failure:
            self.failed(failure)

    def _leave(self) -> None:
        watch.leave(self)
        self._syncs.close()
        self._leaves.unhook()
        if self._graphs is not None:
            self._graphs.close()

    def _close(self) -> None:
        self._leave()
        if not self._closed:
            self._closed = True
            self._edits()
            self._leave_running()
            self._frame = None
            self._rows.settle(self._parameters, self._meta, wait=True)
            self._rows.close()

    def _leave_running(self) -> None:
        """What still runs, on another thread or around a hook that closes us, is not waited for."""
        for running in self._open:
            if running.fresh or running.held or running.settled:
                running.details["error"] = "the recording was closed while this backward ran"
                running.present, running.done = bytes(self._leaves.present), True
                for sync in running.syncs:
                    sync.row.present, sync.row.done = running.present, True
            else:
                self._rows.pending.remove(running)
        self._open.clear()

    def write_out(self) -> None:
        """Write what is whole to the file, if there is one: this process is about to be ended."""
        self._rows.settle(self._parameters, self._meta, wait=True)

    @property
    def ledger(self) -> Ledger:
        """Everything recorded so far, frozen; waits for numbers still on their way from a device."""
        if self._entered and not self._closed and not self._open:
            self._edits()
        self._rows.settle(self._parameters, self._meta, wait=True)
        return self._rows.ledger(self._parameters(), self._meta())

    @property
    def graphs(self) -> dict[int, Graph]:
        """The graph that each backward ran, by its event's index; empty without `record(..., graphs=True)`.

        `graph.meta["order"]` holds the ids of its nodes in the order in which the engine ran them.
        """
        self._rows.settle(self._parameters, self._meta, wait=True)
        return self._rows.graphs()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._entered else "not entered: use it in a with statement"
        state = f"stopped by {self._failure}" if self._failure else state
        return f"Recording ({state}): {len(self._rows)} events × {len(self._leaves)} parameters"

    # --- what watch tells us -------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Stop observing, keep what is recorded, and say so once: training goes on as if we were not there."""
        if self._failure:
            return
        self._failure = f"{type(error).__name__}: {error}"
        self._open.clear()
        self._closed = True
        self._leave()
        self._rows.give_up()
        said = f"accumviz stopped recording after {len(self._rows)} events, training goes on: {self._failure}"
        try:
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        except Warning:  # made an error by the user's filters, it would end the training that we must not disturb
            print(said, file=sys.stderr)

    def backward_begins(self, frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Backward:
        leaves = self._leaves
        within, thread = "", get_ident()
        if self._steps:
            within = self._within()
        self._syncs.hook()
        if thread == self._opener:
            changed = self._syncs.claim(leaves.update(self._mine(), hook=True))
        else:
            changed = []
            self._share_with_threads()
        if changed:
            self._emit("edit", CallSite(), "", {}, changed)
        running = Backward(self._sites.find(frame), perf_counter() - self._start, within, bytes(leaves.present), thread)
        describe_root(running, args, kwargs)
        self._syncs.describe(running.details)
        self._rows.pending.append(running)
        running.storages = self._memory.before(running.nodes)
        if running.storages is not None:
            running.before = self._memory.total(running.storages)
        if self._graphs is not None:
            self._graphs.begin(running, frame, args, kwargs)
        self._open.append(running)
        return running

    def _share_with_threads(self) -> None:
        """From now on our hooks tell which thread's backward reached a leaf: they are called inside it."""
        if not self._shared:
            self._shared = True
            self._alone.clear()
            for running in self._open:
                running.loose = True
        self._leaves.hook()

    def _mine(self) -> list[int] | None:
        """The leaves (None: all) that the thread we were opened in may look at.

        Reading a `.grad` while another thread's backward writes it can end the process.
        """
        return [i for i in range(len(self._leaves)) if i not in self._theirs] if self._theirs else None

    def _arrived_unhooked(self, running: Backward) -> list[int]:
        leaves, had = self._leaves, running.had
        if self._shared:
            return []
        return [i for i in leaves.unhooked if not had[i] and leaves.tensors[i].grad is not None]

    def backward_ends(self, running: Backward, error: str) -> None:
        if running.finish_graph is not None and self._graphs is not None:
            self._graphs.end(running)
        if self._closed:
            return
        self._open.remove(running)
        leaves = self._leaves
        if running.storages is not None:
            running.after = self._memory.after(running.nodes, running.storages, keeps=running.keeps, failed=bool(error))
            running.storages = None
        running.nodes = ()
        if error:
            running.details["error"] = error[:500]
        had, unhooked = running.had, leaves.unhooked
        mine = running.thread == self._opener
        changed = leaves.update(self._mine() if mine else [*running.held, *running.settled])
        if running.synced:
            changed = [i for i in changed if i not in running.synced]
        touched = [i for i in changed if not had[i] and i in unhooked and leaves.present[i]]
        if running.loose:
            touched = [i for i in changed if not had[i] and i not in running.held and leaves.present[i]]
        if len(touched) < len(changed) or running.fresh or running.held or running.settled:
            self._read_summed(running, touched, changed)
        elif not touched and not mine:
            self._rows.pending.remove(running)  # another thread's training, not of these parameters
            return
        else:
            running.same = running.contributed = running.changed = touched
            leaves.read(running, touched, "contribution")
            running.present = bytes(leaves.present)
        if running.syncs:
            self._syncs.finish(running)
        self._finish(running)

    def _read_summed(self, running: Backward, fresh: list[int], changed: list[int]) -> None:
        """Where `.grad` is not just what this backward brought, or was changed while it ran, read both."""
        leaves = self._leaves
        early = dict(running.settled)
        fresh = [i for i in dict.fromkeys([*fresh, *running.fresh]) if i not in running.settled]
        leaves.read(running, fresh, "contribution")
        self._reduce_held(running)
        # Freed before we could read it: that something arrived is known, not how much.
        lost = [i for i in fresh if not leaves.present[i]]
        unknown = running.unknown | dict.fromkeys(lost)
        touched = [*fresh, *(i for i in running.settled if i not in fresh)]
        running.contributed = touched
        others = [i for i in changed if i not in running.settled and i not in running.fresh and i not in fresh]
        running.changed = touched + others
        running.same = [i for i in fresh if i not in unknown]
        leaves.read(running, [i for i in touched if i not in running.same and i not in running.synced] + others)
        if unknown:
            running.unmeasured = list(unknown)
            running.details["unmeasured"] = [leaves.named.names[i] for i in unknown]
        present = bytearray(leaves.present)
        for i in early:  # an optimizer that steps in a hook may have freed it since
            present[i] = PRESENT
        running.present = bytes(present)
        if early:
            self._rows.expect(running, touched)

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        if not self._leaves.owns(optimizer):
            return
        self._before_change()
        self._steps.append((optimizer, frame, get_ident()))

    def step_ends(self, optimizer: Any, frame: FrameType) -> None:
        if self._steps and self._steps[-1][1] is frame:
            self._steps.pop()
        else:
            self._steps = [step for step in self._steps if step[1] is not frame]
        if self._leaves.owns(optimizer):
            self._step(optimizer, frame, {})

    def step_skipped(self, optimizer: Any, frame: FrameType) -> None:
        if self._leaves.owns(optimizer):
            self._step(optimizer, frame, {"skipped": True})

    def change_begins(self, tensors: Any) -> bool:
        if not self._leaves.owns(tensors):
            return False
        self._before_change()
        return True

    def _before_change(self) -> None:
        running = self._running()
        if running is not None:
            self._settle(running)
        else:
            self._edits()

    def change_ends(self, kind: str, frame: FrameType, owner: Any, tensors: Any, details: dict[str, Any]) -> None:
        changed = self._leaves.update(self._leaves.owned(tensors) if self._shared else None)
        if kind == "unscale":  # it does not bump versions
            changed = [i for i in self._leaves.owned(owner) if self._leaves.tensors[i].grad is not None]
        site, label = self._sites.find(frame), ""
        if isinstance(owner, torch.optim.Optimizer):
            label = self._optimizer_names[self._meet(owner)]
        elif owner is not None:
            label = site.subject or type(owner).__name__
        self._emit(kind, site, label, details, changed)

    def running_backward(self) -> Backward | None:
        """The backward that the caller is inside of, if any."""
        return self._running()

    def sync_begins(self, details: dict[str, Any], frame: FrameType, running: Backward | None) -> Row:
        """Give a collective its place among the events."""
        site = running.site if running is not None else self._sites.find(frame)
        within = "" if running is None else "backward"
        row = Row("sync", running.label if running else "", site, perf_counter() - self._start, within, details)
        self._rows.pending.append(row)
        return row

    def sync_ends(self, row: Row) -> None:
        """Its numbers are taken."""
        self._finish(row)

    # --- events --------------------------------------------------------------------------------

    def _edits(self) -> None:
        if get_ident() != self._opener:
            return
        changed = self._syncs.claim(self._leaves.update(self._mine()))
        if changed:
            self._emit("edit", CallSite(), "", {}, changed)

    def _step(self, optimizer: Any, frame: FrameType, details: dict[str, Any]) -> None:
        index = self._meet(optimizer)
        details |= {"optimizer": self._optimizer_names[index], "optimizer_index": index}
        lr = [group.get("lr") for group in optimizer.param_groups]
        details["lr"] = [x if type(x) is float else _number(x) for x in lr]
        # A fused optimizer is called even when the scaler found inf; it then changes nothing.
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            details["found_inf"] = found
        changed = self._leaves.update(self._leaves.owned(optimizer) if self._shared else None)
        if getattr(optimizer, "grad_scale", None) is not None:  # unscaled inside the kernel, unseen by versions
            changed = [i for i in self._leaves.owned(optimizer) if self._leaves.tensors[i].grad is not None]
        self._emit("step", self._sites.find(frame), self._optimizer_names[index], details, changed)

    def _within(self) -> str:
        """What the caller is inside of: a step (its closure), a backward (its hooks), or nothing."""
        if self._steps:
            self._drop_stale_steps()
        if self._running():
            return "backward"
        thread = get_ident()
        return "step" if any(step[2] == thread for step in self._steps) else ""

    def _emit(self, kind: str, site: CallSite, label: str, details: dict[str, Any], changed: list[int]) -> None:
        within = self._within() if self._open or (self._steps and kind != "step") else ""
        # An event takes its place when it begins to take effect.
        row = Row(kind, label, site, perf_counter() - self._start, within, details)
        self._rows.pending.append(row)
        for name in [name for name, value in details.items() if isinstance(value, torch.Tensor)]:
            row.take(("detail", name), details.pop(name))
        if changed:
            row.changed = changed
            self._leaves.read(row, changed)
        row.present = bytes(self._leaves.present)
        self._finish(row)

    def _finish(self, row: Row) -> None:
        if row.late:
            row.numbers = Numbers([tensor for _, tensor in row.late])
        row.done = True
        if self._rows.due():
            self._rows.settle(self._parameters, self._meta)

    def _settle(self, running: Backward) -> None:
        """Reduce what has reached parameters so far, while it is there to be read."""
        fresh = [i for i in (*running.fresh, *self._arrived_unhooked(running)) if i not in running.settled]
        self._leaves.read(running, fresh, "contribution")
        self._take_as_settled(running, fresh)
        arrived = [*fresh, *running.held]
        self._reduce_held(running)
        self._leaves.read(running, arrived)

    def _reduce_held(self, running: Backward) -> None:
        held, running.held, running.waiting = running.held, {}, 0
        if held:
            self._leaves.reduce(running, "contribution", list(held.items()))
            self._take_as_settled(running, held)

    def _take_as_settled(self, running: Backward, indices: Iterable[int]) -> None:
        running.settled |= dict.fromkeys(indices, len(self._rows))
        self._leaves.note(indices)

    def _hook_of(self, i: int) -> Hook:
        # The tensor holds its hook: one that held the recording would keep both alive for ever.
        here, running_now, alone = weakref.ref(self), self._open, self._alone
        tensor = self._leaves.tensors[i]
        size = tensor.numel() * tensor.element_size()
        if i in self._syncs.watched:
            return self._sync_hook_of(i)

        def hook(grad: torch.Tensor | None) -> None:
            if not running_now or grad is None:  # autograd.grad runs hooks too, but writes no `.grad`
                return
            running = running_now[0]
            # By far the most frequent case first: this runs once per parameter and backward.
            quick = alone and running.had[i] and i not in running.held and i not in running.settled
            if quick:
                running.held[i] = grad.detach()
                running.waiting += size
                if running.waiting <= _BULK_BYTES:
                    return
            recording = here()
            if recording is None:
                return
            try:
                if quick:
                    recording._reduce_held(running)
                else:
                    recording._receive(i, grad)
            except Exception as error:  # a hook that raises would end the user's backward
                recording.failed(error)

        return hook

    def _sync_hook_of(self, i: int) -> Hook:
        here, running_now = weakref.ref(self), self._open

        def hook(grad: torch.Tensor | None) -> None:
            recording = here()
            if not running_now or grad is None or recording is None:
                return
            try:
                recording._syncs.arrives(recording._running() or running_now[-1], i, grad, len(recording._rows))
            except Exception as error:
                recording.failed(error)

        return hook

    def _receive(self, i: int, grad: torch.Tensor) -> None:
        running = self._open[-1]
        if len(self._open) > 1:
            running = self._running() or running
        theirs = running.thread != self._opener
        if theirs:
            self._theirs.add(i)
        running.receive(i, grad, theirs or self._leaves.freed_by_user(i))
        if running.waiting > _BULK_BYTES:
            self._reduce_held(running)

    def _running(self) -> Backward | None:
        """The backward that the caller is inside of, if any; on a device, hooks run on the engine's threads."""
        if not self._open:
            return None
        thread = get_ident()
        mine = next((running for running in reversed(self._open) if running.thread == thread), None)
        return self._open[-1] if mine is None and torch._C._current_graph_task_id() != -1 else mine

    def _meet(self, optimizer: Any) -> int:
        for index, known in enumerate(self._optimizers):
            if known is optimizer:
                return index
        self._optimizers.append(optimizer)
        self._optimizer_names.append(optimizer_name(optimizer, self._frame, self._optimizer_names))
        return len(self._optimizers) - 1

    def _drop_stale_steps(self) -> None:
        """A step that raised never ends: forget it once its frame has left the stack."""
        if not self._steps:
            return
        stack = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            stack.add(id(frame))
            frame = frame.f_back
        self._steps = [step for step in self._steps if step[2] != get_ident() or id(step[1]) in stack]

    def _parameters(self) -> list[Parameter]:
        return self._leaves.parameters(self._optimizers)

    def _meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "accumviz": __version__,
            "torch": torch.__version__,
            "optimizers": list(self._optimizer_names),
        }
        if self._rank is not None:
            meta |= {"rank": self._rank[0], "ranks": self._rank[1]}
        if self._graphs is not None and self._graphs.left_out:
            meta["graphs_left_out"] = self._graphs.left_out
        return meta | ({"stopped": self._failure} if self._failure else {})


def _number(value: Any) -> float | None:
    """A learning rate, unless reading it would wait for a device."""
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        return None
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return None
