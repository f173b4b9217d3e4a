"""What reaches the leaves while backwards run, taken by our hooks on whichever thread the engine calls them."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from threading import get_ident
from typing import Any

import torch

from accumviz.ledger.events import PRESENT
from accumviz.recorder import patches
from accumviz.recorder.buffer import Buffer
from accumviz.recorder.leaves import HOT, Hook, Leaves
from accumviz.recorder.rows import Backward, Row
from accumviz.recorder.scaling import one_factor, scaling
from accumviz.recorder.transfer import keep_for_stream

# On a device, contributions are reduced in bulks of so many bytes: a call costs more there than its bytes.
_BULK_BYTES_ON_DEVICE = 16 << 20
# What FSDP takes away after the hook is held only if a copy of it costs nothing.
_SMALL = 16 << 10
_TENSOR = torch.Tensor
_Note = Callable[[Any, int, torch.Tensor], None]
_current_task = torch._C._current_graph_task_id
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Contributions:
    """What backwards bring to which leaf: the backwards that run now, what reached them, and what `.grad` was before.

    `rows` is where they go; `failed` is told of what fails in a hook. `taken` are the leaves whose
    `.grad` is changed or taken away while a backward runs, so that what comes is read at once.

    On the CPU our hooks run on the thread that called backward. On a device they run on the
    engine's thread for it, under the stream of the operation that brought the contribution: what
    they read is there for that stream, and after the backward for the caller's.
    """

    def __init__(
        self, leaves: Leaves, rows: Buffer, failed: Callable[[Exception], None]
    ) -> None:
        self.leaves, self.rows = leaves, rows
        self.open: list[Backward] = []
        self.taken: set[int] = set()
        # Of each leaf, the row of the last collective by hand that was read as soon as it was over, and nothing since.
        self.told: dict[int, Row] = {}
        self._failed = failed
        # The thread that we were opened in; whether others call backward, too.
        self.opener, self.shared = get_ident(), False
        # Not empty as long as no two threads call our hooks at once, and all leaves are on the CPU: when one hook
        # is called, what the hooks before it saw is in `.grad`. A list, because the hooks hold it.
        self._alone = [True]
        self._theirs: dict[
            int, int
        ] = {}  # the leaves that backwards of other threads reached last, and whose
        self._lock = threading.RLock()
        leaves.hook_of, leaves.written_of, leaves.around_of = (
            self._hook_of,
            self._written_of,
            self._around_of,
        )

    def begin(self, running: Backward) -> None:
        """This backward runs from now on."""
        if self.shared and len(running.nodes) == running.details.get(
            "roots", 1
        ):  # a leaf comes before any tag
            running.tagged = True
            self._tag(running, running.nodes)
        running.hot, running.unhooked = bool(self._alone), self.leaves.unhooked
        self.open.append(running)

    def _tag(self, running: Backward, nodes: Iterable[Any]) -> None:
        """On a device, what tells the threads' backwards apart is the engine's number of the task."""

        def note(_: Any) -> None:
            running.tasks = {*running.tasks, _current_task()}

        running.tags = [*running.tags, *(node.register_prehook(note) for node in nodes)]

    def nests(self, nodes: Iterable[Any]) -> None:
        """A backward from these runs inside the one that is running: it may bring contributions in parts."""
        running = self.running()
        if running is not None:
            running.hot, running.whole = False, True
            if running.tagged:
                self._tag(running, nodes)

    def forget(self) -> None:
        """Let go of what runs."""
        self.open.clear()

    def end(self, running: Backward) -> bool:
        """It is over; False if it was let go of before, by another thread that closed the recording."""
        for tag in running.tags:
            tag.remove()
        try:
            self.open.remove(running)
        except ValueError:
            return False
        return True

    def share_with_threads(self) -> None:
        """From now on our hooks tell which thread's backward reached a leaf: they are called inside it."""
        if not self.shared:
            self.shared = True
            self._alone.clear()
            for running in self.open:
                running.hot = False
            self.leaves.written_of = self.leaves.around_of = (
                None  # hooks may be called while their order changes
            )
        self.leaves.hook()

    def on_devices(self, devices: set[torch.device]) -> None:
        """Leaves on several devices are reached on several threads at once, those of one device on its own."""
        if any(device.type != "cpu" for device in devices):
            self._alone.clear()

    def look(
        self, owner: Any = None, *, into: list[tuple[int, torch.Tensor]] | None = None
    ) -> list[int]:
        """The leaves whose `.grad` has changed since we looked last, by no other thread's backward.

        `owner` is whose `.grad` the caller is about to use: that of others is looked at by their own threads.
        """
        if not self._theirs and get_ident() == self.opener:
            changed = self.leaves.update(into=into)
            # Another thread may have reached its first leaf while we looked.
            return (
                [i for i in changed if i not in self._theirs]
                if self._theirs
                else changed
            )
        owned = () if owner is None or not self.shared else self.leaves.owned(owner)
        theirs = self._theirs.copy()
        changed = self.leaves.update(
            self._unreached({*self._mine(), *owned}), into=into
        )
        # As above, or one more of its leaves.
        return [
            i
            for i in self._unreached(changed)
            if i in owned or self._theirs.get(i) == theirs.get(i)
        ]

    def _unreached(self, leaves: Iterable[int]) -> list[int]:
        """Those that no backward of another thread has reached of which the last was not said yet."""
        thread, others = (
            get_ident(),
            [
                row
                for row in self.rows.pending[:]
                if type(row) is Backward and not row.done
            ],
        )
        met = [running.met for running in others if running.thread != thread]
        return sorted(i for i in leaves if not any(i in reached for reached in met))

    def changed(self, owner: Any) -> list[int]:
        """The leaves whose `.grad` the call that just ended has changed, of this owner's where threads train."""
        alone = (
            not self.shared and get_ident() == self.opener
        )  # as in `_mine`: a thread may zero before it trains
        return self.leaves.update(None if alone else self.leaves.owned(owner))

    def prepare(self) -> None:
        """See to it that our hooks are where a backward needs them."""
        self.leaves.prepare(self._mine() if self._theirs else None)

    def _mine(self) -> list[int]:
        # Reading a `.grad` while another thread's backward writes it can end the process.
        thread, theirs = get_ident(), self._theirs
        if thread != self.opener:
            return [i for i, whose in theirs.copy().items() if whose == thread]
        return [i for i in range(len(self.leaves)) if i not in theirs]

    def running(self, *, on_cpu: bool = False) -> Backward | None:
        """The backward that the caller is inside of, if any; on a device, hooks run on the engine's threads.

        `on_cpu` says that a leaf there was reached, which is on the thread that called backward, or on
        one that began another inside it.
        """
        opened = self.open[
            ::-1
        ]  # a copy: other threads' backwards begin and end meanwhile
        if not opened:
            return None
        thread, task = get_ident(), _current_task()
        for running in opened:
            if running.thread == thread or task in running.tasks:
                return running
        if task == -1:
            return None
        # Not one whose task is known once it has begun: it has not, or this is another's.
        return next(
            (each for each in opened if not each.tagged and (each.whole or not on_cpu)),
            None,
        )

    def _hook_of(self, i: int) -> Hook:
        # The tensor holds its hook: one that held the recording would keep both alive for ever.
        here, running_now, alone, elsewhere = (
            weakref.ref(self),
            self.open,
            self._alone,
            patches.differentiating,
        )
        tensor, taken = self.leaves.tensors[i], i in self.taken
        size = self.leaves.sizes[i] * tensor.element_size()
        bulk = HOT if tensor.device.type == "cpu" else _BULK_BYTES_ON_DEVICE

        def hook(grad: torch.Tensor | None) -> None:
            contributions = here()
            if (
                contributions is None or not running_now or grad is None
            ):  # autograd.grad writes no `.grad`
                return
            try:
                running = running_now[0]
                # By far the most frequent case first: this runs once per parameter and backward.
                mine = running.hot and alone and running.thread == get_ident()
                if mine and not elsewhere and i not in running.met and not taken:
                    had = running.had[i]
                    if running.waiting > bulk:
                        contributions.reduce(running)
                    running.waiting += size
                    running.met[i] = None
                    if had:
                        # Without a graph there is nothing to detach it from: a reference costs a fraction of a view.
                        kept = (
                            grad.detach()
                            if grad.requires_grad or type(grad) is not _TENSOR
                            else grad
                        )
                        running.held[i] = kept, kept._version
                    elif contributions.leaves.tensors[
                        i
                    ]._post_accumulate_grad_hooks:  # as in `freed_by_user`
                        # The reference keeps autograd from handing it on as `.grad`.
                        running.held[i] = grad, grad._version
                    else:
                        running.fresh[i] = None
                elif not elsewhere or get_ident() not in elsewhere:
                    contributions._receive(i, grad, size, bulk)
            except (
                Exception
            ) as error:  # a hook that raises would end the user's backward
                patches.failures.append(type(error).__name__)
                with contextlib.suppress(Exception):
                    contributions._failed(error)
                    patches.failures.pop()

        return _unsaved(hook)

    def _receive(self, i: int, grad: torch.Tensor, size: int, bulk: int) -> None:
        """Take note of what autograd is about to add to a leaf's `.grad`, whoever's backward it is."""
        with self._lock:
            running = self.running(on_cpu=grad.is_cpu)
            if (
                running is None
            ):  # another thread's autograd.grad, or its backward from before we were opened
                return
            if running.thread != self.opener:
                self._theirs[i] = running.thread
            elif i in self._theirs:
                del self._theirs[i]
            for other in self.open if self.shared else ():
                if other is not running and i in other.fresh:
                    other.unknown[i] = (
                        None  # it would be read from `.grad`, to which this adds
                    )
            if running.waiting > bulk and not running.whole:
                # Another device's stream is none of this thread's.
                self.reduce(running, grad.device)
            if i in running.held:  # in parts, from a reentrant checkpoint
                running.held[i] = running.held[i][0] + grad.detach(), 0
                return
            if i in running.settled:  # this part came too late
                running.unknown[i] = None
                return
            running.met[i] = None
            if grad.is_cuda and _raw_stream is not None:
                running.streams |= {_raw_stream(grad.get_device())}
            if i in self.taken and size > _SMALL:
                # Held, it would be copied and not be freed when it is scattered.
                self.leaves.reduce(running, "contribution", [(i, grad.detach())])
                running.settled[i] = len(self.rows)
            elif (
                running.had[i]
                or self.shared
                or i in self.taken
                or self.leaves.freed_by_user(i)
            ):
                # Detached where `.grad` is another tensor anyway; else the reference keeps it another tensor.
                kept = grad.detach() if running.had[i] else grad
                running.held[i] = kept, kept._version
                running.waiting += size
            else:
                running.fresh[i] = None

    def _written_of(self, i: int) -> Hook:
        return self._noting(i, Contributions._note_written, ())

    def _note_written(self, i: int, tensor: torch.Tensor) -> None:
        """Take what a backward has made of a leaf's `.grad`, before the user's hooks are called."""
        with self._lock:
            running, grad = self.running(on_cpu=tensor.is_cpu), tensor.grad
            if running is None or grad is None or i not in running.met:
                return
            if (
                i in running.read
            ):  # in parts, and the hooks were called for each: as if there were none
                running.written.pop(i, None)
                return
            self.leaves.reduce(running, "grad", [(i, grad)])
            self.leaves.saw([(i, grad)])
            running.read[i] = None
            running.written = running.written or {}
            running.written[i] = False

    def edited(self, running: Backward, only: Iterable[int] | None = None) -> None:
        """Add to the row of what the user's hooks have made of `.grad` since it was written."""
        with self._lock:
            away = running.synced | self.taken
            watched = (
                [i for i in running.written if i not in away] if only is None else only
            )
            leaves = self.leaves
            if found := [i for i in leaves.update(watched) if leaves.present[i]]:
                if running.edit is None:
                    running.edit = self.rows.begin(
                        "edit", "", running.site, "backward", {"by": "hook"}
                    )
                running.edit.changed = list(
                    dict.fromkeys((*running.edit.changed, *found))
                )
                running.written |= dict.fromkeys(found, True)
                for i in found:
                    self.told.pop(i, None)
                leaves.read(running.edit, found)

    def end_edit(self, running: Backward) -> None:
        """What the hooks change from now on is another event."""
        row = running.edit
        if row is not None:
            running.edit = None
            row.present = bytes(self.leaves.present)
            self.rows.finish(row)

    def _around_of(self, i: int) -> tuple[Hook, Hook]:
        elsewhere, coming, came = (
            patches.differentiating,
            Contributions._note_coming,
            Contributions._note_came,
        )
        return self._noting(i, coming, elsewhere), self._noting(i, came, elsewhere)

    def _noting(self, i: int, note: _Note, elsewhere: Container[int]) -> Hook:
        here, running_now = weakref.ref(self), self.open  # as in `_hook_of`

        def hook(grad: torch.Tensor | None) -> None:
            contributions = here()
            if (
                contributions is None
                or not running_now
                or grad is None
                or get_ident() in elsewhere
            ):
                return
            try:
                note(contributions, i, grad)
            except Exception as error:
                patches.failures.append(type(error).__name__)
                with contextlib.suppress(Exception):
                    contributions._failed(error)
                    patches.failures.pop()

        return _unsaved(hook)

    def _note_coming(self, i: int, grad: torch.Tensor) -> None:
        with self._lock:
            running = self.running(on_cpu=grad.is_cpu)
            if running is not None:
                running.coming = running.coming or {}
                running.coming[i] = grad, grad._version

    def _note_came(self, i: int, grad: torch.Tensor) -> None:
        """Take note of what the user's hooks made of what comes; where it came in parts, it is not known."""
        with self._lock:
            running = self.running(on_cpu=grad.is_cpu)
            before, version = (
                (None, 0) if running is None else running.coming.pop(i, (None, 0))
            )
            if (
                running is None
                or before is None
                or (grad is before and grad._version == version)
            ):
                return
            running.scaled = running.scaled or {}
            known = before._version == version and i not in running.met
            running.scaled[i] = scaling(before, grad) if known else None

    def _tell_scaled(self, running: Backward) -> None:
        """Say by which factor the user's hooks multiplied all that came; NaN where it was not by one.

        A leaf whose contribution no hook has changed shows what the backward weighs.
        """
        scaled = running.scaled
        if not scaled or any(i not in scaled for i in running.contributed):
            return
        found = [about for about in scaled.values() if about is not None]
        if len(found) < len(scaled) or len({about.device for about in found}) > 1:
            running.details["by_hook"] = math.nan
            return
        running.take(("detail", "by_hook"), one_factor(found))
        if running.late:
            running.send(self.leaves.wire)

    def settle(self, running: Backward) -> None:
        """Reduce what has reached leaves so far, while it is there to be read."""
        with self._lock:
            unhooked = [
                i for i in self._arrived_unhooked(running) if i not in running.met
            ]
            arrived = [
                i
                for i in (*running.fresh, *running.held, *unhooked)
                if i not in running.settled
            ]
            running.fresh |= dict.fromkeys(unhooked)
            running.met |= dict.fromkeys(unhooked)
            self.reduce(running)
            unread = [i for i in arrived if i not in running.read]
            self.leaves.read(running, unread)
            self.leaves.note(unread)
            running.read |= dict.fromkeys(unread)
            if running.written:
                self.edited(running)
                self.end_edit(running)

    def _arrived_unhooked(self, running: Backward) -> list[int]:
        had, tensors, theirs = running.had, self.leaves.tensors, self._theirs
        return [
            i
            for i in running.unhooked
            if not had[i] and i not in theirs and tensors[i].grad is not None
        ]

    def reduce(self, running: Backward, device: torch.device | None = None) -> None:
        """Reduce the contributions that have come (only those held on this device), and let go of them.

        Where that is sure to be right, what `.grad` has become goes with them.
        """
        leaves, tensors = self.leaves, self.leaves.tensors
        held, running.held, running.waiting = running.held, {}, 0
        fresh: dict[int, None] = {}
        if device is not None:
            running.held = {
                i: both for i, both in held.items() if both[0].device != device
            }
            held = {i: both for i, both in held.items() if both[0].device == device}
        else:
            fresh, running.fresh = running.fresh, {}
        if not held and not fresh:
            return
        found = [
            (i, grad) for i, (grad, version) in held.items() if grad._version == version
        ]
        if len(found) < len(
            held
        ):  # what an operation of the user's wrote into again is the next one's
            running.unknown |= {
                i: None
                for i, (grad, version) in held.items()
                if grad._version != version
            }
        came = [(i, tensors[i].grad) for i in fresh]
        for i, grad in came:
            if (
                grad is None
            ):  # freed before we could read it: that something arrived is known, not how much
                running.unknown[i] = None
            else:
                found.append((i, grad))
                running.same[i] = None
        leaves.reduce(running, "contribution", found)
        if running.hot:
            here: list[tuple[int, torch.Tensor]] = []
            for i in held:
                if i not in running.written:
                    grad = tensors[i].grad
                    came.append((i, grad))
                    if grad is not None and i not in self.taken:
                        here.append((i, grad))
                        running.read[i] = None
            if here:
                leaves.reduce(running, "grad", here)
            leaves.saw(came)
        if running.streams and _raw_stream is not None:
            there = [grad for grad, _ in held.values()]
            if running.streams != {
                _raw_stream(grad.get_device()) for grad in there if grad.is_cuda
            }:
                keep_for_stream(there)
        settled, count = running.settled, len(self.rows)
        for i in (*held, *fresh):
            settled[i] = count

    def disturbed(self, running: Backward, beside: Iterable[Backward]) -> bool:
        """Leave unread what a backward made of `.grad` that others add to; whether what it brought may be missed."""
        others = [other for other in (*beside, *self.open[:]) if other is not running]
        if unsure := [
            i
            for i in running.contributed
            if any(i in each.met or _missed(each, i) for each in others)
        ]:
            self.leaves.leave_unread(running, unsure)
        return any(_missed(running, i) for i in self._theirs.copy())

    def finish(self, running: Backward) -> bool:
        """Give a backward that is over its numbers; False if it reached none of our leaves."""
        leaves, had, met = self.leaves, running.had, running.met
        mine = running.thread == self.opener
        if met:
            self.reduce(running)
        if running.coming:
            running.coming = {}
        if running.written:
            self.edited(running)
        there: list[tuple[int, torch.Tensor]] = []
        changed = self.look(into=there) if mine else leaves.update(list(met))
        self.end_edit(running)
        plain = mine and not met and not self._theirs and not running.synced
        if plain and PRESENT not in had and len(running.unhooked) == len(had):
            # Nothing was there and no hook was needed: what is there now is what came.
            leaves.reduce(running, "contribution", there)
            running.alike = running.contributed = running.changed = changed
            running.present = bytes(leaves.present)
            return True
        if running.synced:
            changed = [i for i in changed if i not in running.synced]
        fresh = [
            i for i in changed if not had[i] and leaves.present[i] and i not in met
        ]
        fresh = [i for i in fresh if i in running.unhooked]
        if not met and not fresh and not mine:
            return False  # another thread's training, not of these parameters
        leaves.read(running, fresh, "contribution")
        running.present = bytes(leaves.present)
        if not met and len(fresh) == len(changed):
            running.alike = running.contributed = running.changed = fresh
            return True
        self._finish_met(running, fresh, changed)
        self._tell_scaled(running)
        return True

    def _finish_met(
        self, running: Backward, fresh: list[int], changed: list[int]
    ) -> None:
        """Where `.grad` is not just what this backward brought, or was changed while it ran, say what it is now."""
        leaves, unknown, same, read = (
            self.leaves,
            running.unknown,
            running.same,
            running.read,
        )
        whole = len(same) + len(read) == len(running.met) and same.keys().isdisjoint(
            read
        )
        if whole and running.hot and not changed and not unknown:
            # Each was read on its way, and is as it was then: nearly always.
            running.contributed = running.changed = list(running.met)
            running.alike = list(same)
            self._expect(running, running.contributed)
            return
        touched, there = [*running.met, *fresh], running.met.keys() | set(fresh)
        later = set(changed).difference(fresh)
        if not running.hot:  # what was not noted on the way looks changed now
            later -= running.same.keys() - running.read.keys()
        alike = [
            i
            for i in running.same
            if i not in unknown and i not in later and i not in running.read
        ]
        running.contributed = touched
        running.changed = touched + [i for i in changed if i not in there]
        running.alike = alike + fresh
        known = set(running.alike) | running.read.keys() - later
        leaves.read(
            running,
            [i for i in running.changed if i not in known and i not in running.synced],
        )
        if unknown:
            running.unmeasured = list(unknown)
            running.details["unmeasured"] = [leaves.named.names[i] for i in unknown]
        self._expect(running, touched)

    def _expect(self, running: Backward, touched: list[int]) -> None:
        """Of events inside it: an optimizer that stepped in a hook may have freed what had come before."""
        if self.rows.pending[-1] is running:
            return
        count, present = len(self.rows), bytearray(running.present)
        for i, number in running.settled.items():
            if number < count:
                present[i] = PRESENT
        running.present = bytes(present)
        self.rows.expect(running, touched)


def _missed(running: Backward, i: int) -> bool:
    """Whether it may have reached this leaf unseen, which had none of our hooks when it began."""
    return i in running.unhooked and not running.had[i] and i not in running.met


def _unsaved(hook: Hook) -> Hook:
    """The hook, of which torch does not warn where a tensor that has it is saved without it."""
    hook.__torch_unserializable__ = True  # type: ignore[attr-defined]
    return hook
