"""The player in a browser: every control by mouse, touch and keyboard; what is seen is said; nothing hostile runs."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

import accumviz as av
from accumviz.graph.graph import Edge, Graph, Node
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views import payload, words
from accumviz.views.player import Player, play
from tests.browser.frames import drag, drawn, middle, opened
from tests.by_hand import windows
from tests.toys import EVIL, ROWS, W, backward, chain, hostile, large, segments, synced, toy, window

TOY = toy()
GRAPHS = {0: chain(-16.0), 1: chain(-4.0)}


class Played:
    """A player on a page, as a reader meets it."""

    def __init__(self, page: Any, index: int = 0) -> None:
        self.page, self.root = page, page.locator(".av-player").nth(index)
        self.root.locator(".av-frame").wait_for()

    def go(self, name: str) -> None:
        self.root.get_by_role("button", name=name, exact=True).click()
        drawn(self.page)

    @property
    def said(self) -> str:
        drawn(self.page)
        return str(self.root.locator(".av-say").inner_text())

    @property
    def total(self) -> str:
        return str(self.root.locator(".av-row:visible .av-total").first.inner_text())

    def run(self, nodes: int, of: int = 3) -> None:
        """As far as so many nodes have run; below 0, so many are still to be built."""
        self.root.get_by_label("node by node").fill(str(of + nodes))
        drawn(self.page)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture
def show(show: Any) -> Any:
    def open_page(*players: Player, **options: Any) -> Played:
        return Played(show(*players, **options))

    return open_page


def test_next_and_previous_move_code_graph_grad_and_words_together(show: Any, mode: str) -> None:
    played = show(play(TOY, GRAPHS), mode=mode)
    assert "Before the first event." in played.said
    assert played.total == "None"
    assert played.root.locator(".av-line[aria-current]").count() == 0
    played.go("next event")
    assert "Event 0, backward of loss" in played.said
    assert played.total == "−16"
    played.go("next event")
    assert "w receives −4, .grad −20" in played.said
    assert played.total == "−20"
    assert played.root.locator(".av-line[aria-current] code").inner_text().strip() == "loss.backward()"
    assert "[−4]" in played.root.locator(".av-wrote").text_content()
    played.go("next event")
    assert played.root.locator(".av-line[aria-current] code").inner_text().strip() == "optimizer.step()"
    assert "freed by its backward" in played.root.locator(".av-in-graph .av-note").inner_text()
    played.go("previous event")
    assert "Event 1" in played.said


def test_the_keyboard_alone_reaches_every_event_and_node(show: Any) -> None:
    played = show(play(TOY, GRAPHS))
    played.press("Tab", "Tab", "Tab", "Tab")
    played.press("End")
    assert "zero_grad" in played.said
    assert played.total == "None"
    played.press("Home")
    assert "Before the first event" in played.said
    played.press("ArrowRight", "ArrowRight")
    assert "Event 1" in played.said
    played.press("Shift+ArrowLeft")
    assert "2 of 3 nodes have run, the last is SubBackward0, value [4], grad [8]" in played.said
    played.press("Shift+ArrowLeft", "Shift+ArrowLeft")
    assert "none has run backward yet" in played.said
    assert played.root.locator(".av-done").count() == 0
    played.press("Shift+ArrowLeft")
    assert "The forward builds the graph: 2 of 3 nodes." in played.said
    assert played.root.locator(".av-node.av-unborn").count() == 1
    assert played.root.locator(".av-kind").inner_text() == "forward"
    played.press("Shift+ArrowLeft", "Shift+ArrowLeft", "Shift+ArrowLeft")
    assert "0 of 3" in played.said


def test_space_plays_and_pauses(show: Any) -> None:
    played = show(play(TOY, GRAPHS), reduced_motion="reduce")
    played.root.locator(".av-in-code .av-win").focus()
    start = played.said
    played.press(" ")
    played.root.get_by_role("button", name="pause").wait_for()
    played.root.locator(".av-say", has_not_text=start).wait_for()
    played.press(" ")
    played.root.get_by_role("button", name="play", exact=True).wait_for()
    before = played.said
    played.page.wait_for_timeout(900)
    assert played.said == before


def test_a_grad_is_as_it_was_until_its_accumulate_grad_has_run(show: Any) -> None:
    played = show(play(TOY, GRAPHS))
    played.go("next event")
    played.run(2)
    assert "2 of 3" in played.said
    assert played.total == "None"
    played.run(3)
    assert "w receives −16" in played.said
    assert played.total == "−16"
    played.go("next event")
    assert played.total == "−20"
    played.run(2)
    assert "2 of 3" in played.said
    assert played.total == "−16"
    assert played.root.locator(".av-row .av-new:visible").count() == 0
    assert "w.grad = −16 (event 0)" in played.root.locator(".av-in-grad .av-note").inner_text()
    played.press("Shift+ArrowRight")
    assert "w receives −4" in played.said
    assert played.root.locator(".av-row .av-new:visible").count() == 1


def test_up_and_down_select_nodes_and_a_leaf_selects_its_parameter(show: Any) -> None:
    played = show(play(TOY, GRAPHS))
    played.go("next event")
    played.root.locator(".av-in-graph .av-win").focus()
    played.press("ArrowDown", "ArrowDown", "ArrowDown")
    assert "Selected: w (AccumulateGrad), value [1], adds [−16]: 8 × −2 = −16." in played.said
    assert played.root.locator('.av-row[aria-selected="true"]').count() == 1
    played.press("ArrowUp", "ArrowUp")
    assert "Selected: loss" in played.said
    assert "freed" in played.said


def test_a_line_of_code_leads_to_its_next_event(show: Any) -> None:
    played = show(play(TOY))
    line = played.root.locator(".av-has").first
    line.click()
    assert "Event 1" in played.said
    line.click()
    assert "Event 0" in played.said
    played.root.get_by_role("button", name=re.compile("line 5")).press("Enter")
    assert "zero_grad" in played.said


def test_the_timeline_is_clicked_and_dragged(show: Any) -> None:
    played = show(play(TOY))
    box = played.root.locator("canvas").bounding_box()
    played.page.mouse.click(box["x"] + 300, box["y"] + 60)
    assert "Event 2" in played.said
    assert played.root.locator('.av-row[aria-selected="true"]').count() == 1
    played.page.mouse.move(box["x"] + 300, box["y"] + 60)
    told = played.root.locator(".av-plot").get_attribute("title")
    assert re.fullmatch(r"Event 2, step by SGD, line \d+\. w\.grad = −16 \(event 0\) − 4 \(event 1\) = −20", told), told
    played.page.mouse.down()
    played.page.mouse.move(box["x"] + 80, box["y"] + 60, steps=5)
    played.page.mouse.up()
    assert "Event 0" in played.said


def test_a_finger_does_what_a_mouse_does(show: Any) -> None:
    played = show(play(TOY, GRAPHS), width=375, has_touch=True)
    for _ in range(2):
        played.root.get_by_role("button", name="next event", exact=True).tap()
    assert "Event 1" in played.said
    played.root.locator(".av-node", has_text="SubBackward0").tap()
    assert "Selected: SubBackward0" in played.said
    opened(played.page, ".grad")
    played.root.locator(".av-row").tap()
    assert "Event 1" in played.said
    assert played.root.locator('.av-row[aria-selected="true"]').count() == 1
    opened(played.page, "Timeline")
    played.root.locator("canvas").tap(position={"x": 315, "y": 100})
    assert "Event 3" in played.said
    assert played.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_graph_zooms_fits_and_pans(show: Any) -> None:
    nodes = [Node(i, "MulBackward0", "" if i else "loss", shape=(1,)) for i in range(12)]
    edges = [Edge(node.id, node.id + 1) for node in nodes]
    long = Graph((*nodes, Node(12, "AccumulateGrad", "w", shape=(1,))), tuple(edges), (0,))
    played = show(play(TOY, {0: long}))
    svg, box = played.root.locator(".av-in-graph .av-win > svg"), played.root.locator(".av-in-graph .av-win")
    before = svg.bounding_box()["width"]
    for _ in range(4):
        played.root.get_by_role("button", name="zoom in").click()
    assert svg.bounding_box()["width"] > before * 2
    place = box.bounding_box()
    top = box.evaluate("box => box.scrollTop")
    drag(played.page, middle(box), 0, -80)
    assert box.evaluate("box => box.scrollTop") == pytest.approx(top + 80, abs=2)
    assert "Selected" not in played.said
    played.root.get_by_role("button", name="fit the whole graph").click()
    assert svg.bounding_box()["height"] <= place["height"] + 1


def test_a_graph_that_is_seen_whole_has_no_buttons_to_zoom(show: Any) -> None:
    played = show(play(TOY, GRAPHS))
    graph, box = (played.root.locator(f".av-in-graph .av-win{part}").bounding_box() for part in (" > svg", ""))
    assert box["height"] >= graph["height"] > 100
    assert not played.root.get_by_role("button", name=re.compile("zoom|fit")).count()


def test_a_press_on_the_link_copies_the_address_of_the_moment_and_says_so(show: Any) -> None:
    player = play(TOY, GRAPHS)
    played = show(player, permissions=["clipboard-read", "clipboard-write"])
    played.go("next event")
    link = played.root.get_by_label("link to this moment")
    link.click()
    expect(played.root.get_by_role("status")).to_have_text("Link copied")
    page = played.page
    assert page.evaluate("navigator.clipboard.readText()") == f"{page.url}#{player.id}&e=0"
    played.go("next event")
    assert played.root.get_by_role("status").inner_text() == "", "another moment has another link"
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.evaluate("document.body.style.paddingBottom = '900px'; scrollTo(0, 40)")
    link.press("Enter")
    expect(played.root.get_by_role("status")).to_have_text("The link is in the address bar")
    assert page.evaluate("[location.hash, scrollY]") == [f"#{player.id}&e=1", 40], "nothing jumps"
    assert link.evaluate("link => link === document.activeElement")
    played.go("previous event")
    assert played.root.get_by_role("status").inner_text() == ""


CUT = """box => {
    const {top, bottom} = box.getBoundingClientRect();
    const cut = [...box.querySelectorAll("li")].filter(line => {
        const {top: from, bottom: to} = line.getBoundingClientRect();
        return [top, bottom].some(edge => from < edge - 1 && to > edge + 1);
    });
    return cut.map(line => line.textContent);
}"""


def test_the_strip_of_code_on_a_phone_shows_whole_lines(show: Any) -> None:
    played = show(play(TOY, GRAPHS), width=375, panes=False)
    played.root.get_by_role("button", name="Timeline", exact=True).click()
    strip = played.root.locator(".av-in-code .av-win")
    for _ in range(5):
        assert strip.bounding_box()["height"] < 60
        assert strip.evaluate(CUT) == []
        played.go("next event")


def test_a_permalink_restores_the_moment_and_other_anchors_are_left_alone(show: Any) -> None:
    player = play(TOY, GRAPHS)
    first = show(player)
    first.press("Tab", "Tab", "Tab", "Tab", "ArrowRight", "ArrowRight", "Shift+ArrowLeft")
    first.root.locator(".av-row").click()
    said, link = first.said, first.root.get_by_role("link").get_attribute("href")
    assert link == f"#{player.id}&e=1&n=2&p=0"
    assert show(player, fragment=link).said == said
    assert "Before the first event" in show(player, fragment="#some-section").said
    first.press("Home")
    drawn(first.page)
    start = first.root.get_by_role("link").get_attribute("href")
    assert start == f"#{player.id}&p=0"
    assert show(player, fragment=start).said == first.said


@pytest.mark.parametrize("gone", ["&e=99&n=-77&p=42&node=1000", "&e=x&node=NaN", "0&e=1"])
def test_a_permalink_to_what_is_no_more_leads_to_what_there_is(show: Any, gone: str) -> None:
    player = play(TOY, GRAPHS)
    played = show(player, fragment=f"#{player.id}{gone}")
    assert re.search(r"Before the first event|Event [0-3],", played.said), played.said
    played.go("next event")


def test_two_players_on_a_page_keep_apart(show: Any) -> None:
    one, two = play(TOY, GRAPHS), play(Ledger.build([W], ROWS[:2]))
    first = show(one, two, fragment=f"#{two.id}&e=1")
    second = Played(first.page, 1)
    assert "Before the first event" in first.said
    assert "Event 1" in second.said
    first.go("next event")
    first.go("next event")
    assert "Event 1" in first.said
    assert "Event 1" in second.said


def test_nothing_of_a_hostile_ledger_runs(show: Any) -> None:
    ledger, graph = hostile()
    played = show(play(ledger, {0: graph}))
    for way in ("next event", "next event", "previous event"):
        played.go(way)
    played.root.locator(".av-row").click()
    assert "</script>" in played.said
    assert played.page.evaluate("window.ran") is None
    assert played.page.locator("img").count() == 0


BROKEN = Ledger.build([W], [backward(np.nan, np.inf)])


@pytest.mark.parametrize(
    ("player", "said"),
    [
        (play(Ledger.build([W], [])), "no event"),
        (play(Ledger.build([], [{"kind": "step"}])), "Event 0, step"),
        (play(Ledger.build([W], ROWS[:1])), "w receives −16"),
        (play(BROKEN), ".grad ∞"),
    ],
    ids=["empty", "no parameter", "one event", "not finite"],
)
def test_odd_recordings_are_shown_for_what_they_are(show: Any, player: Player, said: str) -> None:
    assert said in show(player).said


MIXED = Ledger.build(
    [W, Parameter("v", (2,), optimizers=(0,))],
    [
        {"kind": "backward", "label": "a", "contribution": {"w": 2, "v": [3, 4]}, "grad": {"w": 2, "v": [3, 4]}},
        {"kind": "zero_grad", "label": "opt", "grad": {"v": [0, 0]}},
        {"kind": "backward", "label": "b", "contribution": {"w": 5, "v": [1, 0]}, "grad": {"w": 5, "v": [1, 0]}},
        {"kind": "backward", "label": "a", "contribution": {"w": -3}, "grad": {"w": 2, "v": [1, 0]}},
        {"kind": "clip", "grad": {"w": 1, "v": [0.5, 0]}},
        {"kind": "step", "details": {"optimizer": "SGD", "skipped": True}, "grad": {"w": 1, "v": [0.5, 0]}},
        {"kind": "step", "details": {"optimizer": "SGD"}, "grad": {"w": 1, "v": [0.5, 0]}},
        {"kind": "backward", "label": "a", "contribution": {"w": 7}, "grad": {"w": 9, "v": [0.5, 0]}},
        {"kind": "zero_grad", "label": "opt"},
    ],
)


def test_page_and_python_tell_every_event_alike(show: Any) -> None:
    for ledger in (TOY, window([-16.0, -4.0], after=1.2), MIXED):
        player = play(ledger)
        played = show(player, fragment=f"#{player.id}&e=0")
        for event in ledger:
            told = words.sentence(ledger, event, range(len(ledger.parameters)))
            assert played.said.partition("Event")[2] == told.partition("Event")[2]
            played.go("next event")


@pytest.mark.parametrize("ranks", [False, True])
def test_parts_and_total_of_a_bar_are_those_of_the_timeline_drawn_to_one_scale(show: Any, ranks: bool) -> None:
    """At every event, whatever became of a part: as long as it is much, and all of it as long as `.grad` says."""
    looks = {"new": lambda part: part.look == "new", "used": lambda part: part.look == "used"}
    rows = [
        backward(8, 8),
        backward(4, 12),
        {"kind": "step", "grad": {"w": 12}},
        backward(-3, 9),
        {"kind": "clip", "grad": {"w": 4.5}},
    ]
    if ranks:  # what this one added is halved once, however often the sum is averaged
        rows = [backward(-32, -32), synced(-20), backward(-4, -24), synced(-23)]
    ledger = Ledger.build([W], rows)
    played = show(play(ledger), reduced_motion="reduce")
    wide = "one => one.getBoundingClientRect().width"
    left = "one => one.getBoundingClientRect().x"
    unit = 0.0
    for event, parts in zip(ledger, segments(ledger, 0, range(len(ledger))), strict=True):
        row = played.root.locator(".av-row").first
        for look, is_so in looks.items():
            assert row.locator(f".av-{look}:visible").count() == sum(map(is_so, parts))
        found = [one.evaluate(wide) for one in row.locator(".av-part:visible").all()]
        unit = unit or found[0] / abs(parts[0].amount)
        assert found == pytest.approx([abs(part.amount) * unit for part in parts], abs=0.6)
        length = row.locator(".av-end").evaluate(left) + 1.5 - row.locator(".av-zero").evaluate(left)
        assert length == pytest.approx(ledger.values("w")[event.index, 0] * unit, abs=0.6)
        played.go("next event")


def test_what_was_erased_unused_is_marked(show: Any) -> None:
    played = show(play(MIXED))
    played.go("next event")
    assert "erased +2 before any step used it" in played.said
    assert "+2 unused" in played.root.locator(".av-bar").first.get_attribute("data-told")


def test_many_parameters_are_grouped_unfolded_and_found_by_name(show: Any) -> None:
    played = show(play(large(600, 150)))
    rows = played.root.locator(".av-row:visible")
    assert rows.count() <= 14
    rows.nth(1).click()
    drawn(played.page)
    assert "layers.1.0.weight" in rows.nth(2).inner_text()
    search = played.root.get_by_role("searchbox")
    search.fill("7.11")
    assert rows.count() == 1
    rows.first.click()
    assert "layers.7.11.weight receives ‖·‖" in played.said
    search.press("Home")
    search.fill("nothing like it")
    assert rows.count() == 0
    search.fill("")
    played.root.locator(".av-in-grad .av-win").focus()
    played.press("ArrowDown", "ArrowUp", "Enter")


def test_in_a_heat_map_a_row_names_itself_under_a_pointer_and_a_word_says_what_stronger_is(show: Any) -> None:
    """Rows inside groups had no names, and a blue square stood for a ramp of blues."""
    played = show(play(large(60, 48)))
    box = played.root.locator(".av-plot").bounding_box()
    told = []
    for y in (0.3, 0.32):
        played.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + y * box["height"])
        told += re.findall(r"layers\.1\.\d+\.weight", played.root.locator(".av-plot").get_attribute("title"))
    assert len(set(told)) == 2
    assert "Stronger: a pixel’s largest contribution." in played.root.locator(".av-in-time .av-note").inner_text()


def test_thinned_recordings_say_so_on_the_page(show: Any) -> None:
    played = show(play(large(20_000, 4)))
    assert "of 20,000 events are shown" in played.root.locator(".av-in-time .av-note").inner_text()
    played.root.locator(".av-in-code .av-win").focus()
    played.press("End")
    assert f"Event {payload.thin(large(20_000, 4))[0][-1]}" in played.said


@pytest.mark.parametrize("width", [375, 1280])
def test_no_text_is_small_and_nothing_runs_over(show: Any, width: int, mode: str) -> None:
    page = show(play(TOY, GRAPHS), play(large(600, 150)), width=width, mode=mode).page
    small = page.evaluate(
        """() => [...document.querySelectorAll('.av-player *')].filter(element => {
            const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
            if (!text || !element.checkVisibility() || /STYLE|SCRIPT/.test(element.tagName)) return false;
            const svg = element.closest('.av-in-graph svg[viewBox]');
            const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
            return parseFloat(getComputedStyle(element).fontSize) * scale < 10.99;
        }).map(element => element.outerHTML.slice(0, 90))"""
    )
    assert small == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_opens_with_the_report_and_a_finding_leads_to_its_event_and_line(show: Any, mode: str) -> None:
    loop = windows(4, 4, factor=1.0).ledger
    player = play(loop)
    report = av.check(loop)
    third = replace(report.findings[0], event=loop.of("backward")[2].index)
    player.report, player.about = replace(report, findings=(third,)), f"{EVIL} · K = 4"
    played = show(player, mode=mode)
    root = played.root
    assert f"Event {third.event}," in played.said
    frame = root.locator(".av-frame > *").first
    assert "1 mistake: loss-not-divided." in frame.inner_text() and "K = 4" in frame.inner_text()
    played.press("End")
    root.locator(".av-leads").click()
    assert f"Event {third.event}," in played.said
    line = root.locator(".av-line[aria-current]")
    assert line.locator(".av-flag").inner_text() == "← loss-not-divided"


@pytest.mark.parametrize("width", [375, 1280])
def test_of_several_findings_the_first_is_open_and_each_leaves_the_player_in_sight(show: Any, width: int) -> None:
    loop = windows(4, 4, factor=1.0).ledger
    player = play(loop)
    report = av.check(loop)
    others = tuple(replace(report.findings[0], rule=f"another-rule-{i}") for i in range(4))
    player.report, player.about = replace(report, findings=(*report.findings, *others)), "K = 4"
    played = show(player, width=width)
    root = played.root
    assert root.locator(".av-leads:visible").count() == 1
    root.locator("summary", has_text="another-rule-3").click()
    root.locator(".av-leads:visible").last.click()
    bar = root.locator(".av-frame > .av-top").bounding_box()
    assert bar["y"] >= 0 and bar["y"] + bar["height"] <= played.page.viewport_size["height"]
    flags = root.locator(".av-flag")
    assert flags.count() == 1 and flags.inner_text().count(", ") == 4, "a line has one mark for all of its findings"
    code = root.locator(".av-flagged code").bounding_box()
    assert code["width"] > 90, "what is marked is read"
    root.locator("summary", has_text="another-rule-3").click()
    played.page.emulate_media(media="print")
    assert root.get_by_text("the step reads 4 times").count() == 5
    assert root.locator(".av-found article").last.locator("p").first.is_visible()
