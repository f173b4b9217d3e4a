"""Read the scripts of the corpus: each has a mistake, and comments that make its right twin.

The line that is to be found ends with `# finding: rule`. A line that ends with `# wrong` is left out of the twin, where
`# right: code` is a line. So a script and its twin have the same lines at the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Script(NamedTuple):
    """A script: its path, the rule that is to be found in it, and on which line."""

    path: Path
    rule: str
    line: int

    def text(self, *, right: bool) -> str:
        """The script, or its right twin."""
        lines = self.path.read_text("utf-8").splitlines()
        return "\n".join(_right(lines) if right else lines) + "\n"


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


def scripts(folder: str) -> Iterator[Script]:
    """All scripts of a folder."""
    for path in sorted((HERE / folder).glob("*.py")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            finding = re.search(r"finding: ([\w-]+)$", line)
            if finding:
                yield Script(path, finding[1], number)


def run(text: str, path: Path, record: Any) -> None:
    """Write a script's text there, and run its loop."""
    path.write_text(text, "utf-8")
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(text, str(path), "exec"), names)
    names["loop"](record)
