"""Math becomes MathML while the book is built: no script, readable by screen readers, sharp in print.

Browsers lay MathML out well only in a font that has a MATH table, and not every machine has one. So the few glyphs
that the book uses travel with it, taken at build time from the STIX Two Math that ziamath ships (Open Font License).
"""

from __future__ import annotations

import base64
import io
import re
from html import escape, unescape
from importlib.resources import files
from pathlib import Path
from typing import Any
from unicodedata import normalize
from xml.etree import ElementTree

from docutils import nodes
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)

STYLESHEET = "math.css"
# Browsers replace a lone letter by its italic of this block, so the letter as written is not what is drawn.
ITALICS = [*map(chr, [*range(0x1D434, 0x1D468), *range(0x1D6E2, 0x1D71C), 0x210E])]
ROOT = "\N{SQUARE ROOT}"  # drawn for <msqrt>, written nowhere
# The converter knows these environments by one name only.
ALIGNMENT = re.compile(r"\\(begin|end)\{(?:align|aligned|split|gather|gathered)\*?\}")
EQUATION = re.compile(r"\\(?:begin|end)\{equation\*?\}")
# Inside parentheses or after another operator a minus is a sign; browsers would space it as a subtraction.
SIGN = re.compile(r"(<mo(?: [^>]*)?>(?!\)|\]|&#x0005D;|&#x00029;|!)[^<]*</mo>)<mo>(&#x02212;|&#x0002B;)</mo>")
# The name of a function stands apart from the letter that it is of.
OF = re.compile(r"(?<=<mi>)(log|exp|sin|cos|max|min)</mi>(?=<mi>|<mn>)")
# Browsers hang what a root's sign is too tall for below the line: a strut gives it the height that it has.
STRUT = '<mspace height="0.75em" depth="0.2em"/>'
PARTS = {"mfrac": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3, "mroot": 2}
TALL = ("mfrac", "mtable", "munderover")
UNKNOWN = re.compile(r"<mi>&(?:amp;)?</mi>|<mspace linebreak|<mi>\\")


def mathml(tex: str, display: str, node: nodes.Element) -> str:
    """One `<math>` element; what cannot be converted is a warning at its place in the source, and so fails the build.

    >>> mathml("a^2", "inline", nodes.math())[49:]
    'display="inline"><mrow><msup><mi>a</mi><mn>2</mn></msup></mrow></math>'
    """
    known = EQUATION.sub("", ALIGNMENT.sub(r"\\\1{align*}", tex))
    try:
        math = convert(known, display=display)
    except Exception as problem:  # the converter's errors have no common base
        math, trouble = "", repr(problem)
    else:
        trouble = defect(math)
    if trouble:
        logger.warning("math that cannot be converted: %s (%s)", tex, trouble, location=node, type="mathml")
        return f"<code>{escape(tex)}</code>"
    math = re.sub(r"<msqrt>(.*?)</msqrt>", rf"<msqrt><mrow>{STRUT}\1</mrow></msqrt>", math)
    math = OF.sub(r'\1</mi><mspace width="0.17em"/>', math)
    return SIGN.sub(r'\1<mo form="prefix" lspace="0" rspace="0">\2</mo>', math)


def defect(math: str) -> str:
    """What is wrong with converted math: the converter leaves out silently what it does not understand.

    >>> defect("<math><mfrac><mi>a</mi></mfrac></math>")
    'mfrac has 1 part'
    """
    if UNKNOWN.search(math):
        return "a command or environment that latex2mathml does not know"
    for element in ElementTree.fromstring(math).iter():  # noqa: S314 - our own sources, a moment ago
        name = element.tag.rpartition("}")[2]
        if len(element) != PARTS.get(name, len(element)):
            return f"{name} has {len(element)} part{'s' * (len(element) != 1)}"
        if name == "msqrt" and any(inner.tag.rpartition("}")[2] in TALL for inner in element.iter()):
            return "a root of what is taller than a line, for which the font has no sign"
    return ""


def aligned(tex: str) -> str:
    r"""Blank lines part equations, a double backslash parts lines: both are rows of one alignment, as usual in Sphinx.

    >>> print(aligned("a\n\nb"), aligned(r"\begin{cases}a \\ b\end{cases}"))
    \begin{align*}a\\b\end{align*} \begin{cases}a \\ b\end{cases}
    """
    parts = [part.strip() for part in tex.split("\n\n") if part.strip()]
    if len(parts) == 1 and (r"\\" not in parts[0] or r"\begin" in parts[0]):
        return parts[0]
    return r"\begin{align*}" + r"\\".join(parts) + r"\end{align*}"


def visit_inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(collected(writer, mathml(node.astext(), "inline", node)))
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(writer.starttag(node, "div", CLASS="math-block notranslate"))
    math = mathml(aligned(node.astext()), "block", node)
    # a wide equation scrolls, and what scrolls must be reachable by keyboard
    writer.body.append(f'<div class="math-scroll" tabindex="0">{collected(writer, math)}</div>')
    if node["number"]:
        writer.body.append(f'<span class="eqno">({get_node_equation_number(writer, node)})')
        writer.add_permalink_ref(node, "Link to this equation")
        writer.body.append("</span>")
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def collected(writer: Any, math: str) -> str:
    """The same text, its characters noted for the font."""
    writer.builder.math_characters |= set(unescape(re.sub(r"<[^>]*>", "", math)) + ROOT)
    return math


def font(characters: str) -> bytes:
    """The math font with these characters, their larger variants and their layout table, as WOFF."""
    source = TTFont(
        io.BytesIO(files("ziamath").joinpath("fonts", "STIXTwoMath-Regular.ttf").read_bytes()), recalcTimestamp=False
    )
    options = Options(layout_features=["ssty", "dtls", "flac"], notdef_outline=True)
    subsetter = Subsetter(options)
    subsetter.populate(text=characters)
    subsetter.subset(source)
    # Browsers leave every root the room of the largest sign there is, and those of this book stand in a line.
    variants = source["MATH"].table.MathVariants
    sign = source.getBestCmap()[ord(ROOT)]
    if sign in variants.VertGlyphCoverage.glyphs:
        place = variants.VertGlyphCoverage.glyphs.index(sign)
        del variants.VertGlyphCoverage.glyphs[place], variants.VertGlyphConstruction[place]
        variants.VertGlyphCount -= 1
    source.flavor = "woff"
    target = io.BytesIO()
    source.save(target)
    return target.getvalue()


def write_stylesheet(app: Sphinx, exception: Exception | None) -> None:
    """The font stands in the stylesheet itself, because a page opened as a file may not fetch one everywhere."""
    if exception or app.builder.format != "html":
        return
    characters = getattr(app.builder, "math_characters", set())
    css = ""
    if characters:
        italics = [italic for italic in ITALICS if normalize("NFKC", italic) in characters]
        data = base64.b64encode(font("".join([*sorted(characters), *italics]))).decode()
        css = f'@font-face{{font-family:"Book Math";src:url("data:font/woff;base64,{data}") format("woff")}}\n'
    Path(app.outdir, "_static", STYLESHEET).write_text(css)


def start_collecting(app: Sphinx) -> None:
    app.builder.math_characters = set()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("builder-inited", start_collecting)
    app.connect("html-page-context", link_stylesheet)
    app.connect("build-finished", write_stylesheet)


def link_stylesheet(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "<math" in context.get("body", ""):
        app.add_css_file(STYLESHEET)
