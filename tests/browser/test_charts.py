"""Bars and lines that a chapter draws itself: in the colours of any page, and whole and readable on a phone."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accumviz.book.charts import ThemedFigure
from accumviz.ledger.ledger import Ledger
from accumviz.views.timeline import timeline
from tests.browser.frames import drawn
from tests.toys import W, backward, large


def plain() -> ThemedFigure:
    """Panels as matplotlib makes them, with a key."""
    figure = ThemedFigure(figsize=(8, 2), layout="constrained")
    figure.words = ["Two panels."]
    for axes in figure.subplots(1, 2, sharey=True):
        axes.plot([0, 1], label="a")
        axes.text(0.5, 0.5, "here")
        axes.set(title="one", xlabel="step", ylabel="loss")
        axes.set_xticks([0, 1], ["0.003", "1"])
        axes.legend()
    return figure


def test_nothing_of_a_chart_is_white_or_black_on_a_page_and_no_letter_too_small() -> None:
    svg = plain().to_svg()
    ET.fromstring(svg)
    found = re.findall(r"(?:fill|stroke): (#\w+)", svg)
    assert not {"#ffffff", "#000000"} & set(found)
    assert svg.count("currentColor") > 8, "the words"
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?[^;\"]*?([\d.]+)px", svg)]
    assert len(sizes) > 8
    assert min(sizes) == 11


def test_a_chart_whose_key_names_error_bars_is_drawn() -> None:
    figure = ThemedFigure(figsize=(8, 2), layout="constrained")
    axes = figure.subplots()
    axes.errorbar([1, 2], [1, 2], xerr=0.1, color="#1a1f26", label="guess")
    axes.legend()
    figure.words = ["Two numbers."]
    assert figure.to_html().count(">guess<") == 2, "wide, and for a phone"


def test_a_colour_that_was_chosen_stays() -> None:
    figure = plain()
    figure.axes[0].tick_params(axis="x", colors="#0072B2")
    figure.axes[0].title.set_color("#D55E00")
    svg = figure.to_svg().lower()
    assert "fill: #0072b2" in svg
    assert "fill: #d55e00" in svg


LONG = [f"the {what}, {n} micro-batches, K = {k}" for what in ("forty", "thousand") for n in (20, 100) for k in (1, 10)]
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


def chart(height: float, columns: int = 1, **shared: Any) -> tuple[ThemedFigure, Any]:
    figure = ThemedFigure(figsize=(9, height), layout="constrained")
    figure.words = ["What is drawn."]
    return figure, figure.subplots(1, columns, squeeze=False, **shared)[0]


def named_bars() -> ThemedFigure:
    figure, (axes,) = chart(0.5 + 0.42 * len(LONG))
    bars = axes.barh(range(len(LONG)), np.linspace(0.7, 1.47, len(LONG)), 0.6)
    axes.bar_label(bars, [f"{1.4 + n:.3f}" for n in range(len(LONG))], padding=4)
    axes.set(
        yticks=range(len(LONG)), yticklabels=LONG, xlim=(0, 1.5), xlabel="how far it is from the large batch's own"
    )
    return figure


def split_bars() -> ThemedFigure:
    figure, (axes,) = chart(2.4)
    for n, part in enumerate(("weights", "gradients", "the optimizer's own state", "and what else there is")):
        axes.barh(["SGD", "SGD with momentum", "AdamW"], 1, left=n, label=part)
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def curves_side_by_side() -> ThemedFigure:
    figure, panels = chart(2.9, 2, sharey=True)
    for axes, name in zip(panels, ("SGD", "Adam"), strict=True):
        for n in range(4):
            axes.plot(range(7), np.linspace(0, n, 7), label=f"K = {4**n}")
        axes.set_xticks(range(7), ["0.003", "0.006", "0.012", "0.025", "0.05", "0.1", "0.2"])
        axes.set(title=name, xlabel="learning rate")
    panels[0].set_ylabel("loss")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def named_columns() -> ThemedFigure:
    figure, (axes,) = chart(2)
    axes.bar(range(9), range(9))
    axes.set_xticks(range(9), ["backward", "clip"] * 4 + ["step"])
    return figure


def key_of_the_second() -> ThemedFigure:
    figure, panels = chart(2.9, 2, sharey=True)
    panels[0].scatter([0, 1], [0, 1])
    panels[1].scatter([0, 1], [0, 1], label="64 at once")
    panels[1].scatter([0, 1], [1, 0], label="a window of 8 × 8")
    for axes, name in zip(panels, ("one micro-batch", "a window"), strict=True):
        axes.set(title=name, xlabel="one element")
    panels[1].legend()
    return figure


def events() -> ThemedFigure:
    rows = [backward(-1.0, -1.234 - n, kind=("backward", "step")[n % 2]) for n in range(12)]
    return timeline(Ledger.build([W], rows))


@pytest.mark.parametrize(
    "made", [named_bars, split_bars, curves_side_by_side, named_columns, key_of_the_second, events]
)
def test_a_chart_is_read_on_a_phone_without_moving_it(made: Callable[[], ThemedFigure], shown: Any) -> None:
    page = shown(made(), wait=".av-scroll", width=375)
    page.add_style_tag(
        content=".av-scroll { width: 321px; } .accumviz svg { max-width: none; }"
    )  # as in the answer to a prediction
    drawn(page)
    assert page.locator(".av-scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
    assert page.evaluate(SEEN) == {"small": [], "beyond": [], "met": []}
    assert page.locator(".av-figure:visible").count() == 1
    page.set_viewport_size({"width": 1280, "height": 900})
    assert [page.locator(f".av-{name}").is_visible() for name in ("wide", "narrow")] == [True, False]


def test_panels_are_stacked_as_wide_as_they_were_and_the_chart_itself_stays() -> None:
    figure = curves_side_by_side()
    before = figure.to_svg().count("<text")
    small = figure.for_phone()
    assert small is not None
    small.draw_without_rendering()
    first, second = small.axes
    assert first.get_position().y0 > second.get_position().y1, "they stand below each other"
    assert second.get_ylabel() == "loss"
    assert [label.get_visible() for label in second.get_yticklabels()] == [True] * len(second.get_yticks())
    assert len(small.legends) == 1
    assert figure.get_size_inches().tolist() == [9, 2.9]
    assert figure.to_svg().count("<text") == before
    four = chart(2, 4, sharey=True)[0].for_phone()
    assert four is not None
    assert [axes.get_subplotspec().colspan.start for axes in four.axes] == [0, 1, 0, 1]  # type: ignore[union-attr]
    assert ThemedFigure(figsize=(4.6, 3)).for_phone() is None, "it fits as it is"
    grid = ThemedFigure(figsize=(9, 4))
    grid.subplots(2, 4)
    small = grid.for_phone()
    assert small is not None and small.axes[0].get_gridspec().get_geometry() == (4, 2)
    assert small.get_figheight() == pytest.approx(8), "as many rows again, each as high as before"


@pytest.mark.parametrize(("events", "moved"), [(22, False), (60, True)])
def test_a_timeline_is_moved_on_a_phone_only_where_columns_have_no_room(events: int, moved: bool, shown: Any) -> None:
    page = shown(timeline(large(events, 3, ("d_loss", "g_loss"))), wait=".av-scroll", width=375)
    assert page.locator(".av-scroll").evaluate("box => box.scrollWidth > box.clientWidth") == moved
    assert ".grad after the event" in page.locator(".av-figure:visible text").all_text_contents()


def test_a_ledger_on_a_phone_shows_its_numbers_without_being_moved(shown: Any) -> None:
    said = "(loss_on(weights, batch) / 2).backward()"
    row = {"label": "loss_on(weights, batch) / 2", "line": 3, "source": said}
    rows = [backward(-16.25, -16.25 - n, **row) for n in range(2)]
    page = shown(Ledger.build([W], rows), wait=".av-scroll", width=375)
    edge = page.locator(".av-scroll").evaluate("box => box.getBoundingClientRect().left + box.clientWidth")
    cells = page.locator("thead th:has-text('contribution'), thead th:has-text('.grad'), th.av-name, td.av-n")
    assert cells.count() == 7
    for cell in cells.all():
        place = cell.bounding_box()
        assert place and place["x"] + place["width"] < edge, cell.inner_text()
