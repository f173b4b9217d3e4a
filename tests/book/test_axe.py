"""axe looks at every page of the built book, and at what accumviz shows outside it, and finds nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from accumviz.book.predict import predict, prediction_html
from accumviz.graph import Edge, Graph, Node
from accumviz.ledger import Ledger, Parameter
from accumviz.views.explore import explore
from accumviz.views.player import play

Open = Callable[..., Any]
Address = Callable[[str, str], str]
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
# All rules that axe runs unasked, and one of its experiments: a button is called what is written on it.
LOOK = """async options => {
    const rules = {"label-content-name-mismatch": {enabled: true}, ...options.rules};
    const {violations} = await axe.run(document, {resultTypes: ["violations"], rules, ...options.only});
    return violations.flatMap(({id, nodes}) => nodes.map(({html}) => `${id}: ${html.slice(0, 160)}`));
}"""
UNFOLD = "document.querySelectorAll('details').forEach(details => { details.open = true; })"
# What takes seconds on a long page: once in each mode is enough, and in the dark nothing else differs.
CONTRAST, WITHOUT = {"only": {"runOnly": ["color-contrast"]}}, {"rules": {"color-contrast": {"enabled": False}}}


def violations(page: Any, **options: Any) -> list[str]:
    page.evaluate(f"{AXE}; 0")
    return list(page.evaluate(LOOK, options))


def test_axe_finds_nothing_on_a_page_of_the_book(page_name: str, mode: str, watch: Open, address: Address) -> None:
    page = watch(mode, reduced_motion="reduce").page
    page.goto(address(page_name, "file"), wait_until="networkidle")
    assert violations(page, **(CONTRAST if mode == "dark" else {})) == []


def test_axe_finds_nothing_when_all_that_is_folded_is_open(page_name: str, watch: Open, address: Address) -> None:
    page = watch(width=375, reduced_motion="reduce").page
    page.goto(address(page_name, "file"), wait_until="networkidle")
    page.evaluate(UNFOLD)
    assert violations(page, **WITHOUT) == []


NAMES = [f"layers.{p // 4}.{p % 4}.weight" for p in range(24)]
ROWS = [
    {"kind": "backward", "label": "loss", "file": "a.py", "line": 1, "contribution": dict.fromkeys(NAMES, 1)},
    {"kind": "step", "file": "a.py", "line": 2, "source": "step()"},
]
MANY = Ledger.build([Parameter(name, (3, 3), optimizers=(0,)) for name in NAMES], ROWS, sources={"a.py": "a\nb\n"})
ONE = Ledger.build([Parameter("w", (1,))], [{"kind": "backward", "contribution": {"w": -2}, "grad": {"w": -2}}])
GRAPH = Graph((Node(0, "PowBackward0", "loss"), Node(1, "AccumulateGrad", "w")), (Edge(0, 1),), (0,))
PLAYERS: dict[str, Any] = {
    "with a graph": play(ONE, GRAPH),
    "without graphs": play(ONE),
    "a graph alone": play(GRAPH),
    "grouped": play(MANY),
    "no event": play(Ledger.build([], [])),
    "two runs beside each other": explore(lambda k: (ONE, {0: GRAPH}, {"k": k}), k=[1, 2], against={"k": 2}),
}


@pytest.mark.parametrize("name", PLAYERS)
def test_axe_finds_nothing_on_a_saved_player(name: str, mode: str, watch: Open, tmp_path: Path) -> None:
    PLAYERS[name].save(tmp_path / "run.html")
    page = watch(mode, reduced_motion="reduce").page
    page.goto((tmp_path / "run.html").as_uri())
    page.locator(".av-frame").first.wait_for()
    for row in page.locator(".av-row:visible").all()[:1]:
        row.click()
    assert violations(page) == []


ASKED = [
    predict("What is `w.grad`?", (ONE, 0, "w"), because={2: "The sign."}, hint="It falls.", why="1 − 3.", reveal=ONE),
    predict("When is it `None`?", "before", choices=["before", "after"], because={"after": "Then it is there."}),
]


def test_axe_finds_nothing_on_predictions_asked_and_answered(mode: str, watch: Open, tmp_path: Path) -> None:
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Two predictions</title>'
    grounds = "<style>:root { color-scheme: light dark } body { background: Canvas; color: CanvasText }</style>"
    grounds += "<body><main><h1>Two predictions</h1>"
    shown = "".join(map(prediction_html, ASKED)) + play(ONE, GRAPH).to_html()  # on a ground that is not ours
    (tmp_path / "page.html").write_text(f"{head}{grounds}{shown}</main>", "utf-8")
    page = watch(mode, reduced_motion="reduce").page
    page.goto((tmp_path / "page.html").as_uri())
    assert violations(page) == []
    page.get_by_role("textbox").fill("2")
    page.get_by_label("after").check()
    for name in ("What is", "When is"):
        page.get_by_role("group", name=name).get_by_role("button", name="Check").click()
    assert page.locator("[data-av-state=wrong]").count() == 2
    assert violations(page) == []
