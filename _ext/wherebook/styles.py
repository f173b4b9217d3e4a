"""One style sheet and one script for every page: of the theme's, the rules that some page of the book can meet.

Jupyter Book brings a script and a font of icons, Bootstrap, and the styles of everything that a page could have.
Each page asked for two dozen files and 700 KB before its own text. What stands here reads the finished pages, keeps
the rules whose names occur in one of them, and writes `_static/book.css`; what no page names is not in the site.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from sphinx.application import Sphinx

SHEET = "book.css"
# In the order in which the theme would load them; a later rule of the same weight wins.
THEME = (
    "styles/theme.css",
    "styles/pydata-sphinx-theme.css",
    "styles/sphinx-book-theme.css",
    "mystnb.*.css",
    "sphinx-design.min.css",
)
OURS = {"book.css", "book.js", "search.js", "math.css", "favicon.svg", "opening.png"}
STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)
NAME = re.compile(r"[.#](-?[A-Za-z_][\w-]*)")
NEGATED = re.compile(r":(?:not|is|where|has)\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\]")
# Whatever a figure in a cell draws, the browser looks through the whole cell for these again: it would walk at 12
# frames a second. What the theme rounds by them has no corners here.
SEARCHING = re.compile(r"\bdiv\.cell\b[^,]*:has\(")
VARIABLE = re.compile(r"""(?<=[;{])\s*(--[\w-]+)\s*:(?:"[^"]*"|'[^']*'|\([^()]*\)|[^;{}"'(])*(?:;|(?=}))""")
ICONS = re.compile(r"\bfa[srb]?\b|fa-|fontawesome|font awesome", re.IGNORECASE)
# Their characters, of the private use area, are boxes in any other font.
PRIVATE = re.compile(r"content:[^;]*(?:--(?:pst-icon|fa)-|\\[ef][0-9a-f]{3}\b|[\ue000-\uf8ff])", re.IGNORECASE)


def rules(css: str) -> Iterator[tuple[str, str]]:
    """The head and the body of every rule, of the statements without a body the head alone.

    >>> list(rules('@import "a;b"; a{b:c} @media x{d{e:f}}'))
    [('@import "a;b"', ''), ('a', 'b:c'), ('@media x', 'd{e:f}')]
    """
    start = place = depth = body = 0
    while place < len(css):
        character = css[place]
        if character in "\"'" and (string := STRING.match(css, place)):
            place = string.end()
            continue
        if character == "{":
            depth += 1
            body = body if depth > 1 else place
        elif character == "}":
            depth -= 1
            if depth == 0:
                yield css[start:body].strip(), css[body + 1 : place].strip()
                start = place + 1
        elif character == ";" and depth == 0:
            yield css[start:place].strip(), ""
            start = place + 1
        place += 1


def selectors(head: str) -> list[str]:
    """The selectors of a rule.

    >>> selectors("a:is(b, c), d")
    ['a:is(b, c)', 'd']
    """
    found, depth = [""], 0
    for character in head:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [selector.strip() for selector in found]


def is_met(selector: str, words: Collection[str]) -> bool:
    """Whether every class and id that a selector asks for occurs in some page.

    >>> is_met("a.here:not(.there) > b", {"here"}), is_met("a.there", {"here"})
    (True, False)
    """
    return all(name in words for name in NAME.findall(NEGATED.sub("", selector)))


def kept(css: str, words: Collection[str]) -> str:
    """A style sheet without comments, and without the rules that no page meets.

    >>> kept("/* 1 */ .a, .b{c:d} @media print{.b{c:d}} @font-face{font-family:'Font Awesome'}", {"a"})
    '.a{c:d}'
    """
    text = []
    for head, body in rules(re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)):
        if head.startswith(("@media", "@supports", "@layer", "@container")) and body:
            inner = kept(body, words)
            text.append(f"{head}{{{inner}}}" if inner else "")
        elif head.startswith("@"):
            wanted = bool(body) and not head.startswith("@charset") and not ICONS.search(body)
            text.append(f"{head}{{{body}}}" if wanted else "")
        else:
            met = [one for one in selectors(head) if is_met(one, words) and not ICONS.search(one)]
            text.append(f"{','.join(met)}{{{body}}}" if met and body and not PRIVATE.search(body) else "")
    return "".join(text)


def still(css: str) -> str:
    """A style sheet without the rules that search whole cells.

    >>> still("div.cell:has(>*:nth-child(2)) details{a:b}.b:has(.c){d:e}")
    '.b:has(.c){d:e}'
    """
    return "".join(f"{head}{{{body}}}" if body else head for head, body in rules(css) if not SEARCHING.search(head))


def without_unused(css: str, said: str) -> str:
    """A style sheet without the variables that nothing asks for, neither itself nor a page.

    >>> without_unused("a{--b:1;--c:var(--d);--d:2;e:var(--c)}", "")
    'a{--c:var(--d);--d:2;e:var(--c)}'
    """
    before = ""
    while before != css:
        before, used = css, set(re.findall(r"--[\w-]+(?=\s*[,)])", css + said))
        css = VARIABLE.sub(partial(_if_used, used), css)
    return re.sub(r"[^{};]+\{\}", "", css)


def _if_used(used: Collection[str], found: re.Match[str]) -> str:
    return found[0] if found[1] in used else ""


def tight(css: str) -> str:
    """A style sheet with no more space than it needs.

    >>> tight("a  >  b {\\n  c: d e;\\n}")
    'a>b{c:d e}'
    """
    parts = STRING.split(css)
    strings = STRING.findall(css)
    packed = [
        re.sub(r";}", "}", re.sub(r"\s*([{};,>])\s*|(?<=[\w-]):\s+", lambda m: m[1] or ":", re.sub(r"\s+", " ", part)))
        for part in parts
    ]
    return "".join(part + string for part, string in zip(packed, [*strings, ""], strict=True))


def write(app: Sphinx, exception: Exception | None) -> None:
    """The style sheet; the pages that name it by its contents, so that no browser keeps an old one; nothing else."""
    if exception or app.builder.format != "html":
        return
    out = Path(app.outdir)
    static = out / "_static"
    pages = [path for path in out.rglob("*.html") if static not in path.parents]
    scripts = "".join((static / name).read_text("utf-8") for name in ("book.js", "search.js"))
    said = "".join(path.read_text("utf-8") for path in pages) + scripts
    theirs = [path for pattern in THEME for path in sorted(static.glob(pattern))]
    own = (static / SHEET).read_text("utf-8")
    words = set(re.findall(r"[\w-]+", said))
    css = "".join(still(kept(path.read_text("utf-8"), words)) for path in theirs) + kept(own, words)
    (static / SHEET).write_text(tight(without_unused(css, said)), "utf-8")
    clear(static)
    name_by_contents(out, pages)


def clear(static: Path) -> None:
    """What the theme and its extensions brought and no page asks for."""
    for path in static.iterdir():
        if path.name not in OURS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def name_by_contents(out: Path, pages: list[Path]) -> None:
    names = [*(f"_static/{path.name}" for path in (out / "_static").iterdir()), "searchindex.js"]
    version = {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest()[:8] for name in names if (out / name).exists()
    }
    for page in pages:
        text = page.read_text("utf-8")
        for name, digest in version.items():
            text = re.sub(rf'((?:href|src)="(?:\.\./)*{re.escape(name)})"', rf'\1?v={digest}"', text)
        page.write_text(text, "utf-8")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", write, priority=900)  # when every file is there
