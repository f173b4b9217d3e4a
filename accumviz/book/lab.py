"""`lab`: a training loop whose lines the reader moves; every arrangement is a recording of real autograd."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from accumviz.book.loops import RIGHT, Arrangement, arranged, axes_from, checked, near, written
from accumviz.views.lab import Lab, Made, Offer

# A name of its own: what the events of an arrangement show is the text that ran, not a file's.
_FILE = "loop.py"
_INPUTS = (1.0, 3.0, 2.0, 2.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 1.0, 3.0, 1.0)
_TASKS = ("", "repair")


def lab(start: Mapping[str, Any] | None = None, *, task: str = "") -> Lab:
    """Let the reader rearrange a training loop and see what follows: recorded, every arrangement of it.

    `start` says how the loop that is shown first differs from the right one: `zero_grad` ("epoch",
    "micro-batch", "backward", "before", "after" the step, or "nowhere"), `step` ("micro-batch",
    "window", "epoch"), `clip` ("backward", "step", "nowhere"), `divide` ("window", "K", "nothing",
    "samples"), `k`, `sizes` ("equal", "unequal", or numbers that add up to 14), `tail` ("step",
    "carry", "drop") and `lr`. Recorded are the start and every loop that differs from it in one of
    these or in two, 137 in all for the right loop; `.live()` records any other when it is asked for.

    With `task="repair"` the start has a mistake, and the reader is told when `check` finds none.

    Raises `ValueError` for a start that is none, and for a repair of a loop that is right.

    >>> import accumviz as av
    >>> shown = av.lab()
    >>> shown
    Lab: 137 arrangements of a loop...
    >>> shown.check(zero_grad="nowhere").findings[0].rule
    'missing-zero-grad'
    """
    if task not in _TASKS:
        raise ValueError(f"task={task!r:.80}; expected 'repair', or nothing")
    first = checked(start)
    grid = list(near(first))
    # Many choices write the same loop: a step in every micro-batch leaves K nothing to count.
    texts = [(arranged(choice).text, choice["lr"]) for choice in grid]
    runs: dict[tuple[str, float], Made] = {}
    for choice, text in zip(grid, texts, strict=True):
        if text not in runs:
            runs[text] = made(choice)
    axes = axes_from(first)
    offers = [
        Offer(axis.name, axis.title, tuple(map(_key, axis.values)), tuple(axis.values.values()), axis.line)
        for axis in axes
    ]
    known = {
        tuple(_key(choice[axis.name]) for axis in axes): runs[text] for choice, text in zip(grid, texts, strict=True)
    }
    begin = tuple(_key(first[axis.name]) for axis in axes)
    if task == "repair" and runs[texts[0]].report.healthy:
        raise ValueError(f"the start {dict(start or {})} is healthy; expected one with a mistake to repair")
    return Lab(offers, begin, known, task, _made_from, _loss)


def made(choice: Mapping[str, Any]) -> Made:
    """Record an arrangement: its source text is what runs."""
    import torch

    import accumviz as av

    arrangement = arranged(choice)
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=choice["lr"])
    names = {"w": w, "optimizer": optimizer, "nn": torch.nn, "batches_of": _batches_of}
    code = _compiled(arrangement)
    with av.record({"w": w}, optimizer, sources=True, memory=False) as recording:
        exec(code, names)  # noqa: S102 - the text is ours: choices are checked before it is written
    ledger = recording.ledger
    return Made(arrangement.rows, arrangement.text, ledger, av.check(ledger))


def _compiled(arrangement: Arrangement) -> Any:
    text = arrangement.text
    linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
    return compile(text, _FILE, "exec")


def _batches_of(sizes: list[int]) -> Any:
    """Make a loader of so many samples in each micro-batch."""
    import torch

    x = torch.tensor(_INPUTS)
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    batches = [list(range(a, b)) for a, b in pairwise(ends)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_sampler=batches)


def _loss(w: float) -> float:
    """The mean loss over all samples, which every arrangement is to bring down."""
    import torch

    x = torch.tensor(_INPUTS)
    return float((w * x - 2 * x).square().mean())


def _key(value: Any) -> str:
    return value if isinstance(value, str) else written(value)


def _made_from(told: Mapping[str, str]) -> Made:
    """Record what a page asks for: values by name, as texts."""
    choice: dict[str, Any] = {}
    for name, text in told.items():
        if name not in RIGHT:
            raise ValueError(f"{name!r:.80} is no choice; expected {', '.join(RIGHT)}")
        choice[name] = _read(name, str(text))
    return made(checked(choice, "this"))


def _read(name: str, text: str) -> Any:
    """A value as a page writes it."""
    try:
        if name == "k":
            return int(text)
        if name == "lr":
            return float(text)
        if name == "sizes" and text[:1].isdigit():
            return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        wanted = {"k": "a whole number", "lr": "a number", "sizes": "numbers of samples, as in 7, 7"}[name]
        raise ValueError(f"{name}={text!r:.40}; expected {wanted}") from None
    return text
