"""What a reader compares and reads in a player: whole lines, names that differ, one scale, colours that can be seen."""

import itertools
from typing import Any

import pytest

from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.player import play
from tests.browser.frames import drawn, opened
from tests.contrast import CONTRAST, contrast
from tests.toys import CODE, ROWS, W, chain, large, toy

WIDTHS = (1280, 375)
LONG = """for epoch in range(2):
    for batch in batches:
        loss = (2 * sample - model(batch, padding=batch.padding)).pow(2).mean() / accumulation_steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=clip_at, error_if_nonfinite=True)
        loss.backward()
        optimizer.step()
"""
LAYER = ("self_attn.in_proj_weight", "self_attn.in_proj_bias", "linear1.weight", "linear2.weight", "norm1.weight")
NAMES = [f"layers.{n}.{name}" for n in range(4) for name in LAYER]
SHARDS = ["0.weight", "1.weight", "0.weight (unsharded)", "1.weight (unsharded)"]
# Of each line of code where its text begins, and of each further line that it takes, within its pane.
_WRAPPED = """lines => lines.map(line => {
    const code = line.querySelector("code"), range = document.createRange(), rows = new Map();
    const letters = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    for (let node = letters.nextNode(); node; node = letters.nextNode()) {
        for (let i = 0; i < node.length; i++) {
            if (/\\s/.test(node.data[i])) continue;
            range.setStart(node, i);
            range.setEnd(node, i + 1);
            const box = range.getBoundingClientRect(), y = Math.round(box.top);
            rows.set(y, Math.min(rows.get(y) ?? Infinity, box.left));
        }
    }
    return { text: code.textContent, rows: [...rows.values()], lines: Math.round(code.clientHeight / 19) };
})"""
_COLORS = (
    f"el => {{ {CONTRAST}"
    """
    const style = getComputedStyle(el), ground = [getComputedStyle(el.closest(".av-pane")).backgroundColor];
    return [painted(ground), painted(ground, [style.backgroundColor]), painted(ground, [style.borderTopColor])];
}"""
)

_CUT = """wins => wins
    .filter(win => win.scrollHeight > win.clientHeight + 1 && getComputedStyle(win).overflowY !== "visible")
    .map(win => `${win.parentElement.className}: ${win.scrollHeight} in ${win.clientHeight}`)"""


def named(names: list[str], **more: Any) -> Ledger:
    """As many events as it takes for a step; the fourth element of a small parameter shows long totals."""
    one = large(12, len(names))
    parameters = tuple(Parameter(name, (8, 8), optimizers=(0,)) for name in names)
    return Ledger(parameters, one.events, one.contribution, one.grad, one.state, **more)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_line_that_is_too_long_goes_on_below_and_further_in(shown: Any, width: int) -> None:
    player = play(Ledger.build([W], [{**ROWS[0], "line": 5}], sources={"a.py": LONG}), {0: chain()})
    page = shown(player, width=width)
    pane = page.locator(".av-in-code .av-win")
    assert pane.evaluate("pane => pane.scrollWidth <= pane.clientWidth"), "nothing of it is beyond the pane's edge"
    lines = page.locator(".av-line").evaluate_all(_WRAPPED)
    assert [line["text"] for line in lines] == LONG.splitlines()
    margin = lines[0]["rows"][0]
    letter = (lines[1]["rows"][0] - margin) / 4
    assert 5 < letter < 12
    assert sum(len(line["rows"]) > 1 for line in lines) >= 2, "the test has lines that are too long"
    for line in lines:
        indent = len(line["text"]) - len(line["text"].lstrip())
        first, *further = line["rows"]
        assert first - margin == pytest.approx(indent * letter, abs=0.6)
        assert [x - margin for x in further] == pytest.approx([(indent + 4) * letter] * len(further), abs=0.6)
        assert line["lines"] == len(line["rows"]), "no row of it is empty"


@pytest.mark.parametrize(("names", "width"), [(NAMES, 1280), (NAMES, 375), (SHARDS, 375)])
def test_names_are_cut_where_they_do_not_differ(shown: Any, names: list[str], width: int) -> None:
    page = shown(play(named(names)), width=width)
    opened(page, tab="" if width > 600 else ".grad")
    seen: dict[str, str] = {}
    for top in (0, 200, 400, 800):
        page.locator(".av-in-grad .av-win").evaluate("(pane, top) => { pane.scrollTop = top; }", top)
        drawn(page)
        for row in page.locator(".av-row:visible .av-of").all():
            said, whole = row.inner_text(), row.get_attribute("title")
            assert row.evaluate("name => name.scrollWidth <= name.clientWidth"), f"{said!r} is cut by its column"
            seen[said] = whole
    assert len(seen) == len(set(seen.values())) == len(names), "each row has a text of its own"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_gradient_of_several_numbers_is_written_where_it_fits_and_else_as_its_norm(shown: Any, width: int) -> None:
    values = [0.08211, -0.05116, 0.08507, -0.07046]
    rows = [{"kind": "backward", "contribution": {"b": values, "w": -16}, "grad": {"b": values, "w": -16}}]
    page = shown(play(Ledger.build([W, Parameter("b", (4,))], rows)), width=width)
    for total in page.locator(".av-row:visible .av-total").all():
        assert total.evaluate("el => el.scrollWidth <= el.clientWidth")
        box, row = total.bounding_box(), total.locator("xpath=..").bounding_box()
        assert box["x"] + box["width"] <= row["x"] + row["width"]
    several = page.locator(".av-row:visible .av-total").nth(1)
    assert several.get_attribute("title") == "(0.08211, −0.05116, 0.08507, −0.07046)"
    assert several.inner_text() == "‖·‖ 0.1468"


def test_what_is_in_grad_already_is_told_from_the_ground_and_from_what_is_new(shown: Any, mode: str) -> None:
    page = shown(play(toy(), {0: chain()}), mode=mode)
    opened(page)
    for _ in range(2):
        page.get_by_role("button", name="next event").click()
    drawn(page)
    for live, new in ((".av-part.av-live", ".av-part.av-new"), (".av-swatch.av-live", ".av-swatch.av-new")):
        ground, pale, edge = page.locator(live).first.evaluate(_COLORS)
        _, full, _ = page.locator(new).first.evaluate(_COLORS)
        assert contrast(page, ground, pale) > 1.6, "not near the ground, be it white or black"
        assert contrast(page, ground, edge) > 3
        assert contrast(page, pale, full) > 1.9


def test_what_a_pane_scrolls_on_a_screen_is_whole_on_paper(shown: Any) -> None:
    code = "\n".join([*CODE.splitlines(), *(f"value_{line} = {line}" for line in range(60))])
    ledger = Ledger.build([W], [*ROWS, {**ROWS[1], "line": 30}, {**ROWS[1], "line": 60}], sources={"a.py": code})
    page = shown(play(ledger, {0: chain(), 1: chain()}), width=700)
    windows = page.locator(".av-win")
    assert windows.evaluate_all(_CUT) != []
    page.emulate_media(media="print")
    assert windows.evaluate_all(_CUT) == []
    boxes = page.locator(".av-pane").evaluate_all(
        "panes => panes.map(pane => [getComputedStyle(pane).breakInside, pane.getBoundingClientRect().y,"
        " pane.getBoundingClientRect().bottom])"
    )
    assert {inside for inside, _, _ in boxes} == {"avoid"}
    tops = sorted(boxes, key=lambda box: box[1])
    assert all(upper[2] <= lower[1] + 1 for upper, lower in itertools.pairwise(tops))
