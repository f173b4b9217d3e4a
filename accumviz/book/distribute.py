"""Start real torch.distributed processes from a notebook cell, and collect what they record."""

from __future__ import annotations

import builtins
import datetime
import faulthandler
import io
import json
import linecache
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
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import cloudpickle

from accumviz import arguments
from accumviz.ledger.container import LedgerFileError
from accumviz.ledger.ledger import Ledger, load
from accumviz.recorder.callsite import readable

# Seconds until the other ranks are ended once one has failed, and for them to say where they are.
_GRACE = 1.0
# Forking copies what is imported already; elsewhere than on Linux that is not safe.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
# Seconds between two looks whether this rank is to end.
_POLL = 0.02
# What takes long to import, once for all ranks; DDP imports the compiler.
_HEAVY = [
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
    "accumviz.recorder.record",
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
    call = _pack(function, kwargs)
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
        settings = _Settings(str(folder), i, ranks, timeout, gpu, env)
        made.append(context.Process(target=_run, args=(settings,), daemon=True))
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


# --- in the process of a rank -------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """What a rank is told: where it writes, which it is of how many, and the variables that it sees."""

    folder: str
    rank: int
    ranks: int
    timeout: float
    gpu: bool
    env: dict[str, str]


def _run(settings: _Settings) -> None:
    """Run the function, write down its value or what it raised, and end this process."""
    folder = Path(settings.folder)
    base = folder / f"rank{settings.rank}"
    with suppress(OSError):
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(settings.env)
    _redirect(base)
    threading.Thread(target=_watch, args=(base,), daemon=True).start()
    code = 0
    try:
        packed = cloudpickle.dumps((_call(folder, settings), "", "", 0.0))
    except BaseException as error:
        code, moment = 1, time.monotonic()
        lines = traceback.format_exception(type(error), error, _below(error))
        said = f"raised {type(error).__name__}: {error}"
        packed = pickle.dumps((None, said, "".join(lines), moment))
    _write(base.with_suffix(".result"), packed)
    _flush()
    os._exit(code)  # taking torch apart would take seconds


def _call(folder: Path, settings: _Settings) -> Any:
    import torch
    import torch.distributed as dist

    from accumviz.recorder import recording

    recording.locate = partial(_locate, folder, settings.rank)
    torch.set_num_threads(1)
    if settings.gpu:
        torch.cuda.set_device(settings.rank)
    # What a notebook defines belongs to `__main__`, here as there.
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"])["__builtins__"] = builtins
    function, kwargs = _unpack((folder / "call").read_bytes())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if settings.gpu else "gloo",
        store=dist.FileStore(str(folder / "store"), settings.ranks),  # type: ignore[attr-defined]
        rank=settings.rank,
        world_size=settings.ranks,
        timeout=datetime.timedelta(seconds=max(settings.timeout, 1.0)),
    )
    # A rank that is done early would hang up on those that still connect.
    (folder / f"rank{settings.rank}.ready").touch()
    while len(list(folder.glob("rank*.ready"))) < settings.ranks:
        time.sleep(0.001)
    value = function(**kwargs)
    dist.destroy_process_group()
    return value


def _locate(folder: Path, rank: int, path: Path | None) -> Path:
    """Give every recording of this rank a file, and list it for the process that waits."""
    from accumviz.recorder.distributed import own_path

    own = (
        own_path(path) if path else folder / f"rank{rank}.{time.monotonic_ns()}.ledger"
    )
    with (folder / f"rank{rank}.ledgers").open("a") as listed:
        listed.write(json.dumps(str(own.absolute())) + "\n")
    return own


def _below(error: BaseException) -> TracebackType | None:
    """Return the error's traceback from the user's function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace or error.__traceback__


def _redirect(base: Path) -> None:
    """Send what Python prints to files, and what torch's C++ says, or a crash, to a log."""
    log = os.open(f"{base}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = Path(f"{base}.out").open("w", buffering=1)  # noqa: SIM115 - open as long as the process
    sys.stderr = Path(f"{base}.err").open("w", buffering=1)  # noqa: SIM115 - open as long as the process
    faulthandler.enable(log)


def _watch(base: Path) -> None:
    """End this rank when it is asked to, saying where it is, or when the process that started it is gone."""
    parent, main = parent_process(), threading.main_thread().ident or 0
    while True:
        time.sleep(_POLL)
        if parent is not None and not parent.is_alive():
            os._exit(1)
        if (base.parent / "stop").exists() and not base.with_suffix(".result").exists():
            calls = traceback.extract_stack(sys._current_frames().get(main))
            mine = next((i for i, call in enumerate(calls) if call.name == "_call"), -1)
            text = "".join(traceback.format_list(calls[mine + 1 :]))
            stack = f"Traceback (most recent call last):\n{text}"
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
