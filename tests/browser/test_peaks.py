"""A step's memory: as data, and as a reader moves it by K, checkpoints, the line of a GPU, and the operation."""

from typing import Any

import pytest

from accumviz.book.memory import Moment, Peaks
from tests.browser.frames import drag, drawn, middle

MIB = 2**20


def step(*forward: int) -> list[Moment]:
    """A step whose forward leaves so many MiB after each operation, above weights of one MiB."""
    run = [Moment("mm", "forward", 1, (MIB, 0, 0, mib * MIB, 0, 0)) for mib in forward]
    return [*run, Moment("step", "step", 0, (MIB, 0, MIB, 0, 0, 0))]


def peaks() -> Peaks:
    runs = {(2, False): step(4, 4), (1, False): step(3, 8), (1, True): step(2, 2), (2, True): step(1, 1)}
    return Peaks(runs, gpu=6 * MIB)


def test_runs_travel_without_checkpoints_first_and_by_k() -> None:
    content = peaks().content
    assert content["ks"] == [1, 2]
    assert content["runs"] == [[step(3, 8), step(4, 4)], [step(2, 2), step(1, 1)]]


@pytest.mark.parametrize("width", [375, 1280])
def test_k_checkpoints_and_the_line_decide_what_fits(shown: Any, width: int) -> None:
    page = shown(peaks(), wait=".av-tide", width=width)
    says = page.locator(".av-says")
    assert (
        says.inner_text()
        == "K = 1 runs out of memory. Your GPU holds 6.0 MiB: K\u00a0≥\u00a02 fits; with checkpoints every K fits."
    )
    chosen = page.locator(".av-chosen")
    high = chosen.bounding_box()["height"]
    page.get_by_role("slider", name="K,").press("ArrowRight")
    assert says.inner_text().startswith("K = 2 fits.")
    assert chosen.bounding_box()["height"] < high - 50
    page.get_by_role("slider", name="K,").press("ArrowLeft")
    page.get_by_role("switch").check()
    assert says.inner_text().startswith("K = 1 fits.")
    page.get_by_role("slider", name="your GPU").fill("8")
    assert page.locator("label", has_text="your GPU").locator("output").inner_text() == "1.0 MiB"
    assert "Your GPU holds 1.0 MiB: no K fits; with checkpoints no K fits." in says.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_line_is_dragged_and_what_is_above_it_has_another_colour(shown: Any) -> None:
    page = shown(peaks(), wait=".av-tide", width=1280)
    room = page.locator("clipPath rect")
    before = float(room.get_attribute("height"))
    drag(page, middle(page.locator(".av-gpu-name")), 0, -130)
    assert float(room.get_attribute("height")) < before - 200
    assert page.locator(".av-says strong").inner_text() == "K = 1 fits."


def test_each_operation_says_what_is_alive(shown: Any) -> None:
    page = shown(peaks(), wait=".av-tide", width=1280)
    assert page.locator(".av-at").inner_text() == "micro-batch 1 of 1, forward, after mm: 9.0 MiB alive"
    page.get_by_role("slider", name="operation").press("End")
    drawn(page)
    assert page.locator(".av-at").inner_text() == "step, after step: 2.0 MiB alive"
    box = page.locator(".av-plot").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] - 5)
    assert "4.0 MiB alive" in page.locator(".av-at").inner_text()
    assert "saved tensors 3.0 MiB" in page.locator(".av-legend").inner_text()


def test_each_phase_has_its_colour_in_the_legend_and_no_band_has_it_too(shown: Any) -> None:
    page = shown(peaks(), wait=".av-tide", width=1280)
    look = "all => all.map(one => getComputedStyle(one).background)"
    legend = page.locator(".av-legend i").evaluate_all(look)
    assert len({*legend}) == len(legend) == 10
    assert {*page.locator(".av-strip span").evaluate_all(look)} <= {*legend[6:]}
