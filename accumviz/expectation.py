"""What a training loop should do, said around it: `expect` records it, and fails with the report where it does not."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from accumviz import arguments
from accumviz.checks.check import check
from accumviz.checks.report import Report, told
from accumviz.ledger.flow import number
from accumviz.ledger.ledger import Ledger
from accumviz.ledger.shares import Shares

if TYPE_CHECKING:
    from accumviz.recorder.recording import Recording

_FAIL_ON = {"error": ("error",), "warning": ("error", "warning"), None: ()}


class Expectation:
    """The open block of `expect`: it records what happens inside, and judges it at the end.

    `recording` is the recording, `ledger` what it holds, `report` what `check` says of it.
    """

    def __init__(
        self, recording: Recording, wanted: dict[str, Any], fail_on: str | None
    ) -> None:
        self.recording, self._wanted, self._fail_on = recording, wanted, fail_on

    @property
    def ledger(self) -> Ledger:
        """What was recorded so far."""
        return self.recording.ledger

    @property
    def report(self) -> Report:
        """What `check` says of it."""
        return check(self.ledger)

    def __enter__(self) -> Expectation:
        self.recording.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.recording.__exit__(kind, error, trace)
        if error is not None:  # what went wrong in the block is what there is to say
            return
        ledger, report = self.ledger, self.report
        said = list(_unmet(ledger, report, **self._wanted))
        wrong = [
            finding
            for finding in report.findings
            if finding.severity in _FAIL_ON[self._fail_on]
        ]
        if report.verdict == "no verdict":
            said.insert(0, f"there is no verdict: {report.reason}")
        if said or wrong:
            lines = [f"expected otherwise: {line}" for line in said]
            raise AssertionError("\n".join([*lines, report.text(color=False)]))


def expect(
    *objects: Any,
    accumulates: int | None = None,
    complete: bool = False,
    syncs_per_window: int | None = None,
    steps: int | None = None,
    fail_on: str | None = "error",
    **record: Any,
) -> Expectation:
    """Expect of the training in a `with` block what its keywords say, and that `check` finds no error in it.

    `objects` and further keywords go to `record`: the model and the optimizer, as there. Each
    expectation is optional. `accumulates`: every step consumes so many backwards; where some do,
    fewer in the last window of an epoch (where a loader ended) or of the recording.
    `complete=True`: the shares of every step add up to 1; with several losses, to the same sum in
    every step; a constant inside a mean, as in half a mean square, counts or does not, whichever
    makes them 1. `syncs_per_window`: so many backwards, or reductions by hand, between two steps
    exchange gradients between processes. `steps`: the optimizers step so often. `fail_on` is the
    severity of findings that fail it: `"error"`, `"warning"`, or None for no finding at all.

    Raises `AssertionError` with the text of the report, at the end of the block; also where nobody
    can tell, because nothing was recorded or the recording stopped. An exception of the block
    itself passes through.

    >>> import torch, accumviz as av
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with av.expect(model, optimizer, accumulates=4, complete=True):
    ...     for x in torch.ones(8, 3, 2).split(1):
    ...         (model(x[0]).square().mean() / 4).backward()
    ...     optimizer.step()
    Traceback (most recent call last):
    AssertionError: expected otherwise: the step at event 8 consumes 8 backwards, expected 4
    expected otherwise: the shares of the step at event 8 add up to 2, expected 1
    Report: ...
    """
    from accumviz.recorder.record import record as recording

    wanted: dict[str, Any] = {"complete": complete}
    for name, value, said in (
        ("accumulates", accumulates, "how many backwards each step consumes"),
        (
            "syncs_per_window",
            syncs_per_window,
            "how many backwards between two steps exchange gradients",
        ),
        ("steps", steps, "how often the optimizers step"),
    ):
        wanted[name] = (
            None
            if value is None
            else arguments.whole(name, value, said, least=name != "syncs_per_window")
        )
    arguments.flag("complete", complete)
    for name, group in record.items():
        meant = difflib.get_close_matches(name, (*wanted, "fail_on"), n=1)
        if meant and isinstance(group, int | float | str | None):
            raise TypeError(
                f"{name}={group!r:.80} is no expectation and no group of parameters; expected {meant[0]}=..., "
                "or what record(...) takes"
            )
    if fail_on not in _FAIL_ON:
        raise ValueError(
            f"fail_on={fail_on!r:.80}; expected 'error', 'warning' or None"
        )
    return Expectation(recording(*objects, **record), wanted, fail_on)


def _unmet(
    ledger: Ledger,
    report: Report,
    accumulates: int | None,
    complete: bool,
    syncs_per_window: int | None,
    steps: int | None,
) -> Iterator[str]:
    """What was expected and is not so."""
    windows = ledger.windows()
    if steps is not None and len(windows) != steps:
        yield f"{len(windows)} steps, expected {steps}"
    if accumulates is not None:
        yield from _first(
            (
                f"the step at event {window.step} consumes {len(window.backwards)} backwards, expected {accumulates}"
                for i, window in enumerate(windows)
                if len(window.backwards) != accumulates
                and not _tail(ledger, i, accumulates)
            )
        )
    if complete:
        yield from _first(_incomplete(ledger))
    if syncs_per_window is not None:
        yield from _first(
            f"gradients are exchanged {many} times before the step at event {step}, expected {syncs_per_window}"
            for step, many in _syncs(ledger)
            if many != syncs_per_window
        )


def _first(said: Iterator[str]) -> Iterator[str]:
    """The first of many alike, and how many there are."""
    every = list(said)
    if every:
        yield every[0] + (f" (and so {len(every) - 1} more)" if len(every) > 1 else "")


def _tail(ledger: Ledger, i: int, accumulates: int) -> bool:
    """Whether a window is short because an epoch, or the recording, was over."""
    windows = ledger.windows()
    window = windows[i]
    if not 0 < len(window.backwards) < accumulates or all(
        len(w.backwards) != accumulates for w in windows
    ):
        return False
    own = [w.step for w in windows if w.optimizer == window.optimizer]
    if window.step == own[-1]:
        return True
    ends = [e.index for e in ledger.of("loader") if e.details.get("what") == "ends"]
    until = min(
        b
        for w in windows
        if w.step > window.step
        for b in [*w.backwards, w.step]
        if b > window.step
    )
    return any(window.backwards[-1] < end < until for end in ends)


def _incomplete(ledger: Ledger) -> Iterator[str]:
    """The steps whose shares do not add up to 1; with several objectives, to what they mostly do."""
    shares = ledger.shares()
    several = len(
        {
            (int(o), int(n))
            for o, n in zip(shares.optimizer, shares.objective, strict=True)
        }
    ) > len(set(shares.optimizer.tolist()))
    usual: dict[tuple[int, int], float] = {}
    for step in np.unique(shares.step).tolist():
        rows = shares.of(step)
        for objective in np.unique(rows.objective).tolist():
            here = rows.take(rows.objective == objective)
            # A clip shortens what is complete.
            factor = np.where(here.erased, 0.0, here.clipped)
            weights = np.divide(
                here.share, factor, out=np.zeros(len(here)), where=factor > 0
            )
            total = abs(
                float(weights.sum())
            )  # what is maximised has a minus before it, and weighs as much
            # Half a square is whole, and so is a mean of what was divided.
            whole = (
                total if several else abs(float((weights / _own(ledger, here)).sum()))
            )
            key = int(here.optimizer[0]), objective
            right = usual.setdefault(key, total) if several else 1.0
            if np.isnan(total):
                reason = next(row.unknown for row in here if row.unknown)
                yield f"the shares of the step at event {step} cannot be read: {reason}"
            elif np.isnan(whole):
                yield f"the shares of the step at event {step} cannot be read: a constant inside a mean is not known"
            elif min(abs(total - right), abs(whole - right)) > 1e-3 * abs(right):
                yield f"the shares of the step at event {step} add up to {told(total)}, expected {told(right)}"


def _own(ledger: Ledger, rows: Shares) -> np.ndarray:
    """For each row, what stands inside the mean of its loss: a part of that, or what divides it."""
    found = []
    for backward, place in zip(rows.backward.tolist(), rows.term.tolist(), strict=True):
        term = next(iter(ledger[backward].terms[place : place + 1]), {})
        found.append(number(term.get("own", 1.0)))
    return np.where(np.array(found) == 0, np.nan, found)


def _syncs(ledger: Ledger) -> Iterator[tuple[int, int]]:
    """How often gradients were exchanged between two steps: backwards that do, and reductions by hand."""
    many, backward, counted = 0, -1, -1
    for event in ledger:
        if event.kind == "backward":
            backward = event.index
        elif event.kind == "sync":
            inside = event.within == "backward"
            many += not inside or backward != counted
            counted = backward if inside else counted
        elif event.kind == "step":
            yield event.index, many
            many = 0
