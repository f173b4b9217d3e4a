"""The picture of a step's memory as data: the order in which its runs travel, and the words for its peaks."""

from __future__ import annotations

import re

from accumviz.book.peaks import Moment, Peaks

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


def test_without_scripts_curves_and_a_table_show_each_peak() -> None:
    text = peaks().to_html().partition("<script")[0]
    assert "K = 1: at most 9 MiB are alive, with checkpoints 3 MiB. K = 2: at most 5 MiB" in text
    assert "<td>1</td><td>9 MiB</td><td>3 MiB</td>" in text
    first, _ = re.findall(r'points="(.*?)"', text)
    assert first == "0.0,55.6 33.3,0.0 66.7,77.8", "4, 9 and 2 of 9 MiB"
