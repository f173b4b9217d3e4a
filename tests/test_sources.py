"""Which lines of a source file a ledger keeps: enough to read what happened, and no more."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from accumviz.recorder.callsite import needs, only

SCRIPT = """\
import torch

API_KEY = "secret"


class Trainer:
    token = "secret"

    @property
    def rate(self):
        return "secret"

    @torch.enable_grad()
    def fit(
        self, data
    ):
        def closure():
            loss = self.loss(data)
            loss.backward()
            return loss

        self.optimizer.step(closure)


model = torch.nn.Linear(1, 1)
before = 1
for x in range(3):
    loss = model(x)
    if x:
        loss.backward()
    else:
        pass
after = 1
after = 2
after = 3
PASSWORD = "secret"
"""


def needed(text: str, lines: Iterable[int]) -> str:
    """What a ledger keeps of a text whose events stand on these lines."""
    return only(text, set().union(*(needs(text, line) for line in lines)))


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def shown(text: str, *parts: str) -> list[str]:
    kept = needed(text, [line_of(text, part) for part in parts]).splitlines()
    assert all(line in ("", original) for line, original in zip(kept, text.splitlines(), strict=False))
    return [line.strip() for line in kept if line]


def test_a_line_in_a_function_needs_that_function_and_the_heads_around_it() -> None:
    assert shown(SCRIPT, "loss = self.loss(data)") == [
        "class Trainer:",
        "@torch.enable_grad()",
        "def fit(",
        "self, data",
        "):",
        "def closure():",
        "loss = self.loss(data)",
        "loss.backward()",
        "return loss",
    ]


def test_a_line_at_the_top_level_needs_its_whole_statement_and_a_few_lines_around() -> None:
    kept = shown(SCRIPT, "        pass")
    assert kept[0] == "for x in range(3):"
    assert kept[-1] == "after = 3"


def test_nothing_that_no_event_needs_is_kept() -> None:
    assert "secret" not in needed(SCRIPT, [line_of(SCRIPT, "loss = self.loss"), line_of(SCRIPT, "loss = model")])


def test_lines_keep_their_numbers_and_the_end_goes() -> None:
    kept = needed(SCRIPT, [line_of(SCRIPT, "return loss")]).splitlines()
    assert kept[line_of(SCRIPT, "return loss") - 1] == "            return loss"
    assert len(kept) == line_of(SCRIPT, "return loss")


def test_of_a_very_long_function_the_loop_around_the_line_is_kept() -> None:
    filler = "    x = 1\n" * 150
    text = f"def train():\n{filler}    for x in y:\n        loss.backward()\n        step()\n{filler}"
    assert shown(text, "loss.backward()") == ["def train():", "for x in y:", "loss.backward()", "step()"]


@pytest.mark.parametrize("text", ["%time x\n" * 20, "x = (\n" * 20, "\0" + "x\n" * 20, "x\n" * 20 + "\\d"])
def test_what_cannot_be_parsed_is_kept_a_few_lines_around(text: str) -> None:
    assert needed(text, [10]).splitlines()[6:] == text.splitlines()[6:13]


def test_lines_that_are_not_there_need_nothing() -> None:
    assert needed(SCRIPT, [0, -3, 10_000]) == ""
    assert needed("", [1]) == ""


def test_a_statement_inside_an_except_or_a_match_is_found() -> None:
    text = "a = 1\n" * 9 + "try:\n    f()\nexcept E:\n    for x in y:\n        loss.backward()\n" + "b = 1\n" * 9
    tried = ["try:", "f()", "except E:", "for x in y:", "loss.backward()"]
    assert shown(text, "loss.backward()") == [*tried, "b = 1", "b = 1", "b = 1"]
