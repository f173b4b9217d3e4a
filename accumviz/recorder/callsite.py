"""Find the user's line that an event comes from, and keep the code around it."""

from __future__ import annotations

import ast
import linecache
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from itertools import islice
from types import CodeType, FrameType
from typing import Any

# Another environment's, which was put on the path, are libraries as well.
_BORROWED = {
    path
    for path in sys.path
    if os.path.basename(path) in ("site-packages", "dist-packages")
}
_STANDARD = os.path.normcase(sysconfig.get_path("stdlib")) + os.sep
_INSTALLED = {*site.getsitepackages(), site.getusersitepackages(), *_BORROWED}
_LIBRARIES = (
    *(os.path.normcase(path) + os.sep for path in _INSTALLED),
    _STANDARD,
)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_USER, _LIBRARY, _TORCH_OR_OURS = range(3)
_LONGEST = 80
# So many of the user's frames are kept, and so many of others' in a row are looked through for the next.
_FRAMES, _BETWEEN = 4, 16
# So many places and pieces of code are remembered: a program that makes code as it runs has no end of them.
_MOST = 10_000
# So many lines around one that is in no function are kept; and the longest statement that is kept whole.
_AROUND, _WHOLE = 3, 200
# Of a longer text, the syntax takes too much memory to be kept.
_KEPT = 100_000
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)

# The places on a stack, from the inside out
_Way = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code: file (as a person would name it), line, source text and the call's subject.

    `frames` are this line and those that it was called from, `via` the library's line where it was
    called through one.
    """

    file: str = ""
    line: int = 0
    source: str = ""
    subject: str = ""
    path: str = ""
    frames: tuple[tuple[str, int, str], ...] = ()
    via: str = ""


class _Stack:
    """The frames around a call, from the inside out, as far as they are kept."""

    def __init__(self) -> None:
        self.way: list[tuple[CodeType, int]] = []
        self.users: list[FrameType] = []
        self.libraries: list[FrameType] = []
        # What the innermost of the user's frames has called.
        self.below: FrameType | None = None

    def describe(self) -> CallSite:
        """Return the user's line, with those that it was called from, and the library's that it called."""
        if self.users:
            first, *callers = self.users
            here = _describe(first, self.below)
            frames = [(here.file, here.line, here.source)]
            frames += [_line(caller) for caller in callers]
            via = _via(self.libraries)
            return replace(here, frames=tuple(frames), via=via)
        if self.libraries:
            return _describe(self.libraries[0], None)
        return CallSite()


class CallSites:
    """Find the user's line for the call being made now; each place is parsed once."""

    def __init__(self) -> None:
        # By where a search began, the way that it took the last time and its site: a loop comes by the same one.
        self._last: dict[int, tuple[_Way, CallSite]] = {}
        self._sites: dict[_Way, CallSite] = {}
        # By the id of a piece of code, whose it is, and the code: it is held, so that no other gets its id.
        self._owners: dict[int, tuple[int, CodeType]] = {}

    def find(self, frame: FrameType | None) -> CallSite:
        """Return the nearest line that belongs to the user, not to torch, accumviz or another library."""
        if frame is None:
            return CallSite()
        last = self._last.get(id(frame.f_code) + frame.f_lasti)
        if last is not None:
            outer: FrameType | None = frame
            for code, at in last[0]:
                if outer is None or outer.f_code is not code or outer.f_lasti != at:
                    break
                outer = outer.f_back
            else:
                return last[1]
        return self._search(frame)

    def _search(self, first: FrameType) -> CallSite:
        if len(self._owners) > _MOST or len(self._sites) > _MOST:
            self._last.clear()
            self._sites.clear()
            self._owners.clear()
        stack = self._walk(first)
        way = tuple(stack.way)
        if way not in self._sites:
            self._sites[way] = stack.describe()
        site = self._sites[way]
        self._last[id(first.f_code) + first.f_lasti] = way, site
        return site

    def _walk(self, first: FrameType) -> _Stack:
        """Walk the stack from here to the outermost of the user's frames that are kept."""
        stack, between = _Stack(), 0
        frame: FrameType | None = first
        while frame is not None and between < _BETWEEN and len(stack.users) < _FRAMES:
            stack.way.append((frame.f_code, frame.f_lasti))
            owner = self._owner(frame)
            if owner == _USER:
                stack.users.append(frame)
                between = 0
                # Around a module's own code there is only what runs it.
                if frame.f_code.co_name == "<module>":
                    break
            elif stack.users:
                between += 1
            else:
                stack.below = frame
                if owner == _LIBRARY:
                    stack.libraries.append(frame)
            frame = frame.f_back
        return stack

    def owner(self, frame: FrameType | None) -> FrameType | None:
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
    name = frame.f_globals.get("__name__", "")
    package = name.partition(".")[0]
    if package == "torch" or path.startswith(_HERE):
        return _TORCH_OR_OURS
    if path.startswith(_LIBRARIES) or file.startswith("<frozen"):
        return _LIBRARY
    return _USER


def _normal(path: str) -> str:
    return os.path.normcase(os.path.abspath(path))


def _package(frame: FrameType) -> str:
    """Return a library's file as `transformers/trainer.py`; empty for the standard library's."""
    path = _normal(frame.f_code.co_filename)
    above = [place for place in _LIBRARIES if path.startswith(place)]
    deepest = max(above, key=len, default=_STANDARD)
    if deepest == _STANDARD:
        return ""
    below = path.removeprefix(deepest)
    return below.replace(os.sep, "/")


def _via(libraries: list[FrameType]) -> str:
    """Return the innermost line of the library that the user's line called, which may have called others."""
    called = ""
    innermost = ""
    for frame in reversed(libraries):
        path = _package(frame)
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


def _describe(frame: FrameType, below: FrameType | None) -> CallSite:
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
    elif ".backward(" in source:
        subject = source.partition(".backward(")[0]
    return CallSite(file, line, source[:200], _shorten(subject), path)


def _call(frame: FrameType, text: str) -> ast.Call | None:
    """Return the call that the frame makes now. Several may start at one position, but only one ends there."""
    tree = parsed(text)
    if tree is None:
        return None
    number = frame.f_lasti // 2
    positions = islice(frame.f_code.co_positions(), number, None)
    _, line, _, column = next(positions)
    calls = _ending(tree, line, column)
    return next(calls, None)


def _ending(tree: ast.AST, line: int | None, column: int | None) -> Iterator[ast.Call]:
    """Yield the calls that end here; statements elsewhere are not looked into, of which a script has thousands."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            end = node.end_lineno, node.end_col_offset
            if end == (line, column):
                yield node
        is_elsewhere = isinstance(node, ast.stmt) and line not in _lines(node)
        if line is None or not is_elsewhere:
            waiting.extend(ast.iter_child_nodes(node))


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

        shell = get_ipython()
        if hasattr(shell, "compile") and (name := _cell(shell, path)):
            return name
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return os.path.basename(path) if relative.startswith("..") else relative


def _cell(shell: Any, path: str) -> str:
    """Return what IPython calls a piece of code of its own; IPython 7 remembers only the text of its cells."""
    if hasattr(shell.compile, "format_code_name"):
        kind, name = shell.compile.format_code_name(path) or ("", "")
        if kind == "Cell":
            return str(name)
        return path if kind else ""
    text = "".join(linecache.getlines(path)).rstrip()
    cells = shell.user_ns.get("In", [])
    for n in reversed(range(1, len(cells))):
        if cells[n].rstrip() == text:
            return f"In[{n}]"
    return ""


# --- variables ---------------------------------------------------------------------------------

_OWN_REFERENCES = 3  # the frame's, `local` in `variables`, getrefcount's argument


def variable(frame: FrameType | None, value: object) -> str:
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
    merged = {
        **local,
        **outer,
        **local,
    }  # locals first, where a global has the same name
    pairs = [pair for pair in merged.items() if not pair[0].startswith("_")]
    # Before Python 3.13 the frame keeps this copy of its variables, which would hold a tensor alive
    # after its `del`; three references mean that nobody else has asked for it with locals().
    is_copy = type(local) is dict and local is not outer
    if is_copy and sys.getrefcount(local) <= _OWN_REFERENCES:
        local.clear()
    return pairs


# --- the lines that a ledger keeps of a file ---------------------------------------------------

# A cell or a script, not a generated file: the player shows the code beside what it did.
_LONGEST_SOURCE = 200_000


class Sources:
    """The source files that events point into, or (not `whole`) the lines of them that those events need."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._met: set[tuple[str, int]] = set()
        self._texts: dict[str, str] = {}
        self._lines: dict[str, set[int]] = {}
        self._unsaid: set[str] = set()

    def __contains__(self, site: CallSite) -> bool:
        return (site.file, site.line) in self._met

    def meet(self, site: CallSite) -> None:
        """Read the file of a line that was not met before."""
        file = site.file
        self._met.add((file, site.line))
        if not site.path:
            return
        text = "".join(linecache.getlines(site.path))
        if len(text) > _LONGEST_SOURCE:
            text = ""
        self._texts[file] = text
        lines = self._lines.setdefault(file, set())
        if not self._whole:
            lines |= needs(text, site.line)
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


# The text that was parsed last, and its syntax: each line of a script that an event is on asks for it anew.
_parsed_last: tuple[str | None, ast.Module | None] = None, None


def parsed(text: str) -> ast.Module | None:
    """Return the text's syntax, which nobody may change; None where it has none."""
    global _parsed_last  # noqa: PLW0603 - one for the process
    last, tree = _parsed_last
    if last == text:
        return tree
    tree = _parse(text)
    _parsed_last = None, None
    if len(text) <= _KEPT:
        _parsed_last = text, tree
    return tree


def _parse(text: str) -> ast.Module | None:
    # Before Python 3.12, two threads that parse at once may be told that the parser is broken (SystemError).
    try:
        if "\\" not in text:
            return ast.parse(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\\d", Python warned when it was run
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return None


def needs(text: str, line: int) -> set[int]:
    """Return the lines that one (from 1) needs, itself among them; none if there is no such line.

    A line in a function needs that function and the heads of what encloses it; one at the top
    level the statement it belongs to and three lines around it. Of a function longer than 200
    lines, it is the largest statement around the line that is not.

    >>> needs("K = 'secret'\\n\\ndef f(x):\\n    y = x\\n    return y\\n", 5)
    {3, 4, 5}
    """
    if not 1 <= line <= text.count("\n") + 1:
        return set()
    first = max(line - _AROUND, 1)
    around = set(range(first, line + _AROUND + 1))
    tree = parsed(text)
    if tree is None:
        return around
    path = list(_path(tree, line))
    return _enclosing(path, around)


def _enclosing(path: list[ast.stmt], around: set[int]) -> set[int]:
    """Return the heads of all enclosing definitions, and the largest statement that is not too long.

    It is looked for in the innermost function. Where there is none, or no function, `around` is added.
    """
    lines: set[int] = set()
    inside = path  # from the innermost function on
    in_function = False
    for depth, node in enumerate(path):
        if isinstance(node, _DEFINITIONS):
            first = _lines(node).start
            end = min(node.body[0].lineno, first + 10)
            lines.update(range(first, end))
        if isinstance(node, _FUNCTIONS):
            inside = path[depth:]
            in_function = True
    for node in inside:
        block = _lines(node)
        if len(block) <= _WHOLE:
            lines.update(block)
            if in_function:
                return lines
            break
    return lines | around


def _path(tree: ast.AST, line: int) -> Iterator[ast.stmt]:
    """Yield the statements that contain a line, from the outermost in."""
    node: ast.AST | None = tree
    while node is not None:
        around = (inner for inner in _statements(node) if line in _lines(inner))
        node = next(around, None)
        if node is not None:
            yield node


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _lines(node: ast.stmt) -> range:
    """Return a statement's lines, its decorators' included."""
    first = node.lineno
    if isinstance(node, _DEFINITIONS):
        for decorator in node.decorator_list:
            first = min(first, decorator.lineno)
    last = node.end_lineno or node.lineno
    return range(first, last + 1)


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
