"""The user's code as a player shows it: only the stretches in which something happened."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Any

from accumviz.ledger.ledger import Event, Ledger

_WHOLE, _AROUND, _MOST = 48, 4, 400
# So many empty lines may stand between two definitions.
_EMPTY = 2
_TOKENS = re.compile(
    r"(?P<comment>#.*)|(?P<string>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')|(?P<keyword>\b(?:%s)\b)"
    % "|".join(keyword.kwlist)
)


def listing(
    ledger: Ledger, events: Sequence[Event]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Per file with events its name and lines, and each event's line: its place in all of them (-1: none).

    A line is its number and its parts, plain text and [kind, text] by turns; number 0 stands for
    lines left out. Without the file's text, the events' own lines are all there is.

    >>> from accumviz.ledger.ledger import Ledger
    >>> rows = [dict(kind="step", file="a.py", line=2, source="opt.step()")]
    >>> listing(one := Ledger.build([], rows), one.events)
    ([{'name': 'a.py', 'lines': [[2, 'opt.step()']]}], [0])
    """
    places: dict[str, dict[int, str]] = {}
    for event in events:
        if isinstance(event.line, int) and event.line > 0:
            places.setdefault(str(event.file), {}).setdefault(
                event.line, str(event.source)
            )
    files: list[dict[str, Any]] = []
    at: dict[tuple[str, int], int] = {}
    for file, lines in places.items():
        text = str(ledger.sources.get(file, "")).expandtabs(4).splitlines()
        shown = (
            _stretches(text, sorted(lines))
            if text
            else [(line, lines[line]) for line in sorted(lines)[:_MOST]]
        )
        before = sum(len(each["lines"]) for each in files)
        at |= {(file, n): before + i for i, (n, _) in enumerate(shown) if n}
        files.append(
            {"name": file, "lines": [[n, *parts(line[:400])] for n, line in shown]}
        )
    return files, [at.get((str(event.file), event.line), -1) for event in events]


def parts(line: str) -> list[Any]:
    """Split a line of Python where its look changes.

    >>> parts("if x:  # why")
    [['keyword', 'if'], ' x:  ', ['comment', '# why']]
    """
    found: list[Any] = []
    end = 0
    for token in _TOKENS.finditer(line):
        found += [line[end : token.start()]] if token.start() > end else []
        found.append([token.lastgroup, token[0]])
        end = token.end()
    return [*found, line[end:]] if end < len(line) else found


def _empty(text: list[str], line: int) -> bool:
    """Whether this line is code that was left out of the file: nobody writes so many empty lines in a row."""
    if text[line - 1].strip():
        return False
    first = last = line
    while first > 1 and not text[first - 2].strip():
        first -= 1
    while last < len(text) and not text[last].strip():
        last += 1
    return first == 1 or last == len(text) or last - first >= _EMPTY


def _stretches(text: list[str], lines: list[int]) -> list[tuple[int, str]]:
    wanted = {n for line in lines for n in range(line - _AROUND, line + _AROUND + 1)}
    if len(text) <= _WHOLE:
        wanted = set(range(1, len(text) + 1))
    elif lines[-1] - lines[0] <= _WHOLE:
        wanted = set(range(lines[0] - _AROUND, lines[-1] + _AROUND + 1))
    kept = [
        n
        for n in sorted(wanted)
        if 1 <= n <= len(text) and (n in lines or not _empty(text, n))
    ][:_MOST]
    shown: list[tuple[int, str]] = []
    for n in kept:
        if shown and n > shown[-1][0] + 1:
            shown.append((0, ""))
        shown.append((n, text[n - 1]))
    return shown
