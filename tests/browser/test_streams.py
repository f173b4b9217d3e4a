"""The chain rule's picture as a reader moves it: by key and by mouse."""

from typing import Any

import pytest

from accumviz.book.streams import streams
from tests.views.test_streams import made, run


def width(page: Any, name: str) -> float:
    return float(page.locator(f"path[data-width='{name}']:visible").first.get_attribute("stroke-width"))


@pytest.mark.parametrize(("wide", "shown_one"), [(1100, "wide"), (375, "narrow")])
def test_arrow_keys_change_widths_numbers_and_sum(shown: Any, wide: int, shown_one: str) -> None:
    page = shown(made(), wait=".av-keys", width=wide)
    assert page.locator("svg.av-wide, svg.av-narrow").evaluate_all(
        "all => all.filter(one => one.checkVisibility()).map(one => one.classList.value)"
    ) == [f"av-{shown_one}"]
    unit = width(page, "loss.grad")
    assert width(page, "part1") == pytest.approx(16 * unit)
    page.get_by_role("slider", name="x₁").press("ArrowLeft")
    assert width(page, "part1") == pytest.approx(4 * unit)
    assert page.locator(".av-says").inner_text().endswith("w.grad = −8")
    page.get_by_role("slider", name="w", exact=True).press("ArrowRight")
    assert width(page, "part1") == width(page, "part2") == 0
    assert page.get_by_role("slider", name="w", exact=True).get_attribute("aria-valuetext") == "w = 2"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_dragging_the_weight_in_the_picture_snaps_to_recorded_values(shown: Any) -> None:
    page = shown(made(), wait=".av-keys", width=1100)
    box = page.locator("[data-drag=w]:visible").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 30, y)
    assert page.locator(".av-says").inner_text().endswith("w.grad = 20")
    page.mouse.move(x + 900, y)
    page.mouse.up()
    page.mouse.move(x, y)
    assert page.get_by_role("slider", name="w", exact=True).get_attribute("aria-valuetext") == "w = 3"


@pytest.mark.parametrize("wide", [1100, 375])
def test_no_text_touches_the_border_of_its_box(shown: Any, wide: int) -> None:
    page = shown(streams(run, [3.8], [4.0], (3.8, 4.0)), wait=".av-keys", width=wide)
    room = page.locator("g[transform]:visible").evaluate_all("""all => all.map(box => {
        const {left, right, top, bottom} = box.querySelector("rect").getBoundingClientRect();
        const edges = [...box.querySelectorAll("text")].map(text => text.getBoundingClientRect());
        return Math.min(...edges.map(one => Math.min(one.left - left, right - one.right, one.top - top,
            bottom - one.bottom)));
    })""")
    assert len(room) == 16
    assert min(room) >= 1.5
