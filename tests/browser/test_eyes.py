"""What eyes found in the pictures of widgets, each as a fault that a browser can measure."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from accumviz.book.explore import explore
from accumviz.book.predict import predict
from accumviz.book.weights import play
from accumviz.checks.check import check
from accumviz.graph.graph import Edge, Graph, Node, Saved
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.report import report_html
from accumviz.views.timeline import timeline
from tests.browser.frames import drawn
from tests.browser.test_look import weighed
from tests.browser.test_reading import LONG
from tests.browser.written import written
from tests.by_hand import Play, term
from tests.toys import CODE, ROWS, W, chain, large, toy

Open = Callable[..., Any]
SIZES = "els => els.map(el => parseFloat(getComputedStyle(el).fontSize))"
BOXES = "els => els.map(el => el.getBoundingClientRect().toJSON())"


@pytest.fixture
def show(watch: Open, tmp_path: Path) -> Callable[..., Any]:
    """Open views in one page."""

    def open_page(*views: Any, wait: str = ".av-frame", **options: Any) -> Any:
        page = watch(**options).page
        page.goto(written(tmp_path / "page.html", *views))
        page.locator(wait).first.wait_for()
        drawn(page)
        return page

    return open_page


def test_the_number_of_a_line_stands_beside_its_beginning(show: Callable[..., Any]) -> None:
    """Of a line that goes on below, the number was in the middle: a button centres what it holds."""
    row = {**ROWS[0], "line": 3}
    page = show(play(Ledger.build([W], [row], sources={"a.py": LONG})), width=375)
    button, code = page.locator(".av-has .av-no"), page.locator(".av-has code")
    (number,), (text,) = button.evaluate_all(BOXES), code.evaluate_all(BOXES)
    assert text["height"] > 30, "the line takes more than one"
    assert number["height"] < 25
    assert abs(number["top"] - text["top"]) < 4


def test_a_player_has_its_size_of_letters_beside_whatever_stands_after_it(show: Callable[..., Any]) -> None:
    ledger = toy()
    alone = show(play(ledger)).locator(".av-frame, .av-count, .av-total").evaluate_all(SIZES)
    amid = show(play(ledger), explore({"a": ledger, "b": ledger}), timeline(ledger), predict("What?", 1))
    assert amid.locator(".av-frame, .av-count, .av-total").evaluate_all(SIZES)[: len(alone)] == alone
    assert set(amid.locator(".av-frame").evaluate_all(SIZES)) == {13}


def test_on_a_phone_the_code_of_a_teaching_loop_stands_whole(show: Callable[..., Any]) -> None:
    source = "import torch\n\n" + LONG * 2
    ledger = Ledger.build([W], [{**ROWS[0], "line": 5}], sources={"a.py": source})
    pane = show(play(ledger), width=375).locator(".av-in-code .av-win")
    assert pane.evaluate("box => box.clientHeight") >= 320


def test_code_that_goes_on_below_says_so_at_its_edge(show: Callable[..., Any]) -> None:
    ledger = Ledger.build([W], [{**ROWS[0], "line": 5}], sources={"a.py": LONG * 9})
    box = show(play(ledger), width=300).locator(".av-in-code .av-win")
    assert box.evaluate("box => box.scrollHeight > box.clientHeight")
    assert "local" in box.evaluate("box => getComputedStyle(box).backgroundAttachment")


def test_a_drawing_that_is_wider_than_its_box_says_so_at_its_edge(show: Callable[..., Any], mode: str) -> None:
    box = show(timeline(large(40, 3)), wait=".av-scroll", width=375, mode=mode).locator(".av-scroll")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    assert "local" in box.evaluate("box => getComputedStyle(box).backgroundAttachment")


def test_before_the_first_event_no_number_of_one_is_told_and_the_scrubber_keeps_its_length(
    show: Callable[..., Any],
) -> None:
    page = show(play(toy(), {0: chain()}))
    slider = page.locator(".av-scrub")
    before = slider.bounding_box()["width"]
    assert page.locator(".av-count").inner_text() == "start"
    page.get_by_role("button", name="next event").click()
    drawn(page)
    assert page.locator(".av-count").inner_text() == "event 0 / 3"
    assert slider.bounding_box()["width"] == pytest.approx(before, abs=1)


@pytest.mark.parametrize("width", [1280, 375])
def test_a_bar_of_single_numbers_has_most_of_its_row(show: Callable[..., Any], width: int) -> None:
    page = show(play(toy()), width=width)
    (row,), (bar,) = (page.locator(name).evaluate_all(BOXES) for name in (".av-row", ".av-row .av-bar"))
    assert bar["width"] >= 0.5 * row["width"]
    total = page.locator(".av-total").first
    assert total.evaluate("one => one.scrollWidth <= one.clientWidth")


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_bar_too_short_to_be_seen_says_how_short_it_is(show: Callable[..., Any], width: int, sign: int) -> None:
    """After an unscale or a clip a mark was left of it, at zero: equal numbers keep equal lengths, and this is read."""
    big, small = sign * 65536.0, sign * 1.0
    rows = [{"kind": "backward", "contribution": {"w": big}, "grad": {"w": big}}]
    rows += [{"kind": "unscale", "grad": {"w": small}}, {"kind": "step", "grad": {"w": small}}]
    page = show(play(Ledger.build([W], rows)), width=width)
    bar, total = page.locator(".av-row .av-bar"), page.locator(".av-row .av-total")
    assert bar.get_attribute("data-told") == "", "of the longest nothing is to be said"
    page.get_by_role("button", name="next event").click()
    drawn(page)
    assert total.inner_text() == f"{small:.0f}".replace("-", "−")
    assert bar.get_attribute("data-told") == "1/65536 of the scale"
    inked = Image.open(io.BytesIO(bar.screenshot())).convert("L")
    letters = [x for x in range(8, inked.width - 8) if min(inked.getpixel((x, y)) for y in range(inked.height)) < 140]
    near = letters[0] < 40 if sign > 0 else letters[-1] > inked.width - 40
    assert near and len(letters) > 30, "it stands beside the mark"


def test_steps_are_counted_in_whole_numbers_and_letters_of_weights_are_as_small_as_the_others(
    show: Callable[..., Any],
) -> None:
    page = show(explore({"a": Ledger.build([W], weighed(ROWS)), "b": Ledger.build([W], weighed(ROWS[2:]))}))
    assert page.locator(".av-tickx").all_text_contents() == ["0", "1"]
    tall = page.locator(".av-tickx").first.bounding_box()["height"]
    assert tall <= 16


def test_the_name_of_an_axis_is_read_where_a_curve_runs_below_it(show: Callable[..., Any]) -> None:
    page = show(play(Ledger.build([W], weighed(ROWS)), loss=lambda w: w * w))
    # So is the number of what is beyond the edge, across which its own way runs.
    for name in (".av-axisname", ".av-out"):
        halo = page.locator(name).first.evaluate("el => [getComputedStyle(el).paintOrder, getComputedStyle(el).stroke]")
        assert halo[0].startswith("stroke")
        assert halo[1] != "none"


def test_the_verdict_of_a_comparison_stands_below_its_meter(show: Callable[..., Any]) -> None:
    page = show(explore({"a": toy(), "b": Ledger.build([W], ROWS[2:])}, against={"run": "b"}), width=1280)
    meter, verdict, table = (page.locator(f".av-{name}").bounding_box() for name in ("meter", "verdict", "figures"))
    assert abs(meter["x"] - verdict["x"]) < 8
    assert verdict["y"] < table["y"] + table["height"]


def test_a_finger_is_not_told_of_keys(show: Callable[..., Any]) -> None:
    assert show(play(toy())).locator(".av-hint").is_visible()
    finger = {"has_touch": True, "is_mobile": True, "width": 375}
    assert not show(play(toy()), **finger).locator(".av-hint").is_visible()


def test_a_question_is_as_wide_as_what_is_read_in_it(show: Callable[..., Any]) -> None:
    """A book gives every output the width there is: the question stood alone on the left of its ground."""
    page = show(predict("What is `w.grad`?", -20), wait=".av-ask", width=1280)
    page.add_style_tag(content=".accumviz.av-predict { max-width: 100% !important; }")
    assert page.locator(".av-ask").bounding_box()["width"] <= 46 * 16
    assert page.get_by_text("Show me").bounding_box()["width"] <= 46 * 16


def test_one_finding_is_not_several() -> None:
    loop = Play()
    loop.backward(term(8, 1.0))
    loop.backward(term(8, 1.0))
    loop.step()
    page = re.sub(r"<style>.*?</style>|<[^>]+>", "", report_html(check(loop.ledger)), flags=re.DOTALL)
    assert re.findall(r"\b1 ((?:mistake|step|rule)s?)", page) == ["mistake", "step", "rule"]


def test_a_report_says_what_the_lab_says_beside_a_bar_of_its_verdict(show: Callable[..., Any]) -> None:
    """A healthy loop had a bare line, `healthy 16 events`, and what was found a grey bar."""
    wrong, right = Play(), Play()
    for loop, share in ((wrong, 1.0), (right, 0.5)):
        loop.backward(term(8, share))
        loop.backward(term(8, share))
        loop.step()
    page = show(check(right.ledger), check(wrong.ledger), wait=".av-report")
    first = page.locator(".av-report .av-verdict")
    assert first.nth(0).inner_text().startswith("✓ Healthy: check finds no mistake. Looked at: ")
    assert first.nth(1).inner_text().startswith("✗ 1 mistake: loss-not-divided. Looked at: ")
    bar = "all => all.map(one => getComputedStyle(one).borderLeftColor)"
    assert first.evaluate_all(bar) == ["rgb(0, 158, 115)", "rgb(213, 94, 0)"]
    assert page.locator(".av-report article").evaluate_all(bar) == ["rgb(230, 159, 0)"], "a warning"


PARTS = """async outer => {
    outer.style.cssText = "width: 800px; max-width: none; margin: 0";
    const parts = () => {
        const {x, y} = outer.getBoundingClientRect();
        return [...outer.querySelectorAll("*:not(style, script, option)")].map(element => {
            const box = element.getBoundingClientRect(), {fontSize, fontFamily, color} = getComputedStyle(element);
            const at = box.width ? [box.x - x, box.y - y, box.width, box.height].map(Math.round) : [];
            return [element.tagName, element.getAttribute("class"), at, fontSize, fontFamily, color].join(" ");
        });
    };
    for (let now, before = "", still = 0; still < 20; before = now) {  // panes follow their new width
        await new Promise(requestAnimationFrame);
        now = parts().join();
        still = now === before ? still + 1 : 0;
    }
    return parts();
}"""


@pytest.mark.parametrize("kind", ["player", "explorer"])
def test_what_a_prediction_reveals_looks_as_it_does_alone(show: Callable[..., Any], kind: str) -> None:
    """Both have rows, buttons and code: rules of the one gave the other's lines of code the height of a button."""
    walk = Ledger.build([W], weighed([{**row, "file": "a.py"} for row in ROWS]), sources={"a.py": LONG})
    view: Any = play(walk, {0: chain()})
    if kind == "explorer":
        view = explore({"a": walk, "b": toy()}, against={"run": "b"})
    still = {"reduced_motion": "reduce"}
    alone = show(view, **still).locator(f".av-{kind}").first.evaluate(PARTS)
    page = show(predict("What?", 1, reveal=view), wait=".av-ask", **still)
    page.locator("input.av-field").fill("1")
    page.get_by_role("button", name="Check").click()
    amid = page.locator(f".av-{kind}").first.evaluate(PARTS)
    assert len(alone) > 100
    assert [pair for pair in zip(alone, amid, strict=True) if pair[0] != pair[1]][:4] == []


@pytest.mark.parametrize("width", [1000, 660])
def test_a_figure_that_plays_keeps_its_height(show: Callable[..., Any], width: int) -> None:
    """What is said below a graph and a bar takes one line or two: the page below went up and down with it."""
    walk = Ledger.build([W], weighed(ROWS), sources={"a.py": LONG})
    page = show(play(walk, {0: chain(), 1: chain(-4.0)}, loss=lambda w: (w - 2) ** 2), width=width)
    heights = []
    for _ in range(6):
        drawn(page)
        heights.append(page.locator(".av-frame").bounding_box()["height"])
        page.get_by_role("button", name="next event").click()
    assert max(heights) - min(heights) <= 2


def test_a_graph_of_six_nodes_and_what_stands_above_it_fit_a_screen(show: Callable[..., Any]) -> None:
    """The root, where backward begins, lay below the first screen of the front page."""
    kept = (Saved("_saved_self", (1,), "float32", 4, 1),)
    nodes = [
        Node(i, "PowBackward0", "loss" if i == 0 else "", shape=(1,), saved=kept, value=[4.0], grad=[1.0])
        for i in range(5)
    ]
    leaf = Node(5, "AccumulateGrad", "w", shape=(1,), value=[1.0], grad=[-16.0])
    tall = Graph((*nodes, leaf), tuple(Edge(i, i + 1) for i in range(5)), (0,))
    page = show(play(toy(), {0: tall}), width=1040)
    (frame,), (root,) = (page.locator(name).evaluate_all(BOXES) for name in (".av-frame", ".av-root"))
    assert root["bottom"] - frame["top"] <= 700
    letters = page.locator(".av-root text").last.bounding_box()
    assert letters["height"] >= 11, "and it can be read"


def test_a_graph_folds_and_unfolds_by_key_and_shows_one_form_at_a_time(watch: Open, tmp_path: Path) -> None:
    nodes = [Node(i, "MulBackward0", module=f"layers.{i // 4}") for i in range(12)]
    graph = Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(11)), (0,))
    page = watch(java_script_enabled=False).page
    graph.save(tmp_path / "graph.html")
    page.goto((tmp_path / "graph.html").as_uri())
    folded, whole = page.locator(".av-form svg"), page.locator(".av-form + .av-scroll svg")
    assert (folded.is_visible(), whole.is_visible()) == (False, True)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert (folded.is_visible(), whole.is_visible()) == (True, False)
    assert folded.bounding_box()["height"] < 400
    page.keyboard.press("Enter")
    assert (folded.is_visible(), whole.is_visible()) == (False, True)


def test_in_a_player_modules_fold_and_the_walk_goes_through_what_is_seen(show: Callable[..., Any]) -> None:
    nodes = [Node(i, "MulBackward0", "loss" if i == 0 else "", module=f"layers.{i // 4}") for i in range(12)]
    graph = Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(11)), (0,))
    page = show(play(toy(), {0: graph}), reduced_motion="reduce")
    page.get_by_role("button", name="next event").click()
    fold, walk = page.get_by_role("button", name="fold or unfold modules"), page.locator(".av-sub input")
    assert (page.locator(".av-node").count(), walk.get_attribute("max")) == (12, "24")
    fold.click()
    page.wait_for_function("document.querySelectorAll('.av-node').length === 3")
    assert fold.get_attribute("aria-pressed") == "true"
    assert walk.get_attribute("max") == "6"
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowLeft")
    fold.click()
    page.wait_for_function("document.querySelectorAll('.av-node').length === 12")


def test_no_empty_room_is_left_below_a_run_that_was_compared(show: Callable[..., Any]) -> None:
    """Beside each other, runs kept the height that one of them had while it was squeezed."""
    page = show(explore({"a": toy(), "b": toy()}), width=1280)
    heights = "() => ['.av-player', '.av-frame'].map(one => document.querySelector(one).offsetHeight)"
    for button in ("Compare with another run", "Show one run"):
        page.get_by_role("button", name=button).click()
        drawn(page)
        slot, frame = page.evaluate(heights)
        assert slot - frame <= 2


def test_a_figure_is_seen_whole_on_a_phone(show: Callable[..., Any]) -> None:
    """The bar of a step's shares stood beyond the right edge."""
    for width, seen in ((375, [False, True]), (1280, [True, False])):
        page = show(timeline(Ledger.build([W], ROWS)), wait=".av-scroll", width=width)
        assert [page.locator(f".av-{name}").is_visible() for name in ("wide", "narrow")] == seen
        page.add_style_tag(content=".accumviz svg { max-width: none; } .av-scroll { width: 320px; }")  # as a book does
        if width == 375:
            assert page.locator(".av-scroll").evaluate("box => box.scrollWidth <= box.clientWidth")


def test_a_finger_has_room_to_scrub_on_a_phone(show: Callable[..., Any]) -> None:
    """Beside the buttons and the count, 60 pixels were left of the slider; it keeps the line of its buttons."""
    for width, least in ((375, 160), (335, 120)):
        page = show(play(toy()), explore({"a": toy(), "b": toy()}), width=width, has_touch=True)
        for bar in page.locator(".av-frame .av-top").all():
            slider, button = (bar.locator(part).bounding_box() for part in (".av-scrub", ".av-b-next"))
            assert slider["width"] >= least
            assert button["y"] < slider["y"] + slider["height"] / 2 < button["y"] + button["height"]
            for one in bar.locator(".av-b").all():
                assert min(one.bounding_box()[side] for side in ("width", "height")) >= 44


def test_panes_of_two_runs_below_each_other_have_no_empty_room(show: Callable[..., Any]) -> None:
    """The pane of a small run kept the height of the large one's that stood below it."""
    rows = [{"kind": "backward", "contribution": {f"w{i}": 1.0}, "grad": {f"w{i}": 1.0}} for i in range(7)]
    few, many = (Ledger.build([Parameter(f"w{i}", (1,)) for i in range(n)], rows[:n]) for n in (1, 7))
    for width, equal in ((1280, True), (375, False)):
        page = show(explore({"few": few, "many": many}, start={"run": "few"}, against={"run": "many"}), width=width)
        drawn(page)
        one, other = (pane.bounding_box()["height"] for pane in page.locator(".av-in-grad").all())
        assert (abs(one - other) < 2) == equal


def test_panes_that_are_compared_keep_no_height_of_a_width_that_has_passed(show: Callable[..., Any]) -> None:
    """They were measured at the new width while a timeline stood there as it was drawn for the old one."""
    page = show(explore({"a": toy(), "b": toy()}, against={"run": "b"}), width=1280)
    widen = """async widths => {
        for (const width of widths) {
            await new Promise(requestAnimationFrame);
            document.querySelector(".av-explorer").style.width = `${width}px`;
        }
    }"""
    tall = []
    for widths in ([1000], [640, 1000]):
        page.evaluate(widen, widths)
        for _ in range(3):
            drawn(page)
        tall.append([box["height"] for box in page.locator(".av-in-time").evaluate_all(BOXES)])
    assert tall[0] == tall[1]


def test_a_preset_is_compared_with_another_one(show: Callable[..., Any]) -> None:
    """Both sides showed the same run: nothing could be seen to differ. So it is of runs that are the same."""
    page = show(explore({"a": toy(), "b": toy()}, start={"run": "b"}), width=1280)
    page.get_by_role("button", name="Compare with another run").click()
    chosen = ".av-xside:not([hidden]) input:checked"
    assert page.locator(chosen).evaluate_all("radios => radios.map(radio => radio.ariaLabel)") == ["b", "a"]


def test_of_two_numbers_beyond_one_edge_the_one_of_the_own_run_is_told(show: Callable[..., Any]) -> None:
    ways = (("a", 11.0), ("b", 15.0), ("c", 1.001), ("d", 1.002), ("e", 1.003))
    far = {name: Ledger.build([W], weighed(ROWS, to=to)) for name, to in ways}
    page = show(explore(far, start={"run": "a"}, against={"run": "b"}), width=1280, reduced_motion="reduce")
    page.locator(".av-scrub:visible").fill(str(len(ROWS)))
    drawn(page)
    told = [player.locator(".av-out").all_text_contents() for player in page.locator(".av-slots > .av-player").all()]
    assert [[text for text in texts if text] for texts in told] == [["↑ 11"], ["↑ 15"]]
    beyond = page.locator(".av-slots > .av-player").first.locator(".av-way:not(.av-beside) .av-mover")
    axis, label = page.locator(".av-axes").first.bounding_box(), beyond.locator("text").bounding_box()
    assert beyond.locator(".av-dot").is_hidden(), "a dot at the edge was read as a point of the way"
    assert label["y"] + label["height"] < axis["y"] + 8, "its number stands off the line that leads out of the ground"


# Words of the same height, from left to right: how far each bold one is from the next.
GAPS = """texts => {
    const boxes = texts.filter(text => getComputedStyle(text).fontWeight === '700' && text.checkVisibility())
        .map(text => text.getBoundingClientRect()).sort((one, other) => one.left - other.left);
    return boxes.slice(1).map((box, i) => box.left - boxes[i].right);
}"""


@pytest.mark.parametrize(("width", "events", "apart"), [(640, 12, 4.5), (343, 8, 2)])
def test_totals_of_narrow_columns_stand_apart(
    show: Callable[..., Any], width: float, events: int, apart: float
) -> None:
    grads = [-8.778 - 0.0007 * n for n in range(events)]
    rows = [{"kind": "backward", "contribution": {"w": -0.001}, "grad": {"w": grad}} for grad in grads]
    page = show(timeline(Ledger.build([W], rows), width=width), wait=".av-scroll", width=1280)
    gaps = page.locator(".av-figure text").evaluate_all(GAPS)
    assert len(gaps) == events - 1, "every total is told"
    assert min(gaps) > apart


# Keeps the left and right end of each bold word that a canvas is given.
WRITES = """() => {
    const {fillText} = CanvasRenderingContext2D.prototype;
    globalThis.wrote = [];
    CanvasRenderingContext2D.prototype.fillText = function(text, x, ...more) {
        const half = this.measureText(text).width / 2;
        if (text && /^(600|bold)/.test(this.font)) wrote.push([x - half, x + half]);
        fillText.call(this, text, x, ...more);
    };
}"""


def test_totals_of_a_players_narrow_columns_stand_apart(watch: Open, tmp_path: Path) -> None:
    """Beside each other, −2, −2 and −2 were read as one."""
    rows = [{**ROWS[0], "contribution": {"w": -2.0}, "grad": {"w": -2.0}} for _ in range(16)]
    page, told = watch(width=320).page, 0
    page.add_init_script(f"({WRITES})()")
    page.goto(written(tmp_path / "page.html", play(Ledger.build([W], rows))))
    page.locator(".av-frame").wait_for()
    for width in range(330, 560, 10):
        drawn(page)
        page.evaluate("wrote.length = 0")
        page.set_viewport_size({"width": width, "height": 900})
        drawn(page)
        ends = sorted({tuple(word) for word in page.evaluate("wrote")})
        told += len(ends)
        assert all(right[0] - left[1] > 3 for left, right in pairwise(ends)), width
    assert told > 16


# Keeps where lines, totals and names on end stand on a canvas, in its own pixels, in the order in which they are drawn.
PLACES = """() => {
    const mine = CanvasRenderingContext2D.prototype, {fillText, moveTo, fillRect, clearRect} = mine;
    globalThis.placed = {totals: [], grounds: [], lines: [], names: [], heavy: []};
    mine.fillText = function(text, x, y, ...more) {
        const wide = this.measureText(text).width, turned = this.getTransform();
        if (turned.b) placed.names.push([turned.e / turned.a || turned.e, turned.f, wide]);
        else if (text && /^(600|bold)/.test(this.font)) placed.totals.push([text, x - wide / 2, x + wide / 2, y]);
        fillText.call(this, text, x, y, ...more);
    };
    mine.moveTo = function(x, y) {
        placed.lines.push(x);
        placed.totals.length = placed.grounds.length = 0;
        moveTo.call(this, x, y);
    };
    mine.clearRect = function(x, y, w, h) { placed.grounds.push([x, x + w]); clearRect.call(this, x, y, w, h); };
    mine.fillRect = function(x, y, w, h) {
        if (h === 2) placed.heavy.push([x, y + 1, w]);
        fillRect.call(this, x, y, w, h);
    };
}"""


def placed(watch: Open, folder: Path, view: Any, width: int) -> dict[str, Any]:
    page = watch(width=width).page
    page.add_init_script(f"({PLACES})()")
    page.goto(written(folder / "page.html", view))
    page.locator(".av-frame").wait_for()
    drawn(page)
    page.evaluate("for (const all of Object.values(placed)) all.length = 0;")
    page.evaluate("document.documentElement.setAttribute('data-theme', 'again')")
    drawn(page)
    found: dict[str, Any] = page.evaluate("placed")
    found["wide"] = page.locator("canvas").evaluate("canvas => canvas.clientWidth")
    return found


def windows(count: int, size: float = -2.9) -> Ledger:
    one = [{"kind": "backward", "label": "mse_mean / KM", "contribution": {"w": size}, "grad": {"w": size}}]
    one += [{"kind": "step", "grad": {"w": size}}, {"kind": "zero_grad", "grad": {}}]
    return Ledger.build([W], one * count)


@pytest.mark.parametrize("width", [375, 480, 700])
def test_no_line_of_an_event_strikes_a_total(watch: Open, tmp_path: Path, width: int) -> None:
    """The minus of -2.9 lay on the line of its step, its last digit on that of zero_grad, or beyond the edge."""
    found = placed(watch, tmp_path, play(windows(3)), width)
    assert len(found["lines"]) == 6
    assert found["totals"], "drawn after the lines"
    for text, left, right, _ in found["totals"]:
        assert right <= found["wide"], text
        assert [1 for start, end in found["grounds"] if start - 1 < left and right < end + 1], "on a ground of its own"


@pytest.mark.parametrize(("count", "width"), [(3, 375), (7, 375), (3, 700)])
def test_names_on_end_stand_below_the_edge_and_between_the_lines(
    watch: Open, tmp_path: Path, count: int, width: int
) -> None:
    """The bracket that closes a call was cut, and what hangs below letters touched the next line."""
    found = placed(watch, tmp_path, play(windows(count)), width)
    assert len(found["names"]) == 3 * count
    for middle, bottom, wide in found["names"]:
        assert bottom - wide > 2
        assert not [line for line in found["lines"] if middle - 5 < line < middle + 7]


def test_where_signs_alternate_a_lane_is_tall_and_a_total_stands_at_its_line(watch: Open, tmp_path: Path) -> None:
    """Parts of both signs lay in 50 pixels, and the number of the sum 40 pixels from its line."""
    rows, grad = [], 0.0
    for e in range(12):
        added = (-1.6) ** (e % 7 + 1)
        grad += added
        rows += [{"kind": "backward", "contribution": {"w": added}, "grad": {"w": grad}}]
    found = placed(watch, tmp_path, play(Ledger.build([W], rows)), 1000)
    lines = [y for _, y, _ in found["heavy"]]
    assert len(lines) == len(found["totals"]) == 12
    assert max(abs(y - line) for (_, _, _, y), line in zip(found["totals"], lines, strict=True)) <= 12
    assert max(lines) - min(lines) > 45
    plain = placed(watch, tmp_path, play(windows(3)), 1000)
    assert plain["heavy"], "a lane of one sign keeps its height"


def test_the_line_of_the_event_that_is_selected_keeps_its_colour(show: Callable[..., Any], mode: str) -> None:
    """The edge of the selection lay on the dashes of a zero_grad: the legend's orange was nowhere."""
    page = show(play(windows(1)), width=1000, mode=mode)
    page.get_by_role("slider").first.focus()
    page.keyboard.press("End")
    page.evaluate("document.activeElement.blur()")
    drawn(page)
    head, plot = (page.locator(part).bounding_box() for part in (".av-playhead", ".av-plot"))
    x = head["x"] - plot["x"]
    image = Image.open(io.BytesIO(page.locator(".av-plot").screenshot())).convert("RGB")
    around = [image.getpixel((round(x) + dx, y)) for dx in (0, 1) for y in range(4, 80)]
    assert sum(red > blue + 90 for red, _, blue in around) > 30


def test_parts_too_thin_for_lines_between_them_are_one_with_all_its_sides(show: Callable[..., Any]) -> None:
    """Four parts of 4 px were two open lines with no end."""
    rows = [{"kind": "backward", "contribution": {"w": -8.0}, "grad": {"w": -8.0}}]
    rows += [{"kind": "backward", "contribution": {"w": 0.2}, "grad": {"w": -8 + 0.2 * (e + 1)}} for e in range(6)]
    page = show(play(Ledger.build([W], [*rows, {"kind": "step", "grad": {"w": -6.8}}])), width=375)
    page.get_by_role("slider").first.focus()
    page.keyboard.press("End")
    drawn(page)
    parts = page.locator(".av-part:visible")
    sides = parts.evaluate_all("all => all.map(one => parseFloat(getComputedStyle(one).borderRightWidth))")
    assert len(sides) == 2
    assert min(sides) >= 1


def test_the_mark_of_grad_does_not_strike_the_number_of_a_part(show: Callable[..., Any]) -> None:
    """The heavy line went through a minus, and -2.753 was read as 2.753."""
    rows = [{"kind": "backward", "contribution": {"w": x}, "grad": {"w": g}} for x, g in ((-8.0, -8.0), (4.2, -3.8))]
    page = show(play(Ledger.build([W], rows)), width=1000)
    page.get_by_role("slider").first.focus()
    page.keyboard.press("End")
    drawn(page)
    number = page.locator(".av-part span", has_text="−8")
    over = number.evaluate(
        """span => { const {x, y, width, height} = span.getBoundingClientRect();
        const end = span.closest(".av-bar").querySelector(".av-end");
        end.style.left = `${x + width / 2 - span.closest(".av-bar").getBoundingClientRect().x}px`;
        const [top] = document.elementsFromPoint(x + width / 2, y + height / 2);
        return [top === span, getComputedStyle(span).backgroundColor]; }"""
    )
    assert over[0]
    assert not over[1].endswith(", 0)"), "a ground of its own"


def test_a_static_graph_begins_where_text_does(show: Callable[..., Any]) -> None:
    """Graphs stood in the middle of the page, all other figures at the left."""
    page = show(chain(), wait=".av-graph", width=1280)
    left = page.locator(".av-graph").bounding_box()["x"]
    for part in ("svg", "figcaption .av-key, figcaption", "details summary"):
        assert page.locator(f".av-graph {part}").first.bounding_box()["x"] - left < 2, part


def test_a_finger_meets_every_choice_of_an_explorer(show: Callable[..., Any]) -> None:
    """Choices, switches and the button that compares were 32 to 38 px high."""
    runs = {"a": toy(), "b": toy()}
    several = explore(runs), explore(lambda K, on: toy(), K=[1, 2, 4], on=[True, False])
    page = show(*several, width=375, has_touch=True)
    targets = page.locator(".av-segments label, .av-explorer select, .av-switch, .av-compare")
    found = [one for one in targets.all() if one.is_visible()]
    assert {one.evaluate("el => el.tagName") for one in found} >= {"LABEL", "BUTTON"}
    assert all(min(one.bounding_box()[side] for side in ("width", "height")) >= 44 for one in found)


def tall() -> Graph:
    """A graph of forty nodes, higher than any pane."""
    nodes = tuple(Node(i, "MulBackward0") for i in range(40))
    return Graph(nodes, tuple(Edge(i, i + 1) for i in range(39)), (0,), {"order": list(range(40))})


@pytest.mark.parametrize("against", [None, {"run": "b"}])
def test_a_graph_that_goes_on_below_its_pane_says_so(show: Callable[..., Any], against: Any, mode: str) -> None:
    """At the cut, the ground is darker or lighter than in the middle; at an end that is seen, it is not."""
    run = toy(), {0: tall()}
    page = show(explore({"a": run, "b": run}, against=against), width=1280, mode=mode)
    box = page.locator(".av-in-graph .av-win").first
    assert box.evaluate("box => box.scrollHeight > box.clientHeight + 99")

    def shaded() -> list[bool]:
        drawn(page)
        image = Image.open(io.BytesIO(box.screenshot())).convert("RGB")
        top, middle, bottom = (image.getpixel((40, y)) for y in (2, image.height // 2, image.height - 3))
        return [top != middle, bottom != middle]

    box.evaluate("box => { box.scrollTop = 0; }")
    assert shaded() == [False, True]
    box.evaluate("box => { box.scrollTop = 99; }")
    assert shaded() == [True, True]
    box.evaluate("box => { box.scrollTop = 9999; }")
    assert shaded() == [True, False]


def test_a_graph_that_goes_on_beside_its_pane_says_so(show: Callable[..., Any], mode: str) -> None:
    """As any box that scrolls sideways does, and with its look."""
    page = show(play(toy(), {0: chain()}), width=700, mode=mode)
    for _ in range(5):
        page.get_by_role("button", name="zoom in").click()
    box = page.locator(".av-in-graph .av-win")
    room = box.evaluate("box => box.scrollWidth - box.clientWidth")
    assert room > 20
    page.add_style_tag(content=".av-in-graph svg { visibility: hidden; }")  # what it draws may come to the edges, too

    def shaded(left: int) -> list[bool]:
        box.evaluate(f"box => {{ box.scrollLeft = {left}; }}")
        drawn(page)
        image = Image.open(io.BytesIO(box.screenshot())).convert("RGB")
        first, middle, last = (image.getpixel((x, image.height // 2)) for x in (2, image.width // 2, image.width - 3))
        return [first != middle, last != middle]

    assert [shaded(left) for left in (0, room // 2, room)] == [[False, True], [True, True], [True, False]]


# How much of a player is ground below the last thing that a pane shows.
EMPTY = """frame => {
    const seen = '.av-line, .av-row, .av-node, canvas, svg, .av-note, .av-marks, .av-share, .av-sub, .av-head';
    const {width, height} = frame.getBoundingClientRect();
    const empty = [...frame.querySelectorAll('.av-pane')].map(pane => {
        const box = pane.getBoundingClientRect();
        const ends = [...pane.querySelectorAll(seen)].filter(one => one.checkVisibility() && one.textContent !== '')
            .concat([...pane.querySelectorAll('canvas, .av-in-weights svg')])
            .map(one => one.getBoundingClientRect().bottom);
        return box.width * Math.max(0, box.bottom - Math.max(...ends) - 12);
    });
    return empty.reduce((sum, one) => sum + one, 0) / (width * height);
}"""


def loop(windows: int) -> Ledger:
    """Windows of four shares each, with a weight, in a program of eighteen lines."""
    each = {**ROWS[0], "details": {"terms": [term()]}}
    rows = [row for _ in range(windows) for row in (each, each, each, each, ROWS[2], ROWS[3])]
    return Ledger.build([W], weighed(rows), sources={"a.py": CODE + "x = 1\n" * 13})


@pytest.mark.parametrize(
    ("made", "most"), [(lambda: play(toy(), {0: tall()}), 0.15), (lambda: play(loop(3)), 0.07)], ids=["graph", "loop"]
)
def test_little_of_a_player_is_empty_ground(show: Callable[..., Any], made: Callable[[], Any], most: float) -> None:
    """Beside code or a graph, the panes of a gradient and of weights ended in the middle of theirs."""
    page = show(made(), width=1280)
    assert page.locator(".av-frame").evaluate(EMPTY) < most


def test_panes_that_are_compared_stay_level_in_a_books_column(show: Callable[..., Any]) -> None:
    """Each run was narrow enough there to be taken for one on a phone, and a graph forgot the height it was given."""
    runs = {"a": (toy(), {0: chain()}), "b": (toy(), {0: tall()})}
    page = show(explore(runs, against={"run": "b"}), width=1040)
    drawn(page)
    for key in ("", "ArrowRight"):
        if key:
            page.locator(".av-scrub:visible").press(key)
            drawn(page)
        boxes = page.locator(".av-in-graph").evaluate_all(BOXES)
        assert boxes[0]["height"] == boxes[1]["height"]
        assert len({box["top"] for box in page.locator(".av-in-grad").evaluate_all(BOXES)}) == 1
