"""A GAN's pipes as a reader turns them: by key, by a click on a valve, and on a phone."""

import re
from typing import Any

import pytest

from tests.browser.test_reading import contrast
from tests.views.test_plumbing import made

READY = ".av-plumbing[data-stands]"
PAINTED = "(all, side) => all.map(one => getComputedStyle(one)[side])"


def widths(page: Any) -> list[float]:
    return page.locator(".av-pipe").evaluate_all("all => all.map(one => Number(one.getAttribute('stroke-width')))")


@pytest.mark.parametrize("width", [1100, 375])
def test_a_key_turns_a_tap_and_a_click_on_the_valve_turns_it_back(shown: Any, width: int) -> None:
    page = shown(made(), wait=READY, width=width, reduced_motion="reduce")
    assert widths(page) == [14, 3.5, 14, 14, 0]
    page.get_by_role("switch", name="freeze").press("Space")
    assert widths(page) == [14, 0, 14, 14, 0]
    assert page.locator(".av-says").inner_text().startswith("d_loss leaks into G")
    page.locator(".av-valve.av-freeze text").click()
    assert widths(page) == [14, 3.5, 14, 14, 0]
    page.get_by_role("switch", name="zero").press("Space")
    assert widths(page) == [14, 3.5, 14, 14, 3.5]
    assert page.locator(".av-number").all_text_contents() == ["0.25", "0", "0.25", "8"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_setting_that_trains_otherwise_plays_its_rounds(shown: Any) -> None:
    page = shown(made(), wait=READY)
    page.get_by_role("switch", name="detach").press("Space")
    page.get_by_text("600", exact=True).wait_for()
    dot = page.locator(".av-dot")
    assert dot.get_attribute("style") == "transform: translate(150px, 54px);"
    page.get_by_role("slider").press("Home")
    assert page.locator("output").inner_text() == "0"
    assert dot.get_attribute("style") == "transform: translate(150px, 150px);"


def test_on_a_phone_the_round_s_slider_is_on_the_screen_and_its_words_can_be_read(shown: Any) -> None:
    page = shown(made(), wait=READY, width=375)
    box = page.locator(".av-plumbing").bounding_box()
    slider = page.get_by_role("slider").bounding_box()
    assert slider["y"] + slider["height"] - box["y"] <= 812 - 48
    size = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a))"
    assert page.locator("svg text").evaluate_all(size) >= 11
    assert page.locator(".av-legend span").count() == 4


def test_each_network_has_a_colour_of_its_own_and_samples_stand_out(shown: Any, mode: str) -> None:
    """In the chapter on two networks, both had one colour; its rings were dim in the dark."""
    page = shown(made(), wait=READY, mode=mode, reduced_motion="reduce")
    colours = []
    for network in ("g", "d"):
        painted = set()
        for part, side in ((".av-pipe", "stroke"), (".av-level", "fill"), (".av-box", "stroke")):
            painted |= {*page.locator(f"{part}.av-of-{network}").evaluate_all(PAINTED, side)}
        colours.append(painted)
    assert [len(painted) for painted in colours] == [1, 1]
    assert colours[0] != colours[1]
    (dot,) = {*page.locator(".av-dot").evaluate_all(PAINTED, "fill")}
    ground = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    numbers = ([int(number) for number in re.findall(r"\d+", colour)[:3]] for colour in (ground, dot))
    assert contrast(*numbers) >= 3
