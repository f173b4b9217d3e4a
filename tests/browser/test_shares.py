"""The pane of shares in a browser: what is drawn is what the ledger says, by mouse, keyboard and in both themes."""

import math
from typing import Any

import pytest

from accumviz.book.explore import explore
from accumviz.ledger.ledger import Ledger
from accumviz.views.player import play
from tests.browser.frames import opened
from tests.toys import toy
from tests.views.test_shares import RIGHT, ledger_of, term, window
from tests.windows import Watched

UNDIVIDED = ledger_of(*[window(term(1.0), term(1.0), term(0.5, 2))] * 3)
UNKNOWN = ledger_of(window(term(0.5), term(math.nan, unknown="its loss is odd")))
BOTH = ledger_of(window(*[[term(0.5), term(-0.5, op="Neg")]] * 2))
CARRIED = ledger_of(window(term(0.5), term(0.5), zero=False), window(term(0.5), term(0.5), held=2.0))


def pane(watched: Watched) -> Any:
    return watched.page.locator(".av-in-shares").first


def test_objectives_are_told_apart_on_a_phone(show: Any) -> None:
    """Of two that begin alike, the same first letters stood beside both bars."""
    ledger = ledger_of(window(*[[term(0.5), term(-0.5, op="MeanBackward0"), term(0.25, op="MeanBackward0")]] * 2))
    for width in (375, 1280):
        watched = show(play(ledger), width=width)
        if width == 375:
            opened(watched.page, "Shares")
        names = pane(watched).locator("[role=option] .av-of")
        # As much of each as is seen: a letter of this type is 7.3 px wide.
        seen = names.evaluate_all("all => all.map(one => one.textContent.slice(0, one.clientWidth / 7.3).trim())")
        assert len(seen) == len(set(seen)) > 1
        assert [name.split()[-1] for name in seen] == ["Mse", "Mean", "2"], "it is told by its end"
        assert "loss · MeanBackward0" in names.nth(1).get_attribute("title"), "the sentence has all of it"


def boxes(pane: Any, line: int) -> list[dict[str, float]]:
    return [part.bounding_box() for part in pane.locator("[role=option]").nth(line).locator(".av-part").all()]


def middle(place: Any) -> float:
    box = place.bounding_box()
    return float(box["x"] + box["width"] / 2)


@pytest.mark.parametrize("ledger", [UNDIVIDED, BOTH, CARRIED], ids=["undivided", "negative", "carried"])
def test_segments_are_as_long_as_the_shares_and_one_stands_where_they_add_to_it(show: Any, ledger: Ledger) -> None:
    watched = show(play(ledger))
    first = pane(watched).locator("[role=option]").first
    zero = middle(first.locator(".av-zero"))
    unit = middle(first.locator(".av-one").first) - zero
    shares = list(ledger.shares())
    drawn = [box["width"] / unit for line in range(pane(watched).locator("[role=option]").count())
             for box in boxes(pane(watched), line)]  # fmt: skip
    assert sorted(drawn) == pytest.approx(sorted(abs(row.share) for row in shares), abs=0.005)
    for line in range(pane(watched).locator("[role=option]").count()):
        parts = boxes(pane(watched), line)
        ends = min(box["x"] for box in parts), max(box["x"] + box["width"] for box in parts)
        assert ends[1] - ends[0] == pytest.approx(sum(box["width"] for box in parts), abs=1)
        told = pane(watched).locator("[role=option] .av-total").nth(line).inner_text().replace("−", "-")
        reached = ends[0] if told.startswith("-") else ends[1]
        assert (reached - zero) / unit == pytest.approx(float(told), abs=0.01)
    assert watched.complaints == watched.foreign == []


def test_every_line_is_said_and_the_note_follows_the_moment(show: Any) -> None:
    watched = show(play(UNDIVIDED))
    lines = pane(watched).locator("[role=option]")
    assert lines.count() == 3
    assert "1 + 1 + 0.5, which add to 2.5" in (lines.first.locator(".av-heard").text_content() or "")
    note = pane(watched).locator(".av-weighs")
    assert "step of event 3" in note.inner_text()
    assert "An element of micro-batch 3 weighs 2 times one of micro-batch 1." in note.inner_text()
    pane(watched).locator(".av-win").focus()
    watched.page.keyboard.press("ArrowDown")
    watched.page.wait_for_function(
        "() => document.querySelector('.av-in-shares .av-weighs').textContent.includes('event 8')"
    )
    assert "step of event 8" in note.inner_text()
    assert "learning rate 0.1" in watched.page.locator(".av-say").inner_text()
    assert lines.nth(1).get_attribute("aria-selected") == "true"
    box = pane(watched).locator(".av-win")
    assert box.get_attribute("aria-activedescendant") == lines.nth(1).get_attribute("id")
    lines.nth(2).locator(".av-part").nth(1).click()
    watched.page.wait_for_function("() => document.querySelector('.av-say').textContent.includes('Event 11')")
    assert "Event 11, backward" in watched.page.locator(".av-say").inner_text()
    assert pane(watched).locator(".av-lit").count() == 1


def test_an_unknown_share_is_hatched_and_its_reason_is_read(show: Any) -> None:
    watched = show(play(UNKNOWN))
    part = pane(watched).locator(".av-part.av-unseen")
    assert part.inner_text() == "?"
    assert "gradient" in part.evaluate("e => getComputedStyle(e).backgroundImage")
    assert "micro-batch 2 is unknown: its loss is odd." in pane(watched).locator(".av-weighs").inner_text()
    assert pane(watched).locator("[role=option] .av-total").inner_text() == "?"


def test_a_ledger_without_terms_has_no_pane(show: Any) -> None:
    assert pane(show(play(toy()))).count() == 0


def test_the_right_run_is_an_outline_in_the_bars_of_another_to_one_scale(show: Any) -> None:
    watched = show(explore({"right": RIGHT, "not divided": UNDIVIDED}, start={"run": "not divided"}))
    line = pane(watched).locator("[role=option]").first
    unit = middle(line.locator(".av-one")) - middle(line.locator(".av-zero"))
    outlines = [box.bounding_box()["width"] / unit for box in line.locator(".av-ghost").all()]
    assert outlines == pytest.approx([part.share for part in RIGHT.shares()][: len(outlines)], abs=0.01)
    assert len(outlines) > 1
