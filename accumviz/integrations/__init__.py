"""Record the first steps of a framework's training, and hand what comes of it to the framework's own logger."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from accumviz import arguments
from accumviz.checks.analysis import LedgerAnalysis
from accumviz.checks.check import check
from accumviz.checks.report import Report
from accumviz.ledger.ledger import Ledger
from accumviz.recorder.recording import record


class FirstSteps:
    """The recording of a training's first `steps`, judged after the last of them.

    It raises nothing: where something of ours fails, `say` gets one sentence, and the training goes on unrecorded.
    """

    def __init__(self, steps: int, say: Callable[[str], Any]) -> None:
        self._steps = arguments.whole("steps", steps, "how many to record", least=1)
        self._say = say
        self._failed = False
        self._recording: Any = None
        self._last = 0

    def begin(self, step: int, *objects: Any) -> None:
        """Record a model and its optimizers; `step` is how many steps they have taken."""

        def start() -> None:
            self._close()
            self._last = step + self._steps
            self._recording = record(*objects).start()

        self._guarded(start)

    def stepped(self, step: int, log: Callable[[dict[str, float]], Any]) -> None:
        """Judge what was recorded, if this was the last step to record; `log` gets numbers by name."""
        if self._recording is not None and step >= self._last:
            self.end(log)

    def end(self, log: Callable[[dict[str, float]], Any]) -> None:
        """Judge what was recorded so far, unless that has been done; `log` as for `stepped`."""

        def judge() -> None:
            recording = self._close()
            if recording is None:
                return
            ledger = recording.ledger
            report = check(ledger)
            if not ledger.meta.get("rank"):  # one of several ranks speaks for all
                self._say(f"accumviz, of the steps so far:\n{report.text()}")
            log(_numbers(ledger, report))

        self._guarded(judge)

    def _close(self) -> Any:
        """Return the recording, closed, if one is open."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
        return recording

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:
            self._failed = True
            with suppress(Exception):
                self._close()
            with suppress(Exception):
                self._say(f"accumviz records no more: {type(error).__name__}: {error}")


def _numbers(ledger: Ledger, report: Report) -> dict[str, float]:
    """Return the number of findings and the sums of shares; what is not known is left out."""
    numbers: dict[str, float] = {}
    if report.verdict != "no verdict":
        serious = [each for each in report.findings if each.severity != "note"]
        numbers["accumviz/findings"] = len(serious)
    sums = []
    for shares in LedgerAnalysis(ledger).objectives.values():
        sums += [each.total for each in shares if each.known]
    if sums and all(map(math.isfinite, sums)):
        numbers["accumviz/smallest_sum_of_shares"] = min(sums)
        numbers["accumviz/largest_sum_of_shares"] = max(sums)
    return numbers
