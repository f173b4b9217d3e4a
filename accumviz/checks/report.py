"""The result of `check`: findings, or healthy, or why no verdict is possible."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accumviz.show import Displayed, counted, encoded, literal, save_result

# The section of the book about each rule: file and label.
CHAPTERS = {
    "token-mean-of-means": "04_recipe#sec-tokens",
    "zero-grad-inside-window": "02_zero_grad#sec-where",
    "missing-zero-grad": "02_zero_grad#sec-never",
    "loss-not-divided": "03_accumulation#sec-accumulation",
    "partial-window-underscaled": "03_accumulation#sec-tail",
    "leftover-carried": "10_your_own#sec-own-windows",
    "tail-dropped": "10_your_own#sec-own-windows",
    "clip-scaled-grads": "06_memory#sec-amp-order",
    "clip-per-micro-batch": "04_recipe#sec-clip",
    "scheduler-per-micro-batch": "04_recipe#sec-scheduler",
    "ddp-unsynced-step": "08_ddp#sec-forward",
    "graph-retained": "11_museum#museum-graph-retained",
    "zero-before-step": "02_zero_grad#sec-where",
    "double-division": "04_recipe#sec-divide",
    "wrong-divisor": "04_recipe#sec-divide",
    "clip-on-the-wrong-side": "04_recipe#sec-clip",
    "backward-after-unscale": "06_memory#sec-amp-order",
    "nonfinite-micro-batch": "06_memory#sec-amp-skipped",
    "no-sync-excludes-forward": "08_ddp#sec-forward",
    "fsdp2-zero-keeps-unsharded": "09_fsdp#sec-hidden",
    "uneven-rank-backwards": "08_ddp#sec-uneven",
    "rank-token-weight": "08_ddp#sec-rank-tokens",
    "gan-gradient-leak": "07_gan#sec-gan-zero",
    "parameter-outside-or-twice": "10_your_own#sec-own-owner",
    "uneven-shares": "04_recipe#sec-equal",
    "sums-differ": "04_recipe#sec-divide",
}

SEVERITIES = ("error", "warning", "note")
_COLORS = {
    "error": "31",
    "warning": "33",
    "note": "36",
    "healthy": "32",
    "no verdict": "35",
    "-": "31",
    "+": "32",
}


@dataclass(frozen=True)
class Finding:
    """One mistake, with what proves it and how the line should read.

    `rule` is its name, `severity` one of `"error"`, `"warning"` and `"note"`. `step` is the index of
    the step that it spoils (None where there is none), `event` that of the event to look at; `file`,
    `line` and `source` are where that is. `evidence` holds the numbers, `cause` one sentence;
    `suggestion` shows the line as it is (`-`) and as it should be (`+`), or is empty; `chapter` is the
    part of the book about it. `times` counts how often it was met, `optimizer` is the number of the
    optimizer that it concerns, `rank` whose events these are where the files of several ranks were judged.
    """

    rule: str
    severity: str
    step: int | None
    event: int
    file: str
    line: int
    source: str
    evidence: Mapping[str, Any]
    cause: str
    chapter: str
    suggestion: str = ""
    times: int = 1
    optimizer: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Report(Displayed):
    """What `check` found in a ledger.

    `verdict` is `"findings"`, `"healthy"` or `"no verdict"`; `reason` says why there is none.
    `findings` come root causes first; notes among them leave a loop healthy. `unjudged` maps a rule
    to why it could not be judged, or not everywhere. `counts` says how much was looked at.
    `condition` is what has to be meant for a healthy loop to be so: "a sum of 4 is meant in every step".
    """

    findings: tuple[Finding, ...] = ()
    reason: str = ""
    unjudged: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    condition: str = ""

    @property
    def verdict(self) -> str:
        """`"findings"`, `"healthy"` or `"no verdict"`."""
        if any(finding.severity != "note" for finding in self.findings):
            return "findings"
        return "no verdict" if self.reason else "healthy"

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong in what could be judged; `unjudged` says what could not."""
        return self.verdict == "healthy"

    def __str__(self) -> str:
        return self.text(color=_terminal())

    def __repr__(self) -> str:
        return self.text(color=False)

    def text(self, *, color: bool = False) -> str:
        """The report as text; with `color`, in a terminal's colours."""
        paint = _painted if color else _plain
        lines = [self._head(paint)]
        if self.reason:
            lines.append(f"  {literal(self.reason)}")
        for finding in self.findings:
            lines += ["", *_lines_of(finding, paint)]
        if self.unjudged:
            lines += ["", "Not judged:"]
        why: dict[str, list[str]] = {}
        for rule, reason in self.unjudged.items():
            why.setdefault(reason, []).append(rule)
        for reason, rules in why.items():
            lines.append(f"  {', '.join(rules)}: {literal(reason)}")
        return "\n".join(lines)

    def _head(self, paint: Callable[[str, str], str]) -> str:
        looked = ", ".join(
            f"{many:,} {what if many != 1 else what.removesuffix('s')}"
            for what, many in self.counts.items()
        )
        head = self._counted()
        if self.verdict != "findings":
            head = paint(self.verdict, self.verdict)
        if self.condition and self.healthy:
            head += f", if {self.condition}"
        return f"Report: {head}" + (f" ({looked})" if looked else "")

    def _counted(self) -> str:
        counts = {
            severity: sum(finding.severity == severity for finding in self.findings)
            for severity in SEVERITIES
        }
        return ", ".join(
            counted(many, severity) for severity, many in counts.items() if many
        )

    def to_json(self) -> str:
        """The report for machines: one JSON object, with NaN and the infinities by name."""
        whole = {
            "verdict": self.verdict,
            "reason": self.reason,
            "condition": self.condition,
            "findings": [asdict(finding) for finding in self.findings],
            "unjudged": dict(self.unjudged),
            "counts": dict(self.counts),
        }
        return json.dumps(plain(whole), allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write it: a page (`.html`), JSON (`.json`) or, under any other name, text."""
        save_result(path, self)


def _lines_of(finding: Finding, paint: Callable[[str, str], str]) -> Iterator[str]:
    """Write a finding, line by line."""
    head = f"{paint(finding.severity, finding.severity)}  {finding.rule}"
    head += "" if finding.rank is None else f"  rank {finding.rank}"
    head += "" if finding.step is None else f"  at event {finding.step}"
    yield head + (f", {finding.times} times" if finding.times > 1 else "")
    if finding.file or finding.line:
        where = f"{literal(finding.file)}:{finding.line}"
        yield f"  {where}  {literal(finding.source)}"
    yield f"  {literal(finding.cause)}"
    evidence = [f"{name}: {told(value)}" for name, value in finding.evidence.items()]
    yield f"  {'; '.join(evidence)}"
    for row in finding.suggestion.splitlines():
        yield f"    {paint(literal(row), row[:1])}"
    yield f"  Read: {finding.chapter}"


def _painted(text: str, what: str) -> str:
    return f"\x1b[{_COLORS[what]}m{text}\x1b[0m" if what in _COLORS else text


def _plain(text: str, what: str) -> str:
    return text


def told(value: Any) -> str:
    """A piece of evidence in words.

    >>> told([0.25, 1 / 3]), told(7), told("loss")
    ('0.25, 0.3333', '7', 'loss')
    """
    if isinstance(value, list | tuple):
        shown = ", ".join(told(one) for one in value[:8])
        return shown + (f", … ({len(value)} in all)" if len(value) > 8 else "")
    if isinstance(value, float):
        return f"{value:.4g}"
    return literal(str(value))


def _terminal() -> bool:
    """Whether what is printed goes to a terminal that has colours, and that shall show them."""
    wanted = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return wanted and bool(getattr(sys.stdout, "isatty", bool)())


def plain(value: Any) -> Any:
    """What JSON can hold: mappings and lists, NaN and the infinities by name."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return encoded(value)
    return value
