"""Record a training loop and fail, with the report, where it does not do what is expected: `expect`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from accumviz import arguments
from accumviz.checks.analysis import LedgerAnalysis, WindowShare
from accumviz.checks.check import check
from accumviz.checks.report import Report, in_words, rules_named
from accumviz.ledger.flow import Window
from accumviz.ledger.ledger import Ledger

if TYPE_CHECKING:
    from accumviz.recorder.recording import Recording


class Expectation:
    """The open block of `expect`: it records what happens inside, and judges it at the end.

    `recording` is the recording, `ledger` what it holds, `report` what `check` says of it.
    """

    def __init__(
        self,
        recording: Recording,
        wanted: dict[str, Any],
        fail_on: str | None,
        allow_unjudged: bool,
        ignore: frozenset[str],
    ) -> None:
        self.recording = recording
        self._wanted = wanted
        self._fail_on = fail_on
        self._allow_unjudged = allow_unjudged
        self._ignore = ignore

    @property
    def ledger(self) -> Ledger:
        """The ledger of what was recorded so far."""
        return self.recording.ledger

    @property
    def report(self) -> Report:
        """The report of `check` about it."""
        return check(self.ledger, ignore=self._ignore)

    def __enter__(self) -> Expectation:
        self.recording.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True  # pytest shows the test and the report
        self.recording.__exit__(kind, error, trace)
        if error is not None:  # what went wrong in the block is what there is to say
            return
        ledger = self.ledger
        report = self.report
        said = list(_unmet(ledger, **self._wanted))
        if report.reason and not self._allow_unjudged:
            said.insert(0, f"there is no verdict: {report.reason}")
        if said or report.fails(self._fail_on):
            lines = [f"expected otherwise: {line}" for line in said]
            raise AssertionError("\n".join([*lines, report.text(color=False)]))


def expect(
    *objects: Any,
    accumulates: int | None = None,
    complete: bool = False,
    steps: int | None = None,
    fail_on: str | None = "error",
    allow_unjudged: bool = False,
    ignore: str | Iterable[str] = (),
    **record: Any,
) -> Expectation:
    """Expect of the training in a `with` block what its keywords say, and that `check` finds no error in it.

    `objects` and further keywords go to `record`: the model and the optimizer, as there. Each
    expectation is optional. `accumulates`: every step consumes so many backwards; where some do,
    fewer in the last window of an epoch (where a loader ended) or of the recording.
    `complete=True`: the shares of every step add up to 1; with several losses, to the same sum in
    every step; a constant inside a mean, as in half a mean square, counts or does not, whichever
    makes them 1. `steps`: the optimizers step so often. `fail_on` is the severity of findings that fail
    it: `"error"`, `"warning"`, or None for no finding at all. `ignore` names rules whose findings fail
    nothing, as for `check`.

    Raises `AssertionError` with the text of the report, at the end of the block; also where nothing was
    recorded, or not everything could be judged, unless `allow_unjudged=True`. An exception of the block
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
    from accumviz.recorder.recording import record as recording

    wanted = {
        "accumulates": accumulates,
        "complete": complete,
        "steps": steps,
    }
    for name, said in (
        ("accumulates", "how many backwards each step consumes"),
        ("steps", "how often the optimizers step"),
    ):
        if wanted[name] is not None:
            wanted[name] = arguments.whole(name, wanted[name], said, least=1)
    arguments.flag("complete", complete)
    arguments.flag("allow_unjudged", allow_unjudged)
    if fail_on not in ("error", "warning", None):
        raise ValueError(
            f"fail_on={fail_on!r:.80}; expected 'error', 'warning' or None"
        )
    opened = recording(*objects, **record)
    ignored = rules_named(ignore)
    return Expectation(opened, wanted, fail_on, allow_unjudged, ignored)


def _unmet(
    ledger: Ledger,
    accumulates: int | None,
    complete: bool,
    steps: int | None,
) -> Iterator[str]:
    """Yield what was expected and is not so."""
    windows = ledger.windows()
    if steps is not None and len(windows) != steps:
        yield f"{len(windows)} steps, expected {steps}"
    if accumulates is not None:
        yield from _first(_other_lengths(ledger, windows, accumulates))
    if complete:
        yield from _first(_incomplete(ledger))


def _first(said: Iterable[str]) -> Iterator[str]:
    """Yield the first of many alike, and how many there are."""
    every = list(said)
    if every:
        more = f" (and so {len(every) - 1} more)" if len(every) > 1 else ""
        yield every[0] + more


def _other_lengths(
    ledger: Ledger, windows: list[Window], accumulates: int
) -> Iterator[str]:
    whole = any(len(window.backwards) == accumulates for window in windows)
    for window in windows:
        length = len(window.backwards)
        short = whole and 0 < length < accumulates
        if length != accumulates and not (short and _is_last(ledger, windows, window)):
            yield f"the step at event {window.step} consumes {length} backwards, expected {accumulates}"


def _is_last(ledger: Ledger, windows: list[Window], window: Window) -> bool:
    """Return whether an epoch, or the recording, was over after a window."""
    last = window.backwards[-1]
    after = [
        backward
        for other in windows
        if other.optimizer == window.optimizer
        for backward in other.backwards[:1]
        if backward > last
    ]
    until = min(after, default=len(ledger))
    ends = [e.index for e in ledger.of("loader") if e.details.get("what") == "ends"]
    return not after or any(last < end < until for end in ends)


def _incomplete(ledger: Ledger) -> Iterator[str]:
    """Yield the steps whose shares do not add up to 1; with several objectives, to what they do in the first step."""
    analysis = LedgerAnalysis(ledger)
    optimizers = {optimizer for optimizer, _ in analysis.objectives}
    several = len(analysis.objectives) > len(optimizers)
    for shares in analysis.objectives.values():
        right = shares[0].total if several else 1.0
        for share in shares:
            if wrong := _other_sum(analysis, share, right):
                yield f"the shares of the step at event {share.step} {wrong}"


def _other_sum(analysis: LedgerAnalysis, share: WindowShare, right: float) -> str:
    """Say of a step's shares that they are not known, or add up to something else."""
    if not share.known or math.isnan(share.total):
        rows = analysis.shares.of(share.step)
        reason = next((row.unknown for row in rows if row.unknown), "")
        return f"cannot be read: {reason}"
    if share.adds_up_to(right):
        return ""
    return f"add up to {in_words(share.total)}, expected {in_words(right)}"
