"""Run a script or a module as `python` would, and record its training.

Nothing here imports torch: what a script sets before its own `import torch` (threads, devices) has to count.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import runpy
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accumviz.arguments import describe

_OURS = str(Path(__file__).parents[1]) + os.sep
_RUNPY = runpy.run_module.__code__.co_filename
_NOTHING = (
    "nothing was recorded: no model or optimizer was seen training in this process"
)
_CHILDREN = (
    "processes that this one started were not recorded (only those of `torch.multiprocessing.spawn` are); start each "
    "under accumviz, as in "
    "`torchrun --nproc-per-node 2 -m accumviz run train.py` or `accelerate launch -m accumviz run train.py`, "
    "or call `accumviz.record` where they train"
)
# A child that only asked git or the compiler something has used less processor time.
_TRAINING_S = 0.05
# What `finish` is called with: the recordings, what was not recorded, and the files of children.
Finish = Callable[[list[Any], list[str], list[Path]], int]


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

    `path` is where ledgers go. `finish` gets the recordings (closed), what was not recorded, and the ledgers that
    children wrote, and answers with the exit code that a script which ended well shall have instead. `exact` is as
    `record` has it, and `unreported` the exit code where no report could be made.
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


class _Child:
    """What a process runs that `torch.multiprocessing.spawn` starts: its function, recorded into files of its own."""

    def __init__(
        self, function: Any, path: Path | None, exact: int, diary: Path
    ) -> None:
        self._function = function
        self._path = path
        self._exact = exact
        self._diary = diary

    def __call__(self, *args: Any) -> Any:
        session = _Session(self._path, self._tell, self._exact, 0)
        session.begin()
        error: BaseException | None = None
        try:
            return self._function(*args)
        except BaseException as raised:
            error = raised
            raise
        finally:
            session.end(error)

    def _tell(self, recordings: list[Any], notes: list[str], files: list[Path]) -> int:
        own = [each.file for each in recordings if each.is_on_disk()]
        # It may have started children itself.
        written = list(map(str, own + files))
        with self._diary.open("a", encoding="utf-8") as diary:
            diary.write(json.dumps([written, notes]) + "\n")
        return 0


class _Session:
    """What is recorded of a script, from the import of torch to its end; it never raises."""

    def __init__(
        self,
        path: Path | None,
        finish: Finish,
        exact: int,
        unreported: int,
    ) -> None:
        self._path = path
        self._finish = finish
        self._exact = exact
        self._unreported = unreported
        self._process = os.getpid()
        self._over = False
        self._detector: Any = None
        self.recordings: list[Any] = []
        self.notes: list[str] = []
        # Where children say what they have recorded.
        self._diary: Path | None = None

    def begin(self) -> None:
        try:
            from accumviz.recorder.detection import Detector

            self._follow_children()

            self._detector = Detector(
                self._path, self.recordings, self.notes, exact=self._exact
            )
        except Exception as failure:
            said = f"nothing was recorded: {type(failure).__name__}: {failure}"
            self.notes.append(said)
            # At once, too: the training may take hours.
            print(f"accumviz: {said}", file=sys.stderr)

    def _follow_children(self) -> None:
        """Have processes record that are started from now on by `torch.multiprocessing.spawn`."""
        places: list[Any] = [sys.modules["torch.multiprocessing.spawn"]]
        places.append(sys.modules["torch.multiprocessing"])
        original = places[0].start_processes

        @functools.wraps(original)
        def start_processes(fn: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                fn = self._recorded(fn)
            return original(fn, *args, **kwargs)

        for place in places:
            place.start_processes = start_processes

    def _recorded(self, function: Any) -> _Child:
        """Return a function that records what this one trains."""
        if self._diary is None:
            handle, name = tempfile.mkstemp(".jsonl", "accumviz-")
            os.close(handle)
            self._diary = Path(name)
        return _Child(function, self._path, self._exact, self._diary)

    def _of_children(self) -> list[Path]:
        """Return the files that children have written, and note what they did not record."""
        if self._diary is None:
            return []
        files: list[str] = []
        for line in self._diary.read_text("utf-8").splitlines():
            written, notes = json.loads(line)
            files += written
            self.notes += notes
        self._diary.unlink()
        return sorted(map(Path, files))

    def end(self, error: BaseException | None) -> int:
        """Close what is open, and report; the exit code for a script that ended well."""
        if self._over or os.getpid() != self._process:
            return 0
        self._over = True
        try:
            if self._detector is not None:
                self._detector.close(_ended_by(error))
            files = self._of_children()
            if not (self.recordings or files):
                self._note_nothing()
            return self._finish(self.recordings, self.notes, files)
        except BaseException as failure:
            said = f"{type(failure).__name__}: {failure}"
            print(f"accumviz: the report could not be made: {said}", file=sys.stderr)
            return self._unreported

    def _note_nothing(self) -> None:
        """Say why nothing was recorded, as far as that was not said."""
        if self._detector is not None and not self.notes:
            self.notes.append(_NOTHING)
        times = os.times()
        if times.children_user + times.children_system > _TRAINING_S:
            self.notes.append(_CHILDREN)


def _ended_by(error: BaseException | None) -> str:
    """Return how a script ended, for its ledger: "exit", or what it raised."""
    if error is None:
        return "exit"
    if isinstance(error, SystemExit) and error.code in (None, 0, False):
        return "exit"
    return describe(error)


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
    _strip_ours(trace)


def _strip_ours(trace: types.TracebackType | None) -> None:
    while trace is not None:
        while trace.tb_next is not None and _file(trace.tb_next).startswith(_OURS):
            trace.tb_next = trace.tb_next.tb_next
        trace = trace.tb_next


def _file(trace: types.TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
