"""The verb: two recordings, step by step: how far their gradients are apart, where they part, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from accumviz.checks.causes import ROUNDING, Case, Window, factor, find
from accumviz.checks.comparison import Compared, Comparison, Parting, percent
from accumviz.checks.distance import between, contributed, known, side, total
from accumviz.ledger.events import CHANGED, CONTRIBUTED, PRESENT
from accumviz.ledger.ledger import Ledger, Recorded, recorded

_TOLD = ("backward", "zero_grad", "unscale", "clip", "sync", "edit", "step")


def compare(a: Ledger | Recorded, b: Ledger | Recorded) -> Comparison:
    """Compare the gradients that the steps of two recordings read, and say where and why they part.

    The error is that of `a`, relative to `b`: ‖a − b‖ / ‖b‖ over all parameters that both know, by
    name; not a comparison of norms. It is exact where every element was kept, estimated where both
    were recorded with `record(..., sketch=256)`, and bounded from below where there are only norms. A
    parameter that a step's optimizer does not own counts as 0 there. A recording without a step, such
    as one large batch, is compared by what is in `.grad` at its end.

    A cause is named where the numbers prove it; of the samples they know only the sums of the targets. Of
    two recordings whose weights have parted, the steps that come after differ for that reason, too: look
    at the first.

    Raises `TypeError` for what is no recording, `ValueError` when they have no parameter, or no gradient, in common.

    >>> import torch, accumviz as av
    >>> def recorded(k):
    ...     w = torch.tensor([1.0, 3.0], requires_grad=True)
    ...     with av.record(w) as recording:
    ...         for x in (4.0, 2.0):
    ...             (((2 - w) * x).square().sum() / k).backward()
    ...     return recording
    >>> result = av.compare(recorded(1), recorded(2))
    >>> result.relative, result.causes[0].name
    (1.0, '×K')
    """
    a, b = recorded(a, "compare"), recorded(b, "compare")
    columns, missing = _columns(a, b)
    pairs, notes = _pairs(a, b)
    steps: list[Compared] = []
    first = None
    for place, (step, other, optimizer, name) in enumerate(pairs):
        found = _at(a, b, step, other, optimizer, name, columns)
        if first is None and _apart(found, a, b, columns):
            first = place
        steps.append(
            found
            if first is None or place == first
            else found._replace(note="the weights differ by now")
        )
    notes += _sketching(a, b, steps)
    if first is None:
        return Comparison(tuple(steps), None, missing=missing, notes=notes)
    pair, optimizer = steps[first], pairs[first][2]
    before = tuple(step for step in steps[:first] if step.optimizer == pair.optimizer)
    names = [part.name for part in pair.parameters]
    windows = [
        Window(
            x, step, [x.index(name) for name in names], _consumed(x, step, optimizer)
        )
        for x, step in ((a, pair.a), (b, pair.b))
    ]
    case = Case(windows[0], windows[1], pair, first, before)
    causes = find(case)
    named = {cause.name for cause in causes}
    ruled, undecided = (
        {name: why for name, why in found.items() if name not in named}
        for found in (case.ruled_out, case.undecided)
    )
    parting = _parting(a, b, windows, columns, case.rounding)
    return Comparison(
        tuple(steps), first, parting, causes, ruled, undecided, missing, notes
    )


def _columns(
    a: Ledger, b: Ledger
) -> tuple[list[tuple[str, int, int]], tuple[str, ...]]:
    """The parameters that both have, by name and column; and those that one lacks, or has in another shape."""
    mine, theirs = (
        {p.name: i for i, p in enumerate(x.parameters) if not p.unsharded_of}
        for x in (a, b)
    )
    both = [(name, i, theirs[name]) for name, i in mine.items() if name in theirs]
    alike = [
        (name, i, j)
        for name, i, j in both
        if a.parameters[i].shape == b.parameters[j].shape
    ]
    if not alike:
        raise ValueError(
            f"compare() found no parameter that both have: a has {_some(mine)}, b has {_some(theirs)}; expected two "
            "recordings of one model, recorded in the same way, as in record(model, optimizer)"
        )
    missing = [f"{name} (a)" for name in mine if name not in theirs] + [
        f"{n} (b)" for n in theirs if n not in mine
    ]
    shapes = [
        f"{name} (shape {a.parameters[i].shape} in a, {b.parameters[j].shape} in b)"
        for name, i, j in both
        if a.parameters[i].shape != b.parameters[j].shape
    ]
    return alike, tuple(missing + shapes)


def _some(names: dict[str, int]) -> str:
    return ", ".join(list(names)[:3]) + (", …" if len(names) > 3 else "") or "none"


_Pair = tuple[int, int, int, str]


def _pairs(a: Ledger, b: Ledger) -> tuple[list[_Pair], tuple[str, ...]]:
    """Which step belongs to which: the first of an optimizer to the first, and so on; -1: all optimizers."""
    steps = [_steps(x) for x in (a, b)]
    if not (steps[0] and steps[1]):
        ends = [
            min((s[0] for s in of.values()), default=_end(x))
            for of, x in zip(steps, (a, b), strict=True)
        ]
        if min(ends) < 0:
            raise ValueError(
                f"compare() found no gradient in {'a' if ends[0] < 0 else 'b'}: it has neither a step nor a backward; "
                "expected recordings of a loop, or of one backward"
            )
        optimizer = next(iter(steps[0] or steps[1]), -1)
        note = "one of them has no step: what its `.grad` holds at its end is compared with the first step of the other"
        return [(ends[0], ends[1], optimizer, "")], (note,) if steps[0] or steps[
            1
        ] else ()
    notes = []
    found: list[_Pair] = []
    for optimizer in sorted(steps[0].keys() | steps[1].keys()):
        mine, theirs = steps[0].get(optimizer, []), steps[1].get(optimizer, [])
        name = a[mine[0]].label if mine else ""
        found += [
            (step, other, optimizer, name)
            for step, other in zip(mine, theirs, strict=False)
        ]
        if len(mine) != len(theirs):
            notes.append(
                f"steps of optimizer {optimizer}: {len(mine)} in a, {len(theirs)} in b"
            )
    return sorted(found), tuple(notes)


def _steps(ledger: Ledger) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    index = ledger.columns.detail("optimizer_index", 0)
    for event in np.flatnonzero(ledger.columns.where("kind", "step")).tolist():
        found.setdefault(int(index[event]), []).append(event)
    return found


def _end(ledger: Ledger) -> int:
    """The last event after which there is a gradient."""
    there = np.flatnonzero((ledger.state & PRESENT).any(axis=1))
    return int(there[-1]) if there.size else -1


def _at(
    a: Ledger,
    b: Ledger,
    step: int,
    other: int,
    optimizer: int,
    name: str,
    columns: list[tuple[str, int, int]],
) -> Compared:
    """How far what two steps read is apart."""
    parts = []
    owned = [any(optimizer in p.optimizers for p in x.parameters) for x in (a, b)]
    for label, i, j in columns:
        mine, theirs = (
            not has or optimizer in x.parameters[p].optimizers
            for x, p, has in ((a, i, owned[0]), (b, j, owned[1]))
        )
        if mine or theirs:
            here, there = (
                side(a, i, step if mine else -1),
                side(b, j, other if theirs else -1),
            )
            parts.append(between(label, here, there))
    skipped = [x[event].skipped for x, event in ((a, step), (b, other))]
    if all(skipped):
        return Compared(step, other, name, 0.0, 0.0, 0.0, (), "both were skipped")
    notes = [f"{'ab'[skipped.index(True)]}'s step was skipped"] if any(skipped) else []
    wrong = sorted(
        {side for part in parts if part.how == "not finite" for side in part.side}
    )
    if wrong:
        notes.append(
            "neither gradient is finite"
            if len(wrong) == 2
            else f"{wrong[0]}'s gradient is not finite"
        )
    found = total(parts)
    return Compared(
        step,
        other,
        name,
        found.relative,
        found.uncertainty,
        found.at_least,
        found.parts,
        "; ".join(notes),
    )


def _apart(
    pair: Compared, a: Ledger, b: Ledger, columns: list[tuple[str, int, int]]
) -> bool:
    """Whether two steps differ by more than rounding, that of the coarser of the two."""
    dtypes = {x.parameters[p].dtype for _, i, j in columns for x, p in ((a, i), (b, j))}
    rounding = max(ROUNDING.get(dtype, 1e-4) for dtype in dtypes)
    if "was skipped" in pair.note:
        return True
    return (
        pair.relative > rounding
        if not math.isnan(pair.relative)
        else pair.at_least > rounding
    )


def _sketching(a: Ledger, b: Ledger, steps: Sequence[Compared]) -> tuple[str, ...]:
    """Why elements could not be compared, where they could not."""
    unknown = sorted(
        {part.name for pair in steps for part in pair.parameters if part.how == "norms"}
    )
    if not unknown:
        return ()
    asked = [x.meta.get("sketch", 0) for x in (a, b)]
    names = ", ".join(unknown[:3]) + (", …" if len(unknown) > 3 else "")
    said = f"of {len(unknown)} parameters ({names}) only norms can be compared"
    if asked[0] == asked[1] > 0:
        return (
            f"{said}, though both were recorded with sketch={asked[0]}: not all of them have comparable sums",
        )
    why = (
        f"a was recorded with sketch={asked[0]}, b with sketch={asked[1]}; "
        if asked[0] != asked[1]
        else ""
    )
    return (
        f"{said}: {why}record both with the same sketch=N (accumviz run --sketch N)",
    )


def _consumed(ledger: Ledger, step: int, optimizer: int) -> list[int]:
    """The backwards that a step consumed; of a recording without steps, those that are live at its end."""
    for window in ledger.windows():
        if window.step == step:
            return list(window.backwards)
    live = {e for i in range(len(ledger.parameters)) for e in ledger.live(step, i)}
    return sorted(e for e in live if ledger[e].kind == "backward")


# --- where they part ---------------------------------------------------------------------------


def _parting(
    a: Ledger,
    b: Ledger,
    windows: list[Window],
    columns: list[tuple[str, int, int]],
    rounding: float,
) -> Parting:
    """The first events of two windows that differ."""
    events = [[e for e in _span(window) if _does(window, e)] for window in windows]
    counts = [len(window.backwards) for window in windows]
    ends = a[windows[0].step], b[windows[1].step]
    if counts[0] != counts[1]:
        many = f"{counts[0]} backward{'s' * (counts[0] != 1)}"
        return Parting(
            *ends, f"the step: a has {many} in this window, b has {counts[1]}"
        )
    number = 0
    for one, other in zip_longest(*events):
        if one is None or other is None:
            break
        here, there = a[one], b[other]
        if here.kind != there.kind:
            return Parting(
                here, there, f"a has a {here.kind} where b has a {there.kind}"
            )
        number += here.kind == "backward"
        said = _differs(a, b, one, other, columns, rounding, here.kind)
        if said:
            what = (
                f"backward {number} of the window"
                if here.kind == "backward"
                else f"a {here.kind}"
            )
            return Parting(here, there, f"{what}: {said}")
    return Parting(*ends, "the step itself")


def _span(window: Window) -> range:
    """The events of a window: from its first backward to its step."""
    first = min(window.backwards, default=window.step)
    return range(first, window.step + 1)


def _does(window: Window, event: int) -> bool:
    """Whether an event does something to a `.grad` that the window's step reads, or reads it."""
    kind = window.ledger[event].kind
    if kind in ("backward", "step"):
        return kind == "step" or event in window.consumed
    return kind in _TOLD and bool((window.ledger.state[event] & CHANGED).any())


def _differs(
    a: Ledger,
    b: Ledger,
    one: int,
    other: int,
    columns: list[tuple[str, int, int]],
    rounding: float,
    kind: str,
) -> str:
    """In what two events differ: what they add (a backward), or what they leave."""
    adds = kind == "backward"
    read, norms = (contributed, "contribution") if adds else (known, "grad")
    bit = CONTRIBUTED if adds else PRESENT
    mine, theirs = [], []
    apart = squared = 0.0
    for name, i, j in columns:
        has = [bool(x.state[e, p] & bit) for x, e, p in ((a, one, i), (b, other, j))]
        if has[0] != has[1]:
            return f"only {'a' if has[0] else 'b'} has a {'contribution to' if adds else '.grad of'} {name}"
        if not has[0]:
            continue
        x, y = read(a, i, one), read(b, j, other)
        if x is not None and y is not None and len(x) == len(y):
            mine.append(x)
            theirs.append(y)
            continue
        sizes = [
            float(getattr(ledger, norms)[e, p])
            for ledger, e, p in ((a, one, i), (b, other, j))
        ]
        apart, squared = apart + (sizes[0] - sizes[1]) ** 2, squared + sizes[1] ** 2
    x, y = (np.concatenate(parts or [np.zeros(0)]) for parts in (mine, theirs))
    what = "adds" if adds else "leaves"
    wrong = [
        letter
        for letter, elements in (("a", x), ("b", y))
        if not np.isfinite(elements).all()
    ]
    if wrong:
        return f"what {' and '.join(wrong)} {what if len(wrong) == 1 else what[:-1]} is not finite"
    apart, squared = (
        apart + float(np.square(x - y).sum()),
        squared + float(np.square(y).sum()),
    )
    by = math.sqrt(apart / squared) if squared else math.inf if apart else 0.0
    if by <= min(rounding, 2e-3) / 2:
        return ""
    times, left = factor(x, y) if mine else (math.nan, math.inf)
    if left <= rounding:
        return f"a {what} {times:.4g} times what b does"
    return f"what a {what} is off by {percent(by)}"
