"""Show a ledger as an HTML table."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Iterator

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger, Provenance
from accumviz.show import counted, literal
from accumviz.views import style, words

_MOST_ROWS, _MOST_PARAMETERS = 40, 6

_CSS = """
.accumviz.av-ledger { max-width: 100%; }
.av-ledger .av-scroll { overflow-x: auto; max-width: 100%; }
.av-ledger table { border-collapse: collapse; font-size: 0.8125rem; line-height: 1.35; color: inherit; margin: 0;
  width: auto; border: 0; font-variant-numeric: tabular-nums; }
.av-ledger caption span, .av-ledger .av-gap span { display: block; position: sticky; left: 0; width: fit-content;
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
.av-ledger .av-label { display: inline-block; width: 0.6rem; height: 0.6rem; border-radius: 50%; margin-right: 0.3rem; }
.av-ledger td code { background: none; border: 0; padding: 0; color: var(--av-text); font-size: 0.78rem; }
.av-ledger td.av-gap { color: var(--av-muted); font-style: italic; }
.av-ledger p { margin: 0.5rem 0 0 0.5rem; color: var(--av-muted); font-size: 0.8125rem; }
@media (max-width: 30rem) {
  .av-ledger th, .av-ledger td { padding-inline: 0.35rem; }
  .av-ledger td.av-first, .av-ledger th.av-first { padding-left: 0.6rem; }
  .av-ledger td.av-event { white-space: normal; min-width: 6.5rem; }
  .av-ledger .av-said { min-width: 0; } }
@media print { .av-ledger .av-scroll { overflow: visible; } .av-ledger .av-kind, .av-ledger .av-label {
  print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def ledger_html(ledger: Ledger) -> str:
    """Show a ledger as a table: what each event was, and what it did to each `.grad`.

    At most 40 events (the first and the last) and 6 parameters are shown, with a note about the rest.

    >>> from accumviz.ledger.ledger import Parameter
    >>> rows = [dict(kind="backward", label="loss", contribution={"w": -16}, grad={"w": -16})]
    >>> "−16" in ledger_html(Ledger.build([Parameter("w", (1,))], rows))
    True
    """
    half, shown = (
        _MOST_ROWS // 2,
        list(range(min(len(ledger.parameters), _MOST_PARAMETERS))),
    )
    left_out = len(ledger) - _MOST_ROWS
    events = (
        list(ledger)
        if left_out <= 0
        else [*ledger.events[:half], *ledger.events[-half:]]
    )
    body = [_row(ledger, event, shown) for event in events]
    notes = []
    if left_out > 0:
        width = 3 + _has_loss(ledger) + 2 * len(shown)
        gap = f"<span>… {left_out:,} events between are not shown</span>"
        body.insert(half, f'<tr><td class="av-gap" colspan="{width}">{gap}</td></tr>')
        notes.append(
            f"Shown: the first {half} and the last {half} of {len(ledger):,} events."
        )
    if len(ledger.parameters) > len(shown):
        notes.append(
            f"Shown: the first {len(shown)} of {len(ledger.parameters):,} parameters."
        )
    if not ledger.complete:
        notes.insert(
            0, "Incomplete: the process ended before the recording was closed."
        )
    if any(not words.is_vector(ledger, p) for p in shown):
        notes.append("‖ ‖ is the 2-norm of a tensor with more than 4 elements.")
    told = "".join(f"<p>{note}</p>" for note in notes)
    inside = (
        f"{_head(ledger, shown)}<tbody>{''.join(body)}</tbody>" if len(ledger) else ""
    )
    caption = f"Ledger: {words.overview(ledger, range(len(ledger)), range(len(ledger.parameters)))}"
    return _framed(
        f"<table><caption><span>{html.escape(caption)}</span></caption>{inside}</table>",
        "ledger",
        told,
    )


def _head(ledger: Ledger, shown: Iterable[int]) -> str:
    names, columns = "", ""
    for p in shown:
        parameter = ledger.parameters[p]
        name = html.escape(words.shorten(parameter.name, 32))
        about = html.escape(f"{literal(parameter.name)}, shape {parameter.shape}")
        names += (
            f'<th class="av-name av-n av-first" scope="colgroup" colspan="2" title="{about}">'
            f"<code><bdi>{name}</bdi></code></th>"
        )
        bar = "" if words.is_vector(ledger, p) else "‖"
        columns += f'<th class="av-n av-first" scope="col">{bar}contribution{bar}</th>'
        columns += f'<th class="av-n" scope="col">{bar}.grad{bar}</th>'
    first, last = (
        "".join(
            f'<th scope="col" rowspan="2"{extra}>{name}</th>'
            for name, extra in heads
            if name != "loss" or _has_loss(ledger)
        )
        for heads in (
            (("#", ' class="av-n"'), ("event", "")),
            (("loss", ' class="av-n av-first"'), ("code", ' class="av-first"')),
        )
    )
    return f"<thead><tr>{first}{names}{last}</tr><tr>{columns}</tr></thead>"


def _has_loss(ledger: Ledger) -> bool:
    return any(not math.isnan(event.loss) for event in ledger)


def _row(ledger: Ledger, event: Event, shown: Iterable[int]) -> str:
    lost = ledger.unconsumed(event.index)
    cells = "".join(
        _cells(ledger, event.index, p, lost.get(ledger.parameters[p].name, []))
        for p in shown
    )
    loss = "" if math.isnan(event.loss) else style.number(event.loss)
    if _has_loss(ledger):
        cells += f'<td class="av-n av-first">{loss}</td>'
    step = ' class="av-step"' if event.kind == "step" else ""
    return (
        f'<tr{step}><th class="av-n av-quiet" scope="row">{event.index}</th>'
        f'<td class="av-event">{_event(ledger, event, lost)}</td>{cells}<td class="av-first">{_code(event)}</td></tr>'
    )


def _event(ledger: Ledger, event: Event, lost: dict[str, list[int]]) -> str:
    about, dot = words.subject(event), ""
    if event.kind == "backward" and len(ledger.labels) > 1:
        color = style.label_colors(ledger.labels)[event.label]
        dot = _dot(color)
    name = f" {dot}{_name(about, 28)}" if about else ""
    remarks = "".join(
        f'<span class="av-said">{html.escape(remark)}</span>'
        for remark in _remarks(event, lost)
    )
    color = style.KIND[event.kind]
    return f'<span class="av-kind" style="border-color:{color}"><b>{event.kind}</b>{name}</span>{remarks}'


def _remarks(event: Event, lost: dict[str, list[int]]) -> Iterator[str]:
    if event.rank is not None:
        yield f"rank {event.rank}"
    if event.skipped:
        yield "skipped: no weight changed"
    if event.within:
        yield f"inside a {event.within}"
    if lost:
        backwards = sorted(set(itertools.chain.from_iterable(lost.values())))
        numbers = [f"#{b}" for b in backwards[:4]] + ["…"] * (len(backwards) > 4)
        yield (
            f"erased before any step used it: {counted(len(backwards), 'backward')} "
            f"({', '.join(numbers)}) in {counted(len(lost), 'parameter')}"
        )


def _dot(color: str) -> str:
    return f'<span class="av-label" style="background:{color}"></span>'


def _name(name: str, limit: int) -> str:
    return f"<code><bdi>{html.escape(words.shorten(name, limit))}</bdi></code>"


def _code(event: Event) -> str:
    line = f'<span class="av-quiet">{event.line}</span> ' if event.line else ""
    full, short = literal(event.source.strip()), words.shorten(event.source.strip(), 44)
    return (
        f'{line}<code title="{html.escape(full)}">{html.escape(short)}</code>'
        if full
        else line
    )


def _cells(ledger: Ledger, event: int, p: int, lost: list[int]) -> str:
    state = ledger.state[event, p]
    added = _plain(ledger, event, p, "contribution") if state & CONTRIBUTED else ""
    if lost:
        gone = ", ".join(
            words.value(ledger, b, p, "contribution") for b in lost[:2]
        ) + (", …" if len(lost) > 2 else "")
        added += f'<span class="av-said">erased {html.escape(gone)}, unused</span>'
    grad = (
        _plain(ledger, event, p, "grad")
        if state & PRESENT
        else '<span class="av-none">None</span>'
    )
    return f'<td class="av-n av-first">{added}</td><td class="av-n av-grad">{grad}</td>'


def _plain(ledger: Ledger, event: int, p: int, of: str) -> str:
    """The number alone: that it is a norm stands in the head of its column."""
    return html.escape(words.value(ledger, event, p, of).removeprefix("‖·‖ "))


def provenance_html(provenance: Provenance) -> str:
    """Show which loss wrote into which parameter: the loss × parameter matrix of summed contribution norms.

    Parameters are rows, losses columns; at most 40 parameters (the first and the last), with a note about the rest.
    """
    labels, names = provenance.labels, provenance.parameters
    half, chosen = _MOST_ROWS // 2, list(range(len(names)))
    note = ""
    if len(names) > _MOST_ROWS:
        chosen = [*chosen[:half], *chosen[-half:]]
        note = f"<p>Shown: the first {half} and the last {half} of {len(names):,} parameters.</p>"
    rows = []
    for p in chosen:
        cells = "".join(_wrote(provenance, i, p) for i in range(len(labels)))
        rows.append(f'<tr><th scope="row">{_name(names[p], 40)}</th>{cells}</tr>')
    head = "".join(
        f'<th class="av-n" scope="col">{_dot(color)}{_name(label or "backward", 28)}</th>'
        for label, color in style.label_colors(labels).items()
    )
    caption = "What each loss added to each .grad: the sum of the norms of its contributions, and their number."
    table = (
        f'<table><caption><span>{caption}</span></caption><thead><tr><th scope="col">parameter</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    return _framed(table, "which loss wrote where", note)


def _wrote(provenance: Provenance, i: int, p: int) -> str:
    """The cell of what a loss added to a parameter, shaded by how much that is."""
    total, count = provenance.total, provenance.count[i, p]
    if not count:
        return '<td class="av-n av-none">nothing</td>'
    share = float(total[i, p]) / max(float(total.max()), 1e-300)
    share = math.sqrt(min(share, 1.0)) if math.isfinite(share) else 1.0
    color = style.label_colors(provenance.labels)[provenance.labels[i]]
    # Transparent over the page's own background: readable in light and dark.
    shade = f"background:{color}{round(110 * share):02x} !important"
    # In the cell's own colour: a quieter one is not readable on the shade.
    told = f"{style.number(total[i, p])} ({count} ×)"
    return f'<td class="av-n" style="{shade}">{told}</td>'


def _framed(table: str, label: str, notes: str) -> str:
    """A table in a box that scrolls by itself, so that a narrow page does not."""
    return (
        f'<div class="accumviz av-ledger"><style>{style.CSS}{_CSS}</style>'
        f'<div class="av-scroll" tabindex="0" role="group" aria-label="{label}">{table}</div>{notes}</div>'
    )
