"""The lanes of two ranks, as a reader meets them: the switch, the slider, and what a box says."""

from typing import Any

import pytest

from tests.views.test_overlap import made

LEFT = "all => all.map(one => one.getBoundingClientRect().left)"


@pytest.fixture
def page(shown: Any) -> Any:
    return shown(made(), wait=".av-hero", reduced_motion="reduce")


def test_no_sync_empties_the_network_until_the_last_micro_batch(page: Any) -> None:
    sent = page.locator(".av-network .av-reduce:visible")
    assert sent.count() == 8
    before = min(sent.evaluate_all(LEFT))
    page.get_by_role("switch", name="no_sync").press("Space")
    assert sent.count() == 4
    assert min(sent.evaluate_all(LEFT)) > before + 100
    assert "2 all-reduces, 2 MiB" in page.locator(".av-says").inner_text()


def test_a_larger_bucket_starts_its_all_reduce_after_the_last_gradient(page: Any) -> None:
    sent, computed = page.locator(".av-network .av-reduce:visible"), page.locator(".av-compute .av-gradient:visible")
    assert sent.evaluate_all(LEFT)[0] < computed.evaluate_all(LEFT)[1] + 1, "while the next gradient is computed"
    page.get_by_role("slider", name="bucket_cap_mb").press("ArrowRight")
    assert page.locator("output").inner_text() == "2 MiB"
    assert sent.count() == 4
    assert sent.evaluate_all(LEFT)[0] > computed.evaluate_all(LEFT)[1] + 10


def test_a_box_says_what_it_is_when_it_is_pointed_at(page: Any) -> None:
    page.locator(".av-compute .av-gradient:visible").first.hover()
    assert page.locator(".av-points").inner_text() == "1 to 2 ms, rank 0: the gradient of layer 1, which is in bucket 0"


def test_no_line_lies_on_words_and_none_of_them_is_cut_on_a_phone(shown: Any) -> None:
    page = shown(made(), wait=".av-hero", reduced_motion="reduce", width=375)
    over = """all => all.map(one => {
        const {left, right, top, bottom} = one.getBoundingClientRect();
        const frame = one.closest(".av-hero").getBoundingClientRect(), line = document.querySelector(".av-other");
        line.style.left = `${(left + right) / 2 - line.parentElement.getBoundingClientRect().left - 1}px`;
        const hit = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
        return hit === line || left < frame.left || right > frame.right ? one.textContent : "";
    }).filter(Boolean)"""
    words = page.locator(".av-lane b:visible")
    for _ in range(2):
        page.locator(".av-lanes").scroll_into_view_if_needed()
        assert words.evaluate_all(over) == []
        page.get_by_role("switch", name="no_sync").press("Space")


def test_no_two_entries_of_the_legend_look_alike(page: Any) -> None:
    looks = page.locator(".av-legend > span").evaluate_all(
        "all => all.map(one => getComputedStyle(one.firstChild).background + getComputedStyle(one.firstChild).border)"
    )
    assert len({*looks}) == len(looks) == 3
