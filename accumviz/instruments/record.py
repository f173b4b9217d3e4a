"""Record what every backward adds to every `.grad`: observe, never steer, never wait for the device."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from accumviz import __version__
from accumviz.instruments import watch
from accumviz.instruments.callsite import CallSite, CallSites
from accumviz.instruments.held import Held
from accumviz.instruments.leaves import Hook, Leaves
from accumviz.instruments.losses import describe_root
from accumviz.instruments.naming import Named, collect, optimizer_name
from accumviz.instruments.numbers import Numbers
from accumviz.instruments.rows import Backward, Row, Rows, Target
from accumviz.ledger import PRESENT, Ledger, Parameter

# Contributions are reduced in bulk; beyond this many bytes held at once, in several bulks.
_BULK_BYTES = 64 << 20
# Details of an event that may be tensors on a device.
_LATE = ("max_norm", "total_norm", "clip_value", "amp_scale", "found_inf")


def record(
    *objects: Any,
    path: str | Path | None = None,
    exact: int = 64,
    memory: bool | None = None,
    **groups: Any,
) -> Recording:
    """Record what happens to the `.grad` of these parameters while the `with` block runs.

    `objects` are modules, optimizers, parameters, dicts of named tensors, or lists of these;
    keywords name groups, as in `record(G=generator, D=discriminator)`. With `path` the ledger
    is also written there as it grows. Tensors of at most `exact` elements keep every element,
    larger ones their 2-norm. `memory` measures the bytes of saved tensors alive around a
    backward: each one (True), none (False), or the first hundred and then as many as fit into
    one per cent of the loop's time (None).

    Raises `TypeError` for something that holds no parameters, and `ValueError` when nothing
    would be recorded. Source of the hooks used: "Backward Hooks execution" in the PyTorch
    note on autograd mechanics.

    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> with record(w) as recording:
    ...     for x in (4.0, 2.0):
    ...         loss = (2 * x - w * x).square().mean() / 2
    ...         loss.backward()
    >>> recording.ledger.values("w", of="contribution").ravel().tolist()
    [-16.0, -4.0]
    >>> recording.ledger.values("w").ravel().tolist()
    [-16.0, -20.0]
    """
    if exact < 0:
        raise ValueError(f"exact={exact}; expected the largest number of elements to keep one by one, 0 or more")
    frame = sys._getframe(1)
    return Recording(collect(objects, groups, frame), frame, path=path, exact=exact, memory=memory)


class Recording:
    """The open recording: mutable while the loop runs; `recording.ledger` is its frozen ledger."""

    def __init__(
        self, named: Named, frame: FrameType | None, *, path: str | Path | None, exact: int, memory: bool | None
    ) -> None:
        self._open: list[Backward] = []
        self._leaves = Leaves(named, exact, self._hook_of)
        self._frame: FrameType | None = frame
        self._optimizers: list[torch.optim.Optimizer] = []
        self._optimizer_names: list[str] = []
        self._memory = Held(memory)
        self._sites = CallSites()
        self._steps: list[tuple[Any, FrameType]] = []
        self._entered = self._closed = False
        self._failure = ""
        self._thread = threading.get_ident()
        self._start = time.perf_counter()
        small = list(self._leaves.small)
        self._rows = Rows([tensor.numel() for tensor in named.tensors], small, path)
        for optimizer in named.optimizers:
            self._meet(optimizer)

    def __enter__(self) -> Recording:
        if self._entered:
            raise RuntimeError("this recording has been used already; call record(...) again for a new one")
        self._entered = True
        self._start = time.perf_counter()
        self._leaves.note(self._leaves.changed())
        self._leaves.hook()
        self._rows.begin(self._parameters(), self._meta())
        watch.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        watch.leave(self)
        self._leaves.unhook()
        if not self._closed:
            self._edits()
            self._closed = True
            self._frame = None
            self._rows.settle(self._parameters, wait=True)
            self._rows.close()

    @property
    def ledger(self) -> Ledger:
        """Everything recorded so far, frozen; waits for numbers still on their way from a device."""
        self._rows.settle(self._parameters, wait=True)
        return self._rows.ledger(self._parameters(), self._meta())

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._entered else "not entered: use it in a with statement"
        return f"Recording ({state}): {len(self._rows)} events × {len(self._leaves)} parameters"

    # --- what watch tells us -------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Stop observing, keep what is recorded, and say so once: training goes on as if we were not there."""
        self._failure = f"{type(error).__name__}: {error}"
        self._open.clear()
        warnings.warn(f"accumviz stopped recording after {len(self._rows)} events: {self._failure}", stacklevel=3)
        for row in self._rows.pending:
            row.done = True
        with contextlib.suppress(Exception):
            self._close()

    def backward_begins(self, frame: FrameType, roots: tuple[Any, ...], options: dict[str, Any]) -> Backward:
        leaves = self._leaves
        leaves.hook()
        within = ""
        if self._open or self._steps or threading.get_ident() != self._thread:
            within = self._within()
        elif changed := leaves.changed():
            self._emit("edit", CallSite(), "", {}, changed)
        site = self._sites.find(frame)
        running = Backward(site.subject, site, time.perf_counter() - self._start, within, bytearray(leaves.present))
        describe_root(running, roots, options)
        self._rows.pending.append(running)
        running.storages = self._memory.before(running.nodes)
        if running.storages is not None:
            running.before = self._memory.total(running.storages)
        self._open.append(running)
        return running

    def backward_ends(self, running: Backward, error: BaseException | None) -> None:
        if running not in self._open:
            return
        leaves = self._leaves
        self._settle(running)
        self._open.remove(running)
        if error is not None:
            running.details["error"] = f"{type(error).__name__}: {error}"[:500]
        if running.storages is not None:
            running.after = self._memory.after(
                running.nodes, running.storages, keeps=running.keeps, failed=error is not None
            )
            running.storages = None
        touched = list(running.settled)
        if len(running.fresh.keys() - running.settled.keys()):
            # Freed by a hook before we could read it: that something arrived is known, not how much.
            running.unknown |= running.fresh.keys() - running.settled.keys()
            touched = list(running.fresh | running.settled)
        if not touched and running.thread != self._thread:
            self._rows.pending.remove(running)  # another thread's training, not of these parameters
            return
        leaves.note(touched)
        others = leaves.changed()
        running.contributed = running.changed = touched
        running.same = list(running.fresh)
        if others or running.unknown or len(running.fresh) < len(touched):
            self._read_summed(running, touched, others)
        present = bytearray(leaves.present)
        for i in running.settled:  # an optimizer that steps in a hook may have freed it since
            present[i] = PRESENT
        running.present = bytes(present)
        pieces, running.pieces, running.nodes = running.pieces, [], []
        self._finish(running, pieces)

    def _read_summed(self, running: Backward, touched: list[int], others: list[int]) -> None:
        """Where `.grad` is not just what this backward brought, read it."""
        unknown = running.unknown
        running.unmeasured = sorted(unknown)
        if unknown:
            running.details["unmeasured"] = [self._leaves.named.names[i] for i in running.unmeasured]
        running.same = [i for i in running.fresh if i not in unknown]
        self._leaves.note(others)
        running.changed = touched + others
        summed = [i for i in touched if running.had[i] or i in unknown]
        targets, grads = self._leaves.read(summed + others)
        running.targets += targets
        running.pieces += grads

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        running = self._running()
        if running is not None:
            self._settle(running)
        elif self._leaves.owned(optimizer):
            self._edits()
        self._steps.append((optimizer, frame))

    def step_ends(self, optimizer: Any, frame: FrameType) -> None:
        self._steps = [(o, f) for o, f in self._steps if f is not frame]
        if self._leaves.owned(optimizer):
            self._step(optimizer, frame, {})

    def step_skipped(self, optimizer: Any, frame: FrameType) -> None:
        if self._leaves.owned(optimizer):
            self._step(optimizer, frame, {"skipped": True})

    def change_begins(self, tensors: Iterable[torch.Tensor]) -> bool:
        if not any(tensor in self._leaves for tensor in tensors):
            return False
        running = self._running()
        if running is not None:
            self._settle(running)
        else:
            self._edits()
        return True

    def change_ends(self, kind: str, frame: FrameType, owner: Any, details: dict[str, Any]) -> None:
        changed = self._leaves.changed()
        if kind == "unscale":  # it does not bump versions
            changed = [i for i in self._leaves.owned(owner) if self._leaves.tensors[i].grad is not None]
        site, label = self._sites.find(frame), ""
        if isinstance(owner, torch.optim.Optimizer):
            label = self._optimizer_names[self._meet(owner)]
        elif owner is not None:
            label = site.subject or type(owner).__name__
        self._emit(kind, site, label, details, changed)

    # --- events --------------------------------------------------------------------------------

    def _edits(self) -> None:
        changed = self._leaves.changed()
        if changed:
            self._emit("edit", CallSite(), "", {}, changed)

    def _step(self, optimizer: Any, frame: FrameType, details: dict[str, Any]) -> None:
        index = self._meet(optimizer)
        details |= {"optimizer": self._optimizer_names[index], "optimizer_index": index}
        lr = [group.get("lr", float("nan")) for group in optimizer.param_groups]
        details["lr"] = [float(x) if not isinstance(x, torch.Tensor) or x.device.type == "cpu" else None for x in lr]
        # A fused optimizer is called even when the scaler found inf; it then changes nothing.
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            details["found_inf"] = found
        changed = self._leaves.changed()
        if getattr(optimizer, "grad_scale", None) is not None:  # unscaled inside the kernel, unseen by versions
            changed = [i for i in self._leaves.owned(optimizer) if self._leaves.tensors[i].grad is not None]
        self._emit("step", self._sites.find(frame), self._optimizer_names[index], details, changed)

    def _within(self) -> str:
        """What the caller is inside of: a step (its closure), a backward (its hooks), or nothing."""
        if self._steps:
            self._drop_stale_steps()
        return "backward" if self._running() else "step" if self._steps else ""

    def _emit(self, kind: str, site: CallSite, label: str, details: dict[str, Any], changed: list[int]) -> None:
        within = self._within() if self._open or (self._steps and kind != "step") else ""
        # An event takes its place when it begins to take effect.
        row = Row(kind, label, site, time.perf_counter() - self._start, within, details)
        self._rows.pending.append(row)
        targets: list[Target] = []
        pieces: list[torch.Tensor] = []
        for name in _LATE:
            value = details.get(name)
            if isinstance(value, torch.Tensor):
                del details[name]
                targets.append(("detail", name))
                pieces.append(value.detach().reshape(-1).clone())
        if changed:
            self._leaves.note(changed)
            found, grads = self._leaves.read(changed)
            targets += found
            pieces += grads
        row.changed, row.targets, row.present = changed, targets, bytes(self._leaves.present)
        self._finish(row, pieces)

    def _finish(self, row: Row, pieces: list[torch.Tensor]) -> None:
        if pieces:
            row.numbers = Numbers(pieces)
        row.done = True
        if self._rows.due():
            self._rows.settle(self._parameters)

    def _settle(self, running: Backward) -> None:
        """Reduce what has reached parameters so far, while it is there to be read."""
        arrived = list(running.held.items())
        for i in running.fresh:
            grad = self._leaves.tensors[i].grad
            if grad is not None and i not in running.settled:
                arrived.append((i, grad.detach()))
        if not arrived:
            return
        running.held = {}
        running.bytes = 0
        for i, _ in arrived:
            running.settled[i] = None
        self._leaves.note(running.settled)
        targets, pieces = self._leaves.reduce("contribution", arrived)
        running.targets += targets
        running.pieces += pieces

    def _hook_of(self, i: int) -> Hook:
        # The tensor holds its hook: one that held the recording would keep both alive for ever.
        here, running_now = weakref.ref(self), self._open

        def hook(grad: torch.Tensor | None) -> None:
            if not running_now or grad is None:  # autograd.grad runs hooks too, but writes no `.grad`
                return
            recording = here()
            try:
                running = running_now[-1]
                if len(running_now) > 1 and recording is not None:
                    running = recording._running() or running
                running.receive(i, grad)
                if running.bytes > _BULK_BYTES and recording is not None:
                    recording._settle(running)
            except Exception as error:  # a hook that raises would end the user's backward
                if recording is not None:
                    recording.failed(error)

        return hook

    def _running(self) -> Backward | None:
        """The backward that the caller is inside of, if any; on a device, hooks run on the engine's threads."""
        if not self._open:
            return None
        thread = threading.get_ident()
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
        self._steps = [(optimizer, frame) for optimizer, frame in self._steps if id(frame) in stack]

    def _parameters(self) -> list[Parameter]:
        return self._leaves.parameters(self._optimizers)

    def _meta(self) -> dict[str, Any]:
        meta = {"accumviz": __version__, "torch": torch.__version__, "optimizers": list(self._optimizer_names)}
        return meta | ({"stopped": self._failure} if self._failure else {})
