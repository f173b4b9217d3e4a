"""The result of `check`: findings, or healthy, or why no verdict is possible; as text, JSON, or annotations of code."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from accumviz import arguments
from accumviz.ledger.events import Event
from accumviz.show import Displayed, counted, encoded, literal

# What the rules are, beside each other: a page of the book, which includes the page beside this module.
_REFERENCE = "api"
_PAGE = Path(__file__).with_name("rules.md")
_ENTRY = re.compile(
    r"^#### ([\w-]+)\n\n(.+?)\n(?=\n\(rule-|\n### |\Z)", re.MULTILINE | re.DOTALL
)
# A link, of which the words stay; what makes bold; the fence of an example.
_MARKS = re.compile(r"\[([^]]+)\]\(#[^)]+\)|\*\*|^```.*\n", re.MULTILINE)

SEVERITIES = ("error", "warning", "note")
# So many lines of code stand above the user's, and below it.
_AROUND = 2
# So many equal numbers are written one by one.
_FEW = 3
# What has fewer columns is written as if it had so many.
_NARROWEST = 40
# By which setting a framework accumulates.
_SETTINGS = {
    "accelerate": "gradient_accumulation_steps",
    "deepspeed": "gradient_accumulation_steps",
    "lightning": "accumulate_grad_batches",
    "pytorch_lightning": "accumulate_grad_batches",
    "transformers": "gradient_accumulation_steps",
}
# As GitHub calls them.
_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_COLORS = {
    "error": "31",
    "warning": "33",
    "note": "36",
    "healthy": "32",
    "no verdict": "35",
    "-": "31",
    "+": "32",
}

_NOT_SEEN = "Not checked: copies of weights that are updated by hand (an EMA, a teacher), and loaded optimizer state."


@dataclass(frozen=True)
class Finding:
    """One mistake, with what proves it and how the line should read.

    `rule` is its name, `severity` one of `"error"`, `"warning"` and `"note"`. `step` is the index of
    the step that it spoils (None where there is none), `event` that of the event to look at; `file`,
    `line` and `source` are where that is, and `around` is the code there, by the numbers of its lines.
    `evidence` holds the numbers, `cause` one sentence;
    `suggestion` shows the line as it is (`-`) and as it should be (`+`), or is empty. `times` counts
    how often it was met, `optimizer` is the number of the optimizer that it concerns, `rank` whose
    events these are where the files of several ranks were judged.
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
    suggestion: str = ""
    times: int = 1
    optimizer: int | None = None
    rank: int | None = None
    around: tuple[tuple[int, str], ...] = ()

    @property
    def numbers(self) -> str:
        """The evidence in words."""
        pieces = [f"{name}: {in_words(value)}" for name, value in self.evidence.items()]
        return literal("; ".join(pieces))


# What a rule finds, one after the other.
Findings = Iterator[Finding]


@dataclass(frozen=True)
class Report(Displayed):
    """The findings of `check` in a ledger, or why there is no verdict.

    `verdict` is `"findings"`, `"healthy"` or `"no verdict"`; `reason` says why there is none.
    `findings` come root causes first; notes among them leave a loop healthy. `unjudged` maps a rule
    to why it could not be judged, or not everywhere. `counts` says how much was looked at.
    `condition` is what has to be meant for a loop to be healthy, and for one without a verdict to be right: "a sum of 4
    is meant in every step (train.py:31)".
    `ignored` are the findings that were to be ignored. `steps` says what each optimizer did: "optimizer: 12 steps, of 4
    micro-batches with shares that add up to 1, at a learning rate of 0.1". `losses` says what each loss is made of, and
    which modules its parts reach: "loss (train.py:31): MseLoss reaches actor; 0.5 × MseLoss reaches critic".
    """

    _shown_by = "accumviz.views.tables:report_html"

    findings: tuple[Finding, ...] = ()
    reason: str = ""
    unjudged: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    condition: str = ""
    ignored: tuple[Finding, ...] = ()
    steps: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`"findings"`, `"healthy"` or `"no verdict"`."""
        if any(finding.severity != "note" for finding in self.findings):
            return "findings"
        return "no verdict" if self.reason else "healthy"

    def fails(self, severity: str | None) -> bool:
        """Return whether there is a finding of this severity or a worse one; of None there is none."""
        if severity is None:
            return False
        fatal = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return any(finding.severity in fatal for finding in self.findings)

    @property
    def healthy(self) -> bool:
        """True where nothing is wrong in what could be judged; `unjudged` says what could not."""
        return self.verdict == "healthy"

    @property
    def not_seen(self) -> str:
        """A sentence on what healthy says nothing of; empty elsewhere."""
        return _NOT_SEEN if self.healthy else ""

    @property
    def supposed(self) -> str:
        """A sentence on what has to be meant where there is no verdict; empty elsewhere."""
        said = self.condition and self.verdict == "no verdict"
        return f"Right only if {self.condition}." if said else ""

    def __str__(self) -> str:
        return self.text(**terminal(sys.stdout))

    def __repr__(self) -> str:
        return self.text()

    @property
    def aside(self) -> str:
        """How many findings were ignored, and which; empty where none was."""
        places = [f"{each.rule} ({each.file}:{each.line})" for each in self.ignored]
        ignored = counted(len(places), "finding")
        return f"{ignored} ignored: {', '.join(places)}" if places else ""

    @property
    def _verdict_first(self) -> str:
        """The verdict, or how many findings of each severity there are."""
        if self.verdict != "findings":
            meant = f", if {self.condition}" if self.condition and self.healthy else ""
            notes = f", {counted(len(self.findings), 'note')}" if self.findings else ""
            return self.verdict + meant + notes
        counts = Counter(finding.severity for finding in self.findings)
        return ", ".join(
            counted(counts[each], each) for each in SEVERITIES if counts[each]
        )

    @property
    def looked_at(self) -> str:
        """How much was looked at: "4 events, 2 backwards, 1 step"."""
        counts = self.counts.items()
        return ", ".join(counted(n, what.removesuffix("s")) for what, n in counts)

    def text(self, *, color: bool = False, width: int = 0) -> str:
        """The report as text, wrapped at `width` columns (0: not at all); with `color`, in a terminal's colours."""
        page = _Lines(width, color, [])
        looked = f" ({self.looked_at})" if self.counts else ""
        page.add(f"Report: {self._verdict_first}{looked}", indent="")
        painted = page.paint(self.verdict, self.verdict)
        page.lines[0] = page.lines[0].replace(self.verdict, painted, 1)
        page.add(self.aside)
        page.add(self.reason)
        page.add(self.supposed)
        for said in (*self.steps, *self.losses):
            page.add(said)
        page.add(self.not_seen)
        if sum(finding.severity != "note" for finding in self.findings) > 1:
            page.add("Begin with the first finding: others may follow from it.")
        for finding in self.findings:
            _write(finding, page)
            read = address(finding.rule)
            page.lines.append(f"  Read: {read or f'accumviz explain {finding.rule}'}")
        _write_unjudged(self.unjudged, page)
        return "\n".join(page.lines)

    def to_json(self) -> str:
        """The report for machines: one JSON object, with NaN and the infinities by name."""
        whole = {"verdict": self.verdict, **asdict(self)}
        return json.dumps(plain(whole), allow_nan=False)


class _Lines(NamedTuple):
    """The text so far, of at most so many columns (0: any number), and whether it has a terminal's colours."""

    width: int
    color: bool
    lines: list[str]

    def paint(self, text: str, what: str) -> str:
        """Colour a text by what it is."""
        if not self.color or what not in _COLORS:
            return text
        return f"\x1b[{_COLORS[what]}m{text}\x1b[0m"

    def add(self, text: str, indent: str = "  ") -> None:
        """Add a paragraph, if there is one."""
        text = literal(text)
        parts = [text] if text else []
        if self.width:
            room = max(self.width, _NARROWEST) - 2
            parts = textwrap.wrap(text, room, break_on_hyphens=False)
        self.lines.extend(f"{indent}{part}" for part in parts)

    def add_code(self, line: str) -> None:
        """Add a line of code, cut where there is no room."""
        too_long = self.width and len(line) > max(self.width, _NARROWEST)
        self.lines.append(f"{line[: self.width - 1]}…" if too_long else line)


def _write(finding: Finding, page: _Lines) -> None:
    severity = page.paint(finding.severity, finding.severity)
    page.lines.extend(["", f"{severity}  {_head(finding)}"])
    if finding.file or finding.line:
        _write_code(finding, page)
    page.add(finding.cause)
    page.add(finding.numbers)
    if finding.suggestion:
        page.add("Change it to:")
    for row in finding.suggestion.splitlines():
        page.lines.append(f"    {page.paint(literal(row), row[:1])}")


def _head(finding: Finding) -> str:
    """Name a finding's rule, and say where it was met and how often."""
    head = finding.rule
    head += "" if finding.rank is None else f"  rank {finding.rank}"
    # The event of the line that is shown, as a page has it.
    head += f"  at event {finding.event}"
    return head + (f", {finding.times} times" if finding.times > 1 else "")


def _write_unjudged(unjudged: Mapping[str, str], page: _Lines) -> None:
    """Write why rules could not be judged, each reason once."""
    if unjudged:
        page.lines.extend(["", "Not judged:"])
    why: dict[str, list[str]] = {}
    for rule, reason in unjudged.items():
        why.setdefault(reason, []).append(rule)
    for reason, rules in why.items():
        page.add(f"{', '.join(rules)}: {reason}")


def _write_code(finding: Finding, page: _Lines) -> None:
    """Write the user's line with a caret below it, between the lines around it."""
    page.add_code(f"  {literal(finding.file)}:{finding.line}")
    rows = finding.around or ((finding.line, finding.source),)
    texts = [literal(text.expandtabs(4)) for _, text in rows]
    code = textwrap.dedent("\n".join(texts)).split("\n")
    last, _ = rows[-1]
    digits = len(str(last))
    for (number, _), text in zip(rows, code, strict=True):
        page.add_code(f"  {number:>{digits}} | {text}".rstrip())
        if number == finding.line:
            indent = " " * (len(text) - len(text.lstrip()))
            carets = "^" * len(text.strip())
            page.add_code(f"  {'':>{digits}} | {indent}{carets}")


def around(text: str, line: int) -> tuple[tuple[int, str], ...]:
    """Return a line of a file with the two before and the two after it, by their numbers.

    >>> around("a\\nb\\nc\\nd", 4)
    ((2, 'b'), (3, 'c'), (4, 'd'))
    >>> around("a", 0)  # no line is known
    ()
    """
    numbered = list(enumerate(text.splitlines(), 1))
    above = max(line - _AROUND - 1, 0)
    return tuple(numbered[above : line + _AROUND]) if line else ()


# --- the reference of rules ----------------------------------------------------------------


def entries() -> dict[str, str]:
    """Return the entry of each rule, by its name, as plain text.

    >>> entries()["clip-on-the-wrong-side"].partition("\\n")[0]
    'What. The clip comes after the step.'
    """
    return dict(_ENTRY.findall(_MARKS.sub(r"\1", _PAGE.read_text("utf-8"))))


def rules_named(names: str | Iterable[str]) -> frozenset[str]:
    """Return names of rules, given one by one or with commas between them.

    >>> rules_named("tail-dropped,tail-droped")
    Traceback (most recent call last):
    ValueError: there is no rule 'tail-droped'; nearest: tail-dropped, ...
    """
    if isinstance(names, str):
        names = names.split(",")
    chosen = frozenset(names)
    every = entries()
    for name in sorted(chosen - every.keys()):
        nearest = arguments.nearest(name, every)
        raise ValueError(f"there is no rule {name!r}; nearest: {nearest}")
    return chosen


def address(rule: str) -> str:
    """Return where the book's entry about a rule is; empty where the variable ACCUMVIZ_BOOK names no book."""
    book = os.environ.get("ACCUMVIZ_BOOK", "")
    return f"{book.rstrip('/')}/{_REFERENCE}.html#rule-{rule}" if book else ""


def setting(event: Event, sources: Mapping[str, str]) -> str:
    """Return the setting by which a framework accumulates, and the user's line that gives it, if the ledger has that.

    Lightning's does not hold in a loop that calls `backward` itself.
    """
    name = _SETTINGS.get(event.via.partition("/")[0])
    if not name or (name == "accumulate_grad_batches" and "backward(" in event.source):
        return ""
    given = re.compile(rf"\b{name}[\"']?\s*[=:]\s*([\w.]+)")
    for file, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            if match := given.search(line):
                return f"{name}={match[1]} in line {number} of {file}"
    return name


def in_words(value: Any) -> str:
    """A piece of evidence in words.

    >>> in_words([0.25, 1 / 3]), in_words([1, 1, 1, 1]), in_words("loss")
    ('0.25, 0.3333', '4 × 1', 'loss')
    """
    if isinstance(value, list | tuple):
        return _each_in_words(list(map(in_words, value)))
    if isinstance(value, float):
        return f"{value:.4g}"
    return literal(str(value))


def _each_in_words(texts: list[str]) -> str:
    """Write down the first of some values; several equal ones only once."""
    if len(texts) > _FEW and len(set(texts)) == 1:
        return f"{len(texts)} × {texts[0]}"
    shown = ", ".join(texts[:8])
    if len(texts) > 8:
        shown += f", … ({len(texts)} in all)"
    return shown


def terminal(stream: Any) -> dict[str, Any]:
    """Return how a report is written to a stream: in a terminal, with colours and wrapped."""
    wide = os.environ.get("COLUMNS", "")
    width = int(wide) if wide.isdecimal() else 0
    if not getattr(stream, "isatty", bool)():
        return {"width": width}
    with suppress(OSError, ValueError):
        width = width or os.get_terminal_size(stream.fileno()).columns
    plain_only = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return {"color": not plain_only, "width": width}


def plain(value: Any) -> Any:
    """Return what JSON can hold: mappings and lists, NaN and the infinities by name."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return encoded(value)
    return value


# --- annotations of code ----------------------------------------------------------------------


def github(report: Report) -> str:
    """Return one workflow command for each finding, which GitHub shows beside its line.

    >>> github(Report(reason="no optimizer stepped"))
    '::warning title=accumviz::No verdict: no optimizer stepped'
    """
    commands = list(map(_command, report.findings))
    if report.reason:
        text = _escaped(f"No verdict: {literal(report.reason)}")
        commands.append(f"::warning title=accumviz::{text}")
    for said in filter(None, (report.supposed, report.aside)):
        commands.append(f"::notice title=accumviz::{_escaped(literal(said))}")
    return "\n".join(commands)


def _command(finding: Finding) -> str:
    place = ""
    if finding.file and finding.line:
        place = f"file={_property(finding.file)},line={finding.line},"
    title = _property(f"accumviz: {finding.rule}")
    level = _LEVELS[finding.severity]
    return f"::{level} {place}title={title}::{_escaped(_message(finding))}"


def _message(finding: Finding) -> str:
    """Return what is wrong, and below it the suggestion."""
    return "\n".join(map(literal, [finding.cause, *finding.suggestion.splitlines()]))


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(literal(text)).replace(":", "%3A").replace(",", "%2C")


def sarif(report: Report) -> str:
    """Return a report in the format that code scanners read, SARIF 2.1.0."""
    rules = dict.fromkeys(each.rule for each in (*report.findings, *report.ignored))
    driver = {
        "name": "accumviz",
        "rules": [{"id": rule} for rule in rules],
    }
    results = list(map(_result, report.findings))
    for finding in report.ignored:
        results.append(_result(finding) | {"suppressions": [{"kind": "external"}]})
    whole = {
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(whole)


def _result(finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": finding.severity,
        "message": {"text": _message(finding)},
    }
    if finding.file and finding.line:
        place = {
            "artifactLocation": {"uri": finding.file},
            "region": {"startLine": finding.line},
        }
        result["locations"] = [{"physicalLocation": place}]
    return result
