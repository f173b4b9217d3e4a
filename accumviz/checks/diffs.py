"""A cure as a diff of the file: its lines as they stand there, indented and whole, its hunks in the file's order."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from accumviz.checks.scripts import syntax

# A statement of more lines is not one call.
_LONGEST = 30
# In a hunk's head: its new rows belong behind the loop that its statement stands in, and not below that.
BEHIND_LOOP = "behind the loop"
# Of a long block, only the lines around events are kept.
_HOLE = 4 * "\n"
# Says of the row above it that nothing ends it.
_ENDLESS = "\\ No newline at end of file"


class _Hunk(NamedTuple):
    """What becomes of one statement: the file and its first line, the rows of the diff about it, and where they go."""

    file: str
    line: int
    rows: list[str]
    behind: bool


def placed(cure: str, sources: Mapping[str, str]) -> str:
    """The cure with its lines as they stand in the files, so that `patch -p0` applies it.

    Rules write one row for one statement, without its indentation. Where the file's text was not
    kept, the cure stays as they wrote it; where that says something else, or it would leave no
    program behind, there is none.

    >>> print(placed("--- a.py\\n+++ a.py\\n@@ -2 +2,2 @@\\n step()\\n+zero()", {"a.py": "while a:\\n    step()\\n"}))
    --- a.py
    +++ a.py
    @@ -2 +2,2 @@
         step()
    +    zero()
    >>> print(placed("--- a.py\\n+++ a.py\\n@@ -2 +1,0 @@\\n-zero()", {"a.py": "if a:\\n    zero()\\n"}))
    --- a.py
    +++ a.py
    @@ -2 +2 @@
    -    zero()
    +    pass
    """
    hunks = _hunks(cure)
    ends = {hunk.file: "\r" * ("\r\n" in sources.get(hunk.file, "")) for hunk in hunks}
    texts = {
        file: sources.get(file, "").replace("\r\n", "\n").split("\n") for file in ends
    }
    stand = [_statement(texts[hunk.file], hunk) for hunk in hunks]
    if not all(stand):
        there = all(
            hunk.line <= len(texts[hunk.file])
            and texts[hunk.file][hunk.line - 1].strip()
            for hunk in hunks
        )
        return "" if there else cure
    # What is moved is written as it stands, not as its one row tells it.
    whole = {
        _old(hunk): rows
        for hunk, rows in zip(hunks, stand, strict=True)
        if hunk.rows[0][0] == "-"
    }
    edits = [
        _behind(h, texts[h.file])
        if h.behind
        else _Edit(h.file, h.line, len(rows), _rows(h, rows, whole))
        for h, rows in zip(hunks, stand, strict=True)
    ]
    if not all(edit.rows for edit in edits):
        return ""
    for found in (edits, [edit.leaving_pass() for edit in edits]):
        if not any(
            _reads(text) and not _reads(_after(text, found, file))
            for file, text in texts.items()
        ):
            return "\n".join(
                row
                for file in texts
                for row in _written(found, file, ends[file], texts[file])
            )
    return ""


def stands(cure: str, text: Callable[[str], str | None]) -> bool:
    """Whether what a cure would change stands where it did in the texts of its files; where there is none, it may.

    >>> texts = {"a.py": "a()\\nzero()\\n"}
    >>> [stands(f"--- {file}\\n+++ {file}\\n@@ -2 +1,0 @@\\n-zero()", texts.get) for file in ("a.py", "b.py")]
    [True, True]
    >>> stands("--- a.py\\n+++ a.py\\n@@ -1 +0,0 @@\\n-zero()", texts.get)
    False
    """
    for hunk in _hunks(cure):
        told = [row[1:].strip() for row in hunk.rows if row[0] in "- "]
        now = text(hunk.file)
        if now is not None and told != [
            line.strip() for line in now.split("\n")[hunk.line - 1 :][: len(told)]
        ]:
            return False
    return True


class _Edit(NamedTuple):
    """A hunk in its place: the file, the first of its lines there and how many they are, and its rows."""

    file: str
    line: int
    length: int
    rows: list[str]

    @property
    def put(self) -> list[str]:
        """The lines that stand there afterwards."""
        return [row[1:] for row in self.rows if row[0] != "-"]

    def leaving_pass(self) -> _Edit:
        """Likewise, of a block that had nothing else."""
        first = self.rows[0][1:]
        indent = first[: len(first) - len(first.lstrip())]
        return self if self.put else self._replace(rows=[*self.rows, f"+{indent}pass"])


def _after(text: Sequence[str], edits: Sequence[_Edit], file: str) -> list[str]:
    """The lines of a file after its edits."""
    lines = list(text)
    for edit in sorted(
        (edit for edit in edits if edit.file == file), key=lambda edit: -edit.line
    ):
        lines[edit.line - 1 : edit.line - 1 + edit.length] = edit.put
    return lines


def _written(
    edits: Sequence[_Edit], file: str, end: str, text: Sequence[str]
) -> Iterator[str]:
    """The diff of one file; only its lines end as the file's do, for patch takes such an end off a diff's heads."""
    # Without a tab, patch takes the first word for the name.
    yield from (f"{sign} {file}" + "\t" * (" " in file) for sign in ("---", "+++"))
    offset = 0
    for edit in sorted(
        (edit for edit in edits if edit.file == file), key=lambda edit: edit.line
    ):
        yield f"@@ -{_range(edit.line, edit.length)} +{_range(edit.line + offset, len(edit.put))} @@"
        last = bool(text[-1]) and edit.line - 1 + edit.length == len(text)
        yield from (
            _endless(edit.rows, end) if last else (row + end for row in edit.rows)
        )
        offset += len(edit.put) - edit.length


def _endless(rows: Sequence[str], end: str) -> Iterator[str]:
    """The rows about a file's last line, which nothing ends: nor does anything end the last one afterwards."""
    old = max(i for i, row in enumerate(rows) if row[0] != "+")
    new = max((i for i, row in enumerate(rows) if row[0] != "-"), default=-1)
    for i, row in enumerate(rows):
        if i == old < new and row[0] == " ":  # it gets an end
            yield from (f"-{row[1:]}", _ENDLESS, f"+{row[1:]}{end}")
        else:
            yield from (row, _ENDLESS) if i in (old, new) else (row + end,)


def _hunks(cure: str) -> list[_Hunk]:
    found: list[_Hunk] = []
    file = ""
    for row in cure.splitlines():
        if row.startswith("--- "):
            file = row[4:].rstrip("\t")
        elif row.startswith("@@"):
            found.append(
                _Hunk(
                    file,
                    int(re.split(r"[ ,]", row)[1][1:]),
                    [],
                    row.endswith(BEHIND_LOOP),
                )
            )
        elif not row.startswith("+++ "):
            found[-1].rows.append(row)
    return found


def _old(hunk: _Hunk) -> str:
    """The one row of a hunk that stands in the file now."""
    return next((row[1:] for row in hunk.rows if row[0] != "+"), "")


def _statement(text: Sequence[str], hunk: _Hunk) -> list[str]:
    """The lines of the statement that a hunk is about; none where it cannot be told."""
    start, told = hunk.line - 1, _old(hunk)
    if not 0 <= start < len(text):
        return []
    if text[start].strip() == told:
        return [text[start]]
    for length in range(2, _LONGEST):
        lines = list(text[start : start + length])
        tree = _parsed(lines)
        if tree is not None:
            one = len(tree.body) == 1 and not hasattr(tree.body[0], "body")
            begins = "".join(" ".join(lines).split()).startswith(
                "".join(told.rstrip("…").split())[:20]
            )
            return lines if one and begins else []
    return []


def _rows(
    hunk: _Hunk, stands: Sequence[str], whole: Mapping[str, list[str]]
) -> list[str]:
    indent = stands[0][: len(stands[0]) - len(stands[0].lstrip())]
    found: list[str] = []
    for row in hunk.rows:
        if row[0] != "+":
            found += [row[0] + line for line in stands]
        else:
            moved = whole.get(row[1:])
            lines = (
                textwrap.dedent("\n".join(moved)).split("\n") if moved else [row[1:]]
            )
            found += [f"+{indent}{line}" for line in lines]
    return found


def _behind(hunk: _Hunk, text: Sequence[str]) -> _Edit:
    """The edit that puts a hunk's new rows behind the innermost loop with a backward around its statement, or none."""
    tree = syntax("\n".join(text))
    around = (
        []
        if tree is None
        else [node for node in ast.walk(tree) if hunk.line in _extent(node)]
    )
    loops = [
        node
        for node in around
        if isinstance(node, ast.For | ast.While) and _runs_backward(node)
    ]
    loop = max(loops, key=lambda node: node.lineno, default=None)
    # What is defined inside the loop has names of its own.
    inside = loop and any(
        isinstance(node, ast.FunctionDef) and node.lineno > loop.lineno
        for node in around
    )
    if loop is None or inside or _HOLE in "\n".join(text[i - 1] for i in _extent(loop)):
        return _Edit(hunk.file, hunk.line, 0, [])
    last = _extent(loop)[-1]
    head = text[loop.lineno - 1]
    indent = head[: len(head) - len(head.lstrip())]
    rows = [f"+{indent}{row[1:]}" for row in hunk.rows if row[0] == "+"]
    return _Edit(hunk.file, last, 1, [f" {text[last - 1]}", *rows])


def _extent(node: ast.AST) -> range:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
    return range(first, (last or first) + 1) if first else range(0)


def _runs_backward(loop: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Attribute) and "backward" in node.attr
        for node in ast.walk(loop)
    )


def _range(line: int, length: int) -> str:
    """Lines as a hunk's head tells them: of none, the one before."""
    return (
        f"{line}" if length == 1 else f"{line},{length}" if length else f"{line - 1},0"
    )


def _parsed(lines: Sequence[str]) -> ast.Module | None:
    return syntax(textwrap.dedent("\n".join(lines)))


def _reads(lines: Sequence[str]) -> bool:
    """Whether these are a program; of a file of which some lines were kept, they may be none."""
    return _parsed(lines) is not None
