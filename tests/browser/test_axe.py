"""axe looks at what accumviz shows outside the book, and finds nothing; test_pages.py has it look at the book."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accumviz.book.explore import explore
from accumviz.book.lab import lab
from accumviz.book.predict import predict
from accumviz.graph.graph import Edge, Graph, Node
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.player import play
from tests.book import looks
from tests.toys import W, backward, run, window

NAMES = [f"layers.{p // 4}.{p % 4}.weight" for p in range(24)]
ROWS = [
    {"kind": "backward", "label": "loss", "file": "a.py", "line": 1, "contribution": dict.fromkeys(NAMES, 1)},
    {"kind": "step", "file": "a.py", "line": 2, "source": "step()"},
]
MANY = Ledger.build([Parameter(name, (3, 3), optimizers=(0,)) for name in NAMES], ROWS, sources={"a.py": "a\nb\n"})
ONE = Ledger.build([W], [backward(-2, -2)])
MOVED = window([-2.0], after=1.2)
GRAPH = Graph((Node(0, "PowBackward0", "loss"), Node(1, "AccumulateGrad", "w")), (Edge(0, 1),), (0,))
PLAYERS: dict[str, Any] = {
    "with a graph": play(ONE, {0: GRAPH}),
    "without graphs": play(ONE),
    "grouped": play(MANY),
    "no event": play(Ledger.build([], [])),
    "weights on their curve": play(MOVED, {0: GRAPH}, loss=lambda w: w * w),
    "runs by name": explore({"one": MOVED, "other": MOVED}, loss=lambda w: w * w),
    "two runs beside each other": explore(lambda k: (run(ONE, {0: GRAPH}), {"k": k}), k=[1, 2], against={"k": 2}),
}


def violations(page: Any) -> list[str]:
    return looks.axe()(SimpleNamespace(page=page))


@pytest.mark.parametrize("name", PLAYERS)
def test_axe_finds_nothing_on_a_saved_player(name: str, mode: str, shown: Any) -> None:
    page = shown(PLAYERS[name], mode=mode, reduced_motion="reduce")
    for row in page.locator(".av-row:visible").all()[:1]:
        row.click()
    assert violations(page) == []


def test_axe_finds_nothing_on_a_loop_lab_with_a_line_in_hand(mode: str, shown: Any) -> None:
    page = shown(lab({"zero_grad": "micro-batch"}), wait=".av-lframe", mode=mode, reduced_motion="reduce")
    page.get_by_role("button", name="optimizer.zero_grad(), first").click()
    assert violations(page) == []
    page.get_by_role("button", name="put optimizer.zero_grad() below the step").click()
    page.get_by_text("Healthy").first.wait_for()
    assert violations(page) == []


ASKED = [
    predict("What is `w.grad`?", (ONE, 0, "w"), because={2: "The sign."}, hint="It falls.", why="1 − 3.", reveal=ONE),
    predict("When is it `None`?", "before", choices=["before", "after"], because={"after": "Then it is there."}),
]


def test_axe_finds_nothing_on_predictions_asked_and_answered(mode: str, new_page: Any, tmp_path: Path) -> None:
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Two predictions</title>'
    grounds = "<style>:root { color-scheme: light dark } body { background: Canvas; color: CanvasText }</style>"
    grounds += "<body><main><h1>Two predictions</h1>"
    shown = "".join(one.to_html() for one in ASKED) + play(ONE, {0: GRAPH}).to_html()  # on a ground that is not ours
    (tmp_path / "page.html").write_text(f"{head}{grounds}{shown}</main>", "utf-8")
    page = new_page(mode=mode, reduced_motion="reduce")
    page.goto((tmp_path / "page.html").as_uri())
    assert violations(page) == []
    page.get_by_role("textbox").fill("2")
    page.get_by_label("after").check()
    for name in ("What is", "When is"):
        page.get_by_role("group", name=name).get_by_role("button", name="Check").click()
    assert page.locator("[data-av-state=retry]").count() == 1  # of two choices, one is left
    assert violations(page) == []
    page.get_by_role("textbox").fill("3")
    page.get_by_role("group", name="What is").get_by_role("button", name="Check").click()
    assert page.locator("[data-av-state=wrong]").count() == 2
    assert violations(page) == []
