"""Rules that look at networks: leaks between them, graphs that stay, zeros that move what nothing reaches."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from accumviz.checks import ways
from accumviz.checks.analysis import Case, Loop, near
from accumviz.checks.cures import added, inserted, moved, replaced, zeroing
from accumviz.checks.report import Finding
from accumviz.ledger.events import CONTRIBUTED, PRESENT, Event

# Fewer steps say nothing about what rises.
_RISING = 4


def graph_retained(case: Case) -> Iterator[Finding]:
    """Saved tensors that are alive after each backward, and more of them each time; or losses that it runs again."""
    for loop in case.loops:
        yield from list(_rising(case, loop)) or _run_again(case, loop)


def _run_again(case: Case, loop: Loop) -> Iterator[Finding]:
    """A sum that begins anew in each window, and of which every micro-batch runs all so far."""
    windows = [
        (step, backwards)
        for step, backwards in loop.windows.items()
        if len(backwards) > 1
    ]
    counts = [_losses(case, backwards) for _, backwards in windows]
    if not windows or not all(
        many == [(n + 1) * many[0] for n in range(len(many))]
        and many[0]
        and len(set(case.lines[backwards].tolist())) == 1
        and all(case.ledger[b].details.get("retain_graph") for b in backwards[:-1])
        for many, (_, backwards) in zip(counts, windows, strict=True)
    ):
        return
    step, backwards = windows[0]
    event = case.ledger[backwards[1]]
    yield case.finding(
        "graph-retained",
        "error",
        event.index,
        step=step,
        evidence={"losses in each backward": counts[0]},
        cause=(
            f"Each backward runs the graphs of all losses so far: `{event.label}` adds them up with their graphs, and "
            f"the first of {len(backwards)} micro-batches comes {len(backwards)} times, the last one once. Call "
            "`backward` on the new loss alone, and add its `detach()` to the sum."
        ),
        times=len(windows),
        optimizer=loop.optimizer,
    )


def _rising(case: Case, loop: Loop) -> Iterator[Finding]:
    after, before = (
        case.events.column("saved_after"),
        case.events.column("saved_before"),
    )
    last = [backwards[-1] for backwards in loop.windows.values() if backwards]
    last = [b for b in last if np.isfinite(after[b])]
    if len(last) < _RISING:
        return
    bytes_ = after[last]
    one = np.nanmax(before[last[:2]])
    # A list that is emptied with each epoch lets them go there.
    runs = np.split(bytes_, np.flatnonzero(np.diff(bytes_) <= 0) + 1)
    long = [run.size >= _RISING and run[-1] - run[0] >= 0.5 * one for run in runs]
    if not all(long[:-1] or long):
        return
    kept = [b for b in last if case.ledger[b].details.get("retain_graph")]
    event = case.ledger[kept[0] if kept else last[0]]
    own = re.sub(r",?\s*retain_graph\s*=\s*True", "", event.source)
    summed = bool(kept) and (np.diff(_losses(case, last)) > 0).all()
    keeps = (
        "`retain_graph=True` keeps"
        if kept
        else "something that is kept, such as a loss in a list, keeps"
    )
    cause = f"Graphs outlive their backward: {keeps} the saved tensors of each, and memory grows with every window."
    if summed:
        cause = (
            f"Each backward runs the graphs of all losses so far: `{event.label}` adds them up with their graphs, "
            "and `retain_graph=True` keeps what each has saved. Call `backward` on the new loss alone, and add its "
            "`detach()` to the sum."
        )
    yield case.finding(
        "graph-retained",
        "error",
        event.index,
        step=int(loop.read_step[loop.read == event.index][0]),
        evidence={"bytes saved after each window": bytes_.astype(int).tolist()},
        cause=cause,
        # Of a sum that grows, the second backward would meet what the first has freed.
        cure=replaced(event, own) if kept and not summed else "",
        times=len(last),
        optimizer=loop.optimizer,
    )


def _losses(case: Case, backwards: list[int]) -> list[int]:
    """How many losses each of these added up."""
    return [len(case.ledger[b].terms) for b in backwards]


def gan_gradient_leak(case: Case) -> Iterator[Finding]:
    """A loss of one network that is consumed by the other's step, too."""
    found = list(_leaks(case))
    yield from found or _opponents(case)


def _opponents(case: Case) -> Iterator[Finding]:
    """Two optimizers that step on one loss, and one of them on losses of its own: opponents, or parts of one model.

    It is a note at most: the losses do not say whether they pull apart.
    """
    losses = {
        loop.optimizer: set(case.sites[loop.read].tolist()) for loop in case.loops
    }
    for own in case.loops:
        for other in case.loops:
            theirs = losses[other.optimizer]
            # All that the other one learns from, and more.
            if (
                not theirs
                or not theirs < losses[own.optimizer]
                or other.rank != own.rank
            ):
                continue
            if set(other.columns) & set(own.columns):
                continue
            reaches = np.asarray(case.contributed[:, other.columns].any(axis=1))
            several = [
                (step, shared, alone)
                for step, backwards in own.windows.items()
                if (
                    shared := [
                        b for b in backwards if case.sites[b] in theirs and reaches[b]
                    ]
                )
                and (alone := [b for b in backwards if not reaches[b]])
            ]
            whole = theirs <= {
                int(case.sites[b]) for _, shared, _ in several for b in shared
            }
            if not several or not whole or not _apart(case, own, several):
                continue
            step, shared, alone = several[0]
            event = case.ledger[shared[0]]
            yield case.finding(
                "gan-gradient-leak",
                "note",
                shared[0],
                step=step,
                evidence={
                    "losses of both": list(
                        dict.fromkeys(case.ledger[b].label for b in shared)
                    ),
                    f"of {own.name} alone": list(
                        dict.fromkeys(case.ledger[b].label for b in alone)
                    ),
                },
                cause=(
                    f"{event.label or 'A loss'} is consumed by the steps of {own.name} and of {other.name}. If these "
                    f"train one model, so it should be; if they are opponents, {own.name} follows the other's aim, too."
                ),
                times=len(several),
                optimizer=own.optimizer,
            )
            return


# Losses of tasks that get into each other's way are at wider angles than those of opponents, which are one loss and its
# opposite.
_OPPOSITE = -0.5


def _apart(
    case: Case, own: Loop, windows: list[tuple[int, list[int], list[int]]]
) -> bool:
    """Whether one of its own losses pulls against the shared ones, as far as elements were kept to tell."""
    exact = case.ledger.exact
    if not all(p in exact for p in own.columns.tolist()):
        return True
    found: dict[int, list[float]] = {}
    for _, shared, alone in windows:
        theirs = _sum(case, own, shared)
        for site in set(case.sites[alone].tolist()):
            mine = _sum(case, own, [b for b in alone if case.sites[b] == site])
            size = float(np.linalg.norm(theirs) * np.linalg.norm(mine))
            found.setdefault(site, []).append(
                float(theirs @ mine) / size if size else 0.0
            )
    return any(
        2 * sum(cosine < _OPPOSITE for cosine in cosines) > len(cosines)
        for cosines in found.values()
    )


def _sum(case: Case, loop: Loop, backwards: list[int]) -> np.ndarray:
    parts = [
        np.nansum(case.ledger.exact[p][0][backwards], axis=0)
        for p in loop.columns.tolist()
    ]
    return np.concatenate(parts)


def _leaks(case: Case) -> Iterator[Finding]:
    for own in case.loops:
        found = leaked(case, own)
        if not found:
            continue
        b, early, late = min(found)
        between = own.backwards[(own.backwards > early) & (own.backwards < late)]
        event = case.ledger[b]
        same = case.sites[b] == case.sites[between[0]]
        yield case.finding(
            "gan-gradient-leak",
            "error",
            b,
            step=late,
            evidence={
                "the loss": event.label,
                "consumed by the step at event": early,
                "and by the step at event": late,
                "of": own.name,
            },
            cause=(
                f"{event.label or 'The loss'} also reached the parameters of {own.name}, and its contribution was "
                f"still there when that one stepped {'in its own turn' if same else 'for a loss of its own'}."
            ),
            # Of one line that both take in turns, nobody can say whose turn it is.
            cure="" if same else cleared(case, own, found),
            times=len(found),
            optimizer=own.optimizer,
        )


def leaked(case: Case, own: Loop) -> list[tuple[int, int, int]]:
    """The backwards of another one's losses that this optimizer's step consumed, too, when that one had stepped.

    Each with the other one's step and this one's.
    """
    found: list[tuple[int, int, int]] = []
    for other in case.loops:
        if (
            other is own
            or other.rank != own.rank
            or set(other.columns) & set(own.columns)
        ):
            continue
        turns = _in_turns(case, own, other)
        for b, late in own.first_reads.items():
            early = other.first_reads.get(b)
            if early is None or early >= late:
                continue
            between = own.backwards[(own.backwards > early) & (own.backwards < late)]
            # Steps at different paces share one loss: that leaks nothing.
            if between.size and (turns or (case.sites[between] != case.sites[b]).all()):
                found.append((b, early, late))
    return found


def cleared(case: Case, own: Loop, leaks: list[tuple[int, int, int]]) -> str:
    """The cure that zeroes what has leaked to an optimizer, and nothing of its windows; empty where no line does both.

    That is the line above its first backward, where that comes once in a window; or the one below the other's step.
    """
    _, early, late = min(leaks)
    step = case.ledger[late]
    steps = case.at("step")
    if set(
        case.optimizer_of[
            own.within(_by_way_of(case, steps, step), -1, len(case.events))
        ].tolist()
    ) != {own.optimizer}:
        return ""  # under its name there, others step as well
    windows: dict[int, list[int]] = {}
    for b in sorted(set(own.first_reads) - {b for b, _, _ in leaks}):
        windows.setdefault(own.first_reads[b], []).append(b)
    line = case.lines[windows[late][0]] if late in windows else -1
    if all(
        case.lines[first] == line and line not in case.lines[later]
        for first, *later in windows.values()
    ):
        return inserted(case.ledger[windows[late][0]], zeroing(step))
    way = ways.alone(case.ledger[early], step)
    below = _by_way_of(case, steps, way.at)
    erases = any(
        own.within(below, backwards[0], end).size for end, backwards in windows.items()
    )
    reaches = all(own.within(below, b, end).size for b, _, end in leaks)
    named = way.together and (way.step.file, way.step.line) == (step.file, step.line)
    return added(way.at, zeroing(step)) if named and reaches and not erases else ""


def _by_way_of(case: Case, events: np.ndarray, at: Event) -> np.ndarray:
    """Those of some events to which this one's line led."""
    of_site = {
        site: case.ledger[event]
        for site, event in zip(
            case.sites[events].tolist(), events.tolist(), strict=True
        )
    }
    here = [
        site
        for site, e in of_site.items()
        if (at.file, at.line) in [(e.file, e.line), *(f[:2] for f in e.frames)]
    ]
    found: np.ndarray = events[np.isin(case.sites[events], here)]
    return found


def _in_turns(case: Case, own: Loop, other: Loop) -> bool:
    """Whether each of two steps in the windows of the other one, of which none is whole: one loss, trained in turns.

    Who steps at a pace of his own has windows of that length, and divides by it.
    """
    for one, between in ((own, other), (other, own)):
        # Before the other's first step there is nothing of its turns.
        windows = {
            step: b
            for step, b in one.windows.items()
            if len(b) > 1 and b[-1] > between.steps.min(initial=step)
        }
        if len(windows) < 2 or not all(
            one.within(between.steps, b[0], b[-1]).size for b in windows.values()
        ):
            return False
        parts = [
            part
            for step in windows
            for part in case.parts_of.get(step, ())
            if part.many > 1
        ]
        if any(near(part.total, 1.0) or not part.read for part in parts):
            return False
    return True


def step_before_backward(case: Case) -> Iterator[Finding]:
    """A step that changed weights which a graph still needed."""
    steps = np.flatnonzero(case.events.where("kind", "step") & ~case.events.skipped)
    errors = case.events.detail("error", None)
    for b in np.flatnonzero(case.backward & (errors != None)).tolist():  # noqa: E711 - element by element
        before = steps[steps < b]
        if "inplace operation" not in str(errors[b]) or not before.size:
            continue
        step = case.ledger[int(before[-1])]
        failed = case.ledger[b]
        yield case.finding(
            "step-before-backward",
            "error",
            step.index,
            step=step.index,
            evidence={
                "event of the step": step.index,
                "event of the backward that failed": b,
            },
            cause=(
                f"The step changed weights in place, and {failed.label or 'a loss'} was computed with them as they "
                "were: its backward cannot use the graph any more."
            ),
            cure=moved(step, failed)
            if step.file == failed.file and step.line < failed.line
            else "",
            optimizer=int(case.optimizer_of[step.index]),
        )
        return


def zero_tensor_drift(case: Case) -> Iterator[Finding]:
    """A parameter that no loss has reached, and that moves: zeros are a gradient, None is not."""
    ledger = case.ledger
    for loop in case.loops:
        settings = case.settings(loop.optimizer)
        decays = bool(settings.get("weight_decay"))
        remembers = bool(settings.get("momentum")) or bool(settings.get("betas"))
        found: list[tuple[int, int]] = []
        at_steps = np.ix_(loop.steps, loop.columns)
        zeros_there = ((ledger.state[at_steps] & PRESENT) > 0) & (
            ledger.grad[at_steps] == 0
        )
        for p, zero in zip(loop.columns.tolist(), zeros_there.T, strict=True):
            if not zero.any():
                continue
            born = np.flatnonzero(ledger.state[:, p] & CONTRIBUTED)
            since = np.searchsorted(born, loop.steps)
            # The steps between which nothing has come.
            none = np.diff(since, prepend=0) == 0
            weights = _weights(case, p)
            for i in np.flatnonzero(none & zero).tolist():
                step = int(loop.steps[i])
                if weights is not None:
                    moved = i > 0 and not np.array_equal(
                        weights[step], weights[int(loop.steps[i - 1])]
                    )
                else:
                    moved = decays or (remembers and since[i] > 0)
                if moved:
                    found.append((step, p))
        if not found:
            continue
        step, p = min(found)
        at = case.ledger[_zeroed(case, p, step)]
        own = re.sub(r",?\s*set_to_none\s*=\s*False", "", at.source)
        yield case.finding(
            "zero-tensor-drift",
            "warning",
            at.index,
            step=step,
            evidence={
                "parameter": ledger.parameters[p].name,
                "steps without a contribution": len({s for s, q in found if q == p}),
                "optimizer": settings.get("class", loop.name),
            },
            cause=(
                f"{ledger.parameters[p].name} got nothing before this step, but its `.grad` is a zero, not None: "
                "momentum or weight decay moves it all the same."
            ),
            cure=replaced(at, own),
            times=len({s for s, _ in found}),
            optimizer=loop.optimizer,
        )


def _zeroed(case: Case, p: int, step: int) -> int:
    """What made a parameter's `.grad` the zero that a step has read; the step itself where that is not known."""
    state, grad = case.ledger.state[:step, p], case.ledger.grad[:step, p]
    since = int(np.append(-1, np.flatnonzero(state & CONTRIBUTED))[-1])
    zeros = case.at("zero_grad", "edit")
    zeros = zeros[(zeros > since) & (zeros < step)]
    zeros = zeros[(state[zeros] & PRESENT > 0) & (grad[zeros] == 0)]
    return int(zeros[0]) if zeros.size else step


def _weights(case: Case, p: int) -> np.ndarray | None:
    """A small parameter's weights after each step; None where they were not kept."""
    ask = getattr(case.ledger, "weights", None)
    if ask is None:
        return None
    found = ask(case.ledger.parameters[p].name)
    return None if not len(found) else np.asarray(found)
