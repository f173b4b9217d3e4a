"""Where in the user's code something happened, found from the stack once per place and then remembered."""

from __future__ import annotations

import ast
import linecache
import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from accumviz.recorder.sources import parsed

_LIBRARIES = tuple(
    os.path.normcase(path) + os.sep
    for path in {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")}
)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LONGEST = 80
# So many pieces of code are remembered: a program has fewer, one that makes code as it runs has no end of them.
_MOST = 10_000


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code: file (as a person would name it), line, source text and the call's subject."""

    file: str = ""
    line: int = 0
    source: str = ""
    subject: str = ""
    path: str = ""


class CallSites:
    """Find the user's line for the call being made now; each place is parsed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], CallSite] = {}
        self._mine: dict[int, int] = {}
        # A code object's id may be reused once it is gone: hold those that were met.
        self._codes: list[CodeType] = []

    def find(self, frame: FrameType | None) -> CallSite:
        """The nearest frame that belongs to the user, not to torch, accumviz or another library."""
        known, distances = self._known, self._mine
        fallback: FrameType | None = None
        below: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            distance = distances.get(id(code))
            if distance is None:
                distance = self._distance(frame)
            if distance == 0:
                found = known.get((id(code), frame.f_lasti))
                if found is None:
                    found = known[id(code), frame.f_lasti] = _describe(frame, below)
                return found
            if distance == 1 and fallback is None:
                fallback = frame
            below, frame = frame, frame.f_back
        return _describe(fallback, None) if fallback is not None else CallSite()

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
            self._known.clear()
        self._codes.append(code)
        path = os.path.normcase(os.path.abspath(code.co_filename))
        name = frame.f_globals.get("__name__", "")
        if path.startswith(_HERE) or name == "torch" or name.startswith("torch."):
            known = 2
        else:
            known = int(path.startswith(_LIBRARIES) or code.co_filename.startswith("<frozen"))
        self._mine[id(code)] = known
        return known


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
    _, line, _, column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    tree = parsed("".join(lines))
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == (line, column):
            return node
    return None


def _subject(call: ast.Call, method: bool) -> str:
    """What the call is about: `loss` in `loss.backward()` and in `accelerator.backward(loss)`."""
    if not method and "backward" in ast.unparse(call.func):
        for value in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "tensors")):
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
    text, cells = "".join(linecache.getlines(path)).rstrip(), shell.user_ns.get("In", [])
    return next((f"In[{n}]" for n in reversed(range(1, len(cells))) if cells[n].rstrip() == text), "")


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
    if type(local) is dict and outer is not local and sys.getrefcount(local) <= _OWN_REFERENCES:
        local.clear()
    return pairs


_OWN_REFERENCES = 3  # the frame's, this function's variable, getrefcount's argument
