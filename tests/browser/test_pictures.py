"""Every great picture of the chapters, from a file: on a phone, in the dark, on paper, and without scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.written import written
from tests.views.test_opening import made as opening
from tests.views.test_overlap import made as overlap
from tests.views.test_peaks import peaks
from tests.views.test_plumbing import made as plumbing
from tests.views.test_sharding import made as sharding
from tests.views.test_streams import made as streams

Open = Callable[..., Any]


# What makes a picture; what is there once its script has run; its drawing.
PICTURES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "the opening": (opening, ".av-hero", ".av-hero svg"),
    "the chain rule": (streams, ".av-keys", "svg.av-wide, svg.av-narrow"),
    "the peaks of memory": (peaks, ".av-tide", "svg"),
    "the pipes of a GAN": (plumbing, ".av-plumbing[data-stands]", ".av-pipes"),
    "the lanes of two ranks": (overlap, ".av-hero", ".av-network .av-reduce"),
    "the stripes of two ranks": (sharding, ".av-sharding [type=range]", ".av-map svg"),
}
# Words of fewer pixels than 13, or than 11 in code; what has no size is said by a title.
SMALL = """all => all.filter(one => {
    const size = parseFloat(getComputedStyle(one).fontSize), least = one.closest("pre, code") ? 11 : 13;
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    return own && one.matches("p, span, b, label, output, td") && size > 0 && size < least;
}).map(one => one.outerHTML.slice(0, 90))"""
CONTROLS = "[type=range]:visible, .av-keys:visible"


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize(("width", "look"), [(375, "dark"), (1000, "light")])
def test_a_picture_fits_its_page_quietly_with_letters_that_can_be_read(
    name: str, width: int, look: str, show: Open
) -> None:
    make, ready, _ = PICTURES[name]
    watched = show(make(), wait=ready, width=width, mode=look)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    assert watched.page.locator(".accumviz :visible").evaluate_all(SMALL) == []
    assert watched.complaints == watched.foreign == []


@pytest.mark.parametrize("name", PICTURES)
def test_on_paper_a_picture_stands_with_its_words_and_without_controls(name: str, shown: Open) -> None:
    make, ready, drawing = PICTURES[name]
    page = shown(make(), wait=ready)
    page.emulate_media(media="print")
    assert page.locator(drawing).locator("visible=true").count()
    assert page.locator(".av-words").first.is_visible()
    assert page.locator(CONTROLS).count() == 0


@pytest.mark.parametrize("name", PICTURES)
def test_without_scripts_a_picture_is_its_words_and_nothing_that_could_be_moved(
    name: str, watch: Open, tmp_path: Path
) -> None:
    page = watch(java_script_enabled=False).page
    page.goto(written(tmp_path / "page.html", PICTURES[name][0]()))
    assert page.locator(".av-words").is_visible()
    assert page.locator("input:visible, button:visible").count() == 0
