"""The arrangements of the lab: each is what its text does, and its report names the mistake that was made."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import accumviz as av
from accumviz.book import lab as module
from accumviz.book.lab import INPUTS, Lab
from accumviz.views.payload import encode, ledger_data
from tests.conftest import ROOT

STARTS: list[dict[str, Any]] = [{}, {"sizes": "unequal", "divide": "samples"}, {"zero_grad": "nowhere"}]


@cache
def shown(**start: Any) -> Lab:
    return av.lab(start)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shown()


class ByHand:
    """Runs the text of a loop without torch and without accumviz: what each sample weighs in each step.

    `.grad` is a dict of contributions, each a micro-batch (epoch, number) with a weight per sample; a
    sample's gradient is 2 x (w x − 2 x), written out.
    """

    def __init__(self, text: str) -> None:
        self.w, self.lr, self.epoch, self.clipped = 0.0, 0.05, -1, 1.0
        self.held: dict[tuple[int, int], dict[int, float]] = {}
        self.read: list[tuple[dict[tuple[int, int], dict[int, float]], float]] = []
        self.slopes: dict[tuple[int, int], dict[int, float]] = {}
        names = {"w": self, "optimizer": self, "nn": self, "batches_of": self.loader}
        exec(compile(text, "by hand", "exec"), names)

    utils = property(lambda self: self)

    def loader(self, sizes: list[int]) -> Any:
        batches, at = [], 0
        for n in sizes:
            batches.append(list(range(at, at + n)))
            at += n
        hand = self

        class Loader:
            def __len__(self) -> int:
                return len(batches)

            def __iter__(self) -> Iterator[Any]:
                hand.epoch += 1
                for i, batch in enumerate(batches):
                    hand.now = (hand.epoch, i)
                    yield _Tensor(hand, batch), None

        return Loader()

    def __mul__(self, x: _Tensor) -> _Tensor:
        return x

    @property
    def gradient(self) -> float:
        """What `.grad` is: each contribution with the weight that there was when it was made."""
        return sum(self.slopes[one][s] * c for one, part in self.held.items() for s, c in part.items())

    def backward(self, weights: dict[int, float]) -> None:
        self.held[self.now] = weights
        self.slopes[self.now] = {s: 2 * INPUTS[s] * (self.w - 2) * INPUTS[s] for s in weights}

    def zero_grad(self) -> None:
        self.held, self.clipped = {}, 1.0

    def clip_grad_norm_(self, _w: Any, most: float) -> None:
        factor = min(1.0, most / (abs(self.gradient) + 1e-6))
        self.clipped *= factor
        self.held = {k: {s: c * factor for s, c in part.items()} for k, part in self.held.items()}

    def step(self) -> None:
        self.read.append((dict(self.held), self.clipped))
        self.clipped = 1.0
        self.w -= self.lr * self.gradient

    @property
    def is_right(self) -> bool:
        """Whether each step weighs the samples of one epoch alike, each of them once, and all steps the same."""
        used = [one for held, _ in self.read for one in held]
        if sorted(used) != sorted(self.slopes):
            return False
        weights = [{round(c, 9) for part in held.values() for c in part.values()} for held, _ in self.read]
        epochs = [{epoch for epoch, _ in held} for held, _ in self.read]
        sums = {round(sum(sum(part.values()) for part in held.values()) / cut, 6) for held, cut in self.read}
        # Divided by less than the window has, or not at all.
        less = all(
            any(round(cut * len(held) / divisor, 6) in sums for divisor in range(1, len(held)))
            for held, cut in self.read
        )
        return {len(one) for one in (*weights, *epochs)} == {1} and len(sums) == 1 and not less


class _Tensor:
    """What a loop writes its loss with: only the samples and their weights are kept."""

    def __init__(self, hand: ByHand, samples: list[int], weight: float = 1.0) -> None:
        self.hand, self.samples, self.weight = hand, samples, weight

    def __len__(self) -> int:
        return len(self.samples)

    def __sub__(self, other: Any) -> _Tensor:
        return self

    def square(self) -> _Tensor:
        return self

    def sum(self) -> _Tensor:
        return self

    def mean(self) -> _Tensor:
        return _Tensor(self.hand, self.samples, self.weight / len(self.samples))

    def __truediv__(self, by: float) -> _Tensor:
        return _Tensor(self.hand, self.samples, self.weight / by)

    def backward(self) -> None:
        self.hand.backward(dict.fromkeys(self.samples, self.weight))


# What a person expects of one change, whatever the loop's text says; "" is healthy.
ONE_CHANGE = {
    ("zero_grad", "epoch"): "missing-zero-grad",
    ("zero_grad", "micro-batch"): "zero-grad-inside-window",
    ("zero_grad", "backward"): "zero-before-step",
    ("zero_grad", "before"): "zero-before-step",
    ("zero_grad", "nowhere"): "missing-zero-grad",
    ("step", "micro-batch"): "",
    ("step", "epoch"): "",
    ("clip", "backward"): "clip-per-micro-batch",
    ("clip", "step"): "",
    ("divide", "K"): "partial-window-underscaled",
    ("divide", "nothing"): "loss-not-divided",
    ("divide", "samples"): "",
    ("sizes", "unequal"): "token-mean-of-means",
    ("tail", "carry"): "leftover-carried",
    ("tail", "drop"): "tail-dropped",
}


def test_one_change_has_the_report_that_a_person_expects(lab: Lab) -> None:
    changes = {(axis.name, value) for axis in module.AXES for value in axis.values if value != module.RIGHT[axis.name]}
    assert changes == set(ONE_CHANGE)
    for (axis, value), rule in ONE_CHANGE.items():
        report = lab.check(**{axis: value})
        mistakes = {finding.rule for finding in report.findings if finding.severity != "note"}
        assert mistakes == ({rule} if rule else set()), (axis, value)
        assert report.healthy == (not rule)
        assert len(report.findings) == len(mistakes)


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_each_arrangement_moves_the_weight_and_is_judged_as_worked_out_by_hand(start: dict[str, Any]) -> None:
    for choice, made in shown(**start).recorded.items():
        hand = ByHand(made.text)
        assert made.report.healthy == hand.is_right, choice
        after = made.ledger.weights("w")[[event.index for event in made.ledger.of("step")], 0]
        assert float(after[-1]) == pytest.approx(hand.w, rel=1e-4, abs=1e-4), choice
        read = made.ledger.values("w")[[event.index for event in made.ledger.of("step")], 0]
        assert len(read) == len(hand.read)
        shares = made.ledger.shares()
        for step, (held, _) in zip(made.ledger.of("step"), hand.read, strict=True):
            rows = shares.of(step.index)
            expected = sum(sum(part.values()) for part in held.values())
            assert float(rows.share[~rows.erased].sum()) == pytest.approx(expected, rel=1e-3, abs=1e-6), choice


def test_the_page_is_told_each_arrangement_whole(lab: Lab) -> None:
    told = json.loads(json.dumps(lab.content))
    names = list(told["parts"])
    for key, made in lab.recorded.items():
        places = [offer["values"].index(value) for offer, value in zip(told["offers"], key, strict=True)]
        row = told["runs"][told["grid"][".".join(map(str, places))]]
        run = {name: told["parts"][name][place] for name, place in zip(names, row, strict=True) if place >= 0}
        whole = ledger_data(made.ledger)
        assert run["x.0"] == whole["x"]["0"] and run["e.k"] == whole["e"]["k"] and run["code"] == whole["code"]
        assert run["shares.rows"] == whole["shares"]["rows"]
        text = ["".join(p if isinstance(p, str) else p[1] for p in parts) for _, *parts in run["code"][0]["lines"]]
        assert "\n".join(text) + "\n" == made.text
        assert [number for number, *_ in run["rows"] if number] == list(range(1, len(text) + 1))


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_what_travels_is_small(start: dict[str, Any]) -> None:
    made = shown(**start)
    assert 50 <= len(made.recorded) <= 200
    assert len(gzip.compress(encode(made.content).encode())) <= 60 * 1024


def test_each_line_has_its_places_and_stands_in_one_of_them() -> None:
    for choice in module.near(module.RIGHT):
        rows = list(module.loop_lines(choice))
        for axis in module.AXES:
            if not axis.line:
                continue
            mine = [row for row in rows if row.role == axis.name]
            values = [row.value for row in mine]
            assert len(values) == len(set(values)), choice
            standing = [row for row in mine if row.text]
            assert len(standing) == (choice[axis.name] != "nowhere"), choice
            assert all(row.text == axis.line for row in standing)
        places = {row.value for row in rows if row.role == "zero_grad"}
        assert len(places) == (4 if choice["step"] == "micro-batch" else 5)


def test_arrangements_are_had_by_name(lab: Lab) -> None:
    assert lab.check().healthy
    assert lab.check(zero_grad="nowhere", sizes="unequal").findings[0].rule == "missing-zero-grad"
    assert "sizes = [3, 1," in lab.text(sizes="unequal")
    assert len(lab.run(step="epoch").of("step")) == 2
    with pytest.raises(ValueError, match="'kk': '2'} is not recorded"):
        lab.run(kk=2)
    with pytest.raises(ValueError, match="in at most two choices"):
        lab.run(tail="drop", zero_grad="nowhere", clip="step")


def test_the_text_alternative_has_the_code_the_shares_and_the_report() -> None:
    text = shown(divide="nothing")._repr_mimebundle_()["text/plain"]
    for part in ("loss.backward()", "which add to 3.", "loss-not-divided"):
        assert part in text


def test_the_lab_names_no_place_on_a_machine(lab: Lab) -> None:
    assert str(ROOT) not in lab.to_html()
