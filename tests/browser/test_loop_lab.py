"""The loop lab in a browser: lines moved by mouse, finger and keyboard, and what follows from it."""

import re
from functools import cache
from typing import Any

import pytest
from playwright.sync_api import expect

import accumviz as av
from accumviz.book.lab import Lab
from tests.browser.frames import drawn, middle
from tests.browser.test_scrolling import swiped

ZERO, STEP, CLIP = "optimizer.zero_grad()", "optimizer.step()", "nn.utils.clip_grad_norm_(w, 4)"


@cache
def made(start: tuple[tuple[str, Any], ...] = ()) -> Lab:
    return av.lab(dict(start))


class Bench:
    """A lab on a page, as a reader meets it."""

    def __init__(self, page: Any, index: int = 0) -> None:
        self.page, self.root = page, page.locator(".av-lab").nth(index)
        self.root.locator(".av-bench .av-in-code").wait_for()

    def grip(self, line: str) -> Any:
        return self.root.get_by_role("button", name=re.compile(rf"^{re.escape(line)}, "))

    def where(self, line: str) -> str:
        return str(self.grip(line).get_attribute("aria-label")).removeprefix(f"{line}, ").partition(";")[0]

    def choose(self, group: str, value: str) -> None:
        self.root.get_by_role("radiogroup", name=group).get_by_role("radio", name=value, exact=True).check()

    @property
    def said(self) -> str:
        drawn(self.page)
        return str(self.root.locator(".av-said").inner_text())

    @property
    def code(self) -> list[str]:
        lines = self.root.locator(".av-line code").all_inner_texts()
        return [line.replace(" ↕", "").replace("↕", "").rstrip() for line in lines]

    @property
    def sums(self) -> list[str]:
        return list(self.root.locator(".av-in-shares .av-win .av-total").all_inner_texts())


@pytest.fixture
def show(show: Any) -> Any:
    def open_page(lab: Lab, **options: Any) -> Bench:
        return Bench(show(lab, wait=".av-bench .av-in-code", panes=False, **options))

    return open_page


def test_a_mouse_drags_a_line_to_another_place_and_everything_follows(show: Any, mode: str) -> None:
    bench = show(made(), mode=mode)
    mouse = bench.page.mouse
    assert bench.said.startswith("✓ Healthy")
    before = bench.root.locator(".av-in-weights .av-note").last.inner_text()
    x, y = middle(bench.grip(ZERO))
    mouse.move(x, y)
    mouse.down()
    mouse.move(x, y - 40, steps=4)
    place = bench.root.get_by_role("button", name=f"put {ZERO} first in every micro-batch")
    mouse.move(*middle(place), steps=4)
    assert place.locator("..").evaluate("slot => slot.classList.contains('av-near')")
    mouse.up()
    assert bench.said.startswith("✗ 1 mistake: zero-grad-inside-window.")
    assert bench.where(ZERO) == "first in every micro-batch"
    assert bench.code == made().text(zero_grad="micro-batch").splitlines()
    assert bench.sums == ["0.3333", "0.3333", "1"] * 2
    assert bench.root.locator(".av-in-weights .av-note").last.inner_text() != before
    assert bench.root.locator(".av-count").inner_text() == "event 3 / 37", "the first zero in a window"
    assert not bench.root.locator(".av-slot:visible").count()


def test_a_lab_stands_where_its_report_points_and_a_healthy_one_at_its_first_step(show: Any) -> None:
    wrong = (("divide", "nothing"),)
    for start, findings in (((), False), (wrong, True)):
        lab = made(start)
        bench, report = show(lab), lab.check()
        first = report.findings[0].event if report.findings else lab.run().of("step")[0].index
        assert bool(report.findings) == findings
        assert bench.root.locator(".av-count").inner_text().startswith(f"event {first} / ")
        ahead = bench.root.locator(".av-in-weights .av-ahead").first
        assert 0.2 < float(ahead.evaluate("one => getComputedStyle(one).opacity")) < 0.6, "what follows is seen"
        weighs = bench.root.locator(".av-in-shares .av-weighs").first
        kept = weighs.get_attribute("data-w")
        assert len(weighs.text_content()) <= len(kept) <= 400, "a sentence has the room of one sentence"


@pytest.mark.parametrize("touch", [False, True])
def test_a_line_stays_under_the_pointer_that_has_taken_it_and_is_seen_where_it_was_put(show: Any, touch: bool) -> None:
    first = show(made(), again=3, **({"width": 375, "has_touch": True} if touch else {}))
    bench = Bench(first.page, 1)
    line, mouse = bench.grip(ZERO), bench.page.mouse
    line.evaluate("one => one.scrollIntoView({block: 'center'})")
    place = bench.root.get_by_role("button", name=f"put {ZERO} first in every micro-batch")
    x, taken = middle(line)
    if touch:
        line.tap()
    else:
        mouse.move(x, taken)
        mouse.down()
        mouse.move(x, taken + 6, steps=2)
    assert place.is_visible()
    assert middle(line)[1] == pytest.approx(taken, abs=2)
    _, there = middle(place)
    if touch:
        place.tap()
    else:
        mouse.move(x, there, steps=4)
        mouse.up()
    assert bench.where(ZERO) == "first in every micro-batch"
    assert middle(line)[1] == pytest.approx(there, abs=12)
    assert first.where(ZERO) == "below the step", "each lab of a page goes its own way"


# How far the number of each line that moves is from the line, which a finger makes taller than others.
BESIDE = """all => all.map(line => {
    const [no, grip] = [".av-no", ".av-grip"].map(name => {
        const range = document.createRange();
        range.selectNodeContents(line.querySelector(name).firstChild ?? line.querySelector(name));
        return range.getClientRects()[0];
    });
    return Math.abs(no.bottom - grip.bottom);
})"""


def test_a_finger_taps_a_line_and_then_a_place_and_still_scrolls(show: Any) -> None:
    bench = show(made(), again=2, width=375, has_touch=True)
    assert max(bench.page.locator(".av-movable:has(.av-no)").evaluate_all(BESIDE)) < 3
    bench.grip(CLIP).tap()
    assert bench.grip(CLIP).get_attribute("aria-pressed") == "true"
    bench.root.get_by_role("button", name=f"put {CLIP} after every backward").tap()
    assert bench.said.startswith("✗ 1 mistake: clip-per-micro-batch.")
    bench.grip(CLIP).tap()
    bench.root.get_by_role("button", name=f"put {CLIP} nowhere").tap()
    assert bench.said.startswith("✓ Healthy")
    bench.grip(ZERO).scroll_into_view_if_needed()
    assert swiped(bench.page, ".av-grip", 240) > 180, "what a finger drags is the page"
    assert bench.where(ZERO) == "below the step"


def test_the_keyboard_moves_a_line_from_place_to_place_and_keeps_the_focus(show: Any) -> None:
    bench = show(made())
    press = bench.page.keyboard.press
    bench.grip(ZERO).focus()
    seen = []
    for _ in range(4):
        press("ArrowUp")
        seen.append((bench.where(ZERO), bench.said.partition(".")[0][2:]))
        assert bench.page.evaluate("document.activeElement.className") == "av-grip"
    assert seen == [
        ("above the step", "1 mistake: zero-before-step"),
        ("below backward", "1 mistake: zero-before-step"),
        ("first in every micro-batch", "1 mistake: zero-grad-inside-window"),
        ("above the loop over micro-batches", "1 mistake: missing-zero-grad"),
    ]
    press("ArrowUp")
    assert bench.where(ZERO) == seen[-1][0], "there is nothing above"
    for _ in range(5):
        press("ArrowDown")
    assert bench.where(ZERO) == "nowhere"
    press("Enter")
    places = bench.root.locator(".av-here:visible")
    assert places.count() == 5
    press("Escape")
    assert places.count() == 0


def test_choices_follow_and_go_back_to_the_start_and_a_third_takes_the_oldest_back(show: Any) -> None:
    bench = show(made())
    bench.choose("each loss is divided by", "nothing")
    assert bench.root.locator(".av-said").get_attribute("aria-live") == "polite"
    bench.root.locator(".av-found").get_by_role("button", name=re.compile("^line")).first.click()
    drawn(bench.page)
    assert "backward of loss" in bench.root.locator(".av-say").inner_text()
    assert "loss.backward()" in bench.root.locator(".av-line[aria-current]").inner_text()
    assert bench.said.startswith("✗ 1 mistake: loss-not-divided.")
    assert bench.sums == ["3", "3", "1"] * 2
    bench.choose("the last, shorter window", "is dropped")
    assert "tail-dropped, loss-not-divided" in bench.said
    bench.root.get_by_role("button", name="Back to the start").click()
    assert bench.said.startswith("✓ Healthy")
    assert bench.root.get_by_role("radio", name="the window’s length").is_checked()

    bench.choose("each loss is divided by", "nothing")
    bench.choose("micro-batches", "unequal")
    bench.grip(ZERO).focus()
    bench.page.keyboard.press("ArrowDown")
    assert "“each loss is divided by” is back at “the window’s length”" in bench.said
    assert bench.root.get_by_role("radio", name="the window’s length").is_checked()
    assert "missing-zero-grad" in bench.said
    assert bench.root.get_by_role("radio", name="unequal", exact=True).is_checked()


def test_the_code_is_indented_and_nothing_is_cut(show: Any) -> None:
    bench = show(made(), mode="dark")
    for width in (1000, 700, 375):
        bench.page.set_viewport_size({"width": width, "height": 900})
        for zero in ("", "ArrowUp"):
            if zero:
                bench.grip(ZERO).focus()
                bench.page.keyboard.press(zero)
            wide = bench.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide[0] <= wide[1]
            lefts = bench.root.locator(".av-line code").evaluate_all(
                """lines => lines.map(line => {
                    const range = document.createRange(), walk = document.createTreeWalker(line, 4);
                    for (let text; (text = walk.nextNode());) {
                        const at = text.data.search(/\\S/);
                        if (at < 0) continue;
                        range.setStart(text, at);
                        range.setEnd(text, at + 1);
                        return range.getBoundingClientRect().left;
                    }
                })"""
            )
            depths = [(len(line) - len(line.lstrip())) // 4 for line in bench.code]
            step = lefts[depths.index(1)] - lefts[depths.index(0)]
            assert step > 12
            for left, depth in zip(lefts, depths, strict=True):
                assert left == pytest.approx(lefts[0] + step * depth, abs=1.5)
            beyond = bench.root.locator(
                ".av-line, .av-grip, .av-radios, .av-suggestion, .av-said, .av-goal"
            ).evaluate_all(
                """all => all.filter(el => el.getBoundingClientRect().right > innerWidth
                    || (el.scrollWidth > el.clientWidth + 1 && getComputedStyle(el).overflowX === 'hidden'))
                    .map(el => el.outerHTML)"""
            )
            assert beyond == []


def test_a_permalink_brings_an_arrangement_and_its_moment_back_or_says_that_it_is_gone(show: Any) -> None:
    bench = show(made())
    bench.choose("micro-batches", "unequal")
    bench.grip(ZERO).focus()
    bench.page.keyboard.press("ArrowDown")
    bench.root.get_by_role("slider", name="event").fill("4")
    drawn(bench.page)
    link = bench.root.get_by_label("link to this moment").get_attribute("href")
    assert "zero_grad=nowhere" in link and "sizes=unequal" in link
    before = [bench.said.partition(".")[0], bench.code, bench.root.locator(".av-say").inner_text()]
    again = show(made(), fragment=link)
    assert [again.said.partition(".")[0], again.code, again.root.locator(".av-say").inner_text()] == before
    gone = ("sizes=99", "turned=left", "sizes=unequal&zero_grad=nowhere&tail=drop", "zero_grad=%3Cscript%3E", "sizes")
    for lost in gone:
        again.page.evaluate("hash => { location.hash = hash; }", f"#{made().id}&{lost}&e=1e9")
        expect(again.root.locator(".av-said")).to_contain_text("The arrangement of this link is not here any more")
        assert again.code == made().text().splitlines()


def test_a_suggestion_marks_the_lines_between_what_it_takes_out_and_puts_in(show: Any) -> None:
    bench = show(made((("clip", "backward"),)))
    lines = bench.root.locator(".av-suggestion").inner_text().rstrip().splitlines()
    assert lines == [f"- {CLIP}", "  …", f"+ {CLIP}", f"  {STEP}"]


SEEN = """frame => [".av-in-code", ".av-said", ".av-in-time"].map(name => {
    const box = frame.querySelector(name).getBoundingClientRect();
    return box.height > 0 && box.bottom - frame.getBoundingClientRect().top;
})"""


@pytest.mark.parametrize(("options", "most"), [({}, 670), ({"width": 359, "has_touch": True}, 790)])
def test_loop_verdict_and_timeline_are_on_one_screen_in_the_longest_loop(
    options: dict[str, Any], most: int, show: Any
) -> None:
    """The lab was 1,200 px high, on a phone 2,000: what a moved line had done was below the screen.

    Of a screen of 720 the book's header takes 48.
    """
    lab = made((("sizes", "unequal"), ("divide", "samples"), ("clip", "backward")))
    bench = show(lab, fragment=f"#{lab.id}&tail=drop&e=2", **options)
    assert bench.said.startswith("✗ 2 mistakes")
    frame = bench.root.locator(".av-lframe")
    assert all(0 < bottom <= most for bottom in frame.evaluate(SEEN))
    assert frame.bounding_box()["height"] <= most
    play, link = (bench.root.get_by_label(name).bounding_box() for name in ("play", "link to this moment"))
    assert link["y"] + link["height"] / 2 == pytest.approx(play["y"] + play["height"] / 2, abs=8), "in one row"


TOPS = """frame => [...frame.querySelectorAll(".av-said, .av-at-tape, .av-at-panes")]
    .map(one => one.getBoundingClientRect()).concat(frame.getBoundingClientRect())
    .map((box, i) => Math.round(i === 3 ? box.height : box.top))"""


@pytest.mark.parametrize("options", [{}, {"width": 375, "has_touch": True}])
@pytest.mark.parametrize("start", [(), (("sizes", "unequal"), ("divide", "samples"), ("clip", "backward"))])
def test_nothing_below_the_code_jumps_when_a_line_moves(
    start: tuple[tuple[str, Any], ...], options: dict[str, Any], show: Any
) -> None:
    """One press made the loop two lines shorter, and the page below it 91 px."""
    bench = show(made(start), **options)
    frame = bench.root.locator(".av-lframe")
    before = frame.evaluate(TOPS)
    for line, *keys in ((STEP, "Down", "Up", "Up", "Down"), (ZERO, "Up", "Up", "Up"), (CLIP, "Up", "Up", "Down")):
        for key in keys:
            bench.grip(line).press(f"Arrow{key}")
            drawn(bench.page)
            assert frame.evaluate(TOPS) == before, f"{line} {bench.where(line)}"


def test_the_verdict_says_what_a_line_took_along_and_the_code_marks_what_changed(show: Any) -> None:
    bench = show(made())
    changed = bench.root.locator(".av-differs")
    assert changed.count() == 0
    bench.grip(STEP).press("ArrowDown")
    assert bench.said.endswith("step: after the loop. zero_grad moved with it. K is not used now.")
    marked = [text.replace(" ↕", "").replace("↕", "").strip() for text in changed.locator("code").all_inner_texts()]
    assert marked == ["for x, y in loader:", "window = len(loader)", STEP, ZERO]
    assert bench.root.get_by_text("≠ changed").is_visible()
    bench.choose("micro-batches", "unequal")
    assert changed.locator("code").all_inner_texts() == ["sizes = [3, 1, 2, 2, 1, 2, 3]"]


def test_a_tab_shows_another_pane_below_the_loop_and_it_stays_while_lines_move(show: Any) -> None:
    bench = show(made(), width=375, has_touch=True)
    for name, pane in (("Choices", ".av-options"), ("Report", ".av-found"), ("Shares", ".av-in-shares .av-share b")):
        tab = bench.root.get_by_role("button", name=name, exact=True)
        tab.tap()
        assert tab.get_attribute("aria-pressed") == "true"
        assert bench.root.locator(pane).first.is_visible()
        assert not bench.root.locator(".av-in-time").is_visible()
        assert bench.root.locator(".av-said").is_visible()
    bench.grip(ZERO).press("ArrowUp")
    assert bench.said.startswith("✗ 1 mistake: zero-before-step.")
    assert bench.root.locator(".av-in-shares .av-share b").first.is_visible()
