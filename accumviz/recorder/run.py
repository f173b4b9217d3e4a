"""Run a script or a module as `python` would, and record its training.

Nothing here imports torch: what a script sets before its own `import torch` (threads, devices) has to count.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parents[1]) + os.sep
_RUNPY = runpy.run_module.__code__.co_filename
_CHILDREN = (
    "processes that this one started were not recorded; start each under accumviz, as in "
    "`torchrun --nproc-per-node 2 -m accumviz run train.py` or `accelerate launch -m accumviz run train.py`, "
    "or call `accumviz.record` where they train"
)
# A child that only asked git or the compiler something has used less processor time.
_TRAINING_S = 0.05
# What `finish` is called with: the recordings, what was not recorded, and how the script ended.
Finish = Callable[[list[Any], list[str], str], int]


class CannotRunError(Exception):
    """There is no such script."""


class Script:
    """What `python` was to run: a script, or a module (`-m`).

    Raises `CannotRunError` where a script cannot be read.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        module: bool = False,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.module = module
        self._text = b""
        # As Python itself has it in tracebacks: absolute, with what `..` it was given.
        self.path = name if os.path.isabs(name) else f"{Path.cwd()}{os.sep}{name}"
        if module:
            return
        try:
            self._text = Path(self.path).read_bytes()
        except OSError as error:
            said = f"[Errno {error.errno}] {error.strerror}"
            raise CannotRunError(f"can't open file {self.path!r}: {said}") from None

    def run(self) -> None:
        """Run it as `__main__`; whatever it raises comes out."""
        sys.argv[:] = [self.name, *self.arguments]
        place = os.path.dirname(os.path.realpath(self.path))
        if not sys.flags.safe_path:
            sys.path[0] = str(Path.cwd()) if self.module else place
        if self.module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = self.path
        # Ours is compiled with `annotations` from the future, which is no affair of the script's.
        code = compile(self._text, self.path, "exec", dont_inherit=True)
        exec(code, vars(main))  # noqa: S102 - the user asked for it


class _OnImport:
    """Calls a function once, when `torch` has been imported: a finder that is asked first and finds nothing itself."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self,
        name: str,
        path: Any = None,
        target: Any = None,
    ) -> Any:
        if name != "torch":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._then()

            loader.exec_module = exec_module
        return spec


def run(
    script: Script,
    path: Path | None,
    finish: Finish,
    *,
    exact: int = 64,
    unreported: int = 0,
) -> None:
    """Run the script; its exceptions, its exit code and its signals are those it has without us.

    `path` is where ledgers go. `finish` gets the recordings (closed), what was not recorded, and how the script
    ended, and answers with the exit code that a script which ended well shall have instead. `exact` is as `record`
    has it, and `unreported` the exit code where no report could be made.
    """
    session = _Session(path, finish, exact, unreported)
    if (
        "torch" in sys.modules
    ):  # by what Python itself runs as it begins, such as a `sitecustomize`
        session.begin()
    else:
        sys.meta_path.insert(0, _OnImport(session.begin))
    try:
        script.run()
    except SystemExit as error:
        code = session.end(error)
        if code and error.code in (None, 0, False):
            raise SystemExit(code) from None
        raise
    except BaseException:
        _end_after_traceback(session)
        raise
    else:
        code = session.end(None)
        if code:
            raise SystemExit(code)


class _Session:
    """What is recorded of a script, from the import of torch to its end; it never raises."""

    def __init__(
        self,
        path: Path | None,
        finish: Finish,
        exact: int,
        unreported: int,
    ) -> None:
        self._path, self._finish, self._exact = path, finish, exact
        self._unreported = unreported
        self._process, self._over = os.getpid(), False
        self._detector: Any = None
        self.recordings: list[Any] = []
        self.notes: list[str] = []

    def begin(self) -> None:
        try:
            from accumviz.recorder.detection import Detector

            self._detector = Detector(
                self._path, self.recordings, self.notes, exact=self._exact
            )
        except Exception as failure:
            said = f"nothing was recorded: {type(failure).__name__}: {failure}"
            self.notes.append(said)
            # At once, too: the training may take hours.
            print(f"accumviz: {said}", file=sys.stderr)

    def end(self, error: BaseException | None) -> int:
        """Close what is open, and report; the exit code for a script that ended well."""
        if self._over or os.getpid() != self._process:
            return 0
        self._over = True
        try:
            ended = _ended_by(error)
            if self._detector is not None:
                self._detector.close(ended)
            times = os.times()
            of_children = times.children_user + times.children_system
            if not self.recordings and of_children > _TRAINING_S:
                self.notes.append(_CHILDREN)
            return self._finish(self.recordings, self.notes, ended)
        except BaseException as failure:
            said = f"{type(failure).__name__}: {failure}"
            print(f"accumviz: the report could not be made: {said}", file=sys.stderr)
            return self._unreported


def _ended_by(error: BaseException | None) -> str:
    """Return how a script ended, for its ledger: "exit", or what it raised."""
    if error is None:
        return "exit"
    if isinstance(error, SystemExit) and error.code in (None, 0, False):
        return "exit"
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:
        return type(error).__name__


def _end_after_traceback(session: _Session) -> None:
    """Have the report stand below what Python says of the exception that is on its way out."""
    hook = sys.excepthook

    def show(
        kind: type[BaseException],
        error: BaseException,
        trace: Any,
    ) -> None:
        with contextlib.suppress(Exception):
            _strip(error)
        hook(kind, error, error.__traceback__)
        session.end(error)
        if kind is KeyboardInterrupt:
            # Python ends by the signal only what it read as a script itself.
            sys.excepthook = lambda *_: None
            ctypes.pythonapi.PyRun_SimpleString(b"raise KeyboardInterrupt")

    sys.excepthook = show


def _strip(error: BaseException) -> None:
    """Take what started the script, and our own frames, out of an exception's traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not Script.run.__code__:
        trace = trace.tb_next
    trace = trace and trace.tb_next
    while trace is not None and _file(trace) == _RUNPY:
        trace = trace.tb_next
    error.__traceback__ = trace
    while trace is not None:
        while trace.tb_next is not None and _file(trace.tb_next).startswith(_OURS):
            trace.tb_next = trace.tb_next.tb_next
        trace = trace.tb_next


def _file(trace: types.TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
