"""What is compared: a run, and the one behind it, seen where a fold opens; and how much of a screen it takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accumviz.book.explore import explore
from accumviz.ledger.ledger import Ledger
from tests.browser.frames import drawn
from tests.toys import ROWS, W

BOXES = "els => els.map(el => el.getBoundingClientRect().toJSON())"


@pytest.fixture
def show(watch: Any, tmp_path: Path) -> Callable[..., Any]:
    """A page whose one view, `shut` or not, is in a fold."""

    def open_page(view: Any, shut: bool = False, **options: Any) -> Any:
        page, path = watch(**options).page, tmp_path / "page.html"
        view.save(path)
        text = path.read_text("utf-8").replace("<body>", f"<body><div id='fold'{' hidden' * shut}>")
        path.write_text(text.replace("</body>", "</div></body>"), "utf-8")
        page.goto(path.as_uri())
        page.locator(".av-frame").first.wait_for(state="attached")
        drawn(page)
        return page

    return open_page


def lengthy() -> Ledger:
    """A step on the last of forty lines."""
    rows = [{**ROWS[0], "line": 2}, {**ROWS[2], "line": 40}]
    return Ledger.build([W], rows, sources={"a.py": "".join(f"x{i} = {i}\n" for i in range(1, 41))})


@pytest.mark.parametrize("against", [None, {"k": 2}], ids=["one run", "compared"])
def test_the_line_of_an_event_is_seen_where_a_fold_opens(show: Any, against: Any) -> None:
    """In a closed prediction code had no room to scroll in, and stood at its top when that opened."""
    page = show(explore(lambda k: lengthy(), k=[1, 2], against=against), shut=True, width=375)
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
