"""Where in the user's code something happened, found from the stack once per place and then remembered."""

from __future__ import annotations

import ast
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from accumviz.recorder.sources import parsed

# Another environment's, which was put on the path, are libraries as well.
_BORROWED = {
    path
    for path in sys.path
    if os.path.basename(path) in ("site-packages", "dist-packages")
}
_LIBRARIES = tuple(
    os.path.normcase(path) + os.sep
    for path in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("stdlib"),
        *_BORROWED,
    }
)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.normcase(sysconfig.get_path("stdlib")) + os.sep
_LONGEST = 80
# So many of the user's frames are kept, and so many of others' in a row are looked through for the next.
_FRAMES, _BETWEEN = 4, 16
# So many pieces of code are remembered: a program has fewer, one that makes code as it runs has no end of them.
_MOST = 10_000
# And of one place, so many ways on which it is reached.
_FEW = 100


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


class _Place:
    """A place in the user's code, and the line for each way on which it was reached: from where, from where, ..."""

    def __init__(self) -> None:
        self.here: CallSite | None = None  # without the way
        self.sites: dict[tuple[tuple[CodeType, int], ...], CallSite] = {}


class CallSites:
    """Find the user's line for the call being made now; each place is parsed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Place] = {}
        # By the frame in which a search began, the way that it took the last time and what it found: a loop comes again
        # and again by the same one. Both are replaced as one: another thread may come by another.
        self._chains: dict[int, tuple[tuple[tuple[CodeType, int], ...], CallSite]] = {}
        self._mine: dict[int, int] = {}
        self._packages: dict[int, str] = {}  # by a library's code, its file
        # A code object's id may be reused once it is gone: hold those that were met.
        self._codes: list[CodeType] = []

    def find(self, frame: FrameType | None) -> CallSite:
        """The nearest frame that belongs to the user, not to torch, accumviz or another library."""
        if frame is None:
            return CallSite()
        chain = self._chains.get(id(frame.f_code) + frame.f_lasti)
        if chain is not None:
            outer: FrameType | None = frame
            for code, at in chain[0]:
                if outer is None or outer.f_code is not code or outer.f_lasti != at:
                    break
                outer = outer.f_back
            else:
                return chain[1]
        return self._search(frame)

    def _search(self, first: FrameType) -> CallSite:
        """Likewise, of a call that did not come by the same way as the last one from there."""
        frame: FrameType | None = first
        fallback: FrameType | None = None
        below: FrameType | None = None
        while frame is not None:
            distance = self._distance(frame)
            if distance == 0:
                return self._find(first, frame, below)
            if distance == 1 and fallback is None:
                fallback = frame
            below, frame = frame, frame.f_back
        return _describe(fallback, None) if fallback is not None else CallSite()

    def _find(
        self, first: FrameType, frame: FrameType, below: FrameType | None
    ) -> CallSite:
        """The line of a frame that is the user's, with those from which it was called; and through which library."""
        users, way = self._way(frame)
        through = self._through(first, frame)
        if len(self._known) > _MOST:
            self._known.clear()
        place = self._known.setdefault((id(frame.f_code), frame.f_lasti), _Place())
        key = (*way, *((f.f_code, f.f_lasti) for f, _ in through))
        site = place.sites.get(key)
        if site is None:
            if len(place.sites) > _FEW:
                place.sites.clear()
            here = place.here = place.here or _describe(frame, below)
            frames = ((here.file, here.line, here.source), *map(_line, users))
            site = place.sites[key] = replace(here, frames=frames, via=_via(through))
        if len(self._chains) > _MOST:
            self._chains.clear()
        self._chains[id(first.f_code) + first.f_lasti] = (
            (*_between(first, frame), *way),
            site,
        )
        return site

    def _way(
        self, frame: FrameType
    ) -> tuple[list[FrameType], tuple[tuple[CodeType, int], ...]]:
        """The user's frames around this one, and every place on the way to the last of them.

        Around a module's own code there is only what runs it.
        """
        users: list[FrameType] = []
        way: list[tuple[CodeType, int]] = []
        between, last = 0, 0
        module, outer = frame.f_code.co_name == "<module>", frame.f_back
        while (
            outer is not None
            and not module
            and between < _BETWEEN
            and len(users) < _FRAMES - 1
        ):
            way.append((outer.f_code, outer.f_lasti))
            if self._distance(outer):
                between += 1
            else:
                users.append(outer)
                module = outer.f_code.co_name == "<module>"
                between, last = 0, len(way)
            outer = outer.f_back
        return users, tuple(way[: max(last, 1)])

    def _through(
        self, frame: FrameType | None, user: FrameType
    ) -> list[tuple[FrameType, str]]:
        """The frames of libraries between what happened and the user's line, innermost first, and their files."""
        found: list[tuple[FrameType, str]] = []
        while frame is not None and frame is not user:
            if self._distance(frame) == 1:
                code = frame.f_code
                package = self._packages.get(id(code))
                if package is None:
                    package = self._packages[id(code)] = _package(code.co_filename)
                if package:
                    found.append((frame, package))
            frame = frame.f_back
        return found

    def owner(self, frame: FrameType | None) -> FrameType | None:
        """The frame that `find` would describe, for its variables."""
        while frame is not None and self._distance(frame):
            frame = frame.f_back
        return frame

    def _distance(self, frame: FrameType) -> int:
        """0: the user's; 1: some library's; 2: torch's or ours."""
        code = frame.f_code
        known = self._mine.get(id(code))
        if known is not None:
            return known
        if len(self._codes) >= _MOST:
            self._codes.clear()
            self._mine.clear()
            self._packages.clear()
            self._known.clear()
            self._chains.clear()
        self._codes.append(code)
        path = os.path.normcase(os.path.abspath(code.co_filename))
        name = frame.f_globals.get("__name__", "")
        if path.startswith(_HERE) or name == "torch" or name.startswith("torch."):
            known = 2
        else:
            known = int(
                path.startswith(_LIBRARIES) or code.co_filename.startswith("<frozen")
            )
        self._mine[id(code)] = known
        return known


def _between(first: FrameType, last: FrameType) -> Iterator[tuple[CodeType, int]]:
    """The places from one frame out to another."""
    frame: FrameType | None = first
    while frame is not None:
        yield frame.f_code, frame.f_lasti
        frame = None if frame is last else frame.f_back


def _package(path: str) -> str:
    """A library's file below where libraries are, as `transformers/trainer.py`; empty for the standard library's."""
    path = os.path.normcase(os.path.abspath(path))
    deepest = max(
        (place for place in _LIBRARIES if path.startswith(place)),
        key=len,
        default=_STANDARD,
    )
    return (
        "" if deepest == _STANDARD else path.removeprefix(deepest).replace(os.sep, "/")
    )


def _via(through: list[tuple[FrameType, str]]) -> str:
    """The innermost line of the library that the user's line called, which may have called others."""
    if not through:
        return ""
    called = through[-1][1].partition("/")[0]
    return next(
        f"{path}:{frame.f_lineno}"
        for frame, path in through
        if path.partition("/")[0] == called
    )


def _line(frame: FrameType) -> tuple[str, int, str]:
    path, line = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(path, frame.f_globals)
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return readable(path), line, source[:200]


def _describe(frame: FrameType, below: FrameType | None) -> CallSite:
    method = below is not None and below.f_code.co_qualname == "Tensor.backward"
    path, line = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(path, frame.f_globals)
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    subject, call = "", _call(frame, lines)
    if call is not None:
        subject = _subject(call, method)
        if call.end_lineno != call.lineno:  # one line of several says little
            source = _shorten(ast.get_source_segment("".join(lines), call) or source)
    elif ".backward(" in source:
        subject = source.split(".backward(", maxsplit=1)[0].strip()
    return CallSite(readable(path), line, source[:200], _shorten(subject), path)


def _call(frame: FrameType, lines: list[str]) -> ast.Call | None:
    """The call that the frame is making now. Where a call starts is told apart by no position, its end is."""
    _, line, _, column = next(
        islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    )
    tree = parsed("".join(lines))
    return None if tree is None else next(_ending(tree, line, column), None)


def _ending(tree: ast.AST, line: int | None, column: int | None) -> Iterator[ast.Call]:
    """The calls that end here; statements elsewhere are not looked into, of which a script has thousands."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == (
            line,
            column,
        ):
            yield node
        if (
            not isinstance(node, ast.stmt)
            or line is None
            or _first_line(node) <= line <= (node.end_lineno or line)
        ):
            waiting.extend(ast.iter_child_nodes(node))


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _subject(call: ast.Call, method: bool) -> str:
    """What the call is about: `loss` in `loss.backward()` and in `accelerator.backward(loss)`."""
    if not method and "backward" in ast.unparse(call.func):
        for value in (
            *call.args,
            *(keyword.value for keyword in call.keywords if keyword.arg == "tensors"),
        ):
            return ast.unparse(value)
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _cell(shell: Any, path: str) -> str:
    """What IPython calls a piece of code of its own; IPython 7 remembers only the text of its cells."""
    if hasattr(shell.compile, "format_code_name"):
        kind, name = shell.compile.format_code_name(path) or ("", "")
        return str(name) if kind == "Cell" else path * bool(kind)
    text, cells = (
        "".join(linecache.getlines(path)).rstrip(),
        shell.user_ns.get("In", []),
    )
    return next(
        (
            f"In[{n}]"
            for n in reversed(range(1, len(cells)))
            if cells[n].rstrip() == text
        ),
        "",
    )


def readable(path: str) -> str:
    """A file's name without anything private: the notebook cell, or the path below the working folder."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if hasattr(shell, "compile") and (name := _cell(shell, path)):
            return name
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return os.path.basename(path) if relative.startswith("..") else relative


def variable(frame: FrameType | None, value: object) -> str:
    """The name by which the frame knows this object, or an empty string."""
    pairs = variables(frame) if frame is not None else []
    return next((name for name, candidate in pairs if candidate is value), "")


def variables(frame: FrameType) -> list[tuple[str, Any]]:
    """The frame's variables, local before global, without those that begin with an underscore."""
    local, outer = frame.f_locals, frame.f_globals
    found = {**outer, **local} if outer is not local else local
    order = dict.fromkeys([*local, *outer])
    pairs = [(name, found[name]) for name in order if not name.startswith("_")]
    # Before Python 3.13 the frame keeps this copy of its variables, which would hold a tensor alive
    # after its `del`; three references mean that nobody else has asked for it with locals().
    if (
        type(local) is dict
        and outer is not local
        and sys.getrefcount(local) <= _OWN_REFERENCES
    ):
        local.clear()
    return pairs


_OWN_REFERENCES = 3  # the frame's, this function's variable, getrefcount's argument
