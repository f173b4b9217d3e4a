"""Read the loops of the corpus: each function of `mistakes.py` and `ranks.py` has a mistake, and makes its right twin.

The line that is to be found ends with `# finding: rule`. A line that ends with `# wrong` is left out of the twin, where
`# right: code` is a line. So a loop and its twin have the same lines at the same numbers.

A function of `record` is a whole loop. One of `model`, `x`, `y` is what happens with each micro-batch: a step follows
on each four, of these `sizes`, unless it is given the `optimizer`, too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Script(NamedTuple):
    """A loop alone in its module: its name, the lines of both, the rule that is to be found, and on which line."""

    name: str
    lines: list[str]
    rule: str
    line: int

    def text(self, *, right: bool) -> str:
        """The module with this loop and no other one, or with its right twin."""
        return "\n".join(_right(self.lines) if right else self.lines) + "\n"


def _right(lines: list[str]) -> Iterator[str]:
    """The lines of the twin. What comes in the place of a block's head is indented as that was."""
    head = None
    for line in lines:
        indent, code = re.match(r"(\s*)(.*)", line).groups()  # type: ignore[union-attr] # it matches anything
        if code.startswith("# right:"):
            indent = indent if head is None else head
            yield indent + code.removeprefix("# right:").strip()
            continue
        wrong = re.search(r"# wrong(,|$)", code)
        head = indent if wrong and re.search(r":\s*# wrong", code) else None
        yield f"{indent}pass" if wrong else line


def scripts(module: str) -> Iterator[Script]:
    """All loops of a module."""
    text = (HERE / f"{module}.py").read_text("utf-8")
    lines = text.splitlines()
    loops = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    ends = [loop.lineno for loop in loops[1:]] + [len(lines) + 1]
    head = lines[: loops[0].lineno - 1]
    for loop, end in zip(loops, ends, strict=True):
        kept = head + _whole(loop, lines[loop.lineno - 1 : end - 1])
        for number, line in enumerate(kept, 1):
            finding = re.search(r"finding: ([\w-]+)$", line)
            if finding:
                yield Script(loop.name, kept, finding[1], number)


def _whole(loop: ast.FunctionDef, lines: list[str]) -> list[str]:
    """The lines of a loop. What is given a `model` stands for one micro-batch in windows of four."""
    names = [argument.arg for argument in loop.args.args]
    if "model" not in names:
        return lines
    sizes = ast.literal_eval(loop.args.defaults[0]) if loop.args.defaults else (2, 2, 2, 2)
    whole = [
        f"def {loop.name}(record):",
        "    with trained(record) as (model, optimizer):",
        f"        for i, (x, y) in enumerate(batches(*{sizes} * 4)):",
        *(line and " " * 8 + line for line in lines[1:]),
    ]
    step = ["if i % 4 == 3:", "    optimizer.step()", "    optimizer.zero_grad()"]
    return whole + [" " * 12 + line for line in step if "optimizer" not in names]


def run(text: str, name: str, path: Path, record: Any) -> None:
    """Write a text there, and run its loop of this name."""
    path.write_text(text, "utf-8")
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(text, str(path), "exec"), names)
    names[name](record)
