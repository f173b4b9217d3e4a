"""Run a script or a module as `python` would, and record its training.

Nothing here imports torch: what a script sets before its own `import torch` (threads, devices) has to count.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What `finish` is called with: the recordings, what was not recorded, and how the script ended.
Finish = Callable[[list[Any], list[str], str], int]


class CannotRunError(Exception):
    """There is no such script or module."""


class Script:
    """What `python` was to run: a script, or a module (`-m`).

    Raises `CannotRunError` where there is none.
    """

    def __init__(
        self, name: str, arguments: list[str], *, module: bool = False
    ) -> None:
        self.name, self.arguments, self.module = name, arguments, module
        self._text = b""
        # As Python itself has it in tracebacks: absolute, with what `..` it was given.
        self.path = name if os.path.isabs(name) else f"{Path.cwd()}{os.sep}{name}"
        if module:
            return
        try:
            with io.open_code(self.path) as file:
                self._text = file.read()
        except OSError as error:
            said = f"[Errno {error.errno}] {error.strerror}"
            raise CannotRunError(f"can't open file {self.path!r}: {said}") from None

    def run(self) -> None:
        """Run it as `__main__`; whatever it raises comes out."""
        sys.argv[:] = [self.name, *self.arguments]
        self._put_on_path()
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        if self.module:
            code = self._find(main)
        else:
            main.__file__ = self.path
            main.__dict__["__cached__"] = None
            main.__loader__ = importlib.machinery.SourceFileLoader(
                "__main__", self.path
            )
            # Ours is compiled with `annotations` from the future, which is no affair of the script's.
            code = compile(self._text, self.path, "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102 - the user asked for it

    def _put_on_path(self) -> None:
        if sys.flags.safe_path:
            return
        if self.module:
            sys.path[0] = str(Path.cwd())
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(self.path))

    def _find(self, main: types.ModuleType) -> types.CodeType:
        """Return a module's code, and give `__main__` its attributes."""
        find: Any = getattr(runpy, "_get_module_details")  # noqa: B009 - there is no public way to what `-m` runs
        _, spec, code = find(self.name, CannotRunError)
        sys.argv[0] = code.co_filename
        main.__file__, main.__spec__ = code.co_filename, spec
        main.__loader__, main.__package__ = spec.loader, spec.parent
        main.__dict__["__cached__"] = spec.cached
        return code  # type: ignore[no-any-return]


class _OnImport:
    """Calls a function once, when `torch` has been imported: a finder that is asked first and finds nothing itself."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
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


def run(script: Script, path: Path | None, finish: Finish, *, exact: int = 64) -> None:
    """Run the script; its exceptions, its exit code and its signals are those it has without us.

    `path` is where ledgers go. `finish` gets the recordings (closed), what was not recorded, and how the script
    ended, and answers with the exit code that a script which ended well shall have instead. `exact` is as `record`
    has it.
    """
    session = _Session(path, finish, exact)
    if (
        "torch" in sys.modules
    ):  # by what Python itself runs as it begins, such as a `sitecustomize`
        session.begin()
    else:
        sys.meta_path.insert(0, _OnImport(session.begin))
    try:
        script.run()
    except SystemExit as error:
        code = session.end_with_threads(error)
        if code and error.code in (None, 0, False):
            raise SystemExit(code) from None
        raise
    except CannotRunError:
        raise
    except BaseException:
        _end_after_traceback(session)
        raise
    else:
        code = session.end_with_threads(None)
        if code:
            raise SystemExit(code)


class _Session:
    """What is recorded of a script, from the import of torch to its end; it never raises."""

    def __init__(self, path: Path | None, finish: Finish, exact: int) -> None:
        self._path, self._finish, self._exact = path, finish, exact
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
            return self._finish(self.recordings, self.notes, ended)
        except BaseException as failure:
            said = f"{type(failure).__name__}: {failure}"
            print(f"accumviz: the report could not be made: {said}", file=sys.stderr)
            return 0

    def end_with_threads(self, error: BaseException | None) -> int:
        """End now; or, where threads still train, once they are done: then only the process can get a code."""
        here = threading.current_thread()
        others = (t for t in threading.enumerate() if t is not here and not t.daemon)
        if next(others, None) is None:
            return self.end(error)

        def late() -> None:
            code = self.end(error)
            if code and getattr(error, "code", None) in (None, 0, False):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

        atexit.register(late)
        return 0


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

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
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
    # By its names and not by its name: a console script, which called us, is a `__main__`, too.
    script = vars(sys.modules["__main__"])
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not script:
        trace = trace.tb_next
    error.__traceback__ = trace
    while trace is not None:
        while trace.tb_next is not None and _is_ours(trace.tb_next):
            trace.tb_next = trace.tb_next.tb_next
        trace = trace.tb_next


def _is_ours(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)
