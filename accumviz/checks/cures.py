"""Cures: small diffs of the user's own lines, one row a line; empty where none is known, or it says several things."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from accumviz.checks.diffs import BEHIND_LOOP
from accumviz.ledger.events import Event

# Its steps stand in the user's loop, and step at the end of a window only.
_PACED = "accelerate/"
# With these words begins a line that is a part of a block.
_BLOCK = re.compile(
    r"(async|class|def|elif|else|except|finally|for|if|try|while|with)\b|case (?!=)"
)
# What is called in these is called at times only, several times or later.
_CHOOSING = (
    ast.IfExp,
    ast.BoolOp,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def _theirs(event: Event) -> bool:
    """Whether a library takes the steps: no line of the user's can stand beside them."""
    return event.kind == "step" and bool(event.via) and "step(" not in event.source


def _simple(event: Event) -> bool:
    """Whether its line is one statement, or one call of several lines: another may stand beside it, or it elsewhere."""
    tree = _parsed(event.source)
    if tree is None:
        return not _head(event)
    return len(tree.body) == 1 and not hasattr(tree.body[0], "body")


def _head(event: Event) -> bool:
    """Whether a line that is no program by itself begins a block, or goes on with one, as `else: step()` does."""
    return event.source.partition("#")[0].rstrip().endswith(":") or bool(
        _BLOCK.match(event.source)
    )


def _open(event: Event) -> bool:
    """Whether its line begins a block and ends it, or does something at times only: what stands below is outside."""
    tree = _parsed(event.source)
    return (
        _head(event)
        if tree is None
        else any(hasattr(each, "body") for each in tree.body) or _chosen(event, tree)
    )


def _chosen(event: Event, tree: ast.Module) -> bool:
    """Whether an expression says when the event's call is made, as `step() if last else None` does."""
    mine = _calls(tree, event.kind) or _calls(tree)
    return any(
        isinstance(each, _CHOOSING) and set(mine) & set(_calls(each))
        for each in ast.walk(tree)
    )


def _calls(tree: ast.AST, name: str = "") -> list[ast.Call]:
    """The calls of what has this in its name."""
    return [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Call) and name in _name(each.func)
    ]


def _spot(event: Event) -> int | None:
    """Where in a line that is guarded or has several statements the event's own begins; None if that is not sure."""
    tree = _parsed(event.source)
    if tree is None or not tree.body or _chosen(event, tree):
        return None
    body = (
        tree.body[0].body if isinstance(tree.body[0], ast.If | ast.With) else tree.body
    )
    first = min((call.col_offset for call in _calls(tree, event.kind)), default=-1)
    # Behind another backward, it may be the second such call that is meant.
    if any(hasattr(each, "body") for each in body) or any(
        b.col_offset > first for b in _calls(tree, "backward")
    ):
        return None
    found = [each.col_offset for each in body if each.col_offset <= first]
    return _column(event.source, found[-1]) if found else None


def replaced(event: Event, *lines: str) -> str:
    """The cure that writes other lines in the place of this one."""
    if not event.source or lines == (event.source,):
        return ""
    name = event.file or "your code"
    length = f",{len(lines)}" if len(lines) > 1 else ""
    inside = "\n".join(f"+{line}" for line in lines)
    return f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line}{length} @@\n-{event.source}\n{inside}"


def added(after: Event, *lines: str) -> str:
    """The cure that adds lines below this one."""
    if not after.source or not lines or _theirs(after) or _open(after):
        return ""
    name = after.file or "your code"
    inside = "\n".join(f"+{line}" for line in lines)
    return f"--- {name}\n+++ {name}\n@@ -{after.line} +{after.line},{len(lines) + 1} @@\n {after.source}\n{inside}"


def inserted(before: Event, line: str) -> str:
    """The cure that adds a line above this one."""
    name, hunk = before.file or "your code", _above(before, line)
    return f"--- {name}\n+++ {name}\n{hunk}" if hunk else ""


def _above(event: Event, line: str) -> str:
    """The hunk that puts a line above this one; into it, where it is guarded or not alone; empty if neither can be."""
    if not event.source:
        return ""
    spot, tree = _spot(event), _parsed(line)
    if spot == 0 or (_simple(event) and not _open(event)):
        return f"@@ -{event.line} +{event.line},2 @@\n+{line}\n {event.source}"
    if spot is None or tree is None:
        return ""
    end = _column(line, tree.body[-1].end_col_offset or 0)
    comment = "".join(f"  {said}" for said in [line[end:].strip(" ;")] if said)
    into = f"{event.source[:spot]}{line[:end]}; {event.source[spot:]}{comment}"
    return f"@@ -{event.line} +{event.line} @@\n-{event.source}\n+{into}"


def removed(event: Event) -> str:
    """The cure that takes this line away."""
    if not event.source or not _simple(event):
        return ""
    return _away(event)


def moved(event: Event, after: Event, meaning: str = "") -> str:
    """The cure that puts this line below the other one, or what means the same there."""
    if (
        not event.source
        or not after.source
        or after.via.startswith(_PACED)
        or not _simple(event)
        or _open(after)
    ):
        return ""
    if _theirs(after):
        return removed(event)
    away, line = _away(event), meaning or event.source
    return f"{away}{_elsewhere(event, after)}\n@@ -{after.line} +{after.line},2 @@\n {after.source}\n+{line}"


def _away(event: Event) -> str:
    name = event.file or "your code"
    return f"--- {name}\n+++ {name}\n@@ -{event.line} +{event.line - 1},0 @@\n-{event.source}"


def _elsewhere(event: Event, other: Event) -> str:
    """The head of what is changed in another file."""
    name = other.file or "your code"
    return f"\n--- {name}\n+++ {name}" if name != (event.file or "your code") else ""


class _Loss(NamedTuple):
    """Where the expression of a loss stands in its line, and whether something is called on it."""

    line: str
    node: ast.expr
    start: int
    stop: int
    called: bool

    @property
    def text(self) -> str:
        return self.line[self.start : self.stop]

    def part(self, node: ast.expr) -> str:
        """The text of a part of it."""
        return ast.get_source_segment(self.line, node) or ast.unparse(node)

    def put(self, text: str, *, whole: bool = False) -> str:
        """The line with another text there; `whole`: one that needs no parentheses."""
        before, after = self.line[: self.start], self.line[self.stop :]
        enclosed = before.rstrip().endswith("(") and after.lstrip().startswith(")")
        if whole and enclosed and not re.search(r"[\w\])]\s*\($", before):
            return before.rstrip()[:-1] + text + after.lstrip()[1:]
        return (
            f"{before}({text}){after}"
            if self.called and not whole and not enclosed
            else before + text + after
        )


def _loss(event: Event) -> _Loss | None:
    """The loss in the line of its backward; None where that is not the one thing which its label can mean."""
    line = event.source
    tree = _parsed(line)
    if tree is None or not event.label:
        return None
    named = [
        (node, called)
        for node, called in _arguments(tree)
        if event.label in _labels(node)
    ]
    found = [
        (_inside(node), called and _inside(node) is node) for node, called in named
    ]
    if len(found) != 1:
        return None
    node, called = found[0]
    if (
        node.end_lineno != 1
        or node.end_col_offset is None
        or isinstance(node, ast.List | ast.Tuple | ast.Starred)
    ):
        return None
    if any(isinstance(part, ast.IfExp | ast.BoolOp) for part in ast.walk(node)):
        return None  # what is divided on one way only
    start, stop = (_column(line, at) for at in (node.col_offset, node.end_col_offset))
    return _Loss(line, node, start, stop, called)


def _column(line: str, at: int) -> int:
    """A place that syntax counts in bytes, in characters."""
    return len(line.encode()[:at].decode())


def _arguments(tree: ast.Module) -> Iterator[tuple[ast.expr, bool]]:
    """What `backward` is called on, and whether as a method; or what it is given."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or "backward" not in _name(call.func):
            continue
        if isinstance(call.func, ast.Attribute):
            yield call.func.value, True
        yield from (
            (value, False)
            for value in (*call.args, *(keyword.value for keyword in call.keywords))
        )


def _inside(node: ast.expr) -> ast.expr:
    """What a gradient scaler is given, and the one thing in a list; anything else itself."""
    if (
        isinstance(node, ast.Call)
        and _name(node.func) == "scale"
        and len(node.args) == 1
    ):
        return node.args[0]
    return (
        node.elts[0]
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) == 1
        else node
    )


def _labels(node: ast.expr) -> tuple[str, str]:
    return ast.unparse(node), ast.unparse(_inside(node))


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    )


def _parsed(line: str) -> ast.Module | None:
    try:
        return ast.parse(line)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_TIGHT = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def _by(loss: _Loss, node: ast.expr, by: str) -> str:
    """A part of the loss, divided."""
    text = loss.part(node)
    product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
    return (
        f"{text} / {by}"
        if product or isinstance(node, (*_TIGHT, ast.UnaryOp))
        else f"({text}) / {by}"
    )


def _quotient(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """What is divided and by what, where that is the last thing done."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "div"
    ):
        return (
            (node.func.value, node.args[0])
            if len(node.args) == 1 and not node.keywords
            else None
        )
    division = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return (node.left, node.right) if division and isinstance(node, ast.BinOp) else None


def _may_be(node: ast.expr, many: int) -> bool:
    """Whether a divisor may be this number: it is, or it has a name."""
    return not isinstance(node, ast.Constant) or node.value == many


def divided(event: Event, by: str) -> str:
    """The cure that divides the loss on which `backward` is called.

    >>> print(divided(Event(0, "backward", "loss", "a.py", 3, "scaler.scale(loss).backward()"), "4").splitlines()[-1])
    +scaler.scale(loss / 4).backward()
    >>> print(divided(Event(0, "backward", "a + b", "a.py", 3, "(a + b).backward()"), "4").splitlines()[-1])
    +((a + b) / 4).backward()
    """
    loss = _loss(event)
    # What is divided already was to be divided by something else.
    if loss is None or _quotient(loss.node):
        return ""
    return replaced(event, loss.put(_by(loss, loss.node, by)))


def divided_by_another(event: Event, many: int, by: str) -> str:
    """The cure that divides the loss by this, and not by a number of micro-batches as it is now."""
    loss = _loss(event)
    if loss is None:
        return ""
    quotient = _quotient(loss.node)
    if quotient and _may_be(quotient[1], many):
        return replaced(event, loss.put(_by(loss, quotient[0], by)))
    # It was divided before this line, or multiplied by what is as good.
    return replaced(
        event,
        loss.put(_by(loss, loss.node, by).replace(f" / {by}", f" * {many} / {by}")),
    )


def undivided(event: Event, many: int) -> str:
    """The cure that takes one division by this number away.

    >>> print(undivided(Event(0, "backward", "loss.div(4)", "a.py", 3, "loss.div(4).backward()"), 4).splitlines()[-1])
    +loss.backward()
    """
    loss = _loss(event)
    quotient = _quotient(loss.node) if loss else None
    if loss is None or quotient is None or not _may_be(quotient[1], many):
        return ""
    return replaced(
        event, loss.put(loss.part(quotient[0]), whole=isinstance(quotient[0], _TIGHT))
    )


def summed(event: Event, by: str, about: str, *, sums: bool) -> str:
    """The cure that divides a sum by this, in the place of a mean; `about` says what that is, `sums` if it is one.

    >>> event = Event(0, "backward", "loss.div(4)", "a.py", 3, "loss.div(4).backward()")
    >>> print(summed(event, "tokens", "counted", sums=False).split("\\n", 4)[4])
    +# loss with reduction="sum", undivided; counted
    +(loss / tokens).backward()
    """
    loss = _loss(event)
    if loss is None:
        return ""
    node = loss.node
    while (quotient := _quotient(node)) is not None:
        node = quotient[0]
    if isinstance(node, ast.BinOp):  # which of its factors was the divisor is not known
        return ""
    said = (
        f"# {about}"
        if sums
        else f'# {loss.part(node)} with reduction="sum", undivided; {about}'
    )
    return replaced(event, said, loss.put(_by(loss, node, by)))


def zeroing(step: Event) -> str:
    """The line that zeroes what this step has read.

    >>> zeroing(Event(0, "step", source="scaler.step(optimizer)")), zeroing(Event(0, "step", source="self.opt.step()"))
    ('optimizer.zero_grad()', 'self.opt.zero_grad()')
    >>> zeroing(Event(0, "step", "opt", source="self.opt.step(closure)"))
    'self.opt.zero_grad()'
    """
    return f"{_stepped(step)}.zero_grad()"


def _stepped(step: Event) -> str:
    """The name of the optimizer in the line of its step."""
    given = re.search(r"\.step\(\s*([A-Za-z_][\w.\[\]]*)\s*\)", step.source)
    own = re.search(r"([A-Za-z_][\w.\[\]]*)\.step\(", step.source)
    # A scaler is given the optimizer, and an optimizer a closure.
    if own and own[1].split(".")[-1] == step.label.partition("#")[0].split(".")[-1]:
        return own[1]
    return given[1] if given else own[1] if own else "optimizer"


def _stepping(step: Event) -> str:
    """The name of what is asked to step an optimizer, as a scaler is; empty where it steps by itself.

    >>> _stepping(Event(0, "step", source="scaler.step(optimizer)")), _stepping(Event(0, "step", source="opt.step()"))
    ('scaler', '')
    """
    found = re.search(r"([A-Za-z_][\w.\[\]]*)\.step\(\s*[A-Za-z_]", step.source)
    return found[1] if found and found[1] != _stepped(step) else ""


# A step after the loop would read what each rank has by itself: no line there mends it.
UNAVERAGED = (
    " What was left is not averaged over the ranks: the last micro-batch of an epoch "
    "has to synchronise, and step."
)


def flushed(step: Event, divided_by: int) -> str:
    """The cure that steps once more behind the loop; `divided_by`: what its losses are divided by and should not be."""
    lines = []
    if divided_by:
        lines += [
            f'for p in [p for group in {_stepped(step)}.param_groups for p in group["params"] if p.grad is not None]:',
            f"    p.grad *= {divided_by} / micro_batches_left",
        ]
    lines.append(step.source)
    scaler = _stepping(step)
    lines += [f"{scaler}.update()"] if "scaler" in scaler.lower() else []
    lines += [] if "zero_grad(" in step.source else [zeroing(step)]
    block = ["if micro_batches_left:", *(f"    {line}" for line in lines)]
    return added(step, *block).replace(" @@\n", f" @@ {BEHIND_LOOP}\n")


def before(at: Event, end: Event) -> str:
    """The cure that takes a line from where it stands, and puts it above the step's."""
    if (
        not at.source
        or not end.source
        or at.line == end.line
        or end.via.startswith(_PACED)
        or not _simple(at)
    ):
        return ""
    if _theirs(end):
        return removed(at)
    hunk = _above(end, at.source)
    return f"{_away(at)}{_elsewhere(at, end)}\n{hunk}" if hunk else ""


def taken_over(step: Event, scaler: str, *, updated: bool) -> str:
    """The cure that lets a scaler take a step, and update itself behind it where it is `updated` nowhere."""
    own, takes = r"([A-Za-z_][\w.\[\]]*)\.step\(\s*\)", rf"{scaler}.step(\1)"
    alone = _simple(step) and not _open(step)
    if not re.search(own, step.source) or not (
        updated or alone or _spot(step) is not None
    ):
        return ""
    within = "" if updated or alone else f"; {scaler}.update()"
    below = [f"{scaler}.update()"] if alone and not updated else []
    return replaced(step, re.sub(own, takes + within, step.source, count=1), *below)


def guarded(schedule: Event, step: Event) -> str:
    """The cure that lets a scheduler step only where the scaler has not skipped: then its scale is not lower."""
    scaler = _stepping(step)
    if not schedule.source or not scaler or not _simple(schedule) or not _simple(step):
        return ""
    noted = inserted(step, f"scale_before_update = {scaler}.get_scale()")
    if not noted:
        return ""
    asked = replaced(
        schedule,
        f"if {scaler}.get_scale() >= scale_before_update:",
        f"    {schedule.source}",
    )
    return (
        f"{noted}{_elsewhere(step, schedule)}\n"
        + asked.partition("\n")[2].partition("\n")[2]
    )
