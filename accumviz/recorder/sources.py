"""Of a source file, only the lines that events need: the others become empty, so that every line keeps its number."""

from __future__ import annotations

import ast
import contextlib
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

# So many lines before and after a line that stands in no function; and the longest block that is kept whole.
_AROUND, _LONGEST = 3, 200
# Before Python 3.12, two threads that parse at once may both be told that the parser is broken.
_parsing = threading.Lock()
# The text that was parsed last, and its syntax: each line of a script that an event stands on asks for it anew.
_last: tuple[str | None, ast.Module | None] = None, None
# Of a longer text, the syntax takes too much memory to be kept.
_KEPT = 100_000
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def needs(text: str, line: int) -> set[int]:
    """The lines that one (from 1) needs, itself among them; none if there is no such line.

    A line in a function needs that function and the heads of what encloses it; one at the top
    level the statement it belongs to and three lines around it. Of a function longer than 200
    lines, it is the largest statement around the line that is not.

    >>> needs("K = 'secret'\\n\\ndef f(x):\\n    y = x\\n    return y\\n", 5)
    {3, 4, 5}
    """
    if not 1 <= line <= text.count("\n") + 1:
        return set()
    tree = parsed(text)
    return set(_around(line) if tree is None else _needs(tree, line))


def ends(path: str) -> tuple[str, str]:
    """How a file's lines end, and how its last one does: who asks for lines is given each with a newline."""
    with contextlib.suppress(OSError, ValueError):
        # What is no file, such as a pipe, might keep whoever opens it waiting.
        if Path(path).is_file():
            with Path(path).open("rb") as file:
                end = "\r\n" if file.readline().endswith(b"\r\n") else "\n"
                file.seek(-1, os.SEEK_END)
                return end, end if file.read() == b"\n" else ""
    return "\n", "\n"


def only(text: str, kept: Set[int]) -> str:
    """The text with every other line emptied, without those at its end.

    >>> only("K = 'secret'\\ny = x\\nz = y\\n", {2})
    '\\ny = x\\n'
    """
    rows = text.split("\n")
    last = max((n for n in kept if n <= len(rows) and rows[n - 1].strip()), default=0)
    found = "".join(
        (rows[n - 1] if n in kept else "") + "\n" for n in range(1, last + 1)
    )
    return (
        found[:-1] if last == len(rows) else found
    )  # a file whose last line has no end


def parsed(text: str) -> ast.Module | None:
    """The text's syntax, which nobody may change; None where it has none."""
    global _last  # noqa: PLW0603 - one for the process, as the lock is
    with _parsing:
        known, tree = _last
        if known != text:
            tree = _parse(text)
            _last = (text, tree) if len(text) <= _KEPT else (None, None)
        return tree


def _parse(text: str) -> ast.Module | None:
    try:
        if "\\" not in text:
            return ast.parse(text)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # whoever wrote "\\d" has been told when it was run
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return None


def _around(line: int) -> Iterable[int]:
    return range(max(line - _AROUND, 1), line + _AROUND + 1)


def _needs(tree: ast.Module, line: int) -> Iterator[int]:
    path = list(_path(tree, line))
    functions = [
        node
        for node in path
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    inside = path[path.index(functions[-1]) :] if functions else path
    for node in path:
        if isinstance(node, _DEFINITIONS):
            yield from range(_first(node), min(node.body[0].lineno, _first(node) + 10))
    block = next((node for node in inside if len(_lines(node)) <= _LONGEST), None)
    if block is None or not functions:
        yield from _around(line)
    if block is not None:
        yield from _lines(block)


def _path(tree: ast.AST, line: int) -> Iterator[ast.stmt]:
    """The statements that contain a line, from the outermost in."""
    at: ast.AST | None = tree
    while at is not None:
        # Only what does not end above the line is asked where it begins: a script has thousands of statements.
        ends = (
            node for node in _statements(at) if (node.end_lineno or node.lineno) >= line
        )
        at = next((node for node in ends if line in _lines(node)), None)
        if at is not None:
            yield at


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _first(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, _DEFINITIONS) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


def _lines(node: ast.stmt) -> range:
    return range(_first(node), (node.end_lineno or node.lineno) + 1)


def _in_child() -> None:
    global _parsing  # noqa: PLW0603 - a fork leaves a lock held by a thread that is not there
    _parsing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
