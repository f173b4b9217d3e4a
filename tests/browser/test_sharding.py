"""The stripes of two ranks, as a reader meets them: two switches, and a slider over the moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accumviz.book.sharding import Sharding
from tests.browser.written import written
from tests.views.test_sharding import moments

Open = Callable[..., Any]


@pytest.fixture
def page(watch: Open, tmp_path: Path) -> Callable[..., Any]:
    runs = {}
    for reshard in (True, False):
        for sync in (True, False):
            runs[reshard, sync] = [moments(sync, reshard)] * 2

    def open_page(**options: Any) -> Any:
        watched = watch(reduced_motion="reduce", **options)
        watched.page.goto(written(tmp_path / "page.html", Sharding(runs, 40)))
        watched.page.get_by_role("slider").wait_for()
        return watched

    return open_page


def test_a_window_that_averages_once_keeps_the_whole_gradient_meanwhile(page: Open, mode: str) -> None:
    watched = page(mode=mode)
    found = watched.page
    whole = found.locator(".av-map svg").first.locator(".av-whole")
    assert whole.get_attribute("d") == "M4 2h1v2h-1zM10 2h1v2h-1z"
    found.get_by_role("switch", name="set_requires_gradient_sync").press("Space")
    assert whole.get_attribute("d") == "M4 2h7v2h-7z"
    assert "1 reduce-scatter." in found.locator(".av-says").inner_text()
    assert found.locator("svg").first.get_attribute("viewBox") == "0 0 13 5"
    found.get_by_role("switch", name="reshard_after_forward").press("Space")
    assert found.locator("svg").first.get_attribute("viewBox") == "0 0 11 5"
    assert watched.complaints == [] and watched.foreign == []


def test_the_slider_moves_through_the_moments_and_says_each(page: Open) -> None:
    found = page().page
    slider, now = found.get_by_role("slider"), found.locator(".av-now")
    before = now.bounding_box()["x"]
    assert found.locator(".av-points").inner_text() == "forward 1: layer 1 is gathered. Rank 0 holds 20 B."
    slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == found.locator(".av-points").inner_text()
    assert now.bounding_box()["x"] > before + 20
    slider.press("End")
    for switch in found.get_by_role("switch").all():
        switch.press("Space")
    assert found.locator(".av-points").inner_text().startswith("step"), "a shorter window has a last moment, too"


@pytest.mark.parametrize("width", [375, 1000])
def test_the_stripes_fit_the_page_with_letters_that_can_be_read(page: Open, width: int) -> None:
    found = page(width=width).page
    assert found.evaluate("document.documentElement.scrollWidth") <= width
    rows = found.locator(".av-map p:not(.av-title)").evaluate_all("all => all.map(one => one.offsetHeight)")
    assert width > 640 or min(rows) <= 16, "two ranks' layers and the memory have to fit one screen of a phone"
    sizes = found.locator(".av-sharding :is(p, span, b):visible").evaluate_all(
        "all => all.filter(one => one.textContent).map(one => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 13


def test_on_paper_the_picture_stands_with_its_words(page: Open) -> None:
    found = page().page
    found.emulate_media(media="print")
    assert found.locator(".av-map svg:visible").count() == 3
    assert found.locator(".av-sharding .av-words").is_visible()
    assert not found.locator(".av-keys").is_visible()
