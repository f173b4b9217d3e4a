"""Run one process of `distribute`, and write down what it returned or raised."""

from __future__ import annotations

import builtins
import datetime
import faulthandler
import io
import json
import linecache
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import cloudpickle

from accumviz.recorder.callsite import readable

_POLL = 0.02


@dataclass(frozen=True)
class Settings:
    """What a rank is told: where it writes, which it is of how many, and the variables that it sees."""

    folder: str
    rank: int
    ranks: int
    timeout: float
    gpu: bool
    env: dict[str, str]


def run(settings: Settings) -> None:
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


def _call(folder: Path, settings: Settings) -> Any:
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
    function, kwargs = unpack((folder / "call").read_bytes())
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


def pack(function: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
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


def unpack(data: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Read what `pack` wrote; what its notebook or script defined is then in this process's `__main__`."""
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
