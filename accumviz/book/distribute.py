"""Real torch.distributed processes from a notebook cell, and what became of each."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accumviz import arguments
from accumviz.graph import load as files
from accumviz.ledger.ledger import Ledger
from accumviz.recorder import ranks as child
from accumviz.recorder.pickling import pack

_STARTING, _GRACE = 120.0, 1.0
_launcher: subprocess.Popen[bytes] | None = None
# The variables that it was started with.
_known: dict[str, str] = {}


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
        told = [
            "nothing recorded" if x is None else f"{len(x)} events"
            for x in self.ledgers
        ]
        return f"World of {len(told)} ranks: " + ", ".join(
            f"rank {r}: {what}" for r, what in enumerate(told)
        )


class RankError(RuntimeError):
    """A rank raised, died or did not end in time: which one, where, and what all ranks left behind.

    `rank` is the first to fail, `traceback` where it was, `world` what the ranks recorded and
    returned until then.
    """

    def __init__(self, message: str, rank: int, traceback: str, world: World) -> None:
        super().__init__(message)
        self.rank, self.traceback, self.world = rank, traceback, world


@dataclass
class _Fate:
    """How one rank ended."""

    what: str = ""  # "returned", "raised", "died", "unfinished"
    said: str = ""
    trace: str = ""
    time: float = field(default=float("inf"))
    value: Any = None


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
    except through what it returns. The process that starts the ranks stays, idle, for the next
    call, which then takes no time to start; it ends with this one.

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
    parcel = pack(function, kwargs)
    folder = Path(tempfile.mkdtemp(prefix="accumviz-"))
    try:
        fates = _fates(folder, parcel, ranks, timeout)
        return _world(folder, fates, timeout)
    finally:
        if not all(path.exists() for path in _exits(folder, ranks)):
            _end_launcher()  # and with it all ranks
        shutil.rmtree(folder, ignore_errors=True)


def _fates(folder: Path, parcel: bytes, ranks: int, timeout: float) -> list[_Fate]:
    (folder / "parcel").write_bytes(parcel)
    gpu = _gpus() >= ranks
    # What was set since the launcher began; the rest its children have anyway.
    known = _known if _launcher is not None and _launcher.poll() is None else os.environ
    env = {
        name: value for name, value in os.environ.items() if known.get(name) != value
    }
    env |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    env |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    env["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    heavy = (
        "torch.nn.parallel",
        "torch.distributed.fsdp",
        "torch.distributed.device_mesh",
    )
    asked = {
        "folder": str(folder),
        "ranks": ranks,
        "timeout": timeout,
        "gpu": gpu,
        "cwd": str(Path.cwd()),
        "env": env,
        "modules": [name for name in heavy if name in sys.modules],
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    launcher = _ask(asked)
    begun = time.monotonic()
    while not (folder / "started").exists():
        if launcher.poll() is not None or time.monotonic() > begun + _STARTING:
            raise RuntimeError(
                "the process that starts the ranks did not come up; "
                + _said(folder / "launcher.log")
            )
        time.sleep(0.005)
    begun, failing = time.monotonic(), 0.0
    while True:
        fates = [_fate(folder, rank) for rank in range(ranks)]
        if all(fate.what for fate in fates):
            return fates
        if launcher.poll() is not None:
            lost = _Fate(
                "died", "was ended together with the process that had started it"
            )
            return [fate if fate.what else lost for fate in fates]
        if not failing and any(fate.what not in ("", "returned") for fate in fates):
            failing = time.monotonic()
        if time.monotonic() > begun + timeout or (
            failing and time.monotonic() > failing + _GRACE
        ):
            return _stop(folder, fates)
        time.sleep(0.005)


def _exits(folder: Path, ranks: int) -> list[Path]:
    """The files that say of each rank that its process is gone."""
    return [folder / f"rank{rank}.exit" for rank in range(ranks)]


def _stop(folder: Path, fates: list[_Fate]) -> list[_Fate]:
    """Ask the ranks that still run where they are, and end them."""
    (folder / "stop").touch()
    begun = time.monotonic()
    exits = _exits(folder, len(fates))
    while (
        not all(path.exists() for path in exits)
        and time.monotonic() < begun + 3 * _GRACE
    ):
        time.sleep(0.01)
    result = []
    for rank, fate in enumerate(fates):
        stack = folder / f"rank{rank}.stack"
        trace = stack.read_text() if stack.exists() else ""
        result.append(
            fate if fate.what else _Fate("unfinished", "had not ended", trace)
        )
    return result


def _fate(folder: Path, rank: int) -> _Fate:
    result, ended = folder / f"rank{rank}.result", folder / f"rank{rank}.exit"
    if not ended.exists():
        return _Fate()
    if result.exists():
        what, *rest = pickle.loads(result.read_bytes())  # noqa: S301 - written by a process that we started
        if what == "returned":
            return _Fate(what, value=rest[0])
        said, trace, moment = rest
        return _Fate(what, f"raised {said}", trace, moment)
    code, moment = ended.read_text().split()
    log = _said(folder / f"rank{rank}.log")
    name = signal.Signals(-int(code)).name if int(code) < 0 else ""
    said = (
        f"died, killed by {name}"
        if name
        else f"ended with exit code {code} and returned nothing"
    )
    # Others notice a death before its parent does.
    return _Fate("died", said, log, float(moment) - 0.25)


def _world(folder: Path, fates: list[_Fate], timeout: float) -> World:
    ledgers = tuple(_ledger(folder, rank) for rank in range(len(fates)))
    world = World(ledgers, tuple(fate.value for fate in fates))
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        for rank in range(len(fates)):
            for line in _said(folder / f"rank{rank}.{name}", most=0).splitlines():
                print(f"rank {rank}: {line}", file=stream)
    failed = {rank: fate for rank, fate in enumerate(fates) if fate.what != "returned"}
    if not failed:
        return world
    order = sorted(failed, key=lambda rank: (failed[rank].time, rank))
    first = failed[order[0]]
    told = [f"rank {order[0]} {first.said}"]
    if first.what == "unfinished":
        told[0] += f" after {timeout:g} seconds"
    told += [first.trace.rstrip()] if first.trace else []
    for rank in order[1:]:
        fate = failed[rank]
        told.append(f"rank {rank} {fate.said.splitlines()[0]}")
        told += (
            [fate.trace.rstrip()] if fate.what == "unfinished" and fate.trace else []
        )
    kept = [str(rank) for rank, ledger in enumerate(ledgers) if ledger is not None]
    if kept:
        told.append(
            f"The ledgers of these ranks are kept in error.world.ledgers: {', '.join(kept)}"
        )
    raise RankError("\n".join(told), order[0], first.trace, world)


def _ledger(folder: Path, rank: int) -> Ledger | None:
    listed = folder / f"rank{rank}.ledgers"
    paths = (
        [json.loads(line) for line in listed.read_text().splitlines()]
        if listed.exists()
        else []
    )
    for path in reversed(paths):
        with contextlib.suppress(files.LedgerFileError):
            found = files.load(path, repair=True)
            assert isinstance(found, Ledger)
            return found
    return None


def _said(path: Path, most: int = 4000) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return text[-most:] if most else text


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _ask(asked: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Have the launcher start these ranks; start itself first if there is none, or it has died."""
    global _launcher, _known  # noqa: PLW0603 - one per process, kept for the next call
    line = json.dumps(asked).encode() + b"\n"
    for _ in range(2):
        if _launcher is None or _launcher.poll() is not None:
            log = (Path(asked["folder"]) / "launcher.log").open("wb")
            paths = os.pathsep.join(
                [str(Path(child.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            )
            threads = dict.fromkeys(
                ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
            )
            _launcher = subprocess.Popen(  # noqa: S603 - this very Python
                [sys.executable, "-c", child._START],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | threads | {"PYTHONPATH": paths.rstrip(os.pathsep)},
            )
            log.close()
            _known = dict(os.environ)
        assert _launcher.stdin is not None
        try:
            _launcher.stdin.write(line)
            _launcher.stdin.flush()
        except BrokenPipeError:
            _end_launcher()
        else:
            return _launcher
    raise RuntimeError("the process that starts the ranks ends as soon as it begins")


def _end_launcher() -> None:
    """End it and with it all that it started."""
    global _launcher
    launcher, _launcher = _launcher, None
    if launcher is None:
        return
    with contextlib.suppress(OSError):
        assert launcher.stdin is not None
        launcher.stdin.close()
    try:
        launcher.wait(5)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


atexit.register(_end_launcher)
