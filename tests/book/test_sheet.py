"""What the book's own sheet makes of a page, before any page is built."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accumviz.views import style, tables
from tests.book import looks

SHEET = (Path(__file__).resolve().parents[2] / "_static" / "book.css").read_text("utf-8")
LONG = "one word after the other until the line is full and goes on " * 6
SUM = "<math display='block'><mrow>" + "<mi>x</mi><mo>+</mo>" * 12 + "<mi>y</mi></mrow></math>"
PRINTED = "a       b       c       d\n" + "1       2       3       4       and what is in no column of its own"
CURE = f"@@ -9 +9 @@\n-{' ' * 20}optimizer.step()\n+{' ' * 20}if (done + 1) % K == 0: optimizer.step()"
BODY = f"""<main><article class="bd-article"><section><h1>A page</h1>
<p class="said">{LONG}</p><div data-answers="prediction-1" data-given><p class="said">{LONG}</p></div>
<div class="math-block"><div class="math-scroll" tabindex="0">{SUM}</div><span class="eqno">(1.1)</span></div>
<div class="math-block"><div class="math-scroll" tabindex="0"><math display="block"><mi>x</mi></math></div>
<span class="eqno">(1.2)</span></div>
<div class="cell"><div class="cell_output"><div class="output stream"><div class="highlight"><pre class="book-columns"
tabindex="0">{PRINTED}</pre></div></div></div></div>
<div class="cell"><div class="cell_output"><div class="output text_html"><div class="accumviz av-report"><article>
<pre tabindex="0">{CURE}</pre></article></div></div></div></div>
<div class="pst-scrollable-table-container" tabindex="0" style="overflow-x: auto"><table class="table"><tbody><tr>
<td style="min-width: 40rem">a row</td></tr></tbody></table></div>
{
    "".join(
        f'<div class="highlight-x code"><div class="highlight"><pre tabindex="0">{text}</pre></div></div>'
        for text in ("short", "x" * 80, "x" * 110)
    )
}
<figure class="claims"><figcaption><p>A caption</p></figcaption></figure></section></article></main>
<dialog class="book-dialog book-asked"><form class="book-search"><input type="search"></form></dialog>"""


@pytest.fixture
def page(watch: Callable[..., Any]) -> Callable[[int], Any]:
    def made(width: int) -> Any:
        page = watch(width=width).page
        theme = "html { --pst-color-background: #fff; } figcaption { font-weight: 300; }"
        page.set_content(
            f"<!doctype html><html data-theme=light><style>{theme}{style.CSS}{tables.REPORT_CSS}{SHEET}</style>"
            f"<body>{BODY}",
            wait_until="load",
        )
        return page

    return made


@pytest.mark.parametrize("width", [375, 1280])
def test_a_paragraph_that_opens_with_an_answer_is_as_wide_as_its_neighbours(page: Any, width: int) -> None:
    one, other = (said.bounding_box() for said in page(width).locator("p.said").all())
    assert (one["x"], one["width"]) == (other["x"], other["width"])


@pytest.mark.parametrize("width", [375, 1280])
def test_an_equation_never_runs_into_its_number(page: Any, width: int) -> None:
    """A wide one scrolls above its number on a phone; what has room stands beside it."""
    shown = page(width)
    assert shown.evaluate(looks.MET) == []
    lefts = [box.bounding_box()["x"] for box in shown.locator(".eqno").all()]
    assert lefts[0] == pytest.approx(lefts[1], abs=1)
    assert shown.locator(".math-block").nth(1).bounding_box()["height"] < 50, "beside, not below"
    wide = shown.locator(".math-scroll").first.evaluate("box => box.scrollWidth > box.clientWidth")
    assert wide == (width == 375)
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("kept", "count"), [("pre.book-columns", 2), (".av-report pre", 3)])
def test_what_is_printed_in_columns_and_a_cure_scroll_on_a_phone_and_keep_their_lines(
    page: Any, kept: str, count: int
) -> None:
    shown = page(375)
    lines, moves = shown.locator(kept).evaluate(
        """pre => { const {lineHeight, paddingTop} = getComputedStyle(pre);
            return [(pre.clientHeight - 2 * parseFloat(paddingTop)) / parseFloat(lineHeight),
                pre.scrollWidth > pre.clientWidth]; }"""
    )
    assert (round(lines), moves) == (count, True)
    assert shown.evaluate(looks.WRAPPED) == []
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_whatever_scrolls_sideways_says_so_at_its_edge(page: Any) -> None:
    shown = page(375)
    wider = "all => all.filter(box => box.scrollWidth > box.clientWidth + 1).length"
    assert shown.locator("pre, .math-scroll, .pst-scrollable-table-container").evaluate_all(wider) >= 6
    found = shown.evaluate(looks.UNSAID)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("width", [1280, 1920])
def test_code_tables_and_figures_end_at_one_line(page: Any, width: int) -> None:
    boxes = page(width).locator(".highlight-x, .pst-scrollable-table-container, figure.claims").all()
    assert len({round(box.bounding_box()["x"] + box.bounding_box()["width"]) for box in boxes}) == 1


@pytest.mark.parametrize("width", [375, 1280])
def test_the_focus_ring_of_the_search_field_is_whole(page: Any, width: int) -> None:
    """It was cut to two bars: the dialog that it stands in ends where the field does."""
    shown = page(width)
    shown.evaluate("document.querySelector('dialog').showModal()")
    room = shown.locator("input").evaluate(
        """field => {
            const {outlineWidth, outlineOffset, outlineStyle} = getComputedStyle(field);
            const ring = outlineStyle === "none" ? NaN : parseFloat(outlineWidth) + parseFloat(outlineOffset);
            const own = field.getBoundingClientRect(), box = field.closest("dialog").getBoundingClientRect();
            return [own.left - box.left, own.top - box.top, box.right - own.right, box.bottom - own.bottom]
                .map(beside => beside - ring);
        }"""
    )
    assert min(room) >= 0
