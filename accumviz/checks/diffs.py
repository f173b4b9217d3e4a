"""A cure as a diff of the file: its lines as they stand there, indented and whole, its hunks in the file's order."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A statement of more lines is not one call.
_LONGEST = 30


class _Hunk(NamedTuple):
    """What becomes of one statement: the file and its first line, and the rows of the diff about it."""

    file: str
    line: int
    rows: list[str]


def placed(cure: str, sources: Mapping[str, str]) -> str:
    """The cure with its lines as they stand in the files, so that `patch -p0` applies it.

    Rules write one row for one statement, without its indentation. Where the file's text was not
    kept, or says something else by now, the cure stays as they wrote it; where it would leave no
    program behind, there is none.

    >>> print(placed("--- a.py\\n+++ a.py\\n@@ -2 +2,2 @@\\n step()\\n+zero()", {"a.py": "while a:\\n    step()\\n"}))
    --- a.py
    +++ a.py
    @@ -2 +2,2 @@
         step()
    +    zero()
    """
    hunks = _hunks(cure)
    texts = {hunk.file: sources.get(hunk.file, "").split("\n") for hunk in hunks}
    stand = [_statement(texts[hunk.file], hunk) for hunk in hunks]
    if not all(stand):
        return cure
    # What is moved is written as it stands, not as its one row tells it.
    whole = {_old(hunk): rows for hunk, rows in zip(hunks, stand, strict=True) if hunk.rows[0][0] == "-"}
    new = [_rows(hunk, rows, whole) for hunk, rows in zip(hunks, stand, strict=True)]
    out: list[str] = []
    for file, text in texts.items():
        out += [f"--- {file}", f"+++ {file}"]
        after, offset = list(text), 0
        own = [
            (hunk.line, len(rows), made)
            for hunk, rows, made in zip(hunks, stand, new, strict=True)
            if hunk.file == file
        ]
        for line, length, made in sorted(own):
            put = [row[1:] for row in made if row[0] != "-"]
            after[line - 1 + offset : line - 1 + offset + length] = put
            out += [f"@@ -{_range(line, length)} +{_range(line + offset, len(put))} @@", *made]
            offset += len(put) - length
        if _reads(text) and not _reads(after):
            return ""
    return "\n".join(out)


def _hunks(cure: str) -> list[_Hunk]:
    found: list[_Hunk] = []
    file = ""
    for row in cure.splitlines():
        if row.startswith("--- "):
            file = row[4:]
        elif row.startswith("@@"):
            found.append(_Hunk(file, int(re.split(r"[ ,]", row)[1][1:]), []))
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
            begins = "".join(" ".join(lines).split()).startswith("".join(told.rstrip("…").split())[:20])
            return lines if one and begins else []
    return []


def _rows(hunk: _Hunk, stands: Sequence[str], whole: Mapping[str, list[str]]) -> list[str]:
    indent = stands[0][: len(stands[0]) - len(stands[0].lstrip())]
    found: list[str] = []
    for row in hunk.rows:
        if row[0] != "+":
            found += [row[0] + line for line in stands]
        else:
            moved = whole.get(row[1:])
            lines = textwrap.dedent("\n".join(moved)).split("\n") if moved else [row[1:]]
            found += [f"+{indent}{line}" for line in lines]
    return found


def _range(line: int, length: int) -> str:
    """Lines as a hunk's head tells them: of none, the one before."""
    return f"{line}" if length == 1 else f"{line},{length}" if length else f"{line - 1},0"


def _parsed(lines: Sequence[str]) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent("\n".join(lines)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _reads(lines: Sequence[str]) -> bool:
    """Whether these are a program; of a file of which some lines were kept, they may be none."""
    return _parsed(lines) is not None
