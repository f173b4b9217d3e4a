"""What reaches the leaves while backwards run, taken by our hooks on whichever thread the engine calls them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from threading import get_ident
from typing import Any, Protocol

import torch

from accumviz.instruments.leaves import Hook, Leaves
from accumviz.instruments.numbers import keep_for_stream
from accumviz.instruments.rows import Backward, Rows
from accumviz.instruments.sync import Syncs
from accumviz.ledger import PRESENT

# Contributions are reduced in bulk; beyond this many bytes held at once, in several bulks. A device
# has less to spare, and its allocator's peak is a figure that we record.
_BULK_BYTES, _BULK_BYTES_ON_DEVICE = 64 << 20, 16 << 20
_current_task = torch._C._current_graph_task_id
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Told(Protocol):
    """What is asked of the recording."""

    _rows: Rows

    def failed(self, error: Exception) -> None: ...


class Arrivals:
    """The backwards that run now, and what has reached which leaf of each.

    On the CPU our hooks run on the thread that called backward. On a device they run on the
    engine's thread for it, under the stream of the operation that brought the contribution: what
    they read is there for that stream, and after the backward for the caller's.
    """

    def __init__(self, leaves: Leaves, syncs: Syncs, told: Told) -> None:
        self.open: list[Backward] = []
        self._leaves, self._syncs, self._told = leaves, syncs, weakref.ref(told)
        # Threads other than the one we were opened in, and the leaves that their backwards reach.
        self._opener, self.shared = get_ident(), False
        # Not empty as long as no two threads call our hooks at once; a list, because the hooks hold it.
        self._alone = [True]
        self._theirs: set[int] = set()
        self._lock = threading.RLock()
        leaves.hook_of = self._hook_of

    def begin(self, running: Backward) -> None:
        """This backward runs from now on."""
        if self.shared:
            # On a device, what tells the threads' backwards apart is the engine's number of the task.
            def note(_: Any) -> None:
                running.task = _current_task()

            running.tags = [node.register_prehook(note) for node in running.nodes]
        self.open.append(running)

    def end(self, running: Backward) -> None:
        """It is over."""
        self.open.remove(running)
        for tag in running.tags:
            tag.remove()

    def share_with_threads(self) -> None:
        """From now on our hooks tell which thread's backward reached a leaf: they are called inside it."""
        if not self.shared:
            self.shared = True
            self._alone.clear()
            for running in self.open:
                running.loose = True
        self._leaves.hook()

    def on_devices(self, devices: set[torch.device]) -> None:
        """Leaves on several devices are reached on several threads at once."""
        if len(devices) > 1:
            self._alone.clear()

    def mine(self) -> list[int] | None:
        """The leaves (None: all) that the thread we were opened in may look at.

        Reading a `.grad` while another thread's backward writes it can end the process.
        """
        return [i for i in range(len(self._leaves)) if i not in self._theirs] if self._theirs else None

    def by_opener(self, thread: int) -> bool:
        """Whether this is the thread we were opened in."""
        return thread == self._opener

    def running(self) -> Backward | None:
        """The backward that the caller is inside of, if any; on a device, hooks run on the engine's threads."""
        if not self.open:
            return None
        thread, task = get_ident(), _current_task()
        untagged = None
        for running in reversed(self.open):
            if running.thread == thread or (task != -1 and running.task == task):
                return running
            if running.task is None and untagged is None:
                untagged = running
        return None if task == -1 else untagged or self.open[-1]

    def _hook_of(self, i: int) -> Hook:
        # The tensor holds its hook: one that held the recording would keep both alive for ever.
        here, running_now, alone = weakref.ref(self), self.open, self._alone
        tensor = self._leaves.tensors[i]
        size = tensor.numel() * tensor.element_size()
        if i in self._syncs.watched:
            return self._syncs.hook_of(i)
        bulk = _BULK_BYTES if tensor.device.type == "cpu" else _BULK_BYTES_ON_DEVICE
        stream_of = _raw_stream if tensor.device.type == "cuda" else None

        def hook(grad: torch.Tensor | None) -> None:
            if not running_now or grad is None:  # autograd.grad runs hooks too, but writes no `.grad`
                return
            running = running_now[0]
            # By far the most frequent case first: this runs once per parameter and backward.
            quick = alone and running.had[i] and i not in running.held and i not in running.settled
            if quick:
                running.held[i] = grad.detach()
                running.waiting += size
                if stream_of is not None:
                    running.streams.add(stream_of(grad.get_device()))
                if running.waiting <= bulk:
                    return
            arrivals = here()
            if arrivals is None:
                return
            try:
                if quick:
                    arrivals.reduce_held(running)
                else:
                    arrivals._receive(i, grad, bulk)
            except Exception as error:  # a hook that raises would end the user's backward
                arrivals._failed(error)

        return hook

    def _failed(self, error: Exception) -> None:
        told = self._told()
        if told is not None:
            told.failed(error)

    def _receive(self, i: int, grad: torch.Tensor, bulk: int) -> None:
        with self._lock:
            running = self.open[-1]
            if len(self.open) > 1:
                running = self.running() or running
            theirs = running.thread != self._opener
            if theirs:
                self._theirs.add(i)
            running.receive(i, grad, theirs or self._leaves.freed_by_user(i))
            if grad.is_cuda and _raw_stream is not None:
                running.streams.add(_raw_stream(grad.get_device()))
            if running.waiting > bulk:
                # Another device's stream is none of this thread's.
                self.reduce_held(running, grad.device)

    def settle(self, running: Backward) -> None:
        """Reduce what has reached leaves so far, while it is there to be read."""
        with self._lock:
            fresh = [i for i in (*running.fresh, *self._arrived_unhooked(running)) if i not in running.settled]
            self._leaves.read(running, fresh, "contribution")
            self._take_as_settled(running, fresh)
            arrived = [*fresh, *running.held]
            self.reduce_held(running)
            self._leaves.read(running, arrived)

    def _arrived_unhooked(self, running: Backward) -> list[int]:
        leaves, had = self._leaves, running.had
        if self.shared:
            return []
        return [i for i in leaves.unhooked if not had[i] and leaves.tensors[i].grad is not None]

    def reduce_held(self, running: Backward, device: torch.device | None = None) -> None:
        """Reduce the contributions that are held (only those on this device), and let go of them."""
        held, running.held, running.waiting = running.held, {}, 0
        if device is not None:
            running.held = {i: grad for i, grad in held.items() if grad.device != device}
            held = {i: grad for i, grad in held.items() if grad.device == device}
        if held:
            self._leaves.reduce(running, "contribution", list(held.items()))
            if running.streams and _raw_stream is not None:
                current = {_raw_stream(grad.get_device()) for grad in held.values() if grad.is_cuda}
                if running.streams != current:
                    keep_for_stream(list(held.values()))
            self._take_as_settled(running, held)

    def _take_as_settled(self, running: Backward, indices: Iterable[int]) -> None:
        told = self._told()
        running.settled |= dict.fromkeys(indices, 0 if told is None else len(told._rows))
        self._leaves.note(indices)

    def read(self, running: Backward, changed: list[int]) -> bool:
        """Give a backward that is over its numbers; False if it reached none of our leaves."""
        leaves, had = self._leaves, running.had
        if running.synced:
            changed = [i for i in changed if i not in running.synced]
        touched = [i for i in changed if not had[i] and i in leaves.unhooked and leaves.present[i]]
        if running.loose:
            touched = [i for i in changed if not had[i] and i not in running.held and leaves.present[i]]
        if len(touched) < len(changed) or running.fresh or running.held or running.settled:
            self._read_summed(running, touched, changed)
        elif not touched and not self.by_opener(running.thread):
            return False  # another thread's training, not of these parameters
        else:
            running.same = running.contributed = running.changed = touched
            leaves.read(running, touched, "contribution")
            running.present = bytes(leaves.present)
        return True

    def _read_summed(self, running: Backward, fresh: list[int], changed: list[int]) -> None:
        """Where `.grad` is not just what this backward brought, or was changed while it ran, read both."""
        leaves, told = self._leaves, self._told()
        early = dict(running.settled)
        fresh = [i for i in dict.fromkeys([*fresh, *running.fresh]) if i not in running.settled]
        leaves.read(running, fresh, "contribution")
        self.reduce_held(running)
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
        if early and told is not None:
            told._rows.expect(running, touched)
