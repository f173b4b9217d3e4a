"""Predictions: the answer comes from the recording, mistakes of the author teach, and the page gives nothing away."""

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accumviz.book.predict import Prediction, predict
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.timeline import timeline

W, V = Parameter("w", (1,), optimizers=(0,)), Parameter("v", (3,), optimizers=(0,))
TOY: list[dict[str, Any]] = [
    {"kind": "backward", "contribution": {"w": -16, "v": [1, 2, 3]}, "grad": {"w": -16, "v": [1, 2, 3]}},
    {"kind": "backward", "contribution": {"w": -4}, "grad": {"w": -20, "v": [1, 2, 3]}},
    {"kind": "zero_grad", "grad": {"v": [0, 0, 0]}},
]
ASK = "What is `w.grad` after the second `backward`?"


@pytest.fixture
def ledger() -> Ledger:
    return Ledger.build([W, V], TOY)


class OneElement:
    """Like a tensor: it knows its one value, and is no number itself."""

    shape = (1, 1)

    def __init__(self, value: object) -> None:
        self.value = value

    def item(self) -> object:
        return self.value


def secret(prediction: Prediction) -> dict[str, Any]:
    found = re.search(r'data-av-predict="([^"]*)"', prediction.to_html())
    assert found
    read: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return read


def without_assets(page: str) -> str:
    return re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)


def seen(prediction: Prediction) -> str:
    """The text a reader meets when scripts and styles are gone."""
    text = re.sub(r"<[^>]*>", " ", without_assets(prediction.to_html()))
    return re.sub(r"\s+", " ", html.unescape(text)).strip()


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (-20, -20.0),
        (np.array([-20.0], np.float32), -20.0),
        (np.float32(0.5), 0.5),
        (OneElement(3), 3.0),
        (OneElement(True), True),
        (np.bool_(False), False),
        (None, None),
        (True, True),
        (float("inf"), float("inf")),
    ],
)
def test_an_answer_is_taken_from_whatever_was_recorded(source: Any, answer: object) -> None:
    taken = predict(ASK, source).answer
    assert taken == answer
    assert type(taken) is type(answer)


def test_a_place_in_a_ledger_knows_none_from_zero_and_grad_from_contribution(ledger: Ledger) -> None:
    assert predict(ASK, (ledger, 1, "w")).answer == -20
    assert predict(ASK, (ledger, ledger[1], 0)).answer == -20
    assert predict(ASK, (ledger, 1, "w", "contribution")).answer == -4
    assert predict(ASK, (ledger, -1, "w")).answer is None
    assert predict(ASK, (ledger, 1, "v", "contribution")).answer is None
    nan = Ledger.build([W], [{"kind": "backward", "grad": {"w": float("nan")}}])
    assert secret(predict(ASK, (nan, 0, "w")))["right"] == "nan"


def test_none_is_another_answer_than_zero(ledger: Ledger) -> None:
    assert secret(predict(ASK, (ledger, 2, "w"), because={0: "Nothing is there."})) | {"id": ""} == {
        "right": "None",
        "keys": ["0.0"],
        "tolerance": 0.005,
        "id": "",
    }
    assert predict(ASK, 0.0, because={None: "A zero is there."}).because == ((None, "A zero is there."),)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"answer_from": -20, "because": {-20: "no"}}, ValueError, "that is the right answer"),
        ({"answer_from": -20.001, "because": {-20: "no"}}, ValueError, "that is the right answer"),
        ({"answer_from": True, "because": {True: "no"}}, ValueError, "that is the right answer"),
        ({"answer_from": 1, "because": {"one": "no"}}, ValueError, "expected each wrong answer once"),
        ({"answer_from": 1, "because": {2: "a", 2.001: "b"}}, ValueError, "expected each wrong answer once"),
        ({"answer_from": "b"}, TypeError, "choices=None"),
        ({"answer_from": "b", "choices": ["a", "a", "b"]}, ValueError, "different ones"),
        ({"answer_from": -20, "choices": [-16, -4]}, ValueError, "recorded answer, −20, among them once"),
        ({"answer_from": 20, "choices": [20, 20.01]}, ValueError, "among them once"),
        (
            {"answer_from": "b", "choices": ["a", "b"], "because": {"c": "?"}},
            ValueError,
            "expected each wrong answer once",
        ),
        ({"answer_from": float("nan")}, ValueError, "tells None from NaN"),
        ({"answer_from": np.arange(3)}, TypeError, "is a ndarray.*pick one element"),
        ({"answer_from": object()}, TypeError, "expected one number"),
        ({"answer_from": (1, 2, 3)}, TypeError, "expected a recording or a ledger"),
        ({"question": " ", "answer_from": 1}, ValueError, "question=' '"),
    ],
)
def test_what_cannot_be_asked_says_what_to_do(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=".*".join(map(re.escape, says.split(".*")))):
        predict(**{"question": ASK} | arguments)


def test_a_place_that_is_not_in_the_ledger_is_an_error(ledger: Ledger) -> None:
    with pytest.raises(KeyError, match="nearest: w"):
        predict(ASK, (ledger, 1, "weight"))
    with pytest.raises(TypeError, match=r"grad of 'v'.*pick one element"):
        predict(ASK, (ledger, 1, "v"))


def test_the_page_shows_neither_answer_nor_reasons_to_who_reads_its_source() -> None:
    source = without_assets(predict(ASK, -2317, because={-99: "You forgot the sum."}, why="It adds.").to_html())
    for given_away in ("2317", "forgot", "-99", "−99", "It adds"):
        assert given_away not in source


def test_without_a_script_the_question_a_fold_and_all_answers_are_there(ledger: Ledger) -> None:
    prediction = predict(
        ASK, (ledger, 1, "w"), because={-16: "`backward` adds."}, why="−16 − 4.", hint="Twice.", reveal=timeline(ledger)
    )
    page = prediction.to_html()
    told = seen(prediction)
    for part in ("What is w.grad after", "Hint Twice.", "Show me", "Recorded: −20", "−16 − 4.", "−16 backward adds."):
        assert part in told
    assert "hidden" not in without_assets(page).split("<svg")[0]
    assert page.index("<svg") > page.index("<details")
    assert "<input" not in without_assets(page)


def test_choices_are_a_list_and_a_bool_is_asked_as_yes_or_no() -> None:
    told = seen(predict("Which?", None, choices=[0, None, -4.0, "the `sum`"]))
    assert "Which? 0 None −4 the sum" in told
    assert "Does it? Yes No" in seen(predict("Does it?", True))
    assert predict("Which?", np.array([2.0]), choices=np.array([1.0, 2.0])).choices == (1.0, 2.0)
    assert secret(predict("Which?", None, choices=[0, None], because={0: "a"})) | {"id": ""} == {
        "right": 1,
        "keys": [0],
        "id": "",
    }


HOSTILE = "</script><img src=x onerror=boom()>\"'&`<b>x</b>`\u202e"


def test_no_text_becomes_markup() -> None:
    choices = [HOSTILE, "b"]
    p = predict(HOSTILE, "b", choices=choices, because={HOSTILE: HOSTILE}, why=HOSTILE, hint=HOSTILE, reveal=HOSTILE)
    source = without_assets(p.to_html())
    assert "<img" not in source
    assert "<b>x" not in source
    assert "a ` b" in predict("a ` b", 1).to_html()
    assert "\u202e" not in html.unescape(source)
    assert "<code>&lt;b&gt;x&lt;/b&gt;</code>" in source
    assert p.__repr__().count("\n") == 4


class Markup:
    def _repr_html_(self) -> str:
        return "<table><tr><td>1</td></tr></table>"


class Words:
    def _repr_mimebundle_(self) -> dict[str, str]:
        return {"text/plain": "a\n<b>"}


@pytest.mark.parametrize(
    ("reveal", "shown"),
    [
        (Markup(), "<table><tr><td>1</td></tr></table>"),
        (Words(), "<pre>a\n&lt;b&gt;</pre>"),
        ("The `sum`.", "<p>The <code>sum</code>.</p>"),
    ],
)
def test_whatever_a_notebook_displays_can_be_revealed(reveal: Any, shown: str) -> None:
    assert f'<div class="av-shown">{shown}</div></details>' in predict(ASK, 1, reveal=reveal).to_html()


def test_another_answer_makes_another_question_so_that_no_memory_is_graded_against_it() -> None:
    ids = [secret(p)["id"] for p in (predict(ASK, 1), predict(ASK, 2), predict("Else?", 1), predict(ASK, 1))]
    assert len(set(ids)) == 3
    assert ids[0] == ids[3]


def test_the_text_form_asks_and_does_not_answer(tmp_path: Path) -> None:
    prediction = predict("Which?", "b", choices=["a", "b"], hint="Not a.")
    assert repr(prediction).splitlines() == [
        "Prediction: Which?",
        "  - a",
        "  - b",
        "  Hint: Not a.",
        "  (.answer is what was recorded)",
    ]
    bundle = prediction._repr_mimebundle_()
    assert bundle == {"text/plain": repr(prediction), "text/html": prediction.to_html()}
    prediction.save(tmp_path / "asked.html")
    assert (tmp_path / "asked.html").read_text("utf-8").startswith("<!doctype html>")
