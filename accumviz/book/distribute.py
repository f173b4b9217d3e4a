"""Start real torch.distributed processes from a notebook cell, and collect what they record."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from accumviz import arguments
from accumviz.book import rank
from accumviz.ledger.container import LedgerFileError
from accumviz.ledger.ledger import Ledger, load

# Seconds until the other ranks are ended once one has failed, and for them to say where they are.
_GRACE = 1.0
# Forking copies what is imported already; elsewhere than on Linux that is not safe.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
# What takes long to import, once for all ranks; DDP imports the compiler.
_HEAVY = [
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
    "accumviz.recorder.record",
    "accumviz.book.rank",
]


@dataclass(frozen=True)
class World:
    """What came back from the ranks: a ledger of each (None: it recorded nothing), and what each returned."""

    ledgers: tuple[Ledger | None, ...]
    returned: tuple[Any, ...]

    @property
    def ledger(self) -> Ledger:
        """All ranks' ledgers in one; raises `ValueError` when none recorded anything."""
        return Ledger.merge([ledger for ledger in self.ledgers if ledger is not None])

    def __repr__(self) -> str:
        said = []
        for i, ledger in enumerate(self.ledgers):
            held = "nothing recorded" if ledger is None else f"{len(ledger)} events"
            said.append(f"rank {i}: {held}")
        return f"World of {len(said)} ranks: {', '.join(said)}"


class RankError(RuntimeError):
    """A rank raised, died or did not end in time: which one, where, and what all ranks left behind.

    `rank` is the first to fail, `traceback` where it was, `world` what the ranks recorded and
    returned until then.
    """

    def __init__(self, message: str, rank: int, traceback: str, world: World) -> None:
        super().__init__(message)
        self.rank, self.traceback, self.world = rank, traceback, world


@dataclass
class _Outcome:
    """How one rank ended; `order` is smaller the more likely it is the cause of the others' failures."""

    rank: int
    value: Any = None
    failure: str = ""
    trace: str = ""
    unfinished: bool = False
    order: float = 0.0


def distribute(
    function: Callable[..., Any],
    *,
    ranks: int = 2,
    timeout: float = 60.0,
    **kwargs: Any,
) -> World:
    """Call `function(**kwargs)` in so many processes of one torch.distributed group, and collect what they record.

    Each process is a rank of the default group, on the loopback interface. gloo carries tensors on
    the CPU. Where there is a GPU for each rank, NCCL carries those that the function has moved to
    it; else no GPU is visible. Inside the function `torch.distributed.get_rank()` tells the ranks
    apart. A recording made there comes back as
    `world.ledgers[rank]`, all of them merged as `world.ledger` (of several in one rank, the last);
    `world.returned` holds what each rank returned. What ranks print follows when they are done.

    The function may be defined in a notebook. cloudpickle sends it with what its code names:
    imports, functions, classes, and values that pickle copies. Nothing that a rank changes comes back,
    except through what it returns.

    `timeout` is in seconds from the moment the ranks start. Raises `RankError`, which names the
    rank and shows its traceback, when one raises, dies or has not ended by then; all are ended
    before it is raised. Raises `TypeError` for a function that cannot be sent.

    >>> def add(value):
    ...     import torch, torch.distributed as dist
    ...     mine = torch.tensor([value * (dist.get_rank() + 1.0)])
    ...     dist.all_reduce(mine)
    ...     return mine.item()
    >>> distribute(add, ranks=2, value=10).returned
    (30.0, 30.0)
    """
    if not callable(function):
        raise TypeError(
            f"distribute() was given {arguments.a(function)}; expected the function that each rank calls"
        )
    ranks = arguments.whole("ranks", ranks, "how many processes to start", least=1)
    timeout = arguments.above_zero("timeout", timeout, "seconds")
    if os.name != "posix":
        raise RuntimeError(
            "distribute needs Linux or macOS; on Windows, use WSL, or torchrun with record(..., path=)"
        )
    call = rank.pack(function, kwargs)
    with tempfile.TemporaryDirectory(
        prefix="accumviz-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        (folder / "call").write_bytes(call)
        processes: list[BaseProcess] = []
        try:
            for process in _processes(folder, ranks, timeout):
                with _nothing_in_main():
                    process.start()
                processes.append(process)
            _wait(processes, timeout)
            _ask_where(processes, folder)
        finally:
            _end(processes)
        outcomes = [_outcome(folder, i, one) for i, one in enumerate(processes)]
        return _world(folder, outcomes, timeout)


def _processes(folder: Path, ranks: int, timeout: float) -> list[BaseProcess]:
    """Make one process for each rank, with the variables that torchrun sets."""
    import torch

    gpu = torch.cuda.device_count() >= ranks
    shared = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    if not gpu:
        shared["CUDA_VISIBLE_DEVICES"] = ""
    context: Any = get_context(_METHOD)
    if _METHOD == "forkserver":
        context.set_forkserver_preload(_HEAVY)
    made: list[BaseProcess] = []
    for i in range(ranks):
        env = shared | {"RANK": str(i), "LOCAL_RANK": str(i)}
        settings = rank.Settings(str(folder), i, ranks, timeout, gpu, env)
        made.append(context.Process(target=rank.run, args=(settings,), daemon=True))
    return made


@contextmanager
def _nothing_in_main() -> Iterator[None]:
    """Keep a process that starts from importing the user's script again: the function is sent instead."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _wait(processes: list[BaseProcess], timeout: float) -> None:
    """Wait until all ranks have ended, time is up, or one has failed and the others had time to notice."""
    until = time.monotonic() + timeout
    failed = False
    while running := [one.sentinel for one in processes if one.exitcode is None]:
        if not failed and any(one.exitcode for one in processes):
            failed, until = True, min(until, time.monotonic() + _GRACE)
        left = until - time.monotonic()
        if left <= 0:
            return
        connection.wait(running, left)


def _ask_where(processes: list[BaseProcess], folder: Path) -> None:
    """Have the ranks that still run write down where they are, and their ledgers."""
    running = [one for one in processes if one.exitcode is None]
    if running:
        (folder / "stop").touch()
    until = time.monotonic() + 3 * _GRACE
    for process in running:
        process.join(max(until - time.monotonic(), 0))


def _end(processes: list[BaseProcess]) -> None:
    """End all ranks, and what they have started: each leads a group of processes."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _outcome(folder: Path, i: int, process: BaseProcess) -> _Outcome:
    result, stack = folder / f"rank{i}.result", folder / f"rank{i}.stack"
    if result.exists():
        value, failure, trace, moment = pickle.loads(result.read_bytes())  # noqa: S301 - our process wrote it
        return _Outcome(i, value, failure, trace, order=moment)
    if stack.exists():
        return _Outcome(i, None, "had not ended", stack.read_text(), True, float("inf"))
    code = process.exitcode or 0
    log = _text(folder / f"rank{i}.log")[-4000:]
    if code == -signal.SIGKILL and (folder / "stop").exists():
        return _Outcome(i, None, "had not ended", log, True, float("inf"))
    if code < 0:
        return _Outcome(i, None, f"died, killed by {signal.Signals(-code).name}", log)
    return _Outcome(i, None, f"ended with exit code {code} and returned nothing", log)


def _world(folder: Path, outcomes: list[_Outcome], timeout: float) -> World:
    ledgers = tuple(_last_ledger(folder, one.rank) for one in outcomes)
    world = World(ledgers, tuple(one.value for one in outcomes))
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        for one in outcomes:
            for line in _text(folder / f"rank{one.rank}.{name}").splitlines():
                print(f"rank {one.rank}: {line}", file=stream)
    failed = sorted(
        (one for one in outcomes if one.failure), key=lambda one: (one.order, one.rank)
    )
    if failed:
        raise RankError(
            _message(failed, ledgers, timeout), failed[0].rank, failed[0].trace, world
        )
    return world


def _message(
    failed: list[_Outcome], ledgers: tuple[Ledger | None, ...], timeout: float
) -> str:
    first = failed[0]
    after = f" after {timeout:g} seconds" if first.unfinished else ""
    lines = [f"rank {first.rank} {first.failure}{after}", first.trace.rstrip()]
    for other in failed[1:]:
        lines.append(f"rank {other.rank} {other.failure.splitlines()[0]}")
        if other.unfinished:
            lines.append(other.trace.rstrip())
    kept = [str(i) for i, ledger in enumerate(ledgers) if ledger is not None]
    if kept:
        lines.append(
            f"The ledgers of these ranks are kept in error.world.ledgers: {', '.join(kept)}"
        )
    return "\n".join(filter(None, lines))


def _last_ledger(folder: Path, i: int) -> Ledger | None:
    for line in reversed(_text(folder / f"rank{i}.ledgers").splitlines()):
        with suppress(LedgerFileError):
            ledger = load(json.loads(line), repair=True)
            assert isinstance(ledger, Ledger)
            return ledger
    return None


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
