"""Predictions: the answer comes from the recording, and a page gives nothing away; then as a reader meets them."""

import base64
import html
import json
import re
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accumviz.book.predict import Prediction, _same, predict
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.timeline import timeline
from tests.browser.conftest import written
from tests.browser.frames import reload
from tests.toys import W, backward

V = Parameter("v", (3,), optimizers=(0,))
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


def test_a_place_in_a_ledger_knows_none_from_nan(ledger: Ledger) -> None:
    assert predict(ASK, (ledger, 1, "w")).answer == -20
    assert predict(ASK, (ledger, ledger[1], 0)).answer == -20
    assert predict(ASK, (ledger, -1, "w")).answer is None
    nan = Ledger.build([W], [{"kind": "backward", "grad": {"w": float("nan")}}])
    assert secret(predict(ASK, (nan, 0, "w")))["right"] == "nan"


def test_none_is_another_answer_than_zero(ledger: Ledger) -> None:
    told = secret(predict(ASK, (ledger, 2, "w"), because={0: "Nothing is there."}))
    assert (told["right"], told["keys"], told["tolerance"]) == ("None", ["0.0"], 0.005)
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


def test_choices_are_a_list_and_a_bool_is_asked_as_yes_or_no() -> None:
    told = seen(predict("Which?", None, choices=[0, None, -4.0, "the `sum`"]))
    assert "Which? 0 None −4 the sum" in told
    assert "Does it? Yes No" in seen(predict("Does it?", True))
    assert predict("Which?", np.array([2.0]), choices=np.array([1.0, 2.0])).choices == (1.0, 2.0)
    chosen = secret(predict("Which?", None, choices=[0, None], because={0: "a"}))
    assert (chosen["right"], chosen["keys"]) == (1, [0])


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


LEDGER = Ledger.build([W], [backward(-16, -16), backward(-4, -20), {"kind": "zero_grad"}])
SUM = predict(
    "What is `w.grad` after the second `backward`?",
    (LEDGER, 1, "w"),
    because={-16: "That is the first contribution alone: `backward` adds.", -4: "That is the second alone."},
    why="−16 − 4.",
    hint="What was there before?",
    reveal=timeline(LEDGER),
)
NOTHING = predict("What is `w.grad` after `zero_grad`?", (LEDGER, 2, "w"))
PLACE = predict(
    "Where may `zero_grad` not stand?",
    "before `step`",
    choices=["at the start", "before `step`", "after `step`"],
    because={"after `step`": "The step has used the sum by then."},
    reveal=LEDGER,
)
BLOCKED = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})"


@pytest.fixture
def show(show: Any) -> Any:
    """Open a page with these predictions, as a file."""
    return partial(show, wait=".av-predict", panes=False)


class Asked:
    """One prediction on a page, as a reader meets it."""

    def __init__(self, page: Any, index: int = 0) -> None:
        self.page, self.root = page, page.locator(".av-predict").nth(index)

    def answer(self, text: str) -> None:
        self.root.get_by_role("textbox").fill(text)
        self.check()

    def choose(self, label: str) -> None:
        self.root.get_by_label(label).check()
        self.check()

    def check(self) -> None:
        self.root.get_by_role("button", name="Check").click()

    def again(self) -> None:
        self.root.get_by_role("button", name="Ask me again").click()

    @property
    def state(self) -> str:
        return self.root.get_attribute("data-av-state")

    @property
    def verdict(self) -> str:
        return re.sub(r"^[✓✗→]\s*", "", self.root.locator("> .av-ask > .av-verdict").inner_text()).strip()

    @property
    def labels(self) -> list[str]:
        return [re.sub(r"\s+", " ", text).strip() for text in self.root.locator("label").all_inner_texts()]

    @property
    def unlocked(self) -> bool:
        return self.root.locator("> .av-reveal > .av-recorded").is_visible()


def test_the_figure_is_folded_until_the_reader_has_answered(show: Any) -> None:
    page = show(SUM)
    asked = Asked(page)
    assert (asked.state, asked.unlocked) == ("asked", False)
    assert not page.locator("svg").first.is_visible()
    assert "−20" not in page.locator("body").inner_text()
    asked.answer("-20")
    assert (asked.state, asked.verdict, asked.unlocked) == ("right", "Right. You said −20.", True)
    assert page.locator("svg").first.is_visible()
    assert "Recorded: −20\n−16 − 4." in asked.root.inner_text()


SECOND = "8.5"
WRONG = {
    "-16": "You said −16. That is the first contribution alone: backward adds.",
    "−16.01": "You said −16.01. That is the first contribution alone: backward adds.",
    "-4": "You said −4. That is the second alone.",
    "20": "You said 20. The size is right, the sign is not.",
    "7": "You said 7. Compare it with what was recorded.",
    "none": "You said None. Compare it with what was recorded.",
    "0": "You said 0. Compare it with what was recorded.",
}


def test_a_wrong_answer_meets_the_misconception_behind_it_and_a_second_try(show: Any) -> None:
    asked = Asked(show(SUM))
    for said, verdict in WRONG.items():
        asked.answer(said)
        first = verdict.replace("Compare it with what was recorded.", "That is not what was recorded.")
        assert (asked.state, asked.verdict, asked.unlocked) == ("retry", f"{first} Try once more.", False), said
        assert asked.root.get_by_role("textbox").evaluate("field => field === document.activeElement")
        asked.answer(said)
        assert asked.root.locator(".av-help").inner_text() == "That was your first answer."
        asked.answer(SECOND)
        assert asked.state == "wrong"
        asked.again()
        asked.answer(SECOND)
        asked.answer(said)
        assert (asked.state, asked.verdict, asked.unlocked) == ("wrong", verdict, True), said
        assert not asked.root.locator(".av-others").is_visible()
        asked.again()


def test_nothing_of_an_answer_is_seen_or_heard_before_it_is_given(show: Any, tmp_path: Path) -> None:
    """Not as text, not as a title, not in what a screen reader is told, not before the script has run."""
    page = show(SUM, PLACE)
    heard = page.locator("body").aria_snapshot()
    for text in (heard, page.locator("body").inner_text()):
        assert not re.search("−20|Recorded|Why not|first contribution|timeline", text), text
    held = page.content()
    early = (tmp_path / "page.html").read_text("utf-8")
    page.set_content(re.sub(r'<script type="module">.*?</script>', "", early, flags=re.DOTALL))
    assert not page.locator(".av-recorded").first.is_visible()
    assert held.count("Recorded") >= 2


ANSWERS = """<div class="rest"><div data-answers="prediction-1"><p class="av-shut"><a href="#prediction-1">Opens</a></p>
<p id="sum">It is minus twenty.</p></div><p>Between</p><div data-answers="prediction-1"><p>And this.</p></div>
<div data-answers="prediction-2"><p>That of another.</p></div></div>"""


def gated(folder: Path) -> str:
    """A page as the book writes it: predictions with their ids, and what answers them."""
    address = written(folder / "page.html", SUM, PLACE)
    text = (folder / "page.html").read_text("utf-8")
    for number in (1, 2):
        text = text.replace('av-predict" data-av-predict', f'av-predict" id="prediction-{number}" data-av-predict', 1)
    (folder / "page.html").write_text(text.replace("</body>", f"{ANSWERS}</body>"), "utf-8")
    return address


def opened(page: Any) -> list[str]:
    return [one for one in ("It is minus", "And this", "That of another") if page.get_by_text(one).is_visible()]


@pytest.mark.parametrize("storage", ["kept", "denied"])
def test_what_answers_a_prediction_elsewhere_opens_with_it(new_page: Any, tmp_path: Path, storage: str) -> None:
    page = new_page()
    if storage == "denied":
        page.add_init_script(BLOCKED)
    page.goto(gated(tmp_path))
    asked = Asked(page)
    assert (opened(page), page.get_by_text("Opens", exact=True).is_visible()) == ([], True)
    asked.answer("-16")
    assert opened(page) == []
    asked.answer("-20")
    assert (opened(page), page.get_by_text("Opens", exact=True).is_visible()) == (["It is minus", "And this"], False)
    reload(page)
    assert opened(page) == ([] if storage == "denied" else ["It is minus", "And this"])
    if storage == "kept":
        asked.again()
    assert opened(page) == []
    asked.root.locator("> .av-reveal > summary").press("Enter")
    page.wait_for_selector(".av-predict[data-av-state=skipped]")
    assert opened(page) == ["It is minus", "And this"]


def test_an_address_of_what_is_shut_leads_to_its_prediction(new_page: Any, tmp_path: Path) -> None:
    page = new_page()
    address = gated(tmp_path)
    page.goto(address)
    page.add_style_tag(content="body::before { content: ''; display: block; height: 3000px }")
    page.evaluate("location.hash = 'sum'")
    page.wait_for_function("document.getElementById('prediction-1').getBoundingClientRect().top < innerHeight")
    assert opened(page) == []


def test_a_question_that_cannot_start_leaves_nobody_before_a_gate(new_page: Any, tmp_path: Path) -> None:
    page = new_page()
    page.add_init_script("atob = () => { throw new Error('broken'); }; console.warn = () => {};")
    page.goto(gated(tmp_path))
    assert opened(page) == ["It is minus", "And this", "That of another"]
    assert Asked(page).unlocked


def test_what_is_no_number_is_not_committed_and_says_what_is(show: Any) -> None:
    asked = Asked(show(SUM))
    field, told = asked.root.get_by_role("textbox"), asked.root.locator(".av-help")
    for said in ("", "  ", "twenty", "1/0", "1/", "--2", "1e999", "1,5", "0x10", "1 2", "<b>"):
        asked.answer(said)
        assert (asked.state, asked.unlocked) == ("asked", False), said
        assert told.inner_text() == "Write a number such as −2.5, 1/2 or 2e3, or None.", said
        assert field.get_attribute("aria-invalid") == "true"
        assert field.evaluate("field => field === document.activeElement")
        field.fill("3")
        assert field.get_attribute("aria-invalid") == "false"
        assert told.inner_text() == "A number, a fraction, or None. Within 0.5\u00a0% counts."


def test_none_is_offered_and_is_not_zero(show: Any) -> None:
    page = show(NOTHING)
    asked = Asked(page)
    asked.answer("0")
    assert (asked.state, asked.verdict) == ("retry", "You said 0. None is not 0: nothing was there. Try once more.")
    asked.root.get_by_role("button", name="None").click()
    assert asked.state == "retry"
    page.keyboard.press("Enter")
    assert (asked.state, asked.verdict) == ("right", "Right. You said None.")
    zero = Asked(show(predict("And with zeros?", 0.0)))
    zero.answer("None")
    assert zero.verdict == "You said None. 0 is not None: a value was there. Try once more."


# What each question says to each answer, written into its field.
GRADE = """said => [...document.querySelectorAll(".av-predict")].map(root => said.map(one => {
    const field = root.querySelector(".av-field");
    field.value = one;
    field.dispatchEvent(new Event("input", {bubbles: true}));
    root.querySelector(".av-check").click();
    const state = root.dataset.avState.replace("retry", "wrong");
    root.querySelector(".av-again").click();
    return root.dataset.avState === "asked" ? state : "not asked again";
}))"""


def test_the_script_grades_as_the_package_does(show: Any) -> None:
    answers = [0.0, 1e-12, 0.1, -20.0, 1e20, 3e-5, inf, -inf, None]
    said = [0.0, 1e-9, 1e-12, 0.1004, 0.1006, -19.91, -19.89, 20.0, 1.004e20, 3.01e-5, inf, -inf, None]
    predictions = [predict(f"What is number {i}?", answer) for i, answer in enumerate(answers)]
    graded = show(*predictions).evaluate(GRADE, [str(one) for one in said])
    expected = [["right" if _same(one, answer, 0.005) else "wrong" for one in said] for answer in answers]
    assert graded == expected


def test_a_reader_may_be_shown_without_answering(show: Any) -> None:
    page = show(SUM)
    asked = Asked(page)
    page.get_by_text("Show me").click()
    page.wait_for_selector(".av-predict[data-av-state=skipped]")
    assert (asked.verdict, asked.unlocked) == ("Shown without a prediction.", True)
    assert asked.root.locator(".av-others").is_visible()
    reload(page)
    assert (asked.state, asked.unlocked) == ("skipped", True)


def test_choices_mark_what_was_said_and_what_was_recorded(show: Any) -> None:
    page = show(PLACE)
    asked = Asked(page)
    asked.check()
    assert asked.root.locator(".av-help").inner_text() == "Choose one first."
    asked.choose("at the start")
    assert (asked.state, asked.labels) == ("retry", ["at the start not this", "before step", "after step"])
    radios = asked.root.get_by_role("radio")
    assert radios.evaluate_all("all => all.map(radio => radio.disabled)") == [True, False, False]
    reload(page)
    assert asked.state == "retry"
    asked.choose("after step")
    assert (asked.state, asked.verdict) == ("wrong", "You said after step. The step has used the sum by then.")
    assert asked.labels == ["at the start not this", "before step recorded", "after step your answer"]
    assert radios.evaluate_all("all => all.every(radio => radio.disabled)")
    reload(page)
    assert asked.root.get_by_label("after step").is_checked()
    asked.again()
    assert asked.root.locator(".av-mark").count() == 0
    assert radios.evaluate_all("all => all.every(radio => !radio.checked && !radio.disabled)")
    asked.choose("at the start")
    assert asked.verdict == "You said at the start. That is not what was recorded. Try once more."
    asked.choose("before step")
    assert (asked.state, asked.verdict) == ("right", "Right.")


def test_a_reload_remembers_and_asking_again_forgets(show: Any) -> None:
    page = show(SUM, NOTHING)
    asked, other = Asked(page), Asked(page, 1)
    asked.answer("-16")
    reload(page)
    assert (asked.state, asked.unlocked, other.state) == ("retry", False, "asked")
    asked.answer("-16.01")
    reload(page)
    assert (asked.state, asked.unlocked, other.state) == ("wrong", True, "asked")
    assert asked.verdict.startswith("You said −16.01. That is the first")
    assert page.evaluate("document.activeElement === document.body")
    asked.again()
    assert (asked.state, asked.unlocked) == ("asked", False)
    assert asked.root.get_by_role("textbox").evaluate("field => field === document.activeElement && field.value === ''")
    reload(page)
    assert asked.state == "asked"


@pytest.mark.parametrize("stripped", [False, True], ids=["scripts off", "scripts and styles stripped"])
def test_without_scripts_question_choices_and_answers_are_a_page(show: Any, stripped: bool) -> None:
    page = show(SUM, PLACE, java_script_enabled=False)
    if stripped:
        page.set_content(without_assets(page.content()))
    assert page.get_by_text("after the second").is_visible()
    assert page.locator(".av-ask li").first.is_visible()
    assert page.locator("input, button").count() == 0
    assert page.locator("svg").first.is_visible()
    assert page.get_by_text("Recorded: −20").is_visible()
    assert page.get_by_text("−16 − 4.").is_visible()
    assert page.locator("summary").all_inner_texts()[:2] == ["Hint", "Show me"]
    assert not page.get_by_text("What was there before?").is_visible()
    assert page.get_by_role("cell", name="That is the first contribution alone: backward adds.").is_visible()


def test_the_keyboard_alone_is_enough(show: Any) -> None:
    page = show(SUM, PLACE)
    for key in ("Tab", *"-16", "Enter"):
        page.keyboard.press(key)
    asked, choice = Asked(page), Asked(page, 1)
    assert asked.state == "retry"
    for key in (*"-4", "Enter"):  # what was there is selected, and gives way
        page.keyboard.press(key)
    assert asked.state == "wrong"
    assert asked.root.evaluate("root => root === document.activeElement")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Ask me again"
    page.keyboard.press("Enter")
    assert asked.state == "asked"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.textContent") == "Check"
    page.keyboard.press("Space")
    assert asked.verdict.startswith("You said None.")
    choice.root.get_by_role("radio").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert choice.state == "right"


def test_touch_alone_is_enough_and_finds_targets_of_40_pixels(show: Any) -> None:
    page = show(SUM, PLACE, width=375, has_touch=True)
    targets = ".av-predict :is(button, label, summary, .av-field):visible"

    def small() -> list[str]:
        return [
            one.inner_text()
            for one in page.locator(targets).all()
            if one.bounding_box()["height"] < 40 and not one.evaluate("one => !!one.closest('.av-words')")
        ]

    assert small() == []
    page.get_by_role("button", name="None").tap()
    page.get_by_role("button", name="Check").first.tap()
    page.get_by_label("before step").tap()
    Asked(page, 1).root.get_by_role("button", name="Check").tap()
    assert [Asked(page, i).state for i in range(2)] == ["retry", "right"]
    assert small() == []


def test_what_is_heard_names_the_question_and_the_verdict(show: Any) -> None:
    page = show(SUM, PLACE)
    question = "What is w.grad after the second backward?"
    assert page.get_by_role("group", name=question).count() == 1
    assert page.get_by_role("textbox", name=question).count() == 1
    assert page.get_by_role("radiogroup", name="Where may zero_grad not stand?").count() == 1
    assert page.locator(".av-verdict").first.get_attribute("aria-live") == "polite"
    controls = page.locator(".av-predict input, .av-predict button")
    assert set(controls.evaluate_all("all => all.map(one => one.dataset.lmSuppressShortcuts)")) == {"true"}


@pytest.mark.parametrize("state", ["asked", "wrong", "skipped"])
def test_it_fits_in_each_state(show: Any, state: str) -> None:
    page = show(SUM, PLACE)
    if state == "skipped":
        for fold in page.get_by_text("Show me").all():
            fold.click()
    elif state == "wrong":
        for said, chosen in (("-16", "at the start"), ("-4", "after step")):
            Asked(page).answer(said)
            Asked(page, 1).choose(chosen)
    page.wait_for_selector(f".av-predict[data-av-state={state}]")
    for width in (375, 1000):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_print_has_the_question_and_its_answer(show: Any) -> None:
    page = show(SUM, PLACE)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.get_by_text("after the second").is_visible()
    assert page.locator(".av-recorded").first.is_visible()
    assert page.get_by_label("at the start").is_visible()
    assert not page.locator(":is(.av-field, .av-check, .av-reveal > summary):visible").count()
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator(".av-recorded:visible").count()
    Asked(page).answer("-16")
    Asked(page).answer("-16.01")
    page.emulate_media(media="print")
    assert page.get_by_text("That is the first contribution alone").first.is_visible()
    assert page.locator("svg").first.is_visible()
