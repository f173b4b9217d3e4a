"""What the scripts say of themselves, as far as their lines were kept: which numbers they hold, what they count by."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import cached_property

from accumviz.ledger.events import Event
from accumviz.ledger.gains import number


class Scripts:
    """The texts of the scripts, by file; of which those lines may be empty that no event needed."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources

    @cached_property
    def trees(self) -> dict[str, list[ast.Module]]:
        """Each script's syntax: of the whole of it, or else of every statement at its top that can be read."""
        found = {}
        for file, text in self.sources.items():
            whole = syntax(text)
            pieces = re.split(r"(?m)^(?=[^\s#)\]}])", text) if whole is None else ()
            found[file] = [
                tree for tree in (whole, *map(syntax, pieces)) if tree is not None
            ]
        return found

    @cached_property
    def numbers(self) -> set[float]:
        """The numbers that stand in them."""
        nodes = (
            node
            for trees in self.trees.values()
            for tree in trees
            for node in ast.walk(tree)
        )
        values = [node.value for node in nodes if isinstance(node, ast.Constant)]
        return {
            number(value)
            for value in values
            if not isinstance(value, int) or abs(value) < 1 << 53
        }

    def counted(self, event: Event) -> str:
        """What the loss of a backward is divided by, where the script counts by the same (`i % n`); or nothing."""
        label = syntax(event.label)
        names, divided, counts = _names(label), set(_divisors(label)), set()
        for node in (
            node for tree in self.trees.get(event.file, ()) for node in ast.walk(tree)
        ):
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Mod)
                and not isinstance(node.right, ast.Constant)
            ):
                counts.add(ast.unparse(node.right))
            elif isinstance(node, ast.Assign) and any(
                names & _names(target) for target in node.targets
            ):
                divided.update(_divisors(node.value))
            elif (
                isinstance(node, ast.AugAssign)
                and isinstance(node.op, ast.Div)
                and names & _names(node.target)
            ):
                divided.add(ast.unparse(node.value))
        return min(divided & counts, default="")

    def called_on(self, method: str, file: str) -> set[str]:
        """On what a file calls this method."""
        nodes = (
            node
            for tree in self.trees.get(file, ())
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        )
        functions = (
            node.func for node in nodes if isinstance(node.func, ast.Attribute)
        )
        return {
            ast.unparse(function.value)
            for function in functions
            if function.attr == method
        }

    def apart(self, one: Event, other: Event) -> bool:
        """Whether two events came by the two branches of one `if`, so that no round of a loop has both."""
        pairs = [
            (a, b)
            for a, b in zip(one.frames, other.frames, strict=False)
            if a[0] == b[0]
        ]
        return any(
            _branches(tree, a[1], b[1])
            for a, b in pairs
            for tree in self.trees.get(a[0], ())
        )


def _branches(tree: ast.Module, one: int, other: int) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and node.orelse:
            body, orelse = (
                (part[0].lineno, part[-1].end_lineno or 0)
                for part in (node.body, node.orelse)
            )
            if any(
                body[0] <= a <= body[1] and orelse[0] <= b <= orelse[1]
                for a, b in ((one, other), (other, one))
            ):
                return True
    return False


def syntax(text: str) -> ast.Module | None:
    """The text's syntax; None where it has none.

    >>> syntax("x = ") is None
    True
    """
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(text)
    return None


def _divisors(tree: ast.AST | None) -> Iterator[str]:
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield ast.unparse(node.right)


def _names(tree: ast.AST | None) -> set[str]:
    return (
        {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if tree is not None
        else set()
    )
