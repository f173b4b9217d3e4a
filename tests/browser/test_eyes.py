"""What eyes found in the pictures of widgets, each as a fault that a browser can measure."""

from pathlib import Path
from typing import Any

from accumviz.book.explore import explore
from accumviz.graph.graph import Edge, Graph, Node
from accumviz.ledger.ledger import Ledger
from accumviz.views.player import play
from tests.browser.frames import drawn, opened
from tests.toys import W, toy


def test_a_bar_too_short_to_be_seen_says_how_short_it_is(shown: Any) -> None:
    """After an unscale or a clip a mark was left of it, at zero: equal numbers keep equal lengths, and this is read."""
    big, small = 65536.0, 1.0
    rows = [{"kind": "backward", "contribution": {"w": big}, "grad": {"w": big}}]
    rows += [{"kind": "unscale", "grad": {"w": small}}, {"kind": "step", "grad": {"w": small}}]
    page = shown(play(Ledger.build([W], rows)))
    opened(page)
    bar, total = page.locator(".av-row .av-bar"), page.locator(".av-row .av-total")
    assert bar.get_attribute("data-told") == "", "of the longest nothing is to be said"
    page.get_by_role("button", name="next event").click()
    drawn(page)
    assert total.inner_text() == "1"
    assert bar.get_attribute("data-told") == "1/65536 of the scale"


def test_a_graph_folds_and_unfolds_by_key_and_shows_one_form_at_a_time(watch: Any, tmp_path: Path) -> None:
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


def test_in_a_player_modules_fold_and_the_walk_goes_through_what_is_seen(shown: Any) -> None:
    nodes = [Node(i, "MulBackward0", "loss" if i == 0 else "", module=f"layers.{i // 4}") for i in range(12)]
    graph = Graph(tuple(nodes), tuple(Edge(i, i + 1) for i in range(11)), (0,))
    page = shown(play(toy(), {0: graph}), reduced_motion="reduce")
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


def test_a_finger_has_room_to_scrub_on_a_phone(shown: Any) -> None:
    """Beside the buttons and the count, 60 pixels were left of the slider; it keeps the line of its buttons."""
    for width, least in ((375, 160), (335, 120)):
        page = shown(play(toy()), explore({"a": toy(), "b": toy()}), width=width, has_touch=True)
        for bar in page.locator(".av-frame .av-top").all():
            slider, button = (bar.locator(part).bounding_box() for part in (".av-scrub", ".av-b-next"))
            assert slider["width"] >= least
            assert button["y"] < slider["y"] + slider["height"] / 2 < button["y"] + button["height"]
            for one in bar.locator(".av-b:visible").all():
                assert min(one.bounding_box()[side] for side in ("width", "height")) >= 44


def test_a_finger_meets_every_choice_of_an_explorer(shown: Any) -> None:
    """Choices, switches and the button that compares were 32 to 38 px high."""
    runs = {"a": toy(), "b": toy()}
    several = explore(runs), explore(lambda K, on: toy(), K=[1, 2, 4], on=[True, False])
    page = shown(*several, width=375, has_touch=True)
    targets = page.locator(".av-segments label, .av-explorer select, .av-switch, .av-compare")
    found = [one for one in targets.all() if one.is_visible()]
    assert {one.evaluate("el => el.tagName") for one in found} >= {"LABEL", "BUTTON"}
    assert all(min(one.bounding_box()[side] for side in ("width", "height")) >= 44 for one in found)
