"""Bars of shares: as data and in words, and as a reader meets them."""

import math
from typing import Any

import pytest

from accumviz.book.explore import explore
from accumviz.ledger.ledger import Event, Ledger, Parameter
from accumviz.views import payload, shares, words
from accumviz.views.player import play
from accumviz.views.timeline import timeline
from tests import by_hand
from tests.browser.frames import middle, opened
from tests.toys import EVIL, large, toy
from tests.views.test_timeline import texts

W = Parameter("w", (2,), optimizers=(0,))
STEP = {"kind": "step", "details": {"optimizer": "SGD", "lr": [0.1]}}
ZERO = {"kind": "zero_grad"}


def term(factor: float, elements: float = 8, unknown: str = "", op: str = "Mse") -> Any:
    return by_hand.term(elements, factor, op=op) | {"unknown": unknown}


def window(*terms: Any, label: str = "loss", held: float = 0.0, zero: bool = True) -> list[dict[str, Any]]:
    """Backwards of these terms (or lists of them), one a micro-batch, then a step and a zero."""
    rows: list[dict[str, Any]] = []
    for one in terms:
        held += 1.0
        own = one if isinstance(one, list) else [one]
        row = {"kind": "backward", "label": label, "line": 3, "details": {"terms": own}}
        rows.append(row | {"contribution": {"w": 1.0}, "grad": {"w": held}})
    return [*rows, {**STEP, "grad": {"w": held}}, *([ZERO] if zero else [])]


def ledger_of(*rows: list[dict[str, Any]]) -> Ledger:
    return Ledger.build([W], [row for rows_ in rows for row in rows_])


RIGHT = ledger_of(window(*[term(0.25)] * 4))


def bars(ledger: Ledger) -> Any:
    """The bars of all its steps, and the note."""
    return shares.bars(ledger, range(len(ledger)))


def said(ledger: Ledger) -> list[str]:
    return [bar.words for bar in bars(ledger)[0]]


def test_a_right_window_adds_to_one_and_says_no_more() -> None:
    (bar,), note = bars(RIGHT)
    assert bar.words == "Shares of loss in the step of event 4: 0.25 + 0.25 + 0.25 + 0.25, which add to 1."
    assert [(part.nth, part.start, part.length) for part in bar.segments] == [
        (1, 0, 0.25),
        (2, 0.25, 0.25),
        (3, 0.5, 0.25),
        (4, 0.75, 0.25),
    ]
    assert (bar.total, note) == ("1", "")


def test_elements_that_weigh_differently_are_compared_in_words() -> None:
    ledger = ledger_of(window(term(0.5, 160), term(0.5, 2)))
    assert "An element of micro-batch 2 weighs 80 times one of micro-batch 1." in said(ledger)[0]
    faded = ledger_of(window(term(0.1), term(0.5)))
    assert said(faded)[0].endswith("An element of micro-batch 2 weighs 5 times one of micro-batch 1.")


def test_what_was_erased_has_no_length_and_is_told() -> None:
    rows = window(term(0.5), term(0.5))
    rows.insert(1, ZERO)
    rows[2] |= {"grad": {"w": 1.0}}
    rows[3] |= {"grad": {"w": 1.0}}
    (bar,), _ = bars(ledger_of(rows))
    assert [part.length for part in bar.segments] == [0, 0.5]
    assert "Micro-batch 1 was erased before the step." in bar.words
    assert "times" not in bar.words


def test_what_an_earlier_step_used_is_told_also_where_that_step_is_not_asked_for() -> None:
    ledger = ledger_of(window(term(0.5), term(0.5), zero=False), window(term(0.5), term(0.5), held=2.0))
    for events in (range(len(ledger)), [5]):
        bar = shares.bars(ledger, events)[0][-1]
        assert [part.look for part in bar.segments] == ["used", "used", "new", "new"]
        assert "which add to 2. Micro-batches 1 and 2 were used by an earlier step, too." in bar.words


def test_an_unknown_share_says_why_and_adds_nothing() -> None:
    ledger = ledger_of(window(term(0.25), term(math.nan, unknown="its loss is <odd>"), term(0.25)))
    (bar,), _ = bars(ledger)
    assert bar.total == "?"
    assert [(part.nth, part.look) for part in bar.segments] == [(1, "new"), (3, "new"), (2, "unseen")]
    assert [part.start for part in bar.segments] == [0, 0.25, 0.5]
    assert bar.words.endswith("0.25 + 0.25. The share of micro-batch 2 is unknown: its loss is <odd>.")
    assert "unknown share" in texts(timeline(ledger))
    (alone,), _ = bars(ledger_of(window(term(math.nan, unknown="odd"))))
    assert alone.words == "Shares of loss in the step of event 1: the share of micro-batch 1 is unknown: odd."


def test_objectives_have_bars_of_their_own_and_a_negative_share_goes_to_the_left() -> None:
    both = [term(0.5), term(-0.5, op="Neg")]
    found, _ = bars(ledger_of(window(both, both)))
    assert [bar.total for bar in found] == ["1", "−1"]
    assert [bar.ends for bar in found] == [(0, 1), (-1, 0)]
    assert shares.reach(found) == (-1.05, 1.05)
    assert "−0.5 − 0.5, which add to −1." in found[1].words
    assert found[0].objective != found[1].objective


def test_a_long_window_is_told_shortly() -> None:
    told = said(ledger_of(window(*[term(1 / 64)] * 64)))[0]
    assert "64 × 0.0156, which add to 1." in told


def test_a_ledger_without_terms_has_no_bars_no_strip_and_no_data() -> None:
    assert bars(toy()) == ([], "")
    assert "shares" not in payload.ledger_data(toy())
    assert "shares of" not in texts(timeline(toy()))
    assert "hares" not in " ".join(play(toy()).words)
    assert bars(large(600, 4)) == ([], "")


def test_a_timeline_has_a_strip_whose_stacks_are_as_high_as_the_shares() -> None:
    figure = timeline(ledger_of(window(*[term(1.0)] * 3)))
    shown = texts(figure)
    assert {"shares of the step", "3", "share 1: the mean of one loss"} <= set(shown)
    lines = [line for line in figure.axes[0].lines if len(set(line.get_ydata())) == 1]
    (dashed,) = [line for line in lines if line.get_linestyle() == "--" and line.get_linewidth() == 1.2]
    level = dashed.get_ydata()[0]
    boxes = [box for box in figure.axes[0].patches if abs(box.get_y() - level) < 0.01 and box.get_width() > 20]
    assert boxes, "a share of 1 begins where the dashed line stands"
    (box,) = boxes
    zero = max(line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linewidth() == 0.9)
    assert box.get_y() + box.get_height() == pytest.approx(zero, abs=1.1)
    assert any("which add to 3" in sentence for sentence in figure.words)


def test_a_page_carries_bars_of_many_steps_thinned_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_MOST_SEGMENTS", 10)
    told = payload.ledger_data(ledger_of(*[window(term(0.5), term(0.5))] * 20))["shares"]
    assert sum(len(row["s"]) for row in told["rows"]) <= 10
    assert told["note"] == "Dashed: 1. The shares of 5 of 20 steps are shown."
    assert told["r"] == [0, 1.05]


def test_hostile_names_and_reasons_are_inert() -> None:
    ledger = ledger_of(window(term(math.nan, unknown=EVIL), label=EVIL))
    page = play(ledger).to_html()
    assert "window.ran" in page
    assert "<script>window.ran" not in page
    assert "\u202e" not in page


def test_the_text_of_a_player_says_shares_at_the_step() -> None:
    assert play(RIGHT).words[5].startswith("Event 4, step by SGD: ")
    assert play(RIGHT).words[5].endswith("learning rate 0.1. " + said(RIGHT)[0])
    both = explore({"a": RIGHT, "b": RIGHT}).content
    assert len(both["parts"]["shares.rows"]) == 1


@pytest.mark.parametrize(
    ("kind", "details", "told"),
    [
        ("clip", {"by": "norm", "total_norm": 4.0, "max_norm": 1.0}, "norm 4, limit 1, factor 0.25"),
        ("clip", {"by": "norm", "total_norm": 0.5, "max_norm": 1}, "norm 0.5, limit 1, factor 1"),
        ("clip", {"by": "norm", "total_norm": math.nan, "max_norm": 1}, "norm NaN, limit 1"),
        ("clip", {"by": "value", "clip_value": 0.5}, "limit 0.5 for each element"),
        ("clip", {"total_norm": "many", "max_norm": None}, ""),
        ("unscale", {"amp_scale": 65536.0}, "the scaler’s scale 65536"),
        ("step", {"lr": [0.1, 0.1]}, "learning rate 0.1"),
        ("step", {"lr": [0.1, 0.01]}, "learning rates 0.1, 0.01"),
        ("step", {"lr": [None]}, ""),
        ("zero_grad", {"lr": [0.1]}, ""),
    ],
)
def test_what_an_event_holds_is_said_where_it_stands(kind: str, details: dict[str, Any], told: str) -> None:
    event = Event(0, kind, details=details)
    assert words.in_numbers(event) == told
    ledger = Ledger.build([W], [{"kind": kind, "details": details, "grad": {"w": 1.0}}])
    assert told in words.sentence(ledger, ledger[0], [0])
    assert payload.ledger_data(ledger)["e"].get("t", [""]) == [told]


UNDIVIDED = ledger_of(*[window(term(1.0), term(1.0), term(0.5, 2))] * 3)
UNKNOWN = ledger_of(window(term(0.5), term(math.nan, unknown="its loss is odd")))
BOTH = ledger_of(window(*[[term(0.5), term(-0.5, op="Neg")]] * 2))
CARRIED = ledger_of(window(term(0.5), term(0.5), zero=False), window(term(0.5), term(0.5), held=2.0))


def pane(page: Any) -> Any:
    return page.locator(".av-in-shares").first


def test_objectives_are_told_apart_on_a_phone(show: Any) -> None:
    """Of two that begin alike, the same first letters stood beside both bars."""
    ledger = ledger_of(window(*[[term(0.5), term(-0.5, op="MeanBackward0"), term(0.25, op="MeanBackward0")]] * 2))
    for width in (375, 1280):
        page = show(play(ledger), width=width)
        if width == 375:
            opened(page, "Shares")
        names = pane(page).locator("[role=option] .av-of")
        # As much of each as is seen: a letter of this type is 7.3 px wide.
        seen = names.evaluate_all("all => all.map(one => one.textContent.slice(0, one.clientWidth / 7.3).trim())")
        assert len(seen) == len(set(seen)) > 1
        assert [name.split()[-1] for name in seen] == ["Mse", "Mean", "2"], "it is told by its end"
        assert "loss · MeanBackward0" in names.nth(1).get_attribute("title"), "the sentence has all of it"


def boxes(pane: Any, line: int) -> list[dict[str, float]]:
    return [part.bounding_box() for part in pane.locator("[role=option]").nth(line).locator(".av-part").all()]


@pytest.mark.parametrize("ledger", [UNDIVIDED, BOTH, CARRIED], ids=["undivided", "negative", "carried"])
def test_segments_are_as_long_as_the_shares_and_one_stands_where_they_add_to_it(show: Any, ledger: Ledger) -> None:
    page = show(play(ledger))
    first = pane(page).locator("[role=option]").first
    zero, _ = middle(first.locator(".av-zero"))
    unit = middle(first.locator(".av-one").first)[0] - zero
    shares = list(ledger.shares())
    drawn = [box["width"] / unit for line in range(pane(page).locator("[role=option]").count())
             for box in boxes(pane(page), line)]  # fmt: skip
    assert sorted(drawn) == pytest.approx(sorted(abs(row.share) for row in shares), abs=0.005)
    for line in range(pane(page).locator("[role=option]").count()):
        parts = boxes(pane(page), line)
        ends = min(box["x"] for box in parts), max(box["x"] + box["width"] for box in parts)
        assert ends[1] - ends[0] == pytest.approx(sum(box["width"] for box in parts), abs=1)
        told = pane(page).locator("[role=option] .av-total").nth(line).inner_text().replace("−", "-")
        reached = ends[0] if told.startswith("-") else ends[1]
        assert (reached - zero) / unit == pytest.approx(float(told), abs=0.01)


def test_every_line_is_said_and_the_note_follows_the_moment(show: Any) -> None:
    page = show(play(UNDIVIDED))
    lines = pane(page).locator("[role=option]")
    assert lines.count() == 3
    assert "1 + 1 + 0.5, which add to 2.5" in (lines.first.locator(".av-heard").text_content() or "")
    note = pane(page).locator(".av-weighs")
    assert "step of event 3" in note.inner_text()
    assert "An element of micro-batch 3 weighs 2 times one of micro-batch 1." in note.inner_text()
    pane(page).locator(".av-win").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.querySelector('.av-in-shares .av-weighs').textContent.includes('event 8')")
    assert "step of event 8" in note.inner_text()
    assert "learning rate 0.1" in page.locator(".av-say").inner_text()
    assert lines.nth(1).get_attribute("aria-selected") == "true"
    box = pane(page).locator(".av-win")
    assert box.get_attribute("aria-activedescendant") == lines.nth(1).get_attribute("id")
    lines.nth(2).locator(".av-part").nth(1).click()
    page.wait_for_function("() => document.querySelector('.av-say').textContent.includes('Event 11')")
    assert "Event 11, backward" in page.locator(".av-say").inner_text()
    assert pane(page).locator(".av-lit").count() == 1


def test_an_unknown_share_is_hatched_and_its_reason_is_read(show: Any) -> None:
    page = show(play(UNKNOWN))
    part = pane(page).locator(".av-part.av-unseen")
    assert part.inner_text() == "?"
    assert "gradient" in part.evaluate("e => getComputedStyle(e).backgroundImage")
    assert "micro-batch 2 is unknown: its loss is odd." in pane(page).locator(".av-weighs").inner_text()
    assert pane(page).locator("[role=option] .av-total").inner_text() == "?"


def test_the_right_run_is_an_outline_in_the_bars_of_another_to_one_scale(show: Any) -> None:
    page = show(
        explore({"right": RIGHT, "not divided": ledger_of(window(*[term(1.0)] * 4))}, start={"run": "not divided"})
    )
    line = pane(page).locator("[role=option]").first
    unit = middle(line.locator(".av-one"))[0] - middle(line.locator(".av-zero"))[0]
    outlines = [box.bounding_box()["width"] / unit for box in line.locator(".av-ghost").all()]
    assert outlines == pytest.approx([part.share for part in RIGHT.shares()][: len(outlines)], abs=0.01)
    assert len(outlines) > 1
