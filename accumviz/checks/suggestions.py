"""Suggestions: the user's line as it is (`-`) and as it should be (`+`), beside one that stays.

A suggestion is empty where no line that was recorded is the one to change, and where it would break the code: the
line stands under a condition that the other place does not have, the other place is not always reached, or the
function would not compile, or has no such names as what is added or moved.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from textwrap import dedent
from typing import Any, NamedTuple

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


class Line(NamedTuple):
    """A line of code: where it is, and its text."""

    file: str
    line: int
    text: str


class Code:
    """The user's files, as far as a ledger holds them: where a line may be added, and where it may be moved."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._rows = {file: text.splitlines() for file, text in sources.items()}

    def removed(self, event: Event) -> str:
        """Take this line out."""
        return self._edit_beside(event, [], taken=[_line(event)])

    def added_above(self, event: Event, line: str) -> str:
        """Add a line above this one."""
        return self._edit_beside(event, [line])

    def added_below(self, event: Event, line: str) -> str:
        """Add a line below this one."""
        return self._edit_beside(event, [line], below=True)

    def moved_above(self, event: Event, other: Event) -> str:
        """Move this line above the other one."""
        return self._moved(event, other, below=False)

    def moved_below(self, event: Event, other: Event) -> str:
        """Move this line below the other one."""
        return self._moved(event, other, below=True)

    def _moved(self, event: Event, other: Event, *, below: bool) -> str:
        block = self._block(event, other)
        texts = [line.text for line in block]
        return (
            self._edit_beside(other, texts, below=below, taken=block) if block else ""
        )

    def _edit_beside(self, event: Event, added: list[str], **how: Any) -> str:
        return self._edit(event, added, **how) if _place(event) else ""

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
        taken = []
        if zero is not None:
            if set(self._guards(zero)) - set(self._guards(step)) or not _simple(zero):
                return ""
            taken = [_line(zero)]
        return self._edit(step, [zeroing(step)], below=True, taken=taken)

    def _edit(
        self,
        place: Event,
        added: list[str],
        *,
        below: bool = False,
        taken: Sequence[Line] = (),
    ) -> str:
        """Add lines beside one that stays, and take some out; nothing where the code would not run."""
        lines = (_line(place), *taken)
        if not all(self._runs(at, place, added, below, taken) for at in lines):
            return ""
        rows = _marked("+", added)
        if added:
            rows = _beside(f"  {literal(place.source)}", rows, below)
        return "\n".join([*_marked("-", [line.text for line in taken]), *rows])

    def _runs(
        self,
        at: Line,
        place: Event,
        added: list[str],
        below: bool,
        taken: Sequence[Line],
    ) -> bool:
        """Return whether the function of a line compiles after an edit, and has all names."""
        rows = _function(self._rows.get(at.file, []), at.line)
        here = [line for line in taken if line.file == at.file and line.line in rows]
        if rows and at[:2] == (place.file, place.line):
            if not _has_names(rows, place.line, added, here):
                return False
            row = rows[place.line]
            texts = [row[: _indent(row)] + text for text in added]
            rows[place.line] = "\n".join(_beside(row, texts, below))
        for line in here:
            del rows[line.line]
        return _parsed(rows.values()) is not None

    def _block(self, event: Event, other: Event) -> list[Line]:
        """Return a line that is to stand beside another one, below the condition that it has and the other has not."""
        if not _simple(event):
            return []
        theirs = self._guards(other)
        guards = [guard for guard in self._guards(event) if guard not in theirs]
        if not guards:
            return [_line(event)]
        guard, *more = guards
        whole = guard.text.startswith("if ") and guard.text.endswith(":")
        if more or not whole or not self._is_alone(event, guard):
            return []
        return [guard, _line(event)._replace(text=f"    {event.source}")]

    def _guards(self, event: Event) -> list[Line]:
        """Return the conditions under which a line is reached, in its function: the innermost first."""
        rows = self._rows.get(event.file, [])[: event.line]
        guards: list[Line] = []
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
                guards.append(Line(event.file, number, code))
        return guards

    def _is_alone(self, event: Event, head: Line) -> bool:
        """Return whether a line is all that its condition is for."""
        rows = self._rows[event.file]
        above = "".join(rows[head.line : event.line - 1])
        below = next((row for row in rows[event.line :] if row.strip()), "")
        goes_on = _indent(below) > _indent(rows[head.line - 1])
        otherwise = below.lstrip().startswith(("else", "elif"))
        return not (above.strip() or goes_on or otherwise)


def _beside(line: str, added: list[str], below: bool) -> list[str]:
    return [line, *added] if below else [*added, line]


def _line(event: Event) -> Line:
    return Line(event.file, event.line, event.source)


def _function(rows: list[str], line: int) -> dict[int, str]:
    """Return the lines of the function that a line is in, by their numbers; all where it is in none."""
    first, last = 1, len(rows)
    if not 0 < line <= last:
        return {}
    indent = _indent(rows[line - 1])
    for number in range(line, 0, -1):
        row = rows[number - 1]
        if not _ends(row, indent - 1):
            continue
        indent = _indent(row)
        if row.lstrip().startswith(("def ", "async def ")):
            ends = [at for at in range(number, last) if _ends(rows[at], indent)]
            first, last = number, min(ends, default=last)
            break
    return dict(enumerate(rows[first - 1 : last], first))


def _ends(row: str, indent: int) -> bool:
    """Return whether a line of code stands no further to the right than this."""
    is_code = row.strip() and not row.lstrip().startswith((")", "#"))
    return bool(is_code) and _indent(row) <= indent


def _parsed(rows: Iterable[str]) -> ast.Module | None:
    """Return the tree of some lines; None where they do not compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(dedent("\n".join(rows)))
        except (SyntaxError, ValueError):
            return None


def _has_names(
    rows: Mapping[int, str], line: int, added: list[str], taken: list[Line]
) -> bool:
    """Return whether a function has the names of added lines, and those that move cross none that they need."""
    tree, block = _parsed(rows.values()), _parsed(added)
    if tree is None or block is None:
        return False
    first = min(rows)
    moved = {each.line - first + 1 for each in taken}
    span = sorted({line - first + 1, *moved})
    crossed = set(range(span[0], span[-1] + 1)) - moved
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound = arguments | _names(tree, ast.expr_context)
    return (
        _names(block, ast.Load) <= bound
        and not _names(tree, ast.Store, moved) & _names(tree, ast.expr_context, crossed)
        and not _names(tree, ast.Load, moved) & _names(tree, ast.Store, crossed)
    )


def _names(
    tree: ast.AST, context: type[ast.expr_context], lines: set[int] | None = None
) -> set[str]:
    """Return the names that code reads or binds, in these lines."""
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
        if lines is None or node.lineno in lines
    }


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
    is_plain = re.fullmatch(rf"{_NAME}(\(.*\))?", label) is not None
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
