"""Run Graphviz in process, and the style sheet of the graphs that it draws."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from string import Template

from accumviz.views.style import CSS, CYCLE, MONO

TITLE, SMALL = 14.0, 12.5  # px
SHRINK = 0.88  # the smallest text stays 11 px

STYLE = CSS + Template("""
.av-graph { margin: 0.75rem 0; --av-leaf: $leaf; --av-root: $root; }
html[data-theme="dark"] .av-graph, [data-jp-theme-light="false"] .av-graph { --av-leaf: $leaf_dark; }
.av-graph .av-scroll { overflow: auto; max-height: 75rem; }
.av-graph svg { display: block; height: auto;
  width: var(--av-width); max-width: 100%; min-width: calc(var(--av-width) * $shrink); }
:where(.av-graph:not(.av-drawn)) text { font: ${small}px $mono; fill: var(--av-text); unicode-bidi: isolate; }
.av-graph .av-title { font-size: ${title}px; font-weight: 600; }
.av-graph .av-quiet { fill: var(--av-muted); }
.av-graph .av-card { fill: var(--av-surface); stroke: var(--av-line); stroke-width: 1.2; }
.av-graph .av-rule { stroke: var(--av-line); }
.av-graph .av-accumulate .av-card { fill: var(--av-leaf); fill-opacity: 0.13; stroke: var(--av-leaf); }
.av-graph .av-root .av-card { fill: var(--av-root); fill-opacity: 0.13; stroke: var(--av-root); stroke-width: 2.2; }
.av-graph .av-freed .av-card { fill: none; stroke-dasharray: 5 4; }
.av-graph .av-freed:not(.av-root) .av-card { stroke: var(--av-muted); }
.av-graph .av-freed text { fill: var(--av-muted); }
.av-graph .av-edge { fill: none; stroke: var(--av-muted); stroke-width: 1.4; }
.av-graph .av-tip { fill: var(--av-muted); stroke: none; }
.av-graph figcaption { color: var(--av-muted); font-size: 0.8125rem; margin-top: 0.5rem; text-align: left; }
.av-graph .av-key { display: inline-block; margin-right: 1.2em; }
.av-graph .av-key i { display: inline-block; width: 1.1em; height: 0.8em; margin-right: 0.4em;
  border: 1.5px solid var(--av-muted); background: var(--av-surface); border-radius: 3px; vertical-align: -0.05em; }
.av-graph .av-key .av-accumulate { border-color: var(--av-leaf); border-radius: 0.4em; }
.av-graph .av-key .av-root { border-color: var(--av-root); border-width: 2px; }
.av-graph .av-key .av-freed { border: 1.5px dashed var(--av-muted); background: none; }
.av-graph .av-key .av-fold { box-shadow: 3px 3px 0 -1px var(--av-line); }
.av-graph details { font-size: 0.8125rem; margin-top: 0.25rem; text-align: left; }
.av-graph summary { cursor: pointer; color: var(--av-muted); width: max-content; }
.av-form[open] + .av-scroll { display: none; }
@media print {
  .av-graph .av-scroll { overflow: visible; max-height: none; }
  .av-graph svg { min-width: 0; }
}
""").substitute(
    leaf=CYCLE[0],
    leaf_dark=CYCLE[4],
    root=CYCLE[2],
    shrink=SHRINK,
    small=SMALL,
    title=TITLE,
    mono=MONO,
)


class LayoutError(ImportError):
    """No layout engine is there, or it refused; the message says what to do."""


def graphviz(source: str, form: str) -> str:
    """Lay out DOT source with Graphviz's `dot` and return it as `json`, `svg`, ...

    Raises LayoutError without `pygraphviz`, whose wheel carries Graphviz, or where the source is not DOT.
    """
    try:
        from pygraphviz import AGraph
    except ImportError as missing:
        raise LayoutError(
            "drawing a graph needs Graphviz, which comes with pygraphviz: pip install pygraphviz"
        ) from missing
    try:
        # pygraphviz warns about every graph of more than 1,000 nodes
        with redirect_stderr(StringIO()), _without_font_warnings():
            drawn: bytes = AGraph(string=source).draw(format=form, prog="dot")
    except Exception as error:  # its C layer raises several unrelated types
        raise LayoutError(f"Graphviz could not draw this: {error}") from error
    return drawn.decode("utf-8", "replace")


@contextmanager
def _without_font_warnings() -> Iterator[None]:
    """The wheel's fontconfig complains, from C, about settings of the system's newer one; pass on the rest."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            lines = caught.read().splitlines(keepends=True)
            rest = [line for line in lines if b"Fontconfig" not in line]
            os.write(2, b"".join(rest))
