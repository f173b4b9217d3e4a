"""What eyes found in the pictures of widgets: faults that a browser can measure, panes that fill their row, folds."""

from pathlib import Path
from typing import Any

import pytest

from accumviz.book.explore import explore
from accumviz.ledger.ledger import Ledger
from accumviz.views.player import play
from tests.browser.conftest import written
from tests.browser.frames import drawn, opened
from tests.browser.test_shares import term
from tests.toys import CODE, ROWS, W, chain, run, toy


def test_a_bar_too_short_to_be_seen_says_how_short_it_is(shown: Any) -> None:
    """After an unscale or a clip a mark was left of it, at zero: equal numbers keep equal lengths, and this is read."""
    big, small = 65536.0, 1.0
    rows = [{"kind": "backward", "contribution": {"w": big}, "grad": {"w": big}}]
    rows += [{"kind": "unscale", "grad": {"w": small}}, {"kind": "step", "grad": {"w": small}}]
    page = shown(play(Ledger.build([W], rows)))
    opened(page)
    bar, total = page.locator(".av-row .av-bar"), page.locator(".av-row .av-total")
    assert bar.get_attribute("data-told") == "", "of the longest nothing is to be said"
    page.get_by_role("button", name="next event").click()
    drawn(page)
    assert total.inner_text() == "1"
    assert bar.get_attribute("data-told") == "1/65536 of the scale"


def test_a_finger_has_room_to_scrub_on_a_phone(shown: Any) -> None:
    """Beside the buttons and the count, 60 pixels were left of the slider; it keeps the line of its buttons."""
    for width, least in ((375, 160), (335, 120)):
        page = shown(play(toy()), explore({"a": toy(), "b": toy()}), width=width, has_touch=True)
        for bar in page.locator(".av-frame .av-top").all():
            slider, button = (bar.locator(part).bounding_box() for part in (".av-scrub", ".av-b-next"))
            assert slider["width"] >= least
            assert button["y"] < slider["y"] + slider["height"] / 2 < button["y"] + button["height"]


def experiment(k: int) -> Any:
    ledger = Ledger.build([W], ROWS[:k], sources={"a.py": CODE})
    return run(ledger, {e.index: chain() for e in ledger.of("backward")})


def weighed(rows: list[dict[str, Any]], *, to: float = 1.2) -> list[dict[str, Any]]:
    """The same, with the weights where they began and after each step."""
    steps = [{**row, "weights": {"w": to}} if row["kind"] == "step" else row for row in rows]
    return [{**steps[0], "weights": {"w": 1.0}}, *steps[1:]]


def test_panes_fill_their_row_whichever_of_them_there_are(show: Any) -> None:
    bare = [{key: value for key, value in row.items() if key not in ("file", "line")} for row in ROWS]
    full = [{**row, "details": {"terms": [term(0.5)]}} if row["kind"] == "backward" else row for row in ROWS]
    views: list[Any] = [
        play(Ledger.build([W], bare), {0: chain()}),
        play(Ledger.build([W], weighed(bare), sources={"a.py": CODE})),
        play(Ledger.build([W], weighed(full), sources={"a.py": CODE}), {0: chain()}),
        explore(experiment, k=[2, 4], against={"k": 4}),
    ]
    for width in (1280, 900, 375):
        for n, view in enumerate(views):
            page = show(view, width=width)
            bare_ground = page.locator(".av-body:visible").evaluate_all(
                """bodies => bodies.map(body => {
                    const area = (one) => one.getBoundingClientRect().width * one.getBoundingClientRect().height;
                    return 1 - [...body.children].reduce((sum, pane) => sum + area(pane), 0) / area(body);
                })"""
            )
            assert max(bare_ground) < 0.03, f"page {n} at {width} px"


BOXES = "els => els.map(el => el.getBoundingClientRect().toJSON())"


def lengthy() -> Ledger:
    """A step on the last of forty lines."""
    rows = [{**ROWS[0], "line": 2}, {**ROWS[2], "line": 40}]
    return Ledger.build([W], rows, sources={"a.py": "".join(f"x{i} = {i}\n" for i in range(1, 41))})


@pytest.mark.parametrize("against", [None, {"k": 2}], ids=["one run", "compared"])
def test_the_line_of_an_event_is_seen_where_a_fold_opens(new_page: Any, tmp_path: Path, against: Any) -> None:
    """In a closed prediction code had no room to scroll in, and stood at its top when that opened."""
    page, path = new_page(width=375), tmp_path / "page.html"
    address = written(path, explore(lambda k: lengthy(), k=[1, 2], against=against))
    path.write_text(path.read_text("utf-8").replace("<main>", "<main id='fold' hidden>"), "utf-8")
    page.goto(address)
    drawn(page)
    page.evaluate("document.getElementById('fold').hidden = false")
    drawn(page)
    here = page.evaluate("scrollY")
    lines = page.locator(".av-line[aria-current]:visible")
    assert lines.count() == 1
    for key in ("", "ArrowLeft", "ArrowRight"):
        if key:
            page.locator(".av-scrub:visible").press(key)
            drawn(page)
        for line, box in zip(lines.all(), page.locator(".av-in-code .av-win:visible").all(), strict=True):
            (one,), (room,) = line.evaluate_all(BOXES), box.evaluate_all(BOXES)
            assert room["top"] <= one["top"] < one["bottom"] <= room["bottom"], key
    assert page.evaluate("scrollY") == here
