"""Find the user's line that an event comes from, and keep the code around it."""

from __future__ import annotations

import ast
import linecache
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Set
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
            frames = (here.file, here.line, here.source), *map(_line, callers)
            return replace(here, frames=frames, via=_via(self.libraries))
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
            for remembered in (self._last, self._sites, self._owners):
                remembered.clear()
        stack = self._walk(first)
        way = tuple(stack.way)
        site = self._sites.get(way)
        if site is None:
            site = self._sites[way] = stack.describe()
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
    path = os.path.normcase(os.path.abspath(file))
    name = frame.f_globals.get("__name__", "")
    if path.startswith(_HERE) or name == "torch" or name.startswith("torch."):
        return _TORCH_OR_OURS
    library = path.startswith(_LIBRARIES) or file.startswith("<frozen")
    return _LIBRARY if library else _USER


def _package(frame: FrameType) -> str:
    """Return a library's file as `transformers/trainer.py`; empty for the standard library's."""
    path = os.path.normcase(os.path.abspath(frame.f_code.co_filename))
    above = [place for place in _LIBRARIES if path.startswith(place)]
    deepest = max(above, key=len, default=_STANDARD)
    if deepest == _STANDARD:
        return ""
    return path.removeprefix(deepest).replace(os.sep, "/")


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
    path, line = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(path, frame.f_globals)
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return readable(path), line, source[:200]


def _describe(frame: FrameType, below: FrameType | None) -> CallSite:
    file, line, source = _line(frame)
    path = frame.f_code.co_filename
    lines = linecache.getlines(path, frame.f_globals)
    subject, call = "", _call(frame, lines)
    if call is not None:
        method = below is not None and below.f_code.co_qualname == "Tensor.backward"
        subject = _subject(call, method)
        if call.end_lineno != call.lineno:  # one line of several says little
            source = _shorten(ast.get_source_segment("".join(lines), call) or source)
    elif ".backward(" in source:
        subject = source.split(".backward(", maxsplit=1)[0].strip()
    return CallSite(file, line, source[:200], _shorten(subject), path)


def _call(frame: FrameType, lines: list[str]) -> ast.Call | None:
    """Return the call that the frame makes now. Several may start at one position, but only one ends there."""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    _, line, _, column = next(positions)
    tree = parsed("".join(lines))
    return None if tree is None else next(_ending(tree, line, column), None)


def _ending(tree: ast.AST, line: int | None, column: int | None) -> Iterator[ast.Call]:
    """Yield the calls that end here; statements elsewhere are not looked into, of which a script has thousands."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        end = getattr(node, "end_lineno", None), getattr(node, "end_col_offset", None)
        if isinstance(node, ast.Call) and end == (line, column):
            yield node
        if not isinstance(node, ast.stmt) or line is None or line in _lines(node):
            waiting.extend(ast.iter_child_nodes(node))


def _subject(call: ast.Call, method: bool) -> str:
    """Return what the call is about: `loss` in `loss.backward()` and in `accelerator.backward(loss)`."""
    if not method and "backward" in ast.unparse(call.func):
        named = [each.value for each in call.keywords if each.arg == "tensors"]
        given = [*call.args, *named]
        if given:
            return ast.unparse(given[0])
    if isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func.value)
    return ""


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def readable(path: str) -> str:
    """Return a file's name without anything private: the notebook cell, or the path below the working folder."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        namer = getattr(getattr(shell, "compile", None), "format_code_name", None)
        kind, name = (namer(path) if namer else None) or ("", "")
        if kind:
            return str(name) if kind == "Cell" else path
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return os.path.basename(path) if relative.startswith("..") else relative


# --- variables ---------------------------------------------------------------------------------

_OWN_REFERENCES = 3  # the frame's, `local` in `variables`, getrefcount's argument


def variable(frame: FrameType | None, value: object) -> str:
    """Return the name by which the frame knows this object, or an empty string."""
    pairs = variables(frame) if frame is not None else []
    return next((name for name, candidate in pairs if candidate is value), "")


def variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the frame's variables, local before global, without those that begin with an underscore."""
    local, outer = frame.f_locals, frame.f_globals
    merged = {**outer, **local} if outer is not local else local
    order = dict.fromkeys([*local, *outer])
    pairs = [(name, merged[name]) for name in order if not name.startswith("_")]
    # Before Python 3.13 the frame keeps this copy of its variables, which would hold a tensor alive
    # after its `del`; three references mean that nobody else has asked for it with locals().
    mine = type(local) is dict and outer is not local
    if mine and sys.getrefcount(local) <= _OWN_REFERENCES:
        local.clear()
    return pairs


# --- the lines that a ledger keeps of a file ---------------------------------------------------

# The text that was parsed last, and its syntax: each line of a script that an event is on asks for it anew.
_parsed_last: tuple[str | None, ast.Module | None] = None, None


def parsed(text: str) -> ast.Module | None:
    """Return the text's syntax, which nobody may change; None where it has none."""
    global _parsed_last  # noqa: PLW0603 - one for the process
    known, tree = _parsed_last
    if known != text:
        tree = _parse(text)
        _parsed_last = (text, tree) if len(text) <= _KEPT else (None, None)
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
    tree = parsed(text)
    around = set(range(max(line - _AROUND, 1), line + _AROUND + 1))
    return around if tree is None else _needs(list(_path(tree, line)), around)


def _needs(path: list[ast.stmt], around: set[int]) -> set[int]:
    lines: set[int] = set()
    inside = path
    in_function = False
    for depth, node in enumerate(path):
        if isinstance(node, _DEFINITIONS):
            first = _lines(node)[0]
            lines |= {*range(first, min(node.body[0].lineno, first + 10))}
        if isinstance(node, _FUNCTIONS):
            inside, in_function = path[depth:], True
    block = next((node for node in inside if len(_lines(node)) <= _WHOLE), None)
    if block is not None:
        lines |= {*_lines(block)}
    return lines if block is not None and in_function else lines | around


def _path(tree: ast.AST, line: int) -> Iterator[ast.stmt]:
    """Yield the statements that contain a line, from the outermost in."""
    at: ast.AST | None = tree
    while at is not None:
        at = next((node for node in _statements(at) if line in _lines(node)), None)
        if at is not None:
            yield at


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _lines(node: ast.stmt) -> range:
    """Return a statement's lines, its decorators' included."""
    decorators = node.decorator_list if isinstance(node, _DEFINITIONS) else []
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return range(first, (node.end_lineno or node.lineno) + 1)


def only(text: str, kept: Set[int]) -> str:
    """Return the text with every other line emptied, without those at its end.

    >>> only("K = 'secret'\\ny = x\\nz = y\\n", {2})
    '\\ny = x\\n'
    """
    rows = text.split("\n")
    last = max((n for n in kept if n <= len(rows) and rows[n - 1].strip()), default=0)
    shown = rows[:last]
    for n in range(1, last + 1):
        if n not in kept:
            shown[n - 1] = ""
    end = "" if last == len(rows) or not last else "\n"  # the last line may have no end
    return "\n".join(shown) + end
