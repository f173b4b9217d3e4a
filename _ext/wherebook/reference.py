"""The reference page is written from docstrings: autodoc finds them, and reads them as they are meant."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import accumviz

# Code between single backticks, and a value between quotes.
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)|``.*?``|(?P<value>\"[\w.-]*\")", re.DOTALL)
CLASS = re.compile(r"[A-Z][a-z]\w+")
DESCRIBED = re.compile(r"^\.\. (verbs|auto\w+):: (.+)$", re.MULTILINE)
ALIAS = re.compile(r"Alias for field number \d+")
PARAMETERS = re.compile(r'<dl>\n((?:<dd><em class="sig-param.*</dd>\n)+)</dl>')


def functions(first: Iterable[str] = ()) -> list[str]:
    """The public functions of accumviz, those named first."""
    public = [name for name in accumviz.__all__ if inspect.isfunction(getattr(accumviz, name))]
    return list(dict.fromkeys([*first, *public]))


class Verbs(SphinxDirective):
    """One entry for each public function of accumviz: those named come first, and none can be forgotten."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        first = "".join(self.arguments).split()
        unknown = [name for name in first if name not in functions()]
        if unknown:
            raise self.error(f"accumviz has no public function {unknown[0]!r}; it has {', '.join(functions())}")
        listed = StringList([f".. autofunction:: accumviz.{name}" for name in functions(first)])
        parsed = nodes.Element()
        self.state.nested_parse(listed, self.content_offset, parsed)
        return parsed.children


def summaries(lines: Iterable[str]) -> list[str]:
    """What a block of the page describes, each with the first sentence of its docstring, for a page without autodoc.

    >>> summaries([".. autoclass:: accumviz.ledger.ledger.Parameter", "   :members:"])
    ['- `accumviz.ledger.ledger.Parameter`: A recorded leaf: ...']
    """
    names: list[str] = []
    for kind, argument in DESCRIBED.findall("\n".join(lines)):
        names += [f"accumviz.{name}" for name in functions(argument.split())] if kind == "verbs" else [argument]
    paragraphs = {name: (inspect.getdoc(pydoc.locate(name)) or "").partition("\n\n")[0] for name in names}
    return [f"- `{name}`: {' '.join(text.split())}" for name, text in paragraphs.items()]


def marked(docstring: str) -> str:
    """A docstring as autodoc reads it: single backticks are code, and lead to a class that the page describes.

    >>> marked("Of an `Event`, `line` is the number.")
    'Of an :py:class:`.Event`, ``line`` is the number.'
    >>> marked('`severity` is "note" or `"error"`')
    '``severity`` is ``"note"`` or ``"error"``'
    >>> marked(">>> print('`x`')")
    ">>> print('`x`')"
    """
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(text if text.lstrip().startswith(">>>") else CODE.sub(role, text) for text in paragraphs)


def role(code: re.Match[str]) -> str:
    text = code[1] or code["value"]
    if not text:  # literal already
        return code[0]
    return f":py:class:`.{text}`" if CLASS.fullmatch(text) else f"``{text}``"


def mark(app: Sphinx, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    # What Python says of a named tuple's fields: their type stands there, and the class's text says what they are.
    lines[:] = marked("\n".join(line for line in lines if not ALIAS.fullmatch(line))).split("\n")


def fields_only(
    app: Sphinx, what: str, name: str, subject: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """The signature of a plain record names its fields; any other class is made by a verb, never by hand."""
    record = hasattr(subject, "_fields") or (is_dataclass(subject) and subject.__dataclass_params__.frozen)
    if what == "class" and not record:
        return "", None
    # what a factory makes has no source to show, and Sphinx cannot read a signature that says so
    return signature and signature.replace("<factory>", "..."), returned


def plain(app: Sphinx, env: Any, node: pending_xref, text: nodes.Element) -> nodes.Element | None:
    """A name of Python, numpy or torch is text, as no page may lead elsewhere; one of ours has to resolve."""
    return text if node["refdomain"] == "py" and not node["reftarget"].startswith("accumviz.") else None


def parameters(html: str) -> str:
    """Long signatures as plain lines: Sphinx writes a list of definitions without terms, which is no list to a reader.

    >>> parameters('<dl>\\n<dd><em class="sig-param">k</em>,</dd>\\n</dl>')
    '<div class="sig-params">\\n<div><em class="sig-param">k</em>,</div>\\n</div>'
    """

    def lines(match: re.Match[str]) -> str:
        return f'<div class="sig-params">\n{match[1].replace("<dd>", "<div>").replace("</dd>", "</div>")}</div>'

    return PARAMETERS.sub(lines, html)


def write_parameters(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "sig-param" in context.get("body", ""):
        context["body"] = parameters(context["body"])


def setup(app: Sphinx) -> None:
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("verbs", Verbs)
    app.connect("autodoc-process-docstring", mark)
    app.connect("autodoc-process-signature", fields_only)
    app.connect("missing-reference", plain)
    app.connect("html-page-context", write_parameters)
