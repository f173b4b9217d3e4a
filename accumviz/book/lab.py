"""`lab`: a training loop whose lines the reader moves; every arrangement is a recording of real autograd."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from accumviz.book import accumulation, gan
from accumviz.book.lab_page import Arrangement, Lab, Offer
from accumviz.book.loops import Axis, Loop, written

# A name of its own: what the events of an arrangement show is the text that ran, not a file's.
_FILE = "loop.py"
_TASKS = ("", "repair")
LOOPS = {"accumulation": accumulation.LOOP, "gan": gan.LOOP}
# What labs that are still there have recorded: another start of the same loop shares most of its arrangements.
_recorded: WeakValueDictionary[Any, Arrangement] = WeakValueDictionary()


def lab(
    start: Mapping[str, Any] | None = None,
    *,
    loop: str = "accumulation",
    task: str = "",
) -> Lab:
    """Let the reader rearrange a training loop and see what follows: recorded, every arrangement of it.

    `start` says how the loop that is shown first differs from the right one. Of `"accumulation"`, one
    weight and micro-batches: `zero_grad` ("epoch", "micro-batch", "backward", "before", "after" the
    step, or "nowhere"), `step` ("micro-batch", "window", "epoch"), `clip` ("backward", "step",
    "nowhere"), `divide` ("window", "K", "nothing", "samples"), `k`, `sizes` ("equal", "unequal", or
    numbers that add up to 14), `tail` ("step", "carry", "drop") and `lr`.

    Of `"gan"`, a discriminator and a generator of one weight each: `zero_d` and `zero_g` ("round",
    "window", "micro-batch", "after" the player's step, or "nowhere"), `first` ("D", "G", or "turns"
    within one window), `detach` ("yes", "no"), `freeze` ("no", "yes": the discriminator, while the
    generator trains), `k`, `divide` ("K", "nothing") and `lr`.

    Recorded are the start and every loop that differs from it in one of these or in two, 137 in all
    for the right loop of the first; `.live()` records any other when it is asked for.

    With `task="repair"` the start has a mistake, and the reader is told when nothing is left of it.

    Raises `ValueError` for a loop or a start that is none, and for a repair of a loop that is right.

    >>> import accumviz as av
    >>> shown = av.lab()
    >>> shown
    Lab: 137 arrangements of a loop...
    >>> shown.check(zero_grad="nowhere").findings[0].rule
    'missing-zero-grad'
    >>> av.lab(loop="gan").check(zero_d="after").findings[0].rule
    'gan-gradient-leak'
    """
    if task not in _TASKS:
        raise ValueError(f"task={task!r:.80}; expected 'repair', or nothing")
    if not isinstance(loop, str) or loop not in LOOPS:
        raise ValueError(
            f"loop={loop!r:.80}; expected one of {', '.join(map(repr, LOOPS))}"
        )
    kind = LOOPS[loop]
    first = kind.checked(start)
    if task == "repair" and _once(kind, first).right:
        raise ValueError(
            f"the start {dict(start or {})} is healthy; expected one with a mistake to repair"
        )
    axes = kind.axes_from(first)
    recorded = {}
    for choice in kind.near(first):
        key = tuple(written(choice[axis.name]) for axis in axes)
        recorded[key] = _once(kind, choice)
    begin = next(iter(recorded))

    def record(asked: Mapping[str, str]) -> Arrangement:
        return arrange(kind, kind.read(asked))

    return Lab(
        [_offer(axis) for axis in axes], begin, recorded, task, record, kind.loss
    )


def _offer(axis: Axis) -> Offer:
    return Offer(
        axis.name,
        axis.title,
        tuple(map(written, axis.values)),
        tuple(axis.values.values()),
        axis.line,
        axis.other.example if axis.other else "",
    )


def _once(loop: Loop, choice: Mapping[str, Any]) -> Arrangement:
    """Record an arrangement, unless a lab has it: many choices write the same loop."""
    key = id(loop), tuple(loop.rows(choice)), choice["lr"]
    made = _recorded.get(key)
    if made is None:
        made = _recorded[key] = arrange(loop, choice)
    return made


def arrange(loop: Loop, choice: Mapping[str, Any]) -> Arrangement:
    """Record an arrangement: its source text is what runs."""
    import accumviz as av

    text = loop.text(choice)
    recording, names = loop.begin(choice)
    linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
    code = compile(text, _FILE, "exec")
    with recording:
        exec(code, names)  # noqa: S102 - the text is ours: choices are checked before it is written
    ledger = recording.ledger
    report = av.check(ledger)
    return Arrangement(
        tuple(loop.rows(choice)), text, ledger, report, loop.remark(ledger, report)
    )
