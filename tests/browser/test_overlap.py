"""The lanes of two ranks: as data, and as a reader meets them, with their switch, their slider and their boxes."""

from typing import Any

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
    assert (sent.top, sent.height) == (0, 50), "a row for each of two buckets"
    assert marks["gradient 0 0 0"].left == pytest.approx(sent.left), "layer 0 is computed meanwhile"
    assert marks["other"].left == pytest.approx(100 * 11 / 14), "where the window with no_sync ends"


def test_the_window_of_median_length_is_shown_of_a_setting() -> None:
    slow, slower = ([(what, which, times * at) for what, which, at in notes()] for times in (2, 5))
    ranks = [{(1, quiet): [slower, notes(quiet=quiet), slow] for quiet in (False, True)} for _ in range(2)]
    assert overlap(ranks, start=(1, False), layer=MIB).seconds((1, False)) == pytest.approx(0.026)


LEFT = "all => all.map(one => one.getBoundingClientRect().left)"


@pytest.fixture
def page(shown: Any) -> Any:
    return shown(made(), wait=".av-hero", reduced_motion="reduce")


def test_no_sync_empties_the_network_until_the_last_micro_batch(page: Any) -> None:
    sent = page.locator(".av-network .av-reduce:visible")
    assert sent.count() == 8
    before = min(sent.evaluate_all(LEFT))
    page.get_by_role("switch", name="no_sync").press("Space")
    assert sent.count() == 4
    assert min(sent.evaluate_all(LEFT)) > before + 100
    assert "2 all-reduces, 2 MiB" in page.locator(".av-says").inner_text()


def test_a_larger_bucket_starts_its_all_reduce_after_the_last_gradient(page: Any) -> None:
    sent, computed = page.locator(".av-network .av-reduce:visible"), page.locator(".av-compute .av-gradient:visible")
    assert sent.evaluate_all(LEFT)[0] < computed.evaluate_all(LEFT)[1] + 1, "while the next gradient is computed"
    page.get_by_role("slider", name="bucket_cap_mb").press("ArrowRight")
    assert page.locator("output").inner_text() == "2 MiB"
    assert sent.count() == 4
    assert sent.evaluate_all(LEFT)[0] > computed.evaluate_all(LEFT)[1] + 10


def test_a_box_says_what_it_is_when_it_is_pointed_at(page: Any) -> None:
    page.locator(".av-compute .av-gradient:visible").first.hover()
    assert page.locator(".av-points").inner_text() == "1 to 2 ms, rank 0: the gradient of layer 1, which is in bucket 0"


def test_no_line_lies_on_words_and_none_of_them_is_cut_on_a_phone(shown: Any) -> None:
    page = shown(made(), wait=".av-hero", reduced_motion="reduce", width=375)
    over = """all => all.map(one => {
        const {left, right, top, bottom} = one.getBoundingClientRect();
        const frame = one.closest(".av-hero").getBoundingClientRect(), line = document.querySelector(".av-other");
        line.style.left = `${(left + right) / 2 - line.parentElement.getBoundingClientRect().left - 1}px`;
        const hit = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
        return hit === line || left < frame.left || right > frame.right ? one.textContent : "";
    }).filter(Boolean)"""
    words = page.locator(".av-lane b:visible")
    for _ in range(2):
        page.locator(".av-lanes").scroll_into_view_if_needed()
        assert words.evaluate_all(over) == []
        page.get_by_role("switch", name="no_sync").press("Space")


def test_no_two_entries_of_the_legend_look_alike(page: Any) -> None:
    looks = page.locator(".av-legend > span").evaluate_all(
        "all => all.map(one => getComputedStyle(one.firstChild).background + getComputedStyle(one.firstChild).border)"
    )
    assert len({*looks}) == len(looks) == 3
