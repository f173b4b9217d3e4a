"""The open recording: it observes, never steers, and never waits for the device."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from accumviz import __version__
from accumviz.graph.graph import Graph
from accumviz.graph.recorded import Graphs
from accumviz.ledger.events import Parameter
from accumviz.ledger.ledger import Ledger
from accumviz.recorder import distributed, patches
from accumviz.recorder.callsite import CallSite, CallSites
from accumviz.recorder.columns import Backward, Columns, Row
from accumviz.recorder.distributed import Collectives
from accumviz.recorder.gradients import THREADS, Gradients
from accumviz.recorder.loaders import Loaders
from accumviz.recorder.loss_terms import describe_root
from accumviz.recorder.memory import Allocated, Held
from accumviz.recorder.targets import Named, Optimizers, called
from accumviz.recorder.transfer import readable, wire

_CAPTURED = (
    "a CUDA graph was captured ({place}): its replays run no Python, so what each backward in it adds is not seen, "
    "only the .grad that a replay leaves; to see every event, record the loop before it is captured"
)
_GROWN = "`{name}` got parameters that are not recorded, because they were not there before: what they get is not seen"


_made = tuple.__new__  # what a NamedTuple is called by costs four times as much


def locate(path: Path | None) -> Path | None:
    """Return where a recording's file goes; the processes that `distribute` starts put another function here."""
    return None if path is None else distributed.own_path(path)


class _Step(NamedTuple):
    """An optimizer's step that has begun: its number, and what tells its frame from others, without holding it."""

    optimizer: int
    frame: int
    code: CodeType
    thread: int
    inner: bool  # inside the step of what wraps it: one step, one event


class Recording:
    """The open recording: mutable while the loop runs; `recording.ledger` is its frozen ledger.

    `record` makes it. `with` opens and closes it, once; so do `start()` and `stop()`, for a loop at
    the top of a script. One that is never closed is closed with the process. Both properties may
    be read at any time. Should recording itself fail, it warns, stops and keeps what it has: the
    training goes on, and `ledger.meta["stopped"]` says why, in the file as well.
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
        overwrite: bool = False,
        sources: bool = False,
    ) -> None:
        self._gradients = Gradients(named, exact)
        self._optimizers = Optimizers(self._gradients.owned)
        self._memory, self._allocated = Held(memory), Allocated(memory)
        self._sites, self._loaders = CallSites(), Loaders()
        self._graphs = Graphs(named.modules, self._sites) if graphs else None
        self._steps: list[_Step] = []
        self._entered = self._closed = False
        self._unmoved = True  # until the weights were read for the first time
        # What FSDP gathers comes after all others, and is no tensor.
        self._last = max(
            (
                i
                for i, leaf in enumerate(self._gradients.tensors)
                if isinstance(leaf, torch.Tensor)
            ),
            default=0,
        )
        self._stood = (
            -1,
            -1,
        )  # the versions of the first leaf's weights and of the last one's, as last seen
        # What has stopped it, in words; `patches` sets it where we cannot.
        self.failure = ""
        self._notes = list(named.notes)
        self._elsewhere = (
            False  # whether an optimizer stepped of whose parameters none is recorded
        )
        # Where a CUDA graph is captured now, and the leaves whose `.grad` some captured graph writes.
        self._capturing: CallSite | None = None
        self._in_graphs: dict[int, None] = {}
        self._rank = distributed.rank()
        self._known: list[Parameter] | None = None  # once they have been let go
        self._size = len(self._gradients)
        self.file = locate(None if path is None else Path(path))
        self._rows = Columns(
            self._gradients.sizes,
            self._gradients.small,
            self._allocated,
            self._about,
            path=self.file,
            overwrite=overwrite,
            sources=sources,
        )
        self._gradients.events = self._rows.__len__
        self._collectives = Collectives(self._gradients, self._rows, self._sites)
        replicas = self._collectives.replicas or self._gradients.taken
        self._gradients.watches = not replicas
        for optimizer in named.optimizers:
            self._optimizers.meet(optimizer, frame)

    def start(self) -> Recording:
        """Open the recording: what happens from now on is recorded, until `stop`.

        Raises `RuntimeError` when it was used before, and with `path` `FileExistsError` or another
        `OSError` when the file cannot be begun.
        """
        if self._entered:
            raise RuntimeError(
                "this recording has been used already; call record(...) again for a new one"
            )
        self._entered = True
        if not patches.listening:
            patches.failures.clear()
        try:
            self._rows.open()
        except OSError:
            self._entered = False
            raise
        except Exception as failure:
            patches.failures.append(failure)
        if not patches.failures:
            self._open()
        self._heed_failures()
        return self

    @patches.guarded
    def _heed_failures(self) -> None:
        if patches.failures:
            patches.stop_failed((self,))

    @patches.guarded
    def stop(self, ended: str = "closed") -> None:
        """Close the recording, and its file; `ended` is what the ledger says of how it ended."""
        self._close(ended)
        self._heed_failures()

    __enter__ = start

    @patches.guarded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop("closed" if error is None else patches.describe(error))

    @patches.guarded
    def _open(self) -> None:
        self._rows.start = perf_counter()
        self._gradients.update()
        self._look_at_weights()
        devices = self._gradients.devices()
        wire.open(devices)
        self._allocated.open(devices)
        if self._graphs is not None:
            self._graphs.open()
        patches.enter(self)
        self._collectives.open()

    @patches.guarded
    def _close(self, ended: str) -> None:
        self._leave()
        self.failure = self.failure or _unheeded()
        if self._entered and not self._closed:
            self._edits()
            self._closed = True
            self._leave_running()
            self._let_go()
            self._rows.close(ended=ended)
            self._tell_lost()

    def _leave(self) -> None:
        """Take everything of ours away from torch and from the user's tensors, whatever fails on the way."""
        with contextlib.suppress(Exception):
            patches.leave(self)
        for part in (self._collectives, self._gradients, self._graphs):
            with contextlib.suppress(Exception):
                if part is not None:
                    part.close()

    def _let_go(self) -> None:
        """Keep data only: no tensor, module, optimizer or frame is held by a recording that is closed."""
        try:
            self._known = self._parameters()
            self._notes += [
                _GROWN.format(name=name)
                for name in dict.fromkeys(self._optimizers.grown())
            ]
        finally:
            self._steps.clear()
            self._optimizers.forget()
            self._memory = Held(wanted=False)
            self._collectives.forget()
            self._gradients.forget()

    def _leave_running(self) -> None:
        """What still runs, on another thread or around a hook that closes us, is not waited for."""
        running, self._gradients.running = self._gradients.running, None
        if running is None:
            return
        self._gradients.finish(running)
        if running.reached:
            said = "the recording was closed while this backward ran"
            running.details["error"] = said
            for sync in running.syncs:
                sync.row.present, sync.row.done = running.present, True
            running.done = True
        else:
            self._rows.pending.remove(running)

    @property
    def tensors(self) -> list[Any]:
        """The tensors that are recorded, until it is closed."""
        return self._gradients.tensors

    def is_on_disk(self) -> bool:
        """Whether the file of a closed recording holds all that was recorded."""
        return self._rows.is_on_disk()

    def write_out(self) -> None:
        """Write what is whole to the file, if there is one: this process is about to be ended."""
        self._rows.settle(wait=True)
        self._rows.flush()

    @property
    def ledger(self) -> Ledger:
        """Everything recorded so far, frozen; waits for numbers still on their way from a device.

        What was written to a file is read back from there.
        """
        if self._entered and not self._closed and self._gradients.running is None:
            self._edits()
        return self._rows.ledger()

    @property
    def graphs(self) -> dict[int, Graph]:
        """The graph that each backward ran, by its event's index; empty without `record(..., graphs=True)`.

        `graph.order` holds the ids of its nodes in the order in which the engine ran them.
        """
        self._rows.settle(wait=True)
        return self._rows.graphs()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else "open"
            if self._entered
            else "not entered: use it in a with statement"
        )
        state = f"stopped by {self.failure}" if self.failure else state
        return f"Recording ({state}): {self.counted}"

    @property
    def counted(self) -> str:
        """How much was recorded, in words, without reading the file."""
        return f"{len(self._rows)} events × {self._size} parameters"

    # --- what `patches.notify` calls, by name ------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Stop observing, keep what is recorded, and say so once: training goes on as if we were not there."""
        if self.failure:
            patches.leave(self)
            return
        self.failure, self._closed = type(error).__name__, True
        with contextlib.suppress(Exception):
            self.failure = patches.describe(error)
        with contextlib.suppress(Exception):
            self._leave()
        with contextlib.suppress(Exception):
            self._rows.give_up()
        with contextlib.suppress(Exception):
            self._let_go()
        with contextlib.suppress(Exception):
            self._rows.close(stopped=self.failure)
        with contextlib.suppress(Exception):
            events = len(self._rows)
            self._say(
                f"accumviz stopped recording after {events} events, training goes on: {self.failure}"
            )

    def _tell_lost(self) -> None:
        if self._rows.lost:
            said = f"accumviz could not write on, the recording is held in memory: {self._rows.lost}"
            if said not in self._notes:
                self._notes.append(said)
                self._say(said)

    def _say(self, said: str) -> None:
        try:
            warnings.warn(said, RuntimeWarning, stacklevel=3)
        except Warning:  # made an error by the user's filters, it would end the training that we must not disturb
            print(said, file=sys.stderr)

    def backward_begins(
        self, frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Backward | None:
        gradients, thread = self._gradients, get_ident()
        if gradients.running is not None or gradients.thread not in (None, thread):
            gradients.others += 1
            return None
        within = self._within() if self._steps else ""
        if self._collectives.unhooked:
            self._collectives.hook()
        self._edits()
        gradients.hook()
        running = Backward(
            self._sites.find(frame),
            perf_counter() - self._rows.start,
            within,
            bytes(gradients.present),
            thread,
        )
        describe_root(running, args, kwargs)
        stood, self._stood = self._stood, self._standing()
        if stood[0] != self._stood[0]:
            running.details["moved"] = True  # by a hand: after a step we look again
            if stood[1] != self._stood[1]:
                running.details["last_moved"] = True
        storages = self._memory.before(running.nodes)
        if storages is not None:
            running.storages, running.before = storages, self._memory.total(storages)
        if self._graphs is not None:
            self._graphs.begin(running, frame, args, kwargs)
        self._rows.pending.append(running)
        gradients.running = running
        return running

    def backward_ends(
        self, running: Backward | None, error: BaseException | None
    ) -> None:
        gradients = self._gradients
        if running is None:
            gradients.others -= 1
            return
        if running.finish_graph is not None and self._graphs is not None:
            self._graphs.end(running)
        if self._closed or gradients.running is not running:
            return
        if running.storages is not None:
            failed = error is not None
            running.after = self._memory.after(
                running.nodes, running.storages, keeps=running.keeps, failed=failed
            )
            running.storages = None
        running.nodes = ()
        if error is not None:
            running.details["error"] = patches.describe(error)
        gradients.finish(running)
        self._rows.expect(running)
        if self._collectives.replicas:
            self._collectives.describe(running)
        if running.syncs:
            self._collectives.finish(running)
        if self._unmoved and self._gradients.small:
            self._weigh(running)
        self._finish(running)

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        if not self._gradients.owns(optimizer):
            self._elsewhere = True
            return
        if not self._is_ours():
            return
        index, thread = self._optimizers.meet(optimizer, frame), get_ident()
        steps = self._steps
        inner = bool(steps) and any(
            step.thread == thread and step.optimizer == index for step in steps
        )
        if not inner:
            self._before_change()
        steps.append(_made(_Step, (index, id(frame), frame.f_code, thread, inner)))

    def step_prepared(self, optimizer: Any, frame: FrameType) -> None:
        """The optimizer's own hooks have run, and its step has not."""
        if self._gradients.owns(optimizer) and self._is_ours():
            self._before_change(by_hook=frame)

    def step_ends(self, optimizer: Any, frame: FrameType) -> None:
        steps, number = self._steps, id(frame)
        if steps and steps[-1].frame == number:
            step: _Step | None = steps.pop()
        else:
            step = next(
                (step for step in reversed(steps) if step.frame == number), None
            )
            if step is not None:
                steps.remove(step)
        if step is not None:
            if not step.inner:
                self._step(step.optimizer, optimizer, frame, {})
        elif self._gradients.owns(optimizer) and self._is_ours():
            self._step(self._optimizers.meet(optimizer, frame), optimizer, frame, {})

    def step_skipped(self, optimizer: Any, frame: FrameType) -> None:
        if self._gradients.owns(optimizer) and self._is_ours():
            self._before_change()
            self._step(
                self._optimizers.meet(optimizer, frame),
                optimizer,
                frame,
                {"skipped": True},
            )

    def scheduled(self, scheduler: Any, frame: FrameType) -> None:
        """A learning-rate scheduler has stepped."""
        optimizer = getattr(scheduler, "optimizer", None)
        if self._closed or optimizer is None or not self._gradients.owns(optimizer):
            return
        if not self._is_ours():
            return
        self._before_change()
        index = self._optimizers.meet(optimizer, frame)
        details: dict[str, Any] = {
            "scheduler": type(scheduler).__name__,
            "optimizer": self._optimizers.names[index],
            "optimizer_index": index,
        }
        plain = _rates(optimizer, details)
        self._emit(
            "schedule",
            self._site(frame),
            called(scheduler, frame),
            details,
            [],
            plain=plain,
        )

    def loads(self, what: str, source: Any, frame: FrameType) -> None:
        """A data loader begins, or its iterator ends."""
        if not self._closed and self._gradients.is_ours():
            self._before_change()
            self._emit(
                "loader",
                self._site(frame),
                "",
                self._loaders.describe(what, source),
                [],
            )

    def change_begins(self, tensors: Any) -> bool:
        if not self._gradients.owns(tensors) or not self._is_ours():
            return False
        self._before_change()
        return True

    def swaps(self, begins: bool) -> None:
        """Hold no weak reference while tensors are swapped: torch refuses those to which there are any."""
        if begins:
            self._edits()
            self._gradients.unwatch()
        else:
            self._gradients.update()

    def _is_ours(self) -> bool:
        """Return whether the caller's thread is followed; what others do leaves nothing that could be judged."""
        ours = self._gradients.is_ours()
        self._gradients.disturbed |= not ours
        return ours

    def _before_change(self, *, by_hook: FrameType | None = None) -> None:
        running = self._gradients.running_here()
        if running is not None:
            self._gradients.settle(running)
        else:
            self._edits(by_hook=by_hook)

    def change_ends(
        self,
        kind: str,
        frame: FrameType,
        owner: Any,
        tensors: Any,
        details: dict[str, Any],
    ) -> None:
        if self._closed:
            return
        changed = self._gradients.update()
        if kind == "unscale":  # it does not bump versions
            changed = self._gradients.with_grad(owner)
        elif kind == "clip":
            parts = self._gradients.with_grad(tensors, sharded=True)
            changed = sorted({*changed, *parts})
        site, label = self._site(frame), ""
        if owner is not None and not isinstance(owner, torch.nn.Module):
            label = self._optimizers.names[self._optimizers.meet(owner, frame)]
        elif owner is not None:
            label = site.subject or type(owner).__name__
        self._emit(kind, site, label, details, changed, plain=kind == "zero_grad")

    def captures(self, frame: FrameType) -> None:
        """A CUDA graph is being captured: nothing may be read, and nothing has happened yet."""
        if self._capturing is None:
            self._capturing = self._sites.find(frame)
            said = _CAPTURED.format(
                place=f"{self._capturing.file}, line {self._capturing.line}"
            )
            if not self._notes:
                self._notes.append(said)
                self._say(f"accumviz: {said}")

    def replayed(self, graph: Any, frame: FrameType) -> None:
        """A captured graph ran, without a version's telling so."""
        self._edits()
        if self._in_graphs:
            self._emit(
                "edit",
                self._sites.find(frame),
                "CUDA graph",
                {"replay": True},
                list(self._in_graphs),
            )

    def forwards(self, module: torch.nn.Module, frame: FrameType) -> None:
        """A model that DDP replicates is called."""
        self._collectives.forwards(module, frame)

    def collective(
        self,
        op: str,
        whole: list[torch.Tensor],
        output: list[torch.Tensor],
        frame: FrameType,
    ) -> None:
        """Gradients or sharded parameters are about to be moved."""
        self._collectives.collective(op, whole, output, frame)

    # --- events --------------------------------------------------------------------------------

    def _edits(self, *, by_hook: FrameType | None = None) -> None:
        """Add what changed since the last event; `by_hook`: where a hook of the user's ran."""
        if not self._gradients.is_ours():
            return
        changed = self._gradients.look()
        if changed and by_hook is not None:
            self._emit("edit", self._site(by_hook), "", {"by": "hook"}, changed)
        elif changed or self._capturing is not None:
            self._edit(changed)

    def _edit(self, changed: list[int]) -> None:
        """What changed since we last looked: by a hand that we did not see, or in a capture."""
        capturing, self._capturing = self._capturing, None
        if not changed:
            return
        if capturing is None:
            self._emit("edit", CallSite(), "", {}, changed)
        else:
            self._in_graphs |= dict.fromkeys(changed)
            self._gradients.watches = False
            self._emit(
                "edit", capturing, "CUDA graph", {"captured": True}, changed, read=False
            )

    def _step(
        self, index: int, optimizer: Any, frame: FrameType, details: dict[str, Any]
    ) -> None:
        name = self._optimizers.names[index]
        details["optimizer"], details["optimizer_index"] = name, index
        self._look_at_weights()
        plain = _rates(optimizer, details)
        # A fused optimizer is called even when the scaler found inf; it then changes nothing.
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            plain, details["found_inf"] = False, found
        changed = self._gradients.update()
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # unscaled inside the kernel, unseen by versions
            plain, details["amp_scale"] = False, scale
            changed = self._gradients.with_grad(optimizer)
        self._emit("step", self._site(frame), name, details, changed, plain=plain)

    def _site(self, frame: FrameType) -> CallSite:
        """The user's line; on the engine's thread, where there may be none, that of the backward."""
        site = self._sites.find(frame)
        running = None if site.file else self._gradients.running_here()
        return site if running is None else running.site

    def _within(self) -> str:
        """What the caller is inside of: a step (its closure), a backward (its hooks), or nothing."""
        if self._steps:
            self._drop_stale_steps()
        if self._gradients.running_here() is not None:
            return "backward"
        thread = get_ident()
        return "step" if any(step.thread == thread for step in self._steps) else ""

    def _emit(
        self,
        kind: str,
        site: CallSite,
        label: str,
        details: dict[str, Any],
        changed: list[int],
        *,
        read: bool = True,
        plain: bool = True,
    ) -> None:
        """Add an event; `plain` says that none of its details is a tensor that is still to be read."""
        within = (
            self._within()
            if self._gradients.running is not None or (self._steps and kind != "step")
            else ""
        )
        row = self._rows.begin(kind, label, site, within, details, changed)
        if not plain:
            self._read_details(row)
        if changed:
            (self._gradients.read_grads if read else self._gradients.leave_unread)(
                row, changed
            )
        if (kind == "step" or self._unmoved) and self._gradients.small:
            self._weigh(row)
        row.present = bytes(self._gradients.present)
        self._finish(row)

    def _read_details(self, row: Row) -> None:
        """Read those details of an event that are tensors."""
        details = row.details
        for name, value in list(details.items()):
            if isinstance(value, torch.Tensor):
                del details[name]
                if readable(value):
                    row.take(value, functools.partial(_note, details, name))
        rates = details.get("lr", [])
        for group, value in enumerate(rates):
            if isinstance(value, torch.Tensor):
                rates[group] = None
                if readable(value):
                    row.take(value, functools.partial(rates.__setitem__, group))

    def _standing(self) -> tuple[int, int]:
        if not self._gradients.tensors:
            return -1, -1
        first, last = self._gradients.tensors[0], self._gradients.tensors[self._last]
        # A tensor made for inference counts no versions.
        return (
            -1 if first.is_inference() else first._version,
            -1 if last.is_inference() else last._version,
        )

    def _weigh(self, row: Row) -> None:
        """The weights after a step; and at the first event, so that it is known where they began."""
        self._unmoved = False
        self._gradients.weigh(row)

    def _finish(self, row: Row) -> None:
        self._rows.finish(row)
        if self._rows.lost:
            self._tell_lost()

    def _look_at_weights(self) -> None:
        self._stood = self._standing()

    def _drop_stale_steps(self) -> None:
        """A step that raised never ends: forget it once its frame has left the stack."""
        stack = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            stack.add((id(frame), frame.f_code))
            frame = frame.f_back
        thread = get_ident()
        for step in [
            s
            for s in self._steps
            if s.thread == thread and (s.frame, s.code) not in stack
        ]:
            self._steps.remove(step)  # other threads' come and go meanwhile

    def _about(self) -> tuple[list[Parameter], dict[str, Any]]:
        """What a file says of the parameters and of the recording itself."""
        return self._parameters(), self._meta()

    def _parameters(self) -> list[Parameter]:
        return (
            self._gradients.parameters(self._optimizers.leaves())
            if self._known is None
            else self._known
        )

    def _meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "accumviz": __version__,
            "torch": torch.__version__,
            "optimizers": list(self._optimizers.names),
            "optimizer_settings": list(self._optimizers.settings),
        }
        if self._rank is not None:
            meta |= {"rank": self._rank[0], "ranks": self._rank[1]}
        if self._elsewhere:
            meta["steps_elsewhere"] = True
        notes = [*self._notes, *([THREADS] if self._gradients.disturbed else [])]
        if notes:
            meta["notes"] = notes
        if self._graphs is not None and self._graphs.left_out:
            meta["graphs_left_out"] = self._graphs.left_out
        stopped = self.failure or ("" if self._closed else _unheeded())
        return meta | ({"stopped": stopped} if stopped else {})


def _unheeded() -> str:
    """Name what has failed and stopped no recording yet."""
    return type(patches.failures[-1]).__name__ if patches.failures else ""


def _note(details: dict[str, Any], name: str, value: float) -> None:
    """Note a detail that was not known before; a scaler that found inf has skipped the step."""
    if name != "found_inf":
        details[name] = value
    elif value:
        details["skipped"] = True


def _rates(optimizer: Any, details: dict[str, Any]) -> bool:
    """Put the learning rates of an optimizer's groups into details; returns whether all are plain numbers."""
    plain, lr = True, details.setdefault("lr", [])
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if type(rate) is not float:
            plain, rate = False, _number(rate)
        lr.append(rate)
    return plain


def _number(value: Any) -> Any:
    """A learning rate: a float, or the tensor that is still to be read."""
    if isinstance(value, torch.Tensor):
        return value if value.numel() == 1 else None
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return None
