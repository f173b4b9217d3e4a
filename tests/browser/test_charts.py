"""Timelines and ledgers on a phone: whole, with letters that can be read, and none on another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.figure import PageFigure
from accumviz.views.timeline import timeline
from tests.browser.frames import drawn
from tests.browser.written import written
from tests.views.test_timeline import large

Open = Callable[..., Any]
# What a reader meets of the drawing that is shown: its letters' sizes in pixels, and words that meet or leave it.
SEEN = """() => {
    const svg = [...document.querySelectorAll('.av-figure')].find(one => one.checkVisibility());
    const edge = svg.getBoundingClientRect(), scale = edge.width / svg.viewBox.baseVal.width;
    const words = [...svg.querySelectorAll('text')].map(text => ({
        said: text.textContent, size: scale * parseFloat(getComputedStyle(text).fontSize),
        box: text.getBoundingClientRect()}));
    const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
        && one.top < other.bottom - 1 && other.top < one.bottom - 1;
    return {
        small: words.filter(({size}) => size < 10.99).map(({said, size}) => `${said}: ${size}`),
        beyond: words.filter(({box}) => box.left < edge.left - 1 || box.right > edge.right + 1
            || box.top < edge.top - 3 || box.bottom > edge.bottom + 3).map(({said}) => said),
        met: words.flatMap((one, n) => words.slice(n + 1).filter(other => meet(one.box, other.box))
            .map(other => `${one.said} on ${other.said}`)),
    };
}"""


def events() -> PageFigure:
    rows = [
        {"kind": kind, "label": "loss", "grad": {"w": -1.234 - n}, "contribution": {"w": -1.0}}
        for n, kind in enumerate(["backward", "step"] * 6)
    ]
    return timeline(Ledger.build([Parameter("w", (1,))], rows))


def test_a_timeline_is_read_on_a_phone_without_moving_it(watch: Open, tmp_path: Path) -> None:
    page = watch(width=375).page
    page.goto(written(tmp_path / "page.html", events()))
    page.add_style_tag(
        content=".av-scroll { width: 321px; } .accumviz svg { max-width: none; }"
    )  # as in the answer to a prediction
    drawn(page)
    assert page.locator(".av-scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
    assert page.evaluate(SEEN) == {"small": [], "beyond": [], "met": []}
    assert page.locator(".av-figure:visible").count() == 1
    page.set_viewport_size({"width": 1280, "height": 900})
    assert [page.locator(f".av-{name}").is_visible() for name in ("wide", "narrow")] == [True, False]


@pytest.mark.parametrize(("events", "moved"), [(22, False), (60, True)])
def test_a_timeline_is_moved_on_a_phone_only_where_columns_have_no_room(
    events: int, moved: bool, watch: Open, tmp_path: Path
) -> None:
    page = watch(width=375).page
    page.goto(written(tmp_path / "page.html", timeline(large(events, 3))))
    drawn(page)
    assert page.locator(".av-scroll").evaluate("box => box.scrollWidth > box.clientWidth") == moved
    shown = page.locator(".av-figure:visible text").all_text_contents()
    assert ".grad after the event" in shown


def test_a_ledger_on_a_phone_shows_its_numbers_without_being_moved(watch: Open, tmp_path: Path) -> None:
    said = "(loss_on(weights, batch) / 2).backward()"
    row = {"kind": "backward", "label": "loss_on(weights, batch) / 2", "line": 3, "source": said}
    rows = [row | {"contribution": {"w": -16.25}, "grad": {"w": -16.25 - n}} for n in range(2)]
    page = watch(width=375).page
    page.goto(written(tmp_path / "page.html", Ledger.build([Parameter("w", (1,))], rows)))
    drawn(page)
    edge = page.locator(".av-scroll").evaluate("box => box.getBoundingClientRect().left + box.clientWidth")
    cells = page.locator("thead th:has-text('contribution'), thead th:has-text('.grad'), th.av-name, td.av-n")
    assert cells.count() == 7
    for cell in cells.all():
        place = cell.bounding_box()
        assert place and place["x"] + place["width"] < edge, cell.inner_text()
