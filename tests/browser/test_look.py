"""What players and explorers look like once a browser has laid them out: full rows, and no rule without a use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accumviz.book.explore import explore
from accumviz.book.weights import play
from accumviz.ledger.ledger import Ledger, Parameter
from tests.browser.frames import drawn
from tests.toys import CODE, ROWS, W, chain, large, toy
from tests.views.test_explore import recorded
from tests.views.test_shares import ledger_of, term, window

Open = Callable[..., Any]
# Every style rule's full selector and how many elements it has now, as if hovered, focused and checked.
_RULES = r"""() => {
    const found = {}, state = /:(hover|focus-visible|focus|checked|empty)/g;
    const split = (text) => text.match(/(?:\([^()]*(?:\([^()]*\)[^()]*)*\)|[^,(])+/g).map((one) => one.trim());
    const walk = (rules, outer) => {
        for (const rule of rules) {
            let here = outer;
            if (rule.selectorText) {
                here = split(rule.selectorText);
                const under = (root) => (own) => (own.includes("&") ? own.replaceAll("&", root) : `${root} ${own}`);
                if (outer) here = outer.flatMap((root) => here.map(under(root)));
                for (const full of here) {
                    const bare = full.replace(/::[\w-]+/g, "").replace(state, "").replace(/:has\(\)/g, "").trim();
                    found[full] = document.querySelectorAll(bare).length;
                }
            }
            if (rule.cssRules) walk(rule.cssRules, here);
        }
    };
    for (const sheet of document.styleSheets) walk(sheet.cssRules, null);
    return found;
}"""


def experiment(k: int, graphs: bool = False, way: str = "") -> Any:
    """A loop that is indented twice; one choice raises."""
    if k == 3:
        raise ValueError("three")
    rows = [{**ROWS[0], "line": 3}, {**ROWS[1], "line": 3}, *ROWS[2:]][:k]
    ledger = Ledger.build([W], rows, sources={"a.py": CODE})
    return (ledger, {e.index: chain() for e in ledger.of("backward")}) if graphs else ledger


def weighed(rows: list[dict[str, Any]], *, to: float = 1.2) -> list[dict[str, Any]]:
    """The same, with the weights where they began and after each step."""
    steps = [{**row, "weights": {"w": to}} if row["kind"] == "step" else row for row in rows]
    return [{**steps[0], "weights": {"w": 1.0}}, *steps[1:]]


def test_panes_fill_their_row_whichever_of_them_there_are(watch: Open, tmp_path: Path) -> None:
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
            drawn(page)
            bare_ground = page.locator(".av-body:visible").evaluate_all(
                """bodies => bodies.map(body => {
                    const area = (one) => one.getBoundingClientRect().width * one.getBoundingClientRect().height;
                    return 1 - [...body.children].reduce((sum, pane) => sum + area(pane), 0) / area(body);
                })"""
            )
            assert max(bare_ground) < 0.03, f"page {n} at {width} px"


def test_every_rule_of_a_style_sheet_has_an_element_in_some_state(watch: Open, tmp_path: Path) -> None:
    nan = [{"kind": "backward", "contribution": {"w": np.nan}, "grad": {"w": np.nan}}, {"kind": "mystery"}]
    unseen = [{"kind": "backward", "contribution": {"w": 1}, "grad": {"w": 5}}]
    steps = [{**row, "details": row.get("details", {})} for row in ROWS]
    players = [
        play(toy(), {0: chain()}),
        play(Ledger.build([W, Parameter("b", (2,))], [*steps, *unseen, *nan])),
        play(large(12, 40)),
        play(Ledger.build([W], [{"kind": "zero_grad"}] * 2)),
        play(ledger_of(window(*[[term(0.5), term(-0.5, op="Neg")]] * 2))),
    ]
    far = Ledger.build([W], weighed([*ROWS * 5, ROWS[0], {**ROWS[2]}]), sources={"a.py": CODE})
    near, away = (Ledger.build([W], weighed(ROWS, to=to), sources={"a.py": CODE}) for to in (1.2, -70.0))
    full = [{**row, "details": {"terms": [term(0.5)]}} if row["kind"] == "backward" else row for row in ROWS]
    shared = Ledger.build([W], weighed(full), sources={"a.py": CODE})
    players = [play(shared, {0: chain(), 1: chain(-4.0, notes=["told"])}), *players]
    players += [play(far), play(far, {0: chain()}), play(shared), play(near, {0: chain()}, loss=lambda w: w * w)]
    other = Ledger.build([W], weighed(ROWS[1:]), sources={"a.py": CODE.replace("(sample)", "(sample) / 2")})
    explorers = [
        explore({"near": near, "away": away}, loss=lambda w: w * w),
        explore({"near": near, "other": other}, against={"run": "other"}),
        explore(experiment, k=[1, 2, 3, 4], start={"k": 4}, against={"k": 1}),
        explore(experiment, k=[2], graphs=[True, False], way=["a", "b"], against={"way": "b"}),
        explore(experiment, k=[2], way=["a name that is long", "another that is long"], against={}),
        explore(
            recorded, k=[1, 8], divide=[True, False], start={"k": 8, "divide": False}
        ),  # beyond the right run's scale
    ]
    path = tmp_path / "page.html"
    players[0].save(path)
    text = "".join(one.to_html() for one in [*players[1:], *explorers])
    path.write_text(path.read_text("utf-8").replace("</body>", f"{text}</body>"), "utf-8")
    page = watch(width=1000).page
    page.goto(path.as_uri())
    page.locator(".av-xframe").last.wait_for()
    found: dict[str, int] = {}

    def look() -> None:
        drawn(page)
        for selector, count in page.evaluate(_RULES).items():
            found[selector] = max(found.get(selector, 0), count)

    look()
    for _ in range(8):
        page.evaluate("document.querySelectorAll('.av-b-next').forEach((button) => button.click())")
        look()
    page.locator(".av-row").first.click()
    page.locator(".av-node").first.click()
    look()
    page.locator(".av-in-grad .av-win").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowLeft")
    page.locator(".av-in-code .av-win").first.focus()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+ArrowLeft")
    look()
    for place in (".av-line.av-has", ".av-node", ".av-share .av-part", ".av-share .av-of"):
        page.locator(f"{place}:visible").first.hover()
        look()
    page.locator(".av-b-more:visible").first.click()
    look()
    page.get_by_role("searchbox").fill("nothing like it")
    slider = page.locator(".av-explorer").nth(2).get_by_role("slider", name="k").first
    slider.fill("2")
    look()
    slider.fill("1")
    page.get_by_role("button", name="Show one run").first.click()
    look()
    page.emulate_media(color_scheme="dark")
    look()
    of_ours = {selector: n for selector, n in found.items() if not selector.startswith((".av-graph", "html", "["))}
    assert len(of_ours) > 150
    kernel = ".av-explorer .av-other"  # for values outside the grid, which need one
    assert sorted(s for s, count in of_ours.items() if not count and s != kernel) == []
