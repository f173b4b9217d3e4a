"""The stripes of two ranks, as a reader meets them: two switches, and a slider over the moments."""

from typing import Any

import pytest

from tests.views.test_sharding import made


@pytest.fixture
def page(shown: Any) -> Any:
    return shown(made(), wait="[type=range]", reduced_motion="reduce")


def test_a_window_that_averages_once_keeps_the_whole_gradient_meanwhile(page: Any) -> None:
    whole = page.locator(".av-map svg").first.locator(".av-whole")
    assert whole.get_attribute("d") == "M4 2h1v2h-1zM10 2h1v2h-1z"
    page.get_by_role("switch", name="set_requires_gradient_sync").press("Space")
    assert whole.get_attribute("d") == "M4 2h7v2h-7z"
    assert "1 reduce-scatter." in page.locator(".av-says").inner_text()
    assert page.locator("svg").first.get_attribute("viewBox") == "0 0 13 5"
    page.get_by_role("switch", name="reshard_after_forward").press("Space")
    assert page.locator("svg").first.get_attribute("viewBox") == "0 0 11 5"


def test_the_slider_moves_through_the_moments_and_says_each(page: Any) -> None:
    slider, now = page.get_by_role("slider"), page.locator(".av-now")
    before = now.bounding_box()["x"]
    assert page.locator(".av-points").inner_text() == "forward 1: layer 1 is gathered. Rank 0 holds 20 B."
    slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == page.locator(".av-points").inner_text()
    assert now.bounding_box()["x"] > before + 20
    slider.press("End")
    for switch in page.get_by_role("switch").all():
        switch.press("Space")
    assert page.locator(".av-points").inner_text().startswith("step"), "a shorter window has a last moment, too"


def test_on_a_phone_the_layers_of_two_ranks_and_their_memory_fit_one_screen(shown: Any) -> None:
    page = shown(made(), wait="[type=range]", width=375)
    rows = page.locator(".av-map p:not(.av-title)").evaluate_all("all => all.map(one => one.offsetHeight)")
    assert max(rows) > 0 and min(rows) <= 16
    heads = page.locator(".av-heads span")
    assert heads.evaluate_all("all => all.filter(one => one.scrollWidth > one.offsetWidth).length") == 0
    assert heads.last.is_visible()
    frame, last = page.locator(".av-now").bounding_box(), heads.last.bounding_box()
    assert frame["y"] >= last["y"] + last["height"], "the frame lies on no head"


def test_a_pointer_on_the_stripes_moves_the_frame_to_it(page: Any) -> None:
    lane = page.locator(".av-map svg").nth(1).bounding_box()
    page.mouse.move(lane["x"] + lane["width"] / 2, lane["y"] + 5)
    assert page.get_by_role("slider").input_value() == "1"
    page.mouse.down()
    assert page.get_by_role("slider").input_value() == "6"
    page.mouse.move(lane["x"] + lane["width"] - 2, lane["y"] + 5)
    page.mouse.up()
    assert page.locator(".av-points").inner_text().startswith("step")
