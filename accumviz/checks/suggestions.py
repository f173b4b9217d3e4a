"""Suggestions: the user's line as it is (`-`) and as it should be (`+`), beside one that stays.

A suggestion is empty where no line that was recorded is the one to change, and where it would break the code: the
line stands under a condition that the other place does not have, it is all of its block, or the function has no such
names as what is added or moved.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from textwrap import dedent
from typing import Any

from accumviz.ledger.events import Event
from accumviz.show import literal

# So many of the user's frames are kept at most: where longer call stacks meet is not known.
_KEPT = 4
# Says that a line does something at times only, or several things, or begins a block.
_CHOICE = re.compile(r"\b(if|for|and|or|lambda|else|with|while|try)\b|;|:\s*(#|$)")
# What counts micro-batches.
_COUNT = re.compile(r"%|sync_gradients")
_NAME = r"[A-Za-z_][\w.\[\]]*"
# No code ends a block: it is indented as far as any.
_FAR = 1000
# Syntax nodes that hold statements, each on its own lines.
_HEADS = (ast.Module, ast.stmt, ast.ExceptHandler)


def calling_line(event: Event, *others: Event) -> Event:
    """Place an event at the outermost of the user's lines that led to it, and to none of the others.

    A helper that does nothing but zero is not where zeroing too early is wrong: its caller is.

    >>> zero = Event(0, "zero_grad", file="a.py", line=2, frames=(("a.py", 2, "o.zero_grad()"), ("a.py", 9, "zero()")))
    >>> step = Event(1, "step", file="a.py", line=4, frames=(("a.py", 4, "o.step()"), ("a.py", 8, "step()")))
    >>> calling_line(zero, step).source
    'zero()'
    """
    frames = event.frames
    apart = len(frames)
    longest = len(frames)
    for other in others:
        apart = min(apart, _frames_apart(event, other))
        longest = max(longest, len(other.frames))
    never_met = apart == len(frames)
    if apart < 2 or (never_met and longest >= _KEPT):
        return event
    file, line, source = frames[apart - 1]
    return replace(event, file=file, line=line, source=source)


def _frames_apart(event: Event, other: Event) -> int:
    """Return how many of an event's innermost frames are above all that it shares with another event."""
    apart = len(event.frames)
    outermost = zip(reversed(event.frames), reversed(other.frames), strict=False)
    for frame, theirs in outermost:
        if frame[:2] != theirs[:2]:
            break
        apart -= 1
    return apart


def replaced(event: Event, line: str) -> str:
    """Write another line in the place of this one."""
    if not event.source or line == event.source:
        return ""
    removed = _marked("-", event.source)
    added = _marked("+", line)
    return f"{removed}\n{added}"


class _Function:
    """The function that a line is in, or all of a file that is held: its statements, and what each stands in."""

    def __init__(self, text: str, line: int) -> None:
        self.rows = _rows_of_function(text.splitlines(), line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = ast.parse("\n".join(self.rows))
        # Each statement, with the one that it stands in and the block that it is a part of.
        self._around: dict[Any, tuple[Any, list[Any]]] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, _HEADS):
                continue
            for _, block in ast.iter_fields(node):
                if isinstance(block, list):
                    self._around |= dict.fromkeys(block, (node, block))

    def statement(self, line: int) -> ast.stmt:
        """Return the innermost statement that a line is in. Raises `ValueError` where it is in none."""
        statements = [node for node in self._around if isinstance(node, ast.stmt)]
        at = [node for node in statements if line in _lines(node)]
        return min(at, key=lambda node: len(_lines(node)))

    def guards(self, line: int) -> dict[tuple[int, int], ast.stmt]:
        """Return what a line is reached under at times only, or in a way of its own: the innermost first.

        A key says at which line that is, and at which its branch begins.
        """
        node: Any = self.statement(line)
        guards = {}
        while node in self._around:
            node, block = self._around[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                break
            if not isinstance(node, ast.For):
                guards[node.lineno, block[0].lineno] = node
        return guards

    def is_all(self, node: ast.stmt) -> bool:
        """Return whether a statement is all of its block, so that nothing would be left without it."""
        around, block = self._around[node]
        return block == [node] and around is not self.tree

    def has_names(self, line: str) -> bool:
        """Return whether the names of another line are some of this function's."""
        return _names(ast.parse(line)) <= _names(self.tree)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _rows_of_function(rows: list[str], line: int) -> list[str]:
    """Return the lines of the function that a line is in, at their numbers; all lines where it is in none."""
    indent = _indent(rows[line - 1])
    for number in range(line - 2, -1, -1):
        row = rows[number]
        if _indent(row) >= indent:
            continue
        indent = _indent(row)
        if row.lstrip().startswith(("def ", "async def ")):
            last = number + 1
            while last < len(rows) and _indent(rows[last]) > indent:
                last += 1
            function = dedent("\n".join(rows[number:last]))
            return [""] * number + function.splitlines()
    return rows


def _indent(row: str) -> int:
    """Return how far a line of code is indented."""
    code = row.lstrip()
    if not code or code.startswith((")", "#")):
        return _FAR
    return len(row) - len(code)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)


def _or_nothing(suggest: Callable[..., str]) -> Callable[..., str]:
    """Suggest nothing where a line is not held, or is no statement of Python."""

    @wraps(suggest)
    def attempt(*arguments: Any, **options: Any) -> str:
        with suppress(LookupError, SyntaxError, ValueError):
            return suggest(*arguments, **options)
        return ""

    return attempt


class Code:
    """The user's files, as far as a ledger holds them: where a line may be added, and where it may be moved."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def _function(self, event: Event) -> _Function:
        return _Function(self._sources[event.file], event.line)

    def _only_of(self, event: Event, other: Event) -> list[ast.stmt]:
        """Return what one line is reached under, and another one is not: the innermost first."""
        guards = self._function(event).guards(event.line)
        shared: set[tuple[int, int]] = set()
        if event.file == other.file:
            shared.update(self._function(other).guards(other.line))
        return [node for at, node in guards.items() if at not in shared]

    @_or_nothing
    def removed(self, event: Event) -> str:
        """Take this line out."""
        function = self._function(event)
        node = function.statement(event.line)
        if function.is_all(node) or not _is_one_line(event, node):
            return ""
        return _marked("-", event.source)

    @_or_nothing
    def added(
        self,
        event: Event,
        line: str,
        *,
        below: bool = False,
    ) -> str:
        """Add a line above this one, or below it."""
        function = self._function(event)
        fits = _may_have_neighbours(event) and function.has_names(line)
        # Where it is there already, it does not help.
        around = function.rows[event.line - 2 : event.line + 1]
        indent = _indent(function.rows[event.line - 1])
        fits &= " " * indent + line not in around
        return _beside(event, [line], below) if fits else ""

    @_or_nothing
    def moved(
        self,
        event: Event,
        other: Event,
        *,
        below: bool,
    ) -> str:
        """Move this line above the other one, or below it, with a condition that is for it alone."""
        function = self._function(event)
        node = function.statement(event.line)
        is_call = _is_one_line(event, node) and isinstance(node, ast.Expr)
        fits = is_call and event.file == other.file and _may_have_neighbours(other)
        guards = self._only_of(event, other)
        if guards:
            node = function.statement(guards[0].lineno)
            alone = isinstance(node, ast.If) and len(_lines(node)) == 2
            fits &= alone and len(guards) == 1
        if function.is_all(node) or not fits:
            return ""
        rows = function.rows[node.lineno - 1 : node.end_lineno]
        texts = dedent("\n".join(rows)).splitlines()
        removed = _marked("-", *texts)
        added = _beside(other, texts, below)
        return _apart(removed, _lines(node), added, other)

    @_or_nothing
    def zeroed_below(
        self,
        step: Event,
        backward: Event,
        zero: Event | None = None,
    ) -> str:
        """Zero below a step what it has read, and not where `zero` does it now.

        A condition on the step's line must be a count: where a step is skipped for what is in `.grad`, that has to be
        erased all the same.
        """
        line = zeroing(step)
        counted = all(map(_is_count, self._only_of(step, backward)))
        fits = _is_call(step) and counted
        if not (fits and self._function(step).has_names(line)):
            return ""
        added = _beside(step, [line], below=True)
        if zero is None:
            return added
        removed = "" if self._only_of(zero, step) else self.removed(zero)
        lines = range(zero.line, zero.line + 1)
        return removed and _apart(removed, lines, added, step)


def _is_count(guard: ast.stmt) -> bool:
    """Return whether a condition counts micro-batches."""
    if not isinstance(guard, ast.If):
        return False
    return _COUNT.search(ast.unparse(guard.test)) is not None


def _marked(mark: str, *lines: str) -> str:
    return "\n".join(f"{mark} {literal(line)}" for line in lines)


def _beside(event: Event, added: list[str], below: bool) -> str:
    """Write lines that are added above a line, or below it."""
    line = f"  {literal(event.source)}"
    marked = _marked("+", *added)
    return f"{line}\n{marked}" if below else f"{marked}\n{line}"


def _apart(
    removed: str,
    lines: range,
    added: str,
    place: Event,
) -> str:
    """Write what is taken out and what comes in beside another place, with a mark for lines in between."""
    adjacent = place.line in (lines.start - 1, lines.stop)
    return f"{removed}\n{added}" if adjacent else f"{removed}\n  …\n{added}"


def _is_one_line(event: Event, node: ast.stmt) -> bool:
    """Return whether a statement is one call by itself, on one line."""
    return _is_simple(event) and len(_lines(node)) == 1


def _is_simple(event: Event) -> bool:
    """Return whether a line is one call by itself."""
    source = event.source
    whole = source.count("(") == source.count(")") and not source.endswith("…")
    return bool(source) and whole and not _CHOICE.search(source)


def _may_have_neighbours(event: Event) -> bool:
    """Return whether another line may stand beside this one.

    Where a library takes the steps, or lets a step wait for the end of a window, none may.
    """
    return _is_call(event) and not event.via.startswith("accelerate/")


def _is_call(event: Event) -> bool:
    """Return whether a line is one call by itself, and none in which a library takes the steps."""
    by_library = event.kind == "step" and event.via and "step(" not in event.source
    return _is_simple(event) and not by_library


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
    # A comment may say the loss's name as well.
    code = re.split(r"\s+#", event.source)[0]
    label = event.label
    # What is divided already was to be divided by something else.
    divisible = label and "/" not in label and "backward(" in code
    if not divisible or code.count(label) != 1:
        return ""
    before, after = event.source.split(label, 1)
    is_plain = re.fullmatch(rf"{_NAME}(\(.*\))?", label) is not None
    quotient = f"{label} / {by}" if is_plain else f"({label}) / {by}"
    if after.startswith("."):
        quotient = f"({quotient})"
    return replaced(event, f"{before}{quotient}{after}")


def divided_by_another(event: Event, number: int, by: str) -> str:
    """Divide the loss by this, where it is divided by a number, or by what has a name, in the same line."""
    divisions = re.findall(rf"/ *({_NAME}|\d+)", event.source)
    if len(divisions) != 1 or "backward(" not in event.source:
        return ""
    [divisor] = divisions
    if divisor.isdigit() and int(divisor) != number:
        return ""
    line = re.sub(rf"/ *{re.escape(divisor)}", f"/ {by}", event.source)
    return replaced(event, line)


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
    stepping, given = call.groups()
    by_scaler = given and "scaler" in stepping.lower()
    return f"{given if by_scaler else stepping}.zero_grad()"


def knows(event: Event, step: Event) -> bool:
    """Return whether a line has the names of a step's line: it is in the same call, or in one that the step makes."""
    return event.frames[1:] in (step.frames[1:], step.frames[:3])
