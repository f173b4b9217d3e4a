"""A reader scrolls past players and explorers: no pane keeps the wheel or the finger to itself."""

from collections.abc import Callable
from typing import Any

import pytest

from accumviz.graph.graph import Edge, Graph, Node
from accumviz.ledger.ledger import Ledger
from accumviz.views.player import Player, play
from tests.browser.frames import drawn, middle, opened, still
from tests.toys import chain, large, toy

PLACES = (".av-say", ".av-in-code .av-win", ".av-in-graph .av-win", ".av-in-grad .av-win", ".av-in-time .av-plot")
SCROLLING = [place for place in PLACES if "win" in place]


@pytest.fixture
def between(show: Any) -> Callable[..., Any]:
    """Open a page on which a view has far more page above and below it than a screen holds."""

    def open_page(view: Any, **options: Any) -> Any:
        page = show(view, **options)
        page.evaluate("document.body.style.paddingBlock = '3000px'")
        return page

    return open_page


def hover(page: Any, selector: str) -> tuple[float, float]:
    """Bring a pane to the middle of the window, and tell where its middle is."""
    page.locator(selector).first.evaluate("pane => pane.scrollIntoView({ block: 'center', behavior: 'instant' })")
    still(page)
    return middle(page.locator(selector).first)


def turned(page: Any, selector: str, notches: int, pixels: int = 100) -> float:
    """How far the page moves when a wheel is turned over a pane."""
    page.mouse.move(*hover(page, selector))
    before = page.evaluate("scrollY")
    for _ in range(notches):
        page.mouse.wheel(0, pixels)
        drawn(page)
    still(page)
    return float(page.evaluate("scrollY") - before)


def swiped(page: Any, selector: str, pixels: int) -> float:
    """How far the page moves when a finger swipes over a pane, up for a positive number; a quick one glides on."""
    x, y = hover(page, selector)
    before, session = page.evaluate("scrollY"), page.context.new_cdp_session(page)
    touch = {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]}
    session.send("Input.dispatchTouchEvent", touch)
    for step in range(1, 7):
        touch = {"type": "touchMove", "touchPoints": [{"x": x, "y": y - step * pixels / 6}]}
        session.send("Input.dispatchTouchEvent", touch)
        drawn(page)
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    still(page)
    return float(page.evaluate("scrollY") - before)


def test_a_wheel_over_a_pane_with_nothing_to_scroll_moves_the_page_at_once(between: Any) -> None:
    page = between(play(toy(), {0: chain(), 1: chain(-4.0)}))
    for place in PLACES:
        assert page.locator(place).first.evaluate("pane => pane.scrollHeight <= pane.clientHeight")
        assert [turned(page, place, 1, pixels) for pixels in (100, -100)] == pytest.approx([100, -100], abs=2), place


def lengthy() -> Player:
    """Panes that hold more than they show: 40 lines of code, a graph of 60 nodes, 12 parameters."""
    code = "".join(f"line_{n} = {n}\n" for n in range(40))
    one, nodes = large(12, 12), tuple(Node(n, f"Mul{n}Backward0", shape=(1,)) for n in range(60))
    ledger = Ledger(one.parameters, one.events, one.contribution, one.grad, one.state, sources={"a.py": code})
    return play(ledger, {0: Graph(nodes, tuple(Edge(n, n + 1) for n in range(59)), (0,))})


def test_a_pane_that_scrolls_hands_the_wheel_on_at_its_end(between: Any) -> None:
    page = between(lengthy())
    for place in SCROLLING:
        pane = page.locator(place).first
        assert pane.evaluate("pane => pane.scrollHeight - pane.clientHeight") > 60
        pane.evaluate("pane => { pane.scrollTop = 0; }")
        assert turned(page, place, 1, -100) == pytest.approx(-100, abs=2), "at its top, a pane lets a wheel up through"
        pane.evaluate("pane => { pane.scrollTop = 1e6; }")
        assert turned(page, place, 2) == pytest.approx(200, abs=2), "at its end, a wheel down"
        assert pane.evaluate("pane => pane.scrollHeight - pane.clientHeight - pane.scrollTop") <= 1


def test_a_swipe_over_a_pane_moves_the_page_and_nothing_else(between: Any) -> None:
    page = between(play(toy(), {0: chain(), 1: chain(-4.0)}), width=375, has_touch=True)
    said = page.locator(".av-say").inner_text()
    for place, tab in zip(PLACES[2:], ("Graph", ".grad", "Timeline"), strict=True):
        opened(page, tab)
        assert swiped(page, place, 240) > 180, place
        assert swiped(page, place, -240) < -180, place
    assert page.locator(".av-say").inner_text() == said
