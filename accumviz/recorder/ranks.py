"""What runs in other processes: the launcher, which imports torch once, and the ranks that it starts."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from pathlib import Path
from typing import Any

_POLL = 0.02
# Fork copies what is imported already; where it is not safe, each rank imports for itself.
_FORK = sys.platform == "linux"
_START = "from accumviz.recorder.ranks import serve; serve()"
_RANK = "import sys; from accumviz.recorder.ranks import begin; begin(sys.argv[1], int(sys.argv[2]))"
# The open recordings of this rank, to be written out before it is stopped, and their files' folder.
_recordings: weakref.WeakSet[Any] = weakref.WeakSet()
_folder: Path | None = None


def where() -> tuple[int, int] | None:
    """This process's rank and how many there are; None when it is no rank of anything."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def ledger_path(path: str | Path | None) -> str | Path | None:
    """Where this process writes its ledger: each rank to a file of its own."""
    here = where()
    if here is None:
        return path
    if path is not None:
        path = Path(path)
        path = path.with_name(f"{path.stem}.rank{here[0]}{path.suffix}")
    if _folder is None:
        return path
    listed = _folder / f"rank{here[0]}.ledgers"
    if path is None:
        path = _folder / f"rank{here[0]}.{time.monotonic_ns()}.ledger"
    with listed.open("a") as file:
        file.write(json.dumps(str(path.absolute())) + "\n")
    return path


def opened(recording: Any) -> None:
    """Remember a recording, to write it out when this rank is stopped."""
    if _folder is not None:
        _recordings.add(recording)


# --- the launcher ----------------------------------------------------------------------------------


def serve() -> None:
    """Start ranks when asked to, say how each ended, and end with the process that asks."""
    # DDP imports the compiler when it is made: a second for each rank, or once here.
    for module in (
        ("torch.distributed", "torch._dynamo", "accumviz.recorder.record")
        if _FORK
        else ()
    ):
        importlib.import_module(module)
    children: dict[int, tuple[int, Path]] = {}
    waiting = b""
    while True:
        if select.select([0], [], [], _POLL if children else None)[0]:
            got = os.read(0, 1 << 16)
            if not got:
                break
            *lines, waiting = (waiting + got).split(b"\n")
            for line in lines:
                children |= _start(json.loads(line))
        _reap(children)
    _kill(children)
    while children:
        _reap(children)
        time.sleep(_POLL)
    os._exit(0)  # taking torch apart would take seconds


def _start(asked: dict[str, Any]) -> dict[int, tuple[int, Path]]:
    folder = Path(asked["folder"])
    for module in asked["modules"] if _FORK else ():
        importlib.import_module(module)
    children = {}
    for rank in range(asked["ranks"]):
        if _FORK:
            child = os.fork()
            if child == 0:
                begin(folder, rank)
        else:
            command = [sys.executable, "-c", _RANK, str(folder), str(rank)]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL).pid  # noqa: S603 - ourselves
        children[child] = rank, folder
    (folder / "started").touch()
    return children


def _reap(children: dict[int, tuple[int, Path]]) -> None:
    for child, (rank, folder) in list(children.items()):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            del children[child]
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # what the rank itself had started
                os.killpg(child, signal.SIGKILL)
            _write(
                folder / f"rank{rank}.exit",
                f"{os.waitstatus_to_exitcode(status)} {time.monotonic()}".encode(),
            )


def _kill(children: dict[int, tuple[int, Path]]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def _write(path: Path, data: bytes) -> None:
    """Appear whole or not at all."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(data)
    part.replace(path)


# --- a rank ----------------------------------------------------------------------------------------


def begin(folder: str | Path, rank: int) -> None:
    """Be one rank: run the function, write down what became of it, and end the process."""
    global _folder  # noqa: PLW0603 - a process is one rank, once
    _folder = Path(folder)
    asked = json.loads((_folder / "asked.json").read_text())
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _redirect(_folder / f"rank{rank}")
    os.chdir(asked["cwd"])
    os.environ |= asked["env"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    threading.Thread(
        target=_watch, args=(_folder, rank, os.getppid()), daemon=True
    ).start()
    code = 0
    try:
        import cloudpickle

        outcome: tuple[Any, ...] = ("returned", _run(_folder, rank, asked))
        packed = cloudpickle.dumps(outcome)
    except BaseException as error:
        code = 1
        text = "".join(traceback.format_exception(type(error), error, _below(error)))
        packed = pickle.dumps(
            ("raised", f"{type(error).__name__}: {error}", text, time.monotonic())
        )
    _write(_folder / f"rank{rank}.result", packed)
    _flush()
    os._exit(code)


def _run(folder: Path, rank: int, asked: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    from accumviz.recorder.pickling import unpack

    torch.set_num_threads(1)
    gpu = asked["gpu"]
    if gpu:
        torch.cuda.set_device(rank)
    # What a notebook defines belongs to `__main__`, here as there.
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"])["__builtins__"] = builtins
    function, kwargs = unpack((folder / "parcel").read_bytes())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=dist.FileStore(str(folder / "store"), asked["ranks"]),  # type: ignore[attr-defined]
        rank=rank,
        world_size=asked["ranks"],
        timeout=datetime.timedelta(seconds=max(asked["timeout"], 1.0)),
    )
    # Who is done early would hang up on those that still connect.
    (folder / f"rank{rank}.ready").touch()
    while not all(
        (folder / f"rank{other}.ready").exists() for other in range(asked["ranks"])
    ):
        time.sleep(0.001)
    value = function(**kwargs)
    dist.destroy_process_group()
    return value


def _below(error: BaseException) -> types.TracebackType | None:
    """The error's traceback from the user's function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace or error.__traceback__


def _redirect(base: Path) -> None:
    """What Python prints goes to files of its own; what torch's C++ says, or a crash, to a log."""
    log = os.open(f"{base}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = Path(f"{base}.out").open("w", buffering=1)  # noqa: SIM115 - open as long as the process
    sys.stderr = Path(f"{base}.err").open("w", buffering=1)  # noqa: SIM115 - as above
    faulthandler.enable(log)


def _flush() -> None:
    for recording in list(_recordings):
        with contextlib.suppress(Exception):
            recording.write_out()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _watch(folder: Path, rank: int, parent: int) -> None:
    """End this rank when it is told to, saying where it was, or when nobody waits for it any more."""
    main = threading.main_thread().ident
    while True:
        time.sleep(_POLL)
        if os.getppid() != parent:
            os._exit(1)
        if (folder / "stop").exists() and not (folder / f"rank{rank}.result").exists():
            frame = sys._current_frames().get(main or 0)
            calls = traceback.extract_stack(frame) if frame is not None else []
            shown = [
                call for call in calls if call.filename not in (__file__, "<string>")
            ]
            text = "Traceback (most recent call last):\n" + "".join(
                traceback.format_list(shown)
            )
            _write(folder / f"rank{rank}.stack", text.encode())
            _flush()
            os._exit(1)
