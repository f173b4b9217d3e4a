"""A chart that says nothing of colours and letters is at home on every page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from matplotlib import style

from accumviz.book.charts import ThemedFigure


def plain() -> ThemedFigure:
    """Panels as matplotlib makes them, with small letters, a key and a line in black."""
    figure = ThemedFigure(figsize=(8, 2), layout="constrained")
    figure.words = ["Two panels."]
    for axes in figure.subplots(1, 2, sharey=True):
        axes.plot([0, 1], label="a")
        axes.axhline(0.5, color="black")
        axes.text(0.5, 0.5, "here")
        axes.set(title="one", xlabel="step", ylabel="loss")
        axes.set_xticks([0, 1], ["0.003", "1"], fontsize=8)
        axes.legend(fontsize=9)
    return figure


@pytest.mark.parametrize("theme", ["default", "dark_background"])
def test_nothing_of_a_chart_is_white_or_black_on_a_page(theme: str) -> None:
    with style.context(theme):
        svg = plain().to_svg()
    ET.fromstring(svg)
    found = re.findall(r"(?:fill|stroke): (#\w+)", svg)
    assert not {"#ffffff", "#000000"} & set(found)
    assert svg.count("currentColor") > 8, "the words"


def test_no_letters_are_too_small_to_be_read() -> None:
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?[^;\"]*?([\d.]+)px", plain().to_svg())]
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


def test_numbers_on_an_axis_that_nobody_named_are_found() -> None:
    """Also on a phone, where panels stand below each other; a name that panels of a row share is one."""

    def found(chart: ThemedFigure) -> list[list[str]]:
        return [told.split(", ") for told in re.findall('data-nameless="([^"]*)"', chart.to_html())]

    chart = plain()
    assert found(chart) == []
    chart.axes[1].set_ylabel("")
    assert found(chart) == [], "its neighbour has one"
    chart.axes[0].set_ylabel("")
    chart.axes[1].set_xlabel(" ")
    assert found(chart)[0] == ["y of one", "x of one"]
    assert "y of one" in found(chart)[1], "on a phone"
    chart.axes[1].set_xticks([0, 1], ["before", "after"])
    assert found(chart)[0] == ["y of one"], "what is no number is its own name"
    chart.supylabel("loss")
    assert found(chart) == []
