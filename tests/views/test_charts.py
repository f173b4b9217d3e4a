"""A chart that says nothing of colours and letters is at home on every page."""

import re
import xml.etree.ElementTree as ET

from accumviz.book.charts import ThemedFigure


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
