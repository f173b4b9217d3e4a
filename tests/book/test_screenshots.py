"""The pictures that people judge by: each widget in each state, none too tall; and README's, never stale."""

from __future__ import annotations

import json
import re
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser

from accumviz.book.explore import explore
from accumviz.book.predict import predict
from accumviz.book.weights import play
from tests.book import screenshots
from tests.conftest import ROOT
from tests.toys import chain, large, toy


def test_the_picture_in_the_readme_is_small_and_plays(mode: str) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    path = ROOT / "assets" / f"opening-{mode}.webp"
    assert f"assets/{path.name}" in readme
    assert path.stat().st_size < 300_000
    with Image.open(path) as picture:
        assert picture.n_frames == len(screenshots.PLAYED)  # type: ignore[attr-defined]


def test_the_picture_in_the_readme_shows_the_recording_of_the_front_page(
    mode: str, browser: Browser, site: Path
) -> None:
    with Image.open(ROOT / "assets" / f"opening-{mode}.webp") as picture:
        kept = json.loads(picture.info["xmp"])
    page = browser.new_page(viewport={"width": 1280, "height": 1300})
    page.goto((site / "index.html").as_uri())
    page.locator(".av-explorer .av-xframe").first.wait_for()
    page.evaluate("hash => { location.hash = hash; }", screenshots.moment(page, *screenshots.PLAYED[-1][:2]))
    page.wait_for_function("document.querySelector('.av-say').textContent.includes('zero_grad on')")
    now = screenshots.told(page)
    page.close()
    assert now == kept, "the front page's figure is another one now: run `make screenshots`, and commit assets/"


def test_a_widget_that_is_about_as_tall_as_the_window_is_pictured_to_its_end(browser: Browser, tmp_path: Path) -> None:
    sheet = "html { scroll-padding-top: 4rem; } .accumviz { background: #0072b2; height: 800px; scroll-margin: 2rem; }"
    (tmp_path / "page.html").write_text(
        f"<!doctype html><title>A page</title><style>{sheet}</style>"
        "<p style='height: 900px'></p><div class='accumviz'></div><p style='height: 1500px'></p>",
        "utf-8",
    )
    page = browser.new_page(viewport={"width": 375, "height": 812})
    page.goto((tmp_path / "page.html").as_uri())
    screenshots.pictures(page, "page", tmp_path)
    page.close()
    with Image.open(tmp_path / "page.widget00.first.0.png") as picture:
        assert picture.height == 800
        assert {picture.convert("RGB").getpixel((9, y)) for y in range(0, 800, 9)} == {(0, 0x72, 0xB2)}


def test_each_widget_is_pictured_in_each_state_and_no_picture_is_taller_than_a_screen(
    browser: Browser, tmp_path: Path
) -> None:
    views = [play(toy(), {0: chain()}), explore(lambda k: toy(), k=[1, 2]), predict("What?", 1), play(large(40, 60))]
    site = "<!doctype html><title>A page</title>" + "".join(view.to_html() for view in views)
    (tmp_path / "page.html").write_text(
        site + "<p style='height: 2500px; background: linear-gradient(red, blue)'>Long</p>", "utf-8"
    )
    page = browser.new_page(viewport={"width": 375, "height": 812})
    page.goto((tmp_path / "page.html").as_uri())
    page.locator(".av-xframe").wait_for()
    screenshots.pictures(page, "page", tmp_path)
    screenshots.index(tmp_path)
    page.set_viewport_size({"width": 1280, "height": 812})
    page.goto((tmp_path / "index.html").as_uri())
    tops = page.locator("figure").evaluate_all("all => all.slice(0, 2).map(one => one.getBoundingClientRect().top)")
    page.close()
    assert tops[0] == tops[1], "narrow pictures stand side by side"
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    states = {".".join(name.split(".")[1:3]) for name in names if "widget" in name}
    assert {"widget00.first", "widget00.next", "widget01.compared", "widget02.first", "widget02.answered"} <= states
    screens = [(tmp_path / name).read_bytes() for name in names if "screen" in name]
    assert len(screens) >= 4 and len(set(screens)) == len(screens), "each screenful is another piece of the page"
    for name in names:
        with Image.open(tmp_path / name) as picture:
            assert picture.height <= screenshots.TALLEST, name
    assert re.findall(r"src='([^']+)'", (tmp_path / "index.html").read_text("utf-8")) == names
