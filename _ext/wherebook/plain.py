"""MyST as plain Markdown: a page's text for readers that know no directive, no role and no label.

What the words refer to is looked up in the built book. What is not known here is an error, so that nothing of MyST
reaches a notebook unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from wherebook.mathml import aligned

PROJECT = Path(__file__).resolve().parents[2]
ADMONITIONS = {"admonition", "attention", "caution", "danger", "error", "hint", "important", "note", "seealso", "tip"}
ADMONITIONS |= {"warning"}
FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}(?=\{|[^`]*$)|~{3,}|:{3,})(?:\{(?P<name>[\w:+-]+)\})?(?P<rest>.*)$")
OPTION = re.compile(r":(?P<key>[\w-]+):(?P<value>.*)")
DROPPED = re.compile(r"\([\w:.+-]+\)=\s*$|\{\.answers\}\s*$|%( |$)|\+\+\+")
TERM, MEANING = re.compile(r"\S"), re.compile(r":\s+(?=\S)")
INLINE = re.compile(
    r"\{(?P<role>[\w:+.-]+)\}(?P<fence>`+)(?P<body>.+?)(?P=fence)(?!`)"
    r"|(?P<code>(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<math>\$\$.+?\$\$|\$[^$]+\$)"
    r"|(?P<image>!\[)"
    r"|\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\](?:\((?P<target>[^()\s]*)\)|(?P<attribute>\{))"
    r"|(?P<auto><(?:project|path|inv):)",
    re.DOTALL,
)


class PlainError(ValueError):
    """Something of MyST that has no plain form yet."""


class Book(Protocol):
    """What a page's text may refer to."""

    def figure(self, label: str) -> str: ...
    def equation(self, label: str) -> str: ...
    def citation(self, keys: str, kind: str) -> str: ...
    def link(self, text: str, target: str) -> str: ...
    def claim(self, number: int) -> str: ...
    def described(self, lines: list[str]) -> str: ...


def plain(text: str, book: Book) -> str:
    r"""The same text in plain Markdown.

    >>> print(plain("(sec-x)=\n## A {term}`window <windows>`\n\n:::{tip}\nUse {math}`x^2`.\n:::", None))
    ## A window
    <BLANKLINE>
    > **Tip**
    >
    > Use $x^2$.
    """
    return "\n\n".join(block.strip("\n") for block in blocks(text.splitlines(), book) if block.strip())


def blocks(lines: list[str], book: Book) -> Iterator[str]:
    """The text piece by piece: what stands in fences apart from what stands between them."""
    words: list[str] = []
    while lines:
        line, *lines = lines
        opened = FENCE.match(line)
        if opened is None:
            if not DROPPED.match(line):
                words.append(line)
            continue
        yield inline("\n".join(definitions(words)), book)
        words = []
        body, lines = fenced(opened, line, lines)
        yield directive(opened, body, book)
    yield inline("\n".join(definitions(words)), book)


def fenced(opened: re.Match[str], line: str, lines: list[str]) -> tuple[list[str], list[str]]:
    """What stands in a fence, without its indent, and what follows it."""
    fence, indent = opened["fence"], len(opened["indent"])
    end = re.compile(rf" *{fence[0]}{{{len(fence)},}}\s*$")
    for index, inner in enumerate(lines):
        if end.match(inner):
            unindented = [one[min(indent, len(one) - len(one.lstrip())) :] for one in lines[:index]]
            return unindented, lines[index + 1 :]
    raise PlainError(f"{line.strip()!r} is never closed")


def directive(opened: re.Match[str], body: list[str], book: Book) -> str:
    name, rest, indent = opened["name"], opened["rest"].strip(), opened["indent"]
    if name is None:
        if opened["fence"].startswith(":"):
            raise PlainError(f"{opened[0]!r} names no directive")
        fence = opened["fence"]
        return indented([f"{fence}{rest}", *body, fence], indent)
    options = {}
    while body and (option := OPTION.match(body[0])):
        options[option["key"]] = option["value"].strip()
        body = body[1:]
    if name == "math":
        return indented(math(rest, "\n".join(body), options, book), indent)
    if name in ADMONITIONS:
        title = inline(rest, book) if name == "admonition" else name.capitalize()
        inner = plain("\n".join(body if name == "admonition" else [rest, *body]), book)
        return indented([f"> {line}".rstrip() for line in [f"**{title}**", "", *inner.splitlines()]], indent)
    if name == "claims":
        return claims(body, book)
    if name == "include":
        return plain((PROJECT / rest).read_text("utf-8"), book)
    if name == "eval-rst":
        return book.described(body)
    raise PlainError(f"the directive {{{name}}} has no plain form")


def indented(lines: list[str], indent: str) -> str:
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def math(first: str, tex: str, options: dict[str, str], book: Book) -> list[str]:
    tex = aligned("\n".join(part for part in (first, tex.strip()) if part)).replace("align*", "aligned")
    label = options.get("label") or options.get("name")
    tag = [rf"\tag{{{book.equation(label).strip('()')}}}"] if label else []
    return ["$$", *tex.splitlines(), *tag, "$$"]


def claims(body: list[str], book: Book) -> str:
    """Each claim with its verdict below; what stands between the lists names an article."""
    found = []
    for part in re.split(r"\n(?=\d+\. )|\n\n", "\n".join(body).strip()):
        number = re.match(r"(\d+)\. ", part)
        text = inline(part, book)
        found.append(f"**{text}**")
        if number:  # what belongs to an item stands below its first word
            indent = " " * len(number[0])
            found[-1:] = [re.sub(r"\n *", f"\n{indent}", text), indent + book.claim(int(number[1]))]
    return "\n\n".join(found)


def definitions(lines: list[str]) -> list[str]:
    """Definition lists as bullets, the term in bold."""
    done: list[str] = []
    for line in lines:
        if MEANING.match(line) and done and TERM.match(done[-1]):
            done[-1:] = ["", f"- **{done[-1]}**: {MEANING.sub('', line, count=1)}"]
        else:
            done.append(line)
    return done


def inline(text: str, book: Book) -> str:
    """A stretch of words, its roles and links looked up; code and formulas stay as they are."""

    def replaced(match: re.Match[str]) -> str:
        if match["code"] or match["math"]:
            return match[0]
        if match["role"]:
            return role(match["role"], " ".join(match["body"].split()), book)
        if match["target"]:
            return book.link(inline(match["text"], book), match["target"])
        if match["image"] or match["auto"] or match["attribute"] or match["target"] is not None:
            raise PlainError(f"this has no plain form: {text[match.start() : match.start() + 60]!r}")
        return match[0]

    return INLINE.sub(replaced, text)


def role(name: str, body: str, book: Book) -> str:
    match name:
        case "numref":
            return book.figure(body)
        case "eq":
            return book.equation(body)
        case "cite:p" | "cite:t":
            return book.citation(body, name[-1])
    if name not in ROLES:
        raise PlainError(f"the role {{{name}}} has no plain form: {{{name}}}`{body}`")
    return ROLES[name](body)


def titled(body: str) -> str:
    """The words that a role shows: `windows <window>` shows `windows`."""
    return re.sub(r"\s*<[^<>]*>$", "", body)


def as_code(body: str) -> str:
    """A name of Python."""
    return f"`{titled(body)}`"


# What these roles show stands in the role itself; the others are looked up in the book.
ROLES: dict[str, Callable[[str], str]] = {
    "at": titled,
    "download": as_code,
    "math": "${}$".format,
    "py:class": as_code,
    "py:func": as_code,
    "py:meth": as_code,
    "term": titled,
}
