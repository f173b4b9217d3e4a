"""What a prediction keeps shut on a page of the book, and the words that move a figure."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docutils import nodes
from docutils.utils import new_document
from myst_nb.sphinx_ import HideCodeCellNode
from wherebook import at, gate, search

from accumviz.book.explore import explore
from accumviz.book.predict import predict
from accumviz.ledger.ledger import Ledger
from accumviz.views.player import play
from tests.toys import W, backward
from tests.windows import Watched

LEDGER = Ledger.build([W], [backward(-16, -16), backward(-4, -20)])
QUESTION = predict("What is `w.grad`?", -20, because={-4: "It adds."}).to_html()
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>A page</title><body>{}</body></html>"""


def cell(*parts: nodes.Node, tags: str = "") -> nodes.container:
    classes = ["cell", *(f"tag_{tag}" for tag in tags.split())]
    return nodes.container("", *parts, nb_element="cell_code", classes=classes)


def source(text: str) -> nodes.container:
    return nodes.container("", nodes.literal_block(text, text), nb_element="cell_code_source")


def output(text: str) -> nodes.container:
    return nodes.container("", nodes.raw("", text, format="html"), nb_element="cell_code_output")


def asks() -> nodes.container:
    return cell(source("av.predict('What?', -20)"), output(QUESTION), tags="hide-input")


def section(*parts: nodes.Node, title: str = "A heading") -> nodes.section:
    return nodes.section("", nodes.title("", title), *parts)


def resolved(*sections: nodes.section) -> list[str]:
    """The page in pieces: what it shows, and where an element that waits for a prediction begins and ends."""
    document = new_document("page")
    document += list(sections)
    gate.resolve(SimpleNamespace(builder=SimpleNamespace(format="html")), document, "page")  # type: ignore[arg-type]
    found = []
    for node in document.findall(nodes.Node):
        if isinstance(node, nodes.raw):
            key = re.search(r'data-answers="([\w-]+)"|(</div>$)|id="(prediction-\d+)"', node.astext())
            closing = node.astext() == "</div>"
            found += (
                ["]"] if closing else [f"{key[1]} ["] if key and key[1] else [key[3]] if key and key[3] else ["out"]
            )
        elif isinstance(node, nodes.Text) and not isinstance(node.parent, (nodes.title, nodes.raw)):
            found.append(node.astext())
    return found


def test_what_opens_with_an_answer_has_no_bar_that_would_have_to_be_opened_too() -> None:
    folded = HideCodeCellNode("", output("−20"))
    page = section(asks(), cell(source("print(w)"), folded, tags="hide-output"))
    assert resolved(page) == ["prediction-1", "print(w)", "prediction-1 [", "out", "]"]
    assert list(page.findall(HideCodeCellNode)) == []


def test_what_is_marked_as_an_answer_waits_whole_and_neighbours_wait_together() -> None:
    figure = cell(source("av.timeline(ledger)"), output("svg"), tags="answers")
    page = resolved(
        section(asks(), figure, nodes.paragraph("", "So −20.", classes=["answers"]), nodes.paragraph("", "Next."))
    )
    assert page == ["prediction-1", "prediction-1 [", "av.timeline(ledger)", "out", "So −20.", "]", "Next."]


def test_the_line_in_place_of_answers_is_said_once_for_neighbours() -> None:
    words = nodes.paragraph("", "So −20.", classes=["answers"])
    page = section(asks(), cell(source("print(w)"), output("−20"), tags="hide-output"), words)
    later = nodes.paragraph("", "Later.", classes=["answers"])
    page += [nodes.paragraph("", "Between."), later]
    assert resolved(page)[-3:] == ["prediction-1 [", "Later.", "]"]
    begun = [raw.astext() for raw in page.findall(nodes.raw) if raw.astext().startswith("<div data-answers")]
    assert ["Opens with your prediction" in text for text in begun] == [True, False, True]


def test_an_output_waits_and_its_source_does_not_up_to_a_heading_or_another_prediction() -> None:
    later = cell(source("x"), output("1"), tags="hide-output")
    page = resolved(section(asks(), asks(), later), section(cell(source("y"), output("2"), tags="hide-output")))
    assert page == ["prediction-1", "prediction-2", "x", "prediction-2 [", "out", "]", "y", "out"]


def test_an_answer_without_a_prediction_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gate.logger, "warning", lambda text, **more: said.append(text))
    resolved(section(cell(output("1"), tags="hide-output")))
    assert said == []
    resolved(section(nodes.paragraph("", "So.", classes=["answers"])))
    assert said == ["this is marked as an answer, but no prediction stands above it"]


def test_predictions_among_exercises_are_numbered_exercises() -> None:
    document = new_document("page")
    document += [section(asks()), section(asks(), asks(), title="Exercises")]
    gate.number(document)
    titles = re.findall(r'<p class="av-tag">([^<]*)</p>', "".join(raw.astext() for raw in document.findall(nodes.raw)))
    assert titles == ["Predict", "Exercise 1", "Exercise 2"]
    assert "".join(raw.astext() for raw in document.findall(nodes.raw)).count("av-predict av-exercise") == 2


def test_no_chapter_has_the_source_of_a_prediction(page_name: str, site: Path) -> None:
    """What a page keeps shut until then, test_controls.py finds where it answers."""
    if page_name.startswith("chapters/"):
        assert '<span class="n">predict</span>' not in (site / page_name).read_text("utf-8")


def test_search_finds_questions_and_answers_and_keeps_answers_apart() -> None:
    printed = nodes.container("", nodes.literal_block("", "−20"), nb_element="cell_code_output")
    shut, open_ = nodes.paragraph("", "It is −4.", classes=["answers"]), nodes.paragraph("", "Words.")
    parts = open_, asks(), cell(printed, tags="hide-output"), shut
    part = nodes.section("", nodes.title("", "One"), *parts, ids=["one"])
    spoken = list(search.spoken(part, part))
    found, answers = (search.joined(text for shut, text in spoken if shut == which) for which in (False, True))
    assert found == "Words. What is w.grad?"
    assert "It adds." in answers and answers.endswith("−20 It is −4.")
    assert "av.predict" not in found + answers


@pytest.mark.parametrize(
    ("state", "says"),
    [("2", "there is no event 2: this player has 2"), ("-1", "no event"), ("x", "no event"), ("", "no event")],
)
def test_a_state_that_a_player_never_has_is_an_error(state: str, says: str) -> None:
    [view] = at.views(nodes.paragraph("", "", nodes.raw("", play(LEDGER).to_html(), format="html")))
    with pytest.raises(at.TargetError, match=re.escape(says)):
        at.at_player(view, state)
    assert at.at_player(view, "1") == f"#{play(LEDGER).id}&e=1"


def test_a_choice_that_an_explorer_does_not_have_is_an_error() -> None:
    explorer = explore(lambda k: LEDGER, k=[1, 2])
    [view] = at.views(nodes.paragraph("", "", nodes.raw("", explorer.to_html(), format="html")))
    assert at.at_explorer(view, "1, k=2").endswith("&side=a&a=1&e=1")
    for state, says in (("n=2", "no control 'n'; there are k"), ("k=3", "never '3'; it is one of 1, 2")):
        with pytest.raises(at.TargetError, match=re.escape(says)):
            at.at_explorer(view, state)


def words(target: str, text: str = "−20") -> at.At:
    return at.At("", text, target=target)


def pointed(*parts: nodes.Node, labels: dict[str, tuple[str, str]] | None = None) -> tuple[str, list[str]]:
    """The page with its words resolved, and what was warned of."""
    document = new_document("page")
    document += list(parts)
    said: list[str] = []
    app: Any = SimpleNamespace(
        builder=SimpleNamespace(format="html"),
        env=SimpleNamespace(domaindata={"std": {"anonlabels": labels or {}}}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at.logger, "warning", lambda text, *given, **more: said.append(text % given))
        at.resolve(app, document, "page")
    return "".join(one.astext() for one in document.findall(nodes.raw)) + document[-1].astext(), said


def figure(html: str, name: str = "fig-run") -> nodes.figure:
    return nodes.figure("", nodes.raw("", html, format="html"), ids=[name])


def test_words_lead_to_a_named_figure_or_to_the_player_above_them() -> None:
    labels = {"fig-run": ("page", "fig-run")}
    for target in ("fig-run:1", "1"):
        page, said = pointed(figure(play(LEDGER).to_html()), nodes.paragraph("", "", words(target)), labels=labels)
        assert f'<a class="av-at" href="#{play(LEDGER).id}&amp;e=1">−20</a>' in page
        assert said == []


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("fig-none:1", "there is no figure 'fig-none'"),
        ("fig-else:1", "'fig-else' is on another page (other)"),
        ("fig-run:7", "there is no event 7"),
        ("fig-still:1", "a picture has no states"),
    ],
)
def test_words_that_lead_nowhere_stay_words_and_are_a_warning(target: str, says: str) -> None:
    labels = {"fig-run": ("page", "fig-run"), "fig-else": ("other", "fig-else"), "fig-still": ("page", "fig-still")}
    figures = figure(play(LEDGER).to_html()), figure("<svg></svg>", "fig-still")
    page, [said] = pointed(*figures, nodes.paragraph("", "", words(target)), labels=labels)
    assert says in said
    assert 'class="av-at"' not in page
    assert page.endswith("−20")


def test_hostile_words_stay_words() -> None:
    evil = "</a><img src=x onerror=alert(1)>\"'&"
    page, _ = pointed(figure(play(LEDGER).to_html()), nodes.paragraph("", "", words("1", evil)))
    assert "<img" not in page.split('class="av-at"')[1]


@pytest.fixture
def touched(watch: Any, tmp_path: Path) -> Watched:
    """A page whose words speak of both events of a player, with the script of the role."""
    links = "".join(f'<a class="av-at" href="#{play(LEDGER).id}&amp;e={e}">at {e}</a> ' for e in (0, 1))
    script = f'<script type="module">{at.SCRIPT.read_text("utf-8")}</script>'
    gap = '<div style="height: 2000px"></div>'
    body = f"{at.STYLE}{play(LEDGER).to_html()}{gap}<p>{links}</p>{script}"
    (tmp_path / "page.html").write_text(PAGE.format(body), "utf-8")
    watched = watch()
    watched.page.goto((tmp_path / "page.html").as_uri())
    return watched


def lit(page: Any, *words: str) -> None:
    wanted = "words => [...document.querySelectorAll('.av-lit')].map(one => one.textContent).join() === words"
    page.wait_for_function(wanted, arg=",".join(words))


def test_words_move_their_player_and_are_lit_while_it_is_there(touched: Watched) -> None:
    page = touched.page
    lit(page, "at 0")
    page.get_by_text("at 1").click()
    lit(page, "at 1")
    assert page.locator(".av-frame").bounding_box()["y"] > -page.locator(".av-frame").bounding_box()["height"]
    page.get_by_role("button", name="previous event").click()
    lit(page, "at 0")
    page.get_by_text("at 1").click()  # the address says it already
    lit(page, "at 1")
    assert page.get_by_text("at 1").get_attribute("aria-current") == "true"
    assert touched.complaints == []
