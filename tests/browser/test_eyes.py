"""What eyes found in the pictures of widgets, each as a fault that a browser can measure."""

from __future__ import annotations

import io
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
from accumviz.ledger.ledger import Ledger
from accumviz.views.timeline import timeline
from tests.browser.frames import drawn
from tests.browser.test_look import weighed
from tests.browser.test_reading import LONG
from tests.browser.written import written
from tests.by_hand import Play, term
from tests.toys import CODE, ROWS, W, chain, toy

Open = Callable[..., Any]
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


def test_a_question_is_as_wide_as_what_is_read_in_it(show: Callable[..., Any]) -> None:
    """A book gives every output the width there is: the question stood alone on the left of its ground."""
    page = show(predict("What is `w.grad`?", -20), wait=".av-ask", width=1280)
    page.add_style_tag(content=".accumviz.av-predict { max-width: 100% !important; }")
    assert page.locator(".av-ask").bounding_box()["width"] <= 46 * 16
    assert page.get_by_text("Show me").bounding_box()["width"] <= 46 * 16


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


def test_a_preset_is_compared_with_another_one(show: Callable[..., Any]) -> None:
    """Both sides showed the same run: nothing could be seen to differ. So it is of runs that are the same."""
    page = show(explore({"a": toy(), "b": toy()}, start={"run": "b"}), width=1280)
    page.get_by_role("button", name="Compare with another run").click()
    chosen = ".av-xside:not([hidden]) input:checked"
    assert page.locator(chosen).evaluate_all("radios => radios.map(radio => radio.ariaLabel)") == ["b", "a"]


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


def loop(windows: int) -> Ledger:
    """Windows of four shares each, with a weight, in a program of eighteen lines."""
    each = {**ROWS[0], "details": {"terms": [term()]}}
    rows = [row for _ in range(windows) for row in (each, each, each, each, ROWS[2], ROWS[3])]
    return Ledger.build([W], weighed(rows), sources={"a.py": CODE + "x = 1\n" * 13})


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
