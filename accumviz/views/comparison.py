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
.av-comparison :is(.av-said, th, caption) { color: var(--av-muted); text-align: left; }
"""


def comparison_html(comparison: Comparison) -> str:
    """Show a comparison: the result first, then what proves it."""
    parts = [f"<p><b>{escape(comparison.summary)}</b></p>"]
    for cause in comparison.causes:
        parts.append(f"<p>Cause: <b>{escape(cause.name)}</b>. {marked(cause.said)}</p>")
    if comparison.first is not None and not comparison.causes:
        parts.append("<p>Cause: not named.</p>")
    if comparison.parting is not None:
        where = "".join(
            f"<li><code>{escape(place(event))}</code></li>"
            for event in (comparison.parting.a, comparison.parting.b)
        )
        parts.append(
            f"<p>They part at: {escape(comparison.parting.said)}</p><ul>{where}</ul>"
        )
    rows = [
        (str(p.a), str(p.b), error(p) + (f" ({p.note})" if p.note else ""))
        for p in comparison.steps[:100]
    ]
    parts.append(
        _table("The steps", ("event of a", "event of b", "relative error"), rows)
    )
    if comparison.first is not None:
        parts.append(
            _table(
                "Of it, by parameter",
                ("share", "parameter", "its error"),
                comparison.by_parameter(),
            )
        )
    for head, lines in (
        ("Only in one of them", comparison.missing),
        ("Notes", comparison.notes),
    ):
        if lines:
            listed = "".join(f"<li>{marked(line)}</li>" for line in lines)
            parts.append(f"<p class='av-said'>{head}:</p><ul>{listed}</ul>")
    return f'<div class="accumviz av-comparison"><style>{style.CSS}{_CSS}</style>{"".join(parts)}</div>'


def _table(
    caption: str, heads: tuple[str, ...], rows: list[tuple[str, str, str]]
) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
