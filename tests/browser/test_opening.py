"""The opening, what is pointed at, and two runs under one scrubber, as a reader meets them."""

import re
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from accumviz.book.explore import Explorer, explore
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.player import Player, play
from tests.browser.frames import drawn, stopped
from tests.browser.test_player import Played
from tests.conftest import ROOT
from tests.contrast import CONTRAST
from tests.toys import CODE, ROWS, W, chain, window

WALKED = window([-16.0, -4.0], after=1.2, zero=5)
GRAPHS = {0: chain(-16.0), 1: chain(-4.0)}


def opening() -> Player:
    return play(WALKED, GRAPHS, loss=lambda w: (w - 2) ** 2)


def runs(**more: Any) -> Explorer:
    """A whole batch, two halves of it, and two halves that nobody divided."""

    def one(parts: list[float], line: str) -> Ledger:
        source = f"for x in data:\n    {line}\noptimizer.step()\noptimizer.zero_grad()\n"
        return window(parts, after=1 - 0.01 * sum(parts), zero=4, code=source, label="")

    return explore(
        {
            "full batch": one([-20.0], "f(x).backward()"),
            "accumulated": one([-16.0, -4.0], "(f(x) / 2).backward()"),
            "undivided": one([-32.0, -8.0], "f(x).backward()"),
        },
        loss=lambda w: (w - 2) ** 2,
        **more,
    )


# Of a text to the ground of its pane.
TO_GROUND = (
    f"texts => {{ {CONTRAST}"
    """
    return texts.map(text => {
        const ground = [getComputedStyle(text.closest(".av-pane")).backgroundColor];
        const [whole, own] = [text.closest(".av-node"), text].map(one => getComputedStyle(one).opacity);
        return contrast(painted(ground), painted(ground, [getComputedStyle(text).fill, whole * own]));
    });
}"""
)
OPACITY = "els => els.map(el => Number(getComputedStyle(el).opacity))"


@pytest.mark.parametrize(("width", "look"), [(375, "dark"), (1280, "light")])
def test_before_anything_has_run_the_whole_graph_is_there_to_come_and_its_root_in_view(
    show: Any, width: int, look: str
) -> None:
    page = show(opening(), width=width, mode=look, reduced_motion="reduce")
    assert page.locator(".av-count").inner_text() == "start"
    assert page.locator(".av-scrub").get_attribute("aria-valuetext") == "Before the first event"
    assert page.locator(".av-row .av-total").inner_text() == "None"
    assert page.locator(".av-in-weights .av-weighs").inner_text() == "w 1, loss 1"
    assert page.locator(".av-node").evaluate_all(OPACITY) == [0.7, 0.7, 1.0], "a parameter is there before"
    assert page.locator(".av-unborn .av-card").first.evaluate("one => getComputedStyle(one).opacity") == "0.3"
    assert min(page.locator(".av-unborn text:not(.av-by)").evaluate_all(TO_GROUND)) >= 3, "faint, and yet it is read"
    box = page.locator(".av-in-graph .av-win").bounding_box()
    for node in page.locator(".av-node").all():
        place = node.bounding_box()
        assert box["y"] - 1 <= place["y"]
        assert place["y"] + place["height"] <= box["y"] + box["height"] + 1


def test_the_forward_builds_nodes_in_order_and_backward_shows_what_each_edge_multiplies_by(show: Any) -> None:
    played = Played(show(opening(), reduced_motion="reduce"))
    page, seen = played.page, []
    played.go("next event")
    for n in (-3, -2, -1, 0):
        played.run(n)
        seen.append(page.locator(".av-node.av-unborn").count())
    assert seen == [2, 2, 1, 0], "the last that was run is the first that was made; the parameter was there"
    factors = page.locator(".av-by")
    assert factors.evaluate_all(OPACITY) == [0, 0]
    played.run(2)
    assert factors.all_text_contents() == ["× 8", "× −2"]
    assert factors.evaluate_all(OPACITY) == [1, 1]
    played.run(3)
    page.locator(".av-node", has_text="AccumulateGrad").click()
    assert "8 × −2 = −16" in played.said


def test_a_contribution_travels_from_its_leaf_to_its_bar_by_transform_alone(show: Any) -> None:
    page = show(opening())
    page.get_by_role("button", name="next event").click()
    mark = page.locator(".av-flying")
    mark.wait_for(state="attached")
    found = page.evaluate(
        """() => {
            const mark = document.querySelector(".av-flying"), [flight] = mark.getAnimations();
            flight.pause();
            const centre = box => [box.x + box.width / 2, box.y + box.height / 2];
            const at = time => { flight.currentTime = time; return centre(mark.getBoundingClientRect()); };
            const ends = [at(0), at(flight.effect.getTiming().duration * 0.9)];
            const keys = new Set(flight.effect.getKeyframes().flatMap(Object.keys));
            const leaf = centre([...document.querySelectorAll(".av-node")].at(-1).getBoundingClientRect());
            const bar = centre(document.querySelector(".av-row .av-bar").getBoundingClientRect());
            const told = mark.textContent;
            flight.finish();
            return { ends, keys: [...keys], leaf, bar, told };
        }"""
    )
    assert found["told"] == "−16"
    assert found["ends"][0] == pytest.approx(found["leaf"], abs=2)
    assert found["ends"][1] == pytest.approx(found["bar"], abs=2)
    assert set(found["keys"]) <= {"offset", "computedOffset", "easing", "composite", "transform", "opacity"}
    mark.wait_for(state="detached")


def test_playing_starts_before_the_forward_takes_twelve_seconds_at_most_and_stops_at_once(show: Any) -> None:
    page = show(opening())
    page.evaluate("""() => {
        window.seen = [];
        const look = () => {
            const told = document.querySelector(".av-sub .av-told"), count = document.querySelector(".av-count");
            const state = `${count.textContent} ${told.textContent}`;
            if (window.seen.at(-1)?.[1] !== state) window.seen.push([performance.now(), state]);
        };
        new MutationObserver(look).observe(document.querySelector(".av-frame"), {subtree: true, childList: true});
    }""")
    stopped(page)
    page.get_by_role("button", name="play", exact=True).click()
    page.get_by_role("button", name="pause").wait_for()
    page.clock.run_for(14_000)
    assert page.get_by_role("button", name="play", exact=True).is_visible()
    seen = page.evaluate("window.seen")
    states = [state for _, state in seen]
    assert states[0] in ("start 0 of 3 built", "event 0 / 3 0 of 3 built")
    assert "event 0 / 3 0 of 3 run" in states
    assert states[-1].startswith("event 3 / 3")
    assert seen[-1][0] - seen[0][0] < 12_000
    page.get_by_role("button", name="play", exact=True).click()
    page.get_by_role("button", name="pause").click()
    page.clock.run_for(100)
    said = page.locator(".av-count").inner_text()
    page.clock.run_for(5000)
    assert page.locator(".av-count").inner_text() == said == "start"


def test_recordings_without_weights_graphs_or_shares_have_no_empty_pane(show: Any) -> None:
    page = show(play(Ledger.build([W], ROWS)))
    assert page.locator(".av-pane").evaluate_all(
        "els => els.map(el => el.classList.value.split(' ', 2).join(' '))"
    ) == [f"av-pane av-in-{name}" for name in ("code", "time", "grad")]
    assert page.locator(".av-count").inner_text() == "event 0 / 3", "nothing is built, nothing moves"


def warm(page: Any) -> dict[str, list[str]]:
    """What is lit in each pane."""
    return {
        "code": page.locator(".av-line.av-warm .av-no").all_text_contents(),
        "graph": page.locator(".av-node.av-warm .av-title").all_text_contents(),
        "time": page.locator(".av-warmed i").evaluate_all("els => els.map(el => el.style.left)"),
        "shares": page.locator(".av-part.av-warm").all_text_contents(),
    }


def shared(*, weights: bool = False) -> Player:
    term = {"op": "MeanBackward0", "reduction": "mean", "elements": 1, "factor": 0.5, "unknown": ""}
    rows = [{**row, "details": {**row.get("details", {}), "terms": [term]}} for row in ROWS[:2]]
    rows += [{**ROWS[2], "details": {"optimizer_index": 0}}, *ROWS[3:]]
    if weights:
        rows[0]["weights"], rows[2]["weights"] = {"w": 1.0}, {"w": 3.0}
    return play(Ledger.build([Parameter("w", (1,), optimizers=(0,))], rows, sources={"a.py": CODE}), GRAPHS)


@pytest.mark.parametrize("how", ["mouse", "keyboard", "finger"])
def test_what_is_pointed_at_lights_up_in_the_other_panes(show: Any, how: str) -> None:
    page = show(shared(), reduced_motion="reduce", width=1280, **({"has_touch": True} if how == "finger" else {}))
    Played(page).go("next event")
    line = page.locator(".av-line", has_text="backward").first
    if how == "mouse":
        line.hover()
    elif how == "keyboard":
        line.locator("button").focus()
    else:
        line.tap()
    drawn(page)
    lit = warm(page)
    assert len(lit["code"]) == 1
    assert lit["graph"] == ["loss"]
    assert len(lit["time"]) == 2, "the line ran twice"
    assert lit["shares"] == ["0.5", "0.5"]


def test_runs_by_name_are_tabs_above_one_player_and_the_run_kept_is_behind_its_weights(show: Any, mode: str) -> None:
    page = show(runs(), mode=mode, reduced_motion="reduce")
    tabs = page.get_by_role("radio")
    assert [tab.get_attribute("aria-label") for tab in tabs.all()] == ["full batch", "accumulated", "undivided"]
    assert page.locator("select").count() == 0
    assert page.locator(".av-count:visible").inner_text() == "start"
    page.get_by_role("button", name="Keep as outline").click()
    places = []
    for tab in (1, 2):
        tabs.nth(tab).check(force=True)
        page.locator(".av-scrub:visible").fill("4")
        drawn(page)
        boxes = [dot.bounding_box() for dot in page.locator(".av-mover .av-dot").all()]
        places.append([box["x"] + box["width"] / 2 for box in boxes])
    assert page.locator(".av-in-weights .av-weighs").inner_text() == "w 1.4, loss 0.36"
    keys = page.locator(".av-in-weights .av-key").all_text_contents()
    assert keys == ["the weights now", "the outline, after as many steps"]
    assert places[0][0] == pytest.approx(places[0][1], abs=1), "the same sum, the same step"
    assert places[1][1] > places[1][0] + 5, "the outline is painted first"
    marked = [line.inner_text().strip() for line in page.locator(".av-line.av-differs code").all()]
    assert marked == [], "the mistake has the code of the full batch"
    assert page.get_by_role("slider").count() == 1


def test_the_words_are_one_line_and_the_rest_is_a_press_away(show: Any) -> None:
    page = show(opening(), width=375, reduced_motion="reduce")
    Played(page).go("next event")
    line = page.locator(".av-say")
    one = line.bounding_box()["height"]
    more = page.get_by_role("button", name="the whole sentence")
    assert one <= 32
    assert more.get_attribute("aria-expanded") == "false"
    more.press("Enter")
    assert more.get_attribute("aria-expanded") == "true"
    assert line.bounding_box()["height"] > one
    assert line.evaluate("el => el.scrollWidth <= el.clientWidth")


def front() -> Explorer:
    """The figure that the front page begins with, made by the cell that makes it there."""
    page = (ROOT / "index.md").read_text("utf-8")
    cell = re.search(r"```\{code-cell\}\n:tags: \[remove-input\]\n(.*?)```", page, re.DOTALL)
    assert cell is not None
    names: dict[str, Any] = {}
    exec(cell[1].replace("\nOpening(", "\nmade = Opening("), names)
    made: Explorer = names["made"].more
    return made


def at(page: Any, run: str, event: str) -> None:
    page.get_by_role("radio", name=run).check(force=True)
    page.locator(".av-player .av-scrub").fill(event)
    drawn(page)


def test_the_mistake_of_the_front_page_looks_different_and_ends_above_its_first_loss(show: Any) -> None:
    page = show(front(), reduced_motion="reduce")
    pictures = []
    for run in ("accumulated", "undivided"):
        at(page, run, "15")
        pictures.append(imread(BytesIO(page.locator(".av-in-time .av-plot").screenshot()))[..., :3])
    assert (np.abs(pictures[0] - pictures[1]) > 0.05).any(axis=2).mean() >= 0.03
    weights = page.locator(".av-in-weights .av-weighs")
    assert float(weights.inner_text().partition("loss ")[2]) > 40
    at(page, "undivided", "0")
    assert weights.inner_text() == "w 1, loss 10"


def test_a_bar_beyond_the_scale_is_torn_off_and_said_to_be(show: Any) -> None:
    page = show(front(), reduced_motion="reduce")
    for run, torn in (("accumulated", 0), ("undivided", 1)):
        at(page, run, "14")
        assert page.locator(".av-row .av-torn:visible").count() == torn
        assert page.locator(".av-row .av-end:visible").count() == 1 - torn
        assert ("onger than drawn" in page.locator(".av-in-time .av-note").inner_text()) is bool(torn)
        bar = page.locator(".av-row .av-bar").bounding_box()
        for piece in page.locator(".av-row .av-part:visible").all():
            box = piece.bounding_box()
            assert box["x"] + box["width"] <= bar["x"] + bar["width"] + 1
