"""Players and explorers once a browser has laid them out: their panes fill each row."""

from pathlib import Path
from typing import Any

from accumviz.book.explore import explore
from accumviz.ledger.ledger import Ledger
from accumviz.views.player import play
from tests.browser.frames import opened
from tests.toys import CODE, ROWS, W, chain, run
from tests.views.test_shares import term


def experiment(k: int, graphs: bool = False, way: str = "") -> Any:
    """A loop that is indented twice; one choice raises."""
    if k == 3:
        raise ValueError("three")
    rows = [{**ROWS[0], "line": 3}, {**ROWS[1], "line": 3}, *ROWS[2:]][:k]
    ledger = Ledger.build([W], rows, sources={"a.py": CODE})
    return run(ledger, {e.index: chain() for e in ledger.of("backward")}) if graphs else ledger


def weighed(rows: list[dict[str, Any]], *, to: float = 1.2) -> list[dict[str, Any]]:
    """The same, with the weights where they began and after each step."""
    steps = [{**row, "weights": {"w": to}} if row["kind"] == "step" else row for row in rows]
    return [{**steps[0], "weights": {"w": 1.0}}, *steps[1:]]


def test_panes_fill_their_row_whichever_of_them_there_are(watch: Any, tmp_path: Path) -> None:
    bare = [{key: value for key, value in row.items() if key not in ("file", "line")} for row in ROWS]
    full = [{**row, "details": {"terms": [term(0.5)]}} if row["kind"] == "backward" else row for row in ROWS]
    shown: list[Any] = [
        play(Ledger.build([W], bare), {0: chain()}),
        play(Ledger.build([W], weighed(bare), sources={"a.py": CODE})),
        play(Ledger.build([W], weighed(full), sources={"a.py": CODE}), {0: chain()}),
        explore(experiment, k=[2, 4], graphs=[True], against={"k": 4}),
    ]
    for n, view in enumerate(shown):
        view.save(tmp_path / f"{n}.html")
    for width in (1280, 900, 375):
        page = watch(width=width).page
        for n in range(len(shown)):
            page.goto((tmp_path / f"{n}.html").as_uri())
            page.locator(".av-frame").last.wait_for()
            opened(page)
            bare_ground = page.locator(".av-body:visible").evaluate_all(
                """bodies => bodies.map(body => {
                    const area = (one) => one.getBoundingClientRect().width * one.getBoundingClientRect().height;
                    return 1 - [...body.children].reduce((sum, pane) => sum + area(pane), 0) / area(body);
                })"""
            )
            assert max(bare_ground) < 0.03, f"page {n} at {width} px"
