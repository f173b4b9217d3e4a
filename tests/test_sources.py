"""Which lines of a source file a ledger keeps: enough to read what happened, and no more."""

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


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def shown(text: str, part: str, function: str = "") -> list[str]:
    """The lines that a ledger keeps of a text with an event on one, in a function that begins on another."""
    kept = needs(text, line_of(text, part), line_of(text, function) if function else 0)
    lines = only(text, kept).splitlines()
    assert all(line in ("", original) for line, original in zip(lines, text.splitlines(), strict=False))
    return [line.strip() for line in lines if line]


def test_a_line_in_a_function_needs_that_function() -> None:
    closure = ["def closure():", "loss = self.loss(data)", "loss.backward()", "return loss"]
    assert shown(SCRIPT, "loss = self.loss(data)", "def closure") == closure
    fit = ["@torch.enable_grad()", "def fit(", "self, data", "):", *closure, "self.optimizer.step(closure)"]
    assert shown(SCRIPT, "optimizer.step", "@torch.enable_grad") == fit


def test_a_line_at_the_top_level_needs_its_whole_statement_and_a_few_lines_around() -> None:
    kept = shown(SCRIPT, "    if x:")
    assert kept[0] == "before = 1"
    assert kept[-1] == "pass"
    assert "secret" not in "".join(kept)


def test_lines_keep_their_numbers_and_the_end_goes() -> None:
    number = line_of(SCRIPT, "return loss")
    kept = only(SCRIPT, needs(SCRIPT, number, line_of(SCRIPT, "def closure"))).splitlines()
    assert kept[number - 1] == "            return loss"
    assert len(kept) == number


def test_of_a_very_long_function_the_nearest_lines_are_kept() -> None:
    filler = "    x = 1\n" * 150
    text = f"def train():\n{filler}    loss.backward()\n{filler}"
    assert needs(text, 152, 1) == set(range(52, 253))


@pytest.mark.parametrize("text", ["%time x\n" * 20, "x = (\n" * 20, "\0" + "x\n" * 20, "x\n" * 20 + "\\d"])
def test_what_cannot_be_parsed_is_kept_a_few_lines_around(text: str) -> None:
    assert needs(text, 10) == set(range(7, 14))


def test_lines_that_are_not_there_need_nothing() -> None:
    assert needs(SCRIPT, 0) == needs(SCRIPT, -3) == needs(SCRIPT, 10_000) == needs("", 1) == set()
