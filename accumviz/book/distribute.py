"""Start real torch.distributed processes from a notebook cell, and collect what they record."""

from __future__ import annotations

import builtins
import datetime
import faulthandler
import io
import json
import linecache
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

import cloudpickle

from accumviz import arguments
from accumviz.ledger.file import LedgerFileError
from accumviz.ledger.ledger import Ledger, load
from accumviz.recorder.callsite import readable

# Seconds until the other ranks are ended once one has failed, and for them to say where they are.
_GRACE = 1.0
# Forking copies what is imported already; elsewhere than on Linux that is not safe.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
# What takes long to import, once for all ranks; DDP imports the compiler.
_HEAVY = [
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
    "accumviz.recorder.recording",
    "accumviz.book.distribute",
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
        held = []
        for i, ledger in enumerate(self.ledgers):
            events = "nothing recorded" if ledger is None else f"{len(ledger)} events"
            held.append(f"rank {i}: {events}")
        return f"World of {len(held)} ranks: {', '.join(held)}"


class RankError(RuntimeError):
    """A rank raised, died or did not end in time: which one, where, and what all ranks left behind.

    `rank` is the first to fail, `traceback` where it was, `world` what the ranks recorded and
    returned until then.
    """

    def __init__(self, message: str, rank: int, traceback: str, world: World) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.world = world


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
    call = _pack(function, kwargs)
    folder = tempfile.TemporaryDirectory(prefix="accumviz-", ignore_cleanup_errors=True)
    with folder as name:
        return _launch(Path(name), call, ranks, timeout)


def _launch(folder: Path, call: bytes, ranks: int, timeout: float) -> World:
    """Start the ranks, wait for them, end those that are late, and read what they left in the folder."""
    (folder / "call").write_bytes(call)
    context: Any = get_context(_METHOD)
    if _METHOD == "forkserver":
        context.set_forkserver_preload(_HEAVY)
    # Each rank ends when the writing end is closed, as it is when this process dies, too.
    until_closed, writing_end = context.Pipe(duplex=False)
    env = _environment(ranks)
    processes = []
    try:
        for rank in range(ranks):
            job = folder / f"rank{rank}", env, timeout, until_closed
            process = context.Process(target=_run, args=(rank, *job), daemon=True)
            with _nothing_in_main():
                process.start()
            processes.append(process)
        _wait(processes, timeout)
        late = _running(processes)
        writing_end.close()
        until = time.monotonic() + 3 * _GRACE
        for process in late:
            process.join(max(until - time.monotonic(), 0))
    finally:
        _end(processes)
    outcomes = []
    for rank, process in enumerate(processes):
        outcomes.append(_outcome(folder, rank, process, process in late))
    return _world(folder, outcomes, timeout)


def _environment(ranks: int) -> dict[str, str]:
    """Return the variables that all ranks share; torchrun sets the same."""
    import torch

    env = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    if torch.cuda.device_count() < ranks:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


@contextmanager
def _nothing_in_main() -> Iterator[None]:
    """Keep a process that starts from importing the user's script again: the function is sent instead."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _running(processes: list[BaseProcess]) -> list[BaseProcess]:
    return [process for process in processes if process.exitcode is None]


def _wait(processes: list[BaseProcess], timeout: float) -> None:
    """Wait until all ranks have ended, time is up, or one has failed and the others had time to notice."""
    until = time.monotonic() + timeout
    failed = False
    while running := _running(processes):
        if not failed and any(process.exitcode for process in processes):
            failed = True
            until = min(until, time.monotonic() + _GRACE)
        left = until - time.monotonic()
        if left <= 0:
            return
        connection.wait([process.sentinel for process in running], left)


def _end(processes: list[BaseProcess]) -> None:
    """End all ranks, and what they have started: each leads a group of processes."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


# --- what the ranks left behind -----------------------------------------------------------------


class _Outcome(NamedTuple):
    """How one rank ended; `order` is smaller the more likely it is the cause of the others' failures."""

    rank: int
    value: Any = None
    failure: str = ""
    trace: str = ""
    order: float = 0.0


def _outcome(folder: Path, rank: int, process: BaseProcess, is_late: bool) -> _Outcome:
    result = folder / f"rank{rank}.result"
    if result.exists():
        return _Outcome(rank, *pickle.loads(result.read_bytes()))  # noqa: S301 - our process wrote it
    if is_late:
        stack = _text(folder / f"rank{rank}.stack")
        return _Outcome(rank, None, "had not ended", stack, math.inf)
    code = process.exitcode or 0
    failure = f"ended with exit code {code} and returned nothing"
    if code < 0:
        failure = f"died, killed by {signal.Signals(-code).name}"
    return _Outcome(rank, None, failure, _text(folder / f"rank{rank}.log")[-4000:])


def _world(folder: Path, outcomes: list[_Outcome], timeout: float) -> World:
    """Print what the ranks printed, and return what they recorded; raise `RankError` where one failed."""
    for stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
        for one in outcomes:
            printed = _text(folder / f"rank{one.rank}.{suffix}")
            for line in printed.splitlines():
                print(f"rank {one.rank}: {line}", file=stream)
    ledgers = tuple(_last_ledger(folder, one.rank) for one in outcomes)
    world = World(ledgers, tuple(one.value for one in outcomes))
    failed = [one for one in outcomes if one.failure]
    if not failed:
        return world
    failed.sort(key=lambda one: one.order)
    first = failed[0]
    raise RankError(_message(failed, ledgers, timeout), first.rank, first.trace, world)


def _message(
    failed: list[_Outcome], ledgers: tuple[Ledger | None, ...], timeout: float
) -> str:
    first, *others = failed
    after = f" after {timeout:g} seconds" if math.isinf(first.order) else ""
    lines = [f"rank {first.rank} {first.failure}{after}", first.trace.rstrip()]
    for other in others:
        lines.append(f"rank {other.rank} {other.failure.splitlines()[0]}")
        if math.isinf(other.order):
            lines.append(other.trace.rstrip())
    kept = [str(i) for i, ledger in enumerate(ledgers) if ledger is not None]
    if kept:
        lines.append(
            f"The ledgers of these ranks are kept in error.world.ledgers: {', '.join(kept)}"
        )
    return "\n".join(filter(None, lines))


def _last_ledger(folder: Path, rank: int) -> Ledger | None:
    for line in reversed(_text(folder / f"rank{rank}.ledgers").splitlines()):
        with suppress(LedgerFileError):
            return load(json.loads(line), repair=True)
    return None


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# --- in the process of a rank -------------------------------------------------------------------


def _run(
    rank: int,
    base: Path,
    env: dict[str, str],
    timeout: float,
    until_closed: Connection,
) -> None:
    """Run the function, write down its value or what it raised, and end this process."""
    with suppress(OSError):
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    _redirect(base)
    threading.Thread(target=_watch, args=(base, until_closed), daemon=True).start()
    code = 0
    try:
        packed = cloudpickle.dumps((_call(rank, base, timeout),))
    except BaseException as error:
        code = 1
        moment = time.monotonic()
        lines = traceback.format_exception(type(error), error, _below(error))
        failure = f"raised {type(error).__name__}: {error}"
        packed = pickle.dumps((None, failure, "".join(lines), moment))
    _write(base.with_suffix(".result"), packed)
    _flush()
    os._exit(code)  # taking torch apart would take seconds


def _call(rank: int, base: Path, timeout: float) -> Any:
    import torch
    import torch.distributed as dist

    from accumviz.recorder import recording

    recording.locate = partial(_locate, base)
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
    # What a notebook defines belongs to `__main__`, here as there.
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"])["__builtins__"] = builtins
    function, kwargs = _unpack(base.with_name("call").read_bytes())
    ranks = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(base.with_name("store")), ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=max(timeout, 1.0)),
    )
    # A rank that is done early would hang up on those that still connect.
    store.set(f"ready {rank}", "")
    store.wait([f"ready {i}" for i in range(ranks)])
    value = function(**kwargs)
    dist.destroy_process_group()
    return value


def _locate(base: Path, path: Path | None) -> Path:
    """Give every recording of this rank a file, and list it for the process that waits."""
    from accumviz.recorder.distributed import own_path

    file = own_path(path) if path else Path(f"{base}.{time.monotonic_ns()}.ledger")
    with base.with_suffix(".ledgers").open("a") as listed:
        listed.write(json.dumps(str(file.absolute())) + "\n")
    return file


def _below(error: BaseException) -> TracebackType | None:
    """Return the error's traceback from the user's function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace or error.__traceback__


def _redirect(base: Path) -> None:
    """Send what Python prints to files, and what torch's C++ says, or a crash, to a log."""
    log = base.with_suffix(".log").open("ab")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = base.with_suffix(".out").open("w", buffering=1)
    sys.stderr = base.with_suffix(".err").open("w", buffering=1)
    faulthandler.enable(2)


def _watch(base: Path, until_closed: Connection) -> None:
    """End this rank, saying where it is, when it is asked to or the process that started it is gone."""
    with suppress(EOFError, OSError):
        until_closed.recv()
    if not base.with_suffix(".result").exists():
        main = threading.main_thread().ident or 0
        calls = traceback.extract_stack(sys._current_frames().get(main))
        names = [call.name for call in calls]
        first = names.index("_call") + 1 if "_call" in names else 0
        text = "".join(traceback.format_list(calls[first:]))
        stack = f"Traceback (most recent call last):\n{text}"
        with suppress(OSError):
            _write(base.with_suffix(".stack"), stack.encode())
        _flush()
    os._exit(1)


def _flush() -> None:
    from accumviz.recorder import patches

    for recording in patches.listening:
        with suppress(Exception):
            recording.write_out()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def _pack(function: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
    """Write a function and its arguments down for another process of the same Python.

    Functions and classes that an import finds go by their name. Others, those of a notebook or
    a script, go with their code, and with the imports, functions, classes and values that the
    code names. Raises `TypeError` for a value that cannot be copied.
    """
    cells: dict[str, str] = {}
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, cells).dump((function, kwargs))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"cannot send {name!r} to other processes: {error}. Everything it uses from outside must be an import, "
            "a function, a class or a value that pickle copies; make the rest inside the function"
        ) from error
    return pickle.dumps((sys.path, str(Path.cwd()), cells, buffer.getvalue()))


def _unpack(data: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Read what `_pack` wrote; what its notebook or script defined is then in this process's `__main__`."""
    path, folder, cells, call = pickle.loads(data)  # noqa: S301 - the process that started this one wrote it
    sys.path[:] = path
    os.chdir(folder)
    for name, text in cells.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function, kwargs = pickle.loads(call)  # noqa: S301 - the process that started this one wrote it
    names = getattr(function, "__globals__", {})
    # Where pickle, as in all_gather_object, looks for a class.
    if names.get("__name__") == "__main__":
        vars(sys.modules["__main__"]).update(names)
    return function, kwargs


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Gives code the file name that a person would, and keeps the text of its notebook cell."""

    def __init__(self, buffer: io.BytesIO, cells: dict[str, str]) -> None:
        super().__init__(buffer)
        self._cells = cells

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, CodeType):
            return super().reducer_override(value)
        name = readable(value.co_filename)
        text = "".join(linecache.getlines(value.co_filename))
        if text:
            self._cells[name] = text
        return self.dispatch_table[CodeType](value.replace(co_filename=name))
