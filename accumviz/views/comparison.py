"""Show a comparison as HTML."""

from __future__ import annotations

from accumviz.checks.compare import Comparison, error, place
from accumviz.show import escape, marked
from accumviz.views import style

_CSS = """
.av-comparison { max-width: 60rem; font-size: 0.875rem; line-height: 1.45; }
.av-comparison p, .av-comparison ul { margin: 0.3rem 0; }
.av-comparison table { border-collapse: collapse; margin: 0.5rem 0; }
.av-comparison :is(th, td) { text-align: left; padding: 0.1rem 0.8rem 0.1rem 0; font-weight: normal;
  border-bottom: 1px solid var(--av-line); }
.av-comparison :is(th, caption) { color: var(--av-muted); text-align: left; }
"""


def comparison_html(comparison: Comparison) -> str:
    """Show a comparison: the result first, then what proves it."""
    parts = [f"<p><b>{escape(comparison.summary)}</b></p>"]
    for cause in comparison.causes:
        parts.append(f"<p>Cause: <b>{escape(cause.name)}</b>. {marked(cause.said)}</p>")
    if comparison.parting is not None:
        parts.append(f"<p>They part at: {escape(comparison.parting.said)}</p>")
        for event in (comparison.parting.a, comparison.parting.b):
            parts.append(f"<p><code>{escape(place(event))}</code></p>")
    steps = [(str(p.a), str(p.b), error(p)) for p in comparison.steps[:100]]
    heads = ("event of a", "event of b", "relative error")
    parts.append(_table("The steps", heads, steps))
    if comparison.first is not None:
        heads = ("share", "parameter", "its error")
        parts.append(_table("Of it, by parameter", heads, comparison.by_parameter()))
    for note in comparison.notes:
        parts.append(f"<p>Note: {marked(note)}</p>")
    content = "".join(parts)
    return f'<div class="accumviz av-comparison"><style>{style.CSS}{_CSS}</style>{content}</div>'


def _table(
    caption: str, heads: tuple[str, ...], rows: list[tuple[str, str, str]]
) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in row)
        body += f"<tr>{cells}</tr>"
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
