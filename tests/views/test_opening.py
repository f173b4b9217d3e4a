"""The front page's figure as data: what a vessel holds, where a division leads, and what stands there unscripted."""

import pytest

from accumviz.book.opening import DIVIDED, UNDIVIDED, WHOLE, Opening
from accumviz.ledger.ledger import Ledger
from tests.toys import window

CODE = "for x in data:\n    (f(x) / divisor).backward()\nopt.step()\nopt.zero_grad()\n"


def run(parts: list[float], after: float) -> Ledger:
    return window(parts, after=after, zero=4, code=CODE)


def made() -> Opening:
    ways = {WHOLE: run([-20.0], 2.0), DIVIDED: run([-16.0, -4.0], 2.0), UNDIVIDED: run([-32.0, -8.0], 5.0)}
    runs = {(0.05, way): ledger for way, ledger in ways.items()}
    return Opening(runs, lambda w: 10 * (w - 2) ** 2, lambda w: 20 * (w - 2), 0.05, "/ divisor")


figure = pytest.fixture(made, name="figure")


def test_a_vessel_holds_fractions_of_what_one_large_batch_brings(figure: Opening) -> None:
    ((_, divided, undivided),) = figure.content["runs"]
    kinds, _, held, grads, wholes = zip(*divided["events"], strict=True)
    assert kinds == ("backward", "backward", "step", "zero_grad")
    assert held == ([0.8], [0.8, 0.2], [0.8, 0.2], [])
    assert grads == ("−16", "−20", "−20", "None")
    assert wholes == ("−20", "−20", "−20", "0"), "another scale only after what the step has used is gone"
    assert undivided["events"][1][2] == [1.6, 0.4]


def test_a_way_that_ends_higher_than_it_began_fails(figure: Opening) -> None:
    ((_, divided, undivided),) = figure.content["runs"]
    assert (divided["fails"], divided["from"], divided["to"]) == (False, "10", "0")
    assert (undivided["fails"], undivided["from"], undivided["to"]) == (True, "10", "90")
