"""The user's code as a player shows it: only the stretches in which something happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accumviz.ledger import Event, Ledger

_WHOLE, _AROUND, _MOST = 48, 4, 400


def listing(ledger: Ledger, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Per file with events: its name, and its lines as [number, text]; number 0 stands for lines left out.

    Without the file's text, the events' own lines are all there is.

    >>> from accumviz.ledger import Ledger
    >>> rows = [dict(kind="step", file="a.py", line=2, source="opt.step()")]
    >>> listing(one := Ledger.build([], rows), one.events)
    [{'name': 'a.py', 'lines': [[2, 'opt.step()']]}]
    """
    places: dict[str, dict[int, str]] = {}
    for event in events:
        if isinstance(event.line, int) and event.line > 0:
            places.setdefault(str(event.file), {}).setdefault(event.line, str(event.source))
    found = []
    for file, lines in places.items():
        text = str(ledger.sources.get(file, "")).expandtabs(4).splitlines()
        if not text:
            found.append({"name": file, "lines": [[line, lines[line]] for line in sorted(lines)]})
            continue
        found.append({"name": file, "lines": _stretches(text, sorted(lines))})
    return found


def _stretches(text: list[str], lines: list[int]) -> list[list[Any]]:
    wanted = {n for line in lines for n in range(line - _AROUND, line + _AROUND + 1)}
    if len(text) <= _WHOLE:
        wanted = set(range(1, len(text) + 1))
    elif lines[-1] - lines[0] <= _WHOLE:
        wanted = set(range(lines[0] - _AROUND, lines[-1] + _AROUND + 1))
    kept = sorted(n for n in wanted if 1 <= n <= len(text))[:_MOST]
    while kept and not text[kept[-1] - 1].strip() and kept[-1] not in lines:
        kept.pop()
    shown: list[list[Any]] = []
    for n in kept:
        if shown and shown[-1][0] and n > shown[-1][0] + 1:
            shown.append([0, ""])
        shown.append([n, text[n - 1][:400]])
    return shown
