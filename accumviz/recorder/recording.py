"""`record`, and the recording that it opens: it observes, never steers, and never waits for the device."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from operator import ne
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accumviz import __version__, arguments
from accumviz.arguments import describe
from accumviz.graph.graph import Graph
from accumviz.graph.recorded import Graphs
from accumviz.ledger.events import Parameter
from accumviz.ledger.ledger import Ledger
from accumviz.recorder import distributed, patches
from accumviz.recorder.callsite import Caller, CallSite, CallSites
from accumviz.recorder.columns import About, Backward, Columns, Details, Leaves, Row
from accumviz.recorder.distributed import Collectives
from accumviz.recorder.gradients import Gradients
from accumviz.recorder.loss_terms import (
    CastCache,
    describe_root,
    leaves_below,
    misgiven,
)
from accumviz.recorder.memory import UNREAD, Held
from accumviz.recorder.targets import (
    Loaders,
    Named,
    Optimizers,
    called,
    collect,
    frozen_in_vain,
    horizon,
    parameters,
)
from accumviz.recorder.transfer import HALF, StepSample, unseen, wire

_GROWN = "`{name}` got parameters that are not recorded, because they were not there before: what they get is not seen"
_STOPPED = "accumviz stopped recording after {events} events, training goes on: {why}"
_LOST = "accumviz could not write on, the recording is held in memory: {why}"
_UNREAD = f"{UNREAD}: factors of losses and saved bytes are unknown; from 2.10 on they are read"


def record(
    *objects: Any,
    path: str | Path | None = None,
    exact: int = 64,
    memory: bool | None = None,
    graphs: bool = False,
    overwrite: bool = False,
    sources: bool = False,
    **groups: Any,
) -> Recording:
    """Record what happens to the `.grad` of these parameters while the `with` block runs.

    `objects` are modules, optimizers, parameters, dicts of named tensors, or lists of these;
    keywords name groups, as in `record(G=generator, D=discriminator)`.

    With `path` the ledger is written there as it grows, with the first event after each half second,
    and leaves memory: a process that is killed loses what its last half second of training did. A file
    that is there is refused with `FileExistsError` unless `overwrite=True`, when the recording is
    opened. A full disk or a vanished folder costs the file only: a warning says so. Without `path`,
    memory holds all of it. A forked process does not write to the file.

    A file holds the names, shapes, dtypes and devices of the parameters, the events with their
    numbers (of tensors of at most `exact` elements all gradients and weights, which can give away
    data; of larger ones norms), the names and learning rates of the optimizers,
    the names of schedulers and of what `backward` was called on, the texts of errors that ended a
    `backward` or the recording, the versions of torch and accumviz, and of the source files, under
    their paths below the working folder, the lines that events stand on, those that called them, and
    the functions around the former: whoever gets the file can read these. `sources=True` stores
    those files whole.

    Tensors of at most `exact` elements keep every element, and their weights after each step, larger
    ones their 2-norm. `memory`
    measures the bytes of saved tensors alive around a backward: each one (True), none (False), or
    as many as fit into a hundredth of a second and then two thousandths of the loop's time (None). `graphs=True`
    keeps each backward's graph in `recording.graphs`, for `play`: those of at most 2,000 nodes,
    100,000 nodes in all.

    On a device, numbers follow behind the training, which never waits for them. What
    `torch.compile` makes of the model, the step or the optimizer is recorded as the eager loop
    is. The replays of a CUDA graph run no Python: a recording stops where one is captured, and says so.
    So call `torch.cuda.make_graphed_callables` before it.

    Before version 2.10, torch does not say what a graph saved: factors of losses, and so shares, and
    saved bytes are unknown, and `ledger.meta["notes"]` says so.

    Raises `TypeError` for something that holds no parameters, and `ValueError` when nothing would
    be recorded. Source of the hooks used: "Backward Hooks execution" in the PyTorch note on
    autograd mechanics.

    >>> import torch, accumviz as av
    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> with av.record(w) as recording:
    ...     for x in (4.0, 2.0):
    ...         loss = (2 * x - w * x).square().mean() / 2
    ...         loss.backward()
    >>> recording.ledger.values("w", of="contribution").ravel().tolist()
    [-16.0, -4.0]
    >>> recording.ledger.values("w").ravel().tolist()
    [-16.0, -20.0]
    """
    exact = arguments.whole(
        "exact", exact, "the largest number of elements to keep one by one"
    )
    arguments.flag("memory", memory, or_none=True)
    arguments.flag("graphs", graphs)
    arguments.flag("overwrite", overwrite)
    arguments.flag("sources", sources)
    if path is not None:
        arguments.file("path", path)
    frame = sys._getframe(1)
    return Recording(
        collect(objects, groups, frame),
        frame,
        path=path,
        exact=exact,
        memory=memory,
        graphs=graphs,
        overwrite=overwrite,
        sources=sources,
    )


def locate(path: Path | None) -> Path | None:
    """Return where a recording's file goes; the processes that `distribute` starts put another function here."""
    return None if path is None else distributed.own_path(path)


class _Step(NamedTuple):
    """An optimizer's step that has begun: its number, and what tells its frame from others, without holding it."""

    optimizer: int
    frame: tuple[int, CodeType]
    inner: bool  # inside the step of what wraps it: one step, one event
    sample: StepSample | None


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
        frame: Caller,
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
        self._memory = Held(memory)
        self._sites = CallSites()
        self._loaders = Loaders()
        self._casts = CastCache()
        self._rounds = any(tensor.dtype in HALF for tensor in named.tensors)
        self._graphs = Graphs(named.modules, self._sites) if graphs else None
        self._steps: list[_Step] = []
        self._entered = self._closed = False
        self._unmoved = True  # until the weights were read for the first time
        self._versions: list[int] = []  # of weights, as they were last seen
        # What has stopped it, in words; `patches` sets it where we cannot.
        self.failure = ""
        self._notes = list(named.notes)
        self._frozen: list[str] = []
        if UNREAD:
            self._notes.append(_UNREAD)
        # Whether an optimizer stepped of whose parameters none is recorded.
        self._elsewhere = False
        # The line of each backward, and the name and operation of each of its losses.
        self._met: set[tuple[str, int, str, str]] = set()
        self._rank = distributed.rank()
        self._parameters: list[Parameter] | None = None  # once they have been let go
        self.file = locate(None if path is None else Path(path))
        self._rows = Columns(
            self._gradients.sizes,
            self._gradients.small,
            self._about,
            path=self.file,
            overwrite=overwrite,
            sources=sources,
        )
        self._gradients.events = self._rows.__len__
        self._collectives = Collectives(self._gradients, self._rows, self._sites)
        self.forwards = self._collectives.forwards
        self.collective = self._collectives.collective
        self.reduced = self._collectives.reduced
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
        unseen(self._close, ended)
        self._heed_failures()

    __enter__ = start

    @patches.guarded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop("closed" if error is None else describe(error))

    @patches.guarded
    def _open(self) -> None:
        self._rows.start = perf_counter()
        self._gradients.update()
        self._versions = self._gradients.versions()
        wire.open(self._gradients.devices())
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
            self._let_go()
            self._rows.close(ended=ended)
            self._say_lost()

    def _leave(self) -> None:
        """Take everything of ours away from torch and from the user's tensors, whatever fails on the way."""
        patches.guarded(patches.leave)(self)
        for part in (self._collectives, self._gradients, self._graphs):
            if part is not None:
                patches.guarded(part.close)()

    def _let_go(self) -> None:
        """Keep data only: no tensor, module, optimizer or frame is held by a recording that is closed."""
        try:
            self._parameters = self._gradients.parameters(self._optimizers.leaves())
            self._frozen = frozen_in_vain(self._gradients.named.wrapped)
            for name in dict.fromkeys(self._optimizers.grown()):
                self._notes.append(_GROWN.format(name=name))
        finally:
            if self._parameters is None:
                self._parameters = self._rows.last_about[0]
            self._steps.clear()
            self._optimizers.forget()
            self._memory = Held(wanted=False)
            self._collectives.forget()
            self._gradients.forget()

    @property
    def tensors(self) -> list[Any]:
        """The tensors that are recorded, until it is closed."""
        return self._gradients.tensors

    def is_on_disk(self) -> bool:
        """Whether the disk took all that was recorded."""
        return not self._rows.lost

    def write_out(self) -> None:
        """Write what is whole to the file, if there is one: this process is about to be ended."""
        self._rows.settle(wait=True)

    @property
    def ledger(self) -> Ledger:
        """Everything recorded so far, frozen; waits for numbers still on their way from a device.

        What was written to a file is read back from there.
        """
        if self._entered and not self._closed and self._gradients.running is None:
            unseen(self._edits)
        return self._rows.ledger()

    @property
    def graphs(self) -> dict[int, Graph]:
        """The graph that each backward ran, by its event's index; empty without `record(..., graphs=True)`.

        `graph.order` holds the ids of its nodes in the order in which the engine ran them.
        """
        self._rows.settle(wait=True)
        return self._rows.graphs()

    def __repr__(self) -> str:
        state = "not entered: use it in a with statement"
        if self.failure:
            state = f"stopped by {self.failure}"
        elif self._closed:
            state = "closed"
        elif self._entered:
            state = "open"
        return f"Recording ({state}): {self.counted}"

    @property
    def counted(self) -> str:
        """How much was recorded, in words, without reading the file."""
        return f"{len(self._rows)} events × {len(self._gradients)} parameters"

    # --- what `patches.notify` calls, by name ------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Stop observing, keep what is recorded, and say so once: training goes on as if we were not there."""
        if self.failure:
            patches.leave(self)
            return
        self.failure = type(error).__name__
        self._closed = True
        with contextlib.suppress(Exception):
            self.failure = describe(error)
        close = functools.partial(self._rows.close, stopped=self.failure)
        let_go, give_up = self._let_go, self._rows.give_up
        for part in (self._leave, give_up, let_go, close, self._say_stopped):
            with contextlib.suppress(Exception):
                part()

    def _say_stopped(self) -> None:
        self._say(_STOPPED.format(events=len(self._rows), why=self.failure))

    def _say_lost(self) -> None:
        said = _LOST.format(why=self._rows.lost)
        if self._rows.lost and said not in self._notes:
            self._notes.append(said)
            self._say(said)

    def _say(self, said: str) -> None:
        try:
            warnings.warn(said, RuntimeWarning, stacklevel=3)
        except Warning:  # made an error by the user's filters, it would end the training that we must not disturb
            print(said, file=sys.stderr)

    def backward_begins(
        self,
        frame: Caller,
        args: patches.Args,
        kwargs: patches.Kwargs,
    ) -> Backward | None:
        gradients, thread = self._gradients, get_ident()
        is_first = gradients.thread is None
        if is_first:
            gradients.thread = thread
        if thread != gradients.thread:
            gradients.others += 1
            return None
        within = self._within()
        if self._collectives.unhooked:
            self._collectives.hook()
        self._edits()
        gradients.hook()
        running = Backward(
            self._sites.find(frame),
            within,
            bytes(gradients.present),
            thread,
        )
        terms = describe_root(running, args, kwargs)
        self._note_first(running, terms)
        if is_first:
            self._note_unrecorded(running)
        self._note_weights(running)
        self._memory.begin(running)
        if self._graphs is not None:
            self._graphs.begin(running, frame, args, kwargs)
        self._rows.begin(running)
        gradients.running = running
        return running

    def _note_unrecorded(self, running: Backward) -> None:
        """Note in a backward how many parameters it reaches that are not recorded, as of layers in a plain list."""
        leaves = leaves_below(running.nodes)
        # A leaf may also be an input of which the gradient is wanted.
        reached = [leaf for leaf in leaves if type(leaf) is torch.nn.Parameter]
        many = len(reached) - len(self._gradients.owned(reached))
        # FSDP trains weights that it does not shard as views of one that is not recorded.
        if any(getattr(leaf, "_is_flat_param", False) for leaf in reached):
            self._elsewhere = self._elsewhere or many > 0
            return
        # What FSDP puts together from shards are parameters, too.
        if many and not self._gradients.named.shards.wholes:
            running.details["unrecorded"] = many

    def _note_first(self, running: Backward, terms: list[tuple[Details, Any]]) -> None:
        """Note of the first loss of a kind on a line which recorded leaves its terms reach, and what they are given."""
        known = len(self._met)
        for term, _ in terms:
            self._met.add(
                (running.site.file, running.site.line, running.label, term["op"])
            )
        if len(self._met) == known:
            return
        names = self._gradients.named.names
        for term, node in terms:
            leaves = self._gradients.owned(leaves_below([node]))
            reached = {names[i] for i in leaves}
            term["reaches"] = sorted(reached.union(term.get("reaches", ())))
            given = misgiven(node)
            if given:
                term["misgiven"] = given

    def _note_weights(self, running: Backward) -> None:
        """Note in a backward which weights were moved by a hand, or read in a copy from before a step."""
        before, self._versions = self._versions, self._gradients.versions()
        if before and all(map(ne, before, self._versions)):
            running.details["moved"] = True  # after a step we look again
        old = self._casts.old_weight(running.nodes)
        if old is not None:
            for i in self._gradients.owned([old]):
                running.details["old_weight"] = self._gradients.named.names[i]

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
        if error is not None:
            running.details["error"] = describe(error)
        self._memory.end(running)
        running.nodes = ()
        gradients.finish(running)
        self._rows.expect(running)
        if self._collectives.replicas:
            self._collectives.describe(running)
        if running.syncs:
            self._collectives.finish(running)
        self._finish(running)

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        if not self._gradients.owned(optimizer):
            self._elsewhere = True
        elif self._is_followed():
            index = self._optimizers.meet(optimizer, frame)
            inner = any(step.optimizer == index for step in self._open_steps())
            if not inner:
                self._before_change()
            sample = StepSample(parameters(optimizer)) if self._rounds else None
            key = id(frame), frame.f_code
            self._steps.append(_Step(index, key, inner, sample))

    def step_ends(self, optimizer: Any, frame: FrameType) -> None:
        key = id(frame), frame.f_code
        for step in reversed(self._steps):
            if step.frame == key:
                self._steps.remove(step)
                if not step.inner:
                    details = step.sample.details() if step.sample else {}
                    self._step(optimizer, frame, details)
                return
        if self._follows(optimizer):
            self._step(optimizer, frame, {})

    def step_skipped(self, optimizer: Any, frame: FrameType) -> None:
        if self._follows(optimizer):
            self._before_change()
            self._step(optimizer, frame, {"skipped": True})

    def scheduled(self, scheduler: Any, frame: FrameType) -> None:
        """A learning-rate scheduler has stepped."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or not self._follows(optimizer):
            return
        self._before_change()
        details: Details = {"scheduler": type(scheduler).__name__}
        # One that goes on from a checkpoint takes the rest of its steps alone.
        if getattr(scheduler, "last_epoch", 0) == 1:
            state = next(iter(optimizer.state.values()), None)
            stepped = state.get("step") if isinstance(state, dict) else None
            begins = {"horizon": horizon(scheduler), "stepped": stepped}
            details |= {name: each for name, each in begins.items() if each is not None}
        details |= self._describe_optimizer(optimizer, frame)
        name = called(scheduler, frame)
        self._emit("schedule", self._site(frame), name, details, [])

    def loads(self, source: Any, frame: FrameType) -> None:
        """A data loader begins, or its iterator has come to its end."""
        if not self._closed and self._gradients.is_ours():
            self._before_change()
            begins = isinstance(source, DataLoader)
            number = self._loaders.number_of(source)
            details = {"what": "begins" if begins else "ends", "loader": number}
            self._emit("loader", self._site(frame), "", details, [])

    def change_begins(self, tensors: Any) -> bool:
        follows = self._follows(tensors)
        # A clip of nothing was meant for something.
        if isinstance(tensors, list) and not tensors and not self._closed:
            follows = self._gradients.is_ours()
        if follows:
            self._before_change()
        return follows

    def change_ends(
        self,
        kind: str,
        frame: FrameType,
        owner: Any,
        tensors: Any,
        details: Details,
    ) -> None:
        if self._closed:
            return
        changed = self._gradients.update()
        if kind == "unscale":  # it does not bump versions
            changed = self._gradients.with_grad(owner)
        elif kind == "clip":
            parts = self._gradients.with_grad(tensors, sharded=True)
            changed = sorted({*changed, *parts})
        site = self._site(frame)
        label = ""
        if isinstance(owner, torch.nn.Module):
            label = site.subject or type(owner).__name__
        elif owner is not None:
            label = self._optimizers.names[self._optimizers.meet(owner, frame)]
        self._emit(kind, site, label, dict(details), changed)

    def reduction_begins(self, tensor: Any) -> Leaves:
        """Return the leaves whose `.grad` is in a tensor that is to be summed or averaged over ranks."""
        leaves: Leaves = []
        if not self._closed and self._gradients.is_ours():
            leaves = self._collectives.grads_in([tensor])
        if leaves:
            self._before_change()
        return leaves

    def swap_begins(self) -> None:
        """Let go of every `.grad`: torch swaps no tensor to which there is a weak reference."""
        self._gradients.let_go()

    def swap_ends(self) -> None:
        """Take what a swap has made of `.grad` for what was there."""
        self._gradients.update()

    # --- events --------------------------------------------------------------------------------

    def _follows(self, owner: Any) -> bool:
        """Return whether tensors of this are recorded. Stops the recording where another thread than its own asks."""
        return bool(self._gradients.owned(owner)) and self._is_followed()

    def _is_followed(self) -> bool:
        if self._closed:
            return False
        if not self._gradients.is_ours():
            self._gradients.leave_to_others()
        return True

    def gradient_replaced(self) -> None:
        """Note that a hook between the loss and the parameters gives another gradient than it was given."""
        running = self._gradients.running_here()
        if running is not None:
            running.details["between"] = True

    def _before_change(self) -> None:
        running = self._gradients.running_here()
        if running is not None:
            self._gradients.settle(running)
        else:
            self._edits()

    def _edits(self) -> None:
        """Add an `edit` of each `.grad` that changed since the last event through no call that is wrapped."""
        if self._gradients.is_ours():
            changed = self._gradients.look()
            if changed:
                self._emit("edit", CallSite(), "", {}, changed)

    def _step(
        self,
        optimizer: Any,
        frame: FrameType,
        details: Details,
    ) -> None:
        self._versions = self._gradients.versions()
        self._casts.note_step(parameters(optimizer))
        details |= self._describe_optimizer(optimizer, frame)
        # A fused optimizer is called even when the scaler found inf; it then changes nothing.
        of_scaler = ("found_inf", "found_inf"), ("amp_scale", "grad_scale")
        for name, attribute in of_scaler:
            value = getattr(optimizer, attribute, None)
            if isinstance(value, Tensor):
                details[name] = value
        site = self._site(frame)
        changed = self._gradients.look()
        if changed and patches.has_hooks_before(optimizer):
            self._emit("edit", site, "", {"by": "hook"}, changed)
            changed = []
        # Unscaled in the kernel, without a version.
        if "amp_scale" in details:
            changed = self._gradients.with_grad(optimizer)
        self._emit("step", site, details["optimizer"], details, changed)

    def _describe_optimizer(self, optimizer: Any, frame: FrameType) -> Details:
        index = self._optimizers.meet(optimizer, frame)
        groups = optimizer.param_groups
        details = {
            "lr": [group.get("lr") for group in groups],
            "optimizer": self._optimizers.names[index],
            "optimizer_index": index,
        }
        empty = sum(not group["params"] for group in groups)
        if empty:
            details["empty_groups"] = empty
        return details

    def _site(self, frame: FrameType) -> CallSite:
        """The user's line; on the engine's thread, where there may be none, that of the backward."""
        site = self._sites.find(frame)
        running = None if site.file else self._gradients.running_here()
        return site if running is None else running.site

    def _within(self) -> str:
        """What the caller is inside of: a step (its closure), a backward (its hooks), or nothing."""
        gradients = self._gradients
        if gradients.running is not None and gradients.running_here() is not None:
            return "backward"
        return "step" if self._steps and self._open_steps() else ""

    def _open_steps(self) -> list[_Step]:
        """Return the steps that the caller is inside of; one that raised never ends, and is forgotten."""
        if self._steps:
            stack = set()
            frame: Caller = sys._getframe(1)
            while frame is not None:
                stack.add((id(frame), frame.f_code))
                frame = frame.f_back
            self._steps = [step for step in self._steps if step.frame in stack]
        return self._steps

    def _emit(
        self,
        kind: str,
        site: CallSite,
        label: str,
        details: Details,
        changed: Leaves,
    ) -> None:
        row = Row(kind, label, site, self._within(), details)
        row.changed = changed
        self._rows.begin(row)
        self._read_details(row)
        self._gradients.read_grads(row, changed)
        row.present = bytes(self._gradients.present)
        self._finish(row)

    def _read_details(self, row: Row) -> None:
        """Read those details of an event that are tensors."""
        details = row.details
        for name, value in list(details.items()):
            if isinstance(value, Tensor):
                del details[name]
                row.take(value, functools.partial(_note, details, name))
        rates = details.get("lr", [])
        for group, value in enumerate(rates):
            rates[group] = None
            if not isinstance(value, Tensor):
                with contextlib.suppress(TypeError, ValueError):
                    rates[group] = float(value)
            elif value.numel() == 1:
                row.take(value, functools.partial(rates.__setitem__, group))

    def _finish(self, row: Row) -> None:
        """Add the weights after a step, and at the first event, so that it is known where they began."""
        if self._unmoved and self._rank is not None:
            self._gradients.weigh_rank(row)
        if row.kind == "step" or self._unmoved:
            self._unmoved = False
            self._gradients.weigh(row)
        self._rows.finish(row)
        if self._rows.lost:
            self._say_lost()

    def _about(self) -> About:
        """Return what a file says of the parameters and of the recording itself."""
        parameters = self._parameters
        if parameters is None:
            parameters = self._gradients.parameters(self._optimizers.leaves())
        return parameters, self._meta()

    def _meta(self) -> Details:
        meta: Details = {
            "accumviz": __version__,
            "torch": torch.__version__,
            "optimizers": list(self._optimizers.names),
        }
        if self._rank is not None:
            meta["rank"], meta["ranks"] = self._rank
        if self._elsewhere:
            meta["steps_elsewhere"] = True
        if self._notes:
            meta["notes"] = list(self._notes)
        if self._frozen:
            meta["frozen_in_vain"] = self._frozen
        stopped = self.failure or ("" if self._closed else _unheeded())
        if stopped:
            meta["stopped"] = stopped
        return meta


def _unheeded() -> str:
    """Name what has failed and stopped no recording yet."""
    return type(patches.failures[-1]).__name__ if patches.failures else ""


def _note(details: Details, name: str, value: float) -> None:
    """Note a detail that was not known before; a scaler that found inf has skipped the step."""
    if name != "found_inf":
        details[name] = value
    elif value:
        details["skipped"] = True
