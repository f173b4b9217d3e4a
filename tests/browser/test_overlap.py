"""The lanes of two ranks, as a reader meets them: the switch, the slider, and what a box says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accumviz.book.overlap import Overlap
from tests.browser.written import written
from tests.views.test_overlap import MIB, notes

Open = Callable[..., Any]
LEFT = "all => all.map(one => one.getBoundingClientRect().left)"


def one_bucket(late: float = 0.0, *, quiet: bool = False) -> list[Any]:
    """The same, but all gradients in one bucket: its all-reduce begins with the last gradient."""
    return [note for note in notes(late, quiet=quiet) if note[:2] not in (("launch", 0), ("reduced", 0))]


@pytest.fixture
def page(watch: Open, tmp_path: Path) -> Callable[..., Any]:
    runs = {}
    for quiet in (False, True):
        runs[1, quiet] = [notes(quiet=quiet), notes(0.001, quiet=quiet)]
        runs[2, quiet] = [one_bucket(quiet=quiet), one_bucket(0.001, quiet=quiet)]

    def open_page(**options: Any) -> Any:
        watched = watch(reduced_motion="reduce", **options)
        watched.page.goto(written(tmp_path / "page.html", Overlap(runs, (1, False), MIB)))
        watched.page.locator(".av-hero").wait_for()
        return watched

    return open_page


def test_no_sync_empties_the_network_until_the_last_micro_batch(page: Open, mode: str) -> None:
    watched = page(mode=mode)
    found = watched.page
    sent = found.locator(".av-network .av-reduce:visible")
    assert sent.count() == 8
    before = min(sent.evaluate_all(LEFT))
    found.get_by_role("switch", name="no_sync").press("Space")
    assert sent.count() == 4
    assert min(sent.evaluate_all(LEFT)) > before + 100
    assert "2 all-reduces, 2 MiB" in found.locator(".av-says").inner_text()
    assert watched.complaints == [] and watched.foreign == []


def test_a_larger_bucket_starts_its_all_reduce_after_the_last_gradient(page: Open) -> None:
    found = page().page
    sent, computed = found.locator(".av-network .av-reduce:visible"), found.locator(".av-compute .av-gradient:visible")
    assert sent.evaluate_all(LEFT)[0] < computed.evaluate_all(LEFT)[1] + 1, "while the next gradient is computed"
    found.get_by_role("slider", name="bucket_cap_mb").press("ArrowRight")
    assert found.locator("output").inner_text() == "2 MiB"
    assert sent.count() == 4
    assert sent.evaluate_all(LEFT)[0] > computed.evaluate_all(LEFT)[1] + 10


def test_a_box_says_what_it_is_when_it_is_pointed_at(page: Open) -> None:
    found = page().page
    found.locator(".av-compute .av-gradient:visible").first.hover()
    assert (
        found.locator(".av-points").inner_text() == "1 to 2 ms, rank 0: the gradient of layer 1, which is in bucket 0"
    )


@pytest.mark.parametrize("width", [375, 1000])
def test_the_lanes_fit_the_page_with_letters_that_can_be_read(page: Open, width: int) -> None:
    found = page(width=width).page
    assert found.evaluate("document.documentElement.scrollWidth") <= width
    sizes = found.locator(".av-lanes b:visible, .av-legend, .av-points").evaluate_all(
        "all => all.filter(one => one.textContent).map(one => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 13


def test_on_paper_the_picture_stands_above_its_words(page: Open) -> None:
    found = page(java_script_enabled=True).page
    found.emulate_media(media="print")
    assert found.locator(".av-network .av-reduce:visible").count() == 8
    assert found.locator(".av-overlap .av-words").is_visible()
    assert not found.locator(".av-keys").is_visible()
