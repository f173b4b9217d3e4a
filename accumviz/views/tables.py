"""Show ledgers, reports and comparisons as HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from accumviz.checks.compare import Comparison, place
from accumviz.checks.report import Finding, Report, address
from accumviz.ledger.ledger import Event, Ledger
from accumviz.show import counted, escape, literal, marked, table
from accumviz.views import style, words

_MOST_PARAMETERS = 6
_NONE = '<span class="av-none">None</span>'

_LEDGER_CSS = """
.accumviz.av-ledger { max-width: 100%; }
.av-ledger .av-scroll { overflow-x: auto; max-width: 100%; }
.av-ledger table { border-collapse: collapse; font-size: 0.8125rem; line-height: 1.35; color: inherit; margin: 0;
  width: auto; border: 0; font-variant-numeric: tabular-nums; }
.av-ledger caption span { display: block; position: sticky; left: 0; width: fit-content;
  max-width: min(40rem, calc(100vw - 4rem)); }
.av-ledger caption { text-align: left; caption-side: top; color: var(--av-muted); padding: 0 0 0.5rem 0.5rem;
  font-size: 0.8125rem; }
.av-ledger table tr, .av-ledger table th, .av-ledger table td { background: transparent !important; }
.av-ledger th, .av-ledger td { padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; white-space: nowrap;
  border: 0; font-weight: normal; color: inherit; }
.av-ledger thead th { color: var(--av-muted); vertical-align: bottom; }
.av-ledger thead th.av-name { color: var(--av-text); font-weight: 600; border-bottom: 1px solid var(--av-line);
  padding-bottom: 0.15rem; max-width: 18rem; overflow: hidden; text-overflow: ellipsis; }
.av-ledger thead tr:last-child th { padding-top: 0.15rem; }
.av-ledger tbody tr { border-top: 1px solid var(--av-line); }
.av-ledger tbody tr.av-step { border-bottom: 2px solid var(--av-muted); }
.av-ledger .av-n { text-align: right; font-variant-numeric: tabular-nums; }
.av-ledger td.av-first, .av-ledger th.av-first { padding-left: 1.1rem; }
.av-ledger td.av-grad { font-weight: 600; }
.av-ledger .av-none { color: var(--av-muted); font-style: italic; font-weight: normal; }
.av-ledger .av-quiet { color: var(--av-muted); }
.av-ledger .av-said { display: block; color: var(--av-muted); font-size: 0.75rem; white-space: normal;
  min-width: 9rem; max-width: 16rem; }
.av-ledger .av-kind { display: inline-block; border-left: 0.3rem solid; padding-left: 0.4rem; }
.av-ledger .av-kind b { color: var(--av-text); font-weight: 600; }
.av-ledger td code { background: none; border: 0; padding: 0; color: var(--av-text); font-size: 0.78rem; }
.av-ledger p { margin: 0.5rem 0 0 0.5rem; color: var(--av-muted); font-size: 0.8125rem; }
@media (max-width: 30rem) {
  .av-ledger th, .av-ledger td { padding-inline: 0.35rem; }
  .av-ledger td.av-first, .av-ledger th.av-first { padding-left: 0.6rem; }
  .av-ledger td.av-event { white-space: normal; min-width: 6.5rem; }
  .av-ledger .av-said { min-width: 0; } }
@media print { .av-ledger .av-scroll { overflow: visible; } .av-ledger .av-kind {
  print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
REPORT_CSS = """
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


def ledger_html(ledger: Ledger) -> str:
    """Show a ledger as a table: what each event was, and what it did to each `.grad`.

    At most 40 events (the first and the last) and 6 parameters are shown, with a note about the rest.

    >>> from accumviz.ledger.ledger import Parameter
    >>> rows = [dict(kind="backward", label="loss", contribution={"w": -16}, grad={"w": -16})]
    >>> "−16" in ledger_html(Ledger.build([Parameter("w", (1,))], rows))
    True
    """
    parameters = range(min(len(ledger.parameters), _MOST_PARAMETERS))
    events, ends = words.first_and_last(ledger.events)
    notes = [f"Shown: the {ends}."] if ends else []
    if len(ledger.parameters) > _MOST_PARAMETERS:
        of = f"{len(ledger.parameters):,} parameters"
        notes.append(f"Shown: the first {_MOST_PARAMETERS} of {of}.")
    if not ledger.complete:
        ended = "Incomplete: the process ended before the recording was closed."
        notes.insert(0, ended)
    if not all(words.is_vector(ledger, p) for p in parameters):
        notes.append("‖ ‖ is the 2-norm of a tensor with more than 4 elements.")
    everything = range(len(ledger)), range(len(ledger.parameters))
    caption = f"Ledger: {words.overview(ledger, *everything)}"
    has_loss = not all(math.isnan(event.loss) for event in events)
    rows = [_row(ledger, event, parameters, has_loss=has_loss) for event in events]
    head = _head(ledger, parameters, has_loss=has_loss) if rows else ""
    below = "".join(f"<p>{note}</p>" for note in notes)
    # The table scrolls in a box by itself, so that a narrow page does not.
    return (
        f'<div class="accumviz av-ledger"><style>{style.CSS}{_LEDGER_CSS}</style>'
        '<div class="av-scroll" tabindex="0" role="group" aria-label="ledger">'
        f"<table><caption><span>{escape(caption)}</span></caption><thead>{head}</thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{below}</div>"
    )


def _head(
    ledger: Ledger,
    parameters: Iterable[int],
    *,
    has_loss: bool,
) -> str:
    names = ""
    columns = ""
    for p in parameters:
        parameter = ledger.parameters[p]
        about = escape(f"{parameter.name}, shape {parameter.shape}")
        names += (
            f'<th class="av-name av-n av-first" scope="colgroup" colspan="2" title="{about}">'
            f"{_name(parameter.name, 32)}</th>"
        )
        bar = "" if words.is_vector(ledger, p) else "‖"
        columns += f'<th class="av-n av-first" scope="col">{bar}contribution{bar}</th>'
        columns += f'<th class="av-n" scope="col">{bar}.grad{bar}</th>'
    tall = 'scope="col" rowspan="2"'
    loss = f'<th {tall} class="av-n av-first">loss</th>' if has_loss else ""
    return (
        f'<tr><th {tall} class="av-n">#</th><th {tall}>event</th>{names}'
        f'{loss}<th {tall} class="av-first">code</th></tr><tr>{columns}</tr>'
    )


def _row(
    ledger: Ledger, event: Event, parameters: Iterable[int], *, has_loss: bool
) -> str:
    cells = "".join(_cells(ledger, event.index, p) for p in parameters)
    if has_loss:
        loss = "" if math.isnan(event.loss) else style.number(event.loss)
        cells += f'<td class="av-n av-first">{loss}</td>'
    step = ' class="av-step"' if event.kind == "step" else ""
    source = event.source.strip()
    code = f'<code title="{escape(source)}">{escape(words.shorten(source, 44))}</code>'
    line = f'<span class="av-quiet">{event.line}</span> ' if event.line else ""
    return (
        f'<tr{step}><th class="av-n av-quiet" scope="row">{event.index}</th>'
        f'<td class="av-event">{_event(ledger, event)}</td>{cells}'
        f'<td class="av-first">{line}{code}</td></tr>'
    )


def _event(ledger: Ledger, event: Event) -> str:
    about = words.subject(event)
    name = f" {_name(about, 28)}" if about else ""
    shown = f"<b>{event.kind}</b>{name}"
    remarks = []
    if event.rank is not None:
        remarks.append(f"rank {event.rank}")
    if event.skipped:
        remarks.append("skipped: no weight changed")
    if event.within:
        remarks.append(f"inside a {event.within}")
    lost = ledger.unconsumed(event.index)
    if lost:
        of = counted(len(set().union(*lost.values())), "backward")
        where = counted(len(lost), "parameter")
        remarks.append(f"erased before any step used it: {of} in {where}")
    said = "".join(f'<span class="av-said">{escape(one)}</span>' for one in remarks)
    color, _ = style.kind(event.kind)
    return f'<span class="av-kind" style="border-color:{color}">{shown}</span>{said}'


def _name(name: str, limit: int) -> str:
    return f"<code><bdi>{escape(words.shorten(name, limit))}</bdi></code>"


def _cells(ledger: Ledger, event: int, p: int) -> str:
    added = _number(ledger, event, p, "contribution")
    grad = _number(ledger, event, p, "grad").replace("None", _NONE)
    return f'<td class="av-n av-first">{added}</td><td class="av-n av-grad">{grad}</td>'


def _number(
    ledger: Ledger,
    event: int,
    p: int,
    of: str,
) -> str:
    """Write the number alone: that it is a norm stands in the head of its column."""
    return escape(words.value(ledger, event, p, of).removeprefix("‖·‖ "))


# --- reports --------------------------------------------------------------------------------------


def first_line(report: Report) -> str:
    """Say first what a report comes to, and how many findings are left out of it.

    >>> first_line(Report())
    'Healthy: check finds no mistake.'
    """
    aside = f" {literal(report.aside)}." if report.ignored else ""
    return _comes_to(report) + aside


def _comes_to(report: Report) -> str:
    if report.verdict == "healthy":
        condition = f", if {report.condition}" if report.condition else ""
        return f"Healthy{condition}: check finds no mistake."
    if report.verdict == "no verdict":
        reason = literal(report.reason).rstrip(".")
        return f"No verdict: {reason}. {report.supposed}".rstrip()
    mistakes = [one.rule for one in report.findings if one.severity != "note"]
    rules = []
    for rule, many in Counter(mistakes).items():
        rules.append(rule if many == 1 else f"{rule} × {many}")
    return f"{counted(len(mistakes), 'mistake')}: {', '.join(rules)}."


def report_html(report: Report) -> str:
    """Show a report: its verdict, every finding, and what could not be judged."""
    look = report.verdict.replace(" ", "-")
    said = f"{_SIGNS[report.verdict]} <b>{marked(first_line(report))}</b>"
    if report.counts:
        text = f"Looked at: {escape(report.looked_at)}."
        said += f" <span class='av-said'>{text}</span>"
    parts = [f'<p class="av-verdict av-{look}">{said}</p>']
    if report.reason and report.verdict == "findings":
        parts.append(f"<p>{marked(report.reason)}</p>")
    for said in filter(None, (*report.steps, *report.losses, report.not_seen)):
        parts.append(f"<p class='av-said'>{escape(said)}</p>")
    parts += map(_finding, report.findings)
    if report.unjudged:
        rows = ""
        for rule, why in report.unjudged.items():
            rows += f"<li><code>{escape(rule)}</code>: {escape(why)}</li>"
        many = counted(len(report.unjudged), "rule")
        parts.append(
            f"<details><summary>Not judged: {many}</summary><ul>{rows}</ul></details>"
        )
    return f'<div class="accumviz av-report"><style>{style.CSS}{REPORT_CSS}</style>{"".join(parts)}</div>'


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


def report_data(report: Report) -> dict[str, Any]:
    """Return a report as a page shows it."""
    data = {
        "verdict": report.verdict,
        "said": first_line(report),
        "findings": list(map(_finding_data, report.findings)),
    }
    if report.unjudged:
        reasons = [f"{rule}: {why}" for rule, why in report.unjudged.items()]
        data["unjudged"] = list(map(literal, reasons))
    return data


def _finding_data(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "event": finding.event,
        "line": finding.line,
        "cause": literal(finding.cause),
        "evidence": finding.numbers,
        "suggestion": finding.suggestion.splitlines(),
        "read": address(finding.rule),
    }


def comparison_html(comparison: Comparison) -> str:
    """Show a comparison: the result first, then what proves it."""
    parts = [f"<p><b>{escape(comparison.summary)}</b></p>"]
    if comparison.parting is not None:
        parts.append(f"<p>They part at: {escape(comparison.parting.said)}</p>")
        for event in (comparison.parting.a, comparison.parting.b):
            parts.append(f"<p><code>{escape(place(event))}</code></p>")
    steps = [(str(p.a), str(p.b), p.words) for p in comparison.steps[:100]]
    heads = ["event of a", "event of b", "relative error"]
    parts.append(table(heads, steps, "The steps"))
    if comparison.first is not None:
        heads = ["parameter", "relative error"]
        parts.append(table(heads, comparison.furthest, "The parameters furthest apart"))
    for note in comparison.notes:
        parts.append(f"<p>Note: {marked(note)}</p>")
    content = "".join(parts)
    return f'<div class="accumviz av-comparison"><style>{style.CSS}{REPORT_CSS}</style>{content}</div>'
