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
        source = str(ledger.sources.get(file, ""))
        text = source.expandtabs(4).splitlines()
        shown = sorted(sources.items())
        if text:
            shown = _stretches(text, sorted(sources))
        written = []
        for n, line in shown[:_MOST]:
            if n:
                at[file, n] = before
            before += 1
            written.append([n, *parts(line[:400])])
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


def _is_left_out(text: list[str], line: int) -> bool:
    """Return whether this line is code that was left out of the file: no style has so many empty lines in a row."""
    if text[line - 1].strip():
        return False
    first = last = line
    while first > 1 and not text[first - 2].strip():
        first -= 1
    while last < len(text) and not text[last].strip():
        last += 1
    return first == 1 or last == len(text) or last - first >= _EMPTY


def _stretches(text: list[str], lines: list[int]) -> list[tuple[int, str]]:
    """Return the lines around these, all of a short file or stretch; between stretches a line with the number 0."""
    near: set[int] = set()
    for line in lines:
        near.update(range(line - _AROUND, line + _AROUND + 1))
    is_short = len(text) <= _WHOLE
    is_stretch = lines[-1] - lines[0] <= _WHOLE
    shown: list[tuple[int, str]] = []
    last = 0
    for n, source in enumerate(text, 1):
        is_between = is_stretch and lines[0] < n < lines[-1]
        if not (is_short or is_between or n in near):
            continue
        if n not in lines and _is_left_out(text, n):
            continue
        if last and n > last + 1:
            shown.append((0, ""))
        shown.append((n, source))
        last = n
    return shown
