"""A window serves again only where the next page in it meets what a first one would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.windows import Windows

LEAVES: dict[str, Callable[[Page], object]] = {
    "an answer": lambda page: page.evaluate("localStorage.setItem('said', '4')"),
    "another mode": lambda page: page.evaluate("localStorage.setItem('mode', 'dark')"),
    "a second page": lambda page: page.context.new_page(),
    "a clock of its own": lambda page: page.clock.install(time=0),
    "no page": lambda page: page.close(),
    "an answer on a page that it has left": lambda page: (
        page.evaluate("localStorage.setItem('said', '4')"),
        page.goto("about:blank"),
    ),
}


def test_what_was_left_as_it_was_serves_again(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<!doctype html><title>A page</title>", "utf-8")
    windows = Windows(browser)
    contexts = []
    for _ in range(2):
        with windows.lent(600, ("file://",)) as open_page:
            first, second = open_page().page, open_page().page
            first.goto((tmp_path / "page.html").as_uri())
            contexts.append({first.context, second.context})
    assert contexts[0] == contexts[1]
    assert len(contexts[0]) == 2, "two pages of one test share nothing"


@pytest.mark.parametrize("what", LEAVES)
def test_what_is_not_as_it_was_is_closed(what: str, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<!doctype html><title>A page</title>", "utf-8")
    windows = Windows(browser)
    with windows.lent(600, ("file://",)) as open_page:
        page = open_page().page
        page.goto((tmp_path / "page.html").as_uri())
        LEAVES[what](page)
    with windows.lent(600, ("file://",)) as open_page:
        assert open_page().page.context is not page.context


def test_another_mode_or_width_has_a_window_of_its_own(browser: Browser) -> None:
    windows = Windows(browser)
    found = []
    for options in ({}, {"mode": "dark"}, {"width": 375}, {"width": 375, "has_touch": True}):
        with windows.lent(600, ("file://",)) as open_page:
            page = open_page(**options).page
            found.append(page.context)
            assert page.evaluate("innerWidth") == options.get("width", 600)
            assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == ("mode" in options)
    assert len(set(found)) == 4
