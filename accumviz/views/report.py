"""Report -> HTML: each finding with its line, its numbers and its cure, readable without colour."""

from __future__ import annotations

from accumviz.checks.report import Finding, Report, told
from accumviz.show import escape, marked
from accumviz.views import style, words

_CSS = """
.av-report { max-width: 60rem; font-size: 0.875rem; line-height: 1.45; }
.av-report article { border-left: 0.25rem solid var(--av-line); padding: 0.1rem 0 0.1rem 0.8rem; margin: 0.9rem 0; }
.av-report article.av-error { border-left-width: 0.4rem; }
.av-report h3 { font-size: 0.9375rem; margin: 0 0 0.25rem; }
.av-report p { margin: 0.25rem 0; }
.av-report pre { margin: 0.4rem 0; padding: 0.5rem 0.7rem; overflow-x: auto; border: 1px solid var(--av-line);
  color: inherit; font: 0.8125rem/1.5 var(--av-mono); white-space: pre; }
.av-report .av-said { color: var(--av-muted); }
"""


def report_html(report: Report) -> str:
    """Show a report: its verdict, every finding, and what could not be judged."""
    verdict = report.verdict if report.verdict != "findings" else words.counted(len(report.findings), "finding")
    looked = ", ".join(words.counted(many, what.removesuffix("s")) for what, many in report.counts.items())
    parts = [f"<p><b>{escape(verdict)}</b> <span class='av-said'>{escape(looked)}</span></p>"]
    if report.reason:
        parts.append(f"<p>{marked(report.reason)}</p>")
    parts += [_finding(finding) for finding in report.findings]
    if report.unjudged:
        rows = "".join(f"<li><code>{escape(rule)}</code>: {escape(why)}</li>" for rule, why in report.unjudged.items())
        many = words.counted(len(report.unjudged), "rule")
        parts.append(f"<details><summary>Not judged: {many}</summary><ul>{rows}</ul></details>")
    return f'<div class="accumviz av-report"><style>{style.CSS}{_CSS}</style>{"".join(parts)}</div>'


def _finding(finding: Finding) -> str:
    where = "" if finding.step is None else f", at event {finding.step}"
    times = f", {finding.times} times" if finding.times > 1 else ""
    line = ""
    if finding.file or finding.line:
        line = f"<p><code>{escape(finding.file)}:{finding.line}</code> <code>{escape(finding.source)}</code></p>"
    evidence = "; ".join(f"{escape(name)}: {escape(told(value))}" for name, value in finding.evidence.items())
    cure = "\n".join(escape(text) for text in finding.cure.splitlines())
    return (
        f'<article class="av-{finding.severity}"><h3>{finding.severity}: <code>{escape(finding.rule)}</code>'
        f"{where}{times}</h3>{line}<p>{marked(finding.cause)}</p><p class='av-said'>{evidence}</p>"
        + (f'<pre tabindex="0">{cure}</pre>' if cure else "")
        + f"<p class='av-said av-read'>Read: {escape(finding.chapter)}</p></article>"
    )
