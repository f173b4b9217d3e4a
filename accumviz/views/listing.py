"""List the user's code around the lines where something happened."""

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
            lines = places.setdefault(str(event.file), {})
            lines.setdefault(event.line, str(event.source))
    files: list[dict[str, Any]] = []
    at: dict[tuple[str, int], int] = {}
    before = 0
    for file, sources in places.items():
        text = str(ledger.sources.get(file, "")).expandtabs(4).splitlines()
        shown = _stretches(text, sorted(sources)) if text else sorted(sources.items())
        shown = shown[:_MOST]
        at |= {(file, n): before + i for i, (n, _) in enumerate(shown) if n}
        before += len(shown)
        told = [[n, *parts(line[:400])] for n, line in shown]
        files.append({"name": file, "lines": told})
    return files, [at.get((str(event.file), event.line), -1) for event in events]


def parts(line: str) -> list[Any]:
    """Split a line of Python where its look changes.

    >>> parts("if x:  # why")
    [['keyword', 'if'], ' x:  ', ['comment', '# why']]
    """
    pieces: list[Any] = []
    end = 0
    for token in _TOKENS.finditer(line):
        pieces += [line[end : token.start()], [token.lastgroup, token[0]]]
        end = token.end()
    return [piece for piece in [*pieces, line[end:]] if piece]


def _is_left_out(text: list[str], line: int) -> bool:
    """Whether this line is code that was left out of the file: no style has so many empty lines in a row."""
    if text[line - 1].strip():
        return False
    first = last = line
    while first > 1 and not text[first - 2].strip():
        first -= 1
    while last < len(text) and not text[last].strip():
        last += 1
    return first == 1 or last == len(text) or last - first >= _EMPTY


def _stretches(text: list[str], lines: list[int]) -> list[tuple[int, str]]:
    """The lines around these, all of a short file or stretch; between stretches a line with the number 0."""
    wanted = set(lines)
    for line in lines:
        wanted |= set(range(line - _AROUND, line + _AROUND + 1))
    if len(text) <= _WHOLE:
        wanted = set(range(1, len(text) + 1))
    elif lines[-1] - lines[0] <= _WHOLE:
        wanted = set(range(lines[0] - _AROUND, lines[-1] + _AROUND + 1))
    shown: list[tuple[int, str]] = []
    for n in sorted(wanted & set(range(1, len(text) + 1))):
        if n not in lines and _is_left_out(text, n):
            continue
        if shown and n > shown[-1][0] + 1:
            shown.append((0, ""))
        shown.append((n, text[n - 1]))
    return shown
