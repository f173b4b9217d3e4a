"""Suggestions: the user's line as it is (`-`) and as it should be (`+`), beside one that stays.

A suggestion is empty where no line that was recorded is the one to change.
"""

from __future__ import annotations

import re
from dataclasses import replace

from accumviz.ledger.events import Event
from accumviz.show import literal

# So many of the user's frames are kept at most: where longer call stacks meet is not known.
_KEPT = 4
# Says that a line does something at times only, or several things, or begins a block.
_CHOICE = re.compile(r"\b(if|for|and|or|lambda|else|with|while|try)\b|;|:\s*(#|$)")
_NAME = r"[A-Za-z_][\w.\[\]]*"


def calling_line(event: Event, *others: Event) -> Event:
    """Place an event at the outermost of the user's lines that led to it, and to none of the others.

    A helper that does nothing but zero is not where zeroing too early is wrong: its caller is.

    >>> zero = Event(0, "zero_grad", file="a.py", line=2, frames=(("a.py", 2, "o.zero_grad()"), ("a.py", 9, "zero()")))
    >>> step = Event(1, "step", file="a.py", line=4, frames=(("a.py", 4, "o.step()"), ("a.py", 8, "step()")))
    >>> calling_line(zero, step).source
    'zero()'
    """
    frames = event.frames
    meetings = [_first_frame_in_common(event, other) for other in others]
    meeting = min(meetings, default=len(frames))
    longest = max(len(each.frames) for each in (event, *others))
    if meeting < 2 or (meeting == len(frames) and longest >= _KEPT):
        return event
    file, line, source = frames[meeting - 1]
    return replace(event, file=file, line=line, source=source)


def _first_frame_in_common(event: Event, other: Event) -> int:
    """Return the place of the innermost frame that two events share, with all around it; else how many there are."""
    mine = [frame[:2] for frame in event.frames]
    theirs = [frame[:2] for frame in other.frames]
    for place, frame in enumerate(mine):
        if frame in theirs:
            around = theirs[theirs.index(frame) :]
            pairs = zip(mine[place:], around, strict=False)
            if all(one == another for one, another in pairs):
                return place
    return len(mine)


def replaced(event: Event, line: str) -> str:
    """Write another line in the place of this one."""
    if not event.source or line == event.source:
        return ""
    return f"- {literal(event.source)}\n+ {literal(line)}"


def added_above(event: Event, line: str) -> str:
    """Add a line above this one."""
    return f"+ {literal(line)}\n  {literal(event.source)}" if _place(event) else ""


def added_below(event: Event, line: str) -> str:
    """Add a line below this one."""
    return f"  {literal(event.source)}\n+ {literal(line)}" if _place(event) else ""


def moved_above(event: Event, other: Event) -> str:
    """Move this line above the other one."""
    return _moved(event, added_above(other, event.source))


def moved_below(event: Event, other: Event, line: str = "") -> str:
    """Move this line below the other one, or write there what means the same."""
    return _moved(event, added_below(other, line or event.source))


def _moved(event: Event, added: str) -> str:
    return f"- {literal(event.source)}\n{added}" if _simple(event) and added else ""


def _simple(event: Event) -> bool:
    """Whether a line is one call by itself."""
    source = event.source
    whole = source.count("(") == source.count(")") and not source.endswith("…")
    return bool(source) and whole and not _CHOICE.search(source)


def _place(event: Event) -> bool:
    """Whether another line may stand beside this one.

    Where a library takes the steps, or lets a step wait for the end of a window, none may.
    """
    by_library = event.kind == "step" and event.via and "step(" not in event.source
    waits = event.via.startswith("accelerate/")
    return _simple(event) and not by_library and not waits


def divided(event: Event, by: str) -> str:
    """Divide the loss on which `backward` is called.

    >>> print(divided(Event(0, "backward", "loss", "a.py", 3, "scaler.scale(loss).backward()"), "4"))
    - scaler.scale(loss).backward()
    + scaler.scale(loss / 4).backward()
    >>> print(divided(Event(0, "backward", "a + b", "a.py", 3, "(a + b).backward()"), "4"))
    - (a + b).backward()
    + ((a + b) / 4).backward()
    """
    label = event.label
    # What is divided already was to be divided by something else.
    if not label or "/" in label or event.source.count(label) != 1:
        return ""
    before, after = event.source.split(label)
    enclosed = before.endswith("(") and after.startswith(")")
    called = enclosed and not re.search(r"\w\($", before)
    if re.fullmatch(rf"{_NAME}(\(.*\))?", label):
        quotient = f"{label} / {by}"
        if not enclosed and after.startswith("."):
            quotient = f"({quotient})"
    elif called:
        return replaced(event, f"{before[:-1]}(({label}) / {by}){after[1:]}")
    else:
        quotient = f"({label}) / {by}"
    return replaced(event, f"{before}{quotient}{after}")


def divided_by_another(event: Event, number: int, by: str) -> str:
    """Divide the loss by this, where it is divided by a number, or by what has a name, in the same line."""
    divisions = re.findall(rf"/ *({_NAME}|\d+)", event.source)
    if len(divisions) != 1 or (divisions[0].isdigit() and int(divisions[0]) != number):
        return ""
    return replaced(event, re.sub(rf"/ *({_NAME}|\d+)", f"/ {by}", event.source))


def zeroing(step: Event) -> str:
    """Write the line that zeroes what this step has read.

    >>> zeroing(Event(0, "step", source="scaler.step(optimizer)")), zeroing(Event(0, "step", source="self.opt.step()"))
    ('optimizer.zero_grad()', 'self.opt.zero_grad()')
    >>> zeroing(Event(0, "step", source="self.opt.step(closure)"))
    'self.opt.zero_grad()'
    """
    call = re.search(rf"({_NAME})\.step\(\s*({_NAME})?", step.source)
    if call is None:
        return "optimizer.zero_grad()"
    stepping, given = call[1], call[2]
    by_scaler = given and "scaler" in stepping.lower()
    return f"{given if by_scaler else stepping}.zero_grad()"
