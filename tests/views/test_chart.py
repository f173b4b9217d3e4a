"""What was measured, as a reader sees it: where each run was made, every number in words, nothing unescaped."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from accumviz.book.chart import amount, measured_html
from accumviz.book.measurements import Measured, Measurement
from accumviz.views import style

MADE: dict[str, Any] = {"torch": "0.0.1", "cuda": "0.1", "date": "2026-01-02", "commit": "0123456789abcdef"}
FLAT = {"full batch": 2e-6, "64 micro-batches": 8e-6}
TWICE = {row: 2 * value for row, value in FLAT.items()}
CURVES = {
    "full batch": {"allocated": [math.nan] * 3, "saved": [4096.0, math.nan, math.nan]},
    "micro-batches": {"allocated": [math.nan] * 3, "saved": [1024.0, 2048.0, math.nan]},
}


def text(html: str) -> str:
    html = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)).strip()


def rows(html: str) -> list[str]:
    return [text(row) for row in re.findall(r"<tr>.*?</tr>", html)]


def widths(html: str) -> dict[str, list[float]]:
    """The bars, by colour, in the order of their rows."""
    body = html[html.index("<tbody>") :]
    found = re.findall(r'<rect x="0" y="\d+" width="([\d.]+)"[^>]*fill="(#\w+)"', body)
    return {color: [float(width) for width, fill in found if fill == color] for _, color in found}


def test_without_a_recording_the_cpu_run_stands_alone_and_nothing_is_promised() -> None:
    html = measured_html(Measured("a/b", Measurement(FLAT, torch="0.0.1"), unit="s"))
    assert "this run: CPU · torch 0.0.1" in text(html)
    assert "GPU" not in text(html)
    assert rows(html) == ["CPU × “full batch”", "full batch 2 µs 1", "64 micro-batches 8 µs 4"]


def test_a_recording_stands_in_front_with_its_chip_and_a_measure_of_its_own() -> None:
    html = measured_html(
        Measured("a/b", Measurement(FLAT), Measurement(TWICE, gpu="test device", **MADE, settings={"width": 64}), "s")
    )
    told = text(html)
    chip = "recorded: test device · CUDA 0.1 · torch 0.0.1 · 2026-01-02 · commit 0123456 · width 64"
    assert told.index(chip) < told.index("this run: CPU")
    assert "not recorded" not in told
    assert html.count("<table") == 2
    heads = [row for row in rows(html) if "full batch”" in row]
    assert heads == ["test device × “full batch”", "CPU × “full batch”"]
    first, second = widths(html).values()
    assert first == pytest.approx(second)


def test_two_gpus_share_one_measure_so_that_their_bars_compare() -> None:
    here = Measurement(FLAT, gpu="another test device")
    html = measured_html(Measured("a/b", here, Measurement(TWICE, gpu="test device", **MADE), "s"))
    recorded, this = (widths(html)[color] for color in style.CYCLE[:2])
    assert recorded == pytest.approx([2 * width for width in this], rel=0.01)


def test_a_gpu_without_a_recording_is_not_called_unrecorded() -> None:
    assert "not recorded" not in measured_html(Measured("a/b", Measurement(FLAT, gpu="test device")))


def test_two_runs_on_one_kind_of_gpu_are_told_apart() -> None:
    html = measured_html(
        Measured("a/b", Measurement(FLAT, gpu="test device"), Measurement(TWICE, gpu="test device", **MADE))
    )
    assert rows(html)[0] == "recorded × “full batch” this run × “full batch”"


def test_series_of_single_numbers_are_rows_of_their_row() -> None:
    values = {"`av.record`": {"handed over": 0.001, "done": 0.25}, "`item`": {"handed over": math.nan, "done": 2.0}}
    html = measured_html(Measured("a/b", Measurement(values), unit="s"))
    assert rows(html)[1:] == ["av.record handed over 1 ms", "done 250 ms", "item handed over –", "done 2 s"]
    assert "<code>av.record</code>" in html
    assert html.count('rowspan="2"') == 2


def test_a_series_that_no_run_has_is_no_row_and_is_named_below() -> None:
    values = {"detach": {"saved": 1024.0, "peak": math.nan}, "recompute": {"saved": 2048.0, "peak": math.nan}}
    html = measured_html(Measured("a/b", Measurement(values), unit="bytes"))
    assert rows(html)[1:] == ["detach saved 1 KiB", "recompute saved 2 KiB"]
    assert "Not measured on this device: peak." in text(html)
    there = {row: {"saved": 1024.0, "peak": 4096.0} for row in values}
    html = measured_html(Measured("a/b", Measurement(values), Measurement(there, gpu="test device", **MADE), "bytes"))
    assert rows(html)[1:3] == ["detach saved 1 KiB", "peak 4 KiB"]
    assert rows(html)[-2:] == ["detach saved 1 KiB", "recompute saved 2 KiB"]


def test_curves_say_their_measure_their_most_and_every_number_in_words() -> None:
    html = measured_html(Measured("a/b", Measurement(CURVES), unit="bytes"))
    assert rows(html) == ["CPU 0 to 4 KiB, over 3 values saved, at most", "full batch 4 KiB", "micro-batches 2 KiB"]
    assert "this run, micro-batches, saved: 1 KiB, 2 KiB, –" in text(html)
    assert "Not measured on this device: allocated." in text(html)


def test_a_level_is_as_high_as_its_number_and_a_gap_is_no_line() -> None:
    html = measured_html(Measured("a/b", Measurement(CURVES), unit="bytes"))
    lines = re.findall(r'<polyline points="([^"]+)" fill="none" stroke="#', html)
    points = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    assert [len(line) for line in points] == [2, 4]
    bottom = 44.0
    heights = [bottom - line[i][1] for line in points for i in range(0, len(line), 2)]
    assert [round(height / heights[0], 2) for height in heights] == [1, 0.25, 0.5]
    assert points[1][-1][0] == pytest.approx(2 * points[0][-1][0], abs=0.2)


def test_what_a_run_says_is_computed_from_its_own_values() -> None:
    def says(values: Any) -> str:
        return f"{values['64 micro-batches'] / values['full batch']:.0f} times"

    other = {"full batch": 1.0, "64 micro-batches": 9.0}
    html = measured_html(Measured("a/b", Measurement(FLAT), Measurement(other, gpu="test device", **MADE), "s", says))
    assert "test device: 9 times CPU: 4 times" in text(html)


def test_a_hostile_recording_is_text() -> None:
    evil = '"><script>alert(1)</script>\u202e'
    made = {**MADE, "gpu": evil, "settings": {evil: 1.0}}
    html = measured_html(
        Measured("a/b", Measurement({evil: {evil: [1.0, 2.0]}}), Measurement({evil: {evil: [1.0, 2.0]}}, **made), evil)
    )
    assert "<script" not in html
    assert "\u202e" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf, -1.0])
def test_no_number_breaks_the_drawing(value: float) -> None:
    for values in ({"a": value, "b": value}, {"a": {"b": [value, value]}}):
        for recorded in (None, Measurement(values, gpu="test device", **MADE)):
            html = measured_html(Measured("a/b", Measurement(values), recorded, "s"))
            assert not re.search(r'(points|width|height)="[^"]*(nan|inf)', html)
            assert not re.search(r'width="-', html)


def test_drawings_are_hidden_from_who_cannot_see_them_as_the_table_says_it_all() -> None:
    html = measured_html(Measured("a/b", Measurement(CURVES), unit="bytes"))
    assert html.count("<svg") == html.count('aria-hidden="true"') > 0


def test_every_colour_is_the_page_s_own_or_one_of_the_palette() -> None:
    html = measured_html(Measured("a/b", Measurement(CURVES), Measurement(CURVES, gpu="test device", **MADE), "bytes"))
    drawn = set(re.findall(r'(?:fill|stroke)="([^"]+)"', html))
    assert drawn <= {"none", "currentColor", *style.CYCLE[:2]}
    page = html[html.index("</style>") :]
    assert "color:" not in page


def test_a_figure_is_saved_as_a_page(tmp_path: Path) -> None:
    Measured("a/b", Measurement(FLAT), unit="s").save(tmp_path / "speed.html")
    page = (tmp_path / "speed.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "full batch" in page


def test_a_notebook_gets_html_and_a_text_that_says_the_same() -> None:
    bundle = Measured("a/b", Measurement(FLAT), unit="s")._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "this run: CPU" in bundle["text/plain"]


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [(0.0, "s", "0 ns"), (1.5e-9, "s", "1.5 ns"), (0.9999, "s", "1000 ms"), (90.0, "s", "90 s"), (1e-3, "s", "1 ms")],
)
def test_seconds_have_a_unit_of_their_size(value: float, unit: str, written: str) -> None:
    assert amount(value, unit) == written
