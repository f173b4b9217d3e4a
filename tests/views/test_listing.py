"""The code beside a player: the stretches that matter, and what a ledger left out of a file as left-out code."""

from accumviz.ledger.ledger import Ledger
from accumviz.recorder.callsite import needs, only
from accumviz.views.payload import listing

SCRIPT = """\
import torch

PASSWORD = "secret"
one = 1
two = 2
three = 3


def help():
    return PASSWORD


def train():
    for x in data:

        loss.backward()


    opt.step()


a = 1
b = 2
c = 3
d = 4


def again():
    opt.zero_grad()
"""


def shown(text: str, *lines: int) -> list[int]:
    ledger = Ledger.build([], [{"kind": "step", "file": "a.py", "line": n} for n in lines], sources={"a.py": text})
    ((file,), at) = listing(ledger, ledger.events)
    assert [file["lines"][i][0] for i in at] == list(lines)
    return [line[0] for line in file["lines"]]


def test_what_a_ledger_left_out_is_left_out_code_not_empty_lines() -> None:
    text = only(SCRIPT, needs(SCRIPT, 16, 13) | needs(SCRIPT, 29, 28))
    assert "secret" not in text
    assert shown(text, 16, 29) == [13, 14, 15, 16, 17, 18, 19, 0, 28, 29]


def test_empty_lines_that_somebody_wrote_stay() -> None:
    assert shown(SCRIPT, 16, 29) == list(range(1, 30))
