"""The chain rule's picture: how wide its streams are and where they meet, and how a reader moves it."""

import re
from typing import Any

import pytest

from accumviz.book.streams import Streams
from tests.browser.frames import middle


def run(w: float, x: float) -> dict[str, float]:
    """The numbers of one backward, worked out by hand."""
    numbers = {"x1": x, "w": w, "loss": 0.0, "loss.grad": 1.0, "w.grad": 0.0}
    for sample, value in (("1", x), ("2", 2.0)):
        error = (2 - w) * value
        result = {"y": w * value, "e": error, "q": error**2, "y.grad": -error, "e.grad": error, "q.grad": 0.5}
        result |= {"y.by": value, "e.by": -1.0, "q.by": 2 * error, "loss.by": 0.5}
        for name, number in result.items():
            head, dot, tail = name.partition(".")
            numbers[f"{head}{sample}{dot}{tail}"] = number
        numbers[f"part{sample}"] = -error * value
        numbers["loss"] += error**2 / 2
        numbers["w.grad"] -= error * value
    return numbers


def made() -> Streams:
    return Streams({(w, x): run(w, x) for w in (1.0, 2.0, 3.0) for x in (2.0, 4.0)}, (1.0, 4.0))


picture = pytest.fixture(made, name="picture")


def widths(picture: Streams, kind: str) -> dict[str, float]:
    drawing = picture.to_html().partition(f'class="av-{kind}"')[2].partition("</svg>")[0]
    return {name: float(width) for width, name in re.findall(r'stroke-width="([^"]+)" data-width="([^"]+)"', drawing)}


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_streams_are_as_wide_as_their_gradients_are_large(picture: Streams, kind: str) -> None:
    drawn = widths(picture, kind)
    unit = drawn["loss.grad"]
    assert {name: width / unit for name, width in drawn.items()} == pytest.approx(
        {name: abs(run(1.0, 4.0)[name]) for name in drawn}
    )
    assert len(drawn) == 9


@pytest.mark.parametrize(("kind", "across"), [("wide", "height"), ("narrow", "width")])
def test_no_stream_of_chapter_1_is_wider_than_the_boxes_that_it_joins(kind: str, across: str) -> None:
    widest = Streams({(0.0, 5.0): run(0.0, 5.0)}, (0.0, 5.0))
    drawn = widths(widest, kind)
    drawing = widest.to_html().partition(f'class="av-{kind}"')[2].partition("</svg>")[0]
    chip, card = (
        float(re.findall(rf'class="av-{box}"[^<]*<rect[^>]* {across}="(\d+)"', drawing)[0]) for box in ("chip", "card")
    )
    assert drawn["part1"] <= chip
    assert drawn["part1"] + drawn["part2"] <= card


def test_two_streams_meet_side_by_side(picture: Streams) -> None:
    drawing = picture.to_html().partition('class="av-wide"')[2].partition("</svg>")[0]
    first, second = (float(y) for y in re.findall(r'class="av-of." d="M107\S* (\S+?)L', drawing))
    drawn = widths(picture, "wide")
    assert second - first == pytest.approx((drawn["part1"] + drawn["part2"]) / 2)


def test_a_row_for_each_run_begins_where_the_picture_does(picture: Streams) -> None:
    content = picture.content
    assert [size for *_, size in content["axes"]] == [3, 2]
    w, x = content["start"]
    row = content["rows"][w * 2 + x]
    assert dict(zip(content["names"], row, strict=True)) == run(1.0, 4.0)


def test_only_the_weight_keeps_what_arrives_in_its_grad(picture: Streams) -> None:
    drawing = picture.to_html().partition('class="av-wide"')[2].partition("</svg>")[0]
    assert re.findall(r'\.grad <tspan data-number="([^"]+)"', drawing) == ["w.grad"]


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
    x, y = middle(page.locator("[data-drag=w]:visible"))
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
    page = shown(Streams({(3.8, 4.0): run(3.8, 4.0)}, (3.8, 4.0)), wait=".av-keys", width=wide)
    room = page.locator("g[transform]:visible").evaluate_all("""all => all.map(box => {
        const {left, right, top, bottom} = box.querySelector("rect").getBoundingClientRect();
        const edges = [...box.querySelectorAll("text")].map(text => text.getBoundingClientRect());
        return Math.min(...edges.map(one => Math.min(one.left - left, right - one.right, one.top - top,
            bottom - one.bottom)));
    })""")
    assert len(room) == 16
    assert min(room) >= 1.5
