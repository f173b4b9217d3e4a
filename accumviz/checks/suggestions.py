"""Suggestions: the user's line as it is (`-`) and as it should be (`+`), beside one that stays.

A suggestion is empty where no line that was recorded is the one to change, and where it would break the code: the
line stands under a condition that the other place does not have, or the other place is not always reached.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from accumviz.ledger.events import Event
from accumviz.show import literal

# So many of the user's frames are kept at most: where longer call stacks meet is not known.
_KEPT = 4
# Says that a line does something at times only, or several things, or begins a block.
_CHOICE = re.compile(r"\b(if|for|and|or|lambda|else|with|while|try)\b|;|:\s*(#|$)")
# What is done only at times, or in a way of its own; of that, what counts micro-batches.
_GUARD = re.compile(r"(if|elif|else|while|try|except|finally|with|match|case)\b")
_COUNT = re.compile(r"%|sync_gradients")
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


class Head(NamedTuple):
    """The line that begins a block: where it is, and its text."""

    line: int
    text: str


class Code:
    """The user's files, as far as a ledger holds them: where a line may be added, and where it may be moved."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._rows = {file: text.splitlines() for file, text in sources.items()}

    def removed(self, event: Event) -> str:
        """Take this line out."""
        return f"- {literal(event.source)}" if _place(event) else ""

    def added_above(self, event: Event, line: str) -> str:
        """Add a line above this one."""
        return f"+ {literal(line)}\n  {literal(event.source)}" if _place(event) else ""

    def added_below(self, event: Event, line: str) -> str:
        """Add a line below this one."""
        return f"  {literal(event.source)}\n+ {literal(line)}" if _place(event) else ""

    def moved_above(self, event: Event, other: Event) -> str:
        """Move this line above the other one."""
        block = self._block(event, other)
        if not block or not _place(other):
            return ""
        return "\n".join(
            [*_marked("-", block), *_marked("+", block), f"  {literal(other.source)}"]
        )

    def moved_below(self, event: Event, other: Event) -> str:
        """Move this line below the other one."""
        block = self._block(event, other)
        if not block or not _place(other):
            return ""
        return "\n".join(
            [*_marked("-", block), f"  {literal(other.source)}", *_marked("+", block)]
        )

    def zeroed_below(
        self, step: Event, backward: Event, zero: Event | None = None
    ) -> str:
        """Zero below a step what it has read, and not where `zero` does it now.

        A condition on the step's line must be a count: where a step is skipped for what is in `.grad`, that has to be
        erased all the same.
        """
        guards = set(self._guards(step)) - set(self._guards(backward))
        counted = all(_COUNT.search(guard.text) for guard in guards)
        is_call = _simple(step) and ("step(" in step.source or not step.via)
        if not counted or not is_call:
            return ""
        added = f"  {literal(step.source)}\n+ {literal(zeroing(step))}"
        if zero is None:
            return added
        guards = set(self._guards(zero)) - set(self._guards(step))
        if guards or not _simple(zero):
            return ""
        return f"- {literal(zero.source)}\n{added}"

    def _block(self, event: Event, other: Event) -> list[str]:
        """Return a line that is to stand beside another one, below the condition that it has and the other has not."""
        if not _simple(event):
            return []
        theirs = self._guards(other)
        guards = [guard for guard in self._guards(event) if guard not in theirs]
        if not guards:
            return [event.source]
        guard, *more = guards
        whole = guard.text.startswith("if ") and guard.text.endswith(":")
        if more or not whole or not self._is_alone(event, guard):
            return []
        return [guard.text, f"    {event.source}"]

    def _guards(self, event: Event) -> list[Head]:
        """Return the conditions under which a line is reached, in its function: the innermost first."""
        rows = self._rows.get(event.file, [])[: event.line]
        guards: list[Head] = []
        if not rows:
            return guards
        indent = _indent(rows[-1])
        for number, row in reversed(list(enumerate(rows, 1))):
            code = row.strip()
            if not code or code.startswith("#") or _indent(row) >= indent:
                continue
            indent = _indent(row)
            if code.startswith(("def ", "async def ", "class ")):
                break
            if _GUARD.match(code):
                guards.append(Head(number, code))
        return guards

    def _is_alone(self, event: Event, head: Head) -> bool:
        """Return whether a line is all that its condition is for."""
        rows = self._rows[event.file]
        above = [row for row in rows[head.line : event.line - 1] if row.strip()]
        below = [row for row in rows[event.line :] if row.strip()]
        indent = _indent(rows[head.line - 1])
        ends = not below or _indent(below[0]) <= indent
        otherwise = ends and below and below[0].strip().startswith(("else", "elif"))
        return not above and ends and not otherwise


def _indent(row: str) -> int:
    """Return how far a line is indented."""
    return len(row) - len(row.lstrip())


def _marked(mark: str, lines: list[str]) -> list[str]:
    return [f"{mark} {literal(line)}" for line in lines]


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
    >>> print(divided(Event(0, "backward", "(a - b).mean()", "a.py", 3, "(a - b).mean().backward()"), "4"))
    - (a - b).mean().backward()
    + (((a - b).mean()) / 4).backward()
    """
    label = event.label
    # What is divided already was to be divided by something else.
    if not label or "/" in label or event.source.count(label) != 1:
        return ""
    before, after = event.source.split(label)
    enclosed = before.endswith("(") and after.startswith(")")
    called = enclosed and not re.search(r"\w\($", before)
    is_plain = re.fullmatch(rf"{_NAME}(\(.*\))?", label) is not None
    if called and not is_plain:
        return replaced(event, f"{before[:-1]}(({label}) / {by}){after[1:]}")
    quotient = f"{label} / {by}" if is_plain else f"({label}) / {by}"
    if not enclosed and after.startswith("."):
        quotient = f"({quotient})"
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


def knows(event: Event, step: Event) -> bool:
    """Return whether a line has the names of a step's line: it is in the same call, or in one that the step makes."""
    around = event.frames[1:]
    same_call = around in (step.frames[1:], step.frames[:3])
    return same_call or ("self." in event.source and "self." in step.source)
