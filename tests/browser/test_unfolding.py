"""A large graph on a page: its modules unfold in place, it is zoomed and panned, and the page still scrolls."""

from typing import Any

import pytest

from tests.browser.frames import drag, drawn, middle, still
from tests.contrast import CONTRAST
from tests.views.test_graph import modules, nested

BOX = ".av-bar + .av-scroll"
WIDTH = f"document.querySelector('{BOX} svg').getBoundingClientRect().width"
FOCUSED = "document.activeElement.getAttribute('data-module') || document.activeElement.className"
TALL = "document.body.style.paddingBottom = '3000px'"


def titles(page: Any) -> list[str]:
    drawn(page)
    return page.locator(f"{BOX} .av-title").all_text_contents()  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [375, 1000])
def test_a_click_on_a_module_unfolds_it_and_the_path_leads_back(shown: Any, width: int) -> None:
    page = shown(nested(), wait=BOX, width=width)
    whole = titles(page)
    assert len(whole) == 15
    page.get_by_role("button", name="unfold stack.1", exact=True).click()
    assert set(titles(page)) == {"stack.0", "stack.1.mlp", "Op14", "stack.1.attn", "stack.2"}
    page.get_by_role("button", name="unfold stack.1.attn").click()
    assert len(titles(page)) == 6
    path = page.get_by_role("navigation", name="modules")
    assert path.inner_text().replace("\n", " ").startswith("whole graph stack.1 attn")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    path.get_by_role("button", name="whole graph").click()
    assert titles(page) == whole


def test_modules_unfold_and_fold_by_key_and_the_focus_is_where_the_reader_came_from(shown: Any) -> None:
    page = shown(nested(), wait=BOX)
    page.get_by_role("button", name="unfold stack.3", exact=True).focus()
    page.keyboard.press("Enter")
    assert "stack.3.mlp" in titles(page)
    page.get_by_role("button", name="unfold stack.3.mlp").focus()
    page.keyboard.press("Space")
    assert page.locator(BOX).get_attribute("aria-label") == "Inside stack.3.mlp, scrollable"
    assert page.evaluate(FOCUSED) == "av-scroll"
    assert page.locator(BOX).evaluate("box => getComputedStyle(box).outlineStyle") == "solid"
    for came_from in ("stack.3.mlp", "stack.3"):
        page.keyboard.press("Escape")
        drawn(page)
        assert page.evaluate(FOCUSED) == came_from
    ring = page.locator(":focus .av-card").last.evaluate("card => getComputedStyle(card).strokeWidth")
    assert ring == "4px"


def test_a_drawing_is_zoomed_by_wheel_button_and_key_and_fitted(shown: Any) -> None:
    page = shown(modules(1, 60), wait=BOX)
    first = page.evaluate(WIDTH)
    page.locator(BOX).hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function(f"{WIDTH} > {1.2 * first}")
    assert page.evaluate("scrollY") == 0
    for act in (lambda: page.get_by_role("button", name="zoom out").click(), lambda: page.keyboard.press("-")):
        before = page.evaluate(WIDTH)
        act()
        page.locator(BOX).focus()
        assert page.evaluate(WIDTH) == pytest.approx(0.8 * before, rel=0.01)
    page.get_by_role("button", name="fit the whole graph").click()
    assert page.locator(BOX).evaluate("box => box.scrollHeight <= box.clientHeight")


def test_the_way_back_leads_to_where_the_reader_was_and_how_near(shown: Any) -> None:
    page = shown(nested(), wait=BOX)
    page.get_by_role("button", name="zoom in").click()
    seen = f"[document.querySelector('{BOX}').scrollTop, {WIDTH}]"
    page.get_by_role("button", name="unfold stack.3", exact=True).scroll_into_view_if_needed()
    before = page.evaluate(seen)
    assert before[0] > 0
    page.get_by_role("button", name="unfold stack.3", exact=True).click()
    page.keyboard.press("Escape")
    drawn(page)
    assert page.evaluate(seen) == pytest.approx(before, abs=1)


def test_modules_are_walked_from_the_top_down(shown: Any) -> None:
    page = shown(nested(), wait=BOX)
    tops = page.locator(f"{BOX} .av-opens").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert len(tops) == 14
    assert tops == sorted(tops)


# A colour over another one, as a browser paints both.
OVER = (
    f"title => {{ {CONTRAST}"
    """
    const card = getComputedStyle(title.parentElement.querySelector(".av-card")).fill;
    const under = ["Canvas", getComputedStyle(document.body).backgroundColor, card].map(color => [color]);
    return contrast(painted(...under), painted(...under, [getComputedStyle(title).fill]));
}"""
)


def test_what_opens_can_be_read_on_its_box(mode: str, shown: Any) -> None:
    page = shown(nested(), wait=BOX, mode=mode)
    # A host that names no colour for links has the page's own.
    page.add_style_tag(content=".accumviz { --av-accent: #0072b2 !important; }")
    assert page.locator(f"{BOX} .av-opens .av-title").first.evaluate(OVER) >= 4.5


def test_a_drag_pans_and_unfolds_nothing(shown: Any) -> None:
    page = shown(nested(), wait=BOX)
    for _ in range(4):
        page.get_by_role("button", name="zoom in").click()
    before, place = titles(page), "box => [box.scrollLeft, box.scrollTop]"
    page.locator(BOX).scroll_into_view_if_needed()
    _, top = page.locator(BOX).evaluate(place)
    drag(page, middle(page.locator(BOX)), -40, -60)
    assert page.locator(BOX).evaluate(place) == pytest.approx([0, top + 60], abs=2)
    assert titles(page) == before


def test_a_wheel_over_a_large_drawing_moves_the_page_until_the_reader_is_in_it(shown: Any) -> None:
    page = shown(modules(1, 60), wait=BOX)
    page.evaluate(TALL)
    assert page.locator(BOX).evaluate("box => box.scrollHeight - box.clientHeight") > 300
    page.locator(BOX).hover()
    page.mouse.wheel(0, 200)
    still(page)
    assert (page.evaluate("scrollY"), page.locator(BOX).evaluate("box => box.scrollTop")) == (200, 0)
    page.locator(BOX).evaluate("box => box.focus({ preventScroll: true })")
    page.mouse.wheel(0, 100)
    page.wait_for_function(f"document.querySelector('{BOX}').scrollTop === 100")
    assert page.evaluate("scrollY") == 200


def test_a_page_prints_the_drawing_whole_and_without_its_bar(shown: Any) -> None:
    page = shown(nested(), wait=BOX)
    page.get_by_role("button", name="zoom in").click()
    page.emulate_media(media="print")
    assert not page.locator(".av-bar").first.is_visible()
    assert page.locator(BOX).evaluate(
        "box => box.scrollWidth <= box.clientWidth && box.scrollHeight <= box.clientHeight"
    )


def test_without_a_script_the_drawing_and_the_insides_are_there(shown: Any) -> None:
    page = shown(nested(), java_script_enabled=False)
    assert page.locator(".av-scroll svg").first.is_visible()
    assert not page.locator("[data-inside] svg").first.is_visible()
    page.get_by_text("Inside 42 modules").click()
    assert page.locator("[data-inside] svg").first.is_visible()
