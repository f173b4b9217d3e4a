"""What must hold of a recording on a CUDA device: each check is a function that returns rows for a table."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from accumviz.ledger.ledger import Ledger
from accumviz.recorder.gradients import BULK_ON_DEVICE
from accumviz.recorder.recording import record

if torch.cuda.is_available():  # read by cuBLAS when it starts: without it, bits may differ from run to run
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

Row = dict[str, Any]
MIB = 1 << 20
# Calls of the CUDA runtime in which the host waits for the device.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaHostAlloc")


def row(name: str, value: float | int | str, unit: str = "", bar: str | None = None, holds: bool | None = None) -> Row:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "holds": holds}


def _held(name: str, holds: bool) -> Row:
    return row(name, "yes" if holds else "no", bar="yes", holds=holds)


# --- the loops -------------------------------------------------------------------------------------------


class Loop:
    """A small training loop on a device: two micro-batches, clip, step, zero; the same at each making."""

    def __init__(self, where: str = "cuda", *, amp: bool = False, dropout: float = 0.1) -> None:
        torch.manual_seed(0)
        self.where, self.amp = where, amp
        self.model = nn.Sequential(
            nn.Linear(32, 512),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.LayerNorm(512),
            nn.Linear(512, 512),
            nn.Linear(512, 1),
        ).to(where)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler(where, init_scale=2.0**14, enabled=amp)
        self.x, self.y = torch.randn(2, 64, 32).to(where), torch.randn(2, 64, 1).to(where)

    def backwards(self) -> Iterator[None]:
        for x, y in zip(self.x, self.y, strict=True):
            with torch.autocast(self.where, torch.float16) if self.amp else nullcontext():
                loss = (self.model(x) - y).square().mean() / 2
            self.scaler.scale(loss).backward()
            yield

    def step(self) -> None:
        for _ in self.backwards():
            pass
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def recorded(self, **kwargs: Any) -> Any:
        return record(self.model, self.optimizer, **kwargs)


def _sums(where: str, steps: int = 3) -> list[np.ndarray]:
    """Without a recording: the norm of what each backward added, from clones of `.grad` before and after."""
    loop, found = Loop(where, dropout=0.0), []
    for _ in range(steps):
        before = [torch.zeros_like(p) for p in loop.model.parameters()]
        for _ in loop.backwards():
            after = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
            found.append(np.array([(a - b).double().norm().item() for a, b in zip(after, before, strict=True)]))
            before = after
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return found


def _contributions(ledger: Ledger) -> np.ndarray:
    backwards = [event.index for event in ledger.of("backward")]
    return ledger.contribution[backwards]


def _added(loop: Loop, model: nn.Module, steps: int = 3, *, alone: bool = False) -> Ledger:
    """The same steps through `model`, which computes what the loop's own does, recorded.

    With `alone`, no micro-batch adds to another's `.grad`: what a CUDA graph gives out is overwritten by
    its next replay, also where autograd has put it into `.grad`.
    """
    with record(loop.model, loop.optimizer) as recording:
        for _ in range(steps):
            for x, y in zip(loop.x, loop.y, strict=True):
                if alone:
                    loop.optimizer.zero_grad()
                loss = (model(x) - y).square().mean() / 2
                loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    ledger: Ledger = recording.ledger
    return ledger


# --- the checks ------------------------------------------------------------------------------------------


def numbers(where: str = "cuda") -> list[Row]:
    """Contributions are those of an independent calculation, on the default stream and on another one."""
    expected = np.array(_sums(where))
    loop = Loop(where, dropout=0.0)
    rows = [_close("contributions equal differences of clones", _contributions(_added(loop, loop.model)), expected)]
    if where == "cuda":
        loop, side = Loop(where, dropout=0.0), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ledger = _added(loop, loop.model)
        torch.cuda.current_stream().wait_stream(side)
        rows.append(_close("on a side stream, too", _contributions(ledger), expected))
        loop = Loop(where, dropout=0.0)
        with record(loop.model) as recording:
            for x, y in zip(loop.x, loop.y, strict=True):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    loss = (loop.model(x) - y).square().mean() / 2
                torch.cuda.current_stream().wait_stream(side)
                loss.backward()  # forward there, backward called here
        rows.append(_close("with forward and backward on two", _contributions(recording.ledger), expected[:2]))
    return rows


def _close(name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float = 1e-4) -> Row:
    if ours.shape != theirs.shape or not np.isfinite(ours).all():
        return _held(name, holds=False)
    off = float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-6)))
    return row(f"{name}: largest relative difference", off, bar=f"≤ {tolerance}", holds=off <= tolerance)


def places(where: str = "cuda") -> list[Row]:
    """The line and the label are the user's, though hooks run on the engine's thread."""
    loop, threads = Loop(where), set[int]()
    loop.model[0].weight.register_hook(lambda _: threads.add(threading.get_ident()))
    with loop.recorded() as recording:
        loop.step()
    told = [(event.kind, event.label, event.source) for event in recording.ledger]
    backward = ("backward", "self.scaler.scale(loss)", "self.scaler.scale(loss).backward()")
    expected = [
        backward,
        backward,
        ("clip", "", "nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)"),
        ("step", "optimizer", "self.scaler.step(self.optimizer)"),
        ("zero_grad", "optimizer", "self.optimizer.zero_grad()"),
    ]
    named = [(kind, "optimizer" if kind in ("step", "zero_grad") else label, source) for kind, label, source in told]
    rows = [_held("every event has the user's line and label", named == expected)]
    if where != "cpu":
        rows.append(_held("hooks ran on another thread", threads.isdisjoint({threading.get_ident()}) and bool(threads)))
    return rows


def waits(where: str = "cuda") -> list[Row]:
    """No step waits for the device because of the recording."""
    rows = []
    for name, kwargs in (("", {}), (", memory=True", {"memory": True}), (", graphs=True", {"graphs": True})):
        loop = Loop(where)
        loop.step()
        with loop.recorded(**kwargs) as recording:
            raised = _errors(loop.step, 6)
        finite = np.isfinite(_contributions(recording.ledger)).all()
        rows.append(_held(f'set_sync_debug_mode("error") lets a recorded step pass{name}', not raised and bool(finite)))
    for amp in (False, True):
        plain, recorded = Loop(where, amp=amp), Loop(where, amp=amp)
        without = _runtime_calls(plain.step)
        with recorded.recorded(memory=True):
            recorded.step()
            within = _runtime_calls(recorded.step)
        for call in _WAITS:
            added = within[call] - without[call]
            rows.append(row(f"added {call} in 5 steps{', AMP' if amp else ''}", added, bar="0", holds=added <= 0))
    return rows


def _errors(step: Callable[[], None], times: int) -> bool:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(times):
            step()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _runtime_calls(step: Callable[[], None], times: int = 5) -> Counter[str]:
    step()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(times):
            step()
    found = Counter({event.key: event.count for event in profile.key_averages()})
    found["cudaDeviceSynchronize"] -= 1  # the profiler's own, at its end
    return found


def neutrality(where: str = "cuda", amps: tuple[bool, ...] = (False, True)) -> list[Row]:
    """Weights, optimizer state, gradients and random state are the same bit for bit."""
    rows = []
    with _deterministic():
        for amp in amps:
            bare = _state(Loop(where, amp=amp), lambda _: nullcontext())
            for name, kwargs in (("", {}), (", memory=True, graphs=True", {"memory": True, "graphs": True})):
                ours = _state(Loop(where, amp=amp), lambda loop, kwargs=kwargs: loop.recorded(**kwargs))
                same = len(ours) == len(bare) and all(torch.equal(a, b) for a, b in zip(ours, bare, strict=True))
                rows.append(_held(f"bit for bit as without{', AMP' if amp else ''}{name}", same))
    return rows


def _state(loop: Loop, around: Callable[[Loop], Any]) -> list[torch.Tensor]:
    with around(loop):
        for _ in range(5):
            loop.step()
        for _ in loop.backwards():
            pass
    found = [p.detach() for p in loop.model.parameters()]
    found += [p.grad for p in loop.model.parameters() if p.grad is not None]
    states = loop.optimizer.state_dict()["state"].values()
    found += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    found.append(torch.get_rng_state())
    return [*found, torch.cuda.get_rng_state()] if loop.where == "cuda" else found


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def compiled(where: str = "cuda") -> list[Row]:
    """A compiled model, also one that replays CUDA graphs inside, and a whole compiled step."""
    rows = []
    for mode, alone in (("default", False), ("reduce-overhead", True)) if where == "cuda" else (("default", False),):
        torch._dynamo.reset()
        loop = Loop(where, dropout=0.0)
        expected = _contributions(_added(loop, loop.model, alone=alone))
        loop = Loop(where, dropout=0.0)
        ledger = _added(loop, torch.compile(loop.model, mode=mode), alone=alone)
        rows.append(_close(f'torch.compile(mode="{mode}")', _contributions(ledger), expected, 1e-3))
        rows.append(_held(f'labels, mode="{mode}"', {event.label for event in ledger.of("backward")} == {"loss"}))
    torch._dynamo.reset()
    loop = Loop(where)
    step = torch.compile(loop.step)
    with loop.recorded() as recording:
        for _ in range(2):
            step()
    kinds = ["backward", "backward", "clip", "step", "zero_grad"]
    rows.append(_held("a compiled step is recorded", [event.kind for event in recording.ledger] == 2 * kinds))
    return rows


def cuda_graphs() -> list[Row]:
    """A captured loop is noted, its replays are edits with the `.grad` they leave, and it computes what it did."""

    def train(recorded: bool) -> tuple[list[torch.Tensor], Ledger | None, list[str]]:
        loop, said = Loop(dropout=0.0), []
        with warnings.catch_warnings(record=True) as caught, loop.recorded() if recorded else nullcontext() as opened:
            warnings.simplefilter("always")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in loop.backwards():
                    pass
            torch.cuda.current_stream().wait_stream(side)
            loop.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in loop.backwards():
                    pass
            for _ in range(2):
                graph.replay()
            said = [str(warning.message) for warning in caught if "accumviz" in str(warning.message)]
        grads = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
        return grads, opened.ledger if opened is not None else None, said

    bare, _, _ = train(recorded=False)
    grads, ledger, said = train(recorded=True)
    assert ledger is not None
    replays = [event for event in ledger.of("edit") if event.label == "CUDA graph"]
    left = ledger.grad[replays[-1].index] if replays else np.full(len(grads), np.nan)
    norms = np.array([grad.double().norm().item() for grad in grads])
    rows = [
        _held("a capture is noted and warned of once", len(said) == 1 and len(ledger.meta.get("notes", ())) == 1),
        _held("each replay is an event", len(replays) == 2),
        _close("`.grad` after the last replay", left, norms),
        _held("replays compute the same", all(torch.equal(a, b) for a, b in zip(bare, grads, strict=True))),
    ]
    expected = np.array(_sums("cuda"))
    loop = Loop(dropout=0.0)
    callable_ = torch.cuda.make_graphed_callables(loop.model, (loop.x[0],))
    ledger = _added(loop, callable_, steps=1, alone=True)
    return [*rows, _close("make_graphed_callables", _contributions(ledger), expected[:2], 1e-3)]


def figures() -> list[Row]:
    """How much of the device's memory a recording takes; nobody resets the allocator's peak."""
    bare = _peak(lambda _: nullcontext())
    added = _peak(lambda loop: loop.recorded(memory=True)) - bare
    return [
        row("peak of 5 steps without recording", round(bare / MIB, 3), "MiB"),
        row(
            "added to it by recording",
            round(added / MIB, 3),
            "MiB",
            f"≤ {BULK_ON_DEVICE // MIB}",
            added <= BULK_ON_DEVICE,
        ),
    ]


def _peak(around: Callable[[Loop], Any]) -> int:
    loop = Loop()
    loop.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with around(loop):
        for _ in range(5):
            loop.step()
    return torch.cuda.max_memory_allocated()


CHECKS: tuple[Callable[[], list[Row]], ...] = (
    numbers,
    places,
    waits,
    neutrality,
    compiled,
    cuda_graphs,
    figures,
)
