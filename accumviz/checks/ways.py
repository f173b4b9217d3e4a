"""By which of the user's lines an event came about: where its way and those of others part, it goes on alone.

A helper function that does nothing but zero is not where zeroing too early is wrong: its caller is. Of longer ways than
are kept, that is known only where two of them meet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from accumviz.ledger.events import Event

# So many of the user's frames are kept at most: of longer ways the beginning is not known.
_KEPT = 4


class Way(NamedTuple):
    """An event at the line that leads to it alone, and the step at its line in the same function.

    `together` says whether there is such a function.
    """

    at: Event
    step: Event
    together: bool


def alone(event: Event, step: Event, *others: Event) -> Way:
    """The outermost line of the user's that led to an event, and not to the step or to others; or its own line.

    >>> zero = Event(0, "zero_grad", file="a.py", line=2, frames=(("a.py", 2, "o.zero_grad()"), ("a.py", 9, "zero()")))
    >>> step = Event(1, "step", file="a.py", line=4, frames=(("a.py", 4, "o.step()"), ("a.py", 8, "step()")))
    >>> way = alone(zero, step)
    >>> way.at.source, way.step.source, way.together
    ('zero()', 'step()', True)
    """
    own = [frame[:2] for frame in event.frames]
    ways = [[frame[:2] for frame in other.frames] for other in (step, *others)]
    found = [_meeting(own, way) for way in ways]
    if not any(found) and max(map(len, (own, *ways))) >= _KEPT:
        return Way(event, step, together=True)  # where they part, is not known
    meets = min((meeting[0] for meeting in found if meeting), default=len(own))
    if not meets:  # one line does it all, or there is none
        return Way(event, step, together=True)
    at, inside = _at(event, meets - 1), found[0]
    place = (
        inside[1]
        if inside and inside[0] == meets
        else 0
        if any(found)
        else len(ways[0])
    )
    if not place or ways[0][place - 1][0] != at.file:
        return Way(at, step, together=False)
    return Way(at, _at(step, place - 1), together=True)


def _meeting(
    own: list[tuple[str, int]], other: list[tuple[str, int]]
) -> tuple[int, int] | None:
    """The places of the innermost line that both ways have, and all around it; None where they have none.

    One line alone may be a wrapper's, which calls whatever it was given.
    """
    for i, frame in enumerate(own):
        for j, their in enumerate(other):
            if frame == their and all(
                a == b for a, b in zip(own[i:], other[j:], strict=False)
            ):
                return i, j
    return None


def _at(event: Event, place: int) -> Event:
    """An event at one of the lines that led to it."""
    if not place:
        return event
    file, line, source = event.frames[place]
    return replace(event, file=file, line=line, source=source)
