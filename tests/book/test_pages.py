"""Every page of the built book in a browser: as a file and from a server, light and dark, wide and narrow."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.book import looks, screenshots
from tests.browser.frames import reload
from tests.conftest import ROOT
from tests.thorough import THOROUGH


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
    page_name: str, looked: dict[str, looks.Look], options: dict[str, Any], watch: Any, address: Any
) -> None:
    watched = watch(**options)
    # In the dark as a reader who predicts first, else as one who has chosen nothing.
    watched.page.goto(address(page_name, "file") + ("?predict" if options.get("mode") == "dark" else ""))
    wholly = THOROUGH or page_name in looks.WHOLLY
    assert looks.findings(looked if wholly else looks.brief(looked), watched) == {}


def test_the_list_of_chapters_marks_the_page_that_it_leads_to(page_name: str, site: Path) -> None:
    marked = (site / page_name).read_text("utf-8").count('aria-current="page"')
    assert marked == (page_name not in ("index.html", "search.html"))


def test_no_output_of_a_page_says_nan(page_name: str, site: Path) -> None:
    outputs = re.findall(r'<div class="output.*?</div>', (site / page_name).read_text("utf-8"), re.DOTALL)
    assert [output for output in outputs if re.search(r"\bnan\b", output)] == []


def test_a_page_from_a_server_follows_its_readers_mode(watch: Any, address: Any) -> None:
    """As each page from a file does; that each from a server is quiet, test_weight.py finds."""
    watched = watch("dark")
    watched.page.goto(address("index.html", "http"))
    assert looks.findings({"the theme": looks.theme("dark"), **looks.FOLLOWED}, watched) == {}


def test_the_keyboard_reaches_search_theme_notebook_and_text(mode: str, visit: Any) -> None:
    page = visit("chapters/01_graphs.html", mode=mode)
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached |= set(
            page.evaluate(
                """() => { const on = document.activeElement, style = getComputedStyle(on); return [
                    on.matches('.btn-download-notebook') && 'notebook',
                    on.matches('.theme-switch-button') && 'theme',
                    on.matches('.book-find') && 'search',
                    on.closest('article') && 'text', on.closest('.book-side nav') && 'chapters',
                    on !== document.body && style.outlineStyle === 'none' && 'unseen: ' + on.outerHTML.slice(0, 80),
                ].filter(Boolean); }"""
            )
        )
    assert {"notebook", "theme", "search", "text", "chapters"} <= reached
    assert [what for what in reached if what.startswith("unseen")] == []


def test_the_theme_button_turns_the_page_dark_and_the_page_remembers(visit: Any) -> None:
    page = visit("index.html", "http")
    for _ in range(3):
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            break
        page.locator(".theme-switch-button").first.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    reload(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_search_lands_at_the_section_that_it_names_with_the_words_marked(scheme: str, visit: Any) -> None:
    page = visit("search.html", scheme, query="?q=no_sync")
    first = page.locator("#search-results ul.search li").first
    first.wait_for()
    assert "DDP" in first.inner_text()
    assert "no_sync" in first.locator("p mark").first.inner_text()
    first.locator("a").click()
    page.wait_for_selector("article mark")
    anchor = page.evaluate("decodeURIComponent(location.hash.slice(1))")
    assert anchor
    section = page.locator(f"[id='{anchor}']")
    assert section.locator("mark", has_text="no_sync").count()
    page.wait_for_function("id => document.getElementById(id).getBoundingClientRect().top < 200", arg=anchor)
    page.keyboard.press("Escape")
    assert page.locator("article mark").count() == 0
    assert "no_sync" in section.inner_text()


def test_the_search_lists_answers_as_one_types(visit: Any) -> None:
    page = visit("chapters/03_accumulation.html")
    assert page.locator("script[src*=searchindex]").count() == 0, "who does not search loads no index"
    page.keyboard.press("Control+k")
    page.keyboard.type("backward through the graph a second")
    listed = page.locator(".book-listed")
    listed.get_by_role("link", name="A second backward").first.wait_for()
    assert "with “backward through the graph a second”" in listed.get_by_role("status").inner_text()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.book-listed') !== null")
    listed.get_by_role("link", name="A second backward").first.click()
    page.wait_for_selector("article mark")
    assert "01_graphs" in page.url
    page.keyboard.press("Control+k")
    page.keyboard.type("x")
    page.keyboard.press("Backspace")
    page.wait_for_function("document.querySelector('.book-listed').innerText.trim() === ''")


def test_on_a_narrow_screen_the_chapters_come_in_a_drawer_that_escape_closes(visit: Any) -> None:
    page = visit("chapters/01_graphs.html", width=375, has_touch=True)
    nav = page.get_by_role("navigation", name="Chapters")
    assert not nav.is_visible()
    page.get_by_role("button", name="Chapters").click()
    assert nav.is_visible()
    assert nav.locator("[aria-current=page]").inner_text() == "1. Computational graphs"
    page.keyboard.press("Escape")
    page.wait_for_function("!document.querySelector('.book-drawer').open")
    assert not nav.is_visible()


def test_without_scripts_a_page_has_its_chapters_and_no_button_that_does_nothing(visit: Any) -> None:
    page = visit("chapters/01_graphs.html", width=375, java_script_enabled=False)
    assert page.get_by_role("navigation", name="Chapters").is_visible()
    assert page.get_by_role("button", name="Search").count() == 0
    assert page.locator("article h1").is_visible()


def test_the_first_screen_of_a_phone_has_the_title_a_sentence_and_the_figure(visit: Any) -> None:
    page = visit("index.html", wait=".av-hero", width=375, height=812, has_touch=True, reduced_motion="reduce")
    assert page.locator("article h1").bounding_box()["y"] > 0
    sentence = page.locator("article h1 + p").bounding_box()
    assert sentence["y"] + sentence["height"] < 300
    assert page.locator(".av-hero").bounding_box()["y"] < 300
    bottom = page.locator(".av-hero .av-goal").bounding_box()
    assert bottom["y"] + bottom["height"] < 812


@pytest.mark.parametrize(("width", "height"), [(1280, 620), (1920, 620), (375, 1000)])
def test_the_opening_is_seen_and_played_without_scrolling(visit: Any, width: int, height: int) -> None:
    page = visit("index.html", wait=".av-hero", width=width, height=height, reduced_motion="reduce")
    assert len(page.locator("article h1 + p").inner_text().split()) <= 40
    for part in (".av-token", ".av-level", ".av-goal", ".av-says", ".av-b-play", ".av-rate"):
        box = page.locator(f".av-hero {part}").bounding_box()
        assert box["y"] > 0
        assert box["y"] + box["height"] <= height, f"{part} ends at {box['y'] + box['height']}"


def test_the_loop_lab_of_the_front_page_begins_within_two_screens(visit: Any) -> None:
    page = visit("index.html", width=1280)
    lab = page.locator(".av-lab")
    lab.locator(".av-in-code").wait_for()
    assert lab.bounding_box()["y"] <= 2 * page.viewport_size["height"]


def test_without_its_division_the_opening_s_loss_climbs_but_not_at_the_smallest_rate(visit: Any) -> None:
    page = visit("index.html", wait=".av-hero", reduced_motion="reduce")
    rate, ends = page.get_by_role("slider", name="learning rate"), []
    for divided, key in ((True, ""), (False, ""), (False, "Home")):
        before = rate.get_attribute("aria-valuetext")
        if key:
            rate.press(key)
        screenshots.show(page, divided, 16)
        assert (rate.get_attribute("aria-valuetext") != before) is bool(key)
        ends.append((page.locator(".av-ball").bounding_box()["y"], page.locator(".av-says").inner_text()))
    (low, right), (high, wrong), (slow, small) = ends  # upwards y falls
    assert high < min(low, slow) - 50
    assert "from 10 to 43" in wrong and "from 10 to 43" not in small
    assert "Twice" in wrong and "Twice" not in right
    assert page.locator(".av-level").count() == 1


def test_pictures_stand_open_until_a_reader_chooses_to_predict_first(visit: Any, address: Any) -> None:
    page = visit("chapters/09_ddp.html", "http")
    pictures = page.locator("article .cell_output .accumviz")
    assert pictures.count() > 4
    assert all(one.bounding_box() for one in pictures.all())
    assert page.locator(".av-shut:visible").count() == 0
    page.get_by_role("button", name="Predict first").click()
    page.locator(".av-predict[data-av-state=asked]").first.wait_for()
    page.goto(address("chapters/09_ddp.html", "http"))  # remembered
    page.locator(".av-predict[data-av-state=asked]").first.wait_for()
    assert page.locator(".av-recorded:visible").count() == 0
    page.goto(address("chapters/09_ddp.html?show", "http"))
    assert page.locator(".av-recorded:visible").count() > 2


def test_a_caption_stands_beside_a_figure_that_leaves_it_room(visit: Any) -> None:
    page = visit("chapters/03_accumulation.html")
    parts = page.locator("#fig-accumulated")
    figure, caption = (parts.locator(part).first.bounding_box() for part in (".accumviz", "figcaption"))
    assert caption["x"] >= figure["x"] + figure["width"]
    page.set_viewport_size({"width": 1000, "height": 900})
    figure, caption = (parts.locator(part).first.bounding_box() for part in (".accumviz", "figcaption"))
    assert caption["y"] >= figure["y"] + figure["height"]


def test_what_a_reader_copies_has_no_line_numbers(visit: Any) -> None:
    page = visit("chapters/03_accumulation.html", "http", permissions=["clipboard-read", "clipboard-write"])
    cell = page.locator("div.highlight", has=page.locator("pre .linenos")).first
    cell.hover()
    cell.get_by_role("button", name="Copy").click()
    cell.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    numbers = cell.locator(".linenos").all_inner_texts()
    assert (
        copied.strip()
        == "".join(
            line.removeprefix(number)
            for number, line in zip(
                numbers, cell.locator("pre").evaluate("pre => pre.textContent").splitlines(keepends=True), strict=False
            )
        ).strip()
    )


def test_a_printed_page_keeps_its_text_and_leaves_out_the_controls(visit: Any) -> None:
    page = visit("chapters/01_graphs.html")
    page.emulate_media(media="print")
    assert page.locator("article p").first.is_visible()
    assert not page.locator(".btn-download-notebook").first.is_visible()
    assert not page.locator(".book-side").first.is_visible()


def test_the_first_sheet_of_paper_has_the_whole_picture_of_the_front_page(visit: Any) -> None:
    """It had an empty frame, whose panes were on the next one. An A4 sheet holds 718 by 1,046 pixels."""
    page = visit("index.html", wait=".av-hero", width=718)
    page.emulate_media(media="print")
    for part in (".av-loop", ".av-level", ".av-goal", ".av-ball"):
        box = page.locator(f".av-hero {part}").bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 1046


@pytest.mark.parametrize("name", ["03_accumulation", "09_ddp"])
def test_paper_holds_every_figure_and_every_answer(name: str, visit: Any) -> None:
    """The chapter on DDP was printed as 17 pages with neither, for a reader who predicts first."""
    page = visit(f"chapters/{name}.html", query="?predict")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    pictures = page.locator("article .accumviz:not(.av-predict, .accumviz .accumviz)")
    answers = page.locator("article .av-recorded")
    assert pictures.count() > 3
    assert answers.count() == page.locator("article .av-predict").count() > 3
    for kept in (pictures, answers, page.locator("article figure:has(.caption-number)")):
        assert kept.evaluate_all("all => all.filter(one => one.getBoundingClientRect().height < 9).length") == 0


def test_a_link_to_the_front_page_has_a_card_with_its_picture(visit: Any) -> None:
    page = visit("index.html")
    named = "all => all.map(one => [one.name || one.getAttribute('property'), one.content])"
    said = dict(page.locator("meta").evaluate_all(named))
    assert len(said["description"].split()) > 9
    assert said["og:title"] and said["og:description"]
    with Image.open(ROOT / said["og:image"]) as picture:
        assert picture.width >= 600


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("04_recipe.html#sec-tokens", "04_shares.html#sec-tokens"),
        ("04_recipe.html?show#sec-clip", "05_recipe.html?show#sec-clip"),
        ("11_museum.html", "12_museum.html"),
    ],
)
def test_an_old_address_leads_to_the_section_that_it_named(old: str, new: str, watch: Any, address: Any) -> None:
    page = watch().page
    page.goto(f"{address('chapters', 'file')}/{old}")
    page.wait_for_url(lambda url: url.endswith(f"/{new}"))
