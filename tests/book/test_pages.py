"""Every page of the built book in a browser: as a file and from a server, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.book import looks
from tests.thorough import THOROUGH

Open = Callable[..., Any]
Address = Callable[[str, str], str]


@pytest.mark.parametrize(
    ("looked", "options"),
    [
        (looks.LIGHT, {"reduced_motion": "reduce"}),
        (looks.DARK, {"mode": "dark"}),
        (looks.PHONE, {"width": 375, "has_touch": True, "reduced_motion": "reduce"}),
    ],
    ids=["light", "dark", "phone"],
)
def test_a_page_from_a_file_bears_every_look(
    page_name: str, looked: dict[str, looks.Look], options: dict[str, Any], watch: Open, address: Address
) -> None:
    watched = watch(**options)
    watched.page.goto(address(page_name, "file"))
    wholly = THOROUGH or page_name in looks.WHOLLY
    assert looks.findings(looked if wholly else looks.brief(looked), watched) == {}


def test_a_page_from_a_server_follows_its_readers_mode_and_asks_no_other_host(
    page_name: str, watch: Open, address: Address
) -> None:
    watched = watch("dark")
    watched.page.goto(address(page_name, "http"))
    assert looks.findings(looks.SERVED, watched) == {}
    watched.page.emulate_media(color_scheme="light")
    assert looks.findings({"the theme": looks.theme("light"), "complaints": looks.quiet}, watched) == {}


def test_the_keyboard_reaches_search_theme_notebook_and_text(watch: Open, address: Address) -> None:
    watched = watch()
    page = watched.page
    page.goto(address("chapters/01_graphs.html", "file"))
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached |= set(
            page.evaluate(
                """() => { const on = document.activeElement, style = getComputedStyle(on); return [
                    on.matches('.btn-download-notebook') && 'notebook',
                    on.matches('.theme-switch-button') && 'theme',
                    on.matches('.search-button__button, .search-button-field, .search-button') && 'search',
                    on.closest('article') && 'text', on.closest('.bd-sidebar-primary nav') && 'chapters',
                    on !== document.body && style.outlineStyle === 'none' && 'unseen: ' + on.outerHTML.slice(0, 80),
                ].filter(Boolean); }"""
            )
        )
    assert {"notebook", "theme", "search", "text", "chapters"} <= reached
    assert [what for what in reached if what.startswith("unseen")] == []


def test_the_theme_button_turns_the_page_dark_and_the_page_remembers(watch: Open, address: Address) -> None:
    page = watch("light").page
    page.goto(address("index.html", "http"))
    for _ in range(3):
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            break
        page.locator(".theme-switch-button").first.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_search_finds_a_page_without_a_network(scheme: str, watch: Open, address: Address) -> None:
    watched = watch()
    watched.page.goto(address("search.html", scheme) + "?q=accumulation")
    watched.page.wait_for_selector("#search-results ul.search li a")
    links = watched.page.locator("#search-results ul.search li a").evaluate_all("links => links.map(a => a.href)")
    assert any("glossary" in link for link in links)
    assert looks.quiet(watched) == []


def test_the_search_dialog_leads_from_a_chapter_to_the_results(watch: Open, address: Address) -> None:
    page = watch().page
    page.goto(address("chapters/01_graphs.html", "file"))
    page.keyboard.press("Control+k")
    page.keyboard.type("ledger")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results ul.search li a")
    assert "search.html" in page.url


def test_a_printed_page_keeps_its_text_and_leaves_out_the_controls(watch: Open, address: Address) -> None:
    page = watch().page
    page.goto(address("chapters/01_graphs.html", "file"))
    page.emulate_media(media="print")
    assert page.locator("article p").first.is_visible()
    assert not page.locator(".btn-download-notebook").first.is_visible()
    assert not page.locator(".bd-sidebar-primary").first.is_visible()


def test_a_dark_page_is_printed_light_and_then_dark_again(watch: Open, address: Address) -> None:
    page = watch("dark").page
    page.goto(address("chapters/01_graphs.html", "file"))
    theme = "document.documentElement.dataset.theme"
    seen = [page.evaluate(f"dispatchEvent(new Event('{moment}')), {theme}") for moment in ("beforeprint", "afterprint")]
    assert seen == ["light", "dark"]


def test_the_pages_of_which_axe_is_asked_everything_are_there(site: Path) -> None:
    assert [name for name in looks.WHOLLY if not (site / name).exists()] == []


def test_some_chapter_has_an_equation(site: Path) -> None:
    assert any("<math" in page.read_text() for page in site.glob("chapters/*.html"))
