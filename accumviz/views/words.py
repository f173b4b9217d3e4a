"""Put names, numbers and events into words, the same in every view."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from accumviz.graph.graph import Graph
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, Ledger
from accumviz.show import counted, literal, plural
from accumviz.views.shares import bars
from accumviz.views.style import number, size

_MOST_SENTENCES = 40
_MOST_NAMES = 6
# Of each ledger: see `_digits`.
_DIGITS: WeakKeyDictionary[Ledger, dict[int, int]] = WeakKeyDictionary()
# So many letters stand on end above a column of a player.
_UPRIGHT = 12
_IN_BRACKETS, _OBJECT = (
    re.compile(r"\([^()]*\)|\[[^\[\]]*\]"),
    re.compile(r"[^\W\d]\w*(\.\w+)*"),
)


def shorten(text: str, limit: int) -> str:
    """Cut a long name in the middle: both of its ends tell it apart from others.

    >>> shorten("encoder.layers.11.self_attn.weight", 17)
    'encoder.…n.weight'
    """
    text = literal(text)
    if len(text) <= limit:
        return text
    tail = (limit - 1 + 1) // 2
    return text[: max(limit - 1 - tail, 1)] + "…" + text[len(text) - tail :]


def brief(text: str, limit: int) -> str:
    """Cut what is long for its place, a call as `brief_call` does.

    >>> brief("scaler.scale(loss)", 11), brief("total_loss / accumulation", 12)
    ('scale(loss)', 'total…lation')
    """
    return shorten(brief_call(text, limit), limit)


def brief_call(text: str, limit: int) -> str:
    """Of a long call take away the object that is called, then what stands in its brackets; all else stays as it is.

    >>> brief_call("scaler.scale(loss / K)", 18), brief_call("scaler.scale(loss / K)", 11)
    ('scale(loss / K)', 'scale(…)')
    >>> brief_call("model(x, mask) / K", 14), brief_call("loss / count.item()", 11)
    ('model(…) / K', 'loss / count.item()')
    """
    if len(text) > limit and (last := _last_call(text)):
        name, inside, rest = last
        for called in (f"{name}({inside}){rest}", f"{name}(…){rest}"):
            if len(called) <= limit:
                return called
    return text


def _last_call(text: str) -> tuple[str, str, str] | None:
    """The name of what is called last, what stands in its brackets, what follows; None if more than an object leads."""
    end = text.rfind(")")
    depths = itertools.accumulate(
        {")": 1, "(": -1}.get(letter, 0) for letter in reversed(text[: end + 1])
    )
    opened = end - next((n for n, depth in enumerate(depths) if depth == 0), end)
    leads = _IN_BRACKETS.sub("", _IN_BRACKETS.sub("", text[:opened])) if end > 0 else ""
    name = leads.rpartition(".")[2]
    return (
        (name, text[opened + 1 : end], text[end + 1 :])
        if _OBJECT.fullmatch(leads)
        else None
    )


def reading(chapter: str) -> tuple[str, str]:
    """Where what a finding says to read stands below the book's chapters, and how a link to it is called.

    >>> reading("02_zero_grad#sec-none")
    ('02_zero_grad.html#sec-none', 'chapter 2')
    """
    page, _, section = chapter.partition("#")
    return f"{page}.html#{section}", f"chapter {int(page.partition('_')[0])}"


def on_any_rank(name: str) -> str:
    """A parameter's name without the rank that a merged ledger puts before it.

    >>> on_any_rank("rank 1 · fc.weight"), on_any_rank("fc.weight")
    ('fc.weight', 'fc.weight')
    """
    return re.sub(r"^rank \d+ · ", "", name)


def action(event: Event) -> str:
    """Name an event as a reader would: its kind, or that a step was skipped.

    >>> action(Event(0, "step", details={"skipped": True}))
    'step skipped'
    """
    return f"{event.kind} skipped" if event.skipped else event.kind


def subject(event: Event) -> str:
    """What an event acted on or came from: the loss of a backward, the optimizer of a step, the collective of a sync.

    >>> subject(Event(0, "step", details={"optimizer": "SGD"})), subject(Event(0, "backward", "g_loss"))
    ('SGD', 'g_loss')
    """
    if event.kind == "sync":
        return literal(str(event.details.get("op", "")))
    return literal(event.label or str(event.details.get("optimizer", "")))


def title(event: Event) -> str:
    """What stands on end above a narrow column of a player: the rank first, which a cut in the middle spares.

    >>> title(Event(0, "backward", "loss / K", rank=1)), title(Event(0, "sync", details={"op": "reduce-scatter"}))
    ('1: loss / K', 'scatter')
    """
    what = {"backward": subject(event), "sync": collective(event, _UPRIGHT)}.get(
        event.kind
    ) or action(event)
    return on_rank(event, brief(what, _UPRIGHT - len(on_rank(event, "x")) + 1))


def collective(event: Event, room: int) -> str:
    """What a sync was, in so many letters: a scatter is told from an all-gather without its other half.

    >>> [collective(Event(0, "sync", details={"op": "reduce-scatter"}), room) for room in (14, 13)]
    ['reduce-scatter', 'scatter']
    """
    op = subject(event)
    return op if len(op) <= room else shorten(op.removeprefix("reduce-"), room)


def on_rank(event: Event, text: str) -> str:
    """A text about an event of one rank of several begins with the rank's number.

    >>> on_rank(Event(0, "step", rank=1), "SGD"), on_rank(Event(0, "step"), "SGD")
    ('1: SGD', 'SGD')
    """
    return text if event.rank is None else f"{event.rank}: {text}".rstrip()


def place(event: Event) -> str:
    """The user's line, and the rank if there are several; nothing when it is not known.

    >>> place(Event(0, "step", line=12)), place(Event(0, "step", line=12, rank=1))
    ('line 12', 'rank 1 line 12')
    """
    where = [f"rank {event.rank}"] if event.rank is not None else []
    return " ".join([*where, *([f"line {event.line}"] if event.line else [])])


def is_signed(ledger: Ledger, parameter: int) -> bool:
    """Whether a parameter is one number of which the sign was recorded."""
    return ledger.parameters[parameter].numel == 1 and parameter in ledger.exact


def is_vector(ledger: Ledger, parameter: int) -> bool:
    """Whether a parameter is so small, and recorded so exactly, that all of its elements are written."""
    return parameter in ledger.exact and 0 < ledger.parameters[parameter].numel <= 4


def value(
    ledger: Ledger, event: int, parameter: int, of: str = "grad", digits: int = 4
) -> str:
    """Write a contribution (empty if there was none) or a `.grad` ("None" if there was none).

    One element is written as it is, up to four as a vector, more as their 2-norm, `‖·‖`.
    Contributions carry their sign, because they are added.
    """
    if not ledger.state[event, parameter] & (PRESENT if of == "grad" else CONTRIBUTED):
        return "None" if of == "grad" else ""
    norm = float(
        (ledger.grad if of == "grad" else ledger.contribution)[event, parameter]
    )
    elements = (
        ledger.exact[parameter][of == "grad"][event]
        if parameter in ledger.exact
        else np.empty(0)
    )
    if elements.size == 1:
        sign = "+" if of == "contribution" and elements[0] > 0 else ""
        return sign + number(float(elements[0]), digits)
    if 0 < elements.size <= 4:
        return "(" + ", ".join(number(float(x), digits) for x in elements) + ")"
    return f"‖·‖ {number(norm, digits)}"


def window_summary(ledger: Ledger) -> str:
    """Say how many accumulation windows there are and how many backwards each consumed.

    >>> window_summary(Ledger.build([], []))
    'no optimizer step'
    """
    lengths = [len(window.backwards) for window in ledger.windows()]
    if not lengths:
        return "no optimizer step"
    low, high = min(lengths), max(lengths)
    if high == 0:
        return f"{counted(len(lengths), 'step')} that consumed nothing"
    each = counted(low, "backward") if low == high else f"{low} to {high} backwards"
    return f"{counted(len(lengths), 'accumulation window')} of {each}"


def head(event: Event) -> str:
    """Say what happened, to or by what, where, and the loss.

    >>> head(Event(0, "backward", "g_loss", line=7, loss=2.0))
    'backward of g_loss, line 7, loss 2'
    >>> head(Event(0, "sync", details={"op": "all-reduce", "bytes": 12}))
    'sync by all-reduce of 12 bytes'
    """
    # The subject of a step is the optimizer that took it; of a backward, the loss it came from.
    link = {"backward": "of", "step": "by", "sync": "by"}.get(event.kind, "on")
    told = action(event)
    told += f" {link} {shorten(subject(event), 40)}" if subject(event) else ""
    told += (
        f" of {int(event.details['bytes']):,} bytes"
        if event.kind == "sync" and "bytes" in event.details
        else ""
    )
    told += f", {place(event)}" if place(event) else ""
    return told if math.isnan(event.loss) else f"{told}, loss {number(event.loss)}"


def before(first: Graph | None = None) -> tuple[str, str]:
    """What is true before the first event, and of its graph, of which it may be known whether it was there already.

    >>> before()[0]
    'Before the first event: nothing is recorded yet. Press play, or drag.'
    >>> before(Graph((), (), (), {"before": False}))[0]
    'Before the first event: nothing has run yet. Press play, or drag.'
    """
    told = {
        None: "nothing is recorded yet",
        False: "nothing has run yet",
        True: "its graph is built already",
    }
    known = None if first is None else first.meta.get("before")
    graph = (
        "This graph was built before the recording began."
        if known is True
        else "No graph yet: a forward builds it."
    )
    return (
        f"Before the first event: {told.get(known, told[None])}. Press play, or drag.",
        graph,
    )


def memory(event: Event) -> str:
    """Say how many bytes of saved tensors were alive around a backward, and what was allocated, if it was measured.

    >>> memory(Event(0, "backward", saved_before=96.0, saved_after=0.0, allocated=2048.0, peak=4096.0))
    'saved tensors 96 B before, 0 B after; 2 KiB allocated, 4 KiB at most on the way'
    """
    told = []
    if not math.isnan(event.saved_before):
        told.append(
            f"saved tensors {size(event.saved_before)} before, {size(event.saved_after)} after"
        )
    if not math.isnan(event.allocated):
        most = (
            "" if math.isnan(event.peak) else f", {size(event.peak)} at most on the way"
        )
        told.append(f"{size(event.allocated)} allocated{most}")
    return "; ".join(told)


def held(event: Event) -> str:
    """Say what an event did by numbers: a clip's norm, limit and factor, the scaler's scale, a step's learning rate.

    >>> held(Event(0, "clip", details={"by": "norm", "total_norm": 4.0, "max_norm": 1.0}))
    'norm 4, limit 1, factor 0.25'
    >>> held(Event(0, "step", details={"lr": [0.1, 0.01]}))
    'learning rates 0.1, 0.01'
    """
    told = _clipped(event) if event.kind == "clip" else []
    if event.kind in ("backward", "unscale", "step"):
        scales = _numbers(event.details.get("amp_scale"))
        told += [f"the scaler’s scale {number(x)}" for x in scales]
    if event.kind == "step":
        rates = [*dict.fromkeys(_numbers(event.details.get("lr")))]
        numbers = ", ".join(map(number, rates[:_MOST_NAMES]))
        told += [f"{plural(len(rates), 'learning rate')} {numbers}"] if rates else []
    return ", ".join(told)


def _clipped(event: Event) -> list[str]:
    norms, limits, values = (
        _numbers(event.details.get(name))
        for name in ("total_norm", "max_norm", "clip_value")
    )
    told = [f"norm {number(x)}" for x in norms]
    told += [f"limit {number(x)}" for x in limits]
    told += [f"limit {number(x)} for each element" for x in values]
    if norms and limits and 0 <= norms[0] < math.inf:
        told.append(f"factor {number(min(1.0, limits[0] / (norms[0] + 1e-6)))}")
    return told


def _numbers(given: object) -> list[float]:
    """The numbers among what an event's details hold there."""
    values = given if isinstance(given, list | tuple) else [given]
    return [
        float(x)
        for x in values
        if isinstance(x, int | float) and not isinstance(x, bool)
    ]


def about(event: Event) -> str:
    """All that is said of an event behind its numbers in `.grad`: what it did, and the bytes around it."""
    return joined(held(event), memory(event))


def joined(*texts: str) -> str:
    """Join what there is to say.

    >>> joined("a", "", "b")
    'a; b'
    """
    return "; ".join(filter(None, texts))


def moved(ledger: Ledger, event: Event) -> str:
    """Say what the weights are after a step, where there are one or two of them and they were kept.

    >>> moved(Ledger.build([], [{"kind": "step"}]), Event(0, "step"))
    ''
    """
    kept, parameters = ledger.weighed, ledger.parameters
    if event.kind != "step" or not 1 <= sum(p.numel for p in parameters) <= 2:
        return ""
    at = int(np.searchsorted(kept.events, event.index))
    if at == len(kept.events) or kept.events[at] != event.index:
        return ""
    told = []
    for p, values in sorted(kept.elements.items()):
        if not np.isnan(values[at]).all():
            numbers = [number(float(x), _digits(ledger)[p]) for x in values[at]]
            told.append(
                f"{shorten(parameters[p].name, 40)} is now {', '.join(numbers)}"
            )
    return ", ".join(told)


def _digits(ledger: Ledger) -> dict[int, int]:
    """With how many digits a parameter's weights are told: they take all of its steps, and are asked for at each."""
    if ledger not in _DIGITS:
        _DIGITS[ledger] = {
            p: telling(values) for p, values in ledger.weighed.elements.items()
        }
    return _DIGITS[ledger]


def telling(values: np.ndarray) -> int:
    """How many digits tell what weights became from what they were: four, more where they hardly move.

    >>> telling(np.array([[1.0], [1.5]])), telling(np.array([[1.0], [1.000005], [1.00001]]))
    (4, 7)
    """
    known = values[np.isfinite(values).all(axis=1)]

    def told(digits: int) -> int:
        return len({tuple(number(x, digits) for x in row) for row in known.tolist()})

    different = len({tuple(row) for row in known.tolist()})
    return next(
        (n for n in range(4, 8) if told(n) > 1 and (n == 4 or told(n) == different)),
        7 if told(7) > 1 else 4,
    )


def sentence(ledger: Ledger, event: Event, parameters: Sequence[int]) -> str:
    """Tell one event in words, with the numbers of the given parameters."""
    told = f"Event {event.index}, {head(event)}"
    lost = ledger.unconsumed(event.index)
    parts = []
    for p in parameters[:_MOST_NAMES]:
        added = value(ledger, event.index, p, "contribution")
        part = shorten(ledger.parameters[p].name, 40) + (
            f" receives {added}, " if added else ""
        )
        part += f".grad {value(ledger, event.index, p)}"
        erased = [
            value(ledger, b, p, "contribution")
            for b in lost.get(ledger.parameters[p].name, [])
        ]
        parts.append(
            part
            + (
                f" (erased {', '.join(erased)} before any step used it)"
                if erased
                else ""
            )
        )
    if len(parameters) > _MOST_NAMES:
        parts.append(f"and {counted(len(parameters) - _MOST_NAMES, 'more parameter')}")
    parts += filter(None, [about(event), moved(ledger, event)])
    return f"{told}: {'; '.join(parts)}." if parts else f"{told}."


def overview(ledger: Ledger, events: Sequence[int], parameters: Sequence[int]) -> str:
    """Say in one sentence what a ledger, or a part of it, holds."""
    part = ledger.contribution[np.ix_(list(events), list(parameters))]
    there = (ledger.state[np.ix_(list(events), list(parameters))] & CONTRIBUTED) > 0
    told = f"{counted(len(parameters), 'parameter')} × {counted(len(events), 'event')}, {window_summary(ledger)}"
    finite = part[there & np.isfinite(part)]
    if finite.size:
        told += f"; contribution norms from {number(float(finite.min()))} to {number(float(finite.max()))}"
    broken = int((there & ~np.isfinite(part)).sum())
    if broken:
        told += f"; {counted(broken, 'contribution')} not finite"
    told += "" if ledger.complete else "; the recording is incomplete"
    return " ".join(
        [
            f"{told}.",
            *(f"Note: {literal(str(note))}." for note in ledger.meta.get("notes", ())),
        ]
    )


def story(
    ledger: Ledger, events: Sequence[int], parameters: Sequence[int]
) -> list[str]:
    """Tell a ledger in sentences: what it holds, then event by event (the first and last of many)."""
    told, half = [overview(ledger, events, parameters)], _MOST_SENTENCES // 2
    chosen = list(events)
    if len(chosen) > _MOST_SENTENCES:
        told.append(f"The first {half} and the last {half} of {len(chosen):,} events:")
        chosen = [*chosen[:half], *chosen[-half:]]
    weighed: dict[int, str] = {}
    for bar in bars(ledger, chosen)[0]:
        weighed[bar.step] = f"{weighed.get(bar.step, '')} {bar.words}"
    return told + [
        sentence(ledger, ledger[e], parameters) + weighed.get(e, "") for e in chosen
    ]


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
    for depth in range(1, max((len(p) for p in parts), default=1) + 1):
        # A name stays whole only when it is all there is; otherwise its last part is inside the group.
        keys = ["".join(p[:depth]).rstrip(" ·.") for p in parts]
        groups, start = [], 0
        for key, rows in itertools.groupby(keys):
            count = len(list(rows))
            groups.append(Group(key, start, start + count))
            start += count
        if best and len(groups) > most:
            break
        best = groups
    return best
