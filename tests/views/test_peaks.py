"""The picture of a step's memory as data: its columns, what fits into a device, and what stands there unscripted."""

from __future__ import annotations

import pytest

from accumviz.book.peaks import Moment, Peaks

MIB = 2**20


def step(*forward: int) -> list[Moment]:
    """A step whose forward leaves so many MiB after each operation, above weights of one MiB."""
    run = [Moment("mm", "forward", 1, (MIB, 0, 0, mib * MIB, 0, 0)) for mib in forward]
    return [*run, Moment("step", "step", 0, (MIB, 0, MIB, 0, 0, 0))]


@pytest.fixture
def figure() -> Peaks:
    runs = {(1, False): step(3, 8), (2, False): step(4, 4), (1, True): step(2, 2), (2, True): step(1, 1)}
    return Peaks(runs, gpu=6 * MIB)


def test_a_run_travels_as_columns_of_bytes_by_kind(figure: Peaks) -> None:
    (whole, _), _ = figure.content["runs"]
    assert [whole["names"][i] for i in whole["operation"]] == ["mm", "mm", "step"]
    assert [whole["phases"][i] for i in whole["phase"]] == ["forward", "forward", "step"]
    assert whole["part"] == [1, 1, 0]
    assert whole["alive"][3] == [3 * MIB, 8 * MIB, 0]


def test_what_fits_is_said_for_both_ways(figure: Peaks) -> None:
    assert figure.words == ["Without checkpoints K ≥ 2 fits into 6 MiB.", "With checkpoints K ≥ 1 fits into 6 MiB."]
    figure.gpu = MIB
    assert figure.words[0] == "Without checkpoints no K fits into 1 MiB."


def test_without_scripts_a_drawing_and_a_table_say_the_same(figure: Peaks) -> None:
    text = figure.to_html().partition("<script")[0]
    assert text.count("<polyline") == 4
    assert "K = 1: 9 MiB" in text
    assert "<td>2</td><td>5 MiB</td><td>2 MiB</td>" in text
