"""What the reference of the book says of each rule: the page beside this module, which `api.md` includes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from accumviz import arguments

_PAGE = Path(__file__).with_name("rules.md")
_ENTRY = re.compile(
    r"^#### ([\w-]+)\n\n(.+?)\n(?=\n\(rule-|\n### |\Z)", re.MULTILINE | re.DOTALL
)
# A link, of which the words stay; what makes bold; the fence of an example.
_MARKS = re.compile(r"\[([^]]+)\]\(#[^)]+\)|\*\*|^```.*\n", re.MULTILINE)


def entries() -> dict[str, str]:
    """Return the entry of each rule, by its name, as plain text.

    >>> entries()["clip-on-the-wrong-side"].partition("\\n")[0]
    'What. The clip comes after the step.'
    """
    return dict(_ENTRY.findall(_MARKS.sub(r"\1", _PAGE.read_text("utf-8"))))


def rules(names: str | Iterable[str]) -> frozenset[str]:
    """Return names of rules, given one by one or with commas between them.

    >>> rules("tail-dropped,tail-droped")
    Traceback (most recent call last):
    ValueError: there is no rule 'tail-droped'; nearest: tail-dropped, ...
    """
    if isinstance(names, str):
        names = names.split(",")
    chosen = frozenset(names)
    every = entries()
    for name in sorted(chosen - every.keys()):
        nearest = arguments.nearest(name, every)
        raise ValueError(f"there is no rule {name!r}; nearest: {nearest}")
    return chosen
