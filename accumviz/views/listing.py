"""List the user's code around the lines where something happened."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Any

from accumviz.ledger.ledger import Event, Ledger

# Lines: of a file that is shown whole, around one with an event, of all that is shown, in one line.
_WHOLE = 48
_AROUND = 4
_MOST = 400
_LONGEST = 400
# So many empty lines may stand between two definitions.
_MOST_EMPTY = 2
_TOKENS = re.compile(
    r"(?P<comment>#.*)|(?P<string>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')|(?P<keyword>\b(?:%s)\b)"
    % "|".join(keyword.kwlist)
)


# What is shown of a file: its `name` and `lines`.
Shown = dict[str, Any]
# A line, and its number.
Line = tuple[int, str]


def listing(ledger: Ledger, events: Sequence[Event]) -> tuple[list[Shown], list[int]]:
    """Return per file with events its name and lines, and each event's line: its place in all of them (-1: none).

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
    files: list[Shown] = []
    at = {}
    before = 0
    for file, sources in places.items():
        shown = sorted(sources.items())
        text = str(ledger.sources.get(file, ""))
        if text:
            shown = _stretches(text.expandtabs(4).splitlines(), sorted(sources))
        written = []
        for n, line in shown[:_MOST]:
            at[file, n] = before
            before += 1
            pieces = parts(line[:_LONGEST])
            written.append([n, *pieces])
        files.append({"name": file, "lines": written})
    places_of = []
    for event in events:
        place = str(event.file), event.line
        places_of.append(at.get(place, -1))
    return files, places_of


def parts(line: str) -> list[Any]:
    """Split a line of Python where its look changes.

    >>> parts("if x:  # why")
    [['keyword', 'if'], ' x:  ', ['comment', '# why']]
    """
    pieces: list[Any] = []
    end = 0
    for token in _TOKENS.finditer(line):
        pieces.append(line[end : token.start()])
        pieces.append([token.lastgroup, token[0]])
        end = token.end()
    pieces.append(line[end:])
    return [piece for piece in pieces if piece]


def _stretches(text: list[str], lines: list[int]) -> list[Line]:
    """Return the lines around these, all of a short file or stretch; between stretches a line with the number 0."""
    near: set[int] = set()
    for line in lines:
        near.update(range(line - _AROUND, line + _AROUND + 1))
    if len(text) <= _WHOLE:
        near.update(range(len(text) + 1))
    elif lines[-1] - lines[0] <= _WHOLE:
        near.update(range(lines[0], lines[-1]))
    shown: list[Line] = []
    last = 0
    for n in sorted(near - _left_out(text)):
        if not 0 < n <= len(text):
            continue
        if last and n > last + 1:
            shown.append((0, ""))
        shown.append((n, text[n - 1]))
        last = n
    return shown


def _left_out(text: list[str]) -> set[int]:
    """Return the lines of code that was left out of a file: no style has so many empty lines in a row."""
    gaps: set[int] = set()
    empty: list[int] = []
    for n, line in enumerate([*text, "end"], 1):
        if not line.strip():
            empty.append(n)
            continue
        if len(empty) > _MOST_EMPTY:
            gaps.update(empty)
        empty = []
    return gaps
