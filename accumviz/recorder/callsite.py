"""Find the user's line that an event comes from, and keep the code around it."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import linecache
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_STANDARD = os.path.normcase(sysconfig.get_path("stdlib")) + os.sep
_INSTALLED = tuple(
    f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")
)
# Libraries that take backwards and steps, wherever they are installed: from a checkout, or beside the script.
_FRAMEWORKS = (
    "accelerate",
    "deepspeed",
    "fastai",
    "ignite",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "transformers",
    "trl",
)
_HERE = os.path.normcase(Path(__file__).parents[1]) + os.sep
_USER, _LIBRARY, _TORCH_OR_OURS = range(3)
_LONGEST = 80
# So many of the user's frames are kept, and so many of others' in a row are looked through for the next.
_FRAMES, _BETWEEN = 4, 16
# So many lines around one that is in no function are kept; and at most so many of a function.
_AROUND, _WHOLE = 3, 200


# Whose call something was; on the engine's thread there may be nobody.
Caller = FrameType | None


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code: file (as a person would name it), line, source text and the call's subject.

    `frames` are this line and those that it was called from, as JSON, `via` the library's line where it was
    called through one, and `function` is the first line of the function around it, 0 at the top level.
    """

    file: str = ""
    line: int = 0
    source: str = ""
    subject: str = ""
    path: str = ""
    frames: str = ""
    via: str = ""
    function: int = 0


class CallSites:
    """Find the user's line for the call being made now; each place is parsed once."""

    def __init__(self) -> None:
        # By the places on the stack, from the inside out: ids of code, and instructions.
        self._sites: dict[tuple[int, ...], CallSite] = {}
        # By the id of a piece of code, whose it is, and the code: it is held, so that no other gets its id.
        self._owners: dict[int, tuple[int, CodeType]] = {}

    def find(self, frame: Caller) -> CallSite:
        """Return the nearest line that belongs to the user, not to torch, accumviz or another library."""
        owners = self._owners
        places = list[int]()
        stack = list[tuple[FrameType, int]]()
        users = between = 0
        while frame is not None and between < _BETWEEN and users < _FRAMES:
            code = frame.f_code
            number = id(code)
            places.append(number)
            places.append(frame.f_lasti)
            owner = owners[number][0] if number in owners else self._owner(frame)
            stack.append((frame, owner))
            if owner == _USER:
                users += 1
                between = 0
                # Around a module's own code there is only what runs it.
                if code.co_name == "<module>":
                    break
            elif users:
                between += 1
            frame = frame.f_back
        way = tuple(places)
        if way not in self._sites:
            self._sites[way] = _site(stack)
        return self._sites[way]

    def owner(self, frame: Caller) -> Caller:
        """Return the frame that `find` would describe, for its variables."""
        while frame is not None and self._owner(frame) != _USER:
            frame = frame.f_back
        return frame

    def _owner(self, frame: FrameType) -> int:
        code = frame.f_code
        if id(code) not in self._owners:
            self._owners[id(code)] = _owner(frame), code
        return self._owners[id(code)][0]


def _owner(frame: FrameType) -> int:
    """Return whose code a frame runs."""
    file = frame.f_code.co_filename
    path = _normal(file)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    if package == "torch" or path.startswith(_HERE):
        return _TORCH_OR_OURS
    if path.startswith(_STANDARD) or file.startswith("<frozen") or _library(frame):
        return _LIBRARY
    return _USER


def _normal(path: str) -> str:
    return os.path.normcase(os.path.abspath(path))


def _library(frame: FrameType) -> str:
    """Return a library's file as `transformers/trainer.py`; empty for any other file."""
    path = _normal(frame.f_code.co_filename)
    for folder in _INSTALLED:
        _, between, below = path.rpartition(folder)
        if between:
            return below.replace(os.sep, "/")
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in _FRAMEWORKS:
        return module.replace(".", "/") + ".py"
    return ""


def _site(stack: list[tuple[FrameType, int]]) -> CallSite:
    """Return the user's line, with those that it was called from, and the library's that it called."""
    users: list[FrameType] = []
    libraries: list[FrameType] = []
    below: Caller = None  # what the user's line called
    for frame, owner in stack:
        if owner == _USER:
            users.append(frame)
        elif not users:
            below = frame
            if owner == _LIBRARY:
                libraries.append(frame)
    if not users:
        return _describe(libraries[0], None) if libraries else CallSite()
    here = _describe(users[0], below)
    frames = [(here.file, here.line, here.source)]
    frames += map(_line, users[1:])
    return replace(here, frames=json.dumps(frames), via=_via(libraries))


def _via(libraries: list[FrameType]) -> str:
    """Return the innermost line of the library that the user's line called, which may have called others."""
    called = ""
    innermost = ""
    for frame in reversed(libraries):
        path = _library(frame)
        package = path.partition("/")[0]
        called = called or package
        if path and package == called:
            innermost = f"{path}:{frame.f_lineno}"
    return innermost


def _line(frame: FrameType) -> tuple[str, int, str]:
    path = frame.f_code.co_filename
    line = frame.f_lineno
    lines = linecache.getlines(path, frame.f_globals)
    source = ""
    if 0 < line <= len(lines):
        source = lines[line - 1].strip()
    return readable(path), line, source[:200]


def _describe(frame: FrameType, below: Caller) -> CallSite:
    file, line, source = _line(frame)
    path = frame.f_code.co_filename
    text = "".join(linecache.getlines(path, frame.f_globals))
    call = _call(frame, text)
    subject = ""
    if call is not None:
        is_method = below is not None and below.f_code.co_qualname == "Tensor.backward"
        subject = _subject(call, is_method)
        if call.end_lineno != call.lineno:  # one line of several says little
            whole = ast.get_source_segment(text, call)
            source = _shorten(whole or source)
    code = frame.f_code
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    return CallSite(
        file,
        line,
        source[:200],
        _shorten(subject),
        path,
        function=code.co_firstlineno if is_function else 0,
    )


def _call(frame: FrameType, text: str) -> ast.Call | None:
    """Return the call that the frame makes now. Several may start at one position, but only one ends there."""
    tree = _parsed(text)
    if tree is None:
        return None
    number = frame.f_lasti // 2
    positions = islice(frame.f_code.co_positions(), number, None)
    _, line, _, column = next(positions)
    for node in ast.walk(tree):
        end = getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
        if isinstance(node, ast.Call) and end == (line, column):
            return node
    return None


@functools.lru_cache(1)  # each line of a script that an event is on asks for it anew
def _parsed(text: str) -> ast.Module | None:
    """Return the text's syntax; None where it has none."""
    try:
        if "\\" not in text:
            return ast.parse(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\\d", Python warned when it was run
            return ast.parse(text)
    # Before Python 3.12, two threads that parse at once may be told that the parser is broken (SystemError).
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return None


def _subject(call: ast.Call, is_method: bool) -> str:
    """Return what the call is about: `loss` in `loss.backward()` and in `accelerator.backward(loss)`."""
    function = call.func
    if not is_method and "backward" in ast.unparse(function):
        given = [*call.args]
        for keyword in call.keywords:
            if keyword.arg == "tensors":
                given.append(keyword.value)
        if given:
            return ast.unparse(given[0])
    if isinstance(function, ast.Attribute):
        return ast.unparse(function.value)
    return ""


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 1] + "…"
    return text


def readable(path: str) -> str:
    """Return a file's name without anything private: the notebook cell, or the path below the working folder."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        compiler: Any = getattr(get_ipython(), "compile", None)
        if hasattr(compiler, "format_code_name"):
            kind, name = compiler.format_code_name(path) or ("", "")
            if kind:
                return str(name) if kind == "Cell" else path
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return os.path.basename(path) if relative.startswith("..") else relative


# --- variables ---------------------------------------------------------------------------------

_OWN_REFERENCES = 3  # the frame's, `local` in `variables`, getrefcount's argument


def variable(frame: Caller, value: object) -> str:
    """Return the name by which the frame knows this object, or an empty string."""
    if frame is not None:
        for name, candidate in variables(frame):
            if candidate is value:
                return name
    return ""


def variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the frame's variables, local before global, without those that begin with an underscore."""
    local = frame.f_locals
    outer = frame.f_globals
    merged = {**local, **outer, **local}  # local first, where both have a name
    pairs = []
    for name, value in merged.items():
        if not name.startswith("_"):
            pairs.append((name, value))
    # Before Python 3.13 the frame keeps this copy of its variables, which would hold a tensor alive
    # after its `del`; three references mean that nobody else has asked for it with locals().
    is_copy = type(local) is dict and local is not outer
    if is_copy and sys.getrefcount(local) <= _OWN_REFERENCES:
        local.clear()
    return pairs


# --- the lines that a ledger keeps of a file ---------------------------------------------------

# A cell or a script, not a generated file: the player shows the code beside what it did.
_LONGEST_SOURCE = 200_000
# What a finding names of a framework stands far from where that trains.
_SETTING = re.compile(r"\b(gradient_accumulation_steps|accumulate_grad_batches)\b")


class Sources:
    """The source files that events point into, or (not `whole`) the lines of them that those events need."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self.met: set[tuple[str, int]] = set()
        self._texts: dict[str, str] = {}
        self._lines: dict[str, set[int]] = {}
        self._unsaid: set[str] = set()

    def meet(self, site: CallSite) -> None:
        """Read the file of a line that was not met before."""
        file = site.file
        self.met.add((file, site.line))
        if not site.path:
            return
        text = "".join(linecache.getlines(site.path))
        if len(text) > _LONGEST_SOURCE:
            text = ""
        self._texts[file] = text
        lines = self._lines.setdefault(file, set())
        if not self._whole:
            lines |= needs(text, site.line, site.function)
            rows = enumerate(text.splitlines(), 1)
            lines |= {number for number, row in rows if _SETTING.search(row)}
        self._unsaid.add(file)

    def all(self) -> dict[str, str]:
        """Return the files."""
        return self._shown(self._texts)

    def news(self) -> dict[str, str]:
        """Return the files of which something was met since the last time."""
        unsaid, self._unsaid = self._unsaid, set()
        return self._shown(unsaid)

    def _shown(self, files: Iterable[str]) -> dict[str, str]:
        shown = {}
        for file in sorted(files):
            text = self._texts[file]
            shown[file] = text if self._whole else only(text, self._lines[file])
        return shown


def needs(
    text: str,
    line: int,
    function: int = 0,
) -> set[int]:
    """Return the lines that one (from 1) needs, itself among them; none if there is no such line.

    A line in a function needs that function, which begins at `function`; one at the top level the statement it belongs
    to and three lines around it. Of what is longer than 200 lines, only the nearest are kept.

    >>> needs("K = 'secret'\\n\\ndef f(x):\\n    y = x\\n    return y\\n", 5, 3)
    {3, 4, 5}
    """
    rows = text.splitlines(keepends=True)
    if not 1 <= line <= len(rows):
        return set()
    first = function or _statement(rows, line)
    length = _length(rows[first - 1 :])
    block = set(range(first, first + length))
    start = max(line - _AROUND, 1)
    around = set(range(start, line + _AROUND + 1))
    if line not in block:
        return around
    if not function:
        block |= around
    return {n for n in block if abs(n - line) <= _WHOLE // 2}


def _statement(rows: list[str], line: int) -> int:
    """Return where the statement at the top level begins that has this line, as far as its indentation says."""
    while line > 1 and rows[line - 1][:1] in " \t\r\n)]}":
        line -= 1
    return line


def _length(rows: list[str]) -> int:
    """Return how many lines the function or the statement has that begins with the first of these."""
    try:
        return len(inspect.getblock(rows))
    except Exception:  # no Python
        return 1


def only(text: str, kept: Set[int]) -> str:
    """Return the text with every other line emptied, without those at its end.

    >>> only("K = 'secret'\\ny = x\\nz = y\\n", {2})
    '\\ny = x\\n'
    """
    rows = text.split("\n")
    last = 0
    for number, row in enumerate(rows, 1):
        if number not in kept:
            rows[number - 1] = ""
        elif row.strip():
            last = number
    if last < len(rows):
        rows[last:] = [""] if last else []
    return "\n".join(rows)
