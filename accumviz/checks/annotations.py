"""Write a report as annotations of code: GitHub's workflow commands, and SARIF."""

from __future__ import annotations

import json
from typing import Any

from accumviz.checks.report import Finding, Report
from accumviz.show import literal

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def github(report: Report) -> str:
    """Return one workflow command for each finding, which GitHub shows beside its line.

    >>> github(Report(reason="no optimizer stepped"))
    '::warning title=accumviz::No verdict: no optimizer stepped'
    """
    commands = [_command(finding) for finding in report.findings]
    if report.reason:
        text = _escaped(f"No verdict: {literal(report.reason)}")
        commands.append(f"::warning title=accumviz::{text}")
    if report.ignored:
        commands.append(f"::notice title=accumviz::{_escaped(literal(report.aside))}")
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
    results = [_result(finding) for finding in report.findings]
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
