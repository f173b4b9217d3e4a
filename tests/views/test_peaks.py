"""The picture of a step's memory as data: the order in which its runs travel, and the words for its peaks."""

from accumviz.book.memory import Moment, Peaks

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


def test_without_scripts_a_sentence_says_each_peak() -> None:
    text = peaks().to_html().partition("<script")[0]
    assert "<li>K = 1: at most 9 MiB are alive, with checkpoints 3 MiB.</li><li>K = 2: at most 5 MiB" in text
