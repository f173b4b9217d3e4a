"""Runs a script or a module as `python` would, with somebody looking on from the moment it has imported torch.

Nothing here imports torch: what a script sets before its own `import torch` (threads, devices) has to count.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accumviz.recorder.progress import Progress

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class CannotRunError(Exception):
    """There is no such script or module."""


class Script:
    """What `python` was to run: a script, a folder or an archive with a `__main__`, or a module (`-m`).

    Raises `CannotRunError` where there is none.
    """

    def __init__(
        self, name: str, arguments: list[str], *, module: bool = False
    ) -> None:
        self.name, self.arguments, self.module = name, arguments, module
        self._spec: importlib.machinery.ModuleSpec | None = None
        self._text = b""
        # As Python itself has it in tracebacks: absolute, with what `..` it was given.
        self.path = name if os.path.isabs(name) else f"{Path.cwd()}{os.sep}{name}"
        # What has a `__main__` of its own: a folder, or an archive.
        self.folder = not module and (Path(name).is_dir() or zipfile.is_zipfile(name))
        if module or self.folder:
            return
        try:
            with io.open_code(self.path) as file:
                self._text = file.read()
        except OSError as error:
            raise CannotRunError(
                f"can't open file {self.path!r}: [Errno {error.errno}] {error.strerror}"
            ) from None

    def run(self) -> None:
        """Run it as `__main__`; whatever it raises comes out."""
        sys.argv[:] = [self.name, *self.arguments]
        if not sys.flags.safe_path:
            place = str(Path.cwd()) if self.module else os.path.realpath(self.path)
            sys.path[0] = (
                place if self.module or self.folder else os.path.dirname(place)
            )
        elif self.folder:
            sys.path.insert(0, os.path.realpath(self.path))
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        if self.module or self.folder:
            code = self._found("__main__" if self.folder else self.name, main)
        else:
            main.__file__ = self.path
            main.__dict__["__cached__"] = None
            main.__loader__ = importlib.machinery.SourceFileLoader(
                "__main__", self.path
            )
            # Ours is compiled with `annotations` from the future, which is no affair of the script's.
            code = compile(self._text, self.path, "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102 - the user asked for it

    def _found(self, name: str, main: types.ModuleType) -> types.CodeType:
        find: Any = getattr(runpy, "_get_module_details")  # noqa: B009 - there is no public way to what `-m` runs
        try:
            if name == "__main__":
                del sys.modules["__main__"]
            try:
                _, spec, code = find(name, CannotRunError)
            finally:
                sys.modules["__main__"] = main
        except CannotRunError as error:
            missing = f"can't find '__main__' module in {self.path!r}"
            raise CannotRunError(missing if self.folder else f"{error}") from None
        if self.module:
            sys.argv[0] = code.co_filename
        main.__file__, main.__spec__, main.__loader__ = (
            code.co_filename,
            spec,
            spec.loader,
        )
        main.__package__ = spec.parent
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
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._then()

        loader.exec_module = exec_module
        return spec


def run(
    script: Script,
    path: Path | None,
    finish: Callable[[list[Any], list[str], str], int],
    *,
    exact: int = 64,
    quiet: bool = False,
) -> None:
    """Run the script; its exceptions, its exit code and its signals are those it has without us.

    `path` is where ledgers go. `finish` gets the recordings (closed), what was not recorded, and how the script
    ended, and answers with the exit code that a script which ended well shall have instead. `exact` is as `record`
    has it, `quiet` shows no progress.
    """
    process, looking, done = os.getpid(), _Looking(path, exact), [False]
    progress = None if quiet else Progress(looking.told)

    def end(error: BaseException | None) -> int:
        if done[0] or os.getpid() != process:
            return 0
        done[0] = True
        if progress is not None:
            progress.close()
        try:
            ended = looking.close(error)
            return finish(looking.recordings, looking.notes, ended)
        except BaseException as failure:
            print(
                f"accumviz: the report could not be made: {type(failure).__name__}: {failure}",
                file=sys.stderr,
            )
            return 0

    _strip_in_threads()
    if (
        "torch" in sys.modules
    ):  # by what Python itself runs as it begins, such as a `sitecustomize`
        looking.begin()
    else:
        sys.meta_path.insert(0, _OnImport(looking.begin))
    try:
        script.run()
    except SystemExit as error:
        code = _after(end, error)
        if code and error.code in (None, 0, False):
            raise SystemExit(code) from None
        _strip(error)
        raise
    except CannotRunError:
        raise
    except BaseException:
        hook = sys.excepthook
        # What Python says of it is not ours to make room for.
        if progress is not None:
            progress.close()

        def told(kind: type[BaseException], value: BaseException, trace: Any) -> None:
            with contextlib.suppress(Exception):
                _strip(value)
            hook(kind, value, value.__traceback__)
            end(value)
            if kind is KeyboardInterrupt:
                _interrupted()

        sys.excepthook = told
        raise
    else:
        code = _after(end, None)
        if code:
            raise SystemExit(code)


def _after(
    end: Callable[[BaseException | None], int], error: BaseException | None
) -> int:
    """End now; or, where threads still train, once they are done: then only the process can be ended with a code."""
    here = threading.current_thread()
    if not any(
        thread is not here and not thread.daemon for thread in threading.enumerate()
    ):
        return end(error)
    import atexit

    def late() -> None:
        code = end(error)
        if code and getattr(error, "code", None) in (None, 0, False):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(late)
    return 0


def _interrupted() -> None:
    """Python ends by the signal only what it read as a script itself; of what a module ran it has to be told."""
    import ctypes

    sys.excepthook = lambda *_: None
    ctypes.pythonapi.PyRun_SimpleString(b"raise KeyboardInterrupt")


class _Looking:
    """What was recorded, from the import of torch on; it never raises."""

    def __init__(self, path: Path | None, exact: int) -> None:
        self._path, self._exact = path, exact
        self._process = os.getpid()
        self._watch: Any = None
        self.recordings: list[Any] = []
        self.notes: list[str] = []

    def begin(self) -> None:
        try:
            from accumviz.recorder.watch import Watch

            self._watch = Watch(
                self._path, self.recordings, self.notes, exact=self._exact
            )
        except Exception as failure:
            said = f"nothing was recorded: {type(failure).__name__}: {failure}"
            self.notes.append(said)
            # At once, too: the training may take hours.
            print(f"accumviz: {said}", file=sys.stderr)

    def told(self) -> str:
        """How far it is, in a line."""
        return f"accumviz: {self.recordings[-1].counted}" if self.recordings else ""

    def close(self, error: BaseException | None) -> str:
        ended = "exit"
        if error is not None and not (
            isinstance(error, SystemExit) and error.code in (None, 0, False)
        ):
            try:
                ended = f"{type(error).__name__}: {error}"[:500]
            except BaseException:
                ended = type(error).__name__
        if self._watch is not None:
            self._watch.close(ended)
        return ended


def _strip_in_threads() -> None:
    """Have what ends a thread shown without our frames, too."""
    hook = threading.excepthook

    def told(raised: Any) -> None:
        with contextlib.suppress(Exception):
            _strip(raised.exc_value, whole=True)
            shown = (
                raised.exc_type,
                raised.exc_value,
                raised.exc_value.__traceback__,
                raised.thread,
            )
            raised = threading.ExceptHookArgs(shown)
        hook(raised)

    threading.excepthook = told


def _strip(error: BaseException, *, whole: bool = False) -> None:
    """Take our own frames out of what it shows (and, unless it is `whole`, those that started us), and its causes."""
    seen: set[int] = set()
    # By its names and not by its name: a console script, which called us, is a `__main__`, too.
    script = vars(sys.modules["__main__"])
    todo: list[BaseException | None] = [error]
    while todo:
        at = todo.pop()
        if at is None or id(at) in seen:
            continue
        seen.add(id(at))
        todo += [
            at.__cause__,
            at.__context__,
            *(at.exceptions if isinstance(at, BaseExceptionGroup) else ()),
        ]
        frames = []
        trace = at.__traceback__
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        # What started the script stands before its first frame, and belongs to nobody.
        if at is error and not whole:
            while frames and (
                _ours(frames[0]) or frames[0].tb_frame.f_globals is not script
            ):
                del frames[0]
        rebuilt = None
        for f in reversed([f for f in frames if not _ours(f)]):
            rebuilt = types.TracebackType(rebuilt, f.tb_frame, f.tb_lasti, f.tb_lineno)
        at.__traceback__ = rebuilt


def _ours(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)
