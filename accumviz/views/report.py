"""Show a report, or a comparison, as HTML."""

from __future__ import annotations

from collections import Counter
from typing import Any

from accumviz.checks.compare import Comparison, error, place
from accumviz.checks.report import Finding, Report, address
from accumviz.show import counted, escape, literal, marked, table
from accumviz.views import style

_CSS = """
.av-report { max-width: 60rem; font-size: 0.875rem; line-height: 1.45; }
.av-report :is(article, .av-verdict) { border-left: 0.3rem solid var(--av-line); padding: 0.1rem 0 0.1rem 0.8rem; }
.av-report article { margin: 0.9rem 0; }
.av-report :is(.av-error, .av-findings) { border-left-color: #d55e00; }
.av-report .av-warning { border-left-color: #e69f00; }
.av-report .av-healthy { border-left-color: #009e73; }
.av-report h3 { font-size: 0.9375rem; margin: 0 0 0.25rem; }
.av-report p { margin: 0.25rem 0; }
.av-report pre { margin: 0.4rem 0; padding: 0.5rem 0.7rem; overflow-x: auto; border: 1px solid var(--av-line);
  color: inherit; font: 0.8125rem/1.5 var(--av-mono); white-space: pre; }
.av-report .av-said { color: var(--av-muted); }
.av-comparison { max-width: 60rem; font-size: 0.875rem; line-height: 1.45; }
.av-comparison p, .av-comparison ul { margin: 0.3rem 0; }
.av-comparison table { border-collapse: collapse; margin: 0.5rem 0; }
.av-comparison :is(th, td) { text-align: left; padding: 0.1rem 0.8rem 0.1rem 0; font-weight: normal;
  border-bottom: 1px solid var(--av-line); }
.av-comparison :is(th, caption) { color: var(--av-muted); text-align: left; }
"""


_SIGNS = {"healthy": "✓", "findings": "✗", "no verdict": "?"}


def first_line(report: Report) -> str:
    """Say first what a report comes to.

    >>> first_line(Report())
    'Healthy: check finds no mistake.'
    """
    if report.verdict == "healthy":
        condition = f", if {report.condition}" if report.condition else ""
        return f"Healthy{condition}: check finds no mistake."
    if report.verdict == "no verdict":
        return f"No verdict: {literal(report.reason)}."
    rules = Counter(
        finding.rule for finding in report.findings if finding.severity != "note"
    )
    told = [rule if many == 1 else f"{rule} × {many}" for rule, many in rules.items()]
    return f"{counted(sum(rules.values()), 'mistake')}: {', '.join(told)}."


def report_html(report: Report) -> str:
    """Show a report: its verdict, every finding, and what could not be judged."""
    looked = ", ".join(
        counted(many, what.removesuffix("s")) for what, many in report.counts.items()
    )
    seen = (
        f" <span class='av-said'>Looked at: {escape(looked)}.</span>" if looked else ""
    )
    look = report.verdict.replace(" ", "-")
    said = f"{_SIGNS[report.verdict]} <b>{marked(first_line(report))}</b>{seen}"
    parts = [f'<p class="av-verdict av-{look}">{said}</p>']
    if report.reason and report.verdict == "findings":
        parts.append(f"<p>{marked(report.reason)}</p>")
    parts += [_finding(finding) for finding in report.findings]
    if report.not_seen:
        parts.append(f"<p class='av-said'>{report.not_seen}</p>")
    if report.unjudged:
        rows = "".join(
            f"<li><code>{escape(rule)}</code>: {escape(why)}</li>"
            for rule, why in report.unjudged.items()
        )
        many = counted(len(report.unjudged), "rule")
        parts.append(
            f"<details><summary>Not judged: {many}</summary><ul>{rows}</ul></details>"
        )
    return f'<div class="accumviz av-report"><style>{style.CSS}{_CSS}</style>{"".join(parts)}</div>'


def _finding(finding: Finding) -> str:
    where = "" if finding.step is None else f", at event {finding.step}"
    times = f", {finding.times} times" if finding.times > 1 else ""
    line = ""
    if finding.file or finding.line:
        line = f"<p><code>{escape(finding.file)}:{finding.line}</code> <code>{escape(finding.source)}</code></p>"
    suggestion = "\n".join(map(escape, finding.suggestion.splitlines()))
    return (
        f'<article class="av-{finding.severity}"><h3>{finding.severity}: <code>{escape(finding.rule)}</code>'
        f"{where}{times}</h3>{line}<p>{marked(finding.cause)}</p><p class='av-said'>{escape(finding.numbers)}</p>"
        + (f'<pre tabindex="0">{suggestion}</pre>' if suggestion else "")
        + f"<p class='av-said av-read'>Read: {escape(finding.rule)}</p></article>"
    )


def report_data(report: Report, *, local: bool = False) -> dict[str, Any]:
    """Return a report as a page shows it; `local` as in `Report.text`."""
    data = {
        "verdict": report.verdict,
        "said": first_line(report),
        "findings": [
            _finding_data(finding, local=local) for finding in report.findings
        ],
    }
    if report.unjudged:
        reasons = [f"{rule}: {why}" for rule, why in report.unjudged.items()]
        data["unjudged"] = list(map(literal, reasons))
    return data


def _finding_data(finding: Finding, *, local: bool) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "event": finding.event,
        "line": finding.line,
        "cause": literal(finding.cause),
        "evidence": finding.numbers,
        "suggestion": finding.suggestion.splitlines(),
        "read": address(finding.rule, local=local),
    }


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
    parts.append(table(heads, steps, "The steps"))
    if comparison.first is not None:
        heads = ("share", "parameter", "its error")
        parts.append(table(heads, comparison.by_parameter(), "Of it, by parameter"))
    for note in comparison.notes:
        parts.append(f"<p>Note: {marked(note)}</p>")
    content = "".join(parts)
    return f'<div class="accumviz av-comparison"><style>{style.CSS}{_CSS}</style>{content}</div>'
