"""Put names, numbers and events into words, the same in every view."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger
from accumviz.show import counted, literal, plural
from accumviz.views.shares import bars
from accumviz.views.style import number, size

# Of more events, in a table and in sentences, the first and the last are shown.
MOST_ROWS = 40
_MOST_NAMES = 6
# What an event did to, or was done by.
_LINKS = {"backward": "of", "step": "by", "sync": "by"}
# Digits of a weight: a step may hardly move it.
WEIGHT_DIGITS = 6


def shorten(text: str, limit: int) -> str:
    """Cut a long name in the middle: both of its ends tell it apart from others.

    >>> shorten("encoder.layers.11.self_attn.weight", 17)
    'encoder.…n.weight'
    """
    text = literal(text)
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = max(limit - 1 - tail, 1)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def action(event: Event) -> str:
    """Name an event as a reader would: its kind, or that a step was skipped.

    >>> action(Event(0, "step", details={"skipped": True}))
    'step skipped'
    """
    return f"{event.kind} skipped" if event.skipped else event.kind


def subject(event: Event) -> str:
    """Name what an event acted on or came from: the loss of a backward, the optimizer of a step, a sync's collective.

    >>> subject(Event(0, "step", details={"optimizer": "SGD"})), subject(Event(0, "backward", "g_loss"))
    ('SGD', 'g_loss')
    """
    detail = "op" if event.kind == "sync" else "optimizer"
    name = "" if event.kind == "sync" else event.label
    return literal(name or str(event.details.get(detail, "")))


def place(event: Event) -> str:
    """Return the user's line, and the rank if there are several; nothing when it is not known.

    >>> place(Event(0, "step", line=12)), place(Event(0, "step", line=12, rank=1))
    ('line 12', 'rank 1 line 12')
    """
    rank = "" if event.rank is None else f"rank {event.rank}"
    line = f"line {event.line}" if event.line else ""
    return f"{rank} {line}".strip()


def is_vector(ledger: Ledger, parameter: int) -> bool:
    """Return whether a parameter is so small, and recorded so exactly, that all of its elements are written."""
    return parameter in ledger.exact and 0 < ledger.parameters[parameter].numel <= 4


def value(
    ledger: Ledger,
    event: int,
    parameter: int,
    of: str = "grad",
) -> str:
    """Write a contribution (empty if there was none) or a `.grad` ("None" if there was none).

    One element is written as it is, up to four as a vector, more as their 2-norm, `‖·‖`.
    Contributions carry their sign, because they are added.
    """
    is_grad = of == "grad"
    if not ledger.state[event, parameter] & (PRESENT if is_grad else CONTRIBUTED):
        return "None" if is_grad else ""
    if is_vector(ledger, parameter):
        elements = ledger.exact[parameter][is_grad][event].tolist()
        return _elements(elements, is_added=not is_grad)
    norms = ledger.grad if is_grad else ledger.contribution
    return f"‖·‖ {number(norms[event, parameter])}"


def _elements(elements: list[float], *, is_added: bool) -> str:
    """Write up to four elements, a single one with the sign with which it is added."""
    texts = ", ".join(map(number, elements))
    if len(elements) > 1:
        return f"({texts})"
    return f"+{texts}" if is_added and elements[0] > 0 else texts


def window_summary(ledger: Ledger) -> str:
    """Say how many accumulation windows there are and how many backwards each consumed.

    >>> window_summary(Ledger.build([], []))
    'no optimizer step'
    """
    lengths = [len(window.backwards) for window in ledger.windows()]
    if not lengths:
        return "no optimizer step"
    low = min(lengths)
    high = max(lengths)
    each = counted(low, "backward") if low == high else f"{low} to {high} backwards"
    return f"{counted(len(lengths), 'accumulation window')} of {each}"


def head(event: Event) -> str:
    """Say what happened, to or by what, where, and the loss.

    >>> head(Event(0, "backward", "g_loss", line=7, loss=2.0))
    'backward of g_loss, line 7, loss 2'
    >>> head(Event(0, "sync", details={"op": "all-reduce", "bytes": 12}))
    'sync by all-reduce of 12 bytes'
    """
    text = action(event)
    if subject(event):
        text += f" {_LINKS.get(event.kind, 'on')} {shorten(subject(event), 40)}"
    if event.kind == "sync" and "bytes" in event.details:
        text += f" of {int(event.details['bytes']):,} bytes"
    if place(event):
        text += f", {place(event)}"
    return text if math.isnan(event.loss) else f"{text}, loss {number(event.loss)}"


def before(*, built: bool = False) -> tuple[str, str]:
    """Say what holds before the first event, and of its graph, which may be `built` already.

    >>> before()
    ('Before the first event. Press play, or drag.', 'No graph yet: a forward builds it.')
    """
    graph = "No graph yet: a forward builds it."
    if built:
        graph = "This graph was built before the recording began."
    return "Before the first event. Press play, or drag.", graph


def memory(event: Event) -> str:
    """Say how many bytes of saved tensors were alive around a backward, if that was measured.

    >>> memory(Event(0, "backward", saved_before=96.0, saved_after=0.0))
    'saved tensors 96 B before, 0 B after'
    """
    if math.isnan(event.saved_before):
        return ""
    before = size(event.saved_before)
    after = size(event.saved_after)
    return f"saved tensors {before} before, {after} after"


def in_numbers(event: Event) -> str:
    """Say what an event did by numbers: a clip's norm, limit and factor, the scaler's scale, a step's learning rate.

    >>> in_numbers(Event(0, "clip", details={"by": "norm", "total_norm": 4.0, "max_norm": 1.0}))
    'norm 4, limit 1, factor 0.25'
    >>> in_numbers(Event(0, "step", details={"lr": [0.1, 0.01]}))
    'learning rates 0.1, 0.01'
    """
    if event.kind == "clip":
        return _clipped(event)
    texts = []
    if event.kind in ("backward", "unscale", "step"):
        for scale in _numbers(event, "amp_scale"):
            texts.append(f"the scaler’s scale {number(scale)}")
    if event.kind == "step":
        rates = list(dict.fromkeys(map(number, _numbers(event, "lr"))))
        if rates:
            noun = plural(len(rates), "learning rate")
            texts.append(f"{noun} {', '.join(rates[:_MOST_NAMES])}")
    return ", ".join(texts)


def _clipped(event: Event) -> str:
    norms = _numbers(event, "total_norm")
    limits = _numbers(event, "max_norm")
    texts = [f"norm {number(norm)}" for norm in norms]
    texts += [f"limit {number(limit)}" for limit in limits]
    for limit in _numbers(event, "clip_value"):
        texts.append(f"limit {number(limit)} for each element")
    if norms and limits and 0 <= norms[0] < math.inf:
        factor = min(1.0, limits[0] / (norms[0] + 1e-6))
        texts.append(f"factor {number(factor)}")
    return ", ".join(texts)


def _numbers(event: Event, detail: str) -> list[float]:
    """Return the numbers that an event's details hold there."""
    given = event.details.get(detail)
    values: Any = given if isinstance(given, list) else [given]
    return [x for x in values if type(x) in (int, float)]


def about(ledger: Ledger, event: Event) -> str:
    """Say all that there is besides an event's numbers in `.grad`: what it did, the bytes around it, new weights."""
    texts = in_numbers(event), memory(event), moved(ledger, event)
    return "; ".join(filter(None, texts))


def moved(ledger: Ledger, event: Event) -> str:
    """Say what the weights are after a step, where there are one or two of them and they were kept.

    >>> moved(Ledger.build([], [{"kind": "step"}]), Event(0, "step"))
    ''
    """
    count = sum(parameter.numel for parameter in ledger.parameters)
    if event.kind != "step" or count not in (1, 2):
        return ""
    texts = []
    for p in sorted(ledger.exact):
        weights = ledger.weights(p)
        if weights.size and not np.isnan(weights[event.index]).all():
            numbers = [number(x, WEIGHT_DIGITS) for x in weights[event.index]]
            name = shorten(ledger.parameters[p].name, 40)
            texts.append(f"{name} is now {', '.join(numbers)}")
    return ", ".join(texts)


def sentence(
    ledger: Ledger,
    event: Event,
    parameters: Sequence[int],
) -> str:
    """Tell one event in words, with the numbers of the given parameters."""
    parts = [_received(ledger, event.index, p) for p in parameters[:_MOST_NAMES]]
    more = len(parameters) - _MOST_NAMES
    if more > 0:
        parts.append(f"and {counted(more, 'more parameter')}")
    parts.append(about(ledger, event))
    text = "; ".join(filter(None, parts))
    start = f"Event {event.index}, {head(event)}"
    return f"{start}: {text}." if text else f"{start}."


def _received(ledger: Ledger, event: int, p: int) -> str:
    name = ledger.parameters[p].name
    added = value(ledger, event, p, "contribution")
    receives = f" receives {added}, " if added else ""
    text = f"{shorten(name, 40)}{receives}.grad {value(ledger, event, p)}"
    erased = []
    for born in ledger.unconsumed(event).get(name, []):
        erased.append(value(ledger, born, p, "contribution"))
    if erased:
        text += f" (erased {', '.join(erased)} before any step used it)"
    return text


def overview(
    ledger: Ledger,
    events: Sequence[int],
    parameters: Sequence[int],
) -> str:
    """Say in one sentence what a ledger, or a part of it, holds."""
    cells = np.ix_(list(events), list(parameters))
    norms = ledger.contribution[cells][ledger.state[cells] & CONTRIBUTED > 0]
    finite = norms[np.isfinite(norms)]
    rows = counted(len(parameters), "parameter")
    text = f"{rows} × {counted(len(events), 'event')}, {window_summary(ledger)}"
    if finite.size:
        low = number(finite.min())
        high = number(finite.max())
        text += f"; contribution norms from {low} to {high}"
    if finite.size < norms.size:
        broken = counted(norms.size - finite.size, "contribution")
        text += f"; {broken} not finite"
    if not ledger.complete:
        text += "; the recording is incomplete"
    notes = [f" Note: {literal(str(note))}." for note in ledger.meta.get("notes", ())]
    return f"{text}.{''.join(notes)}"


def story(
    ledger: Ledger, events: Sequence[int], parameters: Sequence[int]
) -> list[str]:
    """Tell a ledger in sentences: what it holds, then event by event (the first and last of many)."""
    sentences = [overview(ledger, events, parameters)]
    chosen, ends = first_and_last(events)
    if ends:
        sentences.append(f"The {ends}:")
    weighed: dict[int, str] = {}
    for bar in bars(ledger, chosen)[0]:
        weighed[bar.step] = f"{weighed.get(bar.step, '')} {bar.words}"
    for e in chosen:
        text = sentence(ledger, ledger[e], parameters)
        sentences.append(text + weighed.get(e, ""))
    return sentences


def first_and_last(events: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the first and the last of many events, and which those are; nothing is said where they are all."""
    if len(events) <= MOST_ROWS:
        return list(events), ""
    half = MOST_ROWS // 2
    ends = f"first {half} and the last {half} of {len(events):,} events"
    return [*events[:half], *events[-half:]], ends


class Group(NamedTuple):
    """Neighbouring rows under one name."""

    name: str
    start: int
    stop: int


def group_rows(names: Sequence[str], most: int = 26) -> list[Group]:
    """Group neighbouring parameters by the deepest module prefix that gives at most `most` groups.

    >>> group_rows(["a.weight", "a.bias", "b.weight"], most=2)
    [Group(name='a', start=0, stop=2), Group(name='b', start=2, stop=3)]
    """
    # The ranks of a ledger of several come first: "rank 0 · encoder.weight".
    parts = [re.split(r"(?<= · )|(?<=\.)", name) for name in names]
    best: list[Group] = []
    for depth in range(1, max(map(len, parts), default=1) + 1):
        # A name stays whole only when it is all there is; otherwise its last part is inside the group.
        groups = _neighbours("".join(part[:depth]).rstrip(" ·.") for part in parts)
        if best and len(groups) > most:
            break
        best = groups
    return best


def _neighbours(names: Iterable[str]) -> list[Group]:
    groups = []
    start = 0
    for name, rows in itertools.groupby(names):
        stop = start + len(list(rows))
        groups.append(Group(name, start, stop))
        start = stop
    return groups
