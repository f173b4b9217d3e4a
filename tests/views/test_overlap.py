"""The lanes of two ranks as data: which bucket a layer is in, when a rank waits, and what stands there unscripted."""

import pytest

from accumviz.book.overlap import Note, Overlap, overlap

MIB = 2**20


def notes(late: float = 0.0, *, quiet: bool = False) -> list[Note]:
    """Two micro-batches of two layers, a bucket for each; each all-reduce takes 3 ms, everything else 1."""
    found: list[Note] = []
    now = late
    for k in (0, 1):
        synced = k == 1 or not quiet
        found += [("forward", k, now), ("backward", k, now + 0.001), ("gradient", 1, now + 0.002)]
        if synced:
            found.append(("launch", 0, now + 0.002))
        found.append(("gradient", 0, now + 0.003))
        now += 0.003
        if synced:
            found += [("launch", 1, now), ("reduced", 0, now + 0.002), ("reduced", 1, now + 0.003)]
            now += 0.003
        found.append(("end", k, now))
    return [*found, ("step", 0, now + 0.001)]


def one_bucket(late: float = 0.0, *, quiet: bool = False) -> list[Note]:
    """The same, but all gradients in one bucket: its all-reduce begins with the last gradient."""
    return [note for note in notes(late, quiet=quiet) if note[:2] not in (("launch", 0), ("reduced", 0))]


def made() -> Overlap:
    runs = {}
    for quiet in (False, True):
        runs[1, quiet] = [notes(quiet=quiet), notes(0.001, quiet=quiet)]
        runs[2, quiet] = [one_bucket(quiet=quiet), one_bucket(0.001, quiet=quiet)]
    return Overlap(runs, (1, False), MIB)


picture = pytest.fixture(made, name="picture")


def test_a_window_is_counted_from_the_first_rank_s_start_to_the_last_one_s_end(picture: Overlap) -> None:
    assert picture.seconds((1, False)) == pytest.approx(0.014)
    assert picture.counts((1, False)) == (4, 4 * MIB, pytest.approx(0.006))
    assert picture.counts((1, True)) == (2, 2 * MIB, pytest.approx(0.003))


def test_a_gradient_has_the_colour_of_its_bucket_in_a_backward_that_sends_nothing_too(picture: Overlap) -> None:
    marks = {mark.name: mark for mark in picture.marks((1, True))}
    assert marks["gradient 0 0 1"].look == marks["reduce 0 1 0"].look.replace("reduce", "gradient") == "gradient even"
    assert marks["gradient 0 0 0"].look == "gradient odd"
    assert "reduce 0 0 0" not in marks and "wait 0 0 0" not in marks
    assert marks["silent 2 0"].label == "nothing is sent"


def test_all_windows_share_one_axis_and_an_all_reduce_ends_after_it_began(picture: Overlap) -> None:
    marks = {mark.name: mark for mark in picture.marks((1, False))}
    sent = marks["reduce 0 0 0"]
    assert (sent.left, sent.width) == (pytest.approx(100 * 2 / 14), pytest.approx(100 * 3 / 14))
    assert marks["gradient 0 0 0"].left == pytest.approx(sent.left), "layer 0 is computed meanwhile"
    assert marks["other"].left == pytest.approx(100 * 11 / 14), "where the window with no_sync ends"


def test_the_window_of_median_length_is_shown_of_a_setting() -> None:
    slow, slower = ([(what, which, times * at) for what, which, at in notes()] for times in (2, 5))
    ranks = [{(1, quiet): [slower, notes(quiet=quiet), slow] for quiet in (False, True)} for _ in range(2)]
    assert overlap(ranks, start=(1, False), layer=MIB).seconds((1, False)) == pytest.approx(0.026)


def test_without_scripts_a_sentence_says_what_a_window_of_each_setting_sends(picture: Overlap) -> None:
    text = picture.to_html().partition("<script")[0]
    assert "<li>bucket_cap_mb 1, without no_sync: 4 all-reduces, 4 MiB of gradients. The window takes 14 ms" in text
    assert "with no_sync: 2 all-reduces, 2 MiB of gradients. The window takes 11 ms; in 3 of them" in text
