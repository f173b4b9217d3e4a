"""What players and explorers of the book show as a page opens: the mistake at a glance, on one screen."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.book import weight
from tests.browser.frames import drawn

MUSEUM = "chapters/12_museum.html"
HEIGHTS = """() => [...document.querySelectorAll(".av-xframe, .av-frame, .av-lframe")]
    .filter(one => one.checkVisibility() && !one.parentElement.closest(".av-xframe"))
    .map(one => Math.round(one.getBoundingClientRect().height))"""


def picture(page: Any, explorer: Any) -> Any:
    drawn(page)
    shot = explorer.locator(".av-in-time .av-plot").screenshot()
    return np.asarray(Image.open(BytesIO(shot)).convert("RGB"), float)


def test_each_exhibit_shows_its_mistake_at_a_glance(visit: Any) -> None:
    """Each run was drawn to its own scale: switching to the mistake changed 0.13 % of the pixels, the digits alone."""
    page = visit(MUSEUM, query="?show")
    page.wait_for_function(weight.READY)
    exhibits = page.locator("[data-accumviz-explorer]").all()
    assert len(exhibits) > 10
    alike = []
    for explorer in exhibits:
        wrong = picture(page, explorer)
        assert explorer.locator(".av-key", has_text="outline: fixed yes, a right run").is_visible()
        explorer.get_by_role("switch", name="fixed").click()
        right = picture(page, explorer)
        same = wrong.shape == right.shape
        share = (np.abs(wrong - right) > 12).any(axis=2).mean() if same else 1.0
        if share < 0.02:
            alike.append((explorer.locator("code").first.inner_text(), share))
    assert alike == []


@pytest.mark.parametrize(("width", "most"), [(1280, 720), (375, 812)])
def test_control_and_effect_are_on_one_screen(page_name: str, width: int, most: int, visit: Any) -> None:
    """Explorers were 923 to 2,126 px high, on a phone up to 5,015; the loop lab 1,200 and 2,000."""
    page = visit(page_name, query="?show", width=width)
    page.wait_for_function(weight.READY)
    drawn(page)
    assert [height for height in page.evaluate(HEIGHTS) if height > most] == []


@pytest.mark.parametrize("width", [1280, 375])
def test_a_transport_stays_in_sight_while_more_panes_are_read(width: int, visit: Any) -> None:
    page = visit(MUSEUM, query="?show", width=width)
    page.wait_for_function(weight.READY)
    explorer = page.locator("[data-accumviz-explorer]").first
    explorer.evaluate("el => el.querySelector('.av-b-panes').click()")
    drawn(page)
    bar = explorer.locator(".av-top")
    body = explorer.locator(".av-body").bounding_box()
    top = body["y"] + 200 if width == 1280 else body["y"] + 200 - page.viewport_size["height"]
    page.evaluate("y => scrollTo({top: scrollY + y, behavior: 'instant'})", top)
    drawn(page)
    box = bar.bounding_box()
    assert 0 <= box["y"] <= page.viewport_size["height"] - box["height"]
    explorer.get_by_role("button", name="previous event").click(trial=True)


def test_a_figure_is_enlarged_and_comes_back(visit: Any) -> None:
    page = visit("chapters/04_shares.html")
    figure = page.locator("#fig-eight")
    drawing = figure.locator("svg").first

    def width() -> float:
        return float(drawing.evaluate("drawing => drawing.getBoundingClientRect().width"))

    before = width()
    button = figure.get_by_role("button", name="Enlarge this figure")
    button.click()
    page.wait_for_function("document.fullscreenElement?.id === 'fig-eight'")
    assert width() > 1.5 * before
    button.click()
    page.wait_for_function("document.fullscreenElement === null")
    assert width() == before
