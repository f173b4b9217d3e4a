"""A printed player: each pane is whole, however much of it a screen shows at a time, and none is parted by a page."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accumviz.book.weights import play
from accumviz.ledger.ledger import Ledger
from tests.toys import CODE, ROWS, W, chain

Open = Callable[..., Any]
CUT = """wins => wins
    .filter(win => win.scrollHeight > win.clientHeight + 1 && getComputedStyle(win).overflowY !== "visible")
    .map(win => `${win.parentElement.className}: ${win.scrollHeight} in ${win.clientHeight}`)"""


def test_what_a_pane_scrolls_on_a_screen_is_whole_on_paper(watch: Open, tmp_path: Path) -> None:
    code = "\n".join([*CODE.splitlines(), *(f"value_{line} = {line}" for line in range(60))])
    ledger = Ledger.build([W], [*ROWS, {**ROWS[1], "line": 30}, {**ROWS[1], "line": 60}], sources={"a.py": code})
    play(ledger, {0: chain(), 1: chain()}).save(tmp_path / "player.html")
    page = watch().page
    page.set_viewport_size({"width": 700, "height": 900})
    page.goto((tmp_path / "player.html").as_uri())
    page.locator(".av-frame").wait_for()
    windows = page.locator(".av-win")
    assert windows.evaluate_all(CUT) != []
    page.emulate_media(media="print")
    assert windows.evaluate_all(CUT) == []
    boxes = page.locator(".av-pane").evaluate_all(
        "panes => panes.map(pane => [getComputedStyle(pane).breakInside, pane.getBoundingClientRect().y,"
        " pane.getBoundingClientRect().bottom])"
    )
    assert {inside for inside, _, _ in boxes} == {"avoid"}
    tops = sorted(boxes, key=lambda box: box[1])
    assert all(upper[2] <= lower[1] + 1 for upper, lower in itertools.pairwise(tops))
